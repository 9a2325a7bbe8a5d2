"""Latent rows that carry their scales: bytes as vLLM's and FlashMLA's quantisers write them (here once more, in NumPy), and
attention over them against float64 of the numbers as stored."""

import ml_dtypes
import numpy as np
import pytest

import longspan
from device import tensor
from longspan import sglang, vllm
from oracle import assert_close, assert_lse_close, attention, host

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
INPUT, UNSUPPORTED, USAGE = longspan.InputError, longspan.UnsupportedError, longspan.UsageError
FORMATS = {"latent656": (656, 576), "latent584": (584, 512), "latent528": (528, 512), "latent352": (352, 576)}
TAIL = 2147480000  # what the entries of a table that no key needs hold


def bytes_of(array):
    return np.ascontiguousarray(array).view(np.uint8)


def e4m3(x):
    """To the nearest, ties to even, saturating: as __nv_cvt_float_to_fp8 with __NV_SATFINITE."""
    return np.clip(x, -448, 448).astype(E4M3)


def vllm_rows(rows):
    """concat_and_cache_ds_mla_kernel of vLLM: [n, 576] bfloat16 to [n, 656] uint8."""
    x = rows.astype(np.float32)
    groups = x[:, :512].reshape(-1, 4, 128)
    scale = np.maximum(np.abs(groups).max(-1) / np.float32(448), np.finfo(np.float32).tiny).astype(np.float32)
    codes = e4m3(groups / scale[..., None]).reshape(-1, 512)
    return np.concatenate([bytes_of(codes), bytes_of(scale), bytes_of(rows[:, 512:].astype(BF16))], 1)


def power_of_two(scale):
    """_cast_scale_inv_to_ue8m0 of FlashMLA's tests/quant.py."""
    return np.power(2, np.ceil(np.log2(np.maximum(scale, np.float32(1e-4))))).astype(np.float32)


def flash_mla_rows(rows):
    """quantize_k_cache of FlashMLA, V32_FP8Sparse."""
    groups = rows.astype(np.float32)[:, :512].reshape(-1, 4, 128)
    scale = power_of_two(np.abs(groups).max(-1) / np.float32(448))
    codes = (groups / scale[..., None]).astype(E4M3).reshape(-1, 512)
    return np.concatenate([bytes_of(codes), bytes_of(scale), bytes_of(rows[:, 512:].astype(BF16))], 1)


