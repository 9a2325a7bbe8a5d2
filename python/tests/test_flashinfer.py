"""longspan.flashinfer against float64: log-sum-exps are of base 2."""

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import longspan
from device import tensor
from longspan import flashinfer
from oracle import assert_close, attention, host
from test_attend import DTYPES, numbers
from test_rope import angles, rotated
from test_vllm import merged, states, with_junk

E4M3 = ml_dtypes.float8_e4m3fn


@hypothesis.given(st.integers(0, 20), st.integers(1, 5), st.sampled_from([8, 24, 64]), st.integers(1, 6),
                  st.sampled_from(["float32", "float16", "bfloat16"]), st.integers(0, 2 ** 32 - 1))
@hypothesis.settings(max_examples=60)
def test_merges(tokens, heads, dim, parts, dtype, seed):
    rng = np.random.default_rng(seed)
    outs, lses = states(rng, tokens, heads, dim, parts, dtype)
    right, right_lse = merged(outs, lses, base=2)
    v, s = flashinfer.merge_states(np.stack(outs, 1), np.stack(lses, 1))
    assert v.dtype == outs[0].dtype
    assert_close(v, right, dtype)
    np.testing.assert_allclose(s, right_lse, rtol=1e-5, atol=1e-5)
    if parts != 2:
        return
    v, s = flashinfer.merge_state(outs[0], lses[0], outs[1], lses[1])
    assert_close(v, right, dtype)
    np.testing.assert_allclose(s, right_lse, rtol=1e-5, atol=1e-5)
    mask = rng.random(tokens) < 0.5
    v, s = outs[0].copy(), lses[0].copy()
    assert flashinfer.merge_state_in_place(v, s, outs[1], lses[1], mask) is None
    assert_close(v[mask], right[mask], dtype)
    assert (v[~mask].tobytes(), s[~mask].tobytes()) == (outs[0][~mask].tobytes(), lses[0][~mask].tobytes())
    flashinfer.merge_state_in_place(outs[0], lses[0], outs[1], lses[1])
    assert_close(outs[0], right, dtype)
    np.testing.assert_allclose(lses[0], right_lse, rtol=1e-5, atol=1e-5)


def laid_out(a, layout):
    return a if layout == "NHD" else np.ascontiguousarray(a.swapaxes(0, 1))


@hypothesis.given(st.integers(0, 60), st.integers(0, 20), st.sampled_from(["NHD", "HND"]), st.booleans(),
                  st.integers(-1, 20), st.sampled_from([None, 0.0, 5.0]), st.sampled_from([None, 0.2]),
                  st.sampled_from(["float32", "bfloat16"]), st.integers(0, 2 ** 32 - 1))
@hypothesis.settings(max_examples=60)
def test_single_attention(keys, tokens, layout, causal, window, softcap, scale, dtype, seed):
    rng = np.random.default_rng(seed)
    q = numbers(rng, (min(tokens, keys), 4, 32), dtype)
    k, v = numbers(rng, (2, keys, 2, 32), dtype)
    options = dict(kv_layout=layout, window_left=window, logits_soft_cap=softcap, sm_scale=scale)
    wanted = dict(window=(window, -1), softcap=softcap or 0, scale=scale)
    k_laid, v_laid = laid_out(k, layout), laid_out(v, layout)
    out = flashinfer.single_prefill_with_kv_cache(q, k_laid, v_laid, causal=causal, **options)
    again, lse = flashinfer.single_prefill_with_kv_cache_return_lse(q, k_laid, v_laid, causal=causal, **options)
    right, right_lse = attention(q, k, v, causal=causal, **wanted)
    assert out.dtype == q.dtype and (again == out).all()
    assert_close(out, right, dtype)
    np.testing.assert_allclose(lse, right_lse / np.log(2), rtol=2e-5, atol=2e-5)
    if keys and len(q):
        out, lse = flashinfer.single_decode_with_kv_cache(q[-1], k_laid, v_laid, return_lse=True, **options)
        right, right_lse = attention(q[-1:], k, v, **wanted)
        assert_close(out, right[0], dtype)
        np.testing.assert_allclose(lse, right_lse[0] / np.log(2), rtol=2e-5, atol=2e-5)


