// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Row kernels around the grouped GEMMs: tables of experts, zeros in rows of no expert, row sums, SwiGLU and dSwiGLU. All are
// memory-bound.
//
// * grouped_tables: sizes and offsets [E] -> first, stop, tiles, window, counters. One CTA per tile height, a thread per expert,
//   256 experts at a time; prefix sums and the end of the groups carry over. Writes 12 E + 4 P bytes per height.
// * grouped_clear: a warp per row bisects `stop` for its expert and writes zeros to rows of no expert.
// * row_sums: out[r] = sum of values[r, 0 ... W - 1]. A thread per row, since rows are short. Reads 4 M W bytes, writes 4 M.
// * swiglu: act [M, n] = silu(gate) * up for hidden [M, 2 n]. A thread per access of up to 16 bytes. Reads 2 n elements of a row,
//   writes n.
// * swiglu_backward: d_hidden and weights[r] * act from d_act. A warp per row. Reads 3 n elements of a row, writes 3 n. The dot
//   product act . d_act is summed lane by lane, then across the warp by halves.
#include "common/checks.h"
#include "common/grouped_layout.h"
#include "cuda/gemm/expert_ranges.cuh"
#include "cuda/vectors.cuh"
#include "pmo/grouped.h"
#include "pmo/grouped_rows.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

__global__ void __launch_bounds__(kThreads) grouped_tables(pmo_grouped_tables_params p) {
  __shared__ int64_t of_warps[kWarps];
  const int64_t tile_rows = blockIdx.x == 0 ? p.tile_rows : p.other_tile_rows;
  const GroupedLayout layout = {p.num_experts, p.num_chunks};
  int32_t* const first_rows = p.tables + blockIdx.x * layout.size();
  int32_t *const stop = first_rows + layout.stop(), *const tile_starts = first_rows + layout.tiles();
  int32_t* const window = first_rows + layout.window();
  const auto store = [&](int expert, int32_t first, int32_t end, int32_t tiles) {
    first_rows[expert] = first;
    stop[expert] = end;
    tile_starts[expert] = tiles;
  };
  const int32_t tiles_of_all = expert_ranges(p, tile_rows, of_warps, store);
  if (threadIdx.x == 0) tile_starts[p.num_experts] = tiles_of_all;
  __syncthreads();  // the tables are read below
  for (int64_t row_chunk = 0; row_chunk < p.num_chunks; ++row_chunk) {
    int64_t begun = 0;
    for (int64_t chunk = 0; chunk < p.num_experts; chunk += kThreads) {
      const int64_t expert = chunk + threadIdx.x;
      int64_t of_expert = 0;
      if (expert < p.num_experts) {
        const int64_t rows = max(row_chunk * p.chunk_rows - first_rows[expert], int64_t{0});
        of_expert = min(divide_up(rows, tile_rows), int64_t{tile_starts[expert + 1] - tile_starts[expert]});
      }
      begun += scan(of_expert, of_warps, Sum()).all;
    }
    if (threadIdx.x == 0) window[row_chunk] = static_cast<int32_t>(begun);
  }
  if (threadIdx.x != 0) return;
  int32_t* const rest = window + p.num_chunks;
  rest[0] = rest[2] = tiles_of_all;
  rest[1] = rest[3] = rest[4] = 0;
}

__global__ void __launch_bounds__(kThreads) grouped_clear(pmo_grouped_clear_params p) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize; row < p.num_rows;
       row += int64_t{gridDim.x} * kWarps) {
    int64_t low = 0, high = p.num_experts;  // first expert whose rows end after this one
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (__ldg(p.stop + middle) <= row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low < p.num_experts && row >= __ldg(p.first + low)) continue;
    uint4* vectors = reinterpret_cast<uint4*>(static_cast<char*>(p.rows) + row * p.row_size);
    for (int64_t i = lane; i < p.row_size / 16; i += kWarpSize) vectors[i] = make_uint4(0, 0, 0, 0);
  }
}

__global__ void __launch_bounds__(kThreads) row_sums(pmo_row_sums_params p) {
  for (int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x; row < p.num_rows; row += int64_t{gridDim.x} * kThreads) {
    float sum = 0.0f;
    if (__ldg(p.row_to_token + row) >= 0) {
      for (int64_t i = 0; i < p.width; ++i) sum = __fadd_rn(sum, __ldg(p.values + row * p.width + i));
    }
    p.out[row] = sum;
  }
}

__device__ inline float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

template <typename Rows, int kWidth>
__device__ Elements<Rows, kWidth> elements_at(const void* rows, int64_t vector) {
  Elements<Rows, kWidth> elements;
  elements.set(static_cast<const typename Elements<Rows, kWidth>::Access*>(rows)[vector]);
  return elements;
}

template <typename Rows, int kWidth>
__global__ void __launch_bounds__(kThreads) swiglu(pmo_swiglu_params p) {
  const int64_t vectors = p.width / kWidth;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < p.num_rows * vectors; i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / vectors;
    auto gate = elements_at<Rows, kWidth>(p.hidden, i + row * vectors);
    const auto up = elements_at<Rows, kWidth>(p.hidden, i + row * vectors + vectors);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) gate.values[j] = gate.values[j] * sigmoid(gate.values[j]) * up.values[j];
    gate.store(p.act, i);
  }
}

