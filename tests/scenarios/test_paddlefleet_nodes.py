# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The nodes of PaddleFleet's expert layers train a router and experts as a dense formulation does."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import Tensor

import paddle_moe_ops
from paddle_moe_ops import patched_paddle
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.compat import incubate_gemm
from tests.pairwise import pairwise

from .fleet_nodes import Functions, Gemms, Mlp, MlpByExpert, MlpByRows, MlpLayer, Pieces, Routing

H, I, E, K = 128, 24, 5, 3  # noqa: E741
NAMES = "out", "x", "router", "w1", "w2"  # of the arrays that a run returns
IDLE = 2  # the expert that no token chooses
IMPORTED = Functions(paddle_moe_ops.moe_permute, paddle_moe_ops.moe_unpermute, incubate_gemm.batched_gemm)
NODES: dict[str, Any] = {
    "in one piece": Mlp,
    "pieces of one row": (MlpByExpert, Pieces(1, None)),
    "pieces of rows": (MlpByExpert, Pieces(7, None)),
    "whole experts": (MlpByExpert, Pieces(2**20, None)),
    "sums of one token": (MlpByExpert, Pieces(9, 1)),
    "sums of some tokens": (MlpByExpert, Pieces(9, 10)),
    "rows of several experts": (MlpByRows, Pieces(11, None)),
    "rows of several experts, sums of some tokens": (MlpByRows, Pieces(64, 8)),
}


class Model(NamedTuple):
    """Parameters in float32: a router [H, E], experts [E, H, 2I] and [E, I, H]."""

    router: Tensor
    w1: Tensor
    w2: Tensor

    @classmethod
    def make(cls, rng: np.random.Generator) -> Model:
        shapes = {"router": (H, E), "w1": (E, H, 2 * I), "w2": (E, I, H)}
        return cls(**{name: paddle.to_tensor(_normal(rng, shape) / 8) for name, shape in shapes.items()})

    def copies(self) -> Model:
        copies = Model(*(each.clone() for each in self))
        for each in copies:
            each.stop_gradient = False
        return copies


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


class Batch(NamedTuple):
    """Tokens [T, H], the gradient of their outputs, and the slots [T, K] whose expert is on this rank."""

    x: Tensor
    d_out: Tensor
    is_here: Tensor


def batch_of(rng: np.random.Generator, num_tokens: int, dtype: str, share: float = 0.7) -> Batch:
    shape = num_tokens, H
    x, d_out = (paddle.to_tensor(_normal(rng, shape)).astype(dtype) for _ in range(2))
    return Batch(x, d_out, paddle.to_tensor(rng.random((num_tokens, K)) < share))


