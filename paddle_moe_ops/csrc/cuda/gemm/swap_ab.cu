// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The grouped product with the matrix on the side of the tensor cores' products that takes 64 at a time, and the rows on the side that
// takes 16: result^T = matrix^T rows^T. So an expert's last tile has at most 15 rows too many, where that of grouped_product.cu may have
// 127, and an expert of up to 160 rows reads its matrix once.
//
// A tile has up to 160 rows of one expert and 256 columns, or 128 pairs of gates and what they gate. A launch for all tiles cuts the
// rows of an expert evenly, one for a window of them as the tables say. Blocks stay for the whole launch and ask for a tile when the
// one before is nearly loaded. So those that read the same columns of a matrix begin one right after the other, and find them in the
// L2. A block that took every gridDim.x-th tile would drift away from the others, since tiles take different times.
//
// Of a block's warpgroups two multiply the same tile, 128 columns each: in two blocks of 64 columns, of which the second one, if the result is
// gated, is what the first one gates. In another one, a warp asks for tiles and finds their places, and a warp has the copy engine bring 64 of
// the contraction at a time, in a ring of kStages stages: the columns of the matrix in pieces of 64, as they lie in memory, and boxes of 32 and
// 16 rows. All are swizzled, with zeros after the end of the contraction. Rows after those of a tile may be another expert's; what they
// give is not stored (turned_results.cuh).
//
// Nothing is multiplied while a tile's sums become results, so this must be short. A warpgroup writes two strips of 16 rows at a time to
// shared memory, where the copy engine takes them from while the next ones are made. Their room is what the warpgroup read of the tile's last
// stage, which is given back during the second step of the next tile. For SwiGLU's gradient, stages after a tile's last ones bring its
// hidden rows, two strips at a time, and gradients take their place there. What is known of the rows of a gradient's tile, weights and missing
// tokens, is in shared memory, too: the warp that finds the tile's place leaves it there.
//
// Rows of tokens may be gathered where they are: one more warpgroup copies them 16 bytes a lane, with the same swizzle, and its lanes signal a
// stage once their copies are there. Which rows a tile has is looked up once, so that no copy waits for the one before.
//
// Moved: the matrix and the rows once from memory and, per tile, from the L2; the results once, and hidden once more in a gradient.
#include "cuda/gemm/swap_ab.h"

#include <algorithm>

#include "common/checks.h"
#include "cuda/gemm/swap_ab_epilogue.cuh"
#include "cuda/gemm/tensor_map.h"
#include "cuda/ptx/wgmma.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kStages = 4;
constexpr int kFewRows = 256;  // of an expert, on average
constexpr int kMatrixBytes = kTurnedColumns * kTileDepth * 2;
constexpr int kTurnedStageBytes = kMatrixBytes + kTurnedRows * kTileDepth * 2;
constexpr int kSharedBytes = kStages * kTurnedStageBytes + 2 * kTurnedResultBytes + 1024;  // stages begin at a multiple of 1024

static_assert(kHiddenBytes + kHiddenBytes / 2 <= kTurnedStageBytes, "hidden and results fit a stage");

template <pmo_grouped_result kResult>
constexpr int kResultColumns = kResult == PMO_GROUPED_GATED ? kTurnedColumns / 2 : kTurnedColumns;

// Where rows are gathered, one more warpgroup does it: a warp on each quarter of the multiprocessor, so that none of the warps that multiply
// waits longer for its products than the others.
template <bool kGathers>
constexpr int kTurnedThreads = kBlockThreads + (kGathers ? kWarpgroup : 0);

#ifdef PMO_HOPPER_CODE

constexpr int kBand = 8;  // rows of tiles, at most, that share their columns in the L2
constexpr int kAhead =
    4;  // how many steps before the end of a tile the next one is asked for: as many as finding its place takes
constexpr int kMultiplyingWarps = 2 * kWarpgroup / kWarpSize;
constexpr int kGathering = 3;  // the barrier of the warps that gather
constexpr int kRegistersToGather = 40, kRegistersBesideGathering = 216;
constexpr int kRowsAtOnce = kWarpgroup / 8;  // that the warps gather: eight lanes take 128 bytes of a row

static_assert(4 * kSumsOfStrip * 4 <= kTurnedResultBytes / 2, "the sums of two stages fit");
static_assert(kTilesOfRows * sizeof(TurnedRows) <= kTurnedResultBytes / 2, "what is known of rows fits");

using Ring = RingOf<kStages>;
using Places = PlacesOf<TurnedPlace, 2>;

