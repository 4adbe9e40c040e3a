# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 layers with biases and with other activations than SwiGLU: the oracle, refused options, training."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import paddle
import pytest

from paddle_moe_ops import Float8Matrices, _float8_layer, explain, moe_mlp, reference, route, use_backend
from paddle_moe_ops._activations import ACTIVATIONS
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.nn import MoELayer, keep_float8_matrices
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_float8
from tests.ops.problems import make_problem, ordinary, plan_tensors, tensor
from tests.pairwise import pairwise
from tests.params import EMPTY, ODD, ONE_TOKEN, PADDED, SUM_DTYPES

FLOAT8 = "fp8_1x128"
BIASES = "gate_up_bias", "down_bias"
OTHERS = [each for each in ACTIVATIONS if each != "swiglu"]
D, N = 136, 130


class Layer:
    """Operands of more than a group of 128, with values that the clamps of gpt_oss reach."""

    def __init__(
        self, rng, shape, dtype=np.float32, *, activation="geglu", transpose=False, biases=BIASES, by_row=False
    ):
        self.problem = make_problem(rng, shape)
        self.plan, self.by_row = self.problem.plan(), by_row
        self.options = {"activation": activation, "transpose": transpose}
        sizes = {"gate_up": (D, 2 * N), "down": (N, D)}
        sizes = {name: size[::-1] if transpose else size for name, size in sizes.items()}
        sizes |= {"gate_up_bias": (2 * N,), "down_bias": (D,)}
        scales = {"gate_up": 4 * D**-0.5, "down": N**-0.5, "gate_up_bias": 0.5, "down_bias": 0.5}
        self.arrays = {
            name: (scales[name] * ordinary(rng, (shape.E, *sizes[name]))).astype(dtype)
            for name in ("gate_up", "down", *biases)
        }
        self.arrays["x"] = ordinary(rng, (shape.T, D), dtype)
        self.arrays["probs"] = self.plan.row_probs if by_row else self.problem.probs
        self.d_out = ordinary(rng, (shape.T, D), dtype)

    def leaves(self, place):
        return {name: tensor(array, place, gradient=True) for name, array in self.arrays.items()}

    def call(self, leaves, place, **options):
        options = {"compute": FLOAT8, **self.options, **({"weights_by": "row"} if self.by_row else {}), **options}
        return moe_mlp(**leaves, plan=plan_tensors(self.plan, place), **options)

    def run(self, place, **options):
        leaves = self.leaves(place)
        out = self.call(leaves, place, **options)
        paddle.autograd.backward([out], [tensor(self.d_out, place)])
        return {"out": out, **{name: leaf.grad for name, leaf in leaves.items()}}

    def due(self):
        given = {name: array for name, array in self.arrays.items() if name != "probs"}
        given |= {"weights": self.plan.row_probs, "plan": self.plan, **self.options}
        out, _ = reference.moe_mlp_float8(**given)
        made = reference.moe_mlp_float8_backward(self.d_out, **given)
        rows, probs = self.plan.slot_to_row, made.weights
        if not self.by_row:
            probs = np.where(rows >= 0, np.append(probs, 0)[rows], 0)
        return {"out": out, "probs": probs, **{name: getattr(made, name) for name in self.arrays if name != "probs"}}


def assert_near(made, due):
    assert made.keys() == due.keys()
    for name, got in made.items():
        assert_close_float8(to_numpy(got), due[name], name)


AXES = {
    "activation": ACTIVATIONS,
    "biases": [(), BIASES[:1], BIASES[1:], BIASES],
    "transpose": [False, True],
    "dtype": SUM_DTYPES,
    "by_row": [False, True],
    "name": [None, "reference"],
}


@pytest.mark.sampled(3)
@pairwise(AXES, others_are_slow=True)
def test_results_and_gradients_follow_the_oracle(activation, biases, transpose, dtype, by_row, name, rng, place):
    layer = Layer(rng, PADDED, dtype, activation=activation, transpose=transpose, biases=biases, by_row=by_row)
    with use_backend(name) if name else contextlib.nullcontext():
        made = layer.run(place)
    assert_near(made, layer.due())


@pytest.mark.parametrize("shape", [EMPTY, ONE_TOKEN, ODD])
def test_any_routing(shape, rng, place):
    layer = Layer(rng, shape)
    assert_near(layer.run(place), layer.due())


