# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients whose shape or dtype is not the output's: Paddle passes them to the next operator unchecked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle.autograd import PyLayer

from paddle_moe_ops.backends import compiled, register_operators
from paddle_moe_ops.routing import calculate_topk
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import make_problem, ordinary, tensor
from tests.ops.test_second_order import CASES, SHAPE, Case, leaves_of, make_cases
from tests.pairwise import pairwise
from tests.static.cases import MOE_PERMUTE, MOE_UNPERMUTE, ROUTERS, VERBS
from tests.static.modes import StaticGraph, random_d_outputs

pytestmark = pytest.mark.compiled_only

Change = Callable[[list[int]], list[int]]

# Changes of a gradient's shape.
SHAPES: dict[str, Change] = {
    "a row more": lambda shape: [shape[0] + 1, *shape[1:]],
    "a row less": lambda shape: [shape[0] - 1, *shape[1:]],
    "no rows": lambda shape: [0, *shape[1:]],
    "ten times the rows": lambda shape: [10 * shape[0], *shape[1:]],
    "a dimension more": lambda shape: [*shape, 1],
    "one element": lambda shape: [],
}
SHAPES_OF_MATRICES: dict[str, Change] = {
    "four times the columns": lambda shape: [shape[0], 4 * shape[1]],
    "a column less": lambda shape: [shape[0], shape[1] - 1],
    "no columns": lambda shape: [shape[0], 0],
    "flat": lambda shape: [shape[0] * shape[1]],
    "turned": lambda shape: [shape[1], shape[0]],
}


def topk_cases(place: Any) -> dict[str, Case]:
    gating = ordinary(np.random.default_rng(8), (SHAPE.T, SHAPE.E))
    return {
        "calculate_topk": Case((gating,), lambda g: calculate_topk(g, 3, False, True)[:1], lambda g: ()),
        "calculate_topk-scores": Case(
            (gating,), lambda g: calculate_topk(g, 2, True, True, return_scores=True)[::2], lambda g: ()
        ),
    }


def all_cases(place: Any) -> dict[str, Case]:
    return {**make_cases(place), **topk_cases(place)}


# The number of dimensions of each output, all of which have gradients, by the case's name.
RANKS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(["route", "route-mask", "slots_to_rows"], (1,)),
    **dict.fromkeys(["permute", "permute-zero-probs", "sort_chunks", "rows_to_slots"], (2,)),
    **dict.fromkeys(["unpermute", "unpermute-by-row", "unpermute-by-slot", "calculate_topk"], (2,)),
    **dict.fromkeys(["moe_permute", "moe_permute-maps-only", "sort_chunks-with-probs"], (2, 1)),
    **dict.fromkeys(["moe_unpermute", "moe_unpermute-compat", "calculate_topk-scores"], (2, 2)),
    **dict.fromkeys(["moe_unpermute-weighted", "moe_unpermute-weighted-column"], (2, 2)),
}
OUTPUTS = [(name, index) for name, ranks in RANKS.items() for index in range(len(ranks))]


def shapes_of(rank: int) -> dict[str, Change]:
    """Changes of a shape of `rank` dimensions."""
    return {**SHAPES, **(SHAPES_OF_MATRICES if rank == 2 else {})}


def test_every_output_with_a_gradient_is_given_a_wrong_one(place):
    outputs = {name: case.call(*leaves_of(case, place)) for name, case in all_cases(place).items()}
    assert not any(output.stop_gradient for each in outputs.values() for output in each)
    assert {name: tuple(output.ndim for output in each) for name, each in outputs.items()} == RANKS


class Gives(PyLayer):
    """The identity, with any gradient that is asked for."""

    @staticmethod
    def forward(ctx, value, gradient):
        ctx.given = gradient
        return value * 1

    @staticmethod
    def backward(ctx, _):
        return ctx.given


def go_back(output: paddle.Tensor, gradient: paddle.Tensor, through: str) -> None:
    if through == "backward":
        paddle.autograd.backward([output], [gradient])
    else:
        Gives.apply(output, gradient.detach()).sum().backward()


@pytest.mark.parametrize("through", ["backward", "PyLayer"])
@pytest.mark.parametrize(("name", "index"), OUTPUTS)
def test_a_gradient_of_another_shape_raises(name, index, through, place):
    case = all_cases(place)[name]
    function = name.split("-")[0]
    for change in shapes_of(RANKS[name][index]).values():
        inputs = leaves_of(case, place)
        output = case.call(*inputs)[index]
        shape = change(output.shape)
        if shape == output.shape or min(shape, default=0) < 0:  # of an output without rows
            continue
        expected = ", ".join(map(str, output.shape))
        given = ", ".join(map(str, shape))
        message = rf"{function}: the gradient of \w+( \w+)* must be of shape \[{expected}\], but got \[{given}\]"
        with pytest.raises(ValueError, match=message):
            go_back(output, paddle.ones(shape), through)
        assert all(leaf.grad is None for leaf in inputs), shape


