"""vLLM's attention operators by their names and arguments. vLLM is not imported.

    from longspan.vllm import merge_attn_states, unified_attention

in place of vllm.v1.attention.ops.merge_attn_states and its neighbours. Names and arguments are those
of vLLM 0.33. Results are written to the caller's array, as there. An argument that changes the
result, and that longspan does not support, raises UnsupportedError with its name, unless it means
the same as the default. Scratch memory and tuning of vLLM's kernels are accepted and not read; each
function lists these arguments. All log-sum-exps are natural; those of 16 bits are read as float32.

Two things differ on purpose. A row that sees no key is 0 and its log-sum-exp -inf, whatever the
parts contain; and sums are fp32 with one rounding at the end. Arrays are of any kind, on CPUs too.
"""

from __future__ import annotations

import sys

from . import _core
from ._core import Communicator
from ._errors import InputError, UnsupportedError
from ._mla import FlashMLASchedMeta, append, cutlass, flash_mla, flash_mla_sparse_fwd
from ._names import TRANSLATED, check_shape, in_their_words, is_fp8, refuse, required, type_of
from ._serving import PLAIN_MASK, narrow_lse, wide_lse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._attention import Array, Numbers

_OUTPUT = {"out": "output", "lse": "output_lse", "out_lse": "output_lse", "out_scale": "output_scale",
           "prefix_out": "prefix_output", "suffix_out": "suffix_output"}


def merge_attn_states(output: Array, prefix_output: Array, prefix_lse: Array, suffix_output: Array,
                      suffix_lse: Array, output_lse: Array | None = None,
                      prefill_tokens_with_context: int | None = None,
                      output_scale: Numbers | None = None) -> None:
    """Writes the merge of a prefix's and a suffix's attention to `output`.

    Args:
        output: [tokens, heads, head_size], written; may be prefix_output or suffix_output. fp8 needs
            output_scale.
        prefix_output, suffix_output: [tokens, heads, head_size], of any float type, any strides.
        prefix_lse, suffix_lse: [heads, tokens], of float32 or 16 bits, natural. +inf and -inf mean
            no keys.
        output_lse: likewise, written too; may be prefix_lse or suffix_lse.
        prefill_tokens_with_context: tokens from here on copy the suffix and its lse, whatever its
            value; their prefix is not read.
        output_scale: [1] float32, of an fp8 output: output = result / output_scale.

    >>> import numpy as np
    >>> from longspan.vllm import merge_attn_states
    >>> a, b = np.ones((3, 4, 16), np.float32), np.full((3, 4, 16), 3, np.float32)
    >>> out, lse = np.empty_like(a), np.zeros((4, 3), np.float32)
    >>> merge_attn_states(out, a, lse, b, lse)
    >>> float(out.min()), float(out.max())
    (2.0, 2.0)
    """
    required("output", output)
    check_shape("output", output, (None,) * 3, "[tokens, heads, head_size]")
    if output_scale is not None and not is_fp8(output):
        raise InputError(f"output_scale is given and output is {type_of(output)}; it is the scale of an "
                         "fp8 output")
    if output_lse is not None:
        check_shape("output_lse", output_lse, tuple(output.shape[1::-1]), "[heads, tokens]")
    check_shape("prefix_lse", prefix_lse, tuple(output.shape[1::-1]), "[heads, tokens]")
    check_shape("suffix_lse", suffix_lse, tuple(output.shape[1::-1]), "[heads, tokens]")
    to_lse = narrow_lse("output_lse", output_lse)
    try:
        _core.merge_attn_states(
            prefix_output=prefix_output, prefix_lse=wide_lse(prefix_lse), suffix_output=suffix_output,
            suffix_lse=wide_lse(suffix_lse), base="e", heads_first=True, out=output, lse=to_lse,
            prefill_tokens_with_context=prefill_tokens_with_context, out_scale=output_scale, prefix_scale=None,
            suffix_scale=None, nan_is_empty=False, stream=None)
    except TRANSLATED as error:
        raise in_their_words(error, _OUTPUT) from None
    if to_lse is not output_lse:
        output_lse[:] = to_lse


def _one_scale(name: str, scale, cache, cache_name: str):
    """A cache's scale as the core takes it: None where the cache has none."""
    if scale is None:
        return None
    if not is_fp8(cache):  # vLLM passes scales of 1 with caches that have none
        if not _is_one(scale):
            raise InputError(f"{name} is not 1 and {cache_name} is {type_of(cache)}; it is the scale of an fp8 "
                             "cache")
        return None
    return scale


def _on_cpu(array) -> bool:
    return not hasattr(array, "__dlpack_device__") or array.__dlpack_device__()[0] == 1


def _is_one(scale) -> bool:
    """Not checked on GPUs: the check would have to wait."""
    if hasattr(scale, "shape"):
        return not _on_cpu(scale) or bool((scale == 1).all())
    return scale in (1, [1], (1,))


