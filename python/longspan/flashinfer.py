"""FlashInfer's merges and single-request attention by their names and arguments. FlashInfer is not
imported.

    from longspan.flashinfer import merge_state, single_prefill_with_kv_cache

Every log-sum-exp, given and returned, is of base 2, as FlashInfer's are; those of 16 bits are read as
float32. An argument that changes the result, and that longspan does not support, raises
UnsupportedError with its name, unless it means the same as the default. Arguments that only choose
among FlashInfer's kernels (backend, use_tensor_cores, use_fp16_qk_reduction) are accepted and not
read. Arrays are of any kind, on CPUs too. Empty states (-inf, +inf) count for nothing: a row of only
empty states is 0 and -inf.
"""

from __future__ import annotations

import sys

from . import _core
from ._attention import ALONE, attend
from ._errors import InputError, UnsupportedError, UsageError
from ._mla import joined
from ._names import TRANSLATED, check_shape, in_their_words, is_fp8, refuse, required, type_of
from ._serving import narrow_lse, wide_lse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._attention import Array, Numbers

LOG2_E = 1.4426950408889634

_THREE = (None, None, None)  # dimensions of any size

_TWO = {"prefix_output": "v_a", "prefix_out": "v_a", "prefix_lse": "s_a", "suffix_output": "v_b",
        "suffix_out": "v_b", "suffix_lse": "s_b"}
_IN_PLACE = {"prefix_output": "v", "prefix_out": "v", "prefix_lse": "s", "suffix_output": "v_other",
             "suffix_out": "v_other", "suffix_lse": "s_other", "out": "v", "lse": "s", "out_lse": "s"}


def merge_state(v_a: Array, s_a: Array, v_b: Array, s_b: Array) -> tuple[Array, Array]:
    """The merge of the attention over two parts of the keys.

    Args:
        v_a, v_b: [tokens, heads, head_dim], of any float type, any strides.
        s_a, s_b: [tokens, heads], of float32 or 16 bits, their log-sum-exps, base 2.

    Returns:
        (v, s)

    >>> import numpy as np
    >>> from longspan.flashinfer import merge_state
    >>> v, s = np.ones((3, 4, 16), np.float32), np.zeros((3, 4), np.float32)
    >>> merged, lse = merge_state(v, s, 3 * v, s)
    >>> float(merged[0, 0, 0]), float(lse[0, 0])
    (2.0, 1.0)
    """
    _check_state(v_a, s_a, "v_a", "s_a")
    _check_state(v_b, s_b, "v_b", "s_b")
    try:
        return _core.merge_attn_states(
            prefix_output=v_a, prefix_lse=wide_lse(s_a), suffix_output=v_b, suffix_lse=wide_lse(s_b), base=2,
            heads_first=False, out=None, lse=None, prefill_tokens_with_context=None, out_scale=None,
            prefix_scale=None, suffix_scale=None, nan_is_empty=False, stream=None)
    except TRANSLATED as error:
        raise in_their_words(error, _TWO) from None


def merge_state_in_place(v: Array, s: Array, v_other: Array, s_other: Array,
                         mask: Array | None = None) -> None:
    """Merges another state into (v, s), in place.

    Args:
        v, v_other: [tokens, heads, head_dim]; v is written.
        s, s_other: [tokens, heads], of float32 or 16 bits, base 2; s is written.
        mask: [tokens] bool: rows that are False stay as they are.

    >>> import numpy as np
    >>> from longspan.flashinfer import merge_state_in_place
    >>> v, s = np.ones((3, 4, 16), np.float32), np.zeros((3, 4), np.float32)
    >>> merge_state_in_place(v, s, 3 * v, s.copy(), mask=np.array([True, False, True]))
    >>> v[:, 0, 0].tolist()
    [2.0, 1.0, 2.0]
    """
    required("v", v)
    required("s", s)
    _check_state(v, s, "v", "s")
    _check_state(v_other, s_other, "v_other", "s_other")
    if mask is not None:
        check_shape("mask", mask, (v.shape[0],), "[tokens]")
        if type_of(mask) != "bool":
            raise InputError(f"mask is {type_of(mask)}; bool is wanted")
        for name, array in (("v", v), ("s", s)):  # before either is written
            if not getattr(getattr(array, "flags", None), "writeable", True):
                raise InputError(f"{name} is read-only, and the call writes to it")
    own_s = narrow_lse("s", s)
    try:
        out, lse = _core.merge_attn_states(
            prefix_output=v, prefix_lse=own_s, suffix_output=v_other, suffix_lse=wide_lse(s_other), base=2,
            heads_first=False, out=None if mask is not None else v, lse=None if mask is not None else own_s,
            prefill_tokens_with_context=None, out_scale=None, prefix_scale=None, suffix_scale=None,
            nan_is_empty=False, stream=None)
    except TRANSLATED as error:
        raise in_their_words(error, _IN_PLACE) from None
    if mask is None:
        if own_s is not s:
            s[:] = lse
        return
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(v, torch.Tensor):  # waits for nothing on a GPU
        v.copy_(torch.where(mask[:, None, None], out, v))
        s.copy_(torch.where(mask[:, None], lse, s))
    else:
        v[mask], s[mask] = out[mask], lse[mask]


