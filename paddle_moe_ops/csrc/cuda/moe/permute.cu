// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// permute: rows[slot_to_row[t, k] - first_row] = x[t], scales alike. Every source row is read once and written to each of its rows.
//
//   x [T, H], rows [N, H]; scale [T, S], row_scales [N, S]; slot_to_row [T, K]; row_to_token [N] marks padding rows
//
// Large sizes with long rows, in 16-byte accesses, go through the fused kernel (fused.cu) on sm_90 and newer. move_pieces serves
// all others: one launch, many short-lived CTAs. A warp loads a piece of a token's row into registers and stores it to each of
// the token's rows, in the widest accesses (up to 16 bytes) that pointers and lengths allow. The warp of the first piece moves
// the scales as well. The first CTAs of the grid zero padding rows, in parallel with the others.
//
// Memory-bound: (T + N) (H + S) elements.
#include <algorithm>
#include <climits>

#include "common/checks.h"
#include "common/row_array.h"
#include "cuda/moe/fused.h"
#include "cuda/moe/padding.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"
#include "pmo/permute.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kMaxThreads = 128;
// Up to this many accesses of all tokens, a lane holds one access and CTAs are smaller, so that every SM has work.
constexpr int64_t kMaxAccessesForSmallBlocks = int64_t{1} << 18;
constexpr int kSmallThreads = 64;
constexpr int kScaleWordsPerLane = 2;  // in registers

struct Pieces {
  RowArray rows, scales;  // scales move in 4-byte words
  int64_t num_tokens, topk, num_rows;
  const int32_t* slot_to_row;
  const int32_t* row_to_token;
  int64_t first_row;
  const int32_t* rows_end;
  int parts = 1;                // pieces of a row, one warp each
  unsigned padding_blocks = 0;  // the first CTAs of the grid

  // The same for tokens [first, first + count). The range from token 0 has the padding.
  Pieces of_tokens(int64_t first, int64_t count) const {
    Pieces some = *this;
    for (RowArray* array : {&some.rows, &some.scales}) {
      array->source += first * array->source_stride;
    }
    if (first != 0) some.padding_blocks = 0;
    some.slot_to_row += first * topk;
    some.num_tokens = count;
    return some;
  }
};

// A lane moves kAccessesPerLane accesses of a row.
template <int kBytes, int kAccessesPerLane>
__global__ void __launch_bounds__(kMaxThreads) move_pieces(const __grid_constant__ Pieces p) {
  using Access = Vector<kBytes>;
  if (blockIdx.x < p.padding_blocks) {
    const int64_t filled = rows_before_end(p.rows_end, p.first_row, p.num_rows);
    PaddingRows(p.row_to_token, filled, p.padding_blocks).each([&](int64_t row) {
      if (p.rows.fill) zero_row<kBytes>(p.rows.target + row * p.rows.row_bytes, p.rows.row_bytes);
      if (p.scales.fill) zero_row<4>(p.scales.target + row * p.scales.row_bytes, p.scales.row_bytes);
    });
    return;
  }
  const int lane = threadIdx.x % kWarpSize;
  const WarpShare share(p.parts, p.padding_blocks);
  const int64_t token = share.item, accesses = p.rows.row_bytes / kBytes;
  if (token >= p.num_tokens) return;
  const int64_t first = int64_t{share.part} * (kAccessesPerLane * kWarpSize) + lane;
  const auto* source = reinterpret_cast<const Access*>(p.rows.source + token * p.rows.source_stride) + first;
  const int64_t words = share.part == 0 ? p.scales.row_bytes / 4 : 0;
  const auto* scale = reinterpret_cast<const uint32_t*>(p.scales.source + token * p.scales.source_stride);
  Access values[kAccessesPerLane];
#pragma unroll
  for (int i = 0; i < kAccessesPerLane; ++i) {
    if (first + i * kWarpSize < accesses) values[i] = source[i * kWarpSize];
  }
  uint32_t scale_words[kScaleWordsPerLane];
#pragma unroll
  for (int i = 0; i < kScaleWordsPerLane; ++i) {
    if (lane + i * kWarpSize < words) scale_words[i] = scale[lane + i * kWarpSize];
  }
#pragma unroll 1
  for (int64_t begin = 0; begin < p.topk; begin += kWarpSize) {
    const int32_t entry = begin + lane < p.topk ? __ldg(p.slot_to_row + token * p.topk + begin + lane) : -1;
    const int32_t own = index_in_chunk(entry, p.first_row);
    const auto store = [&](int64_t row) {
      auto* target = reinterpret_cast<Access*>(p.rows.target + row * p.rows.row_bytes) + first;
#pragma unroll
      for (int i = 0; i < kAccessesPerLane; ++i) {
        if (first + i * kWarpSize < accesses) target[i * kWarpSize] = values[i];
      }
      auto* row_scale = reinterpret_cast<uint32_t*>(p.scales.target + row * p.scales.row_bytes);
#pragma unroll
      for (int i = 0; i < kScaleWordsPerLane; ++i) {
        if (lane + i * kWarpSize < words) row_scale[lane + i * kWarpSize] = scale_words[i];
      }
    };
    const unsigned used = __ballot_sync(kAllLanes, own >= 0 && own < p.num_rows);
    if constexpr (kAccessesPerLane == 1) {
      for_each_lane(used, own, store);
    } else {
      for_each_of_few_lanes(used, own, store);
    }
    if (words <= kScaleWordsPerLane * kWarpSize) continue;
    for_each_of_few_lanes(used, own, [&](int64_t row) {
      auto* row_scale = reinterpret_cast<uint32_t*>(p.scales.target + row * p.scales.row_bytes);
#pragma unroll 1
      for (int64_t i = lane + kScaleWordsPerLane * kWarpSize; i < words; i += kWarpSize) row_scale[i] = scale[i];
    });
  }
}

