# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of random sizes and wgrad: experts and rows around limits, skewed routing, float8, accumulation.

``--fuzz-cases`` says how many cases each test has, and ``--fuzz-seed`` which ones (tests/fuzzing.py). On a CPU a few
small ones run with GEMMs in NumPy; on a GPU the kernels of compute capability 9.0 run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paddle_moe_ops.reference import route
from paddle_moe_ops.testing.tolerances import FLOAT8_ERROR

from ..fuzzing import FEW_EXPERTS, MANY_EXPERTS, DrawnLayer, draw_layer, draw_rows, run_cases
from .binding import Core
from .grouped_cases import assert_like_oracle
from .layer import Hidden, Results
from .layer_problems import BFLOAT16, ExactLayer, RandomLayer, assert_near, assert_same, live_part
from .operators.grouped_gemm import Accumulation, ExpertRows, Gathered
from .test_grouped_wgrad_cuda import Wgrad

FLOAT16 = np.dtype(np.float16)
# Sizes whose sums are exact, and in the range of the dtype.
SIZES = {BFLOAT16: ((8, 16, 24, 40, 72, 136), (8, 16, 24, 40, 136)), FLOAT16: ((8, 16, 24, 40, 72), (8, 16))}
# With these n, rows are permuted before the GEMMs.
PERMUTED_SIZES = (8, 24, 264), (1544, 2056)
FLOAT8_SIZES = (16, 48, 144, 272), (128, 256)
COLUMNS = (8, 24, 40, 136, 200, 264)
BY_DTYPE = pytest.mark.parametrize("dtype", list(SIZES), ids=str)
BY_LAYOUT = pytest.mark.parametrize("transpose", [False, True], ids=["as is", "transposed"])
# A sum that rounds otherwise may be quantised to the neighbour: FLOAT8_ERROR holds for norms over this many rows.
# Gradients of fewer than MIN_ROWS_OF_WEIGHTS weights may cancel to about nothing.
ROWS_OF_FLOAT8_ERROR, MIN_ROWS_OF_WEIGHTS = 64, 8
Check = Callable[[np.random.Generator], None]


@pytest.fixture
def cases(request: pytest.FixtureRequest, core: Core) -> Callable[[Check], None]:
    """Runs a check for each case; for a CPU, a few."""
    most = 1 << 30 if core.device == "cuda" else 4
    return lambda check: run_cases(request, check, most)


def drawn_for(core: Core, rng: np.random.Generator, sizes: tuple[tuple[int, ...], ...], **options: Any) -> DrawnLayer:
    """A layer that the device runs in a short time."""
    if core.device == "cuda":
        return draw_layer(rng, *sizes, **options)
    return draw_layer(rng, sizes[0][:3], sizes[1][:1], share_of_many=0.0, few_experts=5, max_tokens=20)


def workspace_of(rng: np.random.Generator) -> int:
    """Bytes of a workspace: for all rows, or for chunks of them."""
    return int(rng.choice([1, 1 << 14, 1 << 17, 1 << 30]))


def check_exact(core: Core, rng: np.random.Generator, drawn: DrawnLayer, dtype: np.dtype, transpose: bool) -> None:
    options = {"workspace": workspace_of(rng), "keeps": Hidden(int(rng.integers(2))), "transpose": transpose}
    problem = ExactLayer(rng, drawn, dtype, ids=drawn.ids, weighted=rng.random() < 0.8, **options)
    if dtype == FLOAT16:
        problem.d_out *= FLOAT16.type(0.125)  # gradients stay below 65504
    wanted = (True, True, True, problem.layer.weights is not None)
    assert_same(live_part(problem.layer, problem.run(core, wanted=wanted)), problem.due())


@BY_LAYOUT
@BY_DTYPE
def test_layers_of_any_sizes_have_the_bits_of_the_oracle(
    core: Core, cases: Callable[[Check], None], dtype: np.dtype, transpose: bool
) -> None:
    cases(lambda rng: check_exact(core, rng, drawn_for(core, rng, SIZES[dtype]), dtype, transpose))


@BY_LAYOUT
def test_layers_whose_rows_are_permuted_have_bits_that_no_chunk_changes(
    core: Core, cases: Callable[[Check], None], transpose: bool
) -> None:
    def check(rng: np.random.Generator) -> None:
        d, n = (int(rng.choice(each if core.device == "cuda" else each[:1])) for each in PERMUTED_SIZES)
        experts, topk = int(rng.integers(1, 4)), 1
        tokens = int(rng.integers(160 * experts, 400 * experts))
        ids = rng.integers(-1, experts, (tokens, topk)).astype(np.int32)
        drawn = DrawnLayer(tokens, d, n, experts, topk, int(rng.choice([1, 16])), -1, ids)
        problem = RandomLayer(rng, drawn, ids=ids, transpose=transpose, keeps=Hidden(int(rng.integers(2))))
        chunked = problem.layer._replace(workspace=workspace_of(rng))
        assert_same(problem.run(core, chunked), problem.run(core))

    cases(check)


