# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges through symmetric buffers: the buffers of a group, rows in them, and the barrier between two exchanges.

The layers of a group share its buffers. They are freed with the last layer, graph or result that uses them.
"""

from __future__ import annotations

import ctypes
import enum
import math
import uuid
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor
from paddle.distributed.communication.group import Group, _GroupManager

from .._graphs import filled
from ..backends import direct
from ..backends.base import Tensors
from .agreement import CALL_WORDS, Kind, Step, agree, check_calls, raise_for_modes
from .exchanges import End
from .streams import SideStream
from .symmetric_memory import BufferShape, allocate, granularity

__all__ = ["Barrier", "GroupBuffers", "OwnRows", "RowBuffer", "buffers_of"]

_MODES_DIFFER = 2  # PMO_GRADIENT_MODES_DIFFER
_EXCHANGE = 4  # the word of a call that is the number of the exchange
# Rows, of every 8 for another rank, that the receiver fetches after the barrier, while it works in its own memory. The
# sender writes the others before the barrier, so the link is busy in both halves. A receiver that copies rows has a
# shorter second half than one that adds them up.
FETCHED_COPIES, FETCHED_SUMS = 3, 4


class GroupBuffers:
    """The buffers of one group by key.

    Args:
        group: the ranks.
        name: the same on all ranks, and unique to these buffers.

    Attributes:
        group: ``group``.
        name: ``name``.
    """

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name
        self._registered = _GroupManager.group_map_by_id.get(group.id)  # another one if a program made the group itself
        self._made: dict[Hashable, Any] = {}

    def find(self, key: Hashable) -> Any:
        """Return the buffer of a key, or None.

        Raises:
            RuntimeError: the group was destroyed.
        """
        if _GroupManager.group_map_by_id.get(self.group.id) is not self._registered:
            self.free_if_destroyed()
            raise RuntimeError(
                f"ExpertParallel: the group of ranks {self.group.ranks} was destroyed by destroy_process_group, so its "
                "layers exchange no more tokens"
            )
        return self._made.get(key)

    def keep(self, key: Hashable, made: Any) -> Any:
        """Store the buffer of a key, and return it."""
        self._made[key] = made
        return made

    def free_if_destroyed(self) -> bool:
        """Drop the buffers if `paddle.distributed.destroy_process_group` ended the group, and return True then."""
        is_destroyed = _GroupManager.group_map_by_id.get(self.group.id) is not self._registered
        if is_destroyed:
            self._made.clear()
        return is_destroyed


# The key is the identity of a group, since a new one may have the number of a destroyed one. Buffers keep groups alive.
_living: weakref.WeakValueDictionary[int, GroupBuffers] = weakref.WeakValueDictionary()


def buffers_of(group: Group) -> GroupBuffers:
    """Return the buffers of a group that all its ranks still have, or new ones; all ranks call it together.

    A rank may have collected the last layer of a group as garbage while another has not, so they compare.
    Buffers of groups that were destroyed are dropped.
    """
    for each in list(_living.values()):
        each.free_if_destroyed()
    own = _living.get(id(group))
    names: list[tuple[str | None, str]] = []
    paddle.distributed.all_gather_object(names, (own and own.name, uuid.uuid4().hex), group=group)
    if own is None or any(name != own.name for name, _ in names):
        own = _living[id(group)] = GroupBuffers(group, names[0][1])
    return own


class OwnRows(enum.IntEnum):
    """The destination of rows that a rank sends to itself."""

    STAY = 0  # they stay in place and are read from it
    TO_BUFFER = 1
    TO_NEW_MEMORY = 2


class RowBuffer(NamedTuple):
    """A symmetric buffer for rows; row p * S + i is row i for, or from, rank p.

    Attributes:
        arrived: [P * S, d], this rank's memory.
        peers: [P * S, d], this rank's regions at all ranks.
        num_ranks: P.
        rank: this rank.
        state: of the barrier.
    """

    arrived: Tensor
    peers: Tensor
    num_ranks: int
    rank: int
    state: Tensor

    def send(
        self,
        x: Tensor,
        token_rows: Tensor,
        own: OwnRows,
        *,
        fetched: int | None = None,
        leaves_room: bool = False,
        own_rows: int = -1,
    ) -> Tensor:
        """Send rows to other ranks; a barrier has to follow.

        Args:
            x: [T, d].
            token_rows: int32 [T, C], the destination rows of each token in the buffer.
            own: the destination of rows for this rank.
            fetched: rows, of every 8, that their receiver fetches; None: the default for ``own``.
            leaves_room: whether to leave room on the device for concurrent operators.
            own_rows: O, the rows of new memory for each rank; -1: S.

        Returns:
            the rows for this rank, [P * S, d], or [P * O, d] in new memory, unless they stay in place.
        """
        views = self.arrived, self.peers
        if fetched is None:
            fetched = FETCHED_COPIES if own == OwnRows.TO_NEW_MEMORY else FETCHED_SUMS
        options = self.num_ranks, self.rank, fetched, int(own), leaves_room, own_rows
        (made,) = direct("rank_send", x, token_rows, *views, *options)
        return made

    def receive(
        self,
        token_rows: Tensor,
        own: Tensor | None = None,
        to: Tensor | None = None,
        *,
        fetched: int | None = None,
        own_rows: int = -1,
    ) -> Tensor:
        """Return the sums of each token's rows from all ranks.

        Args:
            token_rows: int32 [T, C], the rows of each token in the buffer.
            own: [P * O, d], the rows that this rank sent to itself.
            to: [T, d], the output, which already contains the rows that this rank sent to itself; C is 1 then.
            fetched: as in all ranks' `send`; None: the default for the place of this rank's rows.
            own_rows: O; -1: S.
        """
        views = self.arrived, self.peers
        if fetched is None:
            fetched = FETCHED_COPIES if own is None else FETCHED_SUMS
        options = self.state, self.num_ranks, self.rank, fetched, own_rows
        (made,) = direct("rank_receive", token_rows, *views, own, to, *options)
        return made


class Barrier:
    """The barrier of a group on one kind of device, which all its symmetric buffers share.

    Each exchange has a number. Buffers are allocated in pairs: a buffer is reused two exchanges later. The barrier of
    the exchange in between separates the two uses, because a rank reaches it only after all its work on the first.

    If ranks are in different calls, a CPU raises in the barrier. A GPU marks the state, and all later received values
    are NaN. The host raises in its next exchange after the mark has reached host memory.

    Attributes:
        state: int32 [2]; the second element is the mark.
    """

    def __init__(self, group: Group, like: Tensor) -> None:
        page, self._group = granularity(like.place), group
        flags = allocate(group, like, BufferShape(page, group.nranks, page, paddle.uint8))
        flags.arrived.zero_()
        flags.arrived[:, :1].tolist()  # waits until they are zero
        agree("ExpertParallel.dispatch", group, {})  # waits until they are zero on all ranks
        self.state = filled([2], 0, "int32", like=like)
        (report,) = direct("host_words", like, 1 + group.nranks * CALL_WORDS)
        self._report = _words_of(report)[0]
        self._places = *flags, self.state, report
        self._exchange = 0
        self._lent: list[weakref.ref[Tensor]] = []
        self._side = None if like.place.is_cpu_place() else SideStream(like.place)

    def lend(self, view: Tensor) -> None:
        """Let backward passes raise if they read a view of a buffer after the next exchange has begun.

        A rank that has passed the barrier of that exchange may write to the buffer of the previous one.
        """
        self._lent.append(weakref.ref(view))

    def next(self) -> int:
        """Begin an exchange after those in flight, and return the index of its buffer in a pair."""
        if self._report[0]:
            self._raise()
        if self._side is not None:
            self._side.join()
        self._exchange += 1
        for each in self._lent:
            view = each()
            if view is not None:
                view._bump_inplace_version()
        return self._exchange % 2

    def begin(self, work: Callable[[list[Any]], Tensors], *memory: Any) -> End:
        """Begin the work of an exchange on the side stream; on a CPU it is over when this returns.

        Args:
            work: see `SideStream.begin`.
            memory: objects that the work uses.
        """
        if self._side is None:
            made = work([])
            return lambda: made
        return self._side.begin(work, *memory)

    def wait(self, step: Step, forward_calls: Tensor | None = None, *, timeout: float) -> Tensor:
        """Let later work wait until all ranks have arrived.

        Args:
            step: the current pass of this rank's call.
            forward_calls: in a backward pass, the calls of all ranks in the forward pass. If a rank does not run the
                backward pass, this one does not wait for it.
            timeout: the time limit in seconds.

        Returns:
            int32 [P, CALL_WORDS], the calls of all ranks.
        """
        words, waits = step.words(self._exchange), math.ceil(timeout * 1000)
        gradient = int(step.kind.gradient)
        (calls,) = direct("rank_barrier", *self._places, words, forward_calls, gradient, waits)
        self._check(step, calls)
        return calls

    def arrivals(self, step: Step, timeout: float, records: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """Wait for all ranks; returns their calls and records, concurrently with the work up to operator rank_join."""
        words, waits = step.words(self._exchange), math.ceil(timeout * 1000)
        made = direct("rank_arrivals", records, *self._places, words, waits, *sizes)
        self._check(step, made[0])
        return made

    def exchange(self, operator: str, step: Step, timeout: float, tensors: Tensors, *sizes: int) -> Tensors:
        """Run an operator that sends, waits as `wait` does and receives; its first output is the calls of all ranks."""
        words, waits = step.words(self._exchange), math.ceil(timeout * 1000)
        made = direct(operator, *tensors, *self._places, words, waits, *sizes)
        self._check(step, made[0])
        return made

    def meet(self, step: Step, timeout: float) -> None:
        """Wait for all ranks on the host, before they allocate buffers together."""
        if self._side is not None:
            self._side.join()
        self.wait(step, timeout=timeout)
        self.state.tolist()
        if self._report[0]:
            self._raise()

    def _check(self, step: Step, calls: Tensor) -> None:
        """Raise if the state is marked; otherwise store the modes of all ranks, if the host need not wait for them."""
        if self._report[0]:
            self._raise()
        if calls.place.is_cpu_place():
            step.check(_words_of(calls).tolist())

    def _raise(self) -> None:
        """Raise the error that marked the state, and clear the mark."""
        reason, ranks = int(self._report[0]), self._group.ranks
        told = self._report[1:].reshape([len(ranks), CALL_WORDS]).tolist()
        self._report[0] = 0
        self.state[1:].zero_()
        if reason == _MODES_DIFFER:
            forward = Kind(told[0][0])
            kind = Kind.COMBINE_BACKWARD if forward == Kind.COMBINE else Kind.DISPATCH_BACKWARD
            raise_for_modes(kind, [words[-1] for words in told], told[0], ranks)
        self._exchange = max(words[_EXCHANGE] for words in told)  # so that ranks can continue together
        check_calls(told, ranks)


def _words_of(words: Tensor) -> NDArray:
    """Return an array that aliases a tensor's numbers in host memory."""
    memory = (ctypes.c_int32 * words.size).from_address(words.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(words.shape)
