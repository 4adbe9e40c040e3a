# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers with the methods of PaddleFleet's expert layer run on these operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

import paddle_moe_ops.integrations.paddleformers as pf

from .fleet_layer import HIDDEN, MoELayer
from .models import assert_close

FORMS: dict[str, dict[str, Any]] = {
    "stacked": {"moe_expert_fusion": True},
    "stacked GEGLU": {"moe_expert_fusion": True, "hidden_act": F.gelu},
    "layers": {"moe_expert_fusion": False},
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def layer_of(form: dict[str, Any]) -> MoELayer:
    paddle.seed(1)
    return MoELayer(**form)


def outputs(layer: MoELayer, shape: tuple[int, ...]) -> dict[str, np.ndarray | None]:
    rng = np.random.default_rng(3)
    x = paddle.to_tensor(rng.standard_normal((*shape, HIDDEN)), "float32", stop_gradient=False)
    d_out = paddle.to_tensor(rng.standard_normal((*shape, HIDDEN)), "float32")
    out, bias = layer(x)
    assert bias is None
    (out * d_out).sum().backward()
    found = {name: None if p.grad is None else p.grad.numpy() for name, p in layer.named_parameters()}
    layer.clear_gradients(set_to_zero=False)
    return {"output": out.detach().numpy(), "tokens": x.grad.numpy(), **found}


@forms
@pytest.mark.parametrize("shape", [(1, 1), (63,), (3, 37)], ids=str)
def test_outputs_and_gradients(form, shape):
    layer = layer_of(form)
    expected = outputs(layer, shape)
    with pf.applied(layer) as report:
        method = "grouped_gemm_moe" if form["moe_expert_fusion"] else "moe"
        assert report.patched == (f"the model itself (MoELayer._forward_single_card_{method})",)
        assert_close(outputs(layer, shape), expected)
    assert not any(name.startswith("_forward_single_card") for name in vars(layer))


@forms
def test_no_tokens(form):
    layer = layer_of(form)
    pf.apply(layer)
    assert layer(paddle.zeros([2, 0, HIDDEN]))[0].shape == [2, 0, HIDDEN]


@forms
def test_training_is_the_same(form):
    losses = []
    for patched in (False, True):
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer_of(form))
        if patched:
            assert pf.apply(model).patched[0].startswith("1 (MoELayer.")
        rng = np.random.default_rng(5)
        x, target = (paddle.to_tensor(rng.standard_normal((65, HIDDEN)), "float32") for _ in range(2))
        for parameter in model.parameters():
            parameter.set_value(paddle.to_tensor(rng.standard_normal(parameter.shape) / 7, "float32"))
        optimizer = paddle.optimizer.AdamW(3e-3, parameters=model.parameters())
        for _ in range(10):
            loss = (model(x)[0] - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
    assert losses[10:] == pytest.approx(losses[:10], abs=1e-5)
    assert losses[9] < losses[0] - 0.05


def test_stacked_swiglu_experts_are_one_layer_and_others_are_called():
    for form, calls in (("stacked", 0), ("stacked GEGLU", 1)):
        layer = layer_of(FORMS[form])
        pf.apply(layer)
        outputs(layer, (5,))
        assert layer.grouped_gemm_experts.calls == calls


def test_bfloat16():
    layer = layer_of(FORMS["stacked"])
    expected = outputs(layer, (29,))["output"]
    experts = layer.grouped_gemm_experts.to(dtype="bfloat16")
    pf.apply(layer)
    rng = np.random.default_rng(3)
    x = paddle.to_tensor(rng.standard_normal((29, HIDDEN)), "float32")
    _, weights, ids, probs, mask, *_ = layer.gate(x)
    routed = layer._forward_single_card_grouped_gemm_moe(x.astype("bfloat16"), mask, probs, ids, weights)
    assert routed.dtype == experts.weight1.dtype == paddle.bfloat16
    found = routed.astype("float32").numpy() + layer.shared_experts(x)[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-5 * np.abs(expected).max())


def test_float8_operands_of_stacked_experts():
    layer = layer_of(FORMS["stacked"])
    expected = outputs(layer, (29,))["output"]
    with pf.applied(layer, compute="fp8_1x128"):
        found = outputs(layer, (29,))["output"]
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.1 * np.abs(expected).max())


@pytest.mark.parametrize(("form", "reason"), [("layers", "plain linear layers"), ("stacked GEGLU", "stacked matrices")])
def test_float8_operands_of_other_experts_are_refused(form, reason):
    with pytest.raises(ValueError, match=f"its experts are not SwiGLU .*{reason}, so compute must be None"):
        pf.apply(layer_of(FORMS[form]), compute="fp8_1x128")


@forms
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("expert_model_parallel_size", 2, "its experts are spread over 2 ranks"),
        ("tensor_model_parallel_size", 4, "tensor_model_parallel_size is 4"),
        ("sequence_parallel", True, "sequence_parallel is set"),
        ("using_sonic_moe", True, "using_sonic_moe is set"),
        ("fp8", "e4m3", "fp8 is set"),
    ],
)
def test_layers_that_run_otherwise_are_refused(name, value, reason, form):
    model = nn.Sequential(layer_of(form), layer_of(form))
    setattr(model[1], name, value)
    with pytest.raises(ValueError, match=rf"1 \(MoELayer\..*: {reason}, which is not supported"):
        pf.apply(model)
    assert not any("single_card" in attribute for attribute in vars(model[0]))
    setattr(model[1], name, getattr(model[0], name))
    pf.apply(model)
    setattr(model[1], name, value)
    with pytest.raises(RuntimeError, match=f"MoELayer: {reason}"):
        model[1](paddle.zeros([3, HIDDEN]))


def test_a_layer_with_other_parameters_is_left():
    class Other(MoELayer):
        def _forward_single_card_moe(self, hidden_states, scores):
            return hidden_states

    with pytest.raises(ValueError, match=r"\(Other\): no replacement for this class"):
        pf.apply(Other(moe_expert_fusion=False))


def test_removing_puts_the_methods_of_the_class_back():
    layer = layer_of(FORMS["layers"])
    pf.apply(layer)
    assert pf.apply(layer).patched
    pf.remove(layer)
    assert layer._forward_single_card_moe.__func__ is MoELayer._forward_single_card_moe
