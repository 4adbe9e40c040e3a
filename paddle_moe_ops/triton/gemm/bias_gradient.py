# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""Gradient of a grouped GEMM's bias, and the bias' share of the gradient of the weights.

With out[r] = weights[r] * (x[r] W_e + bias[e]):

    d_bias[e]        = sum over the rows r of e of weights[r] * d_out[r]       float32, rounded once
    d_weights[r]    += dot(d_out[r], bias[e])                                  float32

Layout: d_out [M, N], any row stride; bias and d_bias [E, N]. Mapping: one program per expert and BLOCK_N columns; it
loops over the expert's rows, BLOCK_M per iteration. Row i of a block is added to lane i, in ascending order, and one
tree adds up the lanes, so the bits depend on nothing else.

Bytes moved: d_out once. Memory-bound.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..launch.device import Array, Device, address, cdiv, next_power_of_2
from ..ops.row_sums import row_sums
from ..ops.rowmap import fill
from .schedule import schedule
from .types import Groups

__all__ = ["bias_gradient"]

_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16"}
_BLOCK_M, _MAX_BLOCK_N = 32, 64


@triton.jit
def bias_gradient_kernel(
    d_out,
    bias,
    weights,
    d_weights,
    d_bias,
    partial,
    first,
    stop,
    outer,
    stride,
    WEIGHTED: tl.constexpr,
    DOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per expert and column tile.

    With DOTS, partial[r, column tile] = dot products; those of column tile 0 include d_weights[r].
    """
    tiles = (outer + BLOCK_N - 1) // BLOCK_N
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < outer
    entries = expert.to(tl.int64) * outer + columns
    addend = tl.load(bias + entries, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    end = tl.load(stop + expert)
    for origin in range(tl.load(first + expert), end, BLOCK_M):
        rows = origin + tl.arange(0, BLOCK_M)
        live = rows < end
        place = rows.to(tl.int64)[:, None] * stride + columns[None, :]
        gradient = tl.load(d_out + place, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if DOTS:
            dots = tl.sum(gradient * addend[None, :], axis=1)
            dots += tl.load(d_weights + rows, mask=rows < tl.where(tile == 0, end, 0), other=0.0)
            tl.store(partial + rows.to(tl.int64) * tiles + tile, dots, mask=live)
        if WEIGHTED:
            gradient *= tl.load(weights + rows, mask=live, other=0.0)[:, None]
        sums += gradient
    tl.store(d_bias + entries, tl.sum(sums, axis=0).to(d_bias.dtype.element_ty), mask=inside)


def bias_gradient(
    device: Device, d_out: Array, bias: Array, groups: Groups, weights: Array | None, d_weights: Any
) -> tuple[Any, Any]:
    """Return the gradient of the bias, and that of the weights including the bias' share.

    Args:
        device: allocates and launches.
        d_out: [M, N] float16 or bfloat16, gradient of the GEMM's output.
        bias: [E, N], dtype of ``d_out``.
        groups: rows of each expert.
        weights: float32 [M], or None.
        d_weights: float32 [M], gradient of the weights without a bias, or None if it is not wanted.

    Returns:
        [E, N], 0 for experts without rows, and float32 [M], 0 in rows of no group, or None.
    """
    num_rows, outer = d_out.shape
    experts = bias.shape[0]
    tables = schedule(device, groups, num_rows, _BLOCK_M)
    columns = min(next_power_of_2(outer), _MAX_BLOCK_N)
    tiles = cdiv(outer, columns)
    d_bias, partial = device.empty(bias.shape, device.dtype_name(bias)), None
    if d_weights is not None:
        partial = fill(device, device.empty([num_rows, tiles], "float32"), num_rows * tiles, 0)
    pointer = _POINTERS[device.dtype_name(d_out)]
    device.launch(
        bias_gradient_kernel,
        experts * tiles,
        (pointer, pointer, "*fp32", "*fp32", pointer, "*fp32", "*i32", "*i32", "i32", "i64"),
        (
            *map(address, (d_out, bias, weights, d_weights, d_bias, partial, tables.group_starts, tables.group_ends)),
            outer,
            device.row_stride(d_out) if num_rows > 1 else outer,
        ),
        (weights is not None, d_weights is not None, _BLOCK_M, columns),
        4,
    )
    return d_bias, None if partial is None else row_sums(device, partial)
