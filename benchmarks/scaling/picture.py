# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Picture of scaling.md: TFLOP/s of each GPU by the number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.kernels.plot import GRID, INK, MUTED

from .check import Comparison
from .traffic import Layout
from .ways import BY_DOMAIN, GPUS, MODELS, PLACES, Predictor, Way

__all__ = ["draw", "points"]

_FEW_GPUS = (2, 4)  # of one machine
_MEASURED = "measured between two GPUs"
_NOT_YET = f"{PLACES[2].name}, {BY_DOMAIN.name} (not in the package)"
_STYLES = {
    PLACES[0].name: ("#d1495b", "o-"),
    PLACES[1].name: ("#2a6f97", "s-"),
    PLACES[3].name: ("#8ab6d6", "s-"),
    PLACES[2].name: ("#e08e45", "^-"),
    _NOT_YET: ("#e08e45", "^:"),
    _MEASURED: (INK, "x"),
}

# Lines of each model; a line has TFLOP/s by numbers of GPUs.
Points = dict[str, dict[str, dict[str, float]]]


def points(predictor: Predictor, found: Sequence[Comparison]) -> Points:
    """Return the points of all panels."""
    return {model: {name: dict(line) for name, line in _lines(predictor, found, model)} for model in MODELS}


def _lines(
    predictor: Predictor, found: Sequence[Comparison], model: str
) -> Iterator[tuple[str, Iterator[tuple[str, float]]]]:
    shape = predictor.shape(model)
    taken: list[list[Layout]] = []
    for place in PLACES:
        numbers = (*_FEW_GPUS, *GPUS) if place == PLACES[0] else GPUS
        layouts = [place.group(shape.experts, gpus) for gpus in numbers]
        if layouts[-len(GPUS) :] in taken:
            continue  # the same groups as those of a line that is there
        taken.append(layouts[-len(GPUS) :])
        pairs = list(zip(numbers, layouts, strict=True))
        ways = [predictor.fastest(model, group) for group in layouts]
        yield place.name, _tflops(predictor, model, pairs, ways)
        if place == PLACES[2]:
            several = [pair for pair in pairs if pair[1].domains > 1]
            yield _NOT_YET, _tflops(predictor, model, several, [BY_DOMAIN] * len(several))
    flops = 18 * shape.tokens * shape.topk * shape.hidden * shape.inner
    names = {"ernie-300b": "ernie-300b-4k", "dsv3": "dsv3-4k"}  # their names in benchmarks.expert_parallel
    for each in found:
        if each.what == "layer" and names.get(each.shape, each.shape) == MODELS[model]:
            yield _MEASURED, iter([("2", round(flops / each.measured_us / 1e6, 1))])


def _tflops(
    predictor: Predictor, model: str, pairs: Sequence[tuple[int, Layout]], ways: Sequence[Way]
) -> Iterator[tuple[str, float]]:
    for (gpus, group), way in zip(pairs, ways, strict=True):
        yield str(gpus), round(predictor.tflops(model, group, way, gpus), 1)


def draw(found: Points, path: Path) -> None:
    """Draw a panel for each model."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(10, 7.4), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1), facecolor="white")
    handles = {}
    top = 1.1 * max(value for lines in found.values() for line in lines.values() for value in line.values())
    for axes, (model, lines) in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, found.items(), strict=True):
        axes.set_title(model, loc="left", color=INK, fontsize=11, fontweight="bold")
        for name, (color, style) in _STYLES.items():
            if name in lines:
                across, up = [int(gpus) for gpus in lines[name]], list(lines[name].values())
                over = 5 if name == _MEASURED else 2
                (handles[name],) = axes.plot(across, up, style, color=color, zorder=over, markersize=6, linewidth=1.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks([*_FEW_GPUS, *GPUS], [*map(str, _FEW_GPUS), *map(str, GPUS)])
        axes.minorticks_off()
        axes.set_ylim(0, top)
        axes.tick_params(labelbottom=True, labelleft=True)
        axes.grid(color=GRID, linewidth=0.8)
        axes.tick_params(colors=INK, length=0, labelsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(MUTED)
        axes.set_xlabel("GPUs", color=INK, fontsize=9)
        axes.set_ylabel("TFLOP/s of each GPU", color=INK, fontsize=9)
    order = [name for name in _STYLES if name in handles]
    legend = figure.legend([handles[name] for name in order], order, loc="outside lower center", ncols=3, frameon=False)
    for text in legend.get_texts():
        text.set_color(INK)
    with rc_context({"svg.hashsalt": "scaling", "svg.fonttype": "path"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
