# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Problems that all operators are tested on: a small one, random ones, and those that several threads share."""

from __future__ import annotations

from functools import cached_property

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..params import Shape
from ..reference.cases import floats_of_every_kind, ordinary_floats
from ..routers import Router, deepseek_v3
from .cases import Problem, make_ids, make_mask, make_plan, make_problem, make_probs


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

    def sizes(self, names: str) -> dict[str, int]:
        """Fields of a struct that hold sizes, by name."""
        known = {"num_tokens": self.T, "topk": self.K, "max_rows_per_token": self.K}
        known |= {"num_experts": self.E, "num_rows": self.N, "hidden": self.H}
        return {name: known[name] for name in names.split()}

    def choices(self, **ends: int) -> dict[str, int]:
        """Fields that hold one of a few numbers, with the number that is one too large."""
        return {name: self.below(end) for name, end in ends.items()}

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


# A thread joins for each MiB that is moved, and routing is cut into chunks of 16384 slots.
ROUTED = Shape(45_000, 0, 16, 8, 16, "360000 slots: 22 chunks of routing, and 5 MiB of values of slots")
MOVED = Shape(6_000, 80, 64, 8, 16, "48000 rows of 160 bytes: 7 MiB")


class Large:
    """Problems that several threads share: a routing, rows that are moved by another one, and a router."""

    @cached_property
    def routed(self) -> Problem:
        ids = make_ids("half_unassigned", ROUTED, seed=1, dtype=np.int64)
        return make_problem(ids, ROUTED.E, ROUTED.A, probs=make_probs(ids.shape, 2))

    def probs(self, shape: tuple[int, ...], seed: int) -> NDArray:
        return make_probs(shape, seed)

    @cached_property
    def plan(self) -> reference.Plan:
        return make_plan("zipf", MOVED, seed=3)

    @cached_property
    def x(self) -> NDArray:
        return floats_of_every_kind((MOVED.T, MOVED.H), ml_dtypes.bfloat16, seed=4)

    @cached_property
    def rows(self) -> NDArray:
        return ordinary_floats((self.plan.num_rows, MOVED.H), ml_dtypes.bfloat16, seed=5)

    @cached_property
    def weights(self) -> NDArray:
        return ordinary_floats((self.plan.num_rows,), np.float32, seed=6)

    @cached_property
    def router(self) -> Router:
        return deepseek_v3(ml_dtypes.bfloat16, 700, np.random.default_rng(9))

    @cached_property
    def chosen(self) -> tuple[NDArray, NDArray, NDArray]:
        """The oracle's weights, ids and scores for the router."""
        router = self.router
        weights, ids, scores = reference.calculate_topk(
            router.gating,
            *router.arguments,
            scaling_factor=router.scaling_factor,
            correction_bias=router.correction_bias,
            **router.groups,
        )
        return weights, np.ascontiguousarray(ids), scores

    @cached_property
    def quantized(self) -> tuple[NDArray, NDArray]:
        """Codes and packed scales of the rows, by the oracle."""
        return reference.quantize_1x128(self.rows, ue8m0=True)


SMALL, LARGE = Small(), Large()
