// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Rows between GPUs that reach each other's memory; which row is where is in pmo/ranks.h.
//
// A warp takes a piece of a token's row, in accesses of up to 16 bytes, as wide as pointers and lengths allow. Blocks of four warps
// take the pieces in order, starting with the tokens of the next rank where tokens are in the order of ranks. So no two ranks write
// to, or read from, the same rank at the same time.
//
// send: the piece is loaded into registers and stored to each place that the token's rows have: on another GPU, here for another GPU
// to fetch, or here for this rank itself. receive: rows are loaded from here or from another GPU, and added up in the order of ranks,
// or copied where a token has at most one. Both kinds of rows alternate, so that a launch keeps the link busy, which takes longest,
// and does its local work meanwhile.
//
// Bytes moved, for X bytes of rows that cross to other ranks and as many that come from there, a share f of them fetched, and Y bytes
// of the rank's own rows (T tokens to two ranks each: X = Y = T * H elements):
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
constexpr int kMinBlocks = 8;  // on a multiprocessor, which limits registers
constexpr int kHeld = 4;       // accesses of a row that a lane moves
constexpr int kSummed = 2;     // accesses of a row that a lane adds up, of two rows at a time
// Blocks of a multiprocessor that send tokens, so that those that arrive can be routed there at the same time: all blocks of that kernel
// start together. The more there are, the longer it waits; with fewer, the link does.
constexpr int kSendingBlocks = 4;

// The piece of a row that a warp has, in accesses.
struct Piece {
  int64_t token, first, end;  // a lane takes `first`, and then every 32nd access up to `end`

  template <typename Params>
  __device__ Piece(const Params& p, int64_t tokens_before, int parts, int held, int64_t accesses) : end(accesses) {
    const WarpShare share(parts);
    token = tokens_before + share.item;
    first = int64_t{share.part} * (held * kWarpSize) + threadIdx.x % kWarpSize;
    if (token >= p.num_tokens) {
      token = -1;
      return;
    }
    token += p.num_tokens / p.num_ranks * ((p.rank + 1) % p.num_ranks);
    if (token >= p.num_tokens) token -= p.num_tokens;
  }
};

// Makes the piece of an output NaN.
template <typename Access>
__device__ void spoil(const Piece& piece, int held, Access* out) {
  Access all_ones;
  memset(&all_ones, 0xFF, sizeof all_ones);
  for (int i = 0; i < held; ++i) {
    if (piece.first + i * kWarpSize < piece.end) out[i * kWarpSize] = all_ones;
  }
}

template <typename Pointer>
__device__ Pointer of_lane(Pointer pointer, int lane) {
  return reinterpret_cast<Pointer>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    send_pieces(const __grid_constant__ pmo_rank_send_params p, int64_t tokens_before, int parts, int64_t row_bytes,
                int64_t stride) {
  using Access = Vector<kBytes>;
  const Piece piece(p, tokens_before, parts, kHeld, row_bytes / kBytes);
  if (piece.token < 0) return;
  const int lane = threadIdx.x % kWarpSize;
  const auto* source = reinterpret_cast<const Access*>(static_cast<const char*>(p.x) + piece.token * stride) + piece.first;
  Access held[kHeld];
  bool loaded = false;  // nothing is loaded before there is a place for it
#pragma unroll 1
  for (int64_t begin = 0; begin < p.max_rows_per_token; begin += kWarpSize) {
    const int64_t entry = begin + lane;
    const int32_t row = entry < p.max_rows_per_token ? __ldg(p.token_rows + piece.token * p.max_rows_per_token + entry) : -1;
    char* const target = sent_to(p, row, row_bytes);
    unsigned left = __ballot_sync(kAllLanes, target != nullptr);
    if (left != 0 && !loaded) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (piece.first + i * kWarpSize < piece.end) held[i] = source[i * kWarpSize];
      }
      loaded = true;
    }
#pragma unroll 1
    while (left != 0) {
      auto* to = reinterpret_cast<Access*>(of_lane(target, WarpRows::take(&left))) + piece.first;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (piece.first + i * kWarpSize < piece.end) to[i * kWarpSize] = held[i];
      }
    }
  }
}

