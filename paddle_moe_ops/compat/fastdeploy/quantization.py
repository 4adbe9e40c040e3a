# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's quantisers of rows to float8, with a scale for each group of columns.

With amax, the largest magnitude of a group without NaN, but at least 1e-10, the scale is amax / 448 and the code that
of x * 448 / amax. With ue8m0 the scale is a power of two, whose exponent is stored in a byte, four to an int32, the
lowest group in the lowest byte. The rule differs from that of `paddle_moe_ops.quantize_1x128`: a group of zeros has the
scale 1e-10 / 448, and `per_token_quant` and `per_token_quant_padding` add 5e-7 before the next power of two is chosen.
FastDeploy's environment variable PER_TOKEN_QUANT_FP8_USE_FINEGRAINED_RANGE is not read.

A static graph cannot hold these functions: Paddle has no operator there for the bits of a tensor.
S = ceil(H / block_size) scales of a row, ceil4 rounds up to a multiple of 4.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from ... import _checks
from ..._activations import activate
from ..._graphs import beside, float32, public
from .codes import GROUP, by_column, ceil_to, quantize_groups

__all__ = ["fused_mask_swiglu_fp8_quant", "masked_per_token_quant", "per_token_quant", "per_token_quant_padding"]

_OFFSET = 5e-7


@public()
def per_token_quant(
    input: Tensor,  # noqa: A002
    block_size: int,
    use_ue8m0: bool = False,
) -> list[Tensor]:
    """Quantise rows to float8, with scales by row.

    No gradient. Deterministic: the same bits on every device. No host synchronisation.

    Args:
        input: [T, H] bfloat16, float16 or float32.
        block_size: columns of a group; the last may be shorter.
        use_ue8m0: whether scales are packed powers of two.

    Returns:
        codes float8_e4m3fn [T, H], and scales float32 [T, S] or int32 [T, ceil(S / 4)].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    block_size = _checked("per_token_quant", input, block_size, use_ue8m0)
    return [*quantize_groups(float32(input), block_size, use_ue8m0, offset=_OFFSET)]


@public()
def per_token_quant_padding(
    input: Tensor,  # noqa: A002
    block_size: int,
    use_ue8m0: bool = False,
) -> list[Tensor]:
    """Quantise rows to float8, with scales column by column, padded to a multiple of 4 rows, as TMA loads them.

    No gradient. Deterministic: the same bits on every device. No host synchronisation.

    Args:
        input: [T, H] bfloat16, float16 or float32, H a multiple of 128.
        block_size: columns of a group, 128.
        use_ue8m0: whether scales are packed powers of two.

    Returns:
        codes float8_e4m3fn [T, H], and scales float32 [ceil4(T), S] or int32 [ceil4(T), ceil(S / 4)] with strides
        (1, ceil4(T)), 0 in padding.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "per_token_quant_padding"
    block_size = _checked(name, input, block_size, use_ue8m0)
    num_tokens, hidden = input.shape
    if block_size != GROUP:
        _checks.bad_value(name, "block_size", str(GROUP), block_size)
    if hidden % GROUP:
        _checks.bad_value(
            name, "input", f"of shape [num_tokens, hidden], hidden a multiple of {GROUP}", list(input.shape)
        )
    codes, scales = quantize_groups(float32(input), block_size, use_ue8m0, offset=_OFFSET)
    return [codes, by_column(scales, ceil_to(num_tokens, 4), keeps_padding=True)]


@public()
def masked_per_token_quant(
    input: Tensor,  # noqa: A002
    recv_expert_count: Tensor,
    block_size: int,
    use_ue8m0: bool = False,
) -> list[Tensor]:
    """Quantise the first rows of each expert to float8.

    No gradient. Deterministic: the same bits on every device. No host synchronisation.

    Args:
        input: [E, C, H] bfloat16, float16 or float32.
        recv_expert_count: int32 [E], the rows of each expert that are in use.
        block_size: columns of a group; the last may be shorter.
        use_ue8m0: whether scales are packed powers of two.

    Returns:
        codes float8_e4m3fn [E, C, H], and scales float32 [E, C, S] with strides (S * C, 1, C) or int32
        [E, C, W] with strides (W * ceil4(C), 1, ceil4(C)), W = ceil(S / 4). Rows that are not in use are 0.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "masked_per_token_quant"
    block_size = _checked(name, input, block_size, use_ue8m0, "recv_expert_count", recv_expert_count)
    return _masked(float32(input), recv_expert_count, block_size, use_ue8m0)


@public()
def fused_mask_swiglu_fp8_quant(
    input: Tensor,  # noqa: A002
    token_nums_per_expert: Tensor,
    block_size: int,
    use_ue8m0: bool = False,
) -> list[Tensor]:
    """Apply SwiGLU to the first rows of each expert, round the result to its dtype, and quantise it.

    As `masked_per_token_quant`, but without ue8m0 codes are those of x * 448 * (1 / amax). SwiGLU is Paddle's, so
    codes agree between devices to its rounding. No gradient. No host synchronisation.

    Args:
        input: [E, C, 2 * I] bfloat16, float16 or float32, the gate's columns first.
        token_nums_per_expert: int32 [E], the rows of each expert that are in use.
        block_size: columns of a group; the last may be shorter.
        use_ue8m0: whether scales are packed powers of two.

    Returns:
        codes float8_e4m3fn [E, C, I], and scales as of `masked_per_token_quant`.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "fused_mask_swiglu_fp8_quant"
    block_size = _checked(name, input, block_size, use_ue8m0, "token_nums_per_expert", token_nums_per_expert)
    if input.shape[2] % 2:
        _checks.bad_value(name, "input", "of shape [num_experts, capacity, 2 * I]", list(input.shape))
    gated = float32(activate(input, "swiglu"))
    return _masked(gated, token_nums_per_expert, block_size, use_ue8m0, by_reciprocal=True)


def _checked(
    name: str, values: Tensor, block_size: Any, use_ue8m0: Any, argument: str | None = None, counts: Any = None
) -> int:
    """Check the arguments of a quantiser: of rows, or with counts, of packed rows; the block size."""
    _checks.of_dygraph(name, "input", values)
    if argument is None:
        _checks.rows(name, "input", values, _checks.SUM_DTYPES, "num_tokens")
    else:
        shape = ["num_experts", "capacity", "hidden"]
        _checks.tensor(name, "input", values, _checks.SUM_DTYPES, shape)
        if values.shape[2] == 0:
            _checks.bad_value(name, "input", f"of shape [{', '.join(shape)}] with hidden >= 1", list(values.shape))
        _checks.tensor(name, argument, counts, (paddle.int32,), [values.shape[0]])
        _checks.same_place(name, input=values, **{argument: counts})
    _checks.flag(name, "use_ue8m0", use_ue8m0)
    return _checks.integer(name, "block_size", block_size, 1)


def _masked(
    values: Tensor, counts: Tensor, block_size: int, use_ue8m0: bool, by_reciprocal: bool = False
) -> list[Tensor]:
    capacity = values.shape[1]
    places = beside(paddle.arange(capacity, dtype="int32"), counts)
    is_row = places < counts.unsqueeze(-1)
    codes, scales = quantize_groups(values, block_size, use_ue8m0, by_reciprocal=by_reciprocal, is_row=is_row)
    return [codes, by_column(scales, ceil_to(capacity, 4) if use_ue8m0 else capacity)]
