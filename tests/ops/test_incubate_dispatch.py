# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""ERNIE's dispatch and combine in paddle.incubate.nn.functional, patched, against the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import paddle
import paddle.incubate.nn.functional as F
import pytest
from paddle import _C_ops

from paddle_moe_ops import patched_paddle, use_backend
from paddle_moe_ops.reference import incubate as oracle
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dot_chain, dtype_tols
from tests.ops.problems import backward, ordinary, tensor
from tests.pairwise import pairwise, pairwise_of
from tests.params import SUM_DTYPES
from tests.static.modes import plain_errors

T, H, E, K = 23, 7, 6, 3
LIMITS = {0: "nothing fits", 4: "some slots are dropped", 9: "most fit", T: "all fit"}
capacities = pytest.mark.parametrize("capacity", LIMITS, ids=LIMITS.values())
paddings = pytest.mark.parametrize("use_pad", [True, False], ids=["padded", "not padded"])


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with patched_paddle(("incubate",)):
        yield


def scores(rng, shape=(T, E)):
    """Probabilities with ties, and an expert, the last, that no one chooses."""
    values = rng.integers(1, 9, shape).astype(np.float32) / 16
    values[:, -1] = 0
    return values


def choices(rng, num_experts=E):
    """Ids as routers of other ranks give them: some of no expert, some expert twice in a token."""
    ids = rng.integers(0, num_experts - 1, (T, K)).astype(np.int32)
    ids[rng.random((T, K)) < 0.1] = num_experts
    ids[rng.random((T, K)) < 0.1] = -1
    return ids


def assert_results(got, expected):
    for number, (result, wanted) in enumerate(zip(got, expected, strict=True)):
        assert_bits_equal(result, wanted, what=f"result {number}")


def assert_sums(got, expected, magnitude, chain, what):
    assert_close_sums(got, expected, magnitude, dtype_tols(expected.dtype, chain), what=what)


@pairwise_of(
    paddings,
    capacities,
    pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"]),
    pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str),
)
def test_gate_dispatch(use_pad, capacity, has_bias, dtype, rng, place, backend):
    x, gate = ordinary(rng, (T, H), dtype), scores(rng)
    bias = rng.integers(-4, 5, E).astype(np.float32) / 16 if has_bias else None
    x_tensor, gate_tensor = tensor(x, place, gradient=True), tensor(gate, place, gradient=True)
    bias_tensor = None if bias is None else tensor(bias, place)
    got = F.moe_gate_dispatch(x_tensor, gate_tensor, bias_tensor, K, capacity, use_pad)
    *expected, is_kept = oracle.moe_gate_dispatch(x, gate, bias, K, capacity, use_pad)
    assert_results(got, expected)
    assert [each.stop_gradient for each in got] == [False, False, True, True, True]
    d_y, d_weights = ordinary(rng, expected[0].shape, dtype), ordinary(rng, (T, K))
    backward(got[:2], [d_y, d_weights])
    d_gate = np.zeros_like(gate)
    np.put_along_axis(d_gate, expected[4], np.where(is_kept, d_weights, 0), axis=1)
    assert_bits_equal(gate_tensor.grad, d_gate)
    terms = oracle.gather_rows_backward(np.abs(d_y), expected[2], is_kept)
    d_x = oracle.gather_rows_backward(d_y, expected[2], is_kept)
    assert_sums(x_tensor.grad, d_x, terms, K, "the gradient of x")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@capacities
def test_gate_dispatch_permute(capacity, world_size, rng, place, backend):
    x, gate = ordinary(rng, (T, H)), scores(rng)
    x_tensor = tensor(x, place, gradient=True)
    got = F.moe_gate_dispatch_permute(x_tensor, tensor(gate, place), None, K, capacity, world_size)
    *expected, is_kept = oracle.moe_gate_dispatch_permute(x, gate, None, K, capacity, world_size)
    assert_results(got, expected)
    d_y = ordinary(rng, expected[0].shape)
    backward(got[:1], [d_y])
    by_expert = d_y.swapaxes(0, 1).reshape(-1, H)
    d_x, terms = (oracle.gather_rows_backward(each, expected[2], is_kept) for each in (by_expert, np.abs(by_expert)))
    assert_sums(x_tensor.grad, d_x, terms, K, "the gradient of x")


