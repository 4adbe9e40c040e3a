# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Collectives of paddle.distributed on custom devices: the stub without a GPU, the rig with NCCL on GPUs."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.backends.arrays import to_numpy, to_tensor
from tests.distributed.processes import run

DTYPES = ["float32", "bfloat16", "int32", "int64", "uint8"]
H = 5
# Rows from rank i to rank j, of four ranks.
SPLITS = {
    "even": np.full((4, 4), 3),
    "uneven": np.array([[1, 7, 2, 3], [5, 2, 4, 1], [3, 3, 6, 8], [2, 9, 1, 4]]),
    "empty parts": np.array([[0, 3, 0, 1], [2, 0, 5, 0], [0, 0, 4, 2], [1, 0, 0, 0]]),
    "one receives nothing": np.array([[0, 2, 3, 1], [0, 5, 0, 2], [0, 1, 1, 4], [0, 3, 2, 2]]),
    "one sends nothing": np.array([[3, 1, 2, 2], [0, 0, 0, 0], [4, 1, 0, 2], [2, 2, 5, 1]]),
    "nothing at all": np.zeros((4, 4), np.int64),
}
SPLITS = {name: np.tile(splits, (2, 2)) for name, splits in SPLITS.items()}  # for up to 8 ranks


def values(rank: int, rows: int, dtype: str) -> NDArray:
    """Rows of a rank: small whole numbers, which every dtype holds and adds exactly."""
    return np.random.default_rng([rank, rows]).integers(0, 9, (rows, H)).astype(dtype)


def tensor(rank: int, rows: int, dtype: str) -> paddle.Tensor:
    return to_tensor(values(rank, rows, dtype))


def filled(rows: int, dtype: str) -> paddle.Tensor:
    """An output tensor for a collective, filled with 77."""
    return to_tensor(np.full((rows, H), 77).astype(dtype))


def here() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def place_of_new_tensors():
    return str(paddle.ones([3]).place), str(filled(2, "bfloat16").place)


def test_tensors_are_on_the_device_of_the_rank(num_processes, custom_backend):
    device = {"stub": "stub_rig", "cuda_rig": "cuda_rig"}[custom_backend]
    expected = [(f"Place({device}:{rank})",) * 2 for rank in range(num_processes)]
    assert run(place_of_new_tensors, num_processes, custom_backend) == expected


def all_to_all_single(splits, dtype):
    rank, _ = here()
    x, out = tensor(rank, splits[rank].sum(), dtype), filled(splits[:, rank].sum(), dtype)
    dist.alltoall_single(out, x, splits[rank].tolist(), splits[:, rank].tolist())
    return to_numpy(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPLITS)
def test_alltoall_single_with_splits(name, dtype, num_processes, custom_backend):
    splits = SPLITS[name][:num_processes, :num_processes]
    starts = np.cumsum(splits, axis=1) - splits
    sent = [values(rank, splits[rank].sum(), dtype) for rank in range(num_processes)]
    for rank, got in enumerate(run(all_to_all_single, num_processes, custom_backend, splits=splits, dtype=dtype)):
        parts = [sent[i][starts[i, rank] : starts[i, rank] + splits[i, rank]] for i in range(num_processes)]
        np.testing.assert_array_equal(got, np.concatenate(parts), strict=True)


