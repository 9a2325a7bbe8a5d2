"""Exact attention over a sequence whose keys and values are sharded across ranks.

    out = longspan.attend(q, k, v, comm=longspan.from_environment(), causal=True)

Every rank gives its own keys and values and gets the result over the keys of all. Arrays are of any
kind: NumPy, PyTorch, JAX, CuPy. docs/reference/python.md in the repository has the long form.
"""

import atexit as _atexit
import os as _os

from . import _core, mask
from ._attention import Attention, Phases, attend, strategies
from ._communicators import alone, forget_warning as _forget_warning, from_environment, from_exchange, from_mpi4py
from ._core import Communicator, Shard, Sharding, __version__
from ._errors import (BackendError, InputError, InternalError, LongspanError, RankError,
                      UnsupportedError, UsageError)
from ._padding import document_starts, padding
from ._reshard import Reshard, Traffic, reshard
from ._serving import (Segments, append_kv, context_attention, cross_rank_merge, merge_attn_states,
                       merge_state, merge_states, reduce_segments, segmented_attention)
from ._shards import shard, unshard


def info() -> dict[str, str]:
    """What this build and this machine can do: version, backends, MPI, NCCL, GPUs.

    >>> import longspan
    >>> longspan.info()["longspan"] == longspan.__version__
    True
    """
    return _core.info()


def features() -> list[dict]:
    """Everything that attention can be asked for, and on which device: rows of name, meaning, by
    ("layer", "calls" or both), cpu and cuda.

    >>> import longspan
    >>> {"name", "cpu", "cuda"} <= set(longspan.features()[0])
    True
    """
    return _core.features()


def environment() -> list[dict]:
    """Every environment variable that longspan reads: rows of name, value, default and meaning.

    >>> import longspan
    >>> "LONGSPAN_DEADLINE_S" in [row["name"] for row in longspan.environment()]
    True
    """
    return _core.environment()


def _after_fork():
    _core.after_fork()
    _core.forget_ops()
    _forget_warning()


_atexit.register(_core.close_all)
_os.register_at_fork(after_in_child=_after_fork)

__all__ = [
    "Attention", "BackendError", "Communicator", "InputError", "InternalError", "LongspanError",
    "Phases", "RankError", "Reshard", "Segments", "Shard", "Sharding", "Traffic", "UnsupportedError", "UsageError",
    "alone", "append_kv", "attend", "context_attention", "cross_rank_merge", "document_starts", "environment",
    "features", "from_environment", "from_exchange", "from_mpi4py", "info", "mask", "merge_attn_states", "merge_state",
    "merge_states", "padding", "reduce_segments", "reshard", "segmented_attention", "shard", "strategies", "unshard", "__version__",
]
