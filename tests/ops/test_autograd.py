# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of the operators in Paddle's autograd: for which tensors, when, and on which backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import (
    dequantize_1x128,
    moe_permute,
    moe_unpermute,
    permute,
    quantized_experts,
    reference,
    route,
    sort_chunks,
    unpermute,
)
from paddle_moe_ops.routing import calculate_topk
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import make_problem, ordinary, plan_tensors, tensor
from tests.params import FLOAT8_DTYPES, SMALL


class Operator(NamedTuple):
    """An operator as a function of its differentiable inputs."""

    inputs: tuple[np.ndarray, ...]
    call: Callable[..., tuple[paddle.Tensor, ...]]


def operators(place: Any) -> dict[str, Operator]:
    rng = np.random.default_rng(5)
    problem = make_problem(rng, SMALL)
    plan = problem.plan()
    plan_of_tensors = plan_tensors(plan, place)
    ids, rowmap = tensor(problem.ids, place), tensor(reference.plan_to_rowmap(plan), place)
    y = ordinary(rng, (plan.num_rows, SMALL.H))

    def permuted(x, probs):
        outputs = moe_permute(x, None, ids, probs, SMALL.E, None, SMALL.A)
        return outputs[0], outputs[2]

    def unpermuted(weighted):
        def call(y, probs):
            return moe_unpermute(y, rowmap, ids, probs, SMALL.T, SMALL.E, using_weighted_combine=weighted)

        return call

    return {
        "route": Operator((problem.probs,), lambda p: (route(ids, p, **problem.route_arguments).row_probs,)),
        "permute": Operator((problem.x,), lambda x: (permute(x, plan_of_tensors)[0],)),
        "unpermute": Operator((y,), lambda y: (unpermute(y, plan_of_tensors),)),
        "unpermute-by-row": Operator((y, plan.row_probs), lambda y, p: (unpermute(y, plan_of_tensors, p),)),
        "unpermute-by-slot": Operator((y, problem.probs), lambda y, p: (unpermute(y, plan_of_tensors, p),)),
        "moe_permute": Operator((problem.x, problem.probs), permuted),
        "moe_unpermute": Operator((y, plan.row_probs), unpermuted(weighted=False)),
        "moe_unpermute-weighted": Operator((y, plan.row_probs), unpermuted(weighted=True)),
    }


ALL = [*operators("cpu")]
WITH_TWO_INPUTS = [name for name, operator in operators("cpu").items() if len(operator.inputs) == 2]
WITH_TWO_OUTPUTS = ["moe_permute", "moe_unpermute", "moe_unpermute-weighted"]


@pytest.fixture
def operator(request, place) -> Operator:
    return operators(place)[request.param]


def leaves(operator, place, wanted=(True, True)):
    return [tensor(array, place, gradient=want) for array, want in zip(operator.inputs, wanted, strict=False)]


def loss_of(outputs) -> paddle.Tensor:
    """A scalar in which every element of every output counts differently."""
    return sum((output * paddle.linspace(0.5, 1.5, output.size).reshape(output.shape)).sum() for output in outputs)


def gradients(operator, place, wanted=(True, True), use=slice(None)):
    inputs = leaves(operator, place, wanted)
    loss_of(operator.call(*inputs)[use]).backward()
    return [leaf.grad for leaf in inputs]


@pytest.mark.parametrize("operator", WITH_TWO_INPUTS, indirect=True)
@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["rows only", "probabilities only"])
def test_a_single_wanted_gradient_is_the_same_as_with_both(operator, wanted, place, backend):
    both, alone = gradients(operator, place), gradients(operator, place, wanted)
    for want, got, expected in zip(wanted, alone, both, strict=True):
        if want:
            assert_bits_equal(got, expected.numpy())
        else:
            assert got is None


