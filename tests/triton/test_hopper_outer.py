# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of experts' matrices by the compiled library: its kernel on a GPU, elsewhere its header's word in NumPy."""

from __future__ import annotations

import ctypes
import os
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.triton.gemm import gather_heuristic, mlp
from paddle_moe_ops.triton.gemm.types import Gpu, Rows, Schedule
from paddle_moe_ops.triton.hopper_outer import GroupedOuterParams, grouped_outer_of, hopper_outer, takes_outer
from tests.pairwise import in_turn
from tests.reference.cases import assert_same_bits

from .library_in_numpy import HOPPER, fields_in_header, kernel_for, launches_of, numpy_grouped_outer
from .problems import EXPERTS_AT_LIMITS
from .test_moe_mlp import Case, Problem, assert_all_same, without_sign_of_zero

pytestmark = pytest.mark.long

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@pytest.fixture
def device(gpu, monkeypatch) -> Any:
    """The device of the kernels, with the library's kernel wherever it can take one."""
    kernel = kernel_for(gpu, monkeypatch, numpy_grouped_outer(), grouped_outer_of)
    monkeypatch.setattr(gpu, "grouped_outer", kernel)
    monkeypatch.setattr(mlp, "gathers", lambda *_, **__: False)
    return gpu


@pytest.fixture
def launched(device, monkeypatch) -> list[dict[str, int]]:
    return launches_of("grouped_outer", GroupedOuterParams, monkeypatch)


class Sums(NamedTuple):
    """Rows of each expert, where they begin (None: one after the other), rows in all, columns of both operands."""

    sizes: list[int]
    offsets: list[int] | None = None
    num_rows: int | None = None
    columns: tuple[int, int] = (136, 200)

    @property
    def starts(self) -> list[int]:
        return self.offsets or [int(each) for each in np.cumsum([0, *self.sizes])[:-1]]

    @property
    def rows(self) -> int:
        ends = [start + size for start, size in zip(self.starts, self.sizes, strict=True)]
        return max(ends) if self.num_rows is None else self.num_rows


SUMS = {
    "steps that end anywhere": Sums([64, 1, 15, 16, 17, 0, 63, 65, 100, 128, 0, 0, 130, 33, 48, 49]),
    "one small tile": Sums([5], columns=(8, 8)),
    "whole tiles": Sums([256, 128], columns=(256, 384)),
    "several bands of tiles": Sums([70, 0, 200], columns=(1160, 264)),
    "more steps than stages": Sums([1000, 0, 0, 711, 3], columns=(128, 264)),
    "more tiles than blocks": Sums([(7 * expert) % 150 for expert in range(700)], columns=(24, 40)),
    "many tiles of one or two steps": Sums([(37 * expert) % 100 for expert in range(300)], columns=(128, 512)),
    "an expert of many rows among experts of few": Sums([40, 300, 0, 31, 225, 224, 16], columns=(1160, 264)),
    "no rows": Sums([0, 0, 0]),
    "no rows, but memory for some": Sums([0, 0], num_rows=40),
    "gaps between experts, and rows after them": Sums([7, 0, 60, 31], [0, 16, 32, 112], 200),
    "experts that are not in order": Sums([40, 30, 20], [50, 0, 30]),
}
# For blocks of a GPU, which take one tile after another; in NumPy they only take long.
SLOW = dict.fromkeys(("more tiles than blocks", "many tiles of one or two steps"), pytest.mark.slow)
BY_SUMS = pytest.mark.parametrize(
    "sums", [pytest.param(sums, id=name, marks=SLOW.get(name, ())) for name, sums in SUMS.items()]
)


def operands(rng: np.random.Generator, sums: Sums, dtype: Any, random: bool = False) -> tuple[NDArray, NDArray]:
    """Integers of two bits, whose sums are exact, or random numbers; NaN in rows of no expert."""
    owned = np.zeros(sums.rows, bool)
    for start, size in zip(sums.starts, sums.sizes, strict=True):
        owned[start : start + size] = True
    made = []
    for columns in sums.columns:
        shape = sums.rows, columns
        values = rng.standard_normal(shape) if random else rng.integers(-2, 3, shape).astype(float)
        values[~owned] = np.nan
        made.append(values.astype(dtype))
    return made[0], made[1]


