# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The Python code in docs/ runs as it stands, one block of a section after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddle_moe_ops import unpatch_paddle

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCES = ("paddle_moe_ops", "tests", "tools", "benchmarks")
SECTIONS = {
    f"{page.stem}: {text.partition(chr(10))[0]}": code
    for page in sorted(DOCS.glob("*.md"))
    for text in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if (code := re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_code_of_a_section_runs(section, tmp_path, capsys):
    """From files, since paddle.jit.to_static reads the source of functions."""
    names: dict = {}
    try:
        for number, code in enumerate(SECTIONS[section]):
            file = tmp_path / f"block{number}.py"
            file.write_text(code, encoding="utf-8")
            exec(compile(code, str(file), "exec"), names)
    finally:
        unpatch_paddle()


def test_all_code_is_found():
    assert len(SECTIONS) >= 3
    written = sum(page.read_text(encoding="utf-8").count("```python") for page in DOCS.glob("*.md"))
    assert sum(map(len, SECTIONS.values())) == written


def test_no_code_is_written_in_a_way_that_no_test_runs():
    """README's programs run in test_readme.py, those for PaddleFormers in tests/integrations/test_page.py.

    Those for several processes are run by tests/distributed.
    """
    elsewhere = {
        "integrations.md": {"py"},
        "integrations_measured.md": {"text"},
        "expert_parallel_training.md": {"py", "python"},
        "expert_parallel_fleet.md": {"py"},
        "serving.md": {"py", "python"},
    }
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    kinds = {
        (page.name, kind)
        for page in pages
        for kind in re.findall(r"^ *(?:```|~~~)(\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {kind for name, kind in kinds if name not in elsewhere} == {"python", "text", "bibtex"}
    for page, expected in elsewhere.items():
        assert {kind for name, kind in kinds if name == page} == expected


def test_the_files_that_contributing_names_exist():
    """Compared by the end of their paths: in a table, the folder is often the one of the name before."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Adding an operator")[2]
    named = set(re.findall(r"`([\w/]+\.(?:py|cc|h|cu))`", section.partition("\n## ")[0]))
    files = {f"/{path.relative_to(ROOT).as_posix()}" for folder in SOURCES for path in (ROOT / folder).rglob("*.*")}
    files.add("/setup.py")
    assert len(named) > 40
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()
