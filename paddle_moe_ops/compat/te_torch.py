# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of `paddle_moe_ops.masked` that route and permute in one call: TransformerEngine's high-level API."""

from __future__ import annotations

import math
from typing import Any, get_args

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import float32, is_graph_value, public, to_dtype
from .._options import MapType
from ..backends import resolve
from ..functional import sort_chunks
from ..routing import Plan, route
from . import row_maps
from .te_masks import ROUTE_NAMES, check_scale, mask_of, move, route_mask, without_zero_probs
from .te_triton import unpermute_with_mask_map

__all__ = [
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]


@public("inp")
def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: MapType = "mask",
    *,
    scale: Tensor | None = None,
    num_experts: int | None = None,
    validate: bool | None = None,
) -> tuple[Tensor, ...]:
    """Route tokens and copy them to expert order.

    Differentiable in ``inp`` (not float8). Host synchronisation on a GPU only to learn N from a mask, with
    map_type="index" and no ``num_experts``, and when it validates.

    Args:
        inp: [T, H] bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        routing_map: map_type="mask": bool or integer [T, E], entries other than 0 are routed. map_type="index": int32
            or int64 [T, K] expert ids; every slot has its own row, ids outside [0, num_experts) come after all experts.
        num_out_tokens: N; rows at or beyond it are dropped. -1: as many as are routed. map_type="index": -1 and 0 mean
            T * K.
        max_token_num: not used, for TransformerEngine's signature.
        map_type: "mask" or "index".
        scale: of float8 rows, as in `permute_with_mask_map`.
        num_experts: E for map_type="index". None: taken from the largest id, which is read from the device; not in a
            static graph.
        validate: dropped rows raise if True.

    Returns:
        permuted [N, H] with 0 in rows without a token, row_id_map: int32 [T, 2E + 1], or for map_type="index" [K * T],
        the row of slot k of token t at k * T + t, -1 = none; and permuted_scale if ``scale`` is given.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad data.
    """
    name = "moe_permute"
    _checks.choice(name, "map_type", map_type, get_args(MapType))
    _checks.tensor(name, "inp", inp, _checks.ROW_DTYPES, ["num_tokens", "hidden"])
    check_scale(name, scale, inp)
    if map_type == "mask":
        num_rows = _checks.integer(name, "num_out_tokens", num_out_tokens, -1)
        plan = route_mask(name, mask_of(name, routing_map, inp), None, num_rows, validate=validate)
        row_id_map = row_maps.plan_to_row_id_map(plan)
    else:
        plan = _route_ids(name, inp, routing_map, num_out_tokens, num_experts, validate)
        row_id_map = plan.slot_to_row.transpose([1, 0]).flatten()
        row_id_map.stop_gradient = True
    permuted, permuted_scale = move(inp, plan, scale)
    return (permuted, row_id_map) if scale is None else (permuted, row_id_map, permuted_scale)


@public("inp", "probs")
def moe_permute_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    *,
    scale: Tensor | None = None,
    zero_prob_as_padding: bool = False,
    validate: bool | None = None,
) -> tuple[Tensor, ...]:
    """Route tokens by a mask and copy them and their probabilities to expert order.

    Differentiable in ``inp`` (not float8) and ``probs``. Host synchronisation on a GPU only to learn N, and when it
    validates.

    Args:
        inp: [T, H], as in `moe_permute`.
        probs: bfloat16, float16 or float32 [T, E].
        routing_map: bool or integer [T, E].
        num_out_tokens: N; rows at or beyond it are dropped. -1: as many as are routed.
        scale: of float8 rows, as in `permute_with_mask_map`.
        zero_prob_as_padding: a row with probability exactly 0 is 0, as in TransformerEngine; its scale and its gradient
            stay.
        validate: NaN among the probabilities, and dropped rows (True only), raise.

    Returns:
        permuted [N, H] with 0 in rows without a token, permuted_probs [N] in the dtype of ``probs``, row_id_map int32
        [T, 2E + 1]; and permuted_scale if ``scale`` is given.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad data.
    """
    name = "moe_permute_with_probs"
    _checks.tensor(name, "inp", inp, _checks.ROW_DTYPES, ["num_tokens", "hidden"])
    num_rows = _checks.integer(name, "num_out_tokens", num_out_tokens, -1)
    plan = route_mask(name, mask_of(name, routing_map, inp), probs, num_rows, validate=validate)
    permuted, *permuted_scale = _move_weighted(name, inp, plan, scale, zero_prob_as_padding)
    return permuted, to_dtype(plan.row_probs, probs.dtype), row_maps.plan_to_row_id_map(plan), *permuted_scale


