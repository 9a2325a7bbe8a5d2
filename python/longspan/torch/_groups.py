"""Communicators of process groups, and the names by which operators find them."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
import weakref
from typing import Any

import torch
import torch.distributed as dist

import longspan
from longspan import Communicator, InputError, RankError, UnsupportedError, UsageError

def default_deadline() -> float:
    """Seconds that ranks wait for each other, where nothing else is given."""
    return float(os.environ.get("LONGSPAN_DEADLINE_S") or 60)


class Known:
    """A communicator as operators see it.

    Communicators of process groups, and of this process alone, are kept here. A communicator that a
    caller gave stays the caller's, and is known while others hold it.
    """

    __slots__ = ("_comm", "key", "rank", "size", "device", "group", "writers", "trainers", "plans")

    def __init__(self, comm: Communicator, group: Any, is_given: bool, name: str):
        self._comm = weakref.ref(comm, lambda _: _drop(name)) if is_given else lambda: comm
        self.key = id(comm)
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self.group = None if group is None else weakref.ref(group)  # its process group, where it has one
        self.writers: dict = {}  # layers that append, by what they append
        self.trainers: dict = {}  # layers that compute gradients, by their sizes and options
        self.plans: dict = {}  # which of them a backward runs, and how, by its shapes and options

    @property
    def comm(self) -> Communicator:
        comm = self._comm()
        if comm is None:
            raise UsageError("comm was released: no object holds that communicator any more")
        return comm

    @property
    def is_given(self) -> bool:
        return isinstance(self._comm, weakref.ref)

    def for_writers(self) -> Communicator:
        """A communicator whose layers may be kept in `writers` and `trainers`. A layer holds its communicator, and what
        is kept here must not hold a caller's communicator. Collective where a new one is made."""
        if not self.is_given:
            return self.comm
        comm = self.comm
        if self.size == 1:
            return longspan.alone(self.device, gpu=comm.gpu)
        return longspan.from_exchange(self.rank, self.size, lambda mine: comm.gather(mine, "append"), self.device,
                                      gpu=comm.gpu, deadline=comm.deadline)


_known: dict[str, Known] = {}  # by name
_names: dict[int, str] = {}  # by id() of a communicator
_made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group -> {device: name}
_uses: dict[str, int] = {}  # how many communicators had a name of this kind
_lock = threading.RLock()


def known(name: str) -> Known:
    """The communicator of that name."""
    try:
        return _known[name]
    except KeyError:
        raise UsageError(f"comm is '{name}', and there is no such communicator in this process: it was released, "
                         "its process group has been destroyed, or the name is of another process, where "
                         "longspan.torch.communicator(group) makes that of a group") from None


def _name_for(comm: Communicator, group: Any, is_given: bool) -> str:
    """The ranks of a communicator are part of its name, since compiled and exported graphs carry the name to
    other processes: there it must mean the same ranks, or nothing."""
    if is_given:
        return f"longspan-{uuid.uuid4().hex}"
    if group is None:
        name = f"longspan-alone-{comm.device}" + ("" if comm.gpu is None else str(comm.gpu))
    else:
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        if len(ranks) > 32:
            ranks = hashlib.sha256(ranks.encode()).hexdigest()[:32]
        name = f"longspan-{comm.device}-{group.group_name}-{ranks}"
    _uses[name] = _uses.get(name, 0) + 1
    return name if _uses[name] == 1 else f"{name}-{_uses[name]}"  # the one before it has ended


def _add(comm: Communicator, group: Any = None, is_given: bool = False) -> str:
    with _lock:
        _let_go()
        name = _name_for(comm, group, is_given)
        _known[name] = Known(comm, group, is_given, name)
        _names[id(comm)] = name
    return name


def _drop(name: str) -> None:
    """Takes no lock: it runs wherever a communicator or a group is released, also while others meet."""
    gone = _known.pop(name, None)
    if gone is not None and _names.get(gone.key) == name:
        del _names[gone.key]


def _is_destroyed(group: Any) -> bool:
    """Whether torch.distributed no longer knows the group, though it is still held."""
    return group not in dist.distributed_c10d._world.pg_map


def _let_go() -> None:
    """Drops the communicators of process groups that have been destroyed."""
    for group in [group for group in _made if _is_destroyed(group)]:
        for name in _made.pop(group).values():
            _drop(name)