template <int kBytes, int kAccessesPerLane>
int launch_accesses(Pieces pieces, cudaStream_t stream) {
  constexpr int kThreads = kAccessesPerLane == 1 ? kSmallThreads : kMaxThreads, kWarps = kThreads / kWarpSize;
  const bool fills = pieces.rows.fill || pieces.scales.fill;
  pieces.padding_blocks = fills ? padding_blocks(pieces.num_rows, kThreads) : 0;
  pieces.parts = static_cast<int>(std::max<int64_t>(1, divide_up(pieces.rows.row_bytes / kBytes, kAccessesPerLane * kWarpSize)));
  if (pieces.num_tokens == 0 && pieces.padding_blocks == 0) return PMO_OK;
  const auto run = [&](int64_t first, int64_t count) {
    const Pieces some = pieces.of_tokens(first, count);
    const int64_t blocks = some.padding_blocks + divide_up(count * some.parts, kWarps);
    const Grid grid = {grid_for(blocks, 1, kMaxBlocksOfGrid), kThreads};
    return launch("move_pieces", move_pieces<kBytes, kAccessesPerLane>, grid, stream, some);
  };
  return in_grids(pieces.num_tokens, pieces.parts, kWarps, run, pieces.padding_blocks);
}

int launch_pieces(Pieces pieces, cudaStream_t stream) {
  const RowArray& rows = pieces.rows;
  if (rows.row_bytes + pieces.scales.row_bytes == 0) return PMO_OK;
  return with_width(widest_access(rows, pieces.num_tokens), [&](auto bytes) -> int {
    constexpr int kBytes = decltype(bytes)::value;
    const bool is_small = pieces.num_tokens * (rows.row_bytes / kBytes) <= kMaxAccessesForSmallBlocks;
    return is_small ? launch_accesses<kBytes, 1>(pieces, stream) : launch_accesses<kBytes, 4>(pieces, stream);
  });
}

int move(const pmo_permute_params& p, cudaStream_t stream) {
  if (p.num_rows == 0) return PMO_OK;
  const RowArray scales = scales_of(p);
  Pieces pieces = {rows_of(p), scales, p.num_tokens, p.topk, p.num_rows, p.slot_to_row, p.row_to_token, p.first_row, p.rows_end};
  if (widest_access(scales, p.num_tokens) >= 4) return launch_pieces(pieces, stream);
  pieces.scales = {};  // scales without 4-byte alignment move as rows of their own
  if (const int status = launch_pieces(pieces, stream)) return status;
  pieces.rows = scales;
  return launch_pieces(pieces, stream);
}

int permute(const pmo_permute_params& p, cudaStream_t stream) {
  if (const int status = check_permute(p)) return status;
  if (fused_moves(p)) {
    const int status = launch_fused(nullptr, &p, stream);
    if (status != kNotLaunched) return status;
  }
  return move(p, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_permute_cuda(const pmo_permute_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::permute);
}
