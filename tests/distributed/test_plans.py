# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Plans over ranks, in one process."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import use_backend
from paddle_moe_ops.expert_parallel import ExpertParallel
from paddle_moe_ops.expert_parallel.alltoall import chunks_of, equal_parts, local_ids_of, plan_of_ranks, trimmed

RANKS, EXPERTS_OF_RANK, TOPK = 3, 2, 4


def drawn_ids(tokens: int) -> NDArray:
    """Ids of experts, about every third one -1, and one of the first and of the last token."""
    rng = np.random.default_rng(tokens)
    ids = np.array([rng.permutation(RANKS * EXPERTS_OF_RANK)[:TOPK] for _ in range(tokens)], np.int32)
    ids = ids.reshape([tokens, TOPK])
    ids[rng.random(ids.shape) < 1 / 3] = -1
    ids[:1, 0] = ids[-1:, 0] = -1
    return ids


def ids_on(rank: int, ids: NDArray) -> NDArray:
    """Ids of one token or of several, counted from the first expert of a rank; -1 on another rank."""
    return np.where(ids // EXPERTS_OF_RANK == rank, ids - rank * EXPERTS_OF_RANK, -1)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize(("tokens", "room"), [(13, 3), (13, 17), (0, 5)])
def test_equal_parts_have_the_first_tokens_for_each_rank(tokens, room, backend):
    ids = drawn_ids(tokens)
    with use_backend(backend):
        given = paddle.to_tensor(ids), paddle.ones(ids.shape)
        parts = equal_parts(*given, RANKS, EXPERTS_OF_RANK, room, like=given[0])
    lines, dropped = [], 0
    for rank in range(RANKS):
        chosen = np.flatnonzero((ids_on(rank, ids) >= 0).any(1))
        lines += [*chosen[:room], *[-1] * (room - len(chosen[:room]))]
        dropped += (ids_on(rank, ids[chosen[room:]]) >= 0).sum()
    assert (dropped > 0) == (room == 3)
    assert parts.to_ranks.num_rows == RANKS * room
    assert parts.to_ranks.row_to_token.tolist() == lines
    assert parts.dropped.item() == dropped
    expected = [ids_on(row // room, ids[token]) if token >= 0 else np.full(TOPK, -1) for row, token in enumerate(lines)]
    got = parts.ids.numpy()
    np.testing.assert_array_equal(np.where((got >= 0) & (got < EXPERTS_OF_RANK), got, -1), expected)
    for token, rows in enumerate(parts.to_ranks.token_rows.tolist()):
        assert [row for row in rows if row >= 0] == [row for row, each in enumerate(lines) if each == token]


def test_a_trimmed_plan_has_the_tokens_for_each_rank_without_gaps():
    ids = drawn_ids(11)
    whole = plan_of_ranks(paddle.to_tensor(ids), RANKS, EXPERTS_OF_RANK, None)
    expected = [ids_on(rank, each) for rank in range(RANKS) for each in ids if (ids_on(rank, each) >= 0).any()]
    assert whole.num_rows > len(expected)
    plan = trimmed(whole, len(expected))
    assert plan.num_rows == len(expected)
    assert plan.row_to_token.shape == plan.row_to_slot.shape == plan.row_to_expert.shape == [len(expected)]
    got = local_ids_of(paddle.to_tensor(ids), plan, EXPERTS_OF_RANK, has_gaps=False)
    np.testing.assert_array_equal(got.numpy(), expected)
    assert local_ids_of(paddle.to_tensor(ids), trimmed(whole, 0), EXPERTS_OF_RANK, has_gaps=False).shape == [0, TOPK]


@pytest.mark.parametrize(("experts", "rows_of_token"), [(2, 2), (7, TOPK)])
def test_equal_parts_have_room_for_the_experts_that_a_token_can_have_here(experts, rows_of_token):
    layer = ExpertParallel(experts, combine="reduced", tokens_per_rank=5)
    received = layer.dispatch(paddle.ones([3, 8]), paddle.full([3, TOPK], -1, "int32"), paddle.ones([3, TOPK]))
    assert received.tokens.shape == [5, 8]
    assert received.plan.num_rows == 5 * rows_of_token


def test_chunks_of_rows_are_on_their_device(monkeypatch):
    seen, like, made = [], paddle.zeros([1]), paddle.to_tensor
    monkeypatch.setattr(paddle, "to_tensor", lambda *given, **how: seen.append(how["place"]) or made(*given, **how))
    sizes, order = chunks_of(np.array([[1, 2], [3, 4]]), like)
    assert (sizes.tolist(), order.tolist()) == ([1, 3, 2, 4], [0, 2, 1, 3])
    assert seen == [like.place] * 2
