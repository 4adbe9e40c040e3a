# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""route: the plan is the oracle's, bit for bit, for anything that can be routed."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import route, unpermute
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.routing import GENERATORS
from tests.ops.problems import (
    TENSOR_FIELDS,
    Routing,
    assert_plan,
    make_problem,
    optional_tensor,
    routings,
    tensor,
)
from tests.params import MOST_EXPERTS, SHAPES, SMALL


@given(case=routings())
@settings(max_examples=120)
def test_plan_equals_the_oracle(case: Routing, place):
    probs = optional_tensor(case.probs, place)
    plan = route(tensor(case.routing, place), probs, **case.arguments, validate=False)
    assert_plan(plan, case.oracle())


@pytest.mark.parametrize("routing", GENERATORS)
@pytest.mark.parametrize("shape", [*SHAPES, MOST_EXPERTS], ids=str)
def test_plan_of_named_shapes(shape, routing, rng, place):
    problem = make_problem(rng, shape, routing=routing)
    ids, probs = tensor(problem.ids, place), tensor(problem.probs, place)
    assert_plan(route(ids, probs, **problem.route_arguments, validate=True), problem.plan())


@pytest.mark.parametrize("routing", ["uniform", "half_unassigned"])
def test_plan_is_the_same_on_both_backends(routing, rng, place, backend):
    problem = make_problem(rng, SMALL, routing=routing)
    ids, probs = tensor(problem.ids, place), tensor(problem.probs, place)
    assert_plan(route(ids, probs, **problem.route_arguments), problem.plan())
    mask = np.zeros((SMALL.T, SMALL.E), np.bool_)
    tokens, slots = np.nonzero(problem.ids >= 0)
    mask[tokens, problem.ids[tokens, slots]] = True
    plan = route(tensor(mask, place), topk=SMALL.K)
    assert_bits_equal(plan.tokens_per_expert, problem.plan().tokens_per_expert)
    assert plan.num_experts == SMALL.E


def test_row_probs_of_a_plan_without_probabilities_raise_instead_of_meaning_no_weights(place, backend):
    plan = route(paddle.to_tensor([[0, 1], [1, 2]], place=place), num_experts=3)
    with pytest.raises(ValueError, match=r"^plan\.row_probs: this plan was made without probabilities"):
        unpermute(paddle.ones([4, 2]), plan, plan.row_probs)


def test_a_plan_prints_as_its_sizes_and_not_as_its_tensors(place, backend):
    plan = route(paddle.to_tensor([[0, 1], [1, 2]], place=place), num_experts=3, padding_alignment=4)
    assert str(plan) == "Plan(num_tokens=2, topk=2, num_experts=3, padding_alignment=4, num_rows=12)"


def count_forms(counts, place):
    padded = -(-counts // SMALL.A) * SMALL.A
    return {
        "counted": None,
        "list": counts.tolist(),
        "tuple": tuple(counts.tolist()),
        "list of NumPy integers": list(counts),
        "list of 0-D tensors": list(tensor(counts, place)),
        "list of tensors with one element": list(tensor(counts[:, None], place)),
        "int32 array": counts.astype(np.int32),
        "int64 array": counts.astype(np.int64),
        "padded list": padded.tolist(),
        "padded tensor": tensor(padded.astype(np.int32), place),
        "list of which one is padded": [*padded[:1].tolist(), *counts[1:].tolist()],
        "list of ints and tensors": [tensor(counts, place)[0], *counts[1:].tolist()],
        "int32 tensor": tensor(counts.astype(np.int32), place),
        "int64 tensor": tensor(counts.astype(np.int64), place),
    }


@pytest.mark.parametrize("form", count_forms(np.zeros(1, np.int32), "cpu"))
def test_counts_may_come_in_any_form(form, rng, place, backend):
    problem = make_problem(rng, SMALL)
    expected = problem.plan()
    counts = count_forms(expected.routed_per_expert, place)[form]
    ids, probs = tensor(problem.ids, place), tensor(problem.probs, place)
    assert_plan(route(ids, probs, **problem.route_arguments, tokens_per_expert=counts), expected)


def test_counts_are_ignored_with_a_static_buffer(rng, place, backend):
    problem = make_problem(rng, SMALL)
    for counts in ([], [9] * SMALL.E, "nonsense"):
        plan = route(
            tensor(problem.ids, place),
            num_experts=SMALL.E,
            padding_alignment=2,
            tokens_per_expert=counts,
            buffer_size=50,
        )
        assert plan.num_rows == 50
        assert_bits_equal(plan.routed_per_expert, problem.plan().routed_per_expert)


@given(case=routings(), extra=st.integers(0, 9))
@settings(max_examples=60)
def test_rows_that_fit_a_small_buffer_stay_where_they_are(case: Routing, extra, place):
    arguments = {**case.arguments, "buffer_size": -1}
    ids = tensor(case.routing, place)
    whole = route(ids, **arguments, validate=False)
    size = max(whole.num_rows - 1 - extra, 0)
    part = route(ids, **{**arguments, "buffer_size": size}, validate=False)
    assert_bits_equal(part.row_to_slot, whole.row_to_slot[:size])
    dropped = np.count_nonzero(whole.row_to_slot.numpy()[size:] >= 0)
    assert part.overflow.item() == dropped
    assert (part.routed_per_expert.sum() - part.tokens_per_expert.sum()).item() == dropped
    assert part.expert_offsets.numpy().max() <= size
    assert_bits_equal(part.routed_per_expert, whole.routed_per_expert)


def test_nothing_of_a_plan_but_the_probabilities_has_a_gradient(rng, place, backend):
    problem = make_problem(rng, SMALL)
    plan = route(tensor(problem.ids, place), tensor(problem.probs, place, gradient=True), num_experts=SMALL.E)
    for name in TENSOR_FIELDS:
        field = getattr(plan, name)
        assert field.stop_gradient == (name != "row_probs"), name
        assert field.dtype == (paddle.float32 if name == "row_probs" else paddle.int32), name
        assert field.place == place
