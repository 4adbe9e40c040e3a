# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle of activations and biases: values by hand, gradients against finite differences, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.reference import (
    ACTIVATIONS,
    activate,
    grouped_gemm,
    grouped_gemm_backward,
    moe_mlp,
    moe_mlp_backward,
    route,
)

IDS = np.array([[2, 0, -1], [0, 3, 1], [-1, -1, -1], [3, -1, -1], [1, 3, 0]], np.int32)
E, D, N = 5, 3, 2
STEP = 2.0**-14
BY_HAND = {
    "swiglu": (2 / (1 + math.exp(-2))) * 3,
    "geglu": 2 * 0.5 * (1 + math.erf(2 / math.sqrt(2))) * 3,
    "geglu_tanh": 2 * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (2 + 0.044715 * 8))) * 3,
    "swiglu_oai": 4 * 2 / (1 + math.exp(-1.702 * 2)),
}


def slope(loss: Callable[[NDArray], float], at: NDArray) -> NDArray:
    found = np.zeros(at.shape)
    for place in np.ndindex(at.shape):
        step = np.zeros(at.shape)
        step[place] = STEP
        found[place] = (loss(at + step) - loss(at - step)) / (2 * STEP)
    return found


def test_every_activation_has_a_value_by_hand():
    assert sorted(BY_HAND) == sorted(ACTIVATIONS)
    for name, value in BY_HAND.items():
        np.testing.assert_allclose(activate(np.array([[2.0, 3.0]]), name), [[value]], rtol=1e-14, err_msg=name)


def test_that_of_gpt_oss_cuts_large_gates_from_above_and_the_others_on_both_sides():
    rows = np.array([[20.0, 1.0], [7.0, 1.0], [-20.0, 1.0], [1.0, 20.0], [1.0, 7.0], [1.0, -20.0], [1.0, -7.0]])
    made = activate(rows, "swiglu_oai")[:, 0]
    assert made[0] == made[1]
    assert 0 > made[2] > -1e-10  # not cut: at -7 it would be -1e-4
    assert made[3] == made[4]
    assert made[5] == made[6]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_gradients_of_a_layer_follow_finite_differences(activation, biased, rng):
    plan = route(IDS, num_experts=E, padding_alignment=2)
    shapes = {"x": (5, D), "gate_up": (E, D, 2 * N), "down": (E, N, D), "weights": (plan.num_rows,)}
    if biased:
        shapes |= {"gate_up_bias": (E, 2 * N), "down_bias": (E, D)}
    given = {name: 4 * rng.standard_normal(shape) for name, shape in shapes.items()}  # some are cut, some are not
    d_out = rng.standard_normal((5, D))

    def loss(**changes: NDArray) -> float:
        return float(np.vdot(d_out, moe_mlp(plan=plan, activation=activation, **{**given, **changes})[0]))

    made = moe_mlp_backward(d_out, plan=plan, activation=activation, **given)
    for name, array in given.items():
        expected = slope(lambda changed, name=name: loss(**{name: changed}), array)
        got = getattr(made, name)
        assert got.shape == array.shape
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max(), err_msg=name)
    assert (made.gate_up_bias is None) == (made.down_bias is None) == (not biased)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gradients_of_a_product_with_a_bias_follow_finite_differences(weighted, rng):
    where = {"m_sizes": [2, 0, 3], "expert_offsets": [1, 4, 4, 8]}
    shapes = {"X": (9, 2), "W": (3, D, 2), **({"weights": (9,)} if weighted else {}), "bias": (3, D)}
    given = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    d_out = rng.standard_normal((9, D))
    out = grouped_gemm(**given, **where)
    assert not out[[0, 3, 7, 8]].any()  # of no group: no bias either

    def loss(**changes: NDArray) -> float:
        return float(np.vdot(d_out, grouped_gemm(**{**given, **changes}, **where)))

    for (name, array), got in zip(given.items(), grouped_gemm_backward(d_out, **given, **where), strict=True):
        expected = slope(lambda changed, name=name: loss(**{name: changed}), array)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9, err_msg=name)
