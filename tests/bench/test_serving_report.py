# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The page about layers with few tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import report

MACHINE = {"machine": True, "gpu": "NVIDIA X", "commit": "abc", "date": "today", "torch": "2", "read_tbs": 4.0}
GIVEN, PEER = "ours, maps given", "SGLang, maps given"


def time(us: float) -> dict[str, float]:
    return {"us": us, "min_us": us - 1, "max_us": us + 2}


def page_of(path: Path, machine: dict[str, Any] | None = None, **line: Any) -> str:
    """The page of a result with one line."""
    result = {"model": "A", "tokens": 4, "experts": 3, "floor_us": 12.34, "ours": time(20), GIVEN: time(16), **line}
    file = path / "x-serving.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in ({**MACHINE, **(machine or {})}, result)))
    return report.page([file])


def test_a_line_shows_spreads_and_how_much_slower_the_peer_is(tmp_path: Path) -> None:
    text = page_of(tmp_path, {"sglang": "0.5"}, **{PEER: time(24)})
    assert "| A | bf16 | 4 | 3 | 12.3 | 20.0 ±2.0 | 16.0 ±2.0 | 24.0 ±2.0 | 1.50 |\n" in text
    assert "## NVIDIA X\n\nCommit abc, today, PyTorch 2, SGLang 0.5; fastest read 4.00 TB/s.\n" in text


def test_a_peer_may_be_wrong_fail_or_be_absent(tmp_path: Path) -> None:
    assert "| 16.0 ±2.0 | wrong | - |\n" in page_of(tmp_path, **{PEER: {"error": "out is 1 of its norm off"}})
    assert "| 16.0 ±2.0 | failed | - |\n" in page_of(tmp_path, **{PEER: {"error": "ImportError: no kernel"}})
    text = page_of(tmp_path)
    assert "| 16.0 ±2.0 | - |\n" in text
    assert "SGLang 0" not in text


@pytest.mark.parametrize("name", ["ours", "ours, maps given"])
def test_wrong_results_of_this_package_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"wrong results at \[\('A', 'int8', 4\)\]; measure again$"):
        page_of(tmp_path, kind="int8", **{name: {"error": "RuntimeError: out is 1 of its norm off"}})


def test_each_peer_has_a_column_and_the_fastest_one_counts(tmp_path: Path) -> None:
    others = {"lmdeploy": time(30), "DeepGEMM, maps given": time(20)}
    text = page_of(tmp_path, {"peers": {"lmdeploy": "0.18"}}, **{PEER: time(24)}, **others)
    assert "| from ids | maps given | SGLang | lmdeploy | DeepGEMM | ratio |\n" in text
    assert "| 20.0 ±2.0 | 16.0 ±2.0 | 24.0 ±2.0 | 30.0 ±2.0 | 20.0 ±2.0 | 1.25 |\n" in text
    assert "PyTorch 2, lmdeploy 0.18; " in text


def model_page_of(path: Path, **line: Any) -> str:
    """The page of a decoder's result with one line."""
    machine = {
        "machine": True,
        "gpu": "NVIDIA X",
        "commit": "abc",
        "date": "today",
        "paddle": "3.3",
        "dense": "its own",
    }
    machine["sizes"] = {"hidden": 64, "experts": 8}
    result = {"format": "int8", "batch": 4, "eager": time(6000), "graph": time(2000), "same_bits": True, **line}
    file = path / "x-served-model.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in (machine, result)))
    return report.page([], [file])


def test_a_decoder_shows_the_tokens_per_second_of_its_graph(tmp_path: Path) -> None:
    text = model_page_of(tmp_path)
    assert "| int8 | 4 | 6000.0 ±2.0 | 2000.0 ±2.0 | 3.00 | 2,000 |\n" in text
    assert (
        "Commit abc, today, Paddle 3.3. Other operators than the package's: its own. Sizes: hidden 64, experts 8."
        in text
    )


def test_a_graph_with_other_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"the graph's bits differ at \[\('int8', 4\)\]; measure again$"):
        model_page_of(tmp_path, same_bits=False)


def test_the_results_of_the_repository_make_a_page(tmp_path: Path) -> None:
    target = tmp_path / "pages" / "serving_performance.md"
    assert report.main(target) == 0
    text = target.read_text(encoding="utf-8")
    assert "## NVIDIA H200" in text
    assert "| wrong |" not in text
