# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The gradients that ``paddle._C_ops.moe_*_grad`` compute, slot by slot.

A slot takes part if its weight is above 0. Sums are computed in float64 and rounded at the end, so a backend agrees
within a tolerance.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .incubate import gather_rows_backward

__all__ = ["moe_gate_dispatch_grad", "moe_gate_dispatch_partial_grad", "moe_gate_dispatch_permute_grad"]


def moe_gate_dispatch_grad(
    combine_weights: NDArray,
    scatter_index: NDArray,
    expert_id: NDArray,
    y_grad: NDArray,
    combine_weights_grad: NDArray,
    num_experts: int,
) -> tuple[NDArray, NDArray]:
    """Return the gradients of the tokens [T, H] and of the scores [T, E].

    Args:
        combine_weights: float32 [T, K].
        scatter_index: [K, T].
        expert_id: [T, K].
        y_grad: [N, H].
        combine_weights_grad: float32 [T, K].
        num_experts: E.
    """
    takes_part = combine_weights > 0
    d_gate = np.zeros((len(expert_id), num_experts), np.float32)
    for token, slot in np.argwhere(takes_part):
        d_gate[token, expert_id[token, slot]] += combine_weights_grad[token, slot]
    return gather_rows_backward(y_grad, scatter_index, takes_part), d_gate


def moe_gate_dispatch_permute_grad(
    combine_weights: NDArray,
    scatter_index: NDArray,
    expert_id: NDArray,
    y_grad: NDArray,
    combine_weights_grad: NDArray,
) -> tuple[NDArray, NDArray]:
    """Return what `moe_gate_dispatch_grad` does, for y_grad [E / ranks, ranks, capacity, H]."""
    local, ranks, _, hidden = y_grad.shape
    by_expert = y_grad.swapaxes(0, 1).reshape(-1, hidden)
    arguments = combine_weights, scatter_index, expert_id, by_expert, combine_weights_grad
    return moe_gate_dispatch_grad(*arguments, local * ranks)


def moe_gate_dispatch_partial_grad(
    combine_weights: NDArray, scatter_index: NDArray, y_grad: NDArray, combine_weights_grad: NDArray
) -> tuple[NDArray, NDArray]:
    """Return the gradients of the tokens [T, H] and of the weights [T, K]; rows beyond those of y_grad add nothing."""
    takes_part = combine_weights > 0
    has_row = takes_part & (len(y_grad) > scatter_index.T)
    d_weights = np.where(takes_part, combine_weights_grad, np.float32(0))
    return gather_rows_backward(y_grad, scatter_index, has_row), d_weights
