"""attend() on one rank against float64."""

import warnings

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import longspan
from oracle import assert_close, assert_lse_close, attention

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def numbers(rng, shape, dtype="float32"):
    return rng.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])


@st.composite
def shapes(draw):
    kv_heads = draw(st.integers(1, 3))
    keys = draw(st.integers(0, 300))
    return dict(keys=keys, tokens=draw(st.integers(0, min(keys, 40))), kv_heads=kv_heads,
                heads=kv_heads * draw(st.integers(1, 3)), dim=draw(st.integers(1, 128)),
                value_dim=draw(st.integers(1, 128)))


def strided(rng, shape, dtype, how):
    """An array of that shape with other strides."""
    if how == "dense":
        return numbers(rng, shape, dtype)
    if how == "sliced":  # part of wider rows, and every second row
        return numbers(rng, (2 * shape[0], shape[1] + 1, shape[2] + 8), dtype)[::2, 1:, 4:-4]
    return numbers(rng, (shape[1], shape[0], shape[2]), dtype).transpose(1, 0, 2)  # heads first


@hypothesis.given(shapes(), st.sampled_from(list(DTYPES)), st.data())
def test_any_shape_stride_and_type(shape, dtype, data):
    seed = data.draw(st.integers(0, 2 ** 32 - 1))
    rng = np.random.default_rng(seed)
    hows = st.sampled_from(["dense", "sliced", "heads first"])
    q = strided(rng, (shape["tokens"], shape["heads"], shape["dim"]), dtype, data.draw(hows))
    k = strided(rng, (shape["keys"], shape["kv_heads"], shape["dim"]), dtype, data.draw(hows))
    v = strided(rng, (shape["keys"], shape["kv_heads"], shape["value_dim"]), dtype, data.draw(hows))
    options = dict(causal=data.draw(st.booleans()))
    wanted = dict(options)
    if data.draw(st.booleans()):
        options["window_size"] = wanted["window"] = (data.draw(st.integers(-1, 50)),
                                                     data.draw(st.integers(-1, 50)))
    if data.draw(st.booleans()):
        options["softcap"] = wanted["softcap"] = data.draw(st.sampled_from([0.5, 5.0, 30.0]))
    if data.draw(st.booleans()):
        options["softmax_scale"] = wanted["scale"] = data.draw(st.sampled_from([0.05, 0.3]))
    if data.draw(st.booleans()):
        options["alibi_slopes"] = wanted["slopes"] = rng.uniform(
            0, 0.1, shape["heads"]).astype(np.float32)  # scores stay of order 1
    if data.draw(st.booleans()):
        options["sinks"] = wanted["sinks"] = numbers(rng, shape["heads"])
    out, lse = longspan.attend(q, k, v, return_lse=True, **options)
    right, right_lse = attention(q, k, v, **wanted)
    assert type(out) is np.ndarray and out.dtype == DTYPES[dtype]
    assert_close(out, right, dtype)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=2e-5)


