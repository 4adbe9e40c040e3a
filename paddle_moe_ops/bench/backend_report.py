# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the CUDA core and the Triton kernels in a result file: the table of docs/backends.md, and which calls run on
Triton without being asked to (backends/choice_table.py).

python -m paddle_moe_ops.bench.backend_report --results benchmarks/results --docs docs

A call in dygraph takes as long as the GPU or as the host, whichever is longer. What the GPU takes is in the result
file, what the host takes is in results/host, which benchmarks/sweeps/host_time.py writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .results import Row, Run, load_run, processor, run_paths
from .targets import OURS, TRITON

__all__ = ["Point", "choose", "main", "page_with", "table"]

BEGIN, END = "<!-- generated: backends -->\n", "<!-- end of generated -->\n"
CHOICE_TABLE = Path("paddle_moe_ops/backends/choice_table.py")
_FACTS = ("gpu", "cuda", "triton", "commit", "date")
_FASTER = 1.05
_ID_BYTES = 4
_ITEM_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "int32": _ID_BYTES}

HostTimes = dict[tuple[str, str, int], float]  # by operator, implementation and number of tokens


class Rule(NamedTuple):
    """What decides about an operator: its own times, and those of its gradient, which stays on its backend."""

    operator: str
    dtype: str
    forward: tuple[str, ...]
    gradient: tuple[str, ...] = ()
    size: str = "tokens"  # rows of the first tensor: those of tokens or of the buffer


_GRADIENTS = tuple(f"unpermute_backward:{variant}" for variant in ("plain", "weighted", "dx", "dprob"))
RULES = (
    Rule("route", "int32", ("route:maps",)),
    Rule("permute", "bfloat16", ("permute:bf16",), ("unpermute:plain",)),
    Rule("permute", "float8_e4m3fn", ("permute:fp8",)),
    Rule("moe_permute", "bfloat16", ("moe_permute:bf16",), ("unpermute:plain",)),
    Rule("moe_permute", "float8_e4m3fn", ("moe_permute:fp8",)),
    Rule("permute_quantized", "bfloat16", tuple(f"permute_quantized:{variant}" for variant in ("row", "col", "ue8m0"))),
    Rule("unpermute", "bfloat16", ("unpermute:plain", "unpermute:weighted"), _GRADIENTS, "buffer"),
    Rule("moe_unpermute", "bfloat16", ("moe_unpermute:plain", "moe_unpermute:weighted"), _GRADIENTS, "buffer"),
    Rule("sort_chunks", "bfloat16", ("sort_chunks:forward",), ("sort_chunks:backward",), "buffer"),
)


class Point(NamedTuple):
    """A measured shape of an operator: its first tensor, and whether Triton is the one to take there."""

    row_bytes: int
    size: int  # bytes in all
    faster: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table and the choice; 1 if no result file has both implementations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--choice", type=Path, default=CHOICE_TABLE)
    arguments = parser.parse_args(argv)
    try:
        run = newest(map(load_run, run_paths(arguments.results)))
    except ValueError as error:
        print(f"backend report: {error}", file=sys.stderr)
        return 1
    if run is None:
        print(
            f"backend report: no run in {arguments.results} timed core and triton; nothing was written", file=sys.stderr
        )
        return 1
    host = load_host_times(sorted(arguments.results.glob("host/*.jsonl")), processor(run))
    chosen = choose(run.rows, host)
    page = arguments.docs / "backends.md"
    page.write_text(page_with(page.read_text(encoding="utf-8"), table(run), verdict(chosen, host)), encoding="utf-8")
    arguments.choice.write_text(choice_source(chosen), encoding="utf-8")
    print(f"backend report: {run.path}; calls that run on Triton by themselves: {len(chosen)}")
    return 0


def newest(runs: Iterable[Run]) -> Run | None:
    """The newest run that timed both implementations on a GPU."""
    both = [
        run
        for run in runs
        if run.machine["device"] == "cuda" and {OURS, TRITON} <= {row.impl for row in run.rows if row.us is not None}
    ]
    return max(both, key=lambda run: run.machine["date"], default=None)


def load_host_times(paths: Iterable[Path], gpu: str) -> HostTimes:
    """What calls take on the host of a machine with this GPU."""
    found: HostTimes = {}
    for path in paths:
        machine, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line)
        if machine["gpu"] == gpu:
            found.update({(line["op"], line["impl"], line["tokens"]): line["us"] for line in lines})
    return found


def _host(host: HostTimes, operator: str, impl: str, tokens: int) -> float | None:
    """The time measured for as many tokens or for the next larger number; for more than all, for the largest."""
    known = sorted(count for op, name, count in host if (op, name) == (operator, impl))
    if not known:
        return None
    return host[operator, impl, next((count for count in known if count >= tokens), known[-1])]


