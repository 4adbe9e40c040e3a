# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 quantisation by the names of paddle.incubate, bit for bit against the oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import paddle.incubate.nn.functional as F
import pytest
from paddle import _C_ops

from paddle_moe_ops import patched_paddle
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.compat import fp8
from paddle_moe_ops.reference import paddle_fp8 as oracle
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import every_kind, ordinary, tensor
from tests.pairwise import pairwise

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALF_DTYPES = (BFLOAT16, np.dtype(np.float16))
ROWS = {
    "one": (1, 4),
    "odd": (63, 132),
    "many": (1025, 512),
    "no rest": (128, 640),
    "no rows": (0, 512),
    "no columns": (4, 0),
}
TILED = {"one block": (128, 128), "blocks": (256, 640), "tall": (512, 128), "no rows": (0, 256)}


def assert_same(got, expected):
    got, expected = list(got), list(expected)
    for number, (made, due) in enumerate(zip(got, expected, strict=True)):
        assert_bits_equal(made, due, what=f"result {number}")
        assert made.stop_gradient
        assert made.is_contiguous()


def arrays(tensors):
    return [to_numpy(each) for each in tensors]


@pairwise(
    {
        "shape": ROWS,
        "kind": [ordinary, every_kind],
        "dtype": HALF_DTYPES,
        "scale_transpose": [True, False],
        "scales": ["float32", "pow2", "ue8m0"],
        "epsilon": [0.0, 1e-4, 3.0],
    }
)
def test_rows(shape, kind, dtype, scale_transpose, scales, epsilon, rng, place):
    x = kind(rng, shape, dtype)
    options = {
        "epsilon": epsilon,
        "output_scale_transpose": scale_transpose,
        "using_pow2_scale": scales == "pow2",
        "using_ue8m0_scale": scales == "ue8m0",
    }
    assert_same(fp8.fp8_quant_blockwise(tensor(x, place), **options), oracle.fp8_quant_blockwise(x, **options))


@pairwise(
    {
        "shape": TILED,
        "kind": [ordinary, every_kind],
        "dtype": HALF_DTYPES,
        "method": ["1x128", "128x128"],
        "scale_transpose": [True, False],
        "scales": ["float32", "pow2", "ue8m0"],
        "results": ["straight", "both", "transposed", "none"],
    }
)
def test_rows_columns_and_blocks(shape, kind, dtype, method, scale_transpose, scales, results, rng, place):
    x = kind(rng, shape, dtype)
    options = {
        "input_transpose": results in ("both", "transposed"),
        "output_scale_transpose": scale_transpose,
        "return_transpose_only": results in ("transposed", "none"),
        "using_pow2_scale": scales == "pow2",
        "using_ue8m0_scale": scales == "ue8m0",
        "quant_method": method,
    }
    got = fp8.fp8_quant_blockwise(tensor(x, place), **options)
    assert_same(got, oracle.fp8_quant_blockwise(x, **options))
    assert len(got) == (4 if results == "both" else 2)


@pytest.mark.parametrize(
    ("method", "scales", "shapes"),
    [
        ("1x128", "float32", [[640, 256], [5, 256], [256, 640], [2, 640]]),
        ("128x128", "float32", [[640, 256], [5, 2], [256, 640], [2, 5]]),
        ("1x128", "ue8m0", [[640, 256], [2, 256], [256, 640], [1, 640]]),
        ("128x128", "ue8m0", [[640, 256], [2, 256], [256, 640], [1, 640]]),
    ],
)
def test_shapes_that_paddle_documents(method, scales, shapes, place):
    """Shapes of codes and scales of the transpose [640, 256], then of the matrix [256, 640]."""
    x = tensor(np.zeros((256, 640), BFLOAT16), place)
    options = {"quant_method": method, "using_ue8m0_scale": scales == "ue8m0", "input_transpose": True}
    codes, scale, codes_t, scale_t = fp8.fp8_quant_blockwise(x, **options)
    codes_t_shape, scale_shape, codes_shape, scale_t_shape = shapes
    assert (codes.shape, codes_t.shape) == (codes_shape, codes_t_shape)
    assert (scale.shape, scale_t.shape) == (scale_shape, scale_t_shape)
    options["output_scale_transpose"] = False
    _, scale, _, scale_t = fp8.fp8_quant_blockwise(x, **options)
    assert (scale.shape, scale_t.shape) == (scale_shape[::-1], scale_t_shape[::-1])


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_every_number_as_the_largest_and_as_any_of_its_group(dtype, pow2, rng, place):
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(all="ignore"):
        alone = np.stack([numbers, -numbers, (numbers.astype(np.float32) / 3).astype(dtype), 0 * numbers], axis=1)
    for x in (alone, numbers.reshape(-1, 128), rng.permutation(numbers).reshape(-1, 128)):
        assert_same(
            fp8.fp8_quant_blockwise(tensor(x, place), using_pow2_scale=pow2),
            oracle.fp8_quant_blockwise(x, using_pow2_scale=pow2),
        )


def test_gradients_end_here(rng, place):
    x = tensor(ordinary(rng, (128, 128), BFLOAT16), place, gradient=True)
    codes, scales = fp8.fused_transpose_split_quant(x, None, [128])
    found = [*fp8.fp8_quant_blockwise(x), *fp8.fused_stack_transpose_quant([x, x]), *codes, *scales]
    assert all(each.stop_gradient for each in found)
    assert not x.stop_gradient


