# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of models' layers, and the format of files with results."""

from __future__ import annotations

from typing import NamedTuple

FORMAT = "paddle_moe_ops bench 1"


class Model(NamedTuple):
    """Sizes of a model's mixture-of-experts layers; `inner` is that of one expert."""

    name: str
    hidden: int
    experts: int
    topk: int
    inner: int


# Sizes from the config.json files of ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B, DeepSeek-V3, Kimi-K2, Qwen3-30B-A3B and
# Qwen3-235B-A22B. The last one is no model's: it is quick on a CPU.
MODELS = {
    model.name: model
    for model in (
        Model("ernie-21b", 2560, 64, 6, 1536),
        Model("ernie-300b", 8192, 64, 8, 3584),
        Model("dsv3", 7168, 256, 8, 2048),
        Model("kimi-k2", 7168, 384, 8, 2048),
        Model("qwen3-30b", 2048, 128, 8, 768),
        Model("qwen3-235b", 4096, 128, 8, 1536),
        Model("small", 512, 32, 4, 256),
    )
}
