# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""topk and its gradient: the choice to the bit, all that holds exponentials within what they may differ by."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..pairwise import pairwise
from ..params import SUM_DTYPES
from ..reference.cases import assert_same_bits
from ..routers import Router, deepseek_v3, routers
from .binding import Core, CoreError
from .cases import EXAMPLES
from .guards import guarded_outputs, with_row_gaps
from .operators.topk import TopkBackwardParams, TopkParams, topk, topk_backward, topk_backward_params, topk_params

BY_DTYPE = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
BY_ACTIVATION = pytest.mark.parametrize("use_sigmoid", [False, True], ids=["softmax", "sigmoid"])
BY_TIME = pytest.mark.parametrize("pre_act", [True, False], ids=["pre_act", "post_act"])
# Experts and slots: remainders of 32 lanes, the limits promised, and more than a GPU's shared memory holds.
SIZES = [(1, 1), (2, 2), (31, 5), (32, 32), (33, 33), (64, 6), (100, 64), (257, 8), (1024, 64), (5000, 40), (20000, 3)]


def router_of(gating: NDArray, top_k: int, use_sigmoid: bool = False, pre_act: bool = True, **fields: object) -> Router:
    plain = Router(gating, top_k, use_sigmoid, True, pre_act, 1.0, None, {})
    return plain._replace(**fields)


def check_backward(core: Core, router: Router, ids: NDArray, seed: int, num_threads: int = 0) -> None:
    rng = np.random.default_rng(seed)
    dtype = router.gating.dtype
    d_weights, d_scores = (rng.standard_normal(a.shape).astype(dtype) for a in (ids, router.gating))
    for given_scores in (None, d_scores):
        d_gating = topk_backward(core, router, ids, d_weights, given_scores, num_threads=num_threads)
        router.check_gradient(d_gating, ids, d_weights, given_scores)


@EXAMPLES
@given(routers(), st.sampled_from([1, 3]))
def test_any_router_follows_the_oracle(core: Core, router: Router, num_threads: int) -> None:
    weights, ids, scores = topk(core, router, num_threads=num_threads)
    router.check(weights, ids, scores)
    for again, first in zip(topk(core, router, with_scores=False), (weights, ids), strict=True):
        assert_same_bits(again, first)
    check_backward(core, router, ids, seed=1, num_threads=num_threads)


@pairwise(
    {
        "num_experts, top_k": SIZES,
        "use_sigmoid": {"softmax": False, "sigmoid": True},
        "pre_act": {"pre_act": True, "post_act": False},
        "dtype": SUM_DTYPES,
    },
    others_are_slow=True,
)
def test_any_number_of_experts_and_slots(
    core: Core, dtype: DTypeLike, pre_act: bool, use_sigmoid: bool, num_experts: int, top_k: int
) -> None:
    num_tokens = 63 if num_experts <= 1024 else 5
    gating = np.random.default_rng(2).standard_normal((num_tokens, num_experts)).astype(dtype)
    router = router_of(gating, top_k, use_sigmoid, pre_act)
    weights, ids, scores = topk(core, router)
    router.check(weights, ids, scores)
    check_backward(core, router, ids, seed=3)


@pytest.mark.parametrize("num_groups", [2, 8, 31, 64, 512])
@BY_TIME
def test_any_number_of_groups(core: Core, pre_act: bool, num_groups: int) -> None:
    rng = np.random.default_rng(4)
    gating = (rng.integers(-50, 50, (63, num_groups * 6)) / 16).astype(np.float32)
    bias = rng.integers(-4, 4, num_groups * 6).astype(np.float32) / 8
    for topk_groups in {1, num_groups // 2, num_groups - 1}:
        groups = {"num_groups": num_groups, "topk_groups": topk_groups, "scores_per_group": 3}
        router = router_of(gating, 6, True, pre_act, correction_bias=bias, groups=groups)
        router.check(*topk(core, router))


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 1025])
@BY_DTYPE
def test_a_router_of_deepseek_v3_and_its_gradient(core: Core, dtype: DTypeLike, num_tokens: int) -> None:
    router = deepseek_v3(dtype, num_tokens, np.random.default_rng(5))
    weights, ids, scores = topk(core, router)
    router.check(weights, ids, scores)
    check_backward(core, router, ids, seed=6)


@pytest.mark.parametrize("num_experts", [1, 5, 17, 64, 100, 257, 2048])
@BY_ACTIVATION
@BY_TIME
def test_equal_logits_go_to_the_lower_experts(core: Core, pre_act: bool, use_sigmoid: bool, num_experts: int) -> None:
    """At any place in a row the same logit gives the same score, whatever vector instructions work on it."""
    top_k = min(40, num_experts)
    _, ids, _ = topk(core, router_of(np.full((3, num_experts), 0.37, np.float32), top_k, use_sigmoid, pre_act))
    np.testing.assert_array_equal(ids, np.tile(np.arange(top_k), (3, 1)))


