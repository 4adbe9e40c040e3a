# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Importing the package is cheap, and possible where the compiled library is missing."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path

import pytest

import paddle_moe_ops
from paddle_moe_ops import _build_check
from tests.packaging.subprocesses import copy_without_library, run_forked, run_python

PACKAGE = Path(paddle_moe_ops.__file__).parent


def test_import_loads_neither_triton_nor_torch_nor_tools_of_the_demo():
    done = run_forked(
        "import paddle\n"  # which loads rich where httpx finds what its command needs
        "before = set(sys.modules)\n"
        "import paddle_moe_ops, paddle_moe_ops.functional\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} & {'triton', 'torch', 'rich'}))"
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_every_public_name_exists():
    for name in paddle_moe_ops.__all__:
        assert getattr(paddle_moe_ops, name) is not None
    assert set(paddle_moe_ops.__all__) <= set(dir(paddle_moe_ops))


def test_submodules_are_imported_when_they_are_asked_for():
    names = [path.stem for path in PACKAGE.iterdir() if path.stem[0] != "_" and path.stem not in ("csrc", "py")]
    internal = {"backends", "bench", "explaining", "mlp", "rowmaps", "triton"}
    code = (
        "import paddle_moe_ops\n"
        "before = set(sys.modules)\n"
        f"for name in {sorted(set(names) - internal)}:\n"
        "    assert getattr(paddle_moe_ops, name).__name__ == 'paddle_moe_ops.' + name\n"
        "    assert name in dir(paddle_moe_ops)\n"
        "assert 'paddle_moe_ops.nn' not in before and 'paddle_moe_ops.nn' in sys.modules\n"
    )
    done = run_forked(code)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = paddle_moe_ops.nothing


def test_import_without_the_compiled_library_works_and_explain_says_why(tmp_path):
    copy_without_library(tmp_path)
    done = run_forked(
        "import paddle_moe_ops\nprint(paddle_moe_ops.__file__)\nprint(paddle_moe_ops.explain('moe_permute'))",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    location, explanation = done.stdout.split("\n", 1)
    assert Path(location).parent == tmp_path / "paddle_moe_ops"
    assert "pip install --no-build-isolation" in explanation


@pytest.fixture
def source_folder(tmp_path):
    """A source folder that hides an installed package from the processes started in it."""
    (tmp_path / "source").mkdir()
    copy_without_library(tmp_path / "source")
    site = tmp_path / "site"
    (site / "paddle_moe_ops-0.1.0.dist-info").mkdir(parents=True)
    (site / "paddle_moe_ops-0.1.0.dist-info" / "METADATA").write_text("Name: paddle-moe-ops\nVersion: 0.1.0\n")
    (site / "paddle_moe_ops").mkdir()
    for name in (_build_check.LIBRARY_NAME, _build_check.INFO_NAME):
        shutil.copy(PACKAGE / name, site / "paddle_moe_ops")
    return tmp_path / "source"


def run_in(source_folder, code):
    return run_python(code, cwd=source_folder, env={"PYTHONPATH": str(source_folder.parent / "site")})


def test_a_source_folder_uses_the_library_of_the_installed_package_that_it_hides(source_folder):
    done = run_in(
        source_folder,
        "import paddle, paddle_moe_ops\n"
        "from paddle_moe_ops.backends import compiled\n"
        "print(paddle_moe_ops.route(paddle.zeros([3, 1], 'int32'), num_experts=1).tokens_per_expert.tolist())\n"
        "print(paddle_moe_ops.__file__)\n"
        "print(compiled.LIBRARY)\n",
    )
    assert done.returncode == 0, done.stderr
    counts, package, library = done.stdout.splitlines()
    assert counts == "[3]"
    assert Path(package).parent == source_folder / "paddle_moe_ops"
    assert Path(library).parent == source_folder.parent / "site" / "paddle_moe_ops"


def test_a_source_folder_with_other_c_plus_plus_sources_says_what_to_do(source_folder):
    with (source_folder / "paddle_moe_ops/csrc/cpu/permute.cc").open("a", encoding="utf-8") as source:
        source.write("// changed\n")
    done = run_in(source_folder, "import paddle_moe_ops\nprint(paddle_moe_ops.explain('route'))")
    assert done.returncode == 0, done.stderr
    assert f"the source folder {source_folder / 'paddle_moe_ops'} hides the package in" in done.stdout
    assert "which has other C++ sources; install paddle_moe_ops again" in done.stdout


def test_first_use_without_paddle_says_what_to_install():
    done = run_python("import paddle_moe_ops\npaddle_moe_ops.route", missing=["paddle"])
    assert done.returncode != 0
    assert "ImportError: paddle_moe_ops needs PaddlePaddle 3.2 or 3.3, which cannot be imported" in done.stderr
    assert "`pip install --upgrade paddlepaddle`" in done.stderr


def test_first_use_with_an_old_paddle_says_what_to_install():
    done = run_forked(
        "import paddle\npaddle.version.full_version = '3.0.0'\nimport paddle_moe_ops\npaddle_moe_ops.route"
    )
    assert done.returncode != 0
    assert "ImportError: paddle_moe_ops needs PaddlePaddle 3.2 or 3.3, but 3.0.0 is installed" in done.stderr


def test_marker_of_typed_packages_is_shipped():
    assert (PACKAGE / "py.typed").exists()


def test_dir_lists_the_public_names_alone():
    for name in ("paddle_moe_ops", *(f"paddle_moe_ops.{each}" for each in paddle_moe_ops._SUBMODULES)):
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", ())
        assert set(listed) <= set(dir(module))
        assert {each for each in dir(module) if each[0] == "_"} <= {"__version__"}
        for each in set(dir(module)) - {*listed}:
            assert getattr(module, each).__name__ == f"{name}.{each}"


def test_submodules_that_the_page_of_functions_names_are_attributes():
    page = (PACKAGE.parent / "docs" / "functions.md").read_text("utf-8")
    names = {*re.findall(r"`(?:paddle_moe_ops)?\.(\w+\.\w+)`", page), "testing.routing"}
    assert len(names) > 3
    code = "import paddle_moe_ops\n" + "".join(f"paddle_moe_ops.{name}\n" for name in sorted(names))
    assert run_forked(code).returncode == 0
    with pytest.raises(AttributeError, match=r"^module 'paddle_moe_ops.compat' has no attribute 'nothing'$"):
        _ = paddle_moe_ops.compat.nothing


def test_help_begins_with_the_first_sentence_of_the_readme():
    readme = (PACKAGE.parent / "README.md").read_text("utf-8")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", readme)
    first = paddle_moe_ops.__doc__.splitlines()[0].rstrip(".")
    assert first in text
    assert re.search(rf"\n\n{re.escape(first)}", text)
