# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Importing the package is cheap, and possible where the compiled library is missing."""

from __future__ import annotations

from pathlib import Path

import paddle_moe_ops
from tests.packaging.subprocesses import copy_without_library, run_python

PACKAGE = Path(paddle_moe_ops.__file__).parent


def test_import_loads_neither_triton_nor_torch_nor_tools_of_the_demo():
    done = run_python(
        "import paddle_moe_ops, paddle_moe_ops.functional\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'triton', 'torch', 'rich'}))"
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_every_public_name_exists():
    for name in paddle_moe_ops.__all__:
        assert getattr(paddle_moe_ops, name) is not None
    assert set(paddle_moe_ops.__all__) <= set(dir(paddle_moe_ops))


def test_import_without_the_compiled_library_works_and_explain_says_why(tmp_path):
    copy_without_library(tmp_path)
    done = run_python(
        "import paddle_moe_ops\nprint(paddle_moe_ops.__file__)\nprint(paddle_moe_ops.explain('moe_permute'))",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    location, explanation = done.stdout.split("\n", 1)
    assert Path(location).parent == tmp_path / "paddle_moe_ops"
    assert "pip install --no-build-isolation" in explanation


def test_first_use_without_paddle_says_what_to_install():
    done = run_python("import paddle_moe_ops\npaddle_moe_ops.route", missing=["paddle"])
    assert done.returncode != 0
    assert "ImportError: paddle_moe_ops needs PaddlePaddle: pip install paddlepaddle" in done.stderr


def test_marker_of_typed_packages_is_shipped():
    assert (PACKAGE / "py.typed").exists()
