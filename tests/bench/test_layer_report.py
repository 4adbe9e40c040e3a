# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The page about whole layers: which results it takes, its cells, its ratios."""

from __future__ import annotations

import json

import pytest

from benchmarks.layer import float8_report, report
from benchmarks.layer.published import PUBLISHED
from tests.pictures import check_that_labels_lie_apart, labels_of

MACHINE = {
    "machine": True,
    **dict.fromkeys(("driver", "cuda", "torch", "triton", "commit"), "1"),
    "gpu": "NVIDIA H200",
    "date": "2026-11-22",
}


def line(shape="ernie-21b", impl="ours", mode="graph", forward=600.0, backward=500.0, **others):
    return {
        "shape": shape,
        "routing": "even",
        "impl": impl,
        "mode": mode,
        "launches": [5, 9],
        "kept": 3 << 20,
        "backward_peak": 7 << 20,
        "forward_tflops": forward,
        "backward_tflops": backward,
        **others,
    }


@pytest.fixture
def written(tmp_path):
    """Writes result files, runs the command and gives the page."""

    def run(**files):
        (tmp_path / "ncu").mkdir(exist_ok=True)
        for name, lines in files.items():
            text = "\n".join(json.dumps(each) for each in lines)
            as_named = name.endswith(("-peers", "-sonic", "-float8", "-deepgemm"))
            path = "ncu/h200-layer" if name == "ncu" else name if as_named else f"{name}-layer"
            (tmp_path / f"{path}.jsonl").write_text(text + "\n")
        page = tmp_path / "page.md"
        assert report.main(tmp_path, page) == 0
        assert (tmp_path / report.PICTURE).stat().st_size > 1000
        return page.read_text()

    return run


def row_of(page, shape):
    return next(each for each in page.splitlines() if each.startswith(f"| {shape} |"))


def test_a_row_has_the_shape_all_implementations_and_the_memory(written):
    page = written(a=[MACHINE, line(), line(mode="eager", forward=580.4), line(impl="torch", kept=9 << 20)])
    cells = [cell.strip() for cell in row_of(page, "ernie-21b").strip("|").split("|")]
    assert cells[:6] == ["ernie-21b", "16384", "2560", "1536", "64", "6"]
    assert cells[6:9] == ["600 / 500 (580 / 500)", "600 / 500", ""]
    assert cells[-4:] == ["5 / 9", "3", "9", "7"]


def assert_refused(folder, capsys, name, *lines):
    for path, each in (("a-layer.jsonl", [line("mixtral")]), (name, lines)):
        text = "".join(json.dumps(row) + "\n" for row in (MACHINE | {"deep_gemm": "0.1"}, *each))
        (folder / path).write_text(text, encoding="utf-8")
    assert report.main(folder, folder / "page.md") == 1
    assert not (folder / "page.md").exists()
    message = f"{name}, mixtral: {lines[-1]['impl']} must be right, but got {lines[-1]['error']}; measure it again"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("error", ["out is 7 of its norm off", "RuntimeError: wrong launch"])
@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("impl", ["ours", "ours, float8, matrices kept", "ours, Triton alone"])
def test_a_wrong_result_of_this_package_is_refused(impl, mode, error, tmp_path, capsys):
    wrong = {"shape": "mixtral", "routing": "even", "impl": impl, "mode": mode, "error": error}
    others = {"ours", impl} if mode == "eager" else {"ours"} - {impl}  # a table has the shapes and columns of graphs
    right = [line("mixtral", each) for each in sorted(others)]
    assert_refused(tmp_path, capsys, "a-layer.jsonl", line(), *right, wrong)


@pytest.mark.parametrize("impl", ["ours", "ours, in a layer"])
def test_a_wrong_float8_product_of_this_package_is_refused(impl, tmp_path, capsys):
    wrong = {**products_line(impl, 0.0), "shape": "mixtral", "error": "RuntimeError: wrong launch"}
    assert_refused(tmp_path, capsys, "a-deepgemm.jsonl", products_line("DeepGEMM", 1.0, 1.0), wrong)


