# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of a group's ranks on the host, with a time limit.

A rendezvous without delay needs no messages. A rank that has waited for a while announces this in the
store of `paddle.distributed`, so a rank whose time is up can name the absent ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import paddle
from paddle import Tensor
from paddle.base import core
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import context_manager
from .agreement import is_gloo

__all__ = ["DEFAULT_TIMEOUT_S", "Rendezvous", "checked_timeout"]

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
