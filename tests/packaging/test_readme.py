# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The README's statements and programs hold."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import pytest

from benchmarks.kernels import report
from benchmarks.kernels.results import load_run, run_paths
from paddle_moe_ops import _build_check
from paddle_moe_ops.__main__ import _parser
from tests.packaging.subprocesses import run_command, run_forked

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FUNCTIONS = (ROOT / "docs" / "functions.md").read_text(encoding="utf-8")
SUPPORT = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
FRESH = str(ROOT / "tools" / "fresh_environments.py")


CODE = runpy.run_path(FRESH)["programs"]()


@pytest.fixture
def run_code(tmp_path):
    """A function that runs a program outside of the checkout and returns its output lines."""

    def run(code: str) -> list[str]:
        done = run_forked(code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_programs_have_at_most_15_lines_of_code():
    assert len(CODE) == 2
    for code in CODE:
        assert len([line for line in code.splitlines() if line.strip()]) <= 15


def test_the_quick_start_trains_a_layer_and_its_router(run_code):
    lines = run_code(CODE[0])
    losses = [float(found[1]) for line in lines if (found := re.search(r"loss ([\d.]+),", line))]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert all(float(line.rpartition(" ")[2]) > 0 for line in lines)
    assert runpy.run_path(FRESH)["router_learns"](lines[-1])


def test_paddles_pair_gives_the_router_its_gradient(run_code):
    assert run_code(CODE[1]) == [runpy.run_path(FRESH)["PAIR_PRINTS"]]


def test_install_section_has_the_lines_that_are_run_in_fresh_environments():
    lines = runpy.run_path(FRESH)["install_lines"]().splitlines()
    assert len(lines) == 3
    assert lines[1] == "pip install --no-build-isolation ."


def test_function_table_names_public_functions():
    cells = re.findall(r"^\| (`[^|]+`[^|]*) \|", FUNCTIONS, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"[` ](?:with )?([\w.]+)\(", cell)]
    assert {"moe_permute", "moe_unpermute", "route", "permute", "unpermute", "gemm.grouped_gemm"} <= set(names)
    for name in names:
        module, _, function = f"paddle_moe_ops.{name}".rpartition(".")
        assert function in importlib.import_module(module).__all__
    modules = [name for cell in cells for name in re.findall(r"`(?:paddle_moe_ops)?\.([\w.]+)`", cell)]
    assert len(modules) >= 5
    for name in modules:
        importlib.import_module(f"paddle_moe_ops.{name}")


def test_commands_are_make_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^    make (\w+)", README, re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_commands_of_the_package_are_listed_and_the_example_of_bench_is_taken():
    (listed,) = re.findall(r"`python -m paddle_moe_ops ([a-z]+(?: \| [a-z]+)+)`", FUNCTIONS)
    done = run_command("--help")
    assert re.findall(r"^    ([a-z]+) ", done.stdout, re.MULTILINE) == listed.split(" | ")
    examples = re.findall(r"^    python -m paddle_moe_ops (bench --.*)$", FUNCTIONS, re.MULTILINE)
    examples += re.findall(r"`python -m paddle_moe_ops (bench --[^`]+)`", README)
    assert [_parser().parse_args(each.split()).layer for each in examples] == [True, False, True]


