# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The text model of Qwen3-VL-MoE, patched, against PaddleFormers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

import paddle_moe_ops.integrations.paddleformers as pf

from .models import VOCABULARY, assert_close, batch

NAME = "qwen3_vl_moe"


def build(seed: int = 1) -> Any:
    from paddleformers.transformers.qwen3_vl_moe.configuration import Qwen3VLMoeTextConfig
    from paddleformers.transformers.qwen3_vl_moe.modeling import Qwen3VLMoeTextModel

    config = Qwen3VLMoeTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=56,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=9,
        num_experts_per_tok=3,
        max_position_embeddings=64,
        fuse_rms_norm=False,
        use_cache=False,
        _attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
    )
    paddle.seed(seed)
    model = Qwen3VLMoeTextModel(config)
    for layer in model.layers:
        gate = layer.mlp.gate.weight  # zeros, with which all experts tie
        gate.set_value(paddle.randn(gate.shape) / 7)
    return model


def loss_of(model: Any, tokens: paddle.Tensor) -> paddle.Tensor:
    """The loss of predicting the next tokens by the embedding."""
    hidden = model(input_ids=tokens)[0][:, :-1]
    logits = paddle.matmul(hidden, model.embed_tokens.weight, transpose_y=True)
    return paddle.nn.functional.cross_entropy(logits.reshape([-1, VOCABULARY]), tokens[:, 1:].reshape([-1]))


def gradients(model: Any, tokens: paddle.Tensor) -> dict[str, np.ndarray | None]:
    loss = loss_of(model, tokens)
    loss.backward()
    found = {name: None if p.grad is None else p.grad.numpy() for name, p in model.named_parameters()}
    model.clear_gradients(set_to_zero=False)
    return {"loss": loss.numpy(), **found}


def train(model: Any, steps: int) -> list[float]:
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    losses = []
    for _ in range(steps):
        loss = loss_of(model, batch())
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("shape", [(1, 2), (2, 17)], ids=str)
@pytest.mark.parametrize("by_name", [True, False], ids=["a name", "a model"])
def test_losses_and_gradients_are_the_same(by_name, shape):
    expected, model = gradients(build(), batch(3, shape)), build()
    with pf.applied(NAME if by_name else model) as report:
        assert all("Qwen3VLMoeTextSparseMoeBlock.forward" in path for path in report.patched)
        assert_close(gradients(model, batch(3, shape)), expected, tolerance=1e-5)
    assert "forward" not in vars(model.layers[0].mlp)


def test_training_is_the_same():
    expected = train(build(), 10)
    with pf.applied(NAME):
        assert train(build(), 10) == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.05


def test_a_recomputed_block_gives_the_same_gradients(rng):
    block = build().layers[0].mlp
    pf.apply(block)
    x = paddle.to_tensor(rng.standard_normal((2, 9, 48)), "float32", stop_gradient=False)
    found = []
    for call in (block, lambda x: recompute(block, x, use_reentrant=False)):
        call(x).square().sum().backward()
        found.append(x.grad.numpy())
        x.clear_gradient()
    np.testing.assert_array_equal(*found)


def test_float8_operands(rng):
    block = build().layers[0].mlp
    x = paddle.to_tensor(rng.standard_normal((2, 9, 48)), "float32")
    expected = block(x).numpy()
    pf.apply(block, compute="fp8_1x128")
    found = block(x).numpy()
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.1 * np.abs(expected).max())


def test_no_tokens():
    block = build().layers[0].mlp
    pf.apply(block)
    assert block(paddle.zeros([1, 0, 48])).shape == [1, 0, 48]


def test_other_experts_are_refused():
    model = build()
    model.layers[1].mlp.experts.act_fn = paddle.nn.GELU()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp .*the activation is GELU instead of silu"):
        pf.apply(model)
    model = build()
    model.layers[1].mlp.experts = paddle.nn.LayerList([])
    with pytest.raises(ValueError, match=r"layers\.1\.mlp .*its experts are no plain MoeExperts"):
        pf.apply(model)
    assert "forward" not in vars(model.layers[0].mlp)
