# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Adds the newest results to the series of geometric means by commit, and checks series and tables.

    python -m benchmarks.series [--why FIGURES REASON]
    python -m benchmarks.series --check
    python -m benchmarks.series --history

The exit status is 1 if

* a geometric mean is more than 3 % below the last one of the same GPU and shapes. Such a point is left out of the
  series, unless ``--why`` has a pattern of figures that fits and the reason, which is kept with the point;
* two results of one GPU have a figure of the same shape that is more than 3 % apart, and ``differences.json`` next to
  them has no reason for it, or a reason for which no difference is left;
* with ``--check``, which writes nothing, the series lacks a result.

``--history`` adds all earlier versions of today's result files that git has, however low.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .differences import differences, load_reasons, unexplained
from .figures import load_results
from .points import Series, historic_results

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Add and check; 1 if there are complaints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--history", action="store_true", help="add earlier results that git has, too")
    parser.add_argument("--why", nargs=2, action="append", default=[], metavar=("FIGURES", "REASON"))
    arguments = parser.parse_args(argv)
    results, series = load_results(arguments.results), Series(arguments.results)
    if arguments.history:
        series.insert(historic_results(arguments.results))
    added, drops = series.add(results, arguments.why)
    complaints = [*drops, *unexplained(differences(results), load_reasons(arguments.results))]
    if not arguments.check:
        series.write()
    elif added:
        complaints.append(f"the series lacks {added} points of the results; run `make results-series`")
    for each in complaints:
        print(each, file=sys.stderr)
    count = sum(map(len, series.points.values()))
    print(f"{len(results)} results, {count} points in the series, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
