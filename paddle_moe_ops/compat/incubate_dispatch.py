# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""ERNIE's dispatch and combine, the operators of ``paddle.incubate.nn.functional``, on this package's operators.

Names, arguments and results are those of Paddle's operators. T tokens, E experts, K slots per token, H hidden size. All
are deterministic, and raise TypeError or ValueError for arguments of the wrong type, dtype, value or shape.

A capacity is assigned slot by slot: all tokens' first choices come before all tokens' second choices;
`moe_gate_dispatch` without padding assigns it token by token. A slot that is dropped has weight 0 and index 0, although
row 0 belongs to another slot. So slots of weight 0 are read as slots without a row.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import public, to_dtype
from ..backends import Validation, resolve
from ..routing import route
from ._incubate_slots import (
    choose_experts,
    combine,
    gradients_of_combine,
    maps_of_dispatch,
    ranks_by_slot,
    rows_and_maps,
    weights_and_index,
)
from .row_maps import as_int32, kept, known_slots, num_rows_of, of_experts, read_index_map

__all__ = [
    "moe_combine",
    "moe_combine_grad",
    "moe_combine_no_weight",
    "moe_gate_dispatch",
    "moe_gate_dispatch_partial_nosoftmaxtopk",
    "moe_gate_dispatch_permute",
]


@public("x", "gate_logits")
def moe_gate_dispatch(
    x: Tensor, gate_logits: Tensor, corr_bias: Tensor | None, k: int, capacity: int, use_pad: bool
) -> tuple[Tensor, ...]:
    """Choose K experts for each token and copy it to their rows.

    Differentiable in ``x`` and ``gate_logits``. Equal scores: the lower expert first. No host synchronisation.

    Args:
        x: [T, H] bfloat16, float16 or float32.
        gate_logits: float32 [T, E], usually probabilities.
        corr_bias: float32 [E], added to the scores for the choice of experts only, or None.
        k: K.
        capacity: rows that an expert gets at most, the first in the order of ``use_pad``.
        use_pad: whether expert e's rows begin at e * capacity, by slot, then token. Otherwise experts follow each other
            in T*K rows, by token, and the rows of dropped slots stay zero.

    Returns:
        y [E * capacity or T*K, H]; combine_weights float32 [T, K], the chosen scores, 0 where dropped; scatter_index
        int32 [K, T], the row of each slot, 0 where dropped; expert_offset int64 [E], the ends of the experts' segments
        before any slot is dropped; expert_id int32 [T, K].
    """
    name = "moe_gate_dispatch"
    maps, results = maps_of_dispatch(name, x, gate_logits, corr_bias, k, capacity, use_pad)
    return resolve("permute", x).permute(x, None, maps, "all")[0], *results


@public("x", "gate_logits")
def moe_gate_dispatch_permute(
    x: Tensor, gate_logits: Tensor, corr_bias: Tensor | None, k: int, capacity: int, world_size: int
) -> tuple[Tensor, ...]:
    """Dispatch as `moe_gate_dispatch` does with padding, into chunks for an all-to-all in a pipeline of experts.

    Expert e is expert e % (E / world_size) of rank e // (E / world_size). Differentiable and free of host
    synchronisation, as `moe_gate_dispatch` is.

    Args:
        x: [T, H] bfloat16, float16 or float32.
        gate_logits: float32 [T, E].
        corr_bias: float32 [E] or None.
        k: K.
        capacity: rows that an expert gets at most.
        world_size: ranks, a divisor of E.

    Returns:
        y [E / world_size, world_size, capacity, H]: for each local expert the rows of every rank; the rest as in
        `moe_gate_dispatch`. scatter_index counts rows by global expert, as they come back.
    """
    name = "moe_gate_dispatch_permute"
    weights, ids = choose_experts(name, x, gate_logits, corr_bias, k)
    capacity = _checks.integer(name, "capacity", capacity, 0)
    world_size = _checks.integer(name, "world_size", world_size, 1)
    num_experts = gate_logits.shape[1]
    if num_experts % world_size:
        _checks.bad_value(name, "world_size", f"a divisor of the {num_experts} experts of gate_logits", world_size)
    ranks, ends, _ = ranks_by_slot(ids, num_experts)
    is_kept = ranks < capacity
    local = num_experts // world_size
    chunks = ids % local * world_size + ids // local
    maps = read_index_map(name, kept(is_kept, chunks * capacity + ranks), num_experts * capacity, Validation.OFF)
    y = resolve("permute", x).permute(x, None, maps, "all")[0].reshape([local, world_size, capacity, x.shape[1]])
    return y, *weights_and_index(weights, is_kept, ids * capacity + ranks), ends.astype("int64"), ids


