// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// permute on the GPU: every source row is read once and written to each of its rows.
//
// Rows in whole 16-byte accesses on sm_90 and newer go through the fused kernel (fused.cu). Here is what serves all others: a block per
// token: its threads walk the row in accesses of up to 16 bytes, as wide as pointers and lengths allow, and write each to
// the token's rows. A second kernel with a warp per row zeroes the padding rows. Bytes moved: (T + N) * (H + S) elements.
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "common/checks.h"
#include "cuda/fused.h"
#include "cuda/launch.cuh"
#include "cuda/padding.cuh"
#include "cuda/vectors.cuh"
#include "pmo/permute.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 128;

// One array of rows to move: the tokens or their scales. Lengths in accesses.
struct Strip {
  const char* source;
  int64_t source_stride;  // bytes
  char* target;
  int64_t row_bytes;
};

template <int kBytes>
__global__ void move_tokens(Strip strip, int64_t num_tokens, int64_t topk, int64_t num_rows, const int32_t* slot_to_row) {
  using Access = Vector<kBytes>;
  const int64_t accesses = strip.row_bytes / kBytes;
  for (int64_t token = blockIdx.x; token < num_tokens; token += gridDim.x) {
    const Access* source = reinterpret_cast<const Access*>(strip.source + token * strip.source_stride);
    const int32_t* rows = slot_to_row + token * topk;
    for (int64_t i = threadIdx.x; i < accesses; i += kThreads) {
      const Access access = source[i];
      for (int64_t k = 0; k < topk; ++k) {
        const int64_t row = rows[k];
        if (row >= 0 && row < num_rows) reinterpret_cast<Access*>(strip.target + row * strip.row_bytes)[i] = access;
      }
    }
  }
}

template <int kBytes>
__global__ void zero_padding(Strip strip, int64_t num_rows, const int32_t* row_to_token) {
  zero_padding_rows<kBytes>(strip.target, strip.row_bytes, row_to_token, num_rows);
}

int move(const Strip& strip, const pmo_permute_params& p, bool fill, cudaStream_t stream) {
  if (strip.target == nullptr || strip.row_bytes == 0 || p.num_rows == 0) return PMO_OK;
  const int width = widest_access({address(strip.source), address(strip.target), static_cast<uintptr_t>(strip.row_bytes),
                                   p.num_tokens > 1 ? static_cast<uintptr_t>(strip.source_stride) : uintptr_t{0}});
  return with_width(width, [&](auto bytes) -> int {
    constexpr int kBytes = decltype(bytes)::value;
    if (p.num_tokens * p.topk > 0) {
      move_tokens<kBytes>
          <<<grid_for(p.num_tokens, 1), kThreads, 0, stream>>>(strip, p.num_tokens, p.topk, p.num_rows, p.slot_to_row);
      PMO_CUDA_LAUNCHED("move_tokens");
    }
    if (fill)
      zero_padding<kBytes>
          <<<grid_for(p.num_rows, kThreads / kWarpSize), kThreads, 0, stream>>>(strip, p.num_rows, p.row_to_token);
    PMO_CUDA_LAUNCHED("zero_padding");
    return PMO_OK;
  });
}

int permute(const pmo_permute_params& p, cudaStream_t stream) {
  if (const int status = check_permute(p)) return status;
  const int64_t itemsize = dtype_size(p.dtype);
  const int64_t scale_itemsize = dtype_size(p.scale_dtype);
  if (fused_moves(p)) {
    const int status = launch_fused(nullptr, &p, stream);
    if (status != kNotLaunched) return status;
  }
  const Strip rows = {static_cast<const char*>(p.x), p.x_row_stride * itemsize, static_cast<char*>(p.rows), p.hidden * itemsize};
  const Strip scales = {static_cast<const char*>(p.scale), p.scale_row_stride * scale_itemsize, static_cast<char*>(p.row_scales),
                        p.scale_cols * scale_itemsize};
  if (const int status = move(rows, p, (p.fill & PMO_FILL_ROWS) != 0, stream)) return status;
  return move(scales, p, (p.fill & PMO_FILL_SCALES) != 0, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_permute_cuda(const pmo_permute_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::permute);
}
