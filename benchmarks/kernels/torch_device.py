# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on PyTorch tensors, for benchmarks and for tests without Paddle."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch

from paddle_moe_ops.triton.launch.kernel_cache import KernelCache

__all__ = ["TorchDevice", "gpu_facts", "version_of"]


class TorchDevice:
    """A `triton.launch.device.Device`: the current GPU and stream of PyTorch, with its Triton driver."""

    def __init__(self) -> None:
        self._kernels = KernelCache()

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="cuda")

    def dtype_name(self, array: torch.Tensor) -> str:
        return str(array.dtype).removeprefix("torch.")

    def row_stride(self, array: torch.Tensor) -> int:
        return array.stride(0)

    def reshape(self, array: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return array.view(tuple(shape))

    def read_int(self, array: torch.Tensor, index: int) -> int:
        return int(array[index])

    def launch(
        self, kernel: Any, programs: int, types: tuple[str, ...], arguments: Sequence[int], constants: tuple, warps: int
    ) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._kernels.launch(stream, kernel, programs, types, arguments, constants, warps)


def gpu_facts() -> dict[str, Any]:
    """Versions, and the state of the current GPU."""
    fields = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw")
    values = [""] * len(fields)
    command = ["nvidia-smi", "-i", str(torch.cuda.current_device()), f"--query-gpu={','.join(fields)}"]
    try:
        listed = subprocess.run(
            [*command, "--format=csv,noheader"], check=True, capture_output=True, text=True, timeout=20
        )
        values = [value.strip() for value in listed.stdout.strip().splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    state = dict(zip(fields, values, strict=False))
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "driver": state["driver_version"],
        "sm_clock": state["clocks.sm"],
        "sm_clock_max": state["clocks.max.sm"],
        "memory_clock": state["clocks.mem"],
        "temperature": state["temperature.gpu"],
        "power": state["power.draw"],
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version_of("triton"),
    }


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
