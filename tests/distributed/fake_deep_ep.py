# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Stands in for Paddle's module of DeepEP on a CPU: its documented interface, over gloo, and its demands."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.distributed.communication.group import Group

from paddle_moe_ops.expert_parallel.transports import Scatters

from .problems import step_of

NAME = "paddle.distributed.communication.deep_ep"
KNEE_BYTES = 64


def install() -> None:
    """Have this process find the module."""
    module = ModuleType(NAME)
    module.Buffer = Buffer
    sys.modules[NAME] = module


class Config(NamedTuple):
    """Hints of which one grows with rows of up to `KNEE_BYTES`, and the other one with wider rows."""

    over_nvlink: int
    over_rdma: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.over_nvlink * min(hidden_bytes, KNEE_BYTES) * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.over_rdma * max(hidden_bytes, KNEE_BYTES) * num_ranks


DISPATCH, COMBINE = Config(2, 1), Config(1, 3)  # each needs more bytes of one kind


class Buffer:
    made: list[tuple[int, int]] = []  # noqa: RUF012  bytes over NVLink and RDMA of each

    def __init__(self, group: Group, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.num_nvl_bytes, self.num_rdma_bytes, self._group = num_nvl_bytes, num_rdma_bytes, group
        self._moves = Scatters(group, 60.0)
        Buffer.made.append((num_nvl_bytes, num_rdma_bytes))

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return DISPATCH

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        Buffer.get_dispatch_config(num_ranks)
        return COMBINE

    def get_dispatch_layout(self, topk_idx: paddle.Tensor, num_experts: int) -> tuple[Any, ...]:
        check(topk_idx, paddle.int64)
        ids, ranks = topk_idx.numpy(), self._group.nranks
        goes_there = np.stack([(ids // (num_experts // ranks) == rank).any(1) for rank in range(ranks)], axis=1)
        per_expert = np.array([(ids == expert).sum() for expert in range(num_experts)], np.int32)
        per_rank = goes_there.sum(0).astype(np.int32)
        return paddle.to_tensor(per_rank), None, paddle.to_tensor(per_expert), paddle.to_tensor(goes_there), None

    def dispatch(
        self,
        x: paddle.Tensor,
        handle: Any = None,
        num_tokens_per_rank: paddle.Tensor | None = None,
        num_tokens_per_rdma_rank: paddle.Tensor | None = None,
        is_token_in_rank: paddle.Tensor | None = None,
        num_tokens_per_expert: paddle.Tensor | None = None,
        topk_idx: paddle.Tensor | None = None,
        topk_weights: paddle.Tensor | None = None,
    ) -> tuple[Any, ...]:
        check(x, paddle.bfloat16)
        assert x.shape[1] % 8 == 0
        self._check_room(x)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            return self._moved(x, handle), None, None, None, None, None
        check(topk_idx, paddle.int64)
        check(topk_weights, paddle.float32)
        check(is_token_in_rank, paddle.bool)
        assert num_tokens_per_rdma_rank is None  # of one machine
        ranks, goes_there = self._group.nranks, is_token_in_rank.numpy()
        counts = [int(each) for each in num_tokens_per_rank.tolist()]
        told: list[list[int]] = []
        paddle.distributed.all_gather_object(told, counts, group=self._group)
        tokens = [np.flatnonzero(goes_there[:, rank]) for rank in range(ranks)]
        handle = (tokens, counts, [each[self._group.rank] for each in told], x.shape[0])
        experts = num_tokens_per_expert.shape[0] // ranks
        first = self._group.rank * experts
        ids, weights = self._moved(topk_idx, handle).numpy(), self._moved(topk_weights, handle).numpy()
        is_here = (ids >= first) & (ids < first + experts)
        local = paddle.to_tensor(np.where(is_here, ids - first, -1))
        theirs = paddle.to_tensor(np.where(is_here, weights, 0).astype(np.float32))
        of_experts = [int((is_here & (ids == first + expert)).sum()) for expert in range(experts)]
        return self._moved(x, handle), local, theirs, of_experts, handle, None

    def combine(self, x: paddle.Tensor, handle: Any, topk_weights: paddle.Tensor | None = None) -> tuple[Any, ...]:
        check(x, paddle.bfloat16)
        self._check_room(x)
        sums = self._summed(x, handle).astype("bfloat16")
        if topk_weights is None:
            return sums, None, None
        check(topk_weights, paddle.float32)
        return sums, self._summed(topk_weights, handle), None

    def _check_room(self, x: paddle.Tensor) -> None:
        needed = x.shape[1] * x.element_size(), self._group.nranks
        for config in (DISPATCH, COMBINE):
            assert self.num_nvl_bytes >= config.get_nvl_buffer_size_hint(*needed)
            assert self.num_rdma_bytes >= config.get_rdma_buffer_size_hint(*needed)

    def _moved(self, lines: paddle.Tensor, handle: Any) -> paddle.Tensor:
        tokens, counts, received, _ = handle
        chosen = paddle.to_tensor(np.concatenate(tokens).astype(np.int64))
        sent = paddle.gather(lines, chosen) if chosen.shape[0] else lines[:0]
        return self._moves.exchange(sent, counts, received, step_of(self._group))

    def _summed(self, lines: paddle.Tensor, handle: Any) -> paddle.Tensor:
        tokens, counts, received, num_tokens = handle
        assert lines.shape[0] == sum(received)
        back = self._moves.exchange(lines, received, counts, step_of(self._group)).astype("float32").numpy()
        sums = np.zeros([num_tokens, lines.shape[1]], np.float32)
        for rank, part in enumerate(np.split(back, np.cumsum(counts)[:-1])):
            sums[tokens[rank]] += part
        return paddle.to_tensor(sums)


def check(tensor: Any, dtype: Any) -> None:
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
