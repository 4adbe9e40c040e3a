# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Figures in results of GPUs, under one name for the same measurement in every file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.expert_parallel.passes import pass_times, slowest_steps
from benchmarks.layer.shapes import Shape
from benchmarks.pages import parsed
from benchmarks.serving.models import KINDS, MODELS

__all__ = ["Figure", "Result", "load_results", "result_of"]

_Lines = Iterable[dict[str, Any]]


class Figure(NamedTuple):
    """A measured figure. Larger is better.

    Attributes:
        name: operator, layer or exchange; implementation, pass and mode.
        shape: sizes, and the routing if it isn't the shape's own.
        value: by the median time.
        unit: of the value.
        in_series: whether it is ours, from a GPU that the host keeps busy, so that a series over commits is of use.
    """

    name: str
    shape: str
    value: float
    unit: str
    in_series: bool


class Result(NamedTuple):
    """The figures of a result file.

    Attributes:
        file: its name.
        gpu: GPU, or number and GPU for several.
        commit: sources that were measured.
        date: of the measurement.
        figures: by their order in the file.
    """

    file: str
    gpu: str
    commit: str
    date: str
    figures: list[Figure]

    @property
    def kind(self) -> str:
        """Benchmark, such as ``layer-sonic``."""
        return _kind(self.file)

    @property
    def gpu_kind(self) -> str:
        """Short name of the GPU, such as ``h200``."""
        return self.file.partition("-")[0].partition("x")[0]


def _kind(file: str) -> str:
    return file.removesuffix(".jsonl").partition("-")[2]


def _layers(lines: _Lines) -> Iterator[Figure]:
    for line in lines:
        for name in ("forward", "backward", "first", "second"):
            if f"{name}_tflops" in line:
                ours = line["impl"].startswith("ours") and line["mode"] == "graph"
                what = "product" if name in ("first", "second") else "layer"
                label = f"{what}: {line['impl']}, {line['mode']}, {line['routing']}, {name}"
                yield Figure(label, line["shape"], line[f"{name}_tflops"], "TFLOP/s", ours)


def _operators(lines: _Lines) -> Iterator[Figure]:
    for line in lines:
        if line.get("us") is None or line["check"] == "published":
            continue
        how = line["mode"] if line["cold"] else f"{line['mode']}, warm"
        case = f"{line['shape']}, {line['tokens']}"
        if not line.get("own_case", True):
            case += f", {line['routing']}, A={line['alignment']}"
            case += ("" if line["fill"] else ", not filled") + (", capacity" if line["capacity"] else "")
        name = f"operator: {line['op']}:{line['variant']}, {line['impl']}, {line['dtype']}, {how}"
        yield Figure(name, case, line["gbps"], "GB/s", line["impl"] == "core" and how == "graph")


def _grouped_gemm(lines: _Lines) -> Iterator[Figure]:
    for line in lines:
        if "tflops" in line and (line.get("config") is None or line["op"].endswith("_in_load")):
            name = f"grouped GEMM: {line['op']}, {line['impl']}"
            yield Figure(name, line["shape"], line["tflops"], "TFLOP/s", line["impl"] != "torch")


def _public_calls(lines: _Lines) -> Iterator[Figure]:
    for line in lines:
        if "us" in line:
            shape = f"{line['shape']}, {line['tokens']}"
            yield Figure(f"call: {line['operation']}", shape, line["tokens"] / line["us"], "tokens/us", True)


def _serving(lines: _Lines) -> Iterator[Figure]:
    for line in lines:
        hidden, inner, *_ = MODELS[line["model"]]
        kind = line.get("kind", "bf16")
        title = "few tokens" if kind == "bf16" else f"few tokens, {kind}"
        for name, found in line.items():
            if isinstance(found, dict) and "us" in found:
                read = KINDS[kind].bits / 8 * 3 * line["experts"] * hidden * inner / found["us"] / 1e3
                shape = f"{line['model']}, {line['tokens']}"
                yield Figure(f"{title}: {name}", shape, read, "GB/s", name.startswith("ours"))


def _served_models(lines: _Lines) -> Iterator[Figure]:
    for line in lines:
        for way in ("eager", "graph"):
            name = f"decoder: {line['format']}, {way}"
            yield Figure(name, str(line["batch"]), 1e6 * line["batch"] / line[way]["us"], "tokens/s", way == "graph")


