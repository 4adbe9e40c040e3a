# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges in flight on another stream than the current one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import paddle

from ..backends.base import Tensors

__all__ = ["InFlight", "SideStream"]

_HIGH_PRIORITY = -1


class InFlight:
    """The end of an exchange that runs on another stream; called once, it returns the received tensors.

    The memory of the exchange lives until the current stream waits for it, also if the exchange is dropped.

    Args:
        join: lets the current stream wait for the exchange.
        finish: returns the received tensors; the current stream waits by then.
        memory: objects that the exchange uses.
    """

    def __init__(self, join: Callable[[], Any], finish: Callable[[], Any], *memory: Any) -> None:
        self._join: Callable[[], Any] | None = join
        self._finish, self._memory = finish, memory

    def __call__(self) -> Any:
        self._end()
        finish, self._finish = self._finish, lambda: None
        return finish()

    def _end(self) -> None:
        join, self._join = self._join, None
        if join is not None:
            join()
        self._memory = ()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._end()


def _device_of(place: Any) -> Any:
    """Return the place of a tensor in the form that `paddle.device` takes."""
    if place.is_gpu_place():
        return paddle.CUDAPlace(place.gpu_device_id())
    return paddle.CustomPlace(place.custom_device_type(), place.custom_device_id())


class SideStream:
    """The stream of a group's exchanges in flight on a device.

    Exchanges of a group run in the order in which they begin, on whichever stream. Events are kept and recorded again:
    Paddle lets the host wait for an event of a custom device before it destroys it. A stream that waits for an event
    waits for what was recorded by then.
    """

    def __init__(self, place: Any) -> None:
        self._device = _device_of(place)
        self._stream: Any = None
        self._begun: Any = None  # the event of the current stream at the last begin
        self._last: Any = None  # the event of the last exchange in flight that no stream has waited for
        self._free: list[Any] = []  # events of exchanges that a stream has waited for

    def _current(self) -> Any:
        """Return the current stream, as an object of Paddle's core."""
        return paddle.device.current_stream(self._device).stream_base

    def join(self) -> None:
        """Let the current stream wait for all exchanges in flight."""
        if self._last is not None:
            self._current().wait_event(self._last)
            self._last = None

    def begin(self, work: Callable[[list[Any]], Tensors], *memory: Any) -> InFlight:
        """Enqueue the work of an exchange after the work of the current stream.

        Args:
            work: returns the tensors that the exchange receives; it appends other objects that it uses to its argument.
            memory: objects that the exchange uses.
        """
        if self._stream is None:
            self._stream = paddle.device.Stream(self._device, priority=_HIGH_PRIORITY)
        side, used = self._stream.stream_base, [*memory]
        self._begun = _recorded(self._begun, self._current())
        side.wait_event(self._begun)
        try:
            with paddle.device.stream_guard(self._stream):
                made = work(used)
        finally:
            self._last = event = _recorded(self._free.pop() if self._free else None, side)
            end = InFlight(lambda: self._wait(event), lambda: made, used)
        return end

    def _wait(self, event: Any) -> None:
        """Let the current stream wait for an exchange, whose event is free then."""
        self._current().wait_event(event)
        self._free.append(event)


def _recorded(event: Any, stream: Any) -> Any:
    """Record an event, or a new one if there is none, after the work of a stream."""
    if event is None:
        return stream.record_event()
    event.record(stream)
    return event
