# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""float8 and int8 codes of rows, and scales in the layouts of FastDeploy's GEMMs, by Paddle's operators."""

from __future__ import annotations

import math
from typing import Any

import paddle
from paddle import Tensor

from ..._graphs import beside, dense, filled, float32, is_graph_value

__all__ = ["GROUP", "by_column", "ceil_to", "quantize_groups", "quantize_rows", "times", "to_e4m3"]

GROUP = 128
_LARGEST = 448.0
_NAN = 0x7F
_AMAX_MIN = 1e-10
_MANTISSA = 2**23
_PACKED = 4  # ue8m0 exponents in an int32, the lowest group in the lowest byte
_INT8_LARGEST = 127.0
_DYNAMIC_LARGEST = 440.0  # of rows of w4afp8 that bring their own scale


def to_e4m3(values: Tensor) -> Tensor:
    """The float8_e4m3fn codes of float32 numbers: nearest, ties to even, 448 beyond it, 0x7F for NaN.

    Paddle's cast on a CPU has other codes for infinities, NaN and numbers beyond 464.
    """
    codes = values.clip(-_LARGEST, _LARGEST).astype("float8_e4m3fn").view("uint8").astype("int32")
    codes = paddle.where(paddle.isnan(values), paddle.full_like(codes, _NAN), codes)
    return codes.astype("uint8").view("float8_e4m3fn")


def quantize_rows(rows: Tensor, scale_of_row: Tensor | None, quant_type: str) -> tuple[Tensor, Tensor | None]:
    """Rows as w4a8 or w4afp8 multiplies them; other methods, and w4a8 without a scale, leave them as they are.

    Args:
        rows: [N, H].
        scale_of_row: float32 [N], or None.
        quant_type: the method of the experts.

    Returns:
        int8 codes, float8 codes or the rows [N, H]; float32 [N] the largest magnitude of each row if w4afp8 has no
        scale, otherwise None.
    """
    if quant_type == "w4a8" and scale_of_row is not None:
        scaled = float32(rows) * (scale_of_row * _INT8_LARGEST).unsqueeze(-1)
        return _half_away(scaled.clip(-_INT8_LARGEST, _INT8_LARGEST)).astype("int8"), None
    if quant_type != "w4afp8":
        return rows, None
    if scale_of_row is not None:
        return to_e4m3(float32(rows) * (scale_of_row * _LARGEST).unsqueeze(-1)), None
    wide = float32(rows)
    amax = _magnitudes(wide).max(-1)
    factor = _DYNAMIC_LARGEST / paddle.where(amax == 0, paddle.ones_like(amax), amax)
    return to_e4m3(wide * factor.unsqueeze(-1)), amax


def quantize_groups(
    values: Tensor,
    block_size: int,
    use_ue8m0: bool,
    *,
    offset: float = 0.0,
    by_reciprocal: bool = False,
    is_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """float8 codes with a scale for each group of columns, the last of which may be shorter.

    With amax = max(largest magnitude without NaN, 1e-10), the scale is amax / 448 and the code that of
    x * 448 / amax. With ue8m0 the scale is the least power of two that is not less than
    max(amax / 448, 1e-10) + offset, and the code that of x / scale.

    Args:
        values: float32 [..., H].
        block_size: columns of a group.
        use_ue8m0: whether scales are powers of two, whose exponents are packed.
        offset: added before the power of two is chosen.
        by_reciprocal: whether codes are those of x * 448 * (1 / amax).
        is_row: bool [...], or None: codes and scales of other rows are 0.

    Returns:
        codes [..., H], and scales: float32 [..., S], or with ue8m0 int32 [..., ceil(S / 4)].
    """
    hidden = values.shape[-1]
    groups = _padded(values, ceil_to(hidden, block_size)).reshape([*values.shape[:-1], -1, block_size])
    amax = _at_least(_magnitudes(groups).max(-1), _AMAX_MIN)
    scales = amax / _LARGEST
    if use_ue8m0:
        # The exponent of the next power of two: a mantissa above 0 carries.
        bits = (_at_least(scales, _AMAX_MIN) + offset).view("int32") + (_MANTISSA - 1)
        scales = bits // _MANTISSA
        scaled = groups / (scales * _MANTISSA).view("float32").unsqueeze(-1)
    elif by_reciprocal:
        scaled = times(groups, _LARGEST) * (1.0 / amax).unsqueeze(-1)
    else:
        scaled = times(groups, _LARGEST) / amax.unsqueeze(-1)
    if is_row is not None:
        scaled = paddle.where(is_row.unsqueeze(-1).unsqueeze(-1), scaled, paddle.zeros_like(scaled))
        scales = paddle.where(is_row.unsqueeze(-1), scales, paddle.zeros_like(scales))
    codes = to_e4m3(scaled).flatten(-2)[..., :hidden]
    return dense(codes), _packed(scales) if use_ue8m0 else scales


def by_column(scales: Tensor, num_rows: int, *, keeps_padding: bool = False) -> Tensor:
    """The same scales [..., R, S] stored column by column, each of at least num_rows entries.

    Args:
        scales: by row.
        num_rows: the entries of a column; those beyond R are 0.
        keeps_padding: whether the result has these rows too.
    """
    if is_graph_value(scales):
        return scales  # a graph has no strides
    rows = scales.shape[-2]
    order = [*range(scales.ndim - 2), scales.ndim - 1, scales.ndim - 2]
    stored = dense(_padded(scales.transpose(order), num_rows)).transpose(order)
    return stored if keeps_padding else stored[..., :rows, :]


def times(values: Tensor, factor: float) -> Tensor:
    """The products; Paddle's operator for a number as a factor also adds 0, which turns -0.0 into 0.0."""
    return values * filled([1], factor, values.dtype, values)


def ceil_to(number: int, multiple: int) -> int:
    """The number rounded up to a multiple."""
    return -(-number // multiple) * multiple


def _magnitudes(values: Tensor) -> Tensor:
    """Absolute values, 0 for NaN."""
    return paddle.where(paddle.isnan(values), paddle.zeros_like(values), values.abs())


def _at_least(values: Tensor, least: float) -> Tensor:
    """The larger one; Paddle's clip turns infinity into the largest finite number."""
    return paddle.maximum(values, paddle.full_like(values, least))


def _half_away(values: Tensor) -> Tensor:
    """Numbers below 2^22 rounded to integers, halves away from zero; 0 for NaN."""
    whole = values.trunc()
    whole = whole + paddle.sign(values) * ((values - whole).abs() >= 0.5).astype(values.dtype)
    return paddle.where(paddle.isnan(values), paddle.zeros_like(values), whole)


def _padded(values: Tensor, length: int) -> Tensor:
    """The values with zeros up to a length of the last dimension."""
    missing = length - values.shape[-1]
    if missing == 0:
        return values
    zeros: Any = paddle.zeros([*values.shape[:-1], missing], values.dtype)
    return paddle.concat([values, beside(zeros, values)], -1)


def _packed(exponents: Tensor) -> Tensor:
    """int32 [..., ceil(S / 4)] of exponents [..., S]."""
    length = ceil_to(exponents.shape[-1], _PACKED)
    words = [*exponents.shape[:-1], length // _PACKED]
    if math.prod(words) == 0:
        return exponents.reshape(words)
    return _padded(exponents, length).astype("uint8").view("int32").reshape(words)
