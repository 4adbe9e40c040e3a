# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of the routing: which finding is reported, in which words, and that a check that is off finds nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from .binding import Core, CoreError
from .cases import (
    CHUNKED,
    EXAMPLES,
    INT32,
    INT64,
    Problem,
    make_ids,
    make_problem,
    problems,
    text_of_core,
    text_of_oracle,
)
from .guards import guarded_outputs, is_poison
from .operators.route import RouteFindings, RouteParams, padded_rows, route, route_params, route_report
from .structs import NOWHERE, Check, Status

IDS = {"num_experts": 4, "padding_alignment": 2}


def route_error(core: Core, routing: NDArray, probs: NDArray | None = None, **options: Any) -> CoreError:
    """The failure of route_count, or else of route."""
    num_experts = options.get("num_experts", routing.shape[1])
    with guarded_outputs() as output:
        routed = output(num_experts, np.int32)
        params = route_params(
            routing, probs, **{"checks": Check.ALL, "num_rows": 1000, "routed_per_expert": routed, **options}
        )
        core.add_workspace("route", params)
        with pytest.raises(CoreError) as caught:
            count_and_route(core, params)
    assert caught.value.status == Status.INVALID_DATA
    return caught.value


def count_and_route(core: Core, params: RouteParams) -> None:
    core.run("route_count", params)
    core.run("route", params)


@pytest.mark.parametrize(
    ("routing", "dtype", "text"),
    [
        pytest.param(
            [[0, 1], [4, -2]],
            np.int32,
            "routing must hold expert ids in [-1, 4), but token 1, slot 0 holds 4",
            id="too_large",
        ),
        pytest.param(
            [[0, -2], [9, 1]],
            np.int64,
            "routing must hold expert ids in [-1, 4), but token 0, slot 1 holds -2",
            id="negative",
        ),
        pytest.param(
            [[1, 2], [-1, 1 << 32]],
            np.int64,
            "routing must hold expert ids in [-1, 4), but token 1, slot 1 holds 4294967296",
            id="wide",
        ),
        pytest.param(
            [[INT64.min, 2]],
            np.int64,
            "routing must hold expert ids in [-1, 4), but token 0, slot 0 holds -9223372036854775808",
            id="smallest",
        ),
        pytest.param(
            [[3, 3], [1, 4]],
            np.int32,
            "routing must hold expert ids in [-1, 4), but token 1, slot 1 holds 4",
            id="range_before_duplicates",
        ),
        pytest.param(
            [[1, 0, -1], [-1, -1, 2], [3, 2, 3], [0, 0, 0]],
            np.int32,
            "routing must name an expert at most once per token, but token 2 names expert 3 in slots 0 and 2",
            id="duplicate",
        ),
        pytest.param(
            [[0, 1, 2, 1, 0]],
            np.int64,
            "routing must name an expert at most once per token, but token 0 names expert 1 in slots 1 and 3",
            id="first_duplicate_by_its_second_slot",
        ),
    ],
)
def test_bad_ids_by_hand(core: Core, routing: list[list[int]], dtype: DTypeLike, text: str) -> None:
    assert route_error(core, np.array(routing, dtype), **IDS).text == text


def test_mask_with_too_many_experts(core: Core) -> None:
    mask = np.array([[1, 0, 1], [1, 1, 1], [1, 1, 1]], np.bool_)
    assert route_error(core, mask, topk=2).text == (
        "routing must set at most topk=2 experts per token, but token 1 sets 3"
    )


def test_nan_probability_of_a_slot(core: Core) -> None:
    nan = np.nan
    probs = np.array([[nan, 1], [0, nan], [nan, nan]], np.float32)
    ids = np.array([[-1, 0], [1, 2], [0, 1]], np.int32)
    assert route_error(core, ids, probs, **IDS).text == "probs must not hold NaN, but token 1, slot 1 does"


def test_nan_probability_of_a_mask(core: Core) -> None:
    probs = np.array([[np.nan, 1, 1], [1, 1, np.nan]], np.float32)
    mask = np.array([[0, 1, 0], [1, 0, 1]], np.bool_)
    assert route_error(core, mask, probs).text == "probs must not hold NaN, but token 1, expert 2 does"


def test_nan_where_no_expert_is_routed_is_no_error(core: Core) -> None:
    ids = np.array([[-1, 0]], np.int32)
    problem = make_problem(ids, 4, probs=np.array([[np.nan, 1]], np.float32))
    route(core, problem, checks=Check.ALL)


def test_nan_of_a_slot_that_gets_no_row_is_no_error(core: Core) -> None:
    """Behind topk in a mask, and where an expert is named again."""
    mask = np.array([[1, 1, 0]], np.bool_)
    beyond_topk = make_problem(mask, 3, probs=np.array([[1, np.nan, 1]], np.float32), topk=1)
    route(core, beyond_topk, checks=Check.NAN)
    named_again = make_problem(np.array([[2, 2]], np.int32), 3, probs=np.array([[1, np.nan]], np.float32))
    route(core, named_again, checks=Check.NAN)


