# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""permute: rows are copies, bit for bit, and padding holds what fill_padding says."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paddle_moe_ops import permute, reference
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.routing import GENERATORS
from tests.ops.problems import (
    SEEDS,
    Routing,
    every_kind,
    make_problem,
    optional_tensor,
    plan_tensors,
    routings,
    tensor,
)
from tests.params import HIDDEN_SIZES, ROW_DTYPES, SHAPES, SMALL


def draw_scale(rng: np.random.Generator, kind: str, num_tokens: int, num_scales: int) -> NDArray | None:
    """Scales in float32, the bits of any int32 (four packed exponents), or any bytes (exponents)."""
    if kind == "no scale":
        return None
    if kind == "uint8 scale":
        return rng.integers(0, 256, (num_tokens, num_scales), np.uint8)
    scale = every_kind(rng, (num_tokens, num_scales), np.float32)
    return scale.view(np.int32) if kind == "int32 scale" else scale


scale_kinds = st.sampled_from(["no scale", "float32 scale", "int32 scale", "uint8 scale"])


@given(
    case=routings(),
    dtype=st.sampled_from(ROW_DTYPES),
    hidden=st.sampled_from([1, 7, 72, 200]),
    scale_kind=scale_kinds,
    num_scales=st.integers(1, 5),
    seed=SEEDS,
)
@settings(max_examples=120)
def test_rows_and_scales_equal_the_oracle(case: Routing, dtype, hidden, scale_kind, num_scales, seed, place):
    rng = np.random.default_rng(seed)
    plan = case.oracle()
    x = every_kind(rng, (plan.num_tokens, hidden), dtype)
    scale = draw_scale(rng, scale_kind, plan.num_tokens, num_scales)
    rows, scales = permute(tensor(x, place), plan_tensors(plan, place), optional_tensor(scale, place))
    expected_rows, expected_scales = reference.permute(x, plan, scale)
    assert_bits_equal(rows, expected_rows, what="rows")
    if scale is None:
        assert scales is None
    else:
        assert_bits_equal(scales, expected_scales, what="scales")


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_rows_of_every_width_and_dtype(hidden, dtype, rng, place):
    problem = make_problem(rng, SMALL._replace(H=hidden, A=16), dtype)
    plan = problem.plan()
    rows, _ = permute(tensor(problem.x, place), plan_tensors(plan, place))
    assert_bits_equal(rows, reference.permute(problem.x, plan)[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("routing", ["all_to_one", "zipf", "all_unassigned", "expert_parallel_sparse"])
def test_rows_of_named_shapes(shape, routing, rng, place):
    problem = make_problem(rng, shape, ROW_DTYPES[2], routing)
    plan = problem.plan()
    scale = draw_scale(rng, "float32 scale", shape.T, 3)
    rows, scales = permute(tensor(problem.x, place), plan_tensors(plan, place), tensor(scale, place))
    expected_rows, expected_scales = reference.permute(problem.x, plan, scale)
    assert_bits_equal(rows, expected_rows, what="rows")
    assert_bits_equal(scales, expected_scales, what="scales")


@pytest.mark.parametrize("buffer_size", [-1, 31, 90], ids=["padded", "too small", "too large"])
@pytest.mark.parametrize("fill_padding", ["all", "meta", "none"])
def test_padding_holds_what_was_asked_for(fill_padding, buffer_size, rng, place, backend):
    problem = make_problem(rng, SMALL._replace(A=16))
    plan = problem.plan(buffer_size=buffer_size)
    scale = draw_scale(rng, "int32 scale", SMALL.T, 2)
    rows, scales = permute(
        tensor(problem.x, place), plan_tensors(plan, place), tensor(scale, place), fill_padding=fill_padding
    )
    expected_rows, expected_scales = reference.permute(problem.x, plan, scale)
    defined = np.arange(plan.num_rows) if fill_padding == "all" else np.flatnonzero(plan.row_to_token >= 0)
    defined_scales = np.flatnonzero(plan.row_to_token >= 0) if fill_padding == "none" else np.arange(plan.num_rows)
    assert len(defined) > 0
    assert rows.shape == list(expected_rows.shape)
    assert scales.shape == list(expected_scales.shape)
    assert_bits_equal(rows.numpy()[defined], expected_rows[defined], what="rows")
    assert_bits_equal(scales.numpy()[defined_scales], expected_scales[defined_scales], what="scales")


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("routing", GENERATORS)
def test_both_backends_give_the_same(routing, dtype, rng, place, backend):
    problem = make_problem(rng, SMALL, dtype, routing)
    plan = problem.plan()
    rows, _ = permute(tensor(problem.x, place), plan_tensors(plan, place))
    assert_bits_equal(rows, reference.permute(problem.x, plan)[0])


def test_plan_of_a_mask_moves_rows_like_a_plan_of_ids(place):
    mask = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], np.bool_)
    plan = reference.route(mask)
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    rows, _ = permute(tensor(x, place), plan_tensors(plan, place))
    np.testing.assert_array_equal(rows.numpy(), x[[0, 2, 0, 2]])
    assert rows.dtype == paddle.float32
