# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: the loss over the steps and the load of the experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

TRAIN, HELD_OUT, INK, MUTED = "#2a6f97", "#d1495b", "#22313f", "#7a8793"


def draw(
    path: Path, train: Sequence[float], held_out: Sequence[tuple[int, float]], load: np.ndarray, title: str
) -> None:
    """Write a PNG.

    Args:
        path: File to write.
        train, held_out, load, title: As in `picture`.
    """
    picture(train, held_out, load, title).savefig(path)


def picture(train: Sequence[float], held_out: Sequence[tuple[int, float]], load: np.ndarray, title: str) -> Figure:
    """Draw the picture.

    Args:
        train: Loss of each training step, in nats.
        held_out: Pairs of a step and the held-out loss after it.
        load: Slots of each expert in each MoE layer, [layers, E]; the model's first layer is dense.
        title: First line of the picture.

    Returns:
        The figure, to be saved.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(12.5, 5.0), dpi=130, layout=layout, facecolor="white")
    figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    loss_axes, load_axes = figure.subplots(1, 2, width_ratios=(1.0, 1.2))
    _draw_loss(loss_axes, train, held_out)
    _draw_load(load_axes, load)
    for axes in (loss_axes, load_axes):
        axes.xaxis.label.set_color(MUTED)
        axes.tick_params(colors=MUTED, length=0)
    return figure


def _draw_loss(axes: Axes, train: Sequence[float], held_out: Sequence[tuple[int, float]]) -> None:
    steps = np.arange(1, len(train) + 1)
    axes.plot(steps, train, color=TRAIN, alpha=0.22, linewidth=0.8, label="train, each step")
    axes.plot(steps, _smoothed(train), color=TRAIN, linewidth=1.9, label="train, smoothed")
    marks = np.array(held_out)
    axes.scatter(marks[:, 0], marks[:, 1], s=44, color=HELD_OUT, edgecolors="white", zorder=3, label="held out")
    for step, value in (held_out[0], held_out[-1]):
        label = axes.annotate(f"{value:.2f}", (step, value), xytext=(9, -4), textcoords="offset points")
        label.set(color=HELD_OUT, fontweight="bold")
    axes.set_xlim(-0.03 * len(train), 1.12 * len(train))  # room for the last label, right of all lines
    axes.set_title("Loss, nats per byte", loc="left", color=INK, fontsize=11)
    axes.set(xlabel="step", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.grid(axis="y", color="#e3e7ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.legend(loc="upper right", labelcolor=INK, facecolor="white", edgecolor="none", framealpha=1.0)


def _draw_load(axes: Axes, load: np.ndarray) -> None:
    share = 100 * load / load.sum(axis=1, keepdims=True)
    layers, experts = share.shape
    even = 100 / experts
    # White is the even share: colour means imbalance, on the same scale in every run.
    few = experts <= 24
    image = axes.pcolormesh(
        share, cmap="RdBu_r", vmin=0, vmax=2 * even, edgecolors="white", linewidth=1.5 if few else 0
    )
    axes.invert_yaxis()
    if few:
        for (layer, expert), value in np.ndenumerate(share):
            color = "white" if abs(value - even) > 0.6 * even else INK
            axes.text(expert + 0.5, layer + 0.5, f"{value:.1f}", ha="center", va="center", fontsize=7.5, color=color)
        axes.set_xticks(np.arange(experts) + 0.5, [str(expert) for expert in range(experts)])
    axes.set_yticks(np.arange(layers) + 0.5, [f"layer {i + 2}" for i in range(layers)])
    title = f"Expert load on held-out text, % of slots (even: {even:.3g} %)"
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel("expert")
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, extend="max", pad=0.02, aspect=28)
    bar.set_ticks([0, even, 2 * even], labels=["0", "1", "2"])
    bar.set_label("times the even load", color=MUTED)
    bar.ax.tick_params(colors=MUTED, length=0)
    bar.outline.set_visible(False)


def _smoothed(values: Sequence[float]) -> np.ndarray:
    """Mean over a centred window of a twentieth of the steps; shorter at the ends."""
    reach = max(1, len(values) // 40)
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(values))
    return (total[high] - total[low]) / (high - low)
