# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""moe_unpermute: sums over the row map and probabilities per slot, bit for bit against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import moe_unpermute, reference
from paddle_moe_ops.testing.equality import assert_all_bits_equal, assert_bits_equal
from tests.ops.problems import SEEDS, every_kind, ids_and_experts, make_problem, ordinary, tensor
from tests.pairwise import pairwise_of
from tests.params import EMPTY, HIDDEN_SIZES, MOST_EXPERTS, SHAPES, SMALL, SUM_DTYPES

NAMES = ("hidden_states", "expert_prob_topk")
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"using_weighted_combine": True}, id="weighted"),
    pytest.param({"compat": "paddle"}, id="plain-compat"),
    pytest.param({"using_weighted_combine": True, "compat": "paddle"}, id="weighted-compat"),
]


def draw_rowmap(rng: np.random.Generator, kind: str, plan: reference.Plan) -> np.ndarray:
    """A row map: the one that belongs to the plan, or one with entries that are repeated or out of range."""
    if kind == "of the plan":
        return reference.plan_to_rowmap(plan)
    shape = (plan.num_tokens, plan.num_experts)
    if kind == "any rows":
        rowmap = rng.integers(-3, plan.num_rows + 3, shape)
        extremes = rng.choice([np.iinfo(np.int32).min, np.iinfo(np.int32).max], shape)
        return np.where(rng.random(shape) < 0.1, extremes, rowmap).astype(np.int32)
    return np.full(shape, rng.integers(plan.num_rows) if plan.num_rows else 0, np.int32)


@given(
    ids_and_experts=ids_and_experts(),
    dtype=st.sampled_from(SUM_DTYPES),
    hidden=st.sampled_from([1, 7, 72, 200]),
    kind=st.sampled_from(["of the plan", "any rows", "one row everywhere"]),
    weighted=st.booleans(),
    compat=st.sampled_from([None, "paddle"]),
    column=st.booleans(),
    alignment=st.sampled_from([1, 2, 16]),
    seed=SEEDS,
)
@settings(max_examples=120)
def test_outputs_equal_the_oracle(
    ids_and_experts, dtype, hidden, kind, weighted, compat, column, alignment, seed, place
):
    rng = np.random.default_rng(seed)
    ids, num_experts = ids_and_experts
    plan = reference.route(ids, num_experts=num_experts, padding_alignment=alignment, validate=False)
    rowmap = draw_rowmap(rng, kind, plan)
    rows = every_kind(rng, (plan.num_rows, hidden), dtype)
    probs = every_kind(rng, (plan.num_rows, 1) if column else (plan.num_rows,))
    arrays = rows, rowmap, ids, probs
    options: dict[str, Any] = {"using_weighted_combine": weighted, "compat": compat, "validate": False}
    outputs = moe_unpermute(*(tensor(array, place) for array in arrays), len(ids), num_experts, **options)
    hidden_states, prob_topk = reference.moe_unpermute(*arrays, len(ids), num_experts, **options)
    assert_bits_equal(outputs[0], hidden_states, any_nan=True, what=NAMES[0])
    assert_bits_equal(outputs[1], prob_topk, what=NAMES[1])


def clean_call(rng, shape, dtype, routing="half_unassigned", draw=ordinary):
    problem = make_problem(rng, shape, dtype, routing)
    plan = problem.plan()
    return (draw(rng, (plan.num_rows, shape.H), dtype), reference.plan_to_rowmap(plan), problem.ids, plan.row_probs)


