"""Grids of the tests that other projects have for attention and its backward: their parameters, on our functions of their
names, judged by their bounds. A reference in fp32 stands beside torch in the tensors' own type: the error of ours is at
most so many times torch's."""

import itertools
import random
import warnings

import longspan
import longspan.torch as lt
import numpy as np
import torch
from device import DEVICE
from longspan import flash_attn as fa
from test_dropout import kept

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
GENERATOR = torch if DEVICE == "cpu" else torch.cuda


def plain(q, k, v, *, causal=False, upper_left=False, window=(-1, -1), softcap=0.0, slopes=None, scale=None, dropout=None):
    """[batch, heads, tokens, dim] in torch's operations, in the type of q. slopes [batch, heads]; dropout (p, seed, number
    of the first sequence, position of the first key)."""
    group, (tokens, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ (k * (q.shape[-1] ** -0.5 if scale is None else scale)).transpose(-1, -2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(tokens)[:, None] + (0 if upper_left else keys - tokens)
    j = torch.arange(keys)[None]
    if slopes is not None:
        scores = scores - (slopes[:, :, None, None] * (i - j).abs()).to(scores.dtype)
    seen = torch.ones(tokens, keys, dtype=torch.bool)
    if causal:
        seen &= j <= i
    if window[0] >= 0:
        seen &= i - j <= window[0]
    if window[1] >= 0 and not causal:
        seen &= j - i <= window[1]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    weights = torch.where(seen.any(-1, keepdim=True), weights, 0)
    if dropout is not None:
        p, (seed, offset), sequence, first = dropout
        rows = np.arange(tokens) + first + (0 if upper_left else keys - tokens)
        mask = np.stack([[kept(p, seed, offset, sequence + b, h, rows, np.arange(keys) + first) for h in range(q.shape[1])]
                         for b in range(q.shape[0])])
        weights, v = weights * torch.from_numpy(mask).to(q.device), v / (1 - p)
    return weights @ v


class Judge:
    """What ours, torch in the same type, and the reference gave: out, and a gradient of each tensor."""

    def __init__(self, ours, reference, tensors, dout=None):
        high = F64 if tensors[0].dtype == F32 else F32
        low = [t.detach().clone().requires_grad_() for t in tensors]
        wide = [t.detach().to(high).requires_grad_() for t in tensors]
        out, by_torch, right = ours(*tensors), reference(*low), reference(*wide)
        assert out.dtype == tensors[0].dtype and out.shape == right.shape
        dout = torch.randn_like(right) if dout is None else dout
        made = [[one, *torch.autograd.grad(one, leaves, dout.to(one.dtype))]
                for one, leaves in ((out, tensors), (by_torch, low), (right, wide))]
        self.made = [[t.detach().to(high) for t in each] for each in made]

    def within(self, *factors, more=0.0, relative=0.0, least=0.0):
        """The greatest error is at most a factor times torch's, or times `least`: that of out, and of each gradient."""
        for n, (found, low, right) in enumerate(zip(*self.made)):
            assert torch.isfinite(found).all()
            bound = factors[min(n, len(factors) - 1)] * (low - right).abs().max().clamp(min=least) + more
            error = ((found - right).abs() - relative * right.abs()).max()
            assert error <= bound, f"{('out', 'first', 'second', 'third')[n]}: the error is {error:.3g}, at most {bound:.3g} is wanted"


def seeded(call):
    """(what the call returns, the seed of dropout that it drew from torch's generator)."""
    state = GENERATOR.get_rng_state()
    seed = torch.randint(2 ** 63 - 1, (2,), dtype=torch.int64).tolist()
    GENERATOR.set_rng_state(state)
    return call(), seed


# ---- flash-attention: tests/test_flash_attn.py -----------------------------------------------------------------------

DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
PAIRS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
         (2048, 2048)]
SHORT = [(1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (1023, 1024)]
SPLIT = [(3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000), (16, 100000), (128, 128)]
BOOLS = [False, True]
TYPES = [F16, BF16]


def flash_case(draw, *, lengths, dtype, dim, causal=False, local=False, alibi=False, deterministic=False, dropout_p=0.0,
               softcap=0.0, mha_type="mha", packed=None, varlen=False, heads=6, batch=4, swap=False, limits=(2, 3), more=0.0,
               paged=None, transposed=False):
    """One case: the tensors, the call, and its judgement. `packed`: "qkv", "kv" or None."""
    tokens, keys = reversed(lengths) if swap else lengths
    heads = heads if not softcap else 4
    kv_heads = {"mha": heads, "mqa": 1, "gqa": 2}[mha_type]
    window = (draw.randrange(keys), draw.randrange(keys)) if local else (-1, -1)
    of_q, of_k = [tokens] * batch, [keys] * batch
    if varlen:
        of_k = [draw.randint(max(1, keys - 20), keys) for _ in range(batch)]
        of_q = of_k if packed == "qkv" else [draw.randint(max(1, tokens - 20), tokens) for _ in range(batch)]
    q = torch.randn(sum(of_q), heads, dim, dtype=dtype) * (softcap or 1)
    k, v = torch.randn(2, sum(of_k), kv_heads, dim, dtype=dtype)
    slopes = torch.rand(batch, heads) * 0.3 if alibi else None
    starts = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in (of_q, of_k)]
    given = dict(dropout_p=dropout_p, causal=causal, softcap=softcap, alibi_slopes=slopes, deterministic=deterministic,
                 window_size=torch.tensor(window) if local else window)
    seeds = []

    def ours(*tensors):
        name, args = "", list(tensors)
        if packed:
            name = f"_{packed}packed"
        elif paged:
            args = [tensors[0], *of_pages[:2]]
        if varlen:
            name, ends = "_varlen" + name, (starts[:1], max(of_q)) if packed == "qkv" else (starts, max(of_q), max(of_k))
            args += [*ends[0], *ends[1:]]
        else:
            args = [t.unflatten(0, (batch, -1)) for t in args]
        more_args = dict(block_table=of_pages[2]) if paged else {}
        out, seed = seeded(lambda: getattr(fa, f"flash_attn{name}_func")(*args, **given, **more_args))
        seeds.append(seed)
        out = out if varlen else out.flatten(0, 1)
        return out.unflatten(0, (batch, -1)).transpose(0, 1) if transposed else out

    def reference(*tensors):
        if packed == "qkv":
            tensors = tensors[0].unbind(1)
        elif packed == "kv":
            tensors = tensors[0], *tensors[1].unbind(1)
        one_sequence = varlen and packed == "qkv" and not alibi  # documents of one sequence
        outs, first = [], 0
        for b, parts in enumerate(zip(*(t.split(n) for t, n in zip(tensors, (of_q, of_k, of_k))))):
            dropout = (dropout_p, seeds[-1], *((0, first) if one_sequence else (b, 0))) if dropout_p else None
            outs.append(plain(*(t[None].transpose(1, 2) for t in parts), causal=causal, window=window, softcap=softcap,
                              slopes=slopes if slopes is None else slopes[b:b + 1], dropout=dropout)[0].transpose(0, 1))
            first += len(parts[1])
        out = torch.cat(outs)
        return out.unflatten(0, (batch, -1)).transpose(0, 1) if transposed else out

    tensors = {"qkv": lambda: [torch.stack([q, k, v], 1)], "kv": lambda: [q, torch.stack([k, v], 1)], None: lambda: [q, k, v]}
    tensors = [t.requires_grad_() for t in tensors[packed]()]
    dout = torch.randn(tokens, 2 * batch, heads, dim)[:, ::2] if transposed else None  # of odd strides
    if paged:
        of_pages = pages_of(draw, k, v, of_k, paged)
        with torch.no_grad():
            right, low = reference(*(t.detach().float() for t in tensors)), reference(*tensors)
            assert (ours(*(t.detach() for t in tensors)) - right).abs().max() <= limits[0] * (low - right).abs().max() + more
        return
    Judge(ours, reference, tensors, dout).within(*limits, more=more)


def pages_of(draw, k, v, lengths, page):
    """(pages of keys, pages of values, table): pages in any order, full of NaN where there is no key."""
    columns = [-(-n // page) for n in lengths]
    order = draw.sample(range(sum(columns) + 3), sum(columns))
    pages = [torch.full((len(order) + 3, page, *t.shape[1:]), torch.nan, dtype=t.dtype) for t in (k, v)]
    table, first = torch.zeros(len(lengths), max(columns), dtype=torch.int32), 0
    for b, n in enumerate(lengths):
        for column in range(columns[b]):
            table[b, column], used = order.pop(), min(page, n - column * page)
            for of, t in zip(pages, (k, v)):
                of[table[b, column], :used] = t[first:first + used]
            first += used
    return *pages, table


def overflow_case(draw, *, lengths, dtype, dim, causal):
    """Large scores of few keys: nothing behind the keys may reach a gradient."""
    q = (5 * torch.randn(2, lengths, 5, dim)).to(dtype).requires_grad_()
    k, v = ((3 * torch.randn(2, lengths, 5, dim)).to(dtype).requires_grad_() for _ in range(2))

    def reference(*tensors):
        return plain(*(t.transpose(1, 2) for t in tensors), causal=causal).transpose(1, 2)

    Judge(lambda *t: fa.flash_attn_func(*t, causal=causal), reference, [q, k, v]).within(2, 5, more=1e-3)


def varlen_overflow_case(draw, *, lengths, dtype, dim, causal):
    rows, keys = (torch.tensor(starts, dtype=torch.int32) for starts in lengths)
    q, k, v = ((3 * torch.randn(int(n[-1]), 5, dim)).to(dtype).requires_grad_() for n in (rows, keys, keys))
    out = fa.flash_attn_varlen_func(q, k, v, rows, keys, 256, 3, causal=causal)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)))