@hypothesis.given(st.integers(1, 60), st.integers(1, 20), st.sampled_from(["NHD", "HND"]), st.booleans(),
                  st.sampled_from([None, 4.0]), st.sampled_from([None, 500.0]), st.sampled_from(["float32", "bfloat16"]),
                  st.integers(0, 2 ** 32 - 1))
@hypothesis.settings(max_examples=40)
def test_rope_llama(keys, tokens, layout, causal, scale, theta, dtype, seed):
    """Every key is rotated at each call; the caller's keys stay as they are."""
    rng = np.random.default_rng(seed)
    q = numbers(rng, (min(tokens, keys), 4, 32), dtype)
    k, v = numbers(rng, (2, keys, 2, 32), dtype)
    by = angles(range(keys), 32, theta or 1e4, scale or 1.0)
    cos, sin = np.cos(by), np.sin(by)
    turned = [rotated(a, cos[keys - len(a):], sin[keys - len(a):], False).astype(DTYPES[dtype]) for a in (q, k)]
    options = dict(kv_layout=layout, pos_encoding_mode="ROPE_LLAMA", rope_scale=scale, rope_theta=theta)
    k_laid, v_laid = laid_out(k, layout), laid_out(v, layout)
    before = k_laid.copy()
    out = flashinfer.single_prefill_with_kv_cache(q, k_laid, v_laid, causal=causal, **options)
    assert_close(out, attention(*turned, v, causal=causal)[0], dtype)
    out = flashinfer.single_decode_with_kv_cache(q[-1], k_laid, v_laid, **options)
    assert_close(out, attention(turned[0][-1:], turned[1], v)[0][0], dtype)
    assert (k_laid == before).all()


def test_rope_llama_of_tensors(rng):
    torch = pytest.importorskip("torch")
    q, k, v = (numbers(rng, (9, heads, 32)) for heads in (4, 2, 2))
    right = flashinfer.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ROPE_LLAMA")
    out = flashinfer.single_prefill_with_kv_cache(*map(torch.from_numpy, (q, k, v)), pos_encoding_mode="ROPE_LLAMA")
    assert_close(out, right.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_are_numbers_of_any_type(rng, dtype):
    q, (k, v) = numbers(rng, (4, 32), dtype), numbers(rng, (2, 50, 2, 32), dtype)
    out = flashinfer.single_decode_with_kv_cache(q, k, v, q_scale=0.5, k_scale=1.5, v_scale=3)
    right = attention(0.5 * q[None].astype(np.float64), 1.5 * k.astype(np.float64), v)[0][0]
    assert_close(out / np.asarray(3, DTYPES[dtype]), right, dtype)
    assert flashinfer.single_decode_with_kv_cache(q, k, v, v_scale=3).dtype == q.dtype


def test_fp8(rng):
    q, (k, v) = numbers(rng, (5, 4, 32)).astype(E4M3), numbers(rng, (2, 50, 2, 32)).astype(E4M3)
    wide = [a.astype(np.float64) for a in (q, k, v)]
    scales = np.array([0.5, 0.75], np.float32)
    out = flashinfer.single_prefill_with_kv_cache(q, k, v, np.float32([0.9]), scales, scales[::-1].copy(),
                                                  ml_dtypes.bfloat16, causal=True)
    right = attention(0.9 * wide[0], scales[:, None] * wide[1], scales[::-1, None] * wide[2], causal=True)[0]
    assert_close(out, right, "bfloat16")
    for o_dtype in ("float32", "float16"):
        out = flashinfer.single_prefill_with_kv_cache(q, k, v, np.float32([0.9]), scales, scales[::-1].copy(),
                                                      o_dtype, causal=True)
        assert out.dtype == o_dtype
        assert_close(out, right, "float16")
    small = flashinfer.single_prefill_with_kv_cache(q, k, v, o_dtype=E4M3, v_scale=2.0)
    np.testing.assert_allclose(small.astype(np.float64), 2 * attention(*wide)[0], rtol=2 ** -4 + 1e-3, atol=4e-3)
    half = q[0].astype(np.float32).astype(ml_dtypes.bfloat16)
    out = flashinfer.single_decode_with_kv_cache(half, k, v, k_scale=0.5, v_scale=0.5)
    assert_close(out, attention(wide[0][:1], 0.5 * wide[1], 0.5 * wide[2])[0][0], "bfloat16")


def test_tuning_changes_nothing(rng):
    q, (k, v) = numbers(rng, (5, 4, 32)), numbers(rng, (2, 50, 2, 32))
    right = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
    for backend in ("fa2", "fa3", "cutlass"):
        out = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, backend=backend,
                                                      use_fp16_qk_reduction=True)
        assert (out == right).all()
    out = flashinfer.single_decode_with_kv_cache(q[-1], k, v, use_tensor_cores=True)
    assert (out == flashinfer.single_decode_with_kv_cache(q[-1], k, v)).all()


