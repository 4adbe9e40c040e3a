# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""moe_mlp on float8 operands that keeps its first product in float8: gradients, what is kept, what is refused."""

from __future__ import annotations

import contextlib
import re

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import Float8Matrices, reference, use_backend
from paddle_moe_ops.backends import experts
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import tensor
from tests.ops.test_float8_mlp import FLOAT8, Float8Layer, assert_near
from tests.ops.test_moe_mlp import AXES, BACKENDS
from tests.pairwise import pairwise
from tests.params import EMPTY, MANY_EXPERTS, MORE_SLOTS_THAN_EXPERTS, ODD, ONE_TOKEN, PADDED

BF16 = ml_dtypes.bfloat16
IN_FLOAT8 = "h_fp8"
GRADIENTS = ("x", "probs", "gate_up", "down")


def backend_of(name):
    return use_backend(name) if name else contextlib.nullcontext()


@pytest.fixture
def kept(monkeypatch):
    """All that calls keep, tables as well, without the codes of their matrices."""
    seen = []
    run = experts.MoeMlp.run

    def record(call):
        made = run(call)
        saved = call.saved[: len(call.saved) - sum(call.forms)]
        seen.extend(each for each in (*saved, call.tables) if each is not None)
        return made

    monkeypatch.setattr(experts.MoeMlp, "run", record)
    return seen


@pytest.mark.sampled(2)
@pairwise(AXES, others_are_slow=True)
def test_gradients_are_those_of_the_oracle(form, transpose, dtype, name, rng, place):
    layer = Float8Layer(rng, PADDED, dtype, transpose=transpose, form=form)
    with backend_of(name):
        made = layer.run(place, keep=IN_FLOAT8)
    assert_near(made, layer.due(hidden_in_float8=True))


@pytest.mark.parametrize("buffer_size", [-1, 40, 4000], ids=["exact", "small buffer", "large buffer"])
@pytest.mark.parametrize(
    "shape",
    [
        EMPTY,
        ONE_TOKEN,
        ODD,
        pytest.param(MANY_EXPERTS, marks=pytest.mark.slow, id=str(MANY_EXPERTS)),
        MORE_SLOTS_THAN_EXPERTS,
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(1, 1), (7, 3), (72, 130)], ids=str)
def test_any_routing_and_sizes(sizes, shape, buffer_size, rng, place):
    layer = Float8Layer(rng, shape, sizes=sizes, buffer_size=buffer_size)
    assert_near(layer.run(place, keep=IN_FLOAT8), layer.due(hidden_in_float8=True))


@BACKENDS
def test_results_keep_their_bits_and_gradients_stay_near(name, rng, place):
    layer = Float8Layer(rng, PADDED)
    with backend_of(name):
        made, wide = layer.run(place, keep=IN_FLOAT8), layer.run(place)
    assert_bits_equal(made["out"], wide["out"], what="out")
    for each in GRADIENTS:
        a, b = (to_numpy(found[each]).astype(np.float64).ravel() for found in (made, wide))
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert 0.998 < cosine < 0.99999, each


@BACKENDS
def test_codes_times_scales_that_are_the_first_product_give_the_same_bits(name, rng, place):
    """Each row of the first product is one of a matrix, in numbers that float8 holds exactly."""
    layer = Float8Layer(rng, ODD, sizes=(72, 64))
    layer.arrays["x"][...] = np.eye(ODD.T, 72, dtype=np.float32)
    grid = rng.integers(-15, 16, layer.arrays["gate_up"].shape) * 2.0 ** rng.integers(
        -4, 1, layer.arrays["gate_up"].shape
    )
    grid[:, :, 0] = 28  # the scale is 1/16
    layer.arrays["gate_up"] = grid.astype(np.float32)
    layer.arrays = {each: array.astype(BF16) if each != "probs" else array for each, array in layer.arrays.items()}
    layer.d_out = layer.d_out.astype(BF16)
    with backend_of(name):
        made, wide = layer.run(place, keep=IN_FLOAT8), layer.run(place)
    for each, expected in wide.items():
        assert_bits_equal(made[each], expected, what=each)


