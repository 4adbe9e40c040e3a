# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Permutation by a mask of experts, in the form and under the names of ``transformer_engine.pytorch``.

T tokens, E experts, H hidden size, N rows of the permuted buffer. Rows are in expert order, and inside an expert in
the order of the tokens. Sums run over a token's rows in ascending order in float32, one fused multiply-add each, and
are rounded once (TransformerEngine takes the experts from the last to the first). Copies are bit-exact. Everything is
deterministic, runs on CPU and GPU, and works in static graphs and under `paddle.jit.to_static`.

A ``row_id_map`` is int32 [T, 2E + 1]: column 2E holds the number n of rows of the token, columns [0, n) these rows in
descending order, columns [E, E + n) their experts; the rest is -1.

With ``validate=None`` bad values raise on the CPU and not on a GPU, unless PADDLE_MOE_OPS_VALIDATE says otherwise;
those that do not raise are treated as "none" and never lead out of bounds.
"""

from __future__ import annotations

from .compat.te_torch import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .compat.te_triton import (
    make_chunk_sort_map,
    make_row_id_map,
    permute_with_mask_map,
    sort_chunks_by_map,
    unpermute_with_mask_map,
    unpermute_with_mask_map_bwd_with_merging_probs,
)

__all__ = [
    "make_chunk_sort_map",
    "make_row_id_map",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "permute_with_mask_map",
    "sort_chunks_by_map",
    "unpermute_with_mask_map",
    "unpermute_with_mask_map_bwd_with_merging_probs",
]


def __dir__() -> list[str]:
    return __all__
