"""Attention with a rule for torch's autograd.

    attend_train      q, k, v, sinks, slopes  ->  out, lse     (with dropout by a seed, which is kept)
    attend_backward   dout, dlse, and all of these  ->  dq, dk, dv, dsinks, dslopes

Autograd keeps the tensors of a call and nothing else. The backward runs a layer of its own, which
the communicator keeps. Both operators are collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

import longspan
from longspan import UnsupportedError

from ._groups import Known, known
from ._layouts import Lengths
from ._ops import _attend, _define, _keys_as_read, _results, _rounded, _shares, library

_OPTIONS = """*, bool causal=False, str causal_alignment='lower_right',
    float? softmax_scale=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0,
    float dropout_p=0.0, str keys='contiguous', str queries='',
    SymInt? total_keys=None, SymInt? total_queries=None, bool equal_lengths=False,
    bool invariant=False, str strategy='auto'"""
_WITH_GRADIENTS = frozenset(("causal", "causal_alignment", "softmax_scale", "window_left", "window_right", "softcap",
                             "dropout_p", "keys", "queries", "total_keys", "total_queries", "equal_lengths", "invariant", "strategy"))
_TERMS = "Tensor? sinks, Tensor? alibi_slopes, Tensor? documents, Tensor? cache_leftpad, Tensor? dropout_seed"
_OF_ARRAYS = ("sinks", "alibi_slopes", "documents", "cache_leftpad", "dropout_seed")  # in the order of _TERMS
_MOST_LAYERS = 16  # of a communicator: as many shapes may take turns


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def attend_recorded(q: Tensor, k: Tensor, v: Tensor, comm: str, **options) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that autograd records. `options` are those of the operator attend."""
    terms = [options.pop(name, None) for name in _OF_ARRAYS]
    for name, given in options.items():
        if name not in _WITH_GRADIENTS:
            raise UnsupportedError(f"{name} is given, and the call is recorded for a backward, in which it is not supported: "
                                   "leave it out, or call it under torch.no_grad()")
    return torch.ops.longspan.attend_train.default(q, k, v, *terms, comm, **options)


def _forward_kernel(q, k, v, sinks, alibi_slopes, documents, cache_leftpad, dropout_seed, comm, **options):
    return _attend(q, k, v, comm, return_lse=True, sinks=sinks, alibi_slopes=alibi_slopes, documents=documents,
                   cache_leftpad=cache_leftpad, dropout_seed=dropout_seed, **options)


def _fake_forward(q, k, v, sinks, alibi_slopes, documents, cache_leftpad, dropout_seed, comm, **options):
    return _results(q, v, True)


def _most_rows(rows: Lengths, ranks: int) -> int:
    """The most rows of a rank."""
    if rows.table is not None:
        return max(b - a for a, b in zip(rows.table, rows.table[1:]))
    return max(len(rows.layout.shard(rows.total, rank, ranks)) for rank in range(ranks))


def _layer(world: Known, q, k, v, keys, queries, most_rows, most_keys, options) -> longspan.Attention:
    """The layer for such calls; collective where it is made."""
    sizes = dict(heads=q.shape[-2], kv_heads=k.shape[-2], head_dim=q.shape[-1], value_dim=v.shape[-1], dtype=q.dtype,
                 max_queries=_rounded(most_rows), max_batch=q.shape[0] if q.dim() == 4 else 1,
                 max_seqlen_k=_rounded(most_keys))
    key = (keys, queries, *sizes.values(), *options.values())
    layer = world.trainers.get(key)
    if layer is None:
        if len(world.trainers) >= _MOST_LAYERS:  # the same on all ranks, as the calls are
            world.trainers.clear()
        layer = world.trainers[key] = longspan.Attention(
            world.for_writers(), keys=keys, queries=queries, alibi="query", gradients=True, **sizes, **options)
    return layer


