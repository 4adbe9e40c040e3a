# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The bias of `grouped_gemm`, with gradients, in every form of the call and on every backend."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import permute, reference, route, use_backend
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.reference import backend as reference_backend
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols
from tests.ops.problems import backward, make_problem, ordinary, plan_tensors, rounds_before_weights, tensor
from tests.ops.test_lists_of_matrices import OR_LIST
from tests.params import SMALL, SUM_DTYPES
from tests.static.modes import plain_errors

D, N = 7, 12
FORMS = ("rows", "gathered", "by row", "by slot", "to slots", "weighted to slots")
BY_FORM = pytest.mark.parametrize("form", FORMS)
BY_DTYPE = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
BACKENDS = pytest.mark.parametrize("name", [None, "reference"], ids=["automatic", "reference"])
SIZES, OFFSETS = [3, 0, 5, 2], [1, 4, 4, 10, 12]
E = len(SIZES)


class Product:
    """A product with a bias over a plan, with padding, an expert without rows and rows after the last."""

    def __init__(self, rng, form: str, dtype: Any, *, transpose=True, listed=False) -> None:
        shape = SMALL._replace(A=4)
        self.problem, self.form, self.transpose, self.listed = make_problem(rng, shape), form, transpose, listed
        self.problem.ids[self.problem.ids == 2] = -1
        needed = self.problem.plan().num_rows
        self.plan = self.problem.plan(buffer_size=needed + 5)
        rows = shape.T if form == "gathered" else self.plan.num_rows
        w = ordinary(rng, (shape.E, N, D) if transpose else (shape.E, D, N), dtype)
        self.arrays = {"X": ordinary(rng, (rows, D), dtype), "W": w, "bias": ordinary(rng, (shape.E, N), dtype)}
        if form in ("by row", "by slot", "weighted to slots"):
            self.arrays["topk_weights"] = self.plan.row_probs if form == "by row" else self.problem.probs
        slots = self.problem.ids.size
        self.d_out = ordinary(rng, (slots if "slots" in form else self.plan.num_rows, N), dtype)

    def run(self, place) -> dict[str, Any]:
        """The result and all gradients."""
        leaves = {name: tensor(array, place, gradient=True) for name, array in self.arrays.items()}
        given: dict[str, Any] = dict(leaves)
        if self.listed:
            given |= {name: [each * 1 for each in paddle.unbind(leaves[name])] for name in ("W", "bias")}
        options = {"permute_x": self.form == "gathered", "permute_y": "slots" in self.form}
        options |= {"weights_by": "row" if self.form == "by row" else None, "transpose": self.transpose}
        self.rounds = rounds_before_weights(leaves["X"])
        out = grouped_gemm(**given, plan=plan_tensors(self.plan, place), **options)
        backward([out], [self.d_out])
        return {"out": out, **{name: leaf.grad for name, leaf in leaves.items()}}

    def due(self, of) -> dict[str, Any]:
        """In float64, of the operands or of their absolute values."""
        plan, wide = self.plan, {name: of(array.astype(np.float64)) for name, array in self.arrays.items()}
        where: dict[str, Any] = {"m_sizes": plan.tokens_per_expert, "expert_offsets": plan.expert_offsets}
        where |= {"transpose": self.transpose, "row_to_token": plan.row_to_token if self.form == "gathered" else None}
        weights = of(plan.row_probs.astype(np.float64)) if "topk_weights" in wide else None
        operands = {"X": wide["X"], "W": wide["W"], "weights": weights, "bias": wide["bias"]}
        out, d_out = reference.grouped_gemm(**operands, **where), of(self.d_out.astype(np.float64))
        slots = plan.slot_to_row.ravel()
        if "slots" in self.form:
            out = np.append(out, np.zeros((1, N)), axis=0)[slots]
            by_row = np.zeros((plan.num_rows, N))
            by_row[slots[slots >= 0]] = d_out[slots >= 0]
            d_out = by_row
        d_x, d_w, *others = reference.grouped_gemm_backward(d_out, **operands, **where)
        if self.form == "gathered":
            rows = np.flatnonzero(plan.row_to_token >= 0)
            d_rows, d_x = d_x, np.zeros(wide["X"].shape)
            np.add.at(d_x, plan.row_to_token[rows], d_rows[rows])
        found = {"out": out, "X": d_x, "W": d_w, "bias": others[-1]}
        if weights is not None:
            by_slot = np.append(others[0], 0)[slots].reshape(self.problem.probs.shape)
            found["topk_weights"] = others[0] if self.form == "by row" else by_slot
        return found

    def check(self, made: dict[str, Any]) -> None:
        expected, magnitudes = self.due(np.asarray), self.due(np.abs)
        assert made.keys() == expected.keys()
        longest = N * D + int(self.plan.tokens_per_expert.max()) + 4
        for name, got in made.items():
            dtype = to_numpy(got).dtype
            tolerance = dtype_tols(dtype, longest)
            # Rows of W that are weighted, and rows of X that are added up, may be rounded before.
            roundings = dtype_tols(self.arrays["X"].dtype if self.rounds else dtype, longest).of_result
            tolerance = tolerance._replace(of_magnitude=tolerance.of_magnitude + roundings)
            assert_close_sums(got, expected[name].astype(dtype), magnitudes[name], tolerance, what=name)


