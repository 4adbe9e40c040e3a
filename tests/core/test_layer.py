# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Both passes of a layer of experts against the oracle: on GEMMs in NumPy, on a GPU on the kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from ..pairwise import in_turn, pairwise
from .binding import Core
from .guards import is_poison
from .layer import BACKWARD, FORWARD, H200, Hidden, Results, plan_of
from .layer_problems import BFLOAT16, Case, ExactLayer, RandomLayer, assert_near, assert_same, live_part
from .operators.grouped_gemm import PING_PONG, SWAP_AB, Accumulation

LAYOUTS = pytest.mark.parametrize("transpose", [False, True], ids=["as is", "transposed"])
BY_DTYPE = pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
# The oracle of random numbers adds in another order and precision.
ERRORS = {dtype: 4 * float(ml_dtypes.finfo(dtype).eps) for dtype in (BFLOAT16, np.dtype(np.float16))}

# Small layers gather, and the ping-pong kernel computes summed rows of 512 rows per expert and more. With n beyond 1536
# and more than 160 E rows, rows are permuted.
CASES = {
    "a few rows": Case(13, 32, 8, 5),
    "several tiles of an expert": Case(170, 24, 8, 2, unassigned=0.1),
    "padding": Case(23, 64, 16, alignment=16),
    "a static buffer with room": Case(20, 64, 136, buffer=150, alignment=4),
    "a static buffer that drops rows": Case(40, 64, 16, 4, buffer=21),
    "nothing assigned": Case(9, 64, 16, 4, unassigned=1.0),
    "no tokens": Case(0, 64, 16),
    "no tokens, but memory for rows": Case(0, 64, 16, buffer=40),
    "more experts than a warp has lanes": Case(20, 32, 8, 40, 3),
    "ping-pong kernel": Case(700, 24, 16, 1, 1, unassigned=0.1),
    "ping-pong kernel, tiles of 192 columns": Case(1150, 192, 16, 1, 1, unassigned=0.0),
    "columns that fill no tile": Case(41, 72, 328, 2),
    "rows that are permuted": Case(400, 16, 1544, 2, 1, unassigned=0.1),
}
# Sums of float16 whose numbers are in its range.
OF_FLOAT16 = ("a few rows", "several tiles of an expert", "nothing assigned", "ping-pong kernel")


def exact(rng: np.random.Generator, case: Case, dtype: DTypeLike = BFLOAT16, **options: Any) -> ExactLayer:
    problem = ExactLayer(rng, case, dtype, **options)
    if dtype == np.float16:
        problem.d_out *= np.float16(0.125)  # gradients stay below 65504
    return problem


@LAYOUTS
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exact_sums_have_the_bits_of_the_oracle(
    core: Core, rng: np.random.Generator, case: Case, transpose: bool
) -> None:
    problem = exact(rng, case, transpose=transpose)
    assert_same(live_part(problem.layer, problem.run(core)), problem.due())


@LAYOUTS
@pytest.mark.parametrize("name", OF_FLOAT16)
def test_exact_sums_of_float16_have_the_bits_of_the_oracle(
    core: Core, rng: np.random.Generator, name: str, transpose: bool
) -> None:
    problem = exact(rng, CASES[name], np.float16, transpose=transpose)
    assert_same(live_part(problem.layer, problem.run(core)), problem.due())


def test_cases_reach_every_choice(core: Core, rng: np.random.Generator) -> None:
    reached = set()
    for case in CASES.values():
        problem = exact(rng, case)
        made = plan_of(core, problem.layer.facts(problem.x, FORWARD))
        reached.add((made.gathers, made.sum_tile_rows))
    assert {(1, SWAP_AB), (1, PING_PONG), (0, SWAP_AB)} <= reached


@LAYOUTS
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tokens * case.topk < 24 * case.experts])
def test_a_pass_that_keeps_no_h_launches_the_kernel_for_few_rows(
    core: Core, rng: np.random.Generator, name: str, transpose: bool
) -> None:
    problem = exact(rng, CASES[name], transpose=transpose)
    layer = problem.layer._replace(keeps=Hidden.RECOMPUTES)
    assert_same(live_part(layer, problem.run(core, layer)), problem.due()._replace(hidden=None))


