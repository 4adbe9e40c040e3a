# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The router: chooses the experts of each token, and their weights."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.jit import not_to_static

from .. import _checks
from .._graphs import (
    filled,
    float32,
    is_graph_value,
    of_shape,
    public,
    ready_for_matmul,
    without_autocast,
    without_gradients,
)
from .._options import Scoring
from ..backends import TopkSpec, resolve
from ..routing import check_groups
from ._common import Size, casting_others, described, misnamed, sizes, warn_user, weight

SCORING = get_args(Scoring)
_INTEGERS = (paddle.int32, paddle.int64, paddle.int16, paddle.int8, paddle.uint8, paddle.bool)


class RouterOutput(NamedTuple):
    """The decisions of a router.

    Attributes:
        ids: experts of each token, int32 [T, K], best first, distinct within a token, no gradient; -1 for tokens that a
            mask leaves out.
        probs: weights of these experts, float32 [T, K], differentiable; 0 for tokens that a mask leaves out.
        scores: scores of all experts without the correction bias, float32 [T, E], differentiable.
        logits: the scores' logits, float32 [T, E], differentiable.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.nn import TopKRouter, router_z_loss
        >>> ids, probs, scores, logits = TopKRouter(64, num_experts=8, topk=2)(paddle.randn([16, 64]))
        >>> ids.shape, probs.shape, scores.shape
        ([16, 2], [16, 2], [16, 8])
        >>> z_loss = router_z_loss(logits)
    """

    ids: Tensor
    probs: Tensor
    scores: Tensor
    logits: Tensor


