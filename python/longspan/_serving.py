"""The calls of serving engines: on one rank, and the merge across ranks."""

from __future__ import annotations

from collections import namedtuple

from . import _core
from ._attention import _after_append
from ._errors import InputError
from ._names import type_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._types import Alibi, Alignment, Array, Base, DType, KeyDType, Numbers, OfKind, Stream
    from ._core import Communicator

# The masks of whole sequences, which these calls do not take.
PLAIN_MASK = dict(attention_chunk=0, chunk_lookback=0, prefix=0, clamp_bidirectional=False)

Segments = namedtuple("Segments", "output max expsum keys tile")
Segments.__doc__ = """States of segments of the keys, float32, natural units.

output: [tokens, heads, segments, value_dim], not normalised; max, expsum: [tokens, heads,
segments]; keys: of a segment (0: as many tiles as fill them); tile: keys of a tile.
"""


def _is_half(lse) -> bool:
    return type_of(lse) in ("float16", "bfloat16")


def wide_lse(lse):
    """An lse of 16 bits as float32, which the merges read; another unchanged."""
    if not _is_half(lse):
        return lse
    return lse.float() if hasattr(lse, "float") else lse.astype("float32")


def narrow_lse(name: str, lse):
    """Where to write an lse: for one of 16 bits a float32 array, to be copied; otherwise the lse
    itself."""
    if lse is None or not _is_half(lse):
        return lse
    strides = lse.stride() if hasattr(lse, "stride") else getattr(lse, "strides", (1,))
    is_read_only = not getattr(getattr(lse, "flags", None), "writeable", True)
    if is_read_only or any(not step and size > 1 for step, size in zip(strides, lse.shape)):
        raise InputError(f"{name} is written, and it is read-only, or its elements overlap")
    return wide_lse(lse)


def merge_attn_states(prefix_output: OfKind, prefix_lse: Array, suffix_output: Array,
                      suffix_lse: Array, *, base: Base,
                      prefill_tokens_with_context: int | None = None,
                      out_scale: Numbers | None = None, prefix_scale: Numbers | None = None,
                      suffix_scale: Numbers | None = None, nan_is_empty: bool = False,
                      out: Array | None = None, lse: Array | None = None,
                      stream: Stream | None = None) -> tuple[OfKind, OfKind]:
    """The merge of two finished results over different keys, as vLLM names it.

    Args:
        prefix_output, suffix_output: [tokens, heads, value_dim], of any float type.
        prefix_lse, suffix_lse: [heads, tokens] float32. +inf and -inf mean no keys.
        base: of every logarithm, given and returned: "e" or 2. There is no default on purpose.
        prefill_tokens_with_context: tokens from here on copy the suffix and its lse, whatever its
            value; their prefix is not read.
        out_scale: [1] float32: out = result / out_scale. fp8 needs it.
        prefix_scale, suffix_scale: [1] float32, of fp8 parts: a stored x means x * scale.
        nan_is_empty: an lse of NaN means no keys; otherwise it stays NaN.
        out: like prefix_output, of any float type; may be prefix_output or suffix_output itself.
        lse: like prefix_lse; may be prefix_lse or suffix_lse itself.

    Returns:
        (out, lse)

    >>> import numpy as np, longspan
    >>> a, b = np.random.default_rng(0).standard_normal((2, 3, 4, 16), dtype=np.float32)
    >>> empty, lse = np.full((4, 3), -np.inf, np.float32), np.zeros((4, 3), np.float32)
    >>> out, _ = longspan.merge_attn_states(a, empty, b, lse, base="e")
    >>> bool((out == b).all())
    True
    """
    return _core.merge_attn_states(
        prefix_output=prefix_output, prefix_lse=prefix_lse, suffix_output=suffix_output, suffix_lse=suffix_lse,
        base=base, heads_first=True, out=out, lse=lse, prefill_tokens_with_context=prefill_tokens_with_context,
        out_scale=out_scale, prefix_scale=prefix_scale, suffix_scale=suffix_scale, nan_is_empty=nan_is_empty,
        stream=stream)


