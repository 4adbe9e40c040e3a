# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Differences of the stub device from NCCL: ranks that disagree get errors, and sends do not wait to be received."""

from __future__ import annotations

import os
import signal

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_moe_ops.backends.arrays import to_numpy
from tests.distributed import processes
from tests.distributed.processes import run

pytestmark = pytest.mark.cpu_only

MANY = 3_000_001  # 12 MB: more than a socket holds


def of_other_sizes():
    dist.all_reduce(paddle.ones([2 + dist.get_rank()]))


def of_other_splits():
    splits = [1, 2 + dist.get_rank()]
    dist.alltoall_single(paddle.zeros([sum(splits)]), paddle.ones([sum(splits)]), splits, splits)


def other_collectives():
    if dist.get_rank() == 0:
        dist.all_reduce(paddle.ones([2]))
    else:
        dist.broadcast(paddle.ones([2]), 1)
        dist.all_gather([], paddle.ones([2]))


def with_one_that_ended():
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(paddle.zeros([2]), 1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (of_other_sizes, "all_reduce: rank 0: expected 8 bytes of all_reduce from rank 1, got 12 of all_reduce"),
        pytest.param(
            *(of_other_splits, "all_to_all: rank 0: expected 8 bytes of all_to_all from rank 1, got 4 of all_to_all"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(other_collectives, "all_reduce: rank 0: expected 8 bytes of all_reduce from rank 1, got 8 of broadcast"),
            marks=pytest.mark.slow,
        ),
        (with_one_that_ended, "recv: rank 0: rank 1 has ended"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_disagree_get_an_error(function, message, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 1)
    with pytest.raises(RuntimeError, match=message):
        run(function, 2, "stub")


def all_send_first():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, out = paddle.full([MANY], float(rank)), paddle.zeros([MANY])
    dist.send(x, (rank + 1) % ranks)
    dist.recv(out, (rank - 1) % ranks)
    return np.unique(out.numpy()).tolist()


def batch():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, out = paddle.full([MANY], float(rank)), paddle.zeros([MANY])
    sends, receives = dist.P2POp(dist.isend, x, (rank + 1) % ranks), dist.P2POp(dist.irecv, out, (rank - 1) % ranks)
    for task in dist.batch_isend_irecv([sends, receives]):
        task.wait()
    return np.unique(out.numpy()).tolist()


def sends_in_two_groups():
    """Rank 0 sends in one group, and rank 1 in another."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.barrier(group)  # connects them, which takes all ranks
    out = paddle.zeros([MANY])
    dist.send(paddle.full([MANY], float(rank)), 1 - rank, group=groups[rank])
    dist.recv(out, 1 - rank, group=groups[1 - rank])
    return np.unique(out.numpy()).tolist()


@pytest.mark.parametrize(
    ("function", "count"),
    [
        pytest.param(all_send_first, 3, marks=pytest.mark.slow),
        pytest.param(batch, 3, marks=pytest.mark.slow),
        *((all_send_first, 2), (batch, 2), (sends_in_two_groups, 2)),
    ],
)
def test_all_ranks_may_send_first(function, count):
    assert run(function, count, "stub") == [[float((rank - 1) % count)] for rank in range(count)]


def strided_copies():
    x = paddle.arange(24).reshape([2, 3, 4]).astype("float32")
    y = x.clone()
    y[:, 1:, ::2] = x[:, :2, 1::2]
    turned = x.transpose([2, 0, 1])
    assert not turned.is_contiguous()
    return [each.numpy() for each in (turned.contiguous(), x[:, 1, 1:].contiguous(), y)]


def test_strided_tensors():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    y = x.copy()
    y[:, 1:, ::2] = x[:, :2, 1::2]
    for copies in run(strided_copies, 2, "stub"):
        for got, expected in zip(copies, (x.transpose(2, 0, 1), x[:, 1, 1:], y), strict=True):
            np.testing.assert_array_equal(got, expected, strict=True)


def places_of_results():
    x, w = paddle.zeros([0, 5], "float32"), paddle.ones([5, 3], "bfloat16")
    x.stop_gradient = w.stop_gradient = False  # without rows, matmul has a gradient of w only beside one of x
    y = x.astype("bfloat16") @ w + 1.0
    paddle.concat([y, w]).sum().backward()
    return [str(each.place) for each in (x, y, w[1:3], w.grad)], to_numpy(w.grad)


def test_tensors_without_rows_stay_on_the_device():
    for rank, (places, gradient) in enumerate(run(places_of_results, 2, "stub")):
        assert places == [f"Place(stub_rig:{rank})"] * 4
        np.testing.assert_array_equal(gradient, np.ones((5, 3), gradient.dtype))
