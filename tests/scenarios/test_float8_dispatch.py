# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers with float8 rows and backward passes by hand, written on paddle.incubate as its users write them.

A node of the graph quantises tokens while it dispatches them, and calls ``paddle._C_ops.moe_gate_dispatch_grad`` in its
backward pass. Gradients are those of the same layer on dequantised rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import pytest
from paddle import _C_ops
from paddle.autograd import PyLayer
from paddle.incubate.nn.functional import (
    moe_combine,
    moe_gate_dispatch,
    moe_gate_dispatch_and_quant,
    moe_gate_dispatch_partial_nosoftmaxtopk,
    moe_gate_dispatch_permute,
)

from paddle_moe_ops import dequantize_1x128, patched_paddle
from tests.ops.problems import tensor

T, H, E, K, C = 37, 256, 4, 2, 16
CASES = {"T=37": T, "no tokens": 0, "one token": 1}
tokens = pytest.mark.parametrize("count", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with patched_paddle(("incubate",)):
        yield


class QuantisedDispatch(PyLayer):
    """Float8 rows with a gradient, which the backward pass gets in the dtype of the experts' output."""

    @staticmethod
    def forward(ctx, x, probs, bias, k, capacity, use_pad):
        ctx.set_grad_in_dtype_consistent(False)
        with paddle.amp.auto_cast(enable=False):
            codes, scales, weights, index, ends, ids = moe_gate_dispatch_and_quant(
                x, probs, corr_bias=bias, k=k, capacity=capacity, use_pad=use_pad, use_pow2_scale=True
            )
        codes.stop_gradient = False
        weights.stop_gradient = False
        for each in (scales, index, ends, ids):
            each.stop_gradient = True
        ctx.slots = weights, index, ids
        ctx.options = k, capacity, use_pad
        ctx.has_bias = bias is not None
        return codes, weights, index, ends, ids, {"scale": scales}

    @staticmethod
    def backward(ctx, rows_grad, weights_grad, *_):
        gradients = _C_ops.moe_gate_dispatch_grad(*ctx.slots, rows_grad, weights_grad, *ctx.options)
        return (*gradients, None) if ctx.has_bias else gradients


class Dequantise(PyLayer):
    """Experts read codes and scales, and return a gradient in bfloat16."""

    @staticmethod
    def forward(ctx, codes, scales):
        ctx.set_grad_in_dtype_consistent(False)
        return dequantize_1x128(codes, scales)

    @staticmethod
    def backward(ctx, rows_grad):
        return rows_grad


class Combine(PyLayer):
    @staticmethod
    def forward(ctx, x, weights, index):
        ctx.arguments = x, weights, index
        return moe_combine(x, weights, index)

    @staticmethod
    def backward(ctx, grad):
        x_grad, products = _C_ops.moe_combine_grad(*ctx.arguments, grad)
        return x_grad, products.sum(-1), None


def inputs(rng, count, place):
    x = tensor(rng.standard_normal((count, H)).astype(np.float32), place).astype("bfloat16")
    logits = tensor(rng.standard_normal((count, E)).astype(np.float32), place)
    bias = tensor(np.linspace(-0.1, 0.1, E, dtype=np.float32), place)
    x.stop_gradient = logits.stop_gradient = False
    return x, logits, bias


def layer(dispatched, weights, index, matrix):
    """One matrix for all experts, and the combine."""
    out = paddle.matmul(dispatched.astype("float32"), matrix).astype("bfloat16")  # a CPU multiplies no bfloat16
    return Combine.apply(out, weights.astype(out.dtype), index.transpose([1, 0]))


def straight_through(x, probs, bias):
    """The rows that the codes stand for, with the gradient of rows that were not rounded."""
    rows, weights, index, _, _ = moe_gate_dispatch(x, probs, bias, k=K, capacity=C, use_pad=True)
    codes, scales, *_ = moe_gate_dispatch_and_quant(x, probs, bias, K, C, True, True)
    rows = rows.astype("float32")
    return rows + (dequantize_1x128(codes, scales, dtype="float32") - rows).detach(), weights, index


def quantised(x, probs, bias):
    codes, weights, index, _, _, further = QuantisedDispatch.apply(x, probs, bias, k=K, capacity=C, use_pad=True)
    assert not codes.stop_gradient
    index.stop_gradient = True  # which a node of Paddle's changes, for integers as well
    return Dequantise.apply(codes, further["scale"]), weights, index


@tokens
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_a_layer_trains_through_float8_rows(has_bias, count, rng, place, backend):
    matrix = tensor(rng.standard_normal((H, H)).astype(np.float32) / 16, place)
    x, logits, bias = inputs(rng, count, place)
    results = []
    for dispatch in (quantised, straight_through):
        probs = paddle.nn.functional.softmax(logits, axis=-1)
        out = layer(*dispatch(x, probs, bias if has_bias else None), matrix)
        (out.astype("float32") ** 2).sum().backward()
        results.append([each.astype("float32").numpy() for each in (out, x.grad, logits.grad)])
        x.clear_gradient()
        logits.clear_gradient()
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=1e-3)
    if count == T:
        assert np.abs(results[0][2]).max() > 0


