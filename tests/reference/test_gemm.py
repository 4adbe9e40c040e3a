# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle of the grouped product against one product for each row."""

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


def test_rows_of_tokens_and_weights(rng):
    x, w, weights = rng.standard_normal((4, 4)), rng.standard_normal((3, 5, 4)), rng.standard_normal(ROWS)
    tokens = np.array([-1, 3, 3, -1, 0, 1, 2, -1, -1])
    out = grouped_gemm(x, w, SIZES, expert_offsets=OFFSETS, row_to_token=tokens, weights=weights)
    for row, expert in enumerate(OWNER):
        expected = weights[row] * (x[tokens[row]] @ w[expert].T) if expert >= 0 else np.zeros(5)
        np.testing.assert_allclose(out[row], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("transpose", [True, False])
def test_experts_without_rows_and_rows_of_no_group_get_gradients_of_zero(transpose, rng):
    x, w = rng.standard_normal((ROWS, 4)), rng.standard_normal((3, 5, 4) if transpose else (3, 4, 5))
    d_out = rng.standard_normal((ROWS, 5))
    d_x, d_w = grouped_gemm_backward(d_out, x, w, SIZES, transpose, expert_offsets=OFFSETS)
    assert not d_w[1].any()
    for row, expert in enumerate(OWNER):
        matrix = w[expert] if transpose else w[expert].T
        np.testing.assert_allclose(d_x[row], d_out[row] @ matrix if expert >= 0 else np.zeros(4), rtol=1e-12)
