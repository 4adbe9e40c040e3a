# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The values of matrices in float8: those of the oracle, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike

from paddle_moe_ops import reference

from ..reference.cases import ordinary_floats
from .binding import Core
from .operators.near_blocks import AMAX_MIN, near_blocks

BY_DTYPE = pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name
)
SHAPES = [(0, 3, 5), (2, 0, 5), (2, 3, 0), (1, 1, 1), (2, 128, 256), (3, 200, 130), (2, 7, 300), (1, 129, 1)]


@BY_DTYPE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("amax_min", [AMAX_MIN, 1e-4])
def test_values_are_those_of_the_oracle(core: Core, shape: tuple, dtype: DTypeLike, amax_min: float) -> None:
    x = ordinary_floats((int(np.prod(shape)),), dtype, seed=sum(shape)).reshape(shape)
    due = reference.dequantize_128x128(*reference.quantize_128x128(x, amax_min=amax_min), dtype=np.float32)
    np.testing.assert_array_equal(near_blocks(core, x, amax_min), due)


@BY_DTYPE
def test_numbers_that_are_none_or_infinite_and_small_ones(core: Core, dtype: DTypeLike) -> None:
    x = ordinary_floats((3 * 200 * 130,), np.float32, seed=5).reshape(3, 200, 130)
    x[0, :3, 0] = np.nan, np.inf, -np.inf
    x[1] = 0
    x[1, 150, 129] = np.nan
    x[2] *= np.float32(1e-5 if np.dtype(dtype) == np.float16 else 1e-20)
    x = x.astype(dtype)
    due = reference.dequantize_128x128(*reference.quantize_128x128(x, amax_min=AMAX_MIN), dtype=np.float32)
    np.testing.assert_array_equal(near_blocks(core, x), due)
