# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grids of tests/pairwise.py cover all pairs, or all values, with few cases, the same ones everywhere."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import mark_slow_cases
from tests.pairwise import covering, in_turn, pairwise, pairwise_of, sampled, thinned


def pairs_of(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 2), (2, 2, 2), (4, 3, 3, 4, 5), (3, 4, 4, 2), (2,) * 10], ids=str)
def test_all_pairs_are_covered(sizes):
    cases = covering(sizes)
    assert pairs_of(cases) == pairs_of(itertools.product(*map(range, sizes)))
    assert len(set(cases)) == len(cases)
    assert math.prod(sorted(sizes)[-2:]) <= len(cases) <= 2 * math.prod(sorted(sizes)[-2:]) + len(sizes)


@pytest.mark.parametrize(("sizes", "most"), [((4, 3, 3, 4, 5), 24), ((3, 4, 4, 2), 18), ((2,) * 10, 12)], ids=str)
def test_cases_are_far_fewer_than_the_product(sizes, most):
    assert len(covering(sizes)) <= most < math.prod(sizes) / 4


def test_cases_are_the_same_everywhere():
    assert covering((2, 3, 2)) == [(0, 0, 0), (0, 1, 1), (0, 2, 0), (1, 0, 1), (1, 1, 0), (1, 2, 1)]


def test_one_axis_has_each_of_its_values():
    assert covering((3,)) == [(0,), (1,), (2,)]


def test_empty_cases_cover_only_pairs_of_empty_values():
    empty = {(0, 0), (1, 2)}
    cases = covering((4, 3, 3, 2), empty)
    full = [case for case in cases if not empty.intersection(enumerate(case))]
    assert pairs_of(full) == pairs_of(itertools.product(range(1, 4), range(2), range(3), range(2)))
    assert pairs_of(cases) == pairs_of(itertools.product(range(4), range(3), range(3), range(2)))


def test_a_mark_has_names_values_and_ids():
    axes = {"T": {"none": 0, "some": 7}, "K, E": [(1, 3), (2, 5)], "dtype": [np.dtype("float16"), np.int32]}
    names, cases = pairwise(axes).args
    assert names == ["T", "K", "E", "dtype"]
    assert {each.id: each.values for each in cases} == {
        "none-1-3-float16": (0, 1, 3, np.dtype("float16")),
        "none-2-5-int32": (0, 2, 5, np.int32),
        "some-1-3-int32": (7, 1, 3, np.int32),
        "some-2-5-float16": (7, 2, 5, np.dtype("float16")),
    }


def test_a_mark_knows_empty_values():
    axes = {"T": [0, 7], "K, E": [(1, 3), (2, 5)], "dtype": ["float16", "int32"]}
    values = [each.values for each in pairwise(axes, empty={"T": [0]}).args[1]]
    assert [case for case in values if case[0]] == [(7, *ke, dtype) for ke in axes["K, E"] for dtype in axes["dtype"]]
    assert [case for case in values if not case[0]] == [(0, 1, 3, "float16"), (0, 2, 5, "int32")]


def test_in_turn_each_value_has_a_case_and_other_combinations_are_slow():
    _, cases = in_turn({"T": [0, 5, 7], "dtype": {"half": "float16", "int": "int32"}}).args
    assert [each.values for each in cases if not each.marks] == [(0, "float16"), (5, "int32"), (7, "float16")]
    slow = [(each.id, each.values) for each in cases if each.marks]
    assert slow == [("0-int", (0, "int32")), ("5-half", (5, "float16")), ("7-int", (7, "int32"))]


