# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every data error: its exact text, the level of validation that raises it, and which comes first."""

from __future__ import annotations

import re

import numpy as np
import pytest

from paddle_moe_ops.reference import moe_permute, moe_unpermute, route, rowmap_to_token_rows

NAN = float("nan")


def ids(*lines: list[int]) -> np.ndarray:
    return np.array(lines, np.int32)


def floats(*lines: list[float]) -> np.ndarray:
    return np.array(lines, np.float32)


BAD_ROUTING = {
    "id too large": (
        {"routing": ids([0, -1], [1, 3]), "num_experts": 3},
        "route: routing must hold expert ids in [-1, 3), but token 1, slot 1 holds 3",
    ),
    "id too small": (
        {"routing": ids([0, -2], [1, 3]), "num_experts": 3},
        "route: routing must hold expert ids in [-1, 3), but token 0, slot 1 holds -2",
    ),
    "duplicate": (
        {"routing": ids([0, 1, 2, -1, -1], [2, 0, 1, 1, 2]), "num_experts": 3},
        "route: routing must name an expert at most once per token, but token 1 names expert 1 in slots 2 and 3",
    ),
    "third of a kind": (
        {"routing": ids([0, 0, 0]), "num_experts": 3},
        "route: routing must name an expert at most once per token, but token 0 names expert 0 in slots 0 and 1",
    ),
    "NaN": (
        {"routing": ids([-1, 0], [0, 1]), "num_experts": 2, "probs": floats([NAN, 1], [0, NAN])},
        "route: probs must not hold NaN, but token 1, slot 1 does",
    ),
    "NaN in a mask": (
        {"routing": np.array([[False, True], [True, True]]), "probs": floats([NAN, 1], [0, NAN])},
        "route: probs must not hold NaN, but token 1, expert 1 does",
    ),
    "mask": (
        {"routing": np.array([[1, 0, 0], [1, 1, 1]], bool), "topk": 2},
        "route: routing must set at most topk=2 experts per token, but token 1 sets 3",
    ),
}


@pytest.mark.parametrize("validate", [None, True])
@pytest.mark.parametrize("bad", BAD_ROUTING)
def test_bad_routing_raises(bad: str, validate: bool | None) -> None:
    arguments, text = BAD_ROUTING[bad]
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        route(**arguments, validate=validate)


@pytest.mark.parametrize("bad", BAD_ROUTING)
def test_bad_routing_is_tolerated_without_validation(bad: str) -> None:
    arguments, _ = BAD_ROUTING[bad]
    plan = route(**arguments, validate=False)
    assert plan.overflow.tolist() == 0


def test_duplicates_that_get_rows_of_their_own_are_no_error() -> None:
    assert route(ids([0, 0]), num_experts=1, duplicates="each", validate=True).num_rows == 2


@pytest.mark.parametrize("validate", [False, None, True])
@pytest.mark.parametrize("given", [[], [1, 2], [2, 2, 0], [1, 2, 0, 0]])
def test_wrong_counts_always_raise(given: list[int], validate: bool | None) -> None:
    text = f"route: tokens_per_expert must be [1, 2, 0], the rows routed to each expert, but got {given}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        route(ids([0, 1], [1, -1]), num_experts=3, tokens_per_expert=given, validate=validate)


@pytest.mark.parametrize("given", [[1, 3, 0], [1, 4, 0], [4, 3, 0], [4, 4, 0]])
def test_counts_may_include_padding(given: list[int]) -> None:
    plan = route(ids([0, 1], [1, -1], [1, -1]), num_experts=3, padding_alignment=4, tokens_per_expert=given)
    assert plan.expert_offsets.tolist() == [0, 4, 8, 8]


@pytest.mark.parametrize("given", [[1, 2, 0], [1, 8, 0], [3, 3, 0], [1, 3, 4]])
def test_counts_between_the_rows_and_their_padding_are_wrong(given: list[int]) -> None:
    text = "tokens_per_expert must be [1, 3, 0], the rows routed to each expert, with or without the padding to a"
    with pytest.raises(ValueError, match=f"^{re.escape(f'route: {text} multiple of 4, but got {given}')}$"):
        route(ids([0, 1], [1, -1], [1, -1]), num_experts=3, padding_alignment=4, tokens_per_expert=given)


def test_counts_take_a_duplicate_once_or_as_often_as_it_gets_rows() -> None:
    twice = ids([0, 0])
    assert route(twice, num_experts=1, tokens_per_expert=[1], validate=False).num_rows == 1
    assert route(twice, num_experts=1, tokens_per_expert=[2], duplicates="each").num_rows == 2


def test_overflow_raises_only_when_asked_for() -> None:
    arguments = {"routing": ids([0, 1], [1, -1]), "num_experts": 2, "padding_alignment": 2, "buffer_size": 3}
    for validate in (False, None):
        assert route(**arguments, validate=validate).overflow.tolist() == 1
    text = "route: buffer_size must be at least 4, the padded rows of this routing, but got 3"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        route(**arguments, validate=True)


