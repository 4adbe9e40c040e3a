# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 SwiGLU, dequantisation and GEMM by the names of paddle.incubate, against the oracle."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import paddle
import paddle.incubate.nn.functional as F
import pytest
from paddle import _C_ops

from paddle_moe_ops import patched_paddle
from paddle_moe_ops.backends import compiled, direct
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.compat import fp8
from paddle_moe_ops.reference import paddle_fp8 as oracle
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import Tolerance, assert_close_float8, assert_close_sums, dtype_tols
from tests.ops.paddle_table import recorded
from tests.ops.problems import every_kind, ordinary, tensor
from tests.pairwise import pairwise

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SHAPES = {"one": (1,), "odd": (63,), "many": (1025,), "rank 3": (3, 5), "none": (0,)}
# The exponential, and the products of a SwiGLU after it.
ROUNDINGS_OF_SWIGLU = 24


def bytes_of(codes):
    return to_numpy(codes).view(np.uint8)


@pytest.mark.parametrize("kind", [ordinary, every_kind])
@pytest.mark.parametrize("shape", [(1, 1), (63, 5), (256, 128), (130, 300), (7, 1025), (0, 128), (4, 0)], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
def test_dequantised_rows(is_packed, shape, kind, rng, place):
    rows, columns = shape
    codes = rng.integers(0, 256, shape).astype(np.uint8).view(E4M3)
    scales = np.abs(kind(rng, (rows, -(-columns // 128))))
    if is_packed:
        scales = rng.integers(-(2**31), 2**31, (rows, -(-columns // 512))).astype(np.int32)
    got = fp8.fused_act_dequant(tensor(codes, place), tensor(scales, place))
    assert_bits_equal(got, oracle.fused_act_dequant(codes, scales), any_nan=True)


def test_packed_scales_of_0_and_infinity(place):
    codes = tensor(np.ones((1, 256), E4M3), place)
    words = tensor(np.array([[255 << 8]], np.int32), place)
    assert to_numpy(fp8.fused_act_dequant(codes, words)).astype(np.float32)[0, ::128].tolist() == [0, np.inf]


def test_rows_that_were_quantised_come_back(rng, place):
    x = ordinary(rng, (37, 640), BFLOAT16)
    for options in ({}, {"using_ue8m0_scale": True}, {"using_pow2_scale": False}):
        codes, scales = fp8.fp8_quant_blockwise(tensor(x, place), **options)
        back = to_numpy(fp8.fused_act_dequant(codes, scales.T)).astype(np.float32)
        np.testing.assert_allclose(back, x.astype(np.float32), rtol=2**-4, atol=2e-2)


@pairwise({"leading": SHAPES, "inner": [1, 130, 256], "probs": ["with 1", "without"], "is_patched": [False, True]})
def test_gradients_of_swiglu(leading, inner, probs, is_patched, rng, place):
    o1 = (4 * ordinary(rng, (*leading, 2 * inner), np.float32)).astype(BFLOAT16)
    do2_s = ordinary(rng, (*leading, inner), BFLOAT16)
    p = rng.random((*leading, 1) if probs == "with 1" else leading).astype(np.float32)
    arguments = [tensor(each, place) for each in (o1, do2_s, p)]
    with patched_paddle(("fp8",) if is_patched else ()):
        got = (F if is_patched else fp8).fused_swiglu_weighted_bwd(*arguments)
    due = oracle.fused_swiglu_weighted_bwd(o1, do2_s, p)
    terms = np.abs(do2_s.astype(np.float64)) * np.abs(unweighted(o1))
    magnitudes = [
        np.abs(due.do1.astype(np.float64)) + gradient_terms(o1, do2_s, p),
        terms.sum(axis=-1).reshape(p.shape),
        np.abs(due.o2_s.astype(np.float64)),
    ]
    for name, made, expected, magnitude in zip(due._fields, got, due, magnitudes, strict=True):
        chain = ROUNDINGS_OF_SWIGLU + inner
        assert_close_sums(made, expected, magnitude, dtype_tols(expected.dtype, chain), what=name)
        assert made.stop_gradient


def unweighted(o1):
    gate, up = np.split(o1.astype(np.float64), 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def gradient_terms(o1, do2_s, p):
    """A bound of what is added up in the gradient of the gate, and 0 for the other half."""
    gate, up = np.split(np.abs(o1.astype(np.float64)), 2, axis=-1)
    weighted = np.abs(do2_s.astype(np.float64)) * p.reshape(*o1.shape[:-1], 1)
    return np.concatenate([weighted * up * (1 + gate), 0 * gate], axis=-1)


@pairwise(
    {
        "leading": SHAPES,
        "inner": [1, 128, 200, 384],
        "probs": [None, "rank 1", "rank 2"],
        "pow2": [False, True],
        "is_patched": [False, True],
    }
)
def test_quantised_swiglu(leading, inner, probs, pow2, is_patched, rng, place):
    x = (4 * ordinary(rng, (*leading, 2 * inner), np.float32)).astype(BFLOAT16)
    rows = int(np.prod(leading))
    prob = None if probs is None else rng.random((rows, 1) if probs == "rank 2" else rows).astype(np.float32)
    given = None if prob is None else tensor(prob, place)
    with patched_paddle(("fp8",) if is_patched else ()):
        codes, scales = (F if is_patched else fp8).fused_weighted_swiglu_act_quant(tensor(x, place), given, pow2)
    due_codes, due_scales = oracle.fused_weighted_swiglu_act_quant(x, prob, pow2)
    assert codes.shape == [rows, inner]
    tolerance = Tolerance(0 if pow2 else 2.0**-18, 0, 0)
    assert_close_sums(scales, due_scales, np.zeros_like(due_scales), tolerance._replace(absolute=1e-45), what="scales")
    steps = np.abs(bytes_of(codes).astype(np.int16) - due_codes.view(np.uint8).astype(np.int16))
    assert steps.max(initial=0) <= 1
    assert np.count_nonzero(steps) <= 1e-3 * steps.size + 1


def test_quantised_swiglu_of_special_numbers(place):
    """A group of zeros, one with NaN, and one whose multiplier overflows."""
    x = np.zeros((4, 256), BFLOAT16)
    x[1, 3], x[1, 128:] = np.nan, 1
    x[2, :128], x[2, 128:] = 1, 2.0**-130
    x[3, :128], x[3, 128:] = 1e30, 1e30
    codes, scales = fp8.fused_weighted_swiglu_act_quant(tensor(x, place))
    due_codes, due_scales = oracle.fused_weighted_swiglu_act_quant(x)
    assert_bits_equal(codes, due_codes)
    assert_bits_equal(scales, due_scales)
    assert due_scales[0, 0] == 1
    assert due_scales[2, 0] == 1 / np.finfo(np.float32).max
    assert np.isinf(due_scales[3, 0])


def quantised(rng, rows, depth, is_1d):
    """Codes [rows, depth] and scales of a random matrix; of 1d as columns, of 2d by blocks, ragged at the ends."""
    high = rows if is_1d else -(-rows // 128) * 128
    x = np.zeros((high, -(-depth // 128) * 128), BFLOAT16)
    x[:rows, :depth] = ordinary(rng, (rows, depth), np.float32) * np.exp(3 * rng.standard_normal((rows, 1)))
    options = {"quant_method": "1x128" if is_1d else "128x128", "output_scale_transpose": is_1d}
    codes, scales = oracle.fp8_quant_blockwise(x, using_pow2_scale=False, **options)
    return np.ascontiguousarray(codes[:rows, :depth]), scales


def check_gemm(a, b, out, out_dtype, accumulate, dims, place, call=fp8.fp8_gemm_blockwise, **more):
    (is_a_1d, is_b_1d) = dims
    added = out if accumulate else None
    due, magnitude = oracle.fp8_gemm_blockwise(*a, *b, out_dtype, added, is_a_1d, is_b_1d)
    destination = None if out is None else tensor(out, place)
    got = call(
        *(tensor(each, place) for each in (*a, *b)),
        str(np.dtype(out_dtype)),
        out=destination,
        accumulate=accumulate,
        is_a_1d_scaled=is_a_1d,
        is_b_1d_scaled=is_b_1d,
        **more,
    )
    is_of_layers = dims == (True, False) and out_dtype == BFLOAT16 and not accumulate and runs_kernel(place)
    if is_of_layers:  # tensor cores add up products of a group in fewer bits
        assert_close_float8(to_numpy(got), due, "the product")
    else:
        assert_close_sums(got, due, magnitude, dtype_tols(out_dtype, a[0].shape[1] + 8), what="the product")
    if destination is not None:
        assert got is destination


@pairwise(
    {
        "rows": [1, 63, 128, 300],
        "columns": [1, 128, 130],
        "depth": [128, 200, 640],
        "dims": [(True, True), (True, False), (False, True)],
        "out_dtype": [np.float32, ml_dtypes.bfloat16],
        "mode": ["new", "out", "accumulate"],
        "is_patched": [False, True],
    }
)
def test_gemm(rows, columns, depth, dims, out_dtype, mode, is_patched, rng, place):
    a, b = quantised(rng, rows, depth, dims[0]), quantised(rng, columns, depth, dims[1])
    out = None if mode == "new" else ordinary(rng, (rows, columns), np.float32).astype(out_dtype)
    with patched_paddle(("fp8",) if is_patched else ()):
        call = F.fp8_gemm_blockwise if is_patched else fp8.fp8_gemm_blockwise
        check_gemm(a, b, out, out_dtype, mode == "accumulate", dims, place, call)


@pytest.mark.compiled_only
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 16, 128), (63, 128, 640), (300, 272, 208), (9, 1040, 512)])
def test_gemm_of_rows_by_groups_and_a_matrix_by_blocks_has_a_kernel_on_gpus(rows, columns, depth, rng, place):
    """Its results are those of the oracle, and a row has the same bits alone."""
    a, b = quantised(rng, rows, depth, True), quantised(rng, columns, depth, False)
    with recorded() as names:
        check_gemm(a, b, None, ml_dtypes.bfloat16, False, (True, False), place)
        check_gemm(a, b, np.ones((rows, columns), ml_dtypes.bfloat16), ml_dtypes.bfloat16, False, (True, False), place)
    assert names == (set() if place.is_cpu_place() else {"paddle_float8_gemm"})
    if not runs_kernel(place):
        return
    together, alone = (
        fp8.fp8_gemm_blockwise(*(tensor(each, place) for each in (codes, scales, *b)), "bfloat16", is_b_1d_scaled=False)
        for codes, scales in (a, (a[0][-1:], np.ascontiguousarray(a[1][:, -1:])))
    )
    assert_bits_equal(together[-1:], alone)


def runs_kernel(place):
    """True on a GPU with the float8 kernel."""
    if place.is_cpu_place():
        return False
    codes, scales = tensor(np.ones((16, 16), E4M3), place), tensor(np.ones((16, 1), np.float32), place)
    blocks, sizes = tensor(np.ones((1, 1), np.float32), place), tensor(np.array([16], np.int32), place)
    runs = bool(direct("paddle_float8_gemm", codes, scales, codes, blocks, sizes))
    assert runs == (ctypes.CDLL(str(compiled.LIBRARY)).pmo_grouped_capability_cuda() == 90)
    return runs


@pytest.mark.parametrize(("columns", "depth"), [(24, 128), (128, 200)])
def test_gemm_of_sizes_that_no_kernel_has(columns, depth, rng, place):
    a, b = quantised(rng, 5, depth, True), quantised(rng, columns, depth, False)
    check_gemm(a, b, None, ml_dtypes.bfloat16, False, (True, False), place)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 128, 128), (128, 0, 128), (3, 5, 0), (0, 0, 0)])
def test_gemm_without_elements(rows, columns, depth, place):
    a, b = ((np.zeros((size, depth), E4M3), np.ones((-(-depth // 128), size), np.float32)) for size in (rows, columns))
    out = np.ones((rows, columns), np.float32)
    check_gemm(a, b, out, np.float32, True, (True, True), place)
    check_gemm(a, b, out, np.float32, False, (True, True), place)
    blocks = np.ones((-(-columns // 128), -(-depth // 128)), np.float32)
    check_gemm(a, (b[0], blocks), out, np.float32, True, (True, False), place)


def test_scales_of_blocks_may_be_transposed_where_the_sizes_differ(rng, place):
    a, (b, scales) = quantised(rng, 5, 384, True), quantised(rng, 256, 384, False)
    given = [tensor(each, place) for each in (*a, b)]
    results = [
        fp8.fp8_gemm_blockwise(*given, tensor(np.ascontiguousarray(each), place), paddle.float32, is_b_1d_scaled=False)
        for each in (scales, scales.T)
    ]
    assert_bits_equal(*results)


def test_scales_of_square_blocks_are_by_row(rng, place):
    a, (b, scales) = quantised(rng, 5, 256, True), quantised(rng, 256, 256, False)
    assert scales[0, 1] != scales[1, 0]
    check_gemm(a, (b, scales), None, np.float32, False, (True, False), place)


@pytest.mark.cpu_only  # on the rig's device, Paddle's kernels write to other memory than that of a view
def test_gemm_writes_into_a_parameters_gradient_and_into_a_part_of_a_buffer(rng, place):
    a, b = quantised(rng, 4, 128, True), quantised(rng, 6, 128, True)
    given = [tensor(each, place) for each in (*a, *b)]
    due = fp8.fp8_gemm_blockwise(*given, "float32")
    buffer = tensor(np.ones((3, 4, 6), np.float32), place)
    part = buffer[1]
    assert fp8.fp8_gemm_blockwise(*given, "float32", part, accumulate=True) is part
    assert_bits_equal(buffer[1], due + 1.0)
    assert buffer[0].numpy().min() == buffer[2].numpy().max() == 1
    parameter = tensor(np.ones((4, 6), np.float32), place, gradient=True)
    fp8.fp8_gemm_blockwise(*given, "float32", parameter)
    assert not parameter.stop_gradient
    assert_bits_equal(parameter, due)


def test_gemm_of_codes_in_e5m2(rng, place):
    a, b = quantised(rng, 4, 256, True), quantised(rng, 6, 256, True)
    wide = a[0].astype(np.float32).astype(ml_dtypes.float8_e5m2)
    check_gemm((wide, a[1]), b, None, np.float32, False, (True, True), place)


def test_paddles_operator_has_its_operands_exchanged(rng, place):
    a, b = quantised(rng, 5, 256, True), quantised(rng, 128, 256, False)
    given = [tensor(each, place) for each in (*a, *b)]
    due = fp8.fp8_gemm_blockwise(*given, "float32", is_b_1d_scaled=False)
    out, nothing, workspace = (
        tensor(np.ones((5, 128), np.float32), place),
        paddle.zeros([0]),
        paddle.zeros([4], "uint8"),
    )
    with patched_paddle(("fp8",)):
        results = _C_ops.fp8_gemm_blockwise_(
            *given[2:], *given[:2], out, nothing, nothing, workspace, True, False, False, True, True, 112, False, True
        )
    assert [each is same for each, same in zip(results, (out, nothing, workspace), strict=True)] == [True] * 3
    assert_bits_equal(out, due + 1.0)
