# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The drawings of the guides are those of tools/drawings.py, their numbers those of the package, their labels apart."""

from __future__ import annotations

import itertools
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_moe_ops import masked, route

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "drawings.py"
DOCS = ROOT / "docs"
FILES = sorted((DOCS / "drawings").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
names = runpy.run_path(str(TOOL))


def ids_of(name: str) -> paddle.Tensor:
    return paddle.to_tensor(names[name], dtype="int32")


def test_the_tool_writes_the_committed_files(tmp_path):
    subprocess.run([sys.executable, str(TOOL), "--out", str(tmp_path / "new")], check=True, timeout=60)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == {
        path.name: path.read_bytes() for path in FILES
    }, "run `make drawings`"
    assert len(FILES) == 5


def test_every_drawing_is_on_a_page_with_a_text_in_its_place():
    pages = "".join(path.read_text("utf-8") for path in DOCS.glob("*.md"))
    for path in FILES:
        alternative, found, _ = pages.partition(f"](drawings/{path.name})")
        assert found, path.name
        assert len(alternative.rpartition("![")[2]) > 40, path.name


def test_the_rows_of_the_example_are_those_of_its_plan():
    plan = route(ids_of("IDS"), num_experts=names["NUM_EXPERTS"])
    np.testing.assert_array_equal(plan.slot_to_row.numpy(), names["SLOT_TO_ROW"])
    np.testing.assert_array_equal(plan.row_to_token.numpy(), names["ROW_TO_TOKEN"])
    np.testing.assert_array_equal(plan.row_to_expert.numpy(), names["ROW_TO_EXPERT"])


def test_padding_and_drops_are_those_of_the_plans():
    ids, experts = ids_of("IDS"), names["NUM_EXPERTS"]
    padded = route(ids, num_experts=experts, padding_alignment=names["ALIGNMENT"])
    np.testing.assert_array_equal(padded.row_to_token.numpy(), names["PADDED_ROW_TO_TOKEN"])
    np.testing.assert_array_equal(padded.expert_offsets.numpy(), names["PADDED_OFFSETS"])
    buffer = route(ids, num_experts=experts, buffer_size=names["BUFFER_SIZE"])
    np.testing.assert_array_equal(buffer.row_to_token.numpy(), names["BUFFER_ROW_TO_TOKEN"])
    assert buffer.overflow.tolist() == names["OVERFLOW"]


def test_the_mask_says_what_the_ids_say_and_its_map_is_the_packages():
    mask = paddle.to_tensor(names["MASK"])
    np.testing.assert_array_equal(route(mask).row_to_token.numpy(), names["ROW_TO_TOKEN"])
    row_id_map, rows = masked.make_row_id_map(mask)
    np.testing.assert_array_equal(row_id_map.numpy(), names["ROW_ID_MAP"])
    assert int(rows) == len(names["ROW_TO_TOKEN"])


@pytest.mark.parametrize("name", names["MAPS"])
def test_a_map_has_the_shape_that_is_drawn_and_leads_where_its_arrow_does(name):
    ids, experts = ids_of("IDS"), names["NUM_EXPERTS"]
    plan = route(ids, num_experts=experts)
    (T, K), N = ids.shape, plan.num_rows
    source, target, shape = names["MAPS"][name]
    values = getattr(plan, name).numpy()
    sizes = {"[T, K]": (T, K), "[N]": (N,), "[E + 1]": (experts + 1,)}
    assert values.shape == sizes[shape]
    # tokens and experts have several rows each: expert e those from the number at e on
    assert shape.startswith({"tokens": "[T", "slots": "[T", "rows": "[N", "experts": "[E"}[source])
    largest = {"tokens": T - 1, "slots": T * K - 1, "rows": N - 1, "experts": experts - 1}[target]
    assert values.max() == largest + (name == "expert_offsets")


def test_what_arrives_at_a_rank_and_its_rows_are_those_of_local_plans():
    ids, mine = np.array(names["RANK_IDS"]).reshape(-1, 2), names["RANK_EXPERTS"]
    for rank in range(names["RANKS"]):
        local = np.where(ids // mine == rank, ids % mine, -1)
        arrived = np.flatnonzero((local >= 0).any(axis=1))
        np.testing.assert_array_equal(arrived, names["ARRIVED"][rank])
        plan = route(paddle.to_tensor(local[arrived].astype("int32")), num_experts=mine)
        np.testing.assert_array_equal(arrived[plan.row_to_token.numpy()], names["LOCAL_ROW_TO_TOKEN"][rank])
        np.testing.assert_array_equal(plan.row_to_expert.numpy() + rank * mine, names["LOCAL_ROW_TO_EXPERT"][rank])


Box = tuple[float, float, float, float]  # left, top, right, bottom


def texts_of(svg: ElementTree.Element) -> list[tuple[str, Box]]:
    """Each text with the place it takes at most: letters of common fonts are no wider on average."""
    found = []
    for text in svg.iter(f"{SVG}text"):
        x, y, kind, words = float(text.get("x")), float(text.get("y")), text.get("class", "").split(), text.text
        size = 13 if {"note", "code"} & set(kind) else 14
        width = len(words) * size * (0.61 if "code" in kind else 0.57)
        left = x - width / 2 if "middle" in kind else x - width if "end" in kind else x
        found.append((words, (left, y - 0.75 * size, left + width, y + 0.22 * size)))
    return found


def points_of(path: ElementTree.Element) -> list[tuple[float, float]]:
    """Points of a bow; brackets have none."""
    data = path.get("d").replace("M", "").replace("C", "").split()
    if len(data) != 8:
        return []
    points = np.array(data, dtype=float).reshape(4, 2)
    return [
        tuple(
            (1 - t) ** 3 * points[0]
            + 3 * (1 - t) ** 2 * t * points[1]
            + 3 * (1 - t) * t**2 * points[2]
            + t**3 * points[3]
        )
        for t in np.linspace(0, 1, 60)
    ]


def meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_labels_lie_apart_and_cross_no_line_and_no_edge(path):
    svg = ElementTree.parse(path).getroot()
    texts = texts_of(svg)
    rectangles = []
    for rect in svg.iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        rectangles.append((x, y, x + width, y + height))
    bows = [points for each in svg.iter(f"{SVG}path") if (points := points_of(each))]
    assert len(texts) > 10
    for (one, box), (other, place) in itertools.combinations(texts, 2):
        assert not meet(box, place), (one, other)
    for words, box in texts:
        for left, top, right, bottom in rectangles:
            inside = left <= box[0] and top <= box[1] and box[2] <= right and box[3] <= bottom
            assert inside or not meet(box, (left, top, right, bottom)), words
        assert not any(box[0] < x < box[2] and box[1] < y < box[3] for points in bows for x, y in points), words


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_drawing_has_a_title_colours_for_dark_pages_and_fits_a_phone(path):
    text = path.read_text("utf-8")
    svg = ElementTree.fromstring(text)
    assert svg.find(f"{SVG}title").text
    assert svg.get("viewBox") == f"0 0 {svg.get('width')} {svg.get('height')}"
    assert 360 / float(svg.get("width")) * 13 >= 9  # pixels of the smallest letters
    style = text.partition("</style>")[0]
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6});", part)) for part in style.split("@media"))
    assert set(light) == set(dark) >= {"card", "ink", "muted"}
    for colours in (light, dark):
        for ground in ("card", "none", "f0", "f1", "f2", "f3"):
            assert contrast(colours["ink"], colours[ground]) > 7
        assert contrast(colours["muted"], colours["card"]) > 4.5


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminances, as the Web Content Accessibility Guidelines define it."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
        return float(
            np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722)
        )

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
