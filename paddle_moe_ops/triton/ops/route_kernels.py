# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routing kernels: a stable counting sort of slots by expert, from ids [T, K] or a mask [T, E] to the maps of a plan.

    row(slot) = start[expert] + slots of the expert in earlier tiles + rank within the tile

Layout: slots are numbered t * K + k and cut into tiles of TILE. Four launches, each reads the output of the previous
one:

    count    one program per tile: valid ids (-1 for others), histogram    experts [T*K], before [tiles, E]
    prefix   EXPERTS experts per program: exclusive scan over tiles         before in place, totals [E]
    offsets  one program: padded segment starts, rows that fit             starts [E+1], the plan's [E] fields
    maps     one program per tile: all map entries of its slots; further programs find the padding rows by binary
             search in starts, so no map needs a fill launch

`route_kernel` does all of it in one program for few slots. Ranks and counts are integers and the order of slots is
fixed: maps are equal in every run, without atomics.

Bytes moved: a few times 4 * (T * K + N). Launches and dependent steps, not bandwidth, determine the time.
"""

import triton
import triton.language as tl

__all__ = ["count_kernel", "maps_kernel", "mask_to_ids_kernel", "offsets_kernel", "prefix_kernel", "route_kernel"]


# ---- parts of kernels


@triton.jit
def _experts_of(ids, slots, inside, num_experts, K, DEDUPE: tl.constexpr):
    """Experts of slots; -1 for ids out of range and, with DEDUPE, for ids of an earlier slot of the token."""
    raw = tl.load(ids + slots, mask=inside, other=-1)
    valid = (raw >= 0) & (raw < num_experts)
    if DEDUPE:
        k = slots % K
        for back in range(1, K):
            earlier = tl.load(ids + slots - back, mask=inside & (k >= back), other=-1)
            valid = valid & (earlier != raw)
    return tl.where(valid, raw, -1).to(tl.int32)


@triton.jit
def _histogram(experts, first, BINS: tl.constexpr):
    """Counts of the experts first, first + 1, ..., as int32 [BINS]."""
    local = experts - first
    mine = (experts >= 0) & (local >= 0) & (local < BINS)
    others = tl.sum((~mine).to(tl.int32), axis=0)
    counts = tl.histogram(tl.where(mine, local, 0), BINS)
    return counts - tl.where(tl.arange(0, BINS) == 0, others, 0)


@triton.jit
def _write_segments(
    totals, slots, num_experts, alignment, num_rows, starts, sizes, COUNTED: tl.constexpr, BINS: tl.constexpr
):
    """Start and size of every expert's segment, and the number of dropped slots; BINS experts per iteration.

    Slots per expert are read from ``totals`` if COUNTED, otherwise counted in ``slots``, which are all experts.
    ``sizes``: tokens_per_expert, expert_offsets, routed_per_expert and overflow of the plan.
    """
    tokens_per_expert, expert_offsets, routed_per_expert, overflow = sizes
    base = tl.zeros([], tl.int64)
    dropped = tl.zeros([], tl.int64)
    for first in range(0, num_experts, BINS):
        experts = first + tl.arange(0, BINS)
        mine = experts < num_experts
        if COUNTED:
            routed = tl.load(totals + experts, mask=mine, other=0).to(tl.int64)
        else:
            routed = _histogram(slots, first, BINS).to(tl.int64)
        padded = ((routed + (alignment - 1)) // alignment) * alignment
        segments = base + tl.cumsum(padded, axis=0) - padded
        kept = tl.minimum(tl.maximum(num_rows - segments, 0), routed)
        tl.store(starts + experts, segments, mask=mine)
        tl.store(expert_offsets + experts, tl.minimum(segments, num_rows).to(tl.int32), mask=mine)
        tl.store(tokens_per_expert + experts, kept.to(tl.int32), mask=mine)
        tl.store(routed_per_expert + experts, routed.to(tl.int32), mask=mine)
        base += tl.sum(padded, axis=0)
        dropped += tl.sum(routed - kept, axis=0)
    tl.store(starts + num_experts, base)
    tl.store(expert_offsets + num_experts, tl.minimum(base, num_rows).to(tl.int32))
    tl.store(overflow, dropped.to(tl.int32))


@triton.jit
def _write_maps(
    first,
    experts_of_slots,
    before,
    starts,
    probs,
    by_slot,
    by_row,
    rowmap,
    num_slots,
    num_experts,
    num_rows,
    K,
    HAS_BEFORE: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    MASK: tl.constexpr,
    HAS_ROWMAP: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    FEW_EXPERTS: tl.constexpr,
):
    """Rows of the slots first .. first + TILE, and every map entry that belongs to them.

    ``by_slot``: slot_to_row and token_rows; ``by_row``: row_to_token, row_to_slot, row_to_expert and row_probs. The
    rank of a slot within its expert is a cumulative sum over a one-hot tile [TILE, FEW_EXPERTS], or with
    FEW_EXPERTS = 0 a count over the tile's earlier slots, STEP per iteration.
    """
    slot_to_row, token_rows = by_slot
    row_to_token, row_to_slot, row_to_expert, row_probs = by_row
    index = tl.arange(0, TILE)
    slots = first + index
    inside = slots < num_slots
    experts = tl.load(experts_of_slots + slots, mask=inside, other=-1)
    live = experts >= 0
    token = slots // K
    k = slots - token * K

    if FEW_EXPERTS > 0:
        is_expert = (experts[:, None] == tl.arange(0, FEW_EXPERTS)[None, :]).to(tl.int32)
        rank = tl.sum(is_expert * (tl.cumsum(is_expert, axis=0) - 1), axis=1)
    else:
        rank = tl.zeros([TILE], tl.int32)
        for step in range(0, TILE, STEP):
            others = step + tl.arange(0, STEP)
            theirs = tl.load(experts_of_slots + first + others, mask=first + others < num_slots, other=-1)
            same = (theirs[None, :] == experts[:, None]) & (others[None, :] < index[:, None])
            rank += tl.sum(same.to(tl.int32), axis=1)
    row = tl.load(starts + experts, mask=live, other=0) + rank
    if HAS_BEFORE:
        row += tl.load(before + experts, mask=live, other=0)
    fits = live & (row < num_rows)
    row = tl.where(fits, row, -1)
    row32 = row.to(tl.int32)

    # Rows of a token ascend with its experts, so a row's place follows from the ids. Dropped rows are last.
    place = tl.zeros([TILE], tl.int32)
    for j in range(K):
        theirs = tl.load(experts_of_slots + token * K + j, mask=inside, other=-1)
        ahead_of_live = (theirs >= 0) & ((theirs < experts) | ((theirs == experts) & (j < k)))
        place += tl.where(live, ahead_of_live, (theirs >= 0) | (j < k)).to(tl.int32)
    tl.store(slot_to_row + slots, row32, mask=inside)
    tl.store(token_rows + token * K + place, row32, mask=inside)
    tl.store(row_to_token + row, token, mask=fits)
    tl.store(row_to_slot + row, slots, mask=fits)
    tl.store(row_to_expert + row, experts, mask=fits)
    if HAS_PROBS:
        source = token.to(tl.int64) * num_experts + experts if MASK else slots.to(tl.int64)
        tl.store(row_probs + row, tl.load(probs + source, mask=fits, other=0), mask=fits)
    if HAS_ROWMAP:
        tl.store(rowmap + token.to(tl.int64) * num_experts + experts, row32, mask=fits)


@triton.jit
def _write_padding(
    first, starts, routed_per_expert, by_row, num_experts, num_rows, HAS_PROBS: tl.constexpr, ROWS: tl.constexpr
):
    """Store -1 and 0 for those of the rows first .. first + ROWS that no slot has."""
    row_to_token, row_to_slot, row_to_expert, row_probs = by_row
    rows = first + tl.arange(0, ROWS)
    low = tl.zeros([ROWS], tl.int32)
    high = tl.zeros([ROWS], tl.int32) + num_experts
    width = num_experts
    while width > 0:  # binary search: the last of E + 1 starts at or before the row
        middle = (low + high + 1) // 2
        reached = tl.load(starts + middle) <= rows
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, tl.maximum(middle - 1, low))
        width = width // 2
    in_segment = low < num_experts
    routed = tl.load(routed_per_expert + low, mask=in_segment, other=0)
    padding = (rows - tl.load(starts + low) >= routed) & (rows < num_rows)
    none = tl.full([ROWS], -1, tl.int32)
    tl.store(row_to_token + rows, none, mask=padding)
    tl.store(row_to_slot + rows, none, mask=padding)
    tl.store(row_to_expert + rows, none, mask=padding)
    if HAS_PROBS:
        tl.store(row_probs + rows, none + 1, mask=padding)


# ---- kernels


@triton.jit
def mask_to_ids_kernel(mask, ids, num_tokens, num_experts, K, BLOCK: tl.constexpr):
    """One program per token: its first K set experts, ascending, then -1."""
    token = tl.program_id(0)
    found = 0
    for first in range(0, num_experts, BLOCK):
        experts = first + tl.arange(0, BLOCK)
        row = mask + token.to(tl.int64) * num_experts
        is_set = (tl.load(row + experts, mask=experts < num_experts, other=0) != 0).to(tl.int32)
        place = found + tl.cumsum(is_set, axis=0) - is_set
        tl.store(ids + token * K + place, experts, mask=(is_set != 0) & (place < K))
        found += tl.sum(is_set, axis=0)
    for first in range(0, K, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(ids + token * K + place, tl.full([BLOCK], -1, tl.int32), mask=(place >= found) & (place < K))


@triton.jit
def count_kernel(
    ids,
    experts_of_slots,
    before,
    rowmap,
    num_slots,
    num_experts,
    num_tiles,
    K,
    rowmap_size,
    DEDUPE: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    FILL: tl.constexpr,
):
    """One program per tile; programs beyond write -1 to FILL entries of the row map."""
    tile = tl.program_id(0)
    if tile < num_tiles:
        slots = tile * TILE + tl.arange(0, TILE)
        inside = slots < num_slots
        experts = _experts_of(ids, slots, inside, num_experts, K, DEDUPE)
        tl.store(experts_of_slots + slots, experts, mask=inside)
        for first in range(0, num_experts, BINS):
            bins = first + tl.arange(0, BINS)
            counts = _histogram(experts, first, BINS)
            tl.store(before + tile.to(tl.int64) * num_experts + bins, counts, mask=bins < num_experts)
    else:
        entries = (tile - num_tiles).to(tl.int64) * FILL + tl.arange(0, FILL)
        tl.store(rowmap + entries, tl.full([FILL], -1, tl.int32), mask=entries < rowmap_size)


@triton.jit
def prefix_kernel(before, totals, num_tiles, num_experts, TILES: tl.constexpr, EXPERTS: tl.constexpr):
    """One program per EXPERTS experts; TILES tiles per iteration."""
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    mine = experts < num_experts
    total = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_tiles, TILES):
        tiles = first + tl.arange(0, TILES)
        entries = before + tiles.to(tl.int64)[:, None] * num_experts + experts[None, :]
        inside = (tiles < num_tiles)[:, None] & mine[None, :]
        counts = tl.load(entries, mask=inside, other=0)
        tl.store(entries, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask=inside)
        total += tl.sum(counts, axis=0)
    tl.store(totals + experts, total, mask=mine)


@triton.jit
def offsets_kernel(
    totals,
    starts,
    tokens_per_expert,
    expert_offsets,
    routed_per_expert,
    overflow,
    num_experts,
    alignment,
    num_rows,
    BINS: tl.constexpr,
):
    """One program: segments of all experts."""
    sizes = tokens_per_expert, expert_offsets, routed_per_expert, overflow
    _write_segments(totals, 0, num_experts, alignment, num_rows, starts, sizes, True, BINS)


@triton.jit
def maps_kernel(
    experts_of_slots,
    before,
    starts,
    routed_per_expert,
    probs,
    slot_to_row,
    token_rows,
    row_to_token,
    row_to_slot,
    row_to_expert,
    row_probs,
    rowmap,
    num_slots,
    num_experts,
    num_tiles,
    K,
    num_rows,
    HAS_PROBS: tl.constexpr,
    MASK: tl.constexpr,
    HAS_ROWMAP: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    FEW_EXPERTS: tl.constexpr,
    FILL: tl.constexpr,
):
    """One program per tile of slots, then one per FILL rows for the padding."""
    tile = tl.program_id(0)
    by_row = row_to_token, row_to_slot, row_to_expert, row_probs
    if tile < num_tiles:
        _write_maps(
            tile * TILE,
            experts_of_slots,
            before + tile.to(tl.int64) * num_experts,
            *(starts, probs, (slot_to_row, token_rows), by_row, rowmap, num_slots, num_experts, num_rows, K, True),
            *(HAS_PROBS, MASK, HAS_ROWMAP, TILE, STEP, FEW_EXPERTS),
        )
    else:
        row = (tile - num_tiles).to(tl.int64) * FILL
        _write_padding(row, starts, routed_per_expert, by_row, num_experts, num_rows, HAS_PROBS, FILL)


@triton.jit
def route_kernel(
    ids,
    probs,
    experts_of_slots,
    starts,
    slot_to_row,
    token_rows,
    row_to_token,
    row_to_slot,
    row_to_expert,
    row_probs,
    tokens_per_expert,
    expert_offsets,
    routed_per_expert,
    overflow,
    rowmap,
    num_slots,
    num_experts,
    K,
    rowmap_size,
    alignment,
    num_rows,
    DEDUPE: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    MASK: tl.constexpr,
    HAS_ROWMAP: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    FEW_EXPERTS: tl.constexpr,
    FILL: tl.constexpr,
):
    """All launches above in one program, for up to TILE slots; barriers replace the ends of launches."""
    slots = tl.arange(0, TILE)
    inside = slots < num_slots
    experts = _experts_of(ids, slots, inside, num_experts, K, DEDUPE)
    tl.store(experts_of_slots + slots, experts, mask=inside)
    if HAS_ROWMAP:
        for first in range(0, rowmap_size, FILL):
            entries = first + tl.arange(0, FILL)
            tl.store(rowmap + entries, tl.full([FILL], -1, tl.int32), mask=entries < rowmap_size)
    sizes = tokens_per_expert, expert_offsets, routed_per_expert, overflow
    _write_segments(experts_of_slots, experts, num_experts, alignment, num_rows, starts, sizes, False, BINS)
    tl.debug_barrier()
    by_row = row_to_token, row_to_slot, row_to_expert, row_probs
    _write_maps(
        *(0, experts_of_slots, experts_of_slots, starts, probs, (slot_to_row, token_rows), by_row, rowmap),
        *(num_slots, num_experts, num_rows, K, False, HAS_PROBS, MASK, HAS_ROWMAP, TILE, STEP, FEW_EXPERTS),
    )
    for first in range(0, num_rows, FILL):
        _write_padding(first, starts, routed_per_expert, by_row, num_experts, num_rows, HAS_PROBS, FILL)
