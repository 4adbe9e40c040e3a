// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// quantize: codes[slot_to_row[t, k]] = float8_e4m3fn codes of x[t], scales alike (pmo/quantize.h). Every source row is read and
// quantised once and written to each of its rows, in one launch.
//
// A token's row is cut into chunks of 512 columns, one per warp: a lane holds 16 neighbouring elements, 8 lanes a group of 128
// columns, and the warp four groups, which are one word of packed ue8m0 scales. The maximum of a group takes three shuffles; its
// 8 lanes all compute the scale. Then the warp stores 16 bytes of codes per lane to each of the token's rows, which its lanes
// hold. For scales, the lanes are divided among rows and words, so that one store serves 8 rows (32 with ue8m0).
//
// Column-major scales are single words, which the L2 combines, since rows of an expert follow ascending tokens. But each word is
// an access of its own to the L2, and 56 of them for a row of 7168 columns made the kernel 1.25 times slower (T 4096, k 8, H200).
// With a workspace, many float32 scales are therefore written once per token, and transpose_scales writes them to rows, 64 rows x
// 32 words at a time.
//
// A CTA has one token, or several with short rows. CTAs after the last token zero padding, 32 rows each.
//
// Memory-bound: T H elements (of tokens that have a row) and N (H + 4 C) bytes.
#include <cstdint>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/padding.h"
#include "common/scales.h"
#include "cuda/float8.cuh"
#include "cuda/moe/quantize_plan.h"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"
#include "pmo/quantize.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kLaneColumns = 16;
constexpr int kGroupLanes = kGroupColumns / kLaneColumns;
constexpr int kWarpColumns = kWarpSize * kLaneColumns;
constexpr int kWarpGroups = kWarpSize / kGroupLanes;
constexpr int kMaxWarps = 16;
constexpr int kMinWarps = 8;  // of a CTA: short rows share one
constexpr int kFillRows = kWarpSize;
constexpr int kTileRows = 64;  // rows of scales per tile of the transpose
constexpr int kTileWords = 32;
constexpr int kTileThreads = 256;

// Four CTAs of 512 threads, hence 32 registers, if an SM holds 2048 threads: 299 us instead of 325 us at T 153962, H 2048.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
constexpr int kBlocks = 4;
#else
constexpr int kBlocks = 2;
#endif

static_assert(kWarpGroups == kPackedScales, "a warp packs one word");

struct QuantizeWork {
  pmo_quantize_params p;
  ScaleLayout layout;
  int64_t x_stride;  // bytes
  int64_t chunks;    // per row
  int64_t first_fill_row;
  int64_t fill_rows;       // rows to search for padding
  uint32_t* token_scales;  // [T, S] in the workspace, or NULL: quantize_rows stores scales to their rows
};

