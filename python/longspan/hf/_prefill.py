"""Prefill in shards: each rank computes keys and values of its own tokens of a prompt."""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import InputError, UnsupportedError, UsageError
from ..torch._groups import known
from ._attention import padding_side
from ._cache import ShardedCache, config_of
from ._sealed import NAME, Prefill


@torch.no_grad()
def prefill(model: Any, input_ids: Tensor, cache: ShardedCache, *, attention_mask: Tensor | None = None,
            chunk: int | None = None) -> None:
    """Fills the cache with a prompt's keys and values: each rank computes those of its own tokens. Collective.

    The cache then holds all tokens of the prompt but the last, and no others. The last one is left to `generate`, which
    starts with it. A rank computes, and holds meanwhile, its share of the prompt, or of each chunk.

    Args:
        model: that of the cache.
        input_ids: [batch, tokens], the same on every rank. Tokens that begin this prompt, and that an earlier prefill
            computed, are not computed again; all else in the cache is forgotten.
        cache: a ShardedCache.
        attention_mask: as a tokenizer gives it, [batch, tokens]; padding is on the left.
        chunk: tokens of a forward, over all ranks; rounded up to full rounds of blocks. None: all at once.

    Raises:
        InputError: input_ids that do not fit, or are too many. UsageError: they, or the caches, differ between ranks.
        UnsupportedError: other padding, a model without position_ids. RankError: a rank died or did not come.
    """
    if not isinstance(cache, ShardedCache):
        raise TypeError(f"cache is of type '{type(cache).__name__}'; a ShardedCache is wanted")
    try:
        run, called, pads = _check_prompt(model, input_ids, cache, attention_mask, chunk)
    except Exception as error:
        if cache.comm.size > 1:  # the others wait for this rank
            cache.comm.gather(json.dumps({"error": f"{error}"}).encode(), "comparison of prompts")
        raise
    start = _known_of(cache, input_ids, pads)
    _compare_prompts(cache, input_ids, pads, start, chunk)
    for layer in cache.layers:
        layer.keep(start)
    ids = input_ids[:, :-1].to("cpu", torch.int64, copy=True)
    for stop in _steps(cache, start, ids.shape[1], chunk):
        try:
            _prefill_step(run, called, input_ids, pads, cache, start, stop)
        except BaseException:
            for layer in cache.layers:
                layer.keep(start)
            raise
        for layer in cache.layers:
            layer.keep(stop)
            layer.known = stop
        cache._ids, cache._pads, start = ids, pads, stop


def _check_prompt(model: Any, input_ids: Any, cache: ShardedCache, attention_mask: Any, chunk: Any) -> tuple[Any, str, Tensor | None]:
    """The module that runs the layers, its name for the cache, and [batch] int32 tokens of padding on the left, or
    None."""
    config = config_of(model)
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise InputError("input_ids: whole numbers in [batch, tokens] are wanted")
    if not input_ids.numel():
        raise InputError(f"input_ids has the shape {list(input_ids.shape)}; there is no token")
    pads = None
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise InputError(f"attention_mask is {list(attention_mask.shape)} and input_ids {list(input_ids.shape)}; they have "
                             "the same shape")
        side, pads = padding_side(attention_mask)
        if side == "right":
            raise UnsupportedError("attention_mask has padding on the right, where generate goes on; pad on the left "
                                   "(padding_side='left' of a tokenizer)")
        if pads is not None:
            pads = pads.to(input_ids.device, torch.int32)
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise InputError(f"chunk is {chunk!r}; it is at least 1")
    tokens = input_ids.shape[1]
    if tokens > cache._max_cache_len:
        raise InputError(f"input_ids has {tokens} tokens; the cache was made for max_cache_len={cache._max_cache_len}")
    run = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(run, PreTrainedModel):  # some call their last projection this
        run = model.base_model
    takes = inspect.signature(run.forward).parameters
    if "position_ids" not in takes:
        raise UnsupportedError(f"{type(run).__name__} takes no position_ids, by which a rank says which tokens of the prompt "
                               "it computes; call generate without prefill")
    _check_rope(config, cache, tokens, chunk)
    if not cache._counts:
        _check_positions(run, input_ids)
        cache._counts = True
    return run, "cache" if "cache" in takes else "past_key_values", pads


def _check_positions(run: Any, input_ids: Tensor) -> None:
    """Checks that the model counts positions from 0. RoBERTa, for one, begins after the position of padding."""
    first = input_ids[:, :1]
    by_itself, given = (run(input_ids=first, use_cache=False, **more)[0] for more in (
        {}, {"position_ids": torch.zeros_like(first)}))
    if (by_itself - given).abs().max() > torch.finfo(given.dtype).eps ** 0.5 * given.abs().max():
        raise UnsupportedError(f"{type(run).__name__} counts positions by a rule of its own, and a rank could not say which "
                               "tokens of the prompt it computes; call generate without prefill")


