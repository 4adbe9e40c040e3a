# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The examples run and report success."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.subprocesses import run_module

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = run_module(f"examples.{name.removesuffix('.py')}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ernies_own_nodes_run_through_the_patch_and_match_the_dense_formulation():
    lines = run("ernie_unzip_zip.py").splitlines()
    assert lines[0].endswith("this package (patch_paddle)")
    assert [line.split()[0] for line in lines[1:4]] == ["output", "d_tokens", "d_probs"]
    assert lines[-1].endswith("PASSED")


def test_a_block_made_of_operators_trains_its_router_and_matches_the_dense_formulation():
    lines = run("moe_block.py", "--steps", "40").splitlines()
    assert lines[-1] == "PASSED"
    first, last = re.findall(r"loss ([0-9.]+) -> ([0-9.]+),", lines[-3])[0]
    assert float(last) < 0.5 * float(first)


def test_a_decoder_with_quantised_experts_is_served():
    lines = run("serve_ernie45_moe.py", "--format", "int8", "--batch", "2").splitlines()
    assert re.fullmatch(r"eager: \d+ tokens/s", lines[-3])
    assert len(lines[-2].split()) == 50
    assert lines[-1] == "PASSED"


@pytest.mark.slow
def test_a_language_model_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path):
    whole, half, rest = (
        run("train_language_model.py", "--steps", steps, "--checkpoint", str(tmp_path / name))
        for steps, name in (("8", "whole"), ("4", "half"), ("8", "half"))
    )
    float8 = ("--steps", "12", "--checkpoint", str(tmp_path / "half"), "--float8")
    texts = whole, half, rest, run("train_language_model.py", *float8)
    losses = [re.findall(r"([0-9.]+) after (\d+)", text) for text in texts]
    assert [[steps for _, steps in each] for each in losses] == [["0", "8"], ["0", "4"], ["4", "8"], ["8", "12"]]
    assert losses[1][1] == losses[2][0]
    assert losses[2][1] == losses[0][1]
    assert losses[3][0] != losses[2][1]
    assert float(losses[3][0][0]) == pytest.approx(float(losses[2][1][0]), rel=0.01)
    assert all(text.splitlines()[-1] == "PASSED" for text in texts)


def over_processes(count: int, tmp_path: Path, *arguments: str) -> list[str]:
    """Output of the expert-parallelism example."""
    program = str(EXAMPLES / "expert_parallel.py")
    options = ["--nproc_per_node", str(count), "--log_dir", str(tmp_path)]
    launch = ["-m", "paddle.distributed.launch", *options] if count > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, program, *arguments],
        env={**os.environ, "PADDLE_DISTRI_BACKEND": "gloo"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    return [line for line in text.splitlines() if "processes: " in line or "process " in line or "nats" in line]


@pytest.mark.slow
def test_processes_that_share_experts_train_and_go_on_from_a_checkpoint_in_another_number(tmp_path):
    first, whole = over_processes(2, tmp_path, "--steps", "12"), str(tmp_path / "whole.pdparams")
    assert first[0] == "processes: 2, with 4 of 8 experts each, 12 steps"
    assert first[-1].endswith("PASSED")
    half, rest = (over_processes(2, tmp_path, "--steps", steps, "--checkpoint", whole) for steps in ("6", "12"))
    assert half[-1].endswith("PASSED")
    begun, ended = re.findall(r"[0-9.]+ after \d+", half[1] + rest[1])[1:3], re.findall(r"[0-9.]+ after 12", rest[1])
    assert begun[0] == begun[1]  # the loss at the checkpoint
    assert ended == re.findall(r"[0-9.]+ after 12", first[1])
    assert rest[-1] == first[-1]
    alone = over_processes(1, tmp_path, "--steps", "16", "--checkpoint", whole)
    assert alone[0] == "processes: 1, with 8 of 8 experts each, 16 steps"
    assert float(re.findall(r"[0-9.]+(?= after 12)", alone[1])[0]) == pytest.approx(
        float(ended[0].split()[0]), abs=1e-4
    )
    assert alone[-1].endswith("PASSED")


def test_a_saved_model_runs_in_a_process_without_it(tmp_path):
    text = run("export_inference.py", "--steps", "25", "--out", str(tmp_path / "new"))
    lines = [line for line in text.splitlines() if " rows: " in line or "loss" in line or line in ("PASSED", "FAILED")]
    assert lines[0].startswith("25 steps, loss ")
    ways = [f"{way} {rows} rows" for rows in (1, 63, 257) for way in ("paddle.jit.load", "paddle.inference")]
    assert [line.partition(":")[0] for line in lines[1:-1]] == ways
    assert lines[-1] == "PASSED"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["model.json", "model.pdiparams"]


def test_experts_on_float8_rows_learn_as_those_in_float32_do():
    text = run("float8_experts.py", "--steps", "100")
    lines = [line for line in text.splitlines() if "loss" in line or "cosines" in line or line in ("PASSED", "FAILED")]
    assert [line.split()[0] for line in lines] == ["float32:", "float8:", "last", "cosines", "PASSED"]
    assert len({line.partition(" -> ")[2] for line in lines[:2]}) == 2  # another result: float8 took part


def test_every_example_is_run_by_a_test():
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    names = {path.name for path in EXAMPLES.iterdir() if not path.name.startswith("_")}
    assert "demo" in names
    run_by_no_test = {name for name in names if not re.search(rf'"(?:examples[/.])?{re.escape(name)}"', text)}
    assert run_by_no_test == set()
