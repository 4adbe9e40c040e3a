# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Forward passes that read integer codes of matrices: the bits of passes on the values of the codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddle_moe_ops.reference import MATRIX_FORMATS, dequantize_matrices, quantize_matrices

from ..pairwise import in_turn
from ..reference.cases import assert_same_bits
from .binding import Core
from .layer import FORWARD, Hidden, Layer, forward, plan_of
from .layer_problems import BFLOAT16, Case, RandomLayer
from .operators.grouped_gemm import FEW_ROWS

FORMATS = MATRIX_FORMATS[:3]
CASES = {
    "one token": Case(1, 64, 32, 5, 2, unassigned=0.0),
    "a few rows": Case(13, 32, 96, 5),
    "several tiles of an expert": Case(90, 288, 160, 4, 2),
    "padding": Case(23, 64, 32, alignment=16),
    "a static buffer with room": Case(20, 64, 128, buffer=150, alignment=4),
    "a static buffer that drops rows": Case(40, 64, 32, 4, buffer=21),
    "nothing assigned": Case(9, 64, 32, 4, unassigned=1.0),
    "no rows": Case(5, 32, 32, buffer=0),
    "more experts than a warp has lanes": Case(20, 32, 64, 40, 3),
}
DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
LAYOUTS = {"as is": False, "transposed": True}


def values_of(layer: Layer) -> Layer:
    """The layer on the values of its codes."""
    made = []
    for matrices in (layer.gate_up, layer.down):
        stored = matrices if layer.transpose else np.ascontiguousarray(matrices.swapaxes(1, 2))
        codes, scales = quantize_matrices(stored, format=layer.codes_format, transpose=True)
        options: dict[str, Any] = {"format": layer.codes_format, "inner": stored.shape[2], "transpose": True}
        values = dequantize_matrices(codes, scales, dtype=stored.dtype, **options)
        made.append(np.array(values, order="C", copy=True))
    return layer._replace(gate_up=made[0], down=made[1], transpose=True, has_codes=False)


@in_turn({"case": CASES, "format": dict(zip(FORMATS, FORMATS, strict=True)), "dtype": DTYPES, "transpose": LAYOUTS})
def test_results_are_those_of_the_values_bit_for_bit(
    core: Core, rng: np.random.Generator, case: Case, format: str, dtype: np.dtype, transpose: bool
) -> None:
    options = {"transpose": transpose, "has_codes": True, "codes_format": format}
    problem = RandomLayer(rng, case, dtype, keeps=Hidden.RECOMPUTES, **options)
    assert plan_of(core, problem.layer.facts(problem.x, FORWARD)).sum_tile_rows == FEW_ROWS
    made = forward(core, problem.layer, problem.x)
    assert_same_bits(made, forward(core, values_of(problem.layer), problem.x))


@pytest.mark.parametrize("format", FORMATS)
def test_bits_do_not_depend_on_chunks_of_columns(core: Core, rng: np.random.Generator, format: str) -> None:
    problem = RandomLayer(rng, Case(30, 544, 64, 3), keeps=Hidden.RECOMPUTES, has_codes=True, codes_format=format)
    chunked = problem.layer._replace(workspace=1)
    assert plan_of(core, chunked.facts(problem.x, FORWARD)).chunk_columns == 256
    assert_same_bits(forward(core, chunked, problem.x), forward(core, problem.layer, problem.x))
