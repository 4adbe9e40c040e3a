# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of ERNIE's dispatch and combine, the ``paddle._C_ops.moe_*_grad`` of backward passes written by hand.

Arguments and results are those of Paddle's operators, in Paddle's order. T tokens, E experts, K slots per token, H
hidden size. A slot whose weight is 0, negative or NaN counts as dropped: nothing else in the arguments marks a dropped
slot. None is differentiable itself. Sums of rows are computed in float32, by ascending row, and rounded once; Paddle
rounds after each addition. All are deterministic, except that a GPU adds the gradients of three or more slots of one
token and one expert in no fixed order. All raise TypeError or ValueError for arguments of the wrong type, dtype, value
or shape.

Host synchronisation: on a GPU one outside of graphs, to learn whether slots share rows. In that case, and in a graph,
rows are copied for each slot in float32.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import filled, is_graph_value, known_sizes, public, to_dtype, without_autocast
from ..backends import Validation, resolve
from ._incubate_slots import gradient_of_rows, maps_of_slots, rows_and_maps
from .row_maps import as_int32, kept

__all__ = [
    "moe_combine_no_weight_grad",
    "moe_gate_dispatch_grad",
    "moe_gate_dispatch_partial_nosoftmaxtopk_grad",
    "moe_gate_dispatch_permute_grad",
]


