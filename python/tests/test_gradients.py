"""Gradients of a layer against float64, which finite differences check."""

import numpy as np
import pytest

import jobs
import longspan
from oracle import attention, gradients, host
from ranks import Ranks
from test_attend import numbers

INPUT, USAGE, UNSUPPORTED = longspan.InputError, longspan.UsageError, longspan.UnsupportedError

OPTIONS = [
    dict(),
    dict(causal=True, softcap=2.0),
    dict(causal=True, window=(20, -1), scale=0.3),
    dict(window=(-1, 3), slopes=[0.5, 0.1, 0.0, 1.0], sinks=[0.5, -1.0, 0.0, 3.0]),
    dict(documents=[0, 11, 11, 40]),
    dict(causal=True, slopes=[0.5, 0.1, 0.0, 1.0], alibi="sqrt", qq=np.sin(np.arange(1681.0)).reshape(41, 41)),
]
TERMS = dict(sinks="dsinks", slopes="dalibi_slopes", qq="dqq_bias")


def problem(rng, tokens=30, keys=40, dtype="float32"):
    q = numbers(rng, (tokens, 4, 32), dtype)
    k, v = (numbers(rng, (keys, 2, 32), dtype) for _ in range(2))
    dout = numbers(rng, (tokens, 4, 32), dtype)
    return q, k, v, dout, numbers(rng, (tokens, 4))


def layer_of(options, comm=None, dtype="float32", **more):
    """The layer of the oracle's options, and the arguments of its runs."""
    given = dict(options)
    run = {name: given.pop(at) for at, name in (("slopes", "alibi_slopes"), ("sinks", "sinks"), ("qq", "qq_bias"),
                                                ("documents", "documents")) if at in given}
    if "qq_bias" in run:
        more["max_qq_gradient"] = len(run["qq_bias"])
    names = dict(scale="softmax_scale", window="window_size")
    layer = longspan.Attention(comm, heads=4, kv_heads=2, head_dim=32, dtype=dtype, max_queries=64,
                               max_seqlen_k=64, gradients=True,
                               **{names.get(n, n): x for n, x in given.items()}, **more)
    return layer, {n: np.asarray(x, np.int64 if n == "documents" else np.float32) for n, x in run.items()}


def rotated(a, positions, dim, theta=10000.0, interleaved=False, back=False):
    """Rows [rows, heads, head_dim] by RoPE in float64, or gradients of rotated rows turned back."""
    x, y = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    turned = host(a).astype(np.float64)
    angle = (np.asarray(positions)[:, None] * theta ** (-np.arange(0, dim, 2) / dim))[:, None]
    cos, sin = np.cos(angle), np.sin(angle) * (-1 if back else 1)
    turned[..., x], turned[..., y] = (turned[..., x] * cos - turned[..., y] * sin,
                                      turned[..., y] * cos + turned[..., x] * sin)
    return turned


def terms_of(options):
    """Arrays for the gradients of the terms of scores, as arguments of backward."""
    return {name: np.full(np.shape(options[at]), np.nan, np.float32) for at, name in TERMS.items() if at in options}


def assert_gradients_close(found, wanted, dtype="float32"):
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    names = ("dq", "dk", "dv", *TERMS.values())
    for got, right, name in zip(found, [a for a in wanted if a is not None], names):
        assert np.abs(host(got).astype(np.float64) - right).max() <= tolerance * max(1, np.abs(right).max()), name


@pytest.mark.parametrize("options", OPTIONS)
def test_the_reference_by_finite_differences(rng, options):
    q, k, v, dout, dlse = (a.astype(np.float64) for a in problem(rng, 5, 12))
    options = {n: x for n, x in options.items() if n != "documents"}

    def value():
        out, lse = attention(q, k, v, **options)
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()

    for a, da in zip((q, k, v), gradients(q, k, v, dout, dlse, **options)):
        for _ in range(6):
            at, step = tuple(rng.integers(0, n) for n in a.shape), 1e-5
            a[at] += step
            above = value()
            a[at] -= 2 * step
            below = value()
            a[at] += step
            assert abs((above - below) / (2 * step) - da[at]) < 1e-6
    for name, dterm in zip(TERMS, gradients(q, k, v, dout, dlse, **options)[3:]):
        if name not in options:
            continue
        term, step = np.asarray(options[name], np.float64), 1e-5
        for at in list(np.ndindex(term.shape))[:150]:
            sides = []
            for sign in (1, -1):
                options[name] = term.copy()
                options[name][at] += sign * step
                sides.append(value())
            options[name] = term
            assert abs((sides[0] - sides[1]) / (2 * step) - dterm[at]) < 1e-6, (name, at)