_UNIFIED = {"k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k", "kv_len": "seqused_k",
            "query_start": "cu_seqlens_q", "out_scale": "output_scale", "q_scale": "q_descale",
            "k_scale": "k_descale", "v_scale": "v_descale", "slopes": "alibi_slopes",
            "max_query_len": "max_seqlen_q", "max_kv_len": "max_seqlen_k"}


def _refuse_of_unified(mm_prefix_range, rswa_prefix_lens, rswa_window, use_alibi_sqrt, k_scale_cache,
                       v_scale_cache, chunk_lookback, window_size):
    refuse("longspan.vllm.unified_attention", "leave it out", mm_prefix_range=(mm_prefix_range, None),
           rswa_prefix_lens=(rswa_prefix_lens, None), rswa_window=(rswa_window, None),
           use_alibi_sqrt=(use_alibi_sqrt, False), k_scale_cache=(k_scale_cache, None),
           v_scale_cache=(v_scale_cache, None))
    if not isinstance(window_size, (tuple, list)) or tuple(window_size)[:1] != (-1,):  # chunks are parts of the window: without one there are none
        refuse("longspan.vllm.unified_attention", "leave it out", chunk_lookback=(chunk_lookback, -1))


def _window(window_size, causal):
    """vLLM's kernel reads only the left side. Where queries see later keys it bounds these too."""
    if causal is True or not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        return window_size  # anything but a pair is refused where it is read
    left, right = window_size
    if right not in (left, 0, -1):
        raise InputError(f"window_size is {tuple(window_size)!r} and causal is not True: the left side bounds "
                         f"the right one too, as in vLLM; ({left}, {left}) says so")
    return left, left


def _flags(causal):
    """Flags of any integer type, as vLLM's are int32."""
    of_ints = hasattr(causal, "shape") and "int" in type_of(causal) and type_of(causal) != "uint8"
    return causal != 0 if of_ints else causal


