# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine between ranks of one machine that write to each other's memory.

A rank writes its tokens to where they are needed, in the order of the plan, and its results for others' tokens to where
these came from. Nothing is gathered first, and nothing waits for the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import filled
from ..backends import direct
from ..backends.base import Tensors
from ..backends.nodes import Call, Gradients, connect, first_order_only, linear
from ..functional import permute, unpermute
from ..routing import Plan
from .channels import OwnRows, RowChannel, TokenChannel

__all__ = ["ArrivedRows", "ArrivedTokens", "Peers"]

_DISPATCH, _COMBINE = "ExpertParallel.dispatch", "ExpertParallel.combine"
_AMAX_MIN = 1e-4  # of `quantize_1x128`


class ArrivedTokens(NamedTuple):
    """What a rank received; R rows, some of which are no token.

    Attributes:
        tokens: [R, d], zeros where there is no token; with float8 these rows may be anything.
        plan: the local plan of the R tokens.
        probs: float32 [R, K].
        dropped: int32 [1], slots of this rank's tokens that found no room.
        routed: int32 [E], this rank's tokens that chose each expert.
        trip: what `Peers.combine` needs.
    """

    tokens: Tensor
    plan: Plan
    probs: Tensor
    dropped: Tensor
    routed: Tensor
    trip: _Trip


class ArrivedRows(NamedTuple):
    """The rows that a rank received for its experts, one by one.

    Attributes:
        rows: [N, d] in the order of the local plan.
        plan: the local plan of the R tokens.
        dropped: as above.
        trip: what `Peers.combine_rows` needs.
    """

    rows: Tensor
    plan: Plan
    dropped: Tensor
    trip: _RowTrip


class _Trip(NamedTuple):
    """Where tokens went, and where what arrived lies."""

    channel: TokenChannel
    ids: Tensor
    token_rows: Tensor
    arrived: Tensor  # int32 [R, 1], the row itself where there is a token, else -1


class _RowTrip(NamedTuple):
    """Where the rows of slots are: at the owner in the order of its plan, at the experts in that of the local plan."""

    channel: RowChannel
    own_to_window: Tensor  # int32 [rows of the owner's plan, 1]
    local_to_window: Tensor  # int32 [N, 1]

    def to_owners(self, rows: Tensor) -> Tensor:
        """Bring local rows to the owners of their tokens."""
        return self._moved(rows, self.local_to_window, self.own_to_window)

    def to_experts(self, rows: Tensor) -> Tensor:
        """Bring rows of the owner's plan to the ranks of their experts."""
        return self._moved(rows, self.own_to_window, self.local_to_window)

    def _moved(self, rows: Tensor, places: Tensor, from_there: Tensor) -> Tensor:
        window = self.channel.window()
        window.send(rows.detach(), places, OwnRows.TO_WINDOW)
        self.channel.wait()
        return window.receive(from_there, own=window.arrived)


def _sent(x: Tensor, ids: Tensor, probs: Tensor, channel: TokenChannel, copies: bool) -> ArrivedTokens:
    """Send tokens to the ranks of their experts, and receive those of others, in the window unless ``copies``.

    Ids and probabilities arrive first, and are routed while the tokens travel and are copied.
    """
    slot, sizes = channel.slot(), (channel.experts_per_rank, channel.rows_per_rank)
    is_float8, ue8m0 = channel.float8 is not None, channel.float8 == _checks.UE8M0
    token_rows, dropped, routed, *row_to_token = direct(
        "rank_plan", ids, probs, slot.beside_of_peers, *sizes, channel.capacity, is_float8
    )
    try:
        arrivals = channel.arrivals(slot.beside)
        if is_float8:
            (scales,) = direct("rank_quantize", x, token_rows, *row_to_token, slot.codes_of_peers, ue8m0, _AMAX_MIN)
            direct("rank_put", scales, slot.scales_of_peers, channel.rows_per_rank)
        elif copies:
            tokens = slot.rows.send(x, token_rows, OwnRows.TO_NEW_MEMORY, leaves_room=True)
        else:
            tokens = slot.rows.send(x, token_rows, OwnRows.TO_WINDOW, writes_all=True, leaves_room=True)
        direct("rank_join", slot.beside, False)
        channel.wait()
        if is_float8:
            (scales,) = direct("rank_take", slot.scales, channel.rows_per_rank, channel.scale_columns, ue8m0)
            (tokens,) = direct("dequantize_1x128", slot.codes, scales, False, x.dtype.value)
        elif copies:
            tokens = slot.rows.receive(arrivals.rows, to=tokens)
    finally:
        direct("rank_join", slot.beside, True)
    trip = _Trip(channel, ids, token_rows, arrivals.rows)
    return ArrivedTokens(tokens, arrivals.plan, arrivals.probs, dropped, routed, trip)


class _Dispatch(Call):
    """Tokens and their probabilities in one node, so that all ranks send the gradients in one order."""

    function = _DISPATCH

    def __init__(self, x: Tensor, ids: Tensor, probs: Tensor, channel: TokenChannel, copies: bool) -> None:
        super().__init__(None, x, probs)
        self.watch(ids)
        self.given: Tensors = (x.detach(), ids, probs.detach())
        self.channel, self.copies = channel, copies
        self.arrived: Any = None

    def run(self) -> Tensors:
        (x, ids, probs), self.given = self.given, ()
        self.arrived = _sent(x, ids, probs, self.channel, self.copies)
        tokens, their_probs = self.arrived.tokens, self.arrived.probs
        self.arrived = self.arrived._replace(tokens=None, probs=None)  # which connect gives
        return tokens, their_probs

    def differentiate(self, *gradients: Tensor) -> Gradients:
        d_tokens, d_probs = (each.detach() for each in gradients)
        channel, slot, trip = self.channel, self.channel.slot(), self.arrived.trip
        slot.rows.send(d_tokens, trip.arrived, OwnRows.STAY)
        direct("rank_put", d_probs, slot.beside_of_peers, channel.rows_per_rank)
        channel.wait()
        d_x = slot.rows.receive(trip.token_rows, own=d_tokens)
        sizes = channel.experts_per_rank, channel.rows_per_rank
        (made,) = direct("rank_get", slot.beside, trip.ids, trip.token_rows, *sizes)
        return first_order_only(self, (d_x, made), *gradients)


