// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Quantisation of rows to float8_e4m3fn as K-major operands of wgrads, by blocks of 128 rows of an expert. Memory-bound.
//
//   x       [num_sources, C] tokens, gathered by row_to_token, or the rows themselves
//   codes   [num_blocks, C, 128]: blocks are transposed, with zeros after an expert's last row
//   scales  float32 [num_blocks, C]: one per column of a block, or [num_blocks, ceil(C / 128)]: one per 128 x 128
//   values  float32 [M, C], optional: codes times scales
//
// A CTA quantises a row block, up to kTilesOfItem * 128 columns of it, per iteration of a grid-stride loop. Each 128 columns are a tile
// of cuda/float8_tile.cuh, whose elements are loaded while the previous tile is quantised. Maxima of columns meet in shared memory.
//
// Bytes moved: M C (itemsize + 1); gathered tokens come from the L2 where they have several rows.
#include <algorithm>
#include <cfloat>
#include <cstdint>

#include "common/checks.h"
#include "common/dtypes.h"
#include "cuda/float8.cuh"
#include "cuda/float8_tile.cuh"
#include "pmo/grouped_float8.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kTileWarps = kTileThreads / kWarpSize;

struct QuantizeColumnsParams : pmo_quantize_columns_params {
  TileCodes form;   // of codes
  bool in_vectors;  // whether rows of x are aligned to 16 bytes and end at a multiple of 8 elements
};

constexpr int kTilesOfItem = 8;

template <typename Rows>
constexpr int kMinBlocksPerSm = sizeof(typename Rows::Element) == 2 ? 2 : 1;  // CTAs per SM

// Expert of a row block, by all lanes of a warp: the number of experts whose blocks end before it. Each step asks 32 of them.
__device__ inline int expert_of_block(const int32_t* tiles, int num_experts, int block) {
  int low = 0, count = num_experts;
  while (count > 1) {
    const int step = divide_up(count, kWarpSize), at = low + (static_cast<int>(threadIdx.x) % kWarpSize + 1) * step;
    const int ended = __popc(__ballot_sync(kAllLanes, at < low + count && __ldg(tiles + at) <= block)) * step;
    low += ended;
    count = min(step, count - ended);
  }
  return low;
}

// Larger magnitude of each of two 16-bit elements, or of one float32. A NaN in `other` is ignored.
template <typename Pair>
__device__ inline uint32_t larger_of_pairs(uint32_t magnitudes, uint32_t other) {
  Pair a, b;
  memcpy(&a, &magnitudes, 4);
  memcpy(&b, &other, 4);
  a = __hmax2(a, __habs2(b));
  memcpy(&magnitudes, &a, 4);
  return magnitudes;
}
__device__ inline uint32_t larger_magnitudes(BFloat16Rows, uint32_t magnitudes, uint32_t other) {
  return larger_of_pairs<__nv_bfloat162>(magnitudes, other);
}
__device__ inline uint32_t larger_magnitudes(Float16Rows, uint32_t magnitudes, uint32_t other) {
  return larger_of_pairs<__half2>(magnitudes, other);
}
__device__ inline uint32_t larger_magnitudes(Float32Rows, uint32_t magnitudes, uint32_t other) {
  return __float_as_uint(fmaxf(__uint_as_float(magnitudes), fabsf(__uint_as_float(other))));
}

// A thread's maxima over its rows, packed as the elements of a row.
template <typename Rows>
struct ColumnMaxima {
  using Element = typename Rows::Element;
  static constexpr int kWords = kTileSide * sizeof(Element) / 4;
  uint32_t word[kWords] = {};

  __device__ void add(const uint32_t (&other)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = larger_magnitudes(Rows(), word[i], other[i]);
  }

  __device__ float of_all() const {
    Element elements[kTileSide];
    memcpy(elements, word, sizeof(elements));
    float amax = 0.0f;
#pragma unroll
    for (const Element element : elements) amax = fmaxf(amax, Rows::load(element));
    return amax;
  }
};

// Factor of the values of a group, NaN if one of them is infinite.
__device__ inline float inverse_of(float scale, float amax) {
  return isinf(amax) ? __int_as_float(0x7FC00000) : __frcp_rn(scale);
}

