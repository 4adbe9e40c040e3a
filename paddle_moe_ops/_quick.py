# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Plain calls of the verbs, which the compiled library checks and runs itself; `public` tries them first.

Each function has the arguments of the public one. It returns the result, or None if the call is not plain: an argument
is unusual, a backend is requested, or the library declines (see `QUICK` in `backends.compiled`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor

from . import _checks
from ._graphs import constant, untraced
from .backends import MoePermuteSpec, MoeUnpermuteSpec, RouteSpec, chosen, compiled_backend, layer_operator
from .routing import Plan

AMAX_MIN = 1e-4


def quick_permute(
    x: Any = None,
    plan: Any = None,
    scale: Any = None,
    *others: Any,
    quantize: Any = None,
    scale_layout: Any = "row",
    amax_min: Any = AMAX_MIN,
    fill_padding: Any = "all",
    **more: Any,
) -> tuple[Tensor, None] | None:
    """The result of a plain call of `permute`, or None for other calls."""
    if (
        type(plan) is Plan
        and scale is None
        and quantize is None
        and scale_layout == "row"
        and type(amax_min) is float  # other values may be arrays, whose comparison is no bool
        and amax_min == AMAX_MIN
        and fill_padding == "all"
        and not others
        and not more
        and chosen() is None
    ):
        rows = compiled_backend.quick_permute(x, plan.slot_to_row, plan.token_rows, plan.row_to_token)
        if rows is True:
            return _go_on(_permute_with_gradient, x, plan)
        if isinstance(rows, Tensor):
            return rows, None
    return None


def quick_unpermute(y: Any = None, plan: Any = None, probs: Any = None, *others: Any, **more: Any) -> Tensor | None:
    """The result of a plain call of `unpermute`, or None for other calls."""
    if type(plan) is not Plan or others or more or chosen() is not None:
        return None
    maps = plan.token_rows, plan.row_to_token
    if probs is None:
        out = compiled_backend.quick_unpermute(y, *maps)
    else:
        out = compiled_backend.quick_unpermute_weighted(y, probs, *maps, plan.row_to_slot)
    return _go_on(_unpermute_with_gradient, y, plan, probs) if out is True else out


def quick_moe_permute(
    hidden_states: Any = None,
    scale: Any = None,
    expert_routemap_topk: Any = None,
    expert_prob_topk: Any = None,
    num_experts: Any = None,
    tokens_per_expert: Any = None,
    padding_alignment: Any = None,
    do_gather: Any = True,
    using_ue8m0_scale: Any = False,
    return_expert_indices: Any = False,
    override_buffer_size: Any = -1,
    name: Any = None,
    *others: Any,
    **more: Any,
) -> tuple[Tensor, ...] | None:
    """The result of a plain call of `moe_permute`, or None for other calls."""
    if (
        scale is not None
        or do_gather is not True
        or using_ue8m0_scale is not False
        or return_expert_indices is not False
        or others
        or more
        or chosen() is not None
    ):
        return None
    if tokens_per_expert is None or override_buffer_size != -1:
        counts: list[int] = []
    elif type(tokens_per_expert) is list and tokens_per_expert:
        counts = tokens_per_expert
    else:
        return None
    arguments = hidden_states, expert_routemap_topk, expert_prob_topk, num_experts, counts, padding_alignment
    outputs = compiled_backend.quick_moe_permute(*arguments, override_buffer_size)
    return _go_on(_moe_permute_with_gradient, *arguments, override_buffer_size) if outputs is True else outputs


def quick_moe_unpermute(
    hidden_states_unzipped: Any = None,
    zipped_expertwise_rowmap: Any = None,
    expert_routemap_topk: Any = None,
    token_prob_unzipped: Any = None,
    total_zipped_tokens: Any = None,
    num_experts: Any = None,
    using_mix_precision: Any = True,
    using_weighted_combine: Any = False,
    name: Any = None,
    *others: Any,
    **more: Any,
) -> tuple[Tensor, ...] | None:
    """The result of a plain call of `moe_unpermute`, or None for other calls."""
    if (
        type(using_mix_precision) is not bool
        or type(using_weighted_combine) is not bool
        or others
        or more
        or chosen() is not None
    ):
        return None
    call = (
        compiled_backend.quick_moe_unpermute_weighted
        if using_weighted_combine
        else compiled_backend.quick_moe_unpermute
    )
    tensors = hidden_states_unzipped, zipped_expertwise_rowmap, expert_routemap_topk, token_prob_unzipped
    outputs = call(*tensors, total_zipped_tokens, num_experts)
    if outputs is True:
        return _go_on(_moe_unpermute_with_gradient, *tensors, num_experts, using_weighted_combine)
    return outputs


def quick_moe_mlp(
    x: Any = None,
    plan: Any = None,
    probs: Any = None,
    gate_up: Any = None,
    down: Any = None,
    *others: Any,
    activation: Any = "swiglu",
    transpose: Any = False,
    weights_by: Any = None,
    keep: Any = "h",
    workspace_mb: Any = 1024,
    accumulate: Any = False,
    defer_dw: Any = False,
    **more: Any,
) -> Tensor | None:
    """The result of a plain call of `moe_mlp`, or None for other calls."""
    if (
        type(plan) is not Plan
        or others
        or more
        or accumulate is not False
        or defer_dw is not False
        or type(transpose) is not bool
        or type(workspace_mb) is not int
        or (type(activation), type(keep)) != (str, str)
        or activation != "swiglu"
        or keep not in ("h", "x")
        or chosen() is not None
        or paddle.amp.is_autocast_enabled()
    ):
        return None
    by_row = type(weights_by) is str and weights_by == "row"
    if not by_row and (weights_by is not None or getattr(probs, "ndim", 0) != 2):
        return None
    maps = plan.token_rows, plan.row_to_token, plan.tokens_per_expert, plan.expert_offsets, plan.slot_to_row
    operands = x, gate_up, down, probs
    out = compiled_backend.quick_moe_mlp(*operands, *maps, int(transpose), workspace_mb, int(by_row))
    if out is True:
        return _go_on(_moe_mlp_with_gradient, *operands, plan, transpose, keep, workspace_mb, not by_row)
    return out


def _go_on(operator: Callable[..., Any], rows: Tensor, *others: Any) -> Any:
    """Run an operator with fitting arguments, one of which requires a gradient; None if it has no kernels for the
    rows."""
    return untraced(_where_it_can, operator, rows, *others)


def _where_it_can(operator: Callable[..., Any], rows: Tensor, *others: Any) -> Any:
    return operator(rows, *others) if compiled_backend.cannot_run_on(rows) is None else None


def _permute_with_gradient(x: Tensor, plan: Plan) -> tuple[Tensor, None]:
    return compiled_backend.permute(x, None, constant(plan), "all")[0], None


def _unpermute_with_gradient(y: Tensor, plan: Plan, probs: Tensor | None) -> Tensor:
    return compiled_backend.unpermute(y, probs, constant(plan))


def _moe_mlp_with_gradient(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    probs: Tensor,
    plan: Plan,
    transpose: bool,
    keep: str,
    workspace_mb: int,
    by_slot: bool,
) -> Tensor:
    return layer_operator(
        *(x, gate_up, down, probs, plan),  # its maps are integers, which have no gradient
        transpose=transpose,
        keeps_hidden=keep == "h",
        workspace=workspace_mb << 20,
        in_place=True,
        by_slot=by_slot,
    )


def _moe_permute_with_gradient(
    x: Tensor, ids: Tensor, probs: Tensor, num_experts: int, counts: list[int], alignment: int, buffer_size: int
) -> tuple[Tensor, ...]:
    validation = _checks.validation("moe_permute", None, x)
    route = RouteSpec(num_experts, -1, alignment, tuple(counts) or None, buffer_size, "first", validation)
    spec = MoePermuteSpec(route, True, False, "all")
    return compiled_backend.moe_permute(x, None, constant(ids), probs, None, spec)[:4]


def _moe_unpermute_with_gradient(
    rows: Tensor, rowmap: Tensor, ids: Tensor, probs: Tensor, num_experts: int, weighted: bool
) -> tuple[Tensor, ...]:
    spec = MoeUnpermuteSpec(num_experts, weighted, False, _checks.validation("moe_unpermute", None, rows))
    return compiled_backend.moe_unpermute(rows, constant(rowmap), constant(ids), probs, spec)
