"""Attention over keys and values that are sharded across ranks."""

from __future__ import annotations

import sys
from collections import namedtuple

from . import _core
from ._communicators import warn_of_others
from ._core import Communicator, Sharding
from ._errors import InputError
from ._padding import used_keys
from ._shards import contradiction, refuse
from .mask import arguments_of

TYPE_CHECKING = False  # as type checkers read it; importing typing would double the time of ours
if TYPE_CHECKING:
    from typing import Any, Sequence

    from .mask import Mask
    from ._types import (Alibi, Alignment, Array, Dout, DType, Exchange, KeyDType, Layout, Numbers, Part, Strategy,
                         Stream)

ALONE = object()  # as `comm`, where a function means one process and needs no warning

Phases = namedtuple("Phases", "attend exchange merge")
Phases.__doc__ = "Milliseconds of a run on this rank."


def _after_append(cache_seqlens, new, starts, name="k_new", starts_name="cu_seqlens_q"):
    """Lengths that count the new keys, of lengths before them: `new` has those of all sequences."""
    if cache_seqlens is None:
        return None
    shape = getattr(new, "shape", None)
    if shape is None:
        raise TypeError(f"{name} is of type '{type(new).__name__}'; an array is wanted")
    if len(shape) < 3:
        raise InputError(f"{name} has {len(shape)} dimensions; [tokens, heads, dim] is wanted")
    more = shape[-3]  # of each sequence
    if starts is not None:
        if isinstance(starts, (list, tuple)):
            more = [b - a for a, b in zip(starts, starts[1:])]
        elif getattr(starts, "shape", ()):
            more = starts[1:] - starts[:-1]
        else:
            raise TypeError(f"{starts_name} is of type '{type(starts).__name__}'; an array is wanted")
    if isinstance(cache_seqlens, (list, tuple)):
        if isinstance(more, int):
            return [length + more for length in cache_seqlens]
        if len(more) != len(cache_seqlens):
            raise InputError(f"{starts_name} has {len(more) + 1} entries and cache_seqlens "
                             f"{len(cache_seqlens)}; there is one more of them")
        return [length + int(n) for length, n in zip(cache_seqlens, more)]
    if isinstance(more, list):
        if not getattr(cache_seqlens, "shape", ()) or cache_seqlens.shape[0] != len(more):
            raise InputError(f"{starts_name} and cache_seqlens do not fit: there is one more entry of "
                             f"{starts_name}")
        made = cache_seqlens + 0
        for i, n in enumerate(more):
            made[i] += n
        return made
    if not hasattr(cache_seqlens, "__add__") or isinstance(cache_seqlens, str):
        raise TypeError(f"cache_seqlens is of type '{type(cache_seqlens).__name__}'; an array is wanted")
    if not isinstance(more, int) and tuple(more.shape) != tuple(getattr(cache_seqlens, "shape", more.shape)):
        raise InputError(f"{starts_name} is {list(starts.shape)} and cache_seqlens "
                         f"{list(cache_seqlens.shape)}; [batch + 1] and [batch] are wanted")
    return cache_seqlens + more


def _with_new_keys(cache_seqlens, k_new, cu_seqlens_q, cu_seqlens_k_new):
    """Lengths that count the new keys of a run, whose rows are those of q unless cu_seqlens_k_new says otherwise."""
    if cu_seqlens_k_new is None:
        if len(getattr(k_new, "shape", ())) == 4:
            cu_seqlens_q = None  # each sequence has as many
        return _after_append(cache_seqlens, k_new, cu_seqlens_q)
    return _after_append(cache_seqlens, k_new, cu_seqlens_k_new, starts_name="cu_seqlens_k_new")


def _rotary_dim(q, rotary_cos, rope_theta, rope_scale):
    """Elements of a row that RoPE rotates, where rotary_dim is not given."""
    if rotary_cos is not None:
        shape = getattr(rotary_cos, "shape", None)
        if shape is None:
            raise TypeError(f"rotary_cos is of type '{type(rotary_cos).__name__}'; an array is wanted")
        if len(shape) != 2:
            raise InputError(f"rotary_cos is {list(shape)}; [positions, rotary_dim / 2] is wanted")
        return 2 * shape[1]
    if rope_theta is rope_scale is None:
        return 0
    shape = getattr(q, "shape", None)
    if not shape:
        raise TypeError(f"q is of type '{type(q).__name__}'; an array is wanted")
    return shape[-1]


def _is_recorded(q, k, v, *terms) -> bool:
    """Whether torch's autograd records a call with these arrays."""
    if not any(getattr(array, "requires_grad", False) is True for array in (q, k, v, *terms)):
        return False
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled() and all(isinstance(array, torch.Tensor) for array in (q, k, v))


