# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tables: of a run, a line per measurement, with rich if it is installed; and of pages, in Markdown."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from .results import Row

__all__ = ["LiveTable", "markdown", "print_table"]

# Columns and their widths if lines are printed one by one.
_COLUMNS = {
    "case": 20,
    "operation": 27,
    "impl": 26,
    "mode": 11,
    "us": 8,
    "p5": 8,
    "p95": 8,
    "GB/s": 7,
    "of copy": 7,
    "of probe": 8,
    "launches": 8,
    "check": 0,
}


def _cells(row: Row) -> list[str]:
    case = row.shape if row.alignment == 1 else f"{row.shape} A={row.alignment}" + ("" if row.fill else " no fill")
    if row.routing not in ("uniform", "expert_parallel_sparse"):
        case += f" {row.routing}"
    numbers = [row.us, row.p5, row.p95, row.gbps]
    fractions = [row.frac_copy, row.frac_probe]
    return [
        case,
        row.key,
        row.impl,
        row.mode if row.cold else f"{row.mode}, warm",
        *("" if value is None else f"{value:.1f}" for value in numbers),
        *("" if value is None else f"{value:.3f}" for value in fractions),
        "" if row.launches is None else str(row.launches),
        row.check,
    ]


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _COLUMNS.values(), strict=True)).rstrip()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on the terminal; columns are as wide as they must be."""
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
    for row in [columns, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without the columns that say nothing."""
    rows = list(rows)
    used = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    lines = [[line[index] for index in used] for line in (columns, ["---"] * len(columns), *rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


class LiveTable:
    """Shows rows as they come: a live table on a terminal with rich, plain lines otherwise."""

    def __init__(self) -> None:
        self._live: Any = None
        self._table: Any = None

    def __enter__(self) -> LiveTable:
        if importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.live import Live
            from rich.table import Table

            console = Console()
            if console.is_terminal:
                self._table = Table(*_COLUMNS, box=None)
                self._live = Live(self._table, console=console, vertical_overflow="visible")
                self._live.__enter__()
                return self
        print(_line(list(_COLUMNS)))
        return self

    def add(self, row: Row) -> None:
        if self._table is None:
            print(_line(_cells(row)), flush=True)
        else:
            from rich.markup import escape

            self._table.add_row(*(escape(cell) for cell in _cells(row)), style="red" if row.failed else None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
