# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Connects forward and backward for backends that do not own their gradients.

The compiled operators do, so they are called directly. Any other backend runs inside a PyLayer, which keeps the
backend that ran forward, so that backward runs on the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from .backends import (
    Backend,
    GemmSpec,
    MoePermuteSpec,
    MoeUnpermuteSpec,
    QuantizeSpec,
    RouteSpec,
    TopkSpec,
    Validation,
    resolve,
)
from .backends.base import Tensors


def _wanted(*inputs: Tensor | None) -> tuple[bool, ...]:
    """For each tensor input that is given, in order: whether it wants a gradient.

    To be asked in the forward: a saved tensor does not tell any more.
    """
    return tuple(not tensor.stop_gradient for tensor in inputs if tensor is not None)


def _runs_directly(backend: Backend, *inputs: Tensor | None) -> bool:
    """Whether no PyLayer is needed: the backend owns its gradients, or nobody wants any."""
    return backend.differentiable or not (paddle.is_grad_enabled() and any(_wanted(*inputs)))


def _gradients(wanted: tuple[bool, ...], *makers: Callable[[], Tensor] | None) -> Any:
    """What a PyLayer's backward returns: one entry per tensor input of the forward, None where none is wanted.

    Args:
        wanted: from `_wanted` over the same inputs.
        makers: for each input a function that makes its gradient, or None if it has none.
    """
    made = tuple(make() if want and make is not None else None for want, make in zip(wanted, makers, strict=True))
    return made if len(made) > 1 else made[0]


_FLOAT8 = frozenset((paddle.float8_e4m3fn, paddle.float8_e5m2))  # comparing dtypes takes longer than a hash


def _is_float8(tensor: Tensor) -> bool:
    """Whether the rows have no gradient: Paddle would cast it to float8."""
    return tensor.dtype in _FLOAT8


def _constant_if_float8(tensor: Tensor) -> Tensor:
    return tensor.detach() if not tensor.stop_gradient and _is_float8(tensor) else tensor


