# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors on another device than the current one: every result is where the arguments are."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops import Plan, indexed, moe_permute, permute, route, unpermute, use_backend
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import MoELayer

from .operations import OPERATIONS, make_inputs

# A backend that is asked for would have to run on both devices.
pytestmark = [pytest.mark.gpu_only, pytest.mark.compiled_only]

T, H, E, K = 9, 8, 4, 2


@pytest.fixture(params=["CPU tensors", "GPU tensors"])
def elsewhere(request, device):
    """The place of tensors, while the other device is the current one."""
    gpu = paddle.set_device(device)
    try:
        if request.param == "CPU tensors":
            yield paddle.CPUPlace()
        else:
            paddle.set_device("cpu")
            yield gpu
    finally:
        paddle.set_device(device)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_forward_and_backward_stay_where_the_tensors_are(operation, elsewhere):
    inputs, leaves = make_inputs(elsewhere)
    outputs = operation.call(inputs)
    assert all(output.place == elsewhere for output in outputs)
    loss = sum((output * output).sum() for output in outputs)
    loss.backward()
    on_cpu, expected = make_inputs(paddle.CPUPlace())
    sum((output * output).sum() for output in operation.call(on_cpu)).backward()
    for name in operation.floats:
        assert leaves[name].grad.place == elsewhere, name
        np.testing.assert_allclose(leaves[name].grad.numpy(), expected[name].grad.numpy(), rtol=1e-4, atol=1e-4)


def routed(place):
    ids = paddle.to_tensor(np.arange(T * K).reshape(T, K) % E, dtype="int32", place=place)
    return ids, paddle.to_tensor(np.full([T, K], 0.5, np.float32), place=place, stop_gradient=False)


def tokens(place):
    return paddle.to_tensor(np.ones([T, H], np.float32), place=place, stop_gradient=False)


def capacity(place):
    ids, probs = routed(place)
    return route(ids, probs, num_experts=E, capacity=paddle.to_tensor(3, place=place))


def second_order(place):
    """On a backend whose gradients are connected in Python."""
    with use_backend("reference"):
        ids, probs = routed(place)
        plan = route(ids, probs, num_experts=E, padding_alignment=4)
        x = tokens(place)
        out = unpermute(permute(x, plan)[0], plan)
        (once,) = paddle.grad((out**2).sum(), x, create_graph=True)
        return paddle.grad((once**2).sum(), x)


def products(place):
    with use_backend("paddle"):
        weights = paddle.to_tensor(np.ones([3, H, H], np.float32), place=place, stop_gradient=False)
        x = tokens(place)
        out = grouped_gemm(x, weights, [2, 0, 3], expert_offsets=[0, 4, 4, T])
        return out, *paddle.grad(out.sum(), [x, weights])


def layer(place):
    made = MoELayer(H, H, E, K, capacity_factor=1.0)
    made.to(place)
    x = tokens(place)
    out = made(x)
    (out.sum() + made.aux_loss).backward()
    made.router.update_correction_bias(made.tokens_per_expert)
    return out, made.aux_loss, x.grad, made.router.weight.grad, made.router.correction_bias


OTHERS = {
    "maps alone": lambda place: moe_permute(tokens(place), None, *routed(place), E, None, 1, do_gather=False),
    "maps alone of float8": lambda place: moe_permute(
        tokens(place).astype("float8_e4m3fn"), None, *routed(place), E, None, 1, do_gather=False
    ),
    "routing indices": lambda place: indexed.get_routing_indices(routed(place)[0], E, return_scatter_indices=True),
    "a capacity": capacity,
    "second order": second_order,
    "products by Paddle": products,
    "layer": layer,
}


@pytest.mark.parametrize("program", OTHERS)
def test_results_are_where_the_arguments_are(program, elsewhere):
    results = OTHERS[program](elsewhere)
    results = results[: Plan._fields.index("num_tokens")] if isinstance(results, Plan) else results
    assert [result.place for result in results if result is not None] == [elsewhere] * len(results)
