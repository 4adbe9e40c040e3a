# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""ERNIE's dispatch with float8 rows, in NumPy."""

from __future__ import annotations

from numpy.typing import NDArray

from .incubate import moe_gate_dispatch
from .paddle_fp8 import fp8_quant_blockwise

__all__ = ["moe_gate_dispatch_and_quant"]


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
    quantized = fp8_quant_blockwise(rows, output_scale_transpose=False, using_pow2_scale=use_pow2_scale)
    return *quantized, *others
