# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 functions by the names of paddle.incubate with bad arguments: the exact error."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import _checks
from paddle_moe_ops.compat import fp8
from tests.ops.problems import tensor

BFLOAT16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def zeros(*shape, dtype=BFLOAT16):
    """A tensor, which is made on the device of the test."""
    return lambda place: tensor(np.zeros(shape, dtype), place)


def float32(*shape):
    return zeros(*shape, dtype=np.float32)


def stacked(*matrices):
    return lambda place: [each(place) for each in matrices]


GOOD = {
    "fp8_quant_blockwise": {"x": zeros(128, 128)},
    "fused_stack_transpose_quant": {"x": stacked(zeros(128, 256))},
    "fused_stack_quant": {"x": stacked(zeros(128, 256))},
    "fused_transpose_split_quant": {"x": zeros(256, 8), "input_scales": None, "tokens_per_expert": [128, 128]},
    "fused_transpose_wlch_split_quant": {"x": zeros(2, 1, 64, 8), "tokens_per_expert": [128]},
    "fused_act_dequant": {"x": zeros(3, 200, dtype=E4M3), "x_scale": float32(3, 2)},
    "fused_weighted_swiglu_act_quant": {"x": zeros(3, 8), "prob": float32(3)},
    "fused_swiglu_weighted_bwd": {"o1": zeros(3, 8), "do2_s": zeros(3, 4), "unzipped_probs": float32(3, 1)},
    "fp8_gemm_blockwise": {
        "a": zeros(3, 256, dtype=E4M3),
        "a_decode_scale": float32(2, 3),
        "b": zeros(5, 256, dtype=E4M3),
        "b_decode_scale": float32(2, 5),
        "out_dtype": "bfloat16",
    },
}
MULTIPLES = "of sizes that are multiples of 128"
SUM = "counts that add up to the 256 rows of x"
FLAGS = {
    "fp8_quant_blockwise": (
        "input_transpose",
        "output_scale_transpose",
        "return_transpose_only",
        "using_pow2_scale",
        "using_ue8m0_scale",
    ),
    "fused_stack_transpose_quant": ("transpose",),
    "fused_transpose_split_quant": ("pow_2_scales",),
    "fused_transpose_wlch_split_quant": ("pow_2_scales",),
    "fused_weighted_swiglu_act_quant": ("using_pow2_scaling",),
    "fp8_gemm_blockwise": ("accumulate", "use_split_accumulator", "is_a_1d_scaled", "is_b_1d_scaled"),
}
BAD = {
    "fp8_quant_blockwise": [
        ({"x": None}, TypeError, "x must be a paddle.Tensor, but got NoneType"),
        ({"x": float32(8, 8)}, TypeError, "x must be of dtype bfloat16 or float16, but got float32"),
        ({"x": zeros(8)}, ValueError, "x must be of shape [num_rows, columns], but got [8]"),
        (
            {"x": zeros(8, 6)},
            ValueError,
            "x must be of shape [num_rows, columns] with columns % 4 == 0, but got [8, 6]",
        ),
        (
            {"x": zeros(128, 132), "input_transpose": True},
            ValueError,
            f"x must be {MULTIPLES} with input_transpose, but got [128, 132]",
        ),
        (
            {"x": zeros(8, 128), "quant_method": "128x128"},
            ValueError,
            f"x must be {MULTIPLES} with quant_method='128x128', but got [8, 128]",
        ),
        (
            {"x": zeros(8, 128), "return_transpose_only": True},
            ValueError,
            f"x must be {MULTIPLES} with return_transpose_only, but got [8, 128]",
        ),
        ({"quant_method": "1x64"}, ValueError, "quant_method must be one of '1x128', '128x128', but got '1x64'"),
        ({"output_type": "e5m2"}, ValueError, "output_type must be one of 'e4m3', but got 'e5m2'"),
        ({"epsilon": "0"}, TypeError, "epsilon must be a number, but got str"),
        ({"epsilon": float("nan")}, ValueError, "epsilon must be finite, but got nan"),
    ],
    "fused_stack_transpose_quant": [
        ({"x": []}, ValueError, "x must be a list of at least one tensor, but got an empty list"),
        ({"x": zeros(128, 128)}, TypeError, "x must be a list of tensors, but got Tensor"),
        ({"x": stacked(float32(128, 128))}, TypeError, "x[0] must be of dtype bfloat16, but got float32"),
        (
            {"x": stacked(zeros(128, 128), zeros(128, 256))},
            ValueError,
            "x[1] must be of shape [128, 128], but got [128, 256]",
        ),
    ],
    "fused_stack_quant": [
        ({"x": stacked(zeros(64, 128))}, ValueError, f"x[0] must be {MULTIPLES}, but got [64, 128]"),
        ({"x": stacked(zeros(128, 64))}, ValueError, f"x[0] must be {MULTIPLES}, but got [128, 64]"),
    ],
    "fused_transpose_split_quant": [
        ({"x": float32(256, 8)}, TypeError, "x must be of dtype bfloat16 or float8_e4m3fn, but got float32"),
        ({"tokens_per_expert": [128, 64]}, ValueError, "tokens_per_expert[1] must be a multiple of 128, but got 64"),
        ({"tokens_per_expert": [-128]}, ValueError, "tokens_per_expert[0] must be from 0 to 2147483647, but got -128"),
        ({"tokens_per_expert": [128.5]}, TypeError, "tokens_per_expert[0] must be an int, but got float"),
        ({"tokens_per_expert": [128]}, ValueError, f"tokens_per_expert must be {SUM}, but got a sum of 128"),
        (
            {"tokens_per_expert": float32(2)},
            TypeError,
            "tokens_per_expert must be of dtype int32 or int64, but got float32",
        ),
        (
            {"tokens_per_expert": zeros(2, 1, dtype=np.int32)},
            ValueError,
            "tokens_per_expert must be of shape [num_experts], but got [2, 1]",
        ),
        (
            {"tokens_per_expert": 256},
            TypeError,
            "tokens_per_expert must be a list of ints, or a 1-D int array or tensor, but got int",
        ),
        (
            {"input_scales": float32(256, 1)},
            ValueError,
            "input_scales must be None with bfloat16 rows, but got a Tensor",
        ),
        (
            {"x": zeros(256, 200, dtype=E4M3)},
            ValueError,
            "input_scales must be float32 [256, 2] with float8 rows, but got None",
        ),
        (
            {"x": zeros(256, 200, dtype=E4M3), "input_scales": float32(2, 256)},
            ValueError,
            "input_scales must be of shape [256, 2], but got [2, 256]",
        ),
    ],
    "fused_transpose_wlch_split_quant": [
        (
            {"x": zeros(128, 8)},
            ValueError,
            "x must be of shape [ranks, experts, capacity, hidden], but got [128, 8]",
        ),
        (
            {"tokens_per_expert": [256]},
            ValueError,
            "tokens_per_expert must be counts that add up to the 128 rows of x, but got a sum of 256",
        ),
    ],
    "fused_act_dequant": [
        ({"x": zeros(3, 200)}, TypeError, "x must be of dtype float8_e4m3fn, but got bfloat16"),
        ({"x_scale": float32(3, 1)}, ValueError, "x_scale must be of shape [3, 2], but got [3, 1]"),
        ({"x_scale": zeros(3, 2, dtype=np.int32)}, ValueError, "x_scale must be of shape [3, 1], but got [3, 2]"),
        ({"x_scale": zeros(3, 2)}, TypeError, "x_scale must be of dtype float32 or int32, but got bfloat16"),
    ],
    "fused_weighted_swiglu_act_quant": [
        ({"x": float32(3, 8)}, TypeError, "x must be of dtype bfloat16, but got float32"),
        ({"x": zeros(3, 7)}, ValueError, "x must be of shape [..., 2 * I], but got [3, 7]"),
        ({"prob": float32(4)}, ValueError, "prob must be of shape [3], but got [4]"),
        ({"prob": float32(3, 2)}, ValueError, "prob must be of shape [3, 1], but got [3, 2]"),
        (
            {"prob": zeros(3)},
            TypeError,
            'prob must be of dtype float32, but got bfloat16; convert it with .astype("float32")',
        ),
    ],
    "fused_swiglu_weighted_bwd": [
        ({"o1": zeros(3, 7)}, ValueError, "o1 must be of shape [..., 2 * I], but got [3, 7]"),
        ({"do2_s": zeros(3, 8)}, ValueError, "do2_s must be of shape [3, 4], but got [3, 8]"),
        ({"unzipped_probs": float32(4)}, ValueError, "unzipped_probs must be of shape [3], but got [4]"),
        ({"unzipped_probs": float32(3, 2)}, ValueError, "unzipped_probs must be of shape [3, 1], but got [3, 2]"),
    ],
    "fp8_gemm_blockwise": [
        ({"a": zeros(3, 256)}, TypeError, "a must be of dtype float8_e4m3fn or float8_e5m2, but got bfloat16"),
        ({"b": zeros(5, 128, dtype=E4M3)}, ValueError, "b must be of shape [N, 256], but got [5, 128]"),
        ({"a_decode_scale": float32(3, 2)}, ValueError, "a_decode_scale must be of shape [2, 3], but got [3, 2]"),
        (
            {"is_b_1d_scaled": False},
            ValueError,
            "b_decode_scale must be of shape [1, 2], but got [2, 5]",
        ),
        (
            {"is_a_1d_scaled": False, "is_b_1d_scaled": False},
            ValueError,
            "is_b_1d_scaled must be True without is_a_1d_scaled, but got False",
        ),
        ({"bias": zeros(5)}, ValueError, "bias must be None, but got a Tensor"),
        ({"accumulate": True}, ValueError, "out must be a tensor with accumulate, but got None"),
        ({"out": zeros(5, 3)}, ValueError, "out must be of shape [3, 5], but got [5, 3]"),
        (
            {"out": zeros(3, 5, dtype=np.float16)},
            TypeError,
            "out must be of dtype bfloat16 or float32, but got float16",
        ),
        (
            {"out": lambda place: zeros(5, 3)(place).T},
            ValueError,
            "out must be contiguous, but got a tensor that is not",
        ),
        (
            {"out_dtype": "float16"},
            TypeError,
            "out_dtype must be one of bfloat16, float32, as a paddle dtype or its name, but got 'float16'",
        ),
    ],
}
CASES = [(function, *case) for function, cases in BAD.items() for case in cases]
CASES += [
    (function, {flag: 1}, TypeError, f"{flag} must be a bool, but got 1 of type int")
    for function, flags in FLAGS.items()
    for flag in flags
]


