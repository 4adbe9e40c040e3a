#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The table of docs/backends.md: microseconds of the CUDA core and of the Triton kernels at the shapes of a run.

python3 benchmarks/sweeps/compare_backends.py benchmarks/results/h200-targets.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

IMPLEMENTATIONS = ("core", "triton")


def main() -> int:
    times: dict[str, dict[str, dict[str, float]]] = {}
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("impl") in IMPLEMENTATIONS and row.get("us") is not None:
            operation = times.setdefault(f"{row['op']}:{row['variant']}", {})
            operation.setdefault(row["shape"], {})[row["impl"]] = row["us"]
    shapes = list(dict.fromkeys(shape for operation in times.values() for shape in operation))
    print("| us, CUDA / Triton | " + " | ".join(shapes) + " |")
    print("|---" * (len(shapes) + 1) + "|")
    for operation, by_shape in times.items():
        cells = []
        for shape in shapes:
            core, triton = (by_shape.get(shape, {}).get(name) for name in IMPLEMENTATIONS)
            if core is None or triton is None:
                cells.append("")
            else:
                cells.append(f"{core:.1f} / **{triton:.1f}**" if triton < core else f"{core:.1f} / {triton:.1f}")
        print(f"| {operation} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
