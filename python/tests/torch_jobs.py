"""Jobs of the ranks of tests/test_torch_*.py. Every rank makes the same whole tensors from a seed."""

import contextlib
import copy
import gc
import os
import pickle
import time
import weakref

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint

import jobs
import longspan
import longspan.torch as lt
from device import DEVICE
from oracle import TOLERANCE, assert_lse_close, attention, host

sdpa_before = F.scaled_dot_product_attention  # a reference that was taken early


def randn(seed, *shape, dtype="float32"):
    """The same on every rank, on any device."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(DEVICE, getattr(torch, dtype))


def inputs(seed, batch, heads, kv_heads, tokens, keys, dim, dtype="float32"):
    """[batch, heads, tokens, dim]"""
    return (randn(seed, batch, heads, tokens, dim, dtype=dtype), randn(seed + 1, batch, kv_heads, keys, dim, dtype=dtype),
            randn(seed + 2, batch, kv_heads, keys, dim, dtype=dtype))


def wanted(q, k, v, **options):
    """[batch, heads, tokens, dim] in float64, and lse [batch, heads, tokens]."""
    pairs = [attention(*(t[b].transpose(0, 1) for t in (q, k, v)), **options)
             for b in range(q.shape[0])]
    return np.stack([out for out, _ in pairs]).swapaxes(1, 2), np.stack([lse for _, lse in pairs]).swapaxes(1, 2)


def close(found, right, dtype="float32"):
    found = host(found)
    assert found.shape == right.shape, (found.shape, right.shape)
    np.testing.assert_allclose(found, right, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def mesh_of(group):
    return dist.DeviceMesh.from_group(group, DEVICE)


# ---- PyTorch's own tests of context parallelism, on ours ---------------------------------------

def ring_attention(group, causal, layout, compiled, rotate, tokens, kv_heads=4, dtype="float32", batch=2):
    """RingAttentionTest.test_ring_attention_sdpa: every combination equals attention on one device."""
    q, k, v = inputs(1, batch, 4, kv_heads, tokens, tokens, 16, dtype)
    right, _ = wanted(q, k, v, causal=causal)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != 4)

    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    own = [t.clone() for t in (q, k, v)]
    lt.set_rotate_method(rotate)
    try:
        with lt.context_parallel(mesh_of(group), buffers=own, buffer_seq_dims=[2, 2, 2], layout=layout):
            begin, end = (tokens * r // group.size() for r in (group.rank(), group.rank() + 1))
            for t in own:
                if layout == "zigzag" and tokens % (2 * group.size()) == 0:
                    assert t.shape[2] == end - begin
                assert t.shape[2] <= tokens
            out = attend(*own)
            whole, = lt.context_parallel_unshard(mesh_of(group), [out], [2])
    finally:
        lt.set_rotate_method("allgather")
    for t, before in zip(own, (q, k, v)):
        assert torch.equal(t, before)  # restored
    again, = lt.context_parallel_unshard(group, [out], [2], load_balancer=layout)
    assert torch.equal(again, whole)
    close(whole, right, dtype)


class Block(torch.nn.Module):
    """A transformer block with rotary positions, as in PyTorch's ContextParallel tests."""

    def __init__(self, heads=4, dim=16):
        super().__init__()
        generator = torch.Generator(DEVICE).manual_seed(5)
        self.heads, self.dim = heads, dim
        self.qkv = torch.nn.Parameter(torch.randn(heads * dim, 3 * heads * dim, generator=generator) * 0.1)
        self.out = torch.nn.Parameter(torch.randn(heads * dim, heads * dim, generator=generator) * 0.1)
        self.register_buffer("angles", torch.arange(600)[:, None] / 100.0 ** (torch.arange(dim // 2) / (dim // 2)))

    def forward(self, x):  # [batch, tokens, heads dim]
        batch, tokens, _ = x.shape
        q, k, v = (x @ self.qkv).view(batch, tokens, 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        angles = self.angles[:tokens]
        q, k = (torch.cat([t[..., ::2] * angles.cos() - t[..., 1::2] * angles.sin(),
                           t[..., ::2] * angles.sin() + t[..., 1::2] * angles.cos()], -1) for t in (q, k))
        y = sdpa_before(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).reshape(batch, tokens, self.heads * self.dim) @ self.out  # a rank may have no tokens


def model_with_positions(group, tokens, compiled, layout):
    """Inputs and tables of positions are both buffers: test_context_parallel_shard, torchtitan."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block()).eval()
    x = randn(3, 2, tokens, 64)
    for block in model:
        block.angles = block.angles[:tokens].clone()
    with torch.no_grad():
        right = model(x)
        run = model
        if compiled:
            torch._dynamo.reset()
            run = torch.compile(model, fullgraph=True, backend="aot_eager")
        own = x.clone()
        tables = [block.angles for block in model]
        with lt.context_parallel(mesh_of(group), buffers=[own, *tables], buffer_seq_dims=[1, 0, 0],
                                 no_restore_buffers={own}, layout=layout):
            out = run(own)
        kept = own
        whole, = lt.context_parallel_unshard(mesh_of(group), [out], [1], load_balancer=layout)
    assert all(t.shape[0] == tokens for t in tables) and kept.shape == out.shape
    torch.testing.assert_close(whole, right, rtol=2e-5, atol=2e-5)


def gradients_of_a_call(group, layout):
    """A rank's rows give the gradients of its own rows and keys."""
    rank, ranks = group.rank(), group.size()
    for batch, causal, return_lse in ((1, True, False), (2, False, True), (2, True, True)):
        whole = [t.double().requires_grad_() for t in inputs(7, batch, 4, 2, 61, 61, 16)]
        dout, dlse = randn(11, batch, 4, 61, 16).double(), randn(12, batch, 4, 61).double()
        mask = torch.ones(61, 61, dtype=torch.bool).tril() if causal else torch.ones(61, 61, dtype=torch.bool)
        scores = whole[0] @ whole[1].repeat_interleave(2, 1).transpose(-1, -2) / 4
        scores = scores.masked_fill(~mask, -torch.inf)
        loss = ((scores.softmax(-1) @ whole[2].repeat_interleave(2, 1)) * dout).sum()
        if return_lse:
            loss = loss + (scores.logsumexp(-1) * dlse).sum()
        right = torch.autograd.grad(loss, whole)

        def own(t):
            return longspan.shard(t, lt._layouts.rule_of(layout), rank=rank, ranks=ranks, dim=2)

        for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
            if dtype == torch.float64 and DEVICE != "cpu":
                continue
            parts = [own(t.detach()).to(dtype).requires_grad_() for t in whole]
            found = lt.scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True, group=group, keys=layout,
                                                    return_lse=return_lse)
            loss = (found[0] * own(dout)).sum() + (found[1] * own(dlse)).sum() if return_lse else (found * own(dout)).sum()
            for one, wanted in zip(torch.autograd.grad(loss, parts), right):
                torch.testing.assert_close(one.double(), own(wanted), rtol=bound, atol=bound)


def gradients_of_attend(group):
    """longspan.attend: contiguous parts of any lengths, and zigzag ones."""
    comm, dout = lt.communicator(group), randn(9, 61, 4, 16)
    whole = [t[0].transpose(0, 1).requires_grad_() for t in inputs(7, 1, 4, 2, 61, 61, 16)]
    out = sdpa_before(*(t.transpose(0, 1) for t in whole), is_causal=True, enable_gqa=True).transpose(0, 1)
    right = torch.autograd.grad((out * dout).sum(), whole)
    cut = [0, *sorted([5, 50, 33][:group.size() - 1]), 61]
    for layout in ("contiguous", "zigzag"):
        def own(t):
            if layout == "contiguous":
                return t[cut[group.rank()]:cut[group.rank() + 1]]
            return longspan.shard(t, layout, comm=comm)

        parts = [own(t.detach()).clone().requires_grad_() for t in whole]
        found = longspan.attend(*parts, comm=comm, causal=True, keys=layout, queries=layout)
        for one, wanted in zip(torch.autograd.grad((found * own(dout)).sum(), parts), right):
            torch.testing.assert_close(one, own(wanted), rtol=2e-5, atol=2e-5)


def gradients_of_replicated_rows(group):
    """Every rank has all rows and the same loss."""
    q, k, v = (t.requires_grad_() for t in inputs(7, 1, 4, 2, 9, 61, 16))
    right = torch.autograd.grad(sdpa_before(q, k, v, enable_gqa=True).square().sum(), (q, k, v))
    own = [longspan.shard(t.detach(), "zigzag", rank=group.rank(), ranks=group.size(), dim=2).requires_grad_()
           for t in (k, v)]
    out = lt.scaled_dot_product_attention(q, *own, enable_gqa=True, group=group, queries=None)
    dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, *own))
    torch.testing.assert_close(dq, right[0], rtol=2e-5, atol=2e-5)
    for found, wanted in zip((dk, dv), right[1:]):
        wanted = longspan.shard(wanted, "zigzag", rank=group.rank(), ranks=group.size(), dim=2)
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def gradients_of_a_batch(group, layout, queries, strategy, invariant):
    """A batch goes back in one call of the layer. Memory of results is NaN before. dout has heads before tokens, and
    sequences that lie apart. With invariant the bits are those of each sequence alone."""
    rank, ranks = group.rank(), group.size()
    batch, tokens = 3, 61 if not invariant else 300
    whole = [t.double().requires_grad_() for t in inputs(7, batch, 4, 4, tokens, tokens, 16)]
    sinks = randn(3, 4).double().requires_grad_()
    dout = randn(11, batch, 4, tokens, 16)
    pad = torch.tensor([0, 7, 3], dtype=torch.int32)
    scores = (whole[0] @ whole[1].transpose(-1, -2) / 4).masked_fill(
        ~(torch.ones(tokens, tokens, dtype=torch.bool).tril() & (torch.arange(tokens) >= pad[:, None, None, None])), -torch.inf)
    right = torch.cat([scores, sinks[:, None, None].expand(batch, 4, tokens, 1)], -1).softmax(-1)[..., :tokens] @ whole[2]
    right = torch.autograd.grad(right, (*whole, sinks), dout.double())

    def own(t, rule):
        return t if rule is None else longspan.shard(t, lt._layouts.rule_of(rule), rank=rank, ranks=ranks, dim=2)

    def run(which):
        parts = [own(t.detach()[which].float(), rule).requires_grad_() for t, rule in zip(whole, (queries, layout, layout))]
        learned = sinks.detach().float().requires_grad_()
        out = lt.scaled_dot_product_attention(
            *parts, group=group, keys=layout, queries=queries, strategy=strategy, is_causal=True, invariant=invariant,
            sinks=learned, cache_leftpad=pad[which])
        calls = []
        core, lt._train._core = lt._train._core, _Spy(lt._train._core, backward_layer=calls)
        try:
            made = torch.autograd.grad(out, (*parts, learned), own(dout[which], queries))
        finally:
            lt._train._core = core
        assert len(calls) == 1, calls
        return made

    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        found = run(slice(0, batch))
        for one, wanted, rule in zip(found, right, (queries, layout, layout, None)):
            torch.testing.assert_close(one.double(), wanted if one is found[3] else own(wanted, rule), rtol=4e-5, atol=4e-5)
        for b in range(batch if invariant else 0):
            for one, alone in zip(found[:3], run(slice(b, b + 1))):
                assert torch.equal(one[b:b + 1], alone)
    finally:
        torch.use_deterministic_algorithms(False)


class _Spy:
    """A module, of which some functions are counted."""

    def __init__(self, module, **lists):
        self._module, self._lists = module, lists

    def __getattr__(self, name):
        function = getattr(self._module, name)
        if name not in self._lists:
            return function

        def call(*args, **kwargs):
            self._lists[name].append(name)
            return function(*args, **kwargs)

        return call


def exchanges_of_checkpoints(group, compiled):
    """{name: (bytes that forward and backward receive, times that ranks are asked for lengths)}. The gradients are alike."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    comm, found, wanted = lt.communicator(group), {}, None
    x = longspan.shard(randn(5, 2, 4, 61, 16), "zigzag", comm=comm, dim=2)

    def block(x):
        q, k, v = x * 2, x + 1, x.sin()
        return lt.scaled_dot_product_attention(q, k, v, is_causal=True, group=group).tanh()

    saves = partial(create_selective_checkpoint_contexts, [torch.ops.longspan.attend_train.default])
    asked, gather = [], lt._ops.ask
    lt._ops.ask = lt._train.ask = lambda *args: asked.append(1) or gather(*args)
    try:
        for name, call in (("plain", block), ("full", partial(checkpoint, block, use_reentrant=False)),
                           ("selective", partial(checkpoint, block, use_reentrant=False, context_fn=saves))):
            if compiled:
                torch._dynamo.reset()
                call = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")
            for _ in range(2):  # the first time layers are made
                own = x.clone().requires_grad_()
                before = comm.received_bytes
                asked.clear()
                grad, = torch.autograd.grad(call(own).square().sum(), own)
                found[name] = comm.received_bytes - before, len(asked)
            wanted = grad if wanted is None else wanted
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)
    finally:
        lt._ops.ask = lt._train.ask = gather
    return found


def shapes_differ(group, what, deadline):
    """One rank has another batch, number of heads, width or type, in a call that autograd records."""
    shape, dtype = [4, 4, 8, 16], torch.float32
    if group.rank() == 0:
        shape = dict(batch=[3, 4, 8, 16], heads=[4, 2, 8, 16], dim=[4, 4, 8, 32]).get(what, shape)
        dtype = torch.bfloat16 if what == "type" else dtype
    t = torch.randn(shape, dtype=dtype, requires_grad=True)
    comm = lt.communicator(group, deadline=deadline)
    try:
        return raised(lambda: lt.scaled_dot_product_attention(t, t, t, comm=comm))
    finally:
        comm.close()


def gradients_differ(group, deadline):
    """One rank alone has a gradient of lse, which is allowed. Backwards of different calls are not."""
    comm = lt.communicator(group, deadline=deadline)
    try:
        parts = [randn(group.rank() + n, 1, 2, 9, 16).requires_grad_() for n in range(3)]
        out, lse = lt.scaled_dot_product_attention(*parts, comm=comm, return_lse=True)
        loss = out.sum() + (lse.sum() if group.rank() == 0 else 0)
        grads = torch.autograd.grad(loss, parts)
        assert all(one.isfinite().all() for one in grads)
        first, second = (lt.scaled_dot_product_attention(*parts, comm=comm, softcap=cap).sum() for cap in (0.0, 2.0))
        order = (first, second) if group.rank() == 0 else (second, first)
        return raised(lambda: [one.backward() for one in order])
    finally:
        comm.close()


def training(group, layout, checkpointed):
    """Ten steps of AdamW on sharded tokens: the losses of one rank. Ranks have unequal numbers of tokens."""
    x, wanted = randn(3, 2, 45, 64), randn(4, 2, 45, 64)
    losses = []
    for ranks in (1, group.size()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Block(), Block())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(10):
            own = [x.clone(), wanted.clone(), *(block.angles[:45].clone() for block in model)]
            whole = [block.angles for block in model]
            context = lt.context_parallel(mesh_of(group), buffers=own, buffer_seq_dims=[1, 1, 0, 0],
                                          no_restore_buffers=set(own), layout=layout) if ranks > 1 else contextlib.nullcontext()
            with context:
                for block, angles in zip(model, own[2:]):
                    block.angles = angles
                out = torch.utils.checkpoint.checkpoint(model, own[0], use_reentrant=False) if checkpointed else model(own[0])
                loss = (out - own[1]).square().sum() / x.numel()  # of all tokens, on every rank
                optimizer.zero_grad()
                loss.backward()
            for block, angles in zip(model, whole):
                block.angles = angles
            if ranks > 1:
                loss = loss.detach().clone()
                for summed in [loss, *(p.grad for p in model.parameters())]:
                    dist.all_reduce(summed, group=group)
            losses.append(float(loss.detach()))
            optimizer.step()
    np.testing.assert_allclose(losses[10:] or losses, losses[:10], rtol=1e-5)
    assert losses[9] < 0.9 * losses[0]


def backward_alone(group):
    """The last rank calls no backward: the others get an error that names it."""
    comm = lt.communicator(group, deadline=3.0)
    parts = [randn(group.rank() + n, 1, 2, 9, 16).requires_grad_() for n in range(3)]
    first, second = (lt.scaled_dot_product_attention(*parts, comm=comm).sum() for _ in range(2))
    first.backward()  # makes the layer of the backward
    try:
        if group.rank() + 1 < group.size():
            return raised(second.backward)
        time.sleep(5)
    finally:
        comm.close()


def no_buffers(group):
    """#159706 and IndexError: a context without buffers, with tensors that are sharded already."""
    q, k, v = inputs(9, 1, 2, 2, 40, 40, 16)
    right, _ = wanted(q, k, v)
    own = [longspan.shard(t, "zigzag", rank=group.rank(), ranks=group.size(), dim=2) for t in (q, k, v)]
    with lt.context_parallel(group):
        out = F.scaled_dot_product_attention(*own)
    close(lt.context_parallel_unshard(group, [out], [2])[0], right)


def cross_lengths(group, causal, layout):
    """#159634: query and key of different lengths, both sharded."""
    q, k, v = inputs(9, 1, 2, 2, 21, 50, 16)
    right, _ = wanted(q, k, v, causal=causal)
    first, _ = wanted(q, k, v, causal=causal, first=0)
    q, k, v = (t.clone() for t in (q, k, v))
    with lt.context_parallel(group, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], layout=layout,
                             causal_alignment="lower_right" if causal else None):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        whole, = lt.context_parallel_unshard(group, [out], [2])
        if causal:
            from torch.nn.attention.bias import causal_lower_right, causal_upper_left

            with lt.context_parallel(group, layout=layout):
                same = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(21, 50))
                upper = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_upper_left(21, 50))
            assert torch.equal(same, out)
            close(lt.context_parallel_unshard(group, [upper], [2])[0], first)
            with lt.context_parallel(group, layout=layout, causal_alignment="upper_left"):
                same = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            assert torch.equal(same, upper)
            with lt.context_parallel(group, layout=layout):
                try:
                    F.scaled_dot_product_attention(q, k, v, is_causal=True)
                except longspan.InputError as error:
                    assert "21 tokens and key has 50" in str(error)
                else:
                    raise AssertionError("lengths that differ are taken")
    close(whole, right)


