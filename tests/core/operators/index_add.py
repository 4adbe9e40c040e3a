# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`index_add`: rows that are added to the tokens of an index, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, IDS_KINDS, Bytes, Int, Int32s, Params, Size, fields
from .base import TOO_MANY, TOO_WIDE, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small


class IndexAddParams(Params):
    """pmo_index_add_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_tokens hidden first_token"),
        (Bytes, "rows"),
        (Size, "rows_row_stride"),
        (Bytes, "row_to_token out"),
        (Int32s, "workspace"),
        (Int, "dtype rows_dtype index_kind num_threads"),
    )


def index_add_params(
    output: MakeOutput, rows: NDArray, row_to_token: NDArray, out: NDArray, **fields: Any
) -> IndexAddParams:
    """Params of "index_add"; rows may lie apart."""
    workspace = output((2, len(out)), np.int32)
    workspace[...] = 0  # the CPU does not write it
    return IndexAddParams(
        num_rows=len(row_to_token),
        num_tokens=len(out),
        hidden=out.shape[1],
        rows=rows,
        row_to_token=row_to_token,
        out=out,
        workspace=workspace,
        dtype=DTYPES[out.dtype],
        rows_dtype=DTYPES[rows.dtype],
        index_kind=IDS_KINDS[row_to_token.dtype],
        **fields,
    )


def index_add(
    core: Core, rows: NDArray, row_to_token: NDArray, tokens: NDArray, *, odd_outputs: int = 0, **options: Any
) -> NDArray:
    """The tokens with the rows added."""
    with guarded_outputs() as output:
        out = output(tokens.shape, tokens.dtype, odd_outputs)
        out[...] = tokens
        core.run("index_add", index_add_params(output, rows, row_to_token, out, **options))
    return out


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    out = output((s.T, s.H), np.float32)
    out[...] = 0
    return index_add_params(output, s.rows, s.plan.row_to_token, out)


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    dtype = 2 * s.below(2)
    return IndexAddParams(
        num_rows=s.N,
        num_tokens=s.T,
        hidden=s.H,
        first_token=s.below(4),
        rows=s.data(s.N, s.H),
        rows_row_stride=s.H,
        row_to_token=s.ints((2 * s.N,), s.T + 3),  # room for int64
        out=output((s.T, s.H), np.float32),
        workspace=output((2, s.T), np.int32),
        dtype=dtype,
        rows_dtype=2 if s.below(2) else dtype,
        **s.choices(index_kind=2, num_threads=4),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    tokens = large.x.astype(np.float32)
    wide = index_add(core, large.rows, large.plan.row_to_token, tokens, num_threads=num_threads)
    narrow = index_add(core, large.rows, large.plan.row_to_token, large.x, num_threads=num_threads)
    return wide, narrow


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OPERATORS = (
    Operator(
        name="index_add",
        valid=_valid,
        bad_fields={
            "num_rows": (-1, TOO_MANY),
            "num_tokens": (-1, TOO_MANY),
            "hidden": (-1, TOO_WIDE),
            "first_token": (-1, TOO_MANY),
            "rows_row_stride": (-1, 5, TOO_WIDE),
            "dtype": (-1, 1, 3),
            "rows_dtype": (-1, 1, 3),
            "index_kind": (-1, 2),
        },
        required=("rows", "row_to_token", "out"),
        aligned=("row_to_token",),
        fuzzed=_fuzzed,
        work=_work,
    ),
)
