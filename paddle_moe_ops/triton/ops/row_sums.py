# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""Row sums of a float32 matrix [M, W], by row or gathered by slot.

    out[r] = sum_w values[r, w]                     0 where row_to_token[r] < 0, if given
    out[s] = sum_w values[slot_to_row[s], w]        by slot; 0 without a row

The work is too small for a launch of its own, so a launch that permutes rows can append it as further programs, with
the same bits. Mapping: ROWS sums per program; a BLOCK covers a row. Bytes moved: 4 M W, and 8 per sum.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..launch.device import Array, Device, addresses, cdiv, next_power_of_2

__all__ = ["RowSums", "row_sums", "sum_rows", "sums_of_rows"]

_WARPS = 4
_ROWS = 32  # per program
_WIDTH_OF_WARP = 32  # up to this width one warp adds up a row, whatever the number of warps


@triton.jit
def sum_rows(
    program,
    values,
    maps,
    out,
    count,
    num_rows,
    width,
    MASK_BY_TOKEN: tl.constexpr,
    BY_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[r] = sum of values[r, :], float32; ROWS of ``count`` sums per program, BLOCK covers a row.

    With MASK_BY_TOKEN, ``maps`` is row_to_token, and rows without a token get 0. With BY_SLOT, it is slot_to_row, and
    out[s] is the sum of the slot's row, 0 without one.
    """
    indices = program * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    valid, rows = indices < count, indices
    if MASK_BY_TOKEN:
        valid = valid & (tl.load(maps + indices, mask=valid, other=-1) >= 0)
    if BY_SLOT:
        rows = tl.load(maps + indices, mask=valid, other=-1)
        valid = valid & (rows >= 0) & (rows < num_rows)
    inside = valid[:, None] & (columns < width)[None, :]
    entries = tl.load(values + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=inside, other=0.0)
    tl.store(out + indices, tl.sum(entries, axis=1), mask=indices < count)


@triton.jit
def row_sums_kernel(
    values,
    maps,
    out,
    count,
    num_rows,
    width,
    MASK_BY_TOKEN: tl.constexpr,
    BY_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per ROWS sums."""
    sum_rows(tl.program_id(0), values, maps, out, count, num_rows, width, MASK_BY_TOKEN, BY_SLOT, ROWS, BLOCK)


class RowSums(NamedTuple):
    """A pending computation of row sums.

    Attributes:
        values: float32, M rows of ``width``.
        width: W.
        maps: int32, row_to_token [M] or slot_to_row [T, K], or None.
        by_slot: whether ``maps`` is slot_to_row.
        out: float32, receives the sums.
    """

    values: Array
    width: int
    maps: Array | None
    by_slot: bool
    out: Any

    @property
    def programs(self) -> int:
        return cdiv(math.prod(self.out.shape), self.rows)

    @property
    def block(self) -> int:
        return next_power_of_2(self.width)

    @property
    def rows(self) -> int:
        """Rows per program; fewer if they are wide, to leave registers to the permute in the same kernel."""
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
        mask_by_token = self.maps is not None and not self.by_slot
        return mask_by_token, self.by_slot, self.rows, self.block

    def warps(self, others: int = _WARPS) -> int:
        """Warps of a program: ``others`` of the fused kernel for rows of one warp or less, otherwise a constant.

        The number of warps fixes the order of a wide sum.
        """
        return others if self.block <= _WIDTH_OF_WARP else _WARPS

    def launch(self, device: Device) -> None:
        """Launch the kernel."""
        if self.programs:
            arguments = self.programs, self.types, self.arguments, self.constants
            device.launch(row_sums_kernel, *arguments, self.warps())


def sums_of_rows(
    device: Device, values: Any, row_to_token: Array | None = None, slot_to_row: Array | None = None
) -> RowSums:
    """Arguments of `row_sums` as a `RowSums`, not launched yet."""
    by_slot = slot_to_row is not None
    num_rows, width = values.shape if len(values.shape) == 2 else (*values.shape, 1)
    out = device.empty(list(slot_to_row.shape) if slot_to_row is not None else [num_rows], "float32")
    return RowSums(values, width, slot_to_row if by_slot else row_to_token, by_slot, out)


def row_sums(device: Device, values: Any, row_to_token: Array | None = None, slot_to_row: Array | None = None) -> Any:
    """Sums of the rows of values [M, W] or [M], float32 [M].

    With ``row_to_token`` [M], rows without a token have sum 0. With ``slot_to_row`` [T, K] instead, the result [T, K]
    has the sum of each slot's row, 0 for slots without one.
    """
    sums = sums_of_rows(device, values, row_to_token, slot_to_row)
    sums.launch(device)
    return sums.out
