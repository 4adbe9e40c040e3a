// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Epilogue of the grouped wgrad (wgrad.cu): accumulators to global memory through shared memory, in boxes of 64 x 64.
//
// TMA stores write whole lines, and no lane computes addresses or exchanges words. The stores overlap the next tile's mainloop.
//
// With accumulation in float32, TMA loads the boxes of the result during the mainloop, accumulators are added to them, and TMA stores
// them. In the operands' dtype, each lane reads, adds and writes its own elements; that does not overlap the mainloop of its
// warpgroup.
#pragma once

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/tensor_map.h"
#include "cuda/gemm/wgrad_producer.cuh"

namespace pmo {
namespace cuda {

// The part of stacked matrices [E, out_rows, out_columns] that a launch computes: `rows` x `columns` elements of each.
struct WgradResults {
  void* out;
  int64_t num_experts, out_rows, out_columns, first_row, first_column, rows, columns;
  int32_t accumulation;
  bool is_bfloat16;

  // Sets the fields of the kernel's params that describe them. Returns a status.
  int set(WgradParams* a) const {
    const bool is_float32 = accumulation == PMO_GROUPED_ADDS_FLOAT32;
    char* const block = static_cast<char*>(out) + (first_row * out_columns + first_column) * (is_float32 ? 4 : 2);
    Tensor results = {block, 3, {columns, rows, num_experts}, {out_columns, out_rows * out_columns}, {64, 64, 1}};
    if (accumulation == PMO_GROUPED_ADDS) {
      a->sums = block;
      a->sums_expert_stride = out_rows * out_columns;
      a->sums_row_stride = out_columns;
      return PMO_OK;
    }
    if (!is_float32) return encode(results, is_bfloat16, &a->out);
    results.box[0] = 32;
    return encode(results, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, &a->out);
  }
};

#ifdef PMO_SM90A

// Writes accumulators d[first ...] of 64 x 64 to shared memory, as rows of the result.
template <typename T>
__device__ inline void stage_box(const float (&d)[128], int first, bool transposed_out, uint32_t buffer) {
  const int warp = threadIdx.x % kWarpgroupThreads / kWarpSize, lane = threadIdx.x % kWarpSize;
  const auto words_of = [&](int group, uint32_t (&word)[4]) {
    const int at = first + 8 * group;
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = Pair<T>::pack(d[at + 2 * i], d[at + 2 * i + 1]);
  };
  uint32_t word[4];
  if (transposed_out) {
    // 16 accumulator columns become rows: lanes 0 to 15 pass the addresses of the first eight rows, in two chunks of eight
    // elements.
    const uint32_t row = buffer + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      words_of(group, word);
      stmatrix_x4_trans(row + group * 16 * 128, word);
    }
    return;
  }
  // 16 rows x 16 columns: lanes 0 to 15 pass the addresses of the first eight columns of each row, the others of the last eight.
  const uint32_t row = buffer + (16 * warp + lane % 16) * 128;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    words_of(group, word);
    stmatrix_x4(row + ((2 * group + lane / 16) ^ lane % 8) * 16, word);
  }
}

// Stores a warpgroup's four boxes, or zeros if the tile has no rows. `buffer` has room for them, `barrier`
// a named barrier of the warpgroup.
template <typename T>
__device__ inline void epilogue_wgrad(const WgradParams& a, const float (&d)[128], const WgradTile& tile, uint32_t buffer,
                                      int barrier) {
  const bool stores = threadIdx.x % kWarpSize == 0;  // each warp stores one box
  if (stores) cp_async_bulk_wait_group_read();       // of the previous tile
  bar_sync(barrier, kWarpgroupThreads);
  if (tile.rows == 0) {
    for (int i = threadIdx.x % kWarpgroupThreads * 16; i < 4 * kBoxBytes; i += kWarpgroupThreads * 16)
      st_shared_v4(buffer + i, 0, 0, 0, 0);
  } else {
#pragma unroll
    for (int box = 0; box < 4; ++box) stage_box<T>(d, 32 * box, a.transposed_out, buffer + box * kBoxBytes);
  }
  fence_proxy_async();
  bar_sync(barrier, kWarpgroupThreads);
  if (!stores) return;
  const int box = threadIdx.x % kWarpgroupThreads / kWarpSize, column_b = tile.column_b + box * 64;
  tma_store_3d_evict_first(&a.out, buffer + box * kBoxBytes, a.transposed_out ? tile.column_a : column_b,
                           a.transposed_out ? column_b : tile.column_a, tile.expert);
  cp_async_bulk_commit_group();
}

// Float32 results of a warpgroup, 64 x 256, in shared memory: eight boxes of 64 rows of the result x 32 columns, which are 64 columns
// of A x 32 of B, or 64 columns of B x 32 of A if the result is transposed. Lane 0 of each warp loads and stores two boxes.
struct WgradSums {
  uint32_t boxes;
  uint64_t* loaded;  // mbarrier
  uint32_t phase;

