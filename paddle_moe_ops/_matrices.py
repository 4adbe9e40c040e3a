# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The matrices of experts: one stacked tensor, or a list of them if each expert is a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import Tensor, nn

from . import _checks
from ._graphs import to_dtype
from .backends import Backend, Matrices, accumulated, stack_or_view

__all__ = ["Matrices", "each_of", "in_dtype", "listed", "matrices", "named", "stacked"]


def listed(given: Any) -> Any:
    """The parameters of a `paddle.nn.ParameterList` as a list; any other value unchanged."""
    return list(given) if isinstance(given, nn.ParameterList) else given


def matrices(
    function: str, argument: str, given: Any, dtypes: Sequence[Any], shape: Sequence[int | str], why: str = ""
) -> Matrices:
    """Check the matrices, or the biases, of experts.

    Args:
        function: name that begins the message.
        argument: name of the argument.
        given: the caller's value.
        dtypes: allowed Paddle dtypes; of a list, all matrices have that of the first.
        shape: of the stacked matrices, [E, ...]; matrices of a list have it without E. A dimension that is a name must
            be equal in all of them.
        why: text of the message after the shape.

    Returns:
        the tensor, or the list.
    """
    if isinstance(given, nn.Layer):
        text = "a paddle.Tensor, or a list or a paddle.nn.ParameterList of them"
        _checks.bad_type(function, argument, text, type(given).__name__)
    if not isinstance(given, Sequence) or isinstance(given, str):
        return _checks.tensor(function, argument, given, dtypes, shape, why=why)
    experts, *expected = shape
    if not given or (isinstance(experts, int) and 0 <= experts != len(given)):
        several = "vectors" if len(expected) == 1 else "matrices"
        wanted = f"{experts} {several}" if isinstance(experts, int) else "one matrix for each expert"
        _checks.bad_value(function, argument, f"a list of {wanted}", f"{len(given)} of them")
    for index, each in enumerate(given):
        _checks.tensor(function, f"{argument}[{index}]", each, dtypes, expected, why=why)
        if index == 0:
            dtypes, expected, why = (each.dtype,), each.shape, ""
    return given


def named(argument: str, given: Matrices) -> dict[str, Tensor]:
    """Each tensor by its name in messages."""
    if isinstance(given, Sequence):
        return {f"{argument}[{index}]": each for index, each in enumerate(given)}
    return {argument: given}


def each_of(change: Callable[[Tensor], Tensor], given: Matrices) -> Matrices:
    """The tensor, or each tensor of the list, changed by the function."""
    return [change(each) for each in given] if isinstance(given, Sequence) else change(given)


def stacked(given: Matrices) -> Tensor:
    """One tensor; a list is copied. The gradient goes to each matrix."""
    return paddle.stack(list(given)) if isinstance(given, Sequence) else given


def in_dtype(function: str, given: Matrices, dtype: Any, backend: Backend, *, accumulates: bool = False) -> Matrices:
    """The matrices in the form that a backend needs under mixed precision, by one cast if it needs one tensor.

    Args:
        function: the name that begins an error text.
        given: one tensor, or a list.
        dtype: of mixed precision.
        backend: the backend that runs on them.
        accumulates: whether `backends.accumulation` stores their gradients, which only parameters support.
    """
    if isinstance(given, Sequence) and not backend.takes_lists:
        return to_dtype(stack_or_view(given, function, accumulates=accumulates), dtype)
    if accumulates:
        given = each_of(accumulated, given)
    return each_of(lambda each: to_dtype(each, dtype), given)