def merge_state(v_a: OfKind, s_a: Array, v_b: Array, s_b: Array, *, base: Base,
                nan_is_empty: bool = False, out: Array | None = None, lse: Array | None = None,
                stream: Stream | None = None) -> tuple[OfKind, OfKind]:
    """The same merge under FlashInfer's name: s_a and s_b are [tokens, heads].

    FlashInfer's own logarithms are of base 2.

    >>> import numpy as np, longspan
    >>> v = np.ones((3, 4, 16), np.float32)
    >>> s = np.zeros((3, 4), np.float32)
    >>> out, lse = longspan.merge_state(v, s, 3 * v, s, base=2)
    >>> float(out[0, 0, 0]), float(lse[0, 0])
    (2.0, 1.0)
    """
    return _core.merge_state(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b, base=base, nan_is_empty=nan_is_empty, out=out,
                             lse=lse, stream=stream)


def merge_states(v: OfKind, s: Array, *, base: Base, out_scale: Numbers | None = None,
                 part_scales: Numbers | None = None, nan_is_empty: bool = False,
                 out: Array | None = None, lse: Array | None = None,
                 stream: Stream | None = None) -> tuple[OfKind, OfKind]:
    """The merge of any number of results, under FlashInfer's name.

    Args:
        v: [tokens, parts, heads, value_dim].
        s: [tokens, parts, heads] float32, their log-sum-exp in `base` ("e" or 2).
        part_scales: [parts] float32, of fp8.
        others: as merge_attn_states.

    Returns:
        (out [tokens, heads, value_dim], lse [tokens, heads])

    >>> import numpy as np, longspan
    >>> v, s = np.ones((3, 5, 4, 16), np.float32), np.zeros((3, 5, 4), np.float32)
    >>> out, lse = longspan.merge_states(v, s, base="e")
    >>> out.shape, bool(np.allclose(lse, np.log(5)))
    ((3, 4, 16), True)
    """
    return _core.merge_states(v=v, s=s, base=base, out=out, lse=lse, out_scale=out_scale, part_scales=part_scales,
                              nan_is_empty=nan_is_empty, stream=stream)


def cross_rank_merge(part: OfKind, part_lse: Array, *, base: Base,
                     comm: Communicator | None = None, scatter_heads: bool = False,
                     nan_is_empty: bool = False, part_scale: Numbers | None = None,
                     out_scale: Numbers | None = None, out: Array | None = None,
                     lse: Array | None = None, stream: Stream | None = None) -> tuple[OfKind, OfKind]:
    """The merge of finished results over all ranks, each over the keys of its rank. Collective.

    Parts fold in the order of the ranks, in fp32, with one rounding at the end.

    Args:
        part: this rank's result, [tokens, heads, value_dim], of any float type; the same shape on
            every rank.
        part_lse: [tokens, heads] float32. +inf and -inf mean that this rank has no keys.
        base: of every logarithm, given and returned: "e" or 2. There is no default on purpose.
        comm: the ranks; None is this process alone.
        scatter_heads: rank r of P gets the heads [r H/P, (r+1) H/P), and no others travel to it;
            otherwise every rank gets the whole result.
        nan_is_empty: an lse of NaN means no keys; otherwise it stays NaN.
        part_scale: [1] float32, of an fp8 part: a stored x means x * scale.
        out_scale: [1] float32: out = result / out_scale. fp8 needs it.
        out, lse: as part and part_lse, of the heads that this rank gets; written in place of new
            arrays. Of all heads they may be part and part_lse themselves.

    Returns:
        (out, lse)

    Raises:
        UsageError: ranks give different shapes or options.
        InputError: heads that the ranks cannot share evenly.

    >>> import numpy as np, longspan
    >>> part, lse = np.ones((3, 4, 16), np.float32), np.zeros((3, 4), np.float32)
    >>> out, _ = longspan.cross_rank_merge(part, lse, base="e")       # of one rank: the part itself
    >>> bool((out == part).all())
    True
    """
    return _core.cross_rank_merge(
        comm=comm, part=part, part_lse=part_lse, base=base, scatter_heads=scatter_heads, nan_is_empty=nan_is_empty,
        part_scale=part_scale, out_scale=out_scale, out=out, lse=lse, stream=stream)