@BACKENDS
@BY_DTYPE
@BY_FORM
@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
def test_products_and_gradients_follow_the_oracle(transpose, form, dtype, name, rng, place):
    product = Product(rng, form, dtype, transpose=transpose)
    with use_backend(name) if name else contextlib.nullcontext():
        product.check(product.run(place))


@BACKENDS
@BY_FORM
def test_lists_give_the_bits_of_one_tensor(form, name, rng, place):
    product = Product(rng, form, np.float32)
    with use_backend(name) if name else contextlib.nullcontext():
        expected = product.run(place)
        product.listed = True
        for key, made in product.run(place).items():
            assert_bits_equal(made, expected[key], what=key)


@pytest.mark.cpu_only
@BY_FORM
def test_on_interpreted_kernels(interpreted, form, rng):
    product = Product(rng, form, np.float16)
    with use_backend("triton"):
        product.check(product.run("cpu"))
    assert interpreted.launches.count("bias_gradient_kernel") == 1


@pytest.mark.cpu_only
@pytest.mark.parametrize(("wanted", "launches"), [("X", 0), ("W", 0), ("bias", 1), ("topk_weights", 1)])
def test_interpreted_kernels_read_a_bias_for_its_gradient_and_that_of_weights_alone(wanted, launches, interpreted, rng):
    product = Product(rng, "by row", np.float16)
    leaves = {name: tensor(array, "cpu", gradient=name == wanted) for name, array in product.arrays.items()}
    with use_backend("triton"):
        grouped_gemm(**leaves, plan=plan_tensors(product.plan, "cpu"), weights_by="row").sum().backward()
    assert interpreted.launches.count("bias_gradient_kernel") == launches


@BACKENDS
@pytest.mark.parametrize("form", ["rows", "by row"])
def test_rows_of_no_group_are_zeros_and_change_no_gradient(form, name, rng, place):
    product = Product(rng, form, np.float32)
    dead = product.plan.row_to_token < 0
    assert dead.sum() > 5
    product.arrays["X"][dead] = np.nan
    product.d_out[dead] = np.nan
    with use_backend(name) if name else contextlib.nullcontext():
        made = product.run(place)
    assert not made["out"].numpy()[dead].any()
    assert np.isfinite(made["bias"].numpy()).all()
    assert not made["bias"].numpy()[2].any()  # an expert without rows
    assert (product.plan.tokens_per_expert[2], (product.plan.tokens_per_expert > 0).sum()) == (0, 4)


