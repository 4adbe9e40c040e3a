# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm: every expert's product over its own rows, with gradients, against the oracle."""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

import ml_dtypes
import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import DTypeLike

from paddle_moe_ops import reference, route, use_backend
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols
from tests.ops.problems import (
    SEEDS,
    backward,
    make_problem,
    ordinary,
    plan_tensors,
    products_in_graphs_are,
    rounds_before_weights,
    tensor,
)
from tests.params import MANY_EXPERTS, ODD, PADDED, SUM_DTYPES
from tests.static.modes import plain_errors

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BY_DTYPE = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
BY_LAYOUT = pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])


class Groups(NamedTuple):
    """Rows in all, those of each expert, and where they begin."""

    num_rows: int
    sizes: list[int]
    offsets: list[int] | None = None


GROUPS = {
    "uneven": Groups(74, [63, 0, 1, 10]),
    "no rows": Groups(0, [0, 0, 0]),
    "empty groups only": Groups(5, [0, 0]),
    "one group": Groups(1025, [1025]),
    "rows after the last": Groups(20, [3, 0, 5, 2]),
    "padding": Groups(20, [3, 0, 5, 2], [0, 4, 4, 12, 16]),
    "padding in front": Groups(16, [3, 0, 5, 2], [1, 4, 4, 12, 16]),
}
FORMS_OF_COUNTS = ("lists", "arrays", "tensors")
BY_GROUPS = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())


def live_rows(groups: Groups) -> np.ndarray:
    """Mask of the rows that belong to a group."""
    starts = groups.offsets or np.cumsum([0, *groups.sizes])
    live = np.zeros(groups.num_rows, np.bool_)
    for start, size in zip(starts, groups.sizes, strict=False):
        live[start : start + size] = True
    return live


def assert_follows_the_oracle(rng, groups, inner, outer, dtype: DTypeLike, transpose, form, place) -> None:
    x = ordinary(rng, (groups.num_rows, inner), dtype)
    w = ordinary(rng, (len(groups.sizes), outer, inner) if transpose else (len(groups.sizes), inner, outer), dtype)
    dy = ordinary(rng, (groups.num_rows, outer), dtype)
    # Rows of no group must not even be read.
    live = live_rows(groups)[:, None]
    x, dy = np.where(live, x, np.nan).astype(dtype), np.where(live, dy, np.nan).astype(dtype)
    x_tensor, w_tensor = tensor(x, place, gradient=True), tensor(w, place, gradient=True)
    counts = [groups.sizes, groups.offsets]
    given = {"lists": list, "arrays": np.int64, "tensors": lambda numbers: tensor(np.int32(numbers), place)}[form]
    counts = [None if numbers is None else given(numbers) for numbers in counts]
    out = grouped_gemm(x_tensor, w_tensor, counts[0], transpose, expert_offsets=counts[1])
    backward([out], [dy])

    where = {"transpose": transpose, "expert_offsets": groups.offsets}
    expected = [
        reference.grouped_gemm(x, w, groups.sizes, **where),
        *reference.grouped_gemm_backward(dy, x, w, groups.sizes, **where),
    ]
    x, w, dy = (np.abs(array.astype(np.float64)) for array in (x, w, dy))
    magnitudes = [
        reference.grouped_gemm(x, w, groups.sizes, **where),
        *reference.grouped_gemm_backward(dy, x, w, groups.sizes, **where),
    ]
    chains = inner, outer, max(groups.sizes)
    for got, wanted, magnitude, chain, what in zip(
        (out, x_tensor.grad, w_tensor.grad), expected, magnitudes, chains, ("out", "dX", "dW"), strict=True
    ):
        assert_close_sums(got, wanted, magnitude, dtype_tols(dtype, chain), what=what)
    assert not out.numpy()[~live[:, 0]].any()


@pytest.mark.parametrize("form", FORMS_OF_COUNTS)
@BY_LAYOUT
@BY_DTYPE
@BY_GROUPS
def test_products_and_gradients_follow_the_oracle(groups, dtype, transpose, form, rng, place):
    assert_follows_the_oracle(rng, groups, 7, 72, dtype, transpose, form, place)


