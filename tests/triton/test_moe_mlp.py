# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The layer of experts by Triton kernels: bit for bit where all sums are exact, within a bound elsewhere."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.triton.gemm import gather_heuristic
from paddle_moe_ops.triton.gemm import mlp as launchers
from paddle_moe_ops.triton.gemm.configs import GemmConfig
from paddle_moe_ops.triton.gemm.mlp import moe_mlp, moe_mlp_backward
from paddle_moe_ops.triton.gemm.types import Groups, Layer, Tokens
from tests.pairwise import in_turn
from tests.reference.cases import assert_same_bits

pytestmark = pytest.mark.long

SMALL_TILES = GemmConfig(16, 16, 16, 2, 2, 4, 1, tma=False)
LAYOUTS = {"plain": False, "transposed": True}
BY_LAYOUT = pytest.mark.parametrize("transpose", LAYOUTS.values(), ids=LAYOUTS)
COPIES = {
    "pointers": SMALL_TILES,
    "descriptors": SMALL_TILES._replace(tma=True),
    "descriptors, loading ahead": SMALL_TILES._replace(tma=True, max_flat_k=1 << 20),
}
BY_COPY = pytest.mark.parametrize("config", COPIES.values(), ids=COPIES.keys())
BY_COPY_AND_MOVES = in_turn({"config": COPIES, "gathers": {"by windows": False, "gathered": True}})
ALL = True, True, True, True
LARGE = 1 << 28


class Case(NamedTuple):
    """T tokens of d columns, K slots, E experts of inner size n."""

    tokens: int = 13
    hidden: int = 32
    inner: int = 16
    experts: int = 5
    topk: int = 2
    alignment: int = 1
    buffer: int = -1
    unassigned: float = 0.3


CASES = {
    "ordinary": Case(),
    "padding": Case(alignment=16),
    "a static buffer with room": Case(buffer=40, alignment=4),
    "a static buffer that drops rows": Case(buffer=9),
    "nothing assigned": Case(unassigned=1.0),
    "no tokens": Case(tokens=0),
    "odd sizes": Case(hidden=23, inner=9),
    "one of everything": Case(1, 1, 1, 1, 1, unassigned=0.0),
    "more columns than a tile": Case(3, 72, 24, 2, 2),
    "many experts": Case(9, 16, 8, 40, 3),
}


