# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The notebook of the quick tour: its cells run in order, and it holds nothing of the machine that it was made on."""

from __future__ import annotations

import base64
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH, TOOL = ROOT / "examples" / "quick_tour.ipynb", ROOT / "tools" / "notebook_outputs.py"
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


def test_its_outputs_are_those_of_a_run_apart_from_numbers(monkeypatch):
    pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    found = runpy.run_path(str(TOOL))["outputs_of"](cells)
    for cell, outputs in zip(cells, found, strict=True):
        if "explain(" in cell["source"][-1]:  # the devices of a machine
            continue
        assert [each["output_type"] for each in cell["outputs"]] == [each["output_type"] for each in outputs]
        assert [words_of(each) for each in cell["outputs"]] == [words_of(each) for each in outputs]
    pictures = [each for cell in cells for each in cell["outputs"] if each["output_type"] == "display_data"]
    (picture,) = (base64.b64decode(each["data"]["image/png"]) for each in pictures)
    assert picture.startswith(b"\x89PNG")


def words_of(output: dict) -> str:
    text = output.get("text") or output["data"].get("text/plain", [])
    return re.sub(r"\d+(\.\d+)?", "#", "".join(text))


def test_it_is_a_notebook_of_format_4():
    assert NOTEBOOK["nbformat"] == 4
    assert NOTEBOOK["nbformat_minor"] >= 5
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            wanted |= {"execution_count", "outputs"}
        assert set(cell) == wanted
        assert cell["metadata"] == {}
    assert NOTEBOOK["metadata"]["language_info"] == {"name": "python"}


def test_its_links_lead_to_files():
    text = "".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) >= 3
    for target in targets:
        assert (PATH.parent / target).exists(), target