def test_the_newest_run_of_each_gpu_counts(written):
    old = [{**MACHINE, "date": "2026-11-21"}, line(forward=1.0)]
    other = [{**MACHINE, "gpu": "NVIDIA H100 80GB HBM3"}, line(forward=2.0)]
    page = written(a=[MACHINE, line(forward=3.0)], b=old, c=other)
    assert "| 3 / 500 |" in page
    assert "| 2 / 500 |" in page
    assert "| 1 / 500 |" not in page
    assert page.index("## NVIDIA H200") < page.index("## NVIDIA H100")


def test_ratios_are_geometric_means_over_the_shapes_of_both(written):
    liger = next(source for source in PUBLISHED if source.name == "LigerCute (published)").figures
    twice = line("qwen3-30b", forward=2 * liger["qwen3-30b"][0], backward=liger["qwen3-30b"][1])
    half = line("mixtral", forward=liger["mixtral"][0] / 8, backward=4 * liger["mixtral"][1])
    page = written(a=[MACHINE, twice, half, line("olmoe")])
    assert "*ours* over LigerCute (published), geometric mean of 2 shapes: 0.50 forward, 2.00 backward." in page


def test_without_results_the_command_says_how_to_make_them(tmp_path, capsys):
    assert report.main(tmp_path, tmp_path / "page.md") == 1
    assert "make them with python3 -m benchmarks.layer" in capsys.readouterr().err


def test_of_unsloths_configurations_the_fastest_counts(written):
    slow = {"forward_us": 9.0, "backward_us": 9.0}
    fast = {"forward_us": 5.0, "backward_us": 9.0}
    lines = [line(impl="Unsloth 0", forward=111.0, **slow), line(impl="Unsloth 1", forward=222.0, **fast)]
    failed = {"shape": "ernie-21b", "routing": "even", "impl": "Unsloth 2", "mode": "graph", "error": "no"}
    page = written(**{"a": [MACHINE, line()], "a-layer-peers": [MACHINE, line(), *lines, failed]})
    section = page[page.index("## Beside Unsloth") :]
    assert "| ours | Unsloth |" in section
    assert "| 222 / 500 |" in section
    assert "111" not in section


def test_a_peer_is_named_with_its_version(written):
    machine = {**MACHINE, "liger_kernel": "0.8.5", "unsloth": "2026.10.9"}
    page = written(**{"a": [MACHINE, line()], "a-layer-peers": [machine, line(), line(impl="Liger", forward=250.0)]})
    section = page[page.index("## Beside Unsloth, Liger and cuBLAS") :]
    assert "unsloth 2026.10.9, liger_kernel 0.8.5" in section
    assert "| ours | Liger |" in section


def test_a_peer_of_a_result_without_its_version_is_named_without_one(written):
    page = written(**{"a": [MACHINE, line()], "a-layer-peers": [MACHINE, line(), line(impl="Unsloth 0")]})
    section = page[page.index("## Beside Unsloth") :]
    assert "triton 1, commit 1, date" in section
    assert "2026.10" not in section


SONIC = {**MACHINE, "sonic_moe": "0.1", "quack_kernels": "0.3", "cutlass_dsl": "4.4"}


def beside_sonic_moe(written, *lines):
    """The section about SonicMoE of a page with these lines."""
    page = written(**{"a": [MACHINE, line()], "a-layer-sonic": [SONIC, *lines]})
    return page[page.index("## Beside SonicMoE: NVIDIA H200") :]


def sonic_line(shape="ernie-21b", **others):
    return line(shape, impl="SonicMoE, here", **others)


