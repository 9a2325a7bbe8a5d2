"""longspan.flash_attn and ring_flash_attn: flash-attention's names over our calls, in its own layouts of results."""

import inspect

import numpy as np
import pytest

import longspan
from longspan import flash_attn as fa
from oracle import assert_close, attention, host


def arrays(*shape, count=3, seed=0):
    return list(np.random.default_rng(seed).standard_normal((count, *shape), dtype=np.float32))


OPTIONS = [dict(), dict(causal=True), dict(window_size=(3, 1)), dict(causal=True, softcap=2.0, softmax_scale=0.3)]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_batch(options):
    q, (k, v) = arrays(2, 7, 4, 16, count=1)[0], arrays(2, 11, 2, 16, count=2, seed=1)
    out, lse, nothing = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert lse.shape == (2, 4, 7) and nothing is None
    names = {"softmax_scale": "scale", "window_size": "window"}
    for b in range(2):
        right, right_lse = attention(q[b], k[b], v[b], **{names.get(n, n): o for n, o in options.items()})
        assert_close(out[b], right, "float32")
        np.testing.assert_allclose(lse[b].T, right_lse, rtol=1e-5, atol=1e-5)
    assert np.array_equal(fa.flash_attn_kvpacked_func(q, np.stack([k, v], 2), **options), out)


def test_packed_arrays_are_read_in_place():
    qkv = np.stack(arrays(2, 9, 4, 16), 2)
    right = fa.flash_attn_func(*(np.ascontiguousarray(qkv[:, :, n]) for n in range(3)), causal=True)
    assert np.array_equal(fa.flash_attn_qkvpacked_func(qkv, causal=True), right)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(causal):
    """Of one table of starts, and of two; slopes of each sequence."""
    q, (k, v) = arrays(12, 4, 16, count=1)[0], arrays(12, 2, 16, count=2, seed=1)
    starts = np.array([0, 5, 5, 12], np.int32)
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, causal=causal, return_attn_probs=True)
    assert lse.shape == (4, 12)
    for a, b in ((0, 5), (5, 12)):
        right, _ = attention(q[a:b], k[a:b], v[a:b], causal=causal)
        assert_close(out[a:b], right, "float32")
    assert_close(fa.flash_attn_varlen_func(q, k, v, starts, starts.copy(), 7, 7, causal=causal), out, "float32")
    k, v = arrays(15, 2, 16, count=2, seed=2)
    more = np.array([0, 8, 8, 15], np.int32)
    slopes = np.random.default_rng(3).random((3, 4), dtype=np.float32)
    out = fa.flash_attn_varlen_func(q, k, v, starts, more, 7, 8, causal=causal, alibi_slopes=slopes)
    for n, (a, b, c, d) in {0: (0, 5, 0, 8), 2: (5, 12, 8, 15)}.items():
        assert_close(out[a:b], attention(q[a:b], k[c:d], v[c:d], causal=causal, slopes=slopes[n])[0], "float32")


def test_a_cache():
    q, k, v = arrays(2, 3, 4, 16)
    caches = arrays(2, 16, 4, 16, count=2, seed=5)
    before = [c.copy() for c in caches]
    out, lse = fa.flash_attn_with_kvcache(q, *caches, k=k, v=v, cache_seqlens=np.array([5, 9], np.int32), causal=True,
                                          return_softmax_lse=True)
    assert lse.shape == (2, 4, 3)
    for b, held in enumerate((5, 9)):
        for cache, old, new in zip(caches, before, (k, v)):
            assert np.array_equal(cache[b, held:held + 3], new[b]) and np.array_equal(cache[b, :held], old[b, :held])
        assert_close(out[b], attention(q[b], *(c[b, :held + 3] for c in caches), causal=True)[0], "float32")
    same = fa.flash_attn_with_kvcache(q[:, :1], *caches, cache_seqlens=7)
    for b in range(2):
        assert_close(same[b], attention(q[b, :1], *(c[b, :7] for c in caches))[0], "float32")


def test_refusals():
    q, k, v = arrays(1, 5, 2, 16)
    with pytest.raises(longspan.UsageError, match="probability"):
        fa.flash_attn_func(q, k, v, dropout_p=1.0)
    with pytest.raises(longspan.InputError, match=r"q is \[5, 2, 16\]"):
        fa.flash_attn_func(q[0], k[0], v[0])
    with pytest.raises(longspan.InputError, match="qkv is"):
        fa.flash_attn_qkvpacked_func(q)
    with pytest.raises(longspan.InputError, match="cache_seqlens"):
        fa.flash_attn_with_kvcache(q, k.copy(), v.copy(), k=k, v=v)
    with pytest.raises(longspan.InputError, match="together"):
        fa.flash_attn_with_kvcache(q, k.copy(), v.copy(), k=k, cache_seqlens=0)
    with pytest.raises(longspan.UnsupportedError, match="rotary_cos"):
        fa.flash_attn_with_kvcache(q, k, v, rotary_cos=np.ones((5, 8), np.float32), rotary_sin=np.zeros((5, 8), np.float32))


