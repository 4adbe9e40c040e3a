# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Writes to matrices with kept codes that no count shows: an error or NaN in place of stale results."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest
from paddle.utils.dlpack import from_dlpack, to_dlpack

from paddle_moe_ops import Float8Matrices, moe_mlp, route
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.nn import keep_float8_matrices
from paddle_moe_ops.testing.equality import assert_bits_equal

from .test_kept_matrices import INNER, E, H, T, backward, exact, flat, new_layer

pytestmark = [pytest.mark.compiled_only, pytest.mark.cpu_only]


@pytest.fixture(autouse=True)
def seeded():
    paddle.seed(7)


WRITES = {
    "out=": lambda layer: paddle.add(layer.experts.down, paddle.ones([1]), out=layer.experts.down),
    "DLPack": lambda layer: from_dlpack(to_dlpack(layer.experts.down)).fill_(0.5),
    "a flat buffer in place": lambda layer: flat(lambda buffer: buffer.scale_(0.5))(layer, paddle.randn([T, H])),
}


CHANGED = re.escape(
    "moe_mlp: matrices with kept codes must be changed by calls that a Float8Matrices notices, or cleared from it, or "
    "given to keep_float8_matrices, but got other values than those that were quantised"
)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_change_that_is_not_noticed_raises_where_data_are_checked(write):
    layer, x = new_layer(), paddle.randn([T, H])
    keep_float8_matrices(layer)
    with paddle.no_grad():
        layer(x)
        write(layer)
        with pytest.raises(ValueError, match=f"^{CHANGED}$"):
            layer(x)
        keep_float8_matrices(layer)
        assert_bits_equal(layer(x), exact(layer, x), what="out")


@pytest.fixture
def unchecked(monkeypatch):
    """The default on a GPU."""
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_results_are_nan_after_a_change_that_is_not_noticed_and_later_calls_raise(write, activation):
    layer, x = new_layer(activation=activation), paddle.randn([T, H])
    keep_float8_matrices(layer)
    with paddle.no_grad():
        due = layer(x)
        assert_bits_equal(layer(x), due, what="without a change")
        write(layer)
        assert np.isnan(to_numpy(layer(x))).all()
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{CHANGED}$"):
                layer(x)
        keep_float8_matrices(layer)
        assert_bits_equal(layer(x), exact(layer, x), what="out")
        assert_bits_equal(layer(x), exact(layer, x), what="out again")


@pytest.mark.usefixtures("unchecked")
def test_a_step_after_a_change_that_is_not_noticed_hides_nothing():
    layer, x = new_layer(), paddle.randn([T, H])
    keep_float8_matrices(layer)
    optimizer = paddle.optimizer.SGD(0.05, parameters=layer.parameters())
    backward(layer, x)
    with paddle.no_grad():
        paddle.add(layer.experts.down, paddle.ones([1]), out=layer.experts.down)
    assert np.isnan(float(backward(layer, x)))
    assert np.isnan(to_numpy(layer.experts.gate_up.grad)).any()
    optimizer.step()
    with pytest.raises(ValueError, match=f"^{CHANGED}$"):
        layer(x)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("element", [0, -1])
@pytest.mark.parametrize("matrix", ["gate_up", "down"])
def test_a_change_of_one_sample_of_a_matrix_is_found(matrix, element):
    layer, x = new_layer(), paddle.randn([T, H])
    keep_float8_matrices(layer)
    with paddle.no_grad():
        layer(x)
        flat = from_dlpack(to_dlpack(getattr(layer.experts, matrix))).flatten()
        assert flat.size > 1 << 14  # so that steps are longer than an element
        step = flat.size // (1 << 14)
        samples = paddle.as_strided(flat, [1 << 14], [step - (step % 2 == 0)])
        samples[element] = 3.0
        assert np.isnan(to_numpy(layer(x))).all()


@pytest.mark.usefixtures("unchecked")
def test_matrices_in_transposed_memory_are_compared_as_well():
    matrices = [paddle.randn([E, 2 * INNER, H]), paddle.randn([E, H, INNER])]
    gate_up, down = (each.transpose([0, 2, 1]) for each in matrices)
    plan = route(paddle.randint(0, E, [T, 1]), num_experts=E)
    options = {"compute": "fp8_1x128", "float8_matrices": Float8Matrices()}
    due = moe_mlp(paddle.ones([T, H]), plan, None, gate_up, down, **options)
    assert_bits_equal(moe_mlp(paddle.ones([T, H]), plan, None, gate_up, down, **options), due, what="out")
    from_dlpack(to_dlpack(matrices[0])).fill_(0.5)
    assert np.isnan(to_numpy(moe_mlp(paddle.ones([T, H]), plan, None, gate_up, down, **options))).all()