@pairwise(
    {
        "name": ["permute", "unpermute", "unpermute-by-row", "moe_unpermute", "sort_chunks"],
        "rows": ["float32", "bfloat16", "float16"],
        "given": ["float32", "float64", "bfloat16", "float16", "int32"],
        "through": ["backward", "PyLayer"],
    }
)
def test_a_gradient_of_another_dtype_is_cast_by_paddle(name, rows, given, through, place):
    case = all_cases(place)[name]

    def gradient(dtype):
        inputs = [leaf.astype(rows if leaf.ndim == 2 else "float32").detach() for leaf in leaves_of(case, place)]
        for leaf in inputs:
            leaf.stop_gradient = False
        output = case.call(*inputs)[0]
        d_out = paddle.arange(output.size).reshape(output.shape).astype(rows)
        go_back(output, d_out.astype(dtype), through)
        return inputs[0].grad

    got = gradient(given)
    assert got.dtype == getattr(paddle, rows)
    if given not in ("bfloat16", "float16"):  # which round the numbers
        assert_bits_equal(got.astype("float32").numpy(), gradient(rows).astype("float32").numpy())


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_a_gradient_is_looked_at_too(name, place):
    case = make_cases(place)[name]
    inputs = leaves_of(case, place)
    outputs = case.call(*inputs)
    starts = [paddle.ones_like(output) for output in outputs]
    for start in starts:
        start.stop_gradient = False
    gradients = paddle.grad(outputs, inputs, starts, create_graph=True, allow_unused=True)
    function = name.split("-")[0]
    for gradient in gradients:
        if gradient is None or gradient.grad_fn is None:
            continue
        for change in shapes_of(gradient.ndim).values():
            wrong = paddle.ones(change(gradient.shape))
            given = ", ".join(map(str, wrong.shape))
            message = rf"{function}: the gradient of the gradient of [\w ]+ must be of shape .*, but got \[{given}\]"
            with pytest.raises(ValueError, match=message):
                paddle.autograd.backward([gradient], [wrong], retain_graph=True)


@pytest.fixture(params=["direct", "paddle"])
def weighted_backward(request) -> Callable[..., Any]:
    """The only gradient that is also a public operator."""
    register_operators()
    if request.param == "direct":
        return compiled._direct["unpermute_weighted_backward"]
    return lambda *arguments: paddle._C_ops._run_custom_op("pmo_unpermute_weighted_backward", *arguments)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_operator_that_is_a_gradient_looks_at_shape_and_dtype(dtype, weighted_backward, rng, place):
    problem = make_problem(rng, SHAPE)
    plan = problem.plan()
    rows, d_out = (tensor(ordinary(rng, shape, dtype), place) for shape in ((plan.num_rows, SHAPE.H), problem.x.shape))
    maps = [tensor(each, place) for each in (plan.token_rows, plan.row_to_token, plan.row_to_slot)]
    probs = tensor(plan.row_probs, place)
    assert weighted_backward(rows, probs, *maps, d_out, True, True)[0].shape == rows.shape
    for change in {**SHAPES, **SHAPES_OF_MATRICES}.values():
        wrong = paddle.ones(change(d_out.shape)).astype(d_out.dtype)
        with pytest.raises(ValueError, match="unpermute: the gradient of the sums must be of shape"):
            weighted_backward(rows, probs, *maps, wrong, True, True)
    for other in {"float32", "float16", "bfloat16", "float64", "int32"} - {np.dtype(dtype).name}:
        message = f"unpermute: the gradient of the sums must be {np.dtype(dtype).name}, but got {other}"
        with pytest.raises(ValueError, match=message):
            weighted_backward(rows, probs, *maps, d_out.astype(other), True, True)
        with pytest.raises(ValueError, match=message):
            weighted_backward(rows, probs, *maps, d_out.astype(other), False, False)


# The output whose gradient is wrong, and its name in the message.
IN_GRAPHS = [
    (MOE_PERMUTE[0], 0, "moe_permute: the gradient of hidden_states_unzipped"),
    (MOE_PERMUTE[0], 2, "moe_permute: the gradient of token_prob_unzipped"),
    (MOE_UNPERMUTE[0], 0, "moe_unpermute: the gradient of hidden_states"),
    (MOE_UNPERMUTE[2], 1, "moe_unpermute: the gradient of expert_prob_topk"),
    (VERBS[0], 5, "route: the gradient of row_probs"),
    (VERBS[9], 0, "unpermute: the gradient of the sums"),
    (VERBS[13], 0, "unpermute: the gradient of the sums"),
    (ROUTERS[0], 0, "calculate_topk: the gradient of the weights"),
]


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface", "ignore:The dtype of grad_output")
@pytest.mark.parametrize("wrong", ["shape", "dtype"])
@pytest.mark.parametrize(("case", "output", "what"), IN_GRAPHS, ids=[f"{case}-{i}" for case, i, _ in IN_GRAPHS])
def test_a_static_graph_raises_when_it_runs(case, output, what, wrong, rng, place):
    """Paddle casts nothing there."""
    inputs = case.inputs(rng, 23)
    d_outputs = random_d_outputs(case, inputs, rng)
    other = np.float16 if d_outputs[output].dtype == np.float32 else np.float32
    if wrong == "dtype":
        d_outputs[output] = d_outputs[output].astype(other)
        expected = rf"{what} must be float\d\d, but got {np.dtype(other)}"
    else:
        expected = rf"{what} must be of shape \[.*\], but got \[{len(d_outputs[output]) - 1}[\],]"
    graph = StaticGraph(case, d_outputs)
    if wrong == "shape":
        graph.run(inputs, d_outputs)
        d_outputs[output] = d_outputs[output][:-1]
    with pytest.raises(ValueError, match=expected):
        graph.run(inputs, d_outputs)
