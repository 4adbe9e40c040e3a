# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The layer of experts on float8 operands by operators that run everywhere, for places without kernels for it.

Operands are quantised and dequantised, and products are made in float32. So the result is that of a kernel, except for
the order of sums; nothing becomes faster or smaller.
"""

from __future__ import annotations

import itertools
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ._activations import activate
from ._graphs import filled, float32, to_dtype, without_autocast
from .backends import compiled_backend, direct, resolve
from .backends.accumulation import put
from .backends.base import GemmSpec, Matrices, MlpSpec, QuantizeSpec, Tensors, Validation
from .backends.gradients import WithGradients, connected_mlp
from .backends.groups import check_plan_groups, host_segments
from .reference import FLOAT8_AMAX_MIN
from .reference.quantization import E4M3_MAX, GROUP

__all__ = ["composed_float8"]

_SPEC = QuantizeSpec(False, "row", FLOAT8_AMAX_MIN)


class ComposedFloat8:
    """`moe_mlp` and its gradient, of `backends.base.Kernels`."""

    name = "paddle"
    overwrites_hidden = False

    def quantize_experts(self, gate_up: Tensor, down: Tensor, transpose: bool, both: bool = True) -> Tensors:
        return _near_matrices(gate_up), _near_matrices(down)

    def for_both_passes(self, quantized: Tensors) -> Tensors:
        return quantized

    def moe_mlp(
        self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec, keeps: bool
    ) -> tuple[Tensor, Tensors, Tensor | None, None]:
        if spec.validation != Validation.OFF:
            check_plan_groups(spec.plan)
        with paddle.no_grad(), without_autocast():
            if weights is not None and spec.weights_by_slot:
                weights = resolve("unpermute", weights).slots_to_rows(weights, spec.plan)
            near_gate_up, near_down = spec.quantized or self.quantize_experts(gate_up, down, spec.transpose)
            hidden = _hidden(x, near_gate_up, spec)
            rows = _product(_near_rows(activate(hidden, "swiglu")), near_down, spec, spec.transpose)
            out = _sums(_weighted(rows, weights), x, spec)
            return out, _kept(hidden, spec) if keeps and spec.keeps_hidden else (), weights, None

    def moe_mlp_backward(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensors,
        tables: None,
        spec: MlpSpec,
        wanted: tuple[bool, bool, bool, bool],
        destinations: tuple[Any, Any],
    ) -> tuple[Tensor | None, ...]:
        with paddle.no_grad(), without_autocast():
            near_gate_up, near_down = spec.quantized or self.quantize_experts(gate_up, down, spec.transpose)
            hidden = _read(hidden, x.dtype) if hidden else _hidden(x, near_gate_up, spec)
            need_x, need_gate_up, need_down, need_weights = wanted
            d_rows = _moved(_near_rows(d_out), spec)
            d_scaled = _product(d_rows, near_down, spec, not spec.transpose)
            act = activate(hidden, "swiglu")
            d_hidden = to_dtype(_through_swiglu(_weighted(d_scaled, weights), hidden), x.dtype)
            d_x = d_weights = None
            gradients: list[Tensor | None] = [None, None]
            if need_gate_up:
                gradients[0] = _matrix_gradient(_moved(x, spec), d_hidden, gate_up, spec)
            if need_down:
                scaled = to_dtype(_weighted(float32(act), weights), x.dtype)
                gradients[1] = _matrix_gradient(scaled, _moved(d_out, spec), down, spec)
            if need_x:
                d_x = _sums(_product(_near_rows(d_hidden), near_gate_up, spec, not spec.transpose), x, spec)
            if need_weights:
                d_weights = (float32(act) * d_scaled).sum(axis=1)
                if spec.weights_by_slot:
                    d_weights = resolve("unpermute", d_weights).rows_to_slots(d_weights, spec.plan)
        for index, destination in enumerate(destinations):
            if destination is not None:
                put(destination, gradients[index])
                gradients[index] = None
        return d_x, *gradients, d_weights


def composed_float8(x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec) -> Tensor:
    """`backends.base.Backend.moe_mlp`."""
    return connected_mlp(ComposedFloat8(), x, gate_up, down, weights, spec)


def _hidden(x: Tensor, near_gate_up: Tensor, spec: MlpSpec) -> Tensor:
    """The first product, in the tokens' dtype."""
    rows = _moved(_near_rows(x), spec)
    return to_dtype(_product(rows, near_gate_up, spec, spec.transpose), x.dtype)


def _kept(hidden: Tensor, spec: MlpSpec) -> Tensors:
    """H as the forward pass saves it: codes and scales with `hidden_in_float8`, else the tensor."""
    return _quantized_rows(hidden) if spec.hidden_in_float8 else (hidden,)