def merge_states(v: Array, s: Array) -> tuple[Array, Array]:
    """The merge of the attention over any number of parts of the keys.

    Args:
        v: [tokens, parts, heads, head_dim].
        s: [tokens, parts, heads], of float32 or 16 bits, base 2.

    Returns:
        (v [tokens, heads, head_dim], s [tokens, heads])

    >>> import numpy as np
    >>> from longspan.flashinfer import merge_states
    >>> v, s = np.ones((3, 4, 2, 16), np.float32), np.zeros((3, 4, 2), np.float32)
    >>> merged, lse = merge_states(v, s)
    >>> merged.shape, float(lse[0, 0])
    ((3, 2, 16), 2.0)
    """
    check_shape("v", v, (None,) * 4, "[tokens, parts, heads, head_dim]")
    check_shape("s", s, tuple(v.shape[:3]), "[tokens, parts, heads]")
    try:
        return _core.merge_states(v=v, s=wide_lse(s), base=2, out=None, lse=None, out_scale=None, part_scales=None,
                                  nan_is_empty=False, stream=None)
    except TRANSLATED as error:
        raise in_their_words(error, {"parts": "v", "lses": "s"}) from None


def _check_state(v, s, v_name, s_name):
    check_shape(v_name, v, _THREE, "[tokens, heads, head_dim]")
    check_shape(s_name, s, tuple(v.shape[:2]), "[tokens, heads]")


def _check_tuning(backend, **flags):
    """A choice of FlashInfer's kernels changes no result: only its type is checked."""
    if not isinstance(backend, str):
        raise TypeError(f"backend is of type '{type(backend).__name__}'; a str is wanted")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is of type '{type(value).__name__}'; a bool is wanted")


def _rope(function, pos_encoding_mode, rope_scale, rope_theta):
    """RoPE as arguments of attend, or None."""
    if rope_scale is rope_theta is None and pos_encoding_mode == "NONE":
        return None
    if pos_encoding_mode != "ROPE_LLAMA":
        refuse(function, "'NONE' and 'ROPE_LLAMA' are supported", pos_encoding_mode=(pos_encoding_mode, "NONE"))
        refuse(function, "they are read with pos_encoding_mode='ROPE_LLAMA'", rope_scale=(rope_scale, None),
               rope_theta=(rope_theta, None))
    return dict(rope_scale=_number("rope_scale", rope_scale),
                rope_theta=1e4 if rope_theta is None else _number("rope_theta", rope_theta))


def _rotated(k, rope):
    """A copy of k [keys, kv_heads, head_dim], rotated by its positions in float64 and rounded once."""
    half = k.shape[2] // 2
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(k, torch.Tensor):
        def made(count):
            return torch.arange(count, dtype=torch.float64, device=k.device)

        wide, join, cosine, sine = k.double(), torch.cat, torch.cos, torch.sin
    else:
        import numpy

        if not isinstance(k, numpy.ndarray):
            raise UnsupportedError("pos_encoding_mode is 'ROPE_LLAMA', and k is an array of neither NumPy nor torch")
        made, wide, join, cosine, sine = numpy.arange, k.astype(numpy.float64), numpy.concatenate, numpy.cos, numpy.sin
    angles = made(k.shape[0])[:, None] / rope["rope_scale"] * rope["rope_theta"] ** (-made(half) / half)
    cos, sin = cosine(angles)[:, None], sine(angles)[:, None]
    x, y = wide[..., :half], wide[..., half:]
    rows = join([x * cos - y * sin, y * cos + x * sin], -1)
    return rows.to(k.dtype) if torch is not None and isinstance(k, torch.Tensor) else rows.astype(k.dtype)


