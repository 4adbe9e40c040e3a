# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Activations and biases of `moe_mlp` and of the layers, with gradients: the oracle, a dense formulation, graphs."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_moe_ops import moe_mlp, permute, reference, route, unpermute, use_backend
from paddle_moe_ops._activations import ACTIVATIONS, activate
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.gradients import WithGradients
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.interpreting import SHAPE
from tests.ops.problems import make_problem, ordinary, plan_tensors, tensor
from tests.params import EMPTY, ODD, PADDED, SMALL, SUM_DTYPES

D, N = 10, 6
OPERANDS = ("x", "probs", "gate_up", "down", "gate_up_bias", "down_bias")
BY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
BY_DTYPE = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
BACKENDS = pytest.mark.parametrize("name", [None, "reference"], ids=["automatic", "reference"])
# Relative to the norm: some roundings to the dtype on the way, and sums in float32.
LIMITS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


class Layer:
    """Operands of a layer with biases, large enough that the clamps of gpt_oss take effect."""

    def __init__(self, rng, shape, dtype=np.float32, *, activation="swiglu_oai", transpose=False, biases=OPERANDS[4:]):
        self.problem, self.activation, self.transpose = make_problem(rng, shape), activation, transpose
        self.plan = self.problem.plan()
        shapes = {"gate_up": (D, 2 * N), "down": (N, D)}
        shapes = {name: size[::-1] if transpose else size for name, size in shapes.items()}
        shapes |= {"gate_up_bias": (2 * N,), "down_bias": (D,)}
        wanted = ("gate_up", "down", *biases)
        self.arrays = {name: ordinary(rng, (shape.E, *shapes[name]), dtype) for name in wanted}
        self.arrays["x"] = (3 * ordinary(rng, (shape.T, D))).astype(dtype)
        self.arrays["probs"] = self.problem.probs
        self.d_out = ordinary(rng, (shape.T, D), dtype)

    def leaves(self, place) -> dict[str, Any]:
        return {name: tensor(array, place, gradient=True) for name, array in self.arrays.items()}

    def call(self, given, place, **options):
        settings = {"activation": self.activation, "transpose": self.transpose, **options}
        return moe_mlp(**given, plan=plan_tensors(self.plan, place), **settings)

    def run(self, place, **options) -> dict[str, Any]:
        """The result and the gradient of each operand."""
        leaves = self.leaves(place)
        out = self.call(leaves, place, **options)
        paddle.autograd.backward([out], [tensor(self.d_out, place)])
        return {"out": out, **{name: leaf.grad for name, leaf in leaves.items()}}

    def due(self) -> dict[str, Any]:
        """Expected outputs and gradients, in float64."""
        given = {name: array.astype(np.float64) for name, array in self.arrays.items() if name != "probs"}
        given |= {"weights": self.plan.row_probs, "plan": self.plan}
        options: dict[str, Any] = {"activation": self.activation, "transpose": self.transpose}
        out, hidden = reference.moe_mlp(**given, **options)
        self.hidden = hidden
        made = reference.moe_mlp_backward(self.d_out.astype(np.float64), **given, **options)
        rows = self.plan.slot_to_row
        by_slot = np.where(rows >= 0, np.append(made.weights, 0)[rows], 0)
        return {"out": out, "probs": by_slot, **{n: getattr(made, n) for n in self.arrays if n != "probs"}}

    def check(self, made) -> None:
        due = self.due()
        limit = LIMITS[np.dtype(self.d_out.dtype).name]
        assert made.keys() == due.keys()
        for name, got in made.items():
            got, expected = to_numpy(got).astype(np.float64), due[name]
            assert got.shape == expected.shape, name
            assert np.linalg.norm(got - expected) <= limit * np.linalg.norm(expected), name


@BACKENDS
@BY_DTYPE
@BY_ACTIVATION
@pytest.mark.parametrize("biases", [(), ("gate_up_bias",), OPERANDS[4:]], ids=["plain", "one bias", "biased"])
def test_results_and_gradients_follow_the_oracle(biases, activation, dtype, name, rng, place):
    layer = Layer(rng, ODD, dtype, activation=activation, biases=biases)
    with use_backend(name) if name else contextlib.nullcontext():
        layer.check(layer.run(place))


@BACKENDS
@pytest.mark.parametrize("shape", [EMPTY, PADDED], ids=str)
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
def test_any_routing_and_layout(transpose, shape, name, rng, place):
    layer = Layer(rng, shape, transpose=transpose)
    with use_backend(name) if name else contextlib.nullcontext():
        layer.check(layer.run(place))


