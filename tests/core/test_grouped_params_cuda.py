# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Unusable params of the grouped GEMMs: an error that names the field, before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest

from .binding import Core, CoreError
from .operators.grouped_gemm import (
    AMAX_MIN,
    FEW_ROWS,
    PING_PONG,
    SWAP_AB,
    Float8Params,
    OuterParams,
    ProductParams,
    Result,
)
from .structs import Float, Int, Params, Size

pytestmark = pytest.mark.cuda_only

ROWS = {"num_rows": 4, "num_sources": 4, "num_experts": 1, "inner": 64, "outer": 128, "width": 128, "window_rows": 4}
SCHEDULE = ("first", "stop", "tiles", "window", "counters")
HIGH, WIDE = 1 << 16, 1 << 17
# Valid params: numbers, and names of pointers.
PRODUCT = {**ROWS, "x_row_stride": 64, "dtype": 2, "tile_rows": SWAP_AB}, ("x", "matrix", "out", *SCHEDULE)
FLOAT8 = ROWS, ("x", "x_scales", "matrix", "matrix_scales", "out", *SCHEDULE)
OUTER = (
    {"num_rows": 4, "num_experts": 1, "dtype": 2, "p_columns": HIGH, "q_columns": WIDE}
    | {"out_rows": HIGH, "out_columns": WIDE, "p_row_stride": HIGH, "q_row_stride": WIDE},
    ("p", "q", "first", "stop", "out", "counters"),
)
ADDRESS = 1 << 20
FEW = {"tile_rows": FEW_ROWS, "sizes": ADDRESS}
# pmo_matrix_format
INT8, INT4, INT4_1X128, FLOAT8_128X128 = range(4)
CODES = {**FEW, "matrix_scales": ADDRESS, "matrix_format": INT8, "transpose": 1, "amax_min": AMAX_MIN}
FLOAT8_CODES = {**CODES, "matrix_format": FLOAT8_128X128}


Valid = tuple[dict[str, Any], tuple[str, ...]]


def refusal(core: Core, operator: str, params: Params, valid: Valid, changes: dict[str, Any]) -> str:
    """The library's error for valid params with these changes; those of pointers are addresses."""
    numbers, pointers = valid
    kinds = dict(params._fields_)
    values = {**numbers, **dict.fromkeys(pointers, ADDRESS), **changes}
    for field, value in values.items():
        if kinds[field] in (Size, Int, Float):
            setattr(params, field, value)
        else:
            params.point_at(**{field: value})
    with pytest.raises(CoreError) as caught:
        core.run(operator, params)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner": 60}, "inner must be a multiple of 8"),
        ({"outer": 12}, "outer must be a multiple of 8"),
        ({"width": 300}, "width must be a multiple of 8"),
        ({"first_column": 136}, "first_column must be a multiple of 8 in the matrix"),
        ({"result": 3}, "result must be one of pmo_grouped_result"),
        ({"dtype": 0}, "dtype must be PMO_FLOAT16 or PMO_BFLOAT16"),
        ({"x": 8}, "x must be an array at a multiple of 16 bytes"),
        ({"x_row_stride": 56}, "x_row_stride must be a multiple of 8 that holds a row"),
        ({"num_rows": -1}, "num_rows must be in"),
        ({"window_rows": -1}, "window_rows must be in"),
        ({"tiles": 0}, "tiles must be"),
        ({"tile_rows": 0}, "tile_rows must be PMO_GROUPED_TILE_ROWS"),
        ({"counters": 0}, "counters must be"),
        ({"gathers": 1}, "gathers must be 0 for a plain result"),
        ({"struct_size": 8}, "struct_size must be the size of pmo_grouped_product_params"),
        *(
            (
                {"result": result, "tile_rows": PING_PONG},
                "tile_rows must be PMO_GROUPED_TURNED_ROWS or PMO_GROUPED_FEW_ROWS unless the result is plain",
            )
            for result in (Result.GATED, Result.GRADIENT)
        ),
        ({"tile_rows": FEW_ROWS}, "sizes must be an aligned array of ids"),
        (
            {**FEW, "result": Result.GRADIENT, "hidden": ADDRESS},
            "tile_rows must be PMO_GROUPED_TURNED_ROWS for a gradient",
        ),
        ({**FEW, "num_experts": 513}, "num_experts must be at most PMO_GROUPED_MAX_FEW_EXPERTS"),
        ({**FEW, "hidden": ADDRESS}, "hidden must be NULL with PMO_GROUPED_FEW_ROWS"),
        ({**FEW, "first_row": 1}, "window_rows must be all rows with PMO_GROUPED_FEW_ROWS"),
        ({**FEW, "window_rows": 3}, "window_rows must be all rows with PMO_GROUPED_FEW_ROWS"),
        ({**FEW, "num_sources": 3}, "num_sources must be at least num_rows with PMO_GROUPED_FEW_ROWS"),
        ({**FEW, "x_row_stride": 1 << 31}, "x_row_stride must be below 2^31 with PMO_GROUPED_FEW_ROWS"),
        ({**FEW, "sizes_kind": 2}, "sizes_kind must be PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64"),
        ({**FEW, "offsets": ADDRESS + 2}, "offsets must be NULL or an aligned array of ids"),
        ({"matrix_scales": ADDRESS}, "matrix_scales must be NULL unless tile_rows is PMO_GROUPED_FEW_ROWS"),
        ({**CODES, "matrix_scales": ADDRESS + 2}, "matrix_scales must be"),
        ({**CODES, "matrix_format": 4}, "matrix_format must be one of pmo_matrix_format"),
        ({**CODES, "transpose": 0}, "transpose must be 1 with codes"),
        ({**CODES, "inner": 24}, "inner must be a multiple of 16, or of 32 for int4, with codes"),
        ({**CODES, "matrix_format": INT4, "inner": 48}, "inner must be a multiple of 16, or of 32 for int4"),
        ({**CODES, "matrix_format": INT4_1X128, "inner": 48}, "inner must be a multiple of 16, or of 32 for int4"),
        ({**FLOAT8_CODES, "inner": 24}, "inner must be a multiple of 16, or of 32 for int4, with codes"),
        ({**FLOAT8_CODES, "dtype": 1}, "dtype must be PMO_BFLOAT16 with float8 codes"),
        ({**FLOAT8_CODES, "amax_min": 0.0}, "amax_min must be in [2^-100, FLT_MAX]"),
        ({**FLOAT8_CODES, "first_column": 64, "width": 64}, "first_column must be a multiple of 128 with float8"),
        (
            {**FLOAT8_CODES, "result": Result.GATED, "width": 64},
            "width must be a multiple of 128 with float8 codes and SwiGLU",
        ),
        (
            {"tile_rows": PING_PONG, "tile_columns": 160},
            "tile_columns must be PMO_GROUPED_TILE_COLUMNS or PMO_GROUPED_WIDE_COLUMNS",
        ),
    ],
    ids=str,
)
def test_bad_params_of_a_gemm(core: Core, changes: dict[str, int], message: str) -> None:
    assert message in refusal(core, "grouped_product", ProductParams(), PRODUCT, changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"struct_size": 8}, "struct_size must be the size of pmo_grouped_outer_params"),
        ({"dtype": 0}, "dtype must be PMO_FLOAT16 or PMO_BFLOAT16"),
        ({"num_rows": -1}, "num_rows must be in"),
        ({"num_experts": 0}, "num_experts must be in"),
        ({"num_experts": 1 << 16}, "num_experts must be below 2^30 / blocks"),
        ({"p_columns": 60}, "p_columns must be a multiple of 8"),
        ({"q_columns": 12}, "q_columns must be a multiple of 8"),
        ({"out_rows": -1}, "out_rows must be in"),
        ({"out_columns": 4}, "out_columns must be a multiple of 8"),
        ({"first_p": 8}, "first_p must be a row of out"),
        ({"first_q": 4}, "first_q must be a multiple of 8"),
        ({"first_q": 8}, "first_q must be a multiple of 8, and a column of out"),
        ({"p_row_stride": 1 << 15}, "p_row_stride must be a multiple of 8 that holds a row"),
        ({"q_row_stride": WIDE + 4}, "q_row_stride must be a multiple of 8 that holds a row"),
        ({"p": 8}, "p must be an array at a multiple of 16 bytes"),
        ({"q": 8}, "q must be an array at a multiple of 16 bytes"),
        ({"out": 8}, "out must be an array at a multiple of 16 bytes"),
        ({"first": 0}, "first must be"),
        ({"stop": 0}, "stop must be"),
        ({"counters": 0}, "counters must be"),
        ({"gathered": 3}, "gathered must be one of pmo_grouped_gathered"),
        ({"gathered": 1}, "row_to_token must be"),
        ({"gathered": 2}, "row_to_token must be"),
        ({"accumulation": 3}, "accumulation must be one of pmo_grouped_accumulation"),
        ({"accumulation": -1}, "accumulation must be one of pmo_grouped_accumulation"),
    ],
    ids=str,
)
def test_bad_params_of_wgrad(core: Core, changes: dict[str, int], message: str) -> None:
    assert message in refusal(core, "grouped_outer", OuterParams(), OUTER, changes)


