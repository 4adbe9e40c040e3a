# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Clipping by the norm of all gradients, where experts are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group
from paddle.incubate.distributed.models.moe import ClipGradForMOEByGlobalNorm

from .. import _checks
from .buckets import widened
from .groups import expert_group_of

__all__ = ["ClipGradByGlobalNorm"]


class ClipGradByGlobalNorm(ClipGradForMOEByGlobalNorm):
    """`paddle.nn.ClipGradByGlobalNorm` for a model whose layers have their experts on any groups of ranks.

    The norm is that of one process with all experts: for each layer it includes the gradients of the experts on all
    ranks of that layer's group. Other parameters are taken to be the same on every rank, and count once. Every rank of
    a group must have gradients of the same parameters, which `average_gradients` ensures. Gradients of 16 bits are
    squared, summed and scaled in float32 and rounded once. Sums are rounded in another order than in one process; all
    ranks of a group clip by the same number. No host synchronisation; one all-reduce of one number for each group.

    Args:
        clip_norm: the largest norm that the gradients may have, 0 or more.

    Raises:
        TypeError: ``clip_norm`` is not a number.
        ValueError: it is negative or not finite.
    """

    def __init__(self, clip_norm: float) -> None:
        norm = _checks.number("ClipGradByGlobalNorm", "clip_norm", clip_norm)
        if norm < 0:  # which would turn all gradients around
            _checks.bad_value("ClipGradByGlobalNorm", "clip_norm", "0 or more", clip_norm)
        super().__init__(norm)

    @paddle.no_grad()
    def _dygraph_clip(self, params_grads: Sequence[tuple[Tensor, Tensor | None]]) -> list[tuple[Tensor, Tensor | None]]:
        # Paddle's would round the factor to float16 for float16, and return bfloat16 as float32.
        square, dtype = self.get_l2_norm_pow(params_grads)
        if square is None:
            return list(params_grads)
        limit = paddle.full([1], self.clip_norm, dtype)
        factor = limit / paddle.maximum(square.sqrt(), limit)
        return [
            (each, gradient if getattr(each, "need_clip", True) is False else _scaled(gradient, factor))
            for each, gradient in params_grads
            if gradient is not None
        ]

    def get_l2_norm_pow(
        self, params_grads: Iterable[tuple[Tensor, Tensor | None]], sum_dtype: Any = None
    ) -> tuple[Tensor | None, Any]:
        """Return the square of the norm, and its dtype."""
        groups: dict[int, Group] = {}
        of_groups: dict[int, list[tuple[Tensor, Tensor | None]]] = {}
        for parameter, gradient in params_grads:
            group = expert_group_of(parameter)
            number = -1 if group is None else group.id
            if group is not None:
                groups[number] = group
            of_groups.setdefault(number, []).append((parameter, gradient))
        squares = []
        for number in sorted(of_groups):  # in the same order on all ranks
            # A generator, so that one gradient at a time has a copy.
            of_group = ((each, None if grad is None else widened(grad)) for each, grad in of_groups[number])
            square, dtype = super().get_l2_norm_pow(of_group, sum_dtype)
            if square is None:
                continue
            if number in groups:
                paddle.distributed.all_reduce(square, group=groups[number])
            squares.append(square)
            sum_dtype = "float64" if "float64" in (sum_dtype, dtype) else dtype
        if not squares:
            return None, None
        return paddle.add_n([each.astype(sum_dtype) for each in squares]), sum_dtype


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    wide = widened(gradient)
    product = paddle.multiply(wide, factor)
    return product if wide is gradient else product.astype(gradient.dtype)
