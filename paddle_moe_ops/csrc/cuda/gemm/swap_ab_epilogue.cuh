// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// How the sums of a tile of grouped_turned.cu become results.
//
// A tile's sums are turned: their rows are columns of the result. They go through shared memory in strips of 16 rows of the result, where
// a row has 64 columns in 128 bytes that are swizzled. So each store writes whole lines of memory. For a gradient the copy engine has
// brought the hidden rows in the same form, and takes the results from there while the next ones are made.
#pragma once

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/pipeline.cuh"

namespace pmo {
namespace cuda {

constexpr int kTurnedRows = PMO_GROUPED_TURNED_ROWS, kTurnedColumns = 256;  // of a tile; the latter in pairs of gate and up
constexpr int kTurnedSums = kTurnedRows;                                    // of a lane: two blocks of 64 columns
constexpr int kStripRows = 16, kStripBytes = kStripRows * 128, kPairBytes = 2 * kStripBytes;
constexpr int kTurnedResultBytes = 4 * kStripBytes;                // of a warpgroup
constexpr int kSumsOfStrip = kWarpgroup / kWarpSize * kStripRows;  // of the dot products of a gradient
// Of hidden, a stage of operands has room for two strips and for the results that take their place: 64 columns of gates, the 64 that they
// gate, and so on.
constexpr int kHiddenBytes = 8 * kPairBytes;

// `rows` comes in boxes of 32 and 16 rows; hidden and results in boxes of two strips or one, the former gates and what they gate together.
// The last of their three coordinates tells the two apart.
struct TurnedArguments : GroupedArguments {
  CUtensorMap rows_16, hidden_32, hidden_16, out_32, out_16;
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

// Of a gradient: the weights of a tile's rows, 0 without a token, and which rows have one. They are in shared memory, and so many tiles' are
// there at a time: the warp that finds places writes those of a tile after both warpgroups have begun the last tile but one.
constexpr int kTilesOfRows = 4;

struct alignas(16) TurnedRows {
  float weights[kTurnedRows];
  uint32_t has[kTurnedRows / kWarpSize];
  bool all;

  // By a warp. Rows after the tile's last one count as if they had a token: what becomes of them is not stored.
  __device__ void fill(const GroupedArguments& p, const TurnedPlace& place) {
    const int lane = threadIdx.x % kWarpSize;
    bool has_all = true;
#pragma unroll
    for (int i = 0; i < kTurnedRows / kWarpSize; ++i) {
      const int row = i * kWarpSize + lane;
      const bool is_there = row < place.rows;
      const bool has_token = !is_there || p.row_to_token == nullptr || __ldg(p.row_to_token + place.row + row) >= 0;
      weights[row] = !has_token ? 0.0f : is_there && p.weights != nullptr ? __ldg(p.weights + place.row + row) : 1.0f;
      const uint32_t found = __ballot_sync(kAllLanes, has_token);
      if (lane == 0) has[i] = found;
      has_all = has_all && found == kAllLanes;
    }
    if (lane == 0) all = has_all;
    __syncwarp();
  }

  // Of rows `row` and `row` + 1, an even number, 16 bits each.
  __device__ uint32_t mask(int row) const {
    const uint32_t bits = has[row / kWarpSize] >> row % kWarpSize;
    return (bits & 1 ? 0x0000FFFFu : 0) | (bits & 2 ? 0xFFFF0000u : 0);
  }
};

// Where a lane is in a strip.
struct StripLane {
  uint32_t to_write, to_read;
  int row, column;  // of what it stores: 8 columns

