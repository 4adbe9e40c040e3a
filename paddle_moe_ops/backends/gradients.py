# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients for kernels without their own: `WithGradients` wraps such kernels as a backend.

Each operator runs as a `Call` of `autograd`. It stores the kernels of the forward pass, and the backward pass runs on
the same ones. If no gradient is required, the kernels are called directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import Tensor

from .._graphs import FLOAT8, constant_if_float8, filled, numbers_of
from .autograd import Call, Gradients, connect, first_order_only, linear, wants_gradient
from .base import (
    GemmSpec,
    Kernels,
    Maps,
    Matrices,
    MlpSpec,
    MoePermuteSpec,
    MoeUnpermuteSpec,
    RouteSpec,
    RowMaps,
    Tensors,
    TopkSpec,
    Validation,
)
from .experts import DeferredGemm, GroupedGemm, connected_mlp
from .stacking import stack_or_view

__all__ = ["WithGradients"]


def _values_of_rows(slot_values: Tensor, row_to_slot: Tensor) -> Tensor:
    """Gather values of slots to rows; rows without a slot are 0. Only second-order gradients need it."""
    if slot_values.size == 0:
        return filled(row_to_slot.shape, 0, slot_values.dtype, like=slot_values)
    values = paddle.gather(slot_values.flatten(), row_to_slot.clip(min=0))
    return paddle.where(row_to_slot >= 0, values, paddle.zeros_like(values))


def _rows_of_slots(slot_to_row: Tensor, num_rows: int) -> Tensor:
    """Return row_to_slot [N], the inverse of slot_to_row [T, K]."""
    rows = slot_to_row.flatten()
    rows = paddle.where(rows >= 0, rows, paddle.full_like(rows, num_rows))  # an extra row collects slots without a row
    if rows.size == 0:
        return filled([num_rows], -1, "int32", like=rows)
    return paddle.scatter(filled([num_rows + 1], -1, "int32", like=rows), rows, numbers_of(rows))[:num_rows]


class _Route(Call):
    function = "route"

    def __init__(
        self, kernels: Kernels, routing: Tensor, probs: Tensor, counts: Tensor | None, spec: RouteSpec
    ) -> None:
        super().__init__(kernels, probs)
        self.arguments: Any = (routing, probs, counts)
        self.spec = spec

    def run(self) -> Tensors:
        outputs = self.kernels.route(*self.arguments, self.spec)
        self.arguments = None
        self.before, self.after = outputs[:5], outputs[6:]
        self.watch(*self.before)
        return (outputs[5],)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        slot_to_row, _, row_to_token, row_to_slot, row_to_expert = self.before
        mask_experts = self.spec.num_experts if self.spec.topk >= 0 else -1

        def back(d_row_probs: Tensor) -> Tensor:
            return self.kernels.route_backward(d_row_probs, slot_to_row, row_to_token, row_to_expert, mask_experts)

        def there(probs: Tensor) -> Tensor:
            by_mask = paddle.where(row_to_token >= 0, row_to_token * mask_experts + row_to_expert, row_to_token)
            return _values_of_rows(probs, row_to_slot if mask_experts < 0 else by_mask)

        return (linear(self.function, self.kernels, gradients[0], back, there),)


class _Permute(Call):
    function = "permute"

    def __init__(self, kernels: Kernels, x: Tensor, scale: Tensor | None, plan: Any, fill_padding: str) -> None:
        super().__init__(kernels, x)
        self.watch(plan.slot_to_row, plan.token_rows, plan.row_to_token)
        self.arguments: Any = (x, scale)
        self.plan, self.fill_padding = plan, fill_padding

    def run(self) -> Tensors:
        rows, self.scales = self.kernels.permute(*self.arguments, self.plan, self.fill_padding)
        self.arguments = None  # the gradient needs no tokens
        return (rows,)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        def back(d_rows: Tensor) -> Tensor:
            return self.kernels.permute_backward(d_rows, self.plan.token_rows)

        def there(x: Tensor) -> Tensor:
            return self.kernels.permute(x, None, self.plan, "all")[0]

        if isinstance(self.plan, RowMaps) and self.plan.leaves_out:  # then `there` is not the transposed map
            return first_order_only(self, (back(gradients[0]),), *gradients)
        return (linear(self.function, self.kernels, gradients[0], back, there),)


