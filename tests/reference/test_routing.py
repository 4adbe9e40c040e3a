# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""route and route_backward: against loops, against cases by hand, and by invariants of every plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from paddle_moe_ops.reference import Plan, route, route_backward

from . import brute_force
from .cases import EXAMPLES, Case, assert_same_bits, routing_cases

ARRAYS = tuple(field for field in Plan._fields[:10] if field != "row_probs")
INTS = Plan._fields[10:]


def assert_plan_equals(plan: Plan, loops: brute_force.Routing) -> None:
    for field in ARRAYS:
        actual, expected = getattr(plan, field), getattr(loops, field)
        assert actual.dtype == np.int32, field
        shape = (loops.num_tokens, loops.topk) if field in ("slot_to_row", "token_rows") else np.shape(expected)
        assert actual.shape == shape, field
        assert actual.tolist() == expected, field
    for field in INTS:
        assert type(getattr(plan, field)) is int, field
        assert getattr(plan, field) == getattr(loops, field), field
    if loops.row_probs is None:
        assert plan.row_probs is None
    else:
        np.testing.assert_array_equal(plan.row_probs, np.array(loops.row_probs, np.float32), strict=True)


@EXAMPLES
@given(routing_cases(is_mask=False))
def test_plan_of_ids_equals_loops(case: Case) -> None:
    assert_plan_equals(case.plan, case.loops)


@EXAMPLES
@given(routing_cases(is_mask=True))
def test_plan_of_a_mask_equals_loops(case: Case) -> None:
    assert_plan_equals(case.plan, case.loops)


@EXAMPLES
@given(routing_cases())
def test_maps_are_inverse_and_ordered(case: Case) -> None:
    plan = case.plan
    slots = np.flatnonzero(plan.slot_to_row.ravel() >= 0)
    rows = plan.slot_to_row.ravel()[slots]
    assert len(np.unique(rows)) == len(rows)
    np.testing.assert_array_equal(plan.row_to_slot[rows], slots)
    live = np.flatnonzero(plan.row_to_slot >= 0)
    assert len(live) == len(rows) == plan.tokens_per_expert.sum()
    np.testing.assert_array_equal(plan.row_to_token[live], plan.row_to_slot[live] // plan.topk)
    # Experts ascend by row, and flat slots within an expert, as in a stable sort.
    keys = plan.row_to_expert[live].astype(np.int64) * (plan.num_tokens * plan.topk + 1) + plan.row_to_slot[live]
    assert (np.diff(keys) > 0).all()
    for expert in range(plan.num_experts):
        start, count = plan.expert_offsets[expert], plan.tokens_per_expert[expert]
        assert (plan.row_to_expert[start : start + count] == expert).all()
        assert (plan.row_to_expert[start + count : plan.expert_offsets[expert + 1]] == -1).all()
        assert start % plan.padding_alignment == 0 or start == plan.num_rows
    assert (plan.row_to_token[plan.expert_offsets[-1] :] == -1).all()
    assert plan.routed_per_expert.sum() - plan.tokens_per_expert.sum() == plan.overflow


@EXAMPLES
@given(routing_cases())
def test_probability_gradient_goes_where_the_probability_came_from(case: Case) -> None:
    is_mask = case.routing.dtype == np.bool_
    d_row_probs = np.arange(1, case.plan.num_rows + 1, dtype=np.float32)
    expected = np.zeros(case.routing.shape, np.float32)
    for row, slot in enumerate(case.loops.row_to_slot):
        if slot >= 0:
            token, k = divmod(slot, case.loops.topk)
            expected[token, case.loops.row_to_expert[row] if is_mask else k] = d_row_probs[row]
    mask_experts = case.plan.num_experts if is_mask else None
    assert_same_bits(route_backward(d_row_probs, case.plan, mask_experts=mask_experts), expected)


def test_a_small_plan_by_hand() -> None:
    ids = np.array([[2, 0], [0, -1], [2, 2], [-1, 1]], np.int32)
    probs = np.array([[0.5, 0.25], [1, 9], [0.75, 8], [9, 0.125]], np.float32)
    plan = route(ids, probs, num_experts=4, padding_alignment=3, validate=False)
    assert plan.slot_to_row.tolist() == [[6, 0], [1, -1], [7, -1], [-1, 3]]
    assert plan.token_rows.tolist() == [[0, 6], [1, -1], [7, -1], [3, -1]]
    assert plan.row_to_token.tolist() == [0, 1, -1, 3, -1, -1, 0, 2, -1]
    assert plan.row_to_slot.tolist() == [1, 2, -1, 7, -1, -1, 0, 4, -1]
    assert plan.row_to_expert.tolist() == [0, 0, -1, 1, -1, -1, 2, 2, -1]
    assert plan.row_probs.tolist() == [0.25, 1, 0, 0.125, 0, 0, 0.5, 0.75, 0]
    assert plan.tokens_per_expert.tolist() == plan.routed_per_expert.tolist() == [2, 1, 2, 0]
    assert plan.expert_offsets.tolist() == [0, 3, 6, 9, 9]
    assert plan.overflow.tolist() == 0
    assert plan[10:] == (4, 2, 4, 3, 9)


def test_each_duplicate_gets_a_row_of_its_own() -> None:
    plan = route(np.array([[1, 1, 0]], np.int32), num_experts=2, duplicates="each")
    assert plan.slot_to_row.tolist() == [[1, 2, 0]]
    assert plan.token_rows.tolist() == [[0, 1, 2]]
    assert plan.routed_per_expert.tolist() == [1, 2]


def test_a_buffer_one_row_too_small_drops_one_slot_and_moves_none() -> None:
    ids = np.array([[0, 1], [1, 2], [0, 2]], np.int32)
    whole = route(ids, num_experts=3, padding_alignment=2)
    small = route(ids, num_experts=3, padding_alignment=2, buffer_size=whole.num_rows - 1)
    assert whole.slot_to_row.tolist() == [[0, 2], [3, 4], [1, 5]]
    assert small.slot_to_row.tolist() == [[0, 2], [3, 4], [1, -1]]
    assert small.overflow.tolist() == 1
    assert small.tokens_per_expert.tolist() == [2, 2, 1]
    assert small.routed_per_expert.tolist() == [2, 2, 2]
    assert small.expert_offsets.tolist() == [0, 2, 4, 5]


def test_a_full_expert_keeps_the_first_of_its_rows() -> None:
    ids = np.array([[1, 0], [1, -1], [0, 1], [2, 1]], np.int32)
    probs = np.array([[0.5, 0.25], [1, 9], [0.75, 8], [7, 6]], np.float32)
    plan = route(ids, probs, num_experts=3, padding_alignment=3, capacity=2, validate=True)
    assert plan.slot_to_row.tolist() == [[3, 0], [4, -1], [1, -1], [6, -1]]
    assert plan.token_rows.tolist() == [[0, 3], [4, -1], [1, -1], [6, -1]]
    assert plan.row_to_slot.tolist() == [1, 4, -1, 0, 2, -1, 6, -1, -1]
    assert plan.row_probs.tolist() == [0.25, 0.75, 0, 0.5, 1, 0, 7, 0, 0]
    assert plan.tokens_per_expert.tolist() == [2, 2, 1]
    assert plan.routed_per_expert.tolist() == [2, 4, 1]
    assert plan.expert_offsets.tolist() == [0, 3, 6, 9]
    assert plan.overflow.tolist() == 2


def test_true_counts_are_those_before_slots_are_dropped_for_capacity() -> None:
    ids = np.array([[0], [0], [1]], np.int32)
    assert route(ids, num_experts=2, tokens_per_expert=[2, 1], capacity=1).tokens_per_expert.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"route: tokens_per_expert must be \[2, 1\]"):
        route(ids, num_experts=2, tokens_per_expert=[1, 1], capacity=1)


