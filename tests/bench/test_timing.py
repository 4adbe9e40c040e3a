# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Median, quantiles and extremes of samples."""

from __future__ import annotations

import math

import pytest

from benchmarks.kernels.timing import stats_of


def test_median_quantiles_and_extremes_of_known_samples():
    stats = stats_of([*range(1, 101), 1000.0])
    assert stats == pytest.approx((51.0, 6.0, 96.0, 101, 1.0, 1000.0))


def test_one_slow_sample_does_not_move_the_median():
    assert stats_of([5.0] * 59 + [5000.0]).median == 5.0


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, -2.0], [math.nan], [math.inf]])
def test_samples_that_cannot_be_times_are_an_error(samples):
    with pytest.raises(ValueError, match="samples must be positive numbers of microseconds"):
        stats_of(samples)
