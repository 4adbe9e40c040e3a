# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``make mutants`` follows the sources: all that its areas name exists. Its faults, and the limit of time."""

from __future__ import annotations

import importlib
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "mutants"


def module(name):
    """A module of the tool, which imports its others by their plain names."""
    sys.path.insert(0, str(TOOL))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(TOOL))


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    """Plugins of this environment are not imported by the pytest that the tool starts, which takes a second."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


AREAS, LEFT_OUT = module("areas").AREAS, module("areas").LEFT_OUT


@pytest.mark.parametrize("area", AREAS)
def test_every_pattern_of_an_area_matches_a_file(area):
    patterns = (*AREAS[area].sources, *AREAS[area].tests)
    assert [pattern for pattern in patterns if not any(ROOT.glob(pattern))] == []


def test_every_python_file_of_the_package_is_in_an_area_or_has_a_reason():
    package = ROOT / "paddle_moe_ops"
    tried = {path for area in AREAS.values() for pattern in area.sources for path in ROOT.glob(pattern)}
    others = {path for path in package.rglob("*.py") if path.name != "_C.py"} - tried  # the build writes _C.py
    assert sorted(path.relative_to(package).as_posix() for path in others) == sorted(module("areas").NO_AREA)


def test_files_that_are_left_out_exist():
    assert [name for name in LEFT_OUT if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("area", AREAS)
def test_tests_of_single_sources_belong_to_the_area(area):
    names = {Path(path).stem for path in AREAS[area].sources}
    assert set(AREAS[area].guards) <= names
    assert {test for tests in AREAS[area].guards.values() for test in tests} <= set(AREAS[area].tests)


SOURCE = b"""// a + b
#define TWICE(x) (x + x)
int f(int a, const char* b) {
  if (a < 1 && b != nullptr) g("a + b", a, *b);
  return a ? a : 2;
}
"""
CHANGES = {
    ("comparison", '  if (a <= 1 && b != nullptr) g("a + b", a, *b);'),
    ("comparison", '  if (a < 1 && b == nullptr) g("a + b", a, *b);'),
    ("and, or", '  if (a < 1 || b != nullptr) g("a + b", a, *b);'),
    ("condition dropped", '  if (a < 1) g("a + b", a, *b);'),
    ("condition dropped", '  if (b != nullptr) g("a + b", a, *b);'),
    ("condition negated", '  if (!(a < 1 && b != nullptr)) g("a + b", a, *b);'),
    ("constant", '  if (a < 2 && b != nullptr) g("a + b", a, *b);'),
    ("arguments swapped", '  if (a < 1 && b != nullptr) g("a + b", *b, a);'),
    ("statement dropped", "  if (a < 1 && b != nullptr) ;"),
    ("constant", "  return a ? a : 3;"),
    ("branches swapped", "  return a ? 2 : a;"),
}


def test_faults_of_cpp_are_in_its_code():
    found = [(fault, module("faults").planted(SOURCE, fault)) for fault in module("cpp").faults_of(SOURCE)]
    lines = [(fault.kind, planted.decode().splitlines()[fault.line - 1]) for fault, planted in found]
    assert sorted(lines) == sorted(CHANGES)


def test_lengths_of_zip_are_left_alone():
    found = module("faults").faults_of(b"pairs = zip(a, b, strict=True)\n")
    assert [fault.text for fault in found] == [b"zip(b, a, strict=True)"]


def test_a_process_out_of_time_ends_with_those_it_started_in_sessions_of_their_own(tmp_path):
    program = """
