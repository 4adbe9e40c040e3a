# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's codes of rows and of matrices.

Sources: FastDeploy's custom_ops/gpu_ops/moe and per_token_quant_fp8.cu, and the layouts of Paddle's weight_quantize.
All are exact.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from .activations import activate
from .arithmetic import round_to, to_float32

__all__ = [
    "dequantize_weights",
    "mask_swiglu_quant",
    "masked_quant",
    "pack_weights",
    "quantize_groups",
    "quantize_rows",
    "quantize_weights",
]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX, E4M3_NAN = np.float32(448), np.uint8(0x7F)


def quantize_rows(rows: NDArray, scale: NDArray | None, quant_type: str) -> tuple[NDArray, NDArray | None]:
    """Return rows for w4a8 and w4afp8, and the largest magnitude of each row where w4afp8 has no scale.

    w4a8: clip(127 * scale * x, +-127), rounded, halves away from 0. w4afp8: e4m3 of 448 * scale * x, or of
    x * (440 / amax). w4a8 without a scale and all other methods: the rows.
    """
    wide = to_float32(rows)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if quant_type == "w4a8" and scale is not None:
            scaled = np.clip(wide * (scale * np.float32(127))[:, None], -127, 127)
            return np.where(np.isnan(scaled), 0, _half_away(scaled)).astype(np.int8), None
        if quant_type != "w4afp8":
            return rows, None
        if scale is not None:
            return _e4m3(wide * (scale * np.float32(448))[:, None]), None
        amax = np.where(np.isnan(wide), np.float32(0), np.abs(wide)).max(axis=1)
        return _e4m3(wide * (np.float32(440) / np.where(amax == 0, np.float32(1), amax))[:, None]), amax


