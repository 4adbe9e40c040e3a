# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""From a router's choice to a plan: which row of the expert-ordered buffer every (token, k) slot gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Plan", "check_ids", "find_repeats", "route", "route_backward", "take_or_zero"]


class Plan(NamedTuple):
    """The row of every slot and the token of every row. Maps are int32 and -1 means "none".

    Attributes:
        slot_to_row: [T, K] row of each slot.
        token_rows: [T, K] the rows of each token, ascending, -1 last.
        row_to_token: [N] token of each row.
        row_to_slot: [N] flat slot ``t * K + k`` of each row.
        row_to_expert: [N] expert of each row.
        row_probs: [N] probability of each row, 0 in padding; None without probabilities.
        tokens_per_expert: [E] rows of each expert that were kept and lie inside the buffer.
        expert_offsets: [E + 1] padded start of each expert's segment, at most N.
        routed_per_expert: [E] rows routed to each expert, whether they were kept or not.
        overflow: 0-D, slots dropped because their expert was full or their row would lie at or beyond N.
        num_tokens: T.
        topk: K, the slots of a token.
        num_experts: E.
        padding_alignment: A, in rows.
        num_rows: N, the rows of the buffer.
    """

    slot_to_row: NDArray
    token_rows: NDArray
    row_to_token: NDArray
    row_to_slot: NDArray
    row_to_expert: NDArray
    row_probs: NDArray | None
    tokens_per_expert: NDArray
    expert_offsets: NDArray
    routed_per_expert: NDArray
    overflow: NDArray
    num_tokens: int
    topk: int
    num_experts: int
    padding_alignment: int
    num_rows: int


