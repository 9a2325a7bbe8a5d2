"""Latent attention (MLA) over pages, for the functions of serving engines: longspan.vllm, .sglang and .flashinfer.

A latent row is [latent | rotary]: all heads of queries read it as their one key, and its first columns as the value.
"""

from __future__ import annotations

import sys

from . import _core
from ._attention import ALONE, attend
from ._errors import InputError, UnsupportedError
from ._names import TRANSLATED, check_shape, in_their_words, is_fp8, refuse, required, type_of
from ._serving import append_kv

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._attention import Array, Numbers


class FlashMLASchedMeta:
    """Stands where FlashMLA keeps its schedule. longspan plans each call by itself, and reads nothing of it."""


def _torch_of(array):
    """The module torch for its tensors, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def _numpy_of(array):
    """NumPy for its arrays, else None."""
    import numpy

    return numpy if isinstance(array, numpy.ndarray) else None


def joined(left: Array, right: Array, left_name: str, right_name: str, *, copies: bool) -> Array:
    """One view of rows whose columns are those of `left` and then of `right`. Where they are not parts of one row of
    memory they are copied with `copies`, and else refused."""
    if tuple(left.shape[:-1]) != tuple(right.shape[:-1]) or type_of(left) != type_of(right):
        raise InputError(f"{left_name} is {type_of(left)} {list(left.shape)} and {right_name} {type_of(right)} "
                         f"{list(right.shape)}; only their last dimensions may differ")
    torch, columns = _torch_of(left), left.shape[-1] + right.shape[-1]
    shape = (*left.shape[:-1], columns)
    if torch is not None and _torch_of(right) is not None:
        size, at = left.element_size(), (left.data_ptr(), right.data_ptr())
        strides = [tuple(step * size for step in t.stride()) for t in (left, right)]
    elif _numpy_of(left) is not None and _numpy_of(right) is not None:
        size, at = left.itemsize, tuple(t.__array_interface__["data"][0] for t in (left, right))
        strides = [left.strides, right.strides]
    else:
        raise UnsupportedError(f"{left_name} is of type '{type(left).__name__}' and {right_name} of type "
                               f"'{type(right).__name__}'; two arrays of NumPy or of torch are supported")
    steps = [(a, b) for n, a, b in zip(shape[:-1], *strides) if n > 1]
    is_row = (at[1] - at[0] == left.shape[-1] * size and strides[0][-1] == strides[1][-1] == size and len(steps) > 0
              and all(a == b and a >= columns * size for a, b in steps))
    rows = 1
    for n in shape[:-1]:
        rows *= n
    if not is_row and rows > 1 and not copies:
        raise UnsupportedError(f"{left_name} and {right_name} are not the first and the last columns of one row of memory, "
                               f"[..., {columns}]: longspan reads a latent row once, as key and as value. Keep one cache, and "
                               f"give cache[..., :{left.shape[-1]}] and cache[..., {left.shape[-1]}:]")
    if torch is not None:
        return left.as_strided(shape, left.stride()) if is_row else torch.cat([left, right], -1)
    import numpy

    if is_row:
        return numpy.lib.stride_tricks.as_strided(left, shape, left.strides)
    return numpy.concatenate([left, right], -1)


def _numpy_type(name):
    import ml_dtypes

    return getattr(ml_dtypes, name)


def _new(q, shape, dtype):
    torch = _torch_of(q)
    if torch is not None:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=q.device)
    numpy = _numpy_of(q)
    if numpy is None:
        raise UnsupportedError(f"q is of type '{type(q).__name__}' and fp8, which is supported of NumPy and torch")
    return numpy.empty(shape, _numpy_type(dtype))


def _descale(name, scale, array, array_name, batch):
    """A descale as attend takes it: [1], or [batch, 1] for one of each sequence."""
    if not is_fp8(array):
        if scale is not None:
            raise InputError(f"{name} is given and {array_name} is {type_of(array)}; it is the scale of fp8")
        return None
    if scale is None:
        raise InputError(f"{name} is None and {array_name} is {type_of(array)}; fp8 has a scale, 1 if there is none")
    shape = getattr(scale, "shape", ())
    if len(shape) == 1 and shape[0] == batch and batch > 1:
        return scale[:, None]
    return scale


def contiguous(array):
    """The same elements without gaps."""
    torch = _torch_of(array)
    if torch is not None:
        return array.contiguous()
    numpy = _numpy_of(array)
    return array if numpy is None else numpy.ascontiguousarray(array)


_BY_BYTES = {656: "latent656", 584: "latent584", 528: "latent528", 352: "latent352"}


def _as_bytes(array):
    """The same memory as uint8. FlashMLA's callers give rows of bytes as fp8."""
    torch = _torch_of(array)
    if torch is not None:
        return array.view(torch.uint8) if array.element_size() == 1 else array
    numpy = _numpy_of(array)
    return array if numpy is None or array.itemsize != 1 else array.view(numpy.uint8)


