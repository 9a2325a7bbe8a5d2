"""Communicators: the ranks that compute together."""

from __future__ import annotations

from . import _core
from ._core import Communicator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Sequence

    from ._types import Device

_asked = False  # whether this process has looked for them


def warn_of_others(function: str) -> None:
    """Warns, at most once, where a rank of a launcher calls without a comm."""
    global _asked
    if _asked:
        return
    _asked = True
    launched = _core.launched_rank()
    if not launched:
        return
    import warnings

    warnings.warn(f"longspan.{function} is given no comm, and this is one of several ranks ({launched}): it takes the "
                  "keys of this process for all there are. Give comm=longspan.from_environment(), or "
                  "comm=longspan.alone() where that is meant.", RuntimeWarning, stacklevel=3)


def forget_warning() -> None:
    """For the child of a fork, whose environment may differ."""
    global _asked
    _asked = False


def alone(device: Device = "cpu", *, gpu: int | None = None) -> Communicator:
    """One process alone, on its CPUs or on a GPU.

    Calls without a communicator use this one.

    Args:
        device: "cpu" or "cuda".
        gpu: which GPU, as CUDA counts them; None is the current one.

    Raises:
        UsageError: no such GPU.
        UnsupportedError: "cuda" in a build without CUDA.

    >>> import longspan
    >>> comm = longspan.alone()
    >>> comm.rank, comm.size, comm.device
    (0, 1, 'cpu')
    """
    return _core.alone(device=device, gpu=gpu)


def from_environment(device: Device = "cpu", *, gpu: int | None = None,
                     deadline: float | None = None) -> Communicator:
    """The ranks that the launcher started: mpirun, torchrun or srun; without one, this process alone.

    Collective: every rank calls it.

    Args:
        device: "cpu" or "cuda": where the arrays of calls will lie.
        gpu: this rank's GPU; None is the one of its local rank.
        deadline: most seconds that a rank waits for another; None takes LONGSPAN_DEADLINE_S, or
            else 60.

    Raises:
        UsageError: some of a launcher's variables are set and others missing (WORLD_SIZE without
            RANK); or a rank of mpirun started or forked this process, which cannot use that rank's
            MPI.
        RankError: a rank did not come.
        UnsupportedError: what the launcher needs is not in this build.

    >>> import longspan
    >>> longspan.from_environment().size      # no launcher here
    1
    """
    return _core.from_environment(device=device, gpu=gpu, deadline=deadline)


def from_mpi4py(comm: Any, device: Device = "cpu", *, gpu: int | None = None,
                deadline: float | None = None) -> Communicator:
    """The ranks of an mpi4py communicator, which stays the caller's. Collective over `comm`.

    Args:
        comm: an mpi4py.MPI.Comm, such as MPI.COMM_WORLD.
        device, gpu, deadline: as in from_environment.

    Raises:
        TypeError: `comm` is not one.
        UsageError: mpi4py runs on another MPI library than longspan.
        UnsupportedError: longspan was built without MPI.
    """
    return _core.from_mpi4py(comm=comm, device=device, gpu=gpu, deadline=deadline)


def from_exchange(rank: int, size: int, exchange: Callable[[bytes], Sequence[bytes]],
                  device: Device = "cpu", *, gpu: int | None = None,
                  deadline: float | None = None) -> Communicator:
    """Ranks that the caller lets exchange a few bytes: over a process group, pipes, files.

    Needs no MPI, no launcher and no agreed port. On CPUs states travel over TCP, on GPUs over NCCL.
    A process may have many of these. Collective.

    Args:
        rank, size: this rank and the number of ranks.
        exchange: given this rank's bytes, returns the list of every rank's, in rank order. It is
            called at most twice, and not kept; what it raises passes.
        device, gpu, deadline: as in from_environment.

    Raises:
        UsageError: ranks differ in what they ask for.
        RankError: a rank did not come.

    >>> import longspan
    >>> longspan.from_exchange(0, 1, lambda mine: [mine]).size
    1
    """
    return _core.from_exchange(rank=rank, size=size, exchange=exchange, device=device, gpu=gpu, deadline=deadline)
