# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""Kernels of the grouped product: a matrix per expert over its own rows, whose numbers only the device knows.

`schedule_kernel` turns sizes and offsets into tables, int32, for tiles of H rows. A program makes those for one H:

    first [E + 1]   first row of each group; M, or without COVERS_ALL the end of the last group
    stop [E]        end of each group
    tiles [E + 1]   tiles of H rows before each group's; all
    spare [E + 2]   blocks of H rows of no group before those in front of the first group, and before those after
                    the tiles of each; all
    windows [P + 3] tiles that begin before each window of rows; all, 0 and all, as if for one window
    counters [2]    zeros, with which launches that hand out tiles begin and end

A tile ends where the next group begins, so the tiles and the spare blocks cover all rows: 0 in rows of no group.
Without COVERS_ALL, rows after the last group are not touched. Groups that overlap or leave [0, M) are cut.

`product_kernel` makes BLOCK_M x BLOCK_N tiles of the result; `weight_gradient_kernel` is in a file of its own. The
programs share the tiles of a flat list: expert by expert, and in bands of GROUP tiles, so that what is at work at a
time reads few rows and columns, from the L2. One program adds up a tile, in ascending order of the contraction and in
float32: the bits do not depend on how many programs there are, nor on windows.

A launch can be for one window of rows, whose operand then holds the rows of the window (and BLOCK_M - 1 after it, for
the last tile), or for one window of columns, which is all that its result holds. So a matrix of all rows and columns
need not exist.

