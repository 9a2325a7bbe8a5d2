"""Cutting arrays into the ranks' shards, and putting them together again."""

from __future__ import annotations

import sys

from ._core import Communicator, Shard, Sharding
from ._errors import InputError, UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence

    from ._types import Array, Layout, Numbers, OfKind


def _rule(layout: Layout | Sharding) -> Sharding:
    return layout if isinstance(layout, Sharding) else Sharding(layout)


def _concatenate(parts: Sequence[Array], dim: int) -> Array:
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        return torch.cat(list(parts), dim)
    if hasattr(first, "__array_namespace__"):
        return first.__array_namespace__().concat(list(parts), axis=dim)
    import numpy

    return numpy.concatenate(parts, axis=dim)


def _slices(array: Array, dim: int, intervals) -> list[Array]:
    before = (slice(None),) * dim
    return [array[before + (slice(start, stop),)] for start, stop in intervals]


def _dimension(array: Array, dim: int, name: str) -> int:
    if not hasattr(array, "shape"):
        raise TypeError(f"{name} is of type '{type(array).__name__}'; an array is wanted")
    dims = len(array.shape)
    if not -dims <= dim < dims:
        raise InputError(f"dim is {dim}; {name} has {dims} dimensions")
    return dim % dims


def shard(array: OfKind, keys: Layout | Sharding = "contiguous", *, comm: Communicator | None = None,
          rank: int | None = None, ranks: int | None = None, dim: int = 0, table: Numbers | None = None) -> OfKind:
    """This rank's part of a whole array: its tokens along `dim`, in the order of the shard.

    Args:
        array: the whole, of any kind that can be sliced; any length.
        keys: the name of a layout, or a Sharding.
        comm: who shares it; or rank and ranks.
        dim: the dimension of the tokens.
        table: of ranges and listed, as Sharding.shard takes it.

    Returns:
        An array of the same kind: a view where the tokens lie at even steps, else a copy.

    >>> import numpy as np, longspan
    >>> longspan.shard(np.arange(10), "zigzag", rank=0, ranks=2)
    array([0, 1, 7, 8, 9])
    >>> longspan.shard(np.arange(10), "striped", rank=1, ranks=3)
    array([1, 4, 7])
    """
    dim = _dimension(array, dim, "array")
    rank, ranks = _place(comm, rank, ranks)
    rule = _rule(keys)
    own = rule.shard(array.shape[dim], rank, ranks, table)
    if rule.layout == "striped":
        return array[(slice(None),) * dim + (slice(rank, None, ranks),)]
    intervals = own.intervals() or [(0, 0)]
    return _concatenate(_slices(array, dim, intervals), dim)


def unshard(parts: OfKind | Sequence[OfKind], keys: Layout | Sharding = "contiguous", *,
            comm: Communicator | None = None, dim: int = 0, tables: Numbers | Sequence[Numbers] | None = None) -> OfKind:
    """The whole array of the ranks' parts: what shard() undoes.

    Args:
        parts: every rank's part, in rank order, as a list; or, with `comm`, this rank's part:
            then the parts are gathered, on processors, and the call is collective.
        keys: the layout that they were cut by.
        dim: the dimension of the tokens.
        tables: of ranges the one table, of listed the list of every rank's.

    >>> import numpy as np, longspan
    >>> parts = [longspan.shard(np.arange(9), "interleaved", rank=r, ranks=2) for r in range(2)]
    >>> longspan.unshard(parts, "interleaved")
    array([0, 1, 2, 3, 4, 5, 6, 7, 8])
    """
    rule = _rule(keys)
    if not isinstance(parts, (list, tuple)):
        if comm is None:
            raise TypeError("parts is one array and comm is None; give the list of all ranks' parts, "
                            "or the communicator to gather them")
        parts = _gathered(parts, comm)
    if not parts:
        raise InputError("parts is empty; there is one for each rank")
    dim = _dimension(parts[0], dim, "parts[0]")
    length, ranks = sum(part.shape[dim] for part in parts), len(parts)
    places = []  # (first position, rank, first own token, how many)
    for rank, part in enumerate(parts):
        table = tables[rank] if rule.layout == "listed" and tables is not None else tables
        own = rule.shard(length, rank, ranks, table)
        if len(own) != part.shape[dim]:
            raise InputError(f"parts[{rank}] has {part.shape[dim]} tokens in dimension {dim}; the "
                             f"layout {rule.layout} gives that rank {len(own)} of {length}")
        first = 0
        for start, stop in own.intervals():
            places.append((start, rank, first, stop - start))
            first += stop - start
    pieces = [_slices(parts[rank], dim, [(first, first + count)])[0]
              for _, rank, first, count in sorted(places)]
    return _concatenate(pieces or list(parts[:1]), dim)


def _place(comm, rank, ranks):
    if comm is not None:
        if rank is not None or ranks is not None:
            raise InputError("comm is given, and rank or ranks too; it says both")
        return comm.rank, comm.size
    if rank is None or ranks is None:
        raise TypeError("rank and ranks are wanted, or comm")
    return rank, ranks


def _gathered(part: Array, comm: Communicator) -> list[Array]:
    """Every rank's part, of arrays on processors."""
    torch = sys.modules.get("torch")
    if comm.device != "cpu" or getattr(getattr(part, "device", None), "type", "cpu") != "cpu":
        raise UnsupportedError("unshard gathers on processors only; gather the parts with your "
                               "framework, and give them as a list")
    import numpy

    is_torch = torch is not None and isinstance(part, torch.Tensor)
    if is_torch:
        flat = part.detach().contiguous().view(torch.uint8).numpy() if part.dim() else part.numpy()
        dtype = part.dtype
    else:
        flat = numpy.ascontiguousarray(numpy.asarray(part))
        dtype = flat.dtype
    head = repr(tuple(part.shape)).encode()
    made = []
    for text in comm.gather(head + b"\n" + flat.tobytes(), "parts of unshard"):
        shape, memory = text.split(b"\n", 1)
        shape = tuple(int(n) for n in shape.strip(b"()").split(b",") if n.strip())
        if is_torch:
            flat = torch.frombuffer(bytearray(memory), dtype=torch.uint8) if memory else \
                torch.empty(0, dtype=torch.uint8, device="cpu")
            made.append(flat.view(dtype).reshape(shape))
        else:
            made.append(numpy.frombuffer(memory, dtype=dtype).reshape(shape))
    if not is_torch and hasattr(part, "__array_namespace__") and not isinstance(part, numpy.ndarray):
        made = [part.__array_namespace__().asarray(one) for one in made]
    return made


__all__ = ["Shard", "Sharding", "shard", "unshard"]
