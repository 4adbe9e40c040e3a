# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Autograd nodes for kernels that have no gradients of their own: one PyLayer, whatever the operator.

What Paddle does for compiled operators is done here for the others. A gradient of the wrong shape raises, and so do a
tensor that was changed in place and a second backward pass where none is possible. Linear operators have gradients of
every order; the others refuse a second one.

One-shot guard: Paddle 3.3 lets backward() use a PyLayer once. Its context is freed by the first backward(), whatever
``retain_graph`` says, and the next one reads it: the process ends. A hook on the node's outputs runs before that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from .._graphs import dense, placed, unpacked, with_elements
from .._native import native
from .base import Kernels, Tensors

__all__ = [
    "Call",
    "Gradients",
    "OneShotGuard",
    "applied_once",
    "connect",
    "first_order_only",
    "linear",
    "wants_gradient",
]

Gradients = tuple[Tensor | None, ...]


class _Witness:
    """Lives as long as the context of a node, which is Paddle's own."""


class OneShotGuard:
    """Knows whether backward() has used a node of a PyLayer."""

    def __init__(self) -> None:
        self._witness: weakref.ref[_Witness] | None = None

    def watch(self, ctx: Any) -> None:
        """Watch the node's context; for its forward function."""
        ctx.witness = _Witness()
        self._witness = weakref.ref(ctx.witness)

    def is_spent(self) -> bool:
        """Whether the context is gone."""
        return self._witness is not None and self._witness() is None


def applied_once(
    layer: type[PyLayer], *arguments: Any, function: str = "", where: str = "", instead: str = ""
) -> tuple[Tensor, ...]:
    """The outputs of a PyLayer; a second backward() through them raises.

    Args:
        layer: what to apply. Its forward function takes a `OneShotGuard` as ``guard``, and lets it watch the context.
        *arguments: the others that it takes.
        function: the name that begins the error text, if there is one.
        where: under which circumstances the graph can be used once, for the text.
        instead: what to do instead, for its end.
    """
    guard, begin = OneShotGuard(), f"{function}: " if function else ""
    made = layer.apply(*arguments, guard=guard)
    outputs = made if isinstance(made, tuple) else (made,)

    def refuse_second_backward(_: Tensor | None) -> None:
        if guard.is_spent():
            raise RuntimeError(
                f"{begin}backward() has used this graph, and {where}nothing can use it again, "
                f"even with retain_graph=True{instead}"
            )

    for output in outputs:
        if not output.stop_gradient:
            output.register_hook(refuse_second_backward)
    return outputs


class Call:
    """One call of an operator: what it gave, and what its backward pass needs.

    Attributes:
        function: the name that begins an error text.
        kernels: what runs it, forward and backward; None for calls of no backend.
        wanted: for each differentiable input given, whether it wants a gradient. A tensor that was
            kept for the backward pass no longer tells.
        added: numbers of the inputs given whose gradient the call itself puts where it belongs.
        saved: large tensors for the backward pass. Paddle keeps them, so that `recompute` can make them anew.
        is_node: whether the call runs as a node of the graph.
    """

    function = ""
    added: frozenset[int] = frozenset()
    saved: tuple[Tensor, ...] = ()
    is_node = False

    def __init__(self, kernels: Kernels | None, *inputs: Tensor | None) -> None:
        """Begin a call.

        Args:
            kernels: what runs it, or None.
            inputs: the differentiable ones, None for those that are not given.
        """
        given = [tensor for tensor in inputs if tensor is not None]
        self.kernels: Any = kernels  # with the ``*_backward`` verbs
        self.wanted = tuple([not tensor.stop_gradient for tensor in given])
        self._inputs = [(tensor.shape, tensor.dtype) for tensor in given]
        self.place = with_elements(given).place
        self._outputs: list[tuple[Any, Any]] = []
        self._watched: list[Any] = []

    def watch(self, *tensors: Tensor) -> None:
        """Have the backward pass refuse to run once one of these tensors, which it reads, was changed in place."""
        self._watched.append(native.watch(*tensors))

    def save(self, *tensors: Tensor | None, unread: Tensors = ()) -> None:
        """Save tensors for the backward pass of a node, and watch those whose values it reads.

        Contiguous copies replace tensors that are not contiguous, because recomputation drops strides. No one else can
        change a copy.

        Args:
            *tensors: what to save; None is left out.
            unread: those of them whose values the backward pass does not read.
        """
        if not self.is_node:
            return
        given = [tensor for tensor in tensors if tensor is not None]
        self.saved = tuple([dense(each) for each in given])
        if not unread:
            self.watch(*self.saved)
            return
        pairs = zip(given, self.saved, strict=True)
        self.watch(*[saved for each, saved in pairs if not any(each is other for other in unread)])

    def run(self) -> Tensors:
        """The outputs that have a gradient. The others are attributes of the call."""
        raise NotImplementedError

    def differentiate(self, *gradients: Tensor) -> Gradients:
        """The gradients of the inputs that are given, from those of the outputs; None where there is none."""
        raise NotImplementedError

    def forward(self) -> Tensors:
        """Run, for `_Node`."""
        outputs = self.run()
        self._outputs = [(output.shape, output.dtype) for output in outputs]
        return outputs

    def backward(self, *gradients: Tensor) -> Gradients:
        """Check and differentiate, for `_Node`."""
        for gradient, (shape, dtype) in zip(gradients, self._outputs, strict=True):
            if gradient.shape != shape or gradient.dtype != dtype:
                expected, given = f"{dtype} {list(shape)}", f"{gradient.dtype} {list(gradient.shape)}"
                raise ValueError(f"{self.function}: the gradient of its result must be {expected}, but got {given}")
        if any(map(native.was_changed, self._watched)):
            raise RuntimeError(
                f"{self.function}: a tensor that the backward pass needs was changed in place after the forward"
            )
        made = self.differentiate(*gradients)
        # An input that wants a gradient must get one: Paddle's engine would not run what comes before it.
        results = [
            None
            if not want or number in self.added
            else (placed(paddle.zeros(shape, dtype), self.place) if gradient is None else gradient)
            for number, (want, gradient, (shape, dtype)) in enumerate(zip(self.wanted, made, self._inputs, strict=True))
        ]
        return tuple(results)


