"""ring-flash-attention's functions by their names and arguments. ring_flash_attn is not imported.

    from longspan.ring_flash_attn import zigzag_ring_flash_attn_func

`group` is a process group of torch.distributed, or a mesh; None is the default group. Each rank gives its own tokens,
dealt out as there: ring_ in rank order, zigzag_ring_ chunks r and 2 P - 1 - r of 2 P, stripe_ token by token. The
varlen functions deal out each sequence so, and llama3_ the packed sequences as one, in rank order. Any number
of tokens works. Autograd differentiates them. Attention is exact: results do not depend on the ranks but in the
last bit. `deterministic` is accepted and not read: results always repeat their bits. Windows, ALiBi and dropout,
which are refused there or hold for one rank's keys only, are those of whole sequences.
"""

from __future__ import annotations

import bisect
from typing import Any

import torch
from torch import Tensor

from ._attention import attend
from ._errors import InputError, UnsupportedError
from ._names import check_shape
from .flash_attn import _two, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
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


def _of_each(layout: str, name: str, tokens: str):
    """The three functions of a layout whose sequences are packed, and each of them is dealt out."""

    def func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
             softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
             alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
             group: Any = None) -> Any:
        return _packed(layout, q, k, v, cu_seqlens, max_seqlen, return_attn_probs, group, dropout_p=dropout_p,
                       softmax_scale=softmax_scale, causal=causal, window_size=_two(window_size), alibi_slopes=alibi_slopes)

    def kvpacked(q: Tensor, kv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                 softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                 alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
                 group: Any = None) -> Any:
        check_shape("kv", kv, (None, 2, None, None), "[tokens, 2, kv_heads, head_dim]")
        return func(q, kv[:, 0], kv[:, 1], cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                    deterministic, return_attn_probs, group)

    def qkvpacked(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                  softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                  alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
                  group: Any = None) -> Any:
        check_shape("qkv", qkv, (None, 3, None, None), "[tokens, 3, heads, head_dim]")
        return func(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size,
                    alibi_slopes, deterministic, return_attn_probs, group)

    shapes = {"varlen_func": "q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]",
              "varlen_kvpacked_func": "q [tokens, heads, head_dim], kv [tokens, 2, kv_heads, head_dim]",
              "varlen_qkvpacked_func": "qkv [tokens, 3, heads, head_dim]"}
    for function, (kind, shape) in zip((func, kvpacked, qkvpacked), shapes.items()):
        function.__name__ = function.__qualname__ = f"{name}_flash_attn_{kind}"
        function.__doc__ = f"""Attention of packed sequences, of each of which every rank of `group` has {tokens}.

    {shape}: this rank's tokens of the first sequence, then those of the second, and so on. cu_seqlens [batch + 1]: where they
    begin and end in this rank's tensors, so the whole starts divided by P. max_seqlen is not read. The sequences take
    turns. Others as in longspan.flash_attn.flash_attn_varlen_func; alibi_slopes is [heads] or [batch, heads], and the lse
    is [heads, tokens]. Collective, as its backward is.

    Raises:
        InputError: cu_seqlens does not end at this rank's tokens, or ranks have unequal numbers of sequences. Others as
            longspan.attend.
    """
    return func, kvpacked, qkvpacked