def repeats_case(draw, *, lengths, dtype, dim, causal, local=False, swap=False, varlen=False, heads=9, batch=4, dropout_p=0.0,
                 times=50):
    """Every backward of one forward has the same bits; without dropout so has every forward."""
    tokens, keys = reversed(lengths) if swap else lengths
    window = (draw.randrange(keys), draw.randrange(keys)) if local else (-1, -1)
    q, k, v = (torch.randn(batch * n, heads, dim, dtype=dtype, requires_grad=True) for n in (tokens, keys, keys))
    starts = [torch.arange(batch + 1, dtype=torch.int32) * n for n in (tokens, keys)]

    def call():
        if varlen:
            return fa.flash_attn_varlen_func(q, k, v, *starts, tokens, keys, causal=causal, window_size=window)
        parts = (t.unflatten(0, (batch, -1)) for t in (q, k, v))
        return fa.flash_attn_func(*parts, dropout_p, causal=causal, window_size=window, deterministic=True)

    state = GENERATOR.get_rng_state()
    out = call()
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(times):
        for one, again in zip(first, torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)):
            assert torch.equal(one, again)
    GENERATOR.set_rng_state(state)
    assert torch.equal(call(), out)


# ---- PyTorch: test/test_transformers.py ------------------------------------------------------------------------------

