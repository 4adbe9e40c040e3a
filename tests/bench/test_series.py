# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The series of geometric means notices losses, and tables of one shape agree or say why."""

from __future__ import annotations

import json

import pytest

from benchmarks.series import differences
from benchmarks.series.__main__ import RESULTS, main
from benchmarks.series.figures import Figure, result_of
from benchmarks.series.points import Series, points_of

from .test_layer_report import MACHINE, line


def layers(commit, *lines, gpu="NVIDIA H200"):
    machine = {**MACHINE, "gpu": gpu, "commit": commit}
    return "".join(f"{json.dumps(each)}\n" for each in (machine, *lines))


@pytest.fixture
def check(tmp_path, capsys):
    """Writes results, runs the command, and returns its exit status and complaints."""

    def run(*options, **files):
        for name, text in files.items():
            (tmp_path / f"{name.replace('_', '-')}.jsonl").write_text(text)
        status = main(["--results", str(tmp_path), *options])
        return status, capsys.readouterr().err

    return run


def test_a_loss_of_4_percent_fails_with_both_values_and_commits_until_it_has_a_reason(check, tmp_path):
    assert check(h200_layer=layers("old", line(forward=600.0), line("olmoe", forward=500.0)))[0] == 0
    slower = layers("new", line(forward=576.0), line("olmoe", forward=480.0))
    for options in ((), ("--check",), ()):  # it is not compared with itself the next time
        status, complaints = check(*options, h200_layer=slower)
        assert status == 1
        (complaint,) = complaints.splitlines()
        assert "NVIDIA H200, layer, layer: ours, graph, even, forward, 2 shapes: 525.81 TFLOP/s at new" in complaint
        assert "is 4.0 % below 547.72 TFLOP/s at old" in complaint
    assert check("--why", "*backward", "another figure", h200_layer=slower)[0] == 1
    assert check("--why", "*forward", "a slower clock", h200_layer=slower)[0] == 0
    assert Series(tmp_path).points["h200"][-1].why == "a slower clock"
    assert check("--check", h200_layer=slower) == (0, "")


def test_a_loss_of_2_percent_passes_and_becomes_the_last_point(check, tmp_path):
    check(h200_layer=layers("old", line(forward=600.0)))
    assert check(h200_layer=layers("new", line(forward=588.0))) == (0, "")
    values = [each.value for each in Series(tmp_path).points["h200"] if each.figure.endswith("forward")]
    assert values == [600.0, 588.0]


@pytest.mark.parametrize(
    "other",
    [
        {"h100_layer": layers("new", line(forward=300.0), gpu="NVIDIA H100")},
        {"h200_layer": layers("new", line(forward=300.0), line("olmoe", forward=300.0))},
        {"h200_layer": layers("new", line("olmoe", forward=300.0))},
    ],
    ids=["another GPU", "more shapes", "another shape"],
)
def test_other_gpus_and_other_sets_of_shapes_are_not_compared(check, other):
    check(h200_layer=layers("old", line(forward=600.0)))
    assert check(**other) == (0, "")


def test_the_check_writes_nothing_and_misses_results_that_the_series_lacks(check, tmp_path):
    status, complaints = check("--check", h200_layer=layers("old", line()))
    assert status == 1
    assert "the series lacks 2 points of the results" in complaints
    assert not (tmp_path / "series").exists()


@pytest.mark.parametrize(("commit", "status"), [("b", 0), ("another", 1)])
def test_tables_5_percent_apart_need_a_reason_for_these_commits(check, tmp_path, commit, status):
    files = {"h200_layer": layers("a", line(forward=600.0)), "h200_layer_sonic": layers("b", line(forward=570.0))}
    failed, complaints = check(**files)
    assert failed == 1
    assert "570.0 TFLOP/s in h200-layer-sonic.jsonl (b, 2026-11-22)" in complaints
    assert "600.0 TFLOP/s in h200-layer.jsonl (a, 2026-11-22) are 5.3 % apart, without a reason" in complaints
    reason = {"files": ["h200-layer-sonic.jsonl", "h200-layer.jsonl"], "commits": [commit, "a"]}
    reason |= {"figure": "layer: ours*", "shape": "ernie-*", "why": "Calls take turns."}
    (tmp_path / "differences.json").write_text(json.dumps([reason]))
    found, complaints = check(**files)
    assert found == status
    assert ("is about no difference" in complaints) == bool(status)
    section = differences.section(tmp_path, ("layer", "layer-sonic"))
    assert ("1 figures, at most 5 % apart. Calls take turns." in section) == (not status)


