# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine between ranks of one machine that write to each other's memory.

A rank writes its tokens directly to the ranks of their experts, in the order of the plan, and the results for others'
tokens back to their owners. There is no separate gather and no wait on the host. Symmetric buffers for tokens and rows
are allocated in pairs, which exchanges use alternately: see `Barrier`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import dense
from .._quick import AMAX_MIN
from ..backends import direct, resolve
from ..backends.base import Tensors
from ..routing import Plan, plan_of
from .agreement import Kind, LayerCall, Step, backward_step, combine_step
from .channels import DISPATCH, RowChannel, TokenChannel, TokenSlot, like_of
from .exchanges import AtOnce, End, Exchange, Leg, Then
from .symmetric_buffers import Barrier, GroupBuffers, OwnRows

__all__ = ["Peers"]

_COMBINE = "ExpertParallel.combine"


class ArrivedTokens(NamedTuple):
    """The R tokens that a rank received, some rows without a token, apart from the tokens and probabilities themselves.

    Attributes:
        plan: the local plan of the R tokens.
        dropped: 0-D int32, slots of this rank's tokens that exceeded S.
        routed: int32 [E], this rank's tokens that chose each expert.
        trip: the argument of `Peers.combine`.
    """

    plan: Plan
    dropped: Tensor
    routed: Tensor
    trip: _Trip


class ArrivedRows(NamedTuple):
    """The rows that a rank received for its experts, apart from the rows themselves.

    Attributes:
        plan: the local plan of the R tokens.
        dropped: as above.
        trip: the argument of `Peers.combine_rows`.
    """

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

    def leg(
        self,
        step: Step,
        calls: list[Tensor],
        forward_calls: Tensor | None = None,
        *,
        to_owners: bool,
    ) -> PeerLeg:
        """Return the leg that sends local rows to the owners of their tokens, or rows of the owner's plan to experts.

        Args:
            step: the pass.
            calls: the list to which the calls of all ranks are appended.
            forward_calls: in a backward pass, the calls of all ranks in the forward pass.
            to_owners: the direction.
        """
        sent, received = self.own_to_buffer, self.local_to_buffer
        if to_owners:
            sent, received = received, sent
        channel = self.channel

        def run(rows: Tensor) -> Tensors:
            buffer = channel.buffer()
            buffer.send(rows, sent, OwnRows.TO_BUFFER)
            calls.append(channel.wait(step, forward_calls))
            return (buffer.receive(received, own=buffer.arrived),)

        return PeerLeg(run, channel, [self, calls, forward_calls])


class PeerLeg(NamedTuple):
    """A leg whose operators all run on one stream.

    Attributes:
        run: enqueues the operators.
        channel: of the exchange.
        memory: objects that the operators use; ``run`` may append others.
    """

    run: Callable[..., Tensors]
    channel: TokenChannel | RowChannel
    memory: list[Any]

    def start(self, *values: Tensor) -> End:
        given = [dense(each) for each in values]  # copies that an operator made would be freed on its return
        return self.channel.begin(lambda _: self.run(*given), given, self.memory)


class _Planned(NamedTuple):
    """The plan of a dispatch over ranks, whose records are at the ranks of the experts."""

    slot: TokenSlot
    token_rows: Tensor
    dropped: Tensor
    routed: Tensor
    row_to_token: list[Tensor]


