# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle of paddle.incubate's float8 functions, against the rule one number at a time, and special groups."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_moe_ops.reference import paddle_fp8 as oracle

from .cases import EXAMPLES

E4M3_NUMBERS = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
TINY = float.fromhex("0x1p-133")  # the smallest bfloat16
INF, NAN = math.inf, math.nan


def nearest_code(value: float) -> int:
    """The byte of the nearest e4m3 number, of two the even one; magnitudes beyond 448 are 448."""
    if math.isnan(value):
        return 0x7F
    distances = np.abs(E4M3_NUMBERS - min(abs(value), 448.0))
    nearest = np.flatnonzero(distances == distances.min())
    code = int(nearest[0] if len(nearest) == 1 or nearest[0] % 2 == 0 else nearest[1])
    return code | (0x80 if math.copysign(1, value) < 0 else 0)


def by_rule(group, epsilon, pow2):
    """Codes and stored scale of one group, number by number."""
    amax = np.float32(max([abs(each) for each in group if not math.isnan(each)], default=0))
    amax = max(amax, np.float32(epsilon))
    with np.errstate(all="ignore"):
        multiplier = np.float32(1) if amax == 0 else np.float32(448) / amax
        if np.isinf(multiplier):
            multiplier = np.float32(float.fromhex("0x1.FEp127"))
        if pow2 and multiplier > 0:
            multiplier = np.float32(2.0 ** (math.frexp(float(multiplier))[1] - 1))
        codes = [nearest_code(float(np.float32(each) * multiplier)) for each in group]
        return codes, np.float32(1) / multiplier


@EXAMPLES
@given(
    st.lists(st.one_of(st.floats(width=32), st.floats(-8, 8, width=32)), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.0, 1e-4, 1e30]),
    st.booleans(),
)
def test_one_group(numbers, epsilon, pow2):
    with np.errstate(all="ignore"):
        x = np.array([numbers], np.float32).astype(ml_dtypes.bfloat16)
    codes, scales = oracle.fp8_quant_blockwise(x, epsilon, using_pow2_scale=pow2)
    due_codes, due_scale = by_rule(x[0].astype(np.float32).tolist(), epsilon, pow2)
    assert codes.view(np.uint8)[0].tolist() == due_codes
    assert scales.view(np.uint32)[0, 0] == due_scale.view(np.uint32)


@pytest.mark.parametrize(
    ("numbers", "pow2", "codes", "scale"),
    [
        ([0.0, -0.0, 0.0, 0.0], True, [0, 0x80, 0, 0], 1.0),
        ([NAN, NAN, -NAN, NAN], False, [0x7F] * 4, 1.0),
        ([INF, 1.0, -2.0, NAN], False, [0x7F, 0, 0x80, 0x7F], INF),
        ([INF, 1.0, -2.0, NAN], True, [0x7F, 0, 0x80, 0x7F], INF),
        ([448.0, -448.0, 1.0, NAN], False, [0x7E, 0xFE, 0x38, 0x7F], 1.0),
        ([450.0, 1.0, 0.0, 0.0], True, [0x76, 0x30, 0, 0], 2.0),
        ([TINY, 0.0, 0.0, 0.0], True, [0x08, 0, 0, 0], 2.0**-127),
        ([TINY, 0.0, 0.0, 0.0], False, [0x10, 0, 0, 0], 1 / float.fromhex("0x1.FEp127")),
    ],
    ids=["zeros", "NaN", "Inf", "Inf pow2", "448", "450 pow2", "least pow2", "least"],
)
def test_special_groups(numbers, pow2, codes, scale):
    with np.errstate(all="ignore"):
        x = np.array([numbers], np.float32).astype(ml_dtypes.bfloat16)
    got, scales = oracle.fp8_quant_blockwise(x, using_pow2_scale=pow2)
    assert got.view(np.uint8)[0].tolist() == codes
    assert scales[0, 0] == np.float32(scale)


def test_ue8m0_words_have_the_lowest_group_in_the_lowest_byte_and_zeros_after_the_last():
    x = np.zeros((2, 4 * 128 + 4), ml_dtypes.bfloat16)
    x[0, ::128] = [448, 896, 1792, 224, 1]
    scales = oracle.fp8_quant_blockwise(x, using_ue8m0_scale=True, output_scale_transpose=False)[1]
    assert scales.tolist() == [[127 + (128 << 8) + (129 << 16) + (126 << 24), 119], [0x7F7F7F7F, 127]]


def test_codes_of_a_transpose_are_those_of_the_transposed_matrix():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((256, 384)).astype(ml_dtypes.bfloat16)
    for method in ("1x128", "128x128"):
        codes, scales, codes_t, scales_t = oracle.fp8_quant_blockwise(x, input_transpose=True, quant_method=method)
        own_codes, own_scales = oracle.fp8_quant_blockwise(np.ascontiguousarray(x.T), quant_method=method)
        np.testing.assert_array_equal(codes_t.view(np.uint8), own_codes.view(np.uint8))
        np.testing.assert_array_equal(scales_t, own_scales)
        if method == "128x128":
            np.testing.assert_array_equal(codes_t.view(np.uint8), codes.T.view(np.uint8))
            np.testing.assert_array_equal(scales_t, scales.T)


def test_the_gemm_multiplies_dequantised_numbers():
    rng = np.random.default_rng(4)
    x, w = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((3, 256), (128, 256)))
    a, a_scale = oracle.fp8_quant_blockwise(x)
    b, b_scale = oracle.fp8_quant_blockwise(w, quant_method="128x128", output_scale_transpose=False)
    got, _ = oracle.fp8_gemm_blockwise(a, a_scale, b, b_scale, np.float32, is_b_1d_scaled=False)
    left = oracle.fused_act_dequant(a, a_scale.T).astype(np.float64)
    right = oracle.fused_act_dequant(b, np.repeat(b_scale, 128, axis=0)).astype(np.float64)
    np.testing.assert_allclose(got, left @ right.T, rtol=1e-6, atol=1e-6)
