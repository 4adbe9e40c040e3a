# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Quantisation against exact fractions, group by group and code by code."""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference import dequantize_1x128, permute, permute_quantized, quantize_1x128

from . import brute_force
from .cases import EXAMPLES, SUM_DTYPES, Case, assert_same_bits, floats_of_every_kind, ordinary_floats, routing_cases

FLOAT32_INF = np.float32(np.inf)
FLOAT32_MAX = Fraction(float(np.finfo(np.float32).max))
# The magnitudes of the codes 0x00 to 0x7E: three bits of mantissa, exponent bias 7, no infinity.
E4M3 = [
    Fraction(code, 512) if code < 8 else Fraction(8 + code % 8) * Fraction(2) ** (code // 8 - 10) for code in range(127)
]
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


def round32(value: Fraction) -> Fraction:
    return Fraction(brute_force.round_fraction(value, brute_force.FLOAT32)) if value else value


def nearest_code(magnitude: Fraction) -> int:
    """The code of the nearest number, of two the even code; 448 for all that is larger."""
    above = bisect.bisect_left(E4M3, magnitude)
    if above == len(E4M3):
        return above - 1
    if above == 0:
        return 0
    to_above, to_below = E4M3[above] - magnitude, magnitude - E4M3[above - 1]
    if to_above == to_below:
        return above if above % 2 == 0 else above - 1
    return above if to_above < to_below else above - 1


def quantize_group(values: list[float], amax_min: float, ue8m0: bool) -> tuple[list[int], Fraction]:
    """Codes of a group of columns and its scale."""
    magnitudes = [FLOAT32_MAX if math.isinf(value) else Fraction(abs(value)) for value in values if value == value]
    amax = max([Fraction(float(np.float32(amax_min))), *magnitudes])
    scale = round32(amax / 448)
    if ue8m0:
        exponent = -126
        while Fraction(2) ** exponent < scale:
            exponent += 1
        scale = Fraction(2) ** exponent
    inverse = round32(1 / scale)
    codes = []
    for value in values:
        if math.isnan(value):
            codes.append(0x7F)
            continue
        product = None if math.isinf(value) else Fraction(abs(value)) * inverse
        code = 0x7E if product is None else nearest_code(min(round32(product), Fraction(2) ** 127))
        codes.append(code | (0x80 if math.copysign(1, value) < 0 else 0))
    return codes, scale


def check_against_fractions(x: NDArray, amax_min: float, ue8m0: bool) -> None:
    codes, scales = quantize_1x128(x, ue8m0=ue8m0, amax_min=amax_min)
    assert codes.dtype == FLOAT8
    values = brute_force.numbers(x)
    for token in range(len(x)):
        for group in range(-(-x.shape[1] // 128)):
            columns = slice(128 * group, 128 * group + 128)
            expected_codes, expected_scale = quantize_group(values[token][columns], amax_min, ue8m0)
            assert codes.view(np.uint8)[token, columns].tolist() == expected_codes
            if ue8m0:
                byte = (int(scales[token, group // 4]) >> (8 * (group % 4))) & 0xFF
                assert Fraction(2) ** (byte - 127) == expected_scale
            else:
                assert Fraction(float(scales[token, group])) == expected_scale


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("hidden", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("dtype", SUM_DTYPES)
def test_codes_and_scales_equal_exact_fractions(dtype: DTypeLike, hidden: int, ue8m0: bool) -> None:
    check_against_fractions(floats_of_every_kind((3, hidden), dtype, seed=hidden), 1e-4, ue8m0)
    check_against_fractions(ordinary_floats((3, hidden), dtype, seed=hidden), 1e-4, ue8m0)


@EXAMPLES
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=8),
    amax_min=st.floats(2.0**-100, float(FLOAT32_MAX)),
    ue8m0=st.booleans(),
)
def test_any_numbers_and_any_amax_min(values: list[float], amax_min: float, ue8m0: bool) -> None:
    check_against_fractions(np.array([values], np.float32), amax_min, ue8m0)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_every_float8_and_every_middle_between_two(ue8m0: bool) -> None:
    """amax 448 makes the scale 1, so that the codes are the numbers' own."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(E4M3)]
    magnitudes = np.array([float(value) for value in (*E4M3, *middles)], np.float32)
    around = np.concatenate(
        [magnitudes, np.nextafter(magnitudes, np.float32(0)), np.nextafter(magnitudes, FLOAT32_INF)]
    )
    numbers = np.concatenate([around, -around])
    numbers = numbers[np.abs(numbers) <= 448]
    groups = np.concatenate([numbers, np.zeros(-len(numbers) % 127, np.float32)]).reshape(-1, 127)
    x = np.concatenate([groups, np.full((len(groups), 1), 448, np.float32)], axis=1)
    assert quantize_1x128(x)[1].tolist() == [[1.0]] * len(x)
    check_against_fractions(x, 1e-4, ue8m0)


def test_numbers_that_are_easy_to_get_wrong() -> None:
    nan = np.float32(np.nan)
    x = np.zeros((6, 128), np.float32)
    x[0, :3] = nan, -nan, 1
    x[1, :3] = np.inf, -np.inf, 448
    x[2, :2] = -0.0, 0.0
    x[3] = nan
    x[4, :2] = 1e-45, -1e-45
    x[5, :2] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    codes, scales = quantize_1x128(x)
    bits = codes.view(np.uint8)
    assert bits[0, :4].tolist() == [0x7F, 0x7F, 0x7E, 0]
    assert bits[1, :4].tolist() == [0x7E, 0xFE, 0, 0]
    assert bits[2, :2].tolist() == [0x80, 0]
    assert (bits[3] == 0x7F).all()
    assert bits[4, :2].tolist() == [0, 0x80]
    assert bits[5, :2].tolist() == [0x7E, 0xFE]
    floor = np.float32(1e-4) / np.float32(448)
    assert scales[:, 0].tolist() == [
        np.float32(1) / np.float32(448),
        np.finfo(np.float32).max / np.float32(448),
        floor,
        floor,
        floor,
        np.finfo(np.float32).max / np.float32(448),
    ]


def test_packed_exponents_have_the_lowest_group_in_the_lowest_byte() -> None:
    x = np.zeros((1, 5 * 128), np.float32)
    x[0, ::128] = 448 * np.array([1, 2, 4, 8, 0.5])
    _, scales = quantize_1x128(x, ue8m0=True)
    assert scales.tolist() == [[0x8281807F - 2**32, 0x7E]]


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 4, 7])
def test_column_layout_is_the_transpose_with_zeros_behind_it(num_rows: int, ue8m0: bool) -> None:
    x = ordinary_floats((num_rows, 600), np.float32, seed=1)
    codes, by_row = quantize_1x128(x, ue8m0=ue8m0)
    same_codes, by_column = quantize_1x128(x, ue8m0=ue8m0, scale_layout="col")
    assert_same_bits(same_codes, codes)
    assert by_row.shape == (num_rows, 2 if ue8m0 else 5)
    assert by_column.shape == (by_row.shape[1], -(-num_rows // 4) * 4)
    assert by_column.flags.c_contiguous
    assert_same_bits(by_column[:, :num_rows].T, by_row)
    assert not by_column[:, num_rows:].any()


@EXAMPLES
@given(case=routing_cases(), hidden=st.sampled_from([1, 72, 130, 520]), ue8m0=st.booleans(), seed=st.integers(0, 99))
def test_quantise_then_permute_equals_quantise_while_permuting(case: Case, hidden: int, ue8m0: bool, seed: int) -> None:
    x = floats_of_every_kind((case.plan.num_tokens, hidden), ml_dtypes.bfloat16, seed)
    codes, scales = permute_quantized(x, case.plan, ue8m0=ue8m0)
    token_codes, token_scales = quantize_1x128(x, ue8m0=ue8m0)
    expected_codes, expected_scales = permute(token_codes, case.plan, token_scales)
    assert_same_bits(codes, expected_codes)
    assert_same_bits(scales, expected_scales)
    by_column = permute_quantized(x, case.plan, ue8m0=ue8m0, scale_layout="col")[1]
    assert_same_bits(by_column[:, : case.plan.num_rows].T, scales)


@pytest.mark.parametrize("scale_layout", ["row", "col"])
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", SUM_DTYPES)
def test_dequantised_numbers_are_products_of_codes_and_scales(dtype: DTypeLike, ue8m0: bool, scale_layout: str) -> None:
    x = ordinary_floats((5, 600), dtype, seed=2)
    codes, scales = quantize_1x128(x, ue8m0=ue8m0, scale_layout=scale_layout)
    back = dequantize_1x128(codes, scales, scale_layout=scale_layout, dtype=dtype)
    assert back.dtype == np.dtype(dtype)
    wide, back = x.astype(np.float32), back.astype(np.float32)
    # Half a unit of e4m3 is 2^-4 of a number; below the smallest normal one it is fixed, 2^-10 of the scale.
    amax = np.abs(wide).max()
    assert (np.abs(back - wide) <= np.maximum(np.abs(wide) * 2.0**-4, amax / 448 * 2.0**-9) * 1.01).all()
    assert (np.abs(back - wide) > 0).any()
    target = brute_force.FORMATS[np.dtype(dtype)]
    for column in (0, 127, 128, 599):
        group = slice(column // 128 * 128, column // 128 * 128 + 128)
        _, scale = quantize_group(brute_force.numbers(x[0, group]), 1e-4, ue8m0)
        exact = Fraction(float(codes[0, column])) * scale
        assert back[0, column] == brute_force.round_number(float(round32(exact)), target)
