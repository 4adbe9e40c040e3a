# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The page about experts on several GPUs, and the picture of a layer's steps."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from benchmarks.expert_parallel import report
from benchmarks.expert_parallel.overlap_report import overlap_section, overlapped_us
from benchmarks.expert_parallel.timeline_report import PICTURE, Recorded, picture, section

SVG = "{http://www.w3.org/2000/svg}"
MACHINE = {
    "machine": True,
    "gpus": ["NVIDIA H200"] * 2,
    "driver": "1",
    "commit": "abc",
    "date": "2026-11-24",
    "ranks": 2,
}
SIZES = {"tokens": 8192, "hidden": 7168, "inner": 2048, "experts": 256, "topk": 8}


def steps(slower=0.0):
    """The steps of one rank, each of 100 us, with gaps of 10 us."""
    names = [
        ("forward", "routing", "own tokens"),
        ("forward", "dispatch", "write"),
        ("forward", "dispatch", "wait"),
        ("forward", "products", "products"),
        ("forward", "combine", "write"),
        ("backward", "combine", "write"),
        ("backward", "products", "products"),
        ("backward", "dispatch", "sum"),
    ]
    made, now = [], 10.0
    for passing, stage, step in names:
        end = now + 100 + slower
        made.append({"pass": passing, "stage": stage, "step": step, "begin_us": now, "end_us": end})
        now = end + 10
    return made


def lines(shapes=("dsv3",), **machine):
    ranks = [
        {"shape": shape, **SIZES, "ranks": 2, "what": "timeline", "rank": rank, "steps": steps(20.0 * rank)}
        for shape in shapes
        for rank in (0, 1)
    ]
    return [{**MACHINE, **machine}, *ranks]


@pytest.fixture
def recorded(tmp_path):
    def write(name="a", **options):
        path = tmp_path / f"{name}-expert-parallel-timeline.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines(**options)))
        return Recorded.of(path)

    return write


def test_few_tokens_have_a_section_with_both_ways(tmp_path):
    path = tmp_path / "h200x2-expert-parallel-few.jsonl"
    whats, ways = ("dispatch", "combine", "layer_forward"), ("one", "several")
    timed = [
        {
            "shape": "dsv3",
            **SIZES,
            "tokens": 16,
            "what": what,
            "launches": way,
            "us": 10.0 * (1 + i) + j,
            "eager_us": 99.6 + j,
        }
        for i, what in enumerate(whats)
        for j, way in enumerate(ways)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [MACHINE, *timed]))
    (row,) = [line.strip("| ").split(" | ") for line in report.few([path]).splitlines() if line.startswith("| dsv3")]
    assert row == ["dsv3", "16", "10 / 11", "20 / 21", "30 / 31", "100 / 101"]
    assert report.few([]) == ""


def peer_lines(shape, kernels, scale, tokens=8192):
    """Lines of a layer of LigerCute, at 500 / scale and 250 / scale TFLOP/s."""
    common = {"shape": shape, **SIZES, "tokens": tokens, "ranks": 2, "transport": "LigerCute", "kernels": kernels}
    times = {"layer_forward": (100.0, {"tflops": 500.0 / scale}), "layer": (500.0, {})}
    times["layer_backward"] = 400.0, {"tflops": 250.0 / scale}
    return [
        {**common, "what": what, "us": us * scale, "min_us": us * scale, "max_us": us * scale * 1.2, **more}
        for what, (us, more) in times.items()
    ]


def failed_line(shape, kernels):
    return {"shape": shape, **SIZES, "ranks": 2, "kernels": kernels, "failed": "no end after 90 s"}


