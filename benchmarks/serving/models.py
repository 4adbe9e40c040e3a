# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of published models, and numbers of tokens."""

from __future__ import annotations

__all__ = ["MODELS", "TOKENS"]

# hidden size, inner size of an expert, experts, experts of a token
MODELS = {
    "Qwen3-30B": (2048, 768, 128, 8),
    "ERNIE-21B": (2560, 1536, 64, 6),
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "ERNIE-300B": (8192, 3584, 64, 8),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
