# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 layers of PaddleFormers, patched or after a changed import, against the same in float64 without rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import paddle.incubate.nn.functional
import pytest

import paddle_moe_ops
from paddle_moe_ops import patched_paddle
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.compat import fp8
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import FLOAT8_ROUNDING_ERROR, assert_close_float8
from tests.ops.problems import tensor

from .float8_nodes import ByCapacity, Experts, Form, Linear, of_whole_batch

H, INNER, E, K = 256, 128, 5, 2
FORMS = {
    "bfloat16 tokens": Form(),
    "float8 tokens": Form(dispatched=True),
    "recomputed": Form(dispatched=True, recomputes=True),
    "older Paddle": Form(is_older=True),
}


@pytest.fixture(name="F", params=["patched", "imported"])
def functions(request) -> Iterator[Any]:
    """The module of float8 functions that a model calls."""
    if request.param == "imported":
        yield fp8
        return
    with patched_paddle(("permute", "fp8")):
        yield paddle.incubate.nn.functional


def pair_of(F):
    """The functions that permute rows."""
    functions = paddle_moe_ops if F is fp8 else paddle.nn.functional
    return functions.moe_permute, functions.moe_unpermute


def bfloat16(rng, *shape):
    return (rng.standard_normal(shape) / shape[-2] ** 0.5).astype(ml_dtypes.bfloat16)


def parameters(arrays, place):
    made = [tensor(array, place) for array in arrays]
    for each in made:
        each.main_grad = None
    return made


def experts_of(F, rng, place, form, kind=Experts, **options):
    w1 = [bfloat16(rng, H, 2 * INNER) for _ in range(E)]
    w2 = [bfloat16(rng, INNER, H) for _ in range(E)]
    return kind(F, parameters(w1, place), parameters(w2, place), form, **options)


def routing_of(rng, num_tokens):
    """Ids of which a few are -1 and none names the last expert but one, and probabilities."""
    ids = np.argsort(rng.random((num_tokens, E)), axis=1)[:, :K].astype(np.int32)
    ids[(ids == E - 2) | (rng.random(ids.shape) < 0.1)] = -1
    return ids, rng.random(ids.shape).astype(np.float32)


class Exact:
    """Experts in float64: the output, and all gradients for a gradient of the output."""

    def __init__(self, experts, x, ids, probs, gradient):
        tokens, given = x.astype(np.float64), gradient.astype(np.float64)
        self.out, self.dx = np.zeros_like(tokens), np.zeros_like(tokens)
        self.d_probs = np.zeros(probs.shape)
        self.dw1, self.dw2 = [], []
        for expert in range(E):
            w1, w2 = (to_numpy(each[expert]).astype(np.float64) for each in (experts.w1, experts.w2))
            token, slot = np.nonzero(ids == expert)
            p = probs[token, slot][:, None].astype(np.float64)
            gate, up = np.split(tokens[token] @ w1, 2, axis=1)
            sigmoid = 1 / (1 + np.exp(-gate))
            hidden = gate * sigmoid * up
            np.add.at(self.out, token, p * hidden @ w2)
            d_hidden = given[token] @ w2.T
            self.d_probs[token, slot] = (d_hidden * hidden).sum(axis=1)
            d_hidden *= p
            d_gate = d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))
            d_first = np.concatenate([d_gate, d_hidden * gate * sigmoid], axis=1)
            np.add.at(self.dx, token, d_first @ w1.T)
            self.dw1.append(tokens[token].T @ d_first)
            self.dw2.append((p * hidden).T @ given[token])


def close(got, expected, what):
    assert_close_float8(to_numpy(got), np.asarray(expected), what, FLOAT8_ROUNDING_ERROR)


def step(F, experts, x, ids, probs, gradient, place):
    out, backward = of_whole_batch(*pair_of(F), experts, *(tensor(each, place) for each in (x, ids, probs)))
    return out, *backward(tensor(gradient, place))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_experts_train_as_without_rounding(form, F, rng, place):
    """Two steps add up in main_grad; one expert has no rows, and counts are no multiples of 128."""
    experts = experts_of(F, rng, place, form)
    sums: dict[str, Any] = {"w1": 0, "w2": 0}
    for num_tokens in (301, 45):
        x, gradient = bfloat16(rng, num_tokens, H), bfloat16(rng, num_tokens, H)
        ids, probs = routing_of(rng, num_tokens)
        exact = Exact(experts, x, ids, probs, gradient)
        out, dx, d_probs = step(F, experts, x, ids, probs, gradient, place)
        close(out, exact.out, "output")
        close(dx, exact.dx, "gradient of tokens")
        close(d_probs, exact.d_probs, "gradient of probabilities")
        for name, gradients in (("w1", exact.dw1), ("w2", exact.dw2)):
            sums[name] = sums[name] + np.stack(gradients)
    for name, total in sums.items():
        weights = getattr(experts, name)
        assert [each.calls_of_hook for each in weights] == [2] * E
        for number, weight in enumerate(weights):
            assert weight.main_grad.dtype == paddle.float32
            close(weight.main_grad, total[number], f"gradient of {name}[{number}]")
        assert not weights[E - 2].main_grad.numpy().any()


