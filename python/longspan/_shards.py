"""Cutting arrays into the ranks' shards, and putting them together again.

How shard() cut an array is remembered by the array's identity. The array carries no mark, so it has
the caller's own type, and pickles and prints as ever. Nothing is known of what is made from it,
such as a view, a copy, or the result of a function. Attention compares its arguments with what is
remembered (contradiction()).
"""

from __future__ import annotations

import sys
import weakref
from collections import namedtuple

from ._core import Communicator, Shard, Sharding
from ._errors import InputError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence

    from ._types import Array, Layout, Numbers, OfKind

Cut = namedtuple("Cut", "rule rank ranks length dim shape")
Cut.__doc__ = "How shard() cut an array: `length` tokens of the whole, in dimension `dim`; the part's shape."

Place = namedtuple("Place", "rank size")  # a rank among those that hold a cache

_cuts: dict[int, tuple] = {}  # id() of a part: (a weak reference to it, its Cut)


def _remember(part: Array, cut: Cut) -> None:
    """Only arrays of NumPy and PyTorch: one object of JAX may be several values."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(part, torch.Tensor):
        if torch.compiler.is_compiling():
            return
    elif numpy is None or not isinstance(part, numpy.ndarray):
        return
    key = id(part)

    def forget(reference, cuts=_cuts):  # the default outlives the module
        known = cuts.get(key)
        if known is not None and known[0] is reference:
            del cuts[key]

    _cuts[key] = weakref.ref(part, forget), cut


def cut_of(array: Array) -> Cut | None:
    """How shard() cut this very array; None for others, and where its shape has changed since."""
    known = _cuts.get(id(array))
    if known is None or known[0]() is not array or tuple(array.shape) != known[1].shape:
        return None
    return known[1]


def _alike(rule: Sharding):
    """Equal for rules that give ranks the same tokens."""
    if rule.layout == "striped":
        return "interleaved", 1
    if rule.layout in ("contiguous", "ranges"):
        return "parts in rank order"
    return rule.layout, rule.block if rule.layout == "interleaved" else None


def _text(rule: Sharding) -> str:
    """As a caller writes it."""
    if rule.layout == "interleaved" and rule.block != 128:
        return f"longspan.Sharding('interleaved', {rule.block})"
    return f"'{rule.layout}'"


def _contradiction(name: str, array: Array, argument: str, rule: Sharding | None, comm, dim: int,
                   total: int | None, total_name: str) -> str | None:
    """What contradicts how `array` was cut, and what to write. `rule` None: every rank has all."""
    cut = cut_of(array)
    if cut is None:
        return None
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
    part = f"{name} is rank {cut.rank}'s part of {cut.ranks}, as longspan.shard cut it"
    if cut.ranks == 1:
        if ranks > 1 and rule is not None:
            return (f"{name} was cut by longspan.shard for one rank, which has all of it, and comm has {ranks} "
                    f"ranks: give longspan.shard the same comm")
        if rule is not None and (cut.rule.layout == "listed") != (rule.layout == "listed"):
            return f"{part}, by {_text(cut.rule)}, and {argument} is {_text(rule)}: give {argument}={_text(cut.rule)}"
        return None
    if (cut.rank, cut.ranks) != (rank, ranks):
        message = "comm is None, which is this process alone" if comm is None else f"comm is rank {rank} of {ranks}"
        return (f"{part}, and {message}: give comm= those {cut.ranks} ranks. For this part alone, as for a merge of "
                f"states, give {name}[:], of which nothing is known")
    if cut.dim != dim:
        return f"{part} in dimension {cut.dim}, and its tokens are dimension {dim}: give longspan.shard dim={dim}"
    if rule is None:
        return (f"{part}, by {_text(cut.rule)}, and {argument} is None, by which every rank has all of {name}: "
                f"give {argument}={_text(cut.rule)}")
    if _alike(rule) != _alike(cut.rule):
        return f"{part}, by {_text(cut.rule)}, and {argument} is {_text(rule)}: give {argument}={_text(cut.rule)}"
    if total is not None and total != cut.length:
        return f"{part} from {cut.length} tokens, and {total_name} is {total}: every rank gives its part of the same"
    return None


def _count_of(lengths) -> int:
    """Sequences that have these lengths."""
    shape = getattr(lengths, "shape", None)
    if shape is not None:
        return shape[0] if len(shape) == 1 else 1
    return len(lengths) if isinstance(lengths, (list, tuple)) else 1


def contradiction(q, k, v, *, comm, keys: Layout | Sharding, queries: Layout | Sharding | None, cache_seqlens=None,
                  cu_seqlens_q=None, block_table=None, k_new=None, v_new=None, total_keys=None,
                  total_queries=None, tokens_dim: int = -3, names=("q", "k", "v"), keys_name: str = "keys") -> tuple[int | None, int | None, str | None]:
    """Tokens of the arrays that k and q were cut from, and what contradicts a call of attention.

    q is None in an append. `names` and `keys_name` are the caller's. The lengths are None where they
    are unknown, and for a cache that grows.
    """
    if not _cuts or not (comm is None or isinstance(comm, (Communicator, Place))):
        return None, None, None
    rule = _rule(keys, "keys")
    ranks = 1 if comm is None else comm.size
    wholes = []
    for array, argument, own, total, total_name, name in (
            (k, keys_name, rule, total_keys, "total_keys", names[1]),
            (v, keys_name, rule, total_keys, "total_keys", names[2]),
            (q, "queries", None if queries is None else _rule(queries, "queries"), total_queries, "total_queries",
             names[0])):
        of_keys = name != names[0]  # the same array may be both
        cut = None if array is None else cut_of(array)
        if cut is None or (of_keys and block_table is not None):
            wholes.append(None)
            continue
        packed = len(array.shape) == 3
        if of_keys and isinstance(cache_seqlens, (list, tuple)) and len(cache_seqlens) == 1:
            total, total_name = cache_seqlens[0], "cache_seqlens[0]"
        grows = of_keys and k_new is not None
        message = _contradiction(name, array, argument, own, comm, len(array.shape) + tokens_dim,
                                 None if grows else total, total_name)
        lengths = cache_seqlens if of_keys else cu_seqlens_q
        if message is None and packed and cut.ranks > 1 and lengths is not None:
            sequences = _count_of(lengths) - (not of_keys)
            if sequences > 1:
                message = (f"{name} was cut by longspan.shard as one sequence of {cut.length} tokens, and there are "
                           f"{sequences} one after the other: cut each by itself, and join the parts")
        if message is not None:
            return None, None, message
        wholes.append(None if grows or lengths is not None or cut.ranks == 1 else cut.length)
    for name, array in (("k_new", k_new), ("v_new", v_new)):
        cut = None if array is None else cut_of(array)
        if cut is not None and cut.ranks > 1 and ranks > 1:
            return None, None, (f"{name} is rank {cut.rank}'s part of {cut.ranks}, as longspan.shard cut it: every "
                                "rank gives all new keys, and writes those that are its own")
    return wholes[0] if wholes[0] is not None else wholes[1], wholes[2], None


def refuse(message: str | None) -> None:
    if message is not None:
        raise InputError(message)


def _rule(layout: Layout | Sharding, name: str) -> Sharding:
    if isinstance(layout, Sharding):
        return layout
    if not isinstance(layout, str):
        raise TypeError(f"{name} is of type '{type(layout).__name__}'; a Sharding, or the name of a layout is wanted")
    try:
        return Sharding(layout)
    except InputError as error:
        raise InputError(str(error).replace("layout is", f"{name} is", 1)) from None


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


def _copy(array: Array) -> Array:
    for method in ("clone", "copy"):  # torch; NumPy, JAX, CuPy
        if hasattr(array, method):
            return getattr(array, method)()
    return array.__array_namespace__().asarray(array, copy=True)


def _slices(array: Array, dim: int, intervals) -> list[Array]:
    before = (slice(None),) * dim
    return [array[before + (slice(start, stop),)] for start, stop in intervals]


def _dimension(array: Array, dim: int, name: str) -> int:
    if not hasattr(array, "shape"):
        raise TypeError(f"{name} is of type '{type(array).__name__}'; an array is wanted")
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim is of type '{type(dim).__name__}'; an integer is wanted")
    dims = len(array.shape)
    if not -dims <= dim < dims:
        raise InputError(f"dim is {dim}; {name} has {dims} dimensions")
    return int(dim) % dims


def shard(array: OfKind, keys: Layout | Sharding = "contiguous", *, comm: Communicator | None = None,
          rank: int | None = None, ranks: int | None = None, dim: int = 0, table: Numbers | None = None) -> OfKind:
    """This rank's part of a whole array: its tokens along `dim`, in the order of the shard.

    How NumPy arrays and torch tensors were cut is remembered while they live: attention refuses a
    part that its arguments contradict, and its message has the fix. Nothing is known of what is made
    from a part, such as a view or a copy.

    Args:
        array: the whole, of any kind that can be sliced; any length.
        keys: the name of a layout, or a Sharding. Contiguous parts are cut at multiples of 128
            tokens, which gives the same bits on 1, 2, 4 ... 64 ranks.
        comm: the ranks that share it; or rank and ranks.
        dim: the dimension of the tokens: 1 of [batch, tokens, heads, dim].
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
    rule = _rule(keys, "keys")
    length = array.shape[dim]
    own = rule.shard(length, rank, ranks, table)
    if rule.layout == "striped":
        part = array[(slice(None),) * dim + (slice(own.rank, None, own.ranks),)]
    else:
        part = _concatenate(_slices(array, dim, own.intervals() or [(0, 0)]), dim)
    if part is not array:
        _remember(part, Cut(rule, own.rank, own.ranks, length, dim, tuple(part.shape)))
    return part


