# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routing decided once: the experts of each token, the Plan, and how to make it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import paddle
from paddle import Tensor

from . import _checks
from ._graphs import constant, float32, index_sample, is_graph_value, known_sizes, public
from ._native import native
from ._options import Duplicates
from .backends import Backend, RouteSpec, TopkSpec, Validation, resolve
from .backends.base import Tensors, maps_of_layer

__all__ = ["Plan", "calculate_topk", "route"]


class _PlanFields(NamedTuple):
    """The fields of a plan in their order; row_probs is None without probabilities."""

    slot_to_row: Tensor
    token_rows: Tensor
    row_to_token: Tensor
    row_to_slot: Tensor
    row_to_expert: Tensor
    row_probs: Tensor | None
    tokens_per_expert: Tensor
    expert_offsets: Tensor
    routed_per_expert: Tensor
    overflow: Tensor
    num_tokens: int
    topk: int
    num_experts: int
    padding_alignment: int
    num_rows: int


class Plan(_PlanFields):
    """The row of every slot and the token of every row. Returned by `route`, used by `permute` and `unpermute`.

    T tokens, K slots per token, E experts, N rows of the permuted buffer. A slot is one (token, k) pair with flat
    number t * K + k. All tensors but ``row_probs`` are int32 on the routing's device and have no gradient; -1 means
    "none".

    Attributes:
        slot_to_row: [T, K] row of each slot.
        token_rows: [T, K] rows of each token, ascending, -1 last.
        row_to_token: [N] token of each row, -1 for padding.
        row_to_slot: [N] flat slot of each row, -1 for padding.
        row_to_expert: [N] expert of each row, -1 for padding.
        row_probs: float32 [N] probability of each row, 0 for padding; differentiable. A ValueError if the plan was made
            without probabilities.
        tokens_per_expert: [E] routed rows of each expert that were not dropped, without padding.
        expert_offsets: [E + 1] first row of each expert's segment, clamped to the buffer; the last is its end.
        routed_per_expert: [E] routed rows of each expert, dropped ones included.
        overflow: 0-D, slots dropped because their expert's capacity or a static buffer had no room.
        num_tokens: T.
        topk: K.
        num_experts: E, at most 65536.
        padding_alignment: segments begin at multiples of this many rows.
        num_rows: N; -1 in a static graph that does not know it.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import route
        >>> ids = paddle.to_tensor([[0, 2], [2, -1], [1, 0], [0, 2], [2, 0]])
        >>> probs = paddle.to_tensor([[0.6, 0.4], [1.0, 0.0], [0.7, 0.3], [0.5, 0.5], [0.8, 0.2]])
        >>> route(ids, probs, num_experts=3, padding_alignment=2)
        Plan(num_tokens=5, topk=2, num_experts=3, padding_alignment=2, num_rows=10)

        Token 1 has a slot without an expert; row 5 is padding::

                       ids      probs    slot_to_row  token_rows
            token 0    0  2    0.6  0.4     0   6       0   6
            token 1    2 -1    1.0  0.0     7  -1       7  -1
            token 2    1  0    0.7  0.3     4   1       1   4
            token 3    0  2    0.5  0.5     2   8       2   8
            token 4    2  0    0.8  0.2     9   3       3   9

                              |     expert 0      | expert 1|     expert 2      |
            row                 0    1    2    3    4    5    6    7    8    9
            row_to_token        0    2    3    4    2   -1    0    1    3    4
            row_to_slot         0    5    6    9    4   -1    1    2    7    8
            row_to_expert       0    0    0    0    1   -1    2    2    2    2
            row_probs         0.6  0.3  0.5  0.2  0.7    0  0.4    1  0.5  0.8
            tokens_per_expert   4                   1         4
            expert_offsets      0                   4         6                   10
    """

    __slots__ = ()

    @property
    def row_probs(self) -> Tensor:
        """The probability of each row."""
        values = super().row_probs
        if values is None:
            # A None that is passed on would mean "no weights".
            raise ValueError(
                "plan.row_probs: this plan was made without probabilities; give them to route: "
                "route(ids, probs, num_experts=E)"
            )
        return values

    def __repr__(self) -> str:
        """The sizes only, since the tensors are long; print them by name."""
        sizes = ("num_tokens", "topk", "num_experts", "padding_alignment", "num_rows")
        return f"Plan({', '.join(f'{name}={getattr(self, name)}' for name in sizes)})"


