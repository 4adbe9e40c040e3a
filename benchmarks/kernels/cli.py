# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.kernels``: options, the result file, and the output."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_moe_ops._version import __version__

from .device import Device, Implementation
from .operators import select_operations
from .results import Row, write_line
from .run import Runner, Settings
from .shapes import SETS, SHAPES, Case, Operation, cases_of
from .table import LiveTable, print_table
from .targets import TARGETS, VERDICT_COLUMNS, Verdict, judge, verdict_cells

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if all results were right, 1 if one was not, 2 for bad arguments."""
    arguments = _parser().parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    # paths on the measuring machine are of no interest
    named = [Path(each).name if "/" in each else each for each in given]
    arguments.command = shlex.join(["python", "-m", "benchmarks.kernels", *named])
    try:
        operations = select_operations(arguments.ops)
        cases = cases_of(
            arguments.set,
            arguments.shapes,
            arguments.routing,
            arguments.alignment,
            [value == "on" for value in arguments.fill],
        )
        settings = _settings(arguments)
        if arguments.list:
            _print_plan(cases, operations)
            return 0
        device = _open_device(arguments)
        _check_modes(device, settings)
        implementations = _chosen(device.implementations, arguments.impl)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    rows = _measure(arguments, device, implementations, cases, operations, settings)
    _print_verdicts(judge(rows, TARGETS.get(device.name, ())))
    return 1 if any(row.failed for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description="Times operators after checking their results; exit status 1 if a result is wrong.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--set", default="quick", help=f"which cases: {', '.join(SETS)} (default: quick)")
    parser.add_argument("--shapes", nargs="+", default=[], help=f"T,K,E,H or names: {', '.join(SHAPES)}")
    parser.add_argument("--ops", nargs="+", default=[], help="operators or operator:variant; patterns are allowed")
    parser.add_argument("--impl", nargs="+", default=[], help="implementations; patterns are allowed (default: all)")
    parser.add_argument("--routing", nargs="+", default=[], help="kinds of routing instead of the cases' own")
    parser.add_argument("--alignment", nargs="+", type=int, default=[], help="rows of alignment instead")
    parser.add_argument("--fill", nargs="+", choices=("on", "off"), default=[], help="zero padding rows, or not")
    parser.add_argument("--mode", nargs="+", default=[], help="how calls are launched (default: the device's first)")
    parser.add_argument(
        "--cache",
        nargs="+",
        choices=("cold", "warm"),
        default=[],
        help="state of the caches (default: cold; cpu: warm)",
    )
    parser.add_argument("--samples", type=int, default=60, help="samples of each row (default: 60)")
    parser.add_argument("--rounds", type=int, default=5, help="turns in which they are taken (default: 5)")
    parser.add_argument("--no-probes", action="store_true", help="no ceiling kernels, and so no nvcc")
    parser.add_argument("--core-library", type=Path, default=ROOT / "build" / "core" / "libpmo_core.so")
    parser.add_argument("--te-wheel-dir", type=Path, help="folder with the transformer_engine wheel, or its contents")
    parser.add_argument("--commit", help="commit of the sources, for a machine where git cannot tell")
    parser.add_argument("--out", type=Path, help="result file; it is replaced")
    parser.add_argument("--list", action="store_true", help="print cases and operations, measure nothing")
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    for name, least in (("samples", 1), ("rounds", 1)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name} must be at least {least}, but got {getattr(arguments, name)}")
    return Settings(
        modes=arguments.mode or (("graph",) if arguments.device == "cuda" else ("cpu",)),
        colds=[value == "cold" for value in dict.fromkeys(arguments.cache)] or [arguments.device != "cpu"],
        samples=arguments.samples,
        rounds=arguments.rounds,
        probes=not arguments.no_probes,
        published=not arguments.impl,
    )


def _check_modes(device: Device, settings: Settings) -> None:
    for mode in settings.modes:
        if mode not in device.modes:
            raise ValueError(f"--mode must be one of {', '.join(device.modes)} on {device.name}, but got {mode!r}")


def _open_device(arguments: argparse.Namespace) -> Device:
    if arguments.device == "cpu":
        from .cpu import CpuDevice

        return CpuDevice(arguments.core_library)
    try:
        from .cuda import CudaDevice
    except ImportError as error:
        raise ValueError(f"--device cuda needs PyTorch for memory and CUDA graphs, but: {error}") from error
    return CudaDevice(arguments.core_library, arguments.te_wheel_dir, probes=not arguments.no_probes)


def _chosen(implementations: Sequence[Implementation], patterns: Sequence[str]) -> list[Implementation]:
    if not patterns:
        return list(implementations)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(implementation.name, pattern) for implementation in implementations):
            names = ", ".join(implementation.name for implementation in implementations)
            raise ValueError(f"--impl must match some of {names}, but got {pattern!r}")
    return [
        implementation
        for implementation in implementations
        if any(fnmatch.fnmatchcase(implementation.name, pattern) for pattern in patterns)
    ]


def _measure(
    arguments: argparse.Namespace,
    device: Device,
    implementations: Sequence[Implementation],
    cases: Sequence[Case],
    operations: Sequence[Operation],
    settings: Settings,
) -> list[Row]:
    start = time.monotonic()
    ceilings = device.measure_ceilings(settings.samples)
    machine = {**_environment(arguments), **device.machine(), **ceilings, "left_out": device.left_out}
    print(f"{machine.get('gpu', machine['cpu'])}: copy {ceilings['copy_gbps']:.0f} GB/s, commit {machine['commit']}")
    for name, reason in device.left_out.items():
        print(f"left out: {name}: {reason}")
    file = None
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        file = arguments.out.open("w", encoding="utf-8")
    try:
        if file:
            write_line(file, machine)
        with LiveTable() as table:

            def report(row: Row) -> None:
                table.add(row)
                if file:
                    write_line(file, row)

            runner = Runner(device, implementations, settings, float(ceilings["copy_gbps"]))
            rows = runner.measure(cases, operations, report)
        if file:
            end = device.machine()
            changed = {f"{name}_at_end": end[name] for name in end if end[name] != machine[name]}
            write_line(file, {**changed, "seconds": round(time.monotonic() - start)})
    finally:
        if file:
            file.close()
    return rows


def _environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of every machine line, whatever the device."""
    from paddle_moe_ops import _report

    return {
        "device": arguments.device,
        "set": arguments.set,
        "version": __version__,
        "commit": arguments.commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": arguments.command,
        "python": platform.python_version(),
        "cpu": _report.cpu_model(),
    }


def _commit() -> str:
    """The commit of the sources, with a mark if there are changes on top; "unknown" outside a checkout."""
    if not (ROOT / "setup.py").is_file():
        return "unknown"
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _print_plan(cases: Sequence[Case], operations: Sequence[Operation]) -> None:
    print_table(
        ("case", "T", "K", "E", "H", "routing"),
        [(case.label, *(str(size) for size in case.shape[1:5]), case.routing) for case in cases],
    )
    print("\n" + "\n".join(operation.key for operation in operations))


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    if verdicts:
        print("\ntargets")
        print_table(VERDICT_COLUMNS, [verdict_cells(verdict) for verdict in verdicts])