def test_layers_of_ligercute_stand_beside_those_of_the_same_gpus(tmp_path):
    def write(name, gpus, lines, **machine):
        text = "".join(json.dumps(line) + "\n" for line in [{**MACHINE, "gpus": gpus, **machine}, *lines])
        (tmp_path / f"{name}.jsonl").write_text(text)

    exchanges = "p2p_copy", "dispatch", "dispatch_without_copy", "dispatch_float8", "combine"
    whats = *exchanges, "alltoall_single", "rows_alltoall"
    ours = [
        {"shape": shape, **SIZES, "ranks": 2, "what": what, "us": 10.0, "bytes": 1}
        for shape in ("dsv3", "mixtral", "ernie-300b", "qwen3-30b")
        for what in whats
    ]
    for what, tflops in (("layer_forward", 3.0), ("layer_backward_float8", 4.0)):
        ours.append({**ours[0], "what": what, "tflops": tflops})
    two, four = ["NVIDIA H200"] * 2, ["NVIDIA H200"] * 4
    write("h200x2-expert-parallel", two, ours)
    write("h200x4-expert-parallel", four, ours)
    peers = [
        *peer_lines("dsv3", "relocatable", 2),
        *peer_lines("dsv3", "whole-program", 1),
        *peer_lines("mixtral", "relocatable", 2),
        failed_line("mixtral", "whole-program"),
        failed_line("ernie-300b", "relocatable"),
        *peer_lines("qwen3-30b", "relocatable", 1, tokens=4096),
    ]
    write("h200x2-expert-parallel-liger", two, peers, date="2026-11-29", versions={"liger-cute-kernels": "0.8.5"})
    report.main(tmp_path, tmp_path / "page.md")
    of_two, of_four = (tmp_path / "page.md").read_text().split("## 2 x NVIDIA H200")[1].split("## 4 x NVIDIA H200")

    def column(text, name):
        lines = text.partition("TFLOP/s of layers")[2].splitlines()
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
        at = rows[0].index(name)
        return {row[0]: row[at] for row in rows[2:]}

    expected = {"dsv3": "500 ±100 / 250 ±50", "mixtral": "250 ±50 / 125 ±25"}
    assert column(of_two, "LigerCute here") == {**expected, "ernie-300b": "failed", "qwen3-30b": "-"}
    for name, cells in {"bfloat16": "3 / -", "float8": "- / 4", "float8, sent as well": "- / -"}.items():
        assert column(of_two, name) == {"dsv3": cells, "mixtral": "- / -", "ernie-300b": "- / -", "qwen3-30b": "- / -"}
    assert "LigerCute here: liger-cute-kernels 0.8.5, 2026-11-29." in of_two
    assert set(column(of_four, "LigerCute here").values()) == {"-"}
    assert "LigerCute here:" not in of_four


def test_the_table_has_the_slowest_ranks_times_and_what_it_waited(recorded):
    rows = [line.strip("| ").split(" | ") for line in section(recorded()).splitlines() if line.startswith("| dsv3")]
    # forward: five steps of 120 us, which end at 650; backward: three
    assert rows[0] == ["dsv3", "forward", "120", "240 (120)", "120", "120", "50", "650", "55 %"]
    assert rows[1] == ["dsv3", "backward", "0", "120", "120", "120", "30", "390", "62 %"]


