"""float64 on CPUs: results and gradients to the last digits of the reference."""

import numpy as np
import pytest

import jobs
import longspan
from oracle import attention, gradients, host
from ranks import Ranks
from test_gradients import OPTIONS

UNSUPPORTED = longspan.UnsupportedError
BOUND = 2e-13


def problem(rng, tokens=30, keys=40):
    q, dout = (rng.standard_normal((tokens, 4, 32)) for _ in range(2))
    k, v = (rng.standard_normal((keys, 2, 32)) for _ in range(2))
    return q, k, v, dout, rng.standard_normal((tokens, 4))


def assert_exact(found, wanted):
    found = host(found)
    assert found.dtype == np.float64 and found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=BOUND, atol=BOUND)


def run_options(options):
    """The oracle's options as arguments of attend()."""
    names = dict(scale="softmax_scale", window="window_size", slopes="alibi_slopes", qq="qq_bias")
    kinds = dict(documents=np.int64, slopes=np.float32, sinks=np.float32, qq=np.float32)
    return {names.get(n, n): np.asarray(x, kinds[n]) if n in kinds else x for n, x in options.items()}


def as_read(options):
    """Slopes and qq_bias are float32."""
    return options | {n: np.float64(np.float32(options[n])) for n in ("slopes", "qq") if n in options}


# 0.3 and 2.1 are other numbers in float32.
@pytest.mark.parametrize("options", [*(o for o in OPTIONS if "alibi" not in o), dict(scale=0.3, softcap=2.1)])
def test_attend(rng, options):
    q, k, v, _, _ = problem(rng)
    out, lse = longspan.attend(q, k, v, return_lse=True, **run_options(options))
    wanted, wanted_lse = attention(q, k, v, **as_read(options))
    assert_exact(out, wanted)
    assert_exact(lse, wanted_lse)


def test_arrays_that_are_copied(rng):
    """Every second column, and rows backwards."""
    q, k, v = rng.standard_normal((3, 9, 2, 32))
    out = longspan.attend(q[::-1, :, ::2], k[..., ::2], v[..., ::2])
    assert_exact(out, attention(q[::-1, :, ::2], k[..., ::2], v[..., ::2])[0])


def test_a_padded_batch_in_pages(rng):
    q = rng.standard_normal((2, 6, 4, 32))
    k, v = rng.standard_normal((2, 5, 16, 2, 32))
    table, lengths = np.array([[3, 1], [4, 0]], np.int32), [29, 20]
    out = longspan.attend(q, k, v, causal=True, cache_seqlens=lengths, block_table=table, cache_leftpad=[3, 0])
    for b, n in enumerate(lengths):
        keys, values = (a[table[b]].reshape(-1, 2, 32)[:n] for a in (k, v))
        assert_exact(out[b], attention(q[b], keys, values, causal=True, leftpad=3 - 3 * b)[0])


def test_a_cache_that_grows(rng):
    q, k, v, _, _ = problem(rng, 4, 40)
    cache = [np.full((1, 50, 2, 32), np.nan) for _ in range(2)]
    for to, of in zip(cache, (k, v)):
        to[0, :36] = of[:36]
    out = longspan.attend(q[None], *cache, k_new=k[None, 36:], v_new=v[None, 36:], cache_seqlens=[36], causal=True)
    assert_exact(out[0], attention(q, k, v, causal=True)[0])
    np.testing.assert_array_equal(cache[0][0, :40], k)


@pytest.mark.parametrize("options", [o for o in OPTIONS if "sinks" not in o])
def test_gradients(rng, options):
    q, k, v, dout, dlse = problem(rng)
    given = run_options(options)
    run = {n: given.pop(n) for n in ("documents", "alibi_slopes", "qq_bias") if n in given}
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=32, dtype="float64", max_queries=64, max_seqlen_k=64,
                               gradients=True, **given)
    out, lse = layer(q, k, v, return_lse=True, **run)
    found = layer.backward(dout, q, k, v, out, lse, dlse=dlse, **run)
    for gradient, wanted in zip(found, gradients(q, k, v, dout, dlse, **as_read(options))):
        assert_exact(gradient, wanted)


def test_gradients_of_slopes_are_refused(rng):
    q, k, v, dout, _ = problem(rng)
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=32, dtype="float64", max_queries=64, max_seqlen_k=64,
                               gradients=True)
    slopes = np.full(4, 0.1, np.float32)
    out, lse = layer(q, k, v, return_lse=True, alibi_slopes=slopes)
    with pytest.raises(UNSUPPORTED, match="slopes"):
        layer.backward(dout, q, k, v, out, lse, alibi_slopes=slopes, dalibi_slopes=np.empty(4, np.float32))


def test_torch(rng):
    torch = pytest.importorskip("torch")
    q, k, v, _, _ = problem(rng)
    tensors = [torch.from_numpy(a) for a in (q, k, v)]
    out, lse = longspan.attend(*tensors, causal=True, return_lse=True)
    assert out.dtype == lse.dtype == torch.float64
    assert_exact(out, attention(q, k, v, causal=True)[0])
    heads_first = [t.transpose(0, 1)[None] for t in tensors]
    import longspan.torch as lt
    out = lt.scaled_dot_product_attention(*heads_first, enable_gqa=True)
    right = torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True)
    assert_exact(out, right.numpy())


def test_reshard(rng):
    _, k, v, _, _ = problem(rng)
    pages = [np.full((4, 16, 2, 32), np.nan) for _ in range(2)]
    longspan.reshard(k, v, *pages, lengths=[40], kv_heads=2, head_dim=32, dtype="float64",
                     to_block_table=np.array([[3, 0, 2]], np.int32))
    for to, of in zip(pages, (k, v)):
        np.testing.assert_array_equal(to[[3, 0, 2]].reshape(-1, 2, 32)[:40], of)


def test_refusals(rng):
    q, k, v, dout, _ = problem(rng)
    for text, call in [
            ("gather-kv", lambda: longspan.attend(q, k, v, strategy="ring-kv")),
            ("rotary_dim", lambda: longspan.attend(q, k, v, rotary_dim=8)),
            ("k_descale", lambda: longspan.attend(q, k, v, k_descale=2.0)),
    ]:
        with pytest.raises(UNSUPPORTED, match=text):
            call()
    with pytest.raises(longspan.UsageError, match="out.dtype is float32: all of them are float64"):
        longspan.attend(q, k, v, out=np.empty(q.shape, np.float32))
    with pytest.raises(longspan.InputError, match="prefix_output has elements of type float64"):
        longspan.merge_attn_states(q, q[..., 0].T, q, q[..., 0].T, base="e")
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=32, dtype="float64", max_queries=64, max_seqlen_k=64,
                               gradients=True)
    out, lse = layer(q, k, v, return_lse=True)
    with pytest.raises(longspan.InputError, match="dout is float32; .*float64"):
        layer.backward(dout.astype(np.float32), q, k, v, out, lse)
    with pytest.raises(longspan.InputError, match="dq is float32; .*float64"):
        layer.backward(dout, q, k, v, out, lse, dq=np.empty(q.shape, np.float32))


def test_ranks(rng):
    q, k, v, dout, dlse = problem(rng, 40)
    ranks = Ranks(2)
    found = ranks.values(jobs.gradients_sharded, q, k, v, dout, dlse, "zigzag", "zigzag", "auto", dict(causal=True))
    wanted = gradients(q, k, v, dout, dlse, causal=True)
    for own in found:
        for gradient, right in zip(own, wanted):
            assert_exact(gradient, right)
    assert ranks.end() == [0] * 2
