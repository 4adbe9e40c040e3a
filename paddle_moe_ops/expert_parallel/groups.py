# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The ranks that share the experts, and what they must agree on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import context_manager

__all__ = [
    "agree",
    "check_group_of_experts",
    "expert_group_of",
    "group_of",
    "group_of_experts",
    "groups_of_experts",
    "is_gloo",
    "raise_for_others",
    "raising_together",
    "values_of_ranks",
]


def group_of(function: str, group: Any) -> Group:
    """The group that a caller means.

    Args:
        function: name that begins the messages.
        group: one of `paddle.distributed`, as Fleet's ``get_expert_parallel_group()`` gives, too; None for all ranks,
            or for this process alone where `paddle.distributed` was not initialised.

    Raises:
        TypeError: it is not a group.
        ValueError: this process is not one of its ranks.
    """
    if group is None:
        # Where nothing was initialised Paddle would make a group of every rank that the environment names.
        if not paddle.distributed.is_initialized():
            return Group(0, -1, [0], name="expert_parallel_alone")
        group = paddle.distributed.get_group(0)
    _checks.instance(function, "group", group, Group, "a group of paddle.distributed, or None")
    if group.rank < 0 and group.ranks == [paddle.distributed.get_rank()]:  # Paddle says so of groups of one rank
        return Group(0, -1, group.ranks, name="expert_parallel_alone")
    if group.rank < 0:
        _checks.bad_value(function, "group", "a group that this rank belongs to", f"one of ranks {group.ranks}")
    return group


def is_gloo(group: Group) -> bool:
    """Whether gloo connects the ranks."""
    return str(group.backend).lower() == "gloo"


def group_of_experts(parameter: Tensor, otherwise: Group) -> Group:
    """The ranks that share the experts of a parameter, by its mark; another group if that names none."""
    number = getattr(parameter, "expert_group_id", None)
    if number is None:
        return otherwise
    if number < 0:  # this rank alone, which `group_of` returns as such
        return Group(0, -1, [paddle.distributed.get_rank()], name="expert_parallel_alone")
    return paddle.distributed.get_group(number) or otherwise


def expert_group_of(parameter: Tensor) -> Group | None:
    """The several ranks that share the experts of a parameter, if it is marked as one of them."""
    group = group_of_experts(parameter, Group(0, -1, [0]))
    return None if group.nranks == 1 else group


def check_group_of_experts(function: str, label: str, parameters: Mapping[Any, Tensor], group: Group) -> None:
    """Check that a group is the one whose ranks share the experts.

    Args:
        function: name that begins the message.
        label: what a parameter is called, with {!r} in place of its key.
        parameters: any.
        group: what the caller gave.

    Raises:
        ValueError: a parameter is marked as that of experts which other ranks share.
    """
    for key, parameter in parameters.items():
        own = group_of_experts(parameter, group)
        if own.ranks != group.ranks:
            expected = f"the group that shares the experts of {label.format(key)}, ranks {own.ranks}"
            _checks.bad_value(function, "group", expected, f"ranks {group.ranks}")


def groups_of_experts(
    function: str, label: str, parameters: Mapping[Any, Tensor], group: Group, *, is_given: bool
) -> dict[Any, Group]:
    """The ranks that share the experts of each parameter.

    Args:
        function: name that begins the message.
        label: what a parameter is called, with {!r} in place of its key.
        parameters: those of experts.
        group: of a parameter whose mark names none.
        is_given: whether the caller chose the group, so that it must be that of each mark.

    Raises:
        ValueError: a parameter is marked as that of experts which other ranks share.
    """
    if is_given:
        check_group_of_experts(function, label, parameters, group)
    return {key: group_of_experts(each, group) for key, each in parameters.items()}


def agree(function: str, group: Group, settings: Mapping[str, Any]) -> None:
    """Check that all ranks of a group were given the same settings; every rank must call it.

    Raises:
        ValueError: on every rank, if the settings differ, or some ranks lack one.
    """
    with raising_together(function, group, settings):
        pass


def values_of_ranks(values: Iterable[Any], ranks: Iterable[int]) -> str:
    """The text of values that differ between ranks."""
    return ", ".join(f"{each} on rank {rank}" for each, rank in zip(values, ranks, strict=True))


@context_manager
def raising_together(function: str, group: Group, settings: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Make bad arguments and failures of one rank an error on every rank; every rank must come here.

    One exchange, after the block.

    Args:
        function: name that begins the messages.
        group: the ranks.
        settings: what must be the same on all of them, by name.

    Raises:
        TypeError, ValueError, RuntimeError, OSError: what this rank raised inside.
        RuntimeError: other ranks raised.
        ValueError: on every rank, if the settings differ, or some ranks lack one.
    """
    error: Exception | None = None
    try:
        yield
    except (TypeError, ValueError, RuntimeError, OSError) as caught:
        error = caught
    own = error is not None, dict(settings or {})
    of_ranks: list[tuple[bool, dict[str, Any]]] = []
    if group.nranks == 1:
        of_ranks.append(own)
    else:
        paddle.distributed.all_gather_object(of_ranks, own, group=group)
    if error is not None:
        raise error
    raise_for_others(function, group.ranks, [rank for rank, (bad, _) in zip(group.ranks, of_ranks, strict=True) if bad])
    for name in dict.fromkeys(name for _, each in of_ranks for name in each):
        values = [each.get(name) for _, each in of_ranks]
        if any(other != values[0] for other in values):
            given = values_of_ranks(map(repr, values), group.ranks)
            _checks.bad_value(function, name, "the same on all ranks of the group", given)


def raise_for_others(function: str, ranks: Sequence[int], raised: Sequence[int]) -> None:
    """Raise a RuntimeError on a rank whose own arguments are good, if other ranks raised."""
    if raised:
        raise RuntimeError(f"{function}: ranks {raised} of {ranks} raised an error in this call, which says more")
