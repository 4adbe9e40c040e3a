// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// How the sums of a tile of grouped_turned.cu become results.
//
// A tile's sums are turned: their rows are columns of the result. 16 rows of the result at a time go through shared memory, where
// a row has 64 columns in 128 bytes that are swizzled. So each store writes whole lines of memory. For a gradient the copy engine has
// brought the hidden rows in the same form.
#pragma once

#include "cuda/grouped_results.cuh"
#include "cuda/grouped_stages.cuh"

namespace pmo {
namespace cuda {

constexpr int kTurnedRows = PMO_GROUPED_TURNED_ROWS, kTurnedColumns = 256;  // of a tile; the latter in pairs of gate and up
constexpr int kTurnedSums = kTurnedRows;                                    // of a lane: two blocks of 64 columns
constexpr int kStripRows = 16, kStripBytes = kStripRows * 128;
constexpr int kTurnedResultBytes = 4 * kStripBytes;  // of a warpgroup
// Of a strip of hidden: 64 columns of gates, then the 64 that they gate, and so on. A stage of operands has room for so many strips, and for the
// results that take their place.
constexpr int kHiddenStripBytes = 8 * kStripBytes, kHiddenStrips = 2;

// `rows` comes in boxes of 32 rows.
struct TurnedArguments : GroupedArguments {
  CUtensorMap rows_16, hidden_16;
  int32_t* counters;
  GatheredRows gathered;
};

// A tile: its expert, its first row, how many rows it has (0 after the last tile), its first column.
struct alignas(16) TurnedPlace {
  int expert, row, rows, column;
};

#ifdef PMO_HOPPER_CODE

// A lane's share of the weights of a tile's rows: that of each 32nd.
struct TurnedWeights {
  float held[kTurnedRows / kWarpSize];

  __device__ TurnedWeights(const float* weights, const TurnedPlace& place) {
#pragma unroll
    for (int i = 0; i < kTurnedRows / kWarpSize; ++i) {
      const int row = i * kWarpSize + threadIdx.x % kWarpSize;
      held[i] = weights != nullptr && row < place.rows ? __ldg(weights + place.row + row) : 1.0f;
    }
  }

  // That of a row of a strip, by all lanes together.
  __device__ float of(int strip, int row) const { return __shfl_sync(kAllLanes, held[strip / 2], strip % 2 * kStripRows + row); }
};

// Which rows of a tile have a token.
struct TurnedTokens {
  uint32_t held[kTurnedRows / kWarpSize];

  __device__ TurnedTokens(const int32_t* row_to_token, const TurnedPlace& place) {
#pragma unroll
    for (int i = 0; i < kTurnedRows / kWarpSize; ++i) {
      const int row = i * kWarpSize + threadIdx.x % kWarpSize;
      const bool has = row < place.rows && (row_to_token == nullptr || __ldg(row_to_token + place.row + row) >= 0);
      held[i] = __ballot_sync(kAllLanes, has);
    }
  }

  __device__ bool has(int strip, int row) const { return held[strip / 2] >> (strip % 2 * kStripRows + row) & 1; }
};

// Where a lane is in the strips of its warpgroup.
struct StripLane {
  uint32_t to_write, to_read;
  int row, column;  // of what it stores: 8 columns

