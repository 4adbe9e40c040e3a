# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 quantisation of matrices: rows, columns and blocks, stacked weights, and the rows of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from ... import _checks
from ..._graphs import filled, public
from ...backends import direct
from .operands import GROUP, dequantized, dygraph_tensor

__all__ = [
    "fp8_quant_blockwise",
    "fused_stack_quant",
    "fused_stack_transpose_quant",
    "fused_transpose_split_quant",
    "fused_transpose_wlch_split_quant",
    "quantized_blockwise",
]

_METHODS = ("1x128", "128x128")
_FORMATS = {False: paddle.float8_e4m3fn, True: paddle.float8_e5m2}  # by using_e5m2
_HALF_DTYPES = (paddle.bfloat16, paddle.float16)


@public(in_graphs=False)
def fp8_quant_blockwise(
    x: Tensor,
    epsilon: float = 0.0,
    input_transpose: bool = False,
    output_scale_transpose: bool = True,
    return_transpose_only: bool = False,
    using_pow2_scale: bool = True,
    using_ue8m0_scale: bool = False,
    quant_method: str = "1x128",
    output_type: str = "e4m3",
    name: str | None = None,
) -> tuple[Tensor, ...]:
    """Quantise a matrix, its transpose, or both.

    With G = ceil(N / 128) and W = ceil(G / 4), the scales of codes [M, N] are contiguous in the shape

    * float32 [G, M] for "1x128" and [G, M / 128] for "128x128";
    * int32 [W, M] with ``using_ue8m0_scale``: four exponents to an int32, the lowest group in the lowest byte. Unused
      bytes are 0. The exponent of a block is repeated for each of its 128 rows.

    Without ``output_scale_transpose`` they are transposed. The transpose is quantised by itself: for "1x128" a group
    is 128 rows of a column.

    Not differentiable. Deterministic: the same bits on every backend and run. No host synchronisation.

    Args:
        x: [M, N] bfloat16 or float16, N a multiple of 4. M and N are multiples of 128 for "128x128" and for
            ``input_transpose``.
        epsilon: lower limit of amax.
        input_transpose: whether the transpose is quantised.
        output_scale_transpose: the layout of scales.
        return_transpose_only: whether only the transpose is quantised. Without ``input_transpose`` the results have
            shape [0].
        using_pow2_scale: scales that are powers of two.
        using_ue8m0_scale: packed scales, powers of two.
        quant_method: "1x128" or "128x128", the elements of a group.
        output_type: "e4m3".
        name: ignored.

    Returns:
        codes [M, N] and scales, then those of the transpose [N, M]; only the latter with ``return_transpose_only``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    function = "fp8_quant_blockwise"
    _checks.choice(function, "quant_method", quant_method, _METHODS)
    _checks.choice(function, "output_type", output_type, ("e4m3",))
    straight, transposed = quantized_blockwise(
        x,
        epsilon,
        quant_method == "1x128",
        input_transpose,
        output_scale_transpose,
        return_transpose_only,
        False,
        using_pow2_scale,
        using_ue8m0_scale,
    )
    if not input_transpose:
        return straight
    return transposed if return_transpose_only else (*straight, *transposed)


def quantized_blockwise(
    x: Tensor,
    epsilon: float,
    using_1x128_vec_quant: bool,
    input_transpose: bool,
    output_scale_transpose: bool,
    return_transpose_only: bool,
    using_e5m2: bool,
    using_pow2_scale: bool,
    using_ue8m0_scale: bool,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Codes and scales of a matrix and of its transpose, as `fp8_quant_blockwise`; those not asked for have shape [0].

    Args:
        x: [M, N].
        epsilon: lower limit of amax.
        using_1x128_vec_quant: whether a group is 128 elements of a row, and not a block.
        input_transpose: whether the transpose is quantised.
        output_scale_transpose: the layout of scales.
        return_transpose_only: whether only the transpose is quantised.
        using_e5m2: codes in float8_e5m2.
        using_pow2_scale: scales that are powers of two.
        using_ue8m0_scale: packed scales.
    """
    function = "fp8_quant_blockwise"
    dygraph_tensor(function, "x", x, _HALF_DTYPES, ["num_rows", "columns"])
    epsilon = _checks.number(function, "epsilon", epsilon)
    for argument, value in (
        ("input_transpose", input_transpose),
        ("output_scale_transpose", output_scale_transpose),
        ("return_transpose_only", return_transpose_only),
        ("using_pow2_scale", using_pow2_scale),
        ("using_ue8m0_scale", using_ue8m0_scale),
    ):
        _checks.flag(function, argument, value)
    num_rows, columns = x.shape
    if columns % 4:
        _checks.bad_value(function, "x", "of shape [num_rows, columns] with columns % 4 == 0", list(x.shape))
    for which, is_set in (
        ("input_transpose", input_transpose),
        ("return_transpose_only", return_transpose_only),
        ("quant_method='128x128'", not using_1x128_vec_quant),
    ):
        if is_set and (num_rows % GROUP or columns % GROUP):
            _checks.bad_value(function, "x", f"of sizes that are multiples of 128 with {which}", list(x.shape))
    nothing = filled([0], 0, "float32", x)
    nothing = nothing.astype(_FORMATS[using_e5m2]), nothing.astype("int32" if using_ue8m0_scale else "float32")
    results = direct(
        "paddle_quantize",
        x,
        not return_transpose_only,
        input_transpose,
        not using_1x128_vec_quant,
        using_e5m2,
        using_pow2_scale,
        using_ue8m0_scale,
        output_scale_transpose,
        max(epsilon, 0.0),
    )
    return nothing if return_transpose_only else results[:2], results[2:] if input_transpose else nothing


