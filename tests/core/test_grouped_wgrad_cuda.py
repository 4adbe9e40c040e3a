# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped wgrad on a GPU of compute capability 9.0: exact sums have the bits of the oracle."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from .binding import Core
from .grouped_cases import (
    EXPERTS_AT_LIMITS,
    Make,
    assert_like_oracle,
    assert_near_oracle,
    integers,
    rows_of_many,
    tables_of,
    tokens_of,
)
from .guards import MakeOutput
from .layer_problems import BFLOAT16
from .operators.grouped_gemm import Accumulation, ExpertRows, Gathered, OuterParams, outer_params

pytestmark = pytest.mark.cuda_only

BY_DTYPE = pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
BY_GATHERED = pytest.mark.parametrize("gathered", list(Gathered), ids=lambda which: f"gathers {which.name.lower()}")
BY_ACCUMULATION = pytest.mark.parametrize("accumulation", list(Accumulation), ids=lambda kind: kind.name.lower())
# Rows, and columns of p and q
CASES = {
    "steps that end anywhere": (ExpertRows([64, 1, 15, 16, 17, 0, 63, 65, 100, 128, 0, 0, 130, 33, 48, 49]), 136, 200),
    "one small tile": (ExpertRows([5]), 8, 8),
    "whole tiles": (ExpertRows([256, 128]), 256, 384),
    "several bands of tiles": (ExpertRows([70, 0, 200]), 1160, 264),
    "more columns of q": (ExpertRows([70, 0, 33]), 40, 392),
    "more steps than stages": (ExpertRows([1000, 0, 0, 711, 3]), 128, 264),
    "more tiles than CTAs": (ExpertRows([(7 * expert) % 150 for expert in range(700)]), 24, 40),
    "many tiles of one or two steps": (ExpertRows([(37 * expert) % 100 for expert in range(300)]), 128, 512),
    "an expert of many rows": (ExpertRows([40, 300, 0, 31, 225, 224, 16]), 1160, 264),
    "no rows": (ExpertRows([0, 0, 0]), 136, 200),
    "no rows, but memory for some": (ExpertRows([0, 0], num_rows=40), 136, 200),
    "gaps between experts, and rows after them": (ExpertRows([7, 0, 60, 31], [0, 16, 32, 112], 200), 136, 200),
    "experts that are not in order": (ExpertRows([40, 30, 20], [50, 0, 30]), 136, 200),
}
BY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
Case = tuple[ExpertRows, int, int]


class Wgrad:
    """Operands whose sums are exact, with NaN in rows of no expert and between the rows of tokens."""

    def __init__(
        self, rng: np.random.Generator, case: Case, dtype: np.dtype = BFLOAT16, gathered: Gathered = Gathered.NONE
    ) -> None:
        self.rows, *columns = case
        self.dtype, self.gathered, self.rng = dtype, gathered, rng
        self.operands = []
        for which, width in zip((Gathered.P, Gathered.Q), columns, strict=True):
            if gathered == which:
                tokens = np.full((37, width + 8), np.nan, dtype)
                tokens[:, :width] = integers(rng, (37, width), dtype)
                self.operands.append(tokens[:, :width])
                continue
            values = integers(rng, (self.rows.total, width), dtype)
            values[~self.rows.owned] = np.nan
            self.operands.append(values)
        self.options: dict[str, Any] = {"gathered": gathered}
        if gathered != Gathered.NONE:
            self.options |= {"num_sources": 37, "row_to_token": tokens_of(rng, self.rows.total, 37)}

    def maker(
        self,
        core: Core,
        accumulation: Accumulation = Accumulation.OVERWRITES,
        place: tuple[int, int] = (0, 0),
        margin: tuple[int, int] = (0, 0),
    ) -> Make:
        """Makes params: the result is surrounded by poison, and has values if the launch adds to them."""
        p, q = self.operands
        size = p.shape[1], q.shape[1]
        shape = len(self.rows.sizes), place[0] + size[0] + margin[0], place[1] + size[1] + margin[1]
        dtype = np.dtype(np.float32) if accumulation == Accumulation.ADDS_FLOAT32 else self.dtype
        before: NDArray = integers(self.rng, (shape[0], *size), dtype)
        tables = tables_of(core, self.rows)

        def make(output: MakeOutput) -> OuterParams:
            out = output(shape, dtype)
            if accumulation != Accumulation.OVERWRITES:
                out[:, place[0] : place[0] + size[0], place[1] : place[1] + size[1]] = before
            options = {"accumulation": accumulation, **self.options}
            return outer_params(p, q, out, self.rows.total, tables, place, **options)

        return make