  __device__ explicit StripLane(uint32_t buffer) {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarpSize, warp = thread / kWarpSize;
    // A warp has 16 columns: lanes 0 to 7 and 16 to 23 have the addresses of rows of the first eight, the others of the last.
    const int piece = 2 * warp + lane / 8 % 2;
    to_write = buffer + (lane / 16 * 8 + lane % 8) * 128 + (piece ^ lane % 8) * 16;
    row = thread / 8;
    column = thread % 8 * 8;
    to_read = buffer + row * 128 + (thread % 8 ^ row % 8) * 16;
  }
};

__device__ inline uint4 load_16_bytes(uint32_t source) {
  uint4 got;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
               : "r"(source)
               : "memory");
  return got;
}

// A lane's 8 columns of a row of a strip to memory.
template <typename T>
__device__ inline void store_from_strip(void* target, int64_t width, int64_t row, int column, uint32_t source) {
  const uint4 got = load_16_bytes(source);
  *reinterpret_cast<uint4*>(static_cast<T*>(target) + row * width + column) = got;
}

// The results of a warpgroup: 128 columns of a tile, from `column` on. `buffer` is the warpgroup's, and `together` a barrier of its own.
template <typename T>
__device__ inline void store_turned_plain(const TurnedArguments& p, const float (&d)[kTurnedSums], const TurnedPlace& place,
                                          const TurnedWeights& weights, int column, uint32_t buffer, int together, int& turn) {
  const StripLane lane(buffer);
  const int quad = threadIdx.x % 4 * 2;
#pragma unroll
  for (int strip = 0; strip < kTurnedRows / kStripRows; ++strip) {
    if (strip * kStripRows >= place.rows) break;
    // Strips take turns in two buffers, so whoever passes the barrier has read the one that is written next.
    const uint32_t here = turn * 2 * kStripBytes;
    turn ^= 1;
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = weights.of(strip, i / 2 * 8 + quad + i % 2);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = block * kTurnedSums / 2 + strip * 8 + 2 * i;
        word[i] = Pair<T>::pack(d[at] * weight[i / 2 * 2], d[at + 1] * weight[i / 2 * 2 + 1]);
      }
      store_turned_matrices(lane.to_write + here + block * kStripBytes, word);
    }
    meet(together, kWarpgroup);
    const int row = strip * kStripRows + lane.row;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int at = column + 64 * block + lane.column;
      if (row < place.rows && at < p.width) {
        store_from_strip<T>(p.out, p.width, place.row + row, at, lane.to_read + here + block * kStripBytes);
      }
    }
  }
}

// The same of SwiGLU: the first block of sums are 64 columns of gates, the second one what they gate.
template <typename T>
__device__ inline void store_turned_gated(const TurnedArguments& p, const float (&d)[kTurnedSums], const TurnedPlace& place,
                                          int column, uint32_t buffer, int together) {
  const StripLane lane(buffer);
#pragma unroll
  for (int strip = 0; strip < kTurnedRows / kStripRows; ++strip) {
    if (strip * kStripRows >= place.rows) break;
    uint32_t gate[4], up[4], act[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = strip * 8 + 2 * i;
      gate[i] = Pair<T>::pack(d[at], d[at + 1]);
      up[i] = Pair<T>::pack(d[at + kTurnedSums / 2], d[at + kTurnedSums / 2 + 1]);
      const float2 g = Pair<T>::unpack(gate[i]), u = Pair<T>::unpack(up[i]);
      act[i] = Pair<T>::pack(g.x * sigmoid(g.x) * u.x, g.y * sigmoid(g.y) * u.y);
    }
    meet(together, kWarpgroup);  // the strip before has been read
    store_turned_matrices(lane.to_write, act);
    if (p.hidden != nullptr) {
      store_turned_matrices(lane.to_write + kStripBytes, gate);
      store_turned_matrices(lane.to_write + 2 * kStripBytes, up);
    }
    meet(together, kWarpgroup);
    const int row = strip * kStripRows + lane.row, at = column + lane.column;
    if (row < place.rows && at < p.width) {
      store_from_strip<T>(p.out, p.width, place.row + row, at, lane.to_read);
      if (p.hidden == nullptr) continue;
      const int64_t width = int64_t{p.width} * 2;
      store_from_strip<T>(p.hidden, width, place.row + row, at, lane.to_read + kStripBytes);
      store_from_strip<T>(p.hidden, width, place.row + row, at + p.width, lane.to_read + 2 * kStripBytes);
    }
  }
}

