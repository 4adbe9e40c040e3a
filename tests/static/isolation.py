# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Runs calls that may kill their process, and reports the outcome of each."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

SECONDS_PER_CALL = 60
EXTRA_MEMORY = 3 << 30


def outcomes(command: Sequence[str]) -> list[tuple[str, str]]:
    """Run calls one after another in a separate process.

    A call that kills its process (abort, segmentation fault, hang) costs that process only: another goes on with the
    next call. The processes are fresh ones because a fork of a process that has used a GPU cannot use it.

    Args:
        command: starts the process from the root of the sources; its two more arguments are for `report`, to which it
            hands the same calls in the same order every time.

    Returns:
        For each call its name, and its text, or "raised <exception>: <message>", or "died of <signal>".

    Raises:
        RuntimeError: a process failed outside of the calls.
    """
    results: list[tuple[str, str]] = []
    while True:
        read_end, write_end = os.pipe()
        process = subprocess.Popen(
            [*command, str(len(results)), str(write_end)],
            cwd=Path(__file__).parents[2],
            pass_fds=[write_end],
            # An arena of glibc's for each thread takes address space, of which there is little: on 16 cores Paddle's
            # executor ran out of it while it started its threads, and waited for them forever.
            env={**os.environ, "MALLOC_ARENA_MAX": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(write_end)
        with os.fdopen(read_end) as lines:
            # Before a call its name, after it what became of it.
            said = [json.loads(line) for line in lines]
        _, errors = process.communicate()
        results += zip(said[::2], said[1::2], strict=False)
        if process.returncode == 0:
            return results
        if len(said) % 2 == 0:
            raise RuntimeError(f"{' '.join(command)} ended outside of a call:\n{errors}")
        code = process.returncode
        end = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
        results.append((said[-1], end))


def report(calls: Sequence[tuple[str, Callable[[], str]]], begin: int, write_end: int) -> None:
    """In the process: makes the named calls from number `begin` on, then ends it.

    Memory is limited, so that a giant allocation fails instead of succeeding lazily.
    """
    for stream in (1, 2):  # Paddle logs every exception and a stack for every signal
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def say(text: str) -> None:
        os.write(write_end, (json.dumps(text) + "\n").encode())

    for name, call in calls[begin:]:
        say(name)
        signal.alarm(SECONDS_PER_CALL)
        try:
            text = call()
        except Exception as error:
            text = f"raised {type(error).__name__}: {error}"
        say(text)
    os._exit(0)
