# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A whole run: every operation is checked, timed and printed as one line of a table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import paddle

from paddle_moe_ops import _report
from paddle_moe_ops.backends import resolve

from . import measure
from .calls import FUSED, LINES, OWN, Call, Operation, Problem, operations
from .layer_calls import (
    BATCH,
    DECODE,
    DECODER,
    LINES_OF_LAYER,
    TRAINING,
    LayerProblem,
    layer_operations,
    training_step,
)
from .models import FORMAT, Model

# Exceptions of Paddle for a function that cannot run; another version may lack a function or an argument.
CANNOT_RUN = (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, OSError)
# Fields in which two comparable results agree, and the facts that distinguish machines.
KEY = ("tokens", "hidden", "experts", "topk", "inner", "device", "operation")
MACHINE = ("cpu", "usable_cores", "gpus")
LEGEND = """
ms      median time of a call; 5 % of the samples are below p5, and 95 % below p95
MB      the most memory that a call has allocated at a time, its outputs included
ratio   Paddle's time over ours"""
OF_ROWS = f"""
GB/s    rows read once and written once, in our time
Paddle  plain operators; where the ratio has a *, {OWN}"""
OF_LAYERS = f"""
tok/s   tokens per second, in our time
Paddle  a matmul for each expert and plain operators; where the ratio has a *, {FUSED}"""

Row = dict[str, Any]


class Part(NamedTuple):
    """Problems of one size: `model` and `tokens` name them, `lines` operations are timed."""

    head: str
    model: Model
    tokens: int
    memory: int
    lines: int
    operations: Callable[[], Iterator[Operation]]


