# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine between ranks of one machine that write to each other's memory.

A rank writes its tokens where they are needed, in the order of the plan, and what it made of others' tokens where they
came from. Nothing is gathered first, and nothing waits for the host. Two windows take turns. Between two uses of one
lies a barrier of the other, which a rank reaches after everything that it does with the first.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import filled
from ..backends import direct
from ..backends.base import Tensors
from ..backends.nodes import Call, Gradients, connect, first_order_only, linear
from .groups import agree
from .windows import granularity, share

__all__ = ["Arrived", "Peers"]

_DISPATCH, _COMBINE = "ExpertParallel.dispatch", "ExpertParallel.combine"
_HEADER = 64  # PMO_RECORDS_HEADER
_MOST_STEPS = 256  # of pages, in which a region is a whole number of rows
_TIMEOUT_MS = 120_000


class Arrived(NamedTuple):
    """What a rank received; R rows, some of which are no token.

    Attributes:
        tokens: [R, d], zeros where there is no token.
        ids: int32 [R, K], counted from the first expert of this rank, -1 for those of other ranks.
        probs: float32 [R, K].
        dropped: int32 [1], slots of this rank's tokens that found no room.
        trip: what `Peers.combine` needs.
    """

    tokens: Tensor
    ids: Tensor
    probs: Tensor
    dropped: Tensor
    trip: _Trip


class _Trip(NamedTuple):
    """Where tokens went, and where what arrived lies."""

    channel: _Channel
    ids: Tensor
    token_rows: Tensor
    row_to_token: Tensor
    arrived: Tensor  # int32 [R, 1], the row itself where there is a token, else -1


class _Slot(NamedTuple):
    """The views of a pair of windows, one for rows and one for what travels beside them."""

    rows: Tensor
    rows_of_peers: Tensor
    beside: Tensor
    beside_of_peers: Tensor