def _read(kept: Tensors, dtype: Any) -> Tensor:
    """H, dequantized if it was saved in float8."""
    return kept[0] if len(kept) == 1 else _dequantized(kept, dtype)


def _moved(x: Tensor, spec: MlpSpec) -> Tensor:
    """The rows of tokens, zeros where there is none."""
    return resolve("permute", x).permute(x, None, spec.plan, "all")[0]


def _sums(rows: Tensor, x: Tensor, spec: MlpSpec) -> Tensor:
    """The sums of each token's rows, which are rounded to the tokens' dtype first."""
    rows = to_dtype(rows, x.dtype)
    return resolve("unpermute", rows).unpermute(rows, None, spec.plan)


def _weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows if weights is None else rows * weights.unsqueeze(1)


def _gemm_spec(spec: MlpSpec, transpose: bool) -> GemmSpec:
    return GemmSpec(spec.plan.tokens_per_expert, spec.plan.expert_offsets, transpose, None, spec.validation)


def _product(rows: Tensor, matrices: Tensor, spec: MlpSpec, transpose: bool) -> Tensor:
    return resolve("grouped_gemm", rows).grouped_gemm(rows, matrices, None, None, _gemm_spec(spec, transpose))


def _matrix_gradient(rows: Tensor, d_out: Tensor, matrices: Tensor, spec: MlpSpec) -> Tensor:
    """The gradient of the matrices of a product of these rows, given that of its result."""
    backend, gemm_spec = resolve("grouped_gemm", rows), _gemm_spec(spec, spec.transpose)
    if isinstance(backend, WithGradients):
        operands: Any = d_out, rows, matrices, None, None
        return backend.grouped_gemm_backward(*operands, gemm_spec, (False, True, False, False))[1]
    segments = host_segments(rows.shape[0], gemm_spec.m_sizes, gemm_spec.expert_offsets)
    ends = list(itertools.accumulate(segments))
    p, q = (d_out, rows) if spec.transpose else (rows, d_out)
    parts = []
    for begin, end in zip(ends[::2], ends[1::2], strict=False):
        if begin == end:
            parts.append(filled(matrices.shape[1:], 0, "float32", like=rows))
        else:
            parts.append(paddle.matmul(float32(p[begin:end]), float32(q[begin:end]), transpose_x=True))
    return to_dtype(paddle.stack(parts), matrices.dtype)


def _through_swiglu(d_act: Tensor, hidden: Tensor) -> Tensor:
    """Gradient of SwiGLU by its input, in float32."""
    gate, up = paddle.chunk(float32(hidden), 2, axis=-1)
    share = F.sigmoid(gate)
    silu = gate * share
    return paddle.concat([d_act * up * (share + silu * (1.0 - share)), d_act * silu], axis=-1)


def _near_rows(x: Tensor) -> Tensor:
    """Quantised values of rows, with a scale for each 128 columns, in float32."""
    return _dequantized(_quantized_rows(x), paddle.float32)


def _quantized_rows(x: Tensor) -> Tensors:
    """Codes and scales."""
    return resolve("quantize_1x128", x).quantize_1x128(x, _SPEC)


def _dequantized(quantized: Tensors, dtype: Any) -> Tensor:
    codes, scales = quantized
    return resolve("dequantize_1x128", codes).dequantize_1x128(codes, scales, "row", dtype)


def _near_matrices(w: Tensor) -> Tensor:
    """Quantised values of matrices, with a scale for each 128 x 128 elements, in float32.

    The library makes them where it quantises rows. On Triton, which has no kernel for them, Paddle's operators do.
    """
    if resolve("quantize_1x128", w) is compiled_backend:
        return direct("near_blocks", w)[0]
    return _near_matrices_by_paddle(w)


def _near_matrices_by_paddle(w: Tensor) -> Tensor:
    experts, height, width = w.shape
    high, wide = -(-height // GROUP), -(-width // GROUP)
    filled_up = F.pad(float32(w), [0, 0, 0, high * GROUP - height, 0, wide * GROUP - width])
    blocks = filled_up.reshape([experts, high, GROUP, wide, GROUP])
    is_nan = paddle.isnan(blocks)
    magnitudes = paddle.where(is_nan, paddle.zeros_like(blocks), blocks.abs())
    largest = float(paddle.finfo(paddle.float32).max)
    scales = magnitudes.max(axis=[2, 4], keepdim=True).clip(FLOAT8_AMAX_MIN, largest) / E4M3_MAX
    codes = (blocks * (1.0 / scales)).clip(-E4M3_MAX, E4M3_MAX)
    near = codes.astype("float8_e4m3fn").astype("float32") * scales
    near = paddle.where(is_nan, blocks, near).reshape(filled_up.shape)
    return near[:, :height, :width]