def run(options: argparse.Namespace) -> int:
    """Measure everything and return the exit status. A run that is stopped keeps its rows."""
    try:
        backend = resolve("permute", paddle.zeros([1, 1])).name
    except (RuntimeError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    machine = _facts(_report.collect(), backend)
    _print_head(machine)
    earlier = None if options.compare is None else _comparable(options.compare, machine)
    parts = list(_parts(options))
    lines = sum(part.lines for part in parts)
    seconds = options.seconds
    print(f"timing takes about {2 * lines * seconds:.0f} s: {lines} lines of two calls, {seconds:g} s each", flush=True)
    document: dict[str, Any] = {"format": FORMAT, "machine": machine, "results": [], "skipped": []}
    status = _measured(parts, options, earlier, document)
    rows = document["results"]
    if rows:
        print(LEGEND + (OF_LAYERS if options.layer else OF_ROWS))
    for row in rows:
        if row["operation"] == TRAINING and row["paddle"]:
            ours, without = (1e6 * row["tokens"] / row[side]["median_us"] for side in ("ours", "paddle"))
            print(f"\ntraining the decoder: {ours:.0f} tokens per second, and {without:.0f} without the package")
    if options.out is not None:
        print(f"results: {options.out}")
    if options.picture is not None and rows:
        from .picture import draw

        draw(options.picture, rows)
        print(f"picture: {options.picture}")
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        print(f"bench FAILED: {len(wrong)} of {len(rows)} results are wrong")
    return status or (1 if wrong else 0)


def _measured(
    parts: Sequence[Part], options: argparse.Namespace, earlier: dict[tuple, Row] | None, document: dict[str, Any]
) -> int:
    """Measure all parts; 0, or the exit status of a process that was stopped."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {
        each: signal.signal(each, measure.ask_to_stop) for each in (signal.SIGINT, signal.SIGTERM) if in_main_thread
    }
    try:
        _write(options.out, document)
        for part in parts:
            reason = _measure(part, options, earlier, document)
            if reason:
                document["skipped"].append(f"{part.model.name}, {part.tokens} tokens: {reason}")
                print(f"skipped: {reason}", flush=True)
                _write(options.out, document)
    except measure.Stopped as stopped:
        print(f"stopped after {len(document['results'])} lines", flush=True)
        return 128 + int(stopped.args[0])
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    return 0


def _write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _parts(options: argparse.Namespace) -> Iterator[Part]:
    """The problems of a run, in their order."""
    for model in dict.fromkeys(options.model):
        for tokens in dict.fromkeys(options.tokens):
            count = tokens * model.topk
            head = f"{model.name}, {tokens} tokens: {model.topk} of {model.experts} experts each"
            if not options.layer:
                size = f"{count} rows of {model.hidden} bfloat16 ({2 * count * model.hidden / 1e6:.1f} MB)"
                make = partial(_of_rows, model, tokens)
                yield Part(f"{head}, {size}", model, tokens, memory_needed(model, tokens), LINES, make)
                continue
            matrices = f"matrices [{model.hidden}, {2 * model.inner}] and [{model.inner}, {model.hidden}]"
            lines = LINES_OF_LAYER[tokens > DECODE]
            make = partial(_of_layer, model, tokens)
            yield Part(f"{head}, {matrices}", model, tokens, layer_memory_needed(model, tokens), lines, make)
    if options.layer:
        sizes = DECODER
        model = Model("decoder", sizes.hidden, sizes.experts, sizes.topk, sizes.expert_intermediate)
        texts = f"{BATCH} texts of {sizes.context} bytes"
        head = f"a decoder of {sizes.layers} layers, {texts}: {sizes.topk} of {sizes.experts} experts each"
        yield Part(head, model, BATCH * sizes.context, 2**28, 1, lambda: iter([training_step()]))


def _of_rows(model: Model, tokens: int) -> Iterator[Operation]:
    return operations(Problem(model, tokens))


def _of_layer(model: Model, tokens: int) -> Iterator[Operation]:
    return layer_operations(LayerProblem(model, tokens, measure.on_cpu()))


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
    return {tuple(row.get(name) for name in KEY): row for row in earlier["results"]}


def _measure(
    part: Part, options: argparse.Namespace, earlier: dict[tuple, Row] | None, document: dict[str, Any]
) -> str:
    """Measure one problem, add its rows, and say why it was skipped, if it was."""
    print(f"\n{part.head}", flush=True)
    left = measure.memory_left()
    if part.memory > left:
        return f"it needs about {part.memory / 1e9:.1f} GB of memory, and {max(left, 0) / 1e9:.1f} GB are left"
    print(_header(earlier is not None, options.layer), flush=True)
    problem = {"model": part.model.name, "tokens": part.tokens, "hidden": part.model.hidden}
    problem |= {"experts": part.model.experts, "topk": part.model.topk, "inner": part.model.inner}
    problem["device"] = paddle.get_device()
    try:
        for operation in part.operations():
            row = {**problem, **_timed(operation, options.seconds)}
            document["results"].append(row)
            print(_line(row, earlier), flush=True)
            _write(options.out, document)
    except MemoryError as error:
        lines = (line.strip() for line in str(error).splitlines())
        return next((line for line in lines if "memory" in line), "out of memory")
    return ""


def memory_needed(model: Model, tokens: int) -> int:
    """Bytes of the inputs and of the check that takes most, that of the gradient of sums."""
    return 4 * model.hidden * tokens * (4 + 6 * model.topk)


def layer_memory_needed(model: Model, tokens: int) -> int:
    """Bytes of the matrices with a copy for each expert, and of the check that takes most, that of the gradient."""
    matrices, rows = 3 * model.experts * model.hidden * model.inner, tokens * model.topk
    of_matrices = 20 if tokens > DECODE else 12
    return matrices * of_matrices + 4 * rows * (4 * model.hidden + 8 * model.inner)


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


def _header(with_changes: bool, of_layers: bool) -> str:
    side = f"{'ms':>9}{'p5':>8}{'p95':>8}{'MB':>8}"
    first = f"{'':<22}{'ours':>9}{'':<24}{'Paddle':>9}{'':<38}{'change of' if with_changes else ''}"
    changes = f"{'ours':>9}{'Paddle':>8}" if with_changes else ""
    return f"{first.rstrip()}\n{'operation':<22}{side}{side}{'ratio':>8} {'tok/s' if of_layers else 'GB/s':>6}{changes}"


def _line(row: Row, earlier: dict[tuple, Row] | None) -> str:
    name, ours, paddles = f"{row['operation']:<22}", row["ours"], row["paddle"]
    if row["wrong"]:
        return f"{name}  FAILED: {row['wrong']}"
    ratio = _digits(paddles["median_us"] / ours["median_us"], 2) if paddles else "-"
    mark = "*" if row["beside"] in (OWN, FUSED) else " "
    changes = ""
    if earlier is not None:
        then = earlier.get(tuple(row[key] for key in KEY), {})
        changes = f"{_change(then.get('ours'), ours):>9}{_change(then.get('paddle'), paddles):>8}"
    return f"{name}{_side(ours)}{_side(paddles)}{ratio:>8}{mark}{_speed(row):>6}{changes}"


def _speed(row: Row) -> str:
    """GB/s of rows that are moved, or tokens per second of a layer in thousands (k) or millions (M)."""
    if row["moved_bytes"] is None:
        per_second = row["tokens"] / row["ours"]["median_us"] * 1e6
        unit, letter = (1e6, "M") if per_second >= 1e6 else (1e3, "k") if per_second >= 1e3 else (1, "")
        return f"{_digits(per_second / unit, 2)}{letter}"
    return f"{row['moved_bytes'] / row['ours']['median_us'] / 1e3:.1f}" if row["moved_bytes"] else "-"


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
