# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that fork from one that has imported Paddle, which takes more than a second of each new process.

A server imports modules once and runs no operator. Each request forks a process with an environment and files of its
own. It is a child of the process that made the request, which may wait for it and kill it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES, _MAX_FILES = 1 << 17, 8


class Forked:
    """A forked process, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid, self._code = pid, None
        self._end = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._end)
        return self._code

    def send_signal(self, number: int) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._end, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """A process that forks others; it ends with this one.

    Its environment is that of the first request, so variables that no Python code reads keep these values. All its
    processes have the same addresses and the same order of sets.

    Args:
        *modules: that it imports.
        **variables: of its environment, in place of those of the first request.
    """

    def __init__(self, *modules: str, **variables: str) -> None:
        self._modules, self._variables = modules, variables
        self._connection: socket.socket | None = None

    def fork(
        self, environment: dict[str, str], function: tuple[str, str], arguments: Sequence[Any], files: Sequence[int]
    ) -> Forked:
        """Fork a process that calls a function.

        Args:
            environment: of the process.
            function: its module and its name.
            arguments: they must pickle.
            files: file descriptors of the caller; the numbers of their copies are further arguments.
        """
        if self._connection is None:
            self._connection = self._start(environment)
        request = pickle.dumps((os.getpid(), environment, function, arguments))
        socket.send_fds(self._connection, [request], files)
        return Forked(pickle.loads(self._connection.recv(_REQUEST_BYTES)))

    def _start(self, environment: dict[str, str]) -> socket.socket:
        # Orphans become children of this process, so it can wait for those that the server forks.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), *self._modules]
        files = [theirs.fileno()]
        environment = {**environment, **self._variables}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=files, stdin=subprocess.DEVNULL)
        theirs.close()

        def stop() -> None:
            ours.close()
            process.wait()

        atexit.register(stop)
        return ours


def run_code(code: str, folder: str, out: int, errors: int) -> None:
    """In a forked process: do what ``python -c`` does with a program in a folder, and write to two files."""
    os.dup2(out, 1)
    os.dup2(errors, 2)
    os.chdir(folder)
    sys.path[0] = ""
    exec(code, {"__name__": "__main__"})


def _serve(requests: socket.socket) -> None:
    """Fork for each request. The forked processes return when their function does, and the server at the end."""
    while True:
        request, files, *_ = socket.recv_fds(requests, _REQUEST_BYTES, _MAX_FILES)
        if not request:
            return
        parent, environment, (module, name), arguments = pickle.loads(request)
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                requests.send(pickle.dumps(child))
                os._exit(0)
            requests.close()
            while os.getppid() != parent:  # until the process between has ended
                time.sleep(1e-3)
            os.environ.clear()
            os.environ.update(environment)
            getattr(importlib.import_module(module), name)(*arguments, *files)
            return
        os.waitpid(between, 0)
        for each in files:
            os.close(each)


if __name__ == "__main__":
    for each in sys.argv[2:]:
        importlib.import_module(each)
    gc.freeze()  # collections of forked processes leave out what is imported here
    _serve(socket.socket(fileno=int(sys.argv[1])))
