# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`quantize_blocks` and `dequantize_matrices`: codes of the matrices of experts, and their values."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference import MATRIX_FORMATS

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Float, Floats, Int, Params, Size, fields
from .base import TOO_MANY_EXPERTS, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small

AMAX_MIN = 2.0**-100
_TOO_LARGE = 1 << 30
_SIDE = 128
FLOAT8 = ml_dtypes.float8_e4m3fn


class MatrixFormat(enum.IntEnum):
    """pmo_matrix_format"""

    INT8 = 0
    INT4 = 1
    INT4_1X128 = 2
    FLOAT8_128X128 = 3


class QuantizeBlocksParams(Params):
    """pmo_quantize_blocks_params"""

    _fields_ = fields(
        (Size, "struct_size num_matrices num_rows num_columns"),
        (Bytes, "x codes"),
        (Floats, "scales"),
        (Bytes, "turned_codes"),
        (Floats, "turned_scales"),
        (Int, "dtype"),
        (Float, "amax_min"),
        (Int, "num_threads reserved"),
    )


class DequantizeMatricesParams(Params):
    """pmo_dequantize_matrices_params"""

    _fields_ = fields(
        (Size, "struct_size num_matrices inner outer"),
        (Bytes, "codes"),
        (Floats, "scales"),
        (Bytes, "out"),
        (Int, "format transpose dtype widens num_threads reserved"),
    )


def quantize_blocks_params(
    output: MakeOutput,
    x: NDArray,
    *,
    forms: tuple[bool, bool] = (True, False),
    amax_min: float = AMAX_MIN,
    num_threads: int = 0,
) -> QuantizeBlocksParams:
    """Params of "quantize_blocks"; ``forms`` says whether codes as stored, and transposed ones, are wanted."""
    matrices, rows, columns = x.shape
    results = {}
    for wanted, prefix, sides in zip(forms, ("", "turned_"), ((rows, columns), (columns, rows)), strict=True):
        if wanted:
            results[f"{prefix}codes"] = output((matrices, *sides), FLOAT8)
            results[f"{prefix}scales"] = output((matrices, *(-(-side // _SIDE) for side in sides)), np.float32)
    sizes = {"num_matrices": matrices, "num_rows": rows, "num_columns": columns, "num_threads": num_threads}
    return QuantizeBlocksParams(**sizes, x=x, dtype=DTYPES[x.dtype], amax_min=amax_min, **results)


def quantize_blocks(core: Core, x: NDArray, **options: Any) -> dict[str, NDArray]:
    with guarded_outputs() as output:
        params = quantize_blocks_params(output, x, **options)
        core.run("quantize_blocks", params)
    return {name: array for name, array in params.arrays.items() if name != "x"}


def dequantize_matrices_params(
    codes: NDArray,
    scales: NDArray,
    out: NDArray,
    *,
    format: str,
    sizes: tuple[int, int],
    transpose: bool = False,
    dtype: DTypeLike | None = None,
    num_threads: int = 0,
) -> DequantizeMatricesParams:
    """Params of "dequantize_matrices"; ``sizes`` are D and N, ``dtype`` that of the values if ``out`` is wider."""
    dtype = np.dtype(out.dtype if dtype is None else dtype)
    return DequantizeMatricesParams(
        num_matrices=len(codes),
        inner=sizes[0],
        outer=sizes[1],
        codes=codes,
        scales=scales,
        out=out,
        format=MatrixFormat(MATRIX_FORMATS.index(format)),
        transpose=transpose,
        dtype=DTYPES[dtype],
        widens=dtype != out.dtype,
        num_threads=num_threads,
    )


def dequantize_matrices(
    core: Core,
    codes: NDArray,
    scales: NDArray,
    *,
    sizes: tuple[int, int],
    transpose: bool = False,
    dtype: DTypeLike,
    widens: bool = False,
    **options: Any,
) -> NDArray:
    with guarded_outputs() as output:
        out = output((len(codes), *(sizes[::-1] if transpose else sizes)), np.float32 if widens else dtype)
        params = dequantize_matrices_params(
            codes, scales, out, sizes=sizes, transpose=transpose, dtype=dtype, **options
        )
        core.run("dequantize_matrices", params)
    return out


def _blocks(core: Core, output: MakeOutput, s: Small) -> Params:
    return quantize_blocks_params(output, s.rows[None], forms=(True, True))


def _blocks_fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    columns = int(s.rng.choice([s.H, s.H * 16]))
    x = s.data(s.N, columns)[None]
    params = quantize_blocks_params(output, x, forms=(True, bool(s.below(2))))
    params.amax_min = float(s.rng.choice([AMAX_MIN, 1e-4, 1e30]))
    for field, value in s.choices(dtype=3, num_threads=4).items():
        setattr(params, field, value)
    return params


def _blocks_work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    made = quantize_blocks(core, large.rows[None], forms=(True, True), num_threads=num_threads)
    return tuple(made.values())


def _values(core: Core, output: MakeOutput, s: Small) -> Params:
    codes, scales = np.ones((s.E, s.H, 3), np.int8), np.ones((s.E, 3), np.float32)
    out = output((s.E, s.H, 3), np.float32)
    return dequantize_matrices_params(codes, scales, out, format="int8", sizes=(s.H, 3))


def _values_fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    inner, outer = int(s.rng.choice([s.H, s.H * 16])), s.N
    return DequantizeMatricesParams(
        num_matrices=1,
        inner=inner,
        outer=outer,
        codes=s.data(inner + 1, outer + 1),
        scales=s.data(inner + 1, outer + 1),
        out=output((inner, outer), np.float32),
        **s.choices(format=5, transpose=2, dtype=3, widens=2, num_threads=4),
    )


def _values_work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    codes = large.rows[None].view(np.int8)
    sizes = codes.shape[1:]
    scales = np.linspace(0.5, 2, sizes[1], dtype=np.float32)[None]
    options = {"format": "int8", "sizes": sizes, "dtype": ml_dtypes.bfloat16}
    return (dequantize_matrices(core, codes, scales, num_threads=num_threads, **options),)


_BAD_SIZES = {"num_matrices": (-1, TOO_MANY_EXPERTS), "dtype": (-1, 3, 5)}

OPERATORS = (
    Operator(
        name="quantize_blocks",
        valid=_blocks,
        bad_fields={
            **_BAD_SIZES,
            "num_rows": (-1, _TOO_LARGE),
            "num_columns": (-1, _TOO_LARGE),
            "amax_min": (0.0, -1.0, 2.0**-101, float("inf"), float("nan")),
        },
        required=("x", "scales", "turned_scales"),
        aligned=("scales", "turned_scales"),
        fuzzed=_blocks_fuzzed,
        work=_blocks_work,
    ),
    Operator(
        name="dequantize_matrices",
        valid=_values,
        bad_fields={
            **_BAD_SIZES,
            "inner": (-1, _TOO_LARGE),
            "outer": (-1, _TOO_LARGE),
            "format": (-1, len(MATRIX_FORMATS)),
        },
        required=("codes", "scales", "out"),
        aligned=("scales",),
        fuzzed=_values_fuzzed,
        work=_values_work,
    ),
)
