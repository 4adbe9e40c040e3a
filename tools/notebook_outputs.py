#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of examples/quick_tour.ipynb and writes their outputs into it, which GitHub shows.

A cell's output is its text, the value of its last expression and its pictures, as Jupyter has them.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "quick_tour.ipynb"


def main() -> int:
    os.environ["MPLBACKEND"] = "Agg"
    sys.path.insert(0, str(ROOT))
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(cells, outputs_of(cells), strict=True), 1):
        cell["execution_count"] = number
        cell["outputs"] = [
            {**each, "execution_count": number} if each["output_type"] == "execute_result" else each for each in outputs
        ]
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def outputs_of(cells: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Run cells in their order, and return the outputs of each."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(compile(tree, "cell", "exec"), names)
            value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        found: list[dict[str, Any]] = []
        if text.getvalue():
            found.append({"name": "stdout", "output_type": "stream", "text": text.getvalue().splitlines(keepends=True)})
        if value is not None and " at 0x" not in repr(value):  # an address differs from run to run
            found.append({"data": {"text/plain": [repr(value)]}, "metadata": {}, "output_type": "execute_result"})
        found += [
            {"data": {"image/png": picture}, "metadata": {}, "output_type": "display_data"} for picture in _pictures()
        ]
        yield found


def _pictures() -> Iterator[str]:
    """The open figures in base64, which are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        pyplot.close(number)
        yield base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    raise SystemExit(main())
