# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Direct calls of operators for dygraph alone refuse bad arguments: float8 operators, and sums in place."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_moe_ops.backends import compiled, register_operators

pytestmark = pytest.mark.compiled_only


def zeros(*shape: int, dtype: str = "bfloat16") -> paddle.Tensor:
    return paddle.zeros(shape, dtype)


def tokens(*numbers: int, dtype: str = "int64") -> paddle.Tensor:
    return paddle.to_tensor(numbers, dtype)


def gemm(**changes: paddle.Tensor) -> list[paddle.Tensor]:
    """Arguments of the GEMM of codes [3, 256] and [130, 256]."""
    codes, scales = "float8_e4m3fn", "float32"
    good = {
        "a": paddle.ones([3, 256]).astype(codes),
        "a_decode_scale": zeros(3, 2, dtype=scales),
        "b": paddle.ones([130, 256]).astype(codes),
        "b_decode_scale": zeros(2, 2, dtype=scales),
        "sizes": tokens(3),
    }
    return list({**good, **changes}.values())


SQUARE, WIDE, PROBS = (128, 128), (3, 256), (3,)
CALLS = {
    "a stack of vectors": ("paddle_quantize_stack", lambda: ([zeros(128)], False), r"x\[0\] must be"),
    "a stack of odd sizes": (
        "paddle_quantize_stack",
        lambda: ([zeros(128, 130)], False),
        "sizes must be multiples of 128",
    ),
    "a stack of two shapes": (
        "paddle_quantize_stack",
        lambda: ([zeros(*SQUARE), zeros(128, 256)], True),
        "matrices must be alike",
    ),
    "a stack of two dtypes": (
        "paddle_quantize_stack",
        lambda: ([zeros(*SQUARE), zeros(*SQUARE, dtype="float32")], False),
        "matrices must be alike",
    ),
    **{
        f"counts {counts}": (
            "paddle_quantize_split",
            lambda counts=counts: (zeros(*WIDE), counts, False),
            "counts must add up to the rows",
        )
        for counts in ([1, 1], [4], [-1, 4], [])
    },
    "an odd number of columns": (
        "paddle_swiglu",
        lambda: (zeros(3, 255), None, False),
        "rows must have an even number of columns",
    ),
    "a gradient of another width": (
        "paddle_swiglu_backward",
        lambda: (zeros(*WIDE), zeros(3, 64), zeros(*PROBS, dtype="float32")),
        "do2_s must be",
    ),
    "codes of bfloat16": ("paddle_float8_gemm", lambda: gemm(a=zeros(3, 256)), "a must be float8_e4m3fn"),
    "codes of another depth": (
        "paddle_float8_gemm",
        lambda: gemm(b=paddle.ones([130, 128]).astype("float8_e4m3fn")),
        r"b must be of shape \[any, 256\]",
    ),
    "scales of rows by group": (
        "paddle_float8_gemm",
        lambda: gemm(a_decode_scale=zeros(2, 3, dtype="float32")),
        r"a_decode_scale must be of shape \[3, 2\]",
    ),
    "scales of blocks in bfloat16": (
        "paddle_float8_gemm",
        lambda: gemm(b_decode_scale=zeros(2, 2)),
        "b_decode_scale must be float32",
    ),
    "two sizes": ("paddle_float8_gemm", lambda: gemm(sizes=tokens(1, 2)), r"sizes must be of shape \[1\]"),
    "rows of rank 1": (
        "index_add",
        lambda: ([zeros(4, 8)], zeros(8), tokens(0), 4),
        "x_unzipped must be of shape",
    ),
    "an index of rank 2": (
        "index_add",
        lambda: ([zeros(4, 8)], zeros(2, 8), zeros(2, 1, dtype="int64"), 4),
        "idx_unzipped must be of shape",
    ),
    "an index of floats": (
        "index_add",
        lambda: ([zeros(4, 8)], zeros(2, 8), zeros(2, dtype="float32"), 4),
        "idx_unzipped must be int32 or int64",
    ),
    "fewer rows than tokens": (
        "index_add",
        lambda: ([zeros(4, 8)], zeros(1, 8), tokens(0, 1), 4),
        "x_unzipped must have a row for each token",
    ),
    "parts of no tokens": (
        "index_add",
        lambda: ([zeros(4, 8)], zeros(1, 8), tokens(0), -1),
        r"the tokens of a tensor must be in \[0, 2\^31\)",
    ),
    "tokens of another width": (
        "index_add",
        lambda: ([zeros(4, 9)], zeros(1, 8), tokens(0), 4),
        r"x_zipped must be of shape \[any, 8\]",
    ),
    "more tokens than a part": (
        "index_add",
        lambda: ([zeros(4, 8)], zeros(1, 8), tokens(0), 3),
        "x_zipped must have at most the tokens of a tensor",
    ),
    "tokens by column": (
        "index_add",
        lambda: ([zeros(8, 4).T], zeros(1, 8), tokens(0), 4),
        "x_zipped must be contiguous",
    ),
    "tokens in float16": (
        "index_add",
        lambda: ([zeros(4, 8, dtype="float16")], zeros(1, 8), tokens(0), 4),
        "dtype must be PMO_FLOAT32 or PMO_BFLOAT16",
    ),
    "wider rows than tokens": (
        "index_add",
        lambda: ([zeros(4, 8)], zeros(1, 8, dtype="float32"), tokens(0), 4),
        "rows_dtype must be dtype or PMO_BFLOAT16",
    ),
}


@pytest.mark.parametrize(("operator", "arguments", "message"), CALLS.values(), ids=CALLS)
def test_bad_calls_are_refused(operator: str, arguments: Any, message: str) -> None:
    register_operators()
    with pytest.raises(ValueError, match=message):
        compiled._direct[operator](*arguments())
