# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens to expert order and back: by a plan, and by the pair of paddle.nn.functional.

T tokens, H hidden size, K slots per token, E experts, N rows of the permuted buffer, S scales per row.
"""

from __future__ import annotations

from typing import Any, get_args

import paddle
from paddle import Tensor

from . import _checks
from ._graphs import float32, public, to_dtype
from ._options import FillPadding, QuantizeFormat, ScaleLayout
from ._quick import AMAX_MIN, quick_moe_permute, quick_moe_unpermute, quick_permute, quick_unpermute
from .backends import Maps, MoePermuteSpec, MoeUnpermuteSpec, RouteSpec, resolve
from .routing import Plan, as_plan, check_weights, rows_of, tokens_of

__all__ = ["moe_permute", "moe_unpermute", "permute", "sort_chunks", "unpermute"]

FILL_PADDING = get_args(FillPadding)


@public("x", quick=quick_permute)
def permute(
    x: Tensor,
    plan: Plan,
    scale: Tensor | None = None,
    *,
    quantize: QuantizeFormat = None,
    scale_layout: ScaleLayout = "row",
    amax_min: float = AMAX_MIN,
    fill_padding: FillPadding = "all",
) -> tuple[Tensor, Tensor | None]:
    """Copy every token to its rows, as it is or quantised to float8.

    Differentiable in ``x`` (the gradient of a token is the ascending float32 sum over its rows, rounded once), except
    for float8 rows; `quantized_experts` computes a gradient through quantised rows. Deterministic: bit-exact copies,
    and codes and scales of the same bits on every backend and run. No host synchronisation. The backward pass keeps no
    [T, H] tensor.

    With ``quantize`` every token is read and quantised once, by the rule of `quantize_1x128`. Its codes and scales are
    written to each of its rows in the same pass. The bits are those of quantising first and permuting afterwards.

    Args:
        x: [T, H] bfloat16, float16, float32, float8_e4m3fn or float8_e5m2 (not with ``quantize``); any H >= 1, rows may
            be strided.
        plan: the rows of each token.
        scale: [T, S] float32, int32 (four packed ue8m0 exponents each), uint8 (e8m0 bytes, as of MXFP8), or None. Not
            differentiable. None with ``quantize``, which computes the scales.
        quantize: None, or the format of the rows: "fp8_1x128" (float32 scales) or "fp8_1x128_ue8m0" (scales that are
            powers of two, packed four to an int32).
        scale_layout: layout of the scales of ``quantize``: "row", or "col", which is transposed and padded.
        amax_min: with ``quantize``: lower limit of a group's largest magnitude, from 2^-100 to the largest float32.
        fill_padding: what padding rows hold. "all": zeros. "meta": rows undefined, scales zero. "none": both undefined.

    Returns:
        rows [N, H] and scales [N, S] or None. With ``quantize``, rows in float8_e4m3fn and the scales of
        `quantize_1x128` for N rows.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import permute, route
        >>> x, ids = paddle.randn([3, 256]), paddle.to_tensor([[0, 2], [2, 1], [0, 1]])
        >>> plan = route(ids, num_experts=4)
        >>> rows, _ = permute(x, plan)
        >>> rows.shape
        [6, 256]
        >>> codes, scales = permute(x, plan, quantize="fp8_1x128")
        >>> scales.shape
        [6, 2]
    """
    name = "permute"
    plan = as_plan(name, plan)
    _checks.choice(name, "quantize", quantize, _checks.QUANTIZE_FORMATS)
    spec = _checks.quantization(name, quantize == _checks.UE8M0, scale_layout, amax_min)
    _checks.rows(name, "x", x, _checks.ROW_DTYPES if quantize is None else _checks.SUM_DTYPES, *tokens_of(plan))
    if quantize is None and scale_layout != "row":
        _checks.bad_value(name, "scale_layout", "'row' without quantize", repr(scale_layout))
    if quantize is not None and scale is not None:
        _checks.bad_value(name, "scale", "None with quantize, which makes the scales", type(scale).__name__)
    if scale is not None:
        dtypes = paddle.float32, paddle.int32, paddle.uint8
        _checks.tensor(name, "scale", scale, dtypes, [plan.num_tokens, "num_scales"])
    _checks.choice(name, "fill_padding", fill_padding, FILL_PADDING)
    _checks.same_place(name, x=x, plan=plan.slot_to_row, scale=scale)
    if quantize is not None:
        codes, scales = resolve("permute_quantized", x).permute_quantized(x, plan, fill_padding, spec)
        return codes, scales
    rows, scales = resolve(name, x).permute(x, movable_scale(scale), plan, fill_padding)
    return rows, None if scale is None else to_dtype(scales, scale.dtype)


def movable_scale(scale: Tensor | None) -> Any:
    """Scales of a dtype that backends move: bytes as int32."""
    return scale.astype("int32") if scale is not None and scale.dtype == paddle.uint8 else scale


@public("y", "probs", quick=quick_unpermute)
def unpermute(y: Tensor, plan: Plan, probs: Tensor | None = None) -> Tensor:
    """Sum each token's rows, weighted if probabilities are given.

    The sum starts at -0.0 in float32 and adds the rows in ascending order, by one addition or one fused multiply-add
    each; it is rounded once to the dtype of ``y``. The sum of a token without rows is 0; one unweighted row is copied.
    Deterministic: the same bits on every backend and run.

    Differentiable in ``y`` and ``probs``. No host synchronisation. Without ``probs`` the backward pass keeps no rows.

    Args:
        y: [N, H] bfloat16, float16 or float32, rows in expert order.
        plan: the plan that `permute` followed.
        probs: float32 weights, [N] by row (``plan.row_probs``) or [T, K] by slot, or None. The gradient has this shape;
            it is 0 at padding rows and at slots without a row.

    Returns:
        [T, H], dtype of ``y``.

    Raises:
        TypeError: an argument of the wrong type or dtype; float8 rows.
        ValueError: an argument of the wrong shape.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import permute, route, unpermute
        >>> x, probs = paddle.randn([3, 64]), paddle.full([3, 2], 0.5)
        >>> plan = route(paddle.to_tensor([[0, 2], [2, 1], [0, 1]]), probs, num_experts=4)
        >>> rows, _ = permute(x, plan)
        >>> y = 2 * rows  # in place of the experts
        >>> paddle.allclose(unpermute(y, plan, plan.row_probs), 2 * x).item()
        True
    """
    name = "unpermute"
    plan = as_plan(name, plan)
    _checks.rows(name, "y", y, _checks.SUM_DTYPES, *rows_of(plan))
    if probs is not None:
        check_weights(name, "probs", probs, plan)
    _checks.same_place(name, y=y, plan=plan.slot_to_row, probs=probs)
    return resolve(name, y).unpermute(y, probs, plan)


@public("x", "probs")
def sort_chunks(
    x: Tensor, split_sizes: Tensor, order: Tensor, probs: Tensor | None = None, *, validate: bool | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Put the chunks of a buffer into another order, such as from (rank, expert) to (expert, rank) after an all-to-all.

    Chunk c holds ``split_sizes[c]`` rows after those of the chunks before it; the output is the chunks ``order[0]``,
    ``order[1]``, ... Rows after the last chunk stay where they are.

    Differentiable in ``x`` (not float8) and ``probs``; the gradients go back the same way. Deterministic, bit-exact
    copies. No host synchronisation except with ``validate=True`` on a GPU.

    Args:
        x: [R, H] bfloat16, float16, float32, float8_e4m3fn or float8_e5m2; any H >= 1, rows may be strided.
        split_sizes: int32 or int64 [C] rows of each chunk, >= 0, adding up to at most R.
        order: int32 or int64 [C], a permutation of [0, C).
        probs: bfloat16, float16 or float32 [R] that are permuted with the rows, or None.
        validate: True: bad sizes and orders raise. False: negative sizes count as 0, and chunks end at row R. Entries
            of ``order`` that name no chunk, or one that was named before, are ignored; chunks that are not named
            follow the others, ascending. None: PADDLE_MOE_OPS_VALIDATE, otherwise they raise on a CPU and not on a GPU.

    Returns:
        rows [R, H], probabilities [R] in the dtype of ``probs`` or None, and source_to_dest int32 [R]: the new place of
        every row, a permutation.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape; bad data, as ``validate`` says.

    Examples:
        Received rows of 2 ranks, each with chunks for 2 experts, are put in the order of experts:

        >>> import paddle
        >>> from paddle_moe_ops import sort_chunks
        >>> x, sizes = paddle.arange(6.0).reshape([6, 1]), paddle.to_tensor([1, 2, 2, 1])
        >>> rows, _, source_to_dest = sort_chunks(x, sizes, order=paddle.to_tensor([0, 2, 1, 3]))
        >>> rows.flatten().tolist()
        [0.0, 3.0, 4.0, 1.0, 2.0, 5.0]
    """
    name = "sort_chunks"
    _checks.rows(name, "x", x, _checks.ROW_DTYPES, "num_rows")
    _checks.tensor(name, "split_sizes", split_sizes, _checks.ID_DTYPES, ["num_chunks"])
    _checks.tensor(name, "order", order, _checks.ID_DTYPES, [split_sizes.shape[0]])
    if probs is not None:
        _checks.tensor(name, "probs", probs, _checks.SUM_DTYPES, [x.shape[0]])
    _checks.same_place(name, x=x, split_sizes=split_sizes, order=order, probs=probs)
    validation = _checks.validation(name, validate, x)
    backend, by_row = resolve(name, x), float32(probs)
    out, probs_out, source_to_dest = backend.sort_chunks(x, by_row, split_sizes, order, validation)
    return out, None if probs is None else to_dtype(probs_out, probs.dtype), source_to_dest


