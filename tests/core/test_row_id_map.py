# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's row_id_map and [T, E] row maps: made from plans, and read back whatever their entries are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_moe_ops import reference

from ..params import Shape
from ..reference.cases import assert_same_bits
from .binding import Core, CoreError
from .cases import EXAMPLES, INT32, SHAPES, Problem, make_ids, make_mask, make_problem, problems
from .operators.clean_rowmap import read_rowmap
from .operators.row_id_map import make_row_id_map, read_row_id_map
from .structs import Check
from .test_rowmap import spoil


def row_id_map_of(plan: reference.Plan, pad_offsets: np.ndarray | None = None) -> np.ndarray:
    return reference.make_row_id_map(plan.token_rows, plan.row_to_expert, plan.num_experts, pad_offsets)


def check_maps(core: Core, rowmap: np.ndarray, num_rows: int) -> None:
    maps = read_rowmap(core, rowmap, num_rows)
    expected = reference.read_rowmap(rowmap, num_rows)
    for actual, wanted in zip(maps, expected, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_maps_of_a_plan_and_back_equal_the_oracle(core: Core, shape: Shape) -> None:
    plan = make_problem(make_mask(shape, seed=1), shape.E, shape.A).plan
    unpadded = np.concatenate([[0], np.cumsum(plan.routed_per_expert)])[:-1]
    pad_offsets = (plan.expert_offsets[:-1] - unpadded).astype(np.int32)
    for offsets in (None, pad_offsets):
        row_id_map = make_row_id_map(core, plan, offsets)
        assert_same_bits(row_id_map, row_id_map_of(plan, offsets))
        rowmap = read_row_id_map(core, row_id_map, offsets)
        assert_same_bits(rowmap, reference.plan_to_rowmap(plan))
        check_maps(core, rowmap, plan.num_rows)


def test_layout_is_that_of_transformer_engine(core: Core) -> None:
    mask = np.array([[True, False, True], [False, False, False], [False, False, True]])
    plan = make_problem(mask, 3, 1).plan
    assert make_row_id_map(core, plan).tolist() == [
        [1, 0, -1, 2, 0, -1, 2],
        [-1, -1, -1, -1, -1, -1, 0],
        [2, -1, -1, 2, -1, -1, 1],
    ]


@EXAMPLES
@given(problem=problems(with_probs=False))
def test_any_plan_has_a_row_id_map(core: Core, problem: Problem) -> None:
    """Dropped rows are in none; with duplicates="each" a token may have more rows than a line has room for."""
    assert_same_bits(make_row_id_map(core, problem.plan), row_id_map_of(problem.plan))


@pytest.mark.parametrize("topk", [3, 4, 9, 64])
def test_a_line_has_room_for_the_first_rows_of_a_token_only(core: Core, topk: int) -> None:
    """The last token too, behind whose line the map ends."""
    plan = reference.route(np.full((3, topk), 1), num_experts=2, duplicates="each")
    row_id_map = make_row_id_map(core, plan)
    first = np.arange(3) * topk
    assert row_id_map.tolist() == [[row + 1, row, 1, 1, 2] for row in first.tolist()]
    assert_same_bits(row_id_map, row_id_map_of(plan))


@EXAMPLES
@given(
    num_tokens=st.integers(0, 20),
    num_experts=st.sampled_from([1, 3, 31, 32, 33, 100]),
    largest=st.sampled_from([3, 40, INT32.max]),
    seed=st.integers(0, 1 << 30),
    padded=st.booleans(),
)
def test_any_numbers_are_read_as_the_oracle_does(
    core: Core, num_tokens: int, num_experts: int, largest: int, seed: int, padded: bool
) -> None:
    rng = np.random.default_rng(seed)
    row_id_map = rng.integers(-largest, largest, (num_tokens, 2 * num_experts + 1), np.int32, endpoint=True)
    real = rng.random(row_id_map[:, num_experts:].shape) < 0.7
    row_id_map[:, num_experts:][real] = rng.integers(0, num_experts + 2, real.sum())
    pad_offsets = rng.choice([0, 5, -2, INT32.max, INT32.min], num_experts).astype(np.int32) if padded else None
    rowmap = read_row_id_map(core, row_id_map, pad_offsets)
    assert_same_bits(rowmap, reference.row_id_map_to_rowmap(row_id_map, pad_offsets))
    check_maps(core, rowmap, 25)


@pytest.mark.parametrize("share", [0.02, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bad_and_repeated_rows_are_in_none_of_the_maps(core: Core, shape: Shape, share: float) -> None:
    plan = make_problem(make_ids("half_unassigned", shape, seed=2), shape.E, shape.A).plan
    check_maps(core, spoil(reference.plan_to_rowmap(plan), plan.num_rows, 3, share), plan.num_rows)


@pytest.mark.parametrize("rowmap", [[[0, 4], [1, -1]], [[0, -2], [1, -1]], [[0, 1], [1, -1]], [[3, 3], [0, 1]]])
def test_checks_say_what_the_oracle_says(core: Core, rowmap: list[list[int]]) -> None:
    name = "zipped_expertwise_rowmap"
    arrays = np.array(rowmap, np.int32), 4
    with pytest.raises(ValueError, match=name) as told:
        reference.read_rowmap(*arrays, check_range=True, check_repeats=True, function="f", name=name)
    with pytest.raises(CoreError) as caught:
        read_rowmap(core, *arrays, checks=Check.RANGE | Check.DUPLICATES)
    assert f"f: {caught.value.text}" == str(told.value)
    out_of_range = "[-1, 4)" in str(told.value)
    read_rowmap(core, *arrays, checks=Check.DUPLICATES if out_of_range else Check.RANGE)
