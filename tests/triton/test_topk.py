# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The router's top-k by Triton kernels, and its gradient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from paddle_moe_ops.triton.ops.topk import topk, topk_backward
from tests.params import SUM_DTYPES
from tests.reference.cases import assert_same_bits
from tests.routers import Router, deepseek_v3, halves, nearly_nothing, routers

from .problems import fitting_tokens


def flags(router):
    return {
        "use_sigmoid": router.use_sigmoid,
        "renormalize": router.renormalize,
        "pre_act": router.pre_act,
        "scaling_factor": router.scaling_factor,
    }


def choose(gpu, router, gating=None, return_scores=True):
    """Weights, ids and scores."""
    bias = None if router.correction_bias is None else gpu.array(router.correction_bias)
    groups = {"num_groups": 1, "topk_groups": 1, "scores_per_group": 2, **router.groups}
    gating = gpu.array(router.gating) if gating is None else gating
    options = {**flags(router), **groups, "return_scores": return_scores}
    return [gpu.numpy(each) for each in topk(gpu, gating, bias, top_k=router.top_k, **options)]


def check(gpu, rng, router):
    weights, ids, scores = choose(gpu, router)
    router.check(weights, ids, scores)
    dtype = router.gating.dtype
    d_weights, d_scores = (rng.standard_normal(each.shape).astype(dtype) for each in (weights, scores))
    for given_scores in (None, d_scores):
        third = None if given_scores is None else gpu.array(given_scores)
        arrays = gpu.array(router.gating), gpu.array(ids), gpu.array(d_weights), third
        router.check_gradient(gpu.numpy(topk_backward(gpu, *arrays, **flags(router))), ids, d_weights, given_scores)


@given(routers())
@settings(max_examples=15)
def test_any_router_follows_the_oracle(gpu, router):
    few = router._replace(gating=router.gating[:3])
    check(gpu, np.random.default_rng(1), few)


@pytest.mark.parametrize("pre_act", [True, False], ids=["pre_act", "post_act"])
@pytest.mark.parametrize("use_sigmoid", [False, True], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("dtype", "num_experts", "top_k"),
    [
        pytest.param(
            dtype,
            *sizes,
            marks=() if sizes == (1, 1) or (dtype == np.float32 and sizes == (100, 64)) else pytest.mark.slow,
        )
        for dtype in SUM_DTYPES
        for sizes in [(1, 1), (33, 33), (100, 64), (1025, 5)]
    ],
    ids=str,
)
def test_any_number_of_experts_and_slots(gpu, rng, dtype, num_experts, top_k, use_sigmoid, pre_act):
    gating = rng.standard_normal((fitting_tokens(gpu, 63), num_experts)).astype(dtype)
    check(gpu, rng, Router(gating, top_k, use_sigmoid, True, pre_act, 1.0, None, {}))


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_a_router_of_deepseek_v3(gpu, rng, dtype):
    check(gpu, rng, deepseek_v3(dtype, fitting_tokens(gpu, 1025), rng))


@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_nan_comes_first_and_zeros_are_equal(gpu, top_k):
    negative_nan = np.uint32(0xFFC12345).view(np.float32)
    gating = np.float32([[0.0, -0.0, np.nan, -np.inf, negative_nan, np.inf, -0.0]])
    _, ids, scores = choose(gpu, Router(gating, top_k, True, False, False, 1.0, None, {}), return_scores=False)
    assert ids.tolist() == [[2, 4, 5, 0, 1, 6, 3][:top_k]]
    assert scores.shape == (0,)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_scores_of_a_softmax_without_a_sum_are_nan(gpu, bad):
    gating = np.float32([[1, 2, bad, 3], [-np.inf] * 4, [1, -np.inf, 0, 0]])
    weights, ids, scores = choose(gpu, Router(gating, 2, False, True, True, 1.0, None, {}))
    assert np.isnan(weights[:2]).all()
    assert np.isnan(scores[:2]).all()
    assert ids.tolist() == [[0, 1], [0, 1], [0, 2]]
    assert np.isfinite(scores[2]).all()


def test_sigmoids_are_right_to_three_units_in_the_last_place(gpu):
    """Over logits that do not give 0 or 1."""
    logits = np.linspace(-110, 20, 4096, dtype=np.float32)[None]
    _, _, scores = choose(gpu, Router(logits, 1, True, False, True, 1.0, None, {}))
    exact = 1 / (1 + np.exp(-logits.astype(np.float64)))
    unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(scores.astype(np.float64) - exact) <= 3 * unit).all()


def test_rows_of_logits_may_lie_apart(gpu, rng):
    router = deepseek_v3(np.float32, 3, rng)
    wide = np.concatenate([router.gating, np.full((3, 7), np.nan, np.float32)], axis=1)
    apart = gpu.columns(gpu.array(wide), 256)
    expected = choose(gpu, router)
    for got, wanted in zip(choose(gpu, router, apart), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    weights, ids, _ = expected
    d_weights = rng.standard_normal(weights.shape).astype(np.float32)
    gradient = topk_backward(gpu, apart, gpu.array(ids), gpu.array(d_weights), None, **flags(router))
    router.check_gradient(gpu.numpy(gradient), ids, d_weights, None)


def test_weights_whose_sum_is_nearly_nothing(gpu, rng):
    router = nearly_nothing(rng)
    check(gpu, rng, router._replace(gating=router.gating[::4]))


def test_weights_whose_sum_is_subnormal_are_divided_by_it(gpu, rng):
    logits = (rng.standard_normal((9, 40)) / 2 - 94).astype(np.float32)
    router = Router(logits, 5, True, True, True, 1.0, None, {})
    weights, ids, scores = choose(gpu, router)
    chosen = np.take_along_axis(scores.astype(np.float64), ids, axis=1)
    assert (chosen.sum(axis=1) < np.finfo(np.float32).tiny).all()
    np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-6)
    d_weights = rng.standard_normal(weights.shape).astype(np.float32)
    arrays = (gpu.array(each) for each in (logits, ids, d_weights))
    d_gating = gpu.numpy(topk_backward(gpu, *arrays, None, **flags(router)))
    expected = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(np.take_along_axis(d_gating, ids, axis=1), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", SUM_DTYPES[1:], ids=str)
def test_the_sum_that_narrow_weights_are_divided_by_is_rounded(gpu, dtype):
    router, expected = halves(dtype)
    weights, ids, scores = choose(gpu, router)
    assert ids.tolist() == [[0, 1]]
    assert_same_bits(scores, expected)
    assert_same_bits(weights, expected)


def test_a_bias_and_sums_of_groups_are_added_in_float32(gpu):
    tiny = np.float32(2.0**-25)
    router = Router(np.ones((1, 4), np.float32), 1, True, False, False, 1.0, np.float32([0, tiny, 0, 0]), {})
    assert choose(gpu, router)[1].tolist() == [[0]]
    groups = {"num_groups": 2, "topk_groups": 1}
    router = Router(np.float32([[1, 0, 1, tiny]]), 1, True, False, False, 1.0, None, groups)
    assert choose(gpu, router)[1].tolist() == [[0]]


def test_no_tokens(gpu, rng):
    check(gpu, rng, deepseek_v3(np.float32, 0, rng))
