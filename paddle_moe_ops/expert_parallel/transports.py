# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Transports of lines between the ranks of a group by collectives, and the rendezvous of the ranks on the host.

A transport sends the lines of a tensor as bits, so it supports any dtype, including float8. Sent and received parts are
in the order of the ranks. All ranks of a group run the same exchanges in the same order.

A rendezvous has a time limit. One without delay needs no messages. A rank that has waited for a while announces this in
the store of `paddle.distributed`, so a rank whose time is up can name the absent ranks.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import paddle
from paddle import Tensor
from paddle.base import core
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import beside, context_manager, dense, filled
from ..backends import compiled_backend, direct, resolve
from .agreement import Step, is_gloo
from .protocol import LineTransport
from .streams import InFlight

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "AllToAll",
    "Alone",
    "Rendezvous",
    "Scatters",
    "checked_timeout",
    "transport_for",
]

_NAME = "ExpertParallel"
_DISPATCH = f"{_NAME}.dispatch"
DEFAULT_TIMEOUT_S = 600.0
_LEAST_S, _MOST_S = 0.001, 1e6
_QUIET_S = 1.0  # until a rank announces that it waits
_NAP_S = 0.01  # between polls from then on
_STORE_S = 5.0  # for the store to answer
_Result = TypeVar("_Result")
_IsDone = Callable[[float], bool]  # waits for at most this number of seconds


def checked_timeout(function: str, value: Any) -> float:
    """Return a timeout in seconds as a float; raises if it is not a number in range."""
    seconds = _checks.number(function, "timeout", value)
    if not _LEAST_S <= seconds <= _MOST_S:
        _checks.bad_value(function, "timeout", f"a number of seconds from {_LEAST_S:g} to {_MOST_S:g}", value)
    return seconds