@pytest.mark.parametrize("scale", [1e-9, 1e4])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_gates_choose_by_values_of_which_a_softmax_would_be_equal(has_bias, scale, rng, place):
    x, gate = ordinary(rng, (T, H)), scores(rng) * np.float32(scale)
    bias = rng.integers(-4, 5, E).astype(np.float32) * np.float32(scale / 16) if has_bias else None
    tensors = [None if each is None else tensor(each, place) for each in (x, gate, bias)]
    for name, last in (("moe_gate_dispatch", True), ("moe_gate_dispatch_permute", 2)):
        *expected, _ = getattr(oracle, name)(x, gate, bias, K, T, last)
        assert_results(getattr(F, name)(*tensors, K, T, last), expected)


@pairwise_of(
    capacities,
    pytest.mark.parametrize("mode", ["padded", "not padded", "reverse"]),
    pytest.mark.parametrize("experts", [(0, E), (1, 4), (E - 1, E)], ids=["all", "some", "one without tokens"]),
    pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str),
)
def test_partial_dispatch(capacity, mode, experts, dtype, rng, place, backend):
    x, ids, weights = ordinary(rng, (T, H), dtype), choices(rng), ordinary(rng, (T, K))
    options = capacity, E, mode == "padded", *experts, mode == "reverse"
    x_tensor, weights_tensor = tensor(x, place, gradient=True), tensor(weights, place, gradient=True)
    got = F.moe_gate_dispatch_partial_nosoftmaxtopk(x_tensor, weights_tensor, tensor(ids, place), K, *options)
    *expected, is_kept = oracle.moe_gate_dispatch_partial_nosoftmaxtopk(x, weights, ids, *options)
    assert_results(got, expected)
    assert [each.stop_gradient for each in got] == [False, False, True, True, True, True]
    d_y, d_weights = ordinary(rng, expected[0].shape, dtype), ordinary(rng, (T, K))
    backward(got[:2], [d_y, d_weights])
    assert_bits_equal(weights_tensor.grad, np.where(is_kept, d_weights, np.float32(0)))
    d_x, terms = (oracle.gather_rows_backward(each, expected[2], is_kept) for each in (d_y, np.abs(d_y)))
    assert_sums(x_tensor.grad, d_x, terms, K, "the gradient of x")


@pytest.mark.parametrize("name", ["partial", "gate", "permute"])
def test_one_expert_takes_all_tokens(name, rng, place):
    x, weights = (tensor(ordinary(rng, shape), place) for shape in ((T, H), (T, 1)))
    functions = {
        "partial": lambda: F.moe_gate_dispatch_partial_nosoftmaxtopk(
            x, weights, paddle.zeros([T, 1], "int32"), 1, T, 1, True, 0, 1, False
        ),
        "gate": lambda: F.moe_gate_dispatch(x, weights, None, 1, T, True),
        "permute": lambda: F.moe_gate_dispatch_permute(x, weights, None, 1, T, 1),
    }
    rows, of_slots, *_ = functions[name]()
    assert_bits_equal(rows.reshape([T, H]), x.numpy())
    assert_bits_equal(of_slots, weights.numpy())


