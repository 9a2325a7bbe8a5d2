"""Kinds of arrays. Stand-ins implement the protocols of libraries; torch itself makes the tensors
whose memory does not hold their values."""

import array
import ctypes

import ml_dtypes
import numpy as np
import pytest

import longspan
from device import tensor
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
    """It is never stepped over, and libraries leave any stride there: torch calls all of these dense."""
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
    """An array whose type has the exchange interface in C, as torch's does."""

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


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_integers_of_either_width(rng, dtype):
    """torch and NumPy make int64 by default."""
    q, k, v = numbers(rng, (3, 2, 9, 4, 16))
    lengths = np.array([9, 5])
    right = longspan.attend(q[:, :3], k, v, cache_seqlens=[9, 5])
    for kind in (np.asarray, Foreign):
        assert (longspan.attend(q[:, :3], k, v, cache_seqlens=kind(lengths.astype(dtype))) == right).all()
    spaced = np.array([9, 77, 5, 77], dtype)[::2]
    assert (longspan.attend(q[:, :3], k, v, cache_seqlens=spaced) == right).all()
    table = np.arange(6, dtype=dtype).reshape(2, 3)[::-1]
    pages = np.stack([k, v]).reshape(2, 6, 3, 4, 16)
    assert (longspan.attend(q[:, :3], *pages, cache_seqlens=lengths, block_table=table)
            == longspan.attend(q[:, :3], k[::-1].copy(), v[::-1].copy(), cache_seqlens=[9, 5])).all()
    packed, starts = np.concatenate([q[0, :2], q[1, :3]]), np.array([0, 2, 5], dtype)
    right = longspan.attend(packed, k, v, cu_seqlens_q=[0, 2, 5], cache_seqlens=[9, 5])
    assert (longspan.attend(packed, k, v, cu_seqlens_q=starts, cache_seqlens=lengths) == right).all()
    one = q[0], k[0], v[0]
    assert (longspan.attend(*one, documents=np.array([0, 4, 9], dtype))
            == longspan.attend(*one, documents=[0, 4, 9])).all()
    for name, table in (("ranges", np.array([[0, 9]], dtype)), ("listed", np.arange(9, dtype=dtype))):
        assert (longspan.attend(*one, keys=name, key_table=table) == longspan.attend(*one)).all()
        assert (longspan.attend(*one, queries=name, query_table=table.ravel()) == longspan.attend(*one)).all()


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int32, np.int64])
def test_flags_of_any_integer(rng, dtype):
    q, k, v = numbers(rng, (3, 2, 9, 4, 16))
    out = longspan.attend(q, k, v, causal=np.array([1, 0], dtype))
    for b, causal in enumerate((True, False)):
        assert_close(out[b], attention(q[b], k[b], v[b], causal=causal)[0])


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_integers_of_serving_calls(rng, dtype):
    def made(values):
        return np.array(values, dtype)

    cache, q = numbers(rng, (2, 10, 16, 2, 64)), numbers(rng, (2, 8, 64))
    table = np.arange(10, dtype=dtype).reshape(2, 5)
    out = longspan.segmented_attention(q, *cache, table, made([80, 33]), cu_seqlens_q=made([0, 1, 2]),
                                       causal=made([1, 0]))
    right = longspan.segmented_attention(q, *cache, table.astype(np.int32), [80, 33], cu_seqlens_q=[0, 1, 2])
    assert (out == right).all()  # one query sees all keys, causal or not
    states = longspan.segmented_attention(q, *cache, table, made([80, 33]), cu_seqlens_q=made([0, 1, 2]), segments=4)
    again = longspan.reduce_segments(states, made([80, 33]), cu_seqlens_q=made([0, 1, 2]), dtype="float32")
    np.testing.assert_allclose(again, right, atol=1e-6)
    caches = np.zeros((2, 2, 4, 16, 2, 64), np.float32)
    for slots, to in ((made([17, -1]), caches[0]), ([17, -1], caches[1])):
        longspan.append_kv(q[:, :2], q[:, :2], *to, slots)
    assert (caches[0] == caches[1]).all() and caches.any()


