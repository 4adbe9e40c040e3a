// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Sums of the outer products of each expert's rows, which are the gradients of its matrix, on Hopper's tensor cores.
//
// A block stays for the whole launch and takes every gridDim.x-th tile: 128 x 128 numbers of one expert's result. Of its three warpgroups
// the first loads: 64 rows of both operands at a time, into a ring of kStages stages, in pieces of 64 columns that are swizzled. The other
// two take turns: while one multiplies a tile, the other stores the one before it (outer_results.cuh). Tiles have as many steps as their
// expert has rows for, possibly none, so each warpgroup skips the stages of the ring that the other one takes.
//
// The rows of an expert may end inside a step. What comes after them belongs to the next expert or to none, and may be NaN. A
// product takes 16 rows, so the last step of a tile makes only the products that it has rows for. Rows up to the next multiple of 16
// are set to zero in shared memory, in both operands. A warp of the first warpgroup does only this, so the others need not wait for it.
//
// One operand may be rows of tokens, which the other two warps of the first warpgroup gather where they are: 16 bytes a lane, swizzled as
// the copy engine does it, with zeros after an expert's rows. They look up where the rows of the next step begin while they copy one, and
// hold that in shared memory, so that no copy waits for the one before.
//
// Moved: both operands once from memory and, per tile, from the L2; the results once.
#include <algorithm>

#include "common/checks.h"
#include "cuda/grouped_stages.cuh"
#include "cuda/hopper_host.h"
#include "cuda/outer_results.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kStages = 5;
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kOuterResultBytes + 1024;  // stages begin at a multiple of 1024

#ifdef PMO_HOPPER_CODE

constexpr int kBand = 8;  // rows of tiles that share their columns in the L2
constexpr int kProductRows = 16;
constexpr int kGathering = 5;  // the barrier of the warps that gather

using Ring = RingOf<kStages>;
using Stages = StagesOf<kStages>;

// In steps that end inside 16 rows, the copy engine arrives at `landed` and the warp that cleans arrives at `full`.
struct OuterStages : Stages {
  uint64_t* landed;
};

// Which rows of tokens two steps gather: row 4 i + r of a step is [r][i].
struct Sources {
  alignas(16) uint32_t of_steps[2][4][kTileDepth / 4];
};

__device__ inline int tiles_of_expert(const OuterArguments& a) { return a.p_tiles * a.q_tiles; }

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
  __device__ int steps(const OuterArguments& a) const { return (count(a) + kTileDepth - 1) / kTileDepth; }
};

__device__ inline OuterPlace place_of(const OuterArguments& a, int tile, const ExpertRows& rows) {
  const int expert = tile / tiles_of_expert(a);
  const TilePlace place(tile - expert * tiles_of_expert(a), a.p_tiles, a.q_tiles, kBand);
  return {expert, rows.first, rows.count(a), place.row * kTileRows, place.column * kTileColumns};
}

// The work of the warp that loads.
template <bool kGathers>
__device__ inline void load_tiles(const OuterArguments& a, const OuterStages& stages, int tiles) {
  Ring ring;
  ExpertRows next(a, blockIdx.x, tiles);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const OuterPlace place = place_of(a, tile, next);
    next = ExpertRows(a, tile + gridDim.x, tiles);
    for (int begin = 0; begin < place.rows; begin += kTileDepth) {
      wait(&stages.empty[ring.stage], ring.phase ^ 1);
      if (threadIdx.x == 0) {
        const int left = place.rows - begin;
        uint64_t* here = left < kTileDepth && left % kProductRows != 0 ? &stages.landed[ring.stage] : &stages.full[ring.stage];
        arrive_expecting(here, kGathers ? kStageBytes / 2 : kStageBytes);
        const int row = place.first + begin;
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
          if (!kGathers || a.gathers_q) {
            load_box(stages.a(ring.stage) + piece * kPieceBytes, &a.p, here, place.row + 64 * piece, row);
          }
          if (!kGathers || !a.gathers_q) {
            load_box(stages.b(ring.stage) + piece * kPieceBytes, &a.q, here, place.column + 64 * piece, row);
          }
        }
      }
      ring.advance();
    }
  }
}

