# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""unpermute of tokens with more entries than a warp has lanes: rows among entries that are out of range."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..pairwise import in_turn
from ..reference.cases import assert_same_numbers, ordinary_floats
from .binding import Core
from .cases import INT32
from .operators.unpermute import unpermute

# Many accesses, and fewer than four rows per token: on a GPU these are summed by tiles of tokens.
T, H, N = 1031, 1025, 1500
EDGES = 0, 1, 31, 32, 33, 63, 64, 65
ROWS = 0, 1, 2  # of a token
BAD = INT32.min, -7, N, INT32.max


def long_tokens(columns: int, seed: int) -> tuple[NDArray, NDArray]:
    """Maps of [T, columns] with bad entries before, between and after the rows, and the same rows without them."""
    rng = np.random.default_rng(seed)
    token_rows, good_rows = np.full((T, columns), -1, np.int32), np.full((T, max(ROWS)), -1, np.int32)
    shapes = itertools.cycle(itertools.product(ROWS, EDGES, EDGES, [False, True]))
    for token, (count, before, behind, is_split) in zip(range(T), shapes, strict=False):
        rows = np.sort(rng.choice(N, count, replace=False)).astype(np.int32)
        parts = [rng.choice(BAD, before), rows, rng.choice(BAD, behind)]
        if is_split:  # the first row, bad entries, the second
            parts = [rng.choice(BAD, before), rows[:1], rng.choice(BAD, behind), rows[1:]]
        entries = np.concatenate(parts)[:columns]
        token_rows[token, : len(entries)] = entries
        kept = entries[(entries >= 0) & (entries < N)]
        good_rows[token, : len(kept)] = kept
    return token_rows, good_rows


@in_turn({"columns": [32, 33, 64, 66, 97, 132], "dtype": [np.float32, ml_dtypes.bfloat16]})
def test_bad_entries_take_nothing_from_the_rows_of_a_token(core: Core, columns: int, dtype: DTypeLike) -> None:
    token_rows, good_rows = long_tokens(columns, seed=columns)
    rows = ordinary_floats((N, H), dtype, seed=1)
    weights = np.random.default_rng(2).standard_normal(N).astype(np.float32)
    plain, weighted = reference.sum_rows(rows, good_rows), reference.sum_rows(rows, good_rows, weights)
    assert_same_numbers(unpermute(core, rows, token_rows), plain)
    assert_same_numbers(unpermute(core, rows, token_rows, weights), weighted)
    single = np.count_nonzero(good_rows >= 0, axis=1) == 1
    weighted[single] = plain[single]
    assert_same_numbers(unpermute(core, rows, token_rows, weights, copy_single_row=True), weighted)