def test_errors_name_the_arguments_of_moe_permute() -> None:
    def call(routemap: np.ndarray, probs: np.ndarray | None = None, counts: list[int] | None = None, size: int = -1):
        x = np.zeros((len(routemap), 2), np.float32)
        probs = np.ones(routemap.shape, np.float32) if probs is None else probs
        moe_permute(x, None, routemap, probs, 2, counts, 1, override_buffer_size=size, validate=True)

    for arguments, text in [
        ((ids([5]),), "expert_routemap_topk must hold expert ids in [-1, 2), but token 0, slot 0 holds 5"),
        (
            (ids([1, 1]),),
            "expert_routemap_topk must name an expert at most once per token, "
            "but token 0 names expert 1 in slots 0 and 1",
        ),
        ((ids([1]), floats([NAN])), "expert_prob_topk must not hold NaN, but token 0, slot 0 does"),
        (
            (ids([1]), None, [1, 0]),
            "tokens_per_expert must be [0, 1], the rows routed to each expert, but got [1, 0]",
        ),
        (
            (ids([1]), None, None, 0),
            "override_buffer_size must be at least 1, the padded rows of this routing, but got 0",
        ),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape('moe_permute: ' + text)}$"):
            call(*arguments)


def test_first_of_several_errors_wins() -> None:
    routing = ids([0, 0, 7])
    bad = {"num_experts": 2, "probs": floats([NAN, 0, 0]), "tokens_per_expert": [9, 9]}
    for repaired, text in [
        (ids([0, 0, 7]), "must hold expert ids"),
        (ids([0, 0, -1]), "must name an expert at most once"),
        (ids([0, 1, -1]), "must not hold NaN"),
    ]:
        with pytest.raises(ValueError, match=text):
            route(repaired, **bad)
    with pytest.raises(ValueError, match="must be \\[1, 0\\]"):
        route(routing, **bad, validate=False)


BAD_ROWMAPS = {
    "row too large": (
        [[0, -1, 1], [3, -1, -2]],
        "zipped_expertwise_rowmap must hold rows in [-1, 3), but token 1, expert 0 holds 3",
    ),
    "row too small": (
        [[0, -1, 1], [2, -1, -2]],
        "zipped_expertwise_rowmap must hold rows in [-1, 3), but token 1, expert 2 holds -2",
    ),
    "row named again": (
        [[0, -1, 1], [2, 1, 2], [0, 0, 0]],
        "zipped_expertwise_rowmap must name a row at most once, "
        "but row 1 is at token 0, expert 2 and at token 1, expert 1",
    ),
    "both": (
        [[0, 0, 1], [3, -1, -2]],
        "zipped_expertwise_rowmap must hold rows in [-1, 3), but token 1, expert 0 holds 3",
    ),
}


@pytest.mark.parametrize("validate", [None, True])
@pytest.mark.parametrize("bad", BAD_ROWMAPS)
def test_bad_rowmap_raises(bad: str, validate: bool | None) -> None:
    lines, text = BAD_ROWMAPS[bad]
    rowmap, routemap = ids(*lines), np.full((len(lines), 1), -1, np.int32)
    y, probs = np.ones((3, 2), np.float32), np.ones(3, np.float32)
    with pytest.raises(ValueError, match=f"^{re.escape('moe_unpermute: ' + text)}$"):
        moe_unpermute(y, rowmap, routemap, probs, len(lines), 3, validate=validate)
    with pytest.raises(ValueError, match=f"^{re.escape('other: ' + text)}$"):
        rowmap_to_token_rows(rowmap, 3, validate=validate, function="other")


def test_ids_of_moe_unpermute_out_of_range_raise() -> None:
    arguments = (np.ones((1, 2), np.float32), ids([0, -1]), ids([0, 2]), np.ones(1, np.float32), 1, 2)
    text = "moe_unpermute: expert_routemap_topk must hold expert ids in [-1, 2), but token 0, slot 1 holds 2"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        moe_unpermute(*arguments)
    assert moe_unpermute(*arguments, validate=False)[1].tolist() == [[1, 0]]


def test_moe_unpermute_takes_repeated_ids_and_nan() -> None:
    y, probs = np.ones((1, 2), np.float32), floats(NAN)
    _, prob_topk = moe_unpermute(y, ids([0]), ids([0, 0]), probs, 1, 1, validate=True)
    np.testing.assert_array_equal(prob_topk, floats([NAN, 0]))


def test_bad_rowmap_entries_count_as_none_without_validation() -> None:
    rowmap = ids([-1, 2, 0], [9, 1, 2], [-5, -1, 0])
    assert rowmap_to_token_rows(rowmap, 3, validate=False).tolist() == [[2, 0, -1], [1, -1, -1], [-1, -1, -1]]


def test_a_buffer_of_2_to_the_31_rows_is_refused() -> None:
    text = "route: padding_alignment must give a buffer of fewer than 2^31 rows, but 1073741824 gives 2147483648"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        route(np.array([[0, 1]], np.int32), num_experts=2, padding_alignment=2**30)
