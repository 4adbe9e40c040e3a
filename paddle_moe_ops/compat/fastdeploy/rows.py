# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens to the rows of experts whose segments the caller sizes, and the sums of their rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from ... import _checks
from ..._graphs import beside, dense, float32, is_graph_value, to_dtype
from ...backends import RowMaps, Validation, resolve
from ...routing import route, slot_probs
from ..row_maps import as_int32, kept, known_slots, num_rows_of, of_experts, read_index_map
from .codes import times
from .selection import sum_of_slots

__all__ = ["INDICES", "Segments", "combined", "maps_of_indices", "placed", "rows_by_expert", "transposed"]

INDICES = "permute_indices_per_token"


class Segments(NamedTuple):
    """The rows of experts: int32 [E] first rows, sizes, and the rows that slots have."""

    starts: Tensor
    sizes: Tensor
    counts: Tensor

    def experts_of_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """int32 [N] the expert in whose segment each row lies, the last one after all segments; bool [N] in use."""
        rows = beside(paddle.arange(num_rows, dtype="int32"), self.starts)
        ends = self.starts + self.sizes
        experts = paddle.searchsorted(ends[:-1], rows, out_int32=True, right=True)
        places = rows - paddle.gather(self.starts, experts)
        return experts, places < paddle.gather(self.counts, experts)


def placed(
    name: str, topk_ids: Tensor, starts: Tensor, sizes: Tensor, validate: bool | None = None
) -> tuple[Tensor, Tensor, Segments, Tensor]:
    """A row for every slot in its expert's segment, by ascending token, then slot.

    Args:
        name: the function whose argument ``topk_ids`` is.
        topk_ids: int32 or int64 [T, K], -1 for none.
        starts: int32 [E], first row of each segment.
        sizes: int32 [E], rows of each segment; slots beyond have no row.
        validate: as that of `route`.

    Returns:
        int32 [T, K] ids, -1 for none; int32 [T, K] rows, -1 without one; the segments; int32 [E] the slots of each
        expert, those without a row included.
    """
    num_experts = starts.shape[0]
    with _checks.renaming("route", name, routing="topk_ids"):
        plan = route(
            topk_ids,
            num_experts=num_experts,
            buffer_size=known_slots(topk_ids),
            duplicates="each",
            validate=validate,
        )
    ids = as_int32(topk_ids)
    ids = kept((ids >= 0) & (ids < num_experts), ids)
    places = plan.slot_to_row - of_experts(plan.expert_offsets, ids)
    fits = (ids >= 0) & (places < of_experts(sizes, ids))
    rows = kept(fits, of_experts(starts, ids) + places)
    routed = plan.routed_per_expert
    return ids, rows, Segments(starts, sizes, paddle.minimum(routed, sizes)), routed


def rows_by_expert(ids: Tensor, slot_rows: Tensor, num_experts: int) -> Tensor:
    """int32 [T, E]: the row that each token has with each expert, -1 for none; of repeated ids, that of the last slot.

    Args:
        ids: int32 [T, K], -1 for none.
        slot_rows: int32 [T, K], -1 for none.
        num_experts: E.
    """
    is_later = beside(paddle.ones([ids.shape[1]] * 2, "int32").triu(1), ids) > 0
    is_repeated = ((ids.unsqueeze(2) == ids.unsqueeze(1)) & is_later).any(-1)
    # Slots without an expert, or with one that a later slot repeats, go to one more column.
    columns = paddle.where((ids < 0) | is_repeated, paddle.full_like(ids, num_experts), ids)
    none = paddle.full([num_rows_of(ids), num_experts + 1], -1, "int32")
    by_expert = paddle.put_along_axis(beside(none, ids), columns.astype("int64"), slot_rows, 1)
    return by_expert[:, :num_experts]


def transposed(matrix: Tensor) -> Tensor:
    """A contiguous transpose."""
    swapped = matrix.transpose([1, 0])
    return swapped if is_graph_value(swapped) else dense(swapped)


def maps_of_indices(name: str, argument: str, slot_rows: Tensor, num_rows: Any, like: Tensor) -> RowMaps:
    """Maps of the rows of slots, int32 [T, K]; if data is checked, rows that are repeated or outside [-1, N) raise."""
    validation = Validation.OFF if is_graph_value(like) else _checks.validation(name, None, like)
    with _checks.renaming(name, name, row_id_map=argument):
        return read_index_map(name, slot_rows, num_rows, validation)


def check_experts(name: str, argument: str, ids: Tensor, num_experts: int) -> None:
    """Check that ids [T, K] are in [-1, E), if data is checked."""
    if is_graph_value(ids) or _checks.validation(name, None, ids) == Validation.OFF:
        return
    is_bad = (ids < -1) | (ids >= num_experts)
    if bool(is_bad.any()):
        token, slot = is_bad.nonzero()[0].tolist()
        given = f"token {token}, slot {slot} holds {int(ids[token, slot])}"
        raise ValueError(f"{name}: {argument} must hold expert ids in [-1, {num_experts}), but {given}")


def combined(
    rows: Tensor,
    weights: Tensor,
    maps: RowMaps,
    *,
    norm_topk_prob: bool,
    factor: float,
    bias_of_row: Tensor | None = None,
    weighs_bias: bool = True,
) -> Tensor:
    """The sum of each token's rows, weighted, ascending, in float32 and rounded once.

    Args:
        rows: [N, H].
        weights: float32 [T, K] by slot, or [N] by row.
        maps: the rows of each token.
        norm_topk_prob: whether to divide the weights of a token by their sum; weights that are all 0 stay 0.
        factor: factor of the weights.
        bias_of_row: [N, H] to be added to the rows, or None.
        weighs_bias: whether it is added before the rows are weighted.
    """
    if norm_topk_prob:
        if weights.ndim == 1:
            weights = slot_probs(weights, maps)
        total = sum_of_slots(weights)
        weights = weights / paddle.where(total == 0, paddle.ones_like(total), total)
    if factor != 1.0:
        weights = times(weights, factor)
    if bias_of_row is None:
        return resolve("unpermute", rows).unpermute(rows, weights, maps)
    wide, addend = float32(rows), float32(bias_of_row)
    if weighs_bias:
        out = resolve("unpermute", wide).unpermute(wide + addend, weights, maps)
    else:
        weighted = resolve("unpermute", wide).unpermute(wide, weights, maps)
        out = weighted + resolve("unpermute", wide).unpermute(addend, None, maps)
    return to_dtype(out, rows.dtype)
