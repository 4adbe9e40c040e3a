# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny models of PaddleFormers, and what is compared of them: losses, gradients, parameters."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import paddle

VOCABULARY = 96
TOKENS = (2, 17)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "fuse_rms_norm": False,  # has no kernel for CPUs
    "use_cache": False,  # the client's recomputation would append to it twice
    "_attn_implementation": "eager",
}
_QWEN: dict[str, Any] = {"head_dim": 12, "num_experts": 9, "num_experts_per_tok": 3, "norm_topk_prob": True}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 10,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "factor": 1.0},
}

_ERNIE: dict[str, Any] = {
    "moe_num_experts": 10,
    "moe_k": 3,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "num_nextn_predict_layers": 0,  # else training wants inputs that are the trainer's business
    "tie_word_embeddings": True,
}

_GPT_OSS: dict[str, Any] = {
    "num_local_experts": 9,
    "num_experts_per_tok": 3,
    "head_dim": 12,
    "intermediate_size": 24,
    "sliding_window": 8,
    "rope_scaling": None,
}

# The configuration and the class by PaddleFormers' name of the type.
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLMDeprecated",
        _QWEN | {"shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLMDeprecated", _QWEN),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _DEEPSEEK | _LATENT),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", _ERNIE),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", _GPT_OSS),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLMDeprecated", _DEEPSEEK | {"head_dim": 12}),
}
_EITHER = [name for name in _MODELS if name not in ("ernie4_5_moe", "gpt_oss")]
CASES: dict[str, tuple[str, dict[str, Any]]] = {f"{name}-stacked": (name, {"fd_fallback": True}) for name in _EITHER}
CASES |= {name: (name, {}) for name in _EITHER}
CASES["gpt_oss"] = ("gpt_oss", {})
CASES["qwen3_moe-unnormalised"] = ("qwen3_moe", {"norm_topk_prob": False})
CASES["ernie4_5_moe"] = ("ernie4_5_moe", {"moe_multimodal_dispatch_use_allgather": "unpad"})
CASES["ernie4_5_moe-padded"] = ("ernie4_5_moe", {"moe_multimodal_dispatch_use_allgather": ""})


def type_of(case: str) -> str:
    """PaddleFormers' name of the type of a case's model."""
    return CASES[case][0]


def build(case: str, seed: int = 1, **changes: Any) -> Any:
    """A new model; one seed gives one set of values."""
    name, variant = CASES[case]
    config_name, class_name, settings = _MODELS[name]
    package = f"paddleformers.transformers.{name}"
    config_class = getattr(importlib.import_module(f"{package}.configuration"), config_name)
    config = config_class(**(_COMMON | settings | variant | changes))
    for key, value in changes.items():
        setattr(config, key, value)  # that of ERNIE forgets what it is told of recomputation
    paddle.seed(seed)
    with paddle.utils.unique_name.guard():
        return getattr(importlib.import_module(f"{package}.modeling"), class_name)(config)


def batch(step: int = 0, shape: tuple[int, int] = TOKENS) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(step).integers(0, VOCABULARY, shape))


def loss_of(model: Any, tokens: paddle.Tensor) -> paddle.Tensor:
    """The loss of predicting tokens."""
    return model(input_ids=tokens, labels=tokens)[0]


def train(model: Any, steps: int) -> list[float]:
    """The loss of each step on one batch."""
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    losses = []
    for _ in range(steps):
        loss = loss_of(model, batch())
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def gradients(model: Any, tokens: paddle.Tensor | None = None) -> dict[str, np.ndarray | None]:
    """The gradient of each parameter in one step, None for one without."""
    loss_of(model, batch() if tokens is None else tokens).backward()
    found = {name: None if p.grad is None else p.grad.numpy() for name, p in model.named_parameters()}
    model.clear_gradients(set_to_zero=False)
    return found


def count_calls(layer: Any) -> list[int]:
    """A list whose only entry is the number of calls of a layer from now on."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    layer.register_forward_pre_hook(count)
    return calls


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 5e-6) -> None:
    """Each gradient is within a part of its largest magnitude, and the same parameters have one."""
    assert {name for name, value in found.items() if value is not None} == {
        name for name, value in expected.items() if value is not None
    }
    assert any(value is not None and np.abs(value).max() > 0 for value in expected.values())
    for name, value in expected.items():
        if value is not None:
            np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance * np.abs(value).max(), err_msg=name)


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
