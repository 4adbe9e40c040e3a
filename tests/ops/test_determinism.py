# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The same bits from run to run and for any number of threads, dot products included."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import paddle
import pytest

from paddle_moe_ops import Plan, _env, moe_permute, moe_unpermute, permute, reference, route, unpermute, use_backend
from paddle_moe_ops.backends import compiled, resolve
from paddle_moe_ops.testing.equality import assert_all_bits_equal, assert_bits_equal
from tests.ops.problems import make_problem, ordinary, tensor
from tests.params import LONG_ROUTING, SEVERAL_THREADS, SUM_DTYPES

RUNS = 8


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets the size of the pool of the loaded library; puts the default back afterwards."""
    with use_backend("compiled"):
        resolve("route")
    library = ctypes.CDLL(str(compiled.LIBRARY))

    def set_number(threads: int) -> None:
        library.pmo_set_num_threads(threads)
        assert library.pmo_num_threads() == threads

    yield set_number
    library.pmo_set_num_threads(_env.num_threads() or 0)


class Everything:
    """Every operator forward and backward on one problem that is large enough for several threads."""

    def __init__(self, rng: np.random.Generator, dtype: np.dtype, place: object) -> None:
        shape = SEVERAL_THREADS
        problem = make_problem(rng, shape, dtype, "zipf")
        self.shape, self.place = shape, place
        self.x, self.ids, self.probs = problem.x, tensor(problem.ids, place), problem.probs
        self.d_out, self.d_prob = ordinary(rng, problem.x.shape, dtype), ordinary(rng, problem.probs.shape)

    def run(self) -> list[np.ndarray]:
        # a leaf for each use: a device may have no kernel to add gradients up
        x, x_again, x_moe = (tensor(self.x, self.place, gradient=True) for _ in range(3))
        probs, probs_again, probs_moe = (tensor(self.probs, self.place, gradient=True) for _ in range(3))
        plan = route(self.ids, probs, num_experts=self.shape.E, padding_alignment=self.shape.A)
        rows, _ = permute(x, plan)
        by_row = unpermute(rows, plan, plan.row_probs)
        by_slot = unpermute(permute(x_again, plan)[0], plan, probs_again)
        unzipped, rowmap, row_probs, _ = moe_permute(x_moe, None, self.ids, probs_moe, self.shape.E, None, self.shape.A)
        sizes = self.shape.T, self.shape.E
        combined, prob_topk = moe_unpermute(unzipped, rowmap, self.ids, row_probs, *sizes, using_weighted_combine=True)
        more_rows = rows.detach()
        more_rows.stop_gradient = False
        plain = unpermute(more_rows, plan)
        outputs = [by_row, by_slot, plain, combined, prob_topk]
        gradients = [self.d_out] * 4 + [self.d_prob]
        leaves = [
            x,
            x_again,
            x_moe,
            probs,
            probs_again,
            probs_moe,
            rows,
            more_rows,
            plan.row_probs,
            unzipped,
            row_probs,
        ]
        d_leaves = paddle.grad(outputs, leaves, [tensor(gradient, self.place) for gradient in gradients])
        return [value.numpy() for value in (*plan[:10], rows, unzipped, rowmap, row_probs, *outputs, *d_leaves)]


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 5])
def test_repeated_runs_give_the_same_bits(threads, dtype, rng, place, set_threads):
    everything = Everything(rng, dtype, place)
    set_threads(threads)
    first = everything.run()
    for _ in range(RUNS - 1):
        for got, wanted in zip(everything.run(), first, strict=True):
            assert_bits_equal(got, wanted)


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype, rng, place, set_threads):
    everything = Everything(rng, dtype, place)
    set_threads(1)
    alone = everything.run()
    for threads in (2, 3, 8, 61):
        set_threads(threads)
        for got, wanted in zip(everything.run(), alone, strict=True):
            assert_bits_equal(got, wanted)


@pytest.mark.parametrize("duplicates", ["first", "each"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_long_routing_is_the_oracles_for_any_number_of_threads(threads, duplicates, rng, place, set_threads):
    shape = LONG_ROUTING
    ids = rng.integers(-1, shape.E, (shape.T, shape.K), dtype=np.int32)
    probs = rng.random(ids.shape, np.float32)
    arguments = {"num_experts": shape.E, "padding_alignment": shape.A, "duplicates": duplicates, "validate": False}
    set_threads(threads)
    plan = route(tensor(ids, place), tensor(probs, place), **arguments)
    expected = reference.route(ids, probs, **arguments)
    assert_all_bits_equal(plan[:10], expected[:10], Plan._fields[:10])
