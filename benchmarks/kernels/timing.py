# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Statistics of timed calls: median, quantiles and extremes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Stats", "stats_of"]


class Stats(NamedTuple):
    """Microseconds of one call: median, 5 % and 95 % quantiles, number of samples, minimum and maximum."""

    median: float
    p5: float
    p95: float
    samples: int
    least: float
    most: float


def stats_of(samples: Sequence[float]) -> Stats:
    """Summarise samples in microseconds.

    Raises:
        ValueError: there are none, or one is not a positive number.
    """
    values = np.asarray(samples, np.float64)
    if not values.size or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"samples must be positive numbers of microseconds, but got {list(samples)}")
    p5, median, p95 = np.quantile(values, (0.05, 0.5, 0.95))
    return Stats(float(median), float(p5), float(p95), values.size, float(values.min()), float(values.max()))
