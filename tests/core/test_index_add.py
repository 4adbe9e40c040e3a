# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""index_add: the oracle's bits for repeated tokens, tokens outside of the part, strided rows and odd addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference import paddlefleet as oracle

from ..pairwise import pairwise
from ..reference.cases import assert_same_numbers, floats_of_every_kind, ordinary_floats
from .binding import Core
from .operators.index_add import BFLOAT16, index_add

FLOAT32 = np.dtype(np.float32)
# Rows, tokens and columns; the last ones take one number, or eight at a time on a GPU.
SHAPES = [(1, 1, 1), (5, 9, 7), (63, 64, 72), (200, 3, 40), (257, 1025, 136), (0, 4, 8), (3, 0, 8), (3, 4, 0)]
INDICES = {
    "mostly different": lambda rng, rows, tokens: (
        rng.permutation(np.arange(max(rows, tokens)))[:rows] % max(tokens + 2, 1) - 1
    ),
    "any": lambda rng, rows, tokens: rng.integers(-2, tokens + 2, rows),
    "one token": lambda rng, rows, tokens: np.full(rows, tokens // 2),
    "none": lambda rng, rows, tokens: rng.choice([-1, tokens, 2**31 - 1, -(2**31)], rows),
}


def expected(rows: NDArray, index: NDArray, tokens: NDArray, first: int = 0) -> NDArray:
    lines = index.astype(np.int64) - first
    inside = (index >= first) & (lines < len(tokens))
    return oracle.tokens_zip_unique_add(tokens, rows, np.where(inside, lines, -1))


@pairwise(
    {
        "shape": SHAPES,
        "kind": {"ordinary": ordinary_floats, "every kind": floats_of_every_kind},
        "indices": INDICES,
        "dtypes": [(FLOAT32, FLOAT32), (FLOAT32, BFLOAT16), (BFLOAT16, BFLOAT16)],
        "index_dtype": [np.int32, np.int64],
        "first": [0, 2],
        "has_odd_address": [False, True],
        "threads": [1, 3],
    }
)
def test_sums_are_those_of_the_oracle(
    core: Core,
    shape: tuple[int, int, int],
    kind: Any,
    indices: Any,
    dtypes: tuple[np.dtype, np.dtype],
    index_dtype: DTypeLike,
    first: int,
    has_odd_address: bool,
    threads: int,
) -> None:
    num_rows, num_tokens, hidden = shape
    tokens, rows = kind((num_tokens, hidden), dtypes[0], seed=1), kind((num_rows, hidden), dtypes[1], seed=2)
    index = indices(np.random.default_rng(num_rows), num_rows, num_tokens).astype(index_dtype)
    odd = dtypes[0].itemsize if has_odd_address else 0
    got = index_add(core, rows, index, tokens, first_token=first, num_threads=threads, odd_outputs=odd)
    with np.errstate(invalid="ignore"):  # NaN that signal
        assert_same_numbers(got, expected(rows, index, tokens, first))


def test_rows_may_lie_apart(core: Core) -> None:
    rows = ordinary_floats((9, 40), BFLOAT16, seed=3)[:, 8:32]
    tokens, index = ordinary_floats((4, 24), FLOAT32, seed=4), np.arange(9, dtype=np.int32) % 5
    assert_same_numbers(index_add(core, rows, index, tokens), expected(rows, index, tokens))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_tokens_without_rows_keep_their_bits(core: Core, dtype: np.dtype) -> None:
    tokens = floats_of_every_kind((64, 16), dtype, seed=5)
    got = index_add(core, np.ones((2, 16), dtype), np.array([7, 7]), tokens)
    others = np.arange(64) != 7
    assert (got.view(np.uint8)[others] == tokens.view(np.uint8)[others]).all()
