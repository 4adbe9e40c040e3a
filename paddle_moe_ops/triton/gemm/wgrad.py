# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""The kernel of the gradients of experts' matrices: each the sum of outer products over the expert's own rows.

Programs make tiles of BLOCK_P x BLOCK_Q, as `grouped_gemm_kernels` says it of all products, and read its tables
``first`` and ``stop``. Moved from memory, at least: each operand and each result once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch.device import ITEM_BYTES, Array, Device, address, blocks
from .configs import GemmConfig
from .gpu_facts import gpu_at
from .kernels import in_bands, tokens_of
from .operands import POINTERS, descriptor_memory, suits_tma, vector_of
from .schedule import experts_at_once
from .types import Rows, Schedule

__all__ = ["weight_gradient", "weight_gradient_kernel"]


@triton.jit
def _rows_through_pointers(
    source,
    row_to_token,
    num_sources,
    rows,
    live,
    columns,
    width,
    stride,
    GATHER: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Blocks of rows, 0 where they do not live."""
    if GATHER:
        places, found = tokens_of(row_to_token, rows, live, num_sources)
    else:
        places, found = rows, live
    here = source + places.to(tl.int64)[:, None] * stride + columns[None, :]
    if EVEN:
        return tl.load(here, mask=found[:, None], other=0.0)
    else:
        return tl.load(here, mask=found[:, None] & (columns < width)[None, :], other=0.0)


# Coordinates of rows in a descriptor; 2**30 times 2**34 elements of 2 bytes is 0 in the 64 bits of an address.
_AROUND = tl.constexpr(2**30)
_AROUND_STRIDE = tl.constexpr(2**34)


@triton.jit
def _blocks_of_groups(rows, num_rows, width, stride, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr):
    """A descriptor of [num_rows, width] for `_block_of_group`.

    Rows have three coordinates: (_AROUND, y, x) is row y + x - _AROUND, and x ends at _AROUND, so y says which row that
    is. The first one takes _AROUND rows away from the address, which wraps around. Two coordinates would do in a
    descriptor that begins before the rows, but a GPU may read where a descriptor begins even if nothing of a block is
    inside, and there may be no memory before the rows. No coordinate has room for more than is used: same reason.
    """
    return tl.make_tensor_descriptor(
        rows,
        [_AROUND + 1, num_rows + 1, _AROUND, width],
        [-stride.to(tl.int64) + _AROUND_STRIDE, stride, stride, 1],
        [1, 1, BLOCK_R, BLOCK],
    )


@triton.jit
def _block_of_group(blocks, row, end, column):
    """Rows from ``row`` on, zeros from row ``end`` on."""
    block = blocks.load([_AROUND, end, row - end + _AROUND, column])
    return block.reshape(block.shape[2], block.shape[3])


@triton.jit
def _steps_of_program(first, stop, tiles_of_expert, num_experts, BLOCK_R: tl.constexpr, EXPERTS: tl.constexpr):
    """Blocks of rows in all tiles of this program; one at least in each, for zeros."""
    steps, programs = 0, tl.num_programs(0)
    for chunk in range(0, num_experts, EXPERTS):
        expert = chunk + tl.arange(0, EXPERTS)
        inside = expert < num_experts
        rows = tl.load(stop + expert, mask=inside, other=0) - tl.load(first + expert, mask=inside, other=0)
        before = (expert * tiles_of_expert - tl.program_id(0) + programs - 1) // programs
        after = ((expert + 1) * tiles_of_expert - tl.program_id(0) + programs - 1) // programs
        blocks = tl.maximum((rows + BLOCK_R - 1) // BLOCK_R, 1)
        steps += tl.sum(tl.where(inside, (after - before) * blocks, 0), axis=0)
    return steps


@triton.jit
def weight_gradient_kernel(
    p,
    q,
    row_to_token,
    out,
    first,
    stop,
    num_experts,
    num_rows,
    num_sources,
    p_groups,
    q_groups,
    p_stride_groups,
    q_stride_groups,
    out_matrix_groups,
    out_stride_groups,
    VECTOR: tl.constexpr,
    GATHER_P: tl.constexpr,
    GATHER_Q: tl.constexpr,
    USE_TMA: tl.constexpr,
    ADDS: tl.constexpr,
    EVEN_P: tl.constexpr,
    EVEN_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """out[e] = sum over the rows r of expert e of p[r]^T q[r]; [M, P] and [M, Q] give [E, P, Q].

    ``out`` may be a window of larger matrices. ADDS: the sums are added to it, in float32 and rounded once. The rows of
    p (GATHER_P) or q (GATHER_Q) may be those of tokens. With USE_TMA, and then without gathers, what lies after the
    rows of an expert comes as zeros, without masks, and tiles are stored by descriptors, which end with a matrix. One
    loop over the blocks of all tiles: the first blocks of a tile are on their way before the last one is stored.
    """
    p_width, q_width = p_groups * VECTOR, q_groups * VECTOR
    p_stride, q_stride = p_stride_groups * VECTOR, q_stride_groups * VECTOR
    matrix, out_stride = out_matrix_groups * VECTOR, out_stride_groups * VECTOR
    # A tile of float32 has no room beside the operands.
    IN_PIECES: tl.constexpr = ADDS or out.dtype.element_ty == tl.float32
    tiles_p, tiles_q = (p_width + BLOCK_P - 1) // BLOCK_P, (q_width + BLOCK_Q - 1) // BLOCK_Q
    tiles_of_expert = tiles_p * tiles_q
    if USE_TMA:
        p_blocks = _blocks_of_groups(p, num_rows, p_width, p_stride, BLOCK_R, BLOCK_P)
        q_blocks = _blocks_of_groups(q, num_rows, q_width, q_stride, BLOCK_R, BLOCK_Q)
        if not IN_PIECES:
            results = tl.make_tensor_descriptor(
                out, [num_experts, p_width, q_width], [matrix, out_stride, 1], [1, BLOCK_P, BLOCK_Q]
            )
        steps = _steps_of_program(first, stop, tiles_of_expert, num_experts, BLOCK_R, EXPERTS)
        tile = tl.program_id(0) - tl.num_programs(0)
        expert, here, end, place_p, place_q = 0, 0, 0, 0, 0
        acc = tl.zeros([BLOCK_P, BLOCK_Q], tl.float32)
        for _ in tl.range(0, steps, num_stages=STAGES):
            here += BLOCK_R
            if here >= end:
                tile += tl.num_programs(0)
                expert = tile // tiles_of_expert
                here, end = tl.load(first + expert), tl.load(stop + expert)
                tile_p, tile_q = in_bands(tile - expert * tiles_of_expert, tiles_p, tiles_q, GROUP)
                place_p, place_q = tile_p * BLOCK_P, tile_q * BLOCK_Q
            p_block = _block_of_group(p_blocks, here, end, place_p)
            q_block = _block_of_group(q_blocks, here, end, place_q)
            acc = tl.dot(p_block.T, q_block, acc)
            if here + BLOCK_R >= end:
                if IN_PIECES:
                    origin = out + expert * matrix
                    _store_pieces(acc, origin, place_p, place_q, p_width, q_width, out_stride, BLOCK_P, BLOCK_Q, ADDS)
                else:
                    results.store([expert, place_p, place_q], acc.to(results.dtype).reshape(1, BLOCK_P, BLOCK_Q))
                acc = tl.zeros([BLOCK_P, BLOCK_Q], tl.float32)
    else:
        for tile in tl.range(tl.program_id(0), num_experts * tiles_of_expert, tl.num_programs(0)):
            expert = tile // tiles_of_expert
            tile_p, tile_q = in_bands(tile - expert * tiles_of_expert, tiles_p, tiles_q, GROUP)
            p_columns = tile_p * BLOCK_P + tl.arange(0, BLOCK_P)
            q_columns = tile_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
            end = tl.load(stop + expert)
            acc = tl.zeros([BLOCK_P, BLOCK_Q], tl.float32)
            for here in tl.range(tl.load(first + expert), end, BLOCK_R, num_stages=STAGES):
                rows = here + tl.arange(0, BLOCK_R)
                live = rows < end
                p_block = _rows_through_pointers(
                    p, row_to_token, num_sources, rows, live, p_columns, p_width, p_stride, GATHER_P, EVEN_P
                )
                q_block = _rows_through_pointers(
                    q, row_to_token, num_sources, rows, live, q_columns, q_width, q_stride, GATHER_Q, EVEN_Q
                )
                acc = tl.dot(p_block.T, q_block, acc)
            target = expert.to(tl.int64) * matrix + p_columns[:, None] * out_stride + q_columns[None, :]
            inside = (p_columns < p_width)[:, None] & (q_columns < q_width)[None, :]
            if ADDS:
                acc += tl.load(out + target, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + target, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_pieces(
    acc,
    origin,
    place_p,
    place_q,
    p_width,
    q_width,
    stride,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Store a tile, a fraction of its columns at a time, or add it to what is there: all of it has no registers."""
    if BLOCK_Q > 64:
        left, right = acc.reshape(BLOCK_P, 2, BLOCK_Q // 2).permute(0, 2, 1).split()
        half: tl.constexpr = BLOCK_Q // 2
        _store_pieces(left, origin, place_p, place_q, p_width, q_width, stride, BLOCK_P, half, ADDS)
        _store_pieces(right, origin, place_p, place_q + half, p_width, q_width, stride, BLOCK_P, half, ADDS)
    else:
        p_columns, q_columns = place_p + tl.arange(0, BLOCK_P), place_q + tl.arange(0, BLOCK_Q)
        target = origin + p_columns.to(tl.int64)[:, None] * stride + q_columns[None, :]
        inside = (p_columns < p_width)[:, None] & (q_columns < q_width)[None, :]
        if ADDS:
            acc += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, acc.to(origin.dtype.element_ty), mask=inside)


def weight_gradient(
    device: Device,
    p: Rows,
    q: Rows,
    tables: Schedule,
    config: GemmConfig,
    num_rows: int,
    out: Array,
    *,
    window: tuple[int, int] = (0, 0),
    gathered: tuple[Array, bool] | None = None,
    adds: bool = False,
) -> None:
    """out[e, i : i + P, j : j + Q] = p^T q of each expert's rows, or added to it.

    Args:
        device: where to.
        p: [M, P].
        q: [M, Q].
        tables: `schedule` for any tiles.
        config: how it is cut.
        num_rows: M.
        out: [E, ...], dtype of ``p`` or float32.
        window: i and j; multiples of 8.
        gathered: row_to_token and whether q has the rows of tokens, else p has them; None: neither.
        adds: whether to add to what ``out`` holds.
    """
    dtype, out_dtype = device.dtype_name(p.array), device.dtype_name(out)
    item = ITEM_BYTES[dtype]
    experts, _, out_stride = out.shape
    vector = vector_of(item, p, q, out)
    use_tma = suits_tma(config, vector) and num_rows > 0 and gathered is None
    row_to_token, q_gathered = gathered or (None, False)
    place = (window[0] * out_stride + window[1]) * ITEM_BYTES[out_dtype]
    aligned = ":16" if vector > 1 else ""
    pointer = POINTERS[dtype] + aligned
    sources = (q if q_gathered else p).height
    with descriptor_memory(device, use_tma):
        device.launch(
            weight_gradient_kernel,
            config.grid(gpu_at(address(out)), experts * blocks(p.width, config.rows) * blocks(q.width, config.columns)),
            (pointer, pointer, "*i32", POINTERS[out_dtype] + aligned, "*i32", "*i32", *["i32"] * 5, *["i64"] * 4),
            (
                *(p.address(item), q.address(item), address(row_to_token), address(out) + place),
                *(address(tables.first), address(tables.stop)),
                *(experts, num_rows, sources, p.width // vector, q.width // vector),
                *(p.stride // vector, q.stride // vector, out.shape[1] * out_stride // vector, out_stride // vector),
            ),
            (
                *(vector, gathered is not None and not q_gathered, q_gathered, use_tma, adds),
                *(use_tma or p.width % config.rows == 0, use_tma or q.width % config.columns == 0),
                # What is gathered waits for its indices, which take every other stage.
                *(config.rows, config.columns, config.depth, config.band),
                config.stages if gathered is None else 2 * config.stages - 1,
                experts_at_once(experts),
            ),
            config.warps,
        )
