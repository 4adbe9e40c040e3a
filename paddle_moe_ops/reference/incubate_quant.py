# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 rows by the rule of Paddle's quantisation, in NumPy.

For each 128 columns of a row, with every operation rounded to float32: ``a`` is the largest magnitude, NaN left out,
and s = 448 / a multiplies the row; s is 1 if a is 0, and the largest bfloat16 number if the quotient overflows. With
powers of two, only its exponent is kept. The scale is 1 / s. Codes are rounded to the nearest, ties to even, and
saturate; NaN is 0x7F.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .arithmetic import to_float32
from .incubate import moe_gate_dispatch
from .quantization import E4M3_MAX, E4M3_NAN, GROUP

__all__ = ["moe_gate_dispatch_and_quant", "quantize_by_quotient"]

_LARGEST = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def quantize_by_quotient(x: NDArray, use_pow2_scale: bool) -> tuple[NDArray, NDArray]:
    """Return codes float8_e4m3fn [T, H] and scales float32 [T, H / 128] of ``x`` [T, H], H a multiple of 128."""
    num_tokens, hidden = x.shape
    groups = to_float32(x).reshape(num_tokens, hidden // GROUP, GROUP)
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        amax = np.where(np.isnan(groups), np.float32(0), np.abs(groups)).max(axis=2, initial=0)
        factors = np.float32(E4M3_MAX) / amax
        factors = np.where(np.isinf(factors), _LARGEST, factors)
        factors = np.where(amax == 0, np.float32(1), factors)
        if use_pow2_scale:
            factors = (factors.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
        scaled = groups * factors[:, :, None]
        codes = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        bits = np.where(np.isnan(scaled), np.uint8(E4M3_NAN), codes)
        return bits.reshape(x.shape).view(ml_dtypes.float8_e4m3fn), np.float32(1) / factors


def moe_gate_dispatch_and_quant(
    x: NDArray,
    gate_logits: NDArray,
    corr_bias: NDArray | None,
    k: int,
    capacity: int,
    use_pad: bool,
    use_pow2_scale: bool,
) -> tuple[NDArray, ...]:
    """Return the codes and scales of the rows of `moe_gate_dispatch`, and its other results.

    Rows of no slot are zeros there, so their codes are 0 and their scales 1.
    """
    rows, *others = moe_gate_dispatch(x, gate_logits, corr_bias, k, capacity, use_pad)
    return *quantize_by_quotient(rows, use_pow2_scale), *others
