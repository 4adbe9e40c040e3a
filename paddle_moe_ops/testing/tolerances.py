# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tolerances of results whose order of summation is free. All other results are compared by their bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = [
    "FLOAT8_ERROR",
    "FLOAT8_ROUNDING_ERROR",
    "Tolerance",
    "assert_close_float8",
    "assert_close_sums",
    "dot_chain",
    "dtype_tols",
    "score_tols",
]

# Error of a float8 layer against one that adds in another order, relative to the norm. A sum that rounds otherwise may
# be quantised to the neighbour, up to 1/8 away. Few terms, as in tests, do not average that out.
FLOAT8_ERROR = 0.03

# Error of a float8 layer or of its gradients against the same without rounding, relative to the norm. Codes are off by
# at most 2**-4, and by 0.027 as a root of the mean square. A gradient depends on up to eight rounded factors.
FLOAT8_ROUNDING_ERROR = 0.1

# Rounding to nearest is off by at most this much, relative to the exact value.
_UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The smallest step of each dtype bounds the rounding error of a subnormal number.
_SMALLEST_STEP = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}

_DOT_LANES = 16
_DOT_TREE_LEVELS = 4


class Tolerance(NamedTuple):
    """Largest allowed error: ``of_result * |result| + of_magnitude * sum of |terms| + absolute``.

    Examples:
        >>> from paddle_moe_ops.testing.tolerances import dtype_tols
        >>> dtype_tols("float32", chain=7).of_magnitude == 8 * 2**-24
        True
    """

    of_result: float
    of_magnitude: float
    absolute: float


def dtype_tols(dtype: DTypeLike, chain: int) -> Tolerance:
    """The tolerance of a sum that is accumulated in float32 in a free order and rounded once to ``dtype``.

    It is a proved bound, not a guess: after n roundings in a row, a float32 sum is off by at most n * 2**-24 (to first
    order) of the sum of the absolute values of its terms (Higham, "Accuracy and Stability of Numerical Algorithms",
    section 4.2). Relative to that sum, a term that is left out or added twice is visible, even if terms cancel;
    relative to the result it would not be. Both sides round to the dtype in the end, so its unit roundoff counts twice.

    Used for
      * the gradient of a probability, a dot product in float32: `dot_chain` roundings;
      * sums in another order than ours (libraries that add from the highest expert down): topk roundings.

    Args:
        dtype: float32, float16 or bfloat16, of the result.
        chain: roundings in a row, at most, on either side.

    Returns:
        the tolerance.

    Examples:
        >>> from paddle_moe_ops.testing.tolerances import dot_chain, dtype_tols
        >>> tolerance = dtype_tols("float32", chain=dot_chain(64))  # of the gradients of probabilities
        >>> tolerance.of_result == 2 * 2**-24
        True
    """
    name = np.dtype(dtype).name
    # One more rounding covers the terms of second order, which stay below it for any chain shorter than 4096.
    return Tolerance(2 * _UNIT_ROUNDOFF[name], (chain + 1) * _UNIT_ROUNDOFF["float32"], _SMALLEST_STEP[name])


def score_tols(dtype: DTypeLike, num_experts: int) -> Tolerance:
    """The tolerance of a router's scores and weights, and of the gradient of its logits.

    Relative to the sum of the absolute values of the terms. The sums of a softmax and its gradient have at
    most ``num_experts`` roundings in a row. Each exponential is allowed 16 units in the last place for the function
    itself and, with logits up to 16, another 16 for the rounding of its argument. Scores, sums, weights and
    their gradients are rounded to the dtype on the way, which costs a unit each, on either side.

    Args:
        dtype: float32, float16 or bfloat16, of the logits.
        num_experts: experts in all.

    Returns:
        the tolerance.

    Examples:
        >>> from paddle_moe_ops.testing.tolerances import score_tols
        >>> score_tols("float32", num_experts=8).of_magnitude == (2 * 8 + 32 + 8) * 2**-24
        True
    """
    name = np.dtype(dtype).name
    chain = (2 * num_experts + 32) * _UNIT_ROUNDOFF["float32"]
    return Tolerance(0, chain + 8 * _UNIT_ROUNDOFF[name], _SMALLEST_STEP[name])


def dot_chain(hidden: int) -> int:
    """The longest chain of roundings in a dot product of ``hidden`` terms: 16 parallel lanes, then a tree.

    Examples:
        >>> from paddle_moe_ops.testing.tolerances import dot_chain
        >>> dot_chain(64), dot_chain(65)
        (8, 9)
    """
    return -(-hidden // _DOT_LANES) + _DOT_TREE_LEVELS


def assert_close_sums(actual: Any, expected: Any, magnitude: Any, tolerance: Tolerance, *, what: str) -> None:
    """Check sums against a tolerance.

    Args:
        actual: Paddle tensor or array.
        expected: the same, of equal dtype and shape.
        magnitude: the sums of the absolute values of the terms, same shape.
        tolerance: from `dtype_tols`.
        what: name that starts the message.

    Raises:
        AssertionError: they differ by more. The message says where the excess is largest.

    Examples:
        >>> import numpy as np
        >>> from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols
        >>> terms = np.random.default_rng(0).standard_normal([5, 8]).astype("float32")
        >>> total, magnitude = terms.sum(axis=1), np.abs(terms).sum(axis=1)
        >>> assert_close_sums(terms[:, ::-1].sum(axis=1), total, magnitude, dtype_tols("float32", chain=8), what="sum")
    """
    got, wanted = _as_array(actual), _as_array(expected)
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        given, due = f"{got.dtype} {list(got.shape)}", f"{wanted.dtype} {list(wanted.shape)}"
        raise AssertionError(f"{what}: {given} instead of {due}")
    got, wanted, terms = (np.asarray(value).astype(np.float64) for value in (got, wanted, magnitude))
    allowed: NDArray = tolerance.of_result * np.abs(wanted) + tolerance.of_magnitude * terms + tolerance.absolute
    excess = np.nan_to_num(np.abs(got - wanted) / allowed, nan=np.inf)
    if not excess.size or excess.max() <= 1:
        return
    place = tuple(int(index) for index in np.unravel_index(np.argmax(excess), excess.shape))
    raise AssertionError(
        f"{what}: {got[place]!r} instead of {wanted[place]!r} at {list(place)}, "
        f"{excess[place]:.3g} times the allowed error of {allowed[place]:.3g}"
    )


def _as_array(value: Any) -> NDArray:
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    from ..backends.arrays import to_numpy  # imported late: arrays are compared without Paddle as well

    return to_numpy(value)


def assert_close_float8(got: NDArray, expected: NDArray, what: str = "", limit: float = FLOAT8_ERROR) -> None:
    """Assert that results or gradients of a float8 layer are within ``limit`` of others, as a whole.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import dequantize_1x128, quantize_1x128
        >>> from paddle_moe_ops.testing.tolerances import assert_close_float8
        >>> x = paddle.randn([5, 256])
        >>> values = dequantize_1x128(*quantize_1x128(x), dtype="float32")
        >>> assert_close_float8(values.numpy(), x.numpy(), "values")
    """
    np.testing.assert_array_equal(got.shape, expected.shape, what)
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    error, norm = np.linalg.norm(got - expected), np.linalg.norm(expected)
    if not error <= limit * norm:
        raise AssertionError(f"{what}: {error:.3g} off, of a norm of {norm:.3g}")
