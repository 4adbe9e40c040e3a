# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A token's output and gradient have the same bits alone and in every batch, where kernels of the package multiply."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops import moe_mlp, quantize_experts, route, use_backend
from paddle_moe_ops.backends.quantized import FORMATS
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import tensor
from tests.pairwise import in_turn

E, K = 8, 2
# Sizes on both sides of the limits where kernels, chunks and tiles change; the interpreter computes small ones alone.
BATCHES = [1, 2, 15, 63, 257, 1025, 4096, 16384]
INTERPRETED = [1, 2, 5, 19]


def first_token(batches, rng, place, dtype, sizes, layer):
    """Output and gradients of the first token in batches that begin with the same tokens."""
    d, n = sizes
    count = max(batches)
    ids = np.argsort(rng.random((count, E)), axis=1)[:, :K].astype(np.int32)
    probs, x, d_out = (
        rng.random((count, K), np.float32),
        rng.standard_normal((count, d)),
        rng.standard_normal((count, d)),
    )
    gate_up, down = rng.standard_normal((E, d, 2 * n)) / d**0.5, rng.standard_normal((E, n, d)) / n**0.5
    matrices = [tensor(each.astype(np.float32), place).astype(dtype) for each in (gate_up, down)]
    for size in batches:
        tokens = tensor(x[:size].astype(np.float32), place).astype(dtype).detach()
        weights = tensor(probs[:size], place)
        tokens.stop_gradient = weights.stop_gradient = False
        out = layer(tokens, route(tensor(ids[:size], place), num_experts=E), weights, *matrices)
        paddle.autograd.backward([out], [tensor(d_out[:size].astype(np.float32), place).astype(dtype)])
        yield {"out": out[0], "x": tokens.grad[0], "probs": weights.grad[0]}


def assert_one_result(batches, *arguments):
    alone, *others = first_token(batches, *arguments)
    for size, made in zip(batches[1:], others, strict=True):
        for name, got in made.items():
            assert_bits_equal(got, alone[name], what=f"{name} among {size} tokens")


@pytest.mark.cpu_only
@in_turn({"sizes": {"(64, 32)": (64, 32), "(80, 48)": (80, 48)}, "dtype": ["bfloat16", "float16"]})
def test_kernels_of_triton(interpreted, sizes, dtype, rng):
    with use_backend("triton"):
        assert_one_result(INTERPRETED, rng, "cpu", dtype, sizes, moe_mlp)


@pytest.mark.gpu_only
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [(512, 256), (2048, 768), (2560, 1536)], ids=str)
@pytest.mark.parametrize("name", ["compiled", "triton"])
def test_kernels_on_a_gpu(name, sizes, dtype, rng, place):
    with use_backend(name):
        assert_one_result(BATCHES, rng, place, dtype, sizes, moe_mlp)


@pytest.mark.gpu_only
@pytest.mark.parametrize("sizes", [(512, 256), (2048, 768)], ids=str)
def test_float8_kernels_on_a_gpu(sizes, rng, place):
    def layer(*arguments):
        return moe_mlp(*arguments, compute="fp8_1x128")

    assert_one_result(BATCHES, rng, place, "bfloat16", sizes, layer)


@pytest.mark.gpu_only
@pytest.mark.parametrize("format", FORMATS)
def test_matrices_that_are_codes_on_a_gpu(format, rng, place):
    def layer(tokens, plan, weights, gate_up, down):
        return moe_mlp(tokens, plan, weights, *quantize_experts(gate_up, down, format=format))

    assert_one_result(BATCHES, rng, place, "bfloat16", (512, 256), layer)
