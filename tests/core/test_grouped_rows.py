# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of experts' rows, zeros in those of no expert, sums, SwiGLU and its gradient, which products have kernels."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference.activations import activate, activation_factors

from ..reference.cases import assert_same_bits, ordinary_floats
from .binding import Core
from .cases import EXAMPLES
from .guards import guarded_outputs
from .operators.grouped_rows import (
    TILE_ROWS,
    clear_params,
    grouped_tables,
    row_sums,
    swiglu,
    swiglu_backward,
)
from .structs import DTYPES, Int, Size, fields

BY_DTYPE = pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name
)
# Rows and columns; the last ones take one number, four or eight at a time on a GPU.
SHAPES = pytest.mark.parametrize("shape", [(0, 5), (1, 0), (1, 1), (63, 7), (300, 72), (5, 1025)], ids=str)
LIMITS = {np.dtype(np.float32): 1e-5, np.dtype(np.float16): 2e-3, np.dtype(ml_dtypes.bfloat16): 1.6e-2}


def tables_by_loops(
    sizes: list[int],
    offsets: list[int] | None,
    num_rows: int,
    tile_rows: int = TILE_ROWS,
    num_chunks: int = 0,
    chunk_rows: int = 0,
) -> tuple[list[int], ...]:
    first, stop, tiles, rows, end = [], [], [0], 0, 0
    for expert, size in enumerate(sizes):
        size = max(size, 0)
        begin = min(max(rows if offsets is None else offsets[expert], 0), num_rows)
        rows += min(size, num_rows)
        begin, end = max(begin, end), max(min(begin + size, num_rows), end)
        first.append(begin)
        stop.append(end)
        tiles.append(tiles[-1] + -(-(end - begin) // tile_rows))
    begins = [row for limits in zip(first, stop, strict=True) for row in range(*limits, tile_rows)]
    before = [sum(begin < chunk * chunk_rows for begin in begins) for chunk in range(num_chunks)]
    return first, stop, tiles, [*before, tiles[-1], 0, tiles[-1]], [0, 0]


NUMBERS = st.one_of(st.integers(0, 300), st.integers(-5, 5), st.sampled_from([-(2**31), 2**31 - 1]))


@EXAMPLES
@given(
    experts=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=9),
    num_rows=st.integers(0, 900),
    has_offsets=st.booleans(),
    dtypes=st.tuples(*[st.sampled_from([np.int32, np.int64])] * 2),
    tile_rows=st.sampled_from([[TILE_ROWS], [128, TILE_ROWS], [1]]),
    chunks=st.sampled_from([(0, 0), (1, 1000), (4, 200), (7, 128)]),
)
def test_tables_of_any_sizes_at_any_offsets(
    core: Core,
    experts: list[tuple[int, int]],
    num_rows: int,
    has_offsets: bool,
    dtypes: tuple[type, type],
    tile_rows: list[int],
    chunks: tuple[int, int],
) -> None:
    sizes, offsets = [size for size, _ in experts], [offset for _, offset in experts] if has_offsets else None
    starts = None if offsets is None else np.array(offsets, dtypes[1])
    made = grouped_tables(core, np.array(sizes, dtypes[0]), starts, num_rows, tile_rows, *chunks)
    for height, tables in zip(tile_rows, made, strict=True):
        expected = tables_by_loops(sizes, offsets, num_rows, height, *chunks)
        assert tuple(each.tolist() for each in tables) == expected


@pytest.mark.parametrize("num_experts", [1, 255, 256, 257, 1025, 65536])
@pytest.mark.parametrize("has_offsets", [True, False], ids=["offsets", "following"])
def test_tables_of_many_experts(core: Core, num_experts: int, has_offsets: bool) -> None:
    rng = np.random.default_rng(num_experts)
    sizes = rng.integers(0, 400, num_experts) * (rng.random(num_experts) < 0.7)
    padded = -(-sizes // 16) * 16
    offsets = np.concatenate([[0], np.cumsum(padded)]) if has_offsets else None
    num_rows = int(padded.sum()) - 100 if num_experts > 1 else 50
    made = grouped_tables(core, sizes, offsets, num_rows, num_chunks=3, chunk_rows=300)[0]
    starts = None if offsets is None else offsets.tolist()
    expected = tables_by_loops(sizes.tolist(), starts, num_rows, num_chunks=3, chunk_rows=300)
    assert tuple(each.tolist() for each in made) == expected


@pytest.mark.parametrize("columns", [0, 4, 8, 1000])
@pytest.mark.parametrize(
    ("first", "stop"),
    [
        ([0], [0]),
        ([0], [70]),
        ([3, 9, 9], [7, 9, 40]),
        ([0, 30, 64], [30, 60, 70]),
        ([70, 70], [70, 70]),
    ],
    ids=str,
)
def test_rows_of_no_expert_become_zeros_and_others_stay(core: Core, first: list, stop: list, columns: int) -> None:
    with guarded_outputs() as output:
        rows = output((70, columns), np.float32)
        rows[...] = 1
        core.run("grouped_clear", clear_params(rows, np.array(first, np.int32), np.array(stop, np.int32)))
    expected = np.zeros_like(rows)
    for begin, end in zip(first, stop, strict=True):
        expected[begin:end] = 1
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (1, 1), (700, 16)], ids=str)
def test_sums_of_rows_leave_out_rows_of_no_token(core: Core, shape: tuple[int, int]) -> None:
    values = ordinary_floats(shape, np.float32, seed=shape[0])
    tokens = np.where(np.arange(shape[0]) % 3 == 1, -1, np.arange(shape[0])).astype(np.int32)
    values[tokens < 0] = np.nan
    due = np.zeros(shape[0], np.float32)
    for column in range(shape[1]):
        due += np.where(tokens >= 0, values[:, column], 0)
    np.testing.assert_array_equal(row_sums(core, values, tokens), due)


