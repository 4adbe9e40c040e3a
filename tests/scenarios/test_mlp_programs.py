# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs with experts as one call: training, accumulation, recomputation, shared and frozen weights, no tokens."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.distributed.fleet.utils import recompute
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer

from paddle_moe_ops import moe_mlp, permute, route
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts

pytestmark = [
    pytest.mark.usefixtures("place", "backend"),
    pytest.mark.filterwarnings("ignore:amp_guard can only be enabled"),
]

T, H, I, E, K = 24, 12, 6, 5, 2  # noqa: E741
PARAMETERS = ("router.weight", "experts.gate_up", "experts.down", "shared.gate_up", "shared.down")


@pytest.fixture(autouse=True)
def _seed():
    paddle.seed(17)


def layer_of(**options) -> MoELayer:
    """The same weights in every call."""
    paddle.seed(5)
    return MoELayer(H, I, E, K, **options)


def batches(count: int, seed: int = 1) -> list[paddle.Tensor]:
    rng = np.random.default_rng(seed)
    return [paddle.to_tensor(rng.standard_normal((T, H)).astype(np.float32)) for _ in range(count)]


def trained(layer, steps=12, **adam):
    """Losses of a layer that learns to reverse the columns."""
    optimizer = paddle.optimizer.AdamW(2e-2, parameters=layer.parameters(), **adam)
    losses = []
    for x in batches(steps):
        loss = ((layer(x) - x.flip(1)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("by_plan", [False, True], ids=["counts", "plan"])
def test_rows_that_are_not_combined_accumulate_too(by_plan):
    x, plan = batches(1)[0], route(paddle.to_tensor(np.arange(T * K).reshape(T, K) % E), num_experts=E)
    rows = x if by_plan else permute(x, plan)[0]
    given = {"plan": plan} if by_plan else {"tokens_per_expert": plan.tokens_per_expert}
    plain, adding = (SwiGLUExperts(E, H, I, accumulate=each) for each in (False, True))
    adding.set_state_dict(plain.state_dict())
    for parameter in adding.parameters():
        parameter.main_grad = None
    for _ in range(2):
        plain(rows, **given).sum().backward()
        adding(rows, **given).sum().backward()
    for expected, parameter in zip(plain.parameters(), adding.parameters(), strict=True):
        assert parameter.grad is None
        np.testing.assert_allclose(parameter.main_grad.numpy(), expected.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_a_layer_learns_and_what_it_keeps_makes_no_difference():
    losses = trained(layer_of())
    assert losses[-1] < 0.9 * losses[0]
    assert trained(layer_of(keep="x", workspace_mb=1)) == losses


def by_hand(x, router, gate_up, down):
    """A mixture of experts from a router of one's own; the ids come from paddle.topk with their graph."""
    probs, ids = paddle.topk(F.softmax(paddle.matmul(x, router), axis=-1), K)
    plan = route(ids, num_experts=E, padding_alignment=4)
    return moe_mlp(x, plan, probs, gate_up, down)


def dense(x, router, gate_up, down):
    probs, ids = paddle.topk(F.softmax(paddle.matmul(x, router), axis=-1), K)
    weights = (F.one_hot(ids, E) * probs.unsqueeze(-1)).sum(1)
    gate, up = paddle.matmul(x.unsqueeze(0), gate_up).chunk(2, axis=-1)
    rows = paddle.matmul(F.silu(gate) * up, down)
    return (rows * weights.transpose([1, 0]).unsqueeze(-1)).sum(0)


def test_a_router_of_ones_own_trains_through_the_experts():
    results = []
    for form in (by_hand, dense):
        paddle.seed(3)
        leaves = [paddle.randn(shape) for shape in ([T, H], [H, E], [E, H, 2 * I], [E, I, H])]
        for leaf in leaves:
            leaf.stop_gradient = False
        (form(*leaves) ** 2).sum().backward()
        results.append([leaf.grad.numpy() for leaf in leaves])
    for made, due in zip(*results, strict=True):
        assert np.abs(due).max() > 0
        np.testing.assert_allclose(made, due, rtol=0, atol=1e-5 * np.abs(due).max())


def with_main_grads(layer):
    for parameter in (layer.experts.gate_up, layer.experts.down):
        parameter.main_grad = None
    return layer


def gradients_of(layer):
    """Gradients by name, in `main_grad` or `grad`."""
    return {
        name: (parameter.main_grad if getattr(parameter, "main_grad", None) is not None else parameter.grad).numpy()
        for name, parameter in layer.named_parameters()
    }


def assert_same(made, due):
    assert made.keys() == due.keys()
    for name, expected in due.items():
        np.testing.assert_allclose(made[name], expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("optimizer", ["SGD", "Momentum", "AdamW"])
@pytest.mark.parametrize("form", ["grad", "MixPrecisionLayer"])
def test_training_with_accumulation_is_that_without(form, optimizer):
    """As docs/training.md shows it: every parameter moves, by as much."""

    def changes(accumulates):
        paddle.seed(8)
        layer = MoELayer(H, I, E, K, accumulate=accumulates)
        before = {name: each.numpy() for name, each in layer.named_parameters()}
        model, steps = layer, getattr(paddle.optimizer, optimizer)(0.01, parameters=layer.parameters())
        if accumulates and form == "MixPrecisionLayer":
            model, steps = MixPrecisionLayer(layer, dtype="bfloat16"), MixPrecisionOptimizer(steps)
        for _ in range(2):
            for _ in range(2):
                model(paddle.randn([11, H])).square().sum().backward()
            steps.step()
            steps.clear_grad()
        return {name: each.numpy() - before[name] for name, each in layer.named_parameters()}

    made, due = changes(True), changes(False)
    for name, change in due.items():
        assert np.abs(change).max() > 0, name
        np.testing.assert_allclose(made[name], change, rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("accumulates", ["main_grad", "grad"])
def test_micro_batches_add_up_to_the_gradient_of_the_batch(accumulates):
    whole, parts = layer_of(), layer_of(accumulate=True)
    if accumulates == "main_grad":
        with_main_grads(parts)
    (whole(paddle.concat(batches(4))) ** 2).sum().backward()
    for x in batches(4):
        (parts(x) ** 2).sum().backward()
    assert (parts.experts.down.grad is None) == (accumulates == "main_grad")
    assert_same(gradients_of(parts), gradients_of(whole))


def test_an_optimizer_steps_on_the_main_gradients():
    """Paddle's optimizers take `main_grad` in place of `grad`, and clip it with the others."""
    layers = layer_of(), with_main_grads(layer_of(accumulate=True))
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if layer is layers[1] and not name.startswith("experts"):
                parameter.main_grad = None
        clip = paddle.nn.ClipGradByGlobalNorm(0.5)
        optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters(), grad_clip=clip)
        (layer(batches(1)[0]) ** 2).sum().backward()
        for parameter in layer.parameters():
            if hasattr(parameter, "main_grad") and parameter.main_grad is None:
                parameter.main_grad, parameter.grad = parameter.grad.clone(), None
        optimizer.step()
    made, due = ({name: each.numpy() for name, each in layer.named_parameters()} for layer in reversed(layers))
    assert_same(made, due)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
def test_recomputation_adds_a_gradient_once(use_reentrant):
    plain, recomputed = layer_of(), with_main_grads(layer_of(accumulate=True, keep="x"))
    x = batches(1)[0]
    x.stop_gradient = False
    (plain(x) ** 2).sum().backward()
    (recompute(recomputed, x, use_reentrant=use_reentrant) ** 2).sum().backward()
    assert_same(gradients_of(recomputed), gradients_of(plain))


def test_weights_shared_by_two_layers_get_both_gradients():
    first, second = layer_of(), layer_of()
    shared = with_main_grads(layer_of(accumulate=True))
    x = batches(1)[0]
    (second(first(x)) ** 2).sum().backward()
    (shared(shared(x)) ** 2).sum().backward()
    both = {name: each + gradients_of(second)[name] for name, each in gradients_of(first).items()}
    assert_same(gradients_of(shared), both)


def test_frozen_experts_pass_gradients_on():
    layer, trained_layer = layer_of(accumulate=True), layer_of()
    for parameter in layer.experts.parameters():
        parameter.stop_gradient = True
    results = []
    for each in (layer, trained_layer):
        x = batches(1)[0]
        x.stop_gradient = False
        (each(x) ** 2).sum().backward()
        results.append((x.grad.numpy(), each.router.weight.grad.numpy()))
    for made, due in zip(*results, strict=True):
        np.testing.assert_allclose(made, due, rtol=0, atol=1e-6 * np.abs(due).max())
    assert layer.experts.down.grad is None


def test_a_rank_without_tokens_takes_part_in_the_backward_pass():
    layer = with_main_grads(layer_of(accumulate=True))
    x = paddle.zeros([0, H])
    x.stop_gradient = False
    out = layer(x)
    out.sum().backward()
    assert (out.shape, x.grad.shape) == ([0, H], [0, H])
    for parameter in (layer.experts.gate_up, layer.experts.down):
        assert not parameter.main_grad.numpy().any()
        assert parameter.main_grad.shape == parameter.shape


@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("frozen", PARAMETERS)
def test_a_rank_without_tokens_may_have_a_frozen_part(frozen, wants_gradient):
    layer, x = MoELayer(H, I, E, K), paddle.zeros([0, H])
    parameters = dict(layer.named_parameters())
    parameters[frozen].stop_gradient = True
    x.stop_gradient = not wants_gradient
    layer(x).sum().backward()
    assert {name for name, each in parameters.items() if each.grad is None} == {frozen}
    assert not any(each.grad.any() for name, each in parameters.items() if name != frozen)


def test_checkpoints_know_nothing_of_memory():
    names = {
        "router.weight",
        "router.correction_bias",
        "experts.gate_up",
        "experts.down",
        "shared.gate_up",
        "shared.down",
    }
    state = layer_of(keep="x", workspace_mb=64, accumulate=True).state_dict()
    assert set(state) == names
    other = MoELayer(H, I, E, K)
    other.set_state_dict(state)
    x = batches(1)[0]
    np.testing.assert_array_equal(other(x).numpy(), layer_of()(x).numpy())


def unpickled(layer):
    return pickle.loads(pickle.dumps(layer))


# Paddle cannot unpickle tensors of a custom device.
@pytest.mark.parametrize("again", [copy.deepcopy, pytest.param(unpickled, marks=pytest.mark.cpu_only)])
def test_a_copy_of_a_layer_keeps_as_little(again):
    copied = again(layer_of(keep="x", accumulate=True))
    assert copied.experts.memory_options == {"keep": "x", "workspace_mb": 1024, "accumulate": True, "defer_dw": False}


def test_a_hook_on_the_experts_sees_what_they_add_to_each_token():
    layer, seen = layer_of(num_shared_experts=0), []
    layer.experts.register_forward_post_hook(lambda _, given, out: seen.append(out))
    out = layer(batches(1)[0])
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0].numpy(), out.numpy())


def test_evaluation_gives_the_bits_of_training():
    layer = layer_of()
    x = batches(1)[0]
    made = layer(x)
    layer.eval()
    with paddle.no_grad():
        np.testing.assert_array_equal(layer(x).numpy(), made.numpy())
