# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of tiles that grouped products read, as they lie in one array."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from .launching import ITEM_BYTES, Array

__all__ = ["Schedule", "Table"]


class Table(NamedTuple):
    """One of the tables of int32 that lie in an array, one after the other."""

    array: Array
    offset: int
    shape: tuple[int, ...]

    def data_ptr(self) -> int:
        return self.array.data_ptr() + ITEM_BYTES["int32"] * self.offset


class Schedule(NamedTuple):
    """The tables of `grouped_gemm_kernels.schedule_kernel`, for tiles of so many rows."""

    first: Array
    stop: Array
    tiles: Array
    spare: Array
    windows: Array
    counters: Array

    @property
    def num_windows(self) -> int:
        return self.windows.shape[0] - 3

    @staticmethod
    def lengths(num_experts: int, num_windows: int) -> tuple[int, ...]:
        """Of the tables."""
        return num_experts + 1, num_experts, num_experts + 1, num_experts + 2, num_windows + 3, 2

    @staticmethod
    def within(array: Array, num_experts: int, num_windows: int, number: int = 0) -> Schedule:
        """One of the schedules whose tables are in an int32 array."""
        lengths = Schedule.lengths(num_experts, num_windows)
        offsets = itertools.accumulate(lengths, initial=number * sum(lengths))
        return Schedule(*(Table(array, offset, (length,)) for offset, length in zip(offsets, lengths, strict=False)))
