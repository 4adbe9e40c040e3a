# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Least squares of relative errors, with factors that are not negative."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["fitted"]


def fitted(
    features: Sequence[Sequence[float]], measured: Sequence[float], known: Sequence[float] | None = None
) -> np.ndarray:
    """Return factors, 0 or more, of the sum of features nearest to the measurements in relative terms.

    Factors that would be negative are left out, the most negative first.

    Args:
        features: [measurements, factors].
        measured: [measurements], positive.
        known: [measurements], the part of each that other numbers account for.
    """
    scaled = np.asarray(features, float) / np.asarray(measured, float)[:, None]
    target = 1 - np.asarray(0.0 if known is None else known) / np.asarray(measured, float)
    size = np.abs(scaled).max(0)
    size[size == 0] = 1
    kept = list(range(scaled.shape[1]))
    found = np.zeros(scaled.shape[1])
    while kept:
        solution = np.linalg.lstsq(scaled[:, kept] / size[kept], target, rcond=None)[0]
        if (solution >= 0).all():
            found[kept] = solution / size[kept]
            break
        kept.pop(int(solution.argmin()))
    return found
