# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""All-to-all exchanges with uneven parts, and their gradients.

A transport sends the lines of a tensor as bits, so it supports any dtype, including float8. Sent and received parts are
in the order of the ranks. All ranks of a group run the same exchanges in the same order. A backward pass sends every
line's gradient back to the rank of the line. So every rank must run it, even a rank that sent and received nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import beside, dense, filled
from .._quick import AMAX_MIN
from ..backends import QuantizeSpec, compiled_backend, direct, resolve
from ..backends.autograd import Call, Gradients, connect, linear
from ..backends.base import Tensors
from ..routing import Plan
from .agreement import CALL_WORDS, Kind, LayerCall, Step, backward_step, is_gloo
from .plans import Chunks
from .rendezvous import Rendezvous, checked_timeout

__all__ = [
    "AllToAll",
    "Alone",
    "Chunks",
    "Counts",
    "Scatters",
    "check_travel",
    "counts_of_ranks",
    "exchange",
    "exchange_with_probs",
    "rows_of_tokens",
    "say_that_this_rank_raises",
    "transport_for",
]

_NAME = "ExpertParallel"
_DISPATCH, _COMBINE = f"{_NAME}.dispatch", f"{_NAME}.combine"
_TRAVEL = {
    "combine": ("exact", "reduced"),
    "payload": (None, *_checks.QUANTIZE_FORMATS[1:]),
    "transport": ("auto", "alltoall", "gloo", "peer", "deepep"),
}
_NOT_FINITE, _TOKENS, _ABOUT = CALL_WORDS, CALL_WORDS + 1, CALL_WORDS + 2  # columns; those of experts come last


class Transport(Protocol):
    """A way to exchange lines between the ranks of one group."""

    def exchange(self, payload: Tensor, sent: Sequence[int], received: Sequence[int], step: Step) -> Tensor:
        """Send each rank its lines, and receive those for this rank.

        Args:
            payload: [sum(sent), ...], contiguous; lines for rank 0, then for rank 1, ...
            sent: number of lines for each rank, this one included.
            received: number of lines from each rank, this one included.
            step: the pass of the exchange, which is compared between ranks.

        Returns:
            [sum(received), ...] in the order of the ranks, dtype and place of the payload. If the device finds that
            ranks are in different calls, floating-point numbers are NaN.

        Raises:
            RuntimeError: a rank did not answer, or the host finds that ranks are in different calls.
        """

    def exchange_numbers(self, numbers: Tensor, step: Step) -> Tensor:
        """Send each rank its line, and receive those for this rank; the host waits, for a limited time.

        Args:
            numbers: int32 [P, ...], contiguous.
            step: as above; if the host compares it later, it is part of the numbers.

        Returns:
            the same shape.

        Raises:
            RuntimeError: a rank did not answer, or did not arrive in time.
        """


class Alone:
    """The transport of a group of one rank."""

    def exchange(self, payload: Tensor, sent: Sequence[int], received: Sequence[int], step: Step) -> Tensor:
        return payload.detach().clone()

    def exchange_numbers(self, numbers: Tensor, step: Step) -> Tensor:
        return numbers.clone()