def test_the_sum_is_rounded_once(rng, place):
    """The product is halfway between 1 and the next number: the bias decides, unless the product was rounded before."""
    x = tensor(np.float32([[1, 2.0**-8]]).astype(ml_dtypes.bfloat16), place)
    w, bias = paddle.ones([1, 1, 2], "bfloat16"), paddle.full([1, 1], 2.0**-14, "bfloat16")
    with use_backend("reference"):
        assert grouped_gemm(x, w, [1], bias=bias).item() == 1 + 2.0**-7
    if x.place.is_cpu_place():
        assert grouped_gemm(x, w, [1], bias=bias).item() == 1 + 2.0**-7


@pytest.mark.parametrize("wanted", ["X", "W", "bias"])
@BACKENDS
def test_only_the_gradient_that_is_wanted_is_made(wanted, name, rng, place):
    arrays = {"X": ordinary(rng, (12, D)), "W": ordinary(rng, (E, N, D)), "bias": ordinary(rng, (E, N))}
    leaves = {key: tensor(array, place, gradient=key == wanted) for key, array in arrays.items()}
    with use_backend(name) if name else contextlib.nullcontext():
        grouped_gemm(**leaves, m_sizes=SIZES, expert_offsets=OFFSETS).sum().backward()
    assert {key for key, leaf in leaves.items() if leaf.grad is not None} == {wanted}
    if wanted == "bias":
        np.testing.assert_allclose(leaves["bias"].grad.numpy(), np.repeat([SIZES], N, axis=0).T, rtol=1e-6)


@pytest.mark.parametrize("wanted", ["X", "W"])
def test_kernels_make_no_gradient_that_is_not_wanted(wanted, rng, place, monkeypatch):
    arrays = {"X": ordinary(rng, (12, D)), "W": ordinary(rng, (E, N, D))}
    leaves = {key: tensor(array, place, gradient=key == wanted) for key, array in arrays.items()}
    kernels, seen = reference_backend.kernels, []
    original = kernels.grouped_gemm_backward
    monkeypatch.setattr(kernels, "grouped_gemm_backward", lambda *given: seen.append(given[-1]) or original(*given))
    with use_backend("reference"):
        grouped_gemm(**leaves, m_sizes=SIZES, expert_offsets=OFFSETS).sum().backward()
    assert seen == [(wanted == "X", wanted == "W", False, False)]  # nor of weights and biases that are not given


def product_of_sizes(x, w, bias, ids):
    return grouped_gemm(x, w, SIZES, bias=bias)


def product_of_plan(x, w, bias, ids):
    return grouped_gemm(x, w, plan=route(ids, num_experts=E), permute_x=True, bias=bias)


@pytest.mark.parametrize("function", [product_of_sizes, product_of_plan], ids=lambda function: function.__name__)
def test_a_graph_need_not_know_how_many_matrices_there_are(function, rng, place):
    given = [ordinary(rng, (12, D)), ordinary(rng, (E, N, D)), ordinary(rng, (E, N)), np.arange(12, dtype=np.int32) % E]
    operands = [tensor(array, place) for array in (*given[:3], given[3].reshape(12, 1))]
    shapes = ([12, D], "float32"), ([None, N, D], "float32"), ([None, N], "float32"), ([12, 1], "int32")
    specs = [paddle.static.InputSpec(*each) for each in shapes]
    traced = paddle.jit.to_static(function, input_spec=specs, full_graph=True)
    np.testing.assert_allclose(traced(*operands).numpy(), function(*operands).numpy(), rtol=1e-5, atol=1e-5)


@BACKENDS
def test_no_rows_at_all(name, rng, place):
    bias = tensor(ordinary(rng, (E, N)), place, gradient=True)
    x, w = paddle.zeros([0, D]), tensor(ordinary(rng, (E, N, D)), place)
    with use_backend(name) if name else contextlib.nullcontext():
        out = grouped_gemm(x, w, [0] * E, bias=bias)
        out.sum().backward()
    assert out.shape == [0, N]
    assert not bias.grad.numpy().any()


