# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The table of the record of ``python3 -m benchmarks.expert_parallel --overlap``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels.table import markdown
from benchmarks.spread import deviation, with_deviation

from .passes import PASSES

__all__ = ["overlap_section", "overlapped_us"]


def overlapped_us(steps: Sequence[dict[str, Any]], passing: str) -> tuple[float, float]:
    """Microseconds of a pass in which exchanges were in flight, and those of them in which GEMMs ran as well."""
    own = [each for each in steps if each["pass"] == passing]
    flights = [(each["begin_us"], each["end_us"]) for each in own if each["stream"] == "side"]
    products = [(each["begin_us"], each["end_us"]) for each in own if each["stream"] == "compute"]
    both = sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in flights for first, last in products)
    return sum(end - begin for begin, end in flights), both


def overlap_section(path: Path) -> str:
    """The part of the page: for each layer and case the times without and with exchanges in flight."""
    machine, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    text = f"""
## Exchanges that other work hides

Forward and backward pass of a layer on {machine["ranks"]} x {machine["gpus"][0]}, microseconds of the slowest rank
(`python3 -m benchmarks.expert_parallel --overlap`, commit {machine["commit"]}, {machine["date"]}).
*In flight* is with `async_op=True`. With `peer`, the last columns are the time that exchanges were in flight, and the
share of it in which GEMMs ran on the other stream.

* *shared expert*: an expert for all tokens runs beside combine and beside the exchange of its gradient.
* *two micro-batches*: half of the tokens each; experts of one run beside exchanges of the other.
* *deferred wgrad*: `defer_dw=True`; gradients of matrices run after the backward pass, or beside the last exchange.

"""
    head = ["layer", "case", "transport", "in turn", "in flight", "saved"]
    head += [f"{each}: in flight, hidden" for each in PASSES]
    rows = []
    pairs: dict[tuple[str, str, str], dict[bool, dict[str, Any]]] = {}
    for line in lines:
        pairs.setdefault((line["shape"], line["case"], line["transport"]), {})[line["in_flight"]] = line
    for key, pair in pairs.items():
        in_turn, in_flight = pair[False], pair[True]
        cells = [with_deviation(each["us"], deviation(each)) for each in (in_turn, in_flight)]
        cells.append(f"{100 * (1 - in_flight['us'] / in_turn['us']):.0f} %")
        for passing in PASSES:
            whole, both = overlapped_us(in_flight["steps"], passing)
            cells.append(f"{whole:.0f}, {100 * both / whole:.0f} %" if whole else "-")
        rows.append([*key, *cells])
    return text + markdown(head, rows)
