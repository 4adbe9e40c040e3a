# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The choices that setup.py makes, without building anything."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import paddle
import pytest
from paddle.utils import cpp_extension

import paddle_moe_ops

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("PADDLE_MOE_OPS_CORE_OBJECTS", "PADDLE_MOE_OPS_CUDA", "PADDLE_MOE_OPS_LOCAL_VERSION"):
        monkeypatch.delenv(name, raising=False)


def run_setup(monkeypatch):
    """The names defined in setup.py, and the arguments that it passes to Paddle's setup."""
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
        ((12, 8), ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120", "compute_120"]),
        ((13, 0), ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_110", "sm_120", "compute_120"]),
    ],
)
def test_device_code_follows_the_version_of_nvcc(monkeypatch, nvcc, expected):
    names, _ = run_setup(monkeypatch)
    flags = names["gencode_flags"](nvcc)
    assert codes(flags) == expected
    assert all(
        f"compute_{code.partition('_')[2]},code={code}" in flag for flag, code in zip(flags, expected, strict=True)
    )


@pytest.mark.parametrize(("nvcc", "flag"), [((12, 6), "-Xfatbin=-compress-all"), ((13, 0), "--compress-mode=size")])
def test_device_code_is_compressed_so_that_drivers_of_that_cuda_read_it(monkeypatch, nvcc, flag):
    names, _ = run_setup(monkeypatch)
    assert names["compression_flags"](nvcc) == [flag]


def test_with_the_url_of_the_project_metadata_has_absolute_links(monkeypatch):
    monkeypatch.setenv("REPO_URL", "https://example.org/owner/name/")
    names, handed = run_setup(monkeypatch)
    url, tag = "https://example.org/owner/name", f"v{names['VERSION']}"
    text = handed["long_description"]
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 20
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert f"]({url}/blob/{tag}/docs/functions.md)" in text
    assert f"]({url}/raw/{tag}/docs/speed.svg)" in text
    assert f"]({url}/issues)" in text
    assert handed["project_urls"]["Issues"] == f"{url}/issues"


def test_without_the_url_metadata_has_readme_as_it_is(monkeypatch):
    monkeypatch.delenv("REPO_URL", raising=False)
    _, handed = run_setup(monkeypatch)
    assert handed["long_description"] == (ROOT / "README.md").read_text("utf-8")
    assert "project_urls" not in handed


def test_cuda_is_off_when_asked_to_be(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_CUDA", "0")
    names, _ = run_setup(monkeypatch)
    assert (names["USE_CUDA"], names["CUDA_REASON"]) == (False, "PADDLE_MOE_OPS_CUDA=0")


@pytest.fixture
def without_nvcc(monkeypatch):
    monkeypatch.setattr(cpp_extension.cpp_extension, "CUDA_HOME", None)


@pytest.fixture
def cuda_build(monkeypatch):
    """Paddle as it would be with CUDA 12.9."""
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.version, "cuda", lambda: "12.9")


def test_cuda_build_of_paddle_without_nvcc_is_refused_unless_cuda_is_switched_off(
    monkeypatch, cuda_build, without_nvcc
):
    with pytest.raises(SystemExit) as stop:
        run_setup(monkeypatch)
    assert stop.value.code == (
        "paddle_moe_ops: Paddle is compiled with CUDA, but nvcc was not found; set CUDA_HOME, "
        "or PADDLE_MOE_OPS_CUDA=0 to build the CPU operators alone"
    )
    monkeypatch.setenv("PADDLE_MOE_OPS_CUDA", "0")
    assert run_setup(monkeypatch)[0]["USE_CUDA"] is False


def test_cpu_build_of_paddle_needs_no_nvcc(monkeypatch, without_nvcc):
    assert run_setup(monkeypatch)[0]["USE_CUDA"] is False


@pytest.mark.parametrize("version", ["3.1.1", "3.0.0"])
def test_old_paddle_is_refused_with_the_versions_that_work(monkeypatch, version):
    monkeypatch.setattr(paddle.version, "full_version", version)
    with pytest.raises(SystemExit) as stop:
        run_setup(monkeypatch)
    assert stop.value.code.startswith(f"paddle_moe_ops needs PaddlePaddle 3.2 or 3.3, but {version} is installed")
    assert "\n" not in stop.value.code


