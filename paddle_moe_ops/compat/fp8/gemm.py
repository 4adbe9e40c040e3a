# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The GEMM of float8 codes that have a scale for each 128 of the contraction."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from ... import _checks
from ..._graphs import filled, public, to_dtype, without_autocast
from ...backends import direct, has_operators
from .operands import GROUP, dygraph_tensor

__all__ = ["fp8_gemm_blockwise"]

_CODES = (paddle.float8_e4m3fn, paddle.float8_e5m2)
_OUT_DTYPES = (paddle.bfloat16, paddle.float32)
_NAME = "fp8_gemm_blockwise"


@public(in_graphs=False)
def fp8_gemm_blockwise(
    a: Tensor,
    a_decode_scale: Tensor,
    b: Tensor,
    b_decode_scale: Tensor,
    out_dtype: Any,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = True,
    is_a_1d_scaled: bool = True,
    is_b_1d_scaled: bool = True,
) -> Tensor:
    """Multiply float8 codes ``a`` with ``b`` transposed; sums of 128 products are multiplied by both scales.

    A 1d scale is float32 [ceil(K / 128), rows]. A 2d scale, one for each block of 128 x 128, is float32
    [ceil(rows / 128), ceil(K / 128)], or transposed where the two sizes differ.

    Sums are float32 and begin with 0, groups of 128 of K are added in ascending order, and the result is rounded once.
    With p the sum of a group's products, in the order of the library or the tensor cores:

    * the float8 kernel of `moe_mlp`: sum = fma(p, RN(scale of a * scale of b), sum). It runs on GPUs of compute
      capability 9.0 if codes are float8_e4m3fn, ``a`` is 1d and ``b`` 2d, the result is bfloat16 without
      ``accumulate``, and K and N are multiples of 16.
    * Paddle's matmul of each group, for all other calls: sum = RN(sum + RN(RN(p * scale of a) * scale of b)). With
      ``accumulate``, ``out`` is added to the last sum.

    Not differentiable. Deterministic on a device. No host synchronisation.

    Args:
        a: [M, K] float8_e4m3fn or float8_e5m2.
        a_decode_scale: scale of ``a``.
        b: [N, K], as ``a``.
        b_decode_scale: scale of ``b``.
        out_dtype: bfloat16 or float32, as a Paddle dtype or its name. If ``out`` is given, its dtype is taken instead.
        out: contiguous [M, N], which is written and returned; or None.
        bias: None.
        accumulate: whether the product is added to ``out``.
        use_split_accumulator: ignored; all sums are float32.
        is_a_1d_scaled: whether the scale of ``a`` is 1d, otherwise 2d.
        is_b_1d_scaled: whether the scale of ``b`` is 1d. At least one of them is.

    Returns:
        [M, N].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    if bias is not None:
        _checks.bad_value(_NAME, "bias", "None", f"a {type(bias).__name__}")
    for argument, value in (
        ("accumulate", accumulate),
        ("use_split_accumulator", use_split_accumulator),
        ("is_a_1d_scaled", is_a_1d_scaled),
        ("is_b_1d_scaled", is_b_1d_scaled),
    ):
        _checks.flag(_NAME, argument, value)
    if not is_a_1d_scaled and not is_b_1d_scaled:
        _checks.bad_value(_NAME, "is_b_1d_scaled", "True without is_a_1d_scaled", False)
    dygraph_tensor(_NAME, "a", a, _CODES, ["M", "K"])
    dygraph_tensor(_NAME, "b", b, _CODES, ["N", a.shape[1]])
    rows, columns = a.shape[0], b.shape[0]
    if out is not None:
        dygraph_tensor(_NAME, "out", out, _OUT_DTYPES, [rows, columns])
        if not out.is_contiguous():
            _checks.bad_value(_NAME, "out", "contiguous", "a tensor that is not")
        out_dtype = out.dtype
    elif accumulate:
        _checks.bad_value(_NAME, "out", "a tensor with accumulate", None)
    out_dtype = _checks.dtype_of_result(_NAME, "out_dtype", out_dtype, _OUT_DTYPES)
    left = _scale("a_decode_scale", a_decode_scale, a, is_a_1d_scaled)
    right = _scale("b_decode_scale", b_decode_scale, b, is_b_1d_scaled)
    given = {"a": a, "a_decode_scale": a_decode_scale, "b": b, "b_decode_scale": b_decode_scale, "out": out}
    _checks.same_place(_NAME, **given)
    has_layout_of_kernel = is_a_1d_scaled and not is_b_1d_scaled
    with without_autocast():
        product = None
        if has_layout_of_kernel and out_dtype == paddle.bfloat16 and not accumulate:
            product = _product_of_kernel(a, left.T, b, right.T)
        if product is None:
            product = _product(a, _by_row(left, a, is_a_1d_scaled), b, _by_row(right, b, is_b_1d_scaled))
        if out is None:
            return to_dtype(product, out_dtype)
        if accumulate:
            product = product + out.astype("float32")
        with paddle.no_grad():
            paddle.assign(to_dtype(product, out_dtype), out)
        return out


def _scale(argument: str, scale: Any, codes: Tensor, is_1d: bool) -> Tensor:
    """Check a scale; its groups of K come first: [ceil(K / 128), rows or blocks of 128 rows]."""
    rows, groups = codes.shape[0], -(-codes.shape[1] // GROUP)
    if is_1d:
        return dygraph_tensor(_NAME, argument, scale, (paddle.float32,), [groups, rows])
    shape = [-(-rows // GROUP), groups]
    if list(getattr(scale, "shape", shape)) == shape[::-1] != shape:
        return dygraph_tensor(_NAME, argument, scale, (paddle.float32,), shape[::-1])
    return dygraph_tensor(_NAME, argument, scale, (paddle.float32,), shape).T


def _by_row(scale: Tensor, codes: Tensor, is_1d: bool) -> Tensor:
    """The scale of each row of codes, [ceil(K / 128), rows]."""
    if is_1d:
        return scale
    if min(scale.shape) == 0:
        return filled([scale.shape[0], codes.shape[0]], 1, "float32", codes)
    return paddle.repeat_interleave(scale, GROUP, axis=1)[:, : codes.shape[0]]


def _product_of_kernel(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor | None:
    """The product in bfloat16 by the float8 kernel, or None where there is none."""
    if {a.dtype, b.dtype} != {paddle.float8_e4m3fn} or a.place.is_cpu_place() or not has_operators(a):
        return None
    return next(iter(direct("paddle_float8_gemm", a, a_scale, b, b_scale, filled([1], a.shape[0], "int32", a))), None)


def _product(a: Tensor, a_factors: Tensor, b: Tensor, b_factors: Tensor) -> Tensor:
    """Float32 product, in the order of the groups of the contraction."""
    total = filled([a.shape[0], b.shape[0]], 0, "float32", a)
    if min(a.shape[0], b.shape[0]) == 0:
        return total
    left, right = a.astype("float32"), b.astype("float32")
    for group, start in enumerate(range(0, a.shape[1], GROUP)):
        part = paddle.matmul(left[:, start : start + GROUP], right[:, start : start + GROUP], transpose_y=True)
        total = total + part * a_factors[group].unsqueeze(1) * b_factors[group]
    return total