def _trainings(lines: _Lines) -> Iterator[Figure]:
    for line in lines:
        speed = 1e6 * line["tokens"] / line["us"]
        yield Figure(f"training: {line['impl']}", line["model"], speed, "tokens/s", line["impl"].startswith("ours"))


def _exchanges(lines: _Lines) -> Iterator[Figure]:
    for line in lines:
        ours = line["what"].startswith(("dispatch", "combine", "layer"))
        shape = f"{line['shape']}, {line['tokens']}"
        name = f"expert parallel: {line['what']}"
        if "launches" in line:  # of few tokens, whose exchanges take a time, not bytes
            ours = line["launches"] == "one"
            name += f" of few tokens, launches: {line['launches']}"
            yield Figure(name, shape, line["tokens"] / line["us"], "tokens/us", ours)
        elif "tflops" in line:
            yield Figure(name, shape, line["tflops"], "TFLOP/s", ours)
        elif line["what"] != "layer" and "fetched" not in line:
            yield Figure(name, shape, line["bytes"] / line["us"] / 1e3, "GB/s", ours)


def _timelines(lines: _Lines) -> Iterator[Figure]:
    calls: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        calls.setdefault(line["shape"], []).append(line)
    for shape, ranks in calls.items():
        sizes = Shape(*(ranks[0][name] for name in Shape._fields))
        for name, us in pass_times(slowest_steps(ranks)).items():
            tflops = sizes.flops(name == "backward") / us / 1e6
            yield Figure(f"expert parallel: layer_{name}", f"{shape}, {sizes.tokens}", tflops, "TFLOP/s", False)


def _overlaps(lines: _Lines) -> Iterator[Figure]:
    for line in lines:
        how = "in flight" if line["in_flight"] else "in turn"
        name = f"expert parallel: {line['case']}, {line['transport']}, {how}"
        shape = f"{line['shape']}, {line['tokens']}"
        yield Figure(name, shape, line["tokens"] / line["us"], "tokens/us", line["in_flight"])


def _peer_layers(lines: _Lines) -> Iterator[Figure]:
    for line in lines:
        if "tflops" in line:
            name = f"expert parallel: {line['what']}, {line['transport']}, {line['kernels']}"
            yield Figure(name, f"{line['shape']}, {line['tokens']}", line["tflops"], "TFLOP/s", False)


_READERS: dict[str, Callable[[_Lines], Iterator[Figure]]] = {
    "layer": _layers,
    "layer-sonic": _layers,
    "layer-float8": _layers,
    "layer-operator": _layers,
    "layer-peers": _layers,
    "deepgemm": _layers,
    "targets": _operators,
    "padding": _operators,
    "matrix": _operators,
    "grouped-gemm": _grouped_gemm,
    "public-calls": _public_calls,
    "serving": _serving,
    "serving-peers": _serving,
    "served-model": _served_models,
    "training-speed": _trainings,
    "loss-curves": lambda lines: iter(()),  # no speeds
    "expert-parallel": _exchanges,
    "expert-parallel-few": _exchanges,
    "expert-parallel-liger": _peer_layers,
    "expert-parallel-timeline": _timelines,
    "expert-parallel-overlap": _overlaps,
}


def result_of(file: str, text: str) -> Result | None:
    """Figures of a result file's text, or None if no GPU was measured.

    Raises:
        ValueError: a benchmark that has no reader here.
    """
    lines = parsed(text)
    machine = lines[0] if lines else {}
    gpus = machine.get("gpus") or [machine.get("gpu")]
    if gpus[0] in (None, "", "CPU"):
        return None
    reader = _READERS.get(_kind(file))
    if reader is None:
        raise ValueError(f"{file}: the name must be GPU-BENCHMARK.jsonl with one of {', '.join(_READERS)}")
    gpu = gpus[0] if len(gpus) == 1 else f"{len(gpus)} x {gpus[0]}"
    rows = [line for line in lines[1:] if not line.get("machine")]
    return Result(file, gpu, machine.get("commit", "unknown"), machine["date"], list(reader(rows)))


def load_results(folder: Path) -> list[Result]:
    """All results of GPUs in a folder."""
    found = (result_of(path.name, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.jsonl")))
    return [each for each in found if each is not None]
