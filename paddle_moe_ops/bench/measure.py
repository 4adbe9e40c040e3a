# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of calls, and the available memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_moe_ops import _report

from .calls import Call

ROUNDS = 5  # interleaved rounds, so that a machine that slows down does so for all calls
SAMPLE_SECONDS = 2e-3  # a sample is several short calls, so that the wait for a GPU counts little
MAX_CALLS = 20
MEMORY_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


_asked: list[int] = []  # signals


class Stopped(BaseException):
    """The process was asked to end, by a signal."""


def ask_to_stop(number: int, _: Any) -> None:
    """A handler of signals: the next sample raises. Inside of a call an exception would become an error of Paddle's."""
    _asked.append(number)


def measure(calls: Sequence[Call], seconds: float) -> list[dict[str, Any]]:
    """Time calls in interleaved rounds, each for about ``seconds``: microseconds and allocated bytes of one call."""
    peaks = [_peak_bytes(call) for call in calls]  # this warms up as well
    counts = [min(MAX_CALLS, max(1, int(SAMPLE_SECONDS / _sample(call, 1)))) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, count, found in zip(calls, counts, samples, strict=True):
            end = time.perf_counter() + seconds / ROUNDS
            found.append(_sample(call, count))
            while time.perf_counter() < end:
                found.append(_sample(call, count))
    return [_summary(found, peak) for found, peak in zip(samples, peaks, strict=True)]


def _summary(samples: list[float], peak: int | None) -> dict[str, Any]:
    names = "min_us", "p5_us", "median_us", "p95_us", "max_us"
    times = (1e6 * np.quantile(samples, (0, 0.05, 0.5, 0.95, 1))).tolist()
    return {**dict(zip(names, times, strict=True)), "samples": len(samples), "peak_bytes": peak}


def _sample(call: Call, count: int) -> float:
    """Seconds of one call, of the given number of calls."""
    if _asked:
        raise Stopped(_asked.pop())
    states = [call.prepare() for _ in range(count)]
    _synchronize()
    start = time.perf_counter()
    for state in states:
        call.run(state)
    _synchronize()
    return (time.perf_counter() - start) / count


def on_cpu() -> bool:
    """True if Paddle's current device is the CPU."""
    return paddle.get_device() == "cpu"


def _synchronize() -> None:
    if not on_cpu():
        paddle.device.synchronize()


def _peak_bytes(call: Call) -> int | None:
    """The most bytes that a call has allocated at a time, its outputs included; None on devices that do not count."""
    state = call.prepare()
    _synchronize()
    if on_cpu():
        core = paddle.base.core
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        before = core.host_memory_stat_current_value("Allocated", 0)
        call.run(state)
        return core.host_memory_stat_peak_value("Allocated", 0) - before
    if not paddle.get_device().startswith("gpu"):
        call.run(state)
        return None
    paddle.device.cuda.reset_max_memory_allocated()
    before = paddle.device.cuda.memory_allocated()
    call.run(state)
    return paddle.device.cuda.max_memory_allocated() - before


def memory_left() -> float:
    """Free bytes of the current device, as far as known; otherwise infinity."""
    if paddle.get_device().startswith("gpu"):
        total = paddle.device.cuda.get_device_properties().total_memory
        return total - paddle.device.cuda.memory_allocated()
    if not on_cpu():
        return float("inf")
    left = _report.available_memory()
    limit = MEMORY_OF_CONTAINER.read_text(encoding="ascii").strip() if MEMORY_OF_CONTAINER.is_file() else "max"
    return min(left, int(limit)) if limit.isdigit() else left
