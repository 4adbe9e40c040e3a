# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`quantize`: rows in float8 with a scale for each 128 columns, in their own order or in that of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Fill, Float, Int, Int32s, Params, ScaleLayout, Size, fields
from .base import TOO_MANY, TOO_WIDE, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small


class QuantizeParams(Params):
    """pmo_quantize_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens topk num_rows hidden"),
        (Bytes, "x"),
        (Size, "x_row_stride"),
        (Int32s, "slot_to_row row_to_token"),
        (Bytes, "codes scales"),
        (Int, "dtype ue8m0 scale_layout fill"),
        (Float, "amax_min"),
        (Int, "num_threads"),
        (Bytes, "workspace"),
        (Size, "workspace_bytes"),
    )


def quantize_params(
    x: NDArray,
    codes: NDArray,
    scales: NDArray,
    slot_to_row: NDArray | None = None,
    row_to_token: NDArray | None = None,
    *,
    layout: ScaleLayout = ScaleLayout.ROW,
    amax_min: float = 1e-4,
    fill: int = Fill.ALL,
    workspace: NDArray | None = None,
    **fields: Any,
) -> QuantizeParams:
    """Params of "quantize". Rows of ``x`` may lie apart; without maps row t is token t; ue8m0 is one of `fields`."""
    num_tokens, topk = (len(x), 1) if slot_to_row is None else slot_to_row.shape
    return QuantizeParams(
        num_tokens=num_tokens,
        topk=topk,
        num_rows=len(codes),
        hidden=x.shape[1],
        x=x,
        slot_to_row=slot_to_row,
        row_to_token=row_to_token,
        codes=codes,
        scales=scales,
        dtype=DTYPES[x.dtype],
        scale_layout=layout,
        fill=fill,
        amax_min=amax_min,
        workspace=workspace,
        workspace_bytes=0 if workspace is None else workspace.nbytes,
        **fields,
    )


def quantize(
    core: Core,
    x: NDArray,
    slot_to_row: NDArray | None = None,
    row_to_token: NDArray | None = None,
    *,
    ue8m0: bool = False,
    layout: ScaleLayout = ScaleLayout.ROW,
    odd_codes: bool = False,
    **options: Any,
) -> tuple[NDArray, NDArray]:
    """Codes and scales of x, or with maps of its rows in expert order."""
    num_rows, hidden = len(x) if row_to_token is None else len(row_to_token), x.shape[1]
    groups = -(-hidden // 128)
    words = -(-groups // 4) if ue8m0 else groups
    shape = (num_rows, words) if layout == ScaleLayout.ROW else (words, -(-num_rows // 4) * 4)
    with guarded_outputs() as output:
        codes = output((num_rows, hidden), ml_dtypes.float8_e4m3fn, int(odd_codes))
        scales = output(shape, np.int32 if ue8m0 else np.float32)
        params = quantize_params(x, codes, scales, slot_to_row, row_to_token, layout=layout, ue8m0=ue8m0, **options)
        core.run("quantize", params)
    return codes, scales


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    codes, scales = output((s.N, s.H), ml_dtypes.float8_e4m3fn), output((s.N, 1), np.float32)
    maps = s.plan.slot_to_row, s.plan.row_to_token
    return quantize_params(s.x, codes, scales, *maps, workspace=np.zeros(s.T, np.float32))


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    hidden = int(s.rng.choice([s.H, s.H * 16]))
    has_map = s.rng.random() < 0.7
    num_rows, groups = s.N if has_map else s.T, -(-hidden // 128)
    return QuantizeParams(
        num_tokens=s.T,
        topk=s.K if has_map else 1,
        num_rows=num_rows,
        hidden=hidden,
        x=s.data(s.T, hidden),
        x_row_stride=hidden,
        slot_to_row=s.ints((s.T, s.K), s.N) if has_map else None,
        row_to_token=s.ints((s.N,), s.T) if has_map else None,
        codes=output((num_rows, hidden), np.uint8),
        scales=output((num_rows + 3, groups), np.float32),
        **s.choices(dtype=3, ue8m0=2, scale_layout=2, fill=4),
        amax_min=float(s.rng.choice([2.0**-100, 1e-4, 1e30])),
        num_threads=s.below(4),
        workspace=np.empty(s.T * groups, np.float32),
        workspace_bytes=s.T * groups * 4,
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    inputs = large.x, large.plan.slot_to_row, large.plan.row_to_token
    by_row = quantize(core, *inputs, num_threads=num_threads)
    return *by_row, *quantize(core, *inputs, ue8m0=True, layout=ScaleLayout.COLUMN, num_threads=num_threads)


OPERATORS = (
    Operator(
        name="quantize",
        valid=_valid,
        bad_fields={
            "num_tokens": (-1, TOO_MANY),
            "topk": (-1, TOO_MANY // 5 + 1),
            "num_rows": (-1, TOO_MANY),
            "hidden": (-1, TOO_WIDE),
            "dtype": (-1, 3, 5),  # there is nothing to quantise in float8
            "scale_layout": (-1, 2),
            "amax_min": (0.0, -1.0, 2.0**-101, float("inf"), float("nan")),
        },
        required=("x", "slot_to_row", "row_to_token", "codes", "scales"),
        aligned=("slot_to_row", "row_to_token", "scales", "workspace"),
        fuzzed=_fuzzed,
        work=_work,
    ),
)