@public("x", "combine_weights")
def moe_gate_dispatch_partial_nosoftmaxtopk(
    x: Tensor,
    combine_weights: Tensor,
    expert_id: Tensor,
    k: int,
    capacity: int,
    num_experts: int,
    use_pad: bool,
    expert_start_index: int,
    expert_end_index: int,
    reverse_token_drop: bool,
) -> tuple[Tensor, ...]:
    """Copy tokens to the rows of their local experts, [expert_start_index, expert_end_index).

    Differentiable in ``x`` and ``combine_weights``. Rows of an expert follow ascending tokens. Host synchronisation: on
    a GPU one without ``use_pad``, to learn the number of rows.

    Args:
        x: [T, H] bfloat16, float16 or float32.
        combine_weights: float32 [T, K].
        expert_id: int32 [T, K]; ids outside [0, num_experts) are those of no expert.
        k: K.
        capacity: rows that an expert gets at most.
        num_experts: E, of all ranks.
        use_pad: whether each local expert has ``capacity`` rows, zeros after its own.
        expert_start_index: the first local expert.
        expert_end_index: the end of the local experts.
        reverse_token_drop: whether an expert's last slots are kept instead of its first; not with ``use_pad``.

    Returns:
        y [N, H], one row of zeros if no slot is kept without ``use_pad``; combine_weights, 0 where dropped or not
        local; scatter_index int32 [K, T], the row of each slot, 0 without one; scatter_index_rev int32 [N], the token
        of each row, T for padding, 0-D if no slot is kept without ``use_pad``; int64 [E] slots of each expert;
        int64 [E] slots of each local expert, those dropped included with ``use_pad`` only.
    """
    name = "moe_gate_dispatch_partial_nosoftmaxtopk"
    _checks.rows(name, "x", x, _checks.SUM_DTYPES, "num_tokens")
    k = _checks.integer(name, "k", k, 1)
    shape = [x.shape[0], k]
    _checks.tensor(name, "combine_weights", combine_weights, (paddle.float32,), shape)
    _checks.tensor(name, "expert_id", expert_id, _checks.ID_DTYPES, shape)
    _checks.same_place(name, x=x, combine_weights=combine_weights, expert_id=expert_id)
    capacity = _checks.integer(name, "capacity", capacity, 0)
    num_experts = _checks.integer(name, "num_experts", num_experts, 1, _checks.MAX_EXPERTS)
    start = _checks.integer(name, "expert_start_index", expert_start_index, 0, num_experts - 1)
    end = _checks.integer(name, "expert_end_index", expert_end_index, start + 1, num_experts)
    _checks.flag(name, "use_pad", use_pad)
    if _checks.flag(name, "reverse_token_drop", reverse_token_drop) and use_pad:
        _checks.bad_value(name, "reverse_token_drop", "False with use_pad", True)
    ids = as_int32(expert_id)
    ids = paddle.where((ids < 0) | (ids >= num_experts), paddle.full_like(ids, -1), ids)
    ranks, _, counts = ranks_by_slot(ids, num_experts)
    if reverse_token_drop:
        ranks = of_experts(counts, ids) - 1 - ranks
    is_kept = (ids >= start) & (ids < end) & (ranks < capacity)
    local_ids = kept(is_kept, ids - start)
    # In a graph, and with padding, the number of rows does not depend on the data.
    plan = route(
        local_ids,
        num_experts=end - start,
        buffer_size=known_slots(ids) if use_pad else -1,
        duplicates="each",
        validate=False,
    )
    slot_rows, num_rows = plan.slot_to_row, plan.num_rows
    if use_pad:
        in_expert = slot_rows - of_experts(plan.expert_offsets, local_ids)
        slot_rows, num_rows = kept(is_kept, local_ids * capacity + in_expert), (end - start) * capacity
    is_empty = num_rows == 0 and not use_pad
    maps: Any = plan
    if use_pad or is_empty:
        maps = read_index_map(name, slot_rows, 1 if is_empty else num_rows, Validation.OFF)
    y = resolve("permute", x).permute(x, None, maps, "all")[0]
    tokens = maps.row_to_token
    if use_pad:
        tokens = paddle.where(tokens < 0, paddle.full_like(tokens, 1) * num_rows_of(x), tokens)
    elif is_empty:
        tokens = paddle.zeros_like(tokens[0])
    counts = counts.astype("int64")
    here = counts[start:end] if use_pad else counts[start:end].clip(max=capacity)
    before, after = counts[:start] * 0, counts[end:] * 0
    weights_out, scatter_index = weights_and_index(combine_weights, is_kept, slot_rows)
    return y, weights_out, scatter_index, tokens, counts, paddle.concat([before, here, after])


