# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Both passes of a layer of experts with float8 operands; GEMMs and their device are those of test_layer.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddle_moe_ops import reference

from ..pairwise import in_turn
from ..reference.cases import assert_same_bits
from .binding import Core
from .guards import is_poison
from .layer import BACKWARD, FORWARD, Hidden, Results, choices, plan_of
from .layer_problems import BFLOAT16, Case, RandomLayer, assert_near, assert_same, live_part
from .operators.grouped_gemm import AMAX_MIN, Accumulation

LAYOUTS = {"as is": False, "transposed": True}
BY_LAYOUT = pytest.mark.parametrize("transpose", LAYOUTS.values(), ids=LAYOUTS)
KEPT = {"recomputes H": Hidden.RECOMPUTES, "keeps H": Hidden.KEEPS, "keeps codes": Hidden.KEEPS_CODES}
BY_KEPT = pytest.mark.parametrize("keeps", KEPT.values(), ids=KEPT)
WGRADS = {"wgrads": False, "float8 wgrads": True}
BY_WGRADS = pytest.mark.parametrize("float8_wgrads", WGRADS.values(), ids=WGRADS)
CASES = {
    "several tiles of an expert": Case(160, 144, 128, 1, 1, unassigned=0.1),
    "a few rows": Case(7, 16, 128),
    "no tokens": Case(0, 16, 128),
    "no tokens, but memory for rows": Case(0, 16, 128, buffer=40),
    "no rows": Case(5, 16, 128, buffer=0),
    "nothing assigned": Case(9, 16, 128, unassigned=1.0),
    "padding": Case(40, 16, 128, alignment=16),
    "a static buffer with room": Case(20, 16, 128, buffer=100),
    "a static buffer that drops rows": Case(40, 16, 128, buffer=21),
    "more experts than a warp has lanes": Case(20, 16, 128, 40),
    "one expert": Case(50, 16, 256, 1, 1, unassigned=0.0),
}


def layer(rng: np.random.Generator, case: Case, **options: Any) -> RandomLayer:
    """A layer with gradients so small that their scales need the least ``amax_min``."""
    problem = RandomLayer(rng, case, float8=True, **options)
    problem.d_out = (problem.d_out.astype(np.float32) * 1e-3).astype(BFLOAT16)
    return problem


def without_codes(made: Results) -> Results:
    """Results without H, whose codes the oracle lacks."""
    return made._replace(hidden=None, hidden_scales=None)


@BY_WGRADS
@in_turn({"case": CASES, "transpose": LAYOUTS, "keeps": KEPT})
def test_results_are_near_the_oracle(
    core: Core, rng: np.random.Generator, case: Case, transpose: bool, keeps: Hidden, float8_wgrads: bool
) -> None:
    problem = layer(rng, case, transpose=transpose, keeps=keeps, float8_wgrads=float8_wgrads)
    made = live_part(problem.layer, problem.run(core))
    assert_near(made if keeps == Hidden.KEEPS else without_codes(made), problem.due())


@BY_LAYOUT
@BY_KEPT
def test_codes_of_matrices_that_are_given_change_no_bit(
    core: Core, rng: np.random.Generator, keeps: Hidden, transpose: bool
) -> None:
    problem = layer(rng, Case(60, 272, 256, 2), transpose=transpose, keeps=keeps)
    assert_same(problem.run(core, problem.layer._replace(has_codes=True)), problem.run(core))


@BY_WGRADS
@in_turn({"case": CASES, "transpose": LAYOUTS, "keeps": KEPT})
def test_wgrads_in_a_call_of_their_own_have_the_same_bits(
    core: Core, rng: np.random.Generator, case: Case, transpose: bool, keeps: Hidden, float8_wgrads: bool
) -> None:
    options = {"has_codes": bool(rng.integers(2)), "float8_wgrads": float8_wgrads}
    problem = layer(rng, case, transpose=transpose, keeps=keeps, **options)
    assert_same(without_codes(problem.run(core, defers=True)), without_codes(problem.run(core)))


@BY_LAYOUT
def test_h_that_is_recomputed_has_the_same_bits(core: Core, rng: np.random.Generator, transpose: bool) -> None:
    problem = layer(rng, Case(23, 16, 128), transpose=transpose)
    assert_same(problem.run(core, problem.layer._replace(keeps=Hidden.RECOMPUTES)), problem.run(core))