// What the roles of a block share: stages that are full and empty, the places of tiles, and whether another one is wanted.
struct Shared {
  uint64_t full[kStages], empty[kStages], wanted;
  Places places;
  uint32_t sources[kRowsAtOnce][kTurnedRows / kRowsAtOnce];  // rows of tokens that a tile gathers: row 16 i + r is [r][i]
};

struct Stages {
  uint32_t first;

  __device__ uint32_t matrix(int stage) const { return first + stage * kTurnedStageBytes; }
  __device__ uint32_t rows(int stage) const { return matrix(stage) + kMatrixBytes; }
  __device__ uint32_t hidden(int stage, int block) const { return matrix(stage) + block * 2 * kPairBytes; }
  __device__ uint32_t scaled(int stage, int block) const { return matrix(stage) + kHiddenBytes + block * kPairBytes; }
  __device__ uint32_t results(int warpgroup) const { return matrix(kStages) + warpgroup * kTurnedResultBytes; }
  // Of a gradient, whose results need no room of their own: sums of dot products, and what is known of the rows of tiles.
  __device__ float* sums(int warpgroup) const { return static_cast<float*>(pointer(results(warpgroup))); }
  __device__ TurnedRows& rows_of_tile(int tile) const {
    return static_cast<TurnedRows*>(pointer(results(0) + kTurnedResultBytes / 2))[tile % kTilesOfRows];
  }

 private:
  __device__ static void* pointer(uint32_t address) {
    extern __shared__ uint8_t dynamic[];
    return dynamic + (address - shared_address(dynamic));
  }
};

template <bool kGathers>
__device__ inline void init_barriers(Shared& shared) {
  if (threadIdx.x == 0) {
    for (uint64_t& each : shared.full) init_barrier(&each, kGathers ? 1 + kWarpgroup : 1);
    for (uint64_t& each : shared.empty) init_barrier(&each, kMultiplyingWarps);
    shared.places.init(kMultiplyingWarps + 1 + (kGathers ? kWarpgroup / kWarpSize : 0));
    init_barrier(&shared.wanted, 1);
    fence_barrier_init();
  }
  __syncthreads();
}

// The place of a tile of the launch's list, by all lanes of a warp: none has rows after the last one.
template <pmo_grouped_result kResult>
__device__ inline TurnedPlace place_of(const TurnedArguments& p, int tile, int first_tile, int last_tile, bool is_whole) {
  TurnedPlace place = {0, 0, 0, 0};
  const int some_row_tile = first_tile + tile / p.column_tiles;  // of the same expert
  if (some_row_tile >= last_tile) return place;
  for (int begin = 0; begin < p.num_experts; begin += kWarpSize) {
    const int lane = begin + threadIdx.x % kWarpSize;
    const bool has_ended = lane < p.num_experts && __ldg(p.tiles + 1 + lane) <= some_row_tile;
    place.expert += __popc(__ballot_sync(kAllLanes, has_ended));
  }
  const int begin = __ldg(p.tiles + place.expert), end = __ldg(p.tiles + place.expert + 1);
  const int first = __ldg(p.first + place.expert), rows = __ldg(p.stop + place.expert) - first;
  const int begin_here = max(begin, first_tile), height = min(end, last_tile) - begin_here;
  const int bands = (height + kBand - 1) / kBand;
  const TilePlace at(tile - (begin_here - first_tile) * p.column_tiles, height, p.column_tiles, (height + bands - 1) / bands);
  const int even = ((rows + end - begin - 1) / (end - begin) + kStripRows - 1) / kStripRows * kStripRows;
  const int rows_of_tile = is_whole ? even : kTurnedRows, skipped = (begin_here + at.row - begin) * rows_of_tile;
  place.row = first + skipped;
  place.rows = min(rows - skipped, rows_of_tile);
  place.column = at.column * kResultColumns<kResult>;
  return place;
}

