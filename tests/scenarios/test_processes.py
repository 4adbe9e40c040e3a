# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Several processes and threads: data parallelism, workers of a DataLoader, two models trained at once."""

from __future__ import annotations

import threading

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_moe_ops import permute, reference, route
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.distributed import processes

from .data_parallel import PARTS, gradients, gradients_of_rank
from .test_training import BLOCK_TYPES, BLOCKS, assert_close, batch_of, make_net


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, np.ndarray]]:
    """Gradients of two processes."""
    return processes.run(gradients_of_rank, 2, "gloo")


@pytest.mark.cpu_only
@pytest.mark.parametrize("block", BLOCK_TYPES)
@pytest.mark.parametrize("label", PARTS)
def test_data_parallel_gradients_are_the_mean_on_every_rank(block, label, of_ranks, place):
    start = f"{block.__name__}/{label}/"
    first, second = ({name: each for name, each in rank.items() if name.startswith(start)} for rank in of_ranks)
    alone = [gradients(make_net(block), part) for part in PARTS[label]]
    mean = {start + name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]}
    assert_close(first, mean)
    for name, gradient in first.items():
        assert_bits_equal(second[name], gradient, what=name)


T, E, K = 40_000, 64, 8


class Routings(paddle.io.Dataset):
    """Ids of many tokens, so that routing them starts the threads of the pool."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.argsort(np.random.default_rng(index).random((T, E), np.float32))[:, :K].astype(np.int32)


def route_batch(samples):
    """For collate_fn: the plan of a batch, as arrays."""
    plan = route(paddle.to_tensor(np.concatenate(samples), place=paddle.CPUPlace()), num_experts=E)
    return [plan.row_to_token.numpy(), plan.expert_offsets.numpy()]


@pytest.mark.cpu_only
def test_workers_of_a_loader_route_after_their_parent_did(place):
    dataset = Routings()
    expected = [reference.route(dataset[index], num_experts=E) for index in range(4)]
    ids = paddle.to_tensor(dataset[0])
    permute(paddle.ones([T, 16]), route(ids, num_experts=E))  # the parent has threads that no worker inherits
    loader = paddle.io.DataLoader(dataset, batch_size=1, num_workers=2, collate_fn=route_batch)
    for (row_to_token, offsets), plan in zip(loader, expected, strict=True):
        assert_bits_equal(row_to_token, plan.row_to_token)
        assert_bits_equal(offsets, plan.expert_offsets)


def train(net, x, labels):
    optimizer = paddle.optimizer.SGD(0.2, parameters=net.parameters())  # AdamW would magnify the last bits
    for _ in range(10):
        F.cross_entropy(net(x), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
    return {name: parameter.numpy() for name, parameter in net.named_parameters()}


@BLOCKS
def test_two_threads_train_their_models_as_if_they_were_alone(block, rng, place):
    batches = [batch_of(rng, place) for _ in range(2)]
    alone = [train(make_net(block, seed), *batch) for seed, batch in enumerate(batches)]
    nets, together = [make_net(block, seed) for seed in range(2)], [None, None]
    barrier = threading.Barrier(2)

    def run(index):
        barrier.wait()
        together[index] = train(nets[index], *batches[index])

    threads = [threading.Thread(target=run, args=[index]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, expected in zip(together, alone, strict=True):
        assert_close(got, expected)
