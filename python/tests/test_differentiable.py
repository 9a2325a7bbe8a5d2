"""Hypothesis over what is differentiated: shapes, strides, types and options of longspan.attend, of scaled_dot_product_attention
and of flash-attention's functions, in [tokens, heads, dim] or with a batch, against torch's own operations in float64."""

import itertools
import os

import pytest

pytest.importorskip("torch")

import hypothesis
import hypothesis.strategies as st
import longspan
import longspan.torch as lt
import torch
from device import DEVICE
from longspan import flash_attn as fa
from peer_grids import plain

FULL = bool(os.environ.get("LONGSPAN_FULL_GRID"))
EXAMPLES = 1500 if FULL else 25
# of the greatest number of a tensor; of 16 bits a few roundings
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
TYPES = [t for t in BOUNDS if DEVICE == "cpu" or t != torch.float64]


def strided(draw, shape, dtype):
    """A tensor of this shape in one of many places in memory."""
    kind = draw(st.sampled_from(["dense", "permuted", "every second", "in the middle", "expanded", "packed"]))
    if kind == "permuted":
        order = draw(st.permutations(range(len(shape))))
        made = torch.randn([shape[d] for d in order], dtype=dtype).permute([order.index(d) for d in range(len(shape))])
    elif kind == "every second":
        made = torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., 1::2]
    elif kind == "in the middle":
        wide = torch.full([n + 3 for n in shape], torch.nan, dtype=dtype)
        made = wide[tuple(slice(1, 1 + n) for n in shape)]
        made.copy_(torch.randn(shape, dtype=dtype))
    elif kind == "expanded":
        which = draw(st.integers(0, len(shape) - 1))
        made = torch.randn([1 if d == which else n for d, n in enumerate(shape)], dtype=dtype).expand(shape)
    elif kind == "packed":
        made = torch.randn(*shape[:-2], 3, *shape[-2:], dtype=dtype).select(-3, 1)
    else:
        made = torch.randn(shape, dtype=dtype)
    assert made.shape == tuple(shape)
    return made


def compare(draw, ours, reference, tensors):
    """Out and the gradients of some of the tensors, for a dout of any strides."""
    learns = draw(st.lists(st.booleans(), min_size=len(tensors), max_size=len(tensors)).filter(any))
    leaves = [t.detach().requires_grad_(flag) for t, flag in zip(tensors, learns)]
    wide = [t.detach().double().requires_grad_(flag) for t, flag in zip(tensors, learns)]
    out, right = ours(*leaves), reference(*wide)
    dout = strided(draw, out.shape, out.dtype)
    found = [out.detach(), *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], dout)]
    wanted = [right.detach(), *torch.autograd.grad(right, [t for t in wide if t.requires_grad], dout.double())]
    bound = BOUNDS[tensors[0].dtype]
    for one, other in zip(found, wanted):
        assert one.shape == other.shape and one.dtype == tensors[0].dtype
        if other.numel():
            error, most = (one.double() - other).abs().max(), max(1.0, float(other.abs().max()))
            assert error <= bound * most, f"{float(error):.3g} of {most:.3g}"


def options_of(draw):
    window = draw(st.tuples(st.integers(-1, 20), st.integers(-1, 20)))
    return dict(causal=draw(st.booleans()), window=window, softcap=draw(st.sampled_from([0.0, 1.5])),
                scale=draw(st.sampled_from([None, 0.3])))


SIZES = st.fixed_dictionaries(dict(
    batch=st.integers(1, 3), kv_heads=st.integers(1, 3), group=st.integers(1, 3), tokens=st.integers(1, 60), keys=st.integers(1, 60),
    dim=st.integers(1, 40), value_dim=st.integers(1, 40), dtype=st.sampled_from(TYPES)))


def tensors_of(draw, size, batched, order="thd"):
    """q, k and v; `order` "thd": [tokens, heads, dim] each, "htd" the heads first."""
    made = []
    for n, heads, dim in ((size["tokens"], size["kv_heads"] * size["group"], size["dim"]), (size["keys"], size["kv_heads"], size["dim"]),
                          (size["keys"], size["kv_heads"], size["value_dim"])):
        shape = [n, heads, dim] if order == "thd" else [heads, n, dim]
        made.append(strided(draw, [size["batch"], *shape] if batched else shape, size["dtype"]))
    return made


def heads_first(function):
    """A reference of tensors in the order of longspan.attend."""
    def call(*tensors):
        whole = [(t if t.dim() == 4 else t[None]).transpose(1, 2) for t in tensors]
        out = function(*whole).transpose(1, 2)
        return out if tensors[0].dim() == 4 else out[0]

    return call


def check(function):
    """Runs function(draw) for many draws; the seed of numbers is drawn too."""
    @hypothesis.given(st.data(), st.integers(0, 2 ** 31))
    @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    def run(data, seed):
        torch.manual_seed(seed)
        function(data.draw)

    run()


def test_attend():
    def one(draw):
        size, batched, options = draw(SIZES), draw(st.booleans()), options_of(draw)
        tensors = tensors_of(draw, size, batched)
        compare(draw, lambda *t: longspan.attend(
            *t, causal=options["causal"], window_size=options["window"], softcap=options["softcap"], softmax_scale=options["scale"]),
            heads_first(lambda *t: plain(*t, **options)), tensors)

    check(one)


def test_scaled_dot_product_attention():
    def one(draw):
        size, batched, options = draw(SIZES), draw(st.booleans()), options_of(draw)
        upper = options["causal"] and draw(st.booleans())
        tensors = tensors_of(draw, size, batched, "htd")

        def reference(*t):
            out = plain(*(x if batched else x[None] for x in t), upper_left=upper, **options)
            return out if batched else out[0]

        if upper:  # windows count from the same positions
            options["window"] = (-1, -1)
        compare(draw, lambda *t: lt.scaled_dot_product_attention(
            *t, is_causal=options["causal"], causal_alignment="upper_left" if upper else "lower_right",
            window_size=options["window"], softcap=options["softcap"], scale=options["scale"], enable_gqa=True), reference, tensors)

    check(one)


def test_flash_attention():
    def one(draw):
        size, options = draw(SIZES), options_of(draw)
        tensors = tensors_of(draw, size, True)
        compare(draw, lambda *t: fa.flash_attn_func(
            *t, 0.0, options["scale"], options["causal"], options["window"], options["softcap"]),
            heads_first(lambda *t: plain(*t, **options)), tensors)

    check(one)


def test_packed_sequences():
    """Sequences of any lengths, some of them empty; one table of starts, or two."""
    def one(draw):
        size, options, alike = draw(SIZES), options_of(draw), draw(st.booleans())
        of_q = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
        of_k = of_q if alike else draw(st.lists(st.integers(0, 30), min_size=len(of_q), max_size=len(of_q)))
        hypothesis.assume(sum(of_q) and sum(of_k))
        tensors = tensors_of(draw, size | dict(tokens=sum(of_q), keys=sum(of_k)), False)
        rows = torch.tensor([0, *itertools.accumulate(of_q)], dtype=torch.int32)
        keys = rows if alike else torch.tensor([0, *itertools.accumulate(of_k)], dtype=torch.int32)

        def reference(*t):
            parts = zip(*(x.split(n) for x, n in zip(t, (of_q, of_k, of_k))))
            return torch.cat([heads_first(lambda *own: plain(*own, **options))(*own) for own in parts])

        compare(draw, lambda *t: fa.flash_attn_varlen_func(
            *t, rows, keys, max(of_q), max(of_k), 0.0, options["scale"], options["causal"], options["window"], options["softcap"]),
            reference, tensors)

    check(one)