def unshard(parts: OfKind | Sequence[OfKind], keys: Layout | Sharding = "contiguous", *,
            comm: Communicator | None = None, dim: int | None = None,
            tables: Numbers | Sequence[Numbers] | None = None) -> OfKind:
    """The whole array from the ranks' parts, cut by shard() or returned by attention.

    Args:
        parts: every rank's part, in rank order, as a list; or, with `comm`, this rank's part, which
            makes the call collective. It gathers through the CPUs, also arrays on GPUs;
            longspan.torch and frameworks gather between GPUs.
        keys: the layout that they were cut by. "contiguous" takes parts of any lengths in rank
            order, as does "ranges" without tables. For results="heads" it is "heads".
        dim: the dimension of the tokens, 0 by default. With "heads" it is that of the heads, and
            must be given: 1 for an out [tokens, heads, value_dim].
        tables: for ranges the one table, for listed the list of every rank's.

    Returns:
        A new array of the kind of the parts, on every rank.

    Raises:
        InputError: parts that do not fit together, or do not fit the layout. UsageError: ranks
            differ in their arguments. RankError: a rank did not come.

    >>> import numpy as np, longspan
    >>> parts = [longspan.shard(np.arange(9), "interleaved", rank=r, ranks=2) for r in range(2)]
    >>> longspan.unshard(parts, "interleaved")
    array([0, 1, 2, 3, 4, 5, 6, 7, 8])
    """
    of_heads = isinstance(keys, str) and keys == "heads"
    rule = Sharding() if of_heads else _rule(keys, "keys")
    if of_heads and dim is None:
        raise InputError("dim is left out, and keys is 'heads': give the dimension of the heads, which is 1 of an out "
                         "[tokens, heads, value_dim] and of its lse, and 2 of those of a batch")
    asked = 0 if dim is None else dim
    if comm is not None and not isinstance(comm, Communicator):
        raise TypeError(f"comm is of type '{type(comm).__name__}'; a longspan.Communicator is wanted")
    if isinstance(parts, (list, tuple)):
        if not parts:
            raise InputError("parts is empty; there is one for each rank")
        if comm is not None and len(parts) != comm.size:
            raise InputError(f"parts has {len(parts)} arrays, and comm {comm.size} ranks: give every rank's part, or "
                             "this rank's alone, which is not a list")
        dims = [_dimension(part, asked, f"parts[{rank}]") for rank, part in enumerate(parts)]
        for rank, part in enumerate(parts):
            _check_like(parts[0], part, dims[0], rank)
            check_cut(f"parts[{rank}]", part, rule, rank, len(parts), dims[0], of_heads)
        dim = dims[0]
    else:
        if comm is None:
            raise TypeError("parts is one array and comm is None; give the list of all ranks' parts, "
                            "or the communicator to gather them")
        dim = _dimension(parts, asked, "parts")
        check_cut("parts", parts, rule, comm.rank, comm.size, dim, of_heads)
        parts = _gathered(parts, "heads" if of_heads else _text(rule), dim, comm)
    return _joined(parts, rule, dim, tables)