@pytest.mark.parametrize("operator", ALL, indirect=True)
def test_nothing_wanted_gives_outputs_without_gradient(operator, place, backend):
    inputs = leaves(operator, place, (False, False))
    assert all(output.stop_gradient for output in operator.call(*inputs))


@pytest.mark.parametrize("operator", ALL, indirect=True)
def test_no_grad_gives_outputs_without_gradient(operator, place, backend):
    inputs = leaves(operator, place)
    with paddle.no_grad():
        assert all(output.stop_gradient for output in operator.call(*inputs))
    assert not any(output.stop_gradient for output in operator.call(*inputs))


@pytest.mark.parametrize("operator", WITH_TWO_OUTPUTS, indirect=True)
@pytest.mark.parametrize("used", [0, 1], ids=["rows", "probabilities"])
def test_an_unused_output_counts_as_zero_gradient(operator, used, place, backend):
    inputs = leaves(operator, place)
    outputs = operator.call(*inputs)
    (loss_of(outputs[used : used + 1]) + 0.0 * loss_of(outputs[1 - used : 2 - used])).backward()
    for got, with_zeros in zip(gradients(operator, place, use=slice(used, used + 1)), inputs, strict=True):
        np.testing.assert_array_equal(got.numpy(), with_zeros.grad.numpy())


@pytest.mark.parametrize("operator", ALL, indirect=True)
def test_paddle_grad_gives_what_backward_gives(operator, place, backend):
    expected = gradients(operator, place)
    inputs = leaves(operator, place)
    for got, wanted in zip(paddle.grad([loss_of(operator.call(*inputs))], inputs), expected, strict=True):
        assert_bits_equal(got, wanted.numpy())
    assert all(leaf.grad is None for leaf in inputs)


@pytest.mark.parametrize("operator", ALL, indirect=True)
def test_paddle_grad_may_run_twice_when_the_graph_is_retained(operator, place, backend):
    inputs = leaves(operator, place)
    loss = loss_of(operator.call(*inputs))
    first = paddle.grad([loss], inputs, retain_graph=True)
    for got, wanted in zip(paddle.grad([loss], inputs), first, strict=True):
        assert_bits_equal(got, wanted)


@pytest.mark.parametrize("operator", ALL, indirect=True)
def test_gradients_reach_inputs_that_are_not_leaves(operator, place, backend):
    expected = gradients(operator, place)
    inputs = leaves(operator, place)
    loss_of(operator.call(*(leaf * 1.0 for leaf in inputs))).backward()
    for leaf, wanted in zip(inputs, expected, strict=True):
        assert_bits_equal(leaf.grad, wanted.numpy())


@pytest.mark.parametrize("operator", ALL, indirect=True)
def test_hooks_see_the_gradients(operator, place, backend):
    inputs = leaves(operator, place)
    seen = []
    for leaf in inputs:
        leaf.register_hook(lambda gradient: seen.append(gradient.numpy()))
    loss_of(operator.call(*inputs)).backward()
    assert len(seen) == len(inputs)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
def test_float8_rows_have_no_gradient(dtype, rng, place, backend):
    problem = make_problem(rng, SMALL, dtype)
    x = tensor(problem.x, place, gradient=True)
    probs = tensor(problem.probs, place, gradient=True)
    outputs = moe_permute(x, None, tensor(problem.ids, place), probs, SMALL.E, None, SMALL.A)
    assert outputs[0].stop_gradient
    assert permute(x, plan_tensors(problem.plan(), place))[0].stop_gradient
    assert not outputs[2].stop_gradient
    outputs[2].sum().backward()
    np.testing.assert_array_equal(probs.grad.numpy(), problem.ids >= 0)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
def test_probabilities_have_a_gradient_beside_float8_rows_that_want_none(dtype, rng, place, backend):
    problem = make_problem(rng, SMALL, dtype)
    probs = tensor(problem.probs, place, gradient=True)
    outputs = moe_permute(tensor(problem.x, place), None, tensor(problem.ids, place), probs, SMALL.E, None, 1)
    outputs[2].sum().backward()
    np.testing.assert_array_equal(probs.grad.numpy(), problem.ids >= 0)


