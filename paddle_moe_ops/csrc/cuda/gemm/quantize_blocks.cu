// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Block quantisation of stacked matrices to float8_e4m3fn, one scale per 128 x 128 block, with an optional transposed copy.
// Memory-bound.
//
//   x           [E, A, B] contiguous
//   straight    codes [E, A, B], scales [E, ceil(A / 128), ceil(B / 128)]
//   transposed  codes [E, B, A], scales [E, ceil(B / 128), ceil(A / 128)]
//
// A CTA of 256 threads quantises one block per iteration of a grid-stride loop. Thread t holds 8 x 8 elements: rows from t / 16 *
// 8 on, columns from t % 16 * 8 on. 16 threads store the 128 bytes of a row of codes. The transpose runs in registers, 8 x 8
// bytes at a time, and then through shared memory, swizzled so that 16 threads access distinct banks.
//
// Bytes moved: E A B (itemsize + 1 per form).
#include <cfloat>
#include <cstdint>

#include "common/checks.h"
#include "cuda/float8.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"
#include "pmo/grouped_float8.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kSide = 8;  // a thread holds kSide x kSide elements
constexpr int kThreadsOfRow = kBlock / kSide;
constexpr int kThreads = kThreadsOfRow * kThreadsOfRow;
constexpr int kBand = 8;  // rows of blocks in a band

// One form of the result, straight or transposed: rows of `columns` codes.
struct Form {
  uint8_t* codes;
  float* scales;
  int rows, columns;
  bool aligned;  // 16-byte stores: rows are aligned to 16 bytes and end at a multiple of 16
};

struct QuantizeBlocksParams {
  const void* x;
  Form straight, transposed;
  float amax_min;
  int row_blocks, column_blocks;
  int64_t blocks;
  bool in_vectors;  // 16-byte loads: x is aligned to 16 bytes and rows end at a multiple of 8 elements
};

// Maximum over the CTA of non-negative values. It synchronises all threads, so shared memory may be overwritten afterwards.
__device__ float max_over_block(float value) {
  __shared__ uint32_t highest[kThreads / kWarpSize];
  const uint32_t of_warp = max_over_warp(__float_as_uint(value));  // bits of non-negative floats have the order of the values
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) highest[threadIdx.x / kWarpSize] = of_warp;
  __syncthreads();
  uint32_t all = 0;
  for (const uint32_t each : highest) all = max(all, each);
  return __uint_as_float(all);
}

// Eight consecutive elements of x in their own type: as float32 they would take registers that limit occupancy.
template <typename Rows>
struct Eight {
  using Element = typename Rows::Element;
  uint32_t word[kSide * sizeof(Element) / 4];

  __device__ void load(const QuantizeBlocksParams& work, const Element* row, int columns) {
    if (work.in_vectors && columns >= kSide) {
#pragma unroll
      for (int i = 0; i < kSide * static_cast<int>(sizeof(Element)) / 16; ++i) {
        const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(row) + i);
        memcpy(word + 4 * i, &loaded, 16);
      }
    } else {
      Element elements[kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) elements[i] = i < columns ? row[i] : Rows::store(0.0f);
      memcpy(word, elements, sizeof(elements));
    }
  }

  __device__ void unpack(float (&values)[kSide]) const {
    Element elements[kSide];
    memcpy(elements, word, sizeof(elements));
#pragma unroll
    for (int i = 0; i < kSide; ++i) values[i] = Rows::load(elements[i]);
  }
};

template <typename Rows>
constexpr int kMinBlocksPerSm = sizeof(typename Rows::Element) == 2 ? 3 : 2;  // CTAs per SM

// Stores min(kBytes, left) codes of a row.
template <int kBytes>
__device__ void store_codes(const Form& form, uint8_t* target, const uint32_t (&word)[kBytes / 4], int left) {
  if (form.aligned && left >= kBytes) {
    Vector<kBytes> all;
    memcpy(&all, word, kBytes);
    *reinterpret_cast<Vector<kBytes>*>(target) = all;
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      if (i < left) target[i] = static_cast<uint8_t>(word[i / 4] >> (8 * (i % 4)));
    }
  }
}

// 4 x 4 transpose of bytes.
__device__ void transpose_bytes(uint32_t (&word)[4]) {
  const uint32_t a = __byte_perm(word[0], word[1], 0x5140), b = __byte_perm(word[0], word[1], 0x7362);
  const uint32_t c = __byte_perm(word[2], word[3], 0x5140), d = __byte_perm(word[2], word[3], 0x7362);
  word[0] = __byte_perm(a, c, 0x5410);
  word[1] = __byte_perm(a, c, 0x7632);
  word[2] = __byte_perm(b, d, 0x5410);
  word[3] = __byte_perm(b, d, 0x7632);
}

// Swizzled offset in shared memory of eight rows of a column.
__device__ int smem_offset(int column, int rows_by_8) {
  return column * kBlock + ((rows_by_8 ^ column / kSide) % kThreadsOfRow) * kSide;
}

