# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Rows to expert order: each source row is read once and written to its K rows.

rows[token_rows[t, :]] = x[t], scales alike; rows without a token (row_to_token < 0) are zeroed by further programs of
the same launch. A launch may make a window of the rows, or a window of their columns, in a buffer of that size. One
program moves BLOCK words of one token; a word is an integer as wide as address and row size allow, so bits survive
whatever the dtype. It moves (T + N) * H * itemsize bytes, and 4 * (T * K + N) of maps. A launch for a window can make
`row_sums` as well.
"""

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..launch.device import (
    CALLS_KEPT,
    ITEM_BYTES,
    Array,
    Device,
    Words,
    addresses,
    blocks,
    low_bits,
    next_power_of_2,
    words_of,
)
from .configs import Config, permute_config, rows_at_once
from .numerics import load_indices
from .row_sums import RowSums, sum_rows

__all__ = ["FILL_BLOCK", "fill_kernel", "permute", "permute_window", "zero_rows"]

FILL_BLOCK = 128  # rows that one program looks at for padding


@triton.jit
def zero_rows(row_to_token, rows, first, num_rows, width, columns, inside, word: tl.constexpr, ROWS: tl.constexpr):
    """Zeros in the given columns of those of ROWS rows that no token has."""
    index = first + tl.arange(0, ROWS)
    tokens = tl.load(row_to_token + index, mask=index < num_rows, other=0)
    if tl.min(tokens, axis=0) < 0:
        for step in range(ROWS):
            row = first + step
            if tl.load(row_to_token + row, mask=row < num_rows, other=0) < 0:
                zeros = tl.zeros(columns.shape, word)
                tl.store(rows + row.to(tl.int64) * width + columns, zeros, mask=inside)


@triton.jit
def permute_kernel(
    x,
    scale,
    token_rows,
    row_to_token,
    rows,
    row_scales,
    rows_end,
    num_tokens,
    first_row,
    num_rows,
    row_slots,
    groups,
    x_stride_groups,
    scale_groups,
    scale_stride_groups,
    HAS_SCALE: tl.constexpr,
    FILL_ROWS: tl.constexpr,
    FILL_SCALES: tl.constexpr,
    HAS_END: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SCALE_VECTOR: tl.constexpr,
    FILL: tl.constexpr,
):
    """COLUMN_BLOCKS programs per token, then as many per FILL rows. The rows are those from ``first_row`` on.

    HAS_END: those from row ``rows_end[0]`` on are not filled.
    """
    program = tl.program_id(0)
    token = program // COLUMN_BLOCKS
    part = program % COLUMN_BLOCKS
    columns = part * BLOCK + tl.arange(0, BLOCK)
    width = groups.to(tl.int64) * VECTOR
    inside = columns < width
    scale_columns = tl.arange(0, SCALE_BLOCK)
    scale_width = scale_groups.to(tl.int64) * SCALE_VECTOR
    scale_width_here = tl.where(part == 0, scale_width, 0)
    if token < num_tokens:
        entries = token_rows + token.to(tl.int64) * row_slots
        data = tl.load(x + token.to(tl.int64) * (x_stride_groups * VECTOR) + columns, mask=inside, other=0)
        if HAS_SCALE:
            scale_row = scale + token.to(tl.int64) * (scale_stride_groups * SCALE_VECTOR)
            scales = tl.load(scale_row + scale_columns, mask=scale_columns < scale_width_here, other=0)
        first = 0
        while tl.load(entries + first, mask=first < row_slots, other=-1) >= 0:
            # All of them before any store, which would hold them up.
            targets = load_indices(entries, first, row_slots, first_row + num_rows, AT_ONCE)
            for k in tl.static_range(AT_ONCE):
                row = targets[k].to(tl.int64) - first_row
                tl.store(rows + row * width + columns, data, mask=columns < tl.where(row >= 0, width, 0))
                if HAS_SCALE:
                    scale_target = row_scales + row * scale_width + scale_columns
                    tl.store(scale_target, scales, mask=scale_columns < tl.where(row >= 0, scale_width_here, 0))
            first += AT_ONCE
    else:
        first = (token - num_tokens) * FILL
        if HAS_END:
            num_rows = tl.minimum(num_rows, tl.load(rows_end) - first_row)
        if FILL_ROWS:
            zero_rows(row_to_token, rows, first, num_rows, width, columns, inside, rows.dtype.element_ty, FILL)
        if FILL_SCALES:
            word: tl.constexpr = row_scales.dtype.element_ty
            mask = scale_columns < scale_width_here
            zero_rows(row_to_token, row_scales, first, num_rows, scale_width, scale_columns, mask, word, FILL)


@triton.jit
def permute_and_sum_kernel(
    x,
    scale,
    token_rows,
    row_to_token,
    rows,
    row_scales,
    rows_end,
    num_tokens,
    first_row,
    num_rows,
    row_slots,
    groups,
    x_stride_groups,
    scale_groups,
    scale_stride_groups,
    values,
    maps,
    sums,
    count,
    num_values,
    value_width,
    move_programs,
    HAS_SCALE: tl.constexpr,
    FILL_ROWS: tl.constexpr,
    FILL_SCALES: tl.constexpr,
    HAS_END: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SCALE_VECTOR: tl.constexpr,
    FILL: tl.constexpr,
    OWNED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
):
    """The programs of `permute_kernel`, and one per SUM_ROWS sums of `row_sums`."""
    program = tl.program_id(0)
    if program < move_programs:
        permute_kernel(
            x,
            scale,
            token_rows,
            row_to_token,
            rows,
            row_scales,
            rows_end,
            num_tokens,
            first_row,
            num_rows,
            row_slots,
            groups,
            x_stride_groups,
            scale_groups,
            scale_stride_groups,
            HAS_SCALE,
            FILL_ROWS,
            FILL_SCALES,
            HAS_END,
            AT_ONCE,
            COLUMN_BLOCKS,
            BLOCK,
            VECTOR,
            SCALE_BLOCK,
            SCALE_VECTOR,
            FILL,
        )
    else:
        first = program - move_programs
        sum_rows(first, values, maps, sums, count, num_values, value_width, OWNED, BY_SLOT, SUM_ROWS, SUM_BLOCK)


@triton.jit
def fill_kernel(out, size, value, BLOCK: tl.constexpr):
    """out[:size] = value, 32-bit integers."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.zeros([BLOCK], tl.int32) + value, mask=index < size)


