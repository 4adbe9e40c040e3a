# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts that are layers of their own: `grouped_gemm` and `moe_mlp` on a list of matrices."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import moe_mlp, route, use_backend
from paddle_moe_ops._activations import swiglu
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import ordinary, tensor

E, D, N = 4, 7, 6
SIZES = [5, 0, 63, 1]


def integers(rng, shape) -> Any:
    """Numbers whose products and sums are exact, so that their bits are those of any kernel."""
    return rng.integers(-2, 3, shape).astype(np.float32)


def problem(rng, place, dtype="float32", transpose=True) -> tuple[Any, Any, list[Any]]:
    """Rows, the stacked matrices and the same as a list, all of which want gradients."""
    x = tensor(integers(rng, (sum(SIZES), D)), place).astype(dtype)
    w = tensor(integers(rng, (E, N, D) if transpose else (E, D, N)), place).astype(dtype)
    listed = [each.clone().detach() for each in w]
    for each in (x, w, *listed):
        each.stop_gradient = False
    return x, w, listed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_gives_the_bits_of_one_tensor(rng, place, kind, transpose, dtype):
    x, w, listed = problem(rng, place, dtype, transpose)
    d_out = tensor(integers(rng, (sum(SIZES), N)), place).astype(dtype)
    out = grouped_gemm(x, w, SIZES, transpose)
    d_x, d_w = paddle.grad([out], [x, w], [d_out])
    got = grouped_gemm(x, kind(listed), SIZES, transpose)
    d_x_got, *d_listed = paddle.grad([got], [x, *listed], [d_out])
    assert_bits_equal(got, out)
    assert_bits_equal(d_x_got, d_x)
    for expert, gradient in enumerate(d_listed):
        assert_bits_equal(gradient, d_w[expert], what=f"the gradient of matrix {expert}")
    assert not d_listed[1].astype("float32").any()  # no rows: zeros, not none


def parameter_list(matrices: list[Any]) -> Any:
    """As a layer has it: with parameters, which have the numbers of the matrices."""
    parameters = [paddle.create_parameter(each.shape, each.dtype) for each in matrices]
    for parameter, each in zip(parameters, matrices, strict=True):
        parameter.set_value(each)
    return nn.ParameterList(parameters)


@pytest.mark.cpu_only
def test_a_parameter_list_is_a_list(rng, place):
    x, _, listed = problem(rng, place)
    biases = [tensor(integers(rng, (N,)), place) for _ in range(E)]
    expected = grouped_gemm(x, listed, SIZES, bias=biases)
    matrices, vectors = parameter_list(listed), parameter_list(biases)
    got = grouped_gemm(x, matrices, SIZES, bias=vectors)
    assert_bits_equal(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    for parameter, each in zip(matrices, listed, strict=True):
        assert_bits_equal(parameter.grad, each.grad)
    assert all(each.grad is not None for each in vectors)


@pytest.mark.cpu_only
def test_parameter_lists_of_a_layer(rng, place):
    given = mlp_problem(rng, place)
    expected = moe_mlp(**given)
    listed = {name: parameter_list(list(given[name])) for name in ("gate_up", "down")}
    for parameter in listed["down"]:
        parameter.main_grad = None
    got = moe_mlp(**{**given, **listed}, accumulate=True)
    np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)  # on a CPU one of them is composed
    got.sum().backward()
    assert all(each.main_grad is not None for each in listed["down"])
    assert all(each.grad is not None for each in listed["gate_up"])


def test_other_backends_take_lists(rng, place):
    x, w, listed = problem(rng, place)
    with use_backend("reference"):
        assert_bits_equal(grouped_gemm(x, listed, SIZES), grouped_gemm(x, w, SIZES))
        grouped_gemm(x, listed, SIZES).sum().backward()
    assert all(each.grad is not None for each in listed)


@pytest.mark.cpu_only
def test_weights_are_not_copied_on_a_cpu(rng, place, monkeypatch):
    x, _, listed = problem(rng, place)

    def guarded(join):
        def call(tensors, *arguments, **keywords):
            together = sum(each.size for each in tensors if each.shape == [N, D])
            assert together < E * N * D, "the matrices were put together"
            return join(tensors, *arguments, **keywords)

        return call

    for name in ("stack", "concat"):
        monkeypatch.setattr(paddle, name, guarded(getattr(paddle, name)))
    out = grouped_gemm(x, listed, SIZES)
    out.sum().backward()
    assert [each.grad.shape for each in listed] == [[N, D]] * E


