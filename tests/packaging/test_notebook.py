# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The notebook of the quick tour: its cells run in order, and it holds nothing of the machine that it was made on."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "quick_tour.ipynb"
NOTEBOOK = json.loads(PATH.read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def run_cells(monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "Agg")

    def run() -> tuple[dict, str]:
        names: dict = {}
        for number, code in enumerate(CODE):
            exec(compile(code, f"cell {number}", "exec"), names)
        return names, capsys.readouterr().out

    return run


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_cells_run_in_order_and_what_is_trained_learns(run_cells):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    names, text = run_cells()
    for losses in (names["router_losses"], names["layer_losses"]):
        assert losses[-1] < 0.9 * losses[0]
    assert "num_experts" in names["message"] or "routing" in names["message"]
    assert re.search(r"^permute", text, re.MULTILINE)
    drawn = [label.get_text() for label in names["axes"].texts]
    assert [label for label in drawn if label.isdigit()] == ["0", "2", "2", "0", "1"]
    pyplot.close(names["figure"])


def test_without_matplotlib_a_cell_says_so_and_the_others_run(run_cells, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    names, text = run_cells()
    assert "pip install matplotlib" in text
    assert "layer_losses" in names


def test_it_is_a_notebook_of_format_4_without_outputs():
    assert NOTEBOOK["nbformat"] == 4
    assert NOTEBOOK["nbformat_minor"] >= 5
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            wanted |= {"execution_count", "outputs"}
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
        assert set(cell) == wanted
        assert cell["metadata"] == {}
    assert NOTEBOOK["metadata"]["language_info"] == {"name": "python"}


def test_its_links_lead_to_files():
    text = "".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) >= 3
    for target in targets:
        assert (PATH.parent / target).exists(), target