@public("inp", "probs")
def moe_permute_and_pad_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    tokens_per_expert: Any,
    align_size: int,
    *,
    scale: Tensor | None = None,
    zero_prob_as_padding: bool = False,
    validate: bool | None = None,
) -> tuple[Tensor | None, ...]:
    """Route and copy as `moe_permute_with_probs`, with segments padded to multiples of ``align_size`` rows.

    Differentiable in ``inp`` (not float8) and ``probs``. One host synchronisation with a GPU, two if
    ``tokens_per_expert`` is not a list; more when it validates.

    Args:
        inp: [T, H], as in `moe_permute`.
        probs: bfloat16, float16 or float32 [T, E].
        routing_map: bool or integer [T, E].
        tokens_per_expert: the number of rows routed to each expert, with or without its segment's padding: int32 or
            int64 [E], or a list of ints.
        align_size: rows, at least 1.
        scale: as in `moe_permute_with_probs`.
        zero_prob_as_padding: as in `moe_permute_with_probs`.
        validate: NaN among the probabilities raises.

    Returns:
        permuted [N, H] and permuted_probs [N], both 0 in padding; row_id_map int32 [T, 2E + 1], which counts no
        padding; pad_offsets int32 [E], or None where there is no padding (in a static graph always a tensor);
        target_tokens_per_expert int64 [E], padding included; and permuted_scale if ``scale`` is given.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; wrong ``tokens_per_expert``; bad data.
    """
    name = "moe_permute_and_pad_with_probs"
    _checks.tensor(name, "inp", inp, _checks.ROW_DTYPES, ["num_tokens", "hidden"])
    if tokens_per_expert is None:
        _checks.bad_value(name, "tokens_per_expert", "a list of ints or a 1-D int tensor", None)
    align = _checks.integer(name, "align_size", align_size, 1)
    mask = mask_of(name, routing_map, inp)
    plan = route_mask(name, mask, probs, -1, align, tokens_per_expert=tokens_per_expert, validate=validate)
    permuted, *permuted_scale = _move_weighted(name, inp, plan, scale, zero_prob_as_padding)
    pad_offsets: Tensor | None = row_maps.padding_offsets(plan)
    if isinstance(inp, Tensor) and int(plan.routed_per_expert.sum()) == plan.num_rows:
        pad_offsets = None
    targets = (plan.expert_offsets[1:] - plan.expert_offsets[:-1]).astype("int64")
    targets.stop_gradient = True
    row_id_map = row_maps.plan_to_row_id_map(plan, pad_offsets)
    return permuted, to_dtype(plan.row_probs, probs.dtype), row_id_map, pad_offsets, targets, *permuted_scale