def as_plan(function: str, value: Any) -> Plan:
    """Check that an argument ``plan`` is one.

    paddle.jit.to_static with full_graph=False returns its program's plan as a plain tuple of the fields.
    """
    if type(value) is tuple and len(value) == len(Plan._fields):
        return Plan._make(value)
    _checks.instance(function, "plan", value, Plan, "a paddle_moe_ops.Plan")
    sizes = value.num_tokens, value.topk, value.num_experts, value.num_rows
    facts = native.facts(*maps_of_layer(value), value.row_to_slot), *sizes
    if facts not in _passed:
        _check_maps(function, value)
        _passed.keep(None if facts[0] is None else facts)
    return value


# Facts of plans whose maps passed the checks, and their sizes; a check takes 10 us.
_passed = _checks.Passed()


def _check_maps(function: str, plan: Plan) -> None:
    """Check the maps that verbs read: a plan may be of the caller's making."""
    by_slot, by_row = [plan.num_tokens, plan.topk], [plan.num_rows]
    shapes = {"slot_to_row": by_slot, "token_rows": by_slot, "row_to_token": by_row, "row_to_slot": by_row}
    shapes["tokens_per_expert"] = [plan.num_experts]
    shapes["expert_offsets"] = [plan.num_experts + 1]
    for name, shape in shapes.items():
        _checks.tensor(function, f"plan.{name}", getattr(plan, name), (paddle.int32,), shape)


def tokens_of(plan: Plan) -> tuple[int, str]:
    """The number of rows of a matrix of the plan's tokens, and the reason, for `_checks.rows`."""
    return plan.num_tokens, ", the tokens of plan"


def rows_of(plan: Plan) -> tuple[int, str]:
    """The number of rows of a matrix of the plan's rows, and the reason, for `_checks.rows`."""
    return plan.num_rows, ", the rows of plan"


def check_weights(function: str, argument: str, weights: Any, plan: Plan, flat: str | None = "row") -> bool:
    """Check weights by row or by slot of a plan.

    Args:
        function: name that begins the message.
        argument: name of the argument.
        weights: [N] by row, [T, K] by slot, or, unless ``flat`` is "row", [T*K] by slot.
        plan: the plan.
        flat: the order of weights of one dimension, "row" or "slot": an argument ``weights_by``. None raises: the
            number of weights is ambiguous, since many batches have as many rows as slots.

    Returns:
        whether they are by slot.
    """
    rows, slots = plan.num_rows, plan.num_tokens * plan.topk if plan.num_tokens >= 0 else -1
    by_row, by_slot = [rows], [plan.num_tokens, plan.topk]
    text = f"{by_row} by row of plan, or {by_slot}{'' if flat == 'row' else f' or [{slots}]'} by slot"
    is_matrix = getattr(weights, "ndim", 1) == 2
    if flat is None and getattr(weights, "ndim", 2) == 1:
        _checks.bad_value(function, "weights_by", f"'row' or 'slot' with flat {argument} and a plan", None)
    shape = by_slot if is_matrix else [slots] if flat == "slot" else by_row
    _checks.tensor(function, argument, weights, (paddle.float32,), shape, text)
    return is_matrix or flat == "slot"


