# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`paddle.grad` of weights alone where some experts, or all layers, have no rows."""

from __future__ import annotations

import paddle
import pytest

from paddle_moe_ops import moe_mlp, route
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal

pytestmark = pytest.mark.usefixtures("place", "backend")

T, H, I, E, K = 9, 32, 16, 4, 2  # noqa: E741
OPTIONS = {"plain": {}, "accumulates": {"accumulate": True}, "activation": {"activation": "geglu"}}


def parameters(lists):
    paddle.seed(5)
    if lists:
        return [[paddle.create_parameter(shape, "float32") for _ in range(E)] for shape in ([H, 2 * I], [I, H])]
    return [paddle.create_parameter(shape, "float32") for shape in ([E, H, 2 * I], [E, I, H])]


@pytest.mark.parametrize("lists", [False, True], ids=["stacked", "lists"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("which", [0, 1], ids=["gate_up", "down"])
def test_matrices_have_the_gradients_of_backward_if_an_expert_has_no_rows(which, options, lists):
    def of(matrices):
        paddle.seed(6)
        ids = paddle.to_tensor([[t % (E - 1), (t + 1) % (E - 1)] for t in range(T)])
        return moe_mlp(paddle.randn([T, H]), route(ids, num_experts=E), paddle.rand([T, K]), *matrices, **options)

    matrices = parameters(lists)
    of(matrices).square().sum().backward()
    due = [each.grad for each in (matrices[which] if lists else [matrices[which]])]
    matrices = parameters(lists)
    wanted = matrices[which] if lists else [matrices[which]]
    made = paddle.grad(of(matrices).square().sum(), wanted)
    for got, expected in zip(made, due, strict=True):
        assert_bits_equal(got, expected)


@pytest.mark.parametrize("shape", [[0, H], [2, 0, H]], ids=str)
@pytest.mark.parametrize("wants", [False, True], ids=["constant tokens", "trained tokens"])
def test_weights_of_a_layer_without_tokens_have_gradients_of_zeros(wants, shape):
    layer = MoELayer(H, I, E, K, num_shared_experts=1)
    x = paddle.zeros(shape)
    x.stop_gradient = not wants
    out = layer(x)
    assert out.shape == shape
    for made, weight in zip(paddle.grad(out.sum(), layer.parameters()), layer.parameters(), strict=True):
        assert made.shape == weight.shape
        assert not made.any()
    layer(x).sum().backward()
    assert (x.grad is None) == (not wants)
