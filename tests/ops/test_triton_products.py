# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped products on Triton from Paddle's CPU tensors, the kernels in Triton's interpreter, and a layer on them."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest

from paddle_moe_ops import route, use_backend
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.interpreting import SHAPE, gradients, on_both
from tests.ops.problems import make_problem, ordinary, tensor

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("as_tensors", [False, True], ids=["lists", "tensors"])
def test_grouped_products_run_on_triton_by_themselves(interpreted, rng, as_tensors):
    x, w = ordinary(rng, (9, 20), np.float16), ordinary(rng, (3, 24, 20), np.float16)
    sizes, offsets = [2, 0, 5], [0, 3, 3, 9]
    weights = [rng.standard_normal((9, 24)).astype(np.float32)]
    if as_tensors:
        sizes, offsets = paddle.to_tensor(sizes, dtype="int32"), paddle.to_tensor(offsets)

    def call(x, w):
        return [grouped_gemm(x, w, sizes, expert_offsets=offsets)]

    def product_and_gradients():
        return [*call(tensor(x, "cpu"), tensor(w, "cpu")), *gradients(call, (x, w), weights, (True, True))]

    outputs = product_and_gradients()
    assert interpreted.launches.count("grouped_gemm_kernel") == 3
    assert interpreted.launches.count("wgrad_kernel") == 1
    with use_backend("reference"):
        expected = product_and_gradients()
    for made, due in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(made.numpy(), due.numpy(), rtol=2e-3, atol=2e-3)


def test_products_of_rows_that_lie_apart(interpreted, rng):
    x, w = ordinary(rng, (9, 24), np.float16), ordinary(rng, (3, 24, 20), np.float16)
    for made, due in on_both(lambda: [grouped_gemm(tensor(x, "cpu")[:, :20], tensor(w, "cpu"), [2, 0, 7])]):
        np.testing.assert_allclose(made.numpy(), due.numpy(), rtol=2e-3, atol=2e-3)
    assert interpreted.launches[-1] == "grouped_gemm_kernel"


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("form", ["gathered", "weighted by row", "weighted by slot"])
def test_fused_products_with_gradients(interpreted, rng, form, wanted):
    problem = make_problem(rng, SHAPE)
    with use_backend("reference"):
        plan = route(tensor(problem.ids, "cpu"), tensor(problem.probs, "cpu"), **problem.route_arguments)
    gathered = form == "gathered"
    x = ordinary(rng, (SHAPE.T if gathered else plan.num_rows, 20), np.float16)
    arrays = [x, ordinary(rng, (SHAPE.E, 24, 20), np.float16)]
    if not gathered:
        arrays.append(problem.probs if form.endswith("slot") else problem.plan().row_probs)
    weights = [rng.standard_normal((plan.num_rows, 24)).astype(np.float32)]

    def call(x, w, weights=None):
        order = None if gathered else form.split()[-1]
        return [grouped_gemm(x, w, plan=plan, permute_x=gathered, topk_weights=weights, weights_by=order)]

    for made, due in on_both(lambda: call(*(tensor(each, "cpu") for each in arrays))):
        np.testing.assert_allclose(made.numpy(), due.numpy(), rtol=2e-3, atol=2e-3)
    assert "grouped_gemm_kernel" in interpreted.launches
    for made, due in on_both(lambda: gradients(call, arrays, weights, wanted[: len(arrays)])):
        np.testing.assert_allclose(made.numpy(), due.numpy(), rtol=4e-3, atol=4e-3)


def test_a_layer_runs_on_the_products_that_move_rows_and_weight_them(interpreted):
    layer = MoELayer(16, 8, 4, 2, num_shared_experts=0)
    layer.to(dtype="float16")
    x = paddle.randn([5, 16]).astype("float16")
    results = []
    for backend in ("triton", "paddle"):
        layer.clear_gradients()
        with use_backend(backend):
            out = layer(x)
            out.astype("float32").sum().backward()
        load = np.asarray(layer.tokens_per_expert).tolist()
        results.append((out.numpy(), [each.grad.numpy() for each in layer.parameters()], load))
    assert interpreted.launches.count("wgrad_kernel") == 2
    (out, gradients_of, load), (due, due_gradients, due_load) = results
    assert load == due_load
    for made, expected in zip([out, *gradients_of], [due, *due_gradients], strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-2, atol=1e-2)


def test_groups_that_do_not_fit_are_cut_unless_they_are_to_be_looked_at(interpreted, rng, monkeypatch):
    x, w = tensor(ordinary(rng, (6, 8), np.float16), "cpu"), tensor(ordinary(rng, (2, 24, 8), np.float16), "cpu")
    sizes = paddle.to_tensor([4, 9])
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    assert_bits_equal(grouped_gemm(x, w, sizes), grouped_gemm(x, w, [4, 2]).numpy())
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
    text = "m_sizes must be sizes that add up to at most 6, the rows of X, but got [4, 9], which add up to 13"
    with pytest.raises(ValueError, match=f"^grouped_gemm: {re.escape(text)}$"):
        grouped_gemm(x, w, sizes)


def test_products_in_float32_run_on_paddles_matmul(interpreted):
    with use_backend("triton"):
        grouped_gemm(paddle.ones([2, 3]), paddle.ones([1, 4, 3]), [2])
    assert interpreted.launches == []