def test_wrong_counts(core: Core) -> None:
    ids = np.array([[0, 3], [3, -1]], np.int32)
    expected = np.array([1, 0, 0, 1], np.int32)
    assert route_error(core, ids, **IDS, expected_per_expert=expected).text == (
        "tokens_per_expert must be [1, 0, 0, 2], the rows routed to each expert, "
        "with or without the padding to a multiple of 2, but got [1, 0, 0, 1]"
    )
    for wrong in ([3, 0, 0, 2], [1, 2, 0, 2], [1, 0, 0, 4]):
        assert route_error(core, ids, **IDS, expected_per_expert=np.array(wrong, np.int32)).text.endswith(
            f"got {wrong}"
        )


@pytest.mark.parametrize("given", [[1, 0, 0, 2], [2, 0, 0, 2]])
def test_counts_may_include_padding(core: Core, given: list[int]) -> None:
    problem = make_problem(np.array([[0, 3], [3, -1]], np.int32), **IDS)
    plan = route(core, problem, checks=Check.COUNTS, expected_per_expert=np.array(given, np.int32))
    assert plan["routed_per_expert"].tolist() == [1, 0, 0, 2]


def test_right_counts_count_repeated_experts_by_the_rule(core: Core) -> None:
    ids = np.array([[0, 0], [3, -1]], np.int32)
    for duplicates, counts in (("first", [1, 0, 0, 1]), ("each", [2, 0, 0, 1])):
        problem = make_problem(ids, 4, duplicates=duplicates)
        checks = Check.RANGE | Check.NAN | Check.COUNTS
        route(core, problem, checks=checks, expected_per_expert=np.array(counts, np.int32))


def test_buffer_that_is_too_small(core: Core) -> None:
    ids = np.array([[0, 3], [3, 1]], np.int32)
    assert route_error(core, ids, **IDS, num_rows=5).text == (
        "buffer_size must be at least 6, the padded rows of this routing, but got 5"
    )


def test_buffer_that_lacks_only_padding_is_no_error(core: Core) -> None:
    ids = np.array([[0, 1], [1, -1], [1, -1]], np.int32)
    problem = make_problem(ids, 4, 4, num_rows=7)  # rows 0, 4, 5 and 6 of 8
    assert route(core, problem, checks=Check.ALL)["overflow"] == 0


@EXAMPLES
@given(problem=problems(), wrong_counts=st.booleans())
def test_errors_of_any_routing_equal_the_oracle(core: Core, problem: Problem, wrong_counts: bool) -> None:
    """The same texts, and which of several findings is reported."""
    counts = problem.plan.routed_per_expert + np.int32(wrong_counts)
    static = problem.plan.num_rows != padded_rows(core, problem.plan.routed_per_expert, problem.plan.padding_alignment)
    checks = Check.ALL & ~Check.COUNTS if static else Check.ALL
    routing = problem.routing.astype(np.bool_) if problem.is_mask else problem.routing
    text = text_of_oracle(
        reference.route,
        routing,
        problem.probs,
        tokens_per_expert=counts,
        buffer_size=problem.plan.num_rows if static else -1,
        validate=True,
        **problem.options,
    )
    options: dict[str, Any] = {"checks": checks, "expected_per_expert": counts}
    if text is None:
        route(core, problem, **options)
    else:
        options |= {"num_rows": problem.plan.num_rows, **problem.options}
        assert route_error(core, problem.routing, problem.probs, **options).text == text


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("first", [0, 300, 1024])
def test_first_finding_of_several_chunks_is_reported(core: Core, first: int, num_threads: int) -> None:
    options: dict[str, Any] = {"num_experts": CHUNKED.E, "num_threads": num_threads}
    ids = make_ids("uniform", CHUNKED, seed=1)
    ids[first:, 3] = CHUNKED.E
    assert route_error(core, ids, **options).text == (
        f"routing must hold expert ids in [-1, 1024), but token {first}, slot 3 holds 1024"
    )
    ids = make_ids("uniform", CHUNKED, seed=2)
    ids[first:, 5] = ids[first:, 0]
    assert route_error(core, ids, **options).text == (
        f"routing must name an expert at most once per token, but token {first} "
        f"names expert {ids[first, 0]} in slots 0 and 5"
    )
    ids = make_ids("uniform", CHUNKED, seed=3)
    probs = np.ones(ids.shape, np.float32)
    probs[first:, 7] = np.nan
    assert route_error(core, ids, probs, **options).text == f"probs must not hold NaN, but token {first}, slot 7 does"
    mask = np.zeros((CHUNKED.T, CHUNKED.E), np.bool_)
    mask[first:] = True
    assert route_error(core, mask, topk=8, num_threads=num_threads).text == (
        f"routing must set at most topk=8 experts per token, but token {first} sets 1024"
    )


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_bad_id_in_the_last_chunk_comes_before_a_duplicate_and_a_nan_in_the_first(
    core: Core, num_threads: int
) -> None:
    options: dict[str, Any] = {"num_experts": CHUNKED.E, "num_threads": num_threads}
    ids = make_ids("uniform", CHUNKED, seed=4)
    probs = np.ones(ids.shape, np.float32)
    probs[0, 0] = np.nan
    ids[500, 1] = ids[500, 0]
    ids[-1, -1] = INT32.min
    assert route_error(core, ids, probs, **options).text.endswith(", but token 1024, slot 63 holds -2147483648")
    ids[-1, -1] = -1
    assert "token 500 names expert" in route_error(core, ids, probs, **options).text
    ids[500, 1] = -1
    assert route_error(core, ids, probs, **options).text.endswith("token 0, slot 0 does")


