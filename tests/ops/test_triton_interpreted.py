# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton backend on Paddle's CPU tensors, its kernels in Triton's interpreter: the bits of the oracle's backend.

On a GPU all tests of this directory run on the backend itself, with --backend=triton.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle.jit.marker import unified

from paddle_moe_ops import (
    dequantize_1x128,
    masked,
    moe_permute,
    moe_unpermute,
    permute,
    quantize_1x128,
    quantized_experts,
    reference,
    route,
    sort_chunks,
    unpermute,
    use_backend,
)
from paddle_moe_ops.backends import OPERATORS, compiled, resolve
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.routing import calculate_topk
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.interpreting import SHAPE, gradients, on_both
from tests.ops.problems import backward, every_kind, make_problem, ordinary, tensor
from tests.ops.test_amp_recompute import ALL, FLOAT32, check_recompute, plan_and_verbs
from tests.params import FLOAT8_DTYPES, SUM_DTYPES
from tests.routers import deepseek_v3

from ..triton.problems import halfway

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def problem(rng):
    return make_problem(rng, SHAPE)


@pytest.fixture
def plan(problem):
    with use_backend("reference"):
        return route(tensor(problem.ids, "cpu"), tensor(problem.probs, "cpu"), **problem.route_arguments)


@pytest.mark.parametrize("buffer", [-1, 20])
def test_route(interpreted, problem, buffer):
    ids, probs = tensor(problem.ids, "cpu"), tensor(problem.probs, "cpu")
    for options in ({}, {"duplicates": "each"}, {"validate": True} if buffer < 0 else {"validate": False}):
        arguments = {**problem.route_arguments, "buffer_size": buffer, **options}
        for actual, expected in on_both(lambda: route(ids, probs, **arguments)):  # noqa: B023
            assert_bits_equal(actual, expected) if isinstance(actual, paddle.Tensor) else None
    assert "route_kernel" in interpreted.launches or "maps_kernel" in interpreted.launches


def test_route_with_counts_and_from_a_mask(interpreted, problem, rng):
    ids = tensor(problem.ids, "cpu")
    counts = problem.plan().routed_per_expert.tolist()
    mask = tensor(rng.random((SHAPE.T, SHAPE.E)) < 0.5, "cpu")
    for call in (
        lambda: route(ids, tokens_per_expert=counts, **problem.route_arguments)[:5],
        lambda: route(mask, topk=2, validate=False)[:5],
    ):
        for actual, expected in on_both(call):
            assert_bits_equal(actual, expected)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=["both", "rows", "probs"])
@pytest.mark.parametrize("kind", ["plain", "by row", "by slot"])
def test_permute_and_unpermute_with_gradients(interpreted, problem, plan, rng, kind, wanted):
    y = ordinary(rng, (plan.num_rows, SHAPE.H))
    weights = [rng.random((SHAPE.T, SHAPE.H), np.float32)]
    probs = problem.probs if kind == "by slot" else problem.plan().row_probs

    def call(y, p):
        return [unpermute(y, plan, None if kind == "plain" else p)]

    for actual, expected in on_both(lambda: call(tensor(y, "cpu"), tensor(probs, "cpu"))):
        assert_bits_equal(actual, expected)
    if wanted[0] or kind != "plain":
        for actual, expected in on_both(lambda: gradients(call, (y, probs), weights, wanted)):
            np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def apart(array, count):
    """A tensor of the first columns, whose rows lie apart."""
    return tensor(array, "cpu")[:, :count]


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "by row", "by slot"])
def test_unpermute_of_rows_that_lie_apart(interpreted, problem, plan, rng, kind, dtype):
    wide = every_kind(rng, (plan.num_rows, SHAPE.H + 3), dtype)
    probs = problem.probs if kind == "by slot" else problem.plan().row_probs
    weights = None if kind == "plain" else tensor(probs, "cpu")
    for actual, expected in on_both(lambda: [unpermute(apart(wide, SHAPE.H), plan, weights)]):
        assert_bits_equal(actual, expected)
    rowmap = tensor(reference.plan_to_rowmap(problem.plan()), "cpu")
    arguments = rowmap, tensor(problem.ids, "cpu"), tensor(problem.plan().row_probs, "cpu"), SHAPE.T, SHAPE.E
    for actual, expected in on_both(lambda: moe_unpermute(apart(wide, SHAPE.H), *arguments)):
        assert_bits_equal(actual, expected)
    assert interpreted.launches.count("unpermute_kernel") == 2


