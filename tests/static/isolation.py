# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Runs calls that may kill their process, and says what became of each."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Sequence

SECONDS_PER_CALL = 20
EXTRA_MEMORY = 3 << 30


def outcomes(calls: Sequence[Callable[[], str]]) -> list[str]:
    """Makes the calls one after another in forked processes.

    A call that kills its process (abort, segmentation fault, hang) costs that process only: another goes on with the
    next call. Memory is limited, so that a giant allocation fails instead of succeeding lazily.

    Args:
        calls: each returns a text.

    Returns:
        For each call its text, or "raised <exception>: <message>", or "died of <signal>".
    """
    results: list[str] = []
    while len(results) < len(calls):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            _report(calls[len(results) :], write_end)
        os.close(write_end)
        with os.fdopen(read_end) as lines:
            results += [json.loads(line) for line in lines]
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            results.append(f"died of {signal.Signals(os.WTERMSIG(status)).name}")
        elif os.WEXITSTATUS(status) != 0:
            results.append(f"ended its process with exit code {os.WEXITSTATUS(status)}")
    return results


def _report(calls: Sequence[Callable[[], str]], write_end: int) -> None:
    """In the child: one line per call, then the end of the process."""
    for stream in (1, 2):  # Paddle logs every exception and a stack for every signal
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for call in calls:
        signal.alarm(SECONDS_PER_CALL)
        try:
            text = call()
        except Exception as error:
            text = f"raised {type(error).__name__}: {error}"
        os.write(write_end, (json.dumps(text) + "\n").encode())
    os._exit(0)
