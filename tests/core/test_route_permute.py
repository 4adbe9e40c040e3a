# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""route_permute: the maps and rows of one call are those of the oracle, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..params import ROW_DTYPES, Shape
from ..reference.cases import assert_same_bits, floats_of_every_kind
from .binding import Core, CoreError
from .cases import (
    BUFFERS,
    CHUNKED,
    EXAMPLES,
    SHAPES,
    SMALL,
    UNEVEN,
    Problem,
    assert_equals_plan,
    buffer_rows,
    make_ids,
    make_mask,
    make_problem,
    make_probs,
    problems,
)
from .guards import is_poison, with_row_gaps
from .operators.permute import permute_params
from .operators.route import ROUTE_OUTPUTS, route_params
from .operators.route_permute import route_permute
from .structs import Fill

BFLOAT16 = ml_dtypes.bfloat16
# The CUDA kernel cuts the rows of few tokens, lets every block count few slots, and stages many tokens several times.
CUT = Shape(5, 7168, 64, 8, 16, "rows cut into pieces")
CUT_MANY_SLOTS = Shape(140, 4096, 33, 32, 1, "rows cut into pieces, but too many slots for every block to count")
COUNTED = Shape(1500, 64, 100, 3, 16, "blocks that count for each other")
STAGED = Shape(5000, 4096, 17, 2, 8, "several stages of rows that leave by bulk copies")
STAGED_SHORT = Shape(14_000, 1024, 5, 3, 1, "several stages of rows that threads write")
STAGED_SCALES = Shape(
    3600, 8192, 17, 2, 8, "several stages of float8 rows that leave by bulk copies, and of their scales"
)
ODD_TOPK = Shape(3000, 8, 40, 5, 4, "whole tokens do not fill a warp")
FULL_TOPK = Shape(300, 8, 40, 32, 4, "one token fills a warp")
# At most 768 tokens without padded segments are compared with each other, or 576 where only maps are made.
FEW = Shape(768, 80, 1024, 8, 1, "the most tokens that are compared, eight slots each, and the most experts")
FEW_ODD = Shape(301, 80, 33, 5, 1, "tokens that are compared, with less than eight slots")
NOT_FEW = Shape(769, 80, 33, 8, 1, "one token too many to compare them")
FEW_MAPS = Shape(576, 80, 7, 8, 1, "the most tokens that are compared for maps alone")
MILLION = Shape(131_100, 0, 7, 9, 16, "more than a million slots, and whole tokens do not fill a warp")
FUSED = (COUNTED, ODD_TOPK, FULL_TOPK, FEW, FEW_ODD, NOT_FEW)
FOR_CUDA = (CUT, CUT_MANY_SLOTS, STAGED, STAGED_SHORT)


def on_cuda(*shapes: Shape) -> list:
    """Shapes whose size means something to the CUDA kernel only."""
    return [pytest.param(shape, marks=pytest.mark.cuda_only) for shape in shapes]


def check(core: Core, problem: Problem, x: NDArray | None, scale: NDArray | None = None, fill: int = Fill.ALL) -> None:
    maps, rows, scales = route_permute(core, problem, x, scale, fill=fill)
    assert_equals_plan(maps, problem.plan)
    if x is None:
        return
    expected_rows, expected_scales = reference.permute(x, problem.plan, scale)
    padding = problem.plan.row_to_token < 0
    for array, expected, bit in ((rows, expected_rows, Fill.ROWS), (scales, expected_scales, Fill.SCALES)):
        if array is None:
            continue
        assert expected is not None
        assert_same_bits(array[~padding], expected[~padding])
        if fill & bit:
            assert_same_bits(array[padding], expected[padding])
        else:
            assert is_poison(array[padding])


@pytest.mark.parametrize("shape", [*SHAPES, CHUNKED, UNEVEN, *FUSED, *on_cuda(*FOR_CUDA)], ids=str)
@pytest.mark.parametrize(
    ("kind", "duplicates"),
    [
        *[("uniform", "first"), ("zipf", "each"), ("half_unassigned", "first"), ("same_expert", "each")],
        *[("duplicates", "first"), ("duplicates", "each"), ("out_of_range", "each")],
    ],
)
def test_one_call_equals_the_oracle(core: Core, shape: Shape, kind: str, duplicates: str) -> None:
    ids = make_ids(kind, shape, seed=len(kind), dtype=np.int64 if kind == "zipf" else np.int32)
    problem = make_problem(ids, shape.E, shape.A, probs=make_probs(ids.shape, 1), duplicates=duplicates)
    x = np.random.default_rng(2).integers(0, 1 << 16, (shape.T, shape.H), np.uint16).view(BFLOAT16)
    check(core, problem, x)


@pytest.mark.parametrize("kind", ["uniform", "zipf", "half_unassigned", "same_expert", "duplicates", "out_of_range"])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 576, 577])
def test_maps_alone_equal_the_oracle(core: Core, tokens: int, kind: str) -> None:
    shape = FEW_MAPS._replace(T=tokens)
    ids = make_ids(kind, shape, seed=20, dtype=np.int64 if kind == "zipf" else np.int32)
    check(core, make_problem(ids, shape.E, shape.A, probs=make_probs(ids.shape, 21)), None)


