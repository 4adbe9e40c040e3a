# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of tokens over the ranks that share the experts."""

from __future__ import annotations

import copy as copying
from collections.abc import Iterator, Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import GraphValue, beside, context_manager, public
from .._options import Combine, QuantizeFormat, TransportName
from ..backends import RouteSpec, resolve
from ..backends.autograd import wants_gradient
from ..backends.base import Validation
from ..routing import Plan, planned, route, row_probs
from .agreement import Kind, LayerCall, Mode, Step, agree, combine_step, group_of, number_of_layer
from .alltoall import (
    Counts,
    check_travel,
    chunks_of,
    counts_of_ranks,
    equal_parts,
    exchange,
    kept_ids,
    local_ids_of,
    local_plan,
    plan_of_ranks,
    rows_of_tokens,
    say_that_this_rank_raises,
    tokens_and_probs,
    trimmed,
)
from .deep_ep import DeepEP
from .peer import Peers
from .placement import Placement, Slots, as_option, placement_of
from .protocol import CheckedLines, LineTransport, TokenTransport, Transport, connected, transport_option
from .received import Received, WayBack, WayBackToPeers
from .symmetric_buffers import buffers_of
from .tokens import TokenExchange
from .transports import DEFAULT_TIMEOUT_S, Alone, transport_for

__all__ = ["ExpertParallel", "parallel_of_agreed", "telling_of_errors"]

_NAME = "ExpertParallel"
_DISPATCH = f"{_NAME}.dispatch"
_OF_TOKENS, _OF_ROWS = "the tokens of received", "the rows of received"


