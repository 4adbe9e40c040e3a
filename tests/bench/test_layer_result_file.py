# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A result file of layers that several runs write."""

from __future__ import annotations

import json

import pytest

from benchmarks.layer.result_file import open_results
from benchmarks.pages import parsed

MACHINE = {
    "machine": True,
    "gpu": "NVIDIA H200",
    "commit": "a",
    "date": "2026-11-29 08:00 UTC",
    "quack_kernels": "0.6.5",
}


def written(path, machine, *shapes, extends=True):
    """Lines of the file after a run of these shapes."""
    with open_results(path, machine, shapes if extends else None) as file:
        for shape in shapes:
            file.write(json.dumps({"shape": shape, "date": machine["date"]}) + "\n")
    return parsed(path.read_text(encoding="utf-8"))


def test_a_second_run_adds_its_shapes_and_keeps_the_first_machine_line(tmp_path):
    path, later = tmp_path / "h200-layer-peers.jsonl", {**MACHINE, "date": "2026-11-29 08:20 UTC", "power": "90 W"}
    assert written(path, MACHINE, "mixtral", "7b-256")[0] == MACHINE
    first, *lines = written(path, later, "dsv3-4k")
    assert first == MACHINE
    assert [line["shape"] for line in lines] == ["mixtral", "7b-256", "dsv3-4k"]


def test_a_shape_that_is_measured_again_has_only_its_new_lines(tmp_path):
    path, later = tmp_path / "h200-layer-peers.jsonl", {**MACHINE, "date": "2026-11-29 08:20 UTC"}
    written(path, MACHINE, "mixtral", "7b-256")
    _, *lines = written(path, later, "mixtral")
    assert lines == [{"shape": "7b-256", "date": MACHINE["date"]}, {"shape": "mixtral", "date": later["date"]}]


def test_a_run_that_does_not_extend_writes_the_file_anew(tmp_path):
    path = tmp_path / "h200-layer-peers.jsonl"
    written(path, MACHINE, "mixtral")
    assert len(written(path, {**MACHINE, "commit": "b"}, "7b-256", extends=False)) == 2


@pytest.mark.parametrize("other", [{"commit": "b"}, {"quack_kernels": "0.3.11"}, {"unsloth": "2026.10.9"}])
def test_other_sources_or_versions_are_refused_and_the_file_stays(tmp_path, other):
    path, (key, value) = tmp_path / "h200-layer-peers.jsonl", *other.items()
    before = written(path, MACHINE, "mixtral")
    message = f"^h200-layer-peers.jsonl: {key} must be {MACHINE.get(key)} as in the file, got {value}$"
    with pytest.raises(ValueError, match=message):
        open_results(path, {**MACHINE, **other}, ["7b-256"])
    assert parsed(path.read_text(encoding="utf-8")) == before


def test_a_file_without_a_machine_line_is_refused(tmp_path):
    path = tmp_path / "h200-layer-peers.jsonl"
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="machine must be None as in the file, got True"):
        open_results(path, MACHINE, ["7b-256"])


def test_lines_of_a_run_that_is_stopped_are_in_the_file(tmp_path):
    path = tmp_path / "h200-layer-peers.jsonl"
    file = open_results(path, MACHINE)
    file.write('{"shape": "mixtral"}\n')
    assert len(parsed(path.read_text(encoding="utf-8"))) == 2
    file.close()
