"""TransformerEngine's DotProductAttention by its name and arguments. transformer_engine is not imported.

    from longspan.transformer_engine import DotProductAttention

in place of transformer_engine.pytorch. It computes on CPUs and GPUs, and trains. An argument that changes the result, and
that longspan does not support, raises UnsupportedError with its name. Tokens of a context-parallel group are dealt out
as there: rank r of P has chunks r and 2 P - 1 - r of 2 P, of any number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._errors import InputError, UnsupportedError
from ._names import refuse
from .flash_attn import flash_attn_varlen_func
from .torch import communicator, scaled_dot_product_attention

_FORMATS = {"sbhd": "[tokens, batch, heads, dim]", "bshd": "[batch, tokens, heads, dim]", "thd": "[all tokens, heads, dim]"}
_STRATEGIES = {"p2p": "ring-kv", "all_gather": "gather-kv", "a2a": "heads"}
_MASKS = {"no_mask": None, "causal": "upper_left", "causal_bottom_right": "lower_right"}


class DotProductAttention(torch.nn.Module):
    """Attention of a transformer, with TransformerEngine's arguments.

    Args:
        num_attention_heads: of queries. kv_channels: dim of a head, or (that of q and k, that of v).
        num_gqa_groups: heads of keys and values; None is num_attention_heads.
        attention_dropout: probability of a weight to be dropped while the module trains.
        qkv_format: "sbhd", "bshd" or "thd" (packed sequences), of forward's tensors.
        attn_mask_type: "causal" (rows are the first tokens), "causal_bottom_right" (the last ones), "no_mask"; of "thd"
            with "padding_" before them, or "padding". Others are refused.
        window_size: (left, right) keys that a row sees besides its own; -1 is no bound.
        cp_group, cp_comm_type: as set_context_parallel_group's; cp_global_ranks and cp_stream are not read, as the group
            has its ranks, and work is queued on the current stream.
        softmax_scale: of the products; None is 1 / sqrt(dim).
        softmax_type: "vanilla", or "learnable": a learned sink for each head, the parameter softmax_offset
            [1, heads, 1, 1].
        tp_size, layer_number, attention_type, sequence_parallel, tp_group, get_rng_state_tracker: tp_size divides the heads;
            the others are accepted, and change nothing here.

    >>> import torch
    >>> from longspan.transformer_engine import DotProductAttention
    >>> attention = DotProductAttention(4, 16, num_gqa_groups=2)
    >>> attention(torch.randn(9, 2, 4, 16), torch.randn(9, 2, 2, 16), torch.randn(9, 2, 2, 16)).shape
    torch.Size([9, 2, 64])
    """

    def __init__(self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None,
                 attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
                 window_size: tuple[int, int] | None = None, sequence_parallel: bool = False, tp_size: int = 1,
                 get_rng_state_tracker: Any = None, tp_group: Any = None, layer_number: int | None = None,
                 attention_type: str = "self", cp_group: Any = None, cp_global_ranks: Any = None, cp_stream: Any = None,
                 cp_comm_type: str = "p2p", softmax_scale: float | None = None, softmax_type: str = "vanilla"):
        super().__init__()
        if qkv_format not in _FORMATS:
            raise InputError(f"qkv_format is {qkv_format!r}; it is one of {', '.join(_FORMATS)}")
        _alignment(attn_mask_type, qkv_format)
        self.heads, self.kv_heads = num_attention_heads // tp_size, (num_gqa_groups or num_attention_heads) // tp_size
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.attention_dropout, self.softmax_scale = attention_dropout, softmax_scale
        if softmax_type not in ("vanilla", "learnable"):
            raise UnsupportedError(f"softmax_type is {softmax_type!r}, which longspan.transformer_engine does not support; "
                                   "'vanilla' and 'learnable' are")
        sinks = torch.nn.Parameter(torch.zeros(1, self.heads, 1, 1)) if softmax_type == "learnable" else None
        self.register_parameter("softmax_offset", sinks)
        self.cp_comm, self.strategy = None, "auto"
        if cp_group is not None:
            self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None,
                                   cp_comm_type: str = "p2p") -> None:
        """Shards the sequence over the ranks of a process group or mesh; None: over none.

        Args:
            cp_comm_type: what travels: "p2p" (keys, rank to rank), "all_gather" (keys at once) or "a2a" (heads).

        Raises:
            UnsupportedError: "a2a+p2p" and its two groups; longspan has "heads+ring-kv" of one group.
        """
        if cp_comm_type not in _STRATEGIES or isinstance(cp_group, (list, tuple)):
            raise UnsupportedError(f"cp_comm_type is {cp_comm_type!r}, of which 'p2p', 'all_gather' and 'a2a' of one group are "
                                   "supported; the strategy 'heads+ring-kv' of longspan.torch is 'a2a+p2p' of one group")
        self.cp_comm = None if cp_group is None else communicator(cp_group)
        self.strategy = "auto" if cp_group is None else _STRATEGIES[cp_comm_type]

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None = None,
                qkv_format: str | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
                cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
                max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, attn_mask_type: str | None = None,
                window_size: tuple[int, int] | None = None, checkpoint_core_attention: bool = False,
                core_attention_bias_type: str = "no_bias", core_attention_bias: Tensor | None = None,
                alibi_slopes: Tensor | None = None, fast_zero_fill: bool = True, inference_params: Any = None,
                pad_between_seqs: bool | None = None, fp8_output: bool | None = False) -> Tensor:
        """The result with the heads of a token side by side: [tokens, batch, heads dim] of "sbhd", and likewise.

        Args:
            query_layer, key_layer, value_layer: of the format, this rank's tokens.
            cu_seqlens_q, cu_seqlens_kv: of "thd", [batch + 1] where sequences begin; one tensor for both trains.
            core_attention_bias_type: "no_bias", or "alibi" with alibi_slopes [heads] or [batch, heads].
            checkpoint_core_attention, fast_zero_fill: not read; a backward keeps q, k, v, out and lse.

        Raises:
            UnsupportedError: attention_mask, biases, padding between sequences, fp8_output, inference_params, and "thd" over
                several ranks. InputError: tensors that do not fit. RankError: a rank did not come.
        """
        refuse("longspan.transformer_engine", "longspan has documents and lengths in place of masks and padding",
               attention_mask=(attention_mask, None), core_attention_bias=(core_attention_bias, None),
               cu_seqlens_q_padded=(cu_seqlens_q_padded, None), cu_seqlens_kv_padded=(cu_seqlens_kv_padded, None),
               inference_params=(inference_params, None), pad_between_seqs=(pad_between_seqs or None, None),
               fp8_output=(fp8_output or None, None))
        if core_attention_bias_type not in ("no_bias", "alibi") or (core_attention_bias_type == "alibi") != (
                alibi_slopes is not None):
            raise UnsupportedError(f"core_attention_bias_type is {core_attention_bias_type!r}; 'no_bias', and 'alibi' with "
                                   "alibi_slopes, are supported")
        form = qkv_format or self.qkv_format
        if form not in _FORMATS:
            raise InputError(f"qkv_format is {form!r}; it is one of {', '.join(_FORMATS)}")
        for name, given in (("query_layer", query_layer), ("key_layer", key_layer), ("value_layer", value_layer)):
            heads = self.heads if name == "query_layer" else self.kv_heads
            if given.dim() != len(form) or given.shape[-2] != heads:
                raise InputError(f"{name} is {list(given.shape)}; {_FORMATS[form]} with {heads} heads is wanted")
        alignment = _alignment(attn_mask_type or self.attn_mask_type, form)
        window = window_size or self.window_size or (-1, -1)
        options = dict(softcap=0.0, alibi_slopes=alibi_slopes)
        dropout = self.attention_dropout if self.training else 0.0
        if form == "thd":
            return self._packed(query_layer, key_layer, value_layer, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv,
                                alignment, window, dropout, options).flatten(-2)
        order = (1, 2, 0, 3) if form == "sbhd" else (0, 2, 1, 3)  # to [batch, heads, tokens, dim]
        q, k, v = (t.permute(order) for t in (query_layer, key_layer, value_layer))
        out = scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=alignment is not None, scale=self.softmax_scale, enable_gqa=True,
            comm=self.cp_comm, causal_alignment=alignment, sinks=self._sinks(q),
            window_size=(window[0], -1 if alignment is not None else window[1]), strategy=self.strategy, **options)
        return out.permute((2, 0, 1, 3) if form == "sbhd" else (0, 2, 1, 3)).flatten(-2)

    def _sinks(self, q: Tensor) -> Tensor | None:
        return None if self.softmax_offset is None else self.softmax_offset.flatten()

    def _packed(self, q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, alignment, window, dropout, options):
        if self.cp_comm is not None and self.cp_comm.size > 1:
            raise UnsupportedError("qkv_format 'thd' over several ranks is not supported: there each sequence is cut by itself. "
                                   "Give scaled_dot_product_attention of longspan.torch documents, which are cut as one")
        if self.softmax_offset is not None:
            raise UnsupportedError("softmax_type 'learnable' with qkv_format 'thd' is not supported")
        if cu_seqlens_q is None or cu_seqlens_kv is None:
            raise InputError("qkv_format is 'thd', and cu_seqlens_q or cu_seqlens_kv is not given")
        if alignment == "upper_left" and cu_seqlens_q is not cu_seqlens_kv:
            raise UnsupportedError("attn_mask_type is 'padding_causal' with two tables of lengths; 'padding_causal_bottom_right', "
                                   "or one tensor as cu_seqlens_q and cu_seqlens_kv, is supported")
        most_q = max_seqlen_q if max_seqlen_q is not None else len(q)
        most_kv = max_seqlen_kv if max_seqlen_kv is not None else len(k)
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_kv, most_q, most_kv, dropout, self.softmax_scale,
                                      alignment is not None, (window[0], -1 if alignment is not None else window[1]), **options)


def _alignment(mask: str, form: str) -> str | None:
    """What a causal mask is aligned to; None: not causal."""
    plain = mask
    if form == "thd":
        if not mask.startswith("padding"):
            raise UnsupportedError(f"attn_mask_type is {mask!r}, and qkv_format 'thd'; 'padding', 'padding_causal' and "
                                   "'padding_causal_bottom_right' are supported")
        plain = mask.removeprefix("padding").removeprefix("_") or "no_mask"
    if plain not in _MASKS:
        raise UnsupportedError(f"attn_mask_type is {mask!r}; {', '.join(_MASKS)}, and of 'thd' those of padding, are supported")
    return _MASKS[plain]


__all__ = ["DotProductAttention"]
