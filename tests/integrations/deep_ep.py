# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the two functions through which PaddleFormers calls DeepEP, which needs GPUs.

With them its own layers of experts on several ranks run on CPUs, to be compared with patched ones.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.distributed.communication.group import Group


def install() -> None:
    """Put the stand-ins where PaddleFormers looks for the functions."""
    dispatcher = importlib.import_module("paddleformers.transformers.token_dispatcher")
    dispatcher.fused_dispatch, dispatcher.fused_combine = fused_dispatch, fused_combine


def swapped(parts: list[NDArray], group: Group) -> list[NDArray]:
    """All-to-all of objects: ``parts`` has one part for each rank; returns the parts for this rank."""
    told: list[list[NDArray]] = []
    paddle.distributed.all_gather_object(told, parts, group=group)
    return [each[group.rank] for each in told]


class Way:
    """The tokens of this rank that go to each rank."""

    def __init__(self, ids: NDArray, num_experts: int, group: Group) -> None:
        owners = np.where(ids >= 0, ids // (num_experts // group.nranks), -1)
        self.group, self.num_tokens = group, len(ids)
        self.tokens = [np.flatnonzero((owners == rank).any(1)) for rank in range(group.nranks)]
        self.received = [len(each) for each in swapped(self.tokens, group)]

    def there(self, lines: NDArray) -> NDArray:
        return np.concatenate(swapped([lines[each] for each in self.tokens], self.group))

    def back(self, lines: NDArray) -> NDArray:
        total = np.zeros((self.num_tokens, *lines.shape[1:]), lines.dtype)
        parts = np.split(lines, np.cumsum(self.received)[:-1])
        for tokens, part in zip(self.tokens, swapped(parts, self.group), strict=True):
            total[tokens] += part
        return total


class Moved(PyLayer):
    """Lines that go one way; their gradients go the other."""

    @staticmethod
    def forward(ctx: Any, lines: Tensor, way: Way, is_back: bool) -> Tensor:
        ctx.way, ctx.is_back = way, is_back
        return paddle.to_tensor((way.back if is_back else way.there)(lines.numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return paddle.to_tensor((ctx.way.there if ctx.is_back else ctx.way.back)(grad.numpy()))


def fused_dispatch(x: Tensor, ids: Tensor, probs: Tensor, num_experts: int, group: Group) -> tuple[Any, ...]:
    """Tokens for the experts of this rank, their weights, and where they came from."""
    way, local = Way(ids.numpy(), num_experts, group), num_experts // group.nranks
    arrived = way.there(ids.numpy()) - group.rank * local
    is_here = (arrived >= 0) & (arrived < local)
    states = {
        "handle": way,
        "tokens_per_expert": [int((arrived == expert).sum()) for expert in range(local)],
        "dispatched_indices": paddle.to_tensor(np.where(is_here, arrived, -1)),
    }
    return (
        Moved.apply(x, way, False),
        Moved.apply(probs, way, False) * paddle.to_tensor(is_here.astype(np.float32)),
        states,
    )


def fused_combine(x: Tensor, group: Group, handle: Way) -> Tensor:
    """The sums over ranks of their rows of each token."""
    return Moved.apply(x, handle, True)