@public()
def moe_gate_dispatch_grad(
    combine_weights: Tensor,
    scatter_index: Tensor,
    expert_id: Tensor,
    y_grad: Tensor,
    combine_weights_grad: Tensor,
    k: int,
    capacity: int,
    use_pad: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `moe_gate_dispatch`, and of `moe_gate_dispatch_and_quant` straight through its codes.

    Host synchronisation: on a GPU one more without ``use_pad``, to read the highest expert.

    Args:
        combine_weights: float32 [T, K], the result of the dispatch.
        scatter_index: int32 or int64 [K, T], the result of the dispatch.
        expert_id: int32 or int64 [T, K], the result of the dispatch.
        y_grad: [E * capacity or T*K, H] bfloat16, float16 or float32.
        combine_weights_grad: float32 [T, K].
        k: K.
        capacity: as in the dispatch.
        use_pad: as in the dispatch. Without it nothing tells E, which is taken as T*K // capacity, or the highest
            expert + 1 if that is more; not in a graph.

    Returns:
        the gradient of x [T, H], dtype of ``y_grad``, and that of gate_logits, float32 [T, E].
    """
    name = "moe_gate_dispatch_grad"
    _checks.rows(name, "y_grad", y_grad, _checks.SUM_DTYPES, "num_rows")
    return gradients_of_dispatch(
        name, combine_weights, scatter_index, expert_id, y_grad, combine_weights_grad, k, capacity, use_pad
    )


@public()
def moe_gate_dispatch_permute_grad(
    combine_weights: Tensor,
    scatter_index: Tensor,
    expert_id: Tensor,
    y_grad: Tensor,
    combine_weights_grad: Tensor,
    k: int,
    capacity: int,
    world_size: int,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `moe_gate_dispatch_permute`.

    Args:
        combine_weights: float32 [T, K], the result of the dispatch.
        scatter_index: int32 or int64 [K, T], the result of the dispatch.
        expert_id: int32 or int64 [T, K], the result of the dispatch.
        y_grad: [E / world_size, world_size, capacity, H] bfloat16, float16 or float32.
        combine_weights_grad: float32 [T, K].
        k: K.
        capacity: as in the dispatch.
        world_size: as in the dispatch.

    Returns:
        the gradient of x [T, H], dtype of ``y_grad``, and that of gate_logits, float32 [T, E].
    """
    name = "moe_gate_dispatch_permute_grad"
    capacity = _checks.integer(name, "capacity", capacity, 0)
    ranks = _checks.integer(name, "world_size", world_size, 1)
    _checks.tensor(name, "y_grad", y_grad, _checks.SUM_DTYPES, ["num_local_experts", ranks, capacity, "hidden"])
    local, _, _, hidden = y_grad.shape
    takes_part, slot_rows = _slots(name, combine_weights, scatter_index, k, y_grad)
    experts = slot_rows // max(capacity, 1)
    chunks = experts % local * ranks + experts // local
    rows = y_grad.reshape([local * ranks * capacity, hidden])
    is_row = takes_part & (slot_rows >= 0) & (slot_rows < local * ranks * capacity)
    slot_rows = paddle.where(is_row, chunks * capacity + slot_rows % max(capacity, 1), slot_rows)
    d_x = _sum_of_rows(name, rows, kept(takes_part, slot_rows))
    return d_x, _of_scores(name, takes_part, expert_id, combine_weights_grad, local * ranks)


@public()
def moe_gate_dispatch_partial_nosoftmaxtopk_grad(
    combine_weights_out: Tensor,
    scatter_index: Tensor,
    scatter_index_rev: Tensor,
    expert_offset: Tensor,
    expert_nums_local: Tensor,
    y_grad: Tensor,
    combine_weights_out_grad: Tensor,
    k: int,
    capacity: int,
    use_pad: bool,
    expert_start_index: int,
    expert_end_index: int,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `moe_gate_dispatch_partial_nosoftmaxtopk`.

    Args:
        combine_weights_out: float32 [T, K], the result of the dispatch.
        scatter_index: int32 or int64 [K, T], the result of the dispatch; slots whose row is not in ``y_grad`` take no
            part.
        scatter_index_rev: not read.
        expert_offset: not read.
        expert_nums_local: not read.
        y_grad: [N, H] bfloat16, float16 or float32.
        combine_weights_out_grad: float32 [T, K].
        k: K.
        capacity: not read.
        use_pad: not read.
        expert_start_index: not read.
        expert_end_index: not read.

    Returns:
        the gradient of x [T, H], dtype of ``y_grad``, and that of combine_weights, float32 [T, K].
    """
    name = "moe_gate_dispatch_partial_nosoftmaxtopk_grad"
    _checks.rows(name, "y_grad", y_grad, _checks.SUM_DTYPES, "num_rows")
    takes_part, slot_rows = _slots(name, combine_weights_out, scatter_index, k, y_grad, "combine_weights_out")
    shape = combine_weights_out.shape
    _checks.tensor(name, "combine_weights_out_grad", combine_weights_out_grad, (paddle.float32,), shape)
    _checks.same_place(name, combine_weights_out=combine_weights_out, combine_weights_out_grad=combine_weights_out_grad)
    num_rows = known_sizes(y_grad)[0]
    is_row = takes_part & (slot_rows >= 0) & (slot_rows < num_rows)
    gradient = combine_weights_out_grad
    d_weights = paddle.where(takes_part, gradient, paddle.zeros_like(gradient))
    return _sum_of_rows(name, y_grad, kept(is_row, slot_rows)), d_weights


@public()
def moe_combine_no_weight_grad(
    x: Tensor, combine_weight: Tensor, scatter_index: Tensor, y_grad: Tensor, epsilon: float = 1.0e-15
) -> Tensor:
    """Compute the gradient of `moe_combine_no_weight`.

    Args:
        x: [N, H] bfloat16, float16 or float32.
        combine_weight: [T, K] bfloat16, float16 or float32.
        scatter_index: int32 or int64 [T, K].
        y_grad: [T, H], dtype of ``x``.
        epsilon: as in `moe_combine_no_weight`.

    Returns:
        the gradient of ``x`` [N, H], 0 in the rows of no slot. Dtype of ``x``.
    """
    name = "moe_combine_no_weight_grad"
    maps = rows_and_maps(name, x, combine_weight, scatter_index, _checks.number(name, "epsilon", epsilon))
    return gradient_of_rows(name, x, maps, None, y_grad, "y_grad")


def gradients_of_dispatch(
    name: str,
    combine_weights: Tensor,
    scatter_index: Tensor,
    expert_id: Tensor,
    rows: Tensor,
    combine_weights_grad: Tensor,
    k: Any,
    capacity: Any,
    use_pad: Any,
) -> tuple[Tensor, Tensor]:
    """`moe_gate_dispatch_grad` under the name of a caller, from rows [N, H] that it checked as y_grad."""
    takes_part, slot_rows = _slots(name, combine_weights, scatter_index, k, rows)
    capacity = _checks.integer(name, "capacity", capacity, 0)
    num_rows = rows.shape[0]
    _checks.tensor(name, "expert_id", expert_id, _checks.ID_DTYPES, combine_weights.shape)
    if _checks.flag(name, "use_pad", use_pad) and capacity > 0 and num_rows >= 0:
        if num_rows % capacity:
            _checks.bad_value(name, "y_grad", f"of E * capacity rows, with capacity={capacity}", list(rows.shape))
        num_experts = num_rows // capacity
    elif is_graph_value(expert_id):
        expected = "True with a known number of rows and a capacity in a graph, where the experts cannot be counted"
        _checks.bad_value(name, "use_pad", expected, use_pad)
    else:
        highest = int(expert_id.max()) if expert_id.size > 0 else -1
        num_experts = max(num_rows // max(capacity, 1), highest + 1)
    d_x = _sum_of_rows(name, rows, kept(takes_part, slot_rows))
    return d_x, _of_scores(name, takes_part, expert_id, combine_weights_grad, num_experts)


def _slots(
    name: str, weights: Tensor, scatter_index: Tensor, k: Any, rows: Tensor, argument: str = "combine_weights"
) -> tuple[Tensor, Tensor]:
    """Check the slots; bool [T, K], which of them take part, and int32 [T, K], their rows."""
    k = _checks.integer(name, "k", k, 1)
    _checks.tensor(name, argument, weights, (paddle.float32,), ["num_tokens", k])
    _checks.tensor(name, "scatter_index", scatter_index, _checks.ID_DTYPES, [k, weights.shape[0]])
    _checks.same_place(name, **{argument: weights, "scatter_index": scatter_index, "y_grad": rows})
    return weights > 0, as_int32(scatter_index).transpose([1, 0])


def _sum_of_rows(name: str, rows: Tensor, slot_rows: Tensor) -> Tensor:
    """The sum of the rows of each token's slots [T, H]."""
    read, maps, _ = maps_of_slots(name, rows, slot_rows)
    return to_dtype(resolve("unpermute", read).unpermute(read, None, maps), rows.dtype)


def _of_scores(name: str, takes_part: Tensor, expert_id: Tensor, gradient: Tensor, num_experts: int) -> Tensor:
    """Check the gradient of the slots' scores; that of all scores, float32 [T, E]."""
    _checks.tensor(name, "expert_id", expert_id, _checks.ID_DTYPES, takes_part.shape)
    _checks.tensor(name, "combine_weights_grad", gradient, (paddle.float32,), takes_part.shape)
    _checks.same_place(name, combine_weights=takes_part, expert_id=expert_id, combine_weights_grad=gradient)
    is_expert = (expert_id >= 0) & (expert_id < num_experts)
    if not is_graph_value(gradient) and _checks.validation(name, None, gradient) > Validation.OFF:
        wrong = takes_part & ~is_expert
        if bool(wrong.any()):
            given = int(expert_id.flatten()[int(wrong.astype("int32").argmax())])
            _checks.bad_value(name, "expert_id", f"in [0, {num_experts}) for slots of a weight above 0", given)
    adds = takes_part & is_expert
    with without_autocast():
        values = paddle.where(adds, gradient, paddle.zeros_like(gradient))
        experts = paddle.where(adds, expert_id, paddle.zeros_like(expert_id)).astype("int64")
        zeros = filled([known_sizes(gradient)[0], num_experts], 0.0, "float32", gradient)
        return paddle.put_along_axis(zeros, experts, values, 1, reduce="add") if num_experts else zeros
