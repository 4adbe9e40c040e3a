// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Exchange of rows between GPUs that map each other's memory; pmo/ranks.h defines the layout of the regions.
//
// A warp has a piece of a token's row, in the widest accesses (up to 16 bytes) that pointers and lengths allow. CTAs of four
// warps process the pieces in order, starting with the tokens of the next rank if tokens are in the order of ranks. So no two
// ranks write to, or read from, the same rank at the same time.
//
// * send (send_pieces): loads the piece into registers and stores it for each of the token's rows: to another GPU, to local
//   memory from which another GPU fetches, or to local memory for this rank itself.
// * receive (copy_pieces, sum_pieces): loads rows from local memory or from another GPU and sums them in the order of ranks, or
//   copies if a token has at most one row.
//
// Overlap: written and fetched rows alternate, so a launch keeps the link busy, which is the bottleneck, while it does its local
// accesses.
//
// Bytes moved: X bytes of rows go to other ranks and X come from them, a share f of both is fetched, and Y bytes are the rank's
// own rows. With T tokens to two ranks each, X = Y = T * H elements.
//   send of tokens:  link (1 - f) X each way; memory X read, Y written, f X written, (1 - f) X that arrives
//   receive, copied: link f X each way; memory (1 - f) X read, X written, f X read by others
//   send of parts:   link (1 - f) X each way; memory X read, f X written, (1 - f) X that arrives
//   receive, summed: link f X each way; memory (1 - f) X and Y read, T * H elements written, f X read by others
#include <algorithm>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/regions.h"
#include "cuda/moe/warp_rows.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMinBlocks = 8;  // CTAs per SM; bounds registers
constexpr int kMoved = 4;      // accesses of a row that a lane moves
constexpr int kSummed = 2;     // accesses of a row that a lane sums, two rows at a time
// CTAs per SM of a send that leaves room for the routing of arriving tokens, a cooperative launch that waits until all its CTAs
// fit. With more CTAs, that launch waits longer; with fewer, the link idles.
constexpr int kSendingBlocks = 4;

// A warp's piece of a row, in accesses.
struct Piece {
  int64_t token, first, end;  // a lane moves accesses first, first + 32, ... below `end`

  template <typename Params>
  __device__ Piece(const Params& p, int64_t tokens_before, int parts, int values, int64_t accesses) : end(accesses) {
    const WarpShare share(parts);
    token = tokens_before + share.item;
    first = int64_t{share.part} * (values * kWarpSize) + threadIdx.x % kWarpSize;
    if (token >= p.num_tokens) {
      token = -1;
      return;
    }
    token += p.num_tokens / p.num_ranks * ((p.rank + 1) % p.num_ranks);
    if (token >= p.num_tokens) token -= p.num_tokens;
  }
};

// Fills a piece of the output with NaN.
template <typename Access>
__device__ void fill_nan(const Piece& piece, int values, Access* out) {
  Access all_ones;
  memset(&all_ones, 0xFF, sizeof all_ones);
  for (int i = 0; i < values; ++i) {
    if (piece.first + i * kWarpSize < piece.end) out[i * kWarpSize] = all_ones;
  }
}

