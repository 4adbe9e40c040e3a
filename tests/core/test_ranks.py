# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What travels between ranks that share memory: plans, records, values, and the barrier."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.reference import ranks as oracle

from ..reference.cases import assert_same_bits
from .binding import Core, CoreError
from .operators.ranks import (
    HEADER,
    rank_get,
    rank_plan,
    rank_plan_params,
    rank_put,
    rank_records,
    rank_rows,
    rank_take,
    region_bytes,
)
from .structs import Bytes, Int32s, Params, Size, fields

# tokens, slots, ranks, experts of a rank, rows of a region, capacity
CASES = [
    (0, 2, 2, 3, 4, 4),
    (1, 1, 1, 1, 1, 1),
    (63, 3, 2, 2, 64, 63),
    (130, 8, 4, 4, 130, 70),
    (300, 4, 7, 5, 128, 127),
    (257, 5, 70, 1, 16, 9),
    (40, 3, 3, 2, 8, 0),
    # a slot, as many as lanes of a warp, and more
    (300, 1, 9, 3, 300, 30),
    (70, 32, 3, 20, 70, 60),
    (70, 41, 9, 7, 70, 63),
    # experts that threads share, the most that are counted in shared memory on a GPU, and one more for each rank
    (300, 4, 2, 150, 300, 300),
    (40, 3, 2, 2048, 40, 40),
    (40, 3, 2, 2049, 40, 40),
]


def drawn(tokens: int, topk: int, experts: int, dtype: type, seed: int = 0) -> tuple[NDArray, NDArray]:
    """Ids, some of which are none, and probabilities."""
    rng = np.random.default_rng([tokens, topk, experts, seed])
    ids = rng.integers(-1, experts + 1, (tokens, topk)).astype(dtype)
    return ids, rng.random((tokens, topk), np.float32)