def flash_mla_page(rows):
    """quantize_k_cache of FlashMLA, MODEL1_FP8Sparse, of one page of [page, 512]: its bytes, rounded up to 576."""
    groups = rows.astype(np.float32)[:, :448].reshape(-1, 7, 64)
    scale = power_of_two(np.abs(groups).max(-1) / np.float32(448))
    codes = (groups / scale[..., None]).astype(E4M3).reshape(-1, 448)
    page = np.zeros(-(-len(rows) * 584 // 576) * 576, np.uint8)
    page[:len(rows) * 576] = np.concatenate([bytes_of(codes), bytes_of(rows[:, 448:].astype(BF16))], 1).ravel()
    scales = page[len(rows) * 576:len(rows) * 584].reshape(-1, 8)
    scales[:, :7] = np.log2(scale).astype(int) + 127
    return page


def numbers(name, rows):
    """Rows [n, bytes] with their scales in place, as float64."""
    ue8m0 = lambda b: np.exp2(b.astype(np.float64) - 127)  # noqa: E731
    wide = lambda b, dtype: np.ascontiguousarray(b).view(dtype).astype(np.float64)  # noqa: E731
    if name == "latent656":
        codes, scale, rest = wide(rows[:, :512], E4M3), wide(rows[:, 512:528], np.float32), wide(rows[:, 528:], BF16)
    elif name == "latent584":
        codes, rest, scale = wide(rows[:, :448], E4M3), wide(rows[:, 448:576], BF16), ue8m0(rows[:, 576:583])
    elif name == "latent528":
        codes, scale, rest = wide(rows[:, :512], E4M3), ue8m0(rows[:, 512:]), np.zeros((len(rows), 0))
    else:
        table = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
        nibbles = np.stack([rows[:, :256] & 15, rows[:, :256] >> 4], -1).reshape(len(rows), 512)
        codes = table[nibbles & 7] * np.where(nibbles & 8, -1, 1)
        stored = wide(rows[:, 320:], E4M3)
        scale, rest = stored[:, [8 * (g % 4) + g // 4 for g in range(32)]], wide(rows[:, 256:320], E4M3)
    return np.concatenate([codes * np.repeat(scale, codes.shape[1] // scale.shape[1], 1), rest], 1)


def random_rows(rng, name, n):
    """Any bytes of a format but NaN, numbers of order 1."""
    rows = rng.integers(0, 256, (n, FORMATS[name][0]), dtype=np.uint8)
    coded = {"latent584": 448, "latent352": 256}.get(name, 512)
    if name != "latent352":
        codes = rows[:, :coded]
        codes[(codes & 0x7f) > 0x50] = 0x38  # at most 8
    if name == "latent656":
        rows[:, 512:528] = bytes_of(rng.uniform(.1, .4, (n, 4)).astype(np.float32))
        rows[:, 528:] = bytes_of(rng.standard_normal((n, 64)).astype(BF16))
    elif name == "latent584":
        rows[:, 448:576] = bytes_of(rng.standard_normal((n, 64)).astype(BF16))
        rows[:, 576:] = rng.integers(123, 126, (n, 8))
    elif name == "latent528":
        rows[:, 512:] = rng.integers(123, 126, (n, 16))
    else:
        rows[:, 256:320] = bytes_of(rng.standard_normal((n, 64)).astype(E4M3))
        rows[:, 320:] = bytes_of(rng.uniform(.1, .5, (n, 32)).astype(E4M3))
    return rows


class Batch:
    """Sequences of such rows in pages of shuffled places; everything else is NaN. [pages, page, 1, bytes]."""

    def __init__(self, rng, name, lengths, rows, heads, page=64, dtype=BF16):
        width, dim = FORMATS[name]
        self.name, self.lengths = name, np.array(lengths, np.int32)
        needed = [-(-n // page) for n in lengths]
        order = rng.permutation(sum(needed) + 2)
        stride = -(-page * width // 576) * 576 if name == "latent584" else page * width
        memory = np.full((len(order), stride), 0xff, np.uint8)
        self.cache = memory[:, :page * width].reshape(-1, page, 1, width) if stride == page * width else \
            np.lib.stride_tricks.as_strided(memory, (len(order), page, 1, width), (stride, width, width, 1))
        self.table = np.full((len(lengths), max(needed, default=0) + 1), TAIL, np.int32)
        self.keys = []
        for b, (n, count) in enumerate(zip(lengths, needed)):
            own, order = order[:count], order[count:]
            self.table[b, :count] = own
            stored = random_rows(rng, name, n)
            self.keys.append(numbers(name, stored))
            for i, row in enumerate(stored):
                at = memory[own[i // page]]
                if name == "latent584":
                    at[i % page * 576:][:576] = row[:576]
                    at[page * 576 + i % page * 8:][:8] = row[576:]
                else:
                    at[i % page * width:][:width] = row
        self.q = rng.standard_normal((len(lengths), rows, heads, dim), dtype=np.float32).astype(dtype)

    def check(self, out, lse, causal, scale=None):
        dtype = "bfloat16" if self.q.dtype == BF16 else "float32"
        for b, keys in enumerate(self.keys):
            right, right_lse = attention(self.q[b].astype(np.float32), keys[:, None], keys[:, None, :512], causal=causal,
                                         scale=scale)
            assert_close(out[b], right, dtype)
            assert_lse_close(lse[b], right_lse)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", BF16])
def test_attend(rng, name, dtype):
    for rows, heads, page in ((1, 16, 64), (2, 3, 61), (5, 1, 2)):
        batch = Batch(rng, name, [70, 0, 33], rows, heads, page, dtype)
        for causal in (False, True):
            out, lse = longspan.attend(batch.q, batch.cache, None, kv_dtype=name, block_table=batch.table, causal=causal,
                                       cache_seqlens=batch.lengths, return_lse=True)
            assert out.dtype == batch.q.dtype and out.shape[-1] == 512
            batch.check(out, lse, causal)


@pytest.mark.parametrize("name", FORMATS)
def test_flash_mla(rng, name):
    batch = Batch(rng, name, [70, 33, 0], 2, 16)
    for engine in (vllm, sglang):
        for cache in (batch.cache, batch.cache.view(E4M3)):
            out, lse = engine.flash_mla_with_kvcache(batch.q, cache, batch.table, batch.lengths, 512,
                                                     *engine.get_mla_metadata(), softmax_scale=.04, causal=True,
                                                     is_fp8_kvcache=True)
            batch.check(out, lse.swapaxes(1, 2), True, .04)


def fresh_rows(rng, n, dim):
    """New rows of bfloat16, some with zeros, extreme sizes, and scales that are powers of two."""
    rows = rng.standard_normal((n, dim), dtype=np.float32)
    rows[1], rows[2, :200] = 0, 1e30
    rows[3, :128], rows[3, 5] = 1, 448
    rows[4] *= 1e-30
    rows[5, :256] *= 1e-3
    return rows.astype(BF16)


@pytest.mark.parametrize("name, quantiser", [("latent656", vllm_rows), ("latent656_pow2", flash_mla_rows)])
def test_append_as_the_peers_quantise(rng, name, quantiser):
    n, page = 70, 16
    rows = fresh_rows(rng, n, 576)
    right = quantiser(rows)
    layer = longspan.Attention(heads=2, kv_heads=1, head_dim=576, value_dim=512, values_in_keys=True, kv_dtype=name,
                               max_queries=n, max_seqlen_k=n)
    cache = np.full((n, 1, 656), 7, np.uint8)
    layer.append(rows[:, None], None, cache, None, total_keys=n)
    np.testing.assert_array_equal(cache[:, 0], right)
    slots = rng.permutation(6 * page)[:n].astype(np.int64)
    slots[10] = -1
    pages = np.full((6, page, 1, 656), 7, np.uint8)
    wanted = pages.reshape(-1, 656).copy()
    kept = slots >= 0
    wanted[slots[kept]] = right[kept]
    longspan.append_kv(rows[:, None], None, pages, None, slots, kv_dtype=name)
    np.testing.assert_array_equal(pages.reshape(-1, 656), wanted)
    if name == "latent656":
        again = np.full((6, page, 656), 7, np.uint8)
        vllm.concat_and_cache_mla(rows[:, :512], rows[:, 512:].copy(), again, slots, "fp8_ds_mla")
        np.testing.assert_array_equal(again.reshape(-1, 656), wanted)


def test_append_to_pages_of_v4(rng):
    page, pages = 13, 3
    rows = fresh_rows(rng, page * pages, 512)
    right = np.stack([flash_mla_page(rows[i * page:][:page]) for i in range(pages)])
    memory = np.zeros_like(right)
    cache = np.lib.stride_tricks.as_strided(memory, (pages, page, 1, 584), (right.shape[1], 584, 584, 1))
    longspan.append_kv(rows[:, None], None, cache, None, np.arange(len(rows)), kv_dtype="latent584")
    np.testing.assert_array_equal(memory, right)


def test_other_caches_of_vllm(rng):
    rows = fresh_rows(rng, 6, 576)
    for dtype, stored, scale in (("auto", rows, None), ("fp8", e4m3(rows.astype(np.float32) / np.float32(.5)), .5)):
        cache = np.zeros((1, 6, 576), BF16 if scale is None else np.uint8)
        vllm.concat_and_cache_mla(rows[:, :512], rows[:, 512:], cache, np.arange(6), dtype,
                                  None if scale is None else np.array([scale], np.float32))
        np.testing.assert_array_equal(bytes_of(cache[0]), bytes_of(stored))


def test_a_run_appends(rng):
    rows = fresh_rows(rng, 40, 576)[6:]
    cache = np.full((40, 1, 656), 0xff, np.uint8)
    cache[:30, 0] = vllm_rows(rows[:30])
    q = rng.standard_normal((4, 8, 576), dtype=np.float32).astype(BF16)
    out, lse = longspan.attend(q, cache, None, kv_dtype="latent656", k_new=rows[30:34, None], cache_seqlens=[30], causal=True,
                               cu_seqlens_q=[0, 4], return_lse=True)
    np.testing.assert_array_equal(cache[30:34, 0], vllm_rows(rows[30:34]))
    keys = numbers("latent656", cache[:34, 0])
    right, right_lse = attention(q.astype(np.float32), keys[:, None], keys[:, None, :512], causal=True)
    assert_close(out, right, "bfloat16")
    assert_lse_close(lse, right_lse)


def test_reshard(rng):
    rows = random_rows(rng, "latent584", 9)
    pages = np.zeros((3, 4, 1, 584), np.uint8)
    longspan.reshard(rows[:, None], None, pages, None, lengths=[9], kv_heads=1, head_dim=512, value_dim=0, dtype="latent584",
                     to_block_table=np.array([[2, 0, 1]], np.int32))
    memory = pages.reshape(3, -1)
    for i, page in enumerate((2, 0, 1)):
        part = rows[4 * i:4 * i + 4]
        np.testing.assert_array_equal(memory[page][:4 * 576].reshape(4, 576)[:len(part)], part[:, :576])
        np.testing.assert_array_equal(memory[page][4 * 576:].reshape(4, 8)[:len(part)], part[:, 576:])


def test_tensors(rng):
    torch = pytest.importorskip("torch")
    import longspan.torch as lt

    batch = Batch(rng, "latent656", [70, 33], 1, 16, dtype=np.float32)
    q, cache, table, lengths = (tensor(a) for a in (batch.q, batch.cache, batch.table, batch.lengths))
    out, lse = vllm.flash_mla_with_kvcache(q, cache, table, lengths, 512, causal=True, is_fp8_kvcache=True)
    batch.check(host(out), host(lse).swapaxes(1, 2), True)
    out, lse = torch.ops.longspan.attend_lse(q, cache, cache, lt._groups.name_of(None, None, q.device.type), causal=True,
                                             block_table=table, cache_seqlens=lengths, kv_dtype="latent656")
    batch.check(host(out), host(lse), True)


def test_refusals(rng):
    batch = Batch(rng, "latent656", [20], 1, 2)
    given = dict(block_table=batch.table, cache_seqlens=batch.lengths)
    with pytest.raises(INPUT, match="give kv_dtype"):
        longspan.attend(batch.q, batch.cache, batch.cache, **given)
    with pytest.raises(INPUT, match="uint8 with rows of 656 bytes"):
        longspan.attend(batch.q, batch.cache[..., :584], None, kv_dtype="latent656", **given)
    with pytest.raises(USAGE, match="rows have 512 numbers"):
        longspan.attend(batch.q, batch.cache[..., :584], None, kv_dtype="latent584", **given)
    with pytest.raises(INPUT, match="carry their scales"):
        longspan.attend(batch.q, batch.cache, None, kv_dtype="latent656", k_descale=[1.0], **given)
    with pytest.raises(USAGE, match="compute in bfloat16 or float32"):
        longspan.attend(batch.q.astype(np.float16), batch.cache, None, kv_dtype="latent656", **given)
    with pytest.raises(INPUT, match="kv_dtype is float16"):
        longspan.attend(batch.q[0], batch.q[0], batch.q[0], kv_dtype="float16")
    with pytest.raises(INPUT, match="'latent600'"):
        longspan.attend(batch.q, batch.cache, None, kv_dtype="latent600", **given)
    with pytest.raises(INPUT, match="rows of 656, 584, 528, 352 bytes"):
        vllm.flash_mla_with_kvcache(batch.q, batch.cache[..., :600], batch.table, batch.lengths, 512, is_fp8_kvcache=True)
    with pytest.raises(UNSUPPORTED, match="descale_k is given"):
        sglang.flash_mla_with_kvcache(batch.q, batch.cache, batch.table, batch.lengths, 512, descale_k=np.ones(1, np.float32),
                                      is_fp8_kvcache=True)
    rows = fresh_rows(rng, 6, 576)
    with pytest.raises(UNSUPPORTED, match="read only"):
        vllm.concat_and_cache_mla(rows[:, :512], rows[:, 512:], np.zeros((1, 6, 352), np.uint8), np.arange(6), "nvfp4_ds_mla")
    with pytest.raises(INPUT, match="has rows of 656 bytes"):
        vllm.concat_and_cache_mla(rows[:, :512], rows[:, 512:], np.zeros((1, 6, 656), np.uint8), np.arange(6), "nvfp4_ds_mla")
    with pytest.raises(INPUT, match="v_cache is given"):
        longspan.append_kv(rows[:, None], None, np.zeros((1, 6, 1, 656), np.uint8), np.zeros((1, 6, 1, 656), np.uint8),
                           np.arange(6), kv_dtype="latent656")
    with pytest.raises(UNSUPPORTED, match="'int4' is not supported"):
        vllm.concat_and_cache_mla(rows[:, :512], rows[:, 512:], np.zeros((1, 6, 656), np.uint8), np.arange(6), "int4")
