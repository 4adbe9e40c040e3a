# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""PaddleFormers' own float8 linear layer and experts on patch_paddle(("fp8",)), against float32 without rounding.

Only DeepGEMM, which needs a GPU, has a stand-in.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_moe_ops import patched_paddle
from paddle_moe_ops.testing.tolerances import FLOAT8_ROUNDING_ERROR, assert_close_float8

H, INNER, COUNTS = 256, 128, [128, 0, 256, 128]
ROWS = sum(COUNTS)
BF16 = "bfloat16"


def gemm_nt(rows: Any, matrix: Any, out: paddle.Tensor) -> None:
    (codes, scales), (matrix_codes, matrix_scales) = rows, matrix
    blocks = paddle.repeat_interleave(paddle.repeat_interleave(matrix_scales, 128, axis=0), 128, axis=1)
    left = codes.astype("float32") * paddle.repeat_interleave(scales, 128, axis=1)
    paddle.assign((left @ (matrix_codes.astype("float32") * blocks).T).astype(out.dtype), out)


def grouped_gemm_nt(rows: Any, matrices: Any, out: paddle.Tensor, m_indices: paddle.Tensor) -> None:
    start = 0
    for expert, count in enumerate(np.bincount(m_indices.numpy(), minlength=len(matrices[0])).tolist()):
        own = slice(start, start + count)
        if count:
            gemm_nt([each[own] for each in rows], [each[expert] for each in matrices], out[own])
        start += count


@pytest.fixture
def float8(monkeypatch):
    """PaddleFormers' module of float8 layers."""
    module = importlib.import_module("paddleformers.transformers.fp8_utils")
    names = {"fp8_gemm_nt": gemm_nt, "m_grouped_fp8_gemm_nt_contiguous": grouped_gemm_nt}
    deep_gemm = SimpleNamespace(**names, set_num_sms=lambda number: None)
    monkeypatch.setattr(module, "deep_gemm", deep_gemm, raising=False)
    paddle.seed(3)
    with patched_paddle(("fp8",)):
        yield module


def random(*shape: int) -> paddle.Tensor:
    return (paddle.randn(shape) / shape[0] ** 0.5).astype(BF16)


def trained(tensor: paddle.Tensor) -> Any:
    """The tensor as a parameter with a main_grad."""
    tensor.stop_gradient = False
    tensor.main_grad = None
    return tensor


def exact(tensor: paddle.Tensor) -> paddle.Tensor:
    copy = tensor.detach().astype("float32")
    copy.stop_gradient = False
    return copy


def close(got: paddle.Tensor, expected: paddle.Tensor, what: str) -> None:
    got, expected = (each.astype("float32").numpy() for each in (got, expected))
    assert_close_float8(got, expected, what, FLOAT8_ROUNDING_ERROR)


@pytest.mark.parametrize("kind", ["FP8Linear", "FP8KeepXLinear"])
def test_linear_layers(kind, float8):
    layer = getattr(float8, kind)(H, 384)
    trained(layer.weight)
    x = trained(random(2, 256, H))
    out, given = layer(x), random(2, 256, 384)
    paddle.autograd.backward([out], [given])
    same, weight = exact(x), exact(layer.weight)
    due = same @ weight
    paddle.autograd.backward([due], [given.astype("float32")])
    close(out, due, "output")
    close(x.grad.reshape(x.shape), same.grad, "gradient of rows")  # FP8KeepXLinear returns a matrix
    close(layer.weight.main_grad, weight.grad, "gradient of the weight")


@pytest.mark.parametrize("is_split", [False, True], ids=["grouped", "split"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dispatched", [False, True], ids=["bfloat16", "float8"])
def test_experts(dispatched, recomputes, is_split, float8):
    """The gradient arrives in float8: this version overwrites one in bfloat16 before its last use."""
    quantise = paddle.incubate.nn.functional.fp8_quant_blockwise
    experts = [SimpleNamespace(w1=trained(random(H, 2 * INNER)), w2=trained(random(INNER, H))) for _ in COUNTS]
    options = {"recompute_fwd_gate_up": recomputes, "is_split_group_gemm": is_split}
    node = float8.FP8GroupGemmMlpFunctionNode(SimpleNamespace(experts=experts), **options)
    x, given, probs = random(ROWS, H), random(ROWS, H), paddle.rand([ROWS, 1])
    rows = quantise(x, output_scale_transpose=False) if dispatched else x.clone()
    out = node.forward(rows, probs, COUNTS)
    dx, d_probs = node.backward(quantise(given, output_scale_transpose=False), probs, COUNTS)

    same, weights = exact(x), exact(probs)
    matrices = [(exact(each.w1), exact(each.w2)) for each in experts]
    parts = []
    for part, p, (w1, w2) in zip(same.split(COUNTS), weights.split(COUNTS), matrices, strict=True):
        gate, up = (part @ w1).chunk(2, axis=-1)
        parts.append((F.silu(gate) * up * p) @ w2)
    due = paddle.concat(parts)
    paddle.autograd.backward([due], [given.astype("float32")])
    close(out, due, "output")
    close(dx, same.grad, "gradient of rows")
    close(d_probs, weights.grad, "gradient of probabilities")
    for expert, (w1, w2), count in zip(experts, matrices, COUNTS, strict=True):
        if count:
            close(expert.w1.main_grad, w1.grad, "gradient of w1")
            close(expert.w2.main_grad, w2.grad, "gradient of w2")
        else:
            assert expert.w1.main_grad is expert.w2.main_grad is None
