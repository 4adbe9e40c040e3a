# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs whose arguments are views of buffers that each step writes anew, as input buffers of CUDA graphs are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import moe_mlp, moe_permute, moe_unpermute, route, use_backend
from paddle_moe_ops.routing import calculate_topk
from paddle_moe_ops.testing.equality import assert_bits_equal

pytestmark = [pytest.mark.long, pytest.mark.cpu_only, pytest.mark.usefixtures("place")]

T, H, I, E, K = 7, 24, 7, 3, 2  # noqa: E741
STEPS = 2
# Backend, dtype and arithmetic of products: Triton has kernels of half precision only.
WAYS = {
    "compiled": ("compiled", "float32", None),
    "compiled, float8": ("compiled", "float32", "fp8_1x128"),
    "reference": ("reference", "float32", None),
    "triton": ("triton", "float16", None),
    "triton, float8": ("triton", "float16", "fp8_1x128"),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def way(request) -> Iterator[tuple[str, dict[str, str | None]]]:
    backend, dtype, compute = request.param
    if backend == "triton":
        request.getfixturevalue("interpreted")
    with use_backend(backend):
        yield dtype, {"compute": compute}


def eighths(rng, *shape, dtype="float32"):
    """Numbers of few bits: products and sums of them are exact."""
    return paddle.to_tensor((rng.integers(-4, 5, shape) / 8).astype(dtype))


def some_ids(rng):
    return paddle.to_tensor(np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype("int32"))


def parameter(value):
    made = paddle.create_parameter(value.shape, value.dtype)
    made.set_value(value)
    return made


def step(*parameters):
    """SGD, for which Paddle has no kernel of float16 on CPUs; no change of version, as an optimizer."""
    for each in parameters:
        each.set_value((each.astype("float32") - 0.25 * each.grad.astype("float32")).astype(each.dtype))
        each.clear_gradient(False)


def trained(rng, way, layout, wrap=lambda run, *tensors: run(*tensors)):
    """Losses and parameters of three steps on tokens, ids and probabilities that lie in buffers."""
    dtype, options = way
    gate_up, down = parameter(eighths(rng, E, H, 2 * I, dtype=dtype)), parameter(eighths(rng, E, I, H, dtype=dtype))
    buffers = [paddle.zeros([T, H + 8], dtype), paddle.zeros([T, 3 * K], "int32"), paddle.zeros([T, K + 1])]
    views = [buffer[:, :width] for buffer, width in zip(buffers, (H, K, K), strict=True)]
    results = []
    for _ in range(STEPS):
        data = eighths(rng, T, H, dtype=dtype), some_ids(rng), eighths(rng, T, K)
        for buffer, new in zip(buffers, data, strict=True):
            buffer[:, : new.shape[1]] = new
        x, ids, probs = views if layout == "views" else data
        x.stop_gradient = False
        plan = route(ids, num_experts=E)
        out = wrap(lambda x, probs, plan=plan: moe_mlp(x, plan, probs, gate_up, down, **options), x, probs)
        (out.astype("float32") ** 2).mean().backward()
        step(gate_up, down)
        results += [out, x.grad.clone(), gate_up.clone(), down.clone()]
        x.clear_gradient(False)
        assert [each.data_ptr() for each in views] == [each.data_ptr() for each in buffers]
    return results


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recomputes", [None, False, True], ids=["kept", "recompute by hooks", "reentrant recompute"])
def test_training_over_a_padded_input_buffer(way, recomputes):
    def wrap(run, *tensors):
        return run(*tensors) if recomputes is None else recompute(run, *tensors, use_reentrant=recomputes)

    results = [trained(np.random.default_rng(3), way, layout, wrap) for layout in ("views", "own tensors")]
    for got, expected in zip(*results, strict=True):
        assert_bits_equal(got, expected)
    assert len({each.numpy().tobytes() for each in results[0]}) == 4 * STEPS, "each step changes everything"


def test_inference_through_transposed_views_of_parameters(way, rng):
    dtype, options = way
    gate_up, down = parameter(eighths(rng, E, 2 * I, H, dtype=dtype)), parameter(eighths(rng, E, H, I, dtype=dtype))
    views = gate_up.transpose([0, 2, 1]), down.transpose([0, 2, 1])
    plan, outputs = route(some_ids(rng), num_experts=E), []

    def check():
        x = eighths(rng, T, H, dtype=dtype)
        with paddle.no_grad():
            got, expected = (
                moe_mlp(x, plan, None, *views, **options),
                moe_mlp(x, plan, None, *(each.clone() for each in views), **options),
            )
        assert_bits_equal(got, expected)
        assert [each.data_ptr() for each in views] == [gate_up.data_ptr(), down.data_ptr()]
        outputs.append(got)

    check()
    gate_up.set_value(eighths(rng, *gate_up.shape, dtype=dtype))
    check()
    moe_mlp(eighths(rng, T, H, dtype=dtype), plan, None, gate_up, down, transpose=True, **options).sum().backward()
    step(gate_up, down)
    check()


@pytest.mark.parametrize("chosen", ["automatic", "compiled", "reference", "triton"])
def test_routing_of_ids_in_the_columns_of_a_buffer(chosen, rng, request):
    if chosen == "triton":
        request.getfixturevalue("interpreted")
    buffer, logits = paddle.zeros([T, 3 * K], "int32"), paddle.zeros([T, E + 3])
    ids, gating = buffer[:, K : 2 * K], logits[:, 1 : 1 + E]
    with contextlib.nullcontext() if chosen == "automatic" else use_backend(chosen), paddle.no_grad():
        for _ in range(STEPS):
            new, scores = some_ids(rng), eighths(rng, T, E)
            buffer[:, K : 2 * K], logits[:, 1 : 1 + E] = new, scores
            x, probs = eighths(rng, T, H), eighths(rng, T, K)
            results = []
            for given, chosen in ((ids, gating), (new, scores)):
                plan = route(given, num_experts=E, buffer_size=T * K)
                rows, rowmap, row_probs, _ = moe_permute(x, None, given, probs, E, None, 1)
                back, _ = moe_unpermute(rows, rowmap, given, row_probs, T, E)
                results.append([plan.row_to_slot, rows, rowmap, back, *calculate_topk(chosen, K, False, False)[:2]])
            for got, expected in zip(*results, strict=True):
                assert_bits_equal(got, expected)


@pytest.mark.parametrize("part", ["columns", "rows"])
def test_a_buffer_that_is_written_between_two_forwards_and_their_backward(way, part, rng):
    """Gradients are those of the tokens that the call read, or a call that kept no copy of them refuses to run back."""
    dtype, options = way
    plan = route(some_ids(rng), num_experts=E)
    weights = [parameter(eighths(rng, E, H, 2 * I, dtype=dtype)), parameter(eighths(rng, E, I, H, dtype=dtype))]
    buffer = paddle.zeros([T, H + 8] if part == "columns" else [T + 2, H], dtype)
    outputs, data = [], [eighths(rng, T, H, dtype=dtype) for _ in range(2)]
    for new in data:
        buffer[:T, :H] = new
        outputs.append(moe_mlp(buffer[:, :H] if part == "columns" else buffer[:T], plan, None, *weights, **options))

    def gradients_of(out):
        out.backward(paddle.ones_like(out))
        found = [each.grad.clone() for each in weights]
        for each in weights:
            each.clear_gradient(False)
        return found

    for new, out in zip(data, outputs, strict=True):
        expected = gradients_of(moe_mlp(new, plan, None, *weights, **options))
        may_refuse = part == "rows" and out is outputs[0]
        with contextlib.suppress(OSError, RuntimeError) if may_refuse else contextlib.nullcontext():
            for got, wanted in zip(gradients_of(out), expected, strict=True):
                assert_bits_equal(got, wanted)
