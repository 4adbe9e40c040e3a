# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""Grouped wgrad: the gradient of each expert's matrix, a GEMM whose K dimension is the expert's rows.

    out[e] = sum over the rows r of expert e of p[r]^T q[r]         [P, Q]; ACCUMULATE: added to out[e]

Layout: p [M, P] and q [M, Q], any row stride; one of them may be tokens that the kernel gathers. out [E, P, Q], dtype
of p or float32, or a chunk of larger matrices. Accumulators are float32 and rounded once.

Mapping: persistent programs over a flat list of tiles BLOCK_P x BLOCK_Q, expert by expert, swizzled as in `kernels`.
One program accumulates a tile over all rows of the expert, BLOCK_R per step, in ascending order: no split-K, no
atomics. Experts without rows get zeros.

Overlap: loads are software-pipelined NUM_STAGES deep. With USE_TMA one flat loop covers the steps of all tiles of a
program, so the first loads of a tile are in flight during the epilogue of the previous one.

Bytes moved, at least: each operand and each result once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch.device import ITEM_BYTES, Array, Device, address, cdiv
from .configs import GemmConfig
from .gpu_facts import gpu_at
from .kernels import load_tokens, swizzle
from .operands import POINTERS, descriptor_memory, suits_tma, vector_of
from .schedule import experts_per_block
from .types import Rows, Schedule

__all__ = ["launch_wgrad", "wgrad_kernel"]


