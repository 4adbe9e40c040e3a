# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`paddle_quantize`, `paddle_swiglu` and its gradients: the float8 operators of ``paddle.incubate.nn.functional``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Float, Floats, Int, Params, Size, fields
from .base import TOO_MANY, TOO_WIDE, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small

_TOO_LARGE = 1 << 30
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BFLOAT16_MAX = float.fromhex("0x1.FEp127")


class PaddleQuantizeParams(Params):
    """pmo_paddle_quantize_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_columns"),
        (Bytes, "x codes scales transposed_codes transposed_scales"),
        (Int, "dtype codes_dtype blocks pow2 ue8m0 scales_by_column"),
        (Float, "epsilon overflow"),
        (Int, "num_threads reserved"),
    )


class PaddleSwigluParams(Params):
    """pmo_paddle_swiglu_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows width"),
        (Bytes, "x"),
        (Floats, "probs"),
        (Bytes, "codes"),
        (Floats, "scales"),
        (Int, "pow2 num_threads"),
    )


class PaddleSwigluBackwardParams(Params):
    """pmo_paddle_swiglu_backward_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows width"),
        (Bytes, "x d_out"),
        (Floats, "probs"),
        (Bytes, "d_x"),
        (Floats, "d_probs"),
        (Bytes, "out"),
        (Int, "num_threads reserved"),
    )


def quantize_params(
    output: MakeOutput,
    x: NDArray,
    *,
    forms: tuple[bool, bool] = (True, False),
    blocks: bool = False,
    pow2: bool = False,
    ue8m0: bool = False,
    by_column: bool = False,
    epsilon: float = 0.0,
    overflow: float = BFLOAT16_MAX,
    dtype: DTypeLike = E4M3,
    num_threads: int = 0,
) -> PaddleQuantizeParams:
    """Params of "paddle_quantize"; ``forms``: whether the codes of x, and those of its transpose, are wanted."""
    results = {}
    for wanted, prefix, (rows, columns) in zip(forms, ("", "transposed_"), (x.shape, x.shape[::-1]), strict=True):
        if not wanted:
            continue
        lines = -(-rows // 128) if blocks and not ue8m0 else rows
        words = -(-columns // (512 if ue8m0 else 128))
        results[f"{prefix}codes"] = output((rows, columns), dtype)
        results[f"{prefix}scales"] = output((words, lines) if by_column else (lines, words), np.float32)
    return PaddleQuantizeParams(
        num_rows=x.shape[0],
        num_columns=x.shape[1],
        x=x,
        dtype=DTYPES[x.dtype],
        codes_dtype=DTYPES[np.dtype(dtype)],
        blocks=blocks,
        pow2=pow2 or ue8m0,
        ue8m0=ue8m0,
        scales_by_column=by_column,
        epsilon=epsilon,
        overflow=overflow,
        num_threads=num_threads,
        **results,
    )


def quantize(core: Core, x: NDArray, *, ue8m0: bool = False, **options: Any) -> tuple[NDArray, ...]:
    """Codes and scales of x, then those of its transpose, of the forms that are wanted."""
    with guarded_outputs() as output:
        params = quantize_params(output, x, ue8m0=ue8m0, **options)
        core.run("paddle_quantize", params)
    found = [array for name, array in params.arrays.items() if name != "x"]
    return tuple(array.view(np.int32) if ue8m0 and array.dtype == np.float32 else array for array in found)


def swiglu_params(
    output: MakeOutput, x: NDArray, probs: NDArray | None, *, pow2: bool = False, num_threads: int = 0
) -> PaddleSwigluParams:
    rows, width = x.shape[0], x.shape[1] // 2
    results = {"codes": output((rows, width), E4M3), "scales": output((rows, -(-width // 128)), np.float32)}
    return PaddleSwigluParams(
        num_rows=rows, width=width, x=x, probs=probs, pow2=pow2, num_threads=num_threads, **results
    )


def swiglu(core: Core, x: NDArray, probs: NDArray | None, **options: Any) -> tuple[NDArray, NDArray]:
    with guarded_outputs() as output:
        params = swiglu_params(output, x, probs, **options)
        core.run("paddle_swiglu", params)
    return params.arrays["codes"], params.arrays["scales"]


def swiglu_backward_params(
    output: MakeOutput, x: NDArray, d_out: NDArray, probs: NDArray, num_threads: int = 0
) -> PaddleSwigluBackwardParams:
    results = {"d_x": output(x.shape, BFLOAT16), "d_probs": output(len(x), np.float32)}
    results["out"] = output(d_out.shape, BFLOAT16)
    sizes = {"num_rows": len(x), "width": d_out.shape[1], "num_threads": num_threads}
    return PaddleSwigluBackwardParams(x=x, d_out=d_out, probs=probs, **sizes, **results)


def swiglu_backward(
    core: Core, x: NDArray, d_out: NDArray, probs: NDArray, num_threads: int = 0
) -> tuple[NDArray, NDArray, NDArray]:
    """The gradients of x and of the probabilities, and the output."""
    with guarded_outputs() as output:
        params = swiglu_backward_params(output, x, d_out, probs, num_threads)
        core.run("paddle_swiglu_backward", params)
    return params.arrays["d_x"], params.arrays["d_probs"], params.arrays["out"]


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    return quantize_params(output, s.rows, forms=(True, True))


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    x = s.data(s.N, int(s.rng.choice([s.H, s.H * 16])))
    params = quantize_params(output, x, forms=(True, bool(s.below(2))))
    params.epsilon = float(s.rng.choice([0.0, 1e-4, 1e30]))
    choices = s.choices(dtype=3, blocks=2, pow2=2, scales_by_column=2, num_threads=4)
    for field, value in choices.items():
        setattr(params, field, value)
    params.codes_dtype = 3 + s.below(2)
    params.ue8m0 = params.pow2 * s.below(2)
    return params


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    return quantize(core, large.rows, forms=(True, True), num_threads=num_threads)


def _gated(s: Small | Draw, rows: NDArray) -> NDArray:
    return rows[:, : 2 * (rows.shape[1] // 2)].astype(BFLOAT16)


def _valid_swiglu(core: Core, output: MakeOutput, s: Small) -> Params:
    return swiglu_params(output, _gated(s, s.rows), np.ones(s.N, np.float32))


def _fuzzed_swiglu(core: Core, output: MakeOutput, s: Draw) -> Params:
    x = s.data(s.N, s.H).view(BFLOAT16)
    return swiglu_params(output, x, s.data(s.N, 1)[:, 0].copy(), pow2=bool(s.below(2)), num_threads=s.below(4))


def _work_swiglu(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    return swiglu(core, large.rows, large.weights, num_threads=num_threads)


def _valid_backward(core: Core, output: MakeOutput, s: Small) -> Params:
    x = _gated(s, s.rows)
    return swiglu_backward_params(output, x, x[:, ::2].copy(), np.ones(s.N, np.float32))


def _fuzzed_backward(core: Core, output: MakeOutput, s: Draw) -> Params:
    x, d_out = s.data(s.N, s.H).view(BFLOAT16), s.data(s.N, s.H).view(BFLOAT16)[:, : s.H].copy()
    return swiglu_backward_params(output, x, d_out, s.data(s.N, 1)[:, 0].copy(), s.below(4))


def _work_backward(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    d_out = np.ascontiguousarray(large.rows[:, ::2])
    return swiglu_backward(core, large.rows, d_out, large.weights, num_threads=num_threads)


_ROWS = {"num_rows": (-1, TOO_MANY), "width": (-1, TOO_WIDE)}
_GRADIENTS = ("x", "d_out", "probs", "d_x", "d_probs", "out")
_NAN, _INFINITY = float("nan"), float("inf")

OPERATORS = (
    Operator(
        name="paddle_quantize",
        valid=_valid,
        bad_fields={
            "num_rows": (-1, _TOO_LARGE),
            "num_columns": (-1, _TOO_LARGE),
            "dtype": (-1, 3, 5),
            "codes_dtype": (2, 5),
            "epsilon": (-1.0, _INFINITY, _NAN),
            "overflow": (0.5, _INFINITY, _NAN),
        },
        required=("x", "scales", "transposed_scales"),
        aligned=("scales", "transposed_scales"),
        fuzzed=_fuzzed,
        work=_work,
    ),
    Operator(
        name="paddle_swiglu",
        valid=_valid_swiglu,
        bad_fields=_ROWS,
        required=("x", "codes", "scales"),
        aligned=("probs", "scales"),
        fuzzed=_fuzzed_swiglu,
        work=_work_swiglu,
    ),
    Operator(
        name="paddle_swiglu_backward",
        valid=_valid_backward,
        bad_fields=_ROWS,
        required=_GRADIENTS,
        aligned=("probs", "d_probs"),
        fuzzed=_fuzzed_backward,
        work=_work_backward,
    ),
)