class ExpertParallel:
    """The exchange of tokens between the ranks of a group, each of which has some of the experts.

    `dispatch` sends each token once to every rank that has one of its experts; `combine` returns every token's weighted
    sum of expert outputs. Both are differentiable, and all ranks must call them, and their backward passes, in the same
    order. That includes a rank without tokens: its loss must depend on the result of `combine`. The backward pass runs
    once.

    Host synchronisation: each `dispatch` waits once, for the numbers of tokens that the others send. It does not wait
    with ``tokens_per_rank`` and `paddle.distributed.alltoall_single` or "peer".

    Args:
        num_experts: E, the experts of all ranks together.
        group: the ranks, a group of `paddle.distributed`; None: all ranks, or this process alone where
            `paddle.distributed` was not initialised.
        placement: the rank of each expert, a list of E ints: indices into the group. Ranks may have different numbers
            of experts, also none. Results do not depend on it, but for the rounding of ``combine="reduced"``. None:
            experts follow each other, E // P on each rank, and one more on the first E % P ranks.
        combine: "exact": ranks send back every row of their experts, and the owner of a token adds them up. The result
            and all gradients are bitwise those of one process with all experts, if the GEMMs are. "reduced": each rank
            adds up its rows of a token and sends back one sum. This sends less than P instead of K (P - 1) / P rows per
            token, each rounded to the dtype.
        payload: the format of tokens in `dispatch`: "fp8_1x128" or "fp8_1x128_ue8m0", float8 with a scale for each 128
            columns as in `quantize_1x128`, half the bytes; received tokens have their own dtype. Gradients are
            straight-through and sent unrounded. None: tokens are sent in their own dtype.
        tokens_per_rank: with ``combine="reduced"`` or ``transport="peer"``, the number of lines that each rank sends to
            each, lines without a token included. Sizes are then the same in every call and the host waits for no count.
            Tokens beyond this number are dropped, the last ones first, and counted in ``dropped_slots``. None: the
            number varies.
        transport: "alltoall": `paddle.distributed.alltoall_single`; "gloo": for CPU tensors; "auto": one of the two, by
            the group. "peer": ranks of one machine write to each other's memory, on GPUs over NVLink and without waits
            for the host. It needs the compiled operators, and ``tokens_per_rank``. Up to 256, ``combine="reduced"``
            without a payload is one launch each way on a GPU; otherwise the number is rounded up so that parts are
            whole pages. The layers of the group share its symmetric buffers: twice the maximum of received tokens
            for each width and dtype, and with ``combine="exact"`` twice K rows for each of these tokens; see `close`.
            "deepep": DeepEP, if Paddle's wheel has it, for bfloat16 with ``combine="reduced"`` and neither ``payload``
            nor ``tokens_per_rank``; not yet run on a GPU. A `LineTransport` or a `TokenTransport`: one of your own.
        timeout: seconds that a rank waits for the others before it raises a RuntimeError that names the absent ranks.
            With "alltoall" a rank waits only in `dispatch` without ``tokens_per_rank``; with "gloo" and "peer" in every
            exchange. On a GPU, "peer" waits in a kernel, which prints the rank and fails. DeepEP has its own limit. If
            a rank does not arrive, end the process: exchanges that have begun never finish.

    Attributes:
        group: the group.
        num_experts: E.
        placement: the rank of each expert, a tuple of E ints.
        local_experts: the experts of this rank, ascending; local expert i is ``local_experts[i]``.
        num_local_experts: their number.
        first_expert: the first of them, 0 if there are none. Without a placement they follow each other.
        combines: ``combine``.
        payload: ``payload``.
        tokens_per_rank: ``tokens_per_rank``.
        timeout: ``timeout``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument of the wrong value, or arguments that differ between ranks.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import moe_mlp
        >>> from paddle_moe_ops.expert_parallel import ExpertParallel
        >>> parallel = ExpertParallel(8, combine="reduced")  # with ranks: all of them, or group=group
        >>> ids, probs = paddle.randint(0, 8, [16, 1]), paddle.ones([16, 1])
        >>> received = parallel.dispatch(paddle.randn([16, 64]), ids, probs)
        >>> gate_up, down = paddle.randn([parallel.num_local_experts, 64, 96]), paddle.randn([8, 48, 64])
        >>> y = moe_mlp(received.tokens, received.plan, received.probs, gate_up, down)
        >>> parallel.combine(y, received).shape
        [16, 64]
    """

    def __init__(
        self,
        num_experts: int,
        group: Any = None,
        *,
        placement: Sequence[int] | None = None,
        combine: Combine = "exact",
        payload: QuantizeFormat = None,
        tokens_per_rank: int | None = None,
        transport: TransportName | Transport = "auto",
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        options: dict[str, Any] = {"placement": as_option(placement), "combine": combine, "payload": payload}
        options |= {"tokens_per_rank": tokens_per_rank}
        options |= {"transport": transport, "timeout": timeout}
        group = group_of(_NAME, group)
        # before any check that may fail on one rank, for which the others would wait
        agree(_NAME, group, {"num_experts": num_experts, **options, "transport": transport_option(transport)})
        self._begin(num_experts, group, **options)

    def _begin(
        self,
        num_experts: int,
        group: Group,
        *,
        placement: Any,
        combine: str,
        payload: str | None,
        tokens_per_rank: int | None,
        transport: str | Transport,
        timeout: float,
    ) -> None:
        self.group = group
        self.num_experts = _checks.integer(_NAME, "num_experts", num_experts, 1, _checks.MAX_EXPERTS)
        self.tokens_per_rank, self.timeout = check_travel(
            _NAME,
            tokens_per_rank=tokens_per_rank,
            timeout=timeout,
            combine=combine,
            payload=payload,
            transport=transport,
        )
        self.combines, self.payload = combine, payload
        self._given_transport = transport
        self._place(placement_of(_NAME, placement, self.num_experts, self.group.nranks))
        self._layer = number_of_layer(self.group, self._placement.slots_per_rank)
        self._calls, self._is_closed = 0, False
        self._unread: list[tuple[Step, Tensor]] | None = [] if self.tokens_per_rank is None else None

    def _place(self, placement: Placement) -> None:
        """Set the placement of experts, and connect the ranks for it; every rank calls it."""
        group, slots, given = self.group, placement.slots_per_rank, self._given_transport
        self._placement, self.placement = placement, placement.ranks
        self.local_experts = placement.experts[group.rank]
        self.num_local_experts = len(self.local_experts)
        self.first_expert = self.local_experts[0] if self.local_experts else 0
        self._slots = None if placement.is_even else Slots(placement)
        self._peers: Peers | TokenExchange | None = None
        self._transport: LineTransport = Alone()
        if group.nranks == 1:
            return
        name = given if isinstance(given, str) and given not in ("peer", "deepep") else "auto"
        self._transport = transport_for(name, group, self.timeout)
        if given == "peer" and self.tokens_per_rank is not None:
            self._peers = Peers(buffers_of(group), self.tokens_per_rank, slots, self.payload, self.timeout)
        own = DeepEP() if given == "deepep" else given
        if isinstance(own, TokenTransport):
            self._peers = TokenExchange(connected(own, group, placement.num_slots), slots)
        elif isinstance(own, LineTransport):
            self._transport = CheckedLines(connected(own, group, placement.num_slots))

    def _move(self, placement: Placement) -> None:
        """Set another placement; every rank calls it, between two steps."""
        self._layer.needs_room(placement.slots_per_rank)
        self._place(placement)

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

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        probs: Tensor,
        *,
        capacity: int | None = None,
        validate: bool | None = None,
        copy: bool = True,
    ) -> Received:
        """Send this rank's tokens to their experts, and receive the tokens for its own experts.

        Differentiable in ``x``, and with ``combine="reduced"`` in ``probs`` (otherwise `combine` is). Deterministic:
        tokens arrive in the order of ranks, and a rank's in its own order.

        Args:
            x: [T, d] bfloat16, float16 or float32; T may differ between ranks, and be 0.
            ids: int32 or int64 [T, K], experts of each token, -1 for none.
            probs: float32 [T, K].
            capacity: maximum of this rank's slots per expert; the others are dropped. None: no limit.
            validate: as in `route`. True also raises, on every rank, if a rank's tokens are not finite (without
                ``tokens_per_rank``, and not with a `TokenTransport`).
            copy: False: with ``transport="peer"`` and more than 256 ``tokens_per_rank`` under ``paddle.no_grad``,
                ``received.tokens`` is a view of memory that ranks share. Read it before the next dispatch, combine or
                backward pass of any layer of the group: from then on other ranks overwrite it, and a backward pass that
                would read it raises a RuntimeError. Rows without a token are then undefined, as with ``payload``. The
                argument is the same on all ranks, with gradients enabled or not.

        Returns:
            the received tokens, for the local experts and for `combine`.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong value or shape; bad data (see ``validate``); ``x`` requires a gradient
                on some ranks only (not checked with ``tokens_per_rank`` or a `TokenTransport`).
            RuntimeError: a rank did not arrive in time (see ``timeout``), or raised one of these errors (not reported
                with ``tokens_per_rank`` or a `TokenTransport`, as "deepep" is); this object was closed, or its group
                destroyed.
        """
        return _dispatch(x, ids, probs, self, capacity, validate, copy)

    def combine(self, out: Tensor, received: Received) -> Tensor:
        """Return the weighted sums of expert outputs of this rank's tokens.

        Differentiable in ``out``, and with ``combine="exact"`` in the ``probs`` of `dispatch`. Deterministic:
        sums are in float32 in the order of experts, rounded once; with "reduced" in the order of ranks, over parts that
        are rounded as well. No host synchronisation with "alltoall" and "peer".

        Args:
            out: with ``combine="exact"`` [N, d] in the order of ``received.rows``, not weighted; with "reduced" [R, d]
                in the order of ``received.tokens``, weighted sums, as `moe_mlp` returns them.
            received: the result of `dispatch`.

        Returns:
            [T, d].

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape.
            RuntimeError: a rank did not answer.
        """
        _checks.instance(f"{_NAME}.combine", "received", received, Received, "what dispatch returned")
        return _combine(out, received)

    def close(self) -> None:
        """Stop exchanging tokens, and free the memory that the ranks share once nothing else uses it.

        Other layers of the group go on. `combine` and backward passes of earlier dispatches work. The memory is freed
        with the last layer that is closed or deleted, and with the last graph, `Received` and view of it. If
        `paddle.distributed.destroy_process_group` ends the group, its layers raise in their next dispatch. The memory
        is freed then, or when another layer with "peer" or "deepep" is created.

        Not collective: ranks may close in any order. A second call does nothing. Host synchronisation: on a GPU, waits
        for its kernels where memory is freed. CUDA graphs of earlier calls must not be replayed after that.

        Examples:
            >>> from paddle_moe_ops.expert_parallel import ExpertParallel
            >>> parallel = ExpertParallel(8, combine="reduced", transport="peer", tokens_per_rank=16)
            >>> parallel.close()  # after the last backward pass, or before
        """
        self._peers, self._is_closed = None, True

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Return a layer with the same ranks and its own number; connections are not copied."""
        made = copying.copy(self)
        made._layer, made._calls = self._layer.of_copy(), 0
        made._unread = None if self._unread is None else []
        return made

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

    def __repr__(self) -> str:
        own = self._given_transport if isinstance(self._given_transport, Transport) else self._transport
        return (
            f"ExpertParallel({self.num_experts} experts on ranks {self.group.ranks}, combine={self.combines!r}, "
            f"{type(own).__name__}, layer {self._layer})"
        )


def parallel_of_agreed(num_experts: int, group: Group, **options: Any) -> ExpertParallel:
    """Create an `ExpertParallel` from arguments on which the ranks agree, without another exchange."""
    made = ExpertParallel.__new__(ExpertParallel)
    made._begin(num_experts, group, **options)
    return made


@context_manager
def telling_of_errors(ep: ExpertParallel) -> Iterator[None]:
    """Signal an error in the block to the ranks that wait for numbers of tokens, if any.

    Raises:
        RuntimeError: the layer was closed.
    """
    if ep._is_closed:
        raise RuntimeError(f"{_NAME}: close() was called, so this layer exchanges no more tokens; make a new one")
    try:
        yield
    except (TypeError, ValueError):
        if ep._peers is None and ep.tokens_per_rank is None and paddle.in_dynamic_mode():
            say_that_this_rank_raises(ep._transport, ep._step((0, 0, 0, True), Mode.RAISED))
        raise


@public("x", "probs")
def _dispatch(
    x: Tensor, ids: Tensor, probs: Tensor, ep: ExpertParallel, capacity: int | None, validate: bool | None, copy: bool
) -> Received:
    if ep._peers is not None:
        return _dispatch_to_peers(x, ids, probs, ep, ep._peers, capacity, validate, copy)
    with telling_of_errors(ep):
        _check_arguments(x, ids, probs, copy)
        plan = _plan(ids, probs, ep, capacity, validate)
    # without a capacity all ids are kept, and other values are sent to no rank; int64 may not fit
    kept = ids if capacity is None and ids.dtype == paddle.int32 else kept_ids(ids, plan)
    kept, step, slots = beside(kept, x), ep._dispatch_step(x, ids, probs), ep._placement.slots_per_rank
    if ep._slots is not None:
        kept = ep._slots.of_ids(kept)
    if ep.tokens_per_rank is not None:
        return _dispatch_equal_parts(x, probs, kept, plan, ep, step)
    of_slots = plan.tokens_per_expert if ep._slots is None else ep._slots.of_counts(plan.tokens_per_expert)
    to_ranks = plan_of_ranks(kept, ep.group.nranks, slots, None)
    tokens, rows, of_experts = counts_of_ranks(x, of_slots, to_ranks, ep._transport, ep.payload, step, validate)
    ep._calls += 1
    to_ranks = trimmed(to_ranks, sum(tokens.sent))
    sent_ids = local_ids_of(kept, to_ranks, slots, has_gaps=False)
    arrived_ids = beside(ep._transport.exchange(sent_ids, tokens.sent, tokens.received, step), x)
    local = ep._plan_of_received(local_plan(arrived_ids, slots, sum(rows.sent)))
    of_experts = of_experts[:, : ep.num_local_experts]
    common: dict[str, Any] = {
        "plan": local,
        "tokens_per_expert": of_experts.sum(axis=0).tolist(),
        "routed_per_expert": plan.routed_per_expert,
        "dropped_slots": plan.overflow,
    }
    if ep.combines == "reduced":
        return _received_tokens(x, probs, to_ranks, tokens, ep, step, common)
    chunks, plan = chunks_of(of_experts, like=x), trimmed(plan, sum(rows.received))
    if ep._slots is not None:
        plan = ep._slots.by_rank(plan)
    made = rows_of_tokens(x, plan, to_ranks, tokens, local, chunks, rows, step)
    back = WayBack(rows, chunks, plan, row_probs(probs, plan), step.call)
    return Received(rows=made, tokens=None, probs=None, _way_back=back, **common)


def _check_arguments(x: Tensor, ids: Tensor, probs: Tensor, copy: bool) -> None:
    """Check the arguments of `dispatch`."""
    _checks.flag(_DISPATCH, "copy", copy)
    _checks.rows(_DISPATCH, "x", x, _checks.SUM_DTYPES, "num_tokens")
    if isinstance(x, GraphValue):
        _checks.bad_value(_DISPATCH, "x", "a tensor; exchanges run in dygraph only", "a value of a static graph")
    _checks.tensor(_DISPATCH, "ids", ids, _checks.ID_DTYPES, [x.shape[0], "topk"])
    _checks.tensor(_DISPATCH, "probs", probs, (paddle.float32,), ids.shape)
    _checks.same_place(_DISPATCH, x=x, ids=ids, probs=probs)


def _plan(ids: Tensor, probs: Tensor, ep: ExpertParallel, capacity: int | None, validate: bool | None) -> Plan:
    """Return the plan of this rank's tokens over all experts; ids and probs are checked."""
    slots = ids.shape[0] * ids.shape[1]
    to_check = probs.detach() if validate is True else None
    try:
        if capacity is not None or not 0 < slots < 2**31:
            options: dict[str, Any] = {"buffer_size": slots, "capacity": capacity, "validate": validate}
            return route(ids, to_check, num_experts=ep.num_experts, **options)
        validation = _checks.validation("route", validate, ids)
        spec = RouteSpec(ep.num_experts, -1, 1, None, slots, "first", validation)
        return planned(ids, to_check, None, None, spec)
    except (TypeError, ValueError) as error:
        raise _checks.renamed(error, "route", _DISPATCH, routing="ids") from None


