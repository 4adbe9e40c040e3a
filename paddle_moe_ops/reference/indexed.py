# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Permutation by gather indices: one flat index for each (token, slot) pair."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .permutation import sum_rows

__all__ = ["get_routing_indices", "permute_indexed", "permute_indexed_backward", "unpermute_indexed"]


def get_routing_indices(selected_experts: NDArray, num_experts: int) -> tuple[NDArray, NDArray, NDArray]:
    """Sort slots by expert.

    Args:
        selected_experts: int [T, K]. Ids outside [0, E) count as -1: their slots come last.
        num_experts: E.

    Returns:
        tokens of each expert [E] (dtype of the ids), gather indices int32 [T*K] (the slot of each row: rows of
        one expert follow ascending slot) and scatter indices int32 [T*K] (the row of each slot).
    """
    ids = selected_experts.reshape(-1)
    ids = np.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    gather = np.argsort(ids, kind="stable")
    counts = np.bincount(ids, minlength=num_experts)[:num_experts]
    return counts.astype(selected_experts.dtype), gather.astype(np.int32), np.argsort(gather).astype(np.int32)


def permute_indexed(x: NDArray, gather_indices: NDArray, topk: int) -> NDArray:
    """Return rows [T*K, H]: row i is a copy of token ``gather_indices[i] // topk`` of x [T, H]."""
    return x[gather_indices // topk]


def permute_indexed_backward(d_rows: NDArray, gather_indices: NDArray, topk: int) -> NDArray:
    """Return the gradient of x [T, H]: the sum of each token's rows by the rule of `sum_rows`, ascending rows."""
    rows_of_slots = np.argsort(gather_indices).reshape(-1, topk)
    return sum_rows(d_rows, np.sort(rows_of_slots, axis=1))


def unpermute_indexed(x: NDArray, gather_indices: NDArray) -> NDArray:
    """Return rows in slot order, [T*K, H]: row ``gather_indices[i]`` is a copy of row i of x."""
    out = np.empty_like(x)
    out[gather_indices] = x
    return out
