# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""tools/release.py: what stops a release, and the files that it makes on any machine."""

from __future__ import annotations

import hashlib
import io
import json
import re
import runpy
import tarfile
from pathlib import Path

import pytest

import paddle_moe_ops

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "release.py"))
VERSION = paddle_moe_ops.__version__
SDIST = f"paddle_moe_ops-{VERSION}.tar.gz"
WHEELS = [
    f"paddle_moe_ops-{VERSION}+paddle33.cu126-cp312-cp312-linux_x86_64.whl",
    f"paddle_moe_ops-{VERSION}+paddle33.cpu-cp312-cp312-linux_x86_64.whl",
]


def archive(path, names, *, mtime, uid=0):
    """A source distribution of small files."""
    with tarfile.open(path, "w:gz") as file:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uid = len(name), mtime, uid
            file.addfile(member, io.BytesIO(name.encode()))


def test_two_builds_of_one_tree_are_equal_to_the_bit(tmp_path):
    archive(tmp_path / "a.tar.gz", ["x/b", "x/a"], mtime=5)
    archive(tmp_path / "b.tar.gz", ["x/a", "x/b"], mtime=7.5, uid=1000)
    one, other = (TOOL["packed_anew"](tmp_path / f"{name}.tar.gz", 123) for name in "ab")
    assert one == other
    with tarfile.open(fileobj=io.BytesIO(one)) as file:
        assert [(each.name, each.mtime, each.mode) for each in file] == [("x/a", 123, 0o644), ("x/b", 123, 0o644)]
        assert file.extractfile("x/b").read() == b"x/b"


DATED = f"## [{VERSION}] - 2027-01-01\n"
BAD = {
    "another tag": (("v9.9", DATED, WHEELS), f"the tag must be v{VERSION}, but is v9.9"),
    "no tag": (("", DATED, WHEELS), f"the tag must be v{VERSION}, but is missing"),
    "no changes": ((f"v{VERSION}", "", WHEELS), f"CHANGELOG.md must have a part for {VERSION}, but has none"),
    "no date": (
        (f"v{VERSION}", f"## [{VERSION}] - unreleased\n", WHEELS),
        f"CHANGELOG.md must have the date of {VERSION}, but it is called unreleased",
    ),
    "another version": (
        (f"v{VERSION}", DATED, ["paddle_moe_ops-9.9.tar.gz"]),
        f"a file must be a wheel or the source distribution of {VERSION}, but got paddle_moe_ops-9.9.tar.gz",
    ),
    "a wheel without its Paddle": (
        (f"v{VERSION}", DATED, [f"paddle_moe_ops-{VERSION}-cp312-cp312-linux_x86_64.whl"]),
        f"a file must be a wheel or the source distribution of {VERSION}, "
        f"but got paddle_moe_ops-{VERSION}-cp312-cp312-linux_x86_64.whl",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_release_is_stopped(case):
    (tag, changes, names), text = BAD[case]
    assert TOOL["problems"](tag, VERSION, changes, [Path(name) for name in names], dry_run=False) == [text]


def test_a_dry_run_makes_all_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")
    for name in WHEELS:
        (tmp_path / name).write_text(name)
    archive(tmp_path / SDIST, [f"paddle_moe_ops-{VERSION}/PKG-INFO"], mtime=5)
    out = tmp_path / "out"
    files = [str(tmp_path / name) for name in (*WHEELS, SDIST)]
    assert TOOL["main"](["--dry-run", "--repository", "some/one", "--out", str(out), *files]) == 0
    assert "3 files, SHA256SUMS, sbom.json, notes.md" in capsys.readouterr().out
    sums = dict(line.split("  ")[::-1] for line in (out / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in (*WHEELS, SDIST)}
    notes = (out / "notes.md").read_text()
    links = f"https://github.com/some/one/releases/expanded_assets/v{VERSION}"
    assert f'    pip install "paddle-moe-ops=={VERSION}+paddle33.cpu" --find-links {links}\n' in notes
    assert "`paddle33.cpu`, `paddle33.cu126`" in notes
    assert "### Added" in notes
    needed = json.loads((out / "sbom.json").read_text())
    assert [each["name"] for each in needed["components"]] == ["ml_dtypes", "numpy", "paddlepaddle"]


def test_a_release_with_problems_makes_nothing(tmp_path, capsys):
    assert TOOL["main"](["--tag", "v9.9", "--out", str(tmp_path / "out"), WHEELS[0]]) == 1
    assert f"release: the tag must be v{VERSION}, but is v9.9\n" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_workflow_publishes_what_the_tool_makes_and_calls_the_one_that_builds():
    text = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    assert "uses: ./.github/workflows/wheels.yml" in text
    assert "workflow_call:" in (ROOT / ".github/workflows/wheels.yml").read_text("utf-8")
    assert re.findall(r"build/release/([\w.]+)$", text, re.MULTILINE)
    for name in ("SHA256SUMS", "sbom.json", "notes.md"):
        assert f"build/release/{name}" in text


def test_only_sources_go_to_pypi_and_only_if_the_repository_says_so():
    text = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    release, pypi = text.split("\n  pypi:")
    assert "name: source-distribution\n          path: build/release/*.tar.gz" in release
    assert "if: vars.PUBLISH_TO_PYPI == 'true'" in pypi
    assert "name: source-distribution\n          path: dist" in pypi
