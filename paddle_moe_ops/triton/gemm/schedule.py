# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tile schedules: from group sizes and offsets, which are on the device, to the tables that grouped GEMMs read.

    group e begins at max(offset or running sum, end of group e - 1) and ends at begin + size, cut to [0, M)
    tiles of group e = ceil(rows / H); gap tiles after it = ceil(rows from its last tile to the next group / H)

Layout: sizes and offsets int32 or int64 [E]; the tables of `types.Schedule`, int32, for each tile height H.

Mapping: one program per tile height, BLOCK_E experts per iteration; prefix sums within a block of experts, running sums
across blocks. The tables have about 16 E bytes per height, so latency determines the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from ..launch.device import Array, Device, address, cdiv
from .operands import POINTERS
from .types import Groups, Schedule

__all__ = ["experts_per_block", "fill_schedules", "loops_over_experts", "schedule", "schedule_kernel"]

_EXPERTS_PER_BLOCK, _MAX_EXPERTS_PER_BLOCK = 256, 1024
_HEIGHTS_PER_LAUNCH = 3  # of `schedule_kernel`


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def schedule_kernel(
    sizes,
    offsets,
    group_starts,
    group_ends,
    tile_starts,
    gap_starts,
    chunk_tiles,
    stride,
    num_experts,
    num_rows,
    num_chunks,
    chunk_rows,
    height_0,
    height_1,
    height_2,
    HAS_OFFSETS: tl.constexpr,
    COVERS_ALL: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program per tile height.

    The tables of each height begin ``stride`` elements after those of the previous one. Without COVERS_ALL, GEMMs leave
    rows after the last group untouched.
    """
    program = tl.program_id(0)
    height = tl.where(program == 0, height_0, tl.where(program == 1, height_1, height_2))
    group_starts += program * stride
    group_ends += program * stride
    tile_starts += program * stride
    gap_starts += program * stride
    chunk_tiles += program * stride
    index = tl.arange(0, BLOCK_E)
    limit = num_rows.to(tl.int64)
    rows_before, end_before = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for block in range(0, num_experts, BLOCK_E):
        expert, is_expert = block + index, block + index < num_experts
        size = tl.load(sizes + expert, mask=is_expert, other=0).to(tl.int64)
        size = tl.minimum(tl.maximum(size, 0), limit)
        if HAS_OFFSETS:
            start = tl.load(offsets + expert, mask=is_expert, other=0).to(tl.int64)
        else:
            start = rows_before + tl.cumsum(size, axis=0) - size
        start = tl.minimum(tl.maximum(start, 0), limit)
        end = tl.maximum(tl.associative_scan(tl.minimum(start + size, limit), 0, _maximum), end_before)
        tl.store(group_starts + expert, start.to(tl.int32), mask=is_expert)
        tl.store(group_ends + expert, end.to(tl.int32), mask=is_expert)
        rows_before += tl.sum(size, axis=0)
        end_before = tl.max(end, axis=0)
    tl.debug_barrier()
    for block in range(0, num_experts, BLOCK_E):  # groups do not overlap
        expert, is_expert = block + index, block + index < num_experts
        earlier = tl.load(group_ends + expert - 1, mask=is_expert & (expert > 0), other=0)
        start = tl.maximum(tl.load(group_starts + expert, mask=is_expert, other=0), earlier)
        tl.store(group_starts + expert, start, mask=is_expert)
    if COVERS_ALL:
        tl.store(group_starts + num_experts, num_rows)
    else:
        tl.store(group_starts + num_experts, end_before.to(tl.int32))
    tl.debug_barrier()
    gaps_before_groups = (tl.load(group_starts) + (height - 1)) // height
    tl.store(gap_starts, 0)
    tiles_before, gaps_before = 0, gaps_before_groups
    for block in range(0, num_experts, BLOCK_E):
        expert, is_expert = block + index, block + index < num_experts
        origin = tl.load(group_starts + expert, mask=is_expert, other=0)
        rows = tl.load(group_ends + expert, mask=is_expert, other=0) - origin
        num_tiles = tl.where(is_expert, (tl.maximum(rows, 0) + (height - 1)) // height, 0)
        after = tl.load(group_starts + expert + 1, mask=is_expert, other=0) - origin - num_tiles * height
        num_gaps = tl.where(is_expert, (tl.maximum(after, 0) + (height - 1)) // height, 0)
        tl.store(tile_starts + expert, tiles_before + tl.cumsum(num_tiles, axis=0) - num_tiles, mask=is_expert)
        tl.store(gap_starts + 1 + expert, gaps_before + tl.cumsum(num_gaps, axis=0) - num_gaps, mask=is_expert)
        tiles_before += tl.sum(num_tiles, axis=0)
        gaps_before += tl.sum(num_gaps, axis=0)
    tl.store(tile_starts + num_experts, tiles_before)
    tl.store(gap_starts + 1 + num_experts, gaps_before)
    tl.store(chunk_tiles + num_chunks, tiles_before)
    tl.store(chunk_tiles + num_chunks + 1, 0)
    tl.store(chunk_tiles + num_chunks + 2, tiles_before)
    tl.debug_barrier()
    for row_chunk in range(num_chunks):
        tiles_before = 0
        for block in range(0, num_experts, BLOCK_E):
            expert, is_expert = block + index, block + index < num_experts
            origin = tl.load(group_starts + expert, mask=is_expert, other=0)
            earlier = tl.load(tile_starts + expert, mask=is_expert, other=0)
            num_tiles = tl.load(tile_starts + expert + 1, mask=is_expert, other=0) - earlier
            begun = (tl.maximum(row_chunk * chunk_rows - origin, 0) + (height - 1)) // height
            tiles_before += tl.sum(tl.minimum(begun, num_tiles), axis=0)
        tl.store(chunk_tiles + row_chunk, tiles_before)


def schedule(device: Device, groups: Groups, num_rows: int, block_rows: int) -> Schedule:
    """Schedule for tiles of ``block_rows`` rows."""
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
    chunk_rows: int = 0,
    covers_all: bool = True,
) -> None:
    """Compute schedules for tiles of several heights, and the first tile of each chunk of ``chunk_rows`` rows.

    Without ``covers_all``, GEMMs leave rows after the last group untouched.
    """
    sizes, offsets = groups
    experts = sizes.shape[0]
    num_chunks = cdiv(num_rows, chunk_rows) if chunk_rows else 0
    stride = sum(Schedule.lengths(experts, num_chunks))
    pointers = [POINTERS[device.dtype_name(sizes if each is None else each)] for each in groups]
    for number in range(0, len(heights), _HEIGHTS_PER_LAUNCH):
        at_once = heights[number : number + _HEIGHTS_PER_LAUNCH]
        tables = Schedule.within(array, experts, num_chunks, number)
        padded = (*at_once, *[1] * (_HEIGHTS_PER_LAUNCH - len(at_once)))
        device.launch(
            schedule_kernel,
            len(at_once),
            (*pointers, *["*i32"] * 5, *["i32"] * (5 + _HEIGHTS_PER_LAUNCH)),
            (*map(address, (sizes, offsets, *tables)), stride, experts, num_rows, num_chunks, chunk_rows, *padded),
            (offsets is not None, covers_all, experts_per_block(experts)),
            4,
        )


def experts_per_block(num_experts: int) -> int:
    """Experts per block of the kernels' tables: few values, since kernels are compiled for each."""
    return _EXPERTS_PER_BLOCK if num_experts <= _EXPERTS_PER_BLOCK else _MAX_EXPERTS_PER_BLOCK


def loops_over_experts(num_experts: int) -> bool:
    """True if a kernel needs several blocks of experts."""
    return num_experts > _MAX_EXPERTS_PER_BLOCK