def test_linked_files_exist():
    """GitHub's own pages of the repository begin with ../.. from the folder of its files."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    pages = [target for target in targets if target.startswith("../../")]
    workflows = {f"actions/workflows/{path.name}" for path in (ROOT / ".github" / "workflows").iterdir()}
    known = {"issues", *workflows, *(f"{name}/badge.svg" for name in workflows)}
    assert {page.removeprefix("../../") for page in pages} <= known
    for target in set(targets) - set(pages):
        assert (ROOT / target).exists(), target


def test_badges_and_requirements_name_the_supported_versions():
    first, *_, last = re.findall(r"[\d.]+", re.findall(r"^\| Python \| ([\d., ]+) \|", SUPPORT, re.MULTILINE)[0])
    assert f"badge/Python-{first}_to_{last}-" in README
    assert f"\n| Python | {first} to {last} |\n" in README
    assert f"badge/Paddle-{'_and_'.join(_build_check.TESTED_PADDLE)}-" in README
    assert f"\n| Paddle | {' or '.join(_build_check.TESTED_PADDLE)}: " in README
    assert "nvcc 11.8 or newer" in SUPPORT
    assert "CUDA 11.8 or newer with nvcc" in README


def test_figures_of_speed_are_those_of_the_measurements():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    section = README.partition("\n## Speed of moving rows")[2].partition("\n## ")[0]
    layers = re.findall(r"one NVIDIA H200\*\*: (\S+) times .* forward and (\S+) times backward", page)
    assert layers == re.findall(r"On one H200 the kernels are (\S+) times as fast forward and (\S+) times\n", README)
    summary = page.partition("### NVIDIA H200\n")[2].partition("\nSmall calls")[0]
    of_copy = [float(cell) for cell in re.findall(r"\| (\d\.\d\d) \|", summary)]
    results = ROOT / "benchmarks" / "results"
    details = report.pages(results, report.newest_runs(map(load_run, run_paths(results))), {})[report.GPU_PAGE]
    measured = details.partition("## NVIDIA H200, set `targets`")[2].partition("\n## ")[0]

    def row(operation: str, case: str) -> list[str]:
        table = measured.partition(f"### {operation}\n")[2].partition("\n### ")[0]
        (line,) = re.findall(rf"^\| {case} \|.*$", table, re.MULTILINE)
        return [cell.strip(" *") for cell in line.split("|")]

    slowest = float(row("route_permute:fp8", "ernie-21b")[9])
    assert slowest <= min(of_copy)
    span = f"reach {slowest:.2f} (float8 rows of 2560 columns) to {max(of_copy):.2f} of the speed of a copy"
    assert span in " ".join(section.split())
    tokens = row("moe_permute:bf16", "paddle-production")[2]
    assert f"({tokens} tokens," in section
    assert f"reaches {float(row('moe_permute:bf16', 'paddle-production')[9]):.2f} for `moe_permute`" in section
    weighted = row("unpermute:weighted", "paddle-production")
    assert f"\nand {float(weighted[9]):.2f} for the weighted sum" in section
    assert f"({float(weighted[15]):.0f} us, ours {float(weighted[7]):.0f})" in section


MARKS = {"ran": "已运行", "compile-tested": "仅编译测试", "-": "-"}


def marks_of(text: str) -> list[list[str]]:
    """The cells of the table of what works, without its heads and names."""
    rows = [
        line.strip(" |").split(" | ") for line in text.splitlines() if line.endswith(" |") and line.count(" | ") == 4
    ]
    return [row[1:] for row in rows[1:]]


def test_the_table_of_what_works_says_ran_or_compile_tested():
    marks = marks_of(README)
    assert len(marks) == 6
    assert {mark for row in marks for mark in row} == set(MARKS)
    assert {row[-1] for row in marks} == {"compile-tested"}  # PyPI has no GPU wheel of Paddle 3


def test_the_chinese_readme_has_the_same_programs_commands_links_numbers_and_marks():
    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    for pattern in (
        r"```\w+\n.*?```",
        r"(?:^    \S[^\n]*\n)+",
        r"\]\((?!https?:|README)([^)]+)\)",
        r"^#+ ",
        r"`[^`\n]+`",
    ):
        found, due = (sorted(re.findall(pattern, text, re.DOTALL | re.MULTILINE)) for text in (chinese, README))
        assert found == due
    assert sorted(re.findall(r"\d+(?:\.\d+)*", chinese)) == sorted(re.findall(r"\d+(?:\.\d+)*", README))
    assert marks_of(chinese) == [[MARKS[mark] for mark in row] for row in marks_of(README)]
    assert "](README.zh.md)" in README
    assert "](README.md)" in chinese


def test_the_cuda_versions_of_released_wheels_are_named_in_both_languages():
    """Whoever installs from sources can take the Paddle that a released wheel needs."""
    matrix = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")
    (released,) = re.findall(r"^ +cuda: \[(.*)\]$", matrix, re.MULTILINE)
    for page in (README, (ROOT / "README.zh.md").read_text(encoding="utf-8")):
        assert set(released.split(", ")) <= set(re.findall(r"`(cu\d+)`", page))
