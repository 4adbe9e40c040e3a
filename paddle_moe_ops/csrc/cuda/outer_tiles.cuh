// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The tiles of grouped_outer.cu, and how their operands get to shared memory.
//
// A stage holds 64 rows of operand a, 128 columns, then those of operand b, 128 or 256, in pieces of 64 columns that are swizzled.
#pragma once

#include "cuda/grouped_stages.cuh"

namespace pmo {
namespace cuda {

// Operands a and b are p and q, or q and p where the result is turned: then its rows are columns of b.
struct OuterArguments {
  CUtensorMap a, b, out;
  const int32_t *first, *stop;
  int num_rows, num_experts, a_tiles, b_tiles;
  bool turned;
  GatheredRows gathered;  // operand a, if it is gathered
  int gathered_columns;
};

// A tile: its expert, the expert's first row and number of rows, and its first columns of both operands.
struct OuterPlace {
  int expert, first, rows, of_a, of_b;
};

// 128 columns of operand a, and 128 or 256 of operand b.
template <bool kWide>
struct OuterShape {
  static constexpr int kColumnsB = kWide ? 256 : 128;
  static constexpr int kPieces = 2 + kColumnsB / 64;
  static constexpr int kBytes = kPieces * kPieceBytes;  // of a stage
  static constexpr int kStages = kWide ? 4 : 5;
  static constexpr int kHeldPieces = kWide ? 2 : 4;  // of results, which each of two warpgroups has room for
  static constexpr int kSharedBytes =
      kStages * kBytes + 2 * kHeldPieces * kPieceBytes + 1024;  // stages begin at a multiple of 1024
};

#ifdef PMO_HOPPER_CODE

constexpr int kBand = 8;  // rows of tiles that share their columns in the L2
constexpr int kProductRows = 16;
constexpr int kGathering = 5;      // the barrier of the warps that gather
constexpr int kRowsOfBatch = 256;  // whose tokens are looked up together
constexpr int kRegistersToGather = 88, kRegistersBesideGathering = 208;

template <bool kWide>
struct OuterStages : StagesOf<OuterShape<kWide>::kStages, OuterShape<kWide>::kBytes> {
  __device__ uint32_t b(int stage) const { return this->a(stage) + 2 * kPieceBytes; }
};

template <bool kWide>
using OuterRing = RingOf<OuterShape<kWide>::kStages>;

// Which rows of tokens the steps of a batch gather: row 4 i + r of a step is [r][i] of it.
struct Sources {
  alignas(16) uint32_t of_steps[kRowsOfBatch / kTileDepth][4][kTileDepth / 4];
};

__device__ inline int tiles_of_expert(const OuterArguments& a) { return a.a_tiles * a.b_tiles; }

// The rows of a tile's expert; none after the last tile. They are loaded a tile ahead: waiting for them can take as long as a tile.
struct ExpertRows {
  int first = 0, stop = 0;

  __device__ ExpertRows(const OuterArguments& a, int tile, int tiles) {
    if (tile >= tiles) return;
    const int expert = tile / tiles_of_expert(a);
    first = __ldg(a.first + expert);
    stop = __ldg(a.stop + expert);
  }

