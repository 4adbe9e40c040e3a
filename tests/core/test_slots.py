# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""gather_slots and scatter_slots: values of slots from values of rows, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paddle_moe_ops import reference

from ..params import Shape
from ..reference.cases import assert_same_bits, assert_same_numbers
from .binding import Core
from .cases import (
    EXAMPLES,
    SHAPES,
    Problem,
    few_tokens_of_many_experts,
    make_mask,
    make_plan,
    make_problem,
    make_probs,
    problems,
)
from .operators.slots import gather_slots, scatter_slots


def scatter_by_loops(
    slot_to_row: NDArray, slot_values: NDArray, num_rows: int, initial: NDArray | None = None
) -> NDArray:
    """Slot after slot; -0.0 is where a sum begins, so that a value that comes alone keeps its sign."""
    sums: dict[int, np.float32] = {}
    for row, value in zip(slot_to_row.ravel().tolist(), slot_values.ravel(), strict=True):
        if 0 <= row < num_rows:
            start = np.float32(-0.0) if initial is None else initial[row]
            sums[row] = reference.add32(sums.get(row, start), value)
    rows = np.zeros(num_rows, np.float32) if initial is None else initial.copy()
    for row, value in sums.items():
        rows[row] = value
    return rows


@EXAMPLES
@given(problem=problems(), num_threads=st.sampled_from([1, 2]))
def test_gather_equals_the_oracle(core: Core, problem: Problem, num_threads: int) -> None:
    plan = problem.plan
    values = make_probs((plan.num_rows,), 1)
    if problem.is_mask:
        actual = gather_slots(
            core, plan.slot_to_row, values, plan.row_to_expert, plan.num_experts, num_threads=num_threads
        )
        expected = reference.route_backward(values, plan, mask_experts=plan.num_experts)
    else:
        actual = gather_slots(core, plan.slot_to_row, values, num_threads=num_threads)
        expected = reference.route_backward(values, plan)
    assert_same_bits(actual, expected)


@EXAMPLES
@given(problem=problems(), num_threads=st.sampled_from([1, 2]), accumulates=st.booleans())
def test_scatter_equals_loops(core: Core, problem: Problem, num_threads: int, accumulates: bool) -> None:
    plan = problem.plan
    initial = make_probs((plan.num_rows,), 1) if accumulates else None
    slot_values = make_probs(plan.slot_to_row.shape, 2)
    actual = scatter_slots(core, plan.slot_to_row, slot_values, plan.num_rows, initial=initial, num_threads=num_threads)
    assert_same_numbers(actual, scatter_by_loops(plan.slot_to_row, slot_values, plan.num_rows, initial))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather_of_ids_and_of_a_mask_equals_the_oracle(core: Core, shape: Shape) -> None:
    plan = make_plan("half_unassigned", shape, seed=3)
    values = make_probs((plan.num_rows,), 4)
    assert_same_bits(gather_slots(core, plan.slot_to_row, values), reference.route_backward(values, plan))
    plan = make_problem(make_mask(shape, seed=5), shape.E, shape.A, topk=min(shape.K, shape.E)).plan
    values = make_probs((plan.num_rows,), 6)
    actual = gather_slots(core, plan.slot_to_row, values, plan.row_to_expert, shape.E)
    assert_same_bits(actual, reference.route_backward(values, plan, mask_experts=shape.E))


@pytest.mark.parametrize("accumulates", [False, True], ids=["set", "add"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scatter_from_a_mask_reads_the_place_of_the_expert(core: Core, shape: Shape, accumulates: bool) -> None:
    shape = few_tokens_of_many_experts(shape)
    plan = make_problem(make_mask(shape, seed=7), shape.E, shape.A).plan
    initial = make_probs((plan.num_rows,), 8) if accumulates else None
    values = make_probs((shape.T, shape.E), 9)
    slots = np.zeros(plan.slot_to_row.shape, np.float32)
    tokens, ks = np.nonzero(plan.slot_to_row >= 0)
    slots[tokens, ks] = values[tokens, plan.row_to_expert[plan.slot_to_row[tokens, ks]]]
    actual = scatter_slots(core, plan.slot_to_row, values, plan.num_rows, plan.row_to_expert, initial)
    assert_same_numbers(actual, scatter_by_loops(plan.slot_to_row, slots, plan.num_rows, initial))


def test_slots_that_share_a_row_are_added_in_slot_order(core: Core) -> None:
    slot_to_row = np.array([[2, 2, 0, 2], [1, -1, 1, 1]], np.int32)
    big = 2.0**24
    values = np.array([[1, big, 7, -big], [big, 9, -big, 1]], np.float32)
    # 1 + 2^24 rounds to 2^24; the other order keeps the 1.
    assert scatter_slots(core, slot_to_row, values, 4).tolist() == [7, 1, 0, 0]


def test_scatter_keeps_the_sign_of_a_zero_that_comes_alone(core: Core) -> None:
    slot_to_row = np.array([[0, -1]], np.int32)
    rows = scatter_slots(core, slot_to_row, np.array([[-0.0, 1.0]], np.float32), 2)
    assert np.signbit(rows).tolist() == [True, False]


def test_accumulating_scatter_leaves_unnamed_rows_alone(core: Core) -> None:
    initial = np.array([0x7FC01234, 0x80000000, 0x3F800000], np.uint32).view(np.float32)
    rows = scatter_slots(core, np.array([[2]], np.int32), np.array([[2.0]], np.float32), 3, initial=initial)
    assert rows.view(np.uint32).tolist() == [0x7FC01234, 0x80000000, 0x40400000]


@pytest.mark.parametrize("bad", [-(2**31), -7, 5, 2**31 - 1])
def test_slots_with_a_row_out_of_range_count_as_empty(core: Core, bad: int) -> None:
    slot_to_row = np.array([[bad, 1], [bad, 4]], np.int32)
    row_values = np.arange(10, 15, dtype=np.float32)
    assert gather_slots(core, slot_to_row, row_values).tolist() == [[0, 11], [0, 14]]
    slot_values = np.array([[1, 2], [3, 4]], np.float32)
    assert scatter_slots(core, slot_to_row, slot_values, 5).tolist() == [0, 2, 0, 0, 4]


@pytest.mark.parametrize("bad", [-(2**31), -7, 3, 2**31 - 1])
def test_rows_with_an_expert_out_of_range_count_as_empty(core: Core, bad: int) -> None:
    slot_to_row = np.array([[0, 1], [2, -1]], np.int32)
    row_to_expert = np.array([bad, 2, 0], np.int32)
    row_values = np.array([5, 6, 7], np.float32)
    assert gather_slots(core, slot_to_row, row_values, row_to_expert, 3).tolist() == [[0, 0, 6], [7, 0, 0]]
    slot_values = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    assert scatter_slots(core, slot_to_row, slot_values, 3, row_to_expert).tolist() == [0, 3, 4]
