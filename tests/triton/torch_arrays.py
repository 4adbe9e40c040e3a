# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A GPU through PyTorch, with what `testing.interpreter.NumpyDevice` has: ways there and back, poisoned memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.kernels.torch_device import TorchDevice

from .interpreter import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_POISON = 0xA5


class TorchArrays(TorchDevice):
    def array(self, values: NDArray, *, offset: int = 0) -> torch.Tensor:
        """A copy that lies ``offset`` bytes beyond a multiple of 16."""
        dense = np.require(values, requirements="C")
        made = self._memory(dense.shape, _NAMES[dense.dtype], offset)
        made.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(dense.reshape(-1).view(np.uint8).copy()))
        return made

    def columns(self, array: torch.Tensor, count: int) -> torch.Tensor:
        """The first columns of a matrix, where they lie."""
        return array[:, :count]

    def numpy(self, array: torch.Tensor) -> NDArray:
        dtype = DTYPES[self.dtype_name(array)]
        return array.reshape(-1).view(torch.uint8).cpu().numpy().view(dtype).reshape(tuple(array.shape))

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return self._memory(shape, dtype, 0)

    def _memory(self, shape: Sequence[int], dtype: str, offset: int) -> torch.Tensor:
        size = int(np.prod(shape)) * DTYPES[dtype].itemsize
        raw = torch.full((size + offset,), _POISON, dtype=torch.uint8, device="cuda")
        return raw[offset:].view(getattr(torch, dtype)).view(tuple(shape))
