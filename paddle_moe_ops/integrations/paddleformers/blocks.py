# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What replaces the methods of PaddleFormers' blocks, and when a block is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paddle import Tensor, nn

from ...routing import route
from .experts import run_stacked

Problem = Callable[[Any], "str | None"]


def replacement(problem: Problem) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the replacement of a method.

    Args:
        problem: says why a layer cannot be run by the replacement, or None. It is asked before each call: where a class
            is patched, layers are made later.

    Returns:
        a decorator. What it returns has the attribute ``problem``.
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
    """Why a block whose configuration is for several processes is refused, or None."""
    for name in ("tensor_model_parallel_size", "expert_model_parallel_size"):
        size = block.config.get(name, 1)
        if size is not None and size > 1:
            return f"{name} is {size}"
    return "sequence_parallel is set" if block.config.get("sequence_parallel", False) else None


def stacked_problem(experts: Any) -> str | None:
    """Why experts in stacked matrices are refused, or None."""
    if type(experts.act_fn) is not nn.Silu:
        return f"the activation is {type(experts.act_fn).__name__} instead of silu"
    return None


@replacement(stacked_problem)
def stacked_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """MoeExperts.forward."""
    plan = route(top_k_index, num_experts=self.num_experts)
    return run_stacked(hidden_states, plan, top_k_weights, self.gate_up_proj, self.down_proj)
