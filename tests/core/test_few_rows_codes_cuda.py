# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel for few rows on matrices of codes: the bits of kernels that have tests of their own.

Integer codes: those of the kernel on the values of the codes. Float8: those of the kernel on quantised rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.reference import MATRIX_FORMATS, dequantize_matrices, quantize_1x128, quantize_matrices

from ..reference.cases import assert_same_bits
from .binding import Core
from .grouped_cases import GemmCase, tables_of, tokens_of
from .guards import MakeOutput, guarded_outputs
from .layer_problems import BFLOAT16
from .operators.grouped_gemm import (
    AMAX_MIN,
    FEW_ROWS,
    PING_PONG,
    ExpertRows,
    Result,
    float8_params,
    product_params,
    schedule,
)
from .structs import IDS_KINDS

pytestmark = pytest.mark.cuda_only

FLOAT16 = np.dtype(np.float16)
TOKENS = 37
# K and columns: a multiple of 128 for float8 with SwiGLU.
CASES = {
    "one row": GemmCase(ExpertRows([0, 0, 1, 0]), 256, 128),
    "several tiles of an expert": GemmCase(ExpertRows([130, 1, 0, 129, 63]), 288, 128),
    "a few rows": GemmCase(ExpertRows([3, 0, 17, 7]), 32, 128),
    "rows of any number": GemmCase(ExpertRows([15, 16, 17, 33, 48, 49, 64, 65]), 160, 256),
    "up to 8 rows of an expert on average": GemmCase(ExpertRows([17, 0, 8, 9, 0, 33, 1, 0, 0, 0]), 160, 384),
    "more than 56": GemmCase(ExpertRows([80, 81, 95, 96, 97, 193, 64, 1]), 160, 384),
    "K longer than the pipeline": GemmCase(ExpertRows([5, 40]), 2080, 384),
    "gaps between experts, and rows after them": GemmCase(ExpertRows([7, 0, 60, 31], [0, 16, 32, 112], 200), 96, 128),
    "rows of no expert only": GemmCase(ExpertRows([0, 0], num_rows=40), 32, 128),
    "more tiles than CTAs": GemmCase(ExpertRows([(7 * expert) % 70 for expert in range(300)]), 32, 256),
    "as many experts as it takes": GemmCase(ExpertRows([expert % 3 for expert in range(512)]), 32, 128),
}
BY_FORMAT = pytest.mark.parametrize("format", MATRIX_FORMATS)
BY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
FEW = pytest.mark.parametrize(
    ("result", "gathers"),
    [(Result.PLAIN, False), (Result.GATED, False), (Result.GATED, True)],
    ids=["plain", "gated", "gated, gathered rows"],
)


def contiguous(array: NDArray) -> NDArray:
    """A copy in memory of its own, which a GPU's mirror of memory needs."""
    return np.array(array, order="C", copy=True)


