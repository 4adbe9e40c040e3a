# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""fma32, add32 and round_to against exact fractions."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference import add32, fma32, round_to, to_float32

from . import brute_force
from .cases import EXAMPLES, ROW_DTYPES, assert_same_bits, assert_same_numbers

COUNT = 4000
MAX = np.finfo(np.float32).max
TINY = np.finfo(np.float32).smallest_subnormal


def exact_fma(a: NDArray, b: NDArray, c: NDArray) -> NDArray:
    operands = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return np.array([brute_force.fma(*numbers) for numbers in operands], np.float32)


def random_bits(rng: np.random.Generator, count: int = COUNT) -> NDArray:
    return rng.integers(0, 2**32, count, np.uint32).view(np.float32)


def near(rng: np.random.Generator, values: NDArray) -> NDArray:
    """Numbers at most 3 units in the last place away."""
    return (values.view(np.int32) + rng.integers(-3, 4, len(values), np.int32)).view(np.float32)


def any_bits(rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
    return random_bits(rng), random_bits(rng), random_bits(rng)


def similar_magnitudes(rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
    a, b = (rng.standard_normal(COUNT).astype(np.float32) for _ in range(2))
    return a, b, (rng.standard_normal(COUNT) * 2.0 ** rng.integers(-60, 61, COUNT)).astype(np.float32)


def cancellation(rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
    a, b = (rng.standard_normal(COUNT).astype(np.float32) for _ in range(2))
    return a, b, near(rng, -(a * b))


def subnormal_results(rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
    a = (rng.standard_normal(COUNT) * 2.0 ** rng.integers(-80, -60, COUNT)).astype(np.float32)
    b = (rng.standard_normal(COUNT) * 2.0 ** rng.integers(-80, -60, COUNT)).astype(np.float32)
    c = rng.integers(-50, 51, COUNT).astype(np.float32) * TINY
    return a, b, c


def near_overflow(rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
    a = (2.0 ** rng.uniform(60, 64, COUNT)).astype(np.float32)
    b = (MAX / a.astype(np.float64) * rng.choice([-1.0, 1.0], COUNT)).astype(np.float32)
    c = (2.0 ** rng.uniform(90, 106, COUNT) * rng.choice([-1.0, 1.0], COUNT)).astype(np.float32)
    return a, b, c


def ties_broken_by_the_addend(rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
    """Products half-way between two float32, and an addend far too small for float64 to see beside them."""
    odd = rng.integers(2**22, 2**23, COUNT) * 2 + 1
    a = (odd * rng.choice([-1, 1], COUNT)).astype(np.float32)
    b = np.full(COUNT, 1.5, np.float32)
    c = 2.0 ** rng.integers(-149, -30, COUNT) * rng.choice([-1, 0, 1], COUNT)
    return a, b, c.astype(np.float32)


def ties_broken_by_the_product(rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
    """Half a unit of the addend, or (1 - 2**-46) times that; also between subnormal addends."""
    c = random_bits(rng)
    subnormal = (c.view(np.uint32) % 2**23).view(np.float32)
    c = np.where(np.abs(c) < np.float32(2.0**100), c, subnormal)
    half_unit = np.spacing(np.abs(c)).astype(np.float64) / 2
    off = rng.choice([0, 2.0**-23], COUNT)
    split = 2.0 ** np.round(np.log2(half_unit) / 2) * rng.choice([-1, 1], COUNT)
    return (split * (1 + off)).astype(np.float32), (half_unit / split * (1 - off)).astype(np.float32), c


@pytest.mark.parametrize(
    "operands",
    [
        any_bits,
        similar_magnitudes,
        cancellation,
        subnormal_results,
        near_overflow,
        ties_broken_by_the_addend,
        ties_broken_by_the_product,
    ],
    ids=lambda make: make.__name__,
)
def test_fma32_rounds_the_exact_result_once(operands) -> None:
    a, b, c = operands(np.random.default_rng(7))
    assert_same_numbers(fma32(a, b, c), exact_fma(a, b, c))


@EXAMPLES
@given(*[st.floats(width=32)] * 3)
def test_fma32_and_add32_match_fractions_on_drawn_numbers(a: float, b: float, c: float) -> None:
    operands = [np.array([x], np.float32) for x in (a, b, c)]
    assert_same_numbers(fma32(*operands), exact_fma(*operands))
    assert_same_numbers(add32(*operands[1:]), exact_fma(operands[1], np.ones(1, np.float32), operands[2]))


def test_rounding_twice_would_be_seen() -> None:
    """The tie breaker is lost in float64, so rounding a float64 sum to float32 gives another number."""
    a, b, c = np.float32(2**24 + 2), np.float32(1.5), np.float32(-(2.0**-40))
    assert np.float32(np.float64(a) * b + c) == 25165828
    assert fma32(a, b, c) == 25165826


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (0.0, 1.0, -0.0, 0.0),
        (-0.0, 1.0, -0.0, -0.0),
        (2.0, 3.0, -6.0, 0.0),
        (-TINY, 0.25, 0.0, -0.0),
        (TINY, 0.5, 0.0, 0.0),
        (TINY, 0.75, 0.0, TINY),
        (MAX, 1.0, MAX * 2.0**-25, MAX),
        (MAX, 1.0, 2.0**103, np.inf),
        (MAX, 2.0, -np.inf, -np.inf),
        (np.inf, 0.0, 1.0, np.nan),
        (np.inf, 1.0, -np.inf, np.nan),
        (np.nan, 1.0, 1.0, np.nan),
    ],
)
def test_fma32_edges(a: float, b: float, c: float, expected: float) -> None:
    result = fma32(np.float32(a), np.float32(b), np.float32(c))
    assert_same_numbers(np.asarray(result), np.array(expected, np.float32))


def test_fma32_broadcasts_and_passes_float64_through() -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert fma32(a, a[:, :1], np.float32(1)).tolist() == [[1, 1, 1], [10, 13, 16]]
    assert fma32(np.array([1 / 3]), np.float32(3), np.float32(0)).dtype == np.float64


def all_finite(dtype: DTypeLike) -> NDArray:
    """All finite non-negative numbers of a 16-bit type, ascending."""
    values = np.arange(2**15, dtype=np.uint16).view(dtype)
    return values[np.isfinite(to_float32(values))]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_round_to_is_nearest_even_between_all_neighbours(dtype: DTypeLike, sign: int) -> None:
    finite = all_finite(dtype)
    lower, upper = finite[:-1], finite[1:]
    middle = to_float32(lower) + (to_float32(upper) - to_float32(lower)) / 2
    even = np.where(lower.view(np.uint16) % 2 == 0, lower, upper)
    sign = np.float32(sign)
    for exact, expected in [
        (middle, even),
        (np.nextafter(middle, np.float32(-1)), lower),
        (np.nextafter(middle, np.float32(np.inf)), upper),
        (to_float32(lower), lower),
    ]:
        assert_same_bits(round_to(sign * exact, dtype), (sign * to_float32(expected)).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_round_to_overflows_from_half_a_unit_past_the_largest_number(dtype: DTypeLike) -> None:
    below, largest = to_float32(all_finite(dtype)[-2:])
    limit = largest + (largest - below) / np.float32(2)
    values = np.array([limit, np.nextafter(limit, np.float32(0)), np.inf, np.nan], np.float32)
    assert_same_numbers(to_float32(round_to(values, dtype)), np.array([np.inf, largest, np.inf, np.nan], np.float32))


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_widening_is_exact(dtype: DTypeLike) -> None:
    values = np.arange(2**8 if np.dtype(dtype).itemsize == 1 else 2**15, dtype=f"u{np.dtype(dtype).itemsize}")
    values = values.view(dtype)
    wide = to_float32(values)
    assert wide.dtype == np.float32
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(wide.astype(np.float64), values.astype(np.float64))


def test_extreme_numbers_warn_about_nothing() -> None:
    rng = np.random.default_rng(1)
    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        a, b, c = any_bits(rng)
        fma32(a, b, c)
        add32(a, b)
        to_float32(np.arange(2**16, dtype=np.uint16).view(np.float16))
        for dtype in (np.float16, ml_dtypes.bfloat16):
            round_to(a, dtype)