def unified_attention(q: Array, k: Array, v: Array, out: Array, cu_seqlens_q: Array, max_seqlen_q: int,
                      seqused_k: Array, max_seqlen_k: int, softmax_scale: float, causal: bool | Array,
                      window_size: tuple[int, int], block_table: Array, softcap: float,
                      q_descale: Numbers | None, k_descale: Numbers | None, v_descale: Numbers | None,
                      *, seq_threshold_3D: int | None = None, num_par_softmax_segments: int | None = None,
                      softmax_segm_output: Array | None = None, softmax_segm_max: Array | None = None,
                      softmax_segm_expsum: Array | None = None, alibi_slopes: Array | None = None,
                      output_scale: Numbers | None = None, qq_bias: Array | None = None,
                      sinks: Array | None = None, mm_prefix_range: Any = None,
                      rswa_prefix_lens: Any = None, rswa_window: int | None = None,
                      use_alibi_sqrt: bool = False, kv_quant_mode: int | None = None,
                      k_scale_cache: Any = None, v_scale_cache: Any = None, chunk_lookback: int = -1,
                      use_td: bool = False, mm_prefix_clamp_sliding_window: bool = False) -> None:
    """Writes the attention of decode and prefill rows over a paged cache to `out`. The cache
    already holds the new keys. Arguments after the scales are keywords, since vLLM's order has
    changed.

    Args:
        q: [tokens, heads, head_size], also fp8.
        k, v: pages [blocks, block_size, kv_heads, head_size], any strides; also fp8.
        out: [tokens, heads, head_size], written; fp8 with output_scale. Rows past the last sequence
            are left as they are.
        cu_seqlens_q: [sequences + 1] int32, where the rows of each sequence begin.
        max_seqlen_q, max_seqlen_k: no sequence has more rows, or keys.
        seqused_k: [sequences] int32, keys of each sequence.
        causal: True or False, or [sequences] flags, bool or of any integer type.
        window_size: (left, right), keys besides the query's own; -1 is no bound. As in vLLM, left
            bounds both sides where attention is not causal, and right is then left, 0 or -1.
        block_table: [sequences, columns] int32.
        softcap: 0 is off.
        q_descale, k_descale, v_descale: of fp8 arrays, one number, [kv_heads] or [sequences,
            kv_heads], also expanded. Beside a k or v that is not fp8 they must be 1, which is
            checked on CPUs.
        alibi_slopes: [heads]; the score gets slope * (key's position - that of the first query).
        output_scale: [1] float32, of an fp8 out: out = result / output_scale.
        qq_bias: [width, width] between the new tokens; sinks: [heads].
        kv_quant_mode: 0 (none) or 1 (fp8, one scale a tensor); None follows from k.
        seq_threshold_3D, num_par_softmax_segments, softmax_segm_output, softmax_segm_max,
            softmax_segm_expsum, use_td: not read: scratch memory and tuning of vLLM's kernel.
        mm_prefix_clamp_sliding_window: not read: it qualifies mm_prefix_range.

    Raises:
        UnsupportedError: mm_prefix_range, rswa_prefix_lens, rswa_window, chunk_lookback beside a
            window, use_alibi_sqrt, k_scale_cache, v_scale_cache, other kv_quant_modes.

    >>> import numpy as np
    >>> from longspan.vllm import unified_attention
    >>> k, v = np.random.default_rng(0).standard_normal((2, 10, 16, 2, 64), dtype=np.float32)
    >>> q, out = np.ones((2, 8, 64), np.float32), np.empty((2, 8, 64), np.float32)
    >>> table = np.arange(10, dtype=np.int32).reshape(2, 5)
    >>> starts, lengths = np.array([0, 1, 2], np.int32), np.array([80, 33], np.int32)
    >>> unified_attention(q, k, v, out, starts, 1, lengths, 80, 0.125, True, (-1, -1), table, 0.0,
    ...                   None, None, None)
    >>> bool(np.isfinite(out).all())
    True
    """
    if not (mm_prefix_range is rswa_prefix_lens is rswa_window is k_scale_cache is v_scale_cache is None) \
            or use_alibi_sqrt or chunk_lookback != -1:
        _refuse_of_unified(mm_prefix_range, rswa_prefix_lens, rswa_window, use_alibi_sqrt, k_scale_cache,
                           v_scale_cache, chunk_lookback, window_size)
    required("out", out)
    if kv_quant_mode is not None:
        if not hasattr(kv_quant_mode, "__index__"):
            raise TypeError(f"kv_quant_mode is of type '{type(kv_quant_mode).__name__}'; an int is wanted")
        mode = int(kv_quant_mode)
        if mode not in (0, 1):
            raise UnsupportedError(f"kv_quant_mode is {mode}; 0 (none) and 1 (fp8, one scale a tensor) are "
                                   "supported")
        if bool(mode) != is_fp8(k):
            raise InputError(f"kv_quant_mode is {mode} and k is {type_of(k)}; "
                             "1 goes with an fp8 cache, 0 with others")
    if output_scale is not None and not is_fp8(out):
        raise InputError(f"output_scale is given and out is {type_of(out)}; it is the scale of an fp8 out")
    if q_descale is not None and not is_fp8(q):
        q_descale = _one_scale("q_descale", q_descale, q, "q")
    k_descale = _one_scale("k_descale", k_descale, k, "k")
    v_descale = _one_scale("v_descale", v_descale, v, "v")
    if causal is not True:
        causal, window_size = _flags(causal), _window(window_size, causal)
    try:
        _core.segmented_attention(
            q=q, k_cache=k, v_cache=v, block_table=block_table, cache_seqlens=seqused_k, cu_seqlens_q=cu_seqlens_q,
            alibi_slopes=alibi_slopes, sinks=sinks, qq_bias=qq_bias, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale, out_scale=output_scale, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            return_lse=False, out=out, lse=None, stream=None, causal=causal, window_size=window_size,
            softmax_scale=softmax_scale, softcap=softcap, alibi="context", segments=None, segment_keys=0, tile=16,
            skip_decode=False, causal_alignment="lower_right", **PLAIN_MASK)
    except TRANSLATED as error:
        raise in_their_words(error, _UNIFIED) from None


_CONTEXT = {"out": "o", "cache_seqlens": "b_seq_len", "kv_len": "b_seq_len",
            "cu_seqlens_q": "b_start_loc", "query_start": "b_start_loc", "block_table": "b_loc",
            "k_descale": "k_scale", "v_descale": "v_scale", "out_scale": "fp8_out_scale",
            "slopes": "alibi_slopes", "softmax_scale": "sm_scale", "window_size": "sliding_window",
            "max_query_len": "max_input_len", "max_seqlen_q": "max_input_len"}
_CACHE_TYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_PLAIN = {"auto": None, "bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32",
          "float": "float32"}


def _cache_of_type(name: str, cache, kv_cache_dtype: str):
    """A cache of bytes, viewed as the fp8 type of kv_cache_dtype."""
    dtype = type_of(cache)
    wanted = _CACHE_TYPES.get(kv_cache_dtype)
    if wanted is None:
        if kv_cache_dtype not in _PLAIN:
            raise UnsupportedError(f"kv_cache_dtype is {kv_cache_dtype!r}; {', '.join(_PLAIN)}, "
                                   f"{', '.join(_CACHE_TYPES)} are supported")
        if dtype == "uint8" or "float8" in dtype:
            raise InputError(f"kv_cache_dtype is {kv_cache_dtype!r} and {name} is {dtype}; say which fp8 it is")
        if _PLAIN[kv_cache_dtype] not in (dtype, None):
            raise InputError(f"kv_cache_dtype is {kv_cache_dtype!r} and {name} is {dtype}; 'auto' is what it is")
        return cache
    if dtype == wanted:
        return cache
    if dtype != "uint8":
        raise InputError(f"kv_cache_dtype is {kv_cache_dtype!r} and {name} is {dtype}; {wanted} or uint8 is "
                         "wanted")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(cache, torch.Tensor):
        return cache.view(getattr(torch, wanted))
    import ml_dtypes

    return cache.view(getattr(ml_dtypes, wanted))


