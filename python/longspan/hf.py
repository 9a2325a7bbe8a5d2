"""longspan for Hugging Face transformers: attention, and a cache that is sharded across ranks.

    import longspan.hf as hf                       # registers the attention "longspan"

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longspan")
    cache = hf.ShardedCache(model, max_cache_len=1_000_000)     # each rank holds its share
    hf.prefill(model, input_ids, cache)                         # each rank computes its share
    tokens = model.generate(input_ids, past_key_values=cache)

Every rank runs the same program on the same input_ids and gets the same tokens; it holds all weights.
Without a ShardedCache the attention "longspan" is that of one process, over whatever cache there is.
What is not supported is refused by name: padding, masks of the caller's own, chunked and linear layers,
position_bias, dropout, beams, models that compute attention themselves, caches of latent keys.

The mask that a model gets, and the keys and values that a ShardedCache returns, are tensors that only the
attention "longspan" may read (_Sealed). Their type says what they are, so nothing is passed beside them.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import itertools
import json
import math
import struct
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from . import InputError, Sharding, UnsupportedError, UsageError
from .torch._groups import Ranks, alone_name, known
from .torch._ops import APPEND as _APPEND, attend as _attend

NAME = "longspan"

# What models hand on to attention, and what no result depends on.
_NO_MATTER = frozenset((
    "cache", "cache_position", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache"))


# What anybody may ask of a sealed tensor, and what leaves it as it is.
_METADATA = frozenset((
    "__get__", "__len__", "_is_view", "_is_zerotensor", "data_ptr", "dim", "element_size", "get_device", "is_complex",
    "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg", "numel", "size", "storage_offset",
    "stride", "untyped_storage"))
_SAME = frozenset(("contiguous", "detach"))


class _Sealed(Tensor):
    """A tensor that only attention() may read: others would take what it holds for something else."""

    who = ""  # the model

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _METADATA:
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        if func.__name__ in _SAME:
            return args[0]
        if func.__name__ == "__repr__":
            return f"<{cls.__name__} of {cls.who}>"
        raise UnsupportedError(cls.why(func.__name__))

    @classmethod
    def why(cls, name: str) -> str:
        """What to tell who calls the function of that name."""
        raise NotImplementedError


class _Mask(_Sealed):
    """A mask [batch, 1, queries, keys] that takes no memory: its type says what is visible."""

    causal = True
    window: int | None = None  # keys that a token sees, its own included

    @classmethod
    def why(cls, name: str) -> str:
        return (f"{cls.who}: '{name}' is called on the attention mask. A model that computes attention itself, or "
                f"changes the mask, is not supported by the attention '{NAME}'; 'eager' and 'sdpa' take it")


class _Held(_Sealed):
    """Keys or values that a ShardedCache returned: this rank's share of one layer's."""

    number = -1  # of its share, in _shares
    part = ""

    @classmethod
    def why(cls, name: str) -> str:
        return (f"{cls.who}: '{name}' is called on the {cls.part} of a ShardedCache, of which a rank holds a share. "
                f"Models that keep latent {cls.part}, or that compute attention themselves, are not supported; use a "
                "cache of transformers")


_masks: dict[tuple, type] = {}


@torch.compiler.assume_constant_result
def _mask_type(who: str, causal: bool, window: int | None) -> type:
    made = type("_Mask", (_Mask,), dict(who=who, causal=causal, window=window))
    return _masks.setdefault((who, causal, window), made)


class _Prefill:
    """What a sharded forward is about: this rank's rows of positions [start, end)."""

    def __init__(self, start: int, end: int, before: int, rows: int):
        self.start, self.end, self.before, self.rows = start, end, before, rows


class _Forward:
    """What the layers of a cache know of the forward that runs."""

    def __init__(self) -> None:
        self.waiting = -1  # the layer whose keys have been returned, and not been attended to
        self.updates = 0  # of layers, counted by prefill
        self.assisted = False  # generate with an assistant begins, and the cache holds tokens
        self.prefill: _Prefill | None = None


