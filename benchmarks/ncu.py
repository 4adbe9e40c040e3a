#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
r"""Bottlenecks of the kernels: hardware counters of single launches, read by Nsight Compute (`ncu`).

    python3 -m benchmarks.ncu --core-library libpmo_core.so --out benchmarks/results/ncu/h200.jsonl
    python3 -m benchmarks.ncu --ops 'gemm:*' --out benchmarks/results/ncu/h200-grouped-gemm.jsonl
    python3 -m benchmarks.ncu --core-library libpmo_core.so --ops 'layer:*' \
        --out benchmarks/results/ncu/h200-layer.jsonl

Every case is one eager call of the benchmark under `ncu`, whose caches are emptied before each pass; those of `gemm:*`
are calls of `benchmarks/sweeps/grouped_gemm.py`, in one process, and those of `layer:*` both passes of a layer, by
`benchmarks/layer/launches.py`. `gemm:*` needs no library. A line per kernel, in
layers per part of a pass: time, bytes that DRAM read and wrote, the least bytes of the operation, throughputs in
percent of the peak, and the stalls of its warps, in cycles per issued instruction.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import functools
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {
    **{name: STALL.format(name) for name in ("long_scoreboard", "barrier", "lg_throttle", "membar", "no_instruction")},
    **{
        name: STALL.format(name) for name in ("short_scoreboard", "mio_throttle", "wait", "math_pipe_throttle", "drain")
    },
}
METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "dram_read_mb": ("dram__bytes_read.sum", 1e-6),
    "dram_write_mb": ("dram__bytes_write.sum", 1e-6),
    "dram_percent": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "l2_percent": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "warps_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "issue_percent": ("sm__inst_issued.avg.pct_of_peak_sustained_active", 1),
    **{f"stall_{name}": (metric, 1) for name, metric in STALLS.items()},
}
# Counters of GEMMs; the stall exists on Hopper only.
GEMM_METRICS = {
    **METRICS,
    "tensor_percent": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1),
    "stall_gmma": (STALL.format("gmma"), 1),
    "bank_read_percent": ("l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed", 1),
    "bank_write_percent": ("l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed", 1),
    "mhz": ("sm__cycles_elapsed.avg.per_second", 1e-6),
}
# Operation, shape, kernel: cases that miss their target, and cases that reach it, to compare with.
CASES = (
    ("route:maps", "paddle-production", "fused"),
    ("route_permute:bf16", "tileops-32", "few_slots"),
    ("route_permute:bf16", "tileops-128", "few_slots"),
    ("route_permute:bf16", "tileops-512", "few_slots"),
    ("route_permute:bf16", "ernie-300b", "fused"),
    ("route_permute:bf16", "ernie-21b", "fused"),
    ("route_permute:bf16", "dsv3", "fused"),
    ("route_permute:fp8", "dsv3", "fused"),
    ("route_permute:fp8", "ernie-21b", "move_pieces"),
    ("moe_permute:bf16", "paddle-production", "move_pieces"),
    ("permute_quantized:row", "ernie-300b", "quantize_rows"),
    ("unpermute:weighted", "tileops-32", "sum_window"),
    ("unpermute:weighted", "tileops-128", "sum_window"),
    ("unpermute:weighted", "tileops-512", "sum_window"),
    ("unpermute:plain", "ernie-21b", "sum_window"),
    ("unpermute:weighted", "paddle-production", "sum_rows_by_tiles"),
    ("moe_unpermute:weighted", "paddle-production", "keep_winners"),
    ("unpermute_backward:weighted", "ernie-300b", "row_backward"),
    ("unpermute_backward:weighted", "dsv3", "row_backward"),
    ("unpermute_backward:weighted", "ernie-21b", "row_backward"),
    ("unpermute_backward:weighted", "paddle-production", "token_backward"),
)

# Counters that are added up over several launches; others are averaged over the time.
ADDED = ("us", "dram_read_mb", "dram_write_mb")

LAYER = "layer:"
FLOAT8 = "-float8"  # after the name of a shape
LAYER_SHAPES = ("ernie-21b", "ernie-300b-4k", "dsv3-4k", "qwen3-30b", "ernie-21b" + FLOAT8)
LAYER_KERNELS = "^(grouped_|move_pieces|fused|sum_|row_sums|quantize_)"

GEMM = "gemm:"
GEMM_SHAPE = "dsv3"
GEMM_CASES = {"forward": "grouped_gemm", "gathered_in_load": "grouped_gemm", "dw": "wgrad"}


def counters(
    arguments: list[str], kernel: str, launches: slice, metrics: dict[str, tuple[str, float]], folder: Path
) -> tuple[list[dict], list[dict]]:
    """The contents of a Python program's result file, and the counters of these kernel launches."""
    first, result = launches.start or 0, folder / "result.jsonl"
    wanted = ",".join(metric for metric, _ in metrics.values())
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["-k", f"regex:{kernel}", "-s", str(first), "--metrics", wanted]
    if launches.stop is not None:
        command += ["-c", str(launches.stop - first)]
    command += [sys.executable, *arguments, "--out", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not result.exists():
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    records = [json.loads(line) for line in result.read_text().splitlines()]
    table = list(csv.DictReader(io.StringIO(done.stdout[done.stdout.index('"ID"') :])))
    found = [
        {name: round(float(values[metric].replace(",", "")) * unit, 3) for name, (metric, unit) in metrics.items()}
        for values in table[1:]  # the first line has the units
    ]
    return records, found


def profile(operation: str, shape: str, kernel: str, core_library: Path, folder: Path) -> tuple[dict, list[dict]]:
    """The benchmark's own machine line, and the counters of the kernel's second launch in it."""
    bench = ["-m", "benchmarks.kernels", "--device", "cuda", "--shapes", shape, "--ops", operation]
    bench += ["--impl", "core", "--set", "targets", "--no-probes", "--mode", "eager", "--samples", "2", "--rounds", "1"]
    bench += ["--core-library", str(core_library)]
    (machine, *rows), (found,) = counters(bench, kernel, slice(1, 2), METRICS, folder)
    row = next(row for row in rows if "op" in row)
    least = {"min_mb": round(row["min_bytes"] / 1e6, 3)}
    return machine, [{"operation": operation, "shape": shape, "kernel": kernel, **least, **found}]


def profile_gemm(names: list[str], folder: Path) -> tuple[dict, list[dict]]:
    """The sweep's machine line, and the counters of each operation's kernel; Triton compiles before it launches."""
    sweep = ["-m", "benchmarks.sweeps.grouped_gemm", "--once", "--shapes", GEMM_SHAPE, "--ops", *names]
    kernels = "|".join(f"{kernel}_kernel" for kernel in sorted(set(GEMM_CASES.values())))
    (machine, *rows), launches = counters(sweep, kernels, slice(len(names)), GEMM_METRICS, folder)
    lines = []
    for row, found in zip((row for row in rows if "op" in row), launches, strict=True):
        case = {"operation": GEMM + row["op"], "shape": row["shape"], "kernel": GEMM_CASES[row["op"]]}
        lines.append({**case, "min_mb": round(row["min_bytes"] / 1e6, 3), **found})
    return machine, lines


def profile_layer(shape: str, core_library: Path, folder: Path) -> tuple[dict, list[dict]]:
    """The machine line, and the counters of each part of both passes, added up or averaged over the time."""
    command = ["-m", "benchmarks.layer.launches", "--shape", shape.removesuffix(FLOAT8)]
    command += ["--float8"] * shape.endswith(FLOAT8)
    command += ["--core-library", str(core_library)]
    (machine, *rows), launches = counters(command, LAYER_KERNELS, slice(None), GEMM_METRICS, folder)
    parts: dict[tuple[str, str], list[tuple[dict, dict]]] = {}
    for row, found in zip(rows, launches, strict=True):
        parts.setdefault((row["pass"], row["part"]), []).append((row, found))
    lines = []
    for (which, part), group in parts.items():
        line = {"operation": LAYER + shape, "pass": which, "part": part, "launches": len(group)}
        line["tflop"] = round(sum(row["flop"] for row, _ in group) / 1e12, 4)
        us = sum(found["us"] for _, found in group)
        for name in GEMM_METRICS:
            if name in ADDED:
                line[name] = round(sum(found[name] for _, found in group), 3)
            else:
                line[name] = round(sum(found[name] * found["us"] for _, found in group) / us, 3)
        lines.append(line)
    return machine, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core-library", type=Path, help="not needed for gemm:*")
    parser.add_argument("--commit", default="unknown", help="commit of the sources")
    parser.add_argument("--ops", nargs="+", default=["*"], metavar="PATTERN", help="operations to look at")
    parser.add_argument("--out", type=Path, required=True, help="result file; it is replaced")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def matches(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in arguments.ops)

    cases = [case for case in CASES if matches(case[0])]
    products = [name for name in GEMM_CASES if matches(GEMM + name)]
    layers = [shape for shape in LAYER_SHAPES if matches(LAYER + shape)]
    if cases and arguments.core_library is None:
        parser.error(f"{cases[0][0]} needs --core-library")
    with tempfile.TemporaryDirectory() as name, arguments.out.open("w", encoding="utf-8") as file:
        folder = Path(name)
        profiles = [functools.partial(profile, *case, arguments.core_library, folder) for case in cases]
        if products:
            profiles.append(functools.partial(profile_gemm, products, folder))
        profiles += [functools.partial(profile_layer, shape, arguments.core_library, folder) for shape in layers]
        for index, run in enumerate(profiles):
            machine, lines = run()
            if index == 0:
                facts = {name: machine[name] for name in ("gpu", "driver", "cuda", "date")}
                lines.insert(0, {"machine": True, **facts, "commit": arguments.commit})
            for line in lines:
                for output in (file, sys.stdout):
                    print(json.dumps(line), file=output, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