def segmented_attention(q: Array, k_cache: Array, v_cache: Array, block_table: Array,
                        cache_seqlens: Numbers, *, cu_seqlens_q: Numbers | None = None,
                        causal: bool | Numbers = True, softmax_scale: float | None = None,
                        window_size: tuple[int, int] = (-1, -1),
                        causal_alignment: Alignment = "lower_right", softcap: float = 0.0,
                        alibi_slopes: Numbers | None = None, alibi: Alibi = "context",
                        sinks: Numbers | None = None, qq_bias: Array | None = None,
                        q_descale: Numbers | None = None, k_descale: Numbers | None = None,
                        v_descale: Numbers | None = None, out_scale: Numbers | None = None,
                        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                        segments: int | None = None, segment_keys: int = 0, tile: int = 16,
                        skip_decode: bool = False, return_lse: bool = False, out: Array | None = None,
                        lse: Array | None = None, stream: Stream | None = None) -> Any:
    """Decode and short queries over a paged cache that holds all keys.

    Args:
        q: [tokens, heads, head_dim].
        k_cache, v_cache: pages [pages, page, kv_heads, dim], or x-packed.
        block_table: [batch, columns].
        cache_seqlens: [batch], keys of each sequence, those of q included.
        alibi: what slopes multiply: "context" (the distance to the first query), "query" (the
            distance of query and key) or "sqrt" (its square root).
        segments: return the states of this many segments of the keys, for reduce_segments; at most 65536.
        segment_keys: keys of a segment; 0: ceil(keys / (segments * tile)) tiles of `tile` keys.
        skip_decode: sequences of one query are skipped, their rows left as they are; not with segments.
        others: as attend.

    Returns:
        out [tokens, heads, value_dim]; with return_lse (out, lse [tokens, heads]); with `segments`
        a Segments, whose segment 0 includes the sinks.

    >>> import numpy as np, longspan
    >>> cache = np.random.default_rng(0).standard_normal((2, 10, 16, 2, 64), dtype=np.float32)
    >>> table = np.arange(10, dtype=np.int32).reshape(2, 5)
    >>> q = np.ones((2, 8, 64), np.float32)        # one query for each of two sequences
    >>> args = q, *cache, table, [80, 33]
    >>> out = longspan.segmented_attention(*args, cu_seqlens_q=[0, 1, 2])
    >>> states = longspan.segmented_attention(*args, cu_seqlens_q=[0, 1, 2], segments=4)
    >>> again = longspan.reduce_segments(states, [80, 33], cu_seqlens_q=[0, 1, 2], dtype="float32")
    >>> bool(np.allclose(out, again, atol=1e-6))
    True
    """
    made = _core.segmented_attention(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q, alibi_slopes=alibi_slopes, sinks=sinks, qq_bias=qq_bias, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, out_scale=out_scale, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, return_lse=return_lse, out=out, lse=lse, stream=stream, causal=causal,
        window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, alibi=alibi, segments=segments,
        segment_keys=segment_keys, tile=tile, skip_decode=skip_decode, causal_alignment=causal_alignment, **PLAIN_MASK)
    return made if segments is None else Segments(*made, segment_keys, tile)


def reduce_segments(segments: Segments, cache_seqlens: Numbers, *, dtype: DType = "bfloat16",
                    cu_seqlens_q: Numbers | None = None, out_scale: Numbers | None = None,
                    return_lse: bool = False, out: Array | None = None, lse: Array | None = None,
                    stream: Stream | None = None) -> Any:
    """Results from the states of segmented_attention. `dtype` is that of a new `out`; others as in
    segmented_attention. Segments past the end of a sequence are never read."""
    if not isinstance(segments, tuple) or len(segments) != len(Segments._fields):
        raise TypeError(f"segments is of type '{type(segments).__name__}'; a Segments is wanted")
    output, most, expsum, keys, tile = segments
    return _core.reduce_segments(
        output=output, max=most, expsum=expsum, keys=keys, tile=tile, cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q, dtype=dtype, out_scale=out_scale, return_lse=return_lse, out=out, lse=lse,
        stream=stream)