def attend(
    q: Array,
    k: Array,
    v: Array | None,
    *,
    comm: Communicator | None = None,
    causal: bool | Numbers = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    chunk_lookback: int = 0,
    prefix: int = 0,
    prefix_lens: Numbers | None = None,
    bidirectional: Numbers | None = None,
    clamp_bidirectional: bool = False,
    mask: Mask | None = None,
    causal_alignment: Alignment = "lower_right",
    softcap: float = 0.0,
    alibi_slopes: Numbers | None = None,
    sinks: Numbers | None = None,
    cu_seqlens_q: Numbers | None = None,
    cache_seqlens: Numbers | None = None,
    block_table: Array | None = None,
    cache_batch_idx: Numbers | None = None,
    k_new: Array | None = None,
    v_new: Array | None = None,
    cu_seqlens_k_new: Numbers | None = None,
    q_descale: Numbers | None = None,
    k_descale: Numbers | None = None,
    v_descale: Numbers | None = None,
    out_scale: Numbers | None = None,
    documents: Numbers | None = None,
    cache_leftpad: Numbers | None = None,
    seqused_q: Numbers | None = None,
    seqused_k: Numbers | None = None,
    qq_bias: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_dim: int | None = None,
    rotary_interleaved: bool = False,
    rope_theta: float | None = None,
    rope_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Numbers | None = None,
    dropout_sequences: Numbers | None = None,
    dropout_first_head: int = 0,
    values_in_keys: bool = False,
    indices: Numbers | None = None,
    topk_length: Numbers | None = None,
    index_slots: bool = False,
    kv_dtype: KeyDType | None = None,
    keys: Layout | Sharding = "contiguous",
    queries: Layout | Sharding | None = None,
    results: Part | Layout | Sharding = "all",
    total_keys: int | None = None,
    total_queries: int | None = None,
    key_table: Numbers | None = None,
    query_table: Numbers | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    invariant: bool = False,
    exchange: Exchange = "auto",
    strategy: Strategy = "auto",
    ranks_per_node: int = 0,
    return_lse: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    stream: Stream | None = None,
) -> Any:
    """out = softmax(score(q k^T)) v, exactly, over the keys of all ranks.

    PyTorch's autograd differentiates it with respect to q, k, v, sinks and alibi_slopes; the
    backward is collective, as the call is. Names are flash-attention's where the meaning is the same. Arrays are of any kind (NumPy, also
    with the types of ml_dtypes; PyTorch; JAX; CuPy; any with __dlpack__). They are read in place,
    and results are of the kind of `q`. Small arrays, such as lengths, may be lists on CPUs. The
    first call with such options makes a layer, which is collective, and keeps it. Later calls
    allocate only their results.

    Args:
        q: [tokens, heads, head_dim], or [batch, tokens, heads, head_dim]; float32, float16,
            bfloat16 or fp8; on CPUs also float64, computed in float64 (strategy gather-kv). Every rank has all of it, unless `queries` is given.
        k: this rank's keys, [keys, kv_heads, head_dim], sequence after sequence; or [batch,
            capacity, kv_heads, head_dim]; or, with a block_table, its pages [pages, page, kv_heads,
            head_dim]. kv_heads divides heads. k and v are copied where rows have gaps, or where the
            sequences of a batch do not lie a whole number of keys apart (as in a transposed [keys,
            batch, kv_heads, head_dim]). A cache that k_new is written to is never copied.
        v: as k, with value_dim in the last dimension.
        comm: the ranks; None is this process alone. In one of several ranks of a launcher None
            warns once; comm=longspan.alone() states that it is meant.
        causal: a query sees keys up to its own position; or [batch] flags, one for each sequence,
            bool or integers.
        softmax_scale: of the products; None is 1 / sqrt(head_dim).
        window_size: keys that a query sees to its (left, right), besides its own; -1 is no bound.
        attention_chunk, chunk_lookback: a query sees its own chunk, of attention_chunk keys, and chunk_lookback chunks before
            it (Llama 4); 0 is no chunks. They are counted from the first key behind the padding. Without causal a query
            sees up to the end of its chunk.
        prefix: the first keys of each sequence, which window and chunks do not hide; prefix_lens: [batch] in its
            place, none above it. Not with documents.
        bidirectional: [count, 2] or [batch, count, 2] int64, [begin, end) of ranges of positions whose tokens see each
            other, whatever causal and window say: images, or a prefix. They ascend and do not overlap; sequences with
            fewer end with empty ones. clamp_bidirectional: they do not reach past the window or the chunks on the left.
        mask: one of longspan.mask, in place of causal and of the above.
        causal_alignment: the positions of the queries: "lower_right", the last of their sequence, as
            in flash-attention; "upper_left", the first: row t sees keys j <= t, as torch's is_causal
            counts. Everything follows them: causal, window, ALiBi, qq_bias and RoPE.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: [heads] or [batch, heads]; the score gets -slope * |distance|.
        sinks: [heads] learned sinks, a score each.
        cu_seqlens_q: [batch + 1], where the rows of each sequence begin in a q of three dimensions.
            These and all other lengths, tables and positions are int32 or int64.
        cache_seqlens: [batch], keys of each whole sequence, over all ranks; with k_new without the
            new ones, as in flash-attention.
        block_table: [batch, columns], the rank's own pages of each sequence.
        cache_batch_idx: [batch], which row of a cache [rows, capacity, kv_heads, head_dim] each
            sequence uses. Sequences may share a row, but not where new keys are written.
        k_new, v_new: new keys and values, [tokens, kv_heads, dim] or with batch, on every rank: the
            last of each sequence. Those whose positions are this rank's are written to k and v
            first. There may be more or fewer of them than rows of q.
        cu_seqlens_k_new: [batch + 1], where the new keys of each sequence begin in a k_new of three
            dimensions; None is as cu_seqlens_q.
        q_descale, k_descale, v_descale: [1], [kv_heads] or [batch, kv_heads] float32: a stored fp8
            x means x * descale.
        out_scale: [1] float32: out = result / out_scale.
        documents: [count + 1] starts of documents packed in the one sequence, or [batch, count + 1]
            in each, where fewer documents repeat the end: a query sees only its own document.
            longspan.document_starts makes them of document numbers, one for each token.
        cache_leftpad: [batch], the first keys of each sequence, which are padding that no query
            sees. They count in cache_seqlens, and positions begin at the first of them.
            longspan.padding makes it of a mask of tokens.
        seqused_q: [batch], the rows of each sequence of q that are used, its first ones; the last of
            them is the last token of the sequence. The result of the others is 0, their lse -inf.
        seqused_k: as cache_seqlens.
        qq_bias: [width, width] added to the scores between the new tokens.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], float32, float16 or bfloat16: RoPE. Each
            row of q is rotated by its position in the whole sequence, and k_new likewise before it is
            written. Other keys are taken as rotated.
        rotary_dim: the first elements of a row that are rotated, an even number. None is what the
            tables have columns for; without tables head_dim where rope_theta or rope_scale is given,
            and otherwise 0, no RoPE.
        rotary_interleaved: pairs are (2i, 2i + 1); False is (i, i + rotary_dim / 2).
        rope_theta, rope_scale: without tables, pair i is rotated by position / rope_scale *
            rope_theta ** (-2 i / rotary_dim); None is 10000 and 1.
        dropout_p: drop weights with this probability, in [0, 1), for training; the others are divided
            by 1 - dropout_p. lse has no dropout. Which weights are dropped is a function of seed,
            sequence, head and positions alone: the same for any number of ranks.
        dropout_seed: seed, or [seed, offset], int64; None takes one that rank 0 draws.
        dropout_sequences: [batch] numbers of the sequences for that function; None is 0, 1 ...
        dropout_first_head: the number of the first head there, for a part of a model's heads.
        values_in_keys: v is the first columns of k, the same memory, on every rank (latent attention, MLA): where keys
            travel, each travels once, with its value. Without it such a v travels beside k.
        indices: sparse attention: [tokens, columns] or with batch, the keys that each row sees, positions in its sequence; or
            [tokens, kv_heads, columns] for each kv head. One below 0 or past the end is nobody, one that is given twice counts
            twice. On every rank those of all rows; a rank attends to the keys that it holds. Masks are left out.
        topk_length: [tokens] or [batch, tokens], how many of a row's indices count, the first ones.
        index_slots: indices are rows of this rank's own cache, page * page size + row, in a k of pages without a block_table
            (or rows of a dense k); each rank gives its own, and no lengths are needed.
        kv_dtype: of rows of latent keys that carry their scales, their format: "latent656", "latent656_pow2",
            "latent584", "latent528" or "latent352". k is then uint8 with the bytes of a row in its last dimension, and
            v is None. None is the type of k.
        keys: how keys are dealt out to ranks: the name of a layout, or a Sharding. "contiguous" is
            parts in rank order. With total_keys or cache_seqlens these are the parts that
            longspan.shard cuts, at multiples of 128 keys; only these give the same bits on any
            number of ranks. Without either, parts have any lengths, and the ranks are asked for
            them.
        queries: how query rows are dealt out, likewise; None is that every rank has all. Rows whose
            strides are not those of a dense q are copied.
        results: what a rank then gets of the result: "all" of it; its "heads", [heads r / P, heads
            (r + 1) / P) for rank r of P; or rows, by the name of a layout or a Sharding.
        total_keys: keys of the whole sequence (with k_new the new ones too), over all ranks, where
            cache_seqlens is not given. None asks all ranks, which costs a round of messages.
        total_queries: likewise the rows of the whole q, with `queries`.
        key_table, query_table: tables of two layouts. ranges: [batch, ranks + 1], where each rank's
            part begins; flat for one sequence, as for queries. listed: the position of each of this
            rank's own keys or rows.
        max_seqlen_q, max_seqlen_k: no sequence is longer; on GPUs they save workspace.
        invariant: the same bits for 1, 2, 4 ... 64 ranks also where that is not the fastest.
        exchange: how states travel between GPUs: "auto", "peer-buffers", "peer-buffers-apart", "gather".
        strategy: a name of strategies().
        ranks_per_node: for strategies of two levels, such as "heads+ring-kv": a node is this many
            neighbouring ranks; 0: the ranks that share a machine.
        return_lse: return (out, lse).
        out: [tokens, heads, value_dim] or with batch, as q; written in place of a new array.
        lse: [tokens, heads] or [batch, tokens, heads] float32, natural logarithms; likewise. Of a
            float64 q it is float64.
        stream: on GPUs the stream to queue on; None is the current one of the arrays' library.

    Returns:
        out, or with return_lse (out, lse). A row that sees no key is 0, its lse -inf. On GPUs the
        work is queued; comm.wait(stream) waits and raises what went wrong.

    Raises:
        InputError: arrays that do not fit; the message names the argument.
        UsageError: options that make no sense, or that differ between ranks.
        UnsupportedError: what this build, device or strategy lacks; derivatives of a call with other
            arguments than causal, causal_alignment, softmax_scale, window_size, mask and what it has, softcap, alibi_slopes, sinks,
            documents, cache_leftpad, keys, queries, total_keys, total_queries, invariant, strategy and return_lse.
        RankError: a rank that died or did not come, with .rank and .step.
        TypeError: an argument of the wrong Python type.

    >>> import numpy as np, longspan
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((5, 8, 64), dtype=np.float32)      # the last 5 tokens
    >>> k = rng.standard_normal((100, 2, 64), dtype=np.float32)    # of a sequence of 100
    >>> v = rng.standard_normal((100, 2, 64), dtype=np.float32)
    >>> out, lse = longspan.attend(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((5, 8, 64), (5, 8))
    """
    if mask is not None:
        (causal, window_size, attention_chunk, chunk_lookback, prefix, prefix_lens, bidirectional,
         clamp_bidirectional) = arguments_of(mask, dict(
             causal=causal, window_size=window_size, attention_chunk=attention_chunk, chunk_lookback=chunk_lookback,
             prefix=prefix, prefix_lens=prefix_lens, bidirectional=bidirectional,
             clamp_bidirectional=clamp_bidirectional)).values()
        mask = None
    if _is_recorded(q, k, v, sinks, alibi_slopes):
        arguments = locals()
        from .torch._attention import attend_tensors

        return attend_tensors(**arguments)
    if v is None and _are_latent_rows(kv_dtype):
        v = k
    if comm is ALONE:
        comm, whole_keys, whole_queries, message = None, None, None, None
    else:
        if comm is None:
            warn_of_others("attend")
        whole_keys, whole_queries, message = contradiction(
            q, k, v, comm=comm, keys=keys, queries=queries, cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q,
            block_table=block_table if cache_batch_idx is None else cache_batch_idx, k_new=k_new, v_new=v_new,
            total_keys=total_keys, total_queries=total_queries)
    if seqused_k is not None:
        cache_seqlens = used_keys(k, cache_seqlens, seqused_k, k_new)
    if k_new is not None:
        cache_seqlens = _with_new_keys(cache_seqlens, k_new, cu_seqlens_q, cu_seqlens_k_new)
    if index_slots is True and cache_seqlens is None and total_keys is None:
        total_keys = 0  # nothing is read of it
    if rotary_dim is None:
        rotary_dim = _rotary_dim(q, rotary_cos, rope_theta, rope_scale)
    return _core.attend(
        q=q, k=k, v=v, out=out, lse=lse, total_keys=total_keys, total_queries=total_queries,
        cu_seqlens_q=cu_seqlens_q, cache_seqlens=cache_seqlens, causal=causal, block_table=block_table,
        key_table=key_table, query_table=query_table, k_new=k_new, v_new=v_new, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, out_scale=out_scale, sinks=sinks, alibi_slopes=alibi_slopes,
        qq_bias=qq_bias, documents=documents, cache_leftpad=cache_leftpad, seqused_q=seqused_q,
        skip_decode=False, return_lse=return_lse, stream=stream,
        whole_keys=whole_keys, whole_queries=whole_queries, contradiction=message, comm=comm,
        window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, max_seqlen_k=max_seqlen_k,
        max_seqlen_q=max_seqlen_q, invariant=invariant, strategy=strategy, ranks_per_node=ranks_per_node,
        exchange=exchange, keys=keys, queries=queries, results=results, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, rotary_dim=rotary_dim, rotary_interleaved=rotary_interleaved,
        rope_theta=10000.0 if rope_theta is None else rope_theta, rope_scale=1.0 if rope_scale is None else rope_scale,
        causal_alignment=causal_alignment, cache_batch_idx=cache_batch_idx, cu_seqlens_k_new=cu_seqlens_k_new,
        dropout_p=dropout_p, dropout_seed=dropout_seed, dropout_sequences=dropout_sequences,
        dropout_first_head=dropout_first_head, values_in_keys=values_in_keys, indices=indices, topk_length=topk_length,
        index_slots=index_slots, attention_chunk=attention_chunk, chunk_lookback=chunk_lookback, prefix=prefix,
        prefix_lens=prefix_lens, bidirectional=bidirectional, clamp_bidirectional=clamp_bidirectional,
        kv_dtype=kv_dtype)


