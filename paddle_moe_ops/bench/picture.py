# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The picture of a run: our time and Paddle's for each operation, one chart for each problem."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, PADDLE, INK = "#2a6f97", "#9aa3ab", "#22313f"


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the file in the format of its suffix."""
    problems: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        problems.setdefault(f"{row['model']}, {row['tokens']} tokens, {row['device']}", []).append(row)
    figure = Figure(figsize=(9, 3.4 * len(problems)), dpi=120, layout="constrained", facecolor="white")
    for axes, title in zip(figure.subplots(len(problems), squeeze=False).flat, problems, strict=True):
        _draw(axes, title, [row for row in problems[title] if row["ours"]])
    figure.savefig(path)


def _draw(axes: Axes, title: str, rows: Sequence[dict[str, Any]]) -> None:
    for place, row in enumerate(rows):
        ours, paddle = (row[side]["median_us"] / 1e3 if row[side] else 0.0 for side in ("ours", "paddle"))
        if paddle:  # there may be nothing to compare with
            axes.plot([ours, paddle], [place, place], color=PADDLE, linewidth=1.5, zorder=1)
            axes.plot(paddle, place, "o", color=PADDLE, label="" if place else "Paddle")
            axes.text(max(ours, paddle), place, f"   {paddle / ours:.1f}x", va="center", fontsize=8, color=INK)
        axes.plot(ours, place, "o", color=OURS, label="" if place else "paddle_moe_ops")
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_yticks(range(len(rows)), [row["operation"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, logarithmic; beside the dots: Paddle's time over ours", fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
