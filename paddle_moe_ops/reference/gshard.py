# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators of GShard's gates, entry by entry in the order of memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["assign_pos", "limit_by_capacity", "number_count", "prune_gate_by_capacity", "random_routing"]


def number_count(numbers: NDArray, upper_range: int) -> NDArray:
    """Return how often each of the numbers in [0, upper_range) occurs."""
    counts = np.zeros(upper_range, numbers.dtype)
    for number in numbers.reshape(-1):
        if 0 <= number < upper_range:
            counts[number] += 1
    return counts


def assign_pos(x: NDArray, cum_count: NDArray) -> NDArray:
    """Return the entries by expert: each counts the end of its expert's segment down, and takes the place there."""
    ends = cum_count.copy()
    entries = np.full(ends[-1] if len(ends) else 0, -1, cum_count.dtype)
    for entry, expert in enumerate(x.reshape(-1)):
        if expert >= 0:
            ends[expert] -= 1
            entries[ends[expert]] = entry
    return entries


def limit_by_capacity(expert_count: NDArray, capacity: NDArray, n_worker: int) -> NDArray:
    """Return what workers may send to each expert, the first worker's first."""
    left, out = capacity.astype(np.int64), expert_count.copy()
    for worker in out.reshape(n_worker, -1):
        for expert, count in enumerate(worker.tolist()):
            worker[expert] = max(min(count, left[expert]), 0)
            left[expert] -= count
    return out


def prune_gate_by_capacity(gate_idx: NDArray, expert_count: NDArray) -> NDArray:
    """Return the experts of the entries, -1 once the expert of an entry has taken all that it may."""
    left, out = expert_count.copy(), gate_idx.copy()
    flat = out.reshape(-1)
    for entry, expert in enumerate(flat):
        if expert >= 0:
            if left[expert] <= 0:
                flat[entry] = -1
            left[expert] -= 1
    return out


def random_routing(prob: NDArray, topk_value: NDArray, topk_idx: NDArray) -> NDArray:
    """Return the experts [T, 2], the second -1 where twice its score is less than the token's random number."""
    out = topk_idx.copy()
    out[2 * topk_value[:, 1].astype(np.float64) < prob.astype(np.float64), 1] = -1
    return out
