# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The example in the docstring of `Plan` shows what `route` makes of its ids and probabilities."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest

from paddle_moe_ops import Plan, route

TEXT = (Plan.__doc__ or "").partition("Examples:")[2]
BY_SLOT = ("slot_to_row", "token_rows")
BY_ROW = ("row_to_token", "row_to_slot", "row_to_expert", "row_probs")
BY_EXPERT = ("tokens_per_expert", "expert_offsets")


def numbers_after(word: str) -> list[float]:
    (line,) = re.findall(rf"^ +{word} +([-\d. ]+)$", TEXT, re.MULTILINE)
    return [float(number) for number in line.split()]


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    """The first table: ids, probabilities, slot_to_row and token_rows of each token, two columns each."""
    return np.array([numbers_after(f"token {token}") for token in range(5)])


@pytest.fixture(scope="module")
def plan(table: np.ndarray) -> Plan:
    ids, probs = paddle.to_tensor(table[:, :2].astype("int32")), paddle.to_tensor(table[:, 2:4].astype("float32"))
    return route(ids, probs, num_experts=3, padding_alignment=2)


def test_the_example_has_what_a_plan_is_for(table, plan):
    assert (table[:, :2] == -1).sum() == 1
    assert (plan.row_to_token.numpy() == -1).any()
    assert (plan.slot_to_row.numpy() != plan.token_rows.numpy()).any()


@pytest.mark.parametrize("field", BY_SLOT)
def test_maps_of_slots_are_those_of_the_plan(field, table, plan):
    columns = table[:, 4:6] if field == "slot_to_row" else table[:, 6:8]
    np.testing.assert_array_equal(columns, getattr(plan, field).numpy())


@pytest.mark.parametrize("field", [*BY_ROW, *BY_EXPERT])
def test_lines_of_the_picture_are_those_of_the_plan(field, plan):
    np.testing.assert_array_equal(np.float32(numbers_after(field)), getattr(plan, field).numpy())


def test_rows_are_numbered(plan):
    assert numbers_after("row") == list(range(plan.num_rows))


def test_offsets_are_drawn_at_the_rows_where_segments_begin(plan):
    """Each number of the last two lines is in the column of its expert's first row."""
    lines = {line.split()[0]: line for line in TEXT.splitlines() if line.strip()}
    ends = [match.end() for match in re.finditer(r"\d+", lines["row"])]
    starts = plan.expert_offsets.tolist()
    for field, places in (("tokens_per_expert", starts[:-1]), ("expert_offsets", starts[:-1])):
        drawn = [match.end() for match in re.finditer(r"(?<= )\d+", lines[field])]
        assert drawn[: len(places)] == [ends[row] for row in places], field