class _Call(NamedTuple):
    """A launch but for its arrays."""

    programs: int
    types: tuple[str, ...]
    sizes: tuple[int, ...]
    constants: tuple
    warps: int


# Bytes of a row, from one to the next, and the lowest bits of the addresses.
_Layout = tuple[int, int, int]


def permute(
    device: Device,
    x: Array,
    scale: Array | None,
    token_rows: Array,
    row_to_token: Array,
    fill_padding: str,
    *,
    config: Config | None = None,
) -> tuple[Any, Any]:
    """rows [N, H], and row_scales [N, S] or None.

    Args:
        device: where to.
        x: [T, H].
        scale: [T, S] of 32-bit numbers, or None.
        token_rows: int32 [T, W] rows of each token; the first -1 ends a token.
        row_to_token: int32 [N].
        fill_padding: "all", "meta" (scales only) or "none".
        config: instead of that of `configs.permute_config`.
    """
    num_tokens, row_slots = token_rows.shape
    num_rows = row_to_token.shape[0]
    rows, layout = _target(device, x, num_rows)
    row_scales, scale_layout = (None, None) if scale is None else _target(device, scale, num_rows)
    call = _call(num_tokens, row_slots, num_rows, layout, scale_layout, fill_padding, False, config)
    if call.programs:
        arrays = (*addresses(x, scale, token_rows, row_to_token, rows, row_scales), 0)
        device.launch(permute_kernel, call.programs, call.types, (*arrays, *call.sizes), call.constants, call.warps)
    return rows, row_scales


