# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Whole passes of a recorded layer call; needs neither Paddle nor a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["PASSES", "STAGES", "pass_times", "slowest_steps"]

STAGES = "routing", "dispatch", "products", "combine"
PASSES = "forward", "backward"


def slowest_steps(ranks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps of the rank that ends last."""
    steps: list[dict[str, Any]] = max(ranks, key=lambda line: line["steps"][-1]["end_us"])["steps"]
    return steps


def pass_times(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of each pass: from the end of the pass before it, or from the start, to the end of its last step."""
    times, begin = {}, 0.0
    for each in PASSES:
        end = [step["end_us"] for step in steps if step["pass"] == each][-1]
        times[each], begin = end - begin, end
    return times