@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_nan_comes_first_and_zeros_are_equal(core: Core, top_k: int) -> None:
    negative_nan = np.uint32(0xFFC12345).view(np.float32)
    gating = np.float32([[0.0, -0.0, np.nan, -np.inf, negative_nan, np.inf, -0.0]])
    _, ids = topk(core, router_of(gating, top_k, True, False), with_scores=False)
    assert ids.tolist() == [[2, 4, 5, 0, 1, 6, 3][:top_k]]


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@BY_DTYPE
def test_scores_of_a_softmax_without_a_sum_are_nan(core: Core, dtype: DTypeLike, bad: float) -> None:
    gating = np.array([[1, 2, bad, 3], [-np.inf] * 4, [1, -np.inf, 0, 0]]).astype(dtype)
    weights, ids, scores = topk(core, router_of(gating, 2))
    assert np.isnan(weights[:2].astype(np.float32)).all()
    assert np.isnan(scores[:2].astype(np.float32)).all()
    assert ids.tolist() == [[0, 1], [0, 1], [0, 2]]
    assert np.isfinite(scores[2].astype(np.float32)).all()


def test_sums_of_groups_that_are_nan_come_first(core: Core) -> None:
    gating = np.float32([[9, 9, np.inf, -np.inf, 1, np.nan]])
    router = router_of(gating, 2, True, False, groups={"num_groups": 3, "topk_groups": 1, "scores_per_group": 2})
    assert topk(core, router)[1].tolist() == [[2, 3]]


def test_sigmoids_are_right_to_three_units_in_the_last_place(core: Core) -> None:
    """Two of the exponential, one of the sum and the quotient; over all logits that do not give 0 or 1."""
    logits = np.concatenate([np.linspace(-110, 20, 100_001), np.float64(2.0) ** np.arange(-40, 7)]).astype(np.float32)
    _, _, scores = topk(core, router_of(logits[:, None], 1, True))
    exact = 1 / (1 + np.exp(-logits.astype(np.float64)))
    unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(scores[:, 0].astype(np.float64) - exact) <= 3 * unit).all()


def test_weights_whose_sum_is_subnormal_are_divided_by_it(core: Core) -> None:
    logits = (np.random.default_rng(14).standard_normal((63, 40)) / 2 - 94).astype(np.float32)
    router = router_of(logits, 5, True)
    weights, ids, scores = topk(core, router)
    chosen = np.take_along_axis(scores.astype(np.float64), ids, axis=1)
    assert (chosen.sum(axis=1) < np.finfo(np.float32).tiny).all()
    np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-6)
    d_weights = np.random.default_rng(15).standard_normal(weights.shape).astype(np.float32)
    d_gating = topk_backward(core, router, ids, d_weights)
    expected = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(np.take_along_axis(d_gating, ids, axis=1), expected, rtol=1e-3, atol=1e-4)


def test_weights_stay_finite_where_all_scores_underflow(core: Core) -> None:
    router = router_of(np.full((2, 4), -200, np.float32), 2, True)
    weights, ids, _ = topk(core, router)
    assert weights.tolist() == [[0.0, 0.0]] * 2
    d_gating = topk_backward(core, router, ids, np.ones((2, 2), np.float32))
    assert_same_bits(d_gating, np.zeros((2, 4), np.float32))


def test_narrow_scores_are_rounded_before_the_choice(core: Core) -> None:
    """Two logits whose scores differ in float32 and not in bfloat16: the lower id wins, though its logit is lower."""
    gating = np.array([[5.0, 5.03125]], ml_dtypes.bfloat16)
    assert topk(core, router_of(gating, 1, True))[1].tolist() == [[0]]
    assert topk(core, router_of(gating, 1, True, False))[1].tolist() == [[1]]


@pytest.mark.parametrize("gap", [1, 3, 16])
@BY_DTYPE
def test_rows_of_logits_may_lie_apart(core: Core, dtype: DTypeLike, gap: int) -> None:
    router = deepseek_v3(dtype, 9, np.random.default_rng(7))
    apart = router._replace(gating=with_row_gaps(router.gating, gap))
    results, expected = topk(core, apart), topk(core, router)
    for got, wanted in zip(results, expected, strict=True):
        assert_same_bits(got, wanted)
    d_weights = np.ones_like(expected[0])
    d_gating = topk_backward(core, apart, expected[1], d_weights)
    assert_same_bits(d_gating, topk_backward(core, router, expected[1], d_weights))


@BY_ACTIVATION
@BY_TIME
def test_gradient_without_gradients_is_zero(core: Core, pre_act: bool, use_sigmoid: bool) -> None:
    router = router_of(np.random.default_rng(8).standard_normal((7, 40)).astype(np.float32), 3, use_sigmoid, pre_act)
    _, ids = topk(core, router, with_scores=False)
    assert not topk_backward(core, router, ids, None).any()


@BY_ACTIVATION
@BY_TIME
def test_gradient_of_a_single_renormalised_weight_is_zero(core: Core, pre_act: bool, use_sigmoid: bool) -> None:
    router = router_of(np.random.default_rng(13).standard_normal((63, 40)).astype(np.float32), 1, use_sigmoid, pre_act)
    weights, ids = topk(core, router, with_scores=False)
    assert (weights == 1).all()
    assert not topk_backward(core, router, ids, weights).any()