@public(in_graphs=False)
def fused_stack_transpose_quant(x: Sequence[Tensor], transpose: bool = True) -> tuple[Tensor, Tensor]:
    """Quantise matrices by blocks of 128 x 128, and put them one below the other.

    Scales are no powers of two. Not differentiable. Deterministic: the same bits on every backend and run. No host
    synchronisation.

    Args:
        x: list of n bfloat16 matrices [M, K], M and K multiples of 128.
        transpose: whether the matrices are transposed.

    Returns:
        codes float8_e4m3fn [n * K, M] and scales float32 [n * K / 128, M / 128]; without ``transpose`` [n * M, K] and
        [n * M / 128, K / 128].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    _checks.flag("fused_stack_transpose_quant", "transpose", transpose)
    return _stacked("fused_stack_transpose_quant", x, transpose)


@public(in_graphs=False)
def fused_stack_quant(x: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Quantise matrices as `fused_stack_transpose_quant` does without ``transpose``.

    Not differentiable. Deterministic: the same bits on every backend and run. No host synchronisation.

    Args:
        x: list of n bfloat16 matrices [M, K], M and K multiples of 128.

    Returns:
        codes float8_e4m3fn [n * M, K] and scales float32 [n * M / 128, K / 128].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    return _stacked("fused_stack_quant", x, False)


def _stacked(function: str, x: Any, transpose: bool) -> tuple[Tensor, Tensor]:
    matrices = _checks.listed(function, "x", x, "a list of tensors")
    if not matrices:
        _checks.bad_value(function, "x", "a list of at least one tensor", "an empty list")
    shape: Sequence[int | str] = ["num_rows", "columns"]
    for index, matrix in enumerate(matrices):
        dygraph_tensor(function, f"x[{index}]", matrix, (paddle.bfloat16,), shape)
        shape = matrix.shape
        if shape[0] % GROUP or shape[1] % GROUP:
            _checks.bad_value(function, f"x[{index}]", "of sizes that are multiples of 128", list(shape))
    _checks.same_place(function, **{f"x[{index}]": matrix for index, matrix in enumerate(matrices)})
    return direct("paddle_quantize_stack", list(matrices), transpose)


@public(in_graphs=False)
def fused_transpose_split_quant(
    x: Tensor, input_scales: Any, tokens_per_expert: Any, pow_2_scales: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Quantise the transposed rows of each expert, with 128 rows of a column to a group.

    Float8 rows are dequantised to bfloat16 before. Not differentiable. Deterministic: the same bits on every backend
    and run. No host synchronisation, if the counts are on the host.

    Args:
        x: [M, H] bfloat16, or float8_e4m3fn with ``input_scales``.
        input_scales: None, or float32 [M, ceil(H / 128)]. Also the older order of Paddle is accepted, in which the
            second argument is the list of counts and the third is ``pow_2_scales``.
        tokens_per_expert: rows of each expert, multiples of 128, that add up to M.
        pow_2_scales: scales that are powers of two.

    Returns:
        for each expert with t rows, codes float8_e4m3fn [H, t]; and scales float32 [t / 128, H]. Two empty lists if
        ``x`` has no elements.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    function = "fused_transpose_split_quant"
    if isinstance(tokens_per_expert, bool) and isinstance(input_scales, (list, tuple, np.ndarray)):
        input_scales, tokens_per_expert, pow_2_scales = None, input_scales, tokens_per_expert
    _checks.flag(function, "pow_2_scales", pow_2_scales)
    dygraph_tensor(function, "x", x, (paddle.bfloat16, paddle.float8_e4m3fn), ["num_rows", "hidden"])
    num_rows, hidden = x.shape
    counts = _counts(function, tokens_per_expert, num_rows)
    if x.dtype != paddle.bfloat16:
        shape = [num_rows, -(-hidden // GROUP)]
        if input_scales is None:
            _checks.bad_value(function, "input_scales", f"float32 {shape} with float8 rows", None)
        dygraph_tensor(function, "input_scales", input_scales, (paddle.float32,), shape)
        _checks.same_place(function, x=x, input_scales=input_scales)
    elif input_scales is not None:
        _checks.bad_value(function, "input_scales", "None with bfloat16 rows", f"a {type(input_scales).__name__}")
    if min(num_rows, hidden) == 0:
        return [], []
    return _split(x if input_scales is None else dequantized(x, input_scales), counts, pow_2_scales)


@public(in_graphs=False)
def fused_transpose_wlch_split_quant(
    x: Tensor, tokens_per_expert: Any, pow_2_scales: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Quantise rows as `fused_transpose_split_quant` does, which are in the order of a dispatch by capacity.

    Not differentiable. Deterministic: the same bits on every backend and run. No host synchronisation, if the counts
    are on the host.

    Args:
        x: bfloat16 [W, L, C, H] of W ranks, L experts and C rows. Rows are counted by expert, then rank.
        tokens_per_expert: rows of each expert, multiples of 128, that add up to W * L * C.
        pow_2_scales: scales that are powers of two.

    Returns:
        for each expert with t rows, codes float8_e4m3fn [H, t]; and scales float32 [t / 128, H].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    function = "fused_transpose_wlch_split_quant"
    _checks.flag(function, "pow_2_scales", pow_2_scales)
    dygraph_tensor(function, "x", x, (paddle.bfloat16,), ["ranks", "experts", "capacity", "hidden"])
    ranks, experts, capacity, hidden = x.shape
    num_rows = ranks * experts * capacity
    counts = _counts(function, tokens_per_expert, num_rows)
    return _split(x.transpose([1, 0, 2, 3]).reshape([num_rows, hidden]), counts, pow_2_scales)


def _counts(function: str, value: Any, num_rows: int) -> list[int]:
    name = "tokens_per_expert"
    if isinstance(value, Tensor):
        _checks.tensor(function, name, value, _checks.ID_DTYPES, ["num_experts"])
        value = value.tolist()
    expected = "a list of ints, or a 1-D int array or tensor"
    counts = []
    for index, each in enumerate(_checks.listed(function, name, value, expected)):
        item = _checks.integer(function, f"{name}[{index}]", each, 0)
        if item % GROUP:
            _checks.bad_value(function, f"{name}[{index}]", "a multiple of 128", item)
        counts.append(item)
    if sum(counts) != num_rows:
        _checks.bad_value(function, name, f"counts that add up to the {num_rows} rows of x", f"a sum of {sum(counts)}")
    return counts


def _split(rows: Tensor, counts: list[int], pow2: bool) -> tuple[list[Tensor], list[Tensor]]:
    results = direct("paddle_quantize_split", rows, counts, pow2)
    return list(results[: len(counts)]), list(results[len(counts) :])
