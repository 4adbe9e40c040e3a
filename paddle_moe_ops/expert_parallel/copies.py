# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Groups of the ranks that have copies of the same experts, found from the marks of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .groups import group_of_experts

__all__ = ["are_copies_connected", "connect_copies", "copies_of"]

_NO_COPIES = -1
_connected: dict[tuple[int, ...], Group] = {}  # the same on all ranks, since all connect each of them


def are_copies_connected(parameter: Tensor, everyone: Group) -> bool:
    """Whether `copies_of` knows the copies of a parameter, whose experts are shared by some of the ranks."""
    return getattr(parameter, "expert_copies", (None,))[0] == group_of_experts(parameter, everyone).id


def copies_of(parameter: Tensor, everyone: Group) -> Group | None:
    """The several ranks that have copies of the same experts as this rank, each in a group of its own, or None."""
    if group_of_experts(parameter, everyone).ranks == everyone.ranks:
        return None
    number: int = parameter.expert_copies[1]
    return None if number == _NO_COPIES else paddle.distributed.get_group(number)


def connect_copies(function: str, experts: Mapping[str, Tensor], everyone: Group) -> None:
    """Let `copies_of` know the copies of parameters; every rank must call it, with parameters in the same order.

    Groups of a parameter have one size on all ranks.

    Args:
        function: name that begins the message.
        experts: parameters, by what a message calls them.
        everyone: all ranks.

    Raises:
        ValueError: on every rank, if the groups of a parameter overlap.
    """
    of_ranks: list[Any] = []
    own = [group_of_experts(each, everyone) for each in experts.values()]
    paddle.distributed.all_gather_object(of_ranks, [tuple(each.ranks) for each in own], group=everyone)
    this = everyone.ranks[everyone.rank]
    for number, (label, parameter) in enumerate(experts.items()):
        groups = [each[number] for each in of_ranks]
        parts = sorted(set(groups))
        if any(groups[everyone.ranks.index(rank)] != part for part in parts for rank in part):
            expected = "shared by groups that have each rank once"
            _checks.bad_value(function, label, expected, f"groups of ranks {[list(each) for each in parts]}")
        for copies in zip(*parts, strict=True):
            group = _group_of(copies, everyone)
            if this in copies:
                parameter.expert_copies = (own[number].id, _NO_COPIES if group is None else group.id)


def _group_of(copies: tuple[int, ...], everyone: Group) -> Group | None:
    if len(copies) == 1:
        return None
    if list(copies) == everyone.ranks:
        return everyone
    if copies not in _connected:
        _connected[copies] = paddle.distributed.new_group(list(copies))
        paddle.distributed.barrier(group=everyone)  # gloo needs it between groups
    return _connected[copies]
