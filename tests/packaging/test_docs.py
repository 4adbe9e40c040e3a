# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The Python code in docs/ runs as it stands, one block of a section after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddle_moe_ops import unpatch_paddle

DOCS = Path(__file__).resolve().parents[2] / "docs"
SECTIONS = {
    f"{page.stem}: {text.partition(chr(10))[0]}": code
    for page in sorted(DOCS.glob("*.md"))
    for text in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if (code := re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_code_of_a_section_runs(section, capsys):
    names: dict = {}
    try:
        for code in SECTIONS[section]:
            exec(compile(code, section, "exec"), names)
    finally:
        unpatch_paddle()


def test_all_code_is_found():
    assert len(SECTIONS) >= 3
    written = sum(page.read_text(encoding="utf-8").count("```python") for page in DOCS.glob("*.md"))
    assert sum(map(len, SECTIONS.values())) == written
