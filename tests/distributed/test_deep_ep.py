# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter to DeepEP, with a module that stands in for it on a CPU. It shows nothing of DeepEP itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_moe_ops.expert_parallel import DeepEP, ExpertParallel
from paddle_moe_ops.nn import MoELayer

from . import fake_deep_ep
from .problems import IN_BFLOAT16, Problem, assert_like_one_process
from .processes import Processes, run
from .test_expert_parallel import reduced
from .test_expert_parallel_errors import caught, inputs

pytestmark = pytest.mark.cpu_only


def of_rank(problems: list[Problem]) -> Any:
    fake_deep_ep.install()
    fake_deep_ep.Buffer.made.clear()
    living = ExpertParallel(4, combine="reduced", transport="deepep")  # whose group keeps its buffer
    results = [reduced(problem, paddle.distributed.get_rank()) for problem in problems]
    living.close()
    return results, list(fake_deep_ep.Buffer.made)


def test_dispatch_and_combine_have_the_results_of_one_process():
    problems = [problem._replace(integers=True, transport="deepep") for problem in IN_BFLOAT16]
    parts = run(of_rank, 2, problems=problems)
    assert_like_one_process(problems, [results for results, _ in parts])
    for _, made in parts:
        assert made == sorted(set(made))  # one buffer, until rows are wider
        assert made[-1] == (2 * 2 * fake_deep_ep.KNEE_BYTES, 3 * 2 * 72 * 2)


def trained_layers(capacity_factor: float | None) -> list[list[Any]]:
    """Outputs and gradients of one layer, over Paddle's module, another module and gloo."""
    fake_deep_ep.install()
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    found = []
    for transport in ("deepep", DeepEP(fake_deep_ep), "auto"):
        paddle.seed(3)
        options = {"combine": "reduced", "transport": transport, "capacity_factor": capacity_factor}
        layer = MoELayer(16, 8, 4, 2, group=group, **options)
        layer.to(dtype="bfloat16")
        paddle.seed(5 + rank)
        x = paddle.randn([10 - 4 * rank, 16]).astype("bfloat16")
        x.stop_gradient = False
        out = layer(x)
        out.astype("float32").square().sum().backward()
        tensors = [out, x.grad, *(each.grad for each in layer.parameters() if not each.stop_gradient)]
        found.append([each.astype("float32").numpy() for each in tensors] + [int(np.sum(layer.dropped_slots))])
    return found


@pytest.mark.parametrize("capacity_factor", [None, 0.75])
def test_a_layer_trains_as_it_does_over_gloo(capacity_factor):
    for *over_deep_ep, over_gloo in run(trained_layers, 2, capacity_factor=capacity_factor):
        *expected, dropped_over_gloo = over_gloo
        assert (dropped_over_gloo > 0) == (capacity_factor is not None)
        for *got, dropped in over_deep_ep:
            assert dropped == dropped_over_gloo
            for each, other in zip(got, expected, strict=True):
                np.testing.assert_array_equal(each, other)


def shares_buffers() -> list[bool]:
    """True where two layers share a buffer: both over the first of two modules, both over the second, and one each."""
    modules = [SimpleNamespace(Buffer=type("Buffer", (fake_deep_ep.Buffer,), {})) for _ in range(2)]
    layers = [ExpertParallel(4, combine="reduced", transport=DeepEP(each)) for each in modules * 2]
    x, ids, probs = paddle.ones([3, 8], "bfloat16"), paddle.to_tensor([[0], [3], [-1]]), paddle.ones([3, 1])
    received = [layer.dispatch(x, ids, probs) for layer in layers]
    outs = [layer.combine(each.tokens, each) for layer, each in zip(layers, received, strict=True)]
    assert [each.sum().item() for each in outs] == [16] * len(layers)
    buffers = [each._way_back.trip.handle[0] for each in received]
    return [buffers[one] is buffers[other] for one, other in ((0, 2), (1, 3), (0, 1))]


def test_layers_over_one_module_share_a_buffer_and_those_over_another_have_theirs():
    assert run(shares_buffers, 2) == [[True, True, False]] * 2


def refused_options() -> list[str]:
    fake_deep_ep.install()
    ep = ExpertParallel(4, combine="reduced", transport="deepep")
    x, ids, probs = inputs(0)
    bad = [{}, {"payload": "fp8_1x128", "combine": "reduced"}, {"tokens_per_rank": 4, "combine": "reduced"}]
    texts = [caught(lambda each=each: ExpertParallel(4, transport="deepep", **each)) for each in bad]
    texts.append(caught(lambda: ep.dispatch(x, ids, probs)))
    texts.append(caught(lambda: ep.dispatch(x.astype("bfloat16"), ids, probs)))
    wide = paddle.zeros([2, 8], "bfloat16")
    received = ep.dispatch(wide, ids, probs)
    texts.append(caught(lambda: ep.combine(received.tokens.astype("float32"), received)))
    ep.combine(received.tokens, received)
    return texts


def test_what_deep_ep_cannot_do_is_refused():
    expected = [
        "ValueError: ExpertParallel: combine must be 'reduced' with transport=\"deepep\", but got 'exact'",
        "ValueError: ExpertParallel: payload must be None with transport=\"deepep\", but got 'fp8_1x128'",
        'ValueError: ExpertParallel: tokens_per_rank must be None with transport="deepep", but got 4',
        "TypeError: ExpertParallel.dispatch: x must be of dtype bfloat16 with DeepEP, but got float32",
        "ValueError: ExpertParallel.dispatch: x must be of a multiple of 8 columns with DeepEP, but got [2, 2]",
        "TypeError: ExpertParallel.combine: out must be of dtype bfloat16 with DeepEP, but got float32",
    ]
    assert run(refused_options, 2) == [expected, expected]


def on_odd_numbers() -> str:
    fake_deep_ep.install()
    return caught(lambda: ExpertParallel(6, combine="reduced", transport="deepep"))


def without_the_module() -> str:
    return caught(lambda: ExpertParallel(6, combine="reduced", transport="deepep"))


def test_numbers_of_ranks_without_settings_and_a_missing_module_are_refused():
    ranks = Processes(3, "gloo")  # of their own, since others may have the stand-in
    try:
        for text in ranks.call(without_the_module, {}):
            assert text.startswith(
                "ValueError: ExpertParallel: transport must be one other than 'deepep', since "
                "paddle.distributed.communication.deep_ep cannot be imported here (No module named"
            )
        assert (
            ranks.call(on_odd_numbers, {})
            == [
                "ValueError: ExpertParallel: group must be of a number of ranks that DeepEP has settings for, but got 3"
            ]
            * 3
        )
    finally:
        ranks.stop()
