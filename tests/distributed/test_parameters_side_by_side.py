# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters in one allocation on a custom device, where Paddle copies what it shares on a CPU."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_moe_ops import moe_mlp, route, use_backend
from paddle_moe_ops.backends.stacking import parts_of, view_of
from paddle_moe_ops.nn import lay_side_by_side
from tests.distributed.processes import run

pytestmark = pytest.mark.cpu_only

E, D, N, T = 3, 4, 2, 5


def trained_side_by_side():
    """Results of two training steps with separate parameters, and with the same parameters stacked."""
    found = []
    for lay in (False, True):
        paddle.seed(3)
        up, down = ([nn.Linear(*shape, bias_attr=False).weight for _ in range(E)] for shape in ((D, 2 * N), (N, D)))
        for matrices in (up, down) if lay else ():
            lay_side_by_side(matrices)
        x = paddle.linspace(-1, 1, T * D).reshape([T, D])
        ids, probs = paddle.arange(T).reshape([T, 1]) % E, paddle.ones([T, 1])
        optimizer = paddle.optimizer.SGD(0.1, parameters=[*up, *down])
        assert (view_of(up) is not None) == lay
        assert not up[0].place.is_cpu_place()
        for _ in range(2):  # the optimizer runs on the CPU and gives parameters memory of their own: the list is copied
            with use_backend("reference"):
                moe_mlp(x, route(ids, num_experts=E), probs, up, down).square().sum().backward()
            assert all(view_of([each.grad for each in matrices]) is not None for matrices in (up, down))
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
        found.append([each.numpy() for each in (*up, *down)])
    return found


def test_training_gives_the_same_numbers():
    ((apart, together),) = run(trained_side_by_side, 1, "stub")
    for got, expected in zip(together, apart, strict=True):
        np.testing.assert_array_equal(got, expected)


def parts_in_the_memory_of_the_whole():
    whole = paddle.arange(E * N * D, dtype="float32").reshape([E, N, D])
    parts = parts_of(whole)
    same = view_of(parts)
    with paddle.no_grad():
        parts[1].add_(paddle.ones([N, D]))
    parts[0].set_value(parts[2])
    return whole.numpy(), same.numpy(), [each.shape for each in parts]


def test_parts_share_memory():
    ((whole, same, shapes),) = run(parts_in_the_memory_of_the_whole, 1, "stub")
    expected = np.arange(E * N * D, dtype=np.float32).reshape(E, N, D)
    expected[1] += 1
    expected[0] = expected[2]
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(same, expected)
    assert shapes == [[N, D]] * E


def on_host_and_device():
    parameters = [paddle.ones([N, D]), paddle.ones([N, D]).cpu()]
    try:
        lay_side_by_side(parameters)
    except ValueError as error:
        return str(error), [str(each.place) for each in parameters]
    return "nothing was raised"


def test_parameters_on_several_devices_are_refused():
    ((text, (device, host)),) = run(on_host_and_device, 1, "stub")
    expected = f"on the device of parameters[0], {device}, but got {host}"
    assert text == f"lay_side_by_side: parameters[1] must be {expected}"