def context_attention_fwd(q: Array, k: Array | None, v: Array | None, o: Array, kv_cache_dtype: str,
                          k_cache: Array,
                          v_cache: Array, b_loc: Array, b_start_loc: Array, b_seq_len: Array,
                          max_seq_len: int | None, max_input_len: int, k_scale: Numbers | None,
                          v_scale: Numbers | None, alibi_slopes: Array | None = None,
                          sliding_window: int | None = None, sm_scale: float | None = None,
                          skip_decode: bool = False, fp8_out_scale: Numbers | None = None,
                          sinks: Array | None = None, is_block_table_ptr: bool = False,
                          interleaved_v_pack_factor: int = 0, causal: bool = True) -> None:
    """Writes the attention of new tokens over a paged context, and over each other, to `o`.

    Args:
        q, k, v: [tokens, heads or kv_heads, head_size], the new tokens of all sequences. Without k
            and v the cache has the keys of the new tokens too.
        o: [tokens, heads, head_size], written; fp8 with fp8_out_scale. Rows past the last sequence
            are left as they are.
        kv_cache_dtype: "auto", or "fp8", "fp8_e4m3", "fp8_e5m2", the type of a cache of uint8.
        k_cache: [blocks, kv_heads, head_size / x, block_size, x].
        v_cache: [blocks, kv_heads, head_size, block_size].
        b_loc: [sequences, columns] int32, the blocks of each sequence.
        b_start_loc: [sequences + 1] int32, where the new tokens of each sequence begin.
        b_seq_len: [sequences] int32, keys of each sequence, the new ones included.
        max_seq_len: not read, as in vLLM, whose callers differ in what they give.
        max_input_len: no sequence has more new tokens.
        k_scale, v_scale: of an fp8 cache, one number; beside another cache it must be 1, which is
            checked on CPUs.
        alibi_slopes: [heads]; the score gets -slope * distance.
        sliding_window: keys that a query sees, its own included; None and 0 are no bound.
        sm_scale: None is 1 / sqrt(head_size).
        skip_decode: sequences of one new token are skipped, their rows left as they are.
        fp8_out_scale: [1] float32: o = result / fp8_out_scale.
        sinks: [heads].
        causal: False lets new tokens see all of their sequence. The window bounds the left side.

    Raises:
        UnsupportedError: is_block_table_ptr, an interleaved_v_pack_factor, other kv_cache_dtypes.

    >>> import numpy as np
    >>> from longspan.vllm import context_attention_fwd
    >>> rng = np.random.default_rng(0)
    >>> k_cache = rng.standard_normal((10, 2, 8, 16, 8), dtype=np.float32)     # 10 blocks of 16 keys
    >>> v_cache = rng.standard_normal((10, 2, 64, 16), dtype=np.float32)
    >>> q, k = np.ones((7, 4, 64), np.float32), np.ones((7, 2, 64), np.float32)
    >>> o, table = np.empty_like(q), np.arange(10, dtype=np.int32).reshape(1, 10)
    >>> starts, lengths = np.array([0, 7], np.int32), np.array([107], np.int32)
    >>> context_attention_fwd(q, k, k, o, "auto", k_cache, v_cache, table, starts, lengths, 107, 7, 1.0, 1.0)
    >>> bool(np.isfinite(o).all())
    True
    """
    if is_block_table_ptr or interleaved_v_pack_factor != 0:
        refuse("longspan.vllm.context_attention_fwd", "b_loc holds numbers of blocks",
               is_block_table_ptr=(is_block_table_ptr, False))
        refuse("longspan.vllm.context_attention_fwd", "v_cache is [blocks, kv_heads, head_size, block_size]",
               interleaved_v_pack_factor=(interleaved_v_pack_factor, 0))
    if not isinstance(causal, bool):
        raise TypeError(f"causal is of type '{type(causal).__name__}'; a bool is wanted")
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise InputError(f"{given} is given and {missing} is None; give both, or neither where the cache has "
                         "the keys of the new tokens")
    required("o", o)
    if not isinstance(kv_cache_dtype, str):
        raise TypeError(f"kv_cache_dtype is of type '{type(kv_cache_dtype).__name__}'; a str is wanted")
    k_cache = _cache_of_type("k_cache", k_cache, kv_cache_dtype)
    v_cache = _cache_of_type("v_cache", v_cache, kv_cache_dtype)
    check_shape("k_cache", k_cache, (None,) * 5, "[blocks, kv_heads, head_size / x, block_size, x]")
    if fp8_out_scale is not None and not is_fp8(o):
        raise InputError(f"fp8_out_scale is given and o is {type_of(o)}; it is the scale of an fp8 o")
    k_scale = _one_scale("k_scale", k_scale, k_cache, "k_cache")
    v_scale = _one_scale("v_scale", v_scale, v_cache, "v_cache")
    if sliding_window is not None and (isinstance(sliding_window, bool)
                                       or not hasattr(sliding_window, "__index__")):
        raise TypeError(f"sliding_window is of type '{type(sliding_window).__name__}'; an int is wanted")
    left = -1 if sliding_window is None or sliding_window <= 0 else int(sliding_window) - 1
    paged = dict(q=q, k_cache=k_cache, v_cache=v_cache, block_table=b_loc, cache_seqlens=b_seq_len,
                 cu_seqlens_q=b_start_loc, alibi_slopes=alibi_slopes, sinks=sinks, qq_bias=None, q_descale=None,
                 k_descale=k_scale, v_descale=v_scale, out_scale=fp8_out_scale, max_seqlen_q=max_input_len,
                 max_seqlen_k=None, return_lse=False, out=o, lse=None, stream=None, causal=causal,
                 window_size=(left, -1), softmax_scale=sm_scale, softcap=0.0, alibi="query", skip_decode=skip_decode,
                 causal_alignment="lower_right", **PLAIN_MASK)
    try:
        if k is None:
            _core.segmented_attention(**paged, segments=None, segment_keys=0, tile=16)
        else:
            _core.context_attention(**paged, k=k, v=v, out_scale_inv=None)
    except TRANSLATED as error:
        raise in_their_words(error, _CONTEXT) from None


