# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients against the oracle's: sums and copies bit for bit, dot products within their proved bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import moe_permute, moe_unpermute, permute, reference, route, unpermute
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dot_chain, dtype_tols
from tests.ops.problems import (
    SEEDS,
    Routing,
    backward,
    every_kind,
    make_problem,
    ordinary,
    plan_tensors,
    routings,
    tensor,
)
from tests.pairwise import pairwise_of
from tests.params import EMPTY, HIDDEN_SIZES, SHAPES, SMALL, SUM_DTYPES

dtypes = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)


def assert_dots(actual, expected, magnitude, hidden, *, added: int = 0, what: str) -> None:
    """Check dot products over the hidden dimension, to which at most ``added`` more terms were added."""
    assert_close_sums(actual, expected, magnitude, dtype_tols(np.float32, dot_chain(hidden) + added), what=what)


def ill_conditioned(rng, shape, dtype):
    """Numbers of very different size and both signs: sums in another order would differ in their bits."""
    return (ordinary(rng, shape) * 2.0 ** rng.integers(-8, 9, shape)).astype(dtype)


# ---- permute


def check_permute(x, plan, d_rows, place):
    x_tensor = tensor(x, place, gradient=True)
    rows, _ = permute(x_tensor, plan_tensors(plan, place))
    backward([rows], [d_rows])
    assert x_tensor.grad.dtype == x_tensor.dtype
    assert_bits_equal(x_tensor.grad, reference.permute_backward(d_rows, plan), any_nan=True)


@given(case=routings(), dtype=st.sampled_from(SUM_DTYPES), hidden=st.sampled_from([1, 7, 72, 200]), seed=SEEDS)
@settings(max_examples=80)
def test_permute_equals_the_oracle(case: Routing, dtype, hidden, seed, place):
    rng = np.random.default_rng(seed)
    plan = case.oracle()
    x, d_rows = ordinary(rng, (plan.num_tokens, hidden), dtype), every_kind(rng, (plan.num_rows, hidden), dtype)
    check_permute(x, plan, d_rows, place)


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_permute_of_named_shapes(shape, dtype, rng, place):
    problem = make_problem(rng, shape, dtype, "uniform")
    plan = problem.plan()
    check_permute(problem.x, plan, ill_conditioned(rng, (plan.num_rows, shape.H), dtype), place)


@dtypes
@pytest.mark.parametrize("buffer_size", [-1, 30], ids=["padded", "buffer too small"])
def test_permute_on_both_backends(buffer_size, dtype, rng, place, backend):
    problem = make_problem(rng, SMALL, dtype)
    plan = problem.plan(buffer_size=buffer_size)
    check_permute(problem.x, plan, ill_conditioned(rng, (plan.num_rows, SMALL.H), dtype), place)


# ---- unpermute


def check_unpermute(plan, y, weights, d_out, place):
    """`weights`: None, [N] or [T, K]."""
    y_tensor = tensor(y, place, gradient=True)
    if weights is None:
        backward([unpermute(y_tensor, plan_tensors(plan, place))], [d_out])
        assert_bits_equal(y_tensor.grad, reference.unpermute_backward(d_out, plan)[0])
        return
    probs = tensor(weights, place, gradient=True)
    backward([unpermute(y_tensor, plan_tensors(plan, place), probs)], [d_out])
    d_y, d_probs = reference.unpermute_backward(d_out, plan, y, weights)
    assert_bits_equal(y_tensor.grad, d_y, any_nan=True, what="gradient of y")
    _, magnitude = reference.unpermute_backward(np.abs(d_out), plan, np.abs(y), np.abs(weights))
    assert_dots(probs.grad, d_probs, magnitude, y.shape[1], what="gradient of probs")
    assert not probs.grad.numpy()[d_probs == 0].any()


def draw_weights(rng, kind, plan):
    shapes = {"plain": None, "by row": (plan.num_rows,), "by slot": (plan.num_tokens, plan.topk)}
    return None if shapes[kind] is None else ordinary(rng, shapes[kind])


