"""Types of arguments, for type checkers: nothing imports this at run time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol, Sequence, TypeVar, Union, runtime_checkable

if TYPE_CHECKING:
    from typing_extensions import Buffer  # every type checker knows it
elif sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    class Buffer:
        """What memoryview() takes."""

        __buffer__ = None


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array of NumPy, PyTorch, JAX, CuPy ..."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


@runtime_checkable
class HasItemsize(Protocol):
    """A dtype of NumPy or torch."""

    @property
    def itemsize(self) -> int: ...


@runtime_checkable
class StreamOfTorch(Protocol):
    @property
    def cuda_stream(self) -> int: ...


@runtime_checkable
class StreamOfCupy(Protocol):
    @property
    def ptr(self) -> int: ...


@runtime_checkable
class SupportsCudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...


Array = Union[SupportsDLPack, Buffer]
OfKind = TypeVar("OfKind", bound=Array)  # results have an argument's kind
# A small array; or on CPUs one number, a list of them, or a list of lists.
Numbers = Union[SupportsDLPack, Buffer, float, Sequence[float], Sequence[Sequence[int]]]
Stream = Union[int, StreamOfTorch, StreamOfCupy, SupportsCudaStream]
DTypeName = Literal["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "fp32",
                    "fp16", "bf16", "fp64", "e4m3", "e5m2"]
# Rows of latent keys (MLA) that carry their scales, by their bytes; an array of them is uint8.
LatentRows = Literal["latent656", "latent656_pow2", "latent584", "latent528", "latent352"]
DType = Union[DTypeName, HasItemsize, type]
KeyDType = Union[LatentRows, DType]
Layout = Literal["contiguous", "ranges", "zigzag", "striped", "interleaved", "listed"]
Part = Literal["all", "heads"]
Exchange = Literal["auto", "peer-buffers", "peer-buffers-apart", "gather"]
Strategy = Literal["auto", "gather-states", "gather-kv", "ring-kv", "scatter-states", "ring-q", "heads",
                   "heads+gather-states", "heads+gather-kv", "heads+ring-kv", "heads+scatter-states",
                   "heads+ring-q"]
Alibi = Literal["query", "context", "sqrt"]
Dout = Literal["replicated", "partial"]
Alignment = Literal["lower_right", "upper_left"]
Base = Literal["e", 2]
Device = Literal["cpu", "cuda"]
