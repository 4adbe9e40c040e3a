# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""unpermute_backward: gradients of rows to the bit of the oracle, those of weights to the bit of their rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..params import SUM_DTYPES, Shape
from ..reference.cases import (
    assert_same_bits,
    assert_same_numbers,
    floats_of_every_kind,
    ordinary_floats,
)
from .binding import Core
from .cases import EXAMPLES, INT32, SHAPES, SMALL, Problem, make_plan, problems
from .guards import at_odd_address, with_row_gaps
from .operators.unpermute_backward import unpermute_backward

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in isnan")


def dtype_name(dtype: DTypeLike) -> str:
    return np.dtype(dtype).name


def dot_in_lanes(a: NDArray, b: NDArray, num_lanes: int, neighbours: int) -> NDArray:
    """Partial dot products [rows, lanes]; a lane reads ``neighbours`` adjacent elements at a time."""
    lanes = np.zeros((len(a), num_lanes), np.float32)
    for begin in range(0, a.shape[1], num_lanes * neighbours):
        for i in range(neighbours):
            columns = slice(begin + i, begin + num_lanes * neighbours, neighbours)
            used = slice(0, a[:, columns].shape[1])
            lanes[:, used] = reference.fma32(a[:, columns], b[:, columns], lanes[:, used])
    return lanes


