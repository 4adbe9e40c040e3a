# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every kind of bad call with the exact error it gets: `BAD_ARGUMENTS` and `BAD_DATA`.

A call is a good one (`good_call`) with some arguments replaced. Tensors are made when the test runs: a value that is
a function takes the place to make them at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from paddle_moe_ops import dequantize_1x128, reference
from tests.ops.problems import plan_tensors, tensor

T, H, E, K, A, N = 4, 6, 3, 2, 2, 6
IDS = np.array([[0, 1], [1, -1], [2, 0], [-1, -1]], np.int32)
PROBS = np.array([[0.5, 0.5], [1, 0], [0.25, 0.75], [0, 0]], np.float32)
MASK = np.array([[1, 1, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0]], np.bool_)
PLAN = reference.route(IDS, PROBS, num_experts=E, padding_alignment=A)
NAN = np.where(np.arange(T * K).reshape(T, K) == 4, np.float32(np.nan), PROBS)


class BadCall(NamedTuple):
    """A bad call: the function, its fault, the arguments that cause it, and the expected error."""

    function: str
    fault: str
    changes: dict[str, Any]
    error: type[Exception]
    message: str

    def __str__(self) -> str:
        return f"{self.function}-{self.fault.replace(' ', '_')}"


def array(values: Any, dtype: Any = None) -> Callable[[Any], Any]:
    """A tensor with these values."""
    return lambda place: tensor(np.array(values, dtype), place)


def zeros(*shape: int, dtype: Any = np.float32) -> Callable[[Any], Any]:
    """A tensor of this shape."""
    return lambda place: tensor(np.zeros(shape, dtype), place)


def good_call(function: str) -> dict[str, Any]:
    """Arguments that the function takes."""
    plan = lambda place: plan_tensors(PLAN, place)  # noqa: E731
    return {
        "moe_permute": {
            "hidden_states": zeros(T, H),
            "scale": None,
            "expert_routemap_topk": array(IDS),
            "expert_prob_topk": array(PROBS),
            "num_experts": E,
            "tokens_per_expert": None,
            "padding_alignment": A,
        },
        "moe_unpermute": {
            "hidden_states_unzipped": zeros(N, H),
            "zipped_expertwise_rowmap": array(reference.plan_to_rowmap(PLAN)),
            "expert_routemap_topk": array(IDS),
            "token_prob_unzipped": zeros(N),
            "total_zipped_tokens": T,
            "num_experts": E,
        },
        "route": {"routing": array(IDS), "probs": array(PROBS), "num_experts": E, "padding_alignment": A},
        "permute": {"x": zeros(T, H), "plan": plan},
        "unpermute": {"y": zeros(N, H), "plan": plan},
        "quantize_1x128": {"x": zeros(T, H)},
        "dequantize_1x128": {"codes": zeros(N, H, dtype=ml_dtypes.float8_e4m3fn), "scales": zeros(N, 1)},
        "quantized_experts": {
            "x": zeros(T, H),
            "plan": plan,
            "expert_fn": lambda place: dequantize_1x128,
            "expert_vjp": lambda place: dequantize_1x128,
        },
    }[function]


def _type(function: str, fault: str, changes: dict[str, Any], text: str) -> BadCall:
    return BadCall(function, fault, changes, TypeError, f"{function}: {text}")


def _value(function: str, fault: str, changes: dict[str, Any], text: str) -> BadCall:
    return BadCall(function, fault, changes, ValueError, f"{function}: {text}")


ROWS = "bfloat16, float16, float32, float8_e4m3fn or float8_e5m2"
SUMS = "bfloat16, float16 or float32"
CODES = "float8_e4m3fn; codes need their scales: dequantize_1x128 for rows, QuantizedMatrices for matrices of moe_mlp"
FORMS = "a list of ints or of int tensors with one element, a 1-D int array or tensor, or None"
AMAX = "from 2^-100 to 3.40282347e+38"
FILLS = "one of 'all', 'meta', 'none'"

