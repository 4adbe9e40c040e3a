# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A count of the events that change parameters, for caches of values that are computed from them.

Paddle's version counter of a tensor counts most operators that work in place, but neither steps of optimizers, loads
nor collectives. So the first `count_changes` wraps these functions of Paddle, for all optimizers and tensors of the
process. `samples_of` tensors show what other writers have changed.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import paddle
from paddle import Tensor
from paddle.base import core
from paddle.optimizer import Optimizer

__all__ = ["Watched", "changes_of", "count_changes", "samples_of"]

# Functions that write some of their arguments; they count if these share `Watched` memory. The operators are behind
# initializers that are called with a parameter, and behind paddle.assign of an array. LBFGS changes parameters by
# operators in place, all other optimizers by `Optimizer._apply_optimize`, which always counts.
_WRITERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (paddle.Tensor, ("set_value", "set_tensor", "copy_", "exponential_")),
    (paddle._C_ops, ("full_", "assign_value_")),
    # returned by Tensor.get_tensor()
    (core.DenseTensor, ("set", "_copy_from", "_set_float_element", "_set_double_element")),
)
# Beginnings of the names of a group's methods that write.
_COLLECTIVES = ("all_", "allreduce", "alltoall", "broadcast", "gather", "recv", "reduce", "scatter")
_NUM_SAMPLES = 1024
_numbers = itertools.count(1)  # threads that count at once get different ones
_count = 0
_counts = False


class Watched:
    """The memory of tensors that others may write."""

    _all: ClassVar[weakref.WeakSet[Watched]] = weakref.WeakSet()
    _merged: ClassVar[list[tuple[int, int]] | None] = None  # ranges of all, sorted and disjoint
    _lock = threading.RLock()  # of both

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        with Watched._lock:
            Watched._all.add(self)

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Watch these tensors in place of earlier ones."""
        ranges = [_range_of(each) for each in tensors]
        if ranges != self._ranges:
            with Watched._lock:
                self._ranges, Watched._merged = ranges, None

    @classmethod
    def overlaps(cls, tensor: Tensor | core.DenseTensor) -> bool:
        """True if a tensor shares memory with one that is watched, or was lately."""
        start, end = _range_of(tensor)
        with cls._lock:
            if cls._merged is None:
                cls._merged = _merged(sorted({each for watched in cls._all for each in watched._ranges}))
            place = bisect.bisect_left(cls._merged, (end, 0))
            return place > 0 and cls._merged[place - 1][1] > start


def count_changes() -> None:
    """Count from now on."""
    global _counts
    if not _counts:
        _counts = True
        collectives = tuple(name for name in dir(core.ProcessGroup) if name.startswith(_COLLECTIVES))
        for owner, names in (*_WRITERS, (core.ProcessGroup, collectives)):
            for name in names:
                setattr(owner, name, _counting(getattr(owner, name), _reaches_watched))
        Optimizer._apply_optimize = _counting(Optimizer._apply_optimize)


def changes_of(*tensors: Tensor) -> tuple[int, ...]:
    """Numbers that differ from earlier ones if one of the tensors may have changed in between."""
    return (_count, *(each.inplace_version for each in tensors))


def _counting(function: Callable[..., Any], counts: Callable[[Iterable[Any]], bool] | None = None) -> Callable:
    """A function that counts its calls, or those with arguments for which ``counts`` returns True."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        global _count
        try:
            return function(*arguments, **keywords)
        finally:
            if counts is None or counts((*arguments, *keywords.values())):
                _count = next(_numbers)

    del call.__wrapped__  # paddle.jit looks for the source of what it wraps, which a method of C++ lacks
    return call


def _reaches_watched(arguments: Iterable[Any]) -> bool:
    for each in arguments:
        if isinstance(each, (Tensor, core.DenseTensor)):
            if Watched.overlaps(each):
                return True
        elif isinstance(each, (list, tuple)) and _reaches_watched(each):
            return True
    return False


def _range_of(tensor: Tensor | core.DenseTensor) -> tuple[int, int]:
    """The first and the end address of a contiguous tensor; of a `DenseTensor`, an address after the first."""
    if isinstance(tensor, core.DenseTensor):
        start = tensor._ptr() if tensor._is_initialized() else 0
        return start, start + 1
    if tensor.size == 0 or not tensor._is_initialized():
        return 0, 0
    start = tensor.data_ptr()
    return start, start + tensor.size * tensor.element_size()


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def samples_of(tensors: Iterable[Tensor]) -> list[bytes]:
    """Up to 1024 elements of each of some tensors. It synchronises with the host."""
    return [_sample(each) for each in tensors]


def _sample(tensor: Tensor) -> bytes:
    count = min(tensor.size, _NUM_SAMPLES)
    if count == 0:
        return b""
    values: bytes = paddle.as_strided(tensor, [count], [tensor.size // count]).numpy().tobytes()
    return values
