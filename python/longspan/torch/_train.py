"""Attention with a rule for torch's autograd.

    attend_train      q, k, v, sinks, slopes  ->  out, lse, counts     (with dropout by a seed, which is kept)
    attend_backward   dout, dlse, and all of these  ->  dq, dk, dv, dsinks, dslopes

Autograd keeps the tensors of a call and nothing else. `counts` are the ranks' keys and rows, where they
were asked for them, so that the backward need not ask again. With heads_first q, k, v, out and their
gradients are [batch, heads, tokens, dim], which saves the nodes of transposes. The backward runs a
layer of its own, which the communicator keeps. Both operators are collective.

Where nothing observes operators, an autograd.Function takes their place, which costs a fraction of
them. It saves the same tensors, since a checkpoint may compute again by the other way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import longspan
from longspan import UnsupportedError, _core
from longspan._attention import ATTEND, BACKWARD

from ._groups import Known, known
from ._layouts import Lengths
from ._ops import (_attend, _define, _keys_as_read, _results, _rounded, _shares, ask, asks, is_unwatched, library,
                   sequences)

_OPTIONS = """*, bool causal=False, str causal_alignment='lower_right',
    float? softmax_scale=None, SymInt window_left=-1, SymInt window_right=-1, SymInt attention_chunk=0,
    SymInt chunk_lookback=0, SymInt prefix=0, bool clamp_bidirectional=False, float softcap=0.0,
    float dropout_p=0.0, str keys='contiguous', str queries='',
    SymInt? total_keys=None, SymInt? total_queries=None, bool equal_lengths=False,
    bool invariant=False, str strategy='auto', bool heads_first=False"""
_WITH_GRADIENTS = frozenset(("causal", "causal_alignment", "softmax_scale", "window_left", "window_right",
                             "attention_chunk", "chunk_lookback", "prefix", "clamp_bidirectional", "softcap",
                             "dropout_p", "keys", "queries", "total_keys", "total_queries", "equal_lengths", "invariant", "strategy"))
_OF_ARRAYS = ("sinks", "alibi_slopes", "documents", "bidirectional", "prefix_lens", "cache_leftpad", "dropout_seed")
_SAVED = 5 + len(_OF_ARRAYS)  # tensors for a backward, with q, k, v, out and lse
_TERMS = ", ".join(f"Tensor? {name}" for name in _OF_ARRAYS)
_MOST_LAYERS = 16  # of a communicator: as many shapes may take turns
_MOST_PLANS = 256


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def attend_recorded(q: Tensor, k: Tensor, v: Tensor, comm: str, heads_first: bool = False, /, **options) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that autograd records. `options` are those of the operator attend. With `heads_first` q, k, v
    and out are [batch, heads, tokens, dim]; lse is [batch, tokens, heads] always."""
    terms = [options.pop(name, None) for name in _OF_ARRAYS]
    if not _WITH_GRADIENTS.issuperset(options):
        name = next(name for name in options if name not in _WITH_GRADIENTS)
        raise UnsupportedError(f"{name} is given, and the call is recorded for a backward, in which it is not supported: "
                               "leave it out, or call it under torch.no_grad()")
    if is_unwatched(q, k, v) and forward_ad._current_level < 0:
        return _record(q, k, v, *terms[:2], (*terms[2:], comm, heads_first, options))
    return torch.ops.longspan.attend_train.default(q, k, v, *terms, comm, heads_first=heads_first, **options)[:2]


# ---- forward and backward of tensors ------------------------------------------------------------

class _Plan:
    """How calls of some shapes and options are computed, for those after the first."""

    __slots__ = ("forward", "backward", "one_by_one", "writes_all")

    def __init__(self):
        self.forward: dict | None = None  # arguments of the extension module; None: by _attend, which checks everything
        self.backward: dict | None = None  # likewise; None: its layer has yet to be made
        self.one_by_one = False  # in backward sequences of a batch take turns
        self.writes_all = False  # every row and key belongs to a sequence, so that all gradients are written


