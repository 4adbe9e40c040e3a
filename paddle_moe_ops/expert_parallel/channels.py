# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Windows of a group for tokens and rows, two of each kind, which exchanges use by turns: see `rendezvous`."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from ..backends import direct
from ..routing import Plan, plan_of
from .calls import Step
from .rendezvous import Rendezvous
from .windows import Window, granularity, share

__all__ = ["HEADER", "Arrivals", "OwnRows", "RowChannel", "RowWindow", "TokenChannel", "TokenSlot"]

_DISPATCH = "ExpertParallel.dispatch"
HEADER = 64  # PMO_RECORDS_HEADER
_MOST_STEPS = 256  # pages, at most, that hold a whole number of rows
_GROUP_COLUMNS, _PACKED_SCALES = 128, 4  # of float8
# How many of every 8 rows for another rank that rank fetches after the barrier, while it works in its own memory. The
# others are written to it before the barrier. So the link is busy in both halves. Rows that are copied where they
# arrive leave the second half less time than those that are added up.
FETCHED_COPIES, FETCHED_SUMS = 3, 4


class OwnRows(enum.IntEnum):
    """Where rows go that a rank sends to itself."""

    STAY = 0  # they stay, and are read, where they are
    TO_WINDOW = 1
    TO_NEW_MEMORY = 2


class RowWindow(NamedTuple):
    """A window for rows; row p * S + i is number i of those that go to, or came from, rank p.

    Attributes:
        arrived: [P * S, d], this rank's memory.
        peers: [P * S, d], this rank's regions at all ranks.
        num_ranks: P.
        rank: this rank.
        state: of the rendezvous.
    """

    arrived: Tensor
    peers: Tensor
    num_ranks: int
    rank: int
    state: Tensor

    def send(
        self, x: Tensor, token_rows: Tensor, own: OwnRows, *, fetched: int | None = None, leaves_room: bool = False
    ) -> Tensor:
        """Send rows to other ranks; a barrier has to follow.

        Args:
            x: [T, d].
            token_rows: int32 [T, C], the rows of the window that each token goes to.
            own: where rows for this rank go.
            fetched: how many of every 8 rows their receiver fetches; None: by where rows for this rank go.
            leaves_room: whether other operators are to run at the same time.

        Returns:
            the rows for this rank, [P * S, d], unless they stay where they are.
        """
        views = self.arrived, self.peers
        if fetched is None:
            fetched = FETCHED_COPIES if own == OwnRows.TO_NEW_MEMORY else FETCHED_SUMS
        options = self.num_ranks, self.rank, fetched, int(own), leaves_room
        (made,) = direct("rank_send", x, token_rows, *views, *options)
        return made

    def receive(
        self, token_rows: Tensor, own: Tensor | None = None, to: Tensor | None = None, *, fetched: int | None = None
    ) -> Tensor:
        """The sums of each token's rows that all ranks sent.

        Args:
            token_rows: int32 [T, C], the rows of the window that are for each token.
            own: [P * S, d], the rows that this rank sent to itself.
            to: [T, d], where the sums go, and where the rows that this rank sent to itself are already; C is 1 then.
            fetched: as all ranks gave it to `send`; None: by where rows of this rank are.
        """
        views = self.arrived, self.peers
        if fetched is None:
            fetched = FETCHED_COPIES if own is None else FETCHED_SUMS
        options = self.state, self.num_ranks, self.rank, fetched
        (made,) = direct("rank_receive", token_rows, *views, own, to, *options)
        return made


class TokenSlot(NamedTuple):
    """A window for tokens, and for everything that travels with them two views: what arrived, and what peers have.

    Attributes:
        rows: S rows for each rank.
        beside: uint8 [P, bytes], records or values.
        beside_of_peers: the same.
        codes: float8 [P * S, d]; this and what follows with float8 only.
        codes_of_peers: the same.
        scales: uint8 [P, bytes].
        scales_of_peers: the same.
    """

    rows: RowWindow
    beside: Tensor
    beside_of_peers: Tensor
    codes: Tensor | None = None
    codes_of_peers: Tensor | None = None
    scales: Tensor | None = None
    scales_of_peers: Tensor | None = None


class Arrivals(NamedTuple):
    """The tokens that arrive at a rank, R rows, some of which are no token.

    Attributes:
        ids: int32 [R, K], counted from the first expert of this rank, -1 for experts of other ranks.
        probs: float32 [R, K], 0 where there is no id.
        rows: int32 [R, 1], the row itself where there is a token, else -1.
        plan: of the ids. On a GPU it has room for all of them, so that nothing waits for a number.
        calls: int32 [P, CALL_WORDS], the calls that all ranks are in.
        workspace: what they are made with.
    """

    ids: Tensor
    probs: Tensor
    rows: Tensor
    plan: Plan
    calls: Tensor
    workspace: Tensor


def _pairs(group: Group, like: Tensor, windows: Sequence[Window]) -> list[list[Tensor]]:
    """Two windows of each kind; all ranks come here."""
    pairs = []
    for _ in range(2):
        pairs.append([view for window in windows for view in share(group, like, window)])
    return pairs