  // Calls function(address of the box, its first column and row in the result) for each box of the warp.
  template <typename Function>
  __device__ void each_box(const WgradParams& a, const WgradTile& tile, const Function& function) const {
    const int warp = threadIdx.x % kWarpgroupThreads / kWarpSize;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int box = 2 * warp + i;
      function(boxes + box * kBoxBytes, a.transposed_out ? tile.column_a + 32 * i : tile.column_b + 32 * box,
               a.transposed_out ? tile.column_b + 64 * warp : tile.column_a);
    }
  }

  // Loads the boxes of a tile once the stores of the previous one have read them.
  __device__ void load(const WgradParams& a, const WgradTile& tile) const {
    if (threadIdx.x % kWarpSize != 0) return;
    cp_async_bulk_wait_group_read();
    mbarrier_arrive_expect_tx(loaded, 2 * kBoxBytes);
    each_box(a, tile, [&](uint32_t box, int x, int y) { tma_load_3d(box, &a.out, loaded, x, y, tile.expert); });
  }

  // Adds the accumulators of a tile and stores the boxes. A lane has rows r and r + 8 of the 64 columns of A, two columns of B in
  // each group of eight. `barrier` is a named barrier of the warpgroup.
  //
  // A batch is four groups, the columns of a box, so that loads of shared memory overlap. Odd rows take the groups of a batch in
  // another order: at any time, the four rows of a half-warp access four different pairs of chunks, hence all banks.
  __device__ void add(const WgradParams& a, const float (&d)[128], const WgradTile& tile, int barrier) {
    const int warp = threadIdx.x % kWarpgroupThreads / kWarpSize, lane = threadIdx.x % kWarpSize, quad = lane % 4;
    const int row = 16 * warp + lane / 4;
    const bool is_odd = row % 2 != 0;
    mbarrier_wait_parity(loaded, phase);
    phase ^= 1;
#pragma unroll
    for (int batch = 0; batch < 8; ++batch) {
      float2 sums[4][2];
      if (a.transposed_out) {
        const auto each = [&](const auto& function) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int group = 4 * batch + i, out_row = group % 8 * 8 + 2 * quad;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int column = row + 8 * half, chunk = column % 32 / 4;
              const uint32_t box = boxes + (group / 8 * 2 + column / 32) * kBoxBytes + column % 4 * 4;
              function(group, sums[i][half], half, box + out_row * 128 + (chunk ^ out_row % 8) * 16,
                       box + (out_row + 1) * 128 + (chunk ^ (out_row + 1) % 8) * 16);
            }
          }
        };
        each([&](int, float2& sum, int, uint32_t x, uint32_t y) { sum = {ld_shared_f32(x), ld_shared_f32(y)}; });
        each([&](int group, const float2& sum, int half, uint32_t x, uint32_t y) {
          st_shared_f32(x, sum.x + d[4 * group + 2 * half]);
          st_shared_f32(y, sum.y + d[4 * group + 2 * half + 1]);
        });
        continue;
      }
      const auto each = [&](const auto& function) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int chunk = (is_odd ? i ^ 2 : i) * 2 + quad / 2;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t at = boxes + batch * kBoxBytes + (row + 8 * half) * 128 + (chunk ^ row % 8) * 16 + quad % 2 * 8;
            function(i, half, sums[i][half], at);
          }
        }
      };
      each([&](int, int, float2& sum, uint32_t at) { sum = ld_shared_f32x2(at); });
      each([&](int i, int half, const float2& sum, uint32_t at) {
        const int even = 4 * (4 * batch + i) + 2 * half, odd = 4 * (4 * batch + (i ^ 2)) + 2 * half;
        st_shared_f32x2(at, {sum.x + (is_odd ? d[odd] : d[even]), sum.y + (is_odd ? d[odd + 1] : d[even + 1])});
      });
    }
    fence_proxy_async();
    bar_sync(barrier, kWarpgroupThreads);
    if (lane != 0) return;
    each_box(a, tile, [&](uint32_t box, int x, int y) { tma_store_3d_evict_first(&a.out, box, x, y, tile.expert); });
    cp_async_bulk_commit_group();
  }
};

// Adds a warpgroup's accumulators to the result of dtype T.
template <typename T>
__device__ inline void add_wgrad(const WgradParams& a, const float (&d)[128], const WgradTile& tile) {
  if (tile.rows == 0) return;
  constexpr int kGroups = 32, kBatch = 2;  // groups whose loads are in flight
  const int warp = threadIdx.x % kWarpgroupThreads / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int column_a = tile.column_a + 16 * warp + lane / 4, column_b = tile.column_b + lane % 4 * 2;
  T* const sums = static_cast<T*>(a.sums) + tile.expert * a.sums_expert_stride;
  const int64_t stride = a.sums_row_stride;
  const bool has_row[2] = {column_a < a.columns_a, column_a + 8 < a.columns_a};
  // Two sums: of one row, or of two rows if the result is transposed.
  const auto load = [&](int row_a, int row_b) {
    if (!a.transposed_out) return Pair<T>::unpack(*reinterpret_cast<const uint32_t*>(sums + row_a * stride + row_b));
    const T* const at = sums + row_b * stride + row_a;
    return make_float2(static_cast<float>(at[0]), static_cast<float>(at[stride]));
  };
  const auto store = [&](int row_a, int row_b, float x, float y) {
    const uint32_t word = Pair<T>::pack(x, y);
    if (!a.transposed_out) {
      *reinterpret_cast<uint32_t*>(sums + row_a * stride + row_b) = word;
      return;
    }
    auto* const at = reinterpret_cast<uint16_t*>(sums + row_b * stride + row_a);
    at[0] = static_cast<uint16_t>(word);
    at[stride] = static_cast<uint16_t>(word >> 16);
  };
#pragma unroll
  for (int first = 0; first < kGroups; first += kBatch) {
    float2 old[kBatch][2];
    const auto each = [&](const auto& function) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int b = column_b + 8 * (first + i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (b < a.columns_b && has_row[half]) function(i, half, column_a + 8 * half, b);
        }
      }
    };
    each([&](int i, int half, int row_a, int row_b) { old[i][half] = load(row_a, row_b); });
    each([&](int i, int half, int row_a, int row_b) {
      const int at = 4 * (first + i) + 2 * half;
      store(row_a, row_b, old[i][half].x + d[at], old[i][half].y + d[at + 1]);
    });
  }
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
