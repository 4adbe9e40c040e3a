// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// permute on the GPU: every source row is read once and written to each of its rows.
//
// Large sizes with long rows, in whole 16-byte accesses, go through the fused kernel (fused.cu) on sm_90 and newer. Here is what serves
// all others: a warp takes a piece of a token's row into registers, in accesses of up to 16 bytes, as wide as pointers and lengths allow,
// and writes it to the token's rows; the warp that has the first piece moves the scales as well. The first blocks have the padding rows.
// One launch, many short-lived blocks.
// H200, T=153962, H=2048 bfloat16, 1.4 rows per token: see docs/kernels.md.
// Bytes moved: (T + N) * (H + S) elements.
#include <algorithm>
#include <climits>

#include "common/checks.h"
#include "common/row_array.h"
#include "cuda/fused.h"
#include "cuda/launch.cuh"
#include "cuda/padding.cuh"
#include "cuda/vectors.cuh"
#include "pmo/permute.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kMaxThreads = 128;
// Up to so many accesses of all tokens a lane holds one, in smaller blocks, so that all multiprocessors have some.
constexpr int64_t kFewAccesses = int64_t{1} << 18;
constexpr int kFewThreads = 64;
constexpr int kHeldWords = 2;  // of a row's scales that a lane holds

struct Pieces {
  RowArray rows, scales;  // scales are moved in words of 4 bytes
  int64_t num_tokens, topk, num_rows;
  const int32_t* slot_to_row;
  const int32_t* row_to_token;
  int parts = 1;                // pieces of a row
  unsigned padding_blocks = 0;  // of the grid, which come first

  // The same of some tokens; the first have the padding.
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

// A lane holds kHeld accesses of a row.
template <int kBytes, int kHeld>
__global__ void __launch_bounds__(kMaxThreads) move_pieces(const __grid_constant__ Pieces p) {
  using Access = Vector<kBytes>;
  if (blockIdx.x < p.padding_blocks) {
    PaddingRows(p.row_to_token, p.num_rows, p.padding_blocks).each([&](int64_t row) {
      if (p.rows.fill) zero_row<kBytes>(p.rows.target + row * p.rows.row_bytes, p.rows.row_bytes);
      if (p.scales.fill) zero_row<4>(p.scales.target + row * p.scales.row_bytes, p.scales.row_bytes);
    });
    return;
  }
  const int lane = threadIdx.x % kWarpSize;
  const WarpShare share(p.parts, p.padding_blocks);
  const int64_t token = share.item, accesses = p.rows.row_bytes / kBytes;
  if (token >= p.num_tokens) return;
  const int64_t first = int64_t{share.part} * (kHeld * kWarpSize) + lane;
  const auto* source = reinterpret_cast<const Access*>(p.rows.source + token * p.rows.source_stride) + first;
  const int64_t words = share.part == 0 ? p.scales.row_bytes / 4 : 0;
  const auto* scale = reinterpret_cast<const uint32_t*>(p.scales.source + token * p.scales.source_stride);
  Access held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * kWarpSize < accesses) held[i] = source[i * kWarpSize];
  }
  uint32_t held_words[kHeldWords];
#pragma unroll
  for (int i = 0; i < kHeldWords; ++i) {
    if (lane + i * kWarpSize < words) held_words[i] = scale[lane + i * kWarpSize];
  }
#pragma unroll 1
  for (int64_t begin = 0; begin < p.topk; begin += kWarpSize) {
    const int32_t own = begin + lane < p.topk ? __ldg(p.slot_to_row + token * p.topk + begin + lane) : -1;
    const auto store = [&](int64_t row) {
      auto* target = reinterpret_cast<Access*>(p.rows.target + row * p.rows.row_bytes) + first;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (first + i * kWarpSize < accesses) target[i * kWarpSize] = held[i];
      }
      auto* row_scale = reinterpret_cast<uint32_t*>(p.scales.target + row * p.scales.row_bytes);
#pragma unroll
      for (int i = 0; i < kHeldWords; ++i) {
        if (lane + i * kWarpSize < words) row_scale[lane + i * kWarpSize] = held_words[i];
      }
    };
    const unsigned used = __ballot_sync(kAllLanes, own >= 0 && own < p.num_rows);
    if constexpr (kHeld == 1) {
      for_each_lane(used, own, store);
    } else {
      for_each_of_few_lanes(used, own, store);
    }
    if (words <= kHeldWords * kWarpSize) continue;
    for_each_of_few_lanes(used, own, [&](int64_t row) {
      auto* row_scale = reinterpret_cast<uint32_t*>(p.scales.target + row * p.scales.row_bytes);
#pragma unroll 1
      for (int64_t i = lane + kHeldWords * kWarpSize; i < words; i += kWarpSize) row_scale[i] = scale[i];
    });
  }
}

template <int kBytes, int kHeld>
int launch_held(Pieces pieces, cudaStream_t stream) {
  constexpr int kThreads = kHeld == 1 ? kFewThreads : kMaxThreads, kWarps = kThreads / kWarpSize;
  const bool fills = pieces.rows.fill || pieces.scales.fill;
  pieces.padding_blocks = fills ? padding_blocks(pieces.num_rows, kThreads) : 0;
  pieces.parts = static_cast<int>(std::max<int64_t>(1, divide_up(pieces.rows.row_bytes / kBytes, kHeld * kWarpSize)));
  if (pieces.num_tokens == 0 && pieces.padding_blocks == 0) return PMO_OK;
  const auto run = [&](int64_t first, int64_t count) {
    const Pieces some = pieces.of_tokens(first, count);
    const int64_t blocks = some.padding_blocks + divide_up(count * some.parts, kWarps);
    const Grid grid = {grid_for(blocks, 1, kMaxBlocksOfGrid), kThreads};
    return launch("move_pieces", move_pieces<kBytes, kHeld>, grid, stream, some);
  };
  return in_grids(pieces.num_tokens, pieces.parts, kWarps, run, pieces.padding_blocks);
}

int launch_pieces(Pieces pieces, cudaStream_t stream) {
  const RowArray& rows = pieces.rows;
  if (rows.row_bytes + pieces.scales.row_bytes == 0) return PMO_OK;
  return with_width(widest_access(rows, pieces.num_tokens), [&](auto bytes) -> int {
    constexpr int kBytes = decltype(bytes)::value;
    const bool has_few = pieces.num_tokens * (rows.row_bytes / kBytes) <= kFewAccesses;
    return has_few ? launch_held<kBytes, 1>(pieces, stream) : launch_held<kBytes, 4>(pieces, stream);
  });
}

int move(const pmo_permute_params& p, cudaStream_t stream) {
  if (p.num_rows == 0) return PMO_OK;
  const RowArray scales = scales_of(p);
  Pieces pieces = {rows_of(p), scales, p.num_tokens, p.topk, p.num_rows, p.slot_to_row, p.row_to_token};
  if (widest_access(scales, p.num_tokens) >= 4) return launch_pieces(pieces, stream);
  pieces.scales = {};  // narrow ones go as rows of their own
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
