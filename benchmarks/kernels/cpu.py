# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark on the CPU: the C core on arrays that exist, the public functions with new outputs, and their peers.

The caches are emptied before a cold sample by reading as many bytes as the last-level cache holds.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np

from paddle_moe_ops import _env, _report
from tests.core.binding import Core

from .core import CoreCalls
from .cpu_arrays import ArrayInputs, memory_needed
from .cpu_check import ArrayCheck
from .cpu_memory import Memory
from .device import Body, Captured, Implementation, Outputs, Unsupported
from .operators import Library, difference, implementations
from .problem import Problem
from .results import Row
from .shapes import Operation

__all__ = ["CpuDevice"]

_SECONDS_PER_TURN = 1.5  # a round ends, with one sample at least: some peers take seconds
_POISON = 0xA5
_ASSUMED_CACHE_BYTES = 32 << 20


class CpuDevice:
    """The cores that this process may use."""

    name = "cpu"
    modes: tuple[str, ...] = ("cpu",)

    def __init__(self, core_library: Path) -> None:
        if not core_library.is_file():
            raise ValueError(f"--core-library must be libpmo_core.so (`make core` builds it), but got {core_library}")
        self.core = Core(core_library)
        self.core.set_num_threads(_env.num_threads() or 0)
        self.threads = self.core.num_threads()
        self.cache_bytes = _last_level_cache_bytes()
        self._flush_buffer = np.ones(self.cache_bytes // 8, np.int64)
        self.memory = Memory(self.threads)
        self.left_out: dict[str, str] = {}
        makers: dict[str, Callable[[], list[Implementation]]] = {
            "core": self._core_implementations,
            "paddle": lambda: import_module(f"{__package__}.cpu_paddle").paddle_implementations(),
            "numpy": lambda: implementations(Library.NUMPY, np),
            "torch": lambda: import_module(f"{__package__}.cpu_torch").torch_implementations(self.threads),
        }
        self.implementations: list[Implementation] = []
        for name, make in makers.items():
            try:
                self.implementations += [_within_memory(implementation) for implementation in make()]
            except ImportError as error:
                self.left_out[name] = str(error)

    def _core_implementations(self) -> list[Implementation]:
        calls = CoreCalls(self.core, note="outputs are there before the call")
        ours = [each for library in (Library.CORE, Library.CORE_OTHERWISE) for each in implementations(library, calls)]
        return [*ours, self.memory.copying(), self.memory.reading()]

    def machine(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "cache_bytes": self.cache_bytes,
            "load": round(os.getloadavg()[0], 2),
            "paddle": _version("paddlepaddle"),
            "numpy": np.__version__,
            "torch": _version("torch"),
        }

    def measure_ceilings(self, samples: int) -> dict[str, Any]:
        """The fastest large copy, by one thread or by all, and the fastest reading."""
        return {"copy_gbps": self.memory.copy_gbps(samples), "read_gbps": self.memory.read_gbps(samples)}

    def load(self, problem: Problem) -> ArrayInputs:
        return ArrayInputs(problem)

    def capture(self, body: Body, mode: str) -> Captured:
        held: list[Outputs] = []

        def launch() -> None:
            held[:] = [body.run()]

        def outputs() -> Outputs:
            """Outputs of the last launch, which are then dropped: a new call must not find old outputs in memory."""
            if not held:
                launch()
            return held.pop()

        return Captured(launch, outputs, None)

    def check(self, operation: Operation, inputs: ArrayInputs, captured: Captured, body: Body) -> str | None:
        for array in captured.outputs().values():
            if isinstance(array, np.ndarray):
                np.atleast_1d(array).view(np.uint8)[...] = _POISON
        outputs, compare = body.results(captured.outputs()), ArrayCheck(inputs, body.exactness)
        if "copy" in outputs:
            return compare.unequal("copy", outputs["copy"], np.ones_like(outputs["copy"]))
        return difference(operation, compare, outputs)

    def sample(self, captured: Captured, count: int, cold: bool) -> list[float]:
        samples: list[float] = []
        end = time.perf_counter() + _SECONDS_PER_TURN
        while len(samples) < count and (not samples or time.perf_counter() < end):
            if cold:
                self._flush_buffer.max()
            start = time.perf_counter()
            captured.launch()
            samples.append((time.perf_counter() - start) * 1e6)
            captured.outputs()
        return samples

    def probe(self, operation: Operation, problem: Problem, samples: int) -> tuple[str, float] | None:
        """None: on a CPU the copy of as many bytes is an implementation, interleaved with the others."""
        return None

    def published(self, empty: Row, copy_gbps: float) -> list[tuple[str, float, str]]:
        return []

    def release(self) -> None:
        gc.collect()


def _within_memory(implementation: Implementation) -> Implementation:
    """The same, for problems that fit into the memory that is left."""

    def prepare(operation: Operation, inputs: ArrayInputs) -> Body:
        needed, left = memory_needed(inputs.problem), _report.available_memory()
        if needed > left:
            raise Unsupported(f"needs about {needed / 1e9:.0f} GB of memory, and {left / 1e9:.0f} GB are left")
        return implementation.prepare(operation, inputs)

    return Implementation(implementation.name, implementation.operations, prepare)


def _last_level_cache_bytes() -> int:
    """Bytes of the first core's largest cache, as the system reports it."""
    sizes = [
        int(path.read_text(encoding="ascii").strip().removesuffix("K")) << 10
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=_ASSUMED_CACHE_BYTES)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
