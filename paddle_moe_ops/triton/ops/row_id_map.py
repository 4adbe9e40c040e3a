# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's row_id_map int32 [T, 2E + 1] from a plan, and the row map [T, E] from it. One program per token.

Layout of a line: column 2E contains n, the number of the token's rows; columns [0, n) contain these rows in descending
order, columns [E, E + n) their experts; the rest is -1.

Bytes moved: make reads 4 * T * K and the experts of the rows, and writes 4 * T * (2E + 1); read loads the entries in
use and writes 4 * T * E.
"""

from typing import Any

import triton
import triton.language as tl

from ..launch.device import Array, Device, addresses, next_power_of_2

__all__ = ["make_row_id_map", "read_row_id_map"]

_MAX_COLUMNS = 1024  # of a line per iteration
_NO_SUCH_ROW = tl.constexpr(2**31 - 1)  # larger than every buffer


@triton.jit
def _entries(token_rows, row_to_expert, token, first, num_experts, num_rows, K, BLOCK: tl.constexpr):
    """Rows of a token from entry ``first`` on, their experts, and a mask of the valid ones."""
    entry = first + tl.arange(0, BLOCK)
    row = tl.load(token_rows + token * K + entry, mask=entry < K, other=-1)
    is_row = (row >= 0) & (row < num_rows)
    expert = tl.load(row_to_expert + row, mask=is_row, other=-1)
    return row, expert, (expert >= 0) & (expert < num_experts)


@triton.jit
def make_row_id_map_kernel(
    token_rows,
    row_to_expert,
    pad_offsets,
    row_id_map,
    num_experts,
    num_rows,
    K,
    HAS_OFFSETS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per token: counts its valid rows, then stores them from the last place down."""
    token = tl.program_id(0).to(tl.int64)
    line = row_id_map + token * (2 * num_experts + 1)
    count = 0
    for first in range(0, K, SLOTS):
        _, _, used = _entries(token_rows, row_to_expert, token, first, num_experts, num_rows, K, SLOTS)
        count += tl.sum(used.to(tl.int32), axis=0)
    count = tl.minimum(count, num_experts)
    before = 0
    for first in range(0, K, SLOTS):
        row, expert, used = _entries(token_rows, row_to_expert, token, first, num_experts, num_rows, K, SLOTS)
        one = used.to(tl.int32)
        place = count - before - tl.cumsum(one, axis=0)
        live = used & (place >= 0)
        if HAS_OFFSETS:
            row -= tl.load(pad_offsets + expert, mask=live, other=0)
        tl.store(line + place, row, mask=live)
        tl.store(line + num_experts + place, expert, mask=live)
        before += tl.sum(one, axis=0)
    for first in range(0, num_experts, COLUMNS):
        place = first + tl.arange(0, COLUMNS)
        rest = (place >= count) & (place < num_experts)
        tl.store(line + place, tl.full([COLUMNS], -1, tl.int32), mask=rest)
        tl.store(line + num_experts + place, tl.full([COLUMNS], -1, tl.int32), mask=rest)
    tl.store(line + 2 * num_experts, count)


@triton.jit
def read_row_id_map_kernel(
    row_id_map, pad_offsets, rowmap, num_experts, HAS_OFFSETS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program per token. Entries are stored from last to first: of several at one expert the first remains."""
    token = tl.program_id(0).to(tl.int64)
    entries = row_id_map + token * (2 * num_experts + 1)
    line = rowmap + token * num_experts
    for first in range(0, num_experts, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        tl.store(line + columns, tl.full([COLUMNS], -1, tl.int32), mask=columns < num_experts)
    tl.debug_barrier()
    count = tl.minimum(tl.maximum(tl.load(entries + 2 * num_experts), 0), num_experts)
    for later in range(count):
        entry = count - 1 - later
        row = tl.load(entries + entry)
        expert = tl.load(entries + num_experts + entry)
        inside = (expert >= 0) & (expert < num_experts)
        if HAS_OFFSETS:
            padded = row.to(tl.int64) + tl.load(pad_offsets + expert, mask=inside, other=0)
            fits = (padded >= 0) & (padded < _NO_SUCH_ROW)
            row = tl.where(row < 0, row, tl.where(fits, padded, _NO_SUCH_ROW).to(tl.int32))
        tl.store(line + expert, row, mask=inside)


def make_row_id_map(
    device: Device, token_rows: Array, row_to_expert: Array, pad_offsets: Array | None, num_experts: int
) -> Any:
    """int32 [T, 2E + 1] from int32 maps of a plan; ``pad_offsets`` int32 [E] are subtracted from the rows."""
    num_tokens, topk = token_rows.shape
    row_id_map = device.empty([num_tokens, 2 * num_experts + 1], "int32")
    if num_tokens:
        sizes = num_experts, row_to_expert.shape[0], topk
        constants = pad_offsets is not None, min(next_power_of_2(topk), _MAX_COLUMNS), _columns(num_experts)
        arguments = *addresses(token_rows, row_to_expert, pad_offsets, row_id_map), *sizes
        device.launch(make_row_id_map_kernel, num_tokens, (*["*i32"] * 4, *["i32"] * 3), arguments, constants, 1)
    return row_id_map


def read_row_id_map(device: Device, row_id_map: Array, pad_offsets: Array | None) -> Any:
    """int32 [T, E]: the row of each pair, negative without one; rows that 31 bits cannot represent are 2^31 - 1.

    Counts are clamped to [0, E], experts out of range are ignored, and of several entries at one expert the first
    counts. ``pad_offsets`` int32 [E] are added to the rows.
    """
    num_tokens, num_experts = row_id_map.shape[0], row_id_map.shape[1] // 2
    rowmap = device.empty([num_tokens, num_experts], "int32")
    if num_tokens:
        arguments = *addresses(row_id_map, pad_offsets, rowmap), num_experts
        constants = pad_offsets is not None, _columns(num_experts)
        device.launch(read_row_id_map_kernel, num_tokens, ("*i32", "*i32", "*i32", "i32"), arguments, constants, 1)
    return rowmap


def _columns(num_experts: int) -> int:
    return min(next_power_of_2(num_experts), _MAX_COLUMNS)
