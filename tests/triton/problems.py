# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Shapes, problems and their plans for the tests of the Triton kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.testing.routing import GENERATORS, random_probs
from tests.params import (
    EMPTY,
    MANY_SLOTS,
    MORE_SLOTS_THAN_EXPERTS,
    ODD,
    ONE_COLUMN,
    ONE_TOKEN,
    PADDED,
    UNALIGNED,
    WIDE,
    Shape,
)
from tests.reference.cases import floats_of_every_kind, ordinary_floats

from .interpreter import NumpyDevice

ROW_SHAPES = (EMPTY, ONE_TOKEN, ONE_COLUMN, UNALIGNED, MORE_SLOTS_THAN_EXPERTS)
LONG_ROW_SHAPES = (ODD, PADDED, MANY_SLOTS, WIDE)


def fitting_tokens(gpu: Any, tokens: int) -> int:
    """The number of tokens, at most 3 for the interpreter."""
    return min(tokens, 3) if isinstance(gpu, NumpyDevice) else tokens


def fitting(gpu: Any, shape: Shape, tokens: int = 5) -> Shape:
    """The shape, or fewer tokens and less padding for the interpreter: each program takes ten milliseconds and more."""
    if not isinstance(gpu, NumpyDevice):
        return shape
    few = min(2, tokens) if (shape.H > 1000 or shape.K > 8) and tokens < 100 else tokens
    return shape._replace(T=min(shape.T, few), A=min(shape.A, 16))


class Problem(NamedTuple):
    shape: Shape
    ids: NDArray
    probs: NDArray
    plan: reference.Plan


def make_problem(rng: np.random.Generator, shape: Shape, routing: str = "half_unassigned", **options: Any) -> Problem:
    ids = GENERATORS[routing](rng, shape.T, shape.K, shape.E)
    probs = random_probs(rng, ids)
    plan = reference.route(ids, probs, num_experts=shape.E, padding_alignment=shape.A, **options)
    return Problem(shape, ids, probs, plan)


def every_kind(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """Ordinary numbers, subnormals, huge numbers, zeros, infinities and NaN with payloads."""
    return floats_of_every_kind(shape, dtype, int(rng.integers(2**32)))


def ordinary(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """Finite numbers of size 1."""
    return ordinary_floats(shape, dtype, int(rng.integers(2**32)))


def halfway(dtype: DTypeLike) -> tuple[NDArray, NDArray]:
    """Three rows whose sums lie halfway between two numbers of the dtype or just beside it, and the sums rounded.

    Halfway, the number with the even last bit is right; above the largest number, infinity.
    """
    info = ml_dtypes.finfo(dtype)
    step, largest = float(info.eps), float(info.max)
    half, tiny = step / 2, 2.0**-20
    last_step = largest - float(np.nextafter(info.max, np.zeros((), dtype)))
    sums = {
        (1, half, 0): 1,
        (1 + step, half, 0): 1 + 2 * step,
        (1, half, tiny): 1 + step,
        (1 + step, half, -tiny): 1 + step,
        (1.5 + step, -half, 0): 1.5,
        (1.5, -half, 0): 1.5,
        (largest, last_step / 4, 0): largest,
        (largest, last_step / 2, 0): np.inf,
    }
    rows, expected = np.array(list(sums)).T, np.array(list(sums.values()))
    both = np.concatenate([rows, -rows], axis=1), np.concatenate([expected, -expected])
    return both[0].astype(dtype), both[1].astype(dtype)
