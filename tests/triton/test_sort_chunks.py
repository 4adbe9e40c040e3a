# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Chunks in another order by Triton kernels, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import reference
from paddle_moe_ops.triton.ops.sort_chunks import chunk_map, sort_chunks, sort_chunks_backward
from tests.params import ROW_DTYPES, SUM_DTYPES
from tests.reference.cases import assert_same_bits

from .problems import every_kind

CHUNKS = {
    "uneven": [3, 0, 5, 1, 0, 0, 7, 2],
    "one": [9],
    "empty ones only": [0, 0, 0],
    "none": [],
    "many": [1, 0, 2] * 500,
}


def check_map(gpu, sizes, order, num_rows):
    """The map against the oracle's, which it returns."""
    expected = reference.chunk_sort_map(sizes, order, num_rows, validate=False)
    assert_same_bits(gpu.numpy(chunk_map(gpu, gpu.array(sizes), gpu.array(order), num_rows)), expected)
    return expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("tail", [0, 4])
def test_the_map_is_that_of_the_oracle(gpu, rng, sizes, tail, dtype):
    check_map(gpu, np.array(sizes, dtype), rng.permutation(len(sizes)).astype(dtype), sum(sizes) + tail)


@given(
    sizes=st.lists(st.integers(-3, 9), max_size=12),
    order=st.lists(st.integers(-2, 13), min_size=12, max_size=12),
    kinds=st.tuples(st.sampled_from([np.int32, np.int64]), st.sampled_from([np.int32, np.int64])),
    num_rows=st.sampled_from([0, 1, 20, 60]),
)
@settings(max_examples=60)
def test_any_sizes_and_any_order_give_the_oracles_permutation(gpu, sizes, order, kinds, num_rows):
    """Negative sizes, chunks beyond the rows, entries that name no chunk or one again, chunks without a name."""
    found = check_map(gpu, np.array(sizes, kinds[0]), np.array(order[: len(sizes)], kinds[1]), num_rows)
    assert sorted(found) == list(range(num_rows))


@pytest.mark.parametrize("size", [2**31 - 1, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63)])
def test_sizes_beyond_the_rows_end_at_the_last_one(gpu, size):
    sizes = np.array([20, size, size, size, 5], np.int32 if -(2**31) <= size < 2**31 else np.int64)
    check_map(gpu, sizes, np.array([4, 2**32, 2, 1 - 2**63, 0]), 70)


def test_bad_chunks_of_several_blocks(gpu, rng):
    sizes, order = rng.integers(-2, 4, 2500), rng.integers(-50, 2600, 2500).astype(np.int32)
    check_map(gpu, sizes, order, 2000)


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_rows_and_probabilities_move_and_come_back(gpu, rng, dtype):
    sizes = np.array(CHUNKS["uneven"], np.int32)
    order, num_rows = rng.permutation(len(sizes)).astype(np.int32), int(sizes.sum()) + 3
    x, probs = every_kind(rng, (num_rows, 20), dtype), every_kind(rng, (num_rows,), np.float32)
    maps = chunk_map(gpu, gpu.array(sizes), gpu.array(order), num_rows)
    out, probs_out = sort_chunks(gpu, gpu.array(x), gpu.array(probs), maps)
    expected, expected_probs, _ = reference.sort_chunks(x, sizes, order, probs)
    assert_same_bits(gpu.numpy(out), expected)
    assert_same_bits(gpu.numpy(probs_out), expected_probs)
    assert_same_bits(gpu.numpy(sort_chunks_backward(gpu, probs_out, maps)), probs)
    if dtype in SUM_DTYPES:  # float8 has no gradient
        assert_same_bits(gpu.numpy(sort_chunks_backward(gpu, out, maps)), x)


@pytest.mark.parametrize("strided", [1, 4])
def test_rows_may_lie_apart(gpu, rng, strided):
    sizes, order = np.array([3, 0, 5, 1], np.int32), np.array([2, 3, 1, 0], np.int32)
    wide = every_kind(rng, (11, 8 + strided), np.float32)
    x, apart = np.ascontiguousarray(wide[:, :8]), gpu.columns(gpu.array(wide), 8)
    maps = chunk_map(gpu, gpu.array(sizes), gpu.array(order), 11)
    assert_same_bits(gpu.numpy(sort_chunks(gpu, apart, None, maps)[0]), reference.sort_chunks(x, sizes, order)[0])
    back = reference.sort_chunks_backward(x, gpu.numpy(maps))
    assert_same_bits(gpu.numpy(sort_chunks_backward(gpu, apart, maps)), back)
