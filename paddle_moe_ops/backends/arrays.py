# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Paddle tensors to NumPy arrays and back, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

# Paddle converts these to and from NumPy as integers of the same width.
_NARROW = {
    paddle.bfloat16: (np.uint16, ml_dtypes.bfloat16),
    paddle.float8_e4m3fn: (np.int8, ml_dtypes.float8_e4m3fn),
    paddle.float8_e5m2: (np.int8, ml_dtypes.float8_e5m2),
}
_FLOAT8 = {
    np.dtype(ml_dtypes.float8_e4m3fn): paddle.float8_e4m3fn,
    np.dtype(ml_dtypes.float8_e5m2): paddle.float8_e5m2,
}


def numpy_dtype(dtype: Any) -> np.dtype:
    """The NumPy (or ml_dtypes) dtype of a Paddle dtype."""
    if dtype in _NARROW:
        return np.dtype(_NARROW[dtype][1])
    return np.dtype(dtype.name.lower())


def to_numpy(tensor: Tensor) -> NDArray:
    """The values as an array, in ml_dtypes types where NumPy has none. Synchronises with the device."""
    array = tensor.numpy()
    if tensor.dtype in _NARROW:
        carrier, dtype = _NARROW[tensor.dtype]
        array = array.view(carrier).view(dtype)
    return array


def to_tensor(array: NDArray, place: object = None) -> Tensor:
    """The array as a tensor with the same bits."""
    array = np.require(array, requirements="C")
    if array.dtype == ml_dtypes.bfloat16:
        return paddle.to_tensor(array.view(np.uint16), place=place)
    if array.dtype in _FLOAT8:
        return paddle.to_tensor(array.view(np.int8), place=place).view(_FLOAT8[array.dtype])
    return paddle.to_tensor(array, place=place)