def test_without_gradients_the_rows_are_the_same(rng, place):
    x, logits, _ = inputs(rng, T, place)
    probs = paddle.nn.functional.softmax(logits, axis=-1)
    with paddle.no_grad():
        codes, *_, further = QuantisedDispatch.apply(x, probs, None, k=K, capacity=C, use_pad=True)
    again, scales, *_ = moe_gate_dispatch_and_quant(x, probs, None, K, C, True, True)
    assert again.stop_gradient
    np.testing.assert_array_equal(codes.view("uint8").numpy(), again.view("uint8").numpy())
    np.testing.assert_array_equal(further["scale"].numpy(), scales.numpy())


def test_when_all_tokens_choose_one_expert_those_beyond_its_capacity_have_no_gradient(rng, place):
    x, _, _ = inputs(rng, T, place)
    scores = tensor(np.tile(np.float32([0.1, 0.7, 0.15, 0.05]), (T, 1)), place)
    scores.stop_gradient = False
    rows, weights, _ = quantised(x, scores, None)
    assert (weights.numpy() > 0).sum(axis=0).tolist() == [C, C]
    (rows.astype("float32").sum() + weights.sum()).backward()
    expected = np.zeros((T, E), np.float32)
    expected[:C, 1:3] = 1
    np.testing.assert_array_equal(scores.grad.numpy(), expected)
    np.testing.assert_array_equal(
        x.grad.astype("float32").numpy(), np.where(np.arange(T) < C, 2.0, 0.0)[:, None].repeat(H, 1)
    )


class Dispatch(PyLayer):
    """The dispatch of 16-bit rows, with the backward pass that Paddle's kernels are called by."""

    @staticmethod
    def forward(ctx, x, scores, ids, kind):
        ctx.kind = kind
        if kind == "permute":
            rows, weights, index, _, ids = moe_gate_dispatch_permute(x, scores, None, K, C, 2)
            ctx.arguments = weights, index, ids
            ctx.options = K, C, 2
        elif kind == "partial":
            rows, weights, *maps = moe_gate_dispatch_partial_nosoftmaxtopk(
                x, scores, ids, K, C, E, False, 1, 3, reverse_token_drop=True
            )
            ctx.arguments = (weights, *maps)
            ctx.options = K, C, False, 1, 3
        else:
            rows, weights, index, _, ids = moe_gate_dispatch(x, scores, None, K, C, True)
            ctx.arguments = weights, index, ids
            ctx.options = K, C, True
        return rows, weights

    @staticmethod
    def backward(ctx, rows_grad, weights_grad):
        name = {
            "plain": "moe_gate_dispatch_grad",
            "permute": "moe_gate_dispatch_permute_grad",
            "partial": "moe_gate_dispatch_partial_nosoftmaxtopk_grad",
        }[ctx.kind]
        x_grad, scores_grad = getattr(_C_ops, name)(*ctx.arguments, rows_grad, weights_grad, *ctx.options)
        return x_grad, scores_grad, None


@tokens
@pytest.mark.parametrize("kind", ["plain", "permute", "partial"])
def test_backward_passes_by_hand_equal_those_of_the_functions(kind, count, rng, place, backend):
    values = rng.standard_normal((count, 12)).astype(np.float32)
    scores = (1 + rng.random((count, E if kind != "partial" else K))).astype(np.float32)
    ids = tensor(np.stack([rng.permutation(E)[:K] for _ in range(count)] or [[0] * K])[:count].astype(np.int32), place)
    functions = {
        "plain": lambda x, scores: moe_gate_dispatch(x, scores, None, K, C, True)[:2],
        "permute": lambda x, scores: moe_gate_dispatch_permute(x, scores, None, K, C, 2)[:2],
        "partial": lambda x, scores: moe_gate_dispatch_partial_nosoftmaxtopk(
            x, scores, ids, K, C, E, False, 1, 3, True
        )[:2],
    }
    results = []
    for call in (functions[kind], lambda x, scores: Dispatch.apply(x, scores, ids, kind)):
        leaves = tensor(values, place, gradient=True), tensor(scores, place, gradient=True)
        rows, weights = call(*leaves)
        ((rows**3).sum() + (weights**2).sum()).backward()
        results.append([rows, weights, *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(got.numpy(), expected.numpy())
