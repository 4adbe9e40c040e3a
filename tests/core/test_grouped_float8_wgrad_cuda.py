# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped wgrad in float8 on a GPU of compute capability 9.0: exact sums have the bits of the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_moe_ops.testing.tolerances import FLOAT8_ERROR

from .binding import Core
from .gemms_in_numpy import BFLOAT16, FLOAT8
from .grouped_cases import (
    EXPERTS_AT_LIMITS,
    Make,
    assert_like_oracle,
    assert_near_oracle,
    integers,
    rows_of_many,
    tables_of,
)
from .guards import MakeOutput
from .operators.float8_wgrad import SIDE, OuterFloat8Params, outer_float8_params
from .operators.grouped_gemm import Accumulation, ExpertRows

pytestmark = pytest.mark.cuda_only

BY_ACCUMULATION = pytest.mark.parametrize("accumulation", list(Accumulation), ids=lambda kind: kind.name.lower())
BY_LAYOUT = pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
# Rows, and columns of a and b
CASES = {
    "blocks that end anywhere": (ExpertRows([130, 1, 0, 129, 320, 0, 127]), 136, 200),
    "one small tile": (ExpertRows([5]), 8, 8),
    "whole tiles": (ExpertRows([256, 128]), 256, 512),
    "a pair of tiles with one left": (ExpertRows([256, 0, 40]), 384, 264),
    "several bands of tiles": (ExpertRows([70, 0, 200]), 2184, 264),
    "more columns of b": (ExpertRows([170, 0, 33]), 40, 1032),
    "more steps than stages": (ExpertRows([1000, 0, 0, 711, 3]), 128, 264),
    "more tiles than CTAs": (ExpertRows([(7 * expert) % 150 for expert in range(700)]), 24, 40),
    "many tiles of one or two steps": (ExpertRows([(37 * expert) % 200 for expert in range(300)]), 128, 512),
    "no rows": (ExpertRows([0, 0, 0]), 136, 200),
    "no rows, but memory for some": (ExpertRows([0, 0], num_rows=40), 136, 200),
    "gaps between experts, and rows after them": (ExpertRows([7, 0, 160, 31], [0, 16, 32, 212], 300), 136, 200),
}
Case = tuple[ExpertRows, int, int]


class Wgrad:
    """Codes of integers with powers of two as scales, whose sums are exact; NaN after the last row block."""

    def __init__(self, rng: np.random.Generator, core: Core, case: Case) -> None:
        rows, *columns = case
        self.rng, self.sizes = rng, columns
        self.tables = tables_of(core, rows, SIDE)
        blocks = int(self.tables.tiles[-1])
        self.operands = []
        for width, of_scales in zip(columns, (columns[0], -(-columns[1] // SIDE)), strict=True):
            codes = integers(rng, (blocks + 1, width, SIDE), FLOAT8)
            scales = rng.choice([0.5, 1, 2], (blocks + 1, of_scales)).astype(np.float32)
            codes[blocks:], scales[blocks:] = np.nan, np.nan
            self.operands.append((codes, scales))

    def maker(
        self,
        accumulation: Accumulation = Accumulation.OVERWRITES,
        *,
        transpose: bool = False,
        place: tuple[int, int] = (0, 0),
        margin: tuple[int, int] = (0, 0),
    ) -> Make:
        """Makes params: the result is surrounded by poison, and has values if the launch adds to them."""
        rows, columns = self.sizes[::-1] if transpose else self.sizes
        experts = len(self.tables.first)
        shape = experts, place[0] + rows + margin[0], place[1] + columns + margin[1]
        dtype = np.dtype(np.float32) if accumulation == Accumulation.ADDS_FLOAT32 else BFLOAT16
        before = integers(self.rng, (experts, rows, columns), dtype)

        def make(output: MakeOutput) -> OuterFloat8Params:
            out = output(shape, dtype)
            if accumulation != Accumulation.OVERWRITES:
                out[:, place[0] : place[0] + rows, place[1] : place[1] + columns] = before
            options = {"accumulation": accumulation, "transpose": transpose}
            return outer_float8_params(*self.operands, out, self.tables, place, **options)

        return make


@BY_LAYOUT
@BY_ACCUMULATION
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exact_sums(
    core: Core, rng: np.random.Generator, case: Case, accumulation: Accumulation, transpose: bool
) -> None:
    make = Wgrad(rng, core, case).maker(accumulation, transpose=transpose)
    assert_like_oracle(core, "grouped_outer_float8", make)


@BY_ACCUMULATION
@pytest.mark.parametrize("experts", EXPERTS_AT_LIMITS)
def test_exact_sums_of_many_experts(
    core: Core, rng: np.random.Generator, experts: int, accumulation: Accumulation
) -> None:
    make = Wgrad(rng, core, (rows_of_many(experts), 24, 40)).maker(accumulation)
    assert_like_oracle(core, "grouped_outer_float8", make)


def test_counters_of_one_launch_serve_the_next(core: Core, rng: np.random.Generator) -> None:
    make = Wgrad(rng, core, CASES["more tiles than CTAs"]).maker()
    assert_like_oracle(core, "grouped_outer_float8", make, launches=3)


@BY_LAYOUT
@BY_ACCUMULATION
@pytest.mark.parametrize("columns", [(40, 136), (200, 136), (136, 40)], ids=str)
def test_results_in_a_part_of_a_matrix_leave_the_rest_alone(
    core: Core, rng: np.random.Generator, columns: tuple[int, int], accumulation: Accumulation, transpose: bool
) -> None:
    wgrad = Wgrad(rng, core, (ExpertRows([170, 0, 33]), *columns))
    make = wgrad.maker(accumulation, transpose=transpose, place=(5, 24), margin=(15, 16))
    assert_like_oracle(core, "grouped_outer_float8", make)


@BY_ACCUMULATION
def test_sums_of_random_codes(core: Core, rng: np.random.Generator, accumulation: Accumulation) -> None:
    """The tensor cores' sums within a row block are inexact."""
    wgrad = Wgrad(rng, core, (ExpertRows([1000, 64, 0, 391]), 264, 392))
    for codes, _ in wgrad.operands:
        codes[:-1] = rng.standard_normal(codes[:-1].shape)
    assert_near_oracle(core, "grouped_outer_float8", wgrad.maker(accumulation), FLOAT8_ERROR)