// The work of the warp that finds places: the first tile of a block is that of its number, the others are handed out in their order.
template <pmo_grouped_result kResult>
__device__ inline void find_places(const TurnedArguments& p, Shared& shared, const Stages& stages) {
  const int first_tile = __ldg(p.window), last_tile = __ldg(p.window + 1);
  const bool is_whole = first_tile == 0 && last_tile == __ldg(p.tiles + p.num_experts), is_first = threadIdx.x % kWarpSize == 0;
  Places::Ring ring;
  uint32_t phase = 0;
  for (int tile = blockIdx.x, count = 0;; ++count) {
    const TurnedPlace place = place_of<kResult>(p, tile, first_tile, last_tile, is_whole);
    shared.places.wait_for_room(ring);
    if (kResult == PMO_GROUPED_GRADIENT) stages.rows_of_tile(count).fill(p, place);
    if (is_first) shared.places.give(ring, place);
    ring.advance();
    if (place.rows == 0) break;
    wait(&shared.wanted, phase);
    phase ^= 1;
    if (is_first) tile = p.counter.next(gridDim.x);
    tile = __shfl_sync(kAllLanes, tile, 0);
  }
  if (is_first) p.counter.leave(gridDim.x);
}

// Of a gradient: hidden of a tile, in the stages that follow those of its operands.
__device__ inline void load_hidden(const TurnedArguments& p, Shared& shared, const Stages& stages, Ring& ring,
                                   const TurnedPlace& place) {
  for (int row = 0; row < place.rows; row += 2 * kStripRows) {
    wait(&shared.empty[ring.stage], ring.phase ^ 1);
    if (is_elected()) {
      uint64_t* full = &shared.full[ring.stage];
      arrive_expecting(full, kHiddenBytes);
#pragma unroll
      for (int block = 0; block < kTurnedColumns / 64; ++block) {
        load_box(stages.hidden(ring.stage, block), &p.hidden_32, full, place.column + 64 * block, place.row + row, 0);
      }
    }
    ring.advance();
  }
}

// The work of the warps that gather.
//
// What a load gives, from global or from shared memory, is there only after all copies that the warp began before it. So the rows of a tile
// are looked up once, and stay in registers.
template <pmo_grouped_result kResult>
__device__ inline void gather_rows(const TurnedArguments& p, Shared& shared, const Stages& stages) {
  constexpr int kRowsOfLane = kTurnedRows / kRowsAtOnce;
  const int lane = threadIdx.x % kWarpgroup, first_row = lane / 8, piece = lane % 8;
  const uint32_t to_write = first_row * 128 + (piece ^ first_row % 8) * 16;
  Ring ring;
  Places::Ring places;
  for (TurnedPlace place = shared.places.take(places); place.rows > 0; place = shared.places.take(places)) {
    meet(kGathering, kWarpgroup);  // nobody reads the table of the tile before any more
    for (int row = lane; row < kTurnedRows; row += kWarpgroup) {
      shared.sources[row % kRowsAtOnce][row / kRowsAtOnce] =
          row < place.rows ? p.gathered.source_of(place.row + row) : GatheredRows::kNone;
    }
    meet(kGathering, kWarpgroup);
    uint32_t source[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) source[i] = shared.sources[first_row][i];
    for (int depth = 0; depth < p.inner; depth += kTileDepth) {
      const bool is_inside = depth + piece * 8 < p.inner;
      const char* const first = p.gathered.first_row(depth * 2 + piece * 16);
      wait(&shared.empty[ring.stage], ring.phase ^ 1);
      const uint32_t target = stages.rows(ring.stage) + to_write;
#pragma unroll
      for (int i = 0; i < kRowsOfLane; i += 2) {
        if (kRowsAtOnce * i >= place.rows) break;
        p.gathered.copy<2>(&source[i], first, is_inside, [&](int each) { return target + (i + each) * kRowsAtOnce * 128; });
      }
      arrive_after_copies(&shared.full[ring.stage]);
      ring.advance();
    }
    for (int row = 0; kResult == PMO_GROUPED_GRADIENT && row < place.rows; row += 2 * kStripRows) {  // stages of hidden rows
      wait(&shared.empty[ring.stage], ring.phase ^ 1);
      arrive(&shared.full[ring.stage]);
      ring.advance();
    }
  }
}

