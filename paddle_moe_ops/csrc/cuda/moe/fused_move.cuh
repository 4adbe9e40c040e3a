// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Permutation part of the fused kernel (fused.cu): stages of source rows in shared memory, then stores to the rows of each token.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/moe/fused.cuh"
#include "cuda/ptx/bulk_copy.cuh"

namespace pmo {
namespace cuda {

// Zeroes the padding rows of a given routing, by the threads that do not load.
__device__ inline void zero_padding_rows(const FusedWork& work) {
  const int64_t filled = rows_before_end(work.rows_end, work.first_row, work.num_rows);
  PaddingRows(work.row_to_token, filled, gridDim.x, kFusedWarps).each([&](int64_t row) { zero_padding_row(work, row); });
}

// One stage of a CTA: pieces [first, first + count) in shared memory, then their tokens' scales.
struct Stage {
  int32_t first;
  int32_t count;
  char* memory;

  __device__ Stage(const FusedWork& work, const Share& share, int32_t index, char* memory) : memory(memory) {
    first = share.first_piece + index * work.pieces_per_stage;
    count = max(0, min(work.pieces_per_stage, share.last_piece - first));
  }
  __device__ char* piece(const FusedWork& work, int32_t index) const { return memory + index * work.piece_bytes; }
  __device__ char* scales(const FusedWork& work, int32_t index) const {
    return memory + work.pieces_per_stage * work.piece_bytes + index * work.scale_bytes;
  }
};

// Token of a piece, and its part of the row.
struct Piece {
  int32_t token, part;

