# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""Kernels of the grouped product: a matrix per expert over its own rows, whose numbers only the device knows.

`schedule_kernel` (one program) turns sizes and offsets into three tables, int32:

    first [E + 1]   first row of each group; M
    stop [E]        end of each group
    tiles [E + 1]   tiles of BLOCK_M rows before each expert's; all

An expert's tiles cover its group and the rows of no group after it (the first one's also those in front), so that
every row of the result is written: 0 in rows of no group. Groups that overlap or leave [0, M) are cut.

`product_kernel` makes BLOCK_M x BLOCK_N tiles of the result, `weight_gradient_kernel` BLOCK_P x BLOCK_Q tiles of each
expert's gradient. The programs share the tiles of a flat list: expert by expert, and in bands of GROUP tiles, so that
what is at work at a time reads few rows and columns, from the L2. One program adds up a tile, in ascending order of the
contraction and in float32: the bits do not depend on how many programs there are.

Operands come through descriptors (USE_TMA; addresses and rows must be multiples of 16 bytes) or through pointers, which
can gather rows. Moved from memory, at least: each operand and each result once.
"""

import triton
import triton.language as tl

__all__ = ["product_kernel", "row_sums_kernel", "schedule_kernel", "weight_gradient_kernel"]


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def schedule_kernel(
    sizes,
    offsets,
    first,
    stop,
    tiles,
    num_experts,
    num_rows,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, BLOCK experts at a time."""
    index = tl.arange(0, BLOCK)
    limit = num_rows.to(tl.int64)
    rows_before, end_before = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for chunk in range(0, num_experts, BLOCK):
        expert, inside = chunk + index, chunk + index < num_experts
        size = tl.load(sizes + expert, mask=inside, other=0).to(tl.int64)
        size = tl.minimum(tl.maximum(size, 0), limit)
        if HAS_OFFSETS:
            start = tl.load(offsets + expert, mask=inside, other=0).to(tl.int64)
        else:
            start = rows_before + tl.cumsum(size, axis=0) - size
        start = tl.minimum(tl.maximum(start, 0), limit)
        end = tl.maximum(tl.associative_scan(tl.minimum(start + size, limit), 0, _larger), end_before)
        tl.store(first + expert, start.to(tl.int32), mask=inside)
        tl.store(stop + expert, end.to(tl.int32), mask=inside)
        rows_before += tl.sum(size, axis=0)
        end_before = tl.max(end, axis=0)
    tl.debug_barrier()
    for chunk in range(0, num_experts, BLOCK):  # a group begins where those before it have ended, at the earliest
        expert, inside = chunk + index, chunk + index < num_experts
        earlier = tl.load(stop + expert - 1, mask=inside & (expert > 0), other=0)
        tl.store(first + expert, tl.maximum(tl.load(first + expert, mask=inside, other=0), earlier), mask=inside)
    tl.store(first + num_experts, num_rows)
    tl.debug_barrier()
    before = 0
    for chunk in range(0, num_experts, BLOCK):
        expert, inside = chunk + index, chunk + index < num_experts
        origin = tl.load(first + expert, mask=inside & (expert > 0), other=0)
        count = (tl.load(first + expert + 1, mask=inside, other=0) - origin + (BLOCK_M - 1)) // BLOCK_M
        count = tl.where(inside, count, 0)
        tl.store(tiles + expert, before + tl.cumsum(count, axis=0) - count, mask=inside)
        before += tl.sum(count, axis=0)
    tl.store(tiles + num_experts, before)


@triton.jit
def _ended_before(tiles, tile, chunk, num_experts, BLOCK: tl.constexpr):
    """How many of BLOCK experts have all their tiles of rows before one."""
    expert = chunk + tl.arange(0, BLOCK)
    ends = tl.load(tiles + 1 + expert, mask=expert < num_experts, other=2**31 - 1)
    return tl.sum((ends <= tile).to(tl.int32), axis=0)


@triton.jit
def _expert_of(tiles, tile, num_experts, BLOCK: tl.constexpr, SEVERAL: tl.constexpr):
    """The expert that a tile of rows belongs to; a loop, which costs registers, only where BLOCK are not all."""
    expert = _ended_before(tiles, tile, 0, num_experts, BLOCK)
    if SEVERAL:
        for chunk in range(BLOCK, num_experts, BLOCK):
            expert += _ended_before(tiles, tile, chunk, num_experts, BLOCK)
    return expert


