# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The report of a run on its targets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.kernels.operators import OPERATIONS, variant_of
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.run import empty_row
from benchmarks.kernels.shapes import SHAPES, Case, Operation
from benchmarks.kernels.targets import PUBLIC, TARGETS, Target, judge, verdict_cells

ROW = replace(
    empty_row(Operation("unpermute", "weighted"), make_problem(Case(SHAPES["tileops-32"], "uniform"))),
    mode="graph",
    check="bits",
)
AT_MOST_5_US = Target("unpermute:weighted", "tileops-32", "us", 5.0)
AT_LEAST_09 = Target("unpermute:weighted", "tileops-32", "copy", 0.9)
AS_FAST_AS_PEERS = Target("unpermute:weighted", "tileops-32", "peer", 0.98)


def ours(us=4.0, frac_copy=0.95, **changes):
    return replace(ROW, impl="core", us=us, frac_copy=frac_copy, **changes)


def peer(name, us):
    return replace(ROW, impl=name, us=us)


def verdict(target, *rows):
    (found,) = judge(rows, [target])
    return found


@pytest.mark.parametrize(
    ("target", "row", "reached"),
    [
        (AT_MOST_5_US, ours(us=5.0), True),
        (AT_MOST_5_US, ours(us=5.1), False),
        (AT_LEAST_09, ours(frac_copy=0.9), True),
        (AT_LEAST_09, ours(frac_copy=0.89), False),
    ],
)
def test_a_limit_is_reached_or_missed(target, row, reached):
    found = verdict(target, row)
    assert found.reached is reached
    assert verdict_cells(found)[-1] == ("PASS" if reached else "miss")


def test_the_best_peer_counts():
    found = verdict(AS_FAST_AS_PEERS, ours(us=10.0), peer("slow", 30.0), peer("fast", 9.9))
    assert found.peer.impl == "fast"
    assert found.value == pytest.approx(0.99)
    assert found.reached, "within 2 % is a tie"
    assert not verdict(AS_FAST_AS_PEERS, ours(us=10.0), peer("fast", 9.7)).reached


def test_a_target_can_name_its_peer():
    target = AS_FAST_AS_PEERS._replace(peer="paddle*", limit=1.15)
    found = verdict(target, ours(us=10.0), peer("fast", 9.0), peer("paddle (published, scaled)", 12.0))
    assert found.value == pytest.approx(1.2)
    assert found.reached


def test_a_target_can_be_about_the_public_function_and_ours_is_no_peer():
    target = AS_FAST_AS_PEERS._replace(impl=PUBLIC, limit=1.7)
    found = verdict(target, ours(us=5.0), replace(ours(us=10.0), impl=PUBLIC), peer("paddle ops", 17.0))
    assert (found.ours.impl, found.peer.impl) == (PUBLIC, "paddle ops")
    assert found.value == pytest.approx(1.7)
    assert found.reached


def test_on_a_cpu_calls_that_follow_each_other_count():
    warm = replace(ours(us=4.0), mode="cpu", cold=False)
    assert verdict(AT_MOST_5_US, warm).reached
    assert judge([replace(warm, cold=True)], [AT_MOST_5_US]) == []


def test_what_was_not_measured_is_neither_reached_nor_missed():
    found = verdict(AS_FAST_AS_PEERS, ours())
    assert found.reached is None
    assert verdict_cells(found)[-1] == "not measured"
    assert judge([], [AT_MOST_5_US]) == []


@pytest.mark.parametrize(
    "changes", [{"own_case": False}, {"mode": "eager"}, {"cold": False}, {"us": None, "check": "failed: x"}]
)
def test_only_checked_times_of_the_shapes_own_case_count(changes):
    assert judge([replace(ours(), **changes)], [AT_MOST_5_US]) == []


def test_targets_and_published_times_are_about_operations_and_shapes_that_exist():
    keys = {operation.key for operation in OPERATIONS}
    targets = [target for of_device in TARGETS.values() for target in of_device]
    assert {target.key for target in targets} <= keys
    assert {target.shapes for target in targets} <= set(SHAPES)
    published = [each for operation in OPERATIONS for each in variant_of(operation).published]
    assert published
    assert {shape for each in published for shape in each.medians} <= set(SHAPES)