template <typename Rows, int kWidth>
__global__ void __launch_bounds__(kThreads) swiglu_backward(pmo_swiglu_backward_params p) {
  const int64_t vectors = p.width / kWidth, row = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize;
  if (row >= p.num_rows) return;
  const bool is_live = p.row_to_token[row] >= 0;
  const float weight = p.weights[row];
  float sum = 0.0f;
  for (int64_t i = threadIdx.x % kWarpSize; i < vectors; i += kWarpSize) {
    Elements<Rows, kWidth> gate, up, scaled;
    gate.fill(0.0f);
    up.fill(0.0f);
    scaled.fill(0.0f);
    if (is_live) {
      gate = elements_at<Rows, kWidth>(p.hidden, row * 2 * vectors + i);
      up = elements_at<Rows, kWidth>(p.hidden, row * 2 * vectors + vectors + i);
      scaled = elements_at<Rows, kWidth>(p.scaled, row * vectors + i);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float gate_sigmoid = sigmoid(gate.values[j]), silu = gate.values[j] * gate_sigmoid,
                    d_act = scaled.values[j] * weight;
        const float act = Rows::load(Rows::store(silu * up.values[j]));
        sum = __fmaf_rn(act, scaled.values[j], sum);
        gate.values[j] = d_act * up.values[j] * (gate_sigmoid + silu * (1.0f - gate_sigmoid));
        up.values[j] = d_act * silu;
        scaled.values[j] = act * weight;
      }
    }
    gate.store(p.d_hidden, row * 2 * vectors + i);
    up.store(p.d_hidden, row * 2 * vectors + vectors + i);
    scaled.store(p.scaled, row * vectors + i);
  }
  sum = sum_over_warp_by_halves(sum);
  if (threadIdx.x % kWarpSize == 0) p.d_weights[row] = sum;
}

int run_tables(const pmo_grouped_tables_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_tables(p)) return status;
  return launch("grouped_tables", grouped_tables, {p.other_tile_rows > 0 ? 2u : 1u, kThreads}, stream, p);
}

int run_clear(const pmo_grouped_clear_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_clear(p)) return status;
  if (p.num_rows == 0 || p.row_size == 0) return PMO_OK;
  return launch("grouped_clear", grouped_clear, {grid_for(p.num_rows, kWarps), kThreads}, stream, p);
}

int run_row_sums(const pmo_row_sums_params& p, cudaStream_t stream) {
  if (const int status = check_row_sums(p)) return status;
  if (p.num_rows == 0) return PMO_OK;
  return launch("row_sums", row_sums, {grid_for(p.num_rows, kThreads), kThreads}, stream, p);
}

// Returns run(Rows(), elements per access) for the widest access that all arrays and their rows of `columns` columns allow.
template <typename Run>
int in_vectors(int32_t dtype, int64_t columns, std::initializer_list<const void*> arrays, Run run) {
  uintptr_t all = static_cast<uintptr_t>(columns * dtype_size(dtype));
  for (const void* array : arrays) all |= address(array);
  return with_rows(dtype, {all}, [&](auto rows, auto width) {
    if constexpr (decltype(width)::value == 0) {
      return fail(PMO_INTERNAL, "CUDA: rows are not aligned to their elements");
    } else {
      return run(rows, width);
    }
  });
}

int run_swiglu(const pmo_swiglu_params& p, cudaStream_t stream) {
  if (const int status = check_swiglu(p)) return status;
  if (p.num_rows == 0 || p.width == 0) return PMO_OK;
  return in_vectors(p.dtype, p.width, {p.hidden, p.act}, [&](auto rows, auto width) {
    constexpr int kWidth = decltype(width)::value;
    const Grid grid = {grid_for(p.num_rows * (p.width / kWidth), kThreads), kThreads};
    return launch("swiglu", swiglu<decltype(rows), kWidth>, grid, stream, p);
  });
}

int run_swiglu_backward(const pmo_swiglu_backward_params& p, cudaStream_t stream) {
  if (const int status = check_swiglu_backward(p)) return status;
  if (p.num_rows == 0) return PMO_OK;
  return in_vectors(p.dtype, p.width, {p.hidden, p.d_hidden, p.scaled}, [&](auto rows, auto width) {
    const Grid grid = {grid_for(p.num_rows, kWarps, kMaxBlocksOfGrid), kThreads};
    return launch("swiglu_backward", swiglu_backward<decltype(rows), decltype(width)::value>, grid, stream, p);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_grouped_tables_cuda(const pmo_grouped_tables_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::run_tables);
}

extern "C" int pmo_grouped_clear_cuda(const pmo_grouped_clear_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::run_clear);
}

extern "C" int pmo_row_sums_cuda(const pmo_row_sums_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::run_row_sums);
}

extern "C" int pmo_swiglu_cuda(const pmo_swiglu_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::run_swiglu);
}

extern "C" int pmo_swiglu_backward_cuda(const pmo_swiglu_backward_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::run_swiglu_backward);
}

extern "C" int32_t pmo_grouped_capability_cuda(void) {
  int device = 0, major = 0, minor = 0;
  if (!pmo_grouped_product_cuda_is_built()) return 0;
  const cudaError_t errors[] = {cudaGetDevice(&device), cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                                cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)};
  for (const cudaError_t error : errors) {
    if (error == cudaSuccess) continue;
    pmo::cuda::forget(error);
    return 0;
  }
  return 10 * major + minor;
}
