"""What users of flash-attention, vLLM and PyTorch pass to such a call: rows of a cache by index, new keys in other
numbers than rows, scales of each sequence, integer flags, rows at the first positions, any strides."""

import numpy as np
import pytest

import jobs
import longspan
from longspan import vllm
from oracle import assert_close, assert_lse_close, attention
from ranks import Ranks


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    made = Ranks(request.param)
    yield made
    assert made.end() == [0] * request.param


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def test_alone():
    assert jobs.users_arguments(longspan.alone(), 7, 60) == 60


def test_over_ranks(ranks):
    assert ranks.values(jobs.users_arguments, 70 + ranks.size, 25) == [25] * ranks.size


def test_rows_of_a_cache_in_every_form(rng):
    """Lists and arrays of any integers; packed rows; rows of the cache that several sequences read."""
    k, v = normal(rng, 2, 4, 50, 2, 16)
    q, lengths = normal(rng, 3, 2, 4, 16), [50, 7, 20]
    right = [attention(q[b], k[row, :n], v[row, :n], causal=True)[0] for b, (row, n) in enumerate(zip((2, 0, 2), lengths))]
    for rows in ([2, 0, 2], np.array([2, 0, 2], np.int32), np.array([2, 9, 0, 9, 2], np.int64)[::2]):
        out = longspan.attend(q, k, v, causal=True, cache_seqlens=lengths, cache_batch_idx=rows)
        assert_close(out, np.stack(right))
    packed = longspan.attend(q.reshape(6, 4, 16), k, v, causal=True, cache_seqlens=lengths, cache_batch_idx=[2, 0, 2],
                             cu_seqlens_q=[0, 2, 4, 6])
    assert (packed == out.reshape(6, 4, 16)).all()
    whole = longspan.attend(q, k, v, cache_batch_idx=[3, 1, 1])
    assert_close(whole, np.stack([attention(q[b], k[row], v[row])[0] for b, row in enumerate((3, 1, 1))]))
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=16, dtype="float32", causal=True, max_queries=6, max_batch=3)
    assert (layer(q, k, v, cache_seqlens=lengths, cache_batch_idx=[2, 0, 2]) == out).all()
    new = normal(rng, 2, 2, 1, 2, 16)
    before = k.copy()
    layer.append(*new, k, v, cache_seqlens=[3, 49], cache_batch_idx=[1, 3])
    assert (k[1, 3] == new[0, 0, 0]).all() and (k[3, 49] == new[0, 1, 0]).all()
    before[1, 3], before[3, 49] = k[1, 3], k[3, 49]
    assert (k == before).all()


def test_packed_new_keys(rng):
    """Each sequence has a number of rows and one of new keys."""
    rows, news, old = [1, 4, 0, 2], [3, 0, 2, 2], [5, 9, 0, 30]
    k, v = (np.full((4, 40, 2, 16), np.nan, np.float32) for _ in range(2))
    for cache in (k, v):
        for b, n in enumerate(old):
            cache[b, :n] = normal(rng, n, 2, 16)
    q, new_k, new_v = normal(rng, 7, 4, 16), normal(rng, 7, 2, 16), normal(rng, 7, 2, 16)
    starts, new_starts = np.cumsum([0, *rows]), np.cumsum([0, *news])
    out = longspan.attend(q, k, v, causal=True, cache_seqlens=old, cu_seqlens_q=starts, k_new=new_k, v_new=new_v,
                          cu_seqlens_k_new=new_starts)
    for b in range(4):
        whole = old[b] + news[b]
        assert (k[b, old[b]:whole] == new_k[new_starts[b]:new_starts[b + 1]]).all() and np.isnan(k[b, whole:]).all()
        assert_close(out[starts[b]:starts[b + 1]],
                     attention(q[starts[b]:starts[b + 1]], k[b, :whole], v[b, :whole], causal=True)[0])


