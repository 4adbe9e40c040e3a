# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Rows as operands of wgrads in float8: codes, scales and values of the oracle, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike

from ..pairwise import pairwise_of
from ..reference.cases import floats_of_every_kind
from .binding import Core
from .grouped_cases import EXPERTS_AT_LIMITS, assert_like_oracle, rows_of_many, tables_of, tokens_of
from .operators.float8_wgrad import SIDE, quantize_columns_params
from .operators.grouped_gemm import ExpertRows

ROWS = {
    "blocks that end anywhere": ExpertRows([130, 1, 0, 129, 320, 0, 127]),
    "whole blocks": ExpertRows([128, 256]),
    "one row": ExpertRows([1]),
    "no rows": ExpertRows([0, 0, 0]),
    "no rows, but memory for some": ExpertRows([0, 0], num_rows=40),
    "gaps between experts, and rows after them": ExpertRows([7, 0, 160, 31], [0, 16, 32, 212], 300),
}
OUTPUTS = {"codes": {}, "values": {"has_codes": False, "has_values": True}, "both": {"has_values": True}}


def check(core: Core, rows: ExpertRows, x: np.ndarray, **options: Any) -> None:
    tables = tables_of(core, rows, SIDE)
    assert_like_oracle(
        core,
        "quantize_columns",
        lambda output: quantize_columns_params(output, x, tables, rows.total, **options),
    )


@pairwise_of(
    pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS),
    pytest.mark.parametrize("columns", [3, 8, 129, 200, 1160]),
    pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name),
    pytest.mark.parametrize("gathers", [False, True], ids=["rows", "tokens"]),
    pytest.mark.parametrize("by_blocks", [False, True], ids=["by columns", "by blocks"]),
    pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS),
    pytest.mark.parametrize("amax_min", [2.0**-100, 1e-4]),
)
def test_codes_and_values_of_row_blocks(
    core: Core,
    rng: np.random.Generator,
    rows: ExpertRows,
    columns: int,
    dtype: DTypeLike,
    gathers: bool,
    by_blocks: bool,
    outputs: dict[str, bool],
    amax_min: float,
) -> None:
    """Numbers of every kind, in rows that are wider than the columns; rows without a token are zeros."""
    sources = 37 if gathers else rows.total
    x = floats_of_every_kind((sources, columns + 8), dtype, int(rng.integers(2**32)))[:, :columns]
    owners = tokens_of(rng, rows.total, sources) if gathers else None
    check(core, rows, x, row_to_token=owners, by_blocks=by_blocks, amax_min=amax_min, **outputs)


@pytest.mark.parametrize("experts", EXPERTS_AT_LIMITS)
def test_blocks_of_many_experts(core: Core, rng: np.random.Generator, experts: int) -> None:
    rows = rows_of_many(experts)
    check(core, rows, floats_of_every_kind((rows.total, 8), ml_dtypes.bfloat16, int(rng.integers(2**32))))


def test_blocks_that_there_is_no_room_for_are_left_out(core: Core, rng: np.random.Generator) -> None:
    rows = ROWS["blocks that end anywhere"]
    x = floats_of_every_kind((rows.total, 136), ml_dtypes.bfloat16, int(rng.integers(2**32)))
    check(core, rows, x, num_blocks=3)