def sdpa_case(draw, *, lengths, dtype, dim, causal, batch, dropout_p=0.0, l1=False, limits=(1, 4, 2, 2), heads=4):
    """Fused attention beside the maths, with inputs of [0, 1)."""
    tokens, keys = lengths
    tensors = [torch.rand(batch, heads, n, dim, dtype=dtype, requires_grad=True) for n in (tokens, keys, keys)]
    scale, seed = 1 / dim if l1 else None, torch.tensor([draw.randrange(2 ** 62), draw.randrange(2 ** 62)])

    def ours(q, k, v):
        return lt.scaled_dot_product_attention(q, k, v, is_causal=causal, causal_alignment="upper_left" if causal else None,
                                               scale=scale, dropout_p=dropout_p, dropout_seed=seed if dropout_p else None)

    def reference(q, k, v):
        return plain(q, k, v, causal=causal, upper_left=causal, scale=scale,
                     dropout=(dropout_p, seed.tolist(), 0, 0) if dropout_p else None)

    if dtype != F32 and dim % 8:
        limits = (3, *limits[1:])
    relative, least = {F16: (1e-3, 1e-3), BF16: (1.6e-2, 1e-3), F32: (1.3e-6, 1e-5)}[dtype]
    Judge(ours, reference, tensors, torch.rand(batch, heads, tokens, dim)).within(*limits, relative=relative, least=least)


