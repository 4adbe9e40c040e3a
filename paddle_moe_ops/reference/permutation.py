# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Permutation of rows into expert order and their sums per token, with gradients.

All sums follow one rule: a float32 accumulator starts at -0.0, takes a token's rows from left to right
(plain: one addition each; weighted: one fused multiply-add each) and is rounded once, to nearest even, to the
output dtype. The sum of a token without rows is +0.0. One unweighted row is copied, so its bits survive, NaN payloads
included. float64 rows and probabilities are computed in float64 throughout, which finite-difference tests
need.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .arithmetic import add32, fma32, round_to, to_float32
from .routing import Plan, take_or_zero

__all__ = ["permute", "permute_backward", "sum_rows", "sum_rows_backward", "unpermute", "unpermute_backward"]


def permute(
    x: NDArray, plan: Plan, scale: NDArray | None = None, *, fill_padding: str = "all"
) -> tuple[NDArray, NDArray | None]:
    """Copy every token to its rows.

    Args:
        x: [T, H], any dtype; bits are copied.
        plan: plan of the routing.
        scale: [T, S] scales that are permuted with the rows, any dtype, or None.
        fill_padding: "all", "meta" or "none". The last two leave (some) padding undefined in a kernel; the oracle's
            padding is 0 with each of them, so compare padding rows with "all" only.

    Returns:
        rows [N, H], and scales [N, S] or None; padding rows are 0.
    """
    scales = None if scale is None else take_or_zero(scale, plan.row_to_token)
    return take_or_zero(x, plan.row_to_token), scales


def permute_backward(d_rows: NDArray, plan: Plan) -> NDArray:
    """Return the gradient of ``x`` [T, H]: the ascending sum of each token's rows of ``d_rows`` [N, H]."""
    return sum_rows(d_rows, plan.token_rows)


def unpermute(y: NDArray, plan: Plan, probs: NDArray | None = None) -> NDArray:
    """Sum the rows of every token, ascending.

    Args:
        y: [N, H] rows in expert order, bfloat16, float16 or float32.
        plan: plan of the routing.
        probs: None, or float32 weights: [N] by row or [T, K] by slot.

    Returns:
        [T, H], dtype of ``y``.
    """
    return sum_rows(y, plan.token_rows, _row_weights(probs, plan))


def unpermute_backward(
    d_out: NDArray, plan: Plan, y: NDArray | None = None, probs: NDArray | None = None
) -> tuple[NDArray, NDArray | None]:
    """Return the gradients of `unpermute`.

    Args:
        d_out: [T, H] gradient of the sum.
        plan: plan of the forward pass.
        y: [N, H] rows of the forward pass, for the gradient of ``probs``; None when that is not needed.
        probs: weights of the forward pass, None for the plain sum.

    Returns:
        d_y [N, H] (dtype of ``d_out``, padding rows 0), and d_probs in the shape of ``probs`` (float32; a dot
        product in float64, rounded once; 0 where no row is) or None.
    """
    d_y, d_row_weights = sum_rows_backward(d_out, plan.row_to_token, y, _row_weights(probs, plan))
    if d_row_weights is None or probs is None or probs.ndim == 1:
        return d_y, d_row_weights
    return d_y, take_or_zero(d_row_weights, plan.slot_to_row)


def sum_rows(y: NDArray, token_rows: NDArray, row_weights: NDArray | None = None) -> NDArray:
    """Sum rows of y for every token by the rule of this module.

    Args:
        y: [N, H] rows.
        token_rows: int [T, W] rows of each token in the order of summation; -1 entries are ignored.
        row_weights: [N] float32 weight of each row, or None for the plain sum.

    Returns:
        [T, H], dtype of ``y``.
    """
    wide = to_float32(y)
    sums = np.full((len(token_rows), y.shape[1]), -0.0, wide.dtype)
    for rows_of_rank in token_rows.T:
        tokens = np.flatnonzero(rows_of_rank >= 0)
        rows = rows_of_rank[tokens]
        if row_weights is None:
            sums[tokens] = add32(sums[tokens], wide[rows])
        else:
            sums[tokens] = fma32(wide[rows], row_weights[rows, None], sums[tokens])
    out = round_to(sums, y.dtype)
    row_counts = np.count_nonzero(token_rows >= 0, axis=1)
    out[row_counts == 0] = 0
    if row_weights is None:
        out[row_counts == 1] = y[token_rows[row_counts == 1].max(axis=1, initial=-1)]
    return out


def sum_rows_backward(
    d_out: NDArray, row_to_token: NDArray, y: NDArray | None = None, row_weights: NDArray | None = None
) -> tuple[NDArray, NDArray | None]:
    """Return the gradients of `sum_rows`: d_y [N, H], and d_row_weights [N] if weighted and y is given.

    ``row_to_token`` is int [N], -1 for a row that no token summed; its gradients are 0.
    """
    if row_weights is None:
        return take_or_zero(d_out, row_to_token), None
    rows = np.flatnonzero(row_to_token >= 0)
    d_summed = to_float32(d_out[row_to_token[rows]])
    d_y = np.zeros((len(row_to_token), d_out.shape[1]), d_out.dtype)
    # The addend -0.0 keeps the sign of a product that is zero.
    d_y[rows] = round_to(fma32(row_weights[rows, None], d_summed, np.float32(-0.0)), d_out.dtype)
    if y is None:
        return d_y, None
    d_row_weights = np.zeros(len(row_to_token), row_weights.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        products = d_summed.astype(np.float64) * to_float32(y[rows])
        d_row_weights[rows] = products.sum(axis=1)
    return d_y, d_row_weights


def _row_weights(probs: NDArray | None, plan: Plan) -> NDArray | None:
    """Return weights by row [N] from weights by row or by slot."""
    if probs is None or probs.ndim == 1:
        return probs
    return take_or_zero(probs.reshape(-1), plan.row_to_slot)
