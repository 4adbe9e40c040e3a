# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts on several ranks whose gradients are computed after the backward pass, with the bits of a whole one."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_moe_ops import discard_dw, flush_dw
from paddle_moe_ops.expert_parallel import average_gradients
from paddle_moe_ops.nn import MoELayer

from ..pairwise import in_turn
from .processes import run
from .test_expert_parallel_errors import caught
from .test_expert_parallel_layer import BATCHES, HIDDEN, Net, batch

pytestmark = pytest.mark.long

FORMS: dict[str, dict[str, Any]] = {
    "exact": {"combine": "exact"},
    "reduced": {"combine": "reduced"},
    "through windows": {"combine": "reduced", "tokens_per_rank": 16, "transport": "peer"},
    "float8": {"combine": "reduced", "compute": "fp8_1x128"},
    "accumulates": {"combine": "reduced", "accumulate": True},
    "biases": {"combine": "exact", "expert_bias": True, "activation": "geglu"},
    "recomputes": {"combine": "exact", "recomputes": True},
}


def gradients(tokens: tuple[int, ...], defer_dw: bool, options: dict[str, Any]) -> list[np.ndarray]:
    """Averaged gradients of three micro-batches, which a deferring net adds at the end."""
    paddle.seed(7)
    group = paddle.distributed.get_group(0)
    net = Net(group, defer_dw=defer_dw, **options)
    for turn in range(3):
        x, y = batch(tokens, group.rank, turn)
        x.stop_gradient = False
        (net(x) - y).square().sum().backward()
    assert (net.moe.experts.down.grad is None) == defer_dw
    assert (flush_dw() > 0) == defer_dw
    average_gradients(net.parameters(), group)
    return [each.grad.numpy() for each in net.parameters()]


@pytest.mark.sampled(2)
@in_turn({"options": FORMS, "tokens": {name: tokens for tokens, name in BATCHES.items()}})
def test_gradients_have_the_bits_of_whole_backward_passes(tokens, options):
    due, made = (run(gradients, 2, tokens=tokens, defer_dw=each, options=options) for each in (False, True))
    for of_rank, expected in zip(made, due, strict=True):
        for each, other in zip(of_rank, expected, strict=True):
            np.testing.assert_array_equal(each, other)


def averages_that_come_too_early(waits_on: tuple[int, ...]) -> str:
    group = paddle.distributed.get_group(0)
    net = Net(group, defer_dw=True, combine="reduced")
    net(paddle.randn([5, HIDDEN])).sum().backward()
    if group.rank not in waits_on:
        flush_dw()
    text = caught(lambda: average_gradients(net.parameters(), group))
    discard_dw()
    return text


@pytest.mark.parametrize("waits_on", [(0, 1), (1,)], ids=["all ranks", "one"])
def test_averages_that_come_too_early_raise_on_every_rank(waits_on):
    for rank, text in enumerate(run(averages_that_come_too_early, 2, waits_on=waits_on)):
        assert text.startswith("RuntimeError: average_gradients: ")
        if rank in waits_on:
            assert "gradients of 1 backward passes with defer_dw are still to be computed; call flush_dw()" in text


def in_data_parallel(defer_dw: bool) -> tuple[str, list[np.ndarray]]:
    """The error of a call in the wrapper, and averaged gradients, by hand if they wait."""
    paddle.seed(7)
    layer = MoELayer(HIDDEN, 16, 4, 2, defer_dw=defer_dw)
    model, ranks = paddle.DataParallel(layer), paddle.distributed.get_world_size()
    paddle.seed(paddle.distributed.get_rank())
    x = paddle.randn([9, HIDDEN])
    if not defer_dw:
        model(x).square().sum().backward()
        return "", [each.grad.numpy() for each in layer.parameters()]
    text = caught(lambda: model(x))
    with model.no_sync():
        model(x).square().sum().backward()
    flush_dw()
    for each in layer.parameters():
        paddle.distributed.all_reduce(each.grad)
    return text, [each.grad.numpy() / ranks for each in layer.parameters()]


def test_data_parallel_reduces_too_early_and_is_refused():
    due, made = (run(in_data_parallel, 2, defer_dw=each) for each in (False, True))
    for (text, gradients), (_, expected) in zip(made, due, strict=True):
        assert text.startswith("ValueError: MoELayer: defer_dw must be False in DataParallel, which reduces gradients")
        assert text.endswith("before they are flushed, except in its no_sync(), but got True")
        for each, other in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(each, other, rtol=1e-6, atol=1e-6)
