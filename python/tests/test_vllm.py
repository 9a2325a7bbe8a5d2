"""longspan.vllm and longspan.sglang against float64, with the shapes of those projects."""

import inspect
import multiprocessing
import types

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import device
import longspan
from device import tensor
from longspan import sglang, vllm
from oracle import assert_close, attention, host
from ranks import Ranks
from test_attend import DTYPES, numbers, paged

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def merged(outs, lses, base=np.e):
    """Float64: outs [parts][tokens, heads, dim], lses [parts][tokens, heads]; empty ones are inf."""
    lses = np.stack(lses).astype(np.float64) * np.log(base)
    lses = np.where(np.isposinf(lses) | np.isnan(lses), -np.inf, lses)
    most = lses.max(0)
    weights = np.exp(lses - np.where(np.isfinite(most), most, 0))
    total = weights.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(total > 0, weights / total, 0)
        lse = np.where(total > 0, most + np.log(total), -np.inf)
    values = np.where(np.isfinite(lses)[..., None], np.stack(outs).astype(np.float64), 0)
    return (shares[..., None] * values).sum(0), lse / np.log(base)


def states(rng, tokens, heads, dim, parts=2, dtype="float32", empty=0.3):
    """Parts, some of them empty by either infinity with NaN in them; also all of them."""
    outs = [numbers(rng, (tokens, heads, dim), dtype) for _ in range(parts)]
    lses = [3 * numbers(rng, (tokens, heads)) for _ in range(parts)]
    for out, lse in zip(outs, lses):
        gone = rng.random(lse.shape) < empty
        lse[gone] = rng.choice([np.inf, -np.inf], gone.sum())
        out[gone] = np.nan
    return outs, lses


@hypothesis.given(st.integers(0, 20), st.integers(1, 5), st.sampled_from([8, 24, 32, 96]),
                  st.sampled_from(["float32", "float16", "bfloat16"]), st.booleans(),
                  st.none() | st.integers(0, 20), st.integers(0, 2 ** 32 - 1))
@hypothesis.settings(max_examples=60)
def test_merge_attn_states(tokens, heads, dim, dtype, with_lse, context, seed):
    rng = np.random.default_rng(seed)
    (a, b), (la, lb) = states(rng, tokens, heads, dim, dtype=dtype)
    right, right_lse = merged((a, b), (la, lb))
    if context is not None:  # copied as it is, also where it is empty
        right[context:], right_lse[context:] = b[context:], lb[context:]
    output = np.full(a.shape, np.nan, a.dtype)
    output_lse = np.full((heads, tokens), np.nan, np.float32) if with_lse else None
    heads_first = [np.ascontiguousarray(x.T) for x in (la, lb)]
    made = vllm.merge_attn_states(output, a, heads_first[0], b, heads_first[1], output_lse, context)
    assert made is None
    assert_close(output, right, dtype)
    if with_lse:
        np.testing.assert_allclose(output_lse, right_lse.T, rtol=1e-5, atol=1e-5)


def test_merge_in_place_and_on_views(rng):
    (a, b), (la, lb) = states(rng, 9, 4, 32)
    right, right_lse = merged((a, b), (la, lb))
    wide = np.full((9, 8, 32), np.nan, np.float32)
    vllm.merge_attn_states(wide[:, ::2], a, la.T, b, lb.T)  # lse with the strides of the other order
    assert_close(wide[:, ::2], right)
    assert np.isnan(wide[:, 1::2]).all()
    la = la.T.copy()
    vllm.merge_attn_states(a, a, la, b, lb.T.copy(), la)
    assert_close(a, right)
    np.testing.assert_allclose(la.T, right_lse, rtol=1e-5, atol=1e-5)