def _rows_of(k_cache):
    """The format of rows that carry their scales, by their bytes."""
    check_shape("k_cache", k_cache, (None, None, 1, None), "pages of rows that carry their scales, [pages, page, 1, bytes],")
    found = _BY_BYTES.get(k_cache.shape[3])
    if found is None or type_of(_as_bytes(k_cache)) != "uint8":
        raise InputError(f"k_cache is {type_of(k_cache)} {list(k_cache.shape)} and is_fp8_kvcache is True: uint8 or fp8 rows of "
                         f"{', '.join(map(str, _BY_BYTES))} bytes are wanted")
    return found


def decode(q: Array, k_cache: Array, block_table: Array, cache_seqlens: Array, head_dim_v: int,
           softmax_scale: float | None, causal: bool, names: dict[str, str], *, descale_q: Numbers | None = None,
           descale_k: Numbers | None = None, out: Array | None = None,
           kv_dtype: str | None = None) -> tuple[Array, Array]:
    """FlashMLA's dense decode: (out [batch, tokens, heads, head_dim_v], lse [batch, tokens, heads], natural). kv_dtype is
    that of attend."""
    check_shape("q", q, (None,) * 4, "[batch, tokens, heads, head_dim]")
    check_shape("k_cache", k_cache, (None,) * 4, "[pages, page, kv_heads, head_dim]")
    check_shape("block_table", block_table, (q.shape[0], None), "[batch, columns]")
    check_shape("cache_seqlens", cache_seqlens, (q.shape[0],), "[batch]")
    if isinstance(head_dim_v, bool) or not hasattr(head_dim_v, "__index__"):
        raise TypeError(f"head_dim_v is of type '{type(head_dim_v).__name__}'; an int is wanted")
    if not isinstance(causal, bool):
        raise TypeError(f"causal is of type '{type(causal).__name__}'; a bool is wanted")
    if kv_dtype is not None:
        if head_dim_v != 512:
            raise InputError(f"head_dim_v is {int(head_dim_v)}; the values of {kv_dtype} are 512 numbers")
    elif not 1 <= head_dim_v <= k_cache.shape[3]:
        raise InputError(f"head_dim_v is {int(head_dim_v)} and k_cache {list(k_cache.shape)}: the values are the first "
                         "head_dim_v columns of its rows")
    if kv_dtype is None and q.shape[3] != k_cache.shape[3]:
        raise InputError(f"q is {list(q.shape)} and k_cache {list(k_cache.shape)}; their last dimensions are the same")
    if k_cache.shape[2] == 0 or q.shape[2] % k_cache.shape[2]:
        raise InputError(f"q has {q.shape[2]} heads and k_cache {k_cache.shape[2]}, which do not divide them")
    batch = q.shape[0]
    if kv_dtype is not None:
        k_cache, v_cache, descales = _as_bytes(k_cache), None, {"kv_dtype": kv_dtype}
    else:
        v_cache = k_cache[..., :int(head_dim_v)]
        descales = {"q_descale": _descale("descale_q", descale_q, q, "q", batch),
                    "k_descale": _descale("descale_k", descale_k, k_cache, "k_cache", batch)}
    if out is None and is_fp8(q):
        out = _new(q, (*q.shape[:3], int(head_dim_v)), "bfloat16")
    options = {name: value for name, value in descales.items() if value is not None}
    try:
        return attend(q, k_cache, v_cache, comm=ALONE, causal=causal, softmax_scale=softmax_scale,
                      block_table=block_table, cache_seqlens=cache_seqlens, return_lse=True, out=out, values_in_keys=True,
                      **options)
    except TRANSLATED as error:
        raise in_their_words(error, names) from None


