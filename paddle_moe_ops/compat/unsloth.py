# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of `paddle_moe_ops.indexed`, which says what they have in common."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import is_graph_value, numbers_of, public
from ..backends import Validation
from ..functional import move_rows
from ..gemm import grouped_gemm as torch_grouped_gemm
from ..routing import calculate_topk, route

__all__ = ["calculate_topk", "get_routing_indices", "permute", "torch_grouped_gemm", "unpermute"]


@public()
def get_routing_indices(
    selected_experts: Tensor,
    num_experts: int,
    return_scatter_indices: bool = False,
    *,
    index_dtype: Any = "int32",
    validate: bool | None = None,
) -> tuple[Tensor, ...]:
    """Sort slots by expert.

    Rows of one expert follow ascending slots. Slots of -1 come last and count for no expert; an expert may be in
    several slots of a token. Deterministic; no gradient. No host synchronisation except on a GPU with ``validate=True``
    and in a static graph that does not know T.

    Args:
        selected_experts: int32 or int64 expert ids of all slots, -1 for an unassigned one: [T, K], flat [T*K], or with
            more dimensions, [B, S, K]. Slots are numbered in the order of the flat ids.
        num_experts: E, at most 65535.
        return_scatter_indices: also return the inverse permutation.
        index_dtype: dtype of the indices: int32 or int64, as a Paddle dtype or its name. `permute` and `unpermute` take
            both.
        validate: True: ids outside [-1, E) raise. False: they count as -1. None: PADDLE_MOE_OPS_VALIDATE,
            otherwise they raise on a CPU and not on a GPU. A static graph treats them as -1.

    Returns:
        token_counts_by_expert [E], dtype of the ids, and gather_indices [T*K], the flat slot of each row; then as asked
        for scatter_indices [T*K], the row of each flat slot.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad ids (see ``validate``).
    """
    name = "get_routing_indices"
    ids = _ids_by_token(name, selected_experts)
    num_experts = _checks.integer(name, "num_experts", num_experts, 1, _checks.MAX_EXPERTS - 1)
    _checks.flag(name, "return_scatter_indices", return_scatter_indices)
    index_dtype = _checks.dtype_of_result(name, "index_dtype", index_dtype, _checks.ID_DTYPES)
    is_bad = (ids < -1) | (ids >= num_experts)
    if _is_checked(name, validate, ids) and is_bad.any():
        where = is_bad.reshape(selected_experts.shape).nonzero()[0].tolist()
        *token, slot = where
        place = f"token {token if len(token) > 1 else token[0]}, slot {slot}" if token else f"slot {slot}"
        given = f"{place} holds {selected_experts[tuple(where)].item()}"
        raise ValueError(f"{name}: selected_experts must hold expert ids in [-1, {num_experts}), but {given}")
    # One more expert takes the slots of none, so that every slot has a row and N is known.
    ids = paddle.where(is_bad | (ids == -1), paddle.full_like(ids, num_experts), ids)
    buffer_size = ids.shape[0] * ids.shape[1] if ids.shape[0] >= 0 else -1
    plan = route(ids, num_experts=num_experts + 1, buffer_size=buffer_size, duplicates="each", validate=False)
    counts = plan.routed_per_expert[:num_experts].astype(ids.dtype)
    indices = (plan.row_to_slot, plan.slot_to_row.reshape([-1])) if return_scatter_indices else (plan.row_to_slot,)
    return counts, *(each.astype(index_dtype) for each in indices)


