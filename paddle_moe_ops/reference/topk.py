# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""From a router's logits to the experts of each token and their weights.

The choice is exact: of equal values the lower expert is chosen, and NaN ranks above all numbers. Scores and weights
hold an exponential, so a backend meets them within a tolerance.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .arithmetic import add32, round_float64, to_float32

__all__ = ["calculate_topk", "calculate_topk_backward", "select_experts"]


def select_experts(
    values: NDArray,
    top_k: int,
    *,
    correction_bias: NDArray | None = None,
    num_groups: int = 1,
    topk_groups: int | None = None,
    scores_per_group: int = 2,
) -> NDArray:
    """Choose experts by values [T, E].

    Args:
        values: [T, E]; widened to float32.
        top_k: K.
        correction_bias: float32 [E] to add first, or None.
        num_groups: groups of E / num_groups experts that follow each other.
        topk_groups: the groups that are kept, those with the highest sums; None: all of them.
        scores_per_group: how many of a group's highest values its sum holds, added from the highest down.

    Returns:
        int64 [T, K], highest value first.
    """
    wide = to_float32(values)
    num_tokens, num_experts = wide.shape
    if correction_bias is not None:
        wide = add32(wide, correction_bias)
    allowed = np.ones((num_tokens, num_experts), np.bool_)
    if topk_groups is not None and topk_groups < num_groups:
        size = num_experts // num_groups
        grouped = wide.reshape(num_tokens, num_groups, size)
        best = np.take_along_axis(grouped, _descending(grouped)[..., : min(scores_per_group, size)], axis=-1)
        sums = best[..., 0]
        for rank in range(1, best.shape[-1]):
            sums = add32(sums, best[..., rank])
        kept = np.zeros(sums.shape, np.bool_)
        np.put_along_axis(kept, _descending(sums)[:, :topk_groups], True, axis=-1)
        allowed = np.repeat(kept, size, axis=1)
    order = _descending(wide)
    # A stable sort brings the experts that may be chosen to the front and leaves their order alone.
    order = np.take_along_axis(
        order, np.argsort(~np.take_along_axis(allowed, order, axis=1), axis=1, kind="stable"), axis=1
    )
    return order[:, :top_k]


def calculate_topk(
    gating: NDArray,
    top_k: int,
    use_sigmoid: bool,
    renormalize: bool,
    pre_act: bool = True,
    post_act: bool = False,
    *,
    scaling_factor: float = 1.0,
    ids: NDArray | None = None,
    **selection: object,
) -> tuple[NDArray, NDArray, NDArray]:
    """Score experts, choose K of them for each token and weight them.

    Args:
        gating: [T, E] logits, bfloat16, float16 or float32; float64 stays float64.
        top_k: K.
        use_sigmoid: sigmoid of each logit, else softmax.
        renormalize: divide the weights of a token by their sum; weights of 0 stay 0.
        pre_act: choose by scores of all experts.
        post_act: choose by logits, score the chosen ones only (a softmax then runs over them).
        scaling_factor: what the weights are multiplied by in the end.
        ids: [T, K] experts to take instead of choosing.
        **selection: further arguments of `select_experts`.

    Returns:
        weights [T, K], ids int64 [T, K] and the scores of all experts [T, E]; weights and scores have the logits'
        dtype.
    """
    activation = _sigmoid if use_sigmoid else _softmax
    dtype = gating.dtype
    scores = round_float64(activation(gating), dtype)
    if ids is None:
        ids = select_experts(scores if pre_act else gating, top_k, **selection)  # type: ignore[arg-type]
    if pre_act:
        weights = np.take_along_axis(scores, ids, axis=1)
    else:
        weights = round_float64(activation(np.take_along_axis(gating, ids, axis=1)), dtype)
    wide = weights.astype(np.float64)
    if renormalize:
        total = round_float64(wide.sum(axis=1, keepdims=True), dtype)
        wide = wide / _divisor(total.astype(np.float64))
    return round_float64(wide * scaling_factor, dtype), ids, scores


def calculate_topk_backward(
    d_weights: NDArray,
    gating: NDArray,
    ids: NDArray,
    use_sigmoid: bool,
    renormalize: bool,
    pre_act: bool = True,
    post_act: bool = False,
    *,
    scaling_factor: float = 1.0,
    d_scores: NDArray | None = None,
) -> NDArray:
    """Return the gradient of the logits, float64 [T, E], from those of the weights and (optionally) of the scores.

    Neither the choice nor a rounding has a gradient; all is computed in float64. But weights that are
    all 0 in float32, in which backends make them, count as 0, unless the logits are float64.
    """
    d_weights = d_weights.astype(np.float64) * scaling_factor
    wide = gating.astype(np.float64)
    activation, backward = (_sigmoid, _sigmoid_backward) if use_sigmoid else (_softmax, _softmax_backward)
    scores = activation(wide)
    chosen = np.take_along_axis(wide, ids, axis=1)
    weights = np.take_along_axis(scores, ids, axis=1) if pre_act else activation(chosen)
    if renormalize:
        if gating.dtype != np.float64:
            weights = np.where((weights.astype(np.float32) == 0).all(axis=1, keepdims=True), 0, weights)
        divisor = _divisor(weights.sum(axis=1, keepdims=True))
        through_sum = (d_weights * weights).sum(axis=1, keepdims=True) / divisor
        d_weights = (d_weights - through_sum) / divisor
    d_all = np.zeros(wide.shape) if d_scores is None else d_scores.astype(np.float64)
    if not pre_act:
        d_gating = backward(d_all, scores)
        # Ids are distinct, so the indexed addition meets no element twice.
        tokens = np.arange(len(ids))[:, None]
        d_gating[tokens, ids] += backward(d_weights, weights)
        return d_gating
    d_all = d_all.copy()
    d_all[np.arange(len(ids))[:, None], ids] += d_weights
    return backward(d_all, scores)


def _divisor(total: NDArray) -> NDArray:
    """The divisor of weights with this sum."""
    return np.where(total == 0, 1, total)


def _descending(values: NDArray) -> NDArray:
    """Indices along the last axis from the highest value down, NaN before all numbers, equal ones ascending."""
    is_nan = np.isnan(values)
    order = np.argsort(-np.where(is_nan, 0, values), axis=-1, kind="stable")
    nan_first = np.argsort(~np.take_along_axis(is_nan, order, axis=-1), axis=-1, kind="stable")
    return np.take_along_axis(order, nan_first, axis=-1)


def _softmax(values: NDArray) -> NDArray:
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinite logits
        shifted = np.exp(wide - wide.max(axis=-1, keepdims=True))
        return shifted / shifted.sum(axis=-1, keepdims=True)


def _softmax_backward(d_scores: NDArray, scores: NDArray) -> NDArray:
    return scores * (d_scores - (d_scores * scores).sum(axis=-1, keepdims=True))


def _sigmoid(values: NDArray) -> NDArray:
    wide = values.astype(np.float64)
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-wide))


def _sigmoid_backward(d_scores: NDArray, scores: NDArray) -> NDArray:
    return d_scores * scores * (1 - scores)
