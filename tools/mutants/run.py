# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Plants faults into copies of the sources, one at a time, and prints those that no test notices: see README.md."""

from __future__ import annotations

import argparse
import concurrent.futures
import difflib
import functools
import hashlib
import itertools
import json
import math
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import cpp
import faults
from areas import AREAS
from copies import Copy, Mutant, Record, files_of, merged, pytest_of
from equivalents import is_equivalent

HERE = Path(__file__).resolve().parent
T = TypeVar("T")
PAGE = """# Results

`tools/mutants/run.py --table` writes this page from results of `make mutants MUTANTS={count} SEED={seed}`. README.md
describes them.

* faults: all faults of the area's sources
* tried: faults of samples that the sources still have, with the share of them that survived
* equivalent: faults of the area's sources in the list of equivalents, with their share; they are not tried
* commit: the one that the area's latest faults were tried on; those noticed before are not tried again

An area whose sample is not tried in full may have fewer than {count} tried faults.

| area | faults | tried | survived | share | equivalent | share | commit |
|---|--:|--:|--:|--:|--:|--:|---|
{rows}"""


def kinds_in_turn(mutants: list[Mutant], texts: list[str], seed: int) -> list[Mutant]:
    """Returns the mutants in an order by hashes, one of each kind before the next of any: swapped arguments are many.

    A mutant's hash depends on its path and on `texts`, the differences, alone. So a change of the sources leaves the
    order of others as it is.
    """
    hashes = [
        hashlib.sha256(f"{seed} {each.path} {text}".encode()).digest()
        for each, text in zip(mutants, texts, strict=True)
    ]
    seen: Counter[str] = Counter()
    turns = []
    for _, mutant in sorted(zip(hashes, mutants, strict=True), key=lambda pair: pair[0]):
        turns.append((seen[mutant.fault.kind], mutant))
        seen[mutant.fault.kind] += 1
    return [mutant for _, mutant in sorted(turns, key=lambda pair: pair[0])]


class Result(NamedTuple):
    """The outcome of one mutant, or of one that was skipped."""

    area: str
    path: str
    line: int
    kind: str
    difference: str
    how: str  # "" if it is equivalent or no other program
    survived: bool
    seconds: float
    commit: str = ""  # of the tree


class Sample:
    """The faults of an area in their order, of which `count` are tried; `done` has results of earlier runs.

    If survivors are tried `again`, they come first.
    """

    def __init__(
        self, tree: Path, area: str, count: int, seed: int, done: list[Result], *, again: bool = False
    ) -> None:
        self.area, self.count = area, count
        self.is_cpp = AREAS[area].sources[0].endswith(".cc")
        faults_of = cpp.faults_of if self.is_cpp else faults.faults_of
        found = [(path, (tree / path).read_bytes()) for path in files_of(tree, AREAS[area].sources)]
        self.all = [Mutant(path, fault) for path, source in found for fault in faults_of(source)]
        self.sources = dict(found)
        self._differences = {each: self._difference(each) for each in self.all}
        order = kinds_in_turn(self.all, [self._differences[each] for each in self.all], seed)
        self._done = {(each.path, each.difference): each for each in done if each.area == area}
        if again:
            survivors = {key for key, each in self._done.items() if each.survived}
            order.sort(key=lambda each: (each.path, self.difference(each)) not in survivors)
            self._done = {key: each for key, each in self._done.items() if not each.survived}
        self._left = iter(order)
        self.results: list[Result] = []
        self._running, self._lock = 0, threading.Lock()

    def next(self) -> Mutant | None:
        """Returns the next mutant to try; None if enough are tried or running."""
        with self._lock:
            while len(self.tried()) + self._running < self.count:
                mutant = next(self._left, None)
                if mutant is None:
                    return None
                if self._is_equivalent(mutant):
                    self.results.append(self.result(mutant, "", survived=True, seconds=0.0))
                elif (known := self._done.get((mutant.path, self.difference(mutant)))) is not None:
                    if known.how:
                        self.results.append(known)
                else:
                    self._running += 1
                    return mutant
            return None

    def add(self, result: Result | None) -> None:
        """Stores the outcome of a mutant from `next`; None if it is no other program."""
        with self._lock:
            self._running -= 1
            if result is not None:
                self.results.append(result)

    def tried(self) -> list[Result]:
        return [each for each in self.results if each.how]

    def equivalent(self) -> int:
        return len(self.results) - len(self.tried())

    def known(self) -> list[Result]:
        """Results of earlier runs, of all faults that the sources still have."""
        keys = {(each.path, self.difference(each)): each for each in self.all if not self._is_equivalent(each)}
        return [result for key in keys if (result := self._done.get(key)) is not None and result.how]

    def equivalent_of_all(self) -> int:
        """Returns the number of faults in the list of equivalents, of all."""
        return sum(map(self._is_equivalent, self.all))

    def _is_equivalent(self, mutant: Mutant) -> bool:
        return is_equivalent(mutant.path, mutant.fault.kind, self._lines(mutant)[0])

    def result(self, mutant: Mutant, how: str, *, survived: bool, seconds: float) -> Result:
        fault, difference = mutant.fault, self.difference(mutant)
        return Result(self.area, mutant.path, fault.line, fault.kind, difference, how, survived, round(seconds, 1))

    def difference(self, mutant: Mutant) -> str:
        return self._differences[mutant]

    def _difference(self, mutant: Mutant) -> str:
        old, new = self._lines(mutant)
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    def _lines(self, mutant: Mutant) -> tuple[str, str]:
        """Returns the lines around a fault, without it and with it."""
        source = self.sources[mutant.path]
        begin = source.rfind(b"\n", 0, mutant.fault.begin) + 1
        end = source.find(b"\n", mutant.fault.end)
        old = source[begin:end]
        new = source[begin : mutant.fault.begin] + mutant.fault.text + source[mutant.fault.end : end]
        return old.decode(), new.decode()


