# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's operators in programs that do not know the number of tokens: the bits of dygraph."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from paddle_moe_ops.compat import fastdeploy as ops
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.every_call import T, made_of
from tests.ops.fastdeploy_calls import DYGRAPH_NAMES, NUM_ROWS, OTHER_CALLS

pytestmark = pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")

UNKNOWN = {T, NUM_ROWS, 2 * T}  # tokens, and rows of them; capacities are known
CALLS = [call for call in OTHER_CALLS if call.function not in DYGRAPH_NAMES]


def spec_of(name: str, value: Any, tensor: paddle.Tensor) -> InputSpec:
    is_known = [value.ndim == 3 and axis < 2 for axis in range(value.ndim)]
    sizes = [size if known or size not in UNKNOWN else None for size, known in zip(value.shape, is_known, strict=True)]
    return InputSpec(sizes, str(tensor.dtype).rpartition(".")[2], name)


def assert_like_dygraph(call: Any, place: Any, known: tuple[str, ...] = ()) -> None:
    """Compare a program that knows the sizes of some arguments."""
    arrays = {name: value for name, value in call.arguments.items() if isinstance(value, np.ndarray)}
    made = {name: made_of(value, place) for name, value in arrays.items()}
    others = {name: value for name, value in call.arguments.items() if name not in arrays}

    @paddle.jit.not_to_static
    def called(tensors):
        results = getattr(ops, call.function)(**dict(zip(arrays, tensors, strict=True)), **others)
        return results if isinstance(results, list) else [results]

    def run(tensors):
        return called(tensors)

    specs = [
        InputSpec.from_tensor(made[name], name) if name in known else spec_of(name, value, made[name])
        for name, value in arrays.items()
    ]
    program = paddle.jit.to_static(run, input_spec=[specs], full_graph=True)
    for got, expected in zip(program(list(made.values())), run(list(made.values())), strict=True):
        assert_bits_equal(got, expected)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_programs_have_the_results_of_dygraph(call, place):
    assert_like_dygraph(call, place)


@pytest.mark.parametrize("known", [("input", "topk_ids", "topk_weights"), ("scale",)], ids=["tokens", "scales"])
def test_programs_may_know_the_number_of_tokens_or_of_their_scales(known, place):
    (call, *_) = (each for each in CALLS if each.function == "ep_moe_expert_dispatch_fp8")
    assert_like_dygraph(call, place, known)