def fp8(values):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return values.astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("paged", [False, True])
def test_scales_of_each_sequence_and_kv_head(rng, paged):
    lengths, starts = [37, 16, 50], [0, 2, 3, 8]
    k, v = (fp8(normal(rng, 3, 64, 2, 16)) for _ in range(2))
    k_scale, v_scale, q_scale = rng.uniform(0.3, 2, (3, 3, 2)).astype(np.float32)
    q = fp8(normal(rng, 8, 4, 16))

    def wanted(k_scale, v_scale):
        made = []
        for b, n in enumerate(lengths):
            rows = q[starts[b]:starts[b + 1]].astype(np.float32) * np.repeat(q_scale[b], 2)[:, None]
            made.append(attention(rows, k[b, :n].astype(np.float32) * k_scale[b][:, None],
                                  v[b, :n].astype(np.float32) * v_scale[b][:, None], causal=True))
        return np.concatenate([out for out, _ in made]), np.concatenate([lse for _, lse in made])

    out = np.full((8, 4, 16), np.nan, np.float32)
    given = dict(causal=True, cache_seqlens=lengths, cu_seqlens_q=starts, q_descale=q_scale, out=out, return_lse=True)
    args = q, k, v
    if paged:
        order = rng.permutation(12).astype(np.int32)
        args = [q, *(np.empty((12, 16, 2, 16), k.dtype) for _ in range(2))]
        args[1][order], args[2][order] = k.reshape(12, 16, 2, 16), v.reshape(12, 16, 2, 16)
        given["block_table"] = order.reshape(3, 4)
    one = np.broadcast_to(np.float32(0.5), (3, 2))
    heads = np.broadcast_to(v_scale[:, :1], (3, 2))  # one of each sequence
    for scales in ((k_scale, v_scale), (k_scale, one), (one, heads)):
        right, right_lse = wanted(*scales)
        found, lse = longspan.attend(*args, k_descale=scales[0], v_descale=scales[1], **given)
        assert_close(found, right)
        assert_lse_close(lse, right_lse)
        if paged:
            out[:] = np.nan
            vllm.unified_attention(*args, out, np.array(starts, np.int32), 5, np.array(lengths, np.int32), 64, 0.25, True,
                                   (-1, -1), given["block_table"], 0.0, q_scale, *scales)
            assert_close(out, right)


def test_new_keys_are_stored_by_the_scales_of_their_sequence(rng):
    k, v = (fp8(np.zeros((2, 20, 2, 16), np.float32)) for _ in range(2))
    new, scales = np.full((2, 3, 2, 16), 2, np.float32), np.array([[1, 2], [4, 0.5]], np.float32)
    longspan.attend(normal(rng, 2, 3, 4, 16), k, v, k_new=new, v_new=new, cache_seqlens=[4, 0], k_descale=scales,
                    v_descale=scales)
    for cache in (k, v):
        for b, at in enumerate((4, 0)):
            assert (cache[b, at:at + 3].astype(np.float32) == 2 / scales[b][:, None]).all()
            assert not cache[b, at + 3:].astype(np.float32).any()


def test_flags_of_any_integers(rng):
    q, (k, v) = normal(rng, 2, 3, 4, 16), normal(rng, 2, 2, 9, 2, 16)
    right = np.stack([attention(q[b], k[b], v[b], causal=b == 0)[0] for b in range(2)])
    table, lengths = np.arange(2, dtype=np.int32)[:, None], [9, 9]
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=16, dtype="float32", max_queries=6, max_batch=2)
    packed = q.reshape(6, 4, 16)
    for dtype in (np.int32, np.int64, np.uint8, bool):
        flags = np.array([256 if dtype is np.int32 else 1, 0]).astype(dtype)
        assert_close(longspan.attend(q, k, v, causal=flags), right)
        assert_close(layer(q, k, v, causal=flags), right)
        out = longspan.segmented_attention(packed, k, v, table, lengths, cu_seqlens_q=[0, 3, 6], causal=flags)
        assert_close(out, right.reshape(6, 4, 16))
        out[:] = np.nan
        vllm.unified_attention(packed, k, v, out, np.array([0, 3, 6], np.int32), 3, np.array(lengths, np.int32), 9, 0.25,
                               flags, (-1, -1), table, 0.0, None, None, None)
        assert_close(out, right.reshape(6, 4, 16))