def _key(q, k, v, counts, options) -> tuple:
    return q.shape, k.shape, v.shape, q.dtype, k.dtype, *counts, *options.items()


def _plan_of(world: Known, key: tuple) -> _Plan:
    plan = world.plans.get(key)
    if plan is None:
        if len(world.plans) >= _MOST_PLANS:
            world.plans.clear()
        plan = world.plans[key] = _Plan()
    return plan


def _forward(comm: str, q, k, v, terms, options, out=None) -> tuple:
    """(out, lse, counts, key): the answers of the ranks where they were asked, and the key of the plan."""
    world, counts = known(comm), ()
    dims = q.dim()
    if dims == k.dim() and (dims == 3 or (dims == 4 and 0 < q.shape[0] == k.shape[0])) and asks(
            world.size, options.get("queries"), options.get("total_keys"), options.get("total_queries")):
        counts = ask(world, q, k)
    key = _key(q, k, v, counts, options)
    plan = _plan_of(world, key)
    if plan.forward is None:
        calls = []

        def call(q, k, v, **given):
            calls.append(given)
            return longspan.attend(q, k, v, **given)

        out, lse = _attend(q, k, v, comm, return_lse=True, **dict(zip(_OF_ARRAYS, terms)), counts=counts, out=out, call=call,
                           **options)
        if len(calls) == 1:  # not a sequence after the other, nor none
            own = ("comm", "out", "lse", *_OF_ARRAYS)
            plan.forward = ATTEND | {name: given for name, given in calls[0].items() if name not in own}
        return out, lse, counts, key
    if q.stride(-1) != 1 or plan.forward["queries"] is not None:
        q = q.contiguous()
    k, v = _keys_as_read(k, v)
    given = plan.forward | {"q": q, "k": k, "v": v, "out": out, "comm": world.comm}
    _add_terms(given, terms)
    out, lse = _core.attend(**given)
    return out, lse, counts, key


def _add_terms(given: dict, terms) -> None:
    for name, array in zip(_OF_ARRAYS, terms):
        if array is not None:
            given[name] = array if name == "dropout_seed" else array.contiguous()


def _most_rows(rows: Lengths, ranks: int) -> int:
    """The most rows of a rank."""
    if rows.table is not None:
        return max(b - a for a, b in zip(rows.table, rows.table[1:]))
    return max(len(rows.layout.shard(rows.total, rank, ranks)) for rank in range(ranks))


def _layer(world: Known, keys, queries, sizes: dict, options: dict) -> longspan.Attention:
    """The layer for such calls; collective where it is made."""
    key = (keys, queries, *sizes.values(), *options.values())
    layer = world.trainers.get(key)
    if layer is None:
        if len(world.trainers) >= _MOST_LAYERS:  # the same on all ranks, as the calls are
            world.trainers.clear()
            world.plans.clear()
        layer = world.trainers[key] = longspan.Attention(
            world.for_writers(), keys=keys, queries=queries, alibi="query", gradients=True, **sizes, **options)
    return layer


