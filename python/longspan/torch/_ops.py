"""The operators torch.ops.longspan.*, which torch.compile sees.

Tensors are [batch, tokens, heads, dim] or [tokens, heads, dim], as in longspan.attend; a
communicator is given by its name (a string). Fake implementations compute shapes; written arguments
are declared. The kernels here refuse tensors that require grad; _train.py has the operators of
autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

import longspan
from longspan import InputError, UnsupportedError

from . import _transforms
from ._groups import known
from ._layouts import Lengths, check_own, resolve, rule_of

library = torch.library.Library("longspan", "DEF")

_OPTIONS = """*, bool causal=False, str causal_alignment='lower_right',
    float? softmax_scale=None, SymInt window_left=-1,
    SymInt window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None,
    SymInt attention_chunk=0, SymInt chunk_lookback=0, SymInt prefix=0, bool clamp_bidirectional=False,
    Tensor? documents=None, Tensor? bidirectional=None, Tensor? prefix_lens=None, Tensor? cache_leftpad=None, Tensor? seqused_q=None,
    Tensor? cu_seqlens_q=None, Tensor? cache_seqlens=None,
    Tensor? block_table=None, Tensor? cache_batch_idx=None, Tensor? cu_seqlens_k_new=None,
    Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, str? kv_dtype=None,
    float dropout_p=0.0, Tensor? dropout_seed=None,
    Tensor? indices=None, Tensor? topk_length=None, bool index_slots=False,
    str keys='contiguous', str queries='', SymInt? total_keys=None,
    SymInt? total_queries=None, bool equal_lengths=False, bool invariant=False,
    str strategy='auto', str exchange='auto'"""

_MOST_BLOCK = 512  # keys of an interleaved block, which gather-kv takes
_OF_STATES = ("gather-states", "scatter-states", "ring-q")  # strategies by which no keys travel


_SMALL = ("alibi_slopes", "sinks", "documents", "bidirectional", "prefix_lens", "cache_leftpad",
          "seqused_q", "q_descale", "k_descale", "v_descale")
_OF_SEQUENCES = ("documents", "bidirectional", "prefix_lens", "cache_leftpad", "seqused_q")  # of each sequence


def _dense(t: Tensor) -> Tensor:
    """New keys as the library reads them: each sequence begins where the one before it ends."""
    if t.stride(-1) == 1 and (t.dim() != 4 or t.shape[0] <= 1 or t.stride(0) == t.shape[1] * t.stride(1)):
        return t
    return t.contiguous()


def _keys_as_read(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as the library reads them: rows are dense, and sequences are a whole number of keys apart, the
    same in both."""
    steps = k.stride()
    if steps == v.stride() and steps[-1] == 1 and 0 not in steps and (len(steps) == 3 or steps[0] % steps[1] == 0):
        return k, v
    if _can_be_read(k) and _can_be_read(v) and _same_pitch(k, v):
        return k, v
    return k.contiguous(), v.contiguous()


def _can_be_read(t: Tensor) -> bool:
    steps = t.stride()
    if steps[-1] != 1:
        return False
    if t.shape[-3] <= 1:  # here the step between keys is that of sequences or heads
        return 0 not in steps
    return steps[-3] != 0 and (t.dim() == 3 or t.shape[0] <= 1 or steps[0] % steps[1] == 0)


def _same_pitch(k: Tensor, v: Tensor) -> bool:
    return k.dim() != 4 or v.dim() != 4 or k.shape[0] <= 1 or k.shape[1] <= 1 or (
        k.stride(0) * v.stride(1) == v.stride(0) * k.stride(1))


