# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Rows to expert order by Triton kernels: copies that keep every bit, whatever the dtype, the size and the address."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_moe_ops import reference
from paddle_moe_ops.triton.ops.configs import Config
from paddle_moe_ops.triton.ops.permute import permute, permute_chunk
from paddle_moe_ops.triton.ops.row_sums import row_sums, sums_of_rows
from tests.params import FLOAT8_DTYPES, PADDED, ROW_DTYPES, SMALL, WIDE
from tests.reference.cases import assert_same_bits

from .problems import LONG_ROW_SHAPES, ROW_SHAPES, every_kind, fitting, make_problem, ordinary

LONG_ROWS = list(zip(LONG_ROW_SHAPES, ROW_DTYPES, strict=False))


def check(gpu, problem, x, scale=None, *, fill="all", strided=0, offset=0):
    """Rows and scales against the oracle's; padding only where it is to be filled."""
    plan = problem.plan
    source = gpu.array(x, offset=offset)
    if strided:  # the first columns of a wider matrix
        source = gpu.columns(
            gpu.array(np.concatenate([x, x[:, :1].repeat(strided, 1)], axis=1), offset=offset), x.shape[1]
        )
    maps = gpu.array(plan.token_rows), gpu.array(plan.row_to_token)
    rows, scales = permute(gpu, source, None if scale is None else gpu.array(scale), *maps, fill)
    expected, expected_scales = reference.permute(x, plan, scale)
    real = plan.row_to_token >= 0
    kept = slice(None) if fill == "all" else real
    assert_same_bits(gpu.numpy(rows)[kept], expected[kept])
    assert (scales is None) == (scale is None)
    if scale is not None:
        kept = slice(None) if fill != "none" else real
        assert_same_bits(gpu.numpy(scales)[kept], expected_scales[kept])


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_rows_are_copies(gpu, rng, shape, dtype):
    shape = fitting(gpu, shape)
    check(gpu, make_problem(rng, shape), every_kind(rng, (shape.T, shape.H), dtype))


@pytest.mark.parametrize(("shape", "dtype"), LONG_ROWS, ids=str)
def test_long_rows_and_many_slots(gpu, rng, shape, dtype):
    shape = fitting(gpu, shape)
    check(gpu, make_problem(rng, shape), every_kind(rng, (shape.T, shape.H), dtype))


@pytest.mark.parametrize("fill", ["all", "meta", "none"])
@pytest.mark.parametrize("scales", [1, 5, 56])
def test_scales_travel_with_their_rows(gpu, rng, fill, scales):
    problem = make_problem(rng, fitting(gpu, SMALL)._replace(A=16))
    tokens = problem.shape.T
    x = every_kind(rng, (tokens, SMALL.H), FLOAT8_DTYPES[0])
    for dtype in (np.float32, np.int32):
        scale = rng.integers(-(2**31), 2**31, (tokens, scales)).astype(np.int32).view(dtype)
        check(gpu, problem, x, scale, fill=fill)


@pytest.mark.parametrize("fill", ["all", "meta", "none"])
def test_only_the_padding_that_is_asked_for_is_written(gpu, rng, fill):
    problem = make_problem(rng, fitting(gpu, PADDED))
    check(gpu, problem, every_kind(rng, (problem.shape.T, 12), np.float32), fill=fill)


@pytest.mark.parametrize("strided", [0, 1, 3, 8])
@pytest.mark.parametrize("offset", [0, 2, 4, 8])
def test_rows_may_lie_apart_and_begin_anywhere(gpu, rng, strided, offset):
    problem = make_problem(rng, fitting(gpu, SMALL))
    check(gpu, problem, every_kind(rng, (problem.shape.T, 16), np.float16), strided=strided, offset=offset)


@pytest.mark.parametrize("strided", [1, 4])
def test_scales_may_lie_apart(gpu, rng, strided):
    problem = make_problem(rng, fitting(gpu, SMALL))
    plan, tokens = problem.plan, problem.shape.T
    x, wide = every_kind(rng, (tokens, 16), FLOAT8_DTYPES[0]), every_kind(rng, (tokens, 4 + strided), np.float32)
    maps = gpu.array(plan.token_rows), gpu.array(plan.row_to_token)
    rows, scales = permute(gpu, gpu.array(x), gpu.columns(gpu.array(wide), 4), *maps, "all")
    expected, expected_scales = reference.permute(x, plan, np.ascontiguousarray(wide[:, :4]))
    assert_same_bits(gpu.numpy(rows), expected)
    assert_same_bits(gpu.numpy(scales), expected_scales)


