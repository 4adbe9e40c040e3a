# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Wheels and source distributions hold what they should and run; a failed build leaves no library."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import paddle_moe_ops

ROOT = Path(__file__).resolve().parents[2]
BUILD_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
BUILD_BACKEND = "tools/build_backend.py"

pytestmark = pytest.mark.slow


def run(*command, cwd, **env):
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=1200,
    )


def succeed(*command, cwd, **env):
    done = run(*command, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def copy_build_files(tree):
    (tree / BUILD_BACKEND).parent.mkdir()
    for name in (*BUILD_FILES, BUILD_BACKEND):
        shutil.copy(ROOT / name, tree / name)


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory):
    """A copy of the checkout without anything built."""
    tree = tmp_path_factory.mktemp("source")
    runpy.run_path(str(ROOT / "tools" / "fresh_environments.py"))["copy_checkout"](tree)
    return tree


@pytest.fixture(scope="module")
def source_distribution(source_tree):
    """A source distribution, made where no Paddle is."""
    blocked = "import sys; sys.modules['paddle'] = None; sys.argv = ['setup.py', '-q', 'sdist']; "
    succeed("-c", blocked + "import runpy; runpy.run_path('setup.py', run_name='__main__')", cwd=source_tree)
    (path,) = (source_tree / "dist").iterdir()
    return path