def _backward_kernel(dout, dlse, q, k, v, out, lse, sinks, alibi_slopes, documents, cache_leftpad, dropout_seed,
                     wants_sinks, wants_slopes, comm, *, causal=False, causal_alignment="lower_right", softmax_scale=None,
                     window_left=-1, window_right=-1, softcap=0.0, dropout_p=0.0, keys="contiguous", queries="", total_keys=None,
                     total_queries=None, equal_lengths=False, invariant=False, strategy="auto"):
    world = known(comm)
    dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
    dsinks = sinks.new_zeros(sinks.shape) if wants_sinks else q.new_empty(0)
    dslopes = alibi_slopes.new_zeros(alibi_slopes.shape) if wants_slopes else q.new_empty(0)
    batch = q.shape[0] if q.dim() == 4 else 1
    if batch == 0:
        return dq, dk, dv, dsinks, dslopes
    options = dict(causal=causal, causal_alignment=causal_alignment, softmax_scale=softmax_scale,
                   window_size=(window_left, window_right), softcap=softcap, dropout_p=dropout_p, invariant=invariant,
                   strategy=strategy)
    q, out, dout, lse = (t.contiguous() for t in (q, out, dout, lse))
    dlse = None if dlse is None else dlse.contiguous()
    k, v = _keys_as_read(k, v)
    if v.data_ptr() == k.data_ptr():  # autograd wants a gradient of each, even if they share their memory
        k, v = k.contiguous(), v.clone(memory_format=torch.contiguous_format)
    terms = {name: t.contiguous() for name, t in (("sinks", sinks), ("alibi_slopes", alibi_slopes)) if t is not None}
    given = dict(dsinks=dsinks if wants_sinks else None, dalibi_slopes=dslopes if wants_slopes else None,
                 dropout_seed=dropout_seed, accumulate=True, **terms)
    of_sequences = {name: t.contiguous() for name, t in (("documents", documents), ("cache_leftpad", cache_leftpad))
                    if t is not None}
    if world.size == 1:
        layer = _layer(world, q, k, v, "contiguous", None, batch * q.shape[-3], k.shape[-3], options)
        layer.backward(dout, q, k, v, out, lse, dlse=dlse, dq=dq, dk=dk, dv=dv, total_keys=total_keys, **given,
                       **of_sequences)
        return dq, dk, dv, dsinks, dslopes
    of_keys, of_rows = _shares(world, q, k, keys, queries, total_keys, total_queries)
    given |= dict(total_keys=of_keys.total)
    for name, one in (("key_table", of_keys), ("query_table", of_rows)):
        if one.table is not None:
            given[name] = torch.tensor(one.table, device=q.device)
    if queries:
        given["total_queries"] = of_rows.total
        if strategy == "auto" and of_rows.table is not None and q.device.type == "cuda":
            options["strategy"] = "gather-kv"  # auto has none for rows by a table
    most_rows = _most_rows(of_rows, world.size) if queries else of_rows.total
    for b in range(batch):  # sequences of a batch take turns
        parts = [t if t is None or q.dim() == 3 else t[b].contiguous() for t in (dout, q, k, v, out, lse, dlse)]
        own = {name: t if q.dim() == 3 or (name == "documents" and t.dim() == 1) else t[b:b + 1]
               for name, t in of_sequences.items()}
        if dropout_p:
            own["dropout_sequences"] = torch.tensor([b], dtype=torch.int32, device=q.device)
        gradients = [t if q.dim() == 3 else t[b] for t in (dq, dk, dv)]
        layer = _layer(world, *parts[1:4], of_keys.layout, of_rows.layout if queries else None, most_rows,
                       of_keys.total, options)
        layer.backward(*parts[:6], dlse=parts[6], dq=gradients[0], dk=gradients[1], dv=gradients[2], **given, **own)
    return dq, dk, dv, dsinks, dslopes


def _fake_backward(dout, dlse, q, k, v, out, lse, sinks, alibi_slopes, documents, cache_leftpad, dropout_seed, wants_sinks,
                   wants_slopes, comm, **options):
    return (*(t.new_empty(t.shape) for t in (q, k, v)),
            sinks.new_empty(sinks.shape) if wants_sinks else q.new_empty(0),
            alibi_slopes.new_empty(alibi_slopes.shape) if wants_slopes else q.new_empty(0))


_define("attend_train", f"Tensor q, Tensor k, Tensor v, {_TERMS}, str comm, {_OPTIONS}) -> (Tensor, Tensor)",
        _forward_kernel, _fake_forward)
_define("attend_backward", f"Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TERMS}, "
        f"bool wants_sinks, bool wants_slopes, str comm, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _backward_kernel, _fake_backward)


def _setup(ctx, inputs, keyword_only_inputs, output):
    q, k, v, *terms, ctx.comm = inputs
    ctx.options = dict(keyword_only_inputs)
    ctx.save_for_backward(q, k, v, *output, *terms)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    tensors = ctx.saved_tensors
    out = tensors[3]
    if wants_grad(*tensors, dout, dlse):
        raise UnsupportedError("a second derivative (create_graph=True) is asked for: the gradients of attention have "
                               "none")
    if dout is None:
        dout = torch.zeros_like(out)
    wants_sinks, wants_slopes = ctx.needs_input_grad[3:5]
    dq, dk, dv, dsinks, dslopes = torch.ops.longspan.attend_backward.default(
        dout, dlse, *tensors, wants_sinks, wants_slopes, ctx.comm, **ctx.options)
    return dq, dk, dv, dsinks if wants_sinks else None, dslopes if wants_slopes else None, None, None, None, None


torch.library.register_autograd("longspan::attend_train", _backward, setup_context=_setup, lib=library)
