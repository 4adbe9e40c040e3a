# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The code in docs/migrating.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")


def test_unsloths_calls_and_the_plan_give_the_same_output():
    section = PAGE.partition("## From Unsloth's")[2].partition("\n## ")[0]
    names: dict = {}
    outputs = []
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(code, names)
        outputs.append(names["out"].numpy())
    by_indices, *by_plan = outputs
    assert len(by_plan) == 2  # step by step, and with permutation and weights inside the products
    for each in by_plan:
        np.testing.assert_allclose(by_indices, each, rtol=1e-4, atol=1e-4 * np.abs(by_indices).max())
