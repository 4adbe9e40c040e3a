# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""route_count and route against the oracle: every map of every routing, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike

from ..pairwise import pairwise, pairwise_of
from ..params import Shape
from .binding import Core
from .cases import (
    BUFFERS,
    CHUNKED,
    DENSE,
    EXAMPLES,
    ODD,
    ROUTINGS,
    SHAPES,
    SMALL,
    UNEVEN,
    Problem,
    assert_equals_plan,
    buffer_rows,
    few_tokens_of_many_experts,
    make_ids,
    make_mask,
    make_plan,
    make_problem,
    make_probs,
    make_wide_ids,
    problems,
)
from .operators.route import ROUTE_OUTPUTS, padded_rows, route


def run_and_compare(core: Core, problem: Problem, num_threads: int = 0) -> None:
    assert_equals_plan(route(core, problem, num_threads=num_threads), problem.plan)


@pairwise(
    {
        "shape": {str(shape): shape for shape in (*SHAPES, CHUNKED, UNEVEN)},
        "kind": [*ROUTINGS],
        "dtype": [np.int32, np.int64],
        "duplicates": ["first", "each"],
    },
    {"shape": SHAPES[:1]},
    others_are_slow=True,
)
def test_maps_of_ids_equal_the_oracle(core: Core, shape: Shape, kind: str, dtype: DTypeLike, duplicates: str) -> None:
    ids = make_ids(kind, shape, seed=len(kind), dtype=dtype)
    problem = make_problem(ids, shape.E, shape.A, probs=make_probs(ids.shape, 1), duplicates=duplicates)
    run_and_compare(core, problem)


@pairwise_of(
    pytest.mark.parametrize("shape", [shape for shape in (*SHAPES, CHUNKED, UNEVEN) if shape.E >= 5], ids=str),
    pytest.mark.parametrize("dtype", [np.bool_, np.uint8], ids=["bool", "bytes"]),
    pytest.mark.parametrize("topk", [None, 1, 5], ids=["all", "topk1", "topk5"]),
    others_are_slow=True,
)
def test_maps_of_a_mask_equal_the_oracle(core: Core, shape: Shape, dtype: DTypeLike, topk: int | None) -> None:
    shape = few_tokens_of_many_experts(shape) if topk is None else shape
    mask = make_mask(shape, seed=2).astype(dtype)
    if dtype == np.uint8:  # any non-zero byte routes
        mask *= np.random.default_rng(3).integers(1, 256, mask.shape, np.uint8)
    run_and_compare(core, make_problem(mask, shape.E, shape.A, probs=make_probs(mask.shape, 4), topk=topk))


@pytest.mark.parametrize("density", [0.0, 1.0], ids=["empty", "full"])
def test_mask_of_no_or_all_experts_equals_the_oracle(core: Core, density: float) -> None:
    mask = make_mask(DENSE, seed=1, density=density)
    run_and_compare(core, make_problem(mask, DENSE.E, DENSE.A, topk=7))


@pairwise(
    {
        "shape": {str(shape): shape for shape in (SMALL, DENSE, UNEVEN)},
        "kind": ["uniform", "zipf", "same_expert", "duplicates"],
        "buffer": BUFFERS,
        "duplicates": ["first", "each"],
    },
    others_are_slow=True,
)
def test_static_buffer_drops_what_does_not_fit(
    core: Core, shape: Shape, kind: str, buffer: str, duplicates: str
) -> None:
    ids = make_ids(kind, shape, seed=5)
    probs = make_probs(ids.shape, 6)
    exact = make_problem(ids, shape.E, shape.A, probs=probs, duplicates=duplicates)
    rows = buffer_rows(buffer, exact.plan)
    run_and_compare(core, make_problem(ids, shape.E, shape.A, probs=probs, duplicates=duplicates, num_rows=rows))


@pytest.mark.parametrize("shape", [SMALL, DENSE], ids=str)
def test_buffer_one_row_too_small_drops_one_slot(core: Core, shape: Shape) -> None:
    ids = make_ids("uniform", shape, seed=7)
    exact = make_problem(ids, shape.E, shape.A)
    short = make_problem(ids, shape.E, shape.A, num_rows=buffer_rows("short", exact.plan))
    whole, cut = route(core, exact), route(core, short)
    assert whole["overflow"] == 0
    assert cut["overflow"] == 1
    changed = np.flatnonzero(whole["slot_to_row"] != cut["slot_to_row"])
    assert len(changed) == 1
    assert cut["slot_to_row"].ravel()[changed[0]] == -1


def test_wide_ids_are_not_cut_to_32_bits(core: Core) -> None:
    problem = make_problem(make_wide_ids(SMALL, seed=8), SMALL.E, SMALL.A)
    assert (problem.plan.slot_to_row < 0).any()
    run_and_compare(core, problem)


@EXAMPLES
@given(problem=problems(), num_threads=st.sampled_from([0, 1, 3]))
def test_maps_of_any_routing_equal_the_oracle(core: Core, problem: Problem, num_threads: int) -> None:
    run_and_compare(core, problem, num_threads)


@pytest.mark.parametrize("name", ROUTE_OUTPUTS)
def test_every_output_can_be_had_alone(core: Core, name: str) -> None:
    ids = make_ids("duplicates", ODD, seed=9)
    problem = make_problem(ids, ODD.E, ODD.A, probs=make_probs(ids.shape, 10), num_rows=100)
    assert_equals_plan(route(core, problem, outputs=(name,)), problem.plan)


@pytest.mark.parametrize("name", ROUTE_OUTPUTS)
def test_every_output_can_be_left_out(core: Core, name: str) -> None:
    ids = make_ids("half_unassigned", ODD, seed=11)
    problem = make_problem(ids, ODD.E, ODD.A, probs=make_probs(ids.shape, 12))
    others = tuple(other for other in ROUTE_OUTPUTS if other != name)
    assert_equals_plan(route(core, problem, outputs=others), problem.plan)


def test_no_slots_per_token_gives_padding_only(core: Core) -> None:
    problem = make_problem(np.empty((3, 0), np.int32), 4, 2, num_rows=5)
    maps = route(core, problem)
    assert maps["row_to_token"].tolist() == [-1] * 5
    assert maps["expert_offsets"].tolist() == [0] * 5
    assert (maps["rowmap"] == -1).all()


@pytest.mark.parametrize("alignment", [1, 2, 16, 128])
def test_padded_rows_equal_the_size_of_the_plan(core: Core, alignment: int) -> None:
    plan = make_plan("zipf", SMALL._replace(A=alignment), seed=13)
    assert padded_rows(core, plan.routed_per_expert, alignment) == plan.num_rows


def test_padded_rows_may_exceed_32_bits(core: Core) -> None:
    counts = np.full(1024, 2_000_000_001, np.int32)
    assert padded_rows(core, counts, 128) == 1024 * 2_000_000_128
