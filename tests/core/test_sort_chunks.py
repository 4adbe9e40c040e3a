# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""sort_chunks: whole chunks of rows change their places, bit for bit, forward and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..params import HIDDEN_SIZES, ROW_DTYPES
from ..reference.cases import assert_same_bits
from .binding import Core, CoreError
from .cases import EXAMPLES
from .guards import at_odd_address, guarded_outputs, with_row_gaps
from .operators.sort_chunks import sort_chunks, sort_chunks_params
from .structs import Check, Status
from .test_permute import dtype_name, random_bytes

# On both sides of the threads of a block that moves and of one that makes the table.
CHUNK_COUNTS = (0, 1, 7, 63, 255, 256, 257, 1024, 1025, 3000)


def split(num_rows: int, num_chunks: int, seed: int, tail: int = 0) -> NDArray:
    """Uneven sizes, many of them 0, that leave `tail` rows over."""
    rng = np.random.default_rng(seed)
    if num_chunks == 0:
        return np.zeros(0, np.int64)
    shares = rng.dirichlet(np.full(num_chunks, 0.3))
    return rng.multinomial(num_rows - tail, shares / shares.sum())


def check_sort(
    core: Core, x: NDArray, split_sizes: NDArray, order: NDArray, probs: NDArray | None = None, **options: object
) -> None:
    """Forward against the oracle, and back again."""
    out, probs_out, source_to_dest = sort_chunks(core, x, split_sizes, order, probs, **options)
    expected = reference.sort_chunks(x, split_sizes, order, probs, validate=False)
    assert_same_bits(out.copy(), expected[0])
    assert_same_bits(source_to_dest, expected[2])
    back, probs_back, map_again = sort_chunks(core, out.copy(), split_sizes, order, probs_out, inverse=1, **options)
    assert_same_bits(back.copy(), np.ascontiguousarray(x))
    assert_same_bits(map_again, source_to_dest)
    if probs is not None:
        assert probs_out is not None
        assert probs_back is not None
        assert expected[1] is not None
        assert_same_bits(probs_out, expected[1])
        assert_same_bits(probs_back, probs)


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("dtype", [*ROW_DTYPES, np.int32], ids=dtype_name)
def test_rows_and_probabilities_equal_the_oracle(core: Core, dtype: DTypeLike, hidden: int) -> None:
    x = random_bytes((203, hidden), dtype, seed=1)
    check_sort(core, x, split(203, 12, 2, tail=9), np.random.default_rng(3).permutation(12), x[:, 0].astype(np.float32))


@pytest.mark.parametrize("num_rows", [1, 63, 1025, 5000])
@pytest.mark.parametrize("num_chunks", CHUNK_COUNTS)
def test_any_number_of_chunks(core: Core, num_chunks: int, num_rows: int) -> None:
    x, probs = random_bytes((num_rows, 24), np.float16, seed=4), random_bytes((num_rows,), np.float32, seed=7)
    order = np.random.default_rng(5).permutation(num_chunks).astype(np.int32)
    check_sort(core, x, split(num_rows, num_chunks, 6, tail=num_rows // 3), order, probs)


def test_the_most_chunks(core: Core) -> None:
    """Two of them have rows, which change places."""
    x, order, sizes = (
        random_bytes((63, 24), np.float16, seed=4),
        np.arange(1 << 20)[::-1].copy(),
        np.zeros(1 << 20, int),
    )
    sizes[[7, 8]] = 20, 43
    assert_same_bits(sort_chunks(core, x, sizes, order)[0].copy(), np.concatenate([x[20:], x[:20]]))


@EXAMPLES
@given(
    sizes=st.lists(st.integers(-3, 9), max_size=12),
    order=st.lists(st.integers(-2, 12), min_size=12, max_size=12),
    is_permutation=st.booleans(),
    num_rows=st.sampled_from([0, 1, 20, 60]),
    hidden=st.sampled_from([1, 7, 16, 72]),
    dtype=st.sampled_from(ROW_DTYPES),
    kinds=st.tuples(st.sampled_from([np.int32, np.int64]), st.sampled_from([np.int32, np.int64])),
    num_threads=st.sampled_from([1, 3]),
)
def test_any_sizes_and_any_order_give_a_permutation(
    core: Core,
    sizes: list[int],
    order: list[int],
    is_permutation: bool,
    num_rows: int,
    hidden: int,
    dtype: DTypeLike,
    kinds: tuple[type, type],
    num_threads: int,
) -> None:
    x = random_bytes((num_rows, hidden), dtype, seed=8)
    chunks = np.argsort(order[: len(sizes)]) if is_permutation else np.array(order[: len(sizes)])
    check_sort(
        core,
        x,
        np.array(sizes, kinds[0]),
        chunks.astype(kinds[1]),
        random_bytes((num_rows,), np.float32, seed=9),
        num_threads=num_threads,
    )


@pytest.mark.parametrize("size", [2**31 - 1, -(2**31), 2**31, 2**62, -(2**63)])
def test_sizes_beyond_the_rows_end_at_the_last_one(core: Core, size: int) -> None:
    dtype = np.int32 if -(2**31) <= size < 2**31 else np.int64
    x = random_bytes((70, 3), np.float32, seed=10)
    check_sort(core, x, np.array([20, size, size, 5], dtype), np.array([3, 2, 1, 0], np.int32))


@pytest.mark.parametrize("order", [[5, 5, 5, 5, 5, 5], [-1, 9, 4, 4, 0, 2**40], [3, 3, 2, 2, 1, 1]], ids=str)
def test_chunks_that_the_order_does_not_name_come_last(core: Core, order: list[int]) -> None:
    x = random_bytes((40, 5), np.float32, seed=11)
    check_sort(core, x, np.array([3, 0, 7, 11, 1, 9]), np.array(order))


def test_rows_behind_the_last_chunk_stay(core: Core) -> None:
    x = random_bytes((9, 4), np.float32, seed=12)
    out, _, source_to_dest = sort_chunks(core, x, np.array([2, 3]), np.array([1, 0]))
    assert source_to_dest.tolist() == [3, 4, 0, 1, 2, 5, 6, 7, 8]
    assert_same_bits(out[5:], x[5:])


@pytest.mark.parametrize("wanted", ["out", "probs_out", "source_to_dest"])
@pytest.mark.parametrize("inverse", [0, 1])
def test_every_output_can_be_had_alone(core: Core, wanted: str, inverse: int) -> None:
    x, probs = random_bytes((31, 6), np.float32, seed=13), random_bytes((31,), np.float32, seed=14)
    sizes, order = split(31, 5, 15, tail=2), np.array([4, 2, 0, 3, 1])
    with guarded_outputs() as output:
        shapes = {"out": x.shape, "probs_out": (31,), "source_to_dest": (31,)}
        dtype = np.int32 if wanted == "source_to_dest" else np.float32
        made = output(shapes[wanted], dtype)
        outputs = {"out": None, wanted: made}
        core.run("sort_chunks", sort_chunks_params(x, sizes, order, probs=probs, inverse=inverse, **outputs))
    source_to_dest = reference.chunk_sort_map(sizes, order, 31)
    moved = np.argsort(source_to_dest) if inverse == 0 else source_to_dest
    assert_same_bits(made, {"out": x[moved], "probs_out": probs[moved], "source_to_dest": source_to_dest}[wanted])


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=dtype_name)
def test_rows_may_begin_at_any_address(core: Core, dtype: DTypeLike) -> None:
    x = random_bytes((50, 7), dtype, seed=16)
    check_sort(core, at_odd_address(x), split(50, 6, 17, tail=3), np.array([3, 1, 5, 0, 2, 4]), odd_outputs=True)


@pytest.mark.parametrize("hidden", [5, 16])
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=dtype_name)
def test_rows_may_lie_apart_or_in_reverse(core: Core, dtype: DTypeLike, hidden: int) -> None:
    x = random_bytes((50, hidden), dtype, seed=18)
    sizes, order = split(50, 6, 19, tail=3), np.array([3, 1, 5, 0, 2, 4])
    for strided in (with_row_gaps(x, 16), with_row_gaps(x, 3), x[::-1], np.broadcast_to(x[:1], x.shape)):
        check_sort(core, strided, sizes, order)


