# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Chunks and foreign maps of the oracle, against examples worked out by hand and plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_moe_ops import reference

from .cases import EXAMPLES


def test_chunks_change_places_and_the_tail_stays() -> None:
    x = np.arange(8)[:, None]
    out, probs, source_to_dest = reference.sort_chunks(x, np.array([1, 0, 2, 3]), np.array([3, 2, 1, 0]), x[:, 0])
    assert out.ravel().tolist() == [3, 4, 5, 1, 2, 0, 6, 7]
    assert probs is not None
    assert probs.tolist() == out.ravel().tolist()
    assert source_to_dest.tolist() == [5, 3, 4, 0, 1, 2, 6, 7]
    assert reference.sort_chunks_backward(out, source_to_dest).tolist() == x.tolist()


@EXAMPLES
@given(sizes=st.lists(st.integers(0, 5), max_size=6), tail=st.integers(0, 3), data=st.data())
def test_chunks_are_joined_as_lists_are(sizes: list[int], tail: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    chunks = [[(chunk, i) for i in range(size)] for chunk, size in enumerate(sizes)]
    rows = [row for chunk in chunks for row in chunk] + [(-1, i) for i in range(tail)]
    joined = [row for chunk in order for row in chunks[chunk]] + [(-1, i) for i in range(tail)]
    arrays = np.array(sizes, np.int64), np.array(order, np.int64)
    source_to_dest = reference.chunk_sort_map(*arrays, len(rows))
    assert [rows.index(row) for row in joined] == np.argsort(source_to_dest).tolist()


def test_bad_chunks_count_as_documented_without_validation() -> None:
    sizes, order = np.array([2, -5, 9, 1]), np.array([7, 2, 2, -1])
    # chunk 2 is cut at row 6, chunk 3 is empty; 2 is named, the others follow
    assert reference.chunk_sort_map(sizes, order, 6, validate=False).tolist() == [4, 5, 0, 1, 2, 3]
    # 4 is the first that names no chunk
    assert reference.chunk_sort_map(sizes, np.array([4, 2, 0, 1]), 6, validate=False).tolist() == [4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "order", "text"),
    [
        ([2, -1], [0, 1], "split_sizes must hold no negative numbers, but entry 1 is -1"),
        (
            [2, 3],
            [0, 1],
            "split_sizes must add up to at most 4, the number of rows, but the sum exceeds this at entry 1",
        ),
        ([2, 2], [0, 2], "sorted must hold chunks in [0, 2), but entry 1 is 2"),
        ([2, 2], [1, 1], "sorted must name every chunk once, but names chunk 1 in entries 0 and 1"),
    ],
)
def test_bad_chunks_raise(sizes: list[int], order: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=r"^f: ") as caught:
        reference.chunk_sort_map(np.array(sizes), np.array(order), 4, function="f", order_name="sorted")
    assert str(caught.value) == f"f: {text}"


def test_rows_alone_come_without_probabilities() -> None:
    x = np.arange(4.0, dtype=np.float32)[:, None]
    out, probs, source_to_dest = reference.sort_chunks(x, np.array([1, 3]), np.array([1, 0]))
    assert (out[:, 0].tolist(), probs, source_to_dest.tolist()) == ([1, 2, 3, 0], None, [3, 0, 1, 2])


def test_row_id_map_lists_rows_and_experts_descending() -> None:
    token_rows, row_to_expert = np.array([[0, 4, -1], [-1, -1, -1], [2, 3, 5]]), np.array([0, -1, 1, 1, 2, 2])
    row_id_map = reference.make_row_id_map(token_rows, row_to_expert, 3)
    assert row_id_map.tolist() == [
        [4, 0, -1, 2, 0, -1, 2],
        [-1, -1, -1, -1, -1, -1, 0],
        [5, 3, 2, 2, 1, 1, 3],
    ]
    unpadded = reference.make_row_id_map(token_rows[:1], row_to_expert, 3, np.array([0, 1, 2]))
    assert unpadded.tolist() == [[2, 0, -1, 2, 0, -1, 2]]
    assert reference.row_id_map_to_rowmap(unpadded, np.array([0, 1, 2])).tolist() == [[0, -1, 4]]
    assert reference.row_id_map_to_rowmap(row_id_map).tolist() == [[0, -1, 4], [-1, -1, -1], [-1, 3, 5]]


def test_offsets_of_padding_leave_entries_without_a_row_alone() -> None:
    row_id_map = np.array([[4, -1, -1, 2, 0, -1, 2]])  # of the two rows that it counts one is none
    assert reference.row_id_map_to_rowmap(row_id_map, np.array([3, 1, 2])).tolist() == [[-1, -1, 6]]


def test_maps_of_a_rowmap() -> None:
    maps = reference.read_rowmap(np.array([[2, 9, -3], [-1, 0, 2]]), 4)
    assert maps.slot_to_row.tolist() == [[2, -1, -1], [-1, 0, -1]]
    assert maps.token_rows.tolist() == [[2, -1, -1], [0, -1, -1]]
    assert maps.row_to_token.tolist() == [1, -1, 0, -1]
    assert maps.row_to_slot.tolist() == [4, -1, 0, -1]
    assert maps.row_to_expert.tolist() == [1, -1, 0, -1]
    values = np.array([[1.0, 2, 3], [4, 5, 6]])
    assert reference.slots_to_rows(values, maps.slot_to_row, 4).tolist() == [5, 0, 1, 0]
    assert reference.rows_to_slots(np.array([7.0, 8, 9, 10]), maps.slot_to_row).tolist() == [[9, 0, 0], [0, 7, 0]]