def choose(router: Tensor, x: Tensor, is_here: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and probabilities [T, K]; no token chooses the idle expert."""
    logits = paddle.matmul(x.astype("float32"), router) - 100.0 * F.one_hot(paddle.to_tensor(IDLE), E)
    probs, ids = paddle.topk(F.softmax(logits), K)
    return paddle.where(is_here, ids.astype("int32"), paddle.full_like(ids, -1).astype("int32")), probs


class Step:
    """A forward pass of nodes; `gradients` runs the backward pass."""

    def __init__(self, functions: Functions, node: Any, model: Model, batch: Batch, alignment: int) -> None:
        self.model, self.x, self.d_out = model.copies(), batch.x.detach(), batch.d_out
        self.x.stop_gradient = False
        ids, probs = choose(self.model.router, self.x, batch.is_here)
        counts = np.bincount(ids.numpy()[ids.numpy() >= 0], minlength=E).tolist()
        kind, *pieces = node if isinstance(node, tuple) else (node,)
        weights = [weight.detach().astype(batch.x.dtype) for weight in (self.model.w1, self.model.w2)]
        self.gemms = Gemms(functions, *weights)
        routing = Routing(ids, probs.detach(), counts, alignment)
        self.out = MlpLayer.apply(self.x, probs, kind(functions, self.gemms, routing, *pieces))

    def gradients(self) -> list[np.ndarray]:
        """The output and the gradients of x, router, w1 and w2."""
        paddle.autograd.backward([self.out], [self.d_out])
        assert [self.out.dtype, self.x.grad.dtype] == [self.x.dtype, self.x.dtype]
        found = self.out, self.x.grad, self.model.router.grad, *self.gemms.main_grad
        return [to_numpy(each.astype("float32")) for each in found]


def run_nodes(functions: Functions, node: Any, model: Model, batch: Batch, alignment: int) -> list[np.ndarray]:
    return Step(functions, node, model, batch, alignment).gradients()


def run_dense(model: Model, batch: Batch) -> list[np.ndarray]:
    """The same from every expert on every token, in float32."""
    model, x = model.copies(), batch.x.detach()
    x.stop_gradient = False
    rounded = [each.astype(x.dtype).astype("float32") for each in model[1:]]
    ids, probs = choose(model.router, x, batch.is_here)
    out = paddle.zeros([x.shape[0], H])
    for expert in range(E):
        gate, up = paddle.matmul(x.astype("float32"), rounded[0][expert]).chunk(2, axis=-1)
        weight = (probs * (ids == expert).astype("float32")).sum(-1, keepdim=True)
        out = out + weight * paddle.matmul(F.silu(gate) * up, rounded[1][expert])
    paddle.autograd.backward([out], [batch.d_out.astype("float32")])
    return [to_numpy(each.astype("float32")) for each in (out, x.grad, *(each.grad for each in model))]


@pytest.fixture
def functions(request):
    """Paddle's own functions on this package, or the package's."""
    if request.param == "imported":
        yield IMPORTED
        return
    pair = paddle.nn.functional.moe_permute, paddle.nn.functional.moe_unpermute
    with patched_paddle(("permute", "gemm")):
        yield Functions(*pair, paddle.incubate.nn.functional.batched_gemm)


def assert_same(got: list[np.ndarray], expected: list[np.ndarray], dtype: str) -> None:
    for name, each, wanted in zip(NAMES, got, expected, strict=False):
        limit = (2.0**-5 if dtype == "bfloat16" else 1e-5) * max(np.abs(wanted).max(initial=0), 1e-3)
        np.testing.assert_allclose(each, wanted, rtol=0, atol=limit, err_msg=name)


AXES = {"alignment": [1, 128], "functions": ["patched", "imported"]}
every_pair = functools.partial(pairwise, indirect=["functions"], others_are_slow=True)


@pytest.mark.sampled(2)
@every_pair({"node": NODES, "dtype": ["float32", "bfloat16"], **AXES})
def test_gradients_are_those_of_a_dense_layer(alignment, node, dtype, functions, rng):
    model, batch = Model.make(rng), batch_of(rng, 37, dtype)
    assert_same(run_nodes(functions, node, model, batch, alignment), run_dense(model, batch), dtype)


SIZES = {"no token": (0, 1.0), "one token": (1, 1.0), "no token here": (9, 0.0), "many": (1025, 0.3)}


@every_pair(
    {
        "num_tokens, share": SIZES,
        "name": ["in one piece", "whole experts", "sums of some tokens", "rows of several experts"],
        **AXES,
    }
)
def test_sizes(alignment, name, num_tokens, share, functions, rng):
    node = NODES[name]
    if num_tokens > 1000 and isinstance(node, tuple):
        node = node[0], Pieces(257, node[1].tokens and 100)
    model, batch = Model.make(rng), batch_of(rng, num_tokens, "float32", share)
    assert_same(run_nodes(functions, node, model, batch, alignment), run_dense(model, batch), "float32")


def assert_same_bits(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for name, each, wanted in zip(NAMES, got, expected, strict=False):
        np.testing.assert_array_equal(each, wanted, err_msg=name)


SOME_NODES = {name: NODES[name] for name in ("in one piece", "sums of some tokens", "rows of several experts")}
some_nodes = pairwise({"node": SOME_NODES, "dtype": ["float32", "bfloat16"]})


@pytest.mark.sampled(2)
@some_nodes
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in, first out", "last in, first out"])
def test_two_forward_passes_before_their_backward_passes(order, node, dtype, rng):
    """Micro-batches of a pipeline: each has the bits that it has alone."""
    model, batches = Model.make(rng), [batch_of(rng, 37, dtype), batch_of(rng, 9, dtype)]
    alone = [run_nodes(IMPORTED, node, model, batch, 8) for batch in batches]
    steps = [Step(IMPORTED, node, model, batch, 8) for batch in batches]
    for number in order:
        assert_same_bits(steps[number].gradients(), alone[number])


@some_nodes
def test_tokens_and_gradients_in_views_of_buffers(node, dtype, rng):
    model, batch = Model.make(rng), batch_of(rng, 37, dtype)
    expected = run_nodes(IMPORTED, node, model, batch, 1)
    buffer = paddle.zeros([2, 40, H + 3]).astype(dtype)
    views = [buffer[i, 2:39, 1 : H + 1] for i in range(2)]
    for view, values in zip(views, batch, strict=False):
        paddle.assign(values, view)
    before = buffer.clone()
    assert not views[0].is_contiguous()
    got = run_nodes(IMPORTED, node, model, batch._replace(x=views[0], d_out=views[1]), 1)
    assert_same_bits(got, expected)
    assert bool((buffer.astype("float32") == before.astype("float32")).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 10, 64])
def test_sums_in_parts_of_one_buffer(size, dtype, rng):
    """Sub-batches that are slices of the layer's output, with rows of one expert after the other."""
    model, batch = Model.make(rng), batch_of(rng, 37, dtype)
    buffer = paddle.zeros([37, H], dtype)

    class InBuffer(MlpByExpert):
        def _nothing(self, x: Tensor) -> Any:
            return [buffer[start : start + size] for start in range(0, 37, size)]

        def backward(self, d_out: Tensor) -> Any:
            raise AssertionError

    step = Step(IMPORTED, (InBuffer, Pieces(7, size)), model, batch, 128)
    np.testing.assert_array_equal(*(to_numpy(each.astype("float32")) for each in (buffer, step.out)))
    assert_same([to_numpy(buffer.astype("float32"))], run_dense(model, batch)[:1], dtype)


@some_nodes
def test_forward_passes_without_gradients(node, dtype, rng):
    model, batch = Model.make(rng), batch_of(rng, 37, dtype)
    expected = Step(IMPORTED, node, model, batch, 128).out
    with paddle.no_grad():
        got = Step(IMPORTED, node, model, batch, 128).out
    assert got.is_leaf
    np.testing.assert_array_equal(*(to_numpy(each.astype("float32")) for each in (got, expected)))


@pytest.mark.parametrize("name", ["in one piece", "sums of some tokens", "rows of several experts"])
def test_training_follows_that_of_a_dense_layer(name, rng):
    models = [Model.make(rng)] * 2
    for _ in range(4):
        batch = batch_of(rng, 63, "float32")
        runs = [run_nodes(IMPORTED, NODES[name], models[0], batch, 8), run_dense(models[1], batch)]
        assert_same(*runs, "float32")
        models = [
            Model(*(weight - 1e-3 * paddle.to_tensor(grad) for weight, grad in zip(model, run[2:], strict=True)))
            for model, run in zip(models, runs, strict=True)
        ]
