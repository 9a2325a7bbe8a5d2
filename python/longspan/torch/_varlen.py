"""torch.nn.attention.varlen's function by its name and arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longspan import Communicator, InputError, Sharding, attend
from longspan.flash_attn import flash_attn_varlen_func


def varlen_attn(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
                return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
                enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
                num_splits: int | None = None, comm: Communicator | None = None, layout: str | Sharding = "contiguous") -> Any:
    """Attention of packed sequences of different lengths, on CPUs and GPUs.

    Args:
        query: [total_q, heads, dim]; key, value: [total_k, kv_heads, dim], or the pages of a block_table.
        cu_seq_q, cu_seq_k: [batch + 1], where the sequences begin. If both are one tensor, the call is differentiated,
            and sharded by `comm`: see longspan.flash_attn.flash_attn_varlen_func.
        max_q, max_k: no sequence is longer.
        return_aux: torch's AuxRequest; with .lse return (out, lse), lse [heads, total_q] float32.
        scale: of the products; None is 1 / sqrt(dim).
        window_size: (left, right) keys that a row sees besides its own; (-1, 0) is causal; the last row is at the last key.
        enable_gqa: kv_heads may be fewer than heads.
        seqused_k: [batch] keys of each sequence that are used, its first ones. cu_seq_k may then be None with a block_table.
        block_table: as in longspan.attend, with seqused_k.
        num_splits: not read: results always repeat their bits.
        comm, layout: the ranks, and how tokens are dealt out to them.

    Raises:
        InputError, UnsupportedError, UsageError, RankError: as longspan.attend.

    >>> import torch, longspan.torch
    >>> q, k, v = torch.randn(3, 9, 4, 16)
    >>> starts = torch.tensor([0, 4, 9])
    >>> longspan.torch.varlen_attn(q, k, v, starts, starts, 5, 5, window_size=(-1, 0)).shape
    torch.Size([9, 4, 16])
    """
    with_lse = return_aux is not None and return_aux.lse
    if not enable_gqa and query.shape[-2] != key.shape[-2]:
        raise InputError(f"query has {query.shape[-2]} heads and key {key.shape[-2]}; enable_gqa=True allows that")
    causal = window_size[1] == 0
    if seqused_k is None:
        made = flash_attn_varlen_func(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, softmax_scale=scale, causal=causal,
                                      window_size=window_size, return_attn_probs=with_lse, block_table=block_table, comm=comm,
                                      layout=layout)
        return made[:2] if with_lse else made
    if block_table is None:
        raise InputError("seqused_k is given without block_table: give the used keys alone, and cu_seq_k of them")
    made = attend(query, key, value, comm=comm, cu_seqlens_q=cu_seq_q, cache_seqlens=seqused_k, block_table=block_table,
                  causal=causal, window_size=window_size, softmax_scale=scale, max_seqlen_q=max_q, max_seqlen_k=max_k,
                  return_lse=with_lse)
    return (made[0], made[1].T) if with_lse else made
