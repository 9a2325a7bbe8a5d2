"""Attention under torch's autograd, on one process and on gloo ranks."""

import contextlib
import importlib

import pytest

pytest.importorskip("torch")

import hypothesis
import hypothesis.strategies as st
import longspan
import longspan.torch as lt
import torch
import torch_jobs as jobs
from device import DEVICE
from torch.utils.checkpoint import checkpoint

OPS = torch.ops.longspan
NO_TERMS = (None,) * len(lt._train._OF_ARRAYS)  # of attend_train: sinks, slopes and the like
WIDE = torch.float64 if DEVICE == "cpu" else torch.float32  # the widest type of products
EXACT = 1e-12 if DEVICE == "cpu" else 2e-4
needs_fp64 = pytest.mark.skipif(DEVICE != "cpu", reason="GPUs have no products of fp64")


def wide(*shape):
    return torch.randn(*shape, dtype=WIDE, requires_grad=True)


def reference(q, k, v, *, is_causal=False, scale=None, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None,
              documents=None, cache_leftpad=None, **_):
    """[batch, heads, tokens, dim] in plain torch, differentiable. The rows are the last tokens."""
    group, (tokens, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(keys - tokens, keys)[:, None], torch.arange(keys)[None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * (i - j).abs()
    seen = torch.ones(len(q), 1, tokens, keys, dtype=torch.bool)
    if is_causal:
        seen &= j <= i
    if window_size[0] >= 0:
        seen &= i - j <= window_size[0]
    if window_size[1] >= 0 and not is_causal:
        seen &= j - i <= window_size[1]
    if documents is not None:
        seen &= torch.searchsorted(documents, i, right=True) == torch.searchsorted(documents, j, right=True)
    if cache_leftpad is not None:
        seen &= j >= cache_leftpad[:, None, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., :keys]
    return torch.where(seen.any(-1, keepdim=True), weights, 0) @ v


OPTIONS = {
    "plain": dict(),
    "causal": dict(is_causal=True, causal_alignment="lower_right"),
    "window": dict(window_size=(7, 2), scale=0.3),
    "softcap": dict(softcap=2.0),
    "slopes": dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.0, 1.0])),
    "documents": dict(documents=torch.tensor([0, 9, 9, 20]), window_size=(5, -1)),
    "padding": dict(cache_leftpad=torch.tensor([0, 8], dtype=torch.int32)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_torch(name):
    options = OPTIONS[name]
    batch = 1 if "documents" in options else 2
    inputs = wide(batch, 4, 20, 16), wide(batch, 2, 20, 16), wide(batch, 2, 20, 24)
    out = lt.scaled_dot_product_attention(*inputs, enable_gqa=True, **options)
    right = reference(*inputs, **options)
    dout = torch.randn_like(right)
    torch.testing.assert_close(out, right, rtol=EXACT, atol=EXACT)
    for found, wanted in zip(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(right, inputs, dout)):
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("columns", [16, 10])
def test_keys_and_values_of_one_memory(columns):
    q, x = wide(2, 4, 20, 16), wide(2, 4, 20, 16)
    for detached in (False, True):  # then the gradient is that of the values alone
        found = torch.autograd.grad(
            lt.scaled_dot_product_attention(q, x.detach() if detached else x, x[..., :columns]).square().sum(), x)
        wanted = torch.autograd.grad(
            reference(q, x.detach() if detached else x, x[..., :columns]).square().sum(), x)
        torch.testing.assert_close(found, wanted)


@needs_fp64
def test_finite_differences():
    """Of out and of lse; rows in the order of torch and of a transpose."""
    q, k, v = wide(1, 2, 5, 4), wide(1, 1, 6, 4), wide(1, 1, 6, 3)

    def call(q, k, v):
        return lt.scaled_dot_product_attention(q, k, v, is_causal=True, causal_alignment="lower_right", enable_gqa=True,
                                               return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v))
    layer = lt.ContextParallelAttention(format="bthd", causal=True)
    assert torch.autograd.gradcheck(layer, tuple(t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_16_and_32_bits(dtype):
    inputs = [torch.randn(2, 3, 33, 20, dtype=dtype, requires_grad=True) for _ in range(3)]
    dout = torch.randn(2, 3, 33, 20, dtype=dtype)
    found = torch.autograd.grad(lt.scaled_dot_product_attention(*inputs, is_causal=True), inputs, dout)
    right = torch.autograd.grad(reference(*(t.double() for t in inputs), is_causal=True), inputs, dout.double())
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    for one, wanted in zip(found, right):
        assert one.dtype == dtype
        torch.testing.assert_close(one, wanted, rtol=bound, atol=bound)


def test_sinks_and_slopes_learn():
    q, k, v = (torch.randn(2, 4, 12, 16) for _ in range(3))
    sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0, 0.0, 2.0]))
    layer = lt.ContextParallelAttention(causal=True, sinks=sinks)
    layer(q, k, v).square().sum().backward()
    slopes = torch.tensor([0.5, 0.2, 0.1, 1.0], requires_grad=True)
    lt.scaled_dot_product_attention(q, k, v, alibi_slopes=slopes, is_causal=True).square().sum().backward()
    for term, name in ((sinks, "sinks"), (slopes, "alibi_slopes")):
        own = term.detach().double().requires_grad_()
        reference(*(t.double() for t in (q, k, v)), is_causal=True, **{name: own}).square().sum().backward()
        torch.testing.assert_close(term.grad.double(), own.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_attend(batch):
    """longspan.attend of tensors that require grad, in its own layout."""
    q, k, v = (torch.randn(*batch, 12, heads, 16, dtype=WIDE, requires_grad=True) for heads in (4, 2, 2))
    slopes = [0.5, 0.25, 0.0, 1.0]
    out, lse = longspan.attend(q, k, v, causal=True, window_size=(5, -1), alibi_slopes=slopes, return_lse=True)
    assert lse.shape == (*batch, 12, 4) and lse.requires_grad
    whole = [(t if batch else t[None]).transpose(1, 2) for t in (q, k, v)]
    right = reference(*whole, is_causal=True, window_size=(5, -1), alibi_slopes=torch.tensor(slopes)).transpose(1, 2)
    right = right if batch else right[0]
    torch.testing.assert_close(out, right, rtol=EXACT, atol=EXACT)
    dout = torch.randn_like(out)
    for found, wanted in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(right, (q, k, v), dout)):
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)


