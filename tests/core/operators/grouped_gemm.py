# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Structs of the grouped GEMMs: `grouped_product`, `grouped_outer`, `grouped_float8` and `quantize_blocks`.

Only GPUs of compute capability 9.0 have them, so the table of operators lacks them. Their oracles: `gemms_in_numpy`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..structs import DTYPES, Bytes, Float, Floats, Int, Int32s, Params, Size, fields
from .grouped_rows import Tables

__all__ = [
    "AMAX_MIN",
    "FEW_ROWS",
    "GROUP",
    "PING_PONG",
    "SWAP_AB",
    "TILE_COLUMNS",
    "WIDE_COLUMNS",
    "Accumulation",
    "ExpertRows",
    "Float8Params",
    "Gathered",
    "OuterParams",
    "ProductParams",
    "Result",
    "float8_params",
    "outer_params",
    "product_params",
    "schedule",
]

SWAP_AB, PING_PONG, FEW_ROWS = 160, 128, 64  # tile rows
TILE_COLUMNS, WIDE_COLUMNS = 128, 192  # of the ping-pong kernel
GROUP = 128  # columns that share a scale
AMAX_MIN = 2.0**-100


class Result(enum.IntEnum):
    """pmo_grouped_result"""

    PLAIN = 0
    GATED = 1
    GRADIENT = 2


class Gathered(enum.IntEnum):
    """pmo_grouped_gathered"""

    NONE = 0
    P = 1
    Q = 2


class Accumulation(enum.IntEnum):
    """pmo_grouped_accumulation"""

    OVERWRITES = 0
    ADDS = 1
    ADDS_FLOAT32 = 2


class ProductParams(Params):
    """pmo_grouped_product_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_sources num_experts inner outer first_column width first_row window_rows"),
        (Bytes, "x"),
        (Size, "x_row_stride"),
        (Bytes, "matrix"),
        (Int32s, "row_to_token"),
        (Floats, "weights"),
        (Int32s, "first stop tiles window"),
        (Bytes, "out hidden"),
        (Int32s, "counters"),
        (Floats, "d_weights"),
        (
            Int,
            "dtype result transpose tile_rows gathers tile_columns sizes_kind offsets_kind only_x_is_new matrix_format",
        ),
        (Float, "amax_min"),
        (Bytes, "sizes offsets"),
        (Floats, "matrix_scales"),
        (Int32s, "slot_to_row"),
        (Size, "num_tokens topk"),
    )


class OuterParams(Params):
    """pmo_grouped_outer_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_experts p_columns q_columns out_rows out_columns first_p first_q"),
        (Size, "p_row_stride q_row_stride"),
        (Bytes, "p q"),
        (Int32s, "first stop"),
        (Bytes, "out"),
        (Size, "num_sources"),
        (Int32s, "row_to_token counters"),
        (Int, "dtype gathered accumulation reserved"),
    )


class Float8Params(Params):
    """pmo_grouped_float8_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_sources num_experts inner outer first_column width first_row window_rows"),
        (Bytes, "x"),
        (Floats, "x_scales"),
        (Bytes, "matrix"),
        (Floats, "matrix_scales"),
        (Int32s, "row_to_token"),
        (Floats, "weights"),
        (Int32s, "first stop tiles window"),
        (Bytes, "out hidden hidden_codes"),
        (Floats, "hidden_scales"),
        (Bytes, "codes"),
        (Floats, "scales d_weights"),
        (Int32s, "counters"),
        (Float, "amax_min"),
        (Int, "result"),
    )


class ExpertRows(NamedTuple):
    """Rows of each expert, first row of each (None: experts follow each other), rows in all (None: up to the last)."""

    sizes: Sequence[int]
    offsets: Sequence[int] | None = None
    num_rows: int | None = None

    @property
    def starts(self) -> list[int]:
        return list(self.offsets or (int(each) for each in np.cumsum([0, *self.sizes])[:-1]))

    @property
    def total(self) -> int:
        ends = [start + size for start, size in zip(self.starts, self.sizes, strict=True)]
        return max(ends) if self.num_rows is None else self.num_rows

    @property
    def owned(self) -> NDArray:
        """True for rows of an expert."""
        owned = np.zeros(self.total, bool)
        for start, size in zip(self.starts, self.sizes, strict=True):
            owned[start : start + size] = True
        return owned


def schedule(tables: Tables, num_chunks: int = 0, chunk: int | None = None) -> dict[str, NDArray]:
    """Fields of a GEMM's launch over all rows, or over a row chunk."""
    first = num_chunks + 1 if chunk is None else chunk
    window = tables.window[first : first + 2]
    names = {"first": tables.first, "stop": tables.stop, "tiles": tables.tiles, "counters": tables.counters}
    return {**names, "window": window}


def product_params(
    x: NDArray, matrix: NDArray, out: NDArray, launch: dict[str, NDArray], *, transpose: bool = False, **options: Any
) -> ProductParams:
    """Params of "grouped_product" from arrays; ``options`` are other fields."""
    inner, outer = matrix.shape[:0:-1] if transpose else matrix.shape[1:]
    return ProductParams(
        **{
            "num_rows": len(out),
            "num_sources": len(x),
            "num_experts": len(matrix),
            "inner": inner,
            "outer": outer,
            "width": out.shape[1],
            "window_rows": len(out) if options.get("gathers") else len(x),
            "x": x,
            "matrix": matrix,
            "out": out,
            "dtype": DTYPES[x.dtype],
            "transpose": int(transpose),
            "tile_rows": SWAP_AB,
            "tile_columns": TILE_COLUMNS,
            **launch,
            **options,
        }
    )


def outer_params(
    p: NDArray, q: NDArray, out: NDArray, num_rows: int, tables: Tables, place: tuple[int, int] = (0, 0), **options: Any
) -> OuterParams:
    """Params of "grouped_outer" from arrays; ``place`` is the first row and column of the result in ``out``."""
    return OuterParams(
        num_rows=num_rows,
        num_experts=len(out),
        p_columns=p.shape[1],
        q_columns=q.shape[1],
        out_rows=out.shape[1],
        out_columns=out.shape[2],
        first_p=place[0],
        first_q=place[1],
        p=p,
        q=q,
        first=tables.first,
        stop=tables.stop,
        out=out,
        counters=tables.counters,
        dtype=DTYPES[p.dtype],
        **options,
    )


def float8_params(
    x: tuple[NDArray, NDArray], matrix: tuple[NDArray, NDArray], num_rows: int, width: int, **options: Any
) -> Float8Params:
    """Params of "grouped_float8" from codes and scales; ``options`` are other fields, the schedule among them."""
    return Float8Params(
        num_rows=num_rows,
        num_sources=len(x[0]),
        num_experts=len(matrix[0]),
        inner=x[0].shape[1],
        outer=matrix[0].shape[1],
        width=width,
        window_rows=len(x[0]),
        x=x[0],
        x_scales=x[1],
        matrix=matrix[0],
        matrix_scales=matrix[1],
        amax_min=AMAX_MIN,
        **options,
    )
