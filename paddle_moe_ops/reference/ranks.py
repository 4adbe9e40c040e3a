# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Transport between ranks that write to each other's memory: destinations of tokens, and arriving records.

Regions are those of ``csrc/include/pmo/ranks.h``: S rows for each of P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .permutation import sum_rows

__all__ = [
    "CALLS_DIFFER",
    "CALL_WORDS",
    "GRADIENT_MODES_DIFFER",
    "RankPlan",
    "arrived_records",
    "call_difference",
    "is_fetched",
    "nan_bytes",
    "rank_plan",
    "receive_rows",
    "rows_in_windows",
    "send_rows",
    "values_of_slots",
]

FETCHED_PERIOD = 8
CALL_WORDS = 8
CALLS_DIFFER, GRADIENT_MODES_DIFFER = 1, 2


class RankPlan(NamedTuple):
    """The destinations of a rank's tokens.

    Attributes:
        token_rows: int32 [T, min(P, K)] rows of each token, ascending, -1 last; row p * S + i is number i at rank p.
        row_to_token: int32 [P * S], -1 = none.
        dropped: int32 [1], slots whose token found no room.
        routed: int32 [E], tokens that chose each expert.
    """

    token_rows: NDArray
    row_to_token: NDArray
    dropped: NDArray
    routed: NDArray