MOE_PERMUTE = [
    _type("moe_permute", "array for tensor", {"hidden_states": np.zeros((T, H), np.float32)},
          "hidden_states must be a paddle.Tensor, but got ndarray"),
    _type("moe_permute", "list for tensor", {"expert_routemap_topk": IDS.tolist()},
          "expert_routemap_topk must be a paddle.Tensor, but got list"),
    _type("moe_permute", "no probabilities", {"expert_prob_topk": None},
          "expert_prob_topk must be a paddle.Tensor, but got NoneType"),
    _type("moe_permute", "rows of int32", {"hidden_states": zeros(T, H, dtype=np.int32)},
          f"hidden_states must be of dtype {ROWS}, but got int32"),
    _type("moe_permute", "rows of float64", {"hidden_states": zeros(T, H, dtype=np.float64)},
          f"hidden_states must be of dtype {ROWS}, but got float64"),
    _value("moe_permute", "rows of rank 1", {"hidden_states": zeros(T)},
           "hidden_states must be of shape [num_tokens, hidden], but got [4]"),
    _value("moe_permute", "rows of rank 3", {"hidden_states": zeros(2, 2, H)},
           "hidden_states must be of shape [num_tokens, hidden], but got [2, 2, 6]"),
    _value("moe_permute", "no hidden columns", {"hidden_states": zeros(T, 0)},
           "hidden_states must be of shape [num_tokens, hidden] with hidden >= 1, but got [4, 0]"),
    _type("moe_permute", "ids of int16", {"expert_routemap_topk": zeros(T, K, dtype=np.int16)},
          "expert_routemap_topk must be of dtype int32 or int64, but got int16"),
    _type("moe_permute", "mask for ids", {"expert_routemap_topk": array(MASK)},
          "expert_routemap_topk must be of dtype int32 or int64, but got bool"),
    _value("moe_permute", "ids of another token count", {"expert_routemap_topk": zeros(5, K, dtype=np.int32)},
           "expert_routemap_topk must be of shape [4, topk], but got [5, 2]"),
    _value("moe_permute", "ids of rank 1", {"expert_routemap_topk": zeros(T, dtype=np.int32)},
           "expert_routemap_topk must be of shape [4, topk], but got [4]"),
    _value("moe_permute", "no slots", {"expert_routemap_topk": zeros(T, 0, dtype=np.int32)},
           "expert_routemap_topk must be of shape [4, topk] with topk >= 1, but got [4, 0]"),
    _type("moe_permute", "probabilities of float16", {"expert_prob_topk": zeros(T, K, dtype=np.float16)},
          'expert_prob_topk must be of dtype float32, but got float16; convert it with .astype("float32")'),
    _value("moe_permute", "probabilities of another shape", {"expert_prob_topk": zeros(T, 3)},
           "expert_prob_topk must be of shape [4, 2], but got [4, 3]"),
    _type("moe_permute", "int32 scale without ue8m0", {"scale": zeros(T, 1, dtype=np.int32)},
          "scale must be of dtype float32, but got int32"),
    _type("moe_permute", "float32 scale with ue8m0", {"scale": zeros(T, 1), "using_ue8m0_scale": True},
          "scale must be of dtype int32, but got float32"),
    _value("moe_permute", "scale of another token count", {"scale": zeros(T + 1, 1)},
           "scale must be of shape [4, num_scales], but got [5, 1]"),
    _value("moe_permute", "scale of rank 1", {"scale": zeros(T)},
           "scale must be of shape [4, num_scales], but got [4]"),
    _value("moe_permute", "no experts", {"num_experts": 0}, "num_experts must be from 1 to 65536, but got 0"),
    _value("moe_permute", "too many experts", {"num_experts": 65537},
           "num_experts must be from 1 to 65536, but got 65537"),
    _type("moe_permute", "float for num_experts", {"num_experts": 3.0}, "num_experts must be an int, but got float"),
    _type("moe_permute", "bool for num_experts", {"num_experts": True}, "num_experts must be an int, but got a bool"),
    _value("moe_permute", "alignment 0", {"padding_alignment": 0},
           "padding_alignment must be from 1 to 2147483647, but got 0"),
    _value("moe_permute", "alignment negative", {"padding_alignment": -16},
           "padding_alignment must be from 1 to 2147483647, but got -16"),
    _value("moe_permute", "alignment too large", {"padding_alignment": 2**31},
           "padding_alignment must be from 1 to 2147483647, but got 2147483648"),
    _type("moe_permute", "None for alignment", {"padding_alignment": None},
          "padding_alignment must be an int, but got NoneType"),
    _value("moe_permute", "buffer of -2 rows", {"override_buffer_size": -2},
           "override_buffer_size must be from -1 to 2147483647, but got -2"),
    _type("moe_permute", "bool for buffer", {"override_buffer_size": True},
          "override_buffer_size must be an int, but got a bool"),
    _value("moe_permute", "counts empty without a buffer", {"tokens_per_expert": []},
           "tokens_per_expert must be of length num_experts=3 (or None: counted), but got length 0"),
    _value("moe_permute", "counts too short", {"tokens_per_expert": [2, 2]},
           "tokens_per_expert must be of length num_experts=3 (or None: counted), but got length 2"),
    _value("moe_permute", "counts too long", {"tokens_per_expert": [2, 2, 1, 0]},
           "tokens_per_expert must be of length num_experts=3 (or None: counted), but got length 4"),
    _value("moe_permute", "count negative", {"tokens_per_expert": [2, -2, 1]},
           "tokens_per_expert[1] must be from 0 to 2147483647, but got -2"),
    _type("moe_permute", "count of float", {"tokens_per_expert": [2, 2, 1.0]},
          "tokens_per_expert[2] must be an int, but got float"),
    _type("moe_permute", "count of bool", {"tokens_per_expert": [True, 2, 1]},
          "tokens_per_expert[0] must be an int, but got a bool"),
    _type("moe_permute", "counts of float32", {"tokens_per_expert": zeros(E)},
          "tokens_per_expert must be of dtype int32 or int64, but got float32"),
    _value("moe_permute", "count tensor too long", {"tokens_per_expert": zeros(E + 1, dtype=np.int32)},
           "tokens_per_expert must be of shape [3], but got [4]"),
    _value("moe_permute", "count tensor of rank 2", {"tokens_per_expert": zeros(E, 1, dtype=np.int32)},
           "tokens_per_expert must be of shape [3], but got [3, 1]"),
    _value("moe_permute", "count of two elements",
           {"tokens_per_expert": lambda place: [2, tensor(np.zeros(2, np.int64), place), 1]},
           "tokens_per_expert[1] must be of shape [1], but got [2]"),
    _type("moe_permute", "text for counts", {"tokens_per_expert": "2,2,1"},
          f"tokens_per_expert must be {FORMS}, but got str"),
    _type("moe_permute", "array of floats for counts", {"tokens_per_expert": np.array([2.0, 2, 1])},
          f"tokens_per_expert must be {FORMS}, but got an array of float64 [3]"),
    _type("moe_permute", "array of rank 2 for counts", {"tokens_per_expert": np.array([[2, 2, 1]])},
          f"tokens_per_expert must be {FORMS}, but got an array of int64 [1, 3]"),
    _value("moe_permute", "array of counts too short", {"tokens_per_expert": np.array([2, 2], np.int32)},
           "tokens_per_expert must be of length num_experts=3 (or None: counted), but got length 2"),
    _type("moe_permute", "int for do_gather", {"do_gather": 1}, "do_gather must be a bool, but got 1 of type int"),
    _type("moe_permute", "None for using_ue8m0_scale", {"using_ue8m0_scale": None},
          "using_ue8m0_scale must be a bool, but got None of type NoneType"),
    _type("moe_permute", "text for return_expert_indices", {"return_expert_indices": "no"},
          "return_expert_indices must be a bool, but got 'no' of type str"),
    _type("moe_permute", "int for return_overflow", {"return_overflow": 0},
          "return_overflow must be a bool, but got 0 of type int"),
    _value("moe_permute", "unknown fill_padding", {"fill_padding": "zeros"},
           f"fill_padding must be {FILLS}, but got 'zeros'"),
    _value("moe_permute", "None for fill_padding", {"fill_padding": None},
           f"fill_padding must be {FILLS}, but got None"),
    _type("moe_permute", "int for validate", {"validate": 1},
          "validate must be True, False or None, but got 1 of type int"),
]  # fmt: skip

