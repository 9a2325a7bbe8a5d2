"""For transformers: the attention "longspan", and the masks that it reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from .. import InputError, UnsupportedError
from ..mask import chunked
from ..torch._attention import _check_dropout
from ..torch._catch import attend_on, innermost
from ..torch._groups import alone_name
from ..torch._ops import agreed_seed, attend as _attend
from ..torch._train import attend_recorded, wants_grad
from ._latent import absorbed, expanded, projected
from ._sealed import NAME, Held, Mask, Share, shares

# Arguments that models pass to attention, and that change no result.
_NO_MATTER = frozenset((
    "cache", "cache_position", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "past_key_values", "position_embeddings", "position_ids", "return_dict", "shift_labels", "use_cache"))

_masks: dict[tuple, type] = {}


@torch.compiler.assume_constant_result
def _mask_type(who: str, causal: bool, window: int | None, padding: str | None, chunk: int | None, images: bool,
               clamped: bool) -> type:
    fields = dict(who=who, causal=causal, window=window, padding=padding, chunk=chunk, images=images, clamped=clamped)
    return _masks.setdefault(tuple(fields.values()), type("Mask", (Mask,), fields))


def _refuse(name: str, why: str = "is not supported") -> None:
    raise UnsupportedError(f"{name} {why} by the attention '{NAME}'")


def attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
              scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
              softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None,
              **others: Any) -> tuple[Tensor, None]:
    """The attention "longspan" of transformers.

    Args:
        query: [batch, heads, tokens, dim]; key, value: [batch, kv_heads, keys, dim], as the cache gave them.
        attention_mask: what mask() made, or None; others are refused.
        scaling: of the products. dropout: as longspan.torch's dropout_p. sliding_window: keys that a token sees, its own included.
        softcap: of the scores. s_aux: [heads] learned sinks. is_causal: None asks the module; a mask says it itself.

    Returns:
        ([batch, tokens, heads, dim], None).
    """
    share = _share_of(module, key, value)
    if dropout and share is not None:
        _refuse("dropout over a ShardedCache")
    for name, given in others.items():
        if given is not None and given is not False and name not in _NO_MATTER:
            _refuse(name)
    options = _visible(module, query, key, attention_mask, sliding_window, is_causal, share)
    context = innermost()
    if context is not None:
        return _of_all_ranks(context, query, key, value, options, share, scaling, softcap, s_aux, dropout), None
    if scaling is not None:
        options["softmax_scale"] = scaling
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux
    if share is not None and share.rows is not None:
        return _latent_attention(module, query, share, options), None
    with torch._C.DisableTorchFunction():
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if share is None:
        name = alone_name(query.device.type)
        if dropout:
            _check_dropout(dropout)
            options |= dict(dropout_p=float(dropout), dropout_seed=agreed_seed(name, query.device))
        if wants_grad(q, k, v, s_aux):
            return attend_recorded(q, k, v, name, **options)[0], None
        return _attend(q, k, v, name, **options), None
    if share.forward.prefill is None:
        return _attend(q, k, v, share.name, keys=share.layout, cache_seqlens=share.lengths, **options), None
    return _prefill_attention(q, k, v, share, options), None


def _prefill_attention(q: Tensor, k: Tensor, v: Tensor, share: Share, options: dict) -> Tensor:
    """A sharded forward: the rank's own rows. k and v may have more keys than it has."""
    now = share.forward.prefill
    if now.pads is not None:
        options["cache_leftpad"] = now.pads.clamp(max=now.end)  # the keys of a chunk may all be padding
    held = now.before + now.rows
    out = _attend(q[:, :now.rows], k[:, :held], v[:, :held], share.name, keys=share.layout, queries=share.layout,
                  total_keys=now.end, total_queries=now.end - now.start, **options)
    return out if now.rows else q.new_zeros(*q.shape[:3], v.shape[-1])


def _latent_attention(module: torch.nn.Module, query: Tensor, share: Share, options: dict) -> Tensor:
    """[batch, tokens, heads, value dim], over the latent rows of a ShardedCache."""
    rows, now = share.rows, share.forward.prefill
    options.setdefault("softmax_scale", query.shape[-1] ** -0.5)
    if now is not None:
        k, v = expanded(module, rows[:, :now.before + now.rows])
        return _prefill_attention(query.transpose(1, 2), k, v, share, options)
    out = _attend(absorbed(module, query), rows, rows[..., :module.kv_lora_rank], share.name, keys=share.layout,
                  cache_seqlens=share.lengths, **options)
    return projected(module, out)