def test_rows_beyond_a_static_buffer_do_not_move(gpu, rng):
    needed = make_problem(rng, SMALL).plan.num_rows
    problem = make_problem(rng, SMALL, buffer_size=needed // 2)
    check(gpu, problem, every_kind(rng, (SMALL.T, SMALL.H), np.float32))


@pytest.mark.parametrize("config", [(1024, 1), (2048, 2), (16384, 8)])
def test_rows_in_blocks_of_any_size(gpu, rng, config):
    problem = make_problem(rng, fitting(gpu, WIDE))
    x = every_kind(rng, (problem.shape.T, 1000), np.float32)
    maps = gpu.array(problem.plan.token_rows), gpu.array(problem.plan.row_to_token)
    rows, _ = permute(gpu, gpu.array(x), None, *maps, "all", config=Config(*config))
    assert_same_bits(gpu.numpy(rows), reference.permute(x, problem.plan)[0])


def test_a_map_that_leads_out_of_the_buffer_writes_nothing_there(gpu, rng):
    x = every_kind(rng, (3, 8), np.float32)
    slots = np.array([[5, -7], [2**31 - 1, 1], [0, 2]], np.int32)
    rows, _ = permute(gpu, gpu.array(x), None, gpu.array(slots), gpu.array(np.array([2, 1, 2], np.int32)), "none")
    assert_same_bits(gpu.numpy(rows), x[[2, 1, 2]])


@pytest.mark.parametrize("width", [1, 7, 12, 33, 130])
@pytest.mark.parametrize("by", ["slot", "row", "row with a token"])
def test_sums_made_by_a_launch_that_moves_rows_have_the_bits_of_their_own_launch(gpu, rng, by, width):
    problem = make_problem(rng, fitting(gpu, PADDED))
    plan, x = problem.plan, ordinary(rng, (problem.shape.T, problem.shape.H), "float16")
    values = rng.standard_normal((plan.num_rows, width)).astype(np.float32)
    values = gpu.array(values if width > 1 else values[:, 0])
    owners, slots = gpu.array(plan.row_to_token), gpu.array(plan.slot_to_row)
    maps = {"slot": (None, slots), "row": (None, None), "row with a token": (owners, None)}[by]
    apart, sums = row_sums(gpu, values, *maps), sums_of_rows(gpu, values, *maps)
    out, end = gpu.empty([plan.num_rows, problem.shape.H], "float16"), gpu.array(np.array([plan.num_rows], np.int32))
    arguments = (0, plan.num_rows), (0, problem.shape.H), end.data_ptr(), sums
    permute_chunk(gpu, gpu.array(x), gpu.array(plan.token_rows), owners, out, *arguments)
    assert_same_bits(gpu.numpy(out), reference.permute(x, plan)[0])
    assert_same_bits(gpu.numpy(sums.out), gpu.numpy(apart))
    found, by_row = gpu.numpy(apart), gpu.numpy(values).astype(np.float64).reshape(plan.num_rows, width).sum(1)
    due = {"slot": np.append(by_row, 0)[plan.slot_to_row], "row": by_row}.get(by, by_row * (plan.row_to_token >= 0))
    np.testing.assert_allclose(found, due, rtol=1e-5, atol=1e-5)


def test_sums_are_made_where_no_rows_are_moved(gpu):
    """A token without rows, whose slots get 0."""
    slots = gpu.array(np.full((1, 3), -1, np.int32))
    sums = sums_of_rows(gpu, gpu.empty([0, 4], "float32"), None, slots)
    x, out, none = (gpu.empty(shape, "float16") for shape in ([1, 8], [1], [1]))
    maps = slots, gpu.empty([0], "int32")
    permute_chunk(gpu, x, *maps, out, (0, 0), (0, 8), none.data_ptr(), sums)
    assert_same_bits(gpu.numpy(sums.out), np.zeros((1, 3), np.float32))
