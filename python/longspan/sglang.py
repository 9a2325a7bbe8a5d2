"""SGLang's merge of two attention results, by its name and arguments. SGLang is not imported.

    from longspan.sglang import merge_state

in place of sglang.srt.layers.attention.merge_state. Log-sum-exps are natural and [tokens, heads]
here; vLLM's are [heads, tokens] (longspan.vllm), FlashInfer's of base 2 (longspan.flashinfer).
"""

from __future__ import annotations

from . import _core
from ._names import TRANSLATED, check_shape, in_their_words
from ._serving import narrow_lse, wide_lse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._attention import Array


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


__all__ = ["merge_state"]