@public("probs")
def route(
    routing: Tensor,
    probs: Tensor | None = None,
    *,
    num_experts: int | None = None,
    padding_alignment: int = 1,
    tokens_per_expert: Any = None,
    buffer_size: int = -1,
    topk: int | None = None,
    duplicates: Duplicates = "first",
    capacity: int | Tensor | None = None,
    validate: bool | None = None,
) -> Plan:
    """Assign a row in expert order to every routed slot.

    Expert segments follow each other ascending, each padded to a multiple of ``padding_alignment`` rows; inside a
    segment rows follow ascending token, then slot. Deterministic: the same maps on every backend and run.

    ``plan.row_probs`` is differentiable in ``probs``; the gradient is 0 at slots without a row.
    Host synchronisation: none on the CPU. On a GPU one, to read N, unless ``buffer_size`` or a list of ints is passed,
    and one with ``validate=True``. With ``capacity``, a tensor of counts, or a static graph with unknown T, costs one
    more.

    Args:
        routing: expert ids, int32 or int64 [T, K] with -1 for an unassigned slot, or a mask, bool [T, E].
        probs: float32 [T, K] for ids, [T, E] for a mask, or None.
        num_experts: E, at most 65536; required for ids. A mask implies it.
        padding_alignment: rows, >= 1.
        tokens_per_expert: the number of routed rows of each expert, if known: a list of ints or of int tensors with one
            element, or a 1-D int array or tensor. Each must be the number before any slot is dropped, with or without
            its segment's padding. None: counted. Ignored with a static buffer.
        buffer_size: N of a static buffer. Rows at or beyond its end are dropped and counted in ``plan.overflow``; the
            others keep their places. -1: N is the sum of the padded segments.
        topk: K of a mask, by default E. If a token has more experts, the highest are dropped.
        duplicates: "first": if an id repeats in a token, its first slot gets the row. "each": every slot gets one.
        capacity: rows that an expert gets at most, an int or a 0-D int tensor, which stays on its device. The first
            rows of its segment are kept; the slots of the others are dropped and counted in ``plan.overflow``, and the
            segments after it move up. None: no limit.
        validate: True: bad ids, repeated ids (with duplicates="first"), NaN probabilities and slots dropped for lack of
            room in a static buffer raise. False: bad ids count as -1, repeated ids have no row, NaN is copied. None:
            PADDLE_MOE_OPS_VALIDATE; without it all but dropped slots raise on a CPU, none on a GPU. Slots dropped for
            ``capacity`` never raise.

    Returns:
        the plan.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; wrong ``tokens_per_expert``; bad data (see ``validate``).

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import route
        >>> ids = paddle.to_tensor([[0, 2], [2, -1], [0, 1]])
        >>> plan = route(ids, paddle.rand([3, 2]), num_experts=4, padding_alignment=2)
        >>> plan.tokens_per_expert.tolist(), plan.expert_offsets.tolist()
        ([2, 1, 2, 0], [0, 2, 4, 6, 6])
    """
    name = "route"
    _checks.tensor(name, "routing", routing, (*_checks.ID_DTYPES, paddle.bool), ["num_tokens", "topk or num_experts"])
    num_tokens, columns = routing.shape
    is_mask = routing.dtype == paddle.bool
    if columns == 0:
        name_of_columns = "num_experts" if is_mask else "topk"
        expected = f"of shape [num_tokens, {name_of_columns}] with {name_of_columns} >= 1"
        _checks.bad_value(name, "routing", expected, list(routing.shape))
    if is_mask:
        if num_experts is not None and num_experts != columns:
            _checks.bad_value(name, "num_experts", f"{columns}, the columns of the mask", num_experts)
        num_experts = columns
        topk = columns if topk is None else _checks.integer(name, "topk", topk, 1)
        if topk > columns:
            _checks.bad_value(name, "topk", f"at most num_experts={columns}", topk)
    else:
        if topk is not None and topk != columns:
            _checks.bad_value(name, "topk", f"{columns}, the columns of the ids (or None)", topk)
        topk = columns
    if num_experts is None:
        _checks.bad_value(name, "num_experts", "given with expert ids, by its name", None)
    num_experts = _checks.integer(name, "num_experts", num_experts, 1, _checks.MAX_EXPERTS)
    if probs is not None:
        _checks.tensor(name, "probs", probs, (paddle.float32,), [num_tokens, columns])
    padding_alignment = _checks.integer(name, "padding_alignment", padding_alignment, 1)
    buffer_size = _checks.integer(name, "buffer_size", buffer_size, -1)
    _checks.choice(name, "duplicates", duplicates, get_args(Duplicates))
    if isinstance(capacity, Tensor) or is_graph_value(capacity):
        _checks.tensor(name, "capacity", capacity, _checks.ID_DTYPES, [])
    elif capacity is not None:
        capacity = _checks.integer(name, "capacity", capacity, 0)
    counts, counts_tensor = _checks.counts(name, tokens_per_expert, num_experts, has_static_buffer=buffer_size >= 0)
    on_device = {"capacity": capacity} if isinstance(capacity, Tensor) else {}
    _checks.same_place(name, routing=routing, probs=probs, tokens_per_expert=counts_tensor, **on_device)
    validation = _checks.validation(name, validate, routing)
    spec = RouteSpec(
        num_experts, topk if is_mask else -1, padding_alignment, counts, buffer_size, duplicates, validation
    )
    return planned(routing, probs, counts_tensor, capacity, spec)


