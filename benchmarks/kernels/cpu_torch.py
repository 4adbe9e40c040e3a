# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch on the CPU, as it is measured on a GPU."""

from __future__ import annotations

import torch

from .cpu_arrays import ArrayInputs
from .device import Implementation
from .operators import Library, implementations
from .tensors import from_numpy, to_numpy

__all__ = ["torch_implementations"]


class _Tensors:
    """Inputs as tensors over the arrays' memory."""

    def __init__(self, inputs: ArrayInputs) -> None:
        self.problem = inputs.problem
        self._arrays = inputs

    def __getattr__(self, name: str) -> torch.Tensor:
        return from_numpy(getattr(self._arrays, name))


def torch_implementations(threads: int) -> list[Implementation]:
    """PyTorch's ways, on as many threads as ours."""
    torch.set_num_threads(threads)  # importing Paddle makes it 1
    return [each.over(_Tensors, to_numpy) for each in implementations(Library.TORCH, torch)]