def permute_window(
    device: Device,
    x: Array,
    token_rows: Array,
    row_to_token: Array,
    out: Array,
    rows: tuple[int, int],
    columns: tuple[int, int],
    rows_end: int,
    sums: RowSums | None = None,
) -> None:
    """out[:] = rows[first:end, first:end] of all rows in expert order, packed; rows without a token are zeros.

    Args:
        device: where to.
        x: [T, H].
        token_rows: int32 [T, W] rows of each token; the first -1 ends a token.
        row_to_token: int32 [N].
        out: memory for the window.
        rows: the first row and the end.
        columns: the first column and the end.
        rows_end: address of an int32 on the device; rows from that one on stay as they are unless a token has them.
        sums: what the launch makes as well.
    """
    num_tokens, row_slots = token_rows.shape
    item = ITEM_BYTES[device.dtype_name(x)]
    (first_row, end), (first_column, column_end) = rows, columns
    source = x.data_ptr() + first_column * item
    stride = device.row_stride(x) * item if x.shape[0] > 1 else 0
    layout = (column_end - first_column) * item, stride, low_bits(source, out.data_ptr())
    call = _call(num_tokens, row_slots, end - first_row, layout, None, "all", True, None)
    owners = row_to_token.data_ptr() + ITEM_BYTES["int32"] * first_row
    arrays = source, 0, token_rows.data_ptr(), owners, out.data_ptr(), 0, rows_end
    arguments = (*arrays, num_tokens, first_row, *call.sizes[2:])
    if sums is None:
        if call.programs:
            device.launch(permute_kernel, call.programs, call.types, arguments, call.constants, call.warps)
    elif call.programs:
        device.launch(
            permute_and_sum_kernel,
            call.programs + sums.programs,
            (*call.types, *sums.types, "i32"),
            (*arguments, *sums.arguments, call.programs),
            (*call.constants, *sums.constants),
            sums.warps(call.warps),
        )
    else:
        sums.launch(device)


def _target(device: Device, source: Array, num_rows: int) -> tuple[Any, _Layout]:
    """The rows to be made from a matrix, and how both lie in memory."""
    dtype = device.dtype_name(source)
    item, columns = ITEM_BYTES[dtype], source.shape[1]
    target = device.empty([num_rows, columns], dtype)
    stride = device.row_stride(source) * item if source.shape[0] > 1 else 0
    return target, (columns * item, stride, low_bits(source.data_ptr(), target.data_ptr()))


@functools.lru_cache(CALLS_KEPT)
def _call(
    num_tokens: int,
    row_slots: int,
    num_rows: int,
    layout: _Layout,
    scale_layout: _Layout | None,
    fill_padding: str,
    has_end: bool,
    config: Config | None,
) -> _Call:
    words, stride = _cut(*layout)
    scale_words, scale_stride = _cut(*scale_layout) if scale_layout else (Words(4, 1, 0), 0)
    at_once = rows_at_once(row_slots, num_rows, num_tokens)
    config = config or permute_config(words.length * words.unit, num_tokens)
    block = min(config.block_bytes // words.unit, max(next_power_of_2(words.length), 32))
    parts = blocks(words.length, block)
    has_scale = scale_layout is not None
    fill_rows, fill_scales = fill_padding == "all", fill_padding != "none" and has_scale
    fills = blocks(num_rows, FILL_BLOCK) if fill_rows or fill_scales else 0
    moved, scales = words.pointer, scale_words.pointer
    return _Call(
        (num_tokens + fills) * parts if num_rows else 0,
        (moved, scales, "*i32", "*i32", moved, scales, "*i32", *["i32"] * 4, *["i64"] * 4),
        (num_tokens, 0, num_rows, row_slots, words.groups, stride, scale_words.groups, scale_stride),
        (
            *(has_scale, fill_rows, fill_scales, has_end, at_once, parts, block, words.vector),
            *(next_power_of_2(scale_words.length), scale_words.vector, FILL_BLOCK),
        ),
        config.warps,
    )


def _cut(row_bytes: int, stride: int, low_bits: int) -> tuple[Words, int]:
    """The words to copy, and how far rows lie apart, in groups of words."""
    words = words_of(row_bytes, stride, low_bits)
    return words, stride // (words.unit * words.vector)