def test_the_problems_have_gates_that_are_cut_and_such_that_are_not(rng):
    layer = Layer(rng, ODD)
    layer.due()
    gate, up = np.split(layer.hidden, 2, axis=1)
    assert 0.02 < (gate > 7).mean() < 0.98
    assert 0.02 < (np.abs(up) > 7).mean() < 0.98


@pytest.mark.cpu_only
@BY_ACTIVATION
def test_on_interpreted_kernels(interpreted, activation, rng):
    layer = Layer(rng, SHAPE, np.float16, activation=activation)
    with use_backend("triton"):
        layer.check(layer.run("cpu"))
    assert interpreted.launches.count("bias_gradient_kernel") == 2


@pytest.mark.cpu_only
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@BY_ACTIVATION
def test_swiglu_without_biases_alone_is_one_call_of_the_backend(activation, biased, rng, monkeypatch):
    seen = []
    original = WithGradients.moe_mlp

    def spy(backend, *arguments):
        seen.append(backend.name)
        return original(backend, *arguments)

    monkeypatch.setattr(WithGradients, "moe_mlp", spy)
    layer = Layer(rng, SMALL, activation=activation, biases=OPERANDS[4:] if biased else ())
    with use_backend("reference"):
        layer.run("cpu")
    assert seen == (["reference"] if activation == "swiglu" and not biased else [])


def test_lists_give_the_bits_of_tensors(rng, place):
    layer = Layer(rng, ODD)
    leaves = layer.leaves(place)
    listed = {name: leaf if name in ("x", "probs") else list(paddle.unbind(leaf)) for name, leaf in leaves.items()}
    assert_bits_equal(layer.call(listed, place), layer.call(leaves, place))


@pytest.mark.parametrize("kind", ["main_grad", "grad"])
@BACKENDS
def test_gradients_of_biases_are_added_to_what_is_there(name, kind, rng, place):
    layer = Layer(rng, ODD)
    with use_backend(name) if name else contextlib.nullcontext():
        expected, leaves = layer.run(place), layer.leaves(place)
        for each in leaves.values():
            if kind == "main_grad":
                each.main_grad = None
        for _ in range(2):
            out = layer.call(leaves, place, accumulate=True)
            paddle.autograd.backward([out], [tensor(layer.d_out, place)])
    for each in ("gate_up", "gate_up_bias", "down_bias"):
        got = leaves[each].main_grad if kind == "main_grad" else leaves[each].grad
        assert (leaves[each].grad is None) == (kind == "main_grad")
        due = 2 * expected[each].numpy()
        np.testing.assert_allclose(got.numpy(), due, rtol=1e-5, atol=1e-5 * np.abs(due).max())


def experts_by_hand(x, gate_up, down, gate_up_bias, down_bias):
    """Outputs of every expert of gpt_oss for every token, [E, T, D]."""
    gate, up = (paddle.matmul(x.unsqueeze(0), gate_up) + gate_up_bias.unsqueeze(1)).chunk(2, axis=-1)
    gate, up = gate.clip(max=7.0), up.clip(min=-7.0, max=7.0)
    return paddle.matmul((up + 1) * gate * F.sigmoid(gate * 1.702), down) + down_bias.unsqueeze(1)


def through_a_router(x, router, gate_up, down, gate_up_bias, down_bias, *, is_dense):
    """Softmax after paddle.topk, whose ids come with a graph."""
    values, ids = paddle.topk(paddle.matmul(x, router), 2)
    probs = F.softmax(values, axis=-1)
    if not is_dense:
        plan = route(ids, num_experts=router.shape[1], padding_alignment=4)
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return moe_mlp(x, plan, probs, gate_up, down, activation="swiglu_oai", **biases)
    weights = (F.one_hot(ids, router.shape[1]) * probs.unsqueeze(-1)).sum(1)
    return (experts_by_hand(x, gate_up, down, gate_up_bias, down_bias) * weights.T.unsqueeze(-1)).sum(0)


def test_gradients_through_a_router_are_those_of_a_dense_formulation(rng, place):
    experts, results = 5, []
    shapes = (24, D), (D, experts), (experts, D, 2 * N), (experts, N, D), (experts, 2 * N), (experts, D)
    arrays = [ordinary(rng, shape) for shape in shapes]
    for is_dense in (False, True):
        leaves = [tensor(each, place, gradient=True) for each in arrays]
        (through_a_router(*leaves, is_dense=is_dense) ** 2).sum().backward()
        results.append([leaf.grad.numpy() for leaf in leaves])
    for made, due in zip(*results, strict=True):
        assert np.abs(due).max() > 0
        np.testing.assert_allclose(made, due, rtol=0, atol=1e-5 * np.abs(due).max())


