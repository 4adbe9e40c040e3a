# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Times of Paddle's own kernels, which cannot run here: no GPU wheel of Paddle that holds them is on PyPI.

They were measured once with the kernels alone, by the method of this benchmark (replayed CUDA graph, cold caches), and
are shown in their place, scaled by the copy speed of the run they are compared in.
"""

from __future__ import annotations

from .operators import variant_of
from .results import Row
from .shapes import Operation

__all__ = ["published_rows"]

_COPY_GBPS = 4230.0
_SOURCE = "kernels of Paddle's revision of 2026-09 (PR 79756), on an H200 with a copy speed of 4.23 TB/s"


def published_rows(empty: Row, copy_gbps: float) -> list[tuple[str, float, str]]:
    """Name, microseconds at this run's copy speed, and source of each published time of a row's operation and shape."""
    return [
        (published.impl, published.medians[empty.shape] * _COPY_GBPS / copy_gbps, _SOURCE)
        for published in variant_of(Operation(empty.op, empty.variant)).published
        if empty.shape in published.medians
    ]
