"""Tensors that only the attention "longspan" may read, and what it knows of those of a ShardedCache.

The mask that a model gets, and the keys and values that a ShardedCache returns, are such tensors. Their type
tells attention() what they are, so nothing is passed beside them.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .. import UnsupportedError

NAME = "longspan"

# Functions that anybody may call on a sealed tensor, and that leave it as it is.
_METADATA = frozenset((
    "__get__", "__len__", "_is_view", "_is_zerotensor", "data_ptr", "dim", "element_size", "get_device", "is_complex",
    "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg", "numel", "size", "storage_offset",
    "stride", "untyped_storage"))
_SAME = frozenset(("contiguous", "detach"))


class Sealed(Tensor):
    """A tensor that only attention() may read: others would misread its contents."""

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
        """The message for a caller of that function."""
        raise NotImplementedError


class Mask(Sealed):
    """A mask [batch, 1, queries, keys] that takes no memory: its fields define what is visible.

    With padding its numbers are, for each sequence, how many keys on the left are padding, or how many before those on
    the right are not.
    """

    causal = True
    padding: str | None = None  # "left" or "right"
    window: int | None = None  # keys that a token sees, its own included
    chunk: int | None = None  # keys of a chunk, whose tokens see only those of their own
    images = False  # an instance has `ranges`, [batch, count, 2]: tokens that see each other, as those of an image
    clamped = False  # ranges do not reach past the window

    @classmethod
    def why(cls, name: str) -> str:
        return (f"{cls.who}: '{name}' is called on the attention mask. A model that computes attention itself, or "
                f"changes the mask, is not supported by the attention '{NAME}'; 'eager' and 'sdpa' take it")


class Held(Sealed):
    """Keys or values that a ShardedCache returned: this rank's share of one layer's."""

    number = -1  # of the share, in shares
    part = ""

    @classmethod
    def why(cls, name: str) -> str:
        return (f"{cls.who}: '{name}' is called on the {cls.part} of a ShardedCache, of which a rank holds a share. "
                f"Models that compute attention themselves, or whose latent {cls.part} are projected by other than a plain "
                "torch.nn.Linear kv_b_proj, are not supported; use a cache of transformers")


class Prefill:
    """What a sharded forward is about: this rank's rows of positions [start, end). pads: [batch] int32, the tokens on
    the left that are padding; or None."""

    def __init__(self, start: int, end: int, before: int, rows: int, pads: Tensor | None):
        self.start, self.end, self.before, self.rows, self.pads = start, end, before, rows, pads


class Forward:
    """What the layers of a cache know of the forward that runs."""

    def __init__(self) -> None:
        self.waiting = -1  # the layer whose keys were returned and have not been attended to
        self.updates = 0  # layers, counted by prefill
        self.assisted = False  # generate with an assistant begins, and the cache holds tokens
        self.prefill: Prefill | None = None


class Share:
    """What attention() knows of the layer besides its keys."""

    def __init__(self, cache: Any, index: int):  # of a ShardedCache
        self.index, self.name, self.layout, self.forward = index, cache._name, cache._layout, cache._forward
        self.lengths: Tensor  # [batch], tokens over all ranks
        self.new = 0  # the newest tokens
        self.rows: Tensor | None = None  # of latent keys: [batch, own capacity, 1, latent + rotary]


shares: dict[int, Share] = {}
numbers = itertools.count()