class TopKRouter(nn.Layer):
    """Router that chooses K of E experts for each token and weights them.

    The logits are computed in float32, under automatic mixed precision too. The K experts with the highest
    ``scores + correction_bias`` are chosen, the lower expert id if values are equal, from the best groups if there are
    groups (see `paddle_moe_ops.routing.calculate_topk`). The weights come from the scores without the bias: it steers
    the load and gets no gradient (balancing without an auxiliary loss, as in DeepSeek-V3 and ERNIE 4.5). Deterministic;
    no host synchronisation.

    Args:
        hidden_size: H.
        num_experts: E, at most 65536.
        topk: K, from 1 to E.
        scoring: ``"softmax"`` over the experts or ``"sigmoid"`` of each logit.
        correction_bias: whether to keep a correction bias, a buffer [E] that starts at zero. It stays float32, whatever
            dtype the layer is cast to: steps of 1e-3 would be lost in bfloat16.
        norm_topk_prob: whether the K weights of a token are divided by their sum. With ``topk=1`` the weight is then 1
            whatever the router computes, so the router's only gradient comes from auxiliary losses; constructing such a
            router warns, except under ``paddle.no_grad()``.
        num_groups: number of groups of experts, a divisor of E.
        topk_groups: the number of groups from which a token's experts are chosen; None for all.
        scores_per_group: the number of a group's best scores whose sum ranks it: 2 in DeepSeek-V3, 1 in V2. Above E /
            num_groups all scores are added.
        scaling_factor: factor of the final weights.
        capacity_factor: an expert's most rows, as a multiple of an even load, see `capacity`; None: no limit.

    Raises:
        TypeError: a size is not an int, a flag is not a bool, or a factor is not a number.
        ValueError: a size below 1, K above E or above the experts of the kept groups, groups that do not divide E,
            an unknown scoring, or a capacity factor that is not above 0.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import route
        >>> from paddle_moe_ops.nn import TopKRouter
        >>> router = TopKRouter(64, num_experts=8, topk=2, scoring="sigmoid", num_groups=4, topk_groups=2)
        >>> routed = router(paddle.randn([16, 64]))
        >>> plan = route(routed.ids, routed.probs, num_experts=8)
        >>> router.update_correction_bias(plan.routed_per_expert)
        >>> plan.num_rows
        32
    """

    @misnamed(top_k="topk")
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        scoring: Scoring = "softmax",
        correction_bias: bool = True,
        norm_topk_prob: bool = True,
        num_groups: int = 1,
        topk_groups: int | None = None,
        scores_per_group: int = 2,
        scaling_factor: float = 1.0,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        name = "TopKRouter"
        _checks.integer(name, "num_experts", num_experts, 1, _checks.MAX_EXPERTS)
        self.hidden_size, self.num_experts, self.topk = sizes(
            name, hidden_size=hidden_size, num_experts=num_experts, topk=topk
        )
        if topk > num_experts:
            _checks.bad_value(name, "topk", f"at most num_experts={num_experts}", topk)
        groups = check_groups(name, "topk", num_experts, topk, num_groups, topk_groups, scores_per_group)
        self.num_groups, self.topk_groups = map(Size, groups)
        self.scoring = _checks.choice(name, "scoring", scoring, SCORING)
        self.norm_topk_prob = _checks.flag(name, "norm_topk_prob", norm_topk_prob)
        if topk == 1 and norm_topk_prob and paddle.is_grad_enabled():
            warn_user(
                "TopKRouter: with topk=1 and norm_topk_prob=True the weight of the chosen expert is always 1, so the "
                "output gives the router no gradient; set norm_topk_prob=False, or train it by aux_loss alone"
            )
        self.scores_per_group = Size(scores_per_group)
        self.scaling_factor = _checks.number(name, "scaling_factor", scaling_factor)
        self.capacity_factor = None
        if capacity_factor is not None:
            self.capacity_factor = _checks.number(name, "capacity_factor", capacity_factor)
            if self.capacity_factor <= 0:
                _checks.bad_value(name, "capacity_factor", "above 0 or None", capacity_factor)
        self.weight = weight(self, [hidden_size, num_experts], fan_in=hidden_size)
        has_bias = _checks.flag(name, "correction_bias", correction_bias)
        self._make_correction_bias(num_experts if has_bias else 0)
        self._let_bias_load()

    def _make_correction_bias(self, num_experts: int) -> None:
        if not num_experts:
            self.register_buffer("correction_bias", None)
        elif paddle.in_dynamic_mode():
            self.register_buffer("correction_bias", paddle.zeros([num_experts], dtype="float32"))
        else:  # a program has no buffers that are values
            zeros = {"dtype": "float32", "default_initializer": nn.initializer.Constant(0.0)}
            bias = self.create_parameter([num_experts], paddle.ParamAttr(trainable=False), **zeros)
            self.add_parameter("correction_bias", bias)

    def extra_repr(self) -> str:
        """Return what ``print(layer)`` says of it."""
        sizes = {"hidden_size": self.hidden_size, "num_experts": self.num_experts, "topk": self.topk}
        options = {"scoring": self.scoring, "capacity_factor": self.capacity_factor}
        return described(self.weight, **sizes, **options)

    @not_to_static
    def forward(self, x: Tensor, mask: Tensor | None = None) -> RouterOutput:
        """Route tokens.

        Args:
            x: tokens [T, H], bfloat16, float16 or float32.
            mask: bool [T], False for tokens that go to no expert, such as padding. None: all tokens are routed.

        Returns:
            ids int32 [T, K], probs float32 [T, K], scores and logits float32 [T, E]; all but ids differentiable in x
            and the router's weight.

        Raises:
            TypeError: x or mask is not a tensor of these dtypes.
            ValueError: x is not [T, H], or mask not [T].
        """
        return _choose(
            x,
            mask,
            self.weight,
            self.correction_bias,
            self.hidden_size,
            self.num_experts,
            top_k=self.topk,
            use_sigmoid=self.scoring == "sigmoid",
            renormalize=self.norm_topk_prob,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            scores_per_group=self.scores_per_group,
            scaling_factor=self.scaling_factor,
        )

    def capacity(self, num_tokens: int | Tensor) -> int | Tensor | None:
        """Return the most rows of each expert, for `paddle_moe_ops.route`.

        Args:
            num_tokens: T, an int, or a 0-D int tensor if a graph does not know it.

        Returns:
            ``ceil(capacity_factor * T * K / E)``, at least 1, as an int or a 0-D int64 tensor like T; None without a
            capacity factor.

        Raises:
            TypeError: T is neither an int nor a tensor.
            ValueError: T is below 0.
        """
        if not isinstance(num_tokens, Tensor) and not is_graph_value(num_tokens):
            num_tokens = _checks.integer("capacity", "num_tokens", num_tokens, 0)
        return _capacity(num_tokens, self.topk, self.num_experts, self.capacity_factor)

    @without_gradients
    def update_correction_bias(self, tokens_per_expert: Sequence[int] | Tensor, rate: float = 1e-3) -> None:
        """Move each expert's bias a step towards an even load: ``bias += rate * sign(mean(load) - load)``.

        The rule is that of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2). Integer loads are compared exactly. With data
        parallelism, sum the loads over all ranks first, so that the bias stays the same everywhere, as `ExpertLoad`
        does.

        Args:
            tokens_per_expert: the load, [E]: tokens of each expert since the last update.
            rate: size of the step.

        Raises:
            TypeError: the load is neither a sequence of numbers nor a tensor, or the rate is not a number.
            ValueError: the router has no correction bias, or the load does not have E entries; a sequence with an entry
                that is not finite.
        """
        name = "update_correction_bias"
        if self.correction_bias is None:
            _checks.bad_value(name, "the router", "one with a correction bias", "one without")
        rate = _checks.number(name, "rate", rate)
        load = tokens_per_expert
        if not isinstance(load, Tensor):
            load = paddle.to_tensor(_numbers(name, "tokens_per_expert", load), place=self.correction_bias.place)
        if list(load.shape) != [self.num_experts]:
            _checks.bad_value(name, "tokens_per_expert", f"of shape [{self.num_experts}]", list(load.shape))
        load = load.astype("int64" if load.dtype in _INTEGERS else "float64")
        step = rate * paddle.sign(load.sum() - self.num_experts * load).astype("float32")
        self.correction_bias.set_value(self.correction_bias.astype("float32") + step)

    def _apply(self, func: Any, device: Any, dtype: Any, blocking: Any, include_sublayers: bool = True) -> None:
        """Move and cast the layer for Paddle; the bias is only moved."""
        super()._apply(casting_others(func, [self.correction_bias]), device, dtype, blocking, include_sublayers)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._let_bias_load()

    def _let_bias_load(self) -> None:
        """Let the bias load values of any float dtype, as in earlier checkpoints of cast layers."""
        if isinstance(self.correction_bias, Tensor):
            self.correction_bias.set_value = functools.partial(_set_float32, weakref.ref(self.correction_bias))


