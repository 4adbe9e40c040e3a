# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What a call launches, found out by the call itself on a device that launches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..hopper_product import LibraryKernel
from .device import ITEM_BYTES, Array, Device, address, blocks

__all__ = ["Outline", "StandIn"]

_ALIGNMENT = 256  # of new memory, as frameworks give it


class StandIn:
    """An array without memory."""

    def __init__(self, shape: Sequence[int], dtype: str, start: int) -> None:
        self.shape, self.dtype, self._start = tuple(shape), dtype, start

    def data_ptr(self) -> int:
        return self._start


class Outline:
    """A `launching.Device` for which launchers decide as for another one.

    Attributes:
        launches: what was launched, in order; the library's kernels are named so.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.grouped_product, self.grouped_outer = device.grouped_product, device.grouped_outer
        self.grouped_float8 = device.grouped_float8
        self.launches: list[str] = []
        self._end = _ALIGNMENT

    def empty(self, shape: Sequence[int], dtype: str) -> StandIn:
        start = self._end
        self._end += max(blocks(math.prod(shape) * ITEM_BYTES[dtype], _ALIGNMENT), 1) * _ALIGNMENT
        return StandIn(shape, dtype, start)

    def dtype_name(self, array: Any) -> str:
        return array.dtype if isinstance(array, StandIn) else self._device.dtype_name(array)

    def row_stride(self, array: Any) -> int:
        return array.shape[1] if isinstance(array, StandIn) else self._device.row_stride(array)

    def reshape(self, array: Any, shape: Sequence[int]) -> StandIn:
        return StandIn(shape, self.dtype_name(array), address(array))

    def read_int(self, array: Array, index: int) -> int:
        raise NotImplementedError("nothing is read")

    def launch(
        self, kernel: Any, programs: int, types: tuple[str, ...], arguments: Sequence[int], constants: tuple, warps: int
    ) -> None:
        is_ours = isinstance(kernel, LibraryKernel)
        self.launches.append(f"{kernel.__name__} of the library" if is_ours else kernel.fn.__name__)
