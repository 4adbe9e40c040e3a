# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""More than 2^31 and 2^32 elements. The arrays are address space only: but for a few far rows, nothing is touched."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Protocol

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..pairwise import in_turn
from ..reference.cases import assert_same_bits, ordinary_floats
from .binding import Core
from .guards import guarded_outputs
from .operators.permute import permute_params
from .operators.quantize import quantize_params
from .operators.route import route_params
from .operators.unpermute import unpermute_params
from .operators.unpermute_backward import unpermute_backward_params
from .structs import Fill

# Sparse memory cannot be mirrored on a GPU.
pytestmark = pytest.mark.cpu_only

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
MIB = 1 << 20
NUM_ROWS = 4500  # of MIB elements each: 4.7e9 elements
FAR_ROWS = (0, 2047, 2048, 4095, 4096, 4499)  # on both sides of 2^31 and of 2^32 elements, and the last
DTYPES = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)]
TOUCHED_LIMIT = 200 * MIB


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as pages:
        return int(pages.read().split()[1]) * mmap.PAGESIZE


class SparseZeros(Protocol):
    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray: ...


@pytest.fixture
def sparse_zeros() -> Iterator[SparseZeros]:
    """Makes arrays of zeros whose pages come into being when they are touched, and sees to it that few are."""
    before = resident_bytes()
    kept_alive = []

    def make(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        kept_alive.append(memory)
        return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)

    yield make
    assert resident_bytes() - before < TOUCHED_LIMIT


def random_rows(count: int, hidden: int, dtype: DTypeLike, seed: int) -> NDArray:
    return ordinary_floats((count, hidden), dtype, seed)


def first_bytes(rows: NDArray, which: list[int]) -> NDArray:
    """Enough of each row to tell whether it was written."""
    return np.stack([rows[row, :64] for row in which]).view(np.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permute_writes_far_rows(core: Core, sparse_zeros: SparseZeros, dtype: DTypeLike) -> None:
    x = random_rows(3, MIB, dtype, seed=1)
    slot_to_row = np.array(FAR_ROWS, np.int32).reshape(3, 2)
    rows = sparse_zeros((NUM_ROWS, MIB), dtype)
    params = permute_params(x, slot_to_row, np.zeros(NUM_ROWS, np.int32), rows, fill=Fill.NONE)
    core.run("permute", params)
    for token, row in zip([0, 0, 1, 1, 2, 2], FAR_ROWS, strict=True):
        assert_same_bits(rows[row], x[token])
    assert not first_bytes(rows, [1, 2046, 2049, 4094, 4097, 4498]).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permute_reads_far_tokens(core: Core, sparse_zeros: SparseZeros, dtype: DTypeLike) -> None:
    x = sparse_zeros((NUM_ROWS, MIB), dtype)
    far = random_rows(len(FAR_ROWS), MIB, dtype, seed=2)
    slot_to_row = np.full((NUM_ROWS, 1), -1, np.int32)
    for row, token in enumerate(FAR_ROWS):
        x[token] = far[row]
        slot_to_row[token] = row
    with guarded_outputs() as output:
        rows = output((len(FAR_ROWS), MIB), dtype)
        core.run("permute", permute_params(x, slot_to_row, np.array(FAR_ROWS, np.int32), rows))
    assert_same_bits(rows, far)


def test_permute_writes_the_last_of_all_rows(core: Core, sparse_zeros: SparseZeros) -> None:
    """The largest number of rows there can be: 2^31 - 1 of 4 bytes."""
    last = 2**31 - 2
    x = random_rows(2, 4, np.dtype(ml_dtypes.float8_e5m2), seed=3)
    rows = sparse_zeros((last + 1, 4), x.dtype)
    params = permute_params(x, np.array([[last], [2**30]], np.int32), np.zeros(1, np.int32), rows, fill=Fill.NONE)
    params.num_rows = last + 1  # row_to_token is not read when nothing is filled
    core.run("permute", params)
    assert_same_bits(rows[[last, 2**30]], x)
    assert not rows[[last - 1, 2**30 - 1, 2**30 + 1, 0, 1]].view(np.uint8).any()


def test_permute_fills_far_padding(core: Core, sparse_zeros: SparseZeros) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16)
    rows, row_scales = sparse_zeros((NUM_ROWS, MIB), dtype), sparse_zeros((NUM_ROWS, MIB), np.int32)
    row_to_token = np.zeros(NUM_ROWS, np.int32)
    row_to_token[[2048, 4499]] = -1
    for buffer in (rows, row_scales):
        buffer[[2047, 2048, 4498, 4499]] = 1
    x, scale = np.zeros((1, MIB), dtype), np.zeros((1, MIB), np.int32)
    no_slots = np.full((1, 1), -1, np.int32)
    core.run("permute", permute_params(x, no_slots, row_to_token, rows, scale, row_scales, num_threads=2))
    for buffer in (rows, row_scales):
        assert not buffer[[2048, 4499]].any()
        assert (buffer[[2047, 4498]] == 1).all()


