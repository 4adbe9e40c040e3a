# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Time of an exchange by each transport, microseconds of the slowest rank. Ranks begin and end together."""

from __future__ import annotations

import math

import numpy as np

from .machines import Machine, microseconds
from .traffic import Step, Traffic

__all__ = ["Exchanges", "rows_per_rank"]

_PAGE = 2 << 20  # of memory that GPUs share
_COLLECTIVES = {"exact": 3, "reduced": 4}  # of a dispatch: numbers, ids, tokens, and probabilities


def rows_per_rank(capacity: int, row_bytes: int) -> int:
    """Rows that `transport="peer"` has for each rank: whole pages."""
    step = _PAGE // math.gcd(_PAGE, row_bytes)
    return -(-capacity // step) * step


class Exchanges:
    """The exchanges of a layer with certain traffic.

    Args:
        machine: numbers of GPUs and links.
        traffic: counts between ranks.
        hidden: d.
        combine: "exact" or "reduced".
        transport: "peer": ranks write to each other's memory, in one domain; "alltoall": `alltoall_single` of NCCL
            with tokens once for each rank, as the package has it; "rows": the same with a row for each slot, by hand;
            "by_domain": a token crosses the network once for each domain, and is handed on there (not in the package).
        capacity: tokens that a rank may send to each with "peer" and "by_domain"; None: the most that any of them
            sends.

    Raises:
        ValueError: "peer" in several domains.
    """

    def __init__(
        self,
        machine: Machine,
        traffic: Traffic,
        hidden: int,
        *,
        combine: str,
        transport: str,
        capacity: int | None = None,
    ) -> None:
        if transport == "peer" and traffic.layout.domains > 1:
            raise ValueError(f"Exchanges: transport 'peer' needs one domain, but got {traffic.layout}")
        self.machine, self.traffic, self.combine, self.transport = machine, traffic, combine, transport
        self.near, self.row_bytes = traffic.layout.near(), 2 * hidden
        most = math.ceil(traffic.tokens.max()) if capacity is None else capacity
        self.buffer_rows = traffic.layout.ranks * rows_per_rank(most, self.row_bytes)

    def us(self, step: Step) -> float:
        """Microseconds of a step."""
        if self.transport == "peer":
            return self._by_peer(step, self.push_us(step))
        if self.transport == "by_domain":
            return self._by_peer(step, self._through_domains_us(step)) + self._narrowing_us(step)
        if self.transport == "rows":
            numbers = 0.0 if step.backward or step.name == "combine" else self._numbers_us(step)
            return self.rows_us(step) + numbers
        return self._collectives_us(step)

    # ---- ranks that write to each other's memory

    def push_us(self, step: Step) -> float:
        """Time of the kernel that writes rows to other ranks: link or memory, whichever takes longer."""
        read = self.traffic.tokens_per_rank if step.from_owner else step.lines.sum(1).max()
        moved = (read + np.diag(step.lines).max()) * step.row_bytes + step.bytes_received().max()
        link = self.machine.peer.link_us(step.busiest(), self.traffic.layout.ranks)
        return max(link, microseconds(moved, self.machine.local.gbps))

    def plan_us(self) -> float:
        """Routing on both sides."""
        slots = (self.traffic.tokens_per_rank + self.buffer_rows) * self.traffic.topk
        return self.machine.peer.dispatch_us + self.machine.local.slot_us * slots

    def kept_bytes(self, step: Step) -> float:
        """Bytes read and written by the copy of arrived tokens, for all rows of the buffer."""
        return float((step.lines.sum(0).max() + self.buffer_rows) * step.row_bytes)

    def keep_us(self, step: Step) -> float:
        """Time of that copy that the link does not hide."""
        return microseconds(self.kept_bytes(step), self.machine.peer.keep_gbps)

    def sum_us(self, step: Step) -> float:
        """Adding up the rows of each token."""
        rows = step.lines.sum(0).max() + self.traffic.tokens_per_rank
        return microseconds(rows * step.row_bytes, self.machine.peer.sum_gbps)

    def _by_peer(self, step: Step, moving_us: float) -> float:
        if step.name == "combine":
            return self.machine.peer.combine_us + moving_us + self.sum_us(step)
        begin = self.machine.peer.combine_us if step.backward else self.plan_us()
        return begin + moving_us + self.keep_us(step)

    def _through_domains_us(self, step: Step) -> float:
        """Over the network once for each domain, to the rank in the same place there, which hands it on by NVLink.

        Both overlap, piece by piece.
        """
        layout = self.traffic.layout
        if layout.domains == 1:
            return self.push_us(step)
        network = self.machine.network
        # A combine takes the same ways back, so counting from the owner of the tokens serves both.
        lines = step.lines if step.from_owner else step.lines.T
        rank = np.arange(layout.ranks)
        far = np.where(rank[:, None] // layout.domain == np.arange(layout.domains), 0, self.traffic.of_domains)
        arrives = np.zeros(layout.ranks)
        np.add.at(arrives, (np.arange(layout.domains) * layout.domain + (rank % layout.domain)[:, None]), far)
        crossing = max(far.sum(1).max(), arrives.max()) * step.line_bytes
        same_rail = rank[:, None] % layout.domain == rank % layout.domain
        handed_on = np.where(same_rail, 0, lines)
        forwards = np.zeros(layout.ranks)
        forwarder = rank // layout.domain * layout.domain + (rank % layout.domain)[:, None]
        np.add.at(forwards, forwarder, handed_on)
        by_nvlink = max(forwards.max(), handed_on.sum(0).max()) * step.line_bytes
        slower = max(microseconds(crossing, network.gbps), self.machine.peer.link_us(by_nvlink, layout.domain))
        return slower + network.us + network.message_us * (layout.domains - 1)

    # ---- collectives

    def all_to_all_us(self, step: Step) -> float:
        """Time of one `alltoall_single`; NVLink and the network transfer concurrently."""
        machine, network = self.machine, self.machine.network
        own = microseconds(2 * np.diag(step.lines).max() * step.line_bytes, machine.local.gbps)
        close = machine.nccl.link_us(step.busiest(self.near), self.traffic.layout.domain)
        if self.traffic.layout.domains == 1:
            return machine.nccl.us + own + close
        far = microseconds(step.busiest(~self.near), network.gbps)
        return machine.nccl.us + own + max(close, far) + self._network_us(step)

    def _network_us(self, step: Step) -> float:
        """Fixed time of a collective that crosses the network."""
        if self.traffic.layout.domains == 1:
            return 0.0
        return self.machine.network.us + self.machine.network.message_us * step.messages(~self.near)

    def _numbers_us(self, step: Step) -> float:
        """Numbers of rows travel first, and the host waits for them."""
        waiting = self.machine.network.host_us + self.machine.local.launch_us
        return self.machine.nccl.us + self._network_us(step) + waiting

    def _narrowing_us(self, step: Step) -> float:
        """Time to quantise sent tokens to float8 and to dequantise received ones to bfloat16; 0 without float8."""
        if step.row_bytes == self.row_bytes:
            return 0.0
        lines = step.lines.sum(1).max(), step.lines.sum(0).max()
        return sum(self.machine.local.us(each * (step.row_bytes + self.row_bytes)) for each in lines)

    def _collectives_us(self, step: Step) -> float:
        """Time of the package's exchange: rows are gathered, travel, and are gathered again or added up."""
        local, tokens = self.machine.local, self.traffic.tokens_per_rank
        sent, received = step.lines.sum(1).max(), step.lines.sum(0).max()
        us = self.all_to_all_us(step)
        more = 0
        if step.name == "dispatch":
            us += local.us((tokens + sent) * self.row_bytes) + self._narrowing_us(step)
            if not step.backward:
                more = _COLLECTIVES[self.combine] - 2 + int(step.row_bytes < self.row_bytes)  # float8 has scales
                us += self._numbers_us(step)
            if self.combine == "exact":
                rows = self.traffic.rows_received.max()
                us += local.us((received + rows) * self.row_bytes)
        else:
            us += local.us((received + tokens) * step.row_bytes)
            if self.combine == "exact":
                us += local.us(2 * sent * step.row_bytes)
            more = int(step.backward and self.combine == "reduced")
        return us + more * (self.machine.nccl.us + self._network_us(step))

    def rows_us(self, step: Step) -> float:
        """Time by hand: permute, an all-to-all of all rows, sort_chunks; and back."""
        local, tokens = self.machine.local, self.traffic.tokens_per_rank
        sent, received = step.lines.sum(1).max(), step.lines.sum(0).max()
        far_side, own_side = (received, sent) if step.from_owner else (sent, received)
        moved = local.us((tokens + own_side) * step.row_bytes) + local.us(2 * far_side * step.row_bytes)
        return moved + self.all_to_all_us(step)