def _check_rope(config: Any, cache: ShardedCache, tokens: int, chunk: int | None) -> None:
    """Makes frequencies that depend on a forward's last position those of one forward of all tokens, or refuses."""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in [given] if "rope_type" in given else [r for r in given.values() if isinstance(r, dict)]:
        if rope.get("rope_type") not in ("dynamic", "longrope"):
            continue
        short = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        around = cache._rule.block * cache.comm.size  # a rank's last position is at most this far below the step's
        steps = list(_steps(cache, 0, tokens - 1, chunk))
        least = min((max(begin, stop - around) + 1 for begin, stop in zip([0] + steps, steps)), default=tokens)
        if tokens > short and (rope["rope_type"] == "dynamic" or least <= short):
            raise UnsupportedError(
                f"the model's rope_type is '{rope['rope_type']}': a prompt of {tokens} tokens, more than "
                f"original_max_position_embeddings={short}, would have other frequencies in parts than at once; call "
                "generate without prefill" + (", or give no chunk" if rope["rope_type"] == "longrope" and chunk else ""))


def _steps(cache: ShardedCache, start: int, end: int, chunk: int | None) -> Any:
    """Where forwards of [start, end) stop. A first one, up to a full round of blocks, is computed by every rank."""
    around = cache._rule.block * cache.comm.size
    step = max(end, 1) if chunk is None else -(-chunk // around) * around
    if start % around and start < end:
        start = min(end, -(-start // around) * around)
        yield start
    while start < end:
        start = min(end, start + step - start % around)
        yield start


def _positions(tokens: Tensor, batch: int, pads: Tensor | None) -> Tensor:
    """[batch, tokens], counted from the first token behind the padding, as generate counts them."""
    return tokens.expand(batch, -1) if pads is None else (tokens - pads[:, None]).clamp(min=0)


def _prefill_step(run: Any, called: str, input_ids: Tensor, pads: Tensor | None, cache: ShardedCache, start: int,
                  stop: int) -> None:
    ranks, rule = known(cache._name), cache._rule
    if start % (rule.block * ranks.size):
        given = {}
        if pads is not None:
            tokens = torch.arange(stop, device=input_ids.device)
            given = dict(attention_mask=(tokens >= pads[:, None]).long(),
                         position_ids=_positions(tokens[start:], len(pads), pads))
        run(input_ids=input_ids[:, start:stop], use_cache=True, **given, **{called: cache})
        return
    own = rule.shard(stop - start, ranks.rank, ranks.size)
    rows = torch.tensor(list(own.positions()), dtype=torch.int64, device=input_ids.device)
    before = len(rule.shard(start, ranks.rank, ranks.size))
    if not len(rows):  # models need a token: one whose result is not read
        rows = rows.new_zeros(1)
    cache._forward.prefill, cache._forward.updates = Prefill(start, stop, before, len(own), pads), 0
    try:
        run(input_ids=input_ids[:, start + rows], position_ids=_positions(start + rows, input_ids.shape[0], pads),
            use_cache=True, **{called: cache})
    finally:
        cache._forward.prefill = None
    if cache._forward.waiting >= 0:
        raise UnsupportedError(f"{cache._who}: layer {cache._forward.waiting} has not given the attention '{NAME}' the keys "
                               "that the ShardedCache returned; such a model is not supported")
    if cache._forward.updates != len(cache.layers):
        raise UnsupportedError(f"{cache._who} has put keys into the ShardedCache {cache._forward.updates} times, and its config "
                               f"says {len(cache.layers)} layers; such a model is not supported")


def _known_of(cache: ShardedCache, input_ids: Tensor, pads: Tensor | None) -> int:
    """How many of this prompt's first tokens the cache has, without the last one."""
    if cache._ids is None or cache._ids.shape[0] != input_ids.shape[0] or _listed(cache._pads) != _listed(pads):
        return 0
    count = min([layer.known for layer in cache.layers] + [cache._ids.shape[1], input_ids.shape[1] - 1])
    differ = (cache._ids[:, :count] != input_ids[:, :count].to("cpu")).any(0).nonzero()
    return int(differ[0]) if len(differ) else count


def _listed(pads: Tensor | None) -> list | None:
    return None if pads is None else pads.tolist()


def _compare_prompts(cache: ShardedCache, input_ids: Tensor, pads: Tensor | None, start: int, chunk: int | None) -> None:
    own, comm = input_ids.to("cpu", torch.int64).contiguous(), cache.comm
    mine = {"input_ids": [list(own.shape), hashlib.sha256(own.numpy().tobytes()).hexdigest()], "chunk": chunk,
            "the padding of attention_mask": _listed(pads), "max_cache_len": cache._max_cache_len,
            "block": cache._rule.block, "the number of tokens in the cache": start}
    for rank, theirs in enumerate(comm.gather(json.dumps(mine).encode(), "comparison of prompts")):
        other = json.loads(theirs)
        if "error" in other:
            raise UsageError(f"prefill was refused on rank {rank}, and not on rank {comm.rank}: {other['error']}")
        for name, value in mine.items():
            if other[name] != value:
                found = "" if name == "input_ids" else f" ({value} and {other[name]})"
                raise UsageError(f"{name} differs between rank {comm.rank} and rank {rank}{found}; every rank gives the "
                                 "same")
