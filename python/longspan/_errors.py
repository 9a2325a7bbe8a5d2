"""What longspan raises. Every message names the argument, what was found, and what to do."""


class LongspanError(Exception):
    """The base of all errors of longspan."""


class InputError(LongspanError, ValueError):
    """Arrays or values that do not fit together; the message names the argument."""


class UsageError(LongspanError, ValueError):
    """Options that make no sense, or that differ between ranks."""


class UnsupportedError(LongspanError, NotImplementedError):
    """Something asked for that this build, device or strategy cannot do."""


class RankError(LongspanError, RuntimeError):
    """A rank died, gave up, or did not come within the deadline.

    `rank` is the rank (None where it is unknown), `step` what it missed. The communicator has then
    ended; the process goes on, and may end in any way.
    """

    def __init__(self, message, rank=None, step=""):
        super().__init__(message)
        self.rank = None if rank is None or rank < 0 else rank
        self.step = step

    def __reduce__(self):
        return type(self), (self.args[0], self.rank, self.step)


class BackendError(LongspanError, RuntimeError):
    """CUDA, NCCL or MPI reported an error."""


class InternalError(LongspanError, RuntimeError):
    """A defect of longspan."""
