"""PyTorch's own tests of context parallelism, rewritten for longspan.torch, on gloo ranks: what
they do, and what they leave out or refuse."""

import sys

import pytest

pytest.importorskip("torch")

import longspan
import longspan.torch
import torch
import torch_jobs as jobs
from device import DEVICE
from longspan.torch import context_parallel, context_parallel_unshard, set_rotate_method


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])  # with load balance, and without
@pytest.mark.parametrize("compiled", [True, False])
def test_ring_attention_sdpa(torch_ranks, ranks, causal, layout, compiled):
    for rotate in ("allgather", "alltoall"):
        torch_ranks.values(ranks, jobs.ring_attention, causal, layout, compiled, rotate, 64)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("tokens", [0, 1, 3, 63, 200])
def test_any_length(torch_ranks, ranks, tokens):
    """63 tokens over 2 ranks, and fewer tokens than ranks."""
    for layout in ("zigzag", "contiguous", "striped", "interleaved:16"):
        for rotate in ("allgather", "alltoall"):
            torch_ranks.values(ranks, jobs.ring_attention, True, layout, False, rotate, tokens, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(torch_ranks, dtype):
    for rotate in ("allgather", "alltoall"):
        torch_ranks.values(2, jobs.ring_attention, True, "zigzag", False, rotate, 63, 2, dtype, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("compiled", [True, False])
def test_sharding_with_positions(torch_ranks, ranks, compiled):
    for tokens in (64, 63):
        torch_ranks.values(ranks, jobs.model_with_positions, tokens, compiled, "zigzag")
    torch_ranks.values(ranks, jobs.model_with_positions, 600, compiled, "contiguous")


def test_no_buffers(torch_ranks):
    torch_ranks.values(3, jobs.no_buffers)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_query_and_key_of_different_lengths(torch_ranks, ranks, causal):
    for layout in ("zigzag", "contiguous", "striped"):
        torch_ranks.values(ranks, jobs.cross_lengths, causal, layout)


def test_whatever_way_attention_is_reached(torch_ranks):
    """By the operator, and by functions traced, exported or compiled before."""
    torch_ranks.values(2, jobs.other_ways)


def test_sub_meshes(torch_ranks):
    torch_ranks.values(4, jobs.sub_meshes)


def test_buffers_of_any_kind():
    """In place, also for views of one memory, without an effect on the rest of it."""
    memory = torch.arange(40.0)
    first, second = memory[:20], memory[20:].view(4, 5)
    whole = memory.clone()
    with context_parallel(None, buffers=[first, second], buffer_seq_dims=[0, -1], no_restore_buffers=[second]):
        first += 1
        second.zero_()
    assert torch.equal(memory, whole) and torch.equal(first, whole[:20])
    assert second.sum() == 0 and second.data_ptr() != memory[20:].data_ptr()
    with torch.inference_mode():
        x = torch.ones(3, 2)
    for mode, kept in [(True, []), (False, []), (True, [x]), (False, [x])]:  # tensors of the mode stay tensors of it
        with torch.inference_mode(mode):
            y = torch.ones(3, 2)
            with context_parallel(None, buffers=[x, y], buffer_seq_dims=[0, 0], no_restore_buffers=[*kept, y]):
                assert x.t().is_inference()
                y += x
        assert x.is_inference() and y.is_inference() == mode and torch.equal(y, 2 * torch.ones(3, 2))
    with pytest.raises(ZeroDivisionError):
        with context_parallel(None, buffers=[first], buffer_seq_dims=[0]):
            1 / 0
    assert torch.equal(first, whole[:20])
    assert torch.nn.functional.scaled_dot_product_attention is jobs.sdpa_before


X = torch.ones(2, 3)
Q = torch.ones(1, 2, 4, 16)


def inside(call, **options):
    with context_parallel(None, **options):
        return call(torch.nn.functional.scaled_dot_product_attention)


@pytest.mark.parametrize("call, error, says", [
    (lambda: inside(None, buffers=[X]), longspan.InputError, "buffer_seq_dims has 0"),
    (lambda: inside(None, buffers=[X], buffer_seq_dims=[2]), longspan.InputError, r"buffer_seq_dims\[0\] is 2"),
    (lambda: inside(None, buffers=[[1]], buffer_seq_dims=[0]), TypeError, r"buffers\[0\] is of type 'list'"),
    (lambda: inside(None, buffers=[X, X], buffer_seq_dims=[0, 0]), longspan.InputError, "twice"),
    (lambda: inside(None, buffers=[torch.nn.Parameter(X)], buffer_seq_dims=[0]), NotImplementedError, "parameter"),
    (lambda: inside(None, no_restore_buffers=[X]), ValueError, "no_restore_buffers"),
    (lambda: inside(None, layout="spiral"), longspan.InputError, "layout is 'spiral'"),
    (lambda: inside(None, layout="interleaved:0"), longspan.InputError, "layout is 'interleaved:0'"),
    (lambda: inside(None, layout=3), TypeError, "layout is of type 'int'"),
    (lambda: inside(lambda f: f(Q, Q, Q, X)), NotImplementedError, "attn_mask"),
    (lambda: inside(lambda f: f(Q, Q, Q, attn_mask=X)), NotImplementedError, "attn_mask"),
    (lambda: inside(lambda f: f(Q, Q, Q, dropout_p=1.5)), longspan.InputError, "dropout_p is 1.5"),
    (lambda: inside(lambda f: f(Q.repeat(1, 2, 1, 1), Q, Q)), longspan.InputError, "enable_gqa"),
    (lambda: inside(lambda f: f(Q, Q[:, :, :2], Q[:, :, :2], is_causal=True)), longspan.InputError, "upper_left"),
    (lambda: set_rotate_method("carousel"), NotImplementedError, "carousel"),
    (lambda: context_parallel_unshard(None, [X], []), longspan.InputError, "seq_dims has 0"),
    (lambda: context_parallel_unshard(None, [X], [5]), longspan.InputError, r"seq_dims\[0\] is 5"),
    (lambda: context_parallel_unshard(None, [3], [0]), TypeError, r"buffers\[0\] is of type 'int'"),
    (lambda: context_parallel_unshard(None, [X], [0], "spiral"), longspan.InputError, "load_balancer is 'spiral'"),
])
def test_what_is_wrong_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()
    Q.requires_grad_(False)
    assert torch.equal(X, torch.ones(2, 3))


@torch.no_grad()
def test_what_would_attend_locally_is_refused():
    from torch.nn.attention.flex_attention import flex_attention

    heads = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x, q = torch.ones(1, 3, 16), torch.ones(1, 2, 16, 16)
    weights = torch.ones(48, 16), torch.ones(48), torch.ones(16, 16), torch.ones(16)
    whole = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    calls = [(lambda f: heads(x, x, x, need_weights=False), "torch.nn.MultiheadAttention"),
             (lambda f: layer(x), "torch.nn.MultiheadAttention"),
             (lambda f: torch._native_multi_head_attention(x, x, x, 16, 2, *weights), "_native_multi_head_attention"),
             (lambda f: torch.ops.aten._scaled_dot_product_attention_math(q, q, q), "_scaled_dot_product_attention_math"),
             (lambda f: flex_attention(q, q, q), "flex_attention")]
    for call, name in calls:
        with pytest.raises(longspan.UnsupportedError, match=f"{name} inside context_parallel"):
            inside(call)
        call(None)
    with pytest.raises(longspan.UnsupportedError, match="^flex_attention inside"):
        inside(lambda f: whole(q, q, q, return_lse=True))


def test_every_attention_of_torch_is_known():
    """Finds new operators of torch: each attends, is refused, or is listed as harmless."""
    from longspan.torch import _catch

    harmless = {"_fused_sdp_choice"}
    for name in torch._C._dispatch_get_all_op_names():
        space, _, name = name.partition("::")
        name = name.partition(".")[0]
        if space != "aten" or name.endswith("_backward") or name in harmless:
            continue
        if "attention" in name or "multi_head" in name or "transformer" in name or name == "_safe_softmax":
            assert name == "scaled_dot_product_attention" or name in _catch._LOCAL_OPERATORS, name


@torch.no_grad()
def test_threads():
    """A context holds for the thread that enters, as torch.no_grad does."""
    import threading

    q, numbers = torch.randn(1, 2, 4, 16), torch.zeros(4, 4)
    found = {}

    def attend(name, enters):
        try:  # a mask of numbers is refused inside, and only there
            if enters:
                inside(lambda f: f(q, q, q, numbers))
            else:
                torch.nn.functional.scaled_dot_product_attention(q, q, q, numbers)
            found[name] = None
        except longspan.UnsupportedError as error:
            found[name] = str(error)

    def both(f):
        threads = [threading.Thread(target=attend, args=pair) for pair in (("plain", False), ("own", True))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    inside(both)
    assert found["plain"] is None and "attn_mask" in found["own"]


def test_contexts_are_released():
    """Every reference to what a context hands to other threads is counted, and given back; torch 2.11 counts none."""
    catch = longspan.torch._catch
    ranks, options, counts = object(), {}, []
    for _ in range(3):
        for _ in range(100):
            with catch.caught(ranks, options), catch.caught(ranks, options):
                taken = catch.innermost()
                assert taken == (ranks, options)
                taken = catch._taken_along()
                assert taken == (ranks, options) and sys.getrefcount(taken) >= 3  # torch's, this one's, the argument's
        counts.append((sys.getrefcount(ranks), sys.getrefcount(options)))
    assert counts[1] == counts[2]


def test_threads_of_autograd():
    """Deep in nested backwards autograd takes another thread, as it does on GPUs. There a context is that of the thread that
    called backward, and no other thread's."""
    import threading

    found = {}

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth, name):
            ctx.call = depth, name
            return x.clone()

        @staticmethod
        def backward(ctx, dout):
            depth, name = ctx.call
            if depth > 0:
                with torch.enable_grad():
                    backward(name, depth - 1)
            else:
                context = longspan.torch._catch.innermost()
                try:
                    torch.ops.aten._safe_softmax(torch.ones(2, 2), -1)
                    refused = False
                except longspan.UnsupportedError:
                    refused = True
                found[name] = threading.get_ident(), context and context[1]["keys"], refused
            return dout, None, None

    def backward(name, depth):
        Nested.apply(torch.ones(1, requires_grad=True), depth, name).backward()

    def in_thread(*args):
        thread = threading.Thread(target=backward, args=args)
        thread.start()
        thread.join(60)

    with context_parallel(None, layout="striped"):
        backward("near", 2)
        with context_parallel(None, layout="contiguous"):
            backward("inner", 100)
        backward("far", 100)
        in_thread("other near", 2)
        in_thread("other far", 100)
    backward("outside", 100)
    own = threading.get_ident()
    assert found["near"] == (own, "striped", True)
    assert found["inner"][0] != own and found["inner"][1:] == ("contiguous", True)
    assert found["far"][0] != own and found["far"][1:] == ("striped", True)
    assert all(found[name][1:] == (None, False) for name in ("other near", "other far", "outside"))


@torch.no_grad()
def test_a_compiled_function_meets_several_contexts():
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 8, 16)
    torch._dynamo.reset()
    run = torch.compile(lambda q, k: torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True),
                        fullgraph=True, backend="aot_eager")
    local = run(q, k)
    right = inside(lambda f: run(q, k), causal_alignment="lower_right")
    assert not torch.equal(local, right)
    with pytest.raises(longspan.InputError, match="upper_left"):
        inside(lambda f: run(q, k))
    assert torch.equal(inside(lambda f: run(q, k), causal_alignment="lower_right"), right)
    assert torch.equal(run(q, k), local)


