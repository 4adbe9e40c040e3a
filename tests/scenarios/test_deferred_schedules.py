# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of matrices that wait: schedules of Fleet's zero-bubble pipelines, steps that come too early, bad calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle.distributed.fleet.meta_parallel.zero_bubble_utils import SplitBWLinear, WeightGradStore
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer
from paddle.static import InputSpec

from paddle_moe_ops import Plan, discard_dw, flush_dw, moe_mlp, quantize_experts, route, use_backend
from paddle_moe_ops.expert_parallel import ClipGradByGlobalNorm, GradScaler, average_gradients
from paddle_moe_ops.expert_parallel.fleet_optimizers import FleetOptimizer
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts
from paddle_moe_ops.testing.equality import assert_bits_equal

pytestmark = pytest.mark.usefixtures("place", "backend")

T, H, I, E, K = 17, 12, 6, 4, 2  # noqa: E741


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    paddle.seed(29)
    yield
    discard_dw()
    WeightGradStore.enabled = False
    WeightGradStore.clear()


def plan_of() -> Plan:
    return route(paddle.arange(T * K).reshape([T, K]) % E, num_experts=E)


class Stage(paddle.nn.Layer):
    """A stage of a pipeline: a dense layer of Fleet's with a backward pass in two parts, and a block."""

    def __init__(self, dense: type = paddle.nn.Linear, **options: Any) -> None:
        super().__init__()
        self.dense, self.block = dense(H, H), MoELayer(H, I, E, K, **options)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.block(self.dense(x))


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"expert_bias": True, "activation": "geglu"},
    "float8": {"compute": "fp8_1x128"},
    "accumulates": {"accumulate": True},
}


def scheduled(stage: Stage, enabled: tuple[bool, ...], pops: Callable[[int], int]) -> list[paddle.Tensor | None]:
    """Gradients after passes in the order of `DualPipeV`: each backward pass says whether W waits; then some W pass."""
    batches = [paddle.randn([T, H]) for _ in enabled]
    for each in batches:
        each.stop_gradient = False
    losses = [stage(each).square().mean() for each in batches]
    waiting = 0
    for number, (loss, is_enabled) in enumerate(zip(losses, enabled, strict=True)):
        WeightGradStore.enabled = is_enabled
        loss.backward()
        WeightGradStore.enabled = False
        if is_enabled:
            WeightGradStore.flush()
            waiting += 1
        for _ in range(min(pops(number), waiting)):
            WeightGradStore.pop()
            waiting -= 1
    for _ in range(waiting):
        WeightGradStore.pop()
    assert WeightGradStore.funcs_queue.empty()
    return [each.grad for each in (*stage.parameters(), *batches)]


SCHEDULES = {
    "each W follows its B": ((True,) * 4, lambda _: 1),
    "all W at the end": ((True,) * 4, lambda _: 0),
    "two W after every second B": ((True,) * 4, lambda number: 2 * (number % 2)),
    "the second half waits": ((False, False, True, True), lambda number: number > 2),
    "none waits": ((False,) * 4, lambda _: 1),
}


