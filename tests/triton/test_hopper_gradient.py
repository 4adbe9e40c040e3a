# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Rounding in the dSwiGLU epilogue of the library's grouped GEMM; in NumPy on machines without a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from paddle_moe_ops.triton.gemm.schedule import schedule
from paddle_moe_ops.triton.gemm.types import Groups, Rows, Target
from paddle_moe_ops.triton.hopper_product import GRADIENT, TURNED_ROWS, hopper_product
from tests.reference.cases import assert_same_bits

from .library_in_numpy import use_products


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_gradients_are_those_of_the_rounded_gradient_of_activations(rng, gpu, monkeypatch, dtype):
    """As if it went through memory. Gates of 64 and ups of 1, whose SwiGLU and derivatives are exact."""
    use_products(gpu, monkeypatch, lambda: TURNED_ROWS, lambda: False)
    rows, inner, width = 41, 136, 24
    x, w = (rng.integers(-31, 32, shape).astype(dtype) for shape in ((rows, inner), (1, inner, width)))
    x /= dtype(64)
    hidden = np.repeat(np.array([[64, 1]], dtype), width, axis=1).repeat(rows, axis=0)
    weights = rng.choice([0.75, 1.25], rows).astype(np.float32)
    tokens = np.where(np.arange(rows) % 7 == 5, -1, np.arange(rows)).astype(np.int32)
    live = tokens[:, None] >= 0
    sums = x.astype(np.float64) @ w[0].astype(np.float64)
    d_act = np.where(live, sums.astype(dtype).astype(np.float64), 0)
    assert (d_act != sums)[live[:, 0]].any()

    groups = Groups(*(gpu.array(np.array([number], np.int32)) for number in (rows, 0)))
    tables = schedule(gpu, groups, rows, TURNED_ROWS)
    made, out = gpu.array(hidden), gpu.array(np.zeros((rows, width), dtype))
    d_weights = hopper_product(
        *(gpu, Rows(gpu.array(x), rows, inner, inner), gpu.array(w), tables, rows, Target(out, 0, width), GRADIENT),
        transpose=False,
        tile_rows=TURNED_ROWS,
        weights=gpu.array(weights),
        hidden=made,
        row_to_token=gpu.array(tokens),
    )
    scaled = d_act * weights[:, None].astype(np.float64)
    assert_same_bits(gpu.numpy(made) + dtype(0), np.concatenate([scaled, scaled * 64], axis=1).astype(dtype))
    assert_same_bits(gpu.numpy(out), np.where(live, weights[:, None] * 64, 0).repeat(width, axis=1).astype(dtype))
    assert_same_bits(gpu.numpy(d_weights), (64 * d_act.sum(axis=1, keepdims=True)).astype(np.float32))
