# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Speed of this process's copies and reads of memory: the C library on contiguous parts, one for each thread."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .cpu_arrays import ArrayInputs
from .device import Body, Implementation, Unsupported
from .operators import OPERATIONS, OPERATORS, minimum_bytes, probe_work, variant_of
from .shapes import Operation

__all__ = ["Memory"]

_LARGE_BYTES = 1 << 29
_TRIALS = 5


class Memory:
    """Copies and reads by one thread or by ``threads``, whichever is faster for a size."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def copy_gbps(self, samples: int) -> float:
        """Bytes read and written per nanosecond in a copy larger than any cache, between pages that exist."""
        source, target = np.ones(_LARGE_BYTES, np.uint8), np.ones(_LARGE_BYTES, np.uint8)
        return 2 * _LARGE_BYTES / _median_ns(self._copy(source, target), samples)

    def read_gbps(self, samples: int) -> float:
        """The same for reading."""
        return _LARGE_BYTES / _median_ns(self._read(np.ones(_LARGE_BYTES, np.uint8)), samples)

    def reading(self) -> Implementation:
        """ "read": reading as many bytes as an operation reads that writes little, by one thread or by all."""

        def prepare(operation: Operation, inputs: ArrayInputs) -> Body:
            size = minimum_bytes(operation, inputs.problem).read
            if size == 0:
                raise Unsupported("there is nothing to read")
            read = self._read(np.ones(size, np.uint8))

            def run() -> dict[str, Any]:
                read()
                return {"copy": np.ones(1, np.uint8)}  # nothing of it could be wrong

            return Body(run, note="the bytes that are read alone, in one stream or two, whichever is faster")

        mostly_read = tuple(operation.key for operation in OPERATIONS if variant_of(operation).mostly_read)
        return Implementation("read", mostly_read, prepare)

    def copying(self) -> Implementation:
        """ "memcpy": a copy that reads and writes as many bytes as the operation in all, without any map."""

        def prepare(operation: Operation, inputs: ArrayInputs) -> Body:
            size = probe_work(operation, inputs.problem).total // 2
            if size == 0:
                raise Unsupported("there are no rows to move")
            source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
            copy = self._copy(source, target)

            def run() -> dict[str, Any]:
                copy()
                return {"copy": target}

            return Body(run, note="a copy of as many bytes")

        moving = tuple(operation.key for operation in OPERATIONS if OPERATORS[operation.op].probe)
        return Implementation("memcpy", moving, prepare)

    def _copy(self, source: np.ndarray, target: np.ndarray) -> Callable[[], None]:
        def part(begin: int, end: int) -> None:
            ctypes.memmove(target.ctypes.data + begin, source.ctypes.data + begin, end - begin)

        return self._fastest(part, source.size)

    def _read(self, source: np.ndarray) -> Callable[[], None]:
        """A search for a byte that is not there, or a comparison of one half with the other."""
        library = ctypes.CDLL(None)
        library.memchr.restype = ctypes.c_void_p
        library.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        library.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        half = source.size // 2

        def search(begin: int, end: int) -> None:
            library.memchr(source.ctypes.data + begin, 0, end - begin)

        def compare(begin: int, end: int) -> None:
            first = source.ctypes.data + begin // 2
            library.memcmp(first, first + half, (end - begin) // 2)

        return min((self._fastest(part, source.size) for part in (search, compare)), key=_trial_ns)

    def _fastest(self, part: Callable[[int, int], None], size: int) -> Callable[[], None]:
        """``part(begin, end)`` over [0, size) as a call, by the better number of threads."""
        bounds = [(size * i // self.threads, size * (i + 1) // self.threads) for i in range(self.threads)]

        def run_all() -> None:
            for done in [self._pool.submit(part, *bound) for bound in bounds]:
                done.result()

        return min((lambda: part(0, size), run_all), key=_trial_ns)


def _trial_ns(call: Callable[[], None]) -> float:
    return _median_ns(call, _TRIALS)


def _median_ns(call: Callable[[], None], samples: int) -> float:
    call()
    times = []
    for _ in range(samples):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return float(np.median(times))
