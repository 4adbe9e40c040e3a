# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter to HybridEP, with a fake of its module on a CPU. It shows nothing of HybridEP itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_moe_ops.expert_parallel import ExpertParallel, HybridEP
from paddle_moe_ops.nn import MoELayer

from . import fake_hybrid_ep
from .problems import IN_BFLOAT16, Problem, assert_like_one_process
from .processes import run
from .test_expert_parallel import reduced
from .test_expert_parallel_errors import caught, inputs

pytestmark = pytest.mark.cpu_only


def transport() -> HybridEP:
    return HybridEP(fake_hybrid_ep, max_tokens=16)


def of_rank(problems: list[Problem]) -> Any:
    fake_hybrid_ep.HybridEPBuffer.made.clear()
    problems = [problem._replace(transport=transport()) for problem in problems]
    results = [reduced(problem, paddle.distributed.get_rank()) for problem in problems]
    return results, list(fake_hybrid_ep.HybridEPBuffer.made)


def test_dispatch_and_combine_have_the_results_of_one_process():
    problems = [problem._replace(integers=True) for problem in IN_BFLOAT16]
    parts = run(of_rank, 2, problems=problems)
    assert_like_one_process(problems, [results for results, _ in parts])
    for _, made in parts:
        assert made == [(problem.hidden, 16, problem.experts // 2) for problem in IN_BFLOAT16]


def trained_layers() -> list[list[Any]]:
    """Outputs and gradients of one layer, over the module and over gloo."""
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    found = []
    for each in (transport(), "auto"):
        paddle.seed(3)
        layer = MoELayer(16, 8, 4, 2, group=group, combine="reduced", transport=each)
        layer.to(dtype="bfloat16")
        paddle.seed(5 + rank)
        x = paddle.randn([10 - 4 * rank, 16]).astype("bfloat16")
        x.stop_gradient = False
        out = layer(x)
        out.astype("float32").square().sum().backward()
        tensors = [out, x.grad, *(each.grad for each in layer.parameters() if not each.stop_gradient)]
        found.append([each.astype("float32").numpy() for each in tensors])
    return found


def test_a_layer_trains_as_it_does_over_gloo():
    for got, expected in run(trained_layers, 2):
        for each, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(each, other)


def refused() -> list[str]:
    ep = ExpertParallel(4, combine="reduced", transport=transport())
    x, ids, probs = inputs(0)
    texts = [caught(lambda: ep.dispatch(x, ids, probs))]
    long = paddle.zeros([17, 8], "bfloat16"), paddle.zeros([17, 1], "int64"), paddle.ones([17, 1])
    texts.append(caught(lambda: ep.dispatch(*long)))
    texts.append(caught(lambda: HybridEP(3, 4)))
    texts.append(caught(lambda: HybridEP(fake_hybrid_ep, 0)))
    return texts


def test_bad_arguments_are_named():
    for texts in run(refused, 2):
        assert texts == [
            "TypeError: ExpertParallel.dispatch: x must be of dtype bfloat16 with HybridEP, but got float32",
            "ValueError: ExpertParallel.dispatch: x must be of at most 16 tokens, HybridEP's max_tokens, but got 17",
            "TypeError: HybridEP: module must be a module with a class HybridEPBuffer, but got int",
            "ValueError: HybridEP: max_tokens must be from 1 to 2147483647, but got 0",
        ]
