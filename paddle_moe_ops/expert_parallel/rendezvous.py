# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Where ranks that share memory wait for each other, and compare the calls that they are in."""

from __future__ import annotations

import ctypes
import math
import weakref

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .._graphs import filled
from ..backends import direct
from .calls import CALL_WORDS, Kind, Step, check_calls, raise_for_modes
from .groups import agree
from .windows import Window, granularity, share

__all__ = ["Rendezvous"]

_MODES_DIFFER = 2  # PMO_GRADIENT_MODES_DIFFER
_EXCHANGE = 4  # the word of a call that is the number of the exchange


class Rendezvous:
    """The barrier of a group on one kind of device, which all its buffers share.

    Each exchange has a number. Buffers come in pairs: those of one parity are used again two exchanges later, and
    between the two uses lies the barrier of the exchange between, which a rank reaches only after all its work on the
    first.

    Ranks that are in different calls raise: on a CPU in the barrier. A GPU marks the state, from which on what it
    receives is NaN; the host raises when it comes to an exchange next and the mark has reached its memory.
    """

    def __init__(self, group: Group, like: Tensor) -> None:
        page, self._group = granularity(like.place), group
        flags = share(group, like, Window(page, group.nranks, page, paddle.uint8))
        flags.arrived.zero_()
        flags.arrived[:, :1].tolist()  # waits until they are zero
        agree("ExpertParallel.dispatch", group, {})  # waits until they are zero on all ranks
        self._state = filled([2], 0, "int32", like=like)
        (report,) = direct("host_words", like, 1 + group.nranks * CALL_WORDS)
        self._report = _words_of(report)[0]
        self._places = *flags, self._state, report
        self._exchange = 0
        self._lent: list[weakref.ref[Tensor]] = []

    @property
    def state(self) -> Tensor:
        """int32 [2], the second one the mark."""
        return self._state

    def lend(self, view: Tensor) -> None:
        """Have backward passes refuse to read a view of a buffer once an exchange has begun.

        A rank that has passed the barrier of that exchange may write to the buffer of the one before.
        """
        self._lent.append(weakref.ref(view))

    def next(self) -> int:
        """Begin an exchange, and say which of two buffers it uses."""
        self._raise_if_marked()
        self._exchange += 1
        for each in self._lent:
            view = each()
            if view is not None:
                view._bump_inplace_version()
        return self._exchange % 2

    def wait(self, step: Step, timeout: float, forward_calls: Tensor | None = None) -> Tensor:
        """Make later work wait until all ranks have come here.

        Args:
            step: the pass of the call that this rank is in.
            timeout: seconds to wait for.
            forward_calls: in a backward pass, the calls of all ranks in the forward pass. If a rank does not run the
                backward pass, this one does not wait for it.

        Returns:
            int32 [P, CALL_WORDS], the calls of all ranks.
        """
        words, waits = step.words(self._exchange), math.ceil(timeout * 1000)
        gradient = int(step.kind.gradient)
        (calls,) = direct("rank_barrier", *self._places, words, forward_calls, gradient, waits)
        self._raise_if_marked()
        self._keep_modes(step, calls)
        return calls

    def arrivals(self, step: Step, timeout: float, records: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """The calls of all ranks and what they told this one; beside what is called next, up to operator rank_join."""
        words, waits = step.words(self._exchange), math.ceil(timeout * 1000)
        made = direct("rank_arrivals", records, *self._places, words, waits, *sizes)
        self._raise_if_marked()
        self._keep_modes(step, made[0])
        return made

    def meet(self, step: Step, timeout: float) -> None:
        """Wait for all ranks on the host, before they make buffers together."""
        self.wait(step, timeout)
        self._state.tolist()
        self._raise_if_marked()

    def _keep_modes(self, step: Step, calls: Tensor) -> None:
        """Let the host know the modes of all ranks, if it need not wait for them."""
        if calls.place.is_cpu_place():
            step.check(_words_of(calls).tolist())

    def _raise_if_marked(self) -> None:
        reason, ranks = int(self._report[0]), self._group.ranks
        if reason == 0:
            return
        told = self._report[1:].reshape([len(ranks), CALL_WORDS]).tolist()
        self._report[0] = 0
        self._state[1:].zero_()
        if reason == _MODES_DIFFER:
            forward = Kind(told[0][0])
            kind = Kind.COMBINE_BACKWARD if forward == Kind.COMBINE else Kind.DISPATCH_BACKWARD
            raise_for_modes(kind, [words[-1] for words in told], told[0], ranks)
        self._exchange = max(words[_EXCHANGE] for words in told)  # ranks may go on together
        check_calls(told, ranks)


def _words_of(words: Tensor) -> NDArray:
    """Numbers in memory of the host, which the tensor owns."""
    memory = (ctypes.c_int32 * words.size).from_address(words.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(words.shape)
