# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every call that code for Unsloth's mixture-of-experts functions makes, against the same in plain NumPy."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import numpy as np
import paddle
import pytest

from paddle_moe_ops import indexed, reference, route
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import backward, ordinary, plan_tensors, tensor
from tests.pairwise import pairwise
from tests.params import SUM_DTYPES

H, OUT = 7, 11
TOKENS = {0: (0, 3), 1: (1, 1), 63: (7, 9), 1025: (5, 205)}  # as [B, S]
SIZES = {"T": list(TOKENS), "K, E": [(1, 3), (2, 5), (8, 128)]}
SIZES_AND_DTYPES = {**SIZES, "dtype": SUM_DTYPES}
NOTHING = {"T": [0]}
# Error bound of a product of numbers of size 1: its own rounding and the rounding of one factor.
PRECISION = {dtype.name: scale for dtype, scale in zip(SUM_DTYPES, (1e-6, 2e-3, 2e-2), strict=True)}


def assert_near(got, expected, dtype, terms=1.0):
    """Assert that results are within the dtype's precision for sums of ``terms`` terms."""
    assert list(got.shape) == list(expected.shape)
    tolerance = PRECISION[np.dtype(dtype).name]
    actual = to_numpy(got).astype(np.float64)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * 4 * np.sqrt(terms))


def distinct_ids(rng, T, K, E, unassigned=0.0):
    ids = np.argsort(rng.random((T, E)), axis=1)[:, :K]
    return np.where(rng.random((T, K)) < unassigned, -1, ids)


@pairwise(
    {
        **SIZES,
        "ids_dtype": [np.int32, np.int64],
        "index_dtype": ["int32", "int64", paddle.int64],
        "unassigned": {"all assigned": 0.0, "some unassigned": 0.3},
    },
    empty=NOTHING,
)
def test_ids_of_any_rank_are_sorted_as_the_flat_ones(T, K, E, ids_dtype, index_dtype, unassigned, rng, place, backend):
    ids = distinct_ids(rng, T, K, E, unassigned).astype(ids_dtype)
    flat = ids.reshape(-1)
    order = np.argsort(np.where(flat < 0, E, flat), kind="stable")
    expected = np.bincount(flat[flat >= 0], minlength=E), order, np.argsort(order)
    for shape in ([T * K], [T, K], [*TOKENS[T], K], [1, *TOKENS[T], K]):
        got = indexed.get_routing_indices(tensor(ids.reshape(shape), place), E, True, index_dtype=index_dtype)
        for each, wanted, dtype in zip(got, expected, (ids.dtype, *[str(index_dtype)[-5:]] * 2), strict=True):
            assert_bits_equal(each, wanted.astype(dtype))
            assert each.stop_gradient


def test_an_expert_that_a_flat_slot_repeats_counts_twice(place, backend):
    counts, gather = indexed.get_routing_indices(tensor(np.int64([1, 1, 0, 1]), place), 2)
    assert (counts.tolist(), gather.tolist()) == ([1, 3], [2, 0, 1, 3])
    assert gather.dtype == paddle.int32