MOE_UNPERMUTE = [
    _type("moe_unpermute", "array for tensor", {"zipped_expertwise_rowmap": np.zeros((T, E), np.int32)},
          "zipped_expertwise_rowmap must be a paddle.Tensor, but got ndarray"),
    _type("moe_unpermute", "float8 rows", {"hidden_states_unzipped": zeros(N, H, dtype=ml_dtypes.float8_e4m3fn)},
          f"hidden_states_unzipped must be of dtype {SUMS}, but got {CODES}"),
    _value("moe_unpermute", "rows of rank 1", {"hidden_states_unzipped": zeros(N)},
           "hidden_states_unzipped must be of shape [num_rows, hidden], but got [6]"),
    _value("moe_unpermute", "no hidden columns", {"hidden_states_unzipped": zeros(N, 0)},
           "hidden_states_unzipped must be of shape [num_rows, hidden] with hidden >= 1, but got [6, 0]"),
    _type("moe_unpermute", "row map of int64", {"zipped_expertwise_rowmap": zeros(T, E, dtype=np.int64)},
          "zipped_expertwise_rowmap must be of dtype int32, but got int64"),
    _value("moe_unpermute", "row map of another expert count", {"num_experts": E + 1},
           "zipped_expertwise_rowmap must be of shape [4, 4], but got [4, 3]"),
    _value("moe_unpermute", "row map of another token count", {"total_zipped_tokens": T + 1},
           "zipped_expertwise_rowmap must be of shape [5, 3], but got [4, 3]"),
    _value("moe_unpermute", "ids of another token count", {"expert_routemap_topk": zeros(T - 1, K, dtype=np.int32)},
           "expert_routemap_topk must be of shape [4, topk], but got [3, 2]"),
    _value("moe_unpermute", "no slots", {"expert_routemap_topk": zeros(T, 0, dtype=np.int32)},
           "expert_routemap_topk must be of shape [4, topk] with topk >= 1, but got [4, 0]"),
    _type("moe_unpermute", "ids of float32", {"expert_routemap_topk": zeros(T, K)},
          "expert_routemap_topk must be of dtype int32 or int64, but got float32"),
    _type("moe_unpermute", "probabilities of bfloat16",
          {"token_prob_unzipped": zeros(N, dtype=ml_dtypes.bfloat16)},
          'token_prob_unzipped must be of dtype float32, but got bfloat16; convert it with .astype("float32")'),
    _value("moe_unpermute", "probabilities of another row count", {"token_prob_unzipped": zeros(N + 1)},
           "token_prob_unzipped must be of shape [6] or [6, 1], one for each row, but got [7]"),
    _value("moe_unpermute", "probabilities of two columns", {"token_prob_unzipped": zeros(N, 2)},
           "token_prob_unzipped must be of shape [6] or [6, 1], one for each row, but got [6, 2]"),
    _value("moe_unpermute", "probabilities per slot", {"token_prob_unzipped": zeros(T, K)},
           "token_prob_unzipped must be of shape [6] or [6, 1], one for each row, but got [4, 2]"),
    _value("moe_unpermute", "tokens negative", {"total_zipped_tokens": -1},
           "total_zipped_tokens must be from 0 to 2147483647, but got -1"),
    _type("moe_unpermute", "float for tokens", {"total_zipped_tokens": 4.0},
          "total_zipped_tokens must be an int, but got float"),
    _type("moe_unpermute", "float tensor for tokens", {"total_zipped_tokens": array(4.0, np.float32)},
          "total_zipped_tokens must be of dtype int32 or int64, but got float32"),
    _value("moe_unpermute", "tensor of rank 1 for tokens", {"total_zipped_tokens": array([4], np.int32)},
           "total_zipped_tokens must be of shape [], but got [1]"),
    _value("moe_unpermute", "no experts", {"num_experts": 0}, "num_experts must be from 1 to 65536, but got 0"),
    _type("moe_unpermute", "int for using_mix_precision", {"using_mix_precision": 1},
          "using_mix_precision must be a bool, but got 1 of type int"),
    _type("moe_unpermute", "text for using_weighted_combine", {"using_weighted_combine": "yes"},
          "using_weighted_combine must be a bool, but got 'yes' of type str"),
    _value("moe_unpermute", "unknown compat", {"compat": "torch"},
           "compat must be one of None, 'paddle', but got 'torch'"),
    _type("moe_unpermute", "text for validate", {"validate": "True"},
          "validate must be True, False or None, but got 'True' of type str"),
]  # fmt: skip

