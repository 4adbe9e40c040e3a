# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The layers that are timed, and the first line of a result file."""

from __future__ import annotations

import datetime
import subprocess
from typing import Any, NamedTuple

__all__ = ["MODELS", "SHAPES", "TOKENS", "Shape", "machine"]

TOKENS = 8192


class Shape(NamedTuple):
    """d columns, E experts of inner size n, K experts a token."""

    hidden: int
    inner: int
    experts: int
    topk: int

    def flops(self, tokens: int) -> int:
        """Floating-point operations of a forward pass's GEMMs."""
        return 6 * tokens * self.topk * self.hidden * self.inner


SHAPES = {
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "mixtral": Shape(4096, 14336, 8, 2),
    "ernie-300b": Shape(8192, 3584, 64, 8),
    "dsv3": Shape(7168, 2048, 256, 8),
    "trial": Shape(128, 64, 8, 2),  # to see that a benchmark runs
}
MODELS = tuple(name for name in SHAPES if name != "trial")


def machine(commit: str, ranks: int, *, gpu: bool) -> dict[str, Any]:
    """The first line of a result file."""
    gpus, driver = ["CPU"] * ranks, "none"
    if gpu:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
        gpus, driver = [each.split(", ")[0] for each in found], found[0].split(", ")[1]
    date = datetime.date.today().isoformat()
    return {"machine": True, "gpus": gpus, "driver": driver, "commit": commit, "date": date, "ranks": ranks}
