# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The expert layer of PaddleFleet, recognised by its methods and attributes, in one process.

PaddleFleet is on no package index and has no version that could be compared, so a layer is one that has the methods
below with these parameters. Its router, shared experts, losses and projections stay as they are.
"""

from __future__ import annotations

import inspect
from typing import Any

from paddle import Tensor, nn

from ...functional import permute, unpermute
from ...routing import route
from .blocks import replacement
from .experts import compute_of, is_stacked_swiglu, run_modules, run_stacked
from .targets import Target

_MODULE = "paddlefleet.transformer.moe.moe_layer"
_ATTRIBUTES = ("gate", "num_experts", "num_experts_per_tok", "moe_expert_fusion", "expert_model_parallel_size")


def fleet_problem(layer: Any) -> str | None:
    """Why a layer is refused, or None."""
    size = layer.expert_model_parallel_size
    if size > 1:
        return f"its experts are spread over {size} ranks"
    if getattr(layer, "tensor_model_parallel_size", 1) > 1:
        return f"tensor_model_parallel_size is {layer.tensor_model_parallel_size}"
    for name in ("sequence_parallel", "using_sonic_moe", "fp8"):
        if getattr(layer, name, None):
            return f"{name} is set"
    return None


@replacement(fleet_problem)
def fleet_experts(self: Any, hidden_states: Tensor, selected_experts: Tensor, topk_weights: Tensor) -> Tensor:
    """MoELayer._forward_single_card_moe: experts without tokens get no gradients."""
    operands = hidden_states, route(selected_experts, num_experts=self.num_experts), topk_weights
    return run_modules(self.experts, *operands, idle_gradients=False, compute=compute_of(self))


@replacement(fleet_problem)
def fleet_grouped_experts(
    self: Any, hidden_states: Tensor, routing_map: Tensor, probs: Tensor, *_: Any, **__: Any
) -> Tensor:
    """MoELayer._forward_single_card_grouped_gemm_moe: ids and weights of slots, if given, repeat map and probs."""
    mask, weights = routing_map.astype("bool"), probs.astype("float32")
    plan = route(mask, weights, topk=self.num_experts_per_tok)
    experts = self.grouped_gemm_experts
    if is_stacked_swiglu(experts):
        operands = hidden_states, plan, plan.row_probs, experts.weight1, experts.weight2
        return run_stacked(*operands, compute_of(self), weights_by="row")
    rows = experts(permute(hidden_states, plan)[0], plan.tokens_per_expert)[0]
    return unpermute(rows, plan, plan.row_probs).astype(hidden_states.dtype)


BY_LAYER = Target(_MODULE, "MoELayer", "_forward_single_card_moe", fleet_experts, {})
GROUPED = Target(_MODULE, "MoELayer", "_forward_single_card_grouped_gemm_moe", fleet_grouped_experts, {})
_PARAMETERS = {
    BY_LAYER: ["self", "hidden_states", "selected_experts", "topk_weights"],
    GROUPED: ["self", "hidden_states", "routing_map", "probs"],
}


def fleet_target(layer: nn.Layer) -> Target | None:
    """The method of a layer of PaddleFleet that runs its experts in one process; None for other layers."""
    if not all(hasattr(layer, name) for name in _ATTRIBUTES):
        return None
    target = GROUPED if layer.moe_expert_fusion else BY_LAYER
    method = getattr(type(layer), target.method, None)
    expected = _PARAMETERS[target]
    if not inspect.isfunction(method) or list(inspect.signature(method).parameters)[: len(expected)] != expected:
        return None
    return target
