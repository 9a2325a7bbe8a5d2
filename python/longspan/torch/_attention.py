"""scaled_dot_product_attention with torch's signature, and a layer for models."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from longspan import Communicator, InputError, Sharding, UnsupportedError, attend
from longspan._attention import ALONE
from longspan._communicators import warn_of_others
from longspan._shards import _cuts, contradiction, refuse
from longspan.mask import Mask, arguments_of

from ._groups import Ranks, alone_name, known, name_of
from ._layouts import layout_text, rule_of, shard_of, unshard_of
from ._ops import agreed_seed, attend as _attend, attend_lse as _attend_lse
from ._train import attend_recorded, wants_grad
from ._transforms import refuse_tangent

AS_KEYS = "as keys"
AUTOCASTS = ("cpu", "cuda")  # the devices here that have autocast


def _refuse_other_cut(q, k, v, tokens_dim, name, keys, queries, cache_seqlens, total_keys, total_queries, keys_name):
    """Where the call contradicts how longspan.shard cut its tensors. Nothing is known of views, nor in a trace."""
    if torch.compiler.is_compiling() or not _cuts:
        return
    rule = rule_of(layout_text(keys, keys_name))
    rows = rule if queries == AS_KEYS else None if queries is None else rule_of(layout_text(queries, "queries"))
    refuse(contradiction(q, k, v, comm=known(name).comm, keys=rule, queries=rows, cache_seqlens=cache_seqlens,
                         total_keys=total_keys, total_queries=total_queries, tokens_dim=tokens_dim,
                         names=("query", "key", "value"), keys_name=keys_name)[2])


def _check(query: Tensor, key: Tensor, value: Tensor, heads_dim: int) -> None:
    """Raises what is wrong with them under the caller's names. Eager calls come here only after a failure,
    which saves time: the functions below check everything."""
    for name, one in (("query", query), ("key", key), ("value", value)):
        if not isinstance(one, Tensor):
            raise TypeError(f"{name} is of type '{type(one).__name__}'; a tensor is wanted")
        if one.is_nested or one.layout != torch.strided:
            raise UnsupportedError(f"{name} is {'nested' if one.is_nested else one.layout}: give a dense tensor "
                                   "(to_padded_tensor, to_dense), or one packed sequence with documents")
        if not torch._C._functorch.is_batchedtensor(one):
            refuse_tangent(name, one)
        if one.dim() != query.dim():
            raise InputError(f"{name} has {one.dim()} dimensions and query {query.dim()}; give it as many "
                             "(unsqueeze, flatten)")
        if one.device != query.device:
            raise InputError(f"{name} lies on {one.device}, and query on {query.device}")
        if one.dtype != query.dtype:
            raise InputError(f"{name} is {one.dtype}, and query is {query.dtype}")
    if query.dim() not in (3, 4):
        raise InputError(f"query has {query.dim()} dimensions; 3 or 4 are wanted: unsqueeze(0) adds one, flatten(0, 1) "
                         "makes one of two batches")
    if key.shape[-1] != query.shape[-1]:
        raise InputError(f"key has {key.shape[-1]} columns and query {query.shape[-1]}")
    if value.shape[:-1] != key.shape[:-1]:
        raise InputError(f"value is {list(value.shape)} and key {list(key.shape)}; but for the last dimension "
                         "they are alike")
    heads, kv_heads = query.shape[heads_dim], key.shape[heads_dim]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise InputError(f"query has {heads} heads and key {kv_heads}, which does not divide them")


def _cast(device: str, *tensors: Tensor) -> list[Tensor]:
    """Casts under autocast, as torch does for its own function."""
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 and t.device.type == device else t
            for t in tensors]


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcasts as torch does: one sequence to the batch, one head to all heads."""
    if not query.dim() == key.dim() == value.dim():
        return query, key, value  # _check names it
    if query.dim() == 4:
        batch = max(t.shape[0] for t in (query, key, value))
        query, key, value = (t.expand(batch, -1, -1, -1) if t.shape[0] == 1 else t for t in (query, key, value))
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if not enable_gqa and heads != kv_heads and 1 not in (heads, kv_heads):
        raise InputError(f"query has {heads} heads and key {kv_heads}; enable_gqa=True allows that")
    if heads == 1 < kv_heads:
        query = query.expand(*query.shape[:-3], kv_heads, -1, -1)
    return query, key, value


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: CausalBias | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: Any = None,
    comm: Communicator | None = None,
    keys: str | Sharding = "zigzag",
    queries: str | Sharding | None = AS_KEYS,
    causal_alignment: str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    total_keys: int | None = None,
    total_queries: int | None = None,
    invariant: bool = False,
    strategy: str = "auto",
    return_lse: bool = False,
    dropout_seed: Tensor | None = None,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention over keys and values of all ranks.

    Every rank gives its own tokens and gets their result. Works eagerly and under
    torch.compile(fullgraph=True), on CPUs and GPUs. Transposes of [batch, tokens, heads, dim], as
    models make them, are not copied. Other query rows are copied into that order, as are other keys
    and values with strategy gather-kv. As with torch's own, any strides are accepted, one sequence
    broadcasts to the batch and one head to all heads, and autocast casts.

    Args:
        query: [batch, heads, tokens, dim] or [heads, tokens, dim], float32, float16 or bfloat16; on CPUs also
            float64.
        key: [batch, kv_heads, keys, dim]; value: [batch, kv_heads, keys, value_dim]; this rank's.
        attn_mask: None; one of longspan.mask, which then says causal and window too; or
            torch.nn.attention.bias.causal_lower_right(...) or causal_upper_left(...), of the lengths over
            all ranks or of this rank's. Others, such as masks of numbers, are refused.
        dropout_p: drop weights with this probability, in [0, 1). The mask is a function of the seed, the sequence's
            number in the batch, the head and the positions alone: the same for any number of ranks.
        is_causal: a token sees keys up to its own position in the whole sequence. With as many query
            tokens as keys there is one meaning; otherwise is_causal is refused without
        causal_alignment: "upper_left": the rows are the first tokens, as torch counts with is_causal;
            "lower_right": they are the last tokens, as in decode. Windows and slopes follow it; None
            is lower_right there.
        scale: of the products; None is 1 / sqrt(dim).
        enable_gqa: kv_heads may be fewer than heads.
        group: the ranks: a ProcessGroup, a DeviceMesh of one dimension, or None: the default group,
            or this process alone where torch.distributed is not initialised.
        comm: in place of `group`, a longspan.Communicator. It is the caller's: nothing here keeps it.
        keys: how keys are dealt out: "zigzag" (as context_parallel does), "striped", "interleaved:64"
            (blocks of 64), or "contiguous": parts in rank order, of any lengths.
        queries: likewise the rows of `query`; "as keys" is the same. None: every rank has all rows
            and gets the whole result, as in decode.
        window_size: (left, right) keys that a token sees besides its own; -1 is no bound.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: [heads]; sinks: [heads] learned sinks.
        documents: [count + 1] int64 starts of documents packed in the one sequence of the batch, or
            [batch, count + 1]; longspan.document_starts makes them of a number for each token.
        cache_leftpad: [batch] int32, the first keys of each sequence, which are padding that no
            token sees. longspan.padding makes it, or documents, of an attention_mask.
        total_keys, total_queries: tokens over all ranks. None asks the ranks, which costs a round of
            messages in each call; given, contiguous parts are those that longspan.shard cuts, at
            multiples of 128 tokens.
        invariant: the same bits for 1, 2, 4 ... ranks.
        strategy: a name of longspan.strategies(). "auto" takes on GPUs the fastest by the cost
            model; on CPUs it sends whichever is fewer bytes: keys and values, or query rows and
            states.
        return_lse: return (out, lse), lse [batch, heads, tokens] float32, natural logarithms. It has no dropout.
        dropout_seed: [1] or [2] int64, seed and offset of dropout_p, on the query's device, the same on all ranks. None
            draws them: rank 0 from torch's generator of that device, which costs a round of messages in each call. So
            torch.manual_seed, and its state in a checkpoint, repeat them, and torch.utils.checkpoint does.

    Autograd differentiates it, with respect to query, key, value, sinks and alibi_slopes, also of
    lse. The backward is collective, as the call is: all ranks make the same ones in the same order. A rank
    gets the gradients of its own tokens, summed over the rows of all ranks. With queries=None the loss is
    the same on all ranks.

    Raises:
        UnsupportedError: attn_mask; second derivatives, forward mode, torch.func.grad, jvp ... (vmap works).
        InputError: tensors that do not fit; lengths that do not fit the layout.
        UsageError: ranks differ in the options. RankError: a rank died or did not come.

    >>> import torch, longspan.torch
    >>> q, k, v = torch.randn(3, 2, 4, 63, 32)
    >>> out = longspan.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(out, wanted, atol=1e-5)
    True
    """
    _check_alignment(causal_alignment, (None, "lower_right", "upper_left"))
    of_mask = None
    if isinstance(attn_mask, Mask):
        of_mask = arguments_of(attn_mask, dict(causal=is_causal, window_size=window_size) | _NO_MASK)
        is_causal, window_size = of_mask.pop("causal"), of_mask.pop("window_size")
        of_mask = _of_mask(query, **of_mask)
    elif attn_mask is not None:
        is_causal, causal_alignment = _causal_of(attn_mask, is_causal, causal_alignment)
    _check_dropout(dropout_p)
    try:
        device = query.device.type
        name = name_of(comm, group, device)
        _refuse_other_cut(query, key, value, -2, name, keys, queries, None, total_keys, total_queries, "keys")
        if (not enable_gqa and query.size(-3) != key.size(-3)) or (
                query.dim() == 4 and not query.size(0) == key.size(0) == value.size(0)):
            query, key, value = _broadcast(query, key, value, enable_gqa)
        if device in AUTOCASTS and torch.is_autocast_enabled(device):
            query, key, value = _cast(device, query, key, value)
        if torch.compiler.is_compiling():
            _check(query, key, value, -3)
        return _run(query, key, value, -3, return_lse, name, keys, queries,
                    is_causal, scale, window_size, softcap, alibi_slopes, sinks, documents, cache_leftpad, None, total_keys,
                    total_queries, is_causal and causal_alignment is None, invariant, strategy, causal_alignment,
                    dropout_p, dropout_seed, of_mask)
    except Exception:
        _check(query, key, value, -3)
        raise


_NO_MASK = {name: value for name, value in Mask().arguments().items() if name not in ("causal", "window_size")}


def _check_dropout(p: float) -> None:
    if isinstance(p, bool) or not isinstance(p, (int, float, torch.SymFloat)):
        raise TypeError(f"dropout_p is of type '{type(p).__name__}'; a number is wanted")
    if not 0 <= p < 1:
        raise InputError(f"dropout_p is {p}; it is a probability in [0, 1), and 0 means none")


def _check_seed(seed: Tensor, q: Tensor) -> None:
    if not isinstance(seed, Tensor):
        raise TypeError(f"dropout_seed is of type '{type(seed).__name__}'; a tensor is wanted")
    if seed.dtype != torch.int64 or seed.dim() != 1 or seed.shape[0] not in (1, 2):
        raise InputError(f"dropout_seed is {list(seed.shape)} of {seed.dtype}; [1] or [2] of torch.int64 is wanted")
    if seed.device != q.device:
        raise InputError(f"dropout_seed lies on {seed.device}, and query on {q.device}")


def _check_alignment(alignment: str | None, known: tuple) -> None:
    if alignment not in known:
        raise InputError(f"causal_alignment is {alignment!r}; it is one of {', '.join(map(repr, known))}")


def _causal_of(attn_mask, is_causal: bool, alignment: str | None):
    if not isinstance(attn_mask, CausalBias):
        raise UnsupportedError("attn_mask is given: masks of numbers or flags are not supported. For a causal one (tril) "
                               "give is_causal=True in its place, for others window_size, documents, alibi_slopes or "
                               "softcap, and causal_upper_left or causal_lower_right of torch.nn.attention.bias where "
                               "lengths differ")
    if is_causal:
        raise InputError("is_causal is given, and attn_mask too; one of them says it")
    of_mask = "lower_right" if attn_mask.variant == CausalVariant.LOWER_RIGHT else "upper_left"
    if alignment not in (None, of_mask):
        raise InputError(f"attn_mask is causal_{of_mask}, and causal_alignment is {alignment!r}; one of them says it")
    return True, of_mask


def _run(q, k, v, heads_dim, return_lse, name, keys, queries, causal, scale, window_size, softcap, alibi_slopes,
         sinks, documents, cache_leftpad, cache_seqlens, total_keys, total_queries, equal_lengths, invariant, strategy,
         alignment, dropout_p, dropout_seed, of_mask=None):
    """Heads are in dimension -3, as in torch, or -2."""
    options = {"causal": causal, "keys": layout_text(keys, "keys")}
    if queries is not None:
        options["queries"] = options["keys"] if queries == AS_KEYS else layout_text(queries, "queries")
    if window_size != (-1, -1):
        options["window_left"], options["window_right"] = window_size
    if alignment == "upper_left":
        options["causal_alignment"] = alignment
    if scale is not None:  # an operator spends no time on arguments that it is not given
        options["softmax_scale"] = scale
    if softcap:
        options["softcap"] = softcap
    if dropout_p:
        if dropout_seed is None:
            dropout_seed = agreed_seed(name, q.device)
        else:
            _check_seed(dropout_seed, q)
        options["dropout_p"], options["dropout_seed"] = float(dropout_p), dropout_seed
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if sinks is not None:
        options["sinks"] = sinks
    if documents is not None:
        options["documents"] = documents
    if cache_leftpad is not None:
        options["cache_leftpad"] = cache_leftpad
    if cache_seqlens is not None:
        options["cache_seqlens"] = cache_seqlens
    if total_keys is not None:
        options["total_keys"] = total_keys
    if total_queries is not None:
        options["total_queries"] = total_queries
    if equal_lengths:
        options["equal_lengths"] = True
    if invariant:
        options["invariant"] = True
    if strategy != "auto":
        options["strategy"] = strategy
    if of_mask:
        options |= of_mask
    heads_first = heads_dim == -3
    if wants_grad(q, k, v, sinks, alibi_slopes):
        out, lse = attend_recorded(q, k, v, name, heads_first, **options)
    else:
        if heads_first:
            q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
        if return_lse:
            out, lse = _attend_lse(q, k, v, name, **options)
        else:
            out, lse = _attend(q, k, v, name, **options), None
        if heads_first:
            out = out.transpose(-3, -2)
    if not return_lse:
        return out
    return out, lse.transpose(-2, -1) if heads_first else lse


_DEFAULTS = {name: argument.default for name, argument in inspect.signature(attend).parameters.items()}


def attend_tensors(q: Tensor, k: Tensor, v: Tensor, *, comm, causal, softmax_scale, window_size, causal_alignment, softcap,
                   alibi_slopes, sinks, documents, cache_leftpad, keys, queries, total_keys, total_queries, invariant, strategy,
                   return_lse, dropout_p, dropout_seed, attention_chunk, chunk_lookback, prefix, prefix_lens, bidirectional,
                   clamp_bidirectional, **others) -> Any:
    """longspan.attend of tensors that require grad."""
    for name, given in others.items():
        if isinstance(given, Tensor) or given != _DEFAULTS[name]:
            raise UnsupportedError(f"{name} is given, and the call is recorded for a backward, in which it is not supported: "
                                   "leave it out, or call it under torch.no_grad()")
    if not isinstance(causal, bool):
        raise UnsupportedError("causal has a flag for each sequence, and the call is recorded for a backward, in which that is "
                               "not supported: give True or False, or call it under torch.no_grad()")
    if comm is None and not torch.compiler.is_compiling():
        warn_of_others("attend")
    name = alone_name(q.device.type) if comm in (None, ALONE) else name_of(comm, None, q.device.type)
    refuse(contradiction(q, k, v, comm=known(name).comm, keys=keys, queries=queries, total_keys=total_keys,
                         total_queries=total_queries)[2])
    _check_dropout(dropout_p)
    *arrays, dropout_seed = (t if t is None or isinstance(t, Tensor) else torch.as_tensor(t, device=q.device)
                             for t in (alibi_slopes, sinks, documents, cache_leftpad, dropout_seed))
    return _run(q, k, v, -2, return_lse, name, keys, queries, causal, softmax_scale, window_size, softcap, *arrays, None,
                total_keys, total_queries, False, invariant, strategy, causal_alignment, dropout_p, dropout_seed,
                _of_mask(q, attention_chunk=attention_chunk, chunk_lookback=chunk_lookback, prefix=prefix, prefix_lens=prefix_lens,
                         bidirectional=bidirectional, clamp_bidirectional=clamp_bidirectional))


def _of_mask(q: Tensor, **given) -> dict:
    """The arguments of an operator for a mask: those that are not the default, arrays as tensors."""
    made = {name: value for name, value in given.items() if value is not None and not (isinstance(value, int) and value == 0)}
    for name, dtype in (("bidirectional", torch.int64), ("prefix_lens", torch.int32)):
        if name in made:
            made[name] = torch.as_tensor(made[name], device=q.device).to(dtype)
    return made


def _constants(alibi_slopes: Tensor | None) -> Tensor | None:
    if alibi_slopes is None:
        return None
    if isinstance(alibi_slopes, torch.nn.Parameter):
        raise InputError("alibi_slopes is a Parameter, and they are constants here; give alibi_slopes.detach()")
    if not isinstance(alibi_slopes, Tensor):
        raise TypeError(f"alibi_slopes is of type '{type(alibi_slopes).__name__}'; a tensor is wanted")
    if alibi_slopes.is_meta:
        raise InputError("alibi_slopes lies on 'meta' and has no values; make it with device='cpu', also where the "
                         "model is made on 'meta'")
    return alibi_slopes.detach().clone()


class ContextParallelAttention(torch.nn.Module):
    """Attention of a model whose tokens are sharded across ranks. Its only possible weights are sinks.

    Every rank gives the query rows, keys and values of its own tokens. The first layer of a group
    is made collectively. It trains, as scaled_dot_product_attention does, and its sinks learn.

    copy.deepcopy gives a layer of the same ranks. A layer of the default group can be pickled, and is
    unpickled as one of the default group there. A layer of another group, a mesh or a communicator cannot,
    since no other process has these: save its state_dict.

    Args:
        group: the ranks: a ProcessGroup, a DeviceMesh of one dimension, or None (the default group).
        comm: in place of `group`, a longspan.Communicator, which the layer holds.
        device: "cpu" or "cuda", where the group has both; None is the group's, or without ranks that
            of each call's tensors.
        format: "bhtd": tensors are [batch, heads, tokens, dim], as torch has them; "bthd": [batch,
            tokens, heads, dim], as flash-attention has them.
        layout: how tokens are dealt out: "zigzag", "striped", "interleaved:64" or "contiguous". For
            decode with a cache that grows it is interleaved.
        causal: a token sees keys up to its own position.
        causal_alignment: "lower_right": rows are the last tokens of the sequence, so that decode is
            right; "upper_left": they are the first.
        softmax_scale: of the products; None is 1 / sqrt(dim).
        window_size: (left, right) keys that a token sees besides its own; -1 is no bound.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: [heads], or None: constants, which the layer keeps. They follow it to a device and keep their
            type. They are not a buffer and not in its state_dict, and to_empty() leaves them as they are, since no
            checkpoint would bring them back.
        sinks: [heads] learned sinks, or None. A Parameter stays one, another tensor becomes a buffer; both are
            in the state_dict. As any weight they have no values after to_empty() until load_state_dict().
        dropout_p: as in scaled_dot_product_attention, while the layer trains (train()); eval() has none. Its seeds are
            drawn from torch's generator, whose state a checkpoint keeps.
        invariant, strategy: as in scaled_dot_product_attention.

    >>> import torch, longspan.torch
    >>> attention = longspan.torch.ContextParallelAttention(causal=True, window_size=(15, -1))
    >>> q = torch.randn(2, 8, 63, 32)                        # [batch, heads, tokens, dim]
    >>> k, v = torch.randn(2, 2, 2, 63, 32)                  # two kv heads
    >>> attention(*(attention.shard(t) for t in (q, k, v))).shape
    torch.Size([2, 8, 63, 32])
    """

    def __init__(self, group: Any = None, *, comm: Communicator | None = None, device: str | None = None,
                 format: str = "bhtd", layout: str | Sharding = "zigzag", causal: bool = False,
                 causal_alignment: str = "lower_right", softmax_scale: float | None = None,
                 window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                 alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
                 invariant: bool = False, strategy: str = "auto", dropout_p: float = 0.0):
        super().__init__()
        _check_dropout(dropout_p)
        self.dropout_p = dropout_p
        if format not in ("bhtd", "bthd"):
            raise InputError(f"format is {format!r}; 'bhtd' and 'bthd' are supported")
        _check_alignment(causal_alignment, ("lower_right", "upper_left"))
        self.format, self.layout, self.causal_alignment = format, layout_text(layout, "layout"), causal_alignment
        self.causal, self.softmax_scale, self.softcap = causal, softmax_scale, softcap
        self.window_size, self.invariant, self.strategy = tuple(window_size), invariant, strategy
        self.alibi_slopes = _constants(alibi_slopes)
        if isinstance(sinks, torch.nn.Parameter):
            self.sinks = sinks
        else:
            self.register_buffer("sinks", sinks)
        self._ranks = Ranks(comm, group, device)

    def _apply(self, fn, recurse: bool = True) -> "ContextParallelAttention":
        super()._apply(fn, recurse)
        if self.alibi_slopes is not None:  # they follow to a device, but keep their type and their values
            device = fn(torch.empty(0, device=self.alibi_slopes.device)).device
            if device.type != "meta":
                self.alibi_slopes = self.alibi_slopes.to(device)
        return self

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return known(self._ranks.name_on("")).comm

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, queries: str | None = AS_KEYS,
                documents: Tensor | None = None, cache_leftpad: Tensor | None = None,
                cache_seqlens: Tensor | None = None,
                total_keys: int | None = None, total_queries: int | None = None,
                return_lse: bool = False, dropout_seed: Tensor | None = None) -> Any:
        """The result for the rows of `query`, in the layer's format.

        Args:
            query: this rank's rows; key, value: this rank's, kv_heads divides heads.
            queries: "as keys": rows are dealt out as the keys are; None: every rank has all rows
                and gets the whole result, as in decode.
            documents, cache_leftpad: as in scaled_dot_product_attention.
            cache_seqlens: [batch] int32 keys of each whole sequence over all ranks, where key and
                value are caches with room to spare; of any layout but contiguous.
            total_keys, total_queries: tokens over all ranks; None asks the ranks.
            return_lse: return (out, lse), lse of the format without its last dimension.
            dropout_seed: as in scaled_dot_product_attention.

        Raises:
            As scaled_dot_product_attention.
        """
        heads_dim = -3 if self.format == "bhtd" else -2
        sinks = self._buffers["sinks"] if "sinks" in self._buffers else self._parameters["sinks"]
        try:
            device = query.device.type
            name = self._ranks.name_on(device)
            _refuse_other_cut(query, key, value, -5 - heads_dim, name, self.layout, queries, cache_seqlens, total_keys,
                              total_queries, "layout")
            if device in AUTOCASTS and torch.is_autocast_enabled(device):
                query, key, value = _cast(device, query, key, value)
            if torch.compiler.is_compiling():
                _check(query, key, value, heads_dim)
            return _run(query, key, value, heads_dim, return_lse, name, self.layout,
                        queries, self.causal, self.softmax_scale, self.window_size, self.softcap, self.alibi_slopes,
                        sinks, documents, cache_leftpad, cache_seqlens, total_keys, total_queries, False,
                        self.invariant, self.strategy, self.causal_alignment,
                        self.dropout_p if self.training else 0.0, dropout_seed)
        except Exception:
            _check(query, key, value, heads_dim)
            raise

    def shard(self, whole: Tensor, dim: int | None = None) -> Tensor:
        """This rank's tokens of a whole tensor, along `dim`; None is that of the format's tokens."""
        rank = known(self._ranks.name_on(whole.device.type))
        return shard_of(whole, self.layout, rank.rank, rank.size, self._token_dim(whole, dim))

    def unshard(self, part: Tensor, dim: int | None = None) -> Tensor:
        """The whole tensor from the ranks' parts, on every rank. Collective."""
        return unshard_of(part, self.layout, known(self._ranks.name_on(part.device.type)), self._token_dim(part, dim))

    def _token_dim(self, tensor: Tensor, dim: int | None) -> int:
        if dim is None:
            dim = -2 if self.format == "bhtd" else -3
        if not -tensor.dim() <= dim < tensor.dim():
            raise InputError(f"dim is {dim}; the tensor has {tensor.dim()} dimensions")
        return dim % tensor.dim()

    def extra_repr(self) -> str:
        dropout = f", dropout_p={self.dropout_p}" if self.dropout_p else ""
        return f"{self.comm}, format={self.format}, layout={self.layout}, causal={self.causal}{dropout}"
