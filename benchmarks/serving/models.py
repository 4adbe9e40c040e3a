# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of published models, kinds of matrices, and numbers of tokens."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "MODELS", "TOKENS", "Kind"]

# hidden size, inner size of an expert, experts, experts of a token
MODELS = {
    "Qwen3-30B": (2048, 768, 128, 8),
    "ERNIE-21B": (2560, 1536, 64, 6),
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "ERNIE-300B": (8192, 3584, 64, 8),
}


class Kind(NamedTuple):
    """A form of matrices: bits of an element, largest error of a result relative to its norm, largest mean of rows."""

    bits: int
    error: float
    rows: float = float("inf")  # per expert, of the layers that read it as it is


KINDS = {
    "bf16": Kind(16, 2e-2),
    "fp8_128x128": Kind(8, 8e-2),
    "int8": Kind(8, 3e-2, 512),
    "int4": Kind(4, 0.4, 512),
    "int4_1x128": Kind(4, 0.3, 512),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
