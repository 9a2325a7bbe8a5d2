"""Which tokens a rank holds, from its arguments and from what the ranks report."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch

import longspan
from longspan import InputError, Sharding, UnsupportedError
from longspan._shards import check_cut

from ._groups import Known, _finish

LAYOUTS = ("contiguous", "zigzag", "striped", "interleaved")


def layout_text(layout: Any, name: str) -> str:
    """A layout as operators take it: "zigzag", "interleaved:64"."""
    if isinstance(layout, Sharding):
        layout = f"{layout.layout}:{layout.block}" if layout.layout == "interleaved" else layout.layout
    if not isinstance(layout, str):
        raise TypeError(f"{name} is of type '{type(layout).__name__}'; the name of a layout, or a "
                        "longspan.Sharding, is wanted")
    rule, _, block = layout.partition(":")
    if rule not in LAYOUTS or (block and (rule != "interleaved" or not block.isdigit() or int(block) < 1)):
        raise InputError(f"{name} is '{layout}'; {', '.join(LAYOUTS)} are supported, and "
                         "'interleaved:64' says the block")
    return layout


def rule_of(text: str) -> Sharding:
    """The Sharding of a layout in that form."""
    rule, _, block = text.partition(":")
    return Sharding(rule, int(block)) if block else Sharding(rule)


class Lengths(NamedTuple):
    """How tokens of keys or of query rows are shared."""

    total: int
    layout: str | Sharding  # as longspan.attend takes it
    table: list[int] | None  # [ranks + 1], of the layout ranges


def resolve(text: str, total: int | None, own: Sequence[int] | None, ranks: int, name: str) -> Lengths:
    """`own`: every rank's tokens, where the ranks were asked."""
    if own is not None:
        found = sum(own)
        if total is not None and total != found:
            raise InputError(f"{name} has {found} tokens over all ranks; {total} are said to be there")
        total = found
    rule = rule_of(text)
    if rule.layout == "contiguous" and own is not None:  # in rank order, by any cut
        cut = [0]
        for n in own:
            cut.append(cut[-1] + n)
        held = [b - a for a, b in zip(cut, cut[1:])]
        if held == [len(rule.shard(total, r, ranks)) for r in range(ranks)]:
            return Lengths(total, rule, None)
        return Lengths(total, Sharding("ranges"), cut)
    if own is not None:
        for r, n in enumerate(own):
            wanted = len(rule.shard(total, r, ranks))
            if n != wanted:
                raise InputError(f"{name} has {n} tokens on rank {r}, of {total} on all ranks; the layout "
                                 f"{text} gives that rank {wanted}")
    return Lengths(total, rule, None)


def check_own(text: str, total: int, found: int, rank: int, ranks: int, name: str, argument: str) -> None:
    """Compares this rank's tokens with those of its rule, where the ranks are not asked."""
    wanted = len(rule_of(text).shard(total, rank, ranks))
    if found != wanted:
        raise InputError(f"{name} has {found} tokens on rank {rank}, and {argument} is {total}; the layout {text} gives "
                         f"that rank {wanted}" + ("" if rule_of(text).layout != "contiguous" else
                         f", as longspan.shard cuts it, at multiples of 128: leave {argument} out, so that the ranks are "
                         "asked, and the parts may have any lengths"))


def shard_of(tensor: torch.Tensor, text: str, rank: int, ranks: int, dim: int) -> torch.Tensor:
    """This rank's tokens: a view where they lie at even steps, else a copy."""
    return longspan.shard(tensor, rule_of(text), rank=rank, ranks=ranks, dim=dim)


def unshard_of(part: torch.Tensor, text: str, known: Known, dim: int) -> torch.Tensor:
    """The whole tensor, on every rank. Collective."""
    if known.size == 1:
        return part
    check_cut("the tensor", part, rule_of(text), known.rank, known.size, dim)
    return longspan.unshard(gather_parts(part, known, dim), rule_of(text), dim=dim)


def gather_parts(part: torch.Tensor, known: Known, dim: int) -> list[torch.Tensor]:
    """Every rank's part, which may differ in `dim`."""
    step = "unshard"
    own = f"{part.dtype} {list(part.shape)}"
    shapes = []
    for rank, theirs in enumerate(known.comm.gather(own.encode(), step)):
        dtype, _, shape = theirs.decode().partition(" ")
        shape = [int(n) for n in shape.strip("[]").split(",") if n.strip()]
        alike = list(part.shape)
        if len(shape) == len(alike):
            alike[dim] = shape[dim]
        if dtype != str(part.dtype) or shape != alike:
            raise InputError(f"the tensor is {own} on rank {known.rank} and {theirs.decode()} on rank {rank}; "
                             f"they may differ in dimension {dim} only")
        shapes.append(shape)
    group = None if known.group is None else known.group()
    if group is None:
        if part.device.type != "cpu":
            raise UnsupportedError("unshard on GPUs needs the process group: give group in place of comm")
        memory = part.detach().contiguous().view(torch.uint8).numpy().tobytes() if part.numel() else b""
        return [torch.frombuffer(bytearray(theirs), dtype=torch.uint8).view(part.dtype).reshape(shape)
                if theirs else part.new_empty(shape)
                for theirs, shape in zip(known.comm.gather(memory, step), shapes)]
    most = max(shape[dim] for shape in shapes)
    padded = part.detach().contiguous()
    if part.shape[dim] != most:  # a gather over a group needs equal sizes on all ranks
        padded = part.new_zeros([most if d == dim else n for d, n in enumerate(part.shape)])
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    parts = [torch.empty_like(padded) for _ in shapes]
    if padded.numel():
        work = torch.distributed.all_gather(parts, padded, group=group, async_op=True)
        if part.device.type == "cuda":
            work.wait()  # of the stream, not of this thread
        else:
            _finish(work, known.comm.deadline, step)
    return [one.narrow(dim, 0, shape[dim]) for one, shape in zip(parts, shapes)]
