# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Measured shapes with names, the cases of each set, and the filters of the command line."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paddle_moe_ops import bench
from paddle_moe_ops.testing.routing import GENERATORS

__all__ = ["SETS", "SHAPES", "Case", "Operation", "Shape", "cases_of"]


class Shape(NamedTuple):
    """T tokens with K slots each go to E experts; rows have H columns."""

    name: str
    num_tokens: int
    topk: int
    num_experts: int
    hidden: int
    routing: str = "uniform"
    # Assigned slots per token of the routing "expert_parallel_sparse".
    mean_valid: float = 1.41


class Case(NamedTuple):
    """One problem: a shape, how it is routed, and how the rows of the buffer are padded.

    With ``capacity`` the buffer holds whatever the routing may need, otherwise exactly the padded segments.
    """

    shape: Shape
    routing: str
    alignment: int = 1
    fill: bool = True
    capacity: bool = False

    @property
    def label(self) -> str:
        """The shape's name and whatever differs from the plain case."""
        parts = [self.shape.name]
        if self.routing != self.shape.routing:
            parts.append(self.routing)
        if self.alignment != 1:
            parts.append(f"A={self.alignment}" + ("" if self.fill else " no fill"))
        if self.capacity:
            parts.append("capacity")
        return " ".join(parts)


class Operation(NamedTuple):
    """An operator and its measured variant; ``key`` is its name in filters and tables."""

    op: str
    variant: str

    @property
    def key(self) -> str:
        return f"{self.op}:{self.variant}"


def _of_model(name: str, num_tokens: int) -> Shape:
    sizes = bench.MODELS[name]
    return Shape(name, num_tokens, sizes.topk, sizes.experts, sizes.hidden)


ERNIE_300B, ERNIE_21B = _of_model("ernie-300b", 16384), _of_model("ernie-21b", 16384)
DSV3 = _of_model("dsv3", 4096)
TILEOPS = tuple(Shape(f"tileops-{tokens}", tokens, 8, 128, 7168) for tokens in (32, 128, 512, 4096))
# One rank's tokens in Paddle's own production run: mostly unassigned slots, 1.41 rows per token.
PADDLE_PRODUCTION = Shape("paddle-production", 153962, 10, 8, 2048, "expert_parallel_sparse")
# A rank of DeepSeek-V3 spread over 8 ranks.
DSV3_EP8 = Shape("dsv3-ep8", 4096, 8, 32, 7168, "expert_parallel_sparse")
QWEN3_235B, KIMI_K2 = _of_model("qwen3-235b", 4096), _of_model("kimi-k2", 4096)

MODELS = (ERNIE_300B, ERNIE_21B, DSV3, QWEN3_235B, KIMI_K2)
SHAPES = {
    shape.name: shape
    for shape in (ERNIE_300B, ERNIE_21B, DSV3, *TILEOPS, PADDLE_PRODUCTION, DSV3_EP8, QWEN3_235B, KIMI_K2)
}
MATRIX_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def _plain(*shapes: Shape) -> list[Case]:
    return [Case(shape, shape.routing) for shape in shapes]


def _padded(shape: Shape, *alignments: int) -> list[Case]:
    return [Case(shape, shape.routing, alignment, fill) for alignment in alignments for fill in (True, False)]


def _matrix() -> list[Case]:
    """Every model at every number of tokens; padding and unbalanced routings at one small and one large number."""
    cases = _plain(*(_with_tokens(model, tokens) for model in MODELS for tokens in MATRIX_TOKENS))
    cases += _plain(PADDLE_PRODUCTION, DSV3_EP8)
    for model in MODELS:
        for tokens in (128, 4096):
            cases += _padded(_with_tokens(model, tokens), 16, 128)
    for model in (ERNIE_300B, DSV3):
        for routing in ("zipf", "all_to_one", "first_experts", "half_unassigned", "all_unassigned"):
            cases.append(Case(_with_tokens(model, 4096), routing, capacity=routing == "all_unassigned"))
    return cases


def _with_tokens(model: Shape, tokens: int) -> Shape:
    named = {
        shape.num_tokens: shape for shape in SHAPES.values() if shape[2:] == model[2:] and shape.topk == model.topk
    }
    return named.get(tokens) or model._replace(name=f"{model.name}-{tokens}", num_tokens=tokens)


SETS = {
    "targets": [*_plain(ERNIE_300B, ERNIE_21B, DSV3, *TILEOPS, PADDLE_PRODUCTION)],
    "quick": _plain(DSV3, TILEOPS[1]),
    "padding": [case for shape in (ERNIE_300B, DSV3, TILEOPS[1]) for case in _padded(shape, 128)],
    "matrix": _matrix(),
}


def cases_of(
    set_name: str,
    shapes: Sequence[str] = (),
    routings: Sequence[str] = (),
    alignments: Sequence[int] = (),
    fills: Sequence[bool] = (),
) -> list[Case]:
    """The cases of a set, narrowed to some shapes, with other routings, alignments or fills if these are passed.

    Args:
        set_name: A key of SETS.
        shapes: Names or patterns (``tileops-*``) of shapes of the set, or sizes as ``T,K,E,H``.
        routings: Keys of `testing.routing.GENERATORS` to use instead of the cases' own.
        alignments: Rows of alignment to use instead.
        fills: Zeroing of padding rows, to use instead.

    Raises:
        ValueError: An unknown set, shape or routing, or an alignment below 1.
    """
    if set_name not in SETS:
        raise ValueError(f"--set must be one of {', '.join(SETS)}, but got {set_name!r}")
    for routing in routings:
        if routing not in GENERATORS:
            raise ValueError(f"--routing must be one of {', '.join(GENERATORS)}, but got {routing!r}")
    for alignment in alignments:
        if alignment < 1:
            raise ValueError(f"--alignment must be at least 1, but got {alignment}")
    chosen = _narrow(SETS[set_name], shapes) if shapes else SETS[set_name]
    varied = [
        case._replace(routing=routing, alignment=alignment, fill=fill)
        for case in chosen
        for routing in routings or (case.routing,)
        for alignment in alignments or (case.alignment,)
        for fill in fills or (case.fill,)
    ]
    return list(dict.fromkeys(varied))


def _narrow(cases: Iterable[Case], patterns: Sequence[str]) -> list[Case]:
    cases = list(cases)
    found: list[Case] = []
    for pattern in patterns:
        if "," in pattern:
            found += _plain(_shape_of_sizes(pattern))
            continue
        matching = [case for case in cases if fnmatch.fnmatchcase(case.shape.name, pattern)]
        if not matching:
            names = dict.fromkeys(case.shape.name for case in cases)
            raise ValueError(f"--shapes must be T,K,E,H or names out of {', '.join(names)}, but got {pattern!r}")
        found += matching
    return found


def _shape_of_sizes(text: str) -> Shape:
    sizes = text.split(",")
    if len(sizes) != 4 or not all(size.strip().isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"--shapes must be four positive numbers T,K,E,H or names, but got {text!r}")
    tokens, topk, experts, hidden = (int(size) for size in sizes)
    known = {shape[1:5]: shape for shape in SHAPES.values()}
    return known.get((tokens, topk, experts, hidden)) or Shape(text, tokens, topk, experts, hidden)