def _of_all_ranks(context: tuple, query: Tensor, key: Tensor, value: Tensor, options: dict, share: Share | None,
                  scaling: float | None, softcap: float | None, sinks: Tensor | None, dropout: float) -> Tensor:
    """[batch, tokens, heads, dim] inside context_parallel: each rank has its own tokens."""
    if share is not None:
        _refuse("a ShardedCache inside context_parallel")
    if options.keys() & {"cache_leftpad", "cache_seqlens"}:
        raise UnsupportedError("attention_mask has padding, and inside context_parallel it is of one rank's tokens only: give "
                               "context_parallel the documents that longspan.padding makes of the whole mask")
    if "bidirectional" in options:
        _refuse("a mask of images inside context_parallel, where it is of one rank's tokens only,")
    ranks, of_context = context
    if "attention_chunk" in options:
        seen = dict(attn_mask=chunked(options["attention_chunk"]))
    else:
        seen = dict(is_causal=options["causal"], window_size=(options.get("window_left", -1), -1))
    out = attend_on(ranks, of_context, query, key, value, scale=scaling, enable_gqa=True, **seen,
                    softcap=softcap or 0.0, sinks=sinks, dropout_p=dropout)
    return out.transpose(1, 2)


def _share_of(module: torch.nn.Module, key: Tensor, value: Tensor) -> Share | None:
    """The ShardedCache of these keys; None for others."""
    if not isinstance(key, Held) and not isinstance(value, Held):
        return None
    if not isinstance(key, Held) or not isinstance(value, Held) or type(key).number != type(value).number or (
            type(key).part != "keys" or type(value).part != "values"):
        raise UnsupportedError(f"{type(module).__name__} gives the attention '{NAME}' keys and values of which not both are "
                               "what the ShardedCache returned for one layer; such a model is not supported")
    share = shares[type(key).number]
    share.forward.waiting = -1
    return share


def _visible(module: torch.nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None,
             sliding_window: int | None, is_causal: bool | None, share: Share | None) -> dict:
    """What each row sees: from the mask, as in transformers' own attention, or else from the module."""
    rows, keys = query.shape[2], key.shape[2]
    if share is not None:
        if rows != share.new:
            raise UnsupportedError(f"{type(module).__name__} has {rows} query rows, and {share.new} tokens came into the "
                                   "ShardedCache; such a model is not supported")
        keys = rows  # that are new, as get_mask_sizes() counts them
    causal, window = getattr(module, "is_causal", True) if is_causal is None else is_causal, sliding_window
    hidden = {}
    chunk = None
    if attention_mask is not None:
        if not isinstance(attention_mask, Mask):
            _refuse("attention_mask", "of the caller's own is not supported")
        if attention_mask.shape[-2] != rows or attention_mask.shape[-1] != keys:
            raise UnsupportedError(f"{type(module).__name__} has {rows} query rows and {keys} keys, and its mask is "
                                   f"one of {attention_mask.shape[-2]} rows and {attention_mask.shape[-1]} keys; such a "
                                   "model is not supported")
        causal, window, chunk = type(attention_mask).causal, type(attention_mask).window, type(attention_mask).chunk
        if sliding_window is not None and window != sliding_window:
            raise UnsupportedError(f"{type(module).__name__} has sliding_window={sliding_window}, and its mask {window}; "
                                   "which of them holds is not clear")
        hidden = _hidden(attention_mask, share)
        if type(attention_mask).images:
            if share is not None:
                _refuse("a mask of images over a ShardedCache")
            hidden["bidirectional"] = attention_mask.ranges
            if type(attention_mask).clamped:
                hidden["clamp_bidirectional"] = True
    elif causal and rows != keys and rows > 1:  # transformers' own attentions differ here
        raise UnsupportedError(f"{type(module).__name__} is causal, and has {rows} query rows, {keys} keys and no mask: which "
                               "keys a row sees is not clear")
    if share is not None and share.forward.prefill is not None and not causal:
        _refuse("prefill of layers that are not causal")
    if chunk is not None:
        hidden["attention_chunk"] = chunk
    if window is None:
        return {"causal": causal} | hidden
    if not causal:
        _refuse("sliding_window", "of a layer that is not causal is not supported")
    return {"causal": True, "window_left": window - 1} | hidden


def _hidden(mask: Mask, share: Share | None) -> dict:
    """What padding hides. No token sees, or is, padding on the right of it where the mask is causal."""
    kind = type(mask)
    if kind.padding is None or (kind.padding == "right" and kind.causal):
        return {}
    if kind.padding == "right" and share is not None:
        _refuse("padding on the right of keys in a ShardedCache, in layers that are not causal,")
    with torch._C.DisableTorchFunction():
        numbers = mask.as_subclass(Tensor)[:, 0, 0, 0]
    return {"cache_leftpad" if kind.padding == "left" else "cache_seqlens": numbers}


