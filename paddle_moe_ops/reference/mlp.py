# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of SwiGLU experts, with gradients: products in float64, rounded where a backend keeps a result in memory.

The order of additions in a matrix product is free, so a backend meets it within a tolerance; the same bits are due
where all sums are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arithmetic import round_float64
from .gemm import grouped_gemm, grouped_gemm_backward
from .permutation import sum_rows
from .routing import Plan, take_or_zero

__all__ = ["MlpGradients", "moe_mlp", "moe_mlp_backward", "swiglu"]


class MlpGradients(NamedTuple):
    """In the dtypes of what they are the gradients of."""

    x: NDArray
    gate_up: NDArray
    down: NDArray
    weights: NDArray | None


def swiglu(hidden: NDArray) -> NDArray:
    """``silu(gate) * up`` of the halves of the columns, in the dtype of ``hidden``."""
    gate, up = np.split(hidden.astype(np.float64), 2, axis=1)
    return round_float64(gate * _sigmoid(gate) * up, hidden.dtype)


def _sigmoid(x: NDArray) -> NDArray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def moe_mlp(
    x: NDArray, plan: Plan, gate_up: NDArray, down: NDArray, weights: NDArray | None = None, *, transpose: bool = False
) -> tuple[NDArray, NDArray]:
    """Return what the experts of each token make of it, weighted and added up, and the first product.

    Args:
        x: [T, d] tokens; float64 stays float64.
        plan: where their rows are.
        gate_up: [E, d, 2n], the gate's columns first, or [E, 2n, d] with ``transpose``.
        down: [E, n, d], or [E, d, n].
        weights: float32 [M] by row, or None.
        transpose: whether the matrices are stored transposed.

    Returns:
        [T, d], and the rows before SwiGLU, [M, 2n], 0 in rows of no token.
    """
    groups: dict[str, Any] = {"transpose": transpose, "expert_offsets": list(plan.expert_offsets)}
    hidden = grouped_gemm(x, gate_up, list(plan.tokens_per_expert), row_to_token=plan.row_to_token, **groups)
    rows = grouped_gemm(swiglu(hidden), down, list(plan.tokens_per_expert), weights=weights, **groups)
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
) -> MlpGradients:
    """Return the gradients of `moe_mlp`, by the products that a backend makes: no row of the result is needed."""
    groups: dict[str, Any] = {"transpose": transpose, "expert_offsets": list(plan.expert_offsets)}
    counts, dtype, owners = list(plan.tokens_per_expert), x.dtype, plan.row_to_token
    _, hidden = moe_mlp(x, plan, gate_up, down, weights, transpose=transpose)
    act = swiglu(hidden).astype(np.float64)
    # Of the weighted rows that the second matrices multiply.
    d_scaled = grouped_gemm(
        d_out, down, counts, not transpose, expert_offsets=list(plan.expert_offsets), row_to_token=owners
    )
    d_scaled = d_scaled.astype(np.float64)
    live = owners >= 0
    factors = np.where(live, 1.0 if weights is None else weights, 0.0)[:, None]
    d_rows = take_or_zero(d_out, owners)
    _, d_down = grouped_gemm_backward(d_rows, round_float64(act * factors, dtype), down, counts, **groups)
    gate, up = np.split(hidden.astype(np.float64), 2, axis=1)
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_scaled * factors * up * (sigmoid + silu * (1 - sigmoid))
    d_hidden = round_float64(np.concatenate([d_gate, d_scaled * factors * silu], axis=1), dtype)
    d_rows_of_x, d_gate_up = grouped_gemm_backward(d_hidden, take_or_zero(x, owners), gate_up, counts, **groups)
    d_weights = None if weights is None else round_float64((act * d_scaled).sum(axis=1), weights.dtype)
    return MlpGradients(sum_rows(d_rows_of_x, plan.token_rows), d_gate_up, d_down, d_weights)