class _Channel:
    """The windows for tokens of one width and dtype."""

    def __init__(self, group: Group, capacity: int, experts_per_rank: int, like: Tensor, topk: int) -> None:
        width, place = like.shape[1], like.place
        settings = {"the tokens' width": width, "their dtype": str(like.dtype), "topk": topk}
        agree(_DISPATCH, group, settings)
        page, row_bytes = granularity(place), width * like.element_size()
        step = page // math.gcd(page, row_bytes)
        if step * row_bytes > _MOST_STEPS * page:
            expected = f"a width in which {_MOST_STEPS} pages of {page} bytes hold a whole number of rows"
            _checks.bad_value(_DISPATCH, "x", expected + ", for transport='peer'", f"{row_bytes} bytes a row")
        self.rows_per_rank = -(-capacity // step) * step
        self.capacity, self.experts_per_rank, self.topk = capacity, experts_per_rank, topk
        self.group = group
        beside_bytes = -(-(_HEADER + self.rows_per_rank * topk * 8) // page) * page
        self._slots = []
        for _ in range(2):
            rows, beside = share(group, place, self.rows_per_rank * row_bytes), share(group, place, beside_bytes)
            tensors = [self._tensor(like, each, group.nranks * self.rows_per_rank, width, like.dtype) for each in rows]
            tensors += [self._tensor(like, each, group.nranks, beside_bytes, paddle.uint8) for each in beside]
            self._slots.append(_Slot(*tensors))
        self._flags = [self._tensor(like, each, group.nranks, page, paddle.uint8) for each in share(group, place, page)]
        self._flags[0].zero_()
        self._flags[0][:, :1].tolist()  # waits until they are
        agree(_DISPATCH, group, settings)  # until they are everywhere
        self._state = filled([1], 0, "int32", like=like)
        self._turn = 0

    @staticmethod
    def _tensor(like: Tensor, address: int, rows: int, columns: int, dtype: Any) -> Tensor:
        (made,) = direct("window", like, address, rows, columns, dtype.value)
        return made

    def slot(self) -> _Slot:
        """The windows of the next exchange."""
        self._turn += 1
        return self._slots[self._turn % 2]

    def wait(self) -> None:
        """Have what follows wait until all ranks have come here."""
        direct("rank_barrier", *self._flags, self._state, _TIMEOUT_MS)


class _Dispatch(Call):
    """Tokens and their probabilities in one node, so that all ranks send the gradients in one order."""

    function = _DISPATCH

    def __init__(
        self, x: Tensor, ids: Tensor, probs: Tensor, channel: _Channel, first_expert: int, copies: bool
    ) -> None:
        super().__init__(None, x, probs)
        self.given: Tensors = (x.detach(), ids, probs.detach())
        self.channel, self.first_expert, self.copies = channel, first_expert, copies
        self.ids = self.dropped = ids
        self.trip: Any = None

    def run(self) -> Tensors:
        (x, ids, probs), self.given = self.given, ()
        channel, slot = self.channel, self.channel.slot()
        sizes = channel.experts_per_rank, channel.rows_per_rank
        token_rows, row_to_token, self.dropped = direct(
            "rank_plan", ids, probs, slot.beside_of_peers, *sizes, channel.capacity
        )
        direct("rank_push", x, token_rows, row_to_token, slot.rows_of_peers)
        channel.wait()
        self.ids, their_probs, arrived = direct(
            "rank_records", slot.beside, channel.topk, channel.rows_per_rank, self.first_expert, sizes[0]
        )
        self.trip = _Trip(channel, ids, token_rows, row_to_token, arrived)
        return _kept(slot, self.trip) if self.copies else slot.rows, their_probs

    def differentiate(self, *gradients: Tensor) -> Gradients:
        d_tokens, d_probs = (each.detach() for each in gradients)
        channel, slot = self.channel, self.channel.slot()
        _send_back(d_tokens, slot, self.trip)
        direct("rank_put", d_probs, slot.beside_of_peers, channel.rows_per_rank)
        channel.wait()
        (d_x,) = direct("rank_sum", slot.rows, self.trip.token_rows)
        sizes = channel.experts_per_rank, channel.rows_per_rank
        (made,) = direct("rank_get", slot.beside, self.trip.ids, self.trip.token_rows, *sizes)
        return first_order_only(self, (d_x, made), *gradients)


def _kept(slot: _Slot, trip: _Trip) -> Tensor:
    """A copy of the rows that arrived."""
    out = paddle.empty_like(slot.rows)
    direct("rank_copy", slot.rows, trip.arrived, out)
    return out


def _send_back(rows: Tensor, slot: _Slot, trip: _Trip) -> None:
    """Rows to the ranks whose tokens they are of. A row is there what it is here: number i of the other rank."""
    direct("rank_push", rows, trip.arrived, trip.arrived, slot.rows_of_peers)


class Peers:
    """Exchanges of one group through shared memory.

    Args:
        group: the ranks, on one machine.
        capacity: tokens that a rank sends to each at most.
        experts_per_rank: experts of a rank.
    """

    def __init__(self, group: Group, capacity: int, experts_per_rank: int) -> None:
        self._group, self._capacity, self._experts = group, capacity, experts_per_rank

    def dispatch(self, x: Tensor, ids: Tensor, probs: Tensor, copies: bool) -> Arrived:
        """Send tokens to the ranks of their experts; differentiable in x and probs.

        Args:
            x: [T, d].
            ids: [T, K], those that count.
            probs: float32 [T, K].
            copies: False: let the tokens lie where they arrived, which the second exchange after this one overwrites.
        """
        channel = _channel(self._group, self._capacity, self._experts, x, ids.shape[1])
        call = _Dispatch(x, ids, probs, channel, self._group.rank * self._experts, copies)
        tokens, their_probs = connect(call, x, probs)
        return Arrived(tokens, call.ids, their_probs, call.dropped, call.trip)

    def combine(self, out: Tensor, trip: _Trip) -> Tensor:
        """The sums of each token's rows of all ranks; differentiable.

        Args:
            out: [R, d] in the order in which tokens arrived.
            trip: what `dispatch` gave.
        """

        def there(out: Tensor) -> Tensor:
            slot = trip.channel.slot()
            _send_back(out.detach(), slot, trip)
            trip.channel.wait()
            (made,) = direct("rank_sum", slot.rows, trip.token_rows)
            return made

        def back(gradient: Tensor) -> Tensor:
            slot = trip.channel.slot()
            direct("rank_push", gradient.detach(), trip.token_rows, trip.row_to_token, slot.rows_of_peers)
            trip.channel.wait()
            return _kept(slot, trip)

        return linear(_COMBINE, None, out, there, back)


_channels: dict[tuple[Any, ...], _Channel] = {}


def _channel(group: Group, capacity: int, experts_per_rank: int, x: Tensor, topk: int) -> _Channel:
    """The windows of a group; layers of one kind share them."""
    key = (group.id, tuple(group.ranks), capacity, experts_per_rank, x.shape[1], x.dtype, str(x.place), topk)
    if key not in _channels:
        like = filled([1, x.shape[1]], 0, x.dtype, like=x)
        _channels[key] = _Channel(group, capacity, experts_per_rank, like, topk)
    return _channels[key]
