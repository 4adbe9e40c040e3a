# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A matrix product for each expert over its own rows, with gradients, in float64 and rounded in the end.

The order of additions in a matrix product is free, so a backend meets it within a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .arithmetic import round_float64

__all__ = ["grouped_gemm", "grouped_gemm_backward"]


def grouped_gemm(
    X: NDArray,
    W: NDArray,
    m_sizes: Sequence[int],
    transpose: bool = True,
    *,
    expert_offsets: Sequence[int] | None = None,
) -> NDArray:
    """Multiply each group of rows with the matrix of its expert.

    Args:
        X: [M, K] rows; float64 stays float64.
        W: [E, N, K], or [E, K, N] without ``transpose``.
        m_sizes: E group sizes.
        transpose: Multiply with the transposed matrices.
        expert_offsets: First row of each group, [E] or [E + 1]; None: the groups follow each other.

    Returns:
        [M, N], dtype of X, 0 in rows of no group.
    """
    matrices = W.swapaxes(1, 2) if transpose else W
    out = np.zeros((len(X), matrices.shape[2]))
    for expert, rows in _groups(m_sizes, expert_offsets):
        out[rows] = X[rows].astype(np.float64) @ matrices[expert].astype(np.float64)
    return round_float64(out, X.dtype)


def grouped_gemm_backward(
    d_out: NDArray,
    X: NDArray,
    W: NDArray,
    m_sizes: Sequence[int],
    transpose: bool = True,
    *,
    expert_offsets: Sequence[int] | None = None,
) -> tuple[NDArray, NDArray]:
    """Return the gradients of X and W in their dtypes; 0 in rows of no group and for experts without rows."""
    matrices = W.swapaxes(1, 2) if transpose else W
    d_x, d_matrices = np.zeros(X.shape), np.zeros(matrices.shape)
    for expert, rows in _groups(m_sizes, expert_offsets):
        d_rows = d_out[rows].astype(np.float64)
        d_x[rows] = d_rows @ matrices[expert].astype(np.float64).T
        d_matrices[expert] = X[rows].astype(np.float64).T @ d_rows
    d_w = d_matrices.swapaxes(1, 2) if transpose else d_matrices
    return round_float64(d_x, X.dtype), round_float64(d_w, W.dtype)


def _groups(m_sizes: Sequence[int], expert_offsets: Sequence[int] | None) -> Iterator[tuple[int, slice]]:
    starts = np.cumsum([0, *m_sizes]) if expert_offsets is None else expert_offsets
    for expert, size in enumerate(m_sizes):
        yield expert, slice(int(starts[expert]), int(starts[expert]) + int(size))