@BY_ACTIVATION
@BY_TIME
def test_ids_that_are_no_experts_give_no_gradient(core: Core, pre_act: bool, use_sigmoid: bool) -> None:
    gating = np.random.default_rng(9).standard_normal((3, 40)).astype(np.float32)
    router = router_of(gating, 3, use_sigmoid, pre_act, renormalize=False)
    good = np.array([[4, 7], [0, 39], [8, 1]])
    bad = np.array([[4, 40, 7], [-1, 0, 39], [8, 1, 2**62]])
    d_weights = np.ones((3, 3), np.float32)
    assert_same_bits(
        topk_backward(core, router, bad, d_weights),
        topk_backward(core, router, good, d_weights[:, :2].copy()),
    )


@pytest.mark.parametrize("field", ["gating", "weights", "scores"])
def test_arrays_of_logits_must_be_aligned_to_their_elements(core: Core, field: str) -> None:
    gating = np.zeros((3, 4), np.float16)
    with guarded_outputs() as output:
        weights, ids, scores = output((3, 2), np.float16), output((3, 2), np.int64), output((3, 4), np.float16)
        params = topk_params(gating, weights, ids, scores)
        setattr(params, field, getattr(params, field) + 1)
        with pytest.raises(CoreError, match=rf"^INVALID_ARGUMENT: {field} must be an array aligned"):
            core.run("topk", params)


@pytest.mark.parametrize("field", ["gating", "d_gating", "d_weights", "d_scores"])
def test_arrays_of_gradients_must_be_aligned_to_their_elements(core: Core, field: str) -> None:
    gating, ids = np.zeros((3, 4), np.float32), np.zeros((3, 1), np.int64)
    with guarded_outputs() as output:
        d_gating = output((3, 4), np.float32)
        params = topk_backward_params(gating, ids, d_gating, np.zeros((3, 1), np.float32), gating)
        setattr(params, field, getattr(params, field) + 2)
        with pytest.raises(CoreError, match=rf"^INVALID_ARGUMENT: {field} must be an array aligned"):
            core.run("topk_backward", params)


@pytest.mark.cuda_only
@pytest.mark.parametrize("num_experts", [1, 64, 256, 1024, 20000])
@BY_ACTIVATION
@BY_TIME
@BY_DTYPE
def test_the_gpu_gives_the_bits_of_the_cpu(
    core: Core, dtype: DTypeLike, pre_act: bool, use_sigmoid: bool, num_experts: int
) -> None:
    gating = (3 * np.random.default_rng(10).standard_normal((65, num_experts))).astype(dtype)
    router = router_of(gating, min(40, num_experts), use_sigmoid, pre_act)
    on_cpu = Core(core.library._name)
    expected, results = topk(on_cpu, router), topk(core, router)
    for got, wanted in zip(results, expected, strict=True):
        assert_same_bits(got, wanted)
    gradients = expected[1], expected[0], expected[2]
    assert_same_bits(topk_backward(core, router, *gradients), topk_backward(on_cpu, router, *gradients))


@pytest.mark.cuda_only
def test_workspace_one_byte_too_small_is_refused(core: Core) -> None:
    gating = np.zeros((3, 20000), np.float32)
    with guarded_outputs() as output:
        params = topk_params(gating, output((3, 2), np.float32), output((3, 2), np.int64))
        size = core.workspace_bytes("topk", params)
        workspace = np.zeros(size, np.uint8)
        params = topk_params(
            gating, output((3, 2), np.float32), output((3, 2), np.int64), workspace=workspace, workspace_bytes=size - 1
        )
        with pytest.raises(CoreError, match=r"^INVALID_ARGUMENT: workspace must be "):
            core.run("topk", params)
        params.workspace_bytes = size
        core.run("topk", params)


def test_the_choice_of_many_tokens_is_shared_by_threads(core: Core) -> None:
    router = deepseek_v3(ml_dtypes.bfloat16, 3000, np.random.default_rng(11))
    alone, shared = topk(core, router, num_threads=1), topk(core, router, num_threads=4)
    for got, wanted in zip(shared, alone, strict=True):
        assert_same_bits(got, wanted)
    scores = alone[2]
    chosen = reference.select_experts(scores, 8, correction_bias=router.correction_bias, **router.groups)
    assert_same_bits(alone[1], chosen)


def test_arrays_without_elements_may_be_missing(core: Core) -> None:
    sizes = {"num_tokens": 0, "topk": 2, "num_experts": 3}
    core.run("topk", TopkParams(**sizes, num_groups=1, topk_groups=1, scores_per_group=1))
    core.run("topk_backward", TopkBackwardParams(**sizes))


def test_gradient_of_no_slots_is_that_of_the_scores(core: Core) -> None:
    gating, d_scores = np.random.default_rng(12).standard_normal((2, 5, 40)).astype(np.float32)
    router = router_of(gating, 0, renormalize=False)
    ids, d_weights = np.zeros((5, 0), np.int64), np.zeros((5, 0), np.float32)
    router.check_gradient(topk_backward(core, router, ids, d_weights, d_scores), ids, d_weights, d_scores)
