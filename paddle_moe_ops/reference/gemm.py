# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM over each expert's own rows, with gradients, in float64 and rounded at the end.

The order of additions in a GEMM is free, so a backend agrees within a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
    row_to_token: NDArray | None = None,
    weights: NDArray | None = None,
    bias: NDArray | None = None,
) -> NDArray:
    """Multiply each group of rows with the matrix of its expert.

    Args:
        X: [M, D] rows; float64 stays float64. [T, D] tokens with ``row_to_token``.
        W: [E, N, D], or [E, D, N] without ``transpose``.
        m_sizes: E group sizes.
        transpose: multiply with the transposed matrices.
        expert_offsets: first row of each group, [E] or [E + 1]; None: the groups follow each other.
        row_to_token: [M] token of each row, or None.
        weights: [M], the factor of each row of the result, or None.
        bias: [E, N], added to the rows of each expert before weights, or None.

    Returns:
        [M, N], dtype of X, 0 in rows of no group.
    """
    matrices = W.swapaxes(1, 2) if transpose else W
    rows_of = _rows_of(X, row_to_token)
    out = np.zeros((len(X) if row_to_token is None else len(row_to_token), matrices.shape[2]))
    for expert, rows in _groups(m_sizes, expert_offsets):
        out[rows] = rows_of(rows) @ matrices[expert].astype(np.float64)
        if bias is not None:
            out[rows] += bias[expert].astype(np.float64)
        if weights is not None:
            out[rows] *= weights[rows, None]
    return round_float64(out, X.dtype)


def grouped_gemm_backward(
    d_out: NDArray,
    X: NDArray,
    W: NDArray,
    m_sizes: Sequence[int],
    transpose: bool = True,
    *,
    expert_offsets: Sequence[int] | None = None,
    row_to_token: NDArray | None = None,
    weights: NDArray | None = None,
    bias: NDArray | None = None,
) -> tuple[NDArray, ...]:
    """Return the gradients of the rows [M, D], of W and of the ``weights`` and the ``bias`` given, in their dtypes.

    They are 0 in rows of no group and for experts without rows.
    """
    matrices = W.swapaxes(1, 2) if transpose else W
    rows_of = _rows_of(X, row_to_token)
    d_x, d_matrices, d_weights = np.zeros((len(d_out), X.shape[1])), np.zeros(matrices.shape), np.zeros(len(d_out))
    d_bias = np.zeros((len(m_sizes), matrices.shape[2]))
    for expert, rows in _groups(m_sizes, expert_offsets):
        x, d_rows, matrix = rows_of(rows), d_out[rows].astype(np.float64), matrices[expert].astype(np.float64)
        if weights is not None:
            product = x @ matrix if bias is None else x @ matrix + bias[expert].astype(np.float64)
            d_weights[rows] = (d_rows * product).sum(axis=1)
            d_rows *= weights[rows, None]
        d_x[rows] = d_rows @ matrix.T
        d_matrices[expert] = x.T @ d_rows
        d_bias[expert] = d_rows.sum(axis=0)
    d_w = d_matrices.swapaxes(1, 2) if transpose else d_matrices
    made = (d_x, X), (d_w, W), (d_weights, weights), (d_bias, bias)
    return tuple(round_float64(gradient, given.dtype) for gradient, given in made if given is not None)


def _rows_of(X: NDArray, row_to_token: NDArray | None) -> Callable[[slice], NDArray]:
    """A function that returns some of the rows, in float64."""
    return lambda rows: X[rows if row_to_token is None else row_to_token[rows]].astype(np.float64)


def _groups(m_sizes: Sequence[int], expert_offsets: Sequence[int] | None) -> Iterator[tuple[int, slice]]:
    starts = np.cumsum([0, *m_sizes]) if expert_offsets is None else expert_offsets
    for expert, size in enumerate(m_sizes):
        yield expert, slice(int(starts[expert]), int(starts[expert]) + int(size))
