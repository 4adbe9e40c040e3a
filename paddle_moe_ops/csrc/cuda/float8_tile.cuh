// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Tiles of 128 x 128 elements that become float8 codes, straight and transposed.
//
// A CTA of 256 threads has a tile. Thread t holds 8 x 8 elements: rows from t / 16 * 8 on, columns from t % 16 * 8 on. 16 threads
// store the 128 bytes of a row of codes. The transpose runs in registers, 8 x 8 bytes at a time, and then through shared memory,
// swizzled so that 16 threads access distinct banks.
#pragma once

#include <cstdint>

#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {

constexpr int kTile = 128;
constexpr int kTileSide = 8;  // a thread holds kTileSide x kTileSide elements
constexpr int kThreadsOfRow = kTile / kTileSide;
constexpr int kTileThreads = kThreadsOfRow * kThreadsOfRow;

// Elements in their own type: as float32 they would take registers that limit occupancy.
template <typename Rows>
struct TileElements {
  using Element = typename Rows::Element;
  uint32_t word[kTileSide][kTileSide * sizeof(Element) / 4];

  // Loads elements [row + i, column + j] of x, whose rows have `columns` elements, and 0 outside of it. `in_vectors`: x is aligned
  // to 16 bytes, and rows end at a multiple of 8 elements.
  __device__ void load(const void* x, bool in_vectors, int row, int column, int rows, int columns) {
    const Element* first = static_cast<const Element*>(x) + int64_t{row} * columns + column;
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
      const Element* const at = first + int64_t{i} * columns;
      const int left = row + i < rows ? columns - column : 0;
      if (in_vectors && left >= kTileSide) {
        load_row(i, at, true);
      } else {
        load_elements(i, at, left);
      }
    }
  }

  // Loads the first `left` elements of row i, and zeros after them.
  __device__ void load_elements(int i, const Element* row, int left) {
    Element elements[kTileSide];
#pragma unroll
    for (int j = 0; j < kTileSide; ++j) elements[j] = j < left ? row[j] : Rows::store(0.0f);
    memcpy(word[i], elements, sizeof(elements));
  }

  // Loads row i from an address that is a multiple of 16 bytes, or zeros.
  __device__ void load_row(int i, const Element* row, bool is_there) {
#pragma unroll
    for (int part = 0; part < kTileSide * static_cast<int>(sizeof(Element)) / 16; ++part) {
      uint4 loaded = make_uint4(0, 0, 0, 0);
      if (is_there) loaded = __ldg(reinterpret_cast<const uint4*>(row) + part);
      memcpy(word[i] + 4 * part, &loaded, 16);
    }
  }

  // Register fence: the compiler unpacks elements again after it, since all of them unpacked would be spilled.
  __device__ void fence() {
#pragma unroll
    for (auto& row : word) {
#pragma unroll
      for (uint32_t& each : row) asm volatile("" : "+r"(each));
    }
  }

  __device__ void unpack(int i, float (&values)[kTileSide]) const {
    Element elements[kTileSide];
    memcpy(elements, word[i], sizeof(elements));
#pragma unroll
    for (int j = 0; j < kTileSide; ++j) values[j] = Rows::load(elements[j]);
  }
};

// One form of the result, straight or transposed: rows of `columns` codes.
struct TileCodes {
  uint8_t* codes;
  int rows, columns;
  bool aligned;  // 16-byte stores: rows are aligned to 16 bytes and end at a multiple of 16

  TileCodes(void* codes, int64_t rows, int64_t columns)
      : codes(static_cast<uint8_t*>(codes)),
        rows(static_cast<int>(rows)),
        columns(static_cast<int>(columns)),
        aligned(address(codes) % 16 == 0 && columns % 16 == 0) {}

  // Stores min(kBytes, left) codes of a row.
  template <int kBytes>
  __device__ void store(uint8_t* target, const uint32_t (&word)[kBytes / 4], int left) const {
    if (aligned && left >= kBytes) {
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
};

// Maximum over the CTA of non-negative values. It synchronises all threads, so shared memory may be overwritten afterwards.
__device__ inline float max_over_tile(float value) {
  __shared__ uint32_t highest[kTileThreads / kWarpSize];
  const uint32_t of_warp = max_over_warp(__float_as_uint(value));  // bits of non-negative floats have the order of the values
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) highest[threadIdx.x / kWarpSize] = of_warp;
  __syncthreads();
  uint32_t all = 0;
  for (const uint32_t each : highest) all = max(all, each);
  return __uint_as_float(all);
}

// 4 x 4 transpose of bytes.
__device__ inline void transpose_bytes(uint32_t (&word)[4]) {
  const uint32_t a = __byte_perm(word[0], word[1], 0x5140), b = __byte_perm(word[0], word[1], 0x7362);
  const uint32_t c = __byte_perm(word[2], word[3], 0x5140), d = __byte_perm(word[2], word[3], 0x7362);
  word[0] = __byte_perm(a, c, 0x5410);
  word[1] = __byte_perm(a, c, 0x7632);
  word[2] = __byte_perm(b, d, 0x5410);
  word[3] = __byte_perm(b, d, 0x7632);
}

// The codes of a tile on their way from rows to columns, in shared memory.
class TransposedTile {
 public:
  // Puts the thread's codes, which are words of four columns.
  __device__ void put(const uint32_t (&codes)[kTileSide][kTileSide / 4]) {
    const int thread_row = threadIdx.x / kThreadsOfRow, thread_column = threadIdx.x % kThreadsOfRow;
#pragma unroll
    for (int j = 0; j < kTileSide; j += 4) {
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
        *reinterpret_cast<uint2*>(bytes_ + offset(thread_column * kTileSide + j + i, thread_row)) =
            make_uint2(upper[i], lower[i]);
      }
    }
  }

  // Stores all codes of the tile at (column_block, row_block) of a form that begins at row `first_row`, after a synchronisation.
  __device__ void store(const TileCodes& form, int64_t first_row, int column_block, int row_block) const {
#pragma unroll
    for (int i = 0; i < kTile * kTile / 16 / kTileThreads; ++i) {
      const int chunk = threadIdx.x + i * kTileThreads, of_column = chunk / (kTile / 16), sixteen = chunk % (kTile / 16);
      const uint2 low = *reinterpret_cast<const uint2*>(bytes_ + offset(of_column, 2 * sixteen));
      const uint2 high = *reinterpret_cast<const uint2*>(bytes_ + offset(of_column, 2 * sixteen + 1));
      const int row = column_block * kTile + of_column, column = row_block * kTile + 16 * sixteen;
      const uint32_t words[4] = {low.x, low.y, high.x, high.y};
      if (row >= form.rows) continue;
      form.store<16>(form.codes + (first_row + row) * form.columns + column, words, form.columns - column);
    }
  }

 private:
  // Swizzled offset of eight rows of a column.
  static __device__ int offset(int column, int rows_by_8) {
    return column * kTile + ((rows_by_8 ^ column / kTileSide) % kThreadsOfRow) * kTileSide;
  }

  alignas(16) uint8_t bytes_[kTile * kTile];
};

}  // namespace cuda
}  // namespace pmo
