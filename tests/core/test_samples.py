# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""samples: which elements are read, and what a difference in one of them does."""

from __future__ import annotations

import numpy as np
import pytest

from .binding import Core
from .operators.samples import compare_samples, take_samples

SIZES = [(1, 1), (5, 3), (300, 7), (16384, 5)]
BY_DTYPE = pytest.mark.parametrize("dtype", [np.float16, np.float32])


@BY_DTYPE
@pytest.mark.parametrize(("count", "step"), SIZES)
def test_samples_are_every_step_th_element(count: int, step: int, dtype: type, core: Core) -> None:
    values = (np.arange((count - 1) * step + 1) % 999).astype(dtype)
    values[0] = np.nan
    samples = take_samples(core, values, count, step)
    assert samples.tobytes() == values[::step].tobytes()
    changed, scales = compare_samples(core, values, samples, step, 3)
    assert changed.tolist() == [7]
    assert scales.tolist() == [7] * 3


@BY_DTYPE
@pytest.mark.parametrize(("count", "step"), SIZES)
@pytest.mark.parametrize("num_scales", [0, 1, 700])
def test_one_bit_of_a_sample_spoils_all_scales(num_scales: int, count: int, step: int, dtype: type, core: Core) -> None:
    values = np.zeros((count - 1) * step + 1, dtype)
    samples = take_samples(core, values, count, step)
    for place in {0, count // 2, count - 1}:
        changed_values = values.copy()
        changed_values[place * step] = -0.0
        changed, scales = compare_samples(core, changed_values, samples, step, num_scales)
        assert changed.tolist() == [1]
        assert np.isnan(scales).all()


def test_elements_between_samples_are_not_read(core: Core) -> None:
    values = np.zeros(31, np.float32)
    samples = take_samples(core, values, 7, 5)
    values[np.arange(31) % 5 != 0] = 1
    changed, _ = compare_samples(core, values, samples, 5, 2)
    assert changed.tolist() == [7]