def test_merge_in_place_of_the_suffix(rng):
    """As vLLM's layers do: the output already holds the attention of the new tokens."""
    (a, b), (la, lb) = states(rng, 9, 4, 32)
    right, right_lse = merged((a, b), (la, lb))
    lb = lb.T.copy()
    vllm.merge_attn_states(b, a, la.T.copy(), b, lb, lb)
    assert_close(b, right)
    np.testing.assert_allclose(lb.T, right_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_merge_of_16_bit_lses(rng, dtype):
    (a, b), (la, lb) = states(rng, 9, 4, 32)
    la, lb = (x.astype(DTYPES[dtype]) for x in (la, lb))
    right, right_lse = merged((a, b), (la, lb))
    output, output_lse = np.full_like(a, np.nan), np.full((4, 9), np.nan, la.dtype)
    vllm.merge_attn_states(output, a, la.T.copy(), b, lb.T.copy(), output_lse)
    assert_close(output, right)
    np.testing.assert_allclose(output_lse.astype(np.float64), right_lse.T, rtol=8e-3, atol=8e-3)
    assert_close(sglang.merge_state(a, la, b, lb)[0], right)
    with pytest.raises(longspan.InputError, match="^output_lse is written, and it is read-only"):
        vllm.merge_attn_states(output, a, la.T, b, lb.T, np.broadcast_to(output_lse[:1], output_lse.shape))


def test_as_many_tokens_as_heads(rng):
    """Shapes do not tell the layout of an lse: vLLM's are [heads, tokens], SGLang's [tokens, heads]."""
    (a, b), (la, lb) = states(rng, 6, 6, 32)
    right = merged((a, b), (la, lb))[0]
    output = np.full_like(a, np.nan)
    vllm.merge_attn_states(output, a, la.T.copy(), b, lb.T.copy())
    assert_close(output, right)
    assert_close(sglang.merge_state(a, la, b, lb)[0], right)


def test_both_empty_is_zero():
    nothing = np.full((2, 3), -np.inf, np.float32)
    output, lse = np.ones((3, 2, 8), np.float32), np.ones((2, 3), np.float32)
    vllm.merge_attn_states(output, np.full((3, 2, 8), np.nan, np.float32), nothing,
                           np.full((3, 2, 8), 7, np.float32), -nothing, lse)
    assert (output == 0).all() and (lse == -np.inf).all()


def test_merge_into_fp8(rng):
    (a, b), (la, lb) = states(rng, 40, 4, 32, dtype="bfloat16", empty=0)
    output = np.zeros(a.shape, E4M3)
    vllm.merge_attn_states(output, a, la.T.copy(), b, lb.T.copy(), output_scale=np.array([0.05], np.float32))
    right = merged((a, b), (la, lb))[0]
    np.testing.assert_allclose(output.astype(np.float64) * 0.05, right, rtol=2 ** -4 + 1e-6, atol=1e-4)


def test_sglang_merge_state(rng):
    (a, b), (la, lb) = states(rng, 9, 4, 32)
    right, right_lse = merged((a, b), (la, lb))
    for out, lse in ((None, None), (np.empty_like(a), np.empty_like(la))):
        made = sglang.merge_state(a, la, b, lb, out, lse)
        assert out is None or (made[0] is out and made[1] is lse)
        assert_close(made[0], right)
        np.testing.assert_allclose(made[1], right_lse, rtol=1e-5, atol=1e-5)
    with pytest.raises(longspan.InputError, match="suffix_lse is .4, 9."):
        sglang.merge_state(a, la, b, lb.T.copy())
    with pytest.raises(longspan.InputError, match="output_lse is"):
        sglang.merge_state(a, la, b, lb, None, la.T.copy())
    with pytest.raises(longspan.InputError, match="^output is"):
        sglang.merge_state(a, la, b, lb, a[:5].copy())


# ---- unified_attention --------------------------------------------------------------------------

def unified(q, k, v, out, starts, lengths, table, *, scale=None, causal=True, window=(-1, -1), softcap=0.0,
            descales=(None, None, None), **more):
    starts, lengths = np.asarray(starts, np.int32), np.asarray(lengths, np.int32)
    return vllm.unified_attention(q, k, v, out, starts, int(np.diff(starts).max()), lengths, int(lengths.max()),
                                  q.shape[2] ** -0.5 if scale is None else scale, causal, window, table, softcap,
                                  *descales, **more)


LENGTHS, NEW = [90, 16, 33, 5], [3, 1, 7, 5]  # the last has no context
STARTS = np.cumsum([0, *NEW])


@pytest.mark.parametrize("options, of_oracle", [
    ({}, {}),
    ({"window": (11, 0)}, {"window": (11, 0)}),
    ({"softcap": 5.0, "scale": 0.3}, {"softcap": 5.0, "scale": 0.3}),
    ({"causal": False}, {"causal": False}),
])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unified_attention(rng, options, of_oracle, dtype):
    rows, caches, table = paged(rng, LENGTHS)
    rows, caches = [r.astype(DTYPES[dtype]) for r in rows], caches.astype(DTYPES[dtype])
    q, sinks = numbers(rng, (sum(NEW) + 3, 4, 32), dtype), numbers(rng, 4)  # padded, as for a graph
    out = np.full(q.shape, np.nan, q.dtype)
    assert unified(q, *caches, out, STARTS, LENGTHS, table, sinks=sinks, **options) is None
    assert np.isnan(out[-3:].astype(np.float32)).all()
    right = np.concatenate([attention(q[a:b], *rows[i], sinks=sinks, **{"causal": True, **of_oracle})[0]
                            for i, (a, b) in enumerate(zip(STARTS, STARTS[1:]))])
    assert_close(out[:-3], right, dtype)


def test_unified_attention_with_biases(rng):
    rows, caches, table = paged(rng, LENGTHS)
    q, slopes = numbers(rng, (sum(NEW), 4, 32)), rng.uniform(0, 0.1, 4).astype(np.float32)
    bias = numbers(rng, (8, 8))
    flags = np.array([True, False, True, False])
    out, plain, mixed = (np.full(q.shape, np.nan, np.float32) for _ in range(3))
    unified(q, *caches, out, STARTS, LENGTHS, table, alibi_slopes=slopes)
    unified(q, *caches, plain, STARTS, LENGTHS, table, qq_bias=bias)
    unified(q, *caches, mixed, STARTS, LENGTHS, table, causal=flags)
    for i, (a, b) in enumerate(zip(STARTS, STARTS[1:])):
        k, v = (x.astype(np.float64) for x in rows[i])
        context = len(k) - (b - a)
        j = np.arange(len(k))
        for h in range(4):
            score = q[a:b, h] @ k[:, h // 2].T * 32 ** -0.5
            later = j[None] > np.arange(context, len(k))[:, None]
            for made, added, seen in ((out, slopes[h] * (j - context)[None], ~later),
                                      (plain, np.pad(bias[:b - a, :b - a], ((0, 0), (context, 0))), ~later),
                                      (mixed, 0, ~later if flags[i] else np.ones_like(later))):
                weights = np.where(seen, np.exp(score + added), 0)
                right = weights / weights.sum(1, keepdims=True) @ v[:, h // 2]
                np.testing.assert_allclose(made[a:b, h], right, rtol=1e-5, atol=1e-5)


SCRATCH = dict(seq_threshold_3D=8, num_par_softmax_segments=16, softmax_segm_output=np.ones((20, 4, 16, 32)),
               softmax_segm_max=np.ones((20, 4, 16)), softmax_segm_expsum=np.ones((20, 4, 16)), use_td=True,
               chunk_lookback=1, mm_prefix_clamp_sliding_window=True, mm_prefix_range=None, rswa_prefix_lens=None,
               rswa_window=None, use_alibi_sqrt=False, k_scale_cache=None, v_scale_cache=None, kv_quant_mode=0,
               alibi_slopes=None, output_scale=None, qq_bias=None, sinks=None)


def test_unified_attention_as_vllm_calls_it(rng):
    """With all arguments, of which scratch memory and tuning change nothing."""
    _, caches, table = paged(rng, LENGTHS)
    q = numbers(rng, (sum(NEW), 4, 32))
    right, out = np.full_like(q, np.nan), np.full_like(q, np.nan)
    unified(q, *caches, right, STARTS, LENGTHS, table)
    unified(q, *caches, out, STARTS, LENGTHS, table, descales=(None, np.ones((4, 2), np.float32), 1.0), **SCRATCH)
    assert (out == right).all()


@pytest.mark.parametrize("causal", [False, True, np.array([1, 0, 0, 1], np.int32), np.array([0, 0, 1, 1], np.int64)])
@pytest.mark.parametrize("window", [(11, 0), (11, 11), (2, -1), (-1, 0), (-1, -1)])
def test_unified_attention_windows(rng, causal, window):
    """Only the left side sets the width of a window: it bounds the right side too where not causal."""
    rows, caches, table = paged(rng, LENGTHS)
    q = numbers(rng, (sum(NEW), 4, 32))
    out = np.full(q.shape, np.nan, np.float32)
    unified(q, *caches, out, STARTS, LENGTHS, table, causal=causal, window=window)
    flags = np.broadcast_to(causal, 4)
    right = np.concatenate([attention(q[a:b], *rows[i], causal=bool(flags[i]), window=(window[0], window[0]))[0]
                            for i, (a, b) in enumerate(zip(STARTS, STARTS[1:]))])
    assert_close(out, right)


@pytest.mark.parametrize("scales", ["number", "one", "expanded", "equal rows", "kv heads"])
def test_unified_attention_fp8(rng, scales):
    rows, caches, table = paged(rng, LENGTHS)
    caches = [c.astype(E4M3) for c in caches]
    q = numbers(rng, (sum(NEW), 4, 32), "bfloat16")
    number = np.array([0.5], np.float32)
    given = {"number": 0.5, "one": number, "expanded": np.broadcast_to(number, (4, 2)),
             "equal rows": np.full((4, 2), 0.5, np.float32), "kv heads": np.full(2, 0.5, np.float32)}[scales]
    out = np.full(q.shape, np.nan, q.dtype)
    unified(q, *caches, out, STARTS, LENGTHS, table, descales=(None, given, given), kv_quant_mode=1)
    right = np.concatenate([attention(q[a:b], *(0.5 * x.astype(E4M3).astype(np.float64) for x in rows[i]),
                                      causal=True)[0] for i, (a, b) in enumerate(zip(STARTS, STARTS[1:]))])
    assert_close(out, right, "bfloat16")
    small = np.zeros(q.shape, E4M3)
    unified(q, *caches, small, STARTS, LENGTHS, table, descales=(None, given, given), output_scale=0.01)
    np.testing.assert_allclose(small.astype(np.float64) * 0.01, right, rtol=0.08, atol=0.004)


def test_unified_attention_fp8_queries(rng):
    rows, caches, table = paged(rng, LENGTHS)
    caches = [c.astype(E4M3) for c in caches]
    q = numbers(rng, (sum(NEW), 4, 32)).astype(E4M3)
    out, half = np.full(q.shape, np.nan, ml_dtypes.bfloat16), np.full(q.shape, np.nan, np.float16)
    for made in (out, half):
        unified(q, *caches, made, STARTS, LENGTHS, table, descales=(0.75, 0.5, 0.25))
    right = np.concatenate([
        attention(0.75 * q[a:b].astype(np.float64), 0.5 * rows[i][0].astype(E4M3).astype(np.float64),
                  0.25 * rows[i][1].astype(E4M3).astype(np.float64), causal=True)[0]
        for i, (a, b) in enumerate(zip(STARTS, STARTS[1:]))])
    assert_close(out, right, "bfloat16")
    assert_close(half, right, "float16")


# ---- context_attention_fwd ----------------------------------------------------------------------

def packed(caches, x=8):
    """Pages [blocks, block, kv_heads, dim] as vLLM's first kernels had them."""
    k, v = caches
    blocks, block, heads, dim = k.shape
    k = k.reshape(blocks, block, heads, dim // x, x).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(k), np.ascontiguousarray(v.transpose(0, 2, 3, 1))


CACHED, MORE = [90, 0, 33], [4, 7, 1]
BEGIN = np.cumsum([0, *MORE]).astype(np.int32)


def context(rng, caches, table, q, k, v, o, kv_cache_dtype="auto", scales=(1.0, 1.0), **more):
    lengths = np.add(CACHED, MORE).astype(np.int32)
    return vllm.context_attention_fwd(q, k, v, o, kv_cache_dtype, *caches, table, BEGIN, lengths, 90, max(MORE),
                                      *scales, **more)


@pytest.mark.parametrize("options, of_oracle", [
    ({}, {}),
    ({"sliding_window": 12}, {"window": (11, -1)}),
    ({"sliding_window": 0, "sm_scale": 0.3}, {"scale": 0.3}),
    ({"alibi_slopes": np.array([0.1, 0.05, 0.02, 0.01], np.float32)}, {"slopes": [0.1, 0.05, 0.02, 0.01]}),
    ({"sinks": np.array([0.5, -1, 2, 0], np.float32)}, {"sinks": [0.5, -1, 2, 0]}),
])
def test_context_attention_fwd(rng, options, of_oracle):
    rows, caches, table = paged(rng, CACHED)
    q, (k, v) = numbers(rng, (12, 4, 32)), numbers(rng, (2, 12, 2, 32))
    o = np.full(q.shape, np.nan, np.float32)
    assert context(rng, packed(caches), table, q, k, v, o, **options) is None
    for b in range(3):
        own = slice(BEGIN[b], BEGIN[b + 1])
        both = [np.concatenate([old, new[own]]) for old, new in zip(rows[b], (k, v))]
        assert_close(o[own], attention(q[own], *both, causal=True, **of_oracle)[0])


@pytest.mark.parametrize("options, of_oracle", [
    ({}, {}),
    ({"sliding_window": 12}, {"window": (11, -1)}),
    ({"sinks": np.array([0.5, -1, 2, 0], np.float32)}, {"sinks": [0.5, -1, 2, 0]}),
    ({"alibi_slopes": np.array([0.1, 0.05, 0.02, 0.01], np.float32)}, {"slopes": [0.1, 0.05, 0.02, 0.01]}),
])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("from_cache", [False, True])
def test_context_attention_of_all_kinds(rng, options, of_oracle, causal, from_cache):
    """Causal or not, the new keys beside the cache or in it; and rows that are skipped, or past the end."""
    lengths = np.add(CACHED, MORE)
    rows, caches, table = paged(rng, lengths)
    q = numbers(rng, (14, 4, 32))
    new = [np.concatenate([rows[b][i][CACHED[b]:] for b in range(3)] + [numbers(rng, (2, 2, 32))]) for i in (0, 1)]
    for skip in (False, True):
        o = np.full(q.shape, np.nan, np.float32)
        context(rng, packed(caches), table, q, *((None, None) if from_cache else new), o, causal=causal,
                skip_decode=skip, **options)
        for b in range(3):
            own = slice(BEGIN[b], BEGIN[b + 1])
            if skip and MORE[b] == 1:
                assert np.isnan(o[own]).all()
            else:
                assert_close(o[own], attention(q[own], *rows[b], causal=causal, **of_oracle)[0])
        assert np.isnan(o[BEGIN[-1]:]).all()


def test_context_attention_of_an_fp8_cache_alone(rng):
    lengths = np.add(CACHED, MORE)
    rows, caches, table = paged(rng, lengths)
    stored = [c.view(np.uint8) for c in packed([c.astype(E4M3) for c in caches], 8)]
    q = numbers(rng, (12, 4, 32), "bfloat16")
    o = np.full(q.shape, np.nan, q.dtype)
    context(rng, stored, table, q, None, None, o, "fp8", (0.5, 2.0))
    for b in range(3):
        own = slice(BEGIN[b], BEGIN[b + 1])
        both = [x.astype(E4M3).astype(np.float64) * scale for x, scale in zip(rows[b], (0.5, 2.0))]
        assert_close(o[own], attention(q[own], *both, causal=True)[0], "bfloat16")


@pytest.mark.parametrize("name, dtype", [("fp8", E4M3), ("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2)])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_context_attention_fp8(rng, name, dtype, as_bytes):
    rows, caches, table = paged(rng, CACHED)
    stored = packed([c.astype(dtype) for c in caches], 16)
    if as_bytes:
        stored = [c.view(np.uint8) for c in stored]
    q, (k, v) = numbers(rng, (12, 4, 32), "bfloat16"), numbers(rng, (2, 12, 2, 32), "bfloat16")
    o = np.full(q.shape, np.nan, q.dtype)
    scales = np.array([0.5], np.float32), np.array(2.0, np.float32)
    context(rng, stored, table, q, k, v, o, name, scales, skip_decode=True)
    for b in range(2):
        own = slice(BEGIN[b], BEGIN[b + 1])
        both = [np.concatenate([old.astype(dtype).astype(np.float64) * s, new[own].astype(np.float64)])
                for old, new, s in zip(rows[b], (k, v), (0.5, 2.0))]
        assert_close(o[own], attention(q[own], *both, causal=True)[0], "bfloat16")
    assert np.isnan(o[11:].astype(np.float32)).all()  # a sequence of one token is skipped
    small = np.zeros(q.shape, E4M3)
    context(rng, stored, table, q, k, v, small, name, scales, fp8_out_scale=np.array([0.02], np.float32))
    np.testing.assert_allclose(small[:11].astype(np.float64) * 0.02, o[:11].astype(np.float64), rtol=0.08,
                               atol=0.01)


# ---- across ranks -------------------------------------------------------------------------------

def reduce_scatter(comm, outs, lses, base_is_e, how):
    group = comm if how == "communicator" else types.SimpleNamespace(device_group=comm)
    out, lse = vllm.cp_lse_ag_out_rs(outs[comm.rank], lses[comm.rank], group, return_lse=True,
                                     is_lse_base_on_e=base_is_e)
    alone = vllm.cp_lse_ag_out_rs(outs[comm.rank], lses[comm.rank], group, None, False, base_is_e)
    assert (np.asarray(alone) == np.asarray(out)).all()
    return out, lse, comm.plans


def of_other_names(comm, outs, lses, lengths, starts):
    given = outs[comm.rank], lses[comm.rank], comm, object(), True
    kept = lses[comm.rank].copy()
    found = [merge(*given, seq_lens=lengths[comm.rank], query_start_loc=starts)
             for merge in (vllm.cp_lse_ag_out_rs, vllm.dcp_a2a_lse_reduce, vllm.cp_lse_ag_out_ar)]
    assert lses[comm.rank].tobytes() == kept.tobytes()
    vllm.mask_dcp_empty_shards_(lses[comm.rank], lengths[comm.rank], starts)
    masked = vllm.cp_lse_ag_out_ar(outs[comm.rank], lses[comm.rank], comm)
    assert (np.asarray(masked) == np.asarray(found[2][0])).all()
    return found


def try_other_names(rng, ranks):
    """A rank without keys of a sequence counts for nothing there, whatever its lse, also of 16 bits."""
    outs, lses = states(rng, 8, 6, 32, dtype="bfloat16", empty=0)
    lses = [lse.astype(ml_dtypes.bfloat16) for lse in lses]
    starts = np.array([0, 3, 3, 5, 6], np.int32)  # one sequence has no rows, and two rows have no sequence
    lengths = [np.array([7, 0, 0, 2], np.int32), np.array([4, 5, 6, 0], np.int64)]
    seen = [lse.astype(np.float32) for lse in lses]
    seen[0][3:5] = seen[1][5] = seen[0][6:] = seen[1][6:] = -np.inf
    right, right_lse = merged(outs, seen)
    found = ranks.values(of_other_names, outs, lses, lengths, starts)
    for i in range(2):
        assert_close(np.concatenate([of_rank[i][0] for of_rank in found], 1).astype(np.float32), right, "bfloat16")
        np.testing.assert_allclose(np.concatenate([of_rank[i][1] for of_rank in found], 1), right_lse, rtol=1e-5,
                                   atol=1e-5)
    for of_rank in found:
        assert_close(of_rank[2][0].astype(np.float32), right, "bfloat16")
        np.testing.assert_allclose(of_rank[2][1], right_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_cp_lse_ag_out_rs(rng, size):
    ranks = Ranks(size)
    for dtype, base_is_e in (("float32", True), ("bfloat16", False)):
        outs, lses = states(rng, 5, 6, 32, parts=size, dtype=dtype)
        lses[0][0, 0] = np.nan
        right, right_lse = merged(outs, lses, np.e if base_is_e else 2)
        found = ranks.values(reduce_scatter, outs, lses, base_is_e, "communicator")
        assert_close(np.concatenate([out for out, _, _ in found], 1).astype(np.float32), right, dtype)
        np.testing.assert_allclose(np.concatenate([lse for _, lse, _ in found], 1), right_lse, rtol=1e-5,
                                   atol=1e-5)
    assert [plans for _, _, plans in found] == [2] * size  # one merge for each, kept
    if size == 2:
        try_other_names(rng, ranks)
    if size == 3:
        kind, error = ranks(reduce_scatter, [numbers(rng, (2, 4, 8))] * 3, [numbers(rng, (2, 4))] * 3, True,
                            "communicator")[0]
        assert isinstance(error, longspan.InputError) and "cp_attn_out has 4 heads" in str(error)
    assert ranks.end() == [0] * size


# ---- what is refused ----------------------------------------------------------------------------

A, L = np.ones((3, 4, 16), np.float32), np.zeros((4, 3), np.float32)
ONE = np.ones(1, np.int32)
_, CACHES, TABLE = paged(np.random.default_rng(0), LENGTHS)
_, OLD, OLD_TABLE = paged(np.random.default_rng(0), CACHED)
PACKED = packed(OLD)
Q = np.ones((16, 4, 32), np.float32)
NEW_Q, NEW_K = np.ones((12, 4, 32), np.float32), np.ones((12, 2, 32), np.float32)
INPUT, UNSUPPORTED = longspan.InputError, longspan.UnsupportedError


def merge(output=A, prefix_output=A, prefix_lse=L, suffix_output=A, suffix_lse=L, **more):
    return vllm.merge_attn_states(output.copy() if output is A else output, prefix_output, prefix_lse,
                                  suffix_output, suffix_lse, **more)


def attend(q=Q, k=CACHES[0], v=CACHES[1], out=Q, table=TABLE, lengths=LENGTHS, starts=STARTS, **more):
    return unified(q, k, v, out.copy() if out is Q else out, starts, lengths, table, **more)


def latent(k_descale, v_descale):
    """Values that are the first columns of fp8 keys."""
    k, out = CACHES[0].astype(E4M3), np.full((16, 4, 16), np.nan, np.float32)
    attend(k=k, v=k[..., :16], out=out, descales=(None, k_descale, v_descale))
    return out


def prefill(o=NEW_Q, caches=PACKED, table=OLD_TABLE, q=NEW_Q, k=NEW_K, v=NEW_K, **more):
    return context(None, caches, table, q, k, v, o.copy() if o is NEW_Q else o, **more)


def scatter(out=A, lse=L.T, group=None, **more):
    return vllm.cp_lse_ag_out_rs(out, lse, longspan.alone() if group is None else group, **more)


CASES = {
    "output None": (lambda: merge(output=None), TypeError, "^output is None"),
    "output a list": (lambda: merge(output=[1.0]), TypeError, "^output is of type 'list'"),
    "output's shape": (lambda: merge(output=A[:, :2].copy()), INPUT, "^prefix_lse is"),
    "output's columns": (lambda: merge(output=A[..., :8].copy()), INPUT, "^output is"),
    "output's type": (lambda: merge(output=A.astype(np.int32)), INPUT, "^output is int32; a float type"),
    "output read-only": (lambda: merge(output=np.broadcast_to(A[:1], A.shape)), INPUT, "^output"),
    "output_scale of no fp8": (lambda: merge(output_scale=1.0), INPUT, "^output_scale is given"),
    "output fp8 without": (lambda: merge(output=A.astype(E4M3)), INPUT, "no output_scale"),
    "lse tokens first": (lambda: merge(prefix_lse=L.T.copy()), INPUT, "^prefix_lse is .3, 4."),
    "suffix_lse": (lambda: merge(suffix_lse=L[:2]), INPUT, "^suffix_lse is"),
    "lse float64": (lambda: merge(suffix_lse=L.astype(np.float64)), INPUT, "^suffix_lse has"),
    "output_lse": (lambda: merge(output_lse=L.T.copy()), INPUT, "^output_lse is .3, 4."),
    "output_lse float64": (lambda: merge(output_lse=L.astype(np.float64)), INPUT, "^output_lse"),
    "suffix_output": (lambda: merge(suffix_output=A[:2]), INPUT, "^suffix_output is"),
    "context a float": (lambda: merge(prefill_tokens_with_context=1.5), TypeError, "prefill_tokens_with_context"),
    "unknown": (lambda: merge(stream=None), TypeError, "stream"),

    "out None": (lambda: attend(out=None), TypeError, "^out is None"),
    "out's shape": (lambda: attend(out=Q[:3].copy()), INPUT, "^out is"),
    "out's type": (lambda: attend(out=Q.astype(np.float16)), (INPUT, longspan.UsageError), "out is"),
    "k": (lambda: attend(k=CACHES[0][..., :16].copy()), INPUT, "^k is"),
    "k of three dimensions": (lambda: attend(k=CACHES[0][0]), INPUT, "q, k and v have"),
    "v": (lambda: attend(v=CACHES[1][:, :8].copy()), INPUT, "^v is|^k is"),
    "seqused_k": (lambda: attend(lengths=[90, 16, 33]), INPUT, "seqused_k|cu_seqlens_q"),
    "seqused_k too long": (lambda: attend(lengths=[900, 16, 33, 5]), INPUT, "900|block_table"),
    "max_seqlen_k": (lambda: vllm.unified_attention(Q, *CACHES, Q.copy(), STARTS.astype(np.int32), 7,
                                                    np.array(LENGTHS, np.int32), 33, 1.0, True, (-1, -1), TABLE,
                                                    0.0, None, None, None), INPUT, "max_seqlen_k"),
    "cu_seqlens_q": (lambda: attend(starts=[0, 3, 2, 11, 16]), INPUT, "cu_seqlens_q"),
    "block_table": (lambda: attend(table=TABLE.astype(np.float32)), INPUT, "block_table"),
    "sinks": (lambda: attend(sinks=np.ones(3, np.float32)), INPUT, "sinks is"),
    "slopes": (lambda: attend(alibi_slopes=np.ones(3, np.float32)), INPUT, "alibi_slopes is"),
    "softcap": (lambda: attend(softcap=None), TypeError, "softcap is None"),
    "q_descale": (lambda: attend(descales=(0.5, None, None)), INPUT, "q_descale is not 1"),
    "k_descale": (lambda: attend(descales=(None, np.full((1,), 0.5, np.float32), None)), INPUT, "k_descale is not 1"),
    "k_descale missing": (lambda: attend(k=CACHES[0].astype(E4M3), v=CACHES[1].astype(E4M3)), INPUT,
                          "no k_descale"),
    "k_descale of other sequences": (lambda: attend(k=CACHES[0].astype(E4M3), v=CACHES[1].astype(E4M3), descales=(
        None, np.arange(1, 7, dtype=np.float32).reshape(3, 2), 1.0)), INPUT, "^k_descale is .3, 2."),
    "two scales of one memory": (lambda: latent(0.5, 2.0), INPUT,
                                 "^k_descale is 0.5 and v_descale is 2 of kv head 0; v lies in the memory of k"),
    "output_scale": (lambda: attend(output_scale=1.0), INPUT, "^output_scale is given"),
    "by position": (lambda: vllm.unified_attention(*[None] * 17), TypeError, "positional"),
    "kv_quant_mode 2": (lambda: attend(kv_quant_mode=2), UNSUPPORTED, "kv_quant_mode is 2"),
    "kv_quant_mode 1": (lambda: attend(kv_quant_mode=1), INPUT, "kv_quant_mode is 1"),
    **{name: (lambda name=name, value=value: attend(**{name: value}), UNSUPPORTED, f"^{name} is")
       for name, value in dict(mm_prefix_range=A, rswa_prefix_lens=L, rswa_window=4, use_alibi_sqrt=True,
                               k_scale_cache=A, v_scale_cache=A).items()},
    "chunk_lookback": (lambda: attend(window=(15, 0), chunk_lookback=0), UNSUPPORTED, "^chunk_lookback is 0"),
    "window": (lambda: attend(window=(11, 3), causal=False), INPUT, r"^window_size is \(11, 3\) and causal is not"),
    "window of one side": (lambda: attend(window=(11,), causal=False), INPUT, "^window_size has 1"),

    "o None": (lambda: prefill(o=None), TypeError, "^o is None"),
    "o's shape": (lambda: prefill(o=NEW_Q[:3].copy()), INPUT, "^o is"),
    "k_cache of four dimensions": (lambda: prefill(caches=OLD), INPUT, "^k_cache is"),
    "new k": (lambda: prefill(k=NEW_K[:3]), INPUT, "^k is"),
    "b_loc": (lambda: prefill(table=OLD_TABLE.astype(np.float32)), INPUT, "b_loc"),
    "max_input_len": (lambda: vllm.context_attention_fwd(
        NEW_Q, NEW_K, NEW_K, NEW_Q.copy(), "auto", *PACKED, OLD_TABLE, BEGIN, np.array([94, 7, 34], np.int32), 90,
        4, 1.0, 1.0), INPUT, "max_input_len"),
    "b_seq_len": (lambda: vllm.context_attention_fwd(
        NEW_Q, NEW_K, NEW_K, NEW_Q.copy(), "auto", *PACKED, OLD_TABLE, BEGIN, np.array([94, 6, 34], np.int32), 90,
        7, 1.0, 1.0), INPUT, "sequence 1"),
    "k_scale": (lambda: prefill(scales=(2.0, 1.0)), INPUT, "^k_scale is not 1"),
    "kv_cache_dtype": (lambda: prefill(kv_cache_dtype="int8"), UNSUPPORTED, "kv_cache_dtype is 'int8'"),
    "kv_cache_dtype None": (lambda: prefill(kv_cache_dtype=None), TypeError, "kv_cache_dtype is of type"),
    "kv_cache_dtype fp8": (lambda: prefill(kv_cache_dtype="fp8"), INPUT, "k_cache is float32"),
    "bytes of no type": (lambda: prefill(caches=[c.astype(E4M3).view(np.uint8) for c in PACKED]), INPUT,
                         "say which fp8"),
    "fp8_out_scale": (lambda: prefill(fp8_out_scale=1.0), INPUT, "fp8_out_scale is given"),
    "sliding_window": (lambda: prefill(sliding_window=2.5), TypeError, "sliding_window is of type"),
    "sm_scale": (lambda: prefill(sm_scale="1"), TypeError, "sm_scale is of type"),
    "interleaved_v_pack_factor": (lambda: prefill(interleaved_v_pack_factor=8), UNSUPPORTED,
                                  "^interleaved_v_pack_factor is 8"),
    "causal of a prefill": (lambda: prefill(causal=1), TypeError, "^causal is of type 'int'"),
    "k alone": (lambda: prefill(v=None), INPUT, "^k is given and v is None"),
    "v alone": (lambda: prefill(k=None), INPUT, "^v is given and k is None"),
    "max_input_len of a cache alone": (lambda: vllm.context_attention_fwd(
        NEW_Q, None, None, NEW_Q.copy(), "auto", *PACKED, OLD_TABLE, BEGIN, np.array([94, 7, 34], np.int32), 90,
        4, 1.0, 1.0), INPUT, "max_input_len"),
    "another type of cache": (lambda: prefill(kv_cache_dtype="bfloat16"), INPUT,
                              "^kv_cache_dtype is 'bfloat16' and k_cache is float32"),
    "is_block_table_ptr": (lambda: prefill(is_block_table_ptr=True), UNSUPPORTED, "^is_block_table_ptr is True"),

    "seq_lens alone": (lambda: scatter(seq_lens=ONE), TypeError, "^query_start_loc is None"),
    "query_start_loc alone": (lambda: scatter(query_start_loc=ONE), TypeError, "^seq_lens is None"),
    "query_start_loc's shape": (lambda: scatter(seq_lens=ONE, query_start_loc=ONE), INPUT,
                                r"^query_start_loc is \[1\]; \[sequences . 1\] is wanted, here \[2\]"),
    "seq_lens' type": (lambda: scatter(seq_lens=np.ones(1, np.float32), query_start_loc=np.array([0, 3])), INPUT,
                       "^seq_lens is float32"),
    "query_start_loc descends": (lambda: scatter(seq_lens=ONE, query_start_loc=np.array([3, 0])), INPUT,
                                 "^query_start_loc descends"),
    "cp_group": (lambda: scatter(group=3), TypeError, "cp_group is of type 'int'"),
    "cp_attn_lse": (lambda: scatter(lse=L), INPUT, "^cp_attn_lse is .4, 3."),
    "cp_attn_out": (lambda: scatter(out=A[0]), INPUT, "^cp_attn_out is"),
    "cp_attn_out's type": (lambda: scatter(out=A.astype(np.int32)), (INPUT, longspan.UsageError), "int32|dtype"),
    "return_lse": (lambda: scatter(return_lse=1), TypeError, "return_lse is of type"),
    "base": (lambda: scatter(is_lse_base_on_e=2), TypeError, "is_lse_base_on_e is of type"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_is_named(name):
    call, error, says = CASES[name]
    with pytest.raises(error, match=says):
        call()


JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
                 st.lists(st.integers(-9, 99), max_size=4), st.just(Q), st.just(np.arange(9)), st.just({}))


def with_junk(function, arguments):
    """The function with some invalid arguments; positional arguments are in order."""
    parameters = inspect.signature(function).parameters.values()

    @hypothesis.given(st.dictionaries(st.sampled_from([p.name for p in parameters]), JUNK, min_size=1, max_size=3))
    @hypothesis.settings(max_examples=150)
    def call(junk):
        given = {**{k: v.copy() if k in ("output", "out", "o", "v", "s") else v for k, v in arguments.items()}, **junk}
        given = {k: v.copy() if v is Q else v for k, v in given.items()}
        try:
            function(**given)
        except (ValueError, TypeError, NotImplementedError):
            pass

    call()


def test_any_junk_is_an_exception():
    with_junk(vllm.merge_attn_states, dict(output=A, prefix_output=A, prefix_lse=L, suffix_output=A, suffix_lse=L))
    with_junk(vllm.unified_attention, dict(
        q=Q, k=CACHES[0], v=CACHES[1], out=Q, cu_seqlens_q=STARTS.astype(np.int32), max_seqlen_q=7,
        seqused_k=np.array(LENGTHS, np.int32), max_seqlen_k=90, softmax_scale=1.0, causal=True,
        window_size=(-1, -1), block_table=TABLE, softcap=0.0, q_descale=None, k_descale=None, v_descale=None))
    with_junk(vllm.context_attention_fwd, dict(
        q=NEW_Q, k=NEW_K, v=NEW_K, o=NEW_Q, kv_cache_dtype="auto", k_cache=PACKED[0], v_cache=PACKED[1],
        b_loc=OLD_TABLE, b_start_loc=BEGIN, b_seq_len=np.array([94, 7, 34], np.int32), max_seq_len=94,
        max_input_len=7, k_scale=1.0, v_scale=1.0))
    with_junk(vllm.cp_lse_ag_out_ar, dict(cp_attn_out=A, cp_attn_lse=L.T, cp_group=longspan.alone(),
                                          seq_lens=ONE, query_start_loc=np.array([0, 2])))
    with_junk(sglang.merge_state, dict(prefix_output=A, prefix_lse=L.T, suffix_output=A, suffix_lse=L.T))


def test_one_scale_of_one_memory():
    assert (latent(0.5, 0.5) == latent(np.array([0.5], np.float32), 0.5)).all()


def test_defaults_are_not_refused():
    prefill(is_block_table_ptr=False, sliding_window=None, scales=(np.ones(1, np.float32), None))


# ---- PyTorch ------------------------------------------------------------------------------------

def test_tensors(rng):
    torch = pytest.importorskip("torch")
    (a, b), (la, lb) = states(rng, 9, 4, 32)
    right = merged((a, b), (la, lb))[0]
    tensors = [tensor(x.copy()) for x in (a, la.T, b, lb.T)]
    output = torch.full((9, 4, 32), torch.nan)
    vllm.merge_attn_states(output, *tensors)
    assert_close(output, right)
    small = torch.zeros(9, 4, 32, dtype=torch.float8_e4m3fn)
    vllm.merge_attn_states(small, *tensors, output_scale=torch.tensor([0.05]))
    np.testing.assert_allclose(host(small) * 0.05, right, rtol=2 ** -4 + 1e-6, atol=1e-4)

    halves = [tensors[1].bfloat16(), tensors[3].bfloat16()]
    right, right_lse = merged((a, b), [host(lse).T for lse in halves])
    vllm.merge_attn_states(output, tensors[0], halves[0], tensors[2], halves[1], halves[1])  # written, too
    assert_close(output, right)
    np.testing.assert_allclose(host(halves[1]), right_lse.T, rtol=8e-3, atol=8e-3)
    masked = tensors[1].T.clone()
    vllm.mask_dcp_empty_shards_(masked, torch.tensor([0, 2]), torch.tensor([0, 1, 5]))
    assert masked[0].isneginf().all() and masked[5:].isneginf().all()
    assert torch.equal(masked[1:5], tensors[1].T[1:5])

    rows, caches, table = paged(rng, LENGTHS)
    caches = [tensor(c).to(torch.float8_e4m3fn) for c in caches]
    q = tensor(numbers(rng, (sum(NEW), 4, 32))).bfloat16()
    out = torch.full_like(q, torch.nan)
    scale = torch.tensor(0.5).expand(4, 2)  # as vLLM's layers pass them
    vllm.unified_attention(q, *caches, out, torch.tensor(STARTS, dtype=torch.int32), 7,
                           torch.tensor(LENGTHS, dtype=torch.int32), 90, 32 ** -0.5, True, (-1, -1),
                           tensor(table), 0, None, scale, scale, kv_quant_mode=1)
    right = np.concatenate([attention(q[a:b], *(0.5 * x.astype(E4M3).astype(np.float64) for x in rows[i]),
                                      causal=True)[0] for i, (a, b) in enumerate(zip(STARTS, STARTS[1:]))])
    assert_close(out, right, "bfloat16")
    flags = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    vllm.unified_attention(q, *caches, out, torch.tensor(STARTS, dtype=torch.int32), 7,
                           torch.tensor(LENGTHS, dtype=torch.int32), 90, 32 ** -0.5, flags, (11, 0),
                           tensor(table), 0, None, scale, scale)
    right = np.concatenate([attention(q[a:b], *(0.5 * x.astype(E4M3).astype(np.float64) for x in rows[i]),
                                      causal=bool(flags[i]), window=(11, 11))[0]
                            for i, (a, b) in enumerate(zip(STARTS, STARTS[1:]))])
    assert_close(out, right, "bfloat16")

    rows, caches, table = paged(rng, CACHED)
    stored = [tensor(c.view(np.uint8)) for c in packed([c.astype(E5M2) for c in caches], 16)]
    q, (k, v) = torch.randn(12, 4, 32).bfloat16(), torch.randn(2, 12, 2, 32).bfloat16()
    o = torch.full_like(q, torch.nan)
    vllm.context_attention_fwd(q, k, v, o, "fp8_e5m2", *stored, tensor(table), tensor(BEGIN),
                               torch.tensor([94, 7, 34], dtype=torch.int32), 94, 7, torch.ones(1), torch.ones(1))
    for b in range(3):
        own = slice(BEGIN[b], BEGIN[b + 1])
        both = [np.concatenate([old.astype(E5M2).astype(np.float64), host(new[own])])
                for old, new in zip(rows[b], (k, v))]
        assert_close(o[own], attention(q[own], *both, causal=True)[0], "bfloat16")
    with pytest.raises(longspan.UnsupportedError, match="^output requires grad"):
        vllm.merge_attn_states(torch.zeros(9, 4, 32, requires_grad=True), *tensors)


def of_process_group(rank, size, store, outs, lses, found):
    import torch
    import torch.distributed as dist

    device.take_device(rank)
    dist.init_process_group(device.BACKEND, init_method=f"file://{store}", rank=rank, world_size=size)
    half = dist.new_group([1, 0])
    out, lse = tensor(outs[rank]).bfloat16(), tensor(lses[rank])
    coordinator = types.SimpleNamespace(device_group=dist.group.WORLD, world_size=size, rank_in_group=rank)
    made = [vllm.cp_lse_ag_out_rs(out, lse, group, return_lse=True) for group in (coordinator, half, coordinator)]
    assert all(torch.equal(a[0], made[0][0]) for a in made)
    lengths, starts = torch.tensor([1, 0], device=out.device), torch.tensor([0, 3, 5], device=out.device)
    some = vllm.dcp_a2a_lse_reduce(out, lse, coordinator, seq_lens=lengths, query_start_loc=starts)
    assert torch.equal(some[:3], made[0][0][:3]) and (some[3:] == 0).all()
    assert longspan.torch.communicator(half).plans == longspan.torch.communicator().plans == 1
    found.put((rank, host(made[0][0]), host(made[0][1])))
    dist.destroy_process_group()


def test_cp_lse_ag_out_rs_of_process_groups(rng, tmp_path):
    pytest.importorskip("longspan.torch", exc_type=ImportError)
    if device.most_ranks() < 2:
        pytest.skip("2 GPUs are wanted")
    outs, lses = states(rng, 5, 6, 32)
    outs = [o.astype(ml_dtypes.bfloat16).astype(np.float32) for o in outs]
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    made = [context.Process(target=of_process_group, args=(r, 2, tmp_path / "store", outs, lses, found))
            for r in range(2)]
    for process in made:
        process.start()
    for process in made:
        process.join(60)
    assert [process.exitcode for process in made] == [0, 0]
    parts = sorted((found.get() for _ in made), key=lambda part: part[0])
    right, right_lse = merged(outs, lses)
    assert_close(np.concatenate([out for _, out, _ in parts], 1), right, "bfloat16")
    np.testing.assert_allclose(np.concatenate([lse for _, _, lse in parts], 1), right_lse, rtol=1e-5, atol=1e-5)
