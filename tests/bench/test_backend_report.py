# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""From made-up measurements: what stands on the page, and which calls run on Triton by themselves."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace

import pytest

from paddle_moe_ops.bench import backend_report
from paddle_moe_ops.bench.problem import make_problem
from paddle_moe_ops.bench.run import empty_row
from paddle_moe_ops.bench.shapes import Case, Shape, select_operations

from .test_report import write

PAGE = f"# Backends\n\nbefore\n{backend_report.BEGIN}old\n{backend_report.END}after\n"
# Rows of 128, 256 and 1024 bytes in bfloat16.
SHAPES = {
    "narrow": Shape("narrow", 64, 2, 4, 64),
    "middle": Shape("middle", 128, 2, 4, 128),
    "small": Shape("small", 2, 2, 4, 128),
    "wide": Shape("wide", 64, 2, 4, 512),
}
KEYS = ("permute:bf16", "unpermute:plain")
HOST = {(op, impl, 1000): us for op in ("permute", "unpermute") for impl, us in (("core", 5.0), ("triton", 8.0))}


def rows(times, keys=KEYS):
    """Rows of both implementations: 100 us in CUDA, by shape or (shape, key) what is given in Triton."""
    made = []
    for name, shape in SHAPES.items():
        problem = make_problem(Case(shape, "uniform"))
        for operation in select_operations(keys):
            empty = replace(empty_row(operation, problem), mode="graph", check="bits")
            triton = times.get((name, operation.key), times.get(name))
            if triton is not None:
                made += [replace(empty, impl="core", us=100.0), replace(empty, impl="triton", us=triton)]
    return made


FAST = {"narrow": 90.0, "middle": 94.0, "small": 90.0, "wide": 99.0}


def chosen(times, host=HOST, keys=KEYS):
    return backend_report.choose(rows(times, keys), host)


def test_a_range_holds_all_shapes_that_triton_does_faster_and_no_other():
    # "small" has rows as long as "middle" but fewer, so it is in the range: 2 * 256 bytes.
    assert chosen(FAST) == {("permute", "bfloat16"): (256, 512)}
    assert chosen({**FAST, "wide": 80.0}) == {("permute", "bfloat16"): (1024, 512)}
    assert chosen({**FAST, "small": 99.0}) == {("permute", "bfloat16"): (256, 64 * 128)}


@pytest.mark.parametrize("middle", [100 / 1.05, 96.0, 100.0, 130.0])
def test_five_per_cent_are_not_enough(middle):
    assert chosen({"narrow": 90.0, "middle": middle}) == {}


def test_one_shape_is_no_range():
    assert chosen({"narrow": 50.0}) == {}
    assert chosen({"narrow": 50.0, "wide": 100.0}) == {}


def test_a_gradient_that_is_slower_speaks_against_a_forward_that_is_faster():
    assert chosen({**FAST, ("narrow", "unpermute:plain"): 100.0}) == {("permute", "bfloat16"): (256, 512)}
    assert chosen({**FAST, ("small", "unpermute:plain"): 100.1}) == {("permute", "bfloat16"): (256, 64 * 128)}
    everywhere = {(shape, "unpermute:plain"): 100.1 for shape in SHAPES}
    assert chosen({**FAST, **everywhere}) == {}


def test_shapes_of_which_something_was_not_measured_do_not_count():
    assert chosen(FAST, keys=KEYS[:1]) == {}


def test_the_host_counts_where_it_takes_longer_than_the_gpu():
    slow = {**HOST, ("permute", "triton", 1000): 96.0}
    assert chosen(FAST, host=slow) == {}
    # Many tokens are launched otherwise than few: the time for as many or the next larger number holds.
    few = {**slow, ("permute", "triton", 2): 8.0, ("permute", "triton", 1000): 8.0, ("permute", "core", 2): 8.0}
    assert chosen(FAST, host={**few, ("permute", "triton", 2): 96.0}) == {("permute", "bfloat16"): (256, 64 * 128)}


def test_without_times_of_the_host_nothing_is_chosen():
    assert chosen(FAST, host={}) == {}
    assert chosen(FAST, host={key: us for key, us in HOST.items() if key[1] == "core"}) == {}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "backends.md").write_text(PAGE, encoding="utf-8")
    return tmp_path


def host_file(folder, gpu="Imagined GPU"):
    path = folder / "results" / "host" / "h.jsonl"
    path.parent.mkdir(parents=True)
    lines = [{"op": op, "impl": impl, "tokens": tokens, "us": us} for (op, impl, tokens), us in HOST.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"machine": True, "gpu": gpu}, *lines)))


def run(folder):
    choice = folder / "choice.py"
    options = {"results": folder / "results", "docs": folder / "docs", "choice": choice}
    status = backend_report.main([text for name, path in options.items() for text in (f"--{name}", str(path))])
    return status, (folder / "docs" / "backends.md").read_text(encoding="utf-8"), choice


def test_the_command_writes_page_and_choice_from_the_newest_run_of_both(folder):
    write(folder / "results" / "old.jsonl", rows({"narrow": 1.0}), date="2026-01-01 00:00 UTC")
    write(folder / "results" / "new.jsonl", rows(FAST), date="2026-01-02 00:00 UTC")
    only_core = [row for row in rows(FAST) if row.impl == "core"]
    write(folder / "results" / "newest.jsonl", only_core, date="2026-01-03 00:00 UTC")
    (folder / "results" / "gpu-grouped-gemm.jsonl").write_text('{"op": "dw"}\n', encoding="utf-8")  # of another kind
    host_file(folder)
    status, page, choice = run(folder)
    assert status == 0
    assert page.startswith("# Backends\n\nbefore\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| us, CUDA / Triton | narrow | middle | small | wide |" in page
    assert "| permute:bf16 | 100.0 / **90.0** | 100.0 / **94.0** | 100.0 / **90.0** | 100.0 / **99.0** |" in page
    assert "From `new.jsonl`: gpu Imagined GPU" in page
    assert "| `permute` | bfloat16 | 256 bytes | 512 bytes |" in page
    assert runpy.run_path(str(choice))["MEASURED"] == {("permute", "bfloat16"): (256, 512)}
    assert run(folder)[1] == page


def test_a_host_of_another_gpu_does_not_count(folder):
    write(folder / "results" / "new.jsonl", rows(FAST))
    host_file(folder, gpu="Another GPU")
    status, page, choice = run(folder)
    assert status == 0
    assert "no times of the host" in page
    assert runpy.run_path(str(choice))["MEASURED"] == {}


def test_results_without_triton_leave_everything_as_it_is(folder, capsys):
    write(folder / "results" / "run.jsonl", [row for row in rows(FAST) if row.impl == "core"])
    status, page, choice = run(folder)
    assert (status, page, choice.exists()) == (1, PAGE, False)
    assert "nothing was written" in capsys.readouterr().err


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="the page must hold <!-- generated: backends -->"):
        backend_report.page_with("# Backends\n", "new")
