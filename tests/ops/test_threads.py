# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Threads and processes: the size of the pool and its settings, forked workers, several Python threads at once."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_moe_ops import moe_permute, moe_unpermute, permute, route, unpermute
from paddle_moe_ops._report import num_threads
from paddle_moe_ops.testing.routing import uniform
from tests.packaging.subprocesses import ROOT, run_forked

pytestmark = [pytest.mark.long, pytest.mark.cpu_only]

T, H, E, K, A = 2000, 256, 16, 4, 8  # 8 MB of rows
TIMEOUT = 600  # seconds, ends a hang


def digest(seed: int) -> str:
    """Every operator forward and backward on one problem, as a hash of all bits."""
    rng = np.random.default_rng(seed)
    ids = paddle.to_tensor(uniform(rng, T, K, E))
    x, d_out = (paddle.to_tensor(rng.standard_normal((T, H), np.float32)) for _ in range(2))
    probs = paddle.to_tensor(rng.random((T, K), np.float32))
    x.stop_gradient = probs.stop_gradient = False
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    rows, _ = permute(x, plan)
    unzipped, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, E, None, A)
    outputs = [
        unpermute(rows, plan),
        unpermute(rows, plan, plan.row_probs),
        unpermute(rows, plan, probs),
        moe_unpermute(unzipped, rowmap, ids, row_probs, T, E, using_weighted_combine=True)[0],
    ]
    paddle.autograd.backward(outputs, [d_out] * len(outputs))  # paddle.grad may not run in two threads at once
    values = [*plan[:10], rows, unzipped, rowmap, row_probs, *outputs, x.grad, probs.grad]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def number_of_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_started_by_an_operator() -> int:
    """The workers of the pool, in a process that has not used the operators yet."""
    x = paddle.ones([64, 1 << 16])  # 16 MB: a thread is woken for each MB
    plan = route(paddle.zeros([64, 1], "int32"), num_experts=1)
    before = number_of_threads()
    permute(x, plan)
    return number_of_threads() - before


def report() -> dict[str, Any]:
    """The pool's size as the library says and as the threads that it starts show, and the results."""
    return {"pool": num_threads(), "workers": threads_started_by_an_operator(), "digest": digest(0)}


def in_new_process(call: str, env: Mapping[str, str]) -> Any:
    """The result of a function of this module in a process that has not imported the package before."""
    code = f"import json\nfrom tests.ops import test_threads\nprint(json.dumps(test_threads.{call}))"
    done = run_forked(code, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone(place) -> str:
    """The results of a process whose pool is one thread."""
    answer = in_new_process("report()", {"PADDLE_MOE_OPS_NUM_THREADS": "1"})
    assert (answer["pool"], answer["workers"]) == (1, 0)
    return answer["digest"]


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        pytest.param({"PADDLE_MOE_OPS_NUM_THREADS": "2"}, 2, marks=pytest.mark.slow),
        ({"PADDLE_MOE_OPS_NUM_THREADS": "5", "OMP_NUM_THREADS": "2"}, 5),
        ({"OMP_NUM_THREADS": "3"}, 3),
        pytest.param({"OMP_NUM_THREADS": "1"}, 1, marks=pytest.mark.slow),
        ({}, None),
    ],
    ids=lambda value: " ".join(f"{name}={text}" for name, text in value.items()) if isinstance(value, dict) else "",
)
def test_variables_set_the_size_of_the_pool_and_no_bit_of_the_results(env, threads, alone):
    answer = in_new_process("report()", env)
    if threads is None:  # what this machine has, or a quota of a container grants (tests/core/test_cpu_quota.py)
        threads = answer["pool"]
        assert 1 <= threads <= len(os.sched_getaffinity(0))
    assert answer == {"pool": threads, "workers": threads - 1, "digest": alone}


class Digests(paddle.io.Dataset):
    """Calls the operators where the items are made: in the workers of a DataLoader."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> np.ndarray:
        values = bytes([threads_started_by_an_operator()]) + bytes.fromhex(digest(index))
        return np.frombuffer(values, np.uint8).astype(np.int32)


def load_in_workers() -> dict[str, Any]:
    """Uses the operators, then has two forked workers use them, then uses them again."""
    before = [digest(index) for index in range(len(Digests()))]
    loader = paddle.io.DataLoader(Digests(), batch_size=None, num_workers=2, use_shared_memory=False, timeout=TIMEOUT)
    items = [np.asarray(item).reshape(-1).astype(np.uint8).tobytes() for item in loader]
    return {
        "before": before,
        "in workers": [item[1:].hex() for item in items],
        "threads started by workers": sum(item[0] for item in items),
        "after": [digest(index) for index in range(len(Digests()))],
    }


def test_forked_workers_have_pools_of_their_own(place):
    answer = in_new_process("load_in_workers()", {"PADDLE_MOE_OPS_NUM_THREADS": "3"})
    assert answer["in workers"] == answer["before"] == answer["after"]
    assert answer["threads started by workers"] == 2 * 2  # once in each of two workers


def test_several_python_threads_at_once(place):
    expected = [digest(seed) for seed in range(3)]
    start = threading.Barrier(3)

    def several(seed: int) -> list[str]:
        start.wait()
        return [digest(seed) for _ in range(4)]

    with ThreadPoolExecutor(3) as executor:
        for seed, results in enumerate(executor.map(several, range(3))):
            assert results == [expected[seed]] * 4