def single_decode_with_kv_cache(q: Array, k: Array, v: Array, kv_layout: str = "NHD",
                                pos_encoding_mode: str = "NONE", use_tensor_cores: bool = False,
                                q_scale: float | None = None, k_scale: float | None = None,
                                v_scale: float | None = None, window_left: int = -1,
                                logits_soft_cap: float | None = None, sm_scale: float | None = None,
                                rope_scale: float | None = None, rope_theta: float | None = None,
                                return_lse: bool = False) -> Any:
    """The attention of the last token of one sequence.

    Args:
        q: [heads, head_dim]; also fp8, which the result then is too.
        k, v: [keys, kv_heads, head_dim] for kv_layout "NHD", [kv_heads, keys, head_dim] for "HND";
            also fp8.
        q_scale, k_scale, v_scale: numbers that q, k and v are multiplied by; None is 1.
        window_left: keys to the left besides the token's own; -1 is no bound.
        logits_soft_cap: None and 0 are off.
        sm_scale: None is 1 / sqrt(head_dim).
        use_tensor_cores: not read: it chooses a kernel of FlashInfer.
        pos_encoding_mode: "ROPE_LLAMA" rotates q and k by their positions / rope_scale *
            rope_theta ** (-2 i / head_dim); None is 1 and 10000. Each call then copies all keys; a
            cache of rotated keys is `k_new` and `rotary_dim` of longspan.attend.

    Returns:
        out [heads, head_dim]; with return_lse (out, lse [heads]), base 2.

    Raises:
        UnsupportedError: another pos_encoding_mode than "NONE" and "ROPE_LLAMA"; that with fp8.

    >>> import numpy as np
    >>> from longspan.flashinfer import single_decode_with_kv_cache
    >>> q, k = np.ones((8, 64), np.float32), np.zeros((4, 2, 64), np.float32)
    >>> out, lse = single_decode_with_kv_cache(q, k, k, return_lse=True)
    >>> out.shape, float(lse[0])      # the logarithm of 4 equal keys
    ((8, 64), 2.0)
    """
    name = "longspan.flashinfer.single_decode_with_kv_cache"
    rope = _rope(name, pos_encoding_mode, rope_scale, rope_theta)
    _check_tuning("auto", use_tensor_cores=use_tensor_cores)
    check_shape("q", q, (None, None), "[heads, head_dim]")
    made = _attend(q[None], k, v, kv_layout, False, window_left, logits_soft_cap, sm_scale,
                   (q_scale, k_scale, v_scale), {}, q.dtype if is_fp8(q) else None, return_lse, rope)
    return (made[0][0], made[1][0]) if return_lse else made[0]


