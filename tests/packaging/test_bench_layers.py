# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m paddle_moe_ops bench --layer``: lines of layers and of a model; a run that is stopped keeps its rows."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time

import paddle
import paddle.nn.functional as F
import pytest
from paddle.distributed.communication.group import Group

import paddle_moe_ops as ops
from paddle_moe_ops import bench
from paddle_moe_ops.__main__ import _parser, main
from paddle_moe_ops.bench import calls, layer_calls, measure
from paddle_moe_ops.bench import run as running
from paddle_moe_ops.bench.decoder import Decoder
from paddle_moe_ops.bench.models import Model
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.packaging.subprocesses import ROOT

MODEL = "24,7,3,12"  # hidden, experts, topk, inner
FEW, MANY = 2, layer_calls.DECODE + 5
FORWARD = ("grouped_gemm", "moe_mlp", "MoELayer")
ALL = ("grouped_gemm", "moe_mlp", "moe_mlp gradient", "MoELayer", "MoELayer gradient")
STEP = ("training step",)


@pytest.fixture
def times(monkeypatch):
    """Our calls take 50 us, those of others 100 us; the model that trains is a small one."""
    small = dataclasses.replace(layer_calls.DECODER, layers=2, context=8)
    for module in (layer_calls, running):
        monkeypatch.setattr(module, "DECODER", small)
    fixed = {"p5_us": 40.0, "p95_us": 60.0, "samples": 5, "peak_bytes": None}
    rows = [{"median_us": us, **fixed} for us in (50.0, 100.0)]
    monkeypatch.setattr(measure, "measure", lambda calls, seconds: rows[: len(calls)])


@pytest.fixture
def run(capsys, tmp_path):
    """Runs layers of few and of many tokens; returns the status, the printed lines and the written results."""

    def call(*arguments):
        path = tmp_path / "out.json"
        sizes = ("--model", MODEL, "--tokens", str(FEW), str(MANY), "--seconds", "0", "--out", str(path))
        status = main(["bench", "--layer", "--device", "cpu", *sizes, *arguments])
        return status, capsys.readouterr().out.splitlines(), json.loads(path.read_text())["results"]

    return call


def test_layers_and_a_model_are_right_and_timed(run):
    status, lines, rows = run()
    assert status == 0
    assert [row["operation"] for row in rows] == [*FORWARD, *ALL, *STEP]
    assert [row["operation"] for row in rows] == [
        name for name in (line[:22].strip() for line in lines) if name in ALL + STEP
    ]
    for row in rows:
        assert (row["wrong"], row["beside"], row["moved_bytes"]) == ("", "plain operators", None)
        assert row["ours"]["median_us"] > 0
        assert row["paddle"]["median_us"] > 0
    assert (rows[0]["hidden"], rows[0]["experts"], rows[0]["topk"], rows[0]["inner"]) == (24, 7, 3, 12)
    number = len(FORWARD) + len(ALL) + 1
    assert f"timing takes about 0 s: {number} lines of two calls, 0 s each" in lines


def test_speed_is_in_tokens_per_second(run, times):
    _, lines, _ = run()
    ends = [line.split()[-2:] for line in lines if line.startswith("moe_mlp ")]
    assert ends == [["2.00", "40.0k"], ["2.00", "1.38M"], ["2.00", "1.38M"]]
    tokens = layer_calls.BATCH * layer_calls.DECODER.context
    text = f"training the decoder: {tokens * 20000} tokens per second, and {tokens * 10000} without the package"
    assert text in lines


