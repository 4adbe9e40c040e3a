# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Helpers for experts whose number differs between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor

from ..backends.autograd import Call, Gradients, connect
from ..expert_parallel.parameters import replace_value
from ..expert_parallel.placement import no_experts

__all__ = ["keep_first", "without_experts"]


class _WithoutExperts(Call):
    """A call whose result depends on parameters without elements, so that all ranks run the same backward passes."""

    function = "SwiGLUExperts"

    def __init__(self, rows: Tensor, parameters: Sequence[Tensor]) -> None:
        super().__init__(None, rows, *parameters)
        self.rows: Tensor | None = rows

    def run(self) -> tuple[Tensor, ...]:
        rows, self.rows = self.rows, None
        self.save(rows, unread=(rows,))  # recompute() runs the forward pass again where a node reads what it saved
        return (paddle.assign(rows),)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        return gradients[0], *[None] * (len(self.wanted) - 1)


def without_experts(rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the result of a rank without experts for received rows: a value for `combine` and backward passes.

    Args:
        rows: [N, d], none of which has a token.
        parameters: of the experts, without elements.
    """
    return connect(_WithoutExperts(rows, parameters), rows, *parameters)[0]


def keep_first(parameters: Sequence[Tensor], count: int) -> None:
    """Keep the first ``count`` experts of stacked parameters, which may be none."""
    for each in parameters:
        if count < each.shape[0]:
            replace_value(each, each[:count].clone() if count else no_experts(each))
