# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The passes of `SwiGLUExperts`: by counts, by a plan, and with the sums of rows, from parameters or codes."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from .. import _checks
from .._activations import FUNCTIONS, activate
from .._graphs import is_graph_value, of_shape, public
from .._matrices import check_deferrable, check_destinations
from .._options import MatrixFormat
from .._quick import quick_moe_mlp
from ..backends import Float8Matrices, GemmSpec, resolve
from ..backends.experts import holds_others, is_default
from ..gemm import multiplied
from ..mlp import IN_GRAPH, LayerOptions, outputs_of, prepared_layer, prepared_quantized_layer
from ..routing import Plan, as_plan, check_weights, row_probs, tokens_of
from ._common import warn_user
from ._gradients import GradientOptions, gradients_of_call, operand_of
from ._quantized import matrices_of
from .microbatches import warn_of_codes_for_few_rows

NAME = "SwiGLUExperts"


class Parameters(NamedTuple):
    """The experts' parameters, or the codes of their matrices."""

    gate_up: Any
    down: Any
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def check_parameters(name: str, given: Parameters) -> None:
    check_destinations(name, **{argument: each for argument, each in given._asdict().items() if each is not None})


@public("rows", "experts", owner=NAME, called={"counts": "tokens_per_expert"})
def by_counts(
    rows: Tensor,
    experts: Parameters,
    sizes_of: tuple[int, int, int],
    activation: str,
    counts: Any,
    padding_alignment: int,
    how: GradientOptions,
) -> Tensor:
    """Each expert on its segment of rows; the sizes are E, H and I."""
    alignment = _checks.integer(NAME, "padding_alignment", padding_alignment, 1)
    gate_up, down, first_bias, second_bias = _of_shapes(experts, *sizes_of)
    _checks.operand(NAME, "rows", rows, gate_up, ["N", gate_up.shape[1]])
    counts, offsets = _groups(counts, gate_up.shape[0], rows, alignment)
    is_checked = isinstance(counts, list)
    groups = GemmSpec(counts, offsets, False, None, _checks.validation(NAME, None, rows), is_checked)
    # Under mixed precision each GEMM casts its operands, which may change the backend.
    product = multiplied if paddle.amp.is_autocast_enabled() else resolve("grouped_gemm", rows).grouped_gemm
    of_gate_up = of_down = None
    if how[1]:  # defer_dw
        (gate_up, of_gate_up), (down, of_down) = operand_of(how, gate_up), operand_of(how, down)
    first = product(rows, gate_up, None, first_bias, groups._replace(deferral=of_gate_up))
    return product(FUNCTIONS[activation](first), down, None, second_bias, groups._replace(deferral=of_down))


@public("x", "experts", "probs", owner=NAME, called={"x": "rows"})
def by_plan(
    x: Tensor,
    experts: Parameters,
    sizes_of: tuple[int, int, int],
    activation: str,
    plan: Plan,
    probs: Tensor | None,
    argument: str,
    how: GradientOptions,
) -> Tensor:
    """Each expert on its tokens; the sizes are E, H and I, ``argument`` is the caller's name of x."""
    gate_up, down, first_bias, second_bias = _of_shapes(experts, *sizes_of)
    plan = _plan_of_tokens(NAME, argument, x, plan, gate_up, *sizes_of[:2])
    weights = probs
    if probs is not None and check_weights(NAME, "probs", probs, plan):
        weights = row_probs(probs, plan)
    groups = GemmSpec(plan.tokens_per_expert, plan.expert_offsets, False, None, _checks.validation(NAME, None, x))
    with _checks.renaming("grouped_gemm", NAME, X=argument):
        of_gate_up = of_down = None
        if how[1]:  # defer_dw
            (gate_up, of_gate_up), (down, of_down) = operand_of(how, gate_up), operand_of(how, down)
        hidden = multiplied(x, gate_up, None, first_bias, groups._replace(plan=plan, deferral=of_gate_up))
        return multiplied(activate(hidden, activation), down, weights, second_bias, groups._replace(deferral=of_down))


@public("x", "experts", "probs", owner=NAME, called={"x": "rows"})
def combined(
    x: Tensor,
    experts: Parameters,
    sizes_of: tuple[int, int, int],
    activation: str,
    plan: Plan | None,
    probs: Tensor | None,
    compute: str | None,
    kept: Float8Matrices | None,
    is_first_microbatch: bool | None,
    name: str,
    training: bool,
    *,
    keep: str,
    workspace_mb: int,
    accumulate: bool,
    defer_dw: bool | str,
) -> Tensor:
    """Each expert on its tokens, and the sums of their rows; the sizes are E, H and I, ``name`` begins errors."""
    if compute is None and is_first_microbatch is not None:
        warn_user(f'{name}: is_first_microbatch has no effect without compute="fp8_1x128"')
    if accumulate or defer_dw:
        accumulate, defer_dw = gradients_of_call(name, x, training, accumulate=accumulate, defer_dw=defer_dw)
    if accumulate:
        check_parameters(name, experts)
    if defer_dw:
        check_deferrable(name, x, defer_dw, gate_up=experts.gate_up, down=experts.down)
    gate_up, down, gate_up_bias, down_bias = _of_shapes(experts, *sizes_of)
    if compute is None and gate_up_bias is None:
        options = {"activation": activation, "keep": keep, "workspace_mb": int(workspace_mb)}
        gradients = {"accumulate": accumulate, "defer_dw": defer_dw}
        out = quick_moe_mlp(x, plan, probs, gate_up, down, **options, **gradients)
        if out is not None:
            return out
    plan = _plan_of_tokens(name, "rows", x, plan, gate_up, *sizes_of[:2])
    by_slot = probs is not None and check_weights(name, "probs", probs, plan)
    _checks.same_place(name, rows=x, gate_up=gate_up, plan=plan.row_to_token, probs=probs)
    matrices = _matrices_of_call(name, kept, x, gate_up, down, is_first_microbatch)
    if compute is not None and matrices is None and not is_graph_value(x):
        warn_of_codes_for_few_rows(name, x, plan.num_rows, sizes_of[0])
    layer = LayerOptions(activation, False, keep, workspace_mb, accumulate, compute, defer_dw)
    operands = x, gate_up, down, probs, gate_up_bias, down_bias
    return outputs_of(prepared_layer(plan, operands, by_slot, layer, matrices))


