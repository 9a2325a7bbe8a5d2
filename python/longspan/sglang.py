"""SGLang's merge of two attention results and its latent attention (MLA), by their names and arguments. SGLang is not
imported.

    from longspan.sglang import merge_state, flash_mla_with_kvcache

in place of sglang.srt.layers.attention.merge_state and of sgl_kernel. Log-sum-exps are natural and [tokens, heads]
here; vLLM's are [heads, tokens] (longspan.vllm), FlashInfer's of base 2 (longspan.flashinfer).
"""

from __future__ import annotations

from . import _core
from ._mla import FlashMLASchedMeta, cutlass, flash_mla, flash_mla_sparse_fwd
from ._names import TRANSLATED, check_shape, in_their_words
from ._serving import narrow_lse, wide_lse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._attention import Array, Numbers


def merge_state(prefix_output: Array, prefix_lse: Array, suffix_output: Array, suffix_lse: Array,
                output: Array | None = None, output_lse: Array | None = None) -> tuple[Array, Array]:
    """The merge of a prefix's and a suffix's attention.

    Args:
        prefix_output, suffix_output: [tokens, heads, head_size], of any float type, any strides.
        prefix_lse, suffix_lse: [tokens, heads], of float32 or 16 bits, natural. +inf and -inf mean no
            keys.
        output, output_lse: written in place of new arrays; may be the prefix's or the suffix's.

    Returns:
        (output, output_lse)

    >>> import numpy as np
    >>> from longspan.sglang import merge_state
    >>> a, lse = np.ones((3, 4, 16), np.float32), np.zeros((3, 4), np.float32)
    >>> out, out_lse = merge_state(a, lse, 3 * a, lse)
    >>> float(out[0, 0, 0]), bool(np.allclose(out_lse, np.log(2)))
    (2.0, True)
    """
    check_shape("prefix_output", prefix_output, (None,) * 3, "[tokens, heads, head_size]")
    check_shape("prefix_lse", prefix_lse, tuple(prefix_output.shape[:2]), "[tokens, heads]")
    check_shape("suffix_lse", suffix_lse, tuple(prefix_output.shape[:2]), "[tokens, heads]")
    if output_lse is not None:
        check_shape("output_lse", output_lse, tuple(prefix_output.shape[:2]), "[tokens, heads]")
    to_lse = narrow_lse("output_lse", output_lse)
    try:
        out, lse = _core.merge_attn_states(
            prefix_output=prefix_output, prefix_lse=wide_lse(prefix_lse), suffix_output=suffix_output,
            suffix_lse=wide_lse(suffix_lse), base="e", heads_first=False, out=output, lse=to_lse,
            prefill_tokens_with_context=None, out_scale=None, prefix_scale=None, suffix_scale=None,
            nan_is_empty=False, stream=None)
    except TRANSLATED as error:
        names = {"out": "output", "lse": "output_lse", "out_lse": "output_lse",
                 "prefix_out": "prefix_output", "suffix_out": "suffix_output"}
        raise in_their_words(error, names) from None
    if to_lse is output_lse:
        return out, lse
    output_lse[:] = lse
    return out, output_lse


def merge_state_v2(v_a: Array, s_a: Array, v_b: Array, s_b: Array, v_merged: Array | None = None,
                   s_merged: Array | None = None) -> tuple[Array, Array]:
    """The same merge under the name of sgl_kernel.

    >>> import numpy as np
    >>> from longspan.sglang import merge_state_v2
    >>> a, lse = np.ones((3, 4, 16), np.float32), np.zeros((3, 4), np.float32)
    >>> float(merge_state_v2(a, lse, 3 * a, lse)[0][0, 0, 0])
    2.0
    """
    try:
        return merge_state(v_a, s_a, v_b, s_b, v_merged, s_merged)
    except TRANSLATED as error:
        raise in_their_words(error, {"prefix_output": "v_a", "prefix_lse": "s_a", "suffix_output": "v_b",
                                     "suffix_lse": "s_b", "output": "v_merged", "output_lse": "s_merged"}) from None