def test_scales_and_logits_and_chunks_that_lie_apart(interpreted, problem, plan, rng):
    x, scale = tensor(every_kind(rng, (SHAPE.T, 8), FLOAT8_DTYPES[0]), "cpu"), every_kind(rng, (SHAPE.T, 5))
    ids, probs = tensor(problem.ids, "cpu"), tensor(problem.probs, "cpu")
    gating, chunked = ordinary(rng, (SHAPE.T, 9)), every_kind(rng, (14, 9))
    chunks = [paddle.to_tensor(each) for each in CHUNKS]
    for call in (
        lambda: permute(x, plan, apart(scale, 2)),
        lambda: moe_permute(x, apart(scale, 2), ids, probs, SHAPE.E, None, SHAPE.A),
        lambda: calculate_topk(apart(gating, 7), 2, False, False, False, True)[1:],
        lambda: sort_chunks(apart(chunked, 7), *chunks)[::2],
    ):
        for actual, expected in on_both(call):
            assert_bits_equal(actual, expected)


@pytest.mark.parametrize("dtype", SUM_DTYPES[1:], ids=str)
def test_sums_and_values_halfway_between_two_numbers_get_the_even_one(interpreted, dtype):
    """Through a plan, a row map and a mask, and rows that come back from float8."""
    rows, expected = halfway(dtype)
    rows = tensor(rows, "cpu")
    plan = route(tensor(np.arange(3, dtype=np.int32)[None], "cpu"), num_experts=3)
    ids, probs = tensor(np.arange(3, dtype=np.int32)[None], "cpu"), paddle.ones([3])
    row_id_map, _ = masked.make_row_id_map(paddle.ones([1, 3], "bool"))
    codes = tensor(np.array([[1, -1, 3]], FLOAT8_DTYPES[0]), "cpu")
    step = float(ml_dtypes.finfo(dtype).eps)
    with use_backend("triton"):
        sums = (
            unpermute(rows, plan),
            unpermute(rows, plan, probs),
            moe_unpermute(rows, ids, ids, probs, 1, 3, using_weighted_combine=True)[0],
            masked.unpermute_with_mask_map(rows, row_id_map),
        )
        values = dequantize_1x128(codes, paddle.full([1, 1], 1 + step / 2), dtype=dtype.name)
    assert len(interpreted.launches) >= 5
    for out in sums:
        assert_bits_equal(out, expected[None])
    assert_bits_equal(values, np.array([[1, -1, 3 + 2 * step]]).astype(dtype))


def test_permute_with_gradient_scale_and_strides(interpreted, problem, plan, rng):
    x = every_kind(rng, (SHAPE.T, SHAPE.H + 3))
    scale = tensor(rng.random((SHAPE.T, 4), np.float32), "cpu")
    for actual, expected in on_both(lambda: permute(tensor(x, "cpu")[:, : SHAPE.H], plan, scale)):
        assert_bits_equal(actual, expected)
    x, weights = ordinary(rng, (SHAPE.T, SHAPE.H)), [rng.random((plan.num_rows, SHAPE.H), np.float32)]
    for actual, expected in on_both(lambda: gradients(lambda x: permute(x, plan)[:1], [x], weights, [True])):
        assert_bits_equal(actual, expected)


def test_moe_permute_with_gradients(interpreted, problem, rng):
    ids, shape = tensor(problem.ids, "cpu"), problem.shape
    rows = problem.plan().num_rows

    def call(x, p, **options):
        return moe_permute(x, None, ids, p, shape.E, None, shape.A, **options)

    arrays = problem.x, problem.probs
    for options in ({"return_expert_indices": True, "return_overflow": True}, {"do_gather": False}):
        outputs = on_both(lambda: call(*(tensor(each, "cpu") for each in arrays), **options))  # noqa: B023
        for actual, expected in outputs:
            assert_bits_equal(actual, expected)
    weights = [rng.random((rows, shape.H), np.float32), rng.random(rows, np.float32)]
    for actual, expected in on_both(lambda: gradients(lambda *a: call(*a)[:3:2], arrays, weights, (True, True))):
        assert_bits_equal(actual, expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("compat", "column"), [(None, False), (None, True), ("paddle", False)])
def test_moe_unpermute_with_gradients(interpreted, problem, rng, weighted, compat, column):
    plan, shape = problem.plan(), problem.shape
    rowmap, ids = tensor(reference.plan_to_rowmap(plan), "cpu"), tensor(problem.ids, "cpu")
    arrays = ordinary(rng, (plan.num_rows, shape.H)), plan.row_probs[:, None] if column else plan.row_probs

    def call(y, p):
        options = {"using_weighted_combine": weighted, "compat": compat}
        return moe_unpermute(y, rowmap, ids, p, shape.T, shape.E, **options)

    for actual, expected in on_both(lambda: call(*(tensor(each, "cpu") for each in arrays))):
        assert_bits_equal(actual, expected)
    weights = [rng.random((shape.T, shape.H), np.float32), rng.random((shape.T, shape.K), np.float32)]
    for wanted in ((True, True), (False, True)):
        for actual, expected in on_both(lambda: gradients(call, arrays, weights, wanted)):  # noqa: B023
            np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


