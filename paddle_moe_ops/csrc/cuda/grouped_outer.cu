// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Sums of the outer products of each expert's rows, which are the gradients of its matrix, on Hopper's tensor cores.
//
// A block stays for the whole launch and takes every gridDim.x-th tile of the experts' results. Of its three warpgroups the first loads: 64
// rows of both operands at a time, into a ring of stages (outer_tiles.cuh). Tiles have as many steps as their expert has rows for, possibly none.
//
// In tiles of 128 x 128 the other two warpgroups take turns: while one multiplies a tile, the other stores the one before it
// (outer_results.cuh), and each skips the stages of the ring that the other one takes. In tiles of 128 x 256 each makes 64 rows of the same
// tile. These read a quarter less for the same products, but are stored while nothing is multiplied. They can be wide in either operand:
// results are turned as they are stored.
//
// The rows of an expert may end inside a step. What comes after them belongs to the next expert or to none, and may be NaN. A
// product takes 16 rows, so the last step of a tile makes only the products that it has rows for. Rows up to the next multiple of 16
// are set to zero in shared memory first, in both operands.
//
// One operand may be rows of tokens, which the other two warps of the first warpgroup gather where they are: 16 bytes a lane, swizzled as
// the copy engine does it, with zeros after an expert's rows.
//
// Moved: both operands once from memory and, per tile, from the L2; the results once.
#include <algorithm>
#include <utility>

#include "common/checks.h"
#include "cuda/hopper_host.h"
#include "cuda/outer_results.cuh"

