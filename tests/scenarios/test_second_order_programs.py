# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients, as gradient penalties need them: right for linear operators, refused by the others."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from .models import loss_of
from .operations import FLOAT8_EXPERTS, OPERATIONS, make_inputs
from .test_backward_passes import right_or_refused

# The others, except calculate_topk, multiply their input by weights that have a gradient too.
LINEAR = (
    *("moe_permute", "moe_unpermute", "route", "route_mask", "permute", "unpermute", "sort_chunks"),
    *("permute_with_mask_map", "sort_chunks_by_map", "token_dispatch", "indexed.permute", "indexed.unpermute"),
)


def first_gradients(operation, inputs, *, create_graph):
    """First gradients of a loss that is quadratic in the outputs."""
    outputs = [output * output for output in operation.call(inputs)]
    return paddle.grad([loss_of(outputs)], [inputs[name] for name in operation.floats], create_graph=create_graph)


def directions_of(operation, leaves):
    rng = np.random.default_rng(9)
    return {name: rng.standard_normal(leaves[name].shape, np.float32) for name in operation.floats}


def by_differences(operation, place, step=1 / 32):
    """The second derivative along the directions: how far first gradients change from one side to the other."""

    def at(factor):
        inputs, leaves = make_inputs(place)
        for name, direction in directions_of(operation, leaves).items():
            inputs[name] = leaves[name].detach() + factor * step * paddle.to_tensor(direction)
            inputs[name].stop_gradient = False
        return [gradient.numpy() for gradient in first_gradients(operation, inputs, create_graph=False)]

    sides = zip(at(1), at(-1), strict=True)
    return {name: (above - below) / (2 * step) for name, (above, below) in zip(operation.floats, sides, strict=True)}


def check_second_order(operation, place):
    inputs, leaves = make_inputs(place)
    gradients = first_gradients(operation, inputs, create_graph=True)
    directions = directions_of(operation, leaves).values()
    along = sum(
        (gradient * paddle.to_tensor(direction)).sum()
        for gradient, direction in zip(gradients, directions, strict=True)
    )
    assert not along.stop_gradient, "the first gradients depend on nothing"
    along.backward()
    for name, expected in by_differences(operation, place).items():
        assert leaves[name].grad is not None, f"{name} has no second gradient"
        got = leaves[name].grad.numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.02 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.name in LINEAR], ids=str)
def test_linear_operators_have_gradients_of_gradients(operation, place, backend):
    check_second_order(operation, place)


NOT_TWICE = "calculate_topk", "moe_mlp"  # the second for Paddle's swiglu, which is not differentiable twice


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.name not in NOT_TWICE], ids=str)
@pytest.mark.compiled_only
def test_compiled_operators_have_gradients_of_gradients(operation, place):
    check_second_order(operation, place)


@pytest.mark.parametrize("operation", [*OPERATIONS, FLOAT8_EXPERTS], ids=str)
def test_gradients_of_gradients_are_right_or_refused(operation, place, backend):
    with right_or_refused("second|higher order"):
        check_second_order(operation, place)
