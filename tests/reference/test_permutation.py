# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""permute, unpermute and their gradients against loops, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference import permute, permute_backward, route, sum_rows, unpermute, unpermute_backward

from . import brute_force
from .cases import (
    EXAMPLES,
    ROW_DTYPES,
    SUM_DTYPES,
    Case,
    assert_same_bits,
    assert_same_numbers,
    floats_of_every_kind,
    ordinary_floats,
    routing_cases,
)

SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.sampled_from([1, 3])
WEIGHTS = st.sampled_from(["none", "by row", "by slot"])


def draw_weights(case: Case, kind: str, seed: int) -> tuple[NDArray | None, list[float] | None]:
    """Weights as unpermute takes them, and the weight of every row for the loops."""
    if kind == "none":
        return None, None
    if kind == "by row":
        probs = floats_of_every_kind((case.plan.num_rows,), np.float32, seed)
        return probs, brute_force.numbers(probs)
    probs = floats_of_every_kind((case.plan.num_tokens, case.plan.topk), np.float32, seed)
    by_slot = [prob for line in brute_force.numbers(probs) for prob in line]
    return probs, [by_slot[slot] if slot >= 0 else 0.0 for slot in case.loops.row_to_slot]


@EXAMPLES
@given(routing_cases(), WIDTHS, st.sampled_from(ROW_DTYPES), st.sampled_from([None, np.float32, np.int32]), SEEDS)
def test_permute_copies_bits(
    case: Case, hidden: int, dtype: DTypeLike, scale_dtype: DTypeLike | None, seed: int
) -> None:
    x = floats_of_every_kind((case.plan.num_tokens, hidden), dtype, seed)
    scale = None
    if scale_dtype is not None:
        scale = np.random.default_rng(seed).integers(1, 2**31, (len(x), 2), np.int32).view(scale_dtype)
    rows, scales = permute(x, case.plan, scale)
    assert_same_bits(rows, brute_force.gather(x, case.loops.row_to_token))
    if scale is None:
        assert scales is None
    else:
        assert_same_bits(scales, brute_force.gather(scale, case.loops.row_to_token))


@EXAMPLES
@given(routing_cases(), WIDTHS, st.sampled_from(SUM_DTYPES), WEIGHTS, SEEDS)
def test_unpermute_sums_as_the_loops_do(case: Case, hidden: int, dtype: DTypeLike, kind: str, seed: int) -> None:
    y = floats_of_every_kind((case.plan.num_rows, hidden), dtype, seed)
    probs, weights = draw_weights(case, kind, seed)
    expected = brute_force.sum_rows(y, case.loops.token_rows, weights, copy_single=weights is None)
    assert_same_numbers(unpermute(y, case.plan, probs), expected)


@EXAMPLES
@given(routing_cases(), WIDTHS, st.sampled_from(SUM_DTYPES), SEEDS)
def test_gradient_of_permute_sums_as_the_loops_do(case: Case, hidden: int, dtype: DTypeLike, seed: int) -> None:
    d_rows = floats_of_every_kind((case.plan.num_rows, hidden), dtype, seed)
    expected = brute_force.sum_rows(d_rows, case.loops.token_rows, None, copy_single=True)
    assert_same_numbers(permute_backward(d_rows, case.plan), expected)


@EXAMPLES
@given(routing_cases(), WIDTHS, st.sampled_from(SUM_DTYPES), WEIGHTS, SEEDS)
def test_row_gradient_of_unpermute_equals_loops(
    case: Case, hidden: int, dtype: DTypeLike, kind: str, seed: int
) -> None:
    d_out = floats_of_every_kind((case.plan.num_tokens, hidden), dtype, seed)
    y = floats_of_every_kind((case.plan.num_rows, hidden), dtype, seed + 1)
    probs, weights = draw_weights(case, kind, seed)
    d_y, d_probs = unpermute_backward(d_out, case.plan, y, probs)
    if weights is None:
        assert d_probs is None
        assert_same_bits(d_y, brute_force.gather(d_out, case.loops.row_to_token))
    else:
        assert_same_numbers(d_y, brute_force.weighted_rows(d_out, case.loops.row_to_token, weights))
        without_y, none = unpermute_backward(d_out, case.plan, None, probs)
        assert none is None
        assert_same_bits(without_y, d_y)


