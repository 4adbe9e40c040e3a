# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Problems that all operators are tested on: a small one whose fields are spoilt, and random ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..params import Shape
from ..reference.cases import ordinary_floats
from .cases import make_ids, make_mask, make_plan


class Small:
    """A problem in which every field of every struct has something to point to."""

    def __init__(self) -> None:
        self.T, self.H, self.E, self.K, self.A = 5, 6, 4, 2, 2
        self.shape = Shape(self.T, self.H, self.E, self.K, self.A, "small")
        self.plan = make_plan("uniform", self.shape, seed=1)
        self.N = self.plan.num_rows
        self.floats = ordinary_floats((max(self.N, self.T), self.H), np.float32, seed=2)
        self.x, self.rows = self.floats[: self.T], self.floats[: self.N]
        self.probs = ordinary_floats((self.T, self.K), np.float32, seed=3)
        self.mask = make_mask(self.shape, seed=4)

    def ids(self, dtype: DTypeLike = np.int32) -> NDArray:
        return make_ids("uniform", self.shape, seed=1, dtype=dtype)


class Draw:
    """A random problem of small sizes, often 0. Its indices may lead anywhere."""

    ODD_INTS = (-(2**31), -7, -2, 2**31 - 1)
    WIDEST = 4  # bytes per element: with any dtype the rows stay inside their arrays

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.T, self.K, self.N, self.H, self.S = (self.below(top) for top in (9, 6, 20, 40, 4))
        self.E = self.between(1, 10)

    def between(self, low: int, end: int) -> int:
        return int(self.rng.integers(low, end))

    def below(self, end: int) -> int:
        return self.between(0, end)

    def checks(self, end: int) -> int:
        """Mostly none."""
        return self.below(end) if self.rng.random() < 0.3 else 0

    def ints(self, shape: tuple[int, ...], limit: int, dtype: type = np.int32) -> NDArray:
        """Mostly usable indices below the limit, some -1, some that lead nowhere."""
        values = self.rng.integers(0, max(limit, 1), shape)
        kind = self.rng.random(shape)
        values = np.where(kind < 0.3, -1, values)
        odd = self.rng.choice([*self.ODD_INTS, limit], shape)
        return np.where(kind > 0.85, odd, values).astype(dtype)

    def data(self, rows: int, columns: int) -> NDArray:
        """Rows of any bits, wide enough for every dtype."""
        bits = self.rng.integers(0, 256, (rows, columns * self.WIDEST), np.uint8)
        return bits.view(np.float32).reshape(rows, columns)


SMALL = Small()