@settings(max_examples=30)
@given(st.data())
def test_any_groups_follow_the_oracle(place, data):
    rng = np.random.default_rng(data.draw(SEEDS))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes) + 1, max_size=len(sizes) + 1))
    starts = np.cumsum(gaps[:-1]) + np.cumsum([0, *sizes[:-1]])
    offsets = [*starts.tolist(), int(starts[-1]) + sizes[-1]] if any(gaps[:-1]) else None
    groups = Groups(sum(sizes) + sum(gaps), sizes, offsets)
    inner, outer = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from(SUM_DTYPES))
    form = data.draw(st.sampled_from(FORMS_OF_COUNTS))
    assert_follows_the_oracle(rng, groups, inner, outer, dtype, data.draw(st.booleans()), form, place)


@pytest.mark.parametrize("buffer_size", [-1, 40, 4000], ids=["exact", "small buffer", "large buffer"])
@pytest.mark.parametrize("shape", [ODD, PADDED, MANY_EXPERTS], ids=str)
def test_a_plan_says_where_groups_are(shape, buffer_size, rng, place):
    plan = make_problem(rng, shape).plan(buffer_size=buffer_size)
    x, w = ordinary(rng, (plan.num_rows, 5)), ordinary(rng, (shape.E, 3, 5))
    on_device = plan_tensors(plan, place)
    out = grouped_gemm(
        tensor(x, place), tensor(w, place), on_device.tokens_per_expert, expert_offsets=on_device.expert_offsets
    )
    expected = np.zeros((plan.num_rows, 3))
    for row in np.flatnonzero(plan.row_to_expert >= 0):
        expected[row] = w[plan.row_to_expert[row]].astype(np.float64) @ x[row]
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-5)


def fused(problem, plan, form, leaves):
    """The product that a form of the call gives, from leaves x, w and weights."""
    if form == "gathered":
        return grouped_gemm(leaves["x"], leaves["w"], plan=plan, permute_x=True)
    weights = {} if form == "plan" else {"topk_weights": leaves["weights"], "weights_by": form.split()[-1]}
    return grouped_gemm(leaves["x"], leaves["w"], plan=plan, **weights)


@pytest.mark.parametrize("name", [None, "reference"])
@pytest.mark.parametrize("buffer_size", [-1, 40, 4000], ids=["exact", "small buffer", "large buffer"])
@pytest.mark.parametrize("form", ["plan", "gathered", "weighted by row", "weighted by slot"])
@BY_DTYPE
def test_permutation_and_weights_as_part_of_the_product(dtype, form, buffer_size, name, rng, place):
    shape = PADDED
    problem = make_problem(rng, shape)
    plan = problem.plan(buffer_size=buffer_size)
    tokens = form == "gathered"
    arrays = {
        "x": ordinary(rng, (shape.T if tokens else plan.num_rows, 6), dtype),
        "w": ordinary(rng, (shape.E, 11, 6), dtype),
    }
    if form.startswith("weighted"):
        arrays["weights"] = problem.probs if form.endswith("slot") else plan.row_probs
    leaves = {name: tensor(array, place, gradient=True) for name, array in arrays.items()}
    dy = ordinary(rng, (plan.num_rows, 11), dtype)
    with use_backend(name) if name else contextlib.nullcontext():
        out = fused(problem, plan_tensors(plan, place), form, leaves)
    backward([out], [dy])

    maps = {"row_to_token": plan.row_to_token if tokens else None}
    if "weights" in arrays:
        maps["weights"] = plan.row_probs
    groups = {"m_sizes": plan.tokens_per_expert, "expert_offsets": plan.expert_offsets, **maps}
    magnitudes = {name: np.abs(array) for name, array in arrays.items()}
    expected = oracle(plan, dy, arrays, groups, form)
    terms = oracle(plan, np.abs(dy), magnitudes, groups, form)
    longest = 11 * 6 + int(plan.tokens_per_expert.max()) + shape.K
    apart = "weights" in arrays and name is None and rounds_before_weights(leaves["x"])
    for got, wanted, magnitude, what in zip(
        (out, *(leaf.grad for leaf in leaves.values())), expected, terms, ("out", *leaves), strict=True
    ):
        # Gathered rows have gradients that are rounded before they are added up, and weighted rows may be rounded
        # before they meet the gradients of the product. So is the product where weights are no part of it, and its
        # gradient.
        tolerance = dtype_tols(wanted.dtype, longest)
        rounded = (
            (what == "x" and tokens) or (what == "w" and "weights" in arrays) or (what in ("x", "weights") and apart)
        )
        roundings = dtype_tols(dtype, longest).of_result if rounded else 0
        tolerance = tolerance._replace(of_magnitude=tolerance.of_magnitude + roundings)
        assert_close_sums(got, wanted, magnitude, tolerance, what=what)


