"""RoPE inside the call against float64: flash-attention's and FlashInfer's arguments."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import jobs
import longspan
from oracle import assert_close, attention
from ranks import Ranks
from test_attend import DTYPES, numbers

INPUT, USAGE, UNSUPPORTED = longspan.InputError, longspan.UsageError, longspan.UnsupportedError


def angles(positions, dim, theta=10000.0, scale=1.0):
    return np.asarray(positions, np.float64)[:, None] / scale * theta ** (-np.arange(0, dim, 2) / dim)


def tables(count, dim, theta=10000.0, dtype="float32"):
    by = angles(range(count), dim, theta)
    return np.cos(by).astype(DTYPES[dtype]), np.sin(by).astype(DTYPES[dtype])


def rotated(rows, cos, sin, interleaved):
    """Rows [tokens, heads, dim] in float64; cos and sin [tokens, pairs]."""
    made = np.asarray(rows).astype(np.float64)
    cos, sin = (np.asarray(a).astype(np.float64)[:, None] for a in (cos, sin))
    dim = 2 * cos.shape[2]
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    x, y = made[..., first].copy(), made[..., second].copy()
    made[..., first], made[..., second] = x * cos - y * sin, y * cos + x * sin
    return made


def rounded(rows, dtype):
    return rows.astype(DTYPES[dtype])


# flash-attention's grid of test_flash_attn_kvcache: fraction of rotated elements, interleaved, new keys, pages.
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("new_keys", [False, True])
@pytest.mark.parametrize("page", [None, 16, 256])
@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (True, (40, -1))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_attentions_grid(rng, fraction, interleaved, new_keys, page, causal, window, dtype):
    heads, kv_heads, dim, capacity, tokens = 6, 3, 32, 512, int(rng.integers(1, 9))
    lengths = [int(n) for n in rng.integers(tokens, 400, 3)]  # new keys included
    rotary = int(fraction * dim)
    cos, sin = tables(450, rotary, dtype=dtype)
    q = numbers(rng, (3, tokens, heads, dim), dtype)
    k, v = (numbers(rng, (3, capacity, kv_heads, dim), dtype) for _ in range(2))
    k_new, v_new = (numbers(rng, (3, tokens, kv_heads, dim), dtype) for _ in range(2))
    wanted = []
    for b, n in enumerate(lengths):
        at = np.arange(n - tokens, n)
        own_q = rounded(rotated(q[b], cos[at], sin[at], interleaved), dtype)
        keys, values = k[b, :n].copy(), v[b, :n].copy()
        if new_keys:
            keys[at] = rounded(rotated(k_new[b], cos[at], sin[at], interleaved), dtype)
            values[at] = v_new[b]
        wanted.append(attention(own_q, keys, values, causal=causal, window=window)[0])
    given = dict(causal=causal, window_size=window, rotary_interleaved=interleaved and rotary > 0)
    if rotary > 0:
        given.update(rotary_cos=cos, rotary_sin=sin)
    cached = [n - tokens if new_keys else n for n in lengths]
    if new_keys:
        given.update(k_new=k_new, v_new=v_new)
    cache = k, v
    if page:
        order = rng.permutation(3 * capacity // page)
        cache = tuple(np.empty((len(order), page, kv_heads, dim), a.dtype) for a in (k, v))
        for to, a in zip(cache, (k, v)):
            to[order] = a.reshape(-1, page, kv_heads, dim)
        given["block_table"] = order.reshape(3, -1).astype(np.int32)
    before = q.copy()
    out = longspan.attend(q, *cache, cache_seqlens=np.array(cached, np.int32), **given)
    assert (q == before).all()
    for b in range(3):
        assert_close(out[b], wanted[b], dtype)


@hypothesis.given(st.integers(1, 16), st.booleans(), st.sampled_from([500.0, 1e4, 5e5]),
                  st.sampled_from([1.0, 4.0, 0.5]), st.sampled_from([7, 300, 1_000_000]), st.integers(0, 2 ** 32 - 1))
def test_base_and_scale(pairs, interleaved, theta, scale, length, seed):
    """Also far in a sequence: its last row sees seven keys, whose pages alone are there."""
    rng, page = np.random.default_rng(seed), 8
    q, k, v = numbers(rng, (1, 2, 32)), *numbers(rng, (2, 7, 2, 32))
    by = angles([length - 1], 2 * pairs, theta, scale)
    right, _ = attention(rotated(q, np.cos(by), np.sin(by), interleaved), k, v)
    first = (length - 7) // page
    pages = np.full((2, 3, page, 2, 32), np.nan, np.float32)
    for i, position in enumerate(range(length - 7, length)):
        pages[:, position // page - first, position % page] = k[i], v[i]
    table = np.full((1, length // page + 1), -1, np.int32)
    table[0, first:] = np.arange(table.shape[1] - first)
    out = longspan.attend(q, *pages, causal=True, window_size=(6, -1), cache_seqlens=[length], block_table=table,
                          rotary_dim=2 * pairs, rope_theta=theta, rope_scale=scale, rotary_interleaved=interleaved)
    assert_close(out, right)


def test_rotary_dim_follows_tables_or_the_head(rng):
    q, k, v = (numbers(rng, (9, 2, 16)) for _ in range(3))
    for given, dim in ((dict(rope_theta=100.0), 16), (dict(rope_scale=2.0), 16),
                       (dict(rope_theta=100.0, rotary_dim=6), 6)):
        by = angles(range(9), dim, given.get("rope_theta", 1e4), given.get("rope_scale", 1.0))
        assert_close(longspan.attend(q, k, v, **given), attention(rotated(q, np.cos(by), np.sin(by), False), k, v)[0])
    cos, sin = tables(9, 8)
    wide = np.concatenate([cos, sin], 1)  # vLLM's one table of both
    assert_close(longspan.attend(q, k, v, rotary_cos=wide[:, :4], rotary_sin=wide[:, 4:]),
                 attention(rotated(q, cos, sin, False), k, v)[0])
    assert_close(longspan.attend(q, k, v, rotary_cos=cos[:, ::-1], rotary_sin=sin[:, ::-1]),
                 attention(rotated(q, cos[:, ::-1], sin[:, ::-1], False), k, v)[0])


@pytest.mark.parametrize("by_tables", [False, True])
def test_a_cache_that_grows(rng, by_tables):
    """A prompt that is appended, and tokens one by one: every key once rotated."""
    q, k, v = (numbers(rng, (40, n, 16)) for n in (4, 2, 2))
    cos, sin = tables(40, 16)
    given = dict(rotary_cos=cos, rotary_sin=sin) if by_tables else {}
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=16, dtype="float32", causal=True, rotary_dim=16)
    cache = np.full((2, 1, 64, 2, 16), np.nan, np.float32)
    layer.append(k[:30], v[:30], *cache, total_keys=30, **given)
    out = np.concatenate([layer(q[i:i + 1], *cache, k_new=k[i:i + 1], v_new=v[i:i + 1], cache_seqlens=[i], **given)
                          for i in range(30, 40)])
    assert_close(cache[0, 0, :40], rotated(k, cos, sin, False))
    right, _ = attention(rotated(q, cos, sin, False), rotated(k, cos, sin, False), v, causal=True)
    assert_close(out, right[30:])


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_rotate_by_global_positions(rng, count):
    q, k, v = (numbers(rng, (60, 2, 16)) for _ in range(3))
    cos, sin = tables(60, 16)
    right, _ = attention(rotated(q, cos, sin, True), rotated(k, cos, sin, True), v, causal=True)
    turned = rotated(k, cos, sin, True).astype(np.float32)
    made = Ranks(count)
    for queries in (None, "zigzag"):
        for given in (dict(rope_theta=1e4), dict(rotary_cos=cos, rotary_sin=sin)):
            for out, _ in made.values(jobs.attend_sharded, q, turned, v, "zigzag", queries,
                                      dict(given, causal=True, rotary_interleaved=True)):
                assert_close(out, right)
    assert made.end() == [0] * count


RNG = np.random.default_rng(1)
Q, K, V = (numbers(RNG, (6, n, 16)) for n in (4, 2, 2))
COS, SIN = tables(6, 16)
REFUSED = {
    "above head_dim": (dict(rotary_dim=18), USAGE, "rotary_dim 18 with head_dim 16"),
    "odd": (dict(rotary_dim=7), USAGE, "rotary_dim 7"),
    "negative": (dict(rotary_dim=-2), INPUT, "rotary_dim is -2"),
    "short tables": (dict(rotary_cos=COS[:5], rotary_sin=SIN[:5]), INPUT, "have 5 positions and .* need 6"),
    "unequal tables": (dict(rotary_cos=COS, rotary_sin=SIN[:5]), INPUT,
                       "rotary_cos has 6 positions and rotary_sin has 5"),
    "cos alone": (dict(rotary_cos=COS), INPUT, "rotary_cos is given without rotary_sin"),
    "sin alone": (dict(rotary_sin=SIN, rotary_dim=16), INPUT, "rotary_sin is given without rotary_cos"),
    "type": (dict(rotary_cos=COS.astype(np.float64), rotary_sin=SIN), INPUT, "rotary_cos has elements of type float64"),
    "integers": (dict(rotary_cos=COS.astype(np.int32), rotary_sin=SIN), INPUT, "rotary_cos is int32"),
    "columns": (dict(rotary_cos=COS, rotary_sin=SIN, rotary_dim=8), INPUT, r"rotary_cos is .6, 8.; .positions, 4."),
    "too many columns": (dict(rotary_cos=np.tile(COS, 2), rotary_sin=np.tile(SIN, 2)), USAGE, "rotary_dim 32"),
    "one dimension": (dict(rotary_cos=COS[0], rotary_sin=SIN[0]), INPUT, r"rotary_cos is \[8\]"),
    "a list": (dict(rotary_cos=[1.0], rotary_sin=SIN), TypeError, "rotary_cos is of type 'list'"),
    "NaN": (dict(rope_theta=float("nan")), USAGE, "rope_theta is nan"),
    "infinite": (dict(rope_theta=float("inf")), USAGE, "rope_theta is inf"),
    "zero": (dict(rope_theta=0.0), USAGE, "rope_theta is 0"),
    "scale": (dict(rope_scale=-1.0), USAGE, "rope_scale is -1"),
    "interleaved alone": (dict(rotary_interleaved=True), USAGE, "rotary_dim is 0"),
    "text": (dict(rope_theta="10000"), TypeError, "rope_theta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    given, error, says = REFUSED[name]
    with pytest.raises(error, match=says):
        longspan.attend(Q, K, V, **given)
    assert_close(longspan.attend(Q, K, V, causal=True), attention(Q, K, V, causal=True)[0])


def test_values_in_the_keys_are_not_rotated():
    k = np.zeros((1, 20, 1, 16), np.float32)
    with pytest.raises(UNSUPPORTED, match="RoPE of new keys whose first columns are the values"):
        longspan.attend(Q, k, k[..., :8], k_new=Q[:, :1], cache_seqlens=[4], rotary_dim=16)


def test_tables_for_a_layer_without_rope():
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=16, dtype="float32", max_queries=6)
    with pytest.raises(INPUT, match="the layer has no RoPE"):
        layer(Q, K, V, rotary_cos=COS, rotary_sin=SIN)
