# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m paddle_moe_ops bench``: what it prints, writes and compares; a wrong result is not timed."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import paddle
import paddle.nn.functional as F
import pytest

import paddle_moe_ops as ops
from benchmarks.kernels.shapes import SHAPES
from paddle_moe_ops import _report, bench
from paddle_moe_ops.__main__ import _parser, main
from paddle_moe_ops.bench import calls, measure
from paddle_moe_ops.bench import run as running
from tests.packaging.subprocesses import run_command
from tests.pictures import colours_of

T, H, E, K = 13, 21, 7, 3
SMALL = ("bench", "--device", "cpu", "--model", f"{H},{E},{K}", "--tokens", str(T), "--seconds", "0")
OPERATIONS = (
    *("moe_permute", "moe_permute gradient", "moe_unpermute", "moe_unpermute gradient", "route"),
    *("permute", "permute gradient", "unpermute", "unpermute gradient"),
)


@pytest.fixture
def bench_run(capsys, tmp_path):
    """Runs the command on a small problem: status, printed lines, lines of the table by operation, what it wrote."""

    def run(*arguments):
        path = tmp_path / "out.json"
        status = main([*SMALL, "--out", str(path), *arguments])
        lines = capsys.readouterr().out.splitlines()
        table = {line[:22].strip(): line[22:] for line in lines if line[:22].strip() in OPERATIONS}
        return SimpleNamespace(status=status, lines=lines, table=table, written=json.loads(path.read_text()), path=path)

    return run


@pytest.fixture
def fixed_times(monkeypatch):
    """Every call takes as many microseconds as the fixture's `us` says; Paddle's take four times as long."""
    times = SimpleNamespace(us=125.0)

    def fixed(calls, seconds):
        return [
            {"median_us": us, "p5_us": 0.9 * us, "p95_us": 2 * us, "samples": 5, "peak_bytes": 3_000_000}
            for us in (times.us, 4 * times.us)[: len(calls)]
        ]

    monkeypatch.setattr(measure, "measure", fixed)
    return times