def oracle(plan, dy, arrays, groups, form):
    """The product, and the gradients of x, w and the weights if there are any, in float64 up to the end."""
    dtype = arrays["x"].dtype
    x, w, dy = (each.astype(np.float64) for each in (arrays["x"], arrays["w"], dy))
    product = reference.grouped_gemm(x, w, **groups)
    d_x, d_w, *d_weights = reference.grouped_gemm_backward(dy, x, w, **groups)
    if form == "gathered":
        d_rows, d_x = d_x, np.zeros_like(x)
        rows = np.flatnonzero(plan.row_to_token >= 0)
        np.add.at(d_x, plan.row_to_token[rows], d_rows[rows])
    if form == "weighted by slot":
        d_weights = [np.where(plan.slot_to_row >= 0, d_weights[0][plan.slot_to_row], np.float32(0))]
    return [*(each.astype(dtype) for each in (product, d_x, d_w)), *d_weights]


@pytest.mark.parametrize("wanted", ["X", "W"])
def test_only_the_gradient_that_is_wanted_is_made(wanted, rng, place):
    leaves = {"X": tensor(ordinary(rng, (4, 3)), place), "W": tensor(ordinary(rng, (2, 5, 3)), place)}
    leaves[wanted].stop_gradient = False
    grouped_gemm(leaves["X"], leaves["W"], [1, 3]).sum().backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == {wanted}


@pytest.mark.gpu_only  # where our own kernels multiply
def test_results_repeat_bit_for_bit(rng, place):
    x, w = (tensor(ordinary(rng, shape, BFLOAT16), place) for shape in ((300, 64), (4, 40, 64)))
    first, second = (grouped_gemm(x, w, [100, 0, 150, 50]) for _ in range(2))
    assert_bits_equal(first, to_numpy(second))


def assert_same_products(got, expected, magnitudes, chain):
    """Paddle's own matmul may add up in another order when another executor calls it."""
    for value, wanted, terms in zip(got, expected, magnitudes, strict=True):
        assert_close_sums(value, wanted, terms, dtype_tols(np.float32, chain), what="product")


def product_of_a_list(x, w):
    return grouped_gemm(x, w, [3, 0, 5], False, expert_offsets=[0, 4, 4, 10])


def product_of_tensors(x, w, sizes, offsets):
    return grouped_gemm(x, w, sizes, expert_offsets=offsets)


# Paddle says so of its own full_like, whenever it makes a gradient in a graph.
@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
@pytest.mark.parametrize("full_graph", [True, False], ids=["syntax", "bytecode"])
def test_a_traced_function_with_a_list_of_sizes(full_graph, rng, place):
    arrays = ordinary(rng, (12, 7)), ordinary(rng, (3, 7, 5)), ordinary(rng, (12, 5))

    def run(function, x, w, d_out):
        leaves = [tensor(x, place, gradient=True), tensor(w, place, gradient=True)]
        out = function(*leaves)
        backward([out], [d_out])
        return [out, *(leaf.grad for leaf in leaves)]

    with plain_errors():
        got = run(paddle.jit.to_static(product_of_a_list, full_graph=full_graph), *arrays)
    magnitudes = run(product_of_a_list, *(np.abs(array) for array in arrays))
    assert_same_products(got, run(product_of_a_list, *arrays), magnitudes, chain=7)


