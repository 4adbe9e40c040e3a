# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs whose gradients of matrices wait: mixed precision, skipped steps, wrappers that reduce gradients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.amp.auto_cast import amp_global_state
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer

import paddle_moe_ops.mlp
from paddle_moe_ops import discard_dw, flush_dw, moe_mlp, route, use_backend
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts
from paddle_moe_ops.testing.equality import assert_bits_equal

pytestmark = pytest.mark.usefixtures("place", "backend")

T, H, I, E, K = 17, 16, 8, 4, 2  # noqa: E741


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    paddle.seed(31)
    yield
    discard_dw()


def loss_of(layer: paddle.nn.Layer) -> paddle.Tensor:
    return layer(paddle.randn([T, H])).square().mean()


class Matrices:
    """Matrices of a layer, one tensor each or lists, and a plan."""

    def __init__(self, dtype: str, lists: bool) -> None:
        paddle.seed(7)
        self.plan = route(paddle.arange(T * K).reshape([T, K]) % E, num_experts=E)
        shapes = {"gate_up": [H, 2 * I], "down": [I, H]}
        made = {name: [self.leaf(shape, dtype) for _ in range(E)] for name, shape in shapes.items()}
        if not lists:
            made = {name: self.leaf([E, *shape], dtype) for name, shape in shapes.items()}
        self.given: dict[str, Any] = made
        self.leaves = [leaf for each in made.values() for leaf in (each if lists else [each])]

    @staticmethod
    def leaf(shape: list[int], dtype: str) -> paddle.Tensor:
        made = (paddle.randn(shape) / 4).astype(dtype)
        made.stop_gradient = False
        return made

    def backward(self, number: int, dtype: str, **options: Any) -> Matrices:
        paddle.seed(number)
        x = paddle.randn([T, H]).astype(dtype)
        moe_mlp(x, self.plan, None, **self.given, **options).sum().backward()
        return self


@pytest.mark.parametrize("lists", [False, True], ids=["tensors", "lists"])
def test_master_grad_is_float32_after_the_flush(monkeypatch, lists):
    due, made = Matrices("bfloat16", lists).backward(0, "bfloat16"), Matrices("bfloat16", lists)
    state = amp_global_state()  # decorate(master_grad=True) sets both; auto_cast does nothing on a CPU
    monkeypatch.setattr(state, "use_master_grad", True)
    monkeypatch.setattr(state, "model_parameters", made.given["down"] if lists else [made.given["down"]])
    made.backward(0, "bfloat16", defer_dw=True)
    assert flush_dw() > 0
    for each, other in zip(made.leaves, due.leaves, strict=True):
        is_decorated = any(each is one for one in state.model_parameters)
        assert_bits_equal(each.grad, other.grad.astype("float32" if is_decorated else "bfloat16"))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("options", [{}, {"activation": "geglu"}], ids=["one", "composed"])
@pytest.mark.parametrize("lists", [False, True], ids=["tensors", "lists"])
def test_automatic_mixed_precision(monkeypatch, lists, options, accumulate):
    due, made = Matrices("float32", lists), Matrices("float32", lists)
    monkeypatch.setattr(paddle.amp, "is_autocast_enabled", lambda: True)  # auto_cast does nothing on a CPU
    monkeypatch.setattr(paddle.amp, "get_autocast_dtype", lambda: "bfloat16")
    monkeypatch.setattr(paddle_moe_ops.mlp, "is_on_gpu", lambda _: True)
    for number in range(2):
        due.backward(number, "float32", accumulate=accumulate, **options)
        made.backward(number, "float32", accumulate=accumulate, **options, defer_dw=True)
    assert flush_dw() > 0
    for each, other in zip(made.leaves, due.leaves, strict=True):
        assert each.grad.dtype == paddle.float32
        assert_bits_equal(each.grad, other.grad)


def optimizers(layer: MoELayer) -> list[Any]:
    parameters = layer.parameters()
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    return [paddle.optimizer.SGD(parameters=parameters), paddle.optimizer.AdamW(parameters=groups)]


def test_gradients_are_not_cleared_while_others_wait():
    layer = MoELayer(H, I, E, K, defer_dw=True)
    loss_of(layer).backward()
    for optimizer in optimizers(layer):
        for call in (optimizer.clear_grad, optimizer.zero_grad):
            with pytest.raises(RuntimeError, match=r"^optimizer.clear_grad: gradients of 1 .* or discard_dw\(\)"):
                call()
    discard_dw()
    for optimizer in optimizers(layer):
        optimizer.clear_grad()


def test_main_grad_is_not_cleared_while_others_wait():
    layer = MixPrecisionLayer(MoELayer(H, I, E, K, defer_dw=True), dtype="bfloat16")
    optimizer = MixPrecisionOptimizer(paddle.optimizer.AdamW(parameters=layer.parameters()))
    loss_of(layer).backward()
    for call in (optimizer.clear_grad, optimizer.step):
        with pytest.raises(RuntimeError, match="gradients of 1 backward passes with defer_dw are still to be computed"):
            call()
    flush_dw()
    optimizer.step()
    optimizer.clear_grad()