def due(sums: Sums, p: NDArray, q: NDArray) -> NDArray:
    """The oracle's gradient of matrices that are stored transposed, in float64."""
    w = np.zeros((len(sums.sizes), *sums.columns))
    given = (each.astype(np.float64) for each in (p, q))
    return reference.grouped_gemm_backward(*given, w, sums.sizes, expert_offsets=sums.starts)[1]


def tables(device: Any, sums: Sums) -> Schedule:
    first = np.array(sums.starts, np.int32)
    first, stop = (device.array(each) for each in (first, first + np.array(sums.sizes, np.int32)))
    return Schedule(first, stop, None, None, None, device.array(np.zeros(2, np.int32)))


def packed(device: Any, values: NDArray) -> Rows:
    return Rows(device.array(values), *values.shape, values.shape[1])


def with_tokens(
    rng: np.random.Generator, device: Any, sums: Sums, given: list[NDArray], gathers_q: bool
) -> tuple[list[Rows], tuple[Any, bool]]:
    """Operands of a launch that gathers one of them from tokens, and the map; ``given`` receives the gathered rows.

    Rows without a token are zeros, whatever the number that says so; tokens lie apart.
    """
    columns, dtype = sums.columns[gathers_q], given[0].dtype
    tokens = rng.integers(-2, 3, (37, columns + 8)).astype(dtype)
    tokens[:, columns:] = np.nan
    row_to_token = rng.integers(-1, 38, sums.rows).astype(np.int32)
    row_to_token[::7] = 1 << 30
    is_there = (row_to_token >= 0) & (row_to_token < 37)
    found = tokens[np.where(is_there, row_to_token, 0), :columns]
    given[gathers_q] = np.where(is_there[:, None], found, 0).astype(dtype)
    rows = [packed(device, each) for each in given]
    rows[gathers_q] = Rows(device.array(tokens), 37, columns, columns + 8)
    return rows, (device.array(row_to_token), gathers_q)


@BY_DTYPE
@BY_SUMS
def test_exact_sums_have_the_bits_of_the_oracle(rng, device, sums, dtype):
    p, q = operands(rng, sums, dtype)
    out = device.empty([len(sums.sizes), *sums.columns], np.dtype(dtype).name)
    hopper_outer(device, packed(device, p), packed(device, q), tables(device, sums), sums.rows, out)
    assert_same_bits(without_sign_of_zero(device.numpy(out)), due(sums, p, q).astype(dtype))


@pytest.mark.cuda_only
@pytest.mark.parametrize("experts", EXPERTS_AT_LIMITS)
def test_exact_sums_of_many_experts_have_the_bits_of_the_oracle(rng, device, experts):
    sums = Sums([(11 * expert) % 29 for expert in range(experts)], columns=(24, 40))
    p, q = operands(rng, sums, ml_dtypes.bfloat16)
    out = device.empty([experts, *sums.columns], "bfloat16")
    hopper_outer(device, packed(device, p), packed(device, q), tables(device, sums), sums.rows, out)
    assert_same_bits(without_sign_of_zero(device.numpy(out)), due(sums, p, q).astype(ml_dtypes.bfloat16))


def test_the_counters_of_one_launch_serve_the_next(rng, device):
    sums = SUMS["more tiles than blocks"]
    p, q = operands(rng, sums, ml_dtypes.bfloat16)
    rows, used = (packed(device, p), packed(device, q)), tables(device, sums)
    for _ in range(2):
        out = device.empty([len(sums.sizes), *sums.columns], "bfloat16")
        hopper_outer(device, *rows, used, sums.rows, out)
        assert_same_bits(without_sign_of_zero(device.numpy(out)), due(sums, p, q).astype(ml_dtypes.bfloat16))
        assert not device.numpy(used.counters).any()


@BY_DTYPE
@pytest.mark.parametrize("gathers_q", [False, True], ids=["p gathered", "q gathered"])
@BY_SUMS
def test_rows_of_tokens_that_are_gathered_give_the_bits_of_the_oracle(rng, device, sums, dtype, gathers_q):
    given = list(operands(rng, sums, dtype))
    rows, gathered = with_tokens(rng, device, sums, given, gathers_q)
    out = device.empty([len(sums.sizes), *sums.columns], np.dtype(dtype).name)
    hopper_outer(device, *rows, tables(device, sums), sums.rows, out, gathered=gathered)
    assert_same_bits(without_sign_of_zero(device.numpy(out)), due(sums, *given).astype(dtype))


