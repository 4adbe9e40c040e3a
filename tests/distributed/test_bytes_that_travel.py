# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The model of benchmarks/scaling counts the bytes that the package sends, in both passes."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from benchmarks.scaling.traces import drawn
from benchmarks.scaling.traffic import Layout, count, steps
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.expert_parallel import ExpertParallel

from .processes import run

EXPERTS, TOPK, TOKENS, HIDDEN = 12, 3, 47, 129


def trace(size):
    made = drawn("zipf", EXPERTS, TOPK, size, TOKENS)
    return made._replace(ids=np.where(np.random.default_rng(2).random(made.ids.shape) < 0.1, -1, made.ids))


class Counting:
    """A transport that takes down the bytes for each rank."""

    def __init__(self, transport):
        self.transport, self.sent = transport, []

    def exchange(self, payload, sent, received, step):
        line = payload.element_size() * int(np.prod(payload.shape[1:]))
        self.sent.append([line * lines for lines in sent])
        return self.transport.exchange(payload, sent, received, step)

    def exchange_numbers(self, numbers, step):
        """Exchange numbers, which the model does not count."""
        return self.transport.exchange_numbers(numbers, step)


def sent_by_a_layer(combine, payload):
    """Bytes for each rank that a dispatch, a combine and their gradients send: [4, P]."""
    group = paddle.distributed.get_group(0)
    ep = ExpertParallel(EXPERTS, group, combine=combine, payload=payload)
    ep._transport = counting = Counting(ep._transport)
    ids = to_tensor(trace(group.nranks).ids[group.rank])
    x = paddle.ones([TOKENS, HIDDEN], "bfloat16")
    probs = paddle.ones([TOKENS, TOPK])
    x.stop_gradient = probs.stop_gradient = False
    received = ep.dispatch(x, ids, probs)
    dispatched = len(counting.sent)
    y = ep.combine(received.rows if combine == "exact" else received.tokens, received)
    combined = len(counting.sent)
    y.astype("float32").sum().backward()
    # The first exchange of the backward pass is that of the last one forward.
    parts = (counting.sent[:dispatched], counting.sent[dispatched:combined])
    parts += (counting.sent[combined : combined + 1], counting.sent[combined + 1 :])
    return np.array([np.sum(each, axis=0) for each in parts])


@pytest.mark.parametrize("payload", [None, "fp8_1x128"])
@pytest.mark.parametrize("combine", ["exact", "reduced"])
def test_bytes_are_those_of_the_model(combine, payload, num_processes):
    traffic = count(trace(num_processes), Layout.of(num_processes, num_processes))
    predicted = steps(traffic, HIDDEN, combine=combine, payload="bf16" if payload is None else "fp8")
    for rank, sent in enumerate(run(sent_by_a_layer, num_processes, combine=combine, payload=payload)):
        for step, of_ranks in zip(predicted, sent, strict=True):
            expected = step.lines[rank] * step.line_bytes
            assert of_ranks.tolist() == expected.tolist(), f"{step.name}, backward {step.backward}, rank {rank}"
