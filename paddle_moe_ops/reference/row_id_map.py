# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's row_id_map from a plan, and the maps of a plan from it or from a row map [T, E].

Line t of a row_id_map int32 [T, 2E + 1]: column 2E holds n, the rows of the token; columns [0, n) hold these rows in
descending order, columns [E, E + n) their experts. The rest is -1 here and not read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .paddle_api import rowmap_to_token_rows, usable_rowmap
from .routing import take_or_zero

__all__ = ["RowMaps", "make_row_id_map", "read_rowmap", "row_id_map_to_rowmap", "rows_to_slots", "slots_to_rows"]

_NO_SUCH_ROW = np.iinfo(np.int32).max


class RowMaps(NamedTuple):
    """The maps of a plan whose slot e is expert e: slot_to_row and token_rows [T, E], the others [N]; -1 = none."""

    slot_to_row: NDArray
    token_rows: NDArray
    row_to_token: NDArray
    row_to_slot: NDArray
    row_to_expert: NDArray


def make_row_id_map(
    token_rows: NDArray, row_to_expert: NDArray, num_experts: int, pad_offsets: NDArray | None = None
) -> NDArray:
    """Return the row_id_map of a plan.

    Args:
        token_rows: int [T, K] of the plan. A token that has more than E rows (duplicates="each") keeps its first E.
        row_to_expert: int [N] of the plan.
        num_experts: E.
        pad_offsets: int [E], subtracted from the rows of each expert, for a map that does not count padding.

    Returns:
        int32 [T, 2E + 1].
    """
    row_id_map = np.full((len(token_rows), 2 * num_experts + 1), -1, np.int32)
    for line, slots in zip(row_id_map, token_rows, strict=True):
        rows = slots[slots >= 0][:num_experts][::-1]
        ids = row_to_expert[rows]
        line[: len(rows)] = rows if pad_offsets is None else rows - pad_offsets[ids]
        line[num_experts : num_experts + len(rows)] = ids
        line[-1] = len(rows)
    return row_id_map


def row_id_map_to_rowmap(row_id_map: NDArray, pad_offsets: NDArray | None = None) -> NDArray:
    """Return the row map int32 [T, E] of a row_id_map: the row of each pair, negative = none.

    Args:
        row_id_map: int32 [T, 2E + 1]. Counts are clamped to [0, E], experts out of range are ignored, and of
            several entries at one expert the first counts.
        pad_offsets: int [E], added to the rows of each expert.

    Returns:
        the row map; rows are not checked, but for those that 31 bits do not hold: these are 2^31 - 1.
    """
    experts = row_id_map.shape[1] // 2
    rowmap = np.full((len(row_id_map), experts), -1, np.int32)
    for line, entries in zip(rowmap, row_id_map, strict=True):
        count = np.clip(entries[-1], 0, experts)
        for row, expert in zip(entries[:count][::-1], entries[experts : experts + count][::-1], strict=True):
            if 0 <= expert < experts:
                padded = int(row) + (0 if pad_offsets is None or row < 0 else int(pad_offsets[expert]))
                line[expert] = row if row < 0 else padded if 0 <= padded < _NO_SUCH_ROW else _NO_SUCH_ROW
    return rowmap


def read_rowmap(
    rowmap: NDArray,
    num_rows: int,
    *,
    check_range: bool = False,
    check_repeats: bool = False,
    function: str = "read_rowmap",
    name: str = "row_id_map",
) -> RowMaps:
    """Return the maps that a row map stands for.

    Args:
        rowmap: int [T, E]. Entries outside [0, N), and rows that an earlier entry names, count as -1.
        num_rows: N.
        check_range: entries outside [-1, N) raise.
        check_repeats: repeated rows raise.
        function: name that starts an error text.
        name: the caller's name for ``rowmap``.

    Returns:
        the maps.

    Raises:
        ValueError: an entry out of range, or else a repeated row, as far as it is asked for.
    """
    usable = usable_rowmap(
        rowmap, num_rows, check_range=check_range, check_repeats=check_repeats, function=function, name=name
    )
    tokens, experts = np.nonzero(usable >= 0)
    maps = np.full((3, num_rows), -1, np.int32)
    maps[:, usable[tokens, experts]] = tokens, tokens * rowmap.shape[1] + experts, experts
    return RowMaps(usable, rowmap_to_token_rows(usable, num_rows, validate=False), *maps)


def slots_to_rows(slot_values: NDArray, slot_to_row: NDArray, num_rows: int) -> NDArray:
    """Return [N]: the value [T, K] of the slot that each row belongs to, 0 without one."""
    row_values = np.zeros(num_rows, slot_values.dtype)
    live = slot_to_row >= 0
    row_values[slot_to_row[live]] = slot_values[live]
    return row_values


def rows_to_slots(row_values: NDArray, slot_to_row: NDArray) -> NDArray:
    """Return [T, K]: the value [N] of each slot's row, 0 without one."""
    return take_or_zero(row_values, slot_to_row)
