# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The part of the page *Layers of experts* about training steps with float8 operands."""

from __future__ import annotations

import math
from statistics import geometric_mean
from typing import TYPE_CHECKING

from .shapes import SHAPES

if TYPE_CHECKING:
    from .report import Run

__all__ = ["FORMATS", "MICRO_BATCHES", "steps"]

MICRO_BATCHES = 8  # of an optimizer step
# Values of `compute`, and the names of their implementations.
FORMATS = {"fp8_1x128": "ours, float8", "fp8_1x128_wgrad": "ours, float8, wgrads too"}
TEXT = f"""Speed of both passes over bfloat16 in the same run, in CUDA graphs. *1*: one micro-batch, which quantises its
matrices. *{MICRO_BATCHES}*: a step of {MICRO_BATCHES} micro-batches that quantises them once, as with
`nn.keep_float8_matrices`. *even*: the least number of micro-batches in a step with which float8 is as fast. The column
*bfloat16* is in microseconds. Implementations alternate where the GPU has memory for all of them."""


def _us(run: Run, shape: str, implementation: str) -> float:
    """Microseconds of both passes, NaN if they were not measured."""
    line = run.found(shape, "even", implementation)
    return math.nan if line is None or "forward_us" not in line else line["forward_us"] + line["backward_us"]


def step_us(first: float, kept: float, micro_batches: int) -> float:
    """Microseconds of a step: the first micro-batch quantises the matrices."""
    return first + (micro_batches - 1) * kept


def break_even(first: float, kept: float, exact: float) -> str:
    """The least number of micro-batches with which a step takes no longer than in bfloat16."""
    if not kept < exact:
        return "1" if first <= exact else "never"
    return str(max(1, math.ceil((first - kept) / (exact - kept))))


def steps(run: Run) -> str:
    """A section about steps with float8 operands, with geometric means of the shapes that were measured."""
    names = [
        "shape",
        "bfloat16",
        *(f"`{compute}`: {each}" for compute in FORMATS for each in (1, MICRO_BATCHES, "even")),
    ]
    rows = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    ratios: dict[str, tuple[list[float], list[float]]] = {compute: ([], []) for compute in FORMATS}
    for shape in SHAPES:
        exact, cells = _us(run, shape, "ours"), []
        for compute, implementation in FORMATS.items():
            first = _us(run, shape, f"{implementation}, first micro-batch")
            kept = _us(run, shape, f"{implementation}, matrices kept")
            if math.isnan(exact + first + kept):
                cells += [""] * 3
                continue
            once, often = exact / first, MICRO_BATCHES * exact / step_us(first, kept, MICRO_BATCHES)
            for each, ratio in zip(ratios[compute], (once, often), strict=True):
                each.append(ratio)
            cells += [f"{once:.2f}", f"{often:.2f}", break_even(first, kept, exact)]
        if any(cells):
            rows.append(f"| {' | '.join([shape, f'{exact:.0f}', *cells])} |")
    means = [
        f"`{compute}`, geometric mean of {len(once)} shapes: {geometric_mean(once):.2f} with one micro-batch, "
        f"{geometric_mean(often):.2f} with {MICRO_BATCHES}; the least {min(once):.2f} and {min(often):.2f}.\n"
        for compute, (once, often) in ratios.items()
        if once
    ]
    facts = ", ".join(f"{key} {run.machine[key]}" for key in ("driver", "cuda", "torch", "commit", "date"))
    head = [
        f"## Training steps in float8: {run.gpu}",
        "",
        f"`benchmarks/results/{run.path.name}`: {facts}.",
        "",
        TEXT,
        "",
    ]
    return "\n".join([*head, *rows, "", *means])
