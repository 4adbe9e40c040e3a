# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that train and serve experts on float8 operands, as people write them."""

from __future__ import annotations

import copy
import io

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import Float8Matrices, moe_mlp, route, use_backend
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.nn import MoELayer, set_is_first_microbatch
from paddle_moe_ops.testing.equality import assert_bits_equal

H, INNER, E, K, T = 160, 128, 6, 2, 48
FLOAT8 = "fp8_1x128"


@pytest.fixture(autouse=True)
def seeded():
    paddle.seed(11)


def layer_and_data(**options):
    layer = MoELayer(H, INNER, E, K, compute=FLOAT8, **options)
    x = paddle.randn([T, H])
    return layer, x, paddle.tanh(x @ paddle.randn([H, H]) / H**0.5)


def losses_of(layer, x, target, steps, optimizer=None, micro_batches=1, keeps=False):
    optimizer = optimizer or paddle.optimizer.AdamW(3e-3, parameters=layer.parameters())
    losses = []
    for _ in range(steps):
        total = 0.0
        parts = zip(x.split(micro_batches), target.split(micro_batches), strict=True)
        for number, (tokens, due) in enumerate(parts):
            out = layer(tokens, is_first_microbatch=number == 0) if keeps else layer(tokens)
            loss = (out - due).square().mean() / micro_batches
            loss.backward()
            total += float(loss)
        optimizer.step()
        optimizer.clear_grad()
        losses.append(total)
    return losses


def test_training_follows_that_in_the_tokens_dtype():
    layer, x, target = layer_and_data()
    exact = MoELayer(H, INNER, E, K)
    exact.set_state_dict(layer.state_dict())
    made, due = losses_of(layer, x, target, 12), losses_of(exact, x, target, 12)
    assert made[-1] < 0.7 * made[0]
    np.testing.assert_allclose(made, due, rtol=0, atol=0.01 * due[0])
    assert made != due


def test_a_router_from_topk_gets_gradients():
    router = paddle.nn.Linear(H, E, bias_attr=False)
    gate_up, down = paddle.randn([E, H, 2 * INNER]) / H**0.5, paddle.randn([E, INNER, H]) / INNER**0.5
    x = paddle.randn([T, H])
    probs, ids = paddle.topk(F.softmax(router(x)), K)
    moe_mlp(x, route(ids, num_experts=E), probs, gate_up, down, compute=FLOAT8).square().mean().backward()
    assert float(router.weight.grad.abs().max()) > 0


@pytest.mark.parametrize("keep", ["h", "h_fp8"])
def test_micro_batches_that_share_quantised_matrices_have_the_bits_of_those_that_do_not(keep):
    layer, x, target = layer_and_data(keep=keep)
    twin = copy.deepcopy(layer)
    made = losses_of(layer, x, target, 4, micro_batches=3, keeps=True)
    assert made == losses_of(twin, x, target, 4, micro_batches=3)
    for name, each in layer.state_dict().items():
        assert_bits_equal(each, twin.state_dict()[name].numpy(), what=name)


def test_matrices_are_kept_until_they_change():
    layer, x, _ = layer_and_data(num_shared_experts=0)
    kept = layer.experts.float8_matrices
    with paddle.no_grad():
        before = layer(x, is_first_microbatch=True)
        codes = kept._made
        assert_bits_equal(layer(x, is_first_microbatch=False), before.numpy(), what="kept")
        assert kept._made is codes
        layer.experts.down.scale_(2.0)
        assert_bits_equal(layer(x), 2 * before.numpy(), what="without kept codes")
        assert kept._made is codes
        assert_bits_equal(layer(x, is_first_microbatch=False), 2 * before.numpy(), what="quantised again")
        assert kept._made is not codes


