"""Tensors of PyTorch on CPUs, where it is installed."""

import copy
import pickle

import pytest

import longspan
from oracle import assert_close, assert_lse_close, attention

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fast", [True, False])
def test_tensors(dtype, fast, monkeypatch):
    kind = torch.Tensor
    if not fast:  # as in PyTorch before 2.10: its own type, since the abilities of a type are kept
        kind = type("Plain", (torch.Tensor,), {"__dlpack_c_exchange_api__": None})
    q, k, v = (torch.randn(9, 2, 16).to(getattr(torch, dtype)).as_subclass(kind) for _ in range(3))
    out, lse = longspan.attend(q, k.transpose(0, 1).contiguous().transpose(0, 1), v, causal=True,
                               return_lse=True)
    assert isinstance(out, torch.Tensor) and out.dtype == q.dtype and lse.dtype == torch.float32
    right, right_lse = attention(*(a.as_subclass(torch.Tensor) for a in (q, k, v)), causal=True)
    assert_close(out.as_subclass(torch.Tensor), right, dtype)
    assert_lse_close(lse.as_subclass(torch.Tensor), right_lse)


def test_as_scaled_dot_product_attention():
    q, k, v = torch.randn(3, 2, 4, 33, 64)  # [batch, heads, tokens, dim]
    out = longspan.attend(*(a.transpose(1, 2).contiguous() for a in (q, k, v)), causal=True)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out.transpose(1, 2), right, rtol=1e-5, atol=1e-5)


def test_fp8_and_small_arrays():
    q = torch.randn(4, 4, 32, dtype=torch.bfloat16)
    k, v = torch.randn(2, 90, 2, 32).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.5)
    out = longspan.attend(q, k, v, k_descale=scale, v_descale=scale.reshape(1),
                          cache_seqlens=torch.tensor([80], dtype=torch.int32))
    right = attention(q.float(), k.float()[:80] * 0.5, v.float()[:80] * 0.5)[0]
    assert_close(out.float(), right, "bfloat16")


def test_requires_grad():
    q = torch.randn(3, 2, 16, requires_grad=True)
    with torch.no_grad():
        assert not longspan.attend(q, q, q).requires_grad
    with pytest.raises(longspan.UnsupportedError, match="out requires grad"):
        longspan.attend(q.detach(), q.detach(), q.detach(), out=q)
    layer = longspan.Attention(heads=2, head_dim=16, dtype="float32", max_queries=3)
    with pytest.raises(longspan.UnsupportedError, match="q requires grad"):
        layer(q, q.detach(), q.detach())


@pytest.mark.parametrize("make, error, says", [
    (lambda q: q.double(), longspan.InputError, "k is float32; float64, as q"),
    (lambda q: q.to("meta"), (longspan.InputError, RuntimeError, BufferError), None),
    (lambda q: q.to_sparse(), (longspan.InputError, RuntimeError, BufferError), None),
    (lambda q: torch.nn.functional, TypeError, "q is of type"),
])
def test_tensors_that_are_none(make, error, says):
    q = torch.randn(3, 2, 16)
    with pytest.raises(error, match=says):
        longspan.attend(make(q), q, q)
    longspan.attend(q, q, q)


def test_serving_calls():
    a, b = torch.randn(2, 3, 4, 16)
    s = torch.zeros(3, 4)
    out, lse = longspan.merge_state(a, s, b, s, base="e")
    torch.testing.assert_close(out, (a + b) / 2)
    assert isinstance(lse, torch.Tensor)


def test_shards():
    whole = torch.randn(2, 101, 3)
    for layout in ("zigzag", "striped", "contiguous"):
        parts = [longspan.shard(whole, layout, rank=r, ranks=3, dim=1) for r in range(3)]
        assert torch.equal(longspan.unshard(parts, layout, dim=1), whole)
    positions = torch.asarray(longspan.Sharding("zigzag").shard(10, 1, 2).positions(), dtype=torch.int64)
    assert positions.tolist() == [2, 3, 4, 5, 6]
    again = longspan.unshard(whole, "zigzag", comm=longspan.alone(), dim=1)
    assert torch.equal(again, whole) and again.device == whole.device
    part = longspan.shard(whole, "zigzag", rank=1, ranks=2, dim=1)
    assert longspan._shards.cut_of(part)[1:5] == (1, 2, 101, 1)
    for made in (part[:], part.clone(), part + 0, copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert type(made) is torch.Tensor and longspan._shards.cut_of(made) is None
    with pytest.raises(longspan.InputError, match="rank 1's part of 2.*comm is None"):
        longspan.attend(whole[0, :, None], part, part)
    part.data = part.data[:, :3]
    assert longspan._shards.cut_of(part) is None


@pytest.mark.more
def test_after_torch_and_before_it():
    import subprocess
    import sys

    for order in ("import torch, longspan", "import longspan, torch"):
        script = order + "; q = torch.ones(3, 2, 16); print(longspan.attend(q, q, q).sum().item())"
        assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                              check=True).stdout == "96.0\n"
