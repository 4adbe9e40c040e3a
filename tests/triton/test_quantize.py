# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 rows by Triton kernels: the oracle's codes and scales, alone and through a plan, and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import reference
from paddle_moe_ops.triton.ops.quantize import dequantize, quantize
from tests.params import FLOAT8_DTYPES, SMALL, SUM_DTYPES, WIDE
from tests.reference.cases import assert_same_bits, assert_same_numbers, routing_cases

from .problems import ROW_SHAPES, every_kind, fitting, make_problem

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

by_layout = pytest.mark.parametrize("layout", ["row", "col"])
by_format = pytest.mark.parametrize("ue8m0", [False, True], ids=["float32", "ue8m0"])
by_dtype = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)


def check(gpu, x, source=None, *, ue8m0=False, layout="row", amax_min=1e-4):
    """Codes and scales of rows against the oracle's; ``source`` is where they lie."""
    found = quantize(
        gpu, gpu.array(x) if source is None else source, ue8m0=ue8m0, scale_layout=layout, amax_min=amax_min
    )
    expected = reference.quantize_1x128(x, ue8m0=ue8m0, scale_layout=layout, amax_min=amax_min)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same_bits(gpu.numpy(actual), wanted)


def permuted(gpu, x, plan, *, ue8m0=False, layout="row", amax_min=1e-4, fill="all"):
    maps = gpu.array(plan.token_rows), gpu.array(plan.row_to_token)
    options = {"ue8m0": ue8m0, "scale_layout": layout, "amax_min": amax_min}
    found = quantize(gpu, gpu.array(x), *maps, **options, fill_padding=fill)
    return [gpu.numpy(each) for each in found], reference.permute_quantized(x, plan, **options)


def check_permuted(gpu, x, plan, **options):
    for actual, wanted in zip(*permuted(gpu, x, plan, **options), strict=True):
        assert_same_bits(actual, wanted)


@by_layout
@by_format
@by_dtype
@pytest.mark.parametrize("hidden", [1, 72, 200, 640])
def test_rows_equal_the_oracle(gpu, rng, hidden, dtype, ue8m0, layout):
    check(gpu, every_kind(rng, (5, hidden), dtype), ue8m0=ue8m0, layout=layout)


@by_format
def test_long_rows(gpu, rng, ue8m0):
    for dtype in (BFLOAT16, FLOAT32):
        check(gpu, every_kind(rng, (2, 7168), dtype), ue8m0=ue8m0)


