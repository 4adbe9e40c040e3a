# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""patch_paddle: Paddle's own functions run on this package, with Paddle's numbers, and come back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import pytest
from paddle.nn.functional import moe_permute as imported_before
from paddle.nn.functional import moe_unpermute as unpermute_imported_before

from paddle_moe_ops import explain, patch_paddle, patched_paddle, reference, unpatch_paddle
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import make_problem, tensor
from tests.params import SMALL

ORIGINAL_CODE = imported_before.__code__, unpermute_imported_before.__code__


@pytest.fixture(autouse=True)
def paddle_as_it_was() -> Iterator[None]:
    yield
    unpatch_paddle()
    assert (imported_before.__code__, unpermute_imported_before.__code__) == ORIGINAL_CODE


def is_patched() -> bool:
    return imported_before.__code__ is not ORIGINAL_CODE[0]


def test_functions_imported_before_are_routed_too_and_have_gradients(rng, place):
    problem = make_problem(rng, SMALL)
    patch_paddle()
    assert paddle.nn.functional.moe_permute is imported_before
    x, probs = tensor(problem.x, place, gradient=True), tensor(problem.probs, place, gradient=True)
    ids = tensor(problem.ids, place)
    outputs = imported_before(x, None, ids, probs, SMALL.E, tokens_per_expert=None, padding_alignment=SMALL.A)
    expected = reference.moe_permute(problem.x, None, problem.ids, problem.probs, SMALL.E, None, SMALL.A)
    for got, wanted in zip(outputs, expected, strict=True):
        assert_bits_equal(got, wanted)
    paddle.autograd.backward([outputs[0]], [paddle.ones_like(outputs[0])])
    assert_bits_equal(x.grad, reference.permute_backward(np.ones_like(expected[0]), problem.plan()))


def test_one_row_is_not_weighted_and_bad_ids_are_passed_over_as_in_paddle(place):
    rows = tensor(np.array([[2.0], [3.0], [5.0]], np.float32), place)
    rowmap = tensor(np.array([[0, -1], [1, 2]], np.int32), place)
    ids = tensor(np.array([[0, 9], [0, 1]], np.int32), place)
    weights = tensor(np.array([0.5, 0.5, 0.25], np.float32), place)
    with patched_paddle():
        out, probs = unpermute_imported_before(rows, rowmap, ids, weights, 2, 2, using_weighted_combine=True)
    np.testing.assert_array_equal(out.numpy(), [[2.0], [3.0 * 0.5 + 5.0 * 0.25]])
    np.testing.assert_array_equal(probs.numpy(), [[0.5, 0.0], [0.5, 0.25]])


def test_patching_twice_is_patching_once():
    patch_paddle()
    patch_paddle()
    assert is_patched()
    unpatch_paddle()
    assert not is_patched()
    unpatch_paddle()
    assert not is_patched()


def test_the_block_leaves_the_state_as_it_was():
    with patched_paddle():
        assert is_patched()
        with patched_paddle():
            assert is_patched()
        assert is_patched()
    assert not is_patched()
    patch_paddle()
    with pytest.raises(KeyError), patched_paddle():
        raise KeyError
    assert is_patched()


def test_paddles_own_function_is_back_after_the_block(rng, place):
    problem = make_problem(rng, SMALL)
    arguments = (tensor(problem.x, place), None, tensor(problem.ids, place), tensor(problem.probs, place), SMALL.E)
    with patched_paddle():
        imported_before(*arguments, None, SMALL.A)
    with pytest.raises((RuntimeError, TypeError, ValueError)):  # it needs a list of counts, bfloat16 rows and a GPU
        imported_before(*arguments, None, SMALL.A)


def test_explain_tells_whose_functions_are_called():
    assert "paddle.nn.functional.moe_permute and moe_unpermute: Paddle itself" in explain()
    with patched_paddle():
        assert "moe_unpermute: this package (patch_paddle)" in explain()


@pytest.mark.parametrize("full_graph", [True, False])
def test_a_traced_function_may_call_the_patched_functions(full_graph, rng, place):
    problem = make_problem(rng, SMALL)

    def round_trip(x, ids, probs):
        rows, rowmap, row_probs, _ = imported_before(x, None, ids, probs, SMALL.E, None, SMALL.A)
        return unpermute_imported_before(rows, rowmap, ids, row_probs, SMALL.T, SMALL.E)[0]

    arguments = tensor(problem.x, place), tensor(problem.ids, place), tensor(problem.probs, place)
    with patched_paddle():
        expected = round_trip(*arguments)
        assert_bits_equal(paddle.jit.to_static(round_trip, full_graph=full_graph)(*arguments), expected.numpy())
