# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The picture of README.md: layers of experts on a GPU, forward and backward, beside PyTorch's grouped product."""

from __future__ import annotations

from typing import NamedTuple
from xml.sax.saxutils import escape

__all__ = ["PICTURE", "Layer", "picture"]

PICTURE = "speed.svg"
_STYLE = """
svg { --card: #ffffff; --edge: #c3cad2; --ink: #1f2933; --muted: #55606b; --ours: #2f6fbf; --other: #b8c1cb; }
@media (prefers-color-scheme: dark) {
  svg { --card: #161b22; --edge: #4a535e; --ink: #e8edf2; --muted: #a3adb8; --ours: #78aefc; --other: #55606b; }
}
text { font: 14px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--ink); }
.head { font-weight: 600; }
.note { font-size: 13px; fill: var(--muted); }
.end { text-anchor: end; }
.card { fill: var(--card); stroke: var(--edge); }
.ours { fill: var(--ours); }
.other { fill: var(--other); }
"""
_SIDES = "paddle_moe_ops", "PyTorch"
_FOOT = (
    "The kernels of moe_mlp, without the router, in bfloat16.",
    "PyTorch: its grouped product and its own gradients.",
)
# In a column of a phone, letters of 13 are still readable. DejaVu Sans, the widest of the fonts, needs 9 a letter.
_WIDTH, _NAMES, _PANEL, _BAR, _STEP, _TOP = 480, 140, 166, 14, 20, 86
_NUMBERS = 62  # beside a bar


class Layer(NamedTuple):
    """A model, its tokens, and milliseconds forward and backward, ours and PyTorch's."""

    model: str
    tokens: str
    ours: tuple[float, float]
    torch: tuple[float, float]


def picture(gpu: str, layers: list[Layer]) -> str:
    """An SVG: a panel for each pass, in it a bar for each side of each model, on one scale a model and panel."""
    group = 2 * _STEP + 32
    height = _TOP + len(layers) * group + 40
    title = f"Milliseconds of a layer of experts on one {gpu}, forward and backward: {' and '.join(_SIDES)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="head" x="16" y="28">A layer of experts on one {escape(gpu)}</text>',
        '<text class="note" x="16" y="48">Milliseconds, less is better</text>',
    ]
    for number, name in enumerate(("forward", "backward")):
        parts.append(f'<text class="head" x="{_NAMES + number * _PANEL}" y="{_TOP - 8}">{name}</text>')
    for number, layer in enumerate(layers):
        y = _TOP + number * group
        parts.append(f'<text class="note" x="16" y="{y + 14}">{escape(layer.model)}, {layer.tokens} tokens</text>')
        for place, (name, times) in enumerate(zip(_SIDES, (layer.ours, layer.torch), strict=True)):
            top = y + 22 + place * _STEP
            parts.append(f'<text class="end" x="{_NAMES - 8}" y="{top + 12}">{name}</text>')
            for panel, ms in enumerate(times):
                left = _NAMES + panel * _PANEL
                width = round(ms * (_PANEL - _NUMBERS) / max(layer.ours[panel], layer.torch[panel]), 1)
                kind = "other" if place else "ours"
                parts.append(f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{_BAR}" rx="2"/>')
                parts.append(f'<text x="{left + width + 6:g}" y="{top + 12}">{ms:.3g}</text>')
    for number, line in enumerate(_FOOT):
        parts.append(f'<text class="note" x="16" y="{height - 30 + number * 18}">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>\n"])