def sdpa_cpu_case(draw, *, lengths, dtype, batch, heads, dim, causal, train):
    """Views of one packed tensor, beside the maths in fp32."""
    x = torch.randn(batch, lengths, 3 * heads * dim, dtype=dtype, requires_grad=train)
    wide = x.detach().to(F64 if dtype == F64 else F32).requires_grad_(train)

    def split(x):
        return (t.view(batch, lengths, heads, dim).transpose(1, 2) for t in x.split(heads * dim, 2))

    out = lt.scaled_dot_product_attention(*split(x), is_causal=causal)
    right = plain(*split(wide), causal=causal)
    relative, absolute = {BF16: (5e-2, 5e-2), F16: (1e-2, 1e-2)}.get(dtype, (5e-6, 1e-5))
    torch.testing.assert_close(out.to(right.dtype), right, rtol=relative, atol=absolute)
    if train:
        out.sum().backward()
        right.sum().backward()
        torch.testing.assert_close(x.grad.to(right.dtype), wide.grad, rtol=relative, atol=absolute)


def causal_variant_case(draw, *, lengths, lower_right, compiled):
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    batch, heads, tokens, keys, dim = lengths
    bias = (causal_lower_right if lower_right else causal_upper_left)(tokens, keys)
    tensors = [torch.rand(batch, heads, n, dim, dtype=F16, requires_grad=True) for n in (tokens, keys, keys)]

    def call(q, k, v):
        return lt.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, wide = call(*tensors), [t.detach().float().requires_grad_() for t in tensors]
    right = plain(*wide, causal=True, upper_left=not lower_right)
    torch.testing.assert_close(out.float(), right, rtol=1e-3, atol=1e-3)
    dout = torch.randn_like(right)
    for one, other in zip(torch.autograd.grad(out, tensors, dout.half()), torch.autograd.grad(right, wide, dout)):
        torch.testing.assert_close(one.float(), other, rtol=5e-3, atol=5e-3)


def masked_case(draw, *, lengths, dtype):
    """What has no counterpart is refused by its name: a mask of the caller's own, and nested tensors."""
    q = torch.randn(2, 4, lengths, 16, dtype=dtype, requires_grad=True)
    lt.scaled_dot_product_attention(q, q, q, attn_mask=torch.randn(lengths, lengths, dtype=dtype))


def nested_case(draw, *, lengths, dtype):
    with warnings.catch_warnings(action="ignore"):  # nested tensors are a prototype
        q = torch.nested.nested_tensor([torch.randn(4, n, 16, dtype=dtype) for n in lengths], requires_grad=True)
    lt.scaled_dot_product_attention(q, q, q)


LENGTHS_Q = [4, 8, 64, 143, 256, 512, 1024, 2048]
LENGTHS_K = [4, 8, 64, 128, 256, 587, 1024, 2048]
EFFICIENT = [4, 8, 64, 128, 256, 312, 512, 1024, 2048]

