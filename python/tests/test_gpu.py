"""What only GPUs have: streams, graphs, arrays of other libraries there, arrays on two devices. The other tests with
PyTorch run on GPUs too with LONGSPAN_TEST_DEVICE=cuda."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from device import DEVICE

if DEVICE == "cpu":
    pytest.skip("LONGSPAN_TEST_DEVICE is not cuda", allow_module_level=True)

import longspan
import longspan.torch as lt
from oracle import assert_close, assert_lse_close, attention
from test_attend import paged

KINDS = [torch.float32, torch.float16, torch.bfloat16]


def name(dtype):
    return str(dtype).removeprefix("torch.")


def test_a_negated_tensor_is_refused():
    """On CPUs it is copied."""
    q, k, v = torch.randn(3, 9, 2, 64)
    with pytest.raises(longspan.InputError, match="k is a lazily negated view.*k.resolve_neg"):
        longspan.attend(q, torch._neg_view(k), v)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("tokens, keys", [(1, 700), (7, 513), (130, 130), (300, 700)])
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_attend(dtype, tokens, keys, dim):
    q = torch.randn(tokens, 4, dim).to(dtype)
    k, v = torch.randn(2, keys, 2, dim).to(dtype)
    out, lse = longspan.attend(q, k, v, causal=True, return_lse=True)
    assert out.device == lse.device == q.device and out.dtype == dtype
    right, right_lse = attention(q, k, v, causal=True)
    assert_close(out, right, name(dtype))
    assert_lse_close(lse, right_lse)


def test_the_current_stream(rng):
    """A call runs after earlier work of the stream, and ends with the stream."""
    right_q, k, v = torch.randn(3, 40, 2, 64)
    q = torch.full_like(right_q, torch.nan)
    longspan.attend(q, k, v)  # the layer is made
    torch.cuda.synchronize()
    for given in (None, "object", "number"):
        q.fill_(torch.nan)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            q.copy_(right_q)
            if given is None:
                out = longspan.attend(q, k, v)
        if given is not None:
            out = longspan.attend(q, k, v, stream=stream if given == "object" else stream.cuda_stream)
        stream.synchronize()
        assert_close(out, attention(right_q, k, v)[0])
        out.record_stream(stream)


@pytest.mark.parametrize("dtype", KINDS)
def test_a_graph(rng, dtype):
    """Captured once and replayed with other queries, lengths and pages."""
    rows, caches, table = paged(rng, [90, 33, 5], dim=64)
    caches = torch.from_numpy(caches).to(DEVICE, dtype)
    q, lengths = torch.zeros(3, 1, 4, 64, dtype=dtype), torch.zeros(3, dtype=torch.int32)
    pages, out = torch.zeros(*table.shape, dtype=torch.int32), torch.empty(3, 1, 4, 64, dtype=dtype)
    layer = longspan.Attention(longspan.alone("cuda"), heads=4, kv_heads=2, head_dim=64, dtype=dtype, causal=True,
                               max_queries=3, max_batch=3, max_seqlen_k=128)

    def run():
        layer(q, *caches, cache_seqlens=lengths, block_table=pages, out=out)

    lengths.fill_(1)
    run()
    layer.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for order in ([0, 1, 2], [2, 0, 1]):
        new = torch.randn(3, 1, 4, 64).to(dtype)
        q.copy_(new)
        lengths.copy_(torch.tensor([len(rows[b][0]) for b in order], dtype=torch.int32))
        pages.copy_(torch.from_numpy(table[order]))
        out.fill_(torch.nan)
        graph.replay()
        layer.wait()
        for i, b in enumerate(order):
            kept = [torch.from_numpy(x).to(dtype) for x in rows[b]]
            assert_close(out[i], attention(new[i], *kept, causal=True)[0], name(dtype))


def test_a_graph_of_the_operators():
    q, k, v = torch.randn(3, 1, 4, 70, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = lt.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = lt.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, wanted)


@torch.no_grad()
def test_reduce_overhead():
    """Inductor's graphs of CUDA."""
    def model(q, k, v):
        return torch.nn.functional.silu(lt.scaled_dot_product_attention(q * 1.0, k + 0, v, is_causal=True)) + 1

    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        q, k, v = torch.randn(3, 1, 4, 70, 64, dtype=torch.float16)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(q, k, v), model(q, k, v))


@pytest.mark.parametrize("library", ["cupy", "jax.numpy"])
def test_arrays_of(rng, library):
    other = pytest.importorskip(library)
    q, k, v = rng.standard_normal((3, 33, 4, 64), dtype=np.float32)
    out, lse = longspan.attend(*(other.asarray(a) for a in (q, k, v)), causal=True, return_lse=True)
    assert type(out) is type(other.asarray(q))
    found, found_lse = (np.asarray(a.get() if hasattr(a, "get") else a) for a in (out, lse))
    right, right_lse = attention(q, k, v, causal=True)
    assert_close(found, right)
    assert_lse_close(found_lse, right_lse)


def test_two_devices_are_named():
    q, k, v = torch.randn(3, 9, 2, 64)
    with pytest.raises(longspan.InputError, match="k"):
        longspan.attend(q, k.cpu(), v)
    with pytest.raises(longspan.LongspanError, match="q"):
        longspan.attend(q.cpu(), k.cpu(), v.cpu(), comm=longspan.alone("cuda"))
    with pytest.raises(longspan.LongspanError, match="q"):
        longspan.attend(q, k, v, comm=longspan.alone("cpu"))
    with pytest.raises(longspan.InputError, match="lies on cpu"):
        lt.scaled_dot_product_attention(q[None], k[None].cpu(), v[None])
    with pytest.raises(longspan.LongspanError, match="cache_seqlens"):
        longspan.attend(q, k, v, cache_seqlens=torch.tensor([5], dtype=torch.int32, device="cpu"))
    assert_close(longspan.attend(q, k, v), attention(q, k, v)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="2 GPUs are wanted")
def test_another_gpu_than_the_current():
    """The work runs on the GPU of the arrays, and the current GPU stays the same."""
    q, k, v = torch.randn(3, 9, 2, 64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    out = longspan.attend(q, k, v)
    assert out.device == q.device and torch.cuda.current_device() == 0
    assert_close(out, attention(q, k, v)[0])
    with pytest.raises(longspan.InputError, match="GPU 1"):
        longspan.attend(q.to("cuda:0"), k, v)
