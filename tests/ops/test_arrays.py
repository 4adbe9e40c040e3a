# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors to arrays and back, on which every comparison of these tests rests."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops.backends.arrays import to_numpy, to_tensor
from tests.ops.problems import every_kind
from tests.params import ROW_DTYPES

DTYPES = {
    np.dtype(np.float32): paddle.float32,
    np.dtype(np.float16): paddle.float16,
    np.dtype(ml_dtypes.bfloat16): paddle.bfloat16,
    np.dtype(ml_dtypes.float8_e4m3fn): paddle.float8_e4m3fn,
    np.dtype(ml_dtypes.float8_e5m2): paddle.float8_e5m2,
}


def bits(array):
    return array.reshape(-1).view(f"u{array.dtype.itemsize}").tolist()


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (5, 7)], ids=str)
def test_a_round_trip_keeps_dtype_shape_and_bits(shape, dtype, rng, place):
    array = every_kind(rng, (35,), dtype)[: int(np.prod(shape))].reshape(shape)
    made = to_tensor(array, place)
    assert made.dtype == DTYPES[dtype]
    assert tuple(made.shape) == shape
    assert made.place == place
    back = to_numpy(made)
    assert (back.dtype, back.shape, bits(back)) == (array.dtype, array.shape, bits(array))


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_arrays_and_tensors_that_are_not_contiguous_are_read_right(dtype, rng, place):
    array = every_kind(rng, (6, 8), dtype)
    expected = np.ascontiguousarray(array.T[1:, ::2])
    assert bits(to_numpy(to_tensor(array.T[1:, ::2], place))) == bits(expected)
    assert bits(np.ascontiguousarray(to_numpy(to_tensor(array, place).t()[1:, ::2]))) == bits(expected)


def test_a_tensor_is_independent_of_its_array(place):
    array = np.zeros(3, np.float32)
    made = to_tensor(array, place)
    array[:] = 1
    assert made.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.bool_])
def test_integers_and_masks_keep_their_dtype(dtype, place):
    array = np.array([[0, 1], [1, 0]], dtype)
    back = to_numpy(to_tensor(array, place))
    assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())
