# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routing: launches that compute the maps of a plan; `route_kernels` describes the kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..launch.device import MAX_CACHED_CALLS, Array, Device, addresses, cdiv, next_power_of_2
from .route_kernels import count_kernel, maps_kernel, mask_to_ids_kernel, offsets_kernel, prefix_kernel, route_kernel

__all__ = ["ONE_PROGRAM", "Maps", "Routing", "route"]

# Limits up to which one program in one launch computes all maps.
ONE_PROGRAM = 256  # slots
_ONE_PROGRAM_ROWS = 8192
_ONE_PROGRAM_ROWMAP = 65536
_TILE = 256
_STEP = 32
_MAX_BINS = 1024
_FEW_EXPERTS = 32
_FILL = 1024
_ROWMAP_FILL = 4096
_MAX_ROWS = 2**31 - 1


class Routing(NamedTuple):
    """The routing of a call and its options."""

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
    """The ten tensors of a plan in its order, and the row map [T, E] if it is wanted."""

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


class _Part(NamedTuple):
    """A launch without its arrays."""

    programs: int
    types: tuple[str, ...]
    sizes: tuple[int, ...]
    constants: tuple
    warps: int


class _Call(NamedTuple):
    """Launches and workspace of a routing; a function of its sizes."""

    in_one_program: bool  # unless there are too many rows, whose number may not be known yet
    one: _Part  # route_kernel; `route` appends the number of rows to the sizes
    counting: _Part
    prefix: _Part
    offsets: _Part
    maps: _Part
    # Workspace: int64 [E + 1] starts, int32 [T K] experts of slots; unless in one program also int32 [tiles, E] counts
    # before a tile and int32 [E] totals.
    experts_at: int
    before_at: int
    totals_at: int
    workspace: int  # of one program, in int64 elements
    whole_workspace: int


