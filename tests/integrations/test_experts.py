# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts that are layers: plain linear ones run as lists of matrices, all others are called as they are."""

from __future__ import annotations

import importlib
from types import MethodType
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from safetensors.numpy import load_file

import paddle_moe_ops.integrations.paddleformers as pf
from paddle_moe_ops import use_backend
from paddle_moe_ops.backends.stacking import parts_of, view_of
from paddle_moe_ops.integrations.paddleformers import experts as experts_of_blocks

from .models import CASES, assert_close, assert_same_bits, batch, build
from .test_blocks import outputs

LAYERS = [case for case in CASES if not case.endswith(("-stacked", "-unnormalised", "-padded", "gpt_oss"))]
EACH = pytest.mark.parametrize("case", LAYERS)


@pytest.fixture
def lists(monkeypatch) -> list[str]:
    """The operators that were given lists of matrices."""
    called: list[str] = []
    for name in ("moe_mlp", "grouped_gemm"):
        function = getattr(experts_of_blocks, name)

        def counted(*arguments: Any, _name=name, _function=function, **keywords: Any) -> Any:
            called.append(_name)
            return _function(*arguments, **keywords)

        monkeypatch.setattr(experts_of_blocks, name, counted)
    return called


def compare(block: Any, rng: np.random.Generator, shape=(2, 5)) -> None:
    """Assert that patching keeps a block's outputs and gradients; with few tokens some experts are idle."""
    state = rng.bit_generator.state
    paddle.seed(5)
    expected = outputs(block, rng, shape)
    rng.bit_generator.state = state
    paddle.seed(5)
    with pf.applied(block):
        assert_close(outputs(block, rng, shape), expected)


@EACH
def test_plain_linear_experts_run_as_lists_of_matrices(case, rng, lists):
    block = build(case).model.layers[1].mlp
    compare(block, rng)
    assert lists == (["grouped_gemm"] * 3 if case == "deepseek_v3" else ["moe_mlp"])


@EACH
def test_biases_of_linear_experts_have_their_gradients(case, rng, lists):
    block = build(case).model.layers[1].mlp
    for expert in block.experts:
        for name in ("gate_proj", "up_proj", "up_gate_proj", "down_proj"):
            layer = getattr(expert, name, None)
            if layer is not None:
                layer.bias = layer.create_parameter([layer.weight.shape[1]], is_bias=True)
                layer.bias.set_value(rng.standard_normal(layer.bias.shape).astype("float32"))
    compare(block, rng)
    assert lists


def weights_of(block: Any) -> list[list[Any]]:
    """Weights of all experts, one list for each layer of an expert."""
    names = ("gate_proj", "up_proj", "up_gate_proj", "down_proj")
    found = [[getattr(expert, name, None) for expert in block.experts] for name in names]
    return [[layer.weight for layer in layers] for layers in found if layers[0] is not None]


@EACH
def test_weights_are_laid_side_by_side_where_lists_would_be_copied(case, rng, monkeypatch):
    block = build(case).model.layers[1].mlp
    state, before = rng.bit_generator.state, {name: id(each) for name, each in block.named_parameters()}
    with pf.applied(block):
        expected = outputs(block, rng, (2, 5))
        assert all(view_of(each) is None for each in weights_of(block))  # a CPU gains nothing
        rng.bit_generator.state = state
        with use_backend("reference"):
            got = outputs(block, rng, (2, 5))
            assert all(view_of(each) is not None for each in weights_of(block))
            monkeypatch.setattr("paddle_moe_ops.backends.stacking.paddle.stack", None)  # a copy fails
            rng.bit_generator.state = state
            again = outputs(block, rng, (2, 5))
    assert_close(got, expected)
    assert_close(again, expected)
    assert {name: id(each) for name, each in block.named_parameters()} == before


@EACH
def test_a_model_whose_weights_lie_side_by_side_is_saved_as_any_other(case, tmp_path):
    files = {}
    for name in ("apart", "together"):
        model = build(case)
        if name == "together":
            with pf.applied(model), use_backend("reference"):
                model(input_ids=batch())
            weights = weights_of(model.model.layers[1].mlp)
            assert all(view_of(each) is not None for each in weights)
        model.save_pretrained(str(tmp_path / name))
        (file,) = (tmp_path / name).glob("*.safetensors")
        files[name] = load_file(file)
    assert_same_bits(files["together"], files["apart"])
    assert len(files["apart"]) > 20


