# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks whose experts are spread over the ranks of a group.

Each rank has the layers of its own experts and None in the places of the others. If Fleet has an expert parallel group
of more than one rank, PaddleFormers builds such blocks, from other classes. ERNIE-4.5-MoE has one class for both.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.distributed.communication.group import Group

from ...expert_parallel import ExpertParallel
from .blocks import parallel_problem, replacement
from .experts import compute_of, run_modules


@functools.cache
def parallel_of(group: Group, num_experts: int) -> ExpertParallel:
    """The `ExpertParallel` of a group, cached by number of experts; all ranks of the group must call this."""
    return ExpertParallel(num_experts, group, combine="reduced")


def experts_of_rank(experts: Sequence[nn.Layer | None], parallel: ExpertParallel) -> list[nn.Layer]:
    """The layers that this rank has."""
    places = range(parallel.first_expert, parallel.first_expert + parallel.num_local_experts)
    return [experts[place] for place in places]


def run_over_ranks(block: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run each token [T, H] through its experts on all ranks, and add up the expert outputs.

    A rank's sum for a token is rounded to the dtype of ``x`` before it is sent. An expert without tokens from any rank
    gets a gradient of 0: without one, a rank without tokens would have no part in the exchange of gradients.
    """
    parallel = parallel_of(block.moe_group, len(block.experts))
    received = parallel.dispatch(x, ids, weights.astype("float32"))
    given = experts_of_rank(block.experts, parallel), received.tokens, received.plan, received.probs
    out = run_modules(*given, idle_gradients=True, compute=compute_of(block))
    return parallel.combine(out, received)


@replacement(parallel_problem)
def modular_experts(
    self: Any,
    hidden_states: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    gates_masked: Tensor,
    mask: Tensor,
    priorities: Tensor,
) -> Tensor:
    """ModularMoELayer._forward_with_ep_parallel: the weights are those of the masked gates [T, E], as there."""
    tokens = hidden_states.reshape([-1, self.hidden_size])
    weights = paddle.take_along_axis(gates_masked, topk_indices.detach(), axis=-1)
    return run_over_ranks(self, tokens, topk_indices, weights).reshape(hidden_states.shape)


@replacement(parallel_problem)
def deepseek_flex(self: Any, hidden_states: Tensor) -> Tensor:
    """DeepseekV3MoEFlexToken.forward."""
    out = _flex_experts(self, hidden_states, self.alpha)
    return out if self.config.n_shared_experts is None else out + self.shared_experts(hidden_states)


@replacement(parallel_problem)
def glm4_flex(self: Any, hidden_states: Tensor) -> Tensor:
    """Glm4MoeFlexMoE.forward."""
    return _flex_experts(self, hidden_states, self.config.router_aux_loss_coef) + self.shared_experts(hidden_states)


def _flex_experts(block: Any, hidden_states: Tensor, loss_factor: float) -> Tensor:
    """MoEFlexTokenLayer.forward, with the gradient of the router's loss."""
    gates, _, loss, _ = block.gate(hidden_states)  # [T, E], 0 but for the experts that were chosen
    weights, ids = paddle.topk(gates.reshape([-1, block.moe_num_experts]), block.moe_router_topk, axis=-1)
    tokens = hidden_states.reshape([-1, hidden_states.shape[-1]])
    out = run_over_ranks(block, tokens, ids, weights).reshape(hidden_states.shape)
    if block.training and loss_factor > 0.0:
        losses = importlib.import_module("paddleformers.nn.moe_deepep.moe_loss")
        out = losses.AddAuxiliaryLoss.apply(out, loss * loss_factor)
    return out