@pytest.mark.parametrize(("enabled", "pops"), SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_zero_bubble_schedules_have_the_bits_of_plain_backward_passes(options, enabled, pops):
    def gradients(dense: type, **more: Any) -> list[paddle.Tensor | None]:
        paddle.seed(11)
        return scheduled(Stage(dense, **options, **more), enabled, pops)

    due = gradients(paddle.nn.Linear)
    made = gradients(SplitBWLinear, defer_dw="fleet")
    assert flush_dw() == 0
    for each, other in zip(made, due, strict=True):
        assert_bits_equal(each, other)


def test_main_grad_in_a_zero_bubble_schedule():
    def trained(dense: type, **more: Any) -> list[paddle.Tensor]:
        paddle.seed(13)
        stage = Stage(dense, **more)
        model = MixPrecisionLayer(stage, dtype="bfloat16")
        optimizer = MixPrecisionOptimizer(paddle.optimizer.AdamW(1e-2, parameters=model.parameters()))
        for _ in range(2):
            scheduled(stage, (True, False, True), lambda _: 0)
            optimizer.step()
            optimizer.clear_grad()
        return stage.parameters()

    pairs = zip(trained(SplitBWLinear, defer_dw="fleet"), trained(paddle.nn.Linear), strict=True)
    assert all((each == other).all() for each, other in pairs)


def test_a_plain_deferral_uses_the_store_where_it_is_enabled():
    paddle.seed(3)
    due = Stage()
    made = Stage(defer_dw=True)
    made.set_state_dict(due.state_dict())
    x = paddle.randn([T, H])
    due(x).sum().backward()
    WeightGradStore.enabled = True
    made(x).sum().backward()
    WeightGradStore.enabled = False
    WeightGradStore.flush()
    assert flush_dw() == 0
    assert made.block.experts.down.grad is None
    WeightGradStore.pop()
    for each, other in zip(made.parameters(), due.parameters(), strict=True):
        assert_bits_equal(each.grad, other.grad)


def test_a_store_that_is_cleared_drops_what_waits():
    stage = Stage(defer_dw="fleet")
    WeightGradStore.enabled = True
    stage(paddle.randn([T, H])).sum().backward()
    WeightGradStore.enabled = False
    optimizer = paddle.optimizer.SGD(parameters=stage.parameters())
    with pytest.raises(
        RuntimeError, match=r"1 backward passes with defer_dw are still .* call WeightGradStore.pop\(\)"
    ):
        optimizer.step()
    WeightGradStore.clear()
    optimizer.step()
    assert stage.block.experts.down.grad is None


def test_without_the_store_fleets_mode_is_a_plain_backward_pass():
    layer, x = SwiGLUExperts(E, H, I, defer_dw="fleet"), paddle.randn([T, H])
    plan = plan_of()
    out = layer(x, plan=plan, combine=True)
    (gradient,) = paddle.grad(out.sum(), [layer.gate_up])
    layer(x, plan=plan, combine=True).sum().backward()
    assert_bits_equal(gradient, layer.gate_up.grad)
    assert flush_dw() == 0


def optimizers(parameters: list[paddle.Tensor]) -> list[Any]:
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    return [
        paddle.optimizer.SGD(parameters=parameters),
        paddle.optimizer.AdamW(parameters=groups),
        paddle.optimizer.Momentum(parameters=parameters, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)),
    ]


def test_steps_before_the_flush_raise():
    layer, other = MoELayer(H, I, E, K, defer_dw=True), MoELayer(H, I, E, K)
    x = paddle.randn([T, H])
    (layer(x).sum() + other(x).sum()).backward()
    before = layer.experts.down.numpy()
    scaler = GradScaler()
    optimizer = paddle.optimizer.SGD(parameters=layer.parameters())
    pairs = [(each, each.grad) for each in layer.parameters()]
    calls: dict[str, Callable[[], Any]] = {
        "average_gradients": lambda: average_gradients(layer.parameters()),
        "GradScaler": lambda: scaler.unscale_(optimizer),
        "ClipGradByGlobalNorm": lambda: ClipGradByGlobalNorm(1.0)(pairs),
        **{"optimizer.step" + " " * n: each.step for n, each in enumerate(optimizers(layer.parameters()))},
    }
    for name, call in calls.items():
        expected = rf"^{name.strip()}: gradients of \d backward passes with defer_dw are still .* call flush_dw\(\)"
        with pytest.raises(RuntimeError, match=expected):
            call()
    with pytest.raises(RuntimeError, match=r"^distributed_optimizer: gradients of 1 backward passes with defer_dw"):
        FleetOptimizer._hybrid_sync_grad(SimpleNamespace(), layer.parameters())
    assert (layer.experts.down.numpy() == before).all()
    average_gradients(other.parameters())  # which wait for nothing
    for each in optimizers(other.parameters()):
        each.step()
    flush_dw()
    for name, call in calls.items():
        if name != "ClipGradByGlobalNorm":
            call()
    assert (layer.experts.down.numpy() != before).any()


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"defer_dw": 1}, TypeError, "defer_dw must be True, False or 'fleet', but got 1"),
        ({"defer_dw": None}, TypeError, "defer_dw must be True, False or 'fleet', but got None"),
        ({"defer_dw": "later"}, ValueError, "defer_dw must be True, False or 'fleet', but got 'later'"),
    ],
    ids=str,
)
def test_bad_values_are_named(options, error, expected):
    plan = plan_of()
    operands = paddle.randn([T, H]), plan, None, paddle.randn([E, H, 2 * I]), paddle.randn([E, I, H])
    with pytest.raises(error, match=f"^moe_mlp: {expected}"):
        moe_mlp(*operands, **options)
    for make in (lambda: SwiGLUExperts(E, H, I, **options), lambda: MoELayer(H, I, E, K, **options)):
        with pytest.raises(error, match=expected):
            make()