def test_quantize_reaches_far_tokens_and_rows(core: Core, sparse_zeros: SparseZeros) -> None:
    x = sparse_zeros((NUM_ROWS, MIB), ml_dtypes.bfloat16)
    codes = sparse_zeros((NUM_ROWS, MIB), ml_dtypes.float8_e4m3fn)
    scales = sparse_zeros((NUM_ROWS, MIB // 128), np.float32)
    far = random_rows(len(FAR_ROWS), MIB, ml_dtypes.bfloat16, seed=9)
    slot_to_row = np.full((NUM_ROWS, 1), -1, np.int32)
    for values, token, row in zip(far, FAR_ROWS, reversed(FAR_ROWS), strict=True):
        x[token], slot_to_row[token] = values, row
    row_to_token = np.zeros(NUM_ROWS, np.int32)
    core.run("quantize", quantize_params(x, codes, scales, slot_to_row, row_to_token))
    expected_codes, expected_scales = reference.quantize_1x128(far[::-1])
    for place, row in enumerate(FAR_ROWS):
        assert_same_bits(codes[row], expected_codes[place])
        assert_same_bits(scales[row], expected_scales[place])
    assert not first_bytes(codes, [1, 2046, 2049, 4094, 4097, 4498]).any()


@in_turn({"dtype": [np.dtype(np.float16), DTYPES[1]], "weighted": {"plain": False, "weighted": True}})
def test_unpermute_reads_far_rows(core: Core, sparse_zeros: SparseZeros, dtype: DTypeLike, weighted: bool) -> None:
    rows = sparse_zeros((NUM_ROWS, MIB), dtype)
    far = random_rows(len(FAR_ROWS), MIB, dtype, seed=4)
    for row, values in zip(FAR_ROWS, far, strict=True):
        rows[row] = values
    weights = random_rows(1, NUM_ROWS, np.float32, seed=5)[0] if weighted else None
    near_rows = np.arange(6, dtype=np.int32).reshape(2, 3)
    with guarded_outputs() as output:
        out = output((2, MIB), dtype)
        params = unpermute_params(rows, np.array(FAR_ROWS, np.int32)[near_rows], out, weights)
        core.run("unpermute", params)
    near_weights = None if weights is None else weights[list(FAR_ROWS)]
    assert_same_bits(out, reference.sum_rows(far, near_rows, near_weights))


def test_gradients_reach_far_rows(core: Core, sparse_zeros: SparseZeros) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16)
    rows, d_rows = sparse_zeros((NUM_ROWS, MIB), dtype), sparse_zeros((NUM_ROWS, MIB), dtype)
    d_out = random_rows(3, MIB, dtype, seed=6)
    for row in FAR_ROWS:
        rows[row, :3] = [row % 7, 1, 2]
    row_to_token = np.zeros(NUM_ROWS, np.int32)
    row_to_token[4498] = -1
    d_rows[4498] = 1
    weights = random_rows(1, NUM_ROWS, np.float32, seed=7)[0]
    token_rows = np.array(FAR_ROWS, np.int32).reshape(3, 2)
    d_weights = np.full(NUM_ROWS, np.nan, np.float32)
    params = unpermute_backward_params(d_out, token_rows, row_to_token, d_rows, rows, weights, d_weights=d_weights)
    core.run("unpermute_backward", params)
    for row, token in zip(FAR_ROWS, [0, 0, 1, 1, 2, 2], strict=True):
        expected = reference.fma32(d_out[token], weights[row], np.float32(-0.0))
        assert_same_bits(d_rows[row], reference.round_to(expected, dtype))
        terms = d_out[token, :3].astype(np.float64) * [row % 7, 1, 2]
        assert d_weights[row] == pytest.approx(terms.sum(), abs=1e-5)
    assert not first_bytes(d_rows, [1, 2046, 2049, 4094, 4097, 4498]).any()
    assert np.count_nonzero(d_weights) <= len(FAR_ROWS)


@pytest.mark.parametrize("stride", [2**31 + 8, 2**32 + 8])
def test_rows_may_lie_farther_apart_than_32_bits(core: Core, sparse_zeros: SparseZeros, stride: int) -> None:
    memory = sparse_zeros((2 * stride + 8,), ml_dtypes.bfloat16)
    matrix = np.lib.stride_tricks.as_strided(memory, (3, 8), (2 * stride, 2))
    matrix[...] = random_rows(3, 8, ml_dtypes.bfloat16, seed=8)
    tokens = np.arange(3, dtype=np.int32)[:, None]
    with guarded_outputs() as output:
        rows, out = output((3, 8), matrix.dtype), output((3, 8), matrix.dtype)
        d_rows, d_weights = output((3, 8), matrix.dtype), output(3, np.float32)
        core.run("permute", permute_params(matrix, tokens, tokens[:, 0], rows))
        core.run("unpermute", unpermute_params(matrix, tokens, out))
        ones = np.ones(3, np.float32)
        core.run(
            "unpermute_backward",
            unpermute_backward_params(matrix, tokens, tokens[:, 0], d_rows, matrix, ones, d_weights=d_weights),
        )
    for moved in (rows, out, d_rows):
        assert_same_bits(moved, np.ascontiguousarray(matrix))
    squares = (matrix.astype(np.float64) ** 2).sum(axis=1)
    np.testing.assert_allclose(d_weights, squares, rtol=1e-6)


def test_masks_of_more_than_32_bits_are_read_to_the_end(core: Core, sparse_zeros: SparseZeros) -> None:
    num_experts, num_tokens = 1 << 16, (1 << 15) + 2  # 2^31 + 2^17 bytes, and 2^33 bytes of probabilities
    mask, probs = sparse_zeros((num_tokens, num_experts), np.uint8), sparse_zeros((num_tokens, num_experts), np.float32)
    routed = [(0, 5), (num_tokens - 2, 4), (num_tokens - 1, 5), (num_tokens - 1, num_experts - 1)]
    for number, place in enumerate(routed):
        mask[place] = 1
        probs[place] = number + 1
    with guarded_outputs() as output:
        params = route_params(
            mask,
            probs,
            topk=2,
            num_rows=6,
            routed_per_expert=output(num_experts, np.int32),
            slot_to_row=output((num_tokens, 2), np.int32),
            row_to_token=output(6, np.int32),
            row_to_expert=output(6, np.int32),
            row_probs=output(6, np.float32),
        )
        core.add_workspace("route", params)
        core.run("route_count", params)
        core.run("route", params)
    maps = params.arrays
    assert maps["row_to_token"].tolist() == [num_tokens - 2, 0, num_tokens - 1, num_tokens - 1, -1, -1]
    assert maps["row_to_expert"].tolist() == [4, 5, 5, num_experts - 1, -1, -1]
    assert maps["row_probs"].tolist() == [2, 1, 3, 4, 0, 0]
    assert maps["slot_to_row"][-1].tolist() == [2, 3]
    assert np.count_nonzero(maps["slot_to_row"] >= 0) == 4
