# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that are added to what a parameter already has as they are made, past Paddle's own sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from .._graphs import dtype_name, filled, is_graph_value, to_dtype
from .autograd import OneShotGuard, applied_once

__all__ = ["Destination", "accumulated", "accumulated_each", "destination_of", "put", "refuse_others", "why_not"]


_WHERE = "with accumulate=True "


class Destination(NamedTuple):
    """Where a gradient goes.

    Attributes:
        tensor: float32 or the dtype of the parameter.
        adds: whether it holds numbers to add to.
    """

    tensor: Tensor
    adds: bool


def why_not(parameter: Tensor) -> tuple[str, str] | None:
    """What a parameter must be, and what it is instead, if its gradients cannot be accumulated; else None."""
    if is_graph_value(parameter):
        return "a tensor, outside static graphs, with accumulate", "a value of a static graph"
    if not parameter.stop_gradient and not parameter.is_leaf:
        return "a leaf, such as a parameter, with accumulate", "the result of another operator"
    return _why_not("main_grad", parameter, getattr(parameter, "main_grad", None))


def _why_not(name: str, parameter: Tensor, held: Tensor | None) -> tuple[str, str] | None:
    """The same of the attribute to whose tensor gradients are added."""
    if held is None:
        return None
    given = f"a {type(held).__name__}"
    if isinstance(held, Tensor):
        fits = held.dtype in (paddle.float32, parameter.dtype) and held.shape == parameter.shape
        if fits and held.is_contiguous() and held.place == parameter.place:
            return None
        layout = ", not contiguous," if fits and not held.is_contiguous() else ""
        given = f"{dtype_name(held.dtype)} {list(held.shape)}{layout} on {held.place}"
    dtypes = " or ".join(dict.fromkeys(("float32", dtype_name(parameter.dtype))))
    return f"a parameter whose {name} is contiguous, {dtypes}, of its shape and place", f"one whose {name} is {given}"


def destination_of(parameter: Tensor) -> Destination | None:
    """Where to put the gradient of a parameter, which is made if need be. None: give the gradient to Paddle.

    Raises:
        ValueError: what is there does not fit; it may have been replaced since the forward pass.
    """
    name = "main_grad" if hasattr(parameter, "main_grad") else "grad"
    held = getattr(parameter, name)
    refuse_others(name, parameter, held)
    if held is not None:
        return Destination(held, True)
    if name == "grad":
        return None
    with paddle.no_grad():
        parameter.main_grad = filled(parameter.shape, 0, "float32", like=parameter)
    return Destination(parameter.main_grad, False)


def refuse_others(name: str, parameter: Tensor, held: Tensor | None) -> None:
    """Raise a ValueError if gradients of a parameter cannot be added to what its attribute of that name holds."""
    problem = _why_not(name, parameter, held)
    if problem is not None:
        raise ValueError(f"accumulate: expected {problem[0]}, but got {problem[1]}")


def put(destination: Destination, gradient: Tensor) -> None:
    """Add a gradient to its destination, in float32 and rounded once.

    A destination that holds nothing to add to is new, float32 and zero. It may be part of another tensor: then `add_`
    and `copy_` leave it there, while `paddle.assign` gives it memory of its own on some devices.
    """
    into = destination.tensor
    with paddle.no_grad():
        wide = to_dtype(gradient, paddle.float32)
        if into.dtype == paddle.float32:
            into.add_(wide)
        else:
            into.copy_(to_dtype(wide + to_dtype(into, paddle.float32), into.dtype), False)


class _Accumulated(PyLayer):
    """A copy of a parameter, since Paddle takes none that shares memory with a leaf; its gradient is put in place."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, *, guard: OneShotGuard) -> Tensor:
        guard.watch(ctx)
        ctx.parameter = parameter
        return parameter.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:
        destination = destination_of(ctx.parameter)
        if destination is None:
            return gradient
        put(destination, gradient)
        return None


def accumulated(parameter: Tensor) -> Tensor:
    """A parameter for operators that know nothing of accumulation."""
    if parameter.stop_gradient or not paddle.is_grad_enabled():
        return parameter
    return applied_once(_Accumulated, parameter, where=_WHERE)[0]


class _AccumulatedEach(PyLayer):
    """The matrices of a parameter, which share its memory; the gradient of each is put in place alone.

    So neither the parameter is copied nor is a gradient of its size made.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, *, guard: OneShotGuard) -> tuple[Tensor, ...]:
        guard.watch(ctx)
        ctx.parameter = parameter
        return tuple(paddle.unbind(parameter.detach()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor | None:
        destination = destination_of(ctx.parameter)
        if destination is None:
            return paddle.stack(gradients)
        for number, gradient in enumerate(gradients):
            put(Destination(destination.tensor[number], destination.adds), gradient)
        return None


def accumulated_each(parameter: Tensor) -> Tensor | list[Tensor]:
    """As `accumulated`, the matrices of a parameter as a list, for operators that take lists."""
    if parameter.stop_gradient or not paddle.is_grad_enabled():
        return parameter
    return list(applied_once(_AccumulatedEach, parameter, where=_WHERE))
