# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of gated experts, with gradients: GEMMs in float64, rounded where a backend stores a result in memory.

The order of additions in a GEMM is free, so a backend agrees within a tolerance; if all sums are exact, the bits must
agree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .activations import activate, activation_factors
from .arithmetic import round_float64
from .gemm import grouped_gemm, grouped_gemm_backward
from .permutation import sum_rows
from .routing import Plan, take_or_zero

__all__ = ["MlpGradients", "moe_mlp", "moe_mlp_backward"]


class MlpGradients(NamedTuple):
    """Gradients of `moe_mlp`, each in the dtype of its operand."""

    x: NDArray
    gate_up: NDArray
    down: NDArray
    weights: NDArray | None
    gate_up_bias: NDArray | None
    down_bias: NDArray | None


def moe_mlp(
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
        x: [T, d] tokens; float64 stays float64.
        plan: their rows.
        gate_up: [E, d, 2n], the gate's columns first, or [E, 2n, d] with ``transpose``.
        down: [E, n, d], or [E, d, n].
        weights: float32 [M] by row, or None.
        transpose: whether the matrices are stored transposed.
        activation: one of `activations.ACTIVATIONS`.
        gate_up_bias: [E, 2n], added to the first GEMM's output, or None.
        down_bias: [E, d], added to the second GEMM's output before it is weighted, or None.

    Returns:
        [T, d], and the rows before the activation, [M, 2n], 0 in rows of no token.
    """
    counts = list(plan.tokens_per_expert)
    groups: dict[str, Any] = {"transpose": transpose, "expert_offsets": list(plan.expert_offsets)}
    hidden = grouped_gemm(x, gate_up, counts, row_to_token=plan.row_to_token, bias=gate_up_bias, **groups)
    rows = grouped_gemm(activate(hidden, activation), down, counts, weights=weights, bias=down_bias, **groups)
    return sum_rows(rows, plan.token_rows), hidden


def moe_mlp_backward(
    d_out: NDArray,
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
) -> MlpGradients:
    """Return the gradients of `moe_mlp`, by the GEMMs that a backend runs: no row of the result is needed."""
    groups: dict[str, Any] = {"transpose": transpose, "expert_offsets": list(plan.expert_offsets)}
    counts, dtype, owners = list(plan.tokens_per_expert), x.dtype, plan.row_to_token
    options: dict[str, Any] = {"activation": activation, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    _, hidden = moe_mlp(x, plan, gate_up, down, weights, transpose=transpose, **options)
    act = activate(hidden, activation).astype(np.float64)
    # The gradient of the weighted rows, the second GEMM's operand.
    d_scaled = grouped_gemm(
        d_out, down, counts, not transpose, expert_offsets=list(plan.expert_offsets), row_to_token=owners
    )
    d_scaled = d_scaled.astype(np.float64)
    factors = np.where(owners >= 0, 1.0 if weights is None else weights, 0.0)[:, None]
    d_rows = take_or_zero(d_out, owners)
    _, d_down = grouped_gemm_backward(d_rows, round_float64(act * factors, dtype), down, counts, **groups)
    to_gate, to_up = activation_factors(hidden, activation)
    d_hidden = np.concatenate([d_scaled * factors * to_gate, d_scaled * factors * to_up], axis=1)
    d_hidden = round_float64(d_hidden, dtype)
    d_rows_of_x, d_gate_up, *first = grouped_gemm_backward(
        d_hidden, take_or_zero(x, owners), gate_up, counts, bias=gate_up_bias, **groups
    )
    d_weights, d_down_bias = (act * d_scaled).sum(axis=1), None
    if down_bias is not None:
        to_weights, d_down_bias = gradients_of_bias(d_rows, down_bias, factors, plan)
        d_weights += to_weights
    d_weights = None if weights is None else round_float64(d_weights, weights.dtype)
    d_x = sum_rows(d_rows_of_x, plan.token_rows)
    return MlpGradients(d_x, d_gate_up, d_down, d_weights, first[0] if first else None, d_down_bias)


def gradients_of_bias(d_rows: NDArray, bias: NDArray, factors: NDArray, plan: Plan) -> tuple[NDArray, NDArray]:
    """Return the share of [E, d] biases, added before rows are weighted, in the weights' gradients, and their gradient.

    Args:
        d_rows: gradients of the weighted rows, [M, d].
        bias: the biases.
        factors: weights [M, 1], 0 in rows of no token.
        plan: the rows.
    """
    wide, live = d_rows.astype(np.float64), plan.row_to_token >= 0
    sums = np.zeros(bias.shape)
    np.add.at(sums, plan.row_to_expert[live], (wide * factors)[live])
    by_row = take_or_zero(bias, plan.row_to_expert).astype(np.float64)
    return (wide * by_row).sum(axis=1), round_float64(sums, bias.dtype)
