# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle of the routers' top-k against loops over one token, and its gradient against finite differences."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_moe_ops.reference import calculate_topk, calculate_topk_backward, select_experts
from tests.routers import halves

from .cases import EXAMPLES

LEVELS = st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 0.25, 2.0, np.inf, np.nan])


def select_by_loops(values, top_k, num_groups, topk_groups, scores_per_group):
    """The rule for one token of one loop each: sort by (NaN first, value down, id up)."""

    def best_first(numbered):
        return sorted(numbered, key=lambda item: (not math.isnan(item[1]), -item[1], item[0]))

    size = len(values) // num_groups
    numbered = list(enumerate(values))
    sums = []
    for group in range(num_groups):
        total = None
        for _, value in best_first(numbered[group * size : (group + 1) * size])[:scores_per_group]:
            total = np.float32(value) if total is None else np.float32(total + np.float32(value))
        sums.append((group, total))
    kept = {group for group, _ in best_first(sums)[:topk_groups]}
    return [expert for expert, _ in best_first([item for item in numbered if item[0] // size in kept])[:top_k]]


@EXAMPLES
@given(st.data())
def test_select_experts_is_the_rule(data):
    num_groups, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    topk_groups = data.draw(st.integers(1, num_groups))
    groups = {"num_groups": num_groups, "topk_groups": topk_groups, "scores_per_group": data.draw(st.integers(1, 6))}
    top_k = data.draw(st.integers(1, topk_groups * size))
    line = st.lists(LEVELS, min_size=num_groups * size, max_size=num_groups * size)
    values = np.float32(data.draw(st.lists(line, max_size=4))).reshape(-1, num_groups * size)
    bias = np.float32(data.draw(line)) if data.draw(st.booleans()) else None
    with np.errstate(invalid="ignore"):
        chosen = select_experts(values, top_k, correction_bias=bias, **groups)
        biased = values if bias is None else values + bias
        expected = [select_by_loops(token.tolist(), top_k, **groups) for token in biased]
    assert chosen.shape == (len(values), top_k)
    assert chosen.tolist() == expected


def test_softmax_weights_by_hand():
    gating = np.log(np.float32([[1, 4, 3]]))
    weights, ids, scores = calculate_topk(gating, 2, False, True, scaling_factor=2.0)
    np.testing.assert_allclose(scores, [[1 / 8, 4 / 8, 3 / 8]], rtol=1e-6)
    assert ids.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[8 / 7, 6 / 7]], rtol=1e-6)


def test_post_act_runs_the_softmax_over_the_chosen():
    weights, ids, _ = calculate_topk(np.log(np.float32([[1, 4, 3]])), 2, False, False, False, True)
    assert ids.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]], rtol=1e-6)


def test_sigmoid_weights_by_hand():
    weights, ids, _ = calculate_topk(np.float32([[0, np.log(3), -200]]), 3, True, False)
    assert ids.tolist() == [[1, 0, 2]]
    np.testing.assert_allclose(weights, [[0.75, 0.5, 0]], rtol=1e-6)


@pytest.mark.parametrize("logit", [-30, -87, -103], ids=["small", "the smallest normal", "subnormal"])
def test_small_sums_are_divided_by_like_any_other(logit):
    weights, _, scores = calculate_topk(np.full((1, 12), logit, np.float32), 2, True, True, scaling_factor=2.0)
    assert 0 < scores.max() < 1e-12
    np.testing.assert_allclose(weights, 1.0, rtol=1e-6)
    weights, _, _ = calculate_topk(np.full((1, 12), logit, np.float32), 12, True, True)
    np.testing.assert_allclose(weights, 1 / 12, rtol=1e-6)