  __device__ int count(const OuterArguments& a) const { return max(min(stop, a.num_rows) - first, 0); }
};

__device__ inline int steps_of(int rows) { return (rows + kTileDepth - 1) / kTileDepth; }

template <bool kWide>
__device__ inline OuterPlace place_of(const OuterArguments& a, int tile, const ExpertRows& rows) {
  const int expert = tile / tiles_of_expert(a);
  const TilePlace place(tile - expert * tiles_of_expert(a), a.a_tiles, a.b_tiles, kBand);
  return {expert, rows.first, rows.count(a), place.row * kTileRows, place.column * OuterShape<kWide>::kColumnsB};
}

// The work of the warp that loads.
template <bool kGathers, bool kWide>
__device__ inline void load_tiles(const OuterArguments& a, const OuterStages<kWide>& stages, int tiles) {
  using Shape = OuterShape<kWide>;
  constexpr int kFirstPiece = kGathers ? 2 : 0;
  OuterRing<kWide> ring;
  ExpertRows next(a, blockIdx.x, tiles);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const OuterPlace place = place_of<kWide>(a, tile, next);
    next = ExpertRows(a, tile + gridDim.x, tiles);
    for (int begin = 0; begin < place.rows; begin += kTileDepth) {
      wait(&stages.empty[ring.stage], ring.phase ^ 1);
      if (threadIdx.x == 0) {
        uint64_t* full = &stages.full[ring.stage];
        arrive_expecting(full, (Shape::kPieces - kFirstPiece) * kPieceBytes);
#pragma unroll
        for (int piece = kFirstPiece; piece < Shape::kPieces; ++piece) {
          const bool is_a = piece < 2;
          const int column = is_a ? place.of_a + 64 * piece : place.of_b + 64 * (piece - 2);
          load_box(stages.a(ring.stage) + piece * kPieceBytes, is_a ? &a.a : &a.b, full, column, place.first + begin);
        }
      }
      ring.advance();
    }
  }
}

// The work of the warps that gather.
//
// What a load gives, from global or from shared memory, is there only after all copies that the warp began before it. So rows are looked up
// 256 at a time, a batch ahead, and each lane loads all that a step needs before its copies.
template <bool kWide>
__device__ inline void gather_tiles(const OuterArguments& a, const OuterStages<kWide>& stages, Sources& sources, int tiles) {
  constexpr int kRowsOfLane = kTileDepth / 4, kFound = kRowsOfBatch / kGatheringLanes;
  // 16 lanes take the 256 bytes of a row that a tile needs, so all of them have four rows at a time.
  const int lane = threadIdx.x % kGatheringLanes, row_of_4 = lane / 16, piece = lane % 16;
  const uint32_t in_piece = piece / 8 * kPieceBytes + row_of_4 * 128;
  const uint32_t even = in_piece + (piece % 8 ^ row_of_4) * 16, odd = in_piece + 512 + (piece % 8 ^ (row_of_4 + 4)) * 16;
  uint32_t found[kFound];
  const auto look_up = [&](int first, int count, int begin) {
#pragma unroll
    for (int i = 0; i < kFound; ++i) {
      const int row = begin + i * kGatheringLanes + lane;
      found[i] = row < count ? a.gathered.source_of(first + row) : GatheredRows::kNone;
    }
  };
  OuterRing<kWide> ring;
  ExpertRows rows(a, blockIdx.x, tiles), next(a, blockIdx.x + gridDim.x, tiles);
  look_up(rows.first, rows.count(a), 0);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const OuterPlace place = place_of<kWide>(a, tile, rows);
    const ExpertRows after(a, tile + 2 * gridDim.x, tiles);
    const int column = place.of_a + piece * 8;
    const bool is_inside = column < a.gathered_columns;
    const char* const first = a.gathered.first_row(column * 2);
    if (place.rows == 0) look_up(next.first, next.count(a), 0);
    for (int begin = 0; begin < place.rows; begin += kRowsOfBatch) {
      meet(kGathering, kGatheringLanes);  // both warps have read the batch before
#pragma unroll
      for (int i = 0; i < kFound; ++i) {
        const int row = i * kGatheringLanes + lane;
        sources.of_steps[row / kTileDepth][row % 4][row % kTileDepth / 4] = found[i];
      }
      meet(kGathering, kGatheringLanes);
      const bool is_last = begin + kRowsOfBatch >= place.rows;
      look_up(is_last ? next.first : place.first, is_last ? next.count(a) : place.rows, is_last ? 0 : begin + kRowsOfBatch);
      const int steps = steps_of(min(place.rows - begin, kRowsOfBatch));
      for (int step = 0; step < steps; ++step) {
        uint32_t source[kRowsOfLane];
#pragma unroll
        for (int i = 0; i < kRowsOfLane / 4; ++i) {
          const uint4 four = reinterpret_cast<const uint4*>(sources.of_steps[step][row_of_4])[i];
          source[4 * i] = four.x, source[4 * i + 1] = four.y, source[4 * i + 2] = four.z, source[4 * i + 3] = four.w;
        }
        wait(&stages.empty[ring.stage], ring.phase ^ 1);
        const uint32_t target = stages.a(ring.stage);
#pragma unroll
        for (int i = 0; i < kRowsOfLane; i += 4) {
          const auto target_of = [&](int each) { return target + (each % 2 ? odd : even) + (i + each) / 2 * 1024; };
          a.gathered.copy(&source[i], first, is_inside, target_of);
        }
        arrive_after_copies(&stages.full[ring.stage]);
        ring.advance();
      }
    }
    rows = next;
    next = after;
  }
}

// Sets the rows of a stage from `begin` on to zero, up to the next multiple of 16. The warpgroup does it, and `meeting` is a barrier of it.
template <bool kWide>
__device__ inline void clean_stage(uint32_t stage, int begin, int meeting) {
  const int end = (begin + kProductRows - 1) / kProductRows * kProductRows;
  // A row is 8 times 16 bytes of each piece, wherever swizzling puts them.
  const int at = threadIdx.x % kWarpgroup;
  if (at < 8 * OuterShape<kWide>::kPieces) {
    for (int row = begin; row < end; ++row) {
      store_16_bytes(stage + at / 8 * kPieceBytes + row * 128 + at % 8 * 16, 0, 0, 0, 0);
    }
  }
  fence_async_proxy();
  meet(meeting, kWarpgroup);
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