def context_attention(q: Array, k: Array | None, v: Array | None, k_cache: Array, v_cache: Array,
                      block_table: Array, cache_seqlens: Numbers, *,
                      cu_seqlens_q: Numbers | None = None, causal: bool | Numbers = True,
                      softmax_scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
                      softcap: float = 0.0, alibi_slopes: Numbers | None = None,
                      alibi: Alibi = "context", sinks: Numbers | None = None,
                      qq_bias: Array | None = None, q_descale: Numbers | None = None,
                      k_descale: Numbers | None = None, v_descale: Numbers | None = None,
                      out_scale: Numbers | None = None, out_scale_inv: Numbers | None = None,
                      max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                      skip_decode: bool = False, return_lse: bool = False, out: Array | None = None,
                      lse: Array | None = None, stream: Stream | None = None) -> Any:
    """Chunked prefill: new tokens see the cached keys of their sequence, and each other.

    Args:
        q, k, v: [tokens, heads or kv_heads, dim], the new tokens of all sequences. k and v are None
            where the cache holds those of the new tokens too.
        k_cache, v_cache, block_table: the paged cache.
        cache_seqlens: [batch], keys of each sequence that lie in the cache.
        out_scale_inv: [1] float32: out = result * out_scale_inv, in place of out_scale.
        skip_decode: sequences of one query are skipped, their rows left as they are.
        others: as segmented_attention.

    >>> import numpy as np, longspan
    >>> rng = np.random.default_rng(0)
    >>> cache = rng.standard_normal((2, 10, 16, 2, 64), dtype=np.float32)
    >>> q, k, v = rng.standard_normal((3, 7, 2, 64), dtype=np.float32)
    >>> table = np.arange(10, dtype=np.int32).reshape(1, 10)
    >>> longspan.context_attention(q, k, v, *cache, table, [100]).shape
    (7, 2, 64)
    """
    return _core.context_attention(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
        cache_seqlens=cache_seqlens if k is v is None else _after_append(cache_seqlens, q, cu_seqlens_q, "q"),
        cu_seqlens_q=cu_seqlens_q,
        alibi_slopes=alibi_slopes, sinks=sinks, qq_bias=qq_bias, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, out_scale=out_scale, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        return_lse=return_lse, out=out, lse=lse, stream=stream, causal=causal, window_size=window_size,
        softmax_scale=softmax_scale, softcap=softcap, alibi=alibi, k=k, v=v, skip_decode=skip_decode,
        out_scale_inv=out_scale_inv, causal_alignment="lower_right", **PLAIN_MASK)


def append_kv(k: Array, v: Array | None, k_cache: Array, v_cache: Array | None, slot_mapping: Numbers, *,
              k_descale: Numbers | None = None, v_descale: Numbers | None = None, kv_dtype: KeyDType | None = None,
              stream: Stream | None = None) -> None:
    """Writes new keys and values to a paged cache, each to its slot.

    Args:
        k, v: [tokens, kv_heads, dim]; v is None where v_cache is the first columns of k_cache.
        k_cache, v_cache: pages, written.
        slot_mapping: [tokens]: page * page size + row; a token with a slot below 0 is not written.
        k_descale, v_descale: [1] or [kv_heads] float32; fp8 caches store x / descale.
        kv_dtype: of rows of latent keys that carry their scales, their format, as in attend. k_cache is then uint8, and v
            and v_cache are None.

    >>> import numpy as np, longspan
    >>> k_cache, v_cache = np.zeros((2, 4, 16, 2, 64), np.float32)
    >>> k = np.ones((2, 2, 64), np.float32)
    >>> longspan.append_kv(k, k, k_cache, v_cache, [17, -1])
    >>> float(k_cache[1, 1].sum()), float(k_cache.sum())
    (128.0, 128.0)
    """
    _core.append_kv(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping, k_descale=k_descale,
                    v_descale=v_descale, kv_dtype=kv_dtype, stream=stream)
