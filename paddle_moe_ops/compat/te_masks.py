# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Helpers of the functions on masks: masks to plans, rows with their scales."""

from __future__ import annotations

import math
from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import constant, float32, to_dtype
from ..backends import RowMaps, resolve
from ..functional import movable_scale
from ..routing import Plan, route, slot_probs

__all__ = ["ROUTE_NAMES", "check_scale", "mask_of", "move", "route_mask", "without_zero_probs"]

# TransformerEngine's names of the arguments of `route`.
ROUTE_NAMES = {"routing": "routing_map", "buffer_size": "num_out_tokens", "topk": "num_topK"}

_MASK_DTYPES = (paddle.bool, paddle.int32, paddle.int64, paddle.int8, paddle.uint8)
_SCALE_DTYPES = (paddle.float32, paddle.int32, paddle.uint8)


def mask_of(function: str, routing_map: Any, inp: Tensor | None = None, *, takes_floats: bool = False) -> Tensor:
    """The routing map as bool [T, E]."""
    tokens: int | str = "num_tokens" if inp is None else inp.shape[0]
    dtypes = (*_MASK_DTYPES, *_checks.SUM_DTYPES) if takes_floats else _MASK_DTYPES
    _checks.tensor(function, "routing_map", routing_map, dtypes, [tokens, "num_experts"])
    _checks.same_place(function, inp=inp, routing_map=routing_map)
    return routing_map if routing_map.dtype == paddle.bool else routing_map.astype("bool")


def route_mask(
    function: str, mask: Tensor, probs: Tensor | None, num_rows: int, padding: int = 1, **options: Any
) -> Plan:
    """The plan of a mask; its probabilities may have any dtype of sums."""
    if probs is not None:
        _checks.tensor(function, "probs", probs, _checks.SUM_DTYPES, mask.shape)
    with _checks.renaming("route", function, **ROUTE_NAMES):
        return route(mask, float32(probs), buffer_size=num_rows, padding_alignment=padding, **options)


def _is_of_whole_tensor(scale: Tensor) -> bool:
    return len(scale.shape) != 2


def check_scale(function: str, scale: Any, inp: Tensor) -> None:
    """Check the scale of float8 rows: by row, or one number."""
    if scale is None:
        return
    by_row = getattr(scale, "ndim", 2) == 2
    shape = [inp.shape[0], "num_scales"] if by_row else ["size"] * scale.ndim
    _checks.tensor(function, "scale", scale, _SCALE_DTYPES, shape)
    if not by_row and math.prod(scale.shape) != 1:
        _checks.bad_value(function, "scale", "of shape [num_tokens, num_scales], or one number", list(scale.shape))
    _checks.same_place(function, inp=inp, scale=scale)


def move(inp: Tensor, maps: Any, scale: Tensor | None, rows_by: RowMaps | None = None) -> tuple[Tensor, Tensor | None]:
    """Rows, and scales by row; a scale of the whole tensor is unchanged.

    Args:
        inp: the tokens.
        maps: a plan, or maps that were read.
        scale: of the tokens, or None.
        rows_by: what the rows follow, if it is not what the scales follow.
    """
    backend = resolve("permute", inp)
    if scale is None or _is_of_whole_tensor(scale):
        return backend.permute(inp, None, maps if rows_by is None else rows_by, "all")[0], scale
    carried = movable_scale(scale)
    if rows_by is None:
        rows, scales = backend.permute(inp, carried, maps, "all")
    else:
        rows, _ = backend.permute(inp, None, rows_by, "all")
        one_column = maps.token_rows[:, :1].astype("float32")  # scales only move along with rows; any rows will do
        _, scales = backend.permute(one_column, carried, maps, "all")
    return rows, to_dtype(scales, scale.dtype)


def without_zero_probs(maps: Any, by_row: Tensor) -> RowMaps:
    """Maps that leave out rows of probability 0; token_rows, which the gradient follows, keep them.

    Args:
        maps: a plan, or maps that were read.
        by_row: float32 [N], the probability of each row.
    """
    by_row = constant(by_row)
    by_slot = slot_probs(by_row, maps)
    none_of_slots, none_of_rows = paddle.full_like(maps.slot_to_row, -1), paddle.full_like(maps.row_to_token, -1)
    return RowMaps(
        slot_to_row=paddle.where(by_slot == 0, none_of_slots, maps.slot_to_row),
        token_rows=maps.token_rows,
        row_to_token=paddle.where(by_row == 0, none_of_rows, maps.row_to_token),
        row_to_slot=maps.row_to_slot,
        row_to_expert=maps.row_to_expert,
        leaves_out=True,
    )
