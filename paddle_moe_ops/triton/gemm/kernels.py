# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""Grouped GEMM: one matrix per expert over its own rows. Group sizes are known to the device only.

    out[r] = weights[r] * (x[r] op(W_e) + bias[e])      for the rows r of expert e; op(W_e) is [K, N]
    out[r] = 0                                          for rows of no group

Layout: x [M, K] with any row stride, or tokens [T, K] that the kernel gathers; W [E, N, K] with TRANSPOSE, otherwise
[E, K, N], contiguous; out [M, width] packed. Operands are float16 or bfloat16, accumulators float32. `schedule`
computes the tile tables.

Mapping: persistent programs. Output tiles of BLOCK_M x BLOCK_N form a flat list, expert by expert, swizzled in groups
of GROUP_M row tiles so that concurrent programs share rows and columns in L2. Program p computes tiles p,
p + num_programs, ... of the list. A tile of rows ends where the next group begins, so tiles and gap tiles cover all
rows.

Overlap: the mainloop is software-pipelined over K steps with NUM_STAGES stages. Operands arrive by TMA (USE_TMA;
addresses and rows must be multiples of 16 bytes) or through pointers (cp.async on sm_80), which can gather rows. tl.dot
is mma.sync on sm_80 and asynchronous wgmma on sm_90. The epilogue overlaps the next tile's first loads only with
FLAT_LOOP.

Determinism: one program accumulates a tile, over ascending K. The bits depend neither on the number of programs nor on
chunks.

Chunks: a launch may cover a chunk of the rows, whose operand then contains these rows and the BLOCK_M - 1 after them
for the last tile, or a chunk of the columns, to which its output is limited. So no matrix of all rows and all columns
needs to exist.

