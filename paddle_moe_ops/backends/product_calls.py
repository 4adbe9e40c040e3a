# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What experts do with their rows, as calls in Paddle's graph of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor

from .._graphs import dense
from .base import Backend, GemmSpec, Kernels, Matrices, MlpSpec, QuantizeSpec, Tensors
from .joining import destination_of_matrices
from .nodes import Call, Gradients, connect, first_order_only

__all__ = ["GroupedGemm", "MoeMlp", "connect_experts"]


class _QuantizedExperts(Call):
    function = "quantized_experts"

    def __init__(
        self,
        kernels: Any,
        x: Tensor,
        tensors: Tensors,
        plan: Any,
        spec: QuantizeSpec,
        expert_fn: Callable[..., Tensor],
        expert_vjp: Callable[..., Tensors],
    ) -> None:
        super().__init__(kernels, x, *tensors)
        self.watch(plan.slot_to_row, plan.token_rows, plan.row_to_token)
        self.arguments: Any = (x, tensors)
        self.plan, self.spec = plan, spec
        self.expert_fn, self.expert_vjp = expert_fn, expert_vjp

    def run(self) -> Tensors:
        x, tensors = self.arguments
        self.arguments = None
        quantized = self.kernels.permute_quantized(x, self.plan, "all", self.spec)
        self.save(*quantized, *tensors)
        return (self.expert_fn(*quantized, *tensors),)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        made = self.expert_vjp(*gradients, *self.saved)
        d_rows, *d_tensors = (None if each is None else each.detach() for each in made)
        d_x = self.kernels.unpermute(d_rows, None, self.plan) if self.wanted[0] else None
        return first_order_only(self, (d_x, *d_tensors), *gradients, *self.saved)


def _contiguous(operands: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Operands of which kernels and `Call.save` need one copy, not one each."""
    return tuple([each if each is None or each.is_contiguous() else dense(each) for each in operands])


class GroupedGemm(Call):
    function = "grouped_gemm"

    def __init__(
        self, kernels: Kernels, x: Tensor, w: Tensor, weights: Tensor | None, bias: Tensor | None, spec: GemmSpec
    ) -> None:
        super().__init__(kernels, x, w, weights, bias)
        self.watch(*(each for each in (spec.m_sizes, spec.expert_offsets) if isinstance(each, Tensor)))
        if spec.plan is not None:
            self.watch(spec.plan.token_rows, spec.plan.row_to_token)
        self.operands: Any = (x, w, weights, bias)
        self.is_given = tuple(each is not None for each in self.operands)
        self.spec = spec

    def run(self) -> Tensors:
        operands, self.operands = _contiguous(self.operands), None
        self.save(*operands)
        out = self.kernels.grouped_gemm(*operands, self.spec)
        return (out,)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        saved, wanted = iter(self.saved), iter(self.wanted)
        operands = [next(saved) if given else None for given in self.is_given]
        all_wanted = tuple(given and next(wanted) for given in self.is_given)
        made = self.kernels.grouped_gemm_backward(*gradients, *operands, self.spec, all_wanted)
        made = tuple(each for each, given in zip(made, self.is_given, strict=True) if given)
        return first_order_only(self, made, *gradients, *operands)


class MoeMlp(Call):
    function = "moe_mlp"

    def __init__(
        self,
        kernels: Kernels,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        spec: MlpSpec,
        parameters: tuple[Matrices, Matrices],
    ) -> None:
        super().__init__(kernels, x, gate_up, down, weights)
        plan = spec.plan
        self.watch(plan.token_rows, plan.row_to_token, plan.tokens_per_expert, plan.expert_offsets)
        self.operands: Any = (x, gate_up, down, weights)
        self.spec = spec
        self.parameters = parameters if spec.accumulates else ()
        self.is_spent = False

    def run(self) -> Tensors:
        operands, self.operands = _contiguous(self.operands), None
        out, hidden, weights, self.tables = self.kernels.moe_mlp(*operands, self.spec, True)
        self.has_weights = weights is not None
        unread = () if self.spec.quantized is None else operands[1:3]
        self.save(*operands[:3], weights, *hidden, unread=unread)
        return (out,)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        x, gate_up, down, *others = self.saved
        weights = others.pop(0) if self.has_weights else None
        if self.is_spent:
            raise RuntimeError(
                f"moe_mlp: a backward pass on the backend {self.kernels.name!r} has overwritten the first product of "
                "this call, so nothing can use it again, even with retain_graph=True; with keep='x' it can"
            )
        self.is_spent = bool(others) and self.kernels.overwrites_hidden
        destinations: tuple[Any, ...] = (None, None)
        if self.parameters:
            wanted = zip(self.wanted[1:3], self.parameters, strict=True)
            destinations = tuple(destination_of_matrices(each) if want else None for want, each in wanted)
        self.added = frozenset(number for number, each in enumerate(destinations, 1) if each is not None)
        operands = x, gate_up, down, weights, tuple(others), self.tables
        made = self.kernels.moe_mlp_backward(*gradients, *operands, self.spec, (*self.wanted, False)[:4], destinations)
        return first_order_only(self, made[: len(self.wanted)], *gradients, x, gate_up, down, weights)


def connect_experts(backend: Backend, x: Tensor, tensors: Tensors, *others: Any) -> Tensor:
    """What experts make of quantised rows, differentiable in x and the tensors: one node, whichever backend runs it.

    Args:
        backend: what quantises, permutes and adds rows up.
        x: tokens [T, H].
        tensors: what the experts take besides the rows.
        others: plan, spec, expert_fn and expert_vjp.
    """
    return connect(_QuantizedExperts(backend, x, tensors, *others), x, *tensors)[0]
