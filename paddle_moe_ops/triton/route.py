# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routing: the launches that make the maps of a plan; `route_kernels` says what each of them does."""

from typing import Any, NamedTuple

from .launching import Array, Device, address, blocks, next_power_of_2
from .route_kernels import (
    count_kernel,
    maps_kernel,
    mask_to_ids_kernel,
    offsets_kernel,
    prefix_kernel,
    route_kernel,
)

__all__ = ["ONE_PROGRAM", "Maps", "Routing", "route"]

# What one program does in one launch, if it is not more than this.
ONE_PROGRAM = 256  # slots
_ONE_PROGRAM_ROWS = 8192
_ONE_PROGRAM_ROWMAP = 65536
_TILE = 256
_STEP = 32
_MOST_BINS = 1024
_FEW_EXPERTS = 32
_FILL = 1024
_ROWMAP_FILL = 4096
_MOST_ROWS = 2**31 - 1


class Routing(NamedTuple):
    """What is routed, and how."""

    routing: Array  # int32 or int64 [T, K], or bool [T, E]
    probs: Array | None  # float32 in the shape of routing
    num_tokens: int
    topk: int
    num_experts: int
    alignment: int
    is_mask: bool
    first_duplicate_only: bool

    @property
    def num_slots(self) -> int:
        return self.num_tokens * self.topk


class Maps(NamedTuple):
    """The ten tensors of a plan in its order, and the row map [T, E] if it was asked for."""

    slot_to_row: Any
    token_rows: Any
    row_to_token: Any
    row_to_slot: Any
    row_to_expert: Any
    row_probs: Any  # 0 elements without probabilities
    tokens_per_expert: Any
    expert_offsets: Any
    routed_per_expert: Any
    overflow: Any
    rowmap: Any


def route(device: Device, problem: Routing, num_rows: int | None, *, with_rowmap: bool = False) -> Maps:
    """Make the maps of a plan.

    Args:
        device: where to.
        problem: the routing.
        num_rows: N, or None: the sum of the padded segments, which is read back (the host waits for the device).
        with_rowmap: make Paddle's row map, too.

    Raises:
        ValueError: N would not fit into int32.
    """
    tokens, topk, experts = problem.num_tokens, problem.topk, problem.num_experts
    ids, ids_type = _ids(device, problem)
    dedupe = problem.first_duplicate_only and not problem.is_mask and topk > 1
    experts_of_slots = device.empty([max(problem.num_slots, 1)], "int32")
    starts = device.empty([experts + 1], "int64")
    sizes = [device.empty(shape, "int32") for shape in ([experts], [experts + 1], [experts], [1])]
    rowmap = device.empty([tokens, experts], "int32") if with_rowmap else None
    rowmap_size = tokens * experts if with_rowmap else 0
    bins = min(max(next_power_of_2(experts), 32), _MOST_BINS)
    few = problem.num_slots <= ONE_PROGRAM and rowmap_size <= _ONE_PROGRAM_ROWMAP
    few_experts = next_power_of_2(experts) if experts <= _FEW_EXPERTS else 0
    flags = (problem.probs is not None, problem.is_mask, with_rowmap)
    if few and num_rows is not None and num_rows <= _ONE_PROGRAM_ROWS:
        maps = _empty_maps(device, problem, num_rows)
        tile = max(next_power_of_2(problem.num_slots), _STEP)
        device.launch(
            route_kernel,
            1,
            (ids_type, "*i32", "*i32", "*i64", *["*i32"] * 11, *["i32"] * 3, *["i64"] * 3),
            (
                *map(address, (ids, problem.probs, experts_of_slots, starts, *maps, *sizes, rowmap)),
                *(problem.num_slots, experts, topk, rowmap_size, problem.alignment, num_rows),
            ),
            (dedupe, *flags, bins, tile, _STEP, few_experts, _FILL),
            4,
        )
        return Maps._make([*maps, *sizes, rowmap])

    tiles = blocks(problem.num_slots, _TILE)
    before = device.empty([max(tiles, 1), experts], "int32")
    totals = device.empty([experts], "int32")
    programs = tiles + blocks(rowmap_size, _ROWMAP_FILL)
    if programs:
        device.launch(
            count_kernel,
            programs,
            (ids_type, "*i32", "*i32", "*i32:16", *["i32"] * 4, "i64"),
            (
                *map(address, (ids, experts_of_slots, before, rowmap)),
                *(problem.num_slots, experts, tiles, topk, rowmap_size),
            ),
            (dedupe, bins, _TILE, _ROWMAP_FILL),
            4,
        )
    width = 8 if experts <= 1024 else 32
    device.launch(
        prefix_kernel,
        blocks(experts, width),
        ("*i32", "*i32", "i32", "i32"),
        (address(before), address(totals), tiles, experts),
        (min(max(next_power_of_2(tiles), 16), 8192 // width), width),
        4 if tiles <= 256 else 8,
    )
    device.launch(
        offsets_kernel,
        1,
        ("*i32", "*i64", *["*i32"] * 4, "i32", "i64", "i64"),
        (
            *map(address, (totals, starts, *sizes)),
            *(experts, problem.alignment, _MOST_ROWS if num_rows is None else num_rows),
        ),
        (bins,),
        4,
    )
    if num_rows is None:
        num_rows = device.read_int(starts, experts)
        if num_rows > _MOST_ROWS:
            raise ValueError("the permuted buffer must have fewer than 2^31 rows")
    maps = _empty_maps(device, problem, num_rows)
    programs = tiles + blocks(num_rows, _FILL)
    if programs:
        device.launch(
            maps_kernel,
            programs,
            ("*i32", "*i32", "*i64", *["*i32"] * 9, *["i32"] * 4, "i64"),
            (
                *map(address, (experts_of_slots, before, starts, sizes[2], problem.probs, *maps, rowmap)),
                *(problem.num_slots, experts, tiles, topk, num_rows),
            ),
            (*flags, _TILE, _STEP, few_experts, _FILL),
            4,
        )
    return Maps._make([*maps, *sizes, rowmap])


def _ids(device: Device, problem: Routing) -> tuple[Any, str]:
    """The ids and the type of their pointer; those of a mask are made here."""
    if not problem.is_mask:
        return problem.routing, "*i64" if device.dtype_name(problem.routing) == "int64" else "*i32"
    ids = device.empty([problem.num_tokens, problem.topk], "int32")
    if problem.num_tokens:
        device.launch(
            mask_to_ids_kernel,
            problem.num_tokens,
            ("*i8", "*i32", "i32", "i32", "i32"),
            (address(problem.routing), address(ids), problem.num_tokens, problem.num_experts, problem.topk),
            (min(max(next_power_of_2(problem.num_experts), 32), _MOST_BINS),),
            1,
        )
    return ids, "*i32"


def _empty_maps(device: Device, problem: Routing, num_rows: int) -> list[Any]:
    """slot_to_row, token_rows and the four maps by row."""
    by_slot = [device.empty([problem.num_tokens, problem.topk], "int32") for _ in range(2)]
    by_row = [device.empty([num_rows], "int32") for _ in range(3)]
    return [*by_slot, *by_row, device.empty([0 if problem.probs is None else num_rows], "float32")]