ROUTE = [
    _type("route", "array for tensor", {"routing": IDS}, "routing must be a paddle.Tensor, but got ndarray"),
    _type("route", "ids of uint8", {"routing": zeros(T, K, dtype=np.uint8)},
          "routing must be of dtype int32, int64 or bool, but got uint8"),
    _value("route", "ids of rank 1", {"routing": zeros(T, dtype=np.int32)},
           "routing must be of shape [num_tokens, topk or num_experts], but got [4]"),
    _value("route", "no slots", {"routing": zeros(T, 0, dtype=np.int32), "probs": None},
           "routing must be of shape [num_tokens, topk] with topk >= 1, but got [4, 0]"),
    _value("route", "mask without experts", {"routing": zeros(T, 0, dtype=np.bool_), "num_experts": None},
           "routing must be of shape [num_tokens, num_experts] with num_experts >= 1, but got [4, 0]"),
    _value("route", "ids without num_experts", {"num_experts": None},
           "num_experts must be given with expert ids, by its name, but got None"),
    _value("route", "no experts", {"num_experts": 0}, "num_experts must be from 1 to 65536, but got 0"),
    _type("route", "text for num_experts", {"num_experts": "3"}, "num_experts must be an int, but got str"),
    _value("route", "num_experts other than the mask's", {"routing": array(MASK), "probs": None, "num_experts": 4},
           "num_experts must be 3, the columns of the mask, but got 4"),
    _value("route", "topk other than the ids'", {"topk": 3},
           "topk must be 2, the columns of the ids (or None), but got 3"),
    _value("route", "topk above the mask's experts", {"routing": array(MASK), "probs": None, "topk": 4},
           "topk must be at most num_experts=3, but got 4"),
    _value("route", "topk 0 of a mask", {"routing": array(MASK), "probs": None, "topk": 0},
           "topk must be from 1 to 2147483647, but got 0"),
    _type("route", "probabilities of float64", {"probs": zeros(T, K, dtype=np.float64)},
          "probs must be of dtype float32, but got float64"),
    _value("route", "probabilities of another shape", {"probs": zeros(T, E)},
           "probs must be of shape [4, 2], but got [4, 3]"),
    _value("route", "probabilities by slot for a mask", {"routing": array(MASK)},
           "probs must be of shape [4, 3], but got [4, 2]"),
    _value("route", "alignment 0", {"padding_alignment": 0},
           "padding_alignment must be from 1 to 2147483647, but got 0"),
    _value("route", "buffer of -2 rows", {"buffer_size": -2}, "buffer_size must be from -1 to 2147483647, but got -2"),
    _type("route", "float for buffer", {"buffer_size": 6.0}, "buffer_size must be an int, but got float"),
    _value("route", "unknown duplicates", {"duplicates": "last"},
           "duplicates must be one of 'first', 'each', but got 'last'"),
    _value("route", "counts too short", {"tokens_per_expert": [2, 2]},
           "tokens_per_expert must be of length num_experts=3 (or None: counted), but got length 2"),
    _type("route", "int for counts", {"tokens_per_expert": 5}, f"tokens_per_expert must be {FORMS}, but got int"),
    _type("route", "int for validate", {"validate": 0}, "validate must be True, False or None, but got 0 of type int"),
]  # fmt: skip