@pytest.mark.parametrize("keeps", [Hidden.KEEPS, Hidden.RECOMPUTES], ids=["keeps H", "recomputes H"])
@BY_DTYPE
def test_random_numbers_are_near_the_oracle(
    core: Core, rng: np.random.Generator, dtype: np.dtype, keeps: Hidden
) -> None:
    for case in (Case(31, 72, 40, 4, 3), Case(63, 8, 8, 7, 3), Case(300, 24, 1544, 1, 1)):
        problem = RandomLayer(rng, case, dtype, keeps=keeps)
        problem.d_out = rng.standard_normal(problem.x.shape).astype(dtype)
        assert_near(live_part(problem.layer, problem.run(core)), problem.due(), ERRORS[dtype])


@pytest.mark.parametrize("name", ["a few rows", "ping-pong kernel", "rows that are permuted"])
def test_h_that_is_recomputed_has_the_same_bits(core: Core, rng: np.random.Generator, name: str) -> None:
    problem = RandomLayer(rng, CASES[name])
    again = problem.run(core, problem.layer._replace(keeps=Hidden.RECOMPUTES))
    assert again.hidden is None
    assert_same(again, problem.run(core))


@in_turn({"workspace, num_chunks": [(1, 3), (200_000, 2)], "transpose": {"as is": False, "transposed": True}})
def test_bits_do_not_depend_on_chunks(
    core: Core, rng: np.random.Generator, workspace: int, num_chunks: int, transpose: bool
) -> None:
    problem = RandomLayer(rng, Case(340, 264, 3200, 1, 1, buffer=400, unassigned=0.0), transpose=transpose)
    chunked = problem.layer._replace(workspace=workspace)
    for which in (FORWARD, BACKWARD):
        made = plan_of(core, chunked.facts(problem.x, which))
        assert (made.num_chunks, made.chunk_columns) == (num_chunks, 256)
    assert_same(problem.run(core, chunked), problem.run(core))


def test_column_chunks_that_fit_tiles_of_192_columns_change_no_bit(core: Core, rng: np.random.Generator) -> None:
    problem = RandomLayer(rng, Case(1030, 776, 16, 1, 1, unassigned=0.0), gpu=H200)
    chunked = problem.layer._replace(workspace=1030 * 512 * 2)
    made = plan_of(core, chunked.facts(problem.x, FORWARD))
    assert (made.chunk_columns, made.sum_tile_rows) == (384, PING_PONG)
    assert_same(problem.run(core, chunked), problem.run(core))


def test_the_buffer_of_gathered_rows_contains_columns_only(core: Core, rng: np.random.Generator) -> None:
    problem = RandomLayer(rng, Case(60, 520, 16, unassigned=0.0))
    chunked = problem.layer._replace(workspace=1)
    made = plan_of(core, chunked.facts(problem.x, FORWARD))
    assert (made.gathers, made.chunk_columns, made.buffer_bytes) == (1, 256, 120 * 256 * 2)
    assert_same(problem.run(core, chunked), problem.run(core))


def test_rows_of_tokens_with_any_stride(core: Core, rng: np.random.Generator) -> None:
    for case in (Case(33, 16, 8, 4), Case(340, 16, 1544, 1, 1)):  # gathered and permuted
        problem = RandomLayer(rng, case)
        expected = problem.run(core)
        for name in ("x", "d_out"):
            wide = np.full((case.tokens, 40), np.nan, BFLOAT16)
            wide[:, 8:24] = getattr(problem, name)
            setattr(problem, name, wide[:, 8:24])
        assert_same(problem.run(core), expected)


