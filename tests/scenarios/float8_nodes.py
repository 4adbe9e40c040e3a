# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 linear layers and experts as models write them on paddle.incubate's float8 functions, without autograd nodes.

``F`` is the module whose functions are called: Paddle's own when patched, or `paddle_moe_ops.compat.fp8`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

GROUP = 128


def grouped_gemm_nt(rows: Any, matrices: Any, m_indices: Tensor) -> Tensor:
    """A model's grouped GEMM of float8 rows, whose scales are column-major, with one matrix for each row."""
    (codes, scales), (matrix_codes, matrix_scales) = rows, matrices
    left = codes.astype("float32") * paddle.repeat_interleave(scales, GROUP, axis=1)
    blocks = paddle.repeat_interleave(paddle.repeat_interleave(matrix_scales, GROUP, axis=1), GROUP, axis=2)
    right = matrix_codes.astype("float32") * blocks
    parts = [paddle.matmul(left[m_indices == expert], right[expert], transpose_y=True) for expert in range(len(right))]
    return paddle.concat(parts).astype("bfloat16")


def rows_to_multiple(matrix: Tensor, multiple: int) -> Tensor:
    missing = -matrix.shape[0] % multiple
    return paddle.concat([matrix, paddle.zeros([missing, matrix.shape[1]], matrix.dtype)]) if missing else matrix


def add_to_main_grad(F: Any, parameter: Any, left: Any, right: Any) -> None:
    """Accumulate a weight gradient in float32, and call the hook that data parallelism puts on a parameter."""
    if parameter.main_grad is None:
        parameter.main_grad = paddle.zeros(parameter.shape, "float32")
    if np.prod(left[0].shape) > 0:
        F.fp8_gemm_blockwise(
            a=left[0],
            a_decode_scale=left[1],
            b=right[0],
            b_decode_scale=right[1],
            out_dtype=parameter.main_grad.dtype,
            out=parameter.main_grad,
            accumulate=True,
            use_split_accumulator=True,
            is_a_1d_scaled=True,
            is_b_1d_scaled=True,
        )
    parameter.calls_of_hook = getattr(parameter, "calls_of_hook", 0) + 1


