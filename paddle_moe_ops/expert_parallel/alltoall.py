# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""How rows get from each rank to the others: an all-to-all with uneven parts.

A transport moves the lines of a tensor as bits, so any dtype travels, float8 too. The parts that go to each rank follow
each other in the order of the ranks, and so do those that arrive. All ranks of a group make the same exchanges in the
same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import dense, filled
from ..backends import compiled_backend, direct, resolve
from .calls import Step
from .groups import is_gloo
from .meetings import Meeting, checked_timeout

__all__ = ["AllToAll", "Alone", "Scatters", "Transport", "check_travel", "transport_for"]

_NAME = "ExpertParallel"
_DISPATCH = f"{_NAME}.dispatch"
_TRAVEL = {
    "combine": ("exact", "reduced"),
    "payload": (None, *_checks.QUANTIZE_FORMATS[1:]),
    "transport": ("auto", "alltoall", "gloo", "peer", "deepep"),
}


class Transport(Protocol):
    """What moves lines between the ranks of one group."""

    def exchange(self, payload: Tensor, sent: Sequence[int], received: Sequence[int], step: Step) -> Tensor:
        """Send each rank its lines, and receive those for this rank.

        Args:
            payload: [sum(sent), ...], contiguous; the lines for rank 0, those for rank 1, ...
            sent: lines for each rank, this one included.
            received: lines from each rank, this one included.
            step: the pass that the exchange belongs to, which is compared between ranks.

        Returns:
            [sum(received), ...] in the order of the ranks, dtype and place of the payload. Floating-point numbers are
            NaN where the device finds that ranks are in different calls.

        Raises:
            RuntimeError: a rank did not answer, or the host finds that ranks are in different calls.
        """

    def exchange_numbers(self, numbers: Tensor, step: Step) -> Tensor:
        """Send each rank its line, and receive those for this rank; the host waits, for a limited time.

        Args:
            numbers: int32 [P, ...], contiguous.
            step: as above; where the host compares it only later it is among the numbers.

        Returns:
            the same shape.

        Raises:
            RuntimeError: a rank did not answer, or did not come in time.
        """


class Alone:
    """The transport of a group of one rank."""

    def exchange(self, payload: Tensor, sent: Sequence[int], received: Sequence[int], step: Step) -> Tensor:
        return payload.detach().clone()

    def exchange_numbers(self, numbers: Tensor, step: Step) -> Tensor:
        return numbers.clone()


