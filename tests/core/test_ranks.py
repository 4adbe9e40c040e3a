# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Data between ranks that share memory: plans, records, values and the barrier."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.reference import ranks as oracle

from ..reference.cases import assert_same_bits
from .binding import Core, CoreError
from .operators.ranks import (
    HEADER,
    BarrierParams,
    RankSpoilParams,
    rank_get,
    rank_plan,
    rank_plan_params,
    rank_put,
    rank_records,
    rank_rows,
    rank_take,
    region_bytes,
)

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
    # the most ranks
    (40, 3, 1024, 2, 2, 1),
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
    gaps = [len(row_to_slot) // 2, len(row_to_slot)]  # rows of a buffer that no slot has
    row_to_slot = np.insert(row_to_slot, gaps, -1)
    got = rank_rows(core, ids, plan.token_rows, row_to_slot, num_ranks, experts, rows)
    assert_same_bits(got, oracle.rows_in_windows(ids, plan.token_rows, row_to_slot, experts, num_ranks, rows))
    assert (got >= 0).sum() == len(row_to_slot) - len(gaps) - plan.dropped[0]


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


class Meeting(NamedTuple):
    """The outputs of a barrier on the first rank."""

    peers: NDArray  # int32 [P, 32], its regions at all ranks
    state: NDArray
    calls: NDArray
    report: NDArray


def call_of(rank: int = 0) -> NDArray:
    """A call, the last word of which is another one on each rank."""
    return np.array([3, 2, 0, 1234567, 7, 4096, 12, 1 + rank], np.int32)


def barrier(
    core: Core,
    turns_of_others: list[int],
    turn: int,
    timeout_ms: int,
    calls: NDArray | None = None,
    forward_calls: NDArray | None = None,
    reported: int = 0,
) -> Meeting:
    """Run the barrier on the first rank, after the counters and calls of the others arrived."""
    num_ranks = 1 + len(turns_of_others)
    calls = np.stack([call_of(rank) for rank in range(num_ranks)]) if calls is None else calls
    coming, arrived = np.int64(turn + 1).astype(np.int32), np.zeros((num_ranks, 32), np.int32)
    arrived[:, 0] = coming, *turns_of_others
    first = 16 + int(coming) % 2 * oracle.CALL_WORDS
    arrived[:, first : first + oracle.CALL_WORDS] = calls
    report = np.full(1 + calls.size, 7, np.int32)
    report[0] = reported
    made = Meeting(np.zeros_like(arrived), np.array([turn, 0], np.int32), np.zeros_like(calls), report)
    memory = {"peers": made.peers, "state": made.state, "calls": made.calls, "report": made.report}
    params = BarrierParams(
        num_ranks=num_ranks,
        region_bytes=128,
        timeout_ms=timeout_ms,
        arrived=arrived,
        forward_calls=forward_calls,
        gradient=2,
        call=np.ascontiguousarray(calls[0]),
        **memory,
    )
    core.run("rank_barrier", params)
    return made


@pytest.mark.parametrize("turn", [0, 7, 2**31 - 1])
def test_a_barrier_lets_pass_who_is_not_ahead(core: Core, turn: int) -> None:
    coming = int(np.int64(turn + 1).astype(np.int32))
    for others in ([coming], [coming, int(np.int64(turn + 2).astype(np.int32)), coming]):
        made = barrier(core, others, turn, 60_000)
        assert made.state.tolist() == [coming, 0]
        first = 16 + coming % 2 * oracle.CALL_WORDS
        expected = np.zeros(32, np.int32)
        expected[0], expected[first : first + oracle.CALL_WORDS] = coming, call_of()
        for region in made.peers:
            assert_same_bits(region, expected)
        assert_same_bits(made.calls, np.stack([call_of(rank) for rank in range(1 + len(others))]))
        assert made.report[0] == 0
        assert (made.report[1:] == 7).all()


@pytest.mark.parametrize("word", range(oracle.CALL_WORDS))
@pytest.mark.parametrize("rank", [1, 2])
def test_a_barrier_marks_another_call_and_reports_the_first_time(core: Core, rank: int, word: int) -> None:
    calls = np.stack([call_of(each) for each in range(3)])
    calls[rank, word] += 5
    reason = oracle.call_difference(calls[0], calls)
    assert reason == (0 if word == oracle.CALL_WORDS - 1 else oracle.CALLS_DIFFER)
    for reported in (0, oracle.GRADIENT_MODES_DIFFER):
        made = barrier(core, [6, 6], 5, 60_000, calls, reported=reported)
        assert made.state.tolist() == [6, int(reason != 0)]
        assert_same_bits(made.calls, calls)
        assert made.report[0] == (reported or reason)
        expected = np.full_like(calls, 7) if reported or not reason else calls
        assert_same_bits(made.report[1:], expected.reshape(-1))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_backward_pass_that_a_rank_does_not_run_is_not_waited_for(core: Core, rank: int) -> None:
    calls = np.stack([call_of(each) for each in range(3)])
    forward = calls.copy()
    forward[:, -1] = 3
    made = barrier(core, [6, 6], 5, 60_000, calls, forward)
    assert made.state.tolist() == [6, 0]
    forward[rank, -1] = 1
    assert oracle.call_difference(calls[0], calls, forward, 2) == oracle.GRADIENT_MODES_DIFFER
    made = barrier(core, [0, 0], 5, 60_000, calls, forward)  # nobody comes
    assert made.state.tolist() == [5, 1]
    assert not made.peers.any()
    assert_same_bits(made.report, np.array([oracle.GRADIENT_MODES_DIFFER, *forward.reshape(-1)], np.int32))


def test_records_and_values_are_nan_once_ranks_differed(core: Core) -> None:
    tokens, topk, num_ranks, experts, rows, capacity = CASES[2]
    ids, probs = drawn(tokens, topk, num_ranks * experts, np.int32)
    token_rows, *_, records = rank_plan(core, ids, probs, num_ranks, experts, rows, capacity)
    window = np.zeros((num_ranks, 4 * rows * topk), np.uint8)
    for mark in (0, 1):
        marked = np.array([mark], np.int32)
        got_ids, got_probs, own = rank_records(core, records, rows, topk, 0, experts, marked)
        due_ids, due_probs, due_own = rank_records(core, records, rows, topk, 0, experts)
        assert_same_bits(got_ids, due_ids)
        assert_same_bits(own, due_own)
        values = rank_get(core, window, ids, token_rows, rows, experts, marked)
        if mark:
            assert np.isnan(got_probs).all()
            assert np.isnan(values).all()
        else:
            assert_same_bits(got_probs, due_probs)
            assert not values.any()


@pytest.mark.parametrize("code", [7, -3, (1 << 40) + 1])
def test_what_arrived_from_ranks_in_other_calls_is_nan(core: Core, code: int) -> None:
    data = np.random.default_rng(1).random(100003).astype(np.float32)
    for size, rank, other in ((69, 0, code), (69, 68, code), (1024, 1023, code + 1), (69, 0, code ^ 1 << 33)):
        codes, got = np.full(size, code), data.copy()
        codes[rank] = other
        core.run(
            "rank_spoil", RankSpoilParams(num_ranks=size, data_bytes=got.nbytes - 4, code=code, codes=codes, data=got)
        )
        expected = data.copy()
        if other != code:
            expected[:-1] = oracle.nan_bytes(data[:-1])
        assert_same_bits(got, expected)


@pytest.mark.cpu_only  # on a GPU it ends the context
def test_a_barrier_names_the_rank_that_does_not_come(core: Core) -> None:
    with pytest.raises(CoreError, match="rank 2 of the group did not answer"):
        barrier(core, [4, 3], 3, 20)
