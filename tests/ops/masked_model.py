# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Masks, and where their rows must be: what TransformerEngine documents of its maps, by loops over tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops import reference

T, H, E = 63, 24, 7


class Model(NamedTuple):
    """A mask and the rows it leads to, expert by expert, each from a multiple of the alignment on."""

    mask: NDArray
    rowmap: NDArray  # [T, E], -1 = none
    counts: NDArray
    starts: NDArray  # [E + 1]

    @property
    def pad_offsets(self) -> NDArray:
        return (self.starts[:-1] - (np.cumsum(self.counts) - self.counts)).astype(np.int32)

    def row_id_map(self, pad_offsets: NDArray | None = None) -> NDArray:
        """The documented layout; entries that are not used are -1."""
        tokens, experts = self.mask.shape
        table = np.full((tokens, 2 * experts + 1), -1, np.int32)
        for token in range(tokens):
            chosen = [expert for expert in range(experts - 1, -1, -1) if self.rowmap[token, expert] >= 0]
            for place, expert in enumerate(chosen):
                table[token, place] = self.rowmap[token, expert] - (0 if pad_offsets is None else pad_offsets[expert])
                table[token, experts + place] = expert
            table[token, -1] = len(chosen)
        return table

    def token_rows(self) -> NDArray:
        return reference.rowmap_to_token_rows(self.rowmap, 1 << 30)

    def permuted(self, values: NDArray, num_rows: int) -> NDArray:
        """values [T, ...] or, by pair, [T, E], at their rows."""
        rows = np.zeros((num_rows, *values.shape[1:]), values.dtype)
        for token, expert in np.argwhere(self.rowmap >= 0):
            rows[self.rowmap[token, expert]] = values[token]
        return rows

    def permuted_pairs(self, pairs: NDArray, num_rows: int) -> NDArray:
        rows = np.zeros(num_rows, pairs.dtype)
        rows[self.rowmap[self.rowmap >= 0]] = pairs[self.rowmap >= 0]
        return rows

    def pairs(self, by_row: NDArray) -> NDArray:
        pairs = np.zeros(self.rowmap.shape, by_row.dtype)
        pairs[self.rowmap >= 0] = by_row[self.rowmap[self.rowmap >= 0]]
        return pairs

    def combined(self, rows: NDArray, probs: NDArray | None = None) -> NDArray:
        weights = None if probs is None else self.permuted_pairs(probs.astype(np.float32), len(rows))
        return reference.sum_rows(rows, self.token_rows(), weights)


def model_of(mask: NDArray, alignment: int = 1, limit: int = 1 << 30) -> Model:
    counts = mask.sum(axis=0)
    starts = np.concatenate([[0], np.cumsum(-(-counts // alignment) * alignment)])
    ranks = np.cumsum(mask, axis=0) - 1
    rows = starts[:-1] + ranks
    return Model(mask, np.where(mask & (rows < limit), rows, -1).astype(np.int32), counts, starts)


def masks(rng):
    """Uneven experts, one of them empty, tokens without any; and no tokens at all."""
    mask = rng.random((T, E)) < rng.random(E)
    mask[:, 3] = False
    mask[5] = False
    return mask, mask[:0], np.ones((1, 1), np.bool_)
