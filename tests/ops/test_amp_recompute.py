# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Automatic mixed precision and recomputation leave the operators' numbers alone."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import ml_dtypes
import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import dispatch, masked, moe_permute, moe_unpermute, permute, route, unpermute
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import backward, make_problem, ordinary, products_in_graphs_are, tensor
from tests.pairwise import pairwise_of
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


def masked_layer(x, mask, probs):
    rows, row_probs, row_id_map = masked.moe_permute_with_probs(x, probs, mask, T * K)
    return row_probs, rows, masked.moe_unpermute(rows, row_id_map), masked.moe_unpermute(rows, row_id_map, probs)


def mask_maps(x, mask, probs):
    row_id_map, _ = masked.make_row_id_map(mask, T * K, fp8_padding=A)
    rows, row_probs, _ = masked.permute_with_mask_map(x, row_id_map, T * K, probs)
    sums, back = masked.unpermute_with_mask_map(rows, row_id_map, probs, permuted_probs=row_probs)
    return rows, row_probs, sums, back


def index_layer(x, ids, probs):
    rows, row_id_map = masked.moe_permute(x, ids, 0, map_type="index", num_experts=E)
    return rows, masked.moe_unpermute(rows, row_id_map, probs, map_type="index")


def dispatch_layer(x, mask, probs):
    rows, row_probs, row_id_map, pad_offsets, counts = dispatch.token_dispatch(x, mask, T * K, probs, A)
    last_first = E - paddle.cumsum(paddle.ones_like(counts))
    sorted_rows, _ = dispatch.sort_chunks_by_index(rows, counts, last_first)
    by_row = dispatch.token_combine(rows, row_id_map, row_probs, pad_offsets)
    return row_probs, sorted_rows, by_row, dispatch.token_combine(rows, row_id_map, probs, pad_offsets)


BY_MASK = (masked_layer, mask_maps, dispatch_layer)
ALL = (moe_layer, plan_and_verbs, index_layer, *BY_MASK)
FUNCTIONS = pytest.mark.parametrize("function", ALL)
# On a custom place Paddle adds gradients up with an operator that mixed precision casts, here from bfloat16 to float16.
# Only moe_layer has no sum of several.
CAST = [BFLOAT16, "float16"]
MIXED = [
    pytest.param(function, *mix, marks=[pytest.mark.paddle_kernels] * (function != moe_layer and mix == CAST))
    for function, *mix in itertools.product(ALL, (FLOAT32, BFLOAT16), ("bfloat16", "float16"))
]


class Inputs(NamedTuple):
    """x [T, H]; ids and probs [T, K], or a mask and probs [T, E]."""

    x: NDArray
    routing: NDArray
    probs: NDArray


def inputs_of(function, rng, dtype):
    problem = make_problem(rng, SMALL, dtype)
    if function not in BY_MASK:
        return Inputs(problem.x, problem.ids, problem.probs)
    mask, probs = np.zeros((T, E), np.bool_), np.zeros((T, E), np.float32)
    tokens, slots = np.nonzero(problem.ids >= 0)
    experts = problem.ids[tokens, slots]
    mask[tokens, experts], probs[tokens, experts] = True, problem.probs[tokens, slots]
    return Inputs(problem.x, mask, probs)


def run(function, inputs, place, d_outputs=None):
    """Outputs, and gradients of x and probs."""
    x, probs = tensor(inputs.x, place, gradient=True), tensor(inputs.probs, place, gradient=True)
    outputs = function(x, tensor(inputs.routing, place), probs)
    if d_outputs is None:
        return outputs
    backward(outputs, d_outputs)
    return *outputs, x.grad, probs.grad


def output_gradients(function, inputs, rng, place):
    dtypes = {paddle.bfloat16: BFLOAT16, paddle.float32: FLOAT32}
    return [ordinary(rng, tuple(output.shape), dtypes[output.dtype]) for output in run(function, inputs, place)]


@LEVELS
@pytest.mark.parametrize(("function", "dtype", "amp_dtype"), MIXED)
@pytest.mark.filterwarnings("ignore:amp_guard can only be enabled")
def test_mixed_precision_changes_no_bit(function, dtype, amp_dtype, level, rng, place):
    """On a CPU Paddle's eager mixed precision casts nothing; there the static graph below is the test."""
    inputs = inputs_of(function, rng, dtype)
    d_outputs = output_gradients(function, inputs, rng, place)
    expected = run(function, inputs, place, d_outputs)
    with paddle.amp.auto_cast(level=level, dtype=amp_dtype):
        got = run(function, inputs, place, d_outputs)
    for index, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        assert_bits_equal(value, wanted, what=f"result {index}")


