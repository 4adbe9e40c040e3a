# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices of experts as codes: their quantisation, and their values.

A matrix has D inputs and N outputs. ``int8`` and ``int4`` have one scale per output, ``int4_1x128`` one per output and
128 inputs, ``fp8_128x128`` one per 128 x 128 elements. The value of a code is RN(code * scale) in float32, rounded to
the dtype of the tokens that it is multiplied with.

Integer codes: the largest magnitude of a group, NaN left out and at most the largest finite number of the dtype, is
divided by 127 or 7 in float32, and the scale is this quotient rounded to the dtype of the matrix. A code is w / scale
in float32, rounded half away from zero and limited to 127 or 7. NaN, and all elements of a group of scale 0, have the
code 0. (This is the rule of paddle.nn.quant.weight_quantize on a CPU.)
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from .arithmetic import round_to, to_float32
from .quantization import dequantize_128x128, quantize_128x128

__all__ = ["MATRIX_FORMATS", "dequantize_matrices", "pack_int4", "quantize_matrices", "unpack_int4"]

MATRIX_FORMATS = ("int8", "int4", "int4_1x128", "fp8_128x128")
_GROUP = 128


def quantize_matrices(w: NDArray, *, format: str, transpose: bool = False) -> tuple[NDArray, NDArray]:
    """Return codes and scales of stacked matrices.

    Args:
        w: [E, D, N] bfloat16, float16 or float32; [E, N, D] with ``transpose``.
        format: one of ``MATRIX_FORMATS``.
        transpose: whether the matrices are stored transposed; codes and scales then are, too.

    Returns:
        codes: int8 [E, D, N]; int4 uint8 [E, 16 * ceil(D / 32), N], see `pack_int4`; fp8 float8_e4m3fn [E, D, N].
        scales: float32 [E, N], [E, ceil(D / 128), N] or [E, ceil(D / 128), ceil(N / 128)].
    """
    if format == "fp8_128x128":
        return quantize_128x128(w, amax_min=2.0**-100)
    plain = w.swapaxes(1, 2) if transpose else w
    limit = 127 if format == "int8" else 7
    values, (experts, inner, outer) = to_float32(plain), plain.shape
    height, groups = (_GROUP, -(-inner // _GROUP)) if format == "int4_1x128" else (inner, 1)
    filled = np.zeros((experts, groups * height, outer), np.float32)
    filled[:, :inner] = values
    filled = filled.reshape(experts, groups, height, outer)
    largest = float(ml_dtypes.finfo(w.dtype).max)
    amax = np.where(np.isnan(filled), np.float32(0), np.abs(filled)).max(axis=2, initial=0)
    scales = to_float32(round_to(np.minimum(amax, np.float32(largest)) / np.float32(limit), w.dtype))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotients = np.clip(filled / scales[:, :, None], -limit, limit)
    whole = np.trunc(quotients)
    rounded = whole + np.sign(quotients) * (np.abs(quotients - whole) >= 0.5)
    kept = np.isfinite(rounded) & (scales[:, :, None] > 0)
    codes = np.where(kept, rounded, 0).astype(np.int8).reshape(experts, groups * height, outer)[:, :inner]
    if format != "int8":
        codes = pack_int4(codes)
    if format != "int4_1x128":
        return (codes.swapaxes(1, 2) if transpose else codes), scales.reshape(experts, outer)
    return (codes.swapaxes(1, 2), scales.swapaxes(1, 2)) if transpose else (codes, scales)


def dequantize_matrices(
    codes: NDArray, scales: NDArray, *, format: str, inner: int, transpose: bool = False, dtype: DTypeLike
) -> NDArray:
    """Return RN(code * scale) in float32, rounded to ``dtype``: [E, D, N], or [E, N, D] with ``transpose``.

    Args:
        codes: as `quantize_matrices` returns them.
        scales: as `quantize_matrices` returns them.
        format: one of ``MATRIX_FORMATS``.
        inner: D, by which int4 codes of an odd D are known.
        transpose: whether codes and scales are stored transposed.
        dtype: bfloat16, float16 or float32.
    """
    if format == "fp8_128x128":
        return dequantize_128x128(codes, scales, dtype=dtype)
    if transpose:
        codes, scales = codes.swapaxes(1, 2), scales if scales.ndim == 2 else scales.swapaxes(1, 2)
    plain = codes if format == "int8" else unpack_int4(codes)[:, :inner]
    factors = np.repeat(scales, _GROUP, axis=1)[:, :inner] if format == "int4_1x128" else scales[:, None]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = round_to(plain.astype(np.float32) * factors, dtype)
    return values.swapaxes(1, 2) if transpose else values


def pack_int4(codes: NDArray) -> NDArray:
    """Two int4 codes to a byte along axis 1, in the order of the lanes that read them: uint8 [E, 16 * ceil(D / 32), N].

    Byte j of 32 inputs has the code of input 16 * (j % 2) + j // 2 in the low half, and of the input 8 further in the
    high half. Codes after the last input are 0.

    Args:
        codes: [E, D, N] of integers from -8 to 7.
    """
    if not isinstance(codes, np.ndarray):
        raise TypeError(f"pack_int4: codes must be a NumPy array, but got {type(codes).__name__}")
    if not np.issubdtype(codes.dtype, np.integer):
        raise TypeError(f"pack_int4: codes must be of integers, but got {codes.dtype}")
    if codes.size and not -8 <= codes.min() <= codes.max() <= 7:
        raise ValueError(f"pack_int4: codes must be from -8 to 7, but got {codes.min()} to {codes.max()}")
    experts, inner, outer = codes.shape
    blocks = -(-inner // 32)
    filled = np.zeros((experts, blocks * 32, outer), np.uint8)
    filled[:, :inner] = codes.astype(np.int8).view(np.uint8) & 15
    groups, halves = 2, 2
    halved = filled.reshape(experts, blocks, groups, halves, 8, outer)
    packed = halved[:, :, :, 0] | halved[:, :, :, 1] << 4
    return packed.swapaxes(2, 3).reshape(experts, blocks * 16, outer)


def unpack_int4(packed: NDArray) -> NDArray:
    """The codes of `pack_int4`: int8 [E, 2 * rows, N]."""
    experts, rows, outer = packed.shape
    blocks = packed.view(np.uint8).reshape(experts, rows // 16, 8, 2, outer).swapaxes(2, 3)
    halves = np.stack([blocks & 15, blocks >> 4], axis=3).astype(np.int8)
    return (halves - (halves & 8) * 2).reshape(experts, 2 * rows, outer)
