# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that train experts on float8 operands and keep the first product in float8, as people write them."""

from __future__ import annotations

import copy

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import Float8Matrices, moe_mlp, reference, route
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts, set_is_first_microbatch
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_float8
from tests.scenarios import test_float8_programs
from tests.scenarios.test_float8_programs import FLOAT8, INNER, E, H, K, T, losses_of

OPTIONS = {"compute": FLOAT8, "keep": "h_fp8"}


@pytest.fixture(autouse=True)
def seeded():
    paddle.seed(11)


def layer_and_data(**options):
    return test_float8_programs.layer_and_data(keep="h_fp8", **options)


def gradients_of(layer):
    return {name: each.grad.numpy() for name, each in layer.named_parameters() if each.grad is not None}


def experts_of(inner=INNER):
    gate_up = paddle.create_parameter([E, H, 2 * inner], "float32")
    return gate_up, paddle.create_parameter([E, inner, H], "float32")


def assert_near(got, expected):
    assert_close_float8(to_numpy(got), np.asarray(expected))


def oracle(x, plan, probs, gate_up, down, d_out):
    """The gradients of a call with probabilities by slot."""
    arrays = {name: to_numpy(each) for name, each in plan._asdict().items() if isinstance(each, paddle.Tensor)}
    maps = reference.Plan(**{**plan._asdict(), **arrays})
    rows, by_slot = arrays["slot_to_row"].ravel(), to_numpy(probs).ravel()
    weights = np.zeros(maps.row_to_token.shape, np.float32)
    weights[rows[rows >= 0]] = by_slot[rows >= 0]
    operands = to_numpy(x), maps, to_numpy(gate_up), to_numpy(down), weights
    made = reference.moe_mlp_float8_backward(d_out, *operands, hidden_in_float8=True)
    d_probs = np.where(rows >= 0, np.append(made.weights, 0)[rows], 0).reshape(probs.shape)
    return {"x": made.x, "probs": d_probs, "gate_up": made.gate_up, "down": made.down}


def test_training_follows_that_which_keeps_the_first_product_as_it_is():
    layer, x, target = layer_and_data()
    wide = MoELayer(H, INNER, E, K, compute=FLOAT8)
    wide.set_state_dict(layer.state_dict())
    made, due = losses_of(layer, x, target, 12), losses_of(wide, x, target, 12)
    assert made[0] == due[0]  # the forward pass is the same
    assert made[-1] < 0.7 * made[0]
    np.testing.assert_allclose(made, due, rtol=0, atol=0.01 * due[0])
    assert made != due


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_recompute(reentrant):
    layer, x, target = layer_and_data()
    x.stop_gradient = False
    (layer(x) - target).square().mean().backward()
    due = gradients_of(layer)
    layer.clear_gradients()
    for first in (True, False):
        out = recompute(layer, x, is_first_microbatch=first, use_reentrant=reentrant)
        (out - target).square().mean().backward()
        for name, each in gradients_of(layer).items():
            assert_bits_equal(each, due[name], what=name)
        layer.clear_gradients()


def test_a_router_from_topk_is_trained():
    router = paddle.nn.Linear(H, E, bias_attr=False)
    gate_up, down = experts_of()
    optimizer = paddle.optimizer.AdamW(3e-3, parameters=[router.weight, gate_up, down])
    x, kept, losses = paddle.randn([T, H]), Float8Matrices(), []
    target = paddle.tanh(x @ paddle.randn([H, H]) / H**0.5)
    for _ in range(8):
        total = 0.0
        for tokens, due in zip(x.split(2), target.split(2), strict=True):
            probs, ids = paddle.topk(F.softmax(router(tokens)), K)
            plan = route(ids, num_experts=E)
            out = moe_mlp(tokens, plan, probs, gate_up, down, float8_matrices=kept, **OPTIONS)
            loss = (out - due).square().mean()
            loss.backward()
            total += float(loss)
        assert float(router.weight.grad.abs().max()) > 0
        optimizer.step()
        optimizer.clear_grad()
        kept.clear()
        losses.append(total)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("alignment", [1, 16], ids=["no padding", "padding"])
@pytest.mark.parametrize("inner", [INNER, 72, 130])
def test_gradients_of_a_call_with_unassigned_slots_and_idle_experts_are_those_of_the_oracle(inner, alignment):
    gate_up, down = experts_of(inner)
    ids = paddle.randint(0, E - 2, [T, 1], "int32")
    ids = paddle.concat([ids, paddle.where(ids % 2 == 0, ids + 1, paddle.full_like(ids, -1))], axis=1)
    x, probs = paddle.randn([T, H]), paddle.rand([T, K])
    plan = route(ids, num_experts=E, padding_alignment=alignment)
    assert 0 in plan.routed_per_expert.tolist()
    for each in (x, probs):
        each.stop_gradient = False
    d_out = paddle.randn([T, H])
    moe_mlp(x, plan, probs, gate_up, down, **OPTIONS).backward(d_out)
    due = oracle(x, plan, probs, gate_up, down, d_out.numpy())
    for name, each in {"x": x, "probs": probs, "gate_up": gate_up, "down": down}.items():
        assert_near(each.grad, due[name])
    assert not probs.grad.numpy()[ids.numpy() < 0].any()
    assert not gate_up.grad.numpy()[E - 1].any()