  __device__ StripLane() {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarpSize, warp = thread / kWarpSize;
    // A warp has 16 columns: lanes 0 to 7 and 16 to 23 have the addresses of rows of the first eight, the others of the last.
    const int piece = 2 * warp + lane / 8 % 2;
    to_write = (lane / 16 * 8 + lane % 8) * 128 + (piece ^ lane % 8) * 16;
    row = thread / 8;
    column = thread % 8 * 8;
    to_read = row * 128 + (thread % 8 ^ row % 8) * 16;
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

// By one lane: the first strip of a pair, or both, to memory from 64 columns on. Of hidden, gates and then what they gate.
__device__ inline void store_out(const TurnedArguments& p, uint32_t source, int column, int row, bool has_two) {
  store_box(has_two ? &p.out_32 : &p.out_16, source, column, row, 0);
}
__device__ inline void store_hidden(const TurnedArguments& p, uint32_t source, int column, int row, bool has_two) {
  if (has_two) {
    store_box(&p.hidden_32, source, column, row, 0);
  } else {
    store_box(&p.hidden_16, source, column, row, 0);
    store_box(&p.hidden_16, source + kPairBytes, column, row, 1);
  }
}

// Two strips at a time wait for the copy engine in a warpgroup's part of the matrix, in the stage that was multiplied last, and in its buffer:
// kKinds results of 64 columns each. Warp i stores those of kind i while the next strips are made.
template <int kKinds>
struct StripPairs {
  static constexpr int kInStage = 2 * 64 * 128 / kStripBytes, kPieces = kInStage + kTurnedResultBytes / kStripBytes;
  static constexpr int kBuffers = kPieces / (2 * kKinds);
  static_assert(kBuffers >= 2, "two strips are written while the ones before are read");
  uint32_t in_stage, buffer;
  int warp;  // of the warpgroup

  __device__ uint32_t piece(int strip, int kind) const {
    const int i = (strip / 2 % kBuffers * kKinds + kind) * 2 + strip % 2;
    return i < kInStage ? in_stage + i * kStripBytes : buffer + (i - kInStage) * kStripBytes;
  }

  // What all lanes wrote goes to memory, by store(the first row, whether both strips are whole) in the first `kinds` warps. Whoever has passed
  // the barrier may write the next two strips: those that were there before have been read.
  template <typename Store>
  __device__ void send(int together, int strip, const TurnedPlace& place, int kinds, Store store) const {
    fence_async_proxy();
    if (is_elected()) stores_wait_read<kBuffers - 2>();
    meet(together, kWarpgroup);
    const int rows = place.rows - strip * kStripRows;
    if (is_elected()) {
      if (warp < kinds && rows >= kStripRows) store(place.row + strip * kStripRows, rows >= 2 * kStripRows);
      stores_commit();
    }
  }
};

// The results of a warpgroup: 128 columns of a tile, from `column` on. `together` is a barrier of its own.
template <typename T>
__device__ inline void store_turned_plain(const TurnedArguments& p, const float (&d)[kTurnedSums], const TurnedPlace& place,
                                          const TurnedWeights& weights, int column, const StripPairs<2>& pairs, int together) {
  const StripLane lane;
  const int quad = threadIdx.x % 4 * 2, first_column = column + 64 * pairs.warp;
  const int blocks = column + 64 < p.width ? 2 : column < p.width ? 1 : 0;
#pragma unroll
  for (int first = 0; first < kTurnedRows / kStripRows; first += 2) {
    if (first * kStripRows >= place.rows) break;
#pragma unroll
    for (int strip = first; strip < first + 2; ++strip) {
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
        store_turned_matrices(pairs.piece(strip, block) + lane.to_write, word);
      }
    }
    pairs.send(together, first, place, blocks,
               [&](int row, bool has_two) { store_out(p, pairs.piece(first, pairs.warp), first_column, row, has_two); });
  }
  if (place.rows % kStripRows == 0) return;
  const int strip = place.rows / kStripRows;
  for (int block = 0; block < blocks; ++block) {
    const int at = column + 64 * block + lane.column;
    if (lane.row >= place.rows % kStripRows || at >= p.width) break;
    store_from_strip<T>(p.out, p.width, place.row + strip * kStripRows + lane.row, at, pairs.piece(strip, block) + lane.to_read);
  }
  fence_async_proxy();
  meet(together, kWarpgroup);
}

// The same of SwiGLU: the first block of sums are 64 columns of gates, the second one what they gate.
template <typename T>
__device__ inline void store_turned_gated(const TurnedArguments& p, const float (&d)[kTurnedSums], const TurnedPlace& place,
                                          int column, const StripPairs<3>& pairs, int together) {
  const StripLane lane;
  const bool keeps = p.hidden != nullptr;
  const int kinds = column >= p.width ? 0 : keeps ? 2 : 1;
#pragma unroll
  for (int first = 0; first < kTurnedRows / kStripRows; first += 2) {
    if (first * kStripRows >= place.rows) break;
#pragma unroll
    for (int strip = first; strip < first + 2; ++strip) {
      uint32_t gate[4], up[4], act[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = strip * 8 + 2 * i;
        gate[i] = Pair<T>::pack(d[at], d[at + 1]);
        up[i] = Pair<T>::pack(d[at + kTurnedSums / 2], d[at + kTurnedSums / 2 + 1]);
        const float2 g = Pair<T>::unpack(gate[i]), u = Pair<T>::unpack(up[i]);
        act[i] = Pair<T>::pack(g.x * sigmoid(g.x) * u.x, g.y * sigmoid(g.y) * u.y);
      }
      store_turned_matrices(pairs.piece(strip, 0) + lane.to_write, act);
      if (keeps) {
        store_turned_matrices(pairs.piece(strip, 1) + lane.to_write, gate);
        store_turned_matrices(pairs.piece(strip, 2) + lane.to_write, up);
      }
    }
    pairs.send(together, first, place, kinds, [&](int row, bool has_two) {
      if (pairs.warp == 0) {
        store_out(p, pairs.piece(first, 0), column, row, has_two);
      } else {
        store_hidden(p, pairs.piece(first, 1), column, row, has_two);
      }
    });
  }
  if (place.rows % kStripRows == 0) return;
  const int strip = place.rows / kStripRows, at = column + lane.column;
  const int64_t row = place.row + strip * kStripRows + lane.row, width = int64_t{p.width} * 2;
  if (lane.row < place.rows % kStripRows && at < p.width) {
    store_from_strip<T>(p.out, p.width, row, at, pairs.piece(strip, 0) + lane.to_read);
    if (keeps) {
      store_from_strip<T>(p.hidden, width, row, at, pairs.piece(strip, 1) + lane.to_read);
      store_from_strip<T>(p.hidden, width, row, at + p.width, pairs.piece(strip, 2) + lane.to_read);
    }
  }
  fence_async_proxy();
  meet(together, kWarpgroup);
}

// A lane's sums of a strip: eight of each block of 64 columns.
//
// Gradients are made in loops, whose code stays in the caches of the multiprocessor. Unrolled, 100 KB of it came from the L2 for every tile,
// while other warps load the next one, and took up to four times as long. Registers can't be indexed, so the sums are moved first.
struct StripSums {
  float of[2][8];