  __device__ Piece(const FusedWork& work, const Stage& stage, int32_t index) : token(stage.first + index), part(0) {
    if (work.pieces_per_token == 1) return;
    const int32_t flat = token;
    token = flat / work.pieces_per_token;
    part = flat - token * work.pieces_per_token;
  }
  __device__ int32_t offset(const FusedWork& work) const { return part * work.piece_bytes; }
  __device__ int32_t bytes(const FusedWork& work) const { return min(work.piece_bytes, work.row_bytes - offset(work)); }
};

// Issues the cp.async.bulk loads of a stage; by one warp.
__device__ inline void load_stage(const FusedWork& work, const Stage& stage, uint64_t* barrier) {
  if (stage.count == 0) return;
  const int lane = threadIdx.x % kWarpSize;
  int32_t bytes = 0;
#pragma unroll 1
  for (int32_t index = lane; index < stage.count; index += kWarpSize) {
    const Piece piece(work, stage, index);
    bytes += piece.bytes(work) + (piece.part == 0 ? work.scale_bytes : 0);
  }
  bytes = sum_over_warp(bytes);
  if (lane == 0) bulk_mbarrier_arrive_expect_tx(barrier, bytes);
  __syncwarp();
  const uint64_t policy = createpolicy_evict_first();
#pragma unroll 1
  for (int32_t index = lane; index < stage.count; index += kWarpSize) {
    const Piece piece(work, stage, index);
    cp_async_bulk_load(stage.piece(work, index), work.x + piece.token * work.x_stride + piece.offset(work), piece.bytes(work),
                       barrier, policy);
    if (work.scale_bytes > 0 && piece.part == 0) {
      cp_async_bulk_load(stage.scales(work, index), work.scale + piece.token * work.scale_stride, work.scale_bytes, barrier,
                         policy);
    }
  }
}

// Ordinary stores of a stage's rows and scales, or of its scales alone, by the warps from first_warp on. A warp loads a piece, or
// a segment of it, into registers and then stores it to each of the token's rows.
template <bool kRows>
__device__ inline void store_vectors(const FusedWork& work, const Stage& stage, const BlockRows& block_rows, int first_warp) {
  const int lane = threadIdx.x % kWarpSize;
  const int32_t vectors = kRows ? work.piece_bytes / 16 : 0;
  const int32_t segments = kRows ? divide_up(vectors, kRowVectors * kWarpSize) : 1;
  const int32_t per_segment = round_up(divide_up(vectors, segments), kWarpSize);
  const int32_t jobs = stage.count * segments, step = kFusedWarps + 1 - first_warp;
#pragma unroll 1
  for (int32_t job = threadIdx.x / kWarpSize - first_warp; job < jobs; job += step) {
    const int32_t index = segments == 1 ? job : job / segments;
    const Piece piece(work, stage, index);
    const int32_t segment = job - index * segments, first = segment * per_segment;
    // one lane has one of every 32 vectors
    const int32_t mine = kRows ? min(per_segment, piece.bytes(work) / 16 - first) - lane : 0;
    const int32_t scales = piece.part == 0 && segment == 0 ? work.scale_bytes / 16 : 0;
    const auto* from = reinterpret_cast<const Vector16*>(stage.piece(work, index)) + first + lane;
    const auto* scales_from = reinterpret_cast<const Vector16*>(stage.scales(work, index));
    char* to = work.rows + piece.offset(work) + (first + lane) * 16;
    Vector16 values[kRowVectors], scale = {};
#pragma unroll
    for (int i = 0; i < kRowVectors; ++i) {
      if (i * kWarpSize < mine) values[i] = from[i * kWarpSize];
    }
    if (lane < scales) scale = scales_from[lane];
    const int32_t* rows = block_rows.rows + (piece.token - block_rows.first_token) * work.topk;
#pragma unroll 1
    for (int batch = 0; batch < work.topk; batch += kWarpSize) {
      const int32_t own = index_in_chunk(batch + lane < work.topk ? rows[batch + lane] : -1, work.first_row);
#pragma unroll 1
      for (unsigned left = __ballot_sync(kAllLanes, own >= 0 && own < work.num_rows); left != 0; left &= left - 1) {
        const int64_t row = __shfl_sync(kAllLanes, own, __ffs(left) - 1);
        auto* target = reinterpret_cast<Vector16*>(to + row * work.row_bytes);
#pragma unroll
        for (int i = 0; i < kRowVectors; ++i) {
          if (i * kWarpSize < mine) target[i * kWarpSize] = values[i];
        }
        if (scales == 0) continue;
        auto* scales_to = reinterpret_cast<Vector16*>(work.row_scales + row * work.scale_bytes);
        if (lane < scales) scales_to[lane] = scale;
#pragma unroll 1
        for (int32_t i = lane + kWarpSize; i < scales; i += kWarpSize) scales_to[i] = scales_from[i];
      }
    }
  }
}

// cp.async.bulk stores of every piece of the stage to each of its rows; by the first warp.
__device__ inline void bulk_store_rows(const FusedWork& work, const Stage& stage, const BlockRows& block_rows) {
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < stage.count * work.topk; i += kWarpSize) {
    const int32_t index = i / work.topk;
    const Piece piece(work, stage, index);
    const int32_t slot = (piece.token - block_rows.first_token) * work.topk + i - index * work.topk;
    const int32_t row = index_in_chunk(block_rows.rows[slot], work.first_row);
    if (row < 0 || row >= work.num_rows) continue;
    cp_async_bulk_store(work.rows + row * int64_t{work.row_bytes} + piece.offset(work), stage.piece(work, index),
                        piece.bytes(work));
  }
}

// Stores all stages of a CTA; the first one is already loading. Grid barriers between stages make all CTAs read at one time and
// write at another.
template <bool kBulkStores>
__device__ inline void move_stages(const FusedWork& work, const Share& share, char* memory, const BlockRows& block_rows,
                                   uint64_t* barrier) {
  const bool loader = threadIdx.x >= kFusedThreads, bulk_storer = kBulkStores && threadIdx.x < kWarpSize;
#pragma unroll 1
  for (int32_t index = 0; index < work.num_stages; ++index) {
    const Stage stage(work, share, index, memory);
    if (stage.count > 0) {
      bulk_mbarrier_wait_parity(barrier, index);
      if (!kBulkStores) {
        store_vectors<true>(work, stage, block_rows, 0);
      } else if (bulk_storer) {
        bulk_store_rows(work, stage, block_rows);
      } else if (work.scale_bytes > 0) {
        store_vectors<false>(work, stage, block_rows, 1);
      }
    }
    if (bulk_storer) cp_async_bulk_wait_read();
    if (index + 1 == work.num_stages) break;
    cooperative_groups::this_grid().sync();
    if (loader) load_stage(work, Stage(work, share, index + 1, memory), barrier);
  }
}

}  // namespace cuda
}  // namespace pmo
