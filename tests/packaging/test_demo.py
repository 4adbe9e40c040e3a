# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m paddle_moe_ops demo``: a small run ends well, its checks can fail, and bad values are named."""

from __future__ import annotations

import re
import sys

import numpy as np
import paddle
import pytest

from paddle_moe_ops.demo import checks, data, main, training
from paddle_moe_ops.demo.model import Decoder, ModelConfig
from tests.packaging.subprocesses import run_command, run_python

SMALL = ("--hidden", "64", "--experts", "4", "--layers", "2")


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new" / "out"
    done = run_command("demo", "--steps", "3", *SMALL, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


def test_small_run_reports_a_falling_loss_and_passed_checks(small_run):
    text, _ = small_run
    before, after = (float(loss) for loss in re.findall(r"(?:before|after) +(\d+\.\d+) nats", text))
    assert after < before
    assert text.count("PASSED") == 3
    assert "FAILED" not in text
    for name in ("held-out loss", "dense check", "layer speed", "picture", "time"):
        assert re.search(rf"^{name} ", text, re.MULTILINE), name


def test_small_run_shows_progress_and_a_sample(small_run):
    text, _ = small_run
    marks = re.findall(r"^step +(\d+)  held out \d+\.\d+ nats \(\d+\.\d+ bits\) per byte", text, re.MULTILINE)
    assert marks == ["0", "1", "2", "3"]
    assert re.search(r"3/3 loss \d+\.\d+ [\d,]+ tokens/s", text)
    assert "\nsample\ndef " in text


def test_small_run_draws_the_picture(small_run):
    from matplotlib.image import imread

    _, out = small_run
    picture = imread(out / "demo.png")
    assert picture.shape[0] >= 400
    assert picture.shape[1] >= 1000
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50


def test_run_without_progress_ends_with_status_one(tmp_path):
    arguments = ["--steps", "2", *SMALL, "--out", str(tmp_path)]
    done = run_python(f"""
from paddle_moe_ops.demo import checks, main, training
training.train = lambda model, data, steps, rng: (training.Progress(i + 1, 5.0, 1.0) for i in range(steps))
training.HELD_OUT_WINDOWS, checks.TIMED_RUNS, checks.TIMED_TOKENS = 4, 1, 64
sys.exit(main({arguments!r}))
""")
    assert done.returncode == 1, done.stderr
    assert re.search(r"after .*: FAILED", done.stdout)
    assert done.stdout.count("PASSED") == 2


@pytest.mark.parametrize("missing", [("rich",), ("matplotlib",), ("rich", "matplotlib")], ids=" and ".join)
def test_missing_extra_says_how_to_install_it(missing, monkeypatch, capsys, tmp_path):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["--out", str(tmp_path)]) == 1
    text = f'the demo needs {" and ".join(missing)}: pip install "paddle-moe-ops[demo]"\n'
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
    done = run_command("demo", "--topk", "20", "--experts", "8")
    assert done.returncode == 2
    assert "argument --topk: must be at most 8 experts, but got 20" in done.stderr


@pytest.fixture
def model():
    paddle.seed(3)
    return Decoder(ModelConfig(hidden=64, layers=2, experts=4, topk=2, context=16))


@pytest.fixture
def tokens():
    return paddle.to_tensor(np.random.default_rng(0).integers(0, 256, (2, 17)))


def test_dense_check_passes_for_the_layer_and_covers_every_parameter(model, tokens):
    check = checks.dense_check(model, tokens)
    assert check.passed
    assert check.parameters == len(model.parameters())


WRONG_LAYERS = {
    "rows_of_another_token": lambda layer, x: layer(x.roll(1, axis=0)),
    "wrong_weights": lambda layer, x: layer(x) * 1.001,
    "no_gradient_to_tokens": lambda layer, x: layer(x.detach()),
    "nan": lambda layer, x: layer(x) * float("nan"),
}


@pytest.mark.parametrize("wrong", WRONG_LAYERS.values(), ids=WRONG_LAYERS.keys())
def test_dense_check_fails_for_a_wrong_layer(model, tokens, wrong):
    assert not checks.dense_check(model, tokens, wrong).passed


def test_speed_check_fails_for_different_outputs(model, monkeypatch):
    monkeypatch.setattr(checks, "TIMED_TOKENS", 64)
    monkeypatch.setattr(checks, "TIMED_RUNS", 1)
    assert checks.layer_speed(model.moe_layers[0]).passed
    monkeypatch.setattr(checks, "plain_moe", lambda layer, x: layer(x) * 1.001)
    assert not checks.layer_speed(model.moe_layers[0]).passed


def test_model_predicts_from_earlier_bytes_only(model, tokens):
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens[:, :16]).numpy(), model(changed[:, :16]).numpy()
    np.testing.assert_allclose(after[:, :9], before[:, :9], rtol=1e-4, atol=1e-5)
    assert (np.abs(after[:, 9:] - before[:, 9:]).max(axis=-1) > 1e-3).all()


def test_training_repeats_itself_for_a_seed():
    def losses(seed):
        paddle.seed(seed)
        rng = np.random.default_rng(seed)
        model = Decoder(ModelConfig(hidden=64, layers=2, experts=4, topk=2, context=16))
        text = data.load_standard_library().train
        run = [state.loss for state in training.train(model, text, 3, rng)]
        return [*run, training.sample(model, "def ", 8, rng)]

    assert losses(5) == losses(5)
    assert losses(5) != losses(6)


def test_text_is_split_by_file():
    text = data.load_standard_library()
    assert text.train_files > 8 * text.held_out_files > 0
    assert len(text.train) > len(text.held_out) > 10_000
    windows = data.even_windows(text.held_out, 5, 33)
    np.testing.assert_array_equal(windows[0], text.held_out[:33])
    np.testing.assert_array_equal(windows[-1], text.held_out[-33:])
