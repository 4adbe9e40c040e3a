# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Limits of the Python calls within the package in a warm step of a layer, and of the files that these enter."""

from __future__ import annotations

import paddle
import pytest

from paddle_moe_ops.nn import MoELayer
from tests.python_calls import python_calls

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("place")]


@pytest.mark.parametrize("trains", [False, True], ids=["no_grad", "both passes"])
def test_a_warm_step_of_a_layer(trains):
    layer, x = MoELayer(64, 32, num_experts=8, topk=2), paddle.randn([16, 64])
    x.stop_gradient = False

    def step():
        with paddle.set_grad_enabled(trains):
            out = layer(x)
        if trains:
            out.square().mean().backward()

    step()
    calls = python_calls(step)
    assert calls.total() <= 150
    assert len(calls) <= 11