def decode(group, total_keys, compiled):
    """One row on every rank, keys sharded: context_parallel, the function and the layer."""
    q, k, v = inputs(4, 2, 4, 2, 1, 77, 32)
    right, right_lse = wanted(q, k, v, causal=True)
    own_k, own_v = (longspan.shard(t, "striped", rank=group.rank(), ranks=group.size(), dim=2) for t in (k, v))
    known = 77 if total_keys else None
    layer = lt.ContextParallelAttention(group, layout="striped", causal=True)

    def by_layer(q, k, v):
        return layer(q, k, v, queries=None, total_keys=known, return_lse=True)

    def by_function(q, k, v):
        return lt.scaled_dot_product_attention(
            q, k, v, is_causal=True, causal_alignment="lower_right", enable_gqa=True, group=group, keys="striped",
            queries=None, total_keys=known, return_lse=True)

    for attend in (by_layer, by_function):
        if compiled:
            torch._dynamo.reset()
            attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
        out, lse = attend(q, own_k, own_v)
        close(out, right)
        assert_lse_close(lse, right_lse)
    with lt.context_parallel(group, layout="striped", queries=None, causal_alignment="lower_right"):
        out = sdpa_before(q, own_k, own_v, is_causal=True, enable_gqa=True)
    close(out, right)