class Rendezvous:
    """The rendezvous of a group's ranks on the host, in the same order; a rank that waits too long raises.

    Args:
        group: the ranks.
        seconds: the time limit of each rendezvous.
    """

    def __init__(self, group: Group, seconds: float) -> None:
        self._group, self._seconds = group, seconds
        self._waits = _waits_of(group)

    def call(self, function: str, work: Callable[[], _Result]) -> _Result:
        """Return the result of work that blocks until all ranks have arrived.

        The work runs in its own thread, which keeps waiting if a rank does not arrive.

        Args:
            function: name that begins the message.
            work: the function to run.

        Raises:
            RuntimeError: it took too long, or failed.
        """
        job = _Job(work)
        self._wait(function, job.done.wait)
        if job.error is not None:
            with self.naming_ranks(function):  # here, since the store serves one thread at a time
                raise job.error
        return job.results[0]

    def wait(self, function: str, task: Any) -> None:
        """Wait for a task of `paddle.distributed` that does not block.

        Args:
            function: name that begins the message.
            task: of a collective with ``sync_op=False``.

        Raises:
            RuntimeError: it took too long.
        """
        begin = time.monotonic()

        def is_done(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while not task.is_completed():
                now = time.monotonic()
                if now >= end:
                    return False
                if now - begin > _QUIET_S:  # until then, busy polling is worth its time
                    time.sleep(min(_NAP_S, end - now))
            return True

        self._wait(function, is_done)
        task.wait()

    def largest(self, function: str, numbers: Tensor) -> None:
        """Replace each number by its maximum over the ranks.

        Args:
            function: name that begins the message.
            numbers: of one shape and dtype on all ranks.

        Raises:
            RuntimeError: it took too long, or failed.
        """
        how: dict[str, Any] = {"op": paddle.distributed.ReduceOp.MAX, "group": self._group}
        if is_gloo(self._group):  # gloo's collectives always block
            self.call(function, lambda: paddle.distributed.all_reduce(numbers, **how))
        else:
            with self.naming_ranks(function, counts=True):  # devices that are not asynchronous fail here
                task = paddle.distributed.all_reduce(numbers, **how, sync_op=False)
            self.wait(function, task)

    @context_manager
    def naming_ranks(self, function: str, *, counts: bool = False) -> Iterator[None]:
        """Convert the error of a transfer to one that names the ranks that ended.

        The other ranks fail or wait, and announce this in the store.

        Args:
            function: name that begins the message.
            counts: whether the transfer is its own rendezvous, and not a part of a `call`. If so, announcements for
                earlier rendezvous do not count.

        Raises:
            RuntimeError: the transfer failed.
        """
        if counts:
            self._waits.came += 1
        try:
            yield
        except (RuntimeError, OSError, ValueError) as error:  # errors of the backends of paddle.distributed
            lines = str(error).strip().splitlines() or ["no reason given"]
            self._waits.announce()
            absent = self._absent(_nap, min(_QUIET_S, self._seconds / 4))
            ranks, rank = self._group.ranks, self._group.ranks[self._group.rank]
            others = f"the other ranks of {ranks}, one of which may have ended or failed"
            if absent:
                others = f"ranks {absent} of {ranks}, which ended or do something else"
            raise RuntimeError(f"{function}: rank {rank} could not exchange data with {others}: {lines[-1]}") from error

    def _wait(self, function: str, is_done: _IsDone) -> None:
        begin, quiet = time.monotonic(), min(_QUIET_S, self._seconds / 4)
        self._waits.came += 1
        if is_done(quiet):
            return
        self._waits.announce()
        if is_done(max(begin + self._seconds - time.monotonic(), 0.0)):
            return
        absent = self._absent(is_done, quiet)
        if is_done(0.0):
            return
        ranks, others = self._group.ranks, f"of {self._group.ranks}"
        if absent is None:
            reason = (
                f"for others {others}; which of them did not come is unknown, since the store of paddle.distributed, "
                "which the process of rank 0 has, does not answer: that process may have ended"
            )
        elif absent:
            reason = f"for ranks {absent} {others}, which did not come: they ended, hang or do something else"
        else:
            reason = f"though all ranks {others} do: they called different functions, or an exchange before failed"
        raise RuntimeError(f"{function}: rank {ranks[self._group.rank]} waited {self._seconds:g} s {reason}")

    def _absent(self, is_done: _IsDone, quiet: float) -> list[int] | None:
        """Return the ranks that have not announced that they wait in this rendezvous; None if that is unknown.

        A rank that arrived a moment ago announces it after its quiet time.
        """
        group, end = self._group, time.monotonic() + 2 * quiet
        absent: list[int] | None = [rank for rank in range(group.nranks) if rank != group.rank]
        while absent:
            absent = self._waits.absent_of(absent)
            if time.monotonic() > end or is_done(quiet / 4):
                break
        return None if absent is None else [group.ranks[rank] for rank in absent]


def _nap(seconds: float) -> bool:
    """Sleep, and return False, as an `_IsDone` that never ends."""
    time.sleep(seconds)
    return False


class _Waits:
    """The count of a group's rendezvous, and the ones in which its ranks wait. Ranks are numbers within the group.

    Attributes:
        came: number of rendezvous in which this rank has arrived.
    """

    def __init__(self, group: Group) -> None:
        self._key = f"paddle_moe_ops/waits/{group.id}/{'-'.join(map(str, group.ranks))}"
        self._rank, self.came, self._told = group.rank, 0, 0
        self._answers = True

    def announce(self) -> None:
        """Announce that this rank waits in the last rendezvous."""
        if self._add(self._rank, self.came - self._told) is not None:
            self._told = self.came

    def absent_of(self, ranks: list[int]) -> list[int] | None:
        """Return the ranks that wait neither in the last rendezvous nor in a later one; None if the store is silent."""
        absent = []
        for rank in ranks:
            number = self._add(rank, 0)  # a counter that does not exist is zero; `get` would wait for it
            if number is None:
                return None
            if number < self.came:
                absent.append(rank)
        return absent

    def _add(self, rank: int, number: int) -> int | None:
        """Add to the counter of a rank, and return its value."""
        if not self._answers:
            return None
        job = _Job(lambda: int(core.create_or_get_global_tcp_store().add(f"{self._key}/{rank}", number)))
        self._answers = job.done.wait(_STORE_S)
        try:
            if not self._answers:
                return None
            if job.error is not None:
                raise job.error
            return job.results[0]
        except (RuntimeError, ValueError, OSError):  # Paddle's errors of sockets
            self._answers = False
            return None


class _Job(Generic[_Result]):
    """A function that runs in a daemon thread, which does not keep the process from ending.

    Attributes:
        done: set once the work is done.
        error: the error of the finished work, or None.
        results: the result of the finished work, unless it raised.
    """

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work, self.done = work, threading.Event()
        self.results: list[_Result] = []
        self.error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True, name="paddle_moe_ops").start()

    def _run(self) -> None:
        try:
            self.results.append(self._work())
        except BaseException as error:  # for the thread that waits
            self.error = error
        finally:
            self.done.set()