def test_the_keys_of_the_cache_alone(rng):
    """As context_attention with new keys that are in the cache already."""
    cache, q, k, v = normal(rng, 2, 6, 16, 2, 16), normal(rng, 7, 4, 16), *normal(rng, 2, 7, 2, 16)
    table, starts = np.array([[3, 1], [0, 2]], np.int32), [0, 5, 7]
    for b, (old, first, n) in enumerate([(10, 0, 5), (0, 5, 2)]):
        for place in range(n):
            page, row = table[b, (old + place) // 16], (old + place) % 16
            cache[0, page, row], cache[1, page, row] = k[first + place], v[first + place]
    given = dict(cu_seqlens_q=starts, return_lse=True, sinks=normal(rng, 4))
    right, right_lse = longspan.context_attention(q, k, v, *cache, table, [10, 0], **given)
    out, lse = longspan.context_attention(q, None, None, *cache, table, [15, 2], **given)
    assert_close(out, right.astype(np.float64))
    assert_lse_close(lse, right_lse)
    half = longspan.context_attention(q, None, None, *cache, table, [15, 2], **given, out_scale_inv=[0.5])[0]
    assert_close(half, out.astype(np.float64) / 2)
    with pytest.raises(longspan.InputError, match="k is given without v"):
        longspan.context_attention(q, k, None, *cache, table, [10, 0], **given)


def strided(rng, values):
    """The same values with other strides."""
    form = rng.integers(5)
    if form == 0:  # the last dimension is not dense
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(values, -1, 0)), 0, -1)
    if form == 1:
        wide = np.full((*values.shape[:-1], 2 * values.shape[-1]), np.nan, np.float32)
        wide[..., ::2] = values
        return wide[..., ::2]
    if form == 2:
        return np.ascontiguousarray(values[..., ::-1])[..., ::-1]
    if form == 3:
        return np.ascontiguousarray(values[::-1])[::-1]
    return values


def test_arrays_of_any_strides(rng):
    for _ in range(30):
        batch, length, tokens = rng.integers(1, 4), rng.integers(1, 40), rng.integers(1, 6)
        q, k, v = (normal(rng, batch, n, h, 8) for n, h in ((tokens, 4), (length, 2), (length, 2)))
        if rng.integers(2):  # one sequence for all of the batch
            q, k, v = (np.broadcast_to(t[:1], t.shape) for t in (q, k, v))
        right = np.stack([attention(q[b], k[b], v[b])[0] for b in range(batch)])
        given = [strided(rng, t) for t in (q, k, v)]
        assert_close(longspan.attend(*given), right)
        room = np.full((batch, tokens, 8, 8), np.nan, np.float32)
        longspan.attend(*given, out=room[:, :, ::2])  # rows with gaps, which stay as they are
        assert_close(room[:, :, ::2], right)
        assert np.isnan(room[:, :, 1::2]).all()


@pytest.mark.parametrize("make", [
    lambda shape: np.broadcast_to(np.zeros((1, *shape[1:]), np.float32), shape),
    lambda shape: np.lib.stride_tricks.as_strided(np.zeros(shape[1:], np.float32), shape, (0, 256, 64, 4)),
    lambda shape: np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2],
    lambda shape: np.zeros((shape[-1], *shape[:-1]), np.float32).transpose(1, 2, 3, 0),
    lambda shape: np.zeros(shape, np.float32)[:, ::-1]])
