# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The compiled operators on GPUPlace, under a CUDA build of Paddle of the 2.6 series.

That Paddle is too old for the package's Python side and may lack device code for the GPU at hand, so the operators are
called raw, inputs are made on the host, and gradients are given explicitly.
"""

from __future__ import annotations

from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import reference

from ..reference.cases import assert_same_bits, ordinary_floats
from ..routers import Router

pytestmark = pytest.mark.gpu_place

LIBRARY = Path(__file__).resolve().parents[2] / "paddle_moe_ops" / "_C_pd_.so"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)]
PHI_DTYPES = {np.dtype(np.float32): 10, np.dtype(np.float16): 15, BFLOAT16: 16}
# T, K, E, H. Paddle 2.6 refuses outputs without elements, so there is no T = 0, and every call has a scale.
SHAPES = [(1, 1, 1, 1), (63, 2, 7, 72), (200, 8, 64, 7168)]
SCALES = 2
ALIGNMENT = 4


@pytest.fixture(scope="module")
def run() -> Any:
    """Calls an operator by name."""
    import paddle
    from paddle.utils.cpp_extension.extension_utils import load_op_meta_info_and_register_op

    load_op_meta_info_and_register_op(str(LIBRARY))
    paddle.set_device("gpu:0")
    return paddle.base.core.eager._run_custom_op


@pytest.fixture(scope="module")
def direct(run: Any) -> Any:
    """The library as a Python module, whose functions are the operators."""
    loader = ExtensionFileLoader("_C_pd_", str(LIBRARY))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def on_gpu(array: NDArray, gradient: bool = False) -> Any:
    import paddle

    bits = array.view(np.uint16) if array.dtype == BFLOAT16 else array
    return paddle.to_tensor(bits, place=paddle.CUDAPlace(0), stop_gradient=not gradient)


def on_host(tensor: Any, dtype: np.dtype) -> NDArray:
    assert tensor.place.is_gpu_place()
    array = tensor.numpy()
    return array.view(BFLOAT16) if dtype == BFLOAT16 else array


def backward(outputs: list[Any], gradients: list[Any]) -> None:
    import paddle

    paddle.autograd.backward(outputs, gradients)


class Problem:
    """Tokens, ids, probabilities and the oracle's plan."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> None:
        rng = np.random.default_rng(5)
        self.T, self.K, self.E, self.H = shape
        self.dtype = dtype
        order = rng.random((self.T, self.E)).argsort(axis=1)[:, : self.K]
        self.ids = np.where(rng.random((self.T, self.K)) < 0.3, -1, order).astype(np.int32)
        self.ids[0, 0] = order[0, 0]
        self.probs = rng.random((self.T, self.K), np.float32)
        self.x = ordinary_floats((self.T, self.H), dtype, seed=6)
        self.scale = rng.random((self.T, SCALES), np.float32)
        self.plan = reference.route(self.ids, self.probs, num_experts=self.E, padding_alignment=ALIGNMENT)

    def floats(self, rows: int, seed: int) -> NDArray:
        return ordinary_floats((rows, self.H), self.dtype, seed=seed)


@pytest.fixture(params=SHAPES, ids=lambda shape: "T{}-K{}-E{}-H{}".format(*shape))
def shape(request: pytest.FixtureRequest) -> tuple[int, int, int, int]:
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def problem(shape: tuple[int, int, int, int], request: pytest.FixtureRequest) -> Problem:
    return Problem(shape, request.param)


def plan_tensors(run: Any, problem: Problem, probs: Any) -> list[Any]:
    return run("pmo_route_with_probs", on_gpu(problem.ids), probs, None, problem.E, -1, ALIGNMENT, 0, [], -1, 0, 0)


def test_route_and_its_gradient(run: Any, problem: Problem) -> None:
    probs = on_gpu(problem.probs, gradient=True)
    outputs = plan_tensors(run, problem, probs)
    for tensor, expected in zip(outputs, problem.plan[:10], strict=True):
        assert_same_bits(on_host(tensor, expected.dtype), expected)
    gradient = np.arange(problem.plan.num_rows, dtype=np.float32)
    backward([outputs[5]], [on_gpu(gradient)])
    assert_same_bits(on_host(probs.grad, np.dtype(np.float32)), reference.route_backward(gradient, problem.plan))