def product_of_a_list_at_tensors(x, w, offsets):
    return grouped_gemm(x, w, [3, 0, 5], expert_offsets=offsets)


@pytest.mark.parametrize("rows", [12, None], ids=["known", "unknown"])
def test_a_graph_with_a_list_of_sizes_at_offsets_of_a_tensor(rows, rng, place):
    specs = [paddle.static.InputSpec(shape, "float32") for shape in ([rows, 7], [3, 5, 7])]
    specs.append(paddle.static.InputSpec([4], "int64"))
    traced = paddle.jit.to_static(product_of_a_list_at_tensors, input_spec=specs, full_graph=True)
    x, w = tensor(ordinary(rng, (12, 7)), place), tensor(ordinary(rng, (3, 5, 7)), place)
    offsets = tensor(np.int64([1, 4, 4, 10]), place)
    expected, magnitude = (product_of_a_list_at_tensors(*each, offsets) for each in ((x, w), (x.abs(), w.abs())))
    assert_same_products([traced(x, w, offsets)], [expected], [magnitude], chain=7)


@pytest.mark.cpu_only
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_mixed_precision_in_a_static_graph_leaves_products_on_a_cpu_alone(level, rng, place):
    """Paddle has no CPU kernel for a matmul in the dtypes of mixed precision."""
    x, w = ordinary(rng, (5, 7)), ordinary(rng, (2, 3, 7))
    expected, magnitude = (
        grouped_gemm(*(tensor(each, place) for each in arrays), [2, 3]).numpy()
        for arrays in ((x, w), (np.abs(x), np.abs(w)))
    )
    program = paddle.static.Program()
    paddle.enable_static()
    try:
        with paddle.static.program_guard(program):
            x_value, w_value = paddle.static.data("x", [5, 7]), paddle.static.data("w", [2, 3, 7])
            with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
                assert products_in_graphs_are(paddle.bfloat16)
                out = grouped_gemm(x_value, w_value, [2, 3])
        (got,) = paddle.static.Executor().run(program, feed={"x": x, "w": w}, fetch_list=[out])
    finally:
        paddle.disable_static()
    assert_same_products([got], [expected], [magnitude], chain=7)


def test_groups_that_do_not_fit_are_cut_in_a_graph(rng, place):
    """An error could only be raised when the program runs; nothing is read out of bounds."""
    free = {"x": [None, 3], "w": [2, 5, 3]}
    specs = [paddle.static.InputSpec(shape, "float32", name) for name, shape in free.items()]
    specs += [paddle.static.InputSpec([size], "int32", name) for name, size in (("sizes", 2), ("offsets", 3))]
    traced = paddle.jit.to_static(product_of_tensors, input_spec=specs, full_graph=True)
    x, w = ordinary(rng, (6, 3)), ordinary(rng, (2, 5, 3))
    for sizes, offsets, good in (
        ([2, 9], [0, 3, 6], ([2, 3], [0, 3, 6])),
        ([5, 2], [0, 3, 6], ([5, 0], [0, 5, 6])),
        ([-4, 2], [-7, 3, 6], ([0, 2], [0, 3, 6])),
        ([1, 2], [9, 99, 999], ([0, 0], [6, 6, 6])),
    ):
        arguments = (tensor(np.int32(numbers), place) for numbers in (sizes, offsets))
        expected = reference.grouped_gemm(x, w, good[0], expert_offsets=good[1])
        out = traced(tensor(x, place), tensor(w, place), *arguments)
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-6)