PERMUTE_AND_UNPERMUTE = [
    _type("permute", "array for tensor", {"x": np.zeros((T, H), np.float32)},
          "x must be a paddle.Tensor, but got ndarray"),
    _type("permute", "tuple for plan", {"plan": (1, 2, 3)}, "plan must be a paddle_moe_ops.Plan, but got tuple"),
    _type("permute", "oracle's plan", {"plan": lambda place: PLAN},
          "plan must be a paddle_moe_ops.Plan, but got Plan"),
    _type("permute", "rows of int8", {"x": zeros(T, H, dtype=np.int8)}, f"x must be of dtype {ROWS}, but got int8"),
    _value("permute", "another token count than the plan's", {"x": zeros(T + 1, H)},
           "x must be of shape [4, hidden], the tokens of plan, but got [5, 6]"),
    _value("permute", "no hidden columns", {"x": zeros(T, 0)},
           "x must be of shape [4, hidden] with hidden >= 1, but got [4, 0]"),
    _type("permute", "scale of float16", {"scale": zeros(T, 1, dtype=np.float16)},
          "scale must be of dtype float32, int32 or uint8, but got float16"),
    _value("permute", "scale of another token count", {"scale": zeros(N, 1)},
           "scale must be of shape [4, num_scales], but got [6, 1]"),
    _value("permute", "unknown fill_padding", {"fill_padding": "some"},
           f"fill_padding must be {FILLS}, but got 'some'"),
    _type("unpermute", "array for tensor", {"y": np.zeros((N, H), np.float32)},
          "y must be a paddle.Tensor, but got ndarray"),
    _type("unpermute", "None for plan", {"plan": None}, "plan must be a paddle_moe_ops.Plan, but got NoneType"),
    _type("unpermute", "float8 rows", {"y": zeros(N, H, dtype=ml_dtypes.float8_e5m2)},
          f"y must be of dtype {SUMS}, but got float8_e5m2"),
    _value("unpermute", "another row count than the plan's", {"y": zeros(T, H)},
           "y must be of shape [6, hidden], the rows of plan, but got [4, 6]"),
    _type("unpermute", "list for probabilities", {"probs": [1.0] * N},
          "probs must be a paddle.Tensor, but got list"),
    _type("unpermute", "probabilities of float16", {"probs": zeros(N, dtype=np.float16)},
          'probs must be of dtype float32, but got float16; convert it with .astype("float32")'),
    _value("unpermute", "probabilities of another row count", {"probs": zeros(N - 1)},
           "probs must be of shape [6] by row of plan, or [4, 2] by slot, but got [5]"),
    _value("unpermute", "probabilities of another slot count", {"probs": zeros(T, K + 1)},
           "probs must be of shape [6] by row of plan, or [4, 2] by slot, but got [4, 3]"),
    _value("unpermute", "probabilities of rank 3", {"probs": zeros(T, K, 1)},
           "probs must be of shape [6] by row of plan, or [4, 2] by slot, but got [4, 2, 1]"),
]  # fmt: skip

