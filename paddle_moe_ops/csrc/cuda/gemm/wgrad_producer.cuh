// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The tiles of grouped_outer.cu, and how their operands get to shared memory.
//
// A stage holds 32 rows of operand a, 128 columns, then those of operand b, 256, in pieces of 64 columns that are swizzled.
#pragma once

#include "cuda/gemm/pipeline.cuh"

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
  TileCounter counter;
};

// A tile: its expert, or kNoTile, the expert's first row and number of rows, and its first columns of both operands.
struct OuterPlace {
  int expert, first, rows, of_a, of_b;
};

constexpr int kColumnsA = 128, kColumnsB = 256, kStepRows = 32;
constexpr int kPiecesA = kColumnsA / 64, kStepPieces = kPiecesA + kColumnsB / 64;  // the first ones of operand a
constexpr int kStepPieceBytes = kStepRows * 128;
constexpr int kOuterStageBytes = kStepPieces * kStepPieceBytes;
constexpr int kOuterStages = 6;
constexpr int kBytesOfResults = 4 * kPieceBytes;                                           // of a warpgroup's part of a tile
constexpr int kOuterBytes = kOuterStages * kOuterStageBytes + 2 * kBytesOfResults + 1024;  // stages begin at a multiple of 1024

#ifdef PMO_HOPPER_CODE

constexpr int kBand = 8;  // rows of tiles that share their columns in the L2
constexpr int kProductRows = 16;
constexpr int kGathering = 5;                   // the barrier of the warps that gather
constexpr int kRowsOfBatch = 256;               // whose tokens are looked up together
constexpr int kGatheringLanes = 2 * kWarpSize;  // the last two warps of the first warpgroup
constexpr int kRegistersToGather = 88, kRegistersBesideGathering = 208;

struct OuterStages : StagesOf<kOuterStages, kOuterStageBytes> {
  __device__ uint32_t b(int stage) const { return a(stage) + kPiecesA * kStepPieceBytes; }
};

using OuterRing = RingOf<kOuterStages>;
using OuterPlaces = PlacesOf<OuterPlace, 2>;

// Which rows of tokens the steps of a batch gather: row 4 i + r of a step is [r][i] of it.
struct Sources {
  alignas(16) uint32_t of_steps[kRowsOfBatch / kStepRows][4][kStepRows / 4];
};

// The work of the warp that finds places; the first tile of a block is that of its number.
__device__ inline void find_places(const OuterArguments& a, OuterPlaces& places) {
  const int tiles_of_expert = a.a_tiles * a.b_tiles;
  const bool is_first = threadIdx.x % kWarpSize == 0;
  OuterPlaces::Ring ring;
  for (int tile = blockIdx.x;; ring.advance()) {
    const int expert = tile / tiles_of_expert;
    OuterPlace place = {kNoTile, 0, 0, 0, 0};
    if (expert < a.num_experts) {
      const int first = __ldg(a.first + expert);
      const TilePlace at(tile - expert * tiles_of_expert, a.a_tiles, a.b_tiles, kBand);
      place = {expert, first, max(min(__ldg(a.stop + expert), a.num_rows) - first, 0), at.row * kColumnsA, at.column * kColumnsB};
    }
    places.wait_for_room(ring);
    if (is_first) places.give(ring, place);
    if (place.expert == kNoTile) break;
    if (is_first) tile = a.counter.next(gridDim.x);
    tile = __shfl_sync(kAllLanes, tile, 0);
  }
  if (is_first) a.counter.leave(gridDim.x);
}