def test_a_backward_pass_takes_the_matrices_of_its_forward_pass():
    layer, x, target = layer_and_data(num_shared_experts=0)
    kept = Float8Matrices()
    ids, probs, *_ = layer.router(x)
    plan, probs, experts = route(ids, num_experts=E), probs.detach(), layer.experts

    def gradient(changed):
        tokens = x.detach()
        tokens.stop_gradient = False
        out = moe_mlp(tokens, plan, probs, experts.gate_up, experts.down, compute=FLOAT8, float8_matrices=kept)
        if changed:
            kept.clear()
            with paddle.no_grad():
                experts.down.scale_(2.0)
        (out * target).sum().backward()
        return tokens.grad

    due = gradient(False).numpy()
    assert_bits_equal(gradient(True), due, what="cleared and changed between the passes")
    assert kept.is_empty


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_recompute(reentrant):
    layer, x, target = layer_and_data()
    x.stop_gradient = False
    ((layer(x) - target).square().mean()).backward()
    due = {name: each.grad.numpy() for name, each in layer.named_parameters() if each.grad is not None}
    layer.clear_gradients()
    for first in (True, False):
        out = recompute(layer, x, is_first_microbatch=first, use_reentrant=reentrant)
        (out - target).square().mean().backward()
        for name, each in layer.named_parameters():
            if name in due:
                assert_bits_equal(each.grad, due[name], what=name)
        layer.clear_gradients()


def test_mixed_precision_quantises_what_is_multiplied():
    layer, x, target = layer_and_data()
    twin = copy.deepcopy(layer)
    grads = []
    for each, keeps in ((layer, True), (twin, False)):
        for number in range(2):
            with paddle.amp.auto_cast(dtype="bfloat16", level="O1"):
                out = each(x, is_first_microbatch=number == 0) if keeps else each(x)
            (out.astype("float32") - target).square().mean().backward()
        grads.append(each.experts.gate_up.grad)
    assert_bits_equal(grads[0], grads[1].numpy(), what="gate_up")


def test_gradients_go_to_main_grad():
    layer, x, target = layer_and_data(accumulate=True)
    for each in (layer.experts.gate_up, layer.experts.down):
        each.main_grad = None
    for number in range(2):
        (layer(x, is_first_microbatch=number == 0) - target).square().mean().backward()
    assert layer.experts.gate_up.main_grad.dtype == paddle.float32
    assert float(layer.experts.gate_up.main_grad.abs().max()) > 0


def test_serving_quantises_once_and_a_checkpoint_holds_no_codes():
    layer, x, _ = layer_and_data()
    layer.eval()
    with paddle.no_grad():
        due = layer(x, is_first_microbatch=True)
        for tokens in (x[:1], x[:0], x):
            out = layer(tokens, is_first_microbatch=False)
    assert_bits_equal(out, due.numpy(), what="out")
    assert all("float8" not in name for name in layer.state_dict())
    buffer = io.BytesIO()
    paddle.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = MoELayer(H, INNER, E, K, compute=FLOAT8)
    loaded.set_state_dict(paddle.load(buffer))
    with paddle.no_grad():
        assert_bits_equal(loaded(x), due.numpy(), what="loaded")


def test_a_checkpoint_of_another_layer_fits():
    trained = MoELayer(H, INNER, E, K)
    layer = MoELayer(H, INNER, E, K, compute=FLOAT8)
    layer.set_state_dict(trained.state_dict())
    x = paddle.randn([T, H])
    a, b = (to_numpy(each(x)).astype(np.float64).ravel() for each in (layer, trained))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.997


def test_a_copy_of_a_layer_begins_without_codes():
    layer, x, _ = layer_and_data()
    layer(x, is_first_microbatch=True)
    twin = copy.deepcopy(layer)
    with pytest.raises(ValueError, match="is_first_microbatch must be True or None before anything is kept"):
        twin(x, is_first_microbatch=False)
    assert_bits_equal(twin(x, is_first_microbatch=True), layer(x).numpy(), what="out")


