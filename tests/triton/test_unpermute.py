# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Sums and their gradients by Triton kernels: the oracle's bits, and dot products within their proved bound."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from paddle_moe_ops import reference
from paddle_moe_ops.testing.tolerances import assert_close_sums, dot_chain, dtype_tols
from paddle_moe_ops.triton.ops.configs import Config
from paddle_moe_ops.triton.ops.unpermute import unpermute
from paddle_moe_ops.triton.ops.unpermute_backward import unpermute_backward
from tests.params import MANY_SLOTS, ODD, SMALL, SUM_DTYPES, WIDE
from tests.reference.cases import assert_same_bits, assert_same_numbers

from .problems import LONG_ROW_SHAPES, ROW_SHAPES, every_kind, fitting, halfway, make_problem, ordinary

LONG_ROWS = list(zip(LONG_ROW_SHAPES, (*SUM_DTYPES, *SUM_DTYPES), strict=False))
WEIGHTS = ["plain", "by row", "by slot"]


def weights_of(gpu, problem, kind):
    """The weights as an array, and the arguments of unpermute and its gradient for them."""
    plan = problem.plan
    if kind == "plain":
        return None, {}, {}
    if kind == "by row":
        weights = gpu.array(plan.row_probs)
        return plan.row_probs, {"weights": weights}, {"weights": weights}
    weights = gpu.array(problem.probs)
    forward = {"weights": weights, "weight_index": gpu.array(plan.row_to_slot)}
    return problem.probs, forward, {"weights": weights, "weights_by_slot": True}


def check_sum(gpu, problem, rows, kind, **options):
    probs, forward, _ = weights_of(gpu, problem, kind)
    out = unpermute(gpu, gpu.array(rows), gpu.array(problem.plan.token_rows), **forward, **options)
    actual, expected = gpu.numpy(out), reference.unpermute(rows, problem.plan, probs)
    assert_same_numbers(actual, expected)
    if kind == "plain":
        single = np.count_nonzero(problem.plan.token_rows >= 0, axis=1) == 1
        assert_same_bits(actual[single], expected[single])


def check_gradients(gpu, problem, d_out, rows, kind, **needs):
    plan = problem.plan
    probs, _, backward = weights_of(gpu, problem, kind)
    slots = plan.slot_to_row if kind == "by slot" else plan.token_rows
    arrays = gpu.array(d_out), gpu.array(slots), gpu.array(plan.row_to_token)
    d_rows, d_probs = unpermute_backward(gpu, *arrays, rows=gpu.array(rows), **backward, **needs)
    expected_rows, expected_probs = reference.unpermute_backward(d_out, plan, rows, probs)
    if needs.get("need_rows", True):
        assert_same_numbers(gpu.numpy(d_rows), expected_rows)
    if kind == "plain":
        assert d_probs is None
        return None
    terms = (np.abs(each.astype(np.float32)) for each in (d_out, rows))
    _, magnitude = reference.unpermute_backward(next(terms), plan, next(terms), probs)
    tolerance = dtype_tols(np.float32, dot_chain(d_out.shape[1]))
    actual = gpu.numpy(d_probs)
    assert_close_sums(actual, expected_probs, magnitude, tolerance, what="d_probs")
    return actual


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_sums_are_those_of_the_oracle(gpu, rng, shape, kind):
    shape = fitting(gpu, shape)
    problem = make_problem(rng, shape)
    for dtype in SUM_DTYPES:
        check_sum(gpu, problem, every_kind(rng, (problem.plan.num_rows, shape.H), dtype), kind)


@pytest.mark.parametrize(("shape", "dtype"), LONG_ROWS, ids=str)
def test_sums_of_long_rows_and_of_many(gpu, rng, shape, dtype):
    shape = fitting(gpu, shape)
    problem = make_problem(rng, shape)
    rows = every_kind(rng, (problem.plan.num_rows, shape.H), dtype)
    for kind in ("plain", "by slot"):
        check_sum(gpu, problem, rows, kind)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_gradients_are_those_of_the_oracle(gpu, rng, shape, kind):
    shape = fitting(gpu, shape)
    problem = make_problem(rng, shape)
    for dtype in SUM_DTYPES:
        d_out, rows = ordinary(rng, (shape.T, shape.H), dtype), ordinary(rng, (problem.plan.num_rows, shape.H), dtype)
        check_gradients(gpu, problem, d_out, rows, kind)


