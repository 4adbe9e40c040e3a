# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""docs/paddle_functions.md has every function of Paddle and PaddleFleet that is served, and says how."""

from __future__ import annotations

import pytest

from paddle_moe_ops.compat import paddle as families
from tests.ops import paddle_table

pytestmark = pytest.mark.cpu_only


def test_the_table_is_what_the_functions_do(place):
    page = paddle_table.PAGE.read_text(encoding="utf-8")
    due = paddle_table.page_with(page, paddle_table.table(place))
    assert page == due, "run `python -m tests.ops.paddle_table`"


def test_every_function_of_every_family_has_a_row():
    rows = paddle_table.PAGE.read_text(encoding="utf-8").splitlines()
    for family, names in families.NAMES_OF_FAMILIES.items():
        for name in names:
            assert any(row.startswith(f"| {family} | `{name}` |") for row in rows), (family, name)
