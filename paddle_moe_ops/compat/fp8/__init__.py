# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 functions of ``paddle.incubate.nn.functional``, for every device: quantisation, SwiGLU and the blockwise GEMM.

Names, arguments and defaults are those of Paddle 3.3. Codes, scales and layouts are those of Paddle's GPU kernels, bit
for bit. All but the GEMM run on kernels of this package, on a CPU and on NVIDIA GPUs. The GEMM of rows by groups and a
matrix by blocks has a kernel on GPUs of compute capability 9.0. Other GEMMs are composed of Paddle's operators, so that
models that train in float8 run on a CPU; their speed is no aim.

A scale is RN(1 / RN(448 / amax)), by Paddle's rule. `quantize_1x128` has another rule.
"""

from __future__ import annotations

from .activation import fused_act_dequant, fused_swiglu_weighted_bwd, fused_weighted_swiglu_act_quant
from .gemm import fp8_gemm_blockwise
from .quantize import (
    fp8_quant_blockwise,
    fused_stack_quant,
    fused_stack_transpose_quant,
    fused_transpose_split_quant,
    fused_transpose_wlch_split_quant,
)

__all__ = [
    "fp8_gemm_blockwise",
    "fp8_quant_blockwise",
    "fused_act_dequant",
    "fused_stack_quant",
    "fused_stack_transpose_quant",
    "fused_swiglu_weighted_bwd",
    "fused_transpose_split_quant",
    "fused_transpose_wlch_split_quant",
    "fused_weighted_swiglu_act_quant",
]
