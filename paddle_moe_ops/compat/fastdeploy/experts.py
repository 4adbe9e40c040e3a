# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's GEMMs of experts. N rows, H hidden size, I intermediate size, E experts."""

from __future__ import annotations

import paddle
from paddle import Tensor

from ... import _checks
from ..._activations import activate
from ..._graphs import is_graph_value, public
from ...backends import Validation
from ...gemm import grouped_gemm
from .weights import QUANTIZED, check_packed, dequantized, plain_codes

__all__ = ["moe_expert_ffn"]

_PLAIN = ("none", "w16a16")
_METHODS = (*_PLAIN, *QUANTIZED)
_ACTIVATIONS = ("swiglu", "swigluoai")
_COUNTS = "tokens_expert_prefix_sum"


@public()
def moe_expert_ffn(
    permute_input: Tensor,
    tokens_expert_prefix_sum: Tensor,
    up_gate_proj_weight: Tensor,
    down_proj_weight: Tensor,
    up_proj_in_scale: Tensor | None,
    up_gate_proj_bias: Tensor | None,
    up_gate_proj_scale: Tensor | None,
    down_proj_scale: Tensor | None,
    down_proj_in_scale: Tensor | None,
    expert_idx_per_token: Tensor | None,
    max_tokens_per_expert: Tensor | str | None = None,
    quant_method: str | bool = "none",
    used_in_ep_low_latency: bool | int = False,
    estimate_total_token_nums: int = -1,
    hadamard_block_size: int | str = 128,
    activation: str = "swiglu",
) -> Tensor:
    """Run each expert on its rows: a GEMM, the activation and a GEMM, without a bias of the second and without weights.

    Rows are rounded to their dtype after each GEMM and after the activation; sums accumulate in float32. int8 and int4
    matrices become matrices of the rows' dtype, the product of code and scale rounded once, in every call. No gradient.
    Host synchronisation as in `paddle_moe_ops.gemm.grouped_gemm`: none on GPUs with kernels of this package.

    FastDeploy's versions without ``max_tokens_per_expert`` pass one argument less; these calls are accepted too.

    Args:
        permute_input: [N, H] rows by expert, bfloat16, float16 or float32; [E, C, H] with ``used_in_ep_low_latency``.
        tokens_expert_prefix_sum: int32 or int64 [E], the ends of the experts' rows, padding included; with
            ``used_in_ep_low_latency`` the number of rows of each expert that are in use.
        up_gate_proj_weight: [E, H, 2 * I], dtype of the rows; packed as of `from_weight_quantize` for
            "weight_only_int8" [E, 2 * I, H] and "weight_only_int4" [E, I, H].
        down_proj_weight: [E, I, H]; packed [E, H, I] and [E, H / 2, I].
        up_proj_in_scale: not read by the methods below.
        up_gate_proj_bias: [E, 2 * I], dtype of the rows, or None.
        up_gate_proj_scale: scales of the packed matrices, any of the rows' dtypes, [E, 2 * I], or [E, groups, 2 * I]
            for groups of consecutive rows of a matrix; else not read.
        down_proj_scale: [E, H] or [E, groups, H]; else not read.
        down_proj_in_scale: not read.
        expert_idx_per_token: not read.
        max_tokens_per_expert: not read.
        quant_method: "none" or "w16a16", "weight_only_int8" or "weight_only_int4".
        used_in_ep_low_latency: whether every expert has C rows.
        estimate_total_token_nums: not read.
        hadamard_block_size: not read.
        activation: "swiglu", silu(first half) * second half, or "swigluoai", whose gate and up columns alternate.

    Returns:
        rows in the shape and dtype of ``permute_input``; 0 in rows of no expert, and in those beyond its count.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape, such as a method that is not served; on a CPU also ends
            that descend or exceed N.
    """
    name = "moe_expert_ffn"
    if isinstance(max_tokens_per_expert, str):
        given = max_tokens_per_expert, quant_method, hadamard_block_size
        quant_method, used_in_ep_low_latency, activation = given  # type: ignore[assignment]
    _checks.choice(name, "quant_method", quant_method, _METHODS)
    _checks.choice(name, "activation", activation, _ACTIVATIONS)
    is_packed = _checks.flag(name, "used_in_ep_low_latency", used_in_ep_low_latency)
    _checks.tensor(name, _COUNTS, tokens_expert_prefix_sum, _checks.ID_DTYPES, ["num_experts"])
    num_experts = tokens_expert_prefix_sum.shape[0]
    shape = [num_experts, "capacity", "hidden"] if is_packed else ["num_rows", "hidden"]
    _checks.tensor(name, "permute_input", permute_input, _checks.SUM_DTYPES, shape)
    if 0 in (num_experts, permute_input.shape[-1]):
        expected = f"of shape [{', '.join(map(str, shape))}] with num_experts and hidden >= 1"
        _checks.bad_value(name, "permute_input", expected, list(permute_input.shape))
    hidden, dtype = permute_input.shape[-1], permute_input.dtype
    up_gate = _matrices(name, "up_gate_proj", up_gate_proj_weight, up_gate_proj_scale, str(quant_method), permute_input)
    width = up_gate.shape[2]
    if list(up_gate.shape[:2]) != [num_experts, hidden] or width % 2 or width == 0:
        expected = f"matrices of {num_experts} experts for {hidden} columns of permute_input and 2 * I of its own"
        _checks.bad_value(name, "up_gate_proj_weight", expected, list(up_gate_proj_weight.shape))
    down = _matrices(name, "down_proj", down_proj_weight, down_proj_scale, str(quant_method), permute_input)
    if list(down.shape) != [num_experts, width // 2, hidden]:
        expected = f"matrices of {num_experts} experts from {width // 2} to {hidden} columns"
        _checks.bad_value(name, "down_proj_weight", expected, list(down_proj_weight.shape))
    if up_gate_proj_bias is not None:
        _checks.tensor(name, "up_gate_proj_bias", up_gate_proj_bias, (dtype,), [num_experts, width])
    tensors = {_COUNTS: tokens_expert_prefix_sum, "up_gate_proj_weight": up_gate_proj_weight}
    tensors |= {"down_proj_weight": down_proj_weight}
    _checks.same_place(name, permute_input=permute_input, **tensors, up_gate_proj_bias=up_gate_proj_bias)
    capacity = permute_input.shape[1] if is_packed else None
    if capacity is not None and capacity < 0:
        _checks.bad_value(name, "permute_input", "of a known capacity", list(permute_input.shape))
    _check_counts(name, tokens_expert_prefix_sum, permute_input, capacity)
    sizes, offsets = tokens_expert_prefix_sum, None
    if capacity is None:
        sizes = paddle.concat([sizes[:1], sizes[1:] - sizes[:-1]])
    else:
        sizes, offsets = sizes.clip(0, capacity), [expert * capacity for expert in range(num_experts + 1)]
    rows = permute_input if capacity is None else permute_input.reshape([num_experts * capacity, hidden])
    columns = grouped_gemm(rows, up_gate, sizes, False, expert_offsets=offsets, bias=up_gate_proj_bias)
    out = grouped_gemm(_activated(columns, activation), down, sizes, False, expert_offsets=offsets)
    return out.reshape(permute_input.shape)


def _check_counts(name: str, counts: Tensor, rows: Tensor, capacity: int | None) -> None:
    """Check the ends of the experts' rows, or with a capacity their numbers, where data is checked."""
    if is_graph_value(counts) or _checks.validation(name, None, counts) == Validation.OFF:
        return
    numbers = counts.tolist()
    if capacity is None:
        if min(numbers) < 0 or numbers != sorted(numbers) or numbers[-1] > rows.shape[0]:
            _checks.bad_value(name, _COUNTS, f"ascending, from 0 to the {rows.shape[0]} rows of permute_input", numbers)
    elif min(numbers) < 0 or max(numbers) > capacity:
        _checks.bad_value(name, _COUNTS, f"from 0 to the {capacity} rows of an expert", numbers)


def _matrices(name: str, kind: str, weight: Tensor, scales: Tensor | None, quant_method: str, rows: Tensor) -> Tensor:
    """[E, in, out] in the dtype of the rows, checked but for its sizes."""
    argument, shape = f"{kind}_weight", ["num_experts", "in", "out"]
    if quant_method in _PLAIN:
        return _checks.tensor(name, argument, weight, (rows.dtype,), shape)
    layout = QUANTIZED[quant_method]
    _checks.tensor(name, argument, weight, (paddle.int8,), ["num_experts", "out", "in"])
    check_packed(name, argument, weight, layout)
    codes = plain_codes(weight, layout)
    experts, inner, outer = codes.shape
    argument = f"{kind}_scale"
    by_group = getattr(scales, "ndim", 2) == 3
    text = f"[{experts}, {outer}] or [{experts}, groups, {outer}]"
    given = [experts, "groups", outer] if by_group else [experts, outer]
    scales = _checks.tensor(name, argument, scales, _checks.SUM_DTYPES, given, text)
    _checks.same_place(name, permute_input=rows, **{argument: scales})
    if by_group and (scales.shape[1] == 0 or inner % scales.shape[1]):
        expected = f"of shape {text}, groups a divisor of the {inner} rows of a matrix"
        _checks.bad_value(name, argument, expected, list(scales.shape))
    return dequantized(codes, scales, rows.dtype)


def _activated(columns: Tensor, activation: str) -> Tensor:
    """The rows [N, I] of [N, 2 * I]."""
    if activation == "swiglu":
        return activate(columns, "swiglu")
    gate, up = columns[:, 0::2], columns[:, 1::2]
    return activate(paddle.concat([gate, up], -1), "swiglu_oai")
