# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Groups on streams of the user: each rank may reach them in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import permute, unpermute
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.expert_parallel import ExpertParallel
from paddle_moe_ops.testing.equality import assert_bits_equal

from .problems import bits
from .processes import run

TOKENS, HIDDEN, EXPERTS, TOPK = 257, 128, 8, 2
ROUNDS = 20


def in_another_order_on_each_rank() -> tuple[list[NDArray], list[NDArray]]:
    """Outputs of two groups, called one after the other and then in an order that ranks don't share."""
    rank, ranks = paddle.distributed.get_rank(), list(range(paddle.distributed.get_world_size()))
    options = {"combine": "reduced", "tokens_per_rank": TOKENS, "transport": "peer", "timeout": 10.0}
    layers = [ExpertParallel(EXPERTS, paddle.distributed.new_group(ranks), **options) for _ in range(2)]
    rng = np.random.default_rng(rank)
    x, probs = (to_tensor(rng.random((TOKENS, n), np.float32)) for n in (HIDDEN, TOPK))
    ids = to_tensor(np.argsort(rng.random((TOKENS, EXPERTS)))[:, :TOPK].astype(np.int32))
    streams = [paddle.device.Stream(paddle.device.get_device()) for _ in layers]

    def call(number: int) -> paddle.Tensor:
        with paddle.no_grad(), paddle.device.stream_guard(streams[number]):
            received = layers[number].dispatch(x, ids, probs, copy=True)
            rows = permute(received.tokens, received.plan)[0]
            return layers[number].combine(unpermute(rows, received.plan, received.probs), received)

    paddle.device.synchronize()
    in_order = [bits(call(number)) for number in range(2)]
    made = {}
    for _ in range(ROUNDS):  # nothing waits for the GPU, so a group's barriers run while the other's are queued
        made.update({number: call(number) for number in ([0, 1] if rank % 2 else [1, 0])})
    for stream in streams:
        stream.synchronize()
    return in_order, [bits(made[number]) for number in range(2)]


@pytest.mark.gpu_only
@pytest.mark.two_gpus
def test_two_groups_on_two_streams_do_not_wait_for_each_other(num_processes):
    for rank, (in_order, made) in enumerate(run(in_another_order_on_each_rank, num_processes)):
        for got, expected in zip(made, in_order, strict=True):
            assert_bits_equal(got, expected, what=f"rank {rank}")


def many_in_flight(combine: str, **options: Any) -> tuple[list[NDArray], list[NDArray]]:
    """Gradients of tokens of micro-batches, without and with exchanges in flight while dense products run."""
    rank = paddle.distributed.get_rank()
    rng = np.random.default_rng(rank)
    ep = ExpertParallel(EXPERTS, combine=combine, timeout=10.0, **options)
    dense = to_tensor(rng.random((1024, 1024), np.float32))
    found = []
    for async_op in (False, True):
        grads = []
        for number in range(ROUNDS):
            rng = np.random.default_rng([rank, number])
            batches = []
            for _ in range(2):
                x, probs = (to_tensor(rng.random((TOKENS, n), np.float32)) for n in (HIDDEN, TOPK))
                ids = to_tensor(np.argsort(rng.random((TOKENS, EXPERTS)))[:, :TOPK].astype(np.int32))
                x.stop_gradient = probs.stop_gradient = False
                batches.append((x, ids, probs))
            received = [ep.dispatch(*each, async_op=async_op) for each in batches]
            paddle.matmul(dense, dense)
            if async_op:
                received = [each.wait() for each in received]
            ends = []
            for each in received:
                rows = each.rows
                if rows is None:
                    rows = unpermute(permute(each.tokens, each.plan)[0], each.plan, each.probs)
                ends.append(ep.combine(rows * 2, each, async_op=async_op))
                paddle.matmul(dense, dense)
            outs = [each.wait() if async_op else each for each in ends]
            paddle.add_n([out.square().sum() for out in outs]).backward()
            grads += [each.grad for x, _, probs in batches for each in (x, probs)]
            del received, ends, outs, rows
        found.append([bits(each) for each in grads])
    return found[0], found[1]


@pytest.mark.gpu_only
@pytest.mark.two_gpus
@pytest.mark.parametrize(
    ("combine", "options"),
    [
        ("reduced", {"transport": "peer", "tokens_per_rank": TOKENS}),
        ("exact", {"transport": "peer", "tokens_per_rank": TOKENS}),
        ("reduced", {"transport": "peer", "tokens_per_rank": TOKENS, "payload": "fp8_1x128"}),
        ("reduced", {}),
        ("exact", {}),
    ],
    ids=["peer", "peer exact", "peer float8", "alltoall", "alltoall exact"],
)
def test_exchanges_in_flight_have_the_bits_of_calls_that_wait(num_processes, combine, options):
    for rank, (expected, found) in enumerate(run(many_in_flight, num_processes, combine=combine, **options)):
        for got, value in zip(found, expected, strict=True):
            assert_bits_equal(got, value, what=f"rank {rank}")