  __device__ StripSums(const float (&d)[kTurnedSums], int strip) {
    switch (strip) {
#define PMO_STRIP(STRIP) \
  case STRIP:            \
    take<STRIP>(d);      \
    break
      PMO_STRIP(0);
      PMO_STRIP(1);
      PMO_STRIP(2);
      PMO_STRIP(3);
      PMO_STRIP(4);
      PMO_STRIP(5);
      PMO_STRIP(6);
      PMO_STRIP(7);
      PMO_STRIP(8);
      PMO_STRIP(9);
#undef PMO_STRIP
    }
  }

  template <int kStrip>
  __device__ void take(const float (&d)[kTurnedSums]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& sum = of[i / 8][i % 8];
      sum = d[i / 8 * kTurnedSums / 2 + kStrip * 8 + i % 8];
      asm volatile("" : "+f"(sum));  // moved here, not chosen where it is used
    }
  }
};

// Adds up numbers of four rows over the lanes that have the same rows, those 4, 8 and 16 apart. Lanes 0 to 15 get a row each: lanes
// 0 to 3 the first of the four, 4 to 7 the third, 8 to 11 the second, 12 to 15 the last.
__device__ inline float sum_of_row(const float (&dots)[4]) {
  const bool is_high = threadIdx.x & 4, is_odd = threadIdx.x & 8;
  float kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float given = __shfl_xor_sync(kAllLanes, is_high ? dots[i] : dots[2 + i], 4);
    kept[i] = __fadd_rn(is_high ? dots[2 + i] : dots[i], given);
  }
  const float given = __shfl_xor_sync(kAllLanes, is_odd ? kept[0] : kept[1], 8);
  const float sum = __fadd_rn(is_odd ? kept[1] : kept[0], given);
  return __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 16));
}

