# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of tensors: the ranges of global indices that a rank has, or that a file stores.

A rank's tensor may be several blocks: runs of experts, the gate's and the other columns of a split matrix, or a range
of elements that Fleet's sharding gave to the rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["Block", "Box", "Piece", "blocks_of", "cover", "overlap", "part_of", "whole_box"]


class Box(NamedTuple):
    """A range of indices in each dimension.

    Attributes:
        start: the first index of each dimension.
        shape: the number of indices of each dimension.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def within(self, other: Box) -> Box:
        """The same range, counted from the start of another one."""
        return Box(tuple(a - b for a, b in zip(self.start, other.start, strict=True)), self.shape)

    def slices(self) -> Any:
        """The index of an array that selects the range as a view."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True)) or Ellipsis


class Piece(NamedTuple):
    """A part of a rank's tensor that is one range of the global tensor.

    Attributes:
        box: in the rank's tensor.
        offset: the global index of its first element.
    """

    box: Box
    offset: tuple[int, ...]


class Block(NamedTuple):
    """A part of a stored tensor, or of a rank's, that is one range of the global tensor.

    Attributes:
        box: in the global tensor.
        part: in the value, after ``flat``.
        flat: None, or for a value of one dimension the first element and the shape of the elements that contain it.
    """

    box: Box
    part: Box
    flat: tuple[int, tuple[int, ...]] | None = None


def whole_box(shape: Sequence[int]) -> Box:
    """Return the range of all indices of a shape."""
    return Box((0,) * len(shape), tuple(shape))


def overlap(one: Box, other: Box) -> Box | None:
    """Return the indices that two ranges share; None if there are none."""
    start = tuple(map(max, one.start, other.start))
    ends = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    shape = tuple(end - first for end, first in zip(ends, start, strict=True))
    return Box(start, shape) if all(count > 0 for count in shape) else None


def cover(box: Box, blocks: Iterable[Box]) -> tuple[list[tuple[int, Box]], bool]:
    """Divide a range between blocks.

    Args:
        box: the range.
        blocks: may overlap; earlier ones win.

    Returns:
        pairs of a block's number and a part of the range in it; whether the parts are the whole range.
    """
    found, remaining = [], [box] if box.size else []
    for number, block in enumerate(blocks):
        for each in remaining:
            part = overlap(each, block)
            if part is not None:
                found.append((number, part))
        remaining = [rest for each in remaining for rest in _without(each, block)]
        if not remaining:
            break
    return found, not remaining


def _without(box: Box, other: Box) -> Iterator[Box]:
    """The parts of a range that are not in another one."""
    common = overlap(box, other)
    if common is None:
        yield box
        return
    start, shape = list(box.start), list(box.shape)
    for axis, (first, count) in enumerate(zip(*common, strict=True)):
        end = start[axis] + shape[axis]
        for low, high in ((start[axis], first), (first + count, end)):
            if low < high:
                yield Box((*start[:axis], low, *start[axis + 1 :]), (*shape[:axis], high - low, *shape[axis + 1 :]))
        start[axis], shape[axis] = first, count


def blocks_of(pieces: Iterable[Piece], shape: Sequence[int], elements: tuple[int, int] | None = None) -> list[Block]:
    """Return the blocks of a tensor of a rank.

    Args:
        pieces: of the whole tensor of the rank.
        shape: of the whole tensor of the rank.
        elements: None, or the range of its elements that the value contains, which has one dimension.
    """
    boxes: list[tuple[Box, tuple[int, tuple[int, ...]] | None]] = [(whole_box(shape), None)]
    if elements is not None:
        boxes, position = [], 0
        for box in _boxes_of_range(tuple(shape), *elements):
            boxes.append((box, (position, box.shape)))
            position += box.size
    found = []
    for piece in pieces:
        for box, flat in boxes:
            common = overlap(box, piece.box)
            if common is not None:
                start = tuple(map(sum, zip(piece.offset, common.within(piece.box).start, strict=True)))
                found.append(Block(Box(start, common.shape), common.within(box), flat))
    return found


def _boxes_of_range(shape: tuple[int, ...], first: int, end: int) -> list[Box]:
    """The ranges of indices whose elements, one range after the other, are elements ``first`` to ``end``."""
    if first >= end:
        return []
    if len(shape) <= 1:
        return [Box((first,), (end - first,)) if shape else Box((), ())]
    rest, found = shape[1:], []
    size = math.prod(rest)

    def of_row(row: int, start: int, stop: int) -> list[Box]:
        return [Box((row, *box.start), (1, *box.shape)) for box in _boxes_of_range(rest, start, stop)]

    row, column = divmod(first, size)
    if column:
        stop = min(end, (row + 1) * size)
        found += of_row(row, column, stop - row * size)
        first, row = stop, row + 1
    rows = (end - first) // size
    if rows > 0:
        found.append(Box((row, *(0 for _ in rest)), (rows, *rest)))
        first, row = first + rows * size, row + rows
    return found + of_row(row, 0, end - first)


def part_of(value: Any, block: Block) -> Any:
    """Return a block of a tensor or an array, of an array as a view."""
    if block.flat is not None:
        first, shape = block.flat
        value = value[first : first + math.prod(shape)].reshape(shape)
    if block.part == whole_box(value.shape):
        return value
    return value[block.part.slices()]
