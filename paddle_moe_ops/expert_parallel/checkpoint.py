# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Stacked tensors of experts that are gathered from the ranks that share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .groups import values_of_ranks

__all__ = ["Destination", "Part", "agree_on_parts", "copied", "destination_of", "gather_parts"]


class Part(NamedTuple):
    """A tensor of this rank.

    Attributes:
        value: [E / P, ...] if the group shares experts, or any shape.
        group: the ranks that must have tensors of the same name, dtype and shape.
    """

    value: Tensor
    group: Group


class Destination(NamedTuple):
    """The ranks that get whole tensors, and the memory that holds them.

    Attributes:
        rank: of `paddle.distributed`; None: all ranks.
        is_here: whether this rank gets them.
        to_cpu: whether they are in the host's memory.
    """

    rank: int | None
    is_here: bool
    to_cpu: bool


def destination_of(function: str, group: Group, dst: Any, to_cpu: Any) -> Destination:
    """Check the arguments ``dst`` and ``to_cpu`` of a function.

    Args:
        function: name that begins the messages.
        group: the ranks that call it.
        dst: a rank of `paddle.distributed`, or None for all.
        to_cpu: a bool.

    Raises:
        TypeError: ``dst`` is no int, or ``to_cpu`` no bool.
        ValueError: ``dst`` is not in the group.
    """
    to_cpu = _checks.flag(function, "to_cpu", to_cpu)
    if dst is None:
        return Destination(None, True, to_cpu)
    if isinstance(dst, bool) or not isinstance(dst, int):
        _checks.bad_type(function, "dst", "an int, or None", type(dst).__name__)
    if dst not in group.ranks:
        _checks.bad_value(function, "dst", f"one of the ranks {group.ranks}, or None", dst)
    return Destination(dst, dst == group.ranks[group.rank], to_cpu)


def agree_on_parts(
    function: str, everyone: Group, label: str, parts: Mapping[str, Part], destination: Destination
) -> None:
    """Check that the ranks of each group have tensors of the same names, dtypes and shapes.

    All ranks know the parts of all, so that an error of one group is raised on the ranks of every group.

    Args:
        function: name that begins the message.
        everyone: the ranks of all groups; each of them must call this.
        label: what the message calls a tensor, with {!r} in place of its name.
        parts: of this rank.
        destination: must be the same rank for all.

    Raises:
        ValueError: on every rank, if they differ.
    """
    if everyone.nranks == 1:
        return
    own = {"dst": (str(destination.rank), tuple(everyone.ranks))}
    for name, (value, group) in parts.items():
        layout = f"{_checks.dtype_name(value.dtype)} {list(value.shape)}"
        shared_by = "" if group.ranks == everyone.ranks else f" of ranks {group.ranks}"
        own[label.format(name)] = (layout + shared_by, tuple(group.ranks))
    of_ranks: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    paddle.distributed.all_gather_object(of_ranks, own, group=everyone)
    by_rank = dict(zip(everyone.ranks, of_ranks, strict=True))
    groups = {(name, ranks): None for each in of_ranks for name, (_, ranks) in each.items()}
    for name, ranks in groups:
        layouts = {rank: by_rank[rank].get(name, (None,))[0] for rank in ranks}
        if len(set(layouts.values())) > 1:
            given = values_of_ranks(map(repr, layouts.values()), layouts)
            _checks.bad_value(function, name, "the same on all ranks of the group", given)


def gather_parts(parts: Mapping[str, Part], destination: Destination) -> dict[str, Tensor]:
    """Gather stacked tensors [E / P, ...] as [E, ...], one after the other; every rank must call it.

    The groups' collectives follow the order of names. The ranks of a group have the same names, so groups that overlap
    cannot wait for each other.

    Args:
        parts: on which the ranks agree.
        destination: of the whole tensors.

    Returns:
        whole tensors, copies; on other ranks than the destination none.
    """
    whole = {}
    for name in sorted(parts):
        gathered = _gathered(*parts[name], destination)
        if gathered is not None:
            whole[name] = gathered
    return whole


def _gathered(part: Tensor, group: Group, destination: Destination) -> Tensor | None:
    if group.nranks == 1:
        return copied(part, destination) if destination.is_here else None
    of_ranks: list[Tensor] = []
    if destination.rank is None:
        paddle.distributed.all_gather(of_ranks, part, group=group)
    elif destination.rank in group.ranks:
        paddle.distributed.gather(part, of_ranks if destination.is_here else None, destination.rank, group)
    if not destination.is_here:
        return None
    if destination.to_cpu:
        of_ranks = [each.cpu() for each in of_ranks]
    return paddle.concat(of_ranks)


def copied(value: Tensor, destination: Destination) -> Tensor:
    """Return a copy of a tensor in the memory of the destination."""
    return value.cpu() if destination.to_cpu and not value.place.is_cpu_place() else value.clone()
