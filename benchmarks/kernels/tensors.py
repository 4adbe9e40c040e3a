# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A problem's inputs as PyTorch tensors, in new memory or over the memory of arrays."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from .inputs import Inputs
from .problem import SCALE_GROUP, Problem

__all__ = ["TensorInputs", "from_numpy", "to_numpy"]

# Types that NumPy and PyTorch do not share: PyTorch's type of their bits, and NumPy's own type.
_NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
}


class TensorInputs(Inputs):
    """The inputs on one device."""

    def __init__(self, problem: Problem, device: str) -> None:
        super().__init__(problem)
        self.device = device

    @cached_property
    def mask(self) -> torch.Tensor:
        """bool [T, E], the routing in TransformerEngine's form"""
        return self._by_expert(torch.ones_like(self.ids, dtype=torch.bool))

    @cached_property
    def probs_by_expert(self) -> torch.Tensor:
        """float32 [T, E]"""
        return self._by_expert(self.probs)

    def _by_expert(self, by_slot: torch.Tensor) -> torch.Tensor:
        """[T, E] of [T, K], 0 if no slot names the expert."""
        tokens, experts = len(by_slot), self.problem.plan.num_experts
        ids = self.ids.long()
        wide = torch.zeros(tokens, experts + 1, dtype=by_slot.dtype, device=self.device)
        return wide.scatter_(1, torch.where(ids < 0, experts, ids), by_slot)[:, :experts].contiguous()

    @cached_property
    def x(self) -> torch.Tensor:
        return self._random(1, self.problem.case.shape.num_tokens)

    @cached_property
    def x_fp8(self) -> torch.Tensor:
        return self.x.to(torch.float8_e4m3fn)

    @cached_property
    def scale(self) -> torch.Tensor:
        tokens = self.problem.case.shape.num_tokens
        return self.x[:, ::SCALE_GROUP].float().abs().add_(1.0).reshape(tokens, -1).contiguous()

    @cached_property
    def rows(self) -> torch.Tensor:
        return self._random(2, self.problem.plan.num_rows)

    @cached_property
    def d_out(self) -> torch.Tensor:
        return self._random(3, self.problem.case.shape.num_tokens)

    def empty(self, *shape: int, dtype: Any = "int32") -> torch.Tensor:
        chosen = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return torch.empty(shape, dtype=chosen, device=self.device)

    def from_numpy(self, array: NDArray) -> torch.Tensor:
        return from_numpy(np.require(array, requirements="C")).to(self.device)

    def to_numpy(self, array: torch.Tensor) -> NDArray:
        return to_numpy(array)

    def _random(self, seed: int, rows: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (rows, self.problem.case.shape.hidden)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=generator)


def from_numpy(array: NDArray) -> torch.Tensor:
    """A tensor over the memory of an array."""
    for dtype, (bits, narrow) in _NUMPY_DTYPES.items():
        if array.dtype == narrow:
            return torch.from_numpy(array.view(str(bits).removeprefix("torch."))).view(dtype)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> NDArray:
    """A copy of a tensor for the oracle; bfloat16 and float8 as ml_dtypes."""
    if tensor.dtype not in _NUMPY_DTYPES:
        return tensor.cpu().numpy()
    bits, dtype = _NUMPY_DTYPES[tensor.dtype]
    return tensor.contiguous().view(bits).cpu().numpy().view(dtype)