QUANTIZE = [
    _value("permute", "unknown quantize", {"quantize": "fp8"},
           "quantize must be one of None, 'fp8_1x128', 'fp8_1x128_ue8m0', but got 'fp8'"),
    _value("permute", "scale with quantize", {"quantize": "fp8_1x128", "scale": zeros(T, 1)},
           "scale must be None with quantize, which makes the scales, but got Tensor"),
    _type("permute", "float8 rows with quantize",
          {"quantize": "fp8_1x128", "x": zeros(T, H, dtype=ml_dtypes.float8_e4m3fn)},
          f"x must be of dtype {SUMS}, but got {CODES}"),
    _value("permute", "layout without quantize", {"scale_layout": "col"},
           "scale_layout must be 'row' without quantize, but got 'col'"),
    _value("permute", "unknown layout", {"quantize": "fp8_1x128", "scale_layout": "column"},
           "scale_layout must be one of 'row', 'col', but got 'column'"),
    _value("permute", "amax_min 0", {"quantize": "fp8_1x128", "amax_min": 0},
           f"amax_min must be {AMAX}, but got 0.0"),
    _type("quantize_1x128", "array for tensor", {"x": np.zeros((T, H), np.float32)},
          "x must be a paddle.Tensor, but got ndarray"),
    _type("quantize_1x128", "float8 rows", {"x": zeros(T, H, dtype=ml_dtypes.float8_e4m3fn)},
          f"x must be of dtype {SUMS}, but got {CODES}"),
    _value("quantize_1x128", "rows of rank 3", {"x": zeros(2, T, H)},
           "x must be of shape [num_tokens, hidden], but got [2, 4, 6]"),
    _value("quantize_1x128", "no hidden columns", {"x": zeros(T, 0)},
           "x must be of shape [num_tokens, hidden] with hidden >= 1, but got [4, 0]"),
    _type("quantize_1x128", "int for ue8m0", {"ue8m0": 1}, "ue8m0 must be a bool, but got 1 of type int"),
    _value("quantize_1x128", "None for layout", {"scale_layout": None},
           "scale_layout must be one of 'row', 'col', but got None"),
    _type("quantize_1x128", "text for amax_min", {"amax_min": "1"}, "amax_min must be a float, but got str"),
    _type("quantize_1x128", "bool for amax_min", {"amax_min": True}, "amax_min must be a float, but got bool"),
    _value("quantize_1x128", "amax_min too small", {"amax_min": 1e-31}, f"amax_min must be {AMAX}, but got 1e-31"),
    _value("quantize_1x128", "amax_min infinite", {"amax_min": float("inf")}, f"amax_min must be {AMAX}, but got inf"),
    _value("quantize_1x128", "amax_min NaN", {"amax_min": float("nan")}, f"amax_min must be {AMAX}, but got nan"),
    _type("dequantize_1x128", "codes of float8_e5m2", {"codes": zeros(N, H, dtype=ml_dtypes.float8_e5m2)},
          "codes must be of dtype float8_e4m3fn, but got float8_e5m2"),
    _type("dequantize_1x128", "scales of bfloat16", {"scales": zeros(N, 1, dtype=ml_dtypes.bfloat16)},
          "scales must be of dtype float32 or int32, but got bfloat16"),
    _value("dequantize_1x128", "scales of other groups", {"scales": zeros(N, 2)},
           "scales must be of shape [6, 1], but got [6, 2]"),
    _value("dequantize_1x128", "scales of the other layout", {"scale_layout": "col"},
           "scales must be of shape [1, 8], but got [6, 1]"),
    _type("dequantize_1x128", "dtype of float64", {"dtype": "float64"},
          "dtype must be one of bfloat16, float16, float32, as a paddle dtype or its name, but got 'float64'"),
    _type("quantized_experts", "tuple for plan", {"plan": (1, 2)}, "plan must be a paddle_moe_ops.Plan, but got tuple"),
    _value("quantized_experts", "another token count than the plan's", {"x": zeros(T + 1, H)},
           "x must be of shape [4, hidden], the tokens of plan, but got [5, 6]"),
    _type("quantized_experts", "None for expert_fn", {"expert_fn": None},
          "expert_fn must be a function, but got NoneType"),
    _type("quantized_experts", "tensor for expert_vjp", {"expert_vjp": zeros(1)},
          "expert_vjp must be a function, but got Tensor"),
    _value("quantized_experts", "no format", {"quantize": None},
           "quantize must be one of 'fp8_1x128', 'fp8_1x128_ue8m0', but got None"),
]  # fmt: skip

