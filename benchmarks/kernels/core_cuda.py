# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Our CUDA operators as the benchmark calls them: the C core's structs with the addresses of PyTorch tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.core.binding import Core
from tests.core.structs import Params

from .tensors import to_numpy

__all__ = ["CudaCore", "array_at"]


class CudaCore(Core):
    """The CUDA entries on the current stream of PyTorch."""

    device = "cuda"

    def run(self, operator: str, *params: Params | None, stream: int | None = None) -> None:
        """Enqueue an operator, by default on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream if stream is None else stream
        super().run(operator, *params, stream=stream)


def array_at(value: Any) -> Any:
    """An array with the address, shape, strides and type of a tensor, which it keeps alive; other values as they are.

    The binding reads nothing else. Its elements must not be read: they are in GPU memory.
    """
    if not isinstance(value, torch.Tensor):
        return value
    memory: Any = (ctypes.c_char * (value.numel() * value.element_size())).from_address(value.data_ptr())
    memory.tensor = value
    array: NDArray = np.ndarray(
        tuple(value.shape),
        to_numpy(value.new_empty(0)).dtype,
        memory,
        strides=[stride * value.element_size() for stride in value.stride()],
    )
    return array