@BY_DTYPE
@pytest.mark.parametrize("columns", [(40, 136), (200, 136)], ids=["as they are", "turned where they are wide"])
def test_operands_and_results_may_be_windows_of_columns(rng, device, columns, dtype):
    sums = Sums([70, 0, 33], columns=columns)
    p, q = operands(rng, sums, dtype)
    rows = []
    for values, left, right in ((p, 16, 8), (q, 8, 24)):
        height, width = values.shape
        array = np.full((height, left + width + right), np.nan, values.dtype)
        array[:, left : left + width] = values
        rows.append(Rows(device.array(array), height, width, array.shape[1], left))
    before = rng.integers(-9, 9, (3, 20 + columns[0], 176)).astype(dtype)
    out = device.array(before)
    hopper_outer(device, *rows, tables(device, sums), sums.rows, out, window=(5, 24))
    expected, inside = before.copy(), (slice(None), slice(5, 5 + columns[0]), slice(24, 160))
    expected[inside] = due(sums, p, q)
    assert_same_bits(without_sign_of_zero(device.numpy(out)), without_sign_of_zero(expected))


@BY_DTYPE
def test_random_numbers_are_within_the_bound_of_what_is_rounded(rng, device, dtype):
    sums = Sums([200, 70, 0, 129], columns=(264, 392))
    p, q = operands(rng, sums, dtype, random=True)
    out = device.empty([4, *sums.columns], np.dtype(dtype).name)
    hopper_outer(device, packed(device, p), packed(device, q), tables(device, sums), sums.rows, out)
    expected = due(sums, p, q)
    error = np.linalg.norm(device.numpy(out).astype(np.float64) - expected)
    assert error <= float(ml_dtypes.finfo(dtype).eps) * np.linalg.norm(expected)


@in_turn({"dtype": DTYPES, "transpose": {"plain": False, "transposed": True}})
def test_layers_take_their_gradients_from_it(rng, device, launched, dtype, transpose):
    problem = Problem(rng, Case(100, 24, 8, 2, 2, unassigned=0.1), dtype, transpose)
    assert_all_same(problem.run(device), problem.due())
    assert len(launched) == 2
    assert {each["num_rows"] for each in launched} == {problem.plan.num_rows}


@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
def test_layers_that_gather_make_their_gradients_from_tokens(rng, device, launched, monkeypatch, transpose):
    monkeypatch.setattr(mlp, "gathers", lambda *_, **__: True)
    problem = Problem(rng, Case(100, 24, 8, 2, 2, unassigned=0.1, alignment=8), ml_dtypes.bfloat16, transpose)
    made, due_ = problem.run(device), problem.due()
    live = problem.plan.row_to_token[: problem.end] >= 0
    made[1], due_[1] = made[1][live], due_[1][live]
    assert_all_same(made, due_)
    assert [each["gathered"] for each in launched] == ([1, 2] if transpose else [2, 1])
    assert {each["num_sources"] for each in launched} == {100}


def test_layers_take_their_gradients_from_it_window_by_window(rng, device, launched, monkeypatch):
    monkeypatch.setattr(mlp, "_COLUMN_STEP", 16)
    monkeypatch.setattr(mlp, "gathers_in_wgrad", lambda *_: False)
    problem = Problem(rng, Case(60, 40, 8, 3, 2), ml_dtypes.bfloat16, False)
    assert_all_same(problem.run(device, 1 << 12), problem.due())
    assert {each["first_p"] for each in launched} == {each["first_q"] for each in launched} == {0, 16, 32}


@pytest.mark.parametrize(
    ("most", "gathered"), [(16, [0, 2]), (15, [0, 0])], ids=["few other columns", "many other columns"]
)
def test_rows_that_no_other_product_takes_are_gathered_beside_few_columns(
    rng, device, launched, monkeypatch, most, gathered
):
    """Wgrad of W1, with 2n = 16 columns, gathers rows; wgrad of W2 reads rows permuted earlier."""
    monkeypatch.setattr(gather_heuristic, "_MAX_COLUMNS_OF_GATHERING_WGRAD", most)
    problem = Problem(rng, Case(50, 24, 8, 3, 2), ml_dtypes.bfloat16, True)
    assert_all_same(problem.run(device), problem.due())
    assert [each["gathered"] for each in launched] == gathered