@triton.jit
def _load_rows(
    source,
    row_to_token,
    num_sources,
    rows,
    in_group,
    columns,
    width,
    stride,
    GATHER: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load a tile of rows through pointers; rows outside the group are 0."""
    if GATHER:
        places, valid = load_tokens(row_to_token, rows, in_group, num_sources)
    else:
        places, valid = rows, in_group
    pointers = source + places.to(tl.int64)[:, None] * stride + columns[None, :]
    if EVEN:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=valid[:, None] & (columns < width)[None, :], other=0.0)


# Row coordinates of a ragged descriptor: 2**30 times 2**34 elements of 2 bytes is 0 modulo 2**64.
_WRAP = tl.constexpr(2**30)
_WRAP_STRIDE = tl.constexpr(2**34)


@triton.jit
def _ragged_descriptor(rows, num_rows, width, stride, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr):
    """Ragged TMA descriptor of [num_rows, width] for `_load_ragged`: a block ends at the group's last row.

    Rows have three coordinates: (_WRAP, y, x) is row y + x - _WRAP, and x ends at _WRAP, so y selects the last row. The
    first coordinate subtracts _WRAP rows from the address, which wraps around. Two coordinates and a descriptor that
    begins before the rows would do, but a GPU may read at the start of a descriptor even if no element of a block is in
    bounds, and memory before the rows may be unmapped. For the same reason no coordinate has more extent than is used.
    """
    return tl.make_tensor_descriptor(
        rows,
        [_WRAP + 1, num_rows + 1, _WRAP, width],
        [-stride.to(tl.int64) + _WRAP_STRIDE, stride, stride, 1],
        [1, 1, BLOCK_R, BLOCK],
    )


@triton.jit
def _load_ragged(desc, row, group_end, column):
    """Load rows from ``row`` on, zeros from row ``group_end`` on."""
    tile = desc.load([_WRAP, group_end, row - group_end + _WRAP, column])
    return tile.reshape(tile.shape[2], tile.shape[3])


@triton.jit
def _num_steps(group_starts, group_ends, tiles_per_expert, num_experts, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):
    """Steps of all tiles of this program; at least one per tile, which stores zeros."""
    steps, programs = 0, tl.num_programs(0)
    for chunk in range(0, num_experts, BLOCK_E):
        expert = chunk + tl.arange(0, BLOCK_E)
        inside = expert < num_experts
        rows = tl.load(group_ends + expert, mask=inside, other=0) - tl.load(group_starts + expert, mask=inside, other=0)
        before = (expert * tiles_per_expert - tl.program_id(0) + programs - 1) // programs
        after = ((expert + 1) * tiles_per_expert - tl.program_id(0) + programs - 1) // programs
        steps_per_tile = tl.maximum((rows + BLOCK_R - 1) // BLOCK_R, 1)
        steps += tl.sum(tl.where(inside, (after - before) * steps_per_tile, 0), axis=0)
    return steps


@triton.jit
def wgrad_kernel(
    p,
    q,
    row_to_token,
    out,
    group_starts,
    group_ends,
    num_experts,
    num_rows,
    num_sources,
    p_vectors,
    q_vectors,
    p_stride_vectors,
    q_stride_vectors,
    out_matrix_vectors,
    out_stride_vectors,
    VECTOR: tl.constexpr,
    GATHER_P: tl.constexpr,
    GATHER_Q: tl.constexpr,
    USE_TMA: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    EVEN_P: tl.constexpr,
    EVEN_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A persistent loop over tiles of [E, P, Q]; ``out`` may be a chunk of larger matrices.

    ACCUMULATE adds the float32 accumulators to ``out`` and rounds once. GATHER_P or GATHER_Q: row r of the operand is
    row_to_token[r] of the tokens. With USE_TMA, and then without gathers, ragged descriptors load zeros after the rows
    of an expert, and descriptors store tiles, so no mask is needed.
    """
    p_width, q_width = p_vectors * VECTOR, q_vectors * VECTOR
    p_stride, q_stride = p_stride_vectors * VECTOR, q_stride_vectors * VECTOR
    matrix, out_stride = out_matrix_vectors * VECTOR, out_stride_vectors * VECTOR
    # A float32 tile does not fit into shared memory next to the operand stages, so pointers store it.
    BY_POINTERS: tl.constexpr = ACCUMULATE or out.dtype.element_ty == tl.float32
    tiles_p, tiles_q = (p_width + BLOCK_P - 1) // BLOCK_P, (q_width + BLOCK_Q - 1) // BLOCK_Q
    tiles_per_expert = tiles_p * tiles_q
    if USE_TMA:
        p_desc = _ragged_descriptor(p, num_rows, p_width, p_stride, BLOCK_R, BLOCK_P)
        q_desc = _ragged_descriptor(q, num_rows, q_width, q_stride, BLOCK_R, BLOCK_Q)
        if not BY_POINTERS:
            out_desc = tl.make_tensor_descriptor(
                out, [num_experts, p_width, q_width], [matrix, out_stride, 1], [1, BLOCK_P, BLOCK_Q]
            )
        steps = _num_steps(group_starts, group_ends, tiles_per_expert, num_experts, BLOCK_R, BLOCK_E)
        tile = tl.program_id(0) - tl.num_programs(0)
        expert, row_start, group_end, p_start, q_start = 0, 0, 0, 0, 0
        acc = tl.zeros([BLOCK_P, BLOCK_Q], tl.float32)
        for _ in tl.range(0, steps, num_stages=NUM_STAGES):
            row_start += BLOCK_R
            if row_start >= group_end:
                tile += tl.num_programs(0)
                expert = tile // tiles_per_expert
                row_start, group_end = tl.load(group_starts + expert), tl.load(group_ends + expert)
                tile_p, tile_q = swizzle(tile - expert * tiles_per_expert, tiles_p, tiles_q, GROUP_M)
                p_start, q_start = tile_p * BLOCK_P, tile_q * BLOCK_Q
            p_tile = _load_ragged(p_desc, row_start, group_end, p_start)
            q_tile = _load_ragged(q_desc, row_start, group_end, q_start)
            acc = tl.dot(p_tile.T, q_tile, acc)
            if row_start + BLOCK_R >= group_end:
                if BY_POINTERS:
                    out_matrix = out + expert * matrix
                    _store_subtiles(
                        acc, out_matrix, p_start, q_start, p_width, q_width, out_stride, BLOCK_P, BLOCK_Q, ACCUMULATE
                    )
                else:
                    out_desc.store([expert, p_start, q_start], acc.to(out_desc.dtype).reshape(1, BLOCK_P, BLOCK_Q))
                acc = tl.zeros([BLOCK_P, BLOCK_Q], tl.float32)
    else:
        for tile in tl.range(tl.program_id(0), num_experts * tiles_per_expert, tl.num_programs(0)):
            expert = tile // tiles_per_expert
            tile_p, tile_q = swizzle(tile - expert * tiles_per_expert, tiles_p, tiles_q, GROUP_M)
            p_columns = tile_p * BLOCK_P + tl.arange(0, BLOCK_P)
            q_columns = tile_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
            group_end = tl.load(group_ends + expert)
            acc = tl.zeros([BLOCK_P, BLOCK_Q], tl.float32)
            for row_start in tl.range(tl.load(group_starts + expert), group_end, BLOCK_R, num_stages=NUM_STAGES):
                rows = row_start + tl.arange(0, BLOCK_R)
                in_group = rows < group_end
                p_tile = _load_rows(
                    p, row_to_token, num_sources, rows, in_group, p_columns, p_width, p_stride, GATHER_P, EVEN_P
                )
                q_tile = _load_rows(
                    q, row_to_token, num_sources, rows, in_group, q_columns, q_width, q_stride, GATHER_Q, EVEN_Q
                )
                acc = tl.dot(p_tile.T, q_tile, acc)
            out_offsets = expert.to(tl.int64) * matrix + p_columns[:, None] * out_stride + q_columns[None, :]
            inside = (p_columns < p_width)[:, None] & (q_columns < q_width)[None, :]
            if ACCUMULATE:
                acc += tl.load(out + out_offsets, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + out_offsets, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_subtiles(
    acc,
    out_matrix,
    p_start,
    q_start,
    p_width,
    q_width,
    stride,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Store or accumulate a tile in column subtiles: pointers for all columns would exceed the registers."""
    if BLOCK_Q > 64:
        left, right = acc.reshape(BLOCK_P, 2, BLOCK_Q // 2).permute(0, 2, 1).split()
        half: tl.constexpr = BLOCK_Q // 2
        _store_subtiles(left, out_matrix, p_start, q_start, p_width, q_width, stride, BLOCK_P, half, ACCUMULATE)
        _store_subtiles(right, out_matrix, p_start, q_start + half, p_width, q_width, stride, BLOCK_P, half, ACCUMULATE)
    else:
        p_columns, q_columns = p_start + tl.arange(0, BLOCK_P), q_start + tl.arange(0, BLOCK_Q)
        out_offsets = out_matrix + p_columns.to(tl.int64)[:, None] * stride + q_columns[None, :]
        inside = (p_columns < p_width)[:, None] & (q_columns < q_width)[None, :]
        if ACCUMULATE:
            acc += tl.load(out_offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_offsets, acc.to(out_matrix.dtype.element_ty), mask=inside)


def launch_wgrad(
    device: Device,
    p: Rows,
    q: Rows,
    tables: Schedule,
    config: GemmConfig,
    num_rows: int,
    out: Array,
    *,
    origin: tuple[int, int] = (0, 0),
    gathered: tuple[Array, bool] | None = None,
    accumulate: bool = False,
) -> None:
    """out[e, i : i + P, j : j + Q] = p^T q of each expert's rows, or added to it.

    Args:
        device: allocates and launches.
        p: [M, P].
        q: [M, Q].
        tables: `schedule` for any tile height.
        config: tile sizes.
        num_rows: M.
        out: [E, ...], dtype of ``p`` or float32.
        origin: i and j; multiples of 8.
        gathered: row_to_token, and whether q is the tokens (otherwise p); None: neither.
        accumulate: whether to add to ``out``.
    """
    dtype, out_dtype = device.dtype_name(p.array), device.dtype_name(out)
    item = ITEM_BYTES[dtype]
    experts, _, out_stride = out.shape
    vector = vector_of(item, p, q, out)
    use_tma = suits_tma(config, vector) and num_rows > 0 and gathered is None
    row_to_token, q_gathered = gathered or (None, False)
    chunk_offset = (origin[0] * out_stride + origin[1]) * ITEM_BYTES[out_dtype]
    aligned = ":16" if vector > 1 else ""
    pointer = POINTERS[dtype] + aligned
    sources = (q if q_gathered else p).height
    num_tiles = experts * cdiv(p.width, config.block_m) * cdiv(q.width, config.block_n)
    with descriptor_memory(device, use_tma):
        device.launch(
            wgrad_kernel,
            config.grid(gpu_at(address(out)), num_tiles),
            (pointer, pointer, "*i32", POINTERS[out_dtype] + aligned, "*i32", "*i32", *["i32"] * 5, *["i64"] * 4),
            (
                *(p.address(item), q.address(item), address(row_to_token), address(out) + chunk_offset),
                *(address(tables.group_starts), address(tables.group_ends)),
                *(experts, num_rows, sources, p.width // vector, q.width // vector),
                *(p.stride // vector, q.stride // vector, out.shape[1] * out_stride // vector, out_stride // vector),
            ),
            (
                *(vector, gathered is not None and not q_gathered, q_gathered, use_tma, accumulate),
                *(use_tma or p.width % config.block_m == 0, use_tma or q.width % config.block_n == 0),
                # Gathered loads wait for their indices, which occupy every other stage.
                *(config.block_m, config.block_n, config.block_k, config.group_m),
                config.num_stages if gathered is None else 2 * config.num_stages - 1,
                experts_per_block(experts),
            ),
            config.num_warps,
        )
