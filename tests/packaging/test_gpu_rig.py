# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs of tools/gpu_rig on machines without a GPU: stand-ins print the output of CUDA's programs."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "tools" / "gpu_rig" / "run.py"
SMI = "NVIDIA H200, 580.82.07\n"
# The stand-in writes the report that pytest would write.
SANITIZER = """
for argument; do
  case $argument in --junitxml=*) echo '<testsuite tests="3" failures="1"><testcase classname="a" name="b"><failure/>
    </testcase></testsuite>' > "${argument#*=}";; esac
done
echo "$@"
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Puts shell scripts in front of the PATH."""

    def install(**scripts: str) -> None:
        for name, script in scripts.items():
            program = tmp_path / name.replace("_", "-")
            program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    install(nvcc="echo Cuda compilation tools, release 13.0, V13.0.88", compute_sanitizer=SANITIZER)
    install(nvidia_smi=f"printf '{SMI}'")
    return install


def sanitize(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, RUN, "sanitize", "--out", folder, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_of_several_gpus_the_first_is_named(programs, tmp_path, gpus):
    programs(nvidia_smi=f"printf '{SMI * gpus}'")
    (tmp_path / "commit").write_text("abc1234\n", encoding="utf-8")
    found = runpy.run_path(str(RUN))["machine"](tmp_path / "commit")
    assert found["gpu"] == "NVIDIA H200"
    assert found["driver"] == "580.82.07"
    assert (found["cuda"], found["commit"]) == ("13.0", "abc1234")


def test_each_tool_runs_over_each_group_and_leaves_its_counts(programs, tmp_path):
    done = sanitize(tmp_path / "results", "--over", "core", "hopper", "--tools", "racecheck", "synccheck")
    assert done.returncode == 0, done.stderr
    suites = ("racecheck", "synccheck", "racecheck_hopper", "synccheck_hopper")
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    assert sorted(found) == sorted(suites)
    for suite, result in found.items():
        assert f"--tool={suite.partition('_')[0]} " in result["command"]
        assert result["sanitizer"] == ["0 errors"]
        assert (result["passed"], result["failed_tests"]) == (2, ["a::b"])


RACES = """
...========= Error: Race reported between Write access at pmo::cuda::Queue<pmo::Tile, (int)2>::push(int)+0xb in a.cuh:81
=========     and Read access at pmo::Queue<pmo::Tile, (int)2>::pop(int)+0x4d0 in a.cuh:89 [512 hazards]
=========     and Read access at void pmo::cuda::<unnamed>::gemm<(result)1>(pmo::Params)+0x7b40 in b.cu:9 [1 hazards]
=========
========= Invalid __global__ read of size 4 bytes
=========     at gemm(int)+0x10
========= Error: Race reported between Read access at pmo::Queue<pmo::Tile, (int)2>::pop(int)+0x1 in a.cuh:89
=========     and Write access at pmo::cuda::Queue<pmo::Tile, (int)2>::push(int)+0x2 in a.cuh:81 [1 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_errors_are_counted_by_the_functions_that_access_one_place():
    assert runpy.run_path(str(RUN))["read_errors"](RACES) == {
        "write Queue::push, read Queue::pop": 1,
        "write Queue::push, read gemm": 1,
        "Invalid __global__ read of size 4 bytes": 1,
        "read Queue::pop, write Queue::push": 1,
    }


@pytest.mark.parametrize(
    ("race", "is_open"),
    [
        ("write TileQueue::push, read TileQueue::pop", False),
        ("read TileQueue::pop, write TileQueue::push", False),
        ("write TileQueue::push, read gemm", True),
    ],
)
def test_races_that_no_mbarrier_orders_are_open(race, is_open):
    result = {"suite": "racecheck", "exit_status": 99, "failed": 0, "failed_tests": [], "errors": {race: 2}}
    found = runpy.run_path(str(RUN.with_name("report.py")))["open_points"]([result])
    points = [each for each in found if "not yet run" not in each]
    assert points == [f"racecheck: {race}"] * is_open


def test_a_suite_ends_after_its_limit_and_says_so(programs, tmp_path):
    programs(compute_sanitizer="sleep 60")
    done = sanitize(tmp_path / "results", "--over", "core", "--tools", "memcheck", "--limit", "1")
    result = json.loads((tmp_path / "results" / "memcheck.json").read_text())
    assert done.returncode == result["exit_status"] == 124
    assert (result["passed"], result["failed"], result["sanitizer"]) == (0, 0, [])


def test_a_tool_that_cannot_check_a_group_is_refused_by_name(programs, tmp_path):
    done = sanitize(tmp_path, "--over", "peers", "--tools", "initcheck")
    assert done.returncode == 2
    assert "sanitize: no suite initcheck_peers" in done.stderr


def test_a_result_has_the_hashes_of_the_code_that_its_suite_runs(monkeypatch, tmp_path):
    run = runpy.run_path(str(RUN))
    units = {f"{folder}/a.cu": {"hash": folder, "sources": []} for folder in ("core", "rig", "jitter")}
    (tmp_path / "machine_code.json").write_text(json.dumps(units), encoding="utf-8")
    of = run["machine_code"]
    monkeypatch.setitem(of.__globals__, "RIG", tmp_path)
    assert of("core") == of("memcheck_hopper") == {"core/a.cu": "core"}
    assert of("ops") == of("synccheck_peers") == {"core/a.cu": "core", "rig/a.cu": "rig"}
    assert of("jitter") == {"core/a.cu": "core", "jitter/a.cu": "jitter"}


PYTEST = """
for argument; do
  case $argument in --junitxml=*) echo '<testsuite tests="2"><testcase name="a"><properties>
    <property name="fuzz_cases" value="600"/></properties></testcase><testcase name="b"><failure/><properties>
    <property name="repeat" value="env A=b"/></properties></testcase></testsuite>' > "${argument#*=}";; esac
done
"""


def test_a_fuzz_run_has_a_new_seed_and_keeps_what_repeats_it(programs, tmp_path):
    programs(timeout=PYTEST)
    seeds = []
    for options in ([], [], ["--fuzz-seed=5"]):
        subprocess.run([sys.executable, RUN, "fuzz", "--out", tmp_path, *options], check=True, capture_output=True)
        result = json.loads((tmp_path / "fuzz.json").read_text())
        assert (result["fuzz_cases"], result["repeat"]) == (600, ["env A=b"])
        seeds += re.findall(r"--fuzz-seed=(\d+)", result["command"])
    assert len(set(seeds)) == len(seeds) == 3
    assert seeds[2] == "5"


def test_a_fuzz_run_has_20000_cases():
    found = runpy.run_path(str(RUN))
    files = [word for word in found["FUZZ_TESTS"] if word.endswith(".py")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    done = subprocess.run(command, cwd=RUN.parents[2], capture_output=True, text=True, check=True)
    assert done.stdout.count("::test_") * found["FUZZ_CASES"] >= 20_000


def test_runs_that_were_ended_are_open_points():
    points = runpy.run_path(str(RUN.with_name("report.py")))["open_points"]
    result = {"suite": "memcheck_peers", "failed_tests": [], "failed": 0, "sanitizer": []}
    texts = [points([{**result, "exit_status": status}])[-1] for status in (124, -9, 1)]
    assert texts == ["memcheck_peers: ended after its time limit"] * 2 + ["memcheck_peers: the run did not end well"]


def test_the_report_describes_every_suite():
    described = runpy.run_path(str(RUN.with_name("report.py")))["SUITES"]
    assert set(described) == set(runpy.run_path(str(RUN))["SUITES"])
