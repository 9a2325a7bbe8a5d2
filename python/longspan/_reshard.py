"""A cache that moves to other ranks, another layout or other pages."""

from __future__ import annotations

from collections import namedtuple

from . import _core
from ._communicators import warn_of_others
from ._errors import InputError
from ._shards import Place, contradiction, refuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence

    from ._core import Communicator, Sharding
    from ._types import Array, DType, Layout, Numbers, Stream

Traffic = namedtuple("Traffic", "sent received kept")
Traffic.__doc__ = """Bytes of keys and values that one run moves, as this rank sees it: sent to other
ranks, received from them, and kept, from its old place to the new one."""


class Reshard:
    """A move of caches of given lengths, for many runs: one for each layer of a model.

    Making one is collective. It checks that all ranks gave the same options, finds which rank sends
    which keys to which, and allocates memory for what this rank sends, receives and keeps. Running
    it allocates nothing, and on GPUs waits for nothing.

    Args:
        comm: the ranks; None is this process alone, on CPUs.
        lengths: keys of each sequence, on all ranks.
        kv_heads, head_dim, value_dim: of the cache. value_dim None is head_dim; 0: the values are
            the first columns of the keys (MLA), and there is no v.
        dtype: of the cache, any float type, by name or of NumPy or torch.
        keys: how the keys are dealt out now, any layout but listed; to_keys: how afterwards.
        ranks: the ranks that hold them now, as range(first, stop); None is all of comm. to_ranks:
            those that hold them afterwards, the same ones or others.
        key_table, to_key_table: of ranges, [batch, ranks + 1] starts, flat for one sequence, as in
            attend.
        threads: on CPUs; 0 is LONGSPAN_THREADS, or this rank's share of the cores.

    Raises:
        UsageError, UnsupportedError, RankError, TypeError: as attend.

    >>> import numpy as np, longspan
    >>> move = longspan.Reshard(lengths=[5], kv_heads=1, head_dim=8, dtype="float32")
    >>> k, v = np.random.default_rng(0).standard_normal((2, 5, 1, 8), dtype=np.float32)
    >>> pages = np.zeros((2, 4, 4, 1, 8), np.float32)
    >>> move(k, v, *pages, to_block_table=np.array([[2, 0]], np.int32))
    >>> bool((pages[0, 2] == k[:4]).all() and (pages[0, 0, 0] == k[4]).all())
    True
    """

    def __init__(self, comm: Communicator | None = None, *, lengths: Numbers, kv_heads: int,
                 head_dim: int, value_dim: int | None = None, dtype: DType = "bfloat16",
                 keys: Layout | Sharding = "contiguous", ranks: range | None = None,
                 key_table: Numbers | None = None, to_keys: Layout | Sharding = "contiguous",
                 to_ranks: range | None = None, to_key_table: Numbers | None = None,
                 threads: int = 0):
        if comm is None:
            warn_of_others("Reshard")
        self._keys, self._ranks = keys, ranks
        self._total = lengths[0] if isinstance(lengths, (list, tuple)) and len(lengths) == 1 else None
        first_rank, rank_count = _first_and_count(ranks, "ranks")
        to_first_rank, to_rank_count = _first_and_count(to_ranks, "to_ranks")
        self._move = _core.move(
            comm=comm, lengths=lengths, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype,
            keys=keys, first_rank=first_rank, rank_count=rank_count, key_table=key_table, to_keys=to_keys,
            to_first_rank=to_first_rank, to_rank_count=to_rank_count, to_key_table=to_key_table, threads=threads)

    def __call__(self, k: Array | None = None, v: Array | None = None, to_k: Array | None = None,
                 to_v: Array | None = None, *, block_table: Array | None = None,
                 to_block_table: Array | None = None, stream: Stream | None = None) -> None:
        """Moves the keys and values of one layer. Collective.

        Args:
            k, v: what this rank holds now, in any form of a cache: [keys, kv_heads, dim], sequence
                after sequence; [batch, capacity, kv_heads, dim]; or pages, with block_table. None on
                a rank that holds no key.
            to_k, to_v: where this rank's keys go, likewise, in a form of their own. Where no key
                goes, nothing is written. They may lie in the memory of k and v.
            block_table, to_block_table: [batch, columns], the pages of each sequence.

        Raises:
            InputError: arrays that do not fit, before anything is written.
            UsageError, RankError: on every rank, where ranks run different moves.
        """
        if k is not None:
            world = self.comm
            held = range(world.size) if self._ranks is None else self._ranks
            refuse(contradiction(None, k, v, comm=Place(world.rank - held.start, len(held)), keys=self._keys,
                                 queries=None, block_table=block_table, total_keys=self._total)[2])
        self._move.run(k=k, v=v, block_table=block_table, to_k=to_k, to_v=to_v, to_block_table=to_block_table,
                       stream=stream)

    def wait(self, stream: Stream | None = None) -> None:
        """Waits for the stream, at most until the deadline, and raises what went wrong. None is the
        stream of the last run."""
        self._move.wait(stream=stream)

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._move.comm()

    @property
    def traffic(self) -> Traffic:
        """The bytes that a run moves."""
        return Traffic(*self._move.traffic())

    @property
    def workspace_bytes(self) -> int:
        """Bytes allocated on this rank."""
        return self._move.workspace_bytes()