def append(kv_c: Array, k_pe: Array, kv_cache: Array, slot_mapping: Numbers, kv_cache_dtype: str, scale: Numbers | None) -> None:
    """vLLM's concat_and_cache_mla."""
    check_shape("kv_c", kv_c, (None, None), "[tokens, latent]")
    check_shape("k_pe", k_pe, (kv_c.shape[0], None), "[tokens, rotary]")
    check_shape("kv_cache", kv_cache, (None, None, None), "[pages, page, columns or bytes]")
    names = {"k_cache": "kv_cache", "k_descale": "scale", "k_scale": "scale", "k": "kv_c and k_pe"}
    new = joined(kv_c, k_pe, "kv_c", "k_pe", copies=True)[:, None]
    cache, rows, descale = kv_cache[:, :, None], None, None
    if kv_cache_dtype in ("fp8_ds_mla", "nvfp4_ds_mla"):
        rows = _rows_of(cache)
        if (rows == "latent352") != (kv_cache_dtype == "nvfp4_ds_mla"):
            raise InputError(f"kv_cache_dtype is {kv_cache_dtype!r}, and kv_cache {list(kv_cache.shape)} has rows of "
                             f"{kv_cache.shape[2]} bytes")
        cache = _as_bytes(cache)
    elif kv_cache_dtype != "auto":
        dtype = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(kv_cache_dtype)
        if dtype is None:
            raise UnsupportedError(f"kv_cache_dtype {kv_cache_dtype!r} is not supported: auto, fp8, fp8_e4m3, fp8_e5m2, "
                                   "fp8_ds_mla and nvfp4_ds_mla are")
        torch = _torch_of(cache)
        cache = _as_bytes(cache).view(getattr(torch, dtype)) if torch is not None else _as_bytes(cache).view(_numpy_type(dtype))
        descale = scale
    try:
        append_kv(new, None, cache, None if rows else cache[..., :kv_c.shape[1]], slot_mapping, k_descale=descale,
                  kv_dtype=rows)
    except TRANSLATED as error:
        raise in_their_words(error, names) from None


_FLASH_MLA = {"k": "k_cache", "kv_len": "cache_seqlens", "q_descale": "descale_q", "k_descale": "descale_k",
              "q_scale": "descale_q", "k_scale": "descale_k"}


def flash_mla(function: str, q: Array, k_cache: Array, block_table: Array | None, cache_seqlens: Array | None, head_dim_v: int,
              softmax_scale: float | None, causal: bool, *, descale_q: Numbers | None = None,
              descale_k: Numbers | None = None, is_fp8_kvcache: bool = False, **sparse: Any) -> tuple[Array, Array]:
    """flash_mla_with_kvcache of FlashMLA, vLLM and SGLang: lse is [batch, heads, tokens]."""
    rows = None
    if is_fp8_kvcache:
        refuse(function, "rows that carry their scales are read by dense attention; longspan.attend with kv_dtype and indices "
                         "reads them", indices=(sparse.get("indices"), None))
        rows = _rows_of(k_cache)
        refuse(function, f"rows of {rows} carry their scales, and q is bfloat16", descale_q=(descale_q, None),
               descale_k=(descale_k, None))
    refuse(function, "a second cache is not read: leave it out",
           **{name: (value, None) for name, value in sparse.items() if name.startswith("extra_")})
    indices, sink, length = (sparse.get(name) for name in ("indices", "attn_sink", "topk_length"))
    if indices is not None:
        refuse(function, "q of fp8 is not read with indices", descale_q=(descale_q, None))
        return _sparse_decode(q, k_cache, indices, head_dim_v, softmax_scale, causal, sink, length, descale_k)
    refuse(function, "it is of sparse attention, which indices ask for", attn_sink=(sink, None), topk_length=(length, None))
    out, lse = decode(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, _FLASH_MLA,
                      descale_q=descale_q, descale_k=descale_k, kv_dtype=rows)
    return out, contiguous(lse.swapaxes(1, 2))


_SPARSE = {"topk_length": "topk_length", "index_len": "topk_length", "softmax_scale": "sm_scale", "sinks": "attn_sink"}


def _lse(most, total):
    """max + ln(sum) of states, without a warning for empty ones."""
    if hasattr(most, "log"):
        return most + total.log()
    import numpy

    with numpy.errstate(divide="ignore"):
        return most + numpy.log(total)


def _columns(head_dim_v, rows, name):
    if isinstance(head_dim_v, bool) or not hasattr(head_dim_v, "__index__"):
        raise TypeError(f"{name} is of type '{type(head_dim_v).__name__}'; an int is wanted")
    if not 1 <= head_dim_v <= rows.shape[-1]:
        raise InputError(f"{name} is {int(head_dim_v)} and rows have {rows.shape[-1]} columns: the values are the first of them")
    return rows[..., :int(head_dim_v)]


def _sparse_decode(q, k_cache, indices, head_dim_v, softmax_scale, causal, sink, length, descale_k):
    """FlashMLA's sparse decode: indices are rows of the cache, page * page_size + row."""
    if causal:
        raise UnsupportedError("causal with indices is not supported: leave out those of keys that a row must not see")
    check_shape("q", q, (None,) * 4, "[batch, tokens, heads, head_dim]")
    check_shape("k_cache", k_cache, (None, None, None, q.shape[3]), "[pages, page, kv_heads, head_dim]")
    batch, tokens, heads, _ = q.shape
    check_shape("indices", indices, (batch, tokens, None), "[batch, tokens, topk]")
    if length is not None:
        check_shape("topk_length", length, (batch,), "[batch]")
        length = length.repeat_interleave(tokens) if hasattr(length, "repeat_interleave") else length.repeat(tokens)
    try:
        out, most, total = _core.sparse_attention(
            q=q.reshape(batch * tokens, heads, q.shape[3]), k=k_cache, v=_columns(head_dim_v, k_cache, "head_dim_v"),
            indices=indices.reshape(batch * tokens, indices.shape[2]), topk_length=length, index_slots=True, sinks=sink,
            softmax_scale=softmax_scale, k_descale=_descale("descale_k", descale_k, k_cache, "k_cache", batch), out=None,
            stream=None)
    except TRANSLATED as error:
        raise in_their_words(error, _SPARSE | {"k": "k_cache", "softmax_scale": "softmax_scale"}) from None
    lse = _lse(most, total).reshape(batch, tokens, heads)
    return out.reshape(batch, tokens, heads, int(head_dim_v)), contiguous(lse.swapaxes(1, 2))


