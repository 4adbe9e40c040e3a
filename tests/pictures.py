# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Texts and positions of the labels of a matplotlib figure."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np


def labels_of(figure: Any) -> list[tuple[str, Any]]:
    """The texts of a figure that are seen, each with the place that it takes."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    beyond = set()  # labels of ticks that the axes do not reach are not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        beyond |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    texts = (text for text in figure.findobj(Text) if text not in beyond)
    seen = [text for text in texts if text.get_text() and text.get_visible()]
    return [(text.get_text(), text.get_window_extent()) for text in seen]


def colours_of(path: Path) -> tuple[int, int, int]:
    """Height and width of a picture, and the number of its colours."""
    from matplotlib.image import imread

    picture = np.rint(255 * imread(path)).astype(np.uint8)
    return *picture.shape[:2], len(np.unique(picture.view(np.uint32)))


def check_that_labels_lie_apart(figure: Any) -> None:
    """No label covers another one, or leaves the figure."""
    labels = labels_of(figure)
    for (one, place), (other, box) in itertools.combinations(labels, 2):
        assert not place.overlaps(box), (one, other)
    for text, place in labels:
        assert figure.bbox.contains(place.x0, place.y0), text
        assert figure.bbox.contains(place.x1, place.y1), text