def mask(batch_size: int, q_length: int, kv_length: Any, mask_function: Any = causal_mask_function,
         attention_mask: Tensor | None = None, q_offset: Any = None, kv_offset: Any = 0, **others: Any) -> Tensor:
    """Makes a mask for transformers that only the attention "longspan" can read.

    Supported: causal masks, windows and chunks over them, images whose tokens see each other, and masks that show all
    keys, also of sequences that are padded on the left or on the right. Others are refused.
    """
    config = others.get("config")
    if innermost() is not None:
        mask_function = _unpacked(mask_function)
    causal, window = mask_function is not bidirectional_mask_function, None
    chunk, blocks, clamped = None, None, False
    if causal and mask_function is not causal_mask_function:
        window, chunk, blocks, clamped = _kind(mask_function, q_length, others, config)
    if causal and q_offset is not None and not _ends_together(q_length, kv_length, q_offset, kv_offset):
        _refuse("a cache with room to spare, such as StaticCache,")
    device = others.get("device") or (None if attention_mask is None else attention_mask.device)
    padding, numbers, found = None, torch.empty((), dtype=torch.bool, device=device), None
    if attention_mask is not None:  # for a cache with room it has fewer than all keys
        padding, found = _padding_of(attention_mask, kv_offset + kv_length)
        if padding is not None:  # a ShardedCache has all keys, others those from kv_offset on
            numbers = found if kv_offset is q_offset else (found - kv_offset).clamp(min=0)
            numbers = numbers.to(numbers.device if device is None else device, torch.int32)[:, None, None, None]
    offset = 0 if kv_offset is q_offset or isinstance(kv_offset, Tensor) else kv_offset
    if chunk is not None and offset:
        chunk, padding, numbers = _moved_chunk(chunk, padding, found, numbers, q_length, kv_length, offset)
    # A last token sees no later one.
    images = blocks is not None and (q_length > 1 or (window is not None and not clamped))
    made = numbers.expand(batch_size, 1, q_length, kv_length).as_subclass(
        _mask_type(type(config).__name__, causal, window, padding, chunk, images, clamped))
    if images:
        made.ranges = _ranges_of(blocks, batch_size, offset, kv_length)
    return made


def _moved_chunk(chunk: int, padding: str | None, found: Tensor | None, numbers: Tensor, q_length: int, kv_length: int,
                 offset: int) -> tuple:
    """Chunks of a cache that has kept only the keys from `offset` on: chunk, padding and its numbers. `found` are the pads of
    the whole sequences."""
    if padding == "right":
        _refuse("padding on the right of chunks in a cache that has dropped keys")
    pads = torch.zeros((), dtype=torch.int64, device=numbers.device) if padding is None else found.to(numbers.device)
    pads = pads.reshape(-1, 1, 1, 1)
    if q_length == 1:  # whose chunk begins where padding might end
        last = offset + kv_length - 1
        first = (last - pads) // chunk * chunk + pads
        return None, "left", (first - offset).clamp(min=0).to(torch.int32)
    if padding is not None or offset % chunk:
        _refuse("several tokens after a cache of chunks that has dropped keys")
    return chunk, padding, numbers


def _ranges_of(blocks: Tensor, batch: int, offset: int, keys: int) -> Tensor:
    """[batch, count, 2] int64: where tokens of a sequence have the same number that is not negative, in positions from
    `offset` on. Sequences with fewer ranges end with empty ones."""
    if blocks.dim() != 2:
        _refuse("a mask of blocks of another shape than [batch, tokens]")
    blocks = blocks.expand(batch, -1)[:, offset:offset + keys]
    tokens = blocks.shape[1]
    before = torch.nn.functional.pad(blocks, (1, 0), value=-1)[:, :-1]
    after = torch.nn.functional.pad(blocks, (0, 1), value=-1)[:, 1:]
    starts, ends = (blocks >= 0) & (blocks != before), (blocks >= 0) & (blocks != after)
    numbers = torch.where(blocks >= 0, blocks, -1).cummax(1).values
    if bool((starts & (blocks < numbers)).any()) or bool((starts[:, 1:] & (blocks[:, 1:] == numbers[:, :-1])).any()):
        _refuse("a mask of blocks whose numbers come back")
    count = max(1, int(starts.sum(1).max()))
    place = torch.arange(tokens, device=blocks.device).expand_as(blocks)
    begin = torch.where(starts, place, tokens).sort(1).values[:, :count]
    end = torch.where(ends, place + 1, tokens).sort(1).values[:, :count]
    return torch.stack((begin, end), -1).to(torch.int64).contiguous()


def _ends_together(q_length: int, kv_length: Any, q_offset: Any, kv_offset: Any) -> bool:
    """Whether the last query is the last key's. A ShardedCache gives one tensor for both offsets, which is not read."""
    if kv_offset is q_offset:
        return q_length == kv_length
    return not isinstance(q_offset, Tensor) and kv_offset + kv_length == q_offset + q_length