def test_a_large_buffer_is_shared_by_threads(core: Core) -> None:
    x = random_bytes((3000, 1024), np.float32, seed=20)
    check_sort(core, x, split(3000, 40, 21, tail=11), np.random.default_rng(22).permutation(40), x[:, 0].copy())


BAD_DATA = [
    ([3, -1, 2], [0, 1, 2], "split_sizes must hold no negative numbers, but entry 1 is -1"),
    (
        [3, 4, 4],
        [0, 1, 2],
        "split_sizes must add up to at most 10, the number of rows, but the sum exceeds this at entry 2",
    ),
    (
        [2**62, 2**62, 2**62],
        [0, 1, 2],
        "split_sizes must add up to at most 10, the number of rows, but the sum exceeds this at entry 0",
    ),
    ([1, 1, 1], [0, 3, 2], "order must hold chunks in [0, 3), but entry 1 is 3"),
    ([1, 1, 1], [0, 1, -1], "order must hold chunks in [0, 3), but entry 2 is -1"),
    ([1, 1, 1], [2, 1, 2], "order must name every chunk once, but names chunk 2 in entries 0 and 2"),
]


@pytest.mark.parametrize(("sizes", "order", "text"), BAD_DATA)
def test_bad_data_are_named_where_checks_ask(core: Core, sizes: list[int], order: list[int], text: str) -> None:
    x = random_bytes((10, 3), np.float32, seed=23)
    arrays = x, np.array(sizes), np.array(order)
    with pytest.raises(CoreError) as caught:
        sort_chunks(core, *arrays, checks=Check.RANGE | Check.DUPLICATES)
    assert (caught.value.status, caught.value.text) == (Status.INVALID_DATA, text)
    with pytest.raises(ValueError, match=r"^sort_chunks: ") as told:
        reference.sort_chunks(*arrays)
    assert str(told.value) == f"sort_chunks: {text}"
    check_sort(core, *arrays)


def test_checks_look_for_what_was_asked_only(core: Core) -> None:
    x = random_bytes((10, 3), np.float32, seed=24)
    repeated = np.array([1, 1]), np.array([1, 1])
    sort_chunks(core, x, *repeated, checks=Check.RANGE)
    out_of_range = np.array([11, -1]), np.array([0, 2])
    sort_chunks(core, x, *out_of_range, checks=Check.DUPLICATES)


@pytest.mark.cuda_only
def test_workspace_one_byte_too_small_is_refused(core: Core) -> None:
    x, sizes, order = random_bytes((10, 3), np.float32, seed=25), np.ones(2000, np.int32), np.arange(2000)
    workspace = np.zeros(2 * 2001 * 4, np.uint8)
    with guarded_outputs() as output:
        params = sort_chunks_params(x, sizes, order, output(x.shape, np.float32), workspace=workspace)
        params.workspace_bytes = workspace.size - 1
        with pytest.raises(CoreError, match=r"^INVALID_ARGUMENT: workspace must be "):
            core.run("sort_chunks", params)
        params.workspace_bytes += 1
        core.run("sort_chunks", params)