class Pool:
    """A pool of threads with a copy of the tree each."""

    def __init__(self, tree: Path, folder: Path, jobs: int, *, links: bool) -> None:
        self._local, self._numbers = threading.local(), itertools.count()
        self._tree, self._folder, self._links, self.jobs = tree, folder, links, jobs
        self._threads = concurrent.futures.ThreadPoolExecutor(jobs, initializer=self._start)

    def run(self, function: Callable[[Copy], T]) -> concurrent.futures.Future[T]:
        return self._threads.submit(lambda: function(self._local.copy))

    def _start(self) -> None:
        where = self._folder / f"{'linked' if self._links else 'plain'}-{next(self._numbers)}"
        where.mkdir()
        self._local.copy = Copy(self._tree, where, links=self._links)


class Run:
    """The areas of one run, whose tests are recorded and whose mutants are tried in a pool."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._tree, self._options = options.tree, options
        self._end = time.monotonic() + options.seconds
        self._pools = {
            links: functools.cache(functools.partial(Pool, options.tree, folder, options.jobs, links=links))
            for links in (False, True)
        }
        self._commit = commit_of(options.tree)
        self._kept = options.tree / "build" / "mutants"
        self._kept.mkdir(parents=True, exist_ok=True)
        self._sources = hashlib.sha256()  # of all sources and tests
        for folder in ("paddle_moe_ops", "tests"):
            for path in sorted((options.tree / folder).rglob("*.*")):
                if path.suffix in (".py", ".cc", ".h"):
                    self._sources.update(path.read_bytes())
        self._write = threading.Lock()

    def areas(self, names: list[str], known: list[Result]) -> list[Sample]:
        """Tries a sample of each area and prints what survives."""
        options = self._options
        samples = [
            Sample(self._tree, name, options.mutants, options.seed, known, again=options.again) for name in names
        ]
        trying: list[concurrent.futures.Future[None]] = []
        following = self._recording(samples[0])
        for sample, after in zip(samples, [*samples[1:], None], strict=True):
            print(f"{sample.area}: {sample.count} of {len(sample.all)} mutants", flush=True)
            made = following
            if after is not None:  # the pool records it while the last tests of this area run
                following = self._recording(after)
            record = made()
            pool = self._pools[sample.is_cpp]()
            trying += [pool.run(functools.partial(self._try, sample, record)) for _ in range(sample.count)]
        for each in trying:
            each.result()
        return samples

    def _recording(self, sample: Sample) -> Callable[[], Record]:
        """Starts to run all tests of an area, to check that they pass and to record the lines that each reaches.

        The record is kept as long as sources and tests are the same.
        """
        area = AREAS[sample.area]
        tests = files_of(self._tree, area.tests)
        traced = [] if sample.is_cpp else list(sample.sources)
        digest = self._sources.copy()
        digest.update(repr((tests, traced, area.python, area.runs_slow)).encode())
        kept = self._kept / f"{digest.hexdigest()}.json"
        if kept.exists():
            record = Record(**json.loads(kept.read_text()))
            return lambda: record
        pool, pytest, leaves_out = self._pools[sample.is_cpp](), pytest_of(self._tree, area), self._options.leave_out
        pieces = [piece for first in range(pool.jobs) if (piece := tests[first :: pool.jobs])]

        def record_piece(piece: list[str], copy: Copy) -> Record:
            return copy.recorded(piece, traced, pytest, leaves_out=leaves_out)

        running = [pool.run(functools.partial(record_piece, piece)) for piece in pieces]

        def made() -> Record:
            record = merged([each.result() for each in running])
            kept.write_text(json.dumps(record._asdict()))
            return record

        return made

    def _try(self, sample: Sample, record: Record, copy: Copy) -> None:
        """Tries the next mutant that is another program."""
        area, outcome = AREAS[sample.area], None
        while outcome is None and time.monotonic() < self._end and (mutant := sample.next()) is not None:
            start = time.monotonic()
            outcome = copy.try_mutant(area, pytest_of(self._tree, area), record, mutant)
            survived, how = outcome or (False, "")
            result = sample.result(mutant, how, survived=survived, seconds=time.monotonic() - start)
            result = result._replace(commit=self._commit)
            self._tell(result)
            sample.add(result if how else None)

    def _tell(self, result: Result) -> None:
        what = "SURVIVED" if result.survived else "killed"
        text = f"  {what} {result.path}:{result.line} {result.kind}, {result.how} ({result.seconds:.0f} s)"
        with self._write:
            if result.how:
                print(text if not result.survived else f"{text}\n{result.difference}", flush=True)
            if self._options.results is not None:
                with self._options.results.open("a") as file:
                    file.write(json.dumps(result._asdict()) + "\n")


def commit_of(tree: Path) -> str:
    """Returns the commit of a tree, marked if files differ from it; "" if it is no repository."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def results_in(paths: Sequence[Path]) -> list[Result]:
    """Returns the latest result of each mutant in each area, the oldest first."""
    found: dict[tuple[str, str, str, str], Result] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            result = Result(**json.loads(line))
            key = (result.area, result.path, result.kind, result.difference)
            found.pop(key, None)
            found[key] = result
    return list(found.values())