@triton.jit
def _in_bands(tile, height, width, GROUP: tl.constexpr):
    """Row and column of a tile of height x width: in bands of GROUP rows, down each column of a band."""
    band = tile // (GROUP * width)
    rows = tl.minimum(height - band * GROUP, GROUP)
    inside = tile - band * (GROUP * width)
    column = inside // rows
    return band * GROUP + inside - column * rows, column


@triton.jit
def _tokens_of(row_to_token, rows, live, num_tokens):
    """The token of each row, and whether the row lives and has one."""
    token = tl.load(row_to_token + rows, mask=live, other=-1)
    found = (token >= 0) & (token < num_tokens)
    return tl.where(found, token, 0), found


@triton.jit
def product_kernel(
    x,
    w,
    row_to_token,
    weights,
    partner,
    out,
    partial,
    scaled,
    first,
    stop,
    tiles,
    num_experts,
    num_rows,
    num_sources,
    inner_groups,
    outer_groups,
    x_stride_groups,
    partner_stride_groups,
    VECTOR: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PARTNER: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    EVEN_OUTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    EXPERTS: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """out[r] = weights[r] * x[r] W_e^T for the rows r of expert e, or W_e without TRANSPOSE; [M, N], [M, D], [E, N, D].

    GATHER: row r is x[row_to_token[r]], x [num_sources, D]; not with USE_TMA. WEIGHTED: with weights. PARTNER [M, N],
    dtype of x, is the operand whose gradient ``out`` is: partial[r, column tile] is the dot product of its row with the
    unweighted result, and scaled[r] = weights[r] * partner[r], for the gradients of the weights and of W.
    """
    inner, outer = inner_groups * VECTOR, outer_groups * VECTOR
    x_stride = x_stride_groups * VECTOR
    columns_of_tiles = (outer + BLOCK_N - 1) // BLOCK_N
    matrix = inner.to(tl.int64) * outer
    if USE_TMA:
        x_blocks = tl.make_tensor_descriptor(x, [num_rows, inner], [x_stride, 1], [BLOCK_M, BLOCK_K])
        if TRANSPOSE:
            w_blocks = tl.make_tensor_descriptor(w, [num_experts * outer, inner], [inner, 1], [BLOCK_N, BLOCK_K])
        else:
            w_blocks = tl.make_tensor_descriptor(w, [num_experts * inner, outer], [outer, 1], [BLOCK_K, BLOCK_N])
    for tile in tl.range(tl.program_id(0), tl.load(tiles + num_experts) * columns_of_tiles, tl.num_programs(0)):
        expert = _expert_of(tiles, tile // columns_of_tiles, num_experts, EXPERTS, SEVERAL)
        before = tl.load(tiles + expert)
        height = tl.load(tiles + expert + 1) - before
        tile_m, tile_n = _in_bands(tile - before * columns_of_tiles, height, columns_of_tiles, GROUP)
        begin, end, next_begin = tl.load(first + expert), tl.load(stop + expert), tl.load(first + expert + 1)
        origin = tl.where(expert == 0, 0, begin) + tile_m * BLOCK_M
        rows = origin + tl.arange(0, BLOCK_M)
        live = (rows >= begin) & (rows < end)
        if GATHER:
            sources, live = _tokens_of(row_to_token, rows, live, num_sources)
        else:
            sources = tl.minimum(rows, num_rows - 1)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_tile = x + sources.to(tl.int64)[:, None] * x_stride + k[None, :]
        w_matrix = w + expert.to(tl.int64) * matrix
        if TRANSPOSE:
            # Beyond the last column any will do: what comes of it is not stored.
            w_tile = w_matrix + tl.minimum(columns, outer - 1).to(tl.int64)[None, :] * inner + k[:, None]
        else:
            w_tile = w_matrix + k.to(tl.int64)[:, None] * outer + columns[None, :]
        steps = tl.where((origin < end) & (origin + BLOCK_M > begin), (inner + BLOCK_K - 1) // BLOCK_K, 0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            here = step * BLOCK_K
            if USE_TMA:
                x_block = x_blocks.load([origin, here])
            elif EVEN_INNER:
                x_block = tl.load(x_tile + here)
            else:
                x_block = tl.load(x_tile + here, mask=(here + k < inner)[None, :], other=0.0)
            if USE_TMA and TRANSPOSE:
                w_block = w_blocks.load([expert * outer + tile_n * BLOCK_N, here]).T
            elif USE_TMA:
                w_block = w_blocks.load([expert * inner + here, tile_n * BLOCK_N])
            elif TRANSPOSE:
                if EVEN_INNER:
                    w_block = tl.load(w_tile + here)
                else:
                    w_block = tl.load(w_tile + here, mask=(here + k < inner)[:, None], other=0.0)
            else:
                if EVEN_INNER and EVEN_OUTER:
                    w_block = tl.load(w_tile)
                else:
                    inside = (here + k < inner)[:, None] & (columns < outer)[None, :]
                    w_block = tl.load(w_tile, mask=inside, other=0.0)
                w_tile += BLOCK_K * outer.to(tl.int64)
            acc = tl.dot(x_block, w_block, acc)
        acc = tl.where(live[:, None], acc, 0.0)
        target = rows.to(tl.int64)[:, None] * outer + columns[None, :]
        inside = (rows < next_begin)[:, None] & (columns < outer)[None, :]
        if WEIGHTED:
            factor = tl.load(weights + rows, mask=live, other=0.0)[:, None]
        if PARTNER:
            place = rows.to(tl.int64)[:, None] * (partner_stride_groups * VECTOR) + columns[None, :]
            other = tl.load(partner + place, mask=live[:, None] & inside, other=0.0).to(tl.float32)
            sums = tl.sum(acc * tl.where(inside, other, 0.0), axis=1)
            tl.store(partial + rows.to(tl.int64) * columns_of_tiles + tile_n, sums, mask=rows < next_begin)
            tl.store(scaled + target, (other * factor).to(scaled.dtype.element_ty), mask=inside)
        if WEIGHTED:
            acc *= factor
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=inside)


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
        places, found = _tokens_of(row_to_token, rows, live, num_sources)
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
    VECTOR: tl.constexpr,
    GATHER_P: tl.constexpr,
    GATHER_Q: tl.constexpr,
    USE_TMA: tl.constexpr,
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

    The rows of p (GATHER_P) or q (GATHER_Q) may be those of tokens. With USE_TMA, and then without gathers, what lies
    after the rows of an expert comes as zeros, without masks, and tiles are stored by descriptors, which end with a
    matrix. One loop over the blocks of all tiles: the first blocks of a tile are on their way before the last one is
    stored.
    """
    p_width, q_width = p_groups * VECTOR, q_groups * VECTOR
    p_stride, q_stride = p_stride_groups * VECTOR, q_stride_groups * VECTOR
    tiles_p, tiles_q = (p_width + BLOCK_P - 1) // BLOCK_P, (q_width + BLOCK_Q - 1) // BLOCK_Q
    tiles_of_expert = tiles_p * tiles_q
    if USE_TMA:
        p_blocks = _blocks_of_groups(p, num_rows, p_width, p_stride, BLOCK_R, BLOCK_P)
        q_blocks = _blocks_of_groups(q, num_rows, q_width, q_stride, BLOCK_R, BLOCK_Q)
        matrix = p_width.to(tl.int64) * q_width
        results = tl.make_tensor_descriptor(
            out, [num_experts, p_width, q_width], [matrix, q_width.to(tl.int64), 1], [1, BLOCK_P, BLOCK_Q]
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
                tile_p, tile_q = _in_bands(tile - expert * tiles_of_expert, tiles_p, tiles_q, GROUP)
                place_p, place_q = tile_p * BLOCK_P, tile_q * BLOCK_Q
            p_block = _block_of_group(p_blocks, here, end, place_p)
            q_block = _block_of_group(q_blocks, here, end, place_q)
            acc = tl.dot(p_block.T, q_block, acc)
            if here + BLOCK_R >= end:
                results.store([expert, place_p, place_q], acc.to(results.dtype).reshape(1, BLOCK_P, BLOCK_Q))
                acc = tl.zeros([BLOCK_P, BLOCK_Q], tl.float32)
    else:
        for tile in tl.range(tl.program_id(0), num_experts * tiles_of_expert, tl.num_programs(0)):
            expert = tile // tiles_of_expert
            tile_p, tile_q = _in_bands(tile - expert * tiles_of_expert, tiles_p, tiles_q, GROUP)
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
            target = (expert.to(tl.int64) * p_width + p_columns[:, None]) * q_width + q_columns[None, :]
            inside = (p_columns < p_width)[:, None] & (q_columns < q_width)[None, :]
            tl.store(out + target, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_sums_kernel(values, out, num_rows, width, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[r] = sum of values[r, :], float32; BLOCK_ROWS rows per program, BLOCK covers them."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    entries = tl.load(values + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=inside, other=0.0)
    tl.store(out + rows, tl.sum(entries, axis=1), mask=rows < num_rows)