// The lane's elements as float32; 0 beyond the end of the row.
template <typename Rows, bool kVectors>
__device__ void load_columns(const char* row, int64_t column, int64_t hidden, float* values) {
  using Element = typename Rows::Element;
  const Element* elements = reinterpret_cast<const Element*>(row) + column;
  if constexpr (kVectors) {  // the row ends with a lane's elements
    constexpr int kWidth = 16 / sizeof(Element);
#pragma unroll
    for (int i = 0; i < kLaneColumns / kWidth; ++i) {
      Elements<Rows, kWidth> loaded;
      loaded.set(column < hidden ? __ldg(reinterpret_cast<const uint4*>(elements) + i) : uint4{});
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[i * kWidth + j] = loaded.values[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) values[i] = column + i < hidden ? Rows::load(elements[i]) : 0.0f;
  }
}

// Scale of the lane's group.
__device__ float group_scale(const float (&values)[kLaneColumns], float amax_min, bool ue8m0) {
  const float scale = float8_group_scale<kGroupLanes>(values, amax_min);
  return ue8m0 ? __uint_as_float((__float_as_uint(scale) + 0x7FFFFFu) >> 23 << 23) : scale;
}

template <bool kVectors>
__device__ void store_codes(uint8_t* row, int64_t column, int64_t hidden, const uint4& codes) {
  if constexpr (kVectors) {
    if (column < hidden) *reinterpret_cast<uint4*>(row + column) = codes;
  } else {
    const uint32_t words[] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      if (column + i < hidden) row[column + i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
    }
  }
}

// Row of the lane's slot among 32 slots of a token, or -1.
__device__ int32_t slot_row(const QuantizeWork& work, int64_t token, int64_t first_slot) {
  const pmo_quantize_params& p = work.p;
  const int64_t slot = first_slot + threadIdx.x % kWarpSize;
  if (slot >= p.topk) return -1;
  const int64_t row = p.slot_to_row == nullptr ? token : __ldg(p.slot_to_row + token * p.topk + slot);
  return row >= 0 && row < p.num_rows ? static_cast<int32_t>(row) : -1;
}

// Stores the scales of a chunk to the rows that the lanes hold. `value` is the scale of the lane's group, or the chunk's packed
// word.
__device__ void store_scales(const QuantizeWork& work, int64_t chunk, int32_t own_row, int slots, uint32_t value) {
  const int lane = threadIdx.x % kWarpSize;
  const int words = work.p.ue8m0 != 0 ? 1 : kWarpGroups;
  const int64_t word = chunk * words + lane % words;
  const uint32_t mine = __shfl_sync(kAllLanes, value, lane % words * kGroupLanes);
  uint32_t* target = static_cast<uint32_t*>(work.p.scales) + word * work.layout.word_step;
#pragma unroll 1
  for (int first = 0; first < slots; first += kWarpSize / words) {
    const int64_t row = __shfl_sync(kAllLanes, own_row, first + lane / words);
    if (row >= 0 && word < work.layout.words) target[row * work.layout.row_step] = mine;
  }
}

template <typename Rows, bool kVectors>
__device__ void quantize_token(const QuantizeWork& work, int64_t token) {
  const pmo_quantize_params& p = work.p;
  const int lane = threadIdx.x % kWarpSize;
  const int32_t first_rows = slot_row(work, token, 0);
  if (p.topk <= kWarpSize && __ballot_sync(kAllLanes, first_rows >= 0) == 0) return;
#pragma unroll 1
  for (int64_t chunk = threadIdx.x / kWarpSize; chunk < work.chunks; chunk += blockDim.x / kWarpSize) {
    const int64_t column = chunk * kWarpColumns + lane * kLaneColumns;
    float values[kLaneColumns];
    load_columns<Rows, kVectors>(static_cast<const char*>(p.x) + token * work.x_stride, column, p.hidden, values);
    const float scale = group_scale(values, p.amax_min, p.ue8m0 != 0);
    uint32_t words[kLaneColumns / 4];
    float8_codes(values, __frcp_rn(scale), words);
    const uint4 codes = {words[0], words[1], words[2], words[3]};
    uint32_t value = __float_as_uint(scale);
    if (p.ue8m0 != 0) {
      const int group = lane / kGroupLanes;
      value = chunk * kWarpGroups + group < work.layout.groups ? value >> 23 << (8 * group) : 0;
      value |= __shfl_xor_sync(kAllLanes, value, kGroupLanes);
      value |= __shfl_xor_sync(kAllLanes, value, 2 * kGroupLanes);
    }
#pragma unroll 1
    for (int64_t slot = 0; slot < p.topk; slot += kWarpSize) {
      const int32_t own_row = slot == 0 ? first_rows : slot_row(work, token, slot);
#pragma unroll 1
      for (unsigned left = __ballot_sync(kAllLanes, own_row >= 0); left != 0; left &= left - 1) {
        const int64_t row = __shfl_sync(kAllLanes, own_row, __ffs(left) - 1);
        store_codes<kVectors>(static_cast<uint8_t*>(p.codes) + row * p.hidden, column, p.hidden, codes);
      }
      if (work.token_scales == nullptr) {
        store_scales(work, chunk, own_row, static_cast<int>(min(p.topk - slot, int64_t{kWarpSize})), value);
      }
    }
    const int64_t group = chunk * kWarpGroups + lane / kGroupLanes;
    if (work.token_scales != nullptr && lane % kGroupLanes == 0 && group < work.layout.groups) {
      work.token_scales[token * work.layout.groups + group] = value;
    }
  }
}

// Zeroes the padding among 32 rows, and the alignment rows after row N of a column-major layout.
template <bool kVectors>
__device__ void zero_padding(const QuantizeWork& work, int64_t first) {
  const pmo_quantize_params& p = work.p;
  const int64_t own_row = first + threadIdx.x % kWarpSize;
  const bool is_row = own_row < p.num_rows;
  const bool empty = is_row ? is_padding(p.row_to_token[own_row]) : own_row < work.layout.rows;
  const unsigned all = __ballot_sync(kAllLanes, empty);
  using Access = Vector<kVectors ? 16 : 1>;
  unsigned left = __ballot_sync(kAllLanes, empty && is_row);
#pragma unroll 1
  for (left = fills(p, PMO_FILL_ROWS) ? left : 0; left != 0; left &= left - 1) {
    auto* target = reinterpret_cast<Access*>(static_cast<uint8_t*>(p.codes) + (first + __ffs(left) - 1) * p.hidden);
    for (int64_t i = threadIdx.x; i < p.hidden / int64_t{sizeof(Access)}; i += blockDim.x) target[i] = Access{};
  }
  if (!fills(p, PMO_FILL_SCALES) || all == 0 || work.token_scales != nullptr) return;
  const int words = static_cast<int>(work.layout.words);
  const bool by_column = work.layout.row_step == 1;
#pragma unroll 1
  for (int i = threadIdx.x; i < kFillRows * words; i += blockDim.x) {  // neighbouring threads store neighbouring words
    const int row = by_column ? i % kFillRows : i / words;
    const int word = by_column ? i / kFillRows : i % words;
    if ((all >> row & 1) == 0) continue;
    static_cast<uint32_t*>(p.scales)[(first + row) * work.layout.row_step + word * work.layout.word_step] = 0;
  }
}

template <typename Rows, bool kVectors>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kBlocks) quantize_rows(const __grid_constant__ QuantizeWork work) {
  const int64_t units = work.p.num_tokens + divide_up(work.fill_rows, kFillRows);
#pragma unroll 1
  for (int64_t unit = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; unit < units; unit += int64_t{gridDim.x} * blockDim.y) {
    if (unit < work.p.num_tokens) {
      quantize_token<Rows, kVectors>(work, unit);
    } else {
      zero_padding<kVectors>(work, work.first_fill_row + (unit - work.p.num_tokens) * kFillRows);
    }
  }
}