def test_beside_sonic_moe_ratios_are_ours_over_theirs(written):
    lines = [line(forward=300.0, backward=660.0), line(mode="eager", forward=290.0, backward=640.0)]
    lines += [sonic_line(forward=400.0, backward=600.0), sonic_line(mode="eager", forward=200.0, backward=100.0)]
    section = beside_sonic_moe(written, *lines)
    assert "`benchmarks/results/a-layer-sonic.jsonl`: driver 1, cuda 1, torch 1, triton 1, sonic_moe 0.1," in section
    assert "| shape | T | d | n | E | K | ours | SonicMoE | ours / SonicMoE |" in section
    assert row_of(section, "ernie-21b").endswith("| 6 | 300 / 660 (290 / 640) | 400 / 600 (200 / 100) | 0.75 / 1.10 |")


def test_beside_sonic_moe_a_shape_without_one_side_is_left_out_of_the_means(written):
    lines = [line(forward=100.0, backward=400.0), sonic_line(forward=200.0, backward=100.0)]
    lines += [line("7b-256", forward=800.0, backward=100.0), sonic_line("7b-256", forward=100.0, backward=100.0)]
    lines += [line("mixtral"), sonic_line("mixtral", mode="eager", forward=5.0, backward=6.0)]
    lines += [sonic_line("olmoe", forward=1.0)]
    lines += [line("dsv3-4k"), {**sonic_line("dsv3-4k"), "error": "out is off"}]
    lines += [line("dsv3-16k"), {**sonic_line("dsv3-16k"), "error": "OutOfMemoryError: CUDA out of memory"}]
    section = beside_sonic_moe(written, *lines)
    assert "* 2 shapes that have both: 2.00 forward, 2.00 backward" in section
    assert "* 1 shapes of SonicMoE's own figure: 8.00 forward, 1.00 backward" in section
    assert "* 1 shapes with n up to 512: 8.00 forward, 1.00 backward" in section
    assert "* 1 shapes with n above 512: 0.50 forward, 4.00 backward" in section
    assert row_of(section, "mixtral").endswith("| 600 / 500 | (5 / 6) |  |")
    assert row_of(section, "olmoe").endswith("|  | 1 / 500 |  |")
    assert row_of(section, "dsv3-4k").endswith("| 600 / 500 | failed: out is off |  |")
    assert row_of(section, "dsv3-16k").endswith("| 600 / 500 | out of memory |  |")


def test_beside_sonic_moe_it_is_said_who_is_faster_where(written):
    lines = [line("7b-256", forward=100.0, backward=100.0), sonic_line("7b-256", forward=200.0, backward=100.0)]
    lines += [line("mixtral", forward=300.0, backward=200.0), sonic_line("mixtral", forward=200.0, backward=300.0)]
    section = beside_sonic_moe(written, *lines)
    assert (
        "SonicMoE is faster forward in 1 of 2 shapes and backward in 1 (of the 1 with n up to 512: 1 and 0); "
        "*ours* is faster forward in mixtral, and backward in none."
    ) in section


def test_beside_sonic_moe_nothing_is_said_of_speed_without_a_shape_of_both(written):
    section = beside_sonic_moe(written, line(), {**sonic_line(), "error": "ImportError: no"})
    assert row_of(section, "ernie-21b").endswith("| 600 / 500 | failed: ImportError: no |  |")
    assert "geometric mean" not in section
    assert "faster" not in section


def test_sonic_moes_run_is_no_run_of_the_main_tables(written):
    newer = {**SONIC, "date": "2027-01-01"}
    page = written(**{"a": [MACHINE, line()], "a-layer-sonic": [newer, line(forward=1.0), sonic_line()]})
    assert "From `benchmarks/results/a-layer.jsonl`" in page
    assert "From `benchmarks/results/a-layer-sonic.jsonl`" not in page


def products_line(impl, first, second=None, **others):
    figures = {"first_tflops": first} if second is None else {"first_tflops": first, "second_tflops": second}
    return {"shape": "ernie-21b", "routing": "even", "impl": impl, "mode": "graph", **figures, **others}


