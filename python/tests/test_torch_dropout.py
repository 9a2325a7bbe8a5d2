"""Dropout under torch's autograd: the mask of the guide, seeds of torch's generator, and ranks."""

import pytest

pytest.importorskip("torch")

import longspan
import longspan.torch as lt
import torch
import torch_jobs as jobs
from device import DEVICE
from test_dropout import kept
from torch.utils.checkpoint import checkpoint

WIDE, EXACT = (torch.float64, 1e-11) if DEVICE == "cpu" else (torch.float32, 2e-4)
only_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="of fp64, or of the CPU's generator")


def call(q, k, v, **options):
    return lt.scaled_dot_product_attention(q, k, v, **dict(dict(is_causal=True, dropout_p=0.3), **options))


def rows(*shape, dtype=WIDE):
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3)]


def test_gradients_are_those_of_torch():
    q, k, v = rows(2, 2, 20, 16)
    seed = torch.tensor([5, 6])
    z = torch.stack([torch.stack([torch.from_numpy(kept(0.3, 5, 6, b, h, range(20), range(20))) for h in range(2)])
                     for b in range(2)]).to(DEVICE, WIDE) / 0.7
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / 4).masked_fill(hidden, -torch.inf)
    right, lse = (scores.softmax(-1) * z) @ v, scores.logsumexp(-1)
    out, found_lse = call(q, k, v, dropout_seed=seed, return_lse=True)
    torch.testing.assert_close(out, right, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found_lse, lse, rtol=EXACT, atol=EXACT)
    dout, dlse = torch.randn_like(right), torch.randn_like(lse)
    wanted = torch.autograd.grad((right * dout).sum() + (lse * dlse).sum(), (q, k, v))
    for one, other in zip(torch.autograd.grad((out * dout).sum() + (found_lse * dlse).sum(), (q, k, v)), wanted):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@only_cpu
def test_finite_differences():
    q, k, v = rows(1, 2, 7, 8)
    seed = torch.tensor([1])
    assert torch.autograd.gradcheck(lambda *a: call(*a, dropout_seed=seed), (q, k, v))


@only_cpu
def test_seeds_are_of_torchs_generator():
    q, k, v = rows(1, 2, 30, 16, dtype=torch.float32)
    with torch.no_grad():
        torch.manual_seed(1)
        first, second = call(q, k, v), call(q, k, v)
        state = torch.get_rng_state()
        third = call(q, k, v)
        torch.manual_seed(1)
        assert torch.equal(call(q, k, v), first) and torch.equal(call(q, k, v), second)
        torch.set_rng_state(state)  # resumed
        assert torch.equal(call(q, k, v), third)
        assert not torch.equal(first, second)
        assert torch.equal(call(q, k, v, dropout_p=0.0), call(q, k, v, dropout_p=0))


def test_checkpoints_repeat_the_mask():
    q, k, v = rows(1, 2, 30, 16, dtype=torch.float32)
    torch.manual_seed(1)
    right = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(1)
    again = torch.autograd.grad(checkpoint(call, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
    assert all(torch.equal(one, other) for one, other in zip(again, right))


def test_compiled():
    q, k, v = rows(1, 2, 30, 16, dtype=torch.float32)
    seed = torch.tensor([5, 6])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, right = compiled(q, k, v, dropout_seed=seed), call(q, k, v, dropout_seed=seed)
    assert torch.equal(found, right)
    for one, other in zip(torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(right.sum(), (q, k, v))):
        assert torch.equal(one, other)
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


def test_operators():
    q, k, v = (torch.randn(1, 9, 2, 16, requires_grad=True) for _ in range(3))
    name = lt._groups.name_of(None, None, DEVICE)
    torch.library.opcheck(torch.ops.longspan.attend_train.default, (q, k, v, *(None,) * 6, torch.tensor([5]), name),
                          dict(dropout_p=0.5))
    torch.library.opcheck(torch.ops.longspan.seed_of_rank_0.default, (torch.tensor([5, 6]), name))


def test_a_layer_trains_with_it_and_evaluates_without():
    layer = lt.ContextParallelAttention(dropout_p=0.5, causal=True)
    plain = lt.ContextParallelAttention(causal=True)
    q, k, v = rows(1, 2, 30, 16, dtype=torch.float32)
    assert "dropout_p=0.5" in repr(layer) and "dropout" not in repr(plain)
    assert not torch.equal(layer(q, k, v), plain(q, k, v))
    assert torch.equal(layer(q, k, v, dropout_seed=torch.tensor([3])), layer(q, k, v, dropout_seed=torch.tensor([3])))
    assert torch.equal(layer.eval()(q, k, v), plain(q, k, v))


def test_inside_context_parallel():
    q, k, v = rows(1, 2, 30, 16, dtype=torch.float32)
    torch.manual_seed(1)
    right = call(q, k, v)
    torch.manual_seed(1)
    with lt.context_parallel(None, buffers=[], buffer_seq_dims=[]):
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, None, 0.3, True)
    torch.testing.assert_close(found, right)


def test_bad_input():
    q, k, v = rows(1, 2, 9, 16, dtype=torch.float32)
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(longspan.InputError, match="dropout_p is"):
            call(q, k, v, dropout_p=p)
        with pytest.raises(longspan.InputError, match="dropout_p is"):
            lt.ContextParallelAttention(dropout_p=p)
    for p in ("0.5", None, True):
        with pytest.raises(TypeError, match="dropout_p is of type"):
            call(q, k, v, dropout_p=p)
    with pytest.raises(TypeError, match="dropout_seed is of type 'int'"):
        call(q, k, v, dropout_seed=5)
    for seed in (torch.tensor([1.0]), torch.tensor(1), torch.tensor([1, 2, 3]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises(longspan.InputError, match="dropout_seed is"):
            call(q, k, v, dropout_seed=seed)
    with pytest.raises(longspan.InputError, match="dropout_seed lies on meta"):
        call(q, k, v, dropout_seed=torch.tensor([1], device="meta"))


@only_cpu
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout, batch", [("zigzag", 1), ("striped", 2), ("contiguous", 2), ("interleaved:7", 1)])
def test_ranks(torch_ranks, ranks, layout, batch):
    torch_ranks.values(ranks, jobs.dropout_of_a_call, layout, batch)
