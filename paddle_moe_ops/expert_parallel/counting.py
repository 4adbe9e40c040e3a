# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The exchange of numbers before tokens travel: how many, and what ranks must know of each other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import beside, filled
from ..routing import Plan
from .exchange import Counts
from .groups import raise_for_others

if TYPE_CHECKING:
    from .parallel import ExpertParallel

__all__ = ["counts_of_ranks", "say_that_this_rank_raises"]

_DISPATCH = "ExpertParallel.dispatch"
_WANTS_GRADIENT, _NOT_FINITE, _RAISED = 1, 2, 4  # what a rank says of itself
_ABOUT = 5  # numbers before those of experts: tokens, this state, d, K, dtype


def say_that_this_rank_raises(ep: ExpertParallel) -> None:
    """Take part in the exchange of numbers that the other ranks wait for."""
    message = paddle.full([ep.group.nranks, _ABOUT + ep.num_local_experts], _RAISED, "int32")
    with contextlib.suppress(RuntimeError):  # this rank has an error of its own to raise
        ep._transport.exchange_numbers(message)


def counts_of_ranks(
    x: Tensor, probs: Tensor, plan: Plan, to_ranks: Plan, ep: ExpertParallel, validate: bool | None
) -> tuple[Counts, Counts, list[list[int]]]:
    """Tokens that go from rank to rank, the rows that come back for them, and the rows of [rank, local expert].

    One exchange of a few numbers: tokens, whether gradients are wanted and all is finite, d, K and the dtype, and rows
    of each expert.

    Raises:
        ValueError: on every rank, if ranks differ in what must be the same, or a rank's tokens are not finite.
        RuntimeError: other ranks raised.
    """
    size, transport = ep.group.nranks, ep._transport
    wants = paddle.is_grad_enabled() and not x.stop_gradient
    if ep.combines == "reduced":
        wants = paddle.is_grad_enabled() and not (x.stop_gradient and probs.stop_gradient)
    rows = plan.tokens_per_expert.reshape([size, ep.num_local_experts])
    states = filled([size, 1], _WANTS_GRADIENT * wants, "int32", like=rows)
    if validate is True:
        states += _NOT_FINITE * beside((~paddle.isfinite(x).all()).astype("int32"), states)
    same = [x.shape[1], probs.shape[1], _checks.SUM_DTYPES.index(x.dtype)]
    about = [filled([size, 1], each, "int32", like=rows) for each in same]
    message = paddle.concat([to_ranks.tokens_per_expert.unsqueeze(-1), states, *about, rows], axis=1)
    both = paddle.stack([message, transport.exchange_numbers(message)]).tolist()  # the host waits here
    own, told = both
    _check_states([each[1] for each in told], ep)
    for name, values in zip(("d", "K", "dtype"), zip(*(each[2:_ABOUT] for each in told), strict=True), strict=True):
        _check_same(name, values, ep)
    of_experts = [each[_ABOUT:] for each in told]
    of_tokens = Counts(transport, [each[0] for each in own], [each[0] for each in told], ep.payload)
    of_rows = Counts(transport, [sum(each) for each in of_experts], [sum(each[_ABOUT:]) for each in own])
    return of_tokens, of_rows, of_experts


def _check_states(states: list[int], ep: ExpertParallel) -> None:
    ranks = ep.group.ranks
    raise_for_others(_DISPATCH, ranks, [rank for rank, state in zip(ranks, states, strict=True) if state & _RAISED])
    bad = [rank for rank, state in zip(ranks, states, strict=True) if state & _NOT_FINITE]
    if bad:
        _checks.bad_value(_DISPATCH, "x", "finite on all ranks", f"NaN or infinity on ranks {bad}")
    wanting = [rank for rank, state in zip(ranks, states, strict=True) if state & _WANTS_GRADIENT]
    if wanting and len(wanting) < len(ranks):
        expected = "a tensor that wants a gradient on all ranks of the group or on none"
        _checks.bad_value(_DISPATCH, "x", expected, f"one that does on ranks {wanting} of {ranks}")


def _check_same(name: str, values: tuple[int, ...], ep: ExpertParallel) -> None:
    if len(set(values)) > 1:
        dtypes = [_checks.dtype_name(each) for each in _checks.SUM_DTYPES]
        shown = [dtypes[each] for each in values] if name == "dtype" else list(values)
        given = ", ".join(f"{each} on rank {rank}" for rank, each in zip(ep.group.ranks, shown, strict=True))
        expected = {"d": "as wide on all ranks", "K": "of as many slots a token on all ranks", "dtype": "of one dtype"}
        _checks.bad_value(_DISPATCH, "ids" if name == "K" else "x", expected[name], given)