def test_float8_products_have_a_section_beside_deep_gemm(written):
    lines = [products_line("ours", 1100.0, 990.0), products_line("ours, with gather", 850.4)]
    lines += [products_line("DeepGEMM", 1000.0, 1100.0)]
    page = written(**{"a": [MACHINE, line()], "a-deepgemm": [{**MACHINE, "deep_gemm": "0.1.5"}, *lines]})
    section = page[page.index("## Float8 products beside DeepGEMM: NVIDIA H200") :]
    assert "`benchmarks/results/a-deepgemm.jsonl`: driver 1, cuda 1, torch 1, deep_gemm 0.1.5," in section
    assert "| ours | ours, with gather | DeepGEMM | ours / DeepGEMM |" in section
    assert row_of(section, "ernie-21b").endswith("| 1100 / 990 | 850 | 1000 / 1100 | 1.10 / 0.90 |")
    assert "*ours* over DeepGEMM, geometric mean of 1 shapes: 1.10 / 0.90." in section


def test_without_deep_gemm_the_section_has_our_figures(written):
    lines = [products_line("ours", 1100.0, 990.0), {**products_line("DeepGEMM", 0.0), "error": "ImportError: no"}]
    page = written(**{"a": [MACHINE, line()], "a-deepgemm": [{**MACHINE, "deep_gemm": None}, *lines]})
    section = page[page.index("## Float8 products") :]
    assert row_of(section, "ernie-21b").endswith("| 1100 / 990 | failed: ImportError: no |  |")
    assert "geometric mean" not in section


def test_counters_of_a_part_become_a_row(written):
    counters = {"dram_read_mb": 1500.0, "dram_write_mb": 500.0, "dram_percent": 75.2, "l2_percent": 80.0}
    counters["tensor_percent"] = 60.4
    part = {"operation": "layer:dsv3-4k", "pass": "forward", "part": "sums", "launches": 3, "us": 2000.0, "tflop": 0.5}
    page = written(a=[MACHINE, line()], ncu=[MACHINE, {**part, **counters}, {**part, **counters, "tflop": 0.0}])
    section = page[page.index("## What bounds them: NVIDIA H200") :]
    assert "| dsv3-4k | forward | sums | 3 | 2000 | 250 | 2.00 | 75 % | 80 % | 60 % |" in section
    assert "| dsv3-4k | forward | sums | 3 | 2000 |  | 2.00 | 75 % | 80 % | 60 % |" in section


def test_the_labels_of_the_picture_lie_apart_and_name_models_and_tokens():
    figure = report.picture(report.newest_runs(report.RESULTS, "layer"))
    check_that_labels_lie_apart(figure)
    said = {text for text, _ in labels_of(figure)}
    assert {"DeepSeek-V3, 4096", "ERNIE-4.5-300B, 16384", "Qwen3-30B, 8192", "1.4B, n=256, 40960"} <= said


def test_training_steps_in_float8(written):
    """A first micro-batch of 120 and others of 80 us, beside 100 us in bfloat16; wgrads were not measured."""
    times = {"": 100.0, ", float8, first micro-batch": 120.0, ", float8, matrices kept": 80.0}
    lines = [line(impl=f"ours{name}", forward_us=us / 4, backward_us=us * 3 / 4) for name, us in times.items()]
    page = written(h200=[MACHINE, line()], **{"h200-layer-float8": [MACHINE, *lines]})
    assert "| ernie-21b | 100 | 0.83 | 1.18 | 2 |  |  |  |" in page
    assert (
        "`fp8_1x128`, geometric mean of 1 shapes: 0.83 with one micro-batch, 1.18 with 8; the least 0.83 and 1.18."
        in page
    )


@pytest.mark.parametrize(
    ("first", "kept", "exact", "expected"),
    [(90, 80, 100, "1"), (120, 80, 100, "2"), (121, 80, 100, "3"), (99, 100, 100, "1"), (120, 100, 100, "never")],
)
def test_micro_batches_until_float8_is_as_fast(first, kept, exact, expected):
    assert float8_report.break_even(first, kept, exact) == expected
    if expected.isdigit():
        assert float8_report.step_us(first, kept, int(expected)) <= int(expected) * exact