@public("x", "combine_weights")
def moe_combine(x: Tensor, combine_weights: Tensor, scatter_index: Tensor) -> Tensor:
    """Sum the rows of each token, weighted; in float32, rounded once.

    Differentiable in ``x`` and ``combine_weights``, whose gradient has their own shape. Slots of weight 0 take no part:
    neither they nor their rows get a gradient. Slots may share a row, whose gradient is the sum over them; if three or
    more do, a GPU adds these gradients in no fixed order. Host synchronisation: on a GPU one outside of graphs, to
    learn whether slots share rows. In that case, and in a graph, rows are copied for each slot in float32.

    Args:
        x: [N, H] bfloat16, float16 or float32.
        combine_weights: [T, K] bfloat16, float16 or float32.
        scatter_index: int32 or int64 [T, K], the row of each slot.

    Returns:
        [T, H], dtype of ``x``.
    """
    return combine("moe_combine", x, combine_weights, scatter_index)


@public("x")
def moe_combine_no_weight(x: Tensor, combine_weight: Tensor, scatter_index: Tensor, epsilon: float = 1.0e-15) -> Tensor:
    """Sum the rows of each token whose weight is not 0, in float32, rounded once.

    Differentiable in ``x``. Slots share rows, and the host waits, as in `moe_combine`.

    Args:
        x: [N, H] bfloat16, float16 or float32, rows that are weighted already.
        combine_weight: [T, K] bfloat16, float16 or float32.
        scatter_index: int32 or int64 [T, K], as in `moe_combine`.
        epsilon: weights up to this magnitude are 0.

    Returns:
        [T, H], dtype of ``x``.
    """
    name = "moe_combine_no_weight"
    rows, maps, _ = rows_and_maps(name, x, combine_weight, scatter_index, _checks.number(name, "epsilon", epsilon))
    return to_dtype(resolve("unpermute", rows).unpermute(rows, None, maps), x.dtype)


@public()
def moe_combine_grad(
    x: Tensor, combine_weights: Tensor, scatter_index: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `moe_combine`, for backward passes written by hand.

    Not differentiable itself. Slots share rows, and the host waits, as in `moe_combine`.

    Args:
        x: [N, H] as in `moe_combine`.
        combine_weights: [T, K].
        scatter_index: [T, K].
        grad_y: [T, H], dtype of ``x``.

    Returns:
        the gradient of ``x`` [N, H], and the products [T, K, H] whose sum over H is that of ``combine_weights``. They
        are computed for every slot, even if its weight is 0. Dtype of ``x``.
    """
    d_x, products = gradients_of_combine("moe_combine_grad", x, combine_weights, scatter_index, grad_y, "grad_y")
    return d_x, products.astype(x.dtype)
