# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what was measured: exchanges between GPUs, layers on one, operators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["WHATS", "Measured", "load_exchanges", "load_lines"]

WHATS = (
    "p2p_copy",
    "dispatch",
    "dispatch_without_copy",
    "combine",
    "alltoall_single",
    "rows_alltoall",
    "layer_forward",
    "layer_backward",
    "layer",
)
_NOT_PREDICTED = ("dispatch_float8",)  # the model has float8 for collectives only


class Measured(NamedTuple):
    """A line of `benchmarks.expert_parallel`: medians of the slowest rank."""

    what: str
    shape: str
    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int
    ranks: int
    size: int
    us: float


def load_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine and the other lines of a result file.

    Raises:
        ValueError: the first line is no machine.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines or not lines[0].get("machine"):
        raise ValueError(f"{path}: the first line must describe the machine, but there is no such line")
    return lines[0], lines[1:]


def load_exchanges(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """The machine and the measurements of a file of `benchmarks.expert_parallel`.

    Raises:
        ValueError: a line that is none of its; says which.
    """
    machine, lines = load_lines(path)
    found = []
    for number, line in enumerate(lines, 2):
        if line.get("what") in _NOT_PREDICTED:
            continue
        missing = [name for name in (*Measured._fields, "bytes") if name != "size" and name not in line]
        if missing:
            raise ValueError(f"{path}, line {number}: {', '.join(missing)} must be given, but is not")
        if line["what"] not in WHATS:
            raise ValueError(f"{path}, line {number}: what must be one of {WHATS}, but got {line['what']!r}")
        values = {name: line[name] for name in Measured._fields if name != "size"}
        found.append(Measured(**values, size=line["bytes"]))
    return machine, found