@pytest.fixture(scope="module")
def user_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    files = ("--out", "mine.json", "--picture", "mine.png")
    sizes = ("--model", f"{H},{E},{K}", "40,5,1", "--tokens", "1", str(T), "--seconds", "0")
    done = run_command("bench", *sizes, *files, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


def test_every_operation_of_every_problem_is_a_line_and_a_result(user_run):
    text, folder = user_run
    names = [line[:22].strip() for line in text.splitlines() if line[:22].strip() in OPERATIONS]
    assert names == [*OPERATIONS] * 4
    results = json.loads((folder / "mine.json").read_text())["results"]
    assert [row["operation"] for row in results] == names
    sizes = [(row["hidden"], row["experts"], row["topk"], row["tokens"]) for row in results[:: len(OPERATIONS)]]
    assert sizes == [(H, E, K, 1), (H, E, K, T), (40, 5, 1, 1), (40, 5, 1, T)]
    assert results[-1]["model"] == "40,5,1"
    for row in results:
        assert (row["device"], row["wrong"], row["beside"]) == ("cpu", "", "plain operators")
        for side in (row["ours"], row["paddle"]):
            assert 0 < side["min_us"] <= side["p5_us"] <= side["median_us"] <= side["p95_us"] <= side["max_us"]
            assert side["samples"] >= measure.ROUNDS
            assert side["peak_bytes"] > 0


def test_a_run_says_on_what_it_ran(user_run):
    text, folder = user_run
    machine = json.loads((folder / "mine.json").read_text())["machine"]
    assert machine["paddle"] == paddle.version.full_version
    assert machine["backend"] == "compiled"
    head = f"backend compiled, {machine['cpu_isa']}, {machine['threads']} threads"
    assert text.startswith(
        f"paddle_moe_ops {ops.__version__} ({head}), Paddle {machine['paddle']}\ncpu: {machine['cpu']}\n"
    )
    assert f"\n{H},{E},{K}, {T} tokens: {K} of {E} experts each, {T * K} rows of {H} bfloat16 (0.0 MB)\n" in text


def test_the_picture_has_no_dot_of_paddle_where_nothing_was_compared(tmp_path):
    from matplotlib.figure import Figure

    from paddle_moe_ops.bench import picture

    row = {"model": "small", "tokens": 8, "device": "cpu", "operation": "permute"}
    row |= {"ours": {"median_us": 5.0}, "paddle": None}
    picture.draw(tmp_path / "one.png", [row])
    axes = Figure().subplots()
    picture._draw(axes, "small", [row])
    assert len(axes.get_lines()) == 1


def test_the_picture_is_drawn(user_run):
    height, _, colours = colours_of(user_run[1] / "mine.png")
    assert height > 4 * 300
    assert colours > 20


def test_columns_are_times_memory_ratio_and_speed(bench_run, fixed_times):
    fixed_times.us = 20.0
    done = bench_run()
    assert done.status == 0
    heads = next(line for line in done.lines if line.startswith("operation")).split()
    assert heads == ["operation", *(2 * ["ms", "p5", "p95", "MB"]), "ratio", "GB/s"]
    times = ["0.020", "0.018", "0.040", "3.0", "0.080", "0.072", "0.160", "3.0", "4.00"]
    tokens, rows = 2 * T * H, 2 * T * K * H
    moved = dict.fromkeys(OPERATIONS, tokens + rows)
    moved |= {"moe_unpermute gradient": tokens + 2 * rows, "unpermute gradient": tokens + 2 * rows, "route": 0}
    for name, line in done.table.items():
        assert line.split() == [*times, f"{moved[name] / 20e3:.1f}" if moved[name] else "-"]
        assert line.index("4.00") + 4 == 22 + 19 + 33


def test_large_numbers_have_fewer_decimals(bench_run, fixed_times):
    fixed_times.us = 33_333.3
    assert bench_run().table["route"].split() == [
        "33.33",
        "30.00",
        "66.67",
        "3.0",
        "133.3",
        "120.0",
        "266.7",
        "3.0",
        "4.00",
        "-",
    ]


@pytest.mark.parametrize(("load", "is_busy"), [(0.1, False), (64.04, True)])
def test_a_busy_machine_is_named(load, is_busy, bench_run, fixed_times, monkeypatch):
    monkeypatch.setattr(running.os, "getloadavg", lambda: (load, 9.0, 9.0))
    done = bench_run()
    cores = done.written["machine"]["usable_cores"]
    text = f"other programs are busy here (load {load:.1f} on {cores} cores): times will vary"
    assert (text in done.lines) == is_busy


def test_changes_are_shown_beside_an_earlier_run(bench_run, fixed_times):
    earlier = bench_run().path.with_name("earlier.json")
    fixed_times.us = 150.0
    run = json.loads(earlier.with_name("out.json").read_text())
    run["results"] = [row for row in run["results"] if row["operation"] != "route"]
    run["machine"]["threads"] = 99
    earlier.write_text(json.dumps(run))
    done = bench_run("--compare", str(earlier))
    heads = next(line for line in done.lines if line.startswith("operation")).split()
    assert heads[-2:] == ["ours", "Paddle"]
    for name, line in done.table.items():
        assert line.split()[-2:] == (["-", "-"] if name == "route" else ["+20%", "+20%"])
    now = done.written["machine"]["threads"]
    assert f"compared with an earlier run: threads was 99, now {now}" in done.lines


@pytest.mark.parametrize(("fact", "value"), [("cpu", "Z80"), ("usable_cores", 9999), ("gpus", ["H1000"])])
def test_another_machine_is_named_and_not_compared(fact, value, bench_run, fixed_times):
    path = bench_run().path
    run = json.loads(path.read_text())
    now = run["machine"][fact]
    run["machine"][fact] = value
    path.with_name("earlier.json").write_text(json.dumps(run))
    done = bench_run("--compare", str(path.with_name("earlier.json")))
    assert done.status == 0
    assert f"compared with an earlier run: {fact} was {value}, now {now}" in done.lines
    assert "compared with an earlier run: that was another machine, so no changes are shown" in done.lines
    assert not any("change of" in line or "%" in line for line in done.table.values())


def with_other_gradient(function):
    """The function with the same results, and twice the gradient of its first argument."""

    def changed(x, *arguments, **options):
        return function(2 * x - x.detach(), *arguments, **options)

    return changed


def with_other_element(function):
    """The function with one element of its first result changed."""

    def changed(*arguments, **options):
        outputs = function(*arguments, **options)
        first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        change = paddle.arange(first.size, dtype="float32") == first.size - 1
        # float32: Paddle adds no bfloat16 on the CPU
        first = (first.astype("float32") + change.reshape(first.shape).astype("float32")).astype(first.dtype)
        if isinstance(outputs, ops.Plan):
            return ops.Plan(first, *others)
        return (first, *others) if isinstance(outputs, tuple) else first

    return changed


FAULTS = {
    "moe_permute": (with_other_element, "rows is wrong in 1 of 819 elements"),
    "moe_permute gradient": (with_other_gradient, "d_x is wrong in "),
    "moe_unpermute": (with_other_element, "out is wrong in 1 of 273 elements"),
    "moe_unpermute gradient": (with_other_gradient, "d_rows is wrong in "),
    "route": (with_other_element, "slot_to_row is wrong in 1 of 39 elements"),
    "permute": (with_other_element, "rows is wrong in 1 of 819 elements"),
    "permute gradient": (with_other_gradient, "d_x is wrong in "),
    "unpermute": (with_other_element, "out is wrong in 1 of 273 elements"),
    "unpermute gradient": (with_other_gradient, "d_rows is wrong in "),
}


@pytest.mark.parametrize("operation", FAULTS)
def test_a_wrong_result_is_named_and_fails(operation, bench_run, fixed_times, monkeypatch):
    fault, text = FAULTS[operation]
    function = operation.split()[0]
    monkeypatch.setattr(ops, function, fault(getattr(ops, function)))
    done = bench_run()
    assert done.status == 1
    assert done.table[operation].strip().startswith(f"FAILED: {text}")
    assert re.fullmatch(r"bench FAILED: \d of 9 results are wrong", done.lines[-1])
    row = next(row for row in done.written["results"] if row["operation"] == operation)
    assert row["wrong"].startswith(text)
    assert (row["ours"], row["paddle"]) == (None, None)


def test_a_result_of_another_shape_is_wrong(bench_run, fixed_times, monkeypatch):
    unpermute = ops.unpermute
    monkeypatch.setattr(ops, "unpermute", lambda *arguments: unpermute(*arguments).detach()[1:])
    done = bench_run()
    assert done.status == 1
    assert f"FAILED: out has shape [{T - 1}, {H}] and must have [{T}, {H}]" in done.table["unpermute"]


def test_a_function_that_raises_is_named_and_fails(bench_run, fixed_times, monkeypatch):
    def raises(*arguments):
        raise RuntimeError("permute: no room\nat all")

    monkeypatch.setattr(ops, "permute", raises)
    done = bench_run()
    assert done.status == 1
    assert done.table["permute"].strip() == done.table["permute gradient"].strip() == "FAILED: permute: no room"
    assert done.lines[-1] == "bench FAILED: 2 of 9 results are wrong"


def test_paddles_own_functions_are_measured_where_they_run(bench_run, fixed_times, monkeypatch):
    ours = ops.moe_permute, ops.moe_unpermute
    monkeypatch.setattr(F, "moe_permute", lambda *arguments: ours[0](*arguments))
    monkeypatch.setattr(F, "moe_unpermute", lambda *arguments, **options: ours[1](*arguments, **options))
    done = bench_run()
    assert done.status == 0
    own = {row["operation"] for row in done.written["results"] if row["beside"] == "paddle.nn.functional"}
    assert own == {"moe_permute", "moe_unpermute"}
    assert {name for name, line in done.table.items() if "4.00*" in line} == own


def test_paddles_own_function_is_left_out_where_it_is_wrong(bench_run, fixed_times, monkeypatch):
    monkeypatch.setattr(F, "moe_permute", with_other_element(ops.moe_permute))
    done = bench_run()
    assert done.status == 0
    text = f"paddle.nn.functional is left out of moe_permute: rows is wrong in 1 of {T * K * H} elements"
    assert text in done.lines
    assert done.written["results"][0]["beside"] == "plain operators"


def test_there_may_be_nothing_to_compare_with(bench_run, monkeypatch):
    real = calls.Problem.plain_permute

    def failing(self, x):
        if x.dtype == paddle.bfloat16:
            raise RuntimeError("not registered")
        return real(self, x)

    monkeypatch.setattr(calls.Problem, "plain_permute", failing)
    done = bench_run()
    assert done.status == 0
    row = next(row for row in done.written["results"] if row["operation"] == "permute")
    assert (row["paddle"], row["beside"]) == (None, None)
    assert done.table["permute"].split()[4:9] == ["-"] * 5
    assert row["ours"]["median_us"] > 0


BAD_ARGUMENTS = {
    ("--tokens", "0"): "positive integers, but got '0'",
    ("--tokens", "512", "1e3"): "positive integers, but got '1e3'",
    ("--tokens", "²"): "positive integers, but got '²'",
    ("--model", "dsv4"): f"{bench.NAMES}, but got 'dsv4'",
    ("--model", "dsv3", "8,2"): f"{bench.NAMES}, but got '8,2'",
    ("--model", "8,0,1"): f"{bench.NAMES}, but got '8,0,1'",
    ("--model", "8,2,,1"): f"{bench.NAMES}, but got '8,2,,1'",
    ("--model", "8,2,3"): "hidden,experts,topk with topk <= experts <= 65536, but got '8,2,3'",
    ("--model", "8,65537,3"): "hidden,experts,topk with topk <= experts <= 65536, but got '8,65537,3'",
    ("--device", "abacus"): "something that paddle.set_device takes, but got 'abacus' (The device must be a string",
    ("--seconds", "nan"): "a number from 0 to 3600, but got 'nan'",
    ("--seconds", "soon"): "a number from 0 to 3600, but got 'soon'",
    ("--out", "/nowhere/out.json"): "a file in a folder that exists, but got '/nowhere/out.json'",
    ("--out", "/"): "a file in a folder that exists, but got '/'",
    ("--picture", "bars.gif"): "a file that ends with .pdf or .png or .svg, but got 'bars.gif'",
    ("--picture", "/nowhere/a.png"): "a file in a folder that exists, but got '/nowhere/a.png'",
    ("--compare", "/nowhere/a.json"): "a file that bench --out has written, but got '/nowhere/a.json' ([Errno 2]",
    ("--compare", __file__): f"a file that bench --out has written, but got {__file__!r} (Expecting value",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=" ".join)
def test_a_bad_argument_is_named_in_one_line(arguments, capsys):
    try:
        status = main(["bench", *arguments])
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith(f"bench: {arguments[0]} must be {BAD_ARGUMENTS[arguments]}")


def test_the_first_line_of_an_error_of_paddle_is_the_reason(capsys, monkeypatch):
    def failing(_):
        raise RuntimeError("\n\nno such device\n  [Hint: ...]")

    monkeypatch.setattr(paddle, "set_device", failing)
    assert main(["bench", "--device", "gpu:9"]) == 2
    assert capsys.readouterr().err.endswith("but got 'gpu:9' (no such device)\n")


@pytest.mark.parametrize("text", ["[]", '{"format": "paddle_moe_ops bench 0"}'])
def test_json_of_another_kind_is_named(text, capsys, tmp_path):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--compare", str(tmp_path / "other.json")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("(its format is not 'paddle_moe_ops bench 1')\n")


def test_without_options_a_model_is_measured_with_few_and_with_many_tokens():
    options = _parser().parse_args(["bench"])
    named = bench.with_defaults(options, on_cpu=True)
    assert ([model.name for model in named.model], named.tokens) == (["ernie-21b"], [512, 4096])
    assert (options.device, options.out, options.compare, options.picture) == (None, None, None, None)


@pytest.mark.parametrize(
    ("name", "hidden", "experts", "topk"),
    [
        ("ernie-21b", 2560, 64, 6),
        ("ernie-300b", 8192, 64, 8),
        ("dsv3", 7168, 256, 8),
        ("kimi-k2", 7168, 384, 8),
        ("qwen3-30b", 2048, 128, 8),
        ("qwen3-235b", 4096, 128, 8),
    ],
)
def test_models_have_the_sizes_of_their_published_configurations(name, hidden, experts, topk):
    model = bench.MODELS[name]
    assert (model.hidden, model.experts, model.topk) == (hidden, experts, topk)
    if name in SHAPES:
        shape = SHAPES[name]
        assert (shape.hidden, shape.num_experts, shape.topk) == (hidden, experts, topk)


def test_a_problem_that_does_not_fit_is_skipped(bench_run, monkeypatch):
    monkeypatch.setattr(measure, "memory_left", lambda: 3e9)
    done = bench_run("--model", f"{H},{E},{K}", "1000000,64,8", "--tokens", "128")
    assert done.status == 0
    reason = "it needs about 26.6 GB of memory, and 3.0 GB are left"
    assert f"skipped: {reason}" in done.lines
    assert done.written["skipped"] == [f"1000000,64,8, 128 tokens: {reason}"]
    assert [row["operation"] for row in done.written["results"]] == [*OPERATIONS]


def test_a_problem_during_which_memory_ends_is_skipped(bench_run, monkeypatch):
    def no_room(self, model, tokens):
        raise MemoryError("\nResourceExhaustedError:\n  Out of memory error on GPU 0.\nPlease wait.")

    monkeypatch.setattr(calls.Problem, "__init__", no_room)
    done = bench_run("--picture", "/tmp/is_not_drawn.png")
    assert done.status == 0
    assert "skipped: Out of memory error on GPU 0." in done.lines
    assert done.written["results"] == []


def test_memory_needed_is_what_a_run_takes(monkeypatch):
    model, tokens = bench.Model("x", 1024, 9, 5, 0), 301
    core = paddle.base.core
    before = core.host_memory_stat_current_value("Allocated", 0)
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    for operation in calls.operations(calls.Problem(model, tokens)):
        for call in (operation.ours, operation.others[-1]):
            assert operation.problem(call) == ""
    taken = core.host_memory_stat_peak_value("Allocated", 0) - before
    assert 0.85 <= taken / running.memory_needed(model, tokens) <= 1.05


@pytest.mark.parametrize(
    ("limit", "left"), [("max", 5 << 20), (str(3 << 20), 3 << 20), (str(7 << 20), 5 << 20), (None, 5 << 20)]
)
def test_memory_left_is_that_of_the_machine_and_of_its_container(limit, left, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:   5120 kB\n")
    if limit is not None:
        (tmp_path / "max").write_text(f"{limit}\n")
    monkeypatch.setattr(_report, "MEMORY_OF_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(measure, "MEMORY_OF_CONTAINER", tmp_path / "max")
    assert measure.memory_left() == left


def test_calls_are_timed_in_turns_without_what_prepares_them(monkeypatch):
    clock, turns = [0.0], []

    def call(name, seconds):
        def prepare():
            clock[0] += 100.0
            return name

        def run(state):
            assert state == name
            turns.append(name)
            clock[0] += seconds
            return {}

        return calls.Call(name, run, prepare)

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    slow, quick = measure.measure([call("slow", 0.5), call("quick", 1e-4)], 0.0)
    assert [slow["median_us"], quick["median_us"]] == pytest.approx([5e5, 100])
    assert slow["samples"] == quick["samples"] == measure.ROUNDS
    assert "".join(name[0] for name in turns) == "sq" + "sq" + measure.ROUNDS * ("s" + 20 * "q")


def test_sums_of_no_terms_are_right():
    zeros = {"sums": paddle.zeros([3])}
    call = calls.Call(calls.OURS, lambda _: zeros)
    assert calls.Operation("sums", 0, call, [], lambda: (zeros, zeros)).problem(call) == ""


def test_samples_go_on_for_as_long_as_was_asked_for(monkeypatch):
    clock = [0.0]

    def run(_):
        clock[0] += 0.25
        return {}

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    (times,) = measure.measure([calls.Call("one", run)], 10.0)
    assert times["samples"] == 40


def test_the_first_line_that_is_wrong_about_the_backend_ends_the_run():
    done = run_command("bench", env={"PADDLE_MOE_OPS_BACKEND": "abacus"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("bench: PADDLE_MOE_OPS_BACKEND must be one of ")


def test_the_chosen_backend_runs(bench_run):
    with ops.use_backend("reference"):
        done = bench_run()
    assert done.status == 0
    assert done.written["machine"]["backend"] == "reference"


def test_a_missing_matplotlib_is_named_before_anything_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SMALL, "--picture", str(tmp_path / "a.png")]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("bench: --picture needs matplotlib (")
    assert printed.err.endswith("): `pip install matplotlib`\n")