@EXAMPLES
@given(routing_cases(), st.sampled_from(SUM_DTYPES), st.sampled_from(["by row", "by slot"]), SEEDS)
def test_probability_gradient_of_unpermute_is_the_dot_product(
    case: Case, dtype: DTypeLike, kind: str, seed: int
) -> None:
    d_out = ordinary_floats((case.plan.num_tokens, 5), dtype, seed)
    y = ordinary_floats((case.plan.num_rows, 5), dtype, seed + 1)
    probs, _ = draw_weights(case, kind, seed)
    _, d_probs = unpermute_backward(d_out, case.plan, y, probs)
    dots = brute_force.dot_products(d_out, y, case.loops.row_to_token)
    if kind == "by slot":
        dots = [[dots[row] if row >= 0 else 0.0 for row in line] for line in case.loops.slot_to_row]
    expected = np.array(dots, np.float32).reshape(probs.shape)
    assert d_probs.dtype == np.float32
    np.testing.assert_allclose(d_probs, expected, rtol=2e-7, atol=1e-14)
    assert ((d_probs == 0) | (expected != 0)).all()


@pytest.mark.parametrize("dtype", SUM_DTYPES)
def test_padding_rows_are_never_read(dtype: DTypeLike) -> None:
    plan = route(np.array([[0, 2], [2, -1]], np.int32), num_experts=3, padding_alignment=4, buffer_size=12)
    padding = plan.row_to_token < 0
    y = ordinary_floats((12, 3), dtype, 0)
    probs = ordinary_floats((12,), np.float32, 1)
    y[padding], probs[padding] = np.nan, np.nan
    d_out = ordinary_floats((2, 3), dtype, 2)
    assert np.isfinite(unpermute(y, plan).astype(np.float32)).all()
    assert np.isfinite(unpermute(y, plan, probs).astype(np.float32)).all()
    d_y, d_probs = unpermute_backward(d_out, plan, y, probs)
    assert (d_y[padding] == 0).all()
    assert (d_probs[padding] == 0).all()
    assert np.isfinite(d_probs).all()


def test_rows_are_added_in_the_given_order() -> None:
    y = np.array([[1.0], [2.0**24], [-(2.0**24)]], np.float32)
    orders = np.array([[0, 1, 2], [1, 2, 0], [-1, 1, 2]])
    assert sum_rows(y, orders).tolist() == [[0.0], [1.0], [0.0]]


def test_weighted_sum_is_fused() -> None:
    """(1 + 2**-23)**2 - (1 + 2**-22) is 2**-46; with a rounded product it would be 0."""
    above_one = np.float32(1 + 2.0**-23)
    y = np.array([[-(1 + 2.0**-22)], [above_one]], np.float32)
    weights = np.array([1, above_one], np.float32)
    assert sum_rows(y, np.array([[0, 1]]), weights).tolist() == [[2.0**-46]]


def test_sums_are_rounded_to_the_output_once() -> None:
    """Rounding to bfloat16 after each addition would lose both halves of a unit."""
    y = np.array([[1.0], [2.0**-8], [2.0**-8]], ml_dtypes.bfloat16)
    assert sum_rows(y, np.array([[0, 1, 2]])).astype(np.float32).tolist() == [[1 + 2.0**-7]]


def test_zeros_keep_their_sign_but_no_rows_give_plus_zero() -> None:
    y = np.array([[-0.0], [-0.0], [0.0]], np.float32)
    token_rows = np.array([[0, 1], [0, 2], [0, -1], [-1, -1]])
    for weights in (None, np.ones(3, np.float32)):
        signs = np.signbit(sum_rows(y, token_rows, weights))
        assert signs.tolist() == [[True], [False], [True], [False]]


@pytest.mark.parametrize("bits", [0x7F81, 0xFFC1, 0x0001, 0x8000], ids=hex)
def test_one_unweighted_row_is_a_copy_of_its_bits(bits: int) -> None:
    y = np.array([[bits]], np.uint16).view(ml_dtypes.bfloat16)
    assert_same_bits(sum_rows(y, np.array([[0, -1], [-1, 0]])), np.repeat(y, 2, axis=0))


def test_subnormal_sums_are_kept() -> None:
    y = np.full((2, 1), np.finfo(np.float32).smallest_subnormal)
    assert sum_rows(y, np.array([[0, 1]])).tolist() == [[2.0**-148]]
    assert sum_rows(y, np.array([[0, 1]]), np.full(2, 0.75, np.float32)).tolist() == [[2.0**-148]]


@pytest.mark.parametrize("fill_padding", ["all", "meta", "none"])
def test_padding_is_zero_whatever_is_asked(fill_padding: str) -> None:
    plan = route(np.array([[1]], np.int32), num_experts=2, padding_alignment=3)
    x, scale = np.ones((1, 2), np.float32), np.ones((1, 1), np.float32)
    rows, scales = permute(x, plan, scale, fill_padding=fill_padding)
    assert rows.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert scales.tolist() == [[1], [0], [0]]