@pytest.mark.parametrize("check", [Check.RANGE, Check.DUPLICATES, Check.NAN, Check.OVERFLOW, Check.COUNTS])
def test_only_the_checks_asked_for_fail(core: Core, check: Check) -> None:
    """A routing with every flaw: each check alone finds its own, all others together do not."""
    ids = np.array([[7, 0], [1, 1], [2, 3]], np.int32)
    probs = np.array([[0, 0], [0, 0], [np.nan, 0]], np.float32)
    options: dict[str, Any] = {**IDS, "num_rows": 1, "expected_per_expert": np.zeros(4, np.int32)}
    beginnings = {
        Check.RANGE: "routing must hold expert ids",
        Check.DUPLICATES: "routing must name an expert",
        Check.NAN: "probs must not hold NaN",
        Check.OVERFLOW: "buffer_size must be",
        Check.COUNTS: "tokens_per_expert must be",
    }
    assert route_error(core, ids, probs, checks=check, **options).text.startswith(beginnings[check])
    others = route_error(core, ids, probs, checks=Check.ALL & ~check, **options)
    assert not others.text.startswith(beginnings[check])


def test_without_checks_every_flaw_is_tolerated(core: Core) -> None:
    ids = np.array([[7, 0], [1, 1], [2, 3]], np.int32)
    probs = np.array([[0, 0], [0, 0], [np.nan, 0]], np.float32)
    problem = make_problem(ids, 4, 2, probs=probs, num_rows=1)
    maps = route(core, problem, expected_per_expert=np.zeros(4, np.int32))
    assert maps["slot_to_row"].tolist() == [[-1, 0], [-1, -1], [-1, -1]]
    assert maps["overflow"].tolist() == 3


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize(
    "checks", [Check.ALL & ~Check(1 << bit) for bit in range(5)] + [Check.ALL, Check.NONE], ids=str
)
def test_report_of_findings_equals_the_checks_of_the_operators(core: Core, checks: Check, num_rows: int) -> None:
    """A backend that only collects findings gets the same errors from pmo_route_report."""
    ids = np.array([[7, 0], [1, 1], [2, 3]], np.int64)
    probs = np.array([[0, 0], [0, 0], [np.nan, 0]], np.float32)
    routed = np.array([1, 1, 1, 1], np.int32)
    params = route_params(
        ids,
        probs,
        **IDS,
        num_rows=num_rows,
        checks=checks,
        expected_per_expert=np.zeros(4, np.int32),
        routed_per_expert=np.empty(4, np.int32),
    )
    core.add_workspace("route", params)
    findings = RouteFindings(
        bad_place=0, bad_value=7, duplicate_place=3, duplicate_expert=1, duplicate_first=2, nan_place=4
    )
    assert text_of_core(route_report, core, params, findings, routed) == text_of_core(count_and_route, core, params)


def test_report_without_findings_is_fine(core: Core) -> None:
    params = route_params(np.zeros((1, 1), np.int32), num_experts=4, checks=Check.ALL, num_rows=1)
    nothing = RouteFindings(bad_place=NOWHERE, duplicate_place=NOWHERE, nan_place=NOWHERE)
    route_report(core, params, nothing, np.array([1, 0, 0, 0], np.int32))


def test_failed_count_leaves_the_maps_alone(core: Core) -> None:
    with guarded_outputs() as output:
        slot_to_row = output((2, 2), np.int32)
        params = route_params(
            np.array([[0, 9], [1, 2]], np.int32),
            **IDS,
            checks=Check.RANGE,
            num_rows=8,
            routed_per_expert=output(4, np.int32),
            slot_to_row=slot_to_row,
        )
        core.add_workspace("route", params)
        with pytest.raises(CoreError):
            core.run("route_count", params)
    assert is_poison(slot_to_row)