def test_integer_outputs_and_scales_have_no_gradient(rng, place, backend):
    problem = make_problem(rng, SMALL)
    x, probs = tensor(problem.x, place, gradient=True), tensor(problem.probs, place, gradient=True)
    scale = tensor(ordinary(rng, (SMALL.T, 2)), place)
    outputs = moe_permute(
        x, scale, tensor(problem.ids, place), probs, SMALL.E, None, 2, return_expert_indices=True, return_overflow=True
    )
    assert [output.stop_gradient for output in outputs] == [False, True, False, True, True, True]
    rows, scales = permute(x, plan_tensors(problem.plan(), place), scale)
    assert (rows.stop_gradient, scales.stop_gradient) == (False, True)


def test_the_plan_of_a_graph_may_serve_several_tensors(rng, place, backend):
    problem = make_problem(rng, SMALL)
    probs = tensor(problem.probs, place, gradient=True)
    plan = route(tensor(problem.ids, place), probs, **problem.route_arguments)
    x = tensor(problem.x, place, gradient=True)
    first, second = (unpermute(permute(x, plan)[0], plan, plan.row_probs) for _ in range(2))
    (first + second).sum().backward()
    weights = problem.probs.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(x.grad.numpy(), np.broadcast_to(2 * weights, problem.x.shape), rtol=1e-6)
    # Each probability weights its token's row twice.
    expected = np.where(problem.ids >= 0, 2 * problem.x.sum(axis=1, keepdims=True), 0)
    np.testing.assert_allclose(probs.grad.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_gradients_have_the_dtype_of_the_rows(place, backend):
    plan = reference.route(np.zeros((4, 1), np.int32), num_experts=1)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        x = tensor(np.ones((4, 3), dtype), place, gradient=True)
        permute(x, plan_tensors(plan, place))[0].sum().backward()
        assert_bits_equal(x.grad, np.ones((4, 3), dtype))


# An error of Python in a backward pass arrives as an OSError that names it, an error of Paddle as a RuntimeError.
FROM_BACKWARD = (RuntimeError, OSError)


@pytest.mark.parametrize("name", ["unpermute-by-row", "unpermute-by-slot", "moe_unpermute-weighted"])
@pytest.mark.parametrize("changed", [0, 1], ids=["rows", "probabilities"])
def test_a_kept_input_that_was_changed_in_place_raises(name, changed, place, backend):
    operator = operators(place)[name]
    inputs = [leaf * 1.0 for leaf in leaves(operator, place)]
    outputs = operator.call(*inputs)
    inputs[changed].detach().add_(paddle.ones_like(inputs[changed]))  # an alias of it
    with pytest.raises(FROM_BACKWARD, match=r"in place|inplace"):
        loss_of(outputs).backward()


@pytest.mark.parametrize("verb", ["route", "permute", "unpermute", "sort_chunks", "moe_unpermute", "calculate_topk"])
def test_a_map_that_was_changed_in_place_raises(verb, rng, place, backend):
    problem = make_problem(rng, SMALL)
    x, ids = tensor(problem.x, place, gradient=True), tensor(problem.ids, place)
    probs = tensor(problem.probs, place, gradient=True)
    plan = route(ids, probs, **problem.route_arguments)
    if verb == "route":
        out, maps = plan.row_probs, plan.slot_to_row
    elif verb == "permute":
        out, maps = permute(x, plan)[0], plan.token_rows
    elif verb == "unpermute":
        y = tensor(ordinary(rng, (plan.num_rows, SMALL.H)), place, gradient=True)
        out, maps = unpermute(y, plan), plan.row_to_token
    elif verb == "sort_chunks":
        order = tensor(np.arange(2, dtype=np.int32)[::-1], place)
        out, _, maps = sort_chunks(x, tensor(np.int32([2, 3]), place), order)
    elif verb == "moe_unpermute":
        out, maps = moe_unpermute_of_own_map(problem, place)
    else:
        out, maps = calculate_topk(x, 2, False, True)
    maps.add_(paddle.zeros_like(maps))  # even by nothing: the values are not compared
    with pytest.raises(FROM_BACKWARD, match=r"in place|inplace"):
        out.sum().backward()


def moe_unpermute_of_own_map(problem, place):
    """The sum and the row map that its gradient reads."""
    x = tensor(problem.x, place, gradient=True)
    ids, probs = tensor(problem.ids, place), tensor(problem.probs, place)
    rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, SMALL.E, None, SMALL.A)
    return moe_unpermute(rows, rowmap, ids, row_probs, SMALL.T, SMALL.E)[0], rowmap