CHUNKS = [4, 0, 3, 5], [2, 3, 1, 0]


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=["both", "rows", "probs"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_sort_chunks_with_gradients(interpreted, rng, dtype, wanted):
    chunks = [paddle.to_tensor(each) for each in CHUNKS]
    x, probs = every_kind(rng, (14, 9), dtype), every_kind(rng, (14,))
    for actual, expected in on_both(lambda: sort_chunks(tensor(x, "cpu"), *chunks, tensor(probs, "cpu"))):
        assert_bits_equal(actual, expected)
    differentiable = slice(0, 2) if dtype == "float32" else slice(1, 2)
    if not any(wanted[differentiable]):
        return
    weights = [rng.random(each.shape, np.float32) for each in (x, probs)][differentiable]
    for actual, expected in on_both(
        lambda: gradients(lambda x, p: sort_chunks(x, *chunks, p)[:2][differentiable], (x, probs), weights, wanted)
    ):
        assert_bits_equal(actual, expected)
    assert "chunks_kernel" in interpreted.launches


def test_sort_chunks_alone_and_its_map(interpreted, rng):
    sizes, order = (paddle.to_tensor(each) for each in CHUNKS)
    x = every_kind(rng, (12, 6))
    for validate in (False, True):
        for actual, expected in on_both(
            lambda: (
                *sort_chunks(tensor(x, "cpu")[:, 1:4], sizes, order, validate=validate)[::2],  # noqa: B023
                masked.make_chunk_sort_map(sizes, order, validate=validate),  # noqa: B023
                masked.make_chunk_sort_map(sizes, order, 20, validate=validate),  # noqa: B023
            )
        ):
            assert_bits_equal(actual, expected)


def test_bad_chunks_raise_under_validation_and_are_a_permutation_without(interpreted):
    sizes, order = paddle.to_tensor([2, -5, 9, 1]), paddle.to_tensor([7, 2, 2, -1])
    x = paddle.arange(6, dtype="float32").unsqueeze(-1)
    with use_backend("triton"):
        assert sort_chunks(x, sizes, order, validate=False)[2].tolist() == [4, 5, 0, 1, 2, 3]
        with pytest.raises(ValueError, match=r"^sort_chunks: split_sizes must hold no negative numbers"):
            sort_chunks(x, sizes, order, validate=True)
        with pytest.raises(ValueError, match=r"^make_chunk_sort_map: sorted_indices must hold chunks in \[0, 4\)"):
            masked.make_chunk_sort_map(sizes.abs(), order, 20, validate=True)
        for bad in (sizes, paddle.to_tensor([2**30, 2**30, 0, 0])):
            with pytest.raises(ValueError, match=r"^make_chunk_sort_map: split_sizes must add up to less than 2\^31"):
                masked.make_chunk_sort_map(bad, order, validate=False)


@pytest.mark.parametrize("quantize", ["fp8_1x128", "fp8_1x128_ue8m0"])
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_rows_and_back(interpreted, plan, rng, dtype, layout, quantize):
    wide = every_kind(rng, (SHAPE.T, 203), dtype)

    def call():
        x = tensor(wide, "cpu")[:, 1:201]
        codes, scales = quantize_1x128(x, ue8m0=quantize.endswith("ue8m0"), scale_layout=layout, amax_min=0.5)
        rows = permute(x, plan, quantize=quantize, scale_layout=layout)
        values = dequantize_1x128(*rows, scale_layout=layout, dtype=getattr(paddle, dtype))
        return codes, scales, *rows, values

    for actual, expected in on_both(call):
        assert_bits_equal(actual, expected)
        assert actual.stop_gradient
    assert interpreted.launches == ["quantize_kernel"] * 2 + ["dequantize_kernel"]


def test_experts_on_quantised_rows_with_gradients(interpreted, plan, rng):
    weights = [rng.random((plan.num_rows, SHAPE.H), np.float32)]
    x, factor = ordinary(rng, (SHAPE.T, SHAPE.H)), ordinary(rng, (SHAPE.H,))

    def rows(codes, scales):
        return dequantize_1x128(codes, scales, scale_layout="col", dtype=paddle.float32)

    def experts(codes, scales, factor):
        return rows(codes, scales) * factor

    def vjp(d_out, codes, scales, factor):
        return d_out * factor, (d_out * rows(codes, scales)).sum(axis=0)

    def call(x, factor):
        return [quantized_experts(x, plan, experts, vjp, factor, scale_layout="col")]

    for actual, expected in on_both(lambda: call(tensor(x, "cpu"), tensor(factor, "cpu"))):
        assert_bits_equal(actual, expected)
    for actual, expected in on_both(lambda: gradients(call, (x, factor), weights, (True, True))):
        assert_bits_equal(actual, expected)
    assert "unpermute_kernel" in interpreted.launches


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("with_scores", [False, True])
def test_calculate_topk_with_gradients(interpreted, rng, with_scores, dtype):
    router = deepseek_v3(dtype, 3, rng)
    gating, bias = tensor(router.gating, "cpu", gradient=True), tensor(router.correction_bias, "cpu", gradient=True)
    options = {"correction_bias": bias, "scaling_factor": router.scaling_factor, **router.groups}
    with use_backend("triton"):
        weights, ids, scores = calculate_topk(gating, *router.arguments, return_scores=True, **options)
        if not with_scores:
            weights, ids = calculate_topk(gating, *router.arguments, **options)
    router.check(*map(to_numpy, (weights, ids, scores)))
    d_weights, d_scores = (rng.standard_normal(each.shape).astype(dtype) for each in (weights, scores))
    outputs = [weights, scores] if with_scores else [weights]
    backward(outputs, [d_weights, d_scores][: len(outputs)])
    router.check_gradient(to_numpy(gating.grad), ids.numpy(), d_weights, d_scores if with_scores else None)
    assert bias.grad is None
    assert interpreted.launches[-1] == "topk_backward_kernel"


def test_bad_data_raise_under_validation_and_count_as_none_without(interpreted):
    ids = tensor(np.array([[0, 9], [1, 1]], np.int32), "cpu")
    with use_backend("triton"):
        with pytest.raises(ValueError, match=r"route: routing must hold expert ids in \[-1, 3\)"):
            route(ids, num_experts=3, validate=True)
        assert route(ids, num_experts=3, validate=False).tokens_per_expert.tolist() == [1, 1, 0]


@pytest.mark.parametrize("validate", [None, True])
def test_row_id_maps_there_and_back_with_gradients(interpreted, rng, validate):
    tokens, experts = SHAPE.T, SHAPE.E
    mask = rng.random((tokens, experts)) < 0.5
    probs = rng.random((tokens, experts), np.float32)
    x = ordinary(rng, (tokens, SHAPE.H))
    counts = mask.sum(0).tolist()
    d_out = rng.standard_normal((tokens, SHAPE.H)).astype(np.float32)

    def call(x, probs):
        rows, row_probs, row_id_map, pad_offsets, _ = masked.moe_permute_and_pad_with_probs(
            x, probs, tensor(mask, "cpu"), counts, 4, validate=validate
        )
        y = rows * row_probs.unsqueeze(-1)
        out, by_pair = masked.unpermute_with_mask_map(
            y, row_id_map, probs, pad_offsets, permuted_probs=row_probs, validate=validate
        )
        return [out, by_pair, row_id_map]

    def outputs():
        inputs = tensor(x, "cpu", gradient=True), tensor(probs, "cpu", gradient=True)
        out, by_pair, row_id_map = call(*inputs)
        backward([out, by_pair], [d_out, probs])
        return [out, by_pair, row_id_map, inputs[0].grad]

    for actual, expected in on_both(outputs):
        assert_bits_equal(actual, expected)
    assert {"make_row_id_map_kernel", "read_row_id_map_kernel"} <= set(interpreted.launches)


def test_bad_row_id_maps_raise_on_request(interpreted):
    rows = tensor(np.ones((3, 4), np.float32), "cpu")
    repeated = tensor(np.array([[0, -1, 1, -1, 1], [0, -1, 0, -1, 1]], np.int32), "cpu")
    beyond = tensor(np.array([[0, -1, 1, -1, 1], [3, -1, 0, -1, 1]], np.int32), "cpu")
    with use_backend("triton"):
        with pytest.raises(
            ValueError, match=r"^unpermute_with_mask_map: row_id_map must name a row at most once, but "
        ):
            masked.unpermute_with_mask_map(rows, repeated, validate=True)
        with pytest.raises(ValueError, match=r"^unpermute_with_mask_map: row_id_map must hold rows in \[-1, 3\), but "):
            masked.unpermute_with_mask_map(rows, beyond, validate=True)
        assert masked.unpermute_with_mask_map(rows, repeated, validate=False).tolist() == [[1.0] * 4, [0.0] * 4]
        assert masked.unpermute_with_mask_map(rows, beyond, validate=False).tolist() == [[1.0] * 4, [0.0] * 4]


def test_graphs_run_the_compiled_operators(interpreted):
    seen = []

    @unified  # paddle.jit must not rewrite what it calls
    def look(ids):
        seen.append(resolve("route", ids).name)

    @paddle.jit.to_static(full_graph=True)
    def traced(ids):
        look(ids)
        return route(ids, num_experts=3).slot_to_row

    with use_backend("triton"):
        assert traced(paddle.to_tensor([[0, 2]], dtype="int32")).tolist() == [[0, 1]]
    assert seen == ["compiled"]
    assert interpreted.launches == []


@pytest.fixture
def no_compiled_kernels(monkeypatch):
    """As on a GPU that the compiled library has no kernels for."""

    def cannot_run_on(self, tensor):
        return "no kernels" if isinstance(tensor, paddle.Tensor) else None

    monkeypatch.setattr(compiled.CompiledBackend, "cannot_run_on", cannot_run_on)


def test_without_compiled_kernels_every_operator_runs_on_triton(interpreted, no_compiled_kernels, problem, rng):
    assert {resolve(operator, paddle.zeros([2, 2], "bfloat16")).name for operator in OPERATORS} == {"triton"}
    x, probs = tensor(problem.x, "cpu", gradient=True), tensor(problem.probs, "cpu", gradient=True)
    plan = route(tensor(problem.ids, "cpu"), probs, **problem.route_arguments)
    unpermute(permute(x, plan)[0], plan, plan.row_probs).sum().backward()
    assert {"permute_kernel", "unpermute_kernel", "unpermute_backward_kernel"} <= set(interpreted.launches)
    expected = np.where(problem.ids >= 0, problem.x.sum(axis=1, keepdims=True), 0)
    np.testing.assert_allclose(probs.grad.numpy(), expected, rtol=1e-5, atol=1e-5)
    with use_backend("paddle"):  # which has none of the others either
        assert resolve("route", x).name == "triton"


def test_without_compiled_kernels_graphs_still_take_the_compiled_operators(interpreted, no_compiled_kernels):
    assert resolve("route", paddle.static.InputSpec([2, 2], "int32")).name == "compiled"


def test_without_compiled_kernels_and_without_triton_the_error_names_both(no_compiled_kernels):
    text = r"^route: no backend can run it here: compiled: no kernels; triton: Triton kernels need .* use_backend\('ref"
    with pytest.raises(RuntimeError, match=text):
        route(paddle.zeros([2, 1], dtype="int32"), num_experts=1)


def test_tensors_in_host_memory_are_refused(monkeypatch):
    from paddle_moe_ops.triton.launch import paddle_device

    monkeypatch.setattr(paddle_device, "unavailable", lambda: None)
    text = r"route: the backend 'triton' chosen by use_backend cannot run here: .* but these are on Place\(cpu\)"
    with use_backend("triton"), pytest.raises(RuntimeError, match=text):
        route(paddle.zeros([2, 1], dtype="int32"), num_experts=1)


def test_rows_of_probability_zero_are_blank_and_keep_their_gradient(interpreted, rng):
    x, mask = rng.standard_normal((5, 12)).astype(np.float32), rng.random((5, 4)) < 0.7
    probs = (rng.random((5, 4)) * mask * (rng.random((5, 4)) < 0.5)).astype(np.float32)

    def call(x):
        row_id_map, num_out = masked.make_row_id_map(tensor(mask, "cpu"))
        arguments = row_id_map, num_out, tensor(probs, "cpu")
        return masked.permute_with_mask_map(x, *arguments, zero_prob_as_padding=True)[:1]

    for actual, expected in on_both(lambda: call(tensor(x, "cpu"))):
        assert_bits_equal(actual, expected)
    weights = [rng.standard_normal((int(mask.sum()), 12)).astype(np.float32)]
    for actual, expected in on_both(lambda: gradients(call, [x], weights, [True])):
        assert_bits_equal(actual, expected)


@pytest.mark.parametrize(
    "function",
    [plan_and_verbs, *(pytest.param(each, marks=pytest.mark.slow) for each in ALL if each != plan_and_verbs)],
)
def test_recompute_gives_the_same_gradients(interpreted, function, rng):
    with use_backend("triton"):
        check_recompute(function, True, FLOAT32, rng, "cpu")
    assert interpreted.launches
