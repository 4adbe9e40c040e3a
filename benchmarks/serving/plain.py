# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Plain kernels around the GEMMs of peers, and matrices as peers store them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.layer.library import Codes, integer_codes

__all__ = ["GROUP", "Timed", "quantize", "store_codes", "stored", "sum_rows", "swiglu", "swiglu_codes", "weighted_rows"]

GROUP = 128
_COLUMNS = 1024  # of a program
Timed = Callable[[list[Callable[[], Any]]], list[list[float]]]


@triton.jit
def _swiglu(hidden, act, inner, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inner
    gate = tl.load(hidden + row * 2 * inner + column, mask=inside).to(tl.float32)
    up = tl.load(hidden + row * 2 * inner + inner + column, mask=inside).to(tl.float32)
    tl.store(act + row * inner + column, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=inside)


@triton.jit
def store_codes(values, codes, scales, at, group):
    scale = tl.maximum(tl.max(tl.abs(values)), 1e-10) / 448.0
    tl.store(codes + at, (values / scale).to(tl.float8e4nv))
    tl.store(scales + group, scale)


@triton.jit
def _quantize(x, codes, scales, width, GROUP: tl.constexpr):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * width + group * GROUP + tl.arange(0, GROUP)
    store_codes(tl.load(x + at).to(tl.float32), codes, scales, at, row * (width // GROUP) + group)


@triton.jit
def _swiglu_codes(hidden, codes, scales, inner, GROUP: tl.constexpr):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    gate = tl.load(hidden + row * 2 * inner + column).to(tl.float32)
    up = tl.load(hidden + row * 2 * inner + inner + column).to(tl.float32)
    act = (gate * tl.sigmoid(gate) * up).to(tl.bfloat16).to(tl.float32)
    store_codes(act, codes, scales, row * inner + column, row * (inner // GROUP) + group)


@triton.jit
def _sum_rows(rows, out, width, TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(TOPK):
        total += tl.load(rows + (token * TOPK + slot) * width + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + token * width + column, total.to(tl.bfloat16), mask=inside)


@triton.jit
def _weighted_rows(rows, places, weights, out, width, TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(TOPK):
        place = tl.load(places + token * TOPK + slot).to(tl.int64)
        row = tl.load(rows + place * width + column, mask=inside, other=0).to(tl.float32)
        total += tl.load(weights + token * TOPK + slot) * row
    tl.store(out + token * width + column, total.to(tl.bfloat16), mask=inside)


def swiglu(hidden: torch.Tensor, act: torch.Tensor) -> None:
    """SwiGLU of rows [M, 2n]."""
    inner = act.shape[1]
    _swiglu[(len(act), triton.cdiv(inner, _COLUMNS))](hidden, act, inner, _COLUMNS)


def quantize(x: torch.Tensor, made: Codes) -> None:
    """Codes of rows [M, d], with a scale for 128 columns."""
    width = x.shape[1]
    _quantize[(len(x), width // GROUP)](x, *made, width, GROUP)


def swiglu_codes(hidden: torch.Tensor, made: Codes) -> None:
    """Codes of SwiGLU of rows [M, 2n]."""
    inner = made.codes.shape[1]
    _swiglu_codes[(len(hidden), inner // GROUP)](hidden, *made, inner, GROUP)


def sum_rows(rows: torch.Tensor, out: torch.Tensor, topk: int) -> None:
    """Sums [T, d] of rows [T * K, d]."""
    tokens, width = out.shape
    _sum_rows[(tokens, triton.cdiv(width, _COLUMNS))](rows, out, width, topk, _COLUMNS)


def weighted_rows(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Sums [T, d] of weights[t, k] rows[places[t, k]]."""
    tokens, width = out.shape
    grid = tokens, triton.cdiv(width, _COLUMNS)
    _weighted_rows[grid](rows, places, weights, out, width, places.shape[1], _COLUMNS)


def stored(values: torch.Tensor, kind: str) -> torch.Tensor | Codes:
    """Matrices [E, K, N] as peers store them, [E, N, K]."""
    if kind == "bf16":
        return values.transpose(1, 2).contiguous()
    if kind == "int8":
        return integer_codes(values, kind)
    experts, depth, width = values.shape
    made = values.new_empty(experts, width, depth, dtype=torch.float8_e4m3fn)
    scales = values.new_empty(experts, width // GROUP, depth // GROUP, dtype=torch.float32)
    for expert in range(experts):
        blocks = values[expert].t().float().reshape(width // GROUP, GROUP, depth // GROUP, GROUP)
        scales[expert] = blocks.abs().amax((1, 3)) / 448
        made[expert] = (blocks / scales[expert, :, None, :, None]).reshape(width, depth).to(torch.float8_e4m3fn)
    return Codes(made, scales)
