# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs in 16 bits, on a GPU of compute capability 9.0: exact sums have the bits of the oracle."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from ..reference.cases import assert_same_bits
from .binding import Core
from .grouped_cases import (
    EXPERTS_AT_LIMITS,
    ROWS,
    GemmCase,
    assert_like_oracle,
    assert_near_oracle,
    integers,
    rows_of_many,
    tables_of,
    tokens_of,
)
from .guards import MakeOutput
from .layer_problems import BFLOAT16
from .operators.grouped_gemm import (
    FEW_ROWS,
    PING_PONG,
    SWAP_AB,
    TILE_COLUMNS,
    WIDE_COLUMNS,
    ExpertRows,
    ProductParams,
    Result,
    product_params,
    schedule,
)
from .structs import IDS_KINDS

pytestmark = pytest.mark.cuda_only

FLOAT16 = np.dtype(np.float16)
BY_DTYPE = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
BY_CASE = pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
BY_LAYOUT = pytest.mark.parametrize("transpose", [False, True], ids=["as is", "transposed"])
BY_RESULT = pytest.mark.parametrize("result", list(Result), ids=lambda result: result.name.lower())
WITH_SWIGLU = pytest.mark.parametrize("result", [Result.GATED, Result.GRADIENT], ids=["gated", "gradient"])
BY_KERNEL = pytest.mark.parametrize(
    "tile",
    [(SWAP_AB, TILE_COLUMNS), (PING_PONG, TILE_COLUMNS), (PING_PONG, WIDE_COLUMNS)],
    ids=["swap-AB", "ping-pong", "ping-pong, 192 columns"],
)

BY_KERNEL_AND_RESULT = pytest.mark.parametrize(
    ("tile_rows", "result"),
    [(PING_PONG, Result.PLAIN), *((SWAP_AB, result) for result in Result)],
    ids=["ping-pong, plain", *(f"swap-AB, {result.name.lower()}" for result in Result)],
)