@public("inp", "merging_probs", "probs")
def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Any = None,
    map_type: MapType = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
    *,
    validate: bool | None = None,
) -> Tensor:
    """Sum each token's rows, weighted if there are probabilities.

    Differentiable in ``inp`` and ``merging_probs``. No host synchronisation unless it validates on a GPU.

    Args:
        inp: [N, H] bfloat16, float16 or float32.
        row_id_map: of `moe_permute` and its relatives.
        merging_probs: bfloat16, float16 or float32 weights, [T, E], or for map_type="index" [T, K]; or None.
        restore_shape: the shape of the result, for instance [batch, sequence, H]. None: [T, H]. With map_type="index"
            and no weights it says how many tokens there are; without it K is 1.
        map_type: "mask" or "index".
        probs: TransformerEngine's old name of ``merging_probs``.
        pad_offsets: int32 or int64 [E] of `moe_permute_and_pad_with_probs`, or None.
        validate: a row that is in the map twice, or lies outside [0, N), raises.

    Returns:
        [T, H] or ``restore_shape``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; both ``merging_probs`` and ``probs``; bad data.
    """
    name = "moe_unpermute"
    _checks.choice(name, "map_type", map_type, get_args(MapType))
    if probs is not None and merging_probs is not None:
        _checks.bad_value(name, "probs", "None with merging_probs, whose old name it is", "both")
    weights = merging_probs if probs is None else probs
    if map_type == "mask":
        with _checks.renaming("unpermute_with_mask_map", name, probs="merging_probs"):
            out = unpermute_with_mask_map(inp, row_id_map, weights, pad_offsets, validate=validate)
    else:
        out = _unpermute_by_index(name, inp, row_id_map, weights, restore_shape, validate)
    return out if restore_shape is None else _restored(name, out, restore_shape)


@public("inp")
def moe_sort_chunks_by_index(
    inp: Tensor, split_sizes: Tensor, sorted_index: Tensor, *, validate: bool | None = None
) -> Tensor:
    """Put chunks of rows in the order ``sorted_index``: the rows of `paddle_moe_ops.sort_chunks`.

    Differentiable in ``inp`` (not float8). No host synchronisation unless it validates on a GPU.

    Args:
        inp: [R, H].
        split_sizes: int32 or int64 [C] rows of each chunk.
        sorted_index: int32 or int64 [C], the chunks in their new order.
        validate: as in `paddle_moe_ops.sort_chunks`.

    Returns:
        [R, H].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape; bad data.
    """
    with _checks.renaming("sort_chunks", "moe_sort_chunks_by_index", x="inp", order="sorted_index"):
        return sort_chunks(inp, split_sizes, sorted_index, validate=validate)[0]