@BY_WGRADS
@BY_KEPT
@BY_LAYOUT
def test_bits_do_not_depend_on_chunks(
    core: Core, rng: np.random.Generator, transpose: bool, keeps: Hidden, float8_wgrads: bool
) -> None:
    case = Case(420, 528, 128, 2, 1, buffer=430, unassigned=0.0)
    problem = layer(rng, case, transpose=transpose, keeps=keeps, float8_wgrads=float8_wgrads)
    chunked = problem.layer._replace(workspace=1)
    for which in (FORWARD, BACKWARD):
        made = plan_of(core, chunked.facts(problem.x, which))
        assert (made.num_chunks, made.chunk_columns) == (3, 256)
    assert made.wgrad_columns == (256 if float8_wgrads else 0)
    assert_same(problem.run(core, chunked), problem.run(core))


@pytest.mark.parametrize("case", ["several tiles of an expert", "padding", "one expert"])
def test_kept_codes_are_those_of_h_bit_for_bit(core: Core, rng: np.random.Generator, case: str) -> None:
    problem = layer(rng, CASES[case])
    gates = problem.layer.gate_up[..., : CASES[case].inner]
    gates[0] *= BFLOAT16.type(2.0**-110)  # below the least that scales are computed from
    wide, made = problem.run(core), problem.run(core, problem.layer._replace(keeps=Hidden.KEEPS_CODES))
    assert_same_bits(made.out, wide.out)
    live = problem.layer.plan.row_to_token >= 0
    codes, scales = reference.quantize_1x128(wide.hidden[live], amax_min=AMAX_MIN)
    assert_same_bits(made.hidden[live], codes)
    assert_same_bits(made.hidden_scales[live], scales)


def test_numbers_that_float8_has_come_back_from_codes(core: Core, rng: np.random.Generator) -> None:
    """Gradients have the bits of those from H in bfloat16."""
    problem = layer(rng, Case(61, 144, 256, 2, 1, unassigned=0.0))
    problem.x = np.zeros_like(problem.x)
    problem.x[np.arange(61), 2 * np.arange(61)] = 1
    shape = problem.layer.gate_up.shape
    grid = rng.integers(-15, 16, shape) * 2.0 ** rng.integers(-4, 1, shape)
    grid[:, :, ::128] = 28  # the scale is 1/16, of matrices and of rows
    exact = problem.layer._replace(gate_up=grid.astype(BFLOAT16))
    made = problem.run(core, exact._replace(keeps=Hidden.KEEPS_CODES))
    assert np.unique(made.hidden_scales).tolist() == [1 / 16]
    assert_same(without_codes(made), without_codes(problem.run(core, exact)))


@BY_WGRADS
@pytest.mark.parametrize("number", range(4), ids=["x", "gate_up", "down", "weights"])
@BY_KEPT
def test_only_gradients_that_are_wanted_are_computed(
    core: Core, rng: np.random.Generator, keeps: Hidden, number: int, float8_wgrads: bool
) -> None:
    options = {"has_codes": bool(rng.integers(2)), "float8_wgrads": float8_wgrads}
    problem = layer(rng, Case(30, 16, 128), keeps=keeps, **options)
    made = problem.run(core, wanted=tuple(each == number for each in range(4)))
    assert [each is not None for each in made[3:]] == [each == number for each in range(4)]
    assert_same(made, problem.run(core))


@pytest.mark.parametrize("topk", [1, 2])
def test_without_weights_rows_are_added_up_as_they_are(core: Core, rng: np.random.Generator, topk: int) -> None:
    problem = layer(rng, Case(23, 16, 128, topk=topk), weighted=False)
    made = problem.run(core, wanted=(True, True, True, False))
    assert_near(live_part(problem.layer, made), problem.due())


@BY_WGRADS
@BY_KEPT
@pytest.mark.parametrize("kind", [Accumulation.ADDS, Accumulation.ADDS_FLOAT32], ids=["adds", "adds to float32"])
def test_gradients_of_matrices_are_added_to_their_values(
    core: Core, rng: np.random.Generator, kind: Accumulation, keeps: Hidden, float8_wgrads: bool
) -> None:
    """Zeros become the gradients; their own gradients are doubled, which no rounding changes."""
    options = {"transpose": bool(rng.integers(2)), "float8_wgrads": float8_wgrads}
    problem = layer(rng, Case(40, 272, 128), keeps=keeps, **options)
    added = problem.layer._replace(accumulations=(kind, kind), workspace=1)
    dtype = np.dtype(np.float32) if kind == Accumulation.ADDS_FLOAT32 else BFLOAT16
    shapes = problem.layer.gate_up.shape, problem.layer.down.shape
    first = problem.run(core, added, before=tuple(np.zeros(shape, dtype) for shape in shapes))
    overwritten = problem.run(core)
    assert_same_bits(first.d_gate_up.astype(BFLOAT16), overwritten.d_gate_up)
    assert_same_bits(first.d_down.astype(BFLOAT16), overwritten.d_down)
    if kind == Accumulation.ADDS_FLOAT32:
        twice = problem.run(core, added, before=(first.d_gate_up, first.d_down))
        assert_same_bits(twice.d_gate_up, 2 * first.d_gate_up)
        assert_same_bits(twice.d_down, 2 * first.d_down)