class Gemm:
    """Operands of a GEMM whose sums are exact; for SwiGLU, gates where it is exact as well.

    Rows of no expert are NaN in x and H, and so are rows of no token in H and the weights of a gradient.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        case: GemmCase,
        result: Result,
        dtype: np.dtype = BFLOAT16,
        *,
        transpose: bool = False,
        gathers: bool = False,
        weighted: bool = True,
    ) -> None:
        rows, inner, width = case
        total, experts, outer = rows.total, len(rows.sizes), width * (1 + (result == Result.GATED))
        self.case, self.result, self.dtype, self.transpose, self.gathers = case, result, dtype, transpose, gathers
        height = 37 if gathers else total
        x = integers(rng, (height, inner), dtype, 1.0 if result == Result.PLAIN else 8 / inner)
        x[:, 0] = 1
        if not gathers:
            x[~rows.owned] = np.nan
        self.x = x
        matrix = integers(rng, (experts, inner, outer), dtype, 0.3 if result == Result.GATED else 1.0)
        if result == Result.GATED:
            matrix[:, :, :width] = 0
            matrix[:, 0, :width] = rng.choice([64, 128], (experts, width))
        self.matrix = np.ascontiguousarray(matrix.swapaxes(1, 2)) if transpose else matrix
        self.row_to_token = tokens_of(rng, total, 37)
        self.weights = rng.choice([0.5, 1, 2], total).astype(np.float32) if weighted else None
        live = (self.row_to_token >= 0) & rows.owned
        gates, ups = rng.choice([64, 128], (total, width)), rng.integers(-3, 4, (total, width))
        self.hidden = np.concatenate([gates, ups], axis=1).astype(dtype)
        self.hidden[~live] = np.nan
        if result == Result.GRADIENT and weighted:
            self.weights[~live] = np.nan

    def make(
        self, output: MakeOutput, launch: dict[str, NDArray], *, keeps: bool = True, **options: Any
    ) -> ProductParams:
        total, width = self.case.rows.total, self.case.width
        if self.result != Result.PLAIN and keeps:
            options["hidden"] = output((total, 2 * width), self.dtype)
        if self.result == Result.GRADIENT:
            options["hidden"][...] = self.hidden
            options["d_weights"] = output((total, -(-width // TILE_COLUMNS)), np.float32)
        if self.gathers or self.result == Result.GRADIENT:
            options["row_to_token"] = self.row_to_token
        out = output((total, options.get("width", width)), self.dtype)
        options = {"weights": self.weights, "result": self.result, "gathers": int(self.gathers), **options}
        x = options.pop("x", self.x)
        return product_params(x, self.matrix, out, launch, transpose=self.transpose, **options)

    def check_few_rows(self, core: Core, ids: DTypeLike = np.int32, **options: Any) -> None:
        """With the kernel for few rows."""
        groups = {name: np.array(each, ids) for name, each in zip(("sizes", "offsets"), self.groups, strict=True)}
        launch: dict[str, Any] = {**groups, "tile_rows": FEW_ROWS, "sizes_kind": IDS_KINDS[np.dtype(ids)]}
        launch["offsets_kind"] = launch["sizes_kind"]
        launch |= options
        assert_like_oracle(core, "grouped_product", lambda output: self.make(output, launch, keeps=False))

    @property
    def groups(self) -> tuple[list[int], list[int]]:
        return list(self.case.rows.sizes), self.case.rows.starts

    def check(self, core: Core, **options: Any) -> dict[str, NDArray]:
        launch = schedule(tables_of(core, self.case.rows, options.get("tile_rows", SWAP_AB)))
        return assert_like_oracle(core, "grouped_product", lambda output: self.make(output, launch, **options))


@BY_DTYPE
@BY_LAYOUT
@BY_KERNEL
@BY_CASE
def test_plain_results(
    core: Core, rng: np.random.Generator, case: GemmCase, tile: tuple[int, int], transpose: bool, dtype: np.dtype
) -> None:
    gemm = Gemm(rng, case, Result.PLAIN, dtype, transpose=transpose)
    gemm.check(core, tile_rows=tile[0], tile_columns=tile[1])


@BY_DTYPE
@BY_LAYOUT
@WITH_SWIGLU
@pytest.mark.parametrize("gathers", [False, True], ids=["rows", "gathered rows"])
@BY_CASE
def test_results_of_swiglu(
    core: Core,
    rng: np.random.Generator,
    case: GemmCase,
    gathers: bool,
    result: Result,
    transpose: bool,
    dtype: np.dtype,
) -> None:
    Gemm(rng, case, result, dtype, transpose=transpose, gathers=gathers).check(core)


FEW = pytest.mark.parametrize(
    ("result", "gathers"),
    [(Result.PLAIN, False), (Result.GATED, False), (Result.GATED, True)],
    ids=["plain", "gated", "gated, gathered rows"],
)


@BY_DTYPE
@BY_LAYOUT
@FEW
@pytest.mark.parametrize("name", [name for name, case in ROWS.items() if len(case.rows.sizes) <= 512])
def test_results_of_few_rows(
    core: Core, rng: np.random.Generator, name: str, result: Result, gathers: bool, transpose: bool, dtype: np.dtype
) -> None:
    Gemm(rng, ROWS[name], result, dtype, transpose=transpose, gathers=gathers).check_few_rows(core)


@pytest.mark.parametrize("experts", [1, 31, 32, 33, 191, 192, 193, 511, 512])
@FEW
def test_few_rows_of_many_experts(
    core: Core, rng: np.random.Generator, experts: int, result: Result, gathers: bool
) -> None:
    sizes = [(expert * 37) % 67 if expert % 5 < 2 else 0 for expert in range(experts)]
    Gemm(rng, GemmCase(ExpertRows([*sizes[:-1], 5]), 136, 264), result, gathers=gathers).check_few_rows(core, np.int64)


@pytest.mark.parametrize("inner", [8, 64, 72, 256, 264, 520])
@FEW
def test_few_rows_of_any_length(
    core: Core, rng: np.random.Generator, inner: int, result: Result, gathers: bool
) -> None:
    """Around the steps of K and the stages of the pipeline."""
    Gemm(rng, GemmCase(ExpertRows([1, 0, 17, 64, 65]), inner, 72), result, gathers=gathers).check_few_rows(core)


@BY_LAYOUT
def test_few_rows_by_chunks_of_columns_and_without_weights(
    core: Core, rng: np.random.Generator, transpose: bool
) -> None:
    for first_column, width in ((0, 136), (136, 264), (392, 8)):
        case = GemmCase(ExpertRows([70, 0, 41]), 72, 400)
        gemm = Gemm(rng, case, Result.PLAIN, transpose=transpose, weighted=first_column > 0)
        gemm.check_few_rows(core, first_column=first_column, width=width)


def test_few_rows_of_groups_that_overlap_or_end_late_are_cut(core: Core, rng: np.random.Generator) -> None:
    class Cut(Gemm):
        @property
        def groups(self) -> tuple[list[int], list[int]]:
            return [70, -3, 20, 90], [0, 60, 60, 75]

    Cut(rng, GemmCase(ExpertRows([70, 0, 10, 20]), 72, 40), Result.PLAIN).check_few_rows(core)


@pytest.mark.parametrize("result", [Result.PLAIN, Result.GATED], ids=lambda result: result.name.lower())
@BY_DTYPE
def test_few_rows_have_the_bits_of_the_other_kernels(
    core: Core, rng: np.random.Generator, dtype: np.dtype, result: Result
) -> None:
    gemm = Gemm(rng, GemmCase(ExpertRows([1, 7, 0, 33, 65, 130]), 1032, 264), result, dtype)
    gemm.x, gemm.matrix = (rng.standard_normal(each.shape).astype(dtype) for each in (gemm.x, gemm.matrix))
    outs = []
    few = {"sizes": np.array(gemm.groups[0], np.int32), "tile_rows": FEW_ROWS}
    for launch in (schedule(tables_of(core, gemm.case.rows)), few):
        outs.append(np.zeros((gemm.case.rows.total, gemm.case.width), dtype))
        made = gemm.make(lambda *_: outs[-1], launch, keeps=False)
        core.run("grouped_product", made)
    assert_same_bits(outs[1], outs[0])


@pytest.mark.parametrize("gathers", [False, True], ids=["rows", "gathered rows"])
def test_without_h(core: Core, rng: np.random.Generator, gathers: bool) -> None:
    Gemm(rng, ROWS["several tiles of an expert"], Result.GATED, gathers=gathers).check(core, keeps=False)


@BY_KERNEL
def test_plain_results_without_weights(core: Core, rng: np.random.Generator, tile: tuple[int, int]) -> None:
    gemm = Gemm(rng, ROWS["several tiles of an expert"], Result.PLAIN, weighted=False)
    gemm.check(core, tile_rows=tile[0], tile_columns=tile[1])


def test_gradients_without_weights_and_without_those_of_weights(core: Core, rng: np.random.Generator) -> None:
    gemm = Gemm(rng, ROWS["several tiles of an expert"], Result.GRADIENT, weighted=False)
    gemm.check(core)
    launch = schedule(tables_of(core, gemm.case.rows))

    def make(output: MakeOutput) -> ProductParams:
        params = gemm.make(output, launch)
        del params.arrays["d_weights"]
        params.point_at(d_weights=0)
        return params

    assert_like_oracle(core, "grouped_product", make)


@BY_KERNEL
@BY_LAYOUT
@pytest.mark.parametrize(("first_column", "width"), [(0, 136), (136, 264), (392, 8)])
def test_chunks_of_columns(
    core: Core, rng: np.random.Generator, first_column: int, width: int, transpose: bool, tile: tuple[int, int]
) -> None:
    gemm = Gemm(rng, GemmCase(ExpertRows([170, 0, 41]), 72, 400), Result.PLAIN, transpose=transpose)
    gemm.check(core, first_column=first_column, width=width, tile_rows=tile[0], tile_columns=tile[1])


@BY_KERNEL_AND_RESULT
def test_chunks_of_rows(core: Core, rng: np.random.Generator, tile_rows: int, result: Result) -> None:
    """A chunk's memory ends with its last tile, and a chunk writes the rows of its tiles only."""
    gemm = Gemm(rng, GemmCase(ExpertRows([170, 1, 0, 161, 320]), 136, 72), result)
    total, chunks, chunk_rows = gemm.case.rows.total, 4, 170
    tables = tables_of(core, gemm.case.rows, tile_rows, chunks, chunk_rows)
    for chunk in range(chunks):
        first = chunk * chunk_rows
        end = min(first + chunk_rows + SWAP_AB, total)
        options = {"x": gemm.x[first:end].copy(), "first_row": first, "tile_rows": tile_rows}
        launch = schedule(tables, chunks, chunk)
        assert_like_oracle(core, "grouped_product", lambda output: gemm.make(output, launch, **options))  # noqa: B023