// Scales of the columns of a tile, and their reciprocals, in shared memory.
template <typename Rows>
class ColumnScales {
 public:
  // Called by all threads, and synchronises them twice. `amax` are a thread's maxima.
  __device__ void compute(ColumnMaxima<Rows> amax, float amax_min) {
    const int lane = threadIdx.x % kWarpSize;
    ColumnMaxima<Rows> other;
#pragma unroll
    for (int i = 0; i < ColumnMaxima<Rows>::kWords; ++i) other.word[i] = __shfl_xor_sync(kAllLanes, amax.word[i], kThreadsOfRow);
    amax.add(other.word);
    if (lane < kThreadsOfRow) memcpy(of_warps_[threadIdx.x / kWarpSize] + lane * kTileSide, amax.word, sizeof(amax.word));
    __syncthreads();
    if (threadIdx.x < kTile) {
      float all = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kTileWarps; ++warp) all = fmaxf(all, Rows::load(of_warps_[warp][threadIdx.x]));
      const float scale = float8_scale(all, amax_min);
      scales_[threadIdx.x] = scale;
      inverses_[threadIdx.x] = inverse_of(scale, all);
    }
    __syncthreads();
  }

  __device__ float of_thread() const { return scales_[threadIdx.x]; }  // for the first kTile threads

  // Loads those of the thread's columns.
  __device__ void load(float (&scales)[kTileSide], float (&inverses)[kTileSide]) const {
    const int column = threadIdx.x % kThreadsOfRow * kTileSide;
    memcpy(scales, scales_ + column, sizeof(scales));
    memcpy(inverses, inverses_ + column, sizeof(inverses));
  }

 private:
  alignas(16) typename Rows::Element of_warps_[kTileWarps][kTile];
  alignas(16) float scales_[kTile];
  alignas(16) float inverses_[kTile];
};

// The rows of a thread: rows of x, or negative for zeros.
struct ThreadRows {
  int first, count;  // the first one, and their number up to the expert's last row
  int source[kTileSide];

  __device__ ThreadRows(const QuantizeColumnsParams& p, int block) {
    const int expert = expert_of_block(p.tiles, static_cast<int>(p.num_experts), block);
    first = __ldg(p.first + expert) + (block - __ldg(p.tiles + expert)) * kTile + threadIdx.x / kThreadsOfRow * kTileSide;
    count = min(__ldg(p.stop + expert), static_cast<int>(p.num_rows)) - first;
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
      source[i] = -1;
      if (i < count) source[i] = p.row_to_token == nullptr ? first + i : __ldg(p.row_to_token + first + i);
      if (source[i] >= p.num_sources) source[i] = -1;
    }
  }

  template <typename Rows>
  __device__ void load(const QuantizeColumnsParams& p, int column, TileElements<Rows>* elements) const {
    const auto* const x = static_cast<const typename Rows::Element*>(p.x) + column;
    const int left = static_cast<int>(p.num_columns) - column;
    if (p.in_vectors) {
#pragma unroll
      for (int i = 0; i < kTileSide; ++i) elements->load_row(i, x + source[i] * p.x_row_stride, source[i] >= 0 && left > 0);
    } else {
#pragma unroll
      for (int i = 0; i < kTileSide; ++i) elements->load_elements(i, x + source[i] * p.x_row_stride, source[i] >= 0 ? left : 0);
    }
  }
};

