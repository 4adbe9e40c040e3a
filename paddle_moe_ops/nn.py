# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of a mixture-of-experts block: router, SwiGLU experts and the whole layer.

The layers run in dygraph. In shapes, T is tokens, H hidden size, I intermediate size of an expert, E experts,
K experts per token and N rows in expert order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from . import _checks
from .backends import resolve
from .functional import moe_permute, moe_unpermute, unpermute
from .gemm import grouped_gemm
from .routing import Plan, calculate_topk, check_groups, route

__all__ = ["MoELayer", "RouterOutput", "SwiGLU", "SwiGLUExperts", "TopKRouter", "load_balance_loss"]


class RouterOutput(NamedTuple):
    """What a router decides.

    Attributes:
        ids: Experts of each token, int32 [T, K], best first, distinct within a token, no gradient.
        probs: Weights of these experts, float32 [T, K], differentiable.
        scores: Scores of all experts without the correction bias, float32 [T, E], differentiable.
    """

    ids: Tensor
    probs: Tensor
    scores: Tensor


class TopKRouter(nn.Layer):
    """Chooses K of E experts for each token and weights them.

    The logits are computed in float32, under automatic mixed precision too. The K experts with the highest
    ``scores + correction_bias`` are chosen, of equal values the lower expert id first, from the best groups if
    there are groups (see `paddle_moe_ops.routing.calculate_topk`, which decides). The weights come from
    the scores without the bias: it steers the load and gets no gradient (balancing without an auxiliary loss,
    as in DeepSeek-V3 and ERNIE 4.5). Deterministic; no host synchronisation.

    Args:
        hidden_size: H.
        num_experts: E.
        topk: K, from 1 to E.
        scoring: ``"softmax"`` over the experts or ``"sigmoid"`` of each logit.
        correction_bias: Whether to keep a correction bias, a float32 buffer [E] that starts at zero.
        norm_topk_prob: Whether the K weights of a token are divided by their sum.
        num_groups: Groups of experts, a divisor of E.
        topk_groups: Groups that a token's experts may come from; None for all.
        scores_per_group: How many of a group's best scores are added up to rank it: 2 in DeepSeek-V3, 1 in V2.
        scaling_factor: What the weights are multiplied by in the end.

    Raises:
        TypeError: A size is no int, or the factor no number.
        ValueError: A size below 1, K above E or above the experts of the kept groups, groups that do not divide E,
            or an unknown scoring.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        scoring: str = "softmax",
        correction_bias: bool = True,
        norm_topk_prob: bool = True,
        num_groups: int = 1,
        topk_groups: int | None = None,
        scores_per_group: int = 2,
        scaling_factor: float = 1.0,
    ) -> None:
        super().__init__()
        _check_sizes("TopKRouter", hidden_size=hidden_size, num_experts=num_experts, topk=topk)
        if topk > num_experts:
            _checks.bad_value("TopKRouter", "topk", f"at most num_experts={num_experts}", topk)
        self.num_groups, self.topk_groups = check_groups(
            "TopKRouter", "topk", num_experts, topk, num_groups, topk_groups, scores_per_group
        )
        _checks.choice("TopKRouter", "scoring", scoring, ("softmax", "sigmoid"))
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.topk = topk
        self.scoring = scoring
        self.norm_topk_prob = norm_topk_prob
        self.scores_per_group = scores_per_group
        self.scaling_factor = _checks.number("TopKRouter", "scaling_factor", scaling_factor)
        self.weight = _weight(self, [hidden_size, num_experts], fan_in=hidden_size)
        bias = paddle.zeros([num_experts], dtype="float32") if correction_bias else None
        self.register_buffer("correction_bias", bias)

    def forward(self, x: Tensor) -> RouterOutput:
        """Routes tokens.

        Args:
            x: Tokens [T, H], bfloat16, float16 or float32.

        Returns:
            RouterOutput: ids int32 [T, K], probs float32 [T, K], scores float32 [T, E].

        Raises:
            TypeError: x is no tensor of these dtypes.
            ValueError: x is not [T, H].
        """
        _checks.tensor("TopKRouter", "x", x, _checks.SUM_DTYPES, ["T", self.hidden_size])
        with paddle.amp.auto_cast(enable=False):
            logits = paddle.matmul(x.astype("float32"), self.weight.astype("float32"))
            bias = None if self.correction_bias is None else self.correction_bias.astype("float32")
            probs, ids, scores = calculate_topk(
                logits,
                self.topk,
                self.scoring == "sigmoid",
                self.norm_topk_prob,
                correction_bias=bias,
                num_groups=self.num_groups,
                topk_groups=self.topk_groups,
                scores_per_group=self.scores_per_group,
                scaling_factor=self.scaling_factor,
                return_scores=True,
            )
        return RouterOutput(ids.astype("int32"), probs, scores)

    @paddle.no_grad()
    def update_correction_bias(self, tokens_per_expert: Sequence[int] | Tensor, rate: float = 1e-3) -> None:
        """Moves each expert's bias a step towards an even load: ``bias += rate * sign(mean(load) - load)``.

        The rule is that of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2). With data parallelism, sum the
        loads over all ranks first, so that the bias stays the same everywhere.

        Args:
            tokens_per_expert: The load, [E]: tokens that each expert got since the last update.
            rate: Size of the step.

        Raises:
            ValueError: The router has no correction bias, or the load does not have E entries.
        """
        if self.correction_bias is None:
            _checks.bad_value("update_correction_bias", "the router", "one with a correction bias", "one without")
        load = tokens_per_expert
        if not isinstance(load, Tensor):
            load = paddle.to_tensor(load)
        load = load.astype("float32")
        if list(load.shape) != [self.num_experts]:
            expected = f"of shape [{self.num_experts}]"
            _checks.bad_value("update_correction_bias", "tokens_per_expert", expected, list(load.shape))
        step = rate * paddle.sign(load.mean() - load)
        self.correction_bias.set_value(self.correction_bias + step.astype(self.correction_bias.dtype))


def load_balance_loss(scores: Tensor, ids: Tensor) -> Tensor:
    """Auxiliary loss against imbalance, 1 at even load: ``E * sum_e share_e * mean_t scores[t, e]``.

    ``share_e`` is the part of all T*K slots that names expert e; it carries no gradient. Formula: Switch
    Transformer (arXiv:2101.03961, equations 4 to 6) for K experts per token, with scores that sum to 1.
    Deterministic; no host synchronisation.

    Args:
        scores: Scores of the router, float32 [T, E], T >= 1, differentiable.
        ids: Chosen experts, int32 or int64 [T, K].

    Returns:
        Tensor: Scalar, float32.
    """
    num_experts = scores.shape[-1]
    share = F.one_hot(ids.astype("int64"), num_experts).mean(axis=[0, 1])
    return num_experts * (share * scores.mean(axis=0)).sum()


class SwiGLU(nn.Layer):
    """Gated MLP ``(silu(x W_gate) * x W_up) W_down`` without biases; as a shared expert it sees every token.

    Args:
        hidden_size: H.
        intermediate_size: I.

    Raises:
        TypeError: A size is no int.
        ValueError: A size below 1.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        _check_sizes("SwiGLU", hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.gate_up = _weight(self, [hidden_size, 2 * intermediate_size], fan_in=hidden_size)
        self.down = _weight(self, [intermediate_size, hidden_size], fan_in=intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., H] to [..., H]."""
        return _swiglu_mlp(x, self.gate_up, self.down)


class SwiGLUExperts(nn.Layer):
    """E gated MLPs with stacked weights, each applied to its own contiguous segment of rows.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.

    Attributes:
        gate_up: Weights [E, H, 2*I], the gate's columns first.
        down: Weights [E, I, H].

    Raises:
        TypeError: A size is no int.
        ValueError: A size below 1.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        _check_sizes(
            "SwiGLUExperts",
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
        )
        self.num_experts = num_experts
        self.gate_up = _weight(self, [num_experts, hidden_size, 2 * intermediate_size], fan_in=hidden_size)
        self.down = _weight(self, [num_experts, intermediate_size, hidden_size], fan_in=intermediate_size)

    def forward(self, rows: Tensor, tokens_per_expert: Sequence[int], padding_alignment: int = 1) -> Tensor:
        """Applies each expert to its segment of rows.

        Differentiable in the rows and the weights; an expert without rows gets a zero gradient.
        Deterministic; no host synchronisation.

        Args:
            rows: Rows in expert order, [N, H], as moe_permute returns them.
            tokens_per_expert: Tokens of each expert, E ints; the segments are these counts rounded up to
                multiples of padding_alignment.
            padding_alignment: The alignment the rows were permuted with. Zero rows give zero rows.

        Returns:
            Tensor: [N, H], in the same order.

        Raises:
            ValueError: padding_alignment is below 1, or the counts are not E ints >= 0 whose segments have N
                rows in all.
        """
        _check_sizes("SwiGLUExperts", padding_alignment=padding_alignment)
        counts = [int(count) for count in tokens_per_expert]
        sizes = [-(-count // padding_alignment) * padding_alignment for count in counts]
        if len(counts) != self.num_experts or min(counts) < 0 or sum(sizes) != rows.shape[0]:
            expected = f"{self.num_experts} counts >= 0 whose segments have {rows.shape[0]} rows in all"
            _checks.bad_value("SwiGLUExperts", "tokens_per_expert", expected, counts)
        hidden = F.swiglu(grouped_gemm(rows, self.gate_up, sizes, transpose=False))
        return grouped_gemm(hidden, self.down, sizes, transpose=False)

    def weighted_rows(self, x: Tensor, plan: Plan, probs: Tensor) -> Tensor:
        """Applies to each token its experts, and weights what they give; `unpermute` then adds up each token's rows.

        Differentiable in the tokens, the weights of tokens and those of the layer. Deterministic; no host
        synchronisation where Triton multiplies, see `grouped_gemm`.

        Args:
            x: Tokens [T, H].
            plan: Where their rows are, as `route` says it.
            probs: Weights of each token's slots, float32 [T, K], or of rows, [N].

        Returns:
            Tensor: [N, H], rows in expert order.

        Raises:
            TypeError: As `grouped_gemm`.
            ValueError: As `grouped_gemm`.
        """
        hidden = F.swiglu(grouped_gemm(x, self.gate_up, plan=plan, permute_x=True, transpose=False))
        return grouped_gemm(hidden, self.down, plan=plan, topk_weights=probs, transpose=False)


class MoELayer(nn.Layer):
    """Mixture-of-experts block: router, permute, experts, weighted unpermute, plus shared experts.

    Deterministic. Where Triton multiplies (see `grouped_gemm`) a forward pass has no host synchronisation: the experts
    take tokens and give weighted rows. Elsewhere it has one, since the sizes of the experts' segments are needed on the
    host: the ids [T, K] are read once and counted there.

    Args:
        hidden_size: H.
        intermediate_size: I of one expert.
        num_experts: E.
        topk: K.
        num_shared_experts: Shared experts, 0 for none; they are one SwiGLU of num_shared_experts * I.
        scoring: See TopKRouter.
        correction_bias: See TopKRouter.
        norm_topk_prob: See TopKRouter.
        num_groups: See TopKRouter.
        topk_groups: See TopKRouter.
        scores_per_group: See TopKRouter.
        scaling_factor: See TopKRouter.

    Attributes:
        tokens_per_expert: Load of the last forward pass for ``router.update_correction_bias``: E ints, or where Triton
            multiplied an int32 tensor [E], which is still on the GPU.

    Raises:
        TypeError: A size is no int.
        ValueError: A size out of range (see TopKRouter, SwiGLUExperts) or num_shared_experts below 0.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        topk: int,
        num_shared_experts: int = 1,
        *,
        scoring: str = "softmax",
        correction_bias: bool = True,
        norm_topk_prob: bool = True,
        num_groups: int = 1,
        topk_groups: int | None = None,
        scores_per_group: int = 2,
        scaling_factor: float = 1.0,
    ) -> None:
        super().__init__()
        _checks.integer("MoELayer", "num_shared_experts", num_shared_experts, 0)
        self.hidden_size = hidden_size
        self.router = TopKRouter(
            hidden_size,
            num_experts,
            topk,
            scoring=scoring,
            correction_bias=correction_bias,
            norm_topk_prob=norm_topk_prob,
            num_groups=num_groups,
            topk_groups=topk_groups,
            scores_per_group=scores_per_group,
            scaling_factor=scaling_factor,
        )
        self.experts = SwiGLUExperts(num_experts, hidden_size, intermediate_size)
        self.shared = SwiGLU(hidden_size, num_shared_experts * intermediate_size) if num_shared_experts else None
        # In a tuple, since a layer makes a buffer of a tensor.
        self._load: tuple[list[int] | Tensor] = ([0] * num_experts,)

    @property
    def tokens_per_expert(self) -> list[int] | Tensor:
        return self._load[0]

    def forward(self, x: Tensor) -> Tensor:
        """Runs the block.

        Args:
            x: [T, H] or [B, S, H], dtype of the weights.

        Returns:
            Tensor: Same shape and dtype as x, differentiable in x and all weights.

        Raises:
            ValueError: x has another shape.
        """
        if x.ndim not in (2, 3) or x.shape[-1] != self.hidden_size:
            expected = f"of shape [T, {self.hidden_size}] or [B, S, {self.hidden_size}]"
            _checks.bad_value("MoELayer", "x", expected, list(x.shape))
        tokens = x.reshape([-1, self.hidden_size])
        ids, probs, _ = self.router(tokens)
        routed = self._fused if resolve("grouped_gemm", tokens).name == "triton" else self._by_counts
        out = routed(tokens, ids, probs)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.reshape(x.shape)

    def _fused(self, tokens: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """The experts by a plan that stays on the device: each slot has a row, since the router's ids are distinct."""
        plan = route(ids, num_experts=self.router.num_experts, buffer_size=ids.size)
        self._load = (plan.tokens_per_expert,)
        return unpermute(self.experts.weighted_rows(tokens, plan, probs), plan)

    def _by_counts(self, tokens: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """The experts by the sizes of their segments."""
        num_experts = self.router.num_experts
        counts = np.bincount(ids.numpy().ravel(), minlength=num_experts).tolist()
        self._load = (counts,)
        rows, rowmap, row_probs, _ = moe_permute(tokens, None, ids, probs, num_experts, counts, padding_alignment=1)
        rows = self.experts(rows, counts)
        out, _ = moe_unpermute(rows, rowmap, ids, row_probs, tokens.shape[0], num_experts, using_weighted_combine=True)
        return out


def _swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return paddle.matmul(F.swiglu(paddle.matmul(x, gate_up)), down)


def _weight(layer: nn.Layer, shape: list[int], fan_in: int) -> Tensor:
    initializer = nn.initializer.Normal(std=fan_in**-0.5)
    return layer.create_parameter(shape, default_initializer=initializer)


def _check_sizes(function: str, **sizes: int) -> None:
    for name, size in sizes.items():
        _checks.integer(function, name, size, 1)
