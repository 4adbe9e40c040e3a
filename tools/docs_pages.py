#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the generated pages of the site, and their pictures, from benchmarks/results: ``docs_pages.py [PAGE ...]``.

`make docs` runs it before MkDocs, which reads the pages from build/pages (tools/docs_site.py). Neither Paddle nor a
build of the package is needed.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import benchmarks.without_paddle  # noqa: E402, F401  before the imports below
from benchmarks.expert_parallel import report as exchanges  # noqa: E402
from benchmarks.kernels import report as operators  # noqa: E402
from benchmarks.layer import report as layers  # noqa: E402
from benchmarks.loss_curves import report as curves  # noqa: E402
from benchmarks.pages import BUILT  # noqa: E402
from benchmarks.scaling import report as scaling  # noqa: E402
from benchmarks.serving import report as serving  # noqa: E402

OPERATORS = ("performance_gpu.md", "performance_cpu.md")  # one call writes both


def coverage(path: Path) -> None:
    """Write the page about lines that tests run."""
    tool = runpy.run_path(str(ROOT / "tools" / "coverage_report.py"))
    path.write_text(tool["page"](tool["read_results"]()), encoding="utf-8")


def gpu_validation(path: Path) -> None:
    """Write the page about runs on GPUs. The page lists open points; they are no errors of the site."""
    tool = runpy.run_path(str(ROOT / "tools" / "gpu_rig" / "report.py"))
    path.write_text(tool["page"](tool["load"]()), encoding="utf-8")


WRITERS: dict[str, Callable[[Path], object]] = {
    OPERATORS[0]: lambda path: operators.main(
        ["--results", str(ROOT / "benchmarks/results"), "--out", str(path.parent)]
    ),
    "layer_performance.md": lambda path: layers.main(target=path),
    "float8_loss_curves.md": lambda path: curves.main(target=path),
    "serving_performance.md": lambda path: serving.main(target=path),
    "expert_parallel_performance.md": lambda path: exchanges.main(target=path),
    "scaling.md": lambda path: scaling.main(target=path),
    "coverage.md": coverage,
    "gpu_validation.md": gpu_validation,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"some of {', '.join(WRITERS)}; default: all")
    parser.add_argument("--out", type=Path, default=BUILT, help="folder of the pages")
    options = parser.parse_args()
    unknown = set(options.pages) - set(WRITERS)
    if unknown:
        parser.error(f"PAGE must be one of {', '.join(WRITERS)}, but got {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.pages or WRITERS:
        if WRITERS[name](options.out / name):
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
