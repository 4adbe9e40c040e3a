# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A count of the events that change parameters, for caches of values that are computed from them.

Paddle's version counter of a tensor counts most operators that work in place, but neither steps of optimizers nor
loads. So the first `count_changes` wraps these functions of Paddle, for all optimizers and tensors of the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
from paddle.optimizer import Optimizer

__all__ = ["changes_of", "count_changes"]

# LBFGS changes parameters by operators in place, all other optimizers by the first of these.
# The last two are behind initializers that are called with a parameter, and behind paddle.assign of an array.
_WRITERS: tuple[tuple[Any, str], ...] = (
    (Optimizer, "_apply_optimize"),
    (paddle.Tensor, "set_value"),
    (paddle.Tensor, "copy_"),
    (paddle.Tensor, "exponential_"),
    (paddle._C_ops, "full_"),
    (paddle._C_ops, "assign_value_"),
)
_count = 0
_counts = False


def count_changes() -> None:
    """Count from now on."""
    global _counts
    if not _counts:
        _counts = True
        for owner, name in _WRITERS:
            setattr(owner, name, _counting(getattr(owner, name)))


def changes_of(*tensors: paddle.Tensor) -> tuple[int, ...]:
    """Numbers that differ from earlier ones if one of the tensors may have changed in between."""
    return (_count, *(each.inplace_version for each in tensors))


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        global _count
        try:
            return function(*arguments, **keywords)
        finally:
            _count += 1

    del call.__wrapped__  # paddle.jit looks for the source of what it wraps, which a method of C++ lacks
    return call
