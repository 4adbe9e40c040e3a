# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""clean_rowmap: the usable entries of a user's [T, E] rowmap, and the errors for the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..pairwise import pairwise
from ..params import Shape
from ..reference.cases import assert_same_bits
from .binding import Core, CoreError
from .cases import (
    EXAMPLES,
    INT32,
    ROUTINGS,
    SHAPES,
    SMALL,
    make_ids,
    make_plan,
    make_problem,
    text_of_core,
    text_of_oracle,
)
from .guards import guarded_outputs
from .operators.clean_rowmap import (
    RowmapFindings,
    clean_rowmap,
    clean_rowmap_params,
    clean_rowmap_report,
    slot_values_of_rowmap,
)
from .structs import NOWHERE, Check, Status


def spoil(rowmap: NDArray, num_rows: int, seed: int, share: float) -> NDArray:
    """Puts rows out of range and rows of other places into a rowmap."""
    rng = np.random.default_rng(seed)
    bad = rng.choice([-2, -7, num_rows, num_rows + 5, INT32.min, INT32.max], rowmap.shape)
    repeated = rng.integers(0, max(num_rows, 1), rowmap.shape)
    spoiled = np.where(rng.random(rowmap.shape) < 0.5, bad, repeated)
    return np.where(rng.random(rowmap.shape) < share, spoiled, rowmap).astype(np.int32)


def rows_that_slots_read(rowmap: NDArray, ids: NDArray, num_rows: int, duplicates: str) -> NDArray:
    """slot_to_row, from the oracle's probabilities: row r has the probability r + 1."""
    _, probs = reference.moe_unpermute(
        np.zeros((num_rows, 1), np.float32),
        rowmap,
        ids,
        np.arange(1, num_rows + 1, dtype=np.float32),
        len(rowmap),
        rowmap.shape[1],
        compat="paddle" if duplicates == "each" else None,
        validate=False,
    )
    return probs.astype(np.int32) - 1


def check(core: Core, rowmap: NDArray, num_rows: int, ids: NDArray, duplicates: str, num_threads: int = 0) -> None:
    token_rows, row_to_token, slot_to_row = clean_rowmap(
        core, rowmap, num_rows, ids, duplicates=duplicates, num_threads=num_threads
    )
    expected = reference.rowmap_to_token_rows(rowmap, num_rows, validate=False)
    defined = np.cumsum(expected < 0, axis=1) <= 1  # one -1 ends a token; the rest is undefined
    np.testing.assert_array_equal(token_rows[defined], expected[defined])
    owners = np.full(num_rows, -1, np.int32)
    tokens, columns = np.nonzero(expected >= 0)
    owners[expected[tokens, columns]] = tokens
    assert_same_bits(row_to_token, owners)
    assert slot_to_row is not None
    rows = rows_that_slots_read(rowmap, ids, num_rows, duplicates)
    assert_same_bits(slot_to_row, rows)
    row_values = np.random.default_rng(5).standard_normal(num_rows).astype(np.float32)
    values = slot_values_of_rowmap(core, rowmap, row_values, ids, duplicates=duplicates, num_threads=num_threads)
    assert_same_bits(values, np.append(row_values, np.float32(0))[rows])


@pairwise(
    {
        "shape": SHAPES,
        "kind": [*ROUTINGS],
        "dtype": {"int32": np.int32, "int64": np.int64},
        "duplicates": ["first", "each"],
    },
    others_are_slow=True,
)
def test_clean_maps_equal_the_oracle(core: Core, shape: Shape, kind: str, dtype: DTypeLike, duplicates: str) -> None:
    ids = make_ids(kind, shape, seed=1, dtype=dtype)
    plan = make_problem(ids, shape.E, shape.A).plan
    check(core, reference.plan_to_rowmap(plan), plan.num_rows, ids, duplicates)


@EXAMPLES
@given(
    shape=st.builds(
        Shape,
        T=st.integers(0, 30),
        H=st.just(0),
        E=st.sampled_from([1, 2, 7, 64, 256]),
        K=st.sampled_from([1, 2, 8, 64]),
        A=st.sampled_from([1, 16]),
        reason=st.just("drawn"),
    ),
    kind=st.sampled_from(sorted(ROUTINGS)),
    share=st.sampled_from([0.02, 0.3, 1.0]),
    seed=st.integers(0, 1 << 30),
    duplicates=st.sampled_from(["first", "each"]),
    num_threads=st.sampled_from([1, 2]),
)
def test_bad_and_repeated_entries_count_as_none(
    core: Core, shape: Shape, kind: str, share: float, seed: int, duplicates: str, num_threads: int
) -> None:
    ids = make_ids(kind, shape, seed)
    plan = make_problem(ids, shape.E, shape.A).plan
    rowmap = spoil(reference.plan_to_rowmap(plan), plan.num_rows, seed, share)
    check(core, rowmap, plan.num_rows, ids, duplicates, num_threads)


def test_ids_are_not_needed_without_slots(core: Core) -> None:
    rowmap = np.array([[3, -1, 0], [-1, -1, 1]], np.int32)
    token_rows, row_to_token, slot_to_row = clean_rowmap(core, rowmap, 4)
    assert slot_to_row is None
    assert [token_rows[0].tolist(), token_rows[1, :2].tolist()] == [[3, 0, -1], [1, -1]]
    assert row_to_token.tolist() == [0, 1, -1, 0]


def test_a_row_named_twice_by_a_token_belongs_to_its_lowest_expert(core: Core) -> None:
    rowmap = np.array([[1, 1, 0]], np.int32)
    ids = np.array([[1, 0, 2]], np.int32)
    token_rows, _, slot_to_row = clean_rowmap(core, rowmap, 2, ids)
    assert token_rows.tolist() == [[1, 0, -1]]
    assert slot_to_row is not None
    assert slot_to_row.tolist() == [[-1, 1, 0]]


