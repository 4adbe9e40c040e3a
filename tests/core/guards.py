# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays that show what a call wrote: poisoned outputs between guard bands, and arrays at odd addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

GUARD = 0xA5
# For float types eight set bits per byte are a NaN; for int32 they would be -1, which maps hold.
FLOAT_POISON = 0xFF
INT_POISON = 0xA5


class MakeOutput(Protocol):
    def __call__(self, shape: tuple[int, ...] | int, dtype: DTypeLike, offset: int = 0) -> NDArray: ...


@contextmanager
def guarded_outputs() -> Iterator[MakeOutput]:
    """Gives a function that makes poisoned arrays; on leaving, the bytes around each must be untouched.

    The bands are at least one row wide, so that the nearest wrong rows fall into them.
    """
    made: list[tuple[NDArray, int, int]] = []

    def make(shape: tuple[int, ...] | int, dtype: DTypeLike, offset: int = 0) -> NDArray:
        shape = (shape,) if isinstance(shape, int) else shape
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        band = 64 * (4 + (shape[-1] if shape else 1) * dtype.itemsize // 64)
        buffer = np.full(band + offset + size + band, GUARD, np.uint8)
        start = band + offset
        payload = buffer[start : start + size]
        payload[:] = poison_byte(dtype)
        made.append((buffer, start, size))
        return payload.view(dtype).reshape(shape)

    yield make
    for buffer, start, size in made:
        assert (buffer[:start] == GUARD).all(), "something was written in front of an output"
        assert (buffer[start + size :] == GUARD).all(), "something was written behind an output"


def poison_byte(dtype: DTypeLike) -> int:
    return INT_POISON if np.issubdtype(np.dtype(dtype), np.integer) else FLOAT_POISON


def is_poison(array: NDArray) -> bool:
    """Return whether every byte of an output is still poison."""
    data = np.ascontiguousarray(array)
    return bool((data.reshape(-1).view(np.uint8) == poison_byte(array.dtype)).all())


def at_odd_address(array: NDArray) -> NDArray:
    """A copy whose data begins one byte behind a 16-byte boundary."""
    buffer = np.empty(array.nbytes + 17, np.uint8)
    start = 1 + (-buffer.ctypes.data) % 16
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def with_row_gaps(array: NDArray, gap: int) -> NDArray:
    """A copy of a matrix in a wider one: `gap` poisoned elements lie between one row and the next."""
    wide = np.empty((array.shape[0], array.shape[1] + gap), array.dtype)
    wide.view(np.uint8)[...] = poison_byte(array.dtype)
    wide[:, : array.shape[1]] = array
    return wide[:, : array.shape[1]]
