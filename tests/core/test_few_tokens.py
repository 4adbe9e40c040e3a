# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Few tokens between ranks: each rank's exchange, after the others have sent, equals the steps of the oracle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference import ranks as oracle
from paddle_moe_ops.reference.permutation import sum_rows

from ..params import SUM_DTYPES
from ..reference.cases import assert_same_bits, ordinary_floats
from .binding import Core
from .guards import is_poison
from .operators.few_tokens import barrier_fields, rank_combine, rank_dispatch
from .operators.ranks import HEADER, region_bytes
from .test_ranks import call_of, regions_of


class Case(NamedTuple):
    """Tokens of each rank, K slots, experts of a rank, S rows of a region, L lines, columns."""

    tokens: tuple[int, ...]
    topk: int
    experts: int
    rows: int
    lines: int
    hidden: int


CASES = [
    Case((0, 3), 2, 3, 4, 4, 8),
    Case((1, 1), 1, 1, 1, 1, 1),
    Case((3, 0, 5), 3, 2, 8, 5, 40),
    Case((5, 9, 2), 4, 2, 64, 5, 264),  # more tokens than lines, and fewer
    Case((40, 63), 8, 32, 256, 64, 1024),
    Case((7, 7, 7, 7), 32, 3, 7, 7, 20),
    Case((256, 250), 6, 7, 300, 256, 136),
    Case((2, 2), 0, 2, 4, 4, 16),
    Case((2, 2), 2, 2, 4, 0, 16),
    Case((2,) * 32, 3, 128, 3, 2, 16),
]


class Rank(NamedTuple):
    """The tokens of a rank, and the plan by which it sends them."""

    x: NDArray
    ids: NDArray
    probs: NDArray
    plan: oracle.RankPlan


def ranks_of(case: Case, dtype: DTypeLike, ids_dtype: DTypeLike = np.int32) -> list[Rank]:
    ranks, made = len(case.tokens), []
    for rank, tokens in enumerate(case.tokens):
        rng = np.random.default_rng([tokens, case.topk, rank])
        ids = rng.integers(-1, ranks * case.experts + 1, (tokens, case.topk)).astype(ids_dtype)
        if tokens > 1:
            ids[1] = -1  # a token that goes nowhere
        x = ordinary_floats((tokens, case.hidden), dtype, seed=rank)
        plan = oracle.rank_plan(ids, ranks, case.experts, case.rows, case.lines)
        made.append(Rank(x, ids, rng.random(ids.shape, np.float32), plan))
    return made


def sent_to(rank: int, case: Case, of_ranks: list[Rank], dtype: DTypeLike) -> tuple[NDArray, NDArray]:
    """The rows and records that all ranks but this one have sent to it."""
    ranks = len(of_ranks)
    rows = ordinary_floats((ranks, case.rows, case.hidden), dtype, seed=99)  # of earlier exchanges
    records = np.full((ranks, region_bytes(case.rows, case.topk)), 0xA5, np.uint8)
    for number, each in enumerate(of_ranks):
        if number == rank:
            continue
        tokens = each.plan.row_to_token.reshape(ranks, case.rows)[rank]
        tokens = tokens[tokens >= 0]
        rows[number, : len(tokens)] = each.x[tokens]
        records[number, :4] = np.array([len(tokens)], np.int32).view(np.uint8)
        for values, first in ((each.ids.astype(np.int32), 0), (each.probs, 1)):
            begin = HEADER + first * 4 * case.rows * case.topk
            found = np.ascontiguousarray(values[tokens]).reshape(-1).view(np.uint8)
            records[number, begin : begin + found.size] = found
    return rows.reshape(-1, case.hidden), records


def due_lines(rank: int, case: Case, of_ranks: list[Rank], token_rows: NDArray) -> tuple[NDArray, ...]:
    """The lines that a rank receives, where its own tokens are in the rows of ``token_rows``."""
    ranks, dtype = len(of_ranks), of_ranks[0].x.dtype
    tokens = np.zeros((ranks, case.lines, case.hidden), dtype)
    ids = np.full((ranks, case.lines, case.topk), -1, np.int32)
    probs, rows = np.zeros(ids.shape, np.float32), np.full((ranks, case.lines, 1), -1, np.int32)
    for number, each in enumerate(of_ranks):
        for token, listed in enumerate(token_rows if number == rank else each.plan.token_rows):
            for row in listed:
                if row // case.rows != rank or row < 0:
                    continue
                place = row % case.rows
                local = each.ids[token].astype(np.int64) - rank * case.experts
                here = (local >= 0) & (local < case.experts)
                tokens[number, place], rows[number, place] = each.x[token], number * case.rows + place
                ids[number, place] = np.where(here, local, -1)
                probs[number, place] = np.where(here, each.probs[token], 0)
    return tuple(each.reshape(ranks * case.lines, each.shape[-1]) for each in (tokens, ids, probs, rows))