def _padding_of(attention_mask: Tensor, tokens: Any) -> tuple[str | None, Tensor | None]:
    """The side on which sequences are padded, and a number for each as in Mask. A mask of fewer tokens than keys would
    mean padding too: transformers fills it up with zeros."""
    if torch.compiler.is_compiling():
        torch._assert_async(attention_mask.all(),
                            "attention_mask has padding, which is not supported under torch.compile")
        return None, None
    if attention_mask.shape[-1] < int(tokens):
        raise InputError(f"attention_mask is of {attention_mask.shape[-1]} tokens, and there are {int(tokens)}, those in the "
                         "cache included; give all of them, or no mask")
    return padding_side(attention_mask[:, :int(tokens)])


def padding_side(attention_mask: Tensor) -> tuple[str | None, Tensor | None]:
    """"left" and how many tokens of each sequence are padding, "right" and how many are not, or None twice."""
    given = attention_mask != 0
    if bool(given.all()):
        return None, None
    place = torch.arange(given.shape[1], device=given.device)
    used = given.sum(1)
    left = given.shape[1] - used
    if torch.equal(given, place >= left[:, None]):
        return "left", left
    if torch.equal(given, place < used[:, None]):
        return "right", used
    _refuse("attention_mask with zeros between ones, or on both sides of them,")


def _unpacked(mask_function: Any) -> Any:
    """Leaves out what transformers found in position_ids: those of a rank's tokens have gaps, and context_parallel has
    the documents."""
    parts = [cell.cell_contents for cell in mask_function.__closure__ or () if isinstance(cell.cell_contents, tuple)]
    names = [getattr(part, "__qualname__", "").partition(".")[0] for part in (parts[0] if len(parts) == 1 else ())]
    if len(names) != 2 or names[1] != "packed_sequence_mask_function":
        return mask_function
    inner = parts[0][0]
    if names[0] != "remap_positions_for_packed_sequence":  # transformers 4
        return inner
    return inner.__closure__[inner.__code__.co_freevars.index("mask_function")].cell_contents


def _kind(mask_function: Any, q_length: int, others: dict, config: Any) -> tuple:
    """(window, chunk, numbers of blocks, whether the window bounds these too) of a mask that is not plainly causal."""
    local, of_chunks = others.get("local_size"), getattr(config, "attention_chunk_size", None)
    if torch.compiler.is_compiling():  # the trace cannot see closures, but sees what transformers makes of them
        if others.get("use_vmap"):
            _refuse("or_mask_function or and_mask_function")
        if local is None or (of_chunks is not None and (local != of_chunks or getattr(config, "sliding_window", None) == local)):
            _refuse("a mask of packed sequences or blocks")
        if others.get("allow_is_causal_skip") is False and q_length != 1:
            _refuse("a mask of packed sequences or blocks")
        return (local, None, None, False) if of_chunks is None else (None, of_chunks, None, False)
    names, given = _parts_of(mask_function)
    window, chunk, blocks = given.get("sliding_window"), given.get("chunk_size"), given.get("block_sequence_ids")
    known = {
        ("and", "sliding_window_overlay", "causal_mask_function"): False,
        ("and", "chunked_overlay", "causal_mask_function"): False,
        ("or", "causal_mask_function", "blockwise_overlay"): False,
        ("or", "and", "sliding_window_overlay", "causal_mask_function", "blockwise_overlay"): False,
        ("or", "and", "chunked_overlay", "causal_mask_function", "blockwise_overlay"): False,
        ("and", "or", "causal_mask_function", "blockwise_overlay", "sliding_window_overlay"): True,
        ("and", "sliding_window_overlay", "or", "causal_mask_function", "blockwise_overlay"): True,
    }
    if names not in known:
        if others.get("use_vmap"):
            _refuse("or_mask_function or and_mask_function")
        _refuse(f"a mask of packed sequences, or of {' and '.join(name for name in names if name not in ('and', 'or'))},")
    return window, chunk, blocks, known[names]


def _parts_of(mask_function: Any) -> tuple[tuple[str, ...], dict]:
    """The functions that a mask of transformers is made of, in their order, each with "and" or "or" before those that it
    joins, and what they hold."""
    qualified = getattr(mask_function, "__qualname__", "")
    outer = qualified.partition(".")[0]
    code, closure = getattr(mask_function, "__code__", None), getattr(mask_function, "__closure__", None) or ()
    held = dict(zip(code.co_freevars if code else (), (cell.cell_contents for cell in closure)))
    joins = {"and_masks": "and", "or_masks": "or"}
    if outer not in joins or not isinstance(held.get("mask_functions"), tuple):
        return (outer or qualified,), held
    names, given = (joins[outer],), {}
    for part in held["mask_functions"]:
        more, holds = _parts_of(part)
        names += more
        given |= holds
    return names, given
