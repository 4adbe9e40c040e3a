# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Steps of training with kept float8 matrices, skipped ones too, have the bits of steps without them."""

from __future__ import annotations

import copy
import threading

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import mix_precision_utils, recompute

from paddle_moe_ops import expert_parallel
from paddle_moe_ops.backends import changes
from paddle_moe_ops.backends.layers import LayerKernels
from paddle_moe_ops.expert_parallel import load_checkpoint, save_checkpoint
from paddle_moe_ops.nn import keep_float8_matrices
from paddle_moe_ops.testing.equality import assert_bits_equal

from .test_kept_matrices import H, T, enabled_scaler, exact, new_layer, quantised

__all__ = ["quantised"]  # a fixture

pytestmark = [pytest.mark.compiled_only, pytest.mark.cpu_only]


@pytest.fixture(autouse=True)
def seeded():
    paddle.seed(7)


def recomputed(reentrant):
    return lambda layer, x: recompute(layer, x, use_reentrant=reentrant)


CALLS = {
    "called": lambda layer, x: layer(x),
    "recomputed": recomputed(True),
    "recomputed by hooks": recomputed(False),
    "in evaluation mode": lambda layer, x: layer.eval()(x),
}
SCALERS = {"Paddle's scaler": paddle.amp.GradScaler, "the scaler of ranks": expert_parallel.GradScaler}


def steps(layer, call, scaler, parts, optimizer=paddle.optimizer.AdamW):
    """Parameters after each of three steps of several micro-batches; the second step has infinite gradients."""
    optimizer, states = optimizer(0.05, parameters=layer.parameters()), []
    for step in range(3):
        for x in parts:
            x = x.detach()
            x.stop_gradient = False
            loss = call(layer, x).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        states.append({name: each.numpy() for name, each in layer.named_parameters()})
    return states


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("scaler", SCALERS.values(), ids=SCALERS)
def test_a_skipped_step_leaves_no_stale_codes(scaler, call, monkeypatch, quantised):
    layer, parts = new_layer(), paddle.randn([2, T, H])
    twin = copy.deepcopy(layer)
    keep_float8_matrices(layer)
    made = steps(layer, call, enabled_scaler(monkeypatch, scaler), parts)
    assert len(quantised) in (2, 3)  # a step that is skipped need not count as a change
    due = steps(twin, call, enabled_scaler(monkeypatch, scaler), parts)
    for number, (one, other) in enumerate(zip(made, due, strict=True)):
        for name, each in one.items():
            np.testing.assert_array_equal(each, other[name], err_msg=f"{name} after step {number}")
    assert all((made[1][name] == each).all() for name, each in made[0].items())  # the step was skipped
    assert any((made[2][name] != each).any() for name, each in made[1].items())
    assert_bits_equal(layer(parts[0]), exact(layer, parts[0]), what="out")


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "in each call"])
def test_a_step_by_gradients_in_main_grad_is_noticed(keeps, quantised):
    layer, parts = new_layer(accumulate=True), paddle.randn([2, T, H])
    if keeps:
        keep_float8_matrices(layer)
    model = mix_precision_utils.MixPrecisionLayer(layer, dtype="bfloat16")
    inner = paddle.optimizer.AdamW(0.05, parameters=layer.parameters())
    optimizer = mix_precision_utils.MixPrecisionOptimizer(inner)
    before = layer.experts.down.numpy()
    for _ in range(2):
        for x in parts:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    assert (layer.experts.down.numpy() != before).any()
    assert len(quantised) == (2 if keeps else 4)
    with paddle.no_grad():
        assert_bits_equal(layer(parts[0]), exact(layer, parts[0]), what="out")


def test_a_checkpoint_that_is_loaded_in_place_is_noticed(tmp_path):
    layer, x = new_layer(), paddle.randn([T, H])
    save_checkpoint(str(tmp_path), layer).wait()
    other = new_layer()
    keep_float8_matrices(other)
    with paddle.no_grad():
        before = other(x)
        load_checkpoint(str(tmp_path), other)
        assert_bits_equal(other(x), exact(layer, x), what="out")
        assert not paddle.equal_all(other(x), before)


def test_a_file_of_states_that_is_loaded_is_noticed(tmp_path):
    layer, x = new_layer(), paddle.randn([T, H])
    paddle.save(layer.state_dict(), str(tmp_path / "layer.pdparams"))
    other = new_layer()
    keep_float8_matrices(other)
    with paddle.no_grad():
        other(x)
        other.set_state_dict(paddle.load(str(tmp_path / "layer.pdparams")))
        assert_bits_equal(other(x), exact(layer, x), what="out")


def in_another_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("way", ["written and called", "cleared"])
def test_a_thread_that_quantises_keeps_nothing_that_another_has_changed(way, monkeypatch):
    layer, x = new_layer(), paddle.randn([T, H])
    keep_float8_matrices(layer)
    quantize, begun, found = LayerKernels.quantize_experts, [], []

    def write_and_call() -> None:
        layer.experts.down.set_value(2 * layer.experts.down)
        found.append(layer(x).detach())

    def interrupted(self, *arguments):
        made = quantize(self, *arguments)
        if not begun:
            begun.append(1)
            in_another_thread(write_and_call if way == "written and called" else layer.experts.float8_matrices.clear)
        return made

    before = exact(layer, x)
    monkeypatch.setattr(LayerKernels, "quantize_experts", interrupted)
    assert_bits_equal(layer(x).detach(), before, what="the call that was interrupted")
    found.append(layer(x).detach())
    due = exact(layer, x)
    assert (due != before).any() == (way == "written and called")
    for each in found:
        assert_bits_equal(each, due, what="a later call")


def test_a_write_is_noticed_while_another_threads_layer_begins_to_keep_its_matrices(monkeypatch):
    layer, other, x = new_layer(), new_layer(), paddle.randn([T, H])
    for each in (layer, other):
        keep_float8_matrices(each)
    before = layer(x).detach()
    range_of, begun = changes._range_of, []

    def interrupted(tensor):
        found = range_of(tensor)
        if not begun:
            begun.append(1)
            in_another_thread(lambda: other(x))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(changes, "_range_of", interrupted)
        layer.experts.down.set_value(2 * layer.experts.down)
    after = layer(x).detach()
    assert (after != before).any()
    assert_bits_equal(after, exact(layer, x), what="out")
