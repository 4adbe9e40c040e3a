# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Chunks of rows in another order: out is the concatenation of the chunks order[0], order[1], ...

One program finds where every chunk begins and how far it moves; then a row finds its chunk by binary search (map
kernel) and moves as in `permute` with one slot per token, forward along the map, backward as in `unpermute` against it.
Rows beyond the chunks stay where they are. Moves 2 * R * H * itemsize bytes and 4 * R of map twice.
"""

from typing import Any

import triton
import triton.language as tl

from .launching import Array, Device, address, blocks, next_power_of_2
from .permute import permute
from .unpermute import unpermute

__all__ = ["chunk_map", "sort_chunks", "sort_chunks_backward"]

_ROWS = 1024
_CHUNKS = 1024


@triton.jit
def chunks_kernel(split_sizes, order, starts, shifts, num_chunks, BLOCK: tl.constexpr):
    """One program: starts [C + 1] of the chunks, and shifts [C], how far each moves. Both int64."""
    base = tl.zeros([], tl.int64)
    for first in range(0, num_chunks, BLOCK):
        chunks = first + tl.arange(0, BLOCK)
        inside = chunks < num_chunks
        sizes = tl.maximum(tl.load(split_sizes + chunks, mask=inside, other=0), 0).to(tl.int64)
        tl.store(starts + chunks, base + tl.cumsum(sizes, axis=0) - sizes, mask=inside)
        base += tl.sum(sizes, axis=0)
    tl.store(starts + num_chunks, base)
    tl.debug_barrier()
    base = tl.zeros([], tl.int64)
    for first in range(0, num_chunks, BLOCK):
        places = first + tl.arange(0, BLOCK)
        chunk = tl.load(order + places, mask=places < num_chunks, other=-1).to(tl.int32)
        valid = (chunk >= 0) & (chunk < num_chunks)
        sizes = tl.maximum(tl.load(split_sizes + chunk, mask=valid, other=0), 0).to(tl.int64)
        target = base + tl.cumsum(sizes, axis=0) - sizes
        tl.store(shifts + chunk, target - tl.load(starts + chunk, mask=valid, other=0), mask=valid)
        base += tl.sum(sizes, axis=0)


@triton.jit
def chunk_map_kernel(starts, shifts, source_to_dest, num_rows, num_chunks, BLOCK: tl.constexpr):
    """One program per BLOCK rows."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + num_chunks
    width = num_chunks
    while width > 0:  # the last of the C + 1 starts that is not beyond the row
        middle = (low + high + 1) // 2
        reached = tl.load(starts + middle) <= rows
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, tl.maximum(middle - 1, low))
        width = width // 2
    shift = tl.load(shifts + low, mask=low < num_chunks, other=0).to(tl.int32)
    target = rows + shift
    valid = (target >= 0) & (target < num_rows)
    tl.store(source_to_dest + rows, tl.where(valid, target, -1), mask=inside)


def chunk_map(device: Device, split_sizes: Array, order: Array, num_rows: int) -> Any:
    """int32 [R]: where each row goes.

    Args:
        device: where to.
        split_sizes: int32 or int64 [C] rows of each chunk, as they follow each other in the input.
        order: int32 or int64 [C], a permutation of the chunks. Otherwise rows go astray, though never out of bounds.
        num_rows: R. Rows beyond the sum of split_sizes map to themselves.
    """
    num_chunks = split_sizes.shape[0]
    source_to_dest = device.empty([num_rows], "int32")
    starts, shifts = device.empty([num_chunks + 1], "int64"), device.empty([max(num_chunks, 1)], "int64")
    pointers = {"int32": "*i32", "int64": "*i64"}
    device.launch(
        chunks_kernel,
        1,
        (*(pointers[device.dtype_name(each)] for each in (split_sizes, order)), "*i64", "*i64", "i32"),
        (*map(address, (split_sizes, order, starts, shifts)), num_chunks),
        (min(max(next_power_of_2(num_chunks), 32), _CHUNKS),),
        4,
    )
    if num_rows:
        device.launch(
            chunk_map_kernel,
            blocks(num_rows, _ROWS),
            ("*i64", "*i64", "*i32", "i32", "i32"),
            (*map(address, (starts, shifts, source_to_dest)), num_rows, num_chunks),
            (_ROWS,),
            4,
        )
    return source_to_dest


def sort_chunks(device: Device, x: Array, probs: Array | None, source_to_dest: Array) -> tuple[Any, Any]:
    """out [R, H] and probs_out [R] or None: row i goes to source_to_dest[i]."""
    num_rows = source_to_dest.shape[0]
    column = None if probs is None else device.reshape(probs, [num_rows, 1])
    slots = device.reshape(source_to_dest, [num_rows, 1])
    out, probs_out = permute(device, x, column, slots, source_to_dest, "none")
    return out, None if probs_out is None else device.reshape(probs_out, [num_rows])


def sort_chunks_backward(
    device: Device, d_out: Array, d_probs_out: Array | None, source_to_dest: Array
) -> tuple[Any, Any]:
    """The gradients of x (not float8) and probs: row source_to_dest[i] comes back to i. A copy, bit for bit."""
    num_rows = source_to_dest.shape[0]
    slots = device.reshape(source_to_dest, [num_rows, 1])
    d_x = unpermute(device, d_out, slots)
    if d_probs_out is None:
        return d_x, None
    d_probs = unpermute(device, device.reshape(d_probs_out, [num_rows, 1]), slots)
    return d_x, device.reshape(d_probs, [num_rows])