def table(tree: Path, paths: Sequence[Path], count: int, seed: int) -> str:
    """Returns a page of results of earlier runs, for faults that the sources of `tree` still have."""
    known = results_in(paths)
    latest = {each.area: each.commit for each in known}
    rows = []
    for area in AREAS:
        if area not in latest:
            continue
        sample = Sample(tree, area, count, seed, known)
        tried, equivalent = sample.known(), sample.equivalent_of_all()
        survived = sum(each.survived for each in tried)
        shares = [
            f"{part / max(1, whole):.0%}" for part, whole in ((survived, len(tried)), (equivalent, len(sample.all)))
        ]
        cells = [
            area,
            len(sample.all),
            len(tried),
            survived,
            shares[0],
            equivalent,
            shares[1],
            latest[area] or "not kept",
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |\n")
    return PAGE.format(count=count, seed=seed, rows="".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--area", action="append", choices=AREAS, help="may be given again; without, all of them")
    parser.add_argument("--mutants", type=int, default=30, help="how many of an area's mutants are tried")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="the sources, built; they are copied")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at once, each in a copy of its own")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no mutant is begun later than this")
    parser.add_argument("--results", type=Path, help="lines of JSON; mutants with a line there are not tried again")
    parser.add_argument("--again", action="store_true", help="try those first that survived in --results")
    parser.add_argument("--leave-out", action="store_true", help="leave tests out that fail without a fault")
    parser.add_argument("--table", type=Path, nargs="+", help="print a page of these results and try nothing")
    options = parser.parse_args()
    if options.table:
        print(table(options.tree, options.table, options.mutants, options.seed), end="")
        return
    known = results_in([options.results] if options.results is not None and options.results.exists() else [])
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        samples = Run(options, Path(folder)).areas(options.area or list(AREAS), known)
    print(f"\n{'area':12}{'mutants':>8}{'survived':>10}{'share':>8}{'equivalent':>12}")
    for sample in samples:
        tried = sample.tried()
        survived, equivalent = sum(each.survived for each in tried), sample.equivalent()
        print(f"{sample.area:12}{len(tried):8}{survived:10}{survived / max(1, len(tried)):8.0%}{equivalent:12}")


if __name__ == "__main__":
    main()
