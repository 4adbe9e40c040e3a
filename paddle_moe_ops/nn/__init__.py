# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of a mixture-of-experts block: router, SwiGLU experts and the whole layer, with the router's losses.

The layers run in dygraph, under paddle.jit.to_static and in saved programs. Without an NVIDIA GPU, Paddle has few
operators of bfloat16 and float16, and layers of these dtypes compute in float32 and round. In shapes, T is tokens, H
hidden size, I intermediate size of an expert, E experts, K experts per token and N rows in expert order.
"""

from __future__ import annotations

from .config import MoEConfig
from .experts import SwiGLUExperts
from .layer import MoELayer, SwiGLU
from .load import ExpertLoad
from .losses import attach_loss, load_balance_loss, router_z_loss
from .memory import lay_side_by_side
from .microbatches import keep_float8_matrices, set_is_first_microbatch
from .router import RouterOutput, TopKRouter

__all__ = [
    "ExpertLoad",
    "MoEConfig",
    "MoELayer",
    "RouterOutput",
    "SwiGLU",
    "SwiGLUExperts",
    "TopKRouter",
    "attach_loss",
    "keep_float8_matrices",
    "lay_side_by_side",
    "load_balance_loss",
    "router_z_loss",
    "set_is_first_microbatch",
]


def __dir__() -> list[str]:
    return __all__
