# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Streams on which Paddle's kernels run, with marks in the order of their work: a GPU's stream, or this process."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import paddle

__all__ = ["GpuStream", "HostStream", "stream_of"]

_DELAY_BYTES = 1 << 30
_US_OF_DELAY = 200.0  # that filling so much takes at least


class GpuStream:
    """The stream of Paddle's kernels, through the driver."""

    def __init__(self, place: Any) -> None:
        self._place, self._driver = place, ctypes.CDLL("libcuda.so.1")
        self._stream = self._current()
        self._delay = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(self._delay), ctypes.c_size_t(_DELAY_BYTES))

    def _current(self) -> ctypes.c_void_p:
        """The current stream of Paddle's kernels."""
        core, place = paddle.base.core, self._place
        if place.is_gpu_place():
            return ctypes.c_void_p(core._get_current_stream(place.gpu_device_id()).cuda_stream)
        given = place.custom_device_type(), place.custom_device_id()
        return ctypes.c_void_p(core._get_current_custom_device_stream(*given).raw_stream)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} answered {status}")

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes on the device."""
        self._call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size),
            self._stream,
        )

    def delay(self, microseconds: float) -> None:
        """Keep the GPU busy, so that later work is queued before it starts."""
        for _ in range(int(microseconds / _US_OF_DELAY) + 1):
            self._call("cuMemsetD8Async", self._delay, 0, ctypes.c_size_t(_DELAY_BYTES), self._stream)

    def mark(self, *, on_current: bool = False) -> Any:
        """A mark after all work so far, on the stream of this object, or on the one that is current now."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 0)
        self._call("cuEventRecord", event, self._current() if on_current else self._stream)
        return event

    def microseconds(self, begin: Any, marks: Sequence[Any]) -> list[float]:
        """From a mark to others, which are given up, as is the first."""
        found = []
        for each in marks:
            milliseconds = ctypes.c_float()
            self._call("cuEventSynchronize", each)
            self._call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, each)
            found.append(milliseconds.value * 1000)
        for each in (begin, *marks):
            self._call("cuEventDestroy_v2", each)
        return found

    def finish(self) -> None:
        """Wait for all work."""
        paddle.device.synchronize()


class HostStream:
    """The same on a CPU, whose calls return when their work is done."""

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def delay(self, microseconds: float) -> None:
        """Nothing is queued."""

    def mark(self, *, on_current: bool = False) -> float:
        return time.perf_counter()

    def microseconds(self, begin: float, marks: Sequence[float]) -> list[float]:
        return [(each - begin) * 1e6 for each in marks]

    def finish(self) -> None:
        """All work is done."""


def stream_of(place: Any) -> GpuStream | HostStream:
    """The stream of the kernels of a place's tensors."""
    return HostStream() if place.is_cpu_place() else GpuStream(place)
