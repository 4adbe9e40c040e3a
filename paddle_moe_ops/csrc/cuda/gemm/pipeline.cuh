// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// What the grouped products of Hopper share: blocks of three warpgroups, one that loads and two that make tiles, and a ring of stages between
// them.
#pragma once

#include <type_traits>

#include "cuda/gemm/epilogue.cuh"

namespace pmo {
namespace cuda {

constexpr int kWarpgroup = 128;
constexpr int kBlockThreads = 3 * kWarpgroup;
constexpr int kBytesA = kTileRows * kTileDepth * 2;
constexpr int kPieceBytes = 64 * 128;  // 64 rows of 128 bytes, which are swizzled
// Experts whose tables a block holds in shared memory.
constexpr int kHeldExperts = 1024;
constexpr int kTableBytes = (3 * kHeldExperts + 1) * 4;

// What kernels get of params, but for descriptors; tiles have so many columns of the result.
template <typename Params>
GroupedArguments arguments_of(const Params& p, int columns) {
  GroupedArguments a = {};
  a.row_to_token = p.row_to_token;
  a.weights = p.weights;
  a.first = p.first;
  a.stop = p.stop;
  a.tiles = p.tiles;
  a.window = p.window;
  a.out = p.out;
  a.hidden = p.hidden;
  a.d_weights = p.d_weights;
  a.num_experts = static_cast<int>(p.num_experts);
  a.inner = static_cast<int>(p.inner);
  a.first_column = static_cast<int>(p.first_column);
  a.width = static_cast<int>(p.width);
  a.to_up = static_cast<int>(p.outer / 2);
  a.first_row = static_cast<int>(p.first_row);
  a.column_tiles = static_cast<int>(divide_up(p.width, int64_t{columns}));
  return a;
}

// Rows of tokens that warps gather, 16 bytes a lane.
struct GatheredRows {
  const void* x;
  const int32_t* row_to_token;
  uint32_t row_bytes;  // from one row of x to the next one
  int num_sources;

#ifdef PMO_HOPPER_CODE
  static constexpr uint32_t kNone = 0xFFFFFFFFu;  // a row of zeros

  __device__ uint32_t source_of(int row) const {
    const auto token = static_cast<uint32_t>(__ldg(row_to_token + row));
    return token < static_cast<uint32_t>(num_sources) ? token : kNone;
  }

  // Where the lane's bytes of the first row of x are. In registers, so that one instruction gives those of any row.
  __device__ const char* first_row(int byte) const {
    const char* first = static_cast<const char*>(x) + byte;
    asm volatile("" : "+l"(first));
    return first;
  }

  // 16 bytes of each of kCount rows, `first` being those of the first row of x; target_of(i) is where those of the i-th one go.
  template <int kCount, typename TargetOf>
  __device__ void copy(const uint32_t* sources, const char* first, bool is_inside, TargetOf target_of) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      copy_16_bytes(target_of(i), first + uint64_t{sources[i]} * row_bytes, is_inside && sources[i] != kNone);
    }
  }
#endif
};

// Calls run(result, whether matrices are transposed, a number of the dtype) for a product; the first two are std::integral_constant.
template <pmo_grouped_result kResult, typename Run>
int with_result(const pmo_grouped_product_params& p, Run run) {
  const std::integral_constant<pmo_grouped_result, kResult> result;
  if (p.dtype == PMO_BFLOAT16) {
    return p.transpose ? run(result, std::true_type(), __nv_bfloat16()) : run(result, std::false_type(), __nv_bfloat16());
  }
  return p.transpose ? run(result, std::true_type(), __half()) : run(result, std::false_type(), __half());
}

template <typename Run>
int with_kind(const pmo_grouped_product_params& p, Run run) {
  switch (p.result) {
    case PMO_GROUPED_GATED:
      return with_result<PMO_GROUPED_GATED>(p, run);
    case PMO_GROUPED_GRADIENT:
      return with_result<PMO_GROUPED_GRADIENT>(p, run);
    default:
      return with_result<PMO_GROUPED_PLAIN>(p, run);
  }
}

#ifdef PMO_HOPPER_CODE

constexpr int kRegistersToLoad = 40, kRegistersToMultiply = 232;

template <int kStages, int kBytes>
struct StagesOf {
  uint32_t first;
  uint64_t *full, *empty;

  __device__ uint32_t a(int stage) const { return first + stage * kBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + kBytesA; }
};

// So many arrivals fill a stage, and each of `readers` warpgroups reads it.
template <int kStages, int kBytes>
__device__ inline StagesOf<kStages, kBytes> make_stages(uint8_t* shared, uint64_t (&full)[kStages], uint64_t (&empty)[kStages],
                                                        int arrivals = 1, int readers = 1) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&full[stage], arrivals);
      init_barrier(&empty[stage], readers * kWarpgroup / kWarpSize);
    }
    fence_barrier_init();
  }
  __syncthreads();
  return {(shared_address(shared) + 1023) / 1024 * 1024, full, empty};
}

// Those of the arguments, in shared memory unless there are too many experts.
struct Tables {
  const int32_t *tiles, *first, *stop;
};

// Every thread takes part; a barrier must follow.
__device__ inline Tables hold_tables(const GroupedArguments& p, int32_t* shared) {
  if (p.num_experts > kHeldExperts) return {p.tiles, p.first, p.stop};
  int32_t *tiles = shared, *first = tiles + kHeldExperts + 1, *stop = first + kHeldExperts;
  for (int i = threadIdx.x; i <= p.num_experts; i += kBlockThreads) {
    tiles[i] = __ldg(p.tiles + i);
    if (i == p.num_experts) break;
    first[i] = __ldg(p.first + i);
    stop[i] = __ldg(p.stop + i);
  }
  return {tiles, first, stop};
}

// The compiler moves no accumulators across this.
template <int kCount>
__device__ inline void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
