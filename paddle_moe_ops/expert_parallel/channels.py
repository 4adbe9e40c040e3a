# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Symmetric buffers for the tokens and rows of peers, in pairs that exchanges use alternately: see `Barrier`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import filled
from ..backends.base import Tensors
from ..routing import Plan, plan_of
from .agreement import Step
from .symmetric_buffers import Barrier, RowBuffer
from .symmetric_memory import BufferShape, allocate, granularity

__all__ = ["DISPATCH", "HEADER", "RowChannel", "TokenChannel", "TokenSlot", "like_of"]

DISPATCH = "ExpertParallel.dispatch"
HEADER = 64  # PMO_RECORDS_HEADER
_MOST_STEPS = 256  # maximum of pages for a whole number of rows
_GROUP_COLUMNS, _PACKED_SCALES = 128, 4  # of float8
_FEW_TOKENS, _FEW_RANKS, _FEW_EXPERTS = 256, 32, 4096  # PMO_FEW_*


class TokenSlot(NamedTuple):
    """A symmetric buffer for tokens, and two views for each accompanying tensor: this rank's, and its peers'.

    Attributes:
        rows: S rows for each rank.
        beside: uint8 [P, bytes], records or values.
        beside_of_peers: the peers' view of it.
        codes: float8 [P * S, d]; this and the next ones with float8 only.
        codes_of_peers: the peers' view of it.
        scales: uint8 [P, bytes].
        scales_of_peers: the peers' view of it.
    """

    rows: RowBuffer
    beside: Tensor
    beside_of_peers: Tensor
    codes: Tensor | None = None
    codes_of_peers: Tensor | None = None
    scales: Tensor | None = None
    scales_of_peers: Tensor | None = None


class Arrivals(NamedTuple):
    """The tokens that arrive at a rank: R rows, some without a token.

    Attributes:
        ids: int32 [R, K], counted from the first expert of this rank, -1 for experts of other ranks.
        probs: float32 [R, K], 0 without an id.
        rows: int32 [R, 1], the row's own number, or -1 without a token.
        plan: of the ids. On a GPU it has rows for all of them, so the host does not wait for a count.
        calls: int32 [P, CALL_WORDS], the current calls of all ranks.
        workspace: the temporary memory of their computation.
    """

    ids: Tensor
    probs: Tensor
    rows: Tensor
    plan: Plan
    calls: Tensor
    workspace: Tensor


def _pairs(group: Group, like: Tensor, shapes: Sequence[BufferShape]) -> list[list[Tensor]]:
    """Allocate two symmetric buffers of each shape; all ranks call it."""
    pairs = []
    for _ in range(2):
        pairs.append([view for shape in shapes for view in allocate(group, like, shape)])
    return pairs


