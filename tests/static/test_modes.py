# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors of dygraph in static mode, and values of a static graph in dygraph: a TypeError that names the argument."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_moe_ops import moe_mlp, permute, quantize_experts, quantized_experts, route, unpermute
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.every_call import CALLS as OWN_CALLS
from tests.ops.every_call import made_of
from tests.ops.fastdeploy_calls import FASTDEPLOY_CALLS

pytestmark = pytest.mark.cpu_only

CALLS = [*OWN_CALLS, *FASTDEPLOY_CALLS]
T, H, I, E, K = 3, 32, 16, 4, 1  # noqa: E741
STATIC = "must be a value of the static graph in static mode (paddle.disable_static() ends it), "
STATIC += "but got a tensor of dygraph"
DYGRAPH = "must be a paddle.Tensor in dygraph, but got a value of a static graph"


@contextmanager
def static_mode() -> Iterator[paddle.static.Program]:
    """The program, which owns its values."""
    program = paddle.static.Program()
    paddle.enable_static()
    try:
        with paddle.static.program_guard(program, paddle.static.Program()):
            yield program
    finally:
        paddle.disable_static()


def value_like(array: np.ndarray, name: str = "value") -> paddle.pir.Value:
    dtype = "float8_e4m3fn" if "float8" in str(array.dtype) else str(array.dtype)
    return paddle.static.data(name, list(array.shape), dtype)


def named(function: str, argument: str, text: str) -> str:
    return f"^{re.escape(f'{function}: {argument} {text}')}$"


@pytest.mark.parametrize(
    ("call", "argument"), [pytest.param(call, name, id=f"{call}-{name}") for call in CALLS for name in call.tensors]
)
def test_a_value_of_a_graph_in_dygraph_is_named(call, argument, place):
    with static_mode() as program:
        value = value_like(call.arguments[argument])
    with pytest.raises(TypeError, match=named(call.function, argument, DYGRAPH)):
        call.run(place, **{argument: value})
    del program


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_tensor_of_dygraph_in_static_mode_is_named(call, place):
    given = {name: made_of(value, place) for name, value in call.arguments.items()}
    with static_mode():
        values = {name: value_like(call.arguments[name], name) for name in call.tensors}
        for argument in call.tensors:
            changes = {**given, **values, argument: given[argument]}
            with pytest.raises(TypeError, match=f"^{call.function}: .* {re.escape(STATIC)}$"):
                call.run(place, **changes)


class Given:
    """Arguments of a layer in one mode."""

    def __init__(self, make) -> None:
        self.x, self.probs = make("x", (T, H), "float32"), make("probs", (T, K), "float32")
        self.gate_up, self.down = make("gate_up", (E, H, 2 * I), "float32"), make("down", (E, I, H), "float32")
        self.first = self.down[0]
        self.plan = route(make("ids", (T, K), "int64"), num_experts=E)
        if isinstance(self.gate_up, paddle.Tensor):
            self.codes = quantize_experts(self.gate_up, self.down, format="int8")
            self.matrices = list(self.down.unbind(0))
            self.parameters = nn.ParameterList([paddle.create_parameter([I, H], "float32") for _ in range(E)])


def dygraph() -> Given:
    return Given(lambda _, shape, dtype: paddle.zeros(shape, dtype))


def graph() -> Given:
    with static_mode() as program:
        given = Given(paddle.static.data)
    given.program = program
    return given