// The work of the warps that gather.
__device__ inline void gather_tiles(const OuterArguments& a, const OuterStages& stages, Sources& sources, int tiles) {
  // 16 lanes take the 256 bytes of a row that a tile needs, so all of them have four rows at a time.
  const int lane = threadIdx.x % kGatheringLanes, row_of_4 = lane / 16, piece = lane % 16;
  const uint32_t in_piece = piece / 8 * kPieceBytes + row_of_4 * 128;
  const uint32_t even = in_piece + (piece % 8 ^ row_of_4) * 16, odd = in_piece + 512 + (piece % 8 ^ (row_of_4 + 4)) * 16;
  Ring ring;
  int turn = 0;
  ExpertRows next(a, blockIdx.x, tiles);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const OuterPlace place = place_of(a, tile, next);
    next = ExpertRows(a, tile + gridDim.x, tiles);
    const int column = (a.gathers_q ? place.column : place.row) + piece * 8;
    const bool is_inside = column < a.gathered_columns;
    const char* const first = a.gathered.first_row(column * 2);
    const auto source_of = [&](int row) {
      return row < place.rows ? a.gathered.source_of(place.first + row) : GatheredRows::kNone;
    };
    uint32_t source = place.rows > 0 ? source_of(lane) : 0;
    for (int begin = 0; begin < place.rows; begin += kTileDepth) {
      // Whoever passes has read the step before the last one, whose places are taken now.
      sources.of_steps[turn][lane % 4][lane / 4] = source;
      meet(kGathering, kGatheringLanes);
      const auto* const of_lane = reinterpret_cast<const uint4*>(sources.of_steps[turn][row_of_4]);
      turn ^= 1;
      uint4 now = of_lane[0];
      source = source_of(begin + kTileDepth + lane);
      wait(&stages.empty[ring.stage], ring.phase ^ 1);
      const uint32_t target = a.gathers_q ? stages.b(ring.stage) : stages.a(ring.stage);
#pragma unroll
      for (int i = 0; i < kTileDepth / 16; ++i) {
        const uint4 after = of_lane[min(i + 1, kTileDepth / 16 - 1)];  // before the copies, which nothing moves across
        const uint32_t here = target + i * 2048, next_8 = here + 1024;
        a.gathered.copy({here + even, here + odd, next_8 + even, next_8 + odd}, first, now, is_inside);
        now = after;
      }
      arrive_after_copies(&stages.full[ring.stage]);
      ring.advance();
    }
  }
}

// The work of the warp that cleans.
__device__ inline void clean_tiles(const OuterArguments& a, const OuterStages& stages, int tiles) {
  const int lane = threadIdx.x % kWarpSize;
  Ring ring;
  uint32_t phases = 0;  // phases of `landed`, a bit for each stage
  ExpertRows next(a, blockIdx.x, tiles);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int rows = next.count(a), steps = next.steps(a);
    next = ExpertRows(a, tile + gridDim.x, tiles);
    if (rows % kProductRows == 0) {
      ring.skip(steps);
      continue;
    }
    ring.skip(steps - 1);
    wait(&stages.landed[ring.stage], phases >> ring.stage & 1);
    phases ^= 1u << ring.stage;
    // A row is 32 times 16 bytes: 8 in each of two pieces of both operands, wherever swizzling puts them.
    const uint32_t target = stages.a(ring.stage) + lane / 8 * kPieceBytes + lane % 8 * 16;
    const int begin = rows % kTileDepth, end = (begin + kProductRows - 1) / kProductRows * kProductRows;
    for (int row = begin; row < end; ++row) store_16_bytes(target + row * 128, 0, 0, 0, 0);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) arrive(&stages.full[ring.stage]);
    ring.advance();
  }
}

