# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Autograd nodes for kernels without gradients of their own: one PyLayer for all operators.

The nodes repeat the checks that Paddle runs for compiled operators. These raise an error:

- a gradient of the wrong shape or dtype,
- a saved tensor that was changed in place,
- a second backward pass through a graph that supports one.

Linear operators have gradients of every order; the others raise on a second one.

One-shot guard: in Paddle 3.3 the first backward() frees a PyLayer's context, whatever ``retain_graph`` says. A second
one reads freed memory and crashes the process. A hook on the node's outputs raises before that.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
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
    "as_node",
    "connect",
    "first_order_only",
    "inputs_of_partial_gradient",
    "linear",
    "wants_gradient",
]

Gradients = tuple[Tensor | None, ...]

_PARTIAL = "paddle.base.dygraph.base", "grad"
_WHOLE = ("paddle.autograd.backward_mode", "backward"), ("paddle.base.dygraph.tensor_patch_methods", "backward")


class _Witness:
    """An object that lives as long as the context of a node, which Paddle owns."""


class OneShotGuard:
    """A flag that detects whether backward() has used a PyLayer's node."""

    _witness: weakref.ref[_Witness] | None = None

    def watch(self, ctx: Any) -> None:
        """Watch the node's context; called by its forward function."""
        ctx.witness = _Witness()
        self._witness = weakref.ref(ctx.witness)

    def is_spent(self) -> bool:
        """True if the context has been freed."""
        return self._witness is not None and self._witness() is None


def applied_once(
    layer: type[PyLayer], *arguments: Any, function: str = "", where: str = "", instead: str = ""
) -> tuple[Tensor, ...]:
    """Return the outputs of a PyLayer; a second backward() through them raises.

    Args:
        layer: the PyLayer. Its forward function accepts a `OneShotGuard` as ``guard`` and calls its `watch`.
        *arguments: its other arguments.
        function: the name that begins the error text, if any.
        where: the condition under which the graph can be used only once, for the error text.
        instead: the alternative, for the end of the error text.
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
    """A call of an operator: its inputs, and the state for its backward pass.

    Attributes:
        function: the name that begins an error text.
        kernels: the kernels of both passes; None for calls of no backend.
        wanted: whether each given differentiable input requires a gradient. Tensors saved for the backward pass lose
            this flag.
        added: indices of the given inputs whose gradients the call accumulates itself.
        saved: large tensors for the backward pass. Paddle stores them, so that `recompute` can recompute them.
        is_node: whether the call runs as a node of the graph.
        outputs: shape and dtype of each differentiable output of a node.
    """

    function = ""
    added: frozenset[int] = frozenset()
    saved: tuple[Tensor, ...] = ()
    is_node = False

    def __init__(self, kernels: Kernels | None, *inputs: Tensor | None) -> None:
        """Record the kernels and the differentiable inputs.

        Args:
            kernels: the kernels of both passes, or None.
            inputs: the differentiable inputs, None for absent ones.
        """
        self.kernels: Any = kernels  # with the ``*_backward`` verbs
        self.outputs: list[tuple[Any, Any]] = []
        self._watched: list[Any] = []
        self.set_inputs(*inputs)

    def set_inputs(self, *inputs: Tensor | None) -> None:
        """Record the differentiable inputs."""
        given, wanted = [], []
        self._inputs: list[tuple[Any, Any]] = []
        for tensor in inputs:
            if tensor is not None:
                given.append(tensor)
                wanted.append(not tensor.stop_gradient)
                self._inputs.append((tensor.shape, tensor.dtype))
        self.wanted, self.place = tuple(wanted), with_elements(given).place

    def watch(self, *tensors: Tensor) -> None:
        """Let the backward pass raise if one of these tensors, which it reads, was changed in place."""
        self._watched.append(native.watch(*tensors))

    def save(self, *tensors: Tensor | None, unread: Tensors = ()) -> None:
        """Save tensors for the backward pass of a node, and watch those whose values it reads.

        Contiguous copies replace tensors that are not contiguous, because recomputation drops strides. The copies are
        private, so nothing else can change them.

        Args:
            *tensors: the tensors to save; None is skipped.
            unread: the saved tensors whose values the backward pass does not read.
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
        """Return the differentiable outputs. The others are attributes of the call."""
        raise NotImplementedError

    def differentiate(self, *gradients: Tensor) -> Gradients:
        """Return the gradients of the given inputs from those of the outputs; None for an input without one."""
        raise NotImplementedError

    def backward(self, *gradients: Tensor) -> Gradients:
        """Check and differentiate, for `_Node`."""
        for gradient, (shape, dtype) in zip(gradients, self.outputs, strict=True):
            if gradient.shape != shape or gradient.dtype != dtype:
                expected, given = f"{dtype} {list(shape)}", f"{gradient.dtype} {list(gradient.shape)}"
                raise ValueError(f"{self.function}: the gradient of its result must be {expected}, but got {given}")
        if any(map(native.was_changed, self._watched)):
            raise RuntimeError(
                f"{self.function}: a tensor that the backward pass needs was changed in place after the forward"
            )
        made = self.differentiate(*gradients)
        # Every input that requires a gradient needs one: otherwise Paddle's engine skips the nodes before it.
        results: list[Tensor | None] = []
        for want, gradient, (shape, dtype) in zip(self.wanted, made, self._inputs, strict=True):
            if not want or len(results) in self.added:
                results.append(None)
            elif gradient is None:
                results.append(placed(paddle.zeros(shape, dtype), self.place))
            else:
                results.append(gradient)
        return tuple(results)


