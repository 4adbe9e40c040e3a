# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A whole run: every operation is checked, timed and printed as one line of a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import paddle

from paddle_moe_ops import _report
from paddle_moe_ops.backends import resolve

from . import measure
from .calls import OWN, Call, Operation, Problem, operations
from .models import FORMAT, Model

# Exceptions of Paddle for a function that cannot run; another version may lack a function or an argument.
CANNOT_RUN = (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, OSError)
# Fields in which two comparable results agree, and the facts that distinguish machines.
KEY = ("tokens", "hidden", "experts", "topk", "device", "operation")
MACHINE = ("cpu", "usable_cores", "gpus")
LEGEND = f"""
ms      median time of a call; 5 % of the samples are below p5, and 95 % below p95
MB      the most memory that a call has allocated at a time, its outputs included
ratio   Paddle's time over ours
GB/s    rows read once and written once, in our time
Paddle  plain operators; where the ratio has a *, {OWN}"""

Row = dict[str, Any]


def run(options: argparse.Namespace) -> int:
    """Measure everything and return the exit status."""
    try:
        backend = resolve("permute", paddle.zeros([1, 1])).name
    except (RuntimeError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    machine = _facts(_report.collect(), backend)
    _print_head(machine)
    earlier = None if options.compare is None else _comparable(options.compare, machine)
    rows: list[Row] = []
    skipped: list[str] = []
    for model in dict.fromkeys(options.model):
        for tokens in dict.fromkeys(options.tokens):
            reason = _measure(model, tokens, options.seconds, earlier, rows)
            if reason:
                skipped.append(f"{model.name}, {tokens} tokens: {reason}")
                print(f"skipped: {reason}", flush=True)
    if rows:
        print(LEGEND)
    if options.out is not None:
        document = {"format": FORMAT, "machine": machine, "results": rows, "skipped": skipped}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"results: {options.out}")
    if options.picture is not None and rows:
        from .picture import draw

        draw(options.picture, rows)
        print(f"picture: {options.picture}")
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        print(f"bench FAILED: {len(wrong)} of {len(rows)} results are wrong")
    return 1 if wrong else 0


def _facts(report: dict[str, Any], backend: str) -> dict[str, Any]:
    """The facts of an environment report on which times depend."""
    library = report["compiled_library"]
    return {
        "cpu": report["cpu"]["model"],
        "usable_cores": report["cpu"]["usable_cores"],
        "gpus": report["gpus"],
        "backend": backend,
        "cpu_isa": library["cpu_isa"],
        "threads": library["threads"],
        "paddle_moe_ops": report["paddle_moe_ops"]["version"],
        "paddle": report["paddle"]["version"],
        "python": report["python"]["version"],
        "platform": report["python"]["platform"],
    }


def _print_head(machine: dict[str, Any]) -> None:
    where, how = ", ".join(machine["gpus"]) or "no NVIDIA GPU", ""
    if measure.on_cpu():
        where, how = machine["cpu"], f", {machine['cpu_isa']}, {machine['threads']} threads"
    print(f"paddle_moe_ops {machine['paddle_moe_ops']} (backend {machine['backend']}{how}), Paddle {machine['paddle']}")
    print(f"{paddle.get_device()}: {where}")
    load, cores = os.getloadavg()[0], machine["usable_cores"]
    if load > cores / 2:
        print(f"other programs are busy here (load {load:.1f} on {cores} cores): times will vary")


def _comparable(earlier: dict[str, Any], machine: dict[str, Any]) -> dict[tuple, Row] | None:
    """The earlier results by their key, None if they are of another machine; prints the changes since."""
    then = earlier["machine"]
    changed = [name for name, now in machine.items() if then.get(name) != now]
    for name in changed:
        print(f"compared with an earlier run: {name} was {then.get(name)}, now {machine[name]}")
    if set(changed) & set(MACHINE):
        print("compared with an earlier run: that was another machine, so no changes are shown")
        return None
    return {tuple(row[name] for name in KEY): row for row in earlier["results"]}