@pytest.mark.parametrize("case", ["no tokens", "no tokens, but memory for rows", "nothing assigned"])
def test_without_rows_results_and_gradients_are_zeros(core: Core, rng: np.random.Generator, case: str) -> None:
    made = exact(rng, CASES[case]).run(core)
    for each in (made.out, made.d_x, made.d_gate_up, made.d_down, made.d_weights):
        assert not each.astype(np.float32).any()


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_buffer_without_rows(core: Core, rng: np.random.Generator, tokens: int) -> None:
    problem = exact(rng, Case(tokens, 16, 8, 4, buffer=0))
    made = problem.run(core)
    for each in (made.out, made.d_x, made.d_gate_up, made.d_down):
        assert not each.astype(np.float32).any()


def test_without_weights_rows_are_added_up_as_they_are(core: Core, rng: np.random.Generator) -> None:
    for transpose in (False, True):
        problem = exact(rng, Case(23, 64, 16), weighted=False, transpose=transpose)
        assert_same(live_part(problem.layer, problem.run(core, wanted=(True, True, True, False))), problem.due())


@pytest.mark.parametrize("clears", [True, False], ids=["zeros", "as they were"])
def test_rows_of_no_expert_in_h(core: Core, rng: np.random.Generator, clears: bool) -> None:
    problem = exact(rng, CASES["a static buffer with room"], clears_hidden=clears)
    made = problem.run(core)
    of_experts = np.zeros(len(made.hidden), bool)
    plan = problem.layer.plan
    for first, size in zip(plan.expert_offsets, plan.tokens_per_expert, strict=False):
        of_experts[first : first + size] = True
    assert 0 < of_experts.sum() < len(made.hidden)
    others = made.hidden[~of_experts]
    assert not others.astype(np.float32).any() if clears else is_poison(others)
    assert_same(live_part(problem.layer, made), problem.due())


@pytest.mark.parametrize("number", range(4), ids=["x", "gate_up", "down", "weights"])
@pytest.mark.parametrize("keeps", [Hidden.KEEPS, Hidden.RECOMPUTES], ids=["keeps H", "recomputes H"])
@pytest.mark.parametrize("case", [Case(30, 64, 16), CASES["rows that are permuted"]], ids=["gathered", "permuted"])
def test_only_gradients_that_are_wanted_are_computed(
    core: Core, rng: np.random.Generator, number: int, keeps: Hidden, case: Case
) -> None:
    problem = exact(rng, case, keeps=keeps)
    made = problem.run(core, wanted=tuple(each == number for each in range(4)))
    assert [each is not None for each in made[3:]] == [each == number for each in range(4)]
    assert_same(live_part(problem.layer, made), problem.due())


def values_before(
    rng: np.random.Generator, problem: RandomLayer, accumulations: tuple[Accumulation, Accumulation]
) -> tuple[NDArray, NDArray]:
    """Values for the gradients of the matrices: NaN for those that are overwritten."""
    layer, made = problem.layer, []
    for matrices, kind in zip((layer.gate_up, layer.down), accumulations, strict=True):
        dtype = np.dtype(np.float32) if kind == Accumulation.ADDS_FLOAT32 else matrices.dtype
        values = rng.integers(-8, 9, matrices.shape).astype(dtype)
        made.append(np.full_like(values, np.nan) if kind == Accumulation.OVERWRITES else values)
    return made[0], made[1]


ACCUMULATED = {
    "gathered rows": Case(13, 32, 8, 5),
    "permuted rows": Case(400, 16, 1544, 2, 1, unassigned=0.1),
    "column chunks": Case(170, 264, 1544, 1, 1, unassigned=0.0),
    "nothing assigned": Case(9, 64, 16, 4, unassigned=1.0),
}


KINDS = {each.name.lower(): each for each in Accumulation}


@pairwise({"case": ACCUMULATED, "of_gate_up": KINDS, "of_down": KINDS}, others_are_slow=True)
def test_gradients_of_matrices_are_added_to_their_values(
    core: Core, rng: np.random.Generator, case: Case, of_gate_up: Accumulation, of_down: Accumulation
) -> None:
    """Exact sums: a float32 gradient is not rounded to the dtype of the tokens."""
    accumulations = of_gate_up, of_down
    problem = exact(rng, case, accumulations=accumulations, transpose=bool(rng.integers(2)), workspace=1)
    problem.d_out *= rng.random(problem.d_out.shape) < 8 / case.hidden  # gradients of A are not rounded
    before = values_before(rng, problem, accumulations)
    made, due = problem.run(core, before=before), problem.due()
    exactly = exact_gradients(problem)
    for place, kind in enumerate(accumulations):
        if kind != Accumulation.OVERWRITES:
            total = before[place].astype(np.float64) + exactly[place]
            due = due._replace(**{("d_gate_up", "d_down")[place]: total.astype(before[place].dtype)})
    assert_same(live_part(problem.layer, made), due)


