# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of other implementations of whole layers, TFLOP/s forward and backward, by GPU and shape."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PUBLISHED", "Source"]


class Source(NamedTuple):
    """The source of figures.

    Attributes:
        name: of the column.
        gpu: the measured GPU.
        text: how they came about.
        figures: forward and backward by shape.
    """

    name: str
    gpu: str
    text: str
    figures: dict[str, tuple[float, float]]


PUBLISHED = (
    Source(
        "SonicMoE (published)",
        "NVIDIA H100",
        "arXiv 2512.14080, figure 14, read off the figure to about 3 TFLOP/s. *Beside SonicMoE* has it and ours "
        "on one machine",
        {
            "1.4b-256": (338, 366),
            "1.4b-512": (398, 398),
            "1.4b-1024": (404, 434),
            "7b-256": (363, 404),
            "7b-512": (434, 438),
            "7b-1024": (466, 466),
            "30b-256": (427, 459),
            "30b-512": (502, 511),
            "30b-1024": (551, 553),
            "120b-512": (517, 526),
            "120b-1024": (558, 566),
            "120b-2048": (594, 586),
        },
    ),
    Source(
        "LigerCute (published)",
        "NVIDIA H200",
        "linkedin/Liger-Kernel, figures in liger_cute_kernels/README.md, one GPU",
        {"qwen3-30b": (345, 194), "mixtral": (613, 406)},
    ),
)