@public("hidden_states", "expert_prob_topk", quick=quick_moe_permute)
def moe_permute(
    hidden_states: Tensor,
    scale: Tensor | None,
    expert_routemap_topk: Tensor,
    expert_prob_topk: Tensor,
    num_experts: int,
    tokens_per_expert: Any,
    padding_alignment: int,
    do_gather: bool = True,
    using_ue8m0_scale: bool = False,
    return_expert_indices: bool = False,
    override_buffer_size: int = -1,
    name: str | None = None,
    *,
    fill_padding: FillPadding = "all",
    return_overflow: bool = False,
    validate: bool | None = None,
) -> tuple[Tensor, ...]:
    """Route tokens and copy them to expert order in one operator, as `paddle.nn.functional.moe_permute` does.

    Differentiable in ``hidden_states`` and ``expert_prob_topk``; float8 rows have no gradient. Deterministic: inside an
    expert's segment tokens ascend, and copies are bit-exact. Host synchronisation: on a GPU one to learn N, unless
    ``tokens_per_expert`` is a list of ints or there is a static buffer, and with ``validate=True``; none on the CPU.

    Args:
        hidden_states: [T, H] bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        scale: [T, S] float32, or int32 with ``using_ue8m0_scale``, or None. Permuted with the rows.
        expert_routemap_topk: int32 or int64 [T, K] expert ids, -1 for an unassigned slot.
        expert_prob_topk: float32 [T, K].
        num_experts: E, at most 65536.
        tokens_per_expert: rows of each expert: a list of ints or of int tensors with one element, or a 1-D int array or
            tensor. Each must be the number of rows routed to the expert, with or without its segment's padding. None:
            counted. Ignored with a static buffer, which also accepts [].
        padding_alignment: each expert's segment is padded to a multiple of this many rows.
        do_gather: False: compute only the maps and probabilities, without the rows.
        using_ue8m0_scale: ``scale`` holds four packed ue8m0 exponents per int32.
        return_expert_indices: also return the expert of each row.
        override_buffer_size: N of a static buffer, -1 without. Rows at or beyond its end are dropped.
        name: not used, for Paddle's signature.
        fill_padding: what padding rows hold. "all": zeros. "meta": rows undefined, the rest as with "all". "none":
            rows, probabilities and scales undefined.
        return_overflow: also return the number of dropped slots.
        validate: True: bad and repeated ids, NaN probabilities and dropped slots raise. False: bad ids count as -1;
            if an id repeats, the first slot gets the row; NaN is copied. None: PADDLE_MOE_OPS_VALIDATE, otherwise all
            but dropped slots raise on a CPU, and none on a GPU.

    Returns:
        hidden_states_unzipped [N, H] ([0, H] without gather), zipped_expertwise_rowmap int32 [T, E] (-1 = none),
        token_prob_unzipped float32 [N] (0 in padding), scale_unzipped [N, S] ([0] without gather or without a scale),
        then as asked for: expert_indices int32 [N] (-1 in padding), overflow 0-D int32.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; wrong ``tokens_per_expert``; bad data (see ``validate``).

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import moe_permute
        >>> x, probs = paddle.randn([3, 64]), paddle.full([3, 2], 0.5)
        >>> ids = paddle.to_tensor([[0, 2], [2, 1], [0, 1]], "int32")
        >>> rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, 4, None, padding_alignment=4)
        >>> rows.shape
        [12, 64]
        >>> rowmap.tolist()
        [[0, -1, 8, -1], [-1, 4, 9, -1], [1, 5, -1, -1]]
    """
    function = "moe_permute"
    _checks.rows(function, "hidden_states", hidden_states, _checks.ROW_DTYPES, "num_tokens")
    num_tokens = hidden_states.shape[0]
    _check_routemap(function, expert_routemap_topk, num_tokens)
    _checks.tensor(function, "expert_prob_topk", expert_prob_topk, (paddle.float32,), expert_routemap_topk.shape)
    for argument, value in (
        ("do_gather", do_gather),
        ("using_ue8m0_scale", using_ue8m0_scale),
        ("return_expert_indices", return_expert_indices),
        ("return_overflow", return_overflow),
    ):
        _checks.flag(function, argument, value)
    if scale is not None:
        dtype = paddle.int32 if using_ue8m0_scale else paddle.float32
        _checks.tensor(function, "scale", scale, (dtype,), [num_tokens, "num_scales"])
    num_experts = _checks.integer(function, "num_experts", num_experts, 1, _checks.MAX_EXPERTS)
    padding_alignment = _checks.integer(function, "padding_alignment", padding_alignment, 1)
    buffer_size = _checks.integer(function, "override_buffer_size", override_buffer_size, -1)
    _checks.choice(function, "fill_padding", fill_padding, FILL_PADDING)
    counts, counts_tensor = _checks.counts(function, tokens_per_expert, num_experts, has_static_buffer=buffer_size >= 0)
    _checks.same_place(
        function,
        hidden_states=hidden_states,
        scale=scale,
        expert_routemap_topk=expert_routemap_topk,
        expert_prob_topk=expert_prob_topk,
        tokens_per_expert=counts_tensor,
    )
    validation = _checks.validation(function, validate, hidden_states)
    route = RouteSpec(num_experts, -1, padding_alignment, counts, buffer_size, "first", validation)
    spec = MoePermuteSpec(route, do_gather, return_expert_indices, fill_padding)
    rows, rowmap, row_probs, scales, expert_indices, overflow, _, _ = resolve(function, hidden_states).moe_permute(
        hidden_states,
        scale,
        expert_routemap_topk,
        expert_prob_topk,
        counts_tensor,
        spec,
    )
    outputs = [rows, rowmap, row_probs, scales]
    if return_expert_indices:
        outputs.append(expert_indices)
    if return_overflow:
        outputs.append(overflow)
    return tuple(outputs)