@pytest.fixture(scope="module")
def unpacked(source_distribution, tmp_path_factory):
    """The folder with the files of the source distribution."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(source_distribution) as archive:
        archive.extractall(folder)
    (tree,) = folder.iterdir()
    return tree


@pytest.fixture(scope="module")
def wheel(unpacked):
    """A wheel built from the source distribution, and the output of the build."""
    done = succeed("-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", "dist", ".", cwd=unpacked)
    (path,) = (unpacked / "dist").iterdir()
    return path, done.stdout + done.stderr


def test_wheel_holds_the_package_and_nothing_else(wheel, source_tree):
    with zipfile.ZipFile(wheel[0]) as archive:
        names = set(archive.namelist())
    metadata_folder = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    modules = {path.relative_to(source_tree).as_posix() for path in (source_tree / "paddle_moe_ops").rglob("*.py")}
    shipped_sources = {
        path.relative_to(source_tree).as_posix()
        for pattern in ("csrc/include/pmo/*.h",)
        for path in source_tree.glob(f"paddle_moe_ops/{pattern}")
    }
    built = {f"paddle_moe_ops/{name}" for name in ("_C.py", "_C_pd_.so", "_build_info.json", "py.typed")}
    assert {name for name in names if not name.startswith(metadata_folder)} == modules | shipped_sources | built


def test_name_of_a_wheel_carries_the_version_of_paddle_and_of_python(wheel):
    import paddle

    minor = "".join(paddle.version.full_version.split(".")[:2])
    assert re.match(rf"paddle_moe_ops-{paddle_moe_ops.__version__}\+paddle{minor}\.(cpu|cu\d+)-cp3", wheel[0].name)


def test_build_prints_a_summary(wheel):
    assert re.search(r"paddle_moe_ops: built \d+ sources in [\d.]+ s", wheel[1])
    assert re.search(r"Paddle +\d+\.\d+\.\d+ \(commit [0-9a-f]{10}\)", wheel[1])
    assert re.search(r"CUDA +(on|off): \w+", wheel[1])


def test_library_names_no_folder_of_the_build_machine(wheel, unpacked):
    import paddle

    with zipfile.ZipFile(wheel[0]) as archive:
        library = archive.read("paddle_moe_ops/_C_pd_.so")
    for folder in (Path(paddle.__file__).parents[1], unpacked):
        assert str(folder).encode() not in library


def test_installed_wheel_passes_its_selftest(wheel, tmp_path):
    succeed("-m", "pip", "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel[0]), cwd=tmp_path)
    env = {"PYTHONPATH": str(tmp_path / "site")}
    location = succeed("-c", "import paddle_moe_ops; print(paddle_moe_ops.__file__)", cwd=tmp_path, **env)
    assert Path(location.stdout.strip()).is_relative_to(tmp_path)
    assert "selftest passed" in succeed("-m", "paddle_moe_ops", "selftest", cwd=tmp_path, **env).stdout


def test_source_distribution_holds_the_checkout_and_nothing_built(source_distribution, source_tree):
    assert source_distribution.name == f"paddle_moe_ops-{paddle_moe_ops.__version__}.tar.gz"
    with tarfile.open(source_distribution) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    not_checkout = ("build/", "dist/", "paddle_moe_ops.egg-info/", ".")
    files = {path.relative_to(source_tree).as_posix() for path in source_tree.rglob("*") if path.is_file()}
    assert {name for name in files - names if not name.startswith(not_checkout)} == set()
    assert not {name for name in names if name.endswith((".so", ".o", ".pyc", "/_C.py", "/_build_info.json"))}


BINDING = """
#include "paddle/binding.h"
std::vector<paddle::Tensor> Copy(const paddle::Tensor& x) { return {x.copy_to(x.place(), true)}; }
PD_BUILD_OP(pmo_packaging_copy).Inputs({"X"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(Copy));
"""


@pytest.fixture
def small_tree(tmp_path):
    """The package with one small operator, so that it builds in seconds."""
    copy_build_files(tmp_path)
    package = tmp_path / "paddle_moe_ops"
    (package / "csrc/paddle").mkdir(parents=True)
    (package / "csrc/cpu").mkdir()
    for name in ("_version.py", "_build_check.py"):
        shutil.copy(ROOT / "paddle_moe_ops" / name, package)
    (package / "__init__.py").touch()
    header = '#pragma once\n#include "paddle/phi/api/ext/op_meta_info.h"\n'
    (package / "csrc/paddle/binding.h").write_text(header, encoding="utf-8")
    (package / "csrc/paddle/copy_op.cc").write_text(BINDING, encoding="utf-8")
    (package / "csrc/cpu/helper.h").write_text("inline int helper() { return 1; }\n", encoding="utf-8")
    (package / "csrc/cpu/helper.cc").write_text('#include "cpu/helper.h"\nint use() { return helper(); }\n')
    return tmp_path


def built_in_place(tree):
    package = tree / "paddle_moe_ops"
    return sorted(path.name for path in (*package.glob("_C*"), *package.glob("_build_info.json")))


def compiled_sources(done):
    return sorted(set(re.findall(r" -c \S*/(\w+\.cc) ", done.stdout + done.stderr)))


def test_failed_compile_fails_the_build_and_leaves_no_library(small_tree):
    build = ("setup.py", "build_ext", "--inplace")
    assert compiled_sources(succeed(*build, cwd=small_tree)) == ["copy_op.cc", "helper.cc"]
    assert built_in_place(small_tree) == ["_C.py", "_C_pd_.so", "_build_info.json"]
    header = small_tree / "paddle_moe_ops/csrc/cpu/helper.h"
    good = header.read_text(encoding="utf-8")

    header.write_text("no C++", encoding="utf-8")
    failed = run(*build, cwd=small_tree)
    assert failed.returncode != 0
    assert "these sources do not compile" in failed.stdout + failed.stderr
    assert built_in_place(small_tree) == []

    header.write_text(good, encoding="utf-8")
    assert compiled_sources(succeed(*build, cwd=small_tree)) == ["helper.cc"]
    assert built_in_place(small_tree) == ["_C.py", "_C_pd_.so", "_build_info.json"]


def test_a_change_of_the_precompiled_header_compiles_the_bindings_again(small_tree):
    build = ("setup.py", "build_ext", "--inplace")
    header = small_tree / "paddle_moe_ops/csrc/paddle/binding.h"
    succeed(*build, cwd=small_tree)
    with header.open("a", encoding="utf-8") as file:
        file.write("inline int more() { return 1; }\n")
    assert compiled_sources(succeed(*build, cwd=small_tree)) == ["copy_op.cc"]
    with header.open("a", encoding="utf-8") as file:
        file.write("no C++")
    failed = run(*build, cwd=small_tree)
    assert "these sources do not compile" in failed.stdout + failed.stderr
    assert built_in_place(small_tree) == []


def test_build_without_paddle_says_what_to_install(small_tree):
    blocked = "import sys; sys.modules['paddle'] = None; sys.argv = ['setup.py', 'build_ext', '--inplace']; "
    failed = run("-c", blocked + "import runpy; runpy.run_path('setup.py', run_name='__main__')", cwd=small_tree)
    assert failed.returncode != 0
    (line,) = failed.stderr.splitlines()
    assert "`pip install --upgrade paddlepaddle`" in line
    assert "--no-build-isolation" in line


def test_source_distribution_made_where_paddle_is_names_no_paddle(small_tree):
    succeed("setup.py", "-q", "sdist", cwd=small_tree)
    (path,) = (small_tree / "dist").iterdir()
    assert path.name == f"paddle_moe_ops-{paddle_moe_ops.__version__}.tar.gz"


def test_build_without_a_compiler_says_in_one_line_what_to_install(small_tree):
    failed = run("setup.py", "build_ext", "--inplace", cwd=small_tree, CXX="/nowhere/g++")
    assert failed.returncode != 0
    assert failed.stderr.splitlines()[-1].startswith(
        "paddle_moe_ops: the C++ compiler was not found (/nowhere/g++); install g++"
    )
    assert "Traceback" not in failed.stderr
    assert built_in_place(small_tree) == []


def test_build_without_the_headers_of_python_says_in_one_line_what_to_install(small_tree):
    without = (
        "import runpy, sys, sysconfig\n"
        "path = sysconfig.get_path\n"
        "sysconfig.get_path = lambda name, *a, **k: '/nowhere' if name == 'include' else path(name, *a, **k)\n"
        "sys.argv = ['setup.py', 'build_ext', '--inplace']\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    failed = run("-c", without, cwd=small_tree)
    assert failed.returncode != 0
    assert failed.stderr.splitlines()[-1].startswith(
        "paddle_moe_ops: the headers of this Python were not found (/nowhere/Python.h); install them ("
    )
    assert "Traceback" not in failed.stderr
    assert built_in_place(small_tree) == []


def test_build_without_setuptools_says_in_one_line_what_to_install(tmp_path):
    blocked = "import sys; sys.modules['setuptools'] = None; sys.path.insert(0, 'tools'); import build_backend"
    failed = run("-c", blocked, cwd=ROOT)
    assert failed.returncode != 0
    assert failed.stderr == 'paddle_moe_ops: setuptools is missing; run: pip install "setuptools>=77"\n'


def test_build_with_an_old_setuptools_says_in_one_line_what_to_install():
    old = "import setuptools; setuptools.__version__ = '65.5.0'; import runpy; runpy.run_path('setup.py')"
    failed = run("-c", old, cwd=ROOT)
    assert failed.returncode != 0
    assert failed.stderr == (
        'paddle_moe_ops: setuptools must be 77 or newer, but 65.5.0 is installed; run: pip install "setuptools>=77"\n'
    )