def test_decode_of_fp8_is_fp8(rng):
    """It has no o_dtype: the result has the type of q, as in FlashInfer."""
    q, (k, v) = numbers(rng, (4, 32)).astype(E4M3), numbers(rng, (2, 50, 2, 32)).astype(E4M3)
    out = flashinfer.single_decode_with_kv_cache(q, k, v, q_scale=np.float32(0.5), v_scale=np.array([3.0]))
    assert out.dtype == E4M3
    right = attention(0.5 * q[None].astype(np.float64), k.astype(np.float64), 3 * v.astype(np.float64))[0][0]
    np.testing.assert_allclose(out.astype(np.float64), right, rtol=2 ** -4 + 1e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_lses(rng, dtype):
    """With as many tokens as heads, so that shapes do not tell them apart."""
    (a, b), (la, lb) = states(rng, 4, 4, 32)
    la, lb = (x.astype(DTYPES[dtype]) for x in (la, lb))
    right, right_lse = merged((a, b), (la, lb), base=2)
    for v, s in (flashinfer.merge_state(a, la, b, lb),
                 flashinfer.merge_states(np.stack((a, b), 1), np.stack((la, lb), 1))):
        assert_close(v, right)
        np.testing.assert_allclose(s, right_lse, rtol=1e-5, atol=1e-5)
    for mask in (None, np.array([True, False, True, False])):
        v, s = a.copy(), la.copy()
        flashinfer.merge_state_in_place(v, s, b, lb, mask)
        rows = np.ones(4, bool) if mask is None else mask
        assert_close(v[rows], right[rows])
        np.testing.assert_allclose(s[rows].astype(np.float64), right_lse[rows], rtol=8e-3, atol=8e-3)
        assert (v[~rows].tobytes(), s[~rows].tobytes()) == (a[~rows].tobytes(), la[~rows].tobytes())


V, S = np.ones((3, 4, 16), np.float32), np.zeros((3, 4), np.float32)
Q, K = np.ones((3, 4, 16), np.float32), np.ones((9, 2, 16), np.float32)
LATENT = K.astype(E4M3)  # keys and values of one memory
INPUT, UNSUPPORTED = longspan.InputError, longspan.UnsupportedError


def prefill(q=Q, k=K, v=K, *args, **options):
    return flashinfer.single_prefill_with_kv_cache(q, k, v, *args, **options)


def decode(q=Q[0], k=K, v=K, *args, **options):
    return flashinfer.single_decode_with_kv_cache(q, k, v, *args, **options)


CASES = {
    "s_a heads first": (lambda: flashinfer.merge_state(V, S.T, V, S), INPUT, "^s_a is .4, 3."),
    "s_b": (lambda: flashinfer.merge_state(V, S, V, S[:2]), INPUT, "^s_b is"),
    "v_a": (lambda: flashinfer.merge_state(V[0], S, V, S), INPUT, "^v_a is"),
    "v_b": (lambda: flashinfer.merge_state(V, S, V[..., :8].copy(), S), INPUT, "^v_b is"),
    "v_a a list": (lambda: flashinfer.merge_state([1], S, V, S), TypeError, "^v_a is of type 'list'"),
    "s_a float64": (lambda: flashinfer.merge_state(V, S.astype(np.float64), V, S), INPUT, "^s_a has"),
    "v None": (lambda: flashinfer.merge_state_in_place(None, S, V, S), TypeError, "^v is None"),
    "s": (lambda: flashinfer.merge_state_in_place(V.copy(), S.T.copy(), V, S), INPUT, "^s is"),
    "v read-only": (lambda: flashinfer.merge_state_in_place(np.broadcast_to(V[:1], V.shape), S.copy(), V, S),
                    INPUT, "^v "),
    "s read-only beside a mask": (lambda: flashinfer.merge_state_in_place(
        V.copy(), np.broadcast_to(S[:1], S.shape), V, S, np.ones(3, bool)), INPUT, "^s is read-only"),
    "v_other": (lambda: flashinfer.merge_state_in_place(V.copy(), S.copy(), V[:2], S[:2]), INPUT, "^v_other is"),
    "mask's shape": (lambda: flashinfer.merge_state_in_place(V.copy(), S.copy(), V, S, np.ones(4, bool)), INPUT,
                     "^mask is .4."),
    "mask's type": (lambda: flashinfer.merge_state_in_place(V.copy(), S.copy(), V, S, np.ones(3, np.uint8)),
                    INPUT, "^mask is uint8"),
    "parts": (lambda: flashinfer.merge_states(V, S), INPUT, "^v is"),
    "parts' s": (lambda: flashinfer.merge_states(V[None], S), INPUT, "^s is"),
    "kv_layout": (lambda: prefill(kv_layout="HDN"), INPUT, "kv_layout is 'HDN'"),
    "q of two dimensions": (lambda: prefill(Q[0]), INPUT, "^q is"),
    "q of three": (lambda: decode(Q), INPUT, "^q is"),
    "k": (lambda: decode(k=K[0]), INPUT, "^k is"),
    "v": (lambda: prefill(v=K[:5]), INPUT, "v is"),
    "window_left": (lambda: prefill(window_left=2.5), TypeError, "window_left is of type 'float'"),
    "window_left -2": (lambda: prefill(window_left=-2), INPUT, "window_left is"),
    "causal": (lambda: prefill(causal="yes"), TypeError, "causal is of type"),
    "sm_scale": (lambda: prefill(sm_scale="1"), TypeError, "sm_scale is of type 'str'"),
    "logits_soft_cap": (lambda: prefill(logits_soft_cap="1"), TypeError, "logits_soft_cap is of type 'str'"),
    "k_scale": (lambda: decode(k_scale=np.ones(2)), TypeError, "k_scale is of type 'ndarray'"),
    "v_scale": (lambda: decode(v_scale=0.0), INPUT, "v_scale is 0"),
    "scale_k of no fp8": (lambda: prefill(scale_k=np.ones(2, np.float32)), INPUT, "scale_k is given and k is float32"),
    "scale_q by head": (lambda: prefill(Q.astype(E4M3), scale_q=np.ones(4, np.float32),
                                        o_dtype=ml_dtypes.bfloat16), UNSUPPORTED, "scale_q is .4."),
    "two scales of one memory": (lambda: prefill(Q, LATENT, LATENT, scale_k=0.5, scale_v=2.0), INPUT,
                                 "^scale_k is 0.5 and scale_v is 2 of kv head 0; v lies in the memory of k"),
    "o_dtype missing": (lambda: prefill(Q.astype(E4M3)), INPUT, "o_dtype is None"),
    "o_dtype": (lambda: prefill(o_dtype=np.float16), UNSUPPORTED, "o_dtype is float16"),
    "o_dtype of fp8": (lambda: prefill(Q.astype(E4M3), o_dtype=np.float64), UNSUPPORTED, "o_dtype is float64"),
    **{f"prefill {name}": (lambda name=name, value=value: prefill(**{name: value}), UNSUPPORTED, f"^{name} is")
       for name, value in dict(custom_mask=V, packed_custom_mask=V, pos_encoding_mode="ALIBI",
                               rope_scale=1.0, rope_theta=1e4, kv_cache_sf=(V, V)).items()},
    **{f"decode {name}": (lambda name=name, value=value: decode(**{name: value}), UNSUPPORTED, f"^{name} is")
       for name, value in dict(pos_encoding_mode="ALIBI", rope_scale=1.0, rope_theta=1e4).items()},
    "rope with fp8": (lambda: prefill(k=K.astype(E4M3), pos_encoding_mode="ROPE_LLAMA"), UNSUPPORTED,
                      "^pos_encoding_mode is 'ROPE_LLAMA' and k is float8_e4m3fn"),
    "rope_theta": (lambda: decode(pos_encoding_mode="ROPE_LLAMA", rope_theta=-1.0), INPUT, "^rope_theta is -1"),
    "backend": (lambda: prefill(backend=3), TypeError, "^backend is of type 'int'"),
    "use_fp16_qk_reduction": (lambda: prefill(use_fp16_qk_reduction=1), TypeError, "^use_fp16_qk_reduction is of"),
    "use_tensor_cores": (lambda: decode(use_tensor_cores=None), TypeError, "^use_tensor_cores is of type"),
    "sm_scale beside k_scale": (lambda: decode(sm_scale="1", k_scale=0.5), TypeError, "^sm_scale is of type 'str'"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_is_named(name):
    call, error, says = CASES[name]
    with pytest.raises(error, match=says):
        call()


def test_any_junk_is_an_exception():
    with_junk(flashinfer.merge_state, dict(v_a=V, s_a=S, v_b=V, s_b=S))
    with_junk(flashinfer.merge_state_in_place, dict(v=V, s=S, v_other=V, s_other=S))
    with_junk(flashinfer.merge_states, dict(v=V[None], s=S[None]))
    with_junk(flashinfer.single_decode_with_kv_cache, dict(q=Q[0], k=K, v=K))
    with_junk(flashinfer.single_prefill_with_kv_cache, dict(q=Q, k=K, v=K))


def test_tensors(rng):
    torch = pytest.importorskip("torch")
    outs, lses = states(rng, 9, 4, 32)
    right, right_lse = merged(outs, lses, base=2)
    (a, b), (la, lb) = ([tensor(x) for x in both] for both in (outs, lses))
    v, s = flashinfer.merge_state(a, la, b, lb)
    assert_close(v, right)
    np.testing.assert_allclose(host(s), right_lse, rtol=1e-5, atol=1e-5)
    mask = torch.arange(9) % 2 == 0
    kept = a.clone(), la.clone()
    flashinfer.merge_state_in_place(a, la, b, lb, mask)
    assert_close(a[mask], right[::2])
    assert host(kept[0][~mask]).tobytes() == host(a[~mask]).tobytes() and torch.equal(kept[1][~mask], la[~mask])
    q, k = torch.randn(4, 4, 32), torch.randn(2, 50, 32).transpose(0, 1)
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, k, causal=True, return_lse=True)
    right, right_lse = attention(q, k, k, causal=True)
    assert_close(out, right)
    np.testing.assert_allclose(host(lse), right_lse / np.log(2), rtol=2e-5, atol=2e-5)
    out = flashinfer.single_decode_with_kv_cache(q[-1], k.transpose(0, 1), k.transpose(0, 1), "HND")
    assert_close(out, right[-1])
    stored = [x.to(torch.float8_e4m3fn) for x in (q, k, k)]
    small = flashinfer.single_prefill_with_kv_cache(*stored, o_dtype=torch.bfloat16)
    assert small.dtype == torch.bfloat16
    twice = flashinfer.single_prefill_with_kv_cache(*stored, scale_v=2.0, o_dtype=torch.bfloat16)
    assert torch.equal(twice, 2 * small)
