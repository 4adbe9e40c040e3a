# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The block of ERNIE-4.5-MoE.

PaddleFormers builds it on operators that Paddle has for GPUs only. This one needs none of them: it runs on a CPU too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.distributed.fleet.utils import recompute

from ...routing import Plan, calculate_topk, route
from .blocks import parallel_problem, replacement
from .experts import compute_of, run_modules
from .over_ranks import experts_of_rank, parallel_of


def ernie_problem(block: Any) -> str | None:
    """Why a block is refused, or None."""
    gate = block.gate
    num_experts = len(block.experts)
    if block.multimodal_experts or gate.use_multimodel_experts:
        return "it has experts of several modalities"
    if block.world_size > 1 and block.is_mp_moe:
        return "its experts are spread over the ranks of a tensor parallel group"
    if block.world_size > 1 and gate.global_aux_loss:
        return f"global_aux_loss is set for {block.world_size} ranks"
    if block.group_experts:
        return "moe_group_experts is set"
    if block.all_to_all_dropout > 0:
        return f"moe_all_to_all_dropout is {block.all_to_all_dropout}"
    if gate.use_token_type_bias:
        return "moe_use_token_type_bias is set"
    if min(gate.cap) < num_experts:  # the capacity is cap * tokens / experts, and no expert gets more than all tokens
        return f"moe_capacity {list(gate.cap)} lets {num_experts} experts drop tokens"
    if block.output_postprocess is not None:
        return "it has an output_postprocess"
    return parallel_problem(block)


@replacement(ernie_problem)
def ernie_block(
    self: Any,
    input: Tensor,  # noqa: A002  the name is PaddleFormers'
    token_type_ids: Tensor | None = None,
    use_dense_expert: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ernie4_5_MoeSparseMoeBlock.forward; also returns weights [T, K], the router's loss and its logits [T, E]."""
    if token_type_ids is not None:
        raise RuntimeError(
            f"{type(self).__name__}: token_type_ids were given, which paddle_moe_ops.integrations.paddleformers does "
            "not support"
        )
    tokens = input.reshape([-1, input.shape[-1]])
    logits, _, router_loss = self.gate(tokens)
    weights, ids, scores = calculate_topk(
        logits,
        self.k,
        use_sigmoid=self.gate.act is F.sigmoid,
        renormalize=self.gate.norm_gate_logits,
        correction_bias=self.moe_statics.e_score_correction_bias[0].detach() if self.use_correction_bias else None,
        return_scores=True,
    )
    weights = weights.astype(input.dtype)
    if self.world_size > 1:
        parallel = parallel_of(self.group, len(self.experts))
        received = parallel.dispatch(tokens, ids, weights.astype("float32"))
        experts, plan = experts_of_rank(self.experts, parallel), received.plan
        out = parallel.combine(_run(self, experts, received.tokens, plan, received.probs), received)
        load, first = received.routed_per_expert, parallel.first_expert
    else:
        plan = route(ids, num_experts=len(self.experts))
        out = _run(self, self.experts, tokens, plan, weights)
        load, first = plan.tokens_per_expert, 0
    if self.use_correction_bias and not _is_repeated():
        counts = plan.tokens_per_expert.astype("int64")  # each rank counts for its own experts, as PaddleFormers does
        self.moe_statics.expert_usage[0, first : first + counts.shape[0]] += counts
    if self.shared_experts is not None:
        out = out + self.shared_experts(tokens)
    return out.reshape(input.shape), weights, _with_losses(self, router_loss, logits, scores, load), logits


def _run(block: Any, experts: Sequence[nn.Layer], tokens: Tensor, plan: Plan, weights: Tensor) -> Tensor:
    """The experts of this rank, recomputed in the backward pass where the block is told so."""

    def run(tokens: Tensor, weights: Tensor) -> Tensor:
        return run_modules(experts, tokens, plan, weights, idle_gradients=True, compute=compute_of(block))

    return recompute(run, tokens, weights) if block.recompute and block.training else run(tokens, weights)


def _with_losses(block: Any, router_loss: Tensor, logits: Tensor, scores: Tensor, load: Tensor) -> Tensor:
    """The loss plus the terms that calc_router_loss_and_logging adds for a router without modalities, on any device."""
    gate = block.gate
    if gate.config.router_aux_loss_coef:
        router_loss = router_loss + gate.router_aux_loss_coef[0] * _load_loss(block, scores, load)
    else:
        router_loss = router_loss + block.zero * scores[0, 0]  # so that the gate has a gradient
    if gate.config.moe_orthogonal_loss_lambda:
        router_loss = router_loss + gate.moe_orthogonal_loss_lambda[0] * gate._cal_orthogonal_loss(0, False)
    if gate.config.router_z_loss_coef:
        everything = paddle.ones([logits.shape[0]], "bool")
        router_loss = router_loss + gate.router_z_loss_coef[0] * gate._cal_z_loss(logits, everything)
    return router_loss


def _load_loss(block: Any, scores: Tensor, load: Tensor) -> Tensor:
    """TopKGate._cal_aux_loss: the loads that the scores alone would give, without the bias, where there is one.

    With several ranks the loads are those of all tokens, and the scores those of this rank's. As in PaddleFormers, the
    gradient but not the value is weighted with the share of these tokens in all.
    """
    gate = block.gate
    if gate.act is F.sigmoid:
        scores = scores / scores.sum(-1, keepdim=True)
    num_tokens, num_experts = scores.shape
    if gate.use_correction_bias:
        chosen = scores.detach().topk(k=gate.config.moe_k, axis=-1)[1]
        load = paddle.bincount(chosen.flatten(), minlength=num_experts)
    if block.world_size == 1:
        return ((scores.sum(0) / num_tokens) * (load.astype(scores.dtype) / num_tokens)).sum() * num_experts
    load = load.astype("int64")
    paddle.distributed.all_reduce(load, group=block.group)
    load = load.astype(scores.dtype)
    all_tokens = load.sum() / gate.config.moe_k
    loss = ((scores.sum(0) / all_tokens) * (load / all_tokens)).sum() * num_experts
    return loss + (all_tokens / max(num_tokens, 1) - 1) * loss.detach()


def _is_repeated() -> bool:
    """True if this call recomputes a forward pass for a backward pass, as Paddle's recomputation does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("paddle.distributed.fleet.recompute") and frame.f_code.co_name in ("backward", "unpack"):
            return True
        frame = frame.f_back
    return False