MIXED = {
    "x": ("moe_mlp", "x", lambda a, b: moe_mlp(b.x, a.plan, a.probs, a.gate_up, a.down)),
    "probs": ("moe_mlp", "probs", lambda a, b: moe_mlp(a.x, a.plan, b.probs, a.gate_up, a.down)),
    "plan": ("moe_mlp", "plan.slot_to_row", lambda a, b: moe_mlp(a.x, b.plan, None, a.gate_up, a.down)),
    "compute": ("moe_mlp", "down", lambda a, b: moe_mlp(a.x, a.plan, None, a.gate_up, b.down, compute="fp8_1x128")),
    "activation": ("moe_mlp", "down", lambda a, b: moe_mlp(a.x, a.plan, None, a.gate_up, b.down, activation="geglu")),
    "plan of rows": ("permute", "plan.slot_to_row", lambda a, b: permute(a.x, b.plan)),
    "plan of sums": ("unpermute", "plan.slot_to_row", lambda a, b: unpermute(a.x, b.plan)),
    "rows": ("permute", "x", lambda a, b: permute(b.x, a.plan)),
    "further tensors": (
        "quantized_experts",
        "tensors[1]",
        lambda a, b: quantized_experts(a.x, a.plan, len, len, a.x, b.x),
    ),
    "list": ("grouped_gemm", "W[1]", lambda a, b: grouped_gemm(a.x, [a.first, b.first], [1, 2], transpose=False)),
}
OF_DYGRAPH = {
    "codes": ("moe_mlp", "gate_up.codes", lambda a, b: moe_mlp(a.x, a.plan, None, *b.codes)),
    "scales": ("moe_mlp", "down.codes", lambda a, b: moe_mlp(a.x, a.plan, None, a.gate_up, b.codes[1])),
    "a list": ("moe_mlp", "down[0]", lambda a, b: moe_mlp(a.x, a.plan, None, a.gate_up, b.matrices)),
    "parameters": ("moe_mlp", "down[0]", lambda a, b: moe_mlp(a.x, a.plan, None, a.gate_up, b.parameters)),
    "counts": ("grouped_gemm", "W", lambda a, b: grouped_gemm(a.x, b.gate_up, [1, 1, 1, 0], transpose=False)),
    "quantised": ("quantize_experts", "gate_up", lambda a, b: quantize_experts(b.gate_up, b.down, format="int8")),
    "only dygraph": ("moe_mlp", "x", lambda a, b: moe_mlp(b.x, b.plan, None, *b.codes)),
}


@pytest.mark.parametrize("case", [*MIXED, *OF_DYGRAPH])
def test_static_mode_names_a_tensor_of_dygraph_in_any_argument(case):
    function, argument, call = (MIXED | OF_DYGRAPH)[case]
    other = dygraph()
    with static_mode(), pytest.raises(TypeError, match=named(function, argument, STATIC)):
        call(Given(paddle.static.data), other)


@pytest.mark.parametrize("case", MIXED)
def test_dygraph_names_a_value_of_a_graph_in_any_argument(case):
    function, argument, call = MIXED[case]
    with pytest.raises(TypeError, match=named(function, argument, DYGRAPH)):
        call(dygraph(), graph())


def test_a_layer_of_dygraph_in_static_mode_is_refused():
    layer, own = MoELayer(H, I, E, 2, num_shared_experts=1), dygraph()
    with static_mode():
        x = paddle.static.data("x", [T, H], "float32")
        plan = route(paddle.static.data("ids", [T, K], "int64"), num_experts=E)
        for function, argument, call in (
            ("MoELayer", "the weight", lambda: layer(x)),
            ("MoELayer", "x", lambda: layer(own.x)),
            ("SwiGLUExperts", "experts.gate_up", lambda: layer.experts(x, plan=plan, combine=True)),
            ("SwiGLUExperts", "experts.gate_up", lambda: layer.experts(x, plan=plan)),
            ("SwiGLUExperts", "rows", lambda: layer.experts(own.x, plan=plan, combine=True)),
            ("TopKRouter", "weight", lambda: layer.router(x)),
            ("SwiGLU", "gate_up", lambda: layer.shared(x)),
        ):
            with pytest.raises(TypeError, match=named(function, argument, STATIC)):
                call()


def test_a_layer_of_dygraph_names_a_value_of_a_graph():
    layer, other = MoELayer(H, I, E, 2), graph()
    with pytest.raises(TypeError, match=named("MoELayer", "x", DYGRAPH)):
        layer(other.x)
    with pytest.raises(TypeError, match=named("SwiGLUExperts", "plan.slot_to_row", DYGRAPH)):
        layer.experts(dygraph().x, plan=other.plan, combine=True)


@pytest.mark.parametrize("format", ["int8", "fp8_128x128"])
def test_a_layer_is_quantised_in_dygraph_alone(format):
    layer = MoELayer(H, I, E, 2)
    expected = r"^MoELayer: quantising needs dygraph, but Paddle is in static mode \(paddle.disable_static\(\)\)$"
    with static_mode(), pytest.raises(RuntimeError, match=expected):
        layer.quantize_experts(format)
    layer.quantize_experts(format)
    assert layer(paddle.zeros([T, H])).shape == [T, H]


def test_tracing_takes_tensors_of_dygraph_for_constants():
    given = dygraph()
    given.x, given.gate_up = paddle.randn([T, H]), paddle.ones([E, H, 2 * I])

    def call(x):
        return moe_mlp(x, given.plan, given.probs + 1, *given.codes) + moe_mlp(
            x, given.plan, given.probs, given.gate_up, given.matrices
        )

    traced = paddle.jit.to_static(call, full_graph=True)
    assert_bits_equal(traced(given.x), call(given.x))
