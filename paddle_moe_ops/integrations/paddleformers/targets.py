# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The methods of PaddleFormers to replace, by model, and the check that their sources are known."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import blocks, ernie, over_ranks

VERSIONS = ("1.2.0",)  # that the digests below were taken from, and the tests run with


@dataclass(frozen=True)
class Target:
    """A method that is replaced.

    Attributes:
        module: the module of the class.
        class_name: the class.
        method: the method's name.
        replacement: what replaces it.
        digests: methods that the replacement does the work of or depends on, each with the digest of its source. A name
            without a module is of the class.
    """

    module: str
    class_name: str
    method: str
    replacement: Callable[..., Any]
    digests: dict[str, str] = field(hash=False)

    @property
    def path(self) -> str:
        """Module, class and method."""
        return f"{self.module}.{self.class_name}.{self.method}"

    def load(self) -> type:
        """Import the class."""
        return getattr(importlib.import_module(self.module), self.class_name)


@dataclass(frozen=True)
class Model:
    """The methods that are replaced for models of one type.

    Attributes:
        targets: the methods.
        left: classes of the type that stay as they are, each with the reason.
    """

    targets: tuple[Target, ...]
    left: tuple[tuple[str, str], ...] = ()


def digest(function: object) -> str | None:
    """A number for the source of a function, the same in each installation of one version; None without a source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _stacked(module: str, class_name: str) -> Target:
    return Target(module, class_name, "forward", blocks.stacked_experts, {"forward": "5e5f486fa3c6c100"})


_TRANSFORMERS = "paddleformers.transformers"
_FLEET = "builds a model of PaddleFleet, which has other blocks; {}Deprecated has the ones that are patched"

_QWEN2 = f"{_TRANSFORMERS}.qwen2_moe.modeling"
_QWEN3 = f"{_TRANSFORMERS}.qwen3_moe.modeling"
_QWEN3_VL = f"{_TRANSFORMERS}.qwen3_vl_moe.modeling"
_DEEPSEEK = f"{_TRANSFORMERS}.deepseek_v3.modeling"
_GLM4 = f"{_TRANSFORMERS}.glm4_moe.modeling"


def _fleet(*class_names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, _FLEET.format(name)) for name in class_names)


_EXPERT = {"paddleformers.nn.mlp:MLP.forward": "0d43314d6e150a71"}  # which runs as a list of matrices
_MODULAR_PACKAGE = "paddleformers.nn.moe_deepep"
_MODULAR = Target(
    f"{_MODULAR_PACKAGE}.modular_moe_layer",
    "ModularMoELayer",
    "_forward_with_ep_parallel",
    over_ranks.modular_experts,
    {
        "_forward_with_ep_parallel": "fb27e2e19a7d6786",
        f"{_MODULAR_PACKAGE}.moe_communication:DeepEPMoECommunication.forward": "63380a16be7519ca",
        f"{_MODULAR_PACKAGE}.moe_communication:AllToAllMoECommunication.forward": "d12157e2de64d5f9",
        f"{_MODULAR_PACKAGE}.moe_gate:StandardMoEGate.topkgating": "f78a311616e253af",
        **_EXPERT,
    },
)
_FLEX = {  # what DeepSeek-V3 and GLM-4 share
    f"{_TRANSFORMERS}.moe_layer:MoEFlexTokenLayer.forward": "e3481ff57ddeaf8d",
    f"{_TRANSFORMERS}.moe_layer:MoEFlexTokenLayer.expert_forward": "6da804e0c1a4eb08",
    f"{_TRANSFORMERS}.token_dispatcher:_DeepepManager.setup_metadata": "fa481bb150cec0e4",
    **_EXPERT,
}
_TOPK_GATE = "paddleformers.nn.moe.topk_gate:TopKGate"
_ERNIE = Target(
    f"{_TRANSFORMERS}.ernie4_5_moe.modeling",
    "Ernie4_5_MoeSparseMoeBlock",
    "forward",
    ernie.ernie_block,
    {
        "forward": "295b52177483b9cf",
        "fused_gate_and_dispatch": "585b2af4d63ed598",
        "fused_gate_logits_process_fused": "172b0116696f3c50",
        "forward_experts": "a425248df5091b05",
        "calc_router_loss_and_logging": "3099ac2cf92e6d2c",
        "_calc_router_loss": "9c053c70a2b6ae12",
        "combine_expert_output": "49b487b1ae0ca289",
        f"{_TRANSFORMERS}.ernie4_5_moe.modeling:Ernie4_5_MoeMLP.forward": "287cb9137f4fafe7",
        f"{_TOPK_GATE}.forward": "ecf4f596b2d7eaea",
        f"{_TOPK_GATE}.get_capacity": "ed50bf21022f7c42",
        f"{_TOPK_GATE}._cal_aux_loss": "aabc0f7c50f00e57",
    },
)

_GLM4_TARGETS = (
    _stacked(_GLM4, "GLm4MoeNaiveMoe"),
    Target(_GLM4, "Glm4MoeMoE", "moe", blocks.glm4_moe, {"moe": "cd530a3319a02c81", **_EXPERT}),
    Target(_GLM4, "Glm4MoeFlexMoE", "forward", over_ranks.glm4_flex, {"forward": "7779dcb9d96727ad", **_FLEX}),
    _MODULAR,
)
_QWEN2_TARGETS = (
    _stacked(_QWEN2, "Qwen2MoeExperts"),
    Target(_QWEN2, "Qwen2MoeSparseMoeBlock", "forward", blocks.qwen2_block, {"forward": "a90073d2dabc77a8", **_EXPERT}),
)

MODELS: dict[str, Model] = {
    "deepseek_v3": Model(
        (
            _stacked(_DEEPSEEK, "DeepseekV3NaiveMoe"),
            Target(_DEEPSEEK, "DeepseekV3MoE", "moe", blocks.deepseek_moe, {"moe": "3cca397e8c3ece3d", **_EXPERT}),
            Target(
                _DEEPSEEK,
                "DeepseekV3MoEFlexToken",
                "forward",
                over_ranks.deepseek_flex,
                {"forward": "592d8dbd2ba93fbe", **_FLEX},
            ),
        ),
    ),
    "ernie4_5_moe": Model((_ERNIE,)),
    "glm4_moe": Model(_GLM4_TARGETS, _fleet("Glm4MoeForCausalLM")),
    "glm4v_moe": Model(_GLM4_TARGETS),
    "gpt_oss": Model(
        (
            Target(
                f"{_TRANSFORMERS}.gpt_oss.modeling",
                "GptOssExperts",
                "forward",
                blocks.gpt_oss_experts,
                {
                    "forward": "a8f2291605a4a083",
                    f"{_TRANSFORMERS}.gpt_oss.modeling:GptOssTopKRouter.forward": "25c1eeb467cdd91d",
                },
            ),
        ),
    ),
    "qwen2_moe": Model(_QWEN2_TARGETS, _fleet("Qwen2MoeForCausalLM")),
    "qwen3_moe": Model(
        (
            _stacked(_QWEN3, "Qwen3MoeExperts"),
            Target(
                _QWEN3,
                "Qwen3MoeSparseMoeBlock",
                "forward",
                blocks.qwen3_block,
                {"forward": "38525d86beec0341", **_EXPERT},
            ),
            _MODULAR,
        ),
        _fleet("Qwen3MoeForCausalLM"),
    ),
    "qwen3_vl_moe": Model(
        (
            Target(
                _QWEN3_VL,
                "Qwen3VLMoeTextSparseMoeBlock",
                "forward",
                blocks.qwen3_vl_block,
                {
                    "forward": "2ce77711a0e9d9db",
                    f"{_QWEN3_VL}:Qwen3VLMoeTextTopKRouter.forward": "f13021f7a27e39dc",
                    "paddleformers.nn.experts:MoeExperts.forward": "5e5f486fa3c6c100",
                },
            ),
        ),
        _fleet("Qwen3VLMoeForConditionalGeneration"),
    ),
    "qwen3_next": Model((*_QWEN2_TARGETS, _MODULAR)),
}
