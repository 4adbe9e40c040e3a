# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a function in several processes that paddle.distributed connects, and brings back what each returns.

The function is one of a test module, found there by name, so each process imports that module. A start takes seconds.
So processes stay until a call fails, or until others need their room: sort tests by number and backend, and leave no
state that another function would notice. A group that one makes may stay.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.distributed import stub_device
from tests.forks import Server

WORDS = {2: "two", 3: "three", 4: "four", 8: "eight"}  # how tests say how many processes they need
BACKENDS = ("gloo", "stub", "cuda_rig")
default_backend = "gloo"  # conftest.py makes it that of the device under test
ROOT = Path(__file__).resolve().parents[2]
SLOWNESS = int(os.environ.get("PADDLE_MOE_OPS_TEST_SLOWNESS", "1"))  # times as long as usual, as under a sanitizer
TIMEOUT_S = 120 * SLOWNESS  # of a start and of a call; ends a hang and judges nothing
GRACE_S = 5 * SLOWNESS  # for the other ranks, after one failed: most wait for it and never answer
SHOWN_LINES = 60  # of a failed process's output

# Even and odd ranks have other addresses and another order of sets, as processes of two machines have.
_MODULES = (
    *("paddle", "paddle_moe_ops.expert_parallel", "paddle_moe_ops.nn"),
    *("pytest", "tests.distributed.problems", __name__),  # each module with tests imports these
)
_DEVICES = {"FLAGS_selected_stub_rigs": ",".join(map(str, range(max(WORDS))))}  # Paddle reads it when it is imported
_servers = {(backend, part): Server(*_MODULES, **_DEVICES) for backend in ("gloo", "stub") for part in range(2)}
_PR_SET_PDEATHSIG = 1
MAX_WAITING = 5  # processes that wait for calls, some 300 MB each; on GPUs only those of one start
_running: dict[tuple[int, str], Processes] = {}  # the last one used is the last


def run(function: Callable[..., Any], num_processes: int, backend: str | None = None, **arguments: Any) -> list[Any]:
    """Call ``function(**arguments)`` in every process, after paddle.distributed.init_parallel_env().

    Args:
        function: a function at the top level of a module; ``paddle.distributed.get_rank()`` tells it where it runs.
        num_processes: how many processes; at least 2.
        backend: "gloo" for CPU tensors; "stub" for tensors on a custom device that is memory of the host (stub_device),
            which has the collectives that gloo misses; "cuda_rig" for a GPU per process (tools/gpu_rig). The device
            is the current one, so tensors are made there. None: `default_backend`.
        **arguments: the same for every process; they must pickle.

    Returns:
        Results of the function by rank; they must pickle, so return NumPy arrays rather than tensors.

    Raises:
        RuntimeError: a process raised, died or did not answer in time; the message has the traceback of each.
    """
    backend = backend or default_backend
    if backend not in BACKENDS:
        raise ValueError(f"run: backend must be one of {BACKENDS}, got {backend!r}")
    key = (num_processes, backend)
    processes = _running.pop(key, None)
    if processes is None:
        room = 0 if backend == "cuda_rig" else MAX_WAITING - num_processes
        while _running and sum(count for count, _ in _running) > room:
            _running.pop(next(iter(_running))).stop()
        processes = Processes(num_processes, backend)
    _running[key] = processes
    try:
        return processes.call(function, arguments)
    except (RuntimeError, OSError):
        _running.pop(key).kill()
        raise


@atexit.register
def stop() -> None:
    """End the processes that wait for calls."""
    while _running:
        _running.popitem()[1].stop()


