# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Exact float32 arithmetic: the results of a fused multiply-add, an addition and a rounding, bit for bit.

Every function takes arrays of any shape that broadcast, works element by element and is deterministic.
With float64 operands the functions compute in float64, which finite-difference tests need.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

__all__ = ["add32", "fma32", "round_float64", "round_to", "to_float32"]


def _quiet() -> np.errstate:
    """Infinities, NaN and subnormals are ordinary values here, not something to warn about."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore")


def to_float32(x: ArrayLike) -> NDArray:
    """Widen bfloat16, float16, float8 or float32 to float32, which is exact; float64 is returned as it is."""
    x = np.asarray(x)
    if x.dtype == np.float64:
        return x
    with _quiet():
        return x.astype(np.float32, copy=False)


def round_to(x: ArrayLike, dtype: DTypeLike) -> NDArray:
    """Round float32 to ``dtype`` (bfloat16, float16 or float32): nearest, ties to even, subnormals kept.

    Values past the largest finite number by half a unit or more become infinite. float64 goes to float64
    only: its way to a 16-bit type would round twice.
    """
    with _quiet():
        return np.asarray(x).astype(dtype, copy=False)


def round_float64(x: NDArray, dtype: DTypeLike) -> NDArray:
    """Round float64 to float32 and that to ``dtype``, which is off by at most a little more than half a step.

    Used for results that are compared within a tolerance. float64 is returned unchanged.
    """
    return x if dtype == np.float64 else round_to(round_to(x, np.float32), dtype)


def add32(a: ArrayLike, b: ArrayLike) -> NDArray:
    """Return RN(a + b) in float32."""
    with _quiet():
        return np.add(to_float32(a), to_float32(b))


def fma32(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> NDArray:
    """Return RN(a * b + c) in float32, rounded once, as IEEE 754's fusedMultiplyAdd.

    The product of two float32 is exact in float64. Its sum with ``c`` is not, so the sum is rounded to odd
    (the last bit is set whenever something was cut off) and only then to float32. Rounding to odd with at
    least two spare bits makes the second rounding the only one that counts (Boldo and Melquiond, "Emulation
    of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008); float64 has 29 spare
    bits, and more for a subnormal result. The error term comes from Knuth's TwoSum and cannot underflow:
    every operand is a multiple of 2**-298.

    Args:
        a: first factor, float32 (or narrower).
        b: second factor, float32 (or narrower).
        c: addend, float32 (or narrower).

    Returns:
        float32 array of the broadcast shape; with a float64 operand a plain ``a * b + c`` in float64.
    """
    a, b, c = to_float32(a), to_float32(b), to_float32(c)
    with _quiet():
        if np.float64 in (a.dtype, b.dtype, c.dtype):
            return np.asarray(a * b + c)
        product = np.multiply(a, b, dtype=np.float64)
        addend = c.astype(np.float64)
        total = np.asarray(product + addend)
        addend_part = total - product
        error = (product - (total - addend_part)) + (addend - addend_part)
        # An infinite or NaN total is final, and its error term means nothing.
        inexact = np.isfinite(total) & (error != 0)
        bits = total.view(np.int64)
        # Cut towards zero (a step back if the total was rounded away from zero), then make the last bit odd.
        rounded_away = np.signbit(error) != np.signbit(total)
        odd_bits = np.where(inexact, (bits - rounded_away) | 1, bits)
        return odd_bits.view(np.float64).astype(np.float32)