def _prepare_backward(plan: _Plan, world: Known, q, k, v, counts, causal=False, causal_alignment="lower_right",
                      softmax_scale=None, window_left=-1, window_right=-1, attention_chunk=0, chunk_lookback=0,
                      prefix=0, clamp_bidirectional=False, softcap=0.0, dropout_p=0.0, keys="contiguous",
                      queries="", total_keys=None, total_queries=None, equal_lengths=False, invariant=False,
                      strategy="auto") -> None:
    """Collective where a layer is made."""
    batch = q.shape[0] if q.dim() == 4 else 1
    options = dict(causal=causal, causal_alignment=causal_alignment, softmax_scale=softmax_scale,
                   window_size=(window_left, window_right), attention_chunk=attention_chunk,
                   chunk_lookback=chunk_lookback, prefix=prefix, clamp_bidirectional=clamp_bidirectional,
                   softcap=softcap, dropout_p=dropout_p, invariant=invariant,
                   strategy=strategy)
    writes_all = q.numel() > 0 and k.numel() > 0
    one_by_one = False
    if world.size == 1:
        keys, queries, rows, most_keys = "contiguous", None, q.shape[-3], k.shape[-3]
        writes_all = writes_all and total_keys in (None, most_keys)
        given = dict(total_keys=total_keys)
    else:
        of_keys, of_rows = _shares(world, q, k, keys, queries, total_keys, total_queries, counts)
        keys, most_keys = of_keys.layout, of_keys.total
        given = dict(total_keys=most_keys)
        one_by_one = batch > 1 and of_rows.table is not None  # a table of rows describes one sequence
        if of_keys.table is not None:
            given["key_table"] = torch.tensor(of_keys.table, device=q.device)
            if q.dim() == 4 and not one_by_one:
                given["key_table"] = given["key_table"].repeat(batch, 1)
        if of_rows.table is not None:
            given["query_table"] = torch.tensor(of_rows.table, device=q.device)
        if queries:
            queries, rows = of_rows.layout, _most_rows(of_rows, world.size)
            given["total_queries"] = of_rows.total
            if strategy == "auto" and of_rows.table is not None and q.device.type == "cuda":
                options["strategy"] = "gather-kv"  # auto has none for rows by a table
        else:
            queries, rows = None, of_rows.total
    at_once = 1 if one_by_one else batch
    sizes = dict(heads=q.shape[-2], kv_heads=k.shape[-2], head_dim=q.shape[-1], value_dim=v.shape[-1], dtype=q.dtype,
                 max_queries=_rounded(at_once * rows), max_batch=at_once, max_seqlen_k=_rounded(most_keys))
    layer = _layer(world, keys, queries, sizes, options)
    plan.backward = BACKWARD | given | dict(layer=layer._layer, accumulate=one_by_one)
    plan.one_by_one, plan.writes_all = one_by_one, writes_all and not one_by_one


def _gradients(comm: str, key, dout, dlse, q, k, v, out, lse, terms, wants_sinks, wants_slopes, counts, options) -> tuple:
    """dq, dk, dv in the shapes of q, k, v; dsinks and dslopes, or None."""
    sinks, alibi_slopes = terms[:2]
    if q.dim() == 4 and q.shape[0] == 0:
        return *(torch.zeros_like(t) for t in (q, k, v)), *(torch.zeros_like(t) if wants else None for t, wants in
                                                            ((sinks, wants_sinks), (alibi_slopes, wants_slopes)))
    world = known(comm)
    plan = _plan_of(world, key)
    if plan.backward is None:
        _prepare_backward(plan, world, q, k, v, counts, **options)
        world.plans[key] = plan  # a new layer may have released all plans
    k, v = _keys_as_read(k, v)
    if v.data_ptr() == k.data_ptr():  # autograd wants a gradient of each, even if they share their memory
        k, v = k.contiguous(), v.clone(memory_format=torch.contiguous_format)
    q = q.contiguous()
    new, dense = torch.empty_like if plan.writes_all else torch.zeros_like, torch.contiguous_format
    dq, dk, dv = new(q), new(k, memory_format=dense), new(v, memory_format=dense)
    given = plan.backward | {"q": q, "k": k, "v": v, "out": out.contiguous(), "lse": lse.contiguous(),
                             "dout": dout.contiguous(), "dq": dq, "dk": dk, "dv": dv}
    _add_terms(given, terms)
    dsinks = dslopes = None
    if wants_sinks:
        given["dsinks"] = dsinks = torch.zeros_like(sinks, memory_format=torch.contiguous_format)
    if wants_slopes:
        given["dalibi_slopes"] = dslopes = torch.zeros_like(alibi_slopes, memory_format=torch.contiguous_format)
    if dlse is not None:
        given["dlse"] = dlse.contiguous()
    if plan.one_by_one:
        for b, own in sequences(q, given | options):
            own |= {name: given[name][b].contiguous() for name in ("q", "k", "v", "out", "lse", "dout")}
            own |= {name: given[name][b] for name in ("dlse", "dq", "dk", "dv") if given[name] is not None}
            _core.backward_layer(**given | own)
    else:
        _core.backward_layer(**given)
    return dq, dk, dv, dsinks, dslopes