def test_strided_rows_keep_their_memory(rng, place):
    whole = tensor(ordinary(rng, (64, 512), BFLOAT16), place)
    view, before = whole[::2, 128:384], whole.clone()
    strides = view.strides
    assert_same(fp8.fp8_quant_blockwise(view), fp8.fp8_quant_blockwise(view.clone()))
    assert view.strides == strides
    assert_bits_equal(whole, before)


@pytest.mark.parametrize("kind", [ordinary, every_kind])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384)], ids=str)
@pytest.mark.parametrize("number", [1, 3])
def test_stacked_matrices(number, shape, transpose, kind, rng, place):
    matrices = [kind(rng, shape, BFLOAT16) for _ in range(number)]
    tensors = [tensor(each, place) for each in matrices]
    got = fp8.fused_stack_transpose_quant(tensors, transpose)
    assert_same(got, oracle.fused_stack_transpose_quant(matrices, transpose))
    if not transpose:
        assert_same(fp8.fused_stack_quant(tuple(tensors)), oracle.fused_stack_transpose_quant(matrices, False))
    if number == 1:
        method = {"quant_method": "128x128", "using_pow2_scale": False, "output_scale_transpose": False}
        matrix = tensors[0].T if transpose else tensors[0]
        assert_same(got, arrays(fp8.fp8_quant_blockwise(matrix, **method)))


def tensors_of(counts):
    return [paddle.to_tensor(count) for count in counts]


COUNTS = {"even": [128, 128, 256], "empty experts": [0, 512, 0, 0], "one": [512]}


@pairwise(
    {
        "counts": COUNTS,
        "hidden": [1, 63, 128, 300],
        "rows": ["bfloat16", "float8"],
        "kind": [ordinary, every_kind],
        "pow2": [False, True],
        "as_what": [list, tuple, np.array, paddle.to_tensor, tensors_of],
    }
)
def test_transposed_rows_of_experts(counts, hidden, rows, kind, pow2, as_what, rng, place):
    x, scales = kind(rng, (512, hidden), BFLOAT16), None
    if rows == "float8":
        filled = np.zeros((512, -(-hidden // 4) * 4), BFLOAT16)
        filled[:, :hidden] = x
        x, scales = oracle.fp8_quant_blockwise(filled, output_scale_transpose=False, using_pow2_scale=pow2)
        x = np.ascontiguousarray(x[:, :hidden])
    expected = oracle.fused_transpose_split_quant(x, scales, counts, pow2)
    column_major = None if scales is None else tensor(np.ascontiguousarray(scales.T), place).T
    got = fp8.fused_transpose_split_quant(tensor(x, place), column_major, as_what(counts), pow2)
    assert [each.shape for each in got[0]] == [[hidden, count] for count in counts]
    assert_same(got[0] + got[1], expected[0] + expected[1])


def test_rows_without_elements_give_empty_lists(place):
    for shape, counts in (((0, 128), [0, 0]), ((128, 0), [128])):
        assert fp8.fused_transpose_split_quant(tensor(np.zeros(shape, BFLOAT16), place), None, counts) == ([], [])


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize(
    ("shape", "counts"),
    [((2, 2, 64, 36), [128, 128]), ((3, 2, 128, 5), [384, 384]), ((4, 1, 32, 200), [0, 128]), ((2, 2, 0, 8), [0, 0])],
    ids=str,
)
def test_rows_after_a_dispatch_by_capacity(shape, counts, pow2, rng, place):
    x = ordinary(rng, shape, BFLOAT16)
    got = fp8.fused_transpose_wlch_split_quant(tensor(x, place), counts, pow_2_scales=pow2)
    expected = oracle.fused_transpose_wlch_split_quant(x, counts, pow2)
    assert_same(got[0] + got[1], expected[0] + expected[1])


def test_the_order_of_arguments_of_older_paddle(rng, place):
    x = ordinary(rng, (256, 40), BFLOAT16)
    expected = oracle.fused_transpose_split_quant(x, None, [128, 128], True)
    for counts in ([128, 128], (128, 128), np.array([128, 128])):
        with patched_paddle(("fp8",)):
            got = F.fused_transpose_split_quant(tensor(x, place), counts, True)
        assert_same(got[0] + got[1], expected[0] + expected[1])


def test_paddles_operators_and_their_codes_in_e5m2(rng, place):
    x = every_kind(rng, (128, 256), BFLOAT16)
    with patched_paddle(("fp8",)):
        got = _C_ops.fp8_quant_blockwise(tensor(x, place), 0.0, True, True, False, False, True, False, False)
        options = {"input_transpose": True, "output_scale_transpose": False, "using_pow2_scale": False}
        assert_same(got, oracle.fp8_quant_blockwise(x, **options, dtype=ml_dtypes.float8_e5m2))
        assert got[0].dtype == paddle.float8_e5m2
        got = _C_ops.fp8_quant_blockwise(tensor(x, place), 0.0, True, False, True, False, False, True, False)
        assert [each.shape for each in got] == [[128, 256], [2, 128], [0], [0]]
        pair = _C_ops.fused_stack_transpose_quant([tensor(x, place)])
        assert_same(pair, oracle.fused_stack_transpose_quant([x]))
        assert_same(_C_ops.fused_stack_quant([tensor(x, place)]), oracle.fused_stack_transpose_quant([x], False))