def _measure(model: Model, tokens: int, seconds: float, earlier: dict[tuple, Row] | None, rows: list[Row]) -> str:
    """Measure one problem, add its rows, and say why it was skipped, if it was."""
    count = tokens * model.topk
    size = f"{count} rows of {model.hidden} bfloat16 ({2 * count * model.hidden / 1e6:.1f} MB)"
    print(f"\n{model.name}, {tokens} tokens: {model.topk} of {model.experts} experts each, {size}", flush=True)
    needed, left = memory_needed(model, tokens), measure.memory_left()
    if needed > left:
        return f"it needs about {needed / 1e9:.1f} GB of memory, and {max(left, 0) / 1e9:.1f} GB are left"
    print(_header(earlier is not None), flush=True)
    problem = {"model": model.name, "tokens": tokens, "hidden": model.hidden, "experts": model.experts}
    problem |= {"topk": model.topk, "device": paddle.get_device()}
    try:
        for operation in operations(Problem(model, tokens)):
            row = {**problem, **_timed(operation, seconds)}
            rows.append(row)
            print(_line(row, earlier), flush=True)
    except MemoryError as error:
        lines = (line.strip() for line in str(error).splitlines())
        return next((line for line in lines if "memory" in line), "out of memory")
    return ""


def memory_needed(model: Model, tokens: int) -> int:
    """Bytes of the inputs and of the check that takes most, that of the gradient of sums."""
    return 4 * model.hidden * tokens * (4 + 7 * model.topk)


def _timed(operation: Operation, seconds: float) -> Row:
    """The row of one operation; without times if our result is wrong."""
    row = {"operation": operation.name, "moved_bytes": operation.moved, "ours": None, "paddle": None, "beside": None}
    try:
        row["wrong"] = operation.problem(operation.ours)
    except CANNOT_RUN as error:
        row["wrong"] = str(error).partition("\n")[0]
    if row["wrong"]:
        return row
    other = _first_that_runs(operation)
    calls = [operation.ours] if other is None else [operation.ours, other]
    times = dict(zip(("ours", "paddle"), measure.measure(calls, seconds), strict=False))
    return {**row, **times, "beside": other and other.name}


def _first_that_runs(operation: Operation) -> Call | None:
    for call in operation.others:
        try:
            problem = operation.problem(call)
        except CANNOT_RUN:
            continue
        if not problem:
            return call
        print(f"{call.name} is left out of {operation.name}: {problem}", flush=True)
    return None


# ---- the table


def _header(with_changes: bool) -> str:
    side = f"{'ms':>9}{'p5':>8}{'p95':>8}{'MB':>8}"
    first = f"{'':<22}{'ours':>9}{'':<24}{'Paddle':>9}{'':<38}{'change of' if with_changes else ''}"
    changes = f"{'ours':>9}{'Paddle':>8}" if with_changes else ""
    return f"{first.rstrip()}\n{'operation':<22}{side}{side}{'ratio':>8} {'GB/s':>6}{changes}"


def _line(row: Row, earlier: dict[tuple, Row] | None) -> str:
    name, ours, paddles = f"{row['operation']:<22}", row["ours"], row["paddle"]
    if row["wrong"]:
        return f"{name}  FAILED: {row['wrong']}"
    ratio = _digits(paddles["median_us"] / ours["median_us"], 2) if paddles else "-"
    speed = f"{row['moved_bytes'] / ours['median_us'] / 1e3:.1f}" if row["moved_bytes"] else "-"
    mark = "*" if row["beside"] == OWN else " "
    changes = ""
    if earlier is not None:
        then = earlier.get(tuple(row[key] for key in KEY), {})
        changes = f"{_change(then.get('ours'), ours):>9}{_change(then.get('paddle'), paddles):>8}"
    return f"{name}{_side(ours)}{_side(paddles)}{ratio:>8}{mark}{speed:>6}{changes}"


def _side(times: Row | None) -> str:
    if times is None:
        return f"{'-':>9}{'-':>8}{'-':>8}{'-':>8}"
    median, p5, p95 = (_digits(times[name] / 1e3, 3) for name in ("median_us", "p5_us", "p95_us"))
    memory = "-" if times["peak_bytes"] is None else f"{times['peak_bytes'] / 1e6:.1f}"
    return f"{median:>9}{p5:>8}{p95:>8}{memory:>8}"


def _digits(value: float, decimals: int) -> str:
    """A number with the given number of decimals; large numbers lose one or two."""
    return f"{value:.{decimals - (value >= 10) - (value >= 100)}f}"


def _change(then: Row | None, now: Row | None) -> str:
    return f"{now['median_us'] / then['median_us'] - 1:+.0%}" if then and now else "-"