@BY_LAYOUT
@BY_DTYPE
def test_gradients_of_any_sizes_are_added_to_their_values(
    core: Core, cases: Callable[[Check], None], dtype: np.dtype, transpose: bool
) -> None:
    """Twice a gradient is exact: a float32 one has the bits of the sum of two, that of the dtype those of one."""

    def check(rng: np.random.Generator) -> None:
        drawn = drawn_for(core, rng, SIZES[dtype])
        problem = ExactLayer(rng, drawn, dtype, ids=drawn.ids, transpose=transpose, workspace=workspace_of(rng))
        problem.d_out *= dtype.type(0.125)
        kind = Accumulation(int(rng.choice([Accumulation.ADDS, Accumulation.ADDS_FLOAT32])))
        added = problem.layer._replace(accumulations=(kind, kind))
        sums_dtype = np.dtype(np.float32) if kind == Accumulation.ADDS_FLOAT32 else dtype
        zeros = tuple(np.zeros(each.shape, sums_dtype) for each in (added.gate_up, added.down))
        first = problem.run(core, added, before=zeros)
        rounded = first._replace(d_gate_up=first.d_gate_up.astype(dtype), d_down=first.d_down.astype(dtype))
        assert_same(live_part(problem.layer, rounded), problem.due())
        if kind == Accumulation.ADDS_FLOAT32:
            second = problem.run(core, added, before=(first.d_gate_up, first.d_down))
            assert_same(second, first._replace(d_gate_up=2 * first.d_gate_up, d_down=2 * first.d_down))

    cases(check)


def due_of_used_experts(problem: RandomLayer) -> Results:
    """As `RandomLayer.due` without padding or a static buffer; the oracle is slow for experts without rows."""
    layer, ids = problem.layer, problem.ids
    used = np.unique(np.append(ids[ids >= 0], 0))
    few = np.where(ids < 0, -1, np.searchsorted(used, ids)).astype(np.int32)
    matrices = {"gate_up": layer.gate_up[used], "down": layer.down[used]}
    problem.layer = layer._replace(plan=route(few, num_experts=used.size), **matrices)
    due = problem.due()
    problem.layer = layer
    wide = {}
    for name, matrix in (("d_gate_up", layer.gate_up), ("d_down", layer.down)):
        wide[name] = np.zeros_like(matrix)
        wide[name][used] = getattr(due, name)
    return due._replace(**wide)


@BY_LAYOUT
@pytest.mark.parametrize("keeps", list(Hidden), ids=lambda keeps: keeps.name.lower())
def test_float8_layers_of_any_sizes_are_near_the_oracle(
    core: Core, cases: Callable[[Check], None], keeps: Hidden, transpose: bool
) -> None:
    def check(rng: np.random.Generator) -> None:
        drawn = drawn_for(core, rng, FLOAT8_SIZES, share_of_many=0.05, few_experts=12)  # the oracle is slow
        options: dict[str, Any] = {"transpose": transpose, "keeps": keeps, "float8": True}
        options |= {"has_codes": bool(rng.integers(2)), "workspace": workspace_of(rng)}
        problem = RandomLayer(rng, drawn, ids=drawn.ids, weighted=rng.random() < 0.8, **options)
        rows = max(int((problem.layer.plan.row_to_token >= 0).sum()), 1)
        has_weights = problem.layer.weights is not None
        made = problem.run(core, wanted=(True, True, True, has_weights))
        made = made._replace(hidden=None, d_weights=made.d_weights if rows >= MIN_ROWS_OF_WEIGHTS else None)
        is_plain = drawn.alignment == 1 and drawn.buffer < 0
        due = due_of_used_experts(problem) if is_plain else problem.due()
        assert_near(made, due, FLOAT8_ERROR * max(1.0, (ROWS_OF_FLOAT8_ERROR / rows) ** 0.5))

    cases(check)


@pytest.mark.cuda_only
@BY_DTYPE
def test_wgrad_of_any_rows_has_the_bits_of_the_oracle(
    core: Core, cases: Callable[[Check], None], dtype: np.dtype
) -> None:
    def check(rng: np.random.Generator) -> None:
        has_many = rng.random() < 0.3
        experts = int(rng.choice(MANY_EXPERTS)) if has_many else int(rng.integers(1, FEW_EXPERTS + 1))
        sizes, offsets = draw_rows(rng, experts), None
        if rng.random() < 0.3:  # in any order, with gaps
            order, gaps = rng.permutation(experts), rng.integers(0, 3, experts)
            ends = np.cumsum(np.array(sizes)[order] + gaps)
            offsets = [int(each) for each in (ends - np.array(sizes)[order])[np.argsort(order)]]
        p, q = (int(each) for each in rng.choice(COLUMNS[:2] if has_many else COLUMNS, 2))
        gathered = Gathered(int(rng.choice([0, 0, 0, 1, 2])))
        wgrad = Wgrad(rng, (ExpertRows(sizes, offsets), p, q), dtype, gathered)
        accumulation = Accumulation(int(rng.integers(3)))
        place, margin = ((int(rng.integers(9)), 8 * int(rng.integers(4))) for _ in range(2))
        assert_like_oracle(core, "grouped_outer", wgrad.maker(core, accumulation, place, margin))

    cases(check)