class _Share:
    """What attention() knows of the layer whose keys it is given, but for the keys themselves."""

    def __init__(self, cache: "ShardedCache", index: int):
        self.index, self.name, self.layout, self.forward = index, cache._name, cache._layout, cache._forward
        self.lengths: Tensor  # [batch], tokens over all ranks
        self.new = 0  # tokens that came last


_shares: dict[int, _Share] = {}
_numbers = itertools.count()


def _lasting() -> Any:
    """Tensors that are made within belong to no inference_mode, outside of which nothing could write them."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


class _ShardedLayer(CacheLayerMixin):
    """This rank's keys and values of one layer, [batch, own capacity, kv_heads, dim]."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: "ShardedCache", index: int):
        super().__init__()
        self.index, self.name, self.layout, self.who = index, cache._name, cache._layout, cache._who
        self.is_compileable = cache._compileable  # transformers asks: generate compiles decode by itself on GPUs
        self.capacity, self.max_cache_len = cache._capacity, cache._max_cache_len
        self.known = 0  # tokens, the first ones, whose ids the cache has
        self.forward, self.share = cache._forward, _Share(cache, index)
        with _lasting():
            self.length = torch.zeros((), dtype=torch.int64, device="cpu")  # tokens of each sequence, over all ranks
            self.lengths = self.share.lengths = torch.zeros(0, dtype=torch.int32, device="cpu")  # [batch], the same
        self._register()

    def _register(self) -> None:
        """Types of its own for what update() returns."""
        number = next(_numbers)
        _shares[number] = self.share
        weakref.finalize(self, _shares.pop, number, None)
        self._types = tuple(type("_Held", (_Held,), dict(who=self.who, number=number, part=part))
                            for part in ("keys", "values"))

    def __deepcopy__(self, memo: dict) -> "_ShardedLayer":
        """Of a cache that is copied, so that a prompt is computed once for several answers."""
        made = memo[id(self)] = object.__new__(type(self))
        with _lasting():
            vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name != "_types"})
        made._register()
        return made

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Memory for as many sequences as come first."""
        self.device, self.batch_size = key_states.device, key_states.shape[0]
        self.dtype = key_states.dtype
        heads = key_states.shape[1]
        with _lasting():
            self.keys, self.values = (
                torch.zeros(self.batch_size, self.capacity, heads, t.shape[-1], dtype=t.dtype,
                            device=self.device).transpose(1, 2) for t in (key_states, value_states))
            self.length = self.length.to(self.device)
            self.lengths = self.share.lengths = torch.zeros(self.batch_size, dtype=torch.int32, device=self.device)
        if not torch.compiler.is_compiling():
            for t in (self.keys, self.values, self.length, self.lengths):
                torch._dynamo.mark_static_address(t)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes what this rank holds of the new tokens, [batch, kv_heads, tokens, dim]. Only attention() can read
        what is returned."""
        if self.forward.waiting >= 0:
            raise UnsupportedError(f"{self.who}: layer {self.forward.waiting} has not given the attention '{NAME}' the "
                                   "keys that the ShardedCache returned; such a model is not supported")
        self._check_shapes(key_states, value_states)
        now = self.forward.prefill
        if now is not None:
            own = slice(now.before, now.before + now.rows)
            self.keys[:, :, own] = key_states[:, :, :now.rows]
            self.values[:, :, own] = value_states[:, :, :now.rows]
            self.forward.updates += 1
        else:
            if self.index == 0 and not torch.compiler.is_compiling():
                self._check(key_states)
            _APPEND(key_states.transpose(1, 2), value_states.transpose(1, 2), self.keys.transpose(1, 2),
                    self.values.transpose(1, 2), self.name, cache_seqlens=self.lengths, keys=self.layout)
            self.length.add_(key_states.shape[2])
            self.lengths.add_(key_states.shape[2])
        self.share.new, self.forward.waiting = key_states.shape[2], self.index
        of_keys, of_values = self._types
        return self.keys.detach().as_subclass(of_keys), self.values.detach().as_subclass(of_values)

    def _check_shapes(self, key_states: Any, value_states: Any) -> None:
        shapes = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (key_states, value_states)]
        if any(len(shape) != 4 for shape in shapes) or shapes[0][:3] != shapes[1][:3]:
            raise UnsupportedError(f"{self.who}: layer {self.index} gives a ShardedCache keys {shapes[0]} and values "
                                   f"{shapes[1]}; [batch, kv_heads, tokens, dim] of both are supported")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif shapes[0][0] != self.batch_size and not torch.compiler.is_compiling() and int(self.length) == 0:
            self.lazy_initialization(key_states, value_states)
        if shapes[0][0] != self.batch_size:
            raise UnsupportedError(f"the cache holds {self.batch_size} sequences, and {shapes[0][0]} come: "
                                   "num_beams and num_return_sequences are not supported")
        now = self.forward.prefill
        if now is not None and shapes[0][2] != max(1, now.rows):
            raise UnsupportedError(f"{self.who}: layer {self.index} has {shapes[0][2]} keys for {max(1, now.rows)} tokens; "
                                   "models that drop or add keys are not supported")

    def _check(self, key_states: Tensor) -> None:
        """That there is room, and that ranks feed the same tokens: with sampling they easily do not."""
        length, new = int(self.length), key_states.shape[2]
        if self.forward.assisted and new > 1:
            raise UnsupportedError(f"generate with an assistant feeds the whole prompt, and the cache holds {length} tokens "
                                   "already; give it one that is empty: reset() it, and leave out prefill")
        self.forward.assisted = False
        comm = known(self.name).comm
        if comm.size > 1 and new:
            self._compare(comm, length, key_states[:16, 0, -1, :4].float().flatten().tolist())
        if length + new > self.max_cache_len:
            raise InputError(f"the cache has {length} of max_cache_len={self.max_cache_len} tokens, and {new} more come")

    def _compare(self, comm: Any, length: int, seen: list[float]) -> None:
        mine = struct.pack(f"<qq{len(seen)}f", self.max_cache_len, length, *seen)
        for rank, said in enumerate(comm.gather(mine, "comparison of tokens")):
            room, other, *values = struct.unpack(f"<qq{len(said) // 4 - 4}f", said)
            if room != self.max_cache_len:
                raise UsageError(f"max_cache_len is {self.max_cache_len} on rank {comm.rank} and {room} on rank {rank}; "
                                 "every rank makes the same cache")
            alike = len(said) == len(mine) and other == length and all(
                math.isclose(a, b, rel_tol=0.02, abs_tol=0.02) for a, b in zip(values, seen))
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
        """Forgets the last -tokens_to_remove tokens; all of them where there are fewer."""
        if tokens_to_remove > 0:
            raise InputError(f"tokens_to_remove is {tokens_to_remove}; it is 0 or below: -2 forgets the last 2 tokens")
        self.length.add_(tokens_to_remove).clamp_(min=0)
        self.lengths.add_(tokens_to_remove).clamp_(min=0)
        if self.known:
            self.known = min(self.known, int(self.length))

    def keep(self, tokens: int) -> None:
        """Forgets all but the first `tokens`, which it has."""
        self.length.fill_(tokens)
        self.lengths.fill_(tokens)
        self.known = min(self.known, tokens)
        self.forward.waiting, self.forward.assisted = -1, False

    def reset(self) -> None:
        """Forgets all tokens; the memory stays."""
        self.keep(0)

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

    def update_indexer(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise UnsupportedError(f"{self.who} chooses keys by an index, or keeps states of linear layers or convolutions; "
                               "that is not supported by ShardedCache")

    update_conv_state = update_recurrent_state = update_indexer


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
        self._who = type(model).__name__
        self._forward = _Forward()
        self._ids: Tensor | None = None  # of the tokens that prefill computed, [batch, tokens]
        self._counts = False  # prefill has seen that the model counts positions from 0
        self._ranks = Ranks(comm, group, model.device.type)
        self._name = self._ranks.name
        ranks = known(self._name)
        self._capacity = max(1, len(self._rule.shard(max_cache_len, ranks.rank, ranks.size)))
        super().__init__(layers=[_ShardedLayer(self, i) for i in range(_layer_count(config))])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What models call."""
        if not 0 <= layer_idx < len(self.layers):
            raise UnsupportedError(f"{self._who} keeps keys in layer {layer_idx}, and its config says {len(self.layers)} "
                                   "layers; such a model is not supported by ShardedCache")
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """What generate calls before it lets an assistant guess; then it feeds the prompt, whatever the cache holds."""
        self._forward.assisted = self.layers[0].is_initialized and int(self.get_seq_length()) > 0

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
    if getattr(config, "num_kv_shared_layers", 0) or any(
            "reuse" in (mode or "") for mode in getattr(config, "kv_sharing_modes", None) or ()):
        raise UnsupportedError("the model has layers that share the keys of others; that is not supported")
    return config.num_hidden_layers


@torch.no_grad()
def prefill(model: Any, input_ids: Tensor, cache: ShardedCache, *, attention_mask: Tensor | None = None,
            chunk: int | None = None) -> None:
    """Computes keys and values of a prompt, each rank those of its own tokens, into the cache. Collective.

    The cache holds then all tokens of the prompt but the last, and no others. The last one is left to `generate`, which
    starts with it. What a rank computes, and holds meanwhile, is its share of the prompt, or of each chunk.

    Args:
        model: that of the cache.
        input_ids: [batch, tokens], the same on every rank. Tokens that a prefill before has computed are not computed
            again, as far as they are the first of this prompt too; what else the cache holds is forgotten.
        cache: a ShardedCache.
        attention_mask: as a tokenizer gives it, [batch, tokens], all ones: padding is refused.
        chunk: tokens of a forward, over all ranks; rounded up to full rounds of blocks. None: all at once.

    Raises:
        InputError: input_ids that do not fit, or are too many. UsageError: they, or the caches, differ between ranks.
        UnsupportedError: padding, a model without position_ids. RankError: a rank died or did not come.
    """
    if not isinstance(cache, ShardedCache):
        raise TypeError(f"cache is of type '{type(cache).__name__}'; a ShardedCache is wanted")
    try:
        run, called = _check_prompt(model, input_ids, cache, attention_mask, chunk)
    except Exception as error:
        if cache.comm.size > 1:  # the others wait for this rank
            cache.comm.gather(json.dumps({"error": f"{error}"}).encode(), "comparison of prompts")
        raise
    start = _known_of(cache, input_ids)
    _compare_prompts(cache, input_ids, start, chunk)
    for layer in cache.layers:
        layer.keep(start)
    ids = input_ids[:, :-1].to("cpu", torch.int64, copy=True)
    for stop in _steps(cache, start, ids.shape[1], chunk):
        try:
            _prefill_step(run, called, input_ids, cache, start, stop)
        except BaseException:
            for layer in cache.layers:
                layer.keep(start)
            raise
        for layer in cache.layers:
            layer.keep(stop)
            layer.known = stop
        cache._ids, start = ids, stop


def _check_prompt(model: Any, input_ids: Any, cache: ShardedCache, attention_mask: Any, chunk: Any) -> tuple[Any, str]:
    """What runs the layers, and how it calls the cache."""
    config = _config_of(model)
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise InputError("input_ids: whole numbers in [batch, tokens] are wanted")
    if not input_ids.numel():
        raise InputError(f"input_ids has the shape {list(input_ids.shape)}; there is no token")
    if attention_mask is not None and not bool((attention_mask == 1).all()):
        raise UnsupportedError("attention_mask has padding; give sequences of one length")
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise InputError(f"chunk is {chunk!r}; it is at least 1")
    tokens = input_ids.shape[1]
    if tokens > cache._max_cache_len:
        raise InputError(f"input_ids has {tokens} tokens; the cache was made for max_cache_len={cache._max_cache_len}")
    run = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(run, PreTrainedModel):  # some call their last projection so
        run = model.base_model
    takes = inspect.signature(run.forward).parameters
    if "position_ids" not in takes:
        raise UnsupportedError(f"{type(run).__name__} takes no position_ids, by which a rank says which tokens of the prompt "
                               "it computes; call generate without prefill")
    _check_rope(config, cache, tokens, chunk)
    if not cache._counts:
        _check_positions(run, input_ids)
        cache._counts = True
    return run, "cache" if "cache" in takes else "past_key_values"


def _check_positions(run: Any, input_ids: Tensor) -> None:
    """That the model counts positions from 0, which some do not (RoBERTa begins with the one after that of padding)."""
    first = input_ids[:, :1]
    by_itself, given = (run(input_ids=first, use_cache=False, **more)[0] for more in (
        {}, {"position_ids": torch.zeros_like(first)}))
    if (by_itself - given).abs().max() > torch.finfo(given.dtype).eps ** 0.5 * given.abs().max():
        raise UnsupportedError(f"{type(run).__name__} counts positions by a rule of its own, and a rank could not say which "
                               "tokens of the prompt it computes; call generate without prefill")


def _check_rope(config: Any, cache: ShardedCache, tokens: int, chunk: int | None) -> None:
    """Frequencies that depend on the last position of a forward are those of one forward of all tokens, or refused."""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in [given] if "rope_type" in given else [r for r in given.values() if isinstance(r, dict)]:
        if rope.get("rope_type") not in ("dynamic", "longrope"):
            continue
        short = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        around = cache._rule.block * cache.comm.size  # the last position of a rank is at most as many below the step's
        steps = list(_steps(cache, 0, tokens - 1, chunk))
        least = min((max(begin, stop - around) + 1 for begin, stop in zip([0] + steps, steps)), default=tokens)
        if tokens > short and (rope["rope_type"] == "dynamic" or least <= short):
            raise UnsupportedError(
                f"the model's rope_type is '{rope['rope_type']}': a prompt of {tokens} tokens, more than "
                f"original_max_position_embeddings={short}, would have other frequencies in parts than at once; call "
                "generate without prefill" + (", or give no chunk" if rope["rope_type"] == "longrope" and chunk else ""))


def _steps(cache: ShardedCache, start: int, end: int, chunk: int | None) -> Any:
    """Where forwards of [start, end) stop. Tokens up to a full round of blocks are one, which every rank computes."""
    around = cache._rule.block * cache.comm.size
    step = max(end, 1) if chunk is None else -(-chunk // around) * around
    if start % around and start < end:
        start = min(end, -(-start // around) * around)
        yield start
    while start < end:
        start = min(end, start + step - start % around)
        yield start


def _prefill_step(run: Any, called: str, input_ids: Tensor, cache: ShardedCache, start: int, stop: int) -> None:
    ranks, rule = known(cache._name), cache._rule
    if start % (rule.block * ranks.size):
        run(input_ids=input_ids[:, start:stop], use_cache=True, **{called: cache})
        return
    own = rule.shard(stop - start, ranks.rank, ranks.size)
    rows = torch.tensor(list(own.positions()), dtype=torch.int64, device=input_ids.device)
    before = len(rule.shard(start, ranks.rank, ranks.size))
    if not len(rows):  # models do not take no tokens: one, which is not looked at
        rows = rows.new_zeros(1)
    cache._forward.prefill, cache._forward.updates = _Prefill(start, stop, before, len(own)), 0
    try:
        run(input_ids=input_ids[:, start + rows], position_ids=(start + rows).expand(input_ids.shape[0], -1),
            use_cache=True, **{called: cache})
    finally:
        cache._forward.prefill = None
    if cache._forward.waiting >= 0:
        raise UnsupportedError(f"{cache._who}: layer {cache._forward.waiting} has not given the attention '{NAME}' the keys "
                               "that the ShardedCache returned; such a model is not supported")
    if cache._forward.updates != len(cache.layers):
        raise UnsupportedError(f"{cache._who} has put keys into the ShardedCache {cache._forward.updates} times, and its config "
                               f"says {len(cache.layers)} layers; such a model is not supported")


def _known_of(cache: ShardedCache, input_ids: Tensor) -> int:
    """Tokens, the first ones, that the cache has of this prompt, its last one left out."""
    if cache._ids is None or cache._ids.shape[0] != input_ids.shape[0]:
        return 0
    count = min([layer.known for layer in cache.layers] + [cache._ids.shape[1], input_ids.shape[1] - 1])
    differ = (cache._ids[:, :count] != input_ids[:, :count].to("cpu")).any(0).nonzero()
    return int(differ[0]) if len(differ) else count


def _compare_prompts(cache: ShardedCache, input_ids: Tensor, start: int, chunk: int | None) -> None:
    own, comm = input_ids.to("cpu", torch.int64).contiguous(), cache.comm
    mine = {"input_ids": [list(own.shape), hashlib.sha256(own.numpy().tobytes()).hexdigest()], "chunk": chunk,
            "max_cache_len": cache._max_cache_len, "block": cache._rule.block, "the number of tokens in the cache": start}
    for rank, said in enumerate(comm.gather(json.dumps(mine).encode(), "comparison of prompts")):
        other = json.loads(said)
        if "error" in other:
            raise UsageError(f"prefill was refused on rank {rank}, and not on rank {comm.rank}: {other['error']}")
        for name, value in mine.items():
            if other[name] != value:
                found = "" if name == "input_ids" else f" ({value} and {other[name]})"
                raise UsageError(f"{name} differs between rank {comm.rank} and rank {rank}{found}; every rank gives the "
                                 "same")


def _refuse(name: str, why: str = "is not supported") -> None:
    raise UnsupportedError(f"{name} {why} by the attention '{NAME}'")


def attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
              scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
              softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None,
              **others: Any) -> tuple[Tensor, None]:
    """What transformers calls as the attention "longspan".

    Args:
        query: [batch, heads, tokens, dim]; key, value: [batch, kv_heads, keys, dim], as the cache gave them.
        attention_mask: what mask() made, or None; others are refused.
        scaling: of the products. dropout: 0. sliding_window: keys that a token sees, its own included.
        softcap: of the scores. s_aux: [heads] learned sinks. is_causal: None asks the module; a mask says it itself.

    Returns:
        ([batch, tokens, heads, dim], None).
    """
    share = _share_of(module, key, value)
    if dropout:
        _refuse("dropout")
    for name, given in others.items():
        if given is not None and given is not False and name not in _NO_MATTER:
            _refuse(name)
    options = _visible(module, query, key, attention_mask, sliding_window, is_causal, share)
    if scaling is not None:
        options["softmax_scale"] = scaling
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux
    with torch._C.DisableTorchFunction():
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if share is None:
        return _attend(q, k, v, alone_name(query.device.type), **options), None
    options["keys"] = share.layout
    now = share.forward.prefill
    if now is None:
        return _attend(q, k, v, share.name, cache_seqlens=share.lengths, **options), None
    held = now.before + now.rows
    out = _attend(q[:, :now.rows], k[:, :held], v[:, :held], share.name, queries=share.layout, total_keys=now.end,
                  total_queries=now.end - now.start, **options)
    if now.rows:
        return out, None
    return q.new_zeros(*q.shape[:3], value.shape[-1]), None


def _share_of(module: torch.nn.Module, key: Tensor, value: Tensor) -> _Share | None:
    """Whose keys these are: None where they are no ShardedCache's."""
    if not isinstance(key, _Held) and not isinstance(value, _Held):
        return None
    if not isinstance(key, _Held) or not isinstance(value, _Held) or type(key).number != type(value).number or (
            type(key).part != "keys" or type(value).part != "values"):
        raise UnsupportedError(f"{type(module).__name__} gives the attention '{NAME}' keys and values of which not both are "
                               "what the ShardedCache returned for one layer; such a model is not supported")
    share = _shares[type(key).number]
    share.forward.waiting = -1
    return share


def _visible(module: torch.nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None,
             sliding_window: int | None, is_causal: bool | None, share: _Share | None) -> dict:
    """What each row sees. A mask says it, as for transformers' own attention; the module does where there is none."""
    rows, keys = query.shape[2], key.shape[2]
    if share is not None:
        if rows != share.new:
            raise UnsupportedError(f"{type(module).__name__} has {rows} query rows, and {share.new} tokens came into the "
                                   "ShardedCache; such a model is not supported")
        keys = rows  # that are new, as get_mask_sizes() counts them
    causal, window = getattr(module, "is_causal", True) if is_causal is None else is_causal, sliding_window
    if attention_mask is not None:
        if not isinstance(attention_mask, _Mask):
            _refuse("attention_mask", "of the caller's own is not supported")
        if attention_mask.shape[-2] != rows or attention_mask.shape[-1] != keys:
            raise UnsupportedError(f"{type(module).__name__} has {rows} query rows and {keys} keys, and its mask is "
                                   f"one of {attention_mask.shape[-2]} rows and {attention_mask.shape[-1]} keys; such a "
                                   "model is not supported")
        causal, window = type(attention_mask).causal, type(attention_mask).window
        if sliding_window is not None and window != sliding_window:
            raise UnsupportedError(f"{type(module).__name__} has sliding_window={sliding_window}, and its mask {window}; "
                                   "which of them holds is not clear")
    elif causal and rows != keys and rows > 1:  # transformers' own attentions differ in what they do then
        raise UnsupportedError(f"{type(module).__name__} is causal, and has {rows} query rows, {keys} keys and no mask: which "
                               "keys a row sees is not clear")
    if share is not None and share.forward.prefill is not None and not causal:
        _refuse("prefill of layers that are not causal")
    if window is None:
        return {"causal": causal}
    if not causal:
        _refuse("sliding_window", "of a layer that is not causal is not supported")
    return {"causal": True, "window_left": window - 1}


def mask(batch_size: int, q_length: int, kv_length: Any, mask_function: Any = causal_mask_function,
         attention_mask: Tensor | None = None, q_offset: Any = None, kv_offset: Any = 0, **others: Any) -> Tensor:
    """What transformers calls to make a mask for the attention "longspan", which alone can read it.

    Causal masks, windows over them and masks of everything are made. Others, and padding, are refused.
    """
    config = others.get("config")
    causal, window = mask_function is not bidirectional_mask_function, None
    if causal and mask_function is not causal_mask_function:
        _check_kind(mask_function, q_length, others, config)
        window = others["local_size"]
    if causal and q_offset is not None and kv_offset is not q_offset and (
            isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length):
        _refuse("a cache with room to spare, such as StaticCache,")
    if attention_mask is not None:  # of a cache with room it has less than all keys
        _check_padding(attention_mask, kv_offset + kv_length)
    device = others.get("device") or (None if attention_mask is None else attention_mask.device)
    return torch.empty((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length).as_subclass(
        _mask_type(type(config).__name__, causal, window))


def _check_padding(attention_mask: Tensor, tokens: Any) -> None:
    """A mask of fewer tokens than there are keys is one of padding: transformers fills it up with zeros."""
    if torch.compiler.is_compiling():
        torch._assert_async(attention_mask.all(), "attention_mask has padding, which is not supported")
        return
    if not bool(attention_mask.all()):
        _refuse("padding (zeros in attention_mask)")
    if attention_mask.shape[-1] < int(tokens):
        raise InputError(f"attention_mask is of {attention_mask.shape[-1]} tokens, and there are {int(tokens)}, those in the "
                         "cache included; give all of them, or no mask")


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