def _joined(parts: Sequence[Array], rule: Sharding, dim: int, tables) -> Array:
    length, ranks = sum(part.shape[dim] for part in parts), len(parts)
    in_order = rule.layout == "contiguous" or (rule.layout == "ranges" and tables is None)
    if in_order and tables is not None:
        raise InputError("tables is given, and the layout is contiguous; ranges and listed have them")
    if rule.layout == "listed":
        if not isinstance(tables, (list, tuple)) or len(tables) != ranks:
            raise InputError(f"tables is {'None' if tables is None else 'not the list of every table'}; the layout is "
                             f"listed, of which each of the {ranks} ranks has one")
    places = []  # (first position, rank, first own token, how many)
    for rank, part in enumerate(parts):
        if in_order:
            places.append((rank, rank, 0, part.shape[dim]))
            continue
        own = rule.shard(length, rank, ranks, tables[rank] if rule.layout == "listed" else tables)
        if len(own) != part.shape[dim]:
            raise InputError(f"parts[{rank}] has {part.shape[dim]} tokens in dimension {dim}; the "
                             f"layout {rule.layout} gives that rank {len(own)} of {length}")
        first = 0
        for start, stop in own.intervals():
            places.append((start, rank, first, stop - start))
            first += stop - start
    pieces = [_slices(parts[rank], dim, [(first, first + count)])[0]
              for _, rank, first, count in sorted(places) if count]
    if len(pieces) < 2:
        return _copy(pieces[0] if pieces else parts[0])
    return _concatenate(pieces, dim)


