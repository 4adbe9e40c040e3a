# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of tensors against NumPy: every element of a rank's tensor is in one block, at its place in the global one."""

from __future__ import annotations

import itertools
import json

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_moe_ops.expert_parallel import load_checkpoint, save_checkpoint
from paddle_moe_ops.expert_parallel.blocks import Box, Piece, blocks_of, cover, overlap, part_of, whole_box
from paddle_moe_ops.expert_parallel.tensor_files import DTYPES, ENDING, open_tensors
from paddle_moe_ops.testing.equality import assert_bits_equal

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 5), (1, 4, 1, 3)]


def filled(value, blocks, shape):
    """The global tensor that has the blocks of a value; elements of no block are -1."""
    out, times = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    for block in blocks:
        out[block.box.slices()] = part_of(value, block)
        times[block.box.slices()] += 1
    assert times.max(initial=0) <= 1
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_a_range_of_elements_is_a_few_blocks(shape):
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    piece = Piece(whole_box(shape), (0,) * len(shape))
    for first, end in itertools.combinations_with_replacement(range(whole.size + 1), 2):
        blocks = blocks_of([piece], shape, (first, end))
        expected = np.where((whole >= first) & (whole < end), whole, -1)
        np.testing.assert_array_equal(filled(np.arange(first, end), blocks, shape), expected)
        assert len(blocks) <= max(1, 2 * len(shape) - 1)


def test_pieces_have_their_own_places():
    """Experts 1 and 3 of four, with the second half of the columns of each of two matrices."""
    local = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    pieces = [
        Piece(Box((row, 0, 2 * matrix), (1, 3, 2)), (expert, 0, 4 * matrix + 2))
        for row, expert in enumerate((1, 3))
        for matrix in range(2)
    ]
    expected = np.full((4, 3, 8), -1)
    expected[np.ix_((1, 3), range(3), (2, 3, 6, 7))] = local
    np.testing.assert_array_equal(filled(local, blocks_of(pieces, local.shape), expected.shape), expected)
    in_two = [-1 * np.ones_like(expected)] * 2
    for number, (first, end) in enumerate([(0, 13), (13, 24)]):
        blocks = blocks_of(pieces, local.shape, (first, end))
        in_two[number] = filled(local.reshape(-1)[first:end], blocks, expected.shape)
    np.testing.assert_array_equal(np.maximum(*in_two), expected)


def test_a_range_is_divided_between_blocks_and_gaps_are_found():
    rng, shape = np.random.default_rng(0), (4, 5, 3)
    is_ever_whole = set()
    for _ in range(200):
        starts = [tuple(int(rng.integers(n)) for n in shape) for _ in range(5)]
        boxes = [Box(s, tuple(int(rng.integers(1, n - a + 1)) for a, n in zip(s, shape, strict=True))) for s in starts]
        boxes += [whole_box(shape)] * int(rng.integers(2))
        box, *others = boxes
        parts, is_whole = cover(box, others)
        times, covered = np.zeros(shape, int), np.zeros(shape, bool)
        for each in others:
            covered[each.slices()] = True
        for number, part in parts:
            assert overlap(part, others[number]) == part
            times[part.slices()] += 1
        inside = np.zeros(shape, bool)
        inside[box.slices()] = True
        np.testing.assert_array_equal(times, (inside & covered).astype(int))
        assert is_whole == bool(covered[inside].all())
        is_ever_whole.add(is_whole)
    assert is_ever_whole == {False, True}


def test_boxes_without_elements():
    assert overlap(Box((0,), (2,)), Box((2,), (1,))) is None
    assert cover(Box((0, 0), (0, 3)), []) == ([], True)
    assert cover(Box((0,), (3,)), []) == ([], False)
    assert cover(Box((), ()), [Box((), ())]) == ([(0, Box((), ()))], True)
    assert blocks_of([Piece(whole_box((0, 3)), (0, 0))], (0, 3)) == []


def test_buffers_of_every_dtype_are_loaded_as_they_were(tmp_path):
    saved, loaded = nn.Layer(), nn.Layer()
    for name in DTYPES:
        saved.register_buffer(f"of_{name}", paddle.to_tensor([[0, 1, 1], [1, 0, 1]]).astype(name))
        loaded.register_buffer(f"of_{name}", paddle.zeros([2, 3], name))
    save_checkpoint(tmp_path / "a", saved)
    load_checkpoint(tmp_path / "a", loaded)
    for name, value in saved.named_buffers():
        assert_bits_equal(getattr(loaded, name), value, what=name)


def test_a_file_with_metadata_has_its_tensors(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, values.nbytes]}
    header = json.dumps({"__metadata__": {"format": "np"}, "w": entry}).encode()
    path = tmp_path / f"0_0{ENDING}"
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    (name, found), *others = open_tensors(path).items()
    assert (name, others) == ("w", [])
    np.testing.assert_array_equal(found, values)
