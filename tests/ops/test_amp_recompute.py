# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Automatic mixed precision and recomputation leave the operators' numbers alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle.base import core, framework
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import moe_permute, moe_unpermute, permute, route, unpermute
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import backward, make_problem, ordinary, tensor
from tests.params import SMALL

T, H, E, K, A, _ = SMALL
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])
AMP_DTYPES = pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16"])
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


@contextlib.contextmanager
def mixed_precision(level: str, dtype: str) -> Iterator[None]:
    """paddle.amp.auto_cast also on a CPU, where that only warns: sets what it sets on other devices."""
    auto_cast = sys.modules["paddle.amp.auto_cast"]  # paddle.amp.auto_cast itself is the function
    tracer = framework._dygraph_tracer()
    before = tracer._amp_level, tracer._amp_dtype, tracer._get_amp_op_list()
    tracer._amp_level, tracer._amp_dtype = getattr(core.AmpLevel, level), dtype
    tracer._set_amp_op_list(*auto_cast._update_list(None, None, level, dtype))
    try:
        yield
    finally:
        tracer._amp_level, tracer._amp_dtype = before[:2]
        tracer._set_amp_op_list(*before[2])


@LEVELS
def test_mixed_precision_casts_the_operators_of_paddle_here(level, place):
    x = paddle.ones([4, 4])
    with mixed_precision(level, "bfloat16"):
        assert paddle.matmul(x, x).dtype == paddle.bfloat16
    assert paddle.matmul(x, x).dtype == paddle.float32


@LEVELS
@AMP_DTYPES
@ROW_DTYPES
@FUNCTIONS
def test_mixed_precision_changes_no_bit(function, dtype, amp_dtype, level, rng, place):
    problem = make_problem(rng, SMALL, dtype)
    d_outputs = output_gradients(function, problem, rng, place)
    expected = run(function, problem, place, d_outputs)
    with mixed_precision(level, amp_dtype):
        got = run(function, problem, place, d_outputs)
    for index, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        assert_bits_equal(value, wanted, what=f"result {index}")


@LEVELS
@ROW_DTYPES
def test_mixed_precision_in_a_static_graph_changes_no_dtype(level, dtype, place):
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            x = paddle.static.data("x", [T, H], dtype.name)
            ids = paddle.static.data("ids", [T, K], "int32")
            probs = paddle.static.data("probs", [T, K], "float32")
            with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
                cast = paddle.matmul(x, x, transpose_y=True)
                outputs = [*moe_layer(x, ids, probs), *plan_and_verbs(x, ids, probs)]
        assert cast.dtype == paddle.bfloat16
        kinds = [output.dtype for output in outputs]
    finally:
        paddle.disable_static()
    rows = x.dtype
    assert kinds == [rows, paddle.float32, paddle.float32, rows, rows, rows, rows]


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