def test_every_rounding_of_codes(gpu):
    """A scale of 1, and numbers at, beside and between all codes, ties among them."""
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (codes[1:] + codes[:-1]) / 2
    middle = np.concatenate([codes, ties])
    around = np.concatenate([middle, np.nextafter(middle, FLOAT32.type(0)), np.nextafter(middle, FLOAT32.type(1e9))])
    both = np.concatenate([around, -around])
    rows = np.full((-(-len(both) // 127), 128), 448, np.float32)
    rows[:, 1:].flat[: len(both)] = np.clip(both, -448, 448)
    check(gpu, rows.reshape(1, -1))


@by_format
@pytest.mark.parametrize("hidden", [1, 7, 130, 200])
def test_the_largest_of_a_short_group_is_its_own(gpu, rng, hidden, ue8m0):
    check(gpu, (rng.standard_normal((3, hidden)) * 2.0**-8).astype(np.float32), ue8m0=ue8m0)


def test_groups_of_one_kind(gpu):
    """Zeros, NaN alone, infinities, the smallest and the largest numbers."""
    info = np.finfo(np.float32)
    kinds = [0.0, -0.0, np.nan, np.inf, -np.inf, info.smallest_subnormal, info.tiny, info.max, -info.max]
    x = np.repeat(np.array(kinds, np.float32), 128)
    x[2 * 128 + 3] = 1.5
    for ue8m0 in (False, True):
        for amax_min in (2.0**-100, 1e-4, 1.0, float(info.max)):
            check(gpu, x.reshape(1, -1), ue8m0=ue8m0, amax_min=amax_min)


@by_format
def test_scales_at_powers_of_two_and_beside_them(gpu, ue8m0):
    scales = np.ldexp(np.float32(1), np.arange(-108, 119)).astype(np.float32)
    middle = scales * np.float32(448)
    largest = np.concatenate([middle, *(np.nextafter(middle, np.float32(limit)) for limit in (0, np.inf))])
    x = np.full((1, len(largest) * 128), 1e-30, np.float32)
    x[0, ::128] = largest
    check(gpu, x, ue8m0=ue8m0, amax_min=2.0**-100)


@pytest.mark.parametrize("strided", [0, 1, 8, 16])
@pytest.mark.parametrize("offset", [0, 2, 8])
def test_rows_may_lie_apart_and_begin_anywhere(gpu, rng, strided, offset):
    wide = every_kind(rng, (5, 160 + strided), BFLOAT16)
    check(gpu, np.ascontiguousarray(wide[:, :160]), gpu.columns(gpu.array(wide, offset=offset), 160))


@pytest.mark.parametrize("strided", [1, 8])
def test_permuted_rows_may_lie_apart(gpu, rng, strided):
    problem = make_problem(rng, fitting(gpu, SMALL))
    plan, wide = problem.plan, every_kind(rng, (problem.shape.T, 160 + strided), BFLOAT16)
    maps = gpu.array(plan.token_rows), gpu.array(plan.row_to_token)
    options = {"ue8m0": False, "scale_layout": "row", "amax_min": 1e-4}
    found = quantize(gpu, gpu.columns(gpu.array(wide), 160), *maps, **options)
    expected = reference.permute_quantized(np.ascontiguousarray(wide[:, :160]), plan, **options)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same_bits(gpu.numpy(actual), wanted)


@by_layout
@by_format
@pytest.mark.parametrize("shape", [*ROW_SHAPES, WIDE._replace(A=2)], ids=str)
def test_permuted_rows_of_named_shapes(gpu, rng, shape, ue8m0, layout):
    shape = fitting(gpu, shape)
    problem = make_problem(rng, shape)
    check_permuted(gpu, every_kind(rng, (shape.T, shape.H), BFLOAT16), problem.plan, ue8m0=ue8m0, layout=layout)


@given(
    case=routing_cases(),
    dtype=st.sampled_from(SUM_DTYPES),
    hidden=st.sampled_from([1, 72, 200, 528]),
    options=st.fixed_dictionaries(
        {
            "ue8m0": st.booleans(),
            "layout": st.sampled_from(["row", "col"]),
            "amax_min": st.sampled_from([2.0**-100, 1e-4, 1.0]),
        }
    ),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_permuted_rows_of_any_routing(gpu, case, dtype, hidden, options, seed):
    x = every_kind(np.random.default_rng(seed), (case.plan.num_tokens, hidden), dtype)
    check_permuted(gpu, x, case.plan, **options)


@by_layout
@pytest.mark.parametrize("fill", ["all", "meta", "none"])
def test_only_the_padding_that_is_asked_for_is_written(gpu, rng, fill, layout):
    """Elements that are not written contain the poison of new memory."""
    plan = make_problem(rng, SMALL._replace(A=64), buffer_size=325).plan
    x = every_kind(rng, (SMALL.T, 130), np.float16)
    (codes, scales), (expected_codes, expected_scales) = permuted(gpu, x, plan, layout=layout, fill=fill)
    if layout == "col":
        assert scales.shape == (2, 328)
        scales, expected_scales = scales.T, expected_scales.T
    real = np.flatnonzero(plan.row_to_token >= 0)
    padding = np.setdiff1d(np.arange(len(scales)), real)
    assert_same_bits(codes[real], expected_codes[real])
    assert_same_bits(scales[real], expected_scales[real])
    for array, filled in ((codes, fill == "all"), (scales, fill != "none")):
        rest = np.ascontiguousarray(array[padding[padding < len(array)]]).view(np.uint8)
        assert (rest == (0 if filled else 0xA5)).all()


def test_a_map_that_leads_out_of_the_buffer_writes_nothing_there(gpu, rng):
    x = every_kind(rng, (3, 16), np.float32)
    slots = np.array([[5, -7], [2**31 - 1, 1], [0, 2]], np.int32)
    maps = gpu.array(slots), gpu.array(np.array([2, 1, 2], np.int32))
    codes, scales = quantize(gpu, gpu.array(x), *maps, ue8m0=False, scale_layout="row", amax_min=1.0)
    expected_codes, expected_scales = reference.quantize_1x128(x[[2, 1, 2]], amax_min=1.0)
    assert_same_bits(gpu.numpy(codes), expected_codes)
    assert_same_bits(gpu.numpy(scales), expected_scales)


@by_layout
@by_format
@by_dtype
@pytest.mark.parametrize("hidden", [1, 200, 640])
def test_dequantised_rows_equal_the_oracle(gpu, rng, hidden, dtype, ue8m0, layout):
    """All codes by scales of every size, so that products overflow and underflow in every dtype."""
    codes = rng.integers(0, 256, (5, hidden)).astype(np.uint8).view(FLOAT8_DTYPES[0])
    _, scales = reference.quantize_1x128(every_kind(rng, (5, hidden), np.float32), ue8m0=ue8m0, scale_layout=layout)
    found = dequantize(gpu, gpu.array(codes), gpu.array(scales), layout, str(dtype))
    expected = reference.dequantize_1x128(codes, scales, scale_layout=layout, dtype=dtype)
    assert_same_numbers(gpu.numpy(found), expected)


@pytest.mark.parametrize("columns", [300, 257, 272])
def test_strided_codes(gpu, rng, columns):
    codes = rng.integers(0, 256, (4, columns)).astype(np.uint8).view(FLOAT8_DTYPES[0])
    scales = rng.random((4, 2), np.float32)
    expected = reference.dequantize_1x128(np.ascontiguousarray(codes[:, :256]), scales, dtype=np.float32)
    found = dequantize(gpu, gpu.columns(gpu.array(codes), 256), gpu.array(scales), "row", "float32")
    assert_same_numbers(gpu.numpy(found), expected)


def test_no_codes_at_all(gpu):
    codes, scales = np.zeros((0, 300), FLOAT8_DTYPES[0]), np.zeros((0, 3), np.float32)
    assert gpu.numpy(dequantize(gpu, gpu.array(codes), gpu.array(scales), "row", "float32")).shape == (0, 300)


@pytest.mark.parametrize("dtype", SUM_DTYPES[1:], ids=str)
def test_values_halfway_between_two_numbers_get_the_even_one(gpu, dtype):
    """1 and 3 times scales with one bit more than the dtype has."""
    step = float(ml_dtypes.finfo(dtype).eps)
    codes = np.array([[1, -1], [3, -3]], np.float32).astype(FLOAT8_DTYPES[0])
    scales = np.array([[1 + step / 2], [1 + step / 2]], np.float32)
    found = gpu.numpy(dequantize(gpu, gpu.array(codes), gpu.array(scales), "row", str(dtype)))
    # 3 + 1.5 steps of 1 are 0.75 steps of 2 beyond 3.
    expected = np.array([[1, -1], [3 + 2 * step, -3 - 2 * step]]).astype(dtype)
    assert_same_bits(found, expected)
    scales += np.float32(step)
    found = gpu.numpy(dequantize(gpu, gpu.array(codes), gpu.array(scales), "row", str(dtype)))
    assert_same_bits(found[0], np.array([1 + 2 * step, -1 - 2 * step]).astype(dtype))


def test_codes_come_back_from_their_own_values(gpu, rng):
    x = every_kind(rng, (SMALL.T, 256), np.float32)
    codes, scales = quantize(gpu, gpu.array(x), ue8m0=True, scale_layout="col", amax_min=2.0**-100)
    values = gpu.numpy(dequantize(gpu, codes, scales, "col", "float32"))
    again, _ = reference.quantize_1x128(values, ue8m0=True, amax_min=2.0**-100)
    kept = np.isfinite(values)
    np.testing.assert_array_equal(again[kept].astype(np.float32), gpu.numpy(codes)[kept].astype(np.float32))