template <typename Pointer>
__device__ Pointer shuffle_pointer(Pointer pointer, int lane) {
  return reinterpret_cast<Pointer>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

// Send: stores a piece for each row of its token.
template <int kBytes>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    send_pieces(const __grid_constant__ pmo_rank_send_params p, int64_t tokens_before, int parts, int64_t row_bytes,
                int64_t stride) {
  using Access = Vector<kBytes>;
  const Piece piece(p, tokens_before, parts, kMoved, row_bytes / kBytes);
  if (piece.token < 0) return;
  const int lane = threadIdx.x % kWarpSize;
  const auto* source = reinterpret_cast<const Access*>(static_cast<const char*>(p.x) + piece.token * stride) + piece.first;
  Access values[kMoved];
  bool loaded = false;  // no load without a row to store to
#pragma unroll 1
  for (int64_t begin = 0; begin < p.max_rows_per_token; begin += kWarpSize) {
    const int64_t entry = begin + lane;
    const int32_t row = entry < p.max_rows_per_token ? __ldg(p.token_rows + piece.token * p.max_rows_per_token + entry) : -1;
    char* const target = sent_to(p, row, row_bytes);
    unsigned left = __ballot_sync(kAllLanes, target != nullptr);
    if (left != 0 && !loaded) {
#pragma unroll
      for (int i = 0; i < kMoved; ++i) {
        if (piece.first + i * kWarpSize < piece.end) values[i] = source[i * kWarpSize];
      }
      loaded = true;
    }
#pragma unroll 1
    while (left != 0) {
      auto* to = reinterpret_cast<Access*>(shuffle_pointer(target, WarpRows::pop_lane(&left))) + piece.first;
#pragma unroll
      for (int i = 0; i < kMoved; ++i) {
        if (piece.first + i * kWarpSize < piece.end) to[i * kWarpSize] = values[i];
      }
    }
  }
}

// Receive for tokens with at most one row: copies it.
template <int kBytes>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    copy_pieces(const __grid_constant__ pmo_rank_receive_params p, int64_t tokens_before, int parts, int64_t row_bytes,
                int64_t own_stride) {
  using Access = Vector<kBytes>;
  const Piece piece(p, tokens_before, parts, kMoved, row_bytes / kBytes);
  if (piece.token < 0) return;
  auto* out = reinterpret_cast<Access*>(static_cast<char*>(p.out) + piece.token * row_bytes) + piece.first;
  if (is_marked(p.mark)) return fill_nan(piece, kMoved, out);
  const int32_t row = p.max_rows_per_token == 0 ? -1 : __ldg(p.token_rows + piece.token);
  const bool is_row = is_received(p, row);
  const char* from = is_row ? received_from(p, row, row_bytes, own_stride) : nullptr;
  if (is_row && from == nullptr) return;
  const auto* source = reinterpret_cast<const Access*>(from) + piece.first;
  Access values[kMoved] = {};
#pragma unroll
  for (int i = 0; i < kMoved; ++i) {
    if (is_row && piece.first + i * kWarpSize < piece.end) values[i] = source[i * kWarpSize];
  }
#pragma unroll
  for (int i = 0; i < kMoved; ++i) {
    if (piece.first + i * kWarpSize < piece.end) out[i * kWarpSize] = values[i];
  }
}

// Arguments of WarpRows.
struct ListedRows {
  int64_t max_rows_per_token, num_rows;
  const int32_t* token_rows;
};

// Receive for tokens with several rows: sums them in float32, in the order of ranks.
template <typename Rows, int kWidth>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    sum_pieces(const __grid_constant__ pmo_rank_receive_params p, int64_t tokens_before, int parts, int64_t row_bytes,
               int64_t own_stride) {
  using Access = Vector<kWidth * sizeof(typename Rows::Element)>;
  const Piece piece(p, tokens_before, parts, kSummed, p.hidden / kWidth);
  if (piece.token < 0) return;
  auto* out = reinterpret_cast<Access*>(static_cast<char*>(p.out) + piece.token * row_bytes) + piece.first;
  if (is_marked(p.mark)) return fill_nan(piece, kSummed, out);
  const ListedRows all = {p.max_rows_per_token, p.num_ranks * p.rows_per_rank, p.token_rows};
  Elements<Rows, kWidth> sums[kSummed];
#pragma unroll
  for (int i = 0; i < kSummed; ++i) sums[i].fill(-0.0f);
  Access last[kSummed];  // of the last row: the result if it is the only one
  int count = 0;
#pragma unroll 1
  for (int64_t begin = 0;; begin += kWarpSize) {
    const WarpRows listed(all, piece.token, begin);
    const bool is_used = listed.is_used() && is_received(p, listed.row);
    const char* own_source = is_used ? received_from(p, listed.row, row_bytes, own_stride) : nullptr;
    unsigned left = __ballot_sync(kAllLanes, is_used);
    count += __popc(left);
#pragma unroll 1
    while (left != 0) {
      const auto* source = reinterpret_cast<const Access*>(shuffle_pointer(own_source, WarpRows::pop_lane(&left))) + piece.first;
      const bool are_two = left != 0;
      const auto* second =
          are_two ? reinterpret_cast<const Access*>(shuffle_pointer(own_source, WarpRows::pop_lane(&left))) + piece.first
                  : source;
      Access of_second[kSummed];
#pragma unroll
      for (int i = 0; i < kSummed; ++i) {
        if (piece.first + i * kWarpSize >= piece.end) continue;
        last[i] = source[i * kWarpSize];
        if (are_two) of_second[i] = second[i * kWarpSize];
      }
#pragma unroll
      for (int i = 0; i < kSummed; ++i) {
        if (piece.first + i * kWarpSize >= piece.end) continue;
        Elements<Rows, kWidth> loaded;
        loaded.set(last[i]);
        sums[i].add(loaded, 1.0f);
        if (!are_two) continue;
        loaded.set(of_second[i]);
        sums[i].add(loaded, 1.0f);
      }
    }
    if (listed.ended) break;
  }
#pragma unroll
  for (int i = 0; i < kSummed; ++i) {
    if (piece.first + i * kWarpSize >= piece.end) continue;
    if (count == 1) {
      out[i * kWarpSize] = last[i];
      continue;
    }
    if (count == 0) sums[i].fill(0.0f);
    sums[i].store(out, i * kWarpSize);
  }
}

// Launches a kernel whose warps have pieces of 32 * values accesses of rows of `accesses`.
template <typename Params>
int launch_pieces(const char* name, void (*kernel)(Params, int64_t, int, int64_t, int64_t), const Params& p, int64_t accesses,
                  int values, int64_t row_bytes, int64_t stride, cudaStream_t stream, size_t shared_bytes = 0) {
  const auto parts = static_cast<int>(divide_up(accesses, int64_t{values} * kWarpSize));
  return in_grids(p.num_tokens, parts, kWarps, [&](int64_t first, int64_t count) {
    const Grid grid = {grid_for(count * parts, kWarps, kMaxBlocksOfGrid), kThreads, shared_bytes};
    return launch(name, kernel, grid, stream, p, first, parts, row_bytes, stride);
  });
}

int send(const pmo_rank_send_params& p, cudaStream_t stream) {
  if (const int status = check_rank_send(p)) return status;
  const int64_t row_bytes = p.hidden * dtype_size(p.dtype), stride = p.x_row_stride * dtype_size(p.dtype);
  if (row_bytes * p.num_tokens * p.max_rows_per_token == 0) return PMO_OK;
  size_t shared_bytes = 0;
  int device = 0;
  if (p.leaves_room != 0) {  // unused shared memory, so that no further CTA fits
    DeviceLimits limits;
    if (const int status = current_device(&device, &limits)) return status;
    constexpr int kMaxSharedWithoutAttribute = 48 << 10;  // dynamic shared memory of any kernel, without an attribute
    shared_bytes = std::min(limits.shared_per_multiprocessor / (kSendingBlocks + 1), kMaxSharedWithoutAttribute);
  }
  const uintptr_t between = p.num_tokens > 1 ? static_cast<uintptr_t>(stride) : 0;
  const int width = widest_access(
      {address(p.x), address(p.arrived), address(p.peers), address(p.own), static_cast<uintptr_t>(row_bytes), between});
  return with_width(width, [&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
    if (shared_bytes > 0) {  // the largest carveout, so that the routing kernel finds shared memory
      static KernelAttribute<cudaFuncAttributePreferredSharedMemoryCarveout> carveout;
      if (const int status = carveout.set(send_pieces<kBytes>, device, cudaSharedmemCarveoutMaxShared)) return status;
    }
    return launch_pieces("send_pieces", send_pieces<kBytes>, p, row_bytes / kBytes, kMoved, row_bytes, stride, stream,
                         shared_bytes);
  });
}

int receive(const pmo_rank_receive_params& p, cudaStream_t stream) {
  if (const int status = check_rank_receive(p)) return status;
  const int64_t row_bytes = p.hidden * dtype_size(p.dtype), stride = p.own_row_stride * dtype_size(p.dtype);
  if (row_bytes * p.num_tokens == 0) return PMO_OK;
  const uintptr_t between = p.own != nullptr && p.num_ranks * p.rows_per_rank > 1 ? static_cast<uintptr_t>(stride) : 0;
  const std::initializer_list<uintptr_t> values = {
      address(p.arrived), address(p.peers), address(p.own), address(p.out), static_cast<uintptr_t>(row_bytes), between};
  if (p.max_rows_per_token <= 1) {
    return with_width(widest_access(values), [&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value;
      return launch_pieces("copy_pieces", copy_pieces<kBytes>, p, row_bytes / kBytes, kMoved, row_bytes, stride, stream);
    });
  }
  return with_rows(p.dtype, values, [&](auto rows, auto width) -> int {
    constexpr int kWidth = decltype(width)::value;
    if constexpr (kWidth == 0) {
      return fail(PMO_INVALID_ARGUMENT, "rows and out must be aligned to their element size");
    } else {
      return launch_pieces("sum_pieces", sum_pieces<decltype(rows), kWidth>, p, p.hidden / kWidth, kSummed, row_bytes, stride,
                           stream);
    }
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_rank_send_cuda(const pmo_rank_send_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::send);
}

extern "C" int pmo_rank_receive_cuda(const pmo_rank_receive_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::receive);
}
