# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Groups on streams of the user: each rank may reach them in another order."""

from __future__ import annotations

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