def test_gradients_repeat_bit_for_bit(rng, place):
    product = Product(rng, "by slot", SUM_DTYPES[0])
    first, second = product.run(place), product.run(place)
    for name, expected in first.items():
        assert_bits_equal(second[name], expected, what=name)


@pytest.mark.cpu_only
def test_mixed_precision_leaves_the_sum_on_a_cpu_alone(rng, place):
    product = Product(rng, "rows", np.float32)
    expected = product.run(place)["out"]
    with paddle.amp.auto_cast(level="O2", dtype="bfloat16"):
        assert_bits_equal(product.run(place)["out"], expected)


def of_sizes(x, w, bias, sizes):
    return grouped_gemm(x, w, sizes, expert_offsets=OFFSETS, bias=bias)


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
@pytest.mark.parametrize("full_graph", [True, False], ids=["syntax", "bytecode"])
def test_a_traced_function_gives_the_gradients_of_the_bias(full_graph, rng, place):
    arrays = ordinary(rng, (14, D)), ordinary(rng, (E, N, D)), ordinary(rng, (E, N))
    d_out = ordinary(rng, (14, N))

    def run(function):
        leaves = [tensor(each, place, gradient=True) for each in arrays]
        out = function(*leaves, tensor(np.int32(SIZES), place))
        backward([out], [d_out])
        return [out, *(leaf.grad for leaf in leaves)]

    with plain_errors():
        made = run(paddle.jit.to_static(of_sizes, full_graph=full_graph))
    for got, due in zip(made, run(of_sizes), strict=True):
        np.testing.assert_allclose(got.numpy(), due.numpy(), rtol=1e-5, atol=1e-5)


def test_the_bias_is_that_of_a_loop_over_experts(rng, place):
    """Without the oracle: what a user would write."""
    product = Product(rng, "gathered", np.float32)
    plan, arrays = plan_tensors(product.plan, place), product.arrays
    x, w, bias = (tensor(arrays[name], place) for name in ("X", "W", "bias"))
    rows, expected = permute(x, plan)[0].numpy(), np.zeros((product.plan.num_rows, N), np.float32)
    for expert, first in enumerate(product.plan.expert_offsets[:-1]):
        those = slice(first, first + product.plan.tokens_per_expert[expert])
        expected[those] = rows[those] @ arrays["W"][expert].T + arrays["bias"][expert]
    got = grouped_gemm(x, w, plan=plan, permute_x=True, bias=bias)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


FLOAT32 = 'of dtype float32, but got float16; convert it with .astype("float32")'
BAD = {
    "fewer experts": (paddle.zeros([3, 5]), ValueError, "bias must be of shape [2, 5], but got [3, 5]"),
    "other columns": (paddle.zeros([2, 3]), ValueError, "bias must be of shape [2, 5], but got [2, 3]"),
    "flat": (paddle.zeros([10]), ValueError, "bias must be of shape [2, 5], but got [10]"),
    "dtype": (paddle.zeros([2, 5], "float16"), TypeError, f"bias must be {FLOAT32}"),
    "array": (np.zeros((2, 5)), TypeError, f"bias must be {OR_LIST}, but got ndarray"),
    "short list": ([paddle.zeros([5])], ValueError, "bias must be a list of 2 vectors, but got 1 of them"),
    "list": ([paddle.zeros([5]), paddle.zeros([4])], ValueError, "bias[1] must be of shape [5], but got [4]"),
}


@pytest.mark.parametrize(("bias", "error", "text"), BAD.values(), ids=BAD.keys())
def test_a_bad_bias_is_named(bias, error, text):
    with pytest.raises(error, match=f"^grouped_gemm: {re.escape(text)}$"):
        grouped_gemm(paddle.zeros([4, 3]), paddle.zeros([2, 5, 3]), [2, 2], bias=bias)