def test_a_buffer_that_lacks_padding_only_drops_nothing() -> None:
    plan = route(np.array([[0]], np.int32), num_experts=1, padding_alignment=16, buffer_size=1, validate=True)
    assert plan.slot_to_row.tolist() == [[0]]
    assert plan.overflow.tolist() == 0


def test_a_mask_keeps_the_lowest_experts() -> None:
    mask = np.array([[0, 1, 1, 1], [0, 0, 0, 1]], bool)
    probs = np.array([[9, 0.5, 0.25, 9], [9, 9, 9, 0.75]], np.float32)
    plan = route(mask, probs, topk=2, validate=False)
    assert plan.slot_to_row.tolist() == [[0, 1], [2, -1]]
    assert plan.row_to_expert.tolist() == [1, 2, 3]
    assert plan.row_probs.tolist() == [0.5, 0.25, 0.75]
    d_probs = route_backward(np.array([1, 2, 3], np.float32), plan, mask_experts=4)
    assert d_probs.tolist() == [[0, 1, 2, 0], [0, 0, 0, 3]]


@pytest.mark.parametrize("tokens", [[1, 2], (1, 2), np.array([1, 2]), [np.array(1), np.array(2)]])
def test_true_counts_are_accepted_in_every_form(tokens) -> None:
    ids = np.array([[0, 1], [1, -1]], np.int32)
    assert route(ids, num_experts=2, tokens_per_expert=tokens).num_rows == 3


def test_counts_are_ignored_with_a_static_buffer() -> None:
    plan = route(np.array([[0]], np.int32), num_experts=1, tokens_per_expert=[5], buffer_size=4)
    assert plan.tokens_per_expert.tolist() == [1]


@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts"), [(0, 8, 64), (33, 64, 1024), (700, 8, 1024), (64, 1, 1)]
)
def test_large_and_empty_routings_equal_loops(num_tokens: int, topk: int, num_experts: int) -> None:
    rng = np.random.default_rng(num_tokens)
    ids: NDArray = rng.integers(-1, num_experts, (num_tokens, topk)).astype(np.int32)
    probs = rng.random((num_tokens, topk), np.float32)
    plan = route(ids, probs, num_experts=num_experts, padding_alignment=16, validate=False)
    assert_plan_equals(plan, brute_force.route(ids.tolist(), probs.tolist(), num_experts, topk, 16, -1, "first"))
