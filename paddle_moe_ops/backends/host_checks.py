# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Data checks by the oracle on copies in host memory, for backends whose kernels do not check."""

from __future__ import annotations

from paddle import Tensor

from .. import reference
from .arrays import to_numpy
from .base import RouteSpec

__all__ = ["MOE_PERMUTE_NAMES", "check_chunks", "host_chunk_rows", "host_route"]

# Names of the arguments of route in moe_permute.
MOE_PERMUTE_NAMES = {
    "routing": "expert_routemap_topk",
    "probs": "expert_prob_topk",
    "buffer_size": "override_buffer_size",
}


def host_route(
    function: str, routing: Tensor, probs: Tensor | None, counts: Tensor | None, spec: RouteSpec
) -> reference.Plan:
    """Return the oracle's plan of a routing.

    Raises:
        ValueError: the data violate a check of ``spec.validation``, or the counts are wrong.
    """
    return reference.route(
        to_numpy(routing),
        None if probs is None else to_numpy(probs),
        num_experts=spec.num_experts,
        padding_alignment=spec.padding_alignment,
        tokens_per_expert=spec.counts if counts is None else _host_counts(function, counts),
        buffer_size=spec.buffer_size,
        topk=None if spec.topk < 0 else spec.topk,
        duplicates=spec.duplicates,
        validate=spec.validation.as_argument(),
        function=function,
        names=MOE_PERMUTE_NAMES if function == "moe_permute" else None,
    )


def _host_counts(function: str, counts: Tensor) -> list[int]:
    numbers = to_numpy(counts).tolist()
    for i, number in enumerate(numbers):
        if not 0 <= number < 2**31:
            raise ValueError(f"{function}: tokens_per_expert must hold counts in [0, 2^31), but entry {i} is {number}")
    return numbers


def check_chunks(function: str, split_sizes: Tensor, order: Tensor, num_rows: int) -> None:
    """Check the chunks of a buffer.

    Raises:
        ValueError: bad sizes or a bad order.
    """
    reference.chunk_sort_map(to_numpy(split_sizes), to_numpy(order), num_rows, function=function)


def host_chunk_rows(function: str, split_sizes: Tensor) -> int:
    """Return the sum of the sizes.

    Raises:
        ValueError: a size is negative, or the sum is too large for a map.
    """
    sizes = to_numpy(split_sizes).tolist()
    rows = sum(sizes)
    if rows >= 2**31 or min(sizes, default=0) < 0:
        raise ValueError(f"{function}: split_sizes must add up to less than 2^31")
    return rows
