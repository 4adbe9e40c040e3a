# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer on DeepGEMM's masked grouped GEMMs in float8, as decode with it is written: room for rows of each expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from benchmarks.layer.inputs import Inputs
from benchmarks.layer.library import Codes
from benchmarks.layer.peers import deep_gemm

from .plain import GROUP, store_codes, weighted_rows

__all__ = ["deep_gemm_layer"]

_ROWS = 64  # the room of an expert is a multiple of these


# Row r comes from sources[r] and goes to places[r], which is expert * height + its row of the expert. Scales are
# [E, width / GROUP, height], as its kernels read them.
@triton.jit
def _quantize(x, sources, places, codes, scales, width, height, GROUP: tl.constexpr):
    row, group = tl.program_id(0), tl.program_id(1)
    place = tl.load(places + row)
    column = group * GROUP + tl.arange(0, GROUP)
    values = tl.load(x + tl.load(sources + row).to(tl.int64) * width + column).to(tl.float32)
    at_scale = (place // height * (width // GROUP) + group) * height + place % height
    store_codes(values, codes, scales, place * width + column, at_scale)


@triton.jit
def _swiglu_codes(hidden, places, codes, scales, inner, height, GROUP: tl.constexpr):
    row, group = tl.program_id(0), tl.program_id(1)
    place = tl.load(places + row)
    column = group * GROUP + tl.arange(0, GROUP)
    gate = tl.load(hidden + place * 2 * inner + column).to(tl.float32)
    up = tl.load(hidden + place * 2 * inner + inner + column).to(tl.float32)
    act = (gate * tl.sigmoid(gate) * up).to(tl.bfloat16).to(tl.float32)
    at_scale = (place // height * (inner // GROUP) + group) * height + place % height
    store_codes(act, codes, scales, place * inner + column, at_scale)


def deep_gemm_layer(inputs: Inputs, matrices: list[Codes]) -> Callable[[], torch.Tensor]:
    """A layer in float8 whose maps are made once.

    Args:
        inputs: the operands.
        matrices: both, as `plain.stored` returns them.
    """
    package = deep_gemm()
    tokens, hidden, inner, experts, _ = inputs.shape
    most = int(inputs.sizes.max())
    height = (most + _ROWS - 1) // _ROWS * _ROWS
    owners = torch.repeat_interleave(torch.arange(experts, device="cuda"), inputs.sizes)
    rows = torch.arange(len(owners), device="cuda")
    places = owners * height + rows - inputs.offsets[owners].long()
    slot_places = places[inputs.rows_of_slots]
    expected = max(1, len(owners) // experts)

    def room(width: int) -> tuple[Codes, torch.Tensor]:
        """Memory of codes, and of scales as the plain kernels write and as DeepGEMM reads them."""
        codes = inputs.x.new_zeros(experts, height, width, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scales = inputs.x.new_ones(experts, width // GROUP, height, dtype=torch.float32)
        return Codes(codes, scales), scales.transpose(1, 2)

    (x, x_scales), (act, act_scales) = room(hidden), room(inner)
    gated = inputs.x.new_empty(experts, height, 2 * inner)
    out_rows, out = inputs.x.new_empty(experts, height, hidden), inputs.x.new_empty(tokens, hidden)
    gemm = package.m_grouped_fp8_gemm_nt_masked

    def forward() -> torch.Tensor:
        count = len(places)
        _quantize[(count, hidden // GROUP)](inputs.x, inputs.row_to_token, places, *x, hidden, height, GROUP)
        gemm((x.codes, x_scales), tuple(matrices[0]), gated, inputs.sizes, expected)
        _swiglu_codes[(count, inner // GROUP)](gated, places, *act, inner, height, GROUP)
        gemm((act.codes, act_scales), tuple(matrices[1]), out_rows, inputs.sizes, expected)
        weighted_rows(out_rows, slot_places, inputs.probs, out)
        return out

    return forward
