# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""calculate_topk: the choice to the bit, scores and weights within what exponentials may differ by."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest
from hypothesis import given, settings

from paddle_moe_ops import reference
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.routing import calculate_topk
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import backward, tensor
from tests.pairwise import pairwise_of
from tests.params import SUM_DTYPES
from tests.routers import Router, deepseek_v3, halves, nearly_nothing, routers

BY_DTYPE = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
BY_ACTIVATION = pytest.mark.parametrize("use_sigmoid", [False, True], ids=["softmax", "sigmoid"])
BY_TIME = pytest.mark.parametrize("pre_act", [True, False], ids=["pre_act", "post_act"])


def call(router: Router, place: object, gating: paddle.Tensor | None = None) -> tuple[paddle.Tensor, ...]:
    """Weights, ids and scores."""
    gating = tensor(router.gating, place) if gating is None else gating
    bias = None if router.correction_bias is None else tensor(router.correction_bias, place)
    options = {"scaling_factor": router.scaling_factor, "correction_bias": bias, **router.groups}
    return calculate_topk(gating, *router.arguments, **options, return_scores=True)


@settings(max_examples=60)
@given(routers())
def test_any_router_follows_the_oracle(place, router):
    router.check(*(to_numpy(output) for output in call(router, place)))


@BY_DTYPE
def test_a_router_of_deepseek_v3_follows_the_oracle(dtype, rng, place, backend):
    router = deepseek_v3(dtype, 1025, rng)
    router.check(*(to_numpy(output) for output in call(router, place)))


@pytest.mark.parametrize("num_experts", [1, 5, 17, 64, 100, 257, 384])
@BY_ACTIVATION
@BY_TIME
def test_equal_logits_go_to_the_lower_experts(pre_act, use_sigmoid, num_experts, place, backend):
    """At any place in a row the same logit must give the same score, whatever vector instructions work on it."""
    gating = paddle.full([3, num_experts], 0.37)
    _, ids = calculate_topk(gating, min(8, num_experts), use_sigmoid, True, pre_act, not pre_act)
    np.testing.assert_array_equal(ids.numpy(), np.tile(np.arange(min(8, num_experts)), (3, 1)))


def test_equal_groups_go_to_the_lower_group(place, backend):
    gating = tensor(np.float32([[1, 0, 0, 1, 1, 0, 0, 1]]), place)
    _, ids = calculate_topk(gating, 4, True, False, num_groups=4, topk_groups=2, scores_per_group=2)
    assert ids.tolist() == [[0, 3, 1, 2]]


@pytest.mark.parametrize(("scores_per_group", "expected"), [(1, [0, 1]), (2, [2, 3])])
def test_groups_are_ranked_by_the_sum_of_their_best_scores(scores_per_group, expected, place):
    gating = tensor(np.float32([[9, -9, 3, 3]]), place)
    groups = {"num_groups": 2, "topk_groups": 1, "scores_per_group": scores_per_group}
    _, ids = calculate_topk(gating, 2, False, False, False, True, **groups)
    assert ids.tolist() == [expected]


def test_an_expert_outside_the_kept_groups_is_never_chosen(place, backend):
    """Not even where the kept groups hold the lowest values there are."""
    gating = tensor(np.float32([[5, -np.inf, -np.inf, 4, 4, 0]]), place)
    groups = {"num_groups": 3, "topk_groups": 1, "scores_per_group": 1}
    _, ids = calculate_topk(gating, 2, True, False, False, True, **groups)
    assert ids.tolist() == [[0, 1]]


def test_the_correction_bias_chooses_and_does_not_weigh(place, backend):
    gating, bias = np.float32([[3, 2, 1, 0]]), np.float32([0, 0, 0, 5])
    weights, ids, scores = calculate_topk(
        tensor(gating, place), 2, True, False, correction_bias=tensor(bias, place), return_scores=True
    )
    assert ids.tolist() == [[3, 0]]
    assert_bits_equal(weights, scores.numpy()[:, [3, 0]])


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_nan_logits_come_first_and_ids_stay_distinct(top_k, place, backend):
    gating = tensor(np.float32([[1, np.nan, 3, -np.inf, np.nan, np.inf]]), place)
    _, ids = calculate_topk(gating, top_k, True, False, False, True)
    assert ids.tolist() == [[1, 4, 5, 2, 0, 3][:top_k]]


