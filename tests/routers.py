# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routers to test, and how far from the oracle their scores, weights and gradients may be."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.testing.tolerances import assert_close_sums, score_tols

from .params import SUM_DTYPES
from .reference.cases import assert_same_bits


class Router(NamedTuple):
    """One call: logits and every argument."""

    gating: NDArray
    top_k: int
    use_sigmoid: bool
    renormalize: bool
    pre_act: bool
    scaling_factor: float
    correction_bias: NDArray | None
    groups: dict[str, Any]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.top_k, self.use_sigmoid, self.renormalize, self.pre_act, not self.pre_act

    def check(self, weights: NDArray, ids: NDArray, scores: NDArray) -> None:
        """The choice is the oracle's for the backend's own scores, weights and scores are close to the oracle's.

        The order of nearly equal scores may differ with their last bits.
        """
        values = scores if self.pre_act else self.gating
        with np.errstate(invalid="ignore"):
            chosen = reference.select_experts(values, self.top_k, correction_bias=self.correction_bias, **self.groups)
            expected, _, all_scores = reference.calculate_topk(
                self.gating, *self.arguments, scaling_factor=self.scaling_factor, ids=chosen
            )
        assert_same_bits(ids, chosen)
        tolerance = score_tols(self.gating.dtype, self.gating.shape[1])
        assert_close_sums(scores, all_scores, np.abs(all_scores), tolerance, what="scores")
        assert_close_sums(weights, expected, np.abs(expected), tolerance, what="weights")

    def check_gradient(self, d_gating: NDArray, ids: NDArray, d_weights: NDArray, d_scores: NDArray | None) -> None:
        """The gradient of the logits is close to the oracle's for these ids."""
        arguments = self.gating, ids, *self.arguments[1:]
        factor, dtype = self.scaling_factor, self.gating.dtype
        exact = reference.calculate_topk_backward(d_weights, *arguments, scaling_factor=factor, d_scores=d_scores)
        magnitude = self._gradient_magnitude(ids, d_weights, d_scores)
        tolerance = score_tols(dtype, self.gating.shape[1])
        assert_close_sums(d_gating, exact.astype(np.float32).astype(dtype), magnitude, tolerance, what="gradient")

    def _gradient_magnitude(self, ids: NDArray, d_weights: NDArray, d_scores: NDArray | None) -> NDArray:
        """The gradient of the logits with every term taken as its absolute value."""
        gating = self.gating.astype(np.float32)  # so that nothing but the last digits is rounded here
        raw = self._replace(gating=gating, renormalize=False)
        weights, _, scores = reference.calculate_topk(gating, *raw.arguments, ids=ids)
        d_chosen = self.scaling_factor * np.abs(d_weights.astype(np.float64))
        d_all = np.zeros(scores.shape) if d_scores is None else np.abs(d_scores.astype(np.float64))
        if self.renormalize:
            total = weights.sum(axis=1, keepdims=True)
            divisor = np.where(total == 0, 1, total).astype(np.float64)
            through_sum = (d_chosen * weights).sum(axis=1, keepdims=True) / divisor
            d_chosen = (d_chosen + through_sum) / divisor

        def through_activation(d: NDArray, scores: NDArray) -> NDArray:
            return scores * (d if self.use_sigmoid else d + (d * scores).sum(axis=1, keepdims=True))

        chosen, tokens = np.zeros(scores.shape), np.arange(len(ids))[:, None]
        if self.pre_act:
            chosen[tokens, ids] = d_chosen
            return through_activation(d_all + chosen, scores)
        chosen[tokens, ids] = through_activation(d_chosen, weights)
        return chosen + through_activation(d_all, scores)


@st.composite
def routers(draw: st.DrawFn) -> Router:
    """Routers of every kind over logits with many ties."""
    num_groups, size = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    topk_groups = draw(st.integers(1, num_groups))
    num_experts = num_groups * size
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    levels = draw(st.sampled_from([2, 5, 1000]))
    shape = (draw(st.integers(0, 20)), num_experts)
    gating = (rng.integers(-levels, levels, shape) * (4 / levels)).astype(draw(st.sampled_from(SUM_DTYPES)))
    return Router(
        gating,
        draw(st.integers(1, topk_groups * size)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([1.0, 2.5])),
        rng.integers(-4, 4, num_experts).astype(np.float32) / 8 if draw(st.booleans()) else None,
        {"num_groups": num_groups, "topk_groups": topk_groups, "scores_per_group": draw(st.integers(1, 4))},
    )


def nearly_nothing(rng: np.random.Generator) -> Router:
    """Sigmoids that add up to about 1e-35, to nothing, and to about 1e-13, to be divided by their sum."""
    gating = rng.standard_normal((12, 9)) - np.repeat([80.0, 200.0, 30.0], 4)[:, None]
    return Router(gating.astype(np.float32), 3, True, True, True, 2.5, None, {})


def halves(dtype: DTypeLike) -> tuple[Router, NDArray]:
    """Sigmoids 1/2 and the number after it, whose sum lies halfway between 1 and the next number; and their weights.

    The sum is rounded to 1, so that dividing by it changes nothing; the exact sum would make other weights.
    """
    after = np.float64(0.5) + float(ml_dtypes.finfo(dtype).eps) / 2
    gating = np.array([[np.log(after / (1 - after)), 0]]).astype(dtype)
    return Router(gating, 2, True, True, True, 1.0, None, {}), np.array([[after, 0.5]]).astype(dtype)


def deepseek_v3(dtype: DTypeLike, num_tokens: int, rng: np.random.Generator) -> Router:
    """256 experts in 8 groups, of which 4 are kept; sigmoid scores with a bias."""
    gating = rng.standard_normal((num_tokens, 256)).astype(dtype)
    bias = (0.1 * rng.standard_normal(256)).astype(np.float32)
    return Router(gating, 8, True, True, True, 2.5, bias, {"num_groups": 8, "topk_groups": 4, "scores_per_group": 2})