@torch.no_grad()
def test_autocast():
    """As torch casts for its own function: mixed types become one, and float64 stays."""
    q, k, v = torch.randn(3, 1, 2, 9, 32)
    with torch.autocast(DEVICE, torch.bfloat16):
        for mixed in [(q, k.bfloat16(), v.bfloat16()), (q, k, v), (q.bfloat16(), k.half(), v)]:
            right = torch.nn.functional.scaled_dot_product_attention(*mixed)
            found = inside(lambda f: f(*mixed))
            assert found.dtype == right.dtype == torch.bfloat16
            torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)
        layer = longspan.torch.ContextParallelAttention()
        assert layer(q, k.bfloat16(), v).dtype == torch.bfloat16
        with torch.autocast(DEVICE, enabled=False):
            assert layer(q, k, v).dtype == torch.float32
        if DEVICE == "cpu":
            wide = [t.double() for t in (q, k, v)]
            found, right = inside(lambda f: f(*wide)), torch.nn.functional.scaled_dot_product_attention(*wide)
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, right, rtol=1e-13, atol=1e-13)
    with pytest.raises(longspan.InputError, match="key is torch.bfloat16"):
        inside(lambda f: f(q, k.bfloat16(), v.bfloat16()))


def test_pytorchs_load_balancers():
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs

    known = theirs._HeadTailLoadBalancer(8, 1, "cpu")
    assert torch.equal(context_parallel_unshard(None, [X], [0], known)[0], X)
    other = theirs._PerDocumentHeadTailLoadBalancer([[8]], 1, "cpu")
    with pytest.raises(NotImplementedError, match="_PerDocumentHeadTailLoadBalancer"):
        context_parallel_unshard(None, [X], [0], other)
