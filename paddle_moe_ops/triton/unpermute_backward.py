# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""The gradient of unpermute: d_rows[r] = w_r * d_out[t] and d_weights = dot(d_out[t], rows[r]), in one pass over both.

One program takes all columns of one token and SLOTS of its rows: it reads a piece of d_out once, then reads, scales and
writes the same piece of each row, and keeps one float32 vector of partial dot products per row (element j in lane
j % BLOCK), which one tree adds up at the end. BLOCK and the number of warps depend on the row's size and dtype alone,
so a dot product has the same bits on every run and for any number of tokens. Rows without a token get zeros from
further programs. Moves (T + 2 N) * H * itemsize bytes.
"""

from typing import Any

import triton
import triton.language as tl

from .configs import Config, backward_config
from .launching import ITEM_BYTES, Array, Device, address, blocks, next_power_of_2, sum_vector
from .permute import FILL_BLOCK, zero_rows
from .sums import CARRIERS, load_indices, rounded, widened

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
    WEIGHTED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    NEED_ROWS: tl.constexpr,
    NEED_WEIGHTS: tl.constexpr,
    COPY_SINGLE: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    FILL: tl.constexpr,
):
    """PARTS programs per token, each for SLOTS places and those PARTS * SLOTS further on; then PARTS per FILL rows."""
    program = tl.program_id(0)
    token = program // PARTS
    width = groups.to(tl.int64) * VECTOR
    lanes = tl.arange(0, BLOCK)
    if token < num_tokens:
        entries = slot_rows + token.to(tl.int64) * row_slots
        single = False
        if COPY_SINGLE:
            single = (tl.load(entries) >= 0) & (tl.load(entries + 1, mask=row_slots > 1, other=-1) < 0)
        first = program % PARTS * SLOTS
        more = first < row_slots
        while more:
            row_ids = load_indices(entries, first, row_slots, num_rows, SLOTS)
            factors = ()
            sums = ()
            for k in tl.static_range(SLOTS):
                factor = 1.0
                if WEIGHTED:
                    place = token.to(tl.int64) * row_slots + first + k if BY_SLOT else row_ids[k].to(tl.int64)
                    factor = tl.load(weights + place, mask=row_ids[k] >= 0, other=1.0)
                    if COPY_SINGLE:
                        factor = tl.where(single, 1.0, factor)
                factors = factors + (factor,)
                sums = sums + (tl.zeros([BLOCK], tl.float32),)
            for start in range(0, width, BLOCK):
                columns = start + lanes
                inside = columns < width
                bits = tl.load(d_out + token.to(tl.int64) * width + columns, mask=inside, other=0)
                gradient = widened(bits, DTYPE)
                data = ()
                if NEED_WEIGHTS:
                    for k in tl.static_range(SLOTS):
                        source = rows + row_ids[k].to(tl.int64) * width + columns
                        data = data + (tl.load(source, mask=columns < tl.where(row_ids[k] >= 0, width, 0), other=0),)
                new_sums = ()
                for k in tl.static_range(SLOTS):
                    if NEED_ROWS:
                        target = d_rows + row_ids[k].to(tl.int64) * width + columns
                        scaled = bits
                        if WEIGHTED:
                            scaled = rounded(gradient * factors[k], DTYPE)
                            if COPY_SINGLE:
                                scaled = tl.where(single, bits, scaled)
                        tl.store(target, scaled, mask=columns < tl.where(row_ids[k] >= 0, width, 0))
                    if NEED_WEIGHTS:
                        new_sums = new_sums + (tl.fma(gradient, widened(data[k], DTYPE), sums[k]),)
                    else:
                        new_sums = new_sums + (sums[k],)
                sums = new_sums
            if NEED_WEIGHTS:
                for k in tl.static_range(SLOTS):
                    dot = tl.sum(sums[k], axis=0)
                    if COPY_SINGLE:
                        dot = tl.where(single, 0.0, dot)
                    if BY_SLOT:  # a slot without a row has gradient 0
                        place = token.to(tl.int64) * row_slots + first + k
                        tl.store(d_weights + place, tl.where(row_ids[k] >= 0, dot, 0.0), mask=first + k < row_slots)
                    else:
                        tl.store(d_weights + row_ids[k], dot, mask=row_ids[k] >= 0)
            first += PARTS * SLOTS
            more = first < row_slots
            if more and not BY_SLOT:  # rows of a token stand before its -1
                more = tl.load(entries + first) >= 0
    else:
        first = (token - num_tokens) * FILL
        if NEED_ROWS:
            for start in range(program % PARTS * BLOCK, width, PARTS * BLOCK):
                columns = start + lanes
                word: tl.constexpr = d_rows.dtype.element_ty
                zero_rows(row_to_token, d_rows, first, num_rows, width, columns, columns < width, word, FILL)
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
    """d_rows [N, H] and d_weights; None for what is not wanted.

    Args:
        device: where to.
        d_out: [T, H] contiguous. Only where it lies at a multiple of 16 bytes, and ``rows`` too, are the bits of a dot
            product a function of the data and the sizes alone.
        slot_rows: int32 [T, W]: rows of each token in any order where weights are by slot, else ascending with -1 last.
        row_to_token: int32 [N], -1 for rows without a token.
        rows: [N, H] contiguous, the forward input, if d_weights is wanted.
        weights: float32 [N] by row or [T, W] by slot, or None for the plain sum.
        weights_by_slot: which.
        need_rows: whether d_rows is wanted.
        copy_single_row: as in the forward.
        config: instead of that of `configs.backward_config`.
    """
    num_tokens, row_slots = slot_rows.shape
    num_rows, hidden = row_to_token.shape[0], d_out.shape[1]
    dtype = device.dtype_name(d_out)
    item = ITEM_BYTES[dtype]
    d_rows = device.empty([num_rows, hidden], dtype) if need_rows else None
    need_weights = rows is not None and weights is not None
    d_weights = device.empty(list(weights.shape), "float32") if need_weights and weights is not None else None
    vector = sum_vector(item, hidden * item, *map(address, (d_out, rows, d_rows)))
    config = config or backward_config(num_tokens)
    block = min(config.block_bytes // item, max(next_power_of_2(hidden), 32))
    slots = min(row_slots, config.slots)
    parts = min(row_slots, 64) if slots == 1 else 1
    fills = blocks(num_rows, FILL_BLOCK)
    programs = (num_tokens + fills) * parts
    if programs and (need_rows or need_weights):
        carrier = CARRIERS[dtype] + (":16" if vector > 1 else "")
        device.launch(
            unpermute_backward_kernel,
            programs,
            (carrier, carrier, "*i32", "*i32", "*fp32", carrier, "*fp32", *["i32"] * 3, "i64"),
            (
                *map(address, (d_out, rows, slot_rows, row_to_token, weights, d_rows, d_weights)),
                *(num_tokens, num_rows, row_slots, hidden // vector),
            ),
            (
                *(dtype, weights is not None, weights_by_slot, need_rows, need_weights, copy_single_row),
                *(slots, parts, block, vector, FILL_BLOCK),
            ),
            config.warps,
        )
    return d_rows, d_weights