class TokenChannel:
    """The symmetric buffers for tokens of one width and dtype.

    Args:
        group: the ranks.
        barrier: of the group, on the device of tokens.
        capacity: the maximum of tokens from a rank to each rank.
        experts_per_rank: experts of a rank.
        like: [1, d], a tensor of the dtype and device of tokens.
        topk: K.
        float8: the format of tokens on the way, one of `permute`, or None.
        timeout: seconds that a rank waits for the others.
        step: the step in which all ranks allocate them.

    Attributes:
        rows_per_rank: S, at least the capacity.
        is_few: whether tokens fit exchanges of one launch, from which a rank receives as many lines as the capacity
            from each rank; see csrc/cuda/comm/few_tokens.cu.
        scale_columns: columns of a token's scales from `quantize_1x128`; 0 without float8.
        state: of the barrier.
        wait: see `Barrier.wait`; within the timeout.
        begin: see `Barrier.begin`.
        next: see `Barrier.next`.
        rows: the buffers for the rows of these tokens, once a call has sent rows.
    """

    def __init__(
        self,
        group: Group,
        barrier: Barrier,
        capacity: int,
        experts_per_rank: int,
        like: Tensor,
        topk: int,
        float8: str | None,
        timeout: float,
        step: Step,
    ) -> None:
        width, ranks = like.shape[1], group.nranks
        self.timeout, self._barrier, self.state = timeout, barrier, barrier.state
        self.wait = functools.partial(barrier.wait, timeout=timeout)
        self.begin = barrier.begin
        self.meet(step)
        page, row_bytes = granularity(like.place), width * like.element_size()
        multiple = page // math.gcd(page, row_bytes)
        if float8 is not None:
            multiple = max(multiple, page // math.gcd(page, width))  # of powers of 2
        if multiple * row_bytes > _MOST_STEPS * page:
            expected = f"a width in which {_MOST_STEPS} pages of {page} bytes hold a whole number of rows"
            _checks.bad_value(DISPATCH, "x", expected + ", for transport='peer'", f"{row_bytes} bytes a row")
        self.rows_per_rank = rows = -(-capacity // multiple) * multiple
        self.capacity, self.experts_per_rank, self.topk, self.group = capacity, experts_per_rank, topk, group
        self.float8, self.scale_columns = float8, 0
        beside = -(-(HEADER + rows * topk * 8) // page) * page
        shapes = [
            BufferShape(rows * row_bytes, ranks * rows, width, like.dtype),
            BufferShape(beside, ranks, beside, paddle.uint8),
        ]
        if float8 is not None:
            groups = -(-width // _GROUP_COLUMNS)
            self.scale_columns = -(-groups // _PACKED_SCALES) if float8 == _checks.UE8M0 else groups
            scales = -(-rows * self.scale_columns * 4 // page) * page
            shapes += [
                BufferShape(rows * width, ranks * rows, width, paddle.float8_e4m3fn),
                BufferShape(scales, ranks, scales, paddle.uint8),
            ]
        self._slots: list[TokenSlot] = []
        for arrived, peers, *beside_rows in _pairs(group, like, shapes):
            self._slots.append(TokenSlot(self.row_buffer(arrived, peers), *beside_rows))
            barrier.lend(arrived)
        self.next = barrier.next
        self.rows: RowChannel | None = None
        has_few = (
            capacity <= _FEW_TOKENS and max(topk, ranks) <= _FEW_RANKS and ranks * experts_per_rank <= _FEW_EXPERTS
        )
        self.is_few = has_few and float8 is None
        self._counter = filled([1], 0, "int32", like=like)

    @property
    def lines(self) -> int:
        """Received lines of each rank, with one row each."""
        return self.capacity if self.is_few else self.rows_per_rank

    def meet(self, step: Step) -> None:
        """Wait on the host for all ranks, before they allocate buffers together."""
        self._barrier.meet(step, self.timeout)

    def arrivals(self, beside: Tensor, step: Step) -> Arrivals:
        """Wait for the ranks, read their records, and route the tokens.

        This work runs concurrently with the next operators, up to the operator rank_join. If rank_join has waited for
        all of it, the results may be used and freed. If it has waited only for the records, these may be used, and
        another barrier may begin.

        Args:
            beside: the memory of the records.
            step: the dispatch.
        """
        experts, sizes = self.experts_per_rank, (self.topk, self.rows_per_rank)
        first = self.group.rank * experts
        made = self._barrier.arrivals(step, self.timeout, beside, *sizes, first, experts)
        calls, ids, probs, rows, *maps, workspace = made
        return Arrivals(ids, probs, rows, plan_of(maps, ids.shape[0], self.topk, experts), calls, workspace)

    def exchange(
        self, operator: str, step: Step, given: Tensors, rows: RowBuffer, beside: Tensors, *sizes: int
    ) -> Tensors:
        """Run an exchange of few tokens: send, wait for the ranks and receive.

        Args:
            operator: its name.
            step: the current pass of this rank's call.
            given: its first arguments.
            rows: the buffer of rows.
            beside: the views of accompanying tensors.
            sizes: its last arguments.
        """
        tensors = *given, rows.arrived, rows.peers, *beside, self._counter
        return self._barrier.exchange(operator, step, self.timeout, tensors, self.group.rank, *sizes)

    def slot(self) -> TokenSlot:
        """Return the buffers of the next exchange."""
        return self._slots[self.next()]

    def row_buffer(self, arrived: Tensor, peers: Tensor) -> RowBuffer:
        """Return a buffer for rows of its two views."""
        return RowBuffer(arrived, peers, self.group.nranks, self.group.rank, self.state)


class RowChannel:
    """The symmetric buffers for the rows of a channel's tokens, one for each of their K slots."""

    def __init__(self, tokens: TokenChannel, like: Tensor, step: Step) -> None:
        tokens.meet(step)
        width, rows = like.shape[1], tokens.rows_per_rank * tokens.topk
        region_bytes = rows * width * like.element_size()
        shape = BufferShape(region_bytes, tokens.group.nranks * rows, width, like.dtype)
        self._buffers = [tokens.row_buffer(*views) for views in _pairs(tokens.group, like, [shape])]
        self.wait, self.begin = tokens.wait, tokens.begin  # a reference to `tokens` would be a cycle
        self._next = tokens.next

    def buffer(self) -> RowBuffer:
        """Return the buffer of the next exchange; row r * K + k belongs to slot k of the token in row r."""
        return self._buffers[self._next()]


def like_of(x: Tensor) -> Tensor:
    """Return a tensor of the dtype and device of tokens that keeps none of them alive."""
    return filled([1, x.shape[1]], 0, x.dtype, like=x)