template <typename Rows>
__global__ void __launch_bounds__(kThreads, kMinBlocksPerSm<Rows>)
    quantize_blocks(const __grid_constant__ QuantizeBlocksParams work) {
  using Element = typename Rows::Element;
  __shared__ alignas(16) uint8_t transposed[kBlock * kBlock];
  const Form &straight = work.straight, &across = work.transposed;
  const int thread_row = threadIdx.x / kThreadsOfRow, thread_column = threadIdx.x % kThreadsOfRow;
  for (int64_t block = blockIdx.x; block < work.blocks; block += gridDim.x) {
    const int64_t of_matrix = int64_t{work.row_blocks} * work.column_blocks, matrix = block / of_matrix;
    const int inside = static_cast<int>(block - matrix * of_matrix);
    // Rasterisation in bands, column by column: neighbouring parts of both forms are written at about the same time.
    const int band = inside / (kBand * work.column_blocks), rest = inside - band * kBand * work.column_blocks;
    const int height = min(work.row_blocks - band * kBand, kBand);
    const int column_block = rest / height, row_block = band * kBand + rest - column_block * height;
    const int row = row_block * kBlock + thread_row * kSide, column = column_block * kBlock + thread_column * kSide;
    const int64_t first = matrix * straight.rows * straight.columns + int64_t{row} * straight.columns + column;
    const int columns_left = straight.columns - column;
    Eight<Rows> elements[kSide];
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const int columns = row + i < straight.rows ? columns_left : 0;
      elements[i].load(work, static_cast<const Element*>(work.x) + first + int64_t{i} * straight.columns, columns);
    }
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      float values[kSide];
      elements[i].unpack(values);
#pragma unroll
      for (int j = 0; j < kSide; ++j) amax = fmaxf(amax, fabsf(values[j]));  // fmaxf ignores NaN
    }
    const float scale = float8_scale(max_over_block(amax), work.amax_min), inverse = __frcp_rn(scale);
    uint32_t codes[kSide][kSide / 4];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      float values[kSide];
      elements[i].unpack(values);
#pragma unroll
      for (int j = 0; j < kSide; j += 4) {
        const float* v = values + j;
        codes[i][j / 4] = float8_pair(v[0], v[1], inverse) | float8_pair(v[2], v[3], inverse) << 16;
      }
      if (straight.codes != nullptr && row + i < straight.rows) {
        store_codes<kSide>(straight, straight.codes + first + int64_t{i} * straight.columns, codes[i], columns_left);
      }
    }
    if (threadIdx.x == 0 && straight.codes != nullptr)
      straight.scales[matrix * of_matrix + int64_t{row_block} * work.column_blocks + column_block] = scale;
    if (across.codes == nullptr) continue;
    if (threadIdx.x == 0) across.scales[matrix * of_matrix + int64_t{column_block} * work.row_blocks + row_block] = scale;
#pragma unroll
    for (int j = 0; j < kSide; j += 4) {
      uint32_t upper[4], lower[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        upper[i] = codes[i][j / 4];
        lower[i] = codes[i + 4][j / 4];
      }
      transpose_bytes(upper);
      transpose_bytes(lower);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int offset = smem_offset(thread_column * kSide + j + i, thread_row);
        *reinterpret_cast<uint2*>(transposed + offset) = make_uint2(upper[i], lower[i]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlock * kBlock / 16 / kThreads; ++i) {
      const int chunk = threadIdx.x + i * kThreads, of_column = chunk / (kBlock / 16), sixteen = chunk % (kBlock / 16);
      const uint2 low = *reinterpret_cast<const uint2*>(transposed + smem_offset(of_column, 2 * sixteen));
      const uint2 high = *reinterpret_cast<const uint2*>(transposed + smem_offset(of_column, 2 * sixteen + 1));
      const int target_row = column_block * kBlock + of_column, target_column = row_block * kBlock + 16 * sixteen;
      const int64_t target = (matrix * across.rows + target_row) * across.columns + target_column;
      const uint32_t words[4] = {low.x, low.y, high.x, high.y};
      if (target_row < across.rows) store_codes<16>(across, across.codes + target, words, across.columns - target_column);
    }
  }
}

int quantize(const pmo_quantize_blocks_params& p, cudaStream_t stream) {
  if (const int status = check_quantize_blocks(p)) return status;
  if (p.num_matrices == 0 || p.num_rows == 0 || p.num_columns == 0) return PMO_OK;
  const auto aligned = [](const void* codes, int64_t columns) { return address(codes) % 16 == 0 && columns % 16 == 0; };
  const int rows = static_cast<int>(p.num_rows), columns = static_cast<int>(p.num_columns);
  QuantizeBlocksParams work = {};
  work.x = p.x;
  work.straight = {static_cast<uint8_t*>(p.codes), p.scales, rows, columns, aligned(p.codes, columns)};
  work.transposed = {static_cast<uint8_t*>(p.turned_codes), p.turned_scales, columns, rows, aligned(p.turned_codes, rows)};
  work.amax_min = p.amax_min;
  work.row_blocks = static_cast<int>(divide_up(p.num_rows, int64_t{kBlock}));
  work.column_blocks = static_cast<int>(divide_up(p.num_columns, int64_t{kBlock}));
  work.blocks = p.num_matrices * work.row_blocks * work.column_blocks;
  work.in_vectors = address(p.x) % 16 == 0 && columns % kSide == 0;
  const Grid grid = {grid_for(work.blocks, 1), kThreads};
  return with_rows(
      p.dtype, [&](auto rows_of) { return launch("quantize_blocks", quantize_blocks<decltype(rows_of)>, grid, stream, work); });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_quantize_blocks_cuda(const pmo_quantize_blocks_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::quantize);
}