def single_prefill_with_kv_cache(q: Array, k: Array, v: Array, scale_q: Numbers | None = None,
                                 scale_k: Numbers | None = None, scale_v: Numbers | None = None,
                                 o_dtype: Any = None, custom_mask: Any = None,
                                 packed_custom_mask: Any = None, causal: bool = False,
                                 kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
                                 use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
                                 window_left: int = -1, logits_soft_cap: float | None = None,
                                 rope_scale: float | None = None, rope_theta: float | None = None,
                                 backend: str = "auto", return_lse: bool = False,
                                 kv_cache_sf: Any = None, k_scale: float | None = None,
                                 v_scale: float | None = None) -> Any:
    """The attention of the last tokens of one sequence.

    Args:
        q: [tokens, heads, head_dim].
        k, v: [keys, kv_heads, head_dim] for kv_layout "NHD", [kv_heads, keys, head_dim] for "HND".
        scale_q, scale_k, scale_v: [kv_heads] or [1] float32, of fp8 arrays; None is 1.
        o_dtype: of the result; None is that of q, and an fp8 q must have another.
        causal: token i of T sees the keys up to keys - T + i.
        k_scale, v_scale: numbers that k and v are multiplied by; None is 1.
        backend, use_fp16_qk_reduction: not read: they choose a kernel of FlashInfer.
        others: as single_decode_with_kv_cache.

    Returns:
        out [tokens, heads, head_dim]; with return_lse (out, lse [tokens, heads]), base 2.

    Raises:
        UnsupportedError: custom_mask, packed_custom_mask, kv_cache_sf, a scale_q for each query
            head, and as single_decode_with_kv_cache.

    >>> import numpy as np
    >>> from longspan.flashinfer import single_prefill_with_kv_cache
    >>> q, k = np.ones((3, 8, 64), np.float32), np.zeros((4, 2, 64), np.float32)
    >>> out, lse = single_prefill_with_kv_cache(q, k, k, causal=True, return_lse=True)
    >>> bool(np.allclose(2 ** lse[:, 0], [2, 3, 4]))      # equal keys
    True
    """
    name = "longspan.flashinfer.single_prefill_with_kv_cache"
    rope = _rope(name, pos_encoding_mode, rope_scale, rope_theta)
    _check_tuning(backend, use_fp16_qk_reduction=use_fp16_qk_reduction)
    if not (custom_mask is packed_custom_mask is kv_cache_sf is None):
        refuse(name, "causal and window_left are the masks here; longspan.attend has documents and qq_bias too",
               custom_mask=(custom_mask, None), packed_custom_mask=(packed_custom_mask, None))
        refuse(name, "leave it out", kv_cache_sf=(kv_cache_sf, None))
    check_shape("q", q, _THREE, "[tokens, heads, head_dim]")
    return _attend(q, k, v, kv_layout, causal, window_left, logits_soft_cap, sm_scale,
                   (None, k_scale, v_scale), {"q": scale_q, "k": scale_k, "v": scale_v}, o_dtype,
                   return_lse, rope)


def single_prefill_with_kv_cache_return_lse(*args: Any, **options: Any) -> tuple[Array, Array]:
    """single_prefill_with_kv_cache with return_lse=True.

    >>> import numpy as np
    >>> from longspan.flashinfer import single_prefill_with_kv_cache_return_lse
    >>> q = np.ones((3, 2, 64), np.float32)
    >>> len(single_prefill_with_kv_cache_return_lse(q, q, q))
    2
    """
    return single_prefill_with_kv_cache(*args, **options, return_lse=True)


_NAMES = {"softcap": "logits_soft_cap", "softmax_scale": "sm_scale", "window_size": "window_left",
          "q_descale": "scale_q", "k_descale": "scale_k", "v_descale": "scale_v", "q_scale": "scale_q",
          "k_scale": "scale_k", "v_scale": "scale_v", "out_scale": "v_scale"}


def _attend(q, k, v, kv_layout, causal, window_left, softcap, sm_scale, numbers, scales, o_dtype,
            return_lse, rope):
    if kv_layout not in ("NHD", "HND"):
        raise InputError(f"kv_layout is {kv_layout!r}; 'NHD' and 'HND' are possible")
    check_shape("k", k, _THREE, kv_layout)
    check_shape("v", v, _THREE, kv_layout)
    if kv_layout == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    if isinstance(window_left, bool) or not hasattr(window_left, "__index__"):
        raise TypeError(f"window_left is of type '{type(window_left).__name__}'; an int is wanted")
    options = _fp8_scales(q, k, v, scales)
    if rope is not None:
        for name, array in (("q", q), ("k", k)):
            if is_fp8(array):
                raise UnsupportedError(f"pos_encoding_mode is 'ROPE_LLAMA' and {name} is {type_of(array)}: a rotated "
                                       "row would be rounded to fp8 a second time; rotate it before it is quantised")
        k = _rotated(k, rope)
        options.update(rope, rotary_dim=q.shape[2])
    scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
    of_q, of_k, of_v = numbers
    if not of_q is of_k is of_v is None:
        of_q, of_k, of_v = (_number(*named) for named in zip(("q_scale", "k_scale", "v_scale"), numbers))
        if not hasattr(scale, "__float__"):
            raise TypeError(f"sm_scale is of type '{type(scale).__name__}'; a float is wanted")
        scale = float(scale) * of_q * of_k
        if of_v != 1:
            options["out_scale"] = _on_device_of(q, 1 / of_v)
    if o_dtype is not None:
        out = options["out"] = _result(q, (*q.shape[:2], v.shape[2]), o_dtype)
        if is_fp8(out):
            options.setdefault("out_scale", _on_device_of(q, 1.0))
    elif is_fp8(q):
        raise InputError(f"o_dtype is None and q is {type_of(q)}; give the type of the result")
    try:
        made = attend(q, k, v, comm=ALONE, causal=causal, window_size=(window_left, -1), softmax_scale=scale,
                      softcap=0.0 if softcap is None else softcap, return_lse=return_lse, **options)
    except TRANSLATED as error:
        raise in_their_words(error, _NAMES) from None
    return (made[0], made[1] * LOG2_E) if return_lse else made


