# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The bias of grouped products by Triton kernels and its gradient, against the oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from paddle_moe_ops import reference
from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols
from paddle_moe_ops.triton.gemm.bias_gradient import bias_gradient
from paddle_moe_ops.triton.gemm.grouped_gemm import grouped_gemm
from paddle_moe_ops.triton.gemm.types import Groups

from .problems import ordinary
from .test_grouped_gemm import BY_CASE, BY_CONFIG, BY_LAYOUT, CASES, SMALL_TILES, Problem, maps_of_tokens

BFLOAT16 = ml_dtypes.bfloat16


def groups_of(gpu, case) -> Groups:
    sizes, offsets = (None if each is None else np.array(each, np.int32) for each in (case.sizes, case.offsets))
    return Groups(gpu.array(sizes), None if offsets is None else gpu.array(offsets))


def check_product(gpu, rng, case, config, transpose, dtype=BFLOAT16, **options) -> None:
    problem = Problem(rng, case, dtype, transpose, **options)
    bias = ordinary(rng, (len(case.sizes), case.outer), dtype)
    owners, weights = problem.row_to_token, problem.weights
    maps = {
        "tokens": None if owners is None else maps_of_tokens(gpu, owners, len(problem.x)),
        "weights": None if weights is None else gpu.array(weights),
    }
    operands = gpu.array(problem.x), gpu.array(problem.w), groups_of(gpu, case), transpose
    out = gpu.numpy(grouped_gemm(gpu, *operands, **maps, bias=gpu.array(bias), config=config))
    where = {"m_sizes": case.sizes, "expert_offsets": case.offsets, "transpose": transpose}
    where |= {"row_to_token": owners, "weights": weights}

    def oracle(of):
        x, w, wide = (of(each.astype(np.float64)) for each in (problem.x, problem.w, bias))
        return reference.grouped_gemm(x, w, bias=wide, **where)

    tolerance = dtype_tols(dtype, case.inner + 2)
    assert_close_sums(out, oracle(np.asarray).astype(dtype), oracle(np.abs), tolerance, what="out")
    assert not np.asarray(out, np.float32)[~case.live()].any()


@BY_LAYOUT
@BY_CASE
def test_the_bias_is_added_to_rows_of_groups_alone(gpu, rng, case, transpose):
    check_product(gpu, rng, case, SMALL_TILES, transpose)


@BY_CONFIG
@pytest.mark.parametrize("form", [{}, {"weighted": True}, {"tokens": 9}], ids=["rows", "weighted", "gathered"])
def test_however_the_product_is_cut(gpu, rng, config, form):
    check_product(gpu, rng, CASES["uneven"], config, True, np.float16, **form)


def test_the_sum_is_rounded_once(gpu):
    """The product is halfway between 1 and the next number: the bias decides, unless the product was rounded before."""
    x, w, bias = np.zeros((4, 16)), np.ones((1, 16, 16)), np.full((1, 16), 2.0**-14)
    x[:, 0], x[:, 1] = 1, 2.0**-11
    x, w, bias = (gpu.array(each.astype(np.float16)) for each in (x, w, bias))
    out = grouped_gemm(gpu, x, w, Groups(gpu.array(np.int32([4]))), bias=bias, config=SMALL_TILES)
    assert (gpu.numpy(out) == np.float16(1 + 2.0**-10)).all()


@BY_CASE
def test_gradients_follow_the_oracle(gpu, rng, monkeypatch, case):
    check_gradients(gpu, rng, case, weighted=False)
    check_gradients(gpu, rng, case, weighted=True)
    monkeypatch.setattr("paddle_moe_ops.triton.gemm.bias_gradient._MAX_BLOCK_N", 16)  # several tiles of columns
    check_gradients(gpu, rng, case, weighted=True)


def check_gradients(gpu, rng, case, *, weighted) -> None:
    problem = Problem(rng, case, BFLOAT16, True, weighted=weighted)
    bias = ordinary(rng, (len(case.sizes), case.outer), BFLOAT16)
    live = case.live()
    before = np.where(live, rng.standard_normal(case.num_rows), 0).astype(np.float32) if weighted else None
    given = (None if each is None else gpu.array(each) for each in (problem.weights, before))
    made = bias_gradient(gpu, gpu.array(problem.d_out), gpu.array(bias), groups_of(gpu, case), *given)
    d_out = np.where(live[:, None], problem.d_out.astype(np.float64), 0)
    factors = np.where(live, 1.0 if problem.weights is None else problem.weights, 0)
    starts = case.offsets or np.cumsum([0, *case.sizes])
    experts = np.full(case.num_rows, 0)
    for expert, (start, size) in enumerate(zip(starts, case.sizes, strict=False)):
        experts[start : start + size] = expert

    def due(of):
        sums = np.zeros(bias.shape)
        np.add.at(sums, experts, of(d_out * factors[:, None]))
        dots = (of(d_out) * of(bias.astype(np.float64))[experts]).sum(axis=1)
        return sums, (dots + of(np.zeros(case.num_rows) if before is None else before)) * live

    (d_bias, d_weights), (of_bias, of_weights) = due(np.asarray), due(np.abs)
    tolerance = dtype_tols(BFLOAT16, max(case.sizes) + 1)
    assert_close_sums(gpu.numpy(made[0]), d_bias.astype(BFLOAT16), of_bias, tolerance, what="d_bias")
    assert (made[1] is not None) == weighted
    if weighted:
        got, tolerance = gpu.numpy(made[1]), dtype_tols(np.float32, case.outer + 2)
        assert_close_sums(got, d_weights.astype(np.float32), of_weights, tolerance, what="d_weights")
        assert not got[~live].any()