def test_a_tie_at_the_edge_of_the_choice_goes_to_the_lower_expert(rng, place, backend):
    """The last expert chosen and the first one not chosen, in one of many tokens."""
    gating = np.stack([rng.permutation(40) for _ in range(50)]).astype(np.float32)
    gating[17] = np.float32([9, 1, 8, 7, 1, 8, *[1] * 34])
    _, ids = calculate_topk(tensor(gating, place), 2, True, False, False, True)
    assert ids.tolist()[17] == [0, 2]
    _, ids = calculate_topk(tensor(gating, place), 5, True, False, False, True)
    assert ids.tolist()[17] == [0, 2, 5, 3, 1]
    assert_bits_equal(ids, reference.select_experts(gating, 5))


def test_weights_stay_finite_where_all_scores_underflow(place, backend):
    weights, _ = calculate_topk(paddle.full([2, 4], -200.0), 2, True, True)
    assert weights.tolist() == [[0.0, 0.0]] * 2


def test_weights_whose_sum_is_nearly_nothing_are_divided_by_it(rng, place, backend):
    router = nearly_nothing(rng)
    leaf = tensor(router.gating, place, gradient=True)
    weights, ids, scores = call(router, place, leaf)
    router.check(to_numpy(weights), ids.numpy(), to_numpy(scores))
    np.testing.assert_allclose(weights.numpy().sum(axis=1), np.repeat([2.5, 0, 2.5], 4), rtol=1e-6)
    d_weights = rng.standard_normal(weights.shape).astype(np.float32)
    backward([weights], [d_weights])
    router.check_gradient(to_numpy(leaf.grad), ids.numpy(), d_weights, None)
    assert leaf.grad.numpy().any(axis=1).tolist() == [True] * 4 + [False] * 4 + [True] * 4


@BY_TIME
@BY_ACTIVATION
def test_weights_whose_sum_is_subnormal_are_divided_by_it(use_sigmoid, pre_act, rng, place, backend):
    """The weights are those of the rounded scores; with few digits left in these, the gradient is as far off.

    For a softmax, the bias selects experts whose scores are almost zero.
    """
    logits = (rng.standard_normal((63, 9)) / 2 - 94).astype(np.float32)
    bias = np.zeros(9, np.float32)
    if not use_sigmoid:
        logits[:, 5:] += 94
        bias[:5] = 1000
    leaf = tensor(logits, place, gradient=True)
    weights, ids, scores = calculate_topk(
        leaf, 3, use_sigmoid, True, pre_act, not pre_act, correction_bias=tensor(bias, place), return_scores=True
    )
    weights, ids = weights.numpy().astype(np.float64), ids.numpy()
    chosen = np.take_along_axis(scores.numpy().astype(np.float64), ids, axis=1)
    assert (chosen.sum(axis=1) < 2.0**-126).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    if use_sigmoid or pre_act:
        np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-6)
    d_weights = rng.standard_normal(weights.shape).astype(np.float32)
    backward([calculate_weights(leaf, place, bias, use_sigmoid, pre_act)], [d_weights])
    # Near a score of zero, sigmoid and softmax both have the derivative of the exponential.
    expected = np.zeros(logits.shape)
    along = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True))
    np.put_along_axis(expected, ids, along, axis=1)
    np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=1e-3, atol=1e-3)


def calculate_weights(gating, place, bias, use_sigmoid, pre_act):
    bias = tensor(bias, place)
    return calculate_topk(gating, 3, use_sigmoid, True, pre_act, not pre_act, correction_bias=bias)[0]