def _dtype_of(array: Array) -> str:
    return str(getattr(array, "dtype", None)).removeprefix("torch.")


def _check_like(first: Array, part: Array, dim: int, rank: int) -> None:
    shape, like = list(part.shape), list(first.shape)
    if len(shape) == len(like):
        shape[dim] = like[dim]
    if shape != like or _dtype_of(part) != _dtype_of(first) or _library(part) != _library(first):
        raise InputError(f"parts[{rank}] is {_library(part)} {_dtype_of(part)} {list(part.shape)}, and parts[0] is "
                         f"{_library(first)} {_dtype_of(first)} {list(first.shape)}; they may differ in dimension "
                         f"{dim} alone")


def _library(array: Array) -> str:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    if numpy is not None and isinstance(array, numpy.ndarray):
        return "numpy"
    return type(array).__module__.partition(".")[0]


def check_cut(name: str, part: Array, rule: Sharding, rank: int, ranks: int, dim: int, of_heads: bool = False) -> None:
    """InputError where shard() cut a part in another way than unshard() is told."""
    cut = cut_of(part)
    if cut is None or (cut.ranks == ranks == 1 and "listed" not in (cut.rule.layout, rule.layout)):
        return
    found = (cut.rank, cut.ranks, cut.dim, _alike(cut.rule))
    if of_heads or found != (rank, ranks, dim, _alike(rule)):
        wanted = "by heads" if of_heads else f"by {_text(rule)} in dimension {dim}"
        raise InputError(f"{name} is rank {cut.rank}'s part of {cut.ranks}, as longspan.shard cut it by "
                         f"{_text(cut.rule)} in dimension {cut.dim}; rank {rank}'s of {ranks} {wanted} is wanted")


def _place(comm, rank, ranks):
    if comm is not None:
        if rank is not None or ranks is not None:
            raise InputError("comm is given, and rank or ranks too; it says both")
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is of type '{type(comm).__name__}'; a longspan.Communicator is wanted")
        return comm.rank, comm.size
    if rank is None or ranks is None:
        raise TypeError("rank and ranks are wanted, or comm")
    return rank, ranks


def _gathered(part: Array, layout: str, dim: int, comm: Communicator) -> list[Array]:
    """Every rank's part, of the kind and on the device of this rank's."""
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(part, torch.Tensor)
    import numpy

    if is_torch:
        here = part.detach().cpu().contiguous().resolve_conj().resolve_neg()
        memory = here.reshape(-1).view(torch.uint8).numpy().tobytes() if here.numel() else b""
    else:
        here = part.get() if hasattr(part, "get") and hasattr(part, "__cuda_array_interface__") else part
        here = numpy.ascontiguousarray(numpy.asarray(here))
        if here.dtype.hasobject:
            raise InputError(f"parts has elements of type {here.dtype}, which are Python's own; numbers are wanted")
        memory = here.tobytes()
    step = "parts of unshard"
    own = (layout, str(dim), _dtype_of(part), repr(tuple(part.shape)))
    gathered = [text.split(b"\n", 4) for text in comm.gather("\n".join(own).encode() + b"\n" + memory, step)]
    heads = [[field.decode() for field in fields[:4]] for fields in gathered]
    shapes = [tuple(int(n) for n in head[3].strip("()").split(",") if n.strip()) for head in heads]
    for rank, head in enumerate(heads):
        for name, one, first in zip(("keys", "dim", "dtype"), head, heads[0]):
            if one != first:
                raise UsageError(f"'{name}' differs between ranks in unshard: rank 0 has {first}, rank {rank} has "
                                 f"{one}. Give every rank the same")
        like = [*shapes[rank]]
        if len(like) == len(shapes[0]):
            like[dim] = shapes[0][dim]
        if like != [*shapes[0]]:
            raise InputError(f"parts is {[*shapes[rank]]} on rank {rank} and {[*shapes[0]]} on rank 0; they may differ "
                             f"in dimension {dim} alone")
    made = []
    for shape, fields in zip(shapes, gathered):
        memory = bytearray(fields[4])  # writable
        if is_torch:
            flat = torch.frombuffer(memory, dtype=torch.uint8) if memory else \
                torch.empty(0, dtype=torch.uint8, device="cpu")
            made.append(flat.view(here.dtype).reshape(shape).to(part.device))
        else:
            made.append(numpy.frombuffer(memory, dtype=here.dtype).reshape(shape))
    if not is_torch and hasattr(part, "__array_namespace__") and not isinstance(part, numpy.ndarray):
        made = [part.__array_namespace__().asarray(one) for one in made]
    return made


__all__ = ["Shard", "Sharding", "shard", "unshard"]
