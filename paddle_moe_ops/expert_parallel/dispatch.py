# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of tokens over the ranks that share the experts."""

from __future__ import annotations

import copy as copying
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import GraphValue, context_manager, public
from .._options import Combine, QuantizeFormat, TransportName
from .agreement import Mode, Step, agree, combine_step, group_of, number_of_layer
from .alltoall import check_travel, rows_exchange, say_that_this_rank_raises
from .deep_ep import DeepEP
from .exchanges import ExchangeHandle, Flight, exchanged
from .layer_exchanges import DISPATCH, LayerExchanges
from .peer import Peers
from .placement import Placement, Slots, as_option, placement_of
from .protocol import CheckedLines, LineTransport, TokenTransport, Transport, connected, transport_option
from .received import Received, WayBackToPeers
from .symmetric_buffers import buffers_of
from .tokens import TokenExchange
from .transports import DEFAULT_TIMEOUT_S, Alone, transport_for

__all__ = ["ExpertParallel", "parallel_of_agreed", "telling_of_errors"]

_NAME = "ExpertParallel"
_OF_TOKENS, _OF_ROWS = "the tokens of received", "the rows of received"


class ExpertParallel(LayerExchanges):
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
        self._peers = None
        self._transport = Alone()
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

    @overload
    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        probs: Tensor,
        *,
        capacity: int | None = ...,
        validate: bool | None = ...,
        copy: bool = ...,
        async_op: Literal[False] = ...,
    ) -> Received: ...
    @overload
    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        probs: Tensor,
        *,
        capacity: int | None = ...,
        validate: bool | None = ...,
        copy: bool = ...,
        async_op: Literal[True],
    ) -> ExchangeHandle[Received]: ...
    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        probs: Tensor,
        *,
        capacity: int | None = None,
        validate: bool | None = None,
        copy: bool = True,
        async_op: bool = False,
    ) -> Received | ExchangeHandle[Received]:
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
            async_op: True: return when the exchange has begun, so that later work overlaps it. Not with ``copy=False``.

        Returns:
            the received tokens, for the local experts and for `combine`; with ``async_op`` a handle, whose ``wait()``
            returns them.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong value or shape; bad data (see ``validate``).
            RuntimeError: a rank did not arrive in time (see ``timeout``), or raised one of these errors (not reported
                with ``tokens_per_rank`` or a `TokenTransport`, as "deepep" is); this object was closed, or its group
                destroyed.
        """
        return _dispatch(x, ids, probs, self, capacity, validate, copy, async_op)

    @overload
    def combine(self, out: Tensor, received: Received, *, async_op: Literal[False] = ...) -> Tensor: ...
    @overload
    def combine(self, out: Tensor, received: Received, *, async_op: Literal[True]) -> ExchangeHandle[Tensor]: ...
    def combine(self, out: Tensor, received: Received, *, async_op: bool = False) -> Tensor | ExchangeHandle[Tensor]:
        """Return the weighted sums of expert outputs of this rank's tokens.

        Differentiable in ``out``, and with ``combine="exact"`` in the ``probs`` of `dispatch`. Deterministic:
        sums are in float32 in the order of experts, rounded once; with "reduced" in the order of ranks, over parts that
        are rounded as well. No host synchronisation with "alltoall" and "peer".

        Args:
            out: with ``combine="exact"`` [N, d] in the order of ``received.rows``, not weighted; with "reduced" [R, d]
                in the order of ``received.tokens``, weighted sums, as `moe_mlp` returns them.
            received: the result of `dispatch`.
            async_op: True: return when the exchange has begun, so that later work overlaps it.

        Returns:
            [T, d]; with ``async_op`` a handle, whose ``wait()`` returns it.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape.
            RuntimeError: a rank did not answer.
        """
        _checks.instance(f"{_NAME}.combine", "received", received, Received, "what dispatch returned")
        return _combine(out, received, async_op)

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


@public("x", "probs", owner=DISPATCH)
def _dispatch(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    ep: ExpertParallel,
    capacity: int | None,
    validate: bool | None,
    copy: bool,
    async_op: bool,
) -> Any:
    if ep._peers is not None:
        _check_arguments(x, ids, probs, copy, async_op)
        exchange, values, received = ep._way_to_peers(x, ids, probs, ep._peers, capacity, validate, copy)
    else:
        with telling_of_errors(ep):
            _check_arguments(x, ids, probs, copy, async_op)
            plan = ep._plan(ids, probs, capacity, validate)
        exchange, values, received = ep._way_over_lines(x, ids, probs, plan, capacity, validate)
    handle = ExchangeHandle(Flight(exchange, values, x), received) if async_op else None
    made = () if handle is not None else exchanged(exchange, *values)
    if ep._peers is not None:  # ranks go on with the same number after an exchange that failed
        ep._calls += 1
    return received(*made) if handle is None else handle


def _check_arguments(x: Tensor, ids: Tensor, probs: Tensor, copy: bool, async_op: bool) -> None:
    """Check the arguments of `dispatch`."""
    _checks.flag(DISPATCH, "copy", copy)
    if async_op is not False:
        _checks.flag(DISPATCH, "async_op", async_op)
        if not copy:
            expected = "True with async_op=True, since later exchanges overwrite memory that ranks share"
            _checks.bad_value(DISPATCH, "copy", expected, copy)
    _checks.rows(DISPATCH, "x", x, _checks.SUM_DTYPES, "num_tokens")
    if isinstance(x, GraphValue):
        _checks.bad_value(DISPATCH, "x", "a tensor; exchanges run in dygraph only", "a value of a static graph")
    _checks.tensor(DISPATCH, "ids", ids, _checks.ID_DTYPES, [x.shape[0], "topk"])
    _checks.tensor(DISPATCH, "probs", probs, (paddle.float32,), ids.shape)
    _checks.same_place(DISPATCH, x=x, ids=ids, probs=probs)


@public("out", owner=f"{_NAME}.combine")
def _combine(out: Tensor, received: Received, async_op: bool) -> Any:
    name, back = f"{_NAME}.combine", received._way_back
    if async_op is not False:
        _checks.flag(name, "async_op", async_op)
    if isinstance(back, WayBackToPeers):
        what, rows = _OF_TOKENS if back.plan is None else _OF_ROWS, out
        _checks.rows(name, "out", out, _checks.SUM_DTYPES, back.num_lines, f", {what}")
        exchange = back.peers.combine(out, back.trip)
    else:
        what = _OF_ROWS if back.chunks is not None else _OF_TOKENS
        _checks.rows(name, "out", out, _checks.SUM_DTYPES, sum(back.counts.sent), f", {what}")
        rows = out if back.chunks is None else back.chunks.by_rank(out)
        exchange = rows_exchange(back.counts, combine_step(back.call, out))
    if async_op:
        return ExchangeHandle(Flight(exchange, (rows,), out), back.sums)
    return back.sums(*exchanged(exchange, rows))
