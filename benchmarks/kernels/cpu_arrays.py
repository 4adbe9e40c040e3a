# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A problem's inputs in CPU memory; NumPy, Paddle and PyTorch all read the same bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference.permutation import sum_rows, sum_rows_backward

from .inputs import Inputs, pieces
from .problem import SCALE_GROUP, Problem

__all__ = ["BFLOAT16", "FLOAT8", "ArrayInputs", "empty", "memory_needed"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)

# Random numbers repeat after a prime number of elements, so no two rows are alike and drawing costs next to nothing.
_PERIOD = 1_000_003
_CHUNK_ELEMENTS = 1 << 22
_WORKERS = 2
_PAGE = 4096
_POISON = 0xA5


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """An array that begins at a page, as Paddle's tensors of this size do."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.empty(size + _PAGE, np.uint8)
    start = -memory.ctypes.data % _PAGE
    return memory[start : start + size].view(dtype).reshape(shape)


class ArrayInputs(Inputs):
    """The inputs as NumPy arrays."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._sums: dict[bool, tuple[NDArray, NDArray]] = {}

    @cached_property
    def x(self) -> NDArray:
        return self._random(1, self.problem.case.shape.num_tokens)

    @cached_property
    def x_fp8(self) -> NDArray:
        return self._random(4, self.problem.case.shape.num_tokens, FLOAT8)

    @cached_property
    def scale(self) -> NDArray:
        tokens = self.problem.case.shape.num_tokens
        return (np.abs(self.x[:, ::SCALE_GROUP].astype(np.float32)) + 1).reshape(tokens, -1)

    @cached_property
    def rows(self) -> NDArray:
        return self._random(2, self.problem.plan.num_rows)

    @cached_property
    def d_out(self) -> NDArray:
        return self._random(3, self.problem.case.shape.num_tokens)

    def empty(self, *shape: int, dtype: Any = "int32") -> NDArray:
        """Its pages are there."""
        array = empty(shape, dtype)
        np.atleast_1d(array).view(np.uint8)[...] = _POISON
        return array

    def from_numpy(self, array: NDArray) -> NDArray:
        return array

    def to_numpy(self, array: NDArray) -> NDArray:
        return array

    def sums(self, weighted: bool) -> tuple[NDArray, NDArray]:
        """The oracle's sums bfloat16 [T, H], and the sums of the absolute values of their terms, float32."""
        if weighted not in self._sums:
            self._sums[weighted] = self._sum(self.row_probs if weighted else None)
        return self._sums[weighted]

    def scaled(self, rows: slice) -> NDArray:
        """The oracle's gradient of some weighted rows, bfloat16; rows without a token are zeros."""
        tokens = self.problem.plan.row_to_token[rows]
        expected, _ = sum_rows_backward(self.d_out, tokens, None, self.row_probs[rows])
        return expected

    def _sum(self, weights: NDArray | None) -> tuple[NDArray, NDArray]:
        plan, shape = self.problem.plan, self.problem.case.shape
        total = np.empty((shape.num_tokens, shape.hidden), BFLOAT16)
        magnitude = np.empty(total.shape, np.float32)

        def one(tokens: slice) -> None:
            listed = plan.token_rows[tokens]
            total[tokens] = sum_rows(self.rows, listed, weights)
            magnitude[tokens] = 0
            for rank in range(listed.shape[1]):
                row = listed[:, rank]
                terms = np.abs(self.rows[row].astype(np.float32))
                terms *= np.where(row < 0, 0, 1 if weights is None else np.abs(weights[row]))[:, None]
                magnitude[tokens] += terms

        with ThreadPoolExecutor(_WORKERS) as pool:
            list(pool.map(one, pieces(shape.num_tokens, shape.hidden, _CHUNK_ELEMENTS)))
        return total, magnitude

    def _random(self, seed: int, rows: int, dtype: DTypeLike = BFLOAT16) -> NDArray:
        period = np.random.default_rng(seed).standard_normal(_PERIOD, np.float32).astype(dtype)
        matrix = empty((rows, self.problem.case.shape.hidden), dtype)
        flat = matrix.reshape(-1)
        for start in range(0, flat.size, _PERIOD):
            flat[start : start + _PERIOD] = period[: flat.size - start]
        return matrix


def memory_needed(problem: Problem) -> int:
    """Bytes that the largest operation of a problem needs: its inputs, three outputs and the check's arrays."""
    tokens, rows = problem.case.shape.num_tokens, problem.plan.num_rows
    return problem.case.shape.hidden * (5 * rows * BFLOAT16.itemsize + tokens * (3 * BFLOAT16.itemsize + 2 * 4))
