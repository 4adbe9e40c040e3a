# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine between ranks of one machine that write to each other's memory.

A rank writes its tokens directly to the ranks of their experts, in the order of the plan, and the results for others'
tokens back to their owners. There is no separate gather and no wait on the host. Symmetric buffers for tokens and rows
are allocated in pairs, which exchanges use alternately: see `Barrier`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from .. import _checks
from .._quick import AMAX_MIN
from ..backends import direct, resolve
from ..backends.autograd import Call, Gradients, connect, first_order_only, linear
from ..backends.base import Tensors
from ..routing import Plan, plan_of
from .agreement import Kind, LayerCall, Step, backward_step, combine_step
from .channels import DISPATCH, RowChannel, TokenChannel, like_of
from .symmetric_buffers import Barrier, GroupBuffers, OwnRows

__all__ = ["Peers"]

_COMBINE = "ExpertParallel.combine"


class ArrivedTokens(NamedTuple):
    """The tokens that a rank received: R rows, some without a token.

    Attributes:
        tokens: [R, d], zeros in rows without a token; with float8 these rows are undefined.
        plan: the local plan of the R tokens.
        probs: float32 [R, K].
        dropped: 0-D int32, slots of this rank's tokens that exceeded S.
        routed: int32 [E], this rank's tokens that chose each expert.
        trip: the argument of `Peers.combine`.
    """

    tokens: Tensor
    plan: Plan
    probs: Tensor
    dropped: Tensor
    routed: Tensor
    trip: _Trip


class ArrivedRows(NamedTuple):
    """The rows that a rank received for its experts.

    Attributes:
        rows: [N, d] in the order of the local plan.
        plan: the local plan of the R tokens.
        dropped: as above.
        trip: the argument of `Peers.combine_rows`.
    """

    rows: Tensor
    plan: Plan
    dropped: Tensor
    trip: _RowTrip


class _Trip(NamedTuple):
    """The rows of sent tokens at other ranks, and the rows of received tokens."""

    channel: TokenChannel
    call: LayerCall
    ids: Tensor
    token_rows: Tensor
    arrived: Tensor  # int32 [R, 1], the row's own number, or -1 without a token
    calls: Tensor  # of all ranks in dispatch


class _RowTrip(NamedTuple):
    """The buffer rows of slots, in the order of the owner's plan and in that of the experts' local plan."""

    channel: RowChannel
    call: LayerCall
    own_to_buffer: Tensor  # int32 [rows of the owner's plan, 1]
    local_to_buffer: Tensor  # int32 [N, 1]
    calls: Tensor  # of all ranks in dispatch

    def exchanged(
        self, rows: Tensor, step: Step, forward_calls: Tensor | None = None, *, to_owners: bool
    ) -> tuple[Tensor, Tensor]:
        """Send local rows to the owners of their tokens, or rows of the owner's plan to the ranks of their experts.

        Returns:
            the received rows, and the calls of all ranks.
        """
        sent, received = self.own_to_buffer, self.local_to_buffer
        if to_owners:
            sent, received = received, sent
        buffer = self.channel.buffer()
        buffer.send(rows, sent, OwnRows.TO_BUFFER)
        calls = self.channel.wait(step, forward_calls)
        return buffer.receive(received, own=buffer.arrived), calls


def _sent(x: Tensor, ids: Tensor, probs: Tensor, channel: TokenChannel, step: Step, stay: bool) -> ArrivedTokens:
    """Send tokens to the ranks of their experts, and receive those of others, which may ``stay`` in the buffer.

    Ids and probabilities arrive first, and are routed during the transfer of the tokens. The choice of fetched rows
    depends on the call, never on gradients, since both ranks of a pair write to the same region.
    """
    slot, sizes = channel.slot(), (channel.experts_per_rank, channel.rows_per_rank)
    is_float8, ue8m0 = channel.float8 is not None, channel.float8 == _checks.UE8M0
    token_rows, dropped, routed, *row_to_token = direct(
        "rank_plan", ids, probs, slot.beside_of_peers, *sizes, channel.capacity, is_float8
    )
    try:
        arrivals = channel.arrivals(slot.beside, step)
        if is_float8:
            (scales,) = direct("rank_quantize", x, token_rows, *row_to_token, slot.codes_of_peers, ue8m0, AMAX_MIN)
            direct("rank_put", scales, slot.scales_of_peers, channel.rows_per_rank)
        elif step.call.copies:
            tokens = slot.rows.send(x, token_rows, OwnRows.TO_NEW_MEMORY, leaves_room=True)
        else:
            tokens = slot.rows.send(x, token_rows, OwnRows.TO_BUFFER, fetched=0, leaves_room=True)
        direct("rank_join", channel.state, False)
        channel.wait(step)
        if is_float8:
            (scales,) = direct("rank_take", slot.scales, channel.rows_per_rank, channel.scale_columns, ue8m0)
            (tokens,) = direct("dequantize_1x128", slot.codes, scales, False, x.dtype.value)
        elif step.call.copies:
            tokens = slot.rows.receive(arrivals.rows, to=tokens)
        elif not stay:
            tokens = slot.rows.receive(arrivals.rows, own=tokens, fetched=0)
    finally:
        direct("rank_join", channel.state, True)
    trip = _Trip(channel, step.call, ids, token_rows, arrivals.rows, arrivals.calls)
    return ArrivedTokens(tokens, arrivals.plan, arrivals.probs, dropped, routed, trip)


