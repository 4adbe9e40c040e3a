# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""permute: rows and scales go where the plan says, bit for bit, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..pairwise import pairwise_of
from ..params import ROW_DTYPES, Shape
from ..reference.cases import assert_same_bits, floats_of_every_kind
from .binding import Core
from .cases import EXAMPLES, INT32, SHAPES, SMALL, Problem, make_ids, make_plan, make_problem, problems
from .guards import at_odd_address, guarded_outputs, is_poison, with_row_gaps
from .operators.permute import permute, permute_params
from .structs import Fill


def dtype_name(dtype: DTypeLike) -> str:
    return np.dtype(dtype).name


def random_bytes(shape: tuple[int, ...], dtype: DTypeLike, seed: int) -> NDArray:
    """Any bit pattern, NaN with payloads included: rows are copied as they are."""
    word = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return np.random.default_rng(seed).integers(0, np.iinfo(word).max, shape, word, endpoint=True).view(dtype)


def check_permute(core: Core, problem: Problem, x: NDArray, scale: NDArray | None, num_threads: int = 0) -> None:
    plan = problem.plan
    rows, scales = permute(core, x, plan.slot_to_row, plan.row_to_token, scale, num_threads=num_threads)
    expected_rows, expected_scales = reference.permute(x, plan, scale)
    assert_same_bits(rows, expected_rows)
    if scale is not None:
        assert scales is not None
        assert expected_scales is not None
        assert_same_bits(scales, expected_scales)


@pairwise_of(
    pytest.mark.parametrize("shape", SHAPES, ids=str),
    pytest.mark.parametrize("dtype", [*ROW_DTYPES, np.int32], ids=dtype_name),
    pytest.mark.parametrize("kind", ["half_unassigned", "zipf"]),
    others_are_slow=True,
    empty={"shape": SHAPES[:1]},
)
def test_rows_equal_the_oracle(core: Core, shape: Shape, dtype: DTypeLike, kind: str) -> None:
    problem = make_problem(make_ids(kind, shape, seed=1), shape.E, shape.A)
    check_permute(core, problem, random_bytes((shape.T, shape.H), dtype, seed=2), None)


@pytest.mark.parametrize("scale_cols", [1, 3, 56])
@pytest.mark.parametrize("scale_dtype", [np.float32, np.int32], ids=dtype_name)
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=dtype_name)
def test_scales_travel_with_their_rows(core: Core, dtype: DTypeLike, scale_dtype: DTypeLike, scale_cols: int) -> None:
    problem = make_problem(make_ids("half_unassigned", SMALL, seed=3), SMALL.E, SMALL.A, num_rows=90)
    x = floats_of_every_kind((SMALL.T, SMALL.H), dtype, seed=4)
    check_permute(core, problem, x, random_bytes((SMALL.T, scale_cols), scale_dtype, seed=5))


@EXAMPLES
@given(
    problem=problems(with_probs=False),
    hidden=st.sampled_from([1, 7, 72]),
    dtype=st.sampled_from(ROW_DTYPES),
    scale_dtype=st.sampled_from([None, np.float32, np.int32]),
    num_threads=st.sampled_from([1, 3]),
)
def test_rows_of_any_routing_equal_the_oracle(
    core: Core, problem: Problem, hidden: int, dtype: DTypeLike, scale_dtype: DTypeLike | None, num_threads: int
) -> None:
    x = random_bytes((problem.plan.num_tokens, hidden), dtype, seed=6)
    scale = None if scale_dtype is None else random_bytes((len(x), 2), scale_dtype, seed=7)
    check_permute(core, problem, x, scale, num_threads)


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("fill", list(range(4)), ids=lambda bits: f"fill{bits}")
def test_padding_is_written_only_where_fill_says(core: Core, fill: int, num_threads: int) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=8, num_rows=240)
    padding = plan.row_to_token < 0
    assert padding.any()
    assert not padding.all()
    x = random_bytes((SMALL.T, SMALL.H), np.float32, seed=9)
    scale = random_bytes((SMALL.T, 3), np.int32, seed=10)
    rows, scales = permute(core, x, plan.slot_to_row, plan.row_to_token, scale, fill=fill, num_threads=num_threads)
    expected_rows, expected_scales = reference.permute(x, plan, scale)
    for bit, actual, expected in ((Fill.ROWS, rows, expected_rows), (Fill.SCALES, scales, expected_scales)):
        assert actual is not None
        assert expected is not None
        assert_same_bits(actual[~padding], expected[~padding])
        if fill & bit:
            assert_same_bits(actual[padding], expected[padding])
        else:
            assert is_poison(actual[padding])


def test_scales_can_be_moved_without_rows(core: Core) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=11)
    x = random_bytes((SMALL.T, SMALL.H), np.float32, seed=12)
    scale = random_bytes((SMALL.T, 3), np.float32, seed=13)
    with guarded_outputs() as output:
        row_scales = output((plan.num_rows, 3), np.float32)
        params = permute_params(x, plan.slot_to_row, plan.row_to_token, None, scale, row_scales)
        params.x = None
        core.run("permute", params)
    assert_same_bits(row_scales, reference.permute(x, plan, scale)[1])