def planned(
    routing: Tensor, probs: Tensor | None, counts: Tensor | None, capacity: int | Tensor | None, spec: RouteSpec
) -> Plan:
    """`route` of checked arguments; ``counts`` are those that a tensor holds."""
    backend = resolve("route", routing)
    num_tokens, columns = routing.shape
    try:
        if capacity is None:
            maps = backend.route(routing, probs, counts, spec)
        else:
            maps = _route_up_to(backend, capacity, routing, probs, counts, spec)
    except ValueError as error:
        is_of_ids = str(error).startswith("route: ") and spec.topk < 0
        if is_of_ids and columns == spec.num_experts and _holds_zeros_and_ones(routing):
            raise ValueError(f"{error}; a mask [num_tokens, num_experts] must be of dtype bool") from None
        raise
    sizes = num_tokens, columns if spec.topk < 0 else spec.topk, spec.num_experts, spec.padding_alignment
    return plan_of(maps, *sizes, has_probs=probs is not None)


def plan_of(
    maps: Sequence[Tensor],
    num_tokens: int,
    topk: int,
    num_experts: int,
    padding_alignment: int = 1,
    *,
    has_probs: bool = False,
) -> Plan:
    """A plan of the ten tensors that the operator `route` returns."""
    row_probs = maps[5] if has_probs else None
    return Plan._make(
        (*maps[:5], row_probs, *maps[6:], num_tokens, topk, num_experts, padding_alignment, maps[2].shape[0])
    )


def _holds_zeros_and_ones(ids: Tensor) -> bool:
    """True if ids look like a mask of integers."""
    return isinstance(ids, Tensor) and bool(((ids == 0) | (ids == 1)).all())


