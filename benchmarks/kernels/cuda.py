# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark on an NVIDIA GPU: PyTorch for memory, streams and graphs, our operators through the C core."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .ceilings import Ceilings
from .core import CoreCalls
from .core_cuda import CudaCore, array_at
from .cuda_timer import CudaTimer
from .device import Body, Captured, Implementation
from .operators import Library, difference, implementations, probe_work
from .problem import Problem
from .published import published_rows
from .results import Row
from .shapes import Operation
from .tensor_check import TensorCheck, poison
from .tensors import TensorInputs
from .torch_device import TorchDevice, gpu_facts
from .transformer_engine import TransformerEngine

__all__ = ["CudaDevice"]

_COPY_BYTES = (1 << 30, 4 << 30)


class CudaDevice:
    """The current GPU."""

    name = "cuda"
    modes: tuple[str, ...] = ("graph", "eager")

    def __init__(self, core_library: Path, te_wheel_dir: Path | None = None, probes: bool = True) -> None:
        """Load the core and the peers, and compile the probes.

        Args:
            core_library: libpmo_core.so with CUDA operators.
            te_wheel_dir: Folder with the wheel of TransformerEngine, packed or unpacked.
            probes: True compiles and runs the kernels that measure memory ceilings.

        Raises:
            ValueError: there is no GPU or no such library, or it has no CUDA operators.
        """
        if not torch.cuda.is_available():
            raise ValueError("--device cuda needs an NVIDIA GPU that PyTorch can use, but there is none")
        if not core_library.is_file():
            raise ValueError(f"--core-library must be a built libpmo_core.so, but {core_library} does not exist")
        try:
            core = CudaCore(core_library)
        except (OSError, AttributeError) as error:
            raise ValueError(f"--core-library must be a libpmo_core.so with CUDA operators, but: {error}") from error
        self.timer = CudaTimer()
        self.left_out: dict[str, str] = {}
        calls = CoreCalls(core, as_array=array_at)
        handles: dict[Library, Callable[[], Any]] = {
            Library.CORE: lambda: calls,
            Library.TRITON: _triton,
            Library.CORE_OTHERWISE: lambda: calls,
            Library.TORCH: lambda: torch,
            Library.TRANSFORMER_ENGINE: lambda: TransformerEngine(_given(te_wheel_dir)),
        }
        self.implementations: list[Implementation] = []
        for library, handle in handles.items():
            try:
                self.implementations += implementations(library, handle(), gpu=True)
            except (ImportError, ValueError) as error:
                self.left_out[library.value] = str(error)
        self.ceilings: Ceilings | None = None
        try:
            self.ceilings = Ceilings(self.timer) if probes else None
        except RuntimeError as error:
            self.left_out["probes"] = str(error)

    def machine(self) -> dict[str, Any]:
        """Versions and the GPU's state; called at both ends of a run."""
        return gpu_facts()

    def measure_ceilings(self, samples: int) -> dict[str, Any]:
        """The fastest large copy, by the driver or by a kernel, and the other probes' results at a large size."""
        speeds = []
        for size in _COPY_BYTES:
            source = torch.ones(size, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)

            def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
                target.copy_(source)

            median = float(np.median(self.timer.sample(copy, samples, cold=True)))
            speeds.append(2 * size / median / 1e3)
        self.release()
        measured: dict[str, Any] = {"memcpy_gbps": max(speeds)}
        if self.ceilings is not None:
            measured.update(self.ceilings.general(samples))
        self.release()
        return {"copy_gbps": max(max(speeds), measured.get("copy_kernel_gbps", 0.0)), **measured}

    def load(self, problem: Problem) -> TensorInputs:
        return TensorInputs(problem, "cuda")

    def capture(self, body: Body, mode: str) -> Captured:
        return self.timer.capture(body, mode)

    def check(self, operation: Operation, inputs: TensorInputs, captured: Captured, body: Body) -> str | None:
        captured.launch()
        poison(captured.outputs())
        captured.launch()
        torch.cuda.synchronize()
        return difference(operation, TensorCheck(inputs, body.exactness), body.results(captured.outputs()))

    def sample(self, captured: Captured, count: int, cold: bool) -> list[float]:
        return self.timer.sample(captured.launch, count, cold)

    def probe(self, operation: Operation, problem: Problem, samples: int) -> tuple[str, float] | None:
        if self.ceilings is None:
            return None
        work = probe_work(operation, problem)
        median = self.ceilings.median(work, samples)
        self.release()
        return work.name, median

    def published(self, empty: Row, copy_gbps: float) -> list[tuple[str, float, str]]:
        return published_rows(empty, copy_gbps)

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _triton() -> TorchDevice:
    import triton  # noqa: F401 the kernels need it, and are imported when they are called

    return TorchDevice()


def _given(te_wheel_dir: Path | None) -> Path:
    if te_wheel_dir is None:
        raise ValueError("--te-wheel-dir was not given")
    return te_wheel_dir
