# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: adds gradients to a parameter's ``main_grad`` or ``grad``, without Paddle's own sum."""

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
    """The tensor that accumulates a gradient.

    Attributes:
        tensor: float32 or the dtype of the parameter.
        adds: whether it already contains a gradient to add to.
    """

    tensor: Tensor
    adds: bool


def why_not(parameter: Tensor) -> tuple[str, str] | None:
    """Expected and actual parameter, as texts, if its gradients cannot be accumulated; otherwise None."""
    if is_graph_value(parameter):
        return "a tensor, outside static graphs, with accumulate", "a value of a static graph"
    if not parameter.stop_gradient and not parameter.is_leaf:
        return "a leaf, such as a parameter, with accumulate", "the result of another operator"
    return _why_not("main_grad", parameter, getattr(parameter, "main_grad", None))


def _why_not(name: str, parameter: Tensor, held: Tensor | None) -> tuple[str, str] | None:
    """As `why_not`, for the attribute ``name`` whose tensor ``held`` accumulates the gradients."""
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
    """The destination of a parameter's gradient, allocated if necessary. None: return the gradient to Paddle.

    Raises:
        ValueError: the present tensor does not fit; it may have been replaced since the forward pass.
    """
    name = "main_grad" if hasattr(parameter, "main_grad") else "grad"
    held = getattr(parameter, name)
    refuse_others(name, parameter, held)
    if held is not None:
        return Destination(held, True)
    if name == "grad":
        return None
    parameter.main_grad = filled(parameter.shape, 0, "float32", like=parameter)
    return Destination(parameter.main_grad, False)


def refuse_others(name: str, parameter: Tensor, held: Tensor | None) -> None:
    """Raise a ValueError if gradients of a parameter cannot be added to ``held``, its attribute ``name``."""
    problem = _why_not(name, parameter, held)
    if problem is not None:
        raise ValueError(f"accumulate: expected {problem[0]}, but got {problem[1]}")


def put(destination: Destination, gradient: Tensor) -> None:
    """Add a gradient to its destination, in float32 and rounded once.

    If the destination does not add, it is new, float32 and zero. It may be a view of another tensor: `add_` and `copy_`
    write through the view, while `paddle.assign` reallocates it on some devices.
    """
    into = destination.tensor
    with paddle.no_grad():
        wide = to_dtype(gradient, paddle.float32)
        if into.dtype == paddle.float32:
            into.add_(wide)
        else:
            into.copy_(to_dtype(wide + to_dtype(into, paddle.float32), into.dtype), False)


class _Accumulated(PyLayer):
    """A node that returns a copy of a parameter and accumulates its gradient; Paddle rejects aliases of a leaf."""

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
    """Return a parameter whose gradient is accumulated, for operators without support for accumulation."""
    if parameter.stop_gradient or not paddle.is_grad_enabled():
        return parameter
    return applied_once(_Accumulated, parameter, where=_WHERE)[0]


class _AccumulatedEach(PyLayer):
    """A node that returns the matrices of a parameter as views and accumulates the gradient of each separately.

    This avoids a copy of the parameter and a gradient of its size.
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
    """As `accumulated`, with the matrices of a parameter as a list, for operators that accept lists."""
    if parameter.stop_gradient or not paddle.is_grad_enabled():
        return parameter
    return list(applied_once(_AccumulatedEach, parameter, where=_WHERE))