@public("X")
def permute(X: Tensor, gather_indices: Tensor, topk: int, *, validate: bool | None = None) -> Tensor:
    """Copy each token to the rows of its slots: row i is token ``gather_indices[i] // topk``.

    Differentiable in ``X``: the gradient of a token is the float32 sum over its rows in ascending order, rounded once,
    the same bits on every backend and run; float8 rows have none. Copies are bit-exact. No host synchronisation
    except with ``validate=True`` on a GPU.

    Args:
        X: [T, H], or [..., H] with T rows in all, bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        gather_indices: int32 or int64 [T*topk], a permutation of the flat slots, as `get_routing_indices` returns it.
        topk: K. With 1, X may also be rows in slot order.
        validate: True: indices that are not a permutation raise. False: they are replaced by their ranks (of equal
            ones the first is the lower), which are a permutation. None: PADDLE_MOE_OPS_VALIDATE, otherwise they raise
            on a CPU and not on a GPU. In a static graph they are replaced by their ranks.

    Returns:
        [T*topk, H], dtype of ``X``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad indices (see ``validate``).
    """
    name = "permute"
    topk = _checks.integer(name, "topk", topk, 1)
    tokens, slot_to_row, row_to_slot = _checked(name, X, gather_indices, topk, validate)
    return move_rows(tokens, slot_to_row.reshape([-1, topk]), row_to_slot // topk)


@public("X")
def unpermute(X: Tensor, gather_indices: Tensor, *, validate: bool | None = None) -> Tensor:
    """Bring rows back to slot order: row ``gather_indices[i]`` of the result is row i of ``X``. No sum, no weights.

    Differentiable in ``X``, except for float8 rows. Deterministic: bit-exact copies both ways. No host synchronisation
    except with ``validate=True`` on a GPU.

    Args:
        X: [T*K, H], or [..., H] with T*K rows in all, dtypes as in `permute`.
        gather_indices: int32 or int64 [T*K], the indices that `permute` followed.
        validate: as in `permute`.

    Returns:
        [T*K, H], dtype of ``X``: slot k of token t in row t * K + k.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad indices (see ``validate``).
    """
    rows, slot_to_row, row_to_slot = _checked("unpermute", X, gather_indices, 1, validate)
    return move_rows(rows, row_to_slot.unsqueeze(-1), slot_to_row)


def _ids_by_token(function: str, selected_experts: Tensor) -> Tensor:
    """The ids as [T, K]; flat ones as those of tokens with one slot each, which leaves the order of slots alone."""
    argument, dtypes = "selected_experts", _checks.ID_DTYPES
    if getattr(selected_experts, "ndim", 2) == 1:
        return _checks.tensor(function, argument, selected_experts, dtypes, ["num_slots"]).unsqueeze(-1)
    if getattr(selected_experts, "ndim", 2) == 0:
        expected = "of shape [num_slots], [num_tokens, topk] or [..., topk]"
        _checks.bad_value(function, argument, expected, list(selected_experts.shape))
    ids = _checks.lines(function, argument, selected_experts, dtypes, "topk")
    if ids.shape[1] == 0:
        expected = "of shape [..., topk] with topk >= 1"
        _checks.bad_value(function, argument, expected, list(selected_experts.shape))
    return ids


def _is_checked(function: str, validate: bool | None, like: Tensor) -> bool:
    """True if values are checked; a graph has none yet."""
    return _checks.validation(function, validate, like) > Validation.OFF and not is_graph_value(like)


def _checked(
    function: str, X: Tensor, gather_indices: Tensor, topk: int, validate: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """X as lines [-1, H], and the permutation as int32 [N] from slots to rows and from rows to slots."""
    lines = _checks.lines(function, "X", X, _checks.ROW_DTYPES, "hidden")
    if X.shape[-1] == 0:
        _checks.bad_value(function, "X", "of shape [..., hidden] with hidden >= 1", list(X.shape))
    num_slots = lines.shape[0] * topk if lines.shape[0] >= 0 else "num_slots"
    text = None if X.ndim == 2 else f"[{num_slots}] with X of shape {list(X.shape)}"
    _checks.tensor(function, "gather_indices", gather_indices, _checks.ID_DTYPES, [num_slots], text)
    _checks.same_place(function, X=X, gather_indices=gather_indices)
    slot_to_row = paddle.argsort(gather_indices, stable=True)
    if _is_checked(function, validate, gather_indices):
        _checks.permutation(function, "gather_indices", gather_indices.numpy(), slot_to_row.numpy())
    slot_to_row = slot_to_row.astype("int32")
    # The indices themselves if they are a permutation, and within bounds in any case.
    row_to_slot = paddle.scatter(slot_to_row, slot_to_row, numbers_of(slot_to_row))
    return lines, slot_to_row, row_to_slot
