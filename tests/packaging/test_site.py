# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Properties of the documentation site that `make docs`, where each warning is an error, does not check."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.public_api import public_modules

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OF_ROOT = {"index.md", "zh.md", "contributing.md", "changelog.md"}  # of files in the root, by tools/docs_site.py
# Generated pages, each with a heading and a result that it must have.
GENERATED = {
    "performance_gpu.md": ("# Operators on GPUs\n", "### moe_permute:bf16\n"),
    "performance_cpu.md": ("# Operators on CPUs\n", "### permute:bf16\n"),
    "float8_loss_curves.md": ("# Loss curves in float8\n", "Losses are in nats per byte"),
    "serving_performance.md": ("# Layers with few tokens: measured\n", "\n## NVIDIA H200\n"),
    "layer_performance.md": ("# Layers of experts\n", "\n## Beside SonicMoE: NVIDIA H200\n"),
    "expert_parallel_performance.md": (
        "# Experts on several GPUs: measured\n",
        "\n## Where the time of a layer goes\n",
    ),
    "scaling.md": ("# Experts on many GPUs: ", "\n### DeepSeek-V3\n"),
    "coverage.md": ("# Coverage\n", "## The C++ core\n"),
    "gpu_validation.md": ("# What ran on a GPU\n", "| operators under Paddle 3.3.1 on the device `cuda_rig`"),
}


def test_every_public_name_is_in_the_reference_by_a_path_that_users_import():
    text = "".join(path.read_text("utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
    shown = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    modules = {module.__name__: module for module in public_modules()}
    objects = []
    for path in shown:
        if path in modules:
            objects += [getattr(modules[path], name) for name in modules[path].__all__]
        else:
            module, _, name = path.rpartition(".")
            assert name in modules[module].__all__, path
            objects.append(getattr(modules[module], name))
    for path, module in modules.items():
        for name in set(module.__all__) - {"__version__"}:
            assert any(getattr(module, name) is each for each in objects), f"{path}.{name}"


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    assert named == OF_ROOT | set(GENERATED) | {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_to_files(page):
    for target in LINK.findall(page.read_text("utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """Folder of the generated pages, written as by `make docs`: in a process without Paddle."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "sitecustomize.py").write_text("import sys\n\nsys.modules['paddle'] = None\n", "utf-8")
    command = [sys.executable, ROOT / "tools/docs_pages.py", "--out", folder / "out"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.mark.slow  # .ci/run writes these pages as well, and checks their links
def test_every_generated_page_has_its_results_and_links_lead_to_files(generated):
    assert {path.name for path in generated.glob("*.md")} == set(GENERATED)
    for name, texts in GENERATED.items():
        page = (generated / name).read_text("utf-8")
        for text in texts:
            assert text in page, name
        for target in LINK.findall(page):
            beside = (generated / target).exists() or (DOCS / target).exists()
            assert "://" in target or beside, (name, target)


def test_generated_pages_are_named_by_their_titles_and_linked_nowhere_in_git():
    """GitHub has no such pages; tools/docs_site.py makes links of emphasised titles."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    texts = {path: path.read_text("utf-8") for path in (ROOT / "README.md", *DOCS.rglob("*.md"))}
    for name in GENERATED:
        (title,) = re.findall(rf"^ +- (.+): {name}$", nav, re.MULTILINE)
        assert any(f"*{title}*" in text for text in texts.values()), title
        assert not any(f"{name})" in text or f"{name}#" in text for text in texts.values()), name