class Gemm:
    """Random rows and codes. Rows of no expert are NaN unless rows are gathered."""

    def __init__(
        self,
        rng: np.random.Generator,
        case: GemmCase,
        result: Result,
        format: str,
        dtype: np.dtype = BFLOAT16,
        *,
        gathers: bool = False,
        wide_scales: bool = False,
    ) -> None:
        rows, self.inner, self.width = case
        self.rows, self.result, self.format, self.dtype, self.gathers = rows, result, format, dtype, gathers
        self.outer = self.width * (1 + (result == Result.GATED))
        self.x = rng.standard_normal((TOKENS if gathers else rows.total, self.inner)).astype(dtype)
        if not gathers:
            self.x[~rows.owned] = np.nan
        values = rng.standard_normal((len(rows.sizes), self.outer, self.inner)) * self.inner**-0.5
        made = quantize_matrices(values.astype(dtype), format=format, transpose=True)
        self.codes, self.scales = map(contiguous, made)
        if wide_scales:
            self.scales = (self.scales * rng.uniform(1, 2, self.scales.shape)).astype(np.float32)
        self.row_to_token = tokens_of(rng, rows.total, TOKENS) if gathers else None
        self.weights = rng.random(rows.total).astype(np.float32)

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        made = {"weights": self.weights, "result": self.result, "gathers": int(self.gathers), **options}
        return made if self.row_to_token is None else {**made, "row_to_token": self.row_to_token}

    def few_rows(self, output: MakeOutput, ids: type = np.int32, **options: Any) -> Any:
        """Params of the kernel, of codes or of ``matrix``."""
        groups = {"sizes": np.array(self.rows.sizes, ids), "offsets": np.array(self.rows.starts, ids)}
        launch: dict[str, Any] = {**groups, "tile_rows": FEW_ROWS, "sizes_kind": IDS_KINDS[np.dtype(ids)]}
        launch["offsets_kind"] = launch["sizes_kind"]
        out = output((self.rows.total, options.get("width", self.width)), self.dtype)
        matrix = options.pop("matrix", None)
        if matrix is None:
            matrix, options["matrix_scales"] = self.codes, self.scales
            options |= {"matrix_format": MATRIX_FORMATS.index(self.format), "amax_min": AMAX_MIN}
        options |= {"inner": self.inner, "outer": self.outer}
        return product_params(self.x, matrix, out, launch, transpose=True, **self.options(options))

    def due(self, core: Core, output: MakeOutput, **options: Any) -> NDArray:
        """The result of another kernel."""
        if self.format != "fp8_128x128":
            of = {"format": self.format, "inner": self.inner, "transpose": True, "dtype": self.dtype}
            values = contiguous(dequantize_matrices(self.codes, self.scales, **of))
            params = self.few_rows(output, matrix=values, **options)
            core.run("grouped_product", params)
            return params.arrays["out"]
        rows, made = self.x, self.options(options)
        if self.row_to_token is not None:
            found = (self.row_to_token >= 0) & (self.row_to_token < TOKENS)
            rows = np.where(found[:, None], self.x[np.where(found, self.row_to_token, 0)], np.zeros(1, self.dtype))
        made.pop("gathers")
        made.pop("row_to_token", None)
        out = output((self.rows.total, made.get("width", self.width)), self.dtype)
        launch = schedule(tables_of(core, self.rows, PING_PONG))
        matrix, width = (self.codes, self.scales), made.pop("width", self.width)
        codes = quantize_1x128(rows, amax_min=AMAX_MIN)
        params = float8_params(codes, matrix, self.rows.total, width, **{**launch, **made, "out": out})
        core.run("grouped_float8", params)
        return out

    def check(self, core: Core, ids: type = np.int32, **options: Any) -> None:
        with guarded_outputs() as output:
            due = self.due(core, output, **options)
            params = self.few_rows(output, ids, **options)
            core.run("grouped_product", params)
            assert_same_bits(params.arrays["out"], due)


@FEW
@BY_FORMAT
@BY_CASE
def test_results_have_the_bits_of_the_other_kernels(
    core: Core, rng: np.random.Generator, case: GemmCase, format: str, result: Result, gathers: bool
) -> None:
    Gemm(rng, case, result, format, gathers=gathers).check(core)


@FEW
@pytest.mark.parametrize("wide_scales", [False, True], ids=["scales of the dtype", "scales of float32"])
@pytest.mark.parametrize("format", MATRIX_FORMATS[:3])
def test_integers_in_float16(
    core: Core, rng: np.random.Generator, format: str, result: Result, gathers: bool, wide_scales: bool
) -> None:
    case = CASES["several tiles of an expert"]
    Gemm(rng, case, result, format, FLOAT16, gathers=gathers, wide_scales=wide_scales).check(core)


@FEW
@BY_FORMAT
def test_scales_that_the_dtype_of_x_does_not_have(
    core: Core, rng: np.random.Generator, format: str, result: Result, gathers: bool
) -> None:
    Gemm(rng, CASES["rows of any number"], result, format, gathers=gathers, wide_scales=True).check(core, np.int64)


@pytest.mark.parametrize("format", MATRIX_FORMATS[:3])
def test_every_code_and_scales_of_every_size(core: Core, rng: np.random.Generator, format: str) -> None:
    """Subnormal products, and scales of zero and below."""
    gemm = Gemm(rng, GemmCase(ExpertRows([3, 9]), 256, 128), Result.PLAIN, format)
    gemm.codes = rng.integers(0, 256, gemm.codes.shape, np.uint8).view(gemm.codes.dtype)
    gemm.scales = rng.choice(np.array([0, -1, 2.0**-120, -(2.0**-130), 1.5 * 2.0**-20, 3e4], "f4"), gemm.scales.shape)
    gemm.check(core)


# Scales from which factors of packed arithmetic overflow, and those of 2^-6 of the values.
PACKED_LIMITS = {BFLOAT16: (2.0**-5, 2.0**1), FLOAT16: (2.0**-8, 2.0**-2)}