def test_nothing_wanted_is_no_error(core: Core) -> None:
    plan = make_plan("zipf", SMALL, seed=14)
    x = random_bytes((SMALL.T, SMALL.H), np.float32, seed=15)
    core.run("permute", permute_params(x, plan.slot_to_row, plan.row_to_token, None))


@pytest.mark.cpu_only
@pytest.mark.parametrize("hidden", [1, 7, 72, 200])
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=dtype_name)
def test_rows_may_begin_at_any_address(core: Core, dtype: DTypeLike, hidden: int) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=16)
    x = random_bytes((SMALL.T, hidden), dtype, seed=17)
    scale = random_bytes((SMALL.T, 3), np.float32, seed=18)
    rows, scales = permute(
        core,
        at_odd_address(x),
        plan.slot_to_row,
        plan.row_to_token,
        at_odd_address(scale),
        odd_outputs=True,
    )
    assert rows.ctypes.data % 2 == 1
    expected_rows, expected_scales = reference.permute(x, plan, scale)
    assert_same_bits(rows.copy(), expected_rows)
    assert scales is not None
    assert expected_scales is not None
    assert_same_bits(scales.copy(), expected_scales)


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=dtype_name)
def test_rows_may_lie_apart_or_in_reverse(core: Core, dtype: DTypeLike) -> None:
    problem = make_problem(make_ids("half_unassigned", SMALL, seed=19), SMALL.E, SMALL.A)
    x = random_bytes((SMALL.T, SMALL.H), dtype, seed=20)
    scale = random_bytes((SMALL.T, 3), np.float32, seed=21)
    check_permute(core, problem, with_row_gaps(x, 5), with_row_gaps(scale, 1))
    check_permute(core, problem, x[::-1], scale[::-1])
    check_permute(core, problem, np.broadcast_to(x[:1], x.shape), np.broadcast_to(scale[:1], scale.shape))


@pytest.mark.parametrize("bad", [INT32.min, -7, 240, INT32.max], ids=["min", "minus7", "N", "max"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_slots_with_a_row_out_of_range_are_skipped(core: Core, bad: int, num_threads: int) -> None:
    plan = make_plan("uniform", SMALL, seed=22, num_rows=240)
    x = random_bytes((SMALL.T, SMALL.H), np.float16, seed=23)
    scale = random_bytes((SMALL.T, 2), np.float32, seed=24)
    spoilt = np.random.default_rng(25).random(plan.slot_to_row.shape) < 0.3
    slot_to_row = np.where(spoilt, np.int32(bad), plan.slot_to_row)
    rows, scales = permute(core, x, slot_to_row, plan.row_to_token, scale, num_threads=num_threads)
    expected_rows, expected_scales = reference.permute(x, plan, scale)
    lost = np.zeros(plan.num_rows, np.bool_)
    lost[plan.slot_to_row[spoilt]] = True
    for actual, expected in ((rows, expected_rows), (scales, expected_scales)):
        assert actual is not None
        assert expected is not None
        assert_same_bits(actual[~lost], expected[~lost])
        assert is_poison(actual[lost])  # no slot writes them, and they are no padding


@pytest.mark.parametrize("bad", [INT32.min, -7, SMALL.T, INT32.max], ids=["min", "minus7", "T", "max"])
def test_any_negative_token_marks_padding_and_no_token_is_read_by_it(core: Core, bad: int) -> None:
    slot_to_row = np.full((SMALL.T, SMALL.K), -1, np.int32)
    x = random_bytes((SMALL.T, SMALL.H), np.float32, seed=26)
    rows, _ = permute(core, x, slot_to_row, np.full(20, bad, np.int32))
    if bad < 0:
        assert not rows.view(np.uint32).any()
    else:
        assert is_poison(rows)


@pytest.mark.parametrize("end", [None, 0, 70, 10**6])
@pytest.mark.parametrize("hidden", [3, 512, 7168])
@pytest.mark.parametrize("chunk", [(0, 63), (17, 40), (88, 0), (89, 1)])
def test_a_chunk_is_the_same_as_those_rows_of_the_whole(
    core: Core, chunk: tuple[int, int], hidden: int, end: int | None
) -> None:
    problem = make_problem(make_ids("half_unassigned", SMALL, seed=3), SMALL.E, SMALL.A, num_rows=90)
    plan, x = problem.plan, random_bytes((SMALL.T, hidden), np.float16, seed=4)
    whole, _ = permute(core, x, plan.slot_to_row, plan.row_to_token)
    first, count = chunk
    owners = np.ascontiguousarray(plan.row_to_token[first : first + count])
    with guarded_outputs() as output:
        rows = output((count, hidden), np.float16)
        rows_end = None if end is None else np.array([end], np.int32)
        core.run("permute", permute_params(x, plan.slot_to_row, owners, rows, first_row=first, rows_end=rows_end))
    is_left = (owners < 0) & (first + np.arange(count) >= (10**9 if end is None else end))
    assert_same_bits(rows[~is_left], whole[first : first + count][~is_left])
    assert is_poison(rows[is_left])
