# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on PyTorch tensors, for benchmarks and for tests where Paddle is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..triton.handles import Handles

__all__ = ["TorchDevice"]


class TorchDevice:
    """A `triton.launching.Device`: the current GPU and stream of PyTorch, whose Triton driver is the default one."""

    def __init__(self) -> None:
        self._handles = Handles()

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
        self._handles.launch(stream, kernel, programs, types, arguments, constants, warps)