class Peers:
    """Exchanges of one group through shared memory.

    Args:
        group: the ranks, on one machine.
        capacity: the most tokens that a rank sends to each rank.
        experts_per_rank: experts of a rank.
        float8: a format of `permute` in which tokens travel, or None.
        timeout: seconds that a rank waits for the others.
    """

    def __init__(self, group: Group, capacity: int, experts_per_rank: int, float8: str | None, timeout: float) -> None:
        self._group, self._capacity, self._experts = group, capacity, experts_per_rank
        self._float8, self._timeout = float8, timeout

    def dispatch(self, x: Tensor, ids: Tensor, probs: Tensor, copies: bool) -> ArrivedTokens:
        """Send tokens to the ranks of their experts; differentiable in x and probs.

        Args:
            x: [T, d].
            ids: [T, K], -1 where a slot does not count.
            probs: float32 [T, K].
            copies: False: leave the tokens where they arrived; the second exchange after this one overwrites them.
        """
        call = _Dispatch(x, ids, probs, self._tokens(x, ids), copies)
        tokens, their_probs = connect(call, x, probs)
        arrived: ArrivedTokens = call.arrived
        return arrived._replace(tokens=tokens, probs=their_probs)

    def dispatch_rows(self, x: Tensor, ids: Tensor, probs: Tensor, plan: Plan) -> ArrivedRows:
        """Send tokens to the ranks of their experts, which make rows of them; differentiable in x.

        In the backward pass every row's gradient travels, so that a token's gradient is one sum over its rows.

        Args:
            x: [T, d].
            ids: [T, K], -1 where a slot does not count.
            probs: float32 [T, K], which travel as well, but are not used there.
            plan: of the T tokens over all experts.
        """
        found: list[ArrivedRows] = []

        def there(x: Tensor) -> Tensor:
            sent = _sent(x.detach(), ids, probs.detach(), self._tokens(x, ids), copies=False)
            local = sent.plan
            rows = permute(sent.tokens, local)[0]
            found.append(ArrivedRows(rows, local, sent.dropped, self._row_trip(x, plan, local, sent.trip)))
            return rows

        def back(gradient: Tensor) -> Tensor:
            return unpermute(found[0].trip.to_owners(gradient), plan)

        rows = linear(_DISPATCH, None, x, there, back)
        return found[0]._replace(rows=rows)

    def combine(self, out: Tensor, trip: _Trip) -> Tensor:
        """The sums of each token's rows of all ranks; differentiable.

        Args:
            out: [R, d] in the order in which tokens arrived.
            trip: what `dispatch` gave.
        """

        def there(out: Tensor) -> Tensor:
            rows, parts = trip.channel.slot().rows, out.detach()
            rows.send(parts, trip.arrived, OwnRows.STAY)
            trip.channel.wait()
            return rows.receive(trip.token_rows, own=parts)

        def back(gradient: Tensor) -> Tensor:
            rows = trip.channel.slot().rows
            tokens = rows.send(gradient.detach(), trip.token_rows, OwnRows.TO_NEW_MEMORY)
            trip.channel.wait()
            return rows.receive(trip.arrived, to=tokens)

        return linear(_COMBINE, None, out, there, back)

    def combine_rows(self, out: Tensor, trip: _RowTrip) -> Tensor:
        """The rows of the experts at the owners of their tokens, in the order of the owner's plan; differentiable.

        Args:
            out: [N, d] in the order of the local plan.
            trip: what `dispatch_rows` gave.
        """
        return linear(_COMBINE, None, out, trip.to_owners, trip.to_experts)

    def _tokens(self, x: Tensor, ids: Tensor) -> TokenChannel:
        """The windows for tokens; layers of one kind share them."""
        topk, float8, timeout = ids.shape[1], self._float8, self._timeout
        settings = self._capacity, self._experts, topk, float8, timeout
        key = (self._group.id, tuple(self._group.ranks), x.shape[1], x.dtype, str(x.place), *settings)
        if key not in _channels:
            sizes = self._capacity, self._experts
            _channels[key] = TokenChannel(self._group, *sizes, _like(x), topk, float8, timeout)
        return _channels[key]

    def _row_trip(self, x: Tensor, plan: Plan, local: Plan, trip: _Trip) -> _RowTrip:
        tokens = trip.channel
        if tokens not in _row_channels:
            _row_channels[tokens] = RowChannel(tokens, _like(x))
        sizes = self._group.nranks, self._experts, tokens.rows_per_rank
        (own_to_window,) = direct("rank_rows", trip.ids, trip.token_rows, plan.row_to_slot, *sizes)
        return _RowTrip(_row_channels[tokens], own_to_window, local.row_to_slot.reshape([-1, 1]))


def _like(x: Tensor) -> Tensor:
    """A tensor of the dtype and device of tokens, which keeps none of them alive."""
    return filled([1, x.shape[1]], 0, x.dtype, like=x)


_channels: dict[tuple[Any, ...], TokenChannel] = {}
_row_channels: dict[TokenChannel, RowChannel] = {}