def regions_of(records: NDArray, rows: int, topk: int) -> tuple[NDArray, NDArray, NDArray]:
    """The counts, ids and probabilities in regions."""
    slots, num_ranks = rows * topk, len(records)
    counts = np.ascontiguousarray(records[:, :4]).view(np.int32)[:, 0]
    ids = np.ascontiguousarray(records[:, HEADER : HEADER + 4 * slots]).view(np.int32)
    probs = np.ascontiguousarray(records[:, HEADER + 4 * slots : HEADER + 8 * slots]).view(np.float32)
    return counts, ids.reshape(num_ranks, rows, topk), probs.reshape(num_ranks, rows, topk)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_and_records_equal_the_oracle(core: Core, case: tuple[int, ...], dtype: type) -> None:
    tokens, topk, num_ranks, experts, rows, capacity = case
    ids, probs = drawn(tokens, topk, num_ranks * experts, dtype)
    expected = oracle.rank_plan(ids, num_ranks, experts, rows, capacity)
    for odd in (0, 1):  # regions that do not begin at multiples of 16 bytes
        *plan, records = rank_plan(core, ids, probs, num_ranks, experts, rows, capacity, odd)
        for actual, wanted in zip(plan, expected, strict=True):
            assert_same_bits(actual, wanted)
        counts, sent_ids, sent_probs = regions_of(records, rows, topk)
        owners = expected.row_to_token.reshape(num_ranks, rows)
        assert counts.tolist() == (owners >= 0).sum(1).tolist()
        used = owners >= 0
        assert_same_bits(sent_ids[used], ids[owners[used]].astype(np.int32))
        assert_same_bits(sent_probs[used], probs[owners[used]])
        assert (sent_ids[~used] == np.int32(np.uint32(0xA5A5A5A5).view(np.int32))).all()  # not written
        mine = num_ranks // 2
        arrived = rank_records(core, records, rows, topk, mine * experts, experts)
        wanted = oracle.arrived_records(sent_ids, sent_probs, counts, mine * experts, experts)
        for actual, due in zip(arrived, wanted, strict=True):
            assert_same_bits(actual, due)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_come_back_to_the_slots(core: Core, case: tuple[int, ...]) -> None:
    tokens, topk, num_ranks, experts, rows, capacity = case
    ids, _ = drawn(tokens, topk, num_ranks * experts, np.int64)
    plan = oracle.rank_plan(ids, num_ranks, experts, rows, capacity)
    values = np.random.default_rng(5).random((num_ranks, rows, topk), np.float32)
    window = np.full((num_ranks, 4 * rows * topk + 8), 0xA5, np.uint8)
    rank_put(core, values, window)
    assert (window[:, -8:] == 0xA5).all()
    assert_same_bits(rank_take(core, window, rows, topk), values.reshape(-1, topk))
    got = rank_get(core, window, ids, plan.token_rows, rows, experts)
    assert_same_bits(got, oracle.values_of_slots(values, ids, plan.token_rows, experts))
    if capacity > 0 and tokens > 1:
        assert (got > 0).any()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_slots_are_found_in_windows(core: Core, case: tuple[int, ...], dtype: type) -> None:
    tokens, topk, num_ranks, experts, rows, capacity = case
    ids, _ = drawn(tokens, topk, num_ranks * experts, dtype)
    plan = oracle.rank_plan(ids, num_ranks, experts, rows, capacity)
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    row_to_slot = order[(flat[order] >= 0) & (flat[order] < num_ranks * experts)].astype(np.int32)
    row_to_slot = np.append(row_to_slot, np.int32(-1))  # a row of a buffer that no slot has
    got = rank_rows(core, ids, plan.token_rows, row_to_slot, num_ranks, experts, rows)
    assert_same_bits(got, oracle.rows_in_windows(ids, plan.token_rows, row_to_slot, experts, num_ranks, rows))
    assert (got >= 0).sum() == len(row_to_slot) - 1 - plan.dropped[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plan_may_do_without_the_tokens_of_rows(core: Core, case: tuple[int, ...]) -> None:
    tokens, topk, num_ranks, experts, rows, capacity = case
    ids, probs = drawn(tokens, topk, num_ranks * experts, np.int32)
    expected = oracle.rank_plan(ids, num_ranks, experts, rows, capacity)
    records = np.zeros((num_ranks, region_bytes(rows, topk)), np.uint8)
    made = [np.full_like(each, 7) for each in expected]
    params = rank_plan_params(ids, probs, records, tuple(made), experts_per_rank=experts, capacity=capacity)
    params.row_to_token = None
    core.run("rank_plan", params)
    for got, due in zip((made[0], *made[2:]), (expected[0], *expected[2:]), strict=True):
        assert_same_bits(got, due)
    assert (made[1] == 7).all()


class _BarrierParams(Params):
    """pmo_rank_barrier_params"""

    _fields_ = fields(
        (Size, "struct_size num_ranks region_bytes timeout_ms"), (Bytes, "arrived peers"), (Int32s, "state")
    )


def barrier(core: Core, turns_of_others: list[int], turn: int, timeout_ms: int) -> tuple[NDArray, NDArray]:
    """What the first of some ranks tells the others, and its state."""
    arrived = np.zeros((1 + len(turns_of_others), 16), np.int32)
    arrived[1:, 0] = turns_of_others
    arrived[0, 0] = np.int64(turn + 1).astype(np.int32)  # its own message
    peers, state = np.zeros_like(arrived), np.array([turn], np.int32)
    params = _BarrierParams(
        num_ranks=len(arrived), region_bytes=64, timeout_ms=timeout_ms, arrived=arrived, peers=peers, state=state
    )
    core.run("rank_barrier", params)
    return peers, state


@pytest.mark.parametrize("turn", [0, 7, 2**31 - 1])
def test_a_barrier_lets_pass_who_is_not_ahead(core: Core, turn: int) -> None:
    coming = int(np.int64(turn + 1).astype(np.int32))
    for others in ([coming], [coming, int(np.int64(turn + 2).astype(np.int32)), coming]):
        peers, state = barrier(core, others, turn, 60_000)
        assert state.tolist() == [coming]
        assert (peers[:, 0] == coming).all()
        assert not peers[:, 1:].any()


@pytest.mark.cpu_only  # on a GPU it ends the context
def test_a_barrier_names_the_rank_that_does_not_come(core: Core) -> None:
    with pytest.raises(CoreError, match="rank 2 of the group did not answer"):
        barrier(core, [4, 3], 3, 20)