// The work of the warp that loads.
template <pmo_grouped_result kResult, bool kTransposed, bool kGathers>
__device__ inline void load_tiles(const TurnedArguments& p, Shared& shared, const Stages& stages) {
  Ring ring;
  Places::Ring places;
  for (TurnedPlace place = shared.places.take(places); place.rows > 0; place = shared.places.take(places)) {
    const int strips = (place.rows + 15) / 16;
    const uint32_t bytes = kMatrixBytes + (kGathers ? 0 : strips * 16 * kTileDepth * 2);
    const int asks_at = max((p.inner - 1) / kTileDepth - kAhead, 0) * kTileDepth;
    for (int depth = 0; depth < p.inner; depth += kTileDepth) {
      wait(&shared.empty[ring.stage], ring.phase ^ 1);
      if (is_elected()) {
        if (depth == asks_at) arrive(&shared.wanted);
        uint64_t* full = &shared.full[ring.stage];
        arrive_expecting(full, bytes);
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) {
          const int to_piece = kResult == PMO_GROUPED_GATED ? piece / 2 * 64 + piece % 2 * p.to_up : piece * 64;
          const int column = p.first_column + place.column + to_piece;
          load_box(stages.matrix(ring.stage) + piece * kPieceBytes, &p.matrix, full, kTransposed ? depth : column,
                   kTransposed ? column : depth, place.expert);
        }
        if constexpr (!kGathers) {
          const int row = place.row - p.first_row;
          // With a loop of strips / 2 passes, as nvcc 13.0 compiles it, the rows from 128 on were wrong.
#pragma unroll
          for (int strip = 0; strip < kTurnedRows / kStripRows; strip += 2) {
            const uint32_t target = stages.rows(ring.stage) + strip * kStripBytes;
            if (strip + 1 < strips) {
              load_box(target, &p.rows, full, depth, row + strip * kStripRows);
            } else if (strip < strips) {
              load_box(target, &p.rows_16, full, depth, row + strip * kStripRows);
            }
          }
        }
      }
      ring.advance();
    }
    if (kResult == PMO_GROUPED_GRADIENT) load_hidden(p, shared, stages, ring, place);
  }
}

// A stage that a warpgroup still has, since the copy engine may not have read its results there; negative: none.
constexpr int kNoStage = -1;

// Gives back a stage, by the lane of each warp that signals, once its boxes but those of the last kPending groups have been read.
template <int kPending>
__device__ inline void give_back(Shared& shared, int stage) {
  stores_wait_read<kPending>();
  arrive(&shared.empty[stage]);
}

// d = the product of a warpgroup's columns and the rows of a tile, of which kRows are multiplied, stage by stage. `results` is the stage that
// has the last results of the tile before: it is given back while the products of the second step are made. Returns the last stage, whose
// products are still running, for the caller to give back. The first products don't add, so no sum is set to zero.
template <int kRows, bool kTurned, bool kGathers, typename T>
__device__ inline int multiply_tile(float (&d)[kTurnedSums], Shared& shared, const Stages& stages, Ring& ring, int warpgroup,
                                    int inner, int results) {
  const bool signals = is_elected();
  const int gives_back_at = inner > kTileDepth ? kTileDepth : 0;
  hold(d);
  int last = 0;
#pragma unroll 1
  for (int depth = 0; depth < inner; depth += kTileDepth) {
    wait(&shared.full[ring.stage], ring.phase);
    if (kGathers) fence_async_proxy();
    products_begin();
    const uint64_t a = describe(stages.matrix(ring.stage) + warpgroup * 2 * kPieceBytes, kPieceBytes, 1024);
    const uint64_t b = describe(stages.rows(ring.stage), kPieceBytes, 1024);
#pragma unroll
    for (int k = 0; k < kTileDepth / 16; ++k) {
      // 16 numbers of a row are 32 bytes; 16 rows, where they are the contraction, are 2048.
      const uint64_t at_a = a + k * ((kTurned ? 2048 : 32) >> 4), at_b = b + k * (32 >> 4);
      multiply_columns<kRows, 0, kTurned, false, T>(d, at_a, at_b, k > 0 || depth > 0);
      multiply_columns<kRows, kTurnedSums / 2, kTurned, false, T>(d, at_a + (kPieceBytes >> 4), at_b, k > 0 || depth > 0);
    }
    products_commit();
    products_wait<1>();
    if (depth > 0 && signals) arrive(&shared.empty[last]);
    if (depth == gives_back_at && results != kNoStage && signals) give_back<0>(shared, results);
    last = ring.stage;
    ring.advance();
  }
  return last;
}