def test_permute_and_its_gradient(run: Any, problem: Problem) -> None:
    x = on_gpu(problem.x, gradient=True)
    maps = plan_tensors(run, problem, on_gpu(problem.probs))
    attributes = 3, True, SCALES, 10, problem.H, PHI_DTYPES[problem.dtype]
    rows, scales = run("pmo_permute", x, on_gpu(problem.scale), maps[0], maps[1], maps[2], *attributes)
    expected_rows, expected_scales = reference.permute(problem.x, problem.plan, problem.scale)
    assert_same_bits(on_host(rows, problem.dtype), expected_rows)
    assert_same_bits(on_host(scales, np.dtype(np.float32)), expected_scales)
    d_rows = problem.floats(problem.plan.num_rows, 7)
    backward([rows], [on_gpu(d_rows)])
    assert_same_bits(on_host(x.grad, problem.dtype), reference.permute_backward(d_rows, problem.plan))


@pytest.mark.parametrize("weighted", [False, True])
def test_unpermute_and_its_gradient(run: Any, problem: Problem, weighted: bool) -> None:
    plan = problem.plan
    host_rows, d_out = problem.floats(plan.num_rows, 8), problem.floats(problem.T, 9)
    rows, probs = on_gpu(host_rows, gradient=True), on_gpu(plan.row_probs, gradient=True)
    maps = plan_tensors(run, problem, on_gpu(problem.probs))
    if weighted:
        (out,) = run("pmo_unpermute_weighted", rows, probs, maps[1], maps[2], maps[3], True, True)
    else:
        (out,) = run("pmo_unpermute", rows, maps[1], maps[2], problem.H, PHI_DTYPES[problem.dtype])
    weights = plan.row_probs if weighted else None
    assert_same_bits(on_host(out, problem.dtype), reference.unpermute(host_rows, plan, weights))
    backward([out], [on_gpu(d_out)])
    d_rows, d_probs = reference.unpermute_backward(d_out, plan, host_rows, weights)
    assert_same_bits(on_host(rows.grad, problem.dtype), d_rows)
    if weighted:
        np.testing.assert_allclose(on_host(probs.grad, np.dtype(np.float32)), d_probs, rtol=1e-4, atol=1e-3)


def test_moe_permute_and_moe_unpermute_with_their_gradients(run: Any, problem: Problem) -> None:
    plan, dtype = problem.plan, problem.dtype
    x, probs = on_gpu(problem.x, gradient=True), on_gpu(problem.probs, gradient=True)
    ids = on_gpu(problem.ids)
    described = problem.H, PHI_DTYPES[dtype], True, True
    numbers = [problem.E, 0, ALIGNMENT, 1, 1, -1, 3, 0, *map(int, described), 1, SCALES, 10]
    scale = on_gpu(problem.scale)
    rows, rowmap, row_probs, _, expert_indices, *_ = run("pmo_moe_permute", x, scale, ids, probs, None, numbers)
    expected = reference.moe_permute(
        problem.x, problem.scale, problem.ids, problem.probs, problem.E, None, ALIGNMENT, return_expert_indices=True
    )
    for tensor, array in zip((rows, rowmap, row_probs), expected[:3], strict=True):
        assert_same_bits(on_host(tensor, array.dtype), array)
    assert_same_bits(on_host(expert_indices, np.dtype(np.int32)), expected[4])
    out, prob_topk = run("pmo_moe_unpermute_weighted", rows, rowmap, ids, row_probs, False, 0, *described)
    expected_out, expected_probs = reference.moe_unpermute(
        expected[0], expected[1], problem.ids, expected[2], problem.T, problem.E, using_weighted_combine=True
    )
    assert_same_bits(on_host(out, dtype), expected_out)
    assert_same_bits(on_host(prob_topk, np.dtype(np.float32)), expected_probs)
    d_rows, d_row_probs = problem.floats(plan.num_rows, 10), np.arange(plan.num_rows, dtype=np.float32)
    backward([rows, row_probs], [on_gpu(d_rows), on_gpu(d_row_probs)])
    d_x, d_probs = reference.moe_permute_backward(d_rows, d_row_probs, plan)
    assert_same_bits(on_host(x.grad, dtype), d_x)
    assert_same_bits(on_host(probs.grad, np.dtype(np.float32)), d_probs)