def _are_latent_rows(dtype) -> bool:
    """Whether it names rows that carry their scales, which hold the values too."""
    return isinstance(dtype, str) and dtype.startswith("latent")


def _given_nothing(function, **more) -> dict:
    """What the extension module gets of a call without optional arguments, for callers that have checked theirs."""
    made = function.__kwdefaults__ | dict(skip_decode=False, whole_keys=None, whole_queries=None, contradiction=None) | more
    for name in ("seqused_k", "mask"):
        made.pop(name, None)
    return made


ATTEND = _given_nothing(attend, rotary_dim=0, rope_theta=10000.0, rope_scale=1.0)


class Attention:
    """A layer: options that are fixed once, for many runs.

    Making one is collective: it checks that all ranks gave the same options, and allocates the
    workspace. Running it allocates only results, and on GPUs waits for nothing. With `out` given it
    can be captured in a CUDA graph.

    Args:
        comm: the ranks; None is this process alone, on CPUs.
        heads, kv_heads, head_dim, value_dim: sizes; where None, kv_heads is heads and value_dim is
            head_dim.
        values_in_keys: as in attend. A run may then leave v out (None).
        top_k: above 0: each row of a run names the keys that it sees, at most so many (indices).
        index_slots: as in attend.
        mask: one of longspan.mask, in place of causal and the like. Its arrays are those of runs that give none.
        dtype: of the products: "float32", "float16" or "bfloat16", on CPUs also "float64"; or such a
            dtype of NumPy or torch. q_dtype, kv_dtype, out_dtype: of the arrays where they differ, as for fp8; kv_dtype also
            names rows of latent keys that carry their scales, as in attend.
        causal, causal_alignment, softmax_scale, window_size, attention_chunk, chunk_lookback, prefix, clamp_bidirectional,
            softcap, keys, queries, results, invariant, strategy, exchange, ranks_per_node: as in attend, but contiguous parts are always those that
            longspan.shard cuts. For others use ranges, with a key_table and a query_table in each
            run.
        rotary_dim: the first elements of a row that RoPE rotates, an even number; 0 is none.
            rotary_interleaved, rope_theta, rope_scale: as in attend. A run may give tables in their
            place.
        alibi: what slopes multiply: "query", the distance of query and key; "sqrt", its square
            root; or "context", the distance to the first query, as serving engines do.
        max_queries: most query rows in one run, over the batch (with `queries`: on one rank).
        max_batch: most sequences in one run.
        max_seqlen_k, max_seqlen_q: no sequence has more keys, or queries in one run; 0 is unknown.
        max_total_keys: most keys of the sequences of one run together, over all ranks; 0: each may have
            max_seqlen_k. On GPUs strategies whose keys travel send this many.
        threads: on CPUs; 0 is LONGSPAN_THREADS, or this rank's share of the cores.
        check_arrays: on GPUs, check lengths and tables there; wait() raises what was found.
        profile: time the phases of each run.
        tf32: on GPUs, float32 products may be rounded to TF32.
        fp8_products: on Hopper, long e4m3 queries may be multiplied without conversion.
        bf16_products: on CPUs, bfloat16 may be multiplied by the CPU's own instructions.
        gradients: allocate what backward needs, and take a strategy that has it; needs max_seqlen_k.
        dout: what ranks that all have the queries give to backward: "replicated", the gradients of the
            whole loss, the same on all ranks; or "partial", those of each rank's part of the loss, which
            are added up in the order of the ranks.
        max_qq_gradient: the greatest width of a qq_bias whose gradient is asked for; 0: it is not.
        dropout_p, dropout_first_head: as in attend. Without a dropout_seed of its own a run takes the layer's, which
            rank 0 drew, with an offset that counts such runs.

    Raises:
        UsageError, UnsupportedError, RankError, TypeError: as attend.

    >>> import numpy as np, longspan
    >>> layer = longspan.Attention(heads=4, head_dim=64, dtype="float32", causal=True, max_queries=8)
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 4, 64), dtype=np.float32)
    >>> layer(q, k, v).shape
    (8, 4, 64)
    """

    def __init__(self, comm: Communicator | None = None, *, heads: int, head_dim: int,
                 kv_heads: int | None = None, value_dim: int | None = None,
                 dtype: DType = "bfloat16", q_dtype: DType | None = None, kv_dtype: KeyDType | None = None,
                 out_dtype: DType | None = None, causal: bool = False, softmax_scale: float | None = None,
                 window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, chunk_lookback: int = 0,
                 prefix: int = 0, clamp_bidirectional: bool = False, mask: Mask | None = None,
                 causal_alignment: Alignment = "lower_right",
                 softcap: float = 0.0, rotary_dim: int = 0, rotary_interleaved: bool = False,
                 rope_theta: float = 10000.0,
                 rope_scale: float = 1.0, alibi: Alibi = "query", keys: Layout | Sharding = "contiguous",
                 queries: Layout | Sharding | None = None, results: Part | Layout | Sharding = "all",
                 max_queries: int = 1, max_batch: int = 1,
                 max_seqlen_k: int = 0, max_total_keys: int = 0, max_seqlen_q: int = 0,
                 invariant: bool = False, strategy: Strategy = "auto", exchange: Exchange = "auto", threads: int = 0,
                 check_arrays: bool = False, profile: bool = False, tf32: bool = False,
                 fp8_products: bool = False, bf16_products: bool = False, ranks_per_node: int = 0,
                 gradients: bool = False, dout: Dout = "replicated", max_qq_gradient: int = 0,
                 dropout_p: float = 0.0, dropout_first_head: int = 0, values_in_keys: bool = False,
                 top_k: int = 0, index_slots: bool = False):
        self._of_mask = {}
        if mask is not None:
            made = arguments_of(mask, dict(
                causal=causal, window_size=window_size, attention_chunk=attention_chunk, chunk_lookback=chunk_lookback,
                prefix=prefix, prefix_lens=None, bidirectional=None, clamp_bidirectional=clamp_bidirectional))
            causal, window_size, attention_chunk = made["causal"], made["window_size"], made["attention_chunk"]
            chunk_lookback, prefix = made["chunk_lookback"], made["prefix"]
            clamp_bidirectional = made["clamp_bidirectional"]
            self._of_mask = {name: made[name] for name in ("prefix_lens", "bidirectional")}
        if comm is None:
            warn_of_others("Attention")
        self._dealt_out = dict(keys=keys, queries=queries)
        self._columns = (head_dim if value_dim is None else value_dim) if values_in_keys is True else None
        self._holds_values = _are_latent_rows(kv_dtype)
        self._layer = _core.layer(
            comm=comm, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype,
            q_dtype=q_dtype, kv_dtype=kv_dtype, out_dtype=out_dtype, tf32=tf32, fp8_products=fp8_products,
            bf16_products=bf16_products, causal=causal, window_size=window_size, softmax_scale=softmax_scale,
            softcap=softcap, alibi=alibi, max_queries=max_queries, max_batch=max_batch, max_seqlen_k=max_seqlen_k,
            max_total_keys=max_total_keys, max_seqlen_q=max_seqlen_q, invariant=invariant,
            check_arrays=check_arrays, profile=profile, strategy=strategy, ranks_per_node=ranks_per_node,
            exchange=exchange, threads=threads, keys=keys, queries=queries, results=results, rotary_dim=rotary_dim,
            rotary_interleaved=rotary_interleaved, rope_theta=rope_theta, rope_scale=rope_scale,
            gradients=gradients, dout=dout, max_qq_gradient=max_qq_gradient, causal_alignment=causal_alignment,
            dropout_p=dropout_p, dropout_first_head=dropout_first_head, values_in_keys=values_in_keys, top_k=top_k,
            index_slots=index_slots, attention_chunk=attention_chunk, chunk_lookback=chunk_lookback, prefix=prefix,
            clamp_bidirectional=clamp_bidirectional)

    def _arrays_of_mask(self, prefix_lens: Numbers | None, bidirectional: Numbers | None) -> dict:
        """Those of a run, or in their place those of the layer's mask."""
        given = dict(prefix_lens=prefix_lens, bidirectional=bidirectional)
        return {name: self._of_mask.get(name) if value is None else value for name, value in given.items()}

    def _values(self, k: Array, v: Array | None) -> Array | None:
        """v, or where it is left out the first columns of k."""
        if v is not None or self._columns is None:
            return v
        return k if self._holds_values else k[..., :self._columns]

    def __call__(self, q: Array, k: Array, v: Array | None, *, causal: Numbers | None = None,
                 cu_seqlens_q: Numbers | None = None, cache_seqlens: Numbers | None = None,
                 block_table: Array | None = None, cache_batch_idx: Numbers | None = None,
                 k_new: Array | None = None, v_new: Array | None = None,
                 cu_seqlens_k_new: Numbers | None = None, q_descale: Numbers | None = None,
                 k_descale: Numbers | None = None, v_descale: Numbers | None = None,
                 out_scale: Numbers | None = None, alibi_slopes: Numbers | None = None,
                 sinks: Numbers | None = None, qq_bias: Array | None = None,
                 documents: Numbers | None = None, bidirectional: Numbers | None = None,
                 prefix_lens: Numbers | None = None, cache_leftpad: Numbers | None = None,
                 seqused_q: Numbers | None = None, seqused_k: Numbers | None = None, rotary_cos: Array | None = None,
                 rotary_sin: Array | None = None, total_keys: int | None = None,
                 total_queries: int | None = None, key_table: Numbers | None = None,
                 query_table: Numbers | None = None, dropout_seed: Numbers | None = None,
                 dropout_sequences: Numbers | None = None, indices: Numbers | None = None,
                 topk_length: Numbers | None = None, skip_decode: bool = False,
                 return_lse: bool = False, out: Array | None = None, lse: Array | None = None,
                 stream: Stream | None = None) -> Any:
        """One run; arguments as in attend. `causal`: [batch] flags in place of the layer's.
        `skip_decode`: sequences of one query are skipped, their rows left as they are."""
        v = self._values(k, v)
        whole_keys, whole_queries, message = contradiction(
            q, k, v, comm=self._layer.comm(), cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q,
            block_table=block_table if cache_batch_idx is None else cache_batch_idx, k_new=k_new, v_new=v_new,
            total_keys=total_keys, total_queries=total_queries, **self._dealt_out)
        if seqused_k is not None:
            cache_seqlens = used_keys(k, cache_seqlens, seqused_k, k_new)
        if k_new is not None:
            cache_seqlens = _with_new_keys(cache_seqlens, k_new, cu_seqlens_q, cu_seqlens_k_new)
        return _core.run_layer(
            layer=self._layer, q=q, k=k, v=v, out=out, lse=lse, total_keys=total_keys, total_queries=total_queries,
            cu_seqlens_q=cu_seqlens_q, cache_seqlens=cache_seqlens, causal=causal, block_table=block_table,
            key_table=key_table, query_table=query_table, k_new=k_new, v_new=v_new, q_descale=q_descale,
            k_descale=k_descale, v_descale=v_descale, out_scale=out_scale, sinks=sinks, alibi_slopes=alibi_slopes,
            qq_bias=qq_bias, documents=documents, cache_leftpad=cache_leftpad, seqused_q=seqused_q,
            skip_decode=skip_decode, return_lse=return_lse, stream=stream,
            whole_keys=whole_keys, whole_queries=whole_queries, contradiction=message, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cu_seqlens_k_new=cu_seqlens_k_new,
            dropout_seed=dropout_seed, dropout_sequences=dropout_sequences, indices=indices, topk_length=topk_length,
            **self._arrays_of_mask(prefix_lens, bidirectional))

    def backward(self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *,
                 dlse: Array | None = None, dq: Array | None = None, dk: Array | None = None,
                 dv: Array | None = None, dsinks: Array | None = None,
                 dalibi_slopes: Array | None = None, dqq_bias: Array | None = None,
                 dk_before_rope: bool = False, accumulate: bool = False,
                 causal: Numbers | None = None, cu_seqlens_q: Numbers | None = None,
                 cache_seqlens: Numbers | None = None, alibi_slopes: Numbers | None = None,
                 sinks: Numbers | None = None, qq_bias: Array | None = None,
                 documents: Numbers | None = None, bidirectional: Numbers | None = None,
                 prefix_lens: Numbers | None = None, cache_leftpad: Numbers | None = None,
                 seqused_q: Numbers | None = None, seqused_k: Numbers | None = None,
                 rotary_cos: Array | None = None, rotary_sin: Array | None = None,
                 total_keys: int | None = None, total_queries: int | None = None,
                 key_table: Numbers | None = None, query_table: Numbers | None = None,
                 dropout_seed: Numbers | None = None, dropout_sequences: Numbers | None = None,
                 stream: Stream | None = None) -> Any:
        """The gradients of one run of a layer with gradients=True. Collective.

        The method starts from out and lse (FlashAttention-2, arXiv 2307.08691). Sums are float32,
        with one rounding at the end. The layer keeps nothing of a run, so several may await their
        backward. Rows that see nothing, and keys that nobody sees, get 0. With RoPE dq is the
        gradient of q before its rotation, and dk that of k as the run took it, rotated, or with
        dk_before_rope of k before that.

        Args:
            dout: the gradient of out, in its shape; float32, float16 or bfloat16. If every rank has
                all the queries, as the layer's `dout` says. In a layer of float64 all arrays are
                float64, and so are the sums.
            q, k, v: as the run had them.
            out, lse: as the run returned them.
            dlse: the gradient of lse, in its shape, float32.
            dq, dk, dv: arrays in the shapes of q, k and v, in their types or float32; written in
                place of new ones. Keys past the sequences stay as they are; in new arrays they are 0.
                Where v is the first columns of k, the same memory, dk is the gradient of both, and
                there is no dv.
            dsinks: [heads], an array for the gradient of the sinks, over the rows of all ranks; float32,
                or as the sinks. None leaves it out.
            dalibi_slopes, dqq_bias: the same for the gradients of alibi_slopes and qq_bias, in their
                shapes; the latter for a layer with a max_qq_gradient.
            dk_before_rope: with RoPE: dk is the gradient of k before the rotation that the caller made,
                by the same angles.
            accumulate: add to what the arrays hold, before the rounding.
            causal and the others: as the run had them. With dropout_p a dropout_seed is needed: that of the
                run, or the layer's own (dropout_seed).

        Returns:
            (dq, dk, dv); dv is None where v is the first columns of k.

        Raises:
            UsageError: the layer was made without gradients, or ranks differ.
            UnsupportedError: what has no gradient: fp8, pages, a cache that is appended to.
            InputError: arrays that do not fit; the message names the argument.

        >>> import numpy as np, longspan
        >>> layer = longspan.Attention(heads=4, head_dim=64, dtype="float32", causal=True, max_queries=8,
        ...                            max_seqlen_k=8, gradients=True)
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 4, 64), dtype=np.float32)
        >>> out, lse = layer(q, k, v, return_lse=True)
        >>> dq, dk, dv = layer.backward(np.ones_like(out), q, k, v, out, lse)
        >>> dk.shape
        (8, 4, 64)
        """
        whole_keys, whole_queries, message = contradiction(
            q, k, v, comm=self._layer.comm(), cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q,
            block_table=None, k_new=None, v_new=None, total_keys=total_keys, total_queries=total_queries,
            **self._dealt_out)
        if seqused_k is not None:
            cache_seqlens = used_keys(k, cache_seqlens, seqused_k, None)
        return _core.backward_layer(
            layer=self._layer, q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse, dq=dq, dk=dk, dv=dv,
            dsinks=dsinks, dalibi_slopes=dalibi_slopes, dqq_bias=dqq_bias, dk_before_rope=dk_before_rope,
            accumulate=accumulate, total_keys=total_keys, total_queries=total_queries, cu_seqlens_q=cu_seqlens_q,
            cache_seqlens=cache_seqlens, causal=causal, key_table=key_table, query_table=query_table, sinks=sinks,
            alibi_slopes=alibi_slopes, qq_bias=qq_bias, documents=documents, cache_leftpad=cache_leftpad,
            seqused_q=seqused_q, skip_decode=False, return_lse=False, stream=stream, whole_keys=whole_keys,
            whole_queries=whole_queries, contradiction=message, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            dropout_seed=dropout_seed, dropout_sequences=dropout_sequences,
            **self._arrays_of_mask(prefix_lens, bidirectional), **_WITHOUT_GRADIENT)

    def append(self, k_new: Array, v_new: Array | None, k: Array, v: Array | None, *,
               cu_seqlens_q: Numbers | None = None, cache_seqlens: Numbers | None = None,
               block_table: Array | None = None, cache_batch_idx: Numbers | None = None,
               total_keys: int | None = None, key_table: Numbers | None = None,
               k_descale: Numbers | None = None, v_descale: Numbers | None = None,
               rotary_cos: Array | None = None,
               rotary_sin: Array | None = None, stream: Stream | None = None) -> None:
        """Writes the new keys and values whose positions are this rank's to its k and v.

        Args:
            k_new, v_new: [tokens, kv_heads, dim] or with batch, on every rank. v_new is None where v
                is the first columns of k.
            k, v: the cache, as in attend.
            cu_seqlens_q: [batch + 1], where the new tokens of each sequence begin.
            cache_seqlens: [batch], keys before the new ones, or
            total_keys: keys of the one sequence, the new ones included.
            rotary_cos, rotary_sin: as in attend; k_new is rotated where the layer has a rotary_dim.
        """
        v = self._values(k, v)
        table = block_table if cache_batch_idx is None else cache_batch_idx
        _, _, message = contradiction(None, k, v, comm=self._layer.comm(), block_table=table, k_new=k_new, v_new=v_new,
                                      keys=self._dealt_out["keys"], queries=None)
        refuse(message)
        cache_seqlens = _after_append(cache_seqlens, k_new, cu_seqlens_q)
        self._layer.append(k_new=k_new, v_new=v_new, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cache_seqlens=cache_seqlens,
                           block_table=block_table, cache_batch_idx=cache_batch_idx, total_keys=total_keys,
                           key_table=key_table, k_descale=k_descale, v_descale=v_descale, rotary_cos=rotary_cos,
                           rotary_sin=rotary_sin, stream=stream)

    def wait(self, stream: Stream | None = None) -> None:
        """Waits for the stream, at most until the deadline, and raises what went wrong."""
        self._layer.wait(stream=stream)

    def shard(self, length: int) -> "_core.Shard":
        """What this rank holds of a sequence of `length` keys."""
        length, rank, ranks = self._layer.shard(length)
        return self._layer.keys().shard(length, rank, ranks)

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._layer.comm()

    @property
    def strategy(self) -> str:
        """The strategy that was chosen."""
        return self._layer.strategy()

    @property
    def exchange(self) -> str:
        """How states travel."""
        return self._layer.exchange()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace on this rank."""
        return self._layer.workspace_bytes()

    @property
    def dropout_seed(self) -> tuple[int, int]:
        """Seed and offset of the last run that was given no dropout_seed, for its backward. The same on all ranks."""
        return self._layer.dropout_seed()

    @property
    def phases(self) -> Phases:
        """Where the time of the last run went, with profile=True."""
        return Phases(**self._layer.phases())


_WITHOUT_GRADIENT = dict.fromkeys(("block_table", "k_new", "v_new", "q_descale", "k_descale", "v_descale", "out_scale",
                                   "cache_batch_idx", "cu_seqlens_k_new", "indices", "topk_length"))
BACKWARD = _given_nothing(Attention.backward, return_lse=False, **_WITHOUT_GRADIENT)


def strategies() -> Sequence[str]:
    """The names of all strategies.

    >>> import longspan
    >>> "gather-states" in longspan.strategies()
    True
    """
    return _core.strategies()
