# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""paddle._C_ops.moe_*_grad and moe_*_auto, patched, against the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.incubate.nn.functional as F
import pytest
from paddle import _C_ops

from paddle_moe_ops import patched_paddle
from paddle_moe_ops.reference import incubate as forward
from paddle_moe_ops.reference import incubate_backward as oracle
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dot_chain, dtype_tols
from tests.ops.problems import backward, ordinary, tensor
from tests.pairwise import pairwise_of
from tests.params import SUM_DTYPES

T, H, E, K = 23, 7, 6, 3
capacities = pytest.mark.parametrize("capacity", [0, 1, 4, T])
dtypes = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with patched_paddle("incubate"):
        yield


def assert_sums(got, expected, magnitude, what, chain=K):
    assert_close_sums(got, expected, magnitude, dtype_tols(expected.dtype, chain), what=what)


def gate_problem(rng, capacity, use_pad, num_tokens=T):
    """The slots of a dispatch; of those that are kept, some have weight 0, NaN or less, and take no part."""
    gate = rng.random((num_tokens, E)).astype(np.float32) + 0.1
    rows, weights, index, _, ids, _ = forward.moe_gate_dispatch(
        ordinary(rng, (num_tokens, H)), gate, None, K, capacity, use_pad
    )
    for number in (0.0, np.nan, -0.5):
        weights[rng.random(weights.shape) < 0.05] = number
    return len(rows), weights, index, ids


