# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Replacements of the methods of PaddleFormers' blocks, and the checks that refuse a block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ...routing import route
from .experts import compute_of, float8_problem, is_plain, is_stacked_swiglu, run_interleaved, run_modules, run_stacked

Problem = Callable[[Any], "str | None"]


def replacement(problem: Problem) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the replacement of a method.

    Args:
        problem: says why a layer cannot be run by the replacement, or None. It runs before each call: layers of a
            patched class may be constructed later.

    Returns:
        a decorator. The decorated method has the attribute ``problem``.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            reason = problem(self)
            if reason is not None:
                raise RuntimeError(
                    f"{type(self).__name__}: {reason}, which paddle_moe_ops.integrations.paddleformers does not "
                    "support; remove(...) undoes apply(...)"
                )
            return method(self, *arguments, **keywords)

        call.problem = problem  # type: ignore[attr-defined]
        return call

    return decorate


def parallel_problem(block: Any) -> str | None:
    """Why a block whose settings are for tensor parallelism is refused, or None."""
    settings = getattr(block, "config", None)
    get = vars(block).get if settings is None else settings.get  # ModularMoELayer keeps them itself
    size = get("tensor_model_parallel_size", 1)
    if size is not None and size > 1:
        return f"tensor_model_parallel_size is {size}"
    return "sequence_parallel is set" if get("sequence_parallel", False) else None


def compute_problem(block: Any) -> str | None:
    """Why the experts of a block cannot multiply float8 operands, or None."""
    if getattr(block, "gate_up_proj_bias", None) is not None:
        return "its experts have biases"
    grouped = getattr(block, "grouped_gemm_experts", None)  # of PaddleFleet
    if grouped is not None and not is_stacked_swiglu(grouped):
        return "its experts are not SwiGLU in stacked matrices"
    experts = getattr(block, "experts", None)
    if not isinstance(experts, (nn.LayerList, list)):  # in stacked matrices
        return None
    return float8_problem([each for each in experts if each is not None])


def stacked_problem(experts: Any) -> str | None:
    """Why experts in stacked matrices are refused, or None."""
    if type(experts.act_fn) is not nn.Silu:
        return f"the activation is {type(experts.act_fn).__name__} instead of silu"
    return None


@replacement(stacked_problem)
def stacked_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """MoeExperts.forward."""
    plan = route(top_k_index, num_experts=self.num_experts)
    return run_stacked(hidden_states, plan, top_k_weights, self.gate_up_proj, self.down_proj, compute_of(self))


def gpt_oss_problem(experts: Any) -> str | None:
    """Why the experts of gpt_oss are refused, or None."""
    if experts.sequence_parallel:
        return "sequence_parallel is set"
    if (experts.alpha, experts.limit) != (1.702, 7.0):
        return f"alpha and limit are {experts.alpha} and {experts.limit} instead of 1.702 and 7.0"
    return None


@replacement(gpt_oss_problem)
def gpt_oss_experts(
    self: Any, hidden_states: Tensor, router_indices: Any = None, routing_weights: Any = None
) -> Tensor:
    """GptOssExperts.forward: the weights [T, E] are 0 but for the experts that were chosen."""
    tokens = hidden_states.reshape([-1, self.hidden_size])
    weights = paddle.take_along_axis(routing_weights, router_indices.detach(), axis=1)
    plan = route(router_indices, num_experts=self.num_experts)
    matrices = self.gate_up_proj, self.down_proj
    out = run_interleaved(tokens, plan, weights, *matrices, self.gate_up_proj_bias, self.down_proj_bias)
    return out.reshape([hidden_states.shape[0], -1, self.hidden_size])


@replacement(parallel_problem)
def deepseek_moe(self: Any, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """DeepseekV3MoE.moe: experts without tokens get gradients of 0."""
    operands = hidden_states, route(topk_indices, num_experts=len(self.experts)), topk_weights
    return run_modules(self.experts, *operands, idle_gradients=True, compute=compute_of(self))


@replacement(parallel_problem)
def glm4_moe(self: Any, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """Glm4MoeMoE.moe: experts without tokens get no gradients."""
    operands = hidden_states, route(topk_indices, num_experts=len(self.experts)), topk_weights
    return run_modules(self.experts, *operands, idle_gradients=False, compute=compute_of(self))


@replacement(parallel_problem)
def qwen2_block(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen2MoeSparseMoeBlock.forward; also returns the router's logits [T, E]."""
    tokens = hidden_states.reshape([-1, hidden_states.shape[-1]])
    out, logits = _qwen_experts(self, tokens)
    out = out + F.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
    return out.reshape(hidden_states.shape), logits


@replacement(parallel_problem)
def qwen3_block(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen3MoeSparseMoeBlock.forward; also returns the router's logits [T, E]."""
    out, logits = _qwen_experts(self, hidden_states.reshape([-1, hidden_states.shape[-1]]))
    return out.reshape(hidden_states.shape), logits


def qwen3_vl_problem(block: Any) -> str | None:
    """Why a block of Qwen3-VL is refused, or None."""
    experts = block.experts
    if type(experts).__name__ != "MoeExperts" or not is_plain(experts):
        return "its experts are no plain MoeExperts"
    return stacked_problem(experts) or parallel_problem(block)


@replacement(qwen3_vl_problem)
def qwen3_vl_block(self: Any, hidden_states: Tensor) -> Tensor:
    """Qwen3VLMoeTextSparseMoeBlock.forward."""
    tokens = hidden_states.reshape([-1, hidden_states.shape[-1]])
    _, weights, ids = self.gate(tokens)
    plan, experts = route(ids, num_experts=self.num_experts), self.experts
    out = run_stacked(tokens, plan, weights, experts.gate_up_proj, experts.down_proj, compute_of(self))
    return out.reshape(hidden_states.shape)


def _qwen_experts(block: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The router, by PaddleFormers' own operations so that it chooses the same experts, and the experts."""
    logits = block.gate(tokens)
    weights, ids = paddle.topk(F.softmax(logits, axis=-1, dtype="float32"), block.top_k, axis=-1)
    if block.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdim=True)
    weights = weights.astype(tokens.dtype)
    if block.fd_fallback:
        return block.experts(tokens, ids, weights), logits
    operands = tokens, route(ids, num_experts=block.num_experts), weights
    options = {"idle_gradients": block.training, "compute": compute_of(block)}
    return run_modules(block.experts, *operands, **options), logits
