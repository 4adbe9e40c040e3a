# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing NumPy arrays with the oracle, every element of which it computes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .check import Check
from .cpu_arrays import ArrayInputs

__all__ = ["ArrayCheck"]


class ArrayCheck(Check):
    """Comparisons of NumPy arrays."""

    chunk_elements = 1 << 22
    inputs: ArrayInputs

    def bits(self, array: NDArray) -> NDArray:
        return np.ascontiguousarray(array).view(f"u{array.itemsize}").reshape(array.shape)

    def places(self, index: NDArray) -> NDArray:
        return np.maximum(index, 0)

    def wide(self, array: NDArray) -> NDArray:
        return array.astype(np.float64)

    def nonzero(self, mask: NDArray) -> NDArray:
        return np.argwhere(mask)

    def sums(self, tokens: slice, weighted: bool) -> tuple[NDArray, NDArray]:
        exact, magnitude = self.inputs.sums(weighted)
        return exact[tokens], magnitude[tokens]

    def scaled(self, rows: slice) -> NDArray:
        return self.inputs.scaled(rows)
