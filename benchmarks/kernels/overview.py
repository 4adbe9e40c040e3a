# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md: expected performance by machine, in one table for each kind of work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from benchmarks.layer import report as layers
from benchmarks.layer.shapes import SHAPES

from . import hero, summary
from .results import Row, Run, processor
from .table import markdown
from .targets import PUBLIC

__all__ = ["page"]

INTRODUCTION = "# Performance\n\n"
LAYERS = """
## Layers of experts

The kernels of `moe_mlp` (both products, SwiGLU, the weights and the sums), without the router, in bfloat16, forward /
backward. Tokens are routed evenly. Times are those of a GPU that replays a CUDA graph, on PyTorch's tensors. *PyTorch*
is plain PyTorch around `torch._grouped_mm`, with its own gradients. *kept* is what the forward pass leaves in memory
for the backward pass, ours / PyTorch's. *float8* is the speed-up of float8 operands with kept matrices.

"""
# A model each, with as many tokens as were measured.
LAYER_SHAPES = "ernie-300b-16k", "ernie-21b", "dsv3-16k", "qwen3-30b", "mixtral"
CPU = """
## On a CPU

Public calls in bfloat16, which allocate their outputs. *Paddle* are the fastest plain operators of Paddle that were
found for the same job.

"""
CPU_CALLS = {
    "permute:bf16": "permute",
    "unpermute:weighted": "unpermute, weighted",
    "unpermute_backward:weighted": "gradients of unpermute, weighted",
}
PLAIN = "paddle ops"
PAGES = {
    "*Layers of experts*": "all shapes, beside PyTorch, SonicMoE, Unsloth, LigerCute and cuBLAS",
    "*Several GPUs*": "dispatch, combine and whole layers, beside NCCL and a copy",
    "*Many GPUs, predicted*": "which transport to choose for 8 to 2048 GPUs, from a model",
    "*Operators on GPUs*": "each operator and its peers, ceilings, hardware counters",
    "*Operators on CPUs*": "each operator and its peers",
    "[Kernels](kernels.md)": "operations, mapping to CTAs, bounds, and what was tried and dropped",
}
MEASUREMENTS = """
## All measurements

`make docs` builds the site in `build/site`. These pages are part of it:

"""
OWN = """
On your own machine, `python -m paddle_moe_ops bench` times the functions beside Paddle's, and `bench --layer` times
layers and a small model. Every result is checked first.

`make bench-report` generates this page from `benchmarks/results`; `benchmarks/README.md` says how to measure again.
"""


def page(
    calls: Sequence[summary.Calls],
    layer_runs: Sequence[layers.Run],
    runs: Iterable[Run],
    sonic_moe_runs: Sequence[layers.Run] = (),
) -> str:
    """The text of the page.

    Args:
        calls: public calls on each GPU.
        layer_runs: whole layers on each GPU.
        runs: operators; those on CPUs count here.
        sonic_moe_runs: whole layers next to SonicMoE's.
    """
    on_cpus = [run for run in runs if run.machine["device"] == "cpu"]
    layer_cells = [cells for run in layer_runs for cells in _layer_rows(run)]
    cpu_cells = [cells for run in on_cpus for cells in _cpu_rows(run)]
    in_words = [*_layers_in_words(layer_runs), *_sonic_moe_in_words(sonic_moe_runs)]
    expected = [*in_words, *_calls_in_words(calls), *_cpus_in_words(on_cpus)]
    parts = [INTRODUCTION]
    if expected:
        parts.append("## What to expect\n\n" + "".join(f"* {line}\n" for line in expected))
    if layer_cells:
        columns = "GPU", "model", "tokens", "ms", "TFLOP/s", "PyTorch ms", "faster", "kept, MiB", "float8"
        parts.append(LAYERS + markdown(columns, layer_cells))
    parts.append(summary.section(calls))
    if cpu_cells:
        parts.append(CPU + markdown(("CPU", "model", "tokens", "call", "ms", "Paddle ms", "faster"), cpu_cells))
    return "".join([*parts, MEASUREMENTS, markdown(("page", "contents"), PAGES.items()), OWN])


