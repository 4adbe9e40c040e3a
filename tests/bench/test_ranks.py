# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of peers between GPUs: a process for each rank, ended if one fails or hangs; without Paddle."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from benchmarks.expert_parallel.ranks import in_processes

PLENTY_S = 300


def worker(rank, ranks, address, options):
    assert ranks == 2
    assert address.startswith("tcp://127.0.0.1:")
    if rank == options.get("raises"):
        raise ValueError("no such shape")
    if rank == options.get("hangs"):
        time.sleep(2 * PLENTY_S)
    if rank == options.get("exits"):
        sys.exit(3)
    return [{"what": "a", "us": 1.0 + rank}, {"what": "b", "us": 2.0 - rank}]


def test_each_line_is_that_of_the_slowest_rank():
    assert in_processes(worker, 2, PLENTY_S, {}) == [{"what": "a", "us": 2.0}, {"what": "b", "us": 2.0}]


@pytest.mark.parametrize("other", [{}, {"hangs": 0}], ids=["others end", "others hang"])
def test_a_rank_that_fails_ends_all_with_its_reason(other):
    (line,) = in_processes(worker, 2, PLENTY_S, {"raises": 1, **other})
    assert line == {"failed": "rank 1: ValueError: no such shape"}


def test_a_rank_that_exits_has_failed():
    (line,) = in_processes(worker, 2, PLENTY_S, {"exits": 0})
    assert line == {"failed": "rank 0: SystemExit: 3"}


def test_a_rank_that_hangs_is_ended():
    assert in_processes(worker, 2, 3, {"hangs": 1}) == [{"failed": "no end after 3 s"}]


def test_modules_that_pytorch_benchmarks_share_do_not_import_paddle():
    modules = "benchmarks.expert_parallel.ranks, benchmarks.expert_parallel.shapes, benchmarks.spread"
    code = f"import sys, {modules}; print({{'paddle', 'paddle_moe_ops'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
