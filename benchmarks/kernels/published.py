# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Times of Paddle's own kernels, which cannot run here: no GPU wheel of Paddle that holds them is on PyPI.

They were measured once with the kernels alone, by the method of this benchmark (replayed CUDA graph, cold caches), and
stand in for them, scaled by the copy speed of the run they are compared in.
"""

from __future__ import annotations

from typing import NamedTuple

from .results import Row

__all__ = ["PUBLISHED", "Published", "published_rows"]

_COPY_GBPS = 4230.0
_SOURCE = "kernels of Paddle's revision of 2026-09 (PR 79756), on an H200 with a copy speed of 4.23 TB/s"


class Published(NamedTuple):
    """Microseconds by name of shape."""

    impl: str
    operations: tuple[str, ...]
    medians: dict[str, float]


# Paddle's permute makes its maps as well, so it stands beside both of ours that do; its unpermute reads a [T, E] map.
PUBLISHED = (
    Published(
        "paddle (published, scaled)",
        ("moe_permute:bf16", "route_permute:bf16"),
        {
            "tileops-32": 78.7,
            "tileops-128": 81.9,
            "tileops-512": 83.3,
            "tileops-4096": 171.0,
            "dsv3": 174.5,
            "ernie-300b": 703.6,
            "ernie-21b": 188.6,
            "paddle-production": 492.8,
        },
    ),
    Published("paddle static buffer (published, scaled)", ("moe_permute:bf16",), {"paddle-production": 615.0}),
    Published(
        "paddle (published, scaled)",
        ("moe_permute:fp8", "route_permute:fp8"),
        {
            "tileops-32": 53.3,
            "tileops-128": 58.0,
            "tileops-512": 58.8,
            "tileops-4096": 103.3,
            "dsv3": 107.0,
            "ernie-300b": 381.0,
            "ernie-21b": 118.7,
            "paddle-production": 315.1,
        },
    ),
    Published("paddle static buffer (published, scaled)", ("moe_permute:fp8",), {"paddle-production": 437.0}),
    Published(
        "paddle (published, scaled)",
        ("unpermute:weighted", "moe_unpermute:weighted"),
        {
            "tileops-32": 28.4,
            "tileops-128": 30.3,
            "tileops-512": 38.8,
            "tileops-4096": 160.3,
            "dsv3": 265.6,
            "ernie-300b": 588.5,
            "ernie-21b": 172.8,
            "paddle-production": 394.3,
        },
    ),
)


def published_rows(empty: Row, copy_gbps: float) -> list[tuple[str, float, str]]:
    """Name, microseconds at the copy speed of this run, and source of what is known of a row's operation and shape."""
    return [
        (published.impl, published.medians[empty.shape] * _COPY_GBPS / copy_gbps, _SOURCE)
        for published in PUBLISHED
        if empty.key in published.operations and empty.shape in published.medians
    ]