// The gradient of SwiGLU in a strip: `hidden`, where the warpgroup's part of the strip is, becomes the gradient of itself, and `scaled` the
// result. `sums` gets 16 numbers of each warp of the warpgroup. The warpgroup's first `columns` columns are the result's; hidden has zeros in
// the others.
template <typename T>
__device__ inline void make_turned_gradient(const float (&d)[kTurnedSums], const TurnedRows& rows, int strip, int columns,
                                            uint32_t hidden, uint32_t scaled, float* sums) {
  const StripLane lane;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / kWarpSize, quad = thread % 4 * 2;
  const bool is_whole = rows.all && columns >= kTileColumns;
  float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of four rows
  float2 weight[2];
  uint32_t mask[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = strip * kStripRows + half * 8 + quad;
    weight[half] = *reinterpret_cast<const float2*>(&rows.weights[row]);
    mask[half] = rows.all ? 0xFFFFFFFFu : rows.mask(row);
  }
  const uint32_t gates = hidden + lane.to_write, ups = gates + kPairBytes;
  StripSums given(d, strip);
  uint32_t gate[2][4], up[2][4];
  load_turned_matrices(gates, gate[0]);
  load_turned_matrices(ups, up[0]);
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    if (!is_whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t kept = 64 * block + 16 * warp + i % 2 * 8 < columns ? mask[i / 2] : 0;
        gate[block][i] &= kept;
        up[block][i] &= kept;
        if (!(kept & 1)) given.of[block][2 * i] = 0.0f;
        if (!(kept >> 16)) given.of[block][2 * i + 1] = 0.0f;
      }
    }
    uint32_t act[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i / 2 * 2;
      const float low = given.of[block][2 * i], high = given.of[block][2 * i + 1];
      const float2 made = gradient_of_two<T>(gate[block][i], up[block][i], low, high, weight[i / 2], act[i]);
      dots[row] = fmaf(made.x, low, dots[row]);
      dots[row + 1] = fmaf(made.y, high, dots[row + 1]);
    }
    if (block == 0) {
      load_turned_matrices(gates + 2 * kPairBytes, gate[1]);
      load_turned_matrices(ups + 2 * kPairBytes, up[1]);
    }
    store_turned_matrices(gates + 2 * block * kPairBytes, gate[block]);
    store_turned_matrices(ups + 2 * block * kPairBytes, up[block]);
    store_turned_matrices(scaled + block * kPairBytes + lane.to_write, act);
  }
  const float sum = sum_of_row(dots);
  const int of_four = thread % kWarpSize / 4;
  if (of_four < 4) sums[warp * kStripRows + of_four % 2 * 8 + quad + of_four / 2] = sum;
}

// What `make_turned_gradient` made of a stage, to memory: the copy engine takes strips whose rows are all the expert's, 64 columns of hidden or
// of results for each warp, one of whose lanes commits them. Lanes store the rows of a last strip. They have read it after the next barrier.
template <typename T>
__device__ inline void store_turned_gradient(const TurnedArguments& p, const TurnedPlace& place, int first_strip, int column,
                                             uint32_t hidden, uint32_t scaled, const float* sums) {
  const int thread = threadIdx.x % kWarpgroup, warp = __shfl_sync(kAllLanes, thread / kWarpSize, 0), lane = thread % kWarpSize;
  const int rows = place.rows - first_strip * kStripRows, row = place.row + first_strip * kStripRows;
  const auto gates_of = [&](int block) { return hidden + 2 * block * kPairBytes; };
  const auto scaled_of = [&](int block) { return scaled + block * kPairBytes; };
  if (const int block = warp % 2, first = column + block * 64; is_elected() && rows >= kStripRows && first < p.width) {
    const bool has_two = rows >= 2 * kStripRows;
    if (warp >= 2) {
      store_out(p, scaled_of(block), first, row, has_two);
    } else {
      store_hidden(p, gates_of(block), first, row, has_two);
    }
  }
  const int here = warp / 2 * kStripRows + lane;  // of the stage's rows
  if (p.d_weights != nullptr && warp % 2 == 0 && lane < kStripRows && here < rows && column < p.width) {
    const float* const of_row = sums + warp / 2 * kSumsOfStrip + lane;
    float sum = of_row[0];
#pragma unroll
    for (int i = 1; i < kWarpgroup / kWarpSize; ++i) sum = __fadd_rn(sum, of_row[i * kStripRows]);
    const int tiles = (p.width + kTileColumns - 1) / kTileColumns;
    p.d_weights[int64_t{row + here} * tiles + column / kTileColumns] = sum;
  }
  const int last = place.rows / kStripRows - first_strip;  // a strip that is not whole
  if (place.rows % kStripRows == 0 || last >= 2) return;
  const StripLane part;
  const int64_t of_row = row + last * kStripRows + part.row, width = int64_t{p.width} * 2;
#pragma unroll 1
  for (int block = 0; block < 2; ++block) {
    const int at = column + 64 * block + part.column;
    if (part.row >= place.rows % kStripRows || at >= p.width) break;
    const uint32_t gates = gates_of(block) + last * kStripBytes + part.to_read;
    store_from_strip<T>(p.hidden, width, of_row, at, gates);
    store_from_strip<T>(p.hidden, width, of_row, at + p.width, gates + kPairBytes);
    store_from_strip<T>(p.out, p.width, of_row, at, scaled_of(block) + last * kStripBytes + part.to_read);
  }
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
