# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients against finite differences of the operators themselves, without the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_moe_ops import indexed, moe_permute, moe_unpermute, permute, reference, route, unpermute
from paddle_moe_ops.gemm import grouped_gemm
from tests.ops.problems import backward, ordinary, tensor

IDS = np.array([[2, 0, -1], [0, 3, 1], [-1, -1, -1], [3, -1, -1], [1, 2, 3]], np.int32)
H = 3


def difference_quotient(loss, at):
    """Central differences. Every loss here is linear in each single input, so the step costs no accuracy."""
    quotient = np.zeros(at.shape)
    for index in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[index] = 0.5
        quotient[index] = loss(at + step) - loss(at - step)
    return quotient


def assert_gradient(actual, loss, at):
    # An input reaches at most H = 3 outputs of size 10 or less, each rounded once to float32 on either side of the
    # difference: 2 * 3 * 10 * 2**-24 is below 1e-5.
    np.testing.assert_allclose(actual.numpy(), difference_quotient(loss, at), rtol=0, atol=1e-5)


def dot(gradient, output):
    return float(np.vdot(gradient.astype(np.float64), output.numpy().astype(np.float64)))


def test_permute_against_finite_differences(rng, place, backend):
    plan = route(tensor(IDS, place), num_experts=4, padding_alignment=2)
    x, d_rows = ordinary(rng, (5, H)), ordinary(rng, (plan.num_rows, H))
    x_tensor = tensor(x, place, gradient=True)
    backward([permute(x_tensor, plan)[0]], [d_rows])
    assert_gradient(x_tensor.grad, lambda x: dot(d_rows, permute(tensor(x, place), plan)[0]), x)


@pytest.mark.parametrize("by_slot", [False, True], ids=["by row", "by slot"])
def test_unpermute_against_finite_differences(by_slot, rng, place, backend):
    plan = route(tensor(IDS, place), num_experts=4, padding_alignment=2)
    y, d_out = ordinary(rng, (plan.num_rows, H)), ordinary(rng, (5, H))
    probs = ordinary(rng, IDS.shape if by_slot else (plan.num_rows,))

    def loss(y, probs):
        return dot(d_out, unpermute(tensor(y, place), plan, tensor(probs, place)))

    y_tensor, probs_tensor = tensor(y, place, gradient=True), tensor(probs, place, gradient=True)
    backward([unpermute(y_tensor, plan, probs_tensor)], [d_out])
    assert_gradient(y_tensor.grad, lambda y: loss(y, probs), y)
    assert_gradient(probs_tensor.grad, lambda probs: loss(y, probs), probs)


@pytest.mark.parametrize("is_mask", [False, True], ids=["ids", "mask"])
def test_route_against_finite_differences(is_mask, rng, place, backend):
    routing = rng.random((5, 4)) < 0.5 if is_mask else IDS

    def row_probs(probs):
        return route(tensor(routing, place), probs, num_experts=4, padding_alignment=2).row_probs

    probs = ordinary(rng, routing.shape)
    probs_tensor = tensor(probs, place, gradient=True)
    output = row_probs(probs_tensor)
    d_row_probs = ordinary(rng, tuple(output.shape))
    backward([output], [d_row_probs])
    assert_gradient(probs_tensor.grad, lambda probs: dot(d_row_probs, row_probs(tensor(probs, place))), probs)


def test_moe_permute_against_finite_differences(rng, place, backend):
    def outputs(x, probs):
        rows, _, row_probs, _ = moe_permute(x, None, tensor(IDS, place), probs, 4, None, 2)
        return rows, row_probs

    def loss(x, probs):
        rows, row_probs = outputs(tensor(x, place), tensor(probs, place))
        return dot(d_rows, rows) + dot(d_row_probs, row_probs)

    x, probs = ordinary(rng, (5, H)), ordinary(rng, IDS.shape)
    x_tensor, probs_tensor = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
    both = outputs(x_tensor, probs_tensor)
    d_rows, d_row_probs = (ordinary(rng, tuple(output.shape)) for output in both)
    backward(both, [d_rows, d_row_probs])
    assert_gradient(x_tensor.grad, lambda x: loss(x, probs), x)
    assert_gradient(probs_tensor.grad, lambda probs: loss(x, probs), probs)


