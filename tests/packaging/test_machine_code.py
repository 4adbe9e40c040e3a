# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Hashes of machine code: comments and names of files leave them as they are, and code does not."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "gpu_rig"
SOURCE = """
int first(int); int other(int);
namespace { int hidden(int x) { return first(x) + 1000; } }
const char* text() { return "abc"; }
int call(int x) { return hidden(x); }
"""


@pytest.fixture(scope="module")
def tools() -> dict:
    return runpy.run_path(str(TOOLS / "machine_code.py"))


@pytest.fixture
def compiled(tmp_path):
    """Compiles a source, with debug information."""

    def compile_source(text: str, name: str = "source") -> Path:
        source = tmp_path / f"{name}.cc"
        source.write_text(text, encoding="utf-8")
        subprocess.run(["g++", "-O1", "-g", "-c", source, "-o", source.with_suffix(".o")], check=True)
        return source.with_suffix(".o")

    return compile_source


def test_a_comment_and_the_name_of_the_file_leave_the_hash_as_it_is(tools, compiled):
    hash_of = tools["machine_code_hash"]
    assert hash_of(compiled(SOURCE)) == hash_of(compiled("// a comment\n" + SOURCE, "other"))


@pytest.mark.parametrize(
    ("old", "new"), [("1000", "1001"), ("first(x)", "other(x)"), ("abc", "abd")], ids=["constant", "call", "text"]
)
def test_code_changes_the_hash(tools, compiled, old, new):
    hash_of = tools["machine_code_hash"]
    assert hash_of(compiled(SOURCE)) != hash_of(compiled(SOURCE.replace(old, new), "other"))


def test_code_for_the_gpu_changes_the_hash(tools, compiled, monkeypatch, tmp_path):
    """A stand-in for cuobjdump extracts a file that lies next to the object."""
    program = tmp_path / "cuobjdump"
    program.write_text('#!/bin/sh\ncp "$3.device" device.cubin\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    hashes = []
    for text in (SOURCE, "// a comment\n" + SOURCE, SOURCE.replace("1000", "1001")):
        whole = shutil.copy(compiled(SOURCE), tmp_path / "a.cu.o")
        shutil.copy(compiled(text, "device"), f"{whole}.device")
        hashes.append(tools["machine_code_hash"](Path(whole)))
    assert hashes[0] == hashes[1] != hashes[2]


def test_hashes_of_files_in_names_do_not_count(tools):
    first = b"_ZN3pmo4cuda43_GLOBAL__N__dbdb3992_10_permute_cu_7d673ee411move"
    other = first.replace(b"dbdb3992", b"01234567").replace(b"7d673ee4", b"89abcdef")
    assert tools["without_file_hashes"](first) == tools["without_file_hashes"](other) != first


def test_a_source_counts_as_newer_only_if_code_that_includes_it_differs():
    newer = runpy.run_path(str(TOOLS / "report.py"))["with_other_code"]
    now = {
        "core/cuda/a.cu": {"hash": "1", "sources": ["a.cu", "common.h"]},
        "core/cuda/b.cu": {"hash": "2", "sources": ["b.cu", "common.h", "b.h"]},
        "rig/op.cc": {"hash": "3", "sources": ["op.cc", "a.h"]},
    }
    names = ["a.cu", "b.cu", "common.h", "b.h", "deleted.h"]
    assert newer(names, {"core/cuda/a.cu": "1", "core/cuda/b.cu": "2"}, now) == ["deleted.h"]
    assert newer(names, {"core/cuda/a.cu": "1", "core/cuda/b.cu": "0"}, now) == ["b.cu", "common.h", "b.h", "deleted.h"]
    assert newer(names, {"core/cuda/a.cu": "1"}, now) == ["b.cu", "common.h", "b.h", "deleted.h"]
    assert newer(["op.cc"], {"core/cuda/a.cu": "1", "rig/op.cc": "3"}, now) == []
    assert newer(names, {}, now) == newer(names, {"core/cuda/a.cu": "1"}, {}) == names
    moved = {"core/cuda/moe/a.cu": {"hash": "1", "sources": ["a.cu"]}}
    assert newer(["a.cu"], {"core/cuda/a.cu": "1"}, moved) == []
