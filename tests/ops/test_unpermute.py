# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""unpermute: sums of rows in ascending order, bit for bit, plain and weighted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import permute, reference, route, unpermute
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.compiled import backend as compiled
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import (
    SEEDS,
    Routing,
    every_kind,
    make_problem,
    optional_tensor,
    ordinary,
    plan_tensors,
    routings,
    tensor,
)
from tests.pairwise import pairwise_of
from tests.params import EMPTY, HIDDEN_SIZES, ROW_DTYPES, SHAPES, SMALL, SUM_DTYPES

WEIGHTS = ["plain", "by row", "by slot"]


def draw_weights(rng, kind, plan, draw=every_kind):
    if kind == "plain":
        return None
    return draw(rng, (plan.num_rows,) if kind == "by row" else (plan.num_tokens, plan.topk))


@given(
    case=routings(),
    dtype=st.sampled_from(SUM_DTYPES),
    hidden=st.sampled_from([1, 7, 72, 200]),
    weights=st.sampled_from(WEIGHTS),
    seed=SEEDS,
)
@settings(max_examples=120)
def test_sums_equal_the_oracle(case: Routing, dtype, hidden, weights, seed, place):
    rng = np.random.default_rng(seed)
    plan = case.oracle()
    y = every_kind(rng, (plan.num_rows, hidden), dtype)
    probs = draw_weights(rng, weights, plan)
    out = unpermute(tensor(y, place), plan_tensors(plan, place), optional_tensor(probs, place))
    assert_bits_equal(out, reference.unpermute(y, plan, probs), any_nan=True)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_sums_of_every_width_and_dtype(hidden, dtype, weights, rng, place):
    problem = make_problem(rng, SMALL._replace(H=hidden), dtype)
    plan = problem.plan()
    y, probs = every_kind(rng, (plan.num_rows, hidden), dtype), draw_weights(rng, weights, plan, ordinary)
    out = unpermute(tensor(y, place), plan_tensors(plan, place), optional_tensor(probs, place))
    assert_bits_equal(out, reference.unpermute(y, plan, probs), any_nan=True)


@pairwise_of(
    pytest.mark.parametrize("weights", WEIGHTS),
    pytest.mark.parametrize("routing", ["all_to_one", "uniform", "all_unassigned", "expert_parallel_sparse"]),
    pytest.mark.parametrize("shape", SHAPES, ids=str),
    empty={"shape": [EMPTY], "routing": ["all_unassigned"]},
)
def test_sums_of_named_shapes(shape, routing, weights, rng, place):
    problem = make_problem(rng, shape, SUM_DTYPES[2], routing)
    plan = problem.plan()
    y, probs = ordinary(rng, (plan.num_rows, shape.H), SUM_DTYPES[2]), draw_weights(rng, weights, plan, ordinary)
    out = unpermute(tensor(y, place), plan_tensors(plan, place), optional_tensor(probs, place))
    assert_bits_equal(out, reference.unpermute(y, plan, probs), any_nan=True)


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_both_backends_give_the_same(weights, dtype, rng, place, backend):
    problem = make_problem(rng, SMALL, dtype)
    plan = problem.plan()
    y, probs = every_kind(rng, (plan.num_rows, SMALL.H), dtype), draw_weights(rng, weights, plan)
    out = unpermute(tensor(y, place), plan_tensors(plan, place), optional_tensor(probs, place))
    assert_bits_equal(out, reference.unpermute(y, plan, probs), any_nan=True)


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_a_single_unweighted_row_keeps_its_bits(dtype, rng, place, backend):
    """NaN payloads, signalling NaN and -0.0 included: no arithmetic touches the row."""
    ids = np.arange(40, dtype=np.int32).reshape(40, 1)
    plan = reference.route(ids, num_experts=40)
    y = every_kind(rng, (40, 33), dtype)
    assert_bits_equal(unpermute(tensor(y, place), plan_tensors(plan, place)), y)


def test_rows_of_padding_are_not_read(rng, place, backend):
    problem = make_problem(rng, SMALL._replace(A=16))
    plan = problem.plan(buffer_size=200)
    y = ordinary(rng, (plan.num_rows, SMALL.H))
    poisoned = np.where((plan.row_to_token >= 0)[:, None], y, np.float32(np.nan))
    for probs in (None, plan.row_probs, problem.probs):
        weights = optional_tensor(probs, place)
        out = unpermute(tensor(poisoned, place), plan_tensors(plan, place), weights)
        assert_bits_equal(out, unpermute(tensor(y, place), plan_tensors(plan, place), weights))
        assert not np.isnan(out.numpy()).any()


def test_probabilities_by_row_and_by_slot_weight_alike(rng, place, backend):
    problem = make_problem(rng, SMALL)
    plan = route(tensor(problem.ids, place), tensor(problem.probs, place), num_experts=SMALL.E)
    y = tensor(ordinary(rng, (plan.num_rows, SMALL.H)), place)
    assert_bits_equal(unpermute(y, plan, plan.row_probs), unpermute(y, plan, tensor(problem.probs, place)))


@pytest.mark.parametrize("dtype", [d for d in ROW_DTYPES if d in SUM_DTYPES], ids=str)
def test_permute_and_unpermute_of_a_top_1_routing_give_the_tokens_back(dtype, rng, place, backend):
    x = every_kind(rng, (50, 31), dtype)
    ids = rng.integers(0, 7, (50, 1), dtype=np.int32)
    plan = route(tensor(ids, place), num_experts=7, padding_alignment=16)
    rows, _ = permute(tensor(x, place), plan)
    assert_bits_equal(unpermute(rows, plan), x)


def test_permute_and_unpermute_of_ones_count_the_experts_of_each_token(rng, place, backend):
    problem = make_problem(rng, SMALL)
    plan = route(tensor(problem.ids, place), num_experts=SMALL.E, padding_alignment=2)
    rows, _ = permute(tensor(np.ones((SMALL.T, 3), np.float32), place), plan)
    counts = np.count_nonzero(problem.ids >= 0, axis=1)
    np.testing.assert_array_equal(unpermute(rows, plan).numpy(), np.repeat(counts[:, None], 3, axis=1))


@pytest.mark.parametrize("hidden", [1, 16411])
def test_a_gradient_that_is_not_wanted_is_zeros_in_memory_used_before(hidden, rng, place):
    problem = make_problem(rng, SMALL._replace(T=127, H=hidden), np.float32)
    plan = problem.plan()
    y, probs = ordinary(rng, (plan.num_rows, hidden), np.float32), ordinary(rng, (plan.num_rows,), np.float32)
    d_out = ordinary(rng, (plan.num_tokens, hidden), np.float32)
    tensors = [tensor(array, place) for array in (d_out, y, probs)]
    maps = plan_tensors(plan, place)
    for _ in range(3):
        used = tensor(np.full_like(y, 7.0), place)
        del used
        d_rows, d_probs = compiled.unpermute_backward(*tensors, maps, (False, True))
        assert not to_numpy(d_rows).any()
        assert to_numpy(d_probs).any()
        d_rows, d_probs = compiled.unpermute_backward(*tensors, maps, (True, False))
        assert to_numpy(d_rows).any()
        assert not to_numpy(d_probs).any()