// kValues: writes values, and codes only if they are wanted.
template <typename Rows, bool kByBlocks, bool kValues>
__global__ void __launch_bounds__(kTileThreads, kMinBlocksPerSm<Rows>)
    quantize_columns(const __grid_constant__ QuantizeColumnsParams p) {
  __shared__ TransposedTile transposed;
  __shared__ ColumnScales<Rows> of_columns;
  const int columns = static_cast<int>(p.num_columns), tiles = divide_up(columns, kTile), items = divide_up(tiles, kTilesOfItem);
  const int64_t blocks = min(int64_t{__ldg(p.tiles + p.num_experts)}, p.num_blocks);
  for (int64_t item = blockIdx.x; item < blocks * items; item += gridDim.x) {
    const int block = static_cast<int>(item / items), first_tile = static_cast<int>(item - int64_t{block} * items) * kTilesOfItem;
    const ThreadRows rows(p, block);
    const int thread_column = threadIdx.x % kThreadsOfRow * kTileSide;
    TileElements<Rows> next;
    rows.load(p, first_tile * kTile + thread_column, &next);
    const int end_tile = min(first_tile + kTilesOfItem, tiles);
    for (int tile = first_tile; tile < end_tile; ++tile) {
      TileElements<Rows> elements = next;
      if (tile + 1 < end_tile) rows.load(p, (tile + 1) * kTile + thread_column, &next);
      ColumnMaxima<Rows> amax;
#pragma unroll
      for (const auto& row : elements.word) amax.add(row);
      elements.fence();
      float scales[kTileSide], inverses[kTileSide];
      if constexpr (kByBlocks) {
        const float all = max_over_tile(amax.of_all()), scale = float8_scale(all, p.amax_min), inverse = inverse_of(scale, all);
#pragma unroll
        for (int j = 0; j < kTileSide; ++j) {
          scales[j] = scale;
          inverses[j] = inverse;
        }
        if (p.scales != nullptr && threadIdx.x == 0) p.scales[int64_t{block} * tiles + tile] = scale;
      } else {
        of_columns.compute(amax, p.amax_min);
        of_columns.load(scales, inverses);
        const int column = tile * kTile + static_cast<int>(threadIdx.x);
        if (p.scales != nullptr && threadIdx.x < kTile && column < columns) {
          p.scales[int64_t{block} * columns + column] = of_columns.of_thread();
        }
      }
      uint32_t codes[kTileSide][kTileSide / 4];
#pragma unroll
      for (int i = 0; i < kTileSide; ++i) {
        float values[kTileSide];
        elements.unpack(i, values);
        float8_codes(values, inverses, codes[i]);
        if constexpr (kValues) {
          if (i >= rows.count) continue;
          float* const target = p.values + int64_t{rows.first + i} * columns + tile * kTile + thread_column;
#pragma unroll
          for (int j = 0; j < kTileSide; ++j) {
            const float value = float8_value(codes[i][j / 4] >> (8 * (j % 4)) & 0xFF);
            if (tile * kTile + thread_column + j < columns)
              target[j] = value == value ? __fmul_rn(value, scales[j]) : __int_as_float(0x7FC00000);
          }
        }
      }
      if (!kValues || p.codes != nullptr) transposed.put(codes);
      __syncthreads();
      if (!kValues || p.codes != nullptr) transposed.store(p.form, int64_t{block} * columns, tile, 0);
    }
  }
}

int run_quantize_columns(const pmo_quantize_columns_params& p, cudaStream_t stream) {
  if (const int status = check_quantize_columns(p)) return status;
  if (p.num_rows == 0 || p.num_columns == 0 || p.num_blocks == 0) return PMO_OK;
  const int64_t blocks = std::min(p.num_blocks, divide_up(p.num_rows, int64_t{kTile}) + p.num_experts);
  const Grid grid = {grid_for(blocks * divide_up(p.num_columns, int64_t{kTile * kTilesOfItem}), 1), kTileThreads};
  const int64_t itemsize = dtype_size(p.dtype);
  const bool in_vectors = address(p.x) % 16 == 0 && p.x_row_stride * itemsize % 16 == 0 && p.num_columns % kTileSide == 0;
  const QuantizeColumnsParams params = {p, {p.codes, p.num_columns, kTile}, in_vectors};
  return with_rows(p.dtype, [&](auto rows_of) {
    using Rows = decltype(rows_of);
    auto* kernel = p.by_blocks ? quantize_columns<Rows, true, false> : quantize_columns<Rows, false, false>;
    if (p.values != nullptr) kernel = p.by_blocks ? quantize_columns<Rows, true, true> : quantize_columns<Rows, false, true>;
    return launch("quantize_columns", kernel, grid, stream, params);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_quantize_columns_cuda(const pmo_quantize_columns_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::run_quantize_columns);
}
