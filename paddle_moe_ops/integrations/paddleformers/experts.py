# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""How the experts of a block run: the one place that chooses.

T tokens of H columns, K slots each, N rows, E experts.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor, nn

from ...functional import permute, unpermute
from ...mlp import moe_mlp
from ...routing import Plan


def run_stacked(x: Tensor, plan: Plan, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Give each token [T, H] to its experts, whose matrices are stacked, and add up what they make of it."""
    return moe_mlp(x, plan, weights.astype("float32"), gate_up, down).astype(x.dtype)


def run_modules(experts: nn.LayerList, x: Tensor, plan: Plan, weights: Tensor, *, idle_gradients: bool) -> Tensor:
    """Give each token to its experts, which are layers, and add up what they make of it.

    The layers stay what they are: linear ones, quantised ones, ones with adapters. Each is called once, on a segment
    of rows. On a GPU the sizes of the segments are read, as PaddleFormers reads them.

    Args:
        experts: E layers.
        x: tokens [T, H].
        plan: where their rows are.
        weights: of each slot, [T, K].
        idle_gradients: whether the parameters of an expert without tokens get a gradient, which is 0, or none.

    Returns:
        [T, H], dtype of ``x``.
    """
    if x.shape[0] == 0:
        return paddle.zeros_like(x)
    counts = plan.tokens_per_expert.tolist()
    rows, _ = permute(x, plan)
    # One split, so that the backward pass joins the gradients of the segments in one copy.
    segments = paddle.split(rows, [count for count in counts if count > 0])
    outputs = [expert(segment) for expert, segment in zip(_with_tokens(experts, counts), segments, strict=True)]
    if idle_gradients and paddle.is_grad_enabled():
        nothing = paddle.zeros([1, x.shape[1]], x.dtype)
        for expert, count in zip(experts, counts, strict=True):
            if count == 0:
                outputs[0] = outputs[0] + expert(nothing) * 0.0
    return unpermute(paddle.concat(outputs), plan, weights.astype("float32")).astype(x.dtype)


def _with_tokens(experts: nn.LayerList, counts: list[int]) -> list[Any]:
    return [expert for expert, count in zip(experts, counts, strict=True) if count > 0]