def sum_by_halves(lanes: NDArray) -> NDArray:
    """Sum over the last axis, a power of two long, adding its upper half to the lower until one is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = reference.add32(lanes[..., :half], lanes[..., half:])
    return lanes[..., 0]


def dot_by_rule(core: Core, a: NDArray, b: NDArray) -> NDArray:
    """Dot product of each row of a with that of b, by the rule of pmo_unpermute_backward."""
    if not core.entry("unpermute_backward").__name__.endswith("_cuda"):
        return sum_by_halves(dot_in_lanes(a, b, 16, 1))
    row_bytes = a.shape[1] * a.itemsize
    access = max(width for width in (1, 2, 4, 8, 16) if row_bytes % width == 0)
    return sum_by_halves(dot_in_lanes(a, b, 256, access // a.itemsize))


def expected_d_row_weights(core: Core, plan: reference.Plan, d_out: NDArray, rows: NDArray) -> NDArray:
    dots = np.zeros(plan.num_rows, np.float32)
    live = np.flatnonzero(plan.row_to_token >= 0)
    dots[live] = dot_by_rule(core, d_out[plan.row_to_token[live]], rows[live])
    return dots


def check(core: Core, plan: reference.Plan, d_out: NDArray, rows: NDArray, num_threads: int = 0) -> None:
    """Plain, weighted by row, and weighted by slot."""
    maps = (plan.token_rows, plan.row_to_token)
    d_rows, _ = unpermute_backward(core, d_out, *maps, num_threads=num_threads)
    expected, _ = reference.unpermute_backward(d_out, plan)
    assert_same_bits(d_rows, expected)

    dots = expected_d_row_weights(core, plan, d_out, rows)
    by_row = ordinary_floats((plan.num_rows,), np.float32, 1)
    by_slot = floats_of_every_kind(plan.slot_to_row.shape, np.float32, 2)
    d_by_slot = reference.route_backward(dots, plan)
    for weights, index, expected_d_weights in ((by_row, None, dots), (by_slot, plan.row_to_slot, d_by_slot)):
        d_rows, d_weights = unpermute_backward(
            core, d_out, *maps, rows, weights, index, wants_d_weights=True, num_threads=num_threads
        )
        expected, _ = reference.unpermute_backward(d_out, plan, probs=weights)
        assert_same_numbers(d_rows, expected)
        assert_same_numbers(d_weights, expected_d_weights)


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_equal_the_oracle(core: Core, shape: Shape, dtype: DTypeLike) -> None:
    plan = make_plan("half_unassigned", shape, seed=1)
    d_out = ordinary_floats((shape.T, shape.H), dtype, seed=2)
    check(core, plan, d_out, ordinary_floats((plan.num_rows, shape.H), dtype, seed=3))


@pytest.mark.parametrize(("num_tokens", "rows_per_token"), [(3, 4), (4200, 4), (4200, 3)], ids=str)
def test_order_of_a_dot_product_is_the_same_for_any_number_of_tokens(
    core: Core, num_tokens: int, rows_per_token: int
) -> None:
    few, H = 3, 1032  # a GPU takes few rows, many rows, and few rows of many tokens in three ways
    d_out, rows = ordinary_floats((few, H), np.float32, 1), ordinary_floats((few * rows_per_token, H), np.float32, 2)
    dots = dot_by_rule(core, d_out.repeat(rows_per_token, axis=0), rows)
    repeats, num_rows = num_tokens // few, num_tokens * rows_per_token
    token_rows = np.full((num_tokens, 4), -1, np.int32)
    token_rows[:, :rows_per_token] = np.arange(num_rows).reshape(num_tokens, rows_per_token)
    row_to_token = np.arange(num_rows, dtype=np.int32) // np.int32(rows_per_token)
    _, d_weights = unpermute_backward(
        core,
        np.tile(d_out, (repeats, 1)),
        token_rows,
        row_to_token,
        np.tile(rows, (repeats, 1)),
        np.ones(num_rows, np.float32),
        wants_d_weights=True,
    )
    assert_same_numbers(d_weights, np.tile(dots, repeats))


@EXAMPLES
@given(
    problem=problems(with_probs=False),
    hidden=st.sampled_from([1, 7, 16, 40]),
    dtype=st.sampled_from(SUM_DTYPES),
    num_threads=st.sampled_from([1, 3]),
)
def test_gradients_of_any_routing_equal_the_oracle(
    core: Core, problem: Problem, hidden: int, dtype: DTypeLike, num_threads: int
) -> None:
    plan = problem.plan
    d_out = floats_of_every_kind((plan.num_tokens, hidden), dtype, seed=4)
    check(core, plan, d_out, floats_of_every_kind((plan.num_rows, hidden), dtype, seed=5), num_threads)


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_gradient_of_weights_is_near_the_exact_dot_product(core: Core, dtype: DTypeLike) -> None:
    shape = SMALL._replace(H=7168)
    plan = make_plan("uniform", shape, seed=6)
    d_out = ordinary_floats((shape.T, shape.H), dtype, seed=7)
    rows = ordinary_floats((plan.num_rows, shape.H), dtype, seed=8)
    weights = ordinary_floats((plan.num_rows,), np.float32, seed=9)
    _, d_weights = unpermute_backward(
        core, d_out, plan.token_rows, plan.row_to_token, rows, weights, wants_d_weights=True
    )
    _, expected = reference.unpermute_backward(d_out, plan, rows, weights)
    # 448 fused steps per lane on partial sums of the size of sqrt(H): far below this bound, far above any slip.
    np.testing.assert_allclose(d_weights, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_gradient_of_a_copied_row_is_a_copy(core: Core, dtype: DTypeLike) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=10)
    d_out = floats_of_every_kind((SMALL.T, SMALL.H), dtype, seed=11)
    rows = floats_of_every_kind((plan.num_rows, SMALL.H), dtype, seed=12)
    weights = ordinary_floats((plan.num_rows,), np.float32, seed=13)
    d_rows, d_weights = unpermute_backward(
        core, d_out, plan.token_rows, plan.row_to_token, rows, weights, wants_d_weights=True, copy_single_row=True
    )
    single = np.count_nonzero(plan.token_rows >= 0, axis=1) == 1
    copied = plan.token_rows[single, 0]
    assert 0 < len(copied) < np.count_nonzero(plan.row_to_token >= 0)
    expected, _ = reference.unpermute_backward(d_out, plan, probs=weights)
    expected[copied] = d_out[single]
    dots = expected_d_row_weights(core, plan, d_out, rows)
    dots[copied] = 0
    assert d_rows is not None
    assert_same_numbers(d_rows, expected)
    assert_same_bits(d_rows[copied], expected[copied])
    assert_same_numbers(d_weights, dots)


@pytest.mark.parametrize("by_slot", [False, True], ids=["by_row", "by_slot"])
def test_either_gradient_can_be_left_out(core: Core, by_slot: bool) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=14)
    d_out = ordinary_floats((SMALL.T, SMALL.H), np.float16, seed=15)
    rows = ordinary_floats((plan.num_rows, SMALL.H), np.float16, seed=16)
    weights = ordinary_floats(plan.slot_to_row.shape if by_slot else (plan.num_rows,), np.float32, seed=17)
    index = plan.row_to_slot if by_slot else None
    maps = (plan.token_rows, plan.row_to_token)
    d_rows, d_weights = unpermute_backward(core, d_out, *maps, rows, weights, index, wants_d_weights=True)
    alone, none = unpermute_backward(core, d_out, *maps, None, weights, index)
    assert none is None
    assert_same_bits(alone, d_rows)
    none, alone = unpermute_backward(core, d_out, *maps, rows, weights, index, wants_d_rows=False, wants_d_weights=True)
    assert none is None
    assert_same_bits(alone, d_weights)
    assert unpermute_backward(core, d_out, *maps, wants_d_rows=False) == (None, None)


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_inputs_and_outputs_may_lie_anywhere(core: Core, dtype: DTypeLike) -> None:
    """At odd addresses, apart, and in reverse: the same bits."""
    plan = make_plan("half_unassigned", SMALL, seed=18)
    d_out = ordinary_floats((SMALL.T, SMALL.H), dtype, seed=19)
    rows = ordinary_floats((plan.num_rows, SMALL.H), dtype, seed=20)
    weights = ordinary_floats((plan.num_rows,), np.float32, seed=21)
    maps = (plan.token_rows, plan.row_to_token)
    d_rows, d_weights = unpermute_backward(core, d_out, *maps, rows, weights, wants_d_weights=True)
    reversed_d_out, reversed_rows = (np.ascontiguousarray(matrix[::-1])[::-1] for matrix in (d_out, rows))
    for other_d_out, other_rows in (
        (at_odd_address(d_out), at_odd_address(rows)),
        (with_row_gaps(d_out, 3), with_row_gaps(rows, 5)),
        (reversed_d_out, reversed_rows),
    ):
        other_d_rows, other_d_weights = unpermute_backward(
            core, other_d_out, *maps, other_rows, weights, wants_d_weights=True, odd_outputs=True
        )
        assert other_d_rows is not None
        assert_same_bits(other_d_rows.copy(), d_rows)
        assert_same_bits(other_d_weights, d_weights)


BAD_ROWS = [INT32.min, -7, 240, INT32.max]
BAD_IDS = ["min", "minus7", "N", "max"]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=BAD_IDS)
def test_rows_out_of_range_are_skipped(core: Core, bad: int) -> None:
    plan = make_plan("uniform", SMALL, seed=22, num_rows=240)
    d_out = ordinary_floats((SMALL.T, SMALL.H), np.float32, seed=23)
    rows = ordinary_floats((240, SMALL.H), np.float32, seed=24)
    weights = ordinary_floats((240,), np.float32, seed=25)
    spoilt = np.random.default_rng(26).random(plan.token_rows.shape) < 0.4
    row_to_token = plan.row_to_token.copy()
    lost = plan.token_rows[spoilt]
    row_to_token[lost[lost >= 0]] = -1
    d_rows, d_weights = unpermute_backward(
        core,
        d_out,
        np.where(spoilt, np.int32(bad), plan.token_rows),
        row_to_token,
        rows,
        weights,
        wants_d_weights=True,
    )
    kept = plan._replace(row_to_token=row_to_token)
    assert_same_bits(d_rows, reference.unpermute_backward(d_out, kept, probs=weights)[0])
    assert_same_bits(d_weights, expected_d_row_weights(core, kept, d_out, rows))


@pytest.mark.parametrize("bad", [INT32.min, -7, -1, 189, INT32.max], ids=["min", "minus7", "minus1", "size", "max"])
def test_weight_places_out_of_range_have_no_gradient(core: Core, bad: int) -> None:
    plan = make_plan("uniform", SMALL, seed=27, num_rows=240)
    d_out = ordinary_floats((SMALL.T, SMALL.H), np.float32, seed=28)
    rows = ordinary_floats((240, SMALL.H), np.float32, seed=29)
    weights = ordinary_floats((189,), np.float32, seed=30)
    index = np.where(np.random.default_rng(31).random(240) < 0.4, np.int32(bad), plan.row_to_slot)
    d_rows, d_weights = unpermute_backward(
        core, d_out, plan.token_rows, plan.row_to_token, rows, weights, index, wants_d_weights=True
    )
    usable = np.flatnonzero((index >= 0) & (index < 189))
    row_weights = np.zeros(240, np.float32)
    row_weights[usable] = weights[index[usable]]
    assert_same_bits(d_rows, reference.unpermute_backward(d_out, plan, probs=row_weights)[0])
    expected = np.zeros(189, np.float32)
    expected[index[usable]] = expected_d_row_weights(core, plan, d_out, rows)[usable]
    assert_same_bits(d_weights, expected)


@pytest.mark.parametrize("bad", [SMALL.T, INT32.max], ids=["T", "max"])
def test_tokens_out_of_range_are_never_followed(core: Core, bad: int) -> None:
    """row_to_token says only which rows are padding."""
    plan = make_plan("uniform", SMALL, seed=32)
    d_out = ordinary_floats((SMALL.T, SMALL.H), np.float32, seed=33)
    d_rows, _ = unpermute_backward(core, d_out, plan.token_rows, np.full(plan.num_rows, bad, np.int32))
    live = plan.row_to_token >= 0
    assert d_rows is not None
    assert_same_bits(d_rows[live], d_out[plan.row_to_token[live]])
