# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks of the documentation site (mkdocs.yml): adds pages of the root and of build/pages, and rewrites links.

GitHub shows docs/ without the generated pages. Texts in docs/ name such a page by its title in the navigation,
emphasised: ``*Coverage*``. On the site that is a link.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build" / "pages"  # by tools/docs_pages.py
PAGES = {
    "README.md": "index.md",
    "README.zh.md": "zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Pages of the repository on GitHub, relative to its files there: the site has no such pages.
_BADGES = re.compile(r"^\[?!\[[^\]]*\]\((?:\.\./\.\./|https://img\.shields\.io/)[^\n]*\n", re.MULTILINE)
_REPOSITORY = re.compile(r"\[([^\]]*)\]\(\.\./\.\./([^)]*)\)")
_SHORT = re.compile(r"<(td|th)>((?:<strong>)?[^<]{1,22}(?:</strong>)?)</\1>")  # numbers, names of models
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose sources are in the root, and the generated ones with their pictures."""
    if not BUILT.is_dir():
        raise PluginError("build/pages must exist, but does not: run `make docs`")
    for path in sorted(BUILT.glob("*.*")):
        files.append(File.generated(config, path.name, abs_src_path=str(path)))
    for source, page in PAGES.items():
        link = rf"[\1]({config.repo_url.rstrip('/')}/\2)" if config.repo_url else r"\1"
        text = _REPOSITORY.sub(link, _BADGES.sub("", (ROOT / source).read_text(encoding="utf-8")))
        text = with_titles(with_links(text, ROOT, config.repo_url), generated(config.nav))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of pages in docs/ for the site."""
    if page.file.generated_by is not None:
        return markdown
    folder = Path(page.file.abs_src_path).parent
    above = "../" * (len(folder.relative_to(ROOT / "docs").parts))
    titles = {title: above + name for title, name in generated(config.nav).items()}
    return with_titles(with_links(markdown, folder, config.repo_url), titles)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Keep short cells of tables on one line. Docstrings introduce code with two colons, as in reStructuredText."""
    return _SHORT.sub(r'<\1 class="short">\2</\1>', html).replace("::</p>", ":</p>")


def generated(nav: Any) -> dict[str, str]:
    """Return the generated pages of a navigation by their titles."""
    found: dict[str, str] = {}
    for title, target in (pair for entry in nav for pair in entry.items()):
        if isinstance(target, list):
            found |= generated(target)
        elif (BUILT / target).is_file():
            found[title] = target
    return found


def with_titles(markdown: str, titles: dict[str, str]) -> str:
    """Return the text with links in place of emphasised titles."""
    for title, target in titles.items():
        markdown = markdown.replace(f"*{title}*", f"[{title}]({target})")
    return markdown


def with_links(markdown: str, folder: Path, repository: str = "") -> str:
    """Return the text with links to pages of the site; other files are links to the repository, or names.

    Args:
        markdown: the text.
        folder: the folder that its links are relative to.
        repository: its address, or an empty text if it has none.
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
        if repository:
            return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{name})"
        return text if f"`{name}`" in text else f"{text} (`{name}`)"

    return _LINK.sub(mended, markdown)