class _Node(PyLayer):
    """A call in the autograd graph. Its inputs are the differentiable ones, its outputs those with a gradient."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor, guard: OneShotGuard) -> Any:
        ctx.call = call
        guard.watch(ctx)
        call.is_node = True
        outputs = call.forward()
        ctx.save_for_backward(*call.saved)
        call.saved = ()
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.call.saved = tuple([unpacked(each, ctx.call.place) for each in ctx.saved_tensor() or ()])
        made = ctx.call.backward(*gradients)
        ctx.call.saved = ()
        return made if len(made) > 1 else made[0]


def wants_gradient(*inputs: Tensor | None) -> bool:
    """Whether a gradient of an input is wanted."""
    return paddle.is_grad_enabled() and bool(native.carries_graph(*inputs))


def connect(call: Call, *inputs: Tensor | None) -> Tensors:
    """Run a call as a node of the graph, or without one where no input wants a gradient.

    Args:
        call: what to run.
        inputs: its differentiable inputs, None for those that are not given.

    Returns:
        its outputs that have a gradient.
    """
    given = [tensor for tensor in inputs if tensor is not None]
    if not wants_gradient(*given):
        with paddle.no_grad():
            return call.run()
    backend = None if call.kernels is None else call.kernels.name
    texts = {}
    if backend not in (None, "paddle"):
        texts = {"where": f"on the backend {backend!r} ", "instead": "; on the backend 'compiled' it can"}
    return applied_once(_Node, call, *given, function=call.function, **texts)


class _Linear(Call):
    """A linear map. The gradient goes back through its transpose, which is linear too."""

    def __init__(
        self,
        function: str,
        kernels: Kernels | None,
        value: Tensor,
        there: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
        read: tuple[Tensor, ...],
    ) -> None:
        super().__init__(kernels, value)
        self.function, self.there, self.back, self.read = function, there, back, read
        self.watch(*read)
        self.value: Tensor | None = value

    def run(self) -> Tensors:
        value, self.value = self.value, None  # the gradient does not need it
        return (self.there(value),)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        return (linear(self.function, self.kernels, gradients[0], self.back, self.there, *self.read),)


def linear(
    function: str,
    kernels: Kernels | None,
    value: Tensor,
    there: Callable[[Any], Tensor],
    back: Callable[[Any], Tensor],
    *read: Tensor,
) -> Tensor:
    """``there(value)`` of a linear map, with gradients of every order.

    Args:
        function: the name that begins an error text.
        kernels: what runs both maps, or None.
        value: what to map.
        there: the map.
        back: the transposed map.
        read: the tensors that the two read. Once one was changed in place, the backward pass refuses to run.
    """
    if not wants_gradient(value):
        return there(value)
    return connect(_Linear(function, kernels, value, there, back, read), value)[0]


class _FirstOrderOnly(Call):
    """Gradients that cannot be differentiated again, as outputs of a node that says so."""

    def __init__(self, call: Call, gradients: Tensors, *inputs: Tensor | None) -> None:
        super().__init__(call.kernels, *inputs)
        self.function, self.gradients = call.function, gradients

    def run(self) -> Tensors:
        return self.gradients

    def differentiate(self, *gradients: Tensor) -> Gradients:
        raise RuntimeError(f"{self.function}: second-order gradients are not supported here, only first-order ones")


def first_order_only(call: Call, made: Gradients, *inputs: Tensor | None) -> Gradients:
    """Gradients of an operator that is not linear: they depend on the inputs, but to differentiate them raises.

    Args:
        call: the operator's.
        made: its gradients, new tensors, None where there is none.
        inputs: tensors that they were made of.
    """
    given = [gradient for gradient in made if gradient is not None]
    if not given or not wants_gradient(*inputs):
        return made
    connected = iter(connect(_FirstOrderOnly(call, tuple(given), *inputs), *inputs))
    return tuple(None if gradient is None else next(connected) for gradient in made)