class _PlanBox:
    """Hides a plan from PyLayer, which takes the tensors of a tuple argument for inputs of the function."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan


class _Route(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, routing: Tensor, probs: Tensor, counts: Tensor | None, backend: Backend, spec: RouteSpec
    ) -> Tensors:
        outputs = backend.route(routing, probs, counts, spec)
        ctx.maps = outputs[0], outputs[2], outputs[4]
        ctx.backend, ctx.mask_experts = backend, spec.num_experts if spec.topk >= 0 else -1
        ctx.wanted = _wanted(routing, probs, counts)
        ctx.mark_non_differentiable(*outputs[:5], *outputs[6:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        slot_to_row, row_to_token, row_to_expert = ctx.maps
        no_gradient = [None] * (len(ctx.wanted) - 2)  # counts, if given
        return _gradients(
            ctx.wanted,
            None,
            lambda: ctx.backend.route_backward(
                gradients[5], slot_to_row, row_to_token, row_to_expert, ctx.mask_experts
            ),
            *no_gradient,
        )


class _Permute(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, backend: Backend, box: _PlanBox, fill_padding: str
    ) -> Tensors:
        rows, scales = backend.permute(x, scale, box.plan, fill_padding)
        ctx.backend, ctx.token_rows, ctx.wanted = backend, box.plan.token_rows, _wanted(x, scale)
        ctx.mark_non_differentiable(scales)
        return rows, scales

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor, d_scales: Tensor) -> Any:
        no_gradient = [None] * (len(ctx.wanted) - 1)  # scale, if given
        return _gradients(ctx.wanted, lambda: ctx.backend.permute_backward(d_rows, ctx.token_rows), *no_gradient)


class _Unpermute(PyLayer):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor | None, backend: Backend, box: _PlanBox) -> Tensor:
        # The plain sum needs no rows for its gradient and must not keep them alive.
        ctx.save_for_backward(*(() if probs is None else (rows, probs)))
        ctx.backend, ctx.plan, ctx.wanted = backend, box.plan, _wanted(rows, probs)
        return backend.unpermute(rows, probs, box.plan)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        rows, probs = ctx.saved_tensor() or (None, None)
        d_rows, d_probs = ctx.backend.unpermute_backward(d_out, rows, probs, ctx.plan, ctx.wanted)
        return _gradients(ctx.wanted, lambda: d_rows, *([] if probs is None else [lambda: d_probs]))


class _MoePermute(PyLayer):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        scale: Tensor | None,
        routemap: Tensor,
        probs: Tensor,
        counts: Tensor | None,
        backend: Backend,
        spec: MoePermuteSpec,
    ) -> Tensors:
        outputs = backend.moe_permute(hidden_states, scale, routemap, probs, counts, spec)
        ctx.backend, ctx.maps, ctx.do_gather = backend, outputs[6:], spec.do_gather
        ctx.wanted = _wanted(hidden_states, scale, routemap, probs, counts)
        ctx.optional_inputs = scale is not None, counts is not None
        ctx.mark_non_differentiable(outputs[1], *outputs[3:])
        if _is_float8(hidden_states):
            ctx.mark_non_differentiable(outputs[0])
            ctx.set_materialize_grads(False)  # Paddle cannot make float8 zeros
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        d_rows, d_row_probs = gradients[0], gradients[2]
        slot_to_row, token_rows = ctx.maps
        if not ctx.do_gather:  # no row was moved: the sum over rows that do not exist is zero
            token_rows = paddle.full_like(token_rows, -1)
        has_scale, has_counts = ctx.optional_inputs
        return _gradients(
            ctx.wanted,
            lambda: ctx.backend.permute_backward(d_rows, token_rows),
            *[None] * has_scale,
            None,
            lambda: ctx.backend.gather_slots(d_row_probs, slot_to_row),
            *[None] * has_counts,
        )


class _MoeUnpermute(PyLayer):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        rowmap: Tensor,
        routemap: Tensor,
        probs: Tensor,
        backend: Backend,
        spec: MoeUnpermuteSpec,
    ) -> Tensors:
        # As above: the plain sum must not keep its rows.
        ctx.save_for_backward(rowmap, routemap, probs, *([rows] if spec.weighted else []))
        ctx.backend, ctx.spec, ctx.wanted = backend, spec, _wanted(rows, rowmap, routemap, probs)
        return backend.moe_unpermute(rows, rowmap, routemap, probs, spec)

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor, d_prob_topk: Tensor) -> Any:
        rowmap, routemap, probs, *kept = ctx.saved_tensor()
        rows = kept[0] if kept else None
        d_rows, d_probs = ctx.backend.moe_unpermute_backward(
            d_hidden, d_prob_topk, rows, rowmap, routemap, probs, ctx.spec, ctx.wanted
        )
        return _gradients(ctx.wanted, lambda: d_rows, None, None, lambda: d_probs)


class _SortChunks(PyLayer):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor | None,
        split_sizes: Tensor,
        order: Tensor,
        backend: Backend,
        validation: Validation,
    ) -> Tensors:
        outputs = backend.sort_chunks(x, probs, split_sizes, order, validation)
        ctx.backend, ctx.chunks = backend, (split_sizes, order, outputs[2])
        ctx.has_probs, ctx.wanted = probs is not None, _wanted(x, probs, split_sizes, order)
        ctx.mark_non_differentiable(outputs[2], *([] if ctx.has_probs else [outputs[1]]))
        if _is_float8(x):
            ctx.mark_non_differentiable(outputs[0])
            ctx.set_materialize_grads(False)  # Paddle cannot make float8 zeros
        return outputs

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_probs_out: Tensor, d_map: Tensor) -> Any:
        def back(gradient: Tensor) -> Tensor:
            return ctx.backend.sort_chunks_backward(gradient, *ctx.chunks)

        d_probs = [lambda: back(d_probs_out)] * ctx.has_probs
        return _gradients(ctx.wanted, lambda: back(d_out), *d_probs, None, None)


class _Values(PyLayer):
    """Values of slots to their rows, or back; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, backend: Backend, box: _PlanBox, to_rows: bool) -> Tensor:
        ctx.maps, ctx.back = box.plan, backend.rows_to_slots if to_rows else backend.slots_to_rows
        there = backend.slots_to_rows if to_rows else backend.rows_to_slots
        return there(values, box.plan)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.back(gradient, ctx.maps)