def quantize_groups(
    x: NDArray,
    block_size: int,
    ue8m0: bool,
    *,
    offset: float = 0.0,
    by_reciprocal: bool = False,
) -> tuple[NDArray, NDArray]:
    """Return codes [..., H] and scales of groups of columns: float32 [..., S], or int32 [..., ceil(S / 4)].

    a = max(max|x| without NaN, 1e-10). float32: scale a / 448, code e4m3(x * 448 / a), or x * 448 * (1 / a). ue8m0:
    scale 2 ** ceil(log2(max(a / 448, 1e-10) + offset)), code e4m3(x / scale), the exponent's byte.
    """
    wide = to_float32(x)
    groups = -(-wide.shape[-1] // block_size)
    filled = np.zeros((*wide.shape[:-1], groups * block_size), np.float32)
    filled[..., : wide.shape[-1]] = wide
    filled = filled.reshape(*wide.shape[:-1], groups, block_size)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        amax = np.where(np.isnan(filled), np.float32(0), np.abs(filled)).max(axis=-1)
        amax = np.maximum(amax, np.float32(1e-10))
        scales = amax / E4M3_MAX
        if ue8m0:
            fractions, exponents = np.frexp(np.maximum(scales, np.float32(1e-10)) + np.float32(offset))
            exponents = np.where(np.isinf(amax), 128, exponents - (fractions == 0.5))
            scaled = filled / np.exp2(exponents.astype(np.float32))[..., None]
            as_bytes = np.zeros((*scales.shape[:-1], -(-groups // 4) * 4), np.uint8)
            as_bytes[..., :groups] = exponents + 127
            scales = as_bytes.view("<i4")
        elif by_reciprocal:
            scaled = filled * E4M3_MAX * (np.float32(1) / amax)[..., None]
        else:
            scaled = filled * E4M3_MAX / amax[..., None]
    codes = _e4m3(scaled).reshape(*wide.shape[:-1], groups * block_size)[..., : wide.shape[-1]]
    return codes, scales


def masked_quant(
    x: NDArray, counts: NDArray, block_size: int, ue8m0: bool, by_reciprocal: bool = False
) -> tuple[NDArray, NDArray]:
    """Return `quantize_groups` of the first rows of each expert [E, C, H], and 0 in the other rows."""
    codes, scales = quantize_groups(x, block_size, ue8m0, by_reciprocal=by_reciprocal)
    is_used = np.arange(x.shape[1]) < counts[:, None]
    codes = np.where(is_used[..., None], codes.view(np.uint8), np.uint8(0)).view(E4M3)
    return codes, np.where(is_used[..., None], scales, scales.dtype.type(0))


def mask_swiglu_quant(x: NDArray, counts: NDArray, block_size: int, ue8m0: bool) -> tuple[NDArray, NDArray]:
    """Return `masked_quant` of silu(first half) * second half, rounded to the dtype of x [E, C, 2 * I] before."""
    gated = activate(x.reshape(-1, x.shape[2]), "swiglu").reshape(*x.shape[:2], x.shape[2] // 2)
    return masked_quant(gated, counts, block_size, ue8m0, by_reciprocal=True)


def quantize_weights(w: NDArray, bits: int) -> tuple[NDArray, NDArray]:
    """Return codes int8 [E, in, out] and scales [E, out] in the dtype of w [E, in, out].

    The scale is max|w| of a column over 127 or 7, rounded to the dtype; the code is w over the rounded scale, rounded,
    halves away from 0.
    """
    largest = np.float32(127 if bits == 8 else 7)
    scales = round_to(np.abs(to_float32(w)).max(axis=1) / largest, w.dtype)
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = _half_away(to_float32(w) / to_float32(scales)[:, None])
    return np.clip(np.nan_to_num(codes), -largest, largest).astype(np.int8), scales


def dequantize_weights(codes: NDArray, scales: NDArray, dtype: DTypeLike) -> NDArray:
    """Return code * scale in float32, rounded to the dtype; scales [E, out] or [E, groups of rows, out]."""
    wide = to_float32(scales)
    wide = wide[:, None] if wide.ndim == 2 else np.repeat(wide, codes.shape[1] // wide.shape[1], axis=1)
    return round_to(codes.astype(np.float32) * wide, dtype)


def pack_weights(codes: NDArray, bits: int) -> NDArray:
    """Return codes int8 [E, in, out] in the bytes of weight_quantize for compute capability 7.5 and above.

    1. In each block of 8 * (16 / bits) rows, with P = 32 / bits, new row r is old row
       8 * ((r % P) // 2) + r % 2 + 2 * (r // P).
    2. Transposed; then tiles of 64 codes of L = 1024 / bits / 64 neighbouring outputs alternate.
    3. Stored with 128 or 8 added. int8: of 4 bytes the middle two are swapped; int4: 8 codes in the order
       0, 2, 4, 6, 1, 3, 5, 7, two to a byte, the first in the lower half.
    """
    experts, inner, outer = codes.shape
    block, pairs, interleaved = 8 * (16 // bits), 32 // bits, 1024 // bits // 64
    old_rows = []
    for row in range(inner):
        first, r = row - row % block, row % block
        old_rows.append(first + 8 * ((r % pairs) // 2) + r % 2 + 2 * (r // pairs))
    transposed = codes[:, old_rows].swapaxes(1, 2)
    flat = np.zeros((experts, outer * inner), np.int64)
    for output, row in np.ndindex(outer, inner):
        group, place, tile = output // interleaved, output % interleaved, row // 64
        index = group * interleaved * inner + (tile * interleaved + place) * 64 + row % 64
        flat[:, index] = transposed[:, output, row]
    order = [0, 2, 1, 3] if bits == 8 else [0, 2, 4, 6, 1, 3, 5, 7]
    stored = (flat + (128 if bits == 8 else 8)).reshape(experts, -1, len(order))[..., order].reshape(experts, -1)
    if bits == 4:
        stored = stored[:, 0::2] + 16 * stored[:, 1::2]
    return stored.astype(np.uint8).view(np.int8).reshape(experts, outer * bits // 8, inner)


def _half_away(x: NDArray) -> NDArray:
    whole = np.trunc(x)
    return whole + np.sign(x) * (np.abs(x - whole) >= 0.5)


def _e4m3(x: NDArray) -> NDArray:
    """The nearest code, ties to even; beyond 448 it is 448, and NaN is 0x7F."""
    codes = np.clip(x, -E4M3_MAX, E4M3_MAX).astype(E4M3).view(np.uint8)
    return np.where(np.isnan(x), E4M3_NAN, codes).view(E4M3)