class AllToAll:
    """`paddle.distributed.alltoall_single`, for NCCL and every other backend that has it.

    Nothing is read on the host but numbers. So ranks send each other a code of the pass before its first lines, which
    the device compares. A line of these for the code would be a copy of all of them.

    Args:
        group: whose ranks take part.
        timeout: seconds that the host waits for the others, where it waits.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        self._group, self._meeting = group, Meeting(group, timeout)

    def exchange(self, payload: Tensor, sent: Sequence[int], received: Sequence[int], step: Step) -> Tensor:
        lines, rank = _as_bytes(payload), self._group.rank
        codes = self._codes_of(step)
        width = lines.shape[1]
        if width == 0:
            return _from_bytes(filled([sum(received), 0], 0, lines.dtype, like=lines), payload)
        # A custom device has no empty tensors, so where nothing is sent or received a line goes to this rank itself.
        spare = int(sum(sent) == 0 or sum(received) == 0)
        sent, received = list(sent), list(received)
        if spare:
            before, own = sum(sent[:rank]), paddle.zeros([1, width], lines.dtype)
            lines = paddle.concat([each for each in (lines[:before], own, lines[before:]) if each.shape[0]])
            sent[rank], received[rank] = sent[rank] + 1, received[rank] + 1
        out = paddle.zeros([sum(received), width], lines.dtype)
        with self._meeting.naming_ranks(_NAME):
            paddle.distributed.alltoall_single(
                out, lines, in_split_sizes=sent, out_split_sizes=received, group=self._group
            )
        if spare:
            before = sum(received[:rank])
            parts = [each for each in (out[:before], out[before + 1 :]) if each.shape[0]]
            out = paddle.concat(parts) if parts else filled([0, width], 0, out.dtype, like=out)
        arrived = _from_bytes(out, payload)
        return arrived if codes is None else _spoiled(arrived, codes, step.code())

    def _codes_of(self, step: Step) -> Tensor | None:
        """The codes of all ranks, on the device; None where the host knows that they are the same."""
        if step.is_checked or step.codes is not None:
            return step.codes
        own = paddle.full([self._group.nranks], step.code(), "int64")
        step.codes = paddle.empty_like(own)
        with self._meeting.naming_ranks(_NAME):
            paddle.distributed.alltoall_single(step.codes, own, group=self._group)
        if step.call.unread is not None:
            step.call.unread.append((step, step.codes))
        return step.codes

    def exchange_numbers(self, numbers: Tensor, step: Step) -> Tensor:
        out = paddle.empty_like(numbers)
        with self._meeting.naming_ranks(_NAME):
            task = paddle.distributed.alltoall_single(out, numbers, group=self._group, sync_op=False)
        self._meeting.wait(_DISPATCH, task)
        return out


class Scatters:
    """A scatter from each rank in turn, for gloo, which has no all-to-all.

    The parts of one scatter have one size, so smaller ones are padded. Sends and receives do not work here: gloo
    matches them by a number that each rank counts for itself, which works between two ranks only. With gloo the host
    waits in every exchange, so each of them ends in a limited time.

    Args:
        group: whose ranks take part.
        timeout: seconds that the host waits for the others.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        self._group, self._meeting = group, Meeting(group, timeout)

    def exchange(self, payload: Tensor, sent: Sequence[int], received: Sequence[int], step: Step) -> Tensor:
        return self._exchange(_NAME, payload, sent, received, step)

    def exchange_numbers(self, numbers: Tensor, step: Step) -> Tensor:
        ones = [1] * self._group.nranks
        return self._exchange(_DISPATCH, numbers, ones, ones, step)

    def _exchange(
        self, function: str, payload: Tensor, sent: Sequence[int], received: Sequence[int], step: Step
    ) -> Tensor:
        lines = _as_bytes(payload)
        counts, words = self._meeting.call(function, lambda: self._counts_of_all(sent, step))
        step.check(words)  # gloo would end a process whose lines are longer than others
        arrived = self._meeting.call(function, lambda: self._scattered(lines, sent, received, counts))
        return _from_bytes(paddle.concat(arrived), payload)

    def _scattered(
        self, lines: Tensor, sent: Sequence[int], received: Sequence[int], counts_of_all: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """The lines from each rank."""
        arrived, width = [], lines.shape[1]
        for source, counts in enumerate(counts_of_all):
            most = max(counts)
            part = filled([most, width], 0, lines.dtype, like=lines)
            if most * width:
                parts = _padded_parts(lines, sent, most) if source == self._group.rank else None
                paddle.distributed.scatter(part, parts, src=self._group.ranks[source], group=self._group)
            arrived.append(part[: received[source]])
        return arrived

    def _counts_of_all(self, sent: Sequence[int], step: Step) -> tuple[list[list[int]], list[list[int]]]:
        """How many lines each rank sends to each, and the words of its step."""
        told: list[Tensor] = []
        own, ranks = paddle.to_tensor([*sent, *step.words()], dtype="int64"), len(sent)
        paddle.distributed.all_gather(told, own, group=self._group)
        numbers = [each.tolist() for each in told]
        return [each[:ranks] for each in numbers], [each[ranks:] for each in numbers]


def _padded_parts(lines: Tensor, sent: Sequence[int], most: int) -> list[Tensor]:
    """The parts for all ranks, of `most` lines each."""
    parts, first = [], 0
    for count in sent:
        padding = filled([most - count, lines.shape[1]], 0, lines.dtype, like=lines)
        parts.append(paddle.concat([lines[first : first + count], padding]))
        first += count
    return parts


def check_travel(function: str, *, tokens_per_rank: Any, timeout: Any, **given: Any) -> tuple[int | None, float]:
    """Check by what tokens and their results travel, with a group or without; gives the first two as numbers."""
    for argument, choices in _TRAVEL.items():
        _checks.choice(function, argument, given[argument], choices)
    if tokens_per_rank is not None:
        tokens_per_rank = _checks.integer(function, "tokens_per_rank", tokens_per_rank, 1)
    combine, transport = given["combine"], given["transport"]
    if tokens_per_rank is not None and combine != "reduced" and transport != "peer":
        expected = f'given with combine="reduced" or transport="peer" only, not with {combine!r} and {transport!r}'
        _checks.bad_value(function, "tokens_per_rank", expected, tokens_per_rank)
    if transport == "peer" and tokens_per_rank is None:
        _checks.bad_value(function, "tokens_per_rank", 'given with transport="peer"', None)
    if transport == "deepep":
        for name, only in (("combine", "reduced"), ("payload", None)):
            if given[name] != only:
                _checks.bad_value(function, name, f'{only!r} with transport="deepep"', repr(given[name]))
        if tokens_per_rank is not None:
            _checks.bad_value(function, "tokens_per_rank", 'None with transport="deepep"', tokens_per_rank)
    return tokens_per_rank, checked_timeout(function, timeout)


def transport_for(name: str, group: Group, timeout: float) -> Transport:
    """The transport of a group by its name.

    Args:
        name: "alltoall", "gloo" or "auto", which is "gloo" where gloo connects the ranks and "alltoall" elsewhere.
        group: whose ranks take part.
        timeout: seconds that the host waits for the others.
    """
    if group.nranks == 1:
        return Alone()
    if name == "auto":
        name = "gloo" if is_gloo(group) else "alltoall"
    return Scatters(group, timeout) if name == "gloo" else AllToAll(group, timeout)


def _spoiled(arrived: Tensor, codes: Tensor, code: int) -> Tensor:
    """What arrived, NaN if ranks were in different calls. Ids stay, and so do float8 codes, whose scales are NaN."""
    if arrived.dtype not in _checks.SUM_DTYPES or arrived.size == 0:
        return arrived
    if resolve("permute", arrived) is compiled_backend:
        return direct("rank_spoil", arrived, codes, code)[0]
    nan = filled([1], float("nan"), arrived.dtype, like=arrived)
    return paddle.where((codes != code).any(), nan, arrived)


def _as_bytes(payload: Tensor) -> Tensor:
    """The lines as bytes, [lines, bytes of a line]."""
    lines, width = payload.shape[0], math.prod(payload.shape[1:])
    if lines * width == 0:
        return filled([lines, width * payload.element_size()], 0, paddle.uint8, like=payload)
    flat = dense(payload.detach()).reshape([lines, width])
    return flat if flat.dtype == paddle.uint8 else flat.view(paddle.uint8)


def _from_bytes(lines: Tensor, like: Tensor) -> Tensor:
    shape = [lines.shape[0], *like.shape[1:]]
    if lines.size == 0:
        return filled(shape, 0, like.dtype, like=like)
    typed = lines if like.dtype == paddle.uint8 else lines.view(like.dtype)
    return typed.reshape(shape)