class AllToAll:
    """The transport by `paddle.distributed.alltoall_single`, for NCCL and every other backend that supports it.

    The host reads only the counts of lines. So ranks exchange a code of the pass before its first lines, and the device
    compares the codes. Adding the code as a line of the payload would copy the payload.

    Args:
        group: the participating ranks.
        timeout: seconds that the host waits for the others, in exchanges that wait.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        self._group, self._rendezvous = group, Rendezvous(group, timeout)

    def exchange(self, payload: Tensor, sent: Sequence[int], received: Sequence[int], step: Step) -> Tensor:
        lines, rank = _as_bytes(payload), self._group.rank
        codes = self._codes_of(step)
        width = lines.shape[1]
        if width == 0:
            return _from_bytes(filled([sum(received), 0], 0, lines.dtype, like=lines), payload)
        # Custom devices have no empty tensors. If nothing is sent or received, this rank sends a line to itself.
        spare = int(sum(sent) == 0 or sum(received) == 0)
        sent, received = list(sent), list(received)
        if spare:
            before, own = sum(sent[:rank]), paddle.zeros([1, width], lines.dtype)
            lines = paddle.concat([each for each in (lines[:before], own, lines[before:]) if each.shape[0]])
            sent[rank], received[rank] = sent[rank] + 1, received[rank] + 1
        out = paddle.zeros([sum(received), width], lines.dtype)
        with self._rendezvous.naming_ranks(_NAME):
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
        """The codes of all ranks, on the device; None if the host knows that they are equal."""
        if step.is_checked or step.codes is not None:
            return step.codes
        own = paddle.full([self._group.nranks], step.code(), "int64")
        step.codes = paddle.empty_like(own)
        with self._rendezvous.naming_ranks(_NAME):
            paddle.distributed.alltoall_single(step.codes, own, group=self._group)
        if step.call.unread is not None:
            step.call.unread.append((step, step.codes))
        return step.codes

    def exchange_numbers(self, numbers: Tensor, step: Step) -> Tensor:
        out = paddle.empty_like(numbers)
        with self._rendezvous.naming_ranks(_NAME):
            task = paddle.distributed.alltoall_single(out, numbers, group=self._group, sync_op=False)
        self._rendezvous.wait(_DISPATCH, task)
        return out


class Scatters:
    """The transport by a scatter from each rank, one after another, for gloo, which has no all-to-all.

    The parts of one scatter have one size, so smaller ones are padded. Send and receive are no alternative: gloo
    matches them by a counter of each rank, which works only between two ranks. With gloo the host waits in every
    exchange, so each exchange has a time limit.

    Args:
        group: the participating ranks.
        timeout: seconds that the host waits for the others.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        self._group, self._rendezvous = group, Rendezvous(group, timeout)

    def exchange_numbers(self, numbers: Tensor, step: Step) -> Tensor:
        ones = [1] * self._group.nranks
        return self.exchange(numbers, ones, ones, step, _DISPATCH)

    def exchange(
        self, payload: Tensor, sent: Sequence[int], received: Sequence[int], step: Step, function: str = _NAME
    ) -> Tensor:
        lines = _as_bytes(payload)
        words, arrived = self._rendezvous.call(function, lambda: self._scattered(lines, sent, received, step))
        step.check(words)
        return _from_bytes(paddle.concat(arrived), payload)

    def _scattered(
        self, lines: Tensor, sent: Sequence[int], received: Sequence[int], step: Step
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Return the words of each rank's step, and its lines; no lines if the ranks are in different calls."""
        counts_of_all, words = self._counts_of_all(sent, step)
        if any(each[:-1] != words[0][:-1] for each in words):
            return words, []  # gloo terminates a process whose lines are longer than others
        arrived, width = [], lines.shape[1]
        for source, counts in enumerate(counts_of_all):
            most = max(counts)
            part = filled([most, width], 0, lines.dtype, like=lines)
            if most * width:
                parts = _padded_parts(lines, sent, most) if source == self._group.rank else None
                paddle.distributed.scatter(part, parts, src=self._group.ranks[source], group=self._group)
            arrived.append(part[: received[source]])
        return words, arrived

    def _counts_of_all(self, sent: Sequence[int], step: Step) -> tuple[list[list[int]], list[list[int]]]:
        """Return the numbers of lines from each rank to each, and the words of each rank's step."""
        told: list[Tensor] = []
        own, ranks = paddle.to_tensor([*sent, *step.words()], dtype="int64"), len(sent)
        paddle.distributed.all_gather(told, own, group=self._group)
        numbers = [each.tolist() for each in told]
        return [each[:ranks] for each in numbers], [each[ranks:] for each in numbers]


def _padded_parts(lines: Tensor, sent: Sequence[int], most: int) -> list[Tensor]:
    """Return the parts for all ranks, padded to ``most`` lines each."""
    parts, first = [], 0
    for count in sent:
        padding = filled([most - count, lines.shape[1]], 0, lines.dtype, like=lines)
        parts.append(paddle.concat([lines[first : first + count], padding]))
        first += count
    return parts


def check_travel(function: str, *, tokens_per_rank: Any, timeout: Any, **given: Any) -> tuple[int | None, float]:
    """Check the options of the transport; returns ``tokens_per_rank`` and ``timeout`` as numbers."""
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
    """Return the transport of a group by its name.

    Args:
        name: "alltoall", "gloo" or "auto", which is "gloo" if gloo connects the ranks and otherwise "alltoall".
        group: the participating ranks.
        timeout: seconds that the host waits for the others.
    """
    if group.nranks == 1:
        return Alone()
    if name == "auto":
        name = "gloo" if is_gloo(group) else "alltoall"
    return Scatters(group, timeout) if name == "gloo" else AllToAll(group, timeout)


def _spoiled(arrived: Tensor, codes: Tensor, code: int) -> Tensor:
    """Return the received lines, NaN if ranks were in different calls. Ids and float8 codes stay; scales are NaN."""
    if arrived.dtype not in _checks.SUM_DTYPES or arrived.size == 0:
        return arrived
    if resolve("permute", arrived) is compiled_backend:
        return direct("rank_spoil", arrived, codes, code)[0]
    nan = filled([1], float("nan"), arrived.dtype, like=arrived)
    return paddle.where((codes != code).any(), nan, arrived)


def _as_bytes(payload: Tensor) -> Tensor:
    """Return the lines as bytes, [lines, bytes of a line]."""
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


class Counts(NamedTuple):
    """The numbers of lines in an exchange, and their transport.

    Attributes:
        transport: the transport of the lines.
        sent: lines for each rank.
        received: lines from each rank.
        float8: the format of tokens on the way, one of `permute`, or None for their own dtype.
    """

    transport: Transport
    sent: list[int]
    received: list[int]
    float8: str | None = None

    def there(self, step: Step) -> Callable[[Tensor], Tensor]:
        """Return the function that sends lines [sum(sent), ...] in a pass of a call, and returns the received ones."""
        return functools.partial(self.transport.exchange, sent=self.sent, received=self.received, step=step)

    def back(self, step: Step) -> Callable[[Tensor], Tensor]:
        """Return the function that sends lines [sum(received), ...] the opposite way."""
        return functools.partial(self.transport.exchange, sent=self.received, received=self.sent, step=step)

    def send_tokens(self, tokens: Tensor, step: Step) -> Tensor:
        """Send tokens [sum(sent), d], as float8 if ``float8`` says so, and return the received ones."""
        if self.float8 is None:
            return self.transport.exchange(tokens, self.sent, self.received, step)
        spec, there = QuantizeSpec(self.float8 == _checks.UE8M0, "row", AMAX_MIN), self.there(step)
        codes, scales = resolve("quantize_1x128", tokens).quantize_1x128(tokens, spec)
        codes, scales = there(codes), there(scales)
        return resolve("dequantize_1x128", codes).dequantize_1x128(codes, scales, "row", tokens.dtype)


class _TokensAndProbs(Call):
    """A call that sends tokens and probabilities; with one node, all ranks send the gradients in one order."""

    function = _DISPATCH

    def __init__(self, tokens: Tensor, probs: Tensor, counts: Counts, step: Step) -> None:
        super().__init__(None, tokens, probs)
        self.payload: Tensors = (tokens, probs)
        self.counts, self.step = counts, step

    def run(self) -> Tensors:
        (tokens, probs), self.payload = self.payload, ()
        counts = self.counts
        arrived = counts.send_tokens(tokens, self.step)
        return arrived, counts.transport.exchange(probs, counts.sent, counts.received, self.step)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        d_tokens, d_probs = gradients
        step = backward_step(self.step.call, Kind.DISPATCH_BACKWARD)
        there, back = self.counts.there(step), self.counts.back(step)
        d_tokens = linear(_DISPATCH, None, d_tokens, back, there)
        return d_tokens, linear(_DISPATCH, None, d_probs, back, there)


def exchange(rows: Tensor, counts: Counts, step: Step) -> Tensor:
    """Send rows to their ranks; differentiable."""

    def back(gradient: Tensor) -> Tensor:
        back_step = backward_step(step.call, Kind.COMBINE_BACKWARD)
        return counts.transport.exchange(gradient, counts.received, counts.sent, back_step)

    return linear(_COMBINE, None, rows, counts.there(step), back)


def exchange_with_probs(tokens: Tensor, probs: Tensor, counts: Counts, step: Step) -> Tensors:
    """Send tokens [R, d] and probabilities [R, K] to their ranks; differentiable."""
    return connect(_TokensAndProbs(tokens, probs, counts, step), tokens, probs)


def rows_of_tokens(
    x: Tensor, plan: Plan, to_ranks: Plan, tokens: Counts, local: Plan, chunks: Chunks, rows: Counts, step: Step
) -> Tensor:
    """Return the rows of the local experts, in expert order; differentiable in x.

    Each token is sent once per rank, and the receiver permutes it to rows. The backward pass sends every row's
    gradient, so that a token's gradient is one sum over its rows, rounded once, as on one rank with all experts.

    Args:
        x: [T, d], this rank's tokens.
        plan: their plan over all experts.
        to_ranks: the plan of tokens by rank.
        tokens: the numbers of tokens in the exchange.
        local: the plan of the received tokens over the local experts.
        chunks: the rows of that plan by rank.
        rows: the numbers of rows sent back to each rank and received from it.
        step: the dispatch.
    """

    def there(x: Tensor) -> Tensor:
        backend = resolve("permute", x)
        arrived = tokens.send_tokens(backend.permute(x, None, to_ranks, "all")[0], step)
        return backend.permute(arrived, None, local, "all")[0]

    def back(gradient: Tensor) -> Tensor:
        back_step = backward_step(step.call, Kind.DISPATCH_BACKWARD)
        returned = rows.transport.exchange(chunks.by_rank(gradient), rows.sent, rows.received, back_step)
        return resolve("unpermute", returned).unpermute(returned, None, plan)

    return linear(_DISPATCH, None, x, there, back)


def say_that_this_rank_raises(transport: Transport, step: Step) -> None:
    """Join the exchange of numbers for which the other ranks wait."""
    size = len(step.call.ranks)
    words = paddle.to_tensor([step.words()] * size, dtype="int32")
    rest = paddle.zeros([size, _ABOUT - CALL_WORDS + step.call.layer.most_experts], "int32")
    with contextlib.suppress(RuntimeError):  # this rank raises its own error
        transport.exchange_numbers(paddle.concat([words, rest], axis=1), step)


def counts_of_ranks(
    x: Tensor, plan: Plan, to_ranks: Plan, transport: Transport, payload: str | None, step: Step, validate: bool | None
) -> tuple[Counts, Counts, NDArray]:
    """Return the counts of tokens by rank, of the rows sent back, and the rows of [rank, local expert].

    The ranks exchange a few numbers once: the call, tokens, whether all are finite, and rows of each expert.

    Args:
        x: [T, d], this rank's tokens.
        plan: their plan over all experts.
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
    size, num_local_experts = len(ranks), plan.num_experts // len(ranks)
    rows = plan.tokens_per_expert.reshape([size, num_local_experts])
    words, is_not_finite = step.words(), []
    if validate is True:
        here = beside((~paddle.isfinite(x).all()).astype("int32"), rows)
        is_not_finite.append(filled([size, 1], 0, "int32", like=rows) + here)
    else:
        words.append(0)
    words_of_ranks = paddle.to_tensor([words] * size, dtype="int32", place=rows.place)
    columns = [words_of_ranks, *is_not_finite, to_ranks.tokens_per_expert.unsqueeze(-1), rows]
    more = step.call.layer.most_experts - num_local_experts
    if more > 0:  # so that messages of all layers have one size
        columns.append(filled([size, more], 0, "int32", like=rows))
    message = paddle.concat(columns, axis=1)
    own, told = _read(paddle.stack([message, transport.exchange_numbers(message, step)]), step.call)
    if not step.is_checked:
        step.check(told[:, :CALL_WORDS].tolist())
    if told[:, _NOT_FINITE].any():
        bad = np.array(ranks)[told[:, _NOT_FINITE] > 0].tolist()
        _checks.bad_value(_DISPATCH, "x", "finite on all ranks", f"NaN or infinity on ranks {bad}")
    last = _ABOUT + num_local_experts
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