def test_a_batch_of_no_sequences():
    q, k, v = np.zeros((3, 0, 3, 2, 64), np.float32)
    pages = np.zeros((2, 4, 5, 2, 64), np.float32)
    none = np.zeros(0, np.int64)
    for given in (dict(), dict(causal=True), dict(cache_seqlens=none), dict(causal=np.zeros(0, bool)),
                  dict(k_new=k, v_new=v, cache_seqlens=none), dict(queries="striped"), dict(total_keys=0)):
        out, lse = longspan.attend(q, k, v, return_lse=True, **given)
        assert out.shape == (0, 3, 2, 64) and lse.shape == (0, 3, 2)
    out = longspan.attend(q, *pages, cache_seqlens=none, block_table=np.zeros((0, 7), np.int32))
    assert out.shape == (0, 3, 2, 64)
    layer = longspan.Attention(heads=2, head_dim=64, dtype="float32")
    assert layer(q, k, v).shape == (0, 3, 2, 64)
    layer.append(k, v, k, v, cache_seqlens=none)


# ---- memory that does not hold an array's values ------------------------------------------------

def test_arrays_of_numpy_that_are_not_their_memory(rng):
    q, k, v = numbers(rng, (3, 9, 2, 16))
    masked = np.ma.masked_array(q, q > 0)
    other = np.dtype(ml_dtypes.bfloat16).newbyteorder()
    for a, says in ((masked, "q is a masked array.*q.filled"), (q.astype(other), "in the other byte order"),
                    (q.astype(q.dtype.newbyteorder()), "float32 in the other byte order"),
                    (np.zeros(q.shape, [("x", "f4")]), "void32, of several fields")):
        with pytest.raises(longspan.InputError, match=says):
            longspan.attend(a, k, v)
        with pytest.raises(longspan.InputError, match=says.replace("q", "out")):
            longspan.attend(q, k, v, out=a)


def test_a_negated_tensor_has_its_sign(rng):
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, numbers(rng, (3, 9, 2, 16)))
    z = torch.complex(q, v)
    right = longspan.attend(-q, -k, -v)
    assert torch.equal(longspan.attend(*map(torch._neg_view, (q, k, v))), right)
    assert torch.equal(longspan.attend(-q, -k, z.conj().imag), right)  # and strides of 2
    merged, _ = longspan.merge_attn_states(torch._neg_view(q), q[..., 0].T, v, q[..., 0].T, base="e")
    assert torch.equal(merged, longspan.merge_attn_states(-q, q[..., 0].T, v, q[..., 0].T, base="e")[0])
    slots, cache = [0, 1, 2], torch.zeros(2, 1, 4, 2, 16, device="cpu")
    longspan.append_kv(torch._neg_view(q[:3]), v[:3], *cache, slots)
    assert torch.equal(cache[0, 0, :3], -q[:3]) and torch.equal(cache[1, 0, :3], v[:3])
    for given in (dict(out=torch._neg_view(q.clone())),
                  dict(k=torch._neg_view(k.clone()), k_new=k, v_new=v, cache_seqlens=[0])):
        before = [t.clone() for t in given.values() if hasattr(t, "clone")]
        with pytest.raises(longspan.InputError, match=r"(out|k) is a lazily negated view.*resolve_neg"):
            longspan.attend(**{"q": q, "k": k, "v": v, **given})
        assert all(map(torch.equal, before, [t for t in given.values() if hasattr(t, "clone")]))


