"""longspan.transformer_engine: TransformerEngine's module over our calls."""

import doctest

import pytest

torch = pytest.importorskip("torch")

import longspan
import torch_jobs as jobs
from device import DEVICE
from longspan import transformer_engine
from longspan.transformer_engine import DotProductAttention


def tensors(*shape, kv_heads=2, keys=None):
    """[batch, tokens, heads, dim]"""
    batch, tokens, heads, dim = shape
    return [torch.randn(batch, n, h, dim, requires_grad=True)
            for n, h in ((tokens, heads), (keys or tokens, kv_heads), (keys or tokens, kv_heads))]


def right(q, k, v, causal=True):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_formats_and_masks(form, mask):
    q, k, v = tensors(2, 9, 4, 16)
    attention = DotProductAttention(4, 16, 2, qkv_format=form, attn_mask_type=mask)
    given = [t.transpose(0, 1) if form == "sbhd" else t for t in (q, k, v)]
    out = attention(*given)
    out = out.transpose(0, 1) if form == "sbhd" else out
    wanted = right(q, k, v, mask == "causal")
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    for one, other in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, (q, k, v), dout)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_alignment_and_window():
    """Causal is of the first tokens; bottom right, of the last; a call may say otherwise than the module."""
    q, k, v = tensors(1, 5, 4, 16, keys=8)
    attention = DotProductAttention(4, 16, 2, qkv_format="bshd")
    torch.testing.assert_close(attention(q, k, v), right(q, k[:, :5], v[:, :5]), rtol=1e-5, atol=1e-5)
    mask = torch.ones(5, 8, dtype=torch.bool).tril(3) & torch.ones(5, 8, dtype=torch.bool).triu(1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)
    found = attention(q, k, v, attn_mask_type="causal_bottom_right", window_size=(2, 0))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_packed_sequences():
    q, k, v = tensors(1, 12, 4, 16)
    attention = DotProductAttention(4, 16, 2, qkv_format="thd", attn_mask_type="padding_causal")
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    out = attention(q[0], k[0], v[0], cu_seqlens_q=starts, cu_seqlens_kv=starts)
    wanted = torch.cat([right(q[:, a:b], k[:, a:b], v[:, a:b])[0] for a, b in ((0, 5), (5, 12))])
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_sinks_and_dropout():
    q, k, v = tensors(1, 40, 4, 16)
    attention = DotProductAttention(4, 16, 2, 0.5, qkv_format="bshd", softmax_type="learnable")
    assert list(attention.state_dict()) == ["softmax_offset"] and attention.softmax_offset.shape == (1, 4, 1, 1)
    first, second = attention(q, k, v), attention(q, k, v)
    assert not torch.equal(first, second)
    assert torch.equal(attention.eval()(q, k, v), attention(q, k, v))
    attention(q, k, v).square().sum().backward()
    assert attention.softmax_offset.grad.abs().sum() > 0


def test_the_example():
    failed, tried = doctest.testmod(transformer_engine)
    assert failed == 0 < tried


def test_refusals():
    q, k, v = tensors(1, 5, 4, 16)
    attention = DotProductAttention(4, 16, 2, qkv_format="bshd")
    for wrong, match in ((dict(attention_mask=torch.ones(1)), "attention_mask"), (dict(attn_mask_type="arbitrary"), "arbitrary"),
                         (dict(core_attention_bias_type="alibi"), "alibi"), (dict(fp8_output=True), "fp8_output"),
                         (dict(attn_mask_type="padding"), "padding")):
        with pytest.raises(longspan.UnsupportedError, match=match):
            attention(q, k, v, **wrong)
    with pytest.raises(longspan.InputError, match="query_layer is"):
        attention(k, k, v)
    with pytest.raises(longspan.InputError, match="qkv_format"):
        attention(q, k, v, qkv_format="hbsd")
    with pytest.raises(longspan.UnsupportedError, match="a2a"):
        attention.set_context_parallel_group(None, cp_comm_type="a2a+p2p")
    with pytest.raises(longspan.UnsupportedError, match="softmax_type"):
        DotProductAttention(4, 16, softmax_type="off-by-one")


@pytest.mark.parametrize("ranks", [1, 2] if DEVICE != "cpu" else [1, 2, 4])
def test_context_parallel(torch_ranks, ranks):
    torch_ranks.values(ranks, jobs.transformer_engine)