Bytes moved, at least: each operand and each result once.
"""

import triton
import triton.language as tl

from .swiglu import swiglu

__all__ = ["grouped_gemm_kernel", "load_tokens", "swizzle"]


@triton.jit
def _experts_before(tile_starts, tile, chunk, num_experts, BLOCK: tl.constexpr):
    """Number of experts, among BLOCK, whose row tiles all precede a tile."""
    expert = chunk + tl.arange(0, BLOCK)
    ends = tl.load(tile_starts + 1 + expert, mask=expert < num_experts, other=2**31 - 1)
    return tl.sum((ends <= tile).to(tl.int32), axis=0)


@triton.jit
def _find_expert(tile_starts, tile, num_experts, BLOCK: tl.constexpr, LOOP_E: tl.constexpr):
    """Expert of a row tile. The loop costs registers, so it exists only if BLOCK experts are not all."""
    expert = _experts_before(tile_starts, tile, 0, num_experts, BLOCK)
    if LOOP_E:
        for chunk in range(BLOCK, num_experts, BLOCK):
            expert += _experts_before(tile_starts, tile, chunk, num_experts, BLOCK)
    return expert


@triton.jit
def swizzle(tile, height, width, GROUP_M: tl.constexpr):
    """Row and column of a tile of height x width tiles: groups of GROUP_M row tiles, column by column in each group."""
    group = tile // (GROUP_M * width)
    rows = tl.minimum(height - group * GROUP_M, GROUP_M)
    inside = tile - group * (GROUP_M * width)
    column = inside // rows
    return group * GROUP_M + inside - column * rows, column


@triton.jit
def load_tokens(row_to_token, rows, in_group, num_tokens):
    """Token of each row, and a mask of the rows in the group that have one."""
    token = tl.load(row_to_token + rows, mask=in_group, other=-1)
    has_token = (token >= 0) & (token < num_tokens)
    return tl.where(has_token, token, 0), has_token


@triton.jit
def grouped_gemm_kernel(
    x,
    w,
    row_to_token,
    weights,
    bias,
    forward_rows,
    out,
    hidden,
    partial_dots,
    scaled_rows,
    group_starts,
    group_ends,
    tile_starts,
    gap_starts,
    chunk_tiles,
    num_experts,
    num_sources,
    k_vectors,
    n_vectors,
    width_vectors,
    first_column,
    first_row,
    gap_part,
    num_gap_parts,
    x_stride_vectors,
    forward_stride_vectors,
    VECTOR: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    ROW_DOTS: tl.constexpr,
    SWIGLU: tl.constexpr,
    STORE_HIDDEN: tl.constexpr,
    FLAT_LOOP: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    LOOP_E: tl.constexpr,
):
    """A persistent loop over output tiles: mainloop over K, then the epilogue that the constants select.

    ``chunk_tiles`` contains the first row tile and the end. x [num_sources, K] begins with row ``first_row``; out has
    ``width`` columns from ``first_column`` on. It zeros part ``gap_part`` of ``num_gap_parts`` of the gap tiles.

        GATHER      row r of x is x[row_to_token[r]], loaded through pointers
        WEIGHTED    multiplies by weights[r], before rounding
        BIASED      adds bias [E, N], dtype of x, before the weight; not with ROW_DOTS or SWIGLU
        ROW_DOTS    dgrad of a weighted GEMM. forward_rows [M, N], dtype of x, is the operand whose gradient is ``out``.
                    partial_dots[r, column tile] = dot of its row and the unweighted accumulator, for the gradient of
                    the weights; scaled_rows[r] = weights[r] * forward_rows[r], the operand of wgrad
        SWIGLU      out [M, N / 2] = `swiglu` of the two halves of the columns, each rounded to the dtype of x. A
                    program holds two accumulators. STORE_HIDDEN: the halves themselves go to ``hidden`` [M, N]
        FLAT_LOOP   both operands by TMA: one pipelined loop over the K steps of all tiles of a program, so the first
                    loads of a tile are in flight during the epilogue of the previous one
    """
    k_size, n_size, width = k_vectors * VECTOR, n_vectors * VECTOR, width_vectors * VECTOR
    x_stride = x_stride_vectors * VECTOR
    num_n_tiles = (width + BLOCK_N - 1) // BLOCK_N
    matrix = k_size.to(tl.int64) * n_size
    if USE_TMA:
        if not GATHER:
            x_desc = tl.make_tensor_descriptor(x, [num_sources, k_size], [x_stride, 1], [BLOCK_M, BLOCK_K])
        if TRANSPOSE:
            w_desc = tl.make_tensor_descriptor(w, [num_experts * n_size, k_size], [k_size, 1], [BLOCK_N, BLOCK_K])
        else:
            w_desc = tl.make_tensor_descriptor(w, [num_experts * k_size, n_size], [n_size, 1], [BLOCK_K, BLOCK_N])
    first_tile, last_tile = tl.load(chunk_tiles), tl.load(chunk_tiles + 1)
    begin_tile, end_tile = first_tile * num_n_tiles + tl.program_id(0), last_tile * num_n_tiles
    tables = group_starts, group_ends, tile_starts, num_experts
    if FLAT_LOOP:
        k_steps = (k_size + BLOCK_K - 1) // BLOCK_K
        tile, k_step = begin_tile - tl.num_programs(0), k_steps - 1
        expert, tile_row, group_end, next_group_start, tile_n = 0, 0, 0, 0, 0
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        num_own_tiles = tl.maximum(end_tile - begin_tile + tl.num_programs(0) - 1, 0) // tl.num_programs(0)
        for _ in tl.range(0, num_own_tiles * k_steps, num_stages=NUM_STAGES):
            k_step += 1
            if k_step == k_steps:
                k_step = 0
                tile += tl.num_programs(0)
                expert, tile_row, group_end, next_group_start, tile_n = _tile_coordinates(
                    tables, tile, first_tile, last_tile, num_n_tiles, BLOCK_M, GROUP_M, BLOCK_E, LOOP_E
                )
            x_tile = x_desc.load([tile_row - first_row, k_step * BLOCK_K])
            column = first_column + tile_n * BLOCK_N
            w_tile = _load_w_tile(w_desc, expert, k_step * BLOCK_K, column, k_size, n_size, TRANSPOSE)
            acc = tl.dot(x_tile, w_tile, acc)
            if k_step == k_steps - 1:
                rows, out_columns = tile_row + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                in_group, inside = rows < group_end, (rows < next_group_start)[:, None] & (out_columns < width)[None, :]
                if BIASED:
                    acc += _load_bias(bias, expert, first_column + out_columns, n_size)
                result = tl.where(in_group[:, None], acc, 0.0)
                if WEIGHTED:
                    result *= tl.load(weights + rows, mask=in_group, other=0.0)[:, None]
                out_offsets = rows.to(tl.int64)[:, None] * width + out_columns[None, :]
                tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=inside)
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        for tile in tl.range(begin_tile, end_tile, tl.num_programs(0)):
            expert, tile_row, group_end, next_group_start, tile_n = _tile_coordinates(
                tables, tile, first_tile, last_tile, num_n_tiles, BLOCK_M, GROUP_M, BLOCK_E, LOOP_E
            )
            rows = tile_row + tl.arange(0, BLOCK_M)
            in_group = rows < group_end
            if GATHER:
                sources, in_group = load_tokens(row_to_token, rows, in_group, num_sources)
            else:
                sources = tl.minimum(rows - first_row, num_sources - 1)
            out_columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            columns = first_column + out_columns
            k_offsets = tl.arange(0, BLOCK_K)
            x_pointers = x + sources.to(tl.int64)[:, None] * x_stride + k_offsets[None, :]
            w_matrix = w + expert.to(tl.int64) * matrix
            if TRANSPOSE:
                # Columns beyond the last one load any valid element: their results are not stored.
                w_pointers = (
                    w_matrix + tl.minimum(columns, n_size - 1).to(tl.int64)[None, :] * k_size + k_offsets[:, None]
                )
                up_offset = width.to(tl.int64) * k_size
            else:
                w_pointers = w_matrix + k_offsets.to(tl.int64)[:, None] * n_size + columns[None, :]
                up_offset = width.to(tl.int64)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if SWIGLU:
                acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k_step in tl.range(0, (k_size + BLOCK_K - 1) // BLOCK_K, num_stages=NUM_STAGES):
                k_start = k_step * BLOCK_K
                if USE_TMA and not GATHER:
                    x_tile = x_desc.load([tile_row - first_row, k_start])
                elif EVEN_K:
                    x_tile = tl.load(x_pointers + k_start)
                else:
                    x_tile = tl.load(x_pointers + k_start, mask=(k_start + k_offsets < k_size)[None, :], other=0.0)
                if USE_TMA:
                    column = first_column + tile_n * BLOCK_N
                    acc = tl.dot(x_tile, _load_w_tile(w_desc, expert, k_start, column, k_size, n_size, TRANSPOSE), acc)
                    if SWIGLU:
                        up_tile = _load_w_tile(w_desc, expert, k_start, column + width, k_size, n_size, TRANSPOSE)
                        acc_up = tl.dot(x_tile, up_tile, acc_up)
                else:
                    inside = (k_start + k_offsets < k_size)[:, None]
                    if not TRANSPOSE:
                        inside = inside & (out_columns < width)[None, :]
                    even: tl.constexpr = EVEN_K and (TRANSPOSE or EVEN_N)
                    acc = tl.dot(x_tile, _load_tile(w_pointers, inside, even), acc)
                    if SWIGLU:
                        if TRANSPOSE:
                            inside = inside & (out_columns < width)[None, :]
                        acc_up = tl.dot(x_tile, _load_tile(w_pointers + up_offset, inside, even and EVEN_N), acc_up)
                    w_pointers += BLOCK_K if TRANSPOSE else BLOCK_K * n_size.to(tl.int64)
            if BIASED:
                acc += _load_bias(bias, expert, columns, n_size)
            acc = tl.where(in_group[:, None], acc, 0.0)
            out_offsets = rows.to(tl.int64)[:, None] * width + out_columns[None, :]
            inside = (rows < next_group_start)[:, None] & (out_columns < width)[None, :]
            if SWIGLU:
                dtype: tl.constexpr = out.dtype.element_ty
                gate, up = acc.to(dtype), tl.where(in_group[:, None], acc_up, 0.0).to(dtype)
                if STORE_HIDDEN:
                    hidden_offsets = out_offsets + rows.to(tl.int64)[:, None] * width
                    tl.store(hidden + hidden_offsets, gate, mask=inside)
                    tl.store(hidden + hidden_offsets + width, up, mask=inside)
                acc = swiglu(gate.to(tl.float32), up.to(tl.float32))
            if WEIGHTED:
                factor = tl.load(weights + rows, mask=in_group, other=0.0)[:, None]
            if ROW_DOTS:
                forward_offsets = rows.to(tl.int64)[:, None] * (forward_stride_vectors * VECTOR) + columns[None, :]
                found = in_group[:, None] & inside
                forward = tl.load(forward_rows + forward_offsets, mask=found, other=0.0).to(tl.float32)
                dots = tl.sum(acc * tl.where(inside, forward, 0.0), axis=1)
                tl.store(partial_dots + rows.to(tl.int64) * num_n_tiles + tile_n, dots, mask=rows < next_group_start)
                tl.store(scaled_rows + out_offsets, (forward * factor).to(scaled_rows.dtype.element_ty), mask=inside)
            if WEIGHTED:
                acc *= factor
            tl.store(out + out_offsets, acc.to(out.dtype.element_ty), mask=inside)
    # Gap tiles: rows of no group. Each launch for a chunk zeros a part of them.
    end_of_gaps = tl.load(gap_starts + 1 + num_experts) * num_n_tiles
    for block in range(
        tl.program_id(0) + gap_part * tl.num_programs(0), end_of_gaps, num_gap_parts * tl.num_programs(0)
    ):
        gap_tile, tile_n = block // num_n_tiles, block % num_n_tiles
        group = _find_expert(gap_starts, gap_tile, num_experts + 1, BLOCK_E, LOOP_E)  # 0: before the first group
        ends = tl.load(group_starts + group)
        before = tl.maximum(group - 1, 0)
        group_start = tl.load(group_starts + before)
        covered = group_start + (tl.load(tile_starts + before + 1) - tl.load(tile_starts + before)) * BLOCK_M
        tile_row = tl.where(group == 0, 0, covered) + (gap_tile - tl.load(gap_starts + group)) * BLOCK_M
        rows = tile_row + tl.arange(0, BLOCK_M)
        out_columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (rows < ends)[:, None] & (out_columns < width)[None, :]
        out_offsets = rows.to(tl.int64)[:, None] * width + out_columns[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_N], out.dtype.element_ty)
        tl.store(out + out_offsets, zeros, mask=inside)
        if SWIGLU and STORE_HIDDEN:
            hidden_offsets = out_offsets + rows.to(tl.int64)[:, None] * width
            tl.store(hidden + hidden_offsets, zeros, mask=inside)
            tl.store(hidden + hidden_offsets + width, zeros, mask=inside)
        if ROW_DOTS:
            dots_of_gap = partial_dots + rows.to(tl.int64) * num_n_tiles + tile_n
            tl.store(dots_of_gap, tl.zeros([BLOCK_M], tl.float32), mask=rows < ends)
            tl.store(scaled_rows + out_offsets, zeros, mask=inside)


@triton.jit
def _tile_coordinates(
    tables,
    tile,
    first_tile,
    last_tile,
    num_n_tiles,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    LOOP_E: tl.constexpr,
):
    """Expert, first row, end of the group, start of the next group and column tile of a tile of a chunk."""
    group_starts, group_ends, tile_starts, num_experts = tables
    expert = _find_expert(tile_starts, tile // num_n_tiles, num_experts, BLOCK_E, LOOP_E)
    before = tl.load(tile_starts + expert)
    here_before = tl.maximum(before, first_tile)
    height = tl.minimum(tl.load(tile_starts + expert + 1), last_tile) - here_before
    tile_m, tile_n = swizzle(tile - here_before * num_n_tiles, height, num_n_tiles, GROUP_M)
    tile_row = tl.load(group_starts + expert) + (tile_m + here_before - before) * BLOCK_M
    return expert, tile_row, tl.load(group_ends + expert), tl.load(group_starts + expert + 1), tile_n


@triton.jit
def _load_w_tile(desc, expert, k_start, column, k_size, n_size, TRANSPOSE: tl.constexpr):
    """Load BLOCK_K x BLOCK_N elements of an expert's matrix by TMA, from ``k_start`` and ``column`` on."""
    if TRANSPOSE:
        return desc.load([expert * n_size + column, k_start]).T
    else:
        return desc.load([expert * k_size + k_start, column])


@triton.jit
def _load_bias(bias, expert, columns, n_size):
    """Bias of an expert, [1, columns] float32."""
    entries = bias + n_size.to(tl.int64) * expert + columns
    return tl.load(entries, mask=columns < n_size, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _load_tile(pointers, inside, EVEN: tl.constexpr):
    """Load a tile through pointers, masked unless EVEN."""
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)
