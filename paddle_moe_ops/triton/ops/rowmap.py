# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Row maps: Paddle's map [T, E] validated and compacted, and values moved between slots [T, K] and rows [N].

A user's row map is not trusted: an entry outside [0, N) counts as -1, and so does a row that an earlier entry names, in
flat order t * E + e. Three launches clean it:

    fill     owner [N] = no place
    claim    BLOCK entries of the map per program: owner[row] = min(place), an integer atomic, so every run is equal
    compact  one program per token: its valid entries ascending by expert, then -1; row_to_token; the row of each slot.
             If every expert is a slot, slot_to_row is the valid part of the map, and row_to_slot and row_to_expert
             follow.

Bytes moved: 4 * (2 * T * E + N) and the maps written; the atomics of claim and the loads of owner are scattered.

Values: gather_slots copies row values to slots, BLOCK slots per program. slots_to_rows and scatter_slots sum the values
of the slots that read a row, in slot order; the first has BLOCK rows per program, the second accumulates into the row
values, one program per token. scatter_mask copies row values to [token, expert], BLOCK rows per program.
"""

from typing import Any

import triton
import triton.language as tl

from ..launch.device import Array, Device, address, addresses, cdiv, next_power_of_2
from .numerics import negative_zeros
from .permute import fill_kernel

__all__ = ["clean_rowmap", "clean_rowmap_by_expert", "gather_slots", "scatter_mask", "scatter_slots", "slots_to_rows"]

_BLOCK = 1024
_ROW_BLOCK = 128
_NO_PLACE = 2**31 - 1


@triton.jit
def claim_kernel(rowmap, owner, size, num_rows, BLOCK: tl.constexpr):
    """One program per BLOCK entries."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rowmap + place, mask=place < size, other=-1)
    tl.atomic_min(owner + row, place, mask=(row >= 0) & (row < num_rows))