def _rounded(length: int) -> int:
    """A size of a layer, at most an eighth above the length, so that similar lengths share a layer."""
    step = max(128, 1 << max(0, length.bit_length() - 4))
    return max(1, -(-length // step)) * step


def _attend(q, k, v, comm, *, keys="contiguous", queries="", total_keys=None, total_queries=None,
            equal_lengths=False, window_left=-1, window_right=-1, cu_seqlens_q=None, cache_seqlens=None,
            block_table=None, cache_batch_idx=None, strategy="auto", return_lse=False, out=None, k_new=None,
            v_new=None, counts=None, call=longspan.attend, **options):
    """The common part of operators that attend; see longspan.attend. `options` are passed to it unchanged, `counts` to
    _shares; `call` takes its place."""
    if torch.is_grad_enabled():
        _refuse_grad(q=q, k=k, v=v, k_new=k_new, v_new=v_new, out=out, **options)
    world = known(comm)
    for name in _SMALL:
        if name in options and isinstance(options[name], Tensor):
            options[name] = options[name].contiguous()
    options |= dict(comm=world.comm, window_size=(window_left, window_right), return_lse=return_lse, out=out)
    if not (cache_seqlens is block_table is cache_batch_idx is cu_seqlens_q is k_new is None):
        if world.size > 1 and keys == "contiguous":
            _refuse_contiguous()
        if queries or q.stride(-1) != 1:
            q = q.contiguous()
        if k_new is not None:
            k_new, v_new = _dense(k_new), _dense(v_new)
        return call(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cache_seqlens=cache_seqlens, block_table=block_table,
            cache_batch_idx=cache_batch_idx, k_new=k_new, v_new=v_new, keys=rule_of(keys),
            queries=rule_of(queries) if queries else None,
            total_keys=total_keys, total_queries=total_queries, strategy=strategy, **options)
    dims = q.dim()
    if k.dim() != dims or dims not in (3, 4):
        raise InputError(f"q has {dims} dimensions and k {k.dim()}; both have 3, or 4 with a batch")
    if dims == 4:
        if q.shape[0] != k.shape[0]:
            raise InputError(f"q has {q.shape[0]} sequences and k has {k.shape[0]}")
        if q.shape[0] == 0 and out is None:
            return _results(q, v, return_lse)  # no sequences, on every rank
    if q.stride(-1) != 1:
        q = q.contiguous()
    k, v = _keys_as_read(k, v)
    if world.size == 1:
        if equal_lengths:
            _check_lengths(q.shape[-3], k.shape[-3] if total_keys is None else total_keys)
        return call(q, k, v, total_keys=total_keys, strategy=strategy, **options)
    of_keys, of_rows = _shares(world, q, k, keys, queries, total_keys, total_queries, counts)
    if equal_lengths:
        _check_lengths(of_rows.total, of_keys.total)
    options |= dict(keys=of_keys.layout, total_keys=of_keys.total, strategy=strategy)
    if of_keys.table is not None:
        options["key_table"] = torch.tensor(of_keys.table, device=q.device)
    if queries:
        return _attend_sharded(call, world, q, k, v, of_keys, of_rows, options)
    if strategy == "gather-kv":
        options["max_seqlen_k"] = _rounded(of_keys.total)
    return call(q, k, v, **options | _tables_of_all(of_keys, q))


def _refuse_grad(**tensors):
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise UnsupportedError(f"{name} requires grad, and this operator has no backward: call longspan.attend or "
                                   "longspan.torch.scaled_dot_product_attention, or this under torch.no_grad(), or with "
                                   f"{name}.detach()")


def _tables_of_all(of_keys, q) -> dict:
    """A row of the table of ranges for each sequence of a batch."""
    if of_keys.table is None or q.dim() != 4:
        return {}
    return {"key_table": torch.tensor(of_keys.table, device=q.device).repeat(q.shape[0], 1)}


def _attend_sharded(call, world, q, k, v, of_keys, of_rows, options):
    """Each rank has its own rows."""
    options |= dict(queries=of_rows.layout, total_queries=of_rows.total)
    if of_rows.table is not None:
        options["query_table"] = torch.tensor(of_rows.table, device=q.device)
    gathers_keys = options["strategy"] == "gather-kv" or (  # on GPUs the library chooses
        options["strategy"] == "auto" and q.device.type == "cpu" and _keys_are_less(
            world.size, q, k, v, of_keys, of_rows))
    if gathers_keys:
        options |= dict(strategy="gather-kv", max_seqlen_k=_rounded(of_keys.total))
    elif options["strategy"] not in ("auto", *_OF_STATES):
        options["max_seqlen_k"] = _rounded(of_keys.total)
    if of_rows.table is None or q.dim() == 3 or q.shape[0] == 1:
        return call(q.contiguous(), k, v, **options | _tables_of_all(of_keys, q))
    # A table of rows describes one sequence.
    return_lse, out = options.pop("return_lse"), options.pop("out")
    if out is None:
        out = _results(q, v, False)
    lse = q.new_empty(q.shape[:-1], dtype=_lse_dtype(q)) if return_lse else None
    for b, own in sequences(q, options):
        call(q[b].contiguous(), k[b].contiguous(), v[b].contiguous(), out=out[b],
                        lse=lse[b] if return_lse else None, **options | own)
    return (out, lse) if return_lse else out


def sequences(q: Tensor, options: dict):
    """For calls of one sequence at a time: (b, the arguments among `options` that are of sequence b)."""
    batch = q.shape[0]
    for name, dims, wanted in (("documents", 1, "count + 1"), ("bidirectional", 2, "count, 2")):
        given = options.get(name)
        if given is not None and given.dim() == dims and batch > 1:
            raise InputError(f"{name} is {list(given.shape)}; the batch has {batch} sequences: [batch, {wanted}] "
                             "is wanted")
    arrays = {name: options[name] for name in _OF_SEQUENCES if isinstance(options.get(name), Tensor)}
    for b in range(batch):
        own = {name: t if (name, t.dim()) in (("documents", 1), ("bidirectional", 2)) else t[b:b + 1]
               for name, t in arrays.items()}
        if options.get("dropout_p"):
            own["dropout_sequences"] = torch.tensor([b], dtype=torch.int32, device=q.device)
        yield b, own


def _refuse_contiguous():
    raise UnsupportedError("keys is 'contiguous', and the keys are a cache on several ranks: where it is cut moves as "
                           "the sequence grows; deal it out 'interleaved', or 'interleaved:64' in blocks of 64")


def _check_lengths(rows: int, keys: int):
    if rows != keys:
        raise InputError(
            f"is_causal is given, query has {rows} tokens and key has {keys}: which keys a row sees is ambiguous. "
            "causal_alignment='upper_left' counts from the first key, as torch does; 'lower_right' says that the rows "
            "are the last tokens of the sequence, as in decode")


def asks(ranks: int, queries: str, total_keys, total_queries) -> bool:
    """Whether ranks are asked for their keys and rows, which the call does not give."""
    return ranks > 1 and (total_keys is None or bool(queries and total_queries is None))


def ask(world, q, k) -> list[int]:
    """The keys and the query rows of each rank. Collective."""
    answers = world.comm.gather(b"%d %d" % (k.shape[-3], q.shape[-3]),
                                "count of keys and query rows (total_keys or total_queries is not given)")
    return [int(n) for both in answers for n in both.split()]


def _shares(world, q, k, keys, queries, total_keys, total_queries, counts=None) -> tuple[Lengths, Lengths]:
    """How keys and rows are shared; the ranks are asked where the call does not give it, and `counts` does not have their
    answers."""
    own_keys = own_rows = None
    if asks(world.size, queries, total_keys, total_queries):
        counts = counts or ask(world, q, k)
        own_keys, own_rows = counts[::2], counts[1::2]
    if own_keys is None:
        check_own(keys, total_keys, k.shape[-3], world.rank, world.size, "k", "total_keys")
    of_keys = resolve(keys, total_keys, own_keys, world.size, "k")
    if queries and own_rows is None:
        check_own(queries, total_queries, q.shape[-3], world.rank, world.size, "q", "total_queries")
    if not queries:
        if own_rows is not None and len(set(own_rows)) > 1:
            raise InputError(f"q has {own_rows} rows on the ranks; without queries every rank has all of them")
        return of_keys, Lengths(q.shape[-3], "", None)
    return of_keys, resolve(queries, total_queries, own_rows, world.size, "q")


def _keys_are_less(ranks: int, q, k, v, keys: Lengths, rows: Lengths) -> bool:
    """Whether keys and values can be sent, in fewer bytes than query rows and states."""
    if keys.layout.layout == "interleaved" and keys.layout.block > _MOST_BLOCK:
        return False
    heads, dim, value_dim = q.shape[-2], q.shape[-1], v.shape[-1]
    sent_keys = keys.total * k.shape[-2] * (dim + value_dim) * k.element_size() / ranks
    sent_rows = rows.total * heads * ((value_dim + 2) * 4 + dim * q.element_size() / ranks)
    return sent_keys <= sent_rows


def _out_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.element_size() == 1 else q.dtype


def _value_dim(k: Tensor, v: Tensor):
    if v.dtype == torch.uint8:  # rows of latent keys that carry their scales, of any format
        return 512
    return v.shape[2] if k.dim() == 5 else v.shape[-1]


def _lse_dtype(q: Tensor):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _results(q: Tensor, v: Tensor, with_lse: bool, k: Tensor | None = None):
    out = q.new_empty([*q.shape[:-1], _value_dim(v if k is None else k, v)], dtype=_out_dtype(q))
    if not with_lse:
        return out
    return out, q.new_empty(q.shape[:-1], dtype=_lse_dtype(q))


def agreed_seed(comm: str, device: torch.device) -> Tensor:
    """[seed, offset] int64 that rank 0 draws from torch's generator of the device. Every rank draws, so that generators
    stay together. Collective."""
    own = torch.randint(2 ** 63 - 1, (2,), dtype=torch.int64, device=device)
    return torch.ops.longspan.seed_of_rank_0.default(own, comm)


def _seed_kernel(own, comm):
    world = known(comm)
    if world.size == 1:
        return own.clone()
    mine = b"%d %d" % tuple(own.tolist())
    return torch.tensor([int(n) for n in world.comm.gather(mine, "seed of dropout")[0].split()], device=own.device)


def _fake_seed(own, comm):
    return own.new_empty(2)


def _check_fakes(**tensors):
    """Checks that a trace can make. Kernels leave them to the library, which makes them too."""
    if torch.is_grad_enabled():
        for name, one in tensors.items():
            if one.requires_grad:
                raise UnsupportedError(f"{name} requires grad, and this operator has no backward: call "
                                       "longspan.torch.scaled_dot_product_attention, or give x.detach()")
    first, *others = tensors.items()
    for name, one in others:
        if one.device != first[1].device:
            raise InputError(f"{name} lies on {one.device}, and {first[0]} on {first[1].device}")


def _attend_kernel(q, k, v, comm, **options):
    return _attend(q, k, v, comm, **options)


def _attend_lse_kernel(q, k, v, comm, **options):
    return _attend(q, k, v, comm, return_lse=True, **options)


def _attend_out_kernel(q, k, v, comm, out, **options):
    _attend(q, k, v, comm, out=out, **options)


def _attend_append_kernel(q, k, v, k_new, v_new, comm, **options):
    return _attend(q, k, v, comm, k_new=k_new, v_new=v_new, **options)


def _append_kernel(k_new, v_new, k, v, comm, *, cache_seqlens=None, block_table=None, cache_batch_idx=None,
                   total_keys=None, keys="contiguous", k_descale=None, v_descale=None):
    batch = k_new.shape[0] if k_new.dim() == 4 else 1
    world = known(comm)
    key = (k_new.shape[-2], k_new.shape[-1], v_new.shape[-1], k_new.dtype, k.dtype, batch, keys)
    layer = world.writers.get(key)
    if world.size > 1 and keys == "contiguous":
        _refuse_contiguous()
    if layer is None:
        if len(world.writers) >= 16:  # the same on all ranks, as the calls are
            world.writers.clear()
        layer = world.writers[key] = longspan.Attention(
            world.for_writers(), heads=k_new.shape[-2], head_dim=k_new.shape[-1], value_dim=v_new.shape[-1],
            dtype=k_new.dtype, kv_dtype=k.dtype, causal=True, keys=rule_of(keys), max_batch=batch)
    layer.append(_dense(k_new), _dense(v_new), k, v, cache_seqlens=cache_seqlens, block_table=block_table,
                 cache_batch_idx=cache_batch_idx, total_keys=total_keys, k_descale=k_descale, v_descale=v_descale)


def _fake_attend(q, k, v, comm, **options):
    _check_fakes(q=q, k=k, v=v)
    return _results(q, v, False, k)


def _fake_attend_lse(q, k, v, comm, **options):
    _check_fakes(q=q, k=k, v=v)
    return _results(q, v, True, k)


def _fake_attend_out(q, k, v, comm, out, **options):
    _check_fakes(q=q, k=k, v=v, out=out)


def _fake_attend_append(q, k, v, k_new, v_new, comm, **options):
    _check_fakes(q=q, k=k, v=v, k_new=k_new, v_new=v_new)
    return _results(q, v, False, k)


def _fake_append(k_new, v_new, k, v, comm, **options):
    _check_fakes(k_new=k_new, v_new=v_new, k=k, v=v)


def _define(name: str, schema: str, kernel, fake) -> None:
    library.define(f"{name}({' '.join(schema.split())}", tags=(torch.Tag.needs_exact_strides,)
                   if hasattr(torch.Tag, "needs_exact_strides") else ())
    for key in ("CPU", "CUDA"):
        library.impl(name, kernel, key)
    torch.library.register_fake(f"longspan::{name}", fake, lib=library)
    _transforms.register(library, name)


_define("seed_of_rank_0", "Tensor own, str comm) -> Tensor", _seed_kernel, _fake_seed)
_define("attend", f"Tensor q, Tensor k, Tensor v, str comm, {_OPTIONS}) -> Tensor", _attend_kernel, _fake_attend)
_define("attend_lse", f"Tensor q, Tensor k, Tensor v, str comm, {_OPTIONS}) -> (Tensor, Tensor)",
        _attend_lse_kernel, _fake_attend_lse)
_define("attend_out", f"Tensor q, Tensor k, Tensor v, str comm, Tensor(a!) out, {_OPTIONS}) -> ()",
        _attend_out_kernel, _fake_attend_out)
_define("attend_append", "Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor k_new, Tensor v_new, str comm, "
        f"{_OPTIONS}) -> Tensor", _attend_append_kernel, _fake_attend_append)
_define("append", """Tensor k_new, Tensor v_new, Tensor(a!) k, Tensor(b!) v, str comm, *,
        Tensor? cache_seqlens=None, Tensor? block_table=None, Tensor? cache_batch_idx=None,
        SymInt? total_keys=None, str keys='contiguous', Tensor? k_descale=None, Tensor? v_descale=None) -> ()""",
        _append_kernel, _fake_append)

# For longspan.torch and longspan.hf.
APPEND = torch.ops.longspan.append.default


def attend(q: Tensor, k: Tensor, v: Tensor, comm: str, **options):
    """The operator attend, or its implementation where nothing observes operators."""
    return (_attend if is_unwatched(q, k, v) else torch.ops.longspan.attend.default)(q, k, v, comm, **options)


def attend_lse(q: Tensor, k: Tensor, v: Tensor, comm: str, **options):
    """The operator attend_lse, likewise."""
    if is_unwatched(q, k, v):
        return _attend(q, k, v, comm, return_lse=True, **options)
    return torch.ops.longspan.attend_lse.default(q, k, v, comm, **options)


def _watchers():
    """Functions that are all false where no trace, mode, transform or profiler observes operators; None where
    this version of torch lacks one of them."""
    try:
        return (torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, torch._C._get_tracing_state,
                torch._C._functorch.peek_interpreter_stack, torch._C._autograd._profiler_enabled)
    except AttributeError:
        return None


_WATCHERS = _watchers()


def is_unwatched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether to skip torch's dispatcher, which takes as long as the rest of a call in Python."""
    if torch.compiler.is_compiling() or _WATCHERS is None or not type(q) is type(k) is type(v) is Tensor:
        return False
    for watches in _WATCHERS:
        if watches():
            return False
    device = q.device.type  # a lazily negated tensor is resolved by the dispatcher on GPUs, by the library elsewhere
    return device == "cpu" or (device == "cuda" and not (q.is_neg() or k.is_neg() or v.is_neg()))
