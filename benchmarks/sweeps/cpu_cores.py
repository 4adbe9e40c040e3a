#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Several builds of the core: every library and `memcpy` of the same bytes, interleaved in one process.

    python3 -m benchmarks.sweeps.cpu_cores before.so build/core/libpmo_core.so --names before after \
        --shapes dsv3 --ops 'unpermute_backward:*' --out together.jsonl

Load of other processes on the machine changes times by more than a change of a kernel does; interleaved, all builds run
under the same load. Outputs exist before the calls; `--cold` empties the caches before each. Results that fail the
benchmark's check are not timed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.kernels.cpu import CpuDevice
from benchmarks.kernels.operators import select_operations
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.shapes import cases_of
from benchmarks.kernels.targets import OURS
from benchmarks.spread import time_fields
from paddle_moe_ops import _report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("libraries", type=Path, nargs="+")
    parser.add_argument("--names", nargs="+", required=True, help="of the libraries, in the results")
    parser.add_argument("--shapes", nargs="+", default=["dsv3"])
    parser.add_argument("--ops", nargs="+", default=["permute:bf16", "unpermute:*", "unpermute_backward:*"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="result file; lines are added")
    arguments = parser.parse_args()
    devices = {name: CpuDevice(path) for name, path in zip(arguments.names, arguments.libraries, strict=True)}
    cores = {
        name: next(each for each in device.implementations if each.name == OURS) for name, device in devices.items()
    }
    timer = next(iter(devices.values()))
    records: list[dict[str, Any]] = [{"machine": True, "cpu": _report.cpu_model(), "threads": timer.threads}]
    try:
        cases, operations = cases_of("targets", arguments.shapes), select_operations(arguments.ops)
    except ValueError as error:
        parser.error(str(error))
    for case in cases:
        inputs = timer.load(make_problem(case))
        for operation in operations:
            bodies = {name: core.prepare(operation, inputs) for name, core in cores.items()}
            bodies["memcpy"] = timer.memory.copying().prepare(operation, inputs)
            calls = {name: timer.capture(body, "cpu") for name, body in bodies.items()}
            for name, body in bodies.items():
                wrong = timer.check(operation, inputs, calls[name], body)
                if wrong:
                    raise SystemExit(f"{name}: {wrong}")
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(arguments.rounds):
                for name, call in calls.items():
                    times[name] += timer.sample(call, 1, arguments.cold)
            record = {"shape": case.shape.name, "operation": operation.key, "cold": arguments.cold}
            found = {name: time_fields(samples, digits=1) for name, samples in times.items()}
            for field in ("us", "min_us", "max_us"):
                record[field] = {name: each[field] for name, each in found.items()}
            print(record, flush=True)
            records.append(record)
    with arguments.out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
