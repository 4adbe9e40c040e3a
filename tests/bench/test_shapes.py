# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Cases and operations that the options select."""

from __future__ import annotations

import pytest

from benchmarks.kernels.operators import OPERATIONS, select_operations
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.shapes import SETS, Case, Shape, cases_of


def test_targets_are_the_shapes_that_targets_are_set_for():
    sizes = {case.shape[1:5] for case in cases_of("targets")}
    assert sizes == {
        (16384, 8, 64, 8192),
        (16384, 6, 64, 2560),
        (4096, 8, 256, 7168),
        (32, 8, 128, 7168),
        (128, 8, 128, 7168),
        (512, 8, 128, 7168),
        (4096, 8, 128, 7168),
        (153962, 10, 8, 2048),
    }


@pytest.mark.parametrize("name", SETS)
def test_no_set_holds_a_case_twice(name):
    assert len(set(SETS[name])) == len(SETS[name])


def test_matrix_varies_tokens_padding_and_routing():
    cases = cases_of("matrix")
    assert {case.shape.num_tokens for case in cases} >= {1, 32, 512, 4096, 32768}
    assert {(case.alignment, case.fill) for case in cases} == {(1, True), *((a, f) for a in (16, 128) for f in (0, 1))}
    assert {case.routing for case in cases} >= {"uniform", "zipf", "all_to_one", "half_unassigned", "all_unassigned"}


def test_a_shape_has_one_name_in_all_sets():
    names = {}
    for cases in SETS.values():
        for case in cases:
            assert names.setdefault(case.shape.name, case.shape) == case.shape


def test_shapes_are_chosen_by_name_and_pattern():
    names = [case.shape.name for case in cases_of("targets", ["dsv3", "tileops-?2"])]
    assert names == ["dsv3", "tileops-32"]


def test_sizes_of_a_known_shape_get_its_name():
    assert cases_of("quick", ["4096,8,256,7168"]) == cases_of("quick", ["dsv3"])


def test_sizes_of_an_unknown_shape_make_one():
    (case,) = cases_of("quick", ["5,2,7,40"])
    assert case == Case(Shape("5,2,7,40", 5, 2, 7, 40), "uniform")


def test_routing_alignment_and_fill_replace_those_of_the_cases():
    cases = cases_of("targets", ["dsv3"], ["zipf"], [1, 128], [True, False])
    assert [(case.routing, case.alignment, case.fill) for case in cases] == [
        ("zipf", 1, True),
        ("zipf", 1, False),
        ("zipf", 128, True),
        ("zipf", 128, False),
    ]


def test_operations_are_chosen_by_operator_variant_and_pattern():
    keys = [operation.key for operation in select_operations(["unpermute", "*:fp8"])]
    assert keys == ["unpermute:plain", "unpermute:weighted", "route_permute:fp8", "permute:fp8", "moe_permute:fp8"]
    assert select_operations() == list(OPERATIONS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("fast",), "--set must be one of targets, quick, padding, matrix, but got 'fast'"),
        (("quick", ["gpt"]), "--shapes must be T,K,E,H or names out of dsv3, tileops-128, but got 'gpt'"),
        (("quick", ["4,0,2,8"]), "--shapes must be four positive numbers T,K,E,H or names, but got '4,0,2,8'"),
        (("quick", ["4,2,8"]), "--shapes must be four positive numbers T,K,E,H or names, but got '4,2,8'"),
        (("quick", [], ["even"]), "--routing must be one of uniform, "),
        (("quick", [], [], [0]), "--alignment must be at least 1, but got 0"),
    ],
    ids=["set", "shape", "zero", "three sizes", "routing", "alignment"],
)
def test_a_bad_choice_is_an_error_that_says_what_there_is(arguments, text):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the text is compared below
        cases_of(*arguments)
    assert str(error.value).startswith(text)


def test_an_operation_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=r"--ops must match some of route:maps, .*, but got 'permutate'"):
        select_operations(["route", "permutate"])


def test_the_sparse_shape_has_the_rows_per_token_of_the_production_run():
    shape = Shape("small production", 20_000, 10, 8, 8, "expert_parallel_sparse")
    problem = make_problem(Case(shape, shape.routing))
    assert problem.routed_rows / shape.num_tokens == pytest.approx(1.41, abs=0.02)


def test_a_problem_is_the_same_whenever_it_is_made():
    case = cases_of("quick", ["60,4,9,8"])[0]
    first, second = make_problem(case), make_problem(case)
    assert (first.ids == second.ids).all()
    assert (first.probs == second.probs).all()


def test_a_buffer_by_capacity_holds_any_routing():
    shape = Shape("s", 30, 4, 9, 8)
    problem = make_problem(Case(shape, "all_unassigned", alignment=16, capacity=True))
    assert problem.plan.num_rows == 30 * 4 + 9 * 15
    assert problem.routed_rows == 0