def test_mixed_precision():
    layer, x, target = layer_and_data()
    wide = MoELayer(H, INNER, E, K, compute=FLOAT8)
    wide.set_state_dict(layer.state_dict())
    for each in (layer, wide):
        for number in range(2):
            with paddle.amp.auto_cast(dtype="bfloat16", level="O1"):
                out = each(x, is_first_microbatch=number == 0)
            (out.astype("float32") - target).square().mean().backward()
    assert layer.experts.gate_up.grad.dtype == paddle.float32
    for name, due in gradients_of(wide).items():
        got = gradients_of(layer)[name].ravel().astype(np.float64)
        due = due.ravel().astype(np.float64)
        assert got @ due >= 0.997 * np.linalg.norm(got) * np.linalg.norm(due), name


def test_gradients_go_to_main_grad():
    layer, x, target = layer_and_data(accumulate=True)
    twin = copy.deepcopy(layer)
    twin.experts.memory_options["accumulate"] = False
    for each in (layer.experts.gate_up, layer.experts.down):
        each.main_grad = None
    for model in (layer, twin):
        for number in range(2):
            (model(x, is_first_microbatch=number == 0) - target).square().mean().backward()
    for name in ("gate_up", "down"):
        due = getattr(twin.experts, name).grad.numpy()
        got = getattr(layer.experts, name).main_grad.numpy()
        np.testing.assert_allclose(got, due, rtol=1e-6, atol=1e-6 * np.abs(due).max())


def test_a_model_marks_its_steps_once():
    layers = [MoELayer(H, INNER, E, K, **OPTIONS) for _ in range(2)]
    model = paddle.nn.Sequential(*layers)
    twin = copy.deepcopy(model)
    x, target = paddle.randn([T, H]), paddle.randn([T, H])
    for each, keeps in ((model, True), (twin, False)):
        if keeps:
            assert set_is_first_microbatch(each) == 2
        for tokens, due in zip(x.split(2), target.split(2), strict=True):
            (each(tokens) - due).square().mean().backward()
    for name, due in gradients_of(twin).items():
        assert_bits_equal(gradients_of(model)[name], due, what=name)


def test_experts_that_are_the_whole_model_keep_their_codes():
    experts, x = SwiGLUExperts(E, H, INNER, **OPTIONS), paddle.randn([T, H])
    plan = route(paddle.zeros([T, 1], "int32"), num_experts=E)
    with paddle.no_grad():
        assert set_is_first_microbatch(experts) == 1
        before = experts(x, plan=plan, combine=True)
        experts.down.scale_(2.0)
        assert not experts.float8_matrices.is_empty
        assert_bits_equal(experts(x, plan=plan, combine=True), 2 * before, what="after a change")


def test_checkpoints_fit_layers_that_keep_something_else():
    layer, x, _ = layer_and_data()
    copied = copy.deepcopy(layer)
    assert copied.experts.memory_options["keep"] == "h_fp8"
    for keep in ("h", "x"):
        other = MoELayer(H, INNER, E, K, compute=FLOAT8, keep=keep)
        other.set_state_dict(layer.state_dict())
        assert_bits_equal(other(x), layer(x).numpy(), what="out")


def test_tokens_of_several_sequences():
    layer, x, _ = layer_and_data()
    sequences = x.reshape([3, -1, H])
    sequences.stop_gradient = False
    layer(sequences).sum().backward()
    flat = x.detach()
    flat.stop_gradient = False
    layer(flat).sum().backward()
    assert_bits_equal(sequences.grad.reshape([T, H]), flat.grad.numpy(), what="x")


def test_without_compute_the_message_names_the_argument():
    gate_up, down = experts_of()
    plan, x = route(paddle.zeros([T, 1], "int32"), num_experts=E), paddle.randn([T, H])
    with pytest.raises(ValueError, match=r"^moe_mlp: keep must be 'h' or 'x' without compute, but got 'h_fp8'$"):
        moe_mlp(x, plan, None, gate_up, down, keep="h_fp8")
    with pytest.raises(ValueError, match=r"^MoELayer: keep must be 'h' or 'x' without compute, but got 'h_fp8'$"):
        MoELayer(H, INNER, E, K, keep="h_fp8")