def _refuse_second(*tensors: Tensor | None) -> None:
    if wants_grad(*tensors):
        raise UnsupportedError("a second derivative (create_graph=True) is asked for: the gradients of attention have "
                               "none")


def _forward_any(comm: str, heads_first: bool, q, k, v, *terms, options: dict) -> tuple:
    """_forward of q, k, v in either order of dimensions."""
    if not heads_first:
        return _forward(comm, q, k, v, terms, options)
    q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
    if q.dim() != 3 and (q.dim() != 4 or q.shape[0] == 0):
        out, *others = _forward(comm, q, k, v, terms, options)
        return out.transpose(-3, -2), *others
    made = _empty_heads_first(q, v)
    return made, *_forward(comm, q, k, v, terms, options, made.transpose(-3, -2))[1:]


def _empty_heads_first(q: Tensor, v: Tensor) -> Tensor:
    """Memory of the result for q [batch, tokens, heads, dim], seen as [batch, heads, tokens, value_dim]. It is no view, so
    that it may be changed in place."""
    *batch, tokens, heads, _ = q.shape
    dim = v.shape[-1]
    return torch.empty_strided((*batch, heads, tokens, dim), (*(tokens * heads * dim for _ in batch), dim, heads * dim, 1),
                               dtype=q.dtype, device=q.device)


def _gradients_any(comm: str, heads_first: bool, key, dout, dlse, q, k, v, out, *others) -> tuple:
    """_gradients of q, k, v in either order of dimensions; without a key that of the tensors."""
    if heads_first:
        q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
        out, dout = out.transpose(-3, -2), dout.transpose(-3, -2)
    if key is None:
        key = _key(q, k, v, *others[-2:])
    made = _gradients(comm, key, dout, dlse, q, k, v, out, *others)
    if not heads_first:
        return made
    dq, dk, dv, dsinks, dslopes = made
    return dq.transpose(-3, -2), dk.transpose(-3, -2), dv.transpose(-3, -2), dsinks, dslopes


# ---- where nothing observes operators -----------------------------------------------------------

class _Recorded(torch.autograd.Function):
    """attend_train and its rule."""

    @staticmethod
    def forward(ctx: Any, q, k, v, sinks, alibi_slopes, others):
        *terms, comm, heads_first, options = others
        out, lse, counts, key = _forward_any(comm, heads_first, q, k, v, sinks, alibi_slopes, *terms, options=options)
        ctx.call = comm, heads_first, options, counts, key
        kept = (torch.tensor(counts, device="cpu"),) if counts else ()
        ctx.save_for_backward(q, k, v, out, lse, sinks, alibi_slopes, *terms, *kept)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        q, k, v, out, lse, *terms = tensors = ctx.saved_tensors[:_SAVED]
        comm, heads_first, options, counts, key = ctx.call
        if torch.is_grad_enabled():
            _refuse_second(*tensors, dout, dlse)
        if dout is None:
            dout = torch.zeros_like(out)
        wants = ctx.needs_input_grad[3:5]
        if is_unwatched(q, k, v):
            return *_gradients_any(comm, heads_first, key, dout, dlse, q, k, v, out, lse, terms, *wants, counts, options), None
        return *_backward_operator(dout, dlse, *tensors, *wants, torch.tensor(counts, dtype=torch.int64, device="cpu"), comm,
                                   options | {"heads_first": heads_first}), None


_record = super(torch.autograd.Function, _Recorded).apply  # _Recorded.apply without its checks for transforms of torch.func


# ---- the operators ------------------------------------------------------------------------------

