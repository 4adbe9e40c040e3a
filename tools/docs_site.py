# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks of the documentation site (mkdocs.yml): files beside docs/ become pages, and links fit the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Pages of the repository on GitHub, relative to its files there: the site has no such pages.
_BADGES = re.compile(r"^\[?!\[[^\]]*\]\((?:\.\./\.\./|https://img\.shields\.io/)[^\n]*\n", re.MULTILINE)
_REPOSITORY = re.compile(r"\[([^\]]*)\]\(\.\./\.\./[^)]*\)")
_SHORT = re.compile(r"<(td|th)>((?:<strong>)?[^<]{1,22}(?:</strong>)?)</\1>")  # numbers, names of models
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose sources are in the root."""
    for source, page in PAGES.items():
        text = _REPOSITORY.sub(r"\1", _BADGES.sub("", (ROOT / source).read_text(encoding="utf-8")))
        files.append(File.generated(config, page, content=with_links(text, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Mend the links of pages in docs/."""
    if page.file.generated_by is not None:
        return markdown
    return with_links(markdown, Path(page.file.abs_src_path).parent)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Keep short cells of tables on one line. Docstrings announce code as reStructuredText does, with two colons."""
    return _SHORT.sub(r'<\1 class="short">\2</\1>', html).replace("::</p>", ":</p>")


def with_links(markdown: str, folder: Path) -> str:
    """Links to pages of the site, and the names of files that are not on it.

    Args:
        markdown: the text.
        folder: what its links start from.
    """

    def mended(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = (folder / target).resolve()
        name = path.relative_to(ROOT).as_posix()
        if name in PAGES:
            return f"[{text}]({PAGES[name]}{anchor or ''})"
        if path.is_relative_to(ROOT / "docs"):
            base = ROOT / "docs" if folder == ROOT else folder
            return f"{image}[{text}]({os.path.relpath(path, base)}{anchor or ''})"
        return text if f"`{name}`" in text else f"{text} (`{name}`)"

    return _LINK.sub(mended, markdown)
