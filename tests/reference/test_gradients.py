# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients against finite differences.

The functions get float64 and then compute in float64 throughout. Every output is linear in each single input,
so a central difference with any step is exact but for rounding, and the tolerance can be tight.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.reference import (
    Plan,
    grouped_gemm,
    grouped_gemm_backward,
    moe_permute,
    moe_permute_backward,
    moe_unpermute,
    moe_unpermute_backward,
    permute,
    permute_backward,
    plan_to_rowmap,
    route,
    route_backward,
    unpermute,
    unpermute_backward,
)

HIDDEN = 3
IDS = np.array([[2, 0, -1], [0, 3, 1], [-1, -1, -1], [3, -1, -1], [1, 2, 3], [9, 0, 3]], np.int32)
WITH_DUPLICATES = np.array([[2, 2, 0], [0, 0, 0], [3, 1, 3], [-1, 1, 1]], np.int32)
ROUTINGS = {
    "plain": (IDS, {"num_experts": 4}),
    "padded": (IDS, {"num_experts": 4, "padding_alignment": 4}),
    "buffer too small": (IDS, {"num_experts": 4, "padding_alignment": 2, "buffer_size": 9}),
    "first duplicate": (WITH_DUPLICATES, {"num_experts": 4}),
    "each duplicate": (WITH_DUPLICATES, {"num_experts": 4, "duplicates": "each"}),
    "mask": (np.array([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]], bool), {"topk": 2}),
}


@pytest.fixture(params=ROUTINGS)
def routing(request: pytest.FixtureRequest) -> tuple[NDArray, dict]:
    return ROUTINGS[request.param]


def random(*shape: int) -> NDArray:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape)


def difference_quotient(loss: Callable[[NDArray], float], at: NDArray) -> NDArray:
    gradient = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[place] = 0.5
        gradient[place] = loss(at + step) - loss(at - step)
    return gradient


def assert_gradient(actual: NDArray, loss: Callable[[NDArray], float], at: NDArray) -> None:
    assert (actual.dtype, actual.shape) == (np.float64, at.shape)
    np.testing.assert_allclose(actual, difference_quotient(loss, at), rtol=1e-12, atol=1e-12)


def make_plan(routing: tuple[NDArray, dict], probs: NDArray | None = None) -> Plan:
    ids, arguments = routing
    return route(ids, probs, **arguments, validate=False)


def test_permute(routing) -> None:
    plan = make_plan(routing)
    d_rows = random(plan.num_rows, HIDDEN)
    x = random(plan.num_tokens, HIDDEN)
    assert_gradient(permute_backward(d_rows, plan), lambda x: np.vdot(d_rows, permute(x, plan)[0]), x)


def test_route_probabilities(routing) -> None:
    plan = make_plan(routing)
    d_row_probs = random(plan.num_rows)
    mask_experts = plan.num_experts if routing[0].dtype == bool else None

    def loss(probs: NDArray) -> float:
        return np.vdot(d_row_probs, make_plan(routing, probs).row_probs)

    actual = route_backward(d_row_probs, plan, mask_experts=mask_experts)
    assert_gradient(actual, loss, random(*routing[0].shape))


@pytest.mark.parametrize("weights", ["none", "by row", "by slot"])
def test_unpermute(routing, weights: str) -> None:
    plan = make_plan(routing)
    y, d_out = random(plan.num_rows, HIDDEN), random(plan.num_tokens, HIDDEN)
    shape = (plan.num_rows,) if weights == "by row" else (plan.num_tokens, plan.topk)
    probs = None if weights == "none" else random(*shape)
    d_y, d_probs = unpermute_backward(d_out, plan, y, probs)
    assert_gradient(d_y, lambda y: np.vdot(d_out, unpermute(y, plan, probs)), y)
    if probs is None:
        assert d_probs is None
    else:
        assert_gradient(d_probs, lambda probs: np.vdot(d_out, unpermute(y, plan, probs)), probs)


@pytest.mark.parametrize("ids", [IDS, WITH_DUPLICATES], ids=["plain", "duplicates"])
@pytest.mark.parametrize("buffer_size", [-1, 6], ids=["padded", "buffer too small"])
def test_moe_permute(ids: NDArray, buffer_size: int) -> None:
    arguments = {"override_buffer_size": buffer_size, "validate": False}
    x, probs = random(len(ids), HIDDEN), random(*ids.shape)
    rows, _, token_prob, _ = moe_permute(x, None, ids, probs, 4, None, 2, **arguments)
    d_rows, d_token_prob = random(*rows.shape), random(*token_prob.shape)

    def loss(x: NDArray, probs: NDArray) -> float:
        rows, _, token_prob, _ = moe_permute(x, None, ids, probs, 4, None, 2, **arguments)
        return np.vdot(d_rows, rows) + np.vdot(d_token_prob, token_prob)

    plan = route(ids, probs, num_experts=4, padding_alignment=2, buffer_size=buffer_size, validate=False)
    d_x, d_probs = moe_permute_backward(d_rows, d_token_prob, plan)
    assert_gradient(d_x, lambda x: loss(x, probs), x)
    assert_gradient(d_probs, lambda probs: loss(x, probs), probs)
    assert moe_permute_backward(None, d_token_prob, plan)[0] is None
    assert moe_permute_backward(d_rows, None, plan)[1] is None


