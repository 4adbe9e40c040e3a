# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every operator once, on arrays large enough that several threads share the work."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops import reference

from ..params import Shape
from ..reference.cases import floats_of_every_kind, ordinary_floats
from ..routers import Router, deepseek_v3
from . import operators
from .binding import Core
from .cases import Problem, make_ids, make_plan, make_problem, make_probs

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
        """What the oracle makes of the router: weights, ids and scores."""
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


Results = tuple[NDArray, ...]

LARGE = Large()
# They take the core and a number of threads.
OPERATORS: dict[str, Callable[[Core, int], Results]] = {
    key: partial(operator.work, LARGE) for key, operator in operators.OPERATORS.items() if operator.work is not None
}


def bits(results: Results) -> list[bytes]:
    return [array.tobytes() for array in results]
