# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's row_id_map from a plan and back, by Triton kernels."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_moe_ops import reference
from paddle_moe_ops.triton.ops.row_id_map import make_row_id_map, read_row_id_map
from paddle_moe_ops.triton.ops.rowmap import clean_rowmap_by_expert
from tests.params import MANY_SLOTS, MORE_SLOTS_THAN_EXPERTS, ODD, SMALL
from tests.reference.cases import assert_same_bits

from .problems import fitting, make_problem

INT32 = np.iinfo(np.int32)


def check_made(gpu, token_rows, row_to_expert, num_experts, pad_offsets=None):
    maps = token_rows.astype(np.int32), row_to_expert.astype(np.int32)
    offsets = None if pad_offsets is None else gpu.array(pad_offsets)
    found = make_row_id_map(gpu, *map(gpu.array, maps), offsets, num_experts)
    expected = reference.make_row_id_map(*maps, num_experts, pad_offsets)
    assert_same_bits(gpu.numpy(found), expected)
    return expected


def check_read(gpu, row_id_map, num_rows, pad_offsets=None):
    offsets = None if pad_offsets is None else gpu.array(pad_offsets)
    rowmap = read_row_id_map(gpu, gpu.array(row_id_map), offsets)
    expected = reference.row_id_map_to_rowmap(row_id_map, pad_offsets)
    assert_same_bits(gpu.numpy(rowmap), expected)
    for actual, wanted in zip(
        clean_rowmap_by_expert(gpu, rowmap, num_rows), reference.read_rowmap(expected, num_rows), strict=True
    ):
        assert_same_bits(gpu.numpy(actual), wanted.astype(np.int32))


@pytest.mark.parametrize("shape", [ODD, SMALL, MORE_SLOTS_THAN_EXPERTS, MANY_SLOTS], ids=str)
def test_maps_of_a_plan_there_and_back(gpu, rng, shape):
    problem = make_problem(rng, fitting(gpu, shape))
    plan, experts = problem.plan, problem.shape.E
    offsets = rng.integers(0, 9, experts).astype(np.int32)
    check_read(gpu, check_made(gpu, plan.token_rows, plan.row_to_expert, experts), plan.num_rows)
    check_read(gpu, check_made(gpu, plan.token_rows, plan.row_to_expert, experts, offsets), plan.num_rows, offsets)


def test_a_token_with_more_rows_than_experts_keeps_the_first(gpu):
    plan = reference.route(np.array([[1, 1, 0, 1], [1, -1, -1, -1]], np.int32), num_experts=2, duplicates="each")
    row_id_map = check_made(gpu, plan.token_rows, plan.row_to_expert, 2)
    assert row_id_map.tolist() == [[1, 0, 1, 0, 2], [4, -1, 1, -1, 1]]


def test_more_slots_and_experts_than_a_program_takes_at_a_time(gpu, rng):
    experts, topk = 1100, 1030
    ids = np.stack([rng.permutation(experts)[:topk] for _ in range(2)]).astype(np.int32)
    plan = reference.route(ids, num_experts=experts)
    check_read(gpu, check_made(gpu, plan.token_rows, plan.row_to_expert, experts), plan.num_rows)


def test_rows_beyond_the_buffer_and_experts_beyond_the_last_are_passed_over(gpu):
    token_rows = np.array([[0, 1, 2, 9, INT32.max], [-1, 3, -7, 4, 0]], np.int32)
    row_to_expert = np.array([2, -1, 3, 0, 1], np.int32)
    kept = np.where((token_rows >= 0) & (token_rows < 5), token_rows, -1)
    good = np.isin(row_to_expert, range(3))
    kept = np.where((kept >= 0) & good[kept], kept, -1)
    found = make_row_id_map(gpu, gpu.array(token_rows), gpu.array(row_to_expert), None, 3)
    assert_same_bits(gpu.numpy(found), reference.make_row_id_map(kept, row_to_expert, 3))


@pytest.mark.parametrize("with_offsets", [False, True])
def test_wrong_maps_lead_nowhere(gpu, rng, with_offsets):
    experts, tokens = 5, 40
    row_id_map = rng.integers(-2, 30, (tokens, 2 * experts + 1)).astype(np.int32)
    row_id_map[:, experts : 2 * experts] = rng.integers(-2, experts + 2, (tokens, experts))
    row_id_map[:, -1] = rng.integers(-2, experts + 4, tokens)
    row_id_map[0], row_id_map[1] = INT32.max, INT32.min
    row_id_map[2, experts:] = [0, 1, 2, 3, 4, 5]
    row_id_map[2, :experts] = INT32.max, INT32.max - 1, INT32.min, 0, -1
    offsets = np.array([0, 1, INT32.max, -7, INT32.min], np.int32) if with_offsets else None
    check_read(gpu, row_id_map, 20, offsets)


@pytest.mark.parametrize("rows", [0, 7])
def test_no_tokens(gpu, rows):
    check_made(gpu, np.zeros((0, 3), np.int32), np.zeros(rows, np.int32), 4)
    check_read(gpu, np.zeros((0, 9), np.int32), rows)


def test_tokens_without_rows(gpu):
    row_id_map = check_made(gpu, np.full((3, 2), -1, np.int32), np.zeros(0, np.int32), 4)
    check_read(gpu, row_id_map, 0)