@pytest.mark.cuda_only
@pytest.mark.parametrize("kind", ["zipf", "half_unassigned", "duplicates"])
def test_a_large_number_of_slots_equals_the_oracle(core: Core, kind: str) -> None:
    """More than 2^20, from where the CUDA kernel has more blocks."""
    ids = make_ids(kind, MILLION, seed=5, dtype=np.int64 if kind == "zipf" else np.int32)
    check(core, make_problem(ids, MILLION.E, MILLION.A, probs=make_probs(ids.shape, 6)), None)


@pytest.mark.parametrize("shape", [SMALL, CUT, COUNTED, UNEVEN], ids=str)
def test_a_mask_routes_in_one_call(core: Core, shape: Shape) -> None:
    mask = make_mask(shape, seed=3)
    problem = make_problem(mask, shape.E, shape.A, probs=make_probs(mask.shape, 4), topk=min(5, shape.E))
    check(core, problem, floats_of_every_kind((shape.T, shape.H), BFLOAT16, seed=5))


@pytest.mark.parametrize("fill", list(range(4)), ids=lambda bits: f"fill{bits}")
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("shape", [SMALL, CUT, COUNTED, FEW_ODD, FEW, *on_cuda(STAGED_SHORT, STAGED_SCALES)], ids=str)
def test_static_buffers_scales_and_padding(core: Core, shape: Shape, buffer: str, fill: int) -> None:
    ids = make_ids("zipf", shape, seed=6)
    rows = buffer_rows(buffer, make_problem(ids, shape.E, shape.A).plan)
    problem = make_problem(ids, shape.E, shape.A, num_rows=rows)
    x = floats_of_every_kind((shape.T, shape.H), ml_dtypes.float8_e4m3fn, seed=7)
    check(core, problem, x, np.random.default_rng(8).random((shape.T, 8), np.float32), fill)


@pytest.mark.parametrize("scale_cols", [1, 3, 4, 56])
@pytest.mark.parametrize("hidden", [1, 7, 16, 7168])
def test_rows_and_scales_of_any_width(core: Core, hidden: int, scale_cols: int) -> None:
    problem = make_problem(make_ids("uniform", SMALL, seed=9), SMALL.E, SMALL.A)
    x = floats_of_every_kind((SMALL.T, hidden), ml_dtypes.float8_e5m2, seed=10)
    check(core, problem, x, np.random.default_rng(11).random((SMALL.T, scale_cols), np.float32))


@pytest.mark.parametrize("gap", [3, 8])
def test_rows_that_lie_apart(core: Core, gap: int) -> None:
    problem = make_problem(make_ids("uniform", SMALL, seed=12), SMALL.E, SMALL.A)
    x = floats_of_every_kind((SMALL.T, SMALL.H), BFLOAT16, seed=13)
    check(core, problem, with_row_gaps(x, gap), np.ones((SMALL.T, 4), np.float32))


def test_outputs_at_odd_addresses(core: Core) -> None:
    problem = make_problem(make_ids("uniform", SMALL, seed=14), SMALL.E, SMALL.A)
    x = floats_of_every_kind((SMALL.T, SMALL.H), BFLOAT16, seed=15)
    _, rows, _ = route_permute(core, problem, x, odd_outputs=True)
    assert_same_bits(rows, reference.permute(x, problem.plan)[0])


@EXAMPLES
@given(
    problem=problems(),
    hidden=st.sampled_from([1, 8, 72]),
    dtype=st.sampled_from(ROW_DTYPES),
    with_scale=st.booleans(),
)
def test_any_routing_in_one_call(core: Core, problem: Problem, hidden: int, dtype: DTypeLike, with_scale: bool) -> None:
    x = floats_of_every_kind((problem.plan.num_tokens, hidden), dtype, seed=16)
    check(core, problem, x, np.ones((len(x), 4), np.float32) if with_scale else None)


@pytest.mark.parametrize("shape", [SMALL, COUNTED], ids=str)
@pytest.mark.parametrize("name", ROUTE_OUTPUTS)
def test_every_map_can_be_had_alone(core: Core, name: str, shape: Shape) -> None:
    ids = make_ids("half_unassigned", shape, seed=17)
    problem = make_problem(ids, shape.E, shape.A, probs=make_probs(ids.shape, 18))
    maps, _, _ = route_permute(core, problem, outputs=(name,))
    assert_equals_plan(maps, problem.plan)


def test_permute_must_agree_with_route(core: Core) -> None:
    problem = make_problem(make_ids("uniform", SMALL, seed=19), SMALL.E, SMALL.A)
    x = np.zeros((SMALL.T, SMALL.H), np.float32)
    plan = problem.plan
    rows = np.zeros((plan.num_rows, SMALL.H), np.float32)
    own_maps = plan.slot_to_row, plan.row_to_token
    for maps, part in (
        ((plan.slot_to_row.copy(), plan.row_to_token.copy()), {}),
        ((plan.slot_to_row[:-1], plan.row_to_token), {}),
        (own_maps, {"first_row": 1}),
        (own_maps, {"rows_end": np.array([plan.num_rows], np.int32)}),
    ):
        params = route_params(
            problem.routing,
            **problem.options,
            num_rows=plan.num_rows,
            routed_per_expert=np.zeros(SMALL.E, np.int32),
            slot_to_row=plan.slot_to_row,
            row_to_token=plan.row_to_token,
        )
        core.add_workspace("route", params)
        with pytest.raises(CoreError, match="INVALID_ARGUMENT: permute must be "):
            core.run("route_permute", params, permute_params(x[: len(maps[0])], *maps, rows, **part))
