# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on GPUPlace, under a CUDA build of Paddle of the 2.6 series."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddle_moe_ops import reference

from ..reference.cases import assert_same_bits
from .test_operators import ALIGNMENT, Problem, on_gpu, on_host, problem, shape  # noqa: F401

pytestmark = pytest.mark.gpu_place


@pytest.fixture
def device() -> Any:
    import paddle

    from paddle_moe_ops.triton.launch import paddle_device

    paddle.set_device("gpu:0")
    assert paddle_device.unavailable() is None
    return paddle_device.device_of(on_gpu(np.zeros(1, np.int32)))


def test_all_kernels(device: Any, problem: Problem) -> None:  # noqa: F811
    from paddle_moe_ops.triton.ops.permute import permute
    from paddle_moe_ops.triton.ops.route import Routing, route
    from paddle_moe_ops.triton.ops.sort_chunks import chunk_map, sort_chunks, sort_chunks_backward
    from paddle_moe_ops.triton.ops.unpermute import unpermute
    from paddle_moe_ops.triton.ops.unpermute_backward import unpermute_backward

    plan = problem.plan
    sizes = problem.T, problem.K, problem.E, ALIGNMENT, False, True
    maps = route(device, Routing(on_gpu(problem.ids), on_gpu(problem.probs), *sizes), None)
    for actual, expected in zip(maps[:10], plan[:10], strict=True):
        assert_same_bits(on_host(actual, expected.dtype), expected)

    rows, scales = permute(device, on_gpu(problem.x), on_gpu(problem.scale), maps.token_rows, maps.row_to_token, "all")
    expected_rows, expected_scales = reference.permute(problem.x, plan, problem.scale)
    assert_same_bits(on_host(rows, problem.dtype), expected_rows)
    assert_same_bits(on_host(scales, np.dtype(np.float32)), expected_scales)

    y, d_out = problem.floats(plan.num_rows, 8), problem.floats(problem.T, 9)
    out = unpermute(device, on_gpu(y), maps.token_rows, maps.row_probs)
    assert_same_bits(on_host(out, problem.dtype), reference.unpermute(y, plan, plan.row_probs))
    d_rows, d_probs = unpermute_backward(
        device, on_gpu(d_out), maps.token_rows, maps.row_to_token, on_gpu(y), maps.row_probs
    )
    expected_d_rows, expected_d_probs = reference.unpermute_backward(d_out, plan, y, plan.row_probs)
    assert_same_bits(on_host(d_rows, problem.dtype), expected_d_rows)
    actual = on_host(d_probs, np.dtype(np.float32))
    np.testing.assert_allclose(actual, expected_d_probs, rtol=1e-4, atol=1e-3 * np.sqrt(problem.H))

    sizes, order = plan.tokens_per_expert, np.arange(problem.E, dtype=np.int32)[::-1].copy()
    source_to_dest = chunk_map(device, on_gpu(sizes), on_gpu(order), plan.num_rows)
    sorted_rows, sorted_probs = sort_chunks(device, on_gpu(y), on_gpu(plan.row_probs), source_to_dest)
    expected_sorted, expected_probs, expected_map = reference.sort_chunks(y, sizes, order, plan.row_probs)
    assert_same_bits(on_host(source_to_dest, np.dtype(np.int32)), expected_map)
    assert_same_bits(on_host(sorted_rows, problem.dtype), expected_sorted)
    assert_same_bits(on_host(sorted_probs, np.dtype(np.float32)), expected_probs)
    assert_same_bits(on_host(sort_chunks_backward(device, sorted_rows, source_to_dest), problem.dtype), y)