def odd_tensors(torch, x):
    """By name: a tensor whose memory does not hold its values, and the error for it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.masked import masked_tensor

    class Logged(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise AssertionError("nothing is computed")

    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    return {
        "conj": (x.to(torch.complex64).conj(), "elements of type complex64"),
        "zeros": (torch._efficientzerotensor(tuple(x.shape)), "stands for zeros.*clone"),
        "meta": (x.to("meta"), "lies on the device 'meta'"),
        "nested": (torch.nested.nested_tensor([x, x]), "is nested; .*cu_seqlens_q"),
        "jagged": (torch.nested.nested_tensor([x, x], layout=torch.jagged), "is nested"),
        "sparse": (x.to_sparse(), "has the layout torch.sparse_coo.*to_dense"),
        "csr": (x[:, 0].to_sparse_csr(), "has the layout torch.sparse_csr"),
        "quantized": (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "is quantized.*dequantize"),
        "functional": (torch._to_functional_tensor(x), "in a functionalized program"),
        "fake": (fake, "is a FakeTensor"),
        "masked": (masked_tensor(x, x > 0), "is a MaskedTensor"),
        "subclass": (x.as_subclass(Logged), "is a Logged"),
        "freed": (freed, "has no memory that can be read"),
        "fp8 of AMD": (x.to(torch.float8_e4m3fnuz), "elements of type float8_e4m3fnuz"),
        "scales": (x.to(torch.float8_e8m0fnu), "elements of type float8_e8m0fnu"),
        "uint16": (x.to(torch.uint16), "elements of type uint16"),
        "bytes": (x.to(torch.float8_e4m3fn).view(torch.uint8), "is uint8.*view.torch.float8_e4m3fn"),
    }


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_their_memory(rng):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(numbers(rng, (9, 2, 16)))
    for name, (odd, says) in odd_tensors(torch, x).items():
        for given in (dict(q=odd), dict(k=odd), dict(v=odd), dict(out=odd)):
            with pytest.raises(longspan.InputError, match=f"^{next(iter(given))}\\b.*{says}"):
                longspan.attend(**{"q": x, "k": x, "v": x, **given})
    for plain in (torch.nn.Parameter(x, requires_grad=False), x.as_subclass(type("Mine", (torch.Tensor,), {}))):
        assert torch.equal(longspan.attend(plain, x, x), longspan.attend(x, x, x))


def test_other_derivatives_are_refused_by_name(rng):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(numbers(rng, (9, 2, 16)))

    def attend(a):
        return longspan.attend(x, a, x)

    forward = torch.autograd.forward_ad
    with forward.dual_level():
        dual = forward.make_dual(x, x)
        with pytest.raises(longspan.UnsupportedError, match="^k is a dual tensor.*unpack_dual.k"):
            attend(dual)
        with pytest.raises(longspan.UnsupportedError, match="^out is a dual tensor"):
            longspan.attend(x, x, x, out=dual)
        assert torch.equal(attend(forward.unpack_dual(dual).primal), attend(x))
    for transformed in (lambda: torch.func.jvp(attend, (x,), (x,)), lambda: torch.func.jacfwd(attend)(x),
                        lambda: torch.func.grad(lambda a: attend(a).sum())(x), lambda: torch.vmap(attend)(x[None])):
        with pytest.raises(longspan.UnsupportedError, match="^k (is in a transform of|requires grad in) torch.func"):
            transformed()
    assert attend(x.clone().requires_grad_()).requires_grad
    with pytest.raises(longspan.UnsupportedError, match="^k requires grad"):  # autograd records no arrays of NumPy
        longspan.attend(x.numpy(), x.clone().requires_grad_(), x)


def test_tensors_of_inference_mode(rng):
    torch = pytest.importorskip("torch")
    q, k, v = map(tensor, numbers(rng, (3, 1, 9, 2, 16)))
    with torch.inference_mode():
        cache = torch.zeros(2, 1, 64, 2, 16)
        out = torch.empty_like(q)
    assert longspan.attend(q, *cache, k_new=k, v_new=v, cache_seqlens=torch.tensor([0]), out=out) is out
    assert torch.equal(cache[0, :, :9], k) and torch.equal(out, longspan.attend(q, k, v))