def get_mla_metadata(cache_seqlens: Any = None, num_q_tokens_per_head_k: Any = None, num_heads_k: Any = None,
                     num_heads_q: Any = None, is_fp8_kvcache: bool = False,
                     topk: Any = None) -> tuple[FlashMLASchedMeta, None]:
    """Places for a schedule and for splits, of which nothing is read: longspan plans each call by itself.

    >>> from longspan.sglang import get_mla_metadata
    >>> metadata, none = get_mla_metadata()
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(q: Array, k_cache: Array, block_table: Array, cache_seqlens: Array, head_dim_v: int,
                           tile_scheduler_metadata: Any = None, num_splits: Any = None,
                           softmax_scale: float | None = None, causal: bool = False,
                           descale_q: Numbers | None = None, descale_k: Numbers | None = None,
                           is_fp8_kvcache: bool = False, indices: Any = None) -> tuple[Array, Array]:
    """As longspan.vllm's, is_fp8_kvcache included, besides descale_q and descale_k, [1] or [batch] float32, of q and rows
    of fp8 that have one scale.

    >>> import numpy as np
    >>> from longspan.sglang import flash_mla_with_kvcache, get_mla_metadata
    >>> q, cache = np.ones((1, 2, 16, 576), np.float32), np.ones((2, 64, 1, 576), np.float32)
    >>> table, lengths = np.arange(2, dtype=np.int32)[None], np.array([100], np.int32)
    >>> out, lse = flash_mla_with_kvcache(q, cache, table, lengths, 512, *get_mla_metadata(), causal=True)
    >>> out.shape, lse.shape
    ((1, 2, 16, 512), (1, 16, 2))
    """
    return flash_mla("longspan.sglang.flash_mla_with_kvcache", q, k_cache, block_table, cache_seqlens, head_dim_v,
                     softmax_scale, causal, descale_q=descale_q, descale_k=descale_k, is_fp8_kvcache=is_fp8_kvcache,
                     indices=indices)


def cutlass_mla_get_workspace_size(max_seq_len: int, num_batches: int, sm_count: int = 0, num_kv_splits: int = 1) -> int:
    """0: longspan keeps its own memory.

    >>> from longspan.sglang import cutlass_mla_get_workspace_size
    >>> cutlass_mla_get_workspace_size(4096, 8)
    0
    """
    return 0


def cutlass_mla_decode(q_nope: Array, q_pe: Array, kv_c_and_k_pe_cache: Array, seq_lens: Array, page_table: Array,
                       workspace: Any, sm_scale: float, num_kv_splits: int = 1) -> Array:
    """The attention of one token of each sequence over pages of latent rows, on any device: a new [batch, heads, latent].

    Args:
        q_nope, q_pe: [batch, heads, latent], [batch, heads, rotary].
        kv_c_and_k_pe_cache: pages [blocks, block_size, latent + rotary].
        seq_lens: [batch] int32; page_table: [batch, columns] int32.
        workspace, num_kv_splits: not read.

    >>> import numpy as np
    >>> from longspan.sglang import cutlass_mla_decode
    >>> q, rope, cache = (np.ones(shape, np.float32) for shape in ((1, 16, 512), (1, 16, 64), (2, 128, 576)))
    >>> table, lengths = np.arange(2, dtype=np.int32)[None], np.array([100], np.int32)
    >>> float(cutlass_mla_decode(q, rope, cache, lengths, table, None, 192 ** -0.5).max())
    1.0
    """
    try:
        return cutlass(q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, sm_scale)[0]
    except TRANSLATED as error:
        raise in_their_words(error, {"scale": "sm_scale"}) from None


__all__ = ["FlashMLASchedMeta", "cutlass_mla_decode", "cutlass_mla_get_workspace_size", "flash_mla_sparse_fwd",
           "flash_mla_with_kvcache", "get_mla_metadata", "merge_state", "merge_state_v2"]