class Processes:
    """Processes that wait for calls."""

    def __init__(self, num_processes: int, backend: str):
        # Bound until the processes end, so that no other process is given these ports. Paddle can listen on them.
        self._reserved = [reserve_port() for _ in range(num_processes + 1)]
        master, *endpoints = (f"127.0.0.1:{each.getsockname()[1]}" for each in self._reserved)
        self._logs = [os.memfd_create(f"rank {rank}") for rank in range(num_processes)]
        self._log_starts = [0] * num_processes
        self._connections, self._processes = [], []
        for rank in range(num_processes):
            ours, theirs = connection.Pipe()
            environment, files = _environment(backend, rank, master, endpoints), (theirs.fileno(), self._logs[rank])
            if backend == "cuda_rig":
                process = _start(environment, *files)
            else:
                process = _servers[backend, rank % 2].fork(environment, (__name__, "serve_in_fork"), [], files)
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        try:
            self._answers(f"the start of {num_processes} processes with {backend}")
        except RuntimeError:
            self.kill()
            raise

    def call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
        """The results of a call in every process."""
        self._log_starts = [os.fstat(log).st_size for log in self._logs]
        request = pickle.dumps((function, arguments))
        for each in self._connections:
            each.send_bytes(request)
        return self._answers(f"{function.__module__}.{function.__qualname__}")

    def _answers(self, what: str) -> list[Any]:
        """Wait for an answer of every process; RuntimeError unless all are good."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while waiting := {
            each: rank for rank, each in enumerate(self._connections) if rank not in results and rank not in failures
        }:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for each in ready:
                rank = waiting[each]
                try:
                    good, answer = each.recv()
                except (EOFError, ConnectionResetError):
                    good, answer = False, f"died: exit code {self._processes[rank].wait()}"
                if good:
                    results[rank] = answer
                else:
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready:
                for rank in waiting.values():
                    self._processes[rank].send_signal(signal.SIGUSR1)  # prints its stack
                    failures[rank] = "did not answer"
                time.sleep(0.5)
        if failures:
            said = [f"rank {rank} {failures[rank]}\n{self._printed(rank)}" for rank in sorted(failures)]
            raise RuntimeError(f"{what}:\n" + "\n".join(said))
        return [results[rank] for rank in range(len(results))]

    def _printed(self, rank: int) -> str:
        log, start = self._logs[rank], self._log_starts[rank]
        text = os.pread(log, os.fstat(log).st_size - start, start).decode(errors="replace")
        return "".join(f"  | {line}\n" for line in text.splitlines()[-SHOWN_LINES:])

    def stop(self) -> None:
        """Let the processes end, and make those that don't."""
        for each in self._connections:
            each.close()
        for process in self._processes:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                break
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        for each in self._connections:
            each.close()
        for process in self._processes:
            process.kill()
            process.wait()
        for each in self._reserved:
            each.close()
        for log in self._logs:
            os.close(log)


@contextlib.contextmanager
def kept(backend: str, most: int = 0) -> Iterator[Callable[..., list[Any]]]:
    """Calls a function, by the number of processes, in processes that stay inside, such as those that Fleet has set up.

    Processes of another number end before a call that needs new ones, unless both numbers add up to at most ``most``.
    """
    running: dict[int, Processes] = {}

    def call(count: int, function: Any, **arguments: Any) -> list[Any]:
        if count not in running:
            stop()
            for size in [each for each in running if each + count > most]:
                running.pop(size).stop()
            running[count] = Processes(count, backend)
        try:
            return running[count].call(function, arguments)
        except RuntimeError:
            running.pop(count).kill()
            raise

    yield call
    for each in running.values():
        each.stop()


def reserve_port() -> socket.socket:
    """A socket bound to a free port. Paddle can bind another to it: both allow that, and this one does not listen.

    It is bound on all interfaces, as the store of rank 0 is. NCCL listens on another interface than the loopback, and
    would otherwise be given the same port there.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def _environment(backend: str, rank: int, master: str, endpoints: list[str]) -> dict[str, str]:
    environment = dict(
        os.environ,
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(len(endpoints)),
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        PADDLE_MASTER=master,
        PADDLE_DISTRI_BACKEND="gloo" if backend == "gloo" else "xccl",
        OMP_NUM_THREADS="1",
        # fresh memory is 0xA5, so that an output which is not written shows
        MALLOC_PERTURB_=os.environ.get("MALLOC_PERTURB_", str(0x5A)),
    )
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # would be used instead of PADDLE_MASTER
        environment.pop(name, None)
    if backend == "gloo":
        environment.pop("CUSTOM_DEVICE_ROOT", None)
    elif backend == "stub":
        environment.update(CUSTOM_DEVICE_ROOT=str(stub_device.build()), FLAGS_selected_stub_rigs=str(rank))
    else:
        environment.update(FLAGS_selected_cuda_rigs=str(rank))
    return environment


def _start(environment: dict[str, str], pipe: int, log: int) -> subprocess.Popen[bytes]:
    """Start a process for a GPU, since forks cannot use one."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.processes", str(pipe), str(log)],
        cwd=ROOT,
        env=environment,
        pass_fds=[pipe, log],
        stdin=subprocess.DEVNULL,
    )


def serve(pipe: int, log: int) -> None:
    """In a process: answer calls until the parent closes the connection."""
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.enable()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a parent that is killed leaves nothing behind
    to_parent = connection.Connection(pipe)

    def answer(work: Callable[[], Any]) -> None:
        try:
            to_parent.send((True, work()))
        except Exception:  # whatever it is, the test shows it
            to_parent.send((False, f"raised\n{traceback.format_exc()}"))

    def call() -> Any:
        function, arguments = pickle.loads(request)
        return function(**arguments)

    answer(_connect)
    while True:
        try:
            request = to_parent.recv_bytes()
        except EOFError:
            return
        answer(call)


def serve_in_fork(pipe: int, log: int) -> None:
    """`serve`, and end without the handlers of Paddle and Python, which take half a second."""
    serve(pipe, log)
    os._exit(0)


def _connect() -> None:
    import paddle

    paddle.distributed.init_parallel_env()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
