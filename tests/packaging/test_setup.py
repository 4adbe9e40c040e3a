# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The choices that setup.py makes, without building anything."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from paddle.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]


def run_setup(monkeypatch):
    """The names defined in setup.py, and what it would have handed to Paddle's setup."""
    handed = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cpp_extension, "setup", lambda **arguments: handed.update(arguments))
    return runpy.run_path(str(ROOT / "setup.py")), handed


def codes(flags):
    return [flag.partition(",code=")[2] for flag in flags]


@pytest.mark.parametrize(
    ("nvcc", "expected"),
    [
        ((11, 0), ["sm_80", "compute_80"]),
        ((11, 8), ["sm_80", "sm_86", "sm_89", "sm_90", "compute_90"]),
        ((12, 8), ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_120"]),
        ((13, 0), ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"]),
    ],
)
def test_device_code_follows_the_version_of_nvcc(monkeypatch, nvcc, expected):
    names, _ = run_setup(monkeypatch)
    flags = names["gencode_flags"](nvcc)
    assert codes(flags) == expected
    assert all(
        f"compute_{code.partition('_')[2]},code={code}" in flag for flag, code in zip(flags, expected, strict=True)
    )


def test_cuda_is_off_when_asked_to_be(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_CUDA", "0")
    names, _ = run_setup(monkeypatch)
    assert (names["USE_CUDA"], names["CUDA_REASON"]) == (False, "PADDLE_MOE_OPS_CUDA=0")


def test_switch_for_cuda_refuses_other_values(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_CUDA", "on")
    with pytest.raises(SystemExit, match="PADDLE_MOE_OPS_CUDA must be 0 or 1, but got 'on'"):
        run_setup(monkeypatch)


def test_extension_is_made_of_every_core_and_binding_source(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_CUDA", "0")
    _, handed = run_setup(monkeypatch)
    assert handed["name"] == "paddle_moe_ops._C"
    (extension,) = handed["ext_modules"]
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "paddle_moe_ops/csrc").rglob("*.cc")}
    assert set(extension.sources) == expected
    flags = extension.extra_compile_args["cxx"]
    assert "-ffp-contract=off" in flags
    assert not {"-ffast-math", "-Ofast"} & set(flags)