@pytest.mark.parametrize(("shape", "dtype"), LONG_ROWS, ids=str)
def test_gradients_of_long_rows_and_of_many(gpu, rng, shape, dtype):
    shape = fitting(gpu, shape)
    problem = make_problem(rng, shape)
    d_out, rows = ordinary(rng, (shape.T, shape.H), dtype), ordinary(rng, (problem.plan.num_rows, shape.H), dtype)
    check_gradients(gpu, problem, d_out, rows, "by row")


def test_the_gradient_of_rows_keeps_every_kind_of_number(gpu, rng):
    problem = make_problem(rng, fitting(gpu, SMALL))
    rows = ordinary(rng, (problem.plan.num_rows, SMALL.H), np.float32)
    d_out = every_kind(rng, (problem.shape.T, SMALL.H), np.float32)
    _, _, backward = weights_of(gpu, problem, "by row")
    arrays = (gpu.array(each) for each in (d_out, problem.plan.token_rows, problem.plan.row_to_token))
    d_rows, d_probs = unpermute_backward(gpu, *arrays, **backward)
    assert d_probs is None
    assert_same_numbers(
        gpu.numpy(d_rows), reference.unpermute_backward(d_out, problem.plan, rows, problem.plan.row_probs)[0]
    )


@pytest.mark.parametrize("kind", ["by row", "by slot"])
def test_a_gradient_that_is_not_wanted_is_not_made(gpu, rng, kind):
    problem = make_problem(rng, fitting(gpu, SMALL))
    shapes = (problem.shape.T, SMALL.H), (problem.plan.num_rows, SMALL.H)
    d_out, rows = (ordinary(rng, shape, np.float16) for shape in shapes)
    both = check_gradients(gpu, problem, d_out, rows, kind)
    alone = check_gradients(gpu, problem, d_out, rows, kind, need_rows=False)
    assert_same_bits(alone, both)


def test_the_bits_of_a_dot_product_do_not_depend_on_the_other_tokens(gpu, rng):
    problem = make_problem(rng, fitting(gpu, WIDE), "uniform")
    tokens, rows = problem.shape.T, problem.plan.num_rows
    d_out, y = ordinary(rng, (tokens, 300), np.float32), ordinary(rng, (rows, 300), np.float32)
    expected = check_gradients(gpu, problem, d_out, y, "by row")
    for token in range(tokens):
        theirs = problem.plan.token_rows[token]
        alone = np.arange(len(theirs), dtype=np.int32)[None]
        arrays = (
            d_out[token : token + 1],
            alone,
            np.zeros(len(theirs), np.int32),
            y[theirs],
            problem.plan.row_probs[theirs],
        )
        _, d_probs = unpermute_backward(gpu, *map(gpu.array, arrays))
        assert_same_bits(gpu.numpy(d_probs), expected[theirs])


@pytest.mark.parametrize("config", [(64, 1), (1024, 2), (4096, 8)])
def test_sums_in_blocks_of_any_size(gpu, rng, config):
    problem = make_problem(rng, fitting(gpu, SMALL))
    for hidden in (40, 64):
        rows = every_kind(rng, (problem.plan.num_rows, hidden), np.float16)
        check_sum(gpu, problem, rows, "by row", config=Config(*config))


def test_rows_may_begin_anywhere(gpu, rng):
    problem = make_problem(rng, fitting(gpu, SMALL))
    rows = every_kind(rng, (problem.plan.num_rows, 16), np.float16)
    for offset in (2, 8):
        out = unpermute(gpu, gpu.array(rows, offset=offset), gpu.array(problem.plan.token_rows))
        assert_same_numbers(gpu.numpy(out), reference.unpermute(rows, problem.plan))


@pytest.mark.parametrize("strided", [1, 3, 8])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_rows_may_lie_apart(gpu, rng, dtype, strided):
    problem = make_problem(rng, fitting(gpu, SMALL))
    plan = problem.plan
    wide = every_kind(rng, (plan.num_rows, 16 + strided), dtype)
    rows = gpu.columns(gpu.array(wide), 16)
    for kind in WEIGHTS:
        probs, forward, _ = weights_of(gpu, problem, kind)
        out = unpermute(gpu, rows, gpu.array(plan.token_rows), **forward)
        assert_same_numbers(gpu.numpy(out), reference.unpermute(np.ascontiguousarray(wide[:, :16]), plan, probs))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", SUM_DTYPES[1:], ids=str)
