# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of every compiled operator, for any caller and any arguments.

The operators are found in their sources, and their examples are what the public functions call. So a new operator is
under this contract without being named here, and one that no case reaches fails.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import paddle_moe_ops
from paddle_moe_ops.backends.arrays import to_tensor
from tests.static.cases import CASES
from tests.static.contract import TOKENS, questions
from tests.static.isolation import outcomes
from tests.static.modes import as_tuple
from tests.static.operators import FLOATS, operator_names

pytestmark = pytest.mark.long

SOURCES = Path(paddle_moe_ops.__file__).parent / "csrc" / "paddle"


def declared(kind: str) -> list[str]:
    """The operators that the sources declare."""
    texts = [source.read_text("utf-8") for source in SOURCES.glob("*.cc")]
    return sorted(name for text in texts for name in re.findall(rf"PD_BUILD_{kind}\((\w+)", text))


OPERATORS = declared("OP")
# Permitted ends of a call with garbage. IndexError: Paddle's own check that a number fits the attribute.
GOOD_ENDS = ("ok", "raised ValueError", "raised TypeError", "raised IndexError")
# In a direct call, integers beyond 64 bits overflow.
GOOD_ENDS_OF_A_DIRECT_CALL = ("ok", "raised ValueError", "raised OverflowError", "raised TypeError")
# A program can be refused while it is built, by Paddle.
GOOD_ENDS_OF_A_BUILD = (*GOOD_ENDS, "built: raised ValueError", "built: raised TypeError")


@pytest.fixture(scope="module")
def answers():
    """operator -> part of the contract -> [(call, what became of it), ...]."""
    no_examples = {tokens: [] for tokens in TOKENS}
    found = {operator: {part: [] for part in questions(operator, no_examples)} for operator in operator_names()}
    for name, outcome in outcomes([sys.executable, "-m", "tests.static.contract"]):
        operator, part, call = json.loads(name)
        found[operator][part].append((call, outcome))
    return found


def test_library_has_the_operators_of_the_sources():
    assert OPERATORS
    assert operator_names() == OPERATORS


def test_what_has_a_gradient_says_what_the_gradient_of_that_is():
    """Paddle silently gives none otherwise; one that is not supported raises."""
    assert declared("GRAD_OP")
    assert declared("DOUBLE_GRAD_OP") == declared("GRAD_OP")


@pytest.mark.slow  # thousands of programs
@pytest.mark.parametrize("operator", OPERATORS)
class TestContract:
    @pytest.fixture
    def parts(self, answers, operator):
        return answers[operator]

    @pytest.mark.parametrize("part", ["shapes", "shapes with free sizes"])
    def test_program_knows_the_shapes_and_dtypes_of_dygraph(self, parts, part):
        assert parts[part], "no case of tests/static/cases.py reaches this operator"
        assert_ends(parts[part], ("ok",))

    def test_output_gradient_that_nobody_computed_counts_as_zeros(self, parts):
        assert_ends(parts["undefined gradients"], ("ok",))

    def test_backward_from_a_constant_output_gives_zeros(self, parts):
        assert_ends(parts["constant outputs"], ("ok",))

    def test_gradient_that_is_not_needed_is_zero_and_changes_no_other(self, parts):
        assert_ends(parts["needs"], ("ok",))

    def test_keyword_call_of_the_generated_function(self, parts):
        assert_ends(parts["keywords"], ("ok",))

    def test_direct_call_gives_the_same_bits(self, parts):
        assert_ends(parts["direct calls"], ("ok",))

    def test_garbage_in_a_direct_call(self, parts):
        assert_ends(parts["garbage in direct calls"], GOOD_ENDS_OF_A_DIRECT_CALL)

    def test_garbage_in_dygraph(self, parts):
        assert_ends(parts["garbage in dygraph"], GOOD_ENDS)

    def test_garbage_in_a_program(self, parts):
        assert_ends(parts["garbage in a program"], GOOD_ENDS_OF_A_BUILD)


def assert_ends(calls, good_ends):
    bad = [f"{call}: {end}" for call, end in calls if not end.startswith(good_ends) and not is_excused(call, end)]
    assert not bad, f"{len(bad)} of {len(calls)} calls:\n" + "\n".join(bad)


def is_excused(call, end):
    """A buffer of 2**31 - 1 rows is a valid request that no memory can hold; Paddle cannot fetch what has no dtype."""
    if call.endswith("buffer=2147483647"):
        return end.startswith("raised MemoryError")
    return call.endswith(" missing") and end.startswith("raised RuntimeError: (PreconditionNotMet) op [pd_op.fetch]")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_public_outputs_without_a_gradient_say_so(case, rng, place):
    tensors = {name: to_tensor(array) for name, array in case.inputs(rng, 7).items()}
    for name in case.leaves:
        tensors[name].stop_gradient = False
    outputs = as_tuple(case.function(*tensors.values()))
    assert all(output.stop_gradient for output in outputs if output.dtype not in FLOATS)
    assert any(not output.stop_gradient for output in outputs) == bool(case.leaves)