@pytest.mark.parametrize(("dtype", "adds"), [(np.float32, False), (ml_dtypes.bfloat16, True)], ids=["float32", "added"])
def test_layers_leave_other_gradients_to_triton(rng, device, launched, dtype, adds):
    problem = Problem(rng, Case(20, 40, 8, 3, 2), ml_dtypes.bfloat16, False)
    problem.run(
        device, into=tuple((device.array(each.astype(dtype)), adds) for each in (problem.gate_up, problem.down))
    )
    assert launched == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"gpu": Gpu(100, 148)}, False),
        ({"gpu": Gpu(80, 108)}, False),
        ({"rows": 0}, False),
        ({"rows": 4}, True),
        ({"width": 68}, False),
        ({"stride": 132}, False),
        ({"out": (4, 64, 132)}, False),
        ({"offset": 2}, False),
        ({"kernel": None}, False),
        ({"adds": True}, False),
        ({"dtype": np.float32}, False),
    ],
)
def test_the_kernel_is_used_where_it_can_be(changes, expected):
    from .interpreter import NumpyDevice

    options = {"gpu": HOPPER, "rows": 2048, "width": 64, "stride": 128, "out": (4, 64, 136), "offset": 0}
    options |= {"kernel": object(), "adds": False, "dtype": ml_dtypes.bfloat16, **changes}
    device = NumpyDevice()
    device.grouped_outer = options["kernel"]
    array = device.array(np.zeros(8, ml_dtypes.bfloat16), offset=options["offset"])
    rows = Rows(array, options["rows"], options["width"], options["stride"])
    out = device.array(np.zeros(options["out"], options["dtype"]))
    assert takes_outer(device, options["gpu"], options["rows"], rows, rows, out, options["adds"]) == expected


def test_a_library_without_the_kernel_has_none():
    assert grouped_outer_of(object()) is None


def test_the_struct_mirrors_the_header():
    assert list(GroupedOuterParams._fields_) == fields_in_header("pmo_grouped_outer_params")


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("struct_size", 8, "struct_size must be the size of pmo_grouped_outer_params"),
        ("dtype", 0, "dtype must be PMO_FLOAT16 or PMO_BFLOAT16"),
        ("num_rows", -1, "num_rows must be in"),
        ("num_experts", 0, "num_experts must be in"),
        ("num_experts", 1 << 16, "num_experts must be below 2^30 / blocks"),
        ("p_columns", 60, "p_columns must be a multiple of 8"),
        ("q_columns", 12, "q_columns must be a multiple of 8"),
        ("out_rows", -1, "out_rows must be in"),
        ("out_columns", 4, "out_columns must be a multiple of 8"),
        ("first_p", 8, "first_p must be a row of out"),
        ("first_q", 4, "first_q must be a multiple of 8"),
        ("first_q", 8, "first_q must be a multiple of 8, and a column of out"),
        ("p_row_stride", 1 << 15, "p_row_stride must be a multiple of 8 that holds a row"),
        ("q_row_stride", (1 << 17) + 4, "q_row_stride must be a multiple of 8 that holds a row"),
        ("p", 8, "p must be an array at a multiple of 16 bytes"),
        ("q", 8, "q must be an array at a multiple of 16 bytes"),
        ("out", 8, "out must be an array at a multiple of 16 bytes"),
        ("first", 0, "first"),
        ("stop", 0, "stop"),
        ("counters", 0, "counters"),
        ("gathered", 3, "gathered must be one of pmo_grouped_gathered"),
        ("gathered", 1, "row_to_token"),
        ("gathered", 2, "row_to_token"),
    ],
)
def test_bad_params_are_refused_before_anything_is_launched(field, value, message):
    library = ctypes.CDLL(os.environ["PMO_CORE_LIBRARY"])
    library.pmo_last_error.restype = ctypes.c_char_p
    high, wide = 1 << 16, 1 << 17
    sizes = {"num_rows": 4, "num_experts": 1, "p_columns": high, "q_columns": wide, "out_rows": high}
    sizes |= {"out_columns": wide, "p_row_stride": high, "q_row_stride": wide}
    arrays = dict.fromkeys(("p", "q", "first", "stop", "out", "counters"), 1 << 20)
    params = GroupedOuterParams(ctypes.sizeof(GroupedOuterParams), **sizes, **arrays, dtype=2)
    setattr(params, field, value)
    assert library.pmo_grouped_outer_cuda(ctypes.byref(params), None) == 1
    assert message in library.pmo_last_error().decode()
