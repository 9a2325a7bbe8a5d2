"""The calls of serving engines against float64."""

import ml_dtypes
import numpy as np
import pytest

import longspan
from oracle import assert_close, attention
from test_attend import numbers, paged


def parts(rng, keys=(40, 30), tokens=6, heads=4, dim=32):
    q = numbers(rng, (tokens, heads, dim))
    k, v = numbers(rng, (2, sum(keys), heads, dim))
    cuts = np.cumsum([0, *keys])
    found = [attention(q, k[a:b], v[a:b]) for a, b in zip(cuts, cuts[1:])]
    outs = [out.astype(np.float32) for out, _ in found]
    lses = [lse.astype(np.float32) for _, lse in found]
    return outs, lses, attention(q, k, v)


@pytest.mark.parametrize("base", ["e", 2])
def test_merges(rng, base):
    outs, lses, (right, right_lse) = parts(rng)
    unit = np.log(2) if base == 2 else 1
    lses, right_lse = [(lse / unit).astype(np.float32) for lse in lses], right_lse / unit

    out, lse = longspan.merge_state(outs[0], lses[0], outs[1], lses[1], base=base)
    assert_close(out, right)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=1e-5)

    again, lse = longspan.merge_attn_states(outs[0], lses[0].T.copy(), outs[1], lses[1].T.copy(),
                                            base=base)
    assert (again == out).all() and lse.shape == (4, 6)
    np.testing.assert_allclose(lse.T, right_lse, rtol=1e-5, atol=1e-5)

    again, lse = longspan.merge_states(np.stack(outs, 1), np.stack(lses, 1), base=base)
    assert_close(again, right)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", ["e", 2])
def test_merges_of_scores_of_any_size(rng, base):
    outs = rng.standard_normal((3, 2, 1, 8)).astype(np.float32)
    for large, small in ((3e38, 0.0), (0.0, -3e38), (-2.5e38, -3e38), (3.4e38, 3e38), (3e38, float("-inf"))):
        lses = np.full((3, 2, 1), small, np.float32)
        lses[1] = large
        out, lse = longspan.merge_state(outs[0], lses[0], outs[1], lses[1], base=base)
        assert (out == outs[1]).all() and (lse == np.float32(large)).all()
        out, lse = longspan.merge_states(outs.swapaxes(0, 1).copy(), lses.swapaxes(0, 1).copy(), base=base)
        assert (out == outs[1]).all() and (lse == np.float32(large)).all()


def test_merge_in_place_and_part_of_the_tokens(rng):
    outs, lses, (right, _) = parts(rng)
    kept = outs[0].copy()
    out, _ = longspan.merge_state(kept, lses[0].copy(), outs[1], lses[1], base="e", out=kept)
    assert out is kept
    assert_close(kept, right)
    out, _ = longspan.merge_attn_states(outs[0], lses[0].T.copy(), outs[1], lses[1].T.copy(), base="e",
                                        prefill_tokens_with_context=2)
    assert_close(out[:2], right[:2])
    assert (out[2:] == outs[1][2:]).all()


def test_merge_many(rng):
    outs, lses, (right, _) = parts(rng, keys=(11, 1, 50, 7, 9))
    out, _ = longspan.merge_states(np.stack(outs, 1), np.stack(lses, 1), base="e")
    assert_close(out, right)
    half = np.empty(out.shape, np.float16)
    longspan.merge_states(np.stack(outs, 1), np.stack(lses, 1), base="e", out=half)
    assert_close(half, right, "float16")


def test_merge_fp8(rng):
    outs, lses, (right, _) = parts(rng)
    small = [o.astype(ml_dtypes.float8_e4m3fn) for o in outs]
    out = np.empty(outs[0].shape, np.float32)
    longspan.merge_state(outs[0], lses[0], outs[1], lses[1], base="e", out=out)
    made = np.empty(outs[0].shape, np.float32)
    longspan.merge_attn_states(small[0], lses[0].T.copy(), small[1], lses[1].T.copy(), base="e", out=made,
                               prefix_scale=1.0, suffix_scale=[1.0])
    np.testing.assert_allclose(made, right, atol=0.1, rtol=0.1)


