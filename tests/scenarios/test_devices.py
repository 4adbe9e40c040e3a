# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors on another device than the current one: every result is where the arguments are."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from .operations import OPERATIONS, make_inputs

pytestmark = pytest.mark.gpu_only


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
