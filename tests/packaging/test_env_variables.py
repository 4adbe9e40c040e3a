# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the package mean what their table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddle_moe_ops import _env
from tests.packaging.subprocesses import run_forked, run_python
from tests.pairwise import in_turn

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
PRINT_THREADS = "from paddle_moe_ops import _env; print(_env.num_threads())"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [variable.name for variable in _env.VARIABLES] + ["OMP_NUM_THREADS"]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("value", "backend"), [(None, None), ("", None), ("reference", "reference")])
def test_backend_is_the_name_given(monkeypatch, value, backend):
    if value is not None:
        monkeypatch.setenv("PADDLE_MOE_OPS_BACKEND", value)
    assert _env.backend() == backend


@pytest.mark.parametrize(("value", "validate"), [(None, None), ("", None), ("0", False), ("1", True)])
def test_validate_default(monkeypatch, value, validate):
    if value is not None:
        monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", value)
    assert _env.validate_default() is validate


def test_validate_refuses_other_values(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "yes")
    with pytest.raises(ValueError, match=re.escape("PADDLE_MOE_OPS_VALIDATE must be 0 or 1, but got 'yes'")):
        _env.validate_default()


def test_values_hold_from_the_next_call(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_NUM_THREADS", "3")
    assert _env.num_threads() == 3
    monkeypatch.setenv("PADDLE_MOE_OPS_NUM_THREADS", "5")
    assert _env.num_threads() == 5
    monkeypatch.delenv("PADDLE_MOE_OPS_NUM_THREADS")
    assert _env.num_threads() is None


@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5", "²"])
def test_own_thread_count_refuses_what_is_no_positive_integer(monkeypatch, value):
    monkeypatch.setenv("PADDLE_MOE_OPS_NUM_THREADS", value)
    text = f"PADDLE_MOE_OPS_NUM_THREADS must be a positive integer, but got {value!r}"
    with pytest.raises(ValueError, match=re.escape(text)):
        _env.num_threads()


def test_own_thread_count_goes_before_that_of_openmp(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert _env.num_threads() == 2
    monkeypatch.setenv("PADDLE_MOE_OPS_NUM_THREADS", "7")
    assert _env.num_threads() == 7


@pytest.mark.parametrize(("value", "threads"), [("4,2", 4), (" 3 ", 3), ("0", None), ("all", None)])
def test_openmp_forms_are_understood_or_passed_over(monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert _env.num_threads() == threads


def test_the_one_that_paddle_writes_does_not_count():
    done = run_python("import os, paddle; assert os.environ['OMP_NUM_THREADS'] == '1'\n" + PRINT_THREADS)
    assert (done.stdout.strip(), done.returncode) == ("None", 0), done.stderr


@pytest.mark.parametrize(("value", "threads"), [("1", "1"), pytest.param("4,2", "4", marks=pytest.mark.slow)])
def test_a_number_that_the_user_set_counts_after_importing_paddle(value, threads):
    done = run_python("import paddle\n" + PRINT_THREADS, env={"OMP_NUM_THREADS": value})
    assert (done.stdout.strip(), done.returncode) == (threads, 0), done.stderr


def test_a_one_counts_where_the_start_of_the_process_is_not_recorded(monkeypatch):
    monkeypatch.setattr(_env, "_environment_at_start", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(_env.sys.modules, "paddle", object())
    assert _env.num_threads() is None
    monkeypatch.delitem(_env.sys.modules, "paddle")
    assert _env.num_threads() == 1


@pytest.mark.parametrize(
    ("value", "isa"), [(None, "avx512"), ("", "avx512"), ("auto", "avx512"), ("avx2", "avx2"), ("generic", "generic")]
)
def test_instruction_set_is_limited_to_the_one_given(monkeypatch, value, isa):
    if value is not None:
        monkeypatch.setenv("PADDLE_MOE_OPS_MAX_CPU_ISA", value)
    assert _env.CPU_ISAS[_env.max_cpu_isa()] == isa


@pytest.mark.parametrize("value", ["AVX2", "avx512", "sse2", " "])
def test_instruction_set_refuses_other_values(monkeypatch, value):
    monkeypatch.setenv("PADDLE_MOE_OPS_MAX_CPU_ISA", value)
    text = f"PADDLE_MOE_OPS_MAX_CPU_ISA must be auto, avx2 or generic, but got {value!r}"
    with pytest.raises(ValueError, match=re.escape(text)):
        _env.max_cpu_isa()


def test_compiled_operators_keep_to_the_instruction_set_given():
    code = """
from paddle_moe_ops._report import used_cpu_isa
from paddle_moe_ops.backends import compiled
assert compiled.backend.unavailable() is None
print(used_cpu_isa())
"""
    done = run_forked(code, env={"PADDLE_MOE_OPS_MAX_CPU_ISA": "generic"})
    assert (done.stdout.strip(), done.returncode) == ("generic", 0), done.stderr


@in_turn(
    {
        "variable, value, expected": [
            ("PADDLE_MOE_OPS_MAX_CPU_ISA", "sse2", "auto, avx2 or generic"),
            ("PADDLE_MOE_OPS_NUM_THREADS", "many", "a positive integer"),
        ],
        "backend": [None, "compiled"],
    }
)
def test_operators_raise_a_value_error_for_a_bad_value(variable, value, expected, backend):
    """As for PADDLE_MOE_OPS_VALIDATE and PADDLE_MOE_OPS_BACKEND."""
    code = "import paddle, paddle_moe_ops\npaddle_moe_ops.route(paddle.zeros([3, 1], 'int32'), num_experts=1)"
    environment = {variable: value} if backend is None else {variable: value, "PADDLE_MOE_OPS_BACKEND": backend}
    done = run_forked(code, env=environment)
    assert done.stderr.rstrip().endswith(f"ValueError: {variable} must be {expected}, but got {value!r}")


def test_the_page_has_the_variables_that_the_sources_name():
    """Each in the table and in a section of its own, so that a new one without both fails."""
    sources = [ROOT / "setup.py", *(ROOT / "paddle_moe_ops").rglob("*.py")]
    sources += [path for path in (ROOT / "paddle_moe_ops" / "csrc").rglob("*.*") if path.is_file()]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    named = {name for text in texts for name in re.findall(r"\bPADDLE_MOE_OPS_[A-Z_]*[A-Z]\b", text)}
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[`(PADDLE_MOE_OPS_\w+)`\]", page, re.MULTILINE)) == named
    assert set(re.findall(r"^### (PADDLE_MOE_OPS_\w+)$", page, re.MULTILINE)) == named
    assert {variable.name for variable in _env.VARIABLES} <= named
