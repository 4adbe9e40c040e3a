# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Permute: copies each token's row to its K rows in expert order. Memory-bound.

    rows[token_rows[t, k]] = x[t]      for every k before the first -1; scales alike
    rows[r] = 0                        for padding, row_to_token[r] < 0

Layout: x [T, H], last dimension contiguous, any row stride; rows [N, H] packed; token_rows int32 [T, W]; row_to_token
int32 [N]; scales are 32-bit. Data move as integer words, as wide as addresses and row bytes allow, so bits survive for
every dtype.

Mapping: COLUMN_BLOCKS programs per token. Each loads BLOCK words of x once and stores them up to W times,
ROWS_PER_ROUND rows per round. Further programs of the same launch zero the padding, FILL rows each. A launch for a
chunk computes a range of rows or of columns into a buffer of that size, and can append the programs of `row_sums`.

Bytes moved: (T + N) * H * itemsize, and 4 * (T * K + N) of maps.
"""

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..launch.device import (
    ITEM_BYTES,
    MAX_CACHED_CALLS,
    Array,
    CopyWords,
    Device,
    addresses,
    alignment_bits,
    cdiv,
    copy_words,
    next_power_of_2,
)
from .configs import Config, permute_config, rows_per_round
from .numerics import load_row_ids
from .row_sums import RowSums, sum_rows

__all__ = ["FILL_BLOCK", "fill_kernel", "permute", "permute_chunk", "zero_padding"]

FILL_BLOCK = 128  # rows that one program checks for padding


@triton.jit
def zero_padding(row_to_token, rows, first, num_rows, width, columns, inside, word: tl.constexpr, ROWS: tl.constexpr):
    """Store zeros to the given columns of ROWS rows, where row_to_token < 0."""
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
    ROWS_PER_ROUND: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SCALE_VECTOR: tl.constexpr,
    FILL: tl.constexpr,
):
    """COLUMN_BLOCKS programs per token, then COLUMN_BLOCKS per FILL rows. Row 0 of ``rows`` is row ``first_row`` of
    all.

    With HAS_END, padding from row ``rows_end[0]`` on is not zeroed.
    """
    program = tl.program_id(0)
    token = program // COLUMN_BLOCKS
    part = program % COLUMN_BLOCKS
    columns = part * BLOCK + tl.arange(0, BLOCK)
    width = groups.to(tl.int64) * VECTOR
    inside = columns < width
    scale_columns = tl.arange(0, SCALE_BLOCK)
    scale_width = scale_groups.to(tl.int64) * SCALE_VECTOR
    scale_width_of_part = tl.where(part == 0, scale_width, 0)
    if token < num_tokens:
        entries = token_rows + token.to(tl.int64) * row_slots
        data = tl.load(x + token.to(tl.int64) * (x_stride_groups * VECTOR) + columns, mask=inside, other=0)
        if HAS_SCALE:
            scale_row = scale + token.to(tl.int64) * (scale_stride_groups * SCALE_VECTOR)
            scales = tl.load(scale_row + scale_columns, mask=scale_columns < scale_width_of_part, other=0)
        first = 0
        while tl.load(entries + first, mask=first < row_slots, other=-1) >= 0:
            # All row indices load before the first store: a load after a store would wait for it.
            target_rows = load_row_ids(entries, first, row_slots, first_row + num_rows, ROWS_PER_ROUND)
            for k in tl.static_range(ROWS_PER_ROUND):
                row = target_rows[k].to(tl.int64) - first_row
                tl.store(rows + row * width + columns, data, mask=columns < tl.where(row >= 0, width, 0))
                if HAS_SCALE:
                    scale_target = row_scales + row * scale_width + scale_columns
                    tl.store(scale_target, scales, mask=scale_columns < tl.where(row >= 0, scale_width_of_part, 0))
            first += ROWS_PER_ROUND
    else:
        first = (token - num_tokens) * FILL
        if HAS_END:
            num_rows = tl.minimum(num_rows, tl.load(rows_end) - first_row)
        if FILL_ROWS:
            zero_padding(row_to_token, rows, first, num_rows, width, columns, inside, rows.dtype.element_ty, FILL)
        if FILL_SCALES:
            word: tl.constexpr = row_scales.dtype.element_ty
            mask = scale_columns < scale_width_of_part
            zero_padding(row_to_token, row_scales, first, num_rows, scale_width, scale_columns, mask, word, FILL)


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
    ROWS_PER_ROUND: tl.constexpr,
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
    """The programs of `permute_kernel`, then one program per SUM_ROWS sums of `row_sums`."""
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
            ROWS_PER_ROUND,
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
    """out[:size] = value, 32-bit integers; BLOCK elements per program."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.zeros([BLOCK], tl.int32) + value, mask=index < size)


