// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Weighted SwiGLU with float8 codes, and its gradients (pmo/paddle_float8.h). A thread has eight neighbouring columns of a row in
// every step: 16 bytes of each bfloat16 array.
//
// Forward: the 16 lanes of a group of 128 columns reduce its amax by shuffles; a warp has two groups of a row. Backward: a CTA of
// 128 threads has a row, and adds the terms of its probability's gradient in the order of the header.
//
// Memory-bound: 5 M n bytes forward, 10 M n backward.
#include <cstdint>

#include "common/checks.h"
#include "common/paddle_float8.h"
#include "cuda/float8.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"
#include "pmo/paddle_float8.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kColumns = kSwigluColumns;
constexpr int kGroupLanes = static_cast<int>(kGroupColumns) / kColumns;
constexpr int kWarpColumns = kWarpSize * kColumns;
constexpr int kWarpsOfBlock = 8;

static_assert(kColumns * sizeof(__nv_bfloat16) == sizeof(uint4), "a step of a thread is one access");

using EightColumns = Elements<BFloat16Rows, kColumns>;

// Loads min(kColumns, left) elements, and 0 beyond.
template <bool kVectors>
__device__ EightColumns load_columns(const void* row, int64_t left) {
  EightColumns loaded;
  if constexpr (kVectors) {
    loaded.set(left > 0 ? __ldg(static_cast<const uint4*>(row)) : uint4{});
  } else {
    const auto* elements = static_cast<const __nv_bfloat16*>(row);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) loaded.values[i] = i < left ? BFloat16Rows::load(elements[i]) : 0.0f;
  }
  return loaded;
}

template <bool kVectors>
__device__ void store_columns(const EightColumns& values, void* row, int64_t left) {
  if constexpr (kVectors) {
    values.store(row, 0);
  } else {
    auto* elements = static_cast<__nv_bfloat16*>(row);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i < left) elements[i] = BFloat16Rows::store(values.values[i]);
    }
  }
}

template <bool kVectors>
__global__ void __launch_bounds__(kWarpsOfBlock* kWarpSize)
    swiglu_rows(const __grid_constant__ pmo_paddle_swiglu_params p, const __grid_constant__ PaddleRule rule, int32_t parts,
                int64_t first_row, int64_t num_rows) {
  const WarpShare share(parts);
  if (share.item >= num_rows) return;
  const int64_t row = first_row + share.item;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t column = int64_t{share.part} * kWarpColumns + lane * kColumns, left = p.width - column;
  const auto* gates = static_cast<const __nv_bfloat16*>(p.x) + row * 2 * p.width + column;
  const EightColumns gate = load_columns<kVectors>(gates, left), up = load_columns<kVectors>(gates + p.width, left);
  const float prob = p.probs == nullptr ? 1.0f : __ldg(p.probs + row);
  float values[kColumns], amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    values[i] = i < left ? weighted_swiglu(gate.values[i], up.values[i], prob) : 0.0f;
    amax = fmaxf(amax, fabsf(values[i]));  // fmaxf ignores NaN
  }
#pragma unroll
  for (int lanes = 1; lanes < kGroupLanes; lanes *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
  if (left <= 0) return;
  const float multiplier = rule.multiplier(amax);
  uint32_t words[kColumns / 4];
  float8_codes(values, multiplier, words);
  uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * p.width + column;
  if constexpr (kVectors) {
    *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i < left) codes[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
    }
  }
  if (lane % kGroupLanes == 0) {
    p.scales[row * divide_up(p.width, kGroupColumns) + column / kGroupColumns] = 1.0f / multiplier;
  }
}

int quantize(const pmo_paddle_swiglu_params& p, cudaStream_t stream) {
  if (const int status = check_paddle_swiglu(p)) return status;
  if (p.num_rows == 0 || p.width == 0) return PMO_OK;
  const bool vectors = address(p.x) % 16 == 0 && address(p.codes) % kColumns == 0 && p.width % kColumns == 0;
  const auto parts = static_cast<int32_t>(divide_up(p.width, int64_t{kWarpColumns}));
  return in_grids(p.num_rows, parts, kWarpsOfBlock, [&](int64_t first, int64_t count) {
    const auto blocks = static_cast<unsigned>(divide_up(count * parts, int64_t{kWarpsOfBlock}));
    const auto kernel = vectors ? swiglu_rows<true> : swiglu_rows<false>;
    return launch("swiglu_rows", kernel, {blocks, kWarpsOfBlock * kWarpSize}, stream, p, paddle_rule(p), parts, first, count);
  });
}

// Sum over the CTA, halves onto each other; thread 0 receives it. It synchronises all threads.
__device__ float sum_over_partials(float value) {
  __shared__ float partial[kSwigluPartials];
  __syncthreads();
  partial[threadIdx.x] = value;
#pragma unroll
  for (int half = kSwigluPartials / 2; half >= kWarpSize; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] = __fadd_rn(partial[threadIdx.x], partial[threadIdx.x + half]);
  }
  return threadIdx.x < kWarpSize ? sum_over_warp_by_halves(partial[threadIdx.x]) : 0.0f;
}

template <bool kVectors>
__global__ void __launch_bounds__(kSwigluPartials) swiglu_gradients(const __grid_constant__ pmo_paddle_swiglu_backward_params p) {
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
    const float prob = p.width == 0 ? 0.0f : __ldg(p.probs + row);
    float sum = 0.0f;
#pragma unroll 1
    for (int64_t column = int64_t{threadIdx.x} * kColumns; column < p.width; column += kSwigluPartials * kColumns) {
      const int64_t left = p.width - column, of_x = row * 2 * p.width + column, of_out = row * p.width + column;
      const auto* gates = static_cast<const __nv_bfloat16*>(p.x) + of_x;
      EightColumns gate = load_columns<kVectors>(gates, left), up = load_columns<kVectors>(gates + p.width, left);
      EightColumns out = load_columns<kVectors>(static_cast<const __nv_bfloat16*>(p.d_out) + of_out, left);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (i >= left) break;
        const SwigluGradient found(gate.values[i], up.values[i], out.values[i], prob);
        gate.values[i] = found.d_gate;
        up.values[i] = found.d_up;
        out.values[i] = found.out;
        sum = __fadd_rn(sum, found.term);
      }
      auto* d_gates = static_cast<__nv_bfloat16*>(p.d_x) + of_x;
      store_columns<kVectors>(gate, d_gates, left);
      store_columns<kVectors>(up, d_gates + p.width, left);
      store_columns<kVectors>(out, static_cast<__nv_bfloat16*>(p.out) + of_out, left);
    }
    sum = sum_over_partials(sum);
    if (threadIdx.x == 0) p.d_probs[row] = sum;
  }
}

int differentiate(const pmo_paddle_swiglu_backward_params& p, cudaStream_t stream) {
  if (const int status = check_paddle_swiglu_backward(p)) return status;
  if (p.num_rows == 0) return PMO_OK;
  const bool vectors = widest_access({address(p.x), address(p.d_out), address(p.d_x), address(p.out)}) == 16;
  const auto kernel = vectors && p.width % kColumns == 0 ? swiglu_gradients<true> : swiglu_gradients<false>;
  return launch("swiglu_gradients", kernel, {grid_for(p.num_rows, 1), kSwigluPartials}, stream, p);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_paddle_swiglu_cuda(const pmo_paddle_swiglu_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::quantize);
}

extern "C" int pmo_paddle_swiglu_backward_cuda(const pmo_paddle_swiglu_backward_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::differentiate);
}