@public("inp", "probs")
def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor, *, validate: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Put chunks of rows and probabilities in the order ``sorted_index``, as `paddle_moe_ops.sort_chunks` does.

    Differentiable in ``inp`` (not float8) and ``probs``. No host synchronisation unless it validates on a GPU.

    Args:
        inp: [R, H].
        probs: bfloat16, float16 or float32 [R] that travel with the rows.
        split_sizes: int32 or int64 [C] rows of each chunk.
        sorted_index: int32 or int64 [C], the chunks in their new order.
        validate: as in `paddle_moe_ops.sort_chunks`.

    Returns:
        rows [R, H] and probabilities [R] in the dtype of ``probs``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape; bad data.
    """
    with _checks.renaming("sort_chunks", "moe_sort_chunks_by_index_with_probs", x="inp", order="sorted_index"):
        return sort_chunks(inp, split_sizes, sorted_index, probs, validate=validate)[:2]


def _move_weighted(
    function: str, inp: Tensor, plan: Plan, scale: Tensor | None, zero_prob_as_padding: bool
) -> tuple[Tensor | None, ...]:
    """Rows of a plan with probabilities, and their scale if there is one."""
    check_scale(function, scale, inp)
    _checks.flag(function, "zero_prob_as_padding", zero_prob_as_padding)
    rows_by = without_zero_probs(plan, plan.row_probs) if zero_prob_as_padding else None
    permuted, permuted_scale = move(inp, plan, scale, rows_by)
    return (permuted,) if scale is None else (permuted, permuted_scale)


def _route_ids(
    function: str, inp: Tensor, ids: Any, num_out_tokens: int, num_experts: int | None, validate: bool | None
) -> Plan:
    """The plan of slots that each have their own row; slots without an expert come after the last expert."""
    _checks.tensor(function, "routing_map", ids, _checks.ID_DTYPES, [inp.shape[0], "topk"])
    num_rows = _checks.integer(function, "num_out_tokens", num_out_tokens, -1)
    if num_experts is None:
        if is_graph_value(ids):
            _checks.bad_value(function, "num_experts", "given in a static graph", None)
        num_experts = int(ids.max()) + 1 if ids.numel() else 0
        num_experts = min(max(num_experts, 1), _checks.MAX_EXPERTS - 1)
    experts = _checks.integer(function, "num_experts", num_experts, 1, _checks.MAX_EXPERTS - 1)
    no_expert = paddle.full_like(ids, experts)
    ids = paddle.where((ids < 0) | (ids >= experts), no_expert, ids)
    tokens, topk = ids.shape
    if num_rows < 1:
        num_rows = tokens * topk if tokens >= 0 else -1
    with _checks.renaming("route", function, **ROUTE_NAMES):
        return route(ids, num_experts=experts + 1, buffer_size=num_rows, duplicates="each", validate=validate)


def _sizes(function: str, restore_shape: Any) -> list[Any]:
    """The sizes of a shape: ints, or values of a graph."""
    if not isinstance(restore_shape, (list, tuple)) or not restore_shape:
        expected = "a list of ints, such as [num_tokens, hidden]"
        _checks.bad_type(function, "restore_shape", expected, repr(restore_shape))
    return list(restore_shape)


def _restored(function: str, out: Tensor, restore_shape: Any) -> Tensor:
    """The sums [T, H] in the shape that the caller asks for."""
    sizes = _sizes(function, restore_shape)
    are_known = all(isinstance(size, int) for size in sizes) and -1 not in (*sizes, *out.shape)
    if are_known and math.prod(sizes) != math.prod(out.shape):
        tokens, hidden = out.shape
        expected = f"a shape of {tokens * hidden} elements, those of {tokens} tokens of {hidden} columns"
        _checks.bad_value(function, "restore_shape", expected, sizes)
    return out.reshape(sizes)


def _unpermute_by_index(
    function: str, inp: Tensor, row_id_map: Any, weights: Any, restore_shape: Any, validate: bool | None
) -> Tensor:
    _checks.tensor(function, "inp", inp, _checks.SUM_DTYPES, ["num_rows", "hidden"])
    _checks.tensor(function, "row_id_map", row_id_map, (paddle.int32,), ["topk * num_tokens"])
    slots = row_id_map.shape[0]
    topk = 1
    if weights is not None:
        text = f"[num_tokens, topk], one for each of the {slots} entries of row_id_map"
        _checks.tensor(function, "merging_probs", weights, _checks.SUM_DTYPES, ["num_tokens", "topk"], text)
        tokens, topk = weights.shape
        if topk == 0 or (-1 not in (slots, tokens, topk) and tokens * topk != slots):
            _checks.bad_value(function, "merging_probs", f"of shape {text}", list(weights.shape))
    elif restore_shape is not None:
        tokens = math.prod(_sizes(function, restore_shape)[:-1])
        if tokens > 0:
            topk = slots // tokens
            if slots >= 0 and slots % tokens != 0:
                expected = f"the shape of a number of tokens that divides {slots}, the entries of row_id_map"
                _checks.bad_value(function, "restore_shape", expected, list(restore_shape))
    _checks.same_place(function, inp=inp, row_id_map=row_id_map, merging_probs=weights)
    slot_to_row = row_id_map.reshape([topk, -1 if slots != 0 else 0]).transpose([1, 0])
    num_rows = row_maps.num_rows_of(inp)
    maps = row_maps.read_index_map(function, slot_to_row, num_rows, _checks.validation(function, validate, inp))
    return resolve("unpermute", inp).unpermute(inp, float32(weights), maps)
