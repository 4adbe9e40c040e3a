# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Plans over ranks: the tokens for each rank, and the order in which rows of local experts are sent back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from .._graphs import beside, filled, numbers_of
from ..backends import RouteSpec, Validation, compiled_backend, direct, resolve
from ..routing import Plan, planned

__all__ = [
    "HEADER",
    "Chunks",
    "chunks_of",
    "equal_parts",
    "kept_ids",
    "local_ids_of",
    "local_plan",
    "plan_of_ranks",
    "trimmed",
]

HEADER = 64  # PMO_RECORDS_HEADER
_BY_ROW = ("row_to_token", "row_to_slot", "row_to_expert")


def local_plan(ids: Tensor, num_experts: int, num_rows: int | None = None) -> Plan:
    """Return the plan of received tokens.

    Args:
        ids: int32 [R, K], counted from the first expert of this rank, -1 for experts of other ranks.
        num_experts: of this rank.
        num_rows: rows of the plan. None: on a CPU as many as there are, on a GPU one for each slot, so that the host
            does not wait for a count.
    """
    if num_rows is None:
        num_rows = -1 if ids.place.is_cpu_place() else ids.shape[0] * min(ids.shape[1], num_experts)
    return planned(ids, None, None, None, RouteSpec(num_experts, -1, 1, None, num_rows, "first", Validation.OFF))


def plan_of_ranks(ids: Tensor, num_ranks: int, experts_of_rank: int, capacity: int | None) -> Plan:
    """Return a plan over ranks instead of experts: a token has one row for each rank with one of its experts.

    The plan has the maximal number of rows, so the host does not wait for the actual one.

    Args:
        ids: int32 [T, K], experts of each token, -1 for none.
        num_ranks: P.
        experts_of_rank: E / P.
        capacity: the maximum of tokens per rank, or None.
    """
    num_tokens, topk = ids.shape
    if num_tokens == 0:
        mask = filled([0, num_ranks], False, "bool", like=ids)
    else:
        rank = ids // experts_of_rank  # rounds down, so negative ids stay negative
        mask = (rank.unsqueeze(-1) == paddle.arange(num_ranks, dtype="int32")).any(axis=1)
    buffer_size = num_tokens * min(num_ranks, topk)
    spec = RouteSpec(num_ranks, num_ranks, 1, None, buffer_size, "first", Validation.OFF)
    return planned(mask, None, None, capacity, spec)


def trimmed(plan: Plan, num_rows: int) -> Plan:
    """Return the plan with a buffer of the first ``num_rows`` rows only."""
    token, slot, expert = plan.row_to_token[:num_rows], plan.row_to_slot[:num_rows], plan.row_to_expert[:num_rows]
    return plan._replace(row_to_token=token, row_to_slot=slot, row_to_expert=expert, num_rows=num_rows)


class Chunks(NamedTuple):
    """The rows of the local experts in chunks, one for each expert and rank.

    Attributes:
        sizes: int32 [C], rows of each chunk in the order (expert, rank), which is that of the local plan.
        to_ranks: int32 [C], the chunks in the order (rank, expert), in which they are sent.
    """

    sizes: Tensor
    to_ranks: Tensor

    def by_rank(self, rows: Tensor) -> Tensor:
        """Return the rows in the order in which they are sent; differentiable."""
        return resolve("sort_chunks", rows).sort_chunks(rows, None, self.sizes, self.to_ranks, Validation.OFF)[0]


class EqualParts(NamedTuple):
    """The lines of an exchange in which each rank sends the same number of lines, S, to each.

    Attributes:
        to_ranks: a plan for `permute` and `unpermute`, whose row p * S + i is line i for rank p.
        ids: int32 [P * S, K] of the lines, counted from the first expert of their rank; ids outside its range are not
            experts of that rank.
        dropped: 0-D int32, slots whose token exceeded S.
    """

    to_ranks: Plan
    ids: Tensor
    dropped: Tensor


def equal_parts(
    ids: Tensor, probs: Tensor, num_ranks: int, experts_of_rank: int, rows_of_rank: int, like: Tensor
) -> EqualParts:
    """Return S lines for each rank with the tokens for its experts.

    Args:
        ids: int32 [T, K], experts of each token, -1 for none.
        probs: float32 [T, K].
        num_ranks: P.
        experts_of_rank: E / P.
        rows_of_rank: S.
        like: a tensor on the device of the maps.
    """
    if resolve("route", ids) is compiled_backend:
        return _equal_parts_by_operators(ids, probs, num_ranks, experts_of_rank, rows_of_rank)
    to_ranks = spread(plan_of_ranks(ids, num_ranks, experts_of_rank, rows_of_rank), rows_of_rank, like)
    local = local_ids_of(ids, to_ranks, experts_of_rank, has_gaps=True)
    dropped = ((ids >= 0).sum() - (local >= 0).sum()).astype("int32")
    return EqualParts(to_ranks, local, dropped)


