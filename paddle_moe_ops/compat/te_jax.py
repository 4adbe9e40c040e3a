# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of `paddle_moe_ops.dispatch`, whose docstring describes their common rules."""

from __future__ import annotations

import math
from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import float32, is_graph_value, numbers_of, public, to_dtype
from ..backends import resolve
from ..functional import sort_chunks
from . import row_maps
from .te_masks import mask_of, move, route_mask, without_zero_probs
from .te_triton import unpermute_with_mask_map

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

# State that `local_permute_after_a2a` keeps for the inverse: sizes and order of the chunks, for `sort_chunks`.
_STATE = ("sorted_split_sizes", "inverse_chunk_indices")


@public("inp", "probs")
def token_dispatch(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int,
    probs: Tensor | None = None,
    align_size: int | None = None,
    *,
    zero_prob_as_padding: bool = False,
    validate: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]:
    """Copy tokens, and their probabilities, to expert order.

    Differentiable in ``inp`` (not float8) and ``probs``. No host synchronisation unless it validates on a GPU.

    Args:
        inp: [T, H] or [B, S, H] bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        routing_map: bool, integer or float [T, E] or [B, S, E]; entries other than 0 are routed.
        num_out_tokens: the most rows before padding; 0: no rows, padded or not.
        probs: bfloat16, float16 or float32 in the shape of ``routing_map``, or None.
        align_size: every expert's segment is padded to a multiple of this many rows, at least 1; None: no padding.
        zero_prob_as_padding: a row with probability exactly 0 is 0, as in TransformerEngine; its gradient stays.
        validate: NaN among the probabilities, and dropped rows (True only), raise. None: PADDLE_MOE_OPS_VALIDATE,
            otherwise NaN raises on a CPU, and nothing on a GPU.

    Returns:
        rows [N, H], with N = num_out_tokens, or with ``align_size`` A the largest multiple of A up to
        num_out_tokens + E * (A - 1); rows of no token are 0, and rows at or beyond N are dropped.
        permuted_probs [N] in the dtype of ``probs``, 0 in rows of no token, or None.
        row_id_map int32 [T, 2E + 1] as in `paddle_moe_ops.masked`, which counts no padding.
        pad_offsets int32 [E], the padding before each expert's segment, or None without ``align_size``.
        tokens_per_expert int32 [E], the rows of each expert in the buffer, with ``align_size`` padding included.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad data.
    """
    name = "token_dispatch"
    given, inp = inp, _two_dimensional(name, "inp", inp, _checks.ROW_DTYPES, "hidden")
    mask = mask_of(name, _by_token(name, "routing_map", routing_map, given, "num_experts"), inp, takes_floats=True)
    num_rows = _checks.integer(name, "num_out_tokens", num_out_tokens, 0)
    align = 1 if align_size is None else _checks.integer(name, "align_size", align_size, 1)
    if num_rows > 0:
        num_rows = (num_rows + mask.shape[1] * (align - 1)) // align * align
    _checks.flag(name, "zero_prob_as_padding", zero_prob_as_padding)
    if probs is not None:
        probs = _by_token(name, "probs", probs, given, mask.shape[1])
    plan = route_mask(name, mask, probs, num_rows, align, validate=validate)
    permuted_probs = None if probs is None else to_dtype(plan.row_probs, probs.dtype)
    leaves_out = zero_prob_as_padding and probs is not None
    rows, _ = move(inp, plan, None, without_zero_probs(plan, plan.row_probs) if leaves_out else None)
    if align_size is None:
        return rows, permuted_probs, row_maps.plan_to_row_id_map(plan), None, plan.tokens_per_expert
    pad_offsets = row_maps.padding_offsets(plan)
    counts = plan.expert_offsets[1:] - plan.expert_offsets[:-1]
    counts.stop_gradient = True
    return rows, permuted_probs, row_maps.plan_to_row_id_map(plan, pad_offsets), pad_offsets, counts


