# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The documentation site: what `make docs` can't see. It builds the site itself, with every warning an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = {"index.md", "contributing.md", "changelog.md"}  # of files in the root, by tools/docs_site.py


def test_every_public_module_is_in_the_reference():
    text = "".join(path.read_text("utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
    shown = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    public = re.findall(r"^\[(\S+)\]$", (ROOT / "tests/packaging/public_api.txt").read_text("utf-8"), re.MULTILINE)
    assert len(public) > 10
    left_out = {"paddle_moe_ops"}  # what it has is in the modules
    assert {each for each in public if each not in left_out} <= set(shown)


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    assert named == GENERATED | {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_to_files(page):
    for target in LINK.findall(page.read_text("utf-8")):
        assert "://" in target or (page.parent / target).exists(), target