def test_the_picture_has_a_lane_for_each_rank_and_a_bar_for_each_step(recorded):
    svg = ElementTree.fromstring(picture(recorded(shapes=("dsv3", "mixtral"))))
    texts = [each.text for each in svg.iter(f"{SVG}text")]
    assert [text for text in texts if "tokens a rank" in text] == [
        f"{shape}, 8192 tokens a rank: forward and backward" for shape in ("dsv3", "mixtral")
    ]
    bars = [each for each in svg.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    enlarged = 3 + 3 + 1  # until the slower rank's products begin; those of the other one have begun
    assert len(bars) == 2 * (2 * len(steps()) + enlarged)
    assert sum(bar.get("class") == "dispatch wait" for bar in bars) == 2 * 4
    width, height = (float(svg.get(key)) for key in ("width", "height"))
    for bar in bars:
        x, y, across, up = (float(bar.get(key)) for key in ("x", "y", "width", "height"))
        assert 82 <= x <= x + across <= width - 19
        assert 0 < y < y + up < height


def test_bars_are_in_proportion_to_times(recorded):
    svg = ElementTree.fromstring(picture(recorded()))
    bars = {each.find(f"{SVG}title").text: each for each in svg.iter(f"{SVG}rect") if len(each)}
    first, last = (bars[f"{name}: 120 us"] for name in ("forward, routing, own tokens", "backward, dispatch, sum"))
    assert float(last.get("x")) + float(last.get("width")) == pytest.approx(740, abs=0.2)  # the call ends there
    whole = steps(20.0)[-1]["end_us"]
    assert float(bars["backward, products, products: 120 us"].get("width")) == pytest.approx(658 * 120 / whole, abs=0.1)
    assert float(first.get("x")) < float(last.get("x"))


def test_colours_follow_the_readers(recorded):
    style = picture(recorded()).partition("</style>")[0]
    light, dark = (set(re.findall(r"--([\w-]+): #\w{6};", part)) for part in style.split("@media"))
    assert light == dark
    assert {"card", "ink", "routing", "dispatch", "products", "combine", "wait"} <= light


def test_the_newest_recording_is_drawn_and_without_one_there_is_no_section(tmp_path, recorded):
    target = tmp_path / "page.md"
    report.main(tmp_path, target)
    assert "Where the time" not in target.read_text()
    assert not (tmp_path / PICTURE).exists()
    recorded("z", date="2026-11-01", commit="older")
    recorded("a", date="2026-11-20", commit="newer")
    report.main(tmp_path, target)
    assert f"]({PICTURE})" in target.read_text()
    assert "commit newer" in target.read_text()
    assert "commit older" not in target.read_text()
    assert (tmp_path / PICTURE).read_text().startswith("<svg ")


def overlap_steps():
    """An exchange of 100 us in each pass, of which GEMMs cover 60 us forward and nothing backward."""
    names = [
        ("forward", "compute", "experts", 0, 50),
        ("forward", "side", "exchange", 50, 150),
        ("forward", "compute", "shared", 70, 130),
        ("backward", "side", "exchange", 160, 260),
        ("backward", "compute", "experts", 260, 400),
    ]
    keys = "pass", "stream", "step", "begin_us", "end_us"
    return [dict(zip(keys, each, strict=True)) for each in names]


def test_the_hidden_part_of_exchanges_is_that_beside_gemms():
    assert overlapped_us(overlap_steps(), "forward") == (100, 60)
    assert overlapped_us(overlap_steps(), "backward") == (100, 0)


def test_the_page_has_a_row_for_each_case_with_its_times_in_turn_and_in_flight(tmp_path):
    common = {"shape": "dsv3", **SIZES, "ranks": 2, "what": "overlap", "case": "shared expert"}
    lines = []
    for transport, made in (("peer", overlap_steps()), ("alltoall", overlap_steps()[:1])):
        for in_flight, us in ((False, 500.0), (True, 400.0)):
            times = {"us": us, "min_us": us - 5, "max_us": us + 10, "steps": made}
            lines.append({**common, "transport": transport, "in_flight": in_flight, **times})
    path = tmp_path / "a-expert-parallel-overlap.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [MACHINE, *lines]))
    rows = [line.strip("| ").split(" | ") for line in overlap_section(path).splitlines() if line.startswith("| dsv3")]
    times = ["dsv3", "shared expert", "peer", "500 ±10", "400 ±10", "20 %"]
    assert rows[0] == [*times, "100, 60 %", "100, 0 %"]
    assert rows[1] == [*times[:2], "alltoall", *times[3:], "-", "-"]
    report.main(tmp_path, tmp_path / "page.md")
    assert "## Exchanges that other work hides" in (tmp_path / "page.md").read_text()