_waits_of_groups: dict[str, _Waits] = {}


def _waits_of(group: Group) -> _Waits:
    """Return the one `_Waits` of a group, which counts all its rendezvous."""
    key = f"{group.id} {group.ranks}"
    if key not in _waits_of_groups:
        _waits_of_groups[key] = _Waits(group)
    return _waits_of_groups[key]


class Alone(LineTransport):
    """The transport of a group of one rank."""

    def exchange(self, lines: Tensor, sent: Sequence[int], received: Sequence[int], step: Step) -> Tensor:
        return beside(lines.detach().clone(), lines)  # a clone without elements may be on the host

    def exchange_numbers(self, numbers: Tensor, step: Step) -> Tensor:
        return numbers.clone()


class AllToAll(LineTransport):
    """The transport by `paddle.distributed.alltoall_single`, for NCCL and every other backend that supports it.

    The host reads only the counts of lines. So ranks exchange a code of the pass before its first lines, and the device
    compares the codes. Adding the code as a line of the payload would copy the payload.

    Args:
        group: the participating ranks.
        timeout: seconds that the host waits for the others, in exchanges that wait.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        self._group, self._rendezvous = group, Rendezvous(group, timeout)

    def exchange(self, lines: Tensor, sent: Sequence[int], received: Sequence[int], step: Step) -> Tensor:
        return self._begin(lines, sent, received, step, sync_op=True)[1]()

    def start_exchange(
        self, lines: Tensor, sent: Sequence[int], received: Sequence[int], step: Step
    ) -> Callable[[], Tensor]:
        task, finish, travelling = self._begin(lines, sent, received, step, sync_op=False)
        return finish if task is None else InFlight(functools.partial(self._wait, task), finish, travelling)

    def _wait(self, task: Any) -> None:
        with self._rendezvous.naming_ranks(_NAME):
            task.wait()

    def _begin(
        self, lines: Tensor, sent: Sequence[int], received: Sequence[int], step: Step, *, sync_op: bool
    ) -> tuple[Any, Callable[[], Tensor], Tensor]:
        """Enqueue an exchange on the communicator's stream.

        Returns:
            the task to wait for, None if nothing travels; the function that then returns the received lines; the memory
            of the sent ones.
        """
        payload, lines, rank = lines, _as_bytes(lines), self._group.rank
        codes = self._codes_of(step)
        width = lines.shape[1]
        if width == 0:
            empty = _from_bytes(filled([sum(received), 0], 0, lines.dtype, like=lines), payload)
            return None, lambda: empty, lines
        # Custom devices have no empty tensors. If nothing is sent or received, this rank sends a line to itself.
        spare = int(sum(sent) == 0 or sum(received) == 0)
        sent, received = list(sent), list(received)
        if spare:
            before, own = sum(sent[:rank]), paddle.zeros([1, width], lines.dtype)
            lines = paddle.concat([each for each in (lines[:before], own, lines[before:]) if each.shape[0]])
            sent[rank], received[rank] = sent[rank] + 1, received[rank] + 1
        out = paddle.zeros([sum(received), width], lines.dtype)
        with self._rendezvous.naming_ranks(_NAME):
            task = paddle.distributed.alltoall_single(
                out, lines, in_split_sizes=sent, out_split_sizes=received, group=self._group, sync_op=sync_op
            )

        def finish() -> Tensor:
            made = out
            if spare:
                before = sum(received[:rank])
                parts = [each for each in (out[:before], out[before + 1 :]) if each.shape[0]]
                made = paddle.concat(parts) if parts else filled([0, width], 0, out.dtype, like=out)
            arrived = _from_bytes(made, payload)
            return arrived if codes is None else _spoiled(arrived, codes, step.code())

        return task, finish, lines

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


class Scatters(LineTransport):
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
        self, lines: Tensor, sent: Sequence[int], received: Sequence[int], step: Step, function: str = _NAME
    ) -> Tensor:
        payload, lines = lines, _as_bytes(lines)
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


def transport_for(name: str, group: Group, timeout: float) -> LineTransport:
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