// d += the products of the first 16 * kProducts rows of a step. They are still running after the call.
template <int kProducts, typename T>
__device__ inline void multiply_step(float (&d)[128], uint32_t stage_a, uint32_t stage_b) {
  const uint64_t p = describe(stage_a, kPieceBytes, 1024), q = describe(stage_b, kPieceBytes, 1024);
  products_begin();
#pragma unroll
  for (int k = 0; k < kProducts; ++k) {
    const uint64_t at_p = p + k * (kProductRows * 128 >> 4), at_q = q + k * (kProductRows * 128 >> 4);
    multiply<0, true, true>(d, at_p, at_q, T());
    multiply<64, true, true>(d, at_p + (kPieceBytes >> 4), at_q, T());
  }
  products_commit();
}

// d += the products of a tile's rows. Those of the last step are still running after the call, from the stage that it returns.
template <bool kGathers, typename T>
__device__ inline int multiply_rows(float (&d)[128], const OuterStages& stages, Ring& ring, int rows) {
  const bool signals = threadIdx.x % kWarpSize == 0;
  int last = 0;
  for (int left = rows; left > 0; left -= kTileDepth) {
    wait(&stages.full[ring.stage], ring.phase);
    if (kGathers) fence_async_proxy();
    const uint32_t a = stages.a(ring.stage), b = stages.b(ring.stage);
    if (left > 3 * kProductRows) {
      multiply_step<4, T>(d, a, b);
    } else if (left > 2 * kProductRows) {
      multiply_step<3, T>(d, a, b);
    } else if (left > kProductRows) {
      multiply_step<2, T>(d, a, b);
    } else {
      multiply_step<1, T>(d, a, b);
    }
    products_wait<1>();
    if (left != rows && signals) arrive(&stages.empty[last]);
    last = ring.stage;
    ring.advance();
  }
  return last;
}

// The work of a warpgroup that multiplies: every second tile of the block.
template <bool kGathers, typename T>
__device__ inline void make_tiles(const OuterArguments& a, const OuterStages& stages, int tiles) {
  const int turn = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0) - 1;  // the compiler can see that all lanes have the same
  const uint32_t buffer = stages.a(kStages) + turn * kOuterResultBytes;
  const int step = gridDim.x;
  int tile = blockIdx.x + turn * step;
  Ring ring;
  if (turn == 1) ring.skip(ExpertRows(a, blockIdx.x, tiles).steps(a));
  // A stage's barrier tells odd phases from even ones only, so no warpgroup may wait for stages before the other has seen its own filled.
  constexpr int kTurn = 1, kTogether = 3;
  if (turn == 1) tell(kTurn, 2 * kWarpgroup);
  ExpertRows next(a, tile, tiles), of_other(a, tile + step, tiles);
  for (; tile < tiles; tile += 2 * step) {
    const OuterPlace place = place_of(a, tile, next);
    const int skipped = of_other.steps(a);
    next = ExpertRows(a, tile + 2 * step, tiles);
    of_other = ExpertRows(a, tile + 3 * step, tiles);
    float d[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0.0f;
    hold(d);
    meet(kTurn + turn, 2 * kWarpgroup);
    const int last = multiply_rows<kGathers, T>(d, stages, ring, place.rows);
    tell(kTurn + 1 - turn, 2 * kWarpgroup);
    products_wait<0>();
    hold(d);
    if (place.rows > 0 && threadIdx.x % kWarpSize == 0) arrive(&stages.empty[last]);
    ring.skip(skipped);
    store_through_shared<T>(a, d, place, buffer, kTogether + turn);
  }
  stores_wait_read();
}

#endif  // PMO_HOPPER_CODE