def _route_up_to(
    backend: Backend,
    capacity: int | Tensor,
    routing: Tensor,
    probs: Tensor | None,
    counts: Tensor | None,
    spec: RouteSpec,
) -> Tensors:
    """The ten tensors of a plan in which no expert has more rows than its capacity.

    A first routing finds the place of each slot in its expert's segment; a second one routes the remaining slots. If
    the routing is a mask, the second one routes ids, since slots must keep their columns.
    """
    is_counted = spec.counts is None and counts is None
    num_slots = routing.shape[0] * (routing.shape[1] if spec.topk < 0 else spec.topk)  # negative if T is not known
    whole = spec._replace(
        # Without padding, every slot fits a buffer of this many rows, which saves a synchronisation. The caller's
        # counts may include padding, and are only read without a buffer.
        padding_alignment=1 if is_counted else spec.padding_alignment,
        buffer_size=max(num_slots, -1) if is_counted else -1,
        validation=min(spec.validation, Validation.DATA),
    )
    looked_at = None if probs is None or spec.validation == Validation.OFF else constant(probs)
    first = backend.route(routing, looked_at, counts, whole)
    rows, starts, routed = first[0], first[7], first[8]
    experts = paddle.searchsorted(starts, rows, out_int32=True, right=True) - 1  # -1 where there is no row
    own_start = paddle.gather(starts, experts.clip(min=0).flatten()).reshape([-1, rows.shape[1]])
    limit = capacity if isinstance(capacity, int) else capacity.astype("int64").clip(0, 2**31 - 1).astype("int32")
    is_kept = (rows >= 0) & (rows - own_start < limit)
    ids = paddle.where(is_kept, experts, paddle.full_like(experts, -1))
    if probs is not None and spec.topk >= 0:
        probs = index_sample(probs, experts.clip(min=0))
    kept = None
    if isinstance(capacity, int) and spec.counts is not None:
        alignment = spec.padding_alignment
        kept = tuple(-(-min(count, capacity) // alignment) * alignment for count in spec.counts)
    left = spec._replace(
        topk=-1,
        counts=kept,
        validation=Validation.ALL if spec.validation == Validation.ALL else Validation.OFF,
    )
    maps = backend.route(ids, probs, None, left)
    dropped = (routed - maps[8]).sum().astype("int32")
    return (*maps[:8], routed, maps[9] + dropped)


@public("gating", aliases={"gating_output": "gating", "topk": "top_k"})
def calculate_topk(
    gating: Tensor,
    top_k: int,
    use_sigmoid: bool,
    renormalize: bool,
    pre_act: bool = True,
    post_act: bool = False,
    *,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int | None = None,
    scores_per_group: int = 2,
    scaling_factor: float = 1.0,
    return_scores: bool = False,
    score_dtype: str | None = None,
) -> tuple[Tensor, ...]:
    """Choose the experts of each token from a router's logits, and weight them.

    Scores are the sigmoid of each logit or the softmax over a token's logits, in float32, rounded to the dtype of
    the logits, as in Unsloth. With ``score_dtype="float32"`` they stay in float32, as in FastDeploy, vLLM, Megatron and
    TransformerEngine; with bfloat16 logits, the choice between nearly equal scores then differs. The K experts
    with the highest values are chosen; if values are equal, the lower id; NaN ranks above all numbers. Weights are
    the scores of the chosen experts, divided by their sum and scaled if asked for.

    Models extend this: ERNIE 4.5 adds a correction bias; DeepSeek-V2 adds groups (``scores_per_group=1``); DeepSeek-V3
    (arXiv:2412.19437, section 2.1.2) adds sigmoid, bias, groups (of the two best scores) and a scaling factor.

    Weights and scores are differentiable in ``gating``; the choice and ``correction_bias`` get no gradient.
    Deterministic: the compiled operator gives the same bits on every device and run. On other backends scores differ in
    the last bits, as exponentials do, and with them the choice between nearly equal scores. No host synchronisation.

    Args:
        gating: logits [T, E], or [..., E] with any other dimensions in front, bfloat16, float16 or float32. As a
            keyword it may also be called ``gating_output``.
        top_k: K, from 1 to the experts of the kept groups. As a keyword it may also be called ``topk``.
        use_sigmoid: sigmoid instead of softmax.
        renormalize: divide a token's weights by their sum, however small. Weights that are all 0 stay 0.
        pre_act: choose by scores of all experts.
        post_act: choose by logits and score the chosen experts only, so that a softmax runs over K. Exactly one of
            ``pre_act`` and ``post_act`` must be True.
        correction_bias: float32 [E] or [1, E], added in float32 to the values that rank the experts, and to nothing
            else.
        num_groups: number of groups, each of E / num_groups consecutive experts.
        topk_groups: the number of groups from which a token's experts are chosen: those with the highest sums, the
            lower group if sums are equal. None: all.
        scores_per_group: the number of a group's highest values (with the bias) in its sum.
        scaling_factor: factor of the final weights.
        return_scores: whether to return the scores of all experts too, for auxiliary losses.
        score_dtype: None, the dtype of ``gating``, or ``"float32"``: that of scores and weights, in which experts are
            chosen.

    Returns:
        weights [T, K] (dtype of the scores), best expert first, and ids int64 [T, K], distinct within a token; then as
        asked for scores [T, E]. [..., K] and [..., E] for logits [..., E].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.routing import calculate_topk
        >>> logits = paddle.to_tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 0.0, 0.0, 1.0]])
        >>> probs, ids = calculate_topk(logits, 2, use_sigmoid=False, renormalize=True)
        >>> ids.tolist(), probs[0].tolist()
        ([[1, 3], [0, 3]], [0.5, 0.5])
    """
    name = "calculate_topk"
    _checks.instance(name, "gating", gating, Tensor, "a paddle.Tensor")
    of_each = ["size"] * max(gating.ndim - 1, 0)
    _checks.tensor(name, "gating", gating, _checks.SUM_DTYPES, [*of_each, "num_experts"], "[..., num_experts]")
    num_experts = gating.shape[-1]
    if num_experts == 0:
        _checks.bad_value(name, "gating", "of shape [..., num_experts] with num_experts >= 1", list(gating.shape))
    for argument, value in (
        ("use_sigmoid", use_sigmoid),
        ("renormalize", renormalize),
        ("pre_act", pre_act),
        ("post_act", post_act),
        ("return_scores", return_scores),
    ):
        _checks.flag(name, argument, value)
    if pre_act == post_act:
        _checks.bad_value(name, "exactly one of pre_act and post_act", "True", "both" if pre_act else "neither")
    num_groups, topk_groups = check_groups(name, "top_k", num_experts, top_k, num_groups, topk_groups, scores_per_group)
    if _checks.choice(name, "score_dtype", score_dtype, (None, "float32")) is not None:
        gating = float32(gating)
    if correction_bias is not None:
        ranks = {1: [num_experts], 2: [1, num_experts]}
        shape = ranks.get(getattr(correction_bias, "ndim", 1), [num_experts])
        text = f"[{num_experts}] or [1, {num_experts}]"
        _checks.tensor(name, "correction_bias", correction_bias, (paddle.float32,), shape, text)
        correction_bias = correction_bias if len(shape) == 1 else correction_bias.reshape([num_experts])
    scaling_factor = _checks.number(name, "scaling_factor", scaling_factor)
    _checks.same_place(name, gating=gating, correction_bias=correction_bias)

    spec = TopkSpec(
        top_k,
        use_sigmoid,
        renormalize,
        pre_act,
        num_groups,
        topk_groups,
        scores_per_group,
        scaling_factor,
        return_scores,
    )
    lines = gating if gating.ndim == 2 else gating.reshape([_product(gating.shape[:-1]), num_experts])
    outputs = resolve(name, gating).calculate_topk(lines, correction_bias, spec)
    outputs = outputs if return_scores else outputs[:2]
    if gating.ndim == 2:
        return outputs
    *front, _ = known_sizes(gating)
    return tuple(each.reshape([*front, each.shape[-1]]) for each in outputs)


def _product(sizes: Sequence[int]) -> int:
    """The product of sizes, or -1 if one is unknown."""
    return -1 if min(sizes, default=1) < 0 else math.prod(sizes)


def check_groups(
    function: str, argument: str, num_experts: int, top_k: Any, num_groups: Any, topk_groups: Any, scores_per_group: Any
) -> tuple[int, int]:
    """Check K, the ``argument`` of a function, and the groups of experts.

    Returns:
        the number of groups, and the number of kept groups.
    """
    top_k = _checks.integer(function, argument, top_k, 1)
    num_groups = _checks.integer(function, "num_groups", num_groups, 1)
    if num_experts % num_groups:
        _checks.bad_value(function, "num_groups", f"a divisor of num_experts={num_experts}", num_groups)
    topk_groups = num_groups if topk_groups is None else _checks.integer(function, "topk_groups", topk_groups, 1)
    if topk_groups > num_groups:
        _checks.bad_value(function, "topk_groups", f"at most {num_groups}, the number of groups", topk_groups)
    _checks.integer(function, "scores_per_group", scores_per_group, 1)
    candidates = num_experts // num_groups * topk_groups
    if top_k > candidates:
        _checks.bad_value(function, argument, f"at most {candidates}, the experts to choose from", top_k)
    return num_groups, topk_groups


def row_probs(slot_probs: Tensor, maps: Any) -> Tensor:
    """float32 [N]: the probability of each row, from [T, K] of the slots, 0 in padding; differentiable."""
    return resolve("row_id_map", slot_probs).slots_to_rows(slot_probs, maps)


def slot_probs(row_probs: Tensor, maps: Any) -> Tensor:
    """float32 [T, K]: the probability of each slot's row, from [N], 0 without one; differentiable."""
    return resolve("row_id_map", row_probs).rows_to_slots(row_probs, maps)


def __dir__() -> list[str]:
    return __all__
