# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Result files: JSON lines, first the machine, then one line per measurement."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

__all__ = ["PRODUCTS", "Row", "Run", "load_run", "processor", "run_paths", "text_of", "write_line"]

PRODUCTS = "*grouped-gemm*.jsonl"  # results of benchmarks/sweeps/grouped_gemm.py, which have other fields


@dataclass(frozen=True)
class Row:
    """One implementation of one operation on one case, timed in one way.

    Attributes:
        op: Operator.
        variant: Variant of the operator.
        impl: Implementation; "core" is ours.
        shape: Name of the shape.
        tokens: T.
        topk: K.
        experts: E.
        hidden: H.
        routing: Kind of routing.
        alignment: A, in rows.
        fill: True if padding rows are zeroed.
        capacity: True if the buffer fits the worst case instead of exactly the padded segments.
        own_case: True if only the shape was requested: its own routing, no padding.
        routed_rows: Rows that hold a token.
        buffer_rows: Rows of the buffer.
        dtype: Element type of the rows.
        mode: "graph" or "eager" on a GPU, "cpu" on a CPU.
        cold: True if the operands were out of the caches.
        check: Kind of comparison, or "failed: ...", or "skipped: ...". Only a checked result has times.
        us: Median microseconds of a call.
        p5: 5 % of the samples are below.
        p95: 95 % of the samples are below.
        samples: Number of samples.
        min_us: The smallest sample; None in older results, as is the next.
        max_us: The largest sample.
        min_bytes: Bytes that must be moved.
        gbps: min_bytes per time, in 1e9 bytes per second.
        frac_copy: gbps over the copy speed of the same process.
        probe: The ceiling kernel that moves the same bytes.
        probe_us: Its median.
        frac_probe: Its time over the time of this row.
        launches: Kernels, copies and memsets of one call.
        note: A remark, such as the source of a figure that was not measured here.
    """

    op: str
    variant: str
    impl: str
    shape: str
    tokens: int
    topk: int
    experts: int
    hidden: int
    routing: str
    alignment: int
    fill: bool
    capacity: bool
    own_case: bool
    routed_rows: int
    buffer_rows: int
    dtype: str
    mode: str
    cold: bool
    check: str
    us: float | None = None
    p5: float | None = None
    p95: float | None = None
    samples: int | None = None
    min_us: float | None = None
    max_us: float | None = None
    min_bytes: int | None = None
    gbps: float | None = None
    frac_copy: float | None = None
    probe: str | None = None
    probe_us: float | None = None
    frac_probe: float | None = None
    launches: int | None = None
    note: str = ""

    @property
    def key(self) -> str:
        """The operation's name in filters and tables."""
        return f"{self.op}:{self.variant}"

    @property
    def failed(self) -> bool:
        return self.check.startswith("failed")

    @property
    def plain(self) -> bool:
        """True for a shape's own case, timed as the targets require: on a GPU replayed and cold, on a CPU warm."""
        return self.own_case and self.mode != "eager" and self.cold == (self.mode != "cpu")


@dataclass(frozen=True)
class Run:
    """A result file."""

    machine: dict[str, Any]
    rows: list[Row]
    path: Path | None = None


def text_of(failure: Exception) -> str:
    """The text of a failure in a result line."""
    return f"{type(failure).__name__}: {failure}"[:300]


def write_line(file: TextIO, record: Row | dict[str, Any]) -> None:
    """Append one record; a machine line carries ``"machine": true``."""
    data = asdict(record) if isinstance(record, Row) else {"machine": True, **record}
    file.write(json.dumps(data) + "\n")
    file.flush()


def run_paths(folder: Path) -> list[Path]:
    """The files in a folder that `load_run` reads; those of other programs say their commit and no set."""
    paths = (path for path in sorted(folder.glob("*.jsonl")) if not path.match(PRODUCTS))
    return [path for path in paths if not _is_of_another_program(path)]


def _is_of_another_program(path: Path) -> bool:
    first = next(iter(_lines(path)), "")
    try:
        record = json.loads(first)
    except json.JSONDecodeError:
        return False  # which `load_run` complains of
    return isinstance(record, dict) and "commit" in record and "set" not in record


def load_run(path: Path) -> Run:
    """Read a result file.

    Raises:
        ValueError: it is not one; says in which line.
    """
    names = {field.name for field in fields(Row)}
    machines, rows = [], []
    for number, line in enumerate(_lines(path), 1):
        record = json.loads(line)
        if record.pop("machine", False):
            machines.append(record)
        elif set(record) <= names:
            rows.append(Row(**record))
        else:
            raise ValueError(f"{path}, line {number}: unknown fields {', '.join(sorted(set(record) - names))}")
    if not machines:
        raise ValueError(f"{path}: the first line must describe the machine, but there is no such line")
    # The last line of a run repeats the first one and adds the facts that are known only at the end.
    return Run({key: value for machine in machines for key, value in machine.items()}, rows, path)


def processor(run: Run) -> str:
    """Name of the GPU, or of the CPU with the number of cores in use, that was measured."""
    if run.machine["device"] == "cuda":
        return run.machine["gpu"]
    return f"{run.machine['cpu']}, {run.machine['threads']} cores"


def _lines(path: Path) -> Iterable[str]:
    return (line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