def test_results_with_strides_that_cannot_be_written_are_refused(rng, make):
    q, k = normal(rng, 2, 3, 4, 16), normal(rng, 2, 9, 4, 16)
    out = make((2, 3, 4, 16))
    before = out.copy()
    with pytest.raises(longspan.InputError, match="out"):
        longspan.attend(q, k, k, out=out)
    assert (out == before).all()


Q, K = np.zeros((2, 3, 4, 16), np.float32), np.zeros((5, 9, 2, 16), np.float32)


@pytest.mark.parametrize("given, error, says", [
    (dict(cache_batch_idx=[0, 5]), longspan.InputError, r"cache_batch_idx\[1\] is 5; the cache has 5 rows"),
    (dict(cache_batch_idx=[-1, 0]), longspan.InputError, r"cache_batch_idx\[0\] is -1"),
    (dict(cache_batch_idx=[0, 1, 2]), longspan.InputError, r"cache_batch_idx is \[3\]; \[2\] is wanted"),
    (dict(cache_batch_idx=[[0], [1]]), longspan.InputError, r"cache_batch_idx is \[2, 1\]; \[2\] is wanted"),
    (dict(cache_batch_idx=[0.5, 1]), TypeError, "cache_batch_idx"),
    (dict(cache_batch_idx=np.zeros(2, np.float32)), longspan.InputError, "cache_batch_idx"),
    (dict(cache_batch_idx=[0, 1], block_table=np.zeros((2, 1), np.int32)), longspan.InputError,
     "cache_batch_idx and block_table"),
    (dict(cache_batch_idx=[0, 1], cache_seqlens=[10, 1]), longspan.InputError, "has 10 keys"),
    (dict(cache_batch_idx=[2, 2], cache_seqlens=[1, 1], k_new=np.zeros((2, 1, 2, 16), np.float32),
          v_new=np.zeros((2, 1, 2, 16), np.float32)), longspan.InputError, "2 for the sequences 0 and 1"),
    (dict(cache_batch_idx=[0, 1], cache_seqlens=[9, 1], k_new=np.zeros((2, 1, 2, 16), np.float32),
          v_new=np.zeros((2, 1, 2, 16), np.float32)), longspan.InputError, "has 10 keys"),
    (dict(cache_batch_idx=[0, 1], cu_seqlens_k_new=[0, 1, 2]), longspan.InputError, "cu_seqlens_k_new is given"),
    (dict(cache_batch_idx=[0, 1], cache_seqlens=[1, 1], k_new=np.zeros((3, 2, 16), np.float32),
          v_new=np.zeros((3, 2, 16), np.float32)), longspan.InputError, "cu_seqlens_k_new is wanted"),
    (dict(cache_batch_idx=[0, 1], causal_alignment="middle"), longspan.InputError,
     "causal_alignment is 'middle'; 'lower_right' and 'upper_left' are supported"),
    (dict(cache_batch_idx=[0, 1], causal_alignment=1), TypeError, "causal_alignment"),
    (dict(cache_batch_idx=[0, 1], cache_seqlens=[1, 1], k_new=np.zeros((2, 3, 2, 16), np.float32),
          v_new=np.zeros((2, 3, 2, 16), np.float32), causal_alignment="upper_left"), longspan.InputError,
     "k_new is given and"),
    (dict(cache_batch_idx=[0, 1], q_descale=np.ones((3, 2), np.float32)), longspan.InputError,
     r"q_descale is \[3, 2\]; \[1\], \[2\] or \[2, 2\] is wanted"),
    (dict(cache_batch_idx=[0, 1], q_descale=np.ones((2, 2), np.float32).T[:, ::-1]), longspan.InputError, "strides"),
    (dict(cache_batch_idx=[0, 1], k_descale=np.array([[1, 1], [1, np.nan]], np.float32)), longspan.InputError,
     r"k_descale\[1, 1\] is nan"),
])
def test_what_is_wrong_is_named(given, error, says):
    with pytest.raises(error, match=says):
        longspan.attend(Q, K.copy(), K.copy(), **given)
