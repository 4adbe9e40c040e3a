# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Plants faults into a copy of the sources, one at a time, and says which ones no test notices: see README.md."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cpp
import faults
from areas import AREAS, LEFT_OUT, is_equivalent
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
_MARK = "MUTANTS_COPY"  # in the environment of all processes that tests of a copy start


class Mutant(NamedTuple):
    path: str
    fault: Fault


class Outcome(NamedTuple):
    survived: bool
    how: str


class Copy:
    """A copy of a tree, in which the tests of an area run."""

    def __init__(self, tree: Path, folder: Path, area: str) -> None:
        self.root = folder / "tree"
        shutil.copytree(tree, self.root, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        self.sources, self.tests = self._files(AREAS[area].sources), self._files(AREAS[area].tests)
        self._guards = AREAS[area].guards
        self._libraries = cpp.Libraries(tree, self.root) if self.sources[0].endswith(".cc") else None
        self._python = str(tree / AREAS[area].python) if AREAS[area].python else sys.executable
        neighbours = [each for each in AREAS.values() if each.tests == AREAS[area].tests]
        traced = self._files([pattern for each in neighbours for pattern in each.sources])
        self._traced = [path for path in traced if path.endswith(".py")]
        self._folder, self._kept = folder, tree / "build" / "mutants"
        self._record: dict = {}
        self._seconds_of_file: Counter[str] = Counter()

    def mutants(self) -> list[Mutant]:
        """All faults of the area."""
        faults_of = faults.faults_of if self._libraries is None else cpp.faults_of
        found = [(path, (self.root / path).read_bytes()) for path in self.sources]
        return [Mutant(path, fault) for path, source in found for fault in faults_of(source)]

    def is_equivalent(self, mutant: Mutant) -> bool:
        """Whether `areas.EQUIVALENT` says why no test can notice it."""
        return is_equivalent(mutant.path, mutant.fault.kind, self._lines(mutant)[0])

    def run_unchanged(self) -> None:
        """Runs all tests of the area once, to see that they pass and which lines each of them reaches.

        What is found is kept for as long as sources and tests are the same.
        """
        digest = hashlib.sha256(repr((self.tests, self._traced)).encode())
        for folder in ("paddle_moe_ops", "tests"):
            for path in sorted((self.root / folder).rglob("*.*")):
                if path.suffix in (".py", ".cc", ".h"):
                    digest.update(path.read_bytes())
        record = self._kept / f"{digest.hexdigest()}.json"
        if not record.exists():
            self._kept.mkdir(parents=True, exist_ok=True)
            made, sources = self._folder / "record.json", os.pathsep.join(self._traced)
            code, output = self._pytest(self.tests, 2 * 3600, MUTANTS_RECORD=str(made), MUTANTS_SOURCES=sources)
            if code:
                raise RuntimeError(f"the tests fail without a fault:\n{output}")
            shutil.move(made, record)
        self._record = json.loads(record.read_text())
        for test, seconds in zip(self._record["tests"], self._record["seconds"], strict=True):
            self._seconds_of_file[_file(test)] += seconds

    def try_mutant(self, mutant: Mutant) -> Outcome | None:
        """Whether any test fails: first those that reach the lines, the fastest first, then all that may notice.

        These are the others of the same files, which may share a fixture with them, and those of files that start
        processes; all that guard the source, where no test reaches the lines, as those of a constant of a module.
        Files named like the source run before others, short ones before long ones.
        None if the fault does not compile, or if its object is the same.
        """
        path = self.root / mutant.path
        source = path.read_bytes()
        path.write_bytes(planted(source, mutant.fault))
        try:
            if self._libraries is None:
                return self._tested(mutant)
            with self._libraries.rebuilt(mutant.path) as is_other:
                return self._tested(mutant) if is_other else None
        finally:
            path.write_bytes(source)

    def _tested(self, mutant: Mutant) -> Outcome:
        reaching = self._reaching(mutant)
        names = self._record["tests"]
        guards = self._guards.get(Path(mutant.path).stem)
        guarding = self.tests if guards is None else self._files(guards)
        files = {_file(names[test]) for test in reaching}.union(self._record["spawning"] if reaching else guarding)
        others = [test for test in range(len(names)) if _file(names[test]) in files and test not in set(reaching)]
        subject = Path(mutant.path).stem.removesuffix("_op")
        others.sort(key=lambda test: (subject not in _file(names[test]), self._seconds_of_file[_file(names[test])]))
        how = self._failure(reaching) or self._failure(others)
        return Outcome(not how, how or f"{len(reaching)} tests reach it")

    def difference(self, mutant: Mutant) -> str:
        old, new = self._lines(mutant)
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    def _files(self, patterns: Sequence[str]) -> list[str]:
        found = [path for pattern in patterns for path in sorted(self.root.glob(pattern))]
        return [
            path for path in dict.fromkeys(str(path.relative_to(self.root)) for path in found) if path not in LEFT_OUT
        ]

    def _lines(self, mutant: Mutant) -> tuple[str, str]:
        """The lines around a fault, without it and with it."""
        source = (self.root / mutant.path).read_bytes()
        begin = source.rfind(b"\n", 0, mutant.fault.begin) + 1
        end = source.find(b"\n", mutant.fault.end)
        old = source[begin:end]
        new = source[begin : mutant.fault.begin] + mutant.fault.text + source[mutant.fault.end : end]
        return old.decode(), new.decode()

    def _reaching(self, mutant: Mutant) -> list[int]:
        reached = self._record["reached"]
        tests = {test for line in mutant.fault.lines for test in reached.get(f"{mutant.path}:{line}", ())}
        return sorted(tests - {-1}, key=lambda test: self._record["seconds"][test])

    def _failure(self, tests: list[int]) -> str | None:
        """How some tests fail, or None where they pass."""
        if not tests:
            return None
        names = [self._record["tests"][test] for test in tests]
        listed = self._folder / "tests.json"
        listed.write_text(json.dumps(names))
        seconds = [self._record["seconds"][test] for test in tests]
        limit, limit_of_one = (LIMIT_SECONDS + LIMIT_FACTOR * taken for taken in (sum(seconds), max(seconds)))
        options = [f"faulthandler_timeout={limit_of_one}", "faulthandler_exit_on_timeout=true"]
        files = list(dict.fromkeys(map(_file, names)))
        arguments = ["-x", *(word for option in options for word in ("-o", option)), *files]
        code, output = self._pytest(arguments, limit, MUTANTS_TESTS=str(listed))
        if "Timeout (" in output:
            return "out of time"
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if code == 0:
            return None
        return code if isinstance(code, str) else failed[0] if failed else f"exit code {code}"

    def _pytest(self, arguments: Sequence[str], seconds: float, **variables: str) -> tuple[int | str, str]:
        """Exit code (or "out of time", "out of memory") and output of the tests; ends all processes they started."""
        command = [self._python, "-m", "pytest", "-q", "--tb=no", "-p", "pytest_reach", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=self.root,
            # CI: the same examples of hypothesis on every run.
            env={**os.environ, "CI": "1", "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1", **variables}
            | {_MARK: str(self.root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return outcome_of(process, f"{_MARK}={self.root}", seconds)


def outcome_of(process: subprocess.Popen[str], mark: str, seconds: float) -> tuple[int | str, str]:
    """Waits for a process; returns its exit code (or "out of time", "out of memory") and its output.

    Then all processes end that have the mark, "NAME=value", in their environment, in sessions of their own as well.
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
    """Processes that were started with "NAME=value" in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _is_large(pid: int) -> bool:
    """Whether a process has too much memory in use; Paddle's threads reserve far more than they use."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return pages * os.sysconf("SC_PAGESIZE") > LIMIT_BYTES


def _file(test: str) -> str:
    return test.partition("::")[0]


def kinds_in_turn(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """The mutants in an order by chance that takes one of each kind before the next: swapped arguments are many."""
    mutants = random.Random(seed).sample(mutants, len(mutants))
    seen: Counter[str] = Counter()
    turns = []
    for mutant in mutants:
        turns.append(seen[mutant.fault.kind])
        seen[mutant.fault.kind] += 1
    return [mutant for _, mutant in sorted(zip(turns, mutants, strict=True), key=lambda pair: pair[0])]


def try_area(area: str, tree: Path, count: int, seed: int) -> tuple[int, int, int]:
    """Tries a sample of an area's mutants and prints the survivors.

    Returns:
        How many were tried, how many of these survived, and how many were passed over as equivalent.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(tree, Path(folder), area)
        mutants = copy.mutants()
        print(f"{area}: {count} of {len(mutants)} mutants, {len(copy.tests)} test files", flush=True)
        copy.run_unchanged()
        tried = survived = equivalent = 0
        for mutant in kinds_in_turn(mutants, seed):
            if tried == count:
                break
            if copy.is_equivalent(mutant):
                equivalent += 1
                continue
            start = time.perf_counter()
            outcome = copy.try_mutant(mutant)
            if outcome is None:
                continue
            tried += 1
            survived += outcome.survived
            seconds = f"{time.perf_counter() - start:.0f} s"
            what = "SURVIVED" if outcome.survived else "killed"
            print(f"  {what} {mutant.path}:{mutant.fault.line} {mutant.fault.kind}, {outcome.how} ({seconds})")
            if outcome.survived:
                print(copy.difference(mutant))
            sys.stdout.flush()
        return tried, survived, equivalent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--area", action="append", choices=AREAS, help="may be given again; without, all of them")
    parser.add_argument("--mutants", type=int, default=30, help="how many of an area's mutants are tried")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="the sources, built; they are copied")
    options = parser.parse_args()
    table = {area: try_area(area, options.tree, options.mutants, options.seed) for area in options.area or AREAS}
    print(f"\n{'area':12}{'mutants':>8}{'survived':>10}{'share':>8}{'equivalent':>12}")
    for area, (mutants, survived, equivalent) in table.items():
        print(f"{area:12}{mutants:8}{survived:10}{survived / mutants:8.0%}{equivalent:12}")


if __name__ == "__main__":
    main()