class _DispatchLeg(NamedTuple):
    """The leg that sends tokens to the ranks of their experts, and receives those of others.

    Ids and probabilities arrive first, and are routed during the transfer of the tokens. The choice of fetched rows
    depends on the call, never on gradients, since both ranks of a pair write to the same region.

    Attributes:
        channel: of the tokens.
        ids: [T, K].
        step: the dispatch.
        stay: whether received tokens may stay in the buffer.
        found: contains the rest of what arrives, once the operators are enqueued.
    """

    channel: TokenChannel
    ids: Tensor
    step: Step
    stay: bool
    found: list[ArrivedTokens]

    def run(self, x: Tensor, probs: Tensor) -> Tensors:
        return self._move(x, self._plan(probs), [])

    def start(self, x: Tensor, probs: Tensor) -> End:
        x, planned = dense(x), self._plan(probs)  # which frees temporary memory, so it runs on the current stream
        return self.channel.begin(lambda used: self._move(x, planned, used), x, planned)

    def _plan(self, probs: Tensor) -> _Planned:
        channel = self.channel
        slot, sizes = channel.slot(), (channel.experts_per_rank, channel.rows_per_rank, channel.capacity)
        given = self.ids, probs, slot.beside_of_peers
        token_rows, dropped, routed, *row_to_token = direct("rank_plan", *given, *sizes, channel.float8 is not None)
        return _Planned(slot, token_rows, dropped, routed, row_to_token)

    def _move(self, x: Tensor, planned: _Planned, used: list[Any]) -> Tensors:
        """Enqueue the operators after the plan, and append objects that they use to a list."""
        channel, (slot, token_rows, dropped, routed, row_to_token) = self.channel, planned
        step, ue8m0 = self.step, channel.float8 == _checks.UE8M0
        try:
            arrivals = channel.arrivals(slot.beside, step)
            used.append(arrivals)
            if channel.float8 is not None:
                (scales,) = direct("rank_quantize", x, token_rows, *row_to_token, slot.codes_of_peers, ue8m0, AMAX_MIN)
                direct("rank_put", scales, slot.scales_of_peers, channel.rows_per_rank)
                used.append(scales)
            elif step.call.copies:
                tokens = slot.rows.send(x, token_rows, OwnRows.TO_NEW_MEMORY, leaves_room=True)
            else:
                tokens = slot.rows.send(x, token_rows, OwnRows.TO_BUFFER, fetched=0, leaves_room=True)
            direct("rank_join", channel.state, False)
            used.append(channel.wait(step))
            if channel.float8 is not None:
                (scales,) = direct("rank_take", slot.scales, channel.rows_per_rank, channel.scale_columns, ue8m0)
                used.append(scales)
                (tokens,) = direct("dequantize_1x128", slot.codes, scales, False, x.dtype.value)
            elif step.call.copies:
                tokens = slot.rows.receive(arrivals.rows, to=tokens)
            elif not self.stay:
                tokens = slot.rows.receive(arrivals.rows, own=tokens, fetched=0)
        finally:
            direct("rank_join", channel.state, True)
        trip = _Trip(channel, step.call, self.ids, token_rows, arrivals.rows, arrivals.calls)
        self.found.append(ArrivedTokens(arrivals.plan, dropped, routed, trip))
        return tokens, arrivals.probs