def _dispatch_equal_parts(
    x: Tensor, probs: Tensor, ids: Tensor, plan: Plan, ep: ExpertParallel, step: Step
) -> Received:
    """Send the same number of lines to every rank, some without a token, so that the host waits for no count."""
    equal, slots = [ep.tokens_per_rank or 0] * ep.group.nranks, ep._placement.slots_per_rank
    tokens = Counts(ep._transport, equal, equal, ep.payload)
    parts = equal_parts(ids, probs, ep.group.nranks, slots, ep.tokens_per_rank or 0, like=x)
    arrived_ids = beside(ep._transport.exchange(parts.ids, equal, equal, step), x)
    ep._calls += 1
    most = arrived_ids.shape[0] * min(arrived_ids.shape[1], slots)
    local = ep._plan_of_received(local_plan(arrived_ids, slots, most))
    common: dict[str, Any] = {
        "plan": local,
        "tokens_per_expert": local.tokens_per_expert,
        "routed_per_expert": plan.routed_per_expert,
        "dropped_slots": plan.overflow + parts.dropped,
    }
    return _received_tokens(x, probs, parts.to_ranks, tokens, ep, step, common)


def _dispatch_to_peers(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    ep: ExpertParallel,
    peers: Peers | TokenExchange,
    capacity: int | None,
    validate: bool | None,
    copy: bool,
) -> Received:
    """Write tokens to the ranks of their experts; with `Peers` sizes are the same in every call."""
    _check_arguments(x, ids, probs, copy)
    step = ep._dispatch_step(x, ids, probs, copy)
    if isinstance(peers, Peers) and ep.combines == "reduced" and capacity is None:
        if ids.shape[1] == 0 or _checks.validation(_DISPATCH, validate, ids) is not Validation.OFF:
            _plan(ids, probs, ep, capacity, validate)  # raises the error
        slots = ids if ep._slots is None else ep._slots.of_ids(ids)
        got = peers.dispatch(x, slots, probs, step)
        ep._calls += 1
        routed = got.routed if ep._slots is None else ep._slots.counts_of_experts(got.routed)
        return _tokens_of_peers(got, peers, ep, routed, got.dropped)
    plan = _plan(ids, probs, ep, capacity, validate)
    if capacity is not None:
        ids = kept_ids(ids, plan)
    if ep._slots is not None:
        ids = ep._slots.of_ids(ids)
    if isinstance(peers, TokenExchange) or ep.combines == "reduced":
        arrived = peers.dispatch(x, ids, probs, step)
        ep._calls += 1
        dropped = arrived.dropped if capacity is None else plan.overflow + arrived.dropped
        return _tokens_of_peers(arrived, peers, ep, plan.routed_per_expert, dropped)
    made = peers.dispatch_rows(x, ids, probs, plan, step)
    ep._calls += 1
    local = ep._plan_of_received(made.plan)
    return Received(
        plan=local,
        rows=made.rows,
        tokens=None,
        probs=None,
        tokens_per_expert=local.tokens_per_expert,
        routed_per_expert=plan.routed_per_expert,
        dropped_slots=made.dropped if capacity is None else plan.overflow + made.dropped,
        _way_back=WayBackToPeers(peers, made.trip, local.num_rows, plan, row_probs(probs, plan)),
    )