@BY_DTYPE
@BY_GATHERED
@BY_ACCUMULATION
@BY_CASE
def test_exact_sums(
    core: Core,
    rng: np.random.Generator,
    case: Case,
    accumulation: Accumulation,
    gathered: Gathered,
    dtype: np.dtype,
) -> None:
    wgrad = Wgrad(rng, case, dtype, gathered)
    assert_like_oracle(core, "grouped_outer", wgrad.maker(core, accumulation))


@BY_ACCUMULATION
@pytest.mark.parametrize("experts", EXPERTS_AT_LIMITS)
def test_exact_sums_of_many_experts(
    core: Core, rng: np.random.Generator, experts: int, accumulation: Accumulation
) -> None:
    wgrad = Wgrad(rng, (rows_of_many(experts), 24, 40))
    assert_like_oracle(core, "grouped_outer", wgrad.maker(core, accumulation))


def test_counters_of_one_launch_serve_the_next(core: Core, rng: np.random.Generator) -> None:
    wgrad = Wgrad(rng, CASES["more tiles than CTAs"])
    assert_like_oracle(core, "grouped_outer", wgrad.maker(core), launches=3)


@BY_DTYPE
@BY_GATHERED
@BY_ACCUMULATION
@pytest.mark.parametrize("columns", [(40, 136), (200, 136), (136, 40)], ids=str)
def test_results_in_a_part_of_a_matrix_leave_the_rest_alone(
    core: Core,
    rng: np.random.Generator,
    columns: tuple[int, int],
    accumulation: Accumulation,
    gathered: Gathered,
    dtype: np.dtype,
) -> None:
    wgrad = Wgrad(rng, (ExpertRows([70, 0, 33]), *columns), dtype, gathered)
    make = wgrad.maker(core, accumulation, place=(5, 24), margin=(15, 16))
    assert_like_oracle(core, "grouped_outer", make)


@BY_GATHERED
def test_operands_may_be_columns_of_wider_arrays(core: Core, rng: np.random.Generator, gathered: Gathered) -> None:
    wgrad = Wgrad(rng, (ExpertRows([70, 0, 33]), 200, 136), gathered=gathered)
    for place, (left, right) in enumerate(((16, 8), (8, 24))):
        values = wgrad.operands[place]
        wide = np.full((len(values), left + values.shape[1] + right), np.nan, values.dtype)
        wide[:, left:-right] = values
        wgrad.operands[place] = wide[:, left:-right]
    assert_like_oracle(core, "grouped_outer", wgrad.maker(core))


@BY_ACCUMULATION
def test_experts_without_rows_get_zeros_or_keep_their_values(
    core: Core, rng: np.random.Generator, accumulation: Accumulation
) -> None:
    for case in (CASES["no rows"], CASES["no rows, but memory for some"]):
        made = assert_like_oracle(core, "grouped_outer", Wgrad(rng, case).maker(core, accumulation))
        assert made["out"].astype(np.float32).any() == (accumulation != Accumulation.OVERWRITES)


@BY_DTYPE
@BY_ACCUMULATION
def test_random_numbers_are_near_the_oracle(
    core: Core, rng: np.random.Generator, accumulation: Accumulation, dtype: np.dtype
) -> None:
    wgrad = Wgrad(rng, (ExpertRows([200, 70, 0, 129]), 264, 392), dtype)
    wgrad.operands = [rng.standard_normal(each.shape).astype(dtype) for each in wgrad.operands]
    error = 1e-5 if accumulation == Accumulation.ADDS_FLOAT32 else float(ml_dtypes.finfo(dtype).eps)
    assert_near_oracle(core, "grouped_outer", wgrad.maker(core, accumulation), error)