@pairwise({**SIZES_AND_DTYPES, "index_dtype": ["int32", "int64"]}, empty=NOTHING)
def test_tokens_go_to_rows_and_back_with_their_gradients(T, K, E, dtype, index_dtype, rng, place):
    x, ids = ordinary(rng, (*TOKENS[T], H), dtype), distinct_ids(rng, T, K, E)
    _, gather = indexed.get_routing_indices(tensor(ids.reshape(-1), place), E, index_dtype=index_dtype)
    leaf = tensor(x, place, gradient=True)
    rows = indexed.permute(leaf, gather, K)
    slots = indexed.unpermute(rows, gather)
    flat = x.reshape(T, H)
    assert_bits_equal(rows, flat[gather.numpy() // K])
    assert_bits_equal(slots, np.repeat(flat, K, axis=0))
    d_slots = ordinary(rng, (T * K, H), dtype)
    backward([slots], [d_slots])
    expected = d_slots.astype(np.float64).reshape(T, K, H).sum(axis=1).reshape(x.shape)
    assert_near(leaf.grad, expected, dtype, terms=K)


@pairwise(
    {
        **SIZES_AND_DTYPES,
        "renormalize": {"raw": False, "normed": True},
        "use_sigmoid": {"softmax": False, "sigmoid": True},
    },
    empty=NOTHING,
)
def test_a_router_called_by_position_and_by_keyword(T, K, E, dtype, renormalize, use_sigmoid, rng, place):
    gating = ordinary(rng, (T, E), dtype)
    leaf = tensor(gating, place, gradient=True)
    by_position = indexed.calculate_topk(tensor(gating, place), K, use_sigmoid, renormalize)
    options = {"top_k": K, "use_sigmoid": use_sigmoid, "renormalize": renormalize}
    weights, ids = indexed.calculate_topk(gating_output=leaf, **options, pre_act=True, post_act=False)
    assert_bits_equal(weights, to_numpy(by_position[0]))
    assert_bits_equal(ids, by_position[1].numpy())

    wide, ids = gating.astype(np.float64), ids.numpy()
    raised = np.exp(wide - wide.max(axis=1, keepdims=True)) if T else wide
    scores = 1 / (1 + np.exp(-wide)) if use_sigmoid else raised / raised.sum(axis=1, keepdims=True)
    chosen = np.take_along_axis(scores, ids, axis=1)
    # As high as the best, up to what is rounded before the choice.
    assert_near(paddle.to_tensor(chosen), -np.sort(-scores, axis=1)[:, :K], dtype)
    divisor = chosen.sum(axis=1, keepdims=True) if renormalize else np.ones((T, 1))
    assert_near(weights, chosen / divisor, dtype)

    d_weights = ordinary(rng, (T, K), dtype)
    backward([weights], [d_weights])
    d_chosen = d_weights.astype(np.float64)
    if renormalize:
        d_chosen = (d_chosen - (d_chosen * chosen / divisor).sum(axis=1, keepdims=True)) / divisor
    d_scores = np.zeros((T, E))
    np.put_along_axis(d_scores, ids, d_chosen, axis=1)
    d_gating = (
        d_scores * scores * (1 - scores)
        if use_sigmoid
        else scores * (d_scores - (d_scores * scores).sum(axis=1, keepdims=True))
    )
    assert_near(leaf.grad, d_gating, dtype, terms=K)


def test_the_name_gating_output_changes_no_signature():
    parameters = list(inspect.signature(indexed.calculate_topk).parameters)
    assert parameters[:6] == ["gating", "top_k", "use_sigmoid", "renormalize", "pre_act", "post_act"]
    assert "gating_output" not in parameters


@pytest.mark.parametrize("by_keyword", [False, True])
def test_logits_that_are_given_twice_or_not_at_all_are_refused(by_keyword, place):
    gating = paddle.zeros([2, 3])
    options = {"top_k": 1, "use_sigmoid": True, "renormalize": False}
    arguments, keywords = ((), {"gating": gating}) if by_keyword else ((gating,), {})
    with pytest.raises(TypeError, match=r"^calculate_topk: gating was given twice, the second time as gating_output$"):
        indexed.calculate_topk(*arguments, **keywords, **options, gating_output=gating)
    with pytest.raises(TypeError, match=r"calculate_topk\(\) missing 1 required positional argument: 'gating'"):
        indexed.calculate_topk(**options)
    with pytest.raises(TypeError, match=r"calculate_topk\(\) got an unexpected keyword argument 'gatings'"):
        indexed.calculate_topk(gatings=gating, **options)


@pairwise({**SIZES_AND_DTYPES, "transpose": {"transposed": True, "plain": False}}, empty=NOTHING)
def test_products_of_rows_of_any_rank(T, K, E, dtype, transpose, rng, place):
    ids = np.sort(distinct_ids(rng, T, K, E).reshape(-1))
    shape = (E, OUT, H) if transpose else (E, H, OUT)
    x, w, dy = (ordinary(rng, each, dtype) for each in ((*TOKENS[T], K, H), shape, (T * K, OUT)))
    counts = tensor(np.bincount(ids, minlength=E), place)
    x_leaf, w_leaf = tensor(x, place, gradient=True), tensor(w, place, gradient=True)
    out = indexed.torch_grouped_gemm(x_leaf, w_leaf, counts, transpose)
    backward([out], [dy])
    rows, wide, dy = x.reshape(-1, H).astype(np.float64), w.astype(np.float64), dy.astype(np.float64)
    by_row = (wide if transpose else wide.swapaxes(1, 2))[ids]
    assert_near(out, np.einsum("rh,roh->ro", rows, by_row), dtype, H)
    assert_near(x_leaf.grad, np.einsum("ro,roh->rh", dy, by_row).reshape(x.shape), dtype, OUT)
    d_w = np.zeros((E, OUT, H))
    np.add.at(d_w, ids, dy[:, :, None] * rows[:, None, :])
    assert_near(w_leaf.grad, d_w if transpose else d_w.swapaxes(1, 2), dtype, max(len(ids) / E, 1) * 4)


class Weighting(NamedTuple):
    """The form of the weights: their shape, and `weights_by` of the call."""

    kind: str
    weights_by: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} as {self.weights_by}"

    def of(self, probs, plan):
        return {"none": None, "matrix": probs, "flat": probs.reshape(-1), "rows": plan.row_probs}[self.kind]

    def per_slot(self, gradient, plan):
        """The gradient [T, K] of the slots' probabilities from that of what was given."""
        if self.kind != "rows":
            return gradient.reshape(plan.slot_to_row.shape)
        return np.where(plan.slot_to_row >= 0, np.append(gradient, 0)[plan.slot_to_row], 0)


WEIGHTINGS = [Weighting("none"), Weighting("matrix"), Weighting("matrix", "slot")]
WEIGHTINGS += [Weighting("flat", "slot"), Weighting("rows", "row")]
PLANS = {
    "exact": {},
    "padded": {"padding_alignment": 4},
    "dropped": {"buffer_size": 50},
    "buffer": {"buffer_size": 8300},
}


@pairwise({**SIZES_AND_DTYPES, "options": PLANS, "weighting": WEIGHTINGS}, empty=NOTHING)
def test_products_in_the_order_of_slots(T, K, E, dtype, options, weighting, rng, place):
    check_slots(rng, distinct_ids(rng, T, K, E, 0.2), E, dtype, options, weighting, place)


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_products_in_the_order_of_slots_on_every_backend(weighting, rng, place, backend):
    check_slots(rng, distinct_ids(rng, 63, 2, 5, 0.2), 5, np.float32, PLANS["padded"], weighting, place)


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_products_of_no_slot_that_has_a_row(weighting, rng, place):
    check_slots(rng, np.full((9, 2), -1), 5, np.float32, {}, weighting, place)


def check_slots(rng, ids, E, dtype, options, weighting, place):
    """Row t * K + k is the product of slot k of token t, weighted, and 0 where the slot has no row."""
    T, K = ids.shape
    probs = rng.random((T, K), np.float32) + 0.5
    plan = reference.route(ids.astype(np.int32), probs, num_experts=E, **options)
    shapes = (plan.num_rows, H), (E, OUT, H), (T * K, OUT)
    x, w, dy = (ordinary(rng, shape, dtype) for shape in shapes)
    leaves = [tensor(each, place, gradient=True) for each in (x, w)]
    given = weighting.of(probs, plan)
    if given is not None:
        leaves.append(tensor(given, place, gradient=True))
    on_device = plan_tensors(plan, place)
    out = grouped_gemm(
        *leaves[:2],
        plan=on_device,
        permute_y=True,
        topk_weights=None if given is None else leaves[2],
        weights_by=weighting.weights_by,
    )
    backward([out], [dy])

    x, w, dy = (each.astype(np.float64) for each in (x, w, dy))
    slots = np.flatnonzero(plan.slot_to_row.reshape(-1) >= 0)
    rows, experts = plan.slot_to_row.reshape(-1)[slots], ids.reshape(-1)[slots]
    factors = np.ones(len(slots)) if given is None else probs.reshape(-1)[slots].astype(np.float64)
    products = np.einsum("rh,roh->ro", x[rows], w[experts])
    expected = np.zeros((T * K, OUT))
    expected[slots] = factors[:, None] * products
    assert_near(out, expected, dtype, H)
    d_products = factors[:, None] * dy[slots]
    d_x, d_w = np.zeros(x.shape), np.zeros(w.shape)
    d_x[rows] = np.einsum("ro,roh->rh", d_products, w[experts])
    assert_near(leaves[0].grad, d_x, dtype, OUT)
    np.add.at(d_w, experts, d_products[:, :, None] * x[rows][:, None, :])
    assert_near(leaves[1].grad, d_w, dtype, max(len(slots) / E, 1) * 4)
    if given is not None:
        d_probs = np.zeros(T * K)
        d_probs[slots] = (products * dy[slots]).sum(axis=1)
        got = weighting.per_slot(leaves[2].grad.numpy(), plan)
        assert_near(tensor(got, place), d_probs.reshape(T, K), np.float32, OUT * H)


@pytest.mark.parametrize("permute_y", [False, True])
@pytest.mark.parametrize("buffer_size", [-1, 24], ids=["as many rows as slots", "more rows than slots"])
def test_flat_weights_need_a_word_whatever_their_number(buffer_size, permute_y, rng, place):
    probs = rng.random((9, 2), np.float32)
    ids = tensor(distinct_ids(rng, 9, 2, 4).astype(np.int32), place)
    plan = route(ids, tensor(probs, place), num_experts=4, buffer_size=buffer_size)
    x, w = tensor(ordinary(rng, (plan.num_rows, 3)), place), tensor(ordinary(rng, (4, 5, 3)), place)
    options = {"plan": plan, "permute_y": permute_y}
    expected = grouped_gemm(x, w, topk_weights=tensor(probs, place), **options).numpy()
    for order, weights in {"slot": tensor(probs.reshape(-1), place), "row": plan.row_probs}.items():
        assert_bits_equal(grouped_gemm(x, w, topk_weights=weights, weights_by=order, **options), expected)
        with pytest.raises(
            ValueError, match=r"^grouped_gemm: weights_by must be 'row' or 'slot' with flat topk_weights"
        ):
            grouped_gemm(x, w, topk_weights=weights, **options)


def weighted_products(x, w, ids, weights):
    plan = route(ids, num_experts=3)
    return grouped_gemm(x, w, plan=plan, permute_x=False, topk_weights=weights, permute_y=True)


def test_flat_weights_need_a_word_in_a_graph_too(place):
    shapes = ("x", [None, 4], "float32"), ("w", [3, 5, 4], "float32"), ("ids", [None, 2], "int32")
    specs = [paddle.static.InputSpec(shape, dtype, name) for name, shape, dtype in shapes]
    specs.append(paddle.static.InputSpec([None], "float32", "weights"))
    traced = paddle.jit.to_static(weighted_products, input_spec=specs, full_graph=True)
    with pytest.raises(ValueError, match="grouped_gemm: weights_by must be 'row' or 'slot' with flat topk_weights"):
        traced.concrete_program  # noqa: B018  # builds the program