def test_marks_are_joined_with_their_ids():
    marks = (
        pytest.mark.parametrize("T", [0, 7], ids=["none", "some"]),
        pytest.mark.parametrize(("K", "E"), [(1, 3), (2, 5)], ids=str),
        pytest.mark.parametrize("dtype", [np.dtype("float16"), np.int32]),
    )
    names, cases = pairwise_of(*marks).args
    assert names == ["T", "K", "E", "dtype"]
    assert [each.id for each in cases] == [
        "none-(1, 3)-float16",
        "none-(2, 5)-int32",
        "some-(1, 3)-int32",
        "some-(2, 5)-float16",
    ]
    slow = [each.id for each in pairwise_of(*marks, others_are_slow=True).args[1] if each.marks]
    assert len(slow) == 4
    values = [each.values for each in pairwise_of(*marks, empty={"T": [0]}).args[1]]
    assert [case[1:] for case in values if case[0]] == [
        (*ke, dtype) for ke in ((1, 3), (2, 5)) for dtype in marks[2].args[1]
    ]


def test_cases_of_two_axes_keep_each_value():
    cases = list(itertools.product("abc", range(4)))
    kept = [cases[place] for place in thinned(cases)]
    assert sorted(kept) == [("a", 0), ("a", 3), ("b", 1), ("c", 2)]


def test_cases_of_more_axes_keep_each_pair_that_there_is():
    cases = [case for case in itertools.product(range(4), "ab", (False, True), range(3)) if case[:2] != (0, "a")]
    kept = [cases[place] for place in thinned(cases)]
    assert pairs_of(kept) == pairs_of(cases)
    assert len(kept) < len(cases) / 2


def test_cases_of_one_axis_stay():
    assert thinned([("a",), ("b",), ("c",)]) == {0, 1, 2}


class Item:
    """A collected test with parameters."""

    def __init__(self, marks, **params):
        self.nodeid = f"test_file.py::test_name[{params}]"
        self.marks, self.callspec, self.slow = marks, SimpleNamespace(params=params), False

    def iter_markers(self, name):
        return [mark.mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name):
        return next(iter(self.iter_markers(name)), None)

    def add_marker(self, mark):
        self.slow = self.slow or mark == pytest.mark.slow


def test_a_product_of_marks_is_thinned():
    marks = [pytest.mark.parametrize("a", [0, [1]]), pytest.mark.parametrize(("b", "c"), [(0, 1), (1, 0), (1, 1)])]
    items = [Item(marks, a=a, b=b, c=c) for a in (0, [1]) for b, c in ((0, 1), (1, 0), (1, 1))]
    mark_slow_cases(items)
    kept = [tuple(item.callspec.params.values()) for item in items if not item.slow]
    assert kept == [(0, 0, 1), (0, 1, 1), ([1], 1, 0)]


def test_slow_cases_cover_nothing_and_a_list_of_cases_stays():
    marks = [pytest.mark.parametrize("a", [0, 1]), pytest.mark.parametrize("b", [0, 1])]
    items = [Item([*marks, pytest.mark.slow] if a == b else marks, a=a, b=b) for a in (0, 1) for b in (0, 1)]
    listed = [Item([pytest.mark.parametrize(("a", "b"), [])], a=a, b=b) for a in (0, 1) for b in (0, 1)]
    for cases in (items, listed):
        mark_slow_cases(cases)
        assert not any(item.slow for item in cases)


def test_a_sample_of_a_list_has_every_nth_case():
    assert sampled([(each,) for each in "abcdefg"], 3) == {0, 3, 6}
    assert sampled([(each,) for each in "abcdefg"], 3, 1) == {1, 4}


def test_a_sample_of_a_product_has_all_values():
    cases = list(itertools.product(range(6), "ab", (False, True)))
    kept = [cases[place] for place in sampled(cases, 2)]
    assert len(kept) == len(cases) / 2
    assert pairs_of(kept) == pairs_of(cases)


def test_of_sampled_cases_every_nth_stays():
    listed = pytest.mark.parametrize(("a", "b"), [])
    for mark, kept in ((pytest.mark.sampled(2), [0, 2, 4]), (pytest.mark.sampled(3, 1), [1, 4])):
        items = [Item([listed, mark], a=a, b=0) for a in range(5)]
        mark_slow_cases(items)
        assert [item.callspec.params["a"] for item in items if not item.slow] == kept