def test_attend_refuses_what_has_no_gradient():
    q = torch.randn(9, 2, 16, requires_grad=True)
    for name, value in (("out", torch.empty(9, 2, 16)), ("cache_seqlens", [9]), ("cu_seqlens_q", [0, 9]), ("exchange", "gather"),
                        ("results", "heads"), ("rope_theta", 1e4), ("seqused_q", torch.tensor([9]))):
        with pytest.raises(longspan.UnsupportedError, match=name):
            longspan.attend(q, q, q, **{name: value})
    with pytest.raises(longspan.UnsupportedError, match="causal"):
        longspan.attend(q, q, q, causal=[True])
    part = longspan.shard(torch.randn(9, 2, 16), rank=0, ranks=2).requires_grad_()
    with pytest.raises(longspan.InputError, match="comm is"):
        longspan.attend(part, part, part)


def test_only_what_is_asked_for():
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    k.requires_grad_()
    out, lse = lt.scaled_dot_product_attention(q, k, v, return_lse=True)
    assert out.requires_grad and lse.requires_grad
    once, = torch.autograd.grad(lse.sum(), k, retain_graph=True)  # out is not used
    both, = torch.autograd.grad(out.sum() + lse.sum(), k)
    assert once.abs().sum() > 0 and not torch.equal(once, both) and q.grad is None
    with torch.no_grad():
        assert not lt.scaled_dot_product_attention(q, k, v).requires_grad


def test_compiled():
    q, k, v = (torch.randn(2, 4, 20, 16, requires_grad=True) for _ in range(3))

    def call(q, k, v):
        return lt.scaled_dot_product_attention(q * 2, k, v, is_causal=True).tanh()

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    dout = torch.randn(2, 4, 20, 16)
    for found, right in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v), dout),
                            torch.autograd.grad(call(q, k, v), (q, k, v), dout)):
        torch.testing.assert_close(found, right)


