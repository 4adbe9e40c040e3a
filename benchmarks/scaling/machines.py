# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of a machine. `calibration` fits them to results, except for those of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["CX7", "Local", "Machine", "Nccl", "Network", "Peer", "Products", "microseconds"]

_HALF_TILE = 64  # rows by which the last tile of an expert exceeds it, on average; tiles have 128


def microseconds(size: float, gbps: float) -> float:
    """Time of ``size`` bytes at ``gbps`` GB/s."""
    return float(size) / gbps / 1e3


@dataclass(frozen=True)
class Products:
    """Time of one pass of `moe_mlp` on one GPU, linear in its work.

    Attributes:
        factors: microseconds of `work`'s numbers.
        slowdown: time in a layer between GPUs, which multiplies all the time, over time of the GEMMs alone, measured
            with pauses between calls.
        fixed_us: time of launches and small operators around the GEMMs.
    """

    factors: tuple[float, ...]
    slowdown: float = 1.0
    fixed_us: float = 0.0

    @staticmethod
    def work(rows: float, hidden: int, inner: int, experts: int, backward: bool) -> list[float]:
        """Operations, those of rows that fill tiles up, elements of rows of both widths, elements of matrices."""
        flops = (12 if backward else 6) * hidden * inner
        matrices = 3 * experts * hidden * inner
        return [rows * flops, experts * _HALF_TILE * flops, rows * hidden, rows * inner, matrices]

    def us(self, rows: float, hidden: int, inner: int, experts: int, backward: bool) -> float:
        """Microseconds for ``rows`` rows of ``experts`` experts."""
        work = np.asarray(self.work(rows, hidden, inner, experts, backward))
        return self.slowdown * float(work @ np.asarray(self.factors)) + self.fixed_us


@dataclass(frozen=True)
class Local:
    """Operators that move rows within a GPU.

    Attributes:
        launch_us: time of a launch.
        gbps: speed of bytes read and written.
        slot_us: time to route a slot.
    """

    launch_us: float
    gbps: float
    slot_us: float

    def us(self, size: float) -> float:
        return self.launch_us + microseconds(size, self.gbps)


class _Links:
    """Links of a rank to the others of its domain."""

    gbps: float
    several: float

    def link_us(self, size: float, ranks: int) -> float:
        """Time of ``size`` bytes between ``ranks`` ranks."""
        return microseconds(size, self.gbps * (self.several if ranks > 2 else 1.0))


@dataclass(frozen=True)
class Peer(_Links):
    """Ranks that write to each other's memory.

    Attributes:
        copy_gbps: speed of the driver's copy, each way.
        copy_us: its fixed time.
        gbps: speed of the kernels that move rows, each way.
        dispatch_us: routing, maps and the barrier of a dispatch, without the time in `Local.slot_us`.
        combine_us: the barrier and the launches of a combine.
        sum_gbps: speed of adding up a token's rows, bytes read and written; infinite if the link hides it.
        keep_gbps: the same if received rows are copied.
        several: the remaining share of ``gbps`` if a rank writes to more than one other.
    """

    copy_gbps: float
    copy_us: float
    gbps: float
    dispatch_us: float
    combine_us: float
    sum_gbps: float
    keep_gbps: float
    several: float = 1.0


@dataclass(frozen=True)
class Nccl(_Links):
    """`alltoall_single` in one NVLink domain.

    Attributes:
        gbps: each way.
        us: fixed time of a call.
        several: the share of ``gbps`` that is left between more than two ranks.
    """

    gbps: float
    us: float
    several: float = 1.0


@dataclass(frozen=True)
class Network:
    """RDMA between NVLink domains, a network card for each GPU. Published or assumed, not measured by us.

    Attributes:
        name: network card.
        gbps: speed of a card each way.
        us: fixed time of a step that crosses the network.
        message_us: time for each rank that a rank sends to.
        host_us: that the host's wait for numbers of tokens adds.
        sources: origin of the numbers.
    """

    name: str
    gbps: float
    us: float
    message_us: float
    host_us: float
    sources: Sequence[str]


CX7 = Network(
    "ConnectX-7, 400 Gb/s",
    gbps=45.0,
    us=10.0,
    message_us=1.0,
    host_us=20.0,
    sources=(
        "[DeepEP's README](https://github.com/deepseek-ai/DeepEP/blob/main/README.md) (V2, SM90, CX7) has 90 GB/s for "
        "2 nodes of 8 and 61 GB/s for 4, local traffic counted; 1/2 and 3/4 of that cross the network: 45 and 46 GB/s",
        "[DeepEP's README of V1](https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md) has 43 to 58 GB/s for "
        "16 to 64 GPUs, of about 50 that a card has",
        "latencies are assumed: two switches and a flag take 10 us, posting a message 1 us, a wait of the host 20 us",
    ),
)


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, and their links.

    Attributes:
        name: GPU.
        local: within one.
        forward: the GEMMs of a forward pass.
        backward: the GEMMs of a backward pass.
        peer: ranks of one domain, by shared memory.
        nccl: ranks of one domain, by NCCL.
        network: between domains.
    """

    name: str
    local: Local
    forward: Products
    backward: Products
    peer: Peer
    nccl: Nccl
    network: Network = CX7

    def products(self, backward: bool) -> Products:
        return self.backward if backward else self.forward
