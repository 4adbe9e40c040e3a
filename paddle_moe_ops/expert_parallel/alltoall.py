# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine by exchanges of lines with uneven parts, the plans of tokens over ranks, and the gradients.

A backward pass sends every line's gradient back to the rank of the line. So every rank must run it, even a rank that
sent and received nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from .. import _checks
from .._graphs import beside, filled, numbers_of
from .._options import Combine, QuantizeFormat, TransportName
from .._quick import AMAX_MIN
from ..backends import QuantizeSpec, RouteSpec, Validation, compiled_backend, direct, resolve
from ..backends.base import Tensors
from ..routing import Plan, planned
from .agreement import CALL_WORDS, Kind, LayerCall, Step, backward_step
from .channels import HEADER
from .exchanges import End, Exchange
from .placement import BY_ROW, moved_rows
from .protocol import LineTransport, TokenTransport
from .transports import checked_timeout

__all__ = [
    "Chunks",
    "Counts",
    "check_travel",
    "chunks_of",
    "counts_of_ranks",
    "equal_parts",
    "kept_ids",
    "lines_of_ranks",
    "local_ids_of",
    "local_plan",
    "plan_of_ranks",
    "rows_exchange",
    "rows_of_tokens",
    "say_that_this_rank_raises",
    "tokens_exchange",
    "trimmed",
]

_NAME = "ExpertParallel"
_DISPATCH, _COMBINE = f"{_NAME}.dispatch", f"{_NAME}.combine"
_TRAVEL = {
    "combine": get_args(Combine),
    "payload": get_args(QuantizeFormat),
    "transport": get_args(TransportName),
}
_NOT_FINITE, _TOKENS, _ABOUT = CALL_WORDS, CALL_WORDS + 1, CALL_WORDS + 2  # columns; those of experts come last


def check_travel(function: str, *, tokens_per_rank: Any, timeout: Any, **given: Any) -> tuple[int | None, float]:
    """Check the options of the transport; returns ``tokens_per_rank`` and ``timeout`` as numbers."""
    combine, transport = given["combine"], given["transport"]
    is_own = isinstance(transport, (LineTransport, TokenTransport))
    if not is_own and not isinstance(transport, str):
        is_class = isinstance(transport, type)
        text = f"the class {transport.__name__}, not an instance" if is_class else type(transport).__name__
        _checks.bad_type(function, "transport", "a name, a LineTransport or a TokenTransport", text)
    for argument, choices in _TRAVEL.items():
        if argument != "transport" or not is_own:
            _checks.choice(function, argument, given[argument], choices)
    if tokens_per_rank is not None:
        tokens_per_rank = _checks.integer(function, "tokens_per_rank", tokens_per_rank, 1)
    if tokens_per_rank is not None and combine != "reduced" and transport != "peer":
        expected = f'given with combine="reduced" or transport="peer" only, not with {combine!r} and {transport!r}'
        _checks.bad_value(function, "tokens_per_rank", expected, tokens_per_rank)
    if transport == "peer" and tokens_per_rank is None:
        _checks.bad_value(function, "tokens_per_rank", 'given with transport="peer"', None)
    if transport == "deepep" or isinstance(transport, TokenTransport):
        with_transport = 'with transport="deepep"' if transport == "deepep" else "with a TokenTransport"
        for name, only in (("combine", "reduced"), ("payload", None)):
            if given[name] != only:
                _checks.bad_value(function, name, f"{only!r} {with_transport}", repr(given[name]))
        if tokens_per_rank is not None:
            _checks.bad_value(function, "tokens_per_rank", f"None {with_transport}", tokens_per_rank)
    return tokens_per_rank, checked_timeout(function, timeout)


def local_plan(ids: Tensor, num_experts: int, num_rows: int | None = None) -> Plan:
    """Return the plan of received tokens.

    Args:
        ids: int32 [R, K], counted from the first expert of this rank, -1 for experts of other ranks.
        num_experts: of this rank.
        num_rows: rows of the plan. None: on a CPU as many as there are, on a GPU one for each slot, so that the host
            does not wait for a count.
    """
    if num_rows is None:
        num_rows = -1 if ids.place.is_cpu_place() else ids.shape[0] * min(ids.shape[1], num_experts)
    return planned(ids, None, None, None, RouteSpec(num_experts, -1, 1, None, num_rows, "first", Validation.OFF))


