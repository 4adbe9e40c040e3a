# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Memory ceilings of the GPU, measured in the same process and by the same timer as the operators.

The kernels of ``ceilings.cu`` are compiled with nvcc when they are first needed. Each is tried with several grids and
the fastest counts.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .cuda_timer import CudaTimer
from .device import Body, Outputs
from .model import Kind, Work

__all__ = ["Ceilings"]

SOURCE = Path(__file__).with_name("ceilings.cu")
ROOT = Path(__file__).resolve().parents[2]

_VECTOR = 16  # bytes
_LARGE = 2 << 30  # bytes, so that the probe is memory-bound
_BLOCKS = (256, 512, 1024)
# Blocks per multiprocessor of grids that stride; 0 is a thread for each vector.
_BLOCKS_PER_SM = (0, 8, 16, 64)
_SWEEP_SAMPLES = 9


class Ceilings:
    """The probes, and their measurements in this process."""

    def __init__(self, timer: CudaTimer) -> None:
        """Compile the probes.

        Raises:
            RuntimeError: nvcc is missing or refuses the source.
        """
        self._timer = timer
        # Outside of a checkout there is no build folder; the compiled probes then go when the process does.
        checkout = (ROOT / "setup.py").is_file()
        self._temporary = None if checkout else tempfile.TemporaryDirectory(prefix="paddle_moe_ops_bench_")
        folder = Path(self._temporary.name) if self._temporary else ROOT / "build" / "bench"
        self._library = ctypes.CDLL(str(_compiled(folder)))
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        self._library.pmo_probe.argtypes = [
            *(ctypes.c_int, pointer, pointer, pointer, size, size, size, ctypes.c_int, ctypes.c_int, pointer)
        ]
        self._measured: dict[Work, float] = {}

    def median(self, work: Work, samples: int) -> float:
        """Microseconds of the fastest launch configuration that was found for a work."""
        if work not in self._measured:
            self._measured[work] = self._measure(work, samples)
        return self._measured[work]

    def general(self, samples: int) -> dict[str, Any]:
        """Speeds at a large size in 1e9 bytes per second, reads and writes counted, and floors in microseconds."""
        works = {
            "write_gbps": Work(Kind.WRITE, _LARGE, 0),
            "read_gbps": Work(Kind.READ, _LARGE, 0),
            "copy_kernel_gbps": Work(Kind.FANOUT, _LARGE, _LARGE),
            "fanout_1_to_8_gbps": Work(Kind.FANOUT, _LARGE // 8, _LARGE),
            "reduce_8_to_1_gbps": Work(Kind.REDUCE, _LARGE // 8, _LARGE),
            "exchange_8_gbps": Work(Kind.EXCHANGE, _LARGE // 8, _LARGE),
        }
        speeds = {name: work.total / self.median(work, samples) / 1e3 for name, work in works.items()}
        return {
            **speeds,
            "floor_one_launch_us": self._time(self._empty(1), samples),
            "floor_two_launches_us": self._time(self._empty(2), samples),
        }

    def _measure(self, work: Work, samples: int) -> float:
        if work.kind == Kind.EMPTY:
            return self._time(self._empty(1), samples)

        def sweep_median(call: Callable[[], None]) -> float:
            return float(np.median(self._timer.sample(call, _SWEEP_SAMPLES, cold=True)))

        return self._time(min(self._configurations(work), key=sweep_median), samples)

    def _time(self, call: Callable[[], None], samples: int) -> float:
        """The median of a call as the operators are timed: from a graph, with cold caches."""

        def run() -> Outputs:
            call()
            return {}

        captured = self._timer.capture(Body(run), "graph")
        return float(np.median(self._timer.sample(captured.launch, samples, cold=True)))

    def _empty(self, launches: int) -> Callable[[], None]:
        def call() -> None:
            for _ in range(launches):
                self._launch(Kind.EMPTY, None, None, None, (0, 0, 0), 1, 32)

        return call

    def _configurations(self, work: Work) -> list[Callable[[], None]]:
        """The work's launch with every grid and block size worth trying."""
        n = max(work.shared // _VECTOR, 1)
        streamed = work.streamed // _VECTOR
        sizes = (n, streamed // n, streamed % n)
        shared = torch.ones(n * _VECTOR, dtype=torch.uint8, device="cuda")
        others = torch.ones(max(streamed, 1) * _VECTOR, dtype=torch.uint8, device="cuda")
        x, z, y = {
            Kind.WRITE: (None, None, shared),
            Kind.READ: (shared, None, others),
            Kind.FANOUT: (shared, None, others),
            Kind.REDUCE: (others, None, shared),
            Kind.EXCHANGE: (shared, others, torch.empty_like(others)),
        }[work.kind]
        processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

        def call_of(grid: int, block: int) -> Callable[[], None]:
            return lambda: self._launch(work.kind, x, z, y, sizes, grid, block)

        grids = {
            (min(-(-n // block), per_sm * processors if per_sm else 1 << 30), block)
            for block in _BLOCKS
            for per_sm in _BLOCKS_PER_SM
        }
        return [call_of(grid, block) for grid, block in sorted(grids)]

    def _launch(
        self,
        kind: Kind,
        x: torch.Tensor | None,
        z: torch.Tensor | None,
        y: torch.Tensor | None,
        sizes: tuple[int, int, int],
        grid: int,
        block: int,
    ) -> None:
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (x, z, y))
        stream = torch.cuda.current_stream().cuda_stream
        status = self._library.pmo_probe(kind, *pointers, *sizes, grid, block, stream)
        if status != 0:
            raise RuntimeError(f"a {kind.name.lower()} probe must launch, but CUDA error {status} came back")


def _compiled(folder: Path) -> Path:
    """The compiled probes for the current GPU; compiled again when the source, the command or the GPU changes."""
    nvcc = _nvcc()
    major, minor = torch.cuda.get_device_capability()
    target = f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"
    command = [nvcc, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", target, str(SOURCE)]
    key = hashlib.sha256(SOURCE.read_bytes() + repr(command).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"ceilings-{key}.so"
    if not library.is_file():
        done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"nvcc must compile {SOURCE.name}, but:\n{done.stdout}{done.stderr}")
    return library


def _nvcc() -> str:
    from torch.utils.cpp_extension import CUDA_HOME

    found = shutil.which("nvcc") or (shutil.which(str(Path(CUDA_HOME) / "bin" / "nvcc")) if CUDA_HOME else None)
    if found is None:
        raise RuntimeError("the probes need nvcc, but it was not found")
    return found
