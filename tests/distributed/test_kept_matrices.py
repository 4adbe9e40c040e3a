# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts of several ranks whose float8 matrices are quantised once after each change."""

from __future__ import annotations

import copy

import paddle
import pytest

from paddle_moe_ops.expert_parallel import average_gradients
from paddle_moe_ops.nn import MoELayer, keep_float8_matrices
from paddle_moe_ops.testing.equality import assert_bits_equal

from .processes import run


def train_with_and_without_kept_matrices() -> None:
    """A rank without tokens in one micro-batch, and another optimizer for the router."""
    paddle.seed(5)
    group = paddle.distributed.get_group(0)
    options = {"combine": "reduced", "compute": "fp8_1x128", "num_shared_experts": 0}
    layer = MoELayer(160, 128, num_experts=4, topk=2, group=group, **options)
    states, made = copy.deepcopy(layer.state_dict()), []
    parts = [paddle.randn([size, 160]) for size in (9, 0 if paddle.distributed.get_rank() else 5, 3)]
    for keeps in (True, False):
        layer.set_state_dict(states)
        optimizers = [
            paddle.optimizer.AdamW(1e-2, parameters=layer.experts.parameters()),
            paddle.optimizer.SGD(1e-2, parameters=layer.router.parameters()),
        ]
        if keeps:
            assert keep_float8_matrices(layer) == 1
        else:
            layer.experts.float8_matrices = None
        for _ in range(2):
            for x in parts:
                layer(x).square().sum().backward()
            average_gradients(layer.parameters(), group)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.clear_grad()
        made.append({name: each.clone() for name, each in layer.state_dict().items()})
    for name, each in made[0].items():
        assert_bits_equal(each, made[1][name], what=name)


@pytest.mark.cpu_only
def test_ranks_train_alike_with_and_without_kept_matrices():
    run(train_with_and_without_kept_matrices, 2)