@hypothesis.given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 60), st.booleans(), st.data())
def test_batches_as_flash_attention_has_them(batch, tokens, more, causal, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2 ** 32 - 1)))
    keys = tokens + more
    q = numbers(rng, (batch, tokens, 4, 32))
    k, v = numbers(rng, (2, batch, keys + 3, 2, 32))
    lengths = np.array([data.draw(st.integers(tokens, keys)) for _ in range(batch)], np.int32)
    uniform = longspan.attend(q, k[:, :keys], v[:, :keys], causal=causal)
    ragged, lse = longspan.attend(q, k, v, causal=causal, cache_seqlens=lengths, return_lse=True)
    assert uniform.shape == ragged.shape == q.shape and lse.shape == (batch, tokens, 4)
    for b in range(batch):
        assert_close(uniform[b], attention(q[b], k[b, :keys], v[b, :keys], causal=causal)[0])
        n = lengths[b]
        right, right_lse = attention(q[b], k[b, :n], v[b, :n], causal=causal)
        assert_close(ragged[b], right)
        np.testing.assert_allclose(lse[b], right_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("how", ["tokens first", "heads first", "backwards", "every second", "wide rows", "alike"])
@pytest.mark.parametrize("which", ["k", "v", "both"])
def test_any_strides_of_a_batch(rng, how, which):
    """They are read in place, or copied."""
    def strange(a):
        if how == "tokens first":
            return a.transpose(1, 0, 2, 3).copy().transpose(1, 0, 2, 3)
        if how == "heads first":
            return a.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
        if how == "backwards":
            return a[:, ::-1].copy()[:, ::-1]
        if how == "every second":
            return np.repeat(a, 2, 3)[..., ::2]
        if how == "wide rows":
            return np.repeat(a, 2, 1)[:, :-1:2]  # sequences are not a whole number of keys apart
        return np.broadcast_to(a[:1], a.shape)

    q, k, v = numbers(rng, (2, 5, 4, 32)), *numbers(rng, (2, 2, 9, 2, 32))
    if how == "alike":
        k, v = (np.stack([a[0]] * 2) for a in (k, v))
    given = [strange(a) if which in (name, "both") else a for name, a in (("k", k), ("v", v))]
    for rows in (q, strange(q) if how != "alike" else q):
        out = longspan.attend(rows, *given, causal=True)
        for b in range(2):
            assert_close(out[b], attention(q[b], k[b], v[b], causal=True)[0])


def test_values_that_are_columns_of_strange_keys(rng):
    q, k = numbers(rng, (2, 3, 4, 64)), numbers(rng, (9, 2, 1, 64)).transpose(1, 0, 2, 3)
    out = longspan.attend(q, k, k[..., :32])
    for b in range(2):
        assert_close(out[b], attention(q[b], k[b], k[b, ..., :32])[0])


def test_a_cache_that_is_written_is_never_copied(rng):
    q, k, v = numbers(rng, (3, 2, 1, 2, 32))
    cache = np.zeros((9, 2, 2, 32), np.float32).transpose(1, 0, 2, 3)
    with pytest.raises(longspan.InputError, match="make the cache dense"):
        longspan.attend(q, cache, cache.copy(), k_new=k, v_new=v, cache_seqlens=[3, 4])
    assert not cache.any()
    caches = np.zeros((2, 2, 9, 2, 32), np.float32)
    new_k, new_v = (np.repeat(a, 2, 3)[..., ::2] for a in (k, v))  # but what is appended may be
    longspan.attend(q, *caches, k_new=new_k, v_new=new_v, cache_seqlens=[3, 4])
    assert (caches[0, 0, 3] == k[0]).all() and (caches[1, 1, 4] == v[1]).all()


def test_one_of_several_ranks_that_is_given_no_comm(rng, monkeypatch):
    q, k, v = numbers(rng, (3, 5, 2, 16))
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                 "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for variables, warns in (({"RANK": "0", "WORLD_SIZE": "2"}, True), ({"RANK": "0", "WORLD_SIZE": "1"}, False),
                             ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, True),
                             ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, True), ({"WORLD_SIZE": "2"}, False)):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            longspan._communicators.forget_warning()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                longspan.attend(q, k, v, comm=longspan.alone())
                assert not warned
                for _ in range(2):
                    longspan.attend(q, k, v)
            assert len(warned) == warns, variables
            assert not warned or "several ranks" in str(warned[0].message) and warned[0].filename == __file__
    longspan._communicators.forget_warning()


def test_results_by_rows_of_a_table(rng):
    """On one rank; a table has an entry for each row of the rank."""
    q, k, v = numbers(rng, (3, 9, 2, 16))
    right = attention(q, k, v)[0]
    for table in ([3, 0, 8], [], list(range(9)), [4, -1, -1]):
        out = longspan.attend(q, k, v, results="listed", query_table=table)
        assert_close(out, right[[t for t in table if t >= 0]])
    with pytest.raises(longspan.InputError, match="query_table"):
        longspan.attend(q, k, v, results="listed", query_table=[0, 9])
    assert_close(longspan.attend(q, k, v, results="ranges", query_table=[0, 9]), right)


