# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing tensors and arrays bit by bit, with a message that says where they differ first and how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

from ..backends.arrays import to_numpy

__all__ = ["assert_all_bits_equal", "assert_bits_equal"]


def assert_bits_equal(actual: Any, expected: Any, *, any_nan: bool = False, what: str = "the result") -> None:
    """Check that two tensors or arrays have the same dtype, shape and bits, so that -0.0 differs from 0.0.

    Args:
        actual: Paddle tensor or NumPy array (or scalar).
        expected: the same. Tensors are copied to the host, which synchronises with their device.
        any_nan: whether any NaN equals any NaN, for results of arithmetic; copies keep the bits of a NaN.
        what: name that starts the message.

    Raises:
        AssertionError: they differ. The message says in how many elements, where first, and both values with their
            bits.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.testing.equality import assert_bits_equal
        >>> assert_bits_equal(paddle.to_tensor([1.0, 0.0]), paddle.to_tensor([1.0, -0.0]), what="grad_x")
        Traceback (most recent call last):
        AssertionError: grad_x: 1 of 2 elements differ, first at [1]: 0.0 (0x00000000) instead of -0.0 (0x80000000)
    """
    got, wanted = _as_array(actual), _as_array(expected)
    if got.dtype != wanted.dtype:
        raise AssertionError(f"{what}: dtype {got.dtype} instead of {wanted.dtype}")
    if got.shape != wanted.shape:
        raise AssertionError(f"{what}: shape {list(got.shape)} instead of {list(wanted.shape)}")
    differs = _bits(got) != _bits(wanted)
    if any_nan:
        differs &= ~(_is_nan(got) & _is_nan(wanted))
    if not differs.any():
        return
    place = tuple(int(index) for index in np.argwhere(differs)[0])
    raise AssertionError(
        f"{what}: {np.count_nonzero(differs)} of {differs.size} elements differ, first at {list(place)}: "
        f"{got[place]} ({_pattern(got[place])}) instead of {wanted[place]} ({_pattern(wanted[place])})"
    )


def assert_all_bits_equal(
    actual: Iterable[Any], expected: Iterable[Any], names: Iterable[str], *, any_nan: bool = False
) -> None:
    """`assert_bits_equal` for each pair of two sequences; ``names`` has one name per pair.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import quantize_1x128, use_backend
        >>> from paddle_moe_ops.testing.equality import assert_all_bits_equal
        >>> x = paddle.randn([3, 256])
        >>> with use_backend("reference"):
        ...     expected = quantize_1x128(x)
        >>> assert_all_bits_equal(quantize_1x128(x), expected, ["codes", "scales"])
    """
    for got, wanted, name in zip(actual, expected, names, strict=True):
        assert_bits_equal(got, wanted, any_nan=any_nan, what=name)


def _as_array(value: Any) -> NDArray:
    return to_numpy(value) if isinstance(value, Tensor) else np.asarray(value)


def _bits(array: NDArray) -> NDArray:
    # A view needs a dense last axis; 0-D arrays are dense but ascontiguousarray turns them into 1-D.
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _is_nan(array: NDArray) -> NDArray:
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        return array != array


def _pattern(element: NDArray) -> str:
    bits = int(_bits(np.asarray(element)))
    return f"0x{bits:0{2 * element.dtype.itemsize}x}"
