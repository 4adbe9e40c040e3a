# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers whose gradients are accumulated in place, and changes of their graphs and gradient buffers."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops import moe_mlp, permute, route
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts
from tests.ops.test_autograd import FROM_BACKWARD

pytestmark = pytest.mark.usefixtures("place", "backend")

T, H, I, E, K = 9, 12, 6, 4, 2  # noqa: E741


@pytest.fixture(autouse=True)
def _seed():
    paddle.seed(23)


def parameter(*shape: int) -> paddle.Tensor:
    made = paddle.randn(shape)
    made.stop_gradient = False
    return made


def plan_of_slots():
    return route(paddle.to_tensor(np.arange(T * K, dtype=np.int32).reshape(T, K) % E), num_experts=E)


def with_tensors():
    return moe_mlp(
        paddle.randn([T, H]), plan_of_slots(), None, parameter(E, H, 2 * I), parameter(E, I, H), accumulate=True
    )


def with_lists():
    gate_up, down = [parameter(H, 2 * I) for _ in range(E)], [parameter(I, H) for _ in range(E)]
    return moe_mlp(paddle.randn([T, H]), plan_of_slots(), None, gate_up, down, accumulate=True)


def with_layer(**options):
    return MoELayer(H, I, E, K, accumulate=True, **options)(paddle.randn([T, H]))


def with_biases():
    return with_layer(activation="geglu", expert_bias=True)


def with_rows():
    plan = plan_of_slots()
    rows = permute(paddle.randn([T, H]), plan)[0]
    return SwiGLUExperts(E, H, I, accumulate=True)(rows, plan.tokens_per_expert)


@pytest.mark.parametrize("make", [with_tensors, with_lists, with_layer, with_biases, with_rows])
def test_a_second_backward_pass_raises(make):
    loss = make().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(FROM_BACKWARD, match="nothing can use it again, even with retain_graph=True"):
        loss.backward()


def test_a_backward_pass_that_only_accumulates_runs_with_create_graph():
    x, plan, gate_up, down = paddle.randn([T, H]), plan_of_slots(), parameter(E, H, 2 * I), parameter(E, I, H)
    sums = []
    for options in ({}, {"create_graph": True}):
        gate_up.main_grad, down.main_grad = paddle.zeros(gate_up.shape), paddle.zeros(down.shape)
        out = moe_mlp(x, plan, None, gate_up, down, compute="fp8_1x128", accumulate=True)
        made = paddle.grad([out.square().sum()], [gate_up, down], allow_unused=True, **options)
        assert made == [None, None]
        sums.append((gate_up.main_grad.numpy(), down.main_grad.numpy()))
    for plain, with_graph in zip(*sums, strict=True):
        assert plain.any()
        np.testing.assert_array_equal(with_graph, plain)


@pytest.mark.parametrize("as_list", [False, True], ids=["tensor", "list"])
@pytest.mark.parametrize("shape", [(H, 2 * I - 1), (H - 1, 2 * I), (1, 1)])
@pytest.mark.parametrize("holder", ["main_grad", "grad"])
def test_what_holds_gradients_may_not_get_another_shape_after_the_forward_pass(as_list, shape, holder):
    matrices = [parameter(H, 2 * I) for _ in range(E)] if as_list else [parameter(E, H, 2 * I)]
    down = parameter(E, I, H)
    for each in matrices:
        setattr(each, holder, paddle.zeros(each.shape))
    given = matrices if as_list else matrices[0]
    loss = moe_mlp(paddle.randn([T, H]), plan_of_slots(), None, given, down, accumulate=True).sum()
    others = paddle.zeros([E, *shape])  # side by side
    for number, each in enumerate(matrices):
        setattr(each, holder, others[number] if as_list else others)
    with pytest.raises(
        (ValueError, OSError), match=f"accumulate: expected a parameter whose {holder} is contiguous, float32"
    ):
        loss.backward()


@pytest.mark.parametrize("held", [np.zeros((E, H, 2 * I), np.float32), 3.0], ids=["array", "float"])
def test_main_grad_must_be_a_tensor(held):
    gate_up = parameter(E, H, 2 * I)
    gate_up.main_grad = held
    with pytest.raises(
        ValueError, match=f"moe_mlp: gate_up must be a parameter whose main_grad .* is a {type(held).__name__}"
    ):
        moe_mlp(paddle.randn([T, H]), plan_of_slots(), None, gate_up, parameter(E, I, H), accumulate=True)


OPTIONS = {
    "float8": {"compute": "fp8_1x128"},
    "composed": {"activation": "geglu"},
    "Fleet's deferral": {"defer_dw": "fleet"},
    "Fleet's deferral, composed": {"defer_dw": "fleet", "activation": "geglu"},
    "Fleet's deferral, float8": {"defer_dw": "fleet", "compute": "fp8_1x128"},
}


@pytest.mark.parametrize("as_list", [False, True], ids=["tensor", "list"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_gradient_of_tokens_alone_adds_nothing_to_those_of_matrices(options, as_list):
    x, plan = parameter(T, H), plan_of_slots()
    matrices = [parameter(E, H, 2 * I), parameter(E, I, H)]
    if as_list:
        matrices = [[each.detach() for each in one.unbind()] for one in matrices]
    leaves = [leaf for each in matrices for leaf in (each if as_list else [each])]
    for each in leaves:
        each.stop_gradient, each.main_grad = False, paddle.ones(each.shape)

    def loss():
        return moe_mlp(x, plan, None, *matrices, accumulate=True, **options).square().sum()

    loss().backward()
    due, before = x.grad, [each.main_grad.numpy() for each in leaves]
    np.testing.assert_array_equal(paddle.grad([loss()], [x])[0], due)
    for each, one in zip(leaves, before, strict=True):
        assert (one != 1).any()
        np.testing.assert_array_equal(each.main_grad, one)