class _CalculateTopk(PyLayer):
    @staticmethod
    def forward(ctx: Any, gating: Tensor, correction_bias: Tensor | None, backend: Backend, spec: TopkSpec) -> Tensors:
        weights, ids, scores = backend.calculate_topk(gating, correction_bias, spec)
        ctx.save_for_backward(gating, ids)
        ctx.backend, ctx.spec, ctx.wanted = backend, spec, _wanted(gating, correction_bias)
        ctx.mark_non_differentiable(ids, *([] if spec.return_scores else [scores]))
        return weights, ids, scores

    @staticmethod
    def backward(ctx: Any, d_weights: Tensor, d_ids: Tensor, d_scores: Tensor) -> Any:
        given = d_weights, d_scores if ctx.spec.return_scores else None
        no_gradient = [None] * (len(ctx.wanted) - 1)  # correction_bias, if given
        return _gradients(
            ctx.wanted,
            lambda: ctx.backend.calculate_topk_backward(*given, *ctx.saved_tensor(), ctx.spec),
            *no_gradient,
        )


class _QuantizedExperts(PyLayer):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        backend: Backend,
        box: _PlanBox,
        spec: QuantizeSpec,
        expert_fn: Callable[..., Tensor],
        expert_vjp: Callable[..., Tensors],
        *tensors: Tensor,
    ) -> Tensor:
        codes, scales = backend.permute_quantized(x, box.plan, "all", spec)
        ctx.save_for_backward(codes, scales, *tensors)
        ctx.backend, ctx.plan, ctx.expert_vjp = backend, box.plan, expert_vjp
        ctx.wanted = _wanted(x, *tensors)
        return expert_fn(codes, scales, *tensors)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        d_rows, *d_tensors = ctx.expert_vjp(d_out, *ctx.saved_tensor())
        return _gradients(
            ctx.wanted,
            lambda: ctx.backend.unpermute(d_rows, None, ctx.plan),
            *(lambda d_tensor=d_tensor: d_tensor for d_tensor in d_tensors),
        )


class _GroupedGemm(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, weights: Tensor | None, backend: Backend, box: _PlanBox) -> Tensor:
        ctx.save_for_backward(x, w, *(() if weights is None else (weights,)))
        ctx.backend, ctx.spec, ctx.wanted = backend, box.plan, _wanted(x, w, weights)
        return backend.grouped_gemm(x, w, weights, box.plan)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        x, w, *weights = ctx.saved_tensor()
        made = ctx.backend.grouped_gemm_backward(d_out, x, w, weights[0] if weights else None, ctx.spec, ctx.wanted)
        return _gradients(ctx.wanted, *(lambda each=each: each for each in made[: len(ctx.wanted)]))


def calculate_topk(backend: Backend, gating: Tensor, correction_bias: Tensor | None, spec: TopkSpec) -> Tensors:
    """Weights, ids and scores (0 elements where they are not wanted), differentiable in gating."""
    if correction_bias is not None and not correction_bias.stop_gradient:
        correction_bias = correction_bias.detach()
    if _runs_directly(backend, gating):
        return backend.calculate_topk(gating, correction_bias, spec)
    return _CalculateTopk.apply(gating, correction_bias, backend, spec)


def route(backend: Backend, routing: Tensor, probs: Tensor | None, counts: Tensor | None, spec: RouteSpec) -> Tensors:
    """The ten tensors of a plan; row_probs is differentiable in probs."""
    if probs is None or _runs_directly(backend, probs):
        return backend.route(routing, probs, counts, spec)
    return _Route.apply(routing, probs, counts, backend, spec)