def flash_mla_sparse_fwd(q: Array, kv: Array, indices: Array, sm_scale: float, d_v: int = 512,
                         attn_sink: Array | None = None,
                         topk_length: Array | None = None) -> tuple[Array, Array, Array]:
    """DeepSeek's sparse prefill: each token sees the rows of kv that its indices name.

    Args:
        q: [tokens, heads, head_dim], absorbed; any number of heads.
        kv: [keys, kv_heads, head_dim], latent rows whose first d_v columns are the values.
        indices: [tokens, kv_heads, topk] int32 rows of kv. One below 0 or past the end is nobody, and one that is given
            twice counts twice. topk is any number.
        sm_scale: factor of the scores; d_v: columns of a row that are its value.
        attn_sink: [heads] float32, a learned sink, which is in out, and not in the others.
        topk_length: [tokens] int32: the first indices of a token that count.

    Returns:
        (out [tokens, heads, d_v], max_logits [tokens, heads], lse [tokens, heads] float32, natural). The out of a row
        that sees no key is 0, and both others are -inf; the lse of FlashMLA is then +inf.

    >>> import numpy as np
    >>> from longspan.vllm import flash_mla_sparse_fwd
    >>> q, kv = np.random.default_rng(0).standard_normal((2, 100, 16, 576), dtype=np.float32)
    >>> indices = np.random.default_rng(1).integers(-1, 100, (3, 1, 64), dtype=np.int32)
    >>> out, max_logits, lse = flash_mla_sparse_fwd(q[:3], kv[:, :1], indices, 192 ** -0.5)
    >>> out.shape, lse.shape
    ((3, 16, 512), (3, 16))
    """
    check_shape("q", q, (None,) * 3, "[tokens, heads, head_dim]")
    check_shape("kv", kv, (None, None, q.shape[2]), "[keys, kv_heads, head_dim]")
    check_shape("indices", indices, (q.shape[0], kv.shape[1], None), "[tokens, kv_heads, topk]")
    try:
        out, most, total = _core.sparse_attention(
            q=q, k=kv, v=_columns(d_v, kv, "d_v"), indices=indices, topk_length=topk_length, index_slots=False,
            sinks=attn_sink, softmax_scale=sm_scale, k_descale=None, out=None, stream=None)
    except TRANSLATED as error:
        raise in_their_words(error, _SPARSE | {"k": "kv"}) from None
    return out, most, _lse(most, total)


def cutlass(q_nope: Array, q_pe: Array, cache: Array, seq_lens: Array, page_table: Array, scale: float,
            out: Array | None = None) -> tuple[Array, Array]:
    """The decode of one token by the functions named cutlass_mla: (out, lse), [batch, heads, ...]."""
    check_shape("q_nope", q_nope, (None,) * 3, "[batch, heads, latent]")
    check_shape("q_pe", q_pe, (*q_nope.shape[:2], None), "[batch, heads, rotary]")
    check_shape("kv_c_and_k_pe_cache", cache, (None, None, q_nope.shape[2] + q_pe.shape[2]), "[pages, page, latent + rotary]")
    if out is not None:
        required("out", out)
        check_shape("out", out, tuple(q_nope.shape), "[batch, heads, latent]")
    q = joined(q_nope, q_pe, "q_nope", "q_pe", copies=True)
    names = {"k": "kv_c_and_k_pe_cache", "k_cache": "kv_c_and_k_pe_cache", "cache_seqlens": "seq_lens",
             "kv_len": "seq_lens", "block_table": "page_table", "softmax_scale": "scale", "q": "q_nope"}
    check_shape("page_table", page_table, (q.shape[0], None), "[batch, columns]")
    check_shape("seq_lens", seq_lens, (q.shape[0],), "[batch]")
    made, lse = decode(q[:, None], cache[:, :, None], page_table, seq_lens, q_nope.shape[2], scale, False, names,
                       out=None if out is None else out[:, None])
    return made[:, 0], lse[:, 0]
