"""Latent attention (MLA): the functions of FlashMLA, vLLM, SGLang and FlashInfer against float64, and values_in_keys."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import longspan
from device import tensor
from longspan import flashinfer, sglang, vllm
from oracle import assert_close, assert_lse_close, attention, host

E4M3 = ml_dtypes.float8_e4m3fn
INPUT, UNSUPPORTED = longspan.InputError, longspan.UnsupportedError
DIM, VALUE = 72, 64
TAIL = 2147480000  # what the entries of a table that no key needs hold


class Batch:
    """Sequences in pages of shuffled places. What no row sees is NaN."""

    def __init__(self, rng, lengths, rows, heads, kv_heads=1, page=64, dtype="float32", dim=DIM, value=VALUE):
        self.value, self.heads = value, heads
        self.lengths = np.array(lengths, np.int32)
        needed = [-(-n // page) for n in lengths]
        order = rng.permutation(sum(needed) + 2)
        self.cache = np.full((len(order), page, kv_heads, dim), np.nan, np.float32)
        self.table = np.full((len(lengths), max(needed, default=0) + 1), TAIL, np.int32)
        self.keys = []
        for b, (n, count) in enumerate(zip(lengths, needed)):
            own, order = order[:count], order[count:]
            self.table[b, :count] = own
            keys = rng.standard_normal((n, kv_heads, dim), dtype=np.float32).astype(dtype).astype(np.float32)
            self.keys.append(keys)
            for i, place in enumerate(own):
                part = keys[i * page:(i + 1) * page]
                self.cache[place, :len(part)] = part
        self.cache = self.cache.astype(dtype)
        self.q = rng.standard_normal((len(lengths), rows, heads, dim), dtype=np.float32).astype(dtype)

    def check(self, out, lse, causal, scale=None, dtype="float32"):
        """out [batch, rows, heads, value], lse [batch, rows, heads]."""
        for b, keys in enumerate(self.keys):
            right, right_lse = attention(self.q[b].astype(np.float32), keys, keys[..., :self.value], causal=causal,
                                         scale=scale)
            assert_close(out[b], right, dtype)
            assert_lse_close(lse[b], right_lse)


GRID = [([20, 140, 0, 65], 1, 16, 1), ([140], 2, 128, 1), ([4, 1, 77], 4, 9, 3), ([300, 3], 1, 63, 1), ([64, 128], 4, 64, 2),
        ([0, 0], 1, 1, 1)]


@pytest.mark.parametrize("lengths, rows, heads, kv_heads", GRID)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_mla(rng, lengths, rows, heads, kv_heads, dtype):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for causal, page in itertools.product((False, True), (64, 16)):
        batch = Batch(rng, lengths, rows, heads, kv_heads, page, dtype)
        for engine in (vllm, sglang):
            out, lse = engine.flash_mla_with_kvcache(batch.q, batch.cache, batch.table, batch.lengths, VALUE,
                                                     *engine.get_mla_metadata(), causal=causal)
            assert out.dtype == dtype and lse.shape == (len(lengths), heads, rows) and lse.flags.c_contiguous
            batch.check(out, lse.swapaxes(1, 2), causal, dtype=str(dtype))


def test_whole_width(rng):
    batch = Batch(rng, [150, 70], 2, 16, dim=576, value=512)
    out, lse = vllm.flash_mla_with_kvcache(batch.q, batch.cache, batch.table, batch.lengths, 512, softmax_scale=192 ** -0.5,
                                           causal=True)
    batch.check(out, lse.swapaxes(1, 2), True, 192 ** -0.5)


def test_fp8(rng):
    batch = Batch(rng, [150, 70], 1, 16)
    batch.q, cache = batch.q.astype(E4M3), np.nan_to_num(batch.cache).astype(E4M3)
    batch.keys = [keys.astype(E4M3).astype(np.float32) for keys in batch.keys]
    one = np.ones(1, np.float32)
    for engine, name in ((vllm, "flash_mla_with_kvcache_fp8"), (sglang, "flash_mla_with_kvcache")):
        out, lse = getattr(engine, name)(batch.q, cache, batch.table, batch.lengths, VALUE, causal=True, descale_q=one,
                                         descale_k=one)
        assert out.dtype == ml_dtypes.bfloat16
        batch.check(out, lse.swapaxes(1, 2), True, dtype="bfloat16")
    scales = np.array([0.5, 2.0], np.float32)  # of each sequence
    out, _ = vllm.flash_mla_with_kvcache_fp8(batch.q, cache, batch.table, batch.lengths, VALUE, descale_q=one, descale_k=scales)
    for b, scale in enumerate(scales):
        right, _ = attention(batch.q[b].astype(np.float32), batch.keys[b] * scale, batch.keys[b][..., :VALUE] * scale)
        assert_close(out[b], right, "bfloat16")


def test_cutlass(rng):
    batch = Batch(rng, [150, 0, 70], 1, 16)
    q, cache, scale = batch.q[:, 0], batch.cache[:, :, 0], 0.1
    parts = [q[..., :VALUE], q[..., VALUE:]]
    for nope, rope in (parts, [part.copy() for part in parts]):
        out, lse = np.full((3, 16, VALUE), np.nan, np.float32), np.full((3, 16), np.nan, np.float32)
        assert vllm.sm100_cutlass_mla_decode(out, lse, nope, rope, cache, batch.lengths, batch.table, None, scale, 8) is out
        batch.check(out[:, None], lse[:, None], False, scale)
        again = np.full_like(out, np.nan)
        vllm.sm100_cutlass_mla_decode(again, np.empty(0, np.float32), nope, rope, cache, batch.lengths, batch.table, None, scale)
        assert (again == out).all()
        assert (sglang.cutlass_mla_decode(nope, rope, cache, batch.lengths, batch.table, None, scale) == out).all()


def flat(batch):
    """A table as FlashInfer has it: (indptr, indices)."""
    page = batch.cache.shape[1]
    counts = -(-batch.lengths // page)
    indices = np.concatenate([batch.table[b, :n] for b, n in enumerate(counts)]) if len(counts) else np.zeros(0)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), indices.astype(np.int32)


def planned(batch, causal=True, scale=0.1, rows=None, **more):
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(None)
    rows = batch.q.shape[1] if rows is None else rows
    sizes = dict(num_heads=batch.heads, head_dim_ckv=VALUE, head_dim_kpe=DIM - VALUE, page_size=batch.cache.shape[1])
    wrapper.plan(np.arange(len(batch.lengths) + 1, dtype=np.int32) * rows, *flat(batch), batch.lengths, **{**sizes, **more},
                 causal=causal, sm_scale=scale, q_data_type=batch.q.dtype, kv_data_type=batch.cache.dtype)
    return wrapper


@pytest.mark.parametrize("page", [1, 64])
def test_flashinfer(rng, page):
    for causal, lengths in itertools.product((False, True), ([150, 70, 0], [5], [0])):
        batch = Batch(rng, lengths, 2, 16, page=page)
        q, cache = batch.q.reshape(-1, 16, DIM), batch.cache[:, :, 0]
        wrapper = planned(batch, causal)
        arrays = q[..., :VALUE], q[..., VALUE:].copy(), cache[..., :VALUE], cache[..., VALUE:]
        out, lse = wrapper.run(*arrays, return_lse=True)
        batch.check(out.reshape(-1, 2, 16, VALUE), lse.reshape(-1, 2, 16) / flashinfer.LOG2_E, causal, 0.1)
        to, to_lse = np.full_like(out, np.nan), np.full_like(lse, np.nan)
        found = wrapper.run(*arrays, out=to, lse=to_lse, return_lse=True, return_lse_base_on_e=True)
        assert found[0] is to and found[1] is to_lse and (to == out).all()
        np.testing.assert_allclose(to_lse * flashinfer.LOG2_E, lse, rtol=1e-6)
        assert (wrapper.run(*arrays) == out).all()


def test_tensors(rng):
    torch = pytest.importorskip("torch")
    batch = Batch(rng, [150, 70], 2, 16)
    q, cache, table, lengths = (tensor(a) for a in (batch.q, batch.cache, batch.table, batch.lengths))
    out, lse = vllm.flash_mla_with_kvcache(q, cache, table, lengths, VALUE, causal=True)
    assert lse.is_contiguous()
    batch.check(host(out), host(lse).swapaxes(1, 2), True)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1, dtype=torch.int8))
    indptr, indices = (tensor(a) for a in flat(batch))
    wrapper.plan(torch.arange(3, dtype=torch.int32, device=q.device) * 2, indptr, indices, lengths, 16, VALUE, DIM - VALUE, 64,
                 True, DIM ** -0.5, torch.float32, torch.float32)
    rows, k = q.flatten(0, 1), cache[:, :, 0]
    found = wrapper.run(rows[..., :VALUE], rows[..., VALUE:], k[..., :VALUE], k[..., VALUE:])
    torch.testing.assert_close(found.view(out.shape), out, rtol=1e-5, atol=1e-6)
    with pytest.raises(UNSUPPORTED, match="ckv_cache and kpe_cache are not the first and the last columns"):
        wrapper.run(rows[..., :VALUE], rows[..., VALUE:], k[..., :VALUE].clone(), k[..., VALUE:].clone())


def test_merges_of_latent_states(rng):
    """States of 512 columns, of two parts of the keys: vLLM's merge, SGLang's, and FlashInfer's."""
    batch = Batch(rng, [128, 64], 1, 16, dim=576, value=512)
    out, lse = vllm.flash_mla_with_kvcache(batch.q, batch.cache, batch.table, batch.lengths, 512)
    first = vllm.flash_mla_with_kvcache(batch.q, batch.cache, batch.table, np.minimum(batch.lengths, 64), 512)
    rest = vllm.flash_mla_with_kvcache(batch.q, batch.cache, batch.table[:, 1:], batch.lengths - 64, 512)
    parts = [(o[:, 0], x[:, :, 0]) for o, x in (first, rest)]
    (a, la), (b, lb) = parts
    made, made_lse = np.full_like(a, np.nan), np.full_like(la.T, np.nan)
    vllm.merge_attn_states(made, a, la.T, b, lb.T, made_lse)
    for merged, merged_lse in ((made, made_lse.T), sglang.merge_state_v2(a, la, b, lb)):
        assert_close(merged, out[:, 0])
        np.testing.assert_allclose(merged_lse, lse[:, :, 0], rtol=1e-6)
    merged, merged_lse = flashinfer.merge_state(a, la * flashinfer.LOG2_E, b, lb * flashinfer.LOG2_E)
    assert_close(merged, out[:, 0])


