# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`near_blocks`: the values of matrices in float8 with a scale for each 128 x 128 elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Float, Floats, Int, Params, Size, fields
from .base import TOO_MANY_EXPERTS, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small

AMAX_MIN = 2.0**-100
_TOO_LARGE = 1 << 30


class NearBlocksParams(Params):
    """pmo_near_blocks_params"""

    _fields_ = fields(
        (Size, "struct_size num_matrices num_rows num_columns"),
        (Bytes, "x"),
        (Floats, "out"),
        (Int, "dtype"),
        (Float, "amax_min"),
        (Int, "num_threads reserved"),
    )


def near_blocks_params(x: NDArray, out: NDArray, amax_min: float = AMAX_MIN, num_threads: int = 0) -> NearBlocksParams:
    matrices, rows, columns = x.shape
    sizes = {"num_matrices": matrices, "num_rows": rows, "num_columns": columns, "num_threads": num_threads}
    return NearBlocksParams(**sizes, x=x, out=out, dtype=DTYPES[x.dtype], amax_min=amax_min)


def near_blocks(core: Core, x: NDArray, amax_min: float = AMAX_MIN, num_threads: int = 0) -> NDArray:
    with guarded_outputs() as output:
        out = output(x.shape, np.float32)
        core.run("near_blocks", near_blocks_params(x, out, amax_min, num_threads))
    return out


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    return near_blocks_params(s.rows[None], output((1, *s.rows.shape), np.float32))


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    columns = int(s.rng.choice([s.H, s.H * 16]))
    return NearBlocksParams(
        num_matrices=1,
        num_rows=s.N,
        num_columns=columns,
        x=s.data(s.N, columns),
        out=output((s.N, columns), np.float32),
        amax_min=float(s.rng.choice([AMAX_MIN, 1e-4, 1e30])),
        **s.choices(dtype=3, num_threads=4),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    return (near_blocks(core, large.rows[None], num_threads=num_threads),)


OPERATORS = (
    Operator(
        name="near_blocks",
        valid=_valid,
        bad_fields={
            "num_matrices": (-1, TOO_MANY_EXPERTS),
            "num_rows": (-1, _TOO_LARGE),
            "num_columns": (-1, _TOO_LARGE),
            "dtype": (-1, 3, 5),
            "amax_min": (0.0, -1.0, 2.0**-101, float("inf"), float("nan")),
        },
        required=("x", "out"),
        aligned=("out",),
        fuzzed=_fuzzed,
        work=_work,
    ),
)
