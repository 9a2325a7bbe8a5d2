"""The operators: schemas, fake implementations, torch.compile, and what they refuse."""

import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

pytest.importorskip("torch")

import longspan
import longspan.torch as lt
import torch
from device import DEVICE
from oracle import assert_close, assert_lse_close, attention
from torch.nn.attention import SDPBackend, sdpa_kernel

OPS = torch.ops.longspan
ALONE = lt._groups.name_of(None, None, DEVICE)


def arrays(batch=2, tokens=5, keys=9, dtype=torch.float32):
    return [torch.randn(batch, n, h, 16).to(dtype) for n, h in ((tokens, 4), (keys, 2), (keys, 2))]


def samples():
    q, k, v = arrays()
    lengths = torch.tensor([7, 5], dtype=torch.int32)
    out = torch.empty_like(q)
    new = torch.randn(2, 2, 3, 2, 16)
    yield OPS.attend, (q, k, v, ALONE), {}
    yield OPS.attend, (q[0], k[0], v[0, :, :, :8], ALONE), dict(causal=True, window_left=3, softcap=2.0)
    yield OPS.attend, (q, k, v, ALONE), dict(sinks=torch.zeros(4), alibi_slopes=torch.ones(4), cache_seqlens=lengths)
    yield OPS.attend, (q.bfloat16(), k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), ALONE), dict(
        k_descale=torch.ones(1), v_descale=torch.ones(2))
    yield OPS.attend_lse, (q, k, v, ALONE), dict(queries="zigzag", keys="zigzag", equal_lengths=False)
    yield OPS.attend_out, (q, k, v, ALONE, out), dict(causal=True)
    yield OPS.attend_append, (q[:, :3], k.clone(), v.clone(), *new, ALONE), dict(causal=True, cache_seqlens=lengths - 1)
    yield OPS.append, (*new, k.clone(), v.clone(), ALONE), dict(cache_seqlens=lengths - 1)


@pytest.mark.parametrize("number", range(8))
def test_opcheck(number):
    op, args, options = list(samples())[number]
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if args[1].element_size() == 1:
        utils.remove("test_schema")  # it compares by products, which torch lacks in fp8
    torch.library.opcheck(op.default, args, options, test_utils=utils)


def test_what_is_written_is_declared():
    for name, written in (("attend", []), ("attend_lse", []), ("attend_out", ["out"]),
                          ("attend_append", ["k", "v"]), ("append", ["k", "v"])):
        schema = getattr(OPS, name).default._schema
        assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == written


@hypothesis.given(st.integers(1, 3), st.integers(0, 40), st.integers(0, 60), st.sampled_from([8, 16, 40]), st.booleans(),
                  st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(0, 2 ** 32 - 1))
@hypothesis.settings(max_examples=40)
def test_any_shape(batch, tokens, more, dim, causal, dtype, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    q, k, v = (torch.randn(batch, n, h, dim + 3, generator=generator)[..., 3:].to(getattr(torch, dtype))
               for n, h in ((tokens, 4), (tokens + more, 2), (tokens + more, 2)))
    out, lse = OPS.attend_lse(q, k, v, ALONE, causal=causal)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    for b in range(batch):
        right, right_lse = attention(*(t[b] for t in (q, k, v)), causal=causal)
        assert_close(out[b], right, dtype)
        assert_lse_close(lse[b], right_lse)


@pytest.mark.more
def test_compiled_by_inductor():
    """One graph, with everything around it, of sizes that change."""
    def model(q, k, v, k_new, cache):
        OPS.append(k_new, k_new * 2, cache[0], cache[1], ALONE, total_keys=3)
        out = lt.scaled_dot_product_attention(q * 1.0, k + 0, v, is_causal=True, window_size=(3, -1))
        return torch.nn.functional.silu(out) + 1, OPS.attend(q.transpose(1, 2), *cache, ALONE, total_keys=3)

    compiled = torch.compile(model, fullgraph=True)
    for tokens in (6, 9, 12):
        q, k, v = torch.randn(3, 1, 2, tokens, 16)
        k_new = torch.randn(1, 3, 2, 16)
        caches = torch.zeros(2, 2, 1, 8, 2, 16)
        found, wanted = compiled(q, k, v, k_new, caches[0]), model(q, k, v, k_new, caches[1])
        torch.testing.assert_close(found, wanted)
        assert torch.equal(caches[0], caches[1]) and torch.equal(caches[0, 0, 0, :3], k_new[0])


@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_requires_grad(what):
    tensors = dict(zip("qkv", arrays()))
    tensors[what].requires_grad_()
    calls = [lambda q, k, v: OPS.attend(q, k, v, ALONE), lambda q, k, v: OPS.attend_lse(q, k, v, ALONE),
             lambda q, k, v: OPS.attend_out(q, k, v, ALONE, torch.empty_like(q)),
             lambda q, k, v: OPS.attend_append(q, k, v, k[:, :5], v[:, :5], ALONE)]
    for call in calls:
        with pytest.raises(longspan.UnsupportedError, match=f"{what} requires grad"):
            call(**tensors)
        for enter in (torch.no_grad, torch.inference_mode):
            with enter():
                if call is not calls[3]:  # a cache is written
                    call(**tensors)
        torch._dynamo.reset()
        with pytest.raises(Exception, match=f"{what} requires grad"):
            torch.compile(call, fullgraph=True, backend="aot_eager")(**tensors)
    named = dict(zip(("query", "key", "value"), (t.transpose(1, 2) for t in tensors.values())))
    for call in (lambda **t: lt.scaled_dot_product_attention(**t, enable_gqa=True), lt.ContextParallelAttention()):
        call(**named).sum().backward()
        assert tensors[what].grad is not None
        with torch.no_grad():
            assert not call(**named).requires_grad


def functions():
    """Of [batch, heads, tokens, dim], each in another way."""
    layer = lt.ContextParallelAttention()
    yield lt.scaled_dot_product_attention
    yield layer
    yield lambda q, k, v: OPS.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), ALONE).transpose(1, 2)
    yield lambda q, k, v: OPS.attend_lse(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), ALONE)[1]


