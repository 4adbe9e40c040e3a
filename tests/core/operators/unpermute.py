# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`unpermute`: the sums of each token's rows, plain or weighted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Floats, Int, Int32s, Params, Size, fields
from .base import TOO_MANY, TOO_WIDE, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small


class UnpermuteParams(Params):
    """pmo_unpermute_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens max_rows_per_token num_rows num_weights hidden"),
        (Bytes, "rows"),
        (Size, "rows_row_stride"),
        (Int32s, "token_rows"),
        (Floats, "weights"),
        (Int32s, "weight_index"),
        (Bytes, "out"),
        (Size, "out_row_stride"),
        (Int, "dtype copy_single_row num_threads overlaps"),
    )


def unpermute_params(
    rows: NDArray,
    token_rows: NDArray,
    out: NDArray,
    weights: NDArray | None = None,
    weight_index: NDArray | None = None,
    **fields: Any,
) -> UnpermuteParams:
    """Params of "unpermute". Rows of ``rows`` [N, H] may lie apart; weights may have any shape."""
    num_tokens, max_rows_per_token = token_rows.shape
    return UnpermuteParams(
        num_tokens=num_tokens,
        max_rows_per_token=max_rows_per_token,
        num_rows=len(rows),
        num_weights=0 if weights is None else weights.size,
        hidden=rows.shape[1],
        rows=rows,
        token_rows=token_rows,
        weights=weights,
        weight_index=weight_index,
        out=out,
        dtype=DTYPES[rows.dtype],
        **fields,
    )


def unpermute(
    core: Core,
    rows: NDArray,
    token_rows: NDArray,
    weights: NDArray | None = None,
    weight_index: NDArray | None = None,
    *,
    odd_outputs: bool = False,
    **options: Any,
) -> NDArray:
    with guarded_outputs() as output:
        out = output((len(token_rows), rows.shape[1]), rows.dtype, int(odd_outputs))
        core.run("unpermute", unpermute_params(rows, token_rows, out, weights, weight_index, **options))
    return out


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    out, weights = output((s.T, s.H), np.float32), np.ones((s.T, s.K), np.float32)
    return unpermute_params(s.rows, s.plan.token_rows, out, weights, s.plan.row_to_slot)


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    weights = s.between(s.N, s.N + 10)
    return UnpermuteParams(
        **s.sizes("num_tokens max_rows_per_token num_rows"),
        num_weights=weights,
        hidden=s.H,
        rows=s.data(s.N, s.H),
        rows_row_stride=s.H,
        out_row_stride=s.H,
        token_rows=s.ints((s.T, s.K), s.N),
        weights=s.data(1, weights)[0],
        weight_index=s.ints((s.N,), weights),
        out=output((s.T, s.H), np.float32),
        **s.choices(dtype=3, copy_single_row=2),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    rows, token_rows = large.rows, large.plan.token_rows
    plain = unpermute(core, rows, token_rows, num_threads=num_threads)
    return plain, unpermute(core, rows, token_rows, large.weights, num_threads=num_threads)


BAD_FIELDS = {
    "num_tokens": (-1, TOO_MANY),
    "max_rows_per_token": (-1, TOO_MANY),
    "num_rows": (-1, TOO_MANY),
    "num_weights": (-1, TOO_MANY),
    "hidden": (-1, TOO_WIDE),
    "dtype": (-1, 3, 4, 5),  # float8 rows are moved, never summed
}

OPERATORS = (
    Operator(
        name="unpermute",
        valid=_valid,
        bad_fields={**BAD_FIELDS, "out_row_stride": (-1, TOO_WIDE)},
        required=("rows", "token_rows", "out"),
        aligned=("token_rows", "weights", "weight_index"),
        fuzzed=_fuzzed,
        work=_work,
    ),
)
