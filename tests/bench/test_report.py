# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Pages and pictures show the newest result files and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.kernels import plot, report
from benchmarks.kernels.results import load_run, run_paths, write_line
from tests.pictures import check_that_labels_lie_apart, labels_of

from .test_targets import ROW

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = {
    "device": "cuda",
    "set": "targets",
    "gpu": "Imagined GPU",
    "cpu": "Imagined CPU",
    "copy_gbps": 4000.0,
    "floor_one_launch_us": 3.25,
    "commit": "abc123",
    "date": "2026-01-02 03:04 UTC",
    "command": "python -m benchmarks.kernels",
}


PAGES = "performance.md", "performance_gpu.md", "performance_cpu.md"
CPU_MACHINE = {"device": "cpu", "threads": 3, "copy_gbps": 40.0}


def write(path, rows, **machine):
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        write_line(file, {**MACHINE, **machine})
        for row in rows:
            write_line(file, row)
        write_line(file, {"sm_clock_at_end": "7 MHz"})


def timed(us, **changes):
    measured = {"impl": "core", "us": us, "p5": us - 0.1, "p95": us + 0.1, "samples": 60, "frac_copy": 0.5}
    return replace(ROW, **{**measured, **changes})


def make(tmp_path):
    (tmp_path / "docs").mkdir(exist_ok=True)
    docs = str(tmp_path / "docs")
    status = report.main(["--results", str(tmp_path / "results"), "--out", docs, "--docs", docs])
    pages = [tmp_path / "docs" / name for name in PAGES]
    return status, "".join(page.read_text(encoding="utf-8") for page in pages if page.exists()) or None


def test_rows_survive_writing_and_reading(tmp_path):
    rows = [timed(4.5), timed(6.0, impl="other", launches=3, note="slow")]
    write(tmp_path / "run.jsonl", rows)
    run = load_run(tmp_path / "run.jsonl")
    assert run.rows == rows
    assert run.machine == {**MACHINE, "sm_clock_at_end": "7 MHz"}


def test_a_file_of_something_else_is_an_error(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"temperature": 20}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1: unknown fields temperature"):
        load_run(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="must describe the machine"):
        load_run(path)


def test_without_results_nothing_is_written(tmp_path, capsys):
    assert make(tmp_path) == (1, None)
    assert "there are no results" in capsys.readouterr().err


def test_page_names_its_source_and_holds_the_measured_figures(tmp_path):
    rows = [timed(4.71, launches=2), timed(7.13, impl="te triton"), replace(ROW, impl="bad", check="failed: out: 1")]
    write(tmp_path / "results" / "run.jsonl", rows)
    status, page = make(tmp_path)
    assert status == 0
    for text in ("run.jsonl", "Imagined GPU", "abc123", "2026-01-02", "sm clock at end 7 MHz", "4000 GB/s", "3.25 us"):
        assert text in page
    table = next(line for line in page.splitlines() if line.startswith("| tileops-32 |"))
    assert "**4.7**" in table
    assert "7.1" in table
    assert "Targets" not in page
    assert "| unpermute:weighted | tileops-32 | bad | out: 1 |" in page
    assert "![" in page
    with Image.open(tmp_path / "docs" / "performance.png") as picture:
        assert picture.width > 500


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h200-targets", "cpu-2core-targets"])
def test_the_labels_of_a_picture_lie_apart_and_name_models(name):
    figure = plot.picture(load_run(RESULTS / f"{name}.jsonl"))
    check_that_labels_lie_apart(figure)
    assert any(text.startswith("DeepSeek-V3\n4096 tokens\n") for text, _ in labels_of(figure))


def test_only_the_newest_run_of_a_set_counts(tmp_path):
    write(tmp_path / "results" / "b.jsonl", [timed(111.0)], date="2026-01-01 00:00 UTC")
    write(tmp_path / "results" / "a.jsonl", [timed(222.0)], date="2026-01-03 00:00 UTC")
    write(tmp_path / "results" / "c.jsonl", [timed(333.0)], date="2026-01-01 00:00 UTC", set="matrix")
    _, page = make(tmp_path)
    assert "222.0" in page
    assert "333.0" in page
    assert "111.0" not in page