@pytest.mark.parametrize("inner", [128, 130, 3])
@BACKENDS
def test_kept_are_codes_and_scales(name, inner, kept, rng, place):
    """A byte for each number of the first product, and 4 bytes for each 128 columns of its rows."""
    layer = Float8Layer(rng, ODD, np.float16, sizes=(72, inner))
    with backend_of(name):
        layer.call(layer.leaves(place), place, keep=IN_FLOAT8)
    rows, groups = layer.plan.num_rows, -(-2 * inner // 128)
    assert sum(each.size * each.element_size() for each in kept[4:]) == rows * (2 * inner + 4 * groups)


@BACKENDS
def test_what_is_kept_is_the_first_product_by_the_rule_bit_for_bit(name, kept, rng, place):
    layer = Float8Layer(rng, PADDED)
    layer.arrays["gate_up"][:, :, :130] *= np.float32(1e-33)
    with backend_of(name):
        layer.call(layer.leaves(place), place)
        (hidden,) = kept[4:]
        kept.clear()
        layer.call(layer.leaves(place), place, keep=IN_FLOAT8)
    codes, scales = reference.quantize_1x128(to_numpy(hidden), amax_min=2.0**-100)
    assert_bits_equal(kept[4], codes, what="codes")
    assert_bits_equal(kept[5], scales, what="scales")


def test_nothing_is_kept_where_no_one_wants_a_gradient(kept, rng, place):
    layer = Float8Layer(rng, ODD)
    with paddle.no_grad():
        layer.call(layer.leaves(place), place, keep=IN_FLOAT8)
    assert kept == []


@pytest.mark.parametrize("wanted", GRADIENTS)
def test_one_gradient_alone(wanted, rng, place):
    layer = Float8Layer(rng, ODD)
    expected, leaves = layer.run(place, keep=IN_FLOAT8), layer.leaves(place)
    for each, leaf in leaves.items():
        leaf.stop_gradient = each != wanted
    paddle.autograd.backward([layer.call(leaves, place, keep=IN_FLOAT8)], [tensor(layer.d_out, place)])
    assert_bits_equal(leaves[wanted].grad, expected[wanted], what=wanted)


def test_lists_of_matrices_and_kept_matrices(rng, place):
    layer, matrices = Float8Layer(rng, ODD), Float8Matrices()
    expected, leaves = layer.run(place, keep=IN_FLOAT8), layer.leaves(place)
    lists = {name: [tensor(each, place, gradient=True) for each in layer.arrays[name]] for name in ("gate_up", "down")}
    for number in range(2):
        for each in (*lists["gate_up"], *lists["down"]):
            each.clear_gradient(False)
        out = layer.call({**leaves, **lists}, place, keep=IN_FLOAT8, float8_matrices=matrices)
        paddle.autograd.backward([out], [tensor(layer.d_out, place)])
        assert_bits_equal(out, expected["out"], what=f"out {number}")
        for name, each in lists.items():
            assert_bits_equal(paddle.stack([matrix.grad for matrix in each]), expected[name], what=f"{name} {number}")


@BACKENDS
def test_nan_of_a_token_stays_with_it(name, rng, place):
    layer = Float8Layer(rng, ODD)
    with backend_of(name):
        expected = layer.run(place, keep=IN_FLOAT8)
        routed = np.flatnonzero((layer.plan.slot_to_row >= 0).any(axis=1))
        layer.arrays["x"][routed[0], 3] = np.nan
        made = layer.run(place, keep=IN_FLOAT8)
    others = np.arange(ODD.T) != routed[0]
    for each in ("out", "x"):
        assert np.isnan(to_numpy(made[each])[routed[0]]).all()
        assert_bits_equal(made[each].numpy()[others], expected[each].numpy()[others], what=each)


def test_it_is_refused_without_compute(rng):
    text = "keep must be 'h' or 'x' without compute, but got 'h_fp8'"
    layer = Float8Layer(rng, ODD, sizes=(10, 6))
    with pytest.raises(ValueError, match=f"^moe_mlp: {re.escape(text)}$"):
        layer.call(layer.leaves("cpu"), "cpu", compute=None, keep=IN_FLOAT8)
    with pytest.raises(ValueError, match=f"^SwiGLUExperts: {re.escape(text)}$"):
        SwiGLUExperts(4, 8, 8, keep=IN_FLOAT8)
    with pytest.raises(ValueError, match=f"^MoELayer: {re.escape(text)}$"):
        MoELayer(8, 8, 4, 2, keep=IN_FLOAT8)


def test_other_words_are_refused_with_compute_too(rng):
    layer = Float8Layer(rng, ODD, sizes=(10, 6))
    for given in ("h_fp16", "fp8", None, True):
        with pytest.raises(ValueError, match=rf"^moe_mlp: keep must be one of 'h', 'x', 'h_fp8', but got {given!r}$"):
            layer.call(layer.leaves("cpu"), "cpu", keep=given)


def test_layers_pass_the_option_on(kept, place):
    paddle.seed(3)
    layer = MoELayer(72, 24, 5, 2, compute=FLOAT8, keep=IN_FLOAT8)
    assert layer.experts.memory_options["keep"] == IN_FLOAT8
    layer(tensor(np.ones((20, 72), np.float32), place))
    assert [each.dtype for each in kept[4:]] == [paddle.float8_e4m3fn, paddle.float32]