class _Node(PyLayer):
    """The autograd node of a `Call`; it has only the differentiable inputs and outputs."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor, guard: OneShotGuard) -> Any:
        ctx.call = call
        guard.watch(ctx)
        call.is_node = True
        outputs = call.run()
        for output in outputs:
            call.outputs.append((output.shape, output.dtype))
        ctx.save_for_backward(*call.saved)
        call.saved = ()
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call, saved = ctx.call, ctx.saved_tensor()
        if saved:
            call.saved = tuple([unpacked(each, call.place) for each in saved])
        made = call.backward(*gradients)
        return made if len(made) > 1 else made[0]


def wants_gradient(*inputs: Tensor | None) -> bool:
    """True if gradients are enabled and an input requires one."""
    return paddle.is_grad_enabled() and bool(native.carries_graph(*inputs))


def connect(call: Call, *inputs: Tensor | None) -> Tensors:
    """Run a call as a node of the graph, or without a node if no input requires a gradient.

    Args:
        call: the call.
        inputs: its differentiable inputs, None for absent ones.

    Returns:
        its differentiable outputs.
    """
    if not wants_gradient(*inputs):
        with paddle.no_grad():
            return call.run()
    return as_node(call, [tensor for tensor in inputs if tensor is not None])


def as_node(call: Call, given: list[Tensor]) -> Tensors:
    """Run a call as a node of the graph."""
    backend = None if call.kernels is None else call.kernels.name
    texts = {}
    if backend in ("triton", "reference"):
        texts = {"where": f"on the backend {backend!r} ", "instead": "; on the backend 'compiled' it can"}
    return applied_once(_Node, call, *given, function=call.function, **texts)


class _Linear(Call):
    """A call of a linear map. Its gradient is the transposed map, which is linear too."""

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
        if read:
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
    """Return ``there(value)`` of a linear map, with gradients of every order.

    Args:
        function: the name that begins an error text.
        kernels: the kernels of both maps, or None.
        value: the input.
        there: the map.
        back: the transposed map.
        read: the tensors that both maps read. If one was changed in place, the backward pass raises.
    """
    if not wants_gradient(value):
        return there(value)
    return as_node(_Linear(function, kernels, value, there, back, read), [value])[0]


class _FirstOrderOnly(Call):
    """A node whose outputs are gradients; its backward pass raises, because it has no second-order gradients."""

    def __init__(self, call: Call, gradients: Tensors, *inputs: Tensor | None) -> None:
        super().__init__(call.kernels, *inputs)
        self.function, self.gradients = call.function, gradients

    def run(self) -> Tensors:
        return self.gradients

    def differentiate(self, *gradients: Tensor) -> Gradients:
        raise RuntimeError(f"{self.function}: second-order gradients are not supported here, only first-order ones")


def first_order_only(call: Call, made: Gradients, *inputs: Tensor | None) -> Gradients:
    """Return the gradients of a nonlinear operator, connected to the inputs; differentiating them raises.

    Args:
        call: the call of the operator.
        made: its gradients, new tensors, None for inputs without one.
        inputs: the tensors from which the gradients were computed.
    """
    given = [gradient for gradient in made if gradient is not None]
    if not given or not wants_gradient(*inputs):
        return made
    connected = iter(connect(_FirstOrderOnly(call, tuple(given), *inputs), *inputs))
    return tuple(None if gradient is None else next(connected) for gradient in made)


def inputs_of_partial_gradient() -> Sequence[Tensor] | None:
    """The tensors whose gradients `paddle.grad` computes, or None in a whole backward pass."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place in _WHOLE:
            return None
        if place == _PARTIAL:
            return frame.f_locals["inputs"]
        frame = frame.f_back
    return None