def plan_of_ranks(ids: Tensor, num_ranks: int, experts_of_rank: int, capacity: int | None) -> Plan:
    """Return a plan over ranks instead of experts: a token has one row for each rank with one of its experts.

    The plan has the maximal number of rows, so the host does not wait for the actual one.

    Args:
        ids: int32 [T, K], slots of the experts of each token, see `placement`, -1 for none.
        num_ranks: P.
        experts_of_rank: the slots of a rank.
        capacity: the maximum of tokens per rank, or None.
    """
    num_tokens, topk = ids.shape
    if num_tokens == 0:
        mask = filled([0, num_ranks], False, "bool", like=ids)
    else:
        rank = ids // experts_of_rank  # rounds down, so negative ids stay negative
        mask = (rank.unsqueeze(-1) == paddle.arange(num_ranks, dtype="int32")).any(axis=1)
    buffer_size = num_tokens * min(num_ranks, topk)
    spec = RouteSpec(num_ranks, num_ranks, 1, None, buffer_size, "first", Validation.OFF)
    return planned(mask, None, None, capacity, spec)


def trimmed(plan: Plan, num_rows: int) -> Plan:
    """Return the plan with a buffer of the first ``num_rows`` rows only."""
    token, slot, expert = plan.row_to_token[:num_rows], plan.row_to_slot[:num_rows], plan.row_to_expert[:num_rows]
    return plan._replace(row_to_token=token, row_to_slot=slot, row_to_expert=expert, num_rows=num_rows)


class Chunks(NamedTuple):
    """The rows of the local experts in chunks, one for each expert and rank.

    Attributes:
        sizes: int32 [C], rows of each chunk in the order (expert, rank), which is that of the local plan.
        to_ranks: int32 [C], the chunks in the order (rank, expert), in which they are sent.
    """

    sizes: Tensor
    to_ranks: Tensor

    def by_rank(self, rows: Tensor) -> Tensor:
        """Return the rows in the order in which they are sent; differentiable."""
        if self.sizes.shape[0] == 0:  # this rank has no experts
            return rows
        return resolve("sort_chunks", rows).sort_chunks(rows, None, self.sizes, self.to_ranks, Validation.OFF)[0]


class EqualParts(NamedTuple):
    """The lines of an exchange in which each rank sends the same number of lines, S, to each.

    Attributes:
        to_ranks: a plan for `permute` and `unpermute`, whose row p * S + i is line i for rank p.
        ids: int32 [P * S, K] of the lines, counted from the first expert of their rank; ids outside its range are not
            experts of that rank.
        dropped: 0-D int32, slots whose token exceeded S.
    """

    to_ranks: Plan
    ids: Tensor
    dropped: Tensor


def equal_parts(
    ids: Tensor, probs: Tensor, num_ranks: int, experts_of_rank: int, rows_of_rank: int, like: Tensor
) -> EqualParts:
    """Return S lines for each rank with the tokens for its experts.

    Args:
        ids: int32 [T, K], slots of the experts of each token, -1 for none.
        probs: float32 [T, K].
        num_ranks: P.
        experts_of_rank: the slots of a rank.
        rows_of_rank: S.
        like: a tensor on the device of the maps.
    """
    if resolve("route", ids) is compiled_backend:
        return _equal_parts_by_operators(ids, probs, num_ranks, experts_of_rank, rows_of_rank)
    to_ranks = spread(plan_of_ranks(ids, num_ranks, experts_of_rank, rows_of_rank), rows_of_rank, like)
    local = local_ids_of(ids, to_ranks, experts_of_rank, has_gaps=True)
    dropped = ((ids >= 0).sum() - (local >= 0).sum()).astype("int32")
    return EqualParts(to_ranks, local, dropped)


def _equal_parts_by_operators(
    ids: Tensor, probs: Tensor, num_ranks: int, experts_of_rank: int, rows_of_rank: int
) -> EqualParts:
    """As `equal_parts`, by the operators of transport="peer" with this rank in place of every other rank."""
    topk, num_rows, num_experts = ids.shape[1], num_ranks * rows_of_rank, num_ranks * experts_of_rank
    records = filled([num_ranks, HEADER + 8 * rows_of_rank * topk], 0, "uint8", like=ids)
    sizes = experts_of_rank, rows_of_rank, rows_of_rank
    token_rows, dropped, routed, row_to_token = direct("rank_plan", ids, probs, records, *sizes, True)
    of_lines = direct("rank_records", records, topk, rows_of_rank, 0, num_experts)[0]
    first = (paddle.arange(num_ranks, dtype="int32") * experts_of_rank).unsqueeze(-1)
    local = (of_lines.reshape([num_ranks, rows_of_rank * topk]) - first).reshape([num_rows, topk])
    by_row = dict.fromkeys(BY_ROW, row_to_token)
    by_token = {"slot_to_row": token_rows, "token_rows": token_rows}
    by_expert = dict.fromkeys(("tokens_per_expert", "expert_offsets", "routed_per_expert"), routed)
    sizes_of_plan = {"num_tokens": ids.shape[0], "topk": token_rows.shape[1], "num_experts": num_ranks}
    more = {"row_probs": None, "overflow": dropped, "padding_alignment": 1, "num_rows": num_rows}
    return EqualParts(Plan(**by_token, **by_row, **by_expert, **sizes_of_plan, **more), local, dropped)


