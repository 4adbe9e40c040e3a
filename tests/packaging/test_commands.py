# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m paddle_moe_ops``: env works with anything missing, every command ends with the right status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import paddle_moe_ops
from paddle_moe_ops import _build_check, _env, _report
from paddle_moe_ops.testing import selftest
from tests.packaging.subprocesses import ROOT, copy_without_library, run_command, run_forked, run_python

pytestmark = pytest.mark.long

NEEDS_PADDLE = "paddle_moe_ops needs PaddlePaddle 3.2 or 3.3, which cannot be imported ("
OPTIONAL = ("paddle", "triton", "torch", "ml_dtypes", "numpy", "rich", "matplotlib")


def env_report(**options):
    done = run_command("env", "--json", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_env_names_every_version_and_variable():
    done = run_command("env", env={"PADDLE_MOE_OPS_NUM_THREADS": "3"}, fresh=True)  # Paddle's import may warn
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    facts = dict(line.split("  ", 1) for line in lines if "  " in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    assert facts["paddle_moe_ops"].startswith(paddle_moe_ops.__version__)
    assert "No ccache" not in done.stderr
    assert facts["commit"]
    assert facts["numpy"] == metadata.version("numpy")
    assert facts["compiled library"] == f"loads, in {Path(paddle_moe_ops.__file__).parent}"
    assert facts["threads"] == "3"
    assert facts["PADDLE_MOE_OPS_NUM_THREADS"] == "'3'"
    assert facts["PADDLE_MOE_OPS_BACKEND"] == "not set"
    for variable in _env.VARIABLES:
        assert variable.help in done.stdout


def test_a_reader_that_closes_the_pipe_ends_a_command_without_a_traceback():
    command = [sys.executable, "-m", "paddle_moe_ops", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (1, b"")


def test_env_json_holds_the_same_facts_as_the_running_package():
    report = env_report(env={"PADDLE_MOE_OPS_VALIDATE": "1"})
    assert report["paddle_moe_ops"]["version"] == paddle_moe_ops.__version__
    assert report["packages"]["ml_dtypes"] == metadata.version("ml_dtypes")
    assert report["paddle"]["error"] is None
    assert report["compiled_library"]["loads"]
    assert report["compiled_library"]["cpu_isa"] in _env.CPU_ISAS
    assert report["compiled_library"]["build"] == _build_check.build_info()
    assert 1 <= report["compiled_library"]["threads"] <= report["cpu"]["usable_cores"] <= report["cpu"]["cores"]
    values = {variable["name"]: variable["value"] for variable in report["variables"]}
    assert values == {
        **dict.fromkeys(variable.name for variable in _env.VARIABLES),
        "PADDLE_MOE_OPS_VALIDATE": "1",
    }


def test_env_shows_as_many_threads_as_the_operators_use():
    asked_for = len(os.sched_getaffinity(0)) + 3
    done = run_forked(
        "import ctypes\n"
        "from paddle_moe_ops import _report\n"
        "from paddle_moe_ops.backends import compiled\n"
        "assert compiled.backend.unavailable() is None\n"
        f"ctypes.CDLL(str(compiled.LIBRARY)).pmo_set_num_threads({asked_for})\n"
        "print(_report.as_text(_report.collect()))"
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^ *threads +(.*)$", done.stdout, re.MULTILINE) == [str(asked_for)]


def test_env_shows_no_more_threads_than_the_pool_can_have():
    report = env_report(env={"PADDLE_MOE_OPS_NUM_THREADS": "5000"})
    assert report["compiled_library"]["threads"] == 1024


@pytest.mark.parametrize("missing", [("paddle",), ("ml_dtypes",), OPTIONAL], ids=["paddle", "ml_dtypes", "everything"])
def test_env_works_without(missing):
    report = env_report(missing=missing)
    assert (report["paddle"]["error"] is None) == ("paddle" not in missing)
    assert report["compiled_library"]["loads"] == ("paddle" not in missing)
    assert report["compiled_library"]["loads"] == (report["compiled_library"]["reason"] is None)
    assert report["compiled_library"]["loads"] == (report["compiled_library"]["threads"] is not None)
    if "paddle" in missing:
        text = run_command("env", missing=missing)
        assert text.returncode == 0, text.stderr
        assert text.stdout.startswith(NEEDS_PADDLE)
        assert re.search(r"^compiled library +does not load: ", text.stdout, re.MULTILINE)


def test_env_lists_the_gpus_that_nvidia_smi_names(tmp_path, monkeypatch):
    program, line = tmp_path / "nvidia-smi", "NVIDIA H200, 570.124.06, 143771 MiB"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _report._gpus() == []
    for status, expected in ((0, [line, line]), (9, [])):
        program.write_text(f"#!/bin/sh\necho '{line}'\necho '{line}'\nexit {status}\n")
        program.chmod(0o755)
        assert _report._gpus() == expected

    def hangs(*_, timeout, **__):
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert _report._gpus() == []


def test_memory_is_what_the_system_can_give(monkeypatch):
    text = "MemTotal:  4000 kB\nMemFree:  1000 kB\nMemAvailable:  3000 kB\n"
    monkeypatch.setattr(_report.Path, "read_text", lambda *_, **__: text)
    assert _report.available_memory() == 3000 * 1024


@pytest.mark.parametrize(("processor", "named"), [("Neoverse-V2", "Neoverse-V2"), ("", "aarch64")])
def test_a_processor_without_a_model_name_is_named_as_the_system_names_it(processor, named, monkeypatch):
    monkeypatch.setattr(_report.Path, "read_text", lambda *_, **__: "CPU implementer\t: 0x41\n")
    monkeypatch.setattr(_report.platform, "processor", lambda: processor)
    monkeypatch.setattr(_report.platform, "machine", lambda: "aarch64")
    assert _report.cpu_model() == named


@pytest.mark.parametrize("command", ["selftest", "explain", "bench"])
def test_commands_that_need_paddle_say_so_first_and_fail(command, tmp_path):
    done = run_command(command, missing=["paddle"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(NEEDS_PADDLE)
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


RUN_COMMANDS = """
import contextlib, io, json
from paddle_moe_ops.__main__ import main

found = {}
for command in ("selftest", "explain", "bench", "env"):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        found[command] = main([command]), out.getvalue(), errors.getvalue()
print(json.dumps(found))
"""


def test_commands_name_a_missing_dependency_and_fail(tmp_path):
    done = run_python(RUN_COMMANDS, missing=["ml_dtypes"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("env")[0] == 0
    for status, out, errors in found.values():
        assert (status, out) == (1, "")
        *warnings_of_paddle, line = errors.splitlines()
        assert line.startswith("paddle_moe_ops needs ml_dtypes, which cannot be imported (")
        assert line.endswith(": `pip install numpy ml_dtypes`")
        assert not any("Traceback" in warning for warning in warnings_of_paddle)
    assert not list(tmp_path.iterdir())


def test_commands_name_an_old_paddle_first(tmp_path):
    done = run_forked("import paddle\npaddle.version.full_version = '3.1.1'" + RUN_COMMANDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    text = "paddle_moe_ops needs PaddlePaddle 3.2 or 3.3, but 3.1.1 is installed: "
    status, out, _ = found.pop("env")
    assert status == 0
    assert out.startswith(text)
    for status, out, errors in found.values():
        assert (status, out) == (1, "")
        assert errors.splitlines()[-1].startswith(text)


@pytest.mark.parametrize("missing", [(), ("paddle",)], ids=["with Paddle", "without"])
def test_version_names_the_package_and_the_paddle_that_it_was_compiled_for(missing):
    done = run_command("--version", missing=missing)
    built_for = _build_check.build_info()["paddle_version"]
    assert done.returncode == 0
    assert done.stdout == f"paddle_moe_ops {paddle_moe_ops.__version__}, compiled for Paddle {built_for}\n"


def test_version_of_a_package_that_was_not_compiled_says_so(tmp_path):
    copy_without_library(tmp_path)
    done = run_command("--version", cwd=tmp_path)
    assert done.stdout == f"paddle_moe_ops {paddle_moe_ops.__version__}, not compiled\n"


def test_env_shows_a_bad_thread_count_instead_of_failing():
    done = run_command("env", env={"PADDLE_MOE_OPS_NUM_THREADS": "many"})
    assert done.returncode == 0, done.stderr
    assert "PADDLE_MOE_OPS_NUM_THREADS must be a positive integer, but got 'many'" in done.stdout


def test_selftest_passes():
    done = run_command("selftest")
    assert done.returncode == 0, done.stdout + done.stderr
    *checks, verdict = done.stdout.splitlines()
    assert verdict.startswith(f"selftest passed: {len(checks)} checks")
    assert all(line.startswith("ok ") for line in checks)


def test_selftest_has_many_checks_of_little_work():
    assert 20 <= len(list(selftest.all_checks())) <= 200
    for case in (*selftest.CASES, selftest.EMPTY):
        assert case.T * case.K * case.H <= 1 << 19


def test_selftest_fails_where_a_result_is_wrong():
    done = run_forked(
        "from paddle_moe_ops import reference\n"
        "right = reference.unpermute\n"
        "reference.unpermute = lambda *a, **k: right(*a, **k) + 1\n"
        "from paddle_moe_ops.__main__ import main\n"
        "sys.exit(main(['selftest']))"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout


def test_selftest_fails_where_the_library_is_missing(tmp_path):
    copy_without_library(tmp_path)
    done = run_command("selftest", cwd=tmp_path)
    assert done.returncode == 1
    assert "selftest FAILED" in done.stdout
    assert "pip install --no-build-isolation" in done.stdout
    assert "Traceback" not in done.stderr


def test_explain_answers_for_one_operator_and_for_all():
    one = run_command("explain", "moe_permute")
    assert one.returncode == 0, one.stderr
    assert one.stdout == paddle_moe_ops.explain("moe_permute") + "\n"
    everything = run_command("explain")
    assert everything.returncode == 0, everything.stderr
    assert "moe_unpermute" in everything.stdout


def test_explain_fails_if_no_backend_runs_an_operator():
    done = run_command("explain", "permute", env={"PADDLE_MOE_OPS_BACKEND": "cuda"})
    assert done.returncode == 1
    assert "permute: none (PADDLE_MOE_OPS_BACKEND must be one of" in done.stdout


def test_explain_refuses_an_unknown_operator():
    done = run_command("explain", "moe_permutate")
    assert done.returncode == 2
    assert "moe_permutate" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_arguments_of_a_command_are_named_in_one_line(tmp_path):
    done = run_command("bench", "--tokens", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    *warnings_of_paddle, line = done.stderr.splitlines()
    assert line == "bench: --tokens expected at least one argument"
    assert not any("usage" in warning for warning in warnings_of_paddle)


@pytest.mark.parametrize("command", ["env", "selftest", "explain", "bench"])
def test_help_needs_nothing(command):
    done = run_command(command, "--help", missing=OPTIONAL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


def test_without_a_command_all_are_listed():
    done = run_command(missing=OPTIONAL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_command("--help").stdout
    assert re.findall(r"^    ([a-z]+) ", done.stdout, re.MULTILINE) == ["env", "selftest", "explain", "bench"]


def test_unknown_command_is_refused():
    done = run_command("benchmark")
    assert done.returncode == 2
    assert "invalid choice" in done.stderr