@pairwise_of(
    pytest.mark.parametrize("use_pad", [True, False], ids=["padded", "not padded"]),
    pytest.mark.parametrize("index_dtype", [np.int32, np.int64]),
    capacities,
    dtypes,
)
def test_gate_dispatch_grad(use_pad, index_dtype, capacity, dtype, rng, place, backend):
    num_rows, weights, index, ids = gate_problem(rng, capacity, use_pad)
    d_rows, d_weights = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (T, K))
    arrays = weights, index.astype(index_dtype), ids.astype(index_dtype), d_rows, d_weights
    got = _C_ops.moe_gate_dispatch_grad(*(tensor(each, place) for each in arrays), K, capacity, use_pad)
    experts = E if use_pad and capacity else max(num_rows // max(capacity, 1), ids.max() + 1)
    expected = oracle.moe_gate_dispatch_grad(*arrays, experts)
    magnitude = oracle.moe_gate_dispatch_grad(weights, index, ids, np.abs(d_rows), d_weights, experts)[0]
    assert_sums(got[0], expected[0], magnitude, "the gradient of x")
    assert_bits_equal(got[1], expected[1])
    assert all(each.stop_gradient for each in got)


@pairwise_of(pytest.mark.parametrize("world_size", [1, 2, 3]), capacities, dtypes)
def test_gate_dispatch_permute_grad(world_size, capacity, dtype, rng, place, backend):
    _, weights, index, ids = gate_problem(rng, capacity, True)
    d_rows = ordinary(rng, (E // world_size, world_size, capacity, H), dtype)
    arrays = weights, index, ids, d_rows, ordinary(rng, (T, K))
    got = _C_ops.moe_gate_dispatch_permute_grad(*(tensor(each, place) for each in arrays), K, capacity, world_size)
    expected = oracle.moe_gate_dispatch_permute_grad(*arrays)
    magnitude = oracle.moe_gate_dispatch_permute_grad(*arrays[:3], np.abs(d_rows), arrays[4])[0]
    assert_sums(got[0], expected[0], magnitude, "the gradient of x")
    assert_bits_equal(got[1], expected[1])


@pairwise_of(
    pytest.mark.parametrize("mode", ["padded", "not padded", "reverse"]),
    pytest.mark.parametrize("experts", [(0, E), (1, 4), (E - 1, E)], ids=["all", "some", "one without tokens"]),
    capacities,
    dtypes,
)
def test_partial_dispatch_grad(mode, experts, capacity, dtype, rng, place, backend):
    ids = rng.integers(-1, E, (T, K)).astype(np.int32)
    weights = 1 + rng.random((T, K)).astype(np.float32)
    options = capacity, E, mode == "padded", *experts
    of_slots = forward.moe_gate_dispatch_partial_nosoftmaxtopk(
        ordinary(rng, (T, H)), weights, ids, *options, mode == "reverse"
    )
    d_rows, d_weights = ordinary(rng, of_slots.y.shape, dtype), ordinary(rng, (T, K))
    maps = of_slots.scatter_index_rev, of_slots.expert_offset, of_slots.expert_nums_local
    arrays = of_slots.combine_weights, of_slots.scatter_index, *maps, d_rows, d_weights
    got = _C_ops.moe_gate_dispatch_partial_nosoftmaxtopk_grad(
        *(tensor(each, place) for each in arrays), K, capacity, mode == "padded", *experts
    )
    by_slots = of_slots.combine_weights, of_slots.scatter_index
    expected = oracle.moe_gate_dispatch_partial_grad(*by_slots, d_rows, d_weights)
    magnitude = oracle.moe_gate_dispatch_partial_grad(*by_slots, np.abs(d_rows), d_weights)[0]
    assert_sums(got[0], expected[0], magnitude, "the gradient of x")
    assert_bits_equal(got[1], expected[1])


def test_slots_whose_rows_are_beyond_those_of_the_gradient_add_nothing(place):
    index, weights = paddle.to_tensor([[0, 5]], "int32"), paddle.ones([2, 1])
    nothing = [paddle.zeros([1], "int64")] * 3
    d_x, d_weights = _C_ops.moe_gate_dispatch_partial_nosoftmaxtopk_grad(
        weights, index, *nothing, paddle.ones([3, 2]), paddle.full([2, 1], 7.0), 1, 9, False, 0, 1
    )
    assert d_x.tolist() == [[1, 1], [0, 0]]
    assert d_weights.tolist() == [[7], [7]]


@dtypes
def test_slots_that_share_a_row_read_it(dtype, rng, place, backend):
    _, weights, index, ids = gate_problem(rng, T, True)
    index = rng.integers(0, 5, index.shape).astype(np.int32)
    index[:, :4] = 2
    d_rows, d_weights = ordinary(rng, (E * T, H), dtype), ordinary(rng, (T, K))
    arrays = weights, index, ids, d_rows, d_weights
    got = _C_ops.moe_gate_dispatch_grad(*(tensor(each, place) for each in arrays), K, T, True)
    expected = oracle.moe_gate_dispatch_grad(*arrays, E)
    magnitude = oracle.moe_gate_dispatch_grad(weights, index, ids, np.abs(d_rows), d_weights, E)[0]
    assert_sums(got[0], expected[0], magnitude, "the gradient of x")
    assert_bits_equal(got[1], expected[1])


def test_an_expert_that_a_token_has_twice_gets_the_sum(place):
    ids, index = paddle.to_tensor([[1, 1]], "int32"), paddle.to_tensor([[2], [3]], "int32")
    gradient = paddle.to_tensor([[0.5, 2.0]])
    got = _C_ops.moe_gate_dispatch_grad(paddle.ones([1, 2]), index, ids, paddle.ones([6, 1]), gradient, 2, 2, True)[1]
    assert got.tolist() == [[0, 2.5, 0]]


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 1025])
def test_any_number_of_tokens(num_tokens, rng, place):
    num_rows, weights, index, ids = gate_problem(rng, 40, True, num_tokens)
    arrays = weights, index, ids, ordinary(rng, (num_rows, H)), ordinary(rng, (num_tokens, K))
    tensors = [tensor(each, place) for each in arrays]
    expected = oracle.moe_gate_dispatch_grad(*arrays, E)
    for got in (
        _C_ops.moe_gate_dispatch_grad(*tensors, K, 40, True),
        _C_ops.moe_gate_dispatch_auto_grad(*tensors[:3], tensors[3].reshape([E, 40, H]), tensors[4], K, 40, True),
        _C_ops.moe_gate_dispatch_permute_grad(
            *tensors[:3], tensors[3].reshape([1, E, 40, H]).transpose([0, 1, 2, 3]), tensors[4], K, 40, E
        ),
    ):
        np.testing.assert_allclose(got[0].numpy(), expected[0], rtol=1e-5, atol=1e-5)
        assert_bits_equal(got[1], expected[1])


def test_without_padding_the_experts_are_those_that_the_arguments_show(place):
    """100 tokens with 2 slots and a capacity of 30 would be 6 experts by the number of rows; expert 7 is there."""
    ids = paddle.to_tensor(np.arange(200).reshape(100, 2) % 8, "int32")
    index = paddle.arange(200, dtype="int32").reshape([2, 100])
    call = paddle.ones([100, 2]), index, ids, paddle.ones([200, 4]), paddle.ones([100, 2]), 2
    assert _C_ops.moe_gate_dispatch_grad(*call, 30, False)[1].shape == [100, 8]
    assert _C_ops.moe_gate_dispatch_grad(*call, 20, False)[1].shape == [100, 10]


def combine_problem(rng, dtype):
    x, weights, d_out = (ordinary(rng, shape, dtype) for shape in ((T * K, H), (T, K), (T, H)))
    index = rng.permutation(T * K).reshape(T, K).astype(np.int32)
    dropped = rng.random((T, K)) < 0.2
    weights[weights == 0] = 1
    weights[dropped], index[dropped] = 0, 0
    return x, weights, index, d_out


@dtypes
def test_combine_no_weight_grad(dtype, rng, place, backend):
    x, weights, index, d_out = combine_problem(rng, dtype)
    x_tensor = tensor(x, place, gradient=True)
    others = tensor(weights, place), tensor(index, place)
    got = _C_ops.moe_combine_no_weight_grad(x_tensor, *others, tensor(d_out, place), 1e-15)
    takes_part = (weights != 0).astype(np.float32)
    expected = forward.combine_rows_backward(d_out, x, takes_part, index)[0]
    assert_bits_equal(got, expected + np.zeros(1, dtype))
    backward([F.moe_combine_no_weight(x_tensor, *others, epsilon=1e-15)], [d_out])
    assert_bits_equal(got, x_tensor.grad)
    nothing = _C_ops.moe_combine_no_weight_grad(x_tensor, *others, tensor(d_out, place), 1e9)
    assert not nothing.astype("float32").numpy().any()


@dtypes
def test_the_pair_of_auto_parallel_combines_dense_tensors(dtype, rng, place, backend):
    x, weights, index, d_out = combine_problem(rng, dtype)
    tensors = tensor(x, place, gradient=True), tensor(weights, place, gradient=True), tensor(index, place)
    out = _C_ops.moe_combine_auto(*tensors)
    assert_bits_equal(out, F.moe_combine(*tensors))
    backward([out], [d_out])
    d_x, d_weights, d_index = _C_ops.moe_combine_auto_grad(*tensors, tensor(d_out, place))
    assert_bits_equal(d_x, tensors[0].grad)
    wide = [each.astype(np.float64) for each in (d_out, x)]
    sums = forward.combine_rows_backward(*wide, weights, index)[1].sum(axis=-1)
    terms = forward.combine_rows_backward(*(abs(each) for each in wide), weights, index)[1].sum(axis=-1)
    assert_sums(d_weights, sums.astype(np.float32).astype(dtype), terms, "weights", dot_chain(H))
    assert_bits_equal(d_index, np.zeros((T, K), np.int32))


@pytest.mark.parametrize("use_pad", [True, False], ids=["padded", "not padded"])
def test_the_pair_of_auto_parallel_dispatches_dense_tensors(use_pad, rng, place, backend):
    x, gate = ordinary(rng, (T, H)), rng.random((T, E)).astype(np.float32) + 0.1
    leaves = tensor(x, place, gradient=True), tensor(gate, place, gradient=True)
    got = _C_ops.moe_gate_dispatch_auto(*leaves, None, K, 5, use_pad)
    capacity = T * K // E if use_pad else 5
    rows, *expected, _ = forward.moe_gate_dispatch(x, gate, None, K, capacity, use_pad)
    assert_bits_equal(got[0], rows.reshape((E, capacity, H) if use_pad else (T, K, H)))
    for one, other in zip(got[1:], expected, strict=True):
        assert_bits_equal(one, other)
    d_rows, d_weights = ordinary(rng, tuple(got[0].shape)), ordinary(rng, (T, K))
    by_hand = _C_ops.moe_gate_dispatch_auto_grad(
        got[1], got[2], got[4], tensor(d_rows, place), tensor(d_weights, place), K, 5, use_pad
    )
    backward(got[:2], [d_rows, d_weights])
    assert_bits_equal(by_hand[0], leaves[0].grad)
    assert_bits_equal(by_hand[1][:, :E], leaves[1].grad)


def test_no_tokens_are_dispatched_to_experts_without_rows():
    x, gate = paddle.ones([0, H]), paddle.ones([0, E])
    y, weights, index, ends, ids = _C_ops.moe_gate_dispatch_auto(x, gate, None, K, 5, True)
    assert (y.shape, weights.shape, index.shape, ids.shape) == ([E, 0, H], [0, K], [K, 0], [0, K])
    assert ends.tolist() == [0] * E


def test_distributed_tensors_are_refused_by_name():
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    x, gate = (dist.shard_tensor(paddle.ones(shape), mesh, [dist.Replicate()]) for shape in ([T, H], [T, E]))
    text = r"x must be a dense tensor, but got a distributed tensor \(auto parallel\), which is not supported"
    with pytest.raises(TypeError, match=f"^moe_gate_dispatch_auto: {text}"):
        F.moe_gate_dispatch(x, gate, None, K, 4, True)
    with pytest.raises(TypeError, match=f"^moe_combine_auto: {text}"):
        F.moe_combine(x, paddle.ones([4, 2]), paddle.zeros([4, 2], "int32"))


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
def test_a_graph_computes_the_same(rng, place):
    num_rows, weights, index, ids = gate_problem(rng, 5, True)
    arrays = weights, index, ids, ordinary(rng, (num_rows, H)), ordinary(rng, (T, K))
    tensors = [tensor(each, place) for each in arrays]

    def gradients(weights, index, ids, d_rows, d_weights):
        return _C_ops.moe_gate_dispatch_grad(weights, index, ids, d_rows, d_weights, K, 5, True)

    for got, expected in zip(
        paddle.jit.to_static(gradients, full_graph=True)(*tensors), gradients(*tensors), strict=True
    ):
        assert_bits_equal(got, expected.numpy())

    def unpadded(weights, index, ids, d_rows, d_weights):
        return _C_ops.moe_gate_dispatch_grad(weights, index, ids, d_rows, d_weights, K, 5, False)

    with pytest.raises(ValueError, match="use_pad must be True with a known number of rows and a capacity in a graph"):
        paddle.jit.to_static(unpadded, full_graph=True)(*tensors)


def dispatched(**changes):
    values = {
        "combine_weights": paddle.ones([4, 2]),
        "scatter_index": paddle.arange(8, dtype="int32").reshape([2, 4]),
        "expert_id": paddle.zeros([4, 2], "int32"),
        "y_grad": paddle.ones([12, 5]),
        "combine_weights_grad": paddle.ones([4, 2]),
        "k": 2,
        "capacity": 4,
        "use_pad": True,
    }
    return {**values, **changes}


BAD = [
    ("combine_weights", lambda: paddle.ones([4, 3]), ValueError, r"must be of shape \[num_tokens, 2\]"),
    ("combine_weights", lambda: paddle.ones([4, 2], "float64"), TypeError, "must be of dtype float32"),
    (
        "scatter_index",
        lambda: paddle.zeros([4, 2], "int32"),
        ValueError,
        r"must be of shape \[2, 4\], but got \[4, 2\]",
    ),
    ("scatter_index", lambda: paddle.full([2, 4], 12, "int32"), ValueError, r"must hold rows in \[-1, 12\)"),
    ("expert_id", lambda: paddle.zeros([4, 2]), TypeError, "must be of dtype int32 or int64"),
    ("expert_id", lambda: paddle.arange(8).reshape([4, 2]), ValueError, r"must be in \[0, 3\) for slots .* but got 3"),
    ("expert_id", lambda: paddle.full([4, 2], -1, "int64"), ValueError, r"must be in \[0, 3\) for slots .* but got -1"),
    ("y_grad", lambda: paddle.ones([13, 5]), ValueError, r"must be of E \* capacity rows, with capacity=4, but got"),
    ("y_grad", lambda: paddle.ones([12, 5], "int32"), TypeError, "must be of dtype bfloat16, float16 or float32"),
    ("combine_weights_grad", lambda: paddle.ones([3, 2]), ValueError, r"must be of shape \[4, 2\], but got \[3, 2\]"),
    ("k", lambda: 0, ValueError, "must be from 1"),
    ("capacity", lambda: -1, ValueError, "must be from 0"),
    ("use_pad", lambda: 1, TypeError, "must be a bool, but got 1 of type int"),
]


@pytest.mark.parametrize(
    ("argument", "value", "error", "text"), BAD, ids=[f"{n}{each[0]}" for n, each in enumerate(BAD)]
)
def test_bad_arguments(argument, value, error, text, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
    with pytest.raises(error, match=f"^moe_gate_dispatch_grad: {argument} {text}"):
        _C_ops.moe_gate_dispatch_grad(**dispatched(**{argument: value()}))


def test_without_validation_experts_out_of_range_get_nothing(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    ids = paddle.to_tensor([[0, 9], [-1, 1], [2, 0], [0, 1]])
    got = _C_ops.moe_gate_dispatch_grad(**dispatched(expert_id=ids))[1]
    assert got.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 1], [1, 1, 0]]


FURTHER_BAD = [
    (
        "moe_gate_dispatch_permute_grad",
        lambda good: [*good, paddle.ones([3, 1, 4, 5]), paddle.ones([4, 2]), 2, 4, 2],
        r"y_grad must be of shape \[num_local_experts, 2, 4, hidden\], but got \[3, 1, 4, 5\]",
    ),
    (
        "moe_gate_dispatch_permute_grad",
        lambda good: [*good, paddle.ones([3, 1, 4, 5]), paddle.ones([4, 2]), 2, -1, 1],
        r"capacity must be from 0 to 2147483647, but got -1",
    ),
    (
        "moe_gate_dispatch_permute_grad",
        lambda good: [*good, paddle.ones([3, 1, 4, 5]), paddle.ones([4, 2]), 2, 4, 0],
        r"world_size must be from 1 to 2147483647, but got 0",
    ),
    (
        "moe_gate_dispatch_auto_grad",
        lambda good: [*good, paddle.ones([12, 5]), paddle.ones([4, 2]), 2, 4, True],
        r"y_grad must be of shape \[num_experts, rows, hidden\], but got \[12, 5\]",
    ),
    (
        "moe_gate_dispatch_partial_nosoftmaxtopk_grad",
        lambda good: [*good[:2], *[good[2]] * 3, paddle.ones([12, 5]), paddle.ones([4, 1]), 2, 4, True, 0, 3],
        r"combine_weights_out_grad must be of shape \[4, 2\], but got \[4, 1\]",
    ),
    (
        "moe_combine_no_weight_grad",
        lambda good: [paddle.ones([8, 5]), good[0], good[2], paddle.ones([4, 6])],
        r"y_grad must be of shape \[4, 5\], but got \[4, 6\]",
    ),
    (
        "moe_combine_auto_grad",
        lambda good: [paddle.ones([8, 5]), good[0], good[2], paddle.ones([3, 5])],
        r"y_grad must be of shape \[4, 5\], but got \[3, 5\]",
    ),
]


@pytest.mark.parametrize(("name", "make", "text"), FURTHER_BAD, ids=[name for name, *_ in FURTHER_BAD])
def test_gradients_and_sizes_that_do_not_fit(name, make, text):
    good = list(dispatched().values())[:3]
    with pytest.raises(ValueError, match=f"^{name}: {text}$"):
        getattr(_C_ops, name)(*make(good))