def grow(group, layout):
    """A cache of one sequence that grows: the operators append and attend_append, compiled."""
    rank, ranks = group.rank(), group.size()
    name = lt._groups.name_of(None, group, DEVICE)
    q, k, v = inputs(4, 1, 4, 2, 12, 60, 16)
    right, _ = wanted(q, k, v, causal=True)
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    cache_k, cache_v = (torch.full((1, 64, 2, 16), float("nan")) for _ in range(2))
    torch.ops.longspan.append(k[:, :40], v[:, :40], cache_k, cache_v, name, total_keys=40, keys=layout)
    torch.ops.longspan.append(k[:, 40:48], v[:, 40:48], cache_k, cache_v, name, keys=layout,
                              cache_seqlens=torch.tensor([40], dtype=torch.int32))
    own = len(lt._layouts.rule_of(layout).shard(48, rank, ranks))
    assert torch.isfinite(cache_k[:, :own]).all() and torch.isnan(cache_k[:, own:]).all()

    def step(q, k_new, v_new, cache_k, cache_v, length):
        return torch.ops.longspan.attend_append(q, cache_k, cache_v, k_new, v_new, name, causal=True, keys=layout,
                                                cache_seqlens=length)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for i in range(12):
        run = compiled if i % 2 else step
        out = run(q[:, i:i + 1], k[:, 48 + i:49 + i], v[:, 48 + i:49 + i], cache_k, cache_v,
                  torch.tensor([48 + i], dtype=torch.int32))
        close(out.transpose(1, 2), right[:, :, i:i + 1])