def test_a_run_of_a_part_of_a_set_stands_beside_the_whole_one(tmp_path):
    whole = [timed(111.0), timed(444.0, shape="tileops-128")]
    write(tmp_path / "results" / "whole.jsonl", whole, date="2026-01-02 00:00 UTC")
    write(tmp_path / "results" / "part.jsonl", [timed(222.0)], date="2026-01-03 00:00 UTC")
    write(tmp_path / "results" / "before.jsonl", whole, date="2026-01-01 00:00 UTC")
    _, page = make(tmp_path)
    newest, rest = page.split("## Imagined GPU, set `targets`, 2026-01-02 00:00 UTC: tileops-128, tileops-32\n")
    assert "## Imagined GPU, set `targets`, 2026-01-03 00:00 UTC: tileops-32\n" in newest
    assert "222.0" in newest
    assert "performance.png" not in newest, "the picture is of the widest run"
    assert "performance.png" in rest
    assert "444.0" in rest
    assert "before.jsonl" not in page


def test_machines_have_sections_of_their_own(tmp_path):
    on_cpu = {"mode": "cpu", "cold": False}
    rows = [timed(900.0, **on_cpu), timed(950.0, impl="public function", **on_cpu)]
    write(tmp_path / "results" / "cpu.jsonl", [*rows, timed(1900.0, impl="paddle ops", **on_cpu)], **CPU_MACHINE)
    write(tmp_path / "results" / "gpu.jsonl", [timed(9.0)])
    _, page = make(tmp_path)
    gpu, cpu = page.split("## Imagined CPU, 3 cores")
    assert "## Imagined GPU" in gpu
    assert "**9.0**" in gpu
    assert "| 950.0" in cpu
    assert (tmp_path / "docs" / "performance_cpu.png").exists()


def test_cores_make_another_machine(tmp_path):
    for cores in (3, 5):
        rows = [timed(100.0 * cores, mode="cpu", cold=False)]
        write(tmp_path / "results" / f"{cores}.jsonl", rows, **{**CPU_MACHINE, "threads": cores})
    _, page = make(tmp_path)
    for cores in (3, 5):
        assert f"## Imagined CPU, {cores} cores" in page
        assert f"**{100.0 * cores}**" in page


def test_hardware_counters_have_a_section_of_their_own(tmp_path):
    write(tmp_path / "results" / "run.jsonl", [timed(4.0)])
    line = {"operation": "permute:bf16", "shape": "dsv3", "kernel": "fused", "us": 131.04, "min_mb": 528.5}
    line |= {"dram_read_mb": 58.71, "dram_write_mb": 466.2, "dram_percent": 81.0, "l2_percent": 70.5}
    line |= {"issue_percent": 3.0, "warps_percent": 40.0, "stall_wait": 1.0, "stall_barrier": 95.4, "stall_drain": 2.25}
    (tmp_path / "results" / "ncu").mkdir()
    with (tmp_path / "results" / "ncu" / "gpu.jsonl").open("w", encoding="utf-8") as file:
        write_line(file, {"gpu": "Imagined GPU", "commit": "def456", "date": "2026-01-02 03:04 UTC"})
        file.write(json.dumps(line) + "\n")
    _, page = make(tmp_path)
    section = page.split("## What bounds the kernels: Imagined GPU")[1]
    assert "commit def456" in section
    cells = "permute:bf16 | dsv3 | fused | 131.0 | 528.5 | 58.7 | 466.2 | 81.0 | 70.5 | 3.0 | 40.0"
    assert f"| {cells} | barrier 95.4, drain 2.2 |" in section


def write_products(path, lines, **machine):
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        write_line(file, {"gpu": "Imagined GPU", "date": "2026-01-02", **machine})
        for line in lines:
            file.write(json.dumps({"shape": "dsv3", **line}) + "\n")
        file.write('{"total_s": 9.5}\n')


def product(op, us, config=None):
    return {"op": op, "impl": "triton", "config": config, "us": us, "tflops": 123.4}


def torchs(op, us):
    return {"op": op, "impl": "torch", "us": us, "tflops": 99.0}


def products_section(page):
    return page.split("## Grouped products: Imagined GPU")[1]


