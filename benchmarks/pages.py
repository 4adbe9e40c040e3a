# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Shared code of benchmarks whose results become pages."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["BUILT", "END", "facts", "load", "made_by", "parsed", "with_part"]

BUILT = Path(__file__).resolve().parents[1] / "build" / "pages"  # generated pages of the site, which git does not have
END = "<!-- end -->"


def facts() -> dict[str, Any]:
    """The machine, the versions and the time, for the first line of a result."""
    import paddle

    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    return {
        "cpu": names[0].partition(": ")[2] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "paddle": paddle.__version__,
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def load(path: Path) -> list[dict[str, Any]]:
    """The lines of a result."""
    return parsed(path.read_text(encoding="utf-8"))


def parsed(text: str) -> list[dict[str, Any]]:
    """JSON objects, one a line."""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def made_by(text: str) -> str:
    """The end of a generated page: how it is generated."""
    return f"\n---\n\n{text}\n"


def with_part(page: str, begin: str, part: str) -> str:
    """The page with another part between a mark and the next `END`."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{part}\n{END}{rest.partition(END)[2]}"