@public("hidden_states_unzipped", "token_prob_unzipped", quick=quick_moe_unpermute)
def moe_unpermute(
    hidden_states_unzipped: Tensor,
    zipped_expertwise_rowmap: Tensor,
    expert_routemap_topk: Tensor,
    token_prob_unzipped: Tensor,
    total_zipped_tokens: int,
    num_experts: int,
    using_mix_precision: bool = True,
    using_weighted_combine: bool = False,
    name: str | None = None,
    *,
    compat: str | None = None,
    validate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum each token's rows in ascending expert order, as `paddle.nn.functional.moe_unpermute` does.

    The sum runs over the row map, not over the ids. It starts at -0.0 in float32, takes one addition (or, weighted,
    one fused multiply-add) per row and is rounded once. A token without rows gives 0, one unweighted row is copied.
    The same bits on every backend and run. No host synchronisation, except on a GPU with ``validate=True`` or if
    ``total_zipped_tokens`` is a tensor.

    Differentiable in ``hidden_states_unzipped`` and ``token_prob_unzipped`` (through both outputs). Without weights the
    backward pass keeps no rows.

    Args:
        hidden_states_unzipped: [N, H] bfloat16, float16 or float32.
        zipped_expertwise_rowmap: int32 [T, E], the row of each pair, -1 = none.
        expert_routemap_topk: int32 or int64 [T, K] expert ids, -1 for an unassigned slot.
        token_prob_unzipped: float32 [N] or [N, 1].
        total_zipped_tokens: T, an int or a 0-D int tensor (reading one synchronises).
        num_experts: E, at most 65536.
        using_mix_precision: accepted for Paddle's signature; the sum is always in float32.
        using_weighted_combine: weight every row by its probability.
        name: not used, for Paddle's signature.
        compat: "paddle": a token with exactly one row is not weighted, and every slot that repeats an id gets its
            probability, as in Paddle. None: every token is weighted, and if an id repeats, the first slot gets it.
        validate: True: ids outside [-1, E), row map entries outside [-1, N) and repeated rows raise. False: they count
            as -1 (of a repeated row, the first entry stays). None: PADDLE_MOE_OPS_VALIDATE, otherwise they raise on a
            CPU and not on a GPU.

    Returns:
        hidden_states [T, H] and expert_prob_topk float32 [T, K], the probability of each slot's row, 0 without one.

    Raises:
        TypeError: an argument of the wrong type or dtype; float8 rows.
        ValueError: an argument of the wrong value or shape; bad data, as ``validate`` says.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import moe_permute, moe_unpermute
        >>> x, probs = paddle.randn([3, 64]), paddle.full([3, 2], 0.5)
        >>> ids = paddle.to_tensor([[0, 2], [2, 1], [0, 1]], "int32")
        >>> rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, 4, None, padding_alignment=4)
        >>> y = 2 * rows  # in place of the experts
        >>> out, _ = moe_unpermute(y, rowmap, ids, row_probs, 3, 4, using_weighted_combine=True)
        >>> paddle.allclose(out, 2 * x).item()
        True
    """
    function = "moe_unpermute"
    _checks.rows(function, "hidden_states_unzipped", hidden_states_unzipped, _checks.SUM_DTYPES, "num_rows")
    num_experts = _checks.integer(function, "num_experts", num_experts, 1, _checks.MAX_EXPERTS)
    num_tokens = _checks.token_count(function, "total_zipped_tokens", total_zipped_tokens, hidden_states_unzipped)
    _checks.tensor(
        function,
        "zipped_expertwise_rowmap",
        zipped_expertwise_rowmap,
        (paddle.int32,),
        [num_tokens, num_experts],
    )
    _check_routemap(function, expert_routemap_topk, num_tokens)
    _check_row_probs(function, token_prob_unzipped, hidden_states_unzipped, zipped_expertwise_rowmap)
    _checks.flag(function, "using_mix_precision", using_mix_precision)
    _checks.flag(function, "using_weighted_combine", using_weighted_combine)
    _checks.choice(function, "compat", compat, (None, "paddle"))
    _checks.same_place(
        function,
        hidden_states_unzipped=hidden_states_unzipped,
        zipped_expertwise_rowmap=zipped_expertwise_rowmap,
        expert_routemap_topk=expert_routemap_topk,
        token_prob_unzipped=token_prob_unzipped,
    )
    validation = _checks.validation(function, validate, hidden_states_unzipped)
    spec = MoeUnpermuteSpec(num_experts, using_weighted_combine, compat == "paddle", validation)
    hidden_states, prob_topk = resolve(function, hidden_states_unzipped).moe_unpermute(
        hidden_states_unzipped,
        zipped_expertwise_rowmap,
        expert_routemap_topk,
        token_prob_unzipped,
        spec,
    )
    return hidden_states, prob_topk


def _check_row_probs(function: str, probs: Any, rows: Tensor, rowmap: Tensor) -> None:
    """Check the probabilities of rows, [N] or [N, 1]. If there are more than rows, the map tells which is wrong."""
    argument, num_rows = "token_prob_unzipped", rows.shape[0]
    given = list(getattr(probs, "shape", [])) or [0]
    if given[0] > num_rows >= 0 and isinstance(rowmap, Tensor) and rowmap.size and int(rowmap.max()) >= num_rows:
        expected = f"of shape [{given[0]}, hidden], one row for each of {argument}"
        _checks.bad_value(function, "hidden_states_unzipped", expected, list(rows.shape))
    shape = [num_rows, 1] if len(given) == 2 else [num_rows]
    text = f"[{num_rows}] or [{num_rows}, 1], one for each row"
    _checks.tensor(function, argument, probs, (paddle.float32,), shape, text)


def _check_routemap(function: str, value: Any, num_tokens: int) -> None:
    argument = "expert_routemap_topk"
    _checks.tensor(function, argument, value, _checks.ID_DTYPES, [num_tokens, "topk"])
    if value.shape[1] == 0:
        _checks.bad_value(function, argument, f"of shape [{num_tokens}, topk] with topk >= 1", list(value.shape))


def move_rows(tokens: Tensor, slot_to_row: Tensor, row_to_token: Tensor) -> Tensor:
    """Copy every token to its rows; differentiable, with the bits of `permute`.

    Args:
        tokens: [T, H].
        slot_to_row: int32 [T, K] row of each slot; -1 for none if K is 1.
        row_to_token: int32 [N] token of each row, -1 for a row of zeros.
    """
    token_rows = paddle.sort(slot_to_row, axis=-1) if slot_to_row.shape[1] > 1 else slot_to_row
    maps = Maps(slot_to_row, token_rows, row_to_token)
    return resolve("permute", tokens).permute(tokens, None, maps, "all")[0]


def __dir__() -> list[str]:
    return __all__