def spread(plan: Plan, rows_of_rank: int, like: Tensor) -> Plan:
    """Return a plan over ranks with the same number of rows for each rank; its rows without a token are last.

    Args:
        plan: a plan over ranks.
        rows_of_rank: the number of rows per rank.
        like: a tensor on the device of the maps.
    """
    num_ranks = plan.num_experts
    num_rows = num_ranks * rows_of_rank
    ranks, offsets = plan.row_to_expert, plan.expert_offsets
    expert_offsets = paddle.arange(num_ranks + 1, dtype="int32") * rows_of_rank
    if ranks.shape[0]:
        shift = expert_offsets[:-1] - offsets[:-1]
        places = numbers_of(ranks) + paddle.gather(shift, ranks.clip(min=0))
        plan = moved_rows(plan, paddle.where(ranks >= 0, places, paddle.full_like(places, num_rows)), num_rows)
    else:
        none = filled([num_rows], -1, "int32", like=like)
        plan = plan._replace(row_to_token=none, row_to_slot=none, row_to_expert=none, num_rows=num_rows)
    slot_to_row, token_rows = beside(plan.slot_to_row, like), beside(plan.token_rows, like)
    return plan._replace(slot_to_row=slot_to_row, token_rows=token_rows, expert_offsets=expert_offsets)


def local_ids_of(ids: Tensor, to_ranks: Plan, experts_of_rank: int, *, has_gaps: bool) -> Tensor:
    """Return the ids [R, K] of sent tokens, counted from the first expert of their rank; -1: on another rank.

    Args:
        ids: int32 [T, K], slots of experts.
        to_ranks: their plan over ranks.
        experts_of_rank: the slots of a rank.
        has_gaps: whether the plan may have rows without a token.
    """
    if ids.shape[0] == 0 or to_ranks.num_rows == 0:
        return filled([to_ranks.num_rows, ids.shape[1]], -1, "int32", like=ids)
    tokens = to_ranks.row_to_token
    of_rows = paddle.gather(ids, tokens.clip(min=0) if has_gaps else tokens)
    local = of_rows - (to_ranks.row_to_expert * experts_of_rank).unsqueeze(-1)
    is_here = (local >= 0) & (local < experts_of_rank)
    if has_gaps:
        is_here = is_here & (tokens >= 0).unsqueeze(-1)
    return paddle.where(is_here, local, paddle.full_like(local, -1))


def chunks_of(of_experts: NDArray, like: Tensor) -> Chunks:
    """Return the chunks of the rows of [rank, local expert], on the device of ``like``."""
    sizes = of_experts.T.astype(np.int32).flatten()
    order = np.arange(sizes.size, dtype=np.int32).reshape(of_experts.T.shape).T.flatten()
    return Chunks(paddle.to_tensor(sizes, place=like.place), paddle.to_tensor(order, place=like.place))


def kept_ids(ids: Tensor, plan: Plan) -> Tensor:
    """Return the ids as int32, -1 for dropped slots."""
    return paddle.where(plan.slot_to_row >= 0, ids.astype("int32"), paddle.full_like(plan.slot_to_row, -1))