@triton.jit
def compact_kernel(
    rowmap,
    owner,
    ids,
    token_rows,
    row_to_token,
    slot_to_row,
    row_to_slot,
    row_to_expert,
    num_experts,
    num_rows,
    K,
    BY_EXPERT: tl.constexpr,
    DEDUPE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0)
    base = token * num_experts
    found = 0
    for first in range(0, num_experts, BLOCK):
        experts = first + tl.arange(0, BLOCK)
        row = tl.load(rowmap + base + experts, mask=experts < num_experts, other=-1)
        in_range = (row >= 0) & (row < num_rows)
        usable = in_range & (tl.load(owner + row, mask=in_range, other=-1) == base + experts)
        one = usable.to(tl.int32)
        tl.store(token_rows + base + found + tl.cumsum(one, axis=0) - one, row, mask=usable)
        tl.store(row_to_token + row, tl.zeros([BLOCK], tl.int32) + token, mask=usable)
        if BY_EXPERT:
            tl.store(slot_to_row + base + experts, tl.where(usable, row, -1), mask=experts < num_experts)
            tl.store(row_to_slot + row, base + experts, mask=usable)
            tl.store(row_to_expert + row, experts, mask=usable)
        found += tl.sum(one, axis=0)
    for first in range(0, num_experts, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(
            token_rows + base + place, tl.full([BLOCK], -1, tl.int32), mask=(place >= found) & (place < num_experts)
        )
    for first in range(0, K, SLOTS):
        k = first + tl.arange(0, SLOTS)
        inside = k < K
        expert = tl.load(ids + token * K + k, mask=inside, other=-1)
        valid = (expert >= 0) & (expert < num_experts)
        if DEDUPE:
            for j in range(K):
                valid = valid & ((tl.load(ids + token * K + j) != expert) | (j >= k))
        row = tl.load(rowmap + base + expert, mask=valid, other=-1)
        in_range = (row >= 0) & (row < num_rows)
        usable = in_range & (tl.load(owner + row, mask=in_range, other=-1) == base + expert)
        tl.store(slot_to_row + token * K + k, tl.where(usable, row, -1), mask=inside)


@triton.jit
def gather_slots_kernel(row_values, slot_to_row, slot_values, size, num_rows, BLOCK: tl.constexpr):
    """slot_values = row_values[slot_to_row], 0 without a row; bits are copied. BLOCK slots per program."""
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(slot_to_row + slots, mask=slots < size, other=-1)
    value = tl.load(row_values + row, mask=(row >= 0) & (row < num_rows), other=0)
    tl.store(slot_values + slots, value, mask=slots < size)


@triton.jit
def scatter_mask_kernel(
    row_values, row_to_token, row_to_expert, mask_values, num_rows, num_experts, BLOCK: tl.constexpr
):
    """mask_values[token, expert] = value of each row. BLOCK rows per program."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(row_to_token + rows, mask=rows < num_rows, other=-1)
    live = token >= 0
    expert = tl.load(row_to_expert + rows, mask=live, other=0)
    value = tl.load(row_values + rows, mask=live, other=0)
    tl.store(mask_values + token.to(tl.int64) * num_experts + expert, value, mask=live)


@triton.jit
def scatter_slots_kernel(slot_values, slot_to_row, row_values, num_rows, K, SLOTS: tl.constexpr):
    """One program per token: row_values[row] += values of the slots that read the row, in their order.

    Slots of a token may share a row: the lane of the first one accumulates and stores all of them.
    """
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, SLOTS)
    row = tl.load(slot_to_row + token * K + k, mask=k < K, other=-1)
    live = (row >= 0) & (row < num_rows)
    total = tl.load(row_values + row, mask=live, other=0.0)
    first = live
    for j in range(K):
        same = live & (tl.load(slot_to_row + token * K + j) == row)
        total = tl.where(same, total + tl.load(slot_values + token * K + j), total)
        first = first & ~(same & (j < k))
    tl.store(row_values + row, total, mask=first)


@triton.jit
def slots_to_rows_kernel(
    slot_values, slot_to_row, row_to_token, row_values, num_rows, num_tokens, K, BLOCK: tl.constexpr
):
    """row_values[row] = sum of the slots that read it, in their order; 0 without one. BLOCK rows per program.

    Only slots of the row's token can read it. Reads 8 K bytes per row, most of them cache hits.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(row_to_token + rows, mask=rows < num_rows, other=-1)
    live = (token >= 0) & (token < num_tokens)
    slot = token.to(tl.int64) * K
    total = negative_zeros(BLOCK)  # a single value is then copied bit for bit
    found = rows < 0
    for j in range(K):
        reads = live & (tl.load(slot_to_row + slot + j, mask=live, other=-1) == rows)
        total = tl.where(reads, total + tl.load(slot_values + slot + j, mask=reads, other=0.0), total)
        found = found | reads
    tl.store(row_values + rows, tl.where(found, total, 0.0), mask=rows < num_rows)


def clean_rowmap(
    device: Device, rowmap: Array, ids: Array, num_rows: int, *, first_duplicate_only: bool
) -> tuple[Any, Any, Any]:
    """token_rows [T, E], row_to_token [N] and slot_to_row [T, K] of a row map, all int32.

    Raises:
        ValueError: the row map has 2^31 entries or more.
    """
    slot_to_row = device.empty([rowmap.shape[0], ids.shape[1]], "int32")
    token_rows, row_to_token = _clean(device, rowmap, ids, slot_to_row, None, None, num_rows, first_duplicate_only)
    return token_rows, row_to_token, slot_to_row


def clean_rowmap_by_expert(device: Device, rowmap: Array, num_rows: int) -> tuple[Any, Any, Any, Any, Any]:
    """slot_to_row and token_rows [T, E], row_to_token, row_to_slot and row_to_expert [N] if slot e is expert e.

    Raises:
        ValueError: the row map has 2^31 entries or more.
    """
    slot_to_row = device.empty(rowmap.shape, "int32")
    row_to_slot, row_to_expert = (fill(device, device.empty([num_rows], "int32"), num_rows, -1) for _ in range(2))
    token_rows, row_to_token = _clean(device, rowmap, None, slot_to_row, row_to_slot, row_to_expert, num_rows, False)
    return slot_to_row, token_rows, row_to_token, row_to_slot, row_to_expert


def _clean(
    device: Device,
    rowmap: Array,
    ids: Array | None,
    slot_to_row: Array,
    row_to_slot: Array | None,
    row_to_expert: Array | None,
    num_rows: int,
    first_duplicate_only: bool,
) -> tuple[Any, Any]:
    num_tokens, num_experts = rowmap.shape
    topk, size = 0 if ids is None else ids.shape[1], num_tokens * num_experts
    if size > _NO_PLACE:
        raise ValueError(f"a row map must have less than 2^31 entries, but has {size}")
    token_rows = device.empty([num_tokens, num_experts], "int32")
    row_to_token = fill(device, device.empty([num_rows], "int32"), num_rows, -1)
    owner = fill(device, device.empty([max(num_rows, 1)], "int32"), num_rows, _NO_PLACE)
    if not num_tokens:
        return token_rows, row_to_token
    maps = address(rowmap), address(owner)
    types = ("*i32", "*i32", "i32", "i32")
    device.launch(claim_kernel, cdiv(size, _BLOCK), types, (*maps, size, num_rows), (_BLOCK,), 4)
    outputs = token_rows, row_to_token, slot_to_row, row_to_slot, row_to_expert
    device.launch(
        compact_kernel,
        num_tokens,
        ("*i32", "*i32", _ids_type(device, ids), *["*i32"] * 5, *["i32"] * 3),
        (*maps, *addresses(ids, *outputs), num_experts, num_rows, topk),
        (
            *(ids is None, first_duplicate_only, min(max(next_power_of_2(num_experts), 32), _BLOCK)),
            min(next_power_of_2(topk), 64),
        ),
        1,
    )
    return token_rows, row_to_token


def _ids_type(device: Device, ids: Array | None) -> str:
    return "*i64" if ids is not None and device.dtype_name(ids) == "int64" else "*i32"


def fill(device: Device, out: Any, size: int, value: int) -> Any:
    """The array with ``size`` 32-bit integers set to a value."""
    if size:
        types = ("*i32", "i64", "i32")
        device.launch(fill_kernel, cdiv(size, _BLOCK), types, (address(out), size, value), (_BLOCK,), 4)
    return out


def gather_slots(device: Device, row_values: Array, slot_to_row: Array) -> Any:
    """float32 [T, K]: the value of each slot's row, 0 for a slot without one."""
    num_tokens, topk = slot_to_row.shape
    slot_values = device.empty([num_tokens, topk], "float32")
    size = num_tokens * topk
    if size:
        arrays = map(address, (row_values, slot_to_row, slot_values))
        types = ("*i32", "*i32", "*i32", "i32", "i32")
        arguments = (*arrays, size, row_values.shape[0])
        device.launch(gather_slots_kernel, cdiv(size, _BLOCK), types, arguments, (_BLOCK,), 4)
    return slot_values


def slots_to_rows(device: Device, slot_values: Array, slot_to_row: Array, row_to_token: Array) -> Any:
    """float32 [N]: sum of the values [T, K] of the slots that read each row, in their order; 0 for rows without one.

    Args:
        device: allocates and launches.
        slot_values: float32 [T, K].
        slot_to_row: int32 [T, K].
        row_to_token: int32 [N]; only slots of a row's token read it.
    """
    num_tokens, topk = slot_to_row.shape
    num_rows = row_to_token.shape[0]
    row_values = device.empty([num_rows], "float32")
    if num_rows:
        arrays = map(address, (slot_values, slot_to_row, row_to_token, row_values))
        types = ("*fp32", "*i32", "*i32", "*fp32", "i32", "i32", "i32")
        arguments = (*arrays, num_rows, num_tokens, topk)
        device.launch(slots_to_rows_kernel, cdiv(num_rows, _ROW_BLOCK), types, arguments, (_ROW_BLOCK,), 4)
    return row_values


def scatter_mask(
    device: Device, row_values: Array, row_to_token: Array, row_to_expert: Array, num_tokens: int, num_experts: int
) -> Any:
    """float32 [T, E]: the value of each row at its token and expert, 0 elsewhere."""
    num_rows = row_to_token.shape[0]
    size = num_tokens * num_experts
    mask_values = fill(device, device.empty([num_tokens, num_experts], "float32"), size, 0)
    if size and num_rows:
        arrays = map(address, (row_values, row_to_token, row_to_expert, mask_values))
        types = (*["*i32"] * 4, "i32", "i32")
        arguments = (*arrays, num_rows, num_experts)
        device.launch(scatter_mask_kernel, cdiv(num_rows, _BLOCK), types, arguments, (_BLOCK,), 4)
    return mask_values


def scatter_slots(device: Device, slot_values: Array, slot_to_row: Array, row_values: Any) -> None:
    """Add float32 values [T, K] of slots to the rows that they read, in place.

    Args:
        device: allocates and launches.
        slot_values: [T, K].
        slot_to_row: int32 [T, K]; a row belongs to one token, but several of its slots may read it.
        row_values: [N]; rows that no slot reads keep their values.
    """
    num_tokens, topk = slot_to_row.shape
    if num_tokens:
        arrays = map(address, (slot_values, slot_to_row, row_values))
        types = ("*fp32", "*i32", "*fp32", "i32", "i32")
        arguments = (*arrays, row_values.shape[0], topk)
        device.launch(scatter_slots_kernel, num_tokens, types, arguments, (next_power_of_2(topk),), 1)
