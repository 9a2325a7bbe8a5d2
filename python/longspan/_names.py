"""For functions with the names and arguments of other projects: unsupported arguments are refused
by name, and errors use the caller's names."""

from __future__ import annotations

from ._errors import InputError, LongspanError, UnsupportedError, UsageError

TRANSLATED = (InputError, UsageError, UnsupportedError, TypeError)


def refuse(function: str, why: str, **given) -> None:
    """`given`: name=(the value given, its default)."""
    for name, (value, default) in given.items():
        if value is default or (isinstance(value, (bool, int, float, str)) and value == default):
            continue
        shown = f" is {value!r}" if isinstance(value, (bool, int, float, str)) else " is given"
        raise UnsupportedError(f"{name}{shown}, which {function} does not support: {why}")


def in_their_words(error: Exception, names: dict[str, str]) -> Exception:
    """The error that the core raised, with the caller's names in place of its own."""
    import re

    ours = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    text = re.sub(rf"(?<![\w'])({ours})(?![\w']| of range)", lambda m: names[m[1]], str(error))
    made = type(error)(text) if isinstance(error, LongspanError) else TypeError(text)
    return made.with_traceback(error.__traceback__)


def required(name: str, array):
    """The array for a result; elsewhere None means "make one"."""
    if array is None:
        raise TypeError(f"{name} is None; an array is wanted, which is written in place")
    if not hasattr(array, "shape"):
        raise TypeError(f"{name} is of type '{type(array).__name__}'; an array is wanted, which is "
                        "written in place")
    return array


def check_shape(name: str, array, wanted: tuple, meaning: str):
    """`wanted` has None where any size is accepted."""
    if array is None:
        raise TypeError(f"{name} is None; an array is wanted")
    shape = getattr(array, "shape", None)
    if shape is None:
        raise TypeError(f"{name} is of type '{type(array).__name__}'; an array is wanted")
    if len(shape) == len(wanted):
        for found, expected in zip(shape, wanted):
            if expected is not None and found != expected:
                break
        else:
            return
    numbers = ", ".join("any" if w is None else str(w) for w in wanted)
    raise InputError(f"{name} is {list(shape)}; {meaning} is wanted, here [{numbers}]")


def type_of(array) -> str:
    """The type of the elements, as "float32"; without elements, the Python type."""
    return str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")


_known = {}  # by dtype, since making its text takes longer than the rest of a call


def is_fp8(array) -> bool:
    dtype = getattr(array, "dtype", None)
    try:
        return _known[dtype]
    except KeyError:
        found = _known[dtype] = "float8" in str(dtype)
        return found
    except TypeError:
        return "float8" in str(dtype)
