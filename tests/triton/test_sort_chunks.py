# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Chunks in another order by Triton kernels, and back."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_moe_ops.triton.sort_chunks import chunk_map, sort_chunks, sort_chunks_backward
from tests.params import ROW_DTYPES, SUM_DTYPES
from tests.reference.cases import assert_same_bits

from .problems import every_kind


def source_of_rows(sizes, order, num_rows):
    """For each row of the result the row it comes from."""
    starts = np.cumsum([0, *sizes])
    moved = [np.arange(starts[chunk], starts[chunk + 1]) for chunk in order]
    return np.concatenate([*moved, np.arange(starts[-1], num_rows)]).astype(np.int64)


CHUNKS = {
    "uneven": [3, 0, 5, 1, 0, 0, 7, 2],
    "one": [9],
    "empty ones only": [0, 0, 0],
    "none": [],
    "many": [1, 0, 2] * 500,
}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("tail", [0, 4])
def test_the_map_is_the_inverse_of_concatenation(gpu, rng, sizes, tail, dtype):
    order = rng.permutation(len(sizes))
    num_rows = sum(sizes) + tail
    found = chunk_map(gpu, gpu.array(np.array(sizes, dtype)), gpu.array(order.astype(dtype)), num_rows)
    sources = source_of_rows(sizes, order, num_rows)
    expected = np.empty(num_rows, np.int32)
    expected[sources] = np.arange(num_rows)
    assert_same_bits(gpu.numpy(found), expected)


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_rows_and_probabilities_move_and_come_back(gpu, rng, dtype):
    sizes = CHUNKS["uneven"]
    order, num_rows = rng.permutation(len(sizes)), sum(sizes) + 3
    sources = source_of_rows(sizes, order, num_rows)
    x, probs = every_kind(rng, (num_rows, 20), dtype), every_kind(rng, (num_rows,), np.float32)
    maps = chunk_map(gpu, *(gpu.array(np.array(each, np.int32)) for each in (sizes, order)), num_rows)
    out, probs_out = sort_chunks(gpu, gpu.array(x), gpu.array(probs), maps)
    assert_same_bits(gpu.numpy(out), x[sources])
    assert_same_bits(gpu.numpy(probs_out), probs[sources])
    if dtype in SUM_DTYPES:  # float8 has no gradient
        d_x, d_probs = sort_chunks_backward(gpu, out, probs_out, maps)
        assert_same_bits(gpu.numpy(d_x), x)
        assert_same_bits(gpu.numpy(d_probs), probs)


def test_an_order_that_is_no_permutation_moves_nothing_out_of_bounds(gpu):
    sizes, order = (gpu.array(np.array(each, np.int32)) for each in ([4, 2, 9], [7, -1, 1]))
    found = gpu.numpy(chunk_map(gpu, sizes, order, 10))
    assert ((found >= -1) & (found < 10)).all()