class TokenChannel:
    """The windows for tokens of one width and dtype.

    Args:
        group: the ranks.
        rendezvous: of the group, on the device of tokens.
        capacity: the most tokens that a rank sends to each rank.
        experts_per_rank: experts of a rank.
        like: [1, d], a tensor of the dtype and device of tokens.
        topk: K.
        float8: a format of `permute` in which tokens travel, or None.
        timeout: seconds that a rank waits for the others.
        step: in which all ranks make them.

    Attributes:
        rows_per_rank: S, at least the capacity.
        scale_columns: columns of a token's scales, as `quantize_1x128` makes them; 0 without float8.
    """

    def __init__(
        self,
        group: Group,
        rendezvous: Rendezvous,
        capacity: int,
        experts_per_rank: int,
        like: Tensor,
        topk: int,
        float8: str | None,
        timeout: float,
        step: Step,
    ) -> None:
        width, ranks = like.shape[1], group.nranks
        self.timeout, self._rendezvous = timeout, rendezvous
        self.meet(step)
        page, row_bytes = granularity(like.place), width * like.element_size()
        multiple = page // math.gcd(page, row_bytes)
        if float8 is not None:
            multiple = max(multiple, page // math.gcd(page, width))  # of powers of 2
        if multiple * row_bytes > _MOST_STEPS * page:
            expected = f"a width in which {_MOST_STEPS} pages of {page} bytes hold a whole number of rows"
            _checks.bad_value(_DISPATCH, "x", expected + ", for transport='peer'", f"{row_bytes} bytes a row")
        self.rows_per_rank = rows = -(-capacity // multiple) * multiple
        self.capacity, self.experts_per_rank, self.topk, self.group = capacity, experts_per_rank, topk, group
        self.float8, self.scale_columns = float8, 0
        beside = -(-(HEADER + rows * topk * 8) // page) * page
        windows = [
            Window(rows * row_bytes, ranks * rows, width, like.dtype),
            Window(beside, ranks, beside, paddle.uint8),
        ]
        if float8 is not None:
            groups = -(-width // _GROUP_COLUMNS)
            self.scale_columns = -(-groups // _PACKED_SCALES) if float8 == _checks.UE8M0 else groups
            scales = max(-(-rows * self.scale_columns * 4 // page), 1) * page
            windows += [
                Window(rows * width, ranks * rows, width, paddle.float8_e4m3fn),
                Window(scales, ranks, scales, paddle.uint8),
            ]
        self._pairs = _pairs(group, like, windows)
        for arrived, *_ in self._pairs:
            rendezvous.lend(arrived)

    def meet(self, step: Step) -> None:
        """Wait on the host for all ranks, before they make windows together."""
        self._rendezvous.meet(step, self.timeout)

    def wait(self, step: Step, forward_calls: Tensor | None = None) -> Tensor:
        """Make later work wait until all ranks have come here: see `Rendezvous.wait`."""
        return self._rendezvous.wait(step, self.timeout, forward_calls)

    def arrivals(self, beside: Tensor, step: Step) -> Arrivals:
        """Wait for the ranks, read what they told this one, and route it.

        All of this runs beside what is called next. It may be used, and given back, after the operator rank_join has
        waited for all of it. What was read may be used earlier, and another barrier may begin, after that operator has
        waited for that alone.

        Args:
            beside: where they tell it.
            step: the dispatch.
        """
        experts, sizes = self.experts_per_rank, (self.topk, self.rows_per_rank)
        first = self.group.rank * experts
        made = self._rendezvous.arrivals(step, self.timeout, beside, *sizes, first, experts)
        calls, ids, probs, rows, *maps, workspace = made
        return Arrivals(ids, probs, rows, plan_of(maps, ids.shape[0], self.topk, experts), calls, workspace)

    def slot(self) -> TokenSlot:
        """The windows of the next exchange."""
        arrived, peers, *beside = self._pairs[self._rendezvous.next()]
        return TokenSlot(self._rows(arrived, peers), *beside)

    def row_slot(self, pairs: Sequence[Sequence[Tensor]]) -> RowWindow:
        """The window for rows of the next exchange, of two pairs of views."""
        return self._rows(*pairs[self._rendezvous.next()])

    def _rows(self, arrived: Tensor, peers: Tensor) -> RowWindow:
        return RowWindow(arrived, peers, self.group.nranks, self.group.rank, self._rendezvous.state)

    @property
    def state(self) -> Tensor:
        """The state of the rendezvous."""
        return self._rendezvous.state


class RowChannel:
    """The windows for the rows of a channel's tokens, one for each of their K slots."""

    def __init__(self, tokens: TokenChannel, like: Tensor, step: Step) -> None:
        tokens.meet(step)
        width, rows = like.shape[1], tokens.rows_per_rank * tokens.topk
        region_bytes = rows * width * like.element_size()
        window = Window(region_bytes, tokens.group.nranks * rows, width, like.dtype)
        self._tokens, self._pairs = tokens, _pairs(tokens.group, like, [window])
        self.wait = tokens.wait

    def window(self) -> RowWindow:
        """The window of the next exchange; row r * K + k belongs to slot k of the token in row r."""
        return self._tokens.row_slot(self._pairs)