@BY_WGRADS
def test_rows_of_tokens_with_any_stride(core: Core, rng: np.random.Generator, float8_wgrads: bool) -> None:
    problem = layer(rng, Case(33, 144, 128), float8_wgrads=float8_wgrads)
    expected = problem.run(core)
    for name in ("x", "d_out"):
        wide = np.full((33, 168), np.nan, BFLOAT16)
        wide[:, 8:152] = getattr(problem, name)
        setattr(problem, name, wide[:, 8:152])
    assert_same(problem.run(core), expected)


@BY_WGRADS
@BY_KEPT
@pytest.mark.parametrize("case", ["no tokens", "no tokens, but memory for rows", "no rows", "nothing assigned"])
def test_without_rows_results_and_gradients_are_zeros(
    core: Core, rng: np.random.Generator, case: str, keeps: Hidden, float8_wgrads: bool
) -> None:
    made = layer(rng, CASES[case], keeps=keeps, float8_wgrads=float8_wgrads).run(core)
    for each in (made.out, made.d_x, made.d_gate_up, made.d_down, made.d_weights):
        assert not each.astype(np.float32).any()


@pytest.mark.filterwarnings("ignore:invalid value")
@BY_WGRADS
@BY_KEPT
def test_nan_of_one_expert_stays_with_its_rows(
    core: Core, rng: np.random.Generator, keeps: Hidden, float8_wgrads: bool
) -> None:
    problem = layer(rng, Case(31, 16, 128, 3, 1, unassigned=0.0), keeps=keeps, float8_wgrads=float8_wgrads)
    problem.layer.gate_up[1] = np.nan
    made = problem.run(core)
    bad = (problem.ids == 1).any(axis=1)
    assert np.isnan(made.out[bad].astype(np.float32)).all()
    for each in (made.out[~bad], made.d_x[~bad], made.d_gate_up[[0, 2]], made.d_down[[0, 2]]):
        assert np.isfinite(each.astype(np.float32)).all()


@pytest.mark.parametrize("clears", [True, False], ids=["zeros", "as they were"])
def test_rows_of_no_expert_in_h(core: Core, rng: np.random.Generator, clears: bool) -> None:
    problem = layer(rng, Case(20, 16, 128, buffer=100, alignment=4), clears_hidden=clears)
    made, rows = problem.run(core), problem.layer.plan.row_to_token
    assert 0 < (rows < 0).sum() < len(rows)
    others = made.hidden[rows < 0]
    assert not others.astype(np.float32).any() if clears else is_poison(others)
    assert_near(live_part(problem.layer, made), problem.due())


@BY_WGRADS
def test_counts_may_include_padding(core: Core, rng: np.random.Generator, float8_wgrads: bool) -> None:
    problem = layer(rng, Case(40, 16, 128, alignment=16), float8_wgrads=float8_wgrads)
    plan = problem.layer.plan
    padded = plan._replace(tokens_per_expert=np.diff(plan.expert_offsets))
    assert (padded.tokens_per_expert > plan.tokens_per_expert).any()
    assert_same(problem.run(core, problem.layer._replace(plan=padded)), problem.run(core))


@pytest.mark.parametrize(("rows", "experts", "blocks"), [(2, 3, 2), (5, 3, 3), (300, 2, 4)])
def test_memory_of_float8_wgrads_is_that_of_row_blocks(core: Core, rows: int, experts: int, blocks: int) -> None:
    """Codes of an operand of 2n columns lie where those of permuted rows were, codes of tokens in the chunk buffer."""
    hidden, inner = 16, 128
    sizes = {"num_tokens": rows, "num_rows": rows, "num_experts": experts, "hidden": hidden, "inner": inner}
    given = {**sizes, "workspace": 1 << 30, "dtype": 2, "backward": BACKWARD, "float8": 1, "has_codes": 1}

    def aligned(size: int) -> int:
        return -(-size // 256) * 256

    def codes(columns: int, scales: int) -> int:
        return aligned(128 * blocks * columns) + aligned(4 * blocks * scales)

    plain, made = choices(core, **given), choices(core, **given, float8_wgrads=1)
    of_rows = aligned(rows * hidden) + aligned(4 * rows)
    shared = max(of_rows, codes(inner, inner), codes(2 * inner, 2)) - of_rows
    assert made.wgrad_columns == hidden
    assert made.buffer_bytes == max(plain.buffer_bytes, codes(hidden, hidden))
    assert made.bytes - plain.bytes == aligned(made.buffer_bytes) - aligned(plain.buffer_bytes) + shared