Operands come through descriptors (USE_TMA; addresses and rows must be multiples of 16 bytes) or through pointers, which
can gather rows. Moved from memory, at least: each operand and each result once.
"""

import triton
import triton.language as tl

from .swiglu import swiglu

__all__ = ["in_bands", "product_kernel", "tokens_of"]


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
def in_bands(tile, height, width, GROUP: tl.constexpr):
    """Row and column of a tile of height x width: in bands of GROUP rows, down each column of a band."""
    band = tile // (GROUP * width)
    rows = tl.minimum(height - band * GROUP, GROUP)
    inside = tile - band * (GROUP * width)
    column = inside // rows
    return band * GROUP + inside - column * rows, column


@triton.jit
def tokens_of(row_to_token, rows, live, num_tokens):
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
    bias,
    partner,
    out,
    hidden,
    partial,
    scaled,
    first,
    stop,
    tiles,
    spare,
    window,
    num_experts,
    num_sources,
    inner_groups,
    outer_groups,
    width_groups,
    first_column,
    first_row,
    part,
    parts,
    x_stride_groups,
    partner_stride_groups,
    VECTOR: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    PARTNER: tl.constexpr,
    GATED: tl.constexpr,
    KEEPS_HIDDEN: tl.constexpr,
    FLAT: tl.constexpr,
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

    ``window`` has the first and the end of the tiles to make; x [num_sources, D] begins with row ``first_row``, and out
    has the ``width`` columns from ``first_column`` on. Of the spare blocks it takes every one of ``parts``.

    GATHER: row r is x[row_to_token[r]], through pointers. WEIGHTED: with weights. BIASED: bias [E, N], dtype of x, is
    added before that; not with PARTNER or GATED. PARTNER [M, N], dtype of x, is the
    operand whose gradient ``out`` is: partial[r, column tile] is the dot product of its row with the unweighted result,
    and scaled[r] = weights[r] * partner[r], for the gradients of the weights and of W. GATED: out [M, N / 2] is
    `swiglu` of the two halves of the columns, each rounded to the dtype of x; ``hidden`` [M, N] takes the halves
    themselves with KEEPS_HIDDEN. A program has both halves of a tile at once. FLAT, where both operands come through
    descriptors: one loop over the blocks of all tiles of a program, in which the first blocks of a tile are on their
    way before the last one is stored.
    """
    inner, outer, width = inner_groups * VECTOR, outer_groups * VECTOR, width_groups * VECTOR
    x_stride = x_stride_groups * VECTOR
    columns_of_tiles = (width + BLOCK_N - 1) // BLOCK_N
    matrix = inner.to(tl.int64) * outer
    if USE_TMA:
        if not GATHER:
            x_blocks = tl.make_tensor_descriptor(x, [num_sources, inner], [x_stride, 1], [BLOCK_M, BLOCK_K])
        if TRANSPOSE:
            w_blocks = tl.make_tensor_descriptor(w, [num_experts * outer, inner], [inner, 1], [BLOCK_N, BLOCK_K])
        else:
            w_blocks = tl.make_tensor_descriptor(w, [num_experts * inner, outer], [outer, 1], [BLOCK_K, BLOCK_N])
    first_tile, last_tile = tl.load(window), tl.load(window + 1)
    begin_tile, end_tile = first_tile * columns_of_tiles + tl.program_id(0), last_tile * columns_of_tiles
    tables = first, stop, tiles, num_experts
    if FLAT:
        steps = (inner + BLOCK_K - 1) // BLOCK_K
        tile, step = begin_tile - tl.num_programs(0), steps - 1
        expert, origin, end, next_begin, tile_n = 0, 0, 0, 0, 0
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        tiles_here = tl.maximum(end_tile - begin_tile + tl.num_programs(0) - 1, 0) // tl.num_programs(0)
        for _ in tl.range(0, tiles_here * steps, num_stages=STAGES):
            step += 1
            if step == steps:
                step = 0
                tile += tl.num_programs(0)
                expert, origin, end, next_begin, tile_n = _place_of(
                    tables, tile, first_tile, last_tile, columns_of_tiles, BLOCK_M, GROUP, EXPERTS, SEVERAL
                )
            x_block = x_blocks.load([origin - first_row, step * BLOCK_K])
            column = first_column + tile_n * BLOCK_N
            w_block = _matrix_block(w_blocks, expert, step * BLOCK_K, column, inner, outer, TRANSPOSE)
            acc = tl.dot(x_block, w_block, acc)
            if step == steps - 1:
                rows, places = origin + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                live, inside = rows < end, (rows < next_begin)[:, None] & (places < width)[None, :]
                if BIASED:
                    acc += _bias_of(bias, expert, first_column + places, outer)
                made = tl.where(live[:, None], acc, 0.0)
                if WEIGHTED:
                    made *= tl.load(weights + rows, mask=live, other=0.0)[:, None]
                target = rows.to(tl.int64)[:, None] * width + places[None, :]
                tl.store(out + target, made.to(out.dtype.element_ty), mask=inside)
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        for tile in tl.range(begin_tile, end_tile, tl.num_programs(0)):
            expert, origin, end, next_begin, tile_n = _place_of(
                tables, tile, first_tile, last_tile, columns_of_tiles, BLOCK_M, GROUP, EXPERTS, SEVERAL
            )
            rows = origin + tl.arange(0, BLOCK_M)
            live = rows < end
            if GATHER:
                sources, live = tokens_of(row_to_token, rows, live, num_sources)
            else:
                sources = tl.minimum(rows - first_row, num_sources - 1)
            places = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            columns = first_column + places
            k = tl.arange(0, BLOCK_K)
            x_tile = x + sources.to(tl.int64)[:, None] * x_stride + k[None, :]
            w_matrix = w + expert.to(tl.int64) * matrix
            if TRANSPOSE:
                # Beyond the last column any will do: what comes of it is not stored.
                w_tile = w_matrix + tl.minimum(columns, outer - 1).to(tl.int64)[None, :] * inner + k[:, None]
                to_up = width.to(tl.int64) * inner
            else:
                w_tile = w_matrix + k.to(tl.int64)[:, None] * outer + columns[None, :]
                to_up = width.to(tl.int64)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if GATED:
                acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for step in tl.range(0, (inner + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
                here = step * BLOCK_K
                if USE_TMA and not GATHER:
                    x_block = x_blocks.load([origin - first_row, here])
                elif EVEN_INNER:
                    x_block = tl.load(x_tile + here)
                else:
                    x_block = tl.load(x_tile + here, mask=(here + k < inner)[None, :], other=0.0)
                if USE_TMA:
                    column = first_column + tile_n * BLOCK_N
                    acc = tl.dot(x_block, _matrix_block(w_blocks, expert, here, column, inner, outer, TRANSPOSE), acc)
                    if GATED:
                        up_block = _matrix_block(w_blocks, expert, here, column + width, inner, outer, TRANSPOSE)
                        acc_up = tl.dot(x_block, up_block, acc_up)
                else:
                    inside = (here + k < inner)[:, None]
                    if not TRANSPOSE:
                        inside = inside & (places < width)[None, :]
                    even: tl.constexpr = EVEN_INNER and (TRANSPOSE or EVEN_OUTER)
                    acc = tl.dot(x_block, _block_at(w_tile, inside, even), acc)
                    if GATED:
                        if TRANSPOSE:
                            inside = inside & (places < width)[None, :]
                        acc_up = tl.dot(x_block, _block_at(w_tile + to_up, inside, even and EVEN_OUTER), acc_up)
                    w_tile += BLOCK_K if TRANSPOSE else BLOCK_K * outer.to(tl.int64)
            if BIASED:
                acc += _bias_of(bias, expert, columns, outer)
            acc = tl.where(live[:, None], acc, 0.0)
            target = rows.to(tl.int64)[:, None] * width + places[None, :]
            inside = (rows < next_begin)[:, None] & (places < width)[None, :]
            if GATED:
                dtype: tl.constexpr = out.dtype.element_ty
                gate, up = acc.to(dtype), tl.where(live[:, None], acc_up, 0.0).to(dtype)
                if KEEPS_HIDDEN:
                    there = target + rows.to(tl.int64)[:, None] * width
                    tl.store(hidden + there, gate, mask=inside)
                    tl.store(hidden + there + width, up, mask=inside)
                acc = swiglu(gate.to(tl.float32), up.to(tl.float32))
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
    # Rows of no group; each of the launches for windows takes a part of them.
    last_spare = tl.load(spare + 1 + num_experts) * columns_of_tiles
    for block in range(tl.program_id(0) + part * tl.num_programs(0), last_spare, parts * tl.num_programs(0)):
        number, tile_n = block // columns_of_tiles, block % columns_of_tiles
        group = _expert_of(spare, number, num_experts + 1, EXPERTS, SEVERAL)  # 0: in front of the first
        ends = tl.load(first + group)
        before = tl.maximum(group - 1, 0)
        covered = tl.load(first + before) + (tl.load(tiles + before + 1) - tl.load(tiles + before)) * BLOCK_M
        rows = tl.where(group == 0, 0, covered) + (number - tl.load(spare + group)) * BLOCK_M + tl.arange(0, BLOCK_M)
        places = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (rows < ends)[:, None] & (places < width)[None, :]
        target = rows.to(tl.int64)[:, None] * width + places[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_N], out.dtype.element_ty)
        tl.store(out + target, zeros, mask=inside)
        if GATED and KEEPS_HIDDEN:
            there = target + rows.to(tl.int64)[:, None] * width
            tl.store(hidden + there, zeros, mask=inside)
            tl.store(hidden + there + width, zeros, mask=inside)
        if PARTNER:
            partials = partial + rows.to(tl.int64) * columns_of_tiles + tile_n
            tl.store(partials, tl.zeros([BLOCK_M], tl.float32), mask=rows < ends)
            tl.store(scaled + target, zeros, mask=inside)


@triton.jit
def _place_of(
    tables,
    tile,
    first_tile,
    last_tile,
    columns_of_tiles,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """Of a tile of a window: its expert, its first row, the end of the group, the next one's first row; its column."""
    first, stop, tiles, num_experts = tables
    expert = _expert_of(tiles, tile // columns_of_tiles, num_experts, EXPERTS, SEVERAL)
    before = tl.load(tiles + expert)
    here_before = tl.maximum(before, first_tile)
    height = tl.minimum(tl.load(tiles + expert + 1), last_tile) - here_before
    tile_m, tile_n = in_bands(tile - here_before * columns_of_tiles, height, columns_of_tiles, GROUP)
    origin = tl.load(first + expert) + (tile_m + here_before - before) * BLOCK_M
    return expert, origin, tl.load(stop + expert), tl.load(first + expert + 1), tile_n


@triton.jit
def _matrix_block(blocks, expert, here, column, inner, outer, TRANSPOSE: tl.constexpr):
    """Of an expert's matrix, through a descriptor: part of the contraction from ``here`` on, and columns."""
    if TRANSPOSE:
        return blocks.load([expert * outer + column, here]).T
    else:
        return blocks.load([expert * inner + here, column])


@triton.jit
def _bias_of(bias, expert, columns, outer):
    """Of an expert, [1, columns] float32."""
    entries = bias + outer.to(tl.int64) * expert + columns
    return tl.load(entries, mask=columns < outer, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _block_at(pointers, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)