def test_weights_that_lie_in_a_fused_buffer_stay_there(rng):
    block = build("qwen3_moe").model.layers[1].mlp
    for weights in weights_of(block):
        order = [*weights[1:], weights[0]]  # not that of the experts
        for weight, part in zip(order, parts_of(paddle.stack([each.detach() for each in order])), strict=True):
            part._share_buffer_to(weight)
    before = [each.data_ptr() for weights in weights_of(block) for each in weights]
    with use_backend("reference"):
        compare(block, rng)
    assert [each.data_ptr() for weights in weights_of(block) for each in weights] == before


@pytest.mark.parametrize(("shape", "dtype"), [([24, 48], "float64"), ([24, 49], "float32")], ids=["dtype", "shape"])
def test_weights_that_differ_stay_apart_and_are_refused_by_name(shape, dtype, rng):
    block = build("qwen3_moe").model.layers[1].mlp
    block.experts[2].down_proj.weight = block.create_parameter(shape, dtype=dtype)
    before = [each.data_ptr() for each in weights_of(block)[-1]]
    with pf.applied(block), use_backend("reference"), pytest.raises((TypeError, ValueError), match=r"\[2\] must be "):
        outputs(block, rng, (2, 5))
    assert [each.data_ptr() for each in weights_of(block)[-1]] == before


class Doubled(nn.Linear):
    """More than a linear layer, as one with an adapter is."""

    def forward(self, input):  # noqa: A002  Paddle's name
        return 2.0 * super().forward(input)


def doubled(expert: Any) -> None:
    plain = expert.down_proj
    expert.down_proj = Doubled(*plain.weight.shape, bias_attr=False)
    expert.down_proj.weight.set_value(plain.weight)


def with_low_rank_adapter(expert: Any) -> None:
    linear = importlib.import_module("paddleformers.peft.lora.lora_layers").LoRALinear
    plain = expert.down_proj
    expert.down_proj = linear(*plain.weight.shape, r=2, lora_alpha=2, bias_attr=False)
    expert.down_proj.weight.set_value(plain.weight)
    expert.down_proj.lora_B.set_value(paddle.ones_like(expert.down_proj.lora_B))


def with_hook_before(expert: Any) -> None:
    expert.down_proj.register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 3.0,))


def with_hook_after(expert: Any) -> None:
    expert.register_forward_post_hook(lambda layer, inputs, out: out * 3.0)


def with_own_method(expert: Any) -> None:
    expert.forward = MethodType(lambda self, x: self.down_proj(paddle.ones([len(x), 24])) + x, expert)


def with_another_activation(expert: Any) -> None:
    expert.act_fn = nn.GELU()


MORE = [doubled, with_low_rank_adapter, with_hook_before, with_hook_after, with_own_method, with_another_activation]


@EACH
@pytest.mark.parametrize("change", MORE, ids=lambda each: each.__name__)
def test_experts_that_are_more_than_matrices_are_called(case, change, rng, lists):
    block = build(case).model.layers[1].mlp
    for expert in block.experts:
        if change is not with_another_activation or not getattr(expert, "fuse_swiglu", False):
            change(expert)
    compare(block, rng)
    assert not lists


def test_one_expert_that_is_more_has_all_of_them_called(rng, lists):
    block = build("qwen3_moe").model.layers[1].mlp
    doubled(block.experts[3])
    compare(block, rng, (3, 37))
    assert not lists


def test_dropout_inside_experts_is_kept(rng, lists):
    block = build("ernie4_5_moe").model.layers[1].mlp
    for expert in block.experts:
        expert.moe_dropout_prob = 0.5
    modeling = importlib.import_module("paddleformers.transformers.ernie4_5_moe.modeling")
    modeling.get_rng_state_tracker().reset()
    modeling.get_rng_state_tracker().add("local_seed", 7)
    pf.apply(block)
    x = paddle.to_tensor(rng.standard_normal((1, 9, 48)), "float32")
    first, second = block(x)[0], block(x)[0]
    assert not lists
    assert float((first - second).abs().max()) > 0


@EACH
def test_hooks_on_parameters_see_gradients(case, rng, lists):
    block = build(case).model.layers[1].mlp
    seen: list[list[int]] = []
    pf.apply(block)
    for expert in block.experts:
        expert.down_proj.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    outputs(block, rng, (3, 37))
    assert lists
    assert seen == [[24, 48]] * len(block.experts)