// A gradient from the sums of a tile. A stage with strips of hidden is given back after the next one is made; returns the last, which is not.
template <typename T>
__device__ inline int store_gradients(const TurnedArguments& p, const float (&d)[kTurnedSums], Shared& shared,
                                      const Stages& stages, Ring& ring, const TurnedPlace& place, const TurnedRows& rows,
                                      int column, int warpgroup, int& turn) {
  const int together = 1 + warpgroup;
  int before = kNoStage;
#pragma unroll 1
  for (int first = 0; first * kStripRows < place.rows; first += 2) {
    float* const sums = stages.sums(warpgroup) + turn * 2 * kSumsOfStrip;
    const uint32_t hidden = stages.hidden(ring.stage, 2 * warpgroup), scaled = stages.scaled(ring.stage, 2 * warpgroup);
    wait(&shared.full[ring.stage], ring.phase);
#pragma unroll 1
    for (int i = 0; i < 2 && (first + i) * kStripRows < place.rows; ++i) {
      make_turned_gradient<T>(d, rows, first + i, p.width - column, hidden + i * kStripBytes, scaled + i * kStripBytes,
                              sums + i * kSumsOfStrip);
    }
    fence_async_proxy();
    meet(together, kWarpgroup);
    store_turned_gradient<T>(p, place, first, column, hidden, scaled, sums);
    if (is_elected()) {
      stores_commit();
      if (before != kNoStage) give_back<1>(shared, before);
    }
    before = ring.stage;
    ring.advance();
    turn ^= 1;
  }
  if (place.rows % kStripRows != 0) {  // lanes have read the last strip
    fence_async_proxy();
    meet(together, kWarpgroup);
  }
  return before;
}

// The work of the warpgroups that multiply.
template <pmo_grouped_result kResult, bool kTransposed, bool kGathers, typename T>
__device__ inline void make_tiles(const TurnedArguments& p, Shared& shared, const Stages& stages) {
  const int warpgroup =
      __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0) - 1;  // the compiler can see that all lanes have the same
  const int together = 1 + warpgroup, warp = __shfl_sync(kAllLanes, threadIdx.x % kWarpgroup / kWarpSize, 0);
  int turn = 0, results = kNoStage, tile = 0;
  Ring ring;
  Places::Ring places;
  for (TurnedPlace next = shared.places.take(places); next.rows > 0; ++tile) {
    const TurnedPlace place = next;
    const TurnedWeights weights(kResult == PMO_GROUPED_PLAIN ? p.weights : nullptr, place);
    float d[kTurnedSums];
    int last = 0;
#define PMO_STRIPS(STRIPS)                                                                                              \
  case STRIPS:                                                                                                          \
    last = multiply_tile<STRIPS * 16, !kTransposed, kGathers, T>(d, shared, stages, ring, warpgroup, p.inner, results); \
    break
    switch ((place.rows + 15) / 16) {
      PMO_STRIPS(1);
      PMO_STRIPS(2);
      PMO_STRIPS(3);
      PMO_STRIPS(4);
      PMO_STRIPS(5);
      PMO_STRIPS(6);
      PMO_STRIPS(7);
      PMO_STRIPS(8);
      PMO_STRIPS(9);
      default:
        PMO_STRIPS(10);
    }
#undef PMO_STRIPS
    // The next place is taken while the last products are made; a gradient has no registers for it. It comes without them: the warp that loads
    // asked for it before it loaded their stage.
    if (kResult != PMO_GROUPED_GRADIENT) next = shared.places.take(places);
    products_wait<0>();
    hold(d);
    if (kResult == PMO_GROUPED_GRADIENT && is_elected()) arrive(&shared.empty[last]);
    const int column = place.column + warpgroup * kResultColumns<kResult> / 2;
    if constexpr (kResult == PMO_GROUPED_GRADIENT) {
      const TurnedRows& rows = stages.rows_of_tile(tile);
      results = store_gradients<T>(p, d, shared, stages, ring, place, rows, column, warpgroup, turn);
    } else {
      const uint32_t in_stage = stages.matrix(last) + warpgroup * 2 * kPieceBytes, buffer = stages.results(warpgroup);
      if constexpr (kResult == PMO_GROUPED_GATED) {
        store_turned_gated<T>(p, d, place, column, {in_stage, buffer, warp}, together);
      } else {
        store_turned_plain<T>(p, d, place, weights, column, {in_stage, buffer, warp}, together);
      }
      results = last;
    }
    if (kResult == PMO_GROUPED_GRADIENT) next = shared.places.take(places);
  }
  if (is_elected()) stores_wait_read();  // shared memory has to stay until then
}

#endif  // PMO_HOPPER_CODE

