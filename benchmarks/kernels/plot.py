# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The picture of a run: the operators and their peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .operators import OPERATIONS, variant_of
from .results import Row, Run, processor
from .summary import MODELS
from .targets import OURS, PUBLIC

__all__ = ["draw", "is_drawn"]

PANELS = {operation.key: variant_of(operation).picture for operation in OPERATIONS if variant_of(operation).picture}
LARGE = 4096  # tokens from which the bandwidth counts, below it the time
INK, MUTED, GRID = "#22313f", "#7a8793", "#e3e7ea"
COLORS = {
    OURS: "#d1495b",
    PUBLIC: "#edae49",
    "memcpy": "#7a8793",
    "paddle ops": "#4a4e69",
    "numpy take": "#9a8c98",
    "torch gather": "#2a6f97",
    "torch index_add": "#8ecae6",
    "te triton": "#6a994e",
    "paddle (published, scaled)": "#f2b366",
}
OTHER_COLORS = ("#9a8c98", "#c9ada7", "#4a4e69", "#b8bfc6")  # of implementations that are not named above
NAMES = {**MODELS, "tileops": "TileOPs", "paddle-production": "Paddle's\nproduction"}
LABELS = {
    OURS: "paddle_moe_ops, given outputs",
    PUBLIC: "paddle_moe_ops, public function",
    "triton": "paddle_moe_ops, Triton",
    "memcpy": "memcpy of as many bytes",
    "numpy take": "NumPy take",
    "paddle ops": "Paddle, plain operators",
    "paddle (published, scaled)": "Paddle (published, scaled)",
    "torch gather": "PyTorch gather",
    "torch index_add": "PyTorch index_add",
    "te triton": "TransformerEngine",
}


def is_drawn(run: Run) -> bool:
    """Return True if the run has rows for a picture."""
    return bool(_rows(run))


def draw(path: Path, run: Run) -> None:
    """Write `picture` as a PNG."""
    picture(run).savefig(path)


def _rows(run: Run) -> list[Row]:
    return [row for row in run.rows if row.plain and row.us is not None and row.key in PANELS]


def picture(run: Run) -> Figure:
    """The figure of a run.

    The upper panels show large numbers of tokens as a fraction of the copy speed, the lower ones small numbers in
    microseconds; an implementation has the same colour everywhere.
    """
    rows = _rows(run)
    keys = [key for key in PANELS if any(row.key == key for row in rows)]
    halves = [half for half in (True, False) if any((row.tokens >= LARGE) == half for row in rows)]
    colors = _colors(rows)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, hspace=0.06)
    figure = Figure(figsize=(5.6 * len(keys) + 0.4, 3.7 * len(halves) + 0.9), dpi=130, layout=layout, facecolor="white")
    grid = figure.subplots(len(halves), len(keys), squeeze=False)
    for axes, key in zip(grid[0], keys, strict=True):
        axes.set_title(PANELS[key], loc="left", color=INK, fontsize=11, fontweight="bold")
    for line, large in zip(grid, halves, strict=True):
        panels = [[row for row in rows if row.key == key and (row.tokens >= LARGE) == large] for key in keys]
        log = not large and any(_spread(each) > 50 for each in panels)  # bars of the fast ones would not be seen
        for axes, panel in zip(line, panels, strict=True):
            _panel(axes, panel, large, log, colors)
        times = f"microseconds{', logarithmic' if log else ''} (less is better)"
        line[0].set_ylabel("share of copy speed (more is better)" if large else times, color=MUTED)
    figure.suptitle(_title(run), x=0.01, ha="left", fontsize=11, color=INK)
    handles = {}
    for axes in grid.flat:
        handles.update({bars.get_label(): bars for bars in axes.containers})
    labels = [label for label in (LABELS.get(impl, impl) for impl in colors) if label in handles]
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower left",
        ncols=len(labels),
        frameon=False,
        labelcolor=INK,
    )
    return figure


def _title(run: Run) -> str:
    speed, caches = run.machine["copy_gbps"], "cold" if run.machine["device"] == "cuda" else "warm"
    copy = f"copy speed {speed / 1000:.2f} TB/s" if speed >= 1000 else f"copy speed {speed:.0f} GB/s"
    return f"{processor(run)}, bfloat16 rows, {caches} caches; {copy}; commit {run.machine['commit']}"


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    """The colour of every implementation that occurs, ours first."""
    others = [impl for impl in dict.fromkeys(row.impl for row in rows) if impl not in COLORS]
    drawn = {row.impl for row in rows}
    named = {impl: color for impl, color in COLORS.items() if impl in drawn}
    return {**named, **{impl: OTHER_COLORS[index % len(OTHER_COLORS)] for index, impl in enumerate(others)}}


def _panel(axes: Axes, rows: Sequence[Row], large: bool, log: bool, colors: dict[str, str]) -> None:
    shapes = list(dict.fromkeys(row.shape for row in rows))
    impls = [impl for impl in colors if any(row.impl == impl for row in rows)]
    width = 0.84 / max(len(impls), 1)
    for index, impl in enumerate(impls):
        values = [_value(rows, shape, impl, large) for shape in shapes]
        places = np.arange(len(shapes)) + (index - (len(impls) - 1) / 2) * width
        bars = axes.bar(places, values, width * 0.94, color=colors[impl], label=LABELS.get(impl, impl))
        texts = ["" if np.isnan(value) else (f"{value:.2f}" if large else _time(value)) for value in values]
        bold = "bold" if impl == OURS else "normal"
        color = colors[impl] if impl == OURS else MUTED
        axes.bar_label(bars, texts, fontsize=7, padding=2.5, color=color, fontweight=bold, rotation=90)
    axes.set_xticks(np.arange(len(shapes)), [_shape_label(rows, shape) for shape in shapes], fontsize=7.5, color=INK)
    if large:
        axes.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.set_ylim(0, 1.15 * max(1.0, axes.get_ylim()[1]))
    elif log:
        axes.set_yscale("log")
        axes.set_ylim(top=2 * axes.get_ylim()[1])
    else:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def _time(us: float) -> str:
    return f"{us / 1e3:.0f} ms" if us >= 1e4 else f"{us:.1f}"


def _spread(rows: Sequence[Row]) -> float:
    """The slowest median over the fastest."""
    medians = [row.us for row in rows if row.us is not None]
    return max(medians) / min(medians) if medians else 1.0


def _value(rows: Sequence[Row], shape: str, impl: str, large: bool) -> float:
    row = next((row for row in rows if (row.shape, row.impl) == (shape, impl)), None)
    value = None if row is None else (row.frac_copy if large else row.us)
    return float("nan") if value is None else value


def _shape_label(rows: Sequence[Row], shape: str) -> str:
    row = next(row for row in rows if row.shape == shape)
    name = NAMES.get(shape.rstrip("-0123456789"), NAMES.get(shape, shape))
    return f"{name}\n{row.tokens} tokens\nK={row.topk}, E={row.experts}\nH={row.hidden}"
