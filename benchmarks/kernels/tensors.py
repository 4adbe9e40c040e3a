# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A problem's inputs as PyTorch tensors; made when they are first asked for, the same in every run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from paddle_moe_ops.reference.quantization import quantize_1x128

from .problem import SCALE_GROUP, Problem

__all__ = ["TensorInputs", "to_numpy"]

_ORACLE_ELEMENTS = 1 << 22  # at a time, of each thread
_NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
}


class TensorInputs:
    """What the operators read, on one device: the tokens, gradients and maps of a problem.

    The maps are the oracle's, so an operator that is given maps does not depend on another one under test.
    """

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem = problem
        self.device = device
        self._quantized: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def ids(self) -> torch.Tensor:
        """int32 [T, K]"""
        return self._copy(self.problem.ids)

    @cached_property
    def probs(self) -> torch.Tensor:
        """float32 [T, K]"""
        return self._copy(self.problem.probs)

    @cached_property
    def mask(self) -> torch.Tensor:
        """bool [T, E], the routing in TransformerEngine's form"""
        return self._by_expert(torch.ones_like(self.ids, dtype=torch.bool))

    @cached_property
    def probs_by_expert(self) -> torch.Tensor:
        """float32 [T, E]"""
        return self._by_expert(self.probs)

    def _by_expert(self, by_slot: torch.Tensor) -> torch.Tensor:
        """[T, E] of [T, K], 0 where no slot names the expert."""
        tokens, experts = len(by_slot), self.problem.plan.num_experts
        ids = self.ids.long()
        wide = torch.zeros(tokens, experts + 1, dtype=by_slot.dtype, device=self.device)
        return wide.scatter_(1, torch.where(ids < 0, experts, ids), by_slot)[:, :experts].contiguous()

    def token_rows_of(self, row_id_map: torch.Tensor) -> torch.Tensor:
        """token_rows [T, K] out of TransformerEngine's map [T, 2E + 1], which begins with the rows, descending."""
        none = torch.iinfo(torch.int32).max
        width = min(self.problem.plan.topk, self.problem.plan.num_experts)
        listed = torch.arange(width, device=self.device) < row_id_map[:, -1:]
        ascending = torch.where(listed, row_id_map[:, :width], none).sort(1).values
        token_rows = torch.full_like(self.token_rows, -1)
        token_rows[:, :width] = torch.where(ascending == none, -1, ascending)
        return token_rows

    @cached_property
    def x(self) -> torch.Tensor:
        """bfloat16 [T, H]"""
        return self._random(1, self.problem.case.shape.num_tokens)

    @cached_property
    def x_fp8(self) -> torch.Tensor:
        """float8_e4m3fn [T, H]"""
        return self.x.to(torch.float8_e4m3fn)

    @cached_property
    def scale(self) -> torch.Tensor:
        """float32 [T, S], one for each 128 columns of x_fp8"""
        tokens = self.problem.case.shape.num_tokens
        return self.x[:, ::SCALE_GROUP].float().abs().add_(1.0).reshape(tokens, -1).contiguous()

    def quantized(self, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's codes, as bytes [T, H], and scales by row of x."""
        if ue8m0 not in self._quantized:
            rows = [to_numpy(part) for part in self.x.split(max(1, _ORACLE_ELEMENTS // self.x.shape[1]))]
            with ThreadPoolExecutor() as pool:  # NumPy lets go of the interpreter; one thread would take a minute
                parts = list(pool.map(lambda part: quantize_1x128(part, ue8m0=ue8m0), rows))
            codes, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            self._quantized[ue8m0] = self._copy(codes.view(np.uint8)), self._copy(scales)
        return self._quantized[ue8m0]

    @cached_property
    def rows(self) -> torch.Tensor:
        """bfloat16 [M, H], the experts' results"""
        return self._random(2, self.problem.plan.num_rows)

    @cached_property
    def d_out(self) -> torch.Tensor:
        """bfloat16 [T, H], the gradient of the summed rows"""
        return self._random(3, self.problem.case.shape.num_tokens)

    @cached_property
    def slot_to_row(self) -> torch.Tensor:
        return self._copy(self.problem.plan.slot_to_row)

    @cached_property
    def token_rows(self) -> torch.Tensor:
        return self._copy(self.problem.plan.token_rows)

    @cached_property
    def row_to_token(self) -> torch.Tensor:
        return self._copy(self.problem.plan.row_to_token)

    @cached_property
    def row_to_expert(self) -> torch.Tensor:
        return self._copy(self.problem.plan.row_to_expert)

    @cached_property
    def rowmap(self) -> torch.Tensor:
        """int32 [T, E]"""
        return self._copy(self.problem.rowmap)

    @cached_property
    def row_probs(self) -> torch.Tensor:
        """float32 [M]"""
        return self._copy(self.problem.plan.row_probs)

    @cached_property
    def chunk_sizes(self) -> torch.Tensor:
        """int32 [C]"""
        return self._copy(self.problem.chunk_sizes)

    @cached_property
    def chunk_order(self) -> torch.Tensor:
        """int32 [C]"""
        return self._copy(self.problem.chunk_order)

    @cached_property
    def source_to_dest(self) -> torch.Tensor:
        """int32 [M]"""
        return self._copy(self.problem.source_to_dest)

    @cached_property
    def dest_to_source(self) -> torch.Tensor:
        """int32 [M]"""
        return self._copy(self.problem.dest_to_source)

    @cached_property
    def gating(self) -> torch.Tensor:
        """float32 [T, E]"""
        return self._copy(self.problem.gating)

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _copy(self, array: NDArray | None) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _random(self, seed: int, rows: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (rows, self.problem.case.shape.hidden)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=generator)


def to_numpy(tensor: torch.Tensor) -> NDArray:
    """A copy of a tensor for the oracle; bfloat16 and float8 as ml_dtypes."""
    if tensor.dtype not in _NUMPY_DTYPES:
        return tensor.cpu().numpy()
    bits, dtype = _NUMPY_DTYPES[tensor.dtype]
    return tensor.contiguous().view(bits).cpu().numpy().view(dtype)