# name: the function of a case, lengths, options
GRIDS = {
    "flash_attn_qkvpacked": (flash_case, [(n, n) for n in (97, 128, 200, 384, 768, 1024, 1025, 2048)], dict(
        packed=["qkv"], heads=[9], limits=[(2, 2)], dtype=TYPES, deterministic=BOOLS, alibi=BOOLS, local=BOOLS, causal=BOOLS,
        dim=DIMS, dropout_p=[0.0, 0.17])),
    "flash_attn_varlen_qkvpacked": (flash_case, [(n, n) for n in (97, 128, 200, 257, 384, 512, 768, 1025, 2048)], dict(
        packed=["qkv"], varlen=[True], heads=[6], batch=[5], limits=[(2, 2)], dtype=TYPES, deterministic=BOOLS, alibi=BOOLS,
        local=BOOLS, causal=BOOLS, dim=[32, 59, 64, 80, 96, 128, 160, 192, 224, 256], dropout_p=[0.0, 0.17])),
    "flash_attn_output": (flash_case, PAIRS, dict(
        packed=["kv", None], dtype=TYPES, mha_type=["mha", "mqa", "gqa"], deterministic=BOOLS, alibi=BOOLS, local=BOOLS,
        causal=BOOLS, dim=[32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256], dropout_p=[0.0, 0.17], softcap=[0.0, 50.0])),
    "flash_attn_varlen_output": (flash_case, [(1, 147), *PAIRS], dict(
        packed=["kv", None], varlen=[True], dtype=TYPES, mha_type=["mha", "mqa", "gqa"], deterministic=BOOLS, alibi=BOOLS,
        local=BOOLS, causal=BOOLS, dim=[32, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256], dropout_p=[0.0, 0.17],
        softcap=[0.0, 50.0])),
    "flash_attn_causal": (flash_case, SHORT, dict(
        causal=[True], heads=[9], batch=[8], limits=[(2, 2)], more=[1e-5], dtype=TYPES, local=BOOLS, dim=DIMS, swap=BOOLS)),
    "flash_attn_varlen_causal": (flash_case, SHORT, dict(
        causal=[True], varlen=[True], heads=[9], batch=[8], limits=[(2, 2)], more=[1e-5], dtype=TYPES, local=BOOLS, dim=DIMS,
        swap=BOOLS, paged=[None, 256, 512])),
    "flash_attn_splitkv": (flash_case, SPLIT, dict(
        heads=[12], batch=[1], limits=[(2, 2)], more=[2e-4], dtype=TYPES, deterministic=BOOLS, alibi=BOOLS, local=BOOLS,
        causal=BOOLS, dim=DIMS, swap=BOOLS)),
    "flash_attn_bwd_overflow": (overflow_case, [1, 2, 5, 17, 128], dict(dtype=[F16], causal=BOOLS, dim=[16, 32, 64])),
    "flash_attn_bwd_transpose": (flash_case, [(n, n) for n in (97, 128, 200, 256)], dict(
        transposed=[True], heads=[2], batch=[5], limits=[(2, 2)], dtype=TYPES, causal=BOOLS, dim=[64, 128])),
    "flash_attn_bwd_varlen_overflow": (varlen_overflow_case, [([0, 76, 110, 256], [0, 1, 2, 3])], dict(
        dtype=[F16], causal=BOOLS, dim=[16, 32, 64])),
    "flash_attn_deterministic": (repeats_case, SHORT, dict(
        times=[50], heads=[9], dtype=TYPES, local=BOOLS, causal=BOOLS, dim=DIMS, swap=BOOLS)),
    "flash_attn_varlen_deterministic": (repeats_case, SHORT, dict(
        times=[50], varlen=[True], heads=[6], batch=[2], dtype=TYPES, local=BOOLS, causal=BOOLS, dim=DIMS, swap=BOOLS)),
    "flash_attn_race_condition": (repeats_case, [(1, 239), (239, 1), (3, 799), (799, 3), (1024, 128), (97, 97), (128, 128), (200, 200),
                                                 (256, 256), (257, 257), (384, 384), (512, 512), (768, 768), (1024, 1024)], dict(
        heads=[4], batch=[60], times=[3], dtype=[F16], causal=BOOLS, dim=DIMS, dropout_p=[0.0, 0.17])),
    "torch_sdpa_cpu": (sdpa_cpu_case, [267, 1030], dict(
        dtype=[F64, F32, BF16, F16] if DEVICE == "cpu" else [F32, BF16, F16], batch=[2, 12], heads=[1, 3], dim=[8, 16], causal=BOOLS, train=BOOLS)),
    "torch_sdpa_flash": (sdpa_case, list(itertools.product(LENGTHS_Q, LENGTHS_K)), dict(
        batch=[1, 8], dim=[8, 16, 21, 32, 64, 72, 96, 128, 160, 192, 203, 256], causal=BOOLS, dropout_p=[0.0, 0.22, 0.48],
        dtype=TYPES, l1=BOOLS)),
    "torch_sdpa_efficient": (sdpa_case, list(itertools.product(EFFICIENT, EFFICIENT)), dict(
        batch=[1, 8], dim=[8, 16, 32, 64, 72, 96, 128], causal=BOOLS, dropout_p=[0.0, 0.22], dtype=[F16, BF16, F32],
        l1=BOOLS)),
    "torch_causal_variants": (causal_variant_case, [(16, 16, 128, 128, 16), (16, 16, 128, 256, 32), (16, 16, 256, 128, 32),
                                                    (1, 1, 23, 56, 15)], dict(lower_right=BOOLS, compiled=BOOLS)),
    "torch_attn_mask": (masked_case, [11, 64], dict(dtype=[F32, BF16, F16])),
    "torch_nested": (nested_case, [(32, 7), (256, 11)], dict(dtype=[F16])),
}
REFUSED = {"torch_attn_mask": "attn_mask", "torch_nested": "nested"}  # whole grids, and the argument that is named


