// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Kernel parameters that the grouped GEMM kernels share, the tables of experts, and the dispatch from params structs to template
// arguments.
#pragma once

#include <type_traits>

#include "cuda/gemm/scheduler.cuh"
#include "pmo/grouped.h"

namespace pmo {
namespace cuda {

constexpr int kTileRows = PMO_GROUPED_TILE_ROWS, kTileColumns = PMO_GROUPED_TILE_COLUMNS;
constexpr int kTileK = 64;             // 16-bit elements of a K step: 128 bytes, the width of the swizzle
constexpr int kMaxSmemExperts = 1024;  // experts whose tables fit the shared memory of a CTA
constexpr int kTableBytes = (3 * kMaxSmemExperts + 1) * 4;

// Fields are those of pmo_grouped_product_params and pmo_grouped_float8_params, and in addition:
struct GroupedGemmParams {
  CUtensorMap rows, matrix;  // X and the stacked matrices
  const int32_t* row_to_token;
  const float* weights;
  const int32_t *first, *stop, *tiles, *window;
  void *out, *hidden;
  float* d_weights;
  int num_experts, inner, first_column, width;
  int up_offset;  // columns from a gate to its up projection in the matrix
  int first_row;
  int column_tiles;  // tiles of a row of tiles
  TileScheduler scheduler;
};

// Coordinates of a tile: its expert, its first row, the end of the expert's rows, its first column.
struct GroupedTile {
  int expert, row, end, column;
};

// Returns the kernel's params without tensor maps and scheduler. A tile has `tile_columns` columns of the result.
template <typename Params>
GroupedGemmParams gemm_params_of(const Params& p, int tile_columns) {
  GroupedGemmParams a = {};
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
  a.up_offset = static_cast<int>(p.outer / 2);
  a.first_row = static_cast<int>(p.first_row);
  a.column_tiles = static_cast<int>(divide_up(p.width, int64_t{tile_columns}));
  return a;
}

// Returns run(epilogue, is_transposed, element): two std::integral_constant and a value of the element type.
template <pmo_grouped_result kEpilogue, typename Run>
int dispatch_layout(const pmo_grouped_product_params& p, Run run) {
  const std::integral_constant<pmo_grouped_result, kEpilogue> epilogue;
  if (p.dtype == PMO_BFLOAT16) {
    return p.transpose ? run(epilogue, std::true_type(), __nv_bfloat16()) : run(epilogue, std::false_type(), __nv_bfloat16());
  }
  return p.transpose ? run(epilogue, std::true_type(), __half()) : run(epilogue, std::false_type(), __half());
}

template <typename Run>
int dispatch_epilogue(const pmo_grouped_product_params& p, Run run) {
  switch (p.result) {
    case PMO_GROUPED_GATED:
      return dispatch_layout<PMO_GROUPED_GATED>(p, run);
    case PMO_GROUPED_GRADIENT:
      return dispatch_layout<PMO_GROUPED_GRADIENT>(p, run);
    default:
      return dispatch_layout<PMO_GROUPED_PLAIN>(p, run);
  }
}

#ifdef PMO_SM90A

// The tables of GroupedGemmParams that schedulers search, in shared memory for up to kMaxSmemExperts experts, else in global
// memory.
struct ExpertTables {
  const int32_t *tiles, *first, *stop;
};

// Called by all threads of the CTA; a barrier follows.
__device__ inline ExpertTables load_tables(const GroupedGemmParams& p, int32_t* shared) {
  if (p.num_experts > kMaxSmemExperts) return {p.tiles, p.first, p.stop};
  int32_t *tiles = shared, *first = tiles + kMaxSmemExperts + 1, *stop = first + kMaxSmemExperts;
  for (int i = threadIdx.x; i <= p.num_experts; i += kBlockThreads) {
    tiles[i] = __ldg(p.tiles + i);
    if (i == p.num_experts) break;
    first[i] = __ldg(p.first + i);
    stop[i] = __ldg(p.stop + i);
  }
  return {tiles, first, stop};
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