@BY_DTYPE
@pytest.mark.parametrize("shift", [0, 30, 60, 90])
def test_renormalised_sigmoids_add_up_to_one_whatever_the_level_of_the_logits(shift, dtype, rng, place, backend):
    """Except where all scores round to 0 in a narrow dtype. An epsilon of 1e-20 added to the sum changes nothing."""
    gating = (rng.standard_normal((63, 24)) - shift).astype(dtype)
    weights, ids, scores = calculate_topk(tensor(gating, place), 8, True, True, return_scores=True)
    sums = to_numpy(weights).astype(np.float64).sum(axis=1)
    chosen = np.take_along_axis(to_numpy(scores).astype(np.float64), ids.numpy(), axis=1)
    expected = (chosen.sum(axis=1) > 0).astype(np.float64)
    assert expected.any() != (dtype == np.float16 and shift > 0)
    eps = float(np.finfo(np.float32).eps) if dtype == np.float32 else 2.0**-8
    np.testing.assert_allclose(sums, expected, rtol=8 * eps, atol=0)
    if shift <= 30 and dtype == np.float32:
        with_epsilon = chosen / (chosen.sum(axis=1, keepdims=True) + 1e-20)
        np.testing.assert_allclose(weights.numpy(), with_epsilon, rtol=1e-6)


@pytest.mark.parametrize("dtype", SUM_DTYPES[1:], ids=str)
def test_the_sum_that_narrow_weights_are_divided_by_is_rounded(dtype, place, backend):
    router, expected = halves(dtype)
    weights, ids, scores = call(router, place)
    assert ids.tolist() == [[0, 1]]
    assert_bits_equal(scores, expected)
    assert_bits_equal(weights, expected)


@pytest.mark.parametrize("dtype", SUM_DTYPES[1:], ids=str)
def test_weights_are_rounded_once_after_they_are_divided_and_scaled(dtype, place, backend):
    """One third times three is 1; a third that is rounded in between would miss it."""
    gating = tensor(np.zeros((1, 3)).astype(dtype), place)
    weights, _ = calculate_topk(gating, 3, True, True, scaling_factor=3.0)
    assert weights.astype("float32").tolist() == [[1.0, 1.0, 1.0]]


def test_scores_of_two_experts_rank_a_group_unless_told_otherwise(place, backend):
    gating = tensor(np.float32([[9, -9, 3, 3]]), place)
    groups = {"num_groups": 2, "topk_groups": 1}
    assert calculate_topk(gating, 2, False, False, False, True, **groups)[1].tolist() == [[2, 3]]


def test_all_groups_are_kept_unless_told_otherwise(place, backend):
    gating = tensor(np.float32([[1, 4, 2, 3]]), place)
    assert calculate_topk(gating, 3, False, False, num_groups=2)[1].tolist() == [[1, 3, 2]]
    assert calculate_topk(gating, 3, False, False, num_groups=2, topk_groups=2)[1].tolist() == [[1, 3, 2]]


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_a_bias_is_added_in_float32_where_equal_sums_go_to_the_lower_expert(dtype, place, backend):
    """1 and a bias of 2^-25 are 1 in float32; 1 and 2^-20 are more, in the narrow dtypes too."""
    gating = tensor(np.zeros((1, 4)).astype(dtype), place)
    bias = tensor(np.float32([0.5, 0.5 + 2.0**-20, 0.5 + 2.0**-25, 0.25]), place)
    for pre_act in (True, False):
        shift = 0.0 if pre_act else 0.5  # scores are 0.5, logits 0
        _, ids = calculate_topk(gating, 4, True, False, pre_act, not pre_act, correction_bias=bias + shift)
        assert ids.tolist() == [[1, 0, 2, 3]]


def test_groups_are_ranked_by_sums_in_float32_where_equal_ones_go_to_the_lower_group(place, backend):
    """1 and 2^-25 are 1, in whichever group."""
    tiny = 2.0**-25
    for gating, expected in (([1, 0, 1, tiny], [0, 1]), ([1, tiny, 1, 0], [0, 1]), ([1, 0, 1, 8 * tiny], [2, 3])):
        groups = {"num_groups": 2, "topk_groups": 1}
        _, ids = calculate_topk(tensor(np.float32([gating]), place), 2, True, False, False, True, **groups)
        assert ids.tolist() == [expected]