PLAN = route(paddle.to_tensor([[0, 1], [1, 0]], dtype="int32"), num_experts=2, validate=False)
X, W = paddle.zeros([6, 3]), paddle.zeros([2, 5, 3])
OF_PLAN = {"plan": PLAN, "m_sizes": None, "X": X[:4]}
BAD = {
    "X": ({"X": X[0]}, ValueError, "X must be of at least two dimensions, [..., D], but got [3]"),
    "dtype": (
        {"X": X.astype("int32")},
        TypeError,
        "X must be of dtype bfloat16, float16 or float32, but got int32",
    ),
    "two dtypes": (
        {"W": W.astype("bfloat16")},
        TypeError,
        'W must be of dtype float32, but got bfloat16; convert it with .astype("float32")',
    ),
    "layout": (
        {"transpose": False},
        ValueError,
        "W must be of shape [E, 3, N] with transpose=False, but got [2, 5, 3]",
    ),
    "inner": ({"X": X[:, :2]}, ValueError, "W must be of shape [E, N, 2] with transpose=True, but got [2, 5, 3]"),
    "no experts": ({"W": W[:0]}, ValueError, "W must be of shape [E, N, D] with E, D and N >= 1, but got [0, 5, 3]"),
    "flag": ({"transpose": 1}, TypeError, "transpose must be a bool, but got 1 of type int"),
    "length": ({"m_sizes": [6]}, ValueError, "m_sizes must be of length 2, but got length 1"),
    "type": ({"m_sizes": 6}, TypeError, "m_sizes must be a list of ints or a 1-D int array or tensor, but got int"),
    "negative": ({"m_sizes": [-1, 2]}, ValueError, "m_sizes[0] must be from 0 to 2147483647, but got -1"),
    "array": (
        {"m_sizes": np.array([1.5, 2])},
        TypeError,
        "m_sizes must be a list of ints or a 1-D int array or tensor, but got an array of float64 [2]",
    ),
    "plan by position": (
        {"m_sizes": PLAN},
        TypeError,
        "m_sizes must be a list of ints or a 1-D int array or tensor, "
        "but got a Plan, which must be passed by keyword, as plan",
    ),
    "float": ({"m_sizes": [1.0, 2]}, TypeError, "m_sizes[0] must be an int, but got float"),
    "float tensor": (
        {"m_sizes": paddle.to_tensor([2.0, 2.0])},
        TypeError,
        "m_sizes must be of dtype int32 or int64, but got float32",
    ),
    "float offsets": (
        {"expert_offsets": paddle.to_tensor([0.0, 2.0, 4.0], dtype="float64")},
        TypeError,
        "expert_offsets must be of dtype int32 or int64, but got float64",
    ),
    "tensor": (
        {"m_sizes": paddle.to_tensor([1, 2, 3])},
        ValueError,
        "m_sizes must be of shape [2], but got [3]",
    ),
    "too many": (
        {"m_sizes": [3, 4]},
        ValueError,
        "m_sizes must be sizes that add up to at most 6, the rows of X, but got [3, 4], which add up to 7",
    ),
    "offsets length": (
        {"expert_offsets": [0, 3]},
        ValueError,
        "expert_offsets must be of length 3, but got length 2",
    ),
    "offsets end": (
        {"expert_offsets": [0, 3, 7]},
        ValueError,
        "expert_offsets[2] must be at most 6, the rows of X, but got 7",
    ),
    "plan and sizes": ({"plan": PLAN}, ValueError, "m_sizes must be None where plan is given, but got list"),
    "no plan": ({"plan": (6, 2)}, TypeError, "plan must be a paddle_moe_ops.Plan, but got tuple"),
    "no sizes": ({"m_sizes": None}, ValueError, "m_sizes or plan must be given, but got neither"),
    "other experts": (
        {"plan": PLAN, "m_sizes": None, "X": X[:4], "W": paddle.zeros([3, 5, 3])},
        ValueError,
        "W must be matrices of the 2 experts of plan, but got [3, 5, 3]",
    ),
    "rows of plan": (
        {"plan": PLAN, "m_sizes": None},
        ValueError,
        "X must be of shape [4, hidden], the rows of plan, but got [6, 3]",
    ),
    "permute without plan": (
        {"permute_x": True},
        ValueError,
        "plan must be a paddle_moe_ops.Plan with permute_x, but got None",
    ),
    "both": (
        {"plan": PLAN, "m_sizes": None, "permute_x": True, "topk_weights": paddle.ones([4])},
        ValueError,
        "topk_weights must be None with permute_x, but got Tensor",
    ),
    "permute_y without plan": (
        {"permute_y": True},
        ValueError,
        "plan must be a paddle_moe_ops.Plan with permute_y, but got None",
    ),
    "permuted twice": (
        {**OF_PLAN, "permute_x": True, "permute_y": True},
        ValueError,
        "permute_y must be False with permute_x, but got True",
    ),
    "order": ({"weights_by": "token"}, ValueError, "weights_by must be one of None, 'row', 'slot', but got 'token'"),
    "slots without plan": (
        {"topk_weights": paddle.ones([6]), "weights_by": "slot"},
        ValueError,
        "weights_by must be 'row' or None without plan, but got 'slot'",
    ),
    "rows or slots": (
        {**OF_PLAN, "topk_weights": paddle.ones([4])},
        ValueError,
        "weights_by must be 'row' or 'slot' with flat topk_weights and a plan, but got None",
    ),
    "matrix by row": (
        {**OF_PLAN, "topk_weights": paddle.ones([2, 2]), "weights_by": "row"},
        ValueError,
        "weights_by must be 'slot' or None with [T, K] weights, but got 'row'",
    ),
    "neither rows nor slots": (
        {**OF_PLAN, "topk_weights": paddle.ones([5]), "weights_by": "row"},
        ValueError,
        "topk_weights must be of shape [4] by row of plan, or [2, 2] by slot, but got [5]",
    ),
    "too few by slot": (
        {**OF_PLAN, "topk_weights": paddle.ones([3]), "weights_by": "slot"},
        ValueError,
        "topk_weights must be of shape [4] by row of plan, or [2, 2] or [4] by slot, but got [3]",
    ),
    "weights": (
        {"topk_weights": paddle.ones([5])},
        ValueError,
        "topk_weights must be of shape [6] without plan, but got [5]",
    ),
    "weights by slot": (
        {"topk_weights": paddle.ones([3, 2])},
        ValueError,
        "topk_weights must be of shape [6] without plan, but got [3, 2]",
    ),
    "overlap": (
        {"expert_offsets": [0, 1, 6]},
        ValueError,
        "expert_offsets[1] must be at least 2, the end of group 0, but got 1",
    ),
    "beyond": (
        {"expert_offsets": [0, 4, 5]},
        ValueError,
        "expert_offsets[2] must be at least 6, the end of group 1, but got 5",
    ),
}


