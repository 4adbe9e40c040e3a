# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Chunk sort: reorders chunks of rows; out is the concatenation of the chunks order[0], order[1], ... Memory-bound.

Three launches: chunks_kernel, one program, computes each chunk's start and shift; chunk_map_kernel, BLOCK rows per
program, finds a row's chunk by binary search; then rows move as in `permute` with one slot per token. The backward pass
moves them as in `unpermute` along the same map. Rows beyond the chunks stay in place.

Sizes and orders are not trusted: negative sizes count as 0, chunks end at row R, entries that name no chunk or repeat
one are ignored, and chunks that are not named follow the others, ascending.

Bytes moved: 2 * R * H * itemsize, and 4 * R of the map twice.
"""

from typing import Any

import triton
import triton.language as tl

from ..launch.device import Array, Device, address, cdiv, next_power_of_2
from .permute import permute
from .rowmap import gather_slots
from .unpermute import unpermute

__all__ = ["chunk_map", "sort_chunks", "sort_chunks_backward"]

_ROWS = 1024
_CHUNKS = 1024
_UNNAMED = tl.constexpr(2**31 - 1)


@triton.jit
def _place(starts, shifts, chunk, mask, placed):
    """Place chunks one after the other; return the rows placed so far."""
    start = tl.load(starts + chunk, mask=mask, other=0)
    sizes = tl.load(starts + chunk + 1, mask=mask, other=0) - start
    tl.store(shifts + chunk, placed + tl.cumsum(sizes, axis=0) - sizes - start, mask=mask)
    return placed + tl.sum(sizes, axis=0)


@triton.jit
def chunks_kernel(split_sizes, order, starts, owner, shifts, num_chunks, num_rows, BLOCK: tl.constexpr):
    """One program: starts [C + 1] of the chunks, the order entry that places each [C], and shifts [C]."""
    for first in range(0, num_chunks, BLOCK):
        chunks = first + tl.arange(0, BLOCK)
        tl.store(owner + chunks, tl.zeros([BLOCK], tl.int32) + _UNNAMED, mask=chunks < num_chunks)
    tl.debug_barrier()
    end = tl.zeros([], tl.int64)
    for first in range(0, num_chunks, BLOCK):
        chunks = first + tl.arange(0, BLOCK)
        inside = chunks < num_chunks
        sizes = tl.load(split_sizes + chunks, mask=inside, other=0).to(tl.int64)
        sizes = tl.minimum(tl.maximum(sizes, 0), num_rows)  # keeps sums below 2^63
        start = tl.minimum(end + tl.cumsum(sizes, axis=0) - sizes, num_rows)
        tl.store(starts + chunks, start.to(tl.int32), mask=inside)
        end = tl.minimum(end + tl.sum(sizes, axis=0), num_rows)
        named = tl.load(order + chunks, mask=inside, other=-1)
        tl.atomic_min(owner + named, chunks, mask=(named >= 0) & (named < num_chunks))
    tl.store(starts + num_chunks, end.to(tl.int32))
    tl.debug_barrier()
    placed = 0
    for first in range(0, num_chunks, BLOCK):
        entries = first + tl.arange(0, BLOCK)
        chunk = tl.load(order + entries, mask=entries < num_chunks, other=-1)
        valid = (chunk >= 0) & (chunk < num_chunks)
        counts = valid & (tl.load(owner + chunk, mask=valid, other=-1) == entries)
        placed = _place(starts, shifts, chunk, counts, placed)
    for first in range(0, num_chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        unnamed = tl.load(owner + chunk, mask=chunk < num_chunks, other=-1) == _UNNAMED
        placed = _place(starts, shifts, chunk, unnamed, placed)


@triton.jit
def chunk_map_kernel(starts, shifts, source_to_dest, num_rows, num_chunks, BLOCK: tl.constexpr):
    """One program per BLOCK rows."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + num_chunks
    width = num_chunks
    while width > 0:  # binary search: the last of C + 1 starts at or before the row
        middle = (low + high + 1) // 2
        reached = tl.load(starts + middle) <= rows
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, tl.maximum(middle - 1, low))
        width = width // 2
    shift = tl.load(shifts + low, mask=low < num_chunks, other=0)
    tl.store(source_to_dest + rows, rows + shift, mask=rows < num_rows)


def chunk_map(device: Device, split_sizes: Array, order: Array, num_rows: int) -> Any:
    """int32 [R]: destination of each row, a permutation.

    Args:
        device: allocates and launches.
        split_sizes: int32 or int64 [C], rows of each chunk in input order.
        order: int32 or int64 [C], the chunks in their new order.
        num_rows: R. Rows beyond the chunks map to themselves.
    """
    num_chunks = split_sizes.shape[0]
    source_to_dest = device.empty([num_rows], "int32")
    if not num_rows:
        return source_to_dest
    starts = device.empty([num_chunks + 1], "int32")
    owner, shifts = (device.empty([max(num_chunks, 1)], "int32") for _ in range(2))
    pointers = {"int32": "*i32", "int64": "*i64"}
    device.launch(
        chunks_kernel,
        1,
        (*(pointers[device.dtype_name(each)] for each in (split_sizes, order)), *["*i32"] * 3, "i32", "i32"),
        (*map(address, (split_sizes, order, starts, owner, shifts)), num_chunks, num_rows),
        (min(max(next_power_of_2(num_chunks), 32), _CHUNKS),),
        4,
    )
    device.launch(
        chunk_map_kernel,
        cdiv(num_rows, _ROWS),
        ("*i32", "*i32", "*i32", "i32", "i32"),
        (*map(address, (starts, shifts, source_to_dest)), num_rows, num_chunks),
        (_ROWS,),
        4,
    )
    return source_to_dest


def sort_chunks(device: Device, x: Array, probs: Array | None, source_to_dest: Array) -> tuple[Any, Any]:
    """out [R, H] and probs_out [R] or None: row i moves to source_to_dest[i]."""
    num_rows = source_to_dest.shape[0]
    column = None if probs is None else device.reshape(probs, [num_rows, 1])
    slots = device.reshape(source_to_dest, [num_rows, 1])
    out, probs_out = permute(device, x, column, slots, source_to_dest, "none")
    return out, None if probs_out is None else device.reshape(probs_out, [num_rows])


def sort_chunks_backward(device: Device, gradient: Array, source_to_dest: Array) -> Any:
    """The gradient of x [R, H] (not float8) or of probs [R]: row i is row source_to_dest[i], bit for bit."""
    num_rows = source_to_dest.shape[0]
    slots = device.reshape(source_to_dest, [num_rows, 1])
    if len(gradient.shape) == 1:
        return device.reshape(gather_slots(device, gradient, slots), [num_rows])
    return unpermute(device, gradient, slots)