// The work of a warp that loads these pieces of each stage. Each operand has a warp: one alone would take as long for a step's six boxes as
// the products of the step take.
template <int kFirstPiece, int kStopPiece>
__device__ inline void load_pieces(const OuterArguments& a, const OuterStages& stages, OuterPlaces& places) {
  OuterRing ring;
  OuterPlaces::Ring at;
  for (OuterPlace place = places.take(at); place.expert != kNoTile; place = places.take(at)) {
    for (int begin = 0; begin < place.rows; begin += kStepRows) {
      wait(&stages.empty[ring.stage], ring.phase ^ 1);
      if (is_elected()) {
        uint64_t* full = &stages.full[ring.stage];
        arrive_expecting(full, (kStopPiece - kFirstPiece) * kStepPieceBytes);
#pragma unroll
        for (int piece = kFirstPiece; piece < kStopPiece; ++piece) {
          const bool is_a = piece < kPiecesA;
          const int column = is_a ? place.of_a + 64 * piece : place.of_b + 64 * (piece - kPiecesA);
          load_box(stages.a(ring.stage) + piece * kStepPieceBytes, is_a ? &a.a : &a.b, full, column, place.first + begin);
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
__device__ inline void gather_tiles(const OuterArguments& a, const OuterStages& stages, OuterPlaces& places, Sources& sources) {
  constexpr int kRowsOfLane = kStepRows / 4, kFound = kRowsOfBatch / kGatheringLanes;
  // 16 lanes take the 256 bytes of a row that a tile needs, so all of them have four rows at a time.
  const int lane = threadIdx.x % kGatheringLanes, row_of_4 = lane / 16, piece = lane % 16;
  const uint32_t in_piece = piece / 8 * kStepPieceBytes + row_of_4 * 128;
  const uint32_t even = in_piece + (piece % 8 ^ row_of_4) * 16, odd = in_piece + 512 + (piece % 8 ^ (row_of_4 + 4)) * 16;
  uint32_t found[kFound];
  const auto look_up = [&](int first, int count, int begin) {
#pragma unroll
    for (int i = 0; i < kFound; ++i) {
      const int row = begin + i * kGatheringLanes + lane;
      found[i] = row < count ? a.gathered.source_of(first + row) : GatheredRows::kNone;
    }
  };
  OuterRing ring;
  OuterPlaces::Ring at;
  OuterPlace next = places.take(at);
  look_up(next.first, next.rows, 0);
  while (next.expert != kNoTile) {
    const OuterPlace place = next;
    next = places.take(at);
    const int column = place.of_a + piece * 8;
    const bool is_inside = column < a.gathered_columns;
    const char* const first = a.gathered.first_row(column * 2);
    if (place.rows == 0) look_up(next.first, next.rows, 0);
    for (int begin = 0; begin < place.rows; begin += kRowsOfBatch) {
      meet(kGathering, kGatheringLanes);  // both warps have read the batch before
#pragma unroll
      for (int i = 0; i < kFound; ++i) {
        const int row = i * kGatheringLanes + lane;
        sources.of_steps[row / kStepRows][row % 4][row % kStepRows / 4] = found[i];
      }
      meet(kGathering, kGatheringLanes);
      const bool is_last = begin + kRowsOfBatch >= place.rows;
      look_up(is_last ? next.first : place.first, is_last ? next.rows : place.rows, is_last ? 0 : begin + kRowsOfBatch);
      const int steps = (min(place.rows - begin, kRowsOfBatch) + kStepRows - 1) / kStepRows;
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
          a.gathered.copy<4>(&source[i], first, is_inside, target_of);
        }
        arrive_after_copies(&stages.full[ring.stage]);
        ring.advance();
      }
    }
  }
}

// Sets the rows of a stage from `begin` on to zero, up to the next multiple of 16. The warpgroup does it, and `meeting` is a barrier of it.
__device__ inline void clean_stage(uint32_t stage, int begin, int meeting) {
  const int end = (begin + kProductRows - 1) / kProductRows * kProductRows;
  // A row is 8 times 16 bytes of each piece, wherever swizzling puts them.
  const int at = threadIdx.x % kWarpgroup;
  if (at < 8 * kStepPieces) {
    for (int row = begin; row < end; ++row) {
      store_16_bytes(stage + at / 8 * kStepPieceBytes + row * 128 + at % 8 * 16, 0, 0, 0, 0);
    }
  }
  fence_async_proxy();
  meet(meeting, kWarpgroup);
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