@pytest.mark.parametrize(("changes", "error", "text"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named(changes, error, text, place):
    with pytest.raises(error, match=f"^grouped_gemm: {re.escape(text)}$"):
        grouped_gemm(**{"X": X, "W": W, "m_sizes": [2, 2], **changes})


def test_more_experts_than_an_operator_takes():
    x, w = paddle.ones([2, 1]), paddle.full([70000, 1, 1], 3.0)
    sizes = paddle.zeros([70000], "int32")
    sizes[69999] = 2
    assert grouped_gemm(x, w, sizes).tolist() == [[3.0], [3.0]]


def test_a_graph_adds_the_bias_to_the_rows_that_it_multiplies():
    """Also where an offset is bad, which a graph does not look at."""
    x, w, bias = paddle.ones([6, 1]), paddle.full([2, 1, 1], 3.0), paddle.to_tensor([[10.0], [20.0]])

    def product(x, sizes, offsets):
        return grouped_gemm(x, w, sizes, expert_offsets=offsets, bias=bias)

    specs = [paddle.static.InputSpec([-1, 1], "float32")]
    specs += [paddle.static.InputSpec([count], "int32") for count in (2, 3)]
    traced = paddle.jit.to_static(product, input_spec=specs, full_graph=True)
    out = traced(x, paddle.to_tensor([3, 2], "int32"), paddle.to_tensor([-2, 4, 6], "int32"))
    assert out.flatten().tolist() == [13.0, 13.0, 13.0, 0.0, 23.0, 23.0]