def arguments(function, changes, place):
    given = {**GOOD[function], **changes}
    return {name: value(place) if callable(value) else value for name, value in given.items()}


def call(function, changes, place):
    return getattr(fp8, function)(**arguments(function, changes, place))


@pytest.mark.parametrize("function", GOOD)
def test_the_call_that_is_changed_is_good(function, place):
    assert call(function, {}, place) is not None


@pytest.mark.parametrize(
    ("function", "changes", "error", "message"), CASES, ids=[f"{case[0]}-{case[3][:40]}" for case in CASES]
)
def test_bad_arguments(function, changes, error, message, place):
    with pytest.raises(error) as raised:
        call(function, changes, place)
    assert str(raised.value) == f"{function}: {message}"
    assert raised.type is error


@pytest.mark.parametrize("function", GOOD)
def test_the_devices_of_all_tensors_are_compared(function, place, monkeypatch):
    seen: list[int] = []

    def record(_, **tensors):
        seen.extend(each.data_ptr() for each in tensors.values() if each is not None)

    monkeypatch.setattr(_checks, "same_place", record)
    changes = {
        "fused_stack_transpose_quant": {"x": stacked(zeros(128, 128), zeros(128, 128))},
        "fused_transpose_split_quant": {"x": zeros(256, 8, dtype=E4M3), "input_scales": float32(256, 1)},
        "fp8_gemm_blockwise": {"out": zeros(3, 5)},
    }
    given = arguments(function, changes.get(function, {}), place)
    getattr(fp8, function)(**given)
    tensors = [each for value in given.values() for each in (value if isinstance(value, list) else [value])]
    places = [each.data_ptr() for each in tensors if isinstance(each, paddle.Tensor)]
    assert len(places) == 1 or set(seen) == set(places)


@pytest.mark.parametrize("function", [name for name in GOOD if not name.startswith("fused_stack")], ids=str)
def test_values_of_static_graphs_are_refused(function, place):
    name = next(iter(GOOD[function]))
    expected = (
        f"^{function}: {name} must be a paddle.Tensor, but got a value of a static graph, which is not supported$"
    )
    given = arguments(function, {}, place)
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            value = paddle.static.data("value", given[name].shape, given[name].dtype)
            with pytest.raises(TypeError, match=expected):
                getattr(fp8, function)(**{**given, name: value})
    finally:
        paddle.disable_static()