def all_to_all_single_without_splits(dtype):
    rank, ranks = here()
    out = filled(3 * ranks, dtype)
    dist.alltoall_single(out, tensor(rank, 3 * ranks, dtype))
    return to_numpy(out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_alltoall_single_without_splits_sends_equal_parts(dtype, num_processes, custom_backend):
    sent = [values(rank, 3 * num_processes, dtype) for rank in range(num_processes)]
    for rank, got in enumerate(run(all_to_all_single_without_splits, num_processes, custom_backend, dtype=dtype)):
        np.testing.assert_array_equal(got, np.concatenate([each[3 * rank : 3 * rank + 3] for each in sent]))


def float8_as_bytes():
    rank, ranks = here()
    x, out = tensor(rank, 2 * ranks, "float8_e4m3fn"), filled(2 * ranks, "float8_e4m3fn")
    dist.alltoall_single(out.view("uint8"), x.view("uint8"))
    return to_numpy(out)


def test_float8_travels_as_bytes(num_processes, custom_backend):
    sent = [values(rank, 2 * num_processes, "float8_e4m3fn") for rank in range(num_processes)]
    for rank, got in enumerate(run(float8_as_bytes, num_processes, custom_backend)):
        np.testing.assert_array_equal(got, np.concatenate([each[2 * rank : 2 * rank + 2] for each in sent]))


def all_to_all_of_lists(splits, dtype):
    rank, ranks = here()
    ins = [tensor(10 * rank + to, splits[rank, to], dtype) for to in range(ranks)]
    outs = [filled(splits[source, rank], dtype) for source in range(ranks)]
    dist.alltoall(outs, ins)
    return [to_numpy(out) for out in outs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["even", "uneven"])
def test_alltoall(name, dtype, num_processes, custom_backend):
    splits = SPLITS[name][:num_processes, :num_processes]
    for rank, got in enumerate(run(all_to_all_of_lists, num_processes, custom_backend, splits=splits, dtype=dtype)):
        for source in range(num_processes):
            np.testing.assert_array_equal(got[source], values(10 * source + rank, splits[source, rank], dtype))


def all_reduce(dtype, op):
    rank, _ = here()
    x = tensor(rank, 7, dtype)
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    return to_numpy(x)


REDUCTIONS = {"SUM": np.sum, "MAX": np.max, "MIN": np.min, "PROD": np.prod}


def reduced(op: str, parts: list[NDArray]) -> NDArray:
    return REDUCTIONS[op](np.stack(parts).astype(np.float64), axis=0).astype(parts[0].dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int32", "int64", "uint8", "int8"])
@pytest.mark.parametrize("op", ["SUM", "MAX", "MIN"])
def test_all_reduce(op, dtype, num_processes, custom_backend):
    expected = reduced(op, [values(rank, 7, dtype) for rank in range(num_processes)])
    for got in run(all_reduce, num_processes, custom_backend, dtype=dtype, op=op):
        np.testing.assert_array_equal(got, expected, strict=True)


@pytest.mark.parametrize("dtype", ["float32", "int32"])  # narrow ones do not hold the products
def test_all_reduce_of_products(dtype, num_processes, custom_backend):
    expected = reduced("PROD", [values(rank, 7, dtype) for rank in range(num_processes)])
    for got in run(all_reduce, num_processes, custom_backend, dtype=dtype, op="PROD"):
        np.testing.assert_array_equal(got, expected, strict=True)


def reduce_to(root, dtype):
    rank, _ = here()
    x = tensor(rank, 7, dtype)
    dist.reduce(x, root)
    return to_numpy(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce(dtype, num_processes, custom_backend):
    root = num_processes - 1
    got = run(reduce_to, num_processes, custom_backend, root=root, dtype=dtype)[root]
    expected = reduced("SUM", [values(rank, 7, dtype) for rank in range(num_processes)])
    np.testing.assert_array_equal(got, expected, strict=True)


def broadcast(root, dtype):
    rank, _ = here()
    x = tensor(rank, 7, dtype)
    dist.broadcast(x, root)
    return to_numpy(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(dtype, num_processes, custom_backend):
    for root in (0, num_processes - 1):
        for got in run(broadcast, num_processes, custom_backend, root=root, dtype=dtype):
            np.testing.assert_array_equal(got, values(root, 7, dtype))


def all_gather(dtype):
    outs: list[paddle.Tensor] = []
    dist.all_gather(outs, tensor(here()[0], 7, dtype))
    return [to_numpy(out) for out in outs]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather(dtype, num_processes, custom_backend):
    expected = np.stack([values(rank, 7, dtype) for rank in range(num_processes)])
    for got in run(all_gather, num_processes, custom_backend, dtype=dtype):
        np.testing.assert_array_equal(got, expected)


def reduce_scatter(dtype):
    rank, ranks = here()
    out = filled(3, dtype)
    dist.reduce_scatter(out, tensor(rank, 3 * ranks, dtype))
    return to_numpy(out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter(dtype, num_processes, custom_backend):
    total = reduced("SUM", [values(rank, 3 * num_processes, dtype) for rank in range(num_processes)])
    for rank, got in enumerate(run(reduce_scatter, num_processes, custom_backend, dtype=dtype)):
        np.testing.assert_array_equal(got, total[3 * rank : 3 * rank + 3])


def around_the_ring(dtype):
    """To the next rank; rank 0 sends first, the others receive first."""
    rank, ranks = here()
    x, out = tensor(rank, 7, dtype), filled(7, dtype)
    steps = [lambda: dist.send(x, (rank + 1) % ranks), lambda: dist.recv(out, (rank - 1) % ranks)]
    for step in steps if rank == 0 else reversed(steps):
        step()
    return to_numpy(out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_send_and_recv(dtype, num_processes, custom_backend):
    results = run(around_the_ring, num_processes, custom_backend, dtype=dtype)
    for rank, got in enumerate(results):
        np.testing.assert_array_equal(got, values((rank - 1) % num_processes, 7, dtype))


def all_to_all_in_a_group(ranks):
    group = dist.new_group(ranks)
    if here()[0] not in ranks:
        return None
    x, out = tensor(here()[0], 4, "int64"), filled(4, "int64")
    dist.alltoall_single(out, x, group=group)
    return to_numpy(out)


def test_a_group_of_some_ranks(num_processes, custom_backend):
    ranks = [0, num_processes - 1]
    results = run(all_to_all_in_a_group, num_processes, custom_backend, ranks=ranks)
    sent = [values(rank, 4, "int64") for rank in ranks]
    for index, rank in enumerate(ranks):
        np.testing.assert_array_equal(results[rank], np.concatenate([each[2 * index : 2 * index + 2] for each in sent]))
    assert all(results[rank] is None for rank in range(num_processes) if rank not in ranks)


def two_tasks():
    rank, ranks = here()
    first, second, total = tensor(rank, ranks, "float32"), filled(ranks, "float32"), tensor(rank, 3, "float32")
    tasks = [dist.alltoall_single(second, first, sync_op=False), dist.all_reduce(total, sync_op=False)]
    for task in tasks:
        task.wait()
    return to_numpy(second), to_numpy(total)


def test_tasks_that_are_waited_for_later(num_processes, custom_backend):
    sent = [values(rank, num_processes, "float32") for rank in range(num_processes)]
    total = reduced("SUM", [values(rank, 3, "float32") for rank in range(num_processes)])
    for rank, (got, got_total) in enumerate(run(two_tasks, num_processes, custom_backend)):
        np.testing.assert_array_equal(got, np.stack([each[rank] for each in sent]))
        np.testing.assert_array_equal(got_total, total)
