"""A cache that is sharded across ranks."""

from __future__ import annotations

import contextlib
import copy
import math
import struct
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .. import InputError, Sharding, UnsupportedError, UsageError
from ..torch._groups import Ranks, known
from ..torch._ops import APPEND as _APPEND
from ._latent import latent_layers
from ._sealed import NAME, Forward, Held, Share, numbers, shares


def _lasting() -> Any:
    """Tensors made here are not of inference_mode, outside of which nothing could write them."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


class _ShardedLayer(CacheLayerMixin):
    """This rank's keys and values of one layer, [batch, own capacity, kv_heads, dim]; of latent keys (MLA) the two parts
    of their rows, which lie together."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: "ShardedCache", index: int):
        super().__init__()
        self.index, self.name, self.layout, self.who = index, cache._name, cache._layout, cache._who
        self.is_compileable = cache._compileable  # read by transformers: generate compiles decode by itself on GPUs
        self.capacity, self.max_cache_len = cache._capacity, cache._max_cache_len
        self.is_latent = index in cache._latent
        self.known = 0  # tokens, the first ones, whose ids the cache has
        self.forward, self.share = cache._forward, Share(cache, index)
        with _lasting():
            self.length = torch.zeros((), dtype=torch.int64, device="cpu")  # tokens of each sequence, over all ranks
            self.lengths = self.share.lengths = torch.zeros(0, dtype=torch.int32, device="cpu")  # [batch], the same
        self._register()

    def _register(self) -> None:
        """Own types of what update() returns."""
        number = next(numbers)
        shares[number] = self.share
        weakref.finalize(self, shares.pop, number, None)
        self._types = tuple(type("Held", (Held,), dict(who=self.who, number=number, part=part))
                            for part in ("keys", "values"))

    def __deepcopy__(self, memo: dict) -> "_ShardedLayer":
        """For copies of a cache, so that a prompt is computed once for several answers."""
        made = memo[id(self)] = object.__new__(type(self))
        with _lasting():
            vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name != "_types"})
        made._register()
        return made

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Memory for the number of sequences that comes first."""
        self.device, self.batch_size = key_states.device, key_states.shape[0]
        self.dtype = key_states.dtype
        heads = key_states.shape[1]
        with _lasting():
            dims = [t.shape[-1] for t in (key_states, value_states)]
            if self.is_latent:
                self.share.rows = torch.zeros(self.batch_size, self.capacity, heads, sum(dims), dtype=self.dtype,
                                              device=self.device)
                self.keys, self.values = self.share.rows.transpose(1, 2).split(dims, -1)
            else:
                self.keys, self.values = (
                    torch.zeros(self.batch_size, self.capacity, heads, dim, dtype=t.dtype,
                                device=self.device).transpose(1, 2) for dim, t in zip(dims, (key_states, value_states)))
            self.length = self.length.to(self.device)
            self.lengths = self.share.lengths = torch.zeros(self.batch_size, dtype=torch.int32, device=self.device)
        if not torch.compiler.is_compiling():
            for t in (self.keys, self.values, self.length, self.lengths, *([self.share.rows] if self.is_latent else [])):
                torch._dynamo.mark_static_address(t)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes this rank's part of the new tokens, [batch, kv_heads, tokens, dim]. Only attention() can read
        what this returns."""
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
        """Checks that there is room, and that ranks feed the same tokens: with sampling they easily differ."""
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
        for rank, theirs in enumerate(comm.gather(mine, "comparison of tokens")):
            room, other, *values = struct.unpack(f"<qq{len(theirs) // 4 - 4}f", theirs)
            if room != self.max_cache_len:
                raise UsageError(f"max_cache_len is {self.max_cache_len} on rank {comm.rank} and {room} on rank {rank}; "
                                 "every rank makes the same cache")
            alike = len(theirs) == len(mine) and other == length and all(
                math.isclose(a, b, rel_tol=0.02, abs_tol=0.02) for a, b in zip(values, seen))
            if not alike:
                raise UsageError(f"rank {comm.rank} and rank {rank} feed different tokens at position {length}: every "
                                 "rank gives the same input_ids, and for sampling the same seed (torch.manual_seed)")

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor]:
        """(keys, offset) for masks, which ignore them here."""
        return query_length, self.length

    def get_seq_length(self) -> Tensor | int:
        """Tokens of each sequence, over all ranks."""
        return self.length if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Tokens that a sequence may have, over all ranks."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # transformers before 5.9

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens, or all where there are fewer."""
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
    """Keys and values of all layers, dealt out to the ranks in blocks: each rank has a share of every sequence.

    The first of a group is made collectively. The first tokens allocate the memory.

    Args:
        model: a causal language model whose attention is "longspan"; its config says which layers it has.
        max_cache_len: most tokens of a sequence, over all ranks.
        group: the ranks: a ProcessGroup, a DeviceMesh of one dimension, or None: the default group, or this
            process alone where torch.distributed is not initialised.
        comm: in place of `group`, a longspan.Communicator.
        block: tokens in a block. Where 128 divides it, results have the same bits on 1, 2, 4 ... ranks; smaller
            ones share short prompts more evenly.
        compileable: generate() may compile decode, as it does on GPUs by itself. That is faster, but single steps are
            not checked: nothing reports more than max_cache_len tokens, or tokens that differ between ranks, and only
            cache.comm.wait() reports a rank that dies. Ranks must all compile within the deadline
            (LONGSPAN_DEADLINE_S).

    Raises:
        UnsupportedError: a model with chunked, linear or shared layers, or an encoder.
        UsageError: the model's attention is not "longspan".
        InputError: max_cache_len or block are not positive numbers.
    """

    def __init__(self, model: Any, max_cache_len: int, group: Any = None, *, comm: Any = None, block: int = 128,
                 compileable: bool = False):
        config = config_of(model)
        if not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise InputError(f"max_cache_len is {max_cache_len!r}; a positive number is wanted")
        self._rule = Sharding("interleaved", block)
        self._layout = f"interleaved:{block}"
        self._max_cache_len = max_cache_len
        self._compileable = compileable
        self._who = type(model).__name__
        self._forward = Forward()
        self._ids: Tensor | None = None  # of the tokens that prefill computed, [batch, tokens]
        self._pads: Tensor | None = None  # [batch] of them that are padding on the left
        self._counts = False  # prefill has seen that the model counts positions from 0
        self._ranks = Ranks(comm, group, model.device.type)
        self._name = self._ranks.name
        ranks = known(self._name)
        self._capacity = max(1, len(self._rule.shard(max_cache_len, ranks.rank, ranks.size)))
        self._latent = latent_layers(model)
        super().__init__(layers=[_ShardedLayer(self, i) for i in range(_layer_count(config))])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:
        """For models."""
        if not 0 <= layer_idx < len(self.layers):
            raise UnsupportedError(f"{self._who} keeps keys in layer {layer_idx}, and its config says {len(self.layers)} "
                                   "layers; such a model is not supported by ShardedCache")
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """generate calls this before an assistant guesses; then it feeds the whole prompt, whatever the cache holds."""
        self._forward.assisted = self.layers[0].is_initialized and int(self.get_seq_length()) > 0

    @property
    def comm(self) -> Any:
        """The ranks."""
        return known(self._name).comm

    def __repr__(self) -> str:
        return f"ShardedCache(layers={len(self.layers)}, max_cache_len={self._max_cache_len}, {self._layout}, {self.comm})"


def config_of(model: Any):
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
