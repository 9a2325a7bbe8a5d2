"""Catches attention inside context_parallel, however it is called.

A TorchFunctionMode sees calls from Python and what torch.compile traces. C++, and what was traced before
(torch.jit.trace, torch.export), call torch's dispatcher themselves. Kernels at a dispatch key that a thread has
only inside see those. Both hold for the thread that entered, as torch.no_grad does.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from typing import Any, Iterator

import torch
from torch.nn.attention import flex_attention as _flex
from torch.overrides import TorchFunctionMode

from longspan import UnsupportedError

from ._attention import scaled_dot_product_attention
from ._groups import Ranks
from ._ops import library

# A dispatch key for extensions, which torch itself does not use: above autograd, autocast and all devices. It
# falls through for operators without a kernel here, which costs them nothing.
_KEY = "DeferredInit"
_inside = threading.local()  # .contexts: (ranks, options), the innermost last
_NAME = "longspan.context_parallel"  # of the innermost one, which torch takes along to threads that it starts

# These compute attention themselves, and would see only this rank's tokens. scaled_dot_product_attention calls
# the first six for its work; others call them where it was decomposed, as by torch.export and make_fx.
_LOCAL_OPERATORS = (
    "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps", "_safe_softmax", "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace", "_efficient_attention_forward", "_cudnn_attention_forward",
    "_cudnn_attention_forward_no_dropout_inplace", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
    "_triton_multi_head_attention", "_triton_scaled_dot_attention")


def _with_overloads(packet: Any) -> list:
    return [packet, *(getattr(packet, name) for name in packet.overloads())]


_packets = {name: getattr(torch.ops.aten, name) for name in _LOCAL_OPERATORS if hasattr(torch.ops.aten, name)}
_SDPA = {torch.nn.functional.scaled_dot_product_attention, *_with_overloads(torch.ops.aten.scaled_dot_product_attention)}
_LOCAL = {one: f"torch.ops.aten.{name}" for name, packet in _packets.items() for one in _with_overloads(packet)}
_LOCAL[torch.nn.functional.multi_head_attention_forward] = "torch.nn.MultiheadAttention"
_FLEX = torch.ops.higher_order.flex_attention


def _why(name: str) -> str:
    return (f"{name} inside context_parallel is not supported: it would attend to this rank's tokens alone. torch's "
            "scaled_dot_product_attention attends to all; windows and softcap are arguments of "
            "longspan.torch's, and documents of context_parallel")


def innermost() -> tuple[Ranks, dict] | None:
    """The context that this thread is in: its ranks, and the options of attention in it. In a thread of autograd, in
    which a checkpoint computes again, that of the thread that called backward."""
    contexts = getattr(_inside, "contexts", None)
    if contexts:
        return contexts[-1]
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
        return None
    return _taken_along()


def _taken_along() -> tuple[Ranks, dict] | None:
    return torch._C._get_obj_in_tls(_NAME) if torch._C._is_key_in_tls(_NAME) else None


def _stash(taken: object) -> None:
    if _STEALS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(taken))
    torch._C._stash_obj_in_tls(_NAME, taken)


def _steals() -> bool:
    """Whether this torch (2.11 does) takes a reference that it was not given: it counts none, and later releases one."""
    probe = object()
    count = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_NAME, probe)
    steals = sys.getrefcount(probe) == count
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return steals


_STEALS = _steals()
_stash(None)


def attend_on(ranks: Ranks, options: dict, *args, **kwargs):
    """One process alone attends on the device of the query."""
    query = args[0] if args else kwargs.get("query")
    device = query.device.type if isinstance(query, torch.Tensor) else ""
    return scaled_dot_product_attention(*args, comm=ranks.name_on(device), **options, **kwargs)


class _Mode(TorchFunctionMode):
    def __init__(self, ranks: Ranks, options: dict):
        super().__init__()
        self._ranks, self._options = ranks, options

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _SDPA:
            return attend_on(self._ranks, self._options, *args, **(kwargs or {}))
        if func is _FLEX:
            return _refuse_flex(*args)
        if func in _LOCAL:
            raise UnsupportedError(_why(_LOCAL[func]))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def caught(ranks: Ranks, options: dict) -> Iterator[None]:
    """Inside, this thread's attention runs as scaled_dot_product_attention of those ranks."""
    contexts = _inside.__dict__.setdefault("contexts", [])
    contexts.append((ranks, options))
    outer = _taken_along()
    _stash((ranks, options))
    try:
        with _Mode(ranks, options), torch._C._IncludeDispatchKeyGuard(torch._C._parse_dispatch_key(_KEY)):
            yield
    finally:
        _stash(outer)
        contexts.pop()


# ---- calls of the dispatcher ------------------------------------------------------------

def _attend(*args, **kwargs):
    context = innermost()
    if context is None:  # this thread inherited the key from the thread that started it
        raise UnsupportedError("scaled_dot_product_attention in a thread that torch started inside context_parallel "
                               "(torch.jit.fork) is not supported: call it in the thread that entered")
    return attend_on(*context, *args, **kwargs)


def _refusal(name: str):
    def refuse(*args, **kwargs):
        raise UnsupportedError(_why(f"torch.ops.aten.{name}"))

    return refuse


def _register() -> tuple:
    """Kernels stay registered as long as the returned object lives."""
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, _KEY)
    aten.impl("scaled_dot_product_attention", _attend, _KEY)
    for name, packet in _packets.items():
        for overload in packet.overloads():
            aten.impl(name if overload == "default" else f"{name}.{overload}", _refusal(name), _KEY)
    return every, aten


_registered = _register()


# ---- flex_attention compiles itself: errors raised in its trace would become dynamo's ------

def _refuse_flex(query, key, value, *args):
    message = _why("flex_attention")
    if not torch.compiler.is_compiling():
        raise UnsupportedError(message)
    results = torch.ops.longspan.refuse(query, value, message)
    return results if hasattr(_flex, "AuxRequest") else results[:2]  # for torch before 2.9


def _refuse(query, value, message):
    raise UnsupportedError(message)


def _fake_refuse(query, value, message):
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return query.new_empty([*query.shape[:-1], value.shape[-1]]), lse, lse.clone()


library.define("refuse(Tensor query, Tensor value, str message) -> (Tensor, Tensor, Tensor)")
library.impl("refuse", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("longspan::refuse", _fake_refuse, lib=library)