def test_grouped_products_are_set_beside_torch_and_beside_two_launches(tmp_path):
    write(tmp_path / "results" / "run.jsonl", [timed(4.0)])
    cut = [128, 256, 64, 8, 3, 8, 1, True]
    lines = [torchs("gathered", 6000.0), product("gathered", 4800.0), product("gathered", 1.0, cut)]
    lines += [torchs("gathered_in_load", 6000.0), product("gathered_in_load", 6400.0, [*cut[:-1], False])]
    lines += [product("dw", 77.0)]
    write_products(tmp_path / "results" / "gpu-grouped-gemm.jsonl", lines, commit="def456", triton="3.6")
    _, page = make(tmp_path)
    section = products_section(page)
    assert "From `benchmarks/results/gpu-grouped-gemm.jsonl`" in section
    for fact in ("commit def456", "triton 3.6", "date 2026-01-02"):
        assert fact in section
    assert "| gathered | dsv3 | **4800** | 123 | 6000 | 1.25 |  |  |" in section
    assert "| gathered_in_load | dsv3 | **6400** | 123 | 6000 | 0.94 | 4800 | 0.75 |" in section
    assert "| dw | dsv3 | **77** | 123 |  |  |  |  |" in section
    assert "| gathered | dsv3 | **1** |" not in section, "only the default configuration"


def test_wrong_results_of_this_package_are_refused_and_refused_arguments_left_out(tmp_path, capsys):
    wrong = {**product("dx", 1.0), "error": "rows are off"}
    write(
        tmp_path / "results" / "run.jsonl",
        [timed(4.0), replace(ROW, impl="core", check="failed: INVALID_ARGUMENT: topk")],
    )
    assert "INVALID_ARGUMENT" not in make(tmp_path)[1]
    write_products(tmp_path / "results" / "gpu-grouped-gemm.jsonl", [wrong])
    assert make(tmp_path)[0] == 1
    assert "dx, dsv3: the result must be right, but got rows are off; measure it again" in capsys.readouterr().err
    (tmp_path / "results" / "gpu-grouped-gemm.jsonl").unlink()
    write(tmp_path / "results" / "run.jsonl", [timed(4.0), replace(ROW, impl="core", check="failed: out: 1")])
    assert make(tmp_path)[0] == 1
    assert "tileops-32: core must be right, but got out: 1; measure it again" in capsys.readouterr().err


def test_only_the_newest_grouped_products_count(tmp_path):
    write(tmp_path / "results" / "run.jsonl", [timed(4.0)])
    write_products(tmp_path / "results" / "b-grouped-gemm.jsonl", [product("dw", 111.0)], date="2026-01-01 10:00 UTC")
    write_products(tmp_path / "results" / "a-grouped-gemm.jsonl", [product("dw", 222.0)], date="2026-01-03 10:00 UTC")
    section = products_section(make(tmp_path)[1])
    assert "**222**" in section
    assert "**111**" not in section


def test_without_grouped_products_there_is_no_section_of_them(tmp_path):
    write(tmp_path / "results" / "run.jsonl", [timed(4.0)])
    assert "Grouped products" not in make(tmp_path)[1]


def test_grouped_products_of_an_unknown_machine_are_an_error(tmp_path, capsys):
    write(tmp_path / "results" / "run.jsonl", [timed(4.0)])
    (tmp_path / "results" / "a-grouped-gemm.jsonl").write_text('{"op": "dw"}\n', encoding="utf-8")
    assert make(tmp_path) == (1, None)
    assert "must describe the machine" in capsys.readouterr().err


def test_columns_that_say_nothing_are_left_out(tmp_path):
    rows = [timed(900.0, mode="cpu", cold=False), timed(800.0, impl="memcpy", mode="cpu", cold=False)]
    write(tmp_path / "results" / "cpu.jsonl", rows, **CPU_MACHINE)
    _, page = make(tmp_path)
    header = next(line for line in page.splitlines() if line.startswith("| case |"))
    assert header.endswith("| us | p5 .. p95 | of copy | memcpy |")


def test_padding_and_other_routings_are_told_apart(tmp_path):
    padded = timed(5.0, own_case=False, alignment=128)
    write(tmp_path / "results" / "run.jsonl", [padded, replace(padded, fill=False, us=3.0)], set="padding")
    _, page = make(tmp_path)
    assert "tileops-32, uniform, A=128 |" in page
    assert "tileops-32, uniform, A=128, not filled |" in page


def test_the_summary_and_the_picture_in_git_are_what_the_command_writes():
    runs = report.newest_runs(map(load_run, run_paths(RESULTS)))
    made = report.summaries(RESULTS, runs)
    assert set(made) == {"performance.md", "speed.svg"}
    for name, text in made.items():
        assert text == (ROOT / "docs" / name).read_text("utf-8"), "run `make bench-report`"
