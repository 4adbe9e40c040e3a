# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and its backward, which also computes the gradient of the routing weights. Memory-bound.

For each row r: [gate, up] = hidden[r], A = swiglu(gate, up) rounded, s = weights[r], G = gradient[r], the gradient of
s A:

    d_weights[r]  = dot(A, G)                           float32
    gradient[r]   = s A                                 operand of the down projection's wgrad
    hidden[r]     = s G * dA/dgate, s G * dA/dup        in place

The dot product needs no row of the output, since <dO W^T, A> = <dO, A W> (SonicMoE, arXiv 2512.14080).

Layout: hidden [M, 2 n] and gradient [M, n], packed, float16 or bfloat16. Mapping: one program per row, BLOCK columns
per iteration. Rows without a token get zeros; rows after the last group, which no kernel reads, only in d_weights.

Bytes moved: 12 per column and row of 16-bit numbers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..launch.device import Array, Device, address, cdiv, next_power_of_2

__all__ = ["swiglu", "swiglu_gradient"]

_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16"}
_MAX_BLOCK = 1024
_COLUMNS_PER_WARP = 256


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up, float32."""
    return gate * (1.0 / (1.0 + tl.exp(-gate))) * up


@triton.jit
def swiglu_gradient_kernel(
    hidden,
    gradient,
    weights,
    row_to_token,
    rows_end,
    d_weights,
    width_groups,
    VECTOR: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row; width: columns of A. Rows from ``rows_end[0]`` on are skipped."""
    width = width_groups * VECTOR
    row = tl.program_id(0)
    live = tl.load(row_to_token + row) >= 0
    factor = 1.0
    if WEIGHTED:
        factor = tl.load(weights + row)
    gate_row = hidden + row.to(tl.int64) * 2 * width
    gradient_row = gradient + row.to(tl.int64) * width
    dtype: tl.constexpr = hidden.dtype.element_ty
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, tl.where(row < tl.load(rows_end), width, 0), BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        found = columns < tl.where(live, width, 0)
        gate = tl.load(gate_row + columns, mask=found, other=0.0).to(tl.float32)
        up = tl.load(gate_row + width + columns, mask=found, other=0.0).to(tl.float32)
        d_scaled = tl.load(gradient_row + columns, mask=found, other=0.0).to(tl.float32)
        act = swiglu(gate, up).to(dtype).to(tl.float32)
        products += act * d_scaled
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        d_act = tl.where(live, d_scaled * factor, 0.0)
        d_gate = d_act * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(gate_row + columns, d_gate.to(dtype), mask=inside)
        tl.store(gate_row + width + columns, (d_act * silu).to(dtype), mask=inside)
        tl.store(gradient_row + columns, tl.where(live, act * factor, 0.0).to(dtype), mask=inside)
    if WEIGHTED:
        tl.store(d_weights + row, tl.sum(products, axis=0))


def swiglu_gradient(
    device: Device,
    hidden: Array,
    gradient: Array,
    weights: Array | None,
    row_to_token: Array,
    rows_end: int,
    vector: int,
) -> Any:
    """Return d_weights float32 [M], or None without weights; ``hidden`` and ``gradient`` are overwritten.

    Args:
        device: allocates and launches.
        hidden: [M, 2 n] float16 or bfloat16.
        gradient: [M, n], dtype of ``hidden``.
        weights: float32 [M], or None.
        row_to_token: int32 [M].
        rows_end: address of an int32 on the device, the end of the last group.
        vector: elements per access.
    """
    num_rows, width = gradient.shape
    d_weights = None if weights is None else device.empty([num_rows], "float32")
    if not num_rows:
        return d_weights
    block = min(next_power_of_2(width), _MAX_BLOCK)
    pointer = _POINTERS[device.dtype_name(hidden)] + (":16" if vector > 1 else "")
    device.launch(
        swiglu_gradient_kernel,
        num_rows,
        (pointer, pointer, "*fp32", "*i32", "*i32", "*fp32", "i32"),
        (*map(address, (hidden, gradient, weights, row_to_token)), rows_end, address(d_weights), width // vector),
        (vector, weights is not None, block),
        max(1, min(4, cdiv(block, _COLUMNS_PER_WARP))),
    )
    return d_weights
