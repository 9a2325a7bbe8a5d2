"""Dropout against NumPy in float64, with the mask of docs/guides/training.md."""

import pathlib
import re

import numpy as np
import pytest

import jobs
import longspan
from ranks import Ranks
from test_attend import numbers

INPUT, USAGE, UNSUPPORTED = longspan.InputError, longspan.UsageError, longspan.UnsupportedError
GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "guides" / "training.md"


def mask_of_the_guide():
    """kept(p, seed, offset, sequence, head, rows, keys), as the guide has it."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names = {}
    block = next(block for block in blocks if "def philox" in block)
    exec(block[:block.index("q, k, v, dout =")], names)
    return names["kept"]


kept = mask_of_the_guide()


def plain(q, k, v, dout, dlse, p, seed, offset=0, sequence=0, first_head=0, factor=np.float32):
    """(out, lse, dq, dk, dv) of causal rows at the end of their sequence, in float64."""
    q, k, v, dout, dlse = (a.astype(np.float64) for a in (q, k, v, dout, dlse))
    heads, group, scale = q.shape[1], q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    positions, keys = np.arange(len(q)) + len(k) - len(q), np.arange(len(k))
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for h in range(heads):
        of, s = h // group, scale * q[:, h] @ k[:, h // group].T
        s[keys > positions[:, None]] = -np.inf
        lse[:, h] = np.log(np.exp(s).sum(1))
        weights = np.exp(s - lse[:, h, None])
        z = kept(p, seed, offset, sequence, first_head + h, positions, keys) * float(factor(1 / (1 - p)))
        out[:, h] = z * weights @ v[:, of]
        d = (dout[:, h] * out[:, h]).sum(1) - dlse[:, h]
        dx = scale * weights * (z * (dout[:, h] @ v[:, of].T) - d[:, None])
        dq[:, h] = dx @ k[:, of]
        dk[:, of] += dx.T @ q[:, h]
        dv[:, of] += (z * weights).T @ dout[:, h]
    return out, lse, dq, dk, dv


def problem(rng, dtype="float32"):
    q, dout = (numbers(rng, (200, 4, 32)) for _ in range(2))
    k, v = (numbers(rng, (300, 2, 32)) for _ in range(2))
    return [a.astype(dtype) for a in (q, k, v, dout, numbers(rng, (200, 4)))]


def assert_close(found, wanted, tolerance):
    for a, b, name in zip(found, wanted, ("out", "lse", "dq", "dk", "dv")):
        assert np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max()), name


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("p, seed", [(0.3, [5]), (0.9, [-(2**60), 77])])
def test_against_float64(rng, dtype, tolerance, p, seed):
    q, k, v, dout, dlse = problem(rng, dtype)
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=32, dtype=dtype, causal=True, max_queries=200,
                               max_seqlen_k=300, gradients=True, dropout_p=p, dropout_first_head=8)
    out, lse = layer(q, k, v, return_lse=True, dropout_seed=seed, dropout_sequences=[3])
    back = layer.backward(dout, q, k, v, out, lse, dlse=dlse, dropout_seed=np.array(seed), dropout_sequences=[3])
    wanted = plain(q, k, v, dout, dlse, p, *seed, sequence=3, first_head=8, factor=np.dtype(dtype).type)
    assert_close((out, lse, *back), wanted, tolerance)


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.end()


@pytest.mark.parametrize("keys, queries, strategy", [
    ("zigzag", "zigzag", "ring-kv"), ("striped", "striped", "ring-q"), ("interleaved", "zigzag", "gather-kv"),
    ("zigzag", None, "scatter-states"), ("contiguous", None, "gather-states"), ("zigzag", "zigzag", "heads")])
def test_on_ranks(rng, ranks, keys, queries, strategy):
    q, k, v, dout, dlse = problem(rng)
    wanted = plain(q, k, v, dout, dlse, 0.4, 11, 12)
    for found in ranks.values(jobs.dropout_sharded, q, k, v, dout, dlse, keys, queries, strategy):
        assert_close(found, wanted, 2e-5)


def test_a_batch_whose_rows_are_dealt_out_in_parts_of_any_lengths(rng, ranks):
    """Its sequences run by themselves, with the mask that they have in the batch."""
    q, k, v = (numbers(rng, (2, 90, 2, 16)) for _ in range(3))
    wanted = longspan.attend(q, k, v, dropout_p=0.5, dropout_seed=[3], comm=longspan.alone())
    for found in ranks.values(jobs.dropout_of_parts, q, k, v):
        assert np.abs(found - wanted).max() < 1e-5


def test_seeds_that_rank_0_draws(rng, ranks):
    q, k, v, dout, dlse = problem(rng)
    drawn = ranks.values(jobs.drawn_seeds, q, k, v)
    assert all(one == drawn[0] for one in drawn)
    (seed, offset), (again, next_offset) = drawn[0]
    assert seed == again and (offset, next_offset) == (0, 1)


def test_one_call(rng):
    q, k, v, dout, dlse = problem(rng)
    out = longspan.attend(q, k, v, causal=True, dropout_p=0.3, dropout_seed=[5, 6], dropout_first_head=1)
    assert np.abs(out - plain(q, k, v, dout, dlse, 0.3, 5, 6, first_head=1)[0]).max() < 2e-5
    first, second = (longspan.attend(q, k, v, dropout_p=0.3) for _ in range(2))
    assert not np.array_equal(first, second)
    assert np.array_equal(longspan.attend(q, k, v, dropout_p=0.0), longspan.attend(q, k, v))


def layer(**options):
    return longspan.Attention(heads=4, kv_heads=2, head_dim=32, dtype="float32", max_queries=200, max_seqlen_k=300,
                              gradients=True, **dict(dict(dropout_p=0.5), **options))


def test_bad_input(rng):
    q, k, v, dout, dlse = problem(rng)
    for p in (-0.1, 1.0, 2):
        with pytest.raises(USAGE, match="dropout.p is"):
            layer(dropout_p=p)
    for p in (float("nan"), float("inf"), "half"):
        with pytest.raises((USAGE, TypeError, INPUT), match="dropout.p"):
            layer(dropout_p=p)
    with pytest.raises(INPUT, match="dropout_first_head is -1"):
        layer(dropout_first_head=-1)
    with pytest.raises(INPUT, match="dropout_seed"):
        layer()(q, k, v, dropout_seed=[1, 2, 3])
    for seed in ("1", [0.5], 0.5, np.array([1.5])):
        with pytest.raises((TypeError, INPUT), match="dropout_seed"):
            layer()(q, k, v, dropout_seed=seed)
    with pytest.raises(INPUT, match="dropout_sequences"):
        layer()(q, k, v, dropout_sequences=[1, 2])
    with pytest.raises(INPUT, match="dropout_sequences"):
        layer()(q, k, v, dropout_sequences=[-1])
    out, lse = layer()(q, k, v, return_lse=True)
    with pytest.raises(INPUT, match="backward with dropout needs the dropout_seed"):
        layer().backward(dout, q, k, v, out, lse)
    with pytest.raises(UNSUPPORTED, match="dropout of keys in pages"):
        longspan.attend(q[:4], k.reshape(1, 300, 2, 32), v.reshape(1, 300, 2, 32), block_table=np.array([[0]], np.int32),
                        cache_seqlens=[300], dropout_p=0.5)
    with pytest.raises(UNSUPPORTED, match="dropout of a run that appends"):
        longspan.attend(q[:4], k.copy(), v.copy(), k_new=k[:4], v_new=v[:4], total_keys=300, dropout_p=0.5)


@pytest.mark.parametrize("serve", [longspan.context_attention, longspan.segmented_attention])
def test_calls_of_serving_engines_have_none(serve):
    with pytest.raises(TypeError, match="dropout_p"):
        serve(dropout_p=0.5)
