# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing PyTorch tensors with the oracle on their device.

Sums and scaled rows are computed again with the oracle's arithmetic in PyTorch, every element, and for a sample the
oracle itself computes them too, so that a mistake of the recomputation shows.
"""

from __future__ import annotations

import numpy as np
import torch

from paddle_moe_ops.reference.permutation import sum_rows, sum_rows_backward

from .check import Check
from .device import Outputs
from .tensors import from_numpy, to_numpy

__all__ = ["TensorCheck", "fma32", "poison"]

_SAMPLES = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorCheck(Check):
    """Comparisons of tensors."""

    chunk_elements = 1 << 26

    def bits(self, array: torch.Tensor) -> torch.Tensor:
        return array.contiguous().view(_BITS[array.element_size()])

    def places(self, index: torch.Tensor) -> torch.Tensor:
        return index.long().clamp(min=0)

    def wide(self, array: torch.Tensor) -> torch.Tensor:
        return array.double()

    def nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(mask)

    def sums(self, tokens: slice, weighted: bool) -> tuple[torch.Tensor, torch.Tensor]:
        listed, rows = self.inputs.token_rows[tokens].long(), self.inputs.rows
        total = torch.full((len(listed), rows.shape[1]), -0.0, device=rows.device)
        magnitude = torch.zeros_like(total)
        for rank in range(listed.shape[1]):
            row = listed[:, rank]
            live = (row >= 0)[:, None]
            values = rows[row.clamp(min=0)].float() if len(rows) else torch.zeros_like(total)
            if weighted and len(rows):
                weights = self.inputs.row_probs[row.clamp(min=0)][:, None]
                added = fma32(values, weights, total)
                values = values * weights
            else:
                added = total + values
            total = torch.where(live, added, total)
            magnitude += torch.where(live, values.abs(), 0.0)
        counts = (listed >= 0).sum(1, keepdim=True)
        # No rows give +0.0. A single unweighted row, which is copied, comes out of -0.0 + v with its bits.
        return torch.where(counts > 0, total, 0.0).to(rows.dtype), magnitude

    def scaled(self, rows: slice) -> torch.Tensor:
        index, d_out = self.inputs.row_to_token[rows], self.inputs.d_out
        scaled = (d_out[self.places(index)].float() * self.inputs.row_probs[rows][:, None]).to(d_out.dtype)
        scaled[index < 0] = 0
        return scaled

    def unlike_sampled_sums(self, actual: torch.Tensor, weighted: bool) -> str | None:
        plan = self.inputs.problem.plan
        tokens = _sampled(plan.num_tokens)
        listed = plan.token_rows[tokens]
        live = listed >= 0
        used = listed[live]
        listed = np.where(live, np.cumsum(live.reshape(-1)).reshape(live.shape) - 1, -1)
        values = to_numpy(self.inputs.rows[torch.from_numpy(used).long().to(actual.device)])
        weights = plan.row_probs[used] if weighted and plan.row_probs is not None else None
        sampled = actual[torch.from_numpy(tokens).to(actual.device)].cpu()
        return self.unequal("out of sampled tokens", sampled, from_numpy(sum_rows(values, listed, weights)))

    def unlike_sampled_rows(self, actual: torch.Tensor) -> str | None:
        plan = self.inputs.problem.plan
        sample = _sampled(plan.num_rows)
        index = torch.from_numpy(sample).to(actual.device)
        of_rows = np.where(plan.row_to_token[sample] >= 0, np.arange(len(sample)), -1)
        gradients = to_numpy(self.inputs.d_out[self.places(self.inputs.row_to_token[index])])
        expected, _ = sum_rows_backward(gradients, of_rows, None, to_numpy(self.inputs.row_probs[index]))
        return self.unequal("d_rows of sampled rows", actual[index].cpu(), from_numpy(expected))


def poison(outputs: Outputs) -> None:
    """Overwrite outputs with a pattern that no operator writes: NaN as floats, -1515870811 as int32."""
    for tensor in outputs.values():
        bits = torch.atleast_1d(tensor).view(torch.uint8) if tensor.is_contiguous() else tensor
        bits.fill_(0xA5)


def fma32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """RN(a * b + c) of float32 tensors, rounded once: `reference.fma32` in PyTorch."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    addend_part = total - product
    error = (product - (total - addend_part)) + (addend - addend_part)
    inexact = torch.isfinite(total) & (error != 0)
    bits = total.view(torch.int64)
    rounded_away = torch.signbit(error) != torch.signbit(total)
    odd_bits = torch.where(inexact, (bits - rounded_away.long()) | 1, bits)
    return odd_bits.view(torch.float64).float()


def _sampled(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, _SAMPLES).astype(np.int64))
