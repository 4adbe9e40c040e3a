# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Counts of dropped slots: 0-D tensors for int(), float(), f-strings, comparisons and sums, in every mode."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops import moe_permute, route, use_backend
from paddle_moe_ops.nn import MoELayer
from tests.ops.dense import Options, dense_layer, parameters_and_bias
from tests.ops.problems import tensor
from tests.static.modes import plain_errors, predictor_of, static_mode

# Paddle says so of its own full_like, whenever it makes a gradient in a graph.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface"),
]

E, H = 3, 5
IDS = np.array([[0, 1], [0, 2], [1, 0], [-1, 0], [2, 0]], np.int32)  # 5, 2 and 2 rows
MASK = np.array([[1, 1], [1, 0], [0, 1], [1, 1], [1, 0]], bool)  # 4 and 3 rows


def of_moe_permute(ids, buffer_size):
    x, probs = (paddle.ones([len(IDS), size]) for size in (H, 2))
    options = {"override_buffer_size": buffer_size, "return_overflow": True, "validate": False}
    return moe_permute(x, None, ids, probs, E, None, 1, **options)[-1]


COUNTS = {
    "no limit": (IDS, lambda ids: route(ids, num_experts=E).overflow, 0),
    "capacity": (IDS, lambda ids: route(ids, num_experts=E, capacity=2).overflow, 3),
    "buffer": (IDS, lambda ids: route(ids, num_experts=E, buffer_size=4, validate=False).overflow, 5),
    "capacity and buffer": (
        IDS,
        lambda ids: route(ids, num_experts=E, capacity=2, buffer_size=5, validate=False).overflow,
        4,
    ),
    "mask": (MASK, lambda mask: route(mask, capacity=1).overflow, 5),
    "moe_permute": (IDS, lambda ids: of_moe_permute(ids, -1), 0),
    "moe_permute with a buffer": (IDS, lambda ids: of_moe_permute(ids, 4), 5),
}
EVERY_COUNT = pytest.mark.parametrize(("routing", "count", "expected"), COUNTS.values(), ids=COUNTS.keys())
BOTH_WAYS = pytest.mark.parametrize("full_graph", [True, False], ids=["full_graph", "bytecode"])
LIMITS = pytest.mark.parametrize("capacity_factor", [None, 0.5])


def assert_is_number(count, expected):
    assert (count.shape, count.dtype) == ([], paddle.int32)
    assert count.stop_gradient
    assert (int(count), float(count)) == (expected, expected)
    assert (f"{count}", f"{count:4d}") == (f"{expected}", f"{expected:4d}")
    assert bool(count > 0) == (expected > 0)
    assert count == expected
    total = sum([count, count])
    assert (total.shape, int(total)) == ([], 2 * expected)


@EVERY_COUNT
def test_a_count_is_a_number(routing, count, expected, place, backend):
    assert_is_number(count(tensor(routing, place)), expected)


@pytest.mark.cpu_only
@EVERY_COUNT
def test_a_count_of_interpreted_kernels_is_a_number(routing, count, expected, interpreted):
    with use_backend("triton"):
        assert_is_number(count(tensor(routing, "cpu")), expected)
    assert interpreted.launches


@LIMITS
def test_a_layer_counts_before_its_first_pass_and_after_each(capacity_factor, place):
    layer, x = MoELayer(H, 4, E, 2, capacity_factor=capacity_factor), paddle.randn([17, H])
    assert_is_number(layer.dropped_slots, 0)
    for tokens in (17, 9):
        layer(x[:tokens])
        assert_is_number(layer.dropped_slots, dropped_by(layer, x[:tokens]))
    layer(x[:0])
    assert_is_number(layer.dropped_slots, 0)


def dropped_by(layer, x):
    factor, tokens = layer.router.capacity_factor, x.shape[0]
    capacity = None if factor is None else max(-int(-factor * tokens * 2 // E), 1)
    return dense_layer(parameters_and_bias(layer), x, Options(2, capacity=capacity)).dropped


def summed(count):
    """Typical uses of a count: a sum, a branch, a number."""
    total = 0 + count
    if count > 0:
        total = total + 100
    return count, total, float(count), 2 * int(count)


def assert_is_summed(results, expected):
    count, *numbers = results
    assert (list(count.shape), count.dtype) == ([], paddle.int32)
    total = expected + 100 * (expected > 0)
    assert [float(each) for each in (count, *numbers)] == [expected, total, expected, 2 * expected]


@BOTH_WAYS
@EVERY_COUNT
def test_a_traced_function_reads_a_number(routing, count, expected, full_graph, place):
    def program(routing):
        return summed(count(routing))

    with plain_errors():
        results = paddle.jit.to_static(program, full_graph=full_graph)(tensor(routing, place))
    assert_is_summed(results, expected)


@BOTH_WAYS
@LIMITS
def test_a_traced_function_reads_the_number_of_a_layer(capacity_factor, full_graph, place):
    layer, x = MoELayer(H, 4, E, 2, capacity_factor=capacity_factor), paddle.randn([17, H])

    def step(x):
        before = layer.dropped_slots
        layer(x)
        return before, *summed(layer.dropped_slots)

    traced = paddle.jit.to_static(step, full_graph=full_graph)
    with plain_errors():
        before, *results = traced(x)
        assert_is_number(before, 0)
        assert_is_summed(results, dropped_by(layer, x))
        results = traced(x[:9])[1:]
        assert_is_summed(results, dropped_by(layer, x[:9]))


@EVERY_COUNT
def test_an_executor_hands_out_a_number(routing, count, expected, place):
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        value = count(paddle.static.data("routing", [None, routing.shape[1]], routing.dtype.name))
        assert (list(value.shape), value.dtype) == ([], paddle.int32)
        outputs = [value, value + 1, value.astype("float32")]
        found = paddle.static.Executor().run(feed={"routing": routing}, fetch_list=outputs)
    assert [each.shape for each in found] == [()] * 3
    assert [int(found[0]), int(found[1]), float(found[2])] == [expected, expected + 1, expected]


@LIMITS
def test_a_saved_layer_hands_out_a_number(capacity_factor, place, tmp_path):
    layer, x = MoELayer(H, 4, E, 2, capacity_factor=capacity_factor), paddle.randn([17, H])

    class Counting(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x), self.layer.dropped_slots

    spec = [paddle.static.InputSpec([None, H], "float32", "x")]
    with plain_errors():
        traced = paddle.jit.to_static(Counting(), full_graph=True, input_spec=spec)
        paddle.jit.save(traced, str(tmp_path / "layer"))
    assert_is_number(paddle.jit.load(str(tmp_path / "layer"))(x)[1], dropped_by(layer, x))
    count = predictor_of(str(tmp_path / "layer")).run([x])[1]
    assert_is_number(count, dropped_by(layer, x))
