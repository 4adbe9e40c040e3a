# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Covering grids for tests with many parameters: all pairs of values of any two axes, or all values of each."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

Axis = Sequence[Any] | Mapping[str, Any]
Case = TypeVar("Case")


def pairwise(
    axes: Mapping[str, Axis],
    empty: Mapping[str, Collection[Any]] | None = None,
    *,
    indirect: Sequence[str] = (),
    others_are_slow: bool = False,
) -> pytest.MarkDecorator:
    """Return a ``parametrize`` mark whose cases cover all pairs of values of any two axes.

    Axes are named as in ``parametrize``: "K" has values, "K, E" has tuples. A mapping names its values; other values
    are named by ``str``. ``empty`` lists values for which a test computes nothing, such as 0 tokens: a case with such a
    value covers only the pairs that contain it. ``indirect`` is that of ``parametrize``. With ``others_are_slow`` the
    remaining combinations are slow tests.
    """
    nothing = {
        (place, index)
        for place, (axis, values) in enumerate(axes.items())
        for index, value in enumerate(_values(values))
        if value in (empty or {}).get(axis, ())
    }
    return _mark(axes, covering([len(axis) for axis in axes.values()], nothing), indirect, others_are_slow)


def pairwise_of(
    *marks: pytest.MarkDecorator, empty: Mapping[str, Collection[Any]] | None = None, others_are_slow: bool = False
) -> pytest.MarkDecorator:
    """Return one mark for several of ``parametrize``: as `pairwise`, with their cases as the values of an axis each."""
    axes: dict[str, Axis] = {}
    for mark in marks:
        (names, values), ids = mark.args, mark.kwargs.get("ids")
        found: Sequence[str] = [(ids or _label)(value) for value in values] if ids is None or callable(ids) else ids
        axes[names if isinstance(names, str) else ", ".join(names)] = dict(zip(found, values, strict=True))
    return pairwise(axes, empty, others_are_slow=others_are_slow)


def in_turn(axes: Mapping[str, Axis], *, indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Return a ``parametrize`` mark whose cases cover the values of each axis; other combinations are slow tests.

    Case i has value i of each axis; an axis begins again after its last value.
    """
    sizes = [len(axis) for axis in axes.values()]
    return _mark(axes, [tuple(turn % size for size in sizes) for turn in range(max(sizes))], indirect, True)


def _mark(
    axes: Mapping[str, Axis], covered: Sequence[tuple[int, ...]], indirect: Sequence[str], others_are_slow: bool
) -> pytest.MarkDecorator:
    labels = [[_label(each) for each in axis] for axis in axes.values()]
    names = [[name.strip() for name in axis.split(",")] for axis in axes]
    marked = []
    for case in itertools.product(*(range(len(axis)) for axis in axes.values())) if others_are_slow else covered:
        arguments: list[Any] = []
        for axis, values, index in zip(names, map(_values, axes.values()), case, strict=True):
            arguments += values[index] if len(axis) > 1 else [values[index]]
        label = "-".join(axis[index] for axis, index in zip(labels, case, strict=True))
        marked.append(pytest.param(*arguments, id=label, marks=[] if case in covered else pytest.mark.slow))
    return pytest.mark.parametrize([name for axis in names for name in axis], marked, indirect=indirect)


def _values(axis: Axis) -> list[Any]:
    return list(axis.values() if isinstance(axis, Mapping) else axis)


def covering(
    sizes: Sequence[int],
    empty: Collection[tuple[int, int]] = (),
) -> list[tuple[int, ...]]:
    """Return cases, as one index for each axis, that cover all pairs of indices of any two axes.

    A case with (axis, index) pairs of ``empty`` covers only the pairs that contain one of them. The algorithm is
    greedy: it chooses the first of the cases that cover the most new pairs. Cases are returned in the product's order.
    """
    return sorted(_greedy(_bits({case: _pairs(case, empty) for case in itertools.product(*map(range, sizes))})))


def thinned(cases: Sequence[tuple[Hashable, ...]]) -> set[int]:
    """Return the places of cases that cover the others: all values of two axes, or all pairs of values of more axes."""
    together = 1 if len(cases[0]) < 3 else 2
    return set(_greedy(_bits({place: _groups(case, together) for place, case in enumerate(cases)})))


def sampled(cases: Sequence[tuple[Hashable, ...]], every: int, first: int = 0) -> set[int]:
    """Return the places of one in ``every`` cases: with new values, else with new pairs, else from ``first`` on."""
    places = sorted(range(len(cases)), key=lambda place: ((place - first) % every, place))
    weight = range(len(cases[0]) ** 2)  # a value counts more than all pairs
    elements = {
        place: _groups(cases[place], 2) + list(itertools.product(_groups(cases[place], 1), weight)) for place in places
    }
    return set(_greedy(_bits(elements))[: len(range(first, len(cases), every))])


def _groups(case: tuple[Hashable, ...], together: int) -> list[Hashable]:
    return list(itertools.combinations(enumerate(case), together))


def _bits(elements: Mapping[Case, Collection[Hashable]]) -> dict[Case, int]:
    """Return sets as integers with their bits."""
    numbers: dict[Hashable, int] = {}
    return {
        case: sum(1 << numbers.setdefault(each, len(numbers)) for each in found) for case, found in elements.items()
    }


def _greedy(left: dict[Case, int]) -> list[Case]:
    """Return cases whose sets, the bits of integers, contain all elements: each is the first with the most new ones."""
    cases: list[Case] = []
    while left:
        best = max(left, key=lambda case: left[case].bit_count())
        covered = left[best]
        cases.append(best)
        left = {case: rest for case, elements in left.items() if (rest := elements & ~covered)}
    return cases


def _pairs(case: tuple[int, ...], empty: Collection[tuple[int, int]]) -> set[tuple[tuple[int, int], ...]]:
    values = list(enumerate(case))
    pairs = set(itertools.combinations(values, min(2, len(values))))
    nothing = set(empty).intersection(values)
    return {pair for pair in pairs if nothing.intersection(pair)} if nothing else pairs


def _label(value: Any) -> str:
    if type(value) is tuple:
        return "-".join(map(_label, value))
    return getattr(value, "__name__", None) or str(value)
