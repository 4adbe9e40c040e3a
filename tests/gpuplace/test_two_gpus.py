# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators on GPUPlace while the other of two GPUs is current: Paddle's allocator sets its GPU once, at its first
allocation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddle_moe_ops import reference

from ..reference.cases import assert_same_bits
from .test_operators import (  # noqa: F401
    ALIGNMENT,
    PHI_DTYPES,
    Problem,
    backward,
    direct,
    on_gpu,
    on_host,
    plan_tensors,
    problem,
    run,
    shape,
)

pytestmark = [pytest.mark.gpu_place, pytest.mark.two_gpus]


@pytest.fixture
def elsewhere(run: Any) -> Any:  # noqa: F811
    """A context in which the second GPU is current; the tensors are on the first."""
    from paddle_moe_ops.triton.launch.paddle_device import _CudaDriver

    return lambda: _CudaDriver.get().current(1)


def test_calls_through_paddle_run_where_their_tensors_are(run: Any, problem: Problem, elsewhere: Any) -> None:  # noqa: F811
    plan = problem.plan
    probs, ids = on_gpu(problem.probs), on_gpu(problem.ids)
    host_rows, d_out = problem.floats(plan.num_rows, 8), problem.floats(problem.T, 9)
    rows, given = on_gpu(host_rows, gradient=True), on_gpu(d_out)
    with elsewhere():
        maps = run("pmo_route_with_probs", ids, probs, None, problem.E, -1, ALIGNMENT, 0, [], -1, 0, 0)
        (out,) = run("pmo_unpermute", rows, maps[1], maps[2], problem.H, PHI_DTYPES[problem.dtype])
        backward([out], [given])
    for tensor, expected in zip(maps, plan[:10], strict=True):
        assert_same_bits(on_host(tensor, expected.dtype), expected)
    assert_same_bits(on_host(out, problem.dtype), reference.unpermute(host_rows, plan))
    assert_same_bits(on_host(rows.grad, problem.dtype), reference.unpermute_backward(d_out, plan)[0])


def test_direct_calls_run_where_their_tensors_are(run: Any, direct: Any, problem: Problem, elsewhere: Any) -> None:  # noqa: F811
    from paddle_moe_ops.triton.launch.paddle_device import _CudaDriver

    x, scale, maps = on_gpu(problem.x), on_gpu(problem.scale), plan_tensors(run, problem, on_gpu(problem.probs))
    described = problem.H, PHI_DTYPES[problem.dtype]
    with elsewhere():
        rows, scales = direct.permute(x, scale, *maps[:3], 3, True, problem.scale.shape[1], 10, *described)
        (out,) = direct.unpermute(rows, maps[1], maps[2], *described)
        assert _CudaDriver.get().is_current(1)
    expected_rows, expected_scales = reference.permute(problem.x, problem.plan, problem.scale)
    assert_same_bits(on_host(rows, problem.dtype), expected_rows)
    assert_same_bits(on_host(scales, np.dtype(np.float32)), expected_scales)
    assert_same_bits(on_host(out, problem.dtype), reference.unpermute(expected_rows, problem.plan))