import subprocess, time
print(subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(1000)
"""
    environment = {**os.environ, "MUTANTS_COPY": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    child = os.pidfd_open(int(process.stdout.readline()))
    assert module("copies").outcome_of(process, f"MUTANTS_COPY={tmp_path}", 0.0) == ("out of time", "")
    assert select.select([child], [], [], 60)[0] == [child]  # it ended
    os.close(child)


def test_a_file_whose_process_dies_without_a_fault_is_left_out(tmp_path):
    tree, folder = tmp_path / "tree", tmp_path / "copies"
    (tree / "tests").mkdir(parents=True)
    folder.mkdir()
    (tree / "tests" / "test_good.py").write_text("def test_one():\n    pass\n")
    (tree / "tests" / "test_dies.py").write_text("import os\n\ndef test_two():\n    os.abort()\n")
    copy = module("copies").Copy(tree, folder, links=False)
    files = ["tests/test_dies.py", "tests/test_good.py"]
    command = module("copies").pytest_of(tree, module("areas").Area((), ()))
    assert copy.recorded(files, [], command, leaves_out=True).tests == ["tests/test_good.py::test_one"]
    with pytest.raises(RuntimeError, match="the tests fail without a fault"):
        copy.recorded(files, [], command, leaves_out=False)


def test_failing_tests_that_are_left_out_are_named_with_a_survivor(tmp_path, capsys):
    tree, folder = tmp_path / "tree", tmp_path / "copies"
    (tree / "tests").mkdir(parents=True)
    folder.mkdir()
    (tree / "source.py").write_text("TWO = 2\n")
    (tree / "tests" / "test_two.py").write_text(
        "from source import TWO\n\ndef test_one():\n    pass\n\ndef test_two():\n    assert TWO == 3, 'no device'\n"
    )
    copies = module("copies")
    copy = copies.Copy(tree, folder, links=False)
    files = ["tests/test_two.py"]
    area = module("areas").Area(("source.py",), ("tests/*.py",))
    command = copies.pytest_of(tree, area)
    record = copy.recorded(files, ["source.py"], command, leaves_out=True)
    assert record.left_out == ["tests/test_two.py::test_two"]
    assert "left out: FAILED tests/test_two.py::test_two - AssertionError: no device" in capsys.readouterr().out
    (fault,) = module("faults").faults_of(b"TWO = 2\n")
    outcome = copy.try_mutant(area, command, record, copies.Mutant("source.py", fault))
    assert outcome == (True, "0 tests reach it; 1 tests of the area were left out")


def test_lines_of_an_import_are_reached_by_no_test(tmp_path):
    tree, folder = tmp_path / "tree", tmp_path / "copies"
    (tree / "tests").mkdir(parents=True)
    folder.mkdir()
    (tree / "source.py").write_text("def two():\n    return 2\n\nTWO = two()\n\ndef three():\n    return 3\n")
    (tree / "tests" / "test_two.py").write_text(
        "import subprocess, sys\nimport source\n\n"
        "def test_one():\n"
        "    subprocess.run([sys.executable, '-c', 'import source; source.three()'], cwd='/', check=True)\n\n"
        "def test_two():\n    assert source.two() == 2\n"
    )
    copy = module("copies").Copy(tree, folder, links=False)
    command = module("copies").pytest_of(tree, module("areas").Area((), ()))
    record = copy.recorded(["tests/test_two.py"], ["source.py"], command, leaves_out=False)
    assert record.reached == {
        **{f"source.py:{line}": [1] for line in (1, 2)},
        **{f"source.py:{line}": [0] for line in (6, 7)},
    }


@pytest.mark.parametrize("runs_slow", [False, True])
def test_slow_tests_run_in_areas_that_name_them(tmp_path, runs_slow):
    tree, folder = tmp_path / "tree", tmp_path / "copy"
    (tree / "tests").mkdir(parents=True)
    folder.mkdir()
    (tree / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = ["-m", "not slow"]\nmarkers = ["slow"]\n'
    )
    (tree / "tests" / "test_two.py").write_text(
        "import pytest\n\ndef test_one():\n    pass\n\n@pytest.mark.slow\ndef test_two():\n    pass\n"
    )
    area = module("areas").Area((), ("tests/*.py",), runs_slow=runs_slow)
    copy = module("copies").Copy(tree, folder, links=False)
    record = copy.recorded(["tests/test_two.py"], [], module("copies").pytest_of(tree, area), leaves_out=False)
    slow = ["tests/test_two.py::test_two"] if runs_slow else []
    assert record.tests == ["tests/test_two.py::test_one", *slow]


def test_a_new_line_leaves_the_order_of_other_faults_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "source.py").write_text("A = 1\nB = 2\nC = 3\nD = 4\n")
    run = module("run")
    monkeypatch.setattr(run, "AREAS", {"small": module("areas").Area(("source.py",), ())})

    def order():
        sample = run.Sample(tmp_path, "small", 60, 1, [])
        return [sample.difference(each) for each in iter(sample.next, None)]

    before = order()
    (tmp_path / "source.py").write_text("A = 1\nE = 5\nB = 2\nC = 3\nD = 4\n")
    after = order()
    assert len(after) == 5
    assert [each for each in after if "E = " not in each] == before


def test_results_of_a_run_become_a_page_and_are_not_tried_again(tmp_path, monkeypatch, capsys):
    tree, results = tmp_path / "tree", tmp_path / "results.jsonl"
    (tree / "tests").mkdir(parents=True)
    (tree / "source.py").write_text("TWO = 2\nFIVE = 5\n")
    (tree / "tests" / "test_two.py").write_text("from source import TWO\n\ndef test_two():\n    assert TWO == 2\n")
    run = module("run")
    monkeypatch.setattr(run, "AREAS", {"small": module("areas").Area(("source.py",), ("tests/*.py",))})

    def tool(*options):
        monkeypatch.setattr(sys, "argv", ["run.py", "--mutants", "60", "--tree", str(tree), *map(str, options)])
        run.main()
        return capsys.readouterr().out

    out = tool("--results", results)
    assert "killed source.py:1 constant, FAILED tests/test_two.py::test_two" in out
    assert "SURVIVED source.py:2 constant, 0 tests reach it" in out
    again = tool("--results", results)
    assert "source.py" not in again
    assert again.splitlines()[-1].split() == ["small", "2", "1", "50%", "0"]
    assert tool("--table", results).endswith("\n| small | 2 | 2 | 1 | 50% | 0 | 0% | not kept |\n")
