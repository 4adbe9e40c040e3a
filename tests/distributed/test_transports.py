# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Transports move lines of any dtype to the ranks they are for."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle.distributed.communication.group import Group

from paddle_moe_ops.backends.arrays import to_numpy, to_tensor
from paddle_moe_ops.expert_parallel import transports
from paddle_moe_ops.expert_parallel.alltoall import _read
from paddle_moe_ops.expert_parallel.symmetric_memory import BufferShape, allocate, granularity
from paddle_moe_ops.expert_parallel.transports import AllToAll, Alone, Scatters, transport_for
from paddle_moe_ops.testing.equality import assert_bits_equal

from .problems import on_this_device, step_of
from .processes import WORDS, run
from .test_expert_parallel_errors import caught

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8"]
SHAPES = [(3,), (2, 2), (1,), (0,)]  # of a line
COUNTS = {
    2: np.array([[2, 5], [0, 1]]),
    3: np.array([[0, 0, 0], [4, 0, 63], [1, 1, 1]]),
    4: np.zeros((4, 4), np.int64),
    8: np.where(np.arange(64) % 3 == 1, np.arange(64), 0).reshape(8, 8),
}
SIZES_OF_GROUPS = [pytest.param(size, id=WORDS[size], marks=[pytest.mark.slow] * (size > 2)) for size in COUNTS]


def lines(source: int, target: int, count: int, shape: tuple[int, ...]) -> NDArray:
    """Bytes that say where they come from and go to."""
    return np.random.default_rng([source, target]).integers(0, 100, (count, *shape))


def exchanged(counts: NDArray) -> list[NDArray]:
    rank, size = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    group = paddle.distributed.get_group(0)
    transport = transport_for("auto", group, 60.0)
    assert isinstance(transport, Scatters if paddle.get_device() == "cpu" else AllToAll)
    arrived = []
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = [lines(rank, other, counts[rank, other], shape) for other in range(size)]
            payload = paddle.to_tensor(np.concatenate(parts).astype(np.float32)).astype(dtype)
            splits = counts[rank].tolist(), counts[:, rank].tolist()
            with on_this_device():
                arrived.append(to_numpy(transport.exchange(payload, *splits, step_of(group))))
    return arrived


@pytest.mark.parametrize("backend", ["gloo", "custom"])
@pytest.mark.parametrize("size", SIZES_OF_GROUPS)
def test_lines_arrive_in_the_order_of_ranks(size, backend, custom_backend):
    counts = COUNTS[size]
    ranks = run(exchanged, size, backend=backend if backend == "gloo" else custom_backend, counts=counts)
    for rank, arrived in enumerate(ranks):
        given = iter(arrived)
        for dtype in DTYPES:
            for shape in SHAPES:
                parts = [lines(other, rank, counts[other, rank], shape) for other in range(size)]
                expected = to_numpy(to_tensor(np.concatenate(parts).astype(np.float32)).astype(dtype))
                assert_bits_equal(next(given), expected, what=f"{dtype} {shape} at rank {rank}")


def test_alone_the_payload_is_copied():
    payload = paddle.ones([2, 3])
    copy = Alone().exchange(payload, [2], [2], step_of(Group(0, -1, [0])))
    payload.zero_()
    assert copy.sum() == 6


class Collectives:
    """Stands in for `paddle.distributed.alltoall_single`: every rank sends what this one sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dtypes: list[str] = []
        self.error: Exception | None = None
        monkeypatch.setattr(paddle.distributed, "alltoall_single", self.run)
        monkeypatch.setattr(transports.core, "create_or_get_global_tcp_store", self.no_store)

    def run(self, out: paddle.Tensor, lines: paddle.Tensor, **_: Any) -> None:
        self.dtypes.append(lines.dtype.name)
        if self.error is not None:
            raise self.error
        paddle.assign(lines, out)

    def no_store(self) -> None:
        raise RuntimeError("no store")


def test_lines_of_a_step_that_the_host_has_compared_travel_without_codes(monkeypatch):
    collectives, group = Collectives(monkeypatch), Group(0, -1, [0, 1])
    transport, step = AllToAll(group, 60.0), step_of(group)
    for is_checked, dtypes in ((False, ["INT64", "UINT8"]), (False, ["UINT8"]), (True, ["UINT8"])):
        step.is_checked = is_checked
        if is_checked:
            step.codes = None
        arrived = transport.exchange(paddle.full([3, 2], 7.0), [1, 2], [1, 2], step)
        assert arrived.tolist() == [[7.0, 7.0]] * 3
        assert collectives.dtypes == dtypes
        collectives.dtypes.clear()


@pytest.mark.parametrize("what", ["lines", "codes", "numbers"])
def test_a_failed_transfer_names_the_ranks(what, monkeypatch):
    collectives, group = Collectives(monkeypatch), Group(0, -1, [0, 1])
    transport, step = AllToAll(group, 60.0), step_of(group)
    step.is_checked = what == "lines"

    def send() -> paddle.Tensor:
        if what == "numbers":
            return transport.exchange_numbers(paddle.ones([2, 3], "int32"), step)
        return transport.exchange(paddle.ones([2, 3]), [1, 1], [1, 1], step)

    for error, reason in (
        (RuntimeError("at gloo:\nreset by peer\n\n"), "reset by peer"),
        (OSError(), "no reason given"),
    ):
        collectives.error = error
        others = "the other ranks of [0, 1], one of which may have ended or failed"
        text = caught(send)
        assert text == f"RuntimeError: ExpertParallel: rank 0 could not exchange data with {others}: {reason}"


def test_numbers_are_read_with_the_codes_of_earlier_passes():
    numbers = np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4)
    step = step_of(Group(0, -1, [0, 1, 2]))
    call = step.call._replace(unread=[])
    good, bad = [step.code()] * 3, [step.code(), step.code() + 1, step.code()]
    call.unread.extend((step, paddle.to_tensor(good, "int64")) for _ in range(2))
    np.testing.assert_array_equal(_read(paddle.to_tensor(numbers), call), numbers)
    assert call.unread == []
    np.testing.assert_array_equal(_read(paddle.to_tensor(numbers), call), numbers)
    for codes in ([good, bad], [bad, good]):
        call.unread.extend((step, paddle.to_tensor(each, "int64")) for each in codes)
        with pytest.raises(RuntimeError, match="all ranks must make the same calls in the same order"):
            _read(paddle.to_tensor(numbers), call)
        assert call.unread == []


def files_before_and_after_windows() -> list[int]:
    group, place = paddle.distributed.get_group(0), paddle.CPUPlace()
    found = [len(os.listdir("/proc/self/fd"))]
    page = granularity(place)
    for _ in range(3):
        views = allocate(group, paddle.zeros([1]), BufferShape(page, 2, page // 4, paddle.int32))
        views.peers[1, :2] = paddle.to_tensor([7, group.rank], "int32")
        paddle.distributed.barrier()
        if group.rank == 1:
            assert views.arrived[0, :2].tolist() == [7, 0]
    found.append(len(os.listdir("/proc/self/fd")))
    return found


@pytest.mark.cpu_only
def test_shared_memory_leaves_no_files_open():
    for before, after in run(files_before_and_after_windows, 2):
        assert after <= before