@pytest.mark.parametrize("dtype, more", [("float32", {}), ("bfloat16", {}), ("bfloat16", dict(bf16_products=True))])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(rng, options, dtype, more):
    q, k, v, dout, dlse = problem(rng, dtype=dtype)
    layer, run = layer_of(options, dtype=dtype, **more)
    out, lse = layer(q, k, v, return_lse=True, **run)
    terms = terms_of(options)
    found = layer.backward(dout, q, k, v, out, lse, dlse=dlse, **terms, **run)
    for gradient, of in zip(found, (q, k, v)):
        assert gradient.shape == of.shape and gradient.dtype == of.dtype
    found = *found, *terms.values()
    assert_gradients_close(found, gradients(q, k, v, dout, dlse, **options), dtype)


def test_a_batch_whose_sequences_end_early(rng):
    q, dout = (numbers(rng, (2, 10, 4, 32)) for _ in range(2))
    k, v = (numbers(rng, (2, 50, 2, 32)) for _ in range(2))
    lengths = [37, 12]
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = np.nan
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=32, dtype="float32", causal=True, max_queries=20,
                               max_batch=2, max_seqlen_k=50, gradients=True)
    out, lse = layer(q, k, v, cache_seqlens=lengths, return_lse=True)
    dq, dk, dv = layer.backward(dout, q, k, v, out, lse, cache_seqlens=lengths)
    for b, n in enumerate(lengths):
        wanted = gradients(q[b], k[b, :n], v[b, :n], dout[b], None, causal=True)
        assert_gradients_close((dq[b], dk[b, :n], dv[b, :n]), wanted)
        assert not dk[b, n:].any() and not dv[b, n:].any()


@pytest.mark.parametrize("upper_left", [False, True])
def test_padding_documents_and_alignment(rng, upper_left):
    q, dout = (numbers(rng, (2, 10, 4, 32)) for _ in range(2))
    k, v = (numbers(rng, (2, 50, 2, 32)) for _ in range(2))
    lengths, pads, used, documents = [37, 12], [5, 0], [10, 4], [[0, 6, 37], [2, 12, 12]]
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=32, dtype="float32", causal=True, max_queries=20,
                               max_batch=2, max_seqlen_k=50, gradients=True,
                               causal_alignment="upper_left" if upper_left else "lower_right")
    run = dict(seqused_k=lengths, cache_leftpad=pads, seqused_q=used, documents=documents)
    out, lse = layer(q, k, v, return_lse=True, **run)
    dq, dk, dv = layer.backward(dout, q, k, v, out, lse, **run)
    for b, n in enumerate(lengths):
        wanted = gradients(q[b], k[b, :n], v[b, :n], dout[b], None, causal=True, documents=documents[b],
                           leftpad=pads[b], used=used[b], first=0 if upper_left else None)
        assert_gradients_close((dq[b], dk[b, :n], dv[b, :n]), wanted)
        assert not dq[b, used[b]:].any()


def test_arrays_of_the_caller(rng):
    q, k, v, dout, _ = problem(rng, dtype="bfloat16")
    layer, _ = layer_of({}, dtype="bfloat16")
    out, lse = layer(q, k, v, return_lse=True)
    once = [np.full(a.shape, np.nan, np.float32) for a in (q, k, v)]
    made = layer.backward(dout, q, k, v, out, lse, dq=once[0], dk=once[1], dv=once[2])
    assert all(a is b for a, b in zip(made, once))
    twice = [a.copy() for a in once]
    layer.backward(dout, q, k, v, out, lse, dq=twice[0], dk=twice[1], dv=twice[2], accumulate=True)
    for a, b in zip(once, twice):
        np.testing.assert_array_equal(b, 2 * a)
    # What cannot be read in place is copied: rows that run backwards, and every second column.
    wide = np.zeros((*dout.shape[:2], 64), dout.dtype)
    wide[..., ::2] = dout
    again = layer.backward(wide[..., ::2], q, k, v, out, lse)
    for a, b in zip(made, again):
        np.testing.assert_array_equal(a.astype(b.dtype), b)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tables", [False, True])
def test_rope(rng, tables, interleaved):
    q, k, v, dout, dlse = problem(rng)
    positions = np.arange(10, 40)
    layer, _ = layer_of(dict(causal=True), rotary_dim=12, rotary_interleaved=interleaved, rope_theta=500.0)
    run = {}
    if tables:
        angle = np.arange(40)[:, None] * 500.0 ** (-np.arange(0, 12, 2) / 12)
        run = dict(rotary_cos=np.cos(angle).astype(np.float32), rotary_sin=np.sin(angle).astype(np.float32))
    out, lse = layer(q, k, v, return_lse=True, **run)
    found = layer.backward(dout, q, k, v, out, lse, dlse=dlse, **run)
    dq, *rest = gradients(rotated(q, positions, 12, 500.0, interleaved), k, v, dout, dlse, causal=True)[:3]
    dq = rotated(dq, positions, 12, 500.0, interleaved, back=True)
    assert_gradients_close(found, (dq, *rest))
    found = layer.backward(dout, q, k, v, out, lse, dlse=dlse, dk_before_rope=True, **run)
    dk = rotated(rest[0], np.arange(40), 12, 500.0, interleaved, back=True)
    assert_gradients_close(found, (dq, dk, rest[1]))