@pytest.mark.parametrize(
    ("paddle_version", "local"), [("3.2.2", "paddle32.cpu"), ("3.3.1", "paddle33.cpu"), ("3.10.0", "paddle310.cpu")]
)
def test_version_names_the_minor_version_of_paddle(monkeypatch, paddle_version, local):
    monkeypatch.setattr(paddle.version, "full_version", paddle_version)
    assert run_setup(monkeypatch)[1]["version"] == f"{paddle_moe_ops.__version__}+{local}"


def test_version_says_cpu_where_the_operators_for_a_cuda_paddle_are_those_of_the_cpu(monkeypatch, cuda_build):
    monkeypatch.setenv("PADDLE_MOE_OPS_CUDA", "0")
    assert run_setup(monkeypatch)[1]["version"].endswith(".cpu")


def test_local_version_can_be_given(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_LOCAL_VERSION", "paddle33.cpu.2")
    assert run_setup(monkeypatch)[1]["version"] == f"{paddle_moe_ops.__version__}+paddle33.cpu.2"
    monkeypatch.setenv("PADDLE_MOE_OPS_LOCAL_VERSION", "")
    assert run_setup(monkeypatch)[1]["version"].startswith(f"{paddle_moe_ops.__version__}+paddle")


@pytest.mark.parametrize("given", ["+cpu", "Mine", "paddle33..cpu", "paddle33.", "a b", "cpu\n"])
def test_local_version_refuses_what_no_version_can_hold(monkeypatch, given):
    monkeypatch.setenv("PADDLE_MOE_OPS_LOCAL_VERSION", given)
    with pytest.raises(SystemExit) as stop:
        run_setup(monkeypatch)
    assert stop.value.code == (
        "paddle_moe_ops: PADDLE_MOE_OPS_LOCAL_VERSION must be letters a-z and digits with dots in between, "
        f"such as paddle33.cpu, but got {given!r}"
    )


def test_version_names_cuda_where_cuda_operators_are_built(monkeypatch, cuda_build, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.86\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(cpp_extension.cpp_extension, "CUDA_HOME", str(tmp_path))
    version = run_setup(monkeypatch)[1]["version"]
    assert re.fullmatch(re.escape(paddle_moe_ops.__version__) + r"\+paddle\d+\.cu129", version)


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


def test_extension_links_the_objects_of_a_core_that_is_built(monkeypatch, tmp_path):
    csrc = ROOT / "paddle_moe_ops/csrc"
    core = {path.relative_to(csrc).with_suffix(".o") for path in csrc.rglob("*.cc") if path.parent.name != "paddle"}
    for path in core:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.setenv("PADDLE_MOE_OPS_CORE_OBJECTS", str(tmp_path))
    (extension,) = run_setup(monkeypatch)[1]["ext_modules"]
    assert {Path(path).relative_to(tmp_path) for path in extension.extra_objects} == core
    assert {Path(path) for path in extension.sources} == {path.relative_to(ROOT) for path in csrc.glob("paddle/*.cc")}


def test_objects_of_the_core_must_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("PADDLE_MOE_OPS_CORE_OBJECTS", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        run_setup(monkeypatch)
    first = tmp_path / "common/checks.o"
    assert stop.value.code == (
        f"paddle_moe_ops: PADDLE_MOE_OPS_CORE_OBJECTS is {str(tmp_path)!r}, but {first} does not exist"
    )


def test_objects_of_the_core_are_compiled_with_the_flags_of_the_extension(monkeypatch):
    names, _ = run_setup(monkeypatch)
    variables = dict(re.findall(r"^(CORE_FLAGS|RELEASE_FLAGS) := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M))
    defaults = {"-g0", "-fno-fast-math"}
    assert set(names["CXX_FLAGS"]) - defaults <= set(" ".join(variables.values()).split())