@pairwise_of(
    pytest.mark.parametrize("shape", SHAPES, ids=str),
    pytest.mark.parametrize("routing", ["uniform", "all_to_one", "half_unassigned", "all_unassigned"]),
    pytest.mark.parametrize("options", [each.values[0] for each in OPTIONS], ids=[each.id for each in OPTIONS]),
    empty={"shape": [EMPTY], "routing": ["all_unassigned"]},
)
def test_outputs_of_named_shapes(shape, routing, options, rng, place):
    arrays = clean_call(rng, shape, SUM_DTYPES[2], routing)
    outputs = moe_unpermute(*(tensor(array, place) for array in arrays), shape.T, shape.E, **options, validate=True)
    assert_all_bits_equal(outputs, reference.moe_unpermute(*arrays, shape.T, shape.E, **options), NAMES)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_sums_of_every_width_and_dtype(hidden, dtype, options, rng, place):
    shape = SMALL._replace(H=hidden)
    arrays = clean_call(rng, shape, dtype, draw=every_kind)
    outputs = moe_unpermute(*(tensor(array, place) for array in arrays), shape.T, shape.E, **options)
    assert_all_bits_equal(outputs, reference.moe_unpermute(*arrays, shape.T, shape.E, **options), NAMES, any_nan=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_both_backends_give_the_same(dtype, options, rng, place, backend):
    arrays = clean_call(rng, SMALL, dtype)
    outputs = moe_unpermute(*(tensor(array, place) for array in arrays), SMALL.T, SMALL.E, **options)
    assert_all_bits_equal(outputs, reference.moe_unpermute(*arrays, SMALL.T, SMALL.E, **options), NAMES)


def test_the_largest_number_of_experts(rng, place):
    arrays = clean_call(rng, MOST_EXPERTS, np.float32, "uniform")
    outputs = moe_unpermute(*(tensor(array, place) for array in arrays), MOST_EXPERTS.T, MOST_EXPERTS.E)
    assert_all_bits_equal(outputs, reference.moe_unpermute(*arrays, MOST_EXPERTS.T, MOST_EXPERTS.E), NAMES)


def test_the_number_of_tokens_may_be_a_tensor(rng, place, backend):
    arrays = clean_call(rng, SMALL, np.float32)
    tensors = [tensor(array, place) for array in arrays]
    expected = reference.moe_unpermute(*arrays, SMALL.T, SMALL.E)
    for dtype in (np.int32, np.int64):
        outputs = moe_unpermute(*tensors, tensor(np.array(SMALL.T, dtype), place), SMALL.E)
        assert_all_bits_equal(outputs, expected, NAMES)


def test_mixed_precision_makes_no_difference(rng, place, backend):
    tensors = [tensor(array, place) for array in clean_call(rng, SMALL, SUM_DTYPES[2])]
    mixed = moe_unpermute(*tensors, SMALL.T, SMALL.E, True)
    narrow = moe_unpermute(*tensors, SMALL.T, SMALL.E, False)
    assert_all_bits_equal(narrow, mixed, NAMES)


def test_probabilities_may_be_a_column(rng, place, backend):
    rows, rowmap, ids, probs = (tensor(array, place) for array in clean_call(rng, SMALL, np.float32))
    for weighted in (False, True):
        flat = moe_unpermute(rows, rowmap, ids, probs, SMALL.T, SMALL.E, using_weighted_combine=weighted)
        column = moe_unpermute(
            rows, rowmap, ids, probs.unsqueeze(-1), SMALL.T, SMALL.E, using_weighted_combine=weighted
        )
        for got, wanted in zip(column, flat, strict=True):
            assert_bits_equal(got, wanted)


def test_a_token_with_one_row_is_weighted_unless_paddle_is_followed(place, backend):
    rows = np.array([[1.0, -2.0], [3.0, 5.0], [7.0, 11.0]], np.float32)
    rowmap = np.array([[0, -1], [1, 2], [-1, -1]], np.int32)
    ids = np.array([[0, -1], [1, 0], [-1, -1]], np.int32)
    probs = np.array([0.5, 0.25, 2.0], np.float32)
    tensors = [tensor(array, place) for array in (rows, rowmap, ids, probs)]
    ours, prob_topk = moe_unpermute(*tensors, 3, 2, using_weighted_combine=True)
    paddles, _ = moe_unpermute(*tensors, 3, 2, using_weighted_combine=True, compat="paddle")
    np.testing.assert_array_equal(ours.numpy(), [[0.5, -1.0], [14.75, 23.25], [0.0, 0.0]])
    np.testing.assert_array_equal(paddles.numpy(), [[1.0, -2.0], [14.75, 23.25], [0.0, 0.0]])
    np.testing.assert_array_equal(prob_topk.numpy(), [[0.5, 0.0], [2.0, 0.25], [0.0, 0.0]])


def test_slots_that_repeat_an_id_get_its_probability_only_as_in_paddle(place, backend):
    rows, probs = np.ones((2, 3), np.float32), np.array([0.5, 0.25], np.float32)
    rowmap, ids = np.array([[0, 1]], np.int32), np.array([[0, 1, 0, 1]], np.int32)
    tensors = [tensor(array, place) for array in (rows, rowmap, ids, probs)]
    np.testing.assert_array_equal(moe_unpermute(*tensors, 1, 2)[1].numpy(), [[0.5, 0.25, 0.0, 0.0]])
    paddles = moe_unpermute(*tensors, 1, 2, compat="paddle")[1]
    np.testing.assert_array_equal(paddles.numpy(), [[0.5, 0.25, 0.5, 0.25]])


def test_the_sum_runs_over_the_row_map_and_not_over_the_ids(place, backend):
    rows, probs = np.array([[1.0], [2.0]], np.float32), np.array([0.5, 0.25], np.float32)
    rowmap, ids = np.array([[0, 1]], np.int32), np.array([[-1, -1]], np.int32)
    out, prob_topk = moe_unpermute(*(tensor(array, place) for array in (rows, rowmap, ids, probs)), 1, 2)
    assert out.tolist() == [[3.0]]
    assert prob_topk.tolist() == [[0.0, 0.0]]


def test_bad_and_repeated_rows_count_as_none_without_validation(place, backend):
    rows, probs = np.array([[1.0], [2.0], [4.0]], np.float32), np.array([1.0, 2.0, 4.0], np.float32)
    rowmap = np.array([[0, 3, -9], [0, 1, 2], [2, -1, 1]], np.int32)
    ids = np.array([[0, 1], [0, 2], [1, 7]], np.int64)
    tensors = [tensor(array, place) for array in (rows, rowmap, ids, probs)]
    out, prob_topk = moe_unpermute(*tensors, 3, 3, validate=False)
    np.testing.assert_array_equal(out.numpy(), [[1.0], [6.0], [0.0]])
    np.testing.assert_array_equal(prob_topk.numpy(), [[1.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