def test_weights_that_are_all_zero_stay_zero_and_have_no_gradient():
    gating, d_weights = np.full((2, 4), -200, np.float32), np.float32([[1, 2], [3, -4]])
    weights, ids, _ = calculate_topk(gating, 2, True, True)
    assert weights.tolist() == [[0, 0]] * 2
    gradient = calculate_topk_backward(d_weights, gating, ids, True, True)
    np.testing.assert_allclose(gradient, 0, atol=1e-80)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_sum_of_narrow_weights_is_rounded(dtype):
    router, expected = halves(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    weights, _, scores = calculate_topk(router.gating, *router.arguments)
    assert scores.astype(float).tolist() == expected.astype(float).tolist()
    assert weights.astype(float).tolist() == expected.astype(float).tolist()


def test_what_is_added_for_the_choice_is_added_in_float32():
    tiny = 2.0**-25
    ones = np.ones((1, 2), np.float32)
    assert select_experts(ones, 1, correction_bias=np.float32([0, tiny])).tolist() == [[0]]
    assert select_experts(ones, 1, correction_bias=np.float32([0, 8 * tiny])).tolist() == [[1]]
    groups = {"num_groups": 2, "topk_groups": 1}
    assert select_experts(np.float32([[1, 0, 1, tiny]]), 1, **groups).tolist() == [[0]]
    assert select_experts(np.float32([[1, 0, 1, 8 * tiny]]), 1, **groups).tolist() == [[2]]


def test_two_scores_rank_a_group_and_all_groups_are_kept_unless_told_otherwise():
    values = np.float32([[9, -9, 3, 3]])
    assert select_experts(values, 2, num_groups=2, topk_groups=1).tolist() == [[2, 3]]
    assert select_experts(values, 2, num_groups=2, topk_groups=1, scores_per_group=1).tolist() == [[0, 1]]
    assert select_experts(values, 3, num_groups=2).tolist() == [[0, 2, 3]]


@pytest.mark.parametrize("base", [-31.0, -200.0], ids=["in float32", "not even in float32"])
def test_gradient_of_small_sums_against_finite_differences(base, rng):
    gating, d_weights = base + rng.standard_normal((4, 6)) / 4, rng.standard_normal((4, 3))
    weights, ids, scores = calculate_topk(gating, 3, True, True)
    assert (np.take_along_axis(scores, ids, axis=1).sum(axis=1) < 1e-12).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-12)

    def loss(gating):
        return (calculate_topk(gating, 3, True, True, ids=ids)[0] * d_weights).sum()

    gradient = calculate_topk_backward(d_weights, gating, ids, True, True)
    for index in np.ndindex(gating.shape):
        step = np.zeros_like(gating)
        step[index] = 1e-5
        due = (loss(gating + step) - loss(gating - step)) / 2e-5
        assert gradient[index] == pytest.approx(due, rel=1e-6, abs=1e-8 * np.abs(weights).max())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("pre_act", [False, True])
@pytest.mark.parametrize("use_sigmoid", [False, True])
def test_gradient_of_narrow_logits_is_that_of_the_same_numbers_in_float64(use_sigmoid, pre_act, dtype, rng):
    gating, d_weights = rng.standard_normal((4, 6)).astype(dtype), rng.standard_normal((4, 3)).astype(dtype)
    d_scores, ids = rng.standard_normal((4, 6)).astype(dtype), np.argsort(rng.random((4, 6)), axis=1)[:, :3]
    arguments = use_sigmoid, True, pre_act, not pre_act
    options = {"scaling_factor": 2.446}
    found = calculate_topk_backward(d_weights, gating, ids, *arguments, d_scores=d_scores, **options)
    wide = (each.astype(np.float64) for each in (d_weights, gating, d_scores))
    expected = calculate_topk_backward(next(wide), next(wide), ids, *arguments, d_scores=next(wide), **options)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("pre_act", [False, True])
@pytest.mark.parametrize("use_sigmoid", [False, True])
def test_gradient_against_finite_differences(use_sigmoid, pre_act, renormalize, rng):
    gating = rng.standard_normal((4, 6))
    d_weights, d_scores = rng.standard_normal((4, 3)), rng.standard_normal((4, 6))
    arguments = use_sigmoid, renormalize, pre_act, not pre_act
    _, ids, _ = calculate_topk(gating, 3, *arguments)

    def loss(gating):
        weights, _, scores = calculate_topk(gating, 3, *arguments, scaling_factor=2.5, ids=ids)
        return (weights * d_weights).sum() + (scores * d_scores).sum()

    gradient = calculate_topk_backward(d_weights, gating, ids, *arguments, scaling_factor=2.5, d_scores=d_scores)
    for index in np.ndindex(gating.shape):
        step = np.zeros_like(gating)
        step[index] = 1e-5
        assert gradient[index] == pytest.approx((loss(gating + step) - loss(gating - step)) / 2e-5, abs=1e-8)