def route(
    routing: NDArray,
    probs: NDArray | None = None,
    *,
    num_experts: int | None = None,
    padding_alignment: int = 1,
    tokens_per_expert: Iterable[int] | None = None,
    buffer_size: int = -1,
    topk: int | None = None,
    duplicates: str = "first",
    capacity: int | None = None,
    validate: bool | None = None,
    function: str = "route",
    names: Mapping[str, str] | None = None,
) -> Plan:
    """Give every routed slot its row.

    Experts follow each other in ascending order; inside an expert, rows follow the flat slot number ``t * K +
    k``; each expert's segment is padded to a multiple of ``padding_alignment`` rows. Padding rows are -1 in
    every map and have probability 0.

    Args:
        routing: int [T, K] expert ids, or bool [T, E] mask. Slot k of a mask is the k-th set expert of the
            token, ascending; experts beyond ``topk`` are dropped.
        probs: float32, [T, K] for ids and [T, E] for a mask.
        num_experts: E, needed for ids.
        padding_alignment: A, in rows.
        tokens_per_expert: the caller's counts of routed rows, each with or without its segment's padding. Ignored with
            a static buffer.
        buffer_size: N when >= 0: rows at or beyond N are dropped, the others stay where they are. Otherwise N
            is the sum of the padded segments.
        topk: K of a mask (default E); ids bring their own K.
        duplicates: "first": of equal ids in one token only the first slot gets a row. "each": all of them do.
        capacity: rows that an expert gets at most, the first of its rows; the others are dropped. None: no limit.
        validate: False: bad ids count as -1, the first duplicate wins, NaN is copied. None: these raise.
            True: slots dropped for lack of room in the buffer raise too.
        function: name that starts an error text.
        names: the caller's names for ``routing``, ``probs``, ``tokens_per_expert`` and ``buffer_size``, where
            they differ.

    Returns:
        the plan.

    Raises:
        ValueError: bad data, as ``validate`` says; wrong ``tokens_per_expert`` always.
    """
    name = {key: key for key in ("routing", "probs", "tokens_per_expert", "buffer_size")} | dict(names or {})
    strict = validate is not False
    is_mask = routing.dtype == np.bool_
    if is_mask:
        num_experts = routing.shape[1]
        topk = num_experts if topk is None else topk
        if strict:
            _check_mask(routing, topk, function, name["routing"])
        ids = _mask_to_ids(routing, topk)
    elif num_experts is None:
        raise ValueError(f"{function}: num_experts must be an int for expert ids, but got None")
    else:
        ids, topk = routing.astype(np.int64), routing.shape[1]
        if strict:
            check_ids(ids, num_experts, function, name["routing"])
    ids = np.where((ids >= 0) & (ids < num_experts), ids, -1)
    num_tokens = len(ids)

    if duplicates == "first":
        repeats = find_repeats(ids)
        if strict:
            _check_repeats(ids, repeats, function, name["routing"])
        ids = np.where(repeats, -1, ids)

    if strict and probs is not None:
        _check_probs(probs, routing, num_experts, function, name["probs"])

    flat_ids = ids.reshape(-1)
    routed_slots = np.flatnonzero(flat_ids >= 0)
    slots = routed_slots[np.argsort(flat_ids[routed_slots], kind="stable")]
    experts = flat_ids[slots]
    routed = np.bincount(experts, minlength=num_experts)
    if buffer_size < 0 and tokens_per_expert is not None:
        _check_counts(tokens_per_expert, routed, padding_alignment, function, name["tokens_per_expert"])
    rank_in_expert = np.arange(len(slots)) - (np.cumsum(routed) - routed)[experts]
    kept = routed
    if capacity is not None:
        kept = np.minimum(routed, capacity)
        has_room = rank_in_expert < capacity
        slots, experts, rank_in_expert = slots[has_room], experts[has_room], rank_in_expert[has_room]
    padded = -(-kept // padding_alignment) * padding_alignment
    starts = np.concatenate([[0], np.cumsum(padded)])
    rows = starts[experts] + rank_in_expert

    num_rows = buffer_size if buffer_size >= 0 else int(starts[-1])
    if num_rows >= 2**31:
        raise ValueError(
            f"{function}: padding_alignment must give a buffer of fewer than 2^31 rows, "
            f"but {padding_alignment} gives {num_rows}"
        )
    fits = rows < num_rows
    overflow = np.count_nonzero(~fits)
    if validate and overflow:
        raise ValueError(
            f"{function}: {name['buffer_size']} must be at least {starts[-1]}, "
            f"the padded rows of this routing, but got {num_rows}"
        )
    rows, slots, experts = rows[fits], slots[fits], experts[fits]

    slot_to_row = _scatter(num_tokens * topk, slots, rows).reshape(num_tokens, topk)
    row_to_slot = _scatter(num_rows, rows, slots)
    row_probs = None
    if probs is not None:
        slot_probs = np.take_along_axis(probs, np.maximum(ids, 0), axis=1) if is_mask else probs
        row_probs = take_or_zero(slot_probs.reshape(-1), row_to_slot)
    return Plan(
        slot_to_row=slot_to_row,
        token_rows=_ascending(slot_to_row, num_rows),
        row_to_token=_scatter(num_rows, rows, slots // topk),
        row_to_slot=row_to_slot,
        row_to_expert=_scatter(num_rows, rows, experts),
        row_probs=row_probs,
        tokens_per_expert=np.clip(num_rows - starts[:-1], 0, kept).astype(np.int32),
        expert_offsets=np.minimum(starts, num_rows).astype(np.int32),
        routed_per_expert=routed.astype(np.int32),
        overflow=np.array(overflow + np.sum(routed - kept), np.int32),
        num_tokens=num_tokens,
        topk=topk,
        num_experts=num_experts,
        padding_alignment=padding_alignment,
        num_rows=num_rows,
    )


def route_backward(d_row_probs: NDArray, plan: Plan, *, mask_experts: int | None = None) -> NDArray:
    """Return the gradient of route's ``probs`` from the gradient of ``row_probs`` [N]; 0 where no row is.

    Args:
        d_row_probs: [N] gradient of ``plan.row_probs``.
        plan: the plan of the forward pass.
        mask_experts: E for a plan made from a mask (a plan does not say), None for one made from ids.

    Returns:
        [T, K] for ids, [T, mask_experts] for a mask, dtype of ``d_row_probs``.
    """
    if mask_experts is None:
        return take_or_zero(d_row_probs, plan.slot_to_row)
    d_probs = np.zeros((plan.num_tokens, mask_experts), d_row_probs.dtype)
    rows = np.flatnonzero(plan.row_to_token >= 0)
    d_probs[plan.row_to_token[rows], plan.row_to_expert[rows]] = d_row_probs[rows]
    return d_probs


def take_or_zero(values: NDArray, index: NDArray) -> NDArray:
    """Return ``values[index]`` along the first axis, bits unchanged, with zeros where ``index`` is -1."""
    out = np.zeros(index.shape + values.shape[1:], values.dtype)
    live = index >= 0
    out[live] = values[index[live]]
    return out


def find_repeats(ids: NDArray) -> NDArray:
    """Return bool [T, K]: the slots whose id (not -1) an earlier slot of the same token holds."""
    repeats = np.zeros(ids.shape, np.bool_)
    for k in range(1, ids.shape[1]):
        repeats[:, k] = (ids[:, :k] == ids[:, k : k + 1]).any(axis=1)
    return repeats & (ids >= 0)


def check_ids(ids: NDArray, num_experts: int, function: str, name: str) -> None:
    """Raise ValueError for the first id outside [-1, E)."""
    for token, slot in np.argwhere((ids < -1) | (ids >= num_experts))[:1]:
        raise ValueError(
            f"{function}: {name} must hold expert ids in [-1, {num_experts}), "
            f"but token {token}, slot {slot} holds {ids[token, slot]}"
        )


def _check_mask(mask: NDArray, topk: int, function: str, name: str) -> None:
    experts = np.count_nonzero(mask, axis=1)
    for token in np.flatnonzero(experts > topk)[:1]:
        raise ValueError(
            f"{function}: {name} must set at most topk={topk} experts per token, "
            f"but token {token} sets {experts[token]}"
        )


def _check_repeats(ids: NDArray, repeats: NDArray, function: str, name: str) -> None:
    for token, slot in np.argwhere(repeats)[:1]:
        expert = ids[token, slot]
        first_slot = np.flatnonzero(ids[token] == expert)[0]
        raise ValueError(
            f"{function}: {name} must name an expert at most once per token, "
            f"but token {token} names expert {expert} in slots {first_slot} and {slot}"
        )


def _check_probs(probs: NDArray, routing: NDArray, num_experts: int, function: str, name: str) -> None:
    """Raise ValueError for the first NaN in a routed place; others are never read."""
    is_mask = routing.dtype == np.bool_
    routed = routing if is_mask else (routing >= 0) & (routing < num_experts)
    for token, column in np.argwhere(routed & np.isnan(probs))[:1]:
        place = "expert" if is_mask else "slot"
        raise ValueError(f"{function}: {name} must not hold NaN, but token {token}, {place} {column} does")


def _check_counts(given: Iterable[int], routed: NDArray, alignment: int, function: str, name: str) -> None:
    """Raise ValueError for wrong counts; a count with its segment's padding is right as well."""
    counts = [int(count) for count in given]
    padded = -(-routed // alignment) * alignment
    if len(counts) != len(routed) or ((routed != counts) & (padded != counts)).any():
        padding = "" if alignment == 1 else f", with or without the padding to a multiple of {alignment}"
        raise ValueError(
            f"{function}: {name} must be {routed.tolist()}, the rows routed to each expert{padding}, but got {counts}"
        )


def _mask_to_ids(mask: NDArray, topk: int) -> NDArray:
    """Return int64 [T, topk]: the lowest set experts of each token, ascending, -1 after them."""
    slots = np.cumsum(mask, axis=1) - 1
    tokens, experts = np.nonzero(mask & (slots < topk))
    ids = np.full((len(mask), topk), -1, np.int64)
    ids[tokens, slots[tokens, experts]] = experts
    return ids


def _scatter(size: int, index: NDArray, values: NDArray) -> NDArray:
    """Return int32 [size] that holds values[i] at index[i] and -1 elsewhere."""
    out = np.full(size, -1, np.int32)
    out[index] = values
    return out


def _ascending(rows: NDArray, num_rows: int) -> NDArray:
    """Return each line of rows sorted, its -1 entries last."""
    ordered = np.sort(np.where(rows < 0, num_rows, rows), axis=1)
    return np.where(ordered == num_rows, -1, ordered).astype(np.int32)