@pytest.mark.parametrize("pre_act", [False, True])
def test_calculate_topk_and_its_gradient(run: Any, problem: Problem, pre_act: bool) -> None:
    dtype, rng = problem.dtype, np.random.default_rng(11)
    logits, bias = rng.standard_normal((problem.T, problem.E)).astype(dtype), rng.random(problem.E, np.float32)
    router = Router(logits, problem.K, True, True, pre_act, 2.5, bias, {})
    gating = on_gpu(logits, gradient=True)
    attributes = problem.K, True, True, pre_act, 1, 1, 2, 2.5, True
    weights, ids, scores = run("pmo_calculate_topk", gating, on_gpu(bias), *attributes)
    host_ids = on_host(ids, np.dtype(np.int64))
    router.check(on_host(weights, dtype), host_ids, on_host(scores, dtype))
    d_weights, d_scores = (rng.standard_normal(array.shape).astype(dtype) for array in (host_ids, logits))
    backward([weights, scores], [on_gpu(d_weights), on_gpu(d_scores)])
    router.check_gradient(on_host(gating.grad, dtype), host_ids, d_weights, d_scores)


def test_operators_called_without_paddles_machinery_give_the_same_bits(run: Any, direct: Any, problem: Problem) -> None:
    ids, x = on_gpu(problem.ids), on_gpu(problem.x)
    attributes = problem.E, -1, ALIGNMENT, 0, [], -1, 0, 0
    outputs = direct.route_with_probs(ids, on_gpu(problem.probs), None, *attributes)
    for tensor, expected in zip(outputs, problem.plan[:10], strict=True):
        assert_same_bits(on_host(tensor, expected.dtype), expected)
    described = problem.H, PHI_DTYPES[problem.dtype]
    rows, scales = direct.permute(x, on_gpu(problem.scale), *outputs[:3], 3, True, SCALES, 10, *described)
    expected_rows, expected_scales = reference.permute(problem.x, problem.plan, problem.scale)
    assert_same_bits(on_host(rows, problem.dtype), expected_rows)
    assert_same_bits(on_host(scales, np.dtype(np.float32)), expected_scales)
    with pytest.raises(RuntimeError, match="all tensors must be on one device"):
        direct.unpermute(rows, outputs[1].cpu(), outputs[2], *described)


@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda shape: "T{}-K{}-E{}-H{}".format(*shape), indirect=True)
def test_experts_and_their_gradients(
    run: Any, shape: tuple[int, int, int, int], dtype: np.dtype, transpose: bool
) -> None:
    """On the kernels for compute capability 9.0: elsewhere Paddle's own device code multiplies."""
    problem, inner = Problem(shape, dtype), 16
    plan, scale = problem.plan, problem.H**-0.5
    sizes = (problem.E, problem.H, 2 * inner), (problem.E, inner, problem.H)
    matrices = [ordinary_floats(size, np.float32, seed=12) * scale for size in sizes]
    gate_up, down = (
        np.ascontiguousarray(each.swapaxes(1, 2) if transpose else each).astype(dtype) for each in matrices
    )
    given = problem.x, gate_up, down, plan.row_probs
    leaves = [on_gpu(each, gradient=True) for each in given]
    maps = plan_tensors(run, problem, on_gpu(problem.probs))
    attributes = transpose, True, True, True, True, True
    out, _ = run("pmo_moe_mlp", *leaves, maps[1], maps[2], maps[6], maps[7], *attributes)
    d_out = problem.floats(problem.T, 13)
    backward([out], [on_gpu(d_out)])

    x, gate_up, down = (each.astype(np.float64) for each in given[:3])
    operands = x, plan, gate_up, down, plan.row_probs
    expected, _ = reference.moe_mlp(*operands, transpose=transpose)
    due = reference.moe_mlp_backward(d_out.astype(np.float64), *operands, transpose=transpose)
    made = [on_host(each, dtype) for each in (out, *(leaf.grad for leaf in leaves[:3]))]
    made.append(on_host(leaves[3].grad, np.dtype(np.float32)))
    for got, wanted in zip(made, (expected, due.x, due.gate_up, due.down, due.weights), strict=True):
        error = np.linalg.norm(got.astype(np.float64) - wanted)
        assert error <= (3e-2 if dtype == BFLOAT16 else 4e-3) * np.linalg.norm(wanted)