def _exchanged(x: Tensor, ids: Tensor, probs: Tensor, channel: TokenChannel, step: Step) -> ArrivedTokens:
    """`_sent` for few tokens."""
    slot, sizes = channel.slot(), (channel.experts_per_rank, channel.capacity)
    beside = slot.beside, slot.beside_of_peers
    calls, *made = channel.exchange("rank_dispatch", step, (x, ids, probs), slot.rows, beside, *sizes)
    tokens, their_ids, their_probs, rows, token_rows, dropped, routed, *maps = made
    plan = plan_of(maps, their_ids.shape[0], channel.topk, channel.experts_per_rank)
    trip = _Trip(channel, step.call, ids, token_rows, rows, calls)
    return ArrivedTokens(tokens, plan, their_probs, dropped, routed, trip)


class _Dispatch(Call):
    """A call that sends tokens and probabilities; with one node, all ranks send the gradients in one order."""

    function = DISPATCH

    def __init__(self, x: Tensor, ids: Tensor, probs: Tensor, channel: TokenChannel, step: Step) -> None:
        super().__init__(None, x, probs)
        self.watch(ids)
        self.given: Tensors = (x, ids, probs)
        self.channel, self.step = channel, step
        self.stay = not paddle.is_grad_enabled()  # otherwise the experts' backward pass may read them
        self.arrived: Any = None

    def run(self) -> Tensors:
        (x, ids, probs), self.given = self.given, ()
        if self.channel.is_few:
            self.arrived = _exchanged(x, ids, probs, self.channel, self.step)
        else:
            self.arrived = _sent(x, ids, probs, self.channel, self.step, self.stay)
        tokens, their_probs = self.arrived.tokens, self.arrived.probs
        self.arrived = self.arrived._replace(tokens=None, probs=None)  # connect returns these
        return tokens, their_probs

    def differentiate(self, *gradients: Tensor) -> Gradients:
        d_tokens, d_probs = gradients
        step = backward_step(self.step.call, Kind.DISPATCH_BACKWARD)
        channel, slot, trip = self.channel, self.channel.slot(), self.arrived.trip
        slot.rows.send(d_tokens, trip.arrived, OwnRows.STAY)
        direct("rank_put", d_probs, slot.beside_of_peers, channel.lines)
        channel.wait(step, trip.calls)
        d_x = slot.rows.receive(trip.token_rows, own=d_tokens, own_rows=channel.lines)
        sizes = channel.experts_per_rank, channel.rows_per_rank
        (made,) = direct("rank_get", slot.beside, trip.ids, trip.token_rows, channel.state, *sizes)
        return first_order_only(self, (d_x, made), *gradients)