def _is_open(comm: Communicator) -> bool:
    try:
        return comm.rank >= 0
    except UsageError:  # closed, or from before a fork
        return False


def _group_of(group_or_mesh: Any, dim: str | int | None):
    """(process group, device type that a mesh names or None); the group is None without ranks."""
    given = getattr(group_or_mesh, "real_obj", group_or_mesh)  # as torch.compile passes it
    device = None
    if isinstance(given, dist.DeviceMesh):
        device = given.device_type
        if dim is None and given.ndim != 1:
            raise InputError(f"mesh has {given.ndim} dimensions, {given.mesh_dim_names}; give one of them, "
                             "as mesh['cp'], or its name as dim")
        return given.get_group(dim), device
    if dim is not None:
        raise InputError("dim is given, and there is no mesh whose dimension it could be")
    if given is None:
        if not (dist.is_available() and dist.is_initialized()):
            ranks = os.environ.get("WORLD_SIZE", "1")
            if ranks != "1":
                raise UsageError(f"group is None and torch.distributed is not initialised, in one of {ranks} "
                                 "ranks (WORLD_SIZE): call torch.distributed.init_process_group first")
            return None, device
        given = dist.group.WORLD
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("group is one that this rank is not a member of; only its members compute")
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(f"group is of type '{type(given).__name__}'; a ProcessGroup, a DeviceMesh of one "
                        "dimension or None is wanted")
    if _is_destroyed(given):
        _let_go()
        raise UsageError("group has been destroyed (torch.distributed.destroy_process_group)")
    return given, device


def _devices_of(group) -> list[str]:
    """Devices whose tensors the group moves: ["cpu", "cuda"]."""
    config = dist.get_backend_config(group)
    return [part.split(":")[0] for part in config.split(",") if ":" in part] or ["cpu"]


def _finish(work, deadline: float, step: str) -> None:
    """Waits for a transfer of the group, at most until the deadline, whatever the group's own timeout."""
    end, pause = time.monotonic() + deadline, 1e-4
    while not work.is_completed():
        if time.monotonic() > end:
            raise RankError(f"not every rank of the process group came to the {step} within {deadline:g} s: "
                            "all of its ranks make the same calls in the same order", None, step)
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    work.wait()


def exchange_over(group, deadline: float, step: str):
    """A function that gathers every rank's bytes over a process group."""
    device = torch.device("cpu" if "cpu" in _devices_of(group) else "cuda")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())

    def gather(values: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(values) for _ in range(group.size())]
        _finish(dist.all_gather(parts, values, group=group, async_op=True), deadline, step)
        return [part.cpu() for part in parts]

    def exchange(mine: bytes) -> list[bytes]:
        try:
            with torch.no_grad():
                sizes = [int(n) for n in gather(torch.tensor([len(mine)], dtype=torch.int64, device=device))]
                padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device="cpu")
                if mine:
                    padded[:len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
                return [bytes(part[:n].tolist()) for part, n in zip(gather(padded.to(device)), sizes)]
        except longspan.LongspanError:
            raise
        except RuntimeError as error:  # how the group's backend reports that a rank is gone
            raise RankError(f"the process group failed in the {step}: {error}", None, step) from error

    return exchange


def _gpu_for(device: str) -> int | None:
    if device != "cuda":
        return None
    if not torch.cuda.is_available():
        raise UnsupportedError("device is 'cuda', and torch has no GPU here")
    return torch.cuda.current_device()


def communicator(group_or_mesh: Any = None, *, dim: str | int | None = None, device: str | None = None,
                 deadline: float | None = None) -> Communicator:
    """The communicator of the ranks of a process group. It needs no MPI: torchrun is enough.

    The first call for a group is collective over it. The communicator is kept until the group is destroyed or nobody
    holds it, and later calls return it. After a RankError it has ended: close() it on every rank, and the next call makes
    a new one. torch's current device stays the same.

    Args:
        group_or_mesh: a torch.distributed.ProcessGroup; a DeviceMesh of one dimension, such as
            mesh["cp"]; or None: the default group, or this process alone where torch.distributed is
            not initialised.
        dim: which dimension of a mesh with several.
        device: "cpu" or "cuda": where tensors of calls lie. None takes what the mesh says; or else "cuda"
            where the group has a backend for it and there is a GPU; or else "cpu". The GPU is torch's
            current one.
        deadline: most seconds that a rank waits for another; None takes LONGSPAN_DEADLINE_S, or
            else 60. It holds for the first call too, whatever the group's timeout.

    Raises:
        UsageError: this rank is not a member of the group; torch.distributed is not initialised in
            one of several ranks; or ranks differ in their arguments.
        InputError: a mesh of several dimensions without `dim`.
        RankError: a rank did not come.
        TypeError: neither a group nor a mesh.

    >>> import longspan.torch
    >>> longspan.torch.communicator().size      # without torch.distributed: this process
    1
    """
    return known(_made_for(group_or_mesh, dim, device, deadline)).comm


def _made_for(group_or_mesh, dim=None, device=None, deadline=None) -> str:
    group, of_mesh = _group_of(group_or_mesh, dim)
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"device is {device!r}; 'cpu' and 'cuda' are supported")
    if group is None:
        return _alone(device or "cpu")
    if device is None:
        device = of_mesh
    if device not in ("cpu", "cuda"):
        device = "cuda" if "cuda" in _devices_of(group) and torch.cuda.is_available() else "cpu"
    with _lock:
        made = _made.setdefault(group, {})
        name = made.get(device)
        if name is not None and _is_open(known(name).comm):
            return name
        if name is not None:
            _drop(name)
        wait = deadline or default_deadline()
        gpu = _gpu_for(device)
        comm = longspan.from_exchange(group.rank(), group.size(),
                                      exchange_over(group, wait, "meeting of the ranks"), device,
                                      gpu=gpu, deadline=deadline)
        name = made[device] = _add(comm, group)
        weakref.finalize(group, _drop, name)
    return name


