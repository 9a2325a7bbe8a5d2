"""longspan for Hugging Face transformers: attention, and a cache that is sharded across ranks.

    import longspan.hf as hf                       # registers the attention "longspan"

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longspan")
    cache = hf.ShardedCache(model, max_cache_len=1_000_000)     # each rank holds its share
    hf.prefill(model, input_ids, cache)                         # each rank computes its share
    tokens = model.generate(input_ids, past_key_values=cache)

Every rank runs the same program on the same input_ids and gets the same tokens; it holds all weights.
Without a ShardedCache the attention "longspan" is that of one process, over whatever cache there is.
What is not supported is refused by name: padding, masks of the caller's own, chunked and linear layers,
position_bias, dropout, beams.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import struct
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from . import InputError, Sharding, UnsupportedError, UsageError
from .torch._groups import alone_name, known, name_of
from .torch._ops import APPEND as _APPEND, attend as _attend

NAME = "longspan"

# What models hand on to attention, and what no result depends on.
_NO_MATTER = frozenset((
    "cache", "cache_position", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache"))


class _Current:
    """The layer of a cache whose keys the next call of attention is given: update() runs right before it."""

    layer: "_ShardedLayer | None" = None


_current = _Current()


class _Prefill:
    """What a sharded forward is about: this rank's rows of positions [start, end)."""

    def __init__(self, start: int, end: int, before: int, rows: int):
        self.start, self.end, self.before, self.rows = start, end, before, rows