@public("x", "gate_up_bias", "down_bias", "probs", owner=NAME, called={"x": "rows"})
def combined_codes(
    x: Tensor,
    codes: tuple[Tensor, ...],
    matrix_format: MatrixFormat,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    sizes_of: tuple[int, int, int],
    activation: str,
    plan: Plan | None,
    probs: Tensor | None,
    name: str,
    keep: str,
    workspace_mb: int,
) -> Tensor:
    """`combined` with `_quantized.codes_of` a layer; tracing by bytecode passes tensors alone through."""
    plan = _plan_of_tokens(name, "rows", x, plan, codes[0] if gate_up_bias is None else gate_up_bias, *sizes_of[:2])
    by_slot = probs is not None and check_weights(name, "probs", probs, plan)
    _checks.same_place(name, rows=x, gate_up_codes=codes[0], plan=plan.row_to_token, probs=probs)
    layer = LayerOptions(activation, True, keep, workspace_mb, False, None)
    operands = x, *matrices_of(codes, matrix_format), probs, gate_up_bias, down_bias
    return outputs_of(prepared_quantized_layer(plan, operands, by_slot, layer))


def _matrices_of_call(
    name: str, kept: Float8Matrices | None, x: Tensor, gate_up: Tensor, down: Tensor, is_first_microbatch: bool | None
) -> Float8Matrices | None:
    """The store of a call's float8 matrices, filled or to be filled; None if the call keeps none."""
    if kept is None or (not is_default(kept, gate_up) and is_first_microbatch is None):
        return None
    if is_graph_value(x):  # `set_is_first_microbatch` affects only calls in dygraph
        if is_first_microbatch is not None:
            _checks.bad_value(name, "is_first_microbatch", f"None {IN_GRAPH}", is_first_microbatch)
        return None
    if is_first_microbatch:
        kept.clear()
    was_empty, expected = kept.is_empty, None
    if holds_others(kept, gate_up, down, False):
        expected = "True once the matrices have moved or changed their dtype"
    elif was_empty and is_first_microbatch is False:
        expected = "True or None before anything is kept"
    if expected is not None:
        _checks.bad_value(name, "is_first_microbatch", expected, is_first_microbatch)
    return kept


def _plan_of_tokens(
    function: str, argument: str, x: Tensor, plan: Plan | None, matrices: Tensor, num_experts: int, hidden: int
) -> Plan:
    """Check tokens [T, H] and their plan."""
    _checks.operand(function, argument, x, matrices, ["T", hidden])
    plan = as_plan(function, plan)
    if plan.num_experts != num_experts:
        _checks.bad_value(function, "plan", f"one of {num_experts} experts", f"one of {plan.num_experts}")
    if x.shape[0] != plan.num_tokens:
        _checks.rows(function, argument, x, _checks.SUM_DTYPES, *tokens_of(plan))
    return plan


def _of_shapes(experts: Parameters, num_experts: int, hidden: int, intermediate: int) -> Parameters:
    shapes = (
        [num_experts, hidden, 2 * intermediate],
        [num_experts, intermediate, hidden],
        [num_experts, 2 * intermediate],
        [num_experts, hidden],
    )
    found = zip(experts, shapes, strict=True)
    return Parameters(*[None if each is None else of_shape(each, shape) for each, shape in found])


def _groups(counts: Any, num_experts: int, rows: Tensor, alignment: int) -> tuple[Any, Any]:
    """`m_sizes` and `expert_offsets` of `grouped_gemm`: rows of padding are between the groups."""
    name, argument, expected = NAME, "tokens_per_expert", "a list of ints or a 1-D int array or tensor"
    if isinstance(counts, Tensor) or is_graph_value(counts):
        _checks.tensor(name, argument, counts, _checks.ID_DTYPES, [num_experts])
        if is_graph_value(counts) or is_graph_value(rows) or not counts.place.is_cpu_place():
            if alignment == 1:
                return counts, None
            segments = (counts + (alignment - 1)) // alignment * alignment
            ends = paddle.cumsum(segments, dtype=segments.dtype)
            return counts, paddle.concat([ends - segments, ends[-1:]])
        counts = counts.tolist()
    elif counts is None:
        _checks.bad_value(name, "tokens_per_expert or plan", "given", "neither")
    elif isinstance(counts, Plan):
        _checks.bad_type(name, argument, expected, "a Plan, which must be passed by keyword, as plan")
    else:
        counts = _checks.listed(name, argument, counts, expected)
    numbers = []
    for i, count in enumerate(counts):
        plain = type(count) is int and 0 <= count < 2**31
        numbers.append(count if plain else _checks.integer(name, f"{argument}[{i}]", count, 0))
    segments = numbers
    if alignment > 1:
        segments = [-(-number // alignment) * alignment for number in numbers]
    num_rows = rows.shape[0]
    if len(numbers) != num_experts or num_rows not in (-1, sum(segments)):
        expected = f"{num_experts} counts whose segments have {num_rows} rows in all"
        _checks.bad_value(name, argument, expected, numbers)
    return numbers, list(itertools.accumulate(segments, initial=0)) if alignment > 1 else None
