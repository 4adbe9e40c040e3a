# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of this family with the arguments of Paddle's operators in ``paddle._C_ops``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor

from ..._graphs import public
from . import activation, gemm, quantize

__all__ = ["OPERATORS"]


@public(in_graphs=False)
def fp8_quant_blockwise(
    x: Tensor,
    epsilon: float,
    using_1x128_vec_quant: bool,
    input_transpose: bool,
    output_scale_transpose: bool,
    return_transpose_only: bool,
    using_e5m2: bool,
    using_pow2_scale: bool,
    using_ue8m0_scale: bool,
) -> tuple[Tensor, ...]:
    """Return codes, scales and those of the transpose; tensors that were not asked for have shape [0]."""
    straight, transposed = quantize.quantized_blockwise(
        x,
        epsilon,
        using_1x128_vec_quant,
        input_transpose,
        output_scale_transpose,
        return_transpose_only,
        using_e5m2,
        using_pow2_scale,
        using_ue8m0_scale,
    )
    return *straight, *transposed


def fused_stack_transpose_quant(x: Any) -> tuple[Tensor, Tensor]:
    """Quantise transposed matrices; the operator has no argument ``transpose``."""
    return quantize.fused_stack_transpose_quant(x)


def fp8_gemm_blockwise_(
    A: Tensor,
    A_scale: Tensor,
    B: Tensor,
    B_scale: Tensor,
    D: Tensor,
    bias: Tensor,
    pre_gelu: Tensor,
    workspace: Tensor,
    transa: bool,
    transb: bool,
    grad: bool,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
    is_A_1d_scaled: bool,
    is_B_1d_scaled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write ``B A^T`` into ``D``: Paddle's function calls its operator with the operands exchanged."""
    out = gemm.fp8_gemm_blockwise(
        B,
        B_scale,
        A,
        A_scale,
        D.dtype,
        D,
        accumulate=accumulate,
        use_split_accumulator=use_split_accumulator,
        is_a_1d_scaled=is_B_1d_scaled,
        is_b_1d_scaled=is_A_1d_scaled,
    )
    return out, pre_gelu, workspace


OPERATORS: dict[str, Callable[..., Any]] = {
    "fp8_gemm_blockwise_": fp8_gemm_blockwise_,
    "fp8_quant_blockwise": fp8_quant_blockwise,
    "fused_act_dequant": activation.fused_act_dequant,
    "fused_stack_quant": quantize.fused_stack_quant,
    "fused_stack_transpose_quant": fused_stack_transpose_quant,
    "fused_swiglu_weighted_bwd": activation.fused_swiglu_weighted_bwd,
    "fused_transpose_split_quant": quantize.fused_transpose_split_quant,
    "fused_transpose_wlch_split_quant": quantize.fused_transpose_wlch_split_quant,
    "fused_weighted_swiglu_act_quant": activation.fused_weighted_swiglu_act_quant,
}
