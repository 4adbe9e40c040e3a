# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Loss scaling whose ranks skip a step together."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .groups import group_of

__all__ = ["GradScaler"]


class GradScaler(paddle.amp.GradScaler):
    """`paddle.amp.GradScaler` for a model whose experts are on several ranks.

    A gradient of an expert is on one rank, so infinity in it is found on one rank. With Paddle's class that rank alone
    skips the step and lowers its scale: then other parameters differ between ranks, and so do the scales of gradients
    that `average_gradients` adds up. Here all ranks skip the step, and have the same scale.

    Every rank must call `unscale_`, `step` and `minimize` alike. One all-reduce of one number for each optimizer and
    step; no host synchronisation but that of Paddle's class. On a CPU it has no effect, as Paddle's class has none.

    Args:
        *arguments: as those of `paddle.amp.GradScaler`.
        group: the ranks that skip a step together; None: all ranks, which is right if they train one model.
        **options: as those of `paddle.amp.GradScaler`.

    Raises:
        TypeError: ``group`` is not a group of `paddle.distributed`.
        ValueError: this rank does not belong to it.
    """

    _found_inf: Tensor  # of Paddle's class: one bool, which decides on the step

    def __init__(self, *arguments: Any, group: Group | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._group = group_of("GradScaler", group)

    def unscale_(self, optimizer: paddle.optimizer.Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, once before its step."""
        self._unscale(optimizer)

    def _unscale(self, optimizer: paddle.optimizer.Optimizer) -> None:  # which `step` and `minimize` of Paddle call
        super()._unscale(optimizer)
        if self.is_enable() and self._group.nranks > 1:
            found = self._found_inf.astype("int32")
            paddle.distributed.all_reduce(found, op=paddle.distributed.ReduceOp.MAX, group=self._group)
            self._found_inf = found.astype("bool")