def test_torch(rng):
    torch = pytest.importorskip("torch")
    q, k, v, dout = (torch.from_numpy(a) for a in problem(rng)[:4])
    layer, _ = layer_of(dict(causal=True))
    out, lse = layer(q, k, v, return_lse=True)
    found = layer.backward(dout, q, k, v, out, lse)
    assert all(isinstance(a, torch.Tensor) for a in found)
    assert_gradients_close(found, gradients(q, k, v, dout, None, causal=True))


def test_refusals(rng):
    q, k, v, dout, dlse = problem(rng)
    layer, _ = layer_of({})
    out, lse = layer(q, k, v, return_lse=True)
    for error, text, call in [
            (TypeError, "lse", lambda: layer.backward(dout, q, k, v, out, None)),
            (TypeError, "dout", lambda: layer.backward(None, q, k, v, out, lse)),
            (INPUT, "dout", lambda: layer.backward(dout[1:], q, k, v, out, lse)),
            (INPUT, "dlse", lambda: layer.backward(dout, q, k, v, out, lse, dlse=dlse.astype(np.float16))),
            (INPUT, "dk", lambda: layer.backward(dout, q, k, v, out, lse, dk=np.empty_like(q))),
            (INPUT, "dq", lambda: layer.backward(dout, q, k, v, out, lse, dq=np.empty(q.shape, np.float16))),
            (INPUT, "accumulate", lambda: layer.backward(dout, q, k, v, out, lse, accumulate=True)),
            (INPUT, "dsinks", lambda: layer.backward(dout, q, k, v, out, lse, dsinks=np.empty(4, np.float32))),
            (INPUT, "dslopes", lambda: layer.backward(dout, q, k, v, out, lse, alibi_slopes=[.1] * 4,
                                                      dalibi_slopes=np.empty(3, np.float32))),
            (INPUT, "max_qq_gradient", lambda: layer.backward(
                dout, q, k, v, out, lse, qq_bias=np.zeros((40, 40), np.float32),
                dqq_bias=np.empty((40, 40), np.float32))),
            (INPUT, "no RoPE", lambda: layer.backward(dout, q, k, v, out, lse, dk_before_rope=True)),
            (INPUT, "first columns", lambda: layer.backward(dout, q, k, k, out, lse, dv=np.empty_like(k))),
    ]:
        with pytest.raises(error, match=text):
            call()
    forward = longspan.Attention(heads=4, kv_heads=2, head_dim=32, dtype="float32", max_queries=64)
    with pytest.raises(USAGE, match="set gradients"):
        forward.backward(dout, q, k, v, out, lse)
    with pytest.raises(USAGE, match="max_seqlen_k"):
        longspan.Attention(heads=4, head_dim=32, gradients=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_in_keys_have_one_gradient(rng, dtype):
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=32, value_dim=20, dtype=dtype, causal=True, max_queries=64,
                               max_seqlen_k=64, gradients=True)
    q, k, _, dout, _ = (x.astype(dtype) for x in problem(rng))
    v, dout = k[..., :20], dout[..., :20].copy()
    out, lse = layer(q, k, v, return_lse=True)
    found = layer.backward(dout, q, k, v, out, lse)
    apart = layer.backward(dout, q, k, v.copy(), out, lse)
    assert found[2] is None
    assert np.array_equal(found[0], apart[0])
    wanted = apart[1].copy()
    wanted[..., :20] += apart[2]
    assert np.array_equal(found[1], wanted)
    dq, dk = np.zeros_like(q), np.zeros_like(k)
    layer.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, accumulate=True)
    assert np.array_equal(dk, wanted)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    made = Ranks(request.param)
    yield made
    assert made.end() == [0] * request.param


@pytest.mark.parametrize("strategy", ["auto", "ring-kv", "gather-kv", "ring-q", "heads", "gather-states",
                                      "scatter-states"])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_of_ranks(ranks, rng, strategy, options):
    q, k, v, dout, dlse = problem(rng, 40)
    for queries in (None, "zigzag") if strategy.endswith("states") else ("zigzag",):
        found = ranks.values(jobs.gradients_sharded, q, k, v, dout, dlse, "zigzag", queries, strategy, options)
        wanted = gradients(q, k, v, dout, dlse, **options)
        for own in found:
            assert_gradients_close(own, wanted)


@pytest.mark.parametrize("strategy", ["ring-kv", "ring-q", "heads", "gather-states"])
def test_a_dout_whose_sequences_lie_apart(ranks, rng, strategy):
    arrays = [numbers(rng, (3, 30, 4, 32)) for _ in range(4)]
    for found in ranks.values(jobs.gradients_of_a_dout_apart, *arrays, strategy):
        for own, dense in zip(*found):
            assert np.array_equal(own, dense)


@pytest.mark.parametrize("strategy", ["gather-states", "scatter-states"])
def test_partial_dout(ranks, rng, strategy):
    q, k, v, _, _ = problem(rng)
    douts = [numbers(rng, q.shape) for _ in range(3)]
    assert ranks.values(jobs.gradients_of_parts, q, k, v, douts, strategy) == [[True] * 3] * ranks.size