WITH_CODES = {
    "outer": 256,
    "result": Result.GATED,
    "amax_min": AMAX_MIN,
    "hidden_codes": ADDRESS,
    "hidden_scales": ADDRESS,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner": 72}, "inner must be a multiple of 16"),
        ({"outer": 12}, "outer must be a multiple of 8"),
        ({"width": 300}, "width must be a multiple of 8"),
        ({"first_column": 64}, "first_column must be a multiple of 128 in the matrix"),
        ({"result": 3}, "result must be one of pmo_grouped_result"),
        ({"result": 1}, "outer must be a multiple of 8; of 256 if the result is gated"),
        ({"x": 8}, "x must be an array at a multiple of 16 bytes"),
        ({"x_scales": 0}, "x_scales must be an array"),
        ({"codes": ADDRESS}, "codes must be NULL if the result is plain"),
        ({"hidden_codes": ADDRESS}, "hidden_codes must be NULL if the result is plain"),
        ({"num_rows": -1}, "num_rows must be in"),
        ({"window_rows": -1}, "window_rows must be in"),
        ({"tiles": 0}, "tiles must be"),
        ({"struct_size": 8}, "struct_size must be the size of pmo_grouped_float8_params"),
        ({**WITH_CODES, "hidden": ADDRESS}, "hidden must be NULL if a gated result has hidden_codes"),
        ({**WITH_CODES, "hidden_scales": 0}, "hidden_scales must be an array"),
        ({**WITH_CODES, "hidden_codes": 8}, "hidden_codes must be an array at a multiple of 16 bytes"),
        ({**WITH_CODES, "amax_min": 0.0}, "amax_min must be in [2^-100, FLT_MAX]"),
        ({**WITH_CODES, "result": 2, "width": 256}, "hidden must be an array at a multiple of 16 bytes"),
    ],
    ids=str,
)
def test_bad_params_of_a_float8_gemm(core: Core, changes: dict[str, Any], message: str) -> None:
    assert message in refusal(core, "grouped_float8", Float8Params(), FLOAT8, changes)
