# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The summary of docs/performance.md: layers, calls and CPUs in words and in tables."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.kernels.hero import picture
from benchmarks.kernels.overview import drawn_layers, page
from benchmarks.kernels.results import Run
from benchmarks.layer.report import newest_runs

from .test_report import timed

MIB = 1 << 20
CPU = {"device": "cpu", "set": "targets", "cpu": "Imagined CPU", "threads": 3}


def layer_line(impl, us, kept, shape="ernie-21b", **more):
    times = {f"{way}_us": float(each) for way, each in zip(("forward", "backward"), us, strict=True)}
    speeds = {"forward_tflops": 500.0, "backward_tflops": 400.0, "kept": kept * MIB}
    return {"shape": shape, "routing": "even", "impl": impl, "mode": "graph", **times, **speeds, **more}


@pytest.fixture
def layers(tmp_path):
    def write(*lines):
        machine = {"machine": True, "gpu": "Imagined GPU", "date": "2026-01-02"}
        (tmp_path / "a-layer.jsonl").write_text("\n".join(map(json.dumps, [machine, *lines])), encoding="utf-8")
        return newest_runs(tmp_path, "layer")

    return write


def test_a_layer_has_both_times_and_what_is_kept(layers):
    text = page([], layers(layer_line("ours", (4000, 8000), 600), layer_line("torch", (6000, 20000), 2000)), [])
    cells = "ERNIE-4.5-21B | 16384 | 4.00 / 8.00 | 500 / 400 | 6.00 / 20.00 | 1.50 x / 2.50 x | 600 / 2000"
    assert f"| Imagined GPU | {cells} |" in text
    assert "1.5 times as fast as PyTorch's grouped product forward and 2.5 times backward" in text
    assert "geometric mean of 1 shapes" in text


def test_experts_on_float8_operands_are_set_beside_ours(layers):
    ours, torch = layer_line("ours", (4000, 8000), 600), layer_line("torch", (6000, 20000), 2000)
    float8 = layer_line("ours, float8, matrices kept", (2000, 6400), 600)
    text = page([], layers(ours, torch, float8), [])
    assert "| 1.50 x / 2.50 x | 600 / 2000 | 2.00 x / 1.25 x |" in text
    assert "2.00 times as fast as in bfloat16 forward and 1.25 times backward, geometric mean of 1 shapes" in text
    assert "Experts on float8" not in page([], layers(ours, torch), [])


def test_the_means_beside_sonic_moe_are_of_the_shapes_of_both(layers):
    theirs = {"forward_tflops": 1000.0, "backward_tflops": 200.0}
    both = [layer_line("ours", (4, 8), 6), layer_line("SonicMoE, here", (2, 16), 6, **theirs)]
    runs = layers(*both, layer_line("ours", (4, 8), 6, shape="mixtral"))
    said = "a layer is 50 % slower forward and 100 % faster backward, geometric mean of 1 shapes."
    assert f"* **Beside SonicMoE on one Imagined GPU**, tuned for each shape: {said}" in page([], [], [], runs)
    assert "**Beside SonicMoE" not in page([], [], [], layers(both[0]))


def test_layers_without_a_peer_or_with_a_wrong_result_are_left_out(layers):
    wrong = layer_line("torch", (1, 1), 1, shape="mixtral", error="rows are off")
    runs = layers(layer_line("ours", (4, 8), 6), layer_line("ours", (4, 8), 6, shape="mixtral"), wrong)
    text = page([], runs, [])
    assert "Layers of experts**" not in text
    assert "Imagined GPU" not in text


def test_calls_on_a_cpu_are_set_beside_plain_operators():
    case = {"op": "permute", "variant": "bf16", "shape": "dsv3", "tokens": 4096, "mode": "cpu", "cold": False}
    rows = [timed(us, impl=impl, **case) for us, impl in ((2000.0, "public function"), (50000.0, "paddle ops"))]
    text = page([], [], [Run(CPU, rows)])
    assert "| Imagined CPU, 3 cores | DeepSeek-V3 | 4096 | permute | 2.0 | 50.0 | 25 x |" in text
    assert "25 to 25 times as fast as plain operators of Paddle" in text
    assert "## On a CPU" not in page([], [], [Run(CPU, rows[:1])])


def test_the_picture_has_a_bar_for_each_time_on_one_scale_a_model_and_pass(layers):
    lines = [layer_line("ours", (4000, 8000), 6), layer_line("torch", (6000, 20000), 6)]
    gpu, drawn = drawn_layers(layers(*lines, layer_line("ours", (1, 1), 1, shape="mixtral")))
    assert [(each.model, each.ours, each.torch) for each in drawn] == [("ERNIE-4.5-21B", (4.0, 8.0), (6.0, 20.0))]
    text = picture(gpu, drawn)
    root = ElementTree.fromstring(text)
    bars = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if each.get("class") in ("ours", "other")]
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    numbers = [float(each) for each in texts if re.fullmatch(r"[\d.]+", each)]
    assert numbers == [4, 8, 6, 20]
    (ours, ours_back, torch, torch_back) = (float(bar.get("width")) for bar in bars)
    assert ours / torch == pytest.approx(4 / 6, rel=0.01)
    assert ours_back / torch_back == pytest.approx(8 / 20, rel=0.01)
    assert "prefers-color-scheme: dark" in text
    assert drawn_layers([]) is None