def test_a_step_that_is_skipped_leaves_no_gradients_for_the_next():
    def trained(**options: Any) -> list[np.ndarray]:
        paddle.seed(3)
        layer = MoELayer(H, I, E, K, **options)
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=layer.parameters())
        for step in range(3):
            try:
                loss_of(layer).backward()
                if step == 1:
                    raise ArithmeticError("a bad batch")
                flush_dw()
                optimizer.step()
            except ArithmeticError:
                discard_dw()
            optimizer.clear_grad()
        return [each.numpy() for each in layer.parameters()]

    for each, other in zip(trained(defer_dw=True), trained(), strict=True):
        np.testing.assert_array_equal(each, other)


def test_a_scaler_of_paddle_waits_for_the_flush():
    layer = MoELayer(H, I, E, K, defer_dw=True)
    (optimizer, _), scaler = optimizers(layer), paddle.amp.GradScaler()
    scaler.scale(loss_of(layer)).backward()
    with pytest.raises(RuntimeError, match=r"^GradScaler: gradients of 1 backward passes with defer_dw"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="gradients of 1 backward passes with defer_dw"):
        scaler.step(optimizer)
    flush_dw()
    scaler.step(optimizer)
    scaler.update()


def of_stage_2(layer: paddle.nn.Layer) -> paddle.Tensor:
    """A call in the wrapper, which cannot be made on a CPU."""
    shards = SimpleNamespace(_bw_hooks=[None], training=False, _auto_refresh_trainable=False, _sync_buffers=False)
    shards._init_internal_storage, shards._layer = lambda _: None, layer
    return GroupShardedStage2.forward(shards, paddle.randn([T, H]))


def of_stage_3(layer: paddle.nn.Layer) -> paddle.Tensor:
    shards = SimpleNamespace(_GroupShardedStage3__sync_buffers=False, _layer=layer)
    return GroupShardedStage3.forward(shards, paddle.randn([T, H]))


@pytest.mark.parametrize(("wrapped", "name"), [(of_stage_2, "GroupShardedStage2"), (of_stage_3, "GroupShardedStage3")])
def test_wrappers_that_reduce_in_the_backward_pass_are_refused(wrapped, name):
    expected = f"^MoELayer: defer_dw must be False in {name}, which reduces gradients before they are flushed, but got"
    with pytest.raises(ValueError, match=expected):
        wrapped(MoELayer(H, I, E, K, defer_dw=True))
    for options in ({}, {"defer_dw": "fleet"}):  # the latter is a whole backward pass where no store is enabled
        wrapped(MoELayer(H, I, E, K, **options)).sum().backward()
    assert flush_dw() == 0


def test_a_wrapper_of_one_process_reduces_nothing():
    layer = MoELayer(H, I, E, K, defer_dw=True)
    loss_of(paddle.DataParallel(layer)).backward()
    assert flush_dw() == 1
    assert layer.experts.down.grad is not None


@use_backend("compiled")  # of graphs
def test_a_block_in_train_mode_is_not_traced():
    """Tracing by bytecode may run it in dygraph: Paddle stops tracing code that it has traced for many layers."""
    layer = paddle.jit.to_static(MoELayer(H, I, E, K, defer_dw=True), full_graph=True)
    expected = r"defer_dw must be False, or the layer in eval\(\) mode, in a static graph, but got True"
    with pytest.raises(Exception, match=expected):
        layer(paddle.randn([T, H]))


def test_a_parameter_that_is_frozen_before_the_flush_gets_no_gradient():
    for accumulate in (False, True):
        experts = SwiGLUExperts(E, H, I, accumulate=accumulate, defer_dw=True)
        plan = route(paddle.arange(T * K).reshape([T, K]) % E, num_experts=E)
        experts(paddle.randn([T, H]), plan=plan, combine=True).sum().backward()
        experts.gate_up.stop_gradient = True
        assert flush_dw() > 0
        assert experts.gate_up.grad is None
        assert experts.down.grad is not None


def test_a_flush_waits_for_the_gradients_that_another_thread_computes():
    layer, found = MoELayer(H, I, E, K, defer_dw=True), []
    matrix = layer.experts.down

    def flushed() -> None:
        flush_dw()
        found.append(matrix.grad is not None)

    other = threading.Thread(target=flushed)

    def hook(gradient: paddle.Tensor | None) -> None:
        if gradient is not None:  # at the flush, which has taken this gradient
            other.start()
            other.join(0.2)

    matrix.register_hook(hook)
    layer(paddle.randn([3, H])).sum().backward()
    assert flush_dw() == 1
    other.join()
    assert found == [True]