def test_sequences_one_after_the_other(rng):
    queries, keys = [3, 1, 7], [10, 1, 200]
    q = numbers(rng, (sum(queries), 4, 16))
    k, v = numbers(rng, (2, sum(keys), 2, 16))
    starts = np.cumsum([0, *queries]).astype(np.int32)
    for lengths in (keys, np.array(keys, np.int32)):
        out = longspan.attend(q, k, v, causal=True, cu_seqlens_q=starts, cache_seqlens=lengths)
        first = 0
        for b, n in enumerate(keys):
            own = slice(starts[b], starts[b + 1])
            assert_close(out[own], attention(q[own], k[first:first + n], v[first:first + n],
                                             causal=True)[0])
            first += n


def test_causal_for_each_sequence(rng):
    q = numbers(rng, (2, 6, 2, 16))
    k, v = numbers(rng, (2, 2, 9, 2, 16))
    for flags in ([True, False], np.array([True, False])):
        out = longspan.attend(q, k, v, causal=flags)
        for b, causal in enumerate(flags):
            assert_close(out[b], attention(q[b], k[b], v[b], causal=bool(causal))[0])


def paged(rng, lengths, page=16, kv_heads=2, dim=32, spare=2):
    """Contiguous keys and values of each sequence, and the same in pages, with a table."""
    columns = max(-(-n // page) for n in lengths) + spare
    pages = rng.permutation(len(lengths) * columns)
    table = pages.reshape(len(lengths), columns).astype(np.int32)
    caches = np.full((2, len(pages), page, kv_heads, dim), np.nan, np.float32)
    rows = [numbers(rng, (2, n, kv_heads, dim)) for n in lengths]
    for b, n in enumerate(lengths):
        for i in range(n):
            caches[:, table[b, i // page], i % page] = rows[b][:, i]
    return rows, caches, table


def test_pages(rng):
    lengths = [5, 64, 33]
    rows, caches, table = paged(rng, lengths)
    q = numbers(rng, (3, 1, 4, 32))
    out = longspan.attend(q, *caches, causal=True, cache_seqlens=lengths, block_table=table)
    for b in range(3):
        assert_close(out[b], attention(q[b], *rows[b], causal=True)[0])


def test_new_keys_are_appended(rng):
    """cache_seqlens does not count them, as in flash-attention."""
    lengths, new = [5, 64, 33], 3
    rows, caches, table = paged(rng, lengths)
    q = numbers(rng, (3, new, 4, 32))
    k_new, v_new = numbers(rng, (2, 3, new, 2, 32))
    for given in (lengths, np.array(lengths, np.int32)):
        out = longspan.attend(q, *caches, causal=True, cache_seqlens=given, block_table=table,
                              k_new=k_new, v_new=v_new)
        for b, n in enumerate(lengths):
            k, v = np.concatenate([rows[b][0], k_new[b]]), np.concatenate([rows[b][1], v_new[b]])
            assert_close(out[b], attention(q[b], k, v, causal=True)[0])
            assert (caches[0, table[b, n // 16], n % 16] == k_new[b, 0]).all()
    flat = dict(causal=True, cache_seqlens=lengths, block_table=table, cu_seqlens_q=[0, 3, 6, 9])
    again = longspan.attend(q.reshape(9, 4, 32), *caches, k_new=k_new.reshape(9, 2, 32),
                            v_new=v_new.reshape(9, 2, 32), **flat)
    assert (again.reshape(out.shape) == out).all()


def test_documents(rng):
    q, = numbers(rng, (1, 50, 2, 16))
    k, v = numbers(rng, (2, 50, 2, 16))
    for documents in ([0, 7, 31, 50], np.array([0, 7, 31, 50])):
        out = longspan.attend(q, k, v, causal=True, documents=documents)
        assert_close(out, attention(q, k, v, causal=True, documents=[0, 7, 31, 50])[0])


def test_documents_of_each_sequence(rng):
    q, = numbers(rng, (1, 3, 50, 2, 16))
    k, v = numbers(rng, (2, 3, 50, 2, 16))
    ids = np.repeat([[0, 1, 2], [5, 9, 4], [7, 7, -1]], [10, 25, 15], axis=1)
    documents = longspan.document_starts(ids)
    assert documents.tolist() == [[0, 10, 35, 50], [0, 10, 35, 50], [0, 35, 35, 35]]
    for given in (documents, documents.tolist()):
        out, lse = longspan.attend(q, k, v, causal=True, documents=given, return_lse=True)
        for b in range(3):
            right = attention(q[b], k[b], v[b], causal=True, documents=documents[b])
            assert_close(out[b], right[0])
            assert_lse_close(lse[b], right[1])
    assert (longspan.document_starts(ids[1]) == documents[1]).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("new", [1, 8, 64])
@pytest.mark.parametrize("pages", [False, True])
def test_padding(rng, causal, new, pages):
    """flash-attention's cases of cache_leftpad: padding of 0 up to all but one of a cache's keys."""
    lengths, pads, used = [64, 1, 33, 80], [5, 0, 32, 79], [new, new // 2, new, 0]
    rows, caches, table = paged(rng, lengths)
    if pages:
        given = dict(block_table=table)
    else:
        caches, given = np.full((2, 4, 90, 2, 32), np.nan, np.float32), {}
        for b, n in enumerate(lengths):
            caches[0, b, :n], caches[1, b, :n] = rows[b]
            caches[:, b, :pads[b]] = np.nan
    q, = numbers(rng, (1, 4, new, 4, 32))
    for window in (-1, -1), (20, 3):
        options = dict(causal=causal, window_size=window)
        out, lse = longspan.attend(q, *caches, cache_seqlens=lengths, cache_leftpad=pads, seqused_q=used,
                                   return_lse=True, **options, **given)
        again = longspan.attend(q, *caches, seqused_k=np.array(lengths), cache_leftpad=pads, seqused_q=used, **options, **given)
        assert (out == again).all()
        for b in range(4):
            right = attention(q[b], *rows[b], causal=causal, window=window, leftpad=pads[b], used=used[b])
            assert_close(out[b], right[0])
            assert_lse_close(lse[b], right[1])
            assert (out[b, used[b]:] == 0).all() and (lse[b, used[b]:] == -np.inf).all()


def test_new_keys_of_a_padded_cache(rng):
    pads, before = [3, 0], [20, 9]
    q, k, v = numbers(rng, (3, 2, 4, 2, 16))
    caches = numbers(rng, (2, 2, 30, 2, 16))
    full = caches.copy()
    out = longspan.attend(q, *caches, causal=True, cache_seqlens=before, cache_leftpad=pads, k_new=k, v_new=v)
    for b, n in enumerate(before):
        full[0, b, n:n + 4], full[1, b, n:n + 4] = k[b], v[b]
        assert_close(out[b], attention(q[b], full[0, b, :n + 4], full[1, b, :n + 4], causal=True, leftpad=pads[b])[0])


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_mask_of_padding(rng, side):
    q, k, v = numbers(rng, (3, 3, 40, 2, 16))
    mask = np.ones((3, 40), np.int64)
    first, end = [0, 11, 40], [40, 40, 40]
    if side != "left":
        first, end = [0, 0, 0] if side == "right" else [2, 11, 40], [40, 23, 40 if side == "both" else 0]
    for b in range(3):
        mask[b, :first[b]] = mask[b, end[b]:] = 0
    for given in (mask, mask.astype(bool), mask.tolist()):
        options = longspan.padding(given)
        assert list(options) == ["cache_leftpad" if side == "left" else "documents"]
        out = longspan.attend(q, k, v, causal=True, **options)
        for b in range(3):
            assert_close(out[b], attention(q[b], k[b], v[b], causal=True, documents=[first[b], end[b]])[0])


@pytest.mark.parametrize("fp8", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_with_scales(rng, fp8):
    dtype = getattr(ml_dtypes, fp8)
    q = numbers(rng, (4, 4, 32), "bfloat16")
    k, v = (numbers(rng, (2, 90, 2, 32)) / 0.5).astype(dtype)
    scales = np.array([0.5, 0.25], np.float32)
    out = longspan.attend(q, k, v, k_descale=scales, v_descale=0.5)
    k, v = k.astype(np.float64) * scales[:, None], v.astype(np.float64) * 0.5
    assert_close(out, attention(q, k, v)[0], "bfloat16")
    small = np.empty(q.shape, dtype)
    assert longspan.attend(q, k.astype(ml_dtypes.bfloat16), v.astype(ml_dtypes.bfloat16), out=small,
                           out_scale=[0.5]) is small
    np.testing.assert_allclose(small.astype(np.float64) * 0.5, attention(q, k, v)[0], rtol=0.3,
                               atol=0.1)


def test_results_into_given_arrays(rng):
    q, k, v = numbers(rng, (3, 9, 2, 16))
    wide = np.full((9, 2, 3, 16), np.nan, np.float32)
    out, lse = wide[:, :, 1], np.full((2, 9), np.nan, np.float32).T
    made = longspan.attend(q, k, v, out=out, lse=lse)
    assert made is out
    right, right_lse = attention(q, k, v)
    assert_close(out, right)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=2e-5)
    assert np.isnan(wide[:, :, [0, 2]]).all()
    pair = longspan.attend(q, k, v, out=out, lse=lse, return_lse=True)
    assert pair[0] is out and pair[1] is lse


def test_the_same_bits_every_time(rng):
    q, k, v = numbers(rng, (3, 200, 2, 64))
    first = longspan.attend(q, k, v, causal=True)
    assert (longspan.attend(q, k, v, causal=True) == first).all()
    assert (longspan.attend(q, k, v, causal=True, invariant=True) == first).all()


def test_plans_are_kept_and_few(rng):
    comm = longspan.alone()
    q, k, v = numbers(rng, (3, 40, 2, 16))
    for tokens in range(33, 41):  # one size, rounded up
        longspan.attend(q[:tokens], k, v, comm=comm)
    assert comm.plans == 1
    for cap in range(1, 40):
        longspan.attend(q, k, v, comm=comm, softcap=float(cap))
    assert comm.plans == 16
    for cap in (39.0, 1.0):  # kept, and made again
        assert_close(longspan.attend(q, k, v, comm=comm, softcap=cap),
                     attention(q, k, v, softcap=cap)[0])


def test_a_layer(rng):
    q = numbers(rng, (5, 4, 64))
    k, v = numbers(rng, (2, 300, 2, 64))
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=64, dtype=np.float32, causal=True,
                               max_queries=8, keys=longspan.Sharding("interleaved", 128), profile=True)
    out, lse = layer(q, k[:200], v[:200], return_lse=True)
    right, right_lse = attention(q, k[:200], v[:200], causal=True)
    assert_close(out, right)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=2e-5)
    layer.wait()
    assert layer.strategy in longspan.strategies() and layer.workspace_bytes > 0
    assert layer.phases.attend > 0 and len(layer.shard(77)) == 77 and layer.comm.size == 1

    cache_k, cache_v = np.full((2, 1, 320, 2, 64), np.nan, np.float32)
    layer.append(k[:200], v[:200], cache_k, cache_v, total_keys=200)
    layer.append(k[200:], v[200:], cache_k, cache_v, cache_seqlens=[200])
    assert_close(layer(q, cache_k, cache_v, cache_seqlens=[300]), attention(q, k, v, causal=True)[0])


@pytest.mark.parametrize("alibi", ["query", "context", "sqrt"])
def test_distances_of_slopes(rng, alibi):
    q, k, v = numbers(rng, (5, 4, 16)), numbers(rng, (40, 2, 16)), numbers(rng, (40, 2, 16))
    slopes = rng.uniform(0.1, 1, 4).astype(np.float32)
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=16, dtype="float32", causal=True, max_queries=5,
                               alibi=alibi)
    right, _ = attention(q, k, v, causal=True, slopes=slopes, alibi=alibi)
    assert_close(layer(q, k, v, alibi_slopes=slopes), right)


def test_threads_take_turns(rng):
    """A call releases the GIL while it computes; a communicator serves one thread at a time."""
    import concurrent.futures

    jobs = [(q, *numbers(rng, (2, 500, 2, 32))) for q in numbers(rng, (16, 30, 4, 32))]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda job: longspan.attend(*job, causal=True), jobs))
    for (q, k, v), out in zip(jobs, found):
        assert_close(out, attention(q, k, v, causal=True)[0])
