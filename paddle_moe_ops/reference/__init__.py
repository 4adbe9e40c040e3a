# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle: what every kernel on every backend must give, bit for bit, in NumPy.

Scores of routers and matrix products are the exceptions: those modules say so.

It checks data where that is part of the semantics (``validate``), not arguments; those the public functions
check.
"""

from __future__ import annotations

from .arithmetic import add32, fma32, round_to, to_float32
from .gemm import grouped_gemm, grouped_gemm_backward
from .indexed import get_routing_indices, permute_indexed, permute_indexed_backward, unpermute_indexed
from .paddle_api import (
    moe_permute,
    moe_permute_backward,
    moe_unpermute,
    moe_unpermute_backward,
    plan_to_rowmap,
    rowmap_to_token_rows,
)
from .permutation import permute, permute_backward, sum_rows, unpermute, unpermute_backward
from .routing import Plan, route, route_backward
from .topk import calculate_topk, calculate_topk_backward, select_experts

__all__ = [
    "Plan",
    "add32",
    "calculate_topk",
    "calculate_topk_backward",
    "fma32",
    "get_routing_indices",
    "grouped_gemm",
    "grouped_gemm_backward",
    "moe_permute",
    "moe_permute_backward",
    "moe_unpermute",
    "moe_unpermute_backward",
    "permute",
    "permute_backward",
    "permute_indexed",
    "permute_indexed_backward",
    "plan_to_rowmap",
    "round_to",
    "route",
    "route_backward",
    "rowmap_to_token_rows",
    "select_experts",
    "sum_rows",
    "to_float32",
    "unpermute",
    "unpermute_backward",
    "unpermute_indexed",
]
