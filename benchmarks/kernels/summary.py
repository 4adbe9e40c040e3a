# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Speed of the permutation on a GPU: a section of docs/performance.md.

Our times are those of public calls under Paddle, from ``*-public-calls.jsonl``; those of others come from the run of
the set `targets` on the same GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.spread import deviation, with_deviation

from .results import Run
from .table import markdown

__all__ = ["Calls", "newest_calls", "section"]

PADDLE, TE = "paddle (published, scaled)", "te triton"
MODELS = {"ernie-300b": "ERNIE-4.5-300B", "ernie-21b": "ERNIE-4.5-21B", "dsv3": "DeepSeek-V3"}
# Our call, and the operations of the benchmark in which Paddle's and TransformerEngine's do the same.
BESIDE = {
    "moe_permute": ("moe_permute:bf16", "route_permute:bf16"),
    "moe_unpermute": ("moe_unpermute:weighted", ""),  # TransformerEngine has none that takes back probabilities
    "permute": ("", "permute:bf16"),
    "unpermute": ("unpermute:weighted", "unpermute:weighted"),
}

TEXT = """
## Moving rows to experts and back

Public calls under Paddle: bfloat16 rows, with all outputs allocated in the call, calls one after the other. Tests
compare these calls with the oracle; this run only timed them. *of copy* is the least number of bytes that the call must
move, per time, over the speed of the GPU's fastest copy. *Paddle* are Paddle's own kernels, as published (PR 79756, on
the same kind of GPU, scaled by the copy speed); *TransformerEngine* are its Triton kernels in a CUDA graph, without
the overhead of its Python functions. `moe_unpermute` and `unpermute` are weighted.
"""
HOST = """
Small calls take as long as the host needs for them. Microseconds until a call returns, median, of 256 tokens of 256
columns, without a gradient, with one, and of the backward pass. CUDA graphs have none of it.

"""


class Calls(NamedTuple):
    """The public calls on one GPU, and the run with the others' times."""

    machine: dict[str, Any]
    lines: list[dict[str, Any]]
    run: Run

    def us(self, operation: str, shape: str) -> float | None:
        """Microseconds of our call, or None."""
        line = self.line(operation, shape)
        return None if line is None else line["us"]

    def line(self, operation: str, shape: str) -> dict[str, Any] | None:
        """Result of our call."""
        lines = (each for each in self.lines if (each["operation"], each.get("shape")) == (operation, shape))
        return next(lines, None)

    def other_us(self, implementation: str, operation: str, shape: str) -> float | None:
        """Microseconds of another implementation of one of our calls, or None."""
        key = BESIDE[operation][implementation == TE]
        rows = [row for row in self.run.rows if (row.key, row.shape, row.impl) == (key, shape, implementation)]
        return rows[0].us if rows else None

    def of_copy(self, operation: str, shape: str) -> float | None:
        """The speed of our call as a share of a copy's."""
        key = BESIDE[operation][0] or BESIDE[operation][1]
        us = self.us(operation, shape)
        row = next((row for row in self.run.rows if (row.key, row.shape, row.impl) == (key, shape, "core")), None)
        if us is None or row is None or row.us is None or row.frac_copy is None:
            return None
        return row.frac_copy * row.us / us

    @property
    def shapes(self) -> list[str]:
        return list(dict.fromkeys(each["shape"] for each in self.lines if "shape" in each))


def newest_calls(results: Path, runs: Iterable[Run]) -> list[Calls]:
    """The newest file of each GPU that a run of the set `targets` is there for."""
    of_gpu = {run.machine["gpu"]: run for run in runs if run.machine["set"] == "targets" and run.machine.get("gpu")}
    newest: dict[str, Calls] = {}
    for path in sorted(results.glob("*-public-calls.jsonl")):
        machine, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        gpu = machine["gpu"]
        if gpu in of_gpu and (gpu not in newest or newest[gpu].machine["date"] < machine["date"]):
            newest[gpu] = Calls(machine, lines, of_gpu[gpu])
    return list(newest.values())


def section(found: Sequence[Calls]) -> str:
    """The text, empty without results."""
    return "".join([TEXT, *map(_tables, found)]) if found else ""


def _tables(calls: Calls) -> str:
    facts = ", ".join(f"{name} {calls.machine[name]}" for name in ("paddle", "commit", "date"))
    cells = []
    for shape in calls.shapes:
        tokens = next(each["tokens"] for each in calls.lines if each.get("shape") == shape)
        for operation in BESIDE:
            us, ours = calls.us(operation, shape), _ours(calls.line(operation, shape))
            share = calls.of_copy(operation, shape)
            others = [_beside(us, calls.other_us(each, operation, shape)) for each in (PADDLE, TE)]
            cells.append(
                (MODELS[shape], str(tokens), operation, ours, "" if share is None else f"{share:.2f}", *others)
            )
        both = _ours(calls.line("permute, unpermute and gradients", shape))
        cells.append((MODELS[shape], str(tokens), "permute and unpermute, forward and backward", both, "", "", ""))
    columns = "model", "tokens", "call", "us", "of copy", "Paddle", "TransformerEngine"
    host = [each for each in calls.lines if each.get("host") and not each["operation"].startswith("paddle.")]
    rows = [
        (each["operation"], *(_host(each[kind]) for kind in ("without_gradient", "forward", "backward")))
        for each in host
    ]
    return (
        f"\n### {calls.machine['gpu']}\n\n{facts}.\n\n"
        + markdown(columns, cells)
        + HOST
        + markdown(("call", "without gradient", "forward", "backward"), rows)
    )


def _ours(line: dict[str, Any] | None) -> str:
    return "" if line is None else with_deviation(line["us"], deviation(line))


def _host(times: dict[str, float]) -> str:
    """Median, and the range of results that have both ends."""
    bounds = f" ({times['least']:.0f} - {times['most']:.0f})" if "most" in times else ""
    return f"{times['median']:.0f}{bounds}"


def _beside(ours: float | None, other: float | None) -> str:
    return "" if ours is None or other is None else f"{other:.0f} ({other / ours:.2f} x)"