weight_kinds = pytest.mark.parametrize("weights", ["plain", "by row", "by slot"])


@given(
    case=routings(),
    dtype=st.sampled_from(SUM_DTYPES),
    hidden=st.sampled_from([1, 7, 72, 200]),
    weights=st.sampled_from(["plain", "by row", "by slot"]),
    seed=SEEDS,
)
@settings(max_examples=100)
def test_unpermute_equals_the_oracle(case: Routing, dtype, hidden, weights, seed, place):
    rng = np.random.default_rng(seed)
    plan = case.oracle()
    y, d_out = ordinary(rng, (plan.num_rows, hidden), dtype), ordinary(rng, (plan.num_tokens, hidden), dtype)
    check_unpermute(plan, y, draw_weights(rng, weights, plan), d_out, place)


@pairwise_of(pytest.mark.parametrize("shape", SHAPES, ids=str), dtypes, weight_kinds, empty={"shape": [EMPTY]})
def test_unpermute_of_named_shapes(shape, dtype, weights, rng, place):
    plan = make_problem(rng, shape, dtype, "uniform").plan()
    y, d_out = ordinary(rng, (plan.num_rows, shape.H), dtype), ordinary(rng, (shape.T, shape.H), dtype)
    check_unpermute(plan, y, draw_weights(rng, weights, plan), d_out, place)


@weight_kinds
@dtypes
@pytest.mark.parametrize("buffer_size", [-1, 30], ids=["padded", "buffer too small"])
def test_unpermute_on_both_backends(buffer_size, dtype, weights, rng, place, backend):
    plan = make_problem(rng, SMALL, dtype).plan(buffer_size=buffer_size)
    y, d_out = ordinary(rng, (plan.num_rows, SMALL.H), dtype), ordinary(rng, (SMALL.T, SMALL.H), dtype)
    check_unpermute(plan, y, draw_weights(rng, weights, plan), d_out, place)


@dtypes
def test_gradient_of_weighted_rows_keeps_special_values(dtype, rng, place, backend):
    plan = make_problem(rng, SMALL).plan()
    y, probs = ordinary(rng, (plan.num_rows, SMALL.H), dtype), every_kind(rng, (plan.num_rows,))
    d_out = every_kind(rng, (SMALL.T, SMALL.H), dtype)
    y_tensor = tensor(y, place, gradient=True)
    backward([unpermute(y_tensor, plan_tensors(plan, place), tensor(probs, place))], [d_out])
    assert_bits_equal(y_tensor.grad, reference.unpermute_backward(d_out, plan, None, probs)[0], any_nan=True)


# ---- route


def check_route(case: Routing, d_row_probs, place):
    probs = tensor(case.probs, place, gradient=True)
    plan = route(tensor(case.routing, place), probs, **case.arguments, validate=False)
    backward([plan.row_probs], [d_row_probs])
    mask_experts = case.routing.shape[1] if case.routing.dtype == np.bool_ else None
    assert_bits_equal(probs.grad, reference.route_backward(d_row_probs, case.oracle(), mask_experts=mask_experts))


@given(case=routings().filter(lambda case: case.probs is not None), seed=SEEDS)
@settings(max_examples=120)
def test_route_equals_the_oracle(case: Routing, seed, place):
    check_route(case, every_kind(np.random.default_rng(seed), (case.oracle().num_rows,)), place)


@pytest.mark.parametrize("kind", ["ids", "mask", "mask with topk"])
def test_route_on_both_backends(kind, rng, place, backend):
    arguments = {"padding_alignment": 4, "buffer_size": 40}
    if kind == "ids":
        routing, arguments["num_experts"] = rng.integers(-1, 6, (20, 3), dtype=np.int32), 6
    else:
        routing = rng.random((20, 6)) < 0.5
        arguments["topk"] = 2 if kind == "mask with topk" else None
    case = Routing(routing, ordinary(rng, routing.shape), arguments)
    check_route(case, ordinary(rng, (case.oracle().num_rows,)), place)


# ---- moe_permute