@functools.lru_cache(MAX_CACHED_CALLS)
def _call(
    ids_type: str, tokens: int, topk: int, experts: int, alignment: int, dedupe: bool, flags: tuple[bool, bool, bool]
) -> _Call:
    """``flags``: whether there are probabilities, a mask, and a row map to write."""
    slots, rowmap_size = tokens * topk, tokens * experts if flags[2] else 0
    bins = min(max(next_power_of_2(experts), 32), _MAX_BINS)
    few_experts = next_power_of_2(experts) if experts <= _FEW_EXPERTS else 0
    tiles, width = cdiv(slots, _TILE), 8 if experts <= 1024 else 32
    in_one_program = slots <= ONE_PROGRAM and rowmap_size <= _ONE_PROGRAM_ROWMAP
    tile = max(next_power_of_2(slots), _STEP) if in_one_program else 0
    experts_at = 8 * (experts + 1)
    before_at = experts_at + 4 * slots
    totals_at = before_at + 4 * tiles * experts
    return _Call(
        in_one_program,
        _Part(
            1,
            (ids_type, "*i32", "*i32", "*i64", *["*i32"] * 11, *["i32"] * 3, *["i64"] * 3),
            (slots, experts, topk, rowmap_size, alignment),
            (dedupe, *flags, bins, tile, _STEP, few_experts, _FILL),
            4,
        ),
        _Part(
            tiles + cdiv(rowmap_size, _ROWMAP_FILL),
            (ids_type, "*i32", "*i32", "*i32:16", *["i32"] * 4, "i64"),
            (slots, experts, tiles, topk, rowmap_size),
            (dedupe, bins, _TILE, _ROWMAP_FILL),
            4,
        ),
        _Part(
            cdiv(experts, width),
            ("*i32", "*i32", "i32", "i32"),
            (tiles, experts),
            (min(max(next_power_of_2(tiles), 16), 8192 // width), width),
            4 if tiles <= 256 else 8,
        ),
        _Part(1, ("*i32", "*i64", *["*i32"] * 4, "i32", "i64", "i64"), (experts, alignment), (bins,), 4),
        _Part(
            tiles,
            ("*i32", "*i32", "*i64", *["*i32"] * 9, *["i32"] * 4, "i64"),
            (slots, experts, tiles, topk),
            (*flags, _TILE, _STEP, few_experts, _FILL),
            4,
        ),
        experts_at,
        before_at,
        totals_at,
        cdiv(before_at, 8),
        cdiv(totals_at + 4 * experts, 8),
    )


def route(device: Device, problem: Routing, num_rows: int | None, *, with_rowmap: bool = False) -> Maps:
    """Compute the maps of a plan.

    Args:
        device: allocates and launches.
        problem: the routing.
        num_rows: N, or None: the sum of the padded segments, read back from the device (the host waits for it).
        with_rowmap: compute Paddle's row map, too.

    Raises:
        ValueError: N would not fit into int32.
    """
    tokens, topk, experts = problem.num_tokens, problem.topk, problem.num_experts
    ids, ids_type = _ids(device, problem)
    dedupe = problem.first_duplicate_only and not problem.is_mask and topk > 1
    flags = problem.probs is not None, problem.is_mask, with_rowmap
    call = _call(ids_type, tokens, topk, experts, problem.alignment, dedupe, flags)
    sizes = [device.empty(shape, "int32") for shape in ([experts], [experts + 1], [experts], [])]
    rowmap = device.empty([tokens, experts], "int32") if with_rowmap else None
    if call.in_one_program and num_rows is not None and num_rows <= _ONE_PROGRAM_ROWS:
        workspace = device.empty([call.workspace], "int64")  # alive until after the launch
        starts = workspace.data_ptr()
        experts_of_slots = starts + call.experts_at
        maps = _empty_maps(device, problem, num_rows)
        arrays = *addresses(ids, problem.probs), experts_of_slots, starts, *addresses(*maps, *sizes, rowmap)
        _launch(device, route_kernel, call.one, *arrays, num_rows=num_rows)
        return Maps._make([*maps, *sizes, rowmap])

    workspace = device.empty([call.whole_workspace], "int64")
    starts = workspace.data_ptr()
    experts_of_slots, before, totals = (starts + at for at in (call.experts_at, call.before_at, call.totals_at))
    if call.counting.programs:
        _launch(device, count_kernel, call.counting, *addresses(ids), experts_of_slots, before, *addresses(rowmap))
    _launch(device, prefix_kernel, call.prefix, before, totals)
    limit = _MAX_ROWS if num_rows is None else num_rows
    _launch(device, offsets_kernel, call.offsets, totals, starts, *addresses(*sizes), num_rows=limit)
    if num_rows is None:
        num_rows = device.read_int(workspace, experts)
        if num_rows > _MAX_ROWS:
            raise ValueError(
                "padding_alignment must give a buffer of fewer than 2^31 rows, "
                f"but {problem.alignment} gives {num_rows}"
            )
    maps = _empty_maps(device, problem, num_rows)
    part = call.maps._replace(programs=call.maps.programs + cdiv(num_rows, _FILL))
    if part.programs:
        by_row = addresses(sizes[2], problem.probs, *maps, rowmap)
        _launch(device, maps_kernel, part, experts_of_slots, before, starts, *by_row, num_rows=num_rows)
    return Maps._make([*maps, *sizes, rowmap])


def _launch(device: Device, kernel: Any, part: _Part, *arrays: int, num_rows: int | None = None) -> None:
    last = () if num_rows is None else (num_rows,)
    device.launch(kernel, part.programs, part.types, (*arrays, *part.sizes, *last), part.constants, part.warps)


def _ids(device: Device, problem: Routing) -> tuple[Any, str]:
    """The ids and their pointer type; a mask is converted to ids by a launch."""
    if not problem.is_mask:
        return problem.routing, "*i64" if device.dtype_name(problem.routing) == "int64" else "*i32"
    ids = device.empty([problem.num_tokens, problem.topk], "int32")
    if problem.num_tokens:
        device.launch(
            mask_to_ids_kernel,
            problem.num_tokens,
            ("*i8", "*i32", "i32", "i32", "i32"),
            (*addresses(problem.routing, ids), problem.num_tokens, problem.num_experts, problem.topk),
            (min(max(next_power_of_2(problem.num_experts), 32), _MAX_BINS),),
            1,
        )
    return ids, "*i32"


def _empty_maps(device: Device, problem: Routing, num_rows: int) -> list[Any]:
    """slot_to_row, token_rows and the four maps by row."""
    by_slot = [device.empty([problem.num_tokens, problem.topk], "int32") for _ in range(2)]
    by_row = [device.empty([num_rows], "int32") for _ in range(3)]
    return [*by_slot, *by_row, device.empty([0 if problem.probs is None else num_rows], "float32")]