class Problem:
    """Integers in halves of a few bits, whose products and sums are exact, with gates where SwiGLU is exact as well."""

    def __init__(
        self,
        rng: np.random.Generator,
        case: Any,
        dtype: Any,
        transpose: bool,
        weighted: bool = True,
        ids: NDArray | None = None,
    ):
        tokens, d, n, experts, topk = case[:5]
        self.transpose = transpose
        if ids is None:
            ids = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :topk]
            ids = np.where(rng.random(ids.shape) < case.unassigned, -1, ids).astype(np.int32)
        options = {"buffer_size": case.buffer} if case.buffer >= 0 else {}
        self.plan = reference.route(ids, num_experts=experts, padding_alignment=case.alignment, **options)
        self.x = np.zeros((tokens, d))
        self.x[:, 0] = 1
        self.x[:, 1:] = rng.integers(-1, 2, (tokens, d - 1)) * (rng.random((tokens, d - 1)) < 8 / d)
        gate_up = np.zeros((experts, d, 2 * n))
        # exp(-gate) is less than half a step of 1, and the products of these gates are exact in 8 bits
        gate_up[:, 0, :n] = rng.choice([64.0, 128.0], (experts, n))
        gate_up[:, :, n:] = rng.integers(-1, 2, (experts, d, n)) * (rng.random((experts, d, n)) < 0.3)
        down = rng.integers(-2, 3, (experts, n, d)).astype(float)
        if transpose:
            gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
        self.gate_up, self.down = np.ascontiguousarray(gate_up), np.ascontiguousarray(down)
        self.d_out = rng.integers(-2, 3, (tokens, d)).astype(float)
        self.weights = None
        if weighted:
            live = self.plan.row_to_token >= 0
            self.weights = np.where(live, rng.choice([0.5, 1, 2], live.shape), np.nan).astype(np.float32)
        for name in ("x", "gate_up", "down", "d_out"):
            setattr(self, name, getattr(self, name).astype(dtype))

    @property
    def end(self) -> int:
        """The end of the last expert's rows; later rows are not read."""
        return max(np.flatnonzero(self.plan.row_to_token >= 0), default=-1) + 1

    def layer(self, gpu: Any, workspace: int) -> Layer:
        plan = self.plan
        groups = Groups(*(gpu.array(each.astype(np.int32)) for each in (plan.tokens_per_expert, plan.expert_offsets)))
        tokens = Tokens(gpu.array(plan.row_to_token), gpu.array(plan.token_rows))
        weights = None if self.weights is None else gpu.array(self.weights)
        return Layer(gpu.array(self.gate_up), gpu.array(self.down), groups, tokens, weights, self.transpose, workspace)

    def run(self, gpu: Any, workspace: int = LARGE, *, keeps: bool = True, into: tuple = (None, None)) -> list[NDArray]:
        """The result, the halves of the first product up to the last expert's rows, and all gradients."""
        layer, x = self.layer(gpu, workspace), gpu.array(self.x)
        out, kept = moe_mlp(gpu, x, layer, keeps)
        found = [gpu.numpy(out).copy()] + ([gpu.numpy(kept.hidden)[: self.end].copy()] if keeps else [])
        gradients = moe_mlp_backward(gpu, gpu.array(self.d_out), x, kept, layer, ALL, into)
        return found + [gpu.numpy(each).copy() for each in gradients if each is not None]

    def in_float64(self) -> list[NDArray]:
        """As `due`, not rounded; of these problems H, A and the operands of all products are the same."""
        given = [each.astype(np.float64) for each in (self.x, self.gate_up, self.down, self.d_out)]
        arguments = given[0], self.plan, given[1], given[2], self.weights
        out, hidden = reference.moe_mlp(*arguments, transpose=self.transpose)
        gradients = reference.moe_mlp_backward(given[3], *arguments, transpose=self.transpose)
        return [out, hidden[: self.end], *(each for each in gradients if each is not None)]

    def due(self) -> list[NDArray]:
        arguments = self.x, self.plan, self.gate_up, self.down, self.weights
        out, hidden = reference.moe_mlp(*arguments, transpose=self.transpose)
        gradients = reference.moe_mlp_backward(self.d_out, *arguments, transpose=self.transpose)
        return [out, hidden[: self.end], *(each for each in gradients if each is not None)]


@pytest.fixture
def tiles(monkeypatch):
    """Have all products use the same small tiles."""

    def use(config: GemmConfig, gathers: bool = False) -> None:
        for name in ("gated_config", "gemm_config", "wgrad_config"):
            monkeypatch.setattr(launchers, name, lambda *_: config)
        most = 1 << 30 if gathers else 0
        monkeypatch.setattr(gather_heuristic, "_MAX_GATHERED_N", most)
        monkeypatch.setattr(gather_heuristic, "_MAX_GATHERED_N_PER_PASS", most)

    return use


def without_sign_of_zero(array: NDArray) -> NDArray:
    return array + np.zeros_like(array)


def assert_all_same(made: list[NDArray], due: list[NDArray]) -> None:
    assert len(made) == len(due)
    for got, expected in zip(made, due, strict=True):
        assert_same_bits(without_sign_of_zero(got), without_sign_of_zero(expected))


@pytest.mark.sampled(2)
@in_turn({"case": CASES, "transpose": LAYOUTS, "config": COPIES})
def test_exact_sums_have_the_bits_of_the_oracle(rng, gpu, tiles, case, transpose, config):
    tiles(config)
    problem = Problem(rng, case, ml_dtypes.bfloat16, transpose)
    assert_all_same(problem.run(gpu), problem.due())


@BY_COPY_AND_MOVES
def test_the_size_of_the_buffer_changes_no_bit(rng, gpu, tiles, monkeypatch, config, gathers):
    tiles(config, gathers)
    monkeypatch.setattr(launchers, "_COLUMN_STEP", 16)
    problem = Problem(rng, Case(13, 48, 16, 2, 2, alignment=4), ml_dtypes.bfloat16, False)
    found = problem.due()
    for rows in (200, 1):
        assert_all_same(problem.run(gpu, rows * 48 * 2), found)


