"""Jobs of the ranks of test_peer_grids.py: tests of ring-flash-attention and of PyTorch's context parallelism, on ours."""

import torch
import torch.nn.functional as F

import longspan
import longspan.torch as lt
from device import DEVICE
from longspan import ring_flash_attn as ring
from peer_grids import plain
from torch_jobs import mesh_of

sdpa_before = F.scaled_dot_product_attention  # a reference that was taken early


def numbers(seed, *shape, dtype="float32"):
    """The same on every rank, on any device."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(DEVICE, getattr(torch, dtype))


def own_of(rule, ranks, rank, starts):
    """f(whole) = this rank's tokens in dimension 0, as ring-flash-attention's tests deal them out."""
    def pick(whole):
        if rule == "llama3":
            return whole.chunk(ranks)[rank]
        parts = []
        for a, b in zip(starts, starts[1:]):
            if rule == "ring":
                parts.append(whole[a:b].chunk(ranks)[rank])
            elif rule == "stripe":
                parts.append(whole[a:b][rank::ranks])
            else:
                chunks = whole[a:b].chunk(2 * ranks)
                parts += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        return torch.cat(parts)

    return lambda whole: pick(whole.detach()).contiguous().clone()


def ring_case(group, rule, kind, varlen, starts, heads, kv_heads, dim, dtype, causal, window, slopes, compiled):
    """Out, lse and gradients of a rank's tokens are those of the whole. Their tests print the differences; here the errors are
    at most twice those of torch in the same type, plus those of fp32."""
    ranks, rank, total = group.size(), group.rank(), starts[-1]
    q, k, v = (numbers(n, total, count, dim, dtype=dtype) for n, count in ((1, heads), (2, kv_heads), (3, kv_heads)))
    dout = numbers(4, total, heads, dim, dtype=dtype)
    slopes = numbers(5, heads).abs() if slopes else None

    def whole(*tensors):
        outs = [plain(*(t[None, a:b].transpose(1, 2) for t in tensors), causal=causal, window=window,
                      slopes=None if slopes is None else slopes[None])[0].transpose(0, 1) for a, b in zip(starts, starts[1:])]
        return torch.cat(outs)

    own = own_of(rule, ranks, rank, starts)
    results = []
    for high in (True, False):
        leaves = [(t.float() if high else t).detach().requires_grad_() for t in (q, k, v)]
        out = whole(*leaves)
        results.append([own(t).float() for t in (out, *torch.autograd.grad(out, leaves, dout.to(out.dtype)))])
    right, low = results

    name = f"{ring_name(rule)}_flash_attn{'_varlen' if varlen else ''}{'' if kind == 'func' else '_' + kind}_func"
    function = getattr(ring, name)
    if compiled:
        function = torch.compile(function)
    leaves = [own(t).requires_grad_() for t in (q, k, v)]
    tensors = leaves
    if kind == "qkvpacked":
        tensors = [torch.stack(leaves, 1)]
    elif kind == "kvpacked":
        tensors = [leaves[0], torch.stack(leaves[1:], 1)]
    options = dict(causal=causal, window_size=window, alibi_slopes=slopes, return_attn_probs=True, group=group)
    ends = torch.tensor(starts, dtype=torch.int32)
    if rule == "llama3":
        rows, keys, *longest, places = ring.llama3_flash_attn_prepare_cu_seqlens(ends, causal, rank, ranks)
        options |= dict(cu_seqlens_q=rows, cu_seqlens_k=keys, max_seqlen_q=longest[0], max_seqlen_k=longest[1],
                        heads_k_stride=1, local_k_slice=places)
    elif varlen:
        options |= dict(cu_seqlens=ends // ranks, max_seqlen=max(b - a for a, b in zip(starts, starts[1:])) // ranks)
    else:
        tensors = [t[None] for t in tensors]
    out, lse, nothing = function(*tensors, **options)
    out, lse = (out, lse) if varlen else (out[0], lse[0])
    assert nothing is None and lse.shape == (heads, len(leaves[0])) and torch.isfinite(lse).all()
    found = [out.float(), *(t.float() for t in torch.autograd.grad(out, leaves, own(dout)))]
    for n, (one, other, wanted) in enumerate(zip(found, low, right)):
        bound = 2 * (other - wanted).abs().max() + 2e-5 * wanted.abs().max()
        error = (one - wanted).abs().max()
        assert error <= bound, f"{name} {n}: {error:.3g}, at most {bound:.3g} is wanted"


def ring_name(rule):
    return {"ring": "ring", "zigzag": "zigzag_ring", "stripe": "stripe", "llama3": "llama3"}[rule]


def ring_dropout(group):
    """Of whole sequences: a weight of 1 is dropped, or divided by 1 - p, and gradients take the same mask."""
    for name in ("ring", "zigzag_ring"):
        v = numbers(7, 64, 2, 16).requires_grad_()
        torch.manual_seed(3)
        out = getattr(ring, f"{name}_flash_attn_varlen_func")(v.detach(), v.detach(), v, torch.tensor([0, 24, 64]), 40,
                                                               dropout_p=0.25, window_size=(0, 0), group=group)
        kept = (out != 0).all(-1)
        assert 0.5 < kept.float().mean() < 0.95
        torch.testing.assert_close(out, torch.where(kept[..., None], v / 0.75, 0))
        dv, = torch.autograd.grad(out.sum(), v)
        torch.testing.assert_close(dv, torch.where(kept[..., None], 1 / 0.75, 0.0).expand_as(dv))


def wrong_ring_calls(group):
    """[the message of each call], the same kind of error on every rank."""
    x, rank, ranks = numbers(1, 8, 2, 16), group.rank(), group.size()
    starts, messages = torch.tensor([0, 4, 8]), []
    llama3 = ring.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 6, 8 * ranks]), True, rank, ranks)

    def call_llama3(rows=llama3[0], places=llama3[4], stride=1):
        ring.llama3_flash_attn_varlen_func(x, x, x, rows, llama3[1], 8, 8, stride, places, causal=True, group=group)

    for call in (lambda: ring.ring_flash_attn_varlen_func(x, x, x, starts * ranks, 8, group=group),
                 lambda: ring.ring_flash_attn_varlen_func(x, x, x, starts if rank else torch.tensor([0, 8]), 8, group=group),
                 lambda: ring.zigzag_ring_flash_attn_varlen_func(x, x, x, torch.tensor([0, 8]) if rank else starts, 8, group=group),
                 lambda: ring.ring_flash_attn_varlen_func(x, x, x, starts.flip(0), 8, group=group),
                 lambda: call_llama3(rows=torch.tensor([0, 9])),
                 lambda: call_llama3(places=slice(3, 8) if rank else llama3[4]),
                 lambda: call_llama3(stride=3),
                 lambda: ring.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 7]), True, 0, 2)):
        try:
            call()
            messages.append(None)
        except longspan.InputError as error:
            messages.append(str(error))
    return messages


def context_parallel_case(group, causal, compiled, load_balance, rotate, forward_only, dtype, batch, heads, tokens, dim):
    """RingAttentionTest.test_ring_attention_sdpa: out and gradients, with inputs of [0, 1) and their bounds. The reference is
    of fp32: that of bf16 on a CPU rounds within its sums."""
    ranks = group.size()
    make = torch.Generator().manual_seed(10)
    q, k, v = (torch.rand(batch, heads, ranks * tokens, dim, generator=make, device="cpu").to(DEVICE, getattr(torch, dtype))
               .requires_grad_() for _ in range(3))
    own = [t.detach().clone() for t in (q, k, v)]
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    right = sdpa_before(*wide, is_causal=causal)
    attend = F.scaled_dot_product_attention
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(lambda *t, **options: F.scaled_dot_product_attention(*t, **options), fullgraph=True,
                               backend="aot_eager")
    lt.set_rotate_method(rotate)
    mesh = mesh_of(group)
    layout = "zigzag" if load_balance else "striped" if tokens < 128 else "contiguous"  # a rank of contiguous parts has 128
    try:
        with lt.context_parallel(mesh, buffers=own, buffer_seq_dims=[2, 2, 2], layout=layout):
            for t in own:
                t.requires_grad_(not forward_only)
            out = attend(*own, is_causal=causal)
            found, = lt.context_parallel_unshard(mesh, [out], [2], load_balancer=layout)
            if not forward_only:
                out.sum().backward()
                grads = lt.context_parallel_unshard(mesh, [t.grad for t in own], [2, 2, 2], load_balancer=layout)
                for t in own:
                    t.grad = None
                    t.requires_grad_(False)
    finally:
        lt.set_rotate_method("allgather")
    exact = dtype == "float32"
    torch.testing.assert_close(found.float(), right, rtol=1e-5 if exact else 1e-2, atol=1e-6 if exact else 1e-3 * ranks)
    if not forward_only:
        for one, other in zip(grads, torch.autograd.grad(right.sum(), wide)):
            torch.testing.assert_close(one.float(), other, rtol=1e-5, atol=5e-6 if exact else 8e-3 * ranks)


class Layer(torch.nn.Module):
    """A layer whose attention is asked for by its name, as in the models of PyTorch's tests."""

    def __init__(self, dim, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


def context_parallel_model(group, causal, rotate):
    """test_ring_attention_custom_transformer: two layers, and the gradients of their weights. torch's own encoder, which
    computes attention itself, is refused by name."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer(32, 8, causal), Layer(32, 8, causal))
    x = numbers(2, 8, 8 * group.size(), 32)
    right = model(x)
    right.sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    lt.set_rotate_method(rotate)
    try:
        own = x.clone()
        with lt.context_parallel(mesh_of(group), buffers=[own], buffer_seq_dims=[1]):
            out = model(own)
            out.sum().backward()
            whole, = lt.context_parallel_unshard(mesh_of(group), [out], [1])
            encoder = torch.nn.TransformerEncoderLayer(32, 8, 32, batch_first=True)
            try:
                encoder(own)
                raise AssertionError("an encoder was taken")
            except longspan.UnsupportedError as error:
                assert "MultiheadAttention" in str(error), error
    finally:
        lt.set_rotate_method("allgather")
    torch.testing.assert_close(whole, right.detach(), rtol=1e-5, atol=1e-5)
    for p, other in zip(model.parameters(), wanted):
        torch.distributed.all_reduce(p.grad, group=group)
        torch.testing.assert_close(p.grad, other, rtol=1e-4, atol=1e-4)