@public("inp", "merging_probs")
def token_combine(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
    *,
    validate: bool | None = None,
) -> Tensor:
    """Sum each token's rows, weighted if there are probabilities.

    Differentiable in ``inp`` and ``merging_probs``. No host synchronisation unless it validates on a GPU.

    Args:
        inp: [N, H] bfloat16, float16 or float32.
        row_id_map: of `token_dispatch`.
        merging_probs: bfloat16, float16 or float32 weights, [T, E] or [B, S, E], or [N] by row as `token_dispatch`
            returns them; or None.
        pad_offsets: int32 or int64 [E] of `token_dispatch`, or None.
        validate: a row that is in the map twice, or lies outside [0, N), raises. None: PADDLE_MOE_OPS_VALIDATE,
            otherwise it raises on a CPU and not on a GPU.

    Returns:
        [T, H].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; bad data.
    """
    name = "token_combine"
    _checks.tensor(name, "inp", inp, _checks.SUM_DTYPES, ["num_rows", "hidden"])
    row_maps.check_row_id_map(name, row_id_map, pad_offsets, inp=inp)
    by_row = getattr(merging_probs, "ndim", 2) == 1
    if merging_probs is not None:
        tokens, experts = row_id_map.shape[0], row_id_map.shape[1] // 2
        flat = _flattened(merging_probs)
        shape = [inp.shape[0]] if by_row else [tokens, experts]
        text = f"[{tokens}, {experts}] or [batch, length, {experts}] by token, or [{inp.shape[0]}] by row"
        given_shape = getattr(merging_probs, "shape", None)
        _checks.tensor(name, "merging_probs", flat, _checks.SUM_DTYPES, shape, text, given_shape)
        merging_probs = flat
        _checks.same_place(name, inp=inp, merging_probs=merging_probs)
    if not by_row:
        with _checks.renaming("unpermute_with_mask_map", name, probs="merging_probs"):
            return unpermute_with_mask_map(inp, row_id_map, merging_probs, pad_offsets, validate=validate)
    validation = _checks.validation(name, validate, inp)
    maps = row_maps.read_row_id_map(
        name, row_id_map, row_maps.num_rows_of(inp), pad_offsets, validation, check_range=True
    )
    return resolve("unpermute", inp).unpermute(inp, float32(merging_probs), maps)


