# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of ``transformer_engine.jax.permutation`` with their arguments and results.

Code that calls them only needs another import. They run on `paddle_moe_ops.dispatch`, whose functions of the same names
document gradients, host synchronisation and errors. A row whose probability is exactly 0 is 0, as in TransformerEngine.
"""

from __future__ import annotations

from paddle import Tensor

from .._graphs import public
from . import te_jax
from .te_jax import (
    compute_ragged_all_to_all_params,
    compute_reverse_ragged_all_to_all_params,
    local_permute_after_a2a,
    local_unpermute_before_a2a,
    routing_map_to_selected_experts,
    sort_chunks_by_index,
    token_combine,
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


@public("inp", "probs")
def token_dispatch(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int,
    probs: Tensor | None = None,
    align_size: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]:
    """Copy tokens, and their probabilities, to expert order.

    Returns:
        rows [N, H], permuted_probs [N] or None, row_id_map, pad_offsets [E] or None, tokens_per_expert [E].
    """
    return te_jax.token_dispatch(inp, routing_map, num_out_tokens, probs, align_size, zero_prob_as_padding=True)