def test_a_frozen_matrix_gets_no_gradient(rng, place):
    x, _, listed = problem(rng, place)
    listed[1].stop_gradient = listed[2].stop_gradient = True
    grouped_gemm(x, listed, SIZES).sum().backward()
    assert [each.grad is None for each in listed] == [False, True, True, False]


class Layers(nn.Layer):
    """A router and experts that are layers of their own; ``listed`` runs them by one call."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias_attr=False)
        self.up = nn.LayerList([nn.Linear(D, 2 * N, bias_attr=False) for _ in range(E)])
        self.down = nn.LayerList([nn.Linear(N, D, bias_attr=False) for _ in range(E)])
        self.listed = listed

    def forward(self, x: Any) -> Any:
        probs, ids = paddle.topk(nn.functional.softmax(self.router(x)), 2)
        if self.listed:
            plan = route(ids, num_experts=E)
            return moe_mlp(x, plan, probs, [each.weight for each in self.up], [each.weight for each in self.down])
        out = 0.0
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            weight = (probs * (ids == expert).astype("float32")).sum(-1, keepdim=True)
            out = out + weight * down(swiglu(up(x)))
        return out


def trained(listed: bool, rng: Any, steps: int = 3) -> dict[str, Any]:
    """The parameters after training, and the gradients of the last step."""
    paddle.seed(7)
    model = Layers(listed)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    x = tensor(ordinary(rng, (33, D)), paddle.CPUPlace())
    seen: list[Any] = []
    model.up[0].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    found = {}
    for _ in range(steps):
        loss = (model(x) - x).square().mean()
        loss.backward()
        found = {f"d {name}": each.grad.numpy() for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.clear_grad()
    assert seen == [[D, 2 * N]] * steps
    return found | {name: each.numpy() for name, each in model.named_parameters()}


@pytest.mark.cpu_only
def test_layers_train_through_a_router_as_a_dense_formulation_does():
    got, expected = (trained(listed, np.random.default_rng(3)) for listed in (True, False))
    assert np.abs(expected["d router.weight"]).max() > 0
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-6, err_msg=name)


def mlp_problem(rng, place) -> dict[str, Any]:
    ids = rng.permuted(np.tile(np.arange(-1, E), (9, 1)), axis=1)[:, :2].astype(np.int32)
    plan = route(tensor(ids, place), num_experts=E)
    up, down = (tensor(ordinary(rng, shape), place) for shape in ((E, D, 2 * N), (E, N, D)))
    for each in (up, down):
        each.stop_gradient = False
    return {"x": tensor(ordinary(rng, (9, D)), place), "plan": plan, "probs": None, "gate_up": up, "down": down}


@pytest.mark.parametrize("kind", [list, tuple, parameter_list])
def test_a_call_like_one_before_is_not_checked_again(rng, place, kind, monkeypatch):
    given = mlp_problem(rng, place)
    listed = {name: kind(list(given[name])) for name in ("gate_up", "down")}
    expected = moe_mlp(**{**given, **listed})
    monkeypatch.setattr("paddle_moe_ops.mlp._check", None)
    assert_bits_equal(moe_mlp(**{**given, **listed}), expected)
    for spoiled in ({"gate_up": list(given["gate_up"])[:3]}, {"down": list(given["down"].astype("float16"))}):
        with pytest.raises(TypeError, match="NoneType"):  # these are
            moe_mlp(**{**given, **listed, **spoiled})


def test_gradients_are_added_to_what_each_matrix_has(rng, place):
    given = mlp_problem(rng, place)
    moe_mlp(**given).sum().backward()
    listed = {name: [each.clone().detach() for each in given[name]] for name in ("gate_up", "down")}
    for each in (*listed["gate_up"], *listed["down"]):
        each.stop_gradient, each.main_grad = False, paddle.ones_like(each)
    moe_mlp(**{**given, **listed}, accumulate=True).sum().backward()
    for name, matrices in listed.items():
        for expert, each in enumerate(matrices):
            assert each.grad is None
            due = given[name].grad[expert].numpy() + 1
            np.testing.assert_allclose(each.main_grad.numpy(), due, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.cpu_only
def test_mixed_precision_leaves_lists_on_a_cpu_alone(rng, place, level):
    x, w, listed = problem(rng, place)
    with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
        out = grouped_gemm(x, listed, SIZES)
    assert_bits_equal(out, grouped_gemm(x, w, SIZES))


def test_recomputation_gives_the_same_gradients(rng, place):
    x, _, listed = problem(rng, place)
    grouped_gemm(x, listed, SIZES).square().sum().backward()
    plain = [each.grad.clone() for each in listed]
    for each in listed:
        each.clear_grad()
    recompute(lambda rows: grouped_gemm(rows, listed, SIZES), x).square().sum().backward()
    for matrix, gradient in zip(listed, plain, strict=True):
        assert_bits_equal(matrix.grad, gradient)


@pytest.mark.cpu_only
def test_a_graph_holds_lists(rng, place):
    x, w, _ = problem(rng, place)
    program = paddle.static.Program()
    paddle.enable_static()
    try:
        with paddle.static.program_guard(program):
            rows = paddle.static.data("x", [None, D])
            matrices = [paddle.static.data(f"w{expert}", [N, D]) for expert in range(E)]
            out = grouped_gemm(rows, matrices, SIZES)
        feed = {"x": x.numpy(), **{f"w{expert}": w.numpy()[expert] for expert in range(E)}}
        (got,) = paddle.static.Executor().run(program, feed=feed, fetch_list=[out])
    finally:
        paddle.disable_static()
    assert np.array_equal(got, grouped_gemm(x, w, SIZES).numpy())


FLOAT32 = 'of dtype float32, but got float16; convert it with .astype("float32")'
NOT_EMPTY = "[N, D] with D and N >= 1"
OR_LIST = "a paddle.Tensor, or a list or a paddle.nn.ParameterList of them"
BAD = [
    (lambda w: nn.LayerList([nn.Linear(D, N)] * E), TypeError, f"W must be {OR_LIST}, but got LayerList"),
    (lambda w: nn.ParameterList(), ValueError, "W must be a list of one matrix for each expert, but got 0 of them"),
    (lambda w: [], ValueError, "W must be a list of one matrix for each expert, but got 0 of them"),
    (lambda w: w[:3], ValueError, "m_sizes must be of length 3, but got length 4"),
    (lambda w: [*w[:3], w[3].numpy()], TypeError, "W[3] must be a paddle.Tensor, but got ndarray"),
    (lambda w: [*w[:3], w[3][:5]], ValueError, f"W[3] must be of shape [{N}, {D}], but got [5, {D}]"),
    (lambda w: [w[0], w[1].astype("float16"), *w[2:]], TypeError, f"W[1] must be {FLOAT32}"),
    (
        lambda w: [each[:, :3] for each in w],
        ValueError,
        f"W[0] must be of shape [N, {D}] with transpose=True, but got [{N}, 3]",
    ),
    (
        lambda w: [each[:0] for each in w],
        ValueError,
        f"W[0] must be of shape [N, D] with D and N >= 1, but got [0, {D}]",
    ),
]


@pytest.mark.parametrize(("spoil", "error", "text"), BAD)
def test_what_is_wrong_with_a_list_is_named(rng, place, spoil, error, text):
    x, _, listed = problem(rng, place)
    with pytest.raises(error, match=f"^grouped_gemm: {re.escape(text)}$"):
        grouped_gemm(x, spoil(listed), SIZES)


def test_what_is_wrong_with_lists_of_a_layer_is_named(rng, place):
    given = mlp_problem(rng, place)
    up, down = list(given["gate_up"]), list(given["down"])
    for changes, text in (
        ({"gate_up": up[:3]}, f"gate_up must be a list of {E} matrices, but got 3 of them"),
        ({"gate_up": [up[0], up[1][:, :4], *up[2:]]}, f"gate_up[1] must be of shape [{D}, {2 * N}], but got [{D}, 4]"),
        ({"gate_up": [*up[:3], up[3][:, :4]]}, f"gate_up[3] must be of shape [{D}, {2 * N}], but got [{D}, 4]"),
        ({"gate_up": up, "down": [*down[:3], down[3].T]}, f"down[3] must be of shape [{N}, {D}], but got [{D}, {N}]"),
        (
            {"gate_up": [each[:, :5] for each in up]},
            "gate_up[0] must be of 2 * n columns, n of the gate and n that it gates, n >= 1, but got 5",
        ),
    ):
        with pytest.raises(ValueError, match=f"^moe_mlp: {re.escape(text)}$"):
            moe_mlp(**{**given, **changes})


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_a_list_has_one_dtype_under_mixed_precision(rng, place, name, monkeypatch):
    given = mlp_problem(rng, place)
    given |= {"gate_up": list(given["gate_up"]), "down": list(given["down"])}
    given[name][2] = given[name][2].astype("float16")
    monkeypatch.setattr(paddle.amp, "is_autocast_enabled", lambda: True)
    with pytest.raises(TypeError, match=f"^moe_mlp: {re.escape(f'{name}[2] must be {FLOAT32}')}$"):
        moe_mlp(**given)