def permute(backend: Backend, x: Tensor, scale: Tensor | None, plan: Any, fill_padding: str) -> Tensors:
    """Rows and scales in expert order; rows are differentiable in x unless they are float8."""
    x = _constant_if_float8(x)
    if _runs_directly(backend, x):
        return backend.permute(x, scale, plan, fill_padding)
    return _Permute.apply(x, scale, backend, _PlanBox(plan), fill_padding)


def unpermute(backend: Backend, rows: Tensor, probs: Tensor | None, plan: Any) -> Tensor:
    """The sum of each token's rows, differentiable in rows and probs."""
    if _runs_directly(backend, rows, probs):
        return backend.unpermute(rows, probs, plan)
    return _Unpermute.apply(rows, probs, backend, _PlanBox(plan))


def moe_permute(
    backend: Backend,
    hidden_states: Tensor,
    scale: Tensor | None,
    routemap: Tensor,
    probs: Tensor,
    counts: Tensor | None,
    spec: MoePermuteSpec,
) -> Tensors:
    """The eight outputs of `Backend.moe_permute`, differentiable in hidden_states (not float8 ones) and probs."""
    hidden_states = _constant_if_float8(hidden_states)
    if _runs_directly(backend, hidden_states, probs):
        return backend.moe_permute(hidden_states, scale, routemap, probs, counts, spec)
    return _MoePermute.apply(hidden_states, scale, routemap, probs, counts, backend, spec)


def moe_unpermute(
    backend: Backend, rows: Tensor, rowmap: Tensor, routemap: Tensor, probs: Tensor, spec: MoeUnpermuteSpec
) -> Tensors:
    """The sum of each token's rows and the probabilities per slot, differentiable in rows and probs."""
    if _runs_directly(backend, rows, probs):
        return backend.moe_unpermute(rows, rowmap, routemap, probs, spec)
    return _MoeUnpermute.apply(rows, rowmap, routemap, probs, backend, spec)


def sort_chunks(
    backend: Backend, x: Tensor, probs: Tensor | None, split_sizes: Tensor, order: Tensor, validation: Validation
) -> Tensors:
    """Rows, probabilities and source_to_dest; differentiable in x (not float8) and probs."""
    x = _constant_if_float8(x)
    if backend.differentiable or (x.stop_gradient and (probs is None or probs.stop_gradient)):
        return backend.sort_chunks(x, probs, split_sizes, order, validation)
    return _SortChunks.apply(x, probs, split_sizes, order, backend, validation)


def slots_to_rows(backend: Backend, slot_values: Tensor, maps: Any) -> Tensor:
    """The value of the slot that each row belongs to, differentiable."""
    if backend.differentiable or slot_values.stop_gradient:
        return backend.slots_to_rows(slot_values, maps)
    return _Values.apply(slot_values, backend, _PlanBox(maps), True)


def rows_to_slots(backend: Backend, row_values: Tensor, maps: Any) -> Tensor:
    """The value of each slot's row, differentiable."""
    if backend.differentiable or row_values.stop_gradient:
        return backend.rows_to_slots(row_values, maps)
    return _Values.apply(row_values, backend, _PlanBox(maps), False)


def quantized_experts(
    backend: Backend,
    x: Tensor,
    tensors: Tensors,
    plan: Any,
    spec: QuantizeSpec,
    expert_fn: Callable[..., Tensor],
    expert_vjp: Callable[..., Tensors],
) -> Tensor:
    """What the experts make of the quantised rows, differentiable in x and the tensors."""
    return _QuantizedExperts.apply(x, backend, _PlanBox(plan), spec, expert_fn, expert_vjp, *tensors)


def grouped_gemm(backend: Backend, x: Tensor, w: Tensor, weights: Tensor | None, spec: GemmSpec) -> Tensor:
    """Each expert's matrix times its own rows, or those of tokens, weighted; differentiable in all tensors."""
    if backend.differentiable and spec.plan is not None:
        x, _ = permute(resolve("permute", x), x, None, spec.plan, "all")
        spec = spec._replace(plan=None)
    if _runs_directly(backend, x, w, weights):
        return backend.grouped_gemm(x, w, weights, spec)
    return _GroupedGemm.apply(x, w, weights, backend, _PlanBox(spec))
