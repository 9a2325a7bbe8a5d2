"""context_parallel under PyTorch's names: what runs inside it attends over the tokens of all ranks."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from longspan import InputError, Sharding, UnsupportedError

from ._catch import caught
from ._groups import Known, Ranks, known, name_of
from ._layouts import layout_text, shard_of, unshard_of

_ROTATE_METHODS = ("allgather", "alltoall")
_rotate_method = "allgather"
_open = threading.local()  # .layouts: of the contexts that this thread is in


def set_rotate_method(rotate_method: str) -> None:
    """Chooses what travels for attention inside context_parallel, in all contexts opened from now on.

    "allgather", the default: keys and values travel where that is fastest. On CPUs they are gathered
    where the layout allows it; on GPUs longspan's cost model chooses (strategy "auto").
    "alltoall": no rank ever holds the keys of another; query rows and partial states travel instead.
    Both are exact.

    Raises:
        UnsupportedError: another name. It is a NotImplementedError, which PyTorch raises.

    >>> import longspan.torch
    >>> longspan.torch.set_rotate_method("allgather")
    """
    global _rotate_method
    if rotate_method not in _ROTATE_METHODS:
        raise UnsupportedError(f"rotate_method is {rotate_method!r}; 'allgather' and 'alltoall' are supported")
    _rotate_method = rotate_method


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    layout: str | Sharding = "zigzag",
    queries: str | None = "as keys",
    causal_alignment: str | None = None,
    total_tokens: int | None = None,
    documents: Tensor | None = None,
) -> Iterator[None]:
    """Inside, torch's scaled_dot_product_attention runs over the tokens of all ranks of `mesh`.

    As torch.distributed.tensor.experimental.context_parallel: the buffers are sharded in place, and
    restored when the context ends. It takes any length, causal or not, with or without buffers, and
    query and key of different lengths, on CPUs and GPUs, eagerly and under
    torch.compile(fullgraph=True). Collective, as is every call of attention inside it.

    Attention is found however it is called: as torch.nn.functional or torch.ops.aten, or in functions traced,
    exported or compiled before. Operators that compute attention themselves are refused:
    torch.nn.MultiheadAttention, flex_attention, and the parts of scaled_dot_product_attention, which a
    decomposed graph (make_fx) calls. Two kinds cannot be seen, and use only this rank's tokens: attention
    written out as products and a softmax, as after ExportedProgram.run_decompositions(), and attention that
    is not a function of torch, such as flash-attention's.

    As torch.no_grad, it holds only for the thread that enters. Attention in a worker thread uses only this
    rank's tokens, unless that thread enters a context of its own. Threads of a rank that share a mesh attend
    one after the other, in the same order on all ranks.

    Args:
        mesh: a DeviceMesh of one dimension, a ProcessGroup, or None: the default group.
        buffers: tensors whose tokens are dealt out: inputs, labels, tables of positions. They keep
            their identity and change their shape. Parameters are refused.
        buffer_seq_dims: the dimension of the tokens in each of them.
        no_restore_buffers: those of them that stay sharded afterwards, which saves their memory.
        layout: how tokens are dealt out: "zigzag", PyTorch's default too (head-tail load balance),
            "striped", "interleaved:64" or "contiguous": in rank order, as PyTorch's without load
            balance, but cut at multiples of 128 tokens. Some ranks then have no tokens of a short
            sequence; for models that cannot run on no tokens, choose another layout.
        queries: "as keys": rows of query are dealt out likewise. None: every rank has all rows.
        causal_alignment: what is_causal means where query and key have different lengths; None
            refuses it, "upper_left" says that the rows are the first tokens, as torch counts,
            "lower_right" that they are the last.
        total_tokens: of the sequence, where query and key have the tokens of the buffers and no others:
            saves the round of messages by which attention learns it.
        documents: [count + 1] int64 starts of documents packed in the one sequence of the batch, or [batch,
            count + 1]: attention inside stays within them.

    Raises:
        InputError, UnsupportedError, UsageError, RankError: as scaled_dot_product_attention; here and in
            the calls inside. Functions of torch.jit turn them into its RuntimeError, with their text.

    >>> import torch, longspan.torch
    >>> q = torch.randn(1, 2, 63, 32)
    >>> with longspan.torch.context_parallel(None, buffers=[q], buffer_seq_dims=[2]):
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> out, = longspan.torch.context_parallel_unshard(None, [out], [2])
    >>> out.shape
    torch.Size([1, 2, 63, 32])
    """
    buffers = [] if buffers is None else list(buffers)
    dims = [] if buffer_seq_dims is None else list(buffer_seq_dims)
    kept = [] if no_restore_buffers is None else list(no_restore_buffers)
    layout = layout_text(layout, "layout")
    dims = _check_buffers(buffers, dims, kept)
    ranks = Ranks(None, mesh, _device_of(buffers))
    world = known(ranks.name)
    options = dict(keys=layout, queries=queries, causal_alignment=causal_alignment, total_keys=total_tokens,
                   total_queries=total_tokens,
                   strategy=_strategy_for(layout, world.device) if queries is not None else "auto")
    if documents is not None:
        options["documents"] = documents
    whole = [(b, b.data) for b in buffers]
    shards = [_own_part(b, layout, world, d) for b, d in zip(buffers, dims)]
    layouts = _open.__dict__.setdefault("layouts", [])
    layouts.append(layout)
    try:
        for buffer, shard in zip(buffers, shards):
            buffer.data = shard
        del shards
        with caught(ranks, options):
            yield
    finally:
        layouts.pop()
        for buffer, data in whole:
            if not any(buffer is one for one in kept):
                buffer.data = data


@torch.no_grad()
def _own_part(buffer: Tensor, layout: str, world: Known, dim: int) -> Tensor:
    """The new data are of inference mode exactly where the buffer is, whatever the mode here."""
    with torch.inference_mode(buffer.is_inference()):
        part = shard_of(buffer.data, layout, world.rank, world.size, dim)
        return part.clone(memory_format=torch.contiguous_format)


def _check_buffers(buffers, dims, kept) -> list[int]:
    if len(buffers) != len(dims):
        raise InputError(f"buffer_seq_dims has {len(dims)} entries, and there are {len(buffers)} buffers")
    for i, buffer in enumerate(buffers):
        if not isinstance(buffer, Tensor):
            raise TypeError(f"buffers[{i}] is of type '{type(buffer).__name__}'; a tensor is wanted")
        if isinstance(buffer, torch.nn.Parameter):
            raise UnsupportedError(f"buffers[{i}] is a parameter: weights are not sharded by tokens")
        if not -buffer.dim() <= dims[i] < buffer.dim():
            raise InputError(f"buffer_seq_dims[{i}] is {dims[i]}; the buffer has {buffer.dim()} dimensions")
        if any(buffer is other for other in buffers[:i]):
            raise InputError(f"buffers[{i}] is given twice")
    for one in kept:
        if not any(one is b for b in buffers):
            raise InputError("no_restore_buffers has a tensor that is none of buffers")
    return [d % b.dim() for b, d in zip(buffers, dims)]


def _device_of(buffers: Sequence[Tensor]) -> str | None:
    return buffers[0].device.type if buffers else None


def _strategy_for(layout: str, device: str) -> str:
    """gather-kv does not support large blocks."""
    block = layout.partition(":")[2]
    if _rotate_method == "alltoall" or (block and int(block) > 512):
        return "gather-states"
    return "auto" if device == "cuda" else "gather-kv"


@torch.no_grad()
def context_parallel_unshard(mesh: Any, buffers: Sequence[Tensor], seq_dims: Sequence[int],
                             load_balancer: Any = None) -> list[Tensor]:
    """The whole tensors, on every rank, from parts that context_parallel sharded. Collective.

    Args:
        mesh: as in context_parallel.
        buffers: this rank's parts; any length.
        seq_dims: the dimension of the tokens in each of them.
        load_balancer: the layout that they were sharded by, as context_parallel's `layout`. None: that
            of the open context, or else "zigzag". PyTorch's own head-tail balancer means "zigzag".

    Raises:
        InputError: parts that do not fit together. UnsupportedError: another balancer of PyTorch's.
        RankError: a rank did not come.

    >>> import torch, longspan.torch
    >>> longspan.torch.context_parallel_unshard(None, [torch.arange(5)], [0])
    [tensor([0, 1, 2, 3, 4])]
    """
    if len(buffers) != len(seq_dims):
        raise InputError(f"seq_dims has {len(seq_dims)} entries, and there are {len(buffers)} buffers")
    if load_balancer is None:
        layouts = getattr(_open, "layouts", None)
        load_balancer = layouts[-1] if layouts else "zigzag"
    elif type(load_balancer).__name__ == "_HeadTailLoadBalancer":
        load_balancer = "zigzag"
    elif type(load_balancer).__module__.startswith("torch."):
        raise UnsupportedError(f"load_balancer is a {type(load_balancer).__name__}; give the layout that "
                               "context_parallel was given")
    layout = layout_text(load_balancer, "load_balancer")
    made = []
    for i, (part, dim) in enumerate(zip(buffers, seq_dims)):
        if not isinstance(part, Tensor):
            raise TypeError(f"buffers[{i}] is of type '{type(part).__name__}'; a tensor is wanted")
        if not -part.dim() <= dim < part.dim():
            raise InputError(f"seq_dims[{i}] is {dim}; the buffer has {part.dim()} dimensions")
        world = known(name_of(None, mesh, part.device.type))
        made.append(unshard_of(part, layout, world, dim % part.dim()))
    return made
