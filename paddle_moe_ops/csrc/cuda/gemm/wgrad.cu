// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Sums of the outer products of each expert's rows, which are the gradients of its matrix, on Hopper's tensor cores.
//
// A block stays for the whole launch and makes tiles of 128 columns of one operand and 256 of the other, which are handed out expert by
// expert, in bands. They can be wide in either operand: results are turned as they are stored. Of the block's three warpgroups the first
// loads, 32 rows of both operands at a time, into a ring of stages (outer_tiles.cuh): a warp for each operand, and one that finds the places
// of tiles. The other two multiply, 64 of the 128 columns each, and store (outer_results.cuh). Tiles have as many steps as their expert has
// rows for, possibly none.
//
// Nothing is multiplied while a tile is stored. So whatever can be done before is: the place of the next tile is found by another warp and
// taken while the last products run, the first products of a tile give the sums their values, and what a tile's results are stored through is
// not that of the operands.
//
// The rows of an expert may end inside a step. What comes after them belongs to the next expert or to none, and may be NaN. A
// product takes 16 rows, so the last step of a tile makes only the products that it has rows for. Rows up to the next multiple of 16
// are set to zero in shared memory first, in both operands.
//
// One operand may be rows of tokens, which two warps of the first warpgroup gather where they are: 16 bytes a lane, swizzled as the copy
// engine does it, with zeros after an expert's rows.
//
// Moved: both operands once from memory and, per tile, from the L2; the results once. The L2 may give up results first, since it is needed for
// the operands.
#include <algorithm>
#include <utility>

