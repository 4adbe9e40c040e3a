# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Limits of the Python calls in a warm step of a layer over two ranks, and of the files that these enter."""

from __future__ import annotations

import collections
from typing import Any

import paddle
import pytest

from paddle_moe_ops.nn import MoELayer
from tests.python_calls import python_calls

from .processes import run

PEER = {"transport": "peer", "tokens_per_rank": 16}
# Options, calls and files. In processes that ran other tests before, a step has up to three calls more.
LIMITS: list[tuple[dict[str, Any], int, int]] = [
    ({"combine": "reduced", **PEER}, 225, 20),
    ({"combine": "exact", **PEER}, 275, 20),
    ({"combine": "exact", "payload": "fp8_1x128", **PEER}, 275, 20),
    ({"combine": "reduced"}, 275, 20),
    ({"combine": "reduced", "tokens_per_rank": 16}, 265, 20),
    ({"combine": "reduced", "payload": "fp8_1x128"}, 300, 20),
    ({"combine": "exact"}, 310, 18),
]


def calls_of_a_warm_step(travels: dict[str, Any]) -> collections.Counter[str]:
    group = paddle.distributed.get_group(0)
    layer, x = MoELayer(64, 32, num_experts=8, topk=2, group=group, **travels), paddle.randn([16, 64])
    x.stop_gradient = False

    def step() -> None:
        layer(x).square().mean().backward()

    step()
    return python_calls(step)


@pytest.mark.cpu_only
@pytest.mark.parametrize(("travels", "most_calls", "most_files"), LIMITS, ids=[repr(each[0]) for each in LIMITS])
def test_a_warm_step_of_a_layer_over_two_ranks(travels, most_calls, most_files):
    for calls in run(calls_of_a_warm_step, 2, travels=travels):
        assert calls.total() <= most_calls
        assert len(calls) <= most_files
