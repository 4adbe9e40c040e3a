# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The tile schedule."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from ..launch.device import Array, Device, address, blocks
from .operands import POINTERS
from .types import Groups, Schedule

__all__ = ["experts_at_once", "fill_schedules", "loops_over_experts", "schedule", "schedule_kernel"]

# Of the table of experts: few sizes, since each is compiled for.
_EXPERTS_AT_ONCE, _MOST_EXPERTS_AT_ONCE = 256, 1024
_HEIGHTS_AT_ONCE = 3  # of `schedule_kernel`


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def schedule_kernel(
    sizes,
    offsets,
    first,
    stop,
    tiles,
    spare,
    windows,
    counters,
    stride,
    num_experts,
    num_rows,
    num_windows,
    window_rows,
    height_0,
    height_1,
    height_2,
    HAS_OFFSETS: tl.constexpr,
    COVERS_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK experts at a time. The tables of each height begin ``stride`` numbers after those of the one before it."""
    program = tl.program_id(0)
    height = tl.where(program == 0, height_0, tl.where(program == 1, height_1, height_2))
    first += program * stride
    stop += program * stride
    tiles += program * stride
    spare += program * stride
    windows += program * stride
    counters += program * stride
    index = tl.arange(0, BLOCK)
    limit = num_rows.to(tl.int64)
    rows_before, end_before = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for chunk in range(0, num_experts, BLOCK):
        expert, inside = chunk + index, chunk + index < num_experts
        size = tl.load(sizes + expert, mask=inside, other=0).to(tl.int64)
        size = tl.minimum(tl.maximum(size, 0), limit)
        if HAS_OFFSETS:
            start = tl.load(offsets + expert, mask=inside, other=0).to(tl.int64)
        else:
            start = rows_before + tl.cumsum(size, axis=0) - size
        start = tl.minimum(tl.maximum(start, 0), limit)
        end = tl.maximum(tl.associative_scan(tl.minimum(start + size, limit), 0, _larger), end_before)
        tl.store(first + expert, start.to(tl.int32), mask=inside)
        tl.store(stop + expert, end.to(tl.int32), mask=inside)
        rows_before += tl.sum(size, axis=0)
        end_before = tl.max(end, axis=0)
    tl.debug_barrier()
    for chunk in range(0, num_experts, BLOCK):  # a group begins where those before it have ended, at the earliest
        expert, inside = chunk + index, chunk + index < num_experts
        earlier = tl.load(stop + expert - 1, mask=inside & (expert > 0), other=0)
        tl.store(first + expert, tl.maximum(tl.load(first + expert, mask=inside, other=0), earlier), mask=inside)
    if COVERS_ALL:
        tl.store(first + num_experts, num_rows)
    else:
        tl.store(first + num_experts, end_before.to(tl.int32))
    tl.debug_barrier()
    in_front = (tl.load(first) + (height - 1)) // height
    tl.store(spare, 0)
    before, spare_before = 0, in_front
    for chunk in range(0, num_experts, BLOCK):
        expert, inside = chunk + index, chunk + index < num_experts
        origin = tl.load(first + expert, mask=inside, other=0)
        rows = tl.load(stop + expert, mask=inside, other=0) - origin
        count = tl.where(inside, (tl.maximum(rows, 0) + (height - 1)) // height, 0)
        after = tl.load(first + expert + 1, mask=inside, other=0) - origin - count * height
        blocks = tl.where(inside, (tl.maximum(after, 0) + (height - 1)) // height, 0)
        tl.store(tiles + expert, before + tl.cumsum(count, axis=0) - count, mask=inside)
        tl.store(spare + 1 + expert, spare_before + tl.cumsum(blocks, axis=0) - blocks, mask=inside)
        before += tl.sum(count, axis=0)
        spare_before += tl.sum(blocks, axis=0)
    tl.store(tiles + num_experts, before)
    tl.store(spare + 1 + num_experts, spare_before)
    tl.store(counters, 0)
    tl.store(counters + 1, 0)
    tl.store(windows + num_windows, before)
    tl.store(windows + num_windows + 1, 0)
    tl.store(windows + num_windows + 2, before)
    tl.debug_barrier()
    for window in range(num_windows):
        before = 0
        for chunk in range(0, num_experts, BLOCK):
            expert, inside = chunk + index, chunk + index < num_experts
            origin = tl.load(first + expert, mask=inside, other=0)
            earlier = tl.load(tiles + expert, mask=inside, other=0)
            count = tl.load(tiles + expert + 1, mask=inside, other=0) - earlier
            begun = (tl.maximum(window * window_rows - origin, 0) + (height - 1)) // height
            before += tl.sum(tl.minimum(begun, count), axis=0)
        tl.store(windows + window, before)


def schedule(device: Device, groups: Groups, num_rows: int, block_rows: int) -> Schedule:
    """Which tiles each expert has."""
    experts = groups.sizes.shape[0]
    array = device.empty([sum(Schedule.lengths(experts, 0))], "int32")
    fill_schedules(device, array, groups, num_rows, [block_rows])
    return Schedule.within(array, experts, 0)


def fill_schedules(
    device: Device,
    array: Array,
    groups: Groups,
    num_rows: int,
    heights: Sequence[int],
    window_rows: int = 0,
    covers_all: bool = True,
) -> None:
    """For tiles of each of these heights, which of them each expert has, and each window of so many rows, if there are.

    Without ``covers_all``, products leave the rows after the last group as they are.
    """
    sizes, offsets = groups
    experts = sizes.shape[0]
    windows = blocks(num_rows, window_rows) if window_rows else 0
    stride = sum(Schedule.lengths(experts, windows))
    pointers = [POINTERS[device.dtype_name(sizes if each is None else each)] for each in groups]
    for number in range(0, len(heights), _HEIGHTS_AT_ONCE):
        at_once = heights[number : number + _HEIGHTS_AT_ONCE]
        tables = Schedule.within(array, experts, windows, number)
        padded = (*at_once, *[1] * (_HEIGHTS_AT_ONCE - len(at_once)))
        device.launch(
            schedule_kernel,
            len(at_once),
            (*pointers, *["*i32"] * 6, *["i32"] * (5 + _HEIGHTS_AT_ONCE)),
            (*map(address, (sizes, offsets, *tables)), stride, experts, num_rows, windows, window_rows, *padded),
            (offsets is not None, covers_all, experts_at_once(experts)),
            4,
        )


def experts_at_once(num_experts: int) -> int:
    return _EXPERTS_AT_ONCE if num_experts <= _EXPERTS_AT_ONCE else _MOST_EXPERTS_AT_ONCE


def loops_over_experts(num_experts: int) -> bool:
    """Whether one block of experts does not cover all."""
    return num_experts > _MOST_EXPERTS_AT_ONCE