def test_sums_halfway_between_two_numbers_get_the_even_one(gpu, dtype, weighted):
    rows, expected = halfway(dtype)
    weights = None
    if weighted:
        weights = np.array([1, 2, 0.5], np.float32)
        rows = (rows.astype(np.float32) / weights[:, None]).astype(dtype)
        weights = gpu.array(weights)
    out = unpermute(gpu, gpu.array(rows), gpu.array(np.array([[0, 1, 2]], np.int32)), weights)
    assert_same_bits(gpu.numpy(out), expected[None])


@pytest.mark.parametrize("dtype", SUM_DTYPES[1:], ids=str)
def test_gradients_halfway_between_two_numbers_get_the_even_one(gpu, dtype):
    step = float(ml_dtypes.finfo(dtype).eps)
    d_out = np.array([[1 + step, 1 + 3 * step, -1 - step, -1 - 3 * step]]).astype(dtype)
    maps = gpu.array(np.zeros((1, 1), np.int32)), gpu.array(np.zeros(1, np.int32))
    weights = gpu.array(np.array([1.5], np.float32))
    d_rows, _ = unpermute_backward(gpu, gpu.array(d_out), *maps, weights=weights)
    expected = np.array([[1.5 + 2 * step, 1.5 + 4 * step, -1.5 - 2 * step, -1.5 - 4 * step]]).astype(dtype)
    assert_same_bits(gpu.numpy(d_rows), expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_single_row_is_copied_on_request_even_with_weights(gpu, rng, weighted):
    """Its gradient is a copy, too, and its weight has none."""
    token_rows = np.array([[2, -1, -1], [0, 1, -1], [-1, -1, -1]], np.int32)
    rows = every_kind(rng, (4, 12), np.float32)
    weights = np.array([0.5, 0.25, 3.0, 7.0], np.float32) if weighted else None
    options = {"weights": None if weights is None else gpu.array(weights), "copy_single_row": True}
    out = gpu.numpy(unpermute(gpu, gpu.array(rows), gpu.array(token_rows), **options))
    assert_same_bits(out[0], rows[2])
    assert_same_numbers(out, np.concatenate([rows[2:3], reference.sum_rows(rows, token_rows, weights)[1:]]))
    d_out = every_kind(rng, (3, 12), np.float32)
    owners = gpu.array(np.array([1, 1, 0, -1], np.int32))
    d_rows, d_weights = unpermute_backward(
        gpu, gpu.array(d_out), gpu.array(token_rows), owners, gpu.array(rows), **options
    )
    assert_same_bits(gpu.numpy(d_rows)[2], d_out[0])
    assert not gpu.numpy(d_rows)[3].any()
    if weighted:
        assert gpu.numpy(d_weights)[2] == 0


def test_a_map_that_leads_out_of_the_rows_reads_nothing_there(gpu, rng):
    rows = every_kind(rng, (3, 8), np.float32)
    token_rows = np.array([[1, 3, 2**31 - 1], [0, 2, -5]], np.int32)
    out = gpu.numpy(unpermute(gpu, gpu.array(rows), gpu.array(token_rows)))
    cleaned = np.array([[1, -1, -1], [0, 2, -1]], np.int32)
    assert_same_numbers(out, reference.sum_rows(rows, cleaned))


def test_weights_beyond_their_number_count_as_zero(gpu, rng):
    problem = make_problem(rng, fitting(gpu, ODD))
    rows = ordinary(rng, (problem.plan.num_rows, 8), np.float32)
    index = problem.plan.row_to_slot.copy()
    index[0], index[1] = -1, problem.probs.size
    weights = np.append(problem.probs.reshape(-1), np.float32(0))[index]
    weights[[0, 1]] = 0
    arrays = (gpu.array(each) for each in (rows, problem.plan.token_rows, problem.probs, index))
    assert_same_numbers(gpu.numpy(unpermute(gpu, *arrays)), reference.sum_rows(rows, problem.plan.token_rows, weights))


def test_many_slots_and_many_rows_per_token(gpu, rng):
    problem = make_problem(rng, MANY_SLOTS._replace(T=2, K=20), "uniform")
    rows = every_kind(rng, (problem.plan.num_rows, 8), np.float32)
    for kind in WEIGHTS:
        check_sum(gpu, problem, rows, kind)
    check_gradients(gpu, problem, ordinary(rng, (2, 8), np.float32), ordinary(rng, rows.shape, np.float32), "by slot")
