# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""With two GPUs, the one that holds the tensors does the work, and the current GPU stays the same."""

from __future__ import annotations

import contextlib

import numpy as np
import paddle
import pytest

from paddle_moe_ops import moe_permute, permute, quantize_1x128, reference, route, unpermute, use_backend
from paddle_moe_ops.backends.arrays import to_numpy
from tests.ops.problems import make_problem, ordinary, tensor
from tests.params import ODD, PADDED
from tests.reference.cases import assert_same_bits, assert_same_numbers

pytestmark = [pytest.mark.gpu_only, pytest.mark.two_gpus]


@pytest.fixture(params=["driver", "paddle"])
def elsewhere(request, device, place):
    """A context in which the other GPU is current: for CUDA, or for Paddle, which allocates there.

    Paddle's own allocations and operators may change the current GPU; `only_ours` says that there are none.
    """
    from paddle_moe_ops.triton.launch.paddle_device import _CudaDriver

    kind, _, index = device.partition(":")
    other = 1 - int(index)

    @contextlib.contextmanager
    def by_driver(only_ours):
        with _CudaDriver.get().current(other):
            yield
            assert not only_ours or _CudaDriver.get().is_current(other), "a call must leave the current GPU as it was"

    @contextlib.contextmanager
    def by_paddle(only_ours):
        paddle.set_device(f"{kind}:{other}")
        try:
            yield paddle.zeros([5 << 20])
        finally:
            paddle.set_device(device)

    return by_driver if request.param == "driver" else by_paddle


@pytest.fixture
def problem(rng):
    return make_problem(rng, PADDED)


def tensors(problem, place):
    return tuple(tensor(array, place) for array in (problem.x, problem.ids, problem.probs))


def check_moves(problem, place, elsewhere, name):
    """Routing, and rows there and back, on a backend; Triton's outputs are allocated by Paddle."""
    expected = problem.plan()
    x, ids, probs = tensors(problem, place)
    with use_backend(name), elsewhere(only_ours=name == "compiled"):
        plan = route(ids, probs, **problem.route_arguments)
        rows, _ = permute(x, plan)
        out = unpermute(rows, plan, plan.row_probs)
    expected_rows, _ = reference.permute(problem.x, expected)
    for made in (*plan[:3], rows, out):
        assert made.place == place
    for made, wanted in zip(plan[:10], expected[:10], strict=True):
        assert_same_bits(to_numpy(made), wanted)
    assert_same_bits(to_numpy(rows), expected_rows)
    assert_same_numbers(to_numpy(out), reference.unpermute(expected_rows, expected, expected.row_probs))


@pytest.mark.parametrize("name", ["compiled", "triton"])
def test_calls_without_a_gradient_run_where_their_tensors_are(problem, place, elsewhere, name):
    check_moves(problem, place, elsewhere, name)


def test_quick_calls_run_where_their_tensors_are(rng, place, elsewhere):
    """permute and unpermute of plain tensors go to the library before any check."""
    problem = make_problem(rng, ODD)
    x, ids, probs = tensors(problem, place)
    plan = route(ids, probs, **problem.route_arguments)
    with elsewhere(only_ours=True):
        out = unpermute(permute(x, plan)[0], plan)
    expected = problem.plan()
    assert_same_numbers(to_numpy(out), reference.unpermute(reference.permute(problem.x, expected)[0], expected))


@pytest.mark.parametrize("name", ["compiled", "triton"])
def test_gradients_run_where_their_tensors_are(problem, rng, place, elsewhere, name):
    expected = problem.plan()
    x, probs = tensor(problem.x, place, gradient=True), tensor(problem.probs, place, gradient=True)
    plan = route(tensor(problem.ids, place), **problem.route_arguments)
    d_rows = ordinary(rng, (expected.num_rows, problem.shape.H))
    given = tensor(d_rows, place)
    with use_backend(name), elsewhere(only_ours=False):
        rows, _ = permute(x, plan)
        out = unpermute(rows.detach(), plan, probs)
        paddle.autograd.backward([rows, out], [given, paddle.ones_like(out)])
    assert_same_numbers(to_numpy(x.grad), reference.permute_backward(d_rows, expected))
    dots = to_numpy(rows).sum(axis=1)[expected.slot_to_row]
    np.testing.assert_allclose(to_numpy(probs.grad), np.where(expected.slot_to_row < 0, 0, dots), rtol=1e-4, atol=1e-3)


def test_other_operators_run_where_their_tensors_are(problem, place, elsewhere):
    x, ids, probs = tensors(problem, place)
    shape = problem.shape
    with elsewhere(only_ours=True):
        rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, shape.E, None, shape.A)
        codes, scales = quantize_1x128(x)
    wanted = reference.moe_permute(problem.x, None, problem.ids, problem.probs, shape.E, None, shape.A)
    for made, expected in zip((rows, rowmap, row_probs), wanted[:3], strict=True):
        assert_same_bits(to_numpy(made), expected)
    for made, expected in zip((codes, scales), reference.quantize_1x128(problem.x), strict=True):
        assert_same_bits(to_numpy(made), expected)


@pytest.mark.parametrize("name", ["compiled", "triton"])
def test_a_stream_of_the_user_keeps_its_gpu(problem, device, place, elsewhere, name):
    stream = paddle.device.Stream(device)
    with paddle.device.stream_guard(stream):
        check_moves(problem, place, elsewhere, name)
    stream.synchronize()