def assert_close(got: NDArray, due: NDArray, dtype: DTypeLike) -> None:
    error = np.abs(got.astype(np.float64) - due)
    limit = LIMITS[np.dtype(dtype)]
    assert (error <= limit * np.abs(due) + limit * 1e-2).all(), error.max(initial=0)


@BY_DTYPE
@SHAPES
def test_swiglu_is_that_of_the_oracle(core: Core, shape: tuple[int, int], dtype: DTypeLike) -> None:
    rows, width = shape
    hidden = ordinary_floats((rows, 2 * width), dtype, seed=rows)
    assert_close(swiglu(core, hidden), activate(hidden.astype(np.float64), "swiglu"), dtype)


def test_swiglu_of_large_numbers_is_finite(core: Core) -> None:
    hidden = np.array([[-200, 200, -1e30, 88, 2, 3, 1, 1]], np.float32)
    np.testing.assert_allclose(swiglu(core, hidden), [[0, 600, 0, 88]], atol=1e-30)


@BY_DTYPE
@SHAPES
def test_gradients_of_swiglu_are_those_of_the_oracle(core: Core, shape: tuple[int, int], dtype: DTypeLike) -> None:
    rows, width = shape
    hidden = ordinary_floats((rows, 2 * width), dtype, seed=rows)
    gradient = ordinary_floats((rows, width), dtype, seed=rows + 1)
    weights = ordinary_floats((rows,), np.float32, seed=rows + 2)
    tokens = np.where(np.arange(rows) % 4 == 3, -1, np.arange(rows)).astype(np.int32)
    live = tokens >= 0
    hidden[~live], gradient[~live], weights[~live] = np.nan, np.nan, np.nan
    d_hidden, scaled, d_weights = swiglu_backward(core, hidden, gradient, weights, tokens)

    wide, d_scaled, factors = (each[live].astype(np.float64) for each in (hidden, gradient, weights))
    factors = factors[:, None]
    act = activate(hidden[live], "swiglu").astype(np.float64)
    to_gate, to_up = activation_factors(wide, "swiglu")
    due = np.concatenate([d_scaled * factors * to_gate, d_scaled * factors * to_up], axis=1)
    assert_close(d_hidden[live], due, dtype)
    assert_close(scaled[live], act * factors, dtype)
    terms = np.abs(act * d_scaled).sum(axis=1)
    errors = np.abs(d_weights[live] - (act * d_scaled).sum(axis=1))
    assert (errors <= max(1e-5, LIMITS[np.dtype(dtype)] / 4) * terms + 1e-30).all()
    for each in (d_hidden, scaled, d_weights):
        assert not each[~live].astype(np.float32).any()


@BY_DTYPE
def test_gradients_of_swiglu_are_those_of_the_rounded_activation(core: Core, dtype: DTypeLike) -> None:
    """Rows of one column, in which no sum is rounded."""
    hidden, gradient = (ordinary_floats((300, width), dtype, seed=width) for width in (2, 1))
    weights = ordinary_floats((300,), np.float32, seed=3)
    act = swiglu(core, hidden).astype(np.float32)
    _, scaled, d_weights = swiglu_backward(core, hidden, gradient, weights, np.arange(300, dtype=np.int32))
    assert_same_bits(d_weights, act[:, 0] * gradient[:, 0].astype(np.float32))
    assert_same_bits(scaled, (act * weights[:, None]).astype(dtype))


class Facts(ctypes.Structure):
    """pmo_grouped_facts"""

    _fields_ = fields((Size, "struct_size num_rows num_experts inner outer"), (Int, "dtype capability"))


HOPPER = {"num_rows": 4096, "num_experts": 8, "inner": 64, "outer": 1024, "dtype": "bfloat16", "capability": 90}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1),
        ({"dtype": "float16"}, 1),
        ({"dtype": "float32"}, 0),
        ({"dtype": "float8_e4m3fn"}, 1),
        ({"dtype": "float8_e4m3fn", "inner": 16, "outer": 128}, 1),
        ({"dtype": "float8_e4m3fn", "inner": 8}, 0),
        ({"dtype": "float8_e4m3fn", "capability": 89}, 0),
        ({"inner": 8, "outer": 8}, 1),
        ({"inner": 12}, 0),
        ({"outer": 1020}, 0),
        ({"inner": 0}, 0),
        ({"outer": 0}, 0),
        ({"num_rows": 0}, 1),
        ({"num_rows": 2**30}, 0),
        ({"num_rows": -1}, 0),
        ({"num_experts": 0}, 0),
        ({"num_experts": 2**16}, 1),
        ({"num_experts": 2**16, "inner": 2**14, "outer": 2**14}, 0),  # more tiles than 32 bits count
        ({"capability": 0}, 0),
        ({"capability": 80}, 0),
        ({"capability": 89}, 0),
        ({"capability": 100}, 0),
        ({"capability": 120}, 0),
        ({"struct_size": 8}, 0),
    ],
    ids=str,
)
def test_which_products_the_kernels_for_hopper_take(core: Core, changes: dict, expected: int) -> None:
    facts = {"struct_size": ctypes.sizeof(Facts), **HOPPER, **changes}
    facts["dtype"] = DTYPES[np.dtype(getattr(ml_dtypes, facts["dtype"], facts["dtype"]))]
    takes = core.function("pmo_grouped_takes", ctypes.c_int32, ctypes.c_void_p)
    assert takes(ctypes.byref(Facts(**facts))) == expected
    assert takes(None) == 0