def test_the_first_choices_of_all_tokens_come_first(place):
    ids = tensor(np.array([[1, 0], [0, 2], [0, 1]], np.int32), place)
    x, weights = paddle.to_tensor([[1.0], [2.0], [3.0]]), paddle.full([3, 2], 0.5)
    call = [x, weights, ids, 2, 2, 3, False, 0, 2]
    first = F.moe_gate_dispatch_partial_nosoftmaxtopk(*call, False)
    last = F.moe_gate_dispatch_partial_nosoftmaxtopk(*call, True)
    # Expert 0 is the second choice of token 0, which is therefore the last of three in line.
    assert first[0].flatten().tolist() == [2.0, 3.0, 1.0, 3.0]
    assert last[0].flatten().tolist() == [1.0, 3.0, 1.0, 3.0]
    assert first[1].tolist() == [[0.5, 0.0], [0.5, 0.0], [0.5, 0.5]]
    assert last[1].tolist() == [[0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]


def combine_problem(rng, dtype):
    """Rows in any order, some of them no one's, and dropped slots, which have weight 0 and index 0."""
    x, weights = ordinary(rng, (T * K + 5, H), dtype), ordinary(rng, (T, K), dtype)
    index = rng.permutation(len(x))[: T * K].reshape(T, K).astype(np.int32)
    dropped = rng.random((T, K)) < 0.2
    dropped[index == 0] = False
    weights[~dropped & (weights == 0)] = 1
    weights[dropped], index[dropped] = 0, 0
    return x, weights, index, dropped


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_combine(dtype, index_dtype, rng, place, backend):
    x, weights, index, dropped = combine_problem(rng, dtype)
    d_out = ordinary(rng, (T, H), dtype)
    x_tensor, weights_tensor = tensor(x, place, gradient=True), tensor(weights, place, gradient=True)
    # A transposed view of the dispatch's output, as clients pass it.
    by_token = tensor(index.T.copy(), place).transpose([1, 0]).astype(index_dtype)
    out = F.moe_combine(x_tensor, weights_tensor, by_token)
    assert_sums(out, oracle.combine_rows(x, weights, index), oracle.combine_rows(abs(x), abs(weights), index), K, "sum")
    backward([out], [d_out])
    d_x, products = oracle.combine_rows_backward(d_out, x, weights, index)
    terms, all_products = oracle.combine_rows_backward(abs(d_out), abs(x), abs(weights), index)
    assert_sums(x_tensor.grad, d_x, terms, 1, "the gradient of x")
    exact = oracle.combine_rows_backward(d_out.astype(np.float64), x.astype(np.float64), weights, index)[1].sum(axis=-1)
    d_weights = np.where(dropped, 0, exact).astype(np.float32).astype(dtype)
    assert_sums(weights_tensor.grad, d_weights, all_products.astype(np.float64).sum(axis=-1), dot_chain(H), "weights")
    by_hand = _C_ops.moe_combine_grad(x_tensor, weights_tensor, tensor(index, place), tensor(d_out, place))
    assert_bits_equal(by_hand[0], x_tensor.grad)
    assert_sums(by_hand[1], products, np.abs(products.astype(np.float64)), 1, "products")


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_combine_without_weights(dtype, rng, place, backend):
    x, weights, index, dropped = combine_problem(rng, dtype)
    weights = np.where(dropped, 1e-20, weights).astype(dtype)
    takes_part = (~dropped).astype(np.float32)
    x_tensor = tensor(x, place, gradient=True)
    out = F.moe_combine_no_weight(x_tensor, tensor(weights, place), tensor(index, place))
    expected, terms = (oracle.combine_rows(each, takes_part, index) for each in (x, abs(x)))
    assert_sums(out, expected, terms, K, "sum")
    d_out = ordinary(rng, (T, H), dtype)
    backward([out], [d_out])
    assert_bits_equal(x_tensor.grad, oracle.combine_rows_backward(d_out, x, takes_part, index)[0] + np.zeros(1, dtype))
    few = F.moe_combine_no_weight(x_tensor, tensor(weights, place), tensor(index, place), epsilon=1e9)
    assert not few.astype("float32").numpy().any()


def test_slots_whose_weight_is_nan_take_part(place):
    rows, index = tensor(np.arange(1, 5, dtype=np.float32).reshape(4, 1), place), paddle.arange(4).reshape([2, 2])
    weights = tensor(np.array([[0.5, np.nan], [0.5, 0.0]], np.float32), place)
    np.testing.assert_array_equal(F.moe_combine(rows, weights, index).numpy(), [[np.nan], [1.5]])
    assert F.moe_combine_no_weight(rows, weights, index).tolist() == [[3.0], [3.0]]
    d_rows, _ = _C_ops.moe_combine_grad(rows, weights, index, paddle.ones([2, 1]))
    np.testing.assert_array_equal(d_rows.numpy(), [[0.5], [np.nan], [0.5], [0.0]])


def shared_rows_problem(rng, dtype):
    """Slots of one token and of several that share rows, and dropped ones, of weight and index 0."""
    x, weights, d_out = (ordinary(rng, shape, dtype) for shape in ((6, H), (T, K), (T, H)))
    weights[weights == 0] = 1
    index = rng.integers(0, 6, (T, K)).astype(np.int32)
    index[1] = index[2] = 4
    weights[3, 0] = index[3, 0] = 0
    return x, weights, index, d_out


@pairwise({"dtype": SUM_DTYPES, "weighted": [False, True], "traced": [False, True], "validate": ["0", "1"]})
@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
def test_slots_that_share_a_row_add_it(dtype, weighted, traced, validate, rng, place, backend, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", validate)
    x, weights, index, d_out = shared_rows_problem(rng, dtype)
    factors = weights if weighted else (weights != 0).astype(np.float32)
    leaves = tensor(x, place, gradient=True), tensor(weights, place, gradient=weighted)

    def combine(x, weights, index):
        return F.moe_combine(x, weights, index) if weighted else F.moe_combine_no_weight(x, weights, index)

    with use_backend("compiled") if traced else contextlib.nullcontext():  # others need values
        run = paddle.jit.to_static(combine, full_graph=True) if traced else combine
        out = run(*leaves, tensor(index, place))
    assert_sums(out, oracle.combine_rows(x, factors, index), oracle.combine_rows(abs(x), abs(factors), index), K, "sum")
    backward([out], [d_out])
    d_x, products = oracle.combine_rows_backward(d_out, x, factors, index)
    terms, all_products = oracle.combine_rows_backward(abs(d_out), abs(x), abs(factors), index)
    assert_sums(leaves[0].grad, d_x, terms, index.size, "the gradient of x")
    if not weighted:
        return
    exact = oracle.combine_rows_backward(d_out.astype(np.float64), x.astype(np.float64), weights, index)[1].sum(axis=-1)
    d_weights = np.where(weights == 0, 0, exact).astype(np.float32).astype(dtype)
    assert_sums(leaves[1].grad, d_weights, all_products.astype(np.float64).sum(axis=-1), dot_chain(H), "weights")
    by_hand = _C_ops.moe_combine_grad(*leaves, tensor(index, place), tensor(d_out, place))
    assert_bits_equal(by_hand[0], leaves[0].grad)
    assert_sums(by_hand[1], products, np.abs(products.astype(np.float64)), 1, "products")


def test_a_layer_of_dispatch_and_combine_against_finite_differences(rng, place, backend):
    x, matrix = ordinary(rng, (5, 3)), ordinary(rng, (3, 3))
    gate = (1 + rng.permutation(20).reshape(5, 4)).astype(np.float32) / 32
    weights = ordinary(rng, (5, 3)).astype(np.float64)

    def loss(x, gate):
        y, kept, index, _, _ = F.moe_gate_dispatch(x, gate, None, 2, 3, True)
        out = F.moe_combine(y @ tensor(matrix, place), kept, index.transpose([1, 0]))
        return out

    def value(x, gate):
        return float(np.vdot(weights, loss(tensor(x, place), tensor(gate, place)).numpy().astype(np.float64)))

    x_tensor, gate_tensor = tensor(x, place, gradient=True), tensor(gate, place, gradient=True)
    backward([loss(x_tensor, gate_tensor)], [weights.astype(np.float32)])
    for got, at, put in (
        (x_tensor.grad, x, lambda moved: value(moved, gate)),
        (gate_tensor.grad, gate, lambda moved: value(x, moved)),
    ):
        # The loss is linear in each input while the choice is the same; the step is less than half a difference.
        quotient = np.zeros(at.shape)
        for place_of in np.ndindex(at.shape):
            step = np.zeros_like(at)
            step[place_of] = 2.0**-7
            quotient[place_of] = (put(at + step) - put(at - step)) * 2.0**6
        np.testing.assert_allclose(got.numpy(), quotient, rtol=0, atol=5e-3)


def test_no_tokens_give_empty_results(place):
    x, gate = paddle.zeros([0, H]), paddle.zeros([0, E])
    for use_pad in (True, False):
        y, weights, index, ends, ids = F.moe_gate_dispatch(x, gate, None, K, 4, use_pad)
        assert y.shape == [E * 4 if use_pad else 0, H]
        assert (weights.shape, index.shape, ids.shape, ends.tolist()) == ([0, K], [K, 0], [0, K], [0] * E)
        assert not y.numpy().any()
    combined = F.moe_combine(paddle.ones([3, H]), paddle.ones([0, K]), paddle.zeros([0, K], "int32"))
    assert combined.shape == [0, H]


def test_rows_whose_gradient_is_wanted_get_one_where_no_slot_is_kept(rng, place):
    x = tensor(ordinary(rng, (T, H)), place, gradient=True)
    upstream = x * 2
    ids = paddle.zeros([T, K], "int32")
    y = F.moe_gate_dispatch_partial_nosoftmaxtopk(upstream, paddle.ones([T, K]), ids, K, 4, E, False, 1, 3, False)[0]
    assert y.shape == [1, H]
    y.sum().backward()
    assert x.grad is not None
    assert not x.grad.numpy().any()


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
@pytest.mark.parametrize("traced", [True, False])
@paddings
def test_a_traced_layer_of_any_number_of_tokens(use_pad, traced, rng, place):
    def layer(x, gate):
        y, weights, index, ends, ids = F.moe_gate_dispatch(x, gate, None, K, 4, use_pad)
        parts = F.moe_gate_dispatch_partial_nosoftmaxtopk(x, weights, ids, K, 4, E, use_pad, 1, 4, False)
        out = F.moe_combine(y * 2, weights, index.transpose([1, 0]))
        return out, F.moe_combine_no_weight(y, weights, index.transpose([1, 0])), ends, *parts

    spec = [paddle.static.InputSpec([None, n], "float32", stop_gradient=False) for n in (H, E)] if traced else None
    with plain_errors():
        program = paddle.jit.to_static(layer, full_graph=traced, input_spec=spec)
        for tokens in (T, 9):
            x, gate = ordinary(rng, (tokens, H)), scores(rng, (tokens, E))
            results = []
            for function in (program, layer):
                leaves = [tensor(each, place, gradient=True) for each in (x, gate)]
                outputs = function(*leaves)
                (outputs[0].sum() + (outputs[3] * 3).sum()).backward()
                results.append([*outputs, *(leaf.grad for leaf in leaves)])
            assert_results(results[0], [each.numpy() for each in results[1]])


NAMES = {
    "moe_gate_dispatch": lambda: {
        "x": paddle.ones([T, H]),
        "gate_logits": paddle.ones([T, E]),
        "corr_bias": None,
        "k": K,
        "capacity": 4,
        "use_pad": True,
    },
    "moe_gate_dispatch_permute": lambda: {
        "x": paddle.ones([T, H]),
        "gate_logits": paddle.ones([T, E]),
        "corr_bias": None,
        "k": K,
        "capacity": 4,
        "world_size": 2,
    },
    "moe_gate_dispatch_partial_nosoftmaxtopk": lambda: {
        "x": paddle.ones([T, H]),
        "combine_weights": paddle.ones([T, K]),
        "expert_id": paddle.zeros([T, K], "int32"),
        "k": K,
        "capacity": 4,
        "num_experts": E,
        "use_pad": True,
        "expert_start_index": 0,
        "expert_end_index": E,
        "reverse_token_drop": False,
    },
    "moe_combine": lambda: {
        "x": paddle.ones([8, H]),
        "combine_weights": paddle.ones([4, 2]),
        "scatter_index": paddle.arange(8, dtype="int32").reshape([4, 2]),
    },
    "moe_combine_no_weight": lambda: {
        "x": paddle.ones([8, H]),
        "combine_weight": paddle.ones([4, 2]),
        "scatter_index": paddle.arange(8, dtype="int32").reshape([4, 2]),
    },
}
BAD = [
    ("moe_gate_dispatch", "x", lambda: paddle.ones([T, H], "int32"), TypeError, "x must be of dtype"),
    ("moe_gate_dispatch", "x", lambda: paddle.ones([H]), ValueError, "x must be of shape"),
    ("moe_gate_dispatch", "gate_logits", lambda: paddle.ones([T + 1, E]), ValueError, "gate_logits must be of shape"),
    ("moe_gate_dispatch", "gate_logits", lambda: paddle.ones([T, E], "bfloat16"), TypeError, "gate_logits must be"),
    ("moe_gate_dispatch", "corr_bias", lambda: paddle.ones([E + 1]), ValueError, "corr_bias must be of shape"),
    ("moe_gate_dispatch", "k", lambda: E + 1, ValueError, "k must be at most 6"),
    ("moe_gate_dispatch", "capacity", lambda: -1, ValueError, "capacity must be from 0"),
    ("moe_gate_dispatch", "use_pad", lambda: 1, TypeError, "use_pad must be a bool"),
    ("moe_gate_dispatch_permute", "world_size", lambda: 4, ValueError, "world_size must be a divisor of the 6 experts"),
    ("moe_gate_dispatch_partial_nosoftmaxtopk", "k", lambda: K + 1, ValueError, "combine_weights must be of shape"),
    (
        "moe_gate_dispatch_partial_nosoftmaxtopk",
        "expert_id",
        lambda: paddle.zeros([T, K]),
        TypeError,
        "expert_id must be",
    ),
    ("moe_gate_dispatch_partial_nosoftmaxtopk", "expert_start_index", lambda: E, ValueError, "expert_start_index must"),
    ("moe_gate_dispatch_partial_nosoftmaxtopk", "expert_end_index", lambda: 0, ValueError, "expert_end_index must be"),
    ("moe_gate_dispatch_partial_nosoftmaxtopk", "expert_end_index", lambda: 7, ValueError, "expert_end_index must be"),
    (
        "moe_gate_dispatch_partial_nosoftmaxtopk",
        "reverse_token_drop",
        lambda: True,
        ValueError,
        "reverse_token_drop must be False with use_pad",
    ),
    ("moe_combine", "combine_weights", lambda: paddle.ones([4, 3]), ValueError, "scatter_index must be of shape"),
    (
        "moe_combine",
        "scatter_index",
        lambda: paddle.full([4, 2], 8, "int32"),
        ValueError,
        r"scatter_index must hold rows in \[-1, 8\)",
    ),
    ("moe_combine", "combine_weights", lambda: paddle.ones([4]), ValueError, "combine_weights must be of shape"),
    ("moe_combine_no_weight", "combine_weight", lambda: paddle.ones([4]), ValueError, "combine_weight must be of"),
    ("moe_combine_no_weight", "epsilon", lambda: float("nan"), ValueError, "epsilon must be finite"),
]


@pytest.mark.parametrize(("name", "argument", "value", "error", "text"), BAD, ids=[f"{n} {a}" for n, a, *_ in BAD])
def test_bad_arguments(name, argument, value, error, text, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")  # values on a device are looked at where it is asked for
    arguments = {**NAMES[name](), argument: value()}
    with pytest.raises(error, match=f"^{name}: {text}"):
        getattr(F, name)(**arguments)