def rank_plan(ids: NDArray, num_ranks: int, experts_per_rank: int, rows_per_rank: int, capacity: int) -> RankPlan:
    """Give each token a row at every rank that has one of its experts, as long as that has room.

    Args:
        ids: int [T, K]; ids outside the experts' range have no rank.
        num_ranks: P.
        experts_per_rank: rank p has the experts from p * experts_per_rank on.
        rows_per_rank: S.
        capacity: tokens that a rank gets at most.
    """
    num_tokens, topk = ids.shape
    ranks = np.where((ids >= 0) & (ids < num_ranks * experts_per_rank), ids // experts_per_rank, -1)
    token_rows = np.full([num_tokens, min(num_ranks, topk)], -1, np.int32)
    row_to_token, dropped = np.full(num_ranks * rows_per_rank, -1, np.int32), 0
    counts = np.zeros(num_ranks, np.int64)
    for token in range(num_tokens):
        made = 0
        for rank in range(num_ranks):
            slots = int((ranks[token] == rank).sum())
            if slots == 0:
                continue
            if counts[rank] >= capacity:
                dropped += slots
                continue
            row = rank * rows_per_rank + counts[rank]
            token_rows[token, made], row_to_token[row] = row, token
            counts[rank] += 1
            made += 1
    chosen = np.concatenate([np.unique(each) for each in np.where(ranks >= 0, ids, -1)] or [ids.reshape(-1)])
    routed = np.bincount(chosen[chosen >= 0], minlength=num_ranks * experts_per_rank).astype(np.int32)
    return RankPlan(token_rows, row_to_token, np.array([dropped], np.int32), routed)


def arrived_records(
    ids: NDArray, probs: NDArray, counts: NDArray, first_expert: int, num_experts: int
) -> tuple[NDArray, NDArray, NDArray]:
    """The tokens that a rank receives, from the records in its regions.

    Args:
        ids: int32 [P, S, K], as they were sent.
        probs: float32 [P, S, K].
        counts: int [P], tokens in each region.
        first_expert: of this rank.
        num_experts: of this rank.

    Returns:
        ids [P * S, K] counted from first_expert, -1 = none; probabilities, 0 where there is none; the row [P * S, 1]
        itself where there is a token, else -1.
    """
    num_ranks, rows, topk = ids.shape
    is_token = np.arange(rows)[None, :] < counts[:, None]
    local = ids.astype(np.int64) - first_expert
    here = (local >= 0) & (local < num_experts) & is_token[..., None]
    numbers = np.arange(num_ranks * rows, dtype=np.int32).reshape(num_ranks, rows)
    return (
        np.where(here, local, -1).astype(np.int32).reshape(-1, topk),
        np.where(here, probs, np.float32(0)).reshape(-1, topk),
        np.where(is_token, numbers, -1).astype(np.int32).reshape(-1, 1),
    )


def call_difference(own: NDArray, calls: NDArray, forward_calls: NDArray | None = None, gradient: int = 0) -> int:
    """A rank's verdict at a rendezvous: `CALLS_DIFFER`, `GRADIENT_MODES_DIFFER` or 0.

    Args:
        own: int32 [CALL_WORDS], the call that this rank is in; all ranks must agree on all words but the last.
        calls: int32 [P, CALL_WORDS], those of all ranks.
        forward_calls: int32 [P, CALL_WORDS], those of the forward pass of which this is the backward pass, or None. If
            a rank does not run the backward pass, this rank does not wait, and compares nothing.
        gradient: the bit in their last words that says that a rank runs this backward pass.
    """
    if forward_calls is not None and not (forward_calls[:, -1] & gradient).all():
        return GRADIENT_MODES_DIFFER
    return CALLS_DIFFER if (calls[:, :-1] != own[:-1]).any() else 0


def nan_bytes(like: NDArray) -> NDArray:
    """Floating-point numbers where ranks were in different calls: NaN, of bytes 0xFF."""
    return np.full((*like.shape, like.itemsize), 0xFF, np.uint8).view(like.dtype)[..., 0]


def values_of_slots(values: NDArray, ids: NDArray, token_rows: NDArray, experts_per_rank: int) -> NDArray:
    """The value [T, K] of each slot at the row that its token has at the expert's rank, 0 if it has none.

    Args:
        values: float32 [P, S, K].
        ids: int [T, K].
        token_rows: int32 [T, min(P, K)].
        experts_per_rank: of each rank.
    """
    num_ranks, rows, _ = values.shape
    out = np.zeros(ids.shape, np.float32)
    for token, slot in np.ndindex(*ids.shape):
        if 0 <= ids[token, slot] < num_ranks * experts_per_rank:
            rank = ids[token, slot] // experts_per_rank
            places = token_rows[token].astype(np.int64) - rank * rows
            for place in places[(places >= 0) & (places < rows)][:1]:
                out[token, slot] = values[rank, place, slot]
    return out


def rows_in_windows(
    ids: NDArray, token_rows: NDArray, row_to_slot: NDArray, experts_per_rank: int, num_ranks: int, rows_per_rank: int
) -> NDArray:
    """Places of the rows of a plan over all experts in a symmetric buffer with S * K rows for each rank.

    Row r * K + k of the buffer belongs to slot k of the token in row r.

    Args:
        ids: int [T, K].
        token_rows: int32 [T, min(P, K)], of `rank_plan`.
        row_to_slot: int32 [N], of the plan, -1 = none.
        experts_per_rank: of each rank.
        num_ranks: P.
        rows_per_rank: S.

    Returns:
        int32 [N, 1] the place of each row, -1 = none.
    """
    topk = ids.shape[1]
    places = np.full([len(row_to_slot), 1], -1, np.int32)
    for row, slot in enumerate(row_to_slot):
        token, k = divmod(int(slot), topk) if slot >= 0 else (0, 0)
        if slot < 0 or not 0 <= ids[token, k] < num_ranks * experts_per_rank:
            continue
        for there in token_rows[token]:
            if there >= 0 and there // rows_per_rank == ids[token, k] // experts_per_rank:
                places[row] = there * topk + k
    return places


def is_fetched(places: NDArray, fetched: int) -> NDArray:
    """True for rows of a region that their receiver fetches: ``fetched`` of every 8, spread evenly."""
    return places % FETCHED_PERIOD * fetched % FETCHED_PERIOD < fetched


def send_rows(
    x: NDArray,
    token_rows: NDArray,
    arrived: NDArray,
    peers: NDArray,
    own: NDArray | None,
    *,
    num_ranks: int,
    rank: int,
    fetched: int,
) -> None:
    """Write rows to the regions from which other ranks read them.

    Args:
        x: [T, H].
        token_rows: int32 [T, C], rows of symmetric buffers; rows outside [0, P * S) are skipped.
        arrived: [P * S, H], the regions at this rank, where rows lie that others fetch.
        peers: [P * S, H], this rank's regions at all ranks, where all other rows go.
        own: [P * S, H], the destination of this rank's own rows, or None.
        num_ranks: P.
        rank: of this process.
        fetched: of every 8 rows of a region, those that are fetched.
    """
    rows_per_rank = len(arrived) // num_ranks
    for token, rows in enumerate(token_rows):
        for row in rows[(rows >= 0) & (rows < len(arrived))]:
            target: NDArray | None = arrived if is_fetched(row % rows_per_rank, fetched) else peers
            if row // rows_per_rank == rank:
                target = own
            if target is not None:
                target[row] = x[token]


def receive_rows(
    token_rows: NDArray,
    arrived: NDArray,
    peers: NDArray,
    own: NDArray,
    *,
    num_ranks: int,
    rank: int,
    fetched: int,
) -> NDArray:
    """The sum [T, H] of each token's rows, as `sum_rows` makes it, from where `send_rows` of all ranks left them.

    Args:
        token_rows: int32 [T, C], rows of symmetric buffers; -1 ends a token, and other rows outside [0, P * S) are
            skipped.
        arrived: [P * S, H].
        peers: [P * S, H].
        own: [P * S, H], this rank's own rows.
        num_ranks: P.
        rank: of this process.
        fetched: as it was for `send_rows`.
    """
    places = np.arange(len(arrived) // num_ranks)
    is_own = np.repeat(np.arange(num_ranks) == rank, len(places))[:, None]
    fetches = np.tile(is_fetched(places, fetched), num_ranks)[:, None]
    rows = np.where(is_own, own, np.where(fetches, peers, arrived))
    listed = np.cumsum(token_rows == -1, axis=1) == 0
    used = listed & (token_rows >= 0) & (token_rows < len(rows))
    return sum_rows(rows, np.where(used, token_rows, -1))
