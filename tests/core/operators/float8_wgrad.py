# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`quantize_columns` and `grouped_outer_float8`: rows as operands of wgrads in float8, and these wgrads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Float, Floats, Int, Int32s, Params, Size, fields
from .base import TOO_MANY_EXPERTS, Operator
from .grouped_rows import Tables, grouped_tables

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small

AMAX_MIN = 2.0**-100
SIDE = 128  # rows of a row block
_TOO_LARGE = 1 << 30
FLOAT8 = ml_dtypes.float8_e4m3fn
Codes = tuple[NDArray, NDArray]


class QuantizeColumnsParams(Params):
    """pmo_quantize_columns_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_sources num_columns num_experts num_blocks"),
        (Bytes, "x"),
        (Size, "x_row_stride"),
        (Int32s, "row_to_token first stop tiles"),
        (Bytes, "codes"),
        (Floats, "scales values"),
        (Int, "dtype by_blocks"),
        (Float, "amax_min"),
        (Int, "num_threads"),
    )


class OuterFloat8Params(Params):
    """pmo_grouped_outer_float8_params"""

    _fields_ = fields(
        (Size, "struct_size num_experts num_blocks a_columns b_columns out_rows out_columns first_row first_column"),
        (Bytes, "a"),
        (Floats, "a_scales"),
        (Bytes, "b"),
        (Floats, "b_scales"),
        (Int32s, "tiles"),
        (Bytes, "out"),
        (Int32s, "counters"),
        (Int, "transpose accumulation"),
    )


def quantize_columns_params(
    output: MakeOutput,
    x: NDArray,
    tables: Tables,
    num_rows: int,
    *,
    row_to_token: NDArray | None = None,
    by_blocks: bool = False,
    num_blocks: int | None = None,
    has_codes: bool = True,
    has_values: bool = False,
    amax_min: float = AMAX_MIN,
    num_threads: int = 0,
) -> QuantizeColumnsParams:
    """Params of "quantize_columns"; ``num_blocks``: row blocks that there is room for, None for one to spare."""
    columns, arrays = x.shape[1], {}
    blocks = int(tables.tiles[-1]) + 1 if num_blocks is None else num_blocks
    if has_codes:
        arrays["codes"] = output((blocks, columns, SIDE), FLOAT8)
        arrays["scales"] = output((blocks, -(-columns // SIDE) if by_blocks else columns), np.float32)
    if has_values:
        arrays["values"] = output((num_rows, columns), np.float32)
    return QuantizeColumnsParams(
        num_rows=num_rows,
        num_sources=len(x),
        num_columns=columns,
        num_experts=len(tables.first),
        num_blocks=blocks,
        x=x,
        x_row_stride=max(x.strides[0] // x.itemsize, columns),
        row_to_token=row_to_token,
        first=tables.first,
        stop=tables.stop,
        tiles=tables.tiles,
        dtype=DTYPES[x.dtype],
        by_blocks=by_blocks,
        amax_min=amax_min,
        num_threads=num_threads,
        **arrays,
    )


def outer_float8_params(
    a: Codes, b: Codes, out: NDArray, tables: Tables, place: tuple[int, int] = (0, 0), **options: Any
) -> OuterFloat8Params:
    """Params of "grouped_outer_float8" from codes and scales; ``place``: first row and column of the result."""
    return OuterFloat8Params(
        num_experts=len(out),
        num_blocks=len(a[0]),
        a_columns=a[0].shape[1],
        b_columns=b[0].shape[1],
        out_rows=out.shape[1],
        out_columns=out.shape[2],
        first_row=place[0],
        first_column=place[1],
        a=a[0],
        a_scales=a[1],
        b=b[0],
        b_scales=b[1],
        tiles=tables.tiles,
        out=out,
        counters=tables.counters,
        **options,
    )


def _tables(core: Core, sizes: NDArray, num_rows: int) -> Tables:
    return grouped_tables(core, sizes, None, num_rows, [SIDE])[0]


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    rows = np.concatenate([s.rows, s.rows], axis=1)[:, :8].copy()
    tables = _tables(core, np.array([s.N - 1, 1], np.int32), s.N)
    owners = np.arange(s.N, dtype=np.int32)
    return quantize_columns_params(output, rows, tables, s.N, row_to_token=owners, has_values=True)


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    columns, sources = int(s.rng.choice([0, 7, 8, 136])), s.below(9)
    rows = s.N * int(s.rng.choice([1, 20]))
    sizes = np.array([s.below(rows + 1) for _ in range(s.E)], np.int32)
    owners = s.ints((rows,), sources) if s.below(2) else None
    params = quantize_columns_params(
        output,
        s.data(rows if owners is None else sources, columns),
        _tables(core, sizes, rows),
        rows,
        row_to_token=owners,
        has_values=bool(s.below(2)),
        amax_min=float(s.rng.choice([AMAX_MIN, 1e-4, 1e30])),
    )
    for field, value in s.choices(dtype=3, num_threads=4, by_blocks=2).items():  # scales by columns need more room
        setattr(params, field, value)
    return params


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    rows = large.rows
    tables = _tables(core, np.array([len(rows) - 777, 700], np.int32), len(rows))
    with guarded_outputs() as output:
        params = quantize_columns_params(output, rows, tables, len(rows), num_threads=num_threads)
        core.run("quantize_columns", params)
    used = int(tables.tiles[-1])
    return params.arrays["codes"][:used], params.arrays["scales"][:used]


OPERATORS = (
    Operator(
        name="quantize_columns",
        valid=_valid,
        bad_fields={
            "num_rows": (-1, _TOO_LARGE),
            "num_sources": (-1, _TOO_LARGE),
            "num_columns": (-1, _TOO_LARGE),
            "num_experts": (0, TOO_MANY_EXPERTS),
            "num_blocks": (-1, _TOO_LARGE),
            "x_row_stride": (0, 7),
            "dtype": (-1, 3, 5),
            "amax_min": (0.0, -1.0, 2.0**-101, float("inf"), float("nan")),
        },
        required=("x", "first", "stop", "tiles", "scales"),
        aligned=("row_to_token", "first", "stop", "tiles", "scales"),
        fuzzed=_fuzzed,
        work=_work,
    ),
)