def test_matrices_must_be_leaves_and_have_gradients():
    plan = plan_of()
    x, gate_up, down = paddle.randn([T, H]), paddle.randn([E, H, 2 * I]), paddle.randn([E, I, H])
    gate_up.stop_gradient = False
    expected = "gate_up must be a leaf, such as a parameter, with defer_dw, but got the result of another operator"
    with pytest.raises(ValueError, match=f"^moe_mlp: {expected}"):
        moe_mlp(x, plan, None, gate_up * 2, down, defer_dw=True)
    with pytest.raises(ValueError, match=r"gate_up\[1\] must be a leaf"):
        moe_mlp(
            x,
            plan,
            None,
            [each * 1 for each in gate_up.detach()][:1] + [each * 1 for each in gate_up][1:],
            down,
            defer_dw=True,
        )
    codes = quantize_experts(gate_up.detach(), down, format="int8")
    with pytest.raises(ValueError, match="defer_dw must be False with quantised matrices, which have no gradient"):
        moe_mlp(x, plan, None, *codes, defer_dw=True)
    layer = MoELayer(H, I, E, K, defer_dw=True).quantize_experts("int8")
    assert layer(x).shape == [T, H]


@pytest.mark.parametrize("combine", [False, True], ids=["rows", "sums"])
def test_a_layer_that_trains_is_not_traced(combine):
    experts = SwiGLUExperts(E, H, I, defer_dw=True)
    plan = plan_of()

    @paddle.jit.to_static(full_graph=True)
    def traced(x):
        return experts(x, plan=plan, combine=combine)

    with pytest.raises(ValueError, match=r"defer_dw must be False, or the layer in eval\(\) mode, in a static graph"):
        traced(paddle.randn([T, H]))


def test_a_call_in_a_static_graph_is_refused():
    gate_up, down = (paddle.create_parameter(shape, "float32") for shape in ([E, H, 2 * I], [E, I, H]))
    plan = plan_of()

    @paddle.jit.to_static(full_graph=True)
    def traced(x):
        return moe_mlp(x, plan, None, gate_up, down, defer_dw=True)

    with pytest.raises(ValueError, match="moe_mlp: defer_dw must be False in a static graph, but got True"):
        traced(paddle.randn([T, H]))


@use_backend("compiled")  # of graphs
def test_a_layer_in_eval_mode_is_saved(tmp_path):
    layer, x = MoELayer(H, I, E, K, defer_dw=True), paddle.randn([T, H])
    layer.eval()
    expected = layer(x)
    path = str(tmp_path / "layer")
    paddle.jit.save(layer, path, input_spec=[InputSpec([None, H], "float32", "x")])
    assert paddle.allclose(paddle.jit.load(path)(x), expected, atol=1e-5).item()
