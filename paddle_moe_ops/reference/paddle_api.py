# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""moe_permute and moe_unpermute with the arguments of ``paddle.nn.functional``, with gradients.

The row map of this family is int32 [T, E]: the row of token t at expert e, or -1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from .arithmetic import add32
from .permutation import permute, permute_backward, sum_rows, sum_rows_backward
from .routing import Plan, check_ids, find_repeats, route, route_backward, take_or_zero

__all__ = [
    "moe_permute",
    "moe_permute_backward",
    "moe_unpermute",
    "moe_unpermute_backward",
    "plan_to_rowmap",
    "rowmap_to_token_rows",
    "usable_rowmap",
]


def moe_permute(
    hidden_states: NDArray,
    scale: NDArray | None,
    expert_routemap_topk: NDArray,
    expert_prob_topk: NDArray,
    num_experts: int,
    tokens_per_expert: Iterable[int] | None,
    padding_alignment: int,
    do_gather: bool = True,
    using_ue8m0_scale: bool = False,
    return_expert_indices: bool = False,
    override_buffer_size: int = -1,
    name: str | None = None,
    *,
    fill_padding: str = "all",
    return_overflow: bool = False,
    validate: bool | None = None,
) -> tuple[NDArray, ...]:
    """Route and permute in one call.

    Args:
        hidden_states: [T, H], any dtype; bits are copied.
        scale: [T, S] scales that are permuted with the rows, any dtype, or None.
        expert_routemap_topk: int [T, K] expert ids, -1 for none.
        expert_prob_topk: float32 [T, K].
        num_experts: E.
        tokens_per_expert: rows routed to each expert, with or without its segment's padding, or None; ignored with a
            static buffer.
        padding_alignment: A, in rows.
        do_gather: False: compute the maps and probabilities only.
        using_ue8m0_scale: says that ``scale`` holds packed exponents; they are copied like any other scale.
        return_expert_indices: add the expert of each row.
        override_buffer_size: N when >= 0.
        name: not used.
        fill_padding: as in `permute`; the oracle's padding is 0 in any case.
        return_overflow: add the number of dropped slots.
        validate: as in `route`.

    Returns:
        hidden_states_unzipped [N, H] ([0, H] without gather), zipped_expertwise_rowmap int32 [T, E],
        token_prob_unzipped [N], scale_unzipped [N, S] ([0] without gather, [0] float32 without scale), then,
        when asked for, expert_indices int32 [N] (-1 in padding) and overflow 0-D int32.

    Raises:
        ValueError: as `route`.
    """
    plan = route(
        expert_routemap_topk,
        expert_prob_topk,
        num_experts=num_experts,
        padding_alignment=padding_alignment,
        tokens_per_expert=tokens_per_expert,
        buffer_size=override_buffer_size,
        validate=validate,
        function="moe_permute",
        names={
            "routing": "expert_routemap_topk",
            "probs": "expert_prob_topk",
            "buffer_size": "override_buffer_size",
        },
    )
    if do_gather:
        rows, scales = permute(hidden_states, plan, scale, fill_padding=fill_padding)
    else:
        rows, scales = hidden_states[:0], None
    if scales is None:
        scales = np.zeros(0, np.float32 if scale is None else scale.dtype)
    outputs = [rows, plan_to_rowmap(plan), cast(NDArray, plan.row_probs), scales]
    if return_expert_indices:
        outputs.append(plan.row_to_expert)
    if return_overflow:
        outputs.append(plan.overflow)
    return tuple(outputs)


def moe_permute_backward(
    d_hidden_unzipped: NDArray | None, d_prob_unzipped: NDArray | None, plan: Plan
) -> tuple[NDArray | None, NDArray | None]:
    """Return the gradients of hidden_states [T, H] and expert_prob_topk [T, K]; None for a gradient that is None."""
    return (
        None if d_hidden_unzipped is None else permute_backward(d_hidden_unzipped, plan),
        None if d_prob_unzipped is None else route_backward(d_prob_unzipped, plan),
    )


