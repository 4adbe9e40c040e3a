# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The targets of the operators, and the verdicts of a run on them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

from .results import Row

__all__ = ["OURS", "PUBLIC", "TARGETS", "TRITON", "VERDICT_COLUMNS", "Target", "Verdict", "judge", "verdict_cells"]

OURS = "core"
TRITON = "triton"  # ours, too, in Triton; targets are about the core
PUBLIC = "public function"  # ours as Paddle calls it: outputs are allocated in the call


class Target(NamedTuple):
    """A limit for our median.

    Attributes:
        key: Operation.
        shapes: Pattern of shape names.
        kind: "us" (at most), "copy" (at least this fraction of the copy speed), or "peer" (at least this many times
            faster than the named peer, or than the best one).
        limit: The limit.
        stretch: A better limit than the required one, in the same unit.
        peer: Pattern of the peers' names for the kind "peer".
        impl: The implementation of ours that it is about.
    """

    key: str
    shapes: str
    kind: str
    limit: float
    stretch: float | None = None
    peer: str = "*"
    impl: str = OURS


# A tie with the peers is within 2 %.
_TIE = 0.98
_LARGE = ("ernie-300b", "ernie-21b", "dsv3", "tileops-4096")
_PUBLISHED = "paddle (published*"

CUDA_TARGETS = (
    *(
        Target("route_permute:bf16", shape, "us", limit, stretch)
        for shape, limit, stretch in (("tileops-32", 8, 6), ("tileops-128", 11, 9), ("tileops-512", 23, 20))
    ),
    *(
        Target("unpermute:weighted", shape, "us", limit)
        for shape, limit in (("tileops-32", 5), ("tileops-128", 8), ("tileops-512", 18))
    ),
    *(Target("route_permute:bf16", shape, "copy", 0.86, 0.93) for shape in ("ernie-300b", "ernie-21b", "dsv3")),
    *(Target("route_permute:bf16", shape, "peer", _TIE) for shape in _LARGE),
    Target("moe_permute:bf16", "ernie-300b", "peer", 1.05, peer=_PUBLISHED),
    *(
        Target("moe_permute:bf16", shape, "peer", 1.15, peer=_PUBLISHED)
        for shape in ("ernie-21b", "dsv3", "tileops-4096")
    ),
    *(Target("route_permute:fp8", shape, "copy", 0.82, 0.87) for shape in ("ernie-300b", "ernie-21b", "dsv3")),
    *(Target("moe_permute:fp8", shape, "peer", 1.15, peer=_PUBLISHED) for shape in _LARGE),
    *(
        Target(key, shape, "copy", 0.95)
        for key in ("unpermute:plain", "unpermute:weighted")
        for shape in ("ernie-300b", "dsv3", "tileops-4096")
    ),
    *(Target(key, shape, "peer", _TIE) for key in ("unpermute:plain", "unpermute:weighted") for shape in _LARGE),
    *(Target("unpermute_backward:weighted", shape, "copy", 0.92) for shape in _LARGE),
    *(
        Target("permute_quantized:row", shape, "copy", 0.78)
        for shape in ("ernie-300b", "ernie-21b", "dsv3", "paddle-production")
    ),
    Target("moe_permute:bf16", "paddle-production", "us", 410),
    Target("moe_permute:fp8", "paddle-production", "us", 230),
)


_PLAIN_OPS = "paddle ops"
_MOVING = (
    *("permute:bf16", "unpermute:plain", "unpermute:weighted"),
    *(f"unpermute_backward:{variant}" for variant in ("plain", "weighted", "dx", "dprob")),
)

CPU_TARGETS = (
    *(Target(key, shape, "peer", 0.90, peer="memcpy") for key in _MOVING for shape in (*_LARGE, "paddle-production")),
    *(
        Target(key, shape, "peer", limit, peer=_PLAIN_OPS, impl=PUBLIC)
        for key in ("route_permute:bf16", *_MOVING)
        for shape, limit in (
            *((large, 1.7) for large in _LARGE),
            *((small, 1.0) for small in ("tileops-32", "tileops-128", "tileops-512")),
        )
    ),
)

# Targets by the device's name in results.
TARGETS: dict[str, tuple[Target, ...]] = {"cuda": CUDA_TARGETS, "cpu": CPU_TARGETS}


class Verdict(NamedTuple):
    """The verdict of a run on a target. ``reached`` is None if something was not measured."""

    target: Target
    ours: Row | None
    peer: Row | None
    value: float | None
    reached: bool | None


def judge(rows: Sequence[Row], targets: Sequence[Target]) -> list[Verdict]:
    """Hold the plain cases of a run against targets; those whose operation was not measured are left out."""
    verdicts = []
    for target in targets:
        measured = [
            row
            for row in rows
            if row.key == target.key
            and fnmatch.fnmatchcase(row.shape, target.shapes)
            and row.plain
            and row.us is not None
        ]
        ours = next((row for row in measured if row.impl == target.impl), None)
        peers = [row for row in measured if row.impl not in (OURS, PUBLIC, TRITON)]
        best = min(peers, key=_median, default=None)
        if ours is None and best is None:
            continue
        named = [row for row in peers if fnmatch.fnmatchcase(row.impl, target.peer)]
        rival = min(named, key=_median, default=None) if target.kind == "peer" else best
        value = _value(target, ours, rival)
        reached = None
        if value is not None:
            reached = value <= target.limit if target.kind == "us" else value >= target.limit
        verdicts.append(Verdict(target, ours, rival, value, reached))
    return verdicts


VERDICT_COLUMNS = (
    *("operation", "ours", "shape", "target", "stretch", "reached", "us"),
    *("best peer", "peer us", "ceiling us", "verdict"),
)


def verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    """A verdict in words; the ceiling is the kernel that moves the same bytes without maps."""
    target, ours = verdict.target, verdict.ours
    return (
        target.key,
        target.impl,
        target.shapes,
        _goal(target, target.limit),
        "" if target.stretch is None else _goal(target, target.stretch),
        "" if verdict.value is None else f"{verdict.value:.3g}",
        _number(None if ours is None else ours.us),
        "" if verdict.peer is None else verdict.peer.impl,
        _number(None if verdict.peer is None else verdict.peer.us),
        _number(None if ours is None else ours.probe_us),
        {True: "PASS", False: "miss", None: "not measured"}[verdict.reached],
    )


def _goal(target: Target, limit: float) -> str:
    return {"us": "<= {:g} us", "copy": ">= {:g} of copy", "peer": ">= {:g}x the peer"}[target.kind].format(limit)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _value(target: Target, ours: Row | None, rival: Row | None) -> float | None:
    if ours is None:
        return None
    if target.kind == "us":
        return ours.us
    if target.kind == "copy":
        return ours.frac_copy
    return None if rival is None else _median(rival) / _median(ours)


def _median(row: Row) -> float:
    return float("inf") if row.us is None else row.us