# ---- bad input --------------------------------------------------------------------------------

B = Batch(np.random.default_rng(0), [100, 60], 2, 16)
Q, K = B.q.reshape(-1, 16, DIM), B.cache[:, :, 0]
TWO = K[..., :VALUE], K[..., VALUE:]


def mla(q=B.q, k_cache=B.cache, block_table=B.table, cache_seqlens=B.lengths, head_dim_v=VALUE, **more):
    return vllm.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, **more)


def wrapped(ckv=TWO[0], kpe=TWO[1], nope=Q[..., :VALUE], pe=Q[..., VALUE:], plan={}, **more):
    return planned(B, **plan).run(nope, pe, ckv, kpe, **more)


def one(out=None, lse=None, nope=Q[:2, :, :VALUE], pe=Q[:2, :, VALUE:], cache=K, lengths=B.lengths, table=B.table):
    out = np.empty((2, 16, VALUE), np.float32) if out is None else out
    return vllm.sm100_cutlass_mla_decode(out, np.empty((2, 16), np.float32) if lse is None else lse, nope, pe, cache, lengths,
                                         table, None, 0.1)


CASES = {
    "q of three dimensions": (lambda: mla(q=Q), INPUT, "^q is .4, 16, 72.; .batch, tokens, heads"),
    "width of the cache": (lambda: mla(k_cache=B.cache[..., :70].copy()), INPUT, "^q is .* their last dimensions"),
    "head_dim_v": (lambda: mla(head_dim_v=73), INPUT, "^head_dim_v is 73"),
    "head_dim_v of 0": (lambda: mla(head_dim_v=0), INPUT, "^head_dim_v is 0"),
    "head_dim_v a float": (lambda: mla(head_dim_v=64.0), TypeError, "^head_dim_v is of type 'float'"),
    "heads that do not divide": (lambda: mla(k_cache=np.ones((4, 64, 3, DIM), np.float32)), INPUT, "^q has 16 heads"),
    "types": (lambda: mla(k_cache=B.cache.astype(np.float16)), INPUT, "^k_cache is float16"),
    "block_table of None": (lambda: mla(block_table=None), TypeError, "^block_table is None"),
    "block_table of other sequences": (lambda: mla(block_table=B.table[:1]), INPUT, "^block_table is .1, 3."),
    "lengths of other sequences": (lambda: mla(cache_seqlens=B.lengths[:1]), INPUT, "^cache_seqlens is .1."),
    "lengths past the table": (lambda: mla(cache_seqlens=np.array([100, 600], np.int32)), INPUT, "600"),
    "a page that is not there": (lambda: mla(cache_seqlens=np.array([100, 65], np.int32)), INPUT, str(TAIL)),
    "strides": (lambda: mla(k_cache=B.cache[:, ::-1]), INPUT, "k_cache|k is"),
    "causal": (lambda: mla(causal=1), TypeError, "^causal is of type 'int'"),
    **{name: (lambda name=name: mla(**{name: np.ones(2)}), UNSUPPORTED, f"^{name} is given")
       for name in ("attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")},
    "is_fp8_kvcache": (lambda: mla(is_fp8_kvcache=True), INPUT, "^k_cache is float32 .* and is_fp8_kvcache is True: uint8"),
    "descale of no fp8": (lambda: sglang.flash_mla_with_kvcache(B.q, B.cache, B.table, B.lengths, VALUE, descale_k=np.ones(1)),
                          INPUT, "^descale_k is given"),
    "fp8 without a descale": (lambda: vllm.flash_mla_with_kvcache_fp8(B.q.astype(E4M3), B.cache.astype(E4M3), B.table,
                                                                      B.lengths, VALUE), INPUT, "^descale_q is None"),
    "cutlass: width": (lambda: one(cache=K[..., :70]), INPUT, "^kv_c_and_k_pe_cache is"),
    "cutlass: out": (lambda: one(out=np.empty((2, 16, 60), np.float32)), INPUT, "^out is"),
    "cutlass: lse": (lambda: one(lse=np.empty((16, 2), np.float32)), INPUT, "^lse is"),
    "cutlass: page_table": (lambda: one(table=B.table[:1]), INPUT, "^page_table is"),
    "cutlass: seq_lens": (lambda: one(lengths=np.array([100, 600], np.int32)), INPUT, "600"),
    "two caches": (lambda: wrapped(TWO[0].copy(), TWO[1].copy()), UNSUPPORTED, "^ckv_cache and kpe_cache are not the first"),
    "caches in another order": (lambda: wrapped(K[..., DIM - VALUE:], K[..., :DIM - VALUE]), UNSUPPORTED, "one row of memory"),
    "caches of two types": (lambda: wrapped(kpe=TWO[1].astype(np.float16)), INPUT, "only their last dimensions"),
    "heads": (lambda: wrapped(plan=dict(num_heads=8)), INPUT, "^q_nope is"),
    "page_size": (lambda: wrapped(plan=dict(page_size=32)), INPUT, "^ckv_cache is"),
    "width": (lambda: wrapped(plan=dict(head_dim_kpe=4)), INPUT, "^q_pe is"),
    "type of the plan": (lambda: wrapped(nope=Q[..., :VALUE].astype(np.float16), pe=Q[..., VALUE:].astype(np.float16)), INPUT,
                         "^q_nope is float16, and plan"),
    "kv_len": (lambda: wrapped(kv_len=B.lengths), UNSUPPORTED, "^kv_len is given"),
    "page_table": (lambda: wrapped(page_table=B.table), UNSUPPORTED, "^page_table is given"),
    "profiler_buffer": (lambda: wrapped(profiler_buffer=Q), UNSUPPORTED, "^profiler_buffer is given"),
    "cutlass": (lambda: flashinfer.BatchMLAPagedAttentionWrapper(None, backend="cutlass"), UNSUPPORTED, "backend is 'cutlass'"),
    "graphs": (lambda: flashinfer.BatchMLAPagedAttentionWrapper(None, True), UNSUPPORTED, "^use_cuda_graph is True"),
    "no plan": (lambda: flashinfer.BatchMLAPagedAttentionWrapper(None).run(Q, Q, K, K), longspan.UsageError, "before plan"),
    "values of their own": (lambda: longspan.attend(B.q[0], K[:1, 0], K[:1, 0, :16].copy(), values_in_keys=True), INPUT, "v is|k is"),
}