def _equal_parts_by_operators(
    ids: Tensor, probs: Tensor, num_ranks: int, experts_of_rank: int, rows_of_rank: int
) -> EqualParts:
    """As `equal_parts`, by the operators of transport="peer" with this rank in place of every other rank."""
    topk, num_rows, num_experts = ids.shape[1], num_ranks * rows_of_rank, num_ranks * experts_of_rank
    records = filled([num_ranks, HEADER + 8 * rows_of_rank * topk], 0, "uint8", like=ids)
    sizes = experts_of_rank, rows_of_rank, rows_of_rank
    token_rows, dropped, routed, row_to_token = direct("rank_plan", ids, probs, records, *sizes, True)
    of_lines = direct("rank_records", records, topk, rows_of_rank, 0, num_experts)[0]
    first = (paddle.arange(num_ranks, dtype="int32") * experts_of_rank).unsqueeze(-1)
    local = (of_lines.reshape([num_ranks, rows_of_rank * topk]) - first).reshape([num_rows, topk])
    by_row = dict.fromkeys(_BY_ROW, row_to_token)
    by_token = {"slot_to_row": token_rows, "token_rows": token_rows}
    by_expert = dict.fromkeys(("tokens_per_expert", "expert_offsets", "routed_per_expert"), routed)
    sizes_of_plan = {"num_tokens": ids.shape[0], "topk": token_rows.shape[1], "num_experts": num_ranks}
    more = {"row_probs": None, "overflow": dropped, "padding_alignment": 1, "num_rows": num_rows}
    return EqualParts(Plan(**by_token, **by_row, **by_expert, **sizes_of_plan, **more), local, dropped)


def spread(plan: Plan, rows_of_rank: int, like: Tensor) -> Plan:
    """Return a plan over ranks with the same number of rows for each rank; its rows without a token are last.

    Args:
        plan: a plan over ranks.
        rows_of_rank: the number of rows per rank.
        like: a tensor on the device of the maps.
    """
    num_ranks = plan.num_experts
    num_rows = num_ranks * rows_of_rank
    ranks, offsets = plan.row_to_expert, plan.expert_offsets
    expert_offsets = paddle.arange(num_ranks + 1, dtype="int32") * rows_of_rank
    maps = {name: filled([num_rows], -1, "int32", like=like) for name in _BY_ROW}
    slot_to_row, token_rows = plan.slot_to_row, plan.token_rows
    if ranks.shape[0]:
        shift = expert_offsets[:-1] - offsets[:-1]
        # An extra row collects those without a token.
        places = numbers_of(ranks) + paddle.gather(shift, ranks.clip(min=0))
        places = paddle.where(ranks >= 0, places, paddle.full_like(places, num_rows))
        for name in _BY_ROW:
            buffer = filled([num_rows + 1], -1, "int32", like=ranks)
            maps[name] = paddle.scatter(buffer, places, getattr(plan, name))[:num_rows]
        slot_to_row, token_rows = (_moved(rows, places) for rows in (slot_to_row, token_rows))
    moved = {"slot_to_row": beside(slot_to_row, like), "token_rows": beside(token_rows, like)}
    moved["expert_offsets"] = expert_offsets
    return plan._replace(**maps, **moved, num_rows=num_rows)


def _moved(rows: Tensor, places: Tensor) -> Tensor:
    new = paddle.gather(places, rows.clip(min=0).flatten()).reshape(rows.shape)
    return paddle.where(rows >= 0, new, rows)


def local_ids_of(ids: Tensor, to_ranks: Plan, experts_of_rank: int, *, has_gaps: bool) -> Tensor:
    """Return the ids [R, K] of sent tokens, counted from the first expert of their rank; -1: on another rank.

    Args:
        ids: int32 [T, K].
        to_ranks: their plan over ranks.
        experts_of_rank: E / P.
        has_gaps: whether the plan may have rows without a token.
    """
    if ids.shape[0] == 0 or to_ranks.num_rows == 0:
        return filled([to_ranks.num_rows, ids.shape[1]], -1, "int32", like=ids)
    tokens = to_ranks.row_to_token
    of_rows = paddle.gather(ids, tokens.clip(min=0) if has_gaps else tokens)
    local = of_rows - (to_ranks.row_to_expert * experts_of_rank).unsqueeze(-1)
    is_here = (local >= 0) & (local < experts_of_rank)
    if has_gaps:
        is_here = is_here & (tokens >= 0).unsqueeze(-1)
    return paddle.where(is_here, local, paddle.full_like(local, -1))


def chunks_of(of_experts: NDArray, like: Tensor) -> Chunks:
    """Return the chunks of the rows of [rank, local expert], on the device of ``like``."""
    sizes = of_experts.T.astype(np.int32).flatten()
    order = np.arange(sizes.size, dtype=np.int32).reshape(of_experts.T.shape).T.flatten()
    return Chunks(paddle.to_tensor(sizes, place=like.place), paddle.to_tensor(order, place=like.place))


def kept_ids(ids: Tensor, plan: Plan) -> Tensor:
    """Return the ids as int32, -1 for dropped slots."""
    return paddle.where(plan.slot_to_row >= 0, ids.astype("int32"), paddle.full_like(plan.slot_to_row, -1))
