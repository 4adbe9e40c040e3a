# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Operators next to a grouped GEMM: `grouped_tables`, `grouped_clear`, `row_sums`, `swiglu` and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, IDS_KINDS, Bytes, Floats, Int, Int32s, Params, Size, fields
from .base import TOO_MANY, TOO_MANY_EXPERTS, TOO_WIDE, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small

TILE_ROWS = 160


class TablesParams(Params):
    """pmo_grouped_tables_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_experts"),
        (Bytes, "sizes offsets"),
        (Size, "num_chunks chunk_rows"),
        (Int32s, "tables"),
        (Int, "sizes_kind offsets_kind tile_rows other_tile_rows"),
    )


class ClearParams(Params):
    """pmo_grouped_clear_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_experts row_size"),
        (Int32s, "first stop"),
        (Bytes, "rows"),
    )


class RowSumsParams(Params):
    """pmo_row_sums_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows width"),
        (Floats, "values"),
        (Int32s, "row_to_token"),
        (Floats, "out"),
    )


class SwigluParams(Params):
    """pmo_swiglu_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows width"),
        (Bytes, "hidden act"),
        (Int, "dtype num_threads"),
    )


class SwigluBackwardParams(Params):
    """pmo_swiglu_backward_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows width"),
        (Bytes, "hidden"),
        (Int32s, "row_to_token"),
        (Floats, "weights"),
        (Bytes, "d_hidden scaled"),
        (Floats, "d_weights"),
        (Int, "dtype num_threads"),
    )


class Tables(NamedTuple):
    """The outputs of `grouped_tables` for one tile height."""

    first: NDArray
    stop: NDArray
    tiles: NDArray
    window: NDArray
    counters: NDArray

    @staticmethod
    def of(tables: NDArray, num_experts: int) -> Tables:
        ends = np.cumsum([num_experts, num_experts, num_experts + 1, len(tables) - 3 * num_experts - 3])
        return Tables(*np.split(tables, ends))


def tables_params(
    sizes: NDArray,
    offsets: NDArray | None,
    num_rows: int,
    tables: NDArray,
    tile_rows: Sequence[int] = (TILE_ROWS,),
    num_chunks: int = 0,
    chunk_rows: int = 0,
) -> TablesParams:
    return TablesParams(
        num_rows=num_rows,
        num_experts=len(sizes),
        sizes=sizes,
        offsets=offsets,
        num_chunks=num_chunks,
        chunk_rows=chunk_rows,
        sizes_kind=IDS_KINDS[sizes.dtype],
        offsets_kind=IDS_KINDS[(sizes if offsets is None else offsets).dtype],
        tile_rows=tile_rows[0],
        other_tile_rows=sum(tile_rows[1:]),
        tables=tables,
    )


def empty_tables(output: MakeOutput, num_experts: int, num_heights: int = 1, num_chunks: int = 0) -> NDArray:
    return output((num_heights, 3 * num_experts + num_chunks + 6), np.int32)


def grouped_tables(
    core: Core,
    sizes: NDArray,
    offsets: NDArray | None,
    num_rows: int,
    tile_rows: Sequence[int] = (TILE_ROWS,),
    num_chunks: int = 0,
    chunk_rows: int = 0,
) -> list[Tables]:
    """The tables of each tile height."""
    with guarded_outputs() as output:
        tables = empty_tables(output, len(sizes), len(tile_rows), num_chunks)
        core.run("grouped_tables", tables_params(sizes, offsets, num_rows, tables, tile_rows, num_chunks, chunk_rows))
    return [Tables.of(each, len(sizes)) for each in tables]


def clear_params(rows: NDArray, first: NDArray, stop: NDArray) -> ClearParams:
    row_size = rows.shape[1] * rows.itemsize
    return ClearParams(num_rows=len(rows), num_experts=len(first), row_size=row_size, first=first, stop=stop, rows=rows)


def row_sums_params(values: NDArray, row_to_token: NDArray, out: NDArray) -> RowSumsParams:
    num_rows, width = values.shape
    return RowSumsParams(num_rows=num_rows, width=width, values=values, row_to_token=row_to_token, out=out)


def row_sums(core: Core, values: NDArray, row_to_token: NDArray) -> NDArray:
    with guarded_outputs() as output:
        out = output(len(values), np.float32)
        core.run("row_sums", row_sums_params(values, row_to_token, out))
    return out


def swiglu_params(hidden: NDArray, act: NDArray, num_threads: int = 0) -> SwigluParams:
    num_rows, width = act.shape
    sizes = {"num_rows": num_rows, "width": width, "num_threads": num_threads}
    return SwigluParams(**sizes, hidden=hidden, act=act, dtype=DTYPES[hidden.dtype])


def swiglu(core: Core, hidden: NDArray, num_threads: int = 0) -> NDArray:
    with guarded_outputs() as output:
        act = output((len(hidden), hidden.shape[1] // 2), hidden.dtype)
        core.run("swiglu", swiglu_params(hidden, act, num_threads))
    return act


def swiglu_backward_params(
    hidden: NDArray,
    row_to_token: NDArray,
    weights: NDArray,
    d_hidden: NDArray,
    scaled: NDArray,
    d_weights: NDArray,
    num_threads: int = 0,
) -> SwigluBackwardParams:
    num_rows, width = scaled.shape
    return SwigluBackwardParams(
        num_rows=num_rows,
        width=width,
        hidden=hidden,
        row_to_token=row_to_token,
        weights=weights,
        d_hidden=d_hidden,
        scaled=scaled,
        d_weights=d_weights,
        dtype=DTYPES[hidden.dtype],
        num_threads=num_threads,
    )


def swiglu_backward(
    core: Core,
    hidden: NDArray,
    gradient: NDArray,
    weights: NDArray,
    row_to_token: NDArray,
    num_threads: int = 0,
) -> tuple[NDArray, NDArray, NDArray]:
    """The gradient of ``hidden``, the weighted activations and the gradients of the weights."""
    with guarded_outputs() as output:
        d_hidden, scaled = output(hidden.shape, hidden.dtype), output(gradient.shape, hidden.dtype)
        d_weights = output(len(hidden), np.float32)
        scaled[...] = gradient
        outputs = d_hidden, scaled, d_weights
        core.run("swiglu_backward", swiglu_backward_params(hidden, row_to_token, weights, *outputs, num_threads))
    return outputs


def _valid_tables(core: Core, output: MakeOutput, s: Small) -> Params:
    sizes, offsets = s.plan.tokens_per_expert, s.plan.expert_offsets
    return tables_params(sizes, offsets, s.N, empty_tables(output, s.E))


def _valid_clear(core: Core, output: MakeOutput, s: Small) -> Params:
    first = s.plan.expert_offsets[:-1].astype(np.int32)
    return clear_params(output((s.N, 8), np.float32), first, first + s.plan.tokens_per_expert.astype(np.int32))


def _valid_row_sums(core: Core, output: MakeOutput, s: Small) -> Params:
    return row_sums_params(s.rows, s.plan.row_to_token, output(s.N, np.float32))


def _valid_swiglu(core: Core, output: MakeOutput, s: Small) -> Params:
    return swiglu_params(s.rows, output((s.N, s.H // 2), np.float32))


def _valid_swiglu_backward(core: Core, output: MakeOutput, s: Small) -> Params:
    outputs = output(s.rows.shape, np.float32), output((s.N, s.H // 2), np.float32), output(s.N, np.float32)
    return swiglu_backward_params(s.rows, s.plan.row_to_token, np.ones(s.N, np.float32), *outputs)


def _fuzzed_tables(core: Core, output: MakeOutput, s: Draw) -> Params:
    sizes, offsets = (s.ints((2 * s.E,), s.N + 3) for _ in range(2))  # room for int64
    heights, chunks = 1 + s.below(2), s.below(5)
    return TablesParams(
        num_rows=s.N,
        num_experts=s.E,
        sizes=sizes,
        offsets=offsets if s.below(2) else None,
        **s.choices(sizes_kind=2, offsets_kind=2),
        chunk_rows=1 + s.below(50),
        num_chunks=chunks,
        tile_rows=1 + s.below(200),
        other_tile_rows=0 if heights == 1 else 1 + s.below(200),
        tables=empty_tables(output, s.E, 2, chunks),  # a fault may add a height
    )


def _fuzzed_clear(core: Core, output: MakeOutput, s: Draw) -> Params:
    rows = output((s.N, 4 * s.below(6)), np.float32)
    return clear_params(rows, s.ints((s.E,), s.N), s.ints((s.E,), s.N))


def _fuzzed_row_sums(core: Core, output: MakeOutput, s: Draw) -> Params:
    return row_sums_params(s.data(s.N, s.H), s.ints((s.N,), s.T), output(s.N, np.float32))


def _fuzzed_swiglu(core: Core, output: MakeOutput, s: Draw) -> Params:
    options = s.choices(dtype=3, num_threads=4)
    hidden, act = s.data(s.N, 2 * s.H), output((s.N, s.H), np.float32)
    return SwigluParams(num_rows=s.N, width=s.H, hidden=hidden, act=act, **options)


def _fuzzed_swiglu_backward(core: Core, output: MakeOutput, s: Draw) -> Params:
    return SwigluBackwardParams(
        num_rows=s.N,
        width=s.H,
        hidden=s.data(s.N, 2 * s.H),
        row_to_token=s.ints((s.N,), s.T),
        weights=s.data(s.N, 1)[:, 0].copy(),
        d_hidden=output((s.N, 2 * s.H), np.float32),
        scaled=output((s.N, s.H), np.float32),
        d_weights=output(s.N, np.float32),
        **s.choices(dtype=3, num_threads=4),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    return (swiglu(core, large.rows, num_threads),)


def _work_backward(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    hidden = large.rows
    gradient = np.ascontiguousarray(hidden[:, ::2]).astype(ml_dtypes.bfloat16)
    return swiglu_backward(core, hidden, gradient, large.weights, large.plan.row_to_token, num_threads)


_ROWS = {"num_rows": (-1, TOO_MANY)}
_TABLES = ("first", "stop")
_GRADIENTS = ("hidden", "row_to_token", "weights", "d_hidden", "scaled", "d_weights")
OPERATORS = (
    Operator(
        name="grouped_tables",
        valid=_valid_tables,
        bad_fields={
            **_ROWS,
            "num_experts": (0, TOO_MANY_EXPERTS),
            "sizes_kind": (-1, 2),
            "offsets_kind": (-1, 2),
            "tile_rows": (-1, 0),
            "other_tile_rows": (-1,),
            "num_chunks": (-1, TOO_MANY),
        },
        required=("sizes", "tables"),
        aligned=("sizes", "offsets", "tables"),
        fuzzed=_fuzzed_tables,
    ),
    Operator(
        name="grouped_clear",
        valid=_valid_clear,
        bad_fields={**_ROWS, "num_experts": (0, TOO_MANY_EXPERTS), "row_size": (-16, 8, (1 << 30) + 16)},
        required=(*_TABLES, "rows"),
        aligned=(*_TABLES, "rows"),
        fuzzed=_fuzzed_clear,
    ),
    Operator(
        name="row_sums",
        valid=_valid_row_sums,
        bad_fields={**_ROWS, "width": (-1, TOO_WIDE)},
        required=("values", "row_to_token", "out"),
        aligned=("values", "row_to_token", "out"),
        fuzzed=_fuzzed_row_sums,
    ),
    Operator(
        name="swiglu",
        valid=_valid_swiglu,
        bad_fields={**_ROWS, "width": (-1, TOO_WIDE), "dtype": (-1, 3)},
        required=("hidden", "act"),
        aligned=("hidden", "act"),
        fuzzed=_fuzzed_swiglu,
        work=_work,
    ),
    Operator(
        name="swiglu_backward",
        valid=_valid_swiglu_backward,
        bad_fields={**_ROWS, "width": (-1, TOO_WIDE), "dtype": (-1, 3)},
        required=_GRADIENTS,
        aligned=_GRADIENTS,
        fuzzed=_fuzzed_swiglu_backward,
        work=_work_backward,
    ),
)