// Column-major scales of rows from the scales of tokens, through tiles in shared memory.
__global__ void __launch_bounds__(kTileThreads) transpose_scales(const __grid_constant__ QuantizeWork work) {
  const pmo_quantize_params& p = work.p;
  constexpr int32_t kEmpty = -1, kUnwanted = -2;
  __shared__ int32_t tokens[kTileRows];
  __shared__ uint32_t tile[kTileWords][kTileRows + 1];
  const int64_t words = work.layout.words;
  uint32_t* scales = static_cast<uint32_t*>(p.scales);
#pragma unroll 1
  for (int64_t first_row = int64_t{blockIdx.x} * kTileRows; first_row < work.layout.rows;
       first_row += int64_t{gridDim.x} * kTileRows) {
    if (threadIdx.x < kTileRows) {
      const int64_t row = first_row + threadIdx.x;
      int64_t token = kEmpty;
      if (row < p.num_rows) token = p.slot_to_row == nullptr ? row : __ldg(p.row_to_token + row);
      const bool is_filled = row < work.layout.rows && fills(p, PMO_FILL_SCALES);
      const bool is_wanted = is_padding(token) ? is_filled : token < p.num_tokens;
      tokens[threadIdx.x] = is_wanted ? static_cast<int32_t>(max(token, int64_t{kEmpty})) : kUnwanted;
    }
    __syncthreads();
#pragma unroll 1
    for (int64_t first_word = 0; first_word < words; first_word += kTileWords) {
      const int count = static_cast<int>(min(words - first_word, int64_t{kTileWords}));
#pragma unroll 4
      for (int i = threadIdx.x; i < kTileRows * count; i += kTileThreads) {
        const int row = i / count, word = i - row * count;
        const int64_t token = tokens[row];
        tile[word][row] = token < 0 ? 0 : __ldg(work.token_scales + token * words + first_word + word);
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kTileRows * count; i += kTileThreads) {
        const int word = i / kTileRows, row = i % kTileRows;
        if (tokens[row] != kUnwanted) scales[(first_word + word) * work.layout.word_step + first_row + row] = tile[word][row];
      }
      __syncthreads();
    }
  }
}

