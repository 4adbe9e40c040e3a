# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`dequantize`: numbers from the codes and scales that quantize made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Int, Params, ScaleLayout, Size, fields
from .base import TOO_MANY, TOO_WIDE, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small


class DequantizeParams(Params):
    """pmo_dequantize_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows hidden"),
        (Bytes, "codes"),
        (Size, "codes_row_stride"),
        (Bytes, "scales out"),
        (Int, "dtype ue8m0 scale_layout num_threads"),
    )


def dequantize_params(
    codes: NDArray, scales: NDArray, out: NDArray, *, layout: ScaleLayout = ScaleLayout.ROW, **fields: Any
) -> DequantizeParams:
    """Params of "dequantize". Rows of ``codes`` may lie apart; int32 scales are packed ue8m0."""
    return DequantizeParams(
        num_rows=len(codes),
        hidden=codes.shape[1],
        codes=codes,
        scales=scales,
        out=out,
        dtype=DTYPES[out.dtype],
        ue8m0=scales.dtype == np.int32,
        scale_layout=layout,
        **fields,
    )


def dequantize(
    core: Core, codes: NDArray, scales: NDArray, dtype: DTypeLike, *, odd_outputs: int = 0, **options: Any
) -> NDArray:
    with guarded_outputs() as output:
        out = output(codes.shape, dtype, odd_outputs)
        core.run("dequantize", dequantize_params(codes, scales, out, **options))
    return out


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    codes, scales = np.ones((s.N, s.H), ml_dtypes.float8_e4m3fn), np.ones((s.N, 1), np.float32)
    return dequantize_params(codes, scales, output((s.N, s.H), np.float32))


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    hidden = int(s.rng.choice([s.H, s.H * 16]))
    return DequantizeParams(
        num_rows=s.N,
        hidden=hidden,
        codes=s.data(s.N, hidden),
        codes_row_stride=hidden,
        scales=s.data(s.N + 3, -(-hidden // 128)),
        out=output((s.N, hidden), np.float32),
        **s.choices(dtype=3, ue8m0=2, scale_layout=2, num_threads=4),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    return (dequantize(core, *large.quantized, ml_dtypes.bfloat16, num_threads=num_threads),)


OPERATORS = (
    Operator(
        name="dequantize",
        valid=_valid,
        bad_fields={
            "num_rows": (-1, TOO_MANY),
            "hidden": (-1, TOO_WIDE),
            "dtype": (-1, 3),
            "scale_layout": (-1, 2),
        },
        required=("codes", "scales", "out"),
        aligned=("scales",),
        fuzzed=_fuzzed,
        work=_work,
    ),
)
