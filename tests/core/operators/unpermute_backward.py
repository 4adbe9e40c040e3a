# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`unpermute_backward`: the gradients of rows and of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Floats, Int, Int32s, Params, Size, fields
from .base import Operator
from .unpermute import BAD_FIELDS

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small


class UnpermuteBackwardParams(Params):
    """pmo_unpermute_backward_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens max_rows_per_token num_rows num_weights hidden"),
        (Bytes, "d_out"),
        (Size, "d_out_row_stride"),
        (Bytes, "rows"),
        (Size, "rows_row_stride"),
        (Int32s, "token_rows row_to_token"),
        (Floats, "weights"),
        (Int32s, "weight_index"),
        (Bytes, "d_rows"),
        (Floats, "d_weights"),
        (Int, "dtype copy_single_row num_threads"),
    )


def unpermute_backward_params(
    d_out: NDArray,
    token_rows: NDArray,
    row_to_token: NDArray,
    d_rows: NDArray | None = None,
    rows: NDArray | None = None,
    weights: NDArray | None = None,
    weight_index: NDArray | None = None,
    d_weights: NDArray | None = None,
    **fields: Any,
) -> UnpermuteBackwardParams:
    """Params of "unpermute_backward"; d_rows or d_weights None: not wanted."""
    num_tokens, max_rows_per_token = token_rows.shape
    return UnpermuteBackwardParams(
        num_tokens=num_tokens,
        max_rows_per_token=max_rows_per_token,
        num_rows=len(row_to_token),
        num_weights=0 if weights is None else weights.size,
        hidden=d_out.shape[1],
        d_out=d_out,
        rows=rows,
        token_rows=token_rows,
        row_to_token=row_to_token,
        weights=weights,
        weight_index=weight_index,
        d_rows=d_rows,
        d_weights=d_weights,
        dtype=DTYPES[d_out.dtype],
        **fields,
    )


def unpermute_backward(
    core: Core,
    d_out: NDArray,
    token_rows: NDArray,
    row_to_token: NDArray,
    rows: NDArray | None = None,
    weights: NDArray | None = None,
    weight_index: NDArray | None = None,
    *,
    wants_d_rows: bool = True,
    wants_d_weights: bool = False,
    odd_outputs: bool = False,
    **options: Any,
) -> tuple[NDArray | None, NDArray | None]:
    with guarded_outputs() as output:
        d_rows = output((len(row_to_token), d_out.shape[1]), d_out.dtype, int(odd_outputs)) if wants_d_rows else None
        d_weights = output(weights.shape, np.float32) if wants_d_weights and weights is not None else None
        params = unpermute_backward_params(
            d_out, token_rows, row_to_token, d_rows, rows, weights, weight_index, d_weights, **options
        )
        core.run("unpermute_backward", params)
    return d_rows, d_weights


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    maps, weights = (s.plan.token_rows, s.plan.row_to_token), np.ones((s.T, s.K), np.float32)
    d_rows, d_weights = output((s.N, s.H), np.float32), output((s.T, s.K), np.float32)
    return unpermute_backward_params(s.x, *maps, d_rows, s.rows, weights, s.plan.row_to_slot, d_weights)


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    weights = s.between(s.N, s.N + 10)
    return UnpermuteBackwardParams(
        **s.sizes("num_tokens max_rows_per_token num_rows"),
        num_weights=weights,
        hidden=s.H,
        d_out=s.data(s.T, s.H),
        d_out_row_stride=s.H,
        rows=s.data(s.N, s.H),
        rows_row_stride=s.H,
        token_rows=s.ints((s.T, s.K), s.N),
        row_to_token=s.ints((s.N,), s.T),
        weights=s.data(1, weights)[0],
        weight_index=s.ints((s.N,), weights),
        d_rows=output((s.N, s.H), np.float32),
        d_weights=output(weights, np.float32),
        **s.choices(dtype=3, copy_single_row=2),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    plan, rows = large.plan, large.rows
    arrays = rows[: plan.num_tokens], plan.token_rows, plan.row_to_token, rows, large.weights
    d_rows, d_weights = unpermute_backward(core, *arrays, wants_d_weights=True, num_threads=num_threads)
    assert d_rows is not None
    assert d_weights is not None
    return d_rows, d_weights


OPERATORS = (
    Operator(
        name="unpermute_backward",
        valid=_valid,
        bad_fields=BAD_FIELDS,
        required=("d_out", "rows", "token_rows", "row_to_token", "weights"),
        aligned=("token_rows", "row_to_token", "weights", "weight_index", "d_weights"),
        fuzzed=_fuzzed,
        work=_work,
    ),
)
