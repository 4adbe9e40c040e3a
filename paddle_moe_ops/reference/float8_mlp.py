# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of gated experts whose GEMMs have float8 operands, with gradients.

Rows are quantised for each 128 columns, matrices for each 128 x 128 elements. Both GEMMs of the forward pass, and the
dgrad GEMMs, multiply quantised values. The wgrad GEMMs have operands in the tokens' dtype, as in `mlp`, unless
``float8_wgrads``: K is then the rows of an expert, so activations are quantised for each 128 rows of a column, and
gradients for each 128 x 128 elements, from the expert's first row on; a group with an infinity becomes NaN. Values that
a backend keeps in memory are rounded to that dtype first, and quantised from it. The derivative of quantising counts
as 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .activations import activate, activation_factors
from .arithmetic import round_float64
from .gemm import grouped_gemm, grouped_gemm_backward
from .mlp import MlpGradients, gradients_of_bias
from .permutation import sum_rows
from .quantization import GROUP, dequantize_1x128, dequantize_128x128, quantize_1x128, quantize_128x128
from .routing import Plan, take_or_zero

__all__ = ["FLOAT8_AMAX_MIN", "moe_mlp_float8", "moe_mlp_float8_backward"]

# The smallest ``amax_min`` of `quantize_1x128`, since gradients may be small.
FLOAT8_AMAX_MIN = 2.0**-100


def moe_mlp_float8(
    x: NDArray,
    plan: Plan,
    gate_up: NDArray,
    down: NDArray,
    weights: NDArray | None = None,
    *,
    transpose: bool = False,
    activation: str = "swiglu",
    gate_up_bias: NDArray | None = None,
    down_bias: NDArray | None = None,
) -> tuple[NDArray, NDArray]:
    """Return the weighted sum of each token's expert outputs, and the first GEMM's output.

    Args:
        x: [T, d] tokens, bfloat16, float16 or float32.
        plan: their rows.
        gate_up: [E, d, 2n], the gate's columns first, or [E, 2n, d] with ``transpose``.
        down: [E, n, d], or [E, d, n].
        weights: float32 [M] by row, or None.
        transpose: whether the matrices are stored transposed.
        activation: one of `activations.ACTIVATIONS`.
        gate_up_bias: [E, 2n], added to the first GEMM's output in float64, or None.
        down_bias: [E, d], added to the second GEMM's output before it is weighted, or None.

    Returns:
        [T, d], and the rows before the activation, [M, 2n], 0 in rows of no token.
    """
    options: dict[str, Any] = {"transpose": transpose, **_groups(plan)}
    first: dict[str, Any] = {"row_to_token": plan.row_to_token, "bias": gate_up_bias}
    hidden = round_float64(grouped_gemm(_rows(x), _matrices(gate_up), **first, **options), x.dtype)
    second: dict[str, Any] = {"weights": weights, "bias": down_bias}
    rows = grouped_gemm(_rows(activate(hidden, activation)), _matrices(down), **second, **options)
    return sum_rows(round_float64(rows, x.dtype), plan.token_rows), hidden


def moe_mlp_float8_backward(
    d_out: NDArray,
    x: NDArray,
    plan: Plan,
    gate_up: NDArray,
    down: NDArray,
    weights: NDArray | None = None,
    *,
    transpose: bool = False,
    hidden_in_float8: bool = False,
    float8_wgrads: bool = False,
    activation: str = "swiglu",
    gate_up_bias: NDArray | None = None,
    down_bias: NDArray | None = None,
) -> MlpGradients:
    """Return the gradients of `moe_mlp_float8`, by the GEMMs that a backend runs.

    With ``hidden_in_float8`` a backend has kept the first GEMM's output in float8: its rows are quantised, and codes
    times scales are rounded to the tokens' dtype. ``float8_wgrads``: see above; not with biases.
    """
    groups, owners, dtype = _groups(plan), plan.row_to_token, x.dtype
    options: dict[str, Any] = {"transpose": transpose, "activation": activation, "gate_up_bias": gate_up_bias}
    _, hidden = moe_mlp_float8(x, plan, gate_up, down, weights, **options)
    if hidden_in_float8:
        hidden = dequantize_1x128(*quantize_1x128(hidden, amax_min=FLOAT8_AMAX_MIN), dtype=dtype)
    act = activate(hidden, activation).astype(np.float64)
    d_scaled = grouped_gemm(_rows(d_out), _matrices(down), transpose=not transpose, row_to_token=owners, **groups)
    factors = np.where(owners >= 0, 1.0 if weights is None else weights, 0.0)[:, None]
    to_gate, to_up = activation_factors(hidden, activation)
    d_hidden = np.concatenate([d_scaled * factors * to_gate, d_scaled * factors * to_up], axis=1)
    d_hidden = round_float64(d_hidden, dtype)
    scaled = round_float64(act * factors, dtype)
    layout: dict[str, Any] = {"transpose": transpose, **groups}
    d_rows_out, x_rows = take_or_zero(d_out, owners), take_or_zero(x, owners)
    activations, gradients = [scaled, x_rows], [d_rows_out, d_hidden]
    if float8_wgrads:
        activations = [_row_blocks(each, plan, by_blocks=False) for each in activations]
        gradients = [_row_blocks(each, plan, by_blocks=True) for each in gradients]
    _, d_down = grouped_gemm_backward(gradients[0], activations[0], down, **layout)
    _, d_gate_up, *of_bias = grouped_gemm_backward(gradients[1], activations[1], gate_up, bias=gate_up_bias, **layout)
    d_rows = grouped_gemm(_rows(d_hidden), _matrices(gate_up), transpose=not transpose, **groups)
    d_x = sum_rows(round_float64(d_rows, dtype), plan.token_rows)
    d_weights, d_down_bias = (act * d_scaled).sum(axis=1), None
    if down_bias is not None:
        to_weights, d_down_bias = gradients_of_bias(d_rows_out, down_bias, factors, plan)
        d_weights += to_weights
    d_weights = None if weights is None else round_float64(d_weights, weights.dtype)
    return MlpGradients(d_x, d_gate_up, d_down, d_weights, of_bias[0] if of_bias else None, d_down_bias)


def _groups(plan: Plan) -> dict[str, Any]:
    return {"m_sizes": list(plan.tokens_per_expert), "expert_offsets": list(plan.expert_offsets)}


def _rows(x: NDArray) -> NDArray:
    """Quantised values, in float64."""
    return dequantize_1x128(*quantize_1x128(x, amax_min=FLOAT8_AMAX_MIN), dtype=np.float32).astype(np.float64)


def _row_blocks(rows: NDArray, plan: Plan, *, by_blocks: bool) -> NDArray:
    """Quantised values of an operand of wgrads, in float64: by columns of 128 rows, or by 128 x 128 elements."""
    values = np.zeros(rows.shape)
    for start, size in zip(plan.expert_offsets, plan.tokens_per_expert, strict=False):
        of_expert, made = rows[start : start + size], values[start : start + size]
        made[...] = _matrices(of_expert[None])[0] if by_blocks else _rows(of_expert.T).T
        for row, column in zip(*np.nonzero(np.isinf(of_expert.astype(np.float32))), strict=True):
            first, left = row // GROUP * GROUP, column // GROUP * GROUP if by_blocks else column
            made[first : first + GROUP, left : left + (GROUP if by_blocks else 1)] = np.nan
    return values


def _matrices(w: NDArray) -> NDArray:
    return dequantize_128x128(*quantize_128x128(w, amax_min=FLOAT8_AMAX_MIN), dtype=np.float32).astype(np.float64)
