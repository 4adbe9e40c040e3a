# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators of PaddleFleet's expert layers, token by token, bit for bit.

T tokens, H hidden size, E experts, K slots of a token, N rows of the permuted buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .arithmetic import add32, round_to, to_float32

__all__ = [
    "merge_subbatch_cast",
    "tokens_unzip_gather",
    "tokens_unzip_slice",
    "tokens_zip_prob",
    "tokens_zip_unique_add",
]


def tokens_unzip_gather(
    x: NDArray,
    x_scale: NDArray | None,
    rowmap: NDArray,
    expert_id: int,
    tokens_per_expert: Sequence[int],
    padding_multiplex: int,
) -> tuple[NDArray, NDArray, NDArray]:
    """Return one expert's rows and scales, with zeros in padding, and int64 [n] tokens of its rows, -1 without one.

    Args:
        x: [T, H].
        x_scale: [T, S] or None.
        rowmap: int32 [T, E].
        expert_id: the expert.
        tokens_per_expert: rows of each expert.
        padding_multiplex: each expert's rows are padded to a multiple of this.
    """
    padded = [-(-count // padding_multiplex) * padding_multiplex for count in tokens_per_expert]
    start = sum(padded[:expert_id])
    rows = np.zeros((padded[expert_id], x.shape[1]), x.dtype)
    scales = np.zeros((0, -(-x.shape[1] // 128)), np.float32)
    if x_scale is not None:
        scales = np.zeros((padded[expert_id], x_scale.shape[1]), x_scale.dtype)
    index = np.full(tokens_per_expert[expert_id], -1, np.int64)
    for token, row in enumerate(rowmap[:, expert_id]):
        if row >= 0:
            rows[row - start] = x[token]
            index[row - start] = token
            if x_scale is not None:
                scales[row - start] = x_scale[token]
    return rows, scales, index


def tokens_zip_unique_add(zipped: NDArray, unzipped: NDArray, index: NDArray) -> NDArray:
    """Return [T, H]: tokens with the rows added whose index they are, one after the other, in the tokens' dtype.

    Args:
        zipped: [T, H].
        unzipped: [N, H], rows; those from len(index) on are padding.
        index: [n] tokens, -1 for none.
    """
    out = zipped.copy()
    for row, token in enumerate(index):
        if token >= 0:
            addend = to_float32(round_to(to_float32(unzipped[row]), out.dtype))
            out[token] = round_to(add32(to_float32(out[token]), addend), out.dtype)
    return out


def merge_subbatch_cast(pieces: Sequence[NDArray], dtype: DTypeLike) -> NDArray:
    """Return the rows of all pieces, rounded to a dtype."""
    return round_to(to_float32(np.concatenate(pieces)), np.dtype(dtype))


def tokens_zip_prob(unzipped_probs: Sequence[NDArray], rowmap: NDArray, ids: NDArray) -> NDArray:
    """Return [T, K]: the value of each slot's row, 0 without one.

    Args:
        unzipped_probs: values of the rows, in parts that follow each other.
        rowmap: int32 [T, E].
        ids: [T, K] experts, -1 for none.
    """
    values = np.concatenate(unzipped_probs)
    out = np.zeros(ids.shape, values.dtype)
    for token, slot in np.argwhere(ids >= 0):
        row = rowmap[token, ids[token, slot]]
        if row >= 0:
            out[token, slot] = values[row]
    return out


def tokens_unzip_slice(rowmap: NDArray, total_unzipped_rows: int, start_idx: int, end_idx: int) -> NDArray:
    """Return int64 [total_unzipped_rows]: the tokens of rows [start_idx, end_idx) first, -1 for the rest."""
    out = np.full(total_unzipped_rows, -1, np.int64)
    for token, expert in np.argwhere((rowmap >= start_idx) & (rowmap < end_idx)):
        out[rowmap[token, expert] - start_idx] = token
    return out