def _packed(layout: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, with_lse: bool, group: Any,
            **options: Any) -> Any:
    """Attention of sequences of which each is dealt out by the layout."""
    check_shape("q", q, (None,) * 3, "[tokens, heads, head_dim]")
    check_shape("cu_seqlens", cu_seqlens, (None,), "[batch + 1]")
    comm = communicator(group, device=q.device.type)
    if comm.size == 1:
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
                                      return_attn_probs=with_lse, **options)
    starts = cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(starts, starts[1:])]
    wrong = _wrong_starts(starts, len(q), len(k), comm.size)
    found = [text.decode() for text in comm.gather((wrong or ",".join(map(str, lengths))).encode(), "cu_seqlens")]
    for rank, text in enumerate(found):  # on all ranks alike
        if text.startswith("cu_seqlens"):
            raise InputError(text if rank == comm.rank else f"on rank {rank}: {text}")
    of_ranks = [[int(n) for n in text.split(",") if n] for text in found]
    if len({len(own) for own in of_ranks}) > 1:
        raise InputError(f"cu_seqlens has {[len(own) for own in of_ranks]} sequences on the ranks; each of them has its part of "
                         "every sequence, which may be empty")
    slopes, outs, lses = options.pop("alibi_slopes"), [], []
    for b, parts in enumerate(zip(q.split(lengths), k.split(lengths), v.split(lengths))):
        if slopes is not None:
            options["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[b]
        total = None if layout == "contiguous" else sum(own[b] for own in of_ranks)
        made = attend(*parts, comm=comm, keys=layout, queries=layout, total_keys=total, total_queries=total,
                      return_lse=with_lse, **options)
        outs.append(made[0] if with_lse else made)
        if with_lse:
            lses.append(made[1])
    out = torch.cat(outs) if outs else q.new_empty((*q.shape[:2], v.shape[2]))
    if not with_lse:
        return out
    return out, torch.cat(lses).T if lses else q.new_empty((q.shape[1], 0), dtype=torch.float32), None


def _wrong_starts(starts: list[int], rows: int, keys: int, ranks: int) -> str | None:
    if not starts or starts[0] != 0 or starts != sorted(starts):
        return f"cu_seqlens is {starts}; ascending starts from 0 on, and the end, are wanted"
    if starts[-1] != rows or keys != rows:
        return (f"cu_seqlens ends at {starts[-1]}, and this rank has {rows} rows of q and {keys} of k: it is of this rank's own "
                f"tokens, the starts of whole sequences divided by the {ranks} ranks")
    return None


ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _of_each(
    "contiguous", "ring", "one part, in rank order, of any length")
(zigzag_ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_kvpacked_func,
 zigzag_ring_flash_attn_varlen_qkvpacked_func) = _of_each("zigzag", "zigzag_ring", "chunks r and 2 P - 1 - r of 2 P")


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens: Tensor, causal: bool, rank: int,
                                         world_size: int) -> tuple[Tensor, Tensor, int, int, slice]:
    """What llama3_flash_attn_varlen_func wants of packed sequences that are dealt out as one, in equal parts.

    Args:
        cu_seqlens: [batch + 1], where the whole sequences begin, and the end: a multiple of world_size.

    Returns:
        cu_seqlens_q: the starts within the rank's rows; cu_seqlens_k: those within the keys that they may see;
        max_seqlen_q, max_seqlen_k: the longest of them; local_k_slice: these keys among all.

    Raises:
        InputError: the parts are not equal.

    >>> import torch
    >>> from longspan.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens
    >>> llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 7, 14, 16]), True, 1, 4)
    (tensor([0, 3, 4]), tensor([0, 7, 8]), 3, 7, slice(0, 8, None))
    """
    check_shape("cu_seqlens", cu_seqlens, (None,), "[batch + 1]")
    starts = cu_seqlens.tolist()
    if not starts or starts[0] != 0 or starts[-1] % world_size:
        raise InputError(f"cu_seqlens is {starts}; starts from 0 on, and an end that is a multiple of the {world_size} ranks is wanted")
    part = starts[-1] // world_size
    first, end = rank * part, (rank + 1) * part
    left = bisect.bisect_right(starts, first) - 1
    left = bisect.bisect_left(starts, starts[left]) if starts[left] == first else left  # also empty sequences there
    bounds = starts[left:bisect.bisect_left(starts, end) + 1]
    rows = [min(max(start, first), end) - first for start in bounds]
    keys = [(min(start, end) if causal else start) - bounds[0] for start in bounds]
    longest = [max((b - a for a, b in zip(ends, ends[1:])), default=0) for ends in (rows, keys)]
    return cu_seqlens.new_tensor(rows), cu_seqlens.new_tensor(keys), *longest, slice(bounds[0], bounds[0] + keys[-1])


def llama3_flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                                  max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
                                  softmax_scale: float | None = None, causal: bool = False,
                                  window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
                                  deterministic: bool = False, return_attn_probs: bool = False, group: Any = None) -> Any:
    """Attention of packed sequences, which are dealt out to the ranks of `group` as one, in rank order.

    Args:
        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]: this rank's part.
        cu_seqlens_q, local_k_slice: as llama3_flash_attn_prepare_cu_seqlens made them. The ranks tell each other their
            starts, in a round of messages. cu_seqlens_k, max_seqlen_q and max_seqlen_k follow from them, and are not read.
        heads_k_stride: divides kv_heads; otherwise not read: longspan chooses what travels.
        others: as in longspan.flash_attn.flash_attn_varlen_func, with alibi_slopes [heads]. Collective, as its backward is.

    Returns:
        out [tokens, heads, head_dim], or with return_attn_probs (out, lse [heads, tokens], None).

    Raises:
        InputError: starts that do not fit the rank's tokens, or those of the other ranks. Others as longspan.attend.
    """
    check_shape("q", q, (None,) * 3, "[tokens, heads, head_dim]")
    check_shape("k", k, (None,) * 3, "[tokens, kv_heads, head_dim]")
    if heads_k_stride < 1 or k.shape[1] % heads_k_stride:
        raise InputError(f"heads_k_stride is {heads_k_stride}; a divisor of the {k.shape[1]} kv_heads is wanted")
    comm = communicator(group, device=q.device.type)
    own = cu_seqlens_q.tolist()
    wrong = _wrong_starts(own, len(q), len(k), comm.size)
    mine = wrong or f"{len(q)} {local_k_slice.start} {','.join(map(str, own[1:-1]))}"
    found = [text.decode() for text in comm.gather(mine.encode(), "cu_seqlens_q")]
    for rank, text in enumerate(found):
        if text.startswith("cu_seqlens"):
            raise InputError(text if rank == comm.rank else f"on rank {rank}: {text}")
    starts, first, lefts = [], 0, []
    for text in found:
        rows, left, inside = text.split(" ")
        lefts.append(int(left))
        if lefts[-1] == first:
            starts.append(first)
        starts += [first + int(start) for start in inside.split(",") if start]
        first += int(rows)
    for rank, left in enumerate(lefts):
        if left not in starts:
            raise InputError(f"local_k_slice begins at {left} on rank {rank}, and the ranks' sequences begin at {starts}: give what "
                             "llama3_flash_attn_prepare_cu_seqlens made on each rank of the same cu_seqlens")
    documents = torch.tensor([*starts, first], dtype=torch.int64, device=q.device)
    return _as_documents(q, k, v, documents, comm, return_attn_probs, causal=causal, softmax_scale=softmax_scale,
                         window_size=_two(window_size), alibi_slopes=alibi_slopes, dropout_p=dropout_p)


