# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The page of loss curves, and a few steps of both forms on a CPU, where PyTorch is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.loss_curves import report
from paddle_moe_ops import reference

MACHINE = {
    "machine": True,
    "gpu": "NVIDIA H200",
    "torch": "2.11",
    "commit": "abc",
    "date": "today",
    "experts_by": "kernels",
}


def line(form="float8", seed=0, step=100, train=2.0, held_out=3.0):
    where = {"model": "demo", "form": form, "seed": seed, "step": step}
    return {**where, "train": train, "held_out": held_out, "seconds": 1.0}


def written(path, *lines):
    path.write_text("".join(json.dumps(each) + "\n" for each in (MACHINE, *lines)), encoding="utf-8")
    return [path]


def test_a_row_has_both_forms_and_their_difference(tmp_path):
    lines = [line("bfloat16", 0), line("float8", 0, train=2.5), line("bfloat16", 1), line("float8", 1, train=2.5)]
    lines += [line(form, seed, 200, 1.0, 1.0) for form in ("bfloat16", "float8") for seed in (0, 1)]
    text = report.page(written(tmp_path / "h200-loss-curves.jsonl", *lines))
    assert "| 100 | 2.0000 | 2.5000 | +0.5000 ±0.0000 | 3.0000 | 3.0000 | +0.0000 ±0.0000 |" in text
    assert text.index("| 100 |") < text.index("| 200 |")
    assert "## NVIDIA H200" in text
    assert "Experts run by the library's kernels." in text


def test_a_seed_that_one_form_lacks_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"demo lacks \[\('bfloat16', 0, 100\)\]; measure again"):
        report.page(written(tmp_path / "h200-loss-curves.jsonl", line("float8")))


def test_a_page_without_results_says_so():
    assert report.page([]).count("No run is recorded yet.") == 1


def test_one_seed_has_no_spread(tmp_path):
    text = report.page(written(tmp_path / "x.jsonl", line("bfloat16"), line("float8", train=1.5)))
    assert "| 100 | 2.0000 | 1.5000 | -0.5000 | 3.0000 | 3.0000 | +0.0000 |" in text


def speed_of(impl, us, **fields):
    return {"model": "demo", "impl": impl, "tokens": 4096, "peak_bytes": 3e9, "us": us, **fields}


def test_the_speed_of_training_is_compared_with_pytorch(tmp_path):
    lines = speed_of("ours", 2000.0, min_us=1900.0, max_us=2050.0), speed_of("torch", 4096.0)
    text = report.page([], written(tmp_path / "h200-training-speed.jsonl", *lines))
    assert "| demo | ours | 2.0 ±0.1 | 2,048,000 | 3.0 | 2.05 |" in text
    assert "| demo | torch | 4.1 | 1,000,000 | 3.0 | 1.00 |" in text


def test_a_model_is_trained_by_experts_of_pytorch_for_its_speed(tmp_path):
    pytest.importorskip("torch")
    from benchmarks.loss_curves import speed
    from benchmarks.loss_curves.model import Sizes

    models = {"tiny": Sizes(64, 32, 2, 4, 2, 16, 2, head=16)}
    options = ["--out", str(tmp_path / "speed.jsonl"), "--device", "cpu", "--impl", "torch, by expert"]
    assert speed.main(options, models) == 0
    machine, found = map(json.loads, (tmp_path / "speed.jsonl").read_text().splitlines())
    assert machine["machine"]
    assert (found["tokens"], found["impl"]) == (32, "torch, by expert")
    assert 0 < found["min_us"] <= found["us"] <= found["max_us"]


def test_both_forms_train_from_the_same_start(tmp_path):
    pytest.importorskip("torch")
    from benchmarks.loss_curves.__main__ import main
    from benchmarks.loss_curves.model import Sizes

    out, small = tmp_path / "cpu-loss-curves.jsonl", {"small": Sizes(64, 64, 2, 4, 2, 16, 2, head=32)}
    main(["--device", "cpu", "--out", str(out), "--steps", "2", "--every", "1", "--seeds", "1"], small)
    lines = [json.loads(each) for each in out.read_text(encoding="utf-8").splitlines()]
    losses = {(each["form"], each["step"]): each["train"] for each in lines[1:]}
    assert losses["float8", 1] == pytest.approx(losses["bfloat16", 1], rel=1e-3)
    assert losses["float8", 2] < losses["float8", 1]
    assert lines[1]["held_out"] != lines[3]["held_out"]
    assert "| 2 |" in report.page([out])


def test_experts_of_pytorch_follow_the_oracle():
    torch = pytest.importorskip("torch")
    from benchmarks.loss_curves.experts import PlainExperts

    rng = np.random.default_rng(5)
    shapes = {"x": (9, 160), "probs": (9, 2), "gate_up": (3, 160, 256), "down": (3, 128, 160), "d_out": (9, 160)}
    arrays = {name: (0.3 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    ids = np.stack([rng.permutation(3)[:2] for _ in range(9)])
    plan = reference.route(ids, arrays["probs"], num_experts=3)
    leaves = {name: torch.from_numpy(arrays[name]).requires_grad_() for name in ("x", "probs", "gate_up", "down")}
    given = leaves["x"], torch.from_numpy(ids), leaves["probs"], leaves["gate_up"], leaves["down"]
    for float8 in (False, True):
        forward, backward = reference.moe_mlp, reference.moe_mlp_backward
        if float8:
            forward, backward = reference.moe_mlp_float8, reference.moe_mlp_float8_backward
        operands = arrays["x"], plan, arrays["gate_up"], arrays["down"], plan.row_probs
        due = {"out": forward(*operands)[0]}
        made = backward(arrays["d_out"], *operands)
        due |= {"x": made.x, "gate_up": made.gate_up, "down": made.down}
        out = PlainExperts(float8, torch.float32)(*given)
        gradients = torch.autograd.grad(
            out, [leaves[name] for name in ("x", "gate_up", "down")], torch.from_numpy(arrays["d_out"])
        )
        got = {"out": out.detach(), **dict(zip(("x", "gate_up", "down"), gradients, strict=True))}
        for name, each in got.items():
            error = np.linalg.norm(each.numpy() - due[name]) / np.linalg.norm(due[name])
            assert error < (2e-2 if float8 else 1e-5), (name, error)