@pytest.mark.parametrize("number", range(4))
def test_derivatives_are_refused(number):
    """Forward mode and torch.func; torch alone would give zeros."""
    call, (q, k, v) = list(functions())[number], torch.randn(3, 1, 2, 9, 16)
    one = torch.ones_like(q)
    for ask, says in [(lambda: torch.func.jvp(lambda a: call(a, k, v), (q,), (one,)), "forward mode"),
                      (lambda: torch.func.jvp(lambda a: call(q, a, v), (k,), (one,)), "forward mode"),
                      (lambda: torch.func.jacfwd(lambda a: call(q, k, a))(v), "forward mode"),
                      (lambda: torch.func.grad(lambda a: call(a, k, v).sum())(q), "requires grad"),
                      (lambda: torch.func.vjp(lambda a: call(q, a, v), k), "requires grad"),
                      (lambda: torch.vmap(torch.func.grad(lambda a: call(a, k, v).sum()))(q[None]), "requires grad"),
                      (lambda: torch.func.jvp(lambda a: torch.vmap(call)(a[None], k[None], v[None]), (q,), (one,)),
                       "forward mode")]:
        with pytest.raises(longspan.UnsupportedError, match=says):
            ask()
    with pytest.raises(longspan.UnsupportedError, match="forward mode"), torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(q, one), k, v)
    # Tensors without a derivative work as without the transform.
    right = call(q, k, v)
    found, tangent = torch.func.jvp(lambda a: a + call(q, k, v).sum(), (q,), (one,))
    assert torch.equal(found, q + right.sum()) and torch.equal(tangent, one)
    found, tangent = torch.func.jvp(lambda a: a + call(a.detach(), k, v).sum(), (q,), (one,))
    assert torch.equal(found, q + right.sum()) and torch.equal(tangent, one)

    def without_grad(a):
        with torch.no_grad():
            attended = call(a, k, v)
        return (a * attended.sum()).sum()

    assert torch.allclose(torch.func.grad(without_grad)(q), right.sum().expand_as(q))


@pytest.mark.parametrize("number", range(4))
def test_vmap(number):
    call = list(functions())[number]
    q, k, v = torch.randn(3, 2, 3, 1, 2, 9, 16)
    right = torch.stack([torch.stack([call(*one) for one in zip(*two)]) for two in zip(q, k, v)])
    assert torch.equal(torch.vmap(torch.vmap(call))(q, k, v), right)
    found = torch.vmap(call, in_dims=(1, None, None), out_dims=1)(q[0].movedim(0, 1), k[0, 0], v[0, 0])
    assert torch.equal(found[:, 1], call(q[0, 1], k[0, 0], v[0, 0]))
    assert torch.equal(torch.func.functionalize(call)(q[0, 0], k[0, 0], v[0, 0]), right[0, 0])


def test_vmap_of_what_is_written():
    q, k, v = arrays()
    several, out = torch.randn(3, *q.shape), torch.zeros(3, *q.shape)
    torch.vmap(lambda q, out: OPS.attend_out(q, k, v, ALONE, out) or out)(several, out)
    assert torch.equal(out, torch.stack([OPS.attend(one, k, v, ALONE) for one in several]))
    with pytest.raises(longspan.UnsupportedError, match="out is written"):
        torch.vmap(lambda q: OPS.attend_out(q, k, v, ALONE, out[0]) or q)(several)


def test_lazily_negated_tensors():
    for call in functions():
        for which in range(3):
            tensors = [*torch.randn(3, 1, 2, 9, 16)]
            tensors[which] = torch._neg_view(tensors[which])
            assert torch.equal(call(*tensors), call(*(t.resolve_neg() for t in tensors)))
    q, k, v = arrays()
    sinks = torch._neg_view(torch.randn(4))
    assert torch.equal(OPS.attend(q, k, v, ALONE, sinks=sinks), OPS.attend(q, k, v, ALONE, sinks=sinks.resolve_neg()))


