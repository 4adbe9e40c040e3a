# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Threads and processes change nothing: the same bits for any number of threads, callers and forks."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from paddle_moe_ops import reference

from ..reference.cases import assert_same_bits, assert_same_numbers
from . import workload
from .binding import Core
from .cases import SMALL, make_ids, make_problem
from .conftest import CHOSEN_LIBRARY, LIBRARY
from .inputs import LARGE
from .operators.route import route

pytestmark = [pytest.mark.long, pytest.mark.cpu_only]

# A sanitizer sees in two runs what it sees in ten.
RUNS = [2] if CHOSEN_LIBRARY else [3, pytest.param(10, marks=pytest.mark.slow)]
# All operators share a pool of threads, so a fork is tried with three of them.
FORKED = "route", "permute", "unpermute"
TIMEOUT_SECONDS = 600


@pytest.fixture
def default_threads(core: Core) -> Iterator[None]:
    """The number of threads is process-wide: it is put back."""
    yield
    core.set_num_threads(0)


@pytest.fixture(scope="module")
def serial_bits(core: Core) -> dict[str, list[bytes]]:
    return {name: workload.bits(run(core, 1)) for name, run in workload.OPERATORS.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("num_threads", [2, 5, 16])
@pytest.mark.parametrize("operator", workload.OPERATORS)
def test_runs_repeat_bit_for_bit(
    core: Core, serial_bits: dict[str, list[bytes]], operator: str, num_threads: int, runs: int
) -> None:
    for _ in range(runs):
        assert workload.bits(workload.OPERATORS[operator](core, num_threads)) == serial_bits[operator]


def test_shared_work_equals_the_oracle(core: Core) -> None:
    for name, array in route(core, LARGE.routed, num_threads=4).items():
        plan = LARGE.routed.plan
        assert_same_bits(array, reference.plan_to_rowmap(plan) if name == "rowmap" else getattr(plan, name))
    plan, x, rows = LARGE.plan, LARGE.x, LARGE.rows
    scale = x[:, :3].astype(np.float32)
    run = workload.OPERATORS
    for actual, expected in zip(run["permute"](core, 4), reference.permute(x, plan, scale), strict=True):
        assert_same_bits(actual, expected)
    for actual, expected in zip(run["quantize"](core, 4)[:2], reference.permute_quantized(x, plan), strict=True):
        assert_same_bits(actual, expected)
    plain, weighted = run["unpermute"](core, 4)
    assert_same_numbers(plain, reference.unpermute(rows, plan))
    assert_same_numbers(weighted, reference.unpermute(rows, plan, LARGE.weights))


@pytest.mark.usefixtures("default_threads")
def test_process_default_gives_the_same_bits(core: Core, serial_bits: dict[str, list[bytes]]) -> None:
    for num_threads in (1, 3, 16, 0):
        core.set_num_threads(num_threads)
        for name, run in workload.OPERATORS.items():
            assert workload.bits(run(core, 0)) == serial_bits[name], name


@pytest.mark.usefixtures("default_threads")
def test_process_default_can_be_set_and_restored(core: Core) -> None:
    cores = core.num_threads()
    assert 1 <= cores <= len(os.sched_getaffinity(0))  # fewer where a container has a quota (test_cpu_quota.py)
    core.set_num_threads(cores + 3)
    assert core.num_threads() == cores + 3
    for restoring in (0, -5):
        core.set_num_threads(7)
        core.set_num_threads(restoring)
        assert core.num_threads() == cores


@pytest.mark.parametrize("num_threads", [-(2**31), -1, 2**31 - 1])
def test_any_number_of_threads_works(core: Core, num_threads: int) -> None:
    problem = make_problem(make_ids("zipf", SMALL, seed=9), SMALL.E, SMALL.A)
    maps = route(core, problem, num_threads=num_threads)
    assert_same_bits(maps["slot_to_row"], problem.plan.slot_to_row)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_several_python_threads_may_call_at_once(
    core: Core, serial_bits: dict[str, list[bytes]], num_threads: int
) -> None:
    names = [*workload.OPERATORS] * 3
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda name: workload.bits(workload.OPERATORS[name](core, num_threads)), names)
        for name, actual in zip(names, results, strict=True):
            assert actual == serial_bits[name], name


def in_forked_child(function: Callable[[], Any]) -> Any:
    """Return the function's result from a child process; a child that hangs is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(TIMEOUT_SECONDS)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(function(), pipe)
            status = 0
        finally:  # whatever happens, the child must not go on with the tests
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child failed or hung"
    return pickle.loads(answer)


def digest(core: Core, num_threads: int) -> str:
    """One number for the bits of the operators of `FORKED`."""
    return hashlib.sha256(
        b"".join(part for name in FORKED for part in workload.bits(workload.OPERATORS[name](core, num_threads)))
    ).hexdigest()


def digest_in_worker(num_threads: int) -> str:
    return digest(Core(LIBRARY), num_threads)


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def test_forked_child_works_on_with_threads_of_its_own(core: Core) -> None:
    before = digest(core, 4)
    assert in_forked_child(lambda: [digest(core, n) for n in (4, 1)]) == [before, before]
    assert digest(core, 4) == before  # the parent's threads are still there


def test_child_of_a_child_works(core: Core) -> None:
    expected = digest(core, 3)
    assert in_forked_child(lambda: (digest(core, 3), in_forked_child(lambda: digest(core, 3)))) == (expected, expected)


def test_fork_while_other_threads_are_calling(core: Core) -> None:
    expected = digest(core, 4)
    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(digest, core, 4) for _ in range(4)]
        assert in_forked_child(lambda: digest(core, 4)) == expected
        assert {future.result() for future in busy} == {expected}


def test_worker_processes_give_the_same_bits(core: Core) -> None:
    expected = digest(core, 4)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        answers = pool.map_async(digest_in_worker, [1, 2, 4, 16]).get(TIMEOUT_SECONDS)
    assert set(answers) == {expected}


def test_as_many_threads_join_as_the_work_is_worth(core: Core) -> None:
    def started_by(run: Callable[[], object]) -> int:
        before = threads_of_this_process()
        run()
        return threads_of_this_process() - before

    small = make_problem(make_ids("zipf", SMALL, seed=10), SMALL.E, SMALL.A)

    def count() -> list[int]:
        return [
            started_by(lambda: route(core, small, num_threads=16)),
            started_by(lambda: workload.OPERATORS["permute"](core, 1)),
            started_by(lambda: workload.OPERATORS["permute"](core, 4)),
            started_by(lambda: workload.OPERATORS["unpermute"](core, 4)),
            started_by(lambda: workload.OPERATORS["unpermute"](core, 6)),
        ]

    assert in_forked_child(count) == [0, 0, 3, 0, 2]
