# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`permute`: rows, and scales, into the order of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Fill, Int, Int32s, Params, Size, fields
from .base import TOO_MANY, TOO_WIDE, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small


class PermuteParams(Params):
    """pmo_permute_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens topk num_rows hidden scale_cols"),
        (Bytes, "x"),
        (Size, "x_row_stride"),
        (Bytes, "scale"),
        (Size, "scale_row_stride first_row"),
        (Int32s, "slot_to_row row_to_token rows_end"),
        (Bytes, "rows row_scales"),
        (Int, "dtype scale_dtype fill num_threads"),
    )


def permute_params(
    x: NDArray,
    slot_to_row: NDArray,
    row_to_token: NDArray,
    rows: NDArray | None,
    scale: NDArray | None = None,
    row_scales: NDArray | None = None,
    *,
    fill: int = Fill.ALL,
    **fields: Any,
) -> PermuteParams:
    """Params of "permute". Rows of ``x`` and ``scale`` may lie apart; rows None moves the scales only."""
    num_tokens, topk = slot_to_row.shape
    return PermuteParams(
        num_tokens=num_tokens,
        topk=topk,
        num_rows=len(row_to_token),
        hidden=x.shape[1],
        scale_cols=0 if scale is None else scale.shape[1],
        x=x,
        scale=scale,
        slot_to_row=slot_to_row,
        row_to_token=row_to_token,
        rows=rows,
        row_scales=row_scales,
        dtype=DTYPES[x.dtype],
        scale_dtype=0 if scale is None else DTYPES[scale.dtype],
        fill=fill,
        **fields,
    )


def permute(
    core: Core,
    x: NDArray,
    slot_to_row: NDArray,
    row_to_token: NDArray,
    scale: NDArray | None = None,
    *,
    odd_outputs: bool = False,
    **options: Any,
) -> tuple[NDArray, NDArray | None]:
    with guarded_outputs() as output:
        rows = output((len(row_to_token), x.shape[1]), x.dtype, int(odd_outputs))
        scales = None if scale is None else output((len(row_to_token), scale.shape[1]), scale.dtype, int(odd_outputs))
        core.run("permute", permute_params(x, slot_to_row, row_to_token, rows, scale, scales, **options))
    return rows, scales


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    rows, row_scales = output((s.N, s.H), np.float32), output((s.N, 1), np.float32)
    maps, scale = (s.plan.slot_to_row, s.plan.row_to_token), np.ones((s.T, 1), np.float32)
    return permute_params(s.x, *maps, rows, scale, row_scales)


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    return PermuteParams(
        **s.sizes("num_tokens topk num_rows hidden"),
        scale_cols=s.S,
        x=s.data(s.T, s.H),
        x_row_stride=s.H,
        scale=s.data(s.T, s.S),
        scale_row_stride=s.S,
        slot_to_row=s.ints((s.T, s.K), s.N),
        row_to_token=s.ints((s.N,), s.T),
        first_row=s.below(4),
        rows_end=s.ints((1,), s.N + 4) if s.below(2) else None,
        rows=output((s.N, s.H), np.float32),
        row_scales=output((s.N, s.S), np.float32),
        **s.choices(dtype=6, scale_dtype=6, fill=4),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    plan, scale = large.plan, large.x[:, :3].astype(np.float32)
    rows, scales = permute(core, large.x, plan.slot_to_row, plan.row_to_token, scale, num_threads=num_threads)
    assert scales is not None
    return rows, scales


OPERATORS = (
    Operator(
        name="permute",
        valid=_valid,
        bad_fields={
            "first_row": (-1, TOO_MANY),
            "num_tokens": (-1, TOO_MANY),
            "topk": (-1, TOO_MANY // 5 + 1),
            "num_rows": (-1, TOO_MANY),
            "hidden": (-1, TOO_WIDE),
            "scale_cols": (-1, TOO_WIDE),
            "dtype": (-1, 6),
            "scale_dtype": (-1, 6),
        },
        required=("x", "scale", "slot_to_row", "row_to_token"),
        aligned=("slot_to_row", "row_to_token"),
        fuzzed=_fuzzed,
        work=_work,
    ),
)