class Linear(PyLayer):
    """A float8 linear layer: rows by 128 columns, the matrix by blocks, and its gradient from transposed operands."""

    @staticmethod
    def forward(ctx: Any, F: Any, x: Tensor, weight: Tensor) -> Tensor:
        codes, scales = F.fp8_quant_blockwise(
            x, output_scale_transpose=True, quant_method="1x128", input_transpose=False
        )
        transposed = F.fp8_quant_blockwise(
            rows_to_multiple(x, 512), quant_method="1x128", input_transpose=True, return_transpose_only=True
        )
        weight_codes, weight_scales = F.fp8_quant_blockwise(
            weight,
            output_scale_transpose=False,
            quant_method="128x128",
            input_transpose=True,
            return_transpose_only=True,
        )
        ctx.kept = F, transposed, weight
        return F.fp8_gemm_blockwise(
            codes, scales, weight_codes, weight_scales, "bfloat16", is_a_1d_scaled=True, is_b_1d_scaled=False
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        F, transposed, weight = ctx.kept
        codes, scales = F.fp8_quant_blockwise(gradient, quant_method="1x128")
        weight_codes, weight_scales = F.fp8_quant_blockwise(
            weight, output_scale_transpose=False, quant_method="128x128"
        )
        dx = F.fp8_gemm_blockwise(codes, scales, weight_codes, weight_scales, "bfloat16", is_b_1d_scaled=False)
        _, _, codes_t, scales_t = F.fp8_quant_blockwise(rows_to_multiple(gradient, 512), input_transpose=True)
        add_to_main_grad(F, weight, transposed, (codes_t, scales_t))
        return dx, None


class Form(NamedTuple):
    """Choices of a model.

    Attributes:
        dispatched: whether tokens arrive as codes and scales.
        recomputes: whether the first GEMM is repeated in the backward pass.
        is_older: whether the functions of older Paddle are called: counts as the second argument, probabilities of
            rank 1, and codes that are dequantised by themselves.
    """

    dispatched: bool = False
    recomputes: bool = False
    is_older: bool = False


class Experts:
    """SwiGLU experts on float8 operands, forward and backward, for rows by expert with padded counts."""

    def __init__(self, F: Any, w1: Sequence[Any], w2: Sequence[Any], form: Form) -> None:
        self.F, self.w1, self.w2, self.form = F, w1, w2, form

    def stacked(self, weights: Sequence[Any], transpose: bool) -> tuple[Tensor, Tensor]:
        """Codes and scales of all matrices, which a step may keep on the first of them."""
        suffix = "_transpose" if transpose else ""
        if not hasattr(weights[0], f"fp8_weight_stacked{suffix}"):
            found = self.F.fused_stack_transpose_quant(weights, transpose=transpose)
        else:
            found = tuple(getattr(weights[0], f"fp8_{each}_stacked{suffix}") for each in ("weight", "scale"))
        codes, scales = (each.reshape([len(weights), -1, each.shape[-1]]) for each in found)
        return codes, scales

    def quantised(self, rows: Any) -> tuple[Tensor, Tensor]:
        if isinstance(rows, tuple):
            return rows[0], rows[1].T.contiguous().T
        codes, scales = self.F.fp8_quant_blockwise(
            rows, output_scale_transpose=True, quant_method="1x128", input_transpose=False
        )
        return codes, scales.T

    def hidden(self) -> Tensor:
        return grouped_gemm_nt(self.x, self.stacked(self.w1, True), self.m_indices)

    @paddle.no_grad()
    def forward(self, rows: Any, probs: Tensor, counts: Sequence[int]) -> Tensor:
        shape = rows[0].shape if isinstance(rows, tuple) else rows.shape
        if shape[0] == 0:
            return paddle.zeros(shape, "bfloat16")
        self.m_indices = paddle.concat([paddle.full([count], e, "int32") for e, count in enumerate(counts)])
        self.x = self.quantised(rows)
        o1 = self.hidden()
        self.o1 = None if self.form.recomputes else o1
        with paddle.amp.auto_cast(False):
            codes, scales = self.F.fused_weighted_swiglu_act_quant(o1, probs.squeeze(-1), using_pow2_scaling=True)
        column_major = paddle.transpose(paddle.transpose(scales, [1, 0]).contiguous(), [1, 0])
        return grouped_gemm_nt((codes, column_major), self.stacked(self.w2, True), self.m_indices)

    @paddle.no_grad()
    def backward(self, gradient: Tensor, probs: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        if gradient.shape[0] == 0:
            for parameter in (*self.w1, *self.w2):
                add_to_main_grad(self.F, parameter, (gradient, None), None)
            return paddle.zeros_like(gradient), paddle.zeros_like(probs)
        o1 = self.hidden() if self.o1 is None else self.o1
        do2_s = grouped_gemm_nt(self.quantised(gradient), self.stacked(self.w2, False), self.m_indices)
        do1, d_probs, o2_s = self.F.fused_swiglu_weighted_bwd(
            o1, do2_s, probs.squeeze(-1) if self.form.is_older else probs
        )
        dx = grouped_gemm_nt(self.quantised(do1), self.stacked(self.w1, False), self.m_indices)
        self.add_gradients(self.w2, self.split(o2_s, counts), self.split(gradient, counts))
        x = self.F.fused_act_dequant(*self.x) if self.form.is_older else self.x
        self.add_gradients(self.w1, self.split(x, counts), self.split(do1, counts))
        return dx, d_probs

    def split(self, rows: Any, counts: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        if self.form.is_older:
            return self.F.fused_transpose_split_quant(rows, counts, True)
        codes, scales = rows if isinstance(rows, tuple) else (rows, None)
        return self.F.fused_transpose_split_quant(codes, scales, counts, True)

    def add_gradients(self, weights: Sequence[Any], left: Any, right: Any) -> None:
        for number, weight in enumerate(weights):
            add_to_main_grad(self.F, weight, [each[number] for each in left], [each[number] for each in right])


class ByCapacity(Experts):
    """Experts after a dispatch by capacity: rows [ranks, experts, capacity, H] have their expert as the second axis."""

    def __init__(self, *arguments: Any, ranks: int) -> None:
        super().__init__(*arguments)
        self.ranks = ranks

    def split(self, rows: Any, counts: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        rows = self.F.fused_act_dequant(*rows) if isinstance(rows, tuple) else rows
        by_rank = rows.reshape([self.ranks, len(self.w1), -1, rows.shape[1]])
        return self.F.fused_transpose_wlch_split_quant(by_rank, counts, pow_2_scales=True)


def of_whole_batch(
    permute: Callable[..., Any], unpermute: Callable[..., Any], experts: Experts, x: Tensor, ids: Tensor, probs: Tensor
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Output of the experts for tokens [T, H], and the function that returns the gradients of tokens and weights."""
    num_experts = len(experts.w1)
    counts = np.bincount(ids.numpy()[ids.numpy() >= 0], minlength=num_experts).tolist()
    padded = [-(-count // GROUP) * GROUP for count in counts]
    scale = None
    rows: Any = x
    if experts.form.dispatched:
        rows, scale = experts.F.fp8_quant_blockwise(x, output_scale_transpose=False)
    rows, rowmap, row_probs, scales = permute(rows, scale, ids, probs, num_experts, counts, GROUP)
    row_probs = row_probs.reshape([-1, 1])
    out = experts.forward((rows, scales) if experts.form.dispatched else rows, row_probs, padded)
    total = unpermute(out, rowmap, ids, row_probs.squeeze(-1), x.shape[0], num_experts)[0]

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_rows = permute(gradient, None, ids, probs, num_experts, counts, GROUP)[0]
        dx, d_probs = experts.backward(of_rows, row_probs, padded)
        return unpermute(dx, rowmap, ids, d_probs.reshape([-1]), x.shape[0], num_experts)

    return total, backward
