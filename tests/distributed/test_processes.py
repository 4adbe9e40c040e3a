# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The test processes: results return by rank, and failures are reported."""

from __future__ import annotations

import os
import signal

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from tests.distributed import processes

# Slow: each failure ends the processes, so that new ones start.
pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]


def rank_and_sum(start):
    x = paddle.to_tensor(np.array([start + dist.get_rank()], np.float32))
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.numpy()


def process_id():
    return os.getpid()


def raise_on_one_rank():
    if dist.get_rank() == 1:
        raise LookupError("nothing there")
    dist.recv(paddle.zeros([1]), 1)


def die_on_one_rank():
    print("about to die", flush=True)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_nothing():
    dist.recv(paddle.zeros([1]), 1 - dist.get_rank())


@pytest.mark.parametrize("count", [3, 2])
def test_results_come_back_by_rank(count):
    results = processes.run(rank_and_sum, count, start=5)
    assert results == [(rank, count, [sum(range(5, 5 + count))]) for rank in range(count)]


def test_processes_serve_several_calls():
    first, second = (processes.run(process_id, 2) for _ in range(2))
    assert first == second
    assert os.getpid() not in first


def test_an_exception_is_reported_with_its_traceback_and_the_stack_of_who_waits(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 1)
    with pytest.raises(RuntimeError) as failed:
        processes.run(raise_on_one_rank, 2)
    message = str(failed.value)
    assert "test_processes.raise_on_one_rank" in message
    assert "rank 0 did not answer" in message
    assert "rank 1 raised\nTraceback" in message
    assert "LookupError: nothing there" in message
    assert 'test_processes.py", line' in message.split("rank 1 raised")[0]  # where rank 0 waits
    test_results_come_back_by_rank(2)  # in new processes


def test_a_death_is_reported_with_what_was_printed(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 1)
    with pytest.raises(RuntimeError, match=r"rank 0 died: exit code -9\n  \| about to die"):
        processes.run(die_on_one_rank, 2)


def test_a_hang_ends_after_the_timeout_and_names_all_ranks(monkeypatch):
    processes.run(process_id, 2)  # the start has its own time
    monkeypatch.setattr(processes, "TIMEOUT_S", 2)
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 did not answer.*wait_for_nothing.*rank 1 did not answer"):
        processes.run(wait_for_nothing, 2)


def test_an_unknown_backend_is_an_error():
    with pytest.raises(ValueError, match="'gloo'"):
        processes.run(process_id, 2, "carrier pigeons")
