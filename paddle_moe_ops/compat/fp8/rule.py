# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 codes and scales by Paddle's rule, composed of Paddle's operators.

`paddle_moe_ops.reference.paddle_fp8` states the rule. These functions run on every device, outside static graphs, and
do not synchronise with the host. Their arguments are checked by the callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from ... import _checks
from ..._graphs import dense, filled, is_graph_value

__all__ = [
    "E4M3",
    "E5M2",
    "FLOAT32_MAX",
    "GROUP",
    "Format",
    "dequantized",
    "divided",
    "dygraph_tensor",
    "packed_exponents",
    "quantized",
    "unpacked_exponents",
]

GROUP = 128
_PACKED = 4  # ue8m0 exponents in an int32, the lowest group in the lowest byte
_NAN_CODE = 0x7F
_EXPONENT_BITS = 0x7F800000
_MANTISSA_SIZE = 23
_BFLOAT16_MAX = float.fromhex("0x1.FEp127")
FLOAT32_MAX = float.fromhex("0x1.FFFFFEp127")


class Format(NamedTuple):
    """A float8 dtype and its largest finite number."""

    dtype: Any
    largest: float


E4M3 = Format(paddle.float8_e4m3fn, 448.0)
E5M2 = Format(paddle.float8_e5m2, 57344.0)


def dygraph_tensor(function: str, argument: str, value: Any, dtypes: Sequence[Any], shape: Sequence[int | str]) -> Any:
    """Check a tensor as `_checks.tensor` does, and that it is no value of a static graph."""
    if is_graph_value(value):
        _checks.bad_type(function, argument, "a paddle.Tensor", "a value of a static graph, which is not supported")
    return _checks.tensor(function, argument, value, dtypes, shape)


def quantized(
    x: Tensor,
    tile_rows: int,
    pow2: bool,
    *,
    epsilon: float = 0.0,
    overflow: float = _BFLOAT16_MAX,
    format: Format = E4M3,
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix with ``tile_rows`` rows and 128 columns to a group; the last columns may be fewer.

    Args:
        x: [M, N] bfloat16, float16 or float32.
        tile_rows: a divisor of M.
        pow2: scales that are powers of two.
        epsilon: lower limit of amax.
        overflow: multiplier of a group whose own overflows.
        format: dtype of the codes.

    Returns:
        codes [M, N] and float32 scales [M / tile_rows, ceil(N / 128)].
    """
    num_rows, columns = x.shape
    high, wide = num_rows // tile_rows, -(-columns // GROUP)
    if min(num_rows, columns) == 0:
        return filled([num_rows, columns], 0, "float32", x).astype(format.dtype), filled([high, wide], 0, "float32", x)
    tiles = _in_float32(x).reshape([high, tile_rows, wide, GROUP])
    magnitudes = paddle.where(paddle.isnan(tiles), paddle.zeros_like(tiles), tiles.abs())
    amax = magnitudes.max(axis=[1, 3])
    multipliers = _multipliers(paddle.maximum(amax, paddle.full_like(amax, epsilon)), pow2, overflow, format.largest)
    scaled = (tiles * multipliers.reshape([high, 1, wide, 1])).reshape([num_rows, wide * GROUP])
    return _codes(dense(scaled[:, :columns]), format), divided(1.0, multipliers)


def _in_float32(matrix: Tensor) -> Tensor:
    """A matrix in float32, with columns of 0 up to a multiple of 128."""
    num_rows, columns = matrix.shape
    values = matrix.astype("float32")
    if columns % GROUP:
        values = paddle.concat([values, filled([num_rows, -columns % GROUP], 0, "float32", matrix)], axis=1)
    return values


def divided(dividend: float, divisors: Tensor) -> Tensor:
    """Quotients, correctly rounded.

    On a CPU, Paddle's division of two tensors of one shape may be off by the last bit, and numbers are multiplied by
    reciprocals. Broadcast tensors are divided as IEEE 754 does.
    """
    return paddle.divide(filled([], dividend, divisors.dtype, divisors), divisors)


def _multipliers(amax: Tensor, pow2: bool, overflow: float, largest: float) -> Tensor:
    """The factors of the data of groups."""
    found = divided(largest, amax)
    found = paddle.where(paddle.isinf(found), paddle.full_like(found, overflow), found)
    found = paddle.where(amax > 0, found, paddle.ones_like(found))  # to Paddle's ``==``, numbers below 1e-8 equal 0
    if pow2:
        bits = found.view("int32")
        found = paddle.bitwise_and(bits, paddle.full_like(bits, _EXPONENT_BITS)).view("float32")
    return found


def _codes(scaled: Tensor, format: Format) -> Tensor:
    """The nearest float8 numbers; Paddle's cast on a CPU is right only within the largest of them, and without NaN."""
    codes = scaled.clip(-format.largest, format.largest).astype(format.dtype).view("uint8").astype("int32")
    codes = paddle.where(paddle.isnan(scaled), paddle.full_like(codes, _NAN_CODE), codes)
    return codes.astype("uint8").view(format.dtype)


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 RN(code * scale) of codes [M, N] and float32 scales [M, ceil(N / 128)]."""
    if min(codes.shape) == 0:
        return filled(codes.shape, 0, "bfloat16", codes)
    num_rows, columns = codes.shape
    groups = _in_float32(codes).reshape([num_rows, -1, GROUP])
    return dense((groups * scales.unsqueeze(2)).reshape([num_rows, -1])[:, :columns]).astype("bfloat16")


def packed_exponents(scales: Tensor) -> Tensor:
    """The exponents of float32 scales [R, G], int32 [R, ceil(G / 4)]; unused bytes are 0."""
    rows, groups = scales.shape
    words = -(-groups // _PACKED)
    if min(rows, groups) == 0:
        return filled([rows, words], 0, "int32", scales)
    exponents = paddle.bitwise_right_shift(scales.view("int32"), paddle.full_like(scales, _MANTISSA_SIZE, "int32"))
    if groups % _PACKED:
        exponents = paddle.concat([exponents, filled([rows, words * _PACKED - groups], 0, "int32", scales)], axis=1)
    return exponents.astype("uint8").view("int32")


def unpacked_exponents(words: Tensor, groups: int) -> Tensor:
    """The float32 scales [R, groups] of packed exponents; an exponent of 0 is a scale of 0, and one of 255 is Inf."""
    if min(words.shape) == 0:
        return filled([words.shape[0], groups], 0, "float32", words)
    exponents = dense(words).view("uint8").astype("int32")
    bits = paddle.bitwise_left_shift(exponents, paddle.full_like(exponents, _MANTISSA_SIZE))
    return dense(bits.view("float32")[:, :groups])