@pytest.mark.parametrize("ids", [IDS, WITH_DUPLICATES], ids=["plain", "duplicates"])
@pytest.mark.parametrize("compat", [None, "paddle"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain sum", "weighted"])
@pytest.mark.parametrize("bad_rowmap", [False, True], ids=["good map", "bad map"])
@pytest.mark.parametrize("as_column", [False, True], ids=["[N]", "[N, 1]"])
def test_moe_unpermute(ids: NDArray, compat: str | None, weighted: bool, bad_rowmap: bool, as_column: bool) -> None:
    plan = route(ids, num_experts=4, padding_alignment=2, validate=False)
    rowmap = plan_to_rowmap(plan)
    if bad_rowmap:
        rowmap[0, 1], rowmap[1, 2], rowmap[3, 0] = rowmap[0, 0], -7, plan.num_rows
    y, d_hidden, d_prob = random(plan.num_rows, HIDDEN), random(len(ids), HIDDEN), random(*ids.shape)
    probs = random(plan.num_rows, 1) if as_column else random(plan.num_rows)

    def loss(y: NDArray, probs: NDArray, d_prob: NDArray = d_prob) -> float:
        hidden, prob = moe_unpermute(y, rowmap, ids, probs, len(ids), 4, True, weighted, compat=compat, validate=False)
        return np.vdot(d_hidden, hidden) + np.vdot(d_prob, prob)

    arguments = {"using_weighted_combine": weighted, "compat": compat}
    d_y, d_token_prob = moe_unpermute_backward(d_hidden, d_prob, y, rowmap, ids, probs, **arguments)
    assert_gradient(d_y, lambda y: loss(y, probs), y)
    assert_gradient(d_token_prob, lambda probs: loss(y, probs), probs)
    _, without = moe_unpermute_backward(d_hidden, None, y, rowmap, ids, probs, **arguments)
    assert_gradient(without, lambda probs: loss(y, probs, np.zeros_like(d_prob)), probs)


@pytest.mark.parametrize("transpose", [True, False])
def test_grouped_gemm(transpose: bool) -> None:
    """With an expert without rows, and rows before, between and after the groups."""
    x, w = random(9, 2), random(*((3, HIDDEN, 2) if transpose else (3, 2, HIDDEN)))
    d_out = random(9, HIDDEN)

    def loss(x: NDArray, w: NDArray) -> float:
        return float(np.vdot(d_out, grouped_gemm(x, w, [2, 0, 3], transpose, expert_offsets=[1, 4, 4, 8])))

    d_x, d_w = grouped_gemm_backward(d_out, x, w, [2, 0, 3], transpose, expert_offsets=[1, 4, 4, 8])
    assert_gradient(d_x, lambda x: loss(x, w), x)
    assert_gradient(d_w, lambda w: loss(x, w), w)


@pytest.mark.parametrize("transpose", [True, False])
def test_weighted_grouped_gemm(transpose: bool) -> None:
    x, w, weights = random(9, 2), random(*((3, HIDDEN, 2) if transpose else (3, 2, HIDDEN))), random(9)
    d_out, where = random(9, HIDDEN), {"transpose": transpose, "expert_offsets": [1, 4, 4, 8]}

    def loss(x: NDArray, w: NDArray, weights: NDArray) -> float:
        return float(np.vdot(d_out, grouped_gemm(x, w, [2, 0, 3], weights=weights, **where)))

    d_x, d_w, d_weights = grouped_gemm_backward(d_out, x, w, [2, 0, 3], weights=weights, **where)
    assert_gradient(d_x, lambda x: loss(x, w, weights), x)
    assert_gradient(d_w, lambda w: loss(x, w, weights), w)
    assert_gradient(d_weights, lambda weights: loss(x, w, weights), weights)


def test_grouped_gemm_of_gathered_rows() -> None:
    x, w, d_out = random(4, 2), random(2, HIDDEN, 2), random(5, HIDDEN)
    row_to_token = np.int32([3, 0, -1, 3, 1])
    where = {"m_sizes": [2, 2], "expert_offsets": [0, 3, 5], "row_to_token": row_to_token}

    def loss(x: NDArray, w: NDArray) -> float:
        return float(np.vdot(d_out, grouped_gemm(x, w, **where)))

    d_rows, d_w = grouped_gemm_backward(d_out, x, w, **where)
    assert not d_rows[2].any()
    d_x = np.zeros_like(x)
    np.add.at(d_x, row_to_token[row_to_token >= 0], d_rows[row_to_token >= 0])
    assert_gradient(d_x, lambda x: loss(x, w), x)
    assert_gradient(d_w, lambda w: loss(x, w), w)
