# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The buffers of a group, which its layers share.

They are freed with the last layer, graph or result that uses them, in any order of ranks: memory that ranks share stays
as long as one rank maps it.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable
from typing import Any
from weakref import WeakValueDictionary

import paddle
from paddle.distributed.communication.group import Group, _GroupManager

__all__ = ["GroupBuffers", "buffers_of"]


class GroupBuffers:
    """Buffers of one group by key.

    Args:
        group: the ranks.
        name: the same on all ranks, and of no other buffers.

    Attributes:
        group: ``group``.
        name: ``name``.
    """

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name
        self._registered = _GroupManager.group_map_by_id.get(group.id)  # another one if a program made the group itself
        self._made: dict[Hashable, Any] = {}

    def find(self, key: Hashable) -> Any:
        """Return the buffer of a key, or None.

        Raises:
            RuntimeError: the group was destroyed.
        """
        if self.free_if_destroyed():
            raise RuntimeError(
                f"ExpertParallel: the group of ranks {self.group.ranks} was destroyed by destroy_process_group, so its "
                "layers exchange no more tokens"
            )
        return self._made.get(key)

    def keep(self, key: Hashable, made: Any) -> Any:
        """Store the buffer of a key, and return it."""
        self._made[key] = made
        return made

    def free_if_destroyed(self) -> bool:
        """Drop the buffers if `paddle.distributed.destroy_process_group` ended the group, and return True then."""
        is_destroyed = _GroupManager.group_map_by_id.get(self.group.id) is not self._registered
        if is_destroyed:
            self._made.clear()
        return is_destroyed


# The key is the identity of a group, since a new one may have the number of a destroyed one. Buffers keep groups alive.
_living: WeakValueDictionary[int, GroupBuffers] = WeakValueDictionary()


def buffers_of(group: Group) -> GroupBuffers:
    """Return the buffers of a group that all its ranks still have, or new ones; all ranks call it together.

    A rank may have collected the last layer of a group as garbage while another has not, so they ask each other.
    Buffers of groups that were destroyed are dropped.
    """
    for each in list(_living.values()):
        each.free_if_destroyed()
    own = _living.get(id(group))
    names: list[tuple[str | None, str]] = []
    paddle.distributed.all_gather_object(names, (own and own.name, uuid.uuid4().hex), group=group)
    if own is None or any(name != own.name for name, _ in names):
        own = _living[id(group)] = GroupBuffers(group, names[0][1])
    return own
