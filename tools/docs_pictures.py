#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Takes pictures of the documentation site in a browser, wide and on a phone, light and dark, and checks every page.

`make docs-pictures` writes them to build/site_pictures. A page fails if it is wider than a phone's screen,
if a picture does not load, or if a link is dead. The browser is Chromium: the system's, or else Playwright's own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "site_pictures"
SCREENS = {"wide": (1440, 900), "phone": (390, 844)}
SHOWN = ("index", "concepts", "performance", "reference/layers", "reference/permutation")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Wide things may scroll in a box of their own; the page itself must not.
TOO_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"
NOT_LOADED = "[...document.images].filter(each => !each.complete || !each.naturalWidth).map(each => each.src)"
LINKS = "[...document.links].map(each => each.href)"
ANCHORS = "[...document.querySelectorAll('[id], a[name]')].map(each => each.id || each.name)"


class Handler(SimpleHTTPRequestHandler):
    """A request handler that serves files without logging."""

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def served() -> Iterator[str]:
    """Serve the site, since pages from files have no search, and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", nargs="*", default=SHOWN, help="names of pages without .html")
    options = parser.parse_args()
    if not SITE.is_dir():
        parser.error(f"there is no {SITE}; make docs builds it")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, served() as address:
        own = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = playwright.chromium.launch(executable_path=own, args=["--no-sandbox"])
        faults = list(faults_of_pages(browser, address))
        take(browser, address, options.pages)
        browser.close()
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(faults)} faults; pictures of {len(options.pages)} pages are in {PICTURES}")
    return 1 if faults else 0


def take(browser: Browser, address: str, names: list[str]) -> None:
    """Write a picture of the first screens of each page, wide and on a phone, in both colours."""
    for screen, (width, height) in SCREENS.items():
        for scheme in ("light", "dark"):
            page = open_page(browser, width, height, scheme)
            for name in names:
                page.goto(f"{address}{name}.html")
                path = PICTURES / f"{name.replace('/', '_')}-{screen}-{scheme}.png"
                page.screenshot(path=path, clip={"x": 0, "y": 0, "width": width, "height": 3 * height}, full_page=True)
            page.close()


def faults_of_pages(browser: Browser, address: str) -> Iterator[str]:
    """Return messages about faults of pages on a phone."""
    page = open_page(browser, *SCREENS["phone"], "light")
    anchors: dict[str, set[str]] = {}
    links: dict[str, list[str]] = {}
    for path in sorted(SITE.rglob("*.html")):
        name = path.relative_to(SITE).as_posix()
        page.goto(address + name)
        if page.evaluate(TOO_WIDE):
            yield f"{name}: wider than the screen of a phone"
        for source in page.evaluate(NOT_LOADED):
            yield f"{name}: no picture at {source}"
        anchors[name], links[name] = set(page.evaluate(ANCHORS)), page.evaluate(LINKS)
    for name, found in links.items():
        for link in dict.fromkeys(found):
            url, anchor = urldefrag(link)
            target = unquote(url.removeprefix(address))
            if not url.startswith(address) or not target:  # a link to another site, or to the home of this one
                continue
            if not (SITE / target).is_file() or (anchor and unquote(anchor) not in anchors.get(target, {anchor})):
                yield f"{name}: there is no {target}{'#' if anchor else ''}{anchor}"


def open_page(browser: Browser, width: int, height: int, scheme: str) -> Page:
    return browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)


if __name__ == "__main__":
    sys.exit(main())
