# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The table and the picture of the record of ``python3 -m benchmarks.expert_parallel --timeline``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.kernels.table import markdown

from .passes import STAGES, pass_times, slowest_steps

__all__ = ["PICTURE", "Recorded", "picture", "section"]

PICTURE = "expert_parallel_timeline.svg"
_WAIT = "wait"

_STYLE = """
svg { --card: #ffffff; --edge: #c3cad2; --ink: #1f2933; --muted: #55606b;
  --routing: #eedcf9; --dispatch: #d3e5ff; --products: #d5f0d3; --combine: #ffe3bd; --wait: #eef1f4;
  --routing-edge: #8a4bb3; --dispatch-edge: #2f6fbf; --products-edge: #2e8540; --combine-edge: #b5660b; }
@media (prefers-color-scheme: dark) {
  svg { --card: #161b22; --edge: #4a535e; --ink: #e8edf2; --muted: #a3adb8;
    --routing: #45295a; --dispatch: #1d3b63; --products: #1d4728; --combine: #57390f; --wait: #262c34;
    --routing-edge: #c894ec; --dispatch-edge: #78aefc; --products-edge: #6fcf80; --combine-edge: #f0a64a; }
}
text { font: 13px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--ink); }
.head { font-weight: 600; font-size: 14px; }
.note { font-size: 12px; fill: var(--muted); }
.step { font-size: 12px; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.card { fill: var(--card); stroke: var(--edge); }
path { stroke: var(--edge); }
"""
_STAGE_STYLES = "".join(
    f".{stage} {{ fill: var(--{stage}); stroke: var(--{stage}-edge); }}\n"
    f".{stage}.wait {{ fill: var(--wait); stroke: var(--{stage}-edge); stroke-dasharray: 2 2; }}\n"
    for stage in STAGES
)
_WIDTH, _LEFT, _RIGHT = 760, 82, 20
_LANE, _BAR = 26, 18
_LETTER = 7.2  # pixels of one at most, on average
_LEAST = 0.7  # of a bar


class Recorded(NamedTuple):
    """A result file.

    Attributes:
        machine: its first line.
        calls: by shape the lines of the ranks, in their order.
    """

    machine: dict[str, Any]
    calls: dict[str, list[dict[str, Any]]]

    @staticmethod
    def of(path: Path) -> Recorded:
        """The contents of a file."""
        machine, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        calls: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            calls.setdefault(line["shape"], []).append(line)
        return Recorded(machine, calls)


def section(recorded: Recorded) -> str:
    """The part of the page: the picture, and a table of the slowest rank's times."""
    machine = recorded.machine
    text = f"""
## Where the time of a layer goes

One call of a layer on {machine["ranks"]} x {machine["gpus"][0]}, recorded with events around each step on each rank
(`python3 -m benchmarks.expert_parallel --timeline`, commit {machine["commit"]}, {machine["date"]}). The ranks begin
together, and all of it is queued before.

![When routing, dispatch, products and combine begin and end on each rank, forward and backward]({PICTURE})

Microseconds of the rank that ended last. In parentheses are those of them in which it waited for the others, whose
tokens arrive until then. *between* is what lies between the steps, *exchanges* the share of dispatch and combine.

"""
    head = ["layer", "pass", *STAGES, "between", "all", "exchanges"]
    rows = []
    for shape, ranks in recorded.calls.items():
        steps = slowest_steps(ranks)
        for passing, whole in pass_times(steps).items():
            own = [each for each in steps if each["pass"] == passing]
            sums = {stage: _sum(each for each in own if each["stage"] == stage) for stage in STAGES}
            waits = {
                stage: _sum(each for each in own if (each["stage"], each["step"]) == (stage, _WAIT)) for stage in STAGES
            }
            cells = [f"{sums[stage]:.0f}" + (f" ({waits[stage]:.0f})" if waits[stage] else "") for stage in STAGES]
            share = 100 * (sums["dispatch"] + sums["combine"]) / whole
            rows.append([shape, passing, *cells, f"{whole - sum(sums.values()):.0f}", f"{whole:.0f}", f"{share:.0f} %"])
    return text + markdown(head, rows)


def _sum(steps: Iterable[dict[str, Any]]) -> float:
    return sum(each["end_us"] - each["begin_us"] for each in steps)


def picture(recorded: Recorded) -> str:
    """An SVG: for each shape the whole call, and its dispatch enlarged, with a lane for each rank."""
    parts, y = [], 62.0
    for shape, ranks in recorded.calls.items():
        end = max(line["steps"][-1]["end_us"] for line in ranks)
        products = max(_begin_of_products(line["steps"]) for line in ranks)
        head = f"{shape}, {ranks[0]['tokens']} tokens a rank: forward and backward"
        for title, until in ((head, end), ("the first dispatch, enlarged", products)):
            parts += _panel(title, ranks, until, y)
            y += 58 + _LANE * len(ranks)
    machine = recorded.machine
    title = f"One layer call on {machine['ranks']} x {machine['gpus'][0]}: what each rank does when"
    size = f'width="{_WIDTH}" height="{y:g}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {y:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}{_STAGE_STYLES}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{y - 1:g}" rx="8"/>',
        f'<text class="head" x="20" y="26">{escape(title)}</text>',
    ]
    x = 20.0
    for kind, name in (*((stage, stage) for stage in STAGES), ("dispatch wait", "waiting for other ranks")):
        head.append(f'<rect class="{kind}" x="{x:g}" y="36" width="14" height="12" rx="2"/>')
        head.append(f'<text class="note" x="{x + 19:g}" y="46">{name}</text>')
        x += 40 + _LETTER * len(name)
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _begin_of_products(steps: Sequence[dict[str, Any]]) -> float:
    return next(float(each["begin_us"]) for each in steps if each["stage"] == "products")


def _panel(title: str, ranks: Sequence[dict[str, Any]], until: float, y: float) -> list[str]:
    """The lanes of all ranks from the start to some time."""
    scale, bottom = (_WIDTH - _LEFT - _RIGHT) / until, y + 24 + _LANE * len(ranks)
    parts = [f'<text class="head" x="20" y="{y + 14:g}">{escape(title)}</text>']
    for number in range(5):
        at = _LEFT + number / 4 * until * scale
        label = f"{until * number / 4000:.2f}" + (" ms" if number == 4 else "")
        parts.append(f'<path d="M{at:.1f} {y + 22:g} V{bottom:g}"/>')
        parts.append(
            f'<text class="note {"end" if number == 4 else "middle"}" x="{at:.1f}" y="{bottom + 15:g}">{label}</text>'
        )
    for line in ranks:
        top = y + 26 + _LANE * line["rank"]
        parts.append(f'<text class="note" x="20" y="{top + 14:g}">rank {line["rank"]}</text>')
        for step in line["steps"]:
            if step["begin_us"] >= until:
                continue
            x, width = _LEFT + step["begin_us"] * scale, (min(step["end_us"], until) - step["begin_us"]) * scale
            kind = step["stage"] + (" wait" if step["step"] == _WAIT else "")
            size = f'x="{x:.1f}" y="{top:g}" width="{max(width, _LEAST):.1f}" height="{_BAR}"'
            what = f"{step['pass']}, {step['stage']}, {step['step']}: {step['end_us'] - step['begin_us']:.0f} us"
            parts.append(f'<rect class="{kind}" {size}><title>{escape(what)}</title></rect>')
            if len(step["step"]) * _LETTER < width:
                parts.append(
                    f'<text class="step middle" x="{x + width / 2:.1f}" y="{top + 13:g}">{step["step"]}</text>'
                )
    return parts
