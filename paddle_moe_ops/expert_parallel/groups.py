# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The ranks that share the experts, and what they must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
from paddle.distributed.communication.group import Group

from .. import _checks

__all__ = ["agree", "group_of"]


def group_of(function: str, group: Any) -> Group:
    """The group that a caller means.

    Args:
        function: name that begins the messages.
        group: one of `paddle.distributed`, as Fleet's ``get_expert_parallel_group()`` gives, too; None for all ranks,
            or for this process alone where `paddle.distributed` was not initialised.

    Raises:
        TypeError: it is no group.
        ValueError: this process is not one of its ranks.
    """
    if group is None:
        # Where nothing was initialised Paddle would make a group of every rank that the environment names.
        if not paddle.distributed.is_initialized():
            return Group(0, -1, [0], name="expert_parallel_alone")
        group = paddle.distributed.get_group(0)
    _checks.instance(function, "group", group, Group, "a group of paddle.distributed, or None")
    if group.rank < 0:
        _checks.bad_value(function, "group", "a group that this rank belongs to", f"one of ranks {group.ranks}")
    return group


def agree(function: str, group: Group, settings: Mapping[str, Any]) -> None:
    """Check that all ranks of a group were given the same; every rank must call it.

    Raises:
        ValueError: on every rank, if the settings differ.
    """
    if group.nranks == 1:
        return
    of_ranks: list[dict[str, Any]] = []
    paddle.distributed.all_gather_object(of_ranks, dict(settings), group=group)
    for name, value in settings.items():
        values = [each.get(name) for each in of_ranks]
        if any(other != value for other in values):
            given = ", ".join(f"{other!r} on rank {rank}" for rank, other in zip(group.ranks, values, strict=True))
            _checks.bad_value(function, name, "the same on all ranks of the group", given)
