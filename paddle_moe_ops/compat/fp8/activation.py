# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Weighted SwiGLU that ends in float8, its gradients, and float8 rows as bfloat16."""

from __future__ import annotations

import math
from typing import Any

import paddle
from paddle import Tensor

from ... import _checks
from ..._graphs import public
from ...backends import direct
from .operands import GROUP, dequantized, dygraph_tensor

__all__ = ["fused_act_dequant", "fused_swiglu_weighted_bwd", "fused_weighted_swiglu_act_quant"]


@public(in_graphs=False)
def fused_act_dequant(x: Tensor, x_scale: Tensor) -> Tensor:
    """Multiply float8 codes by their scales: in float32, rounded to bfloat16.

    An exponent of 0 is a scale of 0, and one of 255 is Inf. Not differentiable. Deterministic: the same bits on every
    backend and run, except for NaN. No host synchronisation.

    Args:
        x: [M, N] float8_e4m3fn.
        x_scale: float32 [M, ceil(N / 128)], or packed exponents int32 [M, ceil(N / 512)], the lowest group in the
            lowest byte.

    Returns:
        bfloat16 [M, N].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "fused_act_dequant"
    dygraph_tensor(name, "x", x, (paddle.float8_e4m3fn,), ["num_rows", "columns"])
    num_rows, columns = x.shape
    dtypes = (paddle.float32, paddle.int32)
    is_packed = getattr(x_scale, "dtype", None) == paddle.int32
    dygraph_tensor(name, "x_scale", x_scale, dtypes, [num_rows, -(-columns // (4 * GROUP if is_packed else GROUP))])
    _checks.same_place(name, x=x, x_scale=x_scale)
    return dequantized(x, x_scale)


@public(in_graphs=False)
def fused_weighted_swiglu_act_quant(
    x: Tensor, prob: Tensor | None = None, using_pow2_scaling: bool = False, name: str | None = None
) -> tuple[Tensor, Tensor]:
    """Compute SwiGLU times a probability in float32, and quantise it with 128 columns to a group.

    Not differentiable. Deterministic: the same bits on every backend and run. No host synchronisation.

    Args:
        x: [..., 2 * I] bfloat16, the gate's half first.
        prob: float32 [rows] or [rows, 1], one for each row of ``x``; or None.
        using_pow2_scaling: scales that are powers of two.
        name: ignored.

    Returns:
        codes float8_e4m3fn [rows, I] and scales float32 [rows, ceil(I / 128)], by which codes are multiplied.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    function = "fused_weighted_swiglu_act_quant"
    dygraph_tensor(function, "x", x, (paddle.bfloat16,), [*_leading(x), "2 * I"])
    _checks.flag(function, "using_pow2_scaling", using_pow2_scaling)
    *leading, width = x.shape
    if width % 2:
        _checks.bad_value(function, "x", "of shape [..., 2 * I]", list(x.shape))
    num_rows = math.prod(leading)
    if prob is not None:
        shape = [num_rows, *([1] * (getattr(prob, "ndim", 1) - 1))]
        dygraph_tensor(function, "prob", prob, (paddle.float32,), shape)
        _checks.same_place(function, x=x, prob=prob)
    return direct("paddle_swiglu", x.reshape([num_rows, width]), prob, using_pow2_scaling)


@public(in_graphs=False)
def fused_swiglu_weighted_bwd(
    o1: Tensor, do2_s: Tensor, unzipped_probs: Tensor, name: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of SwiGLU times a probability, and its output.

    Numbers are float32, and rounded at the end. Not differentiable. Deterministic: the same bits on every backend and
    run. No host synchronisation.

    Args:
        o1: [..., 2 * I] bfloat16, the gate's half first.
        do2_s: [..., I] bfloat16, the gradient of the weighted output.
        unzipped_probs: float32 [..., 1] or [...], one for each row.
        name: ignored.

    Returns:
        the gradient of ``o1``, bfloat16; that of the probabilities, float32 of their shape; and the weighted output
        [..., I], bfloat16.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    function = "fused_swiglu_weighted_bwd"
    dygraph_tensor(function, "o1", o1, (paddle.bfloat16,), [*_leading(o1), "2 * I"])
    *leading, width = o1.shape
    if width % 2:
        _checks.bad_value(function, "o1", "of shape [..., 2 * I]", list(o1.shape))
    inner = width // 2
    dygraph_tensor(function, "do2_s", do2_s, (paddle.bfloat16,), [*leading, inner])
    shape = leading if getattr(unzipped_probs, "ndim", 0) == len(leading) else [*leading, 1]
    dygraph_tensor(function, "unzipped_probs", unzipped_probs, (paddle.float32,), shape)
    _checks.same_place(function, o1=o1, do2_s=do2_s, unzipped_probs=unzipped_probs)
    num_rows = math.prod(leading)
    rows = o1.reshape([num_rows, width]), do2_s.reshape([num_rows, inner]), unzipped_probs.reshape([num_rows])
    do1, probs_grad, o2_s = direct("paddle_swiglu_backward", *rows)
    return do1.reshape(o1.shape), probs_grad.reshape(shape), o2_s.reshape(do2_s.shape)


def _leading(tensor: Any) -> list[str]:
    """Names of all but the last dimension, for a check; at least one."""
    return [f"dim{index}" for index in range(max(getattr(tensor, "ndim", 2) - 1, 1))]
