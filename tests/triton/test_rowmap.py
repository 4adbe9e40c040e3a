# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Paddle's row maps, and values between slots and rows, by Triton kernels."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_moe_ops import reference
from paddle_moe_ops.reference.paddle_api import _slot_to_row, _usable_rowmap
from paddle_moe_ops.reference.routing import take_or_zero
from paddle_moe_ops.triton.ops.rowmap import clean_rowmap, gather_slots, scatter_mask, scatter_slots, slots_to_rows
from tests.params import MANY_SLOTS, MORE_SLOTS_THAN_EXPERTS, ODD, SMALL
from tests.reference.cases import assert_same_bits

from .problems import fitting, make_problem


def check(gpu, rowmap, ids, num_rows):
    usable = _usable_rowmap(rowmap, num_rows, False, "test")
    token_rows = reference.rowmap_to_token_rows(rowmap, num_rows, validate=False)
    row_to_token = np.full(num_rows, -1, np.int32)
    tokens, experts = np.nonzero(usable >= 0)
    row_to_token[usable[tokens, experts]] = tokens
    for compat in (None, "paddle"):
        arrays = gpu.array(rowmap), gpu.array(ids)
        found = clean_rowmap(gpu, *arrays, num_rows, first_duplicate_only=compat is None)
        expected = token_rows, row_to_token, _slot_to_row(usable, ids, compat).astype(np.int32)
        for actual, wanted in zip(found, expected, strict=True):
            assert_same_bits(gpu.numpy(actual), wanted)


@pytest.mark.parametrize("shape", [ODD, MORE_SLOTS_THAN_EXPERTS, MANY_SLOTS], ids=str)
def test_the_row_map_of_a_plan_leads_back_to_its_maps(gpu, rng, shape):
    problem = make_problem(rng, fitting(gpu, shape))
    check(gpu, reference.plan_to_rowmap(problem.plan), problem.ids, problem.plan.num_rows)


def test_bad_entries_and_repeated_rows_count_as_none(gpu, rng):
    for num_experts in (5, 1100):
        rowmap = rng.integers(-3, 45, (6, num_experts)).astype(np.int32)
        rowmap[3, :2] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        ids = rng.integers(-3, num_experts + 3, (6, 7))
        check(gpu, rowmap, ids, 40)


@pytest.mark.parametrize(("tokens", "rows"), [(0, 0), (0, 7), (6, 0)])
def test_no_tokens_or_no_rows(gpu, rng, tokens, rows):
    check(gpu, rng.integers(-1, 9, (tokens, 4)).astype(np.int32), rng.integers(-1, 5, (tokens, 2)), rows)


def test_values_of_rows_come_to_their_slots(gpu, rng):
    plan = make_problem(rng, SMALL).plan
    values = rng.standard_normal(plan.num_rows).astype(np.float32)
    found = gather_slots(gpu, gpu.array(values), gpu.array(plan.slot_to_row))
    assert_same_bits(gpu.numpy(found), take_or_zero(values, plan.slot_to_row))


def test_values_of_rows_come_to_their_places_in_a_mask(gpu, rng):
    plan = make_problem(rng, SMALL).plan
    values = rng.standard_normal(plan.num_rows).astype(np.float32)
    arrays = (gpu.array(each) for each in (values, plan.row_to_token, plan.row_to_expert))
    found = scatter_mask(gpu, *arrays, SMALL.T, SMALL.E)
    assert_same_bits(gpu.numpy(found), reference.route_backward(values, plan, mask_experts=SMALL.E))


@pytest.mark.parametrize("add", [False, True])
def test_values_of_slots_that_share_a_row_are_added_in_order(gpu, rng, add):
    slots = np.array([[3, 3, -1, 3, 5], [0, 1, 0, -1, 99], [-1, -1, -1, -1, -1]], np.int32)
    values = rng.standard_normal(slots.shape).astype(np.float32)
    values[0, 4] = values[1, 1] = -0.0
    before = rng.standard_normal(6).astype(np.float32)
    if add:
        rows, expected = gpu.array(before), before.copy()
        scatter_slots(gpu, gpu.array(values), gpu.array(slots), rows)
    else:
        row_to_token = np.array([1, 1, -1, 0, -1, 0], np.int32)
        rows, expected = slots_to_rows(gpu, *map(gpu.array, (values, slots, row_to_token))), np.zeros_like(before)
    for row in (0, 1, 3, 5):
        total = before[row] if add else np.float32(-0.0)
        for value in values[slots == row]:
            total = np.float32(total + value)
        expected[row] = total
    assert_same_bits(gpu.numpy(rows), expected)


def test_values_of_slots_come_to_the_rows_of_their_token(gpu, rng):
    slots = np.array([[3, 3, -1, 3], [0, 1, 0, -1], [-1, -1, -1, -1]], np.int32)
    row_to_token = np.array([1, 1, -1, 0, 0, 3], np.int32)  # row 4 is read by no slot, and there is no token 3
    values = rng.standard_normal(slots.shape).astype(np.float32)
    values[1, 1] = -0.0
    found = slots_to_rows(gpu, *map(gpu.array, (values, slots, row_to_token)))
    expected = np.zeros(6, np.float32)
    expected[3] = values[0, 0] + values[0, 1] + values[0, 3]
    expected[0], expected[1] = values[1, 0] + values[1, 2], values[1, 1]
    assert_same_bits(gpu.numpy(found), expected)


@pytest.mark.parametrize("shape", [SMALL, SMALL._replace(T=1025, K=1)])
def test_values_of_slots_come_to_the_rows_of_a_plan(gpu, rng, shape):
    plan = make_problem(rng, shape).plan
    values = rng.standard_normal(plan.slot_to_row.shape).astype(np.float32)
    found = slots_to_rows(gpu, *map(gpu.array, (values, plan.slot_to_row, plan.row_to_token)))
    assert_same_bits(gpu.numpy(found), reference.slots_to_rows(values, plan.slot_to_row, plan.num_rows))
