# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routing decided once: the Plan, and how to make it."""

from __future__ import annotations

from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from . import _checks, autograd
from ._graphs import traceable
from .backends import RouteSpec, resolve

__all__ = ["Plan", "route"]


class Plan(NamedTuple):
    """Where every slot's row is, and whose row every row is. Made by `route`, followed by `permute` and `unpermute`.

    T tokens, K slots per token, E experts, N rows of the permuted buffer. A slot is one (token, k) pair with flat
    number t * K + k. All tensors but ``row_probs`` are int32 on the routing's device and have no gradient; -1 means
    "none".

    Attributes:
        slot_to_row: [T, K] row of each slot.
        token_rows: [T, K] rows of each token, ascending, -1 last.
        row_to_token: [N] token of each row, -1 for padding.
        row_to_slot: [N] flat slot of each row, -1 for padding.
        row_to_expert: [N] expert of each row, -1 for padding.
        row_probs: float32 [N] probability of each row, 0 for padding; None when the plan was made without.
        tokens_per_expert: [E] routed rows of each expert that lie inside the buffer, without padding.
        expert_offsets: [E + 1] first row of each expert's segment, clamped to the buffer; the last is its end.
        routed_per_expert: [E] routed rows of each expert, those dropped for lack of room included.
        overflow: [1] slots dropped because a static buffer had no room.
        num_tokens: T.
        topk: K.
        num_experts: E, at most 65536.
        padding_alignment: segments begin at multiples of this many rows.
        num_rows: N; -1 in a static graph that does not know it.
    """

    slot_to_row: Tensor
    token_rows: Tensor
    row_to_token: Tensor
    row_to_slot: Tensor
    row_to_expert: Tensor
    row_probs: Tensor | None
    tokens_per_expert: Tensor
    expert_offsets: Tensor
    routed_per_expert: Tensor
    overflow: Tensor
    num_tokens: int
    topk: int
    num_experts: int
    padding_alignment: int
    num_rows: int


@traceable
def route(
    routing: Tensor,
    probs: Tensor | None = None,
    *,
    num_experts: int | None = None,
    padding_alignment: int = 1,
    tokens_per_expert: Any = None,
    buffer_size: int = -1,
    topk: int | None = None,
    duplicates: str = "first",
    validate: bool | None = None,
) -> Plan:
    """Give every routed slot its row in expert order.

    Expert segments follow each other ascending, each padded to a multiple of ``padding_alignment`` rows; inside a
    segment rows follow ascending token, then slot. Deterministic: the same maps on every backend and run.

    Differentiable: ``plan.row_probs`` in ``probs``.
    Host synchronisation: on a GPU one, to learn N, unless ``buffer_size`` or host counts are given; none on the CPU.

    Args:
        routing: expert ids, int32 or int64 [T, K] with -1 for an unassigned slot, or a mask, bool [T, E].
        probs: float32 [T, K] for ids, [T, E] for a mask, or None.
        num_experts: E, at most 65536; needed for ids, read off a mask.
        padding_alignment: rows, >= 1.
        tokens_per_expert: the number of routed rows of each expert, if known: a list of ints or 0-D int tensors, or a
            1-D int tensor. They must be the true counts. None: counted. Ignored with a static buffer.
        buffer_size: N of a static buffer. Rows at or beyond its end are dropped and counted in ``plan.overflow``, the
            others stay where they are. -1: N is the sum of the padded segments.
        topk: K of a mask, by default E; the highest experts beyond it are dropped.
        duplicates: "first": of equal ids in one token, the first slot gets the row. "each": every slot gets one.
        validate: True: bad ids, repeated ids (with duplicates="first"), NaN probabilities and dropped slots raise.
            False: bad ids count as -1, repeated ids have no row, NaN is copied. None: PADDLE_MOE_OPS_VALIDATE, else on
            the CPU all but dropped slots raise, on a GPU none.

    Returns:
        The plan.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; wrong ``tokens_per_expert``; bad data (see ``validate``).
    """
    name = "route"
    _checks.tensor(name, "routing", routing, (*_checks.ID_DTYPES, paddle.bool), ["num_tokens", "topk or num_experts"])
    num_tokens, columns = routing.shape
    is_mask = routing.dtype == paddle.bool
    if columns == 0:
        name_of_columns = "num_experts" if is_mask else "topk"
        expected = f"of shape [num_tokens, {name_of_columns}] with {name_of_columns} >= 1"
        _checks.bad_value(name, "routing", expected, list(routing.shape))
    if is_mask:
        if num_experts is not None and num_experts != columns:
            _checks.bad_value(name, "num_experts", f"{columns}, the columns of the mask", num_experts)
        num_experts = columns
        topk = columns if topk is None else _checks.integer(name, "topk", topk, 1)
        if topk > columns:
            _checks.bad_value(name, "topk", f"at most num_experts={columns}", topk)
    else:
        if topk is not None and topk != columns:
            _checks.bad_value(name, "topk", f"{columns}, the columns of the ids (or None)", topk)
        topk = columns
    if num_experts is None:
        _checks.bad_value(name, "num_experts", "given with expert ids", None)
    num_experts = _checks.integer(name, "num_experts", num_experts, 1, _checks.MAX_EXPERTS)
    if probs is not None:
        _checks.tensor(name, "probs", probs, (paddle.float32,), [num_tokens, columns])
    padding_alignment = _checks.integer(name, "padding_alignment", padding_alignment, 1)
    buffer_size = _checks.integer(name, "buffer_size", buffer_size, -1)
    _checks.choice(name, "duplicates", duplicates, ("first", "each"))
    counts, counts_tensor = _checks.counts(name, tokens_per_expert, num_experts, has_static_buffer=buffer_size >= 0)
    _checks.same_place(name, routing=routing, probs=probs, tokens_per_expert=counts_tensor)
    validation = _checks.validation(name, validate, routing)
    spec = RouteSpec(
        num_experts, topk if is_mask else -1, padding_alignment, counts, buffer_size, duplicates, validation
    )
    maps = autograd.route(resolve(name, routing), routing, probs, counts_tensor, spec)
    fields = dict(zip(Plan._fields, maps, strict=False))  # the tensors come first
    if probs is None:
        fields["row_probs"] = None
    return Plan(
        **fields,
        num_tokens=num_tokens,
        topk=topk,
        num_experts=num_experts,
        padding_alignment=padding_alignment,
        num_rows=fields["row_to_token"].shape[0],
    )
