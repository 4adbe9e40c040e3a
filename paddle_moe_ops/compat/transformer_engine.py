# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of ``transformer_engine.pytorch`` and of its ``triton.permutation``, with their arguments and results.

Code that calls them only needs another import. They run on `paddle_moe_ops.masked`, whose functions of the same names
document gradients, host synchronisation and errors. Sizes are checked against the shapes of the tensors, and a row
whose probability is exactly 0 is 0, as in TransformerEngine.
"""

from __future__ import annotations

from typing import Any

from paddle import Tensor

from .. import _checks
from .._graphs import is_graph_value, public
from . import row_maps, te_torch, te_triton
from .te_masks import mask_of, route_mask
from .te_torch import moe_permute, moe_sort_chunks_by_index, moe_sort_chunks_by_index_with_probs, moe_unpermute

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


@public("inp", "probs")
def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1, *, scale: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Route by a mask and copy tokens and probabilities to expert order.

    Returns:
        permuted [N, H], permuted_probs [N], row_id_map int32 [T, 2E + 1]; and permuted_scale if ``scale`` is given.
    """
    return te_torch.moe_permute_with_probs(
        inp, probs, routing_map, num_out_tokens, scale=scale, zero_prob_as_padding=True
    )


@public("inp", "probs")
def moe_permute_and_pad_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    tokens_per_expert: Any,
    align_size: int,
    *,
    scale: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Do the same as `moe_permute_with_probs` with padded segments.

    Returns:
        permuted [N, H], permuted_probs [N], row_id_map, pad_offsets [E] or None, target_tokens_per_expert int64 [E];
        and permuted_scale if ``scale`` is given.
    """
    return te_torch.moe_permute_and_pad_with_probs(
        inp, probs, routing_map, tokens_per_expert, align_size, scale=scale, zero_prob_as_padding=True
    )


@public(aliases={"mask": "routing_map"})
def make_row_id_map(
    routing_map: Tensor, num_tokens: int, num_experts: int, num_out_tokens: int | None = None
) -> Tensor:
    """Give every routed pair of token and expert its row.

    Returns:
        row_id_map int32 [T, 2E + 1] of a mask [T, E], without rows at or beyond ``num_out_tokens`` if it is given.
    """
    name = "make_row_id_map"
    if num_out_tokens is None:
        row_id_map, _ = te_triton.make_row_id_map(routing_map)
    else:
        num_rows = _checks.integer(name, "num_out_tokens", num_out_tokens, 0)
        row_id_map = row_maps.plan_to_row_id_map(route_mask(name, mask_of(name, routing_map), None, num_rows))
    _check_sizes(name, row_id_map, num_tokens, num_experts)
    return row_id_map


@public("inp", "probs")
def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int | Tensor,
    hidden_size: int,
    scale_hidden_dim: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Copy tokens to their rows, with their probabilities and scales.

    Returns:
        output [N, H], permuted_scale [N, S] or None, permuted_probs [N] or None.
    """
    name = "permute_with_mask_map"
    _check_sizes(name, row_id_map, num_tokens, num_experts)
    _check_size(name, "hidden_size", hidden_size, inp, 1)
    if scale is not None:
        _check_size(name, "scale_hidden_dim", scale_hidden_dim, scale, 1)
    moved = te_triton.permute_with_mask_map(
        inp, row_id_map, num_out_tokens, probs, scale, pad_offsets, zero_prob_as_padding=True
    )
    output, permuted_probs, permuted_scale = moved if isinstance(moved, tuple) else (moved, None, None)
    return output, permuted_scale, permuted_probs


@public("inp", "merging_probs", "permuted_probs")
def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Sum each token's rows, and unpermute values of rows to their pairs.

    Returns:
        output [T, H], unpermuted_probs [T, E] or None.
    """
    name = "unpermute_with_mask_map"
    _check_sizes(name, row_id_map, num_tokens, num_experts)
    _check_size(name, "hidden_size", hidden_size, inp, 1)
    with _checks.renaming(name, name, probs="merging_probs"):
        sums = te_triton.unpermute_with_mask_map(inp, row_id_map, merging_probs, pad_offsets, permuted_probs)
    return sums if isinstance(sums, tuple) else (sums, None)


@public()
def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the weighted `unpermute_with_mask_map`.

    Returns:
        act_grad [N, H], merging_probs_grad [T, E].
    """
    name = "unpermute_with_mask_map_bwd_with_merging_probs"
    _check_sizes(name, row_id_map, num_tokens, num_experts)
    _check_size(name, "num_out_tokens", num_out_tokens, fwd_input, 0)
    _check_size(name, "hidden_size", hidden_size, fwd_input, 1)
    return te_triton.unpermute_with_mask_map_bwd_with_merging_probs(
        fwd_output_grad, row_id_map, fwd_input, merging_probs, pad_offsets
    )


@public()
def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """Find the new place of every row when chunks are put in another order.

    Returns:
        row_id_map int32 [R].
    """
    _check_size("make_chunk_sort_map", "num_splits", num_splits, split_sizes, 0)
    return te_triton.make_chunk_sort_map(split_sizes, sorted_indices, num_tokens)


@public("inp", "probs")
def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Move row r to ``row_id_map[r]``, or back.

    Returns:
        output [R, H], permuted_probs [R] or None.
    """
    name = "sort_chunks_by_map"
    _check_size(name, "num_tokens", num_tokens, inp, 0)
    _check_size(name, "hidden_size", hidden_size, inp, 1)
    with _checks.renaming(name, name, chunk_map="row_id_map"):
        moved = te_triton.sort_chunks_by_map(inp, row_id_map, probs, is_forward)
    return moved if isinstance(moved, tuple) else (moved, None)


def _check_sizes(function: str, row_id_map: Any, num_tokens: Any, num_experts: Any) -> None:
    rowmap_size = _size(function, "row_id_map", row_id_map, 1)
    _check_size(function, "num_tokens", num_tokens, row_id_map, 0)
    if rowmap_size not in (-1, 2 * _checks.integer(function, "num_experts", num_experts, 1) + 1):
        _checks.bad_value(function, "num_experts", f"{rowmap_size // 2}, as the map has it", num_experts)


def _check_size(function: str, argument: str, given: Any, tensor: Any, axis: int) -> None:
    """Check a size that a tensor tells too. A size that is unknown until a graph runs is taken from the tensor."""
    size = _size(function, argument, tensor, axis)
    if is_graph_value(given):
        return
    if size not in (-1, _checks.integer(function, argument, given, -1)):
        _checks.bad_value(function, argument, f"{size}, as the tensor has it", given)


def _size(function: str, argument: str, tensor: Any, axis: int) -> int:
    if getattr(tensor, "ndim", 0) <= axis:
        _checks.bad_type(function, argument, f"about a tensor with more than {axis} dimensions", type(tensor).__name__)
    return tensor.shape[axis]