def moe_unpermute(
    hidden_states_unzipped: NDArray,
    zipped_expertwise_rowmap: NDArray,
    expert_routemap_topk: NDArray,
    token_prob_unzipped: NDArray,
    total_zipped_tokens: int,
    num_experts: int,
    using_mix_precision: bool = True,
    using_weighted_combine: bool = False,
    name: str | None = None,
    *,
    compat: str | None = None,
    validate: bool | None = None,
) -> tuple[NDArray, NDArray]:
    """Sum the rows of every token in ascending expert order, and unpermute the probabilities to [T, K].

    The sum runs over the row map, not over the ids. Without validation, ids and rows outside their range
    count as -1, and so does a row that an earlier entry names, in flat order t * E + e.

    Args:
        hidden_states_unzipped: [N, H], bfloat16, float16 or float32.
        zipped_expertwise_rowmap: int32 [T, E].
        expert_routemap_topk: int [T, K].
        token_prob_unzipped: float32 [N] or [N, 1].
        total_zipped_tokens: T.
        num_experts: E.
        using_mix_precision: not used: sums are always in float32.
        using_weighted_combine: weight each row by its probability.
        name: not used.
        compat: "paddle": a token with exactly one row is a copy of that row even when weighted, and each of
            several slots with the same id reads the probability; None: the first one does, the others are 0.
        validate: None or True: bad ids and row map entries raise. Repeated ids and NaN never do: ``compat`` defines the
            former, and the latter may be a gradient.

    Returns:
        hidden_states [T, H], dtype of the rows, and expert_prob_topk [T, K], 0 for a slot without a row.

    Raises:
        ValueError: bad ids, then row map entries out of range, then repeated ones.
    """
    num_rows = len(hidden_states_unzipped)
    if validate is not False:
        check_ids(expert_routemap_topk, num_experts, "moe_unpermute", "expert_routemap_topk")
    rowmap = _usable_rowmap(zipped_expertwise_rowmap, num_rows, validate, "moe_unpermute")
    token_rows = _compact(rowmap)
    row_probs = token_prob_unzipped.reshape(-1)
    row_weights = row_probs if using_weighted_combine else None
    hidden_states = sum_rows(hidden_states_unzipped, token_rows, row_weights)
    if using_weighted_combine and compat == "paddle":
        tokens, rows = _single_rows(token_rows)
        hidden_states[tokens] = hidden_states_unzipped[rows]
    return hidden_states, take_or_zero(row_probs, _slot_to_row(rowmap, expert_routemap_topk, compat))


def moe_unpermute_backward(
    d_hidden: NDArray,
    d_prob_topk: NDArray | None,
    hidden_states_unzipped: NDArray,
    zipped_expertwise_rowmap: NDArray,
    expert_routemap_topk: NDArray,
    token_prob_unzipped: NDArray,
    *,
    using_weighted_combine: bool = False,
    compat: str | None = None,
) -> tuple[NDArray, NDArray]:
    """Return the gradients of `moe_unpermute`, its exact adjoint.

    Args:
        d_hidden: [T, H] gradient of hidden_states.
        d_prob_topk: [T, K] gradient of expert_prob_topk, or None for zeros.
        hidden_states_unzipped: [N, H] rows of the forward pass.
        zipped_expertwise_rowmap: [T, E]; unusable entries count as -1, as do unusable ids.
        expert_routemap_topk: [T, K].
        token_prob_unzipped: [N] or [N, 1].
        using_weighted_combine: as in the forward pass.
        compat: as in the forward pass.

    Returns:
        d_hidden_unzipped [N, H] (dtype of ``d_hidden``) and d_token_prob (float32, shape of
        ``token_prob_unzipped``): the dot product of the weighted sum, if any, to which the gradients of the
        slots that read the row are added in slot order. Rows that nothing reads have gradient 0.
    """
    num_rows = len(hidden_states_unzipped)
    rowmap = _usable_rowmap(zipped_expertwise_rowmap, num_rows, False, "moe_unpermute")
    token_rows = _compact(rowmap)
    row_probs = token_prob_unzipped.reshape(-1)
    row_to_token = np.full(num_rows, -1, np.int64)
    tokens, experts = np.nonzero(rowmap >= 0)
    row_to_token[rowmap[tokens, experts]] = tokens
    row_weights = row_probs if using_weighted_combine else None
    d_rows, d_row_probs = sum_rows_backward(d_hidden, row_to_token, hidden_states_unzipped, row_weights)
    if d_row_probs is None:
        d_row_probs = np.zeros_like(row_probs)
    elif compat == "paddle":
        tokens, rows = _single_rows(token_rows)
        d_rows[rows] = d_hidden[tokens]
        d_row_probs[rows] = 0
    if d_prob_topk is not None:
        # Slots of rank k read different rows, so an indexed addition meets no row twice.
        slot_to_row = _slot_to_row(rowmap, expert_routemap_topk, compat)
        if not using_weighted_combine:
            d_row_probs[slot_to_row[slot_to_row >= 0]] = -0.0  # a single gradient is then a copy
        for rows, d_probs in zip(slot_to_row.T, d_prob_topk.T, strict=True):
            live = rows >= 0
            d_row_probs[rows[live]] = add32(d_row_probs[rows[live]], d_probs[live])
    return d_rows, d_row_probs.reshape(token_prob_unzipped.shape)


