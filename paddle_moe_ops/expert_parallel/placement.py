# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The placement of experts on ranks, and the numbers under which exchanges know them.

Exchanges number experts by slots: rank r has the slots from r * S on, where S is the largest number of experts of a
rank, and its experts are in its first slots, ascending. Slots beyond a rank's experts stay empty. If every rank has
E / P experts in the order of ranks, an expert's slot is its own number, and nothing is renumbered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import beside, filled, numbers_of
from ..routing import Plan

__all__ = [
    "BY_ROW",
    "Placement",
    "Slots",
    "as_option",
    "moved_rows",
    "no_experts",
    "placement_of",
    "placement_of_parameter",
]

BY_ROW = ("row_to_token", "row_to_slot", "row_to_expert")


@dataclass(frozen=True)
class Placement:
    """The rank of each expert, as an index into the group.

    Attributes:
        ranks: of expert 0, 1, ..., E - 1.
        num_ranks: P.
    """

    ranks: tuple[int, ...]
    num_ranks: int

    @cached_property
    def experts(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each rank, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for expert, rank in enumerate(self.ranks):
            found[rank].append(expert)
        return tuple(map(tuple, found))

    @cached_property
    def counts(self) -> list[int]:
        """The number of experts of each rank."""
        return [len(each) for each in self.experts]

    @cached_property
    def slots_per_rank(self) -> int:
        """The slots of a rank: the largest number of experts of a rank."""
        return max(self.counts)

    @cached_property
    def num_slots(self) -> int:
        """The slots of all ranks."""
        return self.slots_per_rank * self.num_ranks

    @cached_property
    def is_in_order(self) -> bool:
        """True if the experts of one rank after the other are in the order of experts."""
        return all(one <= other for one, other in zip(self.ranks, self.ranks[1:], strict=False))

    @cached_property
    def is_even(self) -> bool:
        """True if the slot of each expert is its own number."""
        return self.is_in_order and self.num_slots == len(self.ranks)

    @cached_property
    def order(self) -> list[int]:
        """The experts of rank 0, of rank 1, ..."""
        return [expert for experts in self.experts for expert in experts]

    @cached_property
    def slot_of_expert(self) -> list[int]:
        """The slot of each expert."""
        slots = [0] * len(self.ranks)
        for rank, experts in enumerate(self.experts):
            for number, expert in enumerate(experts):
                slots[expert] = rank * self.slots_per_rank + number
        return slots

    @cached_property
    def expert_of_slot(self) -> list[int]:
        """The expert in each slot; E in an empty one."""
        experts = [len(self.ranks)] * self.num_slots
        for expert, slot in enumerate(self.slot_of_expert):
            experts[slot] = expert
        return experts

    @cached_property
    def is_in_blocks(self) -> bool:
        """True if each rank has experts, and they follow each other."""
        return all(len(list(self.runs(rank))) == 1 for rank in range(self.num_ranks))

    @cached_property
    def first_rank(self) -> int:
        """The first rank with experts."""
        return next(rank for rank, count in enumerate(self.counts) if count)

    def runs(self, rank: int) -> Iterator[tuple[int, int]]:
        """The ranges of experts of a rank, as first and end."""
        first = end = -1
        for expert in self.experts[rank]:
            if expert != end:
                if end > first:
                    yield first, end
                first = expert
            end = expert + 1
        if end > first:
            yield first, end

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Return the experts of a rank from a tensor with those of all ranks, [E, ...]."""
        parts = [whole[first:end] for first, end in self.runs(rank)]
        return no_experts(whole) if not parts else parts[0] if len(parts) == 1 else paddle.concat(parts)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a tensor with the experts of all ranks, [E, ...], from those of each rank."""
        if self.is_in_order:
            return paddle.concat([each for each, count in zip(parts, self.counts, strict=True) if count])
        pieces: list[tuple[int, Tensor]] = []
        for rank, part in enumerate(parts):
            start = 0
            for first, end in self.runs(rank):
                pieces.append((first, part[start : start + end - first]))
                start += end - first
        return paddle.concat([piece for _, piece in sorted(pieces, key=lambda each: each[0])])

    def __str__(self) -> str:
        return str(list(self.ranks))


def as_option(placement: Any) -> Any:
    """Return an argument ``placement`` in a form that can be compared: a list or an array as a tuple."""
    if isinstance(placement, np.ndarray):
        placement = placement.tolist()
    return tuple(placement) if isinstance(placement, list) else placement


def placement_of(function: str, placement: Any, num_experts: int, num_ranks: int) -> Placement:
    """Return the placement of an argument ``placement``.

    Args:
        function: name that begins the messages.
        placement: the rank of each expert; None: each rank has E // P experts that follow each other, and the first
            E % P ranks have one more.
        num_experts: E.
        num_ranks: P.

    Raises:
        TypeError: it is no list of ints.
        ValueError: it does not have E ranks of the group.
    """
    if placement is None:
        count, more = divmod(num_experts, num_ranks)
        counts = [count + (rank < more) for rank in range(num_ranks)]
        return Placement(tuple(rank for rank in range(num_ranks) for _ in range(counts[rank])), num_ranks)
    expected = "a list of the rank of each expert, or None"
    ranks = _checks.listed(function, "placement", placement, expected)
    if len(ranks) != num_experts:
        _checks.bad_value(function, "placement", f"{num_experts} ranks, one for each expert", f"{len(ranks)}")
    numbers = [_checks.integer(function, f"placement[{i}]", each, 0, num_ranks - 1) for i, each in enumerate(ranks)]
    made = Placement(tuple(numbers), num_ranks)
    if made.num_slots > _checks.MAX_EXPERTS:
        expected = f"one in which the largest number of experts of a rank is at most {_checks.MAX_EXPERTS // num_ranks}"
        _checks.bad_value(function, "placement", expected, made.slots_per_rank)
    return made


def placement_of_parameter(parameter: Tensor, group: Group) -> Placement:
    """Return the placement in a parameter's mark; without one each rank has as many experts as this one."""
    ranks = getattr(parameter, "expert_placement", None)
    if ranks is None:
        return placement_of("", None, parameter.shape[0] * group.nranks, group.nranks)
    return Placement(ranks, group.nranks)


def no_experts(like: Tensor) -> Tensor:
    """Return a tensor of no experts; a slice without elements cannot be assigned to in all cases."""
    return filled([0, *like.shape[1:]], 0, like.dtype, like=like)


class Slots:
    """The tables of a placement on the devices of tensors.

    Args:
        placement: the placement.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._tables: dict[tuple[str, str], Tensor] = {}

    def of_ids(self, ids: Tensor) -> Tensor:
        """Return the slots [T, K] of ids of experts, int32; -1 for other values."""
        experts = len(self._placement.ranks)
        if ids.shape[0] == 0:
            return ids.astype("int32")
        table = self._table("slots", [*self._placement.slot_of_expert, -1], ids)
        is_expert = (ids >= 0) & (ids < experts)
        index = paddle.where(is_expert, ids, paddle.full_like(ids, experts))
        return paddle.gather(table, index.flatten()).reshape(ids.shape)

    def of_counts(self, counts: Tensor) -> Tensor:
        """Return numbers [P * S] by slot from numbers [E] by expert; 0 for empty slots."""
        table = self._table("experts", self._placement.expert_of_slot, counts)
        return paddle.gather(paddle.concat([counts, filled([1], 0, counts.dtype, like=counts)]), table)

    def counts_of_experts(self, counts: Tensor) -> Tensor:
        """Return numbers [E] by expert from numbers [P * S] by slot."""
        return paddle.gather(counts, self._table("own slots", self._placement.slot_of_expert, counts))

    def by_rank(self, plan: Plan) -> Plan:
        """Return a plan without gaps whose rows are in the order of slots, in place of that of experts.

        A token's rows stay in the order of experts, so sums over them do not depend on the placement.

        Args:
            plan: over all experts; ``expert_offsets`` and ``row_to_expert`` of the result are those of experts.
        """
        if plan.num_rows == 0 or self._placement.is_in_order:
            return plan
        order = self._placement.order
        places = [0] * len(order)
        for place, expert in enumerate(order):
            places[expert] = place
        counts = paddle.gather(plan.tokens_per_expert, self._table("order", order, plan.tokens_per_expert))
        starts = paddle.cumsum(counts, dtype=counts.dtype) - counts
        shift = paddle.gather(starts, self._table("places", places, starts)) - plan.expert_offsets[:-1]
        rows = numbers_of(plan.row_to_expert) + paddle.gather(shift, plan.row_to_expert)
        return moved_rows(plan, rows, plan.num_rows)

    def _table(self, name: str, numbers: Sequence[int], like: Tensor) -> Tensor:
        key = name, str(like.place)
        if key not in self._tables:
            self._tables[key] = beside(paddle.to_tensor(numbers, dtype="int32"), like)
        return self._tables[key]


def moved_rows(plan: Plan, places: Tensor, num_rows: int) -> Plan:
    """Return a plan with its rows in other places of a buffer.

    Args:
        plan: has at least one row.
        places: int32 [N], the new place of each row; ``num_rows`` and above: the row has none.
        num_rows: of the buffer; its rows that receive none have no token.
    """
    maps = {}
    for name in BY_ROW:
        buffer = filled([num_rows + 1], -1, "int32", like=places)  # an extra row collects those without a place
        maps[name] = paddle.scatter(buffer, places, getattr(plan, name))[:num_rows]
    for name in ("slot_to_row", "token_rows"):
        rows = getattr(plan, name)
        new = paddle.gather(places, rows.clip(min=0).flatten()).reshape(rows.shape)
        maps[name] = paddle.where(rows >= 0, new, rows)
    return plan._replace(**maps, num_rows=num_rows)
