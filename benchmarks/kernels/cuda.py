# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark on an NVIDIA GPU: PyTorch for memory, streams and graphs, our operators through the C core."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import check
from .ceilings import Ceilings
from .core_cuda import CudaCore, core_implementation, row_id_map_implementation, two_passes_implementations
from .cuda_timer import CudaTimer
from .device import Body, Captured, Implementation
from .model import probe_work
from .peers import torch_implementations, transformer_engine_implementation
from .problem import Problem
from .published import published_rows
from .results import Row
from .shapes import Operation
from .tensors import TensorInputs
from .torch_device import gpu_facts

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
            te_wheel_dir: Folder that the wheel of TransformerEngine lies in or was unpacked to.
            probes: Whether the kernels that show what memory allows are wanted.

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
        self.implementations: list[Implementation] = [
            core_implementation(core),
            row_id_map_implementation(core),
            *two_passes_implementations(core),
            *torch_implementations(),
        ]
        self.left_out: dict[str, str] = {}
        try:
            from .triton_cuda import triton_implementations

            self.implementations[1:1] = triton_implementations()
        except ImportError as error:
            self.left_out["triton"] = str(error)
        try:
            self.implementations.append(transformer_engine_implementation(_given(te_wheel_dir)))
        except (ImportError, ValueError) as error:
            self.left_out["te triton"] = str(error)
        self.ceilings: Ceilings | None = None
        try:
            self.ceilings = Ceilings(self.timer) if probes else None
        except RuntimeError as error:
            self.left_out["probes"] = str(error)

    def machine(self) -> dict[str, Any]:
        """Versions and the GPU's state; called at both ends of a run."""
        return gpu_facts()

    def measure_ceilings(self, samples: int) -> dict[str, Any]:
        """The fastest large copy, by the driver or by a kernel, and what else the probes say at a large size."""
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
        check.poison(captured.outputs())
        captured.launch()
        torch.cuda.synchronize()
        return check.difference(operation, inputs, body.results(captured.outputs()), body.exactness)

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


def _given(te_wheel_dir: Path | None) -> Path:
    if te_wheel_dir is None:
        raise ValueError("--te-wheel-dir was not given")
    return te_wheel_dir