def check_moe_permute(problem, plan, through, place, **options):
    x, probs = tensor(problem.x, place, gradient=True), tensor(problem.probs, place, gradient=True)
    shape = problem.shape
    outputs = moe_permute(x, None, tensor(problem.ids, place), probs, shape.E, None, shape.A, **options)
    rng = np.random.default_rng(0)
    d_rows = ill_conditioned(rng, tuple(outputs[0].shape), problem.x.dtype)
    d_row_probs = ordinary(rng, (plan.num_rows,))
    gradients = {"rows": (outputs[0], d_rows), "probabilities": (outputs[2], d_row_probs)}
    backward(*zip(*(gradients[name] for name in through), strict=True))
    if "rows" not in through or not options.get("do_gather", True):
        d_rows = np.zeros((plan.num_rows, shape.H), problem.x.dtype)
    if "probabilities" not in through:
        d_row_probs = np.zeros_like(d_row_probs)
    d_x, d_probs = reference.moe_permute_backward(d_rows, d_row_probs, plan)
    assert_bits_equal(x.grad, d_x, what="gradient of hidden_states")
    assert_bits_equal(probs.grad, d_probs, what="gradient of expert_prob_topk")


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moe_permute_of_named_shapes(shape, dtype, rng, place):
    problem = make_problem(rng, shape, dtype, "uniform")
    check_moe_permute(problem, problem.plan(), ["rows", "probabilities"], place)


@dtypes
@pytest.mark.parametrize(
    "through", [["rows", "probabilities"], ["rows"], ["probabilities"]], ids=["both", "rows", "probabilities"]
)
@pytest.mark.parametrize("buffer_size", [-1, 30], ids=["padded", "buffer too small"])
def test_moe_permute_through_each_output(buffer_size, through, dtype, rng, place, backend):
    problem = make_problem(rng, SMALL, dtype)
    plan = problem.plan(buffer_size=buffer_size)
    check_moe_permute(problem, plan, through, place, override_buffer_size=buffer_size)


@pytest.mark.parametrize("through", [["rows", "probabilities"], ["probabilities"]], ids=["both", "probabilities"])
def test_moe_permute_without_gather(through, rng, place, backend):
    problem = make_problem(rng, SMALL)
    check_moe_permute(problem, problem.plan(), through, place, do_gather=False)


def test_moe_permute_gives_no_gradient_to_slots_without_a_row(rng, place, backend):
    ids = np.array([[0, 0, 1], [-1, 9, 1], [2, 2, 2]], np.int32)
    probs, x = tensor(ordinary(rng, (3, 3)), place, gradient=True), tensor(ordinary(rng, (3, 4)), place, gradient=True)
    outputs = moe_permute(x, None, tensor(ids, place), probs, 3, None, 1, validate=False)
    backward([outputs[0], outputs[2]], [np.ones((4, 4), np.float32), np.arange(1, 5, dtype=np.float32)])
    np.testing.assert_array_equal(probs.grad.numpy(), [[1, 0, 2], [0, 0, 3], [4, 0, 0]])
    np.testing.assert_array_equal(x.grad.numpy(), np.repeat([[2.0], [1.0], [1.0]], 4, axis=1))


# ---- moe_unpermute


