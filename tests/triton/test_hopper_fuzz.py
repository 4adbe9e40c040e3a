# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of random sizes on the library's kernels for Hopper: experts and rows around limits, skewed routing, float8.

``--fuzz-cases`` says how many cases each test has, and ``--fuzz-seed`` which ones (tests/fuzzing.py). Without a GPU a
few small ones run on the kernels in NumPy.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paddle_moe_ops.testing.tolerances import FLOAT8_ERROR
from paddle_moe_ops.triton.hopper_float8 import float8_kernels_of
from paddle_moe_ops.triton.hopper_outer import grouped_outer_of, hopper_outer
from paddle_moe_ops.triton.hopper_product import TILE_ROWS, TURNED_ROWS
from tests.fuzzing import FEW_EXPERTS, MANY_EXPERTS, DrawnLayer, draw_layer, draw_rows, run_cases
from tests.reference.cases import assert_same_bits

from . import test_hopper_float8 as float8
from . import test_moe_mlp as wide
from .library_in_numpy import kernel_for, numpy_float8_kernels, numpy_grouped_outer, use_products
from .test_hopper_outer import Sums, due, operands, packed, tables, with_tokens
from .test_moe_mlp import BY_LAYOUT, assert_all_same, without_sign_of_zero

# Sizes whose sums are exact, and in the range of the dtype.
SIZES = {"bfloat16": ((8, 16, 24, 40, 72, 136), (8, 16, 24, 40, 136)), "float16": ((8, 16, 24, 40, 72), (8, 16))}
FLOAT8_SIZES = (16, 48, 144), (128, 256)
COLUMNS = (8, 24, 40, 136, 200, 264)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
BY_DTYPE = pytest.mark.parametrize("dtype", list(DTYPES))
# A sum that rounds otherwise may be quantised to the neighbour: FLOAT8_ERROR holds for norms over this many rows.
# Gradients of fewer than MIN_ROWS_OF_WEIGHTS weights may cancel to about nothing.
ROWS_OF_FLOAT8_ERROR, MIN_ROWS_OF_WEIGHTS = 64, 8


@pytest.fixture
def cases(request, gpu) -> Any:
    """Runs a check for each case; for the interpreter, a few."""
    from .interpreter import NumpyDevice

    most = 2 if isinstance(gpu, NumpyDevice) else 1 << 30
    return lambda check: run_cases(request, check, most)


def drawn_for(gpu: Any, rng: np.random.Generator, sizes: tuple[tuple[int, ...], ...], **options: Any) -> DrawnLayer:
    """A layer that the device runs in a short time."""
    from .interpreter import NumpyDevice

    if isinstance(gpu, NumpyDevice):
        return draw_layer(rng, sizes[0][:3], sizes[1][:1], share_of_many=0.0, few_experts=5, max_tokens=20)
    return draw_layer(rng, *sizes, **options)


@pytest.fixture
def choices(gpu, monkeypatch) -> SimpleNamespace:
    """The rows of tiles of plain results, and whether GEMMs gather: a case chooses both."""
    chosen = SimpleNamespace(rows=TURNED_ROWS, gathers=False)
    use_products(gpu, monkeypatch, lambda: chosen.rows, lambda: chosen.gathers)
    return chosen


@BY_LAYOUT
@BY_DTYPE
def test_layers_of_any_sizes_have_the_bits_of_the_oracle(cases, gpu, choices, dtype, transpose):
    def check(rng: np.random.Generator) -> None:
        layer = drawn_for(gpu, rng, SIZES[dtype])
        problem = wide.Problem(rng, layer, DTYPES[dtype], transpose, rng.random() < 0.8, layer.ids)
        if dtype == "float16":
            problem.d_out *= np.float16(0.125)  # gradients stay below 65504
        choices.rows, choices.gathers = int(rng.choice([TILE_ROWS, TURNED_ROWS])), bool(rng.random() < 0.5)
        made, expected = problem.run(gpu), problem.due()
        live = problem.plan.row_to_token[: problem.end] >= 0
        made[1], expected[1] = made[1][live], expected[1][live]
        assert_all_same(made, expected)

    cases(check)


@BY_LAYOUT
@pytest.mark.parametrize("in_float8", [False, True], ids=["first product in bfloat16", "first product in float8"])
def test_float8_layers_of_any_sizes_are_near_the_oracle(cases, gpu, monkeypatch, in_float8, transpose):
    monkeypatch.setattr(gpu, "grouped_outer", kernel_for(gpu, monkeypatch, numpy_grouped_outer(), grouped_outer_of))
    monkeypatch.setattr(gpu, "grouped_float8", kernel_for(gpu, monkeypatch, numpy_float8_kernels(), float8_kernels_of))

    def check(rng: np.random.Generator) -> None:
        layer = drawn_for(gpu, rng, FLOAT8_SIZES, share_of_many=0.05, few_experts=12)  # the oracle is slow
        problem = float8.Problem(rng, layer, transpose, rng.random() < 0.8, layer.ids)
        is_plain = layer.alignment == 1 and layer.buffer < 0
        expected = float8.due_of_used_experts(problem, in_float8) if is_plain else problem.due(in_float8)
        made = problem.run(gpu, in_float8=in_float8)
        made = {name: each for name, each in made.items() if not name.startswith("hidden")}
        rows = max(int((problem.plan.row_to_token >= 0).sum()), 1)
        error = FLOAT8_ERROR * max(1.0, (ROWS_OF_FLOAT8_ERROR / rows) ** 0.5)
        for name, value in made.items():
            if name != "weights" or rows >= MIN_ROWS_OF_WEIGHTS:
                got, wanted = (each.astype(np.float64) for each in (value, expected[name]))
                assert np.linalg.norm(got - wanted) <= error * np.linalg.norm(wanted), name

    cases(check)


@BY_DTYPE
def test_wgrad_of_any_rows_has_the_bits_of_the_oracle(cases, gpu, monkeypatch, dtype):
    monkeypatch.setattr(gpu, "grouped_outer", kernel_for(gpu, monkeypatch, numpy_grouped_outer(), grouped_outer_of))

    def check(rng: np.random.Generator) -> None:
        has_many = rng.random() < 0.3
        experts = int(rng.choice(MANY_EXPERTS)) if has_many else int(rng.integers(1, FEW_EXPERTS + 1))
        sizes = draw_rows(rng, experts)
        offsets = None
        if rng.random() < 0.3:  # in any order, with gaps
            order, gaps = rng.permutation(experts), rng.integers(0, 3, experts)
            ends = np.cumsum(np.array(sizes)[order] + gaps)
            offsets = [int(each) for each in (ends - np.array(sizes)[order])[np.argsort(order)]]
        columns = tuple(int(each) for each in rng.choice(COLUMNS[:2] if has_many else COLUMNS, 2))
        sums = Sums(sizes, offsets, columns=columns)
        given = list(operands(rng, sums, DTYPES[dtype]))
        rows, gathered = [packed(gpu, each) for each in given], None
        if rng.random() < 0.3:
            rows, gathered = with_tokens(rng, gpu, sums, given, bool(rng.random() < 0.5))
        out = gpu.empty([experts, *columns], dtype)
        hopper_outer(gpu, *rows, tables(gpu, sums), sums.rows, out, gathered=gathered)
        assert_same_bits(without_sign_of_zero(gpu.numpy(out)), due(sums, *given).astype(DTYPES[dtype]))

    cases(check)
