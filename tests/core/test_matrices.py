# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Codes of the matrices of experts, and their values: those of the oracle, bit for bit."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike

from paddle_moe_ops import reference

from ..pairwise import pairwise_of
from ..reference.cases import floats_of_every_kind
from .binding import Core
from .operators.matrices import dequantize_matrices, quantize_blocks

BY_DTYPE = pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name
)
BY_FORMAT = pytest.mark.parametrize("format", reference.MATRIX_FORMATS)
BY_LAYOUT = pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
SHAPES = [
    (0, 3, 5),
    (2, 0, 5),
    (2, 3, 0),
    (1, 1, 1),
    (2, 128, 256),
    (3, 130, 272),
    (2, 7, 300),
    (2, 40, 24),
    (40, 129, 16),
]
FORMS = {"as is": (True, False), "transposed": (False, True), "both": (True, True)}


@pairwise_of(
    pytest.mark.parametrize("amax_min", [2.0**-100, 1e-4]),
    pytest.mark.parametrize("shape", SHAPES, ids=str),
    BY_DTYPE,
    pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS),
    empty={"shape": SHAPES[:3]},
    others_are_slow=True,
)
def test_blocks_have_the_codes_and_scales_of_the_rule(
    core: Core, rng: np.random.Generator, shape: tuple, dtype: DTypeLike, amax_min: float, forms: tuple[bool, bool]
) -> None:
    """Numbers of every kind: subnormals, infinities and NaN among them."""
    x = floats_of_every_kind(shape, dtype, int(rng.integers(2**32)))
    made = quantize_blocks(core, x, forms=forms, amax_min=amax_min)
    for wanted, prefix, given in zip(forms, ("", "turned_"), (x, x.swapaxes(1, 2)), strict=True):
        if wanted:
            codes, scales = reference.quantize_128x128(given, amax_min=amax_min)
            np.testing.assert_array_equal(made[f"{prefix}codes"].view(np.uint8), codes.view(np.uint8))
            np.testing.assert_array_equal(made[f"{prefix}scales"], scales)


@pairwise_of(pytest.mark.parametrize("shape", SHAPES, ids=str), BY_DTYPE, BY_LAYOUT, BY_FORMAT, others_are_slow=True)
def test_values_are_those_of_the_oracle(
    core: Core, rng: np.random.Generator, shape: tuple, dtype: DTypeLike, transpose: bool, format: str
) -> None:
    """Codes of any bits, and scales of every kind."""
    stored = (shape[0], *shape[:0:-1]) if transpose else shape
    codes, scales = reference.quantize_matrices(np.zeros(stored, np.float32), format=format, transpose=transpose)
    codes = rng.integers(0, 256, codes.shape, np.uint8).view(codes.dtype)
    scales = floats_of_every_kind(scales.shape, np.float32, int(rng.integers(2**32)))
    options = {"format": format, "transpose": transpose, "dtype": dtype}
    due = reference.dequantize_matrices(codes, scales, inner=shape[1], **options)
    for widens in (False, True):
        made = dequantize_matrices(core, codes, scales, sizes=shape[1:], widens=widens, **options)
        np.testing.assert_array_equal(made.astype(np.float32), due.astype(np.float32))


@BY_FORMAT
@BY_LAYOUT
def test_quantised_matrices_are_near_the_matrices(rng: np.random.Generator, format: str, transpose: bool) -> None:
    """An error of at most half a step, of the step's rounding to the dtype aside."""
    w = rng.standard_normal((3, 300, 70)).astype(ml_dtypes.bfloat16)
    codes, scales = reference.quantize_matrices(w, format=format, transpose=transpose)
    inner = w.shape[2 if transpose else 1]
    options = {"format": format, "transpose": transpose, "inner": inner, "dtype": np.float32}
    error = np.abs(reference.dequantize_matrices(codes, scales, **options) - w.astype(np.float32))
    limit = {"int8": 0.51 / 127, "fp8_128x128": 1 / 16}.get(format, 0.51 / 7)
    assert (error <= limit * np.abs(w.astype(np.float32)).max()).all()


def test_int4_codes_survive_packing(rng: np.random.Generator) -> None:
    for inner, outer in itertools.product((0, 1, 2, 32, 33, 63), (1, 5)):
        codes = rng.integers(-8, 8, (2, inner, outer)).astype(np.int8)
        packed = reference.pack_int4(codes)
        assert packed.shape == (2, -(-inner // 32) * 16, outer)
        unpacked = reference.unpack_int4(packed)
        np.testing.assert_array_equal(unpacked[:, :inner], codes)
        assert not unpacked[:, inner:].any()


def test_codes_that_do_not_fit_int4_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^pack_int4: codes must be from -8 to 7, but got 0 to 15$"):
        reference.pack_int4(np.arange(16).reshape(1, 16, 1))
    with pytest.raises(TypeError, match=r"^pack_int4: codes must be a NumPy array, but got list$"):
        reference.pack_int4([[[1]]])
    with pytest.raises(TypeError, match=r"^pack_int4: codes must be of integers, but got float32$"):
        reference.pack_int4(np.zeros((1, 16, 1), np.float32))


def test_a_byte_has_the_codes_of_an_input_and_of_the_one_8_further() -> None:
    for position in range(64):
        codes = np.zeros((1, 64, 1), np.int8)
        codes[0, position] = 1
        packed = reference.pack_int4(codes).ravel()
        (byte,) = np.flatnonzero(packed)
        inputs = 32 * (byte // 16) + 16 * (byte % 2) + byte % 16 // 2
        assert position == inputs + (0 if packed[byte] == 1 else 8)