template <pmo_grouped_result kResult, bool kTransposed, bool kGathers, typename T>
__global__ void __launch_bounds__(kTurnedThreads<kGathers>, 1) grouped_turned(const __grid_constant__ TurnedArguments p) {
#ifdef PMO_HOPPER_CODE
  extern __shared__ uint8_t dynamic[];
  __shared__ Shared shared;
  init_barriers<kGathers>(shared);
  const Stages stages = {(shared_address(dynamic) + 1023) / 1024 * 1024};
  if (threadIdx.x < kWarpgroup) {
    give_registers<kRegistersToLoad>();
    const int warp = threadIdx.x / kWarpSize;
    if (warp == 0) load_tiles<kResult, kTransposed, kGathers>(p, shared, stages);
    if (warp == 1) find_places<kResult>(p, shared, stages);
  } else if (kGathers && threadIdx.x >= kBlockThreads) {
    give_registers<kRegistersToGather>();
    gather_rows<kResult>(p, shared, stages);
  } else {
    take_registers<kGathers ? kRegistersBesideGathering : kRegistersToMultiply>();
    make_tiles<kResult, kTransposed, kGathers, T>(p, shared, stages);
  }
#endif
}

template <pmo_grouped_result kResult, bool kTransposed, bool kGathers, typename T>
int launch_turned(const pmo_grouped_product_params& p, const TurnedArguments& arguments, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_product", &device, &limits)) return status;
  auto* kernel = grouped_turned<kResult, kTransposed, kGathers, T>;
  if (const int status = limit.raise(kernel, device, kSharedBytes)) return status;
  const int64_t row_tiles = divide_up(std::min(p.num_rows, p.window_rows), int64_t{kTurnedRows}) + p.num_experts;
  const int64_t blocks = std::min<int64_t>(row_tiles * arguments.column_tiles, limits.multiprocessors);
  const Grid grid = {static_cast<unsigned>(blocks), kTurnedThreads<kGathers>, kSharedBytes};
  return launch("grouped_product", kernel, grid, stream, arguments);
}

}  // namespace

int turned_product(const pmo_grouped_product_params& p, cudaStream_t stream) {
  const bool is_bfloat16 = p.dtype == PMO_BFLOAT16;
  TurnedArguments a = {};
  static_cast<GroupedArguments&>(a) = arguments_of(p, p.result == PMO_GROUPED_GATED ? kTurnedColumns / 2 : kTurnedColumns);
  a.counter = {p.counters};
  if (p.gathers != 0) {
    a.gathered = {p.x, p.row_to_token, static_cast<uint32_t>(p.x_row_stride * 2), static_cast<int>(p.num_sources)};
  } else {
    Tensor rows = {p.x, 2, {p.inner, p.num_sources}, {p.x_row_stride}, {kTileDepth, 2 * kStripRows}};
    if (const int status = encode(rows, is_bfloat16, &a.rows)) return status;
    rows.box[1] = kStripRows;
    if (const int status = encode(rows, is_bfloat16, &a.rows_16)) return status;
  }
  Tensor matrix = {p.matrix, 3, {p.outer, p.inner, p.num_experts}, {p.outer, p.outer * p.inner}, {64, kTileDepth, 1}};
  if (p.transpose) std::swap(matrix.sizes[0], matrix.sizes[1]);
  matrix.strides[0] = matrix.sizes[0];
  // With few rows an expert memory decides, and a transposed matrix comes faster if the next step's lines come along.
  const bool has_few_rows = p.num_rows <= kFewRows * p.num_experts;
  const auto promotion = has_few_rows ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  if (const int status = encode(matrix, is_bfloat16, &a.matrix, promotion)) return status;
  Tensor out = {p.out, 3, {p.width, p.num_rows, 1}, {p.width, p.width}, {64, 2 * kStripRows, 1}};
  if (const int status = encode(out, is_bfloat16, &a.out_32)) return status;
  out.box[1] = kStripRows;
  if (const int status = encode(out, is_bfloat16, &a.out_16)) return status;
  if (p.hidden != nullptr) {
    Tensor hidden = {p.hidden, 3, {p.width, p.num_rows, 2}, {2 * p.width, p.width}, {64, 2 * kStripRows, 2}};
    if (const int status = encode(hidden, is_bfloat16, &a.hidden_32)) return status;
    hidden.box[1] = kStripRows, hidden.box[2] = 1;
    if (const int status = encode(hidden, is_bfloat16, &a.hidden_16)) return status;
  }
  return with_kind(p, [&](auto result, auto is_transposed, auto element) {
    using T = decltype(element);
    if constexpr (result() != PMO_GROUPED_PLAIN) {
      if (p.gathers != 0) return launch_turned<result(), is_transposed(), true, T>(p, a, stream);
    }
    return launch_turned<result(), is_transposed(), false, T>(p, a, stream);
  });
}

}  // namespace cuda
}  // namespace pmo
