# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of `paddle_moe_ops.masked` on maps: TransformerEngine's six low-level ones."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import float32, is_graph_value, public, to_dtype
from ..backends import RowMaps, Validation, resolve
from ..routing import row_probs, slot_probs
from . import row_maps
from .te_masks import check_scale, mask_of, move, route_mask, without_zero_probs

__all__ = [
    "make_chunk_sort_map",
    "make_row_id_map",
    "permute_with_mask_map",
    "sort_chunks_by_map",
    "unpermute_with_mask_map",
    "unpermute_with_mask_map_bwd_with_merging_probs",
]


@public(aliases={"mask": "routing_map"})
def make_row_id_map(
    routing_map: Tensor,
    num_out_tokens: int = 0,
    num_topK: int | None = None,
    fp8_padding: int = 0,
    *,
    validate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Give every routed pair of token and expert its row.

    No gradient. No host synchronisation unless it validates on a GPU.

    Args:
        routing_map: bool or integer [T, E]; entries other than 0 are routed. As a keyword it may also be called
            ``mask``.
        num_out_tokens: the most rows; those after them are dropped. 0: no limit.
        num_topK: the most experts of a token; if it has more, the highest are dropped. It saves memory. None: E.
        fp8_padding: pad every expert's segment to a multiple of this many rows, inside the map; 0: no padding.
        validate: more than num_topK experts, and dropped rows (True only), raise.

    Returns:
        row_id_map int32 [T, 2E + 1], and the number of rows, padding included, as a 0-D int32 tensor.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad data.
    """
    name = "make_row_id_map"
    mask = mask_of(name, routing_map)
    limit = _checks.integer(name, "num_out_tokens", num_out_tokens, 0)
    padding = _checks.integer(name, "fp8_padding", fp8_padding, 0)
    tokens, experts = mask.shape
    topk = experts if num_topK is None else _checks.integer(name, "num_topK", num_topK, 1, experts)
    # On a GPU a buffer that holds any routing, so that nothing has to wait for a count.
    counts = tokens < 0 or (isinstance(mask, Tensor) and mask.place.is_cpu_place())
    room = -1 if counts else tokens * topk + (experts * (padding - 1) if padding else 0)
    plan = route_mask(name, mask, None, limit or min(room, 2**31 - 1), padding or 1, topk=topk, validate=validate)
    num_out = plan.expert_offsets[experts]
    num_out.stop_gradient = True
    return row_maps.plan_to_row_id_map(plan), num_out


@public("inp", "probs")
def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    num_out_tokens: int | Tensor,
    probs: Tensor | None = None,
    scale: Tensor | None = None,
    pad_offsets: Tensor | None = None,
    *,
    zero_prob_as_padding: bool = False,
    validate: bool | None = None,
) -> Any:
    """Copy tokens to their rows, with their probabilities and scales.

    Differentiable in ``inp`` (not float8) and ``probs``. Rows without a token are 0 in every output. No host
    synchronisation unless it validates on a GPU or ``num_out_tokens`` is a tensor there.

    Args:
        inp: [T, H] bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        row_id_map: of `make_row_id_map`.
        num_out_tokens: N; rows at or beyond it are dropped. A 0-D int tensor is read, which synchronises with a GPU.
        probs: bfloat16, float16 or float32 [T, E], or None.
        scale: of float8 rows: float32 or packed int32 [T, S], such as for groups of 128 columns, or uint8 [T, S], such
            as the e8m0 bytes for groups of 32. A tensor of one element that does not have two dimensions is a
            scale of all rows and is returned as it is. None: no scale.
        pad_offsets: int32 or int64 [E] rows to add to each expert's, for a map that does not count padding.
        zero_prob_as_padding: a row with probability exactly 0 is 0, as in TransformerEngine; its scale and its gradient
            stay.
        validate: a row that is in the map twice raises.

    Returns:
        permuted [N, H]; with ``probs`` or ``scale`` permuted, permuted_probs [N] or None, permuted_scale or None.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad data.
    """
    name = "permute_with_mask_map"
    _checks.tensor(name, "inp", inp, _checks.ROW_DTYPES, ["num_tokens", "hidden"])
    count = _checks.token_count(name, "num_out_tokens", num_out_tokens, inp)
    validation = _check_map(name, row_id_map, pad_offsets, validate, inp=inp, probs=probs, scale=scale)
    _checks.tensor(name, "inp", inp, _checks.ROW_DTYPES, [row_id_map.shape[0], "hidden"])
    _checks.flag(name, "zero_prob_as_padding", zero_prob_as_padding)
    check_scale(name, scale, inp)
    num_rows = num_out_tokens if count < 0 else count
    maps = row_maps.read_row_id_map(name, row_id_map, num_rows, pad_offsets, validation, check_range=False)
    permuted_probs, rows_by = None, None
    if probs is not None:
        _check_probs(name, "probs", probs, row_id_map)
        by_row = row_probs(float32(probs), maps)
        permuted_probs = to_dtype(by_row, probs.dtype)
        if zero_prob_as_padding:
            rows_by = without_zero_probs(maps, by_row)
    permuted, permuted_scale = move(inp, maps, scale, rows_by)
    return permuted if probs is None and scale is None else (permuted, permuted_probs, permuted_scale)


@public("inp", "probs", "permuted_probs")
def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
    permuted_probs: Tensor | None = None,
    *,
    validate: bool | None = None,
) -> Any:
    """Sum each token's rows, weighted if there are probabilities, and unpermute values of rows to their pairs.

    Differentiable in ``inp``, ``probs`` and ``permuted_probs``. No host synchronisation unless it validates on a GPU.

    Args:
        inp: [N, H] bfloat16, float16 or float32.
        row_id_map: of `make_row_id_map`.
        probs: bfloat16, float16 or float32 weights [T, E], or None.
        pad_offsets: int32 or int64 [E], as in `permute_with_mask_map`.
        permuted_probs: bfloat16, float16 or float32 [N] values of rows, or None.
        validate: a row that is in the map twice, or lies outside [0, N), raises.

    Returns:
        [T, H]; with ``permuted_probs`` that and unpermuted_probs [T, E], 0 where nothing was routed.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad data.
    """
    name = "unpermute_with_mask_map"
    _checks.tensor(name, "inp", inp, _checks.SUM_DTYPES, ["num_rows", "hidden"])
    tensors = {"inp": inp, "probs": probs, "permuted_probs": permuted_probs}
    validation = _check_map(name, row_id_map, pad_offsets, validate, **tensors)
    _check_probs(name, "probs", probs, row_id_map)
    if permuted_probs is not None:
        _checks.tensor(name, "permuted_probs", permuted_probs, _checks.SUM_DTYPES, [inp.shape[0]])
    maps = _maps_of_rows(name, row_id_map, inp, pad_offsets, validation)
    out = resolve("unpermute", inp).unpermute(inp, float32(probs), maps)
    if permuted_probs is None:
        return out
    return out, to_dtype(slot_probs(float32(permuted_probs), maps), permuted_probs.dtype)


@public()
def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None = None,
    *,
    validate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the weighted `unpermute_with_mask_map`, for backward passes written by hand.

    Not differentiable itself. No host synchronisation unless it validates on a GPU.

    Args:
        fwd_output_grad: [T, H] gradient of the sum.
        row_id_map: of the forward pass.
        fwd_input: [N, H] rows of the forward pass, dtype of ``fwd_output_grad``.
        merging_probs: [T, E] weights of the forward pass.
        pad_offsets: of the forward pass.
        validate: as in `unpermute_with_mask_map`.

    Returns:
        act_grad [N, H], 0 in padding, and merging_probs_grad [T, E] in the dtype of ``merging_probs``, 0 where nothing
        was routed.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad data.
    """
    name = "unpermute_with_mask_map_bwd_with_merging_probs"
    _checks.tensor(name, "fwd_input", fwd_input, _checks.SUM_DTYPES, ["num_rows", "hidden"])
    tensors = {"fwd_input": fwd_input, "fwd_output_grad": fwd_output_grad, "merging_probs": merging_probs}
    validation = _check_map(name, row_id_map, pad_offsets, validate, **tensors)
    shape = [row_id_map.shape[0], fwd_input.shape[1]]
    _checks.tensor(name, "fwd_output_grad", fwd_output_grad, (fwd_input.dtype,), shape)
    _check_probs(name, "merging_probs", merging_probs, row_id_map)
    maps = _maps_of_rows(name, row_id_map, fwd_input, pad_offsets, validation)
    backend, weights = resolve("unpermute", fwd_input), float32(merging_probs)
    d_rows, d_probs = backend.unpermute_backward(fwd_output_grad, fwd_input, weights, maps, (True, True))
    return d_rows, to_dtype(d_probs, merging_probs.dtype)


@public()
def make_chunk_sort_map(
    split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int | None = None, *, validate: bool | None = None
) -> Tensor:
    """Find the new place of every row when chunks are put in another order; rows after the last chunk stay.

    No gradient. Host synchronisation only without ``num_tokens``, and when it validates on a GPU.

    Args:
        split_sizes: int32 or int64 [C] rows of each chunk.
        sorted_indices: int32 or int64 [C], the chunks in their new order.
        num_tokens: R, the rows of the buffer. None: the sum of the sizes.
        validate: as in `paddle_moe_ops.sort_chunks`.

    Returns:
        int32 [R], a permutation.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad data.
    """
    name = "make_chunk_sort_map"
    _checks.tensor(name, "split_sizes", split_sizes, _checks.ID_DTYPES, ["num_chunks"])
    _checks.tensor(name, "sorted_indices", sorted_indices, _checks.ID_DTYPES, [split_sizes.shape[0]])
    _checks.same_place(name, split_sizes=split_sizes, sorted_indices=sorted_indices)
    num_rows = -1 if num_tokens is None else _checks.integer(name, "num_tokens", num_tokens, 0)
    validation = _checks.validation(name, validate, split_sizes)
    with _checks.renaming("chunk_sort_map", name, order="sorted_indices"):
        return resolve("sort_chunks", split_sizes).chunk_sort_map(split_sizes, sorted_indices, num_rows, validation)


@public("inp", "probs")
def sort_chunks_by_map(
    inp: Tensor,
    chunk_map: Tensor,
    probs: Tensor | None = None,
    is_forward: bool = True,
    *,
    validate: bool | None = None,
) -> Any:
    """Move row r to ``chunk_map[r]``, or back: `paddle_moe_ops.sort_chunks` is faster and needs no map.

    Differentiable in ``inp`` (not float8) and ``probs``. No host synchronisation unless it validates on a GPU.

    Args:
        inp: [R, H] bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        chunk_map: int32 [R] of `make_chunk_sort_map`.
        probs: bfloat16, float16 or float32 [R] that travel with the rows, or None.
        is_forward: False: the rows go back, row r comes from ``chunk_map[r]``.
        validate: a map that is not a permutation raises; unvalidated, rows that no row goes to are 0.

    Returns:
        [R, H], or, with ``probs``, that and the probabilities [R] in their dtype.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad data.
    """
    name = "sort_chunks_by_map"
    _checks.tensor(name, "inp", inp, _checks.ROW_DTYPES, ["num_tokens", "hidden"])
    _checks.tensor(name, "chunk_map", chunk_map, (paddle.int32,), [inp.shape[0]])
    if probs is not None:
        _checks.tensor(name, "probs", probs, _checks.SUM_DTYPES, [inp.shape[0]])
    _checks.flag(name, "is_forward", is_forward)
    _checks.same_place(name, inp=inp, chunk_map=chunk_map, probs=probs)
    maps = row_maps.read_chunk_map(name, chunk_map, is_forward, _checks.validation(name, validate, inp))
    out, _ = resolve("permute", inp).permute(inp, None, maps, "all")
    if probs is None:
        return out
    return out, to_dtype(row_probs(float32(probs).unsqueeze(-1), maps), probs.dtype)


def _check_map(
    function: str, row_id_map: Any, pad_offsets: Any, validate: bool | None, **others: Tensor | None
) -> Validation:
    """Check a map, and that the others are tensors on its device. Return the level of validation on that device."""
    for argument, value in others.items():
        if value is not None and not isinstance(value, Tensor) and not is_graph_value(value):
            _checks.bad_type(function, argument, "a paddle.Tensor", type(value).__name__)
    row_maps.check_row_id_map(function, row_id_map, pad_offsets, **others)
    return _checks.validation(function, validate, row_id_map)


def _maps_of_rows(
    function: str, row_id_map: Tensor, rows: Tensor, pad_offsets: Tensor | None, validation: Validation
) -> RowMaps:
    """The maps to the rows of a given buffer."""
    num_rows = row_maps.num_rows_of(rows)
    return row_maps.read_row_id_map(function, row_id_map, num_rows, pad_offsets, validation, check_range=True)


def _check_probs(function: str, argument: str, probs: Any, row_id_map: Tensor) -> None:
    if probs is not None:
        shape = [row_id_map.shape[0], row_id_map.shape[1] // 2]
        _checks.tensor(function, argument, probs, _checks.SUM_DTYPES, shape)
