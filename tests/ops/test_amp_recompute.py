# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Automatic mixed precision and recomputation leave the operators' numbers alone."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import moe_permute, moe_unpermute, permute, route, unpermute
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import backward, make_problem, ordinary, tensor
from tests.params import SMALL
from tests.static.operators import operator_names

T, H, E, K, A, _ = SMALL
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])
ROW_DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)


def moe_layer(x, ids, probs):
    rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, E, None, A)
    return moe_unpermute(rows, rowmap, ids, row_probs, T, E, using_weighted_combine=True)


def plan_and_verbs(x, ids, probs):
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    rows, _ = permute(x, plan)
    return (
        plan.row_probs,
        rows,
        unpermute(rows, plan),
        unpermute(rows, plan, plan.row_probs),
        unpermute(rows, plan, probs),
    )


FUNCTIONS = pytest.mark.parametrize("function", [moe_layer, plan_and_verbs])
# On a custom place Paddle adds gradients up with an operator that mixed precision casts, here from bfloat16 to float16.
CAST_ON_THE_RIG = (plan_and_verbs, BFLOAT16, "float16")
MIXED = [
    pytest.param(*mix, marks=[pytest.mark.paddle_kernels] if mix == CAST_ON_THE_RIG else [])
    for mix in itertools.product((moe_layer, plan_and_verbs), (FLOAT32, BFLOAT16), ("bfloat16", "float16"))
]


def run(function, problem, place, d_outputs=None):
    """Outputs, and gradients of x and probs."""
    x, probs = tensor(problem.x, place, gradient=True), tensor(problem.probs, place, gradient=True)
    outputs = function(x, tensor(problem.ids, place), probs)
    if d_outputs is None:
        return outputs
    backward(outputs, d_outputs)
    return *outputs, x.grad, probs.grad


def output_gradients(function, problem, rng, place):
    dtypes = {paddle.bfloat16: BFLOAT16, paddle.float32: FLOAT32}
    return [ordinary(rng, tuple(output.shape), dtypes[output.dtype]) for output in run(function, problem, place)]


@LEVELS
@pytest.mark.parametrize(("function", "dtype", "amp_dtype"), MIXED)
@pytest.mark.filterwarnings("ignore:amp_guard can only be enabled")
def test_mixed_precision_changes_no_bit(function, dtype, amp_dtype, level, rng, place):
    """On a CPU Paddle's eager mixed precision casts nothing; there the static graph below is the test."""
    problem = make_problem(rng, SMALL, dtype)
    d_outputs = output_gradients(function, problem, rng, place)
    expected = run(function, problem, place, d_outputs)
    with paddle.amp.auto_cast(level=level, dtype=amp_dtype):
        got = run(function, problem, place, d_outputs)
    for index, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        assert_bits_equal(value, wanted, what=f"result {index}")


@LEVELS
@ROW_DTYPES
@pytest.mark.parametrize("listed", ["nowhere", "custom_white_list", "custom_black_list"])
def test_mixed_precision_in_a_static_graph_changes_no_bit(listed, dtype, level, rng, place):
    problem = make_problem(rng, SMALL, dtype)
    expected = [*run(moe_layer, problem, place), *run(plan_and_verbs, problem, place)]
    lists = {} if listed == "nowhere" else {listed: set(operator_names())}
    program = paddle.static.Program()
    paddle.enable_static()
    try:
        with paddle.static.program_guard(program):
            x = paddle.static.data("x", [T, H], dtype.name)
            ids = paddle.static.data("ids", [T, K], "int32")
            probs = paddle.static.data("probs", [T, K], "float32")
            with paddle.amp.auto_cast(level=level, dtype="bfloat16", **lists):
                assert paddle.matmul(x, x, transpose_y=True).dtype == paddle.bfloat16  # so it is switched on
                outputs = [*moe_layer(x, ids, probs), *plan_and_verbs(x, ids, probs)]
        feed = {"x": problem.x.view(np.uint16) if dtype == BFLOAT16 else problem.x, "ids": problem.ids}
        arrays = paddle.static.Executor().run(program, feed={**feed, "probs": problem.probs}, fetch_list=outputs)
        for index, (array, value, wanted) in enumerate(zip(arrays, outputs, expected, strict=True)):
            got = array.view(BFLOAT16) if value.dtype == paddle.bfloat16 else array
            assert_bits_equal(got, wanted, what=f"result {index}")
    finally:
        paddle.disable_static()


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
@ROW_DTYPES
@FUNCTIONS
def test_recompute_gives_the_same_gradients(function, dtype, use_reentrant, rng, place, backend):
    problem = make_problem(rng, SMALL, dtype)
    d_outputs = output_gradients(function, problem, rng, place)
    expected = run(function, problem, place, d_outputs)
    calls = []

    def counted(*inputs):
        calls.append(paddle.is_grad_enabled())
        return function(*inputs)

    got = run(lambda *inputs: recompute(counted, *inputs, use_reentrant=use_reentrant), problem, place, d_outputs)
    for index, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        assert_bits_equal(value, wanted, what=f"result {index}")
    assert len(calls) == 2  # forward, and once more in backward
