# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The table of operators holds what their files say."""

from __future__ import annotations

import importlib
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.kernels import operators
from benchmarks.kernels.device import Body
from benchmarks.kernels.operators import OPERATIONS, OPERATORS, Library, implementations, minimum_bytes, variant_of
from benchmarks.kernels.operators.base import Operator, Variant, Way
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.shapes import Case, Operation, Shape
from benchmarks.kernels.targets import OURS, PUBLIC, TRITON

SIDES = [(library, gpu) for library in Library for gpu in (True, False)]


def test_every_operator_s_file_is_in_the_table():
    folder = Path(operators.__file__).parent
    modules = [importlib.import_module(f"{operators.__name__}.{path.stem}") for path in folder.glob("[!_]*.py")]
    described = [module.OPERATOR for module in modules if hasattr(module, "OPERATOR")]
    assert sorted(operator.name for operator in described) == sorted(OPERATORS)


def test_the_name_of_an_operator_is_that_of_its_file():
    for operator in OPERATORS.values():
        module = importlib.import_module(f"{operators.__name__}.{operator.name}")
        assert module.OPERATOR is operator, operator.name


def test_ours_offer_every_variant():
    for operator in OPERATORS.values():
        ours = [way for way in operator.ways if way.name in (OURS, TRITON, PUBLIC)]
        assert sorted(way.name for way in ours) == sorted((OURS, TRITON, PUBLIC)), operator.name
        assert not [way.name for way in ours if way.variants or way.gpu_only], operator.name


def test_names_of_ways_and_variants_are_not_taken_twice():
    for operator in OPERATORS.values():
        names = [way.name for way in operator.ways]
        assert len(set(names)) == len(names), operator.name
        for way in operator.ways:
            assert set(way.variants) <= set(operator.variants), f"{way.name} of {operator.name}"


def test_ways_are_in_one_order():
    pairs = {each for operator in OPERATORS.values() for each in combinations([way.name for way in operator.ways], 2)}
    assert not [each for each in pairs if each[::-1] in pairs]
    for operator in OPERATORS.values():
        assert list(operator.ways) == sorted(operator.ways, key=lambda way: list(Library).index(way.library))


def test_implementations_offer_what_the_ways_say():
    offered = {
        (library, gpu, implementation.name, operation)
        for library, gpu in SIDES
        for implementation in implementations(library, None, gpu=gpu)
        for operation in OPERATIONS
        if implementation.offers(operation)
    }
    assert offered == {
        (way.library, gpu, way.name, Operation(operator.name, variant))
        for operator in OPERATORS.values()
        for way in operator.ways
        for variant in way.variants or operator.variants
        for gpu in (True, False)
        if gpu or not way.gpu_only
    }


def test_reading_is_measured_for_operations_that_read_far_more_than_they_write():
    problem = make_problem(Case(Shape("s", 64, 8, 16, 256), "uniform"))
    for operation in OPERATIONS:
        least = minimum_bytes(operation, problem)
        assert variant_of(operation).mostly_read == (least.read > 4 * least.written), operation.key


def test_a_way_is_given_its_library_the_operation_and_the_inputs(monkeypatch):
    given = []

    def prepare(*arguments):
        given.append(arguments)
        return Body(dict)

    way = Way("fast", Library.NUMPY, prepare, variants=("high",))
    fly = Operator("fly", dict.fromkeys(("high", "low"), Variant("bfloat16")), lambda *_: None, (way,))
    monkeypatch.setitem(OPERATORS, "fly", fly)
    (fast,) = [each for each in implementations(Library.NUMPY, "numpy") if each.name == "fast"]
    high, low = Operation("fly", "high"), Operation("fly", "low")
    assert (fast.offers(high), fast.offers(low)) == (True, False)
    fast.prepare(high, "inputs")
    assert given == [("numpy", high, "inputs")]


@pytest.mark.parametrize("key", ["fly:high", "permute:high"])
def test_an_unknown_operation_is_an_error(key):
    problem = make_problem(Case(Shape("s", 5, 2, 3, 8), "uniform"))
    with pytest.raises(ValueError, match=f"operation must be one of route:maps, .*, but got {key}"):
        minimum_bytes(Operation(*key.split(":")), problem)