template <bool kGathers, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1) grouped_outer(const __grid_constant__ OuterArguments a) {
#ifdef PMO_HOPPER_CODE
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t full[kStages], empty[kStages], landed[kStages];
  if (threadIdx.x == 0) {
    for (uint64_t& each : landed) init_barrier(&each, 1);
  }
  const OuterStages stages = {make_stages(shared, full, empty, kGathers ? 1 + kGatheringLanes : 1), landed};
  const int tiles = a.num_experts * tiles_of_expert(a);
  if (threadIdx.x < kWarpgroup) {
    give_registers<kRegistersToLoad>();
    if (threadIdx.x < kWarpSize) {
      load_tiles<kGathers>(a, stages, tiles);
    } else if (threadIdx.x < 2 * kWarpSize) {
      clean_tiles(a, stages, tiles);
    } else if constexpr (kGathers) {
      __shared__ Sources sources;
      gather_tiles(a, stages, sources, tiles);
    }
  } else {
    take_registers<kRegistersToMultiply>();
    make_tiles<kGathers, T>(a, stages, tiles);
  }
#endif
}

template <bool kGathers, typename T>
int launch_outer(const OuterArguments& arguments, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_outer", &device, &limits)) return status;
  auto* kernel = grouped_outer<kGathers, T>;
  if (const int status = limit.raise(kernel, device, kSharedBytes)) return status;
  const int tiles = arguments.num_experts * arguments.p_tiles * arguments.q_tiles;
  const Grid grid = {static_cast<unsigned>(std::min(tiles, limits.multiprocessors)), kBlockThreads, kSharedBytes};
  return launch("grouped_outer", kernel, grid, stream, arguments);
}

int outer(const pmo_grouped_outer_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_outer(p)) return status;
  if (p.p_columns == 0 || p.q_columns == 0) return PMO_OK;
  const bool is_bfloat16 = p.dtype == PMO_BFLOAT16;
  OuterArguments a = {};
  const bool gathers_p = p.gathered == PMO_GROUPED_GATHERS_P, gathers_q = p.gathered == PMO_GROUPED_GATHERS_Q;
  if (p.num_rows > 0) {
    const Tensor rows_p = {p.p, 2, {p.p_columns, p.num_rows}, {p.p_row_stride}, {64, kTileDepth}};
    if (const int status = gathers_p ? PMO_OK : encode(rows_p, is_bfloat16, &a.p)) return status;
    const Tensor rows_q = {p.q, 2, {p.q_columns, p.num_rows}, {p.q_row_stride}, {64, kTileDepth}};
    if (const int status = gathers_q ? PMO_OK : encode(rows_q, is_bfloat16, &a.q)) return status;
  }
  a.gathers_q = gathers_q;
  a.gathered = {gathers_q ? p.q : p.p, p.row_to_token, static_cast<uint32_t>((gathers_q ? p.q_row_stride : p.p_row_stride) * 2),
                static_cast<int>(p.num_sources)};
  a.gathered_columns = static_cast<int>(gathers_q ? p.q_columns : p.p_columns);
  const Tensor results = {static_cast<char*>(p.out) + (p.first_p * p.out_columns + p.first_q) * 2,
                          3,
                          {p.q_columns, p.p_columns, p.num_experts},
                          {p.out_columns, p.out_rows * p.out_columns},
                          {64, kTileRows, 1}};
  if (const int status = encode(results, is_bfloat16, &a.out)) return status;
  a.first = p.first;
  a.stop = p.stop;
  a.num_rows = static_cast<int>(p.num_rows);
  a.num_experts = static_cast<int>(p.num_experts);
  a.p_tiles = static_cast<int>(divide_up(p.p_columns, int64_t{kTileRows}));
  a.q_tiles = static_cast<int>(divide_up(p.q_columns, int64_t{kTileColumns}));
  if (gathers_p || gathers_q) {
    return is_bfloat16 ? launch_outer<true, __nv_bfloat16>(a, stream) : launch_outer<true, __half>(a, stream);
  }
  return is_bfloat16 ? launch_outer<false, __nv_bfloat16>(a, stream) : launch_outer<false, __half>(a, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_grouped_outer_cuda(const pmo_grouped_outer_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::outer);
}
