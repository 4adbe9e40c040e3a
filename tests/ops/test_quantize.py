# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 rows: the oracle's codes and scales from every function and backend, and gradients straight through."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import (
    dequantize_1x128,
    permute,
    quantize_1x128,
    quantized_experts,
    reference,
    route,
    unpermute,
)
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.testing.equality import assert_bits_equal
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
from tests.params import SHAPES, SMALL, SUM_DTYPES
from tests.static.modes import plain_errors

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = {"fp8_1x128": False, "fp8_1x128_ue8m0": True}
LAYOUTS = ("row", "col")

by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_format = pytest.mark.parametrize("quantize", FORMATS)
by_dtype = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)


def assert_quantized(got: tuple[paddle.Tensor, Any], expected: tuple[Any, Any]) -> None:
    for what, actual, wanted in zip(("codes", "scales"), got, expected, strict=True):
        assert_bits_equal(actual, wanted, what=what)
        assert actual.stop_gradient


@pairwise_of(pytest.mark.parametrize("hidden", [1, 72, 200, 640]), by_dtype, by_format, by_layout)
def test_rows_equal_the_oracle(hidden, dtype, quantize, layout, rng, place, backend):
    options = {"ue8m0": FORMATS[quantize], "scale_layout": layout}
    x = every_kind(rng, (11, hidden), dtype)
    assert_quantized(quantize_1x128(tensor(x, place), **options), reference.quantize_1x128(x, **options))


@given(
    case=routings(),
    dtype=st.sampled_from(SUM_DTYPES),
    hidden=st.sampled_from([1, 72, 200, 520]),
    quantize=st.sampled_from(sorted(FORMATS)),
    layout=st.sampled_from(LAYOUTS),
    amax_min=st.sampled_from([2.0**-100, 1e-4, 1.0]),
    seed=SEEDS,
)
@settings(max_examples=100)
def test_permuted_rows_equal_the_oracle(case: Routing, dtype, hidden, quantize, layout, amax_min, seed, place):
    plan = case.oracle()
    x = every_kind(np.random.default_rng(seed), (plan.num_tokens, hidden), dtype)
    options = {"scale_layout": layout, "amax_min": amax_min}
    got = permute(tensor(x, place), plan_tensors(plan, place), quantize=quantize, **options)
    assert_quantized(got, reference.permute_quantized(x, plan, ue8m0=FORMATS[quantize], **options))


@by_layout
@by_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_permuted_rows_of_named_shapes(shape, quantize, layout, rng, place):
    problem = make_problem(rng, shape, BFLOAT16, "zipf")
    plan = problem.plan()
    got = permute(tensor(problem.x, place), plan_tensors(plan, place), quantize=quantize, scale_layout=layout)
    expected = reference.permute_quantized(problem.x, plan, ue8m0=FORMATS[quantize], scale_layout=layout)
    assert_quantized(got, expected)


@by_format
def test_quantise_then_permute_equals_quantise_while_permuting(quantize, rng, place, backend):
    problem = make_problem(rng, SMALL._replace(H=600, A=16), BFLOAT16)
    x, plan = tensor(problem.x, place), plan_tensors(problem.plan(), place)
    codes, scales = quantize_1x128(x, ue8m0=FORMATS[quantize])
    expected = permute(codes, plan, scales)
    assert_quantized(permute(x, plan, quantize=quantize), tuple(map(to_numpy, expected)))


@pytest.mark.parametrize("fill_padding", ["all", "meta", "none"])
@by_layout
def test_padding_holds_what_was_asked_for(layout, fill_padding, rng, place, backend):
    problem = make_problem(rng, SMALL._replace(A=16), BFLOAT16)
    plan = problem.plan(buffer_size=91)
    codes, scales = permute(
        tensor(problem.x, place),
        plan_tensors(plan, place),
        quantize="fp8_1x128",
        scale_layout=layout,
        fill_padding=fill_padding,
    )
    expected_codes, expected_scales = reference.permute_quantized(problem.x, plan)
    used = np.flatnonzero(plan.row_to_token >= 0)
    defined = np.arange(91) if fill_padding == "all" else used
    defined_scales = used if fill_padding == "none" else np.arange(91)
    by_row = to_numpy(scales)
    if layout == "col":
        assert by_row.shape == (1, 92)
        assert fill_padding == "none" or by_row[0, 91] == 0
        by_row = np.ascontiguousarray(by_row.T)
    assert_bits_equal(to_numpy(codes)[defined], expected_codes[defined], what="codes")
    assert_bits_equal(by_row[defined_scales], expected_scales[defined_scales], what="scales")


