# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every shape that the tests use on purpose, with the reason it exists. Hypothesis draws the others."""

from __future__ import annotations

import copy
import pickle
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

SUM_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
FLOAT8_DTYPES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
ROW_DTYPES = (*SUM_DTYPES, *FLOAT8_DTYPES)

HIDDEN_SIZES = {
    1: "the smallest row: everything is a remainder, no vector fits",
    7: "odd and shorter than a vector: rows of 7, 14 and 28 bytes, none of them aligned",
    72: "not a multiple of 16 lanes, though of 8",
    200: "several vectors and a remainder, two groups of 128 columns of which one is short",
    7168: "DeepSeek-V3 and Kimi-K2: longer than the 512 columns that a sum takes at a time",
}

ALIGNMENTS = {
    1: "no padding",
    2: "the alignment of Paddle's own example",
    16: "tiles of tensor cores",
    128: "the alignment of grouped GEMM; most rows are padding when there are few tokens",
}


class Shape(NamedTuple):
    """One problem in the usual letters: T tokens, H hidden, E experts, K slots per token, A alignment in rows."""

    T: int
    H: int
    E: int
    K: int
    A: int
    reason: str

    def __str__(self) -> str:
        return f"T{self.T}-H{self.H}-E{self.E}-K{self.K}-A{self.A}"


EMPTY = Shape(0, 72, 7, 2, 4, "no token at all: every output is defined and every count is zero")
ONE_TOKEN = Shape(1, 7, 1, 1, 1, "one token, one expert, one slot")
ODD = Shape(63, 72, 7, 2, 1, "no power of two anywhere")
ONE_COLUMN = Shape(37, 1, 5, 3, 2, "rows of one element")
UNALIGNED = Shape(41, 7, 6, 3, 4, "rows that begin at every offset within a vector")
PADDED = Shape(29, 200, 12, 4, 128, "more padding than rows, and segments of padding only")
MANY_EXPERTS = Shape(150, 16, 1024, 8, 2, "more experts than any model has; most are empty")
MANY_SLOTS = Shape(40, 9, 96, 64, 16, "the largest number of slots promised; long sums")
MORE_SLOTS_THAN_EXPERTS = Shape(30, 12, 3, 8, 1, "Paddle's form: one slot per expert and more, most of them -1")
SPARSE = Shape(300, 64, 8, 10, 1, "received under expert parallelism: ten slots, one or two of them valid")
WIDE = Shape(9, 7168, 16, 8, 16, "rows of DeepSeek-V3, eight of its experts per token")
MANY_TOKENS = Shape(5000, 24, 64, 6, 16, "more tokens than any block of a kernel takes")

SHAPES = (
    EMPTY,
    ONE_TOKEN,
    ODD,
    ONE_COLUMN,
    UNALIGNED,
    PADDED,
    MANY_EXPERTS,
    MANY_SLOTS,
    MORE_SLOTS_THAN_EXPERTS,
    SPARSE,
    WIDE,
    MANY_TOKENS,
)
# For tests of threads, apart from SHAPES: many runs, or one that takes long.
SEVERAL_THREADS = Shape(2000, 200, 64, 6, 16, "rows enough for five threads (one per MiB moved) even in two bytes")
LONG_ROUTING = Shape(150_000, 1, 256, 8, 128, "ids enough for several threads, as many as a rank receives")
# Apart from SHAPES: the oracle sums over every column of the row map, one after the other.
MOST_EXPERTS = Shape(6, 3, 65536, 4, 1, "the largest number of experts that is accepted")
# For tests that try many variations of something else than the shape.
SMALL = Shape(23, 20, 5, 3, 2, "small enough for many runs, large enough for empty slots and padding")

COPIES = [
    pytest.param(copy.deepcopy, id="deepcopy"),
    # Paddle pickles a tensor on a custom place, but cannot read it back.
    pytest.param(lambda value: pickle.loads(pickle.dumps(value)), id="pickle", marks=pytest.mark.paddle_kernels),
]