@pytest.mark.parametrize("keeps", [Hidden.KEEPS, Hidden.RECOMPUTES], ids=["keeps H", "recomputes H"])
@pytest.mark.parametrize("case", ACCUMULATED.values(), ids=ACCUMULATED)
def test_wgrads_in_a_call_of_their_own_have_the_same_bits(
    core: Core, rng: np.random.Generator, case: Case, keeps: Hidden
) -> None:
    options = {"keeps": keeps, "transpose": bool(rng.integers(2)), "workspace": int(rng.choice([1, 1 << 30]))}
    problem = RandomLayer(rng, case, **options)
    assert_same(problem.run(core, defers=True), problem.run(core))
    for wanted in ((True, True, False, True), (False, False, True, False)):
        assert_same(problem.run(core, defers=True, wanted=wanted), problem.run(core, wanted=wanted))


@LAYOUTS
def test_wgrads_in_a_call_of_their_own_are_added_to_values(
    core: Core, rng: np.random.Generator, transpose: bool
) -> None:
    kinds = Accumulation.ADDS_FLOAT32, Accumulation.ADDS
    problem = RandomLayer(rng, CASES["several tiles of an expert"], accumulations=kinds, transpose=transpose)
    before = values_before(rng, problem, kinds)
    assert_same(problem.run(core, before=before, defers=True), problem.run(core, before=before))


def exact_gradients(problem: RandomLayer) -> tuple[NDArray, NDArray]:
    """The gradients of the matrices in float64. H, A and the operands of all GEMMs of an exact layer are the same."""
    layer = problem.layer
    wide = ExactLayer.__new__(ExactLayer)
    wide.x, wide.d_out = (each.astype(np.float64) for each in (problem.x, problem.d_out))
    matrices = {name: getattr(layer, name).astype(np.float64) for name in ("gate_up", "down")}
    wide.layer = layer._replace(**matrices)
    due: Results = wide.due()
    return due.d_gate_up, due.d_down


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
def test_a_gate_far_below_zero_closes_any_up(core: Core, rng: np.random.Generator) -> None:
    """Also where the product of the two is not a number of float32."""
    problem = exact(rng, Case(20, 64, 16))
    gate_up = problem.layer.gate_up
    gate_up[:] = 0
    gate_up[:, 0] = np.where(np.arange(32) < 16, -1e20, 1e20)
    made = problem.run(core)
    assert np.abs(made.hidden.astype(np.float32)).max() > 9e19
    assert not made.out.astype(np.float32).any()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_of_one_expert_stays_with_its_rows(core: Core, rng: np.random.Generator) -> None:
    problem = exact(rng, Case(31, 64, 16, 3, 1, unassigned=0.0))
    layer = problem.layer
    layer.gate_up[1] = layer.down[1] = np.nan
    made = problem.run(core)
    bad = (problem.ids == 1).any(axis=1)
    assert np.isnan(made.out[bad].astype(np.float32)).all()
    for each in (made.out[~bad], made.d_x[~bad], made.d_gate_up[[0, 2]], made.d_down[[0, 2]]):
        assert np.isfinite(each.astype(np.float32)).all()


def test_counts_may_include_padding(core: Core, rng: np.random.Generator) -> None:
    problem = exact(rng, Case(40, 64, 16, alignment=16))
    plan = problem.layer.plan
    padded = plan._replace(tokens_per_expert=np.diff(plan.expert_offsets))
    assert (padded.tokens_per_expert > plan.tokens_per_expert).any()
    assert_same(problem.run(core, problem.layer._replace(plan=padded)), problem.run(core))
