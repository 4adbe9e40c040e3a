# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dry run: lists the kernels that a call would launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .device import ITEM_BYTES, Array, Device, address, cdiv

__all__ = ["DryRun", "FakeArray"]

_ALIGNMENT = 256  # alignment of new memory in frameworks


class FakeArray:
    """An array without memory."""

    def __init__(self, shape: Sequence[int], dtype: str, start: int) -> None:
        self.shape, self.dtype, self._start = tuple(shape), dtype, start

    def data_ptr(self) -> int:
        return self._start


class DryRun:
    """A `device.Device` that launches nothing and leads launchers to the decisions that they make for another device.

    Attributes:
        launches: names of the kernels, in order.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.launches: list[str] = []
        self._end = _ALIGNMENT

    def empty(self, shape: Sequence[int], dtype: str) -> FakeArray:
        start = self._end
        self._end += max(cdiv(math.prod(shape) * ITEM_BYTES[dtype], _ALIGNMENT), 1) * _ALIGNMENT
        return FakeArray(shape, dtype, start)

    def dtype_name(self, array: Any) -> str:
        return array.dtype if isinstance(array, FakeArray) else self._device.dtype_name(array)

    def row_stride(self, array: Any) -> int:
        return array.shape[1] if isinstance(array, FakeArray) else self._device.row_stride(array)

    def reshape(self, array: Any, shape: Sequence[int]) -> FakeArray:
        return FakeArray(shape, self.dtype_name(array), address(array))

    def read_int(self, array: Array, index: int) -> int:
        raise NotImplementedError("nothing is read")

    def launch(
        self, kernel: Any, programs: int, types: tuple[str, ...], arguments: Sequence[int], constants: tuple, warps: int
    ) -> None:
        self.launches.append(kernel.fn.__name__)
