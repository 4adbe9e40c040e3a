# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Limits of the Python calls in a warm step of a layer over two ranks, and of the files that these enter."""

from __future__ import annotations

import collections

import paddle
import pytest

from paddle_moe_ops.nn import MoELayer
from tests.python_calls import python_calls

from .processes import run


def calls_of_a_warm_step() -> collections.Counter[str]:
    group = paddle.distributed.get_group(0)
    travels = {"combine": "reduced", "transport": "peer", "tokens_per_rank": 16}
    layer, x = MoELayer(64, 32, num_experts=8, topk=2, group=group, **travels), paddle.randn([16, 64])
    x.stop_gradient = False

    def step() -> None:
        layer(x).square().mean().backward()

    step()
    return python_calls(step)


@pytest.mark.cpu_only
def test_a_warm_step_of_a_layer_over_two_ranks():
    for calls in run(calls_of_a_warm_step, 2):
        assert calls.total() <= 300
        assert len(calls) <= 16