// Copies the rows of tokens with one row at most.
template <int kBytes>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    copy_pieces(const __grid_constant__ pmo_rank_receive_params p, int64_t tokens_before, int parts, int64_t row_bytes,
                int64_t own_stride) {
  using Access = Vector<kBytes>;
  const Piece piece(p, tokens_before, parts, kHeld, row_bytes / kBytes);
  if (piece.token < 0) return;
  auto* out = reinterpret_cast<Access*>(static_cast<char*>(p.out) + piece.token * row_bytes) + piece.first;
  if (is_marked(p.mark)) return spoil(piece, kHeld, out);
  const int32_t row = p.max_rows_per_token == 0 ? -1 : __ldg(p.token_rows + piece.token);
  const bool is_row = row >= 0 && row < p.num_ranks * p.rows_per_rank;
  const char* from = is_row ? received_from(p, row, row_bytes, own_stride) : nullptr;
  if (is_row && from == nullptr) return;
  const auto* source = reinterpret_cast<const Access*>(from) + piece.first;
  Access held[kHeld] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (is_row && piece.first + i * kWarpSize < piece.end) held[i] = source[i * kWarpSize];
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (piece.first + i * kWarpSize < piece.end) out[i * kWarpSize] = held[i];
  }
}

// The tokens' rows as WarpRows takes them.
struct ListedRows {
  int64_t max_rows_per_token, num_rows;
  const int32_t* token_rows;
};

template <typename Rows, int kWidth>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    sum_pieces(const __grid_constant__ pmo_rank_receive_params p, int64_t tokens_before, int parts, int64_t row_bytes,
               int64_t own_stride) {
  using Access = Vector<kWidth * sizeof(typename Rows::Element)>;
  const Piece piece(p, tokens_before, parts, kSummed, p.hidden / kWidth);
  if (piece.token < 0) return;
  auto* out = reinterpret_cast<Access*>(static_cast<char*>(p.out) + piece.token * row_bytes) + piece.first;
  if (is_marked(p.mark)) return spoil(piece, kSummed, out);
  const ListedRows all = {p.max_rows_per_token, p.num_ranks * p.rows_per_rank, p.token_rows};
  Elements<Rows, kWidth> sums[kSummed];
#pragma unroll
  for (int i = 0; i < kSummed; ++i) sums[i].fill(-0.0f);
  Access last[kSummed];  // the only row, if there is one
  int count = 0;
#pragma unroll 1
  for (int64_t begin = 0;; begin += kWarpSize) {
    const WarpRows listed(all, piece.token, begin);
    const char* own_source = listed.is_used() ? received_from(p, listed.row, row_bytes, own_stride) : nullptr;
    count += __popc(listed.used);
#pragma unroll 1
    for (unsigned left = listed.used; left != 0;) {
      const auto* source = reinterpret_cast<const Access*>(of_lane(own_source, WarpRows::take(&left))) + piece.first;
      const bool are_two = left != 0;
      const auto* second =
          are_two ? reinterpret_cast<const Access*>(of_lane(own_source, WarpRows::take(&left))) + piece.first : source;
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

// Launches a kernel of pieces of `held` accesses, `accesses` to a row.
template <typename Params>
int launch_pieces(const char* name, void (*kernel)(Params, int64_t, int, int64_t, int64_t), const Params& p, int64_t accesses,
                  int held, int64_t row_bytes, int64_t stride, cudaStream_t stream, size_t shared_bytes = 0) {
  const auto parts = static_cast<int>(divide_up(accesses, int64_t{held} * kWarpSize));
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
  if (p.leaves_room != 0) {  // memory that nothing uses: there is none for one more block
    DeviceLimits limits;
    if (const int status = current_device(&device, &limits)) return status;
    constexpr int kWithoutAsking = 48 << 10;  // which every kernel may have
    shared_bytes = std::min(limits.shared_per_multiprocessor / (kSendingBlocks + 1), kWithoutAsking);
  }
  const uintptr_t between = p.num_tokens > 1 ? static_cast<uintptr_t>(stride) : 0;
  const int width = widest_access(
      {address(p.x), address(p.arrived), address(p.peers), address(p.own), static_cast<uintptr_t>(row_bytes), between});
  return with_width(width, [&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
    if (shared_bytes > 0) {  // all of it, so that the routing kernel finds some
      static KernelAttribute<cudaFuncAttributePreferredSharedMemoryCarveout> carveout;
      if (const int status = carveout.set(send_pieces<kBytes>, device, cudaSharedmemCarveoutMaxShared)) return status;
    }
    return launch_pieces("send_pieces", send_pieces<kBytes>, p, row_bytes / kBytes, kHeld, row_bytes, stride, stream,
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
      return launch_pieces("copy_pieces", copy_pieces<kBytes>, p, row_bytes / kBytes, kHeld, row_bytes, stride, stream);
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