def test_matrices_that_have_moved_are_quantised_again():
    layer, x, _ = layer_and_data()
    layer(x, is_first_microbatch=True)
    layer.to(dtype="bfloat16")
    text = "MoELayer: is_first_microbatch must be True once the matrices have moved or changed their dtype"
    with pytest.raises(ValueError, match=text):
        layer(x.astype("bfloat16"), is_first_microbatch=False)
    assert layer(x.astype("bfloat16"), is_first_microbatch=True).dtype == paddle.bfloat16


def test_what_a_layer_keeps_can_be_freed():
    layer, x, _ = layer_and_data()
    layer(x, is_first_microbatch=True)
    assert not layer.experts.float8_matrices.is_empty
    layer.experts.float8_matrices.clear()
    assert layer.experts.float8_matrices.is_empty


def test_a_model_whose_blocks_pass_no_argument_on_keeps_matrices_for_a_step():
    """Blocks in a `Sequential` pass only their output on."""
    layers = [MoELayer(H, INNER, E, K, compute=FLOAT8) for _ in range(2)]
    model, twin = paddle.nn.Sequential(*layers, paddle.nn.Linear(H, H)), None
    twin = copy.deepcopy(model)
    x, target = paddle.randn([T, H]), paddle.randn([T, H])
    quantised, states = [], []
    for each, keeps in ((model, True), (twin, False)):
        optimizer = paddle.optimizer.AdamW(3e-3, parameters=each.parameters())
        for _ in range(3):
            if keeps:
                assert set_is_first_microbatch(each) == 2
                quantised.append([layer.experts.float8_matrices.is_empty for layer in layers])
            for tokens, due in zip(x.split(2), target.split(2), strict=True):
                (each(tokens) - due).square().mean().backward()
            if keeps:
                quantised.append([layer.experts.float8_matrices.is_empty for layer in layers])
            optimizer.step()
            optimizer.clear_grad()
        states.append(each.state_dict())
    assert quantised == [[True] * 2, [False] * 2] * 3
    for name, value in states[0].items():
        assert_bits_equal(value, states[1][name].numpy(), what=name)
    assert set_is_first_microbatch(MoELayer(H, INNER, E, K)) == 0
    with pytest.raises(TypeError, match=r"^set_is_first_microbatch: model must be a paddle\.nn\.Layer, but got list$"):
        set_is_first_microbatch(layers)


def test_a_model_that_is_recomputed_finds_its_matrices_quantised():
    layer, x, target = layer_and_data()
    x.stop_gradient = False
    (layer(x) - target).square().mean().backward()
    due = layer.experts.gate_up.grad.numpy()
    layer.clear_gradients()
    set_is_first_microbatch(layer)
    out = recompute(layer, x)
    kept = layer.experts.float8_matrices._made
    (out - target).square().mean().backward()
    assert layer.experts.float8_matrices._made is kept
    assert_bits_equal(layer.experts.gate_up.grad, due, what="gate_up")


def test_the_argument_changes_nothing_without_float8():
    layer, x = MoELayer(H, INNER, E, K), paddle.randn([T, H])
    due = layer(x).numpy()
    for first in (None, True, False):
        assert_bits_equal(layer(x, is_first_microbatch=first), due, what=str(first))


def test_backends_share_a_cache_in_turn_where_nothing_is_compared_on_the_host(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    kept, x = Float8Matrices(), paddle.randn([T, H])
    plan = route(paddle.arange(T * K).reshape([T, K]) % E, num_experts=E)
    matrices, outs = (paddle.randn([E, H, 2 * INNER]), paddle.randn([E, INNER, H])), []
    for backend in ("compiled", "reference", "compiled", "reference"):
        with use_backend(backend):
            outs += [moe_mlp(x, plan, None, *matrices, compute=FLOAT8, float8_matrices=kept) for _ in range(2)]
    for out in outs:
        np.testing.assert_allclose(out, outs[0], rtol=1e-3, atol=1e-3 * float(outs[0].abs().max()))