def _tokens_of_peers(
    got: Any, peers: Peers | TokenExchange, ep: ExpertParallel, routed: Tensor, dropped: Tensor
) -> Received:
    """Return received tokens with ``combine="reduced"``."""
    local = ep._plan_of_received(got.plan)
    return Received(
        plan=local,
        rows=None,
        tokens=got.tokens,
        probs=got.probs,
        tokens_per_expert=local.tokens_per_expert,
        routed_per_expert=routed,
        dropped_slots=dropped,
        _way_back=WayBackToPeers(peers, got.trip, local.num_tokens, None, None),
    )


def _received_tokens(
    x: Tensor, probs: Tensor, to_ranks: Plan, tokens: Counts, ep: ExpertParallel, step: Step, common: dict[str, Any]
) -> Received:
    arrived, their_probs = tokens_and_probs(x, probs, to_ranks, tokens, step)
    back = WayBack(Counts(ep._transport, tokens.received, tokens.sent), None, to_ranks, None, step.call)
    return Received(rows=None, tokens=arrived, probs=their_probs, _way_back=back, **common)


@public("out")
def _combine(out: Tensor, received: Received) -> Tensor:
    name, back = f"{_NAME}.combine", received._way_back
    if isinstance(back, WayBackToPeers):
        what = _OF_TOKENS if back.plan is None else _OF_ROWS
        _checks.rows(name, "out", out, _checks.SUM_DTYPES, back.num_lines, f", {what}")
        if back.plan is None or isinstance(back.peers, TokenExchange):
            return back.peers.combine(out, back.trip)
        rows = back.peers.combine_rows(out, back.trip)
    else:
        what = _OF_ROWS if back.chunks is not None else _OF_TOKENS
        _checks.rows(name, "out", out, _checks.SUM_DTYPES, sum(back.counts.sent), f", {what}")
        travelling = out if back.chunks is None else back.chunks.by_rank(out)
        rows = exchange(travelling, back.counts, combine_step(back.call, out))
    return resolve("unpermute", rows).unpermute(rows, back.weights, back.plan)