def test_decode_and_segments(rng):
    lengths = [90, 16, 33]
    rows, caches, table = paged(rng, lengths)
    q = numbers(rng, (4, 4, 32))
    starts, sinks = [0, 2, 3, 4], numbers(rng, 4)
    right = np.concatenate([attention(q[a:b], *rows[i], causal=True, sinks=sinks)[0]
                            for i, (a, b) in enumerate(zip(starts, starts[1:]))])
    common = dict(cu_seqlens_q=starts, sinks=sinks)
    out, lse = longspan.segmented_attention(q, *caches, table, lengths, return_lse=True, **common)
    assert_close(out, right)
    states = longspan.segmented_attention(q, *caches, table, lengths, segments=3, **common)
    assert states.output.shape == (4, 4, 3, 32) and states.max.shape == (4, 4, 3)
    again, lse_again = longspan.reduce_segments(states, lengths, cu_seqlens_q=starts, dtype="float32",
                                                return_lse=True)
    assert_close(again, right)
    np.testing.assert_allclose(lse_again, lse, rtol=1e-5, atol=1e-5)


def test_chunked_prefill(rng):
    cached, new = [90, 0, 33], [4, 7, 1]
    rows, caches, table = paged(rng, cached)
    starts = np.cumsum([0, *new])
    q = numbers(rng, (sum(new), 4, 32))
    k, v = numbers(rng, (2, sum(new), 2, 32))
    for lengths in (cached, np.array(cached, np.int32)):
        given = starts.tolist() if isinstance(lengths, list) else starts.astype(np.int32)
        out = longspan.context_attention(q, k, v, *caches, table, lengths, cu_seqlens_q=given)
        for b in range(3):
            own = slice(starts[b], starts[b + 1])
            both = [np.concatenate([old, fresh[own]]) for old, fresh in zip(rows[b], (k, v))]
            assert_close(out[own], attention(q[own], *both, causal=True)[0])


def test_append(rng):
    k_cache, v_cache = np.zeros((2, 3, 16, 2, 32), ml_dtypes.float8_e4m3fn)
    k, v = numbers(rng, (2, 3, 2, 32))
    longspan.append_kv(k, v, k_cache, v_cache, [17, -1, 0], k_descale=2.0, v_descale=[1.0, 4.0])
    assert (k_cache[1, 1] == (k[0] / 2).astype(ml_dtypes.float8_e4m3fn)).all()
    assert (v_cache[0, 0, 1] == (v[2, 1] / 4).astype(ml_dtypes.float8_e4m3fn)).all()
    assert k_cache.astype(np.float32).any(axis=(2, 3)).sum() == 2


@pytest.mark.parametrize("call, error, says", [
    (lambda a, s: longspan.merge_state(a, s, a, s), TypeError, "base"),
    (lambda a, s: longspan.merge_state(a, s, a, s, base=10), longspan.InputError, "base is 10"),
    (lambda a, s: longspan.merge_state(a, s, a, s, base=None), TypeError, "base is None"),
    (lambda a, s: longspan.merge_state(a, s[:2], a, s, base=2), longspan.InputError, "^s_a is"),
    (lambda a, s: longspan.merge_state(a, s, a, s, base=2, out=a[:1]), longspan.InputError, "out"),
    (lambda a, s: longspan.merge_state(a, s, None, s, base=2), TypeError, "^v_b is None"),
    (lambda a, s: longspan.merge_states(a, s, base=2), longspan.InputError, "v has 3"),
    (lambda a, s: longspan.append_kv(a, a, a, a, [0, 1, 2]), longspan.InputError, "v_cache"),
    (lambda a, s: longspan.append_kv(a, a, np.zeros((1, 4, 2, 16), np.float32),
                                     np.zeros((1, 4, 2, 16), np.float32), [0, 1, 9]),
     longspan.InputError, "slot"),
    (lambda a, s: longspan.segmented_attention(a, a, a, None, [3]), TypeError, "block_table is None"),
    (lambda a, s: longspan.segmented_attention(a, a, a, s, [3]), longspan.InputError, "block_table is float32"),
    (lambda a, s: longspan.segmented_attention(a, a, a, s.astype(int), [3]), longspan.InputError, "k_cache"),
    (lambda a, s: longspan.reduce_segments((a, s, s, 0, 16), [3]), longspan.InputError, "segments.output"),
    (lambda a, s: longspan.reduce_segments((a[:, :, None], s[..., None], s[..., None], 0, 2 ** 32 + 16), [3]),
     longspan.InputError, "segments.tile is 4294967312"),
])
def test_what_is_wrong_is_named(call, error, says):
    a, s = np.zeros((3, 2, 16), np.float32), np.zeros((3, 2), np.float32)
    with pytest.raises(error, match=says):
        call(a, s)
