# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Transports as users write them, over `all_gather_object`."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray

from paddle_moe_ops.expert_parallel import DispatchedTokens, LineTransport, TokenTransport


class OverAllGather(LineTransport):
    """A transport of lines of any dtype, which compares the steps of ranks. Lines want no gradient.

    Attributes:
        words: of the exchanges so far.
    """

    def connect(self, group: Any, num_experts: int) -> OverAllGather:
        self.group, self.words = group, []
        return self

    def exchange(self, lines: paddle.Tensor, sent: Any, received: Any, step: Any) -> paddle.Tensor:
        assert lines.stop_gradient
        assert len(sent) == len(received) == self.group.nranks
        self.words.append(step.words())
        of_ranks: list[Any] = []
        parts = np.split(lines.view("uint8").numpy() if lines.size else np.zeros(lines.shape), np.cumsum(sent)[:-1])
        dist.all_gather_object(of_ranks, (parts, step.words()), group=self.group)
        step.check([words for _, words in of_ranks])
        mine = [each[self.group.rank] for each, _ in of_ranks if each[self.group.rank].size]
        if not mine:
            return paddle.zeros([sum(received), *lines.shape[1:]]).astype(lines.dtype)
        return paddle.to_tensor(np.concatenate(mine)).view(lines.dtype)


class OverObjects(TokenTransport):
    """A transport of tokens, whose only state between calls is the handle. Tensors are those of the protocol."""

    def connect(self, group: Any, num_experts: int) -> OverObjects:
        made = type(self)()
        made.group, made.experts_of_rank = group, num_experts // group.nranks
        return made

    def _sent(self, parts: list[NDArray]) -> list[NDArray]:
        """The arrays of all ranks for this rank."""
        of_ranks: list[list[NDArray]] = []
        dist.all_gather_object(of_ranks, parts, group=self.group)
        return [each[self.group.rank] for each in of_ranks]

    def dispatch(self, tokens: paddle.Tensor, ids: paddle.Tensor, probs: paddle.Tensor) -> DispatchedTokens:
        assert ids.dtype == paddle.int64
        assert tokens.stop_gradient
        assert probs.stop_gradient
        ranks = np.where(ids.numpy() >= 0, ids.numpy() // self.experts_of_rank, -1)
        route = [np.flatnonzero((ranks == rank).any(1)) for rank in range(self.group.nranks)]
        counts = [len(each) for each in self._sent([rows.reshape([-1, 1]) for rows in route])]
        handle = route, counts, tokens.shape[0]
        local, weights = (self._moved(each.numpy(), route) for each in (ids, probs))
        local = local - self.group.rank * self.experts_of_rank
        is_here = (local >= 0) & (local < self.experts_of_rank)
        local, weights = np.where(is_here, local, -1), np.where(is_here, weights, 0).astype(np.float32)
        arrived = self.dispatch_again(tokens, handle)
        return DispatchedTokens(arrived, paddle.to_tensor(local), paddle.to_tensor(weights), handle)

    def _moved(self, rows: NDArray, route: list[NDArray]) -> NDArray:
        return np.concatenate(self._sent([rows[each] for each in route]))

    def dispatch_again(self, rows: paddle.Tensor, handle: Any) -> paddle.Tensor:
        assert rows.stop_gradient
        return paddle.to_tensor(self._moved(rows.astype("float32").numpy(), handle[0])).astype(rows.dtype)

    def combine(self, rows: paddle.Tensor, handle: Any) -> paddle.Tensor:
        assert rows.stop_gradient
        route, counts, num_tokens = handle
        back = self._sent(np.split(rows.astype("float32").numpy(), np.cumsum(counts)[:-1]))
        sums = np.zeros([num_tokens, rows.shape[1]], np.float32)
        for tokens, part in zip(route, back, strict=True):
            sums[tokens] += part
        return paddle.to_tensor(sums).astype(rows.dtype)

    def combine_with_probs(self, rows: paddle.Tensor, probs: paddle.Tensor, handle: Any) -> tuple[Any, Any]:
        return self.combine(rows, handle), self.combine(probs, handle)


class MultiHot(OverObjects):
    """The same, whose received tokens have a column for each expert of the rank, as those of HybridEP."""

    def dispatch(self, *given: paddle.Tensor) -> DispatchedTokens:
        tokens, ids, probs, handle = super().dispatch(*given)
        local, columns = ids.numpy(), np.arange(self.experts_of_rank)
        at = local[:, :, None] == columns  # [R, K, experts of the rank]
        dense = (at * probs.numpy()[:, :, None]).sum(1).astype(np.float32)
        hot = paddle.to_tensor(np.where(at.any(1), columns, -1))
        return DispatchedTokens(tokens, hot, paddle.to_tensor(dense), (handle, local))

    def dispatch_again(self, rows: paddle.Tensor, handle: Any) -> paddle.Tensor:
        return super().dispatch_again(rows, handle[0] if len(handle) == 2 else handle)

    def combine(self, rows: paddle.Tensor, handle: Any) -> paddle.Tensor:
        return super().combine(rows, handle[0])

    def combine_with_probs(self, rows: paddle.Tensor, probs: paddle.Tensor, handle: Any) -> tuple[Any, Any]:
        of_slots = np.take_along_axis(probs.numpy(), handle[1].clip(0), axis=1)
        of_slots = paddle.to_tensor(np.where(handle[1] >= 0, of_slots, 0).astype(np.float32))
        return self.combine(rows, handle), self.combine(of_slots, handle)
