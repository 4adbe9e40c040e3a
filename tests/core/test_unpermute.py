# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""unpermute: sums of rows to the bit, for ordinary values and for those where the rule of summation shows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..pairwise import pairwise_of
from ..params import SUM_DTYPES, Shape
from ..reference.cases import (
    assert_same_bits,
    assert_same_numbers,
    floats_of_every_kind,
    ordinary_floats,
)
from .binding import Core
from .cases import EXAMPLES, INT32, SHAPES, SMALL, Problem, make_plan, make_probs, problems
from .guards import at_odd_address, guarded_outputs, is_poison, with_row_gaps
from .operators.unpermute import unpermute, unpermute_params

bfloat16 = ml_dtypes.bfloat16

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in isnan")


def dtype_name(dtype: DTypeLike) -> str:
    return np.dtype(dtype).name


def make_weights(size: int, seed: int) -> NDArray:
    """Mostly ordinary: a special weight spoils its whole row."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(size).astype(np.float32)
    return np.where(rng.random(size) < 0.05, make_probs((size,), seed), weights)


def assert_sums(actual: NDArray, expected: NDArray, plan: reference.Plan, copies_single_rows: bool) -> None:
    """Bits of copies, numbers of sums."""
    assert_same_numbers(actual, expected)
    if copies_single_rows:
        single = np.count_nonzero(plan.token_rows >= 0, axis=1) == 1
        assert_same_bits(actual[single], expected[single])


def check(core: Core, plan: reference.Plan, rows: NDArray, num_threads: int = 0) -> None:
    """Plain, weighted by row, and weighted by slot."""
    out = unpermute(core, rows, plan.token_rows, num_threads=num_threads)
    assert_sums(out, reference.unpermute(rows, plan), plan, copies_single_rows=True)

    row_weights = make_weights(plan.num_rows, 1)
    out = unpermute(core, rows, plan.token_rows, row_weights, num_threads=num_threads)
    assert_sums(out, reference.unpermute(rows, plan, row_weights), plan, copies_single_rows=False)

    slot_weights = make_weights(plan.slot_to_row.size, 2).reshape(plan.slot_to_row.shape)
    out = unpermute(core, rows, plan.token_rows, slot_weights, plan.row_to_slot, num_threads=num_threads)
    assert_sums(out, reference.unpermute(rows, plan, slot_weights), plan, copies_single_rows=False)


@pairwise_of(
    pytest.mark.parametrize("shape", SHAPES, ids=str),
    pytest.mark.parametrize("kind", ["half_unassigned", "zipf"]),
    pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name),
    others_are_slow=True,
    empty={"shape": SHAPES[:1]},
)
def test_sums_equal_the_oracle(core: Core, shape: Shape, kind: str, dtype: DTypeLike) -> None:
    plan = make_plan(kind, shape, seed=1)
    check(core, plan, floats_of_every_kind((plan.num_rows, shape.H), dtype, seed=2))


@EXAMPLES
@given(
    problem=problems(with_probs=False),
    hidden=st.sampled_from([1, 7, 40]),
    dtype=st.sampled_from(SUM_DTYPES),
    num_threads=st.sampled_from([1, 3]),
)
def test_sums_of_any_routing_equal_the_oracle(
    core: Core, problem: Problem, hidden: int, dtype: DTypeLike, num_threads: int
) -> None:
    check(core, problem.plan, floats_of_every_kind((problem.plan.num_rows, hidden), dtype, seed=3), num_threads)


def one_sum(core: Core, values: list[float], dtype: DTypeLike, weights: list[float] | None = None) -> NDArray:
    """Sum of the values as rows of a single token, wide enough for every path of the kernels."""
    width = 100
    rows = np.repeat(np.array(values, np.float64).astype(dtype)[:, None], width, axis=1)
    token_rows = np.arange(len(values), dtype=np.int32)[None]
    row_weights = None if weights is None else np.array(weights, np.float64).astype(np.float32)
    out = unpermute(core, rows, token_rows, row_weights)
    assert (out.view(f"u{out.itemsize}") == out.view(f"u{out.itemsize}")[0, 0]).all()
    return out[0, :1].copy()


TINY32 = 2.0**-149
TINY16 = 2.0**-24
TINY_BF16 = 2.0**-133


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        pytest.param(np.float32, [2.0**100, -(2.0**100), 1.0], 1.0, id="ascending_order"),
        pytest.param(np.float32, [2.0**100, 1.0, -(2.0**100)], 0.0, id="cancellation"),
        pytest.param(bfloat16, [1.0, 2.0**-8, 2.0**-20], 1.0 + 2.0**-7, id="rounded_once_to_bfloat16"),
        pytest.param(np.float16, [1.0, 2.0**-11, 2.0**-20], 1.0 + 2.0**-10, id="rounded_once_to_float16"),
        pytest.param(bfloat16, [1.0, 2.0**-8], 1.0, id="tie_to_even_down"),
        pytest.param(bfloat16, [1.0 + 2.0**-7, 2.0**-8], 1.0 + 2.0**-6, id="tie_to_even_up"),
        pytest.param(np.float32, [TINY32, TINY32], 2 * TINY32, id="float32_subnormals"),
        pytest.param(np.float16, [TINY16, TINY16, TINY16], 3 * TINY16, id="float16_subnormals"),
        pytest.param(np.float16, [TINY16, 2.0**-14], 2.0**-14 + TINY16, id="float16_across_the_normal_limit"),
        pytest.param(bfloat16, [TINY_BF16, 4 * TINY_BF16], 5 * TINY_BF16, id="bfloat16_subnormals"),
        pytest.param(np.float32, [2.0**-126, -(2.0**-126 - TINY32)], TINY32, id="subnormal_difference"),
        pytest.param(np.float32, [-0.0, -0.0], -0.0, id="negative_zeros"),
        pytest.param(np.float32, [-0.0, 0.0], 0.0, id="mixed_zeros"),
        pytest.param(np.float32, [1.0, -1.0], 0.0, id="exact_zero_is_positive"),
        pytest.param(np.float16, [65504.0, 15.0], 65504.0, id="float16_below_the_overflow_limit"),
        pytest.param(np.float16, [65504.0, 16.0], np.inf, id="float16_at_the_overflow_limit"),
        pytest.param(np.float16, [65504.0, 65504.0, -65504.0], 65504.0, id="float16_overflow_in_between"),
        pytest.param(bfloat16, [3.3895314e38, 3.3895314e38], np.inf, id="bfloat16_overflow"),
        pytest.param(np.float32, [np.inf, 1.0], np.inf, id="infinity"),
        pytest.param(np.float32, [np.inf, -np.inf], np.nan, id="infinities_that_cancel"),
        pytest.param(np.float16, [np.nan, 1.0], np.nan, id="nan"),
        pytest.param(bfloat16, [np.nan, 1.0], np.nan, id="bfloat16_nan"),
    ],
)
def test_plain_sum_by_hand(core: Core, dtype: DTypeLike, values: list[float], expected: float) -> None:
    assert_same_numbers(one_sum(core, values, dtype), np.array([expected]).astype(dtype))


@pytest.mark.parametrize(
    ("dtype", "values", "weights", "expected"),
    [
        # Unfused, the square of 1 + 2^-12 loses its last term 2^-24 and the sum is 0.
        pytest.param(np.float32, [-1 - 2.0**-11, 1 + 2.0**-12], [1, 1 + 2.0**-12], 2.0**-24, id="fused"),
        # Unfused, the second product would be an infinity of its own and the sum a NaN.
        pytest.param(np.float32, [2.0**100, -(2.0**100)], [2.0**100, 2.0**100], np.inf, id="fused_past_the_largest"),
        pytest.param(np.float32, [3e38, 3e38], [1.0, -2.0], -3e38, id="fused_overflow"),
        pytest.param(np.float32, [2.0**-100, 1.0], [2.0**-49, 2.0**-149], 2 * TINY32, id="subnormal_products"),
        pytest.param(np.float32, [-0.0], [1.0], -0.0, id="negative_zero_alone"),
        pytest.param(np.float32, [0.0], [-1.0], -0.0, id="negative_weight_of_zero"),
        pytest.param(np.float32, [np.inf, 1.0], [0.0, 1.0], np.nan, id="zero_weight_of_infinity"),
        pytest.param(np.float32, [1.0, 2.0], [np.nan, 1.0], np.nan, id="nan_weight"),
        pytest.param(bfloat16, [1.0, 1.0, 1.0], [1.0, 2.0**-8, 2.0**-20], 1.0 + 2.0**-7, id="rounded_once"),
        pytest.param(np.float16, [2.0**-24], [0.5], 0.0, id="tie_below_the_smallest"),
        pytest.param(np.float16, [2.0**-24], [0.75], 2.0**-24, id="rounds_to_the_smallest"),
    ],
)
def test_weighted_sum_by_hand(
    core: Core, dtype: DTypeLike, values: list[float], weights: list[float], expected: float
) -> None:
    assert_same_numbers(one_sum(core, values, dtype, weights), np.array([expected]).astype(dtype))


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_every_16_bit_pattern_survives_a_sum_with_nothing(core: Core, dtype: DTypeLike) -> None:
    """Widening and narrowing are inverse: x + (-0.0) is x."""
    patterns = np.arange(1 << 16, dtype=np.uint32)
    if np.dtype(dtype).itemsize == 4:
        rows = (patterns << np.uint32(16) | patterns).view(np.float32)
    else:
        rows = patterns.astype(np.uint16).view(dtype)
    table = np.stack([rows, np.full(rows.shape, -0.0).astype(dtype)])
    out = unpermute(core, table, np.array([[0, 1]], np.int32))
    assert_same_numbers(out[0], rows)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=dtype_name)
def test_rounding_equals_numpy_for_values_between_neighbours(core: Core, dtype: DTypeLike) -> None:
    """One row times a float32 weight of 1 to 2 in 2^16 steps: every kind of tie and of remainder."""
    weights = 1 + np.arange(1 << 16, dtype=np.float32) / (1 << 16)
    rows = np.ones((len(weights), 1), dtype)
    tokens = np.arange(len(weights), dtype=np.int32)[:, None]
    for scale in (1.0, 2.0**-14, 2.0**-20, 2.0**-24, 2.0**15):
        out = unpermute(core, rows, tokens, weights * np.float32(scale))
        assert_same_bits(out[:, 0], reference.round_to(weights * np.float32(scale), dtype))


@pytest.mark.parametrize("payload", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00001])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_nan_weights_give_nan_whatever_their_payload(core: Core, dtype: DTypeLike, payload: int) -> None:
    """Rounded like a number, all ones would become a negative zero and a lone last bit an infinity."""
    weights = np.array([payload, payload], np.uint32).view(np.float32)
    out = unpermute(core, np.ones((2, 72), dtype), np.array([[0, 1], [1, -1]], np.int32), weights)
    assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_single_weighted_row_is_copied_on_request(core: Core, dtype: DTypeLike) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=4)
    rows = floats_of_every_kind((plan.num_rows, SMALL.H), dtype, seed=5)
    weights = make_weights(plan.num_rows, 6)
    out = unpermute(core, rows, plan.token_rows, weights, copy_single_row=True)
    expected = reference.unpermute(rows, plan, weights)
    single = np.count_nonzero(plan.token_rows >= 0, axis=1) == 1
    assert 0 < single.sum() < SMALL.T
    expected[single] = rows[plan.token_rows[single, 0]]
    assert_sums(out, expected, plan, copies_single_rows=True)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_tokens_without_rows_get_positive_zeros(core: Core, weighted: bool) -> None:
    rows = np.full((3, 72), np.nan, np.float32)
    weights = np.full(3, np.nan, np.float32) if weighted else None
    for token_rows in (np.full((5, 2), -1, np.int32), np.empty((5, 0), np.int32)):
        out = unpermute(core, rows, token_rows, weights)
        assert not out.view(np.uint32).any()


def test_rows_behind_the_first_minus_one_are_not_read(core: Core) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    out = unpermute(core, rows, np.array([[1, -1, 3], [-1, 0, 2]], np.int32))
    assert out.tolist() == [[3, 4, 5], [0, 0, 0]]


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_rows_may_lie_anywhere(core: Core, dtype: DTypeLike) -> None:
    """At odd addresses, apart, and in reverse: the same bits."""
    plan = make_plan("half_unassigned", SMALL, seed=7)
    rows = ordinary_floats((plan.num_rows, SMALL.H), dtype, seed=8)
    for weights in (None, make_weights(plan.num_rows, 9)):
        expected = unpermute(core, rows, plan.token_rows, weights)
        odd = unpermute(core, at_odd_address(rows), plan.token_rows, weights, odd_outputs=True)
        assert_same_numbers(odd.copy(), expected)
        assert_same_numbers(unpermute(core, with_row_gaps(rows, 3), plan.token_rows, weights), expected)
        backwards = np.ascontiguousarray(rows[::-1])[::-1]
        assert_same_numbers(unpermute(core, backwards, plan.token_rows, weights), expected)


BAD_ROWS = [INT32.min, -7, 240, INT32.max]
BAD_IDS = ["min", "minus7", "N", "max"]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=BAD_IDS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_rows_out_of_range_are_skipped(core: Core, bad: int, weighted: bool) -> None:
    plan = make_plan("uniform", SMALL, seed=10, num_rows=240)
    rows = floats_of_every_kind((240, SMALL.H), np.float32, seed=11)
    weights = make_weights(240, 12) if weighted else None
    spoilt = np.random.default_rng(13).random(plan.token_rows.shape) < 0.4
    out = unpermute(core, rows, np.where(spoilt, np.int32(bad), plan.token_rows), weights)
    expected = reference.sum_rows(rows, np.where(spoilt, -1, plan.token_rows), weights)
    assert_same_numbers(out, expected)


@pytest.mark.parametrize("bad", [INT32.min, -7, -1, 189, INT32.max], ids=["min", "minus7", "minus1", "size", "max"])
def test_weight_places_out_of_range_weigh_nothing(core: Core, bad: int) -> None:
    plan = make_plan("uniform", SMALL, seed=14, num_rows=240)
    assert plan.slot_to_row.size == 189
    rows = ordinary_floats((240, SMALL.H), np.float32, seed=15)
    weights = make_weights(189, 16)
    spoilt = np.random.default_rng(17).random(240) < 0.4
    index = np.where(spoilt, np.int32(bad), plan.row_to_slot)
    out = unpermute(core, rows, plan.token_rows, weights, index)
    row_weights = np.where(spoilt | (plan.row_to_slot < 0), np.float32(0), weights[plan.row_to_slot])
    assert_same_numbers(out, reference.sum_rows(rows, plan.token_rows, row_weights))


def test_rows_beyond_the_weights_weigh_nothing(core: Core) -> None:
    rows = np.ones((3, 2), np.float32)
    out = unpermute(core, rows, np.array([[0, 1, 2]], np.int32), np.array([5, 7], np.float32))
    assert out.tolist() == [[12, 12]]


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("hidden", "first", "wide"), [(3, 1, 5), (64, 8, 72), (256, 0, 1024)])
def test_columns_of_a_wider_result(core: Core, dtype: DTypeLike, hidden: int, first: int, wide: int) -> None:
    plan = make_plan("zipf", SMALL, seed=1)
    rows = ordinary_floats((plan.num_rows, hidden), dtype, seed=1)
    with guarded_outputs() as output:
        out = output((SMALL.T, wide), dtype)
        columns = out[:, first : first + hidden]
        core.run("unpermute", unpermute_params(rows, plan.token_rows, columns))
    assert_same_bits(columns, unpermute(core, rows, plan.token_rows))
    assert is_poison(out[:, :first])
    assert is_poison(out[:, first + hidden :])