def _numbers(function: str, argument: str, given: Any) -> Any:
    """A sequence of finite numbers as an array."""
    expected = "a sequence of numbers or a tensor"
    if not isinstance(given, (Sequence, np.ndarray)) or isinstance(given, str):
        _checks.bad_type(function, argument, expected, type(given).__name__)
    try:
        numbers = np.asarray(given)
        numbers = numbers.astype("int64" if numbers.dtype.kind in "biu" else "float64")
    except (TypeError, ValueError, OverflowError):
        _checks.bad_type(function, argument, expected, repr(given))
    if not np.isfinite(numbers).all():
        _checks.bad_value(function, argument, "finite numbers", given)
    return numbers


def _set_float32(bias: Callable[[], Tensor], value: Any) -> None:
    """Set a float32 tensor; Paddle's own way refuses another dtype."""
    tensor = bias()
    value = value if isinstance(value, Tensor) else paddle.to_tensor(value, place=tensor.place)
    Tensor.set_value(tensor, value.astype("float32"))


@public("x", "weight", owner="TopKRouter")
def _choose(
    x: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    hidden: int,
    num_experts: int,
    **options: Any,
) -> RouterOutput:
    """The router of a weight [H, E] and a bias [E]; the options are those of a `TopkSpec`."""
    _checks.tensor("TopKRouter", "x", x, _checks.SUM_DTYPES, ["T", hidden])
    if mask is not None:
        _checks.tensor("TopKRouter", "mask", mask, (paddle.bool,), [x.shape[0]])
    with without_autocast():
        wide = of_shape(float32(weight), [hidden, num_experts])
        logits = paddle.matmul(ready_for_matmul(float32(x), wide), wide)
        bias = None if bias is None else of_shape(float32(bias), [num_experts])
        spec = TopkSpec(pre_act=True, return_scores=True, **options)
        probs, ids, scores = resolve("calculate_topk", logits).calculate_topk(logits, bias, spec)
        ids = ids.astype("int32")
        if mask is not None:
            counts = mask.unsqueeze(-1)
            ids = paddle.where(counts, ids, paddle.full_like(ids, -1))
            probs = paddle.where(counts, probs, paddle.zeros_like(probs))
    return RouterOutput(ids, probs, scores, logits)


def capacity_of(
    num_tokens: int | Tensor, topk: int, num_experts: int, capacity_factor: float | None
) -> int | Tensor | None:
    """See `TopKRouter.capacity`; the same number for an int and for a tensor."""
    if capacity_factor is None:
        return None
    if isinstance(num_tokens, int):
        return max(math.ceil(num_tokens * topk * capacity_factor / num_experts), 1)
    # Computed in float64, like Python's float. A factor that is not a tensor would be rounded to float32.
    factor, experts = (filled([], number, "float64", like=num_tokens) for number in (capacity_factor, num_experts))
    rows = (num_tokens.astype("int64") * topk).astype("float64") * factor / experts
    return paddle.ceil(rows).clip(min=1).astype("int64")


@public(owner="capacity")
def _capacity(num_tokens: Any, topk: int, num_experts: int, capacity_factor: float | None) -> Any:
    return capacity_of(num_tokens, topk, num_experts, capacity_factor)