def _as_documents(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, comm: Any, with_lse: bool, **options: Any) -> Any:
    made = attend(q, k, v, comm=comm, documents=documents, keys="contiguous", queries="contiguous", return_lse=with_lse,
                  **options)
    return (made[0], made[1].T, None) if with_lse else made


def llama3_flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                                           max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
                                           softmax_scale: float | None = None, causal: bool = False,
                                           window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
                                           deterministic: bool = False, return_attn_probs: bool = False, group: Any = None) -> Any:
    """llama3_flash_attn_varlen_func of k and v in one tensor kv [tokens, 2, kv_heads, head_dim]."""
    check_shape("kv", kv, (None, 2, None, None), "[tokens, 2, kv_heads, head_dim]")
    return llama3_flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                         heads_k_stride, local_k_slice, dropout_p, softmax_scale, causal, window_size,
                                         alibi_slopes, deterministic, return_attn_probs, group)


def llama3_flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                                            max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
                                            softmax_scale: float | None = None, causal: bool = False,
                                            window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
                                            deterministic: bool = False, return_attn_probs: bool = False, group: Any = None) -> Any:
    """llama3_flash_attn_varlen_func of q, k and v in one tensor qkv [tokens, 3, heads, head_dim]."""
    check_shape("qkv", qkv, (None, 3, None, None), "[tokens, 3, heads, head_dim]")
    return llama3_flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                         heads_k_stride, local_k_slice, dropout_p, softmax_scale, causal, window_size,
                                         alibi_slopes, deterministic, return_attn_probs, group)


_of_models: dict[str, Any] = {}  # what update_ring_flash_attn_params was given


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Any) -> None:
    """The packed sequences of the next calls of a model, after substitute_hf_flash_attn.

    Args:
        cu_seqlens: [batch + 1], where the whole sequences begin, and the end. The ranks of process_group have them as one,
            in rank order, in parts of any lengths.
    """
    check_shape("cu_seqlens", cu_seqlens, (None,), "[batch + 1]")
    _of_models.update(documents=cu_seqlens.detach().to(torch.int64), group=process_group)


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int) -> None:
    """Puts longspan's attention in the place of "flash_attention_2" of transformers, for all models of this process.

    Each rank then gives a model its own tokens, [1, tokens], with position_ids of its own; update_ring_flash_attn_params
    says how sequences are packed. The attention "longspan" inside longspan.torch.context_parallel does the same without
    replacing anything, for any layout.

    Args:
        process_group: the ranks. heads_k_stride: not read.

    Raises:
        UnsupportedError: a model calls it with a batch, a mask, or layers that are not causal; later, in its call.
    """
    from transformers import AttentionInterface

    from .hf._attention import _NO_MATTER

    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
                  s_aux=None, is_causal=None, **others):
        if "documents" not in _of_models:
            raise InputError("no sequences are known: call update_ring_flash_attn_params before the model")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        unknown = [name for name, given in others.items()
                   if given is not None and given is not False and name not in _NO_MATTER | _OF_THIS_RANK]
        for name, wrong in (("attention_mask", attention_mask is not None), ("a batch of several", query.shape[0] != 1),
                            ("a layer that is not causal", not causal), *((name, True) for name in unknown)):
            if wrong:
                raise UnsupportedError(f"{name} is not supported by substitute_hf_flash_attn: pack the sequences into one, or use "
                                       "the attention 'longspan' inside longspan.torch.context_parallel")
        documents, comm = _of_models["documents"].to(query.device), communicator(process_group, device=query.device.type)
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, -1)
        out = _as_documents(*(t[0].transpose(0, 1) for t in (query, key, value)), documents, comm, False, causal=True,
                            softmax_scale=scaling, window_size=window, softcap=softcap or 0.0, sinks=s_aux, dropout_p=dropout)
        return out[None], None

    AttentionInterface.register("flash_attention_2", attention)


# What transformers finds in position_ids, which are of this rank's tokens only.
_OF_THIS_RANK = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "implementation"))

__all__ = [f"{name}_flash_attn_{kind}" for name in ("ring", "zigzag_ring", "stripe")
           for kind in ("func", "kvpacked_func", "qkvpacked_func")]
__all__ += [f"{name}_flash_attn_varlen_{kind}" for name in ("ring", "zigzag_ring", "llama3")
            for kind in ("func", "kvpacked_func", "qkvpacked_func")]
__all__ += ["llama3_flash_attn_prepare_cu_seqlens", "substitute_hf_flash_attn", "update_ring_flash_attn_params"]