def test_names_are_those_of_flash_attention():
    """The arguments by position, as version 2.8 has them."""
    wanted = ["q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
              "return_attn_probs"]
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [n for n, p in inspect.signature(fa.flash_attn_func).parameters.items() if p.kind is by_position]
    assert found == wanted
    varlen = [n for n, p in inspect.signature(fa.flash_attn_varlen_func).parameters.items() if p.kind is by_position]
    assert varlen == [*wanted[:3], "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *wanted[3:], "block_table"]


def test_dropout():
    """Of a weight of 1, which is the value itself: some are 0, the others are divided by 1 - p."""
    q, k, v = arrays(1, 400, 2, 16)
    out = fa.flash_attn_func(q, k, v, dropout_p=0.25, window_size=(0, 0))
    kept = (out != 0).all(-1)
    np.testing.assert_allclose(out, np.where(kept[..., None], v / 0.75, 0), rtol=1e-5)
    assert 0.65 < kept.mean() < 0.85


def test_tensors_that_learn():
    torch = pytest.importorskip("torch")
    qkv = torch.randn(2, 9, 3, 4, 16, dtype=torch.float64, device="cpu", requires_grad=True)
    right = torch.nn.functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True).transpose(1, 2)
    dout = torch.randn(2, 9, 4, 16, dtype=torch.float64, device="cpu")
    wanted, = torch.autograd.grad(right, qkv, dout)
    found, = torch.autograd.grad(fa.flash_attn_qkvpacked_func(qkv, causal=True), qkv, dout)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    starts = torch.tensor([0, 9, 18], device="cpu")
    q, k, v = (qkv[:, :, n].flatten(0, 1) for n in range(3))
    found, = torch.autograd.grad(fa.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, causal=True), qkv, dout.flatten(0, 1))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [dict(), dict(causal=True, softcap=2.0), dict(window_size=(3, 1)), dict(slopes=True)])
def test_packed_sequences_that_learn(options):
    """Rows and keys have starts of their own, and one sequence is empty; lse has a gradient too."""
    torch = pytest.importorskip("torch")
    from device import DEVICE
    from oracle import gradients

    dtype = torch.float32 if "slopes" in options or DEVICE != "cpu" else torch.float64
    bound = 1e-4 if dtype == torch.float32 else 1e-11
    rows, keys = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 5, 5, 12], [0, 8, 8, 15]))
    q, k, v = torch.randn(12, 4, 16, dtype=dtype), torch.randn(15, 2, 16, dtype=dtype), torch.randn(15, 2, 8, dtype=dtype)
    given = {name: value for name, value in options.items() if name != "slopes"}
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if "slopes" in options:
        given["alibi_slopes"] = torch.rand(3, 4).requires_grad_()
        leaves.append(given["alibi_slopes"])
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, rows, keys, 7, 8, return_attn_probs=True, **given)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    names = {"softmax_scale": "scale", "window_size": "window"}
    for n, (a, b, c, d) in {0: (0, 5, 0, 8), 2: (5, 12, 8, 15)}.items():
        own = {names.get(name, name): value for name, value in given.items() if name != "alibi_slopes"}
        if "slopes" in options:
            own["slopes"] = host(given["alibi_slopes"][n])
        right, right_lse = attention(q[a:b], k[c:d], v[c:d], **own)
        np.testing.assert_allclose(host(out[a:b]), right, rtol=bound, atol=bound)
        np.testing.assert_allclose(host(lse[:, a:b].T), right_lse, rtol=1e-5, atol=1e-5)
        wanted = gradients(q[a:b], k[c:d], v[c:d], dout[a:b], dlse[:, a:b].T, **own)
        for one, other, part in zip(found, wanted[:3], (slice(a, b), slice(c, d), slice(c, d))):
            np.testing.assert_allclose(host(one[part]), other, rtol=max(bound, 1e-9), atol=max(bound, 1e-9))
        if "slopes" in options:
            np.testing.assert_allclose(host(found[3][n]), wanted[4], rtol=1e-3, atol=1e-3)