def plan_to_rowmap(plan: Plan) -> NDArray:
    """Return the row map int32 [T, E] of a plan.

    A token that has several rows at one expert (duplicates="each") does not fit into this format: only its
    last one is written.
    """
    rowmap = np.full((plan.num_tokens, plan.num_experts), -1, np.int32)
    rows = np.flatnonzero(plan.row_to_token >= 0)
    rowmap[plan.row_to_token[rows], plan.row_to_expert[rows]] = rows
    return rowmap


def rowmap_to_token_rows(
    rowmap: NDArray, num_rows: int, *, validate: bool | None = None, function: str = "moe_unpermute"
) -> NDArray:
    """Return int32 [T, E]: each token's rows in ascending expert order, -1 last.

    Args:
        rowmap: int [T, E]. Entries outside [-1, N) count as -1, and so does a row that an earlier
            entry names, in flat order t * E + e.
        num_rows: N.
        validate: None or True: such entries raise.
        function: name that starts an error text.

    Returns:
        the compact rows.

    Raises:
        ValueError: an entry out of range, or else a repeated row.
    """
    return _compact(_usable_rowmap(rowmap, num_rows, validate, function))


def _usable_rowmap(rowmap: NDArray, num_rows: int, validate: bool | None, function: str) -> NDArray:
    checked = validate is not False
    return usable_rowmap(rowmap, num_rows, check_range=checked, check_repeats=checked, function=function)


def usable_rowmap(
    rowmap: NDArray,
    num_rows: int,
    *,
    check_range: bool,
    check_repeats: bool,
    function: str,
    name: str = "zipped_expertwise_rowmap",
) -> NDArray:
    """Return the row map [T, E] with -1 in place of entries out of range and of repeated rows, if they do not raise."""
    for token, expert in np.argwhere((rowmap < -1) | (rowmap >= num_rows))[: int(check_range)]:
        raise ValueError(
            f"{function}: {name} must hold rows in [-1, {num_rows}), "
            f"but token {token}, expert {expert} holds {rowmap[token, expert]}"
        )
    flat = rowmap.reshape(-1)
    places = np.flatnonzero((flat >= 0) & (flat < num_rows))
    _, first = np.unique(flat[places], return_index=True)
    if check_repeats:
        _check_repeated_rows(flat, np.delete(places, first), rowmap.shape[1], function, name)
    usable = np.full(flat.shape, -1, np.int32)
    usable[places[first]] = flat[places[first]]
    return usable.reshape(rowmap.shape)


def _check_repeated_rows(flat: NDArray, repeats: NDArray, num_experts: int, function: str, name: str) -> None:
    for place in repeats[:1]:
        row = flat[place]
        token0, expert0 = divmod(np.flatnonzero(flat == row)[0], num_experts)
        token1, expert1 = divmod(place, num_experts)
        raise ValueError(
            f"{function}: {name} must name a row at most once, but row {row} is at "
            f"token {token0}, expert {expert0} and at token {token1}, expert {expert1}"
        )


def _compact(rowmap: NDArray) -> NDArray:
    """Return each line with its -1 entries moved to the end, the others in their order."""
    order = np.argsort(rowmap < 0, axis=1, kind="stable")
    return np.take_along_axis(rowmap, order, axis=1)


def _single_rows(token_rows: NDArray) -> tuple[NDArray, NDArray]:
    """Return the tokens that have exactly one row, and those rows."""
    tokens = np.flatnonzero(np.count_nonzero(token_rows >= 0, axis=1) == 1)
    return tokens, token_rows[tokens, 0]


def _slot_to_row(rowmap: NDArray, ids: NDArray, compat: str | None) -> NDArray:
    """Return [T, K]: the row whose probability each slot reads, -1 for none."""
    readable = (ids >= 0) & (ids < rowmap.shape[1])
    if compat != "paddle":
        readable &= ~find_repeats(ids)
    rows = np.take_along_axis(rowmap, np.where(readable, ids, 0), axis=1)
    return np.where(readable, rows, -1)