def test_inputs_that_no_gradient_reads_may_change_in_place(rng, place, backend):
    problem = make_problem(rng, SMALL)
    x, ids = tensor(problem.x, place, gradient=True), tensor(problem.ids, place)
    probs = tensor(problem.probs, place, gradient=True)
    tokens, weights = x * 1.0, probs * 1.0
    plan = route(ids, weights, **problem.route_arguments)
    rows, _ = permute(tokens, plan)
    out = unpermute(rows, plan)
    for each in (tokens, weights, rows, ids):  # such as a buffer that the next batch is read into
        each.detach().zero_()
    (out.sum() + plan.row_probs.sum()).backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.repeat((problem.ids >= 0).sum(1)[:, None], SMALL.H, axis=1))
    np.testing.assert_array_equal(probs.grad.numpy(), problem.ids >= 0)


@pytest.mark.parametrize("operator", ALL, indirect=True)
def test_a_second_backward_pass_is_right_or_refused(operator, place, backend, request):
    """Other backends run in PyLayers, whose second backward pass ends the process in Paddle 3.3."""
    once = gradients(operator, place)
    inputs = leaves(operator, place)
    loss = loss_of(operator.call(*inputs))
    loss.backward(retain_graph=True)
    if backend == "compiled":
        loss.backward()
        for leaf, single in zip(inputs, once, strict=True):
            assert_bits_equal(leaf.grad, 2 * single.numpy())
    else:
        function = request.node.callspec.params["operator"].partition("-")[0]
        text = rf"\b{function}: backward\(\) has used this graph, and on the backend '{backend}' nothing can"
        with pytest.raises(FROM_BACKWARD, match=text):
            loss.backward()


@pytest.mark.parametrize("operator", ALL, indirect=True)
@pytest.mark.parametrize("axis", [0, -1], ids=["one row more", "another width"])
def test_a_gradient_of_another_shape_is_refused(operator, axis, place, backend):
    output = operator.call(*leaves(operator, place))[0]
    shape = list(output.shape)
    shape[axis] += 1
    with pytest.raises((ValueError, OSError), match=r"the gradient of .* must be "):
        paddle.autograd.backward([output], [paddle.ones(shape)])


def test_an_input_whose_gradient_nobody_makes_gets_zeros(rng, place):
    """Paddle's engine would otherwise not run what comes before it."""
    problem = make_problem(rng, SMALL)
    plan = plan_tensors(problem.plan(), place)
    x, w = tensor(problem.x, place, gradient=True), tensor(ordinary(rng, (SMALL.H,)), place, gradient=True)
    out = quantized_experts(
        x * 2.0,
        plan,
        lambda codes, scales, weight: dequantize_1x128(codes, scales, dtype="float32"),
        lambda d_out, codes, scales, weight: (d_out, None),
        w * 3.0,
    )
    out.sum().backward()
    np.testing.assert_array_equal(w.grad.numpy(), np.zeros(SMALL.H))
    assert (x.grad.numpy() == 2.0 * (problem.ids >= 0).sum(1)[:, None]).all()