def test_no_rows_at_all(F, rng, place):
    experts = experts_of(F, rng, place, Form())
    x, (ids, probs) = bfloat16(rng, 7, H), routing_of(rng, 7)
    out, dx, d_probs = step(F, experts, x, np.full_like(ids, -1), probs, x, place)
    assert not any(to_numpy(each).astype(np.float32).any() for each in (out, dx, d_probs))
    assert all(not each.main_grad.numpy().any() and each.calls_of_hook == 1 for each in experts.w1 + experts.w2)
    nothing = paddle.zeros([0, H], "bfloat16")
    codes, scales = F.fp8_quant_blockwise(nothing)
    assert (codes.shape, scales.shape) == ([0, H], [H // 128, 0])
    assert F.fused_transpose_split_quant(nothing, None, [0] * E, True) == ([], [])
    assert [each.shape for each in F.fused_weighted_swiglu_act_quant(nothing)] == [[0, H // 2], [0, H // 256]]


def test_matrices_kept_on_a_weight_give_the_same_bits(F, rng, place):
    experts = experts_of(F, rng, place, Form())
    x, (ids, probs) = bfloat16(rng, 60, H), routing_of(rng, 60)
    results = []
    for is_kept in (False, True):
        if is_kept:
            for weights in (experts.w1, experts.w2):
                for suffix in ("", "_transpose"):
                    pair = F.fused_stack_transpose_quant(weights, transpose=bool(suffix))
                    for name, value in zip(("weight", "scale"), pair, strict=True):
                        setattr(weights[0], f"fp8_{name}_stacked{suffix}", value)
        for each in experts.w1 + experts.w2:
            each.main_grad = None
        found = step(F, experts, x, ids, probs, x, place)
        results.append([*found, *(each.main_grad for each in experts.w1 + experts.w2)])
    for kept, made in zip(*results, strict=True):
        assert_bits_equal(kept, made)


def test_weight_gradients_after_a_dispatch_by_capacity(F, rng, place):
    """Rows of two ranks, each by expert, give the weight gradients of the rows sorted by expert."""
    ranks, capacity = 2, 64
    counts = [ranks * capacity] * E
    x, given = (bfloat16(rng, sum(counts), H) for _ in range(2))
    order = np.argsort(np.tile(np.repeat(np.arange(E), capacity), ranks), kind="stable")
    of_w1 = bfloat16(rng, sum(counts), 2 * INNER)
    gradients = []
    for kind, rows, options in ((ByCapacity, slice(None), {"ranks": ranks}), (Experts, order, {})):
        experts = experts_of(F, rng, place, Form(), kind, **options)
        for weights, left, right in ((experts.w2, x[:, :INNER], given), (experts.w1, x, of_w1)):
            experts.add_gradients(
                weights, *(experts.split(tensor(each[rows], place), counts) for each in (left, right))
            )
        gradients.append([each.main_grad for each in experts.w2 + experts.w1])
    for by_capacity, by_expert in zip(*gradients, strict=True):
        assert_bits_equal(by_capacity, by_expert)
        assert by_expert.numpy().any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_tokens", [1, 300, 512])
def test_a_linear_layer_trains_as_without_rounding(num_tokens, F, rng, place):
    x, gradient, weight = bfloat16(rng, num_tokens, H), bfloat16(rng, num_tokens, 384), bfloat16(rng, H, 384)
    x_tensor = tensor(x, place, gradient=True)
    (parameter,) = parameters([weight], place)
    for micro_batch in (1, 2):
        out = Linear.apply(F, x_tensor, parameter)
        (dx,) = paddle.grad([out], [x_tensor], [tensor(gradient, place)])
        exact, given, matrix = (each.astype(np.float64) for each in (x, gradient, weight))
        close(out, exact @ matrix, "output")
        close(dx, given @ matrix.T, "gradient of tokens")
        close(parameter.main_grad, micro_batch * (exact.T @ given), "gradient of the weight")
