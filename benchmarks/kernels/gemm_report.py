# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The part of performance_gpu.md about grouped GEMM, from the results of `benchmarks/sweeps/grouped_gemm.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.spread import deviation, with_deviation

from .results import PRODUCTS

__all__ = ["COLUMNS", "TEXT", "load_products", "newest_products"]

TEXT = """
Triton kernels with their default configurations beside `torch._grouped_mm`, at the sizes of models, bfloat16: medians
of calls with a cold L2, in newer results ± the larger distance of minimum and maximum. *of torch* is PyTorch's time
over ours; where PyTorch has no such product, its time is that of the product and of what comes before or after it (a
gather of rows, a multiplication by weights). *apart* is what ours takes where rows that are gathered while they are
loaded are moved by a launch of their own instead.
`benchmarks/sweeps/grouped_gemm.py` says what the operations are.
"""
COLUMNS = ("operation", "case", "us", "TFLOP/s", "torch us", "of torch", "apart us", "apart / fused")
_IN_LOAD = "_in_load"

_Lines = dict[tuple[str, str], dict[str, Any]]


def newest_products(folder: Path) -> tuple[Path, dict[str, Any], list[tuple[str, ...]]] | None:
    """The newest result file by its own date, or None: path, machine line, and the cells of a table with `COLUMNS`."""
    found = [(path, *load_products(path)) for path in sorted(folder.glob(PRODUCTS))]
    return max(found, key=lambda result: result[1]["date"], default=None)


def load_products(path: Path) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Read a result file.

    Raises:
        ValueError: it has no line that describes the machine.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    machine = next((record for record in records if record.pop("machine", False)), None)
    if machine is None:
        raise ValueError(f"{path}: the first line must describe the machine, but there is no such line")
    return machine, list(_table(record for record in records if "op" in record))


def _table(records: Iterable[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    ours: _Lines = {}
    torchs: _Lines = {}
    for record in records:
        key = record["op"], record["shape"]
        if record["impl"] == "torch":
            torchs[key] = record
        elif record["config"] is None or record["op"].endswith(_IN_LOAD):
            ours[key] = record
    for (operation, shape), line in ours.items():
        if "error" in line:
            raise ValueError(
                f"{operation}, {shape}: the result must be right, but got {line['error']}; measure it again"
            )
        us, torchs_line = line["us"], torchs.get((operation, shape), {})
        torch = torchs_line.get("us")
        apart = None
        if operation.endswith(_IN_LOAD):
            apart = ours.get((operation.removesuffix(_IN_LOAD), shape), {}).get("us")
        yield (
            *(operation, shape, f"**{with_deviation(us, deviation(line))}**", f"{line['tflops']:.0f}"),
            *(("", "") if torch is None else (with_deviation(torch, deviation(torchs_line)), f"{torch / us:.2f}")),
            *(("", "") if apart is None else (f"{apart:.0f}", f"{apart / us:.2f}")),
        )