// The gradient of SwiGLU in a strip: `hidden`, where the warpgroup's part of the strip is, becomes the gradient of itself, and `scaled` the
// result. `sums` gets 16 numbers of each warp of the warpgroup.
template <typename T>
__device__ inline void make_turned_gradient(const TurnedArguments& p, const float (&d)[kTurnedSums], const TurnedWeights& weights,
                                            const TurnedTokens& tokens, int strip, int column, uint32_t hidden, uint32_t scaled,
                                            float* sums) {
  const StripLane lane(0);
  const int thread = threadIdx.x % kWarpgroup, warp = thread / kWarpSize, quad = thread % 4 * 2;
  bool has[4];
  float weight[4], dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of four rows
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i / 2 * 8 + quad + i % 2;
    const float given = weights.of(strip, row);
    has[i] = tokens.has(strip, row);
    weight[i] = has[i] ? given : 0.0f;
  }
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const uint32_t gates = hidden + 2 * block * kStripBytes + lane.to_write, ups = gates + kStripBytes;
    uint32_t gate[4], up[4], act[4];
    load_turned_matrices(gates, gate);
    load_turned_matrices(ups, up);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = block * kTurnedSums / 2 + strip * 8 + 2 * i, row = i / 2 * 2;
      const bool is_inside = column + 64 * block + 16 * warp + i % 2 * 8 < p.width;
      const bool has_low = is_inside && has[row], has_high = is_inside && has[row + 1];
      const float low = has_low ? d[at] : 0.0f, high = has_high ? d[at + 1] : 0.0f;
      const uint32_t kept = (has_low ? 0x0000FFFFu : 0) | (has_high ? 0xFFFF0000u : 0);
      gate[i] &= kept;
      up[i] &= kept;
      const float2 made = gradient_of_two<T>(gate[i], up[i], low, high, make_float2(weight[row], weight[row + 1]), act[i]);
      dots[row] = fmaf(made.x, low, dots[row]);
      dots[row + 1] = fmaf(made.y, high, dots[row + 1]);
    }
    store_turned_matrices(gates, gate);
    store_turned_matrices(ups, up);
    store_turned_matrices(scaled + block * kStripBytes + lane.to_write, act);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int apart = 4; apart < kWarpSize; apart *= 2) dots[i] = __fadd_rn(dots[i], __shfl_xor_sync(kAllLanes, dots[i], apart));
    if (thread % kWarpSize < 4) sums[warp * kStripRows + i / 2 * 8 + quad + i % 2] = dots[i];
  }
}

// What `make_turned_gradient` made, to memory.
template <typename T>
__device__ inline void store_turned_gradient(const TurnedArguments& p, const TurnedPlace& place, int strip, int column,
                                             uint32_t hidden, uint32_t scaled, const float* sums) {
  const StripLane lane(0);
  const int thread = threadIdx.x % kWarpgroup, row = strip * kStripRows + lane.row;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int at = column + 64 * block + lane.column;
    if (row >= place.rows || at >= p.width) continue;
    const int64_t of_row = place.row + row, width = int64_t{p.width} * 2;
    const uint32_t gates = hidden + 2 * block * kStripBytes + lane.to_read;
    store_from_strip<T>(p.hidden, width, of_row, at, gates);
    store_from_strip<T>(p.hidden, width, of_row, at + p.width, gates + kStripBytes);
    store_from_strip<T>(p.out, p.width, of_row, at, scaled + block * kStripBytes + lane.to_read);
  }
  const int row_of_sum = strip * kStripRows + thread;
  if (p.d_weights != nullptr && thread < kStripRows && row_of_sum < place.rows && column < p.width) {
    float sum = sums[thread];
#pragma unroll
    for (int i = 1; i < kWarpgroup / kWarpSize; ++i) sum = __fadd_rn(sum, sums[i * kStripRows + thread]);
    const int tiles = (p.width + kTileColumns - 1) / kTileColumns;
    p.d_weights[int64_t{place.row + row_of_sum} * tiles + column / kTileColumns] = sum;
  }
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