@pytest.mark.parametrize(("duplicates", "expected"), [("first", [[0, -1, 1]]), ("each", [[0, 0, 1]])])
def test_repeated_ids_share_or_lose_the_row(core: Core, duplicates: str, expected: list[list[int]]) -> None:
    rowmap = np.array([[0, 1]], np.int32)
    ids = np.array([[0, 0, 1]], np.int32)
    _, _, slot_to_row = clean_rowmap(core, rowmap, 2, ids, duplicates=duplicates)
    assert slot_to_row is not None
    assert slot_to_row.tolist() == expected


def rowmap_error(core: Core, rowmap: NDArray, num_rows: int, ids: NDArray | None = None, checks: int = 3) -> CoreError:
    with guarded_outputs() as output:
        params = clean_rowmap_params(
            rowmap,
            ids,
            num_rows=num_rows,
            checks=checks,
            token_rows=output(rowmap.shape, np.int32),
            row_to_token=output(num_rows, np.int32),
            slot_to_row=None if ids is None else output(ids.shape, np.int32),
        )
        with pytest.raises(CoreError) as caught:
            core.run("clean_rowmap", params)
    assert caught.value.status == Status.INVALID_DATA
    return caught.value


@pytest.mark.parametrize(
    ("rowmap", "text"),
    [
        pytest.param(
            [[0, 5, -1], [-2, 1, 2]],
            "zipped_expertwise_rowmap must hold rows in [-1, 5), but token 0, expert 1 holds 5",
            id="too_large",
        ),
        pytest.param(
            [[0, 1, -1], [-1, INT32.min, 2]],
            "zipped_expertwise_rowmap must hold rows in [-1, 5), but token 1, expert 1 holds -2147483648",
            id="smallest",
        ),
        pytest.param(
            [[0, 1, -1], [3, 1, 0]],
            "zipped_expertwise_rowmap must name a row at most once, but row 1 is at token 0, expert 1 "
            "and at token 1, expert 1",
            id="repeated",
        ),
        pytest.param(
            [[0, 4, 4], [-1, 4, 0]],
            "zipped_expertwise_rowmap must name a row at most once, but row 4 is at token 0, expert 1 "
            "and at token 0, expert 2",
            id="repeated_in_a_token",
        ),
        pytest.param(
            [[0, 0, -1], [-1, 7, 2]],
            "zipped_expertwise_rowmap must hold rows in [-1, 5), but token 1, expert 1 holds 7",
            id="range_before_repeats",
        ),
    ],
)
def test_bad_rowmap_by_hand(core: Core, rowmap: list[list[int]], text: str) -> None:
    assert rowmap_error(core, np.array(rowmap, np.int32), 5).text == text


def test_bad_ids_come_before_a_bad_rowmap(core: Core) -> None:
    ids = np.array([[0, 1], [3, -5]], np.int64)
    assert rowmap_error(core, np.full((2, 3), 9, np.int32), 5, ids).text == (
        "routing must hold expert ids in [-1, 3), but token 1, slot 0 holds 3"
    )


@pytest.mark.parametrize(("check", "other"), [(Check.RANGE, "at most once"), (Check.DUPLICATES, "must hold rows")])
def test_rowmap_checks_are_separate(core: Core, check: Check, other: str) -> None:
    rowmap = np.array([[0, 0, 9]], np.int32)
    assert other not in rowmap_error(core, rowmap, 5, checks=check).text


@pytest.mark.parametrize("checks", range(4), ids=lambda bits: f"checks{bits}")
@pytest.mark.parametrize("bad_id", [3, 9])
def test_report_of_findings_equals_the_checks_of_the_operator(core: Core, bad_id: int, checks: int) -> None:
    """A backend that only collects findings gets the same errors from pmo_clean_rowmap_report."""
    rowmap = np.array([[0, -1, 4], [9, 4, 2], [1, 0, 3]], np.int32)
    ids = np.array([[0, 1], [2, bad_id], [0, 2]], np.int64)
    params = clean_rowmap_params(
        rowmap,
        ids,
        num_rows=5,
        checks=checks,
        token_rows=np.empty_like(rowmap),
        row_to_token=np.empty(5, np.int32),
        slot_to_row=np.empty((3, 2), np.int32),
    )
    findings = RowmapFindings(
        bad_id_place=3, bad_id=bad_id, bad_row_place=3, bad_row=9, repeat_place=4, repeat_row=4, repeat_first=2
    )
    text = text_of_core(core.run, "clean_rowmap", params)
    assert text_of_core(clean_rowmap_report, core, params, findings) == text
    assert (text is None) == (checks == 0)
    nothing = RowmapFindings(bad_id_place=NOWHERE, bad_row_place=NOWHERE, repeat_place=NOWHERE)
    clean_rowmap_report(core, params, nothing)


@EXAMPLES
@given(seed=st.integers(0, 1 << 30), share=st.sampled_from([0.0, 0.02, 0.3]))
def test_errors_of_any_rowmap_equal_the_oracle(core: Core, seed: int, share: float) -> None:
    plan = make_plan("half_unassigned", SMALL, seed)
    rowmap = spoil(reference.plan_to_rowmap(plan), plan.num_rows, seed, share)
    text = text_of_oracle(reference.rowmap_to_token_rows, rowmap, plan.num_rows)
    if text is None:
        clean_rowmap(core, rowmap, plan.num_rows, checks=Check.ALL)
    else:
        assert rowmap_error(core, rowmap, plan.num_rows).text == text