class _Call(NamedTuple):
    """A launch without its arrays."""

    programs: int
    types: tuple[str, ...]
    sizes: tuple[int, ...]
    constants: tuple
    warps: int


# Bytes of a row, row stride in bytes, and the alignment bits of both addresses.
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
    """Return rows [N, H], and row_scales [N, S] or None.

    Args:
        device: allocates and launches.
        x: [T, H].
        scale: [T, S] of 32-bit numbers, or None.
        token_rows: int32 [T, W] rows of each token; the first -1 ends a token.
        row_to_token: int32 [N].
        fill_padding: "all", "meta" (scales only) or "none".
        config: overrides `configs.permute_config`.
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


def permute_chunk(
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
    """out[:] = rows[first:end, first:end] of the permuted matrix, packed; rows without a token are zeros.

    Args:
        device: allocates and launches.
        x: [T, H].
        token_rows: int32 [T, W] rows of each token; the first -1 ends a token.
        row_to_token: int32 [N].
        out: memory for the chunk.
        rows: first row and end.
        columns: first column and end.
        rows_end: address of an int32 on the device; padding from that row on is left as it is.
        sums: row sums that the same launch computes, or None.
    """
    num_tokens, row_slots = token_rows.shape
    item = ITEM_BYTES[device.dtype_name(x)]
    (first_row, end), (first_column, column_end) = rows, columns
    source = x.data_ptr() + first_column * item
    stride = device.row_stride(x) * item if x.shape[0] > 1 else 0
    layout = (column_end - first_column) * item, stride, alignment_bits(source, out.data_ptr())
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
    """The destination of a matrix' rows, and the memory layout of both."""
    dtype = device.dtype_name(source)
    item, columns = ITEM_BYTES[dtype], source.shape[1]
    target = device.empty([num_rows, columns], dtype)
    stride = device.row_stride(source) * item if source.shape[0] > 1 else 0
    return target, (columns * item, stride, alignment_bits(source.data_ptr(), target.data_ptr()))


@functools.lru_cache(MAX_CACHED_CALLS)
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
    words, stride = _access_widths(*layout)
    scale_words, scale_stride = _access_widths(*scale_layout) if scale_layout else (CopyWords(4, 1, 0), 0)
    per_round = rows_per_round(row_slots, num_rows, num_tokens)
    config = config or permute_config(words.length * words.unit, num_tokens)
    block = min(config.block_bytes // words.unit, max(next_power_of_2(words.length), 32))
    parts = cdiv(words.length, block)
    has_scale = scale_layout is not None
    fill_rows, fill_scales = fill_padding == "all", fill_padding != "none" and has_scale
    fills = cdiv(num_rows, FILL_BLOCK) if fill_rows or fill_scales else 0
    moved, scales = words.pointer, scale_words.pointer
    return _Call(
        (num_tokens + fills) * parts if num_rows else 0,
        (moved, scales, "*i32", "*i32", moved, scales, "*i32", *["i32"] * 4, *["i64"] * 4),
        (num_tokens, 0, num_rows, row_slots, words.groups, stride, scale_words.groups, scale_stride),
        (
            *(has_scale, fill_rows, fill_scales, has_end, per_round, parts, block, words.vector),
            *(next_power_of_2(scale_words.length), scale_words.vector, FILL_BLOCK),
        ),
        config.warps,
    )


def _access_widths(row_bytes: int, stride: int, low_bits: int) -> tuple[CopyWords, int]:
    """CopyWords to copy, and the row stride in vectors."""
    words = copy_words(row_bytes, stride, low_bits)
    return words, stride // (words.unit * words.vector)