def reshard(k: Array | None, v: Array | None, to_k: Array | None, to_v: Array | None, *,
            comm: Communicator | None = None, lengths: Sequence[int], kv_heads: int, head_dim: int,
            value_dim: int | None = None, dtype: DType = "bfloat16",
            keys: Layout | Sharding = "contiguous", ranks: range | None = None,
            key_table: Numbers | None = None, block_table: Array | None = None,
            to_keys: Layout | Sharding = "contiguous", to_ranks: range | None = None,
            to_key_table: Numbers | None = None, to_block_table: Array | None = None,
            stream: Stream | None = None) -> Traffic:
    """Moves a cache to other ranks, another layout or other pages, each key once: makes a Reshard,
    runs it and waits. Collective; a rank without keys before, or after, gives None.

    Args:
        k, v, block_table, to_k, to_v, to_block_table: as a call of Reshard.
        comm, lengths, kv_heads, head_dim, value_dim, dtype, keys, ranks, key_table, to_keys,
            to_ranks, to_key_table: as Reshard.

    Returns:
        The bytes that travelled.

    >>> import numpy as np, longspan
    >>> k, v = np.random.default_rng(0).standard_normal((2, 5, 1, 8), dtype=np.float32)
    >>> to_k, to_v = np.empty((2, 1, 7, 1, 8), np.float32)
    >>> longspan.reshard(k, v, to_k, to_v, lengths=[5], kv_heads=1, head_dim=8, dtype="float32")
    Traffic(sent=0, received=0, kept=320)
    >>> bool((to_k[0, :5] == k).all())
    True
    """
    move = Reshard(comm, lengths=lengths, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
                   dtype=dtype, keys=keys, ranks=ranks, key_table=key_table, to_keys=to_keys,
                   to_ranks=to_ranks, to_key_table=to_key_table)
    move(k, v, to_k, to_v, block_table=block_table, to_block_table=to_block_table, stream=stream)
    move.wait()
    return move.traffic


def _first_and_count(ranks: range | None, name: str) -> tuple[int, int]:
    if ranks is None:
        return 0, 0
    if not isinstance(ranks, range):
        raise TypeError(f"{name} is of type '{type(ranks).__name__}'; a range is wanted")
    if ranks.step != 1 or len(ranks) == 0 or ranks.start < 0:
        raise InputError(f"{name} is {ranks}; ranks one after the other are wanted, at least one")
    return ranks.start, len(ranks)


__all__ = ["Reshard", "Traffic", "reshard"]