def views(batch, keys, heads, dim):
    """[batch, heads, keys, dim] of every kind of stride."""
    whole = torch.randn(batch, heads, keys, dim)
    yield whole
    yield torch.randn(batch, heads, keys, 2 * dim)[..., ::2]
    yield torch.randn(batch, heads, dim, keys).transpose(-1, -2)
    yield torch.randn(1, heads, keys, dim).expand_as(whole)
    yield torch.randn(batch, 1, keys, dim).expand_as(whole)
    yield torch.randn(batch, heads, 1, dim).expand_as(whole)
    yield torch.randn(batch, heads, keys, 1).expand_as(whole)
    yield torch.randn(1).expand_as(whole)
    yield torch.randn(keys, batch, heads, dim).permute(1, 2, 0, 3)
    yield torch.randn(batch, heads, 2 * keys, dim)[:, :, ::2]
    yield torch.randn(2 * batch, heads, keys, dim)[::2]
    yield torch.randn(whole.numel()).as_strided(whole.shape, (1, 3, 2, 1))


@pytest.mark.parametrize("batch, keys", [(1, 1), (2, 1), (1, 5), (3, 4)])
def test_every_stride(batch, keys):
    """As in torch: pairs of unusual tensors."""
    kinds = len(list(views(1, 1, 1, 8)))
    for i in range(kinds):
        for j in range(kinds):
            for q, k, v in [(0, i, j), (i, j, 0), (i, 0, j)]:
                q, k, v = ([*views(batch, keys, 2, 8)][n] for n in (q, k, v))
                dense = (t.contiguous() for t in (q, k, v))  # torch's own kernel reads rows that overlap wrongly
                with sdpa_kernel(SDPBackend.MATH):  # others of torch's want aligned strides
                    right = torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True)
                torch.testing.assert_close(lt.scaled_dot_product_attention(q, k, v, is_causal=True), right, rtol=1e-5,
                                           atol=1e-5)


def test_small_tensors_of_any_stride():
    q, k, v = arrays(1)
    for name, values in (("sinks", torch.randn(4)), ("alibi_slopes", torch.rand(4)),
                         ("documents", torch.tensor([0, 2, 2, 9]))):
        right = OPS.attend(q, k, v, ALONE, causal=True, **{name: values})
        assert torch.equal(OPS.attend(q, k, v, ALONE, causal=True, **{name: values.repeat_interleave(2)[::2]}), right)
    one = torch.ones(1)
    assert torch.equal(OPS.attend(q, k, v, ALONE, sinks=one.expand(4)), OPS.attend(q, k, v, ALONE, sinks=torch.ones(4)))


def test_an_unknown_communicator():
    with pytest.raises(longspan.UsageError, match="no such communicator"):
        OPS.attend(*arrays(), "longspan-none")


@pytest.mark.more
def test_both_import_orders():
    """longspan alone does not bring torch; longspan.torch works before torch and after it."""
    for order, brought in (("import longspan", False), ("import longspan.torch", True),
                           ("import torch, longspan.torch", True), ("import longspan.torch, torch", True),
                           ("import longspan, torch; import longspan.torch", True)):
        script = order + "\nimport sys; print('torch' in sys.modules)\n"
        if brought:
            script += ("import torch; q = torch.ones(1, 2, 3, 16); "
                       "print(longspan.torch.scaled_dot_product_attention(q, q, q).sum().item())")
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert done.stdout.split() == ["True", "96.0"] if brought else ["False"], done.stderr


@pytest.mark.parametrize("name", lt.__all__)
def test_examples_in_docstrings(name):
    import doctest
    import inspect

    what = getattr(lt, name)
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(what.__doc__), {}, name, None, None)
    runner = doctest.DocTestRunner()
    with torch.device("cpu"):  # which is what they print
        runner.run(test)
    assert runner.failures == 0 and test.examples


def test_the_operator_is_seen_where_somebody_looks():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    def call(*tensors, return_lse=False):
        return lt.scaled_dot_product_attention(*tensors, is_causal=True, return_lse=return_lse)

    q, k, v = torch.randn(3, 1, 2, 9, 16)
    plain, (_, lse) = call(q, k, v), call(q, k, v, return_lse=True)
    with Seen() as seen:
        assert torch.equal(call(q, k, v), plain)
        assert torch.equal(call(q, k, v, return_lse=True)[1], lse)
    assert {"longspan.attend.default", "longspan.attend_lse.default"} <= set(seen.names)
    with torch.profiler.profile() as profile:
        call(q, k, v)
    assert "longspan::attend" in {event.key for event in profile.key_averages()}
    with FakeTensorMode() as mode:
        assert call(*(mode.from_tensor(t) for t in (q, k, v))).shape == plain.shape
    several = torch.randn(3, 4, 1, 2, 9, 16)
    assert torch.equal(torch.vmap(call)(*several), torch.stack([call(*one) for one in zip(*several)]))
    assert call(torch.nn.Parameter(q, requires_grad=False), k, v).equal(plain)
