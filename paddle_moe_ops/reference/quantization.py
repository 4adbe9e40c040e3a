# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Rows in float8_e4m3fn with a scale for each 128 columns, alone and on the way to expert order.

One group of columns: ``amax`` is the largest magnitude, NaN left out, held between ``amax_min`` and the largest finite
number. The scale is RN(amax / 448) in float32, or for ue8m0 the smallest power of two that is not less. A code is the
float8 nearest to RN(x * RN(1 / scale)), ties to even; magnitudes beyond 448 become 448, NaN becomes 0x7F.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from .arithmetic import round_to, to_float32
from .routing import Plan, take_or_zero

__all__ = [
    "GROUP",
    "dequantize_1x128",
    "dequantize_128x128",
    "permute_quantized",
    "quantize_1x128",
    "quantize_128x128",
]

GROUP = 128
E4M3_MAX = 448
E4M3_NAN = 0x7F
PACKED = 4  # ue8m0 exponents in an int32, the lowest group in the lowest byte
COLUMN_ALIGNMENT = 4  # rows of a column-major scale are padded to a multiple


def quantize_1x128(
    x: NDArray, *, ue8m0: bool = False, scale_layout: str = "row", amax_min: float = 1e-4
) -> tuple[NDArray, NDArray]:
    """Return codes [T, H] in float8_e4m3fn and scales of ``x`` [T, H] in bfloat16, float16 or float32.

    With S = ceil(H / 128) and W = ceil(S / 4), the scales are float32 [T, S], or for ue8m0 int32 [T, W]; with
    scale_layout="col" float32 [S, ceil4(T)] or int32 [W, ceil4(T)], where ceil4 rounds up to a multiple of 4. Padding
    is 0.
    """
    codes, scales = _quantize(x, ue8m0, amax_min)
    return codes, _laid_out(scales, scale_layout)


def permute_quantized(
    x: NDArray, plan: Plan, *, ue8m0: bool = False, scale_layout: str = "row", amax_min: float = 1e-4
) -> tuple[NDArray, NDArray]:
    """Return codes [N, H] and scales of the permuted rows; codes and scales of padding rows are 0."""
    codes, scales = _quantize(x, ue8m0, amax_min)
    return take_or_zero(codes, plan.row_to_token), _laid_out(take_or_zero(scales, plan.row_to_token), scale_layout)


def dequantize_1x128(
    codes: NDArray, scales: NDArray, *, scale_layout: str = "row", dtype: DTypeLike = ml_dtypes.bfloat16
) -> NDArray:
    """Return RN(code * scale) in float32, rounded to ``dtype`` [N, H].

    int32 scales are packed ue8m0, in which an exponent of 0, as padding has, counts as a scale of 0.
    """
    num_rows, hidden = codes.shape
    by_row = scales.T[:num_rows] if scale_layout == "col" else scales
    if scales.dtype == np.int32:
        exponents = np.ascontiguousarray(by_row).view(np.uint8)
        by_row = (exponents.astype(np.uint32) << 23).view(np.float32)
    factors = np.repeat(by_row, GROUP, axis=1)[:, :hidden]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return round_to(to_float32(codes) * factors, dtype)


def quantize_128x128(w: NDArray, *, amax_min: float = 1e-4) -> tuple[NDArray, NDArray]:
    """Return codes and scales of stacked matrices, with 128 x 128 elements for a group, fewer at the ends.

    Transposed matrices have the transposed codes and scales.

    Args:
        w: [E, a, b] bfloat16, float16 or float32.
        amax_min: as in `quantize_1x128`.

    Returns:
        codes float8_e4m3fn [E, a, b], and scales float32 [E, ceil(a / 128), ceil(b / 128)].
    """
    experts, height, width = w.shape
    values, codes = to_float32(w), np.empty(w.shape, ml_dtypes.float8_e4m3fn)
    scales = np.empty((experts, -(-height // GROUP), -(-width // GROUP)), np.float32)
    for row, column in np.ndindex(scales.shape[1:]):
        place = np.s_[:, row * GROUP : (row + 1) * GROUP, column * GROUP : (column + 1) * GROUP]
        block = values[place]
        _, high, wide = block.shape
        made, scale, _ = _quantize_groups(block.reshape(experts, 1, high * wide), False, amax_min)
        codes[place], scales[:, row, column] = made.reshape(block.shape), scale[:, 0]
    return codes, scales


def dequantize_128x128(codes: NDArray, scales: NDArray, *, dtype: DTypeLike = ml_dtypes.bfloat16) -> NDArray:
    """Return RN(code * scale) in float32, rounded to ``dtype`` [E, a, b]."""
    _, height, width = codes.shape
    factors = np.repeat(np.repeat(scales, GROUP, axis=1)[:, :height], GROUP, axis=2)[:, :, :width]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return round_to(to_float32(codes) * factors, dtype)


def _quantize(x: NDArray, ue8m0: bool, amax_min: float) -> tuple[NDArray, NDArray]:
    """Codes, and scales by row."""
    num_rows, hidden = x.shape
    num_groups = -(-hidden // GROUP)
    groups = np.zeros((num_rows, num_groups * GROUP), np.float32)
    groups[:, :hidden] = to_float32(x)
    codes, scales, exponents = _quantize_groups(groups.reshape(num_rows, num_groups, GROUP), ue8m0, amax_min)
    codes = codes.reshape(num_rows, num_groups * GROUP)[:, :hidden].copy()
    return codes, scales if exponents is None else _packed(exponents)


def _quantize_groups(groups: NDArray, ue8m0: bool, amax_min: float) -> tuple[NDArray, NDArray, NDArray | None]:
    """Codes of float32 [M, S, elements of a group], the scales [M, S], and for ue8m0 their exponents."""
    magnitudes = np.where(np.isnan(groups), np.float32(0), np.abs(groups))
    amax = np.clip(magnitudes.max(axis=2, initial=0), np.float32(amax_min), np.finfo(np.float32).max)
    scales = amax / np.float32(E4M3_MAX)
    exponents = None
    if ue8m0:
        exponents = (scales.view(np.uint32) + 0x7FFFFF) >> 23
        scales = (exponents << 23).view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = groups * (np.float32(1) / scales)[:, :, None]
        # Clipping before rounding saturates: what lies beyond 448 would round to 448 or further.
        codes = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    bits = np.where(np.isnan(scaled), np.uint8(E4M3_NAN), codes.view(np.uint8))
    return bits.view(ml_dtypes.float8_e4m3fn), scales, exponents


def _packed(exponents: NDArray) -> NDArray:
    """Four exponents [N, S] to an int32 [N, ceil(S / 4)]."""
    num_rows, num_groups = exponents.shape
    as_bytes = np.zeros((num_rows, -(-num_groups // PACKED) * PACKED), np.uint8)
    as_bytes[:, :num_groups] = exponents
    return as_bytes.view("<i4")


def _laid_out(scales: NDArray, scale_layout: str) -> NDArray:
    """Scales by row in the layout that was asked for."""
    if scale_layout == "row":
        return scales
    num_rows, columns = scales.shape
    by_column = np.zeros((columns, -(-num_rows // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT), scales.dtype)
    by_column[:, :num_rows] = scales.T
    return by_column
