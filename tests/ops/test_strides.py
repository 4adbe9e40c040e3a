# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors that are not contiguous or not aligned have the results of their contiguous copies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import moe_permute, moe_unpermute, permute, reference, route, unpermute
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import backward, make_problem, ordinary, plan_tensors, tensor
from tests.params import ROW_DTYPES, SMALL, SUM_DTYPES


def transposed(array: NDArray, place: object) -> paddle.Tensor:
    return to_tensor(array.T, place).t()


def sliced_columns(array: NDArray, place: object) -> paddle.Tensor:
    """Columns 3 to 3 + H of wider rows: the distance between rows is larger than a row, every row begins unaligned."""
    wide = np.concatenate([array[:, :1]] * 3 + [array] + [array[:, :1]] * 2, axis=1)
    return to_tensor(wide, place)[:, 3 : 3 + array.shape[1]]


def odd_offset(array: NDArray, place: object) -> paddle.Tensor:
    """Contiguous, one element into a buffer."""
    flat = np.concatenate([array.reshape(-1)[:1], array.reshape(-1)])
    return to_tensor(flat, place)[1:].reshape(list(array.shape))


def every_second_column(array: NDArray, place: object) -> paddle.Tensor:
    return to_tensor(np.repeat(array, 2, axis=1), place)[:, ::2]


def every_second_row(array: NDArray, place: object) -> paddle.Tensor:
    return to_tensor(np.repeat(array, 2, axis=0), place)[::2]


LAYOUTS: list[Callable[[NDArray, object], paddle.Tensor]] = [
    transposed,
    sliced_columns,
    odd_offset,
    every_second_column,
    every_second_row,
]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)


def laid_out(layout, array, place, *, gradient=False):
    """The array as a tensor of a layout; 1-D arrays become every second element, or lie at an odd offset."""
    if array.ndim == 1:
        column = layout if layout in (odd_offset, every_second_column) else every_second_column
        made = column(array[None], place)[0]
    else:
        made = layout(array, place)
    if layout is odd_offset:
        assert made.data_ptr() % 16, "the layout is aligned, the test would show nothing"
    else:
        assert not made.is_contiguous(), "the layout is contiguous, the test would show nothing"
    assert_bits_equal(made, array)
    made = made.detach()
    made.stop_gradient = not gradient
    return made


@layouts
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [7, 72])
def test_permute(hidden, dtype, layout, rng, place):
    problem = make_problem(rng, SMALL._replace(H=hidden), dtype)
    plan, scale = problem.plan(), ordinary(rng, (SMALL.T, 3))
    rows, scales = permute(
        laid_out(layout, problem.x, place), plan_tensors(plan, place), laid_out(layout, scale, place)
    )
    expected_rows, expected_scales = reference.permute(problem.x, plan, scale)
    assert_bits_equal(rows, expected_rows, what="rows")
    assert_bits_equal(scales, expected_scales, what="scales")


@pytest.mark.parametrize("shape_and_strides", [([9, 5], [0, 1]), ([9, 5], [2, 1]), ([9, 5], [1, 0])], ids=str)
def test_permute_of_overlapping_rows(shape_and_strides, rng, place, backend):
    """Rows that share memory: one row for all tokens, windows of a signal, one value per row."""
    shape, strides = shape_and_strides
    x = paddle.as_strided(tensor(ordinary(rng, (40,)), place), shape, strides)
    assert x.strides == strides
    plan = reference.route(rng.integers(0, 4, (9, 2), dtype=np.int32), num_experts=4, validate=False)
    rows, _ = permute(x, plan_tensors(plan, place))
    assert_bits_equal(rows, reference.permute(x.numpy(), plan)[0])


@layouts
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["plain", "by row", "by slot"])
def test_unpermute_and_its_gradient(weights, dtype, layout, rng, place):
    problem = make_problem(rng, SMALL._replace(H=7), dtype)
    plan = problem.plan()
    weights = {"plain": None, "by row": plan.row_probs, "by slot": problem.probs}[weights]
    y, d_out = ordinary(rng, (plan.num_rows, 7), dtype), ordinary(rng, (SMALL.T, 7), dtype)

    def run(make):
        y_tensor = make(y, gradient=True)
        inputs = [y_tensor] if weights is None else [y_tensor, make(weights, gradient=True)]
        out = unpermute(y_tensor, plan_tensors(plan, place), *inputs[1:])
        paddle.autograd.backward([out], [make(d_out)])
        return [out, *(leaf.grad for leaf in inputs)]

    strided = run(lambda array, gradient=False: laid_out(layout, array, place, gradient=gradient))
    contiguous = run(lambda array, gradient=False: tensor(array, place, gradient=gradient))
    for got, wanted in zip(strided, contiguous, strict=True):
        assert_bits_equal(got, wanted)