@pytest.mark.sampled(2)
@pytest.mark.cpu_only
@BY_ACTIVATION
def test_a_static_graph_trains_them(activation, rng, place):
    layer = Layer(rng, SMALL, activation=activation)
    expected = layer.run(place)
    program = paddle.static.Program()
    feed = {**layer.arrays, "ids": layer.problem.ids, "d_out": layer.d_out}
    paddle.enable_static()
    try:
        with paddle.static.program_guard(program):
            values = {name: paddle.static.data(name, array.shape, str(array.dtype)) for name, array in feed.items()}
            for name in OPERANDS:
                values[name].stop_gradient = False
            plan = route(values["ids"], num_experts=SMALL.E, padding_alignment=SMALL.A)
            given = {name: values[name] for name in OPERANDS}
            out = moe_mlp(**given, plan=plan, activation=activation)
            gradients = paddle.static.gradients([out], list(given.values()), [values["d_out"]])
        found = paddle.static.Executor().run(program, feed=feed, fetch_list=[out, *gradients])
    finally:
        paddle.disable_static()
    for name, got in zip(("out", *OPERANDS), found, strict=True):
        due = expected[name].numpy()
        np.testing.assert_allclose(got, due, rtol=1e-4, atol=1e-5 * np.abs(due).max(), err_msg=name)


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
@pytest.mark.parametrize("full_graph", [True, False], ids=["syntax", "bytecode"])
def test_traced_layers_have_the_same_gradients(full_graph, place):
    paddle.seed(3)
    layer = MoELayer(D, N, 5, 2, activation="swiglu_oai", expert_bias=True)
    x, found = paddle.randn([24, D]), []
    for run in (layer, paddle.jit.to_static(layer.forward, full_graph=full_graph)):
        (run(x) ** 2).sum().backward()
        found.append({name: each.grad.numpy() for name, each in layer.named_parameters()})
        layer.clear_gradients()
    assert {"experts.gate_up_bias", "experts.down_bias"} <= found[0].keys()
    for name, due in found[0].items():
        np.testing.assert_allclose(found[1][name], due, rtol=1e-4, atol=1e-5 * np.abs(due).max(), err_msg=name)


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
def test_layers_with_several_numbers_of_experts_are_traced_by_bytecode(place):
    """From the second one on, the graph does not know the number of a plan's experts."""
    x = paddle.randn([24, D])
    for experts in (2, 3, 4):
        layer = MoELayer(D, N, experts, 2, activation="swiglu_oai", expert_bias=True)
        out = paddle.jit.to_static(layer.forward, full_graph=False)(x)
        np.testing.assert_allclose(out.numpy(), layer(x).numpy(), rtol=1e-4, atol=1e-6)


@BY_ACTIVATION
def test_experts_give_the_same_by_counts_by_a_plan_and_combined(activation, rng, place):
    experts = SwiGLUExperts(SMALL.E, D, N, activation=activation, bias=True)
    for parameter in (experts.gate_up_bias, experts.down_bias):
        assert not parameter.numpy().any()
        parameter.set_value(ordinary(rng, tuple(parameter.shape)))
    problem = make_problem(rng, SMALL)
    plan = plan_tensors(problem.plan(), place)
    x, probs = tensor(ordinary(rng, (SMALL.T, D)), place), tensor(problem.probs, place)
    by_counts = experts(permute(x, plan)[0], plan.tokens_per_expert, SMALL.A)
    combined = experts(x, plan=plan, probs=probs, combine=True).numpy()
    for out in (unpermute(by_counts, plan, probs), unpermute(experts(x, plan=plan, probs=probs), plan)):
        np.testing.assert_allclose(out.numpy(), combined, rtol=0, atol=1e-5 * np.abs(combined).max())


def test_columns_of_gpt_oss_are_converted_by_taking_every_other_one(rng, place):
    """It has the gate's columns between the others: gate, up, gate, up."""
    layer = Layer(rng, SMALL)
    given = layer.leaves(place)
    between = {name: given[name].reshape([*given[name].shape[:-1], 2, N]) for name in ("gate_up", "gate_up_bias")}
    between = {name: paddle.stack([each[..., 0, :], each[..., 1, :]], -1).flatten(-2) for name, each in between.items()}
    halves = {name: paddle.concat([each[..., 0::2], each[..., 1::2]], axis=-1) for name, each in between.items()}
    assert not (halves["gate_up"] == between["gate_up"]).all()
    assert_bits_equal(layer.call({**given, **halves}, place), layer.call(given, place))