# ---- any shapes --------------------------------------------------------------------------------

def any_shape(group, cases):
    for case in cases:
        rng = np.random.default_rng(case["seed"])
        q, k, v = inputs(case["seed"], case["batch"], case["heads"], case["kv_heads"], case["tokens"], case["keys"],
                         case["dim"], case["dtype"])
        options, same = {}, {}
        if case["window"]:
            options["window"] = same["window_size"] = (int(rng.integers(0, 40)), -1)
        if case["softcap"]:
            options["softcap"] = same["softcap"] = 5.0
        if case["slopes"]:
            options["slopes"] = rng.uniform(0, 0.1, case["heads"]).astype(np.float32)
            same["alibi_slopes"] = torch.from_numpy(options["slopes"]).to(DEVICE)
        if case["sinks"]:
            same["sinks"] = randn(case["seed"], case["heads"])
            options["sinks"] = host(same["sinks"])
        if case.get("first_rows"):
            options["first"], same["causal_alignment"] = 0, "upper_left"
        if case.get("expanded"):
            q, k, v = (t[:1].expand(t.shape) for t in (q, k, v))
        right, right_lse = wanted(q, k, v, causal=case["causal"], **options)
        layer = lt.ContextParallelAttention(group, layout=case["layout"], causal=case["causal"],
                                            format=case["format"], strategy=case["strategy"], **same)
        whole_rows = case["queries"] is None
        if case["format"] == "bthd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        own = [q if whole_rows else layer.shard(q), layer.shard(k), layer.shard(v)]
        if case.get("expanded") and not whole_rows:
            own = [t[:1].expand(t.shape) for t in own]
        if case.get("apart"):  # the last dimension is not dense
            own = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in own]
        elif case["strided"]:
            own = [torch.cat([torch.zeros_like(t), t], -1)[..., t.shape[-1]:] for t in own]
        out, lse = layer(*own, queries=case["queries"], return_lse=True)
        if not whole_rows:
            out = layer.unshard(out)
            lse = layer.unshard(lse, -1 if case["format"] == "bhtd" else 1)
        if case["format"] == "bthd":
            out, lse = out.transpose(1, 2), lse.transpose(1, 2)
        close(out, right, case["dtype"])
        assert_lse_close(lse, right_lse)


