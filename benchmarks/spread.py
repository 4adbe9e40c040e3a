# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The spread of timed samples: fields of a result line, and their text in a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["deviation", "difference_fields", "time_fields", "with_deviation"]


def time_fields(
    samples: Sequence[float], prefix: str = "", *, unit: str = "us", digits: int | None = None
) -> dict[str, float]:
    """Median, minimum and maximum of samples, as ``us``, ``min_us`` and ``max_us`` behind a prefix."""
    found = {unit: statistics.median(samples), f"min_{unit}": min(samples), f"max_{unit}": max(samples)}
    return {prefix + name: value if digits is None else round(value, digits) for name, value in found.items()}


def difference_fields(whole: Mapping[str, float], part: Mapping[str, float]) -> dict[str, float]:
    """Time of a whole call without a part of it that was timed apart.

    Returns:
        ``us``, and bounds as ``min_us`` and ``max_us``: samples of both are no pairs.
    """
    bounds = {"us": "us", "min_us": "max_us", "max_us": "min_us"}
    return {name: whole[name] - part[other] for name, other in bounds.items()}


def deviation(line: Mapping[str, Any], prefix: str = "", *, unit: str = "us") -> float | None:
    """Larger distance of the minimum and the maximum from the median, over the median.

    Returns:
        None for a line without all three, such as those of older results.
    """
    median, least, most = (line.get(f"{prefix}{bound}{unit}") for bound in ("", "min_", "max_"))
    if median is None or least is None or most is None:
        return None
    return max(median - least, most - median) / median


def with_deviation(value: float, share: float | None, digits: int = 0) -> str:
    """A figure, followed by ± its deviation if that is known."""
    text = f"{value:.{digits}f}"
    return text if share is None else f"{text} ±{value * share:.{digits}f}"