@BY_COPY
def test_without_the_first_product_the_backward_pass_makes_it_again(rng, gpu, tiles, config):
    tiles(config)
    problem = Problem(rng, Case(alignment=4), ml_dtypes.bfloat16, False)
    out, _, *gradients = problem.due()
    assert_all_same(problem.run(gpu, keeps=False), [out, *gradients])


@BY_LAYOUT
def test_without_weights_rows_are_added_up_as_they_are(rng, gpu, tiles, transpose):
    tiles(SMALL_TILES)
    problem = Problem(rng, Case(), np.float16, transpose, weighted=False)
    made = problem.run(gpu)
    assert len(made) == 5
    assert_all_same(made, problem.due())


@in_turn({"config": COPIES, "dtype": {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}})
def test_gradients_of_matrices_are_added_to_what_is_there(rng, gpu, tiles, monkeypatch, config, dtype):
    tiles(config._replace(block_n=128))
    monkeypatch.setattr(launchers, "_COLUMN_STEP", 128)
    problem = Problem(rng, Case(9, 140, 72, 3, 2), ml_dtypes.bfloat16, False)
    before = [rng.integers(-8, 9, each.shape).astype(dtype) for each in (problem.gate_up, problem.down)]
    into = [gpu.array(each) for each in before]
    *_, d_x, _, _, d_weights = problem.run(gpu, 1 << 12, into=tuple((each, True) for each in into))
    exact = problem.in_float64()
    for made, old, gradient in zip(into, before, exact[3:5], strict=True):
        assert_same_bits(
            without_sign_of_zero(gpu.numpy(made)),
            without_sign_of_zero((old.astype(np.float64) + gradient).astype(dtype)),
        )
    assert_all_same([d_x, d_weights], [problem.due()[2], problem.due()[5]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("left_out", range(4), ids=["x", "gate_up", "down", "weights"])
def test_gradients_that_no_one_wants_are_not_made(rng, gpu, tiles, left_out):
    tiles(SMALL_TILES)
    problem = Problem(rng, Case(), ml_dtypes.bfloat16, False)
    layer, x = problem.layer(gpu, LARGE), gpu.array(problem.x)
    _, kept = moe_mlp(gpu, x, layer, True)
    wanted = tuple(index != left_out for index in range(4))
    made = moe_mlp_backward(gpu, gpu.array(problem.d_out), x, kept, layer, wanted)
    assert made[left_out] is None
    due = problem.due()[2:]
    others = [index for index in range(4) if index != left_out]
    assert_all_same([gpu.numpy(made[index]) for index in others], [due[index] for index in others])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_random_numbers_are_within_the_bound_of_what_is_rounded(rng, gpu, tiles, dtype):
    tiles(SMALL_TILES)
    problem = Problem(rng, Case(9, 40, 24, 4, 3), dtype, False)
    for name in ("x", "gate_up", "down", "d_out"):
        setattr(problem, name, rng.standard_normal(getattr(problem, name).shape).astype(dtype))
    made, due = problem.run(gpu), problem.due()
    for got, expected in zip(made, due, strict=True):
        error = np.linalg.norm(got.astype(np.float64) - expected.astype(np.float64))
        assert error <= 4 * float(ml_dtypes.finfo(dtype).eps) * np.linalg.norm(expected.astype(np.float64))


@in_turn({"gathers": {"by windows": False, "gathered": True}, "keeps": {"keeping h": True, "keeping x": False}})
def test_no_array_has_the_rows_of_all_tokens(rng, gpu, tiles, monkeypatch, gathers, keeps):
    """Arrays beside the results: H, one array of the size of A, tables, and the buffer."""
    tiles(SMALL_TILES, gathers)
    monkeypatch.setattr(launchers, "_COLUMN_STEP", 16)
    problem = Problem(rng, Case(16, 64, 16, 3, 3, unassigned=0.0), ml_dtypes.bfloat16, False)
    rows, made = problem.plan.num_rows, []
    empty = gpu.empty

    def record(shape, dtype):
        made.append(tuple(shape))
        return empty(shape, dtype)

    monkeypatch.setattr(gpu, "empty", record)
    problem.run(gpu, 2 * 16 * 64, keeps=keeps)
    buffers = [shape[0] for shape in made if len(shape) == 1 and shape[0] > rows]
    assert len(buffers) == 2
    assert max(buffers) <= (16 + SMALL_TILES.block_m) * 64 < rows * 64
    results = [(16, 64), (rows, 32), (rows, 16), problem.gate_up.shape, problem.down.shape]
    assert all(len(shape) == 1 or shape in results for shape in made)
    assert (made.count((rows, 32)), made.count((rows, 16))) == (1, 2)


@pytest.mark.parametrize(
    ("topk", "inner", "chunks", "moves_twice", "expected"),
    [
        (8, 256, 1, False, True),
        (8, 256, 1, True, False),
        (8, 512, 1, False, True),
        (8, 513, 1, False, False),
        (8, 256, 3, True, True),
        (16, 256, 17, True, True),
        (8, 3584, 9, False, False),
        (8, 1024, 9, False, True),
        (8, 2000, 9, True, True),
        (8, 2001, 9, True, False),
    ],
)
def test_rows_are_gathered_where_moving_them_costs_more(topk, inner, chunks, moves_twice, expected):
    assert launchers.gathers(4096, 4096 * topk, inner, chunks, moves_twice) == expected


@BY_COPY_AND_MOVES
def test_rows_after_the_last_expert_are_not_touched(rng, gpu, tiles, config, gathers):
    """A static buffer is as large as the worst routing needs: nothing of it is written in vain."""
    tiles(config, gathers)
    problem = Problem(rng, Case(9, alignment=4, buffer=61), ml_dtypes.bfloat16, False)
    made = []
    empty = gpu.empty

    def record(shape, dtype):
        made.append(empty(shape, dtype))
        return made[-1]

    gpu.empty = record
    try:
        problem.run(gpu)
    finally:
        gpu.empty = empty
    of_rows = [gpu.numpy(each) for each in made if len(each.shape) == 2 and each.shape[0] == 61]
    assert len(of_rows) == 3  # H, and A of each pass
    for each in of_rows:
        untouched = gpu.numpy(empty(each[problem.end :].shape, "bfloat16"))
        assert problem.end < 61 - 16
        assert_same_bits(each[problem.end :], untouched)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_gate_far_below_zero_closes_whatever_it_gates(rng, gpu, tiles):
    """Also where the product of the two is not a number of float32."""
    tiles(SMALL_TILES)
    problem = Problem(rng, Case(20, 64, 16, 3, 2), ml_dtypes.bfloat16, False)
    problem.gate_up[:] = 0
    problem.gate_up[:, 0] = np.where(np.arange(32) < 16, -1e20, 1e20)
    out, _ = moe_mlp(gpu, gpu.array(problem.x), problem.layer(gpu, LARGE), True)
    assert not gpu.numpy(out).astype(np.float32).any()


@pytest.mark.cpu_only
def test_tokens_and_their_gradient_may_share_an_address(rng, gpu, tiles):
    """With strides of their own: the buffer holds rows of one of them."""
    tiles(SMALL_TILES)
    case = Case(hidden=23, inner=9)
    problem = Problem(rng, case, np.float16, False)
    wide = gpu.array(np.zeros((case.tokens, 2 * case.hidden), np.float16))
    d_out = wide.values.reshape(2 * case.tokens, case.hidden)[: case.tokens]
    x = gpu.columns(wide, case.hidden)
    x.values[...] = problem.x
    problem.d_out = d_out.copy()
    layer = problem.layer(gpu, LARGE)
    _, kept = moe_mlp(gpu, x, layer, True)
    gradients = moe_mlp_backward(gpu, type(x)(d_out), x, kept, layer, ALL)
    assert_all_same([gpu.numpy(each) for each in gradients], problem.due()[2:])


def test_rows_of_no_token_may_hold_anything(rng, gpu, tiles):
    """Weights are NaN there, and so is what the buffer holds before it is filled."""
    tiles(SMALL_TILES)
    problem = Problem(rng, Case(alignment=16, buffer=96), ml_dtypes.bfloat16, False)
    assert np.isnan(problem.weights).any()
    for made in problem.run(gpu):
        assert np.isfinite(made.astype(np.float32)).all()
