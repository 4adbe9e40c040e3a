# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The layers that are measured."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ROUTINGS", "SHAPES", "Shape"]


class Shape(NamedTuple):
    """T tokens of d columns, E experts of inner size n, K experts a token."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int

    def flops(self, backward: bool) -> int:
        """Floating-point operations of a pass's GEMMs."""
        return (12 if backward else 6) * self.tokens * self.topk * self.hidden * self.inner

    def kept_bytes(self) -> int:
        """Bytes kept in 16-bit numbers: the tokens, and the first GEMM's output of each row."""
        return 2 * self.tokens * self.hidden + 4 * self.tokens * self.topk * self.inner

    def row_bytes(self) -> int:
        """Bytes of one row of d columns for each slot."""
        return 2 * self.tokens * self.topk * self.hidden


# The first twelve are those of SonicMoE (arXiv 2512.14080, figure 14).
SHAPES = {
    "1.4b-256": Shape(40960, 768, 256, 128, 8),
    "1.4b-512": Shape(40960, 768, 512, 64, 4),
    "1.4b-1024": Shape(40960, 768, 1024, 32, 2),
    "7b-256": Shape(24576, 1536, 256, 128, 8),
    "7b-512": Shape(24576, 1536, 512, 64, 4),
    "7b-1024": Shape(24576, 1536, 1024, 32, 2),
    "30b-256": Shape(32768, 4096, 256, 256, 16),
    "30b-512": Shape(32768, 4096, 512, 128, 8),
    "30b-1024": Shape(32768, 4096, 1024, 64, 4),
    "120b-512": Shape(32768, 4096, 512, 256, 16),
    "120b-1024": Shape(32768, 4096, 1024, 128, 8),
    "120b-2048": Shape(32768, 4096, 2048, 64, 4),
    "qwen3-30b": Shape(8192, 2048, 768, 128, 8),
    "mixtral": Shape(8192, 4096, 14336, 8, 2),
    "olmoe": Shape(32768, 2048, 1024, 64, 8),
    "qwen3-235b": Shape(32768, 4096, 1536, 128, 8),
    "ernie-21b": Shape(16384, 2560, 1536, 64, 6),
    "ernie-300b-4k": Shape(4096, 8192, 3584, 64, 8),
    "ernie-300b-16k": Shape(16384, 8192, 3584, 64, 8),
    "dsv3-4k": Shape(4096, 7168, 2048, 256, 8),
    "dsv3-16k": Shape(16384, 7168, 2048, 256, 8),
    "eight-experts": Shape(8192, 3072, 1536, 8, 8),
}
# Titles of shapes by the beginnings of their names.
MODELS = {
    "qwen3-30b": "Qwen3-30B",
    "qwen3-235b": "Qwen3-235B",
    "mixtral": "Mixtral 8x7B",
    "olmoe": "OLMoE",
    "ernie-21b": "ERNIE-4.5-21B",
    "ernie-300b": "ERNIE-4.5-300B",
    "dsv3": "DeepSeek-V3",
    "eight-experts": "eight experts",
}
ROUTINGS = ("even", "zipf")