BAD_ARGUMENTS = [*MOE_PERMUTE, *MOE_UNPERMUTE, *ROUTE, *PERMUTE_AND_UNPERMUTE, *QUANTIZE]

# Checked where the data are, so the backend says it. "data" raise unless validate=False, and so do "order", which hold
# several faults, of which the first to be checked is reported. "counts" raise always, "overflow" with validate=True.
COUNTS = "must be [2, 2, 1], the rows routed to each expert, with or without the padding to a multiple of 2, but got"

BAD_DATA = {
    "data": [
        _value("moe_permute", "id too large",
               {"expert_routemap_topk": array([[0, 1], [1, 3], [2, 7], [-1, -1]], np.int32)},
               "expert_routemap_topk must hold expert ids in [-1, 3), but token 1, slot 1 holds 3"),
        _value("moe_permute", "id too small",
               {"expert_routemap_topk": array([[0, 1], [1, -1], [-2, 0], [5, 5]], np.int64)},
               "expert_routemap_topk must hold expert ids in [-1, 3), but token 2, slot 0 holds -2"),
        _value("moe_permute", "id beyond int32",
               {"expert_routemap_topk": array([[0, 1], [1, -1], [2, 0], [-1, 2**32 + 1]], np.int64)},
               "expert_routemap_topk must hold expert ids in [-1, 3), but token 3, slot 1 holds 4294967297"),
        _value("moe_permute", "repeated id",
               {"expert_routemap_topk": array([[0, 1], [1, 1], [2, 2], [-1, -1]], np.int32)},
               "expert_routemap_topk must name an expert at most once per token, "
               "but token 1 names expert 1 in slots 0 and 1"),
        _value("moe_permute", "NaN probability", {"expert_prob_topk": array(NAN)},
               "expert_prob_topk must not hold NaN, but token 2, slot 0 does"),
        _value("moe_unpermute", "id too large",
               {"expert_routemap_topk": array([[0, 1], [1, -1], [3, 0], [-1, -1]], np.int32)},
               "expert_routemap_topk must hold expert ids in [-1, 3), but token 2, slot 0 holds 3"),
        _value("moe_unpermute", "row too large",
               {"zipped_expertwise_rowmap": array([[0, 2, -1], [-1, 6, -1], [1, -1, 9], [-1, -1, -1]], np.int32)},
               "zipped_expertwise_rowmap must hold rows in [-1, 6), but token 1, expert 1 holds 6"),
        _value("moe_unpermute", "row too small",
               {"zipped_expertwise_rowmap": array([[0, 2, -1], [-1, 3, -1], [1, -1, 4], [-1, -1, -7]], np.int32)},
               "zipped_expertwise_rowmap must hold rows in [-1, 6), but token 3, expert 2 holds -7"),
        _value("moe_unpermute", "repeated row",
               {"zipped_expertwise_rowmap": array([[0, 2, -1], [-1, 3, -1], [1, -1, 2], [0, -1, -1]], np.int32)},
               "zipped_expertwise_rowmap must name a row at most once, "
               "but row 2 is at token 0, expert 1 and at token 2, expert 2"),
        _value("route", "id too large", {"routing": array([[0, 1], [1, 99], [2, 7], [-1, -1]], np.int32)},
               "routing must hold expert ids in [-1, 3), but token 1, slot 1 holds 99"),
        _value("route", "repeated id", {"routing": array([[0, 1], [1, -1], [2, 2], [1, 1]], np.int64)},
               "routing must name an expert at most once per token, but token 2 names expert 2 in slots 0 and 1"),
        _value("route", "repeated id later",
               {"routing": array([[-1, 2, 0, 2, 2]], np.int32), "probs": None},
               "routing must name an expert at most once per token, but token 0 names expert 2 in slots 1 and 3"),
        _value("route", "NaN probability", {"probs": array(NAN)},
               "probs must not hold NaN, but token 2, slot 0 does"),
        _value("route", "NaN probability of a mask",
               {"routing": array(MASK), "probs": array(np.where(np.eye(T, E) > 0, np.nan, 0), np.float32)},
               "probs must not hold NaN, but token 0, expert 0 does"),
        _value("route", "mask with too many experts", {"routing": array(MASK), "probs": None, "topk": 1},
               "routing must set at most topk=1 experts per token, but token 0 sets 2"),
    ],
    "order": [
        _value("route", "ids before repeats before NaN",
               {"routing": array([[0, 0], [1, -1], [2, 0], [-1, -5]], np.int32), "probs": array(NAN)},
               "routing must hold expert ids in [-1, 3), but token 3, slot 1 holds -5"),
        _value("route", "repeats before NaN",
               {"routing": array([[0, 1], [1, -1], [2, 0], [1, 1]], np.int32), "probs": array(NAN)},
               "routing must name an expert at most once per token, but token 3 names expert 1 in slots 0 and 1"),
        _value("route", "NaN before counts", {"probs": array(NAN), "tokens_per_expert": [0, 0, 0]},
               "probs must not hold NaN, but token 2, slot 0 does"),
        _value("moe_unpermute", "range before repeats",
               {"zipped_expertwise_rowmap": array([[2, 2, -1], [-1, -1, -1], [-1, -1, -1], [-1, -1, 6]], np.int32)},
               "zipped_expertwise_rowmap must hold rows in [-1, 6), but token 3, expert 2 holds 6"),
        _value("moe_unpermute", "ids before row map",
               {"zipped_expertwise_rowmap": zeros(T, E, dtype=np.int32), "expert_routemap_topk": array(IDS + 9)},
               "expert_routemap_topk must hold expert ids in [-1, 3), but token 0, slot 0 holds 9"),
    ],
    "counts": [
        _value("moe_permute", "counts too large", {"tokens_per_expert": [2, 3, 1]},
               f"tokens_per_expert {COUNTS} [2, 3, 1]"),
        _value("moe_permute", "counts too small", {"tokens_per_expert": [2, 1, 1]},
               f"tokens_per_expert {COUNTS} [2, 1, 1]"),
        _value("moe_permute", "counts at other experts", {"tokens_per_expert": array([1, 2, 2], np.int32)},
               f"tokens_per_expert {COUNTS} [1, 2, 2]"),
        _value("moe_permute", "count tensor negative", {"tokens_per_expert": array([2, 2, -1], np.int64)},
               "tokens_per_expert must hold counts in [0, 2^31), but entry 2 is -1"),
        _value("moe_permute", "count tensor beyond int32", {"tokens_per_expert": array([2, 2, 2**32 + 1], np.int64)},
               "tokens_per_expert must hold counts in [0, 2^31), but entry 2 is 4294967297"),
        _value("route", "counts too large", {"tokens_per_expert": [100, 2, 1]},
               f"tokens_per_expert {COUNTS} [100, 2, 1]"),
        _value("route", "counts too small", {"tokens_per_expert": array([0, 0, 0], np.int64)},
               f"tokens_per_expert {COUNTS} [0, 0, 0]"),
    ],
    "overflow": [
        _value("moe_permute", "buffer without rows", {"override_buffer_size": 0},
               "override_buffer_size must be at least 6, the padded rows of this routing, but got 0"),
        _value("moe_permute", "buffer too small", {"override_buffer_size": 4},
               "override_buffer_size must be at least 6, the padded rows of this routing, but got 4"),
        _value("route", "buffer too small", {"buffer_size": 3},
               "buffer_size must be at least 6, the padded rows of this routing, but got 3"),
    ],
}  # fmt: skip