def skips(name, lengths, options):
    """What their own tests skip."""
    if options.get("softcap") and options.get("dropout_p"):
        return True
    if name == "torch_sdpa_flash" and options["causal"] and lengths[0] != lengths[1]:
        return True
    return name == "torch_causal_variants" and options["lower_right"] and lengths[2] > lengths[3]


def combinations(name):
    """Every combination of the options."""
    options = GRIDS[name][2]
    return [dict(zip(options, values)) for values in itertools.product(*options.values())]


def size(name):
    """(cases of their grid, those that they skip)."""
    cases = [skips(name, lengths, options) for lengths in GRIDS[name][1] for options in combinations(name)]
    return len(cases), sum(cases)


def longest(lengths):
    if isinstance(lengths, int):
        return lengths
    return max(n for n in np.ravel(lengths) if n is not None)


def cost(lengths, options):
    """Scores of a case, about what it takes."""
    numbers = [lengths] * 2 if isinstance(lengths, int) else [longest(n) for n in lengths]
    if len(numbers) == 5:
        return numbers[0] * numbers[1] * numbers[2] * numbers[3] * numbers[4]
    return numbers[0] * numbers[1] * options.get("batch", 4) * options.get("heads", 6) * options.get("dim", 64) * options.get("times", 1)


def cases(name, count, most, seed=0):
    """`count` combinations of the options (all of them if None), each with lengths that are drawn, of at most `most` work."""
    draw = random.Random(f"{name} {seed}")
    chosen = combinations(name)
    if count is not None:
        chosen = draw.sample(chosen, min(len(chosen), count))
    for options in chosen:
        fitting = [n for n in GRIDS[name][1] if not skips(name, n, options)]
        fitting = [n for n in fitting if cost(n, options) <= most] or sorted(fitting, key=lambda n: cost(n, options))[:1]
        if fitting:
            yield draw.choice(fitting), options


def run(name, lengths, options, seed=0):
    """Raises what the case raises."""
    torch.manual_seed(seed)
    GRIDS[name][0](random.Random(seed), lengths=lengths, **options)


def main():
    """python3 peer_grids.py [COUNT [MOST [NAMES...]]]: runs the grids, and prints what passed, and what was refused, why."""
    import collections
    import sys
    import time

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    most = float(sys.argv[2]) if len(sys.argv) > 2 else 3e8
    for name in sys.argv[3:] or GRIDS:
        found, began = collections.Counter(), time.monotonic()
        for lengths, options in cases(name, count or None, most):
            try:
                run(name, lengths, options)
                found["passed"] += 1
            except longspan.UnsupportedError as error:
                found[f"refused: {str(error)[:60]}"] += 1
            except Exception as error:
                found["FAILED"] += 1
                print(f"FAILED {name} {lengths} {options}: {type(error).__name__} {str(error)[:300]}", flush=True)
        print(f"{name}: of {size(name)} {dict(found)} in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