def rows_in_place(case: Case, rank: Rank, ranks: int) -> NDArray:
    """Rows of a rank's tokens where token t is in row t of each region."""
    made = np.full_like(rank.plan.token_rows, -1)
    for token, ids in enumerate(rank.ids.astype(np.int64)):
        there = np.unique(ids[(ids >= 0) & (ids < ranks * case.experts)] // case.experts)
        made[token, : len(there)] = there * case.rows + token
    return made


def calls_of(ranks: int) -> NDArray:
    return np.stack([call_of(rank) for rank in range(ranks)])


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_sent_and_received_in_one_step(core: Core, case: Case, dtype: DTypeLike) -> None:
    ranks, of_ranks = len(case.tokens), ranks_of(case, dtype)
    for rank in {0, ranks - 1}:
        own = of_ranks[rank]
        arrived, records = sent_to(rank, case, of_ranks, dtype)
        barrier = barrier_fields(calls_of(ranks), rank, 6)
        sizes = {"rank": rank, "experts_per_rank": case.experts, "capacity": case.lines}
        got = rank_dispatch(core, own.x, own.ids, own.probs, arrived, records, barrier, **sizes)
        in_place = core.device == "cuda" and len(own.x) <= case.lines
        token_rows = rows_in_place(case, own, ranks) if in_place else own.plan.token_rows
        assert_same_bits(got["token_rows"], token_rows)
        assert_same_bits(got["dropped"], own.plan.dropped)
        assert_same_bits(got["routed"], own.plan.routed)
        due = due_lines(rank, case, of_ranks, token_rows)
        for name, expected in zip(("tokens", "ids", "probs", "rows"), due, strict=True):
            assert_same_bits(got[name], expected)
        counts, sent_ids, sent_probs = regions_of(got["records"], case.rows, case.topk)
        for token, listed in enumerate(token_rows):
            for row in listed[listed >= 0]:
                there, place = divmod(row, case.rows)
                assert place < counts[there]
                assert_same_bits(sent_ids[there, place], own.ids[token])
                assert_same_bits(sent_probs[there, place], own.probs[token])
                if there != rank:
                    assert_same_bits(got["peers"][row], own.x[token])
        unsent = np.setdiff1d(np.arange(ranks * case.rows), token_rows)
        assert is_poison(got["peers"][unsent])
        assert barrier["barrier_state"].tolist() == [7, 0]
        assert_same_bits(barrier["barrier_calls"], calls_of(ranks))
        assert_same_bits(barrier["barrier_peers"][:, 0], np.full(ranks, 7, np.int32))


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_come_back_in_one_step(core: Core, case: Case, dtype: DTypeLike) -> None:
    ranks, of_ranks = len(case.tokens), ranks_of(case, dtype)
    parts = ordinary_floats((ranks, ranks * case.lines, case.hidden), dtype, seed=7)  # of each rank
    for rank in {0, ranks - 1}:
        own = of_ranks[rank]
        rows = due_lines(rank, case, of_ranks, own.plan.token_rows)[3]
        arrived = ordinary_floats((ranks, case.rows, case.hidden), dtype, seed=98)
        arrived[:, : case.lines] = parts.reshape(ranks, ranks, case.lines, case.hidden)[:, rank]
        expected = sum_rows(arrived.reshape(-1, case.hidden), own.plan.token_rows)
        arrived[rank] = ordinary_floats((case.rows, case.hidden), dtype, seed=97)  # own lines are not read there
        barrier = barrier_fields(calls_of(ranks), rank, 5)
        flat = arrived.reshape(-1, case.hidden)
        peers, out = rank_combine(core, parts[rank], rows, own.plan.token_rows, flat, barrier, rank)
        assert_same_bits(out, expected)
        sent = np.array([row for row in rows[:, 0] if row >= 0 and row // case.rows != rank], np.int64)
        places = sent // case.rows * case.lines + sent % case.rows
        assert_same_bits(peers[sent], parts[rank][places])
        assert is_poison(np.delete(peers, sent, axis=0))
        assert barrier["barrier_state"].tolist() == [6, 0]


@pytest.mark.parametrize("marked", [False, True], ids=["another call", "marked before"])
def test_results_are_nan_if_ranks_are_in_different_calls(core: Core, marked: bool) -> None:
    case, dtype = CASES[4], np.dtype(np.float32)
    of_ranks, calls = ranks_of(case, dtype), calls_of(2)
    if not marked:
        calls[1, 3] += 1
    own, (arrived, records) = of_ranks[0], sent_to(0, case, of_ranks, dtype)
    sizes = {"rank": 0, "experts_per_rank": case.experts, "capacity": case.lines}
    barrier = barrier_fields(calls, 0, 6, int(marked))
    got = rank_dispatch(core, own.x, own.ids, own.probs, arrived, records, barrier, **sizes)
    assert np.isnan(got["tokens"]).all()
    assert np.isnan(got["probs"]).all()
    assert barrier["barrier_state"].tolist() == [7, 1]
    assert_same_bits(barrier["barrier_calls"], calls)
    assert barrier["barrier_report"][0] == (0 if marked else oracle.CALLS_DIFFER)
    barrier = barrier_fields(calls, 0, 6, int(marked))
    _, out = rank_combine(core, got["tokens"] * 0, got["rows"], got["token_rows"], arrived, barrier, 0)
    assert np.isnan(out).all()
    assert barrier["barrier_state"].tolist() == [7, 1]


def test_ids_of_64_bits_and_rows_at_odd_addresses_are_the_same(core: Core) -> None:
    case, dtype = Case((5, 3), 2, 3, 8, 6, 37), np.dtype(np.float16)
    made = []
    for ids_dtype in (np.int32, np.int64):
        of_ranks = ranks_of(case, dtype, ids_dtype)
        own, (arrived, records) = of_ranks[1], sent_to(1, case, of_ranks, dtype)
        sizes = {"rank": 1, "experts_per_rank": case.experts, "capacity": case.lines}
        made.append(
            rank_dispatch(core, own.x, own.ids, own.probs, arrived, records, barrier_fields(calls_of(2), 1, 1), **sizes)
        )
    for name, value in made[0].items():
        if name not in ("peers", "records"):
            assert_same_bits(made[1][name], value)