def _communicator(cp_group, array):
    if isinstance(cp_group, Communicator):
        return cp_group
    group = getattr(cp_group, "device_group", cp_group)  # of vLLM's GroupCoordinator
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or \
            not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"cp_group is of type '{type(cp_group).__name__}'; a longspan communicator, a "
                        "process group of torch, or what has one as device_group is wanted")
    from .torch import communicator  # which keeps it for the next call

    return communicator(group, device="cuda" if getattr(array, "is_cuda", False) else "cpu")


def _without_empty_shards(lse, seq_lens, query_start_loc):
    """The lse, with -inf in rows of sequences without keys here, and in rows past the last
    sequence. It is a new array: the caller's stays unchanged."""
    if seq_lens is None and query_start_loc is None:
        return lse
    check_shape("seq_lens", seq_lens, (None,), "[sequences]")
    check_shape("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,), "[sequences + 1]")
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(lse, torch.Tensor)
    for name, array in (("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        if type_of(array) not in ("int32", "int64"):
            raise InputError(f"{name} is {type_of(array)}; int32 or int64 is wanted")
        if isinstance(array, torch.Tensor if is_tensor else type(lse)) and \
                getattr(array, "device", None) == getattr(lse, "device", None):
            continue
        raise InputError(f"{name} is of type '{type(array).__name__}' on {getattr(array, 'device', 'cpu')}, and "
                         f"the lse of type '{type(lse).__name__}' on {getattr(lse, 'device', 'cpu')}; they lie "
                         "together")
    if is_tensor:
        space, place = torch, {"device": lse.device}
    else:
        import numpy

        space = numpy if isinstance(lse, numpy.ndarray) else lse.__array_namespace__()
        place = {} if space is numpy else {"device": lse.device}
    ends = query_start_loc[1:]
    if _on_cpu(lse) and bool((ends < query_start_loc[:-1]).any()):
        raise InputError("query_start_loc descends; it is where the rows of each sequence begin")
    # A row past the last sequence belongs to one more sequence, which is empty.
    sequence = space.searchsorted(ends, space.arange(lse.shape[0], dtype=ends.dtype, **place), side="right")
    join = space.cat if is_tensor else space.concatenate if hasattr(space, "concatenate") else space.concat
    is_empty = join([seq_lens <= 0, space.ones(1, dtype=space.bool, **place)])[sequence]
    nothing = space.full((), -float("inf"), dtype=lse.dtype, **place)
    return space.where(is_empty[:, None], nothing, lse)


def _merge_across(cp_attn_out, cp_attn_lse, cp_group, return_lse, is_lse_base_on_e, seq_lens, query_start_loc,
                  scatter):
    for name, value in (("return_lse", return_lse), ("is_lse_base_on_e", is_lse_base_on_e)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} is of type '{type(value).__name__}'; a bool is wanted")
    check_shape("cp_attn_out", cp_attn_out, (None,) * 3, "[tokens, heads, head_size]")
    check_shape("cp_attn_lse", cp_attn_lse, tuple(cp_attn_out.shape[:2]), "[tokens, heads]")
    part_lse = _without_empty_shards(wide_lse(cp_attn_lse), seq_lens, query_start_loc)
    comm = _communicator(cp_group, cp_attn_out)
    try:
        out, lse = _core.cross_rank_merge(
            comm=comm, part=cp_attn_out, part_lse=part_lse, base="e" if is_lse_base_on_e else 2,
            scatter_heads=scatter, nan_is_empty=True, part_scale=None, out_scale=None, out=None, lse=None,
            stream=None)
    except TRANSLATED as error:
        raise in_their_words(error, {"part": "cp_attn_out", "part_lse": "cp_attn_lse"}) from None
    return (out, lse) if return_lse else out


def cp_lse_ag_out_rs(cp_attn_out: Array, cp_attn_lse: Array, cp_group: Any, ctx: Any = None,
                     return_lse: bool = False, is_lse_base_on_e: bool = True, seq_lens: Array | None = None,
                     query_start_loc: Array | None = None) -> Any:
    """Merges every rank's attention over its own keys, and returns this rank's heads. Collective.

    vLLM gathers the log-sum-exps, scales its result and sums in its type. Here results and
    log-sum-exps travel in one exchange, are merged in fp32 in rank order, and are rounded once.

    Args:
        cp_attn_out: [tokens, heads, head_size], of all heads.
        cp_attn_lse: [tokens, heads], of float32 or 16 bits. -inf, +inf and NaN mean that this rank
            has no keys.
        cp_group: a longspan communicator; or a process group of torch, or vLLM's GroupCoordinator:
            the first call makes its communicator by longspan.torch.communicator, and keeps it.
        ctx: not read: what vLLM's kernel has compiled.
        return_lse: return (out, lse), lse in float32.
        is_lse_base_on_e: False is base 2, given and returned.
        seq_lens: [sequences] of int32 or int64, this rank's keys of each; requires query_start_loc.
            Rows of sequences without keys count for nothing, whatever their lse.
        query_start_loc: [sequences + 1] likewise, where the rows of each sequence begin. Rows past
            the last sequence count for nothing.

    Returns:
        out [tokens, heads / ranks, head_size]: rank r of P has the heads [r H/P, (r+1) H/P).

    >>> import longspan, numpy as np
    >>> from longspan.vllm import cp_lse_ag_out_rs
    >>> part, lse = np.ones((3, 4, 16), np.float32), np.zeros((3, 4), np.float32)
    >>> cp_lse_ag_out_rs(part, lse, longspan.alone()).shape
    (3, 4, 16)
    """
    return _merge_across(cp_attn_out, cp_attn_lse, cp_group, return_lse, is_lse_base_on_e, seq_lens,
                         query_start_loc, True)


def dcp_a2a_lse_reduce(cp_attn_out: Array, cp_attn_lse: Array, cp_group: Any, ctx: Any = None,
                       return_lse: bool = False, is_lse_base_on_e: bool = True,
                       seq_lens: Array | None = None, query_start_loc: Array | None = None) -> Any:
    """The same as cp_lse_ag_out_rs; in vLLM it uses all-to-all. Collective.

    >>> import longspan, numpy as np
    >>> from longspan.vllm import dcp_a2a_lse_reduce
    >>> part, lse = np.ones((3, 4, 16), np.float32), np.zeros((3, 4), np.float32)
    >>> dcp_a2a_lse_reduce(part, lse, longspan.alone()).shape
    (3, 4, 16)
    """
    return _merge_across(cp_attn_out, cp_attn_lse, cp_group, return_lse, is_lse_base_on_e, seq_lens,
                         query_start_loc, True)


def cp_lse_ag_out_ar(cp_attn_out: Array, cp_attn_lse: Array, cp_group: Any, ctx: Any = None,
                     return_lse: bool = False, is_lse_base_on_e: bool = True, seq_lens: Array | None = None,
                     query_start_loc: Array | None = None) -> Any:
    """The same merge; every rank gets all heads. Collective. Arguments as cp_lse_ag_out_rs.

    Returns:
        out [tokens, heads, head_size], with the same bits on every rank; with return_lse (out, lse).

    >>> import longspan, numpy as np
    >>> from longspan.vllm import cp_lse_ag_out_ar
    >>> part, lse = np.ones((3, 4, 16), np.float32), np.zeros((3, 4), np.float32)
    >>> cp_lse_ag_out_ar(part, lse, longspan.alone()).shape
    (3, 4, 16)
    """
    return _merge_across(cp_attn_out, cp_attn_lse, cp_group, return_lse, is_lse_base_on_e, seq_lens,
                         query_start_loc, False)


def mask_dcp_empty_shards_(lse: Array, seq_lens: Array | None, query_start_loc: Array | None) -> None:
    """Writes -inf to the rows of `lse` that have no keys on this rank, in place. Without both arrays, to
    no row.

    Args:
        lse: [tokens, heads], of any float type.
        seq_lens, query_start_loc: as cp_lse_ag_out_rs.

    >>> import numpy as np
    >>> from longspan.vllm import mask_dcp_empty_shards_
    >>> lse = np.zeros((4, 1), np.float32)
    >>> mask_dcp_empty_shards_(lse, np.array([9, 0]), np.array([0, 1, 3]))
    >>> lse[:, 0].tolist()
    [0.0, -inf, -inf, -inf]
    """
    check_shape("lse", lse, (None, None), "[tokens, heads]")
    masked = _without_empty_shards(lse, seq_lens, query_start_loc)
    if masked is not lse:
        lse[:] = masked


# ---- latent attention (MLA) --------------------------------------------------------------------------------------


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """What FlashMLA returns: a place for its schedule, and None. Nothing is read of the arguments, nor of the result:
    longspan plans each call by itself.

    >>> from longspan.vllm import get_mla_metadata
    >>> metadata, none = get_mla_metadata()
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(q: Array, k_cache: Array, block_table: Array | None, cache_seqlens: Array | None,
                           head_dim_v: int, tile_scheduler_metadata: Any = None, num_splits: Any = None,
                           softmax_scale: float | None = None, causal: bool = False, is_fp8_kvcache: bool = False,
                           indices: Any = None, attn_sink: Any = None, extra_k_cache: Any = None,
                           extra_indices_in_kvcache: Any = None, topk_length: Any = None,
                           extra_topk_length: Any = None) -> tuple[Array, Array]:
    """FlashMLA's dense decode over pages of latent rows, whose first columns are the values.

    Args:
        q: [batch, tokens, heads, head_dim], absorbed: 576 columns of DeepSeek's models; any number up to 576.
        k_cache: pages [blocks, block_size, kv_heads, head_dim] of any size and strides, in the type of q. With
            is_fp8_kvcache rows that carry their scales, [blocks, block_size, 1, bytes] of uint8 or fp8: 656 bytes
            (fp8_ds_mla), 584 (of DeepSeek V4), 528 or 352 (nvfp4_ds_mla).
        block_table: [batch, columns] int32; cache_seqlens: [batch] int32, keys of each sequence, the new ones included.
        head_dim_v: columns of a row that are its value: 512 there; any number up to 512.
        tile_scheduler_metadata, num_splits: not read: longspan plans each call by itself.
        softmax_scale: None is 1 / sqrt(head_dim), of the absorbed head_dim, as there.
        causal: token t of a sequence sees the keys up to its own position.
        indices: sparse attention: [batch, tokens, topk] int32 rows of the cache, page * block_size + row, of any topk; below
            0 or past the end is nobody. block_table and cache_seqlens are then not read, and may be None.
        attn_sink: with indices, [heads] float32, a learned sink, which is in out and not in lse.
        topk_length: with indices, [batch] int32, the first indices of each token that count.

    Returns:
        (out [batch, tokens, heads, head_dim_v], lse [batch, heads, tokens] float32, natural). A row that sees no key is 0
        and -inf; there its lse is +inf.

    Raises:
        UnsupportedError: extra_k_cache, extra_indices_in_kvcache, extra_topk_length; causal with indices, and attn_sink and
            topk_length without them.

    >>> import numpy as np
    >>> from longspan.vllm import flash_mla_with_kvcache, get_mla_metadata
    >>> q = np.ones((2, 1, 16, 576), np.float32)
    >>> cache = np.random.default_rng(0).standard_normal((10, 64, 1, 576), dtype=np.float32)
    >>> table, lengths = np.arange(10, dtype=np.int32).reshape(2, 5), np.array([300, 20], np.int32)
    >>> out, lse = flash_mla_with_kvcache(q, cache, table, lengths, 512, *get_mla_metadata(), causal=True)
    >>> out.shape, lse.shape
    ((2, 1, 16, 512), (2, 16, 1))
    """
    return flash_mla("longspan.vllm.flash_mla_with_kvcache", q, k_cache, block_table, cache_seqlens, head_dim_v,
                     softmax_scale, causal, is_fp8_kvcache=is_fp8_kvcache, indices=indices, attn_sink=attn_sink,
                     extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache,
                     topk_length=topk_length, extra_topk_length=extra_topk_length)


def get_mla_metadata_dense_fp8(cache_seqlens: Any = None, num_q_tokens_per_head_k: Any = None,
                               num_heads_k: Any = None) -> tuple[FlashMLASchedMeta, None]:
    """As get_mla_metadata.

    >>> from longspan.vllm import get_mla_metadata_dense_fp8
    >>> metadata, none = get_mla_metadata_dense_fp8()
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache_fp8(q: Array, k_cache: Array, block_table: Array, cache_seqlens: Array, head_dim_v: int,
                               tile_scheduler_metadata: Any = None, num_splits: Any = None,
                               softmax_scale: float | None = None, causal: bool = False,
                               descale_q: Numbers | None = None,
                               descale_k: Numbers | None = None) -> tuple[Array, Array]:
    """flash_mla_with_kvcache of q and rows of fp8; out is bfloat16.

    Args:
        descale_q, descale_k: [1] or [batch] float32: a stored x means x * descale.
        others: as flash_mla_with_kvcache.

    >>> import ml_dtypes, numpy as np
    >>> from longspan.vllm import flash_mla_with_kvcache_fp8
    >>> q = np.ones((1, 1, 16, 576), ml_dtypes.float8_e4m3fn)
    >>> cache, one = np.ones((2, 64, 1, 576), ml_dtypes.float8_e4m3fn), np.ones(1, np.float32)
    >>> table, lengths = np.arange(2, dtype=np.int32)[None], np.array([100], np.int32)
    >>> out, lse = flash_mla_with_kvcache_fp8(q, cache, table, lengths, 512, descale_q=one, descale_k=one)
    >>> float(out.max())
    1.0
    """
    return flash_mla("longspan.vllm.flash_mla_with_kvcache_fp8", q, k_cache, block_table, cache_seqlens, head_dim_v,
                     softmax_scale, causal, descale_q=descale_q, descale_k=descale_k)


def concat_and_cache_mla(kv_c: Array, k_pe: Array, kv_cache: Array, slot_mapping: Numbers, kv_cache_dtype: str,
                         scale: Numbers | None = None) -> None:
    """Writes new latent rows to pages, each to its slot: with the bytes that vLLM's kernel writes.

    Args:
        kv_c: [tokens, latent]; k_pe: [tokens, rotary].
        kv_cache: [blocks, block_size, latent + rotary], written. "fp8_ds_mla" has rows that carry their scales, uint8 or
            fp8 of 656 bytes: a scale of 128 numbers is amax / 448. Rows of 584 bytes have scales of 64 that are powers of
            two.
        slot_mapping: [tokens]: block * block_size + row; a token with a slot below 0 is not written.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3", "fp8_e5m2" or "fp8_ds_mla".
        scale: [1] float32, of fp8: x / scale is stored; otherwise not read.

    Raises:
        UnsupportedError: rows that are read only: "nvfp4_ds_mla", and those of 528 bytes.

    >>> import numpy as np
    >>> from longspan.vllm import concat_and_cache_mla
    >>> kv_c, k_pe, cache = np.ones((2, 512), np.float32), np.ones((2, 64), np.float32), np.zeros((3, 64, 656), np.uint8)
    >>> concat_and_cache_mla(kv_c, k_pe, cache, [70, -1], "fp8_ds_mla")
    >>> int(cache[1, 6, 0]), bool(cache[1, 6, 512:516].view(np.float32)[0] == np.float32(1 / 448))
    (126, True)
    """
    append(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)


def sm100_cutlass_mla_get_workspace_size(max_seq_len: int, num_batches: int, sm_count: int = 0,
                                         num_kv_splits: int = 1) -> int:
    """0: longspan keeps its own memory.

    >>> from longspan.vllm import sm100_cutlass_mla_get_workspace_size
    >>> sm100_cutlass_mla_get_workspace_size(4096, 8)
    0
    """
    return 0


def sm100_cutlass_mla_decode(out: Array, lse: Array, q_nope: Array, q_pe: Array, kv_c_and_k_pe_cache: Array,
                             seq_lens: Array, page_table: Array, workspace: Any, scale: float,
                             num_kv_splits: int = 1) -> Array:
    """Writes the attention of one token of each sequence over pages of latent rows to `out`, on any device.

    Args:
        out: [batch, heads, latent]; lse: [batch, heads] float32, natural; or an array without elements, which stays so.
        q_nope, q_pe: [batch, heads, latent], [batch, heads, rotary]; copied unless they are parts of one row of memory.
        kv_c_and_k_pe_cache: pages [blocks, block_size, latent + rotary].
        seq_lens: [batch] int32; page_table: [batch, columns] int32.
        workspace, num_kv_splits: not read.

    Returns:
        out

    >>> import numpy as np
    >>> from longspan.vllm import sm100_cutlass_mla_decode
    >>> q, rope = np.ones((2, 16, 512), np.float32), np.ones((2, 16, 64), np.float32)
    >>> cache = np.random.default_rng(0).standard_normal((10, 64, 576), dtype=np.float32)
    >>> table, lengths = np.arange(10, dtype=np.int32).reshape(2, 5), np.array([300, 20], np.int32)
    >>> out, lse = np.empty_like(q), np.empty((2, 16), np.float32)
    >>> sm100_cutlass_mla_decode(out, lse, q, rope, cache, lengths, table, None, 192 ** -0.5).shape
    (2, 16, 512)
    """
    required("out", out)
    required("lse", lse)
    is_wanted = len(lse.shape) != 1 or lse.shape[0] != 0
    if is_wanted:
        check_shape("lse", lse, tuple(q_nope.shape[:2]), "[batch, heads]")
    _, made = cutlass(q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, scale, out)
    if is_wanted:
        lse[:] = made
    return out


__all__ = ["FlashMLASchedMeta", "concat_and_cache_mla", "context_attention_fwd", "cp_lse_ag_out_ar", "cp_lse_ag_out_rs",
           "dcp_a2a_lse_reduce", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "flash_mla_with_kvcache_fp8",
           "get_mla_metadata", "get_mla_metadata_dense_fp8",
           "mask_dcp_empty_shards_", "merge_attn_states", "sm100_cutlass_mla_decode",
           "sm100_cutlass_mla_get_workspace_size", "unified_attention"]
