"""Sparse attention by indices: attend, layers, torch's operator, and the functions of FlashMLA, vLLM and SGLang, against
float64."""

import ml_dtypes
import numpy as np
import pytest

import longspan
import test_latent_rows
from device import tensor
from longspan import sglang, vllm
from oracle import assert_close, assert_lse_close, host

INPUT, UNSUPPORTED = longspan.InputError, longspan.UnsupportedError
DIM, VALUE = 72, 64


def attend_exactly(q, keys, values, indices, lengths=None, scale=None, sinks=None):
    """Rows of numpy float64: (out, max, lse without sinks). indices [tokens, kv_heads, columns]; an index outside of the keys
    is nobody, and one that is given twice counts twice."""
    tokens, heads, dim = q.shape
    group = heads // keys.shape[1]
    out, most, lse = np.zeros((tokens, heads, values.shape[2])), np.full((tokens, heads), -np.inf), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        for h in range(heads):
            named = indices[t, h // group if indices.shape[1] > 1 else 0]
            named = named[:None if lengths is None else max(0, lengths[t])]
            named = named[(named >= 0) & (named < len(keys))]
            if not len(named):
                continue
            scores = keys[named, h // group].astype(np.float64) @ q[t, h].astype(np.float64) * (dim ** -0.5 if scale is None else scale)
            most[t, h] = scores.max()
            weights = np.exp(scores - most[t, h])
            lse[t, h] = most[t, h] + np.log(weights.sum())
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - most[t, h]))
            out[t, h] = weights @ values[named, h // group].astype(np.float64) / total
    return out, most, lse


class Case:
    """Latent rows, of which those that nobody names are NaN, and indices that are nobody's, given twice, or of no key."""

    def __init__(self, rng, tokens=5, heads=16, keys=200, columns=33, kv_heads=1, dtype="float32"):
        self.kv = rng.standard_normal((keys, kv_heads, DIM), dtype=np.float32).astype(dtype)
        self.q = rng.standard_normal((tokens, heads, DIM), dtype=np.float32).astype(dtype)
        self.indices = rng.integers(-3, keys + 4, (tokens, kv_heads, columns), dtype=np.int32)
        self.indices[:, :, 1::4] = self.indices[:, :, ::4][..., :self.indices[:, :, 1::4].shape[2]]
        if tokens > 2:
            self.indices[1] = -1
        self.lengths = rng.integers(-1, columns + 2, tokens, dtype=np.int32)
        self.sinks = rng.standard_normal(heads, dtype=np.float32)
        for head in range(kv_heads):
            self.kv[np.setdiff1d(np.arange(keys), self.indices[:, head]), head] = np.nan

    def exactly(self, **options):
        q, kv = self.q.astype(np.float32), self.kv.astype(np.float32)
        return attend_exactly(q, kv, kv[..., :VALUE], self.indices, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads, kv_heads, columns", [(1, 1, 64), (16, 1, 33), (128, 1, 1), (8, 2, 40)])
def test_attend(rng, heads, kv_heads, columns, dtype):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    case = Case(rng, heads=heads, kv_heads=kv_heads, columns=columns, dtype=dtype)
    right, _, right_lse = case.exactly(lengths=case.lengths)
    out, lse = longspan.attend(case.q, case.kv, case.kv[..., :VALUE], indices=case.indices, topk_length=case.lengths,
                               values_in_keys=True, return_lse=True)
    assert_close(out, right, str(dtype))
    assert_lse_close(lse, right_lse)


def test_layer_and_batch(rng):
    cases = [Case(rng, tokens=3), Case(rng, tokens=3)]
    q, kv, indices = (np.stack([getattr(case, name) for case in cases]) for name in ("q", "kv", "indices"))
    layer = longspan.Attention(heads=16, kv_heads=1, head_dim=DIM, value_dim=VALUE, values_in_keys=True, dtype="float32",
                               max_queries=6, max_batch=2, top_k=40)
    out = layer(q, kv, None, indices=indices[:, :, 0])
    once = longspan.attend(q, kv, kv[..., :VALUE], indices=indices[:, :, 0])
    for b, case in enumerate(cases):
        right = case.exactly()[0]
        assert_close(out[b], right, "float32")
        assert_close(once[b], right, "float32")


def test_slots(rng):
    case = Case(rng, keys=192)
    pages = case.kv.reshape(3, 64, 1, DIM)
    out = longspan.attend(case.q, pages, pages[..., :VALUE], indices=case.indices[:, 0], index_slots=True)
    assert_close(out, case.exactly()[0], "float32")


@pytest.mark.parametrize("name", ["latent656", "latent528", "latent352"])
def test_rows_that_carry_their_scales(rng, name):
    """As a contiguous cache, whose keys indices name, and in pages, whose slots they name."""
    stored = test_latent_rows.random_rows(rng, name, 144)
    keys = test_latent_rows.numbers(name, stored)[:, None]
    q = rng.standard_normal((5, 16, keys.shape[2]), dtype=np.float32)
    indices = rng.integers(-2, 146, (5, 1, 40), dtype=np.int32)
    indices[3] = -1
    right, _, right_lse = attend_exactly(q, keys, keys[..., :512], indices)
    for cache, slots in ((stored[:, None], False), (stored.reshape(9, 16, 1, -1), True)):
        out, lse = longspan.attend(q, cache, None, kv_dtype=name, indices=indices[:, 0], index_slots=slots, return_lse=True)
        assert_close(out, right, "float32")
        assert_lse_close(lse, right_lse)
    with pytest.raises(UNSUPPORTED, match="rows whose scales lie apart in their page with indices"):
        longspan.attend(q[..., :512].copy(), np.zeros((9, 16, 1, 584), np.uint8), None, kv_dtype="latent584",
                        indices=indices[:, 0], index_slots=True)


@pytest.mark.parametrize("engine", [vllm, sglang])
@pytest.mark.parametrize("columns", [1, 128, 130])
def test_sparse_prefill(rng, engine, columns):
    case = Case(rng, tokens=7, columns=columns, keys=95)
    for options in ({}, dict(attn_sink=case.sinks, topk_length=case.lengths)):
        right, most, right_lse = case.exactly(lengths=options.get("topk_length"), sinks=options.get("attn_sink"), scale=0.1)
        out, max_logits, lse = engine.flash_mla_sparse_fwd(case.q, case.kv, case.indices, 0.1, VALUE, **options)
        assert_close(out, right, "float32")
        assert_lse_close(lse, right_lse)
        assert_lse_close(max_logits, most)


@pytest.mark.parametrize("page", [2, 61, 64, 69, 576])
def test_sparse_decode(rng, page):
    batch, tokens = 3, 2
    case = Case(rng, tokens=batch * tokens, keys=-(-300 // page) * page, columns=64)
    cache, q = case.kv.reshape(-1, page, 1, DIM), case.q.reshape(batch, tokens, 16, DIM)
    indices, lengths = case.indices.reshape(batch, tokens, 64), np.array([64, 0, 5], np.int32)
    right, _, right_lse = case.exactly(lengths=lengths.repeat(tokens), sinks=case.sinks)
    out, lse = vllm.flash_mla_with_kvcache(q, cache, None, None, VALUE, indices=indices, topk_length=lengths, attn_sink=case.sinks)
    assert_close(out.reshape(right.shape), right, "float32")
    assert_lse_close(lse.swapaxes(1, 2).reshape(right_lse.shape), right_lse)
    right, _, right_lse = case.exactly()
    out, lse = sglang.flash_mla_with_kvcache(q, cache, None, None, VALUE, indices=indices)
    assert_close(out.reshape(right.shape), right, "float32")


def test_torch(rng):
    torch = pytest.importorskip("torch")
    import longspan.torch  # noqa: F401

    case = Case(rng)
    q, kv, indices, lengths = (tensor(a) for a in (case.q, case.kv, case.indices, case.lengths))
    with torch.no_grad():
        name = longspan.torch._groups.alone_name(q.device.type)
        out = torch.ops.longspan.attend(q, kv, kv[..., :VALUE], name, indices=indices, topk_length=lengths)
        assert_close(host(out), case.exactly(lengths=case.lengths)[0], "float32")
        out, most, lse = vllm.flash_mla_sparse_fwd(q, kv, indices, DIM ** -0.5, VALUE)
        assert_close(host(out), case.exactly()[0], "float32")
        assert_lse_close(host(lse), case.exactly()[2])
    with pytest.raises(UNSUPPORTED, match="^indices is given, and the call is recorded"):
        longspan.attend(q.requires_grad_(), kv, kv[..., :VALUE], indices=indices)


C = Case(np.random.default_rng(5))
V = C.kv[..., :VALUE]
CASES = {
    "indices of floats": (lambda: longspan.attend(C.q, C.kv, V, indices=C.indices.astype(np.float32)), Exception, "indices"),
    "rows": (lambda: longspan.attend(C.q, C.kv, V, indices=C.indices[:3, 0]), INPUT, "^indices is .3, 33.; .5, columns. is wanted"),
    "kv heads": (lambda: longspan.attend(C.q, C.kv, V, indices=C.indices.repeat(2, 1)), INPUT, "^indices is .5, 2, 33."),
    "no columns": (lambda: longspan.attend(C.q, C.kv, V, indices=C.indices[:, 0, :0]), INPUT, "0 columns"),
    "lengths": (lambda: longspan.attend(C.q, C.kv, V, indices=C.indices, topk_length=C.lengths[:2]), INPUT, "^topk_length is .2."),
    "lengths alone": (lambda: longspan.attend(C.q, C.kv, V, topk_length=C.lengths), INPUT, "^topk_length is given"),
    "causal": (lambda: longspan.attend(C.q, C.kv, V, causal=True, indices=C.indices), UNSUPPORTED, "causal"),
    "slopes": (lambda: longspan.attend(C.q, C.kv, V, alibi_slopes=C.sinks, indices=C.indices), UNSUPPORTED, "ALiBi"),
    "strategy": (lambda: longspan.attend(C.q, C.kv, V, indices=C.indices, strategy="ring-kv"), UNSUPPORTED, "gather-states"),
    "width": (lambda: vllm.flash_mla_sparse_fwd(C.q, C.kv[..., :70], C.indices, 1.0, VALUE), INPUT, "^kv is"),
    "d_v": (lambda: vllm.flash_mla_sparse_fwd(C.q, C.kv, C.indices, 1.0, 73), INPUT, "^d_v is 73"),
    "sinks": (lambda: vllm.flash_mla_sparse_fwd(C.q, C.kv, C.indices, 1.0, VALUE, C.sinks[:3]), INPUT, "^attn_sink is .3."),
    "heads of indices": (lambda: sglang.flash_mla_sparse_fwd(C.q, C.kv, C.indices[:, 0], 1.0, VALUE), INPUT, "^indices is"),
}


@pytest.mark.parametrize("call, error, words", CASES.values(), ids=CASES)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
