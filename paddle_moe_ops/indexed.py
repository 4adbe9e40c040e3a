# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The family with gather indices, named as in Unsloth's mixture-of-experts kernels.

One flat index stands for each of the T*K (token, slot) pairs: ``gather_indices[i] = t * K + k`` says that row i of
the expert-ordered buffer belongs to slot k of token t. A permuted buffer always has T*K rows.
"""

from __future__ import annotations

from .compat.unsloth import calculate_topk, get_routing_indices, permute, torch_grouped_gemm, unpermute

__all__ = [
    "calculate_topk",
    "get_routing_indices",
    "permute",
    "torch_grouped_gemm",
    "unpermute",
]


def __dir__() -> list[str]:
    return __all__
