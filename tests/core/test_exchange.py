# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Rows between ranks: each step equals the oracle, and all of them together what one process computes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference import ranks as oracle
from paddle_moe_ops.reference.permutation import sum_rows

from ..pairwise import pairwise
from ..params import SUM_DTYPES
from ..reference.cases import assert_same_bits, assert_same_numbers, floats_of_every_kind, ordinary_floats
from .binding import Core
from .guards import at_odd_address, is_poison, with_row_gaps
from .operators.exchange import PERIOD, rank_receive, rank_send, receive_params, send_params

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in isnan")


class Case(NamedTuple):
    ranks: int
    rows: int  # of a region
    tokens: int
    experts: int  # of a rank
    topk: int
    hidden: int


CASES = [
    Case(1, 4, 3, 2, 2, 5),
    Case(2, 64, 63, 4, 3, 72),
    Case(2, 16, 20, 2, 8, 7168),
    Case(3, 33, 50, 2, 4, 1),
    Case(4, 130, 129, 3, 8, 200),
    Case(40, 9, 33, 1, 36, 9),
]
FETCHED = (0, 3, 5, PERIOD)


def plans(case: Case) -> list[oracle.RankPlan]:
    """The plan of each rank: some tokens have no expert, and some exceed the capacity."""
    rng = np.random.default_rng(case)
    ids = rng.integers(-1, case.ranks * case.experts, (case.ranks, case.tokens, case.topk)).astype(np.int32)
    ids[:, ::7] = -1
    return [oracle.rank_plan(each, case.ranks, case.experts, case.rows, case.rows - 1) for each in ids]


class Memory:
    """The regions of all ranks after all have sent.

    Args:
        sent: arrived and peers [P * S, H] of each rank.
        fetched: of every 8 rows.
    """

    def __init__(self, sent: list[tuple[NDArray, ...]], fetched: int) -> None:
        ranks = len(sent)
        arrived, peers = (np.stack([each[i].reshape(ranks, -1, each[i].shape[1]) for each in sent]) for i in range(2))
        stays = oracle.is_fetched(np.arange(arrived.shape[2]), fetched)[:, None]
        self._regions = np.where(stays, arrived, peers.swapaxes(0, 1))  # [at rank, of rank, row, column]

    def arrived(self, rank: int) -> NDArray:
        return self._regions[rank].reshape(-1, self._regions.shape[-1])

    def peers(self, rank: int) -> NDArray:
        return np.ascontiguousarray(self._regions[:, rank]).reshape(-1, self._regions.shape[-1])


@pairwise({"case": {str(case): case for case in CASES}, "dtype": SUM_DTYPES, "fetched": FETCHED}, others_are_slow=True)
def test_tokens_travel_there_and_their_sums_come_back(core: Core, case: Case, dtype: DTypeLike, fetched: int) -> None:
    of_ranks = plans(case)
    sizes = [{"rank": rank, "fetched": fetched} for rank in range(case.ranks)]
    x = [floats_of_every_kind((case.tokens, case.hidden), dtype, seed=rank) for rank in range(case.ranks)]
    sent = [
        rank_send(
            core, x[r], of_ranks[r].token_rows, case.ranks, case.rows, has_own=True, leaves_room=r % 2, **sizes[r]
        )
        for r in range(case.ranks)
    ]
    memory = Memory([each[:2] for each in sent], fetched)
    for r in range(case.ranks):
        to_here = [each.row_to_token.reshape(case.ranks, case.rows)[r] for each in of_ranks]
        expected = np.concatenate([np.where(to[:, None] >= 0, x[q][to], 0) for q, to in enumerate(to_here)])
        listed = np.where(np.concatenate(to_here) >= 0, np.arange(len(expected)), -1)[:, None].astype(np.int32)
        views = memory.arrived(r), memory.peers(r)
        got = rank_receive(core, listed, *views, sent[r][2], case.ranks, **sizes[r])
        assert_same_bits(got, expected.astype(got.dtype))
        in_place = sent[r][2].copy()  # where this rank's own are already
        core.run("rank_receive", receive_params(listed, *views, None, in_place, case.ranks, **sizes[r]))
        assert_same_bits(in_place, got)

    # what ranks make of them, by rows of windows
    made = [ordinary_floats((case.ranks * case.rows, case.hidden), dtype, seed=100 + r) for r in range(case.ranks)]
    lines = np.arange(case.ranks * case.rows, dtype=np.int32)[:, None]
    back = [
        rank_send(core, made[r], lines, case.ranks, case.rows, has_own=False, **sizes[r]) for r in range(case.ranks)
    ]
    assert all(is_poison(each[2]) for each in back)
    memory = Memory([each[:2] for each in back], fetched)
    for r in range(case.ranks):
        views = memory.arrived(r), memory.peers(r)
        got = rank_receive(core, of_ranks[r].token_rows, *views, made[r], case.ranks, **sizes[r])
        parts = np.stack(made).reshape(case.ranks, case.ranks, case.rows, case.hidden)[:, r]
        assert_same_bits(got, sum_rows(parts.reshape(-1, case.hidden), of_ranks[r].token_rows))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize(
    ("hidden", "columns", "odd"),
    [(7, 1, False), (7, 1, True), (40, 3, False), (264, 0, False), (264, 1, True), (1000, 40, False)],
)
def test_maps_of_any_kind_equal_the_oracle(
    core: Core, hidden: int, columns: int, dtype: DTypeLike, odd: bool, num_threads: int
) -> None:
    num_ranks, rows, tokens = 3, 17, 29
    rng = np.random.default_rng([hidden, columns])
    token_rows = rng.integers(-1, num_ranks * rows, (tokens, columns)).astype(np.int32)
    token_rows[rng.random(token_rows.shape) < 0.1] = num_ranks * rows + 3
    # a row is sent once
    flat, first = np.unique(token_rows, return_index=True)
    to_send = np.full(token_rows.size, -1, np.int32)
    to_send[first] = flat
    to_send = to_send.reshape(token_rows.shape)
    shape = (num_ranks * rows, hidden)
    place = at_odd_address if odd else np.ascontiguousarray
    x = with_row_gaps(ordinary_floats((tokens, hidden), dtype, seed=1), 3)
    views = [place(floats_of_every_kind(shape, dtype, seed=seed)) for seed in (2, 3)]
    own = with_row_gaps(floats_of_every_kind(shape, dtype, seed=4), 5)
    options = {"rank": 1, "fetched": 3}
    wanted = [each.copy() for each in (*views, np.ascontiguousarray(own))]
    oracle.send_rows(x, to_send, *wanted, num_ranks=num_ranks, **options)
    written = [place(each.copy()) for each in (*views, np.ascontiguousarray(own))]
    core.run("rank_send", send_params(x, to_send, *written, num_ranks, num_threads=num_threads, **options))
    for got, due in zip(written, wanted, strict=True):
        assert_same_bits(got, due)
    got = rank_receive(core, token_rows, *views, own, num_ranks, num_threads=num_threads, **options)
    due = oracle.receive_rows(token_rows, *views, own, num_ranks=num_ranks, **options)
    assert_same_numbers(got, due)
    for mark in (0, 1):  # once ranks differed, what arrived means nothing
        marked = {"mark": np.array([mark], np.int32), "num_threads": num_threads}
        got = rank_receive(core, token_rows, *views, own, num_ranks, **marked, **options)
        assert_same_bits(got, oracle.nan_bytes(due) if mark else due) if mark else assert_same_numbers(got, due)