def _fp8_scales(q, k, v, scales):
    """The arguments of attend: 1 for fp8 without a scale."""
    options = {}
    ones = None  # one array for all: values in the memory of keys have the scale of the keys
    for name, array in (("q", q), ("k", k), ("v", v)):
        given = scales.get(name)
        if is_fp8(array):
            if name == "q" and len(getattr(given, "shape", ())) == 1 and given.shape[0] not in (1, k.shape[1]):
                raise UnsupportedError(f"scale_q is {list(given.shape)}, a scale for each query head; [1] or "
                                       f"[kv_heads] ({k.shape[1]}) is supported")
            if given is None:
                given = ones = _on_device_of(array, 1.0) if ones is None else ones
            options[f"{name}_descale"] = _on_device_of(array, given)
        elif given is not None:
            raise InputError(f"scale_{name} is given and {name} is {type_of(array)}; it is the scale of fp8")
    return options


def _on_device_of(array, number):
    """A number on the device of the array, since attend takes plain numbers only for work on the host; others
    pass unchanged."""
    on_cpu = 1  # kDLCPU of DLPack
    if not isinstance(number, (int, float)) or not hasattr(array, "__dlpack_device__") or array.__dlpack_device__()[0] == on_cpu:
        return number
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch.full((1,), number, dtype=torch.float32, device=array.device)
    space = array.__array_namespace__()
    return space.full((1,), number, dtype=space.float32, device=array.device)


def _number(name, given):
    if given is None:
        return 1.0
    if not isinstance(given, (int, float)):
        if getattr(given, "size", None) != 1 and getattr(given, "shape", None) not in ((), (1,)):
            raise TypeError(f"{name} is of type '{type(given).__name__}'; a float, or an array of one, is wanted")
        given = given.item()  # this waits for a tensor on a GPU
    if not 0 < given < float("inf"):
        raise InputError(f"{name} is {given}; a finite number above 0 is wanted")
    return float(given)


def _result(q, shape, dtype):
    """A new array of the type o_dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        out = torch.empty(shape, dtype=dtype, device=q.device)
    else:
        import numpy

        if not isinstance(q, numpy.ndarray):
            raise UnsupportedError("o_dtype is given, and q is an array of neither NumPy nor torch")
        out = numpy.empty(shape, dtype)
    possible = ("float32", "float16", "bfloat16") if is_fp8(q) else (type_of(q),)
    if not is_fp8(out) and type_of(out) not in possible:
        raise UnsupportedError(f"o_dtype is {type_of(out)} and q is {type_of(q)}; {', '.join(possible)} and fp8 "
                               "are supported")
    return out


# ---- latent attention (MLA) --------------------------------------------------------------------------------------


def _pages_of(indptr, indices):
    """[batch, most pages] int32 from a flat list of pages and where those of each sequence begin; -1 past them."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(indices, torch.Tensor):
        space, place, wide = torch, {"device": indices.device}, dict(dtype=torch.int64)
        indptr = torch.as_tensor(indptr).to(indices.device)
    else:
        import numpy as space

        place, wide, indptr, indices = {}, dict(dtype=space.int64), space.asarray(indptr), space.asarray(indices)
    starts, ends = indptr[:-1], indptr[1:]
    most = int((ends - starts).max()) if len(starts) else 0  # this waits for a tensor on a GPU, as FlashInfer's plan does
    if int(indptr[-1]) > len(indices) or bool((ends < starts).any()):
        raise InputError(f"kv_indptr does not ascend to at most {len(indices)}, the number of kv_indices")
    at = starts[:, None] + space.arange(max(most, 1), **wide, **place)[None]
    is_page = at < ends[:, None]
    if not len(indices):
        return space.full((len(starts), 1), -1, dtype=space.int32, **place)
    pages = indices[space.where(is_page, at, 0 * at)]
    table = space.where(is_page, pages, 0 * pages - 1)
    return table.to(space.int32) if place else table.astype(space.int32)


