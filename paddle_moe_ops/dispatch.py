# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine with static shapes, in the form of ``transformer_engine.jax.permutation``, under its names.

The caller passes the number of rows, so the host need not wait for the GPU and a graph has static shapes. T
tokens, E experts, H hidden size, P ranks that share the experts, each with E / P of them. Sums and copies are those of
`paddle_moe_ops.masked`: ascending rows in float32, rounded once; bit-exact, deterministic, on CPU and GPU.

The last five functions prepare expert parallelism: the send and receive sizes of an all-to-all with uneven parts, and
the order of the received rows. They work on counts int32 or int64 [P, E]: tokens of each rank for each expert.
"""

from __future__ import annotations

from .compat.te_jax import (
    compute_ragged_all_to_all_params,
    compute_reverse_ragged_all_to_all_params,
    local_permute_after_a2a,
    local_unpermute_before_a2a,
    routing_map_to_selected_experts,
    sort_chunks_by_index,
    token_combine,
    token_dispatch,
)

__all__ = [
    "compute_ragged_all_to_all_params",
    "compute_reverse_ragged_all_to_all_params",
    "local_permute_after_a2a",
    "local_unpermute_before_a2a",
    "routing_map_to_selected_experts",
    "sort_chunks_by_index",
    "token_combine",
    "token_dispatch",
]


def __dir__() -> list[str]:
    return __all__
