# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The part of performance_gpu.md about hardware counters, from the results of `benchmarks/ncu.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["COLUMNS", "TEXT", "load_counters"]

TEXT = """
Read by `ncu` (Nsight Compute) of one launch each, with `benchmarks/ncu.py`: the least bytes of the operation, the bytes
that DRAM really read and wrote, throughput of DRAM, of the L2 and, where they were looked at, of the tensor cores, and
issued instructions, in percent of their peaks, warps in percent of what a multiprocessor can hold, and what a warp
waited for most, in cycles per instruction that it issued. `ncu` empties the caches before a launch and lets it run
alone; its times are not those of the other tables.
"""
COLUMNS = (
    *("operation", "case", "kernel", "us", "least MB", "read MB", "written MB"),
    *("DRAM %", "L2 %", "tensor %", "issue %", "warps %", "waits for"),
)
_NUMBERS = (
    *("us", "min_mb", "dram_read_mb", "dram_write_mb"),
    *("dram_percent", "l2_percent", "tensor_percent", "issue_percent", "warps_percent"),
)
_STALL = "stall_"


def load_counters(path: Path) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Read a result file: its machine line, and the cells of a table with `COLUMNS`."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    machine = next(record for record in records if record.pop("machine", False))
    return machine, [tuple(_cells(record)) for record in records if "operation" in record]


def _cells(record: dict[str, Any]) -> Iterator[str]:
    yield from (record["operation"], record["shape"], record["kernel"])
    yield from ("" if record.get(name) is None else f"{record[name]:.1f}" for name in _NUMBERS)
    stalls = {name.removeprefix(_STALL): cycles for name, cycles in record.items() if name.startswith(_STALL)}
    most = sorted(stalls, key=lambda name: -stalls[name])[:2]
    yield ", ".join(f"{name.replace('_', ' ')} {stalls[name]:.1f}" for name in most)
