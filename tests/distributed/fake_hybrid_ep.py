# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A fake of HybridEP's module on a CPU: the arguments and results of its class, by `all_gather_object`."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

SPARE_ROWS = 3  # of the handle's map behind those of the received tokens
GARBAGE = 7.0  # probabilities of other ranks' experts


class HybridEPBuffer:
    """The buffer of one NVLink domain.

    Attributes:
        made: sizes of all buffers.
    """

    made: list[tuple[int, int, int]] = []  # noqa: RUF012

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
    ) -> None:
        assert group.nranks > 1
        assert not use_fp8
        self._group, self._sizes = group, (hidden_dim, max_num_of_tokens_per_rank, num_local_experts)
        self.made.append(self._sizes)

    def dispatch(
        self,
        hidden: paddle.Tensor,
        scaling_factor: None = None,
        topk_idx: None = None,
        topk_weights: None = None,
        num_of_experts: int | None = None,
        probs: paddle.Tensor | None = None,
        routing_map: paddle.Tensor | None = None,
        num_dispatched_tokens_tensor: None = None,
        num_dispatched_tokens: int | None = None,
        handle: tuple[Any, ...] | None = None,
    ) -> tuple[Any, ...]:
        width, most, local = self._sizes
        assert hidden.dtype == paddle.bfloat16
        assert hidden.shape[1] == width
        if handle is None:
            assert routing_map is not None
            assert routing_map.dtype == paddle.bool
            assert routing_map.shape == [hidden.shape[0], local * self._group.nranks]
            maps = self._gathered(routing_map.numpy())
            assert {len(each) for each in maps} == {hidden.shape[0]}  # as many tokens on every rank
            assert hidden.shape[0] <= most
            first = self._group.rank * local
            here = [each[:, first : first + local] for each in maps]
            arriving = [np.flatnonzero(each.any(1)) for each in here]
            spare = np.ones((SPARE_ROWS, local), bool)
            local_map = np.concatenate([*(each[rows] for each, rows in zip(here, arriving, strict=True)), spare])
            sent = [np.flatnonzero(each.any(1)) for each in np.split(routing_map.numpy(), self._group.nranks, axis=1)]
            count = paddle.to_tensor(sum(map(len, arriving)))
            handle = sent, arriving, None, count, paddle.to_tensor(local_map), hidden.shape[0], None
        else:
            assert num_dispatched_tokens == sum(map(len, handle[1]))
        arrived = self._moved(hidden, handle)
        if probs is None:
            return arrived, None, None, handle
        theirs = self._moved(probs, handle).numpy().copy()
        others = np.ones(theirs.shape[1], bool)
        others[self._group.rank * local : (self._group.rank + 1) * local] = False
        theirs[:, others] = GARBAGE
        return arrived, paddle.to_tensor(theirs), None, handle

    def combine(
        self, hidden: paddle.Tensor, probs: paddle.Tensor | None = None, handle: tuple[Any, ...] | None = None
    ) -> tuple[Any, Any]:
        assert handle is not None
        assert hidden.dtype == paddle.bfloat16
        sums = self._summed(hidden, handle).astype("bfloat16")
        return sums, None if probs is None else self._summed(probs, handle)

    def _gathered(self, own: Any) -> list[Any]:
        of_ranks: list[Any] = []
        paddle.distributed.all_gather_object(of_ranks, own, group=self._group)
        return of_ranks

    def _moved(self, lines: paddle.Tensor, handle: tuple[Any, ...]) -> paddle.Tensor:
        values: NDArray = lines.astype("float32").numpy()
        of_ranks = self._gathered([values[rows] for rows in handle[0]])
        mine = np.concatenate([each[self._group.rank] for each in of_ranks])
        return paddle.to_tensor(mine).astype(lines.dtype)

    def _summed(self, lines: paddle.Tensor, handle: tuple[Any, ...]) -> paddle.Tensor:
        sent, arriving, _, _, _, num_tokens, _ = handle
        values = lines.astype("float32").numpy()
        assert len(values) == sum(map(len, arriving))
        of_ranks = self._gathered(np.split(values, np.cumsum([len(rows) for rows in arriving])[:-1]))
        sums = np.zeros([num_tokens, lines.shape[1]], np.float32)
        for rows, each in zip(sent, of_ranks, strict=True):
            sums[rows] += each[self._group.rank]
        return paddle.to_tensor(sums)