namespace pmo {
namespace cuda {
namespace {

#ifdef PMO_HOPPER_CODE

// d += the products of the first 16 * kProducts rows of a step. They are still running after the call.
template <int kProducts, bool kWide, typename T>
__device__ inline void multiply_step(float (&d)[128], uint32_t stage_a, uint32_t stage_b) {
  const uint64_t a = describe(stage_a, kPieceBytes, 1024), b = describe(stage_b, kPieceBytes, 1024);
  products_begin();
#pragma unroll
  for (int k = 0; k < kProducts; ++k) {
    const uint64_t at_a = a + k * (kProductRows * 128 >> 4), at_b = b + k * (kProductRows * 128 >> 4);
    if constexpr (kWide) {
      multiply_wide<true, true>(d, at_a, at_b, T());
    } else {
      multiply<0, true, true>(d, at_a, at_b, T());
      multiply<64, true, true>(d, at_a + (kPieceBytes >> 4), at_b, T());
    }
  }
  products_commit();
}

// d += the products of a tile's rows, from this byte of operand a on. Those of the last step are still running after the call, from the
// stage that it returns. `meeting` is a barrier of the warpgroup.
template <bool kGathers, bool kWide, typename T>
__device__ inline int multiply_rows(float (&d)[128], const OuterStages<kWide>& stages, OuterRing<kWide>& ring, int rows,
                                    int from_a, int meeting) {
  const bool signals = threadIdx.x % kWarpSize == 0;
  int last = 0;
  for (int left = rows; left > 0; left -= kTileDepth) {
    wait(&stages.full[ring.stage], ring.phase);
    if (kGathers) fence_async_proxy();
    if (left < kTileDepth && left % kProductRows != 0) clean_stage<kWide>(stages.a(ring.stage), left, meeting);
    const uint32_t a = stages.a(ring.stage) + from_a, b = stages.b(ring.stage);
    if (left > 3 * kProductRows) {
      multiply_step<4, kWide, T>(d, a, b);
    } else if (left > 2 * kProductRows) {
      multiply_step<3, kWide, T>(d, a, b);
    } else if (left > kProductRows) {
      multiply_step<2, kWide, T>(d, a, b);
    } else {
      multiply_step<1, kWide, T>(d, a, b);
    }
    products_wait<1>();
    if (left != rows && signals) arrive(&stages.empty[last]);
    last = ring.stage;
    ring.advance();
  }
  return last;
}

// The work of a warpgroup that multiplies.
//
// A stage's barrier tells odd phases from even ones only, so no warpgroup that takes turns may wait for stages before the other has seen its
// own filled.
template <bool kGathers, bool kWide, typename T>
__device__ inline void make_tiles(const OuterArguments& a, const OuterStages<kWide>& stages, int tiles) {
  using Shape = OuterShape<kWide>;
  constexpr int kTurn = 1, kTogether = 3;
  constexpr int kWarpgroups = kWide ? 1 : 2;  // that take turns
  const int number =
      __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0) - 1;  // the compiler can see that all lanes have the same
  const uint32_t buffer = stages.a(Shape::kStages) + number * Shape::kHeldPieces * kPieceBytes;
  const int step = gridDim.x;
  int tile = blockIdx.x;
  OuterRing<kWide> ring;
  if (!kWide && number == 1) {
    ring.skip(steps_of(ExpertRows(a, tile, tiles).count(a)));
    tile += step;
    tell(kTurn, 2 * kWarpgroup);
  }
  ExpertRows next(a, tile, tiles), of_other(a, kWide ? tiles : tile + step, tiles);
  for (; tile < tiles; tile += kWarpgroups * step) {
    const OuterPlace place = place_of<kWide>(a, tile, next);
    const int skipped = steps_of(of_other.count(a));
    next = ExpertRows(a, tile + kWarpgroups * step, tiles);
    if (!kWide) of_other = ExpertRows(a, tile + 3 * step, tiles);
    float d[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0.0f;
    hold(d);
    if (!kWide) meet(kTurn + number, 2 * kWarpgroup);
    const int last =
        multiply_rows<kGathers, kWide, T>(d, stages, ring, place.rows, kWide ? number * kPieceBytes : 0, kTogether + number);
    if (!kWide) tell(kTurn + 1 - number, 2 * kWarpgroup);
    products_wait<0>();
    hold(d);
    if (place.rows > 0 && threadIdx.x % kWarpSize == 0) arrive(&stages.empty[last]);
    ring.skip(skipped);
    OuterPlace stored = place;
    if (kWide) stored.of_a += 64 * number;
    store_pieces<Shape::kHeldPieces, kWide, T>(a, d, stored, buffer, kTogether + number);
  }
  stores_wait_read();
}

#endif  // PMO_HOPPER_CODE

template <bool kGathers, bool kWide, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1) grouped_outer(const __grid_constant__ OuterArguments a) {
#ifdef PMO_HOPPER_CODE
  constexpr int kStages = OuterShape<kWide>::kStages, kBytes = OuterShape<kWide>::kBytes;
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const OuterStages<kWide> stages = {
      make_stages<kStages, kBytes>(shared, full, empty, kGathers ? 1 + kGatheringLanes : 1, kWide ? 2 : 1)};
  const int tiles = a.num_experts * tiles_of_expert(a);
  if (threadIdx.x < kWarpgroup) {
    give_registers<kGathers ? kRegistersToGather : kRegistersToLoad>();
    if (threadIdx.x < kWarpSize) {
      load_tiles<kGathers, kWide>(a, stages, tiles);
    } else if constexpr (kGathers) {
      __shared__ Sources sources;
      if (threadIdx.x >= kWarpgroup - kGatheringLanes) gather_tiles<kWide>(a, stages, sources, tiles);
    }
  } else {
    take_registers<kGathers ? kRegistersBesideGathering : kRegistersToMultiply>();
    make_tiles<kGathers, kWide, T>(a, stages, tiles);
  }
#endif
}

template <bool kGathers, bool kWide, typename T>
int launch_outer(const OuterArguments& arguments, cudaStream_t stream) {
  constexpr int kSharedBytes = OuterShape<kWide>::kSharedBytes;
  static SharedMemoryLimit limit;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_outer", &device, &limits)) return status;
  auto* kernel = grouped_outer<kGathers, kWide, T>;
  if (const int status = limit.raise(kernel, device, kSharedBytes)) return status;
  const int tiles = arguments.num_experts * arguments.a_tiles * arguments.b_tiles;
  const Grid grid = {static_cast<unsigned>(std::min(tiles, limits.multiprocessors)), kBlockThreads, kSharedBytes};
  return launch("grouped_outer", kernel, grid, stream, arguments);
}

template <bool kGathers, bool kWide>
int launch_of_dtype(const OuterArguments& a, bool is_bfloat16, cudaStream_t stream) {
  return is_bfloat16 ? launch_outer<kGathers, kWide, __nv_bfloat16>(a, stream) : launch_outer<kGathers, kWide, __half>(a, stream);
}

// Columns of tiles, some of them outside the result, if tiles have 256 columns of an operand with so many of them.
int64_t columns_of_tiles(int64_t wide, int64_t other) {
  return divide_up(wide, int64_t{256}) * 256 * divide_up(other, int64_t{128}) * 128;
}

int outer(const pmo_grouped_outer_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_outer(p)) return status;
  if (p.p_columns == 0 || p.q_columns == 0) return PMO_OK;
  const bool is_bfloat16 = p.dtype == PMO_BFLOAT16, gathers = p.gathered != PMO_GROUPED_GATHERS_NONE;
  const bool is_wide = p.wide != 0;
  struct Operand {
    const void* rows;
    int64_t columns, row_stride;
  };
  Operand of_a = {p.p, p.p_columns, p.p_row_stride}, of_b = {p.q, p.q_columns, p.q_row_stride};
  OuterArguments a = {};
  const bool p_wastes_less = columns_of_tiles(p.p_columns, p.q_columns) < columns_of_tiles(p.q_columns, p.p_columns);
  a.turned = gathers ? p.gathered == PMO_GROUPED_GATHERS_Q : is_wide && p_wastes_less;
  if (a.turned) std::swap(of_a, of_b);
  const auto encode_rows = [&](const Operand& of, CUtensorMap* map) {
    return encode({of.rows, 2, {of.columns, p.num_rows}, {of.row_stride}, {64, kTileDepth}}, is_bfloat16, map);
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
  a.a_tiles = static_cast<int>(divide_up(of_a.columns, int64_t{kTileRows}));
  a.b_tiles =
      static_cast<int>(divide_up(of_b.columns, int64_t{is_wide ? OuterShape<true>::kColumnsB : OuterShape<false>::kColumnsB}));
  if (is_wide)
    return gathers ? launch_of_dtype<true, true>(a, is_bfloat16, stream) : launch_of_dtype<false, true>(a, is_bfloat16, stream);
  return gathers ? launch_of_dtype<true, false>(a, is_bfloat16, stream) : launch_of_dtype<false, false>(a, is_bfloat16, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_grouped_outer_cuda(const pmo_grouped_outer_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::outer);
}