@pytest.mark.parametrize("compat", [None, "paddle"], ids=["ours", "compat"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_moe_unpermute_against_finite_differences(weighted, compat, rng, place, backend):
    plan = reference.route(IDS, num_experts=4, padding_alignment=2)
    maps = tensor(reference.plan_to_rowmap(plan), place), tensor(IDS, place)
    options = {"using_weighted_combine": weighted, "compat": compat}
    y, probs = ordinary(rng, (plan.num_rows, H)), ordinary(rng, (plan.num_rows,))
    d_hidden, d_prob = ordinary(rng, (5, H)), ordinary(rng, IDS.shape)

    def loss(y, probs):
        hidden, prob = moe_unpermute(tensor(y, place), *maps, tensor(probs, place), 5, 4, **options)
        return dot(d_hidden, hidden) + dot(d_prob, prob)

    y_tensor, probs_tensor = tensor(y, place, gradient=True), tensor(probs, place, gradient=True)
    backward(moe_unpermute(y_tensor, *maps, probs_tensor, 5, 4, **options), [d_hidden, d_prob])
    assert_gradient(y_tensor.grad, lambda y: loss(y, probs), y)
    assert_gradient(probs_tensor.grad, lambda probs: loss(y, probs), probs)


def test_gradients_add_up_over_a_whole_layer(rng, place, backend):
    """Route, permute, a linear expert, weighted unpermute: the chain rule through four operators at once."""
    ids, x, probs = IDS, ordinary(rng, (5, H)), ordinary(rng, IDS.shape)

    def layer(x, probs):
        plan = route(tensor(ids, place), probs, num_experts=4, padding_alignment=2)
        rows, _ = permute(x, plan)
        return unpermute(rows * 2.0, plan, plan.row_probs)

    d_out = ordinary(rng, (5, H))
    x_tensor, probs_tensor = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
    backward([layer(x_tensor, probs_tensor)], [d_out])
    assert_gradient(x_tensor.grad, lambda x: dot(d_out, layer(tensor(x, place), tensor(probs, place))), x)
    assert_gradient(probs_tensor.grad, lambda probs: dot(d_out, layer(tensor(x, place), tensor(probs, place))), probs)


def test_permute_by_gather_indices_against_finite_differences(rng, place, backend):
    x, gather, d_rows = ordinary(rng, (4, H)), tensor(rng.permutation(8), place), ordinary(rng, (8, H))
    x_tensor = tensor(x, place, gradient=True)
    backward([indexed.permute(x_tensor, gather, 2)], [d_rows])
    assert_gradient(x_tensor.grad, lambda x: dot(d_rows, indexed.permute(tensor(x, place), gather, 2)), x)


@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
def test_grouped_gemm_against_finite_differences(transpose, rng, place):
    """With an expert without rows, and rows before, between and after the groups."""
    x, w = ordinary(rng, (6, 2)), ordinary(rng, (3, H, 2) if transpose else (3, 2, H))
    d_out = ordinary(rng, (6, H))

    def product(x, w):
        return grouped_gemm(x, w, [2, 0, 1], transpose, expert_offsets=[1, 3, 4, 6])

    def loss(x, w):
        return dot(d_out, product(tensor(x, place), tensor(w, place)))

    x_tensor, w_tensor = tensor(x, place, gradient=True), tensor(w, place, gradient=True)
    backward([product(x_tensor, w_tensor)], [d_out])
    assert_gradient(x_tensor.grad, lambda x: loss(x, w), x)
    assert_gradient(w_tensor.grad, lambda w: loss(x, w), w)


def test_weighted_grouped_gemm_against_finite_differences(rng, place):
    x, w, weights = ordinary(rng, (6, 2)), ordinary(rng, (3, H, 2)), ordinary(rng, (6,))
    d_out = ordinary(rng, (6, H))

    def product(x, w, weights):
        return grouped_gemm(x, w, [2, 0, 1], expert_offsets=[1, 3, 4, 6], topk_weights=weights)

    def loss(*arrays):
        return dot(d_out, product(*(tensor(each, place) for each in arrays)))

    leaves = [tensor(each, place, gradient=True) for each in (x, w, weights)]
    backward([product(*leaves)], [d_out])
    assert_gradient(leaves[0].grad, lambda x: loss(x, w, weights), x)
    assert_gradient(leaves[1].grad, lambda w: loss(x, w, weights), w)
    assert_gradient(leaves[2].grad, lambda weights: loss(x, w, weights), weights)
