# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of SwiGLU experts as one operator of the compiled library, for backends whose GEMMs it replaces."""

from __future__ import annotations

from typing import NamedTuple

import paddle
from paddle import Tensor

from .._graphs import GraphValue, float32, to_dtype, without_autocast
from .._native import native
from . import compiled
from .base import Matrices, MlpSpec, Validation
from .groups import check_plan_groups
from .stacking import stack_or_view
from .triton_arrays import device_of

__all__ = ["LayerOperators", "explain_operator", "layer_by_operator", "runs_by_operator"]

_NAME = "moe_mlp"
_MULTIPLE = 8  # of d and n, for the library's kernels


def runs_by_operator(x: Tensor, down: Matrices, spec: MlpSpec) -> bool:
    """Return whether the library's kernels compute all GEMMs of a layer, so that its operator runs it."""
    from ..triton.gemm.gpu_facts import gpu_at
    from ..triton.hopper_product import most_library_rows

    matrix = down if isinstance(down, Tensor) else down[0]
    if spec.compute is not None or spec.accumulates or not compiled.has_operators(x) or matrix.dtype != x.dtype:
        return False
    if any(size % _MULTIPLE for size in matrix.shape[-2:]) or 0 in matrix.shape[-2:]:
        return False
    return most_library_rows(device_of(x, matrix), gpu_at(matrix.data_ptr())) > 0


def layer_by_operator(x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec) -> Tensor:
    """`Backend.moe_mlp` by the operator."""
    plan, in_graph = spec.plan, isinstance(x, GraphValue)
    if spec.validation != Validation.OFF and not in_graph:
        check_plan_groups(plan)
    with without_autocast():
        by_slot = weights is not None and spec.weights_by_slot
        if weights is None:
            weights = paddle.ones_like(plan.row_to_token, dtype="float32")
        tokens, gate_up, down = x, _stacked(gate_up, in_graph), _stacked(down, in_graph)
        if gate_up.dtype != x.dtype or down.dtype != x.dtype:
            tokens, gate_up, down = float32(x), float32(gate_up), float32(down)
        # a graph may run its backward pass twice, and checks no versions
        out = compiled.moe_mlp(
            tokens,
            gate_up,
            down,
            weights,
            plan,
            transpose=spec.transpose,
            keeps_hidden=spec.keeps_hidden,
            workspace=spec.workspace,
            in_place=not in_graph,
            by_slot=by_slot,
            float8=spec.compute is not None,
        )
        return to_dtype(out, x.dtype)


def _stacked(given: Matrices, in_graph: bool) -> Tensor:
    if isinstance(given, (Tensor, GraphValue)):
        return given
    return paddle.stack(given) if in_graph else stack_or_view(given, _NAME)


def explain_operator(x: Tensor, down: Matrices, spec: MlpSpec, wanted: tuple[bool, bool, bool, bool]) -> list[str]:
    """The lines of `explain` on the operator's chunks and kernels, on a GPU with kernels."""
    from ..triton.hopper_product import TURNED_ROWS

    experts = len(down)
    inner = down[0].shape[-1 if spec.transpose else -2]
    keeps = spec.keeps_hidden and any(wanted)
    sizes = x.shape[0], spec.plan.num_rows, experts, x.shape[1], inner, spec.workspace
    plans = [_Choices(*native.layer_plan(*sizes, backward, keeps, wanted[3])) for backward in (0, 1)]
    lines = ["runs as: the operator moe_mlp of the compiled library"]
    for name, plan in zip(("forward", "backward")[: 1 + any(wanted)], plans, strict=False):
        chunks = plan.row_chunks or "none, GEMMs gather token rows"
        sums = "swap-AB" if plan.sum_tile_rows == TURNED_ROWS else "ping-pong"
        columns = -(-x.shape[1] // plan.chunk_columns)
        lines.append(
            f"{name}: workspace {plan.num_bytes / 2**20:.1f} MiB; chunks of rows: {chunks}; "
            f"chunks of columns: {columns}; the GEMM of summed rows: {sums}"
        )
    return lines


class _Choices(NamedTuple):
    """The result of `Native.layer_plan`."""

    row_chunks: int
    chunk_columns: int
    num_bytes: int
    sum_tile_rows: int


class LayerOperators:
    """A layer of experts as one operator of the library, for a backend that runs on every device."""

    def unavailable(self) -> str | None:
        return None

    def cannot_run_on(self, tensor: Tensor) -> str | None:
        return None

    def why_composed(self, x: Tensor, gate_up: Matrices, down: Matrices, spec: MlpSpec) -> str | None:
        in_graph = isinstance(x, GraphValue)
        if not compiled.has_operators(x):
            return "the compiled library has no operators there"
        if spec.compute is not None:
            # In dygraph, calls may cache float8 matrices, and each matrix of a list has its own gradient.
            return None if in_graph else "float8 layers are the library's operator in graphs alone"
        if spec.accumulates:
            return "the library's operator does not accumulate"
        for each in (gate_up, down):
            if not isinstance(each, (Tensor, GraphValue)) or each.dtype != x.dtype:
                return "the library's operator takes one tensor each of gate_up and down, of the tokens' dtype"
        return None

    def moe_mlp(self, x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec) -> Tensor:
        return layer_by_operator(x, gate_up, down, weights, spec)