def test_tables_2_percent_apart_agree(check):
    files = {"h200_layer": layers("a", line(forward=600.0)), "h200_layer_sonic": layers("b", line(forward=590.0))}
    assert check(**files) == (0, "")


def test_exchanges_have_a_point_in_gigabytes_a_second_and_layers_in_teraflops():
    shape = {"shape": "dsv3", "tokens": 8192, "ranks": 2, "bytes": 1_000_000}
    lines = [
        {"machine": True, "gpus": ["NVIDIA H200"] * 2, "commit": "abc", "date": "2026-11-24"},
        {**shape, "what": "p2p_copy", "us": 2.0},
        {**shape, "what": "dispatch", "us": 4.0},
        {**shape, "what": "layer_forward", "us": 9.0, "tflops": 500.0},
    ]
    text = "".join(f"{json.dumps(each)}\n" for each in lines)
    result = result_of("h200x2-expert-parallel.jsonl", text)
    found = [(each.gpu, each.figure, each.value, each.unit, each.shapes) for each in points_of(result)]
    assert found == [
        ("2 x NVIDIA H200", "expert-parallel, expert parallel: dispatch", 250.0, "GB/s", ("dsv3, 8192",)),
        ("2 x NVIDIA H200", "expert-parallel, expert parallel: layer_forward", 500.0, "TFLOP/s", ("dsv3, 8192",)),
    ]


def test_layers_of_ligercute_are_figures_but_no_points():
    times = {"shape": "dsv3", "tokens": 8192, "transport": "LigerCute", "kernels": "relocatable", "us": 9.0}
    lines = [
        {"machine": True, "gpus": ["NVIDIA H200"] * 2, "commit": "abc", "date": "2026-11-29"},
        {**times, "what": "layer_forward", "tflops": 500.0},
        {**times, "what": "layer"},
        {"shape": "mixtral", "tokens": 8192, "kernels": "relocatable", "failed": "no end"},
    ]
    result = result_of("h200x2-expert-parallel-liger.jsonl", "".join(f"{json.dumps(each)}\n" for each in lines))
    name = "expert parallel: layer_forward, LigerCute, relocatable"
    assert [(each.name, each.value) for each in result.figures] == [(name, 500.0)]
    assert points_of(result) == []


@pytest.mark.parametrize(
    ("kind", "title", "item_bytes"),
    [({}, "few tokens", 2), ({"kind": "bf16"}, "few tokens", 2), ({"kind": "int4"}, "few tokens, int4", 0.5)],
    ids=str,
)
def test_layers_with_few_tokens_are_bytes_of_the_matrices_that_are_read_per_time(
    kind: dict[str, str], title: str, item_bytes: float
) -> None:
    machine = '{"machine": true, "gpu": "NVIDIA H200", "date": "2026-11-28"}'
    found = {"model": "Qwen3-30B", **kind, "tokens": 4, "experts": 10, "ours": {"us": 50.0}, "SGLang": {"error": "x"}}
    result = result_of("h200-serving.jsonl", f"{machine}\n{json.dumps(found)}\n")
    assert result is not None
    read = item_bytes * 10 * 3 * 2048 * 768 / 50 / 1e3
    assert result.figures == [Figure(f"{title}: ours", "Qwen3-30B, 4", read, "GB/s", True)]


def test_loss_curves_have_no_speeds() -> None:
    machine = '{"machine": true, "gpu": "NVIDIA H200", "date": "2026-11-28"}'
    result = result_of("h200-loss-curves.jsonl", f'{machine}\n{{"model": "demo", "step": 100, "train": 2.8}}\n')
    assert result is not None
    assert result.figures == []


def test_a_benchmark_without_a_reader_is_an_error():
    with pytest.raises(ValueError, match=r"h200-other\.jsonl: the name must be"):
        result_of("h200-other.jsonl", layers("a", line()))
    assert result_of("cpu-other.jsonl", '{"machine": true, "cpu": "a", "date": "2026-11-24"}\n') is None


def test_the_committed_results_pass_the_check(capsys):
    assert main(["--results", str(RESULTS), "--check"]) == 0, capsys.readouterr().err
