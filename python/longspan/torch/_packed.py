"""Attention of packed sequences whose rows and keys have starts of their own, with a rule for torch's autograd.

    attend_packed            q, k, v, slopes  ->  out, lse
    attend_packed_backward   dout, dlse, and all of these  ->  dq, dk, dv, dslopes

q is [total_q, heads, dim], k and v [total_k, kv_heads, dim], sequence after sequence, on this process alone. One call
attends all sequences, and so does its backward. Nothing is read from a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

import longspan
from longspan import UnsupportedError

from ._groups import alone_name, known
from ._ops import _attend, _define, _keys_as_read, _results, _rounded, agreed_seed, library
from ._train import _MOST_LAYERS, wants_grad

_TERMS = "Tensor cu_seqlens_q, Tensor cache_seqlens, Tensor? alibi_slopes, Tensor? dropout_seed"
_OPTIONS = """*, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal=False, float? softmax_scale=None, SymInt window_left=-1,
    SymInt window_right=-1, float softcap=0.0, float dropout_p=0.0"""


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cache_seqlens: Tensor, *, alibi_slopes: Tensor | None,
                  dropout_p: float, window_size: tuple[int, int], softmax_scale: float | None, **options) -> tuple[Tensor, Tensor]:
    """(out, lse [total_q, heads]). The last row of a sequence is at its last key; cache_seqlens [batch] counts its keys."""
    name = alone_name(q.device.type)
    seed = agreed_seed(name, q.device) if dropout_p else None
    return torch.ops.longspan.attend_packed.default(
        q, k, v, cu_seqlens_q, cache_seqlens, alibi_slopes, seed, name, dropout_p=float(dropout_p), softmax_scale=softmax_scale,
        window_left=window_size[0], window_right=window_size[1], **options)


def _forward_kernel(q, k, v, cu_seqlens_q, cache_seqlens, alibi_slopes, dropout_seed, comm, **options):
    if cache_seqlens.shape[0] == 0:
        out, lse = _results(q, v, True)
        return out.zero_(), lse.fill_(-torch.inf)
    return _attend(q, *_keys_as_read(k, v), comm, return_lse=True, cu_seqlens_q=cu_seqlens_q, cache_seqlens=cache_seqlens,
                   alibi_slopes=alibi_slopes, dropout_seed=dropout_seed, **options)


def _fake_forward(q, k, v, *_, **options):
    return _results(q, v, True)


def _backward_kernel(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cache_seqlens, alibi_slopes, dropout_seed, wants_slopes, comm, *,
                     max_seqlen_q, max_seqlen_k, window_left=-1, window_right=-1, **options):
    world = known(comm)
    dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
    dslopes = alibi_slopes.new_zeros(alibi_slopes.shape) if wants_slopes else q.new_empty(0)
    batch = cache_seqlens.shape[0]
    if batch == 0:
        return dq, dk, dv, dslopes
    q, out, dout, lse = (t.contiguous() for t in (q, out, dout, lse))
    k, v = _keys_as_read(k, v)
    if v.data_ptr() == k.data_ptr():  # autograd wants a gradient of each, even if they share their memory
        k, v = k.contiguous(), v.clone(memory_format=torch.contiguous_format)
    options |= dict(heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2], value_dim=v.shape[2], dtype=q.dtype,
                    window_size=(window_left, window_right), max_queries=_rounded(q.shape[0]), max_batch=batch,
                    max_seqlen_k=_rounded(max_seqlen_k or k.shape[0]))
    key = ("packed", *options.values())
    layer = world.trainers.get(key)
    if layer is None:
        if len(world.trainers) >= _MOST_LAYERS:
            world.trainers.clear()
        layer = world.trainers[key] = longspan.Attention(world.for_writers(), alibi="query", gradients=True, **options)
    terms = {} if alibi_slopes is None else {"alibi_slopes": alibi_slopes.contiguous()}
    layer.backward(dout, q, k, v, out, lse, dlse=None if dlse is None else dlse.contiguous(), dq=dq, dk=dk, dv=dv,
                   dalibi_slopes=dslopes if wants_slopes else None, cu_seqlens_q=cu_seqlens_q, cache_seqlens=cache_seqlens,
                   dropout_seed=dropout_seed, accumulate=True, **terms)
    return dq, dk, dv, dslopes


def _fake_backward(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cache_seqlens, alibi_slopes, dropout_seed, wants_slopes, comm,
                   **options):
    return (*(t.new_empty(t.shape) for t in (q, k, v)),
            alibi_slopes.new_empty(alibi_slopes.shape) if wants_slopes else q.new_empty(0))


_define("attend_packed", f"Tensor q, Tensor k, Tensor v, {_TERMS}, str comm, {_OPTIONS}) -> (Tensor, Tensor)", _forward_kernel,
        _fake_forward)
_define("attend_packed_backward", f"Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TERMS}, "
        f"bool wants_slopes, str comm, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)", _backward_kernel, _fake_backward)


def _setup(ctx, inputs, keyword_only_inputs, output):
    q, k, v, *terms, ctx.comm = inputs
    ctx.options = dict(keyword_only_inputs)
    ctx.save_for_backward(q, k, v, *output, *terms)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    tensors = ctx.saved_tensors
    if wants_grad(*tensors, dout, dlse):
        raise UnsupportedError("a second derivative (create_graph=True) is asked for: the gradients of attention have "
                               "none")
    if dout is None:
        dout = torch.zeros_like(tensors[3])
    wants_slopes = ctx.needs_input_grad[5]
    dq, dk, dv, dslopes = torch.ops.longspan.attend_packed_backward.default(dout, dlse, *tensors, wants_slopes, ctx.comm,
                                                                            **ctx.options)
    return dq, dk, dv, None, None, dslopes if wants_slopes else None, None, None


torch.library.register_autograd("longspan::attend_packed", _backward, setup_context=_setup, lib=library)