@public("inp")
def sort_chunks_by_index(
    inp: Tensor, split_sizes: Tensor, sorted_indices: Tensor, *, validate: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Put the chunks of a buffer into another order, as `paddle_moe_ops.sort_chunks` does.

    Differentiable in ``inp`` (not float8). No host synchronisation unless it validates on a GPU.

    Args:
        inp: [R, H] or [B, S, H].
        split_sizes: int32 or int64 [C] rows of each chunk.
        sorted_indices: int32 or int64 [C], the chunks in their new order.
        validate: as in `paddle_moe_ops.sort_chunks`.

    Returns:
        rows [R, H] and row_id_map int32 [R], the new place of every row.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape; bad data.
    """
    name = "sort_chunks_by_index"
    inp = _two_dimensional(name, "inp", inp, _checks.ROW_DTYPES, "hidden")
    with _checks.renaming("sort_chunks", name, x="inp", order="sorted_indices"):
        out, _, source_to_dest = sort_chunks(inp, split_sizes, sorted_indices, validate=validate)
    return out, source_to_dest


@public("sparse_probs")
def routing_map_to_selected_experts(sparse_probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Find the experts of each token and their weights in a mask.

    Differentiable in ``sparse_probs``. No host synchronisation.

    Args:
        sparse_probs: [T, E] float.
        routing_map: bool, integer or float [T, E]; entries other than 0 are routed.
        topk: K, at most E.

    Returns:
        selected_experts int64 [T, K], ascending, and their weights [T, K]. A token with fewer than K experts has -1 and
        0 in front; of more than K the highest are left.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "routing_map_to_selected_experts"
    mask = mask_of(name, routing_map, takes_floats=True)
    _checks.tensor(name, "sparse_probs", sparse_probs, _checks.SUM_DTYPES, mask.shape)
    _checks.same_place(name, sparse_probs=sparse_probs, routing_map=routing_map)
    topk = _checks.integer(name, "topk", topk, 1, mask.shape[1])
    routed = mask.astype("int32")
    experts = paddle.argsort(routed, axis=-1, stable=True)[:, -topk:]
    selected = paddle.take_along_axis(routed, experts, axis=-1) > 0
    weights = paddle.take_along_axis(float32(sparse_probs), experts, axis=-1)
    weights = to_dtype(paddle.where(selected, weights, paddle.zeros_like(weights)), sparse_probs.dtype)
    experts = paddle.where(selected, experts, paddle.full_like(experts, -1))
    experts.stop_gradient = True
    return experts, weights


@public()
def compute_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Tensor, shard_id: int | Tensor, num_expert_shards: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute a rank's send and receive sizes for the dispatch of tokens to the ranks of their experts.

    No host synchronisation, no gradient.

    Args:
        all_shards_tokens_per_expert: int32 or int64 [P, E].
        shard_id: this rank, an int or a 0-D int tensor.
        num_expert_shards: P; it divides E.

    Returns:
        input_offsets, send_sizes, output_offsets and recv_sizes, each [P] in the dtype of the counts: for each rank the
        first row that is sent to it, their number, their first row in its buffer, and the number of rows received from
        it.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "compute_ragged_all_to_all_params"
    sends = _sends(name, all_shards_tokens_per_expert, shard_id, num_expert_shards)
    return _params_of(sends, shard_id)


@public()
def compute_reverse_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Tensor, shard_id: int | Tensor, num_expert_shards: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute a rank's send and receive sizes for the combine, in which ranks return the received rows.

    No host synchronisation, no gradient. Arguments, results and errors are those of `compute_ragged_all_to_all_params`.
    """
    name = "compute_reverse_ragged_all_to_all_params"
    sends = _sends(name, all_shards_tokens_per_expert, shard_id, num_expert_shards)
    return _params_of(sends.transpose([1, 0]), shard_id)


@public("x_recv")
def local_permute_after_a2a(
    x_recv: Tensor, all_shards_tokens_per_expert: Tensor, shard_id: int | Tensor, num_expert_shards: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sort the rows that a rank received, which are ordered by rank and then by expert, into expert order.

    Differentiable in ``x_recv`` (not float8). No host synchronisation.

    Args:
        x_recv: [R, H] received rows; rows after the last received one keep their places.
        all_shards_tokens_per_expert: int32 or int64 [P, E].
        shard_id: this rank, an int or a 0-D int tensor.
        num_expert_shards: P; it divides E.

    Returns:
        rows [R, H], the number of rows of each of this rank's experts [E / P], and a state for
        `local_unpermute_before_a2a`.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "local_permute_after_a2a"
    counts = _checked_counts(name, all_shards_tokens_per_expert, shard_id, num_expert_shards)
    shards, local = num_expert_shards, counts.shape[1] // num_expert_shards
    mine = _line(counts.reshape([shards, shards, local]).transpose([1, 0, 2]), shard_id)
    # chunk s * local + e contains the rows that rank s sent for expert e
    chunks = numbers_of(mine.flatten())
    order = chunks.reshape([shards, local]).transpose([1, 0]).flatten()
    back = chunks.reshape([local, shards]).transpose([1, 0]).flatten()
    with _checks.renaming("sort_chunks", name, x="x_recv", split_sizes="all_shards_tokens_per_expert"):
        rows, _, _ = sort_chunks(x_recv, mine.flatten(), order)
    state = dict(zip(_STATE, (mine.transpose([1, 0]).flatten(), back), strict=True))
    return rows, mine.sum(0, dtype=mine.dtype), state


@public("expert_outputs")
def local_unpermute_before_a2a(expert_outputs: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Undo `local_permute_after_a2a`, before rows go back to their ranks.

    Differentiable in ``expert_outputs`` (not float8). No host synchronisation.

    Args:
        expert_outputs: [R, H] rows in expert order.
        state: of `local_permute_after_a2a`.

    Returns:
        [R, H] rows ordered by rank, then by expert.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name, expected = "local_unpermute_before_a2a", "the dictionary that local_permute_after_a2a returned"
    _checks.instance(name, "state", state, dict, expected)
    if not set(_STATE) <= set(state):
        _checks.bad_value(name, "state", expected, sorted(state))
    sizes, order = (f"state[{key!r}]" for key in _STATE)
    with _checks.renaming("sort_chunks", name, x="expert_outputs", split_sizes=sizes, order=order):
        return sort_chunks(expert_outputs, *(state[key] for key in _STATE))[0]


def _flattened(value: Any) -> Any:
    """[B, S, C] as [B * S, C]; anything else as it is."""
    if getattr(value, "ndim", 2) != 3:
        return value
    if min(value.shape) <= 0:  # to reshape, 0 and -1 would be something else
        return value.flatten(0, 1)
    return value.reshape([value.shape[0] * value.shape[1], value.shape[2]])  # unlike flatten with second gradients


def _two_dimensional(function: str, argument: str, value: Any, dtypes: Any, columns: str) -> Tensor:
    """Check tokens [T, columns] or [B, S, columns]; the first form of them."""
    text = f"[num_tokens, {columns}] or [batch, length, {columns}]"
    shape = getattr(value, "shape", None)
    return _checks.tensor(function, argument, _flattened(value), dtypes, ["num_tokens", columns], text, shape)


def _by_token(function: str, argument: str, value: Any, inp: Tensor, columns: int | str) -> Tensor:
    """Check the shape of a matrix that belongs to the tokens of ``inp``, and return it as a matrix [T, columns].

    If both have batches of sequences, both sizes must agree, not only their product, the number of tokens.
    """
    *leading, _ = ("batch" if size < 0 else size for size in inp.shape)
    tokens = math.prod(leading) if "batch" not in leading else "num_tokens"
    forms = [[tokens, columns], *([[*leading, columns]] if len(leading) == 2 else [])]
    text = " or ".join(f"[{', '.join(map(str, form))}]" for form in forms)
    same_rank = forms[-1] if getattr(value, "ndim", 2) == 3 == len(forms[-1]) else None
    dtypes = (getattr(value, "dtype", None),)
    if same_rank is not None:
        return _flattened(_checks.tensor(function, argument, value, dtypes, same_rank, text))
    return _checks.tensor(function, argument, _flattened(value), dtypes, forms[0], text, getattr(value, "shape", None))


def _checked_counts(function: str, counts: Any, shard_id: Any, num_shards: Any) -> Tensor:
    shards = _checks.integer(function, "num_expert_shards", num_shards, 1)
    _checks.tensor(function, "all_shards_tokens_per_expert", counts, _checks.ID_DTYPES, [shards, "num_experts"])
    experts = counts.shape[1]
    if experts == 0 or experts % shards != 0:
        expected = f"a divisor of num_experts={experts}, which all_shards_tokens_per_expert has"
        _checks.bad_value(function, "num_expert_shards", expected, shards)
    if isinstance(shard_id, Tensor) or is_graph_value(shard_id):
        _checks.tensor(function, "shard_id", shard_id, _checks.ID_DTYPES, [])
    else:
        _checks.integer(function, "shard_id", shard_id, 0, shards - 1)
    if _is_on_host(shard_id) and not 0 <= shard_id.item() < shards:
        _checks.bad_value(function, "shard_id", f"from 0 to {shards - 1}", shard_id.item())
    if _is_on_host(counts) and bool((counts < 0).any()):
        expected = "counts, none of them negative"
        _checks.bad_value(function, "all_shards_tokens_per_expert", expected, int(counts.min()))
    return counts


def _is_on_host(value: Any) -> bool:
    """True if the host can read a tensor's values without waiting for a device."""
    return isinstance(value, Tensor) and value.place.is_cpu_place()


def _sends(function: str, counts: Any, shard_id: Any, num_shards: Any) -> Tensor:
    """[P, P] rows from each rank to each rank."""
    counts = _checked_counts(function, counts, shard_id, num_shards)
    return counts.reshape([num_shards, num_shards, -1]).sum(-1, dtype=counts.dtype)


def _line(table: Tensor, shard_id: int | Tensor) -> Tensor:
    """table[shard_id], whose number may only be known on the device."""
    if isinstance(shard_id, int):
        return table[shard_id]
    return paddle.index_select(table, shard_id.reshape([1])).squeeze(0)


def _params_of(sends: Tensor, shard_id: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    send_sizes, recv_sizes = _line(sends, shard_id), _line(sends.transpose([1, 0]), shard_id)
    input_offsets = paddle.cumsum(send_sizes, dtype=send_sizes.dtype) - send_sizes
    sent_before = paddle.cumsum(sends, axis=0, dtype=sends.dtype) - sends
    return input_offsets, send_sizes, _line(sent_before, shard_id), recv_sizes