#include "common/checks.h"
#include "cuda/gemm/tensor_map.h"
#include "cuda/gemm/wgrad_epilogue.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace pmo {
namespace cuda {
namespace {

#ifdef PMO_HOPPER_CODE

// d += the products of the first 16 * kProducts rows of a step, or d = those, in a tile's first step. They are still running after the call.
template <int kProducts, typename T>
__device__ inline void multiply_step(float (&d)[128], uint32_t stage_a, uint32_t stage_b, bool is_first) {
  const uint64_t a = describe(stage_a, kStepPieceBytes, 1024), b = describe(stage_b, kStepPieceBytes, 1024);
  products_begin();
#pragma unroll
  for (int k = 0; k < kProducts; ++k) {
    constexpr int kNext = kProductRows * 128 >> 4;
    multiply_columns<kColumnsB, 0, true, true, T>(d, a + k * kNext, b + k * kNext, k > 0 || !is_first);
  }
  products_commit();
}

// d = the products of a tile's rows, from this byte of operand a on. Those of the last step are still running after the call, from the
// stage that it returns. `meeting` is a barrier of the warpgroup.
template <bool kGathers, typename T>
__device__ inline int multiply_rows(float (&d)[128], const OuterStages& stages, OuterRing& ring, int rows, int from_a,
                                    int meeting) {
  const bool signals = threadIdx.x % kWarpSize == 0;
  int last = 0;
  for (int left = rows; left > 0; left -= kStepRows) {
    wait(&stages.full[ring.stage], ring.phase);
    if (kGathers) fence_async_proxy();
    if (left < kStepRows && left % kProductRows != 0) clean_stage(stages.a(ring.stage), left, meeting);
    const uint32_t a = stages.a(ring.stage) + from_a, b = stages.b(ring.stage);
    if (left > kProductRows) {
      multiply_step<2, T>(d, a, b, left == rows);
    } else {
      multiply_step<1, T>(d, a, b, left == rows);
    }
    products_wait<1>();
    if (left != rows && signals) arrive(&stages.empty[last]);
    last = ring.stage;
    ring.advance();
  }
  return last;
}

// The work of a warpgroup that multiplies.
template <bool kGathers, typename T>
__device__ inline void make_tiles(const OuterArguments& a, const OuterStages& stages, OuterPlaces& places) {
  constexpr int kMeeting = 3;
  const int number =
      __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0) - 1;  // the compiler can see that all lanes have the same
  const uint32_t buffer = stages.a(kOuterStages) + number * kBytesOfResults;
  OuterRing ring;
  OuterPlaces::Ring at;
  OuterPlace next = places.take(at);
  while (next.expert != kNoTile) {
    OuterPlace place = next;
    place.of_a += 64 * number;
    float d[128];  // the first products give it its values
    hold(d);
    const int last = multiply_rows<kGathers, T>(d, stages, ring, place.rows, number * kStepPieceBytes, kMeeting + number);
    next = places.take(at);
    products_wait<0>();
    hold(d);
    if (place.rows > 0 && threadIdx.x % kWarpSize == 0) arrive(&stages.empty[last]);
    store_pieces<T>(a, d, place, buffer, kMeeting + number);
  }
  stores_wait_read();
}

#endif  // PMO_HOPPER_CODE

template <bool kGathers, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1) grouped_outer(const __grid_constant__ OuterArguments a) {
#ifdef PMO_HOPPER_CODE
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t full[kOuterStages], empty[kOuterStages];
  __shared__ OuterPlaces places;
  if (threadIdx.x == 0) places.init(2 * kWarpgroup / kWarpSize + 1 + (kGathers ? kGatheringLanes / kWarpSize : 1));
  const OuterStages stages = {
      make_stages<kOuterStages, kOuterStageBytes>(shared, full, empty, 1 + (kGathers ? kGatheringLanes : 1), 2)};
  if (threadIdx.x < kWarpgroup) {
    give_registers<kGathers ? kRegistersToGather : kRegistersToLoad>();
    const int warp = threadIdx.x / kWarpSize;
    if (warp == 0) load_pieces<kPiecesA, kStepPieces>(a, stages, places);
    if (warp == 1) find_places(a, places);
    if constexpr (kGathers) {
      __shared__ Sources sources;
      if (warp >= 2) gather_tiles(a, stages, places, sources);
    } else {
      if (warp == 2) load_pieces<0, kPiecesA>(a, stages, places);
    }
  } else {
    take_registers<kGathers ? kRegistersBesideGathering : kRegistersToMultiply>();
    make_tiles<kGathers, T>(a, stages, places);
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
  if (const int status = limit.raise(kernel, device, kOuterBytes)) return status;
  const int tiles = arguments.num_experts * arguments.a_tiles * arguments.b_tiles;
  const Grid grid = {static_cast<unsigned>(std::min(tiles, limits.multiprocessors)), kBlockThreads, kOuterBytes};
  return launch("grouped_outer", kernel, grid, stream, arguments);
}

template <bool kGathers>
int launch_of_dtype(const OuterArguments& a, bool is_bfloat16, cudaStream_t stream) {
  return is_bfloat16 ? launch_outer<kGathers, __nv_bfloat16>(a, stream) : launch_outer<kGathers, __half>(a, stream);
}

// Columns of tiles, some of them outside the result, if tiles have 256 columns of an operand with so many of them.
int64_t columns_of_tiles(int64_t wide, int64_t other) {
  return divide_up(wide, int64_t{kColumnsB}) * kColumnsB * divide_up(other, int64_t{kColumnsA}) * kColumnsA;
}

int outer(const pmo_grouped_outer_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_outer(p)) return status;
  if (p.p_columns == 0 || p.q_columns == 0) return PMO_OK;
  const bool is_bfloat16 = p.dtype == PMO_BFLOAT16, gathers = p.gathered != PMO_GROUPED_GATHERS_NONE;
  struct Operand {
    const void* rows;
    int64_t columns, row_stride;
  };
  Operand of_a = {p.p, p.p_columns, p.p_row_stride}, of_b = {p.q, p.q_columns, p.q_row_stride};
  OuterArguments a = {};
  const bool p_wastes_less = columns_of_tiles(p.p_columns, p.q_columns) < columns_of_tiles(p.q_columns, p.p_columns);
  a.turned = gathers ? p.gathered == PMO_GROUPED_GATHERS_Q : p_wastes_less;
  if (a.turned) std::swap(of_a, of_b);
  const auto encode_rows = [&](const Operand& of, CUtensorMap* map) {
    return encode({of.rows, 2, {of.columns, p.num_rows}, {of.row_stride}, {64, kStepRows}}, is_bfloat16, map);
  };
  if (p.num_rows > 0) {
    if (const int status = gathers ? PMO_OK : encode_rows(of_a, &a.a)) return status;
    if (const int status = encode_rows(of_b, &a.b)) return status;
  }
  a.gathered = {of_a.rows, p.row_to_token, static_cast<uint32_t>(of_a.row_stride * 2), static_cast<int>(p.num_sources)};
  a.gathered_columns = static_cast<int>(of_a.columns);
  const Tensor results = {static_cast<char*>(p.out) + (p.first_p * p.out_columns + p.first_q) * 2,
                          3,
                          {p.q_columns, p.p_columns, p.num_experts},
                          {p.out_columns, p.out_rows * p.out_columns},
                          {64, 64, 1}};
  if (const int status = encode(results, is_bfloat16, &a.out)) return status;
  a.first = p.first;
  a.stop = p.stop;
  a.num_rows = static_cast<int>(p.num_rows);
  a.num_experts = static_cast<int>(p.num_experts);
  a.a_tiles = static_cast<int>(divide_up(of_a.columns, int64_t{kColumnsA}));
  a.b_tiles = static_cast<int>(divide_up(of_b.columns, int64_t{kColumnsB}));
  a.counter = {p.counters};
  return gathers ? launch_of_dtype<true>(a, is_bfloat16, stream) : launch_of_dtype<false>(a, is_bfloat16, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_grouped_outer_cuda(const pmo_grouped_outer_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::outer);
}