def _no_counts(q: Tensor, comm: str, queries="", total_keys=None, total_queries=None, **_) -> Tensor:
    """Memory for the ranks' keys and rows: on the host, which reads them, or where they are not asked for, nothing."""
    ranks = known(comm).size
    if asks(ranks, queries, total_keys, total_queries):
        return torch.zeros(2 * ranks, dtype=torch.int64, device="cpu")
    return q.new_empty(0, dtype=torch.int64)


def _forward_kernel(q, k, v, *terms, heads_first=False, **options):
    *terms, comm = terms
    out, lse, counts, _ = _forward_any(comm, heads_first, q, k, v, *terms, options=options)
    kept = _no_counts(q, comm, **options)
    return out, lse, kept.copy_(torch.tensor(counts, device="cpu")) if counts else kept


def _fake_forward(q, k, v, *terms, heads_first=False, **options):
    comm = terms[-1]
    rows, values = (q.transpose(-3, -2), v.transpose(-3, -2)) if heads_first else (q, v)
    out, lse = _results(rows, values, True)
    return out.transpose(-3, -2) if heads_first else out, lse, _no_counts(q, comm, **options)


def _backward_kernel(dout, dlse, q, k, v, out, lse, *others, heads_first=False, **options):
    *terms, wants_sinks, wants_slopes, counts, comm = others
    counts = counts.tolist() if counts.numel() else ()
    *made, dsinks, dslopes = _gradients_any(comm, heads_first, None, dout, dlse, q, k, v, out, lse, terms, wants_sinks,
                                            wants_slopes, counts, options)
    return *made, *(q.new_empty(0) if one is None else one for one in (dsinks, dslopes))


def _fake_backward(dout, dlse, q, k, v, out, lse, sinks, alibi_slopes, *others, heads_first=False, **options):
    wants_sinks, wants_slopes = others[-4:-2]
    made = [t.transpose(-3, -2) if heads_first else t for t in (q, k, v)]
    made = [t.new_empty(t.shape) for t in made]
    return (*(t.transpose(-3, -2) if heads_first else t for t in made),
            sinks.new_empty(sinks.shape) if wants_sinks else q.new_empty(0),
            alibi_slopes.new_empty(alibi_slopes.shape) if wants_slopes else q.new_empty(0))


_define("attend_train", f"Tensor q, Tensor k, Tensor v, {_TERMS}, str comm, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
        _forward_kernel, _fake_forward)
_define("attend_backward", f"Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TERMS}, "
        f"bool wants_sinks, bool wants_slopes, Tensor counts, str comm, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _backward_kernel, _fake_backward)


def _backward_operator(dout, dlse, *others):
    """`others`: q, k, v, out, lse, the terms, wants_sinks, wants_slopes, counts, comm and the options."""
    *others, options = others
    wants_sinks, wants_slopes = others[-4:-2]
    *made, dsinks, dslopes = torch.ops.longspan.attend_backward.default(dout, dlse, *others, **options)
    return *made, dsinks if wants_sinks else None, dslopes if wants_slopes else None


def _setup(ctx, inputs, keyword_only_inputs, output):
    q, k, v, *terms, ctx.comm = inputs
    out, lse, counts = output
    ctx.options = dict(keyword_only_inputs)
    ctx.save_for_backward(q, k, v, out, lse, *terms, *((counts,) if counts.numel() else ()))
    ctx.mark_non_differentiable(counts)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse, _):
    *tensors, counts = saved if len(saved := ctx.saved_tensors) > _SAVED else (*saved, saved[0].new_empty(0, dtype=torch.int64))
    _refuse_second(*tensors, dout, dlse)
    if dout is None:
        dout = torch.zeros_like(tensors[3])
    return *_backward_operator(dout, dlse, *tensors, *ctx.needs_input_grad[3:5], counts, ctx.comm, ctx.options), \
        *(None,) * (len(_OF_ARRAYS) - 1)


torch.library.register_autograd("longspan::attend_train", _backward, setup_context=_setup, lib=library)
