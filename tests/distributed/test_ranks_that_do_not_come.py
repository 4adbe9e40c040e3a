# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for one which ended, hangs or raised get an error that names it, whatever connects them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle.base import core

from paddle_moe_ops.expert_parallel import ExpertParallel, GradScaler, average_gradients
from paddle_moe_ops.expert_parallel.transports import Rendezvous, Scatters

from . import processes
from .problems import step_of
from .processes import Processes
from .test_average_gradients import parameter
from .test_expert_parallel_errors import caught, inputs
from .test_grad_scaler import model_and_optimizer, scaled_backward

pytestmark = pytest.mark.long

TIMEOUT_S = 3.0  # enough for ranks that come
GRACE_S = 60.0  # for the others to raise; ends a hang and judges nothing
ALL_RAISED = "tests/all raised"


class Later:
    """A collective that blocks, as NCCL has it: it returns at once, and one that fails never ends."""

    def __init__(self, collective: Callable[[], Any]) -> None:
        self._collective, self._done = collective, threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._collective()
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()


def stand_in_for_nccl() -> None:
    """Add NCCL's collectives that gloo lacks to `paddle.distributed`, and ``sync_op=False`` as NCCL has it."""
    of_paddle = paddle.distributed.all_reduce

    def all_reduce(*given: Any, sync_op: bool = True, **options: Any) -> Any:
        return of_paddle(*given, **options) if sync_op else Later(lambda: of_paddle(*given, **options))

    def alltoall_single(out: paddle.Tensor, lines: paddle.Tensor, **options: Any) -> Any:
        group = options["group"]
        even = [lines.shape[0] // group.nranks] * group.nranks
        splits = (options.get(name, even) for name in ("in_split_sizes", "out_split_sizes"))

        def exchange() -> None:
            arrived = Scatters(group, GRACE_S).exchange(lines, *splits, step_of(group))
            paddle.assign(arrived, out)

        return exchange() if options.get("sync_op", True) else Later(exchange)

    paddle.distributed.all_reduce, paddle.distributed.alltoall_single = all_reduce, alltoall_single


def dispatch(ep: ExpertParallel) -> Any:
    x, ids, probs = inputs(0)
    return ep.dispatch(x, ids, probs)


def missing(rank: int, how: str, call: str, backend: str) -> str:
    """The error on this rank of a call that one rank misses, after a call of all ranks."""
    transport = backend if backend in ("alltoall", "peer") else "auto"
    if backend in ("alltoall", "stub"):
        stand_in_for_nccl()
    me, size = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    calls: dict[str, Callable[[], Any]] = {}
    if call == "average_gradients":
        average_gradients([parameter([2])])
        calls[call] = lambda: average_gradients([parameter([2])], timeout=TIMEOUT_S)
    elif call == "GradScaler":
        model, optimizer = model_and_optimizer()
        scaler = GradScaler(timeout=TIMEOUT_S)
        scaled_backward(model, scaler, 0)
        calls[call] = lambda: scaler.step(optimizer)
    else:
        options = {"transport": transport} | ({"tokens_per_rank": 2} if transport == "peer" else {})
        dispatch(ExpertParallel(24, **options))
        ep = ExpertParallel(24, timeout=TIMEOUT_S, **options)
        received = dispatch(ep)
        calls = {"dispatch": lambda: dispatch(ep), "combine": lambda: ep.combine(received.rows, received)}
    if me != rank:
        text = caught(calls[call])
        if how == "ended":
            raise AssertionError(text)
        core.create_or_get_global_tcp_store().add(ALL_RAISED, 1)
        return text
    if how == "ended":
        os._exit(3)
    if how == "hangs":
        wait_for_others(size - 1)
    return "did not come"


def wait_for_others(count: int) -> None:
    end = time.monotonic() + GRACE_S
    while core.create_or_get_global_tcp_store().add(ALL_RAISED, 0) < count and time.monotonic() < end:
        time.sleep(0.05)


def texts_of(backend: str, size: int | None = None, **arguments: Any) -> list[str]:
    """Results, or lines of the errors, of new processes by rank; the processes end afterwards.

    Args:
        backend: of `run`, or "alltoall": gloo in place of NCCL, or "peer".
        size: number of processes; None: the tests' default.
        **arguments: of `missing`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "GRACE_S", GRACE_S)
        between = "gloo" if backend in ("alltoall", "peer") else backend
        ranks = Processes(size or size_with(backend), between)
        try:
            return ranks.call(missing, {**arguments, "backend": backend})
        except RuntimeError as failed:
            return str(failed).splitlines()
        finally:
            ranks.kill()


def size_with(backend: str) -> int:
    return 2 if backend == "cuda_rig" else 3


@pytest.fixture
def nccl(custom_backend: str) -> str:
    """NCCL, or what stands in for it: the stub has no operators."""
    return "cuda_rig" if custom_backend == "cuda_rig" else "alltoall"


@pytest.fixture(autouse=True, scope="module")
def no_others() -> None:
    processes.stop()  # most tests here make their own


def expected(function: str, size: int) -> list[str]:
    ranks = list(range(size))
    which = f"for ranks {ranks[-1:]} of {ranks}, which did not come: they ended, hang or do something else"
    return [f"RuntimeError: {function}: rank {rank} waited {TIMEOUT_S:g} s {which}" for rank in ranks[:-1]]


@pytest.mark.cpu_only
def test_a_dispatch_over_gloo_names_the_rank_that_hangs():
    texts = texts_of("gloo", rank=2, how="hangs", call="dispatch")
    assert texts == [*expected("ExpertParallel.dispatch", 3), "did not come"]


MANY = pytest.mark.parametrize("size", [4, 8], ids=["four", "eight"])


@pytest.mark.slow
@MANY
def test_of_many_ranks_a_dispatch_names_the_one_that_hangs(size, nccl):
    backends = [nccl] if nccl == "cuda_rig" else ["gloo", nccl]
    for backend in backends:
        texts = texts_of(backend, size, rank=size - 1, how="hangs", call="dispatch")
        assert texts == [*expected("ExpertParallel.dispatch", size), "did not come"]


@pytest.mark.slow
@MANY
@pytest.mark.cpu_only  # on a GPU a kernel fails, which ends what the process can do
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_of_many_ranks_that_share_memory_each_names_the_one_that_ended(size, call):
    texts = texts_of("peer", size, rank=1, how="ended", call=call)
    assert "rank 1 died: exit code 3" in texts
    told = [text for text in texts if text.startswith("AssertionError: ")]
    assert told == ["AssertionError: RuntimeError: ExpertParallel: rank 1 of the group did not answer"] * (size - 1)


def test_a_dispatch_names_the_rank_that_raised(nccl):
    texts = texts_of(nccl, rank=size_with(nccl) - 1, how="raised", call="dispatch")
    assert texts == [*expected("ExpertParallel.dispatch", size_with(nccl)), "did not come"]


@pytest.mark.slow
def test_average_gradients_names_the_rank_that_hangs(custom_backend):
    texts = texts_of(custom_backend, rank=size_with(custom_backend) - 1, how="hangs", call="average_gradients")
    assert texts == [*expected("average_gradients", size_with(custom_backend)), "did not come"]


@pytest.mark.slow
def test_loss_scaling_names_the_rank_that_takes_no_step(custom_backend):
    texts = texts_of(custom_backend, rank=size_with(custom_backend) - 1, how="hangs", call="GradScaler")
    assert texts == [*expected("GradScaler", size_with(custom_backend)), "did not come"]


@pytest.mark.slow
@pytest.mark.cpu_only
def test_a_combine_over_gloo_names_the_rank_that_hangs():
    texts = texts_of("gloo", rank=2, how="hangs", call="combine")
    assert texts == [*expected("ExpertParallel", 3), "did not come"]


@pytest.mark.slow
def test_a_dispatch_names_the_rank_that_ended(nccl):
    """Over gloo the connection tells so at once: see test_expert_parallel_errors."""
    last = size_with(nccl) - 1
    texts = texts_of(nccl, rank=last, how="ended", call="dispatch")
    assert f"rank {last} died: exit code 3" in texts
    for text in expected("ExpertParallel.dispatch", size_with(nccl)):
        assert f"AssertionError: {text}" in texts


@pytest.mark.slow
def test_the_rank_that_ended_may_be_the_one_that_keeps_the_store(nccl):
    texts = texts_of(nccl, rank=0, how="ended", call="dispatch")
    ranks = list(range(size_with(nccl)))
    assert "rank 0 died: exit code 3" in texts
    unknown = (
        f"waited {TIMEOUT_S:g} s for others of {ranks}; which of them did not come is unknown, since the store of "
        "paddle.distributed, which the process of rank 0 has, does not answer: that process may have ended"
    )
    for rank in ranks[1:]:
        assert f"AssertionError: RuntimeError: ExpertParallel.dispatch: rank {rank} {unknown}" in texts


class Never:
    """A task that no rank ends."""

    def is_completed(self) -> bool:
        return False


def wait_for_never() -> str:
    rendezvous = Rendezvous(paddle.distributed.get_group(0), TIMEOUT_S)
    return caught(lambda: rendezvous.wait("f", Never()))


def test_ranks_that_all_wait_are_told_so():
    reason = (
        f"waited {TIMEOUT_S:g} s though all ranks of [0, 1] do: they called different functions, or an exchange before "
        "failed"
    )
    assert processes.run(wait_for_never, 2) == [f"RuntimeError: f: rank {rank} {reason}" for rank in (0, 1)]


def transfer_that_one_rank_misses() -> str:
    """The error of rank 0 in a transfer of its own, after one in which both ranks failed."""
    rendezvous = Rendezvous(paddle.distributed.new_group([0, 1]), 0.1)

    def fail() -> None:
        with rendezvous.naming_ranks("f", counts=True):
            raise RuntimeError("reset by peer")

    caught(fail)
    paddle.distributed.barrier()
    return caught(fail) if paddle.distributed.get_rank() == 0 else ""


def test_a_rank_that_failed_in_an_earlier_transfer_is_named_if_it_misses_a_later_one():
    reason = "could not exchange data with ranks [1] of [0, 1], which ended or do something else: reset by peer"
    assert processes.run(transfer_that_one_rank_misses, 2)[0] == f"RuntimeError: f: rank 0 {reason}"


def bad_timeouts() -> list[str]:
    return [
        caught(lambda: ExpertParallel(4, timeout=0)),
        caught(lambda: ExpertParallel(4, timeout="long")),
        caught(lambda: ExpertParallel(4, timeout=1 + paddle.distributed.get_rank())),
        caught(lambda: average_gradients([], timeout=-1.0 if paddle.distributed.get_rank() else 1.0)),
    ]


def test_bad_timeouts_are_refused_on_every_rank():
    first, second = processes.run(bad_timeouts, 2)
    same = "the same on all ranks of the group, but got 1 on rank 0, 2 on rank 1"
    refused = [
        "ValueError: ExpertParallel: timeout must be a number of seconds from 0.001 to 1e+06, but got 0",
        "TypeError: ExpertParallel: timeout must be a number, but got str",
        f"ValueError: ExpertParallel: timeout must be {same}",
    ]
    assert first[:3] == second[:3] == refused
    assert first[3].startswith("RuntimeError: average_gradients: ranks [1] of [0, 1] raised an error")
    assert second[3].startswith("ValueError: average_gradients: timeout must be a number of seconds")