def _few_tokens_leg(channel: TokenChannel, ids: Tensor, step: Step, found: list[ArrivedTokens]) -> AtOnce:
    """Return the leg of `_DispatchLeg` for few tokens: one operator, which frees temporary memory."""

    def run(x: Tensor, probs: Tensor) -> Tensors:
        slot, sizes = channel.slot(), (channel.experts_per_rank, channel.capacity)
        beside = slot.beside, slot.beside_of_peers
        calls, *made = channel.exchange("rank_dispatch", step, (x, ids, probs), slot.rows, beside, *sizes)
        if x.place.is_cpu_place():
            # A rank that has missed a dispatch meets the others' next one here, and all raise. GPUs cannot go on.
            channel.wait(step)
        tokens, their_ids, their_probs, rows, token_rows, dropped, routed, *maps = made
        plan = plan_of(maps, their_ids.shape[0], channel.topk, channel.experts_per_rank)
        found.append(ArrivedTokens(plan, dropped, routed, _Trip(channel, step.call, ids, token_rows, rows, calls)))
        return tokens, their_probs

    return AtOnce(run)


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

    def dispatch(self, x: Tensor, ids: Tensor, step: Step) -> tuple[Exchange, Callable[[], ArrivedTokens]]:
        """Return the exchange of tokens and probabilities, and the function that returns the rest of what arrives.

        Args:
            x: [T, d].
            ids: [T, K], -1 for slots that do not count.
            step: the dispatch.
        """
        channel, found = self._tokens(x, ids, step), list[ArrivedTokens]()
        stay = not paddle.is_grad_enabled()  # otherwise the experts' backward pass may read them

        def back() -> PeerLeg:
            back_step, trip = backward_step(step.call, Kind.DISPATCH_BACKWARD), found[0].trip
            used: list[Any] = [trip]

            def run(d_tokens: Tensor, d_probs: Tensor) -> Tensors:
                slot = channel.slot()
                slot.rows.send(d_tokens, trip.arrived, OwnRows.STAY)
                direct("rank_put", d_probs, slot.beside_of_peers, channel.lines)
                used.append(channel.wait(back_step, trip.calls))
                d_x = slot.rows.receive(trip.token_rows, own=d_tokens, own_rows=channel.lines)
                sizes = channel.experts_per_rank, channel.rows_per_rank
                (made,) = direct("rank_get", slot.beside, trip.ids, trip.token_rows, channel.state, *sizes)
                return d_x, made

            return PeerLeg(run, channel, used)

        there: Leg = _DispatchLeg(channel, ids, step, stay, found)
        if channel.is_few:
            there = _few_tokens_leg(channel, ids, step, found)
        return Exchange(DISPATCH, there, back, is_linear=False, read=(ids,)), lambda: found[0]

    def dispatch_rows(
        self, x: Tensor, ids: Tensor, probs: Tensor, plan: Plan, step: Step
    ) -> tuple[Exchange, Callable[[], ArrivedRows]]:
        """Return the exchange of tokens for rows of experts, and the function that returns the rest of what arrives.

        The backward pass sends every row's gradient, so that a token's gradient is one sum over its rows.

        Args:
            x: [T, d].
            ids: [T, K], -1 for slots that do not count.
            probs: float32 [T, K], sent as well, but unused by the receiver.
            plan: of the T tokens over all experts.
            step: the dispatch.
        """
        channel, found = self._tokens(x, ids, step), list[ArrivedRows]()
        if channel.rows is None:
            channel.rows = RowChannel(channel, like_of(x), step)
        buffers, leg = channel.rows, _DispatchLeg(channel, ids, step, True, [])

        def permuted(tokens: Tensor, _: Tensor) -> Tensors:
            sent = leg.found[0]
            rows = resolve("permute", tokens).permute(tokens, None, sent.plan, "all")[0]
            found.append(ArrivedRows(sent.plan, sent.dropped, self._row_trip(buffers, plan, sent.plan, sent.trip)))
            return (rows,)

        def back() -> Then:
            back_step, trip = backward_step(step.call, Kind.DISPATCH_BACKWARD), found[0].trip
            return Then(trip.leg(back_step, [], trip.calls, to_owners=True), summed)

        def summed(rows: Tensor) -> Tensors:
            return (resolve("unpermute", rows).unpermute(rows, None, plan),)

        def again() -> AtOnce:
            back_step, trip = backward_step(step.call, Kind.DISPATCH_BACKWARD), found[0].trip
            return AtOnce(lambda x: trip.leg(back_step, [], trip.calls, to_owners=False).run(*rows_of(x)))

        def rows_of(x: Tensor) -> Tensors:
            return resolve("permute", x).permute(x, None, plan, "all")[:1]

        return Exchange(DISPATCH, Then(leg, permuted, (probs,)), back, again), lambda: found[0]

    def combine(self, out: Tensor, trip: _Trip | _RowTrip) -> Exchange:
        """Return the exchange of rows in combine.

        Args:
            out: from `dispatch` [R, d], in the order of the received tokens, for the sums of each token's rows. From
                `dispatch_rows` [N, d], in the order of the local plan, for the rows in the owner's order.
            trip: from either.
        """
        return _combine_rows(out, trip) if isinstance(trip, _RowTrip) else _combine(out, trip)

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

    def _row_trip(self, buffers: RowChannel, plan: Plan, local: Plan, trip: _Trip) -> _RowTrip:
        sizes = self._group.nranks, self._experts, trip.channel.rows_per_rank
        (own_to_buffer,) = direct("rank_rows", trip.ids, trip.token_rows, plan.row_to_slot, *sizes)
        places = own_to_buffer, local.row_to_slot.reshape([-1, 1])
        return _RowTrip(buffers, trip.call, *places, trip.calls)


def _combine(out: Tensor, trip: _Trip) -> Exchange:
    """Return the exchange of rows for the sums of each token's rows."""
    step, channel, calls = combine_step(trip.call, out), trip.channel, list[Tensor]()

    def run(out: Tensor) -> Tensors:
        rows = channel.slot().rows
        if channel.is_few:
            of_ranks, sums = channel.exchange("rank_combine", step, (out, trip.arrived, trip.token_rows), rows, ())
            calls.append(of_ranks)
            return (sums,)
        rows.send(out, trip.arrived, OwnRows.STAY)
        calls.append(channel.wait(step))
        return (rows.receive(trip.token_rows, own=out),)

    def back() -> PeerLeg:
        back_step = backward_step(step.call, Kind.COMBINE_BACKWARD)
        used: list[Any] = [trip, calls]

        def run(gradient: Tensor) -> Tensors:
            rows = channel.slot().rows
            tokens = rows.send(gradient, trip.token_rows, OwnRows.TO_NEW_MEMORY, own_rows=channel.lines)
            used.append(channel.wait(back_step, calls[0]))
            return (rows.receive(trip.arrived, to=tokens),)

        return PeerLeg(run, channel, used)

    return Exchange(_COMBINE, PeerLeg(run, channel, [trip, calls]), back)


def _combine_rows(out: Tensor, trip: _RowTrip) -> Exchange:
    """Return the exchange of rows for those in the owner's order."""
    step, calls = combine_step(trip.call, out), list[Tensor]()

    def back() -> PeerLeg:
        back_step = backward_step(step.call, Kind.COMBINE_BACKWARD)
        return trip.leg(back_step, [], calls[0], to_owners=False)

    return Exchange(_COMBINE, trip.leg(step, calls, to_owners=True), back)
