"""Kinds of arrays, without the libraries that they come from: stand-ins speak their protocols."""

import array
import ctypes

import ml_dtypes
import numpy as np
import pytest

import longspan
from oracle import assert_close, attention
from test_attend import numbers


class Foreign:
    """An array of another library: DLPack and nothing else."""

    versioned = True

    def __init__(self, values):
        self.values = values

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        if not self.versioned and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.values.__dlpack__(**options)

    @staticmethod
    def __array_namespace__():
        return Foreign

    @classmethod
    def from_dlpack(cls, other):
        return cls(np.from_dlpack(other))


class Old(Foreign):
    versioned = False


@pytest.mark.parametrize("kind", [Foreign, Old])
def test_dlpack(rng, kind):
    q, k, v = numbers(rng, (3, 9, 2, 16))
    out, lse = longspan.attend(kind(q), kind(k), kind(v), return_lse=True)
    assert type(out) is Foreign and type(lse) is Foreign
    right, right_lse = attention(q, k, v)
    assert_close(out.values, right)
    np.testing.assert_allclose(lse.values, right_lse, rtol=1e-5, atol=2e-5)
    strided = np.empty((2, 9, 16), np.float32).transpose(1, 0, 2)
    mine = kind(strided)
    assert longspan.attend(kind(q), kind(k.transpose(0, 1, 2)), kind(v), out=mine) is mine
    assert (strided == out.values).all()


@pytest.mark.parametrize("shape", [(1, 2, 16), (9, 1, 16), (1, 1, 16), (1, 9, 2, 16), (3, 1, 2, 16), (3, 9, 1, 16),
                                   (3, 0, 2, 16)])
def test_an_extent_of_1_has_any_stride(rng, shape):
    """Nothing steps over it, and libraries leave what they like there: torch calls all of these dense."""
    def odd(a):
        strides = [s if n > 1 else 4 * 77 for n, s in zip(a.shape, a.strides)]
        return np.lib.stride_tricks.as_strided(a, strides=strides)

    q, k, v = numbers(rng, (3, *shape))
    out = odd(np.full_like(q, np.nan))
    right = longspan.attend(q, k, v, queries="contiguous")
    longspan.attend(odd(q), odd(k), odd(v), queries="contiguous", out=out)
    assert (out == right).all()


def test_dlpack_says_read_only(rng):
    q, k, v = numbers(rng, (3, 9, 2, 16))
    fixed = np.empty_like(q)
    fixed.flags.writeable = False
    with pytest.raises(longspan.InputError, match="out is read-only"):
        longspan.attend(q, k, v, out=Foreign(fixed))


class Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("index", ctypes.c_int32),
                ("dims", ctypes.c_int32), ("type", Type), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64)]


class Managed(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("view", View)]


ALLOCATE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(View), ctypes.POINTER(ctypes.c_void_p),
                             ctypes.c_void_p, ctypes.c_void_p)
OBJECT_OF = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
VIEW_OF = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(View))


class Api(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p),
                ("allocate", ALLOCATE), ("managed_of", ctypes.c_void_p), ("object_of", OBJECT_OF),
                ("view_of", VIEW_OF), ("current_stream", ctypes.c_void_p)]


CODES = {"float32": (2, 32), "bfloat16": (4, 16), "float8_e4m3fn": (10, 8)}
NAMES = {pair: name for name, pair in CODES.items()}


class Fast:
    """An array whose type has the exchange interface in C, as torch's has."""

    made = {}

    def __init__(self, values):
        self.values = values
        self.shape = (ctypes.c_int64 * values.ndim)(*values.shape)
        self.strides = (ctypes.c_int64 * values.ndim)(*(n // values.itemsize for n in values.strides))


def _view_of(one, view):
    view = view[0]
    view.data, view.device, view.index, view.dims = one.values.ctypes.data, 1, 0, one.values.ndim
    view.type = Type(*CODES[one.values.dtype.name], 1)
    view.shape, view.strides, view.offset = one.shape, one.strides, 0
    return 0


def _allocate(like, made, context, set_error):
    like = like[0]
    dtype = NAMES[like.type.code, like.type.bits]
    values = np.empty([like.shape[d] for d in range(like.dims)],
                      getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else dtype)
    managed = Managed()
    address = ctypes.addressof(managed)
    Fast.made[address] = Fast(values), managed
    made[0] = address
    return 0


def _object_of(managed, made):
    one, _ = Fast.made.pop(managed)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    made[0] = id(one)
    return 0


API = Api(1, 3, None, ALLOCATE(_allocate), None, OBJECT_OF(_object_of), VIEW_OF(_view_of), None)
API_NAME = ctypes.c_char_p(b"dlpack_exchange_api")  # lives as long as the capsule
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
Fast.__dlpack_c_exchange_api__ = ctypes.pythonapi.PyCapsule_New(
    ctypes.addressof(API), API_NAME, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_exchange_interface(rng, dtype):
    q, k, v = numbers(rng, (3, 9, 2, 16), dtype)
    out, lse = longspan.attend(Fast(q), Fast(k[:, ::-1][:, ::-1]), Fast(v), return_lse=True)
    assert type(out) is Fast and out.values.dtype == q.dtype and lse.values.shape == (9, 2)
    assert_close(out.values, attention(q, k, v)[0], dtype)
    assert not Fast.made
    given = Fast(np.empty_like(q))
    assert longspan.attend(Fast(q), Fast(k), Fast(v), out=given) is given
    assert (given.values == out.values).all()


def test_kinds_may_be_mixed(rng):
    q, k, v = numbers(rng, (3, 9, 2, 16))
    out = longspan.attend(q, Foreign(k), Fast(v), cache_seqlens=array.array("i", [9]))
    assert type(out) is np.ndarray
    assert_close(out, attention(q, k, v)[0])


def test_memory_that_is_a_buffer(rng):
    q, k, v = numbers(rng, (3, 9, 2, 16))
    out = np.empty_like(q)
    longspan.attend(memoryview(q), memoryview(k), memoryview(v), out=out)
    assert_close(out, attention(q, k, v)[0])
    with pytest.raises(TypeError, match="out"):
        longspan.attend(memoryview(q), k, v)


def test_subclasses_and_flags(rng):
    q, k, v = numbers(rng, (3, 9, 2, 16))
    k.flags.writeable = v.flags.writeable = False  # inputs may be
    assert_close(longspan.attend(q, k, v), attention(q, k, v)[0])


def test_arrays_without_elements(rng):
    q, k, v = numbers(rng, (3, 0, 2, 16))
    for kind in (np.asarray, Foreign, Fast):
        out = longspan.attend(kind(q), kind(k), kind(v))
        assert getattr(out, "values", out).shape == (0, 2, 16)
    rows = numbers(rng, (4, 2, 16))
    out, lse = longspan.attend(rows, k, v, total_keys=0, return_lse=True, causal=False)  # no keys
    assert (out == 0).all() and (lse == -np.inf).all()


def test_nothing_is_copied_or_kept(rng):
    import gc
    import weakref

    class Watched(np.ndarray):
        pass

    q, k, v = (numbers(rng, (9, 2, 16)).view(Watched) for _ in range(3))
    watched = [weakref.ref(a) for a in (q, k, v)]
    longspan.attend(q, k, v)
    del q, k, v
    gc.collect()
    assert [w() for w in watched] == [None] * 3
