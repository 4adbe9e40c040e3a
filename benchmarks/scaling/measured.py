# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Results of `benchmarks.expert_parallel` that the model predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import load

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
    bytes: int
    us: float


def load_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the machine and the other lines of a result file.

    Raises:
        ValueError: the first line is no machine.
    """
    lines = load(path)
    if not lines or not lines[0].get("machine"):
        raise ValueError(f"{path}: the first line must describe the machine, but there is no such line")
    return lines[0], lines[1:]


def load_exchanges(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """Return the machine and those measurements that the model predicts (float8 by peers is not one)."""
    machine, lines = load_lines(path)
    kept = (line for line in lines if line.get("what") in WHATS)
    return machine, [Measured(**{name: line[name] for name in Measured._fields}) for line in kept]
