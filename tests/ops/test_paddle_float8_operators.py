# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Direct calls of the operators behind Paddle's float8 functions: what they refuse, whoever calls them."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_moe_ops.backends import compiled, register_operators

pytestmark = pytest.mark.compiled_only


def zeros(*shape: int, dtype: str = "bfloat16") -> paddle.Tensor:
    return paddle.zeros(shape, dtype)


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
}


@pytest.mark.parametrize(("operator", "arguments", "message"), CALLS.values(), ids=CALLS)
def test_bad_calls_are_refused(operator: str, arguments: Any, message: str) -> None:
    register_operators()
    with pytest.raises(ValueError, match=message):
        compiled._direct[operator](*arguments())
