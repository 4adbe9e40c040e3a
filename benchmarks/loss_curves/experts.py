# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of experts as a differentiable function of PyTorch: by the library's kernels, or by PyTorch alone.

T tokens of d columns, K slots each, E experts of inner size n.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["GroupedExperts", "KernelExperts", "PlainExperts", "counts_of"]

_GROUP, _LARGEST, _AMAX_MIN = 128, 448.0, 2.0**-100


class _Routing:
    """The maps of a routing that `benchmarks.layer.inputs.Inputs` has."""

    def __init__(self, ids: Tensor, probs: Tensor, num_experts: int) -> None:
        tokens, topk = ids.shape
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        self.sizes = counts_of(flat, num_experts).int()
        self.offsets = torch.cat([self.sizes.new_zeros(1), self.sizes.cumsum(0).int()])
        self.row_to_token = (order // topk).int()
        self.row_probs = probs.reshape(-1)[order].contiguous()
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order), device=ids.device)
        self.rows_of_slots = rows.view(tokens, topk)
        self.token_rows = self.rows_of_slots.sort(1).values.int()


def counts_of(ids: Tensor, num_experts: int) -> Tensor:
    """Return the number of times that each expert occurs, without waiting for the device."""
    return (ids.reshape(-1, 1) == torch.arange(num_experts, device=ids.device)).sum(0)


class KernelExperts:
    """Experts by `pmo_layer_run`, on a GPU of compute capability 9.0.

    Args:
        library: libpmo_core.so with CUDA kernels.
        float8: whether GEMMs have float8 operands.
    """

    def __init__(self, library: Path, float8: bool) -> None:
        self._library, self._float8 = library, float8
        self._layer: Any = None

    def __call__(self, x: Tensor, ids: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        matrices = gate_up.bfloat16(), down.bfloat16()
        out: Tensor = _Passes.apply(x.bfloat16(), probs, *matrices, ids, self)
        return out

    def layer(self, operands: Any) -> Any:
        """The `LibraryLayer` of these operands."""
        from benchmarks.layer.library import LibraryLayer

        if self._layer is None:
            self._layer = LibraryLayer(operands, float8=self._float8)
        return self._layer.of(operands)


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, experts: KernelExperts
    ) -> Tensor:
        operands = _Routing(ids, probs.detach(), len(down))
        operands.__dict__.update(x=x.detach().contiguous(), gate_up=gate_up.detach(), down=down.detach())
        operands.__dict__.update(
            core_library=experts._library, shape=SimpleNamespace(hidden=x.shape[1], inner=down.shape[1])
        )
        ctx.layer, ctx.operands = experts.layer(operands), operands
        out, ctx.kept = ctx.layer.forward()
        made: Tensor = out
        return made

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        ctx.operands.d_out = d_out.contiguous()
        d_x, d_weights, d_gate_up, d_down = ctx.layer.backward(ctx.kept)
        return d_x, d_weights[ctx.operands.rows_of_slots], d_gate_up, d_down, None, None


class PlainExperts:
    """Experts by PyTorch, one after the other, on any device.

    Args:
        float8: whether GEMMs have quantised operands, multiplied in float32.
        dtype: of rows and matrices.
    """

    def __init__(self, float8: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        self._float8, self._dtype = float8, dtype

    def __call__(self, x: Tensor, ids: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        x, gate_up, down = (each.to(self._dtype) for each in (x, gate_up, down))
        routing = _Routing(ids, probs, len(down))
        parts = x[routing.row_to_token.long()].split(routing.sizes.tolist())
        rows = []
        for part, first, second in zip(parts, gate_up, down, strict=True):
            gate, up = self._product(part, first).float().chunk(2, -1)
            rows.append(self._product((F.silu(gate) * up).to(self._dtype), second))
        weighted = torch.cat(rows).float() * routing.row_probs[:, None]
        out: Tensor = weighted[routing.rows_of_slots].sum(1).to(self._dtype)
        return out

    def _product(self, rows: Tensor, matrix: Tensor) -> Tensor:
        made: Tensor = _QuantisedProduct.apply(rows, matrix) if self._float8 else rows @ matrix
        return made


class GroupedExperts:
    """Experts by PyTorch's grouped GEMM in bfloat16, without a wait of the host; for a GPU."""

    def __call__(self, x: Tensor, ids: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        x, gate_up, down = (each.bfloat16() for each in (x, gate_up, down))
        routing = _Routing(ids, probs, len(down))
        stops = routing.offsets[1:]
        hidden = torch._grouped_mm(x.index_select(0, routing.row_to_token.long()), gate_up, offs=stops)
        gate, up = hidden.chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, down, offs=stops)
        weighted = rows * routing.row_probs[:, None].to(rows.dtype)
        out: Tensor = weighted[routing.rows_of_slots.reshape(-1)].view(*ids.shape, -1).sum(1)
        return out


class _QuantisedProduct(torch.autograd.Function):
    """A GEMM of quantised values; the wgrad GEMM has the operands as they are."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        return (_quantised(rows, 1) @ _quantised(matrix, _GROUP)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        rows, matrix = ctx.saved_tensors
        d_rows = (_quantised(d_out, 1) @ _quantised(matrix, _GROUP).T).to(rows.dtype)
        return d_rows, rows.T @ d_out


def _quantised(values: Tensor, height: int) -> Tensor:
    """Float32 values of float8 codes with a scale for each ``height`` x 128 elements."""
    rows, columns = values.shape
    padded = F.pad(values.float(), (0, -columns % _GROUP, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // _GROUP, _GROUP)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp_min(_AMAX_MIN) / _LARGEST
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).view(padded.shape)[:rows, :columns]