def check_moe_unpermute(arrays, num_experts, through, place, *, weighted, compat, column=False):
    rows, rowmap, ids, row_probs = arrays
    row_probs = row_probs[:, None] if column else row_probs
    rng = np.random.default_rng(1)
    d_hidden, d_prob = ordinary(rng, (len(ids), rows.shape[1]), rows.dtype), ordinary(rng, ids.shape)
    y, probs = tensor(rows, place, gradient=True), tensor(row_probs, place, gradient=True)
    outputs = moe_unpermute(
        y,
        tensor(rowmap, place),
        tensor(ids, place),
        probs,
        len(ids),
        num_experts,
        using_weighted_combine=weighted,
        compat=compat,
        validate=False,
    )
    gradients = {"rows": (outputs[0], d_hidden), "probabilities": (outputs[1], d_prob)}
    backward(*zip(*(gradients[name] for name in through), strict=True))
    d_hidden = d_hidden if "rows" in through else np.zeros_like(d_hidden)
    d_prob = d_prob if "probabilities" in through else None
    options = {"using_weighted_combine": weighted, "compat": compat}
    d_y, d_probs = reference.moe_unpermute_backward(d_hidden, d_prob, rows, rowmap, ids, row_probs, **options)
    if "rows" in through:
        assert_bits_equal(y.grad, d_y, what="gradient of hidden_states_unzipped")
    else:
        assert not y.grad.numpy().any()
    if not weighted:
        assert_bits_equal(probs.grad, d_probs, what="gradient of token_prob_unzipped")
        return
    magnitude = reference.moe_unpermute_backward(
        np.abs(d_hidden), None if d_prob is None else np.abs(d_prob), np.abs(rows), rowmap, ids, row_probs, **options
    )[1]
    what = "gradient of token_prob_unzipped"
    assert_dots(probs.grad, d_probs, magnitude, rows.shape[1], added=ids.shape[1], what=what)


def moe_unpermute_arrays(rng, shape, dtype, routing="half_unassigned"):
    problem = make_problem(rng, shape, dtype, routing)
    plan = problem.plan()
    rows = ordinary(rng, (plan.num_rows, shape.H), dtype)
    return rows, reference.plan_to_rowmap(plan), problem.ids, plan.row_probs


combines = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
compats = pytest.mark.parametrize("compat", [None, "paddle"], ids=["ours", "compat"])


@pairwise_of(pytest.mark.parametrize("shape", SHAPES, ids=str), dtypes, combines, empty={"shape": [EMPTY]})
def test_moe_unpermute_of_named_shapes(shape, dtype, weighted, rng, place):
    arrays = moe_unpermute_arrays(rng, shape, dtype, "uniform")
    check_moe_unpermute(arrays, shape.E, ["rows", "probabilities"], place, weighted=weighted, compat=None)


@pairwise_of(
    pytest.mark.parametrize(
        "through", [["rows", "probabilities"], ["rows"], ["probabilities"]], ids=["both", "rows", "probabilities"]
    ),
    dtypes,
    combines,
    compats,
)
def test_moe_unpermute_through_each_output(through, dtype, weighted, compat, rng, place, backend):
    arrays = moe_unpermute_arrays(rng, SMALL, dtype)
    check_moe_unpermute(arrays, SMALL.E, through, place, weighted=weighted, compat=compat)


@compats
@combines
def test_moe_unpermute_with_a_column_of_probabilities(weighted, compat, rng, place, backend):
    arrays = moe_unpermute_arrays(rng, SMALL, np.float32)
    check_moe_unpermute(
        arrays, SMALL.E, ["rows", "probabilities"], place, weighted=weighted, compat=compat, column=True
    )


@compats
@combines
def test_moe_unpermute_with_bad_maps_and_repeated_ids(weighted, compat, rng, place, backend):
    rows, rowmap, ids, row_probs = moe_unpermute_arrays(rng, SMALL, np.float32)
    rowmap = np.where(rng.random(rowmap.shape) < 0.4, rng.integers(-3, len(rows) + 3, rowmap.shape), rowmap)
    ids = np.where(rng.random(ids.shape) < 0.5, rng.integers(-2, SMALL.E + 2, ids.shape), ids)
    arrays = rows, rowmap.astype(np.int32), ids.astype(np.int32), row_probs
    check_moe_unpermute(arrays, SMALL.E, ["rows", "probabilities"], place, weighted=weighted, compat=compat)


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_dot_products_leave_out_no_column(hidden, rng, place):
    """Ones times powers of two: every sum is exact, so one missing column of any width would show."""
    plan = reference.route(np.zeros((1, 1), np.int32), num_experts=1)
    probs = tensor(np.ones(1, np.float32), place, gradient=True)
    y = tensor(np.ones((1, hidden), np.float32), place)
    out = unpermute(y, plan_tensors(plan, place), probs)
    backward([out], [np.ones((1, hidden), np.float32)])
    assert probs.grad.tolist() == [hidden]
