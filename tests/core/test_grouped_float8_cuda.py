# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs in float8 and block quantisation on a GPU of compute capability 9.0, against their oracles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.reference import quantize_1x128, quantize_128x128
from paddle_moe_ops.testing.tolerances import FLOAT8_ERROR

from .binding import Core
from .gemms_in_numpy import FLOAT8
from .grouped_cases import (
    EXPERTS_AT_LIMITS,
    GemmCase,
    assert_like_oracle,
    assert_near_oracle,
    integers,
    rows_of_many,
    tables_of,
)
from .guards import MakeOutput
from .layer_problems import BFLOAT16
from .operators.grouped_gemm import (
    AMAX_MIN,
    GROUP,
    PING_PONG,
    ExpertRows,
    Float8Params,
    Result,
    float8_params,
    schedule,
)

pytestmark = pytest.mark.cuda_only

BY_RESULT = pytest.mark.parametrize("result", list(Result), ids=lambda result: result.name.lower())
# K and columns: a multiple of 128 with SwiGLU. Plain results have 24 columns fewer.
CASES = {
    "several tiles of an expert": GemmCase(ExpertRows([130, 1, 0, 129, 320]), 272, 128),
    "a few rows": GemmCase(ExpertRows([3, 0, 1, 7]), 16, 128),
    "whole tiles": GemmCase(ExpertRows([128, 256]), 256, 256),
    "wide results": GemmCase(ExpertRows([41, 129]), 144, 384),
    "gaps between experts, and rows after them": GemmCase(ExpertRows([7, 0, 60, 31], [0, 16, 32, 112], 200), 48, 128),
    "rows of no expert only": GemmCase(ExpertRows([0, 0], num_rows=40), 48, 128),
    "no rows": GemmCase(ExpertRows([0, 0, 0]), 48, 128),
    "more tiles than CTAs": GemmCase(ExpertRows([(7 * expert) % 150 for expert in range(700)]), 16, 128),
}
BY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
Codes = tuple[NDArray, NDArray]