@pytest.mark.parametrize("call, error, words", CASES.values(), ids=CASES)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_values_in_keys(rng):
    k, q = rng.standard_normal((130, 1, DIM), dtype=np.float32), rng.standard_normal((3, 16, DIM), dtype=np.float32)
    right, right_lse = attention(q, k, k[..., :VALUE], causal=True)
    out, lse = longspan.attend(q, k, k[..., :VALUE], causal=True, values_in_keys=True, return_lse=True)
    assert_close(out, right)
    assert_lse_close(lse, right_lse)
    layer = longspan.Attention(heads=16, kv_heads=1, head_dim=DIM, value_dim=VALUE, dtype="float32", causal=True, max_queries=3,
                               values_in_keys=True)
    assert (layer(q, k, None) == out).all() and (layer(q, k, k[..., :VALUE]) == out).all()
    cache = np.full((1, 140, 1, DIM), np.nan, np.float32)
    layer.append(k[None], None, cache, None, cache_seqlens=[0])
    assert (layer(q, cache, None, cache_seqlens=[130]) == out).all()
    with pytest.raises(INPUT, match="first 64 columns of k .values_in_keys.: leave v out"):
        layer(q, k, k[..., :VALUE].copy())
    with pytest.raises(longspan.UsageError, match="values_in_keys with head_dim 8 and value_dim 9"):
        longspan.Attention(heads=1, head_dim=8, value_dim=9, values_in_keys=True)
    with pytest.raises(UNSUPPORTED, match="values_in_keys with gradients"):
        longspan.Attention(heads=1, head_dim=8, values_in_keys=True, gradients=True, max_seqlen_k=8)