class _ShardedLayer(CacheLayerMixin):
    """This rank's keys and values of one layer, [batch, own capacity, kv_heads, dim]."""

    is_croppable = True
    is_sliding = False
    prefill: _Prefill | None = None

    def __init__(self, cache: "ShardedCache", index: int):
        super().__init__()
        self.index, self.name, self.layout = index, cache._name, cache._layout
        self.is_compileable = cache._compileable  # transformers asks: generate compiles decode by itself on GPUs
        self.capacity, self.max_cache_len = cache._capacity, cache._max_cache_len
        self.length = torch.zeros((), dtype=torch.int64, device="cpu")  # tokens of each sequence, over all ranks
        self.lengths = torch.zeros(0, dtype=torch.int32, device="cpu")  # [batch], the same

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Memory for as many sequences as come first."""
        self.device, self.batch_size = key_states.device, key_states.shape[0]
        self.dtype = key_states.dtype
        heads = key_states.shape[1]
        self.keys, self.values = (
            torch.zeros(self.batch_size, self.capacity, heads, t.shape[-1], dtype=t.dtype,
                        device=self.device).transpose(1, 2) for t in (key_states, value_states))
        self.length = self.length.to(self.device)
        self.lengths = torch.zeros(self.batch_size, dtype=torch.int32, device=self.device)
        if not torch.compiler.is_compiling():
            for t in (self.keys, self.values, self.length, self.lengths):
                torch._dynamo.mark_static_address(t)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes what this rank holds of the new tokens, [batch, kv_heads, tokens, dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise UnsupportedError(f"the cache holds {self.batch_size} sequences, and {key_states.shape[0]} come: "
                                   "num_beams and num_return_sequences are not supported")
        _current.layer = self
        now = self.prefill
        if now is not None:
            own = slice(now.before, now.before + now.rows)
            self.keys[:, :, own] = key_states[:, :, :now.rows]
            self.values[:, :, own] = value_states[:, :, :now.rows]
            return self.keys, self.values
        if self.index == 0 and not torch.compiler.is_compiling():
            self._check(key_states)
        _APPEND(key_states.transpose(1, 2), value_states.transpose(1, 2), self.keys.transpose(1, 2),
                self.values.transpose(1, 2), self.name, cache_seqlens=self.lengths, keys=self.layout)
        self.length.add_(key_states.shape[2])
        self.lengths.add_(key_states.shape[2])
        return self.keys, self.values

    def _check(self, key_states: Tensor) -> None:
        """That there is room, and that ranks feed the same tokens: with sampling they easily do not."""
        length, new = int(self.length), key_states.shape[2]
        if length + new > self.max_cache_len:
            raise InputError(f"the cache has {length} of max_cache_len={self.max_cache_len} tokens, and {new} more come")
        comm = known(self.name).comm
        if comm.size == 1 or not new:
            return
        seen = key_states[:16, 0, -1, :4].float().flatten().tolist()
        mine = struct.pack(f"<q{len(seen)}f", length, *seen)
        for rank, said in enumerate(comm.gather(mine, "comparison of tokens")):
            other = struct.unpack(f"<q{len(said) // 4 - 2}f", said)
            alike = len(said) == len(mine) and other[0] == length and all(
                math.isclose(a, b, rel_tol=0.02, abs_tol=0.02) for a, b in zip(other[1:], seen))
            if not alike:
                raise UsageError(f"rank {comm.rank} and rank {rank} feed different tokens at position {length}: every "
                                 "rank gives the same input_ids, and for sampling the same seed (torch.manual_seed)")

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor]:
        """(keys, offset) as masks count them: they are none of a mask's business here."""
        return query_length, self.length

    def get_seq_length(self) -> Tensor | int:
        """Tokens of each sequence, over all ranks."""
        return self.length if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Tokens that a sequence may have, over all ranks."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # transformers before 5.9

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens."""
        if tokens_to_remove > 0:
            raise InputError(f"tokens_to_remove is {tokens_to_remove}; it is 0 or below")
        self.length.sub_(-tokens_to_remove)
        self.lengths.sub_(-tokens_to_remove)

    def reset(self) -> None:
        """Forgets all tokens; the memory stays."""
        self.length.zero_()
        self.lengths.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused."""
        raise UnsupportedError("num_beams: beams are not supported by ShardedCache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused."""
        raise UnsupportedError("batch_repeat_interleave: sequences of a ShardedCache are not copied")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refused."""
        raise UnsupportedError("batch_select_indices: sequences of a ShardedCache are not selected")

    def offload(self) -> None:
        """Refused."""
        raise UnsupportedError("offload: a ShardedCache stays where it is")

    prefetch = offload


class ShardedCache(Cache):
    """Keys and values of all layers, dealt out to the ranks in blocks: each holds its share of every sequence.

    Making one is collective over the group the first time. Memory comes with the first tokens.

    Args:
        model: a causal language model whose attention is "longspan"; its config says which layers it has.
        max_cache_len: most tokens of a sequence, over all ranks.
        group: the ranks: a ProcessGroup, a DeviceMesh of one dimension, or None: the default group, or this
            process alone where torch.distributed is not initialised.
        comm: in place of `group`, a longspan.Communicator.
        block: tokens in a block. Results have the same bits on 1, 2, 4 ... ranks where 128 divides it; smaller ones
            share short prompts more evenly.
        compileable: generate() may compile decode, which it does on GPUs by itself. That is faster, and nobody looks at
            single steps any more: that tokens are more than max_cache_len, or differ between ranks, is not seen, and a
            rank that dies is only reported by cache.comm.wait(). Ranks compile at their own pace, within the deadline
            (LONGSPAN_DEADLINE_S).

    Raises:
        UnsupportedError: a model with chunked, linear or shared layers, or an encoder.
        UsageError: the model's attention is another.
        InputError: max_cache_len or block are no positive numbers.
    """

    def __init__(self, model: Any, max_cache_len: int, group: Any = None, *, comm: Any = None, block: int = 128,
                 compileable: bool = False):
        config = _config_of(model)
        if not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise InputError(f"max_cache_len is {max_cache_len!r}; a positive number is wanted")
        self._rule = Sharding("interleaved", block)
        self._layout = f"interleaved:{block}"
        self._max_cache_len = max_cache_len
        self._compileable = compileable
        self._name = name_of(comm, group, model.device.type)
        ranks = known(self._name)
        self._capacity = max(1, len(self._rule.shard(max_cache_len, ranks.rank, ranks.size)))
        super().__init__(layers=[_ShardedLayer(self, i) for i in range(_layer_count(config))])

    @property
    def comm(self) -> Any:
        """The ranks."""
        return known(self._name).comm

    def __repr__(self) -> str:
        return f"ShardedCache(layers={len(self.layers)}, max_cache_len={self._max_cache_len}, {self._layout}, {self.comm})"


def _config_of(model: Any):
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise TypeError(f"model is of type '{type(model).__name__}'; a model of transformers is wanted")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("model has an encoder; causal language models are supported")
    config = config.get_text_config(decoder=True)
    if config._attn_implementation != NAME:
        raise UsageError(f"the model's attention is '{config._attn_implementation}'; load it with "
                         f"attn_implementation='{NAME}', or call model.set_attn_implementation('{NAME}')")
    return config


def _layer_count(config: Any) -> int:
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "attention_chunk_size", None) is not None:
        kinds = ["chunked_attention"]
    for kind in kinds or []:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(f"the model has layers of type '{kind}'; full_attention and sliding_attention are "
                                   "supported")
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise UnsupportedError("the model has layers that share the keys of others; that is not supported")
    return config.num_hidden_layers


@torch.no_grad()
def prefill(model: Any, input_ids: Tensor, cache: ShardedCache, *, attention_mask: Tensor | None = None,
            chunk: int | None = None) -> None:
    """Computes keys and values of a prompt, each rank those of its own tokens, into the cache. Collective.

    The last token of the prompt is left to `generate`, which starts with it. What a rank computes, and holds
    meanwhile, is its share of the prompt, or of each chunk.

    Args:
        model: that of the cache.
        input_ids: [batch, tokens], the same on every rank. Tokens that the cache has already, of a prompt before,
            come first.
        cache: a ShardedCache.
        attention_mask: as a tokenizer gives it, [batch, tokens], all ones: padding is refused.
        chunk: tokens of a forward, over all ranks; rounded up to full rounds of blocks. None: all at once.

    Raises:
        InputError: input_ids that do not fit, or are too many. UsageError: they differ between ranks.
        UnsupportedError: padding. RankError: a rank died or did not come.
    """
    _config_of(model)
    if not isinstance(cache, ShardedCache):
        raise TypeError(f"cache is of type '{type(cache).__name__}'; a ShardedCache is wanted")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise InputError("input_ids: whole numbers in [batch, tokens] are wanted")
    if attention_mask is not None and not bool((attention_mask == 1).all()):
        raise UnsupportedError("attention_mask has padding; give sequences of one length")
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk is {chunk}; it is at least 1")
    end = input_ids.shape[1] - 1
    if end + 1 > cache._max_cache_len:
        raise InputError(f"input_ids has {end + 1} tokens; the cache was made for max_cache_len={cache._max_cache_len}")
    ranks, rule = known(cache._name), cache._rule
    _compare_prompts(cache.comm, input_ids)
    start = int(cache.get_seq_length())
    round_of_blocks = rule.block * ranks.size
    step = end if chunk is None else -(-chunk // round_of_blocks) * round_of_blocks
    run = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    called = "cache" if "cache" in inspect.signature(run.forward).parameters else "past_key_values"
    if start % round_of_blocks and start < end:  # up to a full round every rank computes all of it
        stop = min(end, -(-start // round_of_blocks) * round_of_blocks)
        run(input_ids=input_ids[:, start:stop], use_cache=True, **{called: cache})
        start = stop
    while start < end:
        stop = min(end, start + step - start % round_of_blocks)
        own = rule.shard(stop - start, ranks.rank, ranks.size)
        rows = torch.tensor(list(own.positions()), dtype=torch.int64, device=input_ids.device)
        before = len(rule.shard(start, ranks.rank, ranks.size))
        if not len(rows):  # models do not take no tokens: one, which is not looked at
            rows = rows.new_zeros(1)
        now = _Prefill(start, stop, before, len(own))
        try:
            for layer in cache.layers:
                layer.prefill = now
            run(input_ids=input_ids[:, start + rows], position_ids=(start + rows).expand(input_ids.shape[0], -1),
                use_cache=True, **{called: cache})
        finally:
            for layer in cache.layers:
                layer.prefill = None
        for layer in cache.layers:
            layer.length.fill_(stop)
            layer.lengths.fill_(stop)
        start = stop


def _compare_prompts(comm: Any, input_ids: Tensor) -> None:
    own = input_ids.to("cpu", torch.int64).contiguous()
    mine = f"{list(own.shape)} {hashlib.sha256(own.numpy().tobytes()).hexdigest()}".encode()
    for rank, said in enumerate(comm.gather(mine, "comparison of prompts")):
        if said != mine:
            raise UsageError(f"input_ids differs between rank {comm.rank} and rank {rank}; every rank gives the same")


def _refuse(name: str, why: str = "is not supported") -> None:
    raise UnsupportedError(f"{name} {why} by the attention '{NAME}'")


def attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
              scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
              softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None,
              **others: Any) -> tuple[Tensor, None]:
    """What transformers calls as the attention "longspan".

    Args:
        query: [batch, heads, tokens, dim]; key, value: [batch, kv_heads, keys, dim], as the cache gave them.
        attention_mask: None; a mask is refused.
        scaling: of the products. dropout: 0. sliding_window: keys that a token sees, its own included.
        softcap: of the scores. s_aux: [heads] learned sinks. is_causal: None asks the module.

    Returns:
        ([batch, tokens, heads, dim], None).
    """
    layer, _current.layer = _current.layer, None
    if attention_mask is not None:
        _refuse("attention_mask", "of the caller's own is not supported")
    if dropout:
        _refuse("dropout")
    for name, given in others.items():
        if given is not None and given is not False and name not in _NO_MATTER:
            _refuse(name)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = {"causal": causal}
    if scaling is not None:
        options["softmax_scale"] = scaling
    if sliding_window is not None:
        if not causal:
            _refuse("sliding_window", "of a layer that is not causal is not supported")
        options["window_left"] = sliding_window - 1
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux
    if layer is None or layer.index != getattr(module, "layer_idx", None) or not _is_of(layer, key):
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return _attend(q, k, v, alone_name(query.device.type), **options), None
    options["keys"] = layer.layout
    now = layer.prefill
    q = query.transpose(1, 2)
    if now is None:
        return _attend(q, key.transpose(1, 2), value.transpose(1, 2), layer.name, cache_seqlens=layer.lengths,
                       **options), None
    held = now.before + now.rows
    out = _attend(q[:, :now.rows], key[:, :, :held].transpose(1, 2), value[:, :, :held].transpose(1, 2), layer.name,
                  queries=layer.layout, total_keys=now.end, total_queries=now.end - now.start, **options)
    if now.rows:
        return out, None
    return q.new_zeros(*q.shape[:3], value.shape[-1]), None


def _is_of(layer: _ShardedLayer, key: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return key.shape[2] == layer.capacity
    return key.data_ptr() == layer.keys.data_ptr() and key.shape == layer.keys.shape


def mask(batch_size: int, q_length: int, kv_length: Any, mask_function: Any = causal_mask_function,
         attention_mask: Tensor | None = None, q_offset: Any = None, kv_offset: Any = 0, **others: Any) -> None:
    """What transformers calls to make a mask for the attention "longspan": there is none to be made.

    A causal mask, a window and no mask are what attention() does by itself. Others, and padding, are refused.
    """
    if attention_mask is not None:
        if torch.compiler.is_compiling():
            torch._assert_async(attention_mask.all(), "attention_mask has padding, which is not supported")
        elif not bool(attention_mask.all()):
            _refuse("padding (zeros in attention_mask)")
    config = others.get("config")
    if mask_function is bidirectional_mask_function:
        if getattr(config, "is_causal", None) is False:
            _refuse("config.is_causal=False")
    elif mask_function is not causal_mask_function:
        _check_kind(mask_function, q_length, others, config)
    if q_offset is not None and kv_offset is not q_offset and (
            isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length):
        _refuse("a cache with room to spare, such as StaticCache,")


def _check_kind(mask_function: Any, q_length: int, others: dict, config: Any) -> None:
    """A window over a causal mask is all that there is besides."""
    if others.get("use_vmap"):
        _refuse("or_mask_function or and_mask_function")
    if others.get("local_size") is None or getattr(config, "attention_chunk_size", None) is not None:
        _refuse("a mask of packed sequences, blocks or chunks")
    if torch.compiler.is_compiling():  # closures are not seen, but what transformers makes of them is
        if others.get("allow_is_causal_skip") is False and q_length != 1:
            _refuse("a mask of packed sequences or blocks")
        return
    parts = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    names = [getattr(part, "__qualname__", "") for group in parts if isinstance(group, tuple) for part in group]
    if names != ["sliding_window_overlay.<locals>.inner_mask", "causal_mask_function"]:
        _refuse(f"a mask of {' and '.join(names) or 'another kind'}")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)

__all__ = ["ShardedCache", "prefill"]