@pytest.mark.parametrize("activation", OTHERS)
def test_results_are_near_those_of_exact_products_and_differ_from_them(activation, rng, place):
    layer = Layer(rng, PADDED, activation=activation)
    exact = layer.run(place, compute=None)
    for name, got in layer.run(place).items():
        if name == "down_bias":  # the sum of gradients, which no product changes
            continue
        a, b = (to_numpy(each).astype(np.float64).ravel() for each in (got, exact[name]))
        assert 0.99 < a @ b / np.linalg.norm(a) / np.linalg.norm(b) < 0.999999, name


@pytest.mark.compiled_only
def test_gradients_are_added_to_main_grad(rng, place):
    layer = Layer(rng, ODD)
    expected, leaves = layer.run(place), layer.leaves(place)
    for name in ("gate_up", "down", *BIASES):
        leaves[name].main_grad = None
    for _ in range(2):
        paddle.autograd.backward([layer.call(leaves, place, accumulate=True)], [tensor(layer.d_out, place)])
    for name in ("gate_up", "down", *BIASES):
        assert leaves[name].grad is None
        due = 2 * to_numpy(expected[name])
        np.testing.assert_allclose(to_numpy(leaves[name].main_grad), due, rtol=1e-6, atol=1e-6 * np.abs(due).max())


@pytest.mark.compiled_only
def test_kept_matrices_change_no_bit_and_notice_changes(rng):
    layer, kept = Layer(rng, ODD), Float8Matrices()
    leaves, expected = layer.leaves("cpu"), layer.run("cpu")
    for _ in range(2):
        assert_bits_equal(layer.call(leaves, "cpu", float8_matrices=kept), expected["out"], what="out")
        codes = kept._made
    assert kept._made is codes
    with paddle.no_grad():
        leaves["down"].scale_(2.0)
        made = layer.call(leaves, "cpu", float8_matrices=kept)
        assert_bits_equal(made, layer.call(leaves, "cpu"), what="after a change")
        assert kept._made is not codes


