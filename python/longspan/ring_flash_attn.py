"""ring-flash-attention's functions by their names and arguments. ring_flash_attn is not imported.

    from longspan.ring_flash_attn import zigzag_ring_flash_attn_func

`group` is a process group of torch.distributed, or a mesh; None is the default group. Each rank gives its own tokens,
dealt out as there: ring_ in rank order, zigzag_ring_ chunks r and 2 P - 1 - r of 2 P, stripe_ token by token. Any number
of tokens works. Autograd differentiates them. Attention is exact: results do not depend on the ranks but in the
last bit. `deterministic` is accepted and not read: results always repeat their bits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .torch import communicator


def _of(layout: str, name: str, tokens: str):
    """The three functions of a layout."""

    def func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
             window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
             return_attn_probs: bool = False, group: Any = None) -> Any:
        return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic,
                               return_attn_probs, comm=communicator(group, device=q.device.type), layout=layout)

    def kvpacked(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                 window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
                 return_attn_probs: bool = False, group: Any = None) -> Any:
        return flash_attn_kvpacked_func(q, kv, dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic,
                                        return_attn_probs, comm=communicator(group, device=q.device.type), layout=layout)

    def qkvpacked(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                  window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
                  return_attn_probs: bool = False, group: Any = None) -> Any:
        return flash_attn_qkvpacked_func(qkv, dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic,
                                         return_attn_probs, comm=communicator(group, device=qkv.device.type), layout=layout)

    shapes = {"func": "q [batch, tokens, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim]",
              "kvpacked_func": "q [batch, tokens, heads, head_dim], kv [batch, tokens, 2, kv_heads, head_dim]",
              "qkvpacked_func": "qkv [batch, tokens, 3, heads, head_dim]"}
    for function, (kind, shape) in zip((func, kvpacked, qkvpacked), shapes.items()):
        function.__name__ = function.__qualname__ = f"{name}_flash_attn_{kind}"
        function.__doc__ = f"""Attention over the tokens of all ranks of `group`, {tokens}.

    {shape}: this rank's tokens. Others as in longspan.flash_attn.flash_attn_{kind}. Collective, as its backward is.
    """
    return func, kvpacked, qkvpacked


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _of(
    "contiguous", "ring", "which are dealt out in rank order, in parts of any lengths")
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _of(
    "zigzag", "zigzag_ring", "of which rank r of P has chunks r and 2 P - 1 - r of 2 P")
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _of(
    "striped", "stripe", "of which rank r of P has tokens r, r + P, r + 2 P ...")

__all__ = [f"{name}_flash_attn_{kind}" for name in ("ring", "zigzag_ring", "stripe")
           for kind in ("func", "kvpacked_func", "qkvpacked_func")]