class BatchMLAPagedAttentionWrapper:
    """Latent attention (MLA) over pages, planned once for several runs, on any device.

    Args:
        float_workspace_buffer: not read: longspan keeps its own memory.
        use_cuda_graph: False; runs to be captured are those of longspan.Attention.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: buffers for CUDA graphs: None.
        backend: not read: it chooses a kernel of FlashInfer. "cutlass", whose arguments are others, is refused.

    >>> import numpy as np
    >>> from longspan.flashinfer import BatchMLAPagedAttentionWrapper
    >>> cache = np.random.default_rng(0).standard_normal((8, 64, 576), dtype=np.float32)
    >>> q = np.ones((2, 16, 576), np.float32)
    >>> wrapper = BatchMLAPagedAttentionWrapper(None)
    >>> starts, lengths = np.array([0, 1, 2], np.int32), np.array([300, 20], np.int32)
    >>> wrapper.plan(starts, np.array([0, 5, 6], np.int32), np.arange(6, dtype=np.int32), lengths, 16, 512, 64, 64, True,
    ...              192 ** -0.5, q.dtype, cache.dtype)
    >>> out, lse = wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], return_lse=True)
    >>> out.shape, lse.shape
    ((2, 16, 512), (2, 16))
    """

    def __init__(self, float_workspace_buffer: Any, use_cuda_graph: bool = False, qo_indptr: Any = None,
                 kv_indptr: Any = None, kv_indices: Any = None, kv_len_arr: Any = None, backend: str = "auto"):
        name = "longspan.flashinfer.BatchMLAPagedAttentionWrapper"
        _check_tuning(backend, use_cuda_graph=use_cuda_graph)
        if backend == "cutlass":
            raise UnsupportedError(f"backend is 'cutlass', which {name} does not support: plan and run without it, or call "
                                   "longspan.sglang.cutlass_mla_decode")
        refuse(name, "capture the runs of a longspan.Attention", use_cuda_graph=(use_cuda_graph, False),
               qo_indptr=(qo_indptr, None), kv_indptr=(kv_indptr, None), kv_indices=(kv_indices, None),
               kv_len_arr=(kv_len_arr, None))
        self._planned: dict | None = None

    def plan(self, qo_indptr: Array, kv_indptr: Array, kv_indices: Array, kv_len_arr: Array, num_heads: int,
             head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: Any,
             kv_data_type: Any, use_profiler: bool = False) -> None:
        """What the next runs have in common.

        Args:
            qo_indptr: [batch + 1] int32, where the rows of each sequence begin.
            kv_indptr: [batch + 1] int32, where the pages of each sequence begin in kv_indices [pages] int32.
            kv_len_arr: [batch] int32, keys of each sequence.
            num_heads, head_dim_ckv, head_dim_kpe, page_size: sizes, which runs are checked for.
            causal: the rows of a sequence are its last tokens, and see no key behind their own.
            q_data_type, kv_data_type: types of q and of the caches, the same one.
        """
        check_shape("qo_indptr", qo_indptr, (None,), "[batch + 1]")
        check_shape("kv_indptr", kv_indptr, (qo_indptr.shape[0],), "[batch + 1]")
        check_shape("kv_len_arr", kv_len_arr, (qo_indptr.shape[0] - 1,), "[batch]")
        check_shape("kv_indices", kv_indices, (None,), "[pages]")
        refuse("longspan.flashinfer.BatchMLAPagedAttentionWrapper", "leave it out", use_profiler=(use_profiler, False))
        if not isinstance(causal, bool):
            raise TypeError(f"causal is of type '{type(causal).__name__}'; a bool is wanted")
        self._planned = dict(
            cu_seqlens_q=qo_indptr, cache_seqlens=kv_len_arr, block_table=_pages_of(kv_indptr, kv_indices), causal=causal,
            softmax_scale=sm_scale)
        self._sizes = dict(heads=int(num_heads), ckv=int(head_dim_ckv), kpe=int(head_dim_kpe), page=int(page_size))
        self._types = {"q_nope": str(q_data_type), "ckv_cache": str(kv_data_type)}

    def run(self, q_nope: Array, q_pe: Array, ckv_cache: Array, kpe_cache: Array, out: Array | None = None,
            lse: Array | None = None, return_lse: bool = False, profiler_buffer: Any = None, kv_len: Any = None,
            page_table: Any = None, return_lse_base_on_e: bool = False) -> Any:
        """The attention of the planned batch.

        Args:
            q_nope, q_pe: [tokens, heads, head_dim_ckv], [tokens, heads, head_dim_kpe].
            ckv_cache, kpe_cache: pages [pages, page_size, head_dim_ckv] and [pages, page_size, head_dim_kpe], the first and
                the last columns of one cache [pages, page_size, head_dim_ckv + head_dim_kpe].
            out, lse: written in place of new arrays: [tokens, heads, head_dim_ckv], and [tokens, heads] float32.
            return_lse_base_on_e: lse is natural; otherwise of base 2.

        Returns:
            out; with return_lse (out, lse).

        Raises:
            UsageError: nothing is planned. UnsupportedError: two caches that are not parts of one; profiler_buffer, and
            kv_len and page_table, which are those of backend "cutlass".
        """
        name = "longspan.flashinfer.BatchMLAPagedAttentionWrapper"
        if self._planned is None:
            raise UsageError("run() is called before plan(), which says what the batch is")
        refuse(name, "leave it out", profiler_buffer=(profiler_buffer, None))
        refuse(name, "plan() takes the lengths and the pages", kv_len=(kv_len, None), page_table=(page_table, None))
        n = self._sizes
        check_shape("q_nope", q_nope, (None, n["heads"], n["ckv"]), "[tokens, num_heads, head_dim_ckv]")
        check_shape("q_pe", q_pe, (q_nope.shape[0], n["heads"], n["kpe"]), "[tokens, num_heads, head_dim_kpe]")
        check_shape("ckv_cache", ckv_cache, (None, n["page"], n["ckv"]), "[pages, page_size, head_dim_ckv]")
        check_shape("kpe_cache", kpe_cache, (ckv_cache.shape[0], n["page"], n["kpe"]), "[pages, page_size, head_dim_kpe]")
        for of, array in (("q_nope", q_nope), ("ckv_cache", ckv_cache)):
            wanted = self._types[of].removeprefix("torch.").removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
            if type_of(array) != wanted:
                raise InputError(f"{of} is {type_of(array)}, and plan() was told {wanted}")
        if lse is not None:
            check_shape("lse", lse, tuple(q_nope.shape[:2]), "[tokens, heads]")
        q = joined(q_nope, q_pe, "q_nope", "q_pe", copies=True)
        k = joined(ckv_cache, kpe_cache, "ckv_cache", "kpe_cache", copies=False)[:, :, None]
        try:
            made, found = attend(q, k, k[..., :n["ckv"]], comm=ALONE, values_in_keys=True, return_lse=True, out=out,
                                 **self._planned)
        except TRANSLATED as error:
            raise in_their_words(error, _MLA_NAMES) from None
        if not return_lse:
            return made
        if not return_lse_base_on_e:
            found = found * LOG2_E
        if lse is None:
            return made, found
        lse[:] = found
        return made, lse


_MLA_NAMES = {"cu_seqlens_q": "qo_indptr", "query_start": "qo_indptr", "cache_seqlens": "kv_len_arr", "kv_len": "kv_len_arr",
              "block_table": "kv_indices", "softmax_scale": "sm_scale", "q": "q_nope", "k": "ckv_cache", "v": "ckv_cache"}

__all__ = ["BatchMLAPagedAttentionWrapper", "merge_state", "merge_state_in_place", "merge_states", "single_decode_with_kv_cache",
           "single_prefill_with_kv_cache", "single_prefill_with_kv_cache_return_lse"]
