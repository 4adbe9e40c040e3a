# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Stacked parameters: E tensors of one shape as one tensor [E, ...], a view if they are adjacent, otherwise a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from .._graphs import dense, filled
from .accumulation import Destination, destination_of, put, refuse_others
from .autograd import OneShotGuard, applied_once

__all__ = [
    "alias_of",
    "destination_of_matrices",
    "lay_side_by_side",
    "parts_of",
    "shared_memory",
    "stack_or_view",
    "view_of",
]

_ROUNDING = 4096  # allocators round a request up by at most this number of bytes


def alias_of(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor. If the tensor is contiguous, the alias keeps its memory when the tensor moves."""
    if not tensor.is_contiguous():
        return tensor.detach()
    alias = paddle.base.core.eager.Tensor()
    tensor._share_buffer_to(alias)
    return alias


def view_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor in the memory of all, without a gradient; None unless they are adjacent and in order.

    Args:
        tensors: of one shape and dtype.
    """
    first = tensors[0]
    start, size = first.data_ptr(), first.size * first.element_size()
    if [each.data_ptr() for each in tensors] != list(range(start, start + len(tensors) * size, size)):
        return None
    if not all(each.is_contiguous() for each in tensors):
        return None
    if first._holder_size() - first._offset() < len(tensors) * size:  # neighbours in allocations of their own
        return None
    view = alias_of(first)
    view.get_tensor()._set_dims([len(tensors), *first.shape])
    return view


def parts_of(whole: Tensor) -> list[Tensor]:
    """Return views whole[0], whole[1], ... on every device, without gradients."""
    whole = dense(whole.detach())
    parts = paddle.unbind(whole)
    last = (len(parts) - 1) * parts[0].size * whole.element_size()
    if parts[0].data_ptr() == whole.data_ptr() and parts[-1].data_ptr() == whole.data_ptr() + last:
        return parts
    # On some devices unbind copies. The slices below are views, but take longer on the host.
    parts = [whole._slice(number, number + 1) for number in range(whole.shape[0])]
    for part in parts:
        part.get_tensor()._set_dims(whole.shape[1:])
    return parts


def shared_memory(tensor: Tensor) -> str | None:
    """Describe the allocation that contains a tensor if it is shared and not by `lay_side_by_side`; otherwise None."""
    if _location(tensor) == getattr(tensor, "laid_at", None):
        return None
    own = tensor.size * tensor.element_size()
    if tensor._offset() == 0 and tensor._holder_size() - own <= _ROUNDING:
        return None
    return f"a part of {tensor._holder_size()} bytes"


def lay_side_by_side(parameters: Sequence[Tensor]) -> None:
    """Move the values of parameters to one allocation, in the order of the list.

    Args:
        parameters: different ones of one shape, dtype and place, none of which has `shared_memory`.
    """
    if view_of(parameters) is not None:
        return
    whole = paddle.stack([each.detach() for each in parameters])
    for parameter, part in zip(parameters, parts_of(whole), strict=True):
        part._share_buffer_to(parameter)
        parameter.laid_at = _location(parameter)


def _location(tensor: Tensor) -> tuple[int, ...]:
    """The address and allocation of a tensor: a buffer of fused parameters may reuse the address of a freed one."""
    return tensor.data_ptr(), tensor._offset(), tensor._holder_size()


def stack_or_view(matrices: Sequence[Tensor], function: str, *, accumulates: bool = False) -> Tensor:
    """Return the matrices as one stacked tensor; their gradients are views of its gradient.

    The graph can be used once: a second backward pass raises.

    Args:
        matrices: of one shape and dtype.
        function: the name that begins an error text.
        accumulates: whether the gradients go to an `accumulation.Destination`, and not to Paddle.
    """
    if not paddle.is_grad_enabled() or all(each.stop_gradient for each in matrices):
        return _view_or_copy(matrices)[0]
    return applied_once(_Stacked, function, accumulates, *matrices, function=function, where="with lists of matrices ")[
        0
    ]


def _view_or_copy(matrices: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Return the matrices as one tensor, and True if it is a view."""
    view = view_of(matrices)
    if view is not None:
        return view, True
    with paddle.no_grad():
        return paddle.stack(list(matrices)), False


class _Stacked(PyLayer):
    @staticmethod
    def forward(ctx: Any, function: str, accumulates: bool, *matrices: Tensor, guard: OneShotGuard) -> Tensor:
        guard.watch(ctx)
        ctx.set_materialize_grads(False)  # the gradient is None if it went to `destination_of_matrices`
        ctx.function, ctx.accumulates, ctx.matrices = function, accumulates, matrices
        ctx.wanted = [not each.stop_gradient for each in matrices]
        out, is_view = _view_or_copy(matrices)
        ctx.versions = [each.inplace_version for each in matrices] if is_view else None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.versions is not None and ctx.versions != [each.inplace_version for each in ctx.matrices]:
            raise RuntimeError(
                f"{ctx.function}: a tensor that the backward pass needs was changed in place after the forward"
            )
        if gradient is None:
            return (None,) * len(ctx.wanted)
        parts = paddle.unbind(gradient) if paddle.is_grad_enabled() else parts_of(gradient)
        made = [part if want else None for part, want in zip(parts, ctx.wanted, strict=True)]
        if ctx.accumulates:
            made = [_accumulated(*each) for each in zip(made, ctx.matrices, strict=True)]
        return tuple(made)


def _accumulated(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Add a gradient to its destination and return None; without a destination, return it for Paddle."""
    destination = None if gradient is None else destination_of(parameter)
    if destination is None:
        return gradient
    put(destination, gradient)
    return None


def destination_of_matrices(given: Tensor | Sequence[Tensor]) -> Destination | None:
    """As `destination_of`, for a parameter or a list of parameters whose gradients are, or are allocated, adjacent.

    None for a list whose gradients are not one tensor, or that contains a parameter twice: then `stack_or_view`
    accumulates each.
    """
    if isinstance(given, Tensor):
        return destination_of(given)
    if any(each.stop_gradient for each in given) or len(set(map(id, given))) < len(given):
        return None
    owners = [hasattr(each, "main_grad") for each in given]
    held = [each.main_grad if owns else each.grad for each, owns in zip(given, owners, strict=True)]
    if all(owners) and all(each is None for each in held):
        whole = filled([len(given), *given[0].shape], 0, "float32", like=given[0])
        for parameter, part in zip(given, parts_of(whole), strict=True):
            parameter.main_grad = part
        return Destination(whole, False)
    if len(set(owners)) > 1 or any(each is None for each in held) or len({each.dtype for each in held}) > 1:
        return None
    view = view_of(held)
    if view is None:
        return None
    refuse_others("main_grad" if owners[0] else "grad", given[0], held[0])
    return Destination(view, True)