def test_operators():
    """torch's own checks of the schema, the fakes and the rule."""
    q, k, v = (torch.randn(1, 9, 2, 16, requires_grad=True) for _ in range(3))
    name = lt._groups.name_of(None, None, DEVICE)
    sinks = torch.randn(2, requires_grad=True)
    for terms in (NO_TERMS, (sinks, *NO_TERMS[1:])):
        torch.library.opcheck(OPS.attend_train.default, (q, k, v, *terms, name), dict(causal=True))
    torch.library.opcheck(OPS.attend_train.default, (q, k, v, *NO_TERMS, name), dict(causal=True, heads_first=True))
    for first in (False, True):
        with torch.no_grad():
            out, lse, counts = OPS.attend_train(q, k, v, *NO_TERMS, name, heads_first=first)
        torch.library.opcheck(OPS.attend_backward.default, tuple(t.detach() for t in (out, lse, q, k, v, out, lse))
                              + NO_TERMS + (False, False, counts, name), dict(heads_first=first))


def test_checkpoint_accumulation_and_autocast():
    q, k, v = (torch.randn(1, 2, 30, 16, requires_grad=True) for _ in range(3))

    def call(q, k, v):
        return lt.scaled_dot_product_attention(q, k, v, is_causal=True)

    right = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    kept = torch.autograd.grad(checkpoint(call, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
    for found, wanted in zip(kept, right):
        assert torch.equal(found, wanted)
    for _ in range(2):
        call(q, k, v).square().sum().backward()
    for t, wanted in zip((q, k, v), right):
        torch.testing.assert_close(t.grad, 2 * wanted)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = call(q, k, v)
    assert out.dtype == torch.bfloat16
    dq, = torch.autograd.grad(out.float().square().sum(), q)
    assert dq.dtype == torch.float32
    torch.testing.assert_close(dq, right[0], rtol=0.1, atol=0.1)


def test_a_checkpoint_may_compute_again_by_the_other_way():
    """Operators are called where a mode observes them, in forward or only in backward."""
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(1, 2, 30, 16)

    def block(x):
        sinks = x.mean((0, 2, 3))
        return lt.scaled_dot_product_attention(x, x + 1, x.sin(), is_causal=True, sinks=sinks)

    def gradient(forward, backward):
        own = x.clone().requires_grad_()
        with forward:
            out = checkpoint(block, own, use_reentrant=False)
        with backward:
            return torch.autograd.grad(out.square().sum(), own)[0]

    right = gradient(contextlib.nullcontext(), contextlib.nullcontext())
    for mode in (lambda: FlopCounterMode(display=False), lambda: torch.device(DEVICE), lambda: torch.profiler.profile()):
        assert torch.equal(gradient(mode(), contextlib.nullcontext()), right)
        assert torch.equal(gradient(contextlib.nullcontext(), mode()), right)


def test_nothing_to_differentiate():
    for shape in ((2, 2, 0, 16), (0, 2, 5, 16)):
        q, k, v = (torch.randn(*shape, requires_grad=True) for _ in range(3))
        grads = torch.autograd.grad(lt.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
        assert all(one.shape == shape for one in grads)


def test_refusals():
    q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
    dq, = torch.autograd.grad(lt.scaled_dot_product_attention(q, k, v).sum(), q)
    with pytest.raises(longspan.UnsupportedError, match="create_graph"):
        torch.autograd.grad(lt.scaled_dot_product_attention(q, k, v).sum(), q, create_graph=True)
    layer = lt.ContextParallelAttention(layout="interleaved")
    with pytest.raises(longspan.UnsupportedError, match="cache_seqlens"):
        layer(q, k, v, cache_seqlens=torch.tensor([9], dtype=torch.int32))
    with pytest.raises(longspan.UnsupportedError, match="torch.func"):
        torch.func.grad(lambda a: lt.scaled_dot_product_attention(a, k, v).sum())(q)
    out = lt.scaled_dot_product_attention(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = lt.scaled_dot_product_attention(q, k, v)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous", "interleaved:7"])
def test_ranks(torch_ranks, ranks, layout):
    torch_ranks.values(ranks, jobs.gradients_of_a_call, layout)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_attend_on_ranks(torch_ranks, ranks):
    torch_ranks.values(ranks, jobs.gradients_of_attend)


@pytest.mark.parametrize("ranks", [2, 3])
def test_replicated_rows(torch_ranks, ranks):
    torch_ranks.values(ranks, jobs.gradients_of_replicated_rows)


@pytest.mark.parametrize("strategy", ["auto", "gather-kv", "ring-kv", "heads", "ring-q", "gather-states", "scatter-states"])
@pytest.mark.parametrize("layout", ["zigzag", "interleaved:7"])
def test_a_batch_goes_back_at_once(torch_ranks, strategy, layout):
    torch_ranks.values(3, jobs.gradients_of_a_batch, layout, layout, strategy, False)
    if strategy.endswith("states"):
        torch_ranks.values(3, jobs.gradients_of_a_batch, layout, None, strategy, False)


@pytest.mark.parametrize("strategy", ["gather-kv", "ring-q", "gather-states"])
def test_a_batch_has_the_bits_of_its_sequences(torch_ranks, strategy):
    torch_ranks.values(2, jobs.gradients_of_a_batch, "contiguous", "contiguous", strategy, True)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_selective_checkpoint_runs_no_exchange_twice(torch_ranks, compiled):
    for found in torch_ranks.values(2, jobs.exchanges_of_checkpoints, compiled):
        received, asked = found["plain"]
        assert received > 0 and asked == 1  # of lengths: not again in backward
        assert found["selective"] == found["plain"]
        if not compiled:  # there torch chooses what it computes again
            assert found["full"][0] > received and found["full"][1] == 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_model_learns_the_same(torch_ranks, ranks):
    torch_ranks.values(ranks, jobs.training, "zigzag", False)


def test_a_checkpointed_model_learns_the_same(torch_ranks):
    torch_ranks.values(2, jobs.training, "zigzag", True)


@pytest.fixture(scope="module")
def pair():
    """Two ranks of their own, whose communicators end with errors."""
    from torch_ranks import TorchRanks

    made = TorchRanks(2)
    yield made
    assert made.end() == [0, 0]


@pytest.mark.more
@pytest.mark.parametrize("what, named", [("batch", "'number of sequences'"), ("heads", "'heads'"), ("dim", "'head_dim'"),
                                         ("type", "q.dtype")])
def test_ranks_whose_shapes_differ(pair, what, named):
    for name, text, took in pair.values(2, jobs.shapes_differ, what, 4.0):
        assert name == "UsageError" and named in text and "rank 1 has" in text and took < 10, text


@pytest.mark.more
def test_ranks_whose_backwards_differ(pair):
    for name, text, took in pair.values(2, jobs.gradients_differ, 4.0):
        assert name == "UsageError" and "'softcap' differs between ranks" in text and took < 10, text


@pytest.mark.more
def test_a_backward_that_one_rank_never_calls(pair):
    (name, text, took), nothing = pair.values(2, jobs.backward_alone)
    assert name == "RankError" and "ank 1" in text and took < 10, text
    assert nothing is None


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=25)
def test_any_shape_and_stride(data):
    draw = data.draw
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    tokens, dim, value_dim = draw(st.integers(1, 40)), draw(st.integers(1, 24)), draw(st.integers(1, 24))

    def tensor(heads, columns):
        made = torch.randn(batch, tokens, heads, columns, dtype=WIDE)
        made = made.transpose(1, 2) if draw(st.booleans()) else made.transpose(1, 2).contiguous()
        if draw(st.booleans()):
            made = torch.stack([made, made], -1)[..., 1]  # every second element
        return made.requires_grad_()

    inputs = tensor(kv_heads * group, dim), tensor(kv_heads, dim), tensor(kv_heads, value_dim)
    causal = draw(st.booleans())
    out = lt.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
    right = reference(*inputs, is_causal=causal)
    dout = torch.randn(1, 1, 1, 1, dtype=WIDE).expand_as(right)
    for found, wanted in zip(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(right, inputs, dout)):
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)


def test_a_model_of_transformers():
    """The gradients of its weights are those with transformers' own attention, also of a padded batch."""
    transformers = pytest.importorskip("transformers")
    importlib.import_module("longspan.hf")  # makes the attention "longspan" known
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32))
    ids, mask = torch.randint(0, 32, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0  # padding on the left
    for given in (None, mask):
        gradients = {}
        for name in ("eager", "longspan"):
            model.set_attn_implementation(name)
            model.zero_grad()
            logits = model(ids, attention_mask=given).logits
            seen = logits if given is None else logits[mask.bool()]
            seen.square().mean().backward()
            gradients[name] = [p.grad.clone() for p in model.parameters()]
        for found, right in zip(gradients["longspan"], gradients["eager"]):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)
