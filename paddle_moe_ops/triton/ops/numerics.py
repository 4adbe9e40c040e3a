# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""Arithmetic shared by the summing kernels. Rows are loaded as integers, so a copy keeps every bit."""

import triton
import triton.language as tl

__all__ = ["CARRIERS", "load_row_ids", "negative_zeros", "rounded", "widened"]

# Pointer types through which rows of each dtype are loaded.
CARRIERS = {"float32": "*i32", "float16": "*i16", "bfloat16": "*i16"}


@triton.jit
def widened(bits, DTYPE: tl.constexpr):
    """float32 values of the bits of float32, float16 or bfloat16 numbers."""
    if DTYPE == "float32":
        return bits.to(tl.float32, bitcast=True)
    elif DTYPE == "float16":
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """Bits of float32 values rounded to nearest even.

    bfloat16 is rounded by integer arithmetic: the interpreter's cast truncates.
    """
    if DTYPE == "float32":
        return value.to(tl.int32, bitcast=True)
    elif DTYPE == "float16":
        return value.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value == value, nearest, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def negative_zeros(SIZE: tl.constexpr):
    """float32 [SIZE] of -0.0; tl.full would store 0.0."""
    return tl.full([SIZE], -(2**31), tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_row_ids(entries, first, count, limit, ROWS_PER_ROUND: tl.constexpr):
    """ROWS_PER_ROUND entries of a map from ``first`` on, as scalars; -1 beyond ``count`` and for rows outside [0,
    limit)."""
    found = ()
    for k in tl.static_range(ROWS_PER_ROUND):
        row = tl.load(entries + first + k, mask=first + k < count, other=-1)
        found = found + (tl.where((row >= 0) & (row < limit), row, -1),)
    return found
