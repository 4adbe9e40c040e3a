# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Reordering a buffer that is a sequence of chunks of rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["chunk_sort_map", "sort_chunks", "sort_chunks_backward"]


def chunk_sort_map(
    split_sizes: NDArray,
    order: NDArray,
    num_rows: int,
    *,
    validate: bool | None = None,
    function: str = "sort_chunks",
    order_name: str = "order",
) -> NDArray:
    """Return int32 [R]: the new place of every row when the chunks are in another order.

    Args:
        split_sizes: int [C] rows of each chunk. Negative sizes count as 0; chunks end at row R.
        order: int [C] the chunks in their new order. Entries that name no chunk, or one that was named before, are
            ignored; chunks that are not named follow the others, ascending.
        num_rows: R; rows after the last chunk keep their places.
        validate: None or True: such sizes and entries raise.
        function: name that starts an error text.
        order_name: the caller's name for ``order``.

    Returns:
        the map, a permutation of [0, R).

    Raises:
        ValueError: bad sizes, then bad entries of the order.
    """
    if validate is not False:
        _check_sizes(split_sizes, num_rows, function)
        _check_order(order, function, order_name)
    num_chunks = len(split_sizes)
    # Python's integers, because sums of 64-bit sizes may leave 64 bits
    ends, end = [], 0
    for size in split_sizes.tolist():
        end = min(end + max(size, 0), num_rows)
        ends.append(end)
    starts = [0, *ends][:num_chunks]
    named = [chunk for chunk in order.tolist() if 0 <= chunk < num_chunks]
    chunks = list(dict.fromkeys([*named, *range(num_chunks)]))
    sources = [np.arange(starts[chunk], ends[chunk]) for chunk in chunks]
    dest_to_source = np.concatenate([*sources, np.arange(end, num_rows)])
    source_to_dest = np.empty(num_rows, np.int32)
    source_to_dest[dest_to_source] = np.arange(num_rows)
    return source_to_dest


def sort_chunks(
    x: NDArray,
    split_sizes: NDArray,
    order: NDArray,
    probs: NDArray | None = None,
    *,
    validate: bool | None = None,
) -> tuple[NDArray, NDArray | None, NDArray]:
    """Put the chunks of a buffer into another order.

    Args:
        x: [R, H], any dtype; bits are copied.
        split_sizes: as in `chunk_sort_map`.
        order: as in `chunk_sort_map`.
        probs: [R] values that are permuted with the rows, or None.
        validate: as in `chunk_sort_map`.

    Returns:
        the rows [R, H], the probabilities [R] or None, and the map [R].

    Raises:
        ValueError: as in `chunk_sort_map`.
    """
    source_to_dest = chunk_sort_map(split_sizes, order, len(x), validate=validate)
    out = np.empty_like(x)
    out[source_to_dest] = x
    if probs is None:
        return out, None, source_to_dest
    probs_out = np.empty_like(probs)
    probs_out[source_to_dest] = probs
    return out, probs_out, source_to_dest


def sort_chunks_backward(d_out: NDArray, source_to_dest: NDArray) -> NDArray:
    """Return the gradient of ``x``, or of ``probs``: row r is row ``source_to_dest[r]`` of ``d_out``."""
    return d_out[source_to_dest]


def _check_sizes(split_sizes: NDArray, num_rows: int, function: str) -> None:
    rows = 0
    for chunk, size in enumerate(split_sizes.tolist()):
        if size < 0:
            raise ValueError(f"{function}: split_sizes must hold no negative numbers, but entry {chunk} is {size}")
        rows += size
        if rows > num_rows:
            raise ValueError(
                f"{function}: split_sizes must add up to at most {num_rows}, the number of rows, "
                f"but the sum exceeds this at entry {chunk}"
            )


def _check_order(order: NDArray, function: str, name: str) -> None:
    places: dict[int, int] = {}
    for entry, chunk in enumerate(order.tolist()):
        if not 0 <= chunk < len(order):
            raise ValueError(f"{function}: {name} must hold chunks in [0, {len(order)}), but entry {entry} is {chunk}")
        if chunk in places:
            raise ValueError(
                f"{function}: {name} must name every chunk once, "
                f"but names chunk {chunk} in entries {places[chunk]} and {entry}"
            )
        places[chunk] = entry