@layouts
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.bool_])
def test_route_and_its_gradient(dtype, layout, rng, place):
    routing = rng.random((20, 6)) < 0.4 if dtype is np.bool_ else rng.integers(-1, 6, (20, 3)).astype(dtype)
    probs = ordinary(rng, routing.shape)
    expected = reference.route(routing, probs, num_experts=6, padding_alignment=2, validate=False)
    probs_tensor = laid_out(layout, probs, place, gradient=True)
    plan = route(laid_out(layout, routing, place), probs_tensor, num_experts=6, padding_alignment=2, validate=False)
    for name, got, wanted in zip(plan._fields[:10], plan, expected, strict=False):
        assert_bits_equal(got, wanted, what=name)
    d_row_probs = ordinary(rng, (expected.num_rows,))
    paddle.autograd.backward([plan.row_probs], [laid_out(layout, d_row_probs, place)])
    mask_experts = 6 if dtype is np.bool_ else None
    assert_bits_equal(probs_tensor.grad, reference.route_backward(d_row_probs, expected, mask_experts=mask_experts))


@pytest.mark.parametrize("layout", [odd_offset, every_second_column], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_counts(dtype, layout, rng, place):
    problem = make_problem(rng, SMALL)
    counts = laid_out(layout, problem.plan().routed_per_expert.astype(dtype), place)
    plan = route(tensor(problem.ids, place), tokens_per_expert=counts, **problem.route_arguments)
    assert_bits_equal(plan.row_to_slot, problem.plan().row_to_slot)
    wrong = laid_out(layout, problem.plan().routed_per_expert.astype(dtype) + 1, place)
    with pytest.raises(ValueError, match="the rows routed to each expert"):
        route(tensor(problem.ids, place), tokens_per_expert=wrong, validate=True, **problem.route_arguments)


@layouts
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
def test_moe_permute_and_its_gradient(ids_dtype, dtype, layout, rng, place):
    problem = make_problem(rng, SMALL, dtype)
    arrays = problem.x, ordinary(rng, (SMALL.T, 2)), problem.ids.astype(ids_dtype), problem.probs
    gradient = (True, False, False, True)
    inputs = [laid_out(layout, array, place, gradient=g) for array, g in zip(arrays, gradient, strict=True)]
    outputs = moe_permute(*inputs, SMALL.E, None, SMALL.A)
    for got, wanted in zip(outputs, reference.moe_permute(*arrays, SMALL.E, None, SMALL.A), strict=True):
        assert_bits_equal(got, wanted)
    d_rows, d_row_probs = ordinary(rng, tuple(outputs[0].shape), dtype), ordinary(rng, tuple(outputs[2].shape))
    d_outputs = [laid_out(layout, d_rows, place), laid_out(layout, d_row_probs, place)]
    paddle.autograd.backward([outputs[0], outputs[2]], d_outputs)
    d_x, d_probs = reference.moe_permute_backward(d_rows, d_row_probs, problem.plan())
    assert_bits_equal(inputs[0].grad, d_x)
    assert_bits_equal(inputs[3].grad, d_probs)


@layouts
@pytest.mark.parametrize("column", [False, True], ids=["[N]", "[N, 1]"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_moe_unpermute_and_its_gradient(weighted, column, layout, rng, place):
    problem = make_problem(rng, SMALL)
    plan = problem.plan()
    y = ordinary(rng, (plan.num_rows, SMALL.H))
    maps = reference.plan_to_rowmap(plan), problem.ids
    d_hidden, d_prob = ordinary(rng, (SMALL.T, SMALL.H)), ordinary(rng, problem.ids.shape)

    def run(make):
        probs = make(plan.row_probs, gradient=True)
        y_tensor = make(y, gradient=True)
        given = probs.unsqueeze(-1) if column else probs
        outputs = moe_unpermute(y_tensor, *map(make, maps), given, SMALL.T, SMALL.E, using_weighted_combine=weighted)
        paddle.autograd.backward(list(outputs), [make(d_hidden), make(d_prob)])
        return [*outputs, y_tensor.grad, probs.grad]

    strided = run(lambda array, gradient=False: laid_out(layout, array, place, gradient=gradient))
    contiguous = run(lambda array, gradient=False: tensor(array, place, gradient=gradient))
    for got, wanted in zip(strided, contiguous, strict=True):
        assert_bits_equal(got, wanted)


@layouts
def test_reference_backend(layout, rng, place, backend):
    problem = make_problem(rng, SMALL)
    x = laid_out(layout, problem.x, place, gradient=True)
    outputs = moe_permute(
        x, None, laid_out(layout, problem.ids, place), laid_out(layout, problem.probs, place), SMALL.E, None, 2
    )
    for got, wanted in zip(
        outputs, reference.moe_permute(problem.x, None, problem.ids, problem.probs, SMALL.E, None, 2), strict=True
    ):
        assert_bits_equal(got, wanted)
    d_rows = ordinary(rng, tuple(outputs[0].shape))
    backward([outputs[0]], [d_rows])
    assert_bits_equal(x.grad, reference.permute_backward(d_rows, problem.plan()))