BAD = {
    "columns": ({"gate_up_bias": paddle.zeros([5, 6])}, "gate_up_bias must be of shape [5, 12], but got [5, 6]"),
    "experts": ({"down_bias": paddle.zeros([4, 10])}, "down_bias must be of shape [5, 10], but got [4, 10]"),
    "list": ({"down_bias": [paddle.zeros([10])]}, "down_bias must be a list of 5 vectors, but got 1 of them"),
    "no leaf": (
        {"gate_up_bias": lambda leaves: leaves["gate_up_bias"] * 1, "accumulate": True},
        "gate_up_bias must be a leaf, such as a parameter, with accumulate, but got the result of another operator",
    ),
}


@pytest.mark.parametrize(("changes", "text"), BAD.values(), ids=BAD.keys())
def test_bad_biases_are_named(changes, text, rng):
    layer = Layer(rng, SMALL)
    given = layer.leaves("cpu")
    given |= {name: value(given) if callable(value) else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=f"^moe_mlp: {re.escape(text)}$"):
        layer.call(given, "cpu")


def test_a_bias_of_another_dtype_is_named(rng):
    layer = Layer(rng, SMALL)
    given = {**layer.leaves("cpu"), "down_bias": paddle.zeros([5, D], "bfloat16")}
    text = 'moe_mlp: down_bias must be of dtype float32, but got bfloat16; convert it with .astype("float32")'
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        layer.call(given, "cpu")


def test_bad_arguments_of_layers_are_named():
    with pytest.raises(ValueError, match=r"^MoELayer: activation must be one of 'swiglu', .*, but got 'relu'$"):
        MoELayer(D, N, 4, 2, activation="relu")
    with pytest.raises(TypeError, match=r"^MoELayer: expert_bias must be a bool, but got 1 of type int$"):
        MoELayer(D, N, 4, 2, expert_bias=1)
    with pytest.raises(TypeError, match=r"^SwiGLUExperts: bias must be a bool, but got 'yes' of type str$"):
        SwiGLUExperts(4, D, N, bias="yes")


@pytest.mark.cpu_only
def test_mixed_precision_on_a_cpu_computes_them_in_float32(rng, place):
    layer = Layer(rng, SMALL)
    expected = layer.run(place)
    with paddle.amp.auto_cast(level="O2", dtype="bfloat16"):
        made = layer.run(place)
    for name, each in made.items():
        assert_bits_equal(each, expected[name], what=name)


@BY_ACTIVATION
def test_mixed_precision_changes_no_activation(activation, rng, monkeypatch):
    hidden = tensor(ordinary(rng, (5, 2 * N)), "cpu")
    expected = activate(hidden, activation)
    level = paddle.base.core.AmpLevel.O2  # auto_cast does nothing on a CPU
    monkeypatch.setattr(paddle.base.framework._dygraph_tracer(), "_amp_level", level)
    assert_bits_equal(activate(hidden, activation), expected, what="rows")


def test_the_two_lines_of_the_docstring_give_the_same(rng, place):
    layer = Layer(rng, ODD)
    given, plan = layer.leaves(place), plan_tensors(layer.plan, place)
    first = grouped_gemm(
        given["x"], given["gate_up"], None, False, plan=plan, permute_x=True, bias=given["gate_up_bias"]
    )
    gate, up = first.chunk(2, axis=-1)
    gate = gate.clip(max=7.0)
    rows = (up.clip(-7.0, 7.0) + 1) * gate * F.sigmoid(1.702 * gate)
    rows = grouped_gemm(rows, given["down"], None, False, plan=plan, bias=given["down_bias"])
    expected = unpermute(rows, plan, given["probs"]).numpy()
    np.testing.assert_allclose(layer.call(given, place).numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["gate_up_bias", "down_bias"])
def test_a_bad_bias_is_named_after_good_calls_too(name):
    """Calls of the same sizes, which are not checked again."""
    x, plan = paddle.randn([5, 8]), route(paddle.zeros([5, 1], "int32"), num_experts=2)
    gate_up, down = paddle.randn([2, 8, 12]), paddle.randn([2, 6, 8])
    columns = {"gate_up_bias": 12, "down_bias": 8}[name]
    for _ in range(2):
        moe_mlp(x, plan, None, gate_up, down, **{name: paddle.randn([2, columns])})
    with pytest.raises(ValueError, match=f"^moe_mlp: {name} must be "):
        moe_mlp(x, plan, None, gate_up, down, **{name: paddle.randn([2, columns + 1])})
