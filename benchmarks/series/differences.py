# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Comparison of figures that two result files have, and the reasons for those that are apart.

A reason in ``benchmarks/results/differences.json`` names both files, the commits that were measured, and patterns of
figures and shapes. A new measurement of either file needs a reason of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from .figures import Figure, Result, load_results

__all__ = ["LIMIT", "Difference", "Reason", "differences", "load_reasons", "section", "unexplained"]

LIMIT = 0.03
REASONS = "differences.json"
SECTION = """## Where two tables differ

Figures of one GPU and one shape that two result files have, and that are more than 3 % apart.

"""


class Reason(NamedTuple):
    """Why figures of two files are apart.

    Attributes:
        files: names of both.
        commits: that the files measured, in the same order.
        figure: pattern of names.
        shape: pattern of shapes.
        why: a sentence.
    """

    files: tuple[str, str]
    commits: tuple[str, str]
    figure: str
    shape: str
    why: str


class Difference(NamedTuple):
    """A figure whose values in two results are more than `LIMIT` apart."""

    results: tuple[Result, Result]
    figures: tuple[Figure, Figure]

    @property
    def apart(self) -> float:
        """Larger value over the smaller one, minus 1."""
        low, high = sorted(each.value for each in self.figures)
        return high / low - 1

    @property
    def text(self) -> str:
        """Both figures with their files."""
        sides = (
            f"{figure.value:.1f} {figure.unit} in {result.file} ({result.commit}, {result.date})"
            for figure, result in zip(self.figures, self.results, strict=True)
        )
        first = self.figures[0]
        gpu = self.results[0].gpu
        return f"{gpu}, {first.name}, {first.shape}: {' and '.join(sides)} are {100 * self.apart:.1f} % apart"

    def explained_by(self, reason: Reason) -> bool:
        """Return True if a reason names this figure and these results."""
        sides = {(each.file, each.commit) for each in self.results}
        first = self.figures[0]
        return (
            sides == set(zip(reason.files, reason.commits, strict=True))
            and fnmatchcase(first.name, reason.figure)
            and fnmatchcase(first.shape, reason.shape)
        )


def differences(results: Sequence[Result]) -> list[Difference]:
    """All figures of the same name and shape on the same GPU that are more than `LIMIT` apart."""
    found = []
    for one, other in combinations(results, 2):
        if one.gpu != other.gpu:
            continue
        figures = {(each.name, each.shape): each for each in one.figures}
        for figure in other.figures:
            if (figure.name, figure.shape) in figures:
                difference = Difference((one, other), (figures[figure.name, figure.shape], figure))
                found += [difference] if difference.apart > LIMIT else []
    return found


def load_reasons(folder: Path) -> list[Reason]:
    """Reasons that are kept next to results; none without a file."""
    path = folder / REASONS
    lines = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [Reason(**{**line, "files": tuple(line["files"]), "commits": tuple(line["commits"])}) for line in lines]


def unexplained(found: Iterable[Difference], reasons: Sequence[Reason]) -> list[str]:
    """Complaints: differences without a reason, and reasons without a difference."""
    found = list(found)
    complaints = [f"{each.text}, without a reason" for each in found if not any(map(each.explained_by, reasons))]
    for reason in reasons:
        if not any(each.explained_by(reason) for each in found):
            complaints.append(
                f"a reason in {REASONS} is about no difference: {reason.files}, {reason.commits}, {reason.figure}"
            )
    return complaints


def section(folder: Path, kinds: Iterable[str]) -> str:
    """Part of a page: the reasons for differences between results of some kinds; empty if there are none."""
    kinds = set(kinds)
    found = differences([each for each in load_results(folder) if each.kind in kinds])
    lines = []
    for reason in load_reasons(folder):
        own = [each for each in found if each.explained_by(reason)]
        if own:
            files = " and ".join(
                f"`{file}` ({commit})" for file, commit in zip(reason.files, reason.commits, strict=True)
            )
            most = max(each.apart for each in own)
            lines.append(f"* {files}: {len(own)} figures, at most {100 * most:.0f} % apart. {reason.why}\n")
    return SECTION + "".join(lines) if lines else ""
