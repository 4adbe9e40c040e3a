# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A copy of the tree in which the tests of an area run, with a fault or without one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cpp
from areas import LEFT_OUT, Area
from faults import Fault, planted

HERE = Path(__file__).resolve().parent
LEFT_BEHIND = (
    ".git",
    ".venv*",
    "dist",
    "gpu",
    "sanitize",
    "aarch64",
    "mutants",
    "objects",
    "*_cache",
    "__pycache__",
    ".hypothesis",
    "*.o",
)
LIMIT_FACTOR, LIMIT_SECONDS = 4, 60
LIMIT_BYTES = 8 << 30  # of memory in use: a wrong size may ask for any amount
_NO_TESTS = 5  # pytest's exit code
_MARK = "MUTANTS_COPY"  # in the environment of all processes that tests of a copy start


# CI: the same examples of hypothesis on every run.
_VARIABLES = {"CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class Mutant(NamedTuple):
    path: str
    fault: Fault


class Outcome(NamedTuple):
    survived: bool
    how: str


class Record(NamedTuple):
    """A record of the tests of an area.

    Attributes:
        tests: their ids.
        seconds: their times.
        reached: the tests that reach a line, by "path:number".
        left_out: the ids of tests that were excluded, because they fail without a fault.
    """

    tests: list[str]
    seconds: list[float]
    reached: dict[str, list[int]]
    left_out: list[str]

    def file_seconds(self) -> dict[str, float]:
        total: defaultdict[str, float] = defaultdict(float)
        for test, seconds in zip(self.tests, self.seconds, strict=True):
            total[_file(test)] += seconds
        return total


class Copy:
    """A copy of a tree, in which tests run; a copy with changed C++ links its own libraries."""

    def __init__(self, tree: Path, folder: Path, *, links: bool) -> None:
        self.root, self._folder = folder / "tree", folder
        shutil.copytree(tree, self.root, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        self._libraries = cpp.Libraries(tree, self.root) if links else None

    def recorded(
        self, files: Sequence[str], sources: Sequence[str], pytest: Sequence[str], *, leaves_out: bool
    ) -> Record:
        """Runs all tests of some files and returns their record.

        Failing tests, and files whose process dies, are an error, or are excluded.
        """
        made, children = self._folder / "record.json", self._folder / "children"
        shutil.rmtree(children, ignore_errors=True)
        children.mkdir()
        variables = {"MUTANTS_RECORD": str(made), "MUTANTS_SOURCES": os.pathsep.join(sources)}
        if sources:
            variables["MUTANTS_CHILDREN"] = str(children)
        code, output = self._pytest(pytest, files, 2 * 3600, **variables)
        died = not made.exists() and code != _NO_TESTS
        found = {"failed": []} if not made.exists() else json.loads(made.read_text())
        made.unlink(missing_ok=True)
        if died and leaves_out:
            if len(files) > 1:
                return merged([self.recorded([file], sources, pytest, leaves_out=True) for file in files])
            print(f"  left out: {files[0]}, whose process ended:\n{output[-2000:]}", flush=True)
            return Record([], [], {}, list(files))
        if found["failed"] and leaves_out:
            print("".join(f"  left out: {line}\n" for line in _failures(output)), end="", flush=True)
        elif code not in (0, _NO_TESTS):
            raise RuntimeError(f"the tests fail without a fault:\n{output}")
        return _without(found)

    def try_mutant(self, area: Area, pytest: Sequence[str], record: Record, mutant: Mutant) -> Outcome | None:
        """Returns the outcome of a fault; None if it does not compile or does not change the object.

        Tests that reach the lines run first, the fastest first. Then the other tests of the same files run, which may
        share a fixture with them. If no test reaches the lines, such as a constant of a module, all tests that guard
        the source run: files named like the source before others, short ones before long ones.
        """
        path = self.root / mutant.path
        source = path.read_bytes()
        path.write_bytes(planted(source, mutant.fault))
        try:
            if self._libraries is None:
                return self._tested(area, pytest, record, mutant)
            with self._libraries.rebuilt(mutant.path) as is_other:
                return self._tested(area, pytest, record, mutant) if is_other else None
        finally:
            path.write_bytes(source)

    def _tested(self, area: Area, pytest: Sequence[str], record: Record, mutant: Mutant) -> Outcome:
        reaching = _reaching(record, mutant.path, mutant.fault)
        guards = area.guards.get(Path(mutant.path).stem, area.tests)
        files = {_file(record.tests[test]) for test in reaching} or set(files_of(self.root, guards))
        rest = set(range(len(record.tests))).difference(reaching)
        others = [test for test in rest if _file(record.tests[test]) in files]
        subject, seconds = Path(mutant.path).stem.removesuffix("_op"), record.file_seconds()
        others.sort(key=lambda test: (subject not in (file := _file(record.tests[test])), seconds[file], test))
        how = self._failure(pytest, record, reaching) or self._failure(pytest, record, others)
        unknown = f"; {len(record.left_out)} tests of the area were left out" if record.left_out else ""
        return Outcome(not how, how or f"{len(reaching)} tests reach it{unknown}")

    def _failure(self, pytest: Sequence[str], record: Record, tests: list[int]) -> str | None:
        """Returns how some tests fail, or None if they pass."""
        if not tests:
            return None
        names = [record.tests[test] for test in tests]
        listed = self._folder / "tests.json"
        listed.write_text(json.dumps(names))
        seconds = [record.seconds[test] for test in tests]
        limit, limit_of_one = (LIMIT_SECONDS + LIMIT_FACTOR * taken for taken in (sum(seconds), max(seconds)))
        options = [f"faulthandler_timeout={limit_of_one}", "faulthandler_exit_on_timeout=true"]
        files = list(dict.fromkeys(map(_file, names)))
        arguments = ["-x", *(word for option in options for word in ("-o", option)), *files]
        code, output = self._pytest(pytest, arguments, limit, MUTANTS_TESTS=str(listed))
        if "Timeout (" in output:
            return "out of time"
        if code == 0:
            return None
        return code if isinstance(code, str) else next(iter(_failures(output)), f"exit code {code}")

    def _pytest(
        self, pytest: Sequence[str], arguments: Sequence[str], seconds: float, **variables: str
    ) -> tuple[int | str, str]:
        """Returns exit code (or "out of time", "out of memory") and output of the tests; ends their processes."""
        command = [*pytest, "-q", "--tb=no", "-p", "pytest_reach", "-p", "no:cacheprovider"]
        # also the copy: a process that a test starts in another folder would import an installed package
        paths = [str(HERE), str(HERE / "children"), str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=self.root,
            env={**os.environ, **_VARIABLES, "PYTHONPATH": os.pathsep.join(paths), **variables, _MARK: str(self.root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return outcome_of(process, f"{_MARK}={self.root}", seconds)


def files_of(root: Path, patterns: Sequence[str]) -> list[str]:
    """Returns the paths of files in `root` that match patterns, each once, without excluded ones."""
    found = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    paths = dict.fromkeys(str(path.relative_to(root)) for path in found)
    return [path for path in paths if path not in LEFT_OUT]


def pytest_of(tree: Path, area: Area) -> list[str]:
    """Returns the command that runs tests of an area."""
    python = str(tree / area.python) if area.python else sys.executable
    return [python, "-m", "pytest", *(["-m", ""] if area.runs_slow else [])]


def merged(records: Sequence[Record]) -> Record:
    """Merges several records into one."""
    tests: list[str] = []
    seconds: list[float] = []
    reached: dict[str, list[int]] = {}
    left_out: list[str] = []
    for record in records:
        for line, numbers in record.reached.items():
            reached.setdefault(line, []).extend(number + len(tests) for number in numbers)
        tests += record.tests
        seconds += record.seconds
        left_out += record.left_out
    return Record(tests, seconds, reached, left_out)


def _without(found: dict) -> Record:
    """Returns the recorded tests without the failed ones."""
    kept = sorted(set(range(len(found["tests"]))).difference(found["failed"]))
    number = {test: place for place, test in enumerate(kept)}
    reached = {line: [number[test] for test in tests if test in number] for line, tests in found["reached"].items()}
    tests, seconds = ([found[name][test] for test in kept] for name in ("tests", "seconds"))
    return Record(tests, seconds, reached, [found["tests"][test] for test in found["failed"]])


def _failures(output: str) -> list[str]:
    """Returns the lines of pytest's output that name failing tests, with their reasons."""
    return [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]


def _reaching(record: Record, path: str, fault: Fault) -> list[int]:
    tests = {test for line in fault.lines for test in record.reached.get(f"{path}:{line}", ())}
    return sorted(tests, key=lambda test: record.seconds[test])


def outcome_of(process: subprocess.Popen[str], mark: str, seconds: float) -> tuple[int | str, str]:
    """Waits for a process; returns its exit code (or "out of time", "out of memory") and its output.

    Then it ends all processes with the mark, "NAME=value", in their environment, including those in other sessions.
    """
    end = time.monotonic() + seconds
    how = ""
    while not how:
        try:
            output, _ = process.communicate(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            how = (
                "out of time"
                if time.monotonic() > end
                else "out of memory"
                if any(map(_is_large, _marked(mark)))
                else ""
            )
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if how:
        process.communicate()
        return how, ""
    return process.returncode, output


def _marked(mark: str) -> list[int]:
    """Returns the processes that were started with "NAME=value" in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _is_large(pid: int) -> bool:
    """Returns whether a process uses too much memory; Paddle's threads reserve far more than they use."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return pages * os.sysconf("SC_PAGESIZE") > LIMIT_BYTES


def _file(test: str) -> str:
    return test.partition("::")[0]
