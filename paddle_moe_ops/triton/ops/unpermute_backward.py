# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""Backward of unpermute: both gradients in one pass over d_out and rows. Memory-bound.

    d_rows[r]  = w_r * d_out[t]
    d_weights  = dot(d_out[t], rows[r]), by row or by slot

Mapping: PROGRAMS_PER_TOKEN programs share a token's rows in turn. A program loops over BLOCK columns: it loads d_out
(an L2 hit for the token's other programs), stores the scaled row and accumulates a float32 vector of partial dot
products, element j in lane j % BLOCK; one tree reduction adds up the lanes. Further programs zero the rows without a
token.

Determinism: BLOCK and the number of warps depend on row bytes and dtype alone, so a dot product has the same bits in
every run and for any number of tokens.

Bytes moved: (T + 2 N) * H * itemsize. The gradient of a plain sum is a `permute` of d_out.
"""

from typing import Any

import triton
import triton.language as tl

from ..launch.device import ITEM_BYTES, Array, Device, address, cdiv, next_power_of_2, vector_elements
from .configs import Config, backward_config, rows_per_round
from .numerics import CARRIERS, rounded, widened
from .permute import FILL_BLOCK, permute, zero_padding

__all__ = ["unpermute_backward"]


@triton.jit
def unpermute_backward_kernel(
    d_out,
    rows,
    slot_rows,
    row_to_token,
    weights,
    d_rows,
    d_weights,
    num_tokens,
    num_rows,
    row_slots,
    groups,
    DTYPE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    NEED_ROWS: tl.constexpr,
    NEED_WEIGHTS: tl.constexpr,
    COPY_SINGLE: tl.constexpr,
    PROGRAMS_PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    FILL: tl.constexpr,
):
    """PROGRAMS_PER_TOKEN programs per token, then as many per FILL rows without a token."""
    program = tl.program_id(0)
    token = program // PROGRAMS_PER_TOKEN
    part = program % PROGRAMS_PER_TOKEN
    width = groups.to(tl.int64) * VECTOR
    lanes = tl.arange(0, BLOCK)
    if token < num_tokens:
        entries = slot_rows + token.to(tl.int64) * row_slots
        single = False
        if COPY_SINGLE:
            single = (tl.load(entries) >= 0) & (tl.load(entries + 1, mask=row_slots > 1, other=-1) < 0)
        slot = part
        row = tl.load(entries + slot, mask=slot < row_slots, other=-1)
        while (row >= 0) | (BY_SLOT & (slot < row_slots)):  # by row, the first -1 ends a token
            exists = (row >= 0) & (row < num_rows)
            width_here = tl.where(exists, width, 0)
            weight_index = token.to(tl.int64) * row_slots + slot if BY_SLOT else row.to(tl.int64)
            factor = tl.load(weights + weight_index, mask=exists, other=0.0)
            partial_dots = tl.zeros([BLOCK], tl.float32)
            for start in range(0, width_here, BLOCK):
                columns = start + lanes
                inside = columns < width
                bits = tl.load(d_out + token.to(tl.int64) * width + columns, mask=inside, other=0)
                gradient = widened(bits, DTYPE)
                if NEED_WEIGHTS:
                    data = tl.load(rows + row.to(tl.int64) * width + columns, mask=inside, other=0)
                if NEED_ROWS:
                    scaled = rounded(gradient * factor, DTYPE)
                    if COPY_SINGLE:
                        scaled = tl.where(single, bits, scaled)
                    tl.store(d_rows + row.to(tl.int64) * width + columns, scaled, mask=inside)
                if NEED_WEIGHTS:
                    partial_dots = tl.fma(gradient, widened(data, DTYPE), partial_dots)
            if NEED_WEIGHTS:
                dot = tl.sum(partial_dots, axis=0)
                if COPY_SINGLE:
                    dot = tl.where(single, 0.0, dot)
                tl.store(d_weights + weight_index, dot, mask=exists | BY_SLOT)  # a slot without a row has gradient 0
            slot += PROGRAMS_PER_TOKEN
            row = tl.load(entries + slot, mask=slot < row_slots, other=-1)
    else:
        first = (token - num_tokens) * FILL
        if NEED_ROWS:
            for start in range(part * BLOCK, width, PROGRAMS_PER_TOKEN * BLOCK):
                columns = start + lanes
                word: tl.constexpr = d_rows.dtype.element_ty
                zero_padding(row_to_token, d_rows, first, num_rows, width, columns, columns < width, word, FILL)
        if NEED_WEIGHTS and not BY_SLOT:
            index = first + tl.arange(0, FILL)
            padding = tl.load(row_to_token + index, mask=index < num_rows, other=0) < 0
            tl.store(d_weights + index, tl.zeros([FILL], tl.float32), mask=padding)


def unpermute_backward(
    device: Device,
    d_out: Array,
    slot_rows: Array,
    row_to_token: Array,
    rows: Array | None = None,
    weights: Array | None = None,
    *,
    weights_by_slot: bool = False,
    need_rows: bool = True,
    copy_single_row: bool = False,
    config: Config | None = None,
) -> tuple[Any, Any]:
    """Return d_rows [N, H] and d_weights; None for gradients that are not wanted.

    Args:
        device: allocates and launches.
        d_out: [T, H] contiguous. The bits of a dot product depend on data and sizes alone only if ``d_out`` and
            ``rows`` are aligned to 16 bytes.
        slot_rows: int32 [T, W] rows of each token: in the order of slots if weights are by slot, otherwise ascending
            with -1 last.
        row_to_token: int32 [N], -1 for rows without a token.
        rows: [N, H] contiguous, the forward input, if d_weights is wanted.
        weights: float32 [N] by row or [T, W] by slot, or None for the plain sum.
        weights_by_slot: whether weights are by slot.
        need_rows: whether d_rows is wanted.
        copy_single_row: as in the forward pass.
        config: overrides `configs.backward_config`.
    """
    if weights is None:
        return (permute(device, d_out, None, slot_rows, row_to_token, "all")[0] if need_rows else None), None
    num_tokens, row_slots = slot_rows.shape
    num_rows, hidden = row_to_token.shape[0], d_out.shape[1]
    dtype = device.dtype_name(d_out)
    item = ITEM_BYTES[dtype]
    d_rows = device.empty([num_rows, hidden], dtype) if need_rows else None
    need_weights = rows is not None
    d_weights = device.empty(list(weights.shape), "float32") if need_weights else None
    vector = vector_elements(item, hidden * item, *map(address, (d_out, rows, d_rows)))
    config = config or backward_config()
    block = min(config.block_bytes // item, max(next_power_of_2(hidden), 32))
    programs_per_token = row_slots if weights_by_slot else rows_per_round(row_slots, num_rows, num_tokens)
    programs_per_token = min(programs_per_token, 64)
    fills = cdiv(num_rows, FILL_BLOCK)
    num_programs = (num_tokens + fills) * programs_per_token
    if num_programs and (need_rows or need_weights):
        carrier = CARRIERS[dtype] + (":16" if vector > 1 else "")
        device.launch(
            unpermute_backward_kernel,
            num_programs,
            (carrier, carrier, "*i32", "*i32", "*fp32", carrier, "*fp32", *["i32"] * 3, "i64"),
            (
                *map(address, (d_out, rows, slot_rows, row_to_token, weights, d_rows, d_weights)),
                *(num_tokens, num_rows, row_slots, hidden // vector),
            ),
            (
                *(dtype, weights_by_slot, need_rows, need_weights, copy_single_row),
                *(programs_per_token, block, vector, FILL_BLOCK),
            ),
            config.warps,
        )
    return d_rows, d_weights