def points(rule: Rule, rows: Iterable[Row], host: HostTimes) -> list[Point]:
    """The shapes for which everything that a rule asks for was measured."""
    by_shape: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row.plain and row.us is not None and row.impl in (OURS, TRITON):
            by_shape.setdefault(row.shape, {})[row.key, row.impl] = row
    found = []
    for measured in by_shape.values():
        wanted = [(key, impl) for key in (*rule.forward, *rule.gradient) for impl in (OURS, TRITON)]
        if not all(each in measured for each in wanted):
            continue
        row = measured[rule.forward[0], OURS]
        hosts = {impl: _host(host, rule.operator, impl, row.tokens) for impl in (OURS, TRITON)}
        columns = row.topk if rule.operator == "route" else row.hidden
        row_bytes = columns * _ITEM_BYTES[rule.dtype]
        count = row.buffer_rows if rule.size == "buffer" else row.tokens
        found.append(Point(row_bytes, row_bytes * count, _is_faster(rule, measured, hosts)))
    return found


def _is_faster(rule: Rule, measured: dict[tuple[str, str], Row], hosts: dict[str, float | None]) -> bool:
    """By more than 5 %, launches counted, and not at the cost of the gradient. Without times of the host: no."""
    if None in hosts.values():
        return False

    def time(key: str, impl: str) -> float:
        return max(measured[key, impl].us or 0.0, hosts[impl] or 0.0)

    forward = all(time(key, OURS) > _FASTER * time(key, TRITON) for key in rule.forward)
    return forward and all(time(key, OURS) >= time(key, TRITON) for key in rule.gradient)


def choose(rows: Sequence[Row], host: HostTimes) -> dict[tuple[str, str], tuple[int, int]]:
    """By operator and dtype the longest row and the smallest tensor, in bytes, for which Triton is always faster.

    Of all such pairs the one with the most measured shapes in it, at least two.
    """
    chosen = {}
    for rule in RULES:
        found = points(rule, rows, host)
        ranges = []
        for row_bytes in {point.row_bytes for point in found}:
            for size in {point.size for point in found}:
                inside = [point for point in found if point.row_bytes <= row_bytes and point.size >= size]
                if len(inside) >= 2 and all(point.faster for point in inside):
                    # The tightest of those with as many shapes: nothing is claimed that was not measured.
                    ranges.append((len(inside), -row_bytes, size))
        if ranges:
            _, row_bytes, size = max(ranges)
            chosen[rule.operator, rule.dtype] = -row_bytes, size
    return chosen


def table(run: Run) -> str:
    """Microseconds of both at every shape of a run, as Markdown."""
    times: dict[str, dict[str, dict[str, float]]] = {}
    for row in run.rows:
        if row.plain and row.us is not None and row.impl in (OURS, TRITON):
            times.setdefault(row.key, {}).setdefault(row.shape, {})[row.impl] = row.us
    shapes = list(dict.fromkeys(shape for by_shape in times.values() for shape in by_shape))
    lines = ["| us, CUDA / Triton | " + " | ".join(shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
    for key, by_shape in times.items():
        lines.append(f"| {key} | " + " | ".join(_cell(by_shape.get(shape, {})) for shape in shapes) + " |")
    facts = (
        f"{name} {run.machine[name]}" for name in ("gpu", "cuda", "triton", "commit", "date") if name in run.machine
    )
    name = run.path.name if run.path else "?"
    return "\n".join(lines) + f"\n\nFrom `{name}`: {', '.join(facts)}. Command: `{run.machine['command']}`.\n"


def _cell(times: dict[str, float]) -> str:
    if not {OURS, TRITON} <= times.keys():
        return ""
    core, triton = times[OURS], times[TRITON]
    return f"{core:.1f} / **{triton:.1f}**" if triton < core else f"{core:.1f} / {triton:.1f}"


def verdict(chosen: dict[tuple[str, str], tuple[int, int]], host: HostTimes) -> str:
    """What the choice is, as Markdown."""
    if not host:
        return "There are no times of the host for this machine, so no call runs on Triton by itself.\n"
    if not chosen:
        return "By these times no call runs on Triton by itself.\n"
    lines = ["| runs on Triton by itself | dtype | rows of at most | tensors from |", "|---|---|---|---|"]
    lines += [f"| `{op}` | {dtype} | {row} bytes | {size} bytes |" for (op, dtype), (row, size) in chosen.items()]
    return "\n".join(lines) + "\n"


def page_with(page: str, *parts: str) -> str:
    """The page with new text between its two marks.

    Raises:
        ValueError: it does not have them.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold {BEGIN.strip()} and {END.strip()}, but does not")
    return before + begin + "\n" + "\n".join(parts) + "\n" + end + after


def choice_source(chosen: dict[tuple[str, str], tuple[int, int]]) -> str:
    """The Python source of the table."""
    entries = "".join(f'    ("{op}", "{dtype}"): ({row}, {size}),\n' for (op, dtype), (row, size) in chosen.items())
    return (
        "# Copyright 2026 The paddle_moe_ops authors\n# SPDX-License-Identifier: Apache-2.0\n"
        '"""Written by `python -m paddle_moe_ops.bench.backend_report`: by operator and dtype of the first tensor the '
        'longest row\nand the smallest tensor, in bytes, from which Triton is faster."""\n\n'
        "MEASURED: dict[tuple[str, str], tuple[int, int]] = {" + (f"\n{entries}" if entries else "") + "}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