def test_strided_rows(rng, place):
    wide = every_kind(rng, (9, 300), BFLOAT16)
    for x in (tensor(wide, place)[:, 7:207], tensor(wide, place)[::2], tensor(wide, place).t()):
        assert_quantized(quantize_1x128(x), reference.quantize_1x128(to_numpy(x)))


@by_layout
@by_format
@by_dtype
def test_dequantised_rows_equal_the_oracle(dtype, quantize, layout, rng, place, backend):
    x = ordinary(rng, (9, 600), np.float32)
    codes, scales = reference.quantize_1x128(x, ue8m0=FORMATS[quantize], scale_layout=layout)
    paddle_dtype = getattr(paddle, str(dtype))
    rows = dequantize_1x128(tensor(codes, place), tensor(scales, place), scale_layout=layout, dtype=paddle_dtype)
    assert rows.stop_gradient
    assert_bits_equal(rows, reference.dequantize_1x128(codes, scales, scale_layout=layout, dtype=dtype))


# ---- the autograd node


class Experts:
    """out = rows * weight, with one weight for each column: exact gradients by hand."""

    def __init__(self, layout: str = "row") -> None:
        self.layout = layout
        self.calls: list[str] = []

    def rows(self, codes, scales):
        return dequantize_1x128(codes, scales, scale_layout=self.layout, dtype=paddle.float32)

    def forward(self, codes, scales, weight):
        assert not paddle.is_grad_enabled()
        self.calls.append("forward")
        return (self.rows(codes, scales) * weight).astype("bfloat16")

    def vjp(self, d_out, codes, scales, weight):
        self.calls.append("vjp")
        d_wide = d_out.astype("float32")
        return (d_wide * weight).astype("bfloat16"), (d_wide * self.rows(codes, scales)).sum(axis=0)


@by_layout
@by_format
def test_gradients_go_straight_through(quantize, layout, rng, place, backend):
    problem = make_problem(rng, SMALL._replace(H=200, A=4), BFLOAT16)
    plan = problem.plan()
    x, weight = tensor(problem.x, place, gradient=True), tensor(ordinary(rng, (200,)), place, gradient=True)
    experts = Experts(layout)
    out = quantized_experts(
        x,
        plan_tensors(plan, place),
        experts.forward,
        experts.vjp,
        weight,
        quantize=quantize,
        scale_layout=layout,
    )
    codes, scales = reference.permute_quantized(problem.x, plan, ue8m0=FORMATS[quantize])
    rows = reference.dequantize_1x128(codes, scales, dtype=np.float32)
    assert_bits_equal(out, reference.round_to(rows * weight.numpy(), BFLOAT16), what="output")
    d_out = ordinary(rng, (plan.num_rows, 200), BFLOAT16)
    backward([out], [d_out])
    d_wide = d_out.astype(np.float32)
    d_rows = reference.round_to(d_wide * weight.numpy(), BFLOAT16)
    assert_bits_equal(x.grad, reference.permute_backward(d_rows, plan), what="gradient of x")
    np.testing.assert_allclose(weight.grad.numpy(), (d_wide * rows).sum(axis=0), rtol=1e-4, atol=1e-5)
    assert experts.calls == ["forward", "vjp"]


def test_node_without_tensors_and_a_gradient_alone(rng, place, backend):
    problem = make_problem(rng, SMALL, np.float32)
    x, plan = tensor(problem.x, place, gradient=True), plan_tensors(problem.plan(), place)
    out = quantized_experts(
        x, plan, lambda codes, scales: dequantize_1x128(codes, scales), lambda d_out, *_: d_out.astype("float32") * 2
    )
    d_out = ordinary(rng, tuple(out.shape), BFLOAT16)
    backward([out], [d_out])
    expected = reference.permute_backward(d_out.astype(np.float32) * 2, problem.plan())
    assert_bits_equal(x.grad, expected)


