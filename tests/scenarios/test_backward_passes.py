# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks, changes in place, several backward passes and gradients of some inputs alone, for every function."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops.testing.equality import assert_bits_equal

from ..pairwise import pairwise
from .operations import FLOAT8_EXPERTS, OPERATIONS, loss_of, make_inputs

ALL = pytest.mark.parametrize("operation", [*OPERATIONS, FLOAT8_EXPERTS], ids=str)


def gradients(operation, place, before_backward=lambda inputs: None, graphs=False):
    inputs, leaves = make_inputs(place, graphs=graphs)
    loss = loss_of(operation.call(inputs))
    before_backward(inputs)
    loss.backward()
    return {name: leaves[name].grad for name in operation.floats}


@ALL
def test_a_hook_on_each_input_sees_its_gradient_once(operation, place, backend):
    expected = gradients(operation, place)
    inputs, leaves = make_inputs(place)
    seen = {name: [] for name in operation.floats}
    for name in operation.floats:
        inputs[name].register_hook(seen[name].append)
    loss_of(operation.call(inputs)).backward()
    for name in operation.floats:
        assert len(seen[name]) == 1
        assert_bits_equal(seen[name][0], expected[name], what=name)
        assert_bits_equal(leaves[name].grad, expected[name], what=name)


@pytest.mark.sampled(2, 1)
@ALL
def test_what_a_hook_returns_goes_on(operation, place, backend):
    expected = gradients(operation, place)
    inputs, leaves = make_inputs(place)
    for name in operation.floats:
        inputs[name].register_hook(lambda gradient: 2 * gradient)
    loss_of(operation.call(inputs)).backward()
    for name in operation.floats:
        assert_bits_equal(leaves[name].grad, 2 * expected[name], what=name)


@contextlib.contextmanager
def right_or_refused(text):
    """Either the block runs, and its assertions hold, or it raises an error with a text like this.

    An error of Python in a backward pass arrives as an OSError that contains the text.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        if not re.search(text, str(error)):
            raise


def add_one(tensor):
    tensor.add_(paddle.ones_like(tensor))


def turn_around(tensor):
    """Every value stays a valid one."""
    tensor[:] = tensor.flip(0)


@pytest.mark.sampled(2)
@pairwise(
    {
        "operation": [*OPERATIONS, FLOAT8_EXPERTS],
        "change": [add_one, turn_around],
        "graphs": {"constants": False, "graphs": True},
    }
)
def test_an_input_changed_before_its_gradient_raises_or_has_no_effect(operation, change, graphs, place, backend):
    expected = gradients(operation, place)

    def check_change_of(name):
        def change_input(inputs):
            with paddle.no_grad():
                change(inputs[name])

        with right_or_refused("in place|inplace"):
            for each, got in gradients(operation, place, change_input, graphs).items():
                assert_bits_equal(got, expected[each], what=f"the gradient of {each} after a change of {name}")

    for name in (*operation.floats, *operation.others):
        check_change_of(name)


def check_second_backward(operation, place):
    inputs, leaves = make_inputs(place)
    loss = loss_of(operation.call(inputs))
    loss.backward(retain_graph=True)
    loss.backward()
    for name, once in gradients(operation, place).items():
        assert_bits_equal(leaves[name].grad, 2 * once, what=name)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
@pytest.mark.compiled_only
def test_two_backward_passes_add_up(operation, place):
    check_second_backward(operation, place)


@ALL
def test_a_second_backward_pass_is_right_or_says_that_it_cannot_be(operation, place, backend):
    with right_or_refused("retain_graph"):
        check_second_backward(operation, place)


@pytest.mark.sampled(2, 1)
@ALL
def test_two_losses_of_one_forward_pass(operation, place, backend):
    """Their backward passes would need a retained graph; here they run as one."""
    inputs, leaves = make_inputs(place)
    outputs = operation.call(inputs)
    paddle.autograd.backward([loss_of(outputs), 2 * loss_of(outputs)])
    for name, once in gradients(operation, place).items():
        due = 3 * once.numpy()
        np.testing.assert_allclose(leaves[name].grad.numpy(), due, rtol=0, atol=1e-6 * np.abs(due).max())


def check_each_input_alone(operation, place):
    expected = gradients(operation, place)
    for name in operation.floats:
        inputs, leaves = make_inputs(place)
        (got,) = paddle.grad([loss_of(operation.call(inputs))], [inputs[name]])
        assert_bits_equal(got, expected[name], what=name)
        assert leaves[name].grad is None


def check_an_input_that_was_not_used(operation, place):
    inputs, leaves = make_inputs(place)
    name = operation.floats[0]
    stranger = next(each for each in leaves if each not in operation.floats)
    loss = loss_of(operation.call(inputs))
    got, unused = paddle.grad([loss], [inputs[name], inputs[stranger]], allow_unused=True)
    assert_bits_equal(got, gradients(operation, place)[name], what=name)
    assert unused is None


def check_no_grad_vars(operation, place):
    expected = gradients(operation, place)
    *kept, last = operation.floats
    inputs, leaves = make_inputs(place)
    wanted = [leaves[name] for name in kept] or [leaves[last]]
    shut = [inputs[last]] if kept else []
    got = paddle.grad([loss_of(operation.call(inputs))], wanted, no_grad_vars=shut)
    for name, gradient in zip(kept or [last], got, strict=True):
        assert_bits_equal(gradient, expected[name], what=name)


CHECKS_OF_SOME_INPUTS = (check_each_input_alone, check_an_input_that_was_not_used, check_no_grad_vars)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
@pytest.mark.compiled_only
def test_paddle_grad_of_some_inputs(operation, place):
    for check in CHECKS_OF_SOME_INPUTS:
        check(operation, place)


@pytest.mark.sampled(2)
@ALL
def test_paddle_grad_of_some_inputs_is_right_or_refused(operation, place, backend):
    """Paddle lets no PyLayer leave out the gradient of an input that paddle.grad was not asked for."""
    for check in CHECKS_OF_SOME_INPUTS:
        with right_or_refused("should return None"):
            check(operation, place)


def strided(tensor):
    """The same values as a view whose rows do not follow each other."""
    return paddle.concat([tensor, tensor], axis=-1)[..., : tensor.shape[-1]] if tensor.ndim > 1 else tensor


@pytest.mark.sampled(2)
@ALL
def test_recompute_of_strided_inputs(operation, place, backend):
    check_recompute_of_strided_inputs(operation, True, place)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
@pytest.mark.compiled_only
def test_recompute_of_strided_inputs_by_hooks(operation, place):
    check_recompute_of_strided_inputs(operation, False, place)


def check_recompute_of_strided_inputs(operation, use_reentrant, place):
    inputs, leaves = make_inputs(place)

    def call(*floats):
        given = {name: strided(value) for name, value in zip(operation.floats, floats, strict=True)}
        return operation.call({**inputs, **given})

    outputs = recompute(call, *(inputs[name] for name in operation.floats), use_reentrant=use_reentrant)
    loss_of(outputs).backward()
    for name, expected in gradients(operation, place).items():
        assert_bits_equal(leaves[name].grad, expected, what=name)