def test_a_bias_counts_when_groups_are_ranked(place, backend):
    gating, bias = tensor(np.float32([[3, 2, 1, 0]]), place), tensor(np.float32([0, 0, 0, 9]), place)
    groups = {"num_groups": 2, "topk_groups": 1, "correction_bias": bias}
    assert calculate_topk(gating, 2, True, False, **groups)[1].tolist() == [[3, 2]]


def test_narrow_scores_are_rounded_before_the_choice(place, backend):
    """Two logits whose scores differ in float32 and not in bfloat16: the lower id wins, though its logit is lower."""
    gating = paddle.to_tensor([[5.0, 5.03125]], dtype="bfloat16")
    assert calculate_topk(gating, 1, True, False)[1].tolist() == [[0]]
    assert calculate_topk(gating, 1, True, False, False, True)[1].tolist() == [[1]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_in_float32_choose_and_weigh_as_wide_logits_do(dtype, rng, place, backend):
    gating = tensor(rng.standard_normal((33, 64)).astype(np.float32), place, gradient=True).astype(dtype)
    made = calculate_topk(gating, 6, True, True, score_dtype="float32", return_scores=True)
    expected = calculate_topk(gating.astype("float32"), 6, True, True, return_scores=True)
    for got, wanted in zip(made, expected, strict=True):
        assert_bits_equal(got, wanted)
    assert (made[0].dtype, made[2].dtype) == (paddle.float32, paddle.float32)
    near = paddle.to_tensor([[5.0, 5.03125]], dtype="bfloat16")
    assert calculate_topk(near, 1, True, False, score_dtype="float32")[1].tolist() == [[1]]
    (gradient,) = paddle.grad((made[0] ** 2).sum(), gating)
    (due,) = paddle.grad((expected[0] ** 2).sum(), gating)
    assert gradient.dtype == gating.dtype
    assert_bits_equal(gradient, due)


@pytest.mark.parametrize("front", [[], [0], [2, 3], [2, 0, 3], [1, 2, 2]], ids=str)
def test_logits_may_have_any_dimensions_in_front(front, rng, place, backend):
    lines = int(np.prod(front))
    router = deepseek_v3(np.float32, lines, rng)
    flat = call(router, place)
    gating = tensor(router.gating, place).reshape([*front, 256])
    for got, wanted in zip(call(router, place, gating), flat, strict=True):
        assert got.shape == [*front, wanted.shape[1]]
        assert_bits_equal(got.reshape(wanted.shape), wanted)


def test_a_bias_may_be_a_row(rng, place, backend):
    router = deepseek_v3(np.float32, 7, rng)
    row = router._replace(correction_bias=router.correction_bias[None])
    for got, wanted in zip(call(row, place), call(router, place), strict=True):
        assert_bits_equal(got, wanted)


@pairwise_of(
    BY_DTYPE,
    BY_TIME,
    BY_ACTIVATION,
    pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "normed"]),
    pytest.mark.parametrize("with_scores", [False, True], ids=["weights", "weights and scores"]),
)
def test_gradient_of_the_logits(dtype, pre_act, use_sigmoid, renormalize, with_scores, rng, place, backend):
    gating = rng.standard_normal((63, 24)).astype(dtype)
    bias, groups = rng.standard_normal(24).astype(np.float32), {"num_groups": 6, "topk_groups": 3}
    router = Router(gating, 5, use_sigmoid, renormalize, pre_act, 2.5, bias, groups)
    leaf = tensor(gating, place, gradient=True)
    weights, ids, scores = call(router, place, leaf)
    assert ids.stop_gradient
    d_weights, d_scores = (rng.standard_normal(out.shape).astype(dtype) for out in (weights, scores))
    backward([weights, scores] if with_scores else [weights], [d_weights, d_scores] if with_scores else [d_weights])
    router.check_gradient(to_numpy(leaf.grad), ids.numpy(), d_weights, d_scores if with_scores else None)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(num_tokens, rng, place, backend):
    router = deepseek_v3(np.float32, num_tokens, rng)
    leaf = tensor(router.gating, place, gradient=True)
    weights, ids, scores = call(router, place, leaf)
    router.check(to_numpy(weights), ids.numpy(), to_numpy(scores))
    backward([weights], [router.gating[:, :8]])
    assert leaf.grad.shape == [num_tokens, 256]