_single: dict[tuple, str] = {}


def _alone(device: str) -> str:
    gpu = _gpu_for(device)
    with _lock:
        name = _single.get((device, gpu))
        if name is None or not _is_open(known(name).comm):
            name = _single[device, gpu] = _add(longspan.alone(device, gpu=gpu))
    return name


@torch.compiler.assume_constant_result
def alone_name(device: str) -> str:
    """The name of the communicator of this process alone."""
    return _alone(device)


@torch.compiler.assume_constant_result
def name_of(comm: Any, group: Any, device: str) -> str:
    """The name of `comm`, or of the communicator of `group` for tensors on that device.

    Under torch.compile it is looked up when a graph is traced: a constant of the graph.
    """
    if comm is not None:
        if group is not None:
            raise InputError("comm is given, and group too; it says both")
        if isinstance(comm, str):
            known(comm)
            return comm
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is of type '{type(comm).__name__}'; a longspan.Communicator is wanted")
        with _lock:
            return _names.get(id(comm)) or _add(comm, is_given=True)
    return _made_for(group, None, device if device in ("cpu", "cuda") else None)


class Ranks:
    """The ranks of an object that lives longer than a call, whose communicator it holds.

    A copy has the same ranks. Only the default group's can be pickled, and becomes that of the process
    where it is unpickled: no other process has the ranks of other groups.
    """

    __slots__ = ("name", "_given", "_device", "_is_default", "_is_anywhere")

    def __init__(self, comm: Any, group: Any, device: str | None):
        self.name: str | None = name_of(comm, group, device or "")
        self._given, self._device, self._is_default = comm, device, comm is None and group is None
        self._is_anywhere = self._is_default and device is None and known(self.name).group is None

    def name_on(self, device: str) -> str:
        """The communicator for tensors on `device` ("" without tensors); one process alone takes their device."""
        if self.name is None:  # unpickled
            return name_of(None, None, self._device or device)
        return alone_name(device) if self._is_anywhere and device else self.name

    def __copy__(self) -> "Ranks":
        return self

    def __deepcopy__(self, memo: dict) -> "Ranks":
        return self

    def __reduce__(self) -> tuple:
        if not self._is_default:
            raise UnsupportedError("what has the ranks of a process group, a mesh or a communicator cannot be pickled, as "
                                   "no other process has them: save its state_dict, or make it without group and comm; "
                                   "then it is of the default group, here and there")
        return _unpickled, (self._device,)


def _unpickled(device: str | None) -> Ranks:
    ranks = Ranks.__new__(Ranks)
    ranks.name, ranks._given, ranks._device, ranks._is_default, ranks._is_anywhere = None, None, device, True, False
    return ranks