FAULTS = {
    "moe_mlp": (ops, "moe_mlp", "out is wrong in "),
    "grouped_gemm": (layer_calls, "grouped_gemm", "out is wrong in "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_layer_is_named_and_fails(name, run, times, monkeypatch):
    module, function, text = FAULTS[name]
    right = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *arguments, **options: 2 * right(*arguments, **options))
    status, _, rows = run()
    assert status == 1
    assert {row["operation"].split()[0] for row in rows if row["wrong"]} == {name}
    assert all(row["wrong"].startswith(text) for row in rows if row["operation"] == name)


def test_a_wrong_gradient_is_named(run, times, monkeypatch):
    right = ops.moe_mlp
    monkeypatch.setattr(ops, "moe_mlp", lambda *arguments: 2 * right(*arguments) - right(*arguments).detach())
    status, _, rows = run()
    assert status == 1
    assert [row["operation"] for row in rows if row["wrong"]] == ["moe_mlp gradient"]


def test_fused_operators_of_paddle_count_where_they_run(run, times, monkeypatch):
    def fused(x, router, gate_up, down, moe_topk=2):
        probs, ids = paddle.topk(F.softmax(x[0] @ router), moe_topk)
        plan = ops.route(ids, probs, num_experts=len(down))
        return ops.moe_mlp(x[0], plan, probs / probs.sum(-1, keepdim=True), gate_up, down).unsqueeze(0)

    monkeypatch.setattr(paddle.incubate.nn.functional, "fused_moe", fused, raising=False)
    _, lines, rows = run()
    assert [row["beside"] for row in rows if row["operation"] == "MoELayer"] == [layer_calls.FUSED] * 2
    assert all("2.00*" in line for line in lines if line.startswith("MoELayer  "))


def test_a_model_that_trains_with_the_package_alone_has_no_speed_beside(run, times, monkeypatch):
    right = layer_calls.PlainBlock.forward

    def without_gradient(self, x):
        if paddle.is_grad_enabled():
            raise NotImplementedError
        return right(self, x)

    monkeypatch.setattr(layer_calls.PlainBlock, "forward", without_gradient)
    status, lines, rows = run()
    assert (status, rows[-1]["operation"], rows[-1]["wrong"], rows[-1]["paddle"]) == (0, STEP[0], "", None)
    assert not any("tokens per second, and" in line for line in lines)


def test_the_plain_decoder_computes_the_same():
    paddle.seed(0)
    model = Decoder(layer_calls.DECODER)
    tokens = paddle.randint(0, 256, [2, 9])
    with paddle.no_grad():
        expected = model(tokens)
        assert model.moe_layers
        out = layer_calls.as_plain(model)(tokens)
    assert not model.moe_layers
    assert paddle.allclose(out, expected, rtol=1e-4, atol=1e-5).item()


def test_a_decoder_has_layers_of_its_group_and_format():
    this, config = Group(0, -1, [0]), layer_calls.DECODER
    assert [each.parallel.group for each in Decoder(config, this).moe_layers] == [this] * 3
    float8 = Decoder(dataclasses.replace(config, compute="fp8_1x128"))
    assert [each.config.compute for each in float8.moe_layers] == ["fp8_1x128"] * 3


def test_a_plain_block_has_parameters_of_its_own():
    layer = MoELayer(8, 4, num_experts=3, topk=2)
    plain = layer_calls.PlainBlock(layer)
    assert [each.shape for each in plain.gate_up] == [[8, 8]] * 3
    before = layer.experts.gate_up.clone()
    plain.gate_up[0].set_value(paddle.zeros([8, 8]))
    assert_bits_equal(layer.experts.gate_up, before.numpy())


@pytest.mark.parametrize(
    ("arguments", "on_cpu", "model", "tokens"),
    [
        (["--layer"], True, "small", [1, 8, 64, 1024]),
        (["--layer"], False, "ernie-21b", [1, 8, 64, 4096]),
        (["--layer", "--model", "dsv3"], True, "dsv3", [1, 8, 64, 1024]),
        (["--tokens", "7"], False, "ernie-21b", [7]),
    ],
)
def test_sizes_that_are_not_named_depend_on_the_device(arguments, on_cpu, model, tokens):
    options = bench.with_defaults(_parser().parse_args(["bench", *arguments]), on_cpu)
    assert ([each.name for each in options.model], options.tokens) == ([model], tokens)


def test_sizes_of_a_model_may_name_the_inner_one():
    options = _parser().parse_args(["bench", "--model", "8,4,2", "8,4,2,16"])
    assert options.model == [Model("8,4,2", 8, 4, 2, 8), Model("8,4,2,16", 8, 4, 2, 16)]


@pytest.mark.parametrize("tokens", [FEW, 300])
def test_a_layer_needs_at_most_the_memory_that_is_announced(tokens):
    model = Model("x", 256, 11, 5, 192)
    core = paddle.base.core
    before = core.host_memory_stat_current_value("Allocated", 0)
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    for operation in layer_calls.layer_operations(layer_calls.LayerProblem(model, tokens, on_cpu=True)):
        assert operation.problem(operation.ours) == ""
        assert operation.problem(operation.others[-1]) == ""
    taken = core.host_memory_stat_peak_value("Allocated", 0) - before
    assert 0.4 <= taken / running.layer_memory_needed(model, tokens) <= 1.05


def test_experts_without_tokens_have_gradients_of_zero():
    problem = layer_calls.LayerProblem(Model("x", 8, 2 * MANY + 1, 2, 4), MANY, on_cpu=True)
    assert 0 in problem.counts
    for operation in layer_calls.layer_operations(problem):
        assert operation.problem(operation.ours) == operation.problem(operation.others[-1]) == ""


def test_a_run_that_is_stopped_before_its_first_row_has_written_a_file(run, monkeypatch):
    def stopped(*_):
        raise measure.Stopped(signal.SIGTERM)

    monkeypatch.setattr(running, "_measure", stopped)
    status, lines, rows = run()
    assert (status, rows) == (128 + signal.SIGTERM, [])
    assert "stopped after 0 lines" in lines


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_keeps_its_rows(number, tmp_path):
    path = tmp_path / "out.json"
    sizes = ("--model", "8,4,2", "--tokens", *map(str, range(1, 400)), "--seconds", "0.01", "--device", "cpu")
    command = [sys.executable, "-m", "paddle_moe_ops", "bench", *sizes, "--out", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and (not path.exists() or "route" not in path.read_text()):
            time.sleep(0.05)
        process.send_signal(number)
        text, errors = process.communicate()
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    rows = json.loads(path.read_text())["results"]
    assert len(rows) >= len(calls.TOLERANCES)
    assert re.search(rf"^stopped after {len(rows)} lines$", text, re.MULTILINE)
