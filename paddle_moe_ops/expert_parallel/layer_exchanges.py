# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The exchanges of a layer's dispatch over each kind of transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import beside
from ..backends import RouteSpec
from ..backends.autograd import wants_gradient
from ..backends.base import Tensors, Validation
from ..routing import Plan, planned, route, row_probs
from .agreement import Kind, LayerCall, LayerNumber, Mode, Step
from .alltoall import (
    Counts,
    chunks_of,
    counts_of_ranks,
    equal_parts,
    kept_ids,
    lines_of_ranks,
    local_ids_of,
    local_plan,
    plan_of_ranks,
    rows_of_tokens,
    tokens_exchange,
    trimmed,
)
from .exchanges import Exchange
from .peer import Peers
from .placement import Placement, Slots
from .protocol import LineTransport, overlaps
from .received import Received, WayBack, WayBackToPeers
from .tokens import TokenExchange

__all__ = ["DISPATCH", "LayerExchanges"]

DISPATCH = "ExpertParallel.dispatch"
_Way = tuple[Exchange, Tensors, Callable[..., Received]]  # an exchange, the tensors to send, the function of the result


class LayerExchanges:
    """The state of an `ExpertParallel`, and its exchanges in dispatch."""

    group: Group
    num_experts: int
    num_local_experts: int
    combines: str
    payload: str | None
    tokens_per_rank: int | None
    _calls: int
    _layer: LayerNumber
    _peers: Peers | TokenExchange | None
    _placement: Placement
    _slots: Slots | None
    _transport: LineTransport
    _unread: list[tuple[Step, Tensor]] | None

    def _plan_of_received(self, plan: Plan) -> Plan:
        """Return a plan of received tokens over this rank's slots as one over its experts."""
        count = self.num_local_experts
        if plan.num_experts == count:
            return plan
        return plan._replace(
            tokens_per_expert=plan.tokens_per_expert[:count],
            expert_offsets=plan.expert_offsets[: count + 1],
            routed_per_expert=plan.routed_per_expert[:count],
            num_experts=count,
        )

    def _dispatch_step(self, x: Tensor, ids: Tensor, probs: Tensor, copies: bool = True) -> Step:
        """Return the step of the next dispatch."""
        form = x.shape[1], ids.shape[1], _checks.SUM_DTYPES.index(x.dtype)
        mode = Mode.COMBINE_BACKWARD if paddle.is_grad_enabled() else Mode.NONE
        if wants_gradient(x) or (self.combines == "reduced" and wants_gradient(probs)):
            mode |= Mode.DISPATCH_BACKWARD
        return self._step((*form, copies), mode)

    def _step(self, form: tuple[int, int, int, bool], mode: Mode) -> Step:
        call = LayerCall(self.group.ranks, self._layer, self._calls, *form, modes={}, unread=self._unread)
        return Step(call, Kind.DISPATCH, mode)

    def _overlaps(self, x: Tensor) -> bool:
        """Return whether exchanges of tokens in flight overlap other work on their device."""
        if self._peers is None:
            return overlaps(self._transport)
        return isinstance(self._peers, Peers) and not x.place.is_cpu_place()

    def _plan(self, ids: Tensor, probs: Tensor, capacity: int | None, validate: bool | None) -> Plan:
        """Return the plan of this rank's tokens over all experts; ids and probs are checked."""
        slots = ids.shape[0] * ids.shape[1]
        to_check = probs.detach() if validate is True else None
        try:
            if capacity is not None or not 0 < slots < 2**31:
                options: dict[str, Any] = {"buffer_size": slots, "capacity": capacity, "validate": validate}
                return route(ids, to_check, num_experts=self.num_experts, **options)
            validation = _checks.validation("route", validate, ids)
            spec = RouteSpec(self.num_experts, -1, 1, None, slots, "first", validation)
            return planned(ids, to_check, None, None, spec)
        except (TypeError, ValueError) as error:
            raise _checks.renamed(error, "route", DISPATCH, routing="ids") from None

    def _way_over_lines(
        self, x: Tensor, ids: Tensor, probs: Tensor, plan: Plan, capacity: int | None, validate: bool | None
    ) -> _Way:
        """Exchange numbers and ids, and return the exchange of tokens by a transport of lines."""
        # without a capacity all ids are kept, and other values are sent to no rank; int64 may not fit
        kept = ids if capacity is None and ids.dtype == paddle.int32 else kept_ids(ids, plan)
        kept, step, slots = beside(kept, x), self._dispatch_step(x, ids, probs), self._placement.slots_per_rank
        if self._slots is not None:
            kept = self._slots.of_ids(kept)
        if self.tokens_per_rank is not None:
            return self._way_of_equal_parts(x, probs, kept, plan, step, self.tokens_per_rank)
        of_slots = plan.tokens_per_expert if self._slots is None else self._slots.of_counts(plan.tokens_per_expert)
        to_ranks = plan_of_ranks(kept, self.group.nranks, slots, None)
        given = to_ranks, self._transport, self.payload
        tokens, rows, of_experts = counts_of_ranks(x, of_slots, *given, step, validate)
        self._calls += 1
        to_ranks = trimmed(to_ranks, sum(tokens.sent))
        sent_ids = local_ids_of(kept, to_ranks, slots, has_gaps=False)
        arrived_ids = beside(self._transport.exchange(sent_ids, tokens.sent, tokens.received, step), x)
        local = self._plan_of_received(local_plan(arrived_ids, slots, sum(rows.sent)))
        of_experts = of_experts[:, : self.num_local_experts]
        common: dict[str, Any] = {
            "plan": local,
            "tokens_per_expert": of_experts.sum(axis=0).tolist(),
            "routed_per_expert": plan.routed_per_expert,
            "dropped_slots": plan.overflow,
        }
        if self.combines == "reduced":
            return self._way_of_tokens(x, probs, to_ranks, tokens, step, common)
        chunks, plan = chunks_of(of_experts, like=x), trimmed(plan, sum(rows.received))
        if self._slots is not None:
            plan = self._slots.by_rank(plan)
        exchange = rows_of_tokens(x.dtype, plan, to_ranks, tokens, local, chunks, rows, step)
        back = WayBack(rows, chunks, plan, row_probs(probs, plan), step.call)

        def received(made: Tensor) -> Received:
            return Received(rows=made, tokens=None, probs=None, _way_back=back, **common)

        return exchange, (x,), received

    def _way_of_equal_parts(
        self, x: Tensor, probs: Tensor, ids: Tensor, plan: Plan, step: Step, lines_per_rank: int
    ) -> _Way:
        """Send the same number of lines to every rank, some without a token, so that the host waits for no count."""
        equal, slots = [lines_per_rank] * self.group.nranks, self._placement.slots_per_rank
        tokens = Counts(self._transport, equal, equal, self.payload)
        parts = equal_parts(ids, probs, self.group.nranks, slots, lines_per_rank, like=x)
        arrived_ids = beside(self._transport.exchange(parts.ids, equal, equal, step), x)
        self._calls += 1
        most = arrived_ids.shape[0] * min(arrived_ids.shape[1], slots)
        local = self._plan_of_received(local_plan(arrived_ids, slots, most))
        common: dict[str, Any] = {
            "plan": local,
            "tokens_per_expert": local.tokens_per_expert,
            "routed_per_expert": plan.routed_per_expert,
            "dropped_slots": plan.overflow + parts.dropped,
        }
        return self._way_of_tokens(x, probs, parts.to_ranks, tokens, step, common)

    def _way_of_tokens(
        self, x: Tensor, probs: Tensor, to_ranks: Plan, tokens: Counts, step: Step, common: dict[str, Any]
    ) -> _Way:
        """Return the exchange of tokens and probabilities by a plan over ranks."""
        back = WayBack(Counts(self._transport, tokens.received, tokens.sent), None, to_ranks, None, step.call)

        def received(arrived: Tensor, their_probs: Tensor) -> Received:
            return Received(rows=None, tokens=arrived, probs=their_probs, _way_back=back, **common)

        return tokens_exchange(tokens, step, x.dtype), lines_of_ranks(x, probs, to_ranks), received

    def _way_to_peers(
        self,
        x: Tensor,
        ids: Tensor,
        probs: Tensor,
        peers: Peers | TokenExchange,
        capacity: int | None,
        validate: bool | None,
        copy: bool,
    ) -> _Way:
        """Return the exchange with the ranks of experts; with `Peers` sizes are the same in every call."""
        step, plan = self._dispatch_step(x, ids, probs, copy), None
        needs_plan = isinstance(peers, TokenExchange) or self.combines == "exact" or capacity is not None
        if needs_plan or ids.shape[1] == 0 or _checks.validation(DISPATCH, validate, ids) is not Validation.OFF:
            plan = self._plan(ids, probs, capacity, validate)  # raises an error for bad ids
        if plan is not None and capacity is not None:
            ids = kept_ids(ids, plan)
        if self._slots is not None:
            ids = self._slots.of_ids(ids)
        values: Tensors = (x, probs)
        arrived: Callable[[], Any]
        plan_back = weights = None
        if plan is not None and isinstance(peers, Peers) and self.combines == "exact":
            exchange, arrived = peers.dispatch_rows(x, ids, probs, plan, step)
            values, plan_back, weights = (x,), plan, row_probs(probs, plan)
        else:
            exchange, arrived = peers.dispatch(x, ids, step)

        def received(first: Tensor, their_probs: Tensor | None = None) -> Received:
            made: Any = arrived()
            is_exact = plan_back is not None
            local = self._plan_of_received(made.plan)
            routed = made.routed if plan is None else plan.routed_per_expert
            if plan is None and self._slots is not None:
                routed = self._slots.counts_of_experts(routed)
            return Received(
                plan=local,
                rows=first if is_exact else None,
                tokens=None if is_exact else first,
                probs=their_probs,
                tokens_per_expert=local.tokens_per_expert,
                routed_per_expert=routed,
                dropped_slots=made.dropped if plan is None or capacity is None else plan.overflow + made.dropped,
                _way_back=WayBackToPeers(
                    peers, made.trip, local.num_rows if is_exact else local.num_tokens, plan_back, weights
                ),
            )

        return exchange, values, received