@pytest.mark.parametrize("wanting", ["x", "weight", ""])
def test_only_what_wants_a_gradient_gets_one(wanting, rng, place, backend):
    problem = make_problem(rng, SMALL, BFLOAT16)
    x = tensor(problem.x, place, gradient=wanting == "x")
    weight = tensor(ordinary(rng, (SMALL.H,)), place, gradient=wanting == "weight")
    experts = Experts()
    out = quantized_experts(x, plan_tensors(problem.plan(), place), experts.forward, experts.vjp, weight)
    assert out.stop_gradient == (wanting == "")
    if wanting:
        out.astype("float32").sum().backward()
    assert (x.grad is not None) == (wanting == "x")
    assert (weight.grad is not None) == (wanting == "weight")


def test_a_layer_trains_by_bytecode_as_in_dygraph(rng, place):
    problem = make_problem(rng, SMALL, BFLOAT16)
    weight_values, arguments = ordinary(rng, (SMALL.H,)), problem.route_arguments

    def layer(x, ids, probs, weight):
        experts = Experts()
        plan = route(ids, probs, **arguments)
        return unpermute(quantized_experts(x, plan, experts.forward, experts.vjp, weight), plan, plan.row_probs)

    def run(function):
        x, weight = tensor(problem.x, place, gradient=True), tensor(weight_values, place, gradient=True)
        probs = tensor(problem.probs, place, gradient=True)
        out = function(x, tensor(problem.ids, place), probs, weight)
        out.astype("float32").sum().backward()
        return [to_numpy(each) for each in (out, x.grad, probs.grad, weight.grad)]

    with plain_errors():
        traced = run(paddle.jit.to_static(layer, full_graph=False))
    for got, expected in zip(traced, run(layer), strict=True):
        assert_bits_equal(got, expected)


def test_a_static_graph_is_refused(place):
    def layer(x, ids):
        return quantized_experts(x, route(ids, num_experts=3), dequantize_1x128, lambda d_out, *_: d_out)

    x, ids = paddle.zeros([2, 4]), paddle.zeros([2, 1], "int32")
    with pytest.raises(TypeError, match="x must be a tensor of dygraph, or of to_static with full_graph=False"):
        paddle.jit.to_static(layer, full_graph=True)(x, ids)


class BadResult:
    """A function of the user that returns something."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, *arguments: paddle.Tensor) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "expert_fn's result must be a paddle.Tensor, but got NoneType"),
        (paddle.zeros([2], "int32"), "of dtype bfloat16, float16 or float32, but got int32"),
    ],
    ids=["None", "int32"],
)
def test_a_result_that_is_no_float_tensor_is_refused(result, text, rng, place):
    problem = make_problem(rng, SMALL, BFLOAT16)
    with pytest.raises(TypeError, match=re.escape(text)):
        quantized_experts(
            tensor(problem.x, place), plan_tensors(problem.plan(), place), BadResult(result), lambda d_out, *_: d_out
        )


@pytest.mark.parametrize(
    ("make_result", "text"),
    [
        (
            lambda d: (d, d),
            "expert_vjp's result must be 1 gradients: d_rows and one for each of the tensors, but got 2",
        ),
        (lambda d: d[1:], "d_rows of expert_vjp must be of shape [26, 20], but got [25, 20]"),
        (lambda d: d.astype("float32"), "d_rows of expert_vjp must be of dtype bfloat16, but got float32"),
        (lambda d: None, "d_rows of expert_vjp must be a paddle.Tensor, but got NoneType"),
    ],
    ids=["too-many", "shape", "dtype", "None"],
)
def test_gradients_of_the_wrong_form_are_named(make_result, text, place):
    """Paddle wraps what is raised in the backward pass."""
    plan = reference.route(np.zeros((26, 1), np.int32), num_experts=1)
    x = tensor(np.ones((26, 20), BFLOAT16), place, gradient=True)
    out = quantized_experts(x, plan_tensors(plan, place), dequantize_1x128, lambda d_out, *_: make_result(d_out))
    with pytest.raises(OSError, match=re.escape(text)):
        out.sum().backward()
