# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle of the grouped product against one product for each row, and its gradients against differences."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_moe_ops.reference import grouped_gemm, grouped_gemm_backward

SIZES, OFFSETS, ROWS = [2, 0, 3], [1, 4, 4, 8], 9
OWNER = [-1, 0, 0, -1, 2, 2, 2, -1, -1]  # the expert of each row


@pytest.mark.parametrize("transpose", [True, False])
def test_every_row_meets_the_matrix_of_its_expert(transpose, rng):
    x, w = rng.standard_normal((ROWS, 4)), rng.standard_normal((3, 5, 4) if transpose else (3, 4, 5))
    out = grouped_gemm(x, w, SIZES, transpose, expert_offsets=OFFSETS)
    for row, expert in enumerate(OWNER):
        matrix = w[expert].T if transpose else w[expert]
        np.testing.assert_allclose(out[row], x[row] @ matrix if expert >= 0 else np.zeros(5), rtol=1e-12, atol=0)


def test_groups_without_offsets_follow_each_other(rng):
    x, w = rng.standard_normal((6, 4)), rng.standard_normal((3, 5, 4))
    np.testing.assert_array_equal(grouped_gemm(x, w, SIZES), grouped_gemm(x, w, SIZES, expert_offsets=[0, 2, 2, 5]))


@pytest.mark.parametrize("transpose", [True, False])
def test_gradients_against_finite_differences(transpose, rng):
    """The product is linear in each operand, so any step is exact."""
    operands = [rng.standard_normal((ROWS, 2)), rng.standard_normal((3, 4, 2) if transpose else (3, 2, 4))]
    d_out = rng.standard_normal((ROWS, 4))
    arguments = SIZES, transpose
    gradients = grouped_gemm_backward(d_out, *operands, *arguments, expert_offsets=OFFSETS)
    for position, gradient in enumerate(gradients):
        for index in np.ndindex(gradient.shape):
            losses = []
            for step in (0.5, -0.5):
                moved = [operand.copy() for operand in operands]
                moved[position][index] += step
                losses.append((grouped_gemm(*moved, *arguments, expert_offsets=OFFSETS) * d_out).sum())
            assert gradient[index] == pytest.approx(losses[0] - losses[1], abs=1e-10)
