# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m examples.demo``: a small run ends well, and bad values are named."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from examples.demo import main
from tests.packaging.subprocesses import run_module
from tests.pictures import check_that_labels_lie_apart, colours_of, labels_of

pytestmark = pytest.mark.long

SMALL = ("--hidden", "64", "--experts", "4", "--layers", "2", "--tokens", "16")


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new" / "out"
    done = run_module("examples.demo", "--steps", "3", *SMALL, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


def test_small_run_reports_a_falling_loss_and_passed_checks(small_run):
    text, _ = small_run
    before, after = (float(loss) for loss in re.findall(r"(?:before|after) +(\d+\.\d+) nats", text))
    assert after < before
    assert text.count("PASSED") == 4
    assert "FAILED" not in text
    for name in (
        "Paddle's pair",
        "our pair",
        "held-out loss",
        "dense check",
        "real sizes",
        "picture",
        "time",
    ):
        assert re.search(rf"^{name} ", text, re.MULTILINE), name


def test_the_first_lines_say_what_the_package_is_for(small_run):
    text, _ = small_run
    lines = text.splitlines()
    assert lines[0] == "what the package is for"
    assert re.match(r"Paddle's pair +paddle.nn.functional.moe_permute on cpu: RuntimeError: .*not registered", lines[1])
    assert lines[2].endswith("runs; gradients: tokens and router: PASSED")
    assert lines[3].startswith("real sizes ")
    assert "ERNIE-4.5-21B: 16 tokens of 2560 columns, each to 6 of 64 experts and back" in lines[3]
    assert re.search(r"\d ms; plain argsort, gather and index_add \d+\.\d ms \(\d+\.\d times as long\)", lines[4])


def test_small_run_shows_progress_and_a_sample(small_run):
    text, _ = small_run
    marks = re.findall(r"^step +(\d+)  held out \d+\.\d+ nats \(\d+\.\d+ bits\) per byte", text, re.MULTILINE)
    assert marks == ["0", "1", "2", "3"]
    assert re.search(r"3/3 loss \d+\.\d+ [\d,]+ tokens/s", text)
    assert "\nsample\ndef " in text


def test_small_run_draws_the_picture(small_run):
    height, width, colours = colours_of(small_run[1] / "demo.png")
    assert height >= 400
    assert width >= 1000
    assert colours > 50


@pytest.mark.parametrize(("steps", "experts"), [(3, 4), (500, 16), (5000, 64)])
def test_the_picture_says_what_its_colours_mean_and_labels_lie_apart(steps, experts):
    from examples.demo.plot import picture

    rng = np.random.default_rng(steps)
    train = 2 + 3.6 * np.exp(-np.arange(steps) / 20) + rng.normal(0, 0.2, steps)
    load = rng.integers(1, 100, [3, experts])
    figure = picture(list(train), [(0, 5.6), (steps // 2, 2.3), (steps, 1.99)], load, "A model")
    said = {text for text, _ in labels_of(figure)}
    assert {"train, each step", "train, smoothed", "held out", "times the even load"} <= said
    check_that_labels_lie_apart(figure)


@pytest.mark.parametrize("status", [0, 1])
def test_the_status_of_the_run_is_that_of_the_command(status, monkeypatch, tmp_path):
    monkeypatch.setattr("examples.demo.run.run", lambda options: status)
    assert main(["--out", str(tmp_path)]) == status


@pytest.mark.parametrize("missing", [("rich",), ("matplotlib",), ("rich", "matplotlib")], ids=" and ".join)
def test_missing_extra_says_how_to_install_it(missing, monkeypatch, capsys, tmp_path):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["--out", str(tmp_path)]) == 1
    text = f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}\n"
    assert capsys.readouterr().err == text


BAD_VALUES = {
    ("--steps", "0"): "argument --steps: must be an integer >= 1, but got '0'",
    ("--steps", "many"): "argument --steps: must be an integer >= 1, but got 'many'",
    ("--experts", "1.5"): "argument --experts: must be an integer >= 1, but got '1.5'",
    ("--topk", "-1"): "argument --topk: must be an integer >= 1, but got '-1'",
    ("--topk", "17"): "argument --topk: must be at most 16 experts, but got 17",
    ("--hidden", "100"): "argument --hidden: must be a multiple of 64, but got '100'",
    ("--hidden", "0"): "argument --hidden: must be a multiple of 64, but got '0'",
    ("--layers", "1"): "argument --layers: must be an integer >= 2, but got '1'",
    ("--threads", "0"): "argument --threads: must be an integer >= 1, but got '0'",
    ("--seed", ""): "argument --seed: must be an integer >= 0, but got ''",
}


@pytest.mark.parametrize(("arguments", "text"), BAD_VALUES.items(), ids=lambda value: "-".join(value[:2]))
def test_bad_value_is_named(arguments, text, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main([f"{arguments[0]}={arguments[1]}", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {text}\n")


def test_output_that_is_a_file_is_named(capsys, tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(SystemExit) as stop:
        main(["--out", str(path)])
    assert stop.value.code == 2
    assert f"argument --out: must be a directory that can be made, but got {str(path)!r}" in capsys.readouterr().err


def test_command_ends_with_status_two_for_a_bad_value():
    done = run_module("examples.demo", "--topk", "20", "--experts", "8")
    assert done.returncode == 2
    assert "argument --topk: must be at most 8 experts, but got 20" in done.stderr