class Gemm:
    """Codes of integers with powers of two as scales, whose sums are exact and in the range of bfloat16.

    For SwiGLU, gates are 64 or 128. Rows of no expert have NaN in codes and scales, and so has H in rows of no token.
    """

    def __init__(self, rng: np.random.Generator, case: GemmCase, result: Result, *, weighted: bool = True) -> None:
        rows, inner, width = case
        if result == Result.PLAIN:
            width -= 24
        total, experts, outer, depth = (
            rows.total,
            len(rows.sizes),
            width * (1 + (result == Result.GATED)),
            -(-inner // 128),
        )
        self.rows, self.result, self.width = rows, result, width
        codes = integers(rng, (total, inner), FLOAT8, 4 / inner if result == Result.GRADIENT else 8 / inner)
        codes[:, 0] = 1
        scales = rng.choice([0.5, 1, 2], (total, depth)).astype(np.float32)
        scales[:, 0] = 1
        codes[~rows.owned], scales[~rows.owned] = np.nan, np.nan
        self.x: Codes = codes, scales
        matrix = integers(rng, (experts, outer, inner), FLOAT8, 0.3)
        matrix_scales = rng.choice([1, 2], (experts, -(-outer // GROUP), depth)).astype(np.float32)
        if result == Result.GATED:
            matrix[:, :width] = 0
            matrix[:, :width, 0] = 64
        self.matrix: Codes = matrix, matrix_scales
        self.row_to_token = np.where(rng.random(total) < 0.15, -1, np.arange(total)).astype(np.int32)
        live = (self.row_to_token >= 0) & rows.owned
        self.weights = rng.choice([0.5, 1, 2], total).astype(np.float32) if weighted else None
        if weighted and result == Result.GRADIENT:
            self.weights[~live] = np.nan
        gates, ups = rng.choice([64, 128], (total, width)), rng.integers(-3, 4, (total, width))
        self.hidden = np.concatenate([gates, ups], axis=1).astype(BFLOAT16)
        self.hidden[~live] = np.nan
        self.hidden_codes = self.hidden.astype(FLOAT8)
        self.hidden_scales = np.where(live[:, None], 1, np.full((1, 2 * width // GROUP), np.nan)).astype(np.float32)

    def make(
        self,
        output: MakeOutput,
        launch: dict[str, NDArray],
        *,
        has_out: bool = True,
        writes_codes: bool = False,
        hidden_in_codes: bool = False,
        codes_in_place: bool = False,
        **options: Any,
    ) -> Float8Params:
        """Params. ``hidden_in_codes``: H is written or read as codes, which those of its gradient replace in place."""
        total, result, wide = self.rows.total, self.result, 2 * self.width
        x, width = options.pop("x", self.x), options.pop("width", self.width)
        if has_out:
            options["out"] = output((total, width), BFLOAT16)
        if result == Result.GRADIENT or (result == Result.GATED and not hidden_in_codes):
            options["hidden"] = output((total, wide), BFLOAT16)
        if hidden_in_codes:
            options["hidden_codes"] = output((total, wide), FLOAT8)
            options["hidden_scales"] = output((total, wide // GROUP), np.float32)
        if result == Result.GRADIENT:
            options["row_to_token"] = self.row_to_token
            options["d_weights"] = output((total, width // GROUP), np.float32)
            options["hidden"][...] = np.nan if hidden_in_codes else self.hidden
            if hidden_in_codes:
                options["hidden_codes"][...], options["hidden_scales"][...] = self.hidden_codes, self.hidden_scales
        if codes_in_place:
            options["codes"], options["scales"] = options["hidden_codes"], options["hidden_scales"]
        elif writes_codes:
            columns = width if result == Result.GATED else wide
            options["codes"] = output((total, columns), FLOAT8)
            options["scales"] = output((total, columns // GROUP), np.float32)
        options = {"weights": self.weights, "result": result, **launch, **options}
        return float8_params(x, self.matrix, total, width, **options)

    def check(self, core: Core, launches: int = 1, **options: Any) -> None:
        launch = schedule(tables_of(core, self.rows, PING_PONG))
        assert_like_oracle(core, "grouped_float8", lambda output: self.make(output, launch, **options), launches)


@BY_CASE
def test_plain_results(core: Core, rng: np.random.Generator, case: GemmCase) -> None:
    for weighted in (True, False):
        Gemm(rng, case, Result.PLAIN, weighted=weighted).check(core)


@pytest.mark.parametrize("hidden_in_codes", [False, True], ids=["H", "codes of H"])
@pytest.mark.parametrize("has_out", [False, True], ids=["codes", "codes and bfloat16"])
@BY_CASE
def test_swiglu_and_its_codes(
    core: Core, rng: np.random.Generator, case: GemmCase, has_out: bool, hidden_in_codes: bool
) -> None:
    gemm = Gemm(rng, case, Result.GATED)
    gemm.check(core, has_out=has_out, writes_codes=True, hidden_in_codes=hidden_in_codes)


def test_swiglu_without_codes(core: Core, rng: np.random.Generator) -> None:
    Gemm(rng, CASES["several tiles of an expert"], Result.GATED).check(core)


GRADIENTS = {
    "no codes": {},
    "codes of the gradient": {"writes_codes": True},
    "codes of H and of the gradient": {"writes_codes": True, "hidden_in_codes": True},
    "codes in place": {"hidden_in_codes": True, "codes_in_place": True},
}


@pytest.mark.parametrize("options", GRADIENTS.values(), ids=GRADIENTS)
@BY_CASE
def test_gradients_of_swiglu(core: Core, rng: np.random.Generator, case: GemmCase, options: dict[str, bool]) -> None:
    for weighted in (True, False):
        Gemm(rng, case, Result.GRADIENT, weighted=weighted).check(core, **options)


@pytest.mark.parametrize(("first_column", "width"), [(0, 128), (128, 264), (384, 8)])
def test_chunks_of_columns(core: Core, rng: np.random.Generator, first_column: int, width: int) -> None:
    gemm = Gemm(rng, GemmCase(ExpertRows([170, 0, 41]), 144, 416), Result.PLAIN)
    gemm.check(core, first_column=first_column, width=width)


@BY_RESULT
def test_chunks_of_rows(core: Core, rng: np.random.Generator, result: Result) -> None:
    """A chunk's memory ends with its last tile, and a chunk writes the rows of its tiles only."""
    gemm = Gemm(rng, GemmCase(ExpertRows([170, 1, 0, 161, 320]), 144, 128), result)
    chunks, chunk_rows = 4, 170
    tables = tables_of(core, gemm.rows, PING_PONG, chunks, chunk_rows)
    for chunk in range(chunks):
        first = chunk * chunk_rows
        rows = slice(first, min(first + chunk_rows + PING_PONG, gemm.rows.total))
        options = {"x": tuple(each[rows].copy() for each in gemm.x), "first_row": first}
        launch = schedule(tables, chunks, chunk)
        assert_like_oracle(core, "grouped_float8", lambda output: gemm.make(output, launch, **options))  # noqa: B023


@BY_RESULT
@pytest.mark.parametrize("experts", EXPERTS_AT_LIMITS)
def test_many_experts(core: Core, rng: np.random.Generator, experts: int, result: Result) -> None:
    inner = 16 if experts > 3000 else 144
    Gemm(rng, GemmCase(rows_of_many(experts), inner, 128), result).check(core)


@BY_RESULT
@pytest.mark.parametrize("experts", [512, 1025, 1027, 2049])
def test_every_tile_of_many_experts_is_stored_in_every_launch(
    core: Core, rng: np.random.Generator, experts: int, result: Result
) -> None:
    case = GemmCase(ExpertRows([PING_PONG] * experts), 144 if experts < 1000 else 16, 128)
    Gemm(rng, case, result).check(core, launches=5)


@BY_RESULT
def test_random_numbers_are_near_the_oracle(core: Core, rng: np.random.Generator, result: Result) -> None:
    gemm = Gemm(rng, GemmCase(ExpertRows([170, 0, 41]), 400, 256), result)
    gemm.x = quantize_1x128(rng.standard_normal(gemm.x[0].shape).astype(BFLOAT16), amax_min=AMAX_MIN)
    gemm.matrix = quantize_128x128(rng.standard_normal(gemm.matrix[0].shape).astype(BFLOAT16), amax_min=AMAX_MIN)
    live = gemm.row_to_token >= 0
    gemm.hidden[live] = rng.standard_normal(gemm.hidden[live].shape)
    launch = schedule(tables_of(core, gemm.rows, PING_PONG))
    options = {"writes_codes": result != Result.PLAIN}
    assert_near_oracle(core, "grouped_float8", lambda output: gemm.make(output, launch, **options), FLOAT8_ERROR)
