# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Recording of the lines that each test reaches, in the process of pytest and in those that its tests start.

A folder (MUTANTS_CHILDREN) contains the number of the test that runs, which all processes map into memory, and one file
of lines for each process: "test path:line". A process that is killed runs no handler at its end, so a line is written
when a test first reaches it. MUTANTS_SOURCES has the paths of the sources in MUTANTS_COPY, separated by os.pathsep.

Lines that an import runs are left out: pytest imports the sources before its first test, so only tests that start
processes would reach them.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

_NUMBER, _BYTES = "test", 8


class Current:
    """The number of the test that runs; -1 before the first one."""

    def __init__(self, folder: str) -> None:
        path = Path(folder) / _NUMBER
        if not path.exists():
            path.write_bytes((-1).to_bytes(_BYTES, "little", signed=True))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)

    def set(self, number: int) -> None:
        self._memory[:] = number.to_bytes(_BYTES, "little", signed=True)

    def get(self) -> int:
        return int.from_bytes(self._memory[:], "little", signed=True)


class Tracer:
    """A tracer that records the lines of this process."""

    def __init__(self, folder: str) -> None:
        paths = os.environ["MUTANTS_SOURCES"].split(os.pathsep)
        self._sources = {os.path.join(os.environ["MUTANTS_COPY"], path): path for path in paths}
        self._current, self._seen = Current(folder), set()
        self._file = os.open(Path(folder) / f"lines-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def start(self) -> None:
        """Traces all threads from now on."""
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        path = self._sources.get(frame.f_code.co_filename)
        if path is None:
            return None
        reached = self._current.get(), path, frame.f_lineno
        if reached not in self._seen and not self._is_of_import(frame):
            self._seen.add(reached)
            os.write(self._file, f"{reached[0]} {path}:{reached[2]}\n".encode())
        return self._trace

    def _is_of_import(self, frame: FrameType | None) -> bool:
        """True if the import of a source runs the frame."""
        while frame is not None:
            code, name = frame.f_code, frame.f_globals.get("__name__")
            if code.co_name == "<module>" and code.co_filename in self._sources and name != "__main__":
                return True
            frame = frame.f_back
        return False


def reached_lines(folder: str) -> dict[str, list[int]]:
    """Returns for every line ("path:number") the numbers of the tests that reach it."""
    found = defaultdict(set)
    for path in Path(folder).glob("lines-*"):
        for text in path.read_text().splitlines():
            test, _, line = text.partition(" ")
            found[line].add(int(test))
    return {line: sorted(tests) for line, tests in found.items()}
