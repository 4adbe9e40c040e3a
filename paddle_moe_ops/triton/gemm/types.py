# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Operands, groups, tile schedules and GPU facts of the grouped GEMMs. Imports no Triton."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from ..launch.device import ITEM_BYTES, Array

__all__ = [
    "Gpu",
    "Gradients",
    "Groups",
    "Kept",
    "Layer",
    "Rows",
    "Schedule",
    "Table",
    "Target",
    "Tokens",
]


class Table(NamedTuple):
    """An int32 table inside a larger array."""

    array: Array
    offset: int
    shape: tuple[int, ...]

    def data_ptr(self) -> int:
        return self.array.data_ptr() + ITEM_BYTES["int32"] * self.offset


class Schedule(NamedTuple):
    """Tile schedule of grouped GEMMs for tiles of H rows; P chunks of rows.

    Attributes:
        group_starts: [E + 1] first row of each group; then M, or the end of the last group.
        group_ends: [E] end of each group.
        tile_starts: [E + 1] exclusive prefix sum of the tiles of each group; then their number.
        gap_starts: [E + 2] exclusive prefix sum of the gap tiles: those before the first group, those after each group.
        chunk_tiles: [P + 3] first tile of each chunk; then the number of tiles, and [0, that number] for a launch of
            all rows.
    """

    group_starts: Array
    group_ends: Array
    tile_starts: Array
    gap_starts: Array
    chunk_tiles: Array

    @property
    def num_chunks(self) -> int:
        return self.chunk_tiles.shape[0] - 3

    @staticmethod
    def lengths(num_experts: int, num_chunks: int) -> tuple[int, ...]:
        """Lengths of the tables."""
        return num_experts + 1, num_experts, num_experts + 1, num_experts + 2, num_chunks + 3

    @staticmethod
    def within(array: Array, num_experts: int, num_chunks: int, number: int = 0) -> Schedule:
        """Schedule ``number`` of those whose tables lie in an int32 array."""
        lengths = Schedule.lengths(num_experts, num_chunks)
        offsets = itertools.accumulate(lengths, initial=number * sum(lengths))
        return Schedule(*(Table(array, offset, (length,)) for offset, length in zip(offsets, lengths, strict=False)))


class Gpu(NamedTuple):
    """A GPU, as far as heuristics depend on it.

    Attributes:
        capability: compute capability, 90 for 9.0.
        num_sms: number of SMs.
    """

    capability: int
    num_sms: int


class Groups(NamedTuple):
    """Rows of each expert.

    Attributes:
        sizes: int32 or int64 [E].
        offsets: int32 or int64 [E] or more, first row of each; None: groups are contiguous.
    """

    sizes: Array
    offsets: Array | None = None


class Tokens(NamedTuple):
    """Routing maps of a GEMM that reads token rows.

    Attributes:
        row_to_token: int32 [M] token of each row, -1 for none.
        token_rows: int32 [T, W] rows of each token; the first -1 ends a token.
    """

    row_to_token: Array
    token_rows: Array


class Rows(NamedTuple):
    """A matrix with any row stride: all rows in expert order, or a chunk of the rows or columns.

    Attributes:
        array: memory that contains it.
        height: number of rows.
        width: number of columns.
        stride: row stride in elements.
        offset: elements before it in ``array``.
        first_row: index of its first row among all rows.
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
    """The output of a GEMM.

    Attributes:
        array: memory for it, rows packed.
        first_column: first column that the launch computes.
        width: number of columns that the launch computes.
    """

    array: Array
    first_column: int
    width: int


class Layer(NamedTuple):
    """Operands of both passes of a layer.

    Attributes:
        gate_up: W1 [E, d, 2n], or [E, 2n, d] with ``transpose``; the gate's columns first.
        down: W2 [E, n, d], or [E, d, n].
        groups: rows of each expert.
        tokens: routing maps of the rows.
        weights: float32 [M], or None.
        transpose: whether the matrices are stored transposed.
        workspace: bytes of the chunk buffer, at least.
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
    """Tensors that the forward pass saves; the backward pass recomputes those that are None.

    Attributes:
        hidden: H [M, 2n].
        tables: int32, tile schedules.
    """

    hidden: Any = None
    tables: Any = None


class Gradients(NamedTuple):
    """Gradients of a layer; None for those that are not wanted."""

    x: Any
    gate_up: Any
    down: Any
    weights: Any