class Peers:
    """The exchanges of one group through symmetric buffers.

    Args:
        buffers: the buffers of the group, whose ranks are on one machine.
        capacity: the maximum of tokens from a rank to each rank.
        experts_per_rank: experts of a rank.
        float8: the format of tokens on the way, one of `permute`, or None.
        timeout: seconds that a rank waits for the others.
    """

    def __init__(
        self, buffers: GroupBuffers, capacity: int, experts_per_rank: int, float8: str | None, timeout: float
    ) -> None:
        self._buffers, self._group = buffers, buffers.group
        self._capacity, self._experts = capacity, experts_per_rank
        self._float8, self._timeout = float8, timeout

    def dispatch(self, x: Tensor, ids: Tensor, probs: Tensor, step: Step) -> ArrivedTokens:
        """Send tokens to the ranks of their experts; differentiable in x and probs.

        Args:
            x: [T, d].
            ids: [T, K], -1 for slots that do not count.
            probs: float32 [T, K].
            step: the dispatch.
        """
        call = _Dispatch(x, ids, probs, self._tokens(x, ids, step), step)
        tokens, their_probs = connect(call, x, probs)
        arrived: ArrivedTokens = call.arrived
        return arrived._replace(tokens=tokens, probs=their_probs)

    def dispatch_rows(self, x: Tensor, ids: Tensor, probs: Tensor, plan: Plan, step: Step) -> ArrivedRows:
        """Send tokens to the ranks of their experts, which permute them to rows; differentiable in x.

        The backward pass sends every row's gradient, so that a token's gradient is one sum over its rows.

        Args:
            x: [T, d].
            ids: [T, K], -1 for slots that do not count.
            probs: float32 [T, K], sent as well, but unused by the receiver.
            plan: of the T tokens over all experts.
            step: the dispatch.
        """
        found: list[ArrivedRows] = []

        def there(x: Tensor) -> Tensor:
            channel = self._tokens(x, ids, step)
            sent = _sent(x, ids, probs, channel, step, stay=True)
            local = sent.plan
            rows = resolve("permute", x).permute(sent.tokens, None, local, "all")[0]
            found.append(ArrivedRows(rows, local, sent.dropped, self._row_trip(x, plan, local, sent.trip, step)))
            return rows

        def back(gradient: Tensor) -> Tensor:
            trip = found[0].trip
            back_step = backward_step(step.call, Kind.DISPATCH_BACKWARD)
            rows, _ = trip.exchanged(gradient, back_step, trip.calls, to_owners=True)
            return resolve("unpermute", rows).unpermute(rows, None, plan)

        rows = linear(DISPATCH, None, x, there, back)
        return found[0]._replace(rows=rows)

    def combine(self, out: Tensor, trip: _Trip) -> Tensor:
        """Return the sums of each token's rows of all ranks; differentiable.

        Args:
            out: [R, d] in the order of the received tokens.
            trip: from `dispatch`.
        """

        step, calls, channel = combine_step(trip.call, out), [], trip.channel

        def there(out: Tensor) -> Tensor:
            rows = channel.slot().rows
            if channel.is_few:
                of_ranks, sums = channel.exchange("rank_combine", step, (out, trip.arrived, trip.token_rows), rows, ())
                calls.append(of_ranks)
                return sums
            rows.send(out, trip.arrived, OwnRows.STAY)
            calls.append(channel.wait(step))
            return rows.receive(trip.token_rows, own=out)

        def back(gradient: Tensor) -> Tensor:
            back_step = backward_step(step.call, Kind.COMBINE_BACKWARD)
            rows = channel.slot().rows
            tokens = rows.send(gradient, trip.token_rows, OwnRows.TO_NEW_MEMORY, own_rows=channel.lines)
            channel.wait(back_step, calls[0])
            return rows.receive(trip.arrived, to=tokens)

        return linear(_COMBINE, None, out, there, back)

    def combine_rows(self, out: Tensor, trip: _RowTrip) -> Tensor:
        """Send rows of experts to the owners of their tokens; returns them in the owner's order; differentiable.

        Args:
            out: [N, d] in the order of the local plan.
            trip: from `dispatch_rows`.
        """
        step, calls = combine_step(trip.call, out), []

        def there(out: Tensor) -> Tensor:
            rows, of_ranks = trip.exchanged(out, step, to_owners=True)
            calls.append(of_ranks)
            return rows

        def back(gradient: Tensor) -> Tensor:
            back_step = backward_step(step.call, Kind.COMBINE_BACKWARD)
            return trip.exchanged(gradient, back_step, calls[0], to_owners=False)[0]

        return linear(_COMBINE, None, out, there, back)

    def _tokens(self, x: Tensor, ids: Tensor, step: Step) -> TokenChannel:
        """Return the buffers for tokens, which layers of one kind share; all ranks allocate them together."""
        sizes, topk = (self._capacity, self._experts), ids.shape[1]
        key = x.shape[1], x.dtype, str(x.place), *sizes, topk, self._float8, self._timeout
        channel: TokenChannel | None = self._buffers.find(key)
        if channel is None:
            given = *sizes, like_of(x), topk, self._float8, self._timeout, step
            channel = self._buffers.keep(key, TokenChannel(self._group, self._barrier(x), *given))
        return channel

    def _barrier(self, x: Tensor) -> Barrier:
        """Return the barrier on the device of tokens; all ranks create it together."""
        key = Barrier, str(x.place)
        return self._buffers.find(key) or self._buffers.keep(key, Barrier(self._group, like_of(x)))

    def _row_trip(self, x: Tensor, plan: Plan, local: Plan, trip: _Trip, step: Step) -> _RowTrip:
        tokens = trip.channel
        if tokens.rows is None:
            tokens.rows = RowChannel(tokens, like_of(x), step)
        sizes = self._group.nranks, self._experts, tokens.rows_per_rank
        (own_to_buffer,) = direct("rank_rows", trip.ids, trip.token_rows, plan.row_to_slot, *sizes)
        places = own_to_buffer, local.row_to_slot.reshape([-1, 1])
        return _RowTrip(tokens.rows, trip.call, *places, trip.calls)
