# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""Unpermute: the sum of each token's rows, plain or weighted. Memory-bound.

    out[t] = sum_k factor_k * rows[token_rows[t, k]]        ascending k; factor 1, weights[row] or weights[index[row]]

Numerics: a float32 accumulator starts at -0.0, receives one fused multiply-add per row and is rounded once, to nearest
even. A plain sum multiplies by 1, which rounds like an addition. An absent row adds 0 * -1 = -0.0, which changes no
accumulator, so the loop needs no branch. A token without rows has result 0; a single unweighted row is copied.

Layout: rows [N, H], any row stride; token_rows int32 [T, W], the first -1 ends a token; out [T, H], or a chunk of the
columns of a wider matrix. Mapping: COLUMN_BLOCKS programs per token, BLOCK columns each. The loads of a round,
ROWS_PER_ROUND rows (at most eight), are all issued before the first addition, so their latencies overlap.

Bytes moved: (N + T) * H * itemsize, and 4 * T * W of maps.
"""

import functools
import math
from typing import Any

import triton
import triton.language as tl

from ..launch.device import (
    ITEM_BYTES,
    MAX_CACHED_CALLS,
    Array,
    Device,
    addresses,
    alignment_bits,
    cdiv,
    next_power_of_2,
    vector_elements,
)
from .configs import Config, rows_per_round, unpermute_config
from .numerics import CARRIERS, load_row_ids, negative_zeros, rounded, widened

__all__ = ["unpermute", "unpermute_chunk"]


@triton.jit
def _load_factor(weights, weight_index, row, num_weights, WEIGHTED: tl.constexpr, INDEXED: tl.constexpr):
    """Factor of a row: its weight, or 1; -1 without a row; 0 if the index of its weight is out of range."""
    if INDEXED:
        place = tl.load(weight_index + row, mask=row >= 0, other=-1)
        weight = tl.load(weights + place, mask=(place >= 0) & (place < num_weights), other=0.0)
        return tl.where(row >= 0, weight, -1.0)
    elif WEIGHTED:
        return tl.load(weights + row, mask=row >= 0, other=-1.0)
    else:
        return tl.where(row >= 0, 1.0, -1.0)


@triton.jit
def _add_rows(
    acc,
    row_ids,
    source,
    weighting,
    DTYPE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INDEXED: tl.constexpr,
    ROWS_PER_ROUND: tl.constexpr,
):
    """Add ROWS_PER_ROUND rows to ``acc``, one after the other.

    ``source``: rows, row stride in elements, column offsets and number of columns. ``weighting``: weights, weight_index
        and
    num_weights.
    """
    rows, row_step, columns, width = source
    weights, weight_index, num_weights = weighting
    data = ()
    for k in tl.static_range(ROWS_PER_ROUND):
        row = rows + row_ids[k].to(tl.int64) * row_step + columns
        data = data + (tl.load(row, mask=columns < tl.where(row_ids[k] >= 0, width, 0), other=0),)
    factors = ()
    for k in tl.static_range(ROWS_PER_ROUND):
        factors = factors + (_load_factor(weights, weight_index, row_ids[k], num_weights, WEIGHTED, INDEXED),)
    for k in tl.static_range(ROWS_PER_ROUND):
        acc = tl.fma(widened(data[k], DTYPE), factors[k], acc)
    return acc


@triton.jit
def unpermute_kernel(
    rows,
    token_rows,
    weights,
    weight_index,
    out,
    num_rows,
    num_weights,
    row_slots,
    groups,
    row_stride_groups,
    out_stride_groups,
    DTYPE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INDEXED: tl.constexpr,
    COPY_SINGLE: tl.constexpr,
    SINGLE_ROUND: tl.constexpr,
    ROWS_PER_ROUND: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """COLUMN_BLOCKS programs per token. ``row_slots``: columns of token_rows; the first -1 ends a token."""
    program = tl.program_id(0)
    token = (program // COLUMN_BLOCKS).to(tl.int64)
    columns = program % COLUMN_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    width = groups.to(tl.int64) * VECTOR
    inside = columns < width
    row_step = row_stride_groups * VECTOR
    entries = token_rows + token * row_slots
    row_ids = load_row_ids(entries, 0, row_slots, num_rows, ROWS_PER_ROUND)
    used = 0
    single = row_ids[0]
    for k in tl.static_range(ROWS_PER_ROUND):
        used += (row_ids[k] >= 0).to(tl.int32)
        single = tl.maximum(single, row_ids[k])
    if not SINGLE_ROUND:
        used += (tl.load(entries + ROWS_PER_ROUND, mask=row_slots > ROWS_PER_ROUND, other=-1) >= 0).to(tl.int32)
    target = out + token * (out_stride_groups * VECTOR) + columns
    if COPY_SINGLE and used == 1:
        tl.store(target, tl.load(rows + single.to(tl.int64) * row_step + columns, mask=inside, other=0), mask=inside)
    else:
        source = rows, row_step, columns, width
        weighting = weights, weight_index, num_weights
        acc = _add_rows(negative_zeros(BLOCK), row_ids, source, weighting, DTYPE, WEIGHTED, INDEXED, ROWS_PER_ROUND)
        if not SINGLE_ROUND:
            first = ROWS_PER_ROUND
            while tl.load(entries + first, mask=first < row_slots, other=-1) >= 0:
                more = load_row_ids(entries, first, row_slots, num_rows, ROWS_PER_ROUND)
                acc = _add_rows(acc, more, source, weighting, DTYPE, WEIGHTED, INDEXED, ROWS_PER_ROUND)
                first += ROWS_PER_ROUND
        if used == 0:
            acc = tl.zeros_like(acc)
        tl.store(target, rounded(acc, DTYPE), mask=inside)


def unpermute(
    device: Device,
    rows: Array,
    token_rows: Array,
    weights: Array | None = None,
    weight_index: Array | None = None,
    *,
    copy_single_row: bool = False,
    config: Config | None = None,
) -> Any:
    """Return [T, H] of the dtype of ``rows``.

    Args:
        device: allocates and launches.
        rows: [N, H] float32, float16 or bfloat16.
        token_rows: int32 [T, W] rows of each token; the first -1 ends a token.
        weights: float32, by row or indexed by ``weight_index``; None: the plain sum.
        weight_index: int32 [N], index of each row's weight, or None.
        copy_single_row: copy a token's only row even if there are weights.
        config: overrides `configs.unpermute_config`.
    """
    num_tokens, row_slots = token_rows.shape
    num_rows, hidden = rows.shape
    dtype = device.dtype_name(rows)
    out = device.empty([num_tokens, hidden], dtype)
    if not num_tokens:
        return out
    stride = device.row_stride(rows) if num_rows > 1 else 0
    num_weights = 0 if weights is None else math.prod(weights.shape)
    arrays = addresses(rows, token_rows, weights, weight_index, out)
    flags = weights is not None, weight_index is not None, copy_single_row
    bits = alignment_bits(arrays[0], arrays[-1])
    types, programs, sizes, constants, warps = _call(
        num_tokens, row_slots, num_rows, hidden, dtype, (stride, hidden), bits, num_weights, flags, config
    )
    device.launch(unpermute_kernel, programs, types, (*arrays, *sizes), constants, warps)
    return out


def unpermute_chunk(
    device: Device, rows: Array, token_rows: Array, num_rows: int, out: Array, columns: tuple[int, int]
) -> None:
    """out[:, first:end] = the plain sum of each token's rows [N, end - first].

    Args:
        device: allocates and launches.
        rows: memory that holds the rows, packed.
        token_rows: int32 [T, W] rows of each token; the first -1 ends a token.
        num_rows: N.
        out: [T, H].
        columns: first column and end.
    """
    num_tokens, row_slots = token_rows.shape
    if not num_tokens:
        return
    dtype = device.dtype_name(out)
    width = columns[1] - columns[0]
    arrays = [*addresses(rows, token_rows, None, None), out.data_ptr() + columns[0] * ITEM_BYTES[dtype]]
    bits = alignment_bits(arrays[0], arrays[-1])
    types, programs, sizes, constants, warps = _call(
        num_tokens, row_slots, num_rows, width, dtype, (width, out.shape[1]), bits, 0, (False, False, False), None
    )
    device.launch(unpermute_kernel, programs, types, (*arrays, *sizes), constants, warps)


@functools.lru_cache(MAX_CACHED_CALLS)
def _call(
    num_tokens: int,
    row_slots: int,
    num_rows: int,
    hidden: int,
    dtype: str,
    strides: tuple[int, int],
    address_bits: int,
    num_weights: int,
    flags: tuple[bool, bool, bool],
    config: Config | None,
) -> tuple[tuple[str, ...], int, tuple[int, ...], tuple, int]:
    """Types, programs, sizes, constants and warps of a launch."""
    weighted, indexed, copy_single_row = flags
    item = ITEM_BYTES[dtype]
    vector = vector_elements(item, hidden * item, *(stride * item for stride in strides), address_bits)
    config = config or unpermute_config(hidden * item, num_tokens)
    block = min(config.block_bytes // item, max(next_power_of_2(hidden), 32))
    parts = cdiv(hidden, block)
    carrier = CARRIERS[dtype] + (":16" if vector > 1 else "")
    per_round = rows_per_round(row_slots, num_rows, num_tokens)
    return (
        (carrier, "*i32", "*fp32", "*i32", carrier, "i32", "i32", "i32", "i64", "i64", "i64"),
        num_tokens * parts,
        (num_rows, num_weights, row_slots, hidden // vector, *(stride // vector for stride in strides)),
        (
            *(dtype, weighted, indexed, not weighted or copy_single_row),
            *(row_slots <= per_round, per_round, parts, block, vector),
        ),
        config.warps,
    )
