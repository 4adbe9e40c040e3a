# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Slots and their rows, from a gate or from a scatter_index: for the operators of ERNIE's dispatch and combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import constant, dense, index_sample, is_graph_value, numbers_of, to_dtype
from ..backends import RowMaps, Validation, resolve
from ..routing import calculate_topk, route
from .row_maps import as_int32, kept, known_slots, num_rows_of, of_experts, read_index_map


def choose_experts(
    name: str,
    x: Tensor,
    gate_logits: Tensor,
    corr_bias: Tensor | None,
    k: Any,
    dtypes: Sequence[Any] = _checks.SUM_DTYPES,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of a gate, and choose: float32 weights [T, K], differentiable, and int32 ids [T, K]."""
    _checks.rows(name, "x", x, dtypes, "num_tokens")
    _checks.tensor(name, "gate_logits", gate_logits, (paddle.float32,), [x.shape[0], "num_experts"])
    num_experts = gate_logits.shape[1]
    if corr_bias is not None:
        _checks.tensor(name, "corr_bias", corr_bias, (paddle.float32,), [num_experts])
    _checks.same_place(name, x=x, gate_logits=gate_logits, corr_bias=corr_bias)
    k = _checks.integer(name, "k", k, 1)
    if k > num_experts:
        _checks.bad_value(name, "k", f"at most {num_experts}, the experts of gate_logits", k)
    scores = constant(gate_logits)
    chosen_by = scores if corr_bias is None else scores + corr_bias
    # Only the choice is needed, which depends on the values themselves.
    ids = calculate_topk(chosen_by, k, False, False, pre_act=False, post_act=True)[1].astype("int32")
    return index_sample(gate_logits, ids), ids


def ranks_by_slot(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The place of each slot among those of its expert, by slot, then token.

    Returns:
        int32 [T, K] places, anything for slots of no expert; int32 [E] ends of the experts' segments; int32 [E] counts.
    """
    topk = ids.shape[1]
    num_slots = known_slots(ids)
    by_slot = ids.transpose([1, 0]).reshape([num_slots, 1])
    plan = route(by_slot, num_experts=num_experts, buffer_size=num_slots, validate=False)
    rows = plan.slot_to_row.reshape([topk, ids.shape[0]]).transpose([1, 0])
    ranks = rows - of_experts(plan.expert_offsets, ids)
    return ranks, plan.expert_offsets[1:], plan.routed_per_expert


def slots_of(ids: Tensor) -> int | Tensor:
    return num_rows_of(ids) * ids.shape[1]


def weights_and_index(weights: Tensor, is_kept: Tensor, slot_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [T, K] and scatter_index [K, T], both 0 in slots that are not kept."""
    rows = paddle.where(is_kept, slot_rows, paddle.zeros_like(slot_rows)).transpose([1, 0])
    scatter_index = rows if is_graph_value(rows) else dense(rows)
    return paddle.where(is_kept, weights, paddle.zeros_like(weights)), scatter_index


def maps_of_dispatch(
    name: str,
    x: Tensor,
    gate_logits: Tensor,
    corr_bias: Tensor | None,
    k: Any,
    capacity: Any,
    use_pad: Any,
    dtypes: Sequence[Any] = _checks.SUM_DTYPES,
) -> tuple[RowMaps, tuple[Tensor, ...]]:
    """Check the arguments of a dispatch, and choose rows for its slots.

    Returns:
        the maps of the rows, and combine_weights, scatter_index, expert_offset and expert_id of `moe_gate_dispatch`.
    """
    _checks.flag(name, "use_pad", use_pad)
    weights, ids = choose_experts(name, x, gate_logits, corr_bias, k, dtypes)
    capacity = _checks.integer(name, "capacity", capacity, 0)
    num_experts = gate_logits.shape[1]
    if use_pad:
        ranks, ends, _ = ranks_by_slot(ids, num_experts)
        slot_rows, num_rows = ids * capacity + ranks, num_experts * capacity
    else:
        plan = route(ids, num_experts=num_experts, buffer_size=known_slots(ids), validate=False)
        slot_rows, ends, num_rows = plan.slot_to_row, plan.expert_offsets[1:], slots_of(ids)
        ranks = slot_rows - of_experts(plan.expert_offsets, ids)
    is_kept = ranks < capacity
    maps = read_index_map(name, kept(is_kept, slot_rows), num_rows, Validation.OFF)
    return maps, (*weights_and_index(weights, is_kept, slot_rows), ends.astype("int64"), ids)


def maps_of_slots(name: str, x: Tensor, slot_rows: Tensor) -> tuple[Tensor, RowMaps, Tensor | None]:
    """Rows and their maps for slots int32 [T, K], -1 for those without a row; errors name scatter_index.

    Maps have one slot for each row. If slots share a row, the rows are copies in float32, one for each slot, ascending
    for each token. So are they in a graph, where sharing is unknown.

    Returns:
        the rows, their maps, and the row of ``x`` that each is a copy of, or None if they are those of ``x``.
    """
    validation = Validation.OFF if is_graph_value(x) else _checks.validation(name, None, x)
    num_rows = num_rows_of(x)
    with _checks.renaming(name, name, row_id_map="scatter_index"):
        maps = read_index_map(name, slot_rows, num_rows, validation, check_repeats=False)
    is_row = (slot_rows >= 0) & (slot_rows < num_rows)
    if not is_graph_value(x) and not bool((is_row & (maps.slot_to_row < 0)).any()):
        return x, maps, None
    slot_rows = kept(is_row, slot_rows)
    order = slot_rows.argsort(-1, stable=True)
    slots = numbers_of(slot_rows.flatten()).reshape(slot_rows.shape)
    copies = slots - slots % slots.shape[1] + order.argsort(-1).astype("int32")
    sources = slot_rows.sort(-1).flatten().clip(min=0)
    maps = read_index_map(name, kept(is_row, copies), slots_of(slots), Validation.OFF)
    return copies_of(x, sources), maps, sources


def rows_and_maps(
    name: str, x: Tensor, weights: Tensor, scatter_index: Tensor, epsilon: float
) -> tuple[Tensor, RowMaps, Tensor | None]:
    """Check the arguments of a combine; `maps_of_slots` of the slots whose weight is more than epsilon."""
    argument = "combine_weight" if "no_weight" in name else "combine_weights"
    _checks.rows(name, "x", x, _checks.SUM_DTYPES, "num_rows")
    _checks.tensor(name, argument, weights, _checks.SUM_DTYPES, ["num_tokens", "topk"])
    _checks.tensor(name, "scatter_index", scatter_index, _checks.ID_DTYPES, weights.shape)
    _checks.same_place(name, **{"x": x, argument: weights, "scatter_index": scatter_index})
    takes_part = ~(constant(weights).astype("float32").abs() <= epsilon)
    return maps_of_slots(name, x, kept(takes_part, as_int32(scatter_index)))


def combine(name: str, x: Tensor, combine_weights: Tensor, scatter_index: Tensor) -> Tensor:
    """`moe_combine` under the name of a caller."""
    rows, maps, _ = rows_and_maps(name, x, combine_weights, scatter_index, 0.0)
    out = resolve("unpermute", rows).unpermute(rows, combine_weights.astype("float32"), maps)
    return to_dtype(out, x.dtype)


def gradients_of_combine(
    name: str, x: Tensor, combine_weights: Tensor, scatter_index: Tensor, gradient: Tensor, argument: str
) -> tuple[Tensor, Tensor]:
    """Check the arguments; the gradient of x, and float32 [T, K, H] products whose sum is that of the weights."""
    maps = rows_and_maps(name, x, combine_weights, scatter_index, 0.0)
    num_tokens, topk = combine_weights.shape
    d_x = gradient_of_rows(name, x, maps, combine_weights.astype("float32"), gradient, argument)
    rows = copies_of(x, scatter_index.flatten()).reshape([num_tokens, topk, x.shape[1]])
    return d_x, rows * gradient.astype("float32").unsqueeze(1)


def gradient_of_rows(
    name: str,
    x: Tensor,
    rows_and_maps: tuple[Tensor, RowMaps, Tensor | None],
    weights: Tensor | None,
    gradient: Tensor,
    argument: str,
) -> Tensor:
    """Check the gradient [T, H] of a sum of rows, which becomes that of ``x``, its rows."""
    rows, maps, sources = rows_and_maps
    _checks.tensor(name, argument, gradient, (x.dtype,), [maps.slot_to_row.shape[0], x.shape[1]])
    _checks.same_place(name, **{"x": x, argument: gradient})
    d_out = to_dtype(constant(gradient), rows.dtype)
    if weights is None:
        d_rows = resolve("permute", rows).permute(d_out, None, maps, "all")[0]
    else:
        d_rows = resolve("unpermute", rows).unpermute_backward(d_out, rows, weights, maps, (True, False))[0]
    if sources is not None:
        d_rows = paddle.scatter_nd_add(paddle.zeros_like(x.astype("float32")), sources.unsqueeze(-1), d_rows)
    return to_dtype(d_rows, x.dtype)


def copies_of(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x, in float32: Paddle gathers no float16 on a CPU."""
    return paddle.gather(x.astype("float32"), rows)