class Counts(NamedTuple):
    """The numbers of lines in an exchange, and their transport.

    Attributes:
        transport: the transport of the lines.
        sent: lines for each rank.
        received: lines from each rank.
        float8: the format of tokens on the way, one of `permute`, or None for their own dtype.
    """

    transport: LineTransport
    sent: list[int]
    received: list[int]
    float8: str | None = None

    def encode(self, tokens: Tensor) -> Tensors:
        """Return the float8 codes and scales of tokens."""
        spec = QuantizeSpec(self.float8 == _checks.UE8M0, "row", AMAX_MIN)
        return resolve("quantize_1x128", tokens).quantize_1x128(tokens, spec)

    def decode(self, dtype: Any, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the tokens of codes and scales."""
        return resolve("dequantize_1x128", codes).dequantize_1x128(codes, scales, "row", dtype)


class LineLeg(NamedTuple):
    """A leg by a transport of lines.

    Attributes:
        transport: the transport of the lines.
        sent: lines for each rank.
        received: lines from each rank.
        step: the pass.
        before: returns the lines to send from the tensors; None: they are these.
        after: returns the received tensors from the received lines; None: they are these.
    """

    transport: LineTransport
    sent: list[int]
    received: list[int]
    step: Step
    before: Callable[..., Tensors] | None = None
    after: Callable[..., Tensors] | None = None

    def run(self, *values: Tensor) -> Tensors:
        exchange, of_leg = self.transport.exchange, (self.sent, self.received, self.step)
        made: Tensors = ()
        for lines in values if self.before is None else self.before(*values):
            made = (*made, exchange(lines, *of_leg))
        return made if self.after is None else self.after(*made)

    def start(self, *values: Tensor) -> End:
        lines = values if self.before is None else self.before(*values)
        ends = [self.transport.start_exchange(each, self.sent, self.received, self.step) for each in lines]

        def end() -> Tensors:
            made = tuple([each() for each in ends])
            return made if self.after is None else self.after(*made)

        return end


def rows_exchange(counts: Counts, step: Step) -> Exchange:
    """Return the exchange of rows of experts, or of their sums, in combine."""
    transport, sent, received = counts.transport, counts.sent, counts.received

    def back() -> LineLeg:
        return LineLeg(transport, received, sent, backward_step(step.call, Kind.COMBINE_BACKWARD))

    return Exchange(_COMBINE, LineLeg(transport, sent, received, step), back)


def tokens_exchange(counts: Counts, step: Step, dtype: Any) -> Exchange:
    """Return the exchange of tokens and probabilities in dispatch; with one node, all ranks send in one order.

    Args:
        counts: of the tokens.
        step: the dispatch.
        dtype: of tokens.
    """

    def before(tokens: Tensor, probs: Tensor) -> Tensors:
        return (*counts.encode(tokens), probs)

    def after(*lines: Tensor) -> Tensors:
        return counts.decode(dtype, *lines[:-1]), lines[-1]

    transport, sent, received = counts.transport, counts.sent, counts.received

    def back() -> LineLeg:
        return LineLeg(transport, received, sent, backward_step(step.call, Kind.DISPATCH_BACKWARD))

    plain = LineLeg(transport, sent, received, step)
    there = plain if counts.float8 is None else plain._replace(before=before, after=after)
    return Exchange(_DISPATCH, there, back, lambda: plain)


def lines_of_ranks(x: Tensor, probs: Tensor, to_ranks: Plan) -> Tensors:
    """Return tokens [T, d] and probabilities [T, K] in the order of a plan over ranks; differentiable."""
    backend = resolve("permute", x)
    return backend.permute(x, None, to_ranks, "all")[0], backend.permute(probs, None, to_ranks, "all")[0]


def rows_of_tokens(
    dtype: Any, plan: Plan, to_ranks: Plan, tokens: Counts, local: Plan, chunks: Chunks, rows: Counts, step: Step
) -> Exchange:
    """Return the exchange of tokens [T, d] for the rows of the local experts, in expert order.

    Each token is sent once per rank, and the receiver permutes it to rows. The backward pass sends every row's
    gradient, so that a token's gradient is one sum over its rows, rounded once, as on one rank with all experts.

    Args:
        dtype: of tokens.
        plan: their plan over all experts.
        to_ranks: the plan of tokens by rank.
        tokens: the numbers of tokens in the exchange.
        local: the plan of the received tokens over the local experts.
        chunks: the rows of that plan by rank.
        rows: the numbers of rows sent back to each rank and received from it.
        step: the dispatch.
    """

    def lines_of(x: Tensor) -> Tensors:
        return (resolve("permute", x).permute(x, None, to_ranks, "all")[0],)

    def rows_of(arrived: Tensor) -> Tensors:
        return (resolve("permute", arrived).permute(arrived, None, local, "all")[0],)

    def encoded(x: Tensor) -> Tensors:
        return tokens.encode(*lines_of(x))

    def decoded(*lines: Tensor) -> Tensors:
        return rows_of(tokens.decode(dtype, *lines))

    def by_rank(gradient: Tensor) -> Tensors:
        return (chunks.by_rank(gradient),)

    def summed(returned: Tensor) -> Tensors:
        return (resolve("unpermute", returned).unpermute(returned, None, plan),)

    def back() -> LineLeg:
        back_step = backward_step(step.call, Kind.DISPATCH_BACKWARD)
        return LineLeg(rows.transport, rows.sent, rows.received, back_step, by_rank, summed)

    plain = LineLeg(tokens.transport, tokens.sent, tokens.received, step, lines_of, rows_of)
    there = plain if tokens.float8 is None else plain._replace(before=encoded, after=decoded)
    return Exchange(_DISPATCH, there, back, lambda: plain)


def say_that_this_rank_raises(transport: LineTransport, step: Step) -> None:
    """Join the exchange of numbers for which the other ranks wait."""
    size = len(step.call.ranks)
    words = paddle.to_tensor([step.words()] * size, dtype="int32")
    rest = paddle.zeros([size, _ABOUT - CALL_WORDS + step.call.layer.most_experts], "int32")
    with contextlib.suppress(RuntimeError):  # this rank raises its own error
        transport.exchange_numbers(paddle.concat([words, rest], axis=1), step)


def counts_of_ranks(
    x: Tensor,
    of_slots: Tensor,
    to_ranks: Plan,
    transport: LineTransport,
    payload: str | None,
    step: Step,
    validate: bool | None,
) -> tuple[Counts, Counts, NDArray]:
    """Return the counts of tokens by rank, of the rows sent back, and the rows of [rank, slot of this rank].

    The ranks exchange a few numbers once: the call, tokens, whether all are finite, and rows of each expert.

    Args:
        x: [T, d], this rank's tokens.
        of_slots: int32 [P * S], the number of rows of the expert in each slot.
        to_ranks: the plan of tokens by rank.
        transport: the transport of the tokens.
        payload: the format of tokens on the way, one of `permute`, or None for their own dtype.
        step: the dispatch.
        validate: True: also check that the tokens of all ranks are finite.

    Raises:
        ValueError: on every rank, if d, K or the dtype differ between ranks, or a rank's tokens are not finite.
        RuntimeError: ranks are in different calls, or were in the last one; other ranks raised.
    """
    ranks = step.call.ranks
    size, slots = len(ranks), of_slots.shape[0] // len(ranks)
    rows = of_slots.reshape([size, slots])
    words, is_not_finite = step.words(), []
    if validate is True:
        here = beside((~paddle.isfinite(x).all()).astype("int32"), rows)
        is_not_finite.append(filled([size, 1], 0, "int32", like=rows) + here)
    else:
        words.append(0)
    words_of_ranks = paddle.to_tensor([words] * size, dtype="int32", place=rows.place)
    columns = [words_of_ranks, *is_not_finite, to_ranks.tokens_per_expert.unsqueeze(-1), rows]
    more = step.call.layer.most_experts - slots
    if more > 0:  # so that messages of all layers have one size
        columns.append(filled([size, more], 0, "int32", like=rows))
    message = paddle.concat(columns, axis=1)
    own, told = _read(paddle.stack([message, transport.exchange_numbers(message, step)]), step.call)
    if not step.is_checked:
        step.check(told[:, :CALL_WORDS].tolist())
    if told[:, _NOT_FINITE].any():
        bad = np.array(ranks)[told[:, _NOT_FINITE] > 0].tolist()
        _checks.bad_value(_DISPATCH, "x", "finite on all ranks", f"NaN or infinity on ranks {bad}")
    last = _ABOUT + slots
    of_experts = told[:, _ABOUT:last]
    of_tokens = Counts(transport, own[:, _TOKENS].tolist(), told[:, _TOKENS].tolist(), payload)
    of_rows = Counts(transport, of_experts.sum(axis=1).tolist(), own[:, _ABOUT:last].sum(axis=1).tolist())
    return of_tokens, of_rows, of_experts


def _read(numbers: Tensor, call: LayerCall) -> NDArray:
    """Read the numbers [own or received, rank, column], and check the codes on the device since the last dispatch.

    The host waits once, in this function.
    """
    if not call.unread:
        return numbers.numpy()
    passes = list(call.unread)
    call.unread.clear()
    read = paddle.concat([numbers.flatten().astype("int64"), *(codes for _, codes in passes)]).numpy()
    codes_of_passes = read[numbers.size :].reshape([len(passes), -1]).tolist()
    for (step, _), codes in zip(passes, codes_of_passes, strict=True):
        step.check_codes(codes)
    return read[: numbers.size].reshape(numbers.shape)