@pairwise_of(
    pytest.mark.parametrize("listed", ["nowhere", "custom_white_list", "custom_black_list"]),
    FUNCTIONS,
    ROW_DTYPES,
    LEVELS,
)
def test_mixed_precision_in_a_static_graph_changes_no_bit(listed, function, dtype, level, rng, place):
    inputs = inputs_of(function, rng, dtype)
    expected = run(function, inputs, place)
    lists = {} if listed == "nowhere" else {listed: set(operator_names())}
    program = paddle.static.Program()
    paddle.enable_static()
    try:
        with paddle.static.program_guard(program):
            values = [
                paddle.static.data(name, array.shape, array.dtype.name) for name, array in inputs._asdict().items()
            ]
            with paddle.amp.auto_cast(level=level, dtype="bfloat16", **lists):
                assert products_in_graphs_are(paddle.bfloat16)
                outputs = function(*values)
        feed = inputs._replace(x=inputs.x.view(np.uint16) if dtype == BFLOAT16 else inputs.x)._asdict()
        arrays = paddle.static.Executor().run(program, feed=feed, fetch_list=[*outputs])
        for index, (array, value, wanted) in enumerate(zip(arrays, outputs, expected, strict=True)):
            got = array.view(BFLOAT16) if value.dtype == paddle.bfloat16 else array
            assert_bits_equal(got, wanted, what=f"result {index}")
    finally:
        paddle.disable_static()


def check_recompute(function, use_reentrant, dtype, rng, place):
    """The same bits with and without recomputation, which calls the function once more in backward."""
    inputs = inputs_of(function, rng, dtype)
    d_outputs = output_gradients(function, inputs, rng, place)
    expected = run(function, inputs, place, d_outputs)
    calls = []

    def counted(*tensors):
        calls.append(paddle.is_grad_enabled())
        return function(*tensors)

    got = run(lambda *tensors: recompute(counted, *tensors, use_reentrant=use_reentrant), inputs, place, d_outputs)
    for index, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        assert_bits_equal(value, wanted, what=f"result {index}")
    assert len(calls) == 2


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
@ROW_DTYPES
@FUNCTIONS
def test_recompute_gives_the_same_gradients(function, dtype, use_reentrant, rng, place, backend):
    check_recompute(function, use_reentrant, dtype, rng, place)


def test_recompute_of_rows_that_lie_apart_gives_the_same_gradients(rng, place, backend):
    problem = make_problem(rng, SMALL)
    plan = route(tensor(problem.ids, place), num_experts=E, padding_alignment=A)
    values = ordinary(rng, (plan.num_rows, 2 * H))

    def weighted(y, probs):
        return unpermute(y[:, ::2], plan, probs)

    def gradients(run):
        y, probs = tensor(values, place, gradient=True), tensor(problem.probs, place, gradient=True)
        run(y, probs).sum().backward()
        return y.grad, probs.grad

    again = gradients(lambda *inputs: recompute(weighted, *inputs, use_reentrant=False))
    for got, expected in zip(again, gradients(weighted), strict=True):
        assert_bits_equal(got, expected.numpy())


@pytest.mark.cpu_only
def test_mixed_precision_returns_the_gradients_of_matrices(monkeypatch):
    """On a GPU it casts matrices; a gradient that is asked for is no gradient of a parameter."""
    monkeypatch.setattr("paddle_moe_ops.gemm.is_on_gpu", lambda _: True)
    monkeypatch.setattr(paddle.amp, "is_autocast_enabled", lambda: True)
    monkeypatch.setattr(paddle.amp, "get_autocast_dtype", lambda: "bfloat16")
    matrices = paddle.create_parameter([2, 4, 3], "float32")
    matrices.main_grad = paddle.zeros_like(matrices)
    out = grouped_gemm(paddle.ones([5, 4]), matrices, [2, 3], transpose=False)
    assert out.dtype == paddle.bfloat16
    (gradient,) = paddle.grad(out.astype("float32").sum(), [matrices])
    assert gradient.dtype == paddle.float32
    assert [each.unique().tolist() for each in gradient] == [[2.0], [3.0]]
    assert not matrices.main_grad.any()