def _both(values: Iterable[float], digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def _faster(ours: Iterable[float], others: Iterable[float]) -> str:
    return " / ".join(f"{other_us / our_us:.2f} x" for our_us, other_us in zip(ours, others, strict=True))


def _layer_times(run: layers.Run, shape: str, other: str) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Microseconds forward and backward, ours and those of another, of a shape that both have a result for."""
    found = [run.found(shape, "even", each) for each in (layers.OURS, other)]
    times = [(line["forward_us"], line["backward_us"]) for line in found if line is not None and "error" not in line]
    return (times[0], times[1]) if len(times) == 2 else None


def _layer_rows(run: layers.Run) -> Iterable[tuple[str, ...]]:
    for shape in LAYER_SHAPES:
        times = _layer_times(run, shape, "torch")
        if times is None:
            continue
        float8 = _layer_times(run, shape, layers.FLOAT8_KEPT)
        ours, torch = (run.found(shape, "even", each) or {} for each in (layers.OURS, "torch"))
        model, tokens = layers.label(shape).rsplit(", ", 1)
        yield (
            *(run.gpu, model, tokens),
            _both((us / 1e3 for us in times[0]), 2),
            _both((ours["forward_tflops"], ours["backward_tflops"]), 0),
            _both((us / 1e3 for us in times[1]), 2),
            _faster(*times),
            _both((line["kept"] / layers.MIB for line in (ours, torch)), 0),
            "" if float8 is None else _faster(*float8[::-1]),
        )


def drawn_layers(runs: Sequence[layers.Run]) -> tuple[str, list[hero.Layer]] | None:
    """The GPU and the layers of README.md's picture, from the newest run; None without one."""
    for run in sorted(runs, key=lambda run: run.machine["date"], reverse=True):
        found = []
        for shape in LAYER_SHAPES:
            times = _layer_times(run, shape, "torch")
            if times is not None:
                ours, torch = ((forward / 1e3, backward / 1e3) for forward, backward in times)
                model, tokens = layers.label(shape).rsplit(", ", 1)
                found.append(hero.Layer(model, tokens, ours, torch))
        if found:
            return run.gpu, found
    return None


def _layers_in_words(runs: Iterable[layers.Run]) -> Iterable[str]:
    for run in runs:
        times = [each for shape in SHAPES if (each := _layer_times(run, shape, "torch")) is not None]
        float8 = [each for shape in SHAPES if (each := _layer_times(run, shape, layers.FLOAT8_KEPT)) is not None]
        if times:
            faster = [geometric_mean(torch[way] / ours[way] for ours, torch in times) for way in (0, 1)]
            yield (
                f"**A layer of experts on one {run.gpu}**: {faster[0]:.1f} times as fast as PyTorch's grouped product "
                f"forward and {faster[1]:.1f} times backward, geometric mean of {len(times)} shapes."
            )
        if float8:
            faster = [geometric_mean(ours[way] / other[way] for ours, other in float8) for way in (0, 1)]
            yield (
                f"**Experts on float8 operands on one {run.gpu}**, whose matrices are quantised once for many "
                f"micro-batches: {faster[0]:.2f} times as fast as in bfloat16 forward and {faster[1]:.2f} times "
                f"backward, geometric mean of {len(float8)} shapes."
            )


def _sonic_moe_in_words(runs: Iterable[layers.Run]) -> Iterable[str]:
    for run in runs:
        over = layers.over_sonic_moe(run).values()
        if over:
            forward, backward = (_in_percent(geometric_mean(each)) for each in zip(*over, strict=True))
            yield (
                f"**Beside SonicMoE on one {run.gpu}**, tuned for each shape: a layer is {forward} forward and "
                f"{backward} backward, geometric mean of {len(over)} shapes."
            )


def _in_percent(speed: float) -> str:
    return f"{100 * abs(speed - 1):.0f} % {'faster' if speed >= 1 else 'slower'}"


def _calls_in_words(calls: Iterable[summary.Calls]) -> Iterable[str]:
    for each in calls:
        shares = [each.of_copy(operation, shape) for shape in each.shapes for operation in summary.BESIDE]
        reached = [share for share in shares if share is not None]
        if reached:
            yield (
                f"**Moving rows on one {each.machine['gpu']}**: {min(reached):.2f} to {max(reached):.2f} of the speed "
                "of a plain copy of as many bytes, with thousands of tokens. Calls with few tokens take as long as the "
                "host needs to start them."
            )


def _cpu_pairs(run: Run) -> Iterable[tuple[Row, float, float]]:
    """A row of each public call, its time, and that of Paddle's plain operators for the same job, in microseconds."""
    rows = {(row.key, row.shape, row.impl): row for row in run.rows if row.plain}
    for key in CPU_CALLS:
        for shape in dict.fromkeys(row.shape for row in run.rows if row.shape in summary.MODELS):
            ours, plain = (rows.get((key, shape, each)) for each in (PUBLIC, PLAIN))
            if ours and plain and ours.us and plain.us:
                yield ours, ours.us, plain.us


def _cpu_rows(run: Run) -> Iterable[tuple[str, ...]]:
    for row, us, plain_us in _cpu_pairs(run):
        case = processor(run), summary.MODELS[row.shape], str(row.tokens), CPU_CALLS[row.key]
        yield (*case, f"{us / 1e3:.1f}", f"{plain_us / 1e3:.1f}", f"{plain_us / us:.0f} x")


def _cpus_in_words(runs: Iterable[Run]) -> Iterable[str]:
    for run in runs:
        faster = [plain_us / us for _, us, plain_us in _cpu_pairs(run)]
        if faster:
            yield (
                f"**On a CPU** ({processor(run)}): {min(faster):.0f} to {max(faster):.0f} times as fast as plain "
                "operators of Paddle for the same job."
            )