class _Unpermute(Call):
    function = "unpermute"

    def __init__(self, kernels: Kernels, rows: Tensor, probs: Tensor | None, plan: Any) -> None:
        super().__init__(kernels, rows, probs)
        self.watch(plan.slot_to_row, plan.token_rows, plan.row_to_token)
        self.arguments: Any = (rows, probs)
        self.weighted, self.plan = probs is not None, plan

    def run(self) -> Tensors:
        if self.weighted:  # the gradient of the plain sum needs no rows, so they must not stay alive
            self.watch(self.plan.row_to_slot)
            self.save(*self.arguments)
        out = self.kernels.unpermute(*self.arguments, self.plan)
        self.arguments = None
        return (out,)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        if self.weighted:
            made = self.kernels.unpermute_backward(*gradients, *self.saved, self.plan, self.wanted)
            return first_order_only(self, made, *gradients, *self.saved)

        def back(d_out: Tensor) -> Tensor:
            return self.kernels.unpermute_backward(d_out, None, None, self.plan, (True,))[0]

        def there(rows: Tensor) -> Tensor:
            return self.kernels.unpermute(rows, None, self.plan)

        return (linear(self.function, self.kernels, gradients[0], back, there),)


class _MoePermute(Call):
    """The call of moe_permute. Inputs: hidden states unless they are float8, and probabilities. Outputs: their rows."""

    function = "moe_permute"

    def __init__(
        self,
        kernels: Kernels,
        hidden_states: Tensor,
        scale: Tensor | None,
        routemap: Tensor,
        probs: Tensor,
        counts: Tensor | None,
        spec: MoePermuteSpec,
    ) -> None:
        self.moves = hidden_states.dtype not in FLOAT8
        super().__init__(kernels, hidden_states if self.moves else None, probs)
        self.arguments: Any = (hidden_states, scale, routemap, probs, counts)
        self.spec = spec

    def run(self) -> Tensors:
        rows, self.rowmap, row_probs, *self.others = self.kernels.moe_permute(*self.arguments, self.spec)
        self.arguments = None  # the gradient needs no tokens
        self.slot_to_row, self.token_rows = self.others[3:]
        self.watch(self.slot_to_row, self.token_rows)
        self.float8_rows = None if self.moves else rows
        return (rows, row_probs) if self.moves else (row_probs,)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        slot_to_row, token_rows = self.slot_to_row, self.token_rows
        if not self.spec.do_gather:  # no row was permuted, so the gradient is a sum over no rows: zero
            token_rows = paddle.full_like(token_rows, -1)
        num_rows = gradients[-1].shape[0]

        def rows_back(d_rows: Tensor) -> Tensor:
            return self.kernels.permute_backward(d_rows, token_rows)

        def rows_there(x: Tensor) -> Tensor:
            row_to_slot = _rows_of_slots(slot_to_row, num_rows)
            row_to_token = paddle.where(row_to_slot >= 0, row_to_slot // slot_to_row.shape[1], row_to_slot)
            rows = self.kernels.permute(x, None, Maps(slot_to_row, token_rows, row_to_token), "all")[0]
            return rows if self.spec.do_gather else rows[:0]

        def probs_back(d_row_probs: Tensor) -> Tensor:
            return self.kernels.gather_slots(d_row_probs, slot_to_row)

        def probs_there(probs: Tensor) -> Tensor:
            return _values_of_rows(probs, _rows_of_slots(slot_to_row, num_rows))

        maps = [(rows_back, rows_there)] * self.moves + [(probs_back, probs_there)]
        return tuple(
            linear(self.function, self.kernels, gradient, back, there) if want else None
            for want, gradient, (back, there) in zip(self.wanted, gradients, maps, strict=True)
        )


class _MoeUnpermute(Call):
    function = "moe_unpermute"

    def __init__(
        self, kernels: Kernels, rows: Tensor, rowmap: Tensor, routemap: Tensor, probs: Tensor, spec: MoeUnpermuteSpec
    ) -> None:
        super().__init__(kernels, rows, probs)
        self.arguments: Any = (rows, rowmap, routemap, probs)
        self.spec = spec

    def run(self) -> Tensors:
        rows, *others = self.arguments
        self.save(*others, rows if self.spec.weighted else None)  # as in _Unpermute
        outputs = self.kernels.moe_unpermute(*self.arguments, self.spec)
        self.arguments = None
        return outputs

    def differentiate(self, *gradients: Tensor) -> Gradients:
        rowmap, routemap, probs, *kept = self.saved
        rows = kept[0] if kept else None

        d_hidden, d_prob_topk = gradients

        def both(d_hidden: Tensor, d_prob_topk: Tensor, wanted: tuple[bool, ...]) -> Any:
            arguments = d_hidden, d_prob_topk, rows, rowmap, routemap, probs, self.spec, wanted
            return self.kernels.moe_unpermute_backward(*arguments)

        if self.spec.weighted:
            return first_order_only(self, both(d_hidden, d_prob_topk, self.wanted), *gradients, rows, probs)
        if not paddle.is_grad_enabled():
            return both(d_hidden, d_prob_topk, self.wanted)
        # Separately, because each result is a linear map of one of the given gradients.
        spec = self.spec._replace(validation=Validation.OFF)

        def rows_back(gradient: Tensor) -> Tensor:
            return both(gradient, paddle.zeros_like(d_prob_topk), (True, False))[0]

        def rows_there(rows: Tensor) -> Tensor:
            return self.kernels.moe_unpermute(rows, rowmap, routemap, probs, spec)[0]

        def probs_back(gradient: Tensor) -> Tensor:
            return both(paddle.zeros_like(d_hidden), gradient, (False, True))[1]

        def probs_there(probs: Tensor) -> Tensor:
            one_column = filled([probs.shape[0], 1], 0, "float32", like=probs)
            return self.kernels.moe_unpermute(one_column, rowmap, routemap, probs, spec)[1]

        maps = (rows_back, rows_there), (probs_back, probs_there)
        return tuple(
            linear(self.function, self.kernels, gradient, back, there) if want else None
            for want, gradient, (back, there) in zip(self.wanted, gradients, maps, strict=True)
        )


class _SortChunks(Call):
    """The call of sort_chunks. Inputs: rows unless they are float8, and given probabilities. Outputs: both sorted."""

    function = "sort_chunks"

    def __init__(
        self,
        kernels: Kernels,
        x: Tensor,
        probs: Tensor | None,
        split_sizes: Tensor,
        order: Tensor,
        validation: Validation,
    ) -> None:
        self.moves, self.has_probs = x.dtype not in FLOAT8, probs is not None
        super().__init__(kernels, x if self.moves else None, probs)
        self.arguments: Any = (x, probs, split_sizes, order, validation)

    def run(self) -> Tensors:
        out, probs_out, self.source_to_dest = self.kernels.sort_chunks(*self.arguments)
        self.arguments = None
        self.watch(self.source_to_dest)
        self.float8_rows = None if self.moves else out
        self.no_probs = None if self.has_probs else probs_out
        return (*[out] * self.moves, *[probs_out] * self.has_probs)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        def back(gradient: Tensor) -> Tensor:
            return self.kernels.sort_chunks_backward(gradient, self.source_to_dest)

        def there(values: Tensor) -> Tensor:
            return paddle.gather(values, paddle.argsort(self.source_to_dest))

        return tuple(linear(self.function, self.kernels, each, back, there) for each in gradients)


class _CalculateTopk(Call):
    function = "calculate_topk"

    def __init__(self, kernels: Kernels, gating: Tensor, correction_bias: Tensor | None, spec: TopkSpec) -> None:
        super().__init__(kernels, gating)
        self.arguments: Any = (gating, correction_bias)
        self.spec = spec

    def run(self) -> Tensors:
        weights, self.ids, scores = self.kernels.calculate_topk(*self.arguments, self.spec)
        self.save(self.arguments[0])
        self.watch(self.ids)
        self.arguments = None
        self.no_scores = None if self.spec.return_scores else scores
        return (weights, scores) if self.spec.return_scores else (weights,)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        d_weights, d_scores = gradients if self.spec.return_scores else (*gradients, None)
        made = self.kernels.calculate_topk_backward(d_weights, d_scores, *self.saved, self.ids, self.spec)
        return first_order_only(self, (made,), *gradients, *self.saved)


class WithGradients:
    """A `Backend` that wraps `Kernels`. Verbs without a gradient are those of the kernels."""

    gathers_rows = True
    takes_lists = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.name, self.operators, self.dtypes = kernels.name, kernels.operators, kernels.dtypes
        self.unavailable, self.cannot_run_on = kernels.unavailable, kernels.cannot_run_on

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def calculate_topk(self, gating: Tensor, correction_bias: Tensor | None, spec: TopkSpec) -> Tensors:
        if not wants_gradient(gating):
            return self.kernels.calculate_topk(gating, correction_bias, spec)
        call = _CalculateTopk(self.kernels, gating, correction_bias, spec)
        weights, *scores = connect(call, gating)
        return weights, call.ids, scores[0] if scores else call.no_scores

    def route(self, routing: Tensor, probs: Tensor | None, counts: Tensor | None, spec: RouteSpec) -> Tensors:
        if probs is None or not wants_gradient(probs):
            return self.kernels.route(routing, probs, counts, spec)
        call = _Route(self.kernels, routing, probs, counts, spec)
        (row_probs,) = connect(call, probs)
        return *call.before, row_probs, *call.after

    def permute(self, x: Tensor, scale: Tensor | None, plan: Any, fill_padding: str) -> Tensors:
        x = constant_if_float8(x)
        if not wants_gradient(x):
            return self.kernels.permute(x, scale, plan, fill_padding)
        call = _Permute(self.kernels, x, scale, plan, fill_padding)
        (rows,) = connect(call, x)
        return rows, call.scales

    def unpermute(self, rows: Tensor, probs: Tensor | None, plan: Any) -> Tensor:
        if not wants_gradient(rows, probs):
            return self.kernels.unpermute(rows, probs, plan)
        return connect(_Unpermute(self.kernels, rows, probs, plan), rows, probs)[0]

    def moe_permute(
        self,
        hidden_states: Tensor,
        scale: Tensor | None,
        routemap: Tensor,
        probs: Tensor,
        counts: Tensor | None,
        spec: MoePermuteSpec,
    ) -> Tensors:
        hidden_states = constant_if_float8(hidden_states)
        if not wants_gradient(hidden_states, probs):
            return self.kernels.moe_permute(hidden_states, scale, routemap, probs, counts, spec)
        call = _MoePermute(self.kernels, hidden_states, scale, routemap, probs, counts, spec)
        *rows, row_probs = connect(call, hidden_states if call.moves else None, probs)
        return rows[0] if rows else call.float8_rows, call.rowmap, row_probs, *call.others

    def moe_unpermute(
        self, rows: Tensor, rowmap: Tensor, routemap: Tensor, probs: Tensor, spec: MoeUnpermuteSpec
    ) -> Tensors:
        if not wants_gradient(rows, probs):
            return self.kernels.moe_unpermute(rows, rowmap, routemap, probs, spec)
        return connect(_MoeUnpermute(self.kernels, rows, rowmap, routemap, probs, spec), rows, probs)

    def sort_chunks(
        self, x: Tensor, probs: Tensor | None, split_sizes: Tensor, order: Tensor, validation: Validation
    ) -> Tensors:
        x = constant_if_float8(x)
        if not wants_gradient(x, probs):
            return self.kernels.sort_chunks(x, probs, split_sizes, order, validation)
        call = _SortChunks(self.kernels, x, probs, split_sizes, order, validation)
        made = connect(call, x if call.moves else None, probs)
        out, probs_out = made[0] if call.moves else call.float8_rows, made[-1] if call.has_probs else call.no_probs
        return out, probs_out, call.source_to_dest

    def slots_to_rows(self, slot_values: Tensor, maps: Any) -> Tensor:
        return self._values(slot_values, maps, self.kernels.slots_to_rows, self.kernels.rows_to_slots)

    def rows_to_slots(self, row_values: Tensor, maps: Any) -> Tensor:
        return self._values(row_values, maps, self.kernels.rows_to_slots, self.kernels.slots_to_rows)

    def _values(
        self,
        values: Tensor,
        maps: Any,
        there: Callable[[Tensor, Any], Tensor],
        back: Callable[[Tensor, Any], Tensor],
    ) -> Tensor:
        ways: tuple[Callable[[Tensor], Tensor], ...] = (lambda each: there(each, maps), lambda each: back(each, maps))
        return linear("row_id_map", self.kernels, values, *ways, maps.slot_to_row, maps.row_to_slot)

    def grouped_gemm(
        self, x: Tensor, w: Matrices, weights: Tensor | None, bias: Matrices | None, spec: GemmSpec
    ) -> Tensor:
        w, bias = (stack_or_view(each, "grouped_gemm") if isinstance(each, Sequence) else each for each in (w, bias))
        operands = x, w, weights, bias
        if spec.deferral is not None:
            return connect(DeferredGemm(self.kernels, *operands, spec), x, weights, bias, *spec.deferral.leaves)[0]
        if not wants_gradient(*operands):
            return self.kernels.grouped_gemm(*operands, spec)
        return connect(GroupedGemm(self.kernels, *operands, spec), *operands)[0]

    def why_composed(self, x: Tensor, gate_up: Matrices, down: Matrices, spec: MlpSpec) -> str | None:
        return None

    def explain_moe_mlp(self, *call: Any) -> list[str]:
        return self.kernels.explain_moe_mlp(*call)

    def moe_mlp(self, x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec) -> Tensor:
        return connected_mlp(self.kernels, x, gate_up, down, weights, spec)
