# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of tiles that grouped products read, as they lie in one array."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from ..launch.device import ITEM_BYTES, Array

__all__ = ["FEW_ROWS", "Gpu", "Gradients", "Groups", "Kept", "Layer", "Rows", "Schedule", "Table", "Target", "Tokens"]

# Rows per expert, on average, up to which all GEMMs of a layer are memory-bound: one swap-AB tile for each expert.
FEW_ROWS = 160


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


class Gpu(NamedTuple):
    """What choices depend on: compute capability (90 for 9.0), multiprocessors, GB/s of memory (0: not known)."""

    capability: int
    multiprocessors: int
    memory: int = 0


class Groups(NamedTuple):
    """Which rows an expert has.

    Attributes:
        sizes: int32 or int64 [E].
        offsets: int32 or int64 [E] or more, first row of each; None: the groups follow each other.
    """

    sizes: Array
    offsets: Array | None = None


class Tokens(NamedTuple):
    """Whose rows are multiplied, where those of tokens are given.

    Attributes:
        row_to_token: int32 [M] token of each row, -1 for none.
        token_rows: int32 [T, W] rows of each token; the first -1 ends a token.
    """

    row_to_token: Array
    token_rows: Array


class Rows(NamedTuple):
    """A matrix whose rows may lie apart: all rows in expert order, or a window of them or of their columns.

    Attributes:
        array: where it lies.
        height: how many rows.
        width: columns.
        stride: elements from one row to the next.
        offset: elements in front of it.
        first_row: which of all rows the first one is.
    """

    array: Array
    height: int
    width: int
    stride: int
    offset: int = 0
    first_row: int = 0

    def address(self, item: int) -> int:
        return self.array.data_ptr() + self.offset * item


class Target(NamedTuple):
    """Where a result goes: memory for it, and which of its columns are made."""

    array: Array
    first_column: int
    width: int


class Layer(NamedTuple):
    """What both passes of a call need.

    Attributes:
        gate_up: W1 [E, d, 2n], or [E, 2n, d] with ``transpose``; the gate's columns first.
        down: W2 [E, n, d], or [E, d, n].
        groups: the rows of each expert.
        tokens: whose rows they are.
        weights: float32 [M], or None.
        transpose: whether the matrices are stored transposed.
        workspace: bytes of the buffer, at least.
        slots: int32 [T, K], row of each slot, if the gradient of the weights is wanted by slot; None: by row.
    """

    gate_up: Array
    down: Array
    groups: Groups
    tokens: Tokens
    weights: Array | None
    transpose: bool
    workspace: int
    slots: Array | None = None


class Kept(NamedTuple):
    """What the forward pass leaves for the backward pass, which makes anew what is None.

    Attributes:
        hidden: H [M, 2n], or its `Codes`.
        tables: int32, which tiles each expert and each window has, and counters that launches change: passes that share
            them follow each other.
    """

    hidden: Any = None
    tables: Any = None


class Gradients(NamedTuple):
    """Those that were wanted; the others are None."""

    x: Any
    gate_up: Any
    down: Any
    weights: Any
