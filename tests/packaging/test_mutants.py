# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``make mutants`` follows the sources: all that its areas name exists."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = runpy.run_path(str(ROOT / "tools" / "mutants" / "areas.py"))
AREAS, LEFT_OUT = NAMES["AREAS"], NAMES["LEFT_OUT"]


@pytest.mark.parametrize("area", AREAS)
def test_every_pattern_of_an_area_matches_a_file(area):
    patterns = (*AREAS[area].sources, *AREAS[area].tests)
    assert [pattern for pattern in patterns if not any(ROOT.glob(pattern))] == []


def test_files_that_are_left_out_exist():
    assert [name for name in LEFT_OUT if not (ROOT / name).is_file()] == []
