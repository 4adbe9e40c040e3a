# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""The sums of the rows of a matrix [M, W], float32, by row or by the slots that the rows belong to.

They are too little work for a launch of their own, so a launch that moves rows can make them as well, in programs
after its own. The bits are the same either way. Moves 4 M W bytes, and 8 a sum.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..launch.device import Array, Device, addresses, blocks, next_power_of_2

__all__ = ["RowSums", "row_sums", "sum_rows", "sums_of_rows"]

_WARPS = 4
_ROWS = 32  # of a program
_WIDTH_OF_WARP = 32  # up to this width one warp adds up a row, however many a program has


@triton.jit
def sum_rows(
    program,
    values,
    maps,
    out,
    count,
    num_rows,
    width,
    OWNED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[r] = sum of values[r, :], float32; ROWS of ``count`` sums per program, BLOCK covers a row.

    With OWNED ``maps`` is row_to_token, and rows without a token get 0. With BY_SLOT it is slot_to_row, and out[s] is
    the sum of the slot's row, 0 without one.
    """
    places = program * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    live, rows = places < count, places
    if OWNED:
        live = live & (tl.load(maps + places, mask=live, other=-1) >= 0)
    if BY_SLOT:
        rows = tl.load(maps + places, mask=live, other=-1)
        live = live & (rows >= 0) & (rows < num_rows)
    inside = live[:, None] & (columns < width)[None, :]
    entries = tl.load(values + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=inside, other=0.0)
    tl.store(out + places, tl.sum(entries, axis=1), mask=places < count)


@triton.jit
def row_sums_kernel(
    values,
    maps,
    out,
    count,
    num_rows,
    width,
    OWNED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per ROWS sums."""
    sum_rows(tl.program_id(0), values, maps, out, count, num_rows, width, OWNED, BY_SLOT, ROWS, BLOCK)


class RowSums(NamedTuple):
    """Sums that are to be made.

    Attributes:
        values: float32, M rows of ``width``.
        width: W.
        maps: int32, row_to_token [M] or slot_to_row [T, K], or None.
        by_slot: whether it is the latter.
        out: float32, takes the sums.
    """

    values: Array
    width: int
    maps: Array | None
    by_slot: bool
    out: Any

    @property
    def programs(self) -> int:
        return blocks(math.prod(self.out.shape), self.rows)

    @property
    def block(self) -> int:
        return next_power_of_2(self.width)

    @property
    def rows(self) -> int:
        """Of a program: fewer where they are wide, so that moving rows in the same kernel leaves registers."""
        return max(1, min(_ROWS, _ROWS * _WIDTH_OF_WARP // self.block))

    @property
    def types(self) -> tuple[str, ...]:
        return ("*fp32", "*i32", "*fp32", "i32", "i32", "i32")

    @property
    def arguments(self) -> tuple[int, ...]:
        sizes = math.prod(self.out.shape), self.values.shape[0], self.width
        return *addresses(self.values, self.maps, self.out), *sizes

    @property
    def constants(self) -> tuple:
        owned = self.maps is not None and not self.by_slot
        return owned, self.by_slot, self.rows, self.block

    def warps(self, others: int = _WARPS) -> int:
        """Of a program, or so many for its other work; where rows are wide, they decide the order of a sum."""
        return others if self.block <= _WIDTH_OF_WARP else _WARPS

    def launch(self, device: Device) -> None:
        """Make them."""
        if self.programs:
            arguments = self.programs, self.types, self.arguments, self.constants
            device.launch(row_sums_kernel, *arguments, self.warps())


def sums_of_rows(
    device: Device, values: Any, row_to_token: Array | None = None, slot_to_row: Array | None = None
) -> RowSums:
    """`row_sums` that are yet to be made."""
    by_slot = slot_to_row is not None
    num_rows, width = values.shape if len(values.shape) == 2 else (*values.shape, 1)
    out = device.empty(list(slot_to_row.shape) if slot_to_row is not None else [num_rows], "float32")
    return RowSums(values, width, slot_to_row if by_slot else row_to_token, by_slot, out)


def row_sums(device: Device, values: Any, row_to_token: Array | None = None, slot_to_row: Array | None = None) -> Any:
    """The sums of the rows of values [M, W] or [M], float32 [M]; with ``row_to_token`` [M], 0 for rows without a token.

    With ``slot_to_row`` [T, K] instead the sum of each slot's row, [T, K], 0 for slots without one.
    """
    sums = sums_of_rows(device, values, row_to_token, slot_to_row)
    sums.launch(device)
    return sums.out