def test_logits_may_be_strided(rng, place, backend):
    router = deepseek_v3(np.float32, 7, rng)
    wide = np.zeros((7, 300), np.float32)
    wide[:, 20:276] = router.gating
    columns = tensor(np.ascontiguousarray(router.gating.T), place)
    expected = call(router, place)
    for gating in (tensor(wide, place)[:, 20:276], columns.T):
        for got, wanted in zip(call(router, place, gating), expected, strict=True):
            assert_bits_equal(got, wanted)


def test_a_bias_that_wants_a_gradient_gets_none(rng, place, backend):
    router = deepseek_v3(np.float32, 7, rng)
    gating, bias = tensor(router.gating, place, gradient=True), tensor(router.correction_bias, place, gradient=True)
    weights, _ = calculate_topk(gating, 8, True, True, correction_bias=bias)
    weights.sum().backward()
    assert gating.grad is not None
    assert bias.grad is None


BAD = {
    "rank": (
        {"gating": paddle.zeros([])},
        ValueError,
        "gating must be of shape [..., num_experts], but got []",
    ),
    "no_experts": (
        {"gating": paddle.zeros([4, 0])},
        ValueError,
        "gating must be of shape [..., num_experts] with num_experts >= 1, but got [4, 0]",
    ),
    "dtype": (
        {"gating": paddle.zeros([4, 6], "int32")},
        TypeError,
        "gating must be of dtype bfloat16, float16 or float32, but got int32",
    ),
    "top_k": ({"top_k": 7}, ValueError, "top_k must be at most 6, the experts to choose from, but got 7"),
    "top_k_zero": ({"top_k": 0}, ValueError, "top_k must be from 1 to 2147483647, but got 0"),
    "top_k_of_groups": (
        {"top_k": 3, "num_groups": 3, "topk_groups": 1},
        ValueError,
        "top_k must be at most 2, the experts to choose from, but got 3",
    ),
    "flag": ({"use_sigmoid": 1}, TypeError, "use_sigmoid must be a bool, but got 1 of type int"),
    "both": (
        {"post_act": True},
        ValueError,
        "exactly one of pre_act and post_act must be True, but got both",
    ),
    "neither": (
        {"pre_act": False},
        ValueError,
        "exactly one of pre_act and post_act must be True, but got neither",
    ),
    "groups": ({"num_groups": 4}, ValueError, "num_groups must be a divisor of num_experts=6, but got 4"),
    "topk_groups": (
        {"num_groups": 3, "topk_groups": 4},
        ValueError,
        "topk_groups must be at most 3, the number of groups, but got 4",
    ),
    "scores_per_group": (
        {"scores_per_group": 0},
        ValueError,
        "scores_per_group must be from 1 to 2147483647, but got 0",
    ),
    "bias": (
        {"correction_bias": paddle.zeros([5])},
        ValueError,
        "correction_bias must be of shape [6] or [1, 6], but got [5]",
    ),
    "bias_of_rows": (
        {"correction_bias": paddle.zeros([2, 6])},
        ValueError,
        "correction_bias must be of shape [6] or [1, 6], but got [2, 6]",
    ),
    "score_dtype": (
        {"score_dtype": "bfloat16"},
        ValueError,
        "score_dtype must be one of None, 'float32', but got 'bfloat16'",
    ),
    "bias_dtype": (
        {"correction_bias": paddle.zeros([6], "bfloat16")},
        TypeError,
        'correction_bias must be of dtype float32, but got bfloat16; convert it with .astype("float32")',
    ),
    "factor": ({"scaling_factor": float("inf")}, ValueError, "scaling_factor must be finite, but got inf"),
    "factor_type": ({"scaling_factor": "2"}, TypeError, "scaling_factor must be a number, but got str"),
}


@pytest.mark.parametrize(("changes", "error", "text"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named(changes, error, text, place):
    arguments = {"gating": paddle.zeros([4, 6]), "top_k": 2, "use_sigmoid": False, "renormalize": True, **changes}
    with pytest.raises(error, match=f"^calculate_topk: {re.escape(text)}$"):
        calculate_topk(**arguments)