@pytest.mark.compiled_only
def test_unnoticed_writes_to_kept_matrices_raise_under_validation(rng, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
    layer, kept = Layer(rng, ODD), Float8Matrices()
    leaves = layer.leaves("cpu")
    with paddle.no_grad():
        layer.call(leaves, "cpu", float8_matrices=kept)
        paddle.concat([leaves["down"][1:].clone(), leaves["down"][:1].clone()], out=leaves["down"])
        with pytest.raises(ValueError, match=r"^moe_mlp: matrices with kept codes must be changed by calls that"):
            layer.call(leaves, "cpu", float8_matrices=kept)


@pytest.mark.compiled_only
@pytest.mark.parametrize("activation", ["geglu_tanh", "swiglu_oai"])
def test_mixed_precision_changes_no_bit(activation, rng, monkeypatch):
    layer = Layer(rng, ODD, activation=activation)
    expected = layer.run("cpu")["out"]
    level = paddle.base.core.AmpLevel.O2  # auto_cast does nothing on a CPU
    tracer, leaves = paddle.base.framework._dygraph_tracer(), layer.leaves("cpu")
    monkeypatch.setattr(tracer, "_amp_level", level)
    assert_bits_equal(layer.call(leaves, "cpu"), expected, what="out")


def test_a_device_without_operators_is_named(rng, monkeypatch):
    monkeypatch.setattr(_float8_layer, "has_operators", lambda _: False)
    layer = Layer(rng, ODD)
    text = "compute must be None, since the compiled library has no operators there, but got 'fp8_1x128'"
    with pytest.raises(ValueError, match=f"^moe_mlp: {re.escape(text)}$"):
        layer.run("cpu")
    with use_backend("reference"):
        assert_near(layer.run("cpu"), layer.due())


@pytest.mark.compiled_only
def test_lists_of_matrices_and_biases(rng):
    layer = Layer(rng, ODD)
    expected, leaves = layer.run("cpu"), layer.leaves("cpu")
    lists = {name: [tensor(each, "cpu", gradient=True) for each in layer.arrays[name]] for name in ("gate_up", *BIASES)}
    out = layer.call({**leaves, **lists}, "cpu")
    paddle.autograd.backward([out], [tensor(layer.d_out, "cpu")])
    assert_bits_equal(out, expected["out"], what="out")
    for name, each in lists.items():
        assert_bits_equal(paddle.stack([one.grad for one in each]), expected[name], what=name)


def test_a_token_that_is_nan_stays_alone(rng, place):
    layer = Layer(rng, ODD)
    expected = layer.run(place)
    routed = np.flatnonzero((layer.plan.slot_to_row >= 0).any(axis=1))
    layer.arrays["x"][routed[0], 3] = np.nan
    made, others = layer.run(place), np.arange(ODD.T) != routed[0]
    for name in ("out", "x"):
        assert np.isnan(to_numpy(made[name])[routed[0]]).all()
        assert_bits_equal(to_numpy(made[name])[others], to_numpy(expected[name])[others], what=name)


BAD = {
    "first product in float8": ({"keep": "h_fp8"}, "keep must be 'h' or 'x' with compute and biases, but got 'h_fp8'"),
    "deferred": ({"defer_dw": True}, "defer_dw must be False with compute and biases, but got True"),
}


@pytest.mark.parametrize(("options", "text"), BAD.values(), ids=BAD.keys())
def test_options_that_such_layers_lack_are_named(options, text, rng):
    layer = Layer(rng, ODD)
    with pytest.raises(ValueError, match=f"^moe_mlp: {re.escape(text)}$"):
        layer.call(layer.leaves("cpu"), "cpu", **options)
    with pytest.raises(ValueError, match=f"^MoELayer: {re.escape(text)}$"):
        MoELayer(8, 8, 4, 2, compute=FLOAT8, expert_bias=True, **options)
    text, plain = text.replace("biases", "the activation 'geglu'"), Layer(rng, ODD, biases=())
    with pytest.raises(ValueError, match=f"^moe_mlp: {re.escape(text)}$"):
        plain.call(plain.leaves("cpu"), "cpu", **options)


@pytest.mark.compiled_only
def test_a_graph_refuses_them():
    layer = MoELayer(16, 8, 4, 2, compute=FLOAT8, activation="geglu")
    text = (
        "compute must be None, since in a graph only SwiGLU without biases multiplies float8 operands, but got "
        "'fp8_1x128'"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        paddle.jit.to_static(layer.eval(), full_graph=True)(paddle.randn([5, 16]))


@pytest.mark.compiled_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_trains_as_with_exact_products(dtype):
    """Experts of gpt_oss, with the program that a user writes."""
    x, target, losses = paddle.randn([3, 33, D]), paddle.randn([33, D]), {}
    for compute in (None, FLOAT8):
        paddle.seed(3)
        layer = MoELayer(D, N, 4, 2, activation="swiglu_oai", expert_bias=True, compute=compute)
        layer.to(dtype=dtype)
        kept = keep_float8_matrices(layer)
        assert kept == (compute is not None)
        optimizer = paddle.optimizer.SGD(1.0, parameters=layer.parameters())
        losses[compute] = []
        for tokens in x:
            loss = (layer(tokens.astype(layer.experts.down.dtype)).astype("float32") - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses[compute].append(float(loss))
    np.testing.assert_allclose(losses[FLOAT8], losses[None], rtol=0.02)
    assert losses[FLOAT8] != losses[None]


@pytest.mark.compiled_only
def test_explain_names_the_parts(rng):
    layer = Layer(rng, ODD)
    given = {**layer.leaves("cpu"), "plan": plan_tensors(layer.plan, "cpu")}
    lines = explain("moe_mlp", **given, compute=FLOAT8, activation="geglu").splitlines()
    made = "quantised values multiplied in float32, geglu, quantised values multiplied in float32 and unpermute"
    assert lines[0].endswith(made), lines[0]


def test_without_tokens_gradients_are_zeros():
    plan = route(paddle.zeros([0, 1], "int32"), num_experts=2)
    gate_up, down, bias = paddle.randn([2, 8, 12]), paddle.randn([2, 6, 8]), paddle.randn([2, 12])
    for each in (gate_up, down, bias):
        each.stop_gradient = False
    options = {"activation": "geglu", "compute": FLOAT8, "gate_up_bias": bias}
    moe_mlp(paddle.zeros([0, 8]), plan, None, gate_up, down, **options).sum().backward()
    for each in (gate_up, down, bias):
        assert float(each.grad.abs().sum()) == 0.0