@pytest.mark.parametrize(
    "limit", ["below", "at", "on both sides", "below reduced", "at reduced", "subnormal", "below subnormal"]
)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("format", MATRIX_FORMATS[:3])
def test_every_code_with_scales_at_the_limits_of_packed_arithmetic(
    core: Core, rng: np.random.Generator, format: str, dtype: np.dtype, limit: str
) -> None:
    """Scales are of one kind, so that warps keep to one arithmetic; tiles for both kinds of MMA."""
    gemm = Gemm(rng, GemmCase(ExpertRows([3, 9, 40]), 256, 128), Result.PLAIN, format, dtype)
    gemm.codes = rng.integers(0, 256, gemm.codes.shape, np.uint8).view(gemm.codes.dtype)
    most, most_reduced = PACKED_LIMITS[dtype]
    before = 1 - 2.0**-8 if dtype == BFLOAT16 else 1 - 2.0**-11
    below = most * before
    subnormal = 2.0**-133 if dtype == BFLOAT16 else 2.0**-24
    kinds = {
        "below": [below, -below, most / 2, 0, 1.5 * subnormal * 2],
        "at": [most, -most, 1.5 * most],
        "on both sides": [below, most, -most, most / 64, 0, 3 * subnormal],
        "below reduced": [most_reduced * before, -most_reduced * before, most_reduced / 2],
        "at reduced": [most_reduced, -most_reduced, 1.5 * most_reduced],
        "subnormal": [subnormal, -subnormal, 5 * subnormal, 0],
        "below subnormal": [subnormal / 2, subnormal / 16, 0.75 * subnormal],
    }
    gemm.scales = rng.choice(np.array(kinds[limit], np.float32), gemm.scales.shape)
    gemm.check(core)


@pytest.mark.parametrize("inner", [32, 96, 128, 160, 736, 768, 800, 1024, 1056])
@FEW
@BY_FORMAT
def test_any_length_around_steps_and_stages(
    core: Core, rng: np.random.Generator, format: str, inner: int, result: Result, gathers: bool
) -> None:
    Gemm(rng, GemmCase(ExpertRows([1, 0, 17, 64, 65]), inner, 128), result, format, gathers=gathers).check(core)


@pytest.mark.parametrize("sizes", [[2, 0, 21], [2, 0, 40], [60, 57, 70]], ids=str)
@pytest.mark.parametrize("width", [8, 72, 136, 200, 264])
@pytest.mark.parametrize("result", [Result.PLAIN, Result.GATED], ids=lambda result: result.name.lower())
@pytest.mark.parametrize("format", MATRIX_FORMATS[:3])
def test_columns_that_no_tile_divides(
    core: Core, rng: np.random.Generator, format: str, result: Result, width: int, sizes: list[int]
) -> None:
    Gemm(rng, GemmCase(ExpertRows(sizes), 96, width), result, format).check(core)


@BY_FORMAT
def test_chunks_of_columns(core: Core, rng: np.random.Generator, format: str) -> None:
    gemm = Gemm(rng, GemmCase(ExpertRows([70, 0, 41]), 160, 400), Result.PLAIN, format)
    for first_column, width in ((0, 128), (128, 264), (384, 16)):
        gemm.check(core, first_column=first_column, width=width)


@pytest.mark.parametrize("topk", [1, 3, 9])
@pytest.mark.parametrize("case", ["one row", "a few rows", "gaps between experts, and rows after them"])
@BY_FORMAT
def test_weights_of_slots_are_those_of_their_rows(
    core: Core, rng: np.random.Generator, format: str, case: str, topk: int
) -> None:
    gemm = Gemm(rng, CASES[case], Result.PLAIN, format)
    rows, slots = gemm.rows.total, TOKENS * topk
    chosen = rng.permutation(slots)[: rows - rows // 4]  # the other rows have no slot
    slot_to_row, row_to_token = np.full(slots, -1, np.int32), np.full(rows, -1, np.int32)
    slot_to_row[chosen] = rng.permutation(rows)[: len(chosen)]
    row_to_token[slot_to_row[chosen]] = chosen // topk
    row_to_token[row_to_token < 0] = rng.choice([-1, 0, TOKENS, 2**30], (row_to_token < 0).sum())
    by_slot = rng.random(slots, np.float32)
    gemm.weights = np.zeros(rows, np.float32)
    gemm.weights[slot_to_row[chosen]] = by_slot[chosen]
    maps = {"slot_to_row": slot_to_row, "row_to_token": row_to_token, "num_tokens": TOKENS, "topk": topk}
    with guarded_outputs() as output:
        expected = gemm.few_rows(output)
        core.run("grouped_product", expected)
        got = gemm.few_rows(output, **maps, weights=by_slot)
        core.run("grouped_product", got)
        assert_same_bits(got.arrays["out"], expected.arrays["out"])