def test_packed_sequences_of_odd_shapes():
    """No sequences; keys that nobody sees, and rows without keys; packed arrays; torch's own checks of the operator."""
    torch = pytest.importorskip("torch")
    from longspan.torch._groups import alone_name

    empty, none = torch.randn(0, 4, 16, requires_grad=True), torch.tensor([0], dtype=torch.int32)
    out = fa.flash_attn_varlen_func(empty, empty, empty, none, none.clone(), 0, 0)
    assert torch.autograd.grad(out.sum(), empty)[0].shape == (0, 4, 16)
    q, kv = torch.randn(6, 4, 16, requires_grad=True), torch.randn(9, 2, 2, 16)
    kv[7:] = torch.nan  # of no sequence
    kv.requires_grad_()
    rows, keys = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([0, 7, 7], dtype=torch.int32)
    out = fa.flash_attn_varlen_kvpacked_func(q, kv, rows, keys, 4, 7, causal=True)
    dq, dkv = torch.autograd.grad(out, (q, kv), torch.ones_like(out))
    assert torch.isfinite(dq).all() and not out[4:].any() and not dq[4:].any() and not dkv[7:].any()
    qkv, starts = torch.randn(9, 3, 4, 16, requires_grad=True), torch.tensor([0, 4, 9])
    out = fa.flash_attn_varlen_qkvpacked_func(qkv, starts, 5, causal=True)
    assert torch.equal(out, fa.flash_attn_varlen_func(*qkv.unbind(1), starts, starts, 5, 5, causal=True))
    pages = torch.randn(3, 4, 2, 16, requires_grad=True)
    with pytest.raises(longspan.UnsupportedError, match="block_table"):
        fa.flash_attn_varlen_func(q, pages, pages, rows, keys, 4, 7, block_table=torch.zeros(2, 2, dtype=torch.int32))
    args = q, *kv[:7].unbind(1), rows, keys.diff(), None, None, alone_name(q.device.type)
    torch.library.opcheck(torch.ops.longspan.attend_packed.default, args, dict(max_seqlen_q=4, max_seqlen_k=7, causal=True))


def test_compiled():
    """longspan.attend and the functions over it, with gradients, in one graph."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(n, 4, 16, requires_grad=True) for n in (12, 15, 15))
    rows, keys = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 8, 15], dtype=torch.int32)
    for call in (lambda q, k, v: fa.flash_attn_varlen_func(q, k, v, rows, keys, 7, 8, causal=True),
                 lambda q, k, v: fa.flash_attn_varlen_func(q, k[:12], v[:12], rows, rows, 7, 7, window_size=(3, 0)),
                 lambda q, k, v: fa.flash_attn_func(q[None], k[None], v[None], causal=True),
                 lambda q, k, v: longspan.attend(q, k, v, softcap=2.0)):
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for one, other in zip(*(torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v)) for f in (compiled, call))):
            torch.testing.assert_close(one, other)


def test_varlen_attn_of_torch():
    torch = pytest.importorskip("torch")
    from collections import namedtuple

    import longspan.torch as lt

    aux = namedtuple("AuxRequest", "lse")(True)
    q, k, v = torch.randn(10, 4, 16), torch.randn(14, 2, 16), torch.randn(14, 2, 16)
    rows, keys = torch.tensor([0, 4, 10]), torch.tensor([0, 5, 14])
    for window in ((-1, -1), (-1, 0), (3, 0), (2, 1)):
        out, lse = lt.varlen_attn(q, k, v, rows, keys, 6, 9, window_size=window, enable_gqa=True, scale=0.3, return_aux=aux)
        for a, b, c, d in ((0, 4, 0, 5), (4, 10, 5, 14)):
            right, right_lse = attention(q[a:b], k[c:d], v[c:d], window=window, scale=0.3)
            assert_close(out[a:b], right, "float32")
            np.testing.assert_allclose(host(lse[:, a:b].T), right_lse, rtol=1e-5, atol=1e-5)
    pages = [torch.cat([t, t.new_zeros(2, 2, 16)]).view(4, 4, 2, 16)[[2, 0, 3, 1]] for t in (k, v)]
    table, used = torch.tensor([[1, 3, 0]], dtype=torch.int32), torch.tensor([11], dtype=torch.int32)
    out = lt.varlen_attn(q, *pages, torch.tensor([0, 10]), None, 10, 11, window_size=(-1, 0), enable_gqa=True, seqused_k=used,
                         block_table=table)
    assert_close(out, attention(q, k[:11], v[:11], causal=True)[0], "float32")
    with pytest.raises(longspan.InputError, match="enable_gqa"):
        lt.varlen_attn(q, k, v, rows, keys, 6, 9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ring_flash_attention(torch_ranks, ranks):
    pytest.importorskip("torch")
    import torch_jobs

    torch_ranks.values(ranks, torch_jobs.ring_flash_attention)
