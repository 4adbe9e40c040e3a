# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Geometric means by commit: one file of JSON lines for each kind of GPU in ``benchmarks/results/series``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from .differences import LIMIT
from .figures import Result, result_of

__all__ = ["FOLDER", "Point", "Series", "historic_results", "points_of"]

FOLDER = "series"


class Point(NamedTuple):
    """A geometric mean over the shapes of a figure in one result.

    Attributes:
        commit: sources that were measured.
        date: of the measurement.
        gpu: GPU, or number and GPU for several.
        figure: kind of result, and name of the figure.
        unit: of the value.
        value: the mean; larger is better.
        count: number of shapes.
        shapes: names of all shapes, sorted.
        why: reason for a value that is more than `LIMIT` below the point before it.
    """

    commit: str
    date: str
    gpu: str
    figure: str
    unit: str
    value: float
    count: int
    shapes: tuple[str, ...]
    why: str = ""

    @property
    def subject(self) -> tuple[str, str, tuple[str, ...]]:
        """Only points of equal subjects are compared."""
        return self.gpu, self.figure, self.shapes

    @property
    def text(self) -> str:
        """The value with its commit."""
        return f"{self.value:g} {self.unit} at {self.commit} ({self.date})"

    def same(self, other: Point) -> bool:
        """Return True if both are one measurement."""
        return self._replace(why="") == other._replace(why="")

    def drop_since(self, last: Point) -> str | None:
        """Complaint about a value that is more than `LIMIT` below the last one without a reason, or None."""
        if self.why or self.value >= (1 - LIMIT) * last.value:
            return None
        below = 1 - self.value / last.value
        return f"{self.gpu}, {self.figure}, {self.count} shapes: {self.text} is {100 * below:.1f} % below {last.text}"


def points_of(result: Result) -> list[Point]:
    """The points of a result."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    for each in result.figures:
        if each.in_series:
            values.setdefault((each.name, each.unit), {})[each.shape] = each.value
    made = []
    for (name, unit), by_shape in values.items():
        mean = float(f"{geometric_mean(by_shape.values()):.5g}")
        how = f"{result.kind}, {name}", unit, mean, len(by_shape), tuple(sorted(by_shape))
        made.append(Point(result.commit, result.date, result.gpu, *how))
    return made


class Series:
    """The points of each kind of GPU, oldest first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self.points = {path.stem: self._load(path) for path in sorted(self._folder.glob("*.jsonl"))}

    @staticmethod
    def _load(path: Path) -> list[Point]:
        lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return [Point(**{**line, "shapes": tuple(line["shapes"])}) for line in lines]

    def of(self, kind: str, point: Point) -> list[Point]:
        """Points that a point is compared with."""
        return [each for each in self.points.get(kind, ()) if each.subject == point.subject]

    def missing(self, results: Iterable[Result]) -> list[tuple[str, Point]]:
        """Points of results that the series lacks, each with its kind of GPU."""
        made = [(result.gpu_kind, point) for result in results for point in points_of(result)]
        return [(kind, point) for kind, point in made if not any(map(point.same, self.of(kind, point)))]

    def add(self, results: Iterable[Result], reasons: Sequence[tuple[str, str]] = ()) -> tuple[int, list[str]]:
        """Add the points of results that the series lacks.

        Args:
            results: of today.
            reasons: patterns of figures, each with the reason that is kept with a point that is too low.

        Returns:
            the number of points that were added, and complaints about those that are too low, which are left out.
        """
        added, complaints = 0, []
        for kind, point in self.missing(results):
            before = self.of(kind, point)
            drop = point.drop_since(before[-1]) if before else None
            why = next((each for pattern, each in reasons if fnmatchcase(point.figure, pattern)), "") if drop else ""
            if drop is not None and not why:
                complaints.append(drop)
                continue
            self.points.setdefault(kind, []).append(point._replace(why=why))
            added += 1
        return added, complaints

    def insert(self, results: Iterable[Result]) -> None:
        """Add the points of old results, whatever they are, by their dates."""
        for kind, point in self.missing(results):
            self.points.setdefault(kind, []).append(point)
        for points in self.points.values():
            points.sort(key=lambda point: point.date)

    def write(self) -> None:
        """Write the files."""
        self._folder.mkdir(exist_ok=True)
        for kind, points in self.points.items():
            lines = ({name: value for name, value in each._asdict().items() if value != ""} for each in points)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self._folder / f"{kind}.jsonl").write_text(text, encoding="utf-8")


def historic_results(folder: Path) -> list[Result]:
    """Earlier versions of the results that a folder has, oldest commit first."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout

    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for commit in git("log", "--reverse", "--format=%H", "--", path.name).split():
            text = git("show", f"{commit}:./{path.name}")
            result = None if text == path.read_text(encoding="utf-8") else result_of(path.name, text)
            found += [] if result is None else [result]
    return found