def documents(group, layout, strategy):
    """Packed documents, as flex attention's document masks: any lengths."""
    q, k, v = inputs(2, 1, 4, 2, 100, 100, 16)
    starts = [0, 7, 8, 60, 100]
    right, _ = wanted(q, k, v, causal=True, documents=starts)
    layer = lt.ContextParallelAttention(group, layout=layout, causal=True, strategy=strategy)
    own = [layer.shard(t) for t in (q, k, v)]
    out = layer(*own, documents=torch.tensor(starts))
    close(layer.unshard(out), right)
    again = lt.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True, group=group, keys=layout,
                                            documents=torch.tensor(starts), total_keys=100, total_queries=100)
    close(layer.unshard(again), right)


def padded_documents(group, layout, strategy):
    """A batch: documents of each sequence, and padding on the left."""
    q, k, v = inputs(3, 2, 4, 2, 100, 100, 16)
    starts = longspan.document_starts(torch.arange(100, device="cpu") // torch.tensor([[40], [17]], device="cpu"))
    pads = torch.tensor([9, 50], device="cpu")
    right = np.concatenate([wanted(q[b:b + 1], k[b:b + 1], v[b:b + 1], causal=True, documents=starts[b].numpy(),
                                   leftpad=int(pads[b]))[0] for b in range(2)])
    layer = lt.ContextParallelAttention(group, layout=layout, causal=True, strategy=strategy)
    own = [layer.shard(t) for t in (q, k, v)]
    for more in dict(), dict(total_keys=100, total_queries=100):
        out = layer(*own, documents=starts.to(q.device), cache_leftpad=pads.int().to(q.device), **more)
        close(layer.unshard(out), right)


def contiguous_by_chunk(group, tokens):
    """Parts in rank order by torch.chunk's cut, which differs from all of longspan's."""
    q, k, v = inputs(2, 2, 2, 2, tokens, tokens, 16)
    right, _ = wanted(q, k, v, causal=True)
    own = []
    for t in (q, k, v):
        parts = [*t.chunk(group.size(), 2)]
        parts += [t[:, :, :0]] * (group.size() - len(parts))  # torch.chunk may give fewer
        own.append(parts[group.rank()])
    for strategy in ("auto", "gather-states", "gather-kv"):
        out = lt.scaled_dot_product_attention(*own, is_causal=True, group=group, keys="contiguous",
                                              strategy=strategy)
        close(lt.context_parallel_unshard(group, [out], [2], load_balancer="contiguous")[0], right)


def pairs(group, seed, count):
    return jobs.pairs(lt.communicator(group), seed, count, torch.tensor)


def contradicts(group, what):
    """A call that contradicts shard()."""
    q, k, v = inputs(3, 1, 2, 2, 40, 40, 16)
    comm = lt.communicator(group)
    own = [longspan.shard(t, "striped", comm=comm, dim=0 if what == "dimension" else 2) for t in (q, k, v)]
    if what == "total":  # the ranks are not asked, and torch.chunk cuts otherwise
        return lt.scaled_dot_product_attention(*(t.chunk(group.size(), 2)[group.rank()] for t in (q, k, v)),
                                               group=group, keys="contiguous", total_keys=40, total_queries=40)
    if what == "a layer":
        return lt.ContextParallelAttention(group)(*own)
    if what == "unshard":
        return lt.ContextParallelAttention(group).unshard(own[0])
    return lt.scaled_dot_product_attention(*own, group=group)


@torch.no_grad()
def other_ways(group):
    """Attention that is called by other ways than torch.nn.functional, and was made before the context opens."""
    q, k, v = inputs(9, 1, 2, 2, 40, 40, 16)
    right, _ = wanted(q, k, v, causal=True)

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    own = [longspan.shard(t, "zigzag", rank=group.rank(), ranks=group.size(), dim=2) for t in (q, k, v)]
    torch._dynamo.reset()
    compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager")
    compiled(*own)
    operator = torch.ops.aten.scaled_dot_product_attention
    ways = [torch.jit.trace(Model(), own), torch.export.export(Model(), tuple(own)).module(), compiled,
            lambda q, k, v: operator(q, k, v, is_causal=True),
            lambda q, k, v: operator.default(q, k, v, None, 0.0, True)]
    with lt.context_parallel(group):
        for way in ways:
            close(lt.context_parallel_unshard(group, [way(*own)], [2])[0], right)
        with torch._C.DisableTorchFunction():
            close(lt.context_parallel_unshard(group, [ways[-1](*own)], [2])[0], right)
    assert not np.allclose(host(ways[0](*own)), host(longspan.shard(torch.from_numpy(right).to(own[0]), "zigzag",
                           rank=group.rank(), ranks=group.size(), dim=2)), atol=1e-3)  # local after it is closed


def sub_meshes(world):
    """A mesh of two dimensions: each context-parallel group by itself, at the same time."""
    mesh = dist.init_device_mesh(DEVICE, (2, world.size() // 2), mesh_dim_names=("dp", "cp"))
    try:
        lt.communicator(mesh)
    except longspan.InputError as error:
        assert "2 dimensions" in str(error)
    else:
        raise AssertionError("a mesh of two dimensions is taken")
    comm = lt.communicator(mesh["cp"])
    assert comm.size == world.size() // 2 and comm.rank == mesh.get_local_rank("cp")
    assert comm is lt.communicator(mesh, dim="cp") is lt.communicator(mesh.get_group("cp"))
    assert comm is not lt.communicator(mesh["dp"])
    q, k, v = inputs(100 * mesh.get_local_rank("dp"), 1, 2, 2, 45, 45, 16)
    right, _ = wanted(q, k, v, causal=True)
    with lt.context_parallel(mesh["cp"], buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out, = lt.context_parallel_unshard(mesh["cp"], [out], [2])
    close(out, right)


def kept(group):
    """One communicator for a group; its end with the group."""
    comm = lt.communicator(group)
    assert comm is lt.communicator(group) and (comm.rank, comm.size) == (group.rank(), group.size())
    plain = torch.get_default_device()
    name = lt._groups.name_of(comm, None, DEVICE)
    comm.close()
    try:
        lt._groups.known(name).comm.barrier()
    except longspan.UsageError as error:
        assert "closed" in str(error)
    other = lt.communicator(group)
    assert other is not comm
    other.barrier()
    assert torch.get_default_device() == plain


def own_communicator(group):
    """comm in place of group; unshard without a group."""
    comm = longspan.from_exchange(group.rank(), group.size(), lt.communicator(group).gather, DEVICE)
    q, k, v = inputs(2, 1, 2, 2, 33, 33, 16)
    layer = lt.ContextParallelAttention(comm=comm)
    out = layer(*(layer.shard(t) for t in (q, k, v)))
    if DEVICE != "cpu":  # without a group nothing gathers there
        close(lt.context_parallel_unshard(group, [out], [2])[0], wanted(q, k, v)[0])
        error = raised(lambda: layer.unshard(out))
        assert error[0] == "UnsupportedError" and "needs the process group" in error[1]
        return
    close(layer.unshard(out), wanted(q, k, v)[0])
    whole = randn(3, 5, 7, dtype="bfloat16")
    assert torch.equal(layer.unshard(layer.shard(whole, 1), 1), whole)


def let_go(group):
    """A communicator that was given lives as long as a caller or a layer holds it."""
    comm = longspan.from_exchange(group.rank(), group.size(), lt.communicator(group).gather, DEVICE)
    before, seen = set(lt._groups._known), weakref.ref(comm)
    q, k, v = inputs(2, 1, 2, 2, 33, 33, 16)
    layer = lt.ContextParallelAttention(comm=comm)
    own = [layer.shard(t) for t in (q, k, v)]
    right = layer(*own)
    assert torch.equal(lt.scaled_dot_product_attention(*own, comm=comm), right)
    name = lt._groups.name_of(comm, None, DEVICE)
    cache = torch.zeros(2, 1, 64, 2, 16)
    new = k.transpose(1, 2).contiguous()
    for _ in range(2):  # its layers are kept
        torch.ops.longspan.append(new, new, *cache, name, total_keys=33, keys="interleaved:4")
    del comm
    gc.collect()
    assert torch.equal(layer(*own), right) and layer.comm is seen()
    copied = copy.deepcopy(layer)
    del layer
    gc.collect()
    assert torch.equal(copied(*own), right)
    del copied
    gc.collect()
    assert seen() is None and set(lt._groups._known) == before
    error = raised(lambda: lt.scaled_dot_product_attention(*own, comm=name))
    assert error[0] == "UsageError" and "released" in error[1], error


def destroyed(group):
    """Also where the group is still held."""
    made = dist.new_group(range(group.size()), use_local_synchronization=True)
    comm = lt.communicator(made)
    seen = weakref.ref(comm)
    comm.barrier()
    del comm
    gc.collect()
    assert seen() is not None  # kept with the group
    dist.destroy_process_group(made)
    error = raised(lambda: lt.communicator(made))
    assert error[0] == "UsageError" and "destroyed" in error[1], error
    assert seen() is None
    made = dist.new_group(range(group.size()), use_local_synchronization=True)
    seen = weakref.ref(lt.communicator(made))
    dist.destroy_process_group(made)
    lt._groups.name_of(longspan.alone(), None, DEVICE)  # the next call cleans up after earlier ones
    assert seen() is None


def copied(group):
    q = randn(0, 1, 2, 8, 16)
    plain = lt.ContextParallelAttention(layout="contiguous", sinks=torch.nn.Parameter(torch.ones(2)))
    part = lt.ContextParallelAttention(group, layout="contiguous")
    for layer in (plain, part):
        for twin in (copy.deepcopy(torch.nn.Sequential(layer))[0], copy.copy(layer)):
            assert twin.comm is layer.comm and twin.layout == "contiguous"
    error = raised(lambda: pickle.dumps(torch.nn.Sequential(part)))
    assert error[0] == "UnsupportedError" and "cannot be pickled" in error[1], error
    again = pickle.loads(pickle.dumps(plain))
    assert again.comm is lt.communicator() is plain.comm and torch.equal(again.sinks, plain.sinks)
    with torch.no_grad():
        assert torch.equal(again(q, q, q), plain(q, q, q))


# ---- what goes wrong ---------------------------------------------------------------------------

def raised(call):
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None


def wrong_layout(group):
    """Parts that are not those of the layout: an error at once, on every rank."""
    t = randn(0, 1, 2, 8 if group.rank() == 0 else 3, 16)
    return raised(lambda: lt.scaled_dot_product_attention(t, t, t, group=group))


def contiguous_cache(group):
    t = randn(0, 1, 2, 8, 16)
    layer = lt.ContextParallelAttention(group, layout="contiguous")
    return raised(lambda: layer(t, t, t, queries=None, cache_seqlens=torch.tensor([5], dtype=torch.int32)))


def options_differ(group):
    """The user closes a communicator that has ended, and the next call makes another."""
    t = randn(0, 1, 2, 4, 16)
    error = raised(lambda: lt.scaled_dot_product_attention(
        t, t, t, group=group, is_causal=group.rank() == 0, causal_alignment="lower_right"))
    lt.communicator(group).close()
    lt.communicator(group).barrier()
    return error


def rows_differ(group):
    k = randn(0, 1, 2, 4, 16)
    q = randn(0, 1, 2, 1 + group.rank(), 16)
    return raised(lambda: lt.scaled_dot_product_attention(q, k, k, group=group, queries=None))


def groups_differ(world, deadline):
    """Ranks that use different groups: none waits for ever."""
    mesh = dist.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("a", "b"))
    mine = mesh["a"] if world.rank() == 0 else mesh["b"]
    return raised(lambda: lt.communicator(mine, deadline=deadline))


def devices_differ(group):
    return raised(lambda: lt.communicator(group, device="cuda" if group.rank() == 0 else "cpu", deadline=2.0))


def no_member(world):
    groups = [dist.new_group([rank]) for rank in range(world.size())]
    assert lt.communicator(groups[world.rank()]).size == 1
    return raised(lambda: lt.communicator(groups[1 - min(1, world.rank())]))


def die(group, who):
    q = randn(0, 1, 2, 4, 16)
    with lt.context_parallel(group):
        F.scaled_dot_product_attention(q, q, q)
        if group.rank() == who:
            os._exit(7)
        begin = time.monotonic()
        try:
            for _ in range(2):
                F.scaled_dot_product_attention(q, q, q)
        except longspan.RankError as error:
            return error.rank, error.step, time.monotonic() - begin


def die_in_unshard(group, who):
    part = randn(0, 3)
    lt.context_parallel_unshard(group, [part], [0], load_balancer="contiguous")
    if group.rank() == who:
        os._exit(7)
    with contextlib.suppress(longspan.RankError):
        lt.context_parallel_unshard(group, [part], [0], load_balancer="contiguous")
        return "nothing happened"
    return "RankError"


def ring_flash_attention(group):
    """Outputs, lse and gradients of each layout, which are those of the whole."""
    from longspan import ring_flash_attn as ring

    whole = randn(3, 2, 60, 3, 4, 16).requires_grad_()
    dout = randn(4, 2, 60, 4, 16)
    right = sdpa_before(*whole.permute(2, 0, 3, 1, 4), is_causal=True).transpose(1, 2)
    wanted_grad, = torch.autograd.grad(right, whole, dout)
    for name, layout in (("ring", "contiguous"), ("zigzag_ring", "zigzag"), ("stripe", "striped")):
        def own(t):
            if layout == "contiguous":  # equal parts, as there
                return t.chunk(group.size(), 1)[group.rank()]
            return longspan.shard(t, layout, rank=group.rank(), ranks=group.size(), dim=1)

        qkv = own(whole.detach()).contiguous().requires_grad_()
        for found in (getattr(ring, f"{name}_flash_attn_qkvpacked_func")(qkv, causal=True, group=group),
                      getattr(ring, f"{name}_flash_attn_kvpacked_func")(qkv[:, :, 0], qkv[:, :, 1:], causal=True, group=group),
                      getattr(ring, f"{name}_flash_attn_func")(*qkv.unbind(2), causal=True, group=group,
                                                               return_attn_probs=True)[0]):
            torch.testing.assert_close(found, own(right.detach()), rtol=2e-5, atol=2e-5)
            grad, = torch.autograd.grad(found, qkv, own(dout))
            torch.testing.assert_close(grad, own(wanted_grad), rtol=5e-5, atol=5e-5)


def dropout_of_a_call(group, layout, batch):
    """Every number of ranks draws the seed of one process, and has its mask: the same results and gradients."""
    rank, ranks = group.rank(), group.size()
    whole = [t.requires_grad_() for t in inputs(7, batch, 4, 2, 61, 61, 16)]
    dout = randn(11, batch, 4, 61, 16)

    def own(t):
        return longspan.shard(t, lt._layouts.rule_of(layout), rank=rank, ranks=ranks, dim=2)

    def call(tensors, **where):
        torch.manual_seed(3 if where.get("comm") or rank == 0 else 4)  # rank 0's counts
        return lt.scaled_dot_product_attention(*tensors, dropout_p=0.4, is_causal=True, enable_gqa=True, **where)

    alone = longspan.alone()
    right = call(whole, comm=alone)
    wanted = torch.autograd.grad((right * dout).sum(), whole)
    parts = [own(t.detach()).requires_grad_() for t in whole]
    found = call(parts, group=group, keys=layout)
    torch.testing.assert_close(found, own(right), rtol=1e-5, atol=1e-5)
    for one, of_all in zip(torch.autograd.grad((found * own(dout)).sum(), parts), wanted):
        torch.testing.assert_close(one, own(of_all), rtol=2e-5, atol=2e-5)
    plain = lt.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True, group=group, keys=layout)
    assert found.numel() == 0 or (plain - found).abs().max() > 0.1


def transformer_engine(group):
    """Its module over chunks r and 2 P - 1 - r, by each way to communicate."""
    from longspan.transformer_engine import DotProductAttention

    whole = [t.transpose(1, 2).requires_grad_() for t in inputs(7, 2, 8, 4, 64, 64, 16)]  # [batch, tokens, heads, dim]
    dout = randn(4, 2, 64, 8 * 16)
    out = sdpa_before(*(t.transpose(1, 2) for t in whole), is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    right = torch.autograd.grad(out, whole, dout)

    def own(t):
        return torch.cat([t.chunk(2 * group.size(), 1)[i] for i in (group.rank(), 2 * group.size() - 1 - group.rank())], 1)

    attention = DotProductAttention(8, 16, 4, qkv_format="bshd")
    for how in ("p2p", "all_gather", "a2a"):
        attention.set_context_parallel_group(group, list(range(group.size())), None, how)
        parts = [own(t.detach()).requires_grad_() for t in whole]
        found = attention(*parts)
        torch.testing.assert_close(found, own(out.detach()), rtol=2e-5, atol=2e-5)
        for one, wanted in zip(torch.autograd.grad(found, parts, own(dout)), right):
            torch.testing.assert_close(one, own(wanted), rtol=5e-5, atol=5e-5)