template <typename Rows>
int launch_rows(const QuantizeWork& work, bool vectors, cudaStream_t stream) {
  const int64_t rounds = divide_up(work.chunks, kMaxWarps);
  const auto warps = static_cast<unsigned>(divide_up(work.chunks, rounds));
  const unsigned tokens = warps < kMinWarps ? kMinWarps / warps : 1;
  const int64_t units = work.p.num_tokens + divide_up(work.fill_rows, kFillRows);
  if (units == 0) return PMO_OK;
  const auto kernel = vectors ? quantize_rows<Rows, true> : quantize_rows<Rows, false>;
  const Grid grid = {grid_for(units, tokens), dim3(warps * kWarpSize, tokens)};
  if (const int status = launch("quantize_rows", kernel, grid, stream, work)) return status;
  if (work.token_scales == nullptr) return PMO_OK;
  return launch("transpose_scales", transpose_scales, {grid_for(work.layout.rows, kTileRows), kTileThreads}, stream, work);
}

int quantize(const pmo_quantize_params& p, cudaStream_t stream) {
  if (const int status = check_quantize(p)) return status;
  if (p.hidden == 0 || p.num_rows == 0) return PMO_OK;
  QuantizeWork work = {p, ScaleLayout(p), p.x_row_stride * dtype_size(p.dtype), divide_up(p.hidden, kWarpColumns)};
  if (p.topk == 0) work.p.num_tokens = 0;  // no token has a row
  work.first_fill_row = has_row_map(p) ? 0 : p.num_rows;
  if (p.fill != 0) work.fill_rows = work.layout.rows - work.first_fill_row;
  if (transposes_scales(p)) work.token_scales = static_cast<uint32_t*>(p.workspace);
  const uintptr_t stride = p.num_tokens > 1 ? static_cast<uintptr_t>(work.x_stride) : 0;
  PMO_REQUIRE((address(p.x) | stride) % dtype_size(p.dtype) == 0, "x", "aligned to its element size");
  const bool vectors = widest_access({address(p.x), stride, address(p.codes)}) == 16 && p.hidden % kLaneColumns == 0;
  return with_rows(p.dtype, [&](auto rows) { return launch_rows<decltype(rows)>(work, vectors, stream); });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int64_t pmo_quantize_cuda_workspace_bytes(const pmo_quantize_params* params) {
  if (params == nullptr || pmo::check_quantize_sizes(*params) != PMO_OK) return 0;
  return pmo::cuda::wanted_workspace_bytes(*params);
}

extern "C" int pmo_quantize_cuda(const pmo_quantize_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::quantize);
}