@BY_KERNEL_AND_RESULT
def test_rows_with_a_stride(core: Core, rng: np.random.Generator, tile_rows: int, result: Result) -> None:
    for gathers in (False, True) if result != Result.PLAIN else (False,):
        gemm = Gemm(rng, ROWS["several tiles of an expert"], result, gathers=gathers)
        wide = np.full((len(gemm.x), gemm.x.shape[1] + 24), np.nan, BFLOAT16)
        wide[:, 8:-16] = gemm.x
        gemm.check(core, x=wide[:, 8:-16], tile_rows=tile_rows)


@BY_KERNEL_AND_RESULT
@pytest.mark.parametrize("experts", EXPERTS_AT_LIMITS)
def test_many_experts(core: Core, rng: np.random.Generator, experts: int, tile_rows: int, result: Result) -> None:
    case = GemmCase(rows_of_many(experts), 24, 16)
    Gemm(rng, case, result).check(core, tile_rows=tile_rows)


@BY_DTYPE
def test_gradients_are_those_of_the_rounded_gradient_of_activations(
    core: Core, rng: np.random.Generator, dtype: np.dtype
) -> None:
    """As if it went through memory."""
    gemm = Gemm(rng, GemmCase(ExpertRows([41]), 136, 24), Result.GRADIENT, dtype)
    gemm.x = (rng.integers(-31, 32, gemm.x.shape) / 64).astype(dtype)
    gemm.matrix = rng.integers(-31, 32, gemm.matrix.shape).astype(dtype)
    live = gemm.row_to_token >= 0
    gemm.hidden[live, 24:] = 1
    sums = gemm.x[live].astype(np.float64) @ gemm.matrix[0].astype(np.float64)
    assert (sums.astype(dtype).astype(np.float64) != sums).any()
    gemm.check(core)


@BY_RESULT
@BY_DTYPE
def test_random_numbers_are_near_the_oracle(
    core: Core, rng: np.random.Generator, dtype: np.dtype, result: Result
) -> None:
    gemm = Gemm(rng, GemmCase(ExpertRows([170, 0, 41]), 392, 264), result, dtype)
    gemm.x, gemm.matrix = (rng.standard_normal(each.shape).astype(dtype) for each in (gemm.x, gemm.matrix))
    live = gemm.row_to_token >= 0
    gemm.hidden[live] = rng.standard_normal(gemm.hidden[live].shape)
    launch = schedule(tables_of(core, gemm.case.rows))
    error = 4 * float(ml_dtypes.finfo(dtype).eps)
    assert_near_oracle(core, "grouped_product", lambda output: gemm.make(output, launch), error)
