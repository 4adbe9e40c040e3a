# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The exchange of numbers before tokens travel: how many, and what ranks must know of each other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import beside, filled
from ..routing import Plan
from .calls import CALL_WORDS, LayerCall, Step
from .exchange import Counts

if TYPE_CHECKING:
    from .parallel import ExpertParallel

__all__ = ["counts_of_ranks", "say_that_this_rank_raises"]

_DISPATCH = "ExpertParallel.dispatch"
_TOKENS, _NOT_FINITE, _ABOUT = CALL_WORDS, CALL_WORDS + 1, CALL_WORDS + 2  # columns; those of experts come last


def say_that_this_rank_raises(ep: ExpertParallel, step: Step) -> None:
    """Take part in the exchange of numbers that the other ranks wait for."""
    words = paddle.to_tensor([step.words()] * ep.group.nranks, dtype="int32")
    rest = paddle.zeros([ep.group.nranks, _ABOUT - CALL_WORDS + step.call.layer.most_experts], "int32")
    with contextlib.suppress(RuntimeError):  # this rank has an error of its own to raise
        ep._transport.exchange_numbers(paddle.concat([words, rest], axis=1), step)


def counts_of_ranks(
    x: Tensor, plan: Plan, to_ranks: Plan, ep: ExpertParallel, step: Step, validate: bool | None
) -> tuple[Counts, Counts, list[list[int]]]:
    """Tokens that go from rank to rank, the rows that come back for them, and the rows of [rank, local expert].

    One exchange of a few numbers: the call, tokens, whether all is finite, and rows of each expert.

    Raises:
        ValueError: on every rank, if ranks differ in what must be the same, or a rank's tokens are not finite.
        RuntimeError: ranks are in different calls, or were in the last one; other ranks raised.
    """
    size, transport = ep.group.nranks, ep._transport
    rows = plan.tokens_per_expert.reshape([size, ep.num_local_experts])
    words = paddle.to_tensor([step.words()] * size, dtype="int32", place=rows.place)
    is_not_finite = filled([size, 1], 0, "int32", like=rows)
    if validate is True:
        is_not_finite += beside((~paddle.isfinite(x).all()).astype("int32"), is_not_finite)
    columns = [words, to_ranks.tokens_per_expert.unsqueeze(-1), is_not_finite, rows]
    if step.call.layer.most_experts > ep.num_local_experts:  # so that messages of all layers have one size
        more = step.call.layer.most_experts - ep.num_local_experts
        columns.append(filled([size, more], 0, "int32", like=rows))
    message = paddle.concat(columns, axis=1)
    own, told = _read(paddle.stack([message, transport.exchange_numbers(message, step)]), step.call)
    step.check([each[:CALL_WORDS] for each in told])
    bad = [rank for rank, each in zip(ep.group.ranks, told, strict=True) if each[_NOT_FINITE]]
    if bad:
        _checks.bad_value(_DISPATCH, "x", "finite on all ranks", f"NaN or infinity on ranks {bad}")
    last = _ABOUT + ep.num_local_experts
    of_experts = [each[_ABOUT:last] for each in told]
    of_tokens = Counts(transport, [each[_TOKENS] for each in own], [each[_TOKENS] for each in told], ep.payload)
    of_rows = Counts(transport, [sum(each) for each in of_experts], [sum(each[_ABOUT:last]) for each in own])
    return of_tokens, of_rows, of_experts


def _read(numbers: Tensor, call: LayerCall) -> list[list[list[int]]]:
    """The numbers of [own or told, rank, column], and what ranks have said on the device since the last dispatch.

    The host waits here, once.
    """
    unread = call.unread or []
    if not unread:
        return numbers.tolist()
    passes = list(unread)
    unread.clear()
    flat = paddle.concat([numbers.flatten().astype("int64"), *(codes for _, codes in passes)]).tolist()
    ranks, first = len(call.ranks), numbers.size
    for number, (step, _) in enumerate(passes):
        step.check_codes(flat[first + number * ranks : first + (number + 1) * ranks])
    columns = numbers.shape[2]
    lines = [flat[begin : begin + columns] for begin in range(0, first, columns)]
    return [lines[:ranks], lines[ranks:]]
