"""The operators under torch.func: vmap calls them for each sample, and derivatives are refused.

Without a rule of the operator, torch silently drops tangents and cotangents, and returns a wrong
derivative of zeros. The kernel here is at the key where transforms begin, which nothing else uses.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from longspan import UnsupportedError

_KEY = "FuncTorchDynamicLayerFrontMode"
_functorch = torch._C._functorch


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward mode tracks it."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def refuse_tangent(name: str, tensor: Any) -> None:
    """Raises where forward mode asks for a derivative: it would be zeros."""
    if isinstance(tensor, Tensor) and has_tangent(tensor):
        raise UnsupportedError(f"{name} is a dual tensor (forward mode: torch.func.jvp, jacfwd, dual_level), and there "
                               f"is no derivative: give {name}.detach()")


def refuse_derivative(name: str, tensor: Any) -> None:
    """The same for torch.func.grad and vjp too."""
    refuse_tangent(name, tensor)
    if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(f"{name} requires grad in torch.func (grad, vjp), and there is no rule for it: call "
                               f"backward() or torch.autograd.grad, or give {name}.detach()")


def register(library: torch.library.Library, name: str) -> None:
    """Call it for an operator of `library` after its other kernels are registered."""
    op = getattr(torch.ops.longspan, name).default
    arguments = op._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    def kernel(*args, **kwargs):
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        interpreter = retrieve_current_functorch_interpreter()
        given = {a.name: value for a, value in zip(arguments, args)} | kwargs
        given = {name: _functorch.unwrap_if_dead(value) if isinstance(value, Tensor) else value
                 for name, value in given.items()}
        kind = interpreter.key()
        if kind == _functorch.TransformType.Vmap:
            return _each(op, given, written, interpreter)
        if kind == _functorch.TransformType.Functionalize:
            return _functional(op, given, written, interpreter)
        level = interpreter.level()
        for name, value in given.items():
            refuse_derivative(name, value)
            if isinstance(value, Tensor):
                given[name] = _functorch._unwrap_for_grad(value, level)
        with interpreter.lower():
            made = op(**given)
        return _mapped(lambda one: _functorch._wrap_for_grad(one, level), made)

    library.impl(name, kernel, _KEY)


def _mapped(function: Callable[[Tensor], Tensor], made: Any) -> Any:
    """The results of an operator: nothing, a tensor, or several."""
    if made is None or isinstance(made, Tensor):
        return None if made is None else function(made)
    return tuple(function(one) for one in made)


def _each(op, given: dict, written: list, interpreter) -> Any:
    """One call for each sample of the batch that vmap made."""
    level, size, split = interpreter.level(), None, {}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            continue
        given[name], dim = _functorch._unwrap_batched(value, level)
        if dim is not None:
            size = given[name].shape[dim]
            split[name] = given[name].movedim(dim, 0)
    for name in written:
        if split and name not in split:
            raise UnsupportedError(f"{name} is written, and a vmap has one of it for all samples; each needs its own")
    if size == 0:
        raise UnsupportedError("a vmap over no samples is not supported")
    with interpreter.lower():
        if size is None:
            return op(**given)
        each = [op(**given | {name: value[i] for name, value in split.items()}) for i in range(size)]
        if each[0] is None:  # it writes
            return None
        made = torch.stack(each) if isinstance(each[0], Tensor) else [torch.stack(parts) for parts in zip(*each)]
    return _mapped(lambda one: _functorch._add_batch_dim(one, 0, level), made)


def _functional(op, given: dict, written: list, interpreter) -> Any:
    """For torch.func.functionalize, whose tensors wrap others."""
    if written:
        raise UnsupportedError(f"{op} writes to {written[0]}; torch.func.functionalize takes no such operator")
    for name, value in given.items():
        if isinstance(value, Tensor) and torch._is_functional_tensor(value):
            torch._sync(value)
            given[name] = torch._from_functional_tensor(value)
    with interpreter.lower():
        made = op(**given)
    return _mapped(torch._to_functional_tensor, made)
